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
    if isinstance(array, np.ndarray):
        return where(array > 0, array, array * 0)
    return array.clamp(min=0)


def excess(weight: Array, one: Array, other: Array) -> Array:
    """`weight * one - other` where it is positive, else zero: of large tensors, in memory for one."""
    if isinstance(one, np.ndarray):
        return positive(weight * one - other)
    return (weight * one).sub_(other).clamp_(min=0)


def smaller(one: Array, other: Array) -> Array:
    return (np if isinstance(one, np.ndarray) else torch).minimum(one, other)


def stack_last(parts: list[Array]) -> Array:
    library = np if isinstance(parts[0], np.ndarray) else torch
    return library.stack(parts, -1)


def joined(one: Array, other: Array) -> Array:
    """Side by side on the last axis."""
    library = np if isinstance(one, np.ndarray) else torch
    return library.concatenate([one, other], -1)


def order(array: Array) -> Array:
    """0, 1, 2, ... along the last axis."""
    size = array.shape[-1]
    return np.arange(size) if isinstance(array, np.ndarray) else torch.arange(size, device=array.device)


def pick(array: Array, index: Array, axis: int) -> Array:
    """`array` at `index` along `axis`; the other axes are as long in both."""
    if isinstance(array, np.ndarray):
        return np.take_along_axis(array, index, axis)
    return array.gather(axis, index)


def row_by_row(array: Array, index_B: Array) -> Array:
    """Of each row the entry of axis 1 that its index names."""
    rows = len(index_B)
    on = np.arange(rows) if isinstance(array, np.ndarray) else torch.arange(rows, device=array.device)
    return array[on, index_B]


HEAP = 512  # so few of the largest a CPU finds sooner by a heap than by parting all the others from them


def greatest(array: Array, count: int) -> Array:
    """The `count` largest of the last axis, largest first.

    On a CPU numpy sorts several times faster than torch (bench/overhead.py).
    """
    size, is_torch = array.shape[-1], isinstance(array, torch.Tensor)
    if is_torch and count < size and (count <= HEAP or array.device.type != "cpu"):
        return array.topk(count).values
    if is_torch and array.device.type != "cpu":
        return array.sort(dim=-1, descending=True).values
    found = array.numpy() if is_torch else array
    if count < size:
        found = np.partition(found, size - count, -1)[..., size - count :]
    down = np.sort(found, -1)[..., ::-1]
    return torch.from_numpy(down.copy()) if is_torch else down


def order_up(array: Array) -> Array:
    """The indices that sort the last axis, smallest first."""
    return array.argsort(-1)


def shifted(array: Array, first: int) -> Array:
    """Each entry's left neighbour along the last axis; the first one's is `first`."""
    library = np if isinstance(array, np.ndarray) else torch
    return library.concatenate([array[..., :1] * 0 + first, array[..., :-1]], -1)


def largest(array: Array) -> Array:
    """The maximum of the last axis, kept as an axis of length 1."""
    if isinstance(array, np.ndarray):
        return array.max(-1, keepdims=True)
    return array.amax(-1, keepdim=True)


def total(array: Array) -> Array:
    """The sum of the last axis, kept as an axis of length 1."""
    return array.sum(-1)[..., None]
