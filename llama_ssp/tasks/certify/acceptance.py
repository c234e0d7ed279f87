"""All rounds together: are drafts drawn from their declared distributions, and as many kept as expected?"""

from __future__ import annotations

from typing import Any

from llama_ssp.report.statistics import sum_band, uniform_band, uniform_distance
from llama_ssp.speculative.stats import ratio
from llama_ssp.tasks.certify.recorder import Witness
from llama_ssp.tasks.certify.verdict import Check, Outcome, judged


def check_drafts(witness: Witness, level: float) -> Check:
    """Whether the drafts are drawn from the distributions that are declared for them.

    Then a draft's place in its distribution, likeliest tokens first, is uniform, whatever the distribution.
    So all drafts of a run are compared with one distribution. One that is declared too broad leaves its tail
    empty.
    """
    drafted, placed = witness.drafted, len(witness.places)
    figures: dict[str, Any] = {
        "tokens_drafted": drafted,
        "tokens_impossible": witness.impossible,
        "tokens_placed": placed,
    }
    if not drafted:
        return Check("drafts", Outcome.blind, "nothing was drafted", figures)
    impossible = (
        f"{witness.impossible} of {drafted} drafts have probability 0 in their declared distributions"
    )
    if not placed:
        right = f"all {drafted} drafts are the tokens that their distributions are certain of"
        return judged("drafts", [(witness.impossible, impossible)], right, figures)
    distance, band = uniform_distance(witness.places), uniform_band(placed, level)
    figures |= {"largest_distance": distance, "largest_distance_by_chance": band}
    elsewhere = "the drafts are not drawn from their declared distributions: "
    elsewhere += f"{distance:.1%} of {placed} lie elsewhere, by chance at most {band:.1%} would"
    right = f"{placed} drafts are drawn from their declared distributions, within {distance:.1%}"
    right += f"; {band:.1%} drawn otherwise would show"
    return judged("drafts", [(witness.impossible, impossible), (distance > band, elsewhere)], right, figures)


def check_acceptance(witness: Witness, level: float) -> Check:
    """Accepted drafts over what the distributions let expect, position by position."""
    positions = range(len(witness.tried))
    expected, stood = witness.expected, witness.stood
    bands = [sum_band(witness.spread[at], level / len(positions)) for at in positions]
    off = [at for at in positions if abs(stood[at] - expected[at]) > bands[at]]
    intervals = [ratio(bands[at], expected[at]) for at in positions]
    whole = ratio(sum(stood), sum(expected))
    figures: dict[str, Any] = {
        "expectation": witness.rule.expectation,
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
    places = ", ".join(f"{at + 1} ({stood[at]} for {expected[at]:.1f})" for at in off)
    right = says
    if (first := intervals[0]) is not None:
        right += f"; {1 - first:.2f} .. {1 + first:.2f} is by chance at the first position"
    return judged("monitor", [(off, f"{says}: not by chance at position {places}")], right, figures)
