"""What happens with the config.json of models that people have: planned, run in one process, or refused.

EXPECTED says it for each model of published_configs.py. A change of what the program can do changes it.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from llama_ssp.config import SIZES, ModelConf
from llama_ssp.config.compose import composed
from llama_ssp.config.presets import options
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import outlined
from llama_ssp.models.folder import require_counts, require_safe
from llama_ssp.models.model_config import hub_config
from llama_ssp.models.sharding import is_planned
from llama_ssp.models.sizes import LINEAR_SIZES
from llama_ssp.models.wrapped import TEXT
from tests.checkpoints import edit
from tests.published_configs import CONFIGS

ROWS = 25


@dataclass(frozen=True)
class Outcome:
    """Says where a model ends, and with which message."""

    planned: bool = False
    refused_in_plan: str = ""


PLANNED = Outcome(planned=True)
ONE_PROCESS = Outcome()
MIXED = Outcome(refused_in_plan="cannot be read.*modelopt, MIXED_PRECISION")
MAMBA = Outcome(refused_in_plan="cannot roll back.*mamba_")
UNKNOWN_WHOLE = "text part of this architecture is not known.*found "
INDEXED = Outcome(refused_in_plan="cannot roll back.*index_")
EXPECTED = {
    "Qwen/Qwen3.5-35B-A3B": PLANNED,
    "nvidia/Qwen3.6-35B-A3B-NVFP4": MIXED,
    "Qwen/Qwen3.5-27B": PLANNED,
    "nvidia/Qwen3.6-27B-NVFP4": MIXED,
    "Qwen/Qwen3-VL-2B-Instruct": PLANNED,
    "Qwen/Qwen3-VL-4B-Instruct": PLANNED,
    "Qwen/Qwen3-VL-8B-Instruct": PLANNED,
    "Qwen/Qwen3-VL-32B-Instruct": PLANNED,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": PLANNED,
    "Qwen/Qwen3-VL-235B-A22B-Instruct": PLANNED,
    "google/gemma-4-26B-A4B": PLANNED,
    "nvidia/Gemma-4-31B-IT-NVFP4": PLANNED,
    "google/gemma-4-E2B-it": ONE_PROCESS,
    "google/gemma-4-E4B-it": ONE_PROCESS,
    "google/gemma-4-12B-it": PLANNED,
    "Qwen/Qwen3-0.6B": PLANNED,
    "Qwen/Qwen3-1.7B": PLANNED,
    "Qwen/Qwen3-4B": PLANNED,
    "Qwen/Qwen3-8B": PLANNED,
    "Qwen/Qwen3-14B": PLANNED,
    "Qwen/Qwen3-32B": PLANNED,
    "Qwen/Qwen3-32B-FP8": PLANNED,
    "Qwen/Qwen3-30B-A3B": PLANNED,
    "Qwen/Qwen3-30B-A3B-FP8": PLANNED,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": PLANNED,
    "Qwen/Qwen2.5-32B-Instruct": PLANNED,
    "Qwen/Qwen2.5-Coder-7B-Instruct": PLANNED,
    "Qwen/Qwen2.5-Coder-32B-Instruct": PLANNED,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": PLANNED,
    "meta-llama/Llama-3.1-8B": PLANNED,
    "meta-llama/Llama-3.1-70B": PLANNED,
    "meta-llama/Llama-3.2-1B-Instruct": PLANNED,
    "meta-llama/Llama-3.2-3B-Instruct": PLANNED,
    "meta-llama/Llama-3.3-70B-Instruct": PLANNED,
    "openai/gpt-oss-20b": PLANNED,
    "openai/gpt-oss-120b": PLANNED,
    "google/gemma-3-1b-it": PLANNED,
    "google/gemma-3-4b-it": PLANNED,
    "google/gemma-3-12b-it": PLANNED,
    "google/gemma-3-27b-it": PLANNED,
    "mistralai/Mistral-7B-Instruct-v0.3": PLANNED,
    "mistralai/Mistral-Nemo-Instruct-2407": PLANNED,
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": PLANNED,
    "mistralai/Devstral-Small-2-24B-Instruct-2512": PLANNED,
    "mistralai/Devstral-2-123B-Instruct-2512": PLANNED,
    "mistralai/Ministral-3-3B-Instruct-2512": PLANNED,
    "mistralai/Ministral-3-14B-Instruct-2512": PLANNED,
    "Qwen/Qwen3.8-Flash-Next": Outcome(refused_in_plan=UNKNOWN_WHOLE + "qwen4_exp"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": PLANNED,
    "zai-org/GLM-4.5-Air": PLANNED,
    "zai-org/GLM-4.7-Flash": ONE_PROCESS,
    "zai-org/GLM-5": INDEXED,
    "zai-org/GLM-5.1-FP8": INDEXED,
    "zai-org/GLM-5.2": INDEXED,
    "deepseek-ai/DeepSeek-V3": ONE_PROCESS,
    "deepseek-ai/DeepSeek-R1": ONE_PROCESS,
    "deepseek-ai/DeepSeek-V3.2": INDEXED,
    "deepseek-ai/DeepSeek-V4-Flash": Outcome(refused_in_plan="cannot roll back.*compress_ratios"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": MAMBA,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": MAMBA,
    "ibm-granite/granite-4.0-h-small": MAMBA,
    "microsoft/phi-4": PLANNED,
    "microsoft/Phi-4-mini-instruct": PLANNED,
    "allenai/Olmo-3.1-32B-Instruct": PLANNED,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": PLANNED,
    "LGAI-EXAONE/EXAONE-4.0-32B": PLANNED,
    "LGAI-EXAONE/EXAONE-4.0-1.2B": PLANNED,
    "CohereLabs/c4ai-command-r7b-12-2024": PLANNED,
    "swiss-ai/Apertus-8B-Instruct-2509": PLANNED,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": PLANNED,
    "HuggingFaceTB/SmolLM3-3B": PLANNED,
}
# Whose sizes are not known in full, so that nothing can be said of them.
INCOMPLETE = {"ibm-granite/granite-4.1-8b", "allenai/Olmo-3-1025-7B"}


def folder_of(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name].config), encoding="utf-8")
    return folder


def outline(folder: Path) -> ModelConf:
    return outlined(ModelConf(name="made", path=str(folder)), "model")


def test_every_row_has_a_model_and_every_model_an_outcome() -> None:
    assert {published.row for published in CONFIGS.values()} == set(range(1, ROWS + 1))
    assert EXPECTED.keys() | INCOMPLETE == CONFIGS.keys() and not EXPECTED.keys() & INCOMPLETE


@pytest.mark.parametrize("name", CONFIGS)
def test_a_source_stands_next_to_the_figures(name: str) -> None:
    published = CONFIGS[name]
    assert published.source
    known = {**published.config, **published.config.get(TEXT, {})}
    assert not known.keys() & set(published.unknown)
    assert name not in INCOMPLETE or published.unknown


@pytest.mark.parametrize("name", CONFIGS)
def test_sound_counts_are_not_refused(name: str, tmp_path: Path) -> None:
    """Vocabularies and positions in keys with `layer` in them, too; as many layers are (the control)."""
    config = deepcopy(CONFIGS[name].config)
    require_counts(tmp_path, config)
    config.get(TEXT, config)["num_hidden_layers"] = 262144
    with pytest.raises(ModelError, match=r"number of layers.*num_hidden_layers 262144"):
        require_counts(tmp_path, config)


def test_a_vocabulary_for_each_layer_is_among_them() -> None:
    texts = [published.config.get(TEXT, {}) for published in CONFIGS.values()]
    assert max(text.get("vocab_size_per_layer_input", 0) for text in texts) == 262144


@pytest.mark.few(30)
@pytest.mark.parametrize("name", EXPECTED)
def test_what_happens_with_it(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    folder = folder_of(name, tmp_path)
    if expected.refused_in_plan:
        with pytest.raises(ModelError, match=expected.refused_in_plan):
            outline(folder)
        return

    model = outline(folder)
    assert is_planned(model) == expected.planned
    if expected.planned:
        assert sizes_of(model) == sizes_by_transformers(CONFIGS[name].config)
    require_safe(folder)
    if CONFIGS[name].config["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    content = CONFIGS[name].config
    if "long_factor" not in str(content.get("rope_scaling")):  # where the table has no factors
        (folder / "config.json").write_text(json.dumps(without_scaling(content)), encoding="utf-8")
    assert hub_config(folder).model_type == model.family


def test_code_of_another_architecture_is_refused(tmp_path: Path) -> None:
    """The control of DeepSeek's and Phi's: their auto_map names classes that transformers has."""
    folder = folder_of("microsoft/Phi-4-mini-instruct", tmp_path)
    require_safe(folder)
    edit(
        folder / "config.json",
        lambda config: config.update(auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3MoreForCausalLM"}),
    )
    with pytest.raises(ModelError, match=r"needs to run code of its own.*auto_map"):
        require_safe(folder)


def sizes_of(model: ModelConf) -> dict[str, Any]:
    kept = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "ffn", "vocab", "context", "tied")
    experts = ("experts", "experts_per_token", "expert_ffn") if model.experts else ()
    full = ("full_layers", "full_kv_heads", "full_head_dim") if model.full_layers else ()
    return {key: getattr(model, key) for key in (*kept, *experts, *full)}


def sizes_by_transformers(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes that transformers' own class reads in the config, by our names.

    Where a wrapped config does not say whether the output matrix is tied, the text part's class counts: the
    class of Mistral 3's whole ties it, and the published weights have one.
    """
    whole = CONFIG_MAPPING[content["model_type"]].from_dict(without_scaling(content))
    config = whole.get_text_config()
    tied = (whole if "tie_word_embeddings" in content else config).tie_word_embeddings
    own = config
    full = None
    if getattr(config, "per_layer_config", None) and config.is_heterogeneous:
        own = config.per_layer_config["sliding_attention"]
        full = config.per_layer_config["full_attention"]
    sizes = {
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": own.num_key_value_heads,
        "head_dim": getattr(own, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "dim": config.hidden_size,
        "ffn": getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        "vocab": config.vocab_size,
        "context": config.max_position_embeddings,
        "tied": tied,
    }
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        sizes["experts"] = experts
        many = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
        sizes["experts_per_token"] = many
        sizes["expert_ffn"] = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    if full is not None:
        sizes["full_layers"] = config.layer_types.count("full_attention")
        sizes["full_kv_heads"] = full.num_key_value_heads
        sizes["full_head_dim"] = full.head_dim
    return sizes


def without_scaling(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy without scaled positions: Phi-4-mini's factors are not in the table."""
    return {key: deepcopy(value) for key, value in content.items() if key != "rope_scaling"}


EXPERTS = ("experts", "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers")
OTHER_SIZES = ("family", "tied", "sliding_window", *EXPERTS, *LINEAR_SIZES)
PRESETS = {}
for _preset in options("model"):
    _model = composed([f"model={_preset}", "draft=none"]).model
    if _model.repo in CONFIGS and _model.family:
        PRESETS[_preset] = _model


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_sizes_of_the_published_config(preset: str, tmp_path: Path) -> None:
    """So that its files are not refused as another model's."""
    model = PRESETS[preset]
    assert model.repo is not None
    said = outline(folder_of(model.repo, tmp_path))
    for key in (*SIZES, *OTHER_SIZES):
        assert getattr(model, key) == getattr(said, key), key
