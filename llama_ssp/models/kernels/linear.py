"""Linear layers for a few rows on a CPU, with weights packed as linear.cpp reads them."""

import functools
from pathlib import Path

import torch
from torch import Tensor, nn

from llama_ssp.models.kernels.build import load_library
from llama_ssp.models.kernels.kernel_sizes import BLOCK
from llama_ssp.models.kernels.large_pages import LargePages

WORD = {torch.float32: 1, torch.bfloat16: 2}  # numbers in a word of 32 bits


class PackedLinear(nn.Module):
    """Computes the product of the nn.Linear that it is made of, from a packed weight."""

    def __init__(self, linear: nn.Linear, memory: LargePages | None = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = nn.Parameter(packed(linear.weight, memory), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor, wide: bool = False) -> Tensor:
        """`wide`: the sums as they are, in fp32."""
        operator = torch.ops.llama_ssp.linear
        if wide:
            operator = torch.ops.llama_ssp.linear_wide
        product: Tensor = operator(x, self.packed, self.bias, self.out_features)
        return product


def packed(weight_NK: Tensor, memory: LargePages | None = None) -> Tensor:
    """Returns (blocks, words, BLOCK, numbers in a word), as linear.cpp reads it; in `memory`, if given.

    There are zeros behind the last output.
    """
    outputs, inputs = weight_NK.shape
    dtype = weight_NK.dtype
    word = WORD[dtype]
    assert inputs % word == 0, "packable() says which weights can be packed"
    padded_NK = nn.functional.pad(weight_NK, (0, 0, 0, -outputs % BLOCK)).contiguous()
    shape = (len(padded_NK) // BLOCK, inputs // word, BLOCK, word)
    result = torch.empty(shape, dtype=dtype) if memory is None else memory.empty(shape, dtype)

    # Of each word of inputs the words of all outputs of a block stand together.
    words = padded_NK.view(torch.int32).view(-1, BLOCK, inputs // word)
    result.view(torch.int32).squeeze(-1).copy_(words.transpose(1, 2))
    return result


def product_of_expert(
    x: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, expert: int, outputs: int
) -> Tensor:
    """Returns y = x W^T + b with an expert's weight, of a stack of packed weights or of plain ones."""
    bias_N = None if bias_EN is None else bias_EN[expert]
    if weight_ENK.ndim == 3:
        return nn.functional.linear(x, weight_ENK[expert], bias_N)
    product: Tensor = torch.ops.llama_ssp.linear(x, weight_ENK[expert], bias_N, outputs)
    return product


def packable(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer.in_features % WORD.get(layer.weight.dtype, 1 << 30) == 0


@functools.cache
def operators() -> None:
    """Registers the operator in torch."""
    load_library(Path(__file__).with_suffix(".cpp"))
    for name, dtype in (("linear", None), ("linear_wide", torch.float32)):
        torch.library.register_fake(f"llama_ssp::{name}", functools.partial(_shaped, dtype=dtype))


def is_loaded() -> bool:
    """Returns whether this process has the operator."""
    return operators.cache_info().currsize > 0


def _shaped(
    x: Tensor, packed: Tensor, bias: Tensor | None, width: int, *, dtype: torch.dtype | None
) -> Tensor:
    """Returns a tensor of the shape that the operators give; `dtype`: None for that of x."""
    return x.new_empty(*x.shape[:-1], width, dtype=dtype)
