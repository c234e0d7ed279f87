"""A trained head in memory, and its steps, eager or compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.distributed.comm import ALONE
from llama_ssp.models import attention
from llama_ssp.models.decoder import Attention, KeysValues
from llama_ssp.models.heads.dflash import DFlash
from llama_ssp.models.heads.eagle3 import Eagle3
from llama_ssp.models.heads.settings import DFlashSettings, HeadSettings
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.models.kv_cache import Tally
from llama_ssp.models.programs import Part, Program, ProgramFile, compiled
from llama_ssp.models.quantization import scales_of
from llama_ssp.models.slot_cache import SlotCache
from llama_ssp.models.steps import WIDEST

log = logging.getLogger(__name__)


class HeadModel:
    """A head on one device. `vocab` and `context` are of the texts that it reads, in the target's tokens."""

    ranks = ALONE
    fast = False

    def __init__(
        self, layers: nn.Module, config: Any, taps: tuple[int, ...], name: str, ids_E: Tensor | None = None,
        shared: tuple[Tensor, ...] = (),
    ) -> None:  # fmt: skip
        """`ids_E`: the target's ids of the head's tokens; None if they are the same.

        `shared`: tensors of the target's, which count there.
        """
        self.config, self.name, self.taps = config, name, taps
        self.vocab, self.context = int(config.vocab_size), int(config.max_position_embeddings)
        weight = next(layers.parameters())
        self.dim, self.device, self.dtype = int(config.hidden_size), weight.device, weight.dtype
        self.ids_E = None if ids_E is None else ids_E.to(self.device)
        self.caches, self._layers, self._shared = Tally(), layers, {tensor.data_ptr() for tensor in shared}

    @property
    def weights_bytes(self) -> int:
        tensors = [*self._layers.parameters(), *self._layers.buffers(), *scales_of(self._layers)]
        if self.ids_E is not None:
            tensors.append(self.ids_E)
        return sum({t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in self._shared}.values())

    @property
    def held_bytes(self) -> int:
        return self.weights_bytes + self.caches.most

    def new_cache(self, rows: int, capacity: int) -> Any:
        """A cache of the head's own kind."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Loads or compiles the steps before they are needed."""


Spans = list[tuple[int, int, int]]  # of rows a number, the first position and how many there are


def _slots_of(head: HeadModel, attentions: list[Attention], rows: int, capacity: int) -> SlotCache:
    shapes = [(own.sizes[1] // own.head_dim, own.head_dim) for own in attentions]
    return SlotCache.of(rows, capacity, shapes, head.dtype, head.device, head.caches)


class ChainedHead(HeadModel):
    """A head that drafts one token after the other; z is what it makes of g and a token, and the next g."""

    def new_states(self, rows: int, window: int) -> Tensor:
        """Room for g of `window` positions of each row, (rows * window, H)."""
        state_NH = torch.empty(rows * window, self.dim, dtype=self.dtype, device=self.device)
        self.caches.add(state_NH)
        return state_NH

    def fused(self, state_TX: Tensor) -> Tensor:
        """g, (T, H), of the target's hidden states."""
        raise NotImplementedError

    def states(self, token_T: Tensor, g_TH: Tensor, rows: Spans, cache: Any) -> Tensor:
        """z, (T, H), of tokens and their g; `rows` has a row's number, its start and how many there are."""
        raise NotImplementedError

    def logits(self, z_RH: Tensor) -> Tensor:
        """Of the head's own tokens, (R, E)."""
        raise NotImplementedError


class DFlashModel(HeadModel):
    """A head that gives all drafts in one pass. It runs eagerly: there is one pass a round."""

    def __init__(self, head: DFlash, config: Any, settings: DFlashSettings, *how: Any) -> None:
        super().__init__(head, config, *how)
        self.head, self.width, self.drafts = head, settings.width, settings.drafts
        self.mask_token = settings.mask_token

    def new_cache(self, rows: int, capacity: int) -> SlotCache:
        return _slots_of(self, self.head.attentions, rows, capacity)

    @torch.inference_mode()
    def remember(self, state_TX: Tensor, rows: Spans, cache: SlotCache) -> None:
        """Reads the target's hidden states of these positions."""
        self.head.remember(state_TX.to(self.device, self.dtype), self._feed(rows, cache), cache.layers)

    @torch.inference_mode()
    def logits(self, token_R: Tensor, position: list[int], rows: list[int], cache: SlotCache) -> Tensor:
        """Logits of all drafts of these rows, (R, drafts, E); of each its last token, and the position."""
        token_RW = torch.full((len(rows), self.width), self.mask_token, device=self.device)
        token_RW[:, 0] = token_R.to(self.device).clamp(max=self.vocab - 1)
        spans = [(row, start, self.width) for row, start in zip(rows, position, strict=True)]
        logit_TE = self.head(token_RW.flatten(), self._feed(spans, cache), cache.layers)
        found: Tensor = logit_TE.view(len(rows), self.width, -1)[:, self.width - self.drafts :]
        return found

    def _feed(self, rows: Spans, cache: SlotCache) -> attention.Feed:
        places = [(row * cache.capacity, start, count) for row, start, count in rows]
        return attention.Feed.of(places, self.device, attention.attend_blocks)


class Eagle3Model(ChainedHead):
    """An EAGLE-3 head."""

    def __init__(
        self, head: Eagle3, config: Any, settings: HeadSettings, *how: Any, fast: bool = False
    ) -> None:
        super().__init__(head, config, *how)
        self.head, self.settings, self.fast = head, settings, fast
        self.attend: attention.Attend = attention.attend_rows
        if fast and self.device.type == "cpu":
            self.attend = attention_kernel.attend
        self._programs: list[Program] = []

    def new_cache(self, rows: int, capacity: int) -> SlotCache:
        return _slots_of(self, [self.head.attention], rows, capacity)

    @torch.inference_mode()
    def fused(self, state_TX: Tensor) -> Tensor:
        return self.head.fused(state_TX.to(self.device, self.dtype))

    @torch.inference_mode()
    def states(self, token_T: Tensor, g_TH: Tensor, rows: Spans, cache: SlotCache) -> Tensor:
        feed = attention.Feed.of(
            [(row * cache.capacity, start, count) for row, start, count in rows], self.device, self.attend
        )
        token_T = token_T.to(self.device).clamp(max=self.vocab - 1)
        (layer,) = cache.layers
        if self.fast and max(count for _, _, count in rows) <= WIDEST:
            given = token_T, g_TH, feed.position_T, feed.first_T, [layer]
            if self._programs or self._compile(*given):
                z_TH: Tensor = self._programs[0](self.head, *given)
                return z_TH
        found: Tensor = self.head(token_T, g_TH, feed, layer)
        return found

    @torch.inference_mode()
    def logits(self, z_RH: Tensor) -> Tensor:
        if self._programs:
            logit_RE: Tensor = self._programs[1](self.head, z_RH)
            return logit_RE
        return self.head.logits(z_RH)

    def prepare(self) -> None:
        """Loads or compiles the steps before they are needed."""
        if self.fast:
            zero_T = torch.zeros(2, dtype=torch.int64, device=self.device)
            g_TH = torch.zeros(2, self.dim, dtype=self.dtype, device=self.device)
            self.states(zero_T, g_TH, [(0, 0, 2)], self.new_cache(1, 8))

    def _compile(self, *given: Any) -> bool:
        """Loads or compiles the two programs; whether the head can be compiled."""
        kinds = (repr(self.settings),)
        files = [
            ProgramFile(self, Part(function, self.head, arguments, kinds))
            for function, arguments in ((block_step, given), (logits_step, (given[1],)))
        ]
        try:
            found: list[Program] = []
            for file in files:
                program = file.load()
                if program is None:
                    log.info("engine: compiling a part of the step of %s", self.name)
                    program = compiled(file.part)
                    file.save(program)
                found.append(program)
            self._programs = found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises
            said = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("engine: %s runs eagerly: it does not compile: %s", self.name, said[0][:200])
            self.fast = False
        return self.fast


# The functions that torch traces.


def block_step(
    head: Eagle3, token_T: Tensor, g_TH: Tensor, position_T: Tensor, first_T: Tensor,
    caches: list[KeysValues],
) -> Tensor:  # fmt: skip
    check: Callable[..., None] = torch._check
    for tensor in (token_T, caches[0][0][0]):
        check(tensor.shape[0] >= 1)
    feed = attention.Feed(position_T, first_T, first_T + position_T, attention_kernel.attend)
    z_TH: Tensor = head(token_T, g_TH, feed, caches[0])
    return z_TH


def logits_step(head: Eagle3, z_RH: Tensor) -> Tensor:
    check: Callable[..., None] = torch._check
    check(z_RH.shape[0] >= 1)
    return head.logits(z_RH)
