"""Draft trees beside chains, at dialled agreements and draft costs: one interleaved run for each pair.

    python bench/trees.py [agreements=0.6,0.8,0.9] [drafts=shipped,4x256,4x512,6x768] [temperatures=1.0,0.5]
                          [ks=1,2,4,8] [trees=2x1,4x1,2x2] [new=96] [repeats=5] [threads=2] [write=FILE.md]

The target is that of bench/fast.py; a draft of LxH has L layers and H hidden numbers. The shipped pair's
agreement is what it is: it has the given temperatures. `trees` are drafts x siblings. Tokens a round are
given as counted, and as the probabilities of the same rounds let expect. Required: adaptive K and siblings
at most 2 % slower than the best chain. The exit code is 1 if it is missed.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contenders import PROMPTS, VOCAB, by_us, opened, sizes  # noqa: E402
from fast import Asked, Taken, faster  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from side_by_side import PROMPTS as TEXTS  # noqa: E402
from surroundings import surroundings, write  # noqa: E402

from llama_ssp.config import Dtype, RunConf, Steps, register  # noqa: E402
from llama_ssp.config.validation import to_run  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.stats import Counts, RowStep  # noqa: E402
from llama_ssp.tasks.microbench import shape  # noqa: E402

log = logging.getLogger("bench")
Prompts = list[tuple[int, ...]]
MOST, NEAR = 2, 1 / 1.02  # siblings that adaptive speculation may choose; what it may lose to the best chain


TREES = ["speculation.adaptive=true", f"speculation.siblings={MOST}"]


@dataclass
class Ours(Asked):
    """The command line."""

    agreements: str = "0.6,0.8,0.9"
    drafts: str = "shipped,4x256,4x512,6x768"
    temperatures: str = "1.0,0.5"
    ks: str = "1,2,4,8"
    trees: str = "2x1,4x1,2x2"


@dataclass
class Way:
    """A contender: K, null for adaptive, and siblings. All its turns but the first."""

    k: int | None
    siblings: int
    ms: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    expected: float = 0.0

    def play(self, ready: PairSession, prompts: Prompts, new: int, repeat: int) -> None:
        expected = 0.0

        def seen(step: RowStep, _: float) -> None:
            nonlocal expected
            expected += 1 + sum(standing for _, standing in step.standing)
            expected += step.tree.gain[-1] if step.tree and step.tree.gain else 0.0

        ms, counts = by_us(ready, new, repeat, self.k, seen, self.siblings, prompts)
        if repeat:
            self.ms.append(ms)
            self.counts.merge(counts)
            self.expected += expected

    @property
    def taken(self) -> Taken:
        found = Taken(lambda _: (0.0, Counts()))
        found.ms = self.ms
        return found

    def cell(self) -> str:
        rounds = self.counts.row_rounds
        tokens = self.counts.committed.total() / rounds
        return f"{median(self.ms):.2f} ({tokens:.2f}, {self.expected / rounds:.2f})"


def shipped(temperature: float, new: int) -> tuple[PairSession, Prompts]:
    """The pair that ships, ready, and its prompts."""
    given = ["model.dtype=bf16", "draft.dtype=bf16", f"sampling.temperature={temperature}"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("run", [*given, *TREES, "placement=cpu", "engine=compiled"]))
    pair = PairSession(pair_specs(run, [], 1)[0])
    pair.load(1, 256 + new)
    return pair, [tuple(pair.tokens.encode(text)) for text in TEXTS]


def pair_of(agreement: float, draft: str, small: bool, new: int) -> tuple[PairSession, Prompts]:
    """The pair with this draft, ready, and its prompts."""
    layers, hidden = map(int, draft.split("x"))
    target, _ = sizes(agreement, small)
    other = replace(shape(layers, hidden, VOCAB, agreement=agreement), context=target.context)
    models = [replace(model, dtype=Dtype.bf16) for model in (target, other)]
    run = RunConf(model=models[0], draft=models[1], engine=Steps.compiled)
    run = replace(run, speculation=replace(run.speculation, adaptive=True, siblings=MOST))
    return opened(run, max(map(len, PROMPTS)) + new), PROMPTS


def main() -> None:
    asked = Ours.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    register()
    chains = {f"K = {k}": Way(int(k), 0) for k in ("0", *asked.ks.split(","))}
    shapes = [tuple(map(int, tree.split("x"))) for tree in asked.trees.split(",")]
    rows, missed, devices = [], [], {}
    for draft in asked.drafts.split(","):
        dials = asked.temperatures if draft == "shipped" else asked.agreements
        for dial in map(float, dials.split(",")):
            given = shipped(dial, asked.new) if draft == "shipped" else None
            ready, prompts = given or pair_of(dial, draft, asked.small, asked.new)
            assert ready.costs is not None
            costs, devices = ready.costs, ready.models.devices
            ways = {name: Way(way.k, 0) for name, way in chains.items()}
            ways |= {f"K = {k}, s = {s}": Way(k, s) for k, s in shapes}
            ways |= {"adaptive, chains": Way(None, 0), "adaptive": Way(None, MOST)}
            for repeat in range(asked.repeats + 1):  # the first does not count
                for name, way in ways.items():
                    way.play(ready, prompts, asked.new, repeat)
                    log.info("%s, %s, repeat %d: %s", draft, dial, repeat, name)
            best = min(chains, key=lambda name: median(ways[name].ms))
            near = faster(ways["adaptive"].taken, [ways[best].taken])
            if near[0] < NEAR:
                missed.append(f"{draft} at {dial}")
            shares = costs.draft / costs.verify[0], (costs.verify[4] / costs.verify[0] - 1) / 4
            cells = [way.cell() for way in ways.values()]
            over = f"{near[0]:.3f} ({near[1]:.2f}..{near[2]:.2f})"
            rows.append([draft, str(dial), *(f"{share:.3f}" for share in shares), *cells, best, over])
            ready.close()
    head = [
        "draft",
        "agreement, temperature",
        "draft step",
        "column",
        *ways,
        "best chain",
        "adaptive over it",
    ]
    text = "\n".join(
        [
            "# Draft trees beside chains", "", *surroundings(devices),
            f"Temperature 1, {asked.new} new tokens, {len(PROMPTS)} prompts (of the shipped pair "
            f"{len(TEXTS)}), batch 1, {asked.threads} "
            f"threads, {asked.repeats} repeats. `draft step` and `column` (of the first four) are shares "
            "of a target step. Cells: ms a token (tokens a round counted, expected). s: siblings.",
            f"Asked: adaptive at least {NEAR:.3f} times as fast as the best chain. Missed: "
            f"{', '.join(missed) or 'nowhere'}.",
            "", "```", *aligned([list(column) for column in zip(*[head, *rows], strict=True)], 1), "```", "",
        ]
    )  # fmt: skip
    print(text)
    if asked.write:
        write(asked.write, text)
    sys.exit(int(bool(missed)))


if __name__ == "__main__":
    main()
