"""The decoder behind the interface of a model runner: tokens of ragged rows in, logits out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llama_ssp.models import attention
from llama_ssp.models.causal_lm import context_of
from llama_ssp.models.checkpoint import SCALED_FROM
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.kv_cache import Feed, Tally
from llama_ssp.models.shape import rotary_parameters
from llama_ssp.models.slot_cache import SlotCache


class DecoderModel:
    """A decoder, eager. Texts that grow beyond `restart` are fed anew, with the second scale of positions."""

    def __init__(self, decoder: Decoder, config: Any, name: str, vocab: int) -> None:
        self.decoder, self.config, self.name, self.vocab = decoder, config, name, vocab
        self.context = context_of(config)
        table = decoder.embedding.weight
        self.device, self.dtype = table.device, table.dtype
        self.caches = Tally()
        limits = [
            p[SCALED_FROM] for p in rotary_parameters(config).values() if p.get("rope_type") == "longrope"
        ]
        self.restart: int | None = min(limits) if limits and min(limits) < self.context else None

    @property
    def weights_bytes(self) -> int:
        tensors = *self.decoder.parameters(), *self.decoder.buffers()
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    @property
    def held_bytes(self) -> int:
        return self.weights_bytes + self.caches.most

    def new_cache(self, rows: int, capacity: int) -> SlotCache:
        return SlotCache.of(rows, capacity, self.decoder.cache_shapes, self.dtype, self.device, self.caches)

    @torch.inference_mode()
    def logits(self, token_BW: Tensor, feed: Feed, cache: SlotCache, last_only: bool) -> Tensor:
        """Logits, (B, W, V); or of each row's last column, (B, 1, V), for a pass fed for its keys."""
        count = feed.count
        token_T = token_BW[0] if len(count) == 1 else token_BW[feed.real()]
        logit_RV = self._run(token_T, self._feed(feed, cache), cache, last_only)
        if len(count) == 1:
            return logit_RV[None]
        if last_only:
            full = torch.tensor([n > 0 for n in count], device=self.device)
            return logit_RV.new_zeros(len(count), 1, self.vocab).masked_scatter_(
                full[:, None, None], logit_RV
            )
        logit_BWV = logit_RV.new_zeros(len(count), feed.width, self.vocab)
        logit_BWV[feed.real()] = logit_RV
        return logit_BWV

    def _run(self, token_T: Tensor, feed: attention.Feed, cache: SlotCache, last_only: bool) -> Tensor:
        wanted_R = None
        if last_only:
            counts = torch.tensor([count for _, _, count in feed.rows])
            wanted_R = (counts.cumsum(0) - 1).to(self.device)
        logit_RV: Tensor = self.decoder(token_T, feed, cache.layers, wanted_R)[0]
        return logit_RV

    def _feed(self, feed: Feed, cache: SlotCache) -> attention.Feed:
        starts = zip(feed.start, feed.count, strict=True)
        rows = [
            (cache.first + row * cache.capacity, start, count) for row, (start, count) in enumerate(starts)
        ]
        made = attention.Feed.of(rows, self.device)
        if self.restart is not None:
            made.long_T = feed.beyond(self.restart)[feed.real()]
        return made
