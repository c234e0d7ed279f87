"""The weights of a layer's experts in one stack, numbers or codes and scales, and products with one of them.

Where the choice of experts must not be waited for, as in a CUDA graph, chosen ones in codes that no kernel
reads are decoded, a few at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.models.formats.coded import TABLES, Coded, Codes, values
from llama_ssp.models.kernels.coded import CodedLinear, usable
from llama_ssp.models.kernels.kernel_sizes import DECODED
from llama_ssp.models.kernels.large_pages import LargePages
from llama_ssp.models.kernels.linear import WORD, packed, product_of_expert

DTYPES = torch.float32, torch.bfloat16, torch.float16  # of numbers that the kernel for GPUs multiplies
NUMBERS = ""


class StackCodes(NamedTuple):
    """What the codes of a stack mean, and who reads them. Its words are an argument of operators."""

    table: str
    group: int
    unit: float
    outputs: int
    has_zeros: bool  # offsets are zeros, else shifts
    by_kernel: bool

    @property
    def words(self) -> str:
        return " ".join(map(str, self))

    @staticmethod
    def read(words: str) -> StackCodes:
        table, group, unit, outputs, has_zeros, by_kernel = words.split()
        return StackCodes(
            table=table,
            group=int(group),
            unit=float(unit),
            outputs=int(outputs),
            has_zeros=has_zeros == "True",
            by_kernel=by_kernel == "True",
        )


@dataclass(frozen=True)
class Stack:
    """`parts` have a row for each expert: weights, plain or packed (linear.py); or codes, scales, offsets.

    `how` says in words what codes mean, for an operator; it is empty for numbers.
    """

    parts: list[Tensor]
    how: str = NUMBERS

    @property
    def by_kernel(self) -> bool:
        """Returns whether they are codes as the kernel for codes reads them."""
        return self.how != NUMBERS and StackCodes.read(self.how).by_kernel


class Stacking:
    """Makes a stack of `count` weights, one after the other, so that none but the last is held twice.

    `fast`: codes as the kernel reads them, if it does. In `memory`, if given, where numbers are packed, too.
    """

    def __init__(self, count: int, device: torch.device, fast: bool, memory: LargePages | None) -> None:
        self._count = count
        self._device = device
        self._fast = fast
        self._memory = memory
        self._parts: list[Tensor] = []
        self.how: str | None = None  # of the first weight

    def put(self, number: int, weight: Tensor | Coded) -> bool:
        """Returns False, and keeps nothing, if the weight is of another kind than the first."""
        how, parts = self._made_of(weight)
        if self.how is None:
            self.how = how
            self._parts = [self._empty(part) for part in parts]
        if how != self.how:
            return False
        for stack, part in zip(self._parts, parts, strict=True):
            stack[number] = part
        return True

    def made(self) -> Stack:
        return Stack(self._parts, self.how or NUMBERS)

    def _empty(self, part: Tensor) -> Tensor:
        shape = (self._count, *part.shape)
        if self._memory and (self.how or part.ndim > 2):  # codes, and packed numbers
            return self._memory.empty(shape, part.dtype)
        return torch.empty(shape, dtype=part.dtype, device=self._device)

    def _made_of(self, weight: Tensor | Coded) -> tuple[str, list[Tensor]]:
        if isinstance(weight, Tensor):
            packs = self._memory is not None and weight.shape[-1] % WORD.get(weight.dtype, 1 << 30) == 0
            return NUMBERS, [packed(weight) if packs else weight]

        by_kernel = self._fast and usable(weight, self._device)
        codes = StackCodes(
            table=weight.kind.table,
            group=weight.kind.group,
            unit=1.0 if by_kernel else weight.kind.unit,  # the kernel's scales have it
            outputs=weight.shape[0],
            has_zeros=weight.zero_NG is not None,
            by_kernel=by_kernel,
        )
        return codes.words, _parts(weight, self._device, by_kernel)


def _parts(weight: Coded, device: torch.device, by_kernel: bool) -> list[Tensor]:
    """Returns codes, scales and, if there are some, offsets."""
    if by_kernel:
        buffers = dict(CodedLinear(weight, None, device).named_buffers())
        return [buffers[name] for name in ("codes", "scales", "offsets") if name in buffers]
    offset = weight.shift_NG if weight.zero_NG is None else weight.zero_NG
    return [part.to(device) for part in (weight.codes_NC, weight.scale_NG, offset) if part is not None]


def _decoded(parts: list[Tensor], codes: StackCodes, inputs: int, dtype: torch.dtype) -> Tensor:
    """Returns the weights (N, K) of the rows of codes, scales and offsets."""
    offset_NG = parts[2] if len(parts) > 2 else None
    weight = Coded(
        kind=Codes(codes.table, codes.group, codes.unit),
        inputs=inputs,
        codes_NC=parts[0],
        scale_NG=parts[1],
        zero_NG=offset_NG if codes.has_zeros else None,
        shift_NG=None if codes.has_zeros else offset_NG,
    )
    return weight.decoded(dtype)


def outputs_of(up: Stack, down: Stack) -> int:
    """Returns how many outputs an expert's first layer has."""
    if up.how != NUMBERS:
        return StackCodes.read(up.how).outputs
    weight = down.parts[0]  # (E, H, F), or packed: (E, blocks, words, BLOCK, numbers in a word)
    if weight.ndim == 3:
        return 2 * weight.shape[-1]
    return 2 * weight.shape[2] * weight.shape[4]


def product(x: Tensor, stack: Stack, bias_EN: Tensor | None, expert: int, outputs: int) -> Tensor:
    """Returns y = x W^T + b with an expert's weight."""
    if stack.how == NUMBERS:
        return product_of_expert(x, stack.parts[0], bias_EN, expert, outputs)
    codes = StackCodes.read(stack.how)
    parts = [part[expert] for part in stack.parts]
    bias_N = None if bias_EN is None else bias_EN[expert]
    if not codes.by_kernel:
        return functional.linear(x, _decoded(parts, codes, x.shape[-1], x.dtype), bias_N)
    result: Tensor = torch.ops.llama_ssp.linear_coded(x, **_arguments(x, parts, codes, bias_N))
    return result


def _arguments(x: Tensor, parts: list[Tensor], codes: StackCodes, bias: Tensor | None) -> dict[str, Any]:
    """Returns what the kernel for codes takes, with x."""
    return {
        "codes": parts[0],
        "table": values(codes.table, x.device),
        "scales": parts[1],
        "offsets": parts[2] if len(parts) > 2 else None,
        "bias": bias,
        "outputs": codes.outputs,
        "group": codes.group or x.shape[-1],
        "table_number": list(TABLES).index(codes.table),
    }


def products(x_MK: Tensor, expert_P: Tensor, stack: Stack, bias_EN: Tensor | None) -> Tensor:
    """Returns each pair's product with its expert, (P, N), on a GPU, without waiting for the choice.

    x has a row for each pair, or for each token.
    """
    if stack.how == NUMBERS:
        from llama_ssp.models.kernels import experts_triton

        return experts_triton.products(x_MK, expert_P, stack.parts[0], bias_EN)

    codes = StackCodes.read(stack.how)
    if stack.by_kernel:
        from llama_ssp.models.kernels.coded_triton import linear_coded

        return linear_coded(x_MK, **_arguments(x_MK, stack.parts, codes, bias_EN), expert_P=expert_P)

    # The weights of a few pairs (C) are decoded at a time, a pair's own each: y = W x.
    inputs = x_MK.shape[-1]
    outputs = codes.outputs
    x_PK = x_MK.repeat_interleave(len(expert_P) // len(x_MK), 0)
    y_PN1 = x_PK.new_empty(len(x_PK), outputs, 1)
    count = max(1, DECODED // (outputs * inputs))

    def multiply(few: slice) -> None:  # decoded weights end with it, before others are made
        parts = [part[expert_P[few]].flatten(0, 1) for part in stack.parts]
        weight_CNK = _decoded(parts, codes, inputs, x_MK.dtype).view(-1, outputs, inputs)
        torch.bmm(weight_CNK, x_PK[few, :, None], out=y_PN1[few])

    for first in range(0, len(x_PK), count):
        multiply(slice(first, first + count))
    return y_PN1[..., 0] if bias_EN is None else y_PN1[..., 0] + bias_EN[expert_P]
