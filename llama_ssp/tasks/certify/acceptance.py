"""What many rounds say together: are drafts drawn from their declared distributions, and as many kept as
expected?"""

from __future__ import annotations

from typing import Any

import numpy as np

from llama_ssp.report.statistics import sum_band, uniform_band
from llama_ssp.speculative.stats import ratio
from llama_ssp.speculative.verification import BlockRule, CoupledRule, TokenRule
from llama_ssp.tasks.certify.recorder import Witness
from llama_ssp.tasks.certify.verdict import Check, Outcome

EXPECTED = {
    TokenRule.name: "sum of min(target, draft)",
    BlockRule.name: "sum of min(carried target, draft)",
    CoupledRule.name: "chance that both win the same race",
}


def check_drafts(witness: Witness, level: float) -> Check:
    """Whether the drafts are drawn from the distributions they are declared to be drawn from.

    A draft's place in its distribution, likeliest tokens first, is uniform then, whatever the distribution:
    so all drafts of a run can be held against one distribution. A distribution declared too broad leaves its
    tail empty.
    """
    drafted, placed = witness.drafted, len(witness.places)
    figures: dict[str, Any] = {
        "tokens_drafted": drafted,
        "tokens_impossible": witness.impossible,
        "tokens_placed": placed,
    }
    if not drafted:
        return Check("drafts", Outcome.blind, "nothing was drafted", figures)
    if witness.impossible:
        says = (
            f"{witness.impossible} of {drafted} drafts have no chance in the distributions declared for them"
        )
        return Check("drafts", Outcome.failed, says, figures)
    if not placed:
        says = f"all {drafted} drafts are the tokens that their distributions are certain of"
        return Check("drafts", Outcome.passed, says, figures)
    place, rank = np.sort(np.asarray(witness.places)), np.arange(placed)
    distance = float(max(np.max((rank + 1) / placed - place), np.max(place - rank / placed)))
    band = uniform_band(placed, level)
    figures |= {"largest_distance": distance, "largest_distance_by_chance": band}
    if distance > band:
        astray = f"{distance:.1%} of {placed} lie elsewhere"
        says = f"the drafts are not drawn from their declared distributions: {astray}"
        return Check("drafts", Outcome.failed, f"{says}, by chance {band:.1%} would at most", figures)
    says = f"{placed} drafts lie in their declared distributions as draws do, within {distance:.1%}"
    return Check("drafts", Outcome.passed, f"{says}; {band:.1%} drawn otherwise would show", figures)


def check_acceptance(witness: Witness, level: float) -> Check:
    """Accepted drafts over what the distributions let expect, position by position."""
    positions = range(len(witness.tried))
    expected, stood = witness.expected, witness.stood
    bands = [sum_band(witness.spread[at], level / len(positions)) for at in positions]
    off = [at for at in positions if abs(stood[at] - expected[at]) > bands[at]]
    intervals = [ratio(bands[at], expected[at]) for at in positions]
    whole = ratio(sum(stood), sum(expected))
    figures: dict[str, Any] = {
        "expectation": EXPECTED[witness.rule],
        "accepted_over_expected": whole,
        "decided_by_position": list(witness.tried),
        "accepted_by_position": list(stood),
        "expected_by_position": list(expected),
        "accepted_over_expected_by_position": [ratio(stood[at], expected[at]) for at in positions],
        "half_interval_by_position": intervals,
    }
    if not sum(witness.tried):
        return Check("monitor", Outcome.blind, "nothing was drafted", figures)
    says = "accepted over expected is " + ("-" if whole is None else f"{whole:.3f}")
    if off:
        places = ", ".join(f"{at + 1} ({stood[at]} for {expected[at]:.1f})" for at in off)
        return Check("monitor", Outcome.failed, f"{says}: not by chance at position {places}", figures)
    first = intervals[0]
    reach = (
        "" if first is None else f"; {1 - first:.2f} .. {1 + first:.2f} is by chance at the first position"
    )
    return Check("monitor", Outcome.passed, says + reach, figures)
