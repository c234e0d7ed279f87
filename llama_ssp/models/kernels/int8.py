"""Linear layers with 8-bit weights for a few rows: one kernel reads the codes, and dequantises in registers.

The weight is the memory that LLM.int8 holds: a row of codes for each output, and the row's largest magnitude.
Inputs stay in 16 bit: they are not quantised, and so need no outliers.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from llama_ssp.models.kernels.build import load_library

OPERATOR = "llama_ssp::linear_int8"
ROWS = 16  # with more, multiplications take longer than reading, and LLM.int8's own are faster


class Int8Linear(nn.Module):
    """A layer that LLM.int8 has quantised; `plain` is its own module, for many rows."""

    def __init__(self, plain: nn.Linear, scales: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.plain = plain
        self.register_buffer("codes", plain.weight.data, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> Tensor:
        return self.plain.weight

    def forward(self, x: Tensor) -> Tensor:
        """A compiled step has few rows; it must not test their number, or it would be compiled for each."""
        if torch.compiler.is_compiling() or x.numel() <= ROWS * x.shape[-1]:
            product: Tensor = torch.ops.llama_ssp.linear_int8(x, self.codes, self.scales, self.plain.bias)
            return product
        several: Tensor = self.plain(x)
        return several


def usable(device: torch.device) -> bool:
    """Whether the device has the kernel: a GPU needs triton, and bf16."""
    if device.type == "cpu":
        return True
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def operators(device: str) -> None:
    """Registers the operator in torch for this kind of device: int8.cpp on a CPU, triton on a GPU."""
    _define()
    if device == "cpu":
        load_library(Path(__file__).with_suffix(".cpp"))
    else:
        from llama_ssp.models.kernels.int8_triton import linear_int8

        torch.library.impl(OPERATOR, device)(linear_int8)


@functools.cache
def _define() -> None:
    torch.library.define(OPERATOR, "(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor")
    torch.library.register_fake(OPERATOR, _shaped)


def _shaped(x: Tensor, codes: Tensor, _scales: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])
