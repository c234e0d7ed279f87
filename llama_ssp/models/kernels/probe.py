"""Tries our kernels for GPUs on small tensors, before a model relies on them.

A kernel may not compile for a GPU that nobody has tried, ask for more memory than its processors have, or
give wrong numbers. In a model's first step that would end the run, where torch's own operations would do.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.config import Dtype
from llama_ssp.models.attention import Places, Scores, attend_rows
from llama_ssp.models.formats.coded import Coded, Codes, packed, values
from llama_ssp.models.formats.kept import kinds_of_mix
from llama_ssp.models.kernels.attention import attend
from llama_ssp.models.kernels.build import complaint, triton_runs
from llama_ssp.models.kernels.coded import CodedLinear, DecodedLinear, usable
from llama_ssp.models.kernels.expert_stacks import DTYPES, Stack, Stacking, products
from llama_ssp.models.kernels.kernel_sizes import FEW_ROWS, MANY_ROWS, MOST_PAIRS
from llama_ssp.models.quantization import INT4, QUANTISED

log = logging.getLogger(__name__)

TOLERANCE = 2.0**-5  # of the largest number: several roundings to bf16
ROWS = 3
INPUTS = 1024  # as many as several programs share
OUTPUTS = 128
PROMPT = 80  # tokens, which take the most memory of a processor
# Of products with codes: a step, several rows, whose inputs are in parts, and a prompt, which decodes them.
CODED_ROWS = (ROWS, PROMPT, MANY_ROWS + 1)
EXPERTS = MOST_PAIRS // FEW_ROWS  # so many that MOST_PAIRS pairs are few, of which a program finds its own
# How scales are held, and with which offsets, by the bytes of a scale with its offset (formats/kept.py).
SCALES = {
    2: (torch.bfloat16, ""),
    3: (torch.float16, "zero"),
    4: (torch.float32, ""),
    5: (torch.float32, "zero"),
    8: (torch.float32, "shift"),
}


@dataclass(frozen=True)
class CodedKind:
    """The codes and scales of matrices; `experts`: of a stack of them."""

    codes: Codes
    scales: torch.dtype = torch.bfloat16
    offset: str = ""  # or zero, or shift
    experts: bool = False


def kinds_of(dtype: Dtype, mix: str) -> list[CodedKind]:
    """Returns the codes that a model's kernels read in this format; `mix`: of ModelConf, of a packed one."""
    if dtype in QUANTISED:
        scales = torch.bfloat16 if dtype is Dtype.int4 else torch.float32
        return [CodedKind(QUANTISED[dtype], scales)]
    kinds = list[CodedKind]()
    for kept, experts in sorted(kinds_of_mix(mix)):
        scales, offset = SCALES.get(kept.bytes, (torch.bfloat16, ""))
        codes = Codes(kept.table, kept.group)
        kinds.append(CodedKind(codes=codes, scales=scales, offset=offset, experts=experts))
    return kinds or [CodedKind(INT4)]


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
def require_coded(kind: CodedKind, device: torch.device) -> None:
    """Raises what a kernel for weights in these codes raises, or ArithmeticError; each is tried.

    Codes that the kernels do not take are none of theirs: they are decoded without them.
    """
    weights = [_coded(kind, device, seed) for seed in range(EXPERTS if kind.experts else 1)]
    if not usable(weights[0], device):
        return
    if kind.experts:
        _require_stack(weights, device)
        return
    plain = DecodedLinear(weights[0], None).to(device)
    layer = CodedLinear(weights[0], None, device)
    for rows in CODED_ROWS:
        x_TK = _drawn(device, torch.bfloat16)(rows, INPUTS)
        _compare(f"a product of {rows} rows with codes", layer(x_TK), plain(x_TK))


def _require_stack(weights: list[Coded], device: torch.device) -> None:
    """Tries the kernels for experts in codes: of a step, and of a prompt, whose pairs are sorted."""
    stacking = Stacking(len(weights), device, fast=True, memory=None)
    for number, weight in enumerate(weights):
        stacking.put(number, weight)
    stack = stacking.made()
    drawn = _drawn(device, torch.bfloat16)
    _require_products(
        "experts in codes",
        stack,
        bias_EN=None,
        plain=[DecodedLinear(weight, None).to(device) for weight in weights],
        x_of=lambda pairs: drawn(pairs, INPUTS),
        counts=(2 * ROWS, MOST_PAIRS, MOST_PAIRS + PROMPT),
    )


def _require_products(
    what: str,
    stack: Stack,
    bias_EN: Tensor | None,
    plain: Sequence[Callable[[Tensor], Tensor]],
    x_of: Callable[[int], Tensor],
    counts: tuple[int, ...],
) -> None:
    """Compares products of the stack with those of each expert alone, which `plain` gives.

    They are of so many pairs as `counts` says, one after the other; `x_of` draws a row for each pair.
    """
    experts = len(plain)
    for pairs in counts:
        x_PK = x_of(pairs)
        expert_P = torch.arange(pairs, device=x_PK.device) % experts
        theirs_PN = x_PK.new_empty(pairs, OUTPUTS)
        for number in range(min(experts, pairs)):
            theirs_PN[number::experts] = plain[number](x_PK[number::experts])
        ours_PN = products(x_PK, expert_P, stack, bias_EN)
        _compare(f"a product of {pairs} pairs with {what}", ours_PN, theirs_PN)


def _coded(kind: CodedKind, device: torch.device, seed: int) -> Coded:
    """Returns a matrix in these codes, all of which are numbers; those of the next seed differ."""
    codes = kind.codes
    drawn = _drawn(device, kind.scales, seed)
    scale_NG = drawn(OUTPUTS, -(-INPUTS // (codes.group or INPUTS)))
    finite_C = values(codes.table, device).isfinite().nonzero().flatten()
    place_NK = torch.arange(OUTPUTS * INPUTS, device=device).view(OUTPUTS, INPUTS)
    code_NK = finite_C[(place_NK * 7 + seed) % len(finite_C)].byte()
    return Coded(
        kind=codes,
        inputs=INPUTS,
        codes_NC=packed(code_NK) if codes.bits == 4 else code_NK,
        scale_NG=scale_NG,
        zero_NG=(scale_NG.abs() * 8).byte() if kind.offset == "zero" else None,
        shift_NG=drawn(*scale_NG.shape) if kind.offset == "shift" else None,
    )


@functools.cache
def experts_run(numbers: torch.dtype, device: torch.device, many: bool) -> bool:
    """Returns whether the kernel multiplies experts in this format on a GPU; if it fails, the log says so.

    `many`: for more than MOST_PAIRS pairs of a token and an expert.
    """
    if numbers not in DTYPES or not triton_runs():
        return False
    try:
        require_experts(numbers, device, many)
    except Exception as error:  # whatever compilers and kernels raise
        where = "prompts" if many else "steps, which are not compiled,"
        reason = complaint(error)
        log.warning("engine: experts in %s run one after the other: their kernel fails: %s", where, reason)
        return False
    return True


def require_experts(numbers: torch.dtype, device: torch.device, many: bool) -> None:
    """Raises what the kernel for experts raises, or ArithmeticError."""
    drawn = _drawn(device, numbers)
    weight_ENK = drawn(EXPERTS, OUTPUTS, INPUTS)
    bias_EN = drawn(EXPERTS, OUTPUTS)
    layers = zip(weight_ENK, bias_EN, strict=True)
    _require_products(
        "experts",
        Stack([weight_ENK]),
        bias_EN=bias_EN,
        plain=[functools.partial(functional.linear, weight=w_NK, bias=b_N) for w_NK, b_N in layers],
        x_of=lambda pairs: drawn(pairs, INPUTS),
        counts=(MOST_PAIRS + PROMPT,) if many else (2 * ROWS, MOST_PAIRS),
    )


def _drawn(device: torch.device, dtype: torch.dtype, seed: int = 0) -> functools.partial[Tensor]:
    numbers = torch.Generator(device).manual_seed(seed)
    return functools.partial(torch.randn, generator=numbers, dtype=dtype, device=device)


def _compare(what: str, ours: Tensor, theirs: Tensor) -> None:
    off = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not off <= TOLERANCE:
        raise ArithmeticError(f"{what} is off by {off:.2g} of the largest number, {TOLERANCE:.2g} is allowed")
