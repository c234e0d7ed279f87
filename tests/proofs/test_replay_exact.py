"""Replay is exact: given a text, expected rounds and drafts are those of all runs that write it.

Random distributions of target and draft by prefix (rational.py), with zeros; texts of up to five tokens, some
of which end early by an end token; K up to 3. Every run is followed, round by round, with the functions that
ship (verification.py): every draft, coin and correction, cut at the end token and at the limit as generate.py
cuts them. Of each text this gives its probability, which must be the target's own, and the means of its
rounds, of its drafts and of its accepted drafts by position. `replay` gives the same from p and q of the text
alone, in fractions: the numbers are equal, not close.

Controls: chances of the other rule, a weight that is carried over to the next round, and a mean over
positions in place of the renewal sum each give another number.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest

from llama_ssp.config import Verification
from llama_ssp.speculative import replay
from llama_ssp.speculative.replay import ExpectedRounds, counts_of, expected_rounds, kept_chances, windows
from llama_ssp.speculative.verification import RULES
from tests.proofs.rational import Case, Laws, Prefix, as_block, chance_of, drafts

END = 0  # the token that ends a text
LIMIT = 5


@dataclass(frozen=True)
class After:
    """A law by what follows a text, in place of the whole text."""

    laws: Laws
    text: Prefix

    @property
    def vocab(self) -> int:
        return self.laws.vocab

    def __call__(self, prefix: Prefix) -> tuple[Fraction, ...]:
        return self.laws((*self.text, *prefix))


@dataclass
class Means:
    """Of one text: its probability, and the sums over runs of probability times what was counted."""

    weight: Fraction = Fraction(0)
    rounds: Fraction = Fraction(0)
    drafted: list[Fraction] = field(default_factory=lambda: [Fraction(0)] * 3)
    accepted: list[Fraction] = field(default_factory=lambda: [Fraction(0)] * 3)


@dataclass
class Runs:
    """Every run of a pair, by what is written so far; `reach` is how far its drafter drafts at most."""

    target: Laws
    draft: Laws
    rule: str
    k: int
    limit: int
    reach: Callable[[Prefix], int]
    known: dict[Prefix, dict[Prefix, Means]] = field(default_factory=dict)

    def from_here(self, text: Prefix) -> dict[Prefix, Means]:
        """What follows this text, by the whole text that it ends as."""
        if text in self.known:
            return self.known[text]
        if len(text) == self.limit or (text and text[-1] == END):
            return {text: Means(weight=Fraction(1))}

        result: dict[Prefix, Means] = {}
        for (block, accepted, k), chance in self.round(text).items():
            ends = [i for i, token in enumerate(block) if token == END]
            kept = block[: ends[0] + 1] if ends else block
            counted = k if kept == block else min(k, len(kept))
            for whole, after in self.from_here((*text, *kept)).items():
                means = result.setdefault(whole, Means())
                weight = chance * after.weight
                means.weight += weight
                means.rounds += weight + chance * after.rounds
                for i in range(3):
                    means.drafted[i] += weight * (i < counted) + chance * after.drafted[i]
                    means.accepted[i] += weight * (i < min(accepted, len(kept))) + chance * after.accepted[i]
        self.known[text] = result
        return result

    def round(self, text: Prefix) -> dict[tuple[Prefix, int, int], Fraction]:
        """The blocks of a round, with how many drafts were accepted, and of how many."""
        k = min(self.k, self.limit - len(text) - 1, self.reach(text))
        outcomes: dict[tuple[Prefix, int, int], Fraction] = {}
        if not k:
            for token, share in enumerate(self.target(text)):
                if share:
                    outcomes[(token,), 0, 0] = share
            return outcomes

        case = Case(After(self.target, text), After(self.draft, text), k)  # type: ignore[arg-type]
        paths = drafts(case)
        block, rule = as_block(case, paths), RULES[self.rule]
        chances = rule.accept_chances(block)
        for passed in itertools.product((False, True), repeat=k):
            accepted = rule.accepted(np.array([passed] * len(paths)))
            after = rule.correction_probs(block, accepted)
            for row, (path, drawn) in enumerate(paths):
                weight = drawn * chance_of(chances[row], passed)
                for token, share in enumerate(after[row]):
                    if weight * share:
                        key = (*path[: accepted[row]], token), int(accepted[row]), k
                        outcomes[key] = outcomes.get(key, Fraction(0)) + weight * share
        return outcomes


def everywhere(text: Prefix) -> int:
    return 99


def now_and_then(text: Prefix) -> int:
    """A drafter that often finds less than K tokens, as n-grams do."""
    return (sum(text) + len(text)) % 4


def pairs(count: int, seed: int) -> list[tuple[Laws, Laws]]:
    return [(Laws(seed + 2 * n, 2 + n % 2), Laws(seed + 2 * n + 1, 2 + n % 2)) for n in range(count)]


def replayed(runs: Runs, text: Prefix) -> ExpectedRounds:
    """The text by its probabilities alone."""
    reach_T = np.array([runs.reach(text[:i]) for i in range(len(text))])
    return expected_rounds(chances(runs, text, runs.rule), counts_of(runs.k, reach_T, runs.limit))


def every_text(runs: Runs) -> list[tuple[Prefix, Means]]:
    """All texts that the target may write."""
    return sorted(runs.from_here(()).items())


@pytest.mark.parametrize("reach", [everywhere, now_and_then])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_means_of_every_text_are_those_of_all_its_runs(rule, k, reach):
    cut = False
    for target, draft in pairs(6, 100):
        runs = Runs(target, draft, rule, k, LIMIT if k < 3 else 4, reach)
        for text, means in every_text(runs):
            own = Fraction(1)
            for i, token in enumerate(text):
                own *= target(text[:i])[token]
            assert means.weight == own, "the runs do not write the target's texts"

            found = replayed(runs, text)
            assert found.tokens == len(text)
            assert found.rounds * own == means.rounds, text
            assert [share * own for share in found.drafted] == means.drafted[:k], text
            assert [share * own for share in found.accepted] == means.accepted[:k], text
            cut |= text[-1] == END and len(text) < runs.limit
    assert cut, "no text ended before its limit"


@pytest.mark.parametrize("k", [1, 2, 3])
def test_tokens_a_round_at_a_smaller_k_need_no_other_probabilities(k):
    """The chances of K = 3 have those of every K in their first columns."""
    for target, draft in pairs(4, 300):
        for rule in RULES:
            runs = Runs(target, draft, rule, k, LIMIT, everywhere)
            for text, _ in every_text(runs):
                widest = chances(Runs(target, draft, rule, 3, LIMIT, everywhere), text, rule)
                count_T = counts_of(k, np.full(len(text), 99), LIMIT)
                assert expected_rounds(widest[:, :k], count_T) == replayed(runs, text)


def chances(runs: Runs, text: Prefix, rule: str) -> np.ndarray:
    """What `replayed` makes rounds of."""
    target_T, draft_T = (
        np.array([laws(text[:i])[token] for i, token in enumerate(text)], dtype=object)
        for laws in (runs.target, runs.draft)
    )
    return kept_chances(windows(draft_T / target_T, runs.k), Verification(rule))


def by_fault(fault: str, runs: Runs, text: Prefix) -> Fraction:
    """The expected rounds of a text, computed wrongly."""
    chance_TK = chances(runs, text, "block")
    count_T = counts_of(runs.k, np.full(len(text), 99), runs.limit)
    if fault == "other rule":
        return expected_rounds(chances(runs, text, "token"), count_T).rounds
    if fault == "weight carried over":  # a block begins with half the weight of a new one
        return expected_rounds(np.minimum(2 * chance_TK, 1), count_T).rounds
    # Tokens of a round, as a mean over all places where one could begin.
    left_T = len(text) - np.arange(len(text))
    inside_TK = np.arange(runs.k) < np.minimum(count_T, left_T - 1)[:, None]
    kept_TK = np.where(inside_TK, chance_TK, 0).cumprod(1)
    return len(text) ** 2 / (len(text) + kept_TK.sum() * Fraction(1))


@pytest.mark.parametrize("fault", ["other rule", "weight carried over", "mean over positions"])
def test_control_a_fault_gives_other_rounds(fault):
    wrong = 0
    for target, draft in pairs(30, 100):
        runs = Runs(target, draft, "block", 3, LIMIT, everywhere)
        for text, means in every_text(runs):
            wrong += by_fault(fault, runs, text) * means.weight != means.rounds
    assert wrong > 10


def test_control_a_renewal_sum_that_forgets_the_bonus_token_is_seen():
    """All drafts kept: a round of K drafts commits K + 1 tokens."""
    chance_TK = np.array([[Fraction(1)] * 2] * 6, dtype=object)
    assert expected_rounds(chance_TK, counts_of(2, np.full(6, 9), 6)).rounds == 2
    assert expected_rounds(chance_TK, counts_of(2, np.full(6, 9), None)).rounds == 2
    assert expected_rounds(chance_TK * 0, counts_of(2, np.full(6, 9), 6)).rounds == 6


def test_logarithms_give_the_ratios_and_impossible_tokens_are_the_drafts_own():
    target_TK = np.log(np.array([[0.5, 0.25], [0.5, 1.0]]))
    draft_TK = np.log(np.array([[0.25, 0.5], [0.5, 0.125]]))
    assert np.allclose(replay.ratios(target_TK, draft_TK), [[0.5, 2.0], [1.0, 0.125]])
    never = np.array([[-np.inf, -np.inf, -1.0]])
    drawn = np.array([[-np.inf, -2.0, -np.inf]])
    assert replay.ratios(never, drawn).tolist() == [[0.0, 1.0, 0.0]]


def test_a_text_of_certain_tokens_is_replayed_as_greedy_runs_are():
    """p is 1, q is 0 or 1: a draft is kept if it is the text's token, by both rules."""
    draft_T = np.array([1, 1, 0, 1, 1, 1, 0], dtype=object) * Fraction(1)
    for rule in Verification:
        chance_TK = kept_chances(windows(draft_T, 2), rule)
        found = expected_rounds(chance_TK, counts_of(2, np.full(7, 9), 7))
        assert found.rounds == 3  # 1 1 0 | 1 1 1 | 0
        assert found.accepted == [2, 2]
        assert found.drafted == [2, 2]  # the last round has room for its correction alone
