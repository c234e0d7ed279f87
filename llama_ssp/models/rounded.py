"""Layers of checkpoints that ask for it round their inputs, as transformers does with the checkpoint.

Every token is rounded by itself, so that a result does not depend on how many are read together. The numbers
are those of compressed-tensors (in the type of the activations, rounded to it after each step), and of
bitsandbytes' LLM.int8 for one token (in fp16, and outliers stay as they are).

Of a layer that is split by its inputs, ranks exchange the least and the greatest input of a token, or of
each group: the scales are those of the whole layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.models.formats.activation_schemes import Rounding
from llama_ssp.models.linear import Gather

# The least and the greatest number of each table.
RANGES = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0), "e4m3": (-448.0, 448.0)}
LLM_INT8_UNIT = 1 / 127


class RoundedInputs(nn.Module):
    """A product whose inputs are rounded: all of a layer's, or this rank's, from the number `first` on."""

    def __init__(
        self, product: nn.Module, rounding: Rounding, where: dict[str, Any], inputs: int,
        first: int = 0, gather: Gather | None = None,
    ) -> None:  # fmt: skip
        """`where`: the type and the device of inputs; `inputs`: of the whole layer; `gather`: if other ranks
        have some of them."""
        super().__init__()
        self.product, self.first = product, first
        self.gather = None if rounding.static else gather
        self.groups = -(-inputs // rounding.group) if rounding.group else 1
        self.kind = rounding.table, rounding.symmetric, rounding.group, rounding.threshold
        numbers = torch.tensor([rounding.scale, rounding.zero], **where)
        self.static = numbers if rounding.static else None  # no buffer: plans count those

    def extra_repr(self) -> str:
        """The name of a compiled step's file is made of it."""
        return f"{self.kind}, {self.first}, {self.groups}, {'dynamic' if self.static is None else 'static'}"

    def forward(self, x: Tensor) -> Tensor:
        table, symmetric, group, threshold = self.kind
        if self.static is not None:
            range_ = self.static
        else:
            range_ = extremes(x, group, self.first, self.groups, threshold)
            if self.gather is not None:
                every = torch.stack(self.gather(range_))
                range_ = torch.stack([every[..., 0].amin(0), every[..., 1].amax(0)], -1)
        found: Tensor = self.product(rounded(x, range_, table, symmetric, group, self.first, threshold))
        return found


# Operations for torch.compile, which would not round between two steps in 16 bit.


@torch.library.custom_op("llama_ssp::extremes", mutates_args=())
def extremes(x_TK: Tensor, group: int, first: int, groups: int, threshold: float | None) -> Tensor:
    """(T, groups, 2): the least and the greatest of each group's inputs and 0, of those that are here.

    Of LLM.int8 of all but the outliers, in fp16.
    """
    if threshold is not None:
        x_TK = _without_outliers(x_TK, threshold)
    own_TGK = _in_groups(x_TK, group, first) if group else x_TK[:, None]
    least_TG, most_TG = torch.aminmax(own_TGK, dim=-1)
    own_TG2 = torch.stack([least_TG.clamp_(max=0), most_TG.clamp_(min=0)], -1)
    if own_TG2.shape[1] == groups:
        return own_TG2
    range_TG2 = x_TK.new_zeros(len(x_TK), groups, 2)
    range_TG2[:, _here(own_TGK, group, first)] = own_TG2
    return range_TG2


@extremes.register_fake
def _(x_TK: Tensor, group: int, first: int, groups: int, threshold: float | None) -> Tensor:
    dtype = x_TK.dtype if threshold is None else torch.float16
    return x_TK.new_empty(x_TK.shape[0], groups, 2, dtype=dtype)


@torch.library.custom_op("llama_ssp::rounded", mutates_args=())
def rounded(
    x_TK: Tensor, range_: Tensor, table: str, symmetric: bool, group: int, first: int,
    threshold: float | None,
) -> Tensor:  # fmt: skip
    """The inputs, rounded. `range_`: (T, groups, 2) as of `extremes`, or (2): a scale and a zero."""
    if threshold is not None:
        return _by_llm_int8(x_TK, range_, threshold)
    if range_.ndim == 1:
        return _to_table(x_TK, range_[:1], range_[1:], table)
    scale_TG, zero_TG = _scales(range_, table, symmetric)
    if not group:
        return _to_table(x_TK, scale_TG, zero_TG, table)
    own_TGK = _in_groups(x_TK, group, first)
    here = _here(own_TGK, group, first)
    zero_TG1 = None if zero_TG is None else zero_TG[:, here, None]
    found_TGK = _to_table(own_TGK, scale_TG[:, here, None], zero_TG1, table)
    return found_TGK.flatten(1)[:, first % group : first % group + x_TK.shape[1]].contiguous()


@rounded.register_fake
def _(x_TK: Tensor, *_: object) -> Tensor:
    return x_TK.new_empty(x_TK.shape)


def _in_groups(x_TK: Tensor, group: int, first: int) -> Tensor:
    """(T, groups that are touched, group), with zeros where the inputs of other ranks are."""
    before = first % group
    padded_TK = functional.pad(x_TK, (before, -(before + x_TK.shape[1]) % group))
    return padded_TK.view(len(x_TK), -1, group)


def _here(own_TGK: Tensor, group: int, first: int) -> slice:
    """Which of all groups these are."""
    return slice(first // group, first // group + own_TGK.shape[1])


def _scales(range_TG2: Tensor, table: str, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """As compressed-tensors' calculate_qparams."""
    (low, high), (least_TG, most_TG) = RANGES[table], range_TG2.unbind(-1)
    zero_TG = None
    if symmetric:
        scale_TG = torch.maximum(-least_TG, most_TG) / ((high - low) / 2)
    else:
        scale_TG = (most_TG - least_TG) / (high - low)
    scale_TG.masked_fill_(scale_TG == 0, torch.finfo(scale_TG.dtype).eps)
    if not symmetric:
        zero_TG = (low - least_TG / scale_TG).clamp_(low, high).round_()
    return scale_TG, zero_TG


def _to_table(x: Tensor, scale: Tensor, zero: Tensor | None, table: str) -> Tensor:
    """As compressed-tensors' fake_quantize."""
    scaled = x / scale
    if zero is not None:
        scaled += zero
    scaled = scaled.clamp_(*RANGES[table])
    scaled = scaled.to(torch.float8_e4m3fn).to(x.dtype) if table == "e4m3" else scaled.round_()
    if zero is not None:
        scaled -= zero
    return scaled.mul_(scale)


def _without_outliers(x_TK: Tensor, threshold: float) -> Tensor:
    half_TK = x_TK.half()
    return half_TK.masked_fill(half_TK.abs() >= threshold, 0) if threshold else half_TK


def _by_llm_int8(x_TK: Tensor, range_T12: Tensor, threshold: float) -> Tensor:
    """As bitsandbytes' int8_vectorwise_quant of one row, and back; outliers as they are."""
    most_T1 = range_T12.abs().amax(-1).float().clamp(min=1e-8)  # fp16 has no number in between but 0
    code_TK = (_without_outliers(x_TK, threshold) * (127 / most_T1)).round()
    found_TK = (code_TK * (most_T1 * LLM_INT8_UNIT)).to(x_TK.dtype)
    return torch.where(x_TK.half().abs() >= threshold, x_TK, found_TK) if threshold else found_TK
