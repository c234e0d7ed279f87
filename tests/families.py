"""Small random models of every tested family, as transformers builds them, made to write varied texts.

Weights as transformers draws them give distributions so flat, and attention so even, that a greedy text soon
repeats one token, and a test on such a text sees little. Here attention is sharp and outweighs the
embedding of the last token, so that a text hangs on all of its prefix.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.config import Weights as WeightsFrom
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.models.assemble import decoder, wanted
from llama_ssp.models.causal_lm import CausalModel, kernels_of
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.families import family_of
from llama_ssp.models.interface import Model, Tally
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.linear import Kernels, LayerFormat
from llama_ssp.models.loader import differences
from llama_ssp.models.passes import all_rows
from llama_ssp.models.safetensors_io import FileSource
from llama_ssp.models.wrapped import naming
from llama_ssp.speculative.state import Prompt
from tests.rig import perturbed

VOCAB, CONTEXT, WINDOW = 97, 160, 11
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
MHA = {"num_key_value_heads": 4}
# Sizes under every name that architectures have for them; each takes those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "sliding_window": WINDOW, "attention_types": [[["global", "local", "global"], 1]],
    "embedding_size": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "d_model": 32,
    "num_layers": 3, "num_heads": 4, "ffn_dim": 48, "decoder_layers": 3, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "rotary_dim": 4,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0, "axial_pos_embds": False, "top_k_experts": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


LLAMA_3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
# Layers that see the whole text have one KV head, twice as wide, whose keys are values.
GEMMA4: dict[str, Any] = {
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "layer_types": KINDS, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", MHA),
    "llama-gqa": ("llama", {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {**MHA, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {**MHA, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "gemma2": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 20}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neo": ("gpt_neo", {"window_size": WINDOW}),
    "opt": ("opt", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "llama3": ("llama", LLAMA_3),
    "falcon": ("falcon", {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True}),
    "falcon-gqa": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 12}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 20, "layer_types": KINDS}),
    # A limit that a mild model's gates reach on both sides.
    "gpt_oss": (
        "gpt_oss", {"head_dim": 8, "layer_types": KINDS, "swiglu_limit": 1.0, "swiglu_alpha": 1.3},
    ),
    "granite": (
        "granite", {
            "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
            "logits_scaling": 3.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "olmo3": (
        "olmo3", {
            "layer_types": KINDS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                   "original_max_position_embeddings": 40},
            },
        },
    ),
    "seed_oss": ("seed_oss", {"head_dim": 12}),
    "exaone4": ("exaone4", {"layer_types": KINDS}),
    # Positions that are scaled from 8 on: with the length of a model no test's text would be.
    "ministral3": (
        "ministral3", {
            "head_dim": 12, "sliding_window": None,
            **rope("yarn", factor=4.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.5),
        },
    ),
    "glm4": ("glm4", {"head_dim": 12}),
    "gemma": ("gemma", {"head_dim": 12}),
    "cohere2": ("cohere2", {"layer_types": KINDS, "logit_scale": 0.3}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    # Half of the groups can be chosen, and queries and keys have norms, as in the larger models.
    "glm4_moe": (
        "glm4_moe", {
            "head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 1.7, "use_qk_norm": True, "n_shared_experts": 2,
        },
    ),
    "qwen3_5": ("qwen3_5_text", HYBRID),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID),
    "qwen3_next": ("qwen3_next", HYBRID),
    "apertus": ("apertus", LLAMA_3),
    "hunyuan": (
        "hunyuan_v1_dense",
        {"head_dim": 12, **rope("dynamic", factor=1.0, alpha=50.0)},
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-moe": ("gemma4_text", {**GEMMA4, "enable_moe_block": True, "moe_intermediate_size": 24}),
}  # fmt: skip

# What the config of a family may say otherwise: the decoder is compared with transformers for these, too.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-mha": ("falcon", {"multi_query": False, "bias": True, "parallel_attn": False}),
    "neox-in-turn": ("gpt_neox", {"use_parallel_residual": False}),
    "neox-tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "opt-untied": ("opt", {"tie_word_embeddings": False}),
    "mlp-bias": ("llama-gqa", {"mlp_bias": True, "attention_bias": True}),
    "qwen3-moe-mixed": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "phi3-window": ("phi3", {"sliding_window": WINDOW}),
    "phi3-partial": ("phi3", rope("default", partial_rotary_factor=0.5)),
    "linear-scaled": ("llama-mha", rope("linear", factor=4.0)),
    "yarn": ("llama-mha", rope("yarn", factor=4.0, original_max_position_embeddings=40)),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "cohere-normed": ("cohere", {"use_qk_norm": True}),
    "cohere-biased": ("cohere", {"attention_bias": True}),
    "glm4-unbiased": ("glm4", {"attention_bias": False}),
    "ministral3-window": ("ministral3", {"sliding_window": WINDOW}),
    "glm4-moe-one-group": (
        "glm4_moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "norm_topk_prob": False,
            "n_shared_experts": 1,
            "attention_bias": True,
            "first_k_dense_replace": 2,
        },
    ),
    "glm4-moe-all": ("glm4_moe", {"first_k_dense_replace": 0}),
    "qwen3.5-biased": ("qwen3_5", {"attention_bias": True}),
    "qwen3.5-one-value-a-key": ("qwen3_5", {"linear_num_key_heads": 4}),
    "qwen3.5-three-values-a-key": ("qwen3_5", {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 2}),
    "qwen3-next-mixed": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "apertus-biased": ("apertus", {"attention_bias": True}),
    "hunyuan-plain": ("hunyuan", rope("default")),
    "gemma4-values": ("gemma4", {"attention_k_eq_v": False}),
    "gemma4-equal-heads": ("gemma4", {"global_head_dim": 8, "num_global_key_value_heads": 2}),
    "gemma4-like-others": ("gemma4", {"global_head_dim": 8, "attention_k_eq_v": False}),
    "gemma4-wide-window": ("gemma4", {"sliding_window": 100}),
    "gemma4-no-window": ("gemma4", {"layer_types": ["full_attention"] * 3}),
    "gemma4-biased": ("gemma4-moe", {"attention_bias": True, "use_bidirectional_attention": "vision"}),
    "falcon-one-norm": ("falcon-gqa", {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 40}),
}
# Whose layers keep states: transformers' modules of these cannot be rolled back.
HYBRIDS = [name for name, (family, _) in FAMILIES.items() if family_of(family).names.delta is not None]

# Values that no architecture has by default, nor SIZES, under every name that architectures have for them.
CHANGED: dict[str, Any] = {
    "rms_norm_eps": 0.1, "layer_norm_eps": 0.1, "layer_norm_epsilon": 0.1,
    "hidden_act": "tanh", "hidden_activation": "tanh", "activation_function": "tanh", "activation": "tanh",
    "head_dim": 12, "ffn_hidden_size": 40, "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
    "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0,
    "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 3,
    "decoder_sparse_step": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 2, "n_shared_experts": 2, "logit_scale": 0.3, "top_k_experts": 3,
    "swiglu_limit": 0.3, "swiglu_alpha": 3.0,
    "sliding_window": 5, "window_size": 5, "use_sliding_window": True, "max_window_layers": 1,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    "attention_types": [[["local", "global", "global"], 1]], "no_rope_layers": [0, 1, 1],
}  # fmt: skip
# Each is the contrary of what the architecture has by default.
FLAGS = (
    "attention_bias", "mlp_bias", "bias", "enable_bias", "norm_topk_prob", "use_parallel_residual",
    "use_qk_norm", "attention_k_eq_v", "enable_moe_block",
)  # fmt: skip


def use_gates_of_configs() -> None:
    """Has gpt-oss' experts clamp as their config says; before 5.19 transformers has the numbers in code."""
    made_with_constants = GptOssExperts.__init__

    def made_with_config(experts: Any, config: Any) -> None:
        made_with_constants(experts, config)
        experts.alpha = getattr(config, "swiglu_alpha", experts.alpha)
        experts.limit = getattr(config, "swiglu_limit", experts.limit)

    GptOssExperts.__init__ = made_with_config


if not hasattr(CONFIG_MAPPING["gpt_oss"](), "swiglu_limit"):
    use_gates_of_configs()


def ragged_prompts(*lengths: int) -> list[Prompt]:
    """Prompts of these lengths that differ from the first token on."""
    return [
        Prompt(f"p{n}", tuple((7 * n + 3 * i) % (VOCAB - 3) + 3 for i in range(length)))
        for n, length in enumerate(lengths)
    ]


PROMPTS = ragged_prompts(9, 1, 6, 4, 12)


def config_of(architecture: str, own: dict[str, Any], sizes: dict[str, Any] = SIZES) -> Any:
    """The architecture's config with its own values, and with those of `sizes` that it knows by a name."""
    kind = CONFIG_MAPPING[architecture]
    aliases = kind.attribute_map
    names = {*getattr(kind, "__dataclass_fields__", ()), *aliases}
    said = {aliases.get(key, key) for key in own}
    rest = {key: sizes[key] for key in sizes if key in names and aliases.get(key, key) not in said}
    return kind(**own, **rest)


def random_module(config: Any, mild: bool, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Draws the weights as transformers does, and makes them larger.

    A `mild` model attends evenly: its logits move little with rounding, its texts vary less.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **kernels_of(config, dtype))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            even = 8.0 if parameter.ndim > 1 and "norm" not in key else 1.0
            parameter.mul_(even if mild else _factor(key, bool(config.tie_word_embeddings)))
    return remembering(model).to(dtype).eval()


def remembering(module: Any) -> Any:
    """Gives linear attention decays that are neither 0 nor 1, and betas of all sizes; returns the module.

    As transformers draws its weights, a state forgets a token at the next one.
    """
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith("A_log"):
                parameter.copy_(torch.linspace(0.01, 0.4, len(parameter)).log())
            elif key.endswith("dt_bias"):
                parameter.copy_(torch.linspace(-2.0, 0.5, len(parameter)))
            elif key.endswith(("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")):
                parameter.mul_(0.25)
    return module


def build(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, mild: bool = False, **changes: Any
) -> Any:
    """A random model of a family or variant, with a distribution that is neither flat nor certain."""
    family, others = VARIANTS.get(name, (name, {}))
    architecture, sizes = FAMILIES[family]
    return random_module(config_of(architecture, sizes | others | changes), mild, seed, dtype)


def module_of(name: str, **changes: Any) -> Any:
    """A mild module, with biases and sinks that are not 0 and norms that are not 1."""
    return varied(build(name, mild=True, **changes))


def changed_module(architecture: str) -> Any:
    """Returns a mild module with other values than the default ones for all that its config can say."""
    plain = CONFIG_MAPPING[architecture]()
    changes = {key: not getattr(plain, key) for key in FLAGS if hasattr(plain, key)}
    if rotary := getattr(plain, "rope_parameters", None):
        kinds = [kind for kind in rotary if kind in KINDS]
        changes |= rope("default", rope_theta=50.0)
        if "llama_4_scaling_beta" in rotary:
            changes["rope_parameters"] |= dict(llama_4_scaling_beta=0.7, original_max_position_embeddings=5)
        if kinds:  # a table for each kind of layer
            each = {kind: {"rope_type": "default", "rope_theta": 50.0 + n} for n, kind in enumerate(kinds)}
            changes["rope_parameters"] = each

    family = family_of(architecture)
    changes |= family.needed
    if family.names.delta is not None:
        changes["layer_types"] = ["full_attention", "linear_attention", "linear_attention"]
    if family.full_heads:
        changes |= {"layer_types": [KINDS[2], KINDS[0], KINDS[2]], "global_head_dim": 20}
        changes["num_global_key_value_heads"] = 1
    config = config_of(architecture, changes, SIZES | CHANGED)
    return varied(random_module(config, mild=True))


def varied(module: Any) -> Any:
    """Gives the module biases and sinks that are not 0, and norms that are not 1; returns it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif any(part in key for part in ("norm", ".ln_", "alpha_", "router.scale", "expert_scale")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        for key, buffer in module.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            elif key.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif key.endswith("act_fn.beta"):
                buffer.fill_(0.7)
            elif key.endswith("act_fn.eps"):
                buffer.fill_(-0.1)
    return module


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


LATENT = "axk1 deepseek_v2 deepseek_v3 dots3_note_text glm4_moe_lite longcat_flash minicpm3 youtu"
ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert "
    "roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
)
# What single architectures need instead of these sizes; encoders have to be told that they decode.
NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LATENT.split(), MHA),
    **{name: {"is_decoder": True} for name in ENCODERS.split()},
    **{name: {"mamba_n_heads": 8, "mamba_d_head": 8} for name in ("bamba", "granitemoehybrid")},
    **{name: {"layer_types": ["conv", "full_attention", "conv"]} for name in ("lfm2", "lfm2_moe")},
    "gpt_neo": {"window_size": WINDOW},
    "moshi": {"sliding_window": CONTEXT},  # of no effect, as in its own config
    "doge": {"sliding_window": None},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
}
MAX_PARAMETERS = 50_000_000  # of what is still tiny


def tiny(architecture: str, **changes: Any) -> Any:
    """A random tiny model of any architecture that transformers can make causal.

    Raises ValueError where its sizes are in nested configs.
    """
    kinds = list(dict.fromkeys(getattr(CONFIG_MAPPING[architecture](), "layer_types", None) or ()))
    sizes = {**SIZES, "eos_token_id": None, "head_dim": 8}
    if len(kinds) > 1:  # not only the first of them
        sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(sizes["num_hidden_layers"])]
    config = config_of(architecture, NEEDS.get(architecture, {}) | changes, sizes)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters: its sizes are in nested configs")
    return random_module(config, mild=True)


def greedy_text(module: Any, ids: Sequence[int], new: int, end: int | None = None) -> list[int]:
    """What transformers' `generate` writes after one prompt alone; `end` in place of its own end token."""
    prompt = torch.tensor([ids])
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=end)
    text: Tensor = module.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    return text[0, len(ids) :].tolist()


DTYPES = {TORCH_DTYPES[dtype]: dtype for dtype in (Dtype.fp64, Dtype.fp32, Dtype.fp16, Dtype.bf16)}


def decoder_of(module: Any, ranks: Ranks = ALONE, drafts: bool = False, **how: Any) -> Decoder:
    """The module as a decoder of our own, in the module's number format, by way of its files."""
    form = LayerFormat(DTYPES[module.dtype], **how)
    with TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        names, prefix = wanted(module.config), module.base_model_prefix
        name_of = naming(module.config.to_dict())
        with closing(FileSource(Path(folder), names, prefix, name_of)) as source:
            unlike = differences(wanted(module.config), source.shapes, module.config)
            assert not any(unlike.values()), unlike
            return decoder(module.config, source, ranks, form, drafts)


def model_of(
    name: str, kind: type[DecoderModel] = DecoderModel, noise: float = 0.0, ranks: Ranks = ALONE,
    kernels: Kernels = Kernels.none, **changes: Any,
) -> Any:  # fmt: skip
    """A random model that runs our decoder; with noise it agrees with the plain one sometimes."""
    module = build(name, **changes)
    if noise:
        perturbed(module, noise)
    return kind(decoder_of(module, kernels=kernels), module.config, "m", ranks)


def runnable(module: Any, name: str) -> Model:
    """The module as transformers runs it, or our decoder where it makes its own masks, or keeps states."""
    family = family_of(module.config.model_type)
    if family.masks_inside or family.names.delta is not None:
        return DecoderModel(decoder_of(module), module.config, name)
    return CausalModel(module, name)


# How a decoder is compared with transformers: what each pass feeds, (kept before, fed) a row. Prefill in
# chunks, ragged steps, rollbacks over stale keys, and texts beyond the window.
PASSES = [
    ((0, 0, 0), (9, 5, 1)), ((9, 5, 1), (4, 1, 3)), ((10, 6, 2), (3, 5, 0)), ((13, 11, 2), (1, 2, 4)),
    ((14, 13, 6), (17, 9, 1)), ((31, 22, 7), (1, 5, 1)), ((30, 27, 8), (1, 1, 1)),
]  # fmt: skip
CAPACITY = 48
REWINDS = 3  # tokens that PASSES roll back
TOLERANCE = 1e-5  # of the largest logit


def cache_of(model: Decoder, rows: int) -> KVCache:
    """A cache that holds garbage where nothing has been written."""
    cache = KVCache.of(
        rows=rows, capacity=CAPACITY, shapes=model.cache_shapes, dtype=model.embedding.weight.dtype,
        device=torch.device("cpu"), tally=Tally(), rewinds=REWINDS,
    )  # fmt: skip
    for layer in cache.layers:
        for tensor in layer:
            if tensor.is_floating_point():
                tensor.fill_(7.0)
    return cache


def walked(model: Decoder, **how: Any) -> tuple[list[Tensor], list[list[int]]]:
    """The logits of every row in every pass, and the text that they follow."""
    cache, texts, generator = cache_of(model, 3), [[], [], []], torch.Generator().manual_seed(0)
    logits, prefixes = [], []
    for start, count in PASSES:
        tokens = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in count]
        texts = [text[:s] + new for text, s, new in zip(texts, start, tokens, strict=True)]
        token_T = torch.tensor([token for new in tokens for token in new])
        logit_TV, _ = model(token_T, cache.places(all_rows(start, count), **how), cache.layers)
        logits += [part for part, n in zip(logit_TV.split(count), count, strict=True) if n]
        prefixes += [text for text, n in zip(texts, count, strict=True) if n]
    return logits, prefixes


def require_same(module: Any, logits: list[Tensor], prefixes: list[list[int]]) -> None:
    """By transformers' own pass over each whole text, with its own masks and without a cache."""
    for logit_WV, text in zip(logits, prefixes, strict=True):
        expected_WV = module(torch.tensor([text]), use_cache=False).logits[0, -len(logit_WV) :]
        worst, scale = float((logit_WV - expected_WV).abs().max()), float(expected_WV.abs().max())
        assert worst <= TOLERANCE * scale, (worst, scale, len(text), len(logit_WV))


def synthetic(family: str, **changes: Any) -> ModelConf:
    row, experts, others = family_of(family), {}, {}
    if row.full_heads:
        others = {"full_layers": 2, "full_kv_heads": 3, "full_head_dim": 32, "keys_are_values": True}
    if row.names.router:
        mixed = {"expert_ffn": 36, "dense_layers": 1} if row.normed_top else {"expert_ffn": 148}
        if row.names.shared_down:
            mixed["shared_ffn"] = 36
        experts = {"experts": 4, "experts_per_token": 2, **mixed}
    if row.names.delta is not None:
        experts |= {
            "linear_layers": 2, "linear_key_heads": 3, "linear_value_heads": 6, "linear_key_dim": 8,
            "linear_value_dim": 10, "linear_kernel": 4,
        }  # fmt: skip
    return ModelConf(
        name="made", weights=WeightsFrom.synthetic, family=family, n_layers=4, n_heads=6,
        n_kv_heads=3 if row.grouped or row.multi_query else 6, head_dim=16, dim=96, ffn=148, vocab=101,
        context=64, **experts, **others, **changes,
    )  # fmt: skip
