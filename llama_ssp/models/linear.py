"""Linear layers: whole, or a rank's part, in any number format.

A layer is a *product*, y = x W^T + b, in one of several formats, and what ranks exchange behind it. Products
have one interface, `forward(x)`.

    nn.Linear        the weight as it is, by torch
    PackedLinear     16 and 32 bit, packed for a few rows on a CPU (kernels/linear.py)
    CodedLinear      4 and 8 bit: codes and scales (kernels/coded.py)
    DecodedLinear    the same without a kernel

Of a layer that is split by its outputs (a column-parallel layer) each rank has some outputs, and sends no
message. Of one that is split by its inputs (row-parallel) each rank has a term of every output, and the sum
over ranks is the layer's one message; only the first rank has the bias.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.config import Dtype
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.formats.coded import Coded
from llama_ssp.models.kernels import coded
from llama_ssp.models.kernels.expert_stacks import Stacking
from llama_ssp.models.kernels.kernel_sizes import SLICE
from llama_ssp.models.kernels.large_pages import LargePages
from llama_ssp.models.kernels.linear import PackedLinear, packable
from llama_ssp.models.quantization import OWN, QUANTISED, coded_of, quantised

CPU = torch.device("cpu")
Reduce = Callable[[Tensor], Tensor]  # the sum over ranks
Gather = Callable[[Tensor], list[Tensor]]  # every rank's tensor, all of one shape
Kernels = Enum("Kernels", ["none", "codes", "all"])  # the products that our own kernels compute


class Summed(nn.Module):
    """A layer that is split by its inputs."""

    def __init__(self, product: nn.Module, reduce: Reduce) -> None:
        super().__init__()
        self.product = product
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.product(x))


class Concatenated(nn.Module):
    """Layers with the same inputs whose weights cannot be one: their outputs one after the other."""

    def __init__(self, products: list[nn.Module]) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([product(x) for product in self.products], -1)


class Embedding(nn.Module):
    """Rows of a table by token; of a split table, zeros for rows of other ranks, and a sum."""

    def __init__(self, weight_VH: Tensor, scale: float, first: int = 0, reduce: Reduce | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VH, requires_grad=False)
        # Rounded like the weight, as transformers does.
        self.scale = float(torch.tensor(scale, dtype=weight_VH.dtype))
        self.first = first
        self.reduce = reduce

    def forward(self, token_T: Tensor) -> Tensor:
        if self.reduce is None:
            x_TH = functional.embedding(token_T, self.weight)
        else:
            row_T = token_T - self.first
            elsewhere_T = (row_T < 0) | (row_T >= self.weight.shape[0])
            x_TH = functional.embedding(row_T.masked_fill(elsewhere_T, 0), self.weight)
            x_TH = self.reduce(x_TH.masked_fill(elsewhere_T[:, None], 0))
        return x_TH if self.scale == 1.0 else x_TH * self.scale


def in_fp32(product: nn.Module, x: Tensor) -> Tensor:
    """Returns an output matrix's product with its sums as they are, in fp32, also of a 16-bit matrix.

    Rounded to 16 bit, the two best logits of a model are often one number.
    """
    if x.dtype.itemsize > 2:
        return product(x)  # type: ignore[no-any-return]
    if isinstance(product, nn.Linear):
        return torch.ops.llama_ssp.linear_in_fp32(x, product.weight)  # type: ignore[no-any-return]
    return product(x, wide=True)  # type: ignore[no-any-return]


def _linear_in_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Multiplies on a GPU with an output of 32 bits; on a CPU slice by slice: no fp32 copy of the matrix."""
    if x_TK.device.type == "cuda":
        return torch.mm(x_TK, weight_NK.T, out_dtype=torch.float32)
    parts = torch.split(weight_NK, max(1, SLICE // weight_NK.shape[1]))
    x_TK = x_TK.float()
    slice_NK = torch.empty_like(parts[0], dtype=torch.float32)  # one for all: the system clears new memory
    result_N = [functional.linear(x_TK, slice_NK[: len(part_NK)].copy_(part_NK)) for part_NK in parts]
    return torch.cat(result_N, -1)


# One operation for torch.compile. A torch.library.custom_op would import the compiler, also for eager steps.
torch.library.define("llama_ssp::linear_in_fp32", "(Tensor x, Tensor weight) -> Tensor")
torch.library.impl("llama_ssp::linear_in_fp32", "default", _linear_in_fp32)
torch.library.register_fake(
    "llama_ssp::linear_in_fp32",
    lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
)


class Head(nn.Module):
    """Logits of all tokens of the vocabulary, in fp32, on every rank."""

    def __init__(self, product: nn.Module, shares: list[int], gather: Gather | None) -> None:
        super().__init__()
        self.product = product
        self.shares = shares
        self.gather = gather

    def forward(self, x: Tensor) -> Tensor:
        logit_TV = in_fp32(self.product, x)
        if self.gather is None:
            return logit_TV
        padded_TV = functional.pad(logit_TV, (0, max(self.shares) - logit_TV.shape[-1]))
        parts = zip(self.gather(padded_TV), self.shares, strict=True)
        return torch.cat([part_TV[:, :share] for part_TV, share in parts], -1)


def dense(weight_NK: Tensor, bias_N: Tensor | None = None) -> nn.Linear:
    """Returns a product with this weight, in the weight's own memory."""
    outputs, inputs = weight_NK.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_NK, requires_grad=False)
    if bias_N is not None:
        layer.bias = nn.Parameter(bias_N, requires_grad=False)
    return layer


@dataclass
class LayerFormat:
    """Makes a model's linear layers in a number format, on a device, by torch's kernels or our own.

    Weights are moved to the device from where they were read. Weights that are in codes on disk become
    numbers, unless it `keeps_codes`. Our kernels for a CPU have all packed weights in one memory.
    """

    dtype: Dtype = Dtype.fp32
    device: torch.device = CPU
    kernels: Kernels = Kernels.none
    keeps_codes: bool = False
    _memory: LargePages | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.numbers = TORCH_DTYPES[self.dtype]  # the format of weights that are not in codes
        self.codes_by_kernel = self.kernels is not Kernels.none and coded.available(self.device)
        if self.kernels is Kernels.all and self.device.type == "cpu":
            self._memory = LargePages()

    def linear(self, weight_NK: Tensor | Coded, bias_N: Tensor | None = None) -> nn.Module:
        """Returns a linear layer, which is quantised if the format is."""
        if self.dtype not in QUANTISED or isinstance(weight_NK, Coded):
            return self._product(weight_NK, bias_N)
        if self.dtype in OWN:
            return self._product(OWN[self.dtype](weight_NK), bias_N)
        layer = quantised(self.dtype, weight_NK, bias_N, self.device)
        has_kernel = self.kernels is Kernels.all and self.codes_by_kernel
        if has_kernel and (self.dtype is Dtype.int8 or self.device.type == "cuda"):
            return self._product(coded_of(layer), layer.bias)
        return layer

    def head(self, weight_NK: Tensor | Coded, bias_N: Tensor | None = None) -> nn.Module:
        """Returns the product with an output matrix, which is never quantised."""
        return self._product(weight_NK, bias_N)

    def stacking(self, count: int) -> Stacking:
        """Returns what collects the weights of `count` experts, packed where they can be."""
        return Stacking(count, self.device, self.codes_by_kernel, self._memory)

    def _product(self, weight_NK: Tensor | Coded, bias_N: Tensor | None) -> nn.Module:
        if isinstance(weight_NK, Coded):
            if self.codes_by_kernel and coded.usable(weight_NK, self.device):
                return coded.CodedLinear(weight_NK, bias_N, self.device, self._memory)
            return coded.DecodedLinear(weight_NK.to(self.device), bias_N)
        layer = dense(weight_NK.to(self.device), bias_N)
        if self._memory and packable(layer):
            return PackedLinear(layer, self._memory)
        return layer
