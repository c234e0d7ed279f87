"""Quantised folders, sound but for random codes, and what may be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests import quantised_folders
from tests.hostile.damage import Damage, both, config_sets, reworked

Tensors = dict[str, Tensor]
UP = "model.layers.0.mlp.up_proj"  # 96 outputs, 64 inputs
STATE = ".weight.quant_state.bitsandbytes__nf4"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "config_groups": {"0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True,
    }}},
}  # fmt: skip


def gptq(outputs: int, inputs: int) -> Tensors:
    return quantised_folders.gptq(group=32).write(torch.randn(outputs, inputs))


def awq(outputs: int, inputs: int) -> Tensors:
    return quantised_folders.awq(group=32).write(torch.randn(outputs, inputs))


def fp8(outputs: int, inputs: int) -> Tensors:
    codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": torch.rand(outputs // 32, inputs // 32)}


def int4(outputs: int, inputs: int) -> Tensors:
    return {
        ".weight_packed": words(outputs, inputs // 8),
        ".weight_scale": torch.rand(outputs, inputs // 32).half(),
        ".weight_shape": torch.tensor([outputs, inputs]),
    }  # fmt: skip


def nf4(outputs: int, inputs: int) -> Tensors:
    from llama_ssp.models.formats.coded import values

    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [outputs, inputs]}
    return {
        ".weight": torch.randint(0, 256, (outputs * inputs // 2, 1), dtype=torch.uint8),
        ".weight.absmax": torch.rand(outputs * inputs // 32), ".weight.quant_map": values("nf4").clone(),
        ".weight.quant_state.bitsandbytes__nf4": text(state),
    }  # fmt: skip


def int8(outputs: int, inputs: int) -> Tensors:
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    return {
        ".weight": codes,
        ".SCB": torch.rand(outputs),
        ".weight_format": torch.zeros((), dtype=torch.uint8),
    }


def state(**wrong: Any) -> Tensor:
    """bitsandbytes' state of `UP`, with other values."""
    own = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [96, 64]}
    return text({**own, **wrong})


def nested(**wrong: Any) -> Damage:
    """nf4 with coded scales: one for 256 blocks, and a table of them; `wrong`: of the state."""

    def change(tensors: Tensors) -> None:
        tensors[f"{UP}.weight.absmax"] = torch.full((192,), 255, dtype=torch.uint8)
        tensors[f"{UP}.weight.nested_absmax"] = torch.rand(1)
        tensors[f"{UP}.weight.nested_quant_map"] = torch.rand(256)

    own = {"nested_blocksize": 256, "nested_offset": 0.1, "nested_dtype": "float32", **wrong}
    return both(broken(nf4, NF4, STATE, state(**own)), reworked(change))


def text(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).int()


def weights_say(**args: Any) -> dict[str, Any]:
    """The claim of `int4`, with other keys of its weights."""
    weights = {**INT4["config_groups"]["0"]["weights"], **args}
    return {**INT4, "config_groups": {"0": {"targets": ["Linear"], "weights": weights}}}


def quantised(write: Callable[[int, int], Tensors], claim: dict[str, Any], **other: Any) -> Damage:
    """The layers of attention and MLP in a format; `other`: keys of the claim that say something else."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_proj.weight" in name]:
            outputs, inputs = tensors.pop(name).shape
            stem = name.removesuffix(".weight")
            tensors |= {stem + end: tensor.contiguous() for end, tensor in write(outputs, inputs).items()}

    return both(reworked(change), config_sets(quantization_config={**claim, **other}))


def broken(
    write: Callable[[int, int], Tensors], claim: dict[str, Any], end: str, tensor: Tensor | None
) -> Damage:
    """Replaces one tensor of a quantised folder, or removes it (None)."""

    def change(tensors: Tensors) -> None:
        tensors.pop(UP + end)
        if tensor is not None:
            tensors[UP + end] = tensor.contiguous()

    return both(quantised(write, claim), reworked(change))
