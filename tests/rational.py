"""Exact enumeration of one round over random distributions in fractions: the functions that ship, no
rounding.

Every path of drafts, of accept draws and of corrections is followed. The distribution of the first K+1 tokens
(the block, continued by the target's own distribution) must equal the target's, with total variation 0.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from llama_ssp.speculative.sampling import filtered
from llama_ssp.speculative.verification import Block, Rule

Law = tuple[Fraction, ...]
Prefix = tuple[int, ...]


@dataclass
class Laws:
    """Context-dependent random distributions, zeros included; the same prefix always gives the same law."""

    seed: int
    vocab: int
    one_hot: bool = False
    cut: Callable[[np.ndarray], np.ndarray] | None = None
    known: dict[Prefix, Law] = field(default_factory=dict)

    def __call__(self, prefix: Prefix) -> Law:
        if prefix not in self.known:
            chance = random.Random(f"{self.seed} {prefix}")
            if self.one_hot:
                weights = [0] * self.vocab
                weights[chance.randrange(self.vocab)] = 1
            else:
                weights = [chance.choice((0, 0, 1, 1, 2, 5, 30)) for _ in range(self.vocab)]
            if not sum(weights):
                weights[chance.randrange(self.vocab)] = 1
            probs = np.array([Fraction(w, sum(weights)) for w in weights], dtype=object)
            if self.cut is not None:
                probs = self.cut(probs[None])[0]
            self.known[prefix] = tuple(probs)
        return self.known[prefix]


@dataclass(frozen=True)
class Case:
    """One pair of distributions and how far it is drafted; `stops` ends a draft early by what it kept."""

    target: Laws
    draft: Laws
    k: int
    stops: Callable[[Prefix], bool] = lambda prefix: False


def total_variation(rule: Rule, case: Case) -> Fraction:
    """Between the distribution of the first K+1 tokens under the rule and under the target alone."""
    vocab, length = case.target.vocab, case.k + 1
    paths = drafts(case)
    block = as_block(case, paths)
    chances = rule.accept_chances(block)
    probs: dict[Prefix, Fraction] = {}
    for passed in itertools.product((False, True), repeat=case.k):
        weights = [weight * _chance(chances[row], passed) for row, (_, weight) in enumerate(paths)]
        accepted = rule.accepted(np.array([passed] * len(paths)))
        corrections = rule.correction_probs(block, accepted)
        for row, (path, _) in enumerate(paths):
            if not weights[row]:
                continue
            kept = path[: accepted[row]]
            for token in range(vocab):
                if corrections[row, token]:
                    key = (*kept, token)
                    probs[key] = probs.get(key, Fraction(0)) + weights[row] * corrections[row, token]
    distance = Fraction(0)
    for text in itertools.product(range(vocab), repeat=length):
        mine = sum(
            (
                probs.get(text[:n], Fraction(0)) * _continued(case.target, text, n)
                for n in range(1, length + 1)
            ),
            Fraction(0),
        )
        distance += abs(mine - _continued(case.target, text, 0))
    assert isinstance(distance, Fraction)  # a float would mean that something was rounded
    return distance / 2


def drafts(case: Case) -> list[tuple[Prefix, Fraction]]:
    """Every draft that can be drawn, with its probability."""
    found: list[tuple[Prefix, Fraction]] = []
    open_paths: list[tuple[Prefix, Fraction]] = [((), Fraction(1))]
    while open_paths:
        path, weight = open_paths.pop()
        if len(path) == case.k or (path and case.stops(path)):
            found.append((path, weight))
            continue
        open_paths += [
            ((*path, token), weight * share) for token, share in enumerate(case.draft(path)) if share
        ]
    return found


def as_block(case: Case, paths: list[tuple[Prefix, Fraction]]) -> Block:
    """All drafts as the rows of one batch, ragged where they stopped early."""
    nobody = (Fraction(1),) + (Fraction(0),) * (case.target.vocab - 1)
    target, draft, drafted = [], [], []
    for path, _ in paths:
        target.append([case.target(path[:i]) if i <= len(path) else nobody for i in range(case.k + 1)])
        draft.append([case.draft(path[:i]) if i < len(path) else nobody for i in range(case.k)])
        drafted.append([*path, *[0] * (case.k - len(path))])
    return Block(
        np.array(target, dtype=object),
        np.array(draft, dtype=object),
        np.array(drafted),
        np.array([len(path) for path, _ in paths]),
    )


def filters(name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """The shipped filters by name, at values that cut distributions of up to four tokens."""
    settings = {
        "none": None,
        "top_k": (2, 1, 0),
        "top_p": (0, Fraction(3, 4), 0),
        "min_p": (0, 1, Fraction(1, 4)),
        "all": (3, Fraction(9, 10), Fraction(1, 10)),
    }[name]
    return None if settings is None else lambda probs: filtered(probs, *settings)


def cases(
    count: int, seed: int = 0, cut: str = "none", one_hot: bool = False, early: bool = False
) -> list[Case]:
    """Random pairs, K up to 3 and up to 4 tokens; every third pair the hardest size."""
    found = []
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        vocab, k = (3, 3) if number % 3 == 0 else (chance.choice((2, 3, 4)), chance.choice((1, 2)))
        target = Laws(seed * 10**6 + 2 * number, vocab, cut=filters(cut))
        draft = Laws(seed * 10**6 + 2 * number + 1, vocab, one_hot, None if one_hot else filters(cut))
        if early:
            found.append(Case(target, draft, k, lambda prefix, d=draft: max(d(prefix)) < Fraction(1, 2)))
        else:
            found.append(Case(target, draft, k))
    return found


def _chance(chances: np.ndarray, passed: tuple[bool, ...]) -> Fraction:
    weight = Fraction(1)
    for chance, result in zip(chances, passed, strict=True):
        weight *= chance if result else 1 - chance
    return weight


def _continued(target: Laws, text: Prefix, start: int) -> Fraction:
    weight = Fraction(1)
    for i in range(start, len(text)):
        weight *= target(text[:i])[text[i]]
    return weight
