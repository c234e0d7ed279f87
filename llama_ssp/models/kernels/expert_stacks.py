"""The weights of a layer's experts in one stack, numbers or codes and scales, and products with one of them.

Where the choice of experts must not be waited for, as in a CUDA graph, chosen ones in codes that no kernel
reads are decoded, a few at a time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.models.formats.coded import TABLES, Coded, Codes, values
from llama_ssp.models.graph_sizes import DECODED
from llama_ssp.models.kernels.coded import CodedLinear, usable
from llama_ssp.models.kernels.large_pages import LargePages
from llama_ssp.models.kernels.linear import WORD, packed, product_of_expert

DTYPES = torch.float32, torch.bfloat16, torch.float16  # of numbers that the kernel for GPUs multiplies
NUMBERS = ""
Words = tuple[str, int, float, int, bool, bool]


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
        return self.how != NUMBERS and _read(self.how)[-1]


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
        """False, and nothing is kept, if the weight is of another kind than the first."""
        how, parts = self._made_of(weight)
        if self.how is None:
            self.how, self._parts = how, [self._empty(part) for part in parts]
        if how == self.how:
            for stack, part in zip(self._parts, parts, strict=True):
                stack[number] = part
        return how == self.how

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
        kind = weight.kind
        by_kernel = self._fast and usable(weight, self._device)
        unit = 1.0 if by_kernel else kind.unit  # the kernel's scales have it
        words = kind.table, kind.group, unit, weight.shape[0], weight.zero_NG is not None, by_kernel
        return " ".join(map(str, words)), _parts(weight, self._device, by_kernel)


def _parts(weight: Coded, device: torch.device, by_kernel: bool) -> list[Tensor]:
    if by_kernel:
        buffers = dict(CodedLinear(weight, None, device).named_buffers())
        return [buffers[name] for name in ("codes", "scales", "offsets") if name in buffers]
    offset = weight.shift_NG if weight.zero_NG is None else weight.zero_NG
    return [part.to(device) for part in (weight.codes_NC, weight.scale_NG, offset) if part is not None]


def _read(how: str) -> Words:
    table, group, unit, outputs, zeros, by_kernel = how.split()
    return table, int(group), float(unit), int(outputs), zeros == "True", by_kernel == "True"


def _decoded(parts: list[Tensor], how: Words, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weights (N, K) of the rows of codes, scales and offsets."""
    table, group, unit, _, zeros, _ = how
    offset_NG = parts[2] if len(parts) > 2 else None  # zeros, or else shifts
    weight = Coded(
        kind=Codes(table, group, unit),
        inputs=inputs,
        codes_NC=parts[0],
        scale_NG=parts[1],
        zero_NG=offset_NG if zeros else None,
        shift_NG=None if zeros else offset_NG,
    )
    return weight.decoded(dtype)


def outputs_of(up: Stack, down: Stack) -> int:
    """Returns how many outputs an expert's first layer has."""
    if up.how != NUMBERS:
        return _read(up.how)[3]
    weight = down.parts[0]  # (E, H, F), or packed
    return 2 * (weight.shape[-1] if weight.ndim == 3 else weight.shape[2] * weight.shape[4])


def product(x: Tensor, stack: Stack, bias_EN: Tensor | None, expert: int, outputs: int) -> Tensor:
    """y = x W^T + b with an expert's weight."""
    if stack.how == NUMBERS:
        return product_of_expert(x, stack.parts[0], bias_EN, expert, outputs)
    words = _read(stack.how)
    own = [part[expert] for part in stack.parts]
    bias = None if bias_EN is None else bias_EN[expert]
    if not stack.by_kernel:
        return functional.linear(x, _decoded(own, words, x.shape[-1], x.dtype), bias)
    result: Tensor = torch.ops.llama_ssp.linear_coded(*_arguments(x, own, words, bias))
    return result


def _arguments(x: Tensor, parts: list[Tensor], how: Words, bias: Tensor | None) -> tuple[Any, ...]:
    """Returns what the kernel for codes takes."""
    table, group, _, outputs, *_ = how
    codes, scales, offsets, *_ = *parts, None
    sizes = outputs, group or x.shape[-1], list(TABLES).index(table)
    return x, codes, values(table, x.device), scales, offsets, bias, *sizes


def products(x_MK: Tensor, expert_P: Tensor, stack: Stack, bias_EN: Tensor | None) -> Tensor:
    """(P, N), of each pair its expert's product, on a GPU, without waiting for the choice.

    x has a row for each pair, or for each token.
    """
    if stack.how == NUMBERS:
        from llama_ssp.models.kernels import experts_triton

        return experts_triton.products(x_MK, expert_P, stack.parts[0], bias_EN)
    words = _read(stack.how)
    inputs = x_MK.shape[-1]
    if stack.by_kernel:
        from llama_ssp.models.kernels.coded_triton import linear_coded

        return linear_coded(*_arguments(x_MK, stack.parts, words, bias_EN), expert_P=expert_P)
    x_PK = x_MK.repeat_interleave(len(expert_P) // len(x_MK), 0)
    y_PN1 = x_PK.new_empty(len(x_PK), words[3], 1)
    count = max(1, DECODED // (words[3] * inputs))

    def multiply(few: slice) -> None:  # decoded weights end with it, before others are made
        own = [part[expert_P[few]].flatten(0, 1) for part in stack.parts]
        weight_CNK = _decoded(own, words, inputs, x_MK.dtype).view(-1, words[3], inputs)
        torch.bmm(weight_CNK, x_PK[few, :, None], out=y_PN1[few])

    for first in range(0, len(x_PK), count):
        multiply(slice(first, first + count))
    return y_PN1[..., 0] if bias_EN is None else y_PN1[..., 0] + bias_EN[expert_P]
