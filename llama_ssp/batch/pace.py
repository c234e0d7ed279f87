"""How fast a batch job advances, from its journal alone: tokens, rates, time left. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.batch.journal import Journal, Standing
from llama_ssp.batch.responses import output_tokens

RECENT_S = 600.0  # rates are those of the last minutes


@dataclass(frozen=True)
class Pace:
    """Of all groups together; None where nothing was finished lately. The names are the JSON interface's."""

    tokens_committed: int
    tokens_per_s: float | None
    records_per_s: float | None
    eta_s: float | None


def pace(journal: Journal, standing: Standing, now: float) -> Pace:
    """The job's pace at the time `now`, by the clocks of the nodes: they may differ by seconds."""
    tokens: dict[int, int] = {}
    recent: dict[int, int] = {}
    since = now
    for attempt in journal.past_attempts():
        fresh = [index for index, at in attempt.times.items() if at >= now - RECENT_S]
        counts = {index: output_tokens(record) for index, record in attempt.finished.items()}
        tokens |= counts
        recent |= {index: counts[index] for index in fresh}
        if fresh and attempt.began_at is not None:
            since = min(since, attempt.began_at)
    seconds = min(now - since, RECENT_S)
    if not recent or seconds <= 0:
        return Pace(sum(tokens.values()), None, None, None)
    rate, left = len(recent) / seconds, standing.records - standing.records_finished
    return Pace(sum(tokens.values()), sum(recent.values()) / seconds, rate, left / rate)
