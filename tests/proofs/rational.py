"""One round of a verification rule, enumerated in exact rational arithmetic (`fractions.Fraction`).

The functions are those that ship (verification.py), on numpy arrays of fractions in place of tensors. Given
are random distributions p of the target and q of the draft that depend on the whole prefix, with zeros, K <=
3 drafts of up to 4 tokens. Followed are every path of drafts, every outcome of the K coins, and every token
after the accepted ones; the round is then continued by p up to K+1 tokens. `total_variation` is the distance
of that distribution from p's own over K+1 tokens: it must be 0, not small. The controls are the faults of the
rules in mutants.py (ratio swapped, residual not clamped at zero, ...).
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch

from llama_ssp.speculative.sampling import filtered
from llama_ssp.speculative.verification import DraftBlock, Rule

Law = tuple[Fraction, ...]
Prefix = tuple[int, ...]


@dataclass
class Laws:
    """Random distributions by prefix, zeros included; a prefix always gives the same one."""

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
    paths = drafts(case)
    block = as_block(case, paths)
    chances = rule.accept_chances(block)
    probs: dict[Prefix, Fraction] = {}
    for passed in itertools.product((False, True), repeat=case.k):
        weights = [weight * chance_of(chances[row], passed) for row, (_, weight) in enumerate(paths)]
        accepted = rule.accepted(np.array([passed] * len(paths)))
        corrections = rule.correction_probs(block, accepted)
        for row, (path, _) in enumerate(paths):
            if not weights[row]:
                continue
            kept = path[: accepted[row]]
            _add(probs, kept, weights[row], corrections[row])
    return _distance(case, probs)


def _add(probs: dict[Prefix, Fraction], kept: Prefix, weight: Fraction, next_V: np.ndarray) -> None:
    for token, share in enumerate(next_V):
        if share:
            probs[*kept, token] = probs.get((*kept, token), Fraction(0)) + weight * share


def _distance(case: Case, probs: dict[Prefix, Fraction]) -> Fraction:
    """Of what a round gives, continued by the target, from the target's first K+1 tokens."""
    vocab, length, distance = case.target.vocab, case.k + 1, Fraction(0)
    for text in itertools.product(range(vocab), repeat=length):
        parts = [probs.get(text[:n], 0) * _continued(case.target, text, n) for n in range(1, length + 1)]
        distance += abs(sum(parts, Fraction(0)) - _continued(case.target, text, 0))
    assert isinstance(distance, Fraction)  # a float would mean that something was rounded
    return distance / 2


def drafts(case: Case) -> list[tuple[Prefix, Fraction]]:
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


def as_block(case: Case, paths: list[tuple[Prefix, Fraction]]) -> DraftBlock:
    """All drafts as the rows of one batch, ragged where they stopped early."""
    nobody = (Fraction(1),) + (Fraction(0),) * (case.target.vocab - 1)
    target, draft, drafted = [], [], []
    for path, _ in paths:
        target.append([case.target(path[:i]) if i <= len(path) else nobody for i in range(case.k + 1)])
        draft.append([case.draft(path[:i]) if i < len(path) else nobody for i in range(case.k)])
        drafted.append([*path, *[0] * (case.k - len(path))])
    laws = (np.array(each, dtype=object) for each in (target, draft))
    return DraftBlock(*laws, np.array(drafted), np.array([len(path) for path, _ in paths]))


def as_tensors(block: DraftBlock) -> DraftBlock:

    def real(probs: np.ndarray) -> torch.Tensor:
        return torch.tensor(probs.astype(float))

    drafted_BK, count_B = torch.tensor(block.drafted_BK), torch.tensor(block.count_B)
    return DraftBlock(real(block.target_BWV), real(block.draft_BKV), drafted_BK, count_B)


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


def chance_of(chances: np.ndarray, passed: tuple[bool, ...]) -> Fraction:
    weight = Fraction(1)
    for chance, result in zip(chances, passed, strict=True):
        weight *= chance if result else 1 - chance
    return weight


def _continued(target: Laws, text: Prefix, start: int) -> Fraction:
    weight = Fraction(1)
    for i in range(start, len(text)):
        weight *= target(text[:i])[text[i]]
    return weight
