"""Draft trees beside chains, at dialled agreements and draft costs: one interleaved run for each pair.

    python bench/trees.py [drafts=2x512,4x704,6x832,shipped] [agreements=0.6,0.8,0.9] [temperatures=1.0,0.5]
                          [ks=1,2,4,8] [trees=2x1,4x2] [new=64] [repeats=3] [threads=2] [small=true]
                          [write=FILE.md]

A draft of LxH is synthetic, with L layers and H hidden numbers: these three take about 0.05, 0.15 and 0.3 of
a target step. `shipped` is the pair that ships, at each temperature; any other name is that of a draft or a
head of its target (`draft=NAME`). `trees` are drafts x siblings, 8x2 at most.

The next token of a synthetic pair depends on the last one alone. So what rounds of each shape bring is
computed from the pair's own logits behind every token, by the rule (without_forwards.py): `predicted`. What
is counted must be within three standard errors of it.

By the clock luck decides: in some hundred rounds the tokens differ by several per cent. So times are given
twice: by the clock, and evened, where each round takes the median time of all rounds of its shape, and
brings what is predicted of its shape; of pairs that are not synthetic, what its draws bring on average.
Required: adaptive K and siblings, evened, at most 2 % slower than the best chain. The exit code is 1 if
something is missed.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import by_us, opened, sizes, text_logits  # noqa: E402
from fast import Asked  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from side_by_side import PROMPTS as TEXTS  # noqa: E402
from surroundings import surroundings, write  # noqa: E402
from without_forwards import Shape, Table, brings, expected_of, shape_of  # noqa: E402

from llama_ssp.config import Dtype, RunConf, Steps, register  # noqa: E402
from llama_ssp.config.validation import to_run  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.stats import RowStep  # noqa: E402
from llama_ssp.tasks.microbench import shape  # noqa: E402

log = logging.getLogger("bench")
Prompts = list[tuple[int, ...]]
Brought = dict[Shape, tuple[float, float]]  # tokens a round, and their standard error
VOCAB, K_MAX, MOST = 2048, 8, 2  # the most that adaptive speculation may choose
SAMPLED = 2000  # trees, for what is predicted
NEAR = 0.98  # of the best chain's speed
SIGMAS = 3.0
IDS: Prompts = [tuple(range(100, 116)), tuple(range(1000, 1020))]
CHAINS, TREES = "adaptive, chains", "adaptive, trees"


@dataclass
class Ours(Asked):
    """The command line."""

    agreements: str = "0.6,0.8,0.9"
    drafts: str = "2x512,4x704,6x832,shipped"
    temperatures: str = "1.0,0.5"
    ks: str = "1,2,4,8"
    trees: str = "2x1,4x2"
    new: int = 64
    repeats: int = 3


@dataclass(frozen=True)
class Round:
    """What one round took and brought; `expected` on average over the draws that decide it."""

    shape: Shape
    ms: float
    tokens: int
    expected: float


@dataclass
class Way:
    """A contender: K, null for adaptive, and siblings. All its turns but the first."""

    k: int | None
    siblings: int
    ms: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def play(self, ready: PairSession, prompts: Prompts, new: int, repeat: int) -> None:
        rounds: list[Round] = []

        def seen(step: RowStep, spent: float) -> None:
            rounds.append(Round(shape_of(step), 1000 * spent, len(step.tokens), expected_of(step)))

        ms, _ = by_us(ready, new, repeat, self.k, seen, self.siblings, prompts)
        if repeat:
            self.ms.append(ms)
            self.rounds += rounds

    def counted(self) -> tuple[float, float]:
        """Tokens a round, and the standard error."""
        tokens = [one.tokens for one in self.rounds]
        return fmean(tokens), stdev(tokens) / len(tokens) ** 0.5

    def predicted(self, brought: Brought) -> tuple[float, float]:
        """The same by the shapes of its rounds."""
        found = [brought[one.shape] for one in self.rounds]
        return fmean(mean for mean, _ in found), fmean(error for _, error in found)

    def evened(self, usual: dict[Shape, float], brought: Brought | None) -> float:
        """Milliseconds a token."""
        tokens = sum(brought[one.shape][0] if brought else one.expected for one in self.rounds)
        return sum(usual[one.shape] for one in self.rounds) / tokens

    def shapes(self) -> str:
        """The shapes that it chose most often."""
        common = Counter(one.shape for one in self.rounds).most_common(2)
        return ", ".join(f"{k}x{s} {n / len(self.rounds):.0%}" for (k, s), n in common)


@dataclass
class Cell:
    """A pair, ready, with its prompts; `brought` if it is synthetic."""

    draft: str
    dial: str
    ready: PairSession
    prompts: Prompts
    brought: Brought | None = None


def trained(draft: str, temperature: str, new: int) -> Cell:
    """The target that ships, with its draft or another one."""
    given = ["model.dtype=bf16", f"sampling.temperature={temperature}", "placement=cpu", "engine=compiled"]
    given += ["draft.dtype=bf16" if draft == "shipped" else f"draft={draft}"]
    given += ["speculation.adaptive=true", f"speculation.siblings={MOST}", f"speculation.k_max={K_MAX}"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("run", given))
    pair = PairSession(pair_specs(run, [], 1)[0])
    pair.load(1, 256 + new)
    return Cell(draft, f"T = {temperature}", pair, [tuple(pair.tokens.encode(text)) for text in TEXTS])


def synthetic(draft: str, agreement: str, asked: Ours, known: dict[str, Brought]) -> Cell:
    """The pair with this draft. What drafts of one agreement bring does not depend on their sizes."""
    layers, hidden = map(int, draft.split("x"))
    target, _ = sizes(float(agreement), asked.small)
    other = shape(layers, hidden, VOCAB, agreement=float(agreement))
    models = [
        replace(model, vocab=VOCAB, context=target.context, dtype=Dtype.bf16) for model in (target, other)
    ]
    run = RunConf(model=models[0], draft=models[1], engine=Steps.compiled)
    run = replace(run, speculation=replace(run.speculation, adaptive=True, siblings=MOST, k_max=K_MAX))
    ready = opened(run, max(map(len, IDS)) + asked.new)
    if agreement not in known:
        every = tuple(range(VOCAB))
        tables = (Table(text_logits(model, every)) for model in (ready.models.target, ready.models.draft))
        known[agreement] = brings(*tables, K_MAX, MOST, SAMPLED)
    return Cell(draft, agreement, ready, IDS, known[agreement])


def cells(asked: Ours) -> Iterable[Cell]:
    """Each pair in turn; it is closed when the next one begins."""
    known: dict[str, Brought] = {}
    for draft in asked.drafts.split(","):
        is_synthetic = draft[0].isdigit()
        for dial in (asked.agreements if is_synthetic else asked.temperatures).split(","):
            own = synthetic(draft, dial, asked, known) if is_synthetic else trained(draft, dial, asked.new)
            yield own
            own.ready.close()


def played(cell: Cell, asked: Ours) -> dict[str, Way]:
    """All contenders, turn by turn."""
    ways = {f"K = {k}": Way(int(k), 0) for k in asked.ks.split(",")}
    for tree in asked.trees.split(","):
        k, s = map(int, tree.split("x"))
        ways[f"K = {k}, s = {s}"] = Way(k, s)
    ways |= {CHAINS: Way(None, 0), TREES: Way(None, MOST)}
    for repeat in range(asked.repeats + 1):  # the first does not count
        for way in ways.values():
            way.play(cell.ready, cell.prompts, asked.new, repeat)
        log.info("%s, %s, repeat %d", cell.draft, cell.dial, repeat)
    return ways


def judged(cell: Cell, ways: dict[str, Way]) -> tuple[list[list[str]], list[str], list[str]]:
    """A line for each contender, one for the pair, and what is missed."""
    taken: dict[Shape, list[float]] = {}
    for one in (one for way in ways.values() for one in way.rounds):
        taken.setdefault(one.shape, []).append(one.ms)
    usual = {shape: median(times) for shape, times in taken.items()}
    evened = {name: way.evened(usual, cell.brought) for name, way in ways.items()}
    chains = [name for name, way in ways.items() if way.k is not None and not way.siblings]
    best = min(chains, key=lambda name: evened[name])
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
        times = f"{median(way.ms):.2f}", f"{evened[way_name]:.2f}"
        count = f"{counted:.2f} +- {SIGMAS * error:.2f}{off}"
        lines.append(
            [name, way_name, *times, count, predicted, f"{evened[best] / evened[way_name]:.3f}", way.shapes()]
        )
    over = evened[best] / evened[TREES]
    if over < NEAR:
        missed.append(f"adaptive, {name}")
    costs = cell.ready.costs
    assert costs is not None
    shares = (costs.draft + costs.once) / costs.verify[0], (costs.verify[4] / costs.verify[0] - 1) / 4
    clock = [theirs / ours for theirs, ours in zip(ways[best].ms, ways[TREES].ms, strict=True)]
    gain = f"{evened[CHAINS] / evened[TREES]:.3f}"
    spread = f"{median(clock):.2f} ({min(clock):.2f}..{max(clock):.2f})"
    pair = [name, *(f"{share:.3f}" for share in shares), best, f"{over:.3f}", spread, gain]
    return lines, pair, missed


def main() -> None:
    asked = Ours.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    register()
    head = [
        "pair",
        "contender",
        "ms/token",
        "evened",
        "tokens/round",
        "predicted",
        "over best chain",
        "shapes",
    ]
    rows: list[list[str]] = [head]
    pairs = [
        ["pair", "draft step", "column", "best chain", "adaptive over it", "by the clock", "over chains"]
    ]
    missed, devices = [], {}
    for cell in cells(asked):
        devices = cell.ready.models.devices
        lines, pair, wrong = judged(cell, played(cell, asked))
        rows, pairs, missed = [*rows, *lines], [*pairs, pair], [*missed, *wrong]
    text = "\n".join(
        [
            "# Draft trees beside chains", "", *surroundings(devices),
            f"{asked.new} new tokens, {len(IDS)} prompts (of trained pairs {len(TEXTS)}), batch 1, "
            f"{asked.threads} threads, {asked.repeats} repeats. A synthetic pair is named by its draft "
            "and agreement.",
            f"Asked: adaptive trees, evened, at least {NEAR} times as fast as the best chain, and tokens a "
            f"round within {SIGMAS:g} standard errors of the predicted. "
            f"Missed: {', '.join(missed) or 'nothing'}.",
            "", "`draft step` and `column` (of the first four): shares of a target step. `over chains`: over "
            "adaptive chains, evened.",
            "", "```", *aligned(pairs, 1), "```",
            "", "Each contender; `shapes`: drafts x siblings, and how often.",
            "", "```", *aligned(rows, 2), "```", "",
        ]
    )  # fmt: skip
    print(text)
    if asked.write:
        write(asked.write, text)
    sys.exit(int(bool(missed)))


if __name__ == "__main__":
    main()
