"""Small random multimodal checkpoints, as transformers saves them and as they were published."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.checkpoints import WEIGHTS, Tensors, edit, edit_tensors
from tests.families import GEMMA4, HYBRID, SIZES, remembering, varied

# Sizes of a small vision part, under every name that architectures have for them.
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "depth": 1,
    "num_heads": 4, "out_hidden_size": 32, "image_size": 28, "patch_size": 14, "embed_dim": 32,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
GEMMA4_UNIFIED = {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}
# A whole model by a name of its own: its model_type, that of its text part, and other values of that part.
WRAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("gemma3", "gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 20}),
    "mistral3": ("mistral3", "mistral", {"head_dim": 12}),
    "llava": ("llava", "llama", {}),
    "llava-mistral": ("llava_next", "mistral", {}),
    "llava-onevision": ("llava_onevision", "qwen2", {}),
    "internvl": ("internvl", "qwen2", {}),
    "smolvlm": ("smolvlm", "llama", {}),
    "qwen2-vl": ("qwen2_vl", "qwen2_vl_text", {}),
    "qwen2.5-vl": ("qwen2_5_vl", "qwen2_5_vl_text", {}),
    "qwen3-vl": ("qwen3_vl", "qwen3_vl_text", {"head_dim": 12}),
    "qwen3-vl-moe": ("qwen3_vl_moe", "qwen3_vl_moe_text", {"head_dim": 12}),
    "qwen3.5": ("qwen3_5", "qwen3_5_text", HYBRID),
    "qwen3.5-moe": ("qwen3_5_moe", "qwen3_5_moe_text", HYBRID),
    "gemma4": ("gemma4", "gemma4_text", GEMMA4),
    "gemma4-moe": ("gemma4", "gemma4_text", {**GEMMA4, "enable_moe_block": True}),
    "gemma4-unified": ("gemma4_unified", "gemma4_unified_text", GEMMA4_UNIFIED),
}
SECTIONS = {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 500.0}
# How names begin in published files, by how they begin in files that transformers 5 saves.
PUBLISHED = {
    "gemma3": {"model.language_model.": "language_model.model.", "model.": ""},
    "mistral3": {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.": "",
    },
    "qwen": {"model.language_model.": "model.", "model.visual.": "visual."},
}
PUBLISHED |= {"llava": PUBLISHED["mistral3"], "llava-mistral": PUBLISHED["mistral3"]}
PUBLISHED |= {"qwen2-vl": PUBLISHED["qwen"], "qwen2.5-vl": PUBLISHED["qwen"]}
PUBLISHED |= {"qwen3.5": {}, "qwen3.5-moe": {}}  # with experts in one tensor, and a layer that drafts
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def known_by(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns those of the values that the config has."""
    return {key: value for key, value in values.items() if hasattr(kind, key)}


def whole_model(name: str, **changes: Any) -> Any:
    """Returns a random module of the whole, whose attention is sharp and whose biases and norms matter."""
    whole, text, own = WRAPPED[name]
    usual = CONFIG_MAPPING[text]()
    sizes = known_by(usual, SIZES) | own | changes | {"model_type": text}
    if name.startswith("qwen"):
        sizes["rope_parameters"] = dict(SECTIONS)  # a class adds what it lacks
    vision = CONFIG_MAPPING[whole]().vision_config or CONFIG_MAPPING[f"{whole}_vision"]()
    seen = known_by(vision, VISION) | {"model_type": vision.model_type}
    config = CONFIG_MAPPING[whole](text_config=sizes, vision_config=seen, tie_word_embeddings=False)

    torch.manual_seed(0)
    module = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    return varied(remembering(module)).eval()


def publish(name: str, folder: Path) -> None:
    """Gives the tensors of a saved folder the names of published ones, and Qwen's config its flat form."""

    def rename(tensors: Tensors) -> None:
        for old in list(tensors):
            begin = next((begin for begin in PUBLISHED[name] if old.startswith(begin)), None)
            if begin is not None:
                tensors[PUBLISHED[name][begin] + old.removeprefix(begin)] = tensors.pop(old)

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        config.update({key: value for key, value in text.items() if key != "model_type"})
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}

    edit_tensors(folder, rename)
    if name.startswith("qwen2"):
        edit(folder / "config.json", flatten)
    if name.startswith("qwen3.5"):
        edit_tensors(folder, add_drafting_layer)
        edit_tensors(folder, stack_experts)


def add_drafting_layer(tensors: Tensors) -> None:
    """Adds a layer for multi-token prediction, whose tensors look like those of layer 0."""
    first = "model.language_model.layers.0."
    for name in [name for name in tensors if name.startswith(first)]:
        tensors[f"mtp.layers.0.{name.removeprefix(first)}"] = torch.full_like(tensors[name], torch.nan)
    tensors["mtp.fc.weight"] = torch.ones(4, 8)


def stack_experts(tensors: Tensors) -> None:
    """Has the experts of a layer in two tensors, with their outputs before their inputs."""
    matrices: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in list(tensors):
        if match := EXPERT.fullmatch(name):
            matrices.setdefault(match[1], {})[int(match[2]), match[3]] = tensors.pop(name)
    for stem, parts in matrices.items():
        experts = range(len(parts) // 3)
        both = [torch.cat([parts[number, "gate"], parts[number, "up"]]) for number in experts]
        tensors[f"{stem}.gate_up_proj"] = torch.stack(both)
        tensors[f"{stem}.down_proj"] = torch.stack([parts[number, "down"] for number in experts])


def wrap(folder: Path, whole: str = "mistral3") -> None:
    """Makes a folder of a causal model the text part of a whole, as published."""

    def rename(tensors: Tensors) -> None:
        for old in list(tensors):
            tensors[f"language_model.{old}"] = tensors.pop(old)
        tensors["vision_tower.layers.0.attention.q_proj.weight"] = torch.ones(4, 4)
        tensors["multi_modal_projector.linear_1.bias"] = torch.ones(4)

    file = folder / "config.json"
    text = json.loads(file.read_text())
    quantised = text.pop("quantization_config", None)
    content = {"model_type": whole, "architectures": [], "text_config": text, "vision_config": {}}
    if quantised is not None:
        content["quantization_config"] = quantised
    file.write_text(json.dumps(content))
    assert (folder / WEIGHTS).exists()
    edit_tensors(folder, rename)
