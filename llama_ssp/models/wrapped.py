"""The text part of a multimodal checkpoint: its config, and the names of its tensors. No torch.

Such a config.json has the text model's values under `text_config`, or, of Qwen2-VL, among its own. Here they
become the config of a causal model, so that the rest of the program sees a causal model alone. The tensors of
the text part get the names that this causal model has; those of vision and audio are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llama_ssp.models.families import family_of

TEXT = "text_config"
WHOLE = "text_part_of"  # a key of the text part's config: the model_type of the whole
# The model_type of the text part by that of the whole, where text_config does not say it. In these text parts
# a token sees only the tokens before it. (In PaliGemma's it sees the whole prompt.)
TEXT_TYPES = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
    "vipllava": "llama",
}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # whose text part's values may stand among those of the whole
OF_WHOLE = ("model_type", "architectures", "vision_config")
# Text parts that compute what these causal models compute. Positions along the picture's height and width
# (mrope) are those along the text, where all tokens are text.
SAME_ON_TEXT = {
    "gemma4_unified_text": "gemma4_text",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# What these classes do, whatever the config says: they have no such keys.
ALWAYS: dict[str, dict[str, Any]] = {
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    "qwen3_5_moe_text": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "qwen3_vl_text": {"use_sliding_window": False},
    "qwen3_vl_moe_text": {"use_sliding_window": False, "norm_topk_prob": True},
}
MROPE = ("mrope_section", "mrope_interleaved")
ROPE = ("rope_parameters", "rope_scaling")

LLAMA_SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
GEMMA4: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
}
QWEN2_VL: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_VL: dict[str, Any] = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}
# Values that a published text_config leaves out, because transformers' class of the text part has them.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {
        **LLAMA_SIZES,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "gemma4_text": {**GEMMA4, "max_position_embeddings": 131072, "hidden_size_per_layer_input": 256},
    "gemma4_unified_text": {
        **GEMMA4,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
    "llama": LLAMA_SIZES,
    "ministral3": {
        **LLAMA_SIZES,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
    },
    "mistral": {
        **LLAMA_SIZES,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        **LLAMA_SIZES,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3": {
        **LLAMA_SIZES,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "qwen3_5_moe_text": {
        **QWEN3_5,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": {**QWEN3_5, "hidden_size": 4096, "intermediate_size": 12288},
    "qwen3_vl_text": {**LLAMA_SIZES, **QWEN3_VL, "intermediate_size": 22016},
    "qwen3_vl_moe_text": {
        **QWEN3_VL,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
}

# How names of the text part begin on disk, and in the causal model; the first that fits counts.
BEGINNINGS = (
    ("model.language_model.lm_head.", "lm_head."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
# Names of tensors that no text reads, by what they are for.
OTHERS = {
    "vision": re.compile(
        r"(model\.)?(visual|vision_|vit\.|image_|img_|embed_vision|multi_modal_projector|mm_projector|connector)"
    ),
    "audio": re.compile(r"(model\.)?(audio_|embed_audio|speech_)"),
}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of the text part, as that of a causal model; `config` itself if it is of one."""
    whole = config.get("model_type")
    if whole not in TEXT_TYPES:
        return config
    inner: dict[str, Any] = {}
    if isinstance(config.get(TEXT), dict):
        inner = config[TEXT]
    elif whole in FLAT:
        inner = {key: value for key, value in config.items() if key not in OF_WHOLE}

    kind = inner.get("model_type") or TEXT_TYPES[whole]
    if not isinstance(kind, str):
        return config
    result = {**DEFAULTS.get(kind, {}), **inner, **ALWAYS.get(kind, {})}
    result |= _one_dimensional(result)
    result["model_type"] = SAME_ON_TEXT.get(kind, kind)
    result[WHOLE] = whole

    # What stands in the config of the whole, and is of its text part.
    if "quantization_config" in config:
        result["quantization_config"] = config["quantization_config"]
    for key in ("dtype", "torch_dtype", "eos_token_id"):
        if config.get(key) is not None:
            result[key] = config[key]
    said = [part["tie_word_embeddings"] for part in (config, inner) if "tie_word_embeddings" in part]
    result["tie_word_embeddings"] = any(said) if said else family_of(result["model_type"]).tied
    return result


def _one_dimensional(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config's rotary positions for a text alone: without sections for a picture's directions."""
    result: dict[str, Any] = {}
    for key in ROPE:
        rope = config.get(key)
        if not isinstance(rope, dict) or not any(name in rope for name in MROPE):
            continue
        plain = {name: value for name, value in rope.items() if name not in MROPE}
        for name in ("rope_type", "type"):
            if plain.get(name) == "mrope":
                plain[name] = "default"

        if plain.get("rope_type", plain.get("type", "default")) == "default" and key == "rope_scaling":
            result[key] = None
        else:
            result[key] = plain
    return result


def text_name(name: str) -> str | None:
    """Returns the causal model's name for a tensor of a wrapped checkpoint; None if no text reads it."""
    for begin, replacement in BEGINNINGS:
        if name.startswith(begin):
            return replacement + name.removeprefix(begin)
    return None if kind_left_out(name) else name


def naming(config: Mapping[str, Any]) -> Callable[[str], str | None]:
    """Returns what names a tensor on disk as this model does; it gives None for one that no text reads."""
    is_part = WHOLE in config
    unread = family_of(config["model_type"]).unread
    others = []
    for other, own in family_of(config["model_type"]).names.others:
        pattern = re.escape(other).replace(r"\{\}", r"(\d+)")
        others.append((re.compile(rf"(?<=\.){pattern}(?=[._])"), own.replace("{}", r"\1")))

    def name_of(name: str) -> str | None:
        result = text_name(name) if is_part else name
        if result is None or result.startswith(unread):
            return None
        for pattern, own in others:
            result = pattern.sub(own, result)
        return result

    return name_of


def kind_left_out(name: str) -> str:
    """Returns what a tensor that no text reads is for; empty for others."""
    return next((kind for kind, pattern in OTHERS.items() if pattern.match(name)), "")


def left_out_in_words(names: Iterable[str]) -> str:
    """Says how many tensors are left out, as in `vision: 412 tensors`; empty for none."""
    counts = Counter(kind for name in names if text_name(name) is None and (kind := kind_left_out(name)))
    return ", ".join(f"{kind}: {count} tensors" for kind, count in sorted(counts.items()))
