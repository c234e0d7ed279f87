"""A model whose steps are compiled: a few columns a row, on a CPU, with packed weights.

Long passes, such as prompts, go through the module as it is. A step is traced once for all widths, spans and
capacities, and kept on disk by inductor; what it reads of a cache is what is filled of it. Rows and columns
that are one are compiled apart, because torch takes a size of one for a constant.
"""

from __future__ import annotations

import logging
import subprocess
import time
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.compile_cache import StepFile
from llama_ssp.models.kernels.build import complaint
from llama_ssp.models.kernels.linear import pack
from llama_ssp.models.kv_cache import Feed, RaggedCache
from llama_ssp.models.quantization import quicken

log = logging.getLogger(__name__)

Kind = tuple[bool, bool]  # of a step: whether it has several rows, and several columns

WIDEST = 72  # columns a row of a step: the longest draft there may be, what a draft lags, and the next token
Step = Callable[..., Tensor]
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]  # of a step


class StepCache:
    """The caches of all layers during one step, as a model's attention calls them."""

    is_compileable = False

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], slots_BW: Tensor, span: int, masks: dict[str, Tensor]
    ) -> None:
        self._keys, self._values, self._span, self.masks = keys, values, span, masks
        self._slots_BW = slots_BW
        self._row_B1 = torch.arange(slots_BW.shape[0], device=slots_BW.device)[:, None]

    def update(
        self, key_BHWD: Tensor, value_BHWD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the step's keys and values; returns all that it may look at."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._row_B1, :, self._slots_BW] = key_BHWD.transpose(1, 2)
        values[self._row_B1, :, self._slots_BW] = value_BHWD.transpose(1, 2)
        return keys[:, :, : self._span], values[:, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given."""
        return 0


def compiled(causal: CausalModel) -> CausalModel:
    """The model with packed layers and compiled steps; as it is, with a line in the log, if it cannot be."""
    return _with_kernels(causal, CompiledModel)


def quickened(causal: CausalModel) -> CausalModel:
    """The model, eager, with our kernel in its 8-bit layers; else as it is, with a line in the log."""

    def quick(model: CausalModel) -> CausalModel:
        quicken(model.module)
        log.info("engine: %s has 8-bit layers of our own", model.name)
        return model

    return _with_kernels(causal, quick)


def _with_kernels(causal: CausalModel, made: Callable[[CausalModel], CausalModel]) -> CausalModel:
    """What needs kernels, which may be still to be built."""
    try:
        return made(causal)
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("engine: %s runs eagerly: its kernel was not built: %s", causal.name, complaint(error))
        return causal


class CompiledModel(CausalModel):
    """The same logits, sooner: up to rounding in 16 bit, and in fp32 the same tokens."""

    def __init__(self, causal: CausalModel) -> None:
        """Takes over the model's module, whose linear layers are packed in place."""
        super().__init__(causal.module, causal.name, causal.vocab, causal.device)
        self.caches = causal.caches
        self._ready()
        self._steps: dict[Kind, Step] = {}
        self._failed = False

    def _ready(self) -> None:
        """What is done to the module before steps are compiled."""
        pack(self.module)
        quicken(self.module)

    @torch.inference_mode()
    def prepare(self, kind: Kind) -> None:
        """Compiles a kind of step before it is needed, on a text of no meaning."""
        rows, width = 2 if kind[0] else 1, 3 if kind[1] else 1
        cache, device = self.new_cache(rows, 8), self.device
        for start, count in ((0, 2), (2, width)):
            feed = Feed((start,) * rows, (count,) * rows, 8, device)
            token_BW = torch.zeros(rows, count, dtype=torch.int64, device=device)
            self.logits(token_BW, feed, cache, last_only=start == 0)

    @torch.inference_mode()
    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        layers = cache.layers()
        # A step tells the scale of a column by its position alone; so it is for all but texts just given.
        mixed = self.scale is not None and any(
            g > self.scale.limit > s for g, s in zip(feed.given, feed.start, strict=True)
        )
        if last_only or feed.width > WIDEST or not layers or self._failed or mixed:
            return super().logits(token_BW, feed, cache, last_only)
        given_BW, (rows, width) = token_BW, token_BW.shape
        if rows == 1 and width == 1:  # two columns are as fast as one, and nothing is compiled for it
            token_BW = torch.nn.functional.pad(token_BW, (0, 1))
        kind = (rows > 1, token_BW.shape[1] > 1)
        arguments = self._arguments(token_BW, feed, layers)
        if kind in self._steps:
            return self._run(kind, arguments, cache)[:, :width]
        logits_BWV = self._first(kind, arguments)
        if logits_BWV is None:
            return super().logits(given_BW, feed, cache, last_only)
        return logits_BWV[:, :width]

    def _arguments(self, token_BW: Tensor, feed: Feed, layers: list[tuple[Tensor, Tensor]]) -> Arguments:
        """What a step is called with: the span is what is filled of the cache."""
        return (
            token_BW,
            torch.tensor(feed.start)[:, None],
            torch.tensor(feed.count)[:, None],
            torch.arange(token_BW.shape[1]),
            torch.arange(max(feed.span, 2)),
            [keys for keys, _ in layers],
            [values for _, values in layers],
        )

    def _run(self, kind: Kind, arguments: Arguments, _cache: RaggedCache) -> Tensor:
        """A step that has been compiled."""
        return self._steps[kind](*arguments)

    def _first(self, kind: Kind, arguments: Arguments) -> Tensor | None:
        """The first step of its kind, which compiles it; None where the model is not one to be compiled."""
        began, kept = time.perf_counter(), StepFile(self, kind) if self.device.type == "cpu" else None
        loaded = kept.load() if kept else None
        if loaded is not None:
            log.info("engine: loaded %s for %s", self.name, _in_words(kind))
            self._steps[kind] = loaded
            return self._steps[kind](*arguments)
        log.info("engine: compiling %s for %s", self.name, _in_words(kind))
        try:
            step = self._made(kind, _sizes_that_vary(arguments, kind), kept)
            logits_BWV = step(*arguments)
        except Exception as error:  # whatever the compiler meets in a module it does not know
            said = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("engine: %s runs eagerly: it does not compile: %s", self.name, said[0][:200])
            self._failed = True
            return None
        log.info("engine: compiled %s in %.1f s", self.name, time.perf_counter() - began)
        self._steps[kind] = step
        return logits_BWV

    def _made(self, kind: Kind, arguments: Arguments, kept: StepFile | None) -> Step:
        """The step's program; what is to be kept is compiled for such arguments before it is called."""
        step: Any = self._compiled(kind)
        if kept is None or not hasattr(step, "aot_compile"):
            return cast(Step, step)
        try:
            made = step.aot_compile((arguments, {}))
        except Exception as error:  # such as a restart of the analysis, which an ordinary call makes
            log.debug("engine: a step of %s is not kept: %s", self.name, type(error).__name__)
            return cast(Step, step)
        made.disable_guard_check()
        kept.save(made)
        return cast(Step, made)

    def _compiled(self, kind: Kind) -> Step:
        """The step's program. Its own copy of the code: torch keeps programs by the code they are made of.

        Nothing is checked before it runs: what could be otherwise is told apart by `kind`.
        """
        made = traced(self)
        code = made.__code__.replace(co_name=f"step_{kind[0]:d}{kind[1]:d}")
        function = types.FunctionType(code, made.__globals__, code.co_name, None, made.__closure__)
        return torch.compile(
            function, fullgraph=True,
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False},
        )  # fmt: skip

    def _masks(self, position_BW: Tensor, slot_S: Tensor) -> dict[str, Tensor]:
        """As Feed.visible and CausalModel._mask have them."""
        masks = {}
        for kind, window in self.windows.items():
            visible_BWS = slot_S <= position_BW[..., None]
            if window is not None:
                visible_BWS = visible_BWS & (slot_S > position_BW[..., None] - window)
            masks[kind] = visible_BWS[:, None]
            if self.additive_mask:
                floor = torch.finfo(self.dtype).min
                zeros = torch.zeros_like(masks[kind], dtype=self.dtype)
                masks[kind] = zeros.masked_fill(~masks[kind], floor)
        return masks


def traced(model: CompiledModel) -> Step:
    """One step as torch traces it: everything that differs from call to call is an argument."""

    def step(
        token_BW: Tensor, start_B1: Tensor, count_B1: Tensor, column_W: Tensor, slot_S: Tensor,
        keys: list[Tensor], values: list[Tensor],
    ) -> Tensor:  # fmt: skip
        real_BW = column_W < count_B1
        position_BW = torch.where(real_BW, start_B1 + column_W, 0)
        slots_BW = torch.where(real_BW, position_BW, keys[0].shape[2] - 1)
        masks = model._masks(position_BW, slot_S)
        if model.scale:
            model.scale.beyond_BW = position_BW >= model.scale.limit
        logits: Tensor = model.module(
            input_ids=token_BW,
            position_ids=position_BW,
            attention_mask=masks if model.mask_by_kind else next(iter(masks.values())),
            past_key_values=StepCache(keys, values, slots_BW, slot_S.shape[0], masks),
            use_cache=True,
        ).logits
        if model.scale:
            model.scale.beyond_BW = None
        return logits

    return step


def _sizes_that_vary(arguments: Arguments, kind: Kind) -> Arguments:
    """The arguments, with the sizes marked that the next call may have otherwise."""
    many_rows, many_columns = kind
    token_BW, start_B1, count_B1, column_W, slot_S, keys, values = arguments
    for tensor, rows, columns in (
        (token_BW, 0, 1), (start_B1, 0, None), (count_B1, 0, None), (column_W, None, 0),
    ):  # fmt: skip
        if many_rows and rows is not None:
            torch._dynamo.mark_dynamic(tensor, rows)
        if many_columns and columns is not None:
            torch._dynamo.mark_dynamic(tensor, columns)
    torch._dynamo.mark_dynamic(slot_S, 0)
    for tensor in (*keys, *values):
        torch._dynamo.mark_dynamic(tensor, (0, 2) if many_rows else 2)
    return arguments


def _in_words(kind: Kind) -> str:
    return f"{'several rows' if kind[0] else 'one row'}, {'several columns' if kind[1] else 'one column'}"
