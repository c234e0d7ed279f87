"""What rounds with siblings bring, and what adaptive speculation makes of them on a computed clock."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from statistics import fmean, stdev
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from bench.without_forwards import APART, Table, brings, in_the_long_run, rounds
from llama_ssp.speculative.draft_length import Acceptance, AdaptiveDraftLength, Costs, FixedDraftLength

VOCAB, K_MAX, MOST, ROUNDS = 16, 8, 2, 300
COLUMN = 0.02  # of a target step, of each column that it verifies
ALLOWED = 0.02
ROWS = 2000
CELLS = [(agreement, ratio) for agreement in (0.6, 0.8, 0.9) for ratio in (0.05, 0.15, 0.3)]
SOME = torch.tensor([1.5**-n for n in range(VOCAB // 2)] + [0.0] * (VOCAB // 2), dtype=torch.float64)
SOME /= SOME.sum()
OTHERS = SOME.flip(0)
Pair = tuple[Tensor, Tensor]  # the distributions of target and draft


def noisy(agreement: float) -> Pair:
    """The draft has all tokens, some too rarely: siblings stand often."""
    target = 0.95 * SOME + 0.05 * OTHERS
    apart = 1 - torch.minimum(target, target.flip(0)).sum()
    return target, target + (1 - agreement) / apart * (target.flip(0) - target)


def blind(agreement: float) -> Pair:
    """The draft lacks the tokens that the target has more of: siblings never stand."""
    return agreement * SOME + (1 - agreement) * OTHERS, SOME


def costs(ratio: float) -> Costs:
    """A target step is 1."""
    return Costs([[1 + ratio * k + COLUMN * k * (1 + s) for s in range(1 + MOST)] for k in range(K_MAX + 1)])


def regret(pair: Pair, ratio: float) -> tuple[float, float]:
    """What a run of 300 rounds loses to the best chain, and how many of its rounds have siblings."""
    tables = [Table(law.log().expand(VOCAB, -1)) for law in pair]  # all contexts are alike
    clock, brought = costs(ratio), {shape: mean for shape, (mean, _) in brings(*tables, K_MAX, MOST).items()}
    best = max(brought[k, 0] / clock.round(k) for k in range(K_MAX + 1))
    lookahead = AdaptiveDraftLength(clock, 1)
    steps = islice(rounds(*tables, lookahead, [(0,)], ROUNDS * (K_MAX + 1), 0), ROUNDS)
    shapes = [step.shape for step in steps]
    rate = sum(brought[shape] for shape in shapes) / sum(clock.round(*shape) for shape in shapes)
    return 1 - rate / best, sum(s > 0 for _, s in shapes) / ROUNDS


@pytest.mark.few(3)
@pytest.mark.parametrize(("agreement", "ratio"), CELLS)
def test_finding_out_costs_less_than_two_hundredths(agreement: float, ratio: float) -> None:
    """Beside the best chain, with a draft whose siblings stand often, and one whose siblings never do."""
    lost, _ = regret(noisy(agreement), ratio)
    assert lost < ALLOWED
    lost, shares = regret(blind(agreement), ratio)
    assert lost < ALLOWED and shares < 0.1


def test_without_finding_out_it_costs_more() -> None:
    """Control: siblings that never stand are believed to bring what they usually do."""
    observe = Acceptance.observe
    with patch.object(Acceptance, "observe", lambda self, step: observe(self, replace(step, tree=None))):
        lost, shares = regret(blind(0.6), 0.3)
    assert lost > ALLOWED and shares > 0.9


@pytest.mark.few(1)
@pytest.mark.parametrize("noise", [0.7, 1.5, 3.0])
def test_rounds_bring_what_is_predicted(noise: float) -> None:
    """First rounds of many texts by the loop, against what `brings` computes of the two tables alone."""
    generator = torch.Generator().manual_seed(1)
    logit_VV, other_VV = (torch.randn(2, 32, 32, generator=generator, dtype=torch.float64) * 2).unbind(0)
    target, draft = Table(logit_VV), Table(logit_VV + noise / 2 * other_VV)
    token_B1, prob_VV = torch.randint(32, (ROWS, 1), generator=generator), torch.softmax(logit_VV, -1)
    for _ in range(APART):
        token_B1 = prob_VV[token_B1[:, 0]].multinomial(1, generator=generator)
    predicted = brings(target, draft, 4, MOST)
    for k, s in ((2, 0), (4, 1), (3, 2)):
        lookahead = FixedDraftLength(k, ROWS, s)
        steps = rounds(target, draft, lookahead, [tuple(row) for row in token_B1.tolist()], k + 1, 2)
        tokens = [len(step.tokens) for step in islice(steps, ROWS)]
        error = stdev(tokens) / ROWS**0.5
        for shape, same in (((k, s), True), ((k, 0), not s)):  # control: without siblings
            mean, uncertain = predicted[shape]
            assert (abs(fmean(tokens) - mean) < 3 * math.hypot(error, uncertain)) is same


def test_the_long_run_begins_rounds_where_rounds_end() -> None:
    """Of one draft a round that can be computed: it is a chain's stationary distribution."""
    generator = torch.Generator().manual_seed(0)
    code_VH = torch.randn(64, 16, generator=generator, dtype=torch.float64).sign()
    bad_VH = code_VH.clone()  # the draft misses a half of the tokens, and what follows them
    bad_VH[:32] *= torch.randn(32, 16, generator=generator, dtype=torch.float64).sign()
    weight_H = torch.tensor([0.7, -0.7]).repeat(8)
    tables = [Table(one_VH * weight_H @ one_VH.T) for one_VH in (code_VH, bad_VH)]
    target_VV, draft_VV = (torch.softmax(table.logit_VV, -1) for table in tables)
    both_VV = torch.minimum(target_VV, draft_VV)  # the draft stands, and then the target's token follows
    ends_VV = both_VV @ target_VV + target_VV - both_VV
    there, anywhere = (
        1 + float(torch.linalg.matrix_power(step_VV, 64)[0] @ both_VV.sum(1))
        for step_VV in (ends_VV, target_VV)
    )
    mean, error = in_the_long_run(*tables, (1, 0))
    assert abs(mean - there) < 3 * error
    assert mean + 3 * error < anywhere  # control: contexts from any place of a text
