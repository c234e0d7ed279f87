"""A round is decided as the rule says: in fp64, with the draws that rng.py defines."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from llama_ssp.speculative.decision import block_of, decide
from llama_ssp.speculative.drafters.local import Drafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws, Purpose, heat, inverse_cdf
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.verification import RULES
from tests.proofs import rational
from tests.proofs.toy import toy

CPU = torch.device("cpu")
LAST, NEVER = 1 - 2.0**-53, 2.0  # the largest uniform; more than any chance


@dataclass
class Case:
    """Laws of a round: which they are follows from the seed."""

    seed: int
    vocab: int
    rule: str = "block"
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        random = torch.Generator().manual_seed(self.seed)

        def below(most: int) -> int:
            return int(torch.randint(0, most, (), generator=random))

        rows, self.k = 1 + below(3), below(6)
        shape = rows, self.k + 1, self.vocab
        logit = 2 * torch.randn(shape, generator=random, dtype=self.dtype)
        noise = torch.randn(shape, generator=random, dtype=self.dtype) * below(3) / 2
        impossible = torch.rand(shape, generator=random) < 0.3 * below(2)
        impossible[..., 0] = False
        self.target = torch.softmax(logit.masked_fill(impossible, -torch.inf), -1)
        self.draft = torch.softmax(logit + noise, -1)[:, : self.k].contiguous()
        self.drafted = torch.multinomial(self.draft.flatten(0, 1), 1, generator=random) if self.k else 0
        self.drafted = torch.as_tensor(self.drafted).expand(rows * self.k, -1).reshape(rows, self.k)
        self.count = (self.k, *(below(self.k + 1) for _ in range(rows - 1)))
        self.state = State([Prompt(str(row), (1, 2)) for row in range(rows)], 20, CPU)
        if below(3) == 0 and rows > 1:
            self.state.finished[-1], self.count = "stop", (*self.count[:-1], 0)

    def proposal(self):
        return Proposal(self.drafted, self.draft if self.k else None, self.count)

    @torch.inference_mode()
    def decided(self, draws):
        """What an engine with these draws makes of it."""
        engine = Engine(
            ModelRunner(toy(self.vocab, 0), 8), Drafter(), self.transform, RULES[self.rule], draws
        )
        return engine.judge(self.state, self.proposal(), self.target)

    @staticmethod
    def transform(probs_BWV, _prefix):
        return probs_BWV


class Told(CounterDraws):
    """Whose numbers are said."""

    def __init__(self, coin_BK, clock_BN):
        super().__init__(0)
        self._coins, self._told = coin_BK, clock_BN

    def _uniforms(self, slot, count, device):
        return self._coins[:, slot.offset : slot.offset + count]

    def _clocks(self, slot, count, device):
        return self._told


CASES = [
    Case(seed, vocab, rule, dtype)
    for vocab in (2, 3, 10, 50, 257)
    for rule in ("token", "block")
    for dtype in (torch.float32, torch.float64)
    for seed in range(25)
]


def test_broken_laws_are_told():
    """NaN in a row's distributions damages that row, and its padding does not."""
    found = []
    for case in (Case(seed, 40) for seed in range(60)):
        case.target[-1, -1], case.draft[:1, -1:] = torch.nan, torch.nan
        result = case.decided(CounterDraws(1))
        last = len(case.count) - 1
        due = [
            (row == last and case.count[row] == case.k) or (row == 0 and case.count[0] == case.k > 0)
            for row in range(last + 1)
        ]
        assert result.damaged == due
        assert all(0 <= token < 40 for token in result.token)
        found += due
    assert {False, True} == set(found)


def test_a_broken_draft_is_told_whatever_it_declares():
    """A draft of another tokenizer may have damaged logits, and declare probabilities that are whole."""
    case = next(case for case in CASES if case.state.rows == 3 and case.k)
    broken = replace(case.proposal(), damaged=torch.tensor([False, True, False]))
    with patch.object(Case, "proposal", lambda _: broken):
        assert case.decided(CounterDraws(1)).damaged == [False, True, False]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_chances_are_exact(rule):
    """A coin just below the chance that the rule defines passes, one just above it does not."""
    tried = 0
    for case in (case for case in CASES if case.rule == rule and case.k):
        chance_BK = RULES[rule].accept_chances(block_of(case.proposal(), case.target))
        clock_BN = torch.ones(case.state.rows, 2 * heat(case.vocab), dtype=torch.float64)
        for row, count in enumerate(case.count):
            for place in range(count):
                if rule == "token" and bool((chance_BK[row, :place] == 0).any()):
                    continue  # nobody gets there
                chance = float(chance_BK[row, place])
                for coin, passes in ((chance - 1e-9, True), (chance + 1e-9, False)):
                    if not 0 <= coin <= LAST:
                        continue
                    coin_BK = torch.full((case.state.rows, case.k), NEVER, dtype=torch.float64)
                    coin_BK[row, :place] = NEVER if rule == "block" else 0.0
                    coin_BK[row, place] = coin
                    stood = case.decided(Told(coin_BK, clock_BN)).accepted[row]
                    assert (stood == place + 1) == passes
                    tried += 1
    assert tried > 300


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_behind_the_drafts_is_exact(rule):
    tried = 0
    for case in (case for case in CASES if case.rule == rule and case.vocab in (3, 10, 50)):
        coin_BK = CounterDraws(case.seed)._uniforms(case.state.slot(Purpose.ACCEPT), case.k, CPU)
        tried += tokens_behind(case, coin_BK)
    assert tried > 300


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_enumeration_that_proves_the_rules_holds_for_the_decision(rule):
    """Every draft of random pairs, every outcome of the coins, every token after them: in exact fractions.

    Coins lie just below the exact chance where they are to pass, just above it elsewhere; clocks are in the
    proportions of the exact correction, with the slightest favour for one token.
    """
    tried = 0
    for case in rational.cases(45):
        paths, vocab = rational.drafts(case), case.target.vocab
        block, rows, size = rational.as_block(case, paths), len(paths), heat(vocab)
        chances = RULES[rule].accept_chances(block)
        state = State([Prompt(str(row), (1, 2)) for row in range(rows)], 20, CPU)
        target, draft, chance_BK = (
            torch.tensor(part.astype(float)) for part in (block.target_BWV, block.draft_BKV, chances)
        )
        proposal = Proposal(torch.tensor(block.drafted_BK), draft, tuple(block.count_B.tolist()))
        for passed in itertools.product((False, True), repeat=case.k):
            weights = [rational._chance(row, passed) for row in chances]
            accepted = RULES[rule].accepted(np.array([passed] * rows))
            correction = RULES[rule].correction_probs(block, accepted).astype(float)
            padded = np.pad(correction, ((0, 0), (0, -vocab % size))).reshape(rows, -1, size)
            coin_BK = chance_BK + torch.where(torch.tensor(passed), -1e-9, 1e-9)
            for token in range(vocab):
                clock_BN = np.ones((rows, 2 * size))
                clock_BN[:, : padded.shape[1]] = padded.sum(-1)
                clock_BN[:, size:] = padded[:, token // size]
                clock_BN[:, [token // size, size + token % size]] *= 1 - 1e-7
                draws = Told(coin_BK, torch.tensor(clock_BN))
                found = decide(RULES[rule], draws, state, proposal, target)[:, :2].tolist()
                due = [row for row in range(rows) if weights[row] and correction[row, token]]
                assert all(found[row] == [accepted[row], token] for row in due)
                tried += len(due)
    assert tried > 600


def test_a_small_weight_is_carried_as_it_is():
    """Behind a first draft that the target all but excludes, a later one falls: its weight stays what it is.

    By the block rule, from one half down to 1e-30.
    """
    for weight in (0.5, *(10.0**-n for n in range(1, 31))):
        case, random = Case(0, 10), torch.Generator().manual_seed(1)
        case.state, case.k, case.count = State([Prompt("0", (1, 2))], 20, CPU), 2, (2,)
        target, draft = torch.rand(2, 1, 3, 10, generator=random, dtype=torch.float64)
        draft[0, 1, ::2] = 0  # which leaves the target something, however little is carried,
        target[0, 1, 1], draft[0, 1, 1] = 5, 0.1  # and here, where much is
        target, draft = (probs / probs.sum(-1, keepdim=True) for probs in (target, draft))
        target[0, 0, 0] = weight * draft[0, 0, 0]
        target[0, 0, 1:] *= (1 - target[0, 0, 0]) / target[0, 0, 1:].sum()
        case.target, case.draft, case.drafted = target, draft[:, :2].contiguous(), torch.tensor([[0, 1]])
        coin_BK = torch.tensor([[0.0, NEVER]], dtype=torch.float64)
        assert case.decided(Told(coin_BK, torch.ones(1, 8, dtype=torch.float64))).accepted == [1]
        assert tokens_behind(case, coin_BK) >= 5


def tokens_behind(case: Case, coin_BK) -> int:
    """How many tokens may follow the first row's drafts; each wins given the slightest favour.

    The clocks are in the law's own proportions.
    """
    ones_BN = torch.ones(case.state.rows, 2 * heat(case.vocab), dtype=torch.float64)
    accepted = case.decided(Told(coin_BK, ones_BN)).accepted[0]
    probs_V, size = law_behind(case, accepted), heat(case.vocab)
    padded = torch.nn.functional.pad(probs_V, (0, -case.vocab % size)).view(-1, size)
    possible = probs_V.nonzero().flatten().tolist()
    for token in possible:
        clock_N = ones_BN[0].clone()
        clock_N[: len(padded)] = padded.sum(-1)
        clock_N[size:] = padded[token // size]
        clock_N[[token // size, size + token % size]] *= 1 - 1e-7
        verdict = case.decided(Told(coin_BK, clock_N.expand(case.state.rows, -1)))
        assert (verdict.accepted[0], verdict.token[0]) == (accepted, token)
    return len(possible)


def law_behind(case: Case, accepted: int):
    """Of the first row."""
    if case.k == 0:
        return case.target[0, 0].double()
    block = block_of(case.proposal(), case.target)
    rows = torch.full((case.state.rows,), accepted).minimum(torch.tensor(case.count))
    return RULES[case.rule].correction_probs(block, rows)[0]


def test_of_equal_laws_every_draft_stands():
    for rule in ("token", "block"):
        for case in (Case(seed, 30, rule) for seed in range(20)):
            case.target[:, : case.k] = case.draft
            coin_BK = torch.full((case.state.rows, case.k), LAST, dtype=torch.float64)
            clock_BN = torch.ones(case.state.rows, 12, dtype=torch.float64)
            assert tuple(case.decided(Told(coin_BK, clock_BN)).accepted) == case.count


def coin_on_the_edge() -> int:
    """How many of a half's drafts stand at a coin of a half."""
    case = Case(0, 2)
    case.state, case.k, case.count = State([Prompt("0", (1, 2))], 20, CPU), 1, (1,)
    case.target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    case.draft, case.drafted = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[0]])
    half, clock_BN = torch.full((1, 1), 0.5, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    return case.decided(Told(half, clock_BN)).accepted[0]


def test_a_coin_that_equals_the_chance_does_not_pass():
    assert coin_on_the_edge() == 0


def test_impossible_tokens_are_never_drawn():
    """Also where a uniform falls on the very edge, and where a distribution is none."""
    probs_BV = torch.tensor([[0, 0.25, 0, 0.25, 0.5, 0]])
    for uniform, token in ((0.0, 1), (0.25, 3), (0.5, 4), (LAST, 4)):
        found = inverse_cdf(probs_BV, torch.full((1, 1), uniform, dtype=torch.float64))
        assert found.tolist() == [token]
    nothing = torch.full((1, 300), torch.nan)
    assert 0 <= inverse_cdf(nothing, torch.full((1, 1), 0.5, dtype=torch.float64)) < 300
