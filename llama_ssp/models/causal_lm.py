"""One interface to transformers' causal models: tokens and a ragged cache in, logits out.

Positions are given explicitly. Masks are the architecture's own: its code hands transformers' mask functions
a rule (causal, sliding, ...) of a query and a key, and `_at_positions`, registered as such a function, has
the rule judge positions in place of columns. An architecture that makes masks in another way, or keeps what
cannot be rolled back, is refused: by what transformers says of it, or else by its trial (self_check.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from llama_ssp.errors import ModelError
from llama_ssp.models.families import FAMILIES, TESTED, family_of
from llama_ssp.models.interface import Model, Tally
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.passes import Pass, sent
from llama_ssp.models.quantization import scales_of
from llama_ssp.models.shape import longrope_limit
from llama_ssp.models.sharding import require_module
from llama_ssp.models.sizes import layer_kinds, unforgetting

RUNNING: ContextVar[Pass | None] = ContextVar("pass", default=None)  # that makes its masks now
OTHER = "choose another architecture"


class ModuleCache:
    """The KV cache as transformers' modules call it in one pass: `update`, and what begins with `get`.

    A module gives the keys and values of all columns, (B, G, W, D), and is given those of the whole texts.
    """

    is_compileable = False

    def __init__(self, cache: KVCache, pass_: Pass) -> None:
        self.cache = cache
        self.pass_ = pass_
        slot_T = cache.places(pass_.spans).slot_T
        self.row_T = slot_T // cache.capacity
        self.position_T = slot_T % cache.capacity

    def update(
        self, key_BGWD: Tensor, value_BGWD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the pass's keys and values; returns all that it may look at, (B, G, S, D) each."""
        keys_RGCD, values_RGCD = self.cache.layer(layer_idx, key_BGWD, value_BGWD)
        device = key_BGWD.device
        places = self.row_T.to(device), slice(None), self.position_T.to(device)
        keys_RGCD[places] = self._without_padding(key_BGWD)
        values_RGCD[places] = self._without_padding(value_BGWD)
        return self._texts(keys_RGCD), self._texts(values_RGCD)

    def _without_padding(self, new_BGWD: Tensor) -> Tensor:
        """Returns what is given of each column for the tokens alone, (T, G, D)."""
        new_TGD = new_BGWD.transpose(1, 2).flatten(0, 1)
        if self.pass_.has_padding:
            new_TGD = new_TGD[self.pass_.column_T.to(new_TGD.device)]
        return new_TGD

    def _texts(self, slots_RGCD: Tensor) -> Tensor:
        """Returns the slots of the pass's rows up to its longest text, (B, G, S, D), without a copy.

        Rows and heads stay one after the other in memory: some modules view them as one dimension.
        """
        first = self.pass_.spans[0].row
        rows = slice(first, first + len(self.pass_.spans))
        return slots_RGCD[rows, :, : self.pass_.longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask only to guess positions, and positions are given."""
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Returns how many slots a mask is made of, and the first of them."""
        return self.pass_.longest, 0


class CausalModel(Model):
    """A loaded model: `logits` is one forward pass."""

    pads = True

    def __init__(
        self, module: Any, name: str, vocab: int | None = None, device: torch.device | None = None
    ) -> None:
        """`vocab`: the number of logits, if this rank's head has only some of them.

        `device`: where tokens go, if the embedding itself is elsewhere.
        """
        self.module = module.eval()
        self.name = name
        config = module.config
        head = module.get_output_embeddings()
        embedding = module.get_input_embeddings()
        if head is None:
            raise ModelError(
                "the model has no output layer that this program can find",
                where=name,
                found=config.model_type,
                allowed=TESTED,
                fix=OTHER,
            )
        self.vocab = vocab or int(head.weight.shape[0])
        # transformers gives all rows of a pass one scale of positions, by the longest text.
        self.context = min(context_of(config), longrope_limit(config) or context_of(config))
        require_attention(config)
        require_module(config.model_type, name)
        self.device: torch.device = device or embedding.weight.device
        self.dtype: torch.dtype = embedding.weight.dtype
        self.caches = Tally()
        takes = inspect.signature(module.forward).parameters
        # "past_key_values" before transformers 5.24.
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        _register_masks()

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights and of the scales of quantised ones; a tied tensor counts once.

        An expanded tensor counts by what it holds. Tensors that accelerate keeps elsewhere do not count.
        """
        everything = *self.module.parameters(), *self.module.buffers(), *scales_of(self.module)
        tensors = [t for t in everything if not t.is_meta]
        return sum({t.data_ptr(): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}.values())

    def tap(self, blocks: tuple[int, ...]) -> None:
        """Does as `Model.tap`; what the last block gives has no tap: transformers norms it first.

        Raises ModelError for a block that the model does not have.
        """
        layers = int(self.module.config.num_hidden_layers)
        if blocks and max(blocks) >= layers:
            raise ModelError(
                "the head reads layers that the target cannot give",
                where=self.name,
                found=max(blocks),
                allowed=f"0..{layers - 1}",
                fix="use a head of this target",
            )
        super().tap(blocks)

    def table(self, output: bool) -> Tensor | None:
        module: Any = self.module
        layer = module.get_output_embeddings() if output else module.get_input_embeddings()
        weight_VH: Tensor = layer.weight
        return weight_VH

    def new_cache(self, rows: int, capacity: int, rewinds: int = 0) -> KVCache:
        """Returns a cache whose layers are made in its first pass."""
        return KVCache(rows=rows, capacity=capacity, device=self.device, tally=self.caches, is_masked=True)

    @torch.inference_mode()
    def logits(self, token_BW: Tensor, pass_: Pass, cache: KVCache) -> Tensor:
        """Returns logits, (B, W, V); with `last_only` those of the last column, (B, 1, V)."""
        # As an index: a slice of several rows' last columns is no plain matrix, and the head's product would
        # be batched, with a copy of its weights for every row (bf16 on a CPU).
        last = sent([pass_.width - 1], self.device) if pass_.last_only else 0
        inputs: dict[str, Any] = {
            "input_ids": token_BW,
            "position_ids": pass_.position_BW,
            "attention_mask": None,
            "use_cache": True,
            self._cache_name: ModuleCache(cache, pass_),
            "logits_to_keep": last,
            "output_hidden_states": bool(self.taps),
        }
        token = RUNNING.set(pass_)
        try:
            output = self.module(**inputs)
        finally:
            RUNNING.reset(token)
        if self.taps:
            states = [output.hidden_states[block].to(self.device) for block in sorted(self.taps)]
            self.tapped_TX = torch.cat(states, -1).flatten(0, 1)[pass_.column_T]
        logits: Tensor = output.logits
        return logits


@cache
def _register_masks() -> None:
    """Registers `_at_positions` of the mask functions for both kinds of attention that run here."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    for kind in ("sdpa", "eager"):
        AttentionMaskInterface.register(kind, _at_positions(ALL_MASK_ATTENTION_FUNCTIONS[kind]))


def _at_positions(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the mask function, changed for passes of a CausalModel: the rule gets positions as queries.

    An `attention_mask` is ones that an architecture has made for itself: no slot of a row is padding.
    """

    def mask(*places: Any, mask_function: Callable[..., Tensor], **how: Any) -> Any:
        pass_ = RUNNING.get()
        if pass_ is None:  # a pass of transformers' own
            return plain(*places, mask_function=mask_function, **how)

        def visible(row: Tensor, head: Tensor, _column: Tensor, slot: Tensor) -> Tensor:
            return pass_.visible(lambda position: mask_function(row, head, position, slot))

        how |= {"attention_mask": None, "allow_is_causal_skip": False}
        return plain(*places, mask_function=visible, **how)

    return mask


def require_attention(config: Any) -> None:
    """Refuses an architecture that keeps what decoder.py does not, as transformers says of it.

    Its module is imported for architectures without a row in families.py alone: that takes most of a second.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    where = f"layer_types of {config.model_type}"
    kinds = set(getattr(config, "layer_types", None) or ()) - layer_kinds(family_of(config.model_type))
    if not kinds and config.model_type not in FAMILIES:
        module = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if getattr(module, "_is_stateful", False):
            where = config.model_type
            kinds = {"a recurrent state"}
    if kinds:
        raise unforgetting(where, kinds)


def context_of(config: Any) -> int:
    """Returns the longest text that the model may see, in tokens."""
    if getattr(config, "max_position_embeddings", None) is None:
        raise ModelError(
            "the model's config names no context (max_position_embeddings)",
            where=config.model_type,
            allowed=f"models with explicit positions, such as {TESTED}",
            fix=OTHER,
        )
    return int(config.max_position_embeddings)


def kernels_of(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Returns transformers' implementations to use; only the plain one of experts computes in fp64."""
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    return {"attn_implementation": attention_of(config), **experts}


def attention_of(config: Any) -> str:
    """Returns the attention implementation that is exact for this model with explicit masks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    softcapped = getattr(config, "attn_logit_softcapping", None) is not None
    fused = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", False)
    return "eager" if softcapped or not fused else "sdpa"
