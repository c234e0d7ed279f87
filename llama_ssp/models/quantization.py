"""Linear layers in 8 and 4 bit, by bitsandbytes: a weight that is at hand becomes a layer that is smaller.

A rank quantises its own part. Where a layer's output is cut, that gives the very numbers of the whole
layer; where its input is cut, each part has scales of its own, which are smaller, and so is the error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype
from llama_ssp.errors import ModelError
from llama_ssp.models.kernels import int8
from llama_ssp.models.sharding import NF4_BLOCK

OUTLIERS = 6.0  # activations beyond it are multiplied in 16 bit (LLM.int8)
PACKED_ROWS = 32  # bitsandbytes' fast CPU kernel for 4 bit takes outputs in such portions
QUANTISED = (Dtype.int8, Dtype.nf4)


def settings(dtype: Dtype) -> dict[str, Any]:
    """What transformers is told so that it quantises as the functions here do."""
    from transformers import BitsAndBytesConfig

    _quiet()
    if dtype is Dtype.int8:
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIERS)}
    if dtype is Dtype.nf4:
        held = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=False,
        )
        return {"quantization_config": held}
    return {}


def quantised(dtype: Dtype, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Linear:
    """The layer of this weight, which is on the CPU: its move to the device quantises it."""
    _quiet()
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    layer: Any
    outputs, inputs = weight.shape
    if dtype is Dtype.int8:
        layer = Linear8bitLt(
            inputs, outputs, bias=False, has_fp16_weights=False, threshold=OUTLIERS, device="meta"
        )
        layer.weight = Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"compress_statistics": False, "quant_type": "nf4"}
        layer = Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, device="meta", **kind)
        layer.weight = Params4bit(weight, requires_grad=False, module=layer, **kind)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    made: nn.Linear = layer.to(device)
    choose_kernels(made)
    return made


def choose_kernels(module: nn.Module) -> None:
    """Keeps 4 bit layers from kernels that do not take their shape."""
    from bitsandbytes.nn import Linear4bit

    for name, layer in module.named_modules():
        if not isinstance(layer, Linear4bit):
            continue
        if layer.in_features % NF4_BLOCK:
            raise ModelError(
                "a layer's inputs do not make whole blocks of nf4", where=name, found=layer.in_features,
                allowed=f"a multiple of {NF4_BLOCK}", fix="use int8 or bf16, or other ranks",
            )  # fmt: skip
        if layer.out_features % PACKED_ROWS:
            layer.support_avx512bf16_for_cpu = False


def quicken(module: nn.Module) -> None:
    """Has 8-bit layers multiply a few rows by our own kernel, if there is one, with the weights they hold."""
    for name, layer in list(module.named_modules()):
        eight = isinstance(layer, nn.Linear) and layer.weight.dtype is torch.int8
        if eight and int8.usable(layer.weight.device):
            int8.operators(layer.weight.device.type)
            module.set_submodule(name, int8.Int8Linear(layer, next(scales_of(layer))))


def scales_of(module: nn.Module) -> Iterator[Tensor]:
    """What describes quantised weights, and is neither parameter nor buffer."""
    for layer in module.modules():
        weight: Any = getattr(layer, "weight", None)
        state = getattr(weight, "quant_state", None)
        scales = getattr(weight, "SCB", None)
        if scales is None:  # after the first pass the layer has them
            scales = getattr(getattr(layer, "state", None), "SCB", None)
        yield from () if state is None else (state.absmax, state.code)
        yield from () if scales is None else (scales,)


def _quiet() -> None:
    """bitsandbytes tells every layer's cast, and of kernels it can do without."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
