"""Models of any real shape from a seed: for trying a machine and for benchmarks, no checkpoint needed.

All of the work of a real model is done, on weights that do not matter: what layers write into the
residual stream is multiplied by zero. The law comes from a code that every synthetic model of a seed
shares. Token t is a vector of signs; its next-token logits are sums of products of signs, which the
final norm's signs keep from favouring t itself. So target and draft have the same law, whatever their
sizes; a draft flips a share of its signs, found by bisection, until the laws overlap as asked
(`draft.agreement` = mean of sum(min(target, draft)) at temperature 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.config import ModelConf
from llama_ssp.errors import ModelError
from llama_ssp.load.causal import attention_of

HALF = 32  # signs per token; each stands twice, once negated, so that a vector's mean is zero
SPREAD = 3.0  # standard deviation of the logits
RESIDUAL_WRITERS = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "out_proj", "fc2", "c_proj")
WITHOUT_ROPE = ("gpt_neo", "opt")
POSITION_TABLES = ("wpe", "embed_positions")
TILE = 2**18


def config_for(model: ModelConf) -> Any:
    """transformers' config of the model's shape."""
    from transformers import AutoConfig

    shape: dict[str, Any] = {
        "vocab_size": model.vocab, "hidden_size": model.dim, "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads, "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim, "intermediate_size": model.ffn,
        "max_position_embeddings": model.context, "tie_word_embeddings": model.tied,
    }  # fmt: skip
    if model.sliding_window and model.family in ("mistral", "gemma2"):
        shape["sliding_window"] = model.sliding_window
    if model.family == "gpt_neo":
        kinds = [[["global", "local"], model.n_layers // 2]]
        shape = {
            "vocab_size": model.vocab, "hidden_size": model.dim, "num_layers": model.n_layers,
            "num_heads": model.n_heads, "intermediate_size": model.ffn, "attention_types": kinds,
            "max_position_embeddings": model.context, "window_size": model.sliding_window or 256,
        }  # fmt: skip
    if model.family == "opt":
        shape = {**shape, "ffn_dim": model.ffn, "word_embed_proj_dim": model.dim}
    if model.family in ("gpt_neox", "opt"):
        shape = {k: v for k, v in shape.items() if k not in ("num_key_value_heads", "head_dim")}
    try:
        config = AutoConfig.for_model(model.family, **shape)
    except ValueError:
        raise ModelError(
            "the family is not one that transformers knows", where=model.name, found=model.family,
            fix="correct model.family",
        ) from None  # fmt: skip
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return config


def build(model: ModelConf, dtype: torch.dtype) -> nn.Module:
    """The module with real buffers and parameters still to be made."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    if model.head_dim % 2 and model.family not in WITHOUT_ROPE:
        raise ModelError(
            "rotary positions need an even head size", where=f"model {model.name}", found=model.head_dim,
            fix="correct head_dim",
        )  # fmt: skip
    config = config_for(model)
    with init_empty_weights(include_buffers=False):
        module: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_of(config)
        )
    return module


def fill(module: Any, model: ModelConf, device: torch.device, drafts: bool) -> Any:
    """Gives every parameter its value, on the device."""
    if model.dim < 2 * HALF:
        raise ModelError(
            "the model is too narrow for synthetic weights", where=model.name, found=f"dim {model.dim}",
            allowed=f"{2 * HALF} or more", fix="widen it",
        )  # fmt: skip
    noise = torch.randn(TILE, generator=torch.Generator().manual_seed(model.seed)) * 0.02
    for name, parameter in list(module.named_parameters()):
        owner, leaf = _owner(module, name)
        value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.ndim > 1 and not _is_quiet(name):
            _tile(value, noise)
        elif parameter.ndim == 1 and leaf == "weight" and model.family != "gemma2":
            value.fill_(1.0)
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    module.to(device)
    module.tie_weights()
    _write_law(module, model, drafts)
    return module


def agreement_at(flipped: float, vocab: int, seed: int, tokens: int = 64) -> float:
    """The mean overlap of the shared law and the law of a draft that flips this share of signs."""
    signs_VH = _signs(vocab, seed)
    draft_VH = _flipped(signs_VH, flipped, seed)
    chosen = torch.arange(0, vocab, max(1, vocab // tokens))[:tokens]
    weight_H = _norm_signs()
    target, draft = (
        torch.softmax(SPREAD / HALF**0.5 * (codes[chosen] * weight_H) @ codes.T, -1)
        for codes in (signs_VH, draft_VH)
    )
    return float(torch.minimum(target, draft).sum(-1).mean())


def flips_for(agreement: float, vocab: int, seed: int) -> float:
    """The share of signs to flip for this agreement; what flipping half of them gives is the least."""
    low, high = 0.0, 0.5
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if agreement_at(middle, vocab, seed) > agreement else (low, middle)
    return low if agreement < 1 else 0.0


def _write_law(module: Any, model: ModelConf, drafts: bool) -> None:
    signs_VH = _signs(model.vocab, model.seed)
    if drafts and model.agreement < 1:
        flipped = flips_for(model.agreement, model.vocab, model.seed)
        signs_VH = _flipped(signs_VH, flipped, model.seed)
    codes = torch.cat([signs_VH, -signs_VH], 1)
    for table in (module.get_input_embeddings().weight, module.get_output_embeddings().weight):
        table.zero_()
        table[:, : 2 * HALF] = codes.to(table)
    # A normed vector has entries sqrt(dim / 2H); HALF products of signs, each standing twice.
    scale = SPREAD / HALF**0.5 / 2 / (model.dim / (2 * HALF)) ** 0.5
    norm: Any = _final_norm(module)
    weight = torch.zeros(model.dim)
    weight[: 2 * HALF] = scale * _norm_signs().repeat(2)
    norm.get_parameter("weight").copy_(weight - 1 if model.family == "gemma2" else weight)


def _final_norm(module: Any) -> nn.Module:
    """The norm before the head: the last module directly in the backbone that is one."""
    norms: list[nn.Module] = [
        m
        for name, m in module.named_modules()
        if not any(part.isdigit() for part in name.split(".")) and "norm" in type(m).__name__.lower()
    ]
    return norms[-1]


def _signs(vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (vocab, HALF), generator=generator).float() * 2 - 1


def _flipped(signs_VH: Tensor, share: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.where(torch.rand(signs_VH.shape, generator=generator) < share, -signs_VH, signs_VH)


def _norm_signs() -> Tensor:
    return torch.tensor([1.0, -1.0]).repeat(HALF // 2)


def _is_quiet(name: str) -> bool:
    parts = name.split(".")
    return parts[-2] in RESIDUAL_WRITERS + POSITION_TABLES


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _tile(value: Tensor, noise: Tensor) -> None:
    """Fills with repeated noise: the numbers do not matter, and a 30B model has many."""
    flat, tile = value.view(-1), noise.to(value)
    whole = flat.numel() // TILE * TILE
    flat[:whole].view(-1, TILE).copy_(tile)
    flat[whole:].copy_(tile[: flat.numel() - whole])
