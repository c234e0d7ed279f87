"""Linear layers in 8 and 4 bit, made of weights that are in memory: int8 and nf4 by bitsandbytes, int4 by us.

A rank quantises its own part. Where the outputs of a layer are cut, this gives the same numbers as quantising
the whole layer and cutting it then. Where the inputs are cut, an int8 row has a scale in each part, which is
at most that of the whole row, and so is its error; a cut between whole groups of nf4 or int4 changes nothing.

Shapes: N outputs, K inputs, C bytes of codes a row (K for int8, K/2 for 4 bits), G scales a row, P places in
a group.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.config import Dtype
from llama_ssp.errors import ModelError
from llama_ssp.models.formats.coded import DECODED_AT_ONCE, Coded, Codes, joined, packed
from llama_ssp.models.sharding import NF4_BLOCK

PACKED_ROWS = 32  # outputs at a time in bitsandbytes' fast CPU kernel for 4 bit
LLM_INT8_THRESHOLD = 6.0  # bitsandbytes multiplies greater inputs in 16 bit
LLM_INT8 = Codes("int8", unit=1 / 127)  # a number is code * unit * scale; on disk see formats/coded_source.py
INT4 = Codes("int4", group=32)
NF4 = Codes("nf4", group=NF4_BLOCK)
QUANTISED = {Dtype.int8: LLM_INT8, Dtype.int4: INT4, Dtype.nf4: NF4}


def settings(dtype: Dtype) -> dict[str, Any]:
    """Returns arguments with which transformers quantises as `quantised` does; none for other formats."""
    from transformers import BitsAndBytesConfig

    _quiet()
    if dtype is Dtype.int8:
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=LLM_INT8_THRESHOLD)
    elif dtype is Dtype.nf4:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    else:
        return {}
    return {"quantization_config": config}


def quantised(dtype: Dtype, weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Linear:
    """Returns a layer of bitsandbytes in int8 or nf4, on the device.

    The weight, (N, K), is on the CPU: the move of the layer to the device quantises it. Raises ModelError for
    inputs that nf4 cannot divide into blocks.
    """
    _quiet()
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    layer: Any
    outputs, inputs = weight.shape
    if dtype is not Dtype.int8:
        _require_blocks(inputs, f"a matrix of {outputs} x {inputs}")
    if dtype is Dtype.int8:
        layer = Linear8bitLt(
            inputs,
            outputs,
            bias=False,
            has_fp16_weights=False,
            threshold=LLM_INT8_THRESHOLD,
            device="meta",
        )
        layer.weight = Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        layer = Linear4bit(
            inputs,
            outputs,
            bias=False,
            compute_dtype=torch.bfloat16,
            compress_statistics=False,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = Params4bit(
            weight, requires_grad=False, module=layer, compress_statistics=False, quant_type="nf4"
        )
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)

    quantised_layer: nn.Linear = layer.to(device)
    choose_kernels(quantised_layer)
    return quantised_layer


def choose_kernels(module: nn.Module) -> None:
    """Keeps 4-bit layers from kernels that are wrong for their shape. Raises ModelError if none is right."""
    from bitsandbytes.nn import Linear4bit

    for name, layer in module.named_modules():
        if not isinstance(layer, Linear4bit):
            continue
        _require_blocks(layer.in_features, name)
        if layer.out_features % PACKED_ROWS:
            layer.support_avx512bf16_for_cpu = False  # by which bitsandbytes chooses its fast kernel


def _require_blocks(inputs: int, where: str) -> None:
    if inputs % NF4_BLOCK:
        raise ModelError(
            "a layer's inputs do not make whole blocks of nf4",
            where=where,
            found=inputs,
            allowed=f"a multiple of {NF4_BLOCK}",
            fix="use int8 or bf16, or other ranks",
        )


def scales_of(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors of quantised weights that are neither parameters nor buffers.

    Of int8 these are the scales, (N,); of nf4 the scales, (N*G,), and then the table of its 16 numbers.
    """
    for layer in module.modules():
        weight: Any = getattr(layer, "weight", None)
        state = getattr(weight, "quant_state", None)
        scales = getattr(weight, "SCB", None)
        if scales is None:  # the layer's first forward moves them from the weight to its state
            scales = getattr(getattr(layer, "state", None), "SCB", None)
        if state is not None:
            yield state.absmax
            yield state.code
        if scales is not None:
            yield scales


def coded_of(layer: nn.Linear) -> Coded:
    """Returns the codes and scales of a layer of bitsandbytes, in int8 or nf4."""
    scales = next(scales_of(layer))
    codes = layer.weight.data.view(torch.uint8)  # int8: (N, K), nf4: (N*K/2, 1)
    if codes.shape == (layer.out_features, layer.in_features):
        return Coded(kind=LLM_INT8, inputs=layer.in_features, codes_NC=codes, scale_NG=scales[:, None])

    # bitsandbytes has the first of two codes in the high half of a byte, we have it in the low one.
    codes_NC = codes.view(layer.out_features, -1)
    swapped_NC = (codes_NC >> 4) | (codes_NC << 4)
    scale_NG = scales.view(layer.out_features, -1)
    return Coded(kind=NF4, inputs=layer.in_features, codes_NC=swapped_NC, scale_NG=scale_NG)


def in_groups(weight_NK: Tensor) -> Coded:
    """Returns the weight in int4, with a scale for each group of 32 inputs.

    The scale is the group's number of the largest magnitude, over -8 and rounded to bf16. So it may be
    negative, and that number gets the code for -8, at the longer side of the range -8..7. Codes are the
    nearest ones for the rounded scale; a number of the same magnitude and the other sign, which would be 8,
    gets 7.
    """
    rows = max(1, DECODED_AT_ONCE // max(1, weight_NK.shape[1]))  # whose copies in fp32 are made at once
    return joined([_in_groups(part_NK) for part_NK in torch.split(weight_NK, rows)])


def _in_groups(weight_NK: Tensor) -> Coded:
    """Does as `in_groups`, for a few rows. A row of K inputs is G groups of P = 32 places."""
    inputs = weight_NK.shape[1]
    padded_NK = functional.pad(weight_NK.float(), (0, -inputs % INT4.group))  # up to a whole group
    number_NGP = padded_NK.view(len(padded_NK), -1, INT4.group)
    largest_NG1 = number_NGP.gather(2, number_NGP.abs().argmax(2, keepdim=True))
    scale_NG1 = (largest_NG1 / -8).bfloat16()
    # In a group of zeros a number is 0 / 0: nan_to_num makes it 0. Code 0 is -8, code 15 is 7.
    code_NGP = (number_NGP / scale_NG1.float()).nan_to_num().round().clamp(-8, 7) + 8
    codes_NC = packed(code_NGP.to(torch.uint8).flatten(1)[:, :inputs])
    return Coded(kind=INT4, inputs=inputs, codes_NC=codes_NC, scale_NG=scale_NG1.squeeze(2))


def _quiet() -> None:
    """Keeps bitsandbytes from a log line for every cast, and for kernels that are missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


OWN = {Dtype.int4: in_groups}  # formats of our own, and what makes their codes of a weight
