"""How the cost of a token grows with context, rows, K and vocabulary, each alone, for each engine.

    python bench/growth.py [engines=eager,compiled] [repeats=7] [threads=2] [write=FILE.md]
                           [context=128,256,...] [rows=1,2,...] [K=0,1,...] [vocabulary=8192,...]

A small synthetic pair runs rounds at every point in turn. It drafts and decides as always, and discards the
tokens, so that a point's context stays the same. Figures are medians of a round. A token's time is the
round's over the tokens that a round gives if each draft is accepted with probability 0.8. Between two points
the table has the exponent of the growth: 1 is growth in proportion, 0 none; what grows faster than in
proportion is marked. With write= the same figures are written as JSON and a plot.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import opened, wait  # noqa: E402
from pictures import caption, plot_growth, write_json  # noqa: E402
from surroundings import surroundings, write  # noqa: E402

from bench.words import changed  # noqa: E402
from llama_ssp.config import Drafting, Dtype, RunConf, Steps  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.draft_length import tokens_per_round  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.tasks.microbench import shape  # noqa: E402

log = logging.getLogger("bench")
ACCEPTANCE = 0.8
CONTEXT, ROWS, K, VOCABULARY = "context", "rows", "K", "vocabulary"
BASE = {CONTEXT: 256, ROWS: 1, K: 4, VOCABULARY: 8192}
Points = dict[str, tuple[int, ...]]
POINTS: Points = {
    CONTEXT: (128, 256, 512, 1024, 2048, 4096),
    ROWS: (1, 2, 4, 8, 16),
    K: (0, 1, 2, 4, 8, 16),
    VOCABULARY: (8192, 16384, 32768, 65536, 131072),
}
SURPRISE = 1.15  # a larger exponent is not rounding


@dataclass(frozen=True)
class Point:
    """Where a round is measured."""

    context: int
    rows: int
    k: int
    vocabulary: int

    @staticmethod
    def of(quantity: str, value: int) -> Point:
        """The base, with another value for one quantity."""
        at = {**BASE, quantity: value}
        return Point(at[CONTEXT], at[ROWS], at[K], at[VOCABULARY])

    def ms_per_token(self, round_ms: float) -> float:
        return round_ms / (self.rows * tokens_per_round(ACCEPTANCE, self.k))


def pair_of(vocabulary: int, engine: Steps, slots: int) -> PairSession:
    """A pair of 256 x 4 and 128 x 2, with this vocabulary."""
    models = (
        replace(shape(*size, vocabulary), context=4608, dtype=Dtype.bf16) for size in ((4, 256), (2, 128))
    )
    target, draft = models
    return opened(RunConf(model=target, draft=draft, engine=engine), slots)


def round_of(pair: PairSession, point: Point) -> Callable[[], object]:
    """A round at this point, which leaves everything as it was."""
    drafting = Drafting.model if point.k else Drafting.none
    run = replace(pair.run, speculation=replace(pair.run.speculation, k=point.k, drafter=drafting))
    engine = pair.engine(0, run, frozenset())
    text = tuple(4 + i % 1000 for i in range(point.context))
    state: Any = engine.prefill([Prompt(str(row), text) for row in range(point.rows)], 2 * point.k + 2)

    def play() -> None:
        engine.verify(state, engine.draft(state, [point.k] * point.rows))
        engine.roll_back(state)

    return play


def measured(engine: Steps, points_of: Points, repeats: int) -> dict[Point, float]:
    """Milliseconds of a round at each point, in the median, all points of a vocabulary in turn."""
    points = list(
        dict.fromkeys(Point.of(name, value) for name, values in points_of.items() for value in values)
    )
    slots = max(point.context + 2 * point.k for point in points) + 2
    found = {}
    for vocabulary in sorted({point.vocabulary for point in points}):
        pair = pair_of(vocabulary, engine, slots)
        works = {point: round_of(pair, point) for point in points if point.vocabulary == vocabulary}
        taken: dict[Point, list[float]] = {point: [] for point in works}
        for repeat in range(repeats + 2):  # the first ones compile
            for point, work in works.items():
                wait()
                began = time.perf_counter()
                work()
                wait()
                if repeat >= 2:
                    taken[point].append(1000 * (time.perf_counter() - began))
        found.update({point: median(times) for point, times in taken.items()})
        log.info("%s: vocabulary %d measured", engine.value, vocabulary)
        del pair, works
        gc.collect()
    return found


def exponents(points: list[tuple[int, float]]) -> list[float | None]:
    """The exponent of the growth to each point from the one before it."""
    found: list[float | None] = [None]
    for (x, low), (y, high) in pairwise(points):
        found.append(math.log(high / low) / math.log(y / x) if x else None)
    return found


def lines_of(quantity: str, values: tuple[int, ...], rounds: dict[str, list[float]]) -> list[list[str]]:
    """A table: for each engine a round's time, its growth, and a token's time."""
    table = [[quantity]]
    for engine in rounds:
        table[0] += [f"{engine}: round, ms", "growth", "ms/token"]
    for index, value in enumerate(values):
        line = [str(value)]
        for times in rounds.values():
            growth = exponents(list(zip(values, times, strict=True)))[index]
            mark = "!" if growth is not None and growth > SURPRISE else ""
            per_token = Point.of(quantity, value).ms_per_token(times[index])
            line += [
                f"{times[index]:.2f}",
                "" if growth is None else f"{mark}{growth:.2f}",
                f"{per_token:.3f}",
            ]
        table.append(line)
    return table


def main() -> None:
    own = {"engines": "eager,compiled", "repeats": "7", "threads": "2", "write": ""}
    own.update({quantity: ",".join(map(str, values)) for quantity, values in POINTS.items()})
    own = changed(own, sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(int(own["threads"]))
    points = {quantity: tuple(int(value) for value in own[quantity].split(",")) for quantity in POINTS}
    engines = [Steps(name) for name in own["engines"].split(",")]
    began = time.perf_counter()
    found = {engine.value: measured(engine, points, int(own["repeats"])) for engine in engines}
    spent = time.perf_counter() - began
    of = {
        quantity: {
            engine: [rounds[Point.of(quantity, value)] for value in values]
            for engine, rounds in found.items()
        }
        for quantity, values in points.items()
    }
    text = [
        "# How the cost of a token grows", "",
        *surroundings({"model": f"cpu, {own['threads']} threads, bf16"}),
        f"A pair of 256 x 4 and 128 x 2, {own['repeats']} turns, {spent:.0f} s. Where nothing else is said: "
        + ", ".join(f"{name} {value}" for name, value in BASE.items())
        + f". ms/token: of the batch, where drafts are accepted with probability {ACCEPTANCE}.",
        "`growth`: the exponent since the line before, 1 in proportion; `!` where it is more.", "",
    ]  # fmt: skip
    for quantity, rounds in of.items():
        text += ["```", *aligned(lines_of(quantity, points[quantity], rounds), 0), "```", ""]
    print("\n".join(text))
    per_token = {
        quantity: {
            engine: [
                (value, Point.of(quantity, value).ms_per_token(ms))
                for value, ms in zip(points[quantity], times, strict=True)
            ]
            for engine, times in rounds.items()
        }
        for quantity, rounds in of.items()
    }
    summary = {"round_ms": of, "ms_per_token": per_token, "points": points, "versions": versions()}
    print(json.dumps(summary))
    if own["write"]:
        write(own["write"], "\n".join(text))
        write_json(own["write"], summary)
        title = caption("256 x 4 with 128 x 2, bf16: ms a token", int(own["repeats"]))
        plot_growth(own["write"], per_token, title)


if __name__ == "__main__":
    main()
