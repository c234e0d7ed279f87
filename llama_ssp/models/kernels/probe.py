"""Tries our kernels for GPUs on small tensors, before a model relies on them.

A kernel may not compile for a GPU that nobody has tried, ask for more memory than its processors have, or
give wrong numbers. In a model's first step that would end the run, where torch's own operations would do.
"""

import functools

import torch
from torch import Tensor

from llama_ssp.models.attention import Places, Scores, attend_rows
from llama_ssp.models.formats.coded import Coded, Codes
from llama_ssp.models.kernels.attention import attend
from llama_ssp.models.kernels.coded import CodedLinear, DecodedLinear

TOLERANCE = 2.0**-5  # of the largest number: several roundings to bf16
ROWS = 3
INPUTS = 256
OUTPUTS = 128
PROMPT = 80  # tokens, which take the most memory of a processor


@functools.cache
def require_attention(group: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises what the kernel raises, or ArithmeticError, for `group` heads of `size` numbers to a KV head."""
    drawn = _drawn(device, dtype)
    scale = size**-0.5
    keys_GND = drawn(1, 128, size)
    values_GND = drawn(1, 128, size)
    sink_H = drawn(group)
    for rows, scores, sinks in ((ROWS, Scores(scale), None), (PROMPT, Scores(scale, 24, 5.0), sink_H)):
        places = Places.of([(0, 40, rows)], device)
        query_THD = drawn(rows, group, size)
        ours_THD = attend(places, query_THD, keys_GND, values_GND, scores, sinks)
        theirs_THD = attend_rows(places, query_THD, keys_GND, values_GND, scores, sinks)
        _compare("attention", ours_THD, theirs_THD)


@functools.cache
def require_coded(kind: Codes, device: torch.device) -> None:
    """Raises what the kernel for weights in these codes raises, or ArithmeticError."""
    drawn = _drawn(device, torch.bfloat16)
    x_TK = drawn(ROWS, INPUTS)
    scale_NG = drawn(OUTPUTS, INPUTS // (kind.group or INPUTS))
    codes_NC = torch.arange(OUTPUTS * INPUTS * kind.bits // 8, device=device).byte().view(OUTPUTS, -1)
    weight = Coded(kind=kind, inputs=INPUTS, codes_NC=codes_NC, scale_NG=scale_NG)
    plain = DecodedLinear(weight, None).to(device)
    _compare("a product with codes", CodedLinear(weight, None, device)(x_TK), plain(x_TK))


def _drawn(device: torch.device, dtype: torch.dtype) -> functools.partial[Tensor]:
    numbers = torch.Generator(device).manual_seed(0)
    return functools.partial(torch.randn, generator=numbers, dtype=dtype, device=device)


def _compare(what: str, ours: Tensor, theirs: Tensor) -> None:
    off = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not off <= TOLERANCE:
        raise ArithmeticError(f"{what} is off by {off:.2g} of the largest number, {TOLERANCE:.2g} is allowed")
