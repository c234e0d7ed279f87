"""Linear layers with weights in codes: products read codes and scales, and make numbers in registers.

Inputs are as they are given. A number is not rounded to 16 bit after its code is scaled, as libraries do that
decode weights first: so products are nearer to those of the codes than theirs.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.models.formats.coded import TABLES, Coded, Codes, values
from llama_ssp.models.kernels.build import load_library, triton_runs
from llama_ssp.models.kernels.kernel_sizes import BLOCK
from llama_ssp.models.kernels.large_pages import LargePages

# wide: sums in fp32, on GPUs.
OPERATOR = "llama_ssp::linear_coded"
WIDE = "llama_ssp::linear_coded_wide"
WORD = 4  # bytes of codes of an output that stand together, as in coded.cpp
LEAST = 16  # bytes of a group's codes on a GPU: the fewest inputs of a product on tensor cores


class DecodedLinear(nn.Module):
    """y = x W^T + b, with W decoded for each product: for any device and number format, and slow."""

    def __init__(self, weight: Coded, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind = weight.kind.table, weight.kind.group, weight.kind.unit
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("codes", weight.codes_NC, persistent=False)
        self.register_buffer("scales", weight.scale_NG, persistent=False)
        self.register_buffer("zeros", weight.zero_NG, persistent=False)
        self.register_buffer("shifts", weight.shift_NG, persistent=False)

    def extra_repr(self) -> str:
        """The name of a compiled step's file is made of it."""
        return f"{self.in_features}, {self.out_features}, {self.kind}"

    def forward(self, x: Tensor, wide: bool = False) -> Tensor:
        """`wide`: in fp32."""
        table, group, unit = self.kind
        product: Tensor = linear_decoded(
            x.float() if wide else x,
            self.codes,
            self.scales,
            self.zeros,
            self.shifts,
            self.bias,
            table,
            group,
            unit,
        )
        return product


DECODED = (
    "(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? shifts, Tensor? bias"
    ", str table, SymInt group, float unit) -> Tensor"
)


# For torch.compile, one operation.
@torch.library.custom_op("llama_ssp::linear_decoded", mutates_args=(), schema=DECODED)
def linear_decoded(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    shifts: Tensor | None,
    bias: Tensor | None,
    table: str,
    group: int,
    unit: float,
) -> Tensor:
    """Returns x W^T + b; the weight (N, K) is decoded from its parts, and forgotten."""
    weight = Coded(
        kind=Codes(table=table, group=group, unit=unit),
        inputs=x.shape[-1],
        codes_NC=codes,
        scale_NG=scales,
        zero_NG=zeros,
        shift_NG=shifts,
    )
    return functional.linear(x, weight.decoded(x.dtype), bias)


@linear_decoded.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    shifts: Tensor | None,
    bias: Tensor | None,
    table: str,
    group: int,
    unit: float,
) -> Tensor:
    outputs = codes.shape[0]
    return x.new_empty(*x.shape[:-1], outputs)


class CodedLinear(nn.Module):
    """A linear layer whose weight stays in its codes; on a CPU in blocks of outputs, in `memory` if given."""

    def __init__(
        self, weight: Coded, bias: Tensor | None, device: torch.device, memory: LargePages | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group = weight.kind.group or weight.inputs
        self.table_number = list(TABLES).index(weight.kind.table)
        self.bias = None if bias is None else nn.Parameter(bias.to(device), requires_grad=False)

        scale_NG = weight.scale_NG
        if weight.kind.unit != 1.0:
            scale_NG = scale_NG.float() * weight.kind.unit
        offset_NG = weight.shift_NG if weight.zero_NG is None else weight.zero_NG

        parts = {"codes": weight.codes_NC, "scales": scale_NG, "offsets": offset_NG}
        for name, part in parts.items():
            if part is not None and device.type == "cpu":
                part = blocks(part, WORD if name == "codes" else 1, memory)
            self.register_buffer(name, None if part is None else part.to(device), persistent=False)
        self.register_buffer("table", values(weight.kind.table, device), persistent=False)

    def extra_repr(self) -> str:
        """Describes the layer, as torch prints modules."""
        return f"{self.in_features}, {self.out_features}, {self.group}, {self.table_number}"

    def forward(self, x: Tensor, wide: bool = False) -> Tensor:
        """`wide`: the sums as they are, in fp32; on a CPU of inputs in fp32."""
        operator = torch.ops.llama_ssp.linear_coded
        if wide and x.device.type == "cuda":
            operator = torch.ops.llama_ssp.linear_coded_wide
        elif wide:
            x = x.float()
        product: Tensor = operator(
            x,
            self.codes,
            self.table,
            self.scales,
            self.offsets,
            self.bias,
            self.out_features,
            self.group,
            self.table_number,
        )
        return product


def blocks(part_NC: Tensor, word: int, memory: LargePages | None = None) -> Tensor:
    """Returns (blocks, words, BLOCK), as coded.cpp reads it; words of several bytes are integers.

    words of rows     a b c ... of output 0, d e f ... of output 1, and so on
    words of a block  a d ..., b e ..., c f ...: of each place the words of all BLOCK outputs
    """
    rows, columns = part_NC.shape
    missing_columns = -columns % word
    missing_rows = -rows % BLOCK
    if missing_columns or missing_rows:  # without numbers to add it is a copy, too
        part_NC = functional.pad(part_NC, (0, missing_columns, 0, missing_rows))

    words_NC = part_NC.contiguous()
    if word > 1:
        words_NC = words_NC.view(torch.int32)
    words = words_NC.view(-1, BLOCK, words_NC.shape[1]).transpose(1, 2)
    if memory is None:
        return words.contiguous()
    return memory.empty(tuple(words.shape), words.dtype).copy_(words)


def usable(weight: Coded, device: torch.device) -> bool:
    """Returns whether the device has the kernel, and it takes groups of this size."""
    group = weight.kind.group or weight.inputs
    unit = (LEAST if device.type == "cuda" else WORD) * 8 // weight.kind.bits
    return available(device) and (group >= weight.inputs or group % unit == 0)


def available(device: torch.device) -> bool:
    """Returns whether the device has the kernel: a GPU needs triton, and bf16."""
    if device.type == "cpu":
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0) and triton_runs()


@functools.cache
def operators(device: str) -> None:
    """Registers the operator in torch for this kind of device: coded.cpp on a CPU, triton on a GPU."""
    _define()
    if device == "cpu":
        load_library(Path(__file__).with_suffix(".cpp"))
    else:
        from llama_ssp.models.kernels.coded_triton import linear_coded

        torch.library.impl(OPERATOR, device)(linear_coded)
        torch.library.impl(WIDE, device)(functools.partial(linear_coded, wide=True))


@functools.cache
def _define() -> None:
    tensors = "Tensor x, Tensor codes, Tensor table, Tensor scales, Tensor? offsets, Tensor? bias"
    for name, dtype in ((OPERATOR, None), (WIDE, torch.float32)):
        torch.library.define(name, f"({tensors}, int outputs, int group, int table_number) -> Tensor")
        torch.library.register_fake(name, functools.partial(_shaped, dtype=dtype))


def _shaped(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    outputs: int,
    group: int,
    table_number: int,
    *,
    dtype: torch.dtype | None,
) -> Tensor:
    """Returns a tensor of the operators' shape; `dtype`: None for that of x."""
    return x.new_empty(*x.shape[:-1], outputs, dtype=dtype)
