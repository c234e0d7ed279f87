"""One interface to transformers' causal models: tokens and a ragged cache in, logits out.

Positions and masks are given explicitly. The masks that an architecture takes are read off its own code in
transformers, because a config may hold keys that its architecture ignores: one mask per kind of layer, or one
mask, with a sliding window or without. GPT-Neo makes its masks inside its attention and is adapted here.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.errors import ModelError
from llama_ssp.models.families import TESTED, family_of
from llama_ssp.models.kv_cache import Feed, RaggedCache, Tally
from llama_ssp.models.quantization import scales_of
from llama_ssp.models.sizes import SCALED_FROM, context_within
from llama_ssp.models.transfer import sent

FULL, SLIDING = LAYER_KINDS = ("full_attention", "sliding_attention")
BACKBONES, MODELS = "MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING"  # transformers' classes by config
SLIDING_MASK = "create_sliding_window_causal_mask"  # a function of transformers, in the code of architectures
OTHER = "choose another architecture"


class CausalModel:
    """A loaded model: `logits` is one forward pass."""

    def __init__(
        self, module: Any, name: str, vocab: int | None = None, device: torch.device | None = None
    ) -> None:
        """`vocab`: the number of logits, if this rank's head has only some of them.

        `device`: where tokens go, if the embedding itself is elsewhere.
        """
        self.module = module.eval()
        self.name = name
        config = module.config
        head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
        if head is None:
            what = "the model has no output layer that this program can find"
            raise ModelError(what, name, config.model_type, TESTED, OTHER)
        self.vocab = vocab or int(head.weight.shape[0])
        self.context = context_of(config)
        self.device: torch.device = device or embedding.weight.device
        self.dtype: torch.dtype = embedding.weight.dtype
        self.windows = windows_of(config)
        self.caches = Tally()
        self.taps: tuple[int, ...] = ()
        self.tapped_TX: Tensor | None = None
        self.mask_by_kind = kinds_of(config) is not None
        self.additive_mask = config._attn_implementation != "sdpa"
        takes = inspect.signature(module.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # before transformers 5.24
        self.scale = RowScale.of(module, self.context)
        # Texts that grow longer than this are fed anew, as transformers' `generate` does for the
        # architecture.
        rereads = SCALED_FROM in _names_in_code(MODELS, config, "prepare_inputs_for_generation")
        self.restart = self.scale.limit if self.scale and rereads else None
        if family_of(config.model_type).masks_inside:
            _open_masks(module)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights and of the scales of quantised ones; a tied tensor counts once.

        An expanded tensor counts by what it holds. Tensors that accelerate keeps elsewhere do not count.
        """
        everything = *self.module.parameters(), *self.module.buffers(), *scales_of(self.module)
        tensors = [t for t in everything if not t.is_meta]
        return sum({t.data_ptr(): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights, and of the caches at most so far."""
        return self.weights_bytes + self.caches.most

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def tap(self, blocks: tuple[int, ...]) -> None:
        """Does as `DecoderModel.tap`; what the last block gives has no tap: transformers norms it first.

        Raises ModelError for a block that the model does not have.
        """
        layers = int(self.module.config.num_hidden_layers)
        if blocks and max(blocks) >= layers:
            what, allowed = "the head reads layers that the target cannot give", f"0..{layers - 1}"
            raise ModelError(what, self.name, max(blocks), allowed, "use a head of this target")
        self.taps, self.tapped_TX = blocks, None

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return RaggedCache(rows, capacity, tally=self.caches)

    @torch.inference_mode()
    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        """Logits, (B, W, V); of the last column only, (B, 1, V), for a pass that is fed for its keys."""
        masks = {kind: self._mask(feed.visible(window)) for kind, window in self.windows.items()}
        cache.expect(feed, masks)
        mask = masks if self.mask_by_kind else next(iter(masks.values()))
        inputs = {"position_ids": feed.positions(), "attention_mask": mask, self._cache_name: cache}
        # As an index: a slice of several rows' last columns is no plain matrix, and the head's product would
        # be batched, with a copy of its weights for every row (bf16 on a CPU).
        last = sent([feed.width - 1], self.device) if last_only else 0
        logits = self._forward(feed, input_ids=token_BW, logits_to_keep=last, **inputs)
        if self.tapped_TX is not None:
            self.tapped_TX = self.tapped_TX.flatten(0, 1)[feed.real_places()]
        return logits

    def _forward(self, feed: Feed, **inputs: Any) -> Tensor:
        """One pass of the module; the scale says which columns have the second scale of positions."""
        if self.scale:
            self.scale.beyond_BW = feed.beyond(self.scale.limit)
        if self.taps:
            inputs["output_hidden_states"] = True
        found = self.module(use_cache=True, **inputs)
        if self.scale:
            self.scale.beyond_BW = None
        if self.taps:
            states = [found.hidden_states[block].to(self.device) for block in sorted(self.taps)]
            self.tapped_TX = torch.cat(states, -1)
        logits: Tensor = found.logits
        return logits

    def _mask(self, visible_BWS: Tensor) -> Tensor:
        """What attention takes: the visible slots, or numbers to add to its scores."""
        visible_B1WS = visible_BWS[:, None]
        if not self.additive_mask:
            return visible_B1WS
        floor = torch.finfo(self.dtype).min
        return torch.zeros_like(visible_B1WS, dtype=self.dtype).masked_fill(~visible_B1WS, floor)


def windows_of(config: Any) -> dict[str, int | None]:
    """The window of each kind of attention layer; None where it sees the whole text.

    The window is the config's where the architecture makes a windowed mask; elsewhere the key is ignored.
    """
    family = family_of(config.model_type)
    if family.masks_inside and family.window:
        return {FULL: None, SLIDING: int(getattr(config, family.window.key))}
    slides = SLIDING_MASK in _names_in_code(BACKBONES, config, "forward")
    window = int(getattr(config, "sliding_window", None) or 0) if slides else 0
    kinds = kinds_of(config)
    if kinds is None:
        return {FULL: window or None}
    unknown = sorted(kinds - set(LAYER_KINDS))
    if unknown:
        what, allowed = "the model has layers that this program cannot roll back", ", ".join(LAYER_KINDS)
        where, fix = f"layer_types of {config.model_type}", "choose a model with attention layers only"
        raise ModelError(what, where, ", ".join(unknown), allowed, fix)
    return {kind: window or None if kind == SLIDING else None for kind in sorted(kinds)}


def kinds_of(config: Any) -> set[str] | None:
    """The kinds of layers, if the architecture takes one mask per kind; None if it takes one mask."""
    kinds = getattr(config, "layer_types", None)
    tests_for_dict = {"isinstance", "dict"} <= _names_in_code(BACKBONES, config, "forward")  # of its mask
    return set(kinds) if kinds is not None and tests_for_dict else None


def _names_in_code(mapping: str, config: Any, method: str) -> set[str]:
    """The names in the code of a method of transformers' class for the config; none if there is no class."""
    import transformers

    kind: Any = getattr(transformers, mapping).get(type(config), None)
    if kind is None or isinstance(kind, tuple):
        return set()
    names, codes = set[str](), [inspect.unwrap(getattr(kind, method)).__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return names


def context_of(config: Any) -> int:
    """The longest text that the model may see, in tokens."""
    if getattr(config, "max_position_embeddings", None) is None:
        what = "the model's config names no context (max_position_embeddings)"
        allowed = "models with explicit positions, such as " + TESTED
        raise ModelError(what, config.model_type, allowed=allowed, fix=OTHER)
    return context_within(int(config.max_position_embeddings), config.to_dict())


class RowScale:
    """Rotary positions of two scales (longrope); each row's text decides which.

    transformers takes the long scale for all rows as soon as one text of the batch is longer than `limit`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.beyond_BW: Tensor | None = None  # of the current pass

    @staticmethod
    def of(module: Any, context: int) -> RowScale | None:
        """The scale that all rotary layers of the module now follow; None if one scale is enough."""
        layers = [m for m in module.modules() if getattr(m, "rope_type", None) == "longrope"]
        limits = {int(layer.config.rope_parameters[SCALED_FROM]) for layer in layers}
        if not limits or min(limits) >= context:
            return None
        scale = RowScale(min(limits))
        for layer in layers:
            scale._change(layer, module.config.model_type)
        return scale

    def _change(self, layer: Any, name: str) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        short_D = layer.original_inv_freq.float()
        inverse_D, _ = ROPE_INIT_FUNCTIONS["longrope"](layer.config, short_D.device, seq_len=self.limit + 1)
        long_D, factor, plain = inverse_D.float(), layer.attention_scaling, layer.forward

        def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            if self.beyond_BW is None:  # the module's own pass, with one scale
                return plain(x, position_ids)  # type: ignore[no-any-return]
            beyond_BW1 = self.beyond_BW.to(x.device)[..., None]
            inverse_BWD = torch.where(beyond_BW1, long_D.to(x.device), short_D.to(x.device))
            angle_BWD = position_ids[..., None].float() * inverse_BWD
            angle_BWD = torch.cat((angle_BWD, angle_BWD), dim=-1)
            return (angle_BWD.cos() * factor).to(x.dtype), (angle_BWD.sin() * factor).to(x.dtype)

        for first in (0, self.limit):
            position_1W = torch.arange(first, first + 2, device=short_D.device)[None]
            x = short_D.new_zeros(1, 2, 1)
            self.beyond_BW = None
            expected = plain(x, position_1W)
            self.beyond_BW = position_1W >= self.limit
            if not all(map(torch.equal, forward(x, position_1W), expected)):
                what = "the architecture scales positions by the longest text of a pass"
                raise ModelError(what, name, fix=OTHER)
        self.beyond_BW = None
        layer.forward = forward


def kernels_of(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """transformers' implementations to use; only the plain one of experts computes in fp64."""
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    return {"attn_implementation": attention_of(config), **experts}


def attention_of(config: Any) -> str:
    """The attention implementation that is exact for this model with explicit masks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    softcapped = getattr(config, "attn_logit_softcapping", None) is not None
    fused = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", False)
    return "eager" if softcapped or family_of(config.model_type).masks_inside or not fused else "sdpa"


def _open_masks(module: Any) -> None:
    """Makes GPT-Neo take its masks from outside.

    Its attention reads causality and locality off the slot numbers of a built-in table, which holds only for
    one unpadded row that is fed to its end. The table is set to ones, and local layers get the windowed mask
    of the cache. A module that has been changed stays as it is.
    """
    for layer in module.transformer.h:
        attention = layer.attn.attention
        if attention.bias.stride(-1) == 0:
            continue
        size = 2 * attention.bias.shape[-1]
        attention.bias = torch.ones_like(attention.bias[:, :, :1, :1]).expand(1, 1, size, size)
        if layer.attn.attention_type == "local":
            attention.register_forward_pre_hook(_take_windowed_mask, with_kwargs=True)


def _take_windowed_mask(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden = args[0] if args else kwargs["hidden_states"]
    mask = kwargs["layer_past"].masks[SLIDING].to(hidden.device)
    return args, {**kwargs, "attention_mask": mask}
