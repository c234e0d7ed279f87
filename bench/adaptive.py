"""Adaptive K against every fixed K, at agreements from hardly any to nearly all: one interleaved run each.

    python bench/adaptive.py [agreements=0.05,0.3,0.6,0.8,0.95] [ks=1,2,3,4,6,8,12,16] [new=192] [repeats=5]
                             [threads=2] [write=FILE.md]

The pair is that of bench/fast.py, another one for each agreement. Costs are measured as a run measures them,
when the pair is ready. In each repeat every contender gets one turn on every prompt; adaptive K begins each
with the acceptance that it has seen in the turns before. Required: adaptive K within 3 % of the best fixed K,
which may be 0; at agreement 0.05 at least 0.97 times as fast as regular sampling.

A thousand tokens are too few to remove luck: the random draws of two contenders differ by 3 % and more, and
the best of many contenders has the most luck. So each figure is given twice: by the clock; and evened, with
every round at the median time of all rounds of its K (rounds in which the draft catches up are separate), and
with the tokens that its drafts bring on average over the draws of acceptance (`standing`). The exit code is 1
if a figure by the clock misses.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import PROMPTS, by_us, opened, sizes  # noqa: E402
from fast import Taken, faster  # noqa: E402
from surroundings import report  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import Dtype, RunConf, Steps  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.stats import Counts, RowStep  # noqa: E402

log = logging.getLogger("bench")
NEAR, NEVER_SLOWER, HARDLY = 1 / 1.03, 0.97, 0.05
CLOCK, EVENED = "by the clock", "evened"
Kind = tuple[int, bool]  # of a round: its K, and whether the draft has to catch up


@dataclass
class Asked(Words):
    """The command line."""

    agreements: str = "0.05,0.3,0.6,0.8,0.95"
    ks: str = "1,2,3,4,6,8,12,16"
    new: int = 192
    repeats: int = 5
    threads: int = 2
    small: bool = False
    write: str = ""


@dataclass
class Turn:
    """A contender's turn on all prompts: its time by the clock, its rounds and their expected tokens."""

    ms: float
    rounds: list[tuple[Kind, float]]
    expected: float


@dataclass
class Way:
    """A contender: a fixed K, or null for adaptive. All its turns except the first."""

    k: int | None
    turns: list[Turn] = field(default_factory=list)

    def play(self, ready: Any, new: int, repeat: int) -> None:
        rounds: list[tuple[Kind, float]] = []
        expected = 0.0

        def seen(step: RowStep, spent: float) -> None:
            nonlocal expected
            resumes = bool(self.k is None and step.drafted and rounds and not rounds[-1][0][0])
            rounds.append(((len(step.drafted), resumes), 1000 * spent))
            expected += 1 + sum(standing for _, standing in step.standing)

        ms, _ = by_us(ready, new, repeat, self.k, seen)
        if repeat:
            self.turns.append(Turn(ms, rounds, expected))

    def taken(self, how: str, usual: dict[Kind, float]) -> Taken:
        """Milliseconds a token of each turn."""
        found = Taken(lambda _: (0.0, Counts()))
        for turn in self.turns:
            evened = sum(usual[kind] for kind, _ in turn.rounds) / turn.expected
            found.ms.append(turn.ms if how == CLOCK else evened)
        return found


def usual_ms(ways: Iterable[Way]) -> dict[Kind, float]:
    """The median over all rounds of a kind, of all contenders."""
    taken: dict[Kind, list[float]] = {}
    for way in ways:
        for turn in way.turns:
            for kind, ms in turn.rounds:
                taken.setdefault(kind, []).append(ms)
    return {kind: median(times) for kind, times in taken.items()}


def pair_of(agreement: float, small: bool, slots: int) -> PairSession:
    """The pair with this agreement, ready."""
    target, draft = (replace(model, dtype=Dtype.bf16) for model in sizes(agreement, small))
    run = RunConf(model=target, draft=draft, engine=Steps.compiled)
    return opened(replace(run, speculation=replace(run.speculation, adaptive=True)), slots)


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    fixed = [0, *(int(k) for k in asked.ks.split(","))]
    tables: dict[str, list[list[str]]] = {}
    missed: dict[str, list[str]] = {CLOCK: [], EVENED: []}
    for agreement in map(float, asked.agreements.split(",")):
        ready = pair_of(agreement, asked.small, max(map(len, PROMPTS)) + asked.new)
        assert ready.costs is not None
        ways = {str(k): Way(k) for k in fixed} | {"adaptive": Way(None)}
        for repeat in range(asked.repeats + 1):  # the first does not count
            for name, way in ways.items():
                way.play(ready, asked.new, repeat)
                log.info("agreement %s, repeat %d: K = %s", agreement, repeat, name)
        usual = usual_ms(ways.values())
        for how in missed:
            found = {name: way.taken(how, usual) for name, way in ways.items()}
            best = min((str(k) for k in fixed), key=lambda name: median(found[name].ms))
            near, regular = (faster(found["adaptive"], [found[name]]) for name in (best, "0"))
            if near[0] < NEAR or (agreement <= HARDLY and regular[0] < NEVER_SLOWER):
                missed[how].append(str(agreement))
            head = ["agreement", *(f"K = {k}" for k in fixed), "adaptive", "best K", "over best"]
            tables.setdefault(how, [[*head, "over regular"]]).append(
                [
                    str(agreement), *(f"{median(taken.ms):.2f}" for taken in found.values()), best,
                    *(f"{middle:.3f} ({least:.2f}..{most:.2f})" for middle, least, most in (near, regular)),
                ]
            )  # fmt: skip
    spent = ", ".join(f"K = {k} {1000 * ready.costs.rounds[k]:.2f}" for k in (0, 1, 4, 16))
    report(
        asked.write, "Adaptive K beside every fixed K, ms a token", ready.models.devices,
        f"Temperature 1, {asked.new} new tokens, {len(PROMPTS)} prompts, batch 1, {asked.threads} "
        f"threads, {asked.repeats} repeats. Rounds of the last pair, as measured: {spent} ms.",
        f"Asked: {NEAR:.3f} over best, and at {HARDLY} {NEVER_SLOWER} over regular. Missed "
        + ", ".join(f"{how}: {' '.join(where) or 'nowhere'}" for how, where in missed.items()) + ".",
        *(
            line
            for how, rows in tables.items()
            for line in ("", f"{how[0].upper()}{how[1:]}:", "", "```", *aligned(rows, 0), "```")
        ),
    )  # fmt: skip
    sys.exit(int(bool(missed[CLOCK])))


if __name__ == "__main__":
    main()
