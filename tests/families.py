"""Small random models of every tested family, as transformers builds them, made to write varied texts.

Weights as transformers draws them give distributions so flat, and attention so even, that a greedy text soon
repeats one token, and a test on such a text sees little. Here attention is sharp and outweighs the
embedding of the last token, so that a text hangs on all of its prefix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from llama_ssp.config import ModelConf
from llama_ssp.config import Weights as WeightsFrom
from llama_ssp.models.assemble import decoder
from llama_ssp.models.causal_lm import CausalModel, kernels_of
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.families import family_of
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.interface import Model
from llama_ssp.models.sharding import Cut
from llama_ssp.speculative.state import Prompt

VOCAB, CONTEXT = 97, 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
WINDOW = 11
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", {}),
    "llama-gqa": ("llama", {"num_key_value_heads": 2}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen2-window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "gemma2": (
        "gemma2",
        {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neo": (
        "gpt_neo",
        {
            "num_layers": 3, "num_heads": 4, "window_size": WINDOW,
            "attention_types": [[["global", "local", "global"], 1]],
        },
    ),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True}),
    "phi3": ("phi3", {"num_key_value_heads": 2, "sliding_window": None}),
    "llama3": (
        "llama",
        {
            "num_key_value_heads": 2, "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            },
        },
    ),
    "falcon": ("falcon", {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True}),
    "falcon-gqa": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_key_value_heads": 2, "head_dim": 12, "moe_intermediate_size": 24, "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW, "layer_types": KINDS,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW, "layer_types": KINDS,
            "num_local_experts": 4, "num_experts_per_tok": 2,
        },
    ),
    "granite": (
        "granite",
        {
            "num_key_value_heads": 2, "embedding_multiplier": 2.0, "attention_multiplier": 0.2,
            "residual_multiplier": 0.5, "logits_scaling": 3.0,
        },
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
    "smollm3": ("smollm3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1]}),
}  # fmt: skip


def ragged_prompts(*lengths: int) -> list[Prompt]:
    """Prompts of these lengths that differ from the first token on."""
    return [
        Prompt(f"p{n}", tuple((7 * n + 3 * i) % (VOCAB - 3) + 3 for i in range(length)))
        for n, length in enumerate(lengths)
    ]


def build(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, mild: bool = False, **changes: Any
) -> Any:
    """A random model with a distribution that is neither flat nor certain.

    A `mild` one attends evenly: its logits move little with rounding, its texts vary less.
    """
    family, own = FAMILIES[name]
    sizes = dict(SIZES)
    if family == "gpt_neo":
        for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            sizes.pop(key)
    if family == "opt":
        sizes.pop("intermediate_size")
        sizes.pop("num_key_value_heads")
    if family in ("gpt_neox", "falcon"):
        sizes.pop("num_key_value_heads")
    config = AutoConfig.for_model(family, **{**sizes, **own, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **kernels_of(config, dtype))
    tied = bool(config.tie_word_embeddings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.mul_(8.0 if mild and parameter.ndim > 1 else 1.0 if mild else _factor(key, tied))
    return model.to(dtype).eval()


def _factor(key: str, tied: bool) -> float:
    if key.endswith(("q_norm.weight", "k_norm.weight")):
        return 2.5
    if not key.endswith("weight") or "norm" in key or ".ln_" in key:
        return 1.0
    if "embed_out" in key or "lm_head" in key:
        return 24.0
    if "embed" in key or "wte" in key or "wpe" in key:
        return 8.0 if tied else 1.0
    if "query_key_value" in key:
        return 40.0
    return 24.0 if any(part in key for part in ("q_proj", "k_proj", "qkv_proj")) else 16.0


# Sizes of a tiny model, under every name that architectures have for them; each takes those that it knows.
TINY: dict[str, Any] = {
    **SIZES, "eos_token_id": None, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW,
    "embedding_size": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "d_model": 32,
    "num_layers": 3, "num_heads": 4, "ffn_dim": 48, "decoder_layers": 3, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
# What single architectures need beside them, or instead; encoders have to be told that they decode.
NEEDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"attention_types": [[["global", "local", "global"], 1]], "window_size": WINDOW}, "gpt_neo"),
    ({"rotary_dim": 4}, "codegen gptj"),
    (
        {"num_key_value_heads": 4},
        "axk1 deepseek_v2 deepseek_v3 dots3_note_text glm4_moe_lite longcat_flash minicpm3 youtu",
    ),
    ({"sliding_window": CONTEXT}, "moshi"),  # of no effect, as in its own config
    (
        {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
        "gemma3n_text gemma4_text",
    ),
    ({"mamba_n_heads": 8, "mamba_d_head": 8}, "bamba granitemoehybrid"),
    ({"num_heads": 8, "head_dim": 8}, "mamba2"),
    ({"layer_types": ["conv", "full_attention", "conv"]}, "lfm2 lfm2_moe"),
    ({"is_decoder": True, "axial_pos_embds": False}, "reformer"),
    ({"num_experts_per_tok": 1}, "zaya"),
    ({"sliding_window": None}, "doge"),
    (
        {"is_decoder": True},
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod",
    ),
)
SPECIAL = {name: own for own, names in NEEDS for name in names.split()}
MOST = 50_000_000  # parameters of what is still tiny


def tiny_config(architecture: str, **changes: Any) -> Any:
    """The config of a tiny model of any architecture that transformers can make causal."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[architecture]
    known = {*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "attribute_map", ())}
    sizes = {key: size for key, size in TINY.items() if key in known}
    kinds = list(dict.fromkeys(getattr(kind(), "layer_types", None) or ())) if "layer_types" in known else []
    if len(kinds) > 1:  # as many of them as there are layers, not only the first
        sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(sizes["num_hidden_layers"])]
    return kind(**{**sizes, **SPECIAL.get(architecture, {}), **changes})


def tiny(architecture: str, **changes: Any) -> Any:
    """A random tiny model of any architecture; ValueError where its sizes are others."""
    config = tiny_config(architecture, **changes)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > MOST:
        raise ValueError(f"{parameters:,} parameters: its sizes are in nested configs")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **kernels_of(config, torch.float32))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return model.float().eval()


class Weights:
    """The weights of a module that is in memory, by the names that its checkpoint gives them."""

    def __init__(self, module: Any) -> None:
        self._weights = dict(module.state_dict())
        self.shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def read(self, name: str, cut: Cut | None) -> Tensor:
        return taken(self._weights[name], cut)


def decoder_of(module: Any, **how: Any) -> Decoder:
    """The module as a decoder of our own, in its number format; of families without experts."""
    return decoder(module.config, Weights(module), **{"dtype": module.dtype, **how})


def runnable(module: Any, name: str) -> Model:
    """The module as transformers runs it, or our decoder where its attention makes its own masks."""
    if family_of(module.config.model_type).masks_inside:
        return DecoderModel(decoder_of(module), module.config, name)
    return CausalModel(module, name)


SYNTHETIC = ModelConf(
    name="made", weights=WeightsFrom.synthetic, n_layers=4, n_heads=6, n_kv_heads=3, head_dim=16, dim=96,
    ffn=148, vocab=101, context=64,
)  # fmt: skip


def synthetic(family: str, **changes: Any) -> ModelConf:
    """Sizes of a small model with synthetic weights."""
    row = family_of(family)
    model = replace(
        SYNTHETIC, family=family, n_kv_heads=3 if row.grouped or row.multi_query else 6, **changes
    )
    if not row.names.router:
        return model
    mixed: dict[str, Any] = {"expert_ffn": 36, "dense_layers": 1} if row.normed_top else {"expert_ffn": 148}
    return replace(model, experts=4, experts_per_token=2, **mixed)
