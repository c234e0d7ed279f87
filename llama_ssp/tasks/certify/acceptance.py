"""All rounds together: are drafts drawn from their declared distributions, and as many kept as expected?"""

from __future__ import annotations

from typing import Any

from llama_ssp.report.statistics import sum_band, uniform_band, uniform_distance
from llama_ssp.speculative.stats import ratio
from llama_ssp.tasks.certify.recorder import PositionCounts, Witness
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
    drafts, siblings, most = witness.drafts, witness.siblings, max(witness.most, 1)
    level /= max(len(drafts.tried) + len(siblings.tried), 1)
    off = [f"{at + 1} ({says})" for at, says in _off(drafts, level)]
    off += [f"{at // most + 1}, sibling {at % most + 1} ({says})" for at, says in _off(siblings, level)]
    intervals = _bands_over_expected(drafts, level)
    whole = ratio(sum(drafts.stood), sum(drafts.expected))
    figures: dict[str, Any] = {
        "expectation": witness.rule.expectation,
        "accepted_over_expected": whole,
        "decided_by_position": list(drafts.tried),
        "accepted_by_position": list(drafts.stood),
        "expected_by_position": list(drafts.expected),
        "accepted_over_expected_by_position": _over_expected(drafts),
        "half_interval_by_position": intervals,
    }
    if witness.most:
        figures |= {
            "siblings_of_a_draft": witness.most,
            "siblings_decided": list(siblings.tried),
            "siblings_accepted": list(siblings.stood),
            "siblings_expected": list(siblings.expected),
            "siblings_accepted_over_expected": _over_expected(siblings),
            "siblings_half_interval": _bands_over_expected(siblings, level),
        }
    if not sum(drafts.tried):
        return Check("monitor", Outcome.blind, "nothing was drafted", figures)
    says = "accepted over expected is " + ("-" if whole is None else f"{whole:.3f}")
    if (of_siblings := ratio(sum(siblings.stood), sum(siblings.expected))) is not None:
        says += f", of siblings {of_siblings:.3f}"
    right = says
    if (first := intervals[0]) is not None:
        right += f"; {1 - first:.2f} .. {1 + first:.2f} is by chance at the first position"
    return judged("monitor", [(off, f"{says}: not by chance at position {', '.join(off)}")], right, figures)


def _off(tally: PositionCounts, level: float) -> list[tuple[int, str]]:
    """The positions where chance does not explain how many stood."""
    bands = [sum_band(spread, level) for spread in tally.spread]
    rows = enumerate(zip(tally.stood, tally.expected, bands, strict=True))
    return [(at, f"{stood} for {due:.1f}") for at, (stood, due, band) in rows if abs(stood - due) > band]


def _over_expected(tally: PositionCounts) -> list[float | None]:
    return [ratio(stood, due) for stood, due in zip(tally.stood, tally.expected, strict=True)]


def _bands_over_expected(tally: PositionCounts, level: float) -> list[float | None]:
    bands = [sum_band(spread, level) for spread in tally.spread]
    return [ratio(band, due) for band, due in zip(bands, tally.expected, strict=True)]
