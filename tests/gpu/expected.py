"""What a test on a GPU expects, by name, and the values that missed it: the GPU may not be there again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

SHOWN = 5  # values of those that missed


def near(what: str, result: Tensor, exact: Tensor, bound: float) -> None:
    """Expects each number to be off by at most `bound` times the largest exact one."""
    result, exact = result.detach().cpu().double(), exact.detach().cpu().double()
    if result.shape != exact.shape:
        pytest.fail(f"{what}: expected the shape {tuple(exact.shape)}; it is {tuple(result.shape)}")
    limit = bound * float(exact.abs().max())
    missed = int((~((result - exact).abs() <= limit)).sum())  # NaN misses, too
    if missed:
        wanted = f"numbers at most {limit:g} off, {bound:g} of the largest"
        pytest.fail(
            f"{what}: expected {wanted}; {missed} of {exact.numel()} miss it: {_worst(result, exact)}"
        )


def near_by_norm(what: str, result: Tensor, exact: Tensor, bound: float) -> None:
    """Expects the norm of the errors to be below `bound` times that of the exact numbers."""
    result, exact = result.detach().cpu().double(), exact.detach().cpu().double()
    off = float((result - exact).norm() / exact.norm())
    if not off < bound:
        pytest.fail(f"{what}: expected below {bound:g} of the norm; {off:g} is off: {_worst(result, exact)}")


def same_tokens(what: str, result: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> None:
    """Expects these texts, row by row."""
    missed = []
    for row, (tokens, others) in enumerate(zip(result, wanted, strict=True)):
        pairs = enumerate(zip(tokens, others, strict=False))
        at = next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(others)))
        rest, other_rest = (list(text[at : at + SHOWN]) for text in (tokens, others))
        if rest or other_rest:
            missed.append(f"row {row} from token {at} on: {rest}, not {other_rest}")
    if missed:
        differ = f"{len(missed)} of {len(wanted)} rows differ"
        pytest.fail(f"{what}: expected the same tokens; {differ}: {'; '.join(missed)}")


def _worst(result: Tensor, exact: Tensor) -> str:
    """Returns the numbers that are furthest off, with their places."""
    off = (result - exact).abs().nan_to_num(torch.inf).flatten()
    places = [
        tuple(map(int, torch.unravel_index(at, exact.shape))) for at in off.topk(min(SHOWN, len(off)))[1]
    ]
    return "; ".join(f"{list(place)} is {result[place]:g}, not {exact[place]:g}" for place in places)
