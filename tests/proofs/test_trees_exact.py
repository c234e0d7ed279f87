"""Draft trees: siblings beside drafts, verified by one rule, give the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.planner.search import round_times, search
from llama_ssp.planner.weights import CACHE
from llama_ssp.planner.workload import TARGET
from llama_ssp.speculative.decision import decide_tree
from llama_ssp.speculative.draft_length import Costs, usual_gain
from llama_ssp.speculative.drafters.siblings import with_siblings
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.stats import expected_tokens
from llama_ssp.speculative.verification import RULES, TREE, Branches, DraftBlock
from tests.families import build, decoder_of
from tests.plans import machine
from tests.plans import request as planned
from tests.proofs.rational import Case, Tree, as_tree_block, cases, tree_variation, trees
from tests.proofs.scenarios import TREES, walk
from tests.rig import perturbed, speculate

CPU = torch.device("cpu")


@pytest.mark.few(3)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "early", "one hot", "filtered"])
def test_random_trees_give_the_targets_distribution(most, kind):
    """In fractions. Trees end early by what they kept; one-hot distributions have no siblings."""
    how = {"early": {"early": True}, "one hot": {"one_hot": True}, "filtered": {"cut": "all"}}.get(kind, {})
    assert not any(tree_variation(case, most) for case in cases(10, 20 + most, **how))


def test_a_path_may_decide_how_many_siblings_each_draft_has():
    """Uneven trees. The shape may depend on what was drawn, as long as all that was drawn is there."""
    shaped = [(case, trees(case, lambda path, i: (sum(path) + i) % 3)) for case in cases(10, 30, early=True)]
    assert any(len(set(map(len, tree.siblings))) > 1 for _, found in shaped for tree in found)
    assert not any(tree_variation(case, 2, found) for case, found in shaped)


def test_siblings_must_not_be_dropped_once_they_are_drawn():
    """Control of the above: a path's are left out where one of them is unlikely."""

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
        behind = exact.branches
        assert behind is not None
        branches = Branches(
            torch.tensor(behind.token_BKS), torch.tensor(behind.count_BK), real(behind.target_BKSV)
        )
        drafts = torch.tensor(exact.drafted_BK), torch.tensor(exact.count_B)
        block = DraftBlock(real(exact.target_BWV), real(exact.draft_BKV), *drafts, branches)
        chances = TREE.tree_chances(exact).astype(float)
        assert np.allclose(TREE.tree_chances(block).numpy(), chances, atol=1e-15)
        rows = len(exact.count_B)
        for outcome in range(3 * case.k + 1):
            reached = np.where(outcome // 3 + (outcome % 3 > 0) <= exact.count_B, outcome, 0)
            mine = TREE.probs_after(block, torch.tensor(reached)).numpy()
            assert np.allclose(mine, TREE.probs_after(exact, reached).astype(float), atol=1e-14)
        passed = torch.rand(rows, case.k) < 0.5, torch.rand(rows, case.k, 2) < 0.3
        assert (TREE.outcome(*passed).numpy() == TREE.outcome(*(each.numpy() for each in passed))).all()


def real(probs: np.ndarray) -> torch.Tensor:
    return torch.tensor(probs.astype(float))


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


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2"])
@pytest.mark.parametrize(
    "kernel", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.compiler])]
)
def test_the_decoder_writes_what_transformers_writes(family, kernel):
    """Texts of ragged rows in fp32, some with windows."""
    module, draft = build(family), perturbed(build(family), 0.2)
    models = [DecoderModel(decoder_of(each), module.config, "m") for each in (module, draft)]
    if kernel:
        attention_kernel.operators()
        for model in models:
            model.attend = attention_kernel.attend
    prompts = [Prompt(str(row), tuple(range(3, 9 - 2 * row))) for row in range(3)]
    how: Any = {"k": 3, "siblings": 2, "sampling": SamplingConfig(), "max_new": 40}
    found = speculate(models[0], prompts, models[1], **how)
    expected = speculate(CausalModel(module, "m"), prompts, CausalModel(draft, "m"), **how)
    assert found.texts == expected.texts and found.aside == expected.aside > 0
    without = speculate(models[0], prompts, models[1], **{**how, "siblings": 0})
    assert without.texts != found.texts  # control


def test_siblings_are_chosen_where_they_pay():
    """Free ones always, up to the most; those that cost more than they bring never."""
    free = Costs.of_ratio(0.1, 8, 2)
    k, siblings = free.best(0.7, 0.8, [0.25, 0.4])
    assert siblings == 2 and k >= 1 and free.k_max == 8
    dear = Costs([[1 + 0.1 * k + 0.2 * k * (1 + s) for s in range(3)] for k in range(9)])
    assert dear.best(0.7, 0.8, [0.25, 0.4])[1] == 0
    assert free.best(0.7, 0.8)[1] == 0  # control: they bring nothing


@dataclass
class Round:
    """A random round of up to three rows, whose distributions have few tokens in some."""

    number: int

    def __post_init__(self) -> None:
        number, generator = self.number, torch.Generator().manual_seed(self.number)
        vocab, rows = (5, 17, 300)[number % 3], 1 + number % 3
        self.count, each = ((3,), (2, 4), (4, 0, 1))[rows - 1], ([2], [0, 3], [1, 2, 2])[rows - 1]
        self.k = max(self.count)
        self.state = State([Prompt(str(row), tuple(range(row + 1))) for row in range(rows)], 30, CPU)
        draft_BKV = torch.softmax(3 * torch.randn(rows, self.k, vocab, generator=generator), -1)
        if number % 4 == 0:
            draft_BKV[..., 3:] = 0
        if number % 5 == 0:
            draft_BKV[:, 0] = torch.eye(vocab)[2]
        flat_NV = draft_BKV.flatten(0, 1)
        drafted_BK = flat_NV.multinomial(1, generator=generator).view(rows, self.k)
        self.state.write_drafts(drafted_BK, self.count)
        proposal = Proposal(drafted_BK, draft_BKV, self.count)
        self.draws = CounterDraws(number)
        self.proposal = with_siblings(proposal, self.state, self.draws, each)
        siblings = self.proposal.siblings
        assert siblings is not None
        self.siblings, width = siblings, max(map(len, siblings.numbers))
        self.probs_BWV = torch.softmax(3 * torch.randn(rows, width, vocab, generator=generator), -1)
        for row, column_K in enumerate(siblings.columns()[0]):
            for i in range(self.count[row]):  # near the draft's, so that drafts and siblings stand
                self.probs_BWV[row, column_K[i]] += 2 * draft_BKV[row, i]

    def told(self, decided_BN: Tensor) -> list[Any]:
        """What a decision says of the rows' own drafts and siblings."""
        rows, found = decided_BN.tolist(), []
        trees = self.siblings.trees([row[:1] + row[3 + 4 * self.k :] for row in rows])
        for row, tree, count in zip(rows, trees, self.count, strict=True):
            assert tree is not None
            parts = [row[3 + part * self.k :][:count] for part in range(4)]
            numbers = [number for part in parts for number in part]
            found += [*row[:3], *numbers, *tree.gain, tree.missed, *chain(*tree.siblings)]
        return found


def test_broken_numbers_are_told_wherever_they_are():
    """In the target's distribution behind a sibling, too; not in columns that a row does not have."""
    one = Round(1)
    column = one.siblings.numbers[1].index(max(one.siblings.numbers[1]))
    one.probs_BWV[1, column] = torch.nan
    damaged = decide_tree(TREE, one.draws, one.state, one.proposal, one.probs_BWV)[:, 2]
    assert damaged.tolist() == [0, 1]


def test_the_plan_knows_siblings():
    """Their columns, their slots in the cache, and the tokens that they are assumed to bring."""
    chain = planned("llama2-70b", "llama2-7b", machine("dgx_h100"))
    tree = replace(chain, work=replace(chain.work, siblings=2))
    placement = search(chain, [8])[0].placement
    plain, wide = (round_times(request, placement) for request in (chain, tree))
    assert wide.verify[0] == plain.verify[0] and plain.verify[4] < wide.verify[4]
    assert wide.tokens(0.7, 4) - plain.tokens(0.7, 4) == pytest.approx((1 - 0.7**4) * usual_gain(2))
    caches = []
    for request in (chain, tree):
        lines = request.memories(placement, request.work)[0].lines
        caches.append(sum(line.bytes for line in lines if (line.role, line.name) == (TARGET, CACHE)))
    assert caches[1] - caches[0] == pytest.approx(8 * caches[0] / chain.work.slots, rel=0.02)
