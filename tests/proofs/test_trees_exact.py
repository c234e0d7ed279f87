"""Draft trees give the target's distribution: drafts with siblings, by traversal verification (2505.12398).

Enumerated in fractions by rational.py: every draft, every choice of its siblings (drawn without replacement),
every outcome of the tree's coins and the token after it. Compared: the distribution of the next K+1 tokens
with the target's own; total variation exactly 0. Enumerated in fp64 by scenarios.py: every branch of whole
runs with siblings, below 1e-12. On a chain the rule is the block rule, number by number. Control: siblings
that are dropped after they were drawn give another distribution; more controls are in mutants.py ("tree:
...").
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from llama_ssp.speculative.stats import expected_tokens
from llama_ssp.speculative.verification import RULES, TREE
from tests.proofs.rational import Case, Tree, as_tensors, as_tree_block, cases, tree_variation, trees
from tests.proofs.scenarios import TREES, walk

KINDS = {"plain": {}, "early": {"early": True}, "one hot": {"one_hot": True}, "filtered": {"cut": "all"}}


@pytest.mark.few(3)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_random_trees_give_the_targets_distribution(most, kind):
    """Trees end early by what they kept; one-hot distributions have no siblings."""
    assert not any(tree_variation(case, most) for case in cases(10, 20 + most, **KINDS[kind]))


def test_a_path_may_decide_how_many_siblings_each_draft_has():
    """Uneven trees. The shape may depend on what was drawn, as long as all that was drawn is there."""
    shaped = [(case, trees(case, lambda path, i: (sum(path) + i) % 3)) for case in cases(10, 30, early=True)]
    assert any(len(set(map(len, tree.siblings))) > 1 for _, found in shaped for tree in found)
    assert not any(tree_variation(case, 2, found) for case, found in shaped)


def test_siblings_must_not_be_dropped_once_they_are_drawn():
    """Control: a path's are left out where one of them is unlikely."""

    def likely(case: Case, tree: Tree) -> Tree:
        shares = [case.target(tree.path[:i])[t] for i, own in enumerate(tree.siblings) for t in own]
        none = ((),) * len(tree.path)
        return tree if all(share >= Fraction(1, 4) for share in shares) else replace(tree, siblings=none)

    found = [(case, [likely(case, tree) for tree in trees(case, 1)]) for case in cases(10, 31)]
    assert sum(tree_variation(case, 1, some) > 0 for case, some in found) > 1


def test_on_a_chain_it_is_the_block_rule():
    for case in cases(20, 40, early=True):
        block = as_tree_block(case, trees(case, 0), 1)
        chances, block_rule = TREE.tree_chances(block), RULES["block"]
        assert (chances[:, :, 0] == block_rule.accept_chances(block)).all() and not chances[:, :, 1].any()
        for accepted in range(case.k + 1):
            reached = np.minimum(block.count_B, accepted)
            mine = TREE.probs_after(block, 2 * reached)
            assert (mine == block_rule.correction_probs(block, reached)).all()


def test_torch_runs_the_same_functions():
    for case in cases(8, 41, early=True):
        exact = as_tree_block(case, trees(case, 2), 2)
        block = as_tensors(exact)
        chances = TREE.tree_chances(exact).astype(float)
        assert np.allclose(TREE.tree_chances(block).numpy(), chances, atol=1e-15)
        rows = len(exact.count_B)
        for outcome in range(3 * case.k + 1):
            reached = np.where(outcome // 3 + (outcome % 3 > 0) <= exact.count_B, outcome, 0)
            mine = TREE.probs_after(block, torch.tensor(reached)).numpy()
            assert np.allclose(mine, TREE.probs_after(exact, reached).astype(float), atol=1e-14)
        passed = torch.rand(rows, case.k) < 0.5, torch.rand(rows, case.k, 2) < 0.3
        assert (TREE.outcome(*passed).numpy() == TREE.outcome(*(each.numpy() for each in passed))).all()


def test_what_siblings_are_expected_to_bring_is_what_they_bring():
    """Against the mean over all outcomes; and the first siblings alone, as if no others had been drawn."""
    for case in cases(10, 42):
        for most in (0, 1, 2):
            found = trees(case, 2)
            block = as_tree_block(case, found, 2)
            closed = TREE.closed(block)
            for row, tree in enumerate(found[:20]):
                chances = [[float(one[row, i]) for one in closed.chances[1:]] for i in range(case.k)]
                weights = [[float(one[row, i]) for one in closed.weights] for i in range(case.k)]
                last = float(block.carried_BW[row, case.k])
                alone = replace(tree, siblings=tuple(own[:most] for own in tree.siblings))
                mine = expected_tokens(chances, weights, last, most)
                assert mine == pytest.approx(mean_tokens(case, alone, most))


def mean_tokens(case: Case, tree: Tree, most: int) -> float:
    """How many of the tree's tokens are committed on average."""
    size = max(most, 1) + 1
    chance_KC = TREE.tree_chances(as_tree_block(case, [tree], size - 1))[0]
    left, mean = Fraction(1), Fraction(0)
    for outcome in range(case.k * size, 0, -1):
        drafted, place = divmod(outcome, size)
        chance = chance_KC[drafted, size - place] if place else chance_KC[drafted - 1, 0]
        mean, left = mean + left * chance * (drafted + (place > 0)), left * (1 - chance)
    return float(mean)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", TREES)
def test_joint_distribution_of_whole_texts(name):
    error, branches = walk(TREES[name])
    assert error < 1e-12
    assert branches >= 16, "too few branches to prove anything"
