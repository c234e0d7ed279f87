"""The handful of array operations that verification and filters need, for torch and numpy alike.

Why two: the functions that ship run on torch tensors; the very same functions, fed numpy arrays of
`fractions.Fraction`, are proved exact by enumeration (tests/test_verify_exact.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = Any  # torch.Tensor, or numpy.ndarray (of float or of Fraction)


def where(condition: Array, yes: Array, no: Array) -> Array:
    library = np if isinstance(condition, np.ndarray) else torch
    return library.where(condition, yes, no)


def positive(array: Array) -> Array:
    """The array with everything below zero made zero, in its own number type."""
    return where(array > 0, array, array * 0)


def stack_last(parts: list[Array]) -> Array:
    library = np if isinstance(parts[0], np.ndarray) else torch
    return library.stack(parts, -1)


def pick(array: Array, index: Array, axis: int) -> Array:
    """`array` at `index` along `axis`; the other axes are matched, or broadcast where 1."""
    if isinstance(array, np.ndarray):
        return np.take_along_axis(array, index, axis)
    return torch.take_along_dim(array, index, axis)


def sorted_down(array: Array) -> Array:
    """The last axis, largest first."""
    if isinstance(array, np.ndarray):
        return np.sort(array, -1)[..., ::-1]
    return torch.sort(array, dim=-1, descending=True).values


def largest(array: Array) -> Array:
    """The maximum of the last axis, kept as an axis of length 1."""
    if isinstance(array, np.ndarray):
        return array.max(-1, keepdims=True)
    return array.amax(-1, keepdim=True)


def total(array: Array) -> Array:
    """The sum of the last axis, kept as an axis of length 1."""
    return array.sum(-1)[..., None]
