"""What adaptive drafting goes by: measured where it can be, given where it is, and guessed otherwise."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from llama_ssp.config import USUAL_COST_RATIO, ModelConf, RunConf, SpeculationConfig
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, FixedDraftLength
from llama_ssp.speculative.measure_costs import measured
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
