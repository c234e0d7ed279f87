"""What adaptive drafting goes by: measured where it can be, given where it is, and guessed otherwise."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from itertools import pairwise

import pytest

from llama_ssp.config import USUAL_COST_RATIO, Drafting, ModelConf, RunConf, SpeculationConfig
from llama_ssp.pair import session
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.speculative.draft_length import (
    REMEMBERED,
    AdaptiveDraftLength,
    Costs,
    Experience,
    FixedDraftLength,
)
from llama_ssp.speculative.measure_costs import Rounds, engine_of, measured, rising
from llama_ssp.speculative.stats import RowStep
from tests.conftest import Command
from tests.toy import toy

RUN = RunConf(
    model=ModelConf(name="m"),
    draft=ModelConf(name="d"),
    speculation=SpeculationConfig(adaptive=True, k_max=8),
)


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_are_measured_for_every_k(rows, caplog):
    """And the log says that a seed is not enough to repeat a run that goes by them."""
    with caplog.at_level(logging.INFO):
        costs = measured(toy(5, 0), toy(5, 1), RUN, rows, 40)
    assert "another run of this seed may differ, unless speculation.cost_ratio=" in caplog.text
    assert costs is not None and costs.k_max == 8 and costs.draft >= 0
    assert all(verify > 0 for verify in costs.verify)


def test_where_texts_are_too_short_to_draft_nothing_is_measured():
    assert measured(toy(5, 0), toy(5, 1), RUN, 1, 3) is None


def test_k_is_chosen_by_what_is_known_of_costs():
    known = Costs(0.5, (1.0,) * 9)

    def by(run: RunConf, costs: Costs | None) -> Costs:
        lookahead = lookahead_for(run, 2, costs)
        assert isinstance(lookahead, AdaptiveDraftLength)
        return lookahead.costs

    pinned = replace(RUN, speculation=replace(RUN.speculation, cost_ratio=0.25))
    assert by(RUN, known) == known
    assert by(pinned, None) == by(pinned, known) == Costs.of_ratio(0.25, 8)
    assert by(RUN, None) == Costs.of_ratio(USUAL_COST_RATIO, 8)
    shorter = replace(RUN, speculation=replace(RUN.speculation, k_max=4))
    assert by(shorter, known) == Costs.of_ratio(USUAL_COST_RATIO, 4)  # measured for another k_max
    trees = Costs(0.5, (1.0,) * 25, most=2)
    narrower = replace(RUN, speculation=replace(RUN.speculation, siblings=1))
    assert by(narrower, trees) == Costs.of_ratio(USUAL_COST_RATIO, 8, 1)  # two would have no slots
    assert by(RUN, trees) == trees.of_chains()
    greedy = replace(narrower, sampling=replace(RUN.sampling, temperature=0.0))
    assert by(greedy, None) == Costs.of_ratio(USUAL_COST_RATIO, 8)  # a greedy draft has no second token
    assert lookahead_for(replace(greedy, speculation=SpeculationConfig(k=3, siblings=2)), 1).siblings() == [0]
    fixed = lookahead_for(replace(RUN, speculation=SpeculationConfig(k=3)), 2, known)
    assert isinstance(fixed, FixedDraftLength) and fixed.k == 3


def test_rounds_are_measured_as_a_run_plays_them():
    """Each has the shape that was asked for and commits its tokens; where a text is full another begins."""
    target, draft = toy(5, 0), toy(5, 1)
    engine = engine_of(target, draft, RUN, 8)
    rounds, lengths, shapes = Rounds(engine, 2, 12), [], []
    engine.watch = lambda state, proposal, *_: shapes.append((proposal.k, proposal.siblings is not None))
    asked = [(0, 0), (8, 1), (3, 0), (8, 0)] * 4
    for shape in asked:
        whole_s, drafts_s = rounds.seconds(*shape)
        assert whole_s > drafts_s > 0
        lengths.append(max(rounds.state.lengths))
    assert shapes == [(k, siblings > 0) for k, siblings in asked]
    assert len(set(lengths)) > 3 and max(lengths) <= 6 + 12
    assert any(later < sooner for sooner, later in pairwise(lengths))


def test_costs_rise_with_the_number_of_drafts():
    assert rising({0: 1.0, 4: 3.0, 1: 2.0}) == {0: 1.0, 1: 2.0, 4: 3.0}
    assert rising({0: 3.0, 1: 1.0, 2: 5.0, 3: 4.0}) == {0: 2.0, 1: 2.0, 2: 4.5, 3: 4.5}
    assert rising({0: 3.0, 1: 2.0, 2: 1.0}) == {0: 2.0, 1: 2.0, 2: 2.0}


def learning(costs: Costs, rows: int = 1, apart: float = 0.1) -> Costs:
    """The same, measured by four rounds each."""
    return replace(costs, experience=Experience(costs, apart, 4, rows))


def ran(lookahead: AdaptiveDraftLength, true: dict[int, float], rounds: int, kept: float) -> list[int]:
    """The K of each round of a text where K drafts take `true[K]`, and a draft stands with this chance."""
    found = []
    for _ in range(rounds):
        k = lookahead.choose()[0]
        standing = [(kept**n, kept ** (n + 1)) for n in range(k)]
        step = RowStep(0, [0], [0] * k, 0, [kept] * k, 0, None, standing=standing)
        lookahead.observe([step])
        lookahead.took([step], true[k])
        found.append(k)
    return found


TRUE = {0: 1.0, 1: 1.35, 2: 1.72}


@pytest.mark.parametrize("wrong", [{1: 1.42}, {2: 1.6}, {0: 0.8}])
def test_what_was_measured_wrong_is_corrected_by_rounds(wrong: dict[int, float]):
    """K = 1 is best, by 4 %. It was measured as 5 % dearer, or another K as cheaper than it is."""
    stays = Costs(0.0, tuple((TRUE | wrong).values()))
    chosen, without = (
        ran(AdaptiveDraftLength(costs, 1), TRUE, 600, 0.6) for costs in (learning(stays), stays)
    )
    assert chosen[300:].count(1) > 0.9 * 300
    assert without[300:].count(1) < 0.1 * 300


def test_one_stalled_round_says_little_and_old_ones_are_forgotten():
    costs = learning(Costs(0.0, (1.0, 1.0, 1.0)), apart=0.0)
    assert costs.experience
    rounds, see = costs.experience.rounds, costs.experience.see
    see((1, 0), 1000.0, [0])
    assert 1.0 == rounds[0][0] < rounds[1][0] <= 1.1
    for _ in range(4 * REMEMBERED):
        see((1, 0), 2.0, [0])
    assert rounds[1][0] == pytest.approx(2.0, rel=0.01)
    for _ in range(10 * REMEMBERED):
        see((1, 0), 0.5, [0])
    assert rounds[1][0] == pytest.approx(0.5, rel=0.01)


def test_only_rounds_as_they_were_measured_correct_costs():
    """As many rows as were measured, all of one shape, and a draft model that has read every token."""
    one, other = (RowStep(row, [0], [0] * k, 0, [], 0, None) for row, k in ((0, 1), (1, 2)))
    same, none = replace(other, drafted=[0]), replace(other, drafted=[])
    costs = learning(Costs(0.0, (1.0, 1.2, 1.4)), rows=2, apart=0.0)
    assert costs.experience
    costs.experience._most = 9.0
    lookahead, rounds = AdaptiveDraftLength(costs, 2), costs.experience.rounds
    lookahead.took([one, other], 9.0)  # two shapes
    AdaptiveDraftLength(costs, 1).took([one], 9.0)  # a smaller batch
    lookahead.took([one, none], 1.0)
    lookahead.took([one, same], 9.0)  # the second reads what it has missed
    assert rounds == [[1.0], [1.2], [1.4]]
    for _ in range(4):
        lookahead.took([replace(one, drafted=[]), none], 1.0)
    lookahead.took([one, same], 9.0)  # both do
    assert rounds[1] == [1.2] and costs.experience.reading == pytest.approx((9.0 - 1.2) / 4)
    lookahead.took([one, same], 9.0)
    assert rounds[1][0] > 1.2 and rounds[2] == [1.4]
    capped = learning(Costs(0.5, (1.0, 1.2)), apart=0.0).experience
    assert capped
    capped.see((1, 0), 900.0, [4])
    assert capped.reading == 0.5  # a token takes no longer to read than a draft step


@pytest.mark.parametrize(("reading", "tries"), [(0.0, 10), (0.01, 10), (0.03, 0)])
def test_a_row_that_does_not_draft_tries_where_reading_for_it_takes_little(reading: float, tries: int):
    """What a draft model has missed takes so much of a round; all that is read, 2 % of the text's time."""
    costs = learning(Costs(0.5, (1.0, 1.5, 2.0)), apart=0.0)
    assert costs.experience
    costs.experience.reading = reading
    lookahead, ks = AdaptiveDraftLength(costs, 1), []
    for _ in range(640):
        k = lookahead.choose()[0]
        missed = lookahead._missed[0]
        step = RowStep(0, [0], [0] * k, 0, [0.0] * k, 0, None, standing=[(1.0, 0.0)] * k)
        lookahead.observe([step])
        lookahead.took([step], costs.round(k) + (reading * missed if k else 0.0))
        ks.append(k)
    assert min(ks[:3]) > 0  # a text always begins with drafts
    assert sum(map(bool, ks[3:])) == pytest.approx(tries, abs=1)
    assert (
        tries or costs.experience.reading < reading
    )  # what was measured too dear once is tried again some day


def test_a_text_drafts_again_behind_one_that_did_not():
    """A draft is useless in one text, and good in the next, which is short."""
    costs = learning(Costs(0.0, tuple(TRUE.values())))
    bad = ran(AdaptiveDraftLength(costs, 1), TRUE, 150, 0.05)
    texts = [ran(AdaptiveDraftLength(costs, 1), TRUE, 30, 0.95) for _ in range(5)]
    assert bad[20:].count(0) > 100
    assert all(text.count(0) < 3 for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "times"),
    [
        (("generate", "prompt=Once"), 1),
        (("compare", "prompt=Once"), 1),
        (("agree", "prompt=Once"), 0),
        (("certify", "prompt=Once", "samples=20"), 0),
    ],
)
def test_costs_are_measured_where_a_task_goes_by_them(
    words: tuple[str, ...], times: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a seed must be enough, and where K is not chosen, that would only take time."""
    dear, taken = Costs(9.0, (1.0,) * 17), []
    monkeypatch.setattr(session, "measured", lambda *_: taken.append(dear) or dear)
    answer = command(*words, "speculation=adaptive", "max_new_tokens=30", "seed=1", "output=json")
    assert answer.code in (0, 1), answer.err
    assert len(taken) == times


def test_the_caches_of_a_measurement_are_freed_at_once() -> None:
    """Not when Python looks for cycles: the run allocates its own, and the plan counts one of each."""
    target, draft = toy(5, 0), toy(5, 1)
    gc.collect()
    gc.disable()
    try:
        assert measured(target, draft, RUN, 3, 40) is not None
        assert target.caches.now == draft.caches.now == 0
    finally:
        gc.enable()


def test_measured_costs_are_of_a_draft_model() -> None:
    known = Costs(0.5, (1.0,) * 9)
    ngram = replace(RUN, speculation=replace(RUN.speculation, drafter=Drafting.ngram))
    lookahead = lookahead_for(ngram, 2, known)
    assert isinstance(lookahead, AdaptiveDraftLength)
    assert lookahead.costs == Costs.of_ratio(USUAL_COST_RATIO, 8)
