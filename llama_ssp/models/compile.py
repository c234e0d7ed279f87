"""A model with compiled steps: a few columns a row, on a CPU, with packed weights.

Long passes, such as prompts, go through the module as it is. A step is traced once for all widths, spans and
capacities, and inductor keeps it on disk; it reads the filled part of a cache. Steps of one row, or of one
column, are compiled apart, because torch makes a size of one a constant.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.kernels.build import cache_folder, complaint, is_ours, processor
from llama_ssp.models.kernels.linear import pack
from llama_ssp.models.kv_cache import Feed, RaggedCache, StepCache, positions, visible
from llama_ssp.models.quantization import quicken

log = logging.getLogger(__name__)

Kind = tuple[bool, bool]  # of a step: has it several rows, has it several columns
Step = Callable[..., Tensor]
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]  # of a step

FOLDER = Path(__file__).parent
# The code that a step is made from.
TRACED = [FOLDER / f"{name}.py" for name in ("causal_lm", "compile", "families", "kv_cache", "quantization")]
TRACED += [FOLDER / "kernels" / f"{name}.{kind}" for name in ("int8", "linear") for kind in ("cpp", "py")]
WIDEST = 72  # columns of a step: the longest draft, what a draft lags, and the next token


def compiled(causal: CausalModel) -> CausalModel:
    """The model with packed layers and compiled steps; if there is no kernel, unchanged, and logged."""
    return _with_kernels(causal, CompiledModel)


def quickened(causal: CausalModel) -> CausalModel:
    """The model, eager, with our kernel in its 8-bit layers; if there is none, unchanged, and logged."""

    def quick(model: CausalModel) -> CausalModel:
        quicken(model.module)
        log.info("engine: %s has 8-bit layers of our own", model.name)
        return model

    return _with_kernels(causal, quick)


def _with_kernels(causal: CausalModel, change: Callable[[CausalModel], CausalModel]) -> CausalModel:
    try:
        return change(causal)  # which may build a kernel
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("engine: %s runs eagerly: its kernel was not built: %s", causal.name, complaint(error))
        return causal


class CompiledModel(CausalModel):
    """The same logits, up to rounding in 16 bit, in less time."""

    def __init__(self, causal: CausalModel) -> None:
        """Takes over the model's module and packs its linear layers in place."""
        super().__init__(causal.module, causal.name, causal.vocab, causal.device)
        self.caches = causal.caches
        self._steps: dict[Kind, Step] = {}
        self._failed = False
        self._change_layers()

    def _change_layers(self) -> None:
        pack(self.module)
        quicken(self.module)

    @torch.inference_mode()
    def prepare(self, kind: Kind) -> None:
        """Compiles a kind of step before it is needed, on a text without meaning."""
        rows, width = 2 if kind[0] else 1, 3 if kind[1] else 1
        cache, device = self.new_cache(rows, 8), self.device
        for start, count in ((0, 2), (2, width)):
            feed = Feed((start,) * rows, (count,) * rows, 8, device)
            token_BW = torch.zeros(rows, count, dtype=torch.int64, device=device)
            self.logits(token_BW, feed, cache, last_only=start == 0)

    @torch.inference_mode()
    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        layers = cache.layers()
        # A step takes a column's scale from its position alone: wrong only while a long text is first read.
        mixed = self.scale is not None and any(
            g > self.scale.limit > s for g, s in zip(feed.given, feed.start, strict=True)
        )
        if not (last_only or feed.width > WIDEST or not layers or self._failed or mixed):
            (rows, width), padded_BW = token_BW.shape, token_BW
            if rows == width == 1:  # two columns are as fast as one, which then needs no program of its own
                padded_BW = torch.nn.functional.pad(token_BW, (0, 1))
            kind = (rows > 1, padded_BW.shape[1] > 1)
            arguments = self._arguments(padded_BW, feed, layers)
            found = self._run(kind, arguments, cache) if kind in self._steps else self._first(kind, arguments)
            if found is not None:
                return found[:, :width]
        return super().logits(token_BW, feed, cache, last_only)

    def _arguments(self, token_BW: Tensor, feed: Feed, layers: list[tuple[Tensor, Tensor]]) -> Arguments:
        """The arguments of a step; its span is the filled part of the cache."""
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
        """The first step of its kind, which is loaded or compiled; None if the model cannot be compiled."""
        began, kept = time.perf_counter(), StepFile(self, kind) if self.device.type == "cpu" else None
        sizes = zip(("row", "column"), kind, strict=True)
        words = ", ".join(f"several {name}s" if several else f"one {name}" for name, several in sizes)
        step = kept.load() if kept else None
        if step is not None:
            log.info("engine: loaded %s for %s", self.name, words)
            self._steps[kind] = step
            return step(*arguments)  # type: ignore[no-any-return]
        log.info("engine: compiling %s for %s", self.name, words)
        try:
            step = self._made(kind, _sizes_that_vary(arguments, kind), kept)
            logits_BWV = step(*arguments)
        except Exception as error:  # whatever the compiler raises in a module that it does not know
            said = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("engine: %s runs eagerly: it does not compile: %s", self.name, said[0][:200])
            self._failed = True
            return None
        log.info("engine: compiled %s in %.1f s", self.name, time.perf_counter() - began)
        self._steps[kind] = step
        return logits_BWV

    def _made(self, kind: Kind, arguments: Arguments, kept: StepFile | None) -> Step:
        """The step's program; one that is kept is compiled for such arguments before it is called."""
        step: Any = self._compiled(kind)
        if kept is not None and hasattr(step, "aot_compile"):
            try:
                step = step.aot_compile((arguments, {}))
                step.disable_guard_check()
                kept.save(step)
            except Exception as error:  # such as a restart of the analysis, which an ordinary call makes
                log.debug("engine: a step of %s is not kept: %s", self.name, type(error).__name__)
        return step  # type: ignore[no-any-return]

    def _compiled(self, kind: Kind) -> Step:
        """The step's program, from a copy of the code: torch keeps programs by the code they are made from.

        No guards are checked before it runs: `kind` tells apart what could differ.
        """
        made = traced(self)
        code = made.__code__.replace(co_name=f"step_{kind[0]:d}{kind[1]:d}")
        function = types.FunctionType(code, made.__globals__, code.co_name, None, made.__closure__)
        unguarded: Any = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False}
        return torch.compile(function, fullgraph=True, options=unguarded)


def traced(model: CompiledModel) -> Step:
    """One step as torch traces it: everything that differs from call to call is an argument."""

    def step(
        token_BW: Tensor, start_B1: Tensor, count_B1: Tensor, column_W: Tensor, slot_S: Tensor,
        keys: list[Tensor], values: list[Tensor],
    ) -> Tensor:  # fmt: skip
        position_BW = positions(start_B1, count_B1, column_W)
        slots_BW = positions(start_B1, count_B1, column_W, padding=keys[0].shape[2] - 1)
        windows = model.windows.items()
        masks = {kind: model._mask(visible(position_BW, slot_S, window)) for kind, window in windows}
        cache = StepCache(list(zip(keys, values, strict=True)), slots_BW, slot_S.shape[0], masks)
        beyond_BW = position_BW >= model.scale.limit if model.scale else None
        return model._forward(token_BW, position_BW, cache, beyond_BW)

    return step


def _sizes_that_vary(arguments: Arguments, kind: Kind) -> Arguments:
    """The arguments, with those sizes marked that may differ in the next call."""
    several_rows, several_columns = kind
    token_BW, start_B1, count_B1, column_W, slot_S, keys, values = arguments
    rows = [(tensor, 0) for tensor in (token_BW, start_B1, count_B1, *keys, *values)]
    columns = [(token_BW, 1), (column_W, 0)]
    always = [(slot_S, 0), *((tensor, 2) for tensor in (*keys, *values))]
    for tensor, size in rows * several_rows + columns * several_columns + always:
        torch._dynamo.mark_dynamic(tensor, size)
    return arguments


class StepFile:
    """A compiled step on disk, in inductor's cache folder: the next start loads it and traces nothing.

    Its name is a hash of all that it was made from; weights are not in it. It may not exist yet.
    """

    def __init__(self, model: Any, kind: tuple[bool, bool]) -> None:
        self._model = model
        config = model.module.config.to_json_string(use_diff=False)
        versions = torch.__version__, transformers.__version__, torch.get_num_threads(), processor()
        parts = *versions, model.module, config, model.dtype, model.device, kind
        code = [file.read_text(encoding="utf-8") for file in TRACED]
        name = hashlib.sha256("\0".join([*map(str, parts), *code]).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"step-{name}.bin"

    def load(self) -> Any | None:
        """The step, ready to be called; None if there is none that works.

        What is in the file is run: only this user may be able to write it and its folder.
        """
        try:
            if not is_ours(self.path):
                return None
            with self.path.open("rb") as file:
                step: Any = torch.compiler.load_compiled_function(file, external_data={"model": self._model})
            step.disable_guard_check()
        except Exception as error:  # whatever torch raises for a file that is not whole
            log.debug("engine: %s: %s: %s", self.path, type(error).__name__, error)
            return None
        return step

    def save(self, step: Any) -> None:
        """Writes the step; if that fails, the next start compiles again."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            step.save_compiled_function(str(part), external_data={"model": self._model})
            part.chmod(0o600)
            part.replace(self.path)
        except Exception as error:  # whatever torch finds in a module that it cannot write
            part.unlink(missing_ok=True)
            log.debug("engine: a step of %s is not kept: %s", self._model.name, error)
