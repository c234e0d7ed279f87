"""Models of any shape with weights from a seed: to try a machine, and for benchmarks, without a checkpoint.

A real model's work is done, on weights that do not matter: what layers write into the residual stream is
multiplied by zero. The distribution comes from a code that all synthetic models of a seed share. Token t is a
vector of signs; its next-token logits are sums of products of signs, and the signs of the final norm keep
them from favouring t itself. So target and draft have the same distribution, whatever their sizes. A draft
flips a share of its signs, found by bisection, until the distributions overlap as wanted (`draft.agreement`
is the mean of sum(min(target, draft)) at temperature 1).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import ModelError
from llama_ssp.models.assemble import wanted
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.families import FAMILIES, FULL, SLIDING, Family, family_of, full_layers
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.layout_sizes import linear_blocks
from llama_ssp.models.quantization import QUANTISED, quantised
from llama_ssp.models.sharding import COLUMNS, Cut, Span
from llama_ssp.models.sizes import LINEAR, LINEAR_SIZES, full_places

HALF = 32  # signs of a token; each stands twice, once negated, so that a vector's mean is zero
SPREAD = 3.0  # standard deviation of the logits
TILE = 2**18  # numbers of noise, which are repeated
# Vectors that are factors, as weights of norms are, and have other names.
FACTORS = {
    name
    for names in (family.names for family in FAMILIES.values())
    for name in (names.router_norm, names.expert_scale, names.block_scale)
    if name
}
# What writes into the residual stream, by the last part of the name: its weights, and the biases of stacked
# experts, are zero.
WRITERS = {
    name.rpartition(".")[2]
    for names in (family.names for family in FAMILIES.values())
    for name in (
        names.output,
        names.delta.output if names.delta is not None else "",
        names.down,
        names.expert_down,
        names.shared_down,
        names.positions,
    )
    if name
}


def config_for(model: ModelConf) -> Any:
    """Returns transformers' config of the model's shape."""
    from transformers import AutoConfig

    family = family_of(model.family)
    if model.head_dim % 2 and family.position_rows is None:
        raise ModelError(
            "rotary positions need an even head size",
            where=f"model {model.name}",
            found=model.head_dim,
            fix="correct head_dim",
        )
    shape: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        family.mlp_key: model.ffn,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }

    if family.grouped:
        shape["num_key_value_heads"] = model.n_kv_heads
        shape["head_dim"] = model.head_dim
    if family.window and model.sliding_window:
        shape[family.window.key] = model.sliding_window
        if family.window.switched:
            shape["use_sliding_window"] = True
            shape["max_window_layers"] = model.n_layers // 2
    for key, said in zip(family.bias_keys, (model.attention_bias, model.mlp_bias), strict=True):
        if key and said is not None:
            shape[key] = said
    if family.qk_norm_key and model.qk_norm is not None:
        shape[family.qk_norm_key] = model.qk_norm
    if family.multi_query:
        shape["new_decoder_architecture"] = model.n_kv_heads > 1
        shape["num_kv_heads"] = model.n_kv_heads
    if model.experts:
        shape["num_local_experts"] = model.experts
        shape["num_experts"] = model.experts  # some classes have the one name, some the other, some both
        shape["num_experts_per_tok"] = model.experts_per_token
        shape |= dict(zip(family.expert_keys, (model.experts, model.experts_per_token), strict=True))
        shape["moe_intermediate_size"] = model.expert_ffn
        if family.first_dense:
            shape[family.first_dense] = model.dense_layers
        elif model.dense_layers:
            shape["mlp_only_layers"] = list(range(model.dense_layers))
    if family.experts_key:
        shape[family.experts_key] = model.experts > 0
    if family.full_heads:
        shape |= _full_heads(model, family)
    if family.logit_cap is not None:
        shape["final_logit_softcapping"] = family.logit_cap
    if model.shared_ffn and family.shared_key:
        shape[family.shared_key] = model.shared_ffn
    elif model.shared_ffn:
        shape["n_shared_experts"] = model.shared_ffn // model.expert_ffn
    if family.names.delta is not None:
        linear = linear_blocks(model.n_layers, model.linear_layers)
        kinds = [LINEAR if layer in linear else FULL for layer in range(model.n_layers)]
        shape["layer_types"] = kinds
        shape |= {key: getattr(model, name) for name, key in LINEAR_SIZES.items() if key}
    if family.masks_inside:
        shape["attention_types"] = [[["global", "local"], model.n_layers // 2]]

    try:
        config = AutoConfig.for_model(model.family, **shape)
    except ValueError:
        raise ModelError(
            "the family is not one that transformers knows",
            where=model.name,
            found=model.family,
            fix="correct model.family",
        ) from None
    return config


def _full_heads(model: ModelConf, family: Family) -> dict[str, Any]:
    """Returns which layers see the whole text, and their heads, by the keys of Gemma 4's config."""
    places = full_places(None, model.n_layers)
    if model.full_layers:
        places = full_layers(model.n_layers, model.full_layers)
    return {
        **family.needed,
        "layer_types": [FULL if n in places else SLIDING for n in range(model.n_layers)],
        "global_head_dim": model.full_head_dim or model.head_dim,
        "num_global_key_value_heads": model.full_kv_heads or model.n_kv_heads,
        family.values_key: model.keys_are_values,
    }


class SyntheticSource:
    """Weights from the seed, made when they are read; a part is made alone and equals that part of all."""

    def __init__(
        self,
        *,
        shapes: dict[str, tuple[int, ...]],
        tables: set[str],
        final_norm: str,
        model: ModelConf,
        dtype: torch.dtype,
        device: torch.device,
        drafts: bool,
    ) -> None:
        """`shapes` by name; the names of the embedding and the head, and of the norm before the head."""
        if model.dim < 2 * HALF:
            raise ModelError(
                "the model is too narrow for synthetic weights",
                where=model.name,
                found=f"dim {model.dim}",
                allowed=f"{2 * HALF} or more",
                fix="widen it",
            )
        self.shapes = shapes
        self._tables = tables
        self._final_norm = final_norm
        self._dtype = dtype
        self._device = device
        self._norm_offset = family_of(model.family).norm_offset
        generator = torch.Generator().manual_seed(model.seed)
        noise = (torch.randn(TILE, generator=generator) * 0.02).to(device, self._dtype)
        longest = max(shape[-1] for shape in self.shapes.values() if shape)
        self._noise = noise.repeat(1 + -(-longest // TILE))
        self._codes = _codes(model, drafts)
        # A normed vector has entries sqrt(dim / 2H); HALF products of signs, each standing twice.
        self._scale = SPREAD / HALF**0.5 / 2 / (model.dim / (2 * HALF)) ** 0.5

    @staticmethod
    def of_module(module: Any, model: ModelConf, device: torch.device, drafts: bool) -> SyntheticSource:
        """Returns the weights of a module of transformers."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        both = (module.get_input_embeddings().weight, module.get_output_embeddings().weight)
        tables = {name for name, parameter in parameters.items() if any(parameter is t for t in both)}
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        return SyntheticSource(
            shapes=shapes,
            tables=tables,
            final_norm=_final_norm(module),
            model=model,
            dtype=module.dtype,
            device=device,
            drafts=drafts,
        )

    @staticmethod
    def of_config(
        config: Any, model: ModelConf, dtype: torch.dtype, device: torch.device, drafts: bool
    ) -> SyntheticSource:
        """Returns the weights of a decoder of our own."""
        names = family_of(config.model_type).names
        shapes = wanted(config)
        tables = {f"{name}.weight" for name in (names.embedding, names.head)}
        if config.tie_word_embeddings:
            del shapes[f"{names.head}.weight"]
        return SyntheticSource(
            shapes=shapes,
            tables=tables,
            final_norm=f"{names.norm}.weight",
            model=model,
            dtype=dtype,
            device=device,
            drafts=drafts,
        )

    def read(self, name: str, cut: Cut | None) -> Tensor:
        shape = self.shapes[name]
        rows = (0, math.prod(shape[:-1]))
        if len(shape) <= 1:
            return taken(self._vector(name).to(self._device, self._dtype), cut)
        if cut is None:
            return self._part(name, rows, None).view(shape)
        if cut.number is not None:  # of stacked experts a part is made by way of the whole one
            rows = (cut.number * shape[1], (cut.number + 1) * shape[1])
            return taken(self._part(name, rows, None), Cut(dim=cut.dim - 1, spans=cut.spans))
        if len(shape) > 2:
            return taken(self._part(name, rows, None).view(shape), cut)
        if cut.dim == COLUMNS:
            return torch.cat([self._part(name, rows, columns) for columns in cut.spans], COLUMNS)
        return torch.cat([self._part(name, span, None) for span in cut.spans])

    def _part(self, name: str, rows: Span, columns: Span | None) -> Tensor:
        """Fills a matrix; a tensor of more dimensions counts as one with its last dimension as columns."""
        width = self.shapes[name][-1]
        count = rows[1] - rows[0]
        first, last = columns or (0, width)
        if name in self._tables:
            part = torch.zeros(count, width, dtype=self._dtype, device=self._device)
            part[:, : 2 * HALF] = self._codes[rows[0] : rows[1]].to(part)
            return part[:, first:last].contiguous()
        if name.removesuffix(".weight").removesuffix("_bias").rpartition(".")[2] in WRITERS:
            return torch.zeros(count, last - first, dtype=self._dtype, device=self._device)
        # These numbers do not matter, and a 30B model has many: one tile of noise, repeated.
        start = (torch.arange(*rows, device=self._device) * width) % TILE + first
        return self._noise.unfold(0, last - first, 1)[start]

    def _vector(self, name: str) -> Tensor:
        """A bias of zeros, or a norm that changes nothing; the last has the signs of the distribution."""
        vector = torch.zeros(self.shapes[name])
        if name == self._final_norm:
            vector[: 2 * HALF] = self._scale * _norm_signs().repeat(2)
        elif name.endswith(("weight", *FACTORS)):
            vector.fill_(1.0)
        return vector - self._norm_offset if name.endswith("weight") else vector


def fill_module(module: Any, source: SyntheticSource, dtype: Dtype, device: torch.device) -> None:
    """Gives every parameter its value on the device; quantised layers are made on the CPU."""
    held = TORCH_DTYPES[dtype]
    head = module.get_output_embeddings()
    tied = bool(getattr(module.config, "tie_word_embeddings", False))
    for name, layer in list(module.named_modules()):
        shrinks = dtype in QUANTISED and isinstance(layer, nn.Linear) and layer is not head
        place = torch.device("cpu") if shrinks else device  # quantising begins on the CPU
        values: dict[str, Tensor] = {}
        for leaf, parameter in layer._parameters.items():
            key = f"{name}.{leaf}" if name else leaf
            if parameter is None or (layer is head and tied):
                continue
            values[leaf] = source.read(key, None).to(place, held)
        if shrinks:
            module.set_submodule(name, quantised(dtype, values["weight"], values.get("bias"), device))
            continue
        for leaf, value in values.items():
            layer._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        for leaf, buffer in layer._buffers.items():
            layer._buffers[leaf] = None if buffer is None else buffer.to(device)
    module.tie_weights()


def require_filled(module: nn.Module) -> None:
    """Refuses a module with a weight that was not read."""
    empty = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if empty:
        raise ModelError(
            "weights were not read",
            where=type(module).__name__,
            found=f"{len(empty)}: {empty[0]}",
            fix="report it",
        )


def agreement_at(flipped: float, vocab: int, seed: int, tokens: int = 64) -> float:
    """Returns how much a draft that flips this share of signs overlaps with the target, on average."""
    signs_VH = _signs(vocab, seed)
    draft_VH = _flipped(signs_VH, flipped, seed)
    chosen = torch.arange(0, vocab, max(1, vocab // tokens))[:tokens]
    weight_H = SPREAD / HALF**0.5 * _norm_signs()
    target_TV, draft_TV = (
        torch.softmax((codes[chosen] * weight_H) @ codes.T, -1) for codes in (signs_VH, draft_VH)
    )
    return float(torch.minimum(target_TV, draft_TV).sum(-1).mean())


def flips_for(agreement: float, vocab: int, seed: int) -> float:
    """Returns the share of signs to flip for this agreement, at most a half."""
    low = 0.0
    high = 0.5
    for _ in range(12):
        middle = (low + high) / 2
        if agreement_at(middle, vocab, seed) > agreement:
            low = middle
        else:
            high = middle
    return low if agreement < 1 else 0.0


def _codes(model: ModelConf, drafts: bool) -> Tensor:
    """Returns each token's vector of signs, each standing twice, once negated; (vocab, 2 HALF)."""
    signs_VH = _signs(model.vocab, model.seed)
    if drafts and model.agreement < 1:
        flipped = flips_for(model.agreement, model.vocab, model.seed)
        signs_VH = _flipped(signs_VH, flipped, model.seed)
    return torch.cat([signs_VH, -signs_VH], 1)


def _final_norm(module: Any) -> str:
    """Returns the name of the weight of the norm before the head: the last norm outside of all layers."""
    norms: list[str] = [
        name
        for name, m in module.named_modules()
        if not any(part.isdigit() for part in name.split(".")) and "norm" in type(m).__name__.lower()
    ]
    return f"{norms[-1]}.weight"


def _signs(vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (vocab, HALF), generator=generator).float() * 2 - 1


def _flipped(signs_VH: Tensor, share: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.where(torch.rand(signs_VH.shape, generator=generator) < share, -signs_VH, signs_VH)


def _norm_signs() -> Tensor:
    return torch.tensor([1.0, -1.0]).repeat(HALF // 2)
