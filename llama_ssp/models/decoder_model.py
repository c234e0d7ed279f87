"""The decoder behind the interface of a model runner: tokens of ragged rows in, logits out."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.models import attention
from llama_ssp.models.cache_layout import DeltaShape
from llama_ssp.models.causal_lm import context_of
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.families import family_of
from llama_ssp.models.interface import Model, Tally
from llama_ssp.models.kv_cache import Caches, KVCache
from llama_ssp.models.passes import Pass, sent
from llama_ssp.models.quantization import scales_of
from llama_ssp.models.shape import longrope_limit

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
    def has_states(self) -> bool:
        """Returns whether some layers keep states, and not keys and values."""
        return any(isinstance(shape, DeltaShape) for shape in self.decoder.cache_shapes)

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

    @torch.inference_mode()
    def normed(self, state_TH: Tensor) -> Tensor:
        result_TH: Tensor = self.decoder.norm(state_TH)
        return result_TH

    @torch.inference_mode()
    def look_up(self, token_T: Tensor) -> Tensor:
        result_TH: Tensor = self.decoder.embedding(token_T)
        return result_TH

    def new_cache(self, rows: int, capacity: int, rewinds: int = 0, spare: int = 0) -> KVCache:
        """Returns a cache; `spare` slots of it are for pads of graphs."""
        return KVCache.of(
            rows=rows,
            capacity=capacity,
            shapes=self.decoder.cache_shapes,
            dtype=self.dtype,
            device=self.device,
            tally=self.caches,
            rewinds=rewinds,
            spare=spare,
        )

    @torch.inference_mode()
    def logits(self, token_BW: Tensor, pass_: Pass, cache: KVCache) -> Tensor:
        """Returns logits, (B, W, V); with `last_only` those of each row's last token, (B, 1, V)."""
        rows, width = token_BW.shape
        token_T = self._without_padding(token_BW, pass_)
        places = self._places(pass_, cache)
        wanted_R = pass_.last_tokens() if pass_.last_only else None

        # The step is chosen first and called here, so that few frames are between a caller and a kernel.
        step = self._step_for(token_T, pass_, places, cache)
        if step is None:
            logit_RV, kept = self.decoder(token_T, places, cache.layers, wanted_R, self.taps)
        else:
            logit_RV, *kept = step(token_T, places.position_T, places.first_T, cache.layers)
            if wanted_R is not None:
                logit_RV = logit_RV[wanted_R]

        self.tapped_TX = torch.cat(kept, -1) if kept else None

        # Padding, and rows that are fed nothing, have no logits: zeros are returned in their place.
        column_R = None
        if pass_.last_only:
            width = 1
            fed = [line for line, span in enumerate(pass_.spans) if span.tokens]
            if len(fed) < rows:
                column_R = sent(fed, self.device)
        elif pass_.has_padding:
            column_R = pass_.column_T
        if column_R is not None:
            logit_RV = logit_RV.new_zeros(rows * width, self.vocab).index_copy_(0, column_R, logit_RV)
        logit_BWV: Tensor = logit_RV.view(rows, width, self.vocab)
        return logit_BWV

    @torch.inference_mode()
    def parts(self, token_BW: Tensor, pass_: Pass, cache: KVCache) -> Iterator[Tensor]:
        assert pass_.part_width is not None
        column_T = pass_.column_T
        places = self._places(pass_, cache)
        last = len(self.decoder.blocks)
        token_T = token_BW.flatten()[column_T]
        one_R = column_T[:1] * 0
        _, (x_TH,) = self.decoder(token_T, places, cache.layers, one_R, {last})
        x_XH = x_TH.new_zeros(token_BW.numel(), x_TH.shape[-1]).index_copy_(0, column_T, x_TH)
        for x_BWH in torch.split(x_XH.view(*token_BW.shape, -1), pass_.part_width, 1):
            yield self.decoder.to_logits(x_BWH.flatten(0, 1)).view(*x_BWH.shape[:2], -1)

    def _step_for(
        self, token_T: Tensor, pass_: Pass, places: attention.Places, cache: KVCache
    ) -> Step | None:
        """Returns the compiled step of these tokens; None where `decoder` computes them."""
        return None

    def _places(self, pass_: Pass, cache: KVCache) -> attention.Places:
        """Returns where the tokens stand in the cache, and which of them have the second scale."""
        places = cache.places(pass_.spans, self.attend)
        limit = self._limit
        if limit is None:
            return places

        # A token's position alone says its scale, but while a long text is first read.
        lengths = zip(pass_.given, pass_.spans, strict=False)
        if any(given > limit > span.start for given, span in lengths):
            places.long_T = self._without_padding(pass_.beyond(limit), pass_)
        return places

    @staticmethod
    def _without_padding(numbers_BW: Tensor, pass_: Pass) -> Tensor:
        """Returns what is given of each column for the tokens alone, (T,)."""
        numbers_T = numbers_BW.flatten()
        return numbers_T[pass_.column_T] if pass_.has_padding else numbers_T
