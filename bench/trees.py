"""Draft trees beside chains, at dialled agreements and draft costs: one interleaved run for each pair.

    python bench/trees.py [drafts=2x512,4x704,6x832,shipped] [agreements=0.6,0.8,0.9] [temperatures=1.0,0.5]
                          [ks=1,2,4,8] [trees=2x1,4x2] [new=64] [texts=3] [more=48] [threads=2] [small=true]
                          [device=cpu] [write=FILE.md]

A draft of LxH is synthetic, with L layers and H hidden numbers: these three take about 0.05, 0.15 and 0.3 of
a target step. TARGET/DRAFT is a pair of presets with synthetic weights. `shipped` is the pair that ships, at
each temperature; any other name is that of a draft or a head of its target (`draft=NAME`). `trees` are
drafts x siblings, 8x2 at most. With `device=cuda` pairs are on GPUs.

All contenders write `texts` texts. Then adaptive trees and the chains that are nearly the best write `more`
texts. All write a text at the same time, by turns: the next round is of the one with the fewest tokens. So a
machine whose speed changes is the same for all. Each text has draws of its own, the same for all contenders.
Of trained pairs, which are fast, there are several times as many texts.

The next token of an LxH pair depends on the last one alone. So what rounds of each shape bring is
`predicted` by many rounds of tables, without forward passes (without_forwards.py). What is counted must be
within three standard errors of it.

Times are given three ways: `clock`, per token; `fair`, per token that these rounds bring on average, without
the luck of draws (as predicted of their shapes, or of other pairs, as their drafts say); and `evened`,
where each round also takes the median time of all rounds of its shape. Speeds compare what both contenders
took for the same texts. Required of adaptive trees: 0.98 of the best chain's speed, by the clock. The exit
code is 1 if something is missed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import SMALL, opened, sizes, text_logits  # noqa: E402
from side_by_side import PROMPTS as TEXTS  # noqa: E402
from surroundings import surroundings, write  # noqa: E402
from ways import TOKENS, VOCAB, Brought, Cell, Way, over  # noqa: E402
from without_forwards import Shape, Table, in_the_long_run  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import Dtype, RunConf, Steps  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.tasks.calibrate import shape  # noqa: E402

log = logging.getLogger("bench")
K_MAX, MOST = 8, 2  # the most that adaptive speculation may choose
TIMES = 8  # as many texts of trained pairs
NEAR = 0.98  # of the best chain's speed
NEARLY = 0.93  # chains that may be the best after some texts
SIGMAS = 3.0  # standard errors
CHAINS, TREES = "adaptive, chains", "adaptive, trees"


@dataclass
class Asked(Words):
    """The command line."""

    agreements: str = "0.6,0.8,0.9"
    drafts: str = "2x512,4x704,6x832,shipped"
    temperatures: str = "1.0,0.5"
    ks: str = "1,2,4,8"
    trees: str = "2x1,4x2"
    new: int = 64
    texts: int = 3
    more: int = 48
    threads: int = 2
    small: bool = False
    device: str = "cpu"
    write: str = ""


def adaptive(asked: Asked, *words: str) -> RunConf:
    """Returns the run of these overrides, compiled, with adaptive trees."""
    given = ["engine=compiled", "model.dtype=bf16", *words, *["placement=cpu"] * (asked.device == "cpu")]
    given += ["speculation.adaptive=true", f"speculation.siblings={MOST}", f"speculation.k_max={K_MAX}"]
    return composed(given)


def trained(draft: str, temperature: str, asked: Asked) -> Cell:
    """The target that ships, with its draft or another one."""
    named = "draft.dtype=bf16" if draft == "shipped" else f"draft={draft}"
    run = adaptive(asked, f"sampling.temperature={temperature}", named)
    pair = PairSession(pair_specs(run, [], 1)[0])
    pair.load(1, 256 + asked.new)
    prompts = tuple(tuple(pair.tokens.encode(text)) for text in TEXTS)
    return Cell(draft, f"T = {temperature}", pair, prompts=prompts)


def presets(names: str, agreement: str, asked: Asked) -> Cell:
    """Two presets with synthetic weights: what their drafts say is what their rounds bring."""
    words = [f"{role}={name}" for role, name in zip(("model", "draft"), names.split("/"), strict=True)]
    for role in ("model", "draft"):
        words += [f"{role}.weights=synthetic", f"{role}.vocab={VOCAB}"]
        words += [f"{role}.{size}" for size in SMALL if asked.small]
    run = adaptive(asked, *words, "draft.dtype=bf16", f"draft.agreement={agreement}")
    return Cell(names, agreement, opened(run, TOKENS + asked.new))


def synthetic(draft: str, agreement: str, asked: Asked, known: dict[str, Brought]) -> Cell:
    """The pair with this draft. What drafts of one agreement bring does not depend on their sizes."""
    layers, hidden = map(int, draft.split("x"))
    target, _ = sizes(float(agreement), asked.small)
    other = shape(layers, hidden, VOCAB, agreement=float(agreement))
    models = [
        replace(model, vocab=VOCAB, context=target.context, dtype=Dtype.bf16) for model in (target, other)
    ]
    run = RunConf(model=models[0], draft=models[1], engine=Steps.compiled)
    run = replace(run, speculation=replace(run.speculation, adaptive=True, siblings=MOST, k_max=K_MAX))
    ready = opened(run, TOKENS + asked.new)
    if agreement not in known:
        every = tuple(range(VOCAB))
        both = ready.models.target, ready.models.draft
        tables = [Table(text_logits(model, every).float()) for model in both]
        known[agreement] = cache(lambda shape: in_the_long_run(*tables, shape))
    return Cell(draft, agreement, ready, known[agreement])


def cells(asked: Asked) -> Iterable[Cell]:
    """Each pair in turn; it is closed when the next one begins."""
    known: dict[str, Brought] = {}
    for draft in asked.drafts.split(","):
        is_preset, is_synthetic = "/" in draft, draft[0].isdigit()
        for dial in (asked.agreements if is_preset or is_synthetic else asked.temperatures).split(","):
            if is_preset:
                cell = presets(draft, dial, asked)
            elif is_synthetic:
                cell = synthetic(draft, dial, asked, known)
            else:
                cell = trained(draft, dial, asked)
            yield cell
            cell.ready.close()


def played(cell: Cell, asked: Asked) -> dict[str, Way]:
    """All contenders, text by text, each time beginning with another one."""
    ways = {f"K = {k}": Way(int(k), 0) for k in asked.ks.split(",")}
    for tree in asked.trees.split(","):
        k, s = map(int, tree.split("x"))
        ways[f"K = {k}, s = {s}"] = Way(k, s)
    ways |= {CHAINS: Way(None, 0), TREES: Way(None, MOST)}
    times, names = TIMES if cell.prompts else 1, list(ways)
    first, last = 1 + times * asked.texts, 1 + times * (asked.texts + asked.more)
    for number in range(last):
        if number == first:
            evened = chains_evened(ways)
            names = [name for name in evened if min(evened.values()) >= NEARLY * evened[name]] + [TREES]
        if number in (0, first):
            log.info("%s, %s, texts from %d on: %s", cell.draft, cell.dial, number, "; ".join(names))
        begin = number % len(names)
        by_turns({name: ways[name].play(cell, asked.new, number) for name in names[begin:] + names[:begin]})
    return ways


def by_turns(texts: dict[str, Iterator[int]]) -> None:
    """Writes texts at the same time, all about as far."""
    written = dict.fromkeys(texts, 0)
    while written:
        name = min(written, key=written.__getitem__)
        tokens = next(texts[name], None)
        if tokens is None:
            del written[name]
        else:
            written[name] += tokens


def usual_ms(ways: dict[str, Way]) -> dict[Shape, float]:
    """The median over all rounds of a shape."""
    found: dict[Shape, list[float]] = {}
    for one in (one for way in ways.values() for one in way.rounds):
        found.setdefault(one.shape, []).append(one.ms)
    return {shape: median(times) for shape, times in found.items()}


def chains_evened(ways: dict[str, Way]) -> dict[str, float]:
    """Of each fixed chain."""
    usual = usual_ms(ways)
    return {name: way.evened(usual) for name, way in ways.items() if way.k is not None and not way.siblings}


def judged(cell: Cell, ways: dict[str, Way]) -> tuple[list[list[str]], list[str], list[str]]:
    """A line for each contender, one for the pair, and what is missed."""
    usual, chains = usual_ms(ways), chains_evened(ways)
    written = {name: len(ways[name].texts) for name in chains}
    best = min((name for name in chains if written[name] == max(written.values())), key=chains.__getitem__)
    name, lines, missed = f"{cell.draft}, {cell.dial}", [], []
    for way_name, way in ways.items():
        counted, error = way.counted()
        predicted, off = "-", ""
        if cell.brought:
            mean, uncertain = way.predicted(cell.brought)
            predicted = f"{mean:.2f}"
            if abs(counted - mean) > SIGMAS * (error**2 + uncertain**2) ** 0.5:
                off = " *"
                missed.append(f"tokens a round of {way_name}, {name}")
        ms = fmean(way.clock().values()), fmean(way.fair().values()), way.evened(usual)
        count = f"{counted:.2f} +- {SIGMAS * error:.2f}{off}"
        speed = f"{over(ways[best].fair(), way.fair())[0]:.3f}"
        lines.append([name, way_name, *(f"{each:.2f}" for each in ms), count, predicted, speed, way.shapes()])
    clock, fair = (over(how(ways[best]), how(ways[TREES])) for how in (Way.clock, Way.fair))
    if clock[0] < NEAR:
        missed.append(f"adaptive, {name}")
    costs = cell.ready.costs
    assert costs is not None
    column = (costs.round(4, MOST) - costs.round(4)) / (4 * MOST)  # a sibling takes no draft step
    shares = ((costs.round(1) - costs.round(0) - column) / costs.round(0), column / costs.round(0))
    speeds = [f"{ratio:.3f} +- {error:.3f}" for ratio, error in (clock, fair)]
    evened = chains[best] / ways[TREES].evened(usual)
    gain = over(ways[CHAINS].fair(), ways[TREES].fair())[0]
    pair = [name, *(f"{share:.3f}" for share in shares), best, *speeds, f"{evened:.3f}", f"{gain:.3f}"]
    return lines, pair, missed


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    head = [
        "pair",
        "contender",
        "clock",
        "fair",
        "evened",
        "tokens/round",
        "predicted",
        "over best",
        "shapes",
    ]
    rows: list[list[str]] = [head]
    pairs = [["pair", "draft step", "column", "best chain", "clock", "fair", "evened", "over chains"]]
    missed, devices = [], {}
    for cell in cells(asked):
        devices = cell.ready.models.devices
        lines, pair, wrong = judged(cell, played(cell, asked))
        rows, pairs, missed = [*rows, *lines], [*pairs, pair], [*missed, *wrong]
    text = "\n".join(
        [
            "# Draft trees beside chains", "", *surroundings(devices),
            f"{asked.new} new tokens, batch 1, {asked.threads} threads. {asked.texts} texts of each way "
            f"and {asked.more} of the best, {TIMES} times as many of trained pairs. Synthetic ones are named "
            "by draft and agreement.",
            f"Asked: adaptive trees at least {NEAR} times as fast as the best chain, by the clock; tokens a "
            f"round within {SIGMAS:g} standard errors of the predicted. Missed: "
            f"{', '.join(missed) or 'nothing'}.",
            "", "`draft step` and `column` (of a sibling, with four drafts): shares of a target step. Then "
            "how many times as fast adaptive trees are as the best chain, by the clock, fair and evened "
            "(bench/trees.py says what that is), with standard errors; and as adaptive chains, fair.",
            "", "```", *aligned(pairs, 1), "```",
            "", "Each contender, ms a token; `over best`: over the best chain, fair; `shapes`: drafts x "
            "siblings, and how often.",
            "", "```", *aligned(rows, 2), "```", "",
        ]
    )  # fmt: skip
    print(text)
    if asked.write:
        write(asked.write, text)
    sys.exit(int(bool(missed)))


if __name__ == "__main__":
    main()
