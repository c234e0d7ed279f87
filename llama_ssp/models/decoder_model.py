"""The decoder behind the interface of a model runner: tokens of ragged rows in, logits out."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.models import attention
from llama_ssp.models.causal_lm import context_of
from llama_ssp.models.decoder import Caches, Decoder
from llama_ssp.models.families import family_of
from llama_ssp.models.feed import Feed, sent
from llama_ssp.models.interface import Model, Tally
from llama_ssp.models.quantization import scales_of
from llama_ssp.models.shape import longrope_limit
from llama_ssp.models.slot_cache import SlotCache

# Tokens, their positions and first slots, caches; gives logits, then what the model's taps are given.
Step = Callable[[Tensor, Tensor, Tensor, Caches], list[Tensor]]


class DecoderModel(Model):
    """A decoder, eager. Texts that grow beyond `restart` are fed anew, with the second scale of positions."""

    cuts = True

    def __init__(self, decoder: Decoder, config: Any, name: str, ranks: Ranks = ALONE) -> None:
        self.decoder = decoder
        self.config = config
        self.name = name
        self.ranks = ranks
        self.vocab = int(config.vocab_size)
        self.context = context_of(config)
        table = decoder.embedding.weight
        self.device = table.device
        self.dtype = table.dtype
        self.caches = Tally()
        self.attend: attention.Attend = attention.attend_rows  # of passes that are not steps
        limit = longrope_limit(config)
        self._limit = limit if limit is not None and limit < self.context else None
        self.restart = self._limit if family_of(config.model_type).rereads else None

    @property
    def weights_bytes(self) -> int:
        tensors = *self.decoder.parameters(), *self.decoder.buffers(), *scales_of(self.decoder)
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def table(self, output: bool) -> Tensor | None:
        layer: Any = self.decoder.head.product if output else self.decoder.embedding
        table_VH = getattr(layer, "weight", None)
        if isinstance(table_VH, Tensor) and table_VH.is_floating_point() and table_VH.dim() == 2:
            return table_VH if len(table_VH) == self.vocab else None
        return None

    def new_cache(self, rows: int, capacity: int) -> SlotCache:
        return SlotCache.of(rows, capacity, self.decoder.cache_shapes, self.dtype, self.device, self.caches)

    @torch.inference_mode()
    def logits(self, token_BW: Tensor, feed: Feed, cache: SlotCache, last_only: bool) -> Tensor:
        """Returns logits, (B, W, V); or of each row's last column, (B, 1, V), for a pass fed for its keys."""
        rows, width = token_BW.shape
        # Padding is left out: the place of every token among the (B, W) columns.
        place_T = None
        token_T = token_BW.flatten()
        if min(feed.count) < width:
            place_T = feed.token_places()
            token_T = token_T[place_T]
        tokens = self._feed(feed, cache, place_T)

        wanted_R = None
        if last_only:
            ends = accumulate(count for _, _, count in tokens.rows)
            wanted_R = sent([end - 1 for end in ends], self.device)

        # The step is chosen first and called here, so that few frames are between a caller and a kernel.
        step = self._step_for(token_T, tokens, cache, last_only)
        if step is None:
            logit_RV, kept = self.decoder(token_T, tokens, cache.layers, wanted_R, self.taps)
        else:
            logit_RV, *kept = step(token_T, tokens.position_T, tokens.first_T, cache.layers)
            if wanted_R is not None:
                logit_RV = logit_RV[wanted_R]

        self.tapped_TX = torch.cat(kept, -1) if kept else None
        if last_only:
            width = 1
            place_T = None
            if not all(feed.count):
                place_T = sent([row for row, n in enumerate(feed.count) if n], self.device)
        if place_T is not None:
            logit_RV = logit_RV.new_zeros(rows * width, self.vocab).index_copy_(0, place_T, logit_RV)
        logit_BWV: Tensor = logit_RV.view(rows, width, self.vocab)
        return logit_BWV

    @torch.inference_mode()
    def parts(self, token_BW: Tensor, feed: Feed, cache: SlotCache, size: int) -> Iterator[Tensor]:
        place_T = feed.token_places()
        tokens = self._feed(feed, cache, place_T)
        last = len(self.decoder.blocks)
        token_T = token_BW.flatten()[place_T]
        one_R = place_T[:1] * 0
        _, (x_TH,) = self.decoder(token_T, tokens, cache.layers, one_R, {last})
        x_XH = x_TH.new_zeros(token_BW.numel(), x_TH.shape[-1]).index_copy_(0, place_T, x_TH)
        for x_BWH in torch.split(x_XH.view(*token_BW.shape, -1), size, 1):
            yield self.decoder.to_logits(x_BWH.flatten(0, 1)).view(*x_BWH.shape[:2], -1)

    def _step_for(
        self, token_T: Tensor, feed: attention.Pass, cache: SlotCache, is_prompt: bool
    ) -> Step | None:
        """Returns the compiled step of these tokens; None where `decoder` computes them."""
        return None

    def _feed(self, feed: Feed, cache: SlotCache, place_T: Tensor | None) -> attention.Pass:
        starts = zip(feed.start, feed.count, strict=True)
        rows = [(cache.first_of(row), start, count) for row, (start, count) in enumerate(starts)]
        tokens = cache.feed(rows, self.attend)
        # A token's position alone says its scale, but while a long text is first read.
        limit = self._limit
        if limit is not None and any(g > limit > s for g, s in zip(feed.given, feed.start, strict=False)):
            long_T = feed.beyond(limit).flatten()
            tokens.long_T = long_T if place_T is None else long_T[place_T]
        return tokens
