"""A draft that runs ahead against one that waits: one placement, turn by turn.

    python bench/overlap.py [repeats=5] [new=96] [agreements=0.8,0.9] [ratios=0.1,0.2,0.3] [layers=20]
                            [k=0] [write=FILE.md]

Two processes, each on a core of its own: the target on one, the draft on the other. The pair is synthetic
(llama_ssp/models/synthetic.py), both of one width. The number of the draft's layers makes a draft step cost
the requested share of a target step over K drafts; the share is measured and shown. K is the best without
drafting ahead (Leviathan et al.), or `k`.

In every repeat each mode gets one turn on every prompt. Ratios are computed within a repeat; the table has
their median, the least and the most, the rows with all drafts complete at the request, and the drafts that
were made ahead in vain. The prediction is that of the plan's model (llama_ssp/planner/speed.py), with the
measured acceptance and the mean times of a draft and of verification in the waiting turns of the same repeat.
The exit code is 1 if a requirement or a prediction is missed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import PROMPTS, alone, texts_run  # noqa: E402
from surroundings import report  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import DraftSeat, Dtype, ModelConf, Overlap, PlacementConf, RunConf, Steps  # noqa: E402
from llama_ssp.distributed.comm import Ranks  # noqa: E402
from llama_ssp.distributed.placement import resolve  # noqa: E402
from llama_ssp.models.loader import load  # noqa: E402
from llama_ssp.pair.assembly import ModelCache  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.placing.decision import as_asked  # noqa: E402
from llama_ssp.placing.pairs import PairSpec  # noqa: E402
from llama_ssp.planner.speed import BAND, RoundTimes  # noqa: E402
from llama_ssp.report.speed_stats import overlap_of  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.draft_length import Costs, FixedDraftLength  # noqa: E402
from llama_ssp.speculative.engine import Engine  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.speculative.stats import Counts  # noqa: E402
from llama_ssp.tasks.calibrate import shape  # noqa: E402
from tests.distributed.processes import on_ranks  # noqa: E402

VOCAB, WIDTH = 4096, 512
PATIENCE_S = 3600
BAR, FLOOR = 1.2, 0.97
TURNS = 20
MODES = (Overlap.off, Overlap.ahead)


@dataclass
class Asked(Words):
    """The command line."""

    repeats: int = 5
    new: int = 96
    agreements: str = "0.8,0.9"
    ratios: str = "0.1,0.2,0.3"
    layers: int = 20
    k: int = 0
    write: str = ""


@dataclass
class Found:
    """One pair's figures, on the leader."""

    agreement: float
    ratio: float
    k: int
    ms: dict[str, list[float]] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)  # of turns ahead that count
    waiting: list[tuple[float, float]] = field(default_factory=list)  # seconds of a draft and of verification
    counts: Counts = field(default_factory=Counts)

    def gains(self) -> list[float]:
        return [off / ahead for off, ahead in zip(self.ms["off"], self.ms["ahead"], strict=True)]

    def predicted(self, mode: Overlap) -> list[float]:
        """Milliseconds a token in each repeat, by the plan's model."""
        acceptance = self.counts.summary()["acceptance_rate_decided"]
        return [pace_of(times, self.k, mode).ms_per_token(acceptance, self.k) for times in self.waiting]

    def off_by(self, mode: Overlap) -> float:
        """The distance of the prediction from the measurement, in the median of the repeats."""
        pairs = zip(self.predicted(mode), self.ms[mode.value], strict=True)
        return median(predicted / measured - 1 for predicted, measured in pairs)

    def summed(self) -> dict[str, Any]:
        """The figures of drafting ahead, over all turns that count."""
        found = overlap_of(self.figures)
        assert found is not None
        return found

    @property
    def met(self) -> bool:
        return median(self.gains()) >= self.bar and all(abs(self.off_by(mode)) <= BAND for mode in MODES)

    @property
    def bar(self) -> float:
        return BAR if self.agreement >= 0.9 and self.ratio >= 0.2 else FLOOR


def job(ranks: Ranks, asked: Asked) -> list[Found]:
    """Runs on each of the two ranks alike."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[ranks.rank % len(cores)]})
    shelf, found = ModelCache(ranks, PlacementConf(draft=DraftSeat.own)), []
    for agreement in map(float, asked.agreements.split(",")):
        for ratio in map(float, asked.ratios.split(",")):
            found.append(compared(ranks, shelf, asked, agreement, ratio))
    return found


def compared(ranks: Ranks, shelf: ModelCache, asked: Asked, agreement: float, ratio: float) -> Found:
    """Both modes in turn; the first repeat does not count."""
    k = asked.k or Costs.of_ratio(ratio, 16).best(agreement, agreement)
    target, draft = sized(asked.layers), sized(draft_layers(ranks, asked, ratio, k), agreement)
    run = RunConf(model=target, draft=draft, placement=PlacementConf(draft=DraftSeat.own), engine=Steps.eager)
    placement = resolve(run.placement, ranks.world, drafts=True)
    entry = PairSpec(run, None, None, as_asked(run, placement))
    pair = PairSession(entry, ranks)
    pair.check(1, max(map(len, PROMPTS)) + asked.new)
    pair.open(shelf)
    found = Found(agreement, ratio, k)
    for repeat in range(asked.repeats + 1):
        for mode in MODES:
            ms = turn(pair, found, mode, repeat, asked.new)
            if repeat:
                found.ms.setdefault(mode.value, []).append(ms)
    return found


def sized(layers: int, agreement: float = 1.0) -> ModelConf:
    return replace(shape(layers, WIDTH, VOCAB, agreement=agreement), dtype=Dtype.bf16, context=1024)


def draft_layers(ranks: Ranks, asked: Asked, ratio: float, k: int) -> int:
    """The layers with which a draft step takes the requested share of a target step over K drafts."""
    layers = 0
    if ranks.is_leader:
        few, many = step_s(sized(1), 1), step_s(sized(5), 1)
        each = (many - few) / 4
        layers = max(1, round((ratio * step_s(sized(asked.layers), k + 1) - few) / each) + 1)
    return ranks.broadcast_ints([layers])[0]


def step_s(model: ModelConf, width: int) -> float:
    """The least time of a few turns: the machine without disturbances."""
    step, taken = alone(load(model, None, Dtype.bf16, torch.device("cpu"), "model"), 64, width), []
    for _ in range(TURNS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return min(taken)


def turn(pair: PairSession, found: Found, mode: Overlap, repeat: int, new: int) -> float:
    """Milliseconds a token, decoding only."""
    run = replace(pair.run, speculation=replace(pair.run.speculation, k=found.k, overlap=mode))
    spent = waited = 0.0
    counts = Counts()
    for number, ids in enumerate(PROMPTS):
        fixed_k = partial(FixedDraftLength, found.k)
        text_run = texts_run(pair, run, [Prompt(str(number), ids)], new, repeat, fixed_k)
        engine = text_run.engine
        for _ in text_run.rounds():
            pass
        spent += text_run.counts.decode_s
        if isinstance(engine, Engine) and engine.overlap is not None and repeat:
            if mode is Overlap.ahead:
                found.figures.append(engine.overlap)
            waited += engine.overlap["leader_waited_ms"] / 1000
            counts.merge(text_run.counts)
    if counts.row_rounds and mode is Overlap.off:
        found.waiting.append((waited / counts.drafted.total(), (spent - waited) / counts.row_rounds))
        found.counts.merge(counts)
    return 1000 * spent / (new * len(PROMPTS))


def pace_of(times: tuple[float, float], k: int, mode: Overlap) -> RoundTimes:
    """The times of a draft and of verification when the other rank waits."""
    draft_s, verify_s = times
    return RoundTimes(draft=draft_s, verify=(verify_s,) * (k + 1), rows=1, overlap=mode)


def step_share(found: Found) -> float:
    """A draft, with its share of the messages, over verification."""
    return median(draft_s / verify_s for draft_s, verify_s in found.waiting)


def table(found: list[Found]) -> list[str]:
    head = ["agreement", "asked ratio", "draft step / target's", "K", "waiting, ms/token", "ahead", "faster",
            "least..most", "bar", "rows ready", "in vain", "accepted", "met"]  # fmt: skip
    rows = [head]
    for one in found:
        ahead, gains = one.summed(), one.gains()
        rows.append(
            [
                str(one.agreement), str(one.ratio), f"{step_share(one):.2f}", str(one.k),
                f"{median(one.ms['off']):.2f}", f"{median(one.ms['ahead']):.2f}", f"{median(gains):.2f}x",
                f"{min(gains):.2f}..{max(gains):.2f}", f"{one.bar}x", f"{ahead['ready_share']:.0%}",
                f"{ahead['tokens_drafted_ahead_wasted'] / max(1, ahead['tokens_drafted_ahead']):.0%}",
                f"{one.counts.summary()['acceptance_rate_decided']:.2f}", "yes" if one.met else "NO",
            ]
        )  # fmt: skip
    return aligned(rows, 0)


def prediction_table(found: list[Found]) -> list[str]:
    rows = [["agreement", "asked ratio", "K", "waiting: predicted", "measured", "off by",
             "ahead: predicted", "measured", "off by"]]  # fmt: skip
    for one in found:
        cells = [str(one.agreement), str(one.ratio), str(one.k)]
        for mode in MODES:
            measured, predicted = median(one.ms[mode.value]), median(one.predicted(mode))
            cells += [f"{predicted:.2f}", f"{measured:.2f}", f"{one.off_by(mode):+.0%}"]
        rows.append(cells)
    return aligned(rows, 0)


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    found = on_ranks(2, job, asked, patience_s=PATIENCE_S)[0]
    if isinstance(found, Exception):
        raise found
    report(
        asked.write, "A draft that runs ahead beside one that waits",
        {"model": "cpu, rank 0", "draft": "cpu, rank 1, on a core of its own"},
        f"Temperature 1, {asked.new} new tokens, {len(PROMPTS)} prompts, {asked.repeats} repeats.",
        f"Target of {asked.layers} layers of width {WIDTH}, vocabulary {VOCAB}, eager steps.",
        "", "```", *table(found), "```", "",
        f"Beside what the plan's model makes of the waiting turns; within {BAND:.0%} is met.",
        "", "```", *prediction_table(found), "```",
    )  # fmt: skip
    shown = ("agreement", "ratio", "k", "ms")
    print(json.dumps([{name: vars(one)[name] for name in shown} for one in found]))
    sys.exit(int(not all(one.met for one in found)))


if __name__ == "__main__":
    main()
