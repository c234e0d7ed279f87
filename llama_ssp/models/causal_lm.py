"""One interface over transformers' causal models: tokens and a ragged cache in, logits out.

Positions and masks are given explicitly. Which masks an architecture takes is read off its own code in
transformers, because a config may hold keys that its architecture ignores: one mask per layer type, or
one mask, with a sliding window or without. GPT-Neo keeps its masks inside its attention and is adapted
here.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import SCALED_FROM, context_within
from llama_ssp.models.families import TESTED_FAMILIES, family_of
from llama_ssp.models.kv_cache import Feed, RaggedCache, Tally
from llama_ssp.models.quantization import scales_of
from llama_ssp.models.transfer import sent

LAYER_KINDS = ("full_attention", "sliding_attention")
BACKBONES, MODELS = "MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING"  # transformers' classes by config
SLIDING_MASK = "create_sliding_window_causal_mask"  # transformers' function, which architectures call by name


class CausalModel:
    """A loaded model: `logits` is one forward pass."""

    def __init__(
        self, module: Any, name: str, vocab: int | None = None, device: torch.device | None = None
    ) -> None:
        """`vocab` is how many logits it gives, where the head at hand holds only some of them.

        `device` is where tokens go, where the embedding itself is elsewhere.
        """
        self.module = module.eval()
        self.name = name
        config = module.config
        if module.get_output_embeddings() is None:
            raise ModelError(
                "the model has no output layer that this program can find", where=name,
                found=config.model_type,
                allowed=", ".join(TESTED_FAMILIES), fix="choose another architecture",
            )  # fmt: skip
        self.vocab = vocab or int(module.get_output_embeddings().weight.shape[0])
        self.context = context_of(config)
        self.device: torch.device = device or module.get_input_embeddings().weight.device
        self.dtype: torch.dtype = module.get_input_embeddings().weight.dtype
        self.windows = windows_of(config)
        self.caches = Tally()
        self.mask_by_kind = kinds_of(config) is not None
        self.additive_mask = config._attn_implementation != "sdpa"
        self.scale = RowScale.of(module, self.context)
        rereads = SCALED_FROM in _names_in_code(MODELS, config, "prepare_inputs_for_generation")
        self.restart = self.scale.limit if self.scale and rereads else None
        if family_of(config.model_type).masks_inside:
            _adapt_gpt_neo(module)

    @property
    def weights_bytes(self) -> int:
        """What the weights occupy, scales of quantised ones included; a tied tensor counts once, an
        expanded one by what it holds.

        Those that accelerate keeps elsewhere, and brings when they are needed, do not count.
        """
        everything = *self.module.parameters(), *self.module.buffers(), *scales_of(self.module)
        tensors = [t for t in everything if not t.is_meta]
        return sum({t.data_ptr(): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}.values())

    @property
    def held_bytes(self) -> int:
        """What the weights and all their caches occupied when they were most."""
        return self.weights_bytes + self.caches.most

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return RaggedCache(rows, capacity, tally=self.caches)

    @torch.inference_mode()
    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        """Logits at every column fed, or only at the last (for a pass that is fed for its keys)."""
        masks = {kind: self._mask(feed, window) for kind, window in self.windows.items()}
        cache.expect(feed, masks)
        if self.scale:
            self.scale.beyond_BW = feed.beyond(self.scale.limit)
        # As an index, because a slice of several rows' last columns is no plain matrix: the head's product
        # is then batched, on a copy of its weights for every row (bf16 on a CPU).
        last = sent([feed.width - 1], self.device) if last_only else 0
        logits: Tensor = self.module(
            input_ids=token_BW,
            position_ids=feed.positions(),
            attention_mask=masks if self.mask_by_kind else next(iter(masks.values())),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last,
        ).logits
        if self.scale:
            self.scale.beyond_BW = None
        return logits

    def _mask(self, feed: Feed, window: int | None) -> Tensor:
        visible_B1WS = feed.visible(window)[:, None]
        if not self.additive_mask:
            return visible_B1WS
        floor = torch.finfo(self.dtype).min
        return torch.zeros_like(visible_B1WS, dtype=self.dtype).masked_fill(~visible_B1WS, floor)


def windows_of(config: Any) -> dict[str, int | None]:
    """For each kind of attention layer, how far back it looks (None: all the way).

    The window is the config's where the architecture makes a windowed mask; elsewhere the key is ignored.
    """
    family = family_of(config.model_type)
    if family.masks_inside and family.window:
        return {"full_attention": None, "sliding_attention": int(getattr(config, family.window.key))}
    slides = SLIDING_MASK in _names_in_code(BACKBONES, config, "forward")
    window = int(getattr(config, "sliding_window", None) or 0) if slides else 0
    kinds = kinds_of(config)
    if kinds is None:
        return {"full_attention": window or None}
    unknown = sorted(kinds - set(LAYER_KINDS))
    if unknown:
        raise ModelError(
            "the model has layers that this program cannot roll back",
            where=f"layer_types of {config.model_type}",
            found=", ".join(unknown),
            allowed=", ".join(LAYER_KINDS),
            fix="choose a model with attention layers only",
        )
    return {kind: window or None if kind == "sliding_attention" else None for kind in sorted(kinds)}


def kinds_of(config: Any) -> set[str] | None:
    """The kinds of layers, where the architecture takes one mask per kind; None where it takes one mask."""
    kinds = getattr(config, "layer_types", None)
    by_kind = {"isinstance", "dict"} <= _names_in_code(
        BACKBONES, config, "forward"
    )  # it asks whether its mask is a dict
    return set(kinds) if kinds is not None and by_kind else None


def _names_in_code(mapping: str, config: Any, method: str) -> set[str]:
    """The names in the code of a method of transformers' class for the config; none where there is none."""
    import transformers

    kind: Any = getattr(transformers, mapping).get(type(config), None)
    if kind is None or isinstance(kind, tuple):
        return set()
    found, codes = set[str](), [inspect.unwrap(getattr(kind, method)).__code__]
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return found


def context_of(config: Any) -> int:
    """The longest text the model may see."""
    if getattr(config, "max_position_embeddings", None) is None:
        raise ModelError(
            "the model's config names no context (max_position_embeddings)", where=config.model_type,
            allowed="models with explicit positions, such as " + ", ".join(TESTED_FAMILIES),
            fix="choose another architecture",
        )  # fmt: skip
    return context_within(int(config.max_position_embeddings), config.to_dict())


class RowScale:
    """Rotary positions of two scales (longrope): which of them, each row's own text decides.

    transformers takes the long one for all rows once a text of the batch is longer than `limit`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.beyond_BW: Tensor | None = None  # of the pass that comes

    @staticmethod
    def of(module: Any, context: int) -> RowScale | None:
        """The scale of all rotary layers of the module, which are changed; None where one scale is enough."""
        layers = [m for m in module.modules() if getattr(m, "rope_type", None) == "longrope"]
        limits = {int(layer.config.rope_parameters[SCALED_FROM]) for layer in layers}
        if not limits or min(limits) >= context:
            return None
        scale = RowScale(min(limits))
        for layer in layers:
            scale._take(layer, module.config.model_type)
        return scale

    def _take(self, layer: Any, name: str) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        short_D = layer.original_inv_freq.float()
        found = ROPE_INIT_FUNCTIONS["longrope"](layer.config, short_D.device, seq_len=self.limit + 1)
        long_D, factor, plain = found[0].float(), layer.attention_scaling, layer.forward

        def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            if self.beyond_BW is None:  # a plain pass, without rows of their own
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
                raise ModelError(
                    "the architecture scales positions by the longest text of a pass", where=name,
                    fix="choose another architecture",
                )  # fmt: skip
        self.beyond_BW = None
        layer.forward = forward


def attention_of(config: Any) -> str:
    """Which attention implementation is exact for this model with explicit masks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    softcapped = getattr(config, "attn_logit_softcapping", None) is not None
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    fused = getattr(architecture, "_supports_sdpa", False)
    inside = family_of(config.model_type).masks_inside
    return "eager" if softcapped or inside or not fused else "sdpa"


def kernels_of(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Which of transformers' implementations to take; of those of experts only the plain one knows fp64."""
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    return {"attn_implementation": attention_of(config), **experts}


def _adapt_gpt_neo(module: Any) -> None:
    """Makes GPT-Neo take its masks from outside.

    Its attention reads causality and locality off the slot numbers of a built-in table, which holds
    only for one unpadded row fed to its end. The table is opened, and layers of the local kind are
    handed the windowed mask that travels with the cache. A module that is open already stays as it is.
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
    mask = kwargs["layer_past"].masks["sliding_attention"].to(hidden.device)
    return args, {**kwargs, "attention_mask": mask}
