"""What adaptive drafting goes by: measured where it can be, given where it is, and guessed otherwise."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import pytest

from llama_ssp.config import USUAL_COST_RATIO, ModelConf, RunConf, SpeculationConfig
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, FixedDraftLength
from llama_ssp.speculative.measure_costs import Rounds, engine_of, measured, rising
from tests.toy import toy

RUN = RunConf(model=ModelConf(name="m"), speculation=SpeculationConfig(adaptive=True, k_max=8))


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
    known = Costs(0.5, (1.0, 1.0, 1.0))

    def by(run: RunConf, costs: Costs | None) -> Costs:
        lookahead = lookahead_for(run, 2, costs)
        assert isinstance(lookahead, AdaptiveDraftLength)
        return lookahead.costs

    pinned = replace(RUN, speculation=replace(RUN.speculation, cost_ratio=0.25))
    assert by(RUN, known) == known
    assert by(pinned, None) == Costs.of_ratio(0.25, 8)
    assert by(RUN, None) == Costs.of_ratio(USUAL_COST_RATIO, 8)
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
