"""The rules of Chen et al. (`token`) and of Sun et al. (`block`) are exact: total variation 0, in fractions.

Enumerated by rational.py: every draft, coin and correction of one round, for some hundred random pairs of
distributions, with each filter on both, with one-hot drafts (n-grams), and with drafts that stop by what they
kept. Compared: the distribution of the next K+1 tokens with the target's own; no rounding, no bound. Besides,
the tensors that ship give what the fractions give (1e-14), and the chances by which K is chosen are the mean
number of accepted drafts, exactly. Controls: each fault that mutants.py plants in a rule makes
`test_random_pairs` fail.
"""

import numpy as np
import pytest
import torch

from llama_ssp.speculative.verification import RULES, acceptance_prob
from tests.proofs.rational import Case, as_block, as_tensors, cases, drafts, total_variation


@pytest.mark.parametrize("rule", RULES)
def test_random_pairs(rule):
    assert not any(total_variation(RULES[rule], case) for case in cases(120))


FILTERED = [(30, 1, cut) for cut in ("top_k", "top_p", "min_p", "all")]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("given", FILTERED, ids=lambda given: given[2])
def test_with_each_filter_on_both(rule, given):
    assert not any(total_variation(RULES[rule], case) for case in cases(*given))


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_are_one_hot(rule):
    assert not any(total_variation(RULES[rule], case) for case in cases(60, 2, "none", True))


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_stop_by_what_they_kept(rule):
    ragged = cases(60, 3, early=True)
    assert any(len({len(path) for path, _ in drafts(case)}) > 1 for case in ragged)
    assert not any(total_variation(RULES[rule], case) for case in ragged)


@pytest.mark.parametrize("rule", RULES)
def test_equal_distributions_accept_everything(rule):
    """The last position always passes; under the token rule, so does every other."""
    for case in cases(20, 4):
        same = Case(case.target, case.target, case.k)
        chances = RULES[rule].accept_chances(as_block(same, drafts(same)))
        assert (chances[:, -1] == 1).all(), case
        assert rule == "block" or (chances == 1).all(), case


def test_block_rule_accepts_at_least_as_many_tokens():
    """And strictly more somewhere, else it would be the token rule."""
    gains = []
    for case in cases(60, 5):
        paths = drafts(case)
        block = as_block(case, paths)
        mean = {name: _mean_accepted(rule, block, paths) for name, rule in RULES.items()}
        gains.append(mean["block"] - mean["token"])
    assert min(gains) >= 0
    assert max(gains) > 0


def _mean_accepted(rule, block, paths):
    """Exact mean number of accepted drafts."""
    chances, mean = rule.accept_chances(block), 0
    for row, (_, weight) in enumerate(paths):
        for bits in range(2**block.k):
            passed = [bool(bits >> i & 1) for i in range(block.k)]
            share = weight
            for chance, ok in zip(chances[row], passed, strict=True):
                share *= chance if ok else 1 - chance
            mean += share * int(rule.accepted(np.array([passed]))[0])
    return mean


@pytest.mark.parametrize("rule", RULES)
def test_what_is_said_of_drafts_that_stand_is_how_many_do(rule):
    """Which is what K is chosen by. On average over drafts: the chances say nothing of single ones."""
    for case in cases(40, 9):
        paths = drafts(case)
        block = as_block(case, paths)
        before_BK, standing_BK = RULES[rule].standing(block, acceptance_prob(block))
        weight_B = np.array([weight for _, weight in paths])
        stand_K = (weight_B[:, None] * standing_BK).sum(0)
        assert ((weight_B[:, None] * before_BK).sum(0) == [1, *stand_K[:-1]]).all(), case
        assert stand_K.sum() == _mean_accepted(RULES[rule], block, paths), case


@pytest.mark.parametrize("rule", RULES)
def test_torch_runs_the_same_functions(rule):
    """The tensors that ship give what the fractions give, row by row."""
    for case in cases(15, 6, early=True):
        exact = as_block(case, drafts(case))
        block = as_tensors(exact)
        mine, chances = RULES[rule].accept_chances(block), RULES[rule].accept_chances(exact)
        assert np.allclose(mine.numpy(), chances.astype(float), rtol=0, atol=1e-14), case
        said = zip(*(RULES[rule].standing(one, acceptance_prob(one)) for one in (block, exact)), strict=True)
        assert all(
            np.allclose(one.numpy(), other.astype(float), rtol=0, atol=1e-14) for one, other in said
        ), case
        for accepted in range(case.k + 1):
            reached = np.minimum(exact.count_B, accepted)
            mine = RULES[rule].correction_probs(block, torch.tensor(reached))
            theirs = RULES[rule].correction_probs(exact, reached)
            assert np.allclose(mine.numpy(), theirs.astype(float), rtol=0, atol=1e-14), (case, accepted)


def test_how_often_the_token_rule_accepts_a_single_draft():
    for case in cases(20, 7):
        one = Case(case.target, case.draft, 1)
        paths = drafts(one)
        block = as_block(one, paths)
        chances = RULES["token"].accept_chances(block)
        accepts = sum(weight * chances[row, 0] for row, (_, weight) in enumerate(paths))
        assert accepts == acceptance_prob(block)[0, 0], case
