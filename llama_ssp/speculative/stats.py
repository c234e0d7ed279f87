"""Counters: drafted, accepted and committed tokens, each by position in the block.

A block is cut where its row ends (EOS, stop string, limit) before anything is counted: drafts after the end
are `discarded`, tokens of the verified block after it are `cut`, and neither is in another figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RowStep:
    """Holds what one row got in one round, cut where the row ended.

    `drafted` are the drafts before the row's end, `discarded` the number after it, and `cut` the number of
    tokens of the verified block after it. `overlap` and `standing` are those of `Decision`.
    """

    row: int
    tokens: list[int]
    drafted: list[int]
    accepted: int
    overlap: list[float]
    discarded: int
    finish: str | None
    cut: int = 0
    standing: list[tuple[float, float]] = field(default_factory=list)

    @property
    def k(self) -> int:
        """Returns how many tokens the round drafted."""
        return len(self.drafted) + self.discarded

    def origin(self, position: int) -> str:
        """Returns where the token at this position of the block came from."""
        if position < self.accepted:
            return "drafted"
        if not self.drafted:
            return "sampled"
        return "bonus" if self.accepted == len(self.drafted) else "corrected"


@dataclass(kw_only=True)
class Counts:
    """Holds the counters of a run, and its seconds; `add` takes a row's step."""

    row_rounds: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    committed: int = 0
    decided: int = 0  # drafts that were each accepted or rejected, not just after a rejection
    discarded: int = 0
    cut: int = 0
    expected: float = 0.0
    prefill_forwards: int = 0  # of the target
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return ratio(self.committed, self.decode_s)

    def add(self, step: RowStep) -> None:
        """Counts a row's round."""
        self.row_rounds += 1
        self.drafted.update(range(len(step.drafted)))
        self.accepted.update(range(step.accepted))
        self.committed += len(step.tokens)
        self.origins.update(step.origin(position) for position in range(len(step.tokens)))
        self.discarded += step.discarded
        self.cut += step.cut
        if step.drafted:
            self.accepted_lengths[step.accepted] += 1

        # Under the token rule, positions up to the first rejection were each decided by their own draw.
        reached = min(step.accepted + 1, len(step.drafted))
        self.decided += reached
        self.expected += sum(step.overlap[:reached])

        if step.finish:
            self.finished[step.finish] += 1

    def merge(self, other: Counts) -> None:
        """Adds what another run has counted."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    @classmethod
    def sum(cls, parts: Iterable[Counts]) -> Counts:
        """Returns what several runs have counted together."""
        result = cls()
        for part in parts:
            result.merge(part)
        return result

    def summary(self) -> dict[str, Any]:
        """Returns the counters under the names of the JSON interface."""
        drafted = self.drafted.total()
        accepted = self.accepted.total()
        return {
            "row_rounds": self.row_rounds,
            "tokens_drafted": drafted,
            "tokens_accepted": accepted,
            "tokens_committed": self.committed,
            "tokens_committed_by_origin": dict(sorted(self.origins.items())),
            "tokens_discarded_after_end": self.discarded,
            "tokens_cut_after_end": self.cut,
            "blocks_by_accepted": by_position(self.accepted_lengths),
            "drafted_by_position": by_position(self.drafted),
            "accepted_by_position": by_position(self.accepted),
            "acceptance_by_position": [self.accepted[i] / n for i, n in enumerate(by_position(self.drafted))],
            "acceptance_rate": ratio(accepted, drafted),
            "acceptance_rate_decided": ratio(accepted, self.decided),
            "acceptance_expected": ratio(self.expected, self.decided),
            "accepted_over_expected": ratio(accepted, self.expected),
            "tokens_per_target_forward": ratio(self.committed, self.row_rounds),
            "finish_reasons": dict(sorted(self.finished.items())),
        }

    def figures(self) -> dict[str, Any]:
        """Returns counters and clocks under the names of the JSON interface."""
        decode_ms = 1000 * self.decode_s
        return {
            **self.summary(),
            "prefill_ms": 1000 * self.prefill_s,
            "decode_ms": decode_ms,
            "ms_per_token": ratio(decode_ms, self.committed),
        }


def by_position(counter: Counter[int]) -> list[int]:
    """Returns the counts of positions 0, 1, ..., up to the last that was counted."""
    return [counter[i] for i in range(max(counter, default=-1) + 1)]


def ratio(part: float, whole: float) -> float | None:
    """Returns part / whole; None where there is nothing to divide by, as a rate of nothing is not 0."""
    return part / whole if whole else None
