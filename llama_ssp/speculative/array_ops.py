"""Names the array operations of verification and filters, which torch and numpy both have.

The functions that ship run on torch tensors. Tests prove the same functions exact by enumeration, on numpy
arrays of `fractions.Fraction` (tests/proofs/test_verify_exact.py).
"""

from typing import Any

import numpy as np
import torch

Array = Any  # torch.Tensor, or numpy.ndarray (of float or of Fraction)
HEAP = 512  # up to this many of the largest, torch's topk is faster on a CPU than numpy's partition


def _of(array: Array) -> Any:
    """Returns the library that the array belongs to."""
    return np if isinstance(array, np.ndarray) else torch


def where(condition: Array, yes: Array, no: Array) -> Array:
    """Returns `yes` where the condition holds, `no` elsewhere."""
    return _of(condition).where(condition, yes, no)


def smaller(left: Array, right: Array) -> Array:
    """Returns the lesser of each pair."""
    return _of(left).minimum(left, right)


def stack_last(parts: list[Array]) -> Array:
    """Returns the parts side by side along a new last axis."""
    return _of(parts[0]).stack(parts, -1)


def joined(left: Array, right: Array) -> Array:
    """Returns both, one after the other along the last axis."""
    return _of(left).concatenate([left, right], -1)


def shifted(array: Array, first: int) -> Array:
    """Returns each entry's left neighbour along the last axis; the first one's is `first`."""
    first_1 = array[..., :1] * 0 + first  # in the array's own kind of number
    return joined(first_1, array[..., :-1])


def excess(weight: Array, target: Array, draft: Array) -> Array:
    """Returns max(weight * target - draft, 0), with memory for one large tensor."""
    if isinstance(target, np.ndarray):
        return (weight * target - draft).clip(0)
    return (weight * target).sub_(draft).clamp_(min=0)


def order(array: Array) -> Array:
    """Returns 0, 1, 2, ..., as many as the last axis is long."""
    size = array.shape[-1]
    return np.arange(size) if isinstance(array, np.ndarray) else torch.arange(size, device=array.device)


def pick(array: Array, index: Array, axis: int) -> Array:
    """Returns `array` at `index` along `axis`; the other axes are as long in both."""
    if isinstance(array, np.ndarray):
        return np.take_along_axis(array, index, axis)
    return array.gather(axis, index)


def row_by_row(array: Array, index_B: Array) -> Array:
    """Returns, of each row, the entry of axis 1 at that row's index: (B, W, V) gives (B, V)."""
    return array[order(index_B), index_B]


def greatest(array: Array, count: int) -> Array:
    """Returns the `count` largest of the last axis, largest first.

    On a CPU numpy sorts several times faster than torch.
    """
    size = array.shape[-1]
    is_torch = isinstance(array, torch.Tensor)
    if is_torch and count < size and (count <= HEAP or array.device.type != "cpu"):
        return array.topk(count).values
    if is_torch and array.device.type != "cpu":
        return array.sort(dim=-1, descending=True).values

    numbers = array.numpy() if is_torch else array
    if count < size:
        numbers = np.partition(numbers, size - count, -1)[..., size - count :]
    down = np.sort(numbers, -1)[..., ::-1]
    return torch.from_numpy(down.copy()) if is_torch else down


def largest(array: Array) -> Array:
    """Returns the maximum of the last axis, kept as an axis of length 1."""
    return _of(array).amax(array, -1, keepdims=True)
