"""Coupled draws: races are drawn from their distributions, two that share noise meet as often as the rule
says, and a seed gives the same text for any draft and any K.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.speculative.coupled import CoupledDraws, source, winner
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws, Purpose, Slot
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES
from llama_ssp.text.translation import Intersection, Text
from tests.families import VOCAB, build
from tests.rational import Law, as_block, cases, drafts
from tests.rig import drive_refilled, perturbed, speculate
from tests.simplex import pieces, volume, whole
from tests.test_draws import FALSE_ALARM, g_test, random_law
from tests.tongues import PAIRS
from tests.toy import toy
from tests.trees import bridged

DRAWS = 20_000
SAMPLED = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
PROMPTS = [Prompt("a", (5, 9, 4, 3)), Prompt("b", (7,)), Prompt("c", (3, 8)), Prompt("d", (6, 6, 4))]


def places(first: int, count: int) -> Slot:
    """So many positions of one text."""
    return Slot((7,) * count, tuple(range(first, first + count)), Purpose.DRAFT)


def pairs_of_laws() -> list[tuple[Law, Law]]:
    """The target's and the draft's first distributions of random cases, in fractions, zeros included."""
    return [(case.target(()), case.draft(())) for case in cases(40, 12)]


def test_a_law_cuts_off_pieces_of_its_own_size():
    for probs, _ in pairs_of_laws():
        found = pieces(whole(len(probs), Fraction(1)), probs)
        assert [volume(found.get(token, [])) for token in range(len(probs))] == list(probs)


def test_the_rule_says_how_two_races_end():
    """Exactly: for each draft, how often the target's winner is the same, and who it is otherwise."""
    rule = RULES["coupled"]
    for case in cases(40, 12):
        case = type(case)(case.target, case.draft, 1)
        block, target = as_block(case, drafts(case)), case.target(())
        chances = rule.accept_chances(block)
        others = rule.correction_probs(block, block.count_B * 0)
        for row, ((drafted,), weight) in enumerate(drafts(case)):
            won = pieces(whole(len(target), Fraction(1)), case.draft(()))[drafted]
            both = pieces(won, target)
            for token in range(len(target)):
                stands = chances[row, 0] if token == drafted else (1 - chances[row, 0]) * others[row, token]
                if chances[row, 0] == 1:  # then there are no others
                    stands = Fraction(token == drafted)
                assert volume(both.get(token, [])) == weight * stands


def test_the_race_is_won_where_the_piece_lies():
    generator = torch.Generator().manual_seed(0)
    for probs, _ in pairs_of_laws():
        noise = -torch.rand(len(probs), generator=generator, dtype=torch.float64).log()
        token = int(winner(torch.tensor([[float(share) for share in probs]]), noise[None]))
        mine = noise[token] / float(probs[token])
        assert probs[token] > 0
        assert all(mine <= noise[z] / float(share) for z, share in enumerate(probs) if share > 0)


def test_a_race_draws_its_law():
    probs, counts = random_law(0), np.zeros(27, dtype=int)
    moved = probs.clone()
    moved[1] += 0.03
    moved[probs.argmax()] -= 0.03
    for first in range(0, DRAWS, 1000):
        won = CoupledDraws(0).categorical(probs.expand(1000, -1), places(first, 1000))
        counts += np.bincount(won.numpy(), minlength=27)
    assert g_test(counts, probs.numpy()) > FALSE_ALARM
    assert g_test(counts, moved.numpy()) < FALSE_ALARM


def test_two_races_meet_as_often_as_the_rule_says():
    """The joint distribution of both winners; two races of separate noise are told from it."""
    target, draft = (torch.tensor(probs, dtype=torch.float64) for probs in ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)))
    joint = np.zeros((3, 3))
    for drafted, piece in pieces(whole(3), draft.tolist()).items():
        for token, both in pieces(piece, target.tolist()).items():
            joint[drafted, token] = volume(both)
    noise = CoupledDraws(1)
    for apart, fits in ((0, True), (DRAWS, False)):
        counts = np.zeros((3, 3))
        for first in range(0, DRAWS, 1000):
            one = noise.categorical(draft.expand(1000, -1), places(first, 1000))
            other = noise.categorical(target.expand(1000, -1), places(first + apart, 1000))
            np.add.at(counts, (one.numpy(), other.numpy()), 1)
        impossible = counts[joint == 0].any()
        assert bool(not impossible and g_test(counts.ravel(), joint.ravel()) > FALSE_ALARM) is fits


def test_neighbouring_positions_are_independent():
    probs = torch.tensor([0.5, 0.3, 0.2])
    won = CoupledDraws(4).categorical(probs.expand(DRAWS // 2, -1), places(0, DRAWS // 2)).numpy()
    table = np.zeros((3, 3))
    np.add.at(table, (won[:-1:2], won[1::2]), 1)
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_noise_is_named_by_seed_prompt_and_position_alone():
    probs = random_law(2)[None]
    draws = CoupledDraws(5)

    def token(key: int, base: int, offset: int, purpose: Purpose, by: CoupledDraws = draws) -> int:
        return int(by.categorical(probs, Slot((key,), (base,), purpose, offset)))

    for position in range(8, 20):
        every = {token(3, position - at, at, purpose) for at in range(8) for purpose in Purpose}
        assert every == {token(3, position, 0, Purpose.DRAFT, CoupledDraws(5))}
    here = [token(3, position, 0, Purpose.DRAFT) for position in range(40)]
    others = [token(4, position, 0, Purpose.DRAFT) for position in range(40)]
    seeds = [token(3, position, 0, Purpose.DRAFT, CoupledDraws(6)) for position in range(40)]
    own = [token(3, position, 0, Purpose.DRAFT, CoupledDraws(5, {3: 6})) for position in range(40)]
    assert here != others and here != seeds and own == seeds
    padded = torch.nn.functional.pad(probs, (0, 100))
    assert [int(draws.categorical(padded, Slot((3,), (n,), Purpose.DRAFT))) for n in range(40)] == here


def test_noise_is_as_fine_as_its_numbers():
    """No two tokens of a vocabulary tie, and the least of two that nearly tie wins."""
    noise = CoupledDraws(5)._exponentials(3, 8, 20_000)
    assert noise.dtype == np.float64 and len(set(noise.tolist())) == len(noise)
    near = torch.tensor([[1.0, 1.0 - 1e-15, 1.0 + 1e-15]], dtype=torch.float64)
    assert int(winner(torch.full((1, 3), 1 / 3), near)) == 1


def test_little_noise_is_kept(monkeypatch: pytest.MonkeyPatch):
    """What was let go of comes again as it was."""
    probs = random_law(2)
    kept = CoupledDraws(5).categorical(probs.expand(50, -1), places(0, 50)).tolist()
    monkeypatch.setattr("llama_ssp.speculative.coupled.HELD_NUMBERS", 27 * 4)
    draws = CoupledDraws(5)
    assert draws.categorical(probs.expand(50, -1), places(0, 50)).tolist() == kept
    assert len(draws._noise) <= 4


def test_each_rule_has_its_source():
    assert type(source(RULES["coupled"], 0)) is CoupledDraws
    assert {type(source(RULES[rule], 0)) for rule in ("token", "block")} == {CounterDraws}


@pytest.fixture(scope="module")
def models() -> dict[str, CausalModel | str | None]:
    """A target in fp32, and drafts that agree always, sometimes, hardly, and that are no model."""
    return {
        "target": CausalModel(build("llama-mha"), "target"),
        "near": CausalModel(perturbed(build("llama-mha"), 0.05), "near"),
        "far": CausalModel(build("llama-mha", 3), "far"),
        "ngram": "ngram",
        "none": None,
    }


def texts(models: dict, draft: str, k: int, rule: str = "coupled", **how) -> list[list[int]]:
    run = speculate(models["target"], PROMPTS, models[draft], k=k, rule=rule, sampling=SAMPLED, **how)
    return run.texts


@pytest.mark.parametrize(
    "draft", ["near", "ngram", *(pytest.param(name, marks=pytest.mark.slow) for name in ("target", "far"))]
)
def test_a_seed_gives_one_text(models, draft):
    alone = texts(models, "none", 0)
    for k in (0, 1, 4, 8):
        assert texts(models, draft, k) == alone, k
    assert texts(models, draft, 6, adaptive=True) == texts(models, draft, 4, chunk=2) == alone
    assert texts(models, draft, 4, seed=1) != alone


def test_other_rules_do_not(models):
    for rule in ("token", "block"):
        assert texts(models, "near", 4, rule) != texts(models, "near", 1, rule)


def test_one_text_alone_in_a_batch_and_in_a_row_that_is_refilled(models):
    together = dict(zip("abcd", texts(models, "near", 4), strict=True))
    for prompt in PROMPTS:
        run = speculate(models["target"], [prompt], models["far"], k=2, rule="coupled", sampling=SAMPLED)
        assert run.texts == [together[prompt.id]]
    rule, transform = RULES["coupled"], SamplingTransform(SAMPLED, (), VOCAB)
    draws = source(rule, 0)
    drafter = ModelDrafter(ModelRunner(models["near"]), transform, draws)
    engine = Engine(ModelRunner(models["target"]), drafter, transform, rule, draws)
    assert drive_refilled(engine, PROMPTS, 2, k=3, longest=30) == together


def test_the_target_for_a_draft_stands_whole(models):
    run = speculate(models["target"], PROMPTS, models["target"], k=4, rule="coupled", sampling=SAMPLED)
    assert run.accepted == run.drafted > 50


@pytest.mark.few(3)
@pytest.mark.parametrize("name", list(PAIRS))
def test_a_bridged_draft_changes_no_text(name):
    target, draft = PAIRS[name]
    rule, transform = RULES["coupled"], SamplingTransform(SamplingConfig(), tuple(target.ends), target.size)
    prompts = [Prompt(str(n), (n % target.size, 1)) for n in range(6)]
    found = []
    for kind in (None, Intersection, Text):
        draws = source(rule, 2)
        drafter = bridged((name, kind), ModelRunner(toy(draft.size, 1)), transform, draws) if kind else None
        engine = Engine(ModelRunner(toy(target.size, 0)), drafter or Drafter(), transform, rule, draws)
        found.append(drive_refilled(engine, list(prompts), 3, k=3, longest=20, ends=target.ends))
    assert found[0] == found[1] == found[2]
