"""The decision that ships (`engine.judge`, `decide`) is the rule that is proved, with the round's own draws.

Enumerated: every draft of random pairs of distributions in fractions, every outcome of the coins, and every
token after the accepted ones. For each, coins are set 1e-9 below or above the rule's exact chance, and the
clocks of the race stand in the proportions of the exact correction, with an advantage of 1e-7 for one token:
the fp64 decision must be the enumerated one. The same on a thousand random rounds in fp32 and fp64 (ragged
rows, ended rows, up to 257 tokens), and for carried weights down to 1e-30. Control: a coin on the other side
of its chance decides otherwise; broken numbers (NaN) are told for their row alone.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from llama_ssp.speculative.decision import block_of, decide
from llama_ssp.speculative.rng import CounterDraws, RoundNumbers, heat
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.verification import RULES
from tests.proofs import rational
from tests.proofs.toy import toy
from tests.rig import engine_of

CPU = torch.device("cpu")
LAST, NEVER = 1 - 2.0**-53, 2.0  # the largest uniform; more than any chance


def batch(*rows: int) -> State:
    return State([Prompt(str(row), tuple(range(length))) for row, length in enumerate(rows)], 30, CPU)


@dataclass
class Told:
    """Draws whose numbers are given: the coins, and the clocks of the correction's race."""

    coin_BK: torch.Tensor
    clock_BN: torch.Tensor

    def round(self, decide, rule, _slot, *given):
        return decide(rule, RoundNumbers(self.coin_BK, self.clock_BN), *given)


@dataclass
class Case:
    """The distributions of a round: which they are follows from the seed."""

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
        self.state = batch(*[2] * rows)
        if below(3) == 0 and rows > 1:
            self.state.finished[-1], self.count = "stop", (*self.count[:-1], 0)

    @property
    def proposal(self):
        return Proposal(self.drafted, self.draft if self.k else None, self.count)

    @property
    def block(self):
        return block_of(self.target, self.draft, self.drafted, torch.tensor(self.count))

    @torch.inference_mode()
    def decided(self, draws):
        """What an engine with these draws makes of it."""
        engine = engine_of(toy(self.vocab, 0), rule=self.rule, draws=draws)
        engine.transform = lambda probs_BWV, _prefix: probs_BWV
        return engine.judge(self.state, self.proposal, self.target)

    def clocks(self):
        return torch.ones(self.state.rows, 2 * heat(self.vocab), dtype=torch.float64)

    def coins(self, value: float):
        return torch.full((self.state.rows, self.k), value, dtype=torch.float64)


CASES = [
    Case(seed, vocab, rule, dtype)
    for vocab in (2, 3, 10, 50, 257)
    for rule in RULES
    for dtype in (torch.float32, torch.float64)
    for seed in range(25)
]


@pytest.mark.parametrize("rule", RULES)
def test_the_enumeration_that_proves_the_rules_holds_for_the_decision(rule):
    tried = 0
    for case in rational.cases(45):
        exact, vocab = rational.as_block(case, rational.drafts(case)), case.target.vocab
        block, rows = rational.as_tensors(exact), len(exact.count_B)
        chances = RULES[rule].accept_chances(exact)
        for passed in itertools.product((False, True), repeat=case.k):
            weights = [rational.chance_of(row, passed) for row in chances]
            accepted = RULES[rule].accepted(np.array([passed] * rows))
            correction = RULES[rule].correction_probs(exact, accepted).astype(float)
            coin_BK = torch.tensor(chances.astype(float)) + torch.where(torch.tensor(passed), -1e-9, 1e-9)
            for token in range(vocab):
                draws = RoundNumbers(coin_BK, favouring(token, torch.from_numpy(correction)))
                given = block.target_BWV, block.draft_BKV, block.drafted_BK, block.count_B
                found = decide(RULES[rule], draws, *given)[:, :2]
                due = [row for row in range(rows) if weights[row] and correction[row, token]]
                assert all(found[row].tolist() == [accepted[row], token] for row in due)
                tried += len(due)
    assert tried > 600


def favouring(token: int, probs_BV: torch.Tensor) -> torch.Tensor:
    """Clocks of a race in the distribution's own proportions, with the slightest favour for one token."""
    rows, vocab = probs_BV.shape
    size = heat(vocab)
    padded = torch.nn.functional.pad(probs_BV, (0, -vocab % size)).view(rows, -1, size)
    clock_BN = torch.ones(rows, 2 * size, dtype=torch.float64)
    clock_BN[:, : padded.shape[1]] = padded.sum(-1)
    clock_BN[:, size:] = padded[:, token // size]
    clock_BN[:, [token // size, size + token % size]] *= 1 - 1e-7
    return clock_BN


@pytest.mark.parametrize("rule", RULES)
def test_random_rounds_are_decided_as_the_rule_says(rule):
    """Coins lie just below or above the chances; each token that may follow wins by the slightest favour."""
    tokens, stood = 0, set()
    for case in (case for case in CASES if case.rule == rule):
        block = case.block if case.k else None
        chance_BK = RULES[rule].accept_chances(block) if block else case.coins(0)
        random_BK = torch.rand(chance_BK.shape, generator=torch.Generator().manual_seed(case.seed)) < 0.5
        for wanted_BK in (random_BK, ~random_BK):
            passed_BK = wanted_BK & (chance_BK > 1e-9) | (chance_BK > 1 - 1e-9)
            coin_BK = chance_BK + torch.where(passed_BK, -1e-9, 1e-9)
            accepted = case.decided(Told(coin_BK, case.clocks())).accepted
            assert accepted == RULES[rule].accepted(passed_BK).tolist() if case.k else not any(accepted)
            tokens += tokens_behind(case, coin_BK) if case.vocab <= 10 else 0
            stood.update(accepted)
    assert tokens > 300 and stood == {0, 1, 2, 3, 4, 5}


def tokens_behind(case: Case, coin_BK) -> int:
    """How many tokens may follow the first row's drafts; each wins given the slightest favour."""
    accepted = case.decided(Told(coin_BK, case.clocks())).accepted[0]
    probs_V = case.target[0, 0].double()
    if case.k:
        rows = torch.full((case.state.rows,), accepted).minimum(torch.tensor(case.count))
        probs_V = RULES[case.rule].correction_probs(case.block, rows)[0]
    possible = probs_V.nonzero().flatten().tolist()
    for token in possible:
        draws = Told(coin_BK, favouring(token, probs_V[None]).expand(case.state.rows, -1))
        result = case.decided(draws)
        assert (result.accepted[0], result.token[0]) == (accepted, token)
    return len(possible)


def test_a_small_weight_is_carried_as_it_is():
    """Behind a first draft that the target all but excludes, a later one falls: its weight stays what it is.

    By the block rule, from one half down to 1e-30.
    """
    for weight in (0.5, *(10.0**-n for n in range(1, 31))):
        case, random = Case(0, 10), torch.Generator().manual_seed(1)
        case.state, case.k, case.count = batch(2), 2, (2,)
        target, draft = torch.rand(2, 1, 3, 10, generator=random, dtype=torch.float64)
        draft[0, 1, ::2] = 0  # which leaves the target something, however little is carried,
        target[0, 1, 1], draft[0, 1, 1] = 5, 0.1  # and here, where much is
        target, draft = (probs / probs.sum(-1, keepdim=True) for probs in (target, draft))
        target[0, 0, 0] = weight * draft[0, 0, 0]
        target[0, 0, 1:] *= (1 - target[0, 0, 0]) / target[0, 0, 1:].sum()
        case.target, case.draft, case.drafted = target, draft[:, :2].contiguous(), torch.tensor([[0, 1]])
        coin_BK = torch.tensor([[0.0, NEVER]], dtype=torch.float64)
        assert case.decided(Told(coin_BK, case.clocks())).accepted == [1], weight
        assert tokens_behind(case, coin_BK) >= 5, weight


@pytest.mark.parametrize("rule", RULES)
def test_of_equal_distributions_every_draft_stands(rule):
    for case in (Case(seed, 30, rule) for seed in range(20)):
        case.target[:, : case.k] = case.draft
        assert tuple(case.decided(Told(case.coins(LAST), case.clocks())).accepted) == case.count


def test_broken_distributions_are_told():
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
        assert result.damaged == due, case
        assert all(0 <= token < 40 for token in result.token), case
        found += due
    assert {False, True} == set(found)
