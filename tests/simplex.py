"""Races in finite form: what shared noise comes to, exactly.

Independent exponentials, divided by their sum, are a point that is uniform on the simplex; who wins a race
hangs on that point alone. A distribution cuts the simplex into one piece for each token that can win, with
flat walls, and the piece's share of the volume is the chance of that token. Further distributions that race
with the same noise cut the pieces again. Pieces are unions of simplices, whose volumes are determinants:
exact in fractions, and within rounding in floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

Number = Any  # float or Fraction
Point = tuple[Number, ...]
Simplex = tuple[Point, ...]
Piece = list[Simplex]
Races = tuple[tuple[tuple[Number, ...], int], ...]  # distributions that raced with one noise, and who won

FLAT = 1e-15  # a wall this close to a corner goes through it, as far as floats can tell


def whole(size: int, one: Number = 1.0) -> Piece:
    """The noise of so many tokens of which nothing is known."""
    return [tuple(tuple(one * (i == j) for j in range(size)) for i in range(size))]


def volume(piece: Piece) -> Number:
    """The whole simplex has 1."""
    return sum(abs(_determinant(simplex)) for simplex in piece)


def pieces(piece: Piece, probs: Sequence[Number]) -> dict[int, Piece]:
    """Where in the piece each token wins the race of this distribution; only tokens that can."""
    found = {}
    for token, chance in enumerate(probs):
        part = piece if chance > 0 else []
        for other, rival in enumerate(probs):
            if other != token and rival > 0:
                part = [cut for simplex in part for cut in _ahead(simplex, token, chance, other, rival)]
        if volume(part) > FLAT:
            found[token] = part
    return found


@cache
def odds(races: Races, probs: tuple[Number, ...]) -> dict[int, Number]:
    """The chance of each token to win one more race, after those that are known."""
    before = _piece(races, len(probs))
    return {token: volume(piece) / volume(before) for token, piece in pieces(before, probs).items()}


@cache
def _piece(races: Races, size: int) -> Piece:
    """What noise is left by races that are known."""
    if not races:
        return whole(size)
    *earlier, (probs, token) = races
    return pieces(_piece(tuple(earlier), size), probs)[token]


def _ahead(simplex: Simplex, token: int, chance: Number, other: int, rival: Number) -> Piece:
    """Where the token's time, its exponential over its chance, is not behind the other's."""
    return _above(simplex, [corner[other] * chance - corner[token] * rival for corner in simplex])


def _above(simplex: Simplex, heights: list[Number]) -> Piece:
    """The part at heights of 0 and more; a height is linear and given at the corners."""
    below = [i for i, height in enumerate(heights) if height < -FLAT]
    above = [i for i, height in enumerate(heights) if height > FLAT]
    if not above:
        return []
    if not below:
        return [simplex]
    low, high = below[0], above[0]
    share = heights[high] / (heights[high] - heights[low])
    wall = tuple(share * a + (1 - share) * b for a, b in zip(simplex[low], simplex[high], strict=True))
    halves = []
    for corner in (low, high):  # the simplex is both, each with the point on the wall for one end of the edge
        moved, raised = list(simplex), list(heights)
        moved[corner], raised[corner] = wall, heights[corner] * 0
        halves += _above(tuple(moved), raised)
    return halves


def _determinant(simplex: Simplex) -> Number:
    rows, found = [list(corner) for corner in simplex], simplex[0][0] * 0 + 1
    for column in range(len(rows)):
        best = max(range(column, len(rows)), key=lambda row: abs(rows[row][column]))
        if not rows[best][column]:
            return rows[best][column]
        if best != column:
            rows[best], rows[column], found = rows[column], rows[best], -found
        found *= rows[column][column]
        for row in range(column + 1, len(rows)):
            factor = rows[row][column] / rows[column][column]
            rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return found
