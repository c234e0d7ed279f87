"""Two ranks on two cores: steps, rounds and texts of a split target, against bytes and all-reduces alone.

    python bench/ranks.py [turns=3] [repeats=3] [new=96] [engine=compiled] [write=FILE.md]
    python bench/ranks.py against=FOLDER [asked=1.6]      # and another checkout, turn by turn
    python bench/ranks.py small=true                      # little models: its code alone

The pair is that of bench/fast.py, the target split over two ranks of one thread each, the draft on the first.

Parts, in one process a rank (torchrun): a regular step, a step of 5 tokens, a draft step, a sum that reads
memory while the other rank reads, too, and the all-reduces of a step alone, by gloo. They take turns; between
them texts are written, and a round of K = 4 is compared with its steps.

Texts: task=measure by torchrun, each turn a run of its own. With `against` every turn runs once in each
checkout, by the same command; the quotient is taken within a turn. The exit code is 1 if a figure misses
what is asked.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bars import Bar, all_met, bars_table, most  # noqa: E402
from contenders import LENGTH, alone, by_us, in_turn, opened, sizes  # noqa: E402
from pictures import write_json  # noqa: E402
from surroundings import report  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import DraftSeat, Dtype, ModelConf, PlacementConf, RunConf, Steps  # noqa: E402
from llama_ssp.distributed.process_group import open_ranks  # noqa: E402
from llama_ssp.planner.speed import pass_cost  # noqa: E402
from llama_ssp.planner.workload import Role  # noqa: E402
from llama_ssp.report.machine import said_by_git  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402

log = logging.getLogger("bench")
K, AGREEMENT = 4, 0.89
OVER_BYTES, OVER_PARTS = 1.35, 1.10  # the most that is asked
INNER = 9  # timed turns of each part between two texts
SHAPE = ("family", "n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "ffn", "vocab", "context")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass
class Asked(Words):
    """The command line."""

    turns: int = 3
    repeats: int = 3
    new: int = 96
    engine: str = "compiled"
    against: str = ""
    asked: float = 1.6
    small: bool = False
    part: bool = False  # this process is a rank
    write: str = ""

    def pair(self) -> tuple[ModelConf, ModelConf]:
        """Target and draft."""
        target, draft = (replace(model, dtype=Dtype.bf16) for model in sizes(AGREEMENT, self.small))
        return target, draft


def parts(asked: Asked) -> dict[str, Any] | None:
    """Milliseconds of every turn, on the leader; on the other rank None."""
    ranks = open_ranks(torch.device("cpu"))
    target, draft = asked.pair()
    placement = PlacementConf(draft=DraftSeat.leader)
    run = RunConf(model=target, draft=draft, placement=placement, engine=Steps(asked.engine))
    pair = opened(run, 2 * LENGTH + asked.new, ranks)
    cost = pass_cost(Role("", target, Dtype.bf16), ranks.world)
    large = torch.ones(10**7 if asked.small else 10**8)
    models = pair.models
    works: dict[str, Callable[[], object]] = {
        "step": alone(models.target, LENGTH, 1), f"step of {K + 1}": alone(models.target, LENGTH, K + 1),
        "draft step": alone(models.draft, LENGTH, 1) if models.draft else lambda: None,
        "reading": large.sum, "all-reduces": sums(1, cost.sums, target),
        f"all-reduces of {K + 1}": sums(K + 1, cost.sums, target),
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in (*works, "regular", f"K = {K}", "round")}
    for turn in range(asked.turns + 1):
        found = {name: [median(ms)] for name, ms in in_turn(works, INNER, meet=ranks.barrier).items()}
        spent: list[float] = []
        found["regular"] = [by_us(pair, asked.new, turn, 0)[0]]
        ms, _ = by_us(pair, asked.new, turn, K, lambda _, seconds, spent=spent: spent.append(1000 * seconds))
        found[f"K = {K}"], found["round"] = [ms], [median(spent)]
        if turn:  # the first one warms up
            for name, own in found.items():
                taken[name] += own
    leads = ranks.is_leader
    ranks.close()
    taken["bytes"] = [ms * cost.weights / large.nbytes for ms in taken["reading"]]
    return {"ms": taken, "gb_s": large.nbytes / median(taken["reading"]) / 1e6} if leads else None


def sums(tokens: int, count: int, target: ModelConf) -> Callable[[], object]:
    """A step's messages alone: a sum behind the embedding, attention and MLP, and the logits' gathering."""
    x = torch.zeros(tokens, target.dim, dtype=torch.bfloat16)
    own = torch.zeros(tokens, target.vocab // dist.get_world_size(), dtype=torch.bfloat16)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]

    def send() -> None:
        for _ in range(count - 1):
            dist.all_reduce(x)
        dist.all_gather(every, own)

    return send


def quotients(found: dict[str, Any]) -> list[Bar]:
    """The required figures of the parts, in the median of the turns."""
    ms = found["ms"]

    def over(name: str, below: dict[str, float]) -> float:
        """A part's time, divided by the sum of other parts, each times its count."""
        sums_ms = [sum(f * ms[one][turn] for one, f in below.items()) for turn in range(len(ms[name]))]
        return median(top / bottom for top, bottom in zip(ms[name], sums_ms, strict=True))

    wide = f"step of {K + 1}"
    shown = [Bar(f"{name}, ms", median(taken)) for name, taken in ms.items() if name != "reading"]
    return [
        *shown,
        Bar("GB/s of a rank while the other reads", found["gb_s"]),
        most("step / (bytes + all-reduces)", over("step", {"bytes": 1, "all-reduces": 1}), OVER_BYTES),
        Bar(f"{wide} / (bytes + all-reduces)", over(wide, {"bytes": 1, f"all-reduces of {K + 1}": 1})),
        most(f"round / ({K} draft steps + {wide})", over("round", {"draft step": K, wide: 1}), OVER_PARTS),
    ]


def measured(asked: Asked, folder: Path) -> tuple[float, float]:
    """Milliseconds a token of regular sampling and of K = 4, by the command of the checkout in `folder`."""
    words = [f"engine={asked.engine}", "placement=leader", "task=measure", f"task.ks=[{K}]", "out=null"]
    words += ["task.lengths=[16]", f"task.repeats={asked.repeats}", f"task.max_new_tokens={asked.new}"]
    for role, model in zip(("model", "draft"), asked.pair(), strict=True):
        words += [f"{role}=7B", f"{role}.weights=synthetic", f"{role}.dtype=bf16"]
        words += [f"{role}.{key}={value}" for key, value in asdict(model).items() if key in SHAPE]
    words += [f"draft.agreement={AGREEMENT}", "output=json", "seed=1"]
    last = torchrun([str(folder / "launch/run.py"), *words], folder)
    return last["target_alone"]["ms_per_token"], last["pair"][0]["ms_per_token"]


def torchrun(words: list[str], folder: Path) -> dict[str, Any]:
    """The document of the last line that two ranks print."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run([*TORCHRUN, *words], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {' '.join(words)}")
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def compared(asked: Asked, old: Path) -> list[Bar]:
    """Both checkouts in turn. A first turn that compiles does not count."""
    taken: list[tuple[tuple[float, float], tuple[float, float]]] = []
    compiles = asked.engine == Steps.compiled
    for turn in range(asked.turns + compiles):
        both = measured(asked, ROOT), measured(asked, old)
        log.info("turn %d: (regular, K = %d) here %s, there %s ms/token", turn, K, *both)
        taken += [both] * (turn >= compiles)
    found = []
    for index, name in enumerate(("regular", f"K = {K}")):
        new_ms, old_ms = ([one[side][index] for one in taken] for side in (0, 1))
        ratios = [there / here for here, there in zip(new_ms, old_ms, strict=True)]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        found += [Bar(f"{name}: ms/token here", median(new_ms)), Bar("there", median(old_ms))]
        found += [Bar(f"{name}: there over here", median(ratios), asked.asked, note=spread)]
    return found


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if asked.part:
        found = parts(asked)
        if found:
            print(json.dumps(found))
        return
    bars = quotients(torchrun([__file__, *sys.argv[1:], "part=true"], ROOT))
    if asked.against:
        bars += compared(asked, Path(asked.against).resolve())
    there = said_by_git(Path(asked.against), "describe", "--always") if asked.against else ""
    against = [f"Compared with commit {there}."] if there else []
    report(
        asked.write, "Two ranks on two cores, 222M with 7M, bf16",
        {"model": "cpu, over 2 ranks of a thread each", "draft": "cpu, rank 0"}, *against,
        f"Medians of {asked.turns} turns, {asked.new} new tokens, temperature 1, agreement {AGREEMENT}.",
        "", "```", *bars_table(bars), "```",
    )  # fmt: skip
    summary = {"bars": [asdict(bar) for bar in bars], "versions": versions()}
    print(json.dumps(summary))
    if asked.write:
        write_json(asked.write, summary)
    sys.exit(int(not all_met(bars)))


if __name__ == "__main__":
    main()
