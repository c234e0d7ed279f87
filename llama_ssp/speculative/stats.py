"""Counters: drafted, accepted and committed tokens, each by position in the block.

A block is cut where its row ends (EOS, stop string, limit) before anything is counted: drafts behind the end
are `discarded`, tokens of the verified block behind it are `cut`, and neither is in another figure. A limit
is known beforehand, so it shortens a block instead of cutting it; those blocks are counted separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

Shape = tuple[int, int]  # of a round: its drafts, and siblings of each
SiblingPlace = tuple[int, int]  # of a sibling: its draft's position, and its own number


@dataclass(frozen=True)
class TreeResult:
    """What a row with siblings commits besides its drafts, and what was expected of its siblings.

    `gain[s]` is how many tokens more were expected of the first s + 1 siblings of each draft. `missed` is how
    likely a draft failed: only then siblings can bring something. `columns` of the target's pass
    predict the tokens.
    """

    accepted: int
    aside: int | None
    siblings: list[list[int]] = field(default_factory=list)
    gain: list[float] = field(default_factory=list)
    missed: float = 0.0
    columns: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RowStep:
    """What one row got in one round, cut where the row ended.

    `drafted` are the drafts before the row's end, `discarded` the number behind it, and `cut` the number of
    tokens of the verified block behind it. `withheld` drafts were not made, for want of room. `overlap`,
    `standing` and `tree` are those of `RoundResult`. `aside`: behind the accepted drafts is a sibling.
    """

    row: int
    tokens: list[int]
    drafted: list[int]
    accepted: int
    overlap: list[float]
    discarded: int
    finish: str | None
    cut: int = 0
    withheld: int = 0
    standing: list[tuple[float, float]] = field(default_factory=list)
    aside: bool = False
    tree: TreeResult | None = None

    @property
    def shape(self) -> Shape:
        each = len(self.tree.siblings[0]) if self.tree and self.tree.siblings else 0
        return len(self.drafted) + self.discarded, each

    def origin(self, position: int) -> str:
        """Where the token at this position of the block came from."""
        if position < self.accepted:
            return "drafted"
        if self.aside:
            return "sibling" if position == self.accepted else "bonus"
        if not self.drafted:
            return "sampled"
        return "bonus" if self.accepted == len(self.drafted) else "corrected"


@dataclass
class Counts:
    """The counters of a run, and its seconds; `add` takes a row's step."""

    row_rounds: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    committed: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)
    siblings: Counter[SiblingPlace] = field(default_factory=Counter)  # siblings, and below those that stood
    siblings_accepted: Counter[SiblingPlace] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    cut_by: Counter[str] = field(default_factory=Counter)
    shortened: int = 0
    discarded: int = 0
    cut: int = 0
    expected: float = 0.0
    prefill_forwards: int = 0  # of the target
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return ratio(self.committed.total(), self.decode_s)

    @property
    def decided(self) -> int:
        """How many drafts were each accepted or rejected, not just behind a rejection."""
        return self.reached.total()

    def add(self, step: RowStep) -> None:
        self.row_rounds += 1
        self.drafted.update(range(len(step.drafted)))
        self.accepted.update(range(step.accepted))
        self.committed.update(range(len(step.tokens)))
        self.origins.update(step.origin(position) for position in range(len(step.tokens)))
        self.discarded += step.discarded
        self.cut += step.cut
        self.shortened += step.withheld > 0
        if step.drafted:
            self.accepted_lengths[step.accepted] += 1
        if step.tree and step.tree.siblings:
            self._add_siblings(step, step.tree)
        # Under the token rule, positions up to the first rejection were each decided by their own draw.
        reached = min(step.accepted + 1, len(step.drafted))
        self.reached.update(range(reached))
        self.expected += sum(step.overlap[:reached])
        if step.finish:
            self.finished[step.finish] += 1
            self.cut_by[step.finish] += step.discarded > 0 or step.cut > 0

    def _add_siblings(self, step: RowStep, tree: TreeResult) -> None:
        for i, own in enumerate(tree.siblings[: len(step.drafted)]):
            self.siblings.update((i, j) for j in range(len(own)))
        if step.aside and tree.aside is not None:
            self.siblings_accepted[step.accepted, tree.siblings[step.accepted].index(tree.aside)] += 1

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
        """The counters under the names of the JSON interface."""
        drafted, accepted = self.drafted.total(), self.accepted.total()
        committed = self.committed.total()
        return {
            "row_rounds": self.row_rounds,
            "tokens_drafted": drafted,
            "tokens_accepted": accepted,
            "tokens_committed": committed,
            "tokens_committed_by_origin": dict(sorted(self.origins.items())),
            "tokens_discarded_after_end": self.discarded,
            "tokens_cut_after_end": self.cut,
            "blocks_cut_by": {reason: count for reason, count in sorted(self.cut_by.items()) if count},
            "blocks_shortened_by_limit": self.shortened,
            "blocks_by_accepted": by_position(self.accepted_lengths),
            "drafted_by_position": by_position(self.drafted),
            "accepted_by_position": by_position(self.accepted),
            "committed_by_position": by_position(self.committed),
            "acceptance_by_position": _rates(self.accepted, self.drafted),
            "acceptance_by_position_decided": _rates(self.accepted, self.reached),
            "siblings_drafted_by_position": by_place(self.siblings, self.siblings),
            "siblings_accepted_by_position": by_place(self.siblings_accepted, self.siblings),
            "acceptance_rate": ratio(accepted, drafted),
            "tokens_decided": self.decided,
            "acceptance_rate_decided": ratio(accepted, self.decided),
            "acceptance_expected": ratio(self.expected, self.decided),
            "accepted_over_expected": ratio(accepted, self.expected),
            "tokens_per_target_forward": ratio(committed, self.row_rounds),
            "finish_reasons": dict(sorted(self.finished.items())),
        }

    def figures(self) -> dict[str, Any]:
        """Counters and clocks under the names of the JSON interface."""
        decode_ms = 1000 * self.decode_s
        return {
            **self.summary(),
            "prefill_ms": 1000 * self.prefill_s,
            "decode_ms": decode_ms,
            "ms_per_token": ratio(decode_ms, self.committed.total()),
        }


def expected_tokens(chances: list[list[float]], weights: list[list[float]], last: float, each: int) -> float:
    """How many drafts and siblings a row commits on average, of the first `each` siblings of each draft.

    By draft: the chance of each sibling's draw, and the chance that the text before it stands after it and
    its first siblings have failed; `last` is the chance of the last draft's draw.
    """
    drafts = len(chances)
    mean, open_ = last * drafts, 1 - last
    for i in reversed(range(drafts)):
        for chance in chances[i][:each]:
            mean, open_ = mean + open_ * chance * (i + 1), open_ * (1 - chance)
        mean, open_ = mean + open_ * weights[i][each] * i, open_ * (1 - weights[i][each])
    return mean


def by_position(counter: Counter[int]) -> list[int]:
    return [counter[i] for i in range(max(counter, default=-1) + 1)]


def by_place(counter: Counter[SiblingPlace], drawn: Counter[SiblingPlace]) -> list[list[int]]:
    """A list for each draft's position, with an entry for each sibling that was drawn there."""
    positions = range(max((i for i, _ in drawn), default=-1) + 1)
    return [
        [counter[i, j] for j in range(1 + max((j for at, j in drawn if at == i), default=-1))]
        for i in positions
    ]


def _rates(part: Counter[int], whole: Counter[int]) -> list[float]:
    return [part[i] / whole[i] for i in range(max(whole, default=-1) + 1)]


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to divide by: a rate of nothing is not 0."""
    return part / whole if whole else None
