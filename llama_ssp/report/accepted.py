"""What was accepted of a drafter's drafts, in one form: of replays and of runs. placing/accepted.py reads it.

No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from llama_ssp.config import RunConf
from llama_ssp.report.statistics import Estimate, ratio_of_sums
from llama_ssp.speculative.replay import ExpectedRounds
from llama_ssp.speculative.stats import Counts, by_position

REPLAY = "replay"
RUN = "run"


def of_replay(drafter: str, rule: str, by_k: Mapping[int, Sequence[ExpectedRounds]]) -> dict[str, Any]:
    """Returns what rounds would do to texts, for K = 1, 2, ...; intervals, of 95 %, are over texts."""
    curve = []
    for k, texts in by_k.items():
        tokens = [float(text.tokens) for text in texts]
        estimate = ratio_of_sums(over=[tokens], under=[[float(text.rounds) for text in texts]])
        positions = [_at(place, texts) for place in range(k)]
        curve.append(
            {
                "k": k,
                **estimate.figures("tokens_per_round"),
                "acceptance_by_position": _each(positions, "acceptance"),
                "acceptance_by_position_low": _each(positions, "acceptance_low"),
                "acceptance_by_position_high": _each(positions, "acceptance_high"),
            }
        )
    return {"drafter": drafter, "rule": rule, "from": REPLAY, "curve": curve}


def _at(place: int, texts: Sequence[ExpectedRounds]) -> Estimate:
    """Returns the share of drafts at a position that are kept."""
    accepted = [float(text.accepted[place]) for text in texts]
    drafted = [float(text.drafted[place]) for text in texts]
    if sum(drafted) and not sum(accepted):
        return Estimate(0.0, low=0.0, high=inf)  # of a logarithm nothing could be said
    return ratio_of_sums(over=[accepted], under=[drafted])


def _each(positions: Sequence[Estimate], name: str) -> list[float | None]:
    return [position.figures("acceptance")[name] for position in positions]


def of_run(run: RunConf, counts: Counts) -> list[dict[str, Any]]:
    """Returns what a run has accepted, in the form of a replay; [] of one that drafted nothing.

    A run keeps sums alone, so there are no intervals. A round of k drafts commits one token and those of its
    drafts that stand, which are as likely at each position as in the run's rounds.
    """
    drafted = by_position(counts.drafted)
    if run.drafter_name is None or not drafted:
        return []

    curve = []
    tokens = 1.0
    rates = [counts.accepted[place] / number for place, number in enumerate(drafted)]
    for k, rate in enumerate(rates, start=1):
        tokens += rate
        curve.append(
            {
                "k": k,
                **dict.fromkeys(("tokens_per_round_low", "tokens_per_round_high")),
                "tokens_per_round": tokens,
                "acceptance_by_position": rates[:k],
            }
        )
    rule = run.speculation.verification.value
    return [
        {
            "drafter": run.drafter_name,
            "rule": rule,
            "from": RUN,
            "texts": counts.finished.total(),
            "tokens": counts.committed,
            "sampling": asdict(run.sampling.controls),
            "draft_top": run.speculation.draft_top,
            "curve": curve,
        }
    ]
