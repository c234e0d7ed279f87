"""Small GGUF files of models with linear attention, as llama.cpp's converter makes them.

What it does to the tensors of a Qwen3.5 and a Qwen3-Next (conversion/qwen.py of llama.cpp) is written here
anew, a change each. A test that leaves one of them out sees other logits.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gguf_files import finish, gguf, number, stored

ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
# What a file has in another order than the model, by the part of linear attention.
REORDERED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias", "conv1d", "out_proj")


def by_turns(part: Tensor, dim: int, keys: int, size: int) -> Tensor:
    """Puts the first value of each head of keys first, then the second of each, and so on."""
    heads = part.unflatten(dim, (keys, -1, size))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def reordered(name: str, tensor: Tensor, config: Any, without: str = "") -> Tensor:
    """Returns a tensor of linear attention with its heads of values by turns, as in Qwen3.5's files."""
    keys = config.linear_num_key_heads
    size = config.linear_value_head_dim
    part = next((part for part in REORDERED if f".{part}" in name), "")
    if not part or part == without:
        return tensor
    if part in ("in_proj_qkv", "conv1d"):
        values = 2 * keys * config.linear_key_head_dim
        return torch.cat([tensor[:values], by_turns(tensor[values:], 0, keys, size)])
    if part == "in_proj_z":
        return by_turns(tensor, 0, keys, size)
    return by_turns(tensor, 1, keys, size) if part == "out_proj" else by_turns(tensor, 0, keys, 1)


def taken_apart(name: str, tensor: Tensor, config: Any, fused: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields what is written of a tensor, by names that gguf's table knows."""
    if name.endswith("in_proj_qkvz.weight"):  # of each head of keys a query, a key, its values, their gates
        keys = config.linear_num_key_heads
        key_dim = config.linear_key_head_dim
        values = config.linear_num_value_heads // keys * config.linear_value_head_dim
        parts = tensor.unflatten(0, (keys, -1)).split([key_dim, key_dim, values, values], 1)
        query, key, value, gate = (part.flatten(0, 1) for part in parts)
        yield name.replace("qkvz", "qkv"), torch.cat([query, key, value])
        yield name.replace("qkvz", "z"), gate
    elif name.endswith("experts.gate_up_proj") and not fused:
        half = tensor.shape[1] // 2
        yield name.replace("gate_up_proj", "gate_proj.weight"), tensor[:, :half]
        yield name.replace("gate_up_proj", "up_proj.weight"), tensor[:, half:]
    elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield f"{name}.weight", tensor
    elif name.endswith("conv1d.weight"):
        yield name, tensor[:, 0]
    else:
        yield name.replace(".dt_bias", ".dt_proj.bias"), tensor


def numbers_of(name: str, without: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Returns what changes a tensor's numbers, and what changes them back."""
    if name.endswith(".A_log") and without != "decays":
        return lambda x: -x.exp(), lambda x: (-x).log()
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") and without != "norms":
        return lambda x: x + 1, lambda x: x - 1
    return lambda x: x, lambda x: x


def write_hybrid(
    path: Path,
    module: Any,
    kinds: dict[str, str] | None = None,
    without: str = "",
    fused: bool = False,
    gates_as_vectors: bool = False,
    further: int = 0,
    **changes: Any,
) -> Path:
    """Writes the module, and gives it the weights that the library reads from the file.

    `kinds` has the formats of matrices by the ends of their names in the file; "" is that of the others.
    `without`: a change that is left out. `fused`: gates and ups of experts are one tensor. `further`: layers
    for multi-token prediction after the last one. `changes` are keys of the architecture; None: without it.
    """
    config = module.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (keys_of(config, further) | changes).items():
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    kind_of_model = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = config.num_hidden_layers
    names = gguf.get_tensor_name_map(kind_of_model, layers + further)
    is_tiled = config.model_type != "qwen3_next"

    for name, weight in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        to_file, from_file = numbers_of(name, without)
        # Where each number of the file is in the model: the same changes of order, of its place.
        place = torch.arange(weight.numel()).view(weight.shape)
        pair = (to_file(weight), place)
        if is_tiled and "linear_attn." in name:
            pair = tuple(reordered(name, part, config, without) for part in pair)
        contents, places = (list(taken_apart(name, part, config, fused)) for part in pair)
        for (part_name, content), (_, at) in zip(contents, places, strict=True):
            theirs = names.get_name(part_name, try_suffixes=(".weight", ".bias"))
            if gates_as_vectors and theirs.endswith("ffn_gate_inp_shexp.weight"):
                content, at = content[0], at[0]
            kind = format_of(theirs, content, kinds or {"": "F32"})
            raw = stored(content.flatten(0, -2) if content.dim() > 1 else content, kind)
            writer.add_tensor(theirs, raw.reshape(*content.shape[:-1], -1), raw_dtype=number(kind))
            known = torch.from_numpy(np.array(gguf.dequantize(raw, number(kind)), np.float32))
            weight.view(-1)[at.flatten()] = from_file(known.flatten())
    for layer in range(layers, layers + further):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(config.hidden_size, np.float32))
        writer.add_tensor(f"blk.{layer}.nextn.enorm.weight", np.ones(config.hidden_size, np.float32))
    finish(writer)
    return path


def format_of(name: str, content: Tensor, kinds: dict[str, str]) -> str:
    """Returns the format of a tensor: the converter leaves some in fp32."""
    stem = name.removesuffix(".weight")
    if content.dim() == 1 or stem.endswith(("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "ssm_a")):
        return "F32"
    return kinds[max((end for end in kinds if stem.endswith(end)), key=len)]


def keys_of(config: Any, further: int) -> dict[str, Any]:
    """Returns the keys that the converter writes."""
    parameters = config.rope_parameters
    values = config.linear_num_value_heads
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + further,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(parameters["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * parameters["partial_rotary_factor"]),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * config.linear_value_head_dim,
        "full_attention_interval": 4,
        "nextn_predict_layers": further or None,
    }
    if hasattr(config, "num_experts"):
        return keys | {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return keys | {"feed_forward_length": config.intermediate_size}
