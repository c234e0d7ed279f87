"""What the leader and a draft on ranks of its own did in a few rounds, on one clock: as bars, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from llama_ssp.engine.apart import Exchange

ROUNDS, WIDTH = 6, 96
NAMES = {True: "target", False: "draft"}


class Work(Enum):
    """What a bar stands for, in words, and its letter."""

    verifies = "verifies", "█"
    waits = "waits for drafts", "░"
    ahead = "drafts ahead", "▒"
    asked = "drafts when asked", "▓"

    @property
    def words(self) -> str:
        return self.value[0]

    @property
    def letter(self) -> str:
        return self.value[1]

    @property
    def is_targets(self) -> bool:
        return self in (Work.verifies, Work.waits)


@dataclass(frozen=True)
class Bar:
    """One thing that one side did, in microseconds."""

    work: Work
    began: int
    ended: int


def bars(history: Sequence[Exchange], rounds: int = ROUNDS) -> list[Bar]:
    """Of the latest whole rounds, from one ask to the next; passes before them are cut off, or left out.

    Without the draft's where its clock is another machine's.
    """
    shown, found = list(history)[-rounds - 1 :], []
    if len(shown) < 2:
        return []
    start, end = shown[0].asked_us, shown[-1].asked_us
    for one, after in pairwise(shown):
        found += [
            Bar(Work.waits, one.asked_us, one.replied_us),
            Bar(Work.verifies, one.replied_us, after.asked_us),
        ]
    for before, one in zip([None, *shown], shown, strict=False):
        strange = before is not None and any(
            span.began_us < before.asked_us or span.ended_us > one.replied_us for span in one.spans
        )
        if strange:
            return [bar for bar in found if bar.work.is_targets]
        for span in one.spans:
            if span.ended_us > start and span.began_us < end:
                work = Work.ahead if span.is_ahead else Work.asked
                found.append(Bar(work, max(span.began_us, start), min(span.ended_us, end)))
    return found


def lines(history: Sequence[Exchange], rounds: int = ROUNDS, width: int = WIDTH) -> list[str]:
    """The bars as text: a letter is so much time, and stands for what was done in the middle of it."""
    found = bars(history, rounds)
    if not found:
        return []
    start, end = min(bar.began for bar in found), max(bar.ended for bar in found)
    step = (end - start) / width
    drawn = []
    for is_targets, name in NAMES.items():
        own = [bar for bar in found if bar.work.is_targets is is_targets]
        if own:
            middles = [start + (cell + 0.5) * step for cell in range(width)]
            drawn.append(f"{name:<7}" + "".join(_letter(own, middle) for middle in middles).rstrip())
    legend = ", ".join(f"{work.letter} {work.words}" for work in Work if any(b.work is work for b in found))
    count = sum(bar.work is Work.verifies for bar in found)
    return [*drawn, f"{count} rounds in {(end - start) / 1000:.1f} ms: {legend}"]


def _letter(own: list[Bar], at: float) -> str:
    return next((bar.work.letter for bar in own if bar.began <= at < bar.ended), " ")
