"""What only many runs together can show, and the report."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.surroundings import surroundings
from llama_ssp.report.tables import aligned
from tests.soak.processes import Held
from tests.soak.scenarios import NOTHING, Scenario
from tests.soak.trials import Trial

ROOT = Path(__file__).resolve().parents[2]
MOST_Z = 4.5  # a right sampler is beyond this once in 150,000 soaks
MIB = 2**20
MOST_GROWTH, MOST_HANDLES = 8 * MIB, 3
ONE_DRAW_EACH = ("K = 1", "K = 7, token")  # each draft is decided on by a draw of its own


@dataclass
class Law:
    """Drafts decided on, how many of them stood, and how many of them should have."""

    decided: int = 0
    accepted: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, scenario: Scenario, summary: dict[str, Any]) -> None:
        decided = summary.get("tokens_decided")
        if scenario.drafting not in ONE_DRAW_EACH or not decided:
            return
        accepted, mean = summary["tokens_accepted"], summary["acceptance_expected"]
        self.decided += decided
        self.accepted += accepted
        self.expected += decided * mean
        self.variance += decided * mean * (1 - mean)  # at least what it is: their chances differ

    @property
    def z(self) -> float:
        return (self.accepted - self.expected) / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def wrong(self) -> list[str]:
        return [f"acceptance is {self.z:+.1f} standard deviations off"] if abs(self.z) > MOST_Z else []


def growth(held: list[Held]) -> tuple[int, int]:
    """How much more memory and how many more handles the last quarter has than the one before it."""
    quarter = len(held) // 4
    if quarter < 4:
        raise ValueError(f"too short to tell: looked at {len(held)} times")
    before, last = held[-2 * quarter : -quarter], held[-quarter:]
    memory = statistics.median(one.resident for one in last) - statistics.median(
        one.resident for one in before
    )
    # The fewest: files that are open for a moment are no growth.
    return int(memory), min(one.handles for one in last) - min(one.handles for one in before)


def growing(held: list[Held]) -> list[str]:
    memory, handles = growth(held)
    wrong = [f"memory grew by {memory / MIB:.1f} MiB after warm-up"] if memory > MOST_GROWTH else []
    return wrong + ([f"{handles} more handles after warm-up"] if handles > MOST_HANDLES else [])


@dataclass
class Soak:
    """All trials so far."""

    seed: int
    trials: list[Trial] = field(default_factory=list)
    held: list[tuple[int, int, int]] = field(default_factory=list)  # records, more bytes, more handles
    wrong: list[str] = field(default_factory=list)
    probs: Law = field(default_factory=Law)
    began: float = field(default_factory=time.monotonic)

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.wrong += [f"{trial.scenario}: {what}" for what in trial.wrong]
        for summary in trial.summaries:
            self.probs.add(trial.scenario, summary)

    def add_held(self, records: int, held: list[Held]) -> None:
        self.held.append((records, *growth(held)))
        self.wrong += growing(held)

    @property
    def found(self) -> list[str]:
        return self.wrong + self.probs.wrong

    def report(self) -> str:
        """A complete results file."""
        probs = self.probs
        runs, struck = sum(trial.runs for trial in self.trials), sum(trial.struck for trial in self.trials)
        ties = [trial.scenario for trial in self.trials if trial.tied]
        return "\n".join(
            [
                "# Endurance: random runs, struck at random",
                "",
                *surroundings({}),
                "",
                f"Seed {self.seed}. {self.minutes:.0f} minutes: {len(self.trials)} scenarios, "
                f"{runs} runs of the command, {struck} of them struck. "
                f"{len(self.found) or 'Nothing'} found wrong.",
                "",
                f"Law: {probs.accepted:,} of {probs.decided:,} drafts decided on stood, "
                f"{probs.expected:,.0f} expected: {probs.z:+.2f} standard deviations.",
                *[
                    f"A job of {records} records in one process: {memory / MIB:+.1f} MiB and "
                    f"{handles:+d} handles between its third quarter and its last."
                    for records, memory, handles in self.held
                ],
                *[f"Answers differ by a tie of rounding, by none in fp64: {scenario}." for scenario in ties],
                "",
                "```",
                *aligned([["of", "", "scenarios", "wrong"], *self._counts()], words=2),
                "```",
                *(["", "Wrong:", "", *[f"* {what}" for what in self.found]] if self.found else []),
                "",
            ]
        )

    def _counts(self) -> list[list[str]]:
        rows: list[list[str]] = []
        for what in ("task", "pair", "ranks", "placement", "sampling", "drafting", "fault"):
            seen = Counter(str(getattr(trial.scenario, what)) for trial in self.trials)
            bad = Counter(str(getattr(trial.scenario, what)) for trial in self.trials if trial.wrong)
            rows += [[what, name, str(count), str(bad[name])] for name, count in sorted(seen.items())]
        return rows


def calm(seed: int) -> Scenario:
    """The long job whose memory is watched."""
    return Scenario("batch", "demo", 1, "auto", "T = 1", "K = 4", 4, NOTHING, 0.0, seed)
