"""The cost of the one message a round between two ranks, and two ranks that agree in spite of noise on one.

    python bench/agreement.py [rounds=10000] [repeats=15] [new=64] [write=FILE.md]

The cost is that of a second message: every other round sends its message twice, and the difference of the
medians is the cost of one message, waiting included. The table also has the time that the leader spends
inside the call. The noise is added to every logit of the second rank's target, so its own decisions would
differ. The texts of both ranks must be the same after every run, and equal those of one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402

from bench.side_by_side import PROMPTS  # noqa: E402
from bench.surroundings import write  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config import DraftSeat, PlacementConf, register  # noqa: E402
from llama_ssp.config.presets import CONF  # noqa: E402
from llama_ssp.config.validation import to_run  # noqa: E402
from llama_ssp.distributed.comm import ALONE, Ranks  # noqa: E402
from llama_ssp.distributed.process_group import Group, checksum  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.report.machine import processor  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from tests.distributed.pairs import Case, opened, written  # noqa: E402
from tests.distributed.processes import on_ranks  # noqa: E402
from tests.distributed.test_agreement import SAMPLED, Noisy, changed_to  # noqa: E402
from tests.families import build  # noqa: E402
from tests.rig import drive, perturbed  # noqa: E402

PATIENCE_S = 3600
K = 3


@dataclass
class Asked(Words):
    """The command line."""

    rounds: int = 10000
    repeats: int = 15
    new: int = 64
    write: str = ""


class Timed:
    """Replaces a group's broadcast: every other message is sent twice."""

    def __init__(self) -> None:
        self.began: list[float] = []  # of each message of this run
        self.inside: list[float] = []  # seconds in the call, of every message

    def install(self) -> None:
        send = Group.broadcast_ints

        def sending(group: Group, values: list[int]) -> list[int]:
            self.began.append(time.perf_counter())
            heard = send(group, values)
            self.inside.append(time.perf_counter() - self.began[-1])
            return heard if len(self.began) % 2 else send(group, values)

        Group.broadcast_ints = sending  # type: ignore[method-assign]

    def rounds(self) -> tuple[list[float], list[float]]:
        """Seconds of this run's rounds that began with one message, and with two."""
        taken = [after - before for before, after in pairwise(self.began)]
        return taken[::2], taken[1::2]


@dataclass(frozen=True)
class Cost:
    """Seconds of rounds with one and with two messages, and inside the leader's call."""

    once: list[float]
    twice: list[float]
    inside: list[float]


def cost(ranks: Ranks, repeats: int, new: int) -> Cost:
    """Runs on each rank; only the leader's figures are used."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = to_run(compose("run", ["placement=leader", "sampling.temperature=0.5"]))
    entry = pair_specs(run, [], ranks.world)[0]
    pair = PairSession(entry, ranks).load(1, 256 + new)
    clock = Timed()
    clock.install()
    prompt = Prompt("0", tuple(pair.tokens.encode(PROMPTS[0])))
    once: list[float] = []
    twice: list[float] = []
    for repeat in range(repeats + 1):
        clock.began.clear()
        engine = pair.engine(repeat, end_ids=frozenset())
        drive(engine, [prompt], k=K, max_new=new)
        if repeat:  # the first one warms up
            with_one, with_two = clock.rounds()
            once += with_one
            twice += with_two
        else:
            clock.inside.clear()
    return Cost(once, twice, clock.inside)


def noisy(ranks: Ranks, target: Path, draft: Path, rounds: int) -> list[tuple[int, int]]:
    """(rounds, checksum of the texts) of every run on this rank, until this number of rounds."""
    pair, run = opened(target, draft, PlacementConf(draft=DraftSeat.leader), ranks)
    if ranks.rank == 1:
        assert pair.target is not None
        pair = replace(pair, target=changed_to(Noisy, pair.target))
    done: list[tuple[int, int]] = []
    while sum(n for n, _ in done) < rounds:
        made = written(pair, run, Case(1, 4, SAMPLED, max_new=140, seed=len(done)))
        done.append((made.rounds, checksum([token for text in made.texts for token in text])))
    return done


def agreement(rounds: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = Path(scratch) / "target", Path(scratch) / "draft"
        build("llama-mha").save_pretrained(target)
        perturbed(build("llama-mha"), 0.05).save_pretrained(draft)
        every = on_ranks(2, noisy, target, draft, rounds, patience_s=PATIENCE_S)
        alone = noisy(ALONE, target, draft, sum(n for n, _ in every[0]))
    return {
        "rounds": sum(n for n, _ in every[0]),
        "runs": len(every[0]),
        "runs_that_differ_between_ranks": sum(a != b for a, b in zip(every[0], every[1], strict=True)),
        "runs_unlike_one_process": sum(a != b for a, b in zip(every[0], alone, strict=True)),
    }


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    found: Cost = on_ranks(2, cost, asked.repeats, asked.new, patience_s=PATIENCE_S)[0]
    together = agreement(asked.rounds)
    text = table(found, together)
    print(text)
    print(json.dumps({**together, "versions": versions()}))
    if asked.write:
        write(asked.write, text)
    sys.exit(1 if together["runs_that_differ_between_ranks"] or together["runs_unlike_one_process"] else 0)


def table(found: Cost, together: dict[str, Any]) -> str:
    """A complete results file."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    names = versions()
    load = os.getloadavg()[0]
    one, two = median(found.once), median(found.twice)
    return "\n".join(
        [
            "# Two ranks that agree: the cost of it, and noise on one of them",
            "",
            f"Command: `python bench/agreement.py {' '.join(sys.argv[1:])}`",
            f"Hardware: {processor()}, {os.cpu_count()} cores, load {load:.1f} at the end; gloo.",
            f"Versions: python {names['python']}, torch {names['torch']}.",
            f"Commit {commit}, {time.strftime('%Y-%m-%d')}.",
            "",
            f"demo over two ranks with demo_draft on the first, batch 1, K = {K}; every other round's",
            f"message is sent twice. Medians, quartiles of {len(found.once)} and {len(found.twice)} rounds:",
            "",
            "| | ms |",
            "|---|---|",
            f"| a round | {_spread(found.once)} |",
            f"| a round whose message is sent twice | {_spread(found.twice)} |",
            f"| inside the leader's call | {_spread(found.inside)} |",
            "",
            f"What a message adds: {1000 * (two - one):.3f} ms, {100 * (two - one) / one:.1f} % of a round;",
            f"inside the leader's call {100 * median(found.inside) / one:.1f} %.",
            "",
            f"Noise on every logit of the second rank's target: {together['rounds']} rounds in "
            f"{together['runs']} runs of 4 rows;",
            f"runs whose texts differ between the ranks: {together['runs_that_differ_between_ranks']}; "
            f"runs unlike one process: {together['runs_unlike_one_process']}.",
            "",
        ]
    )


def _spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{1000 * middle:.3f} ({1000 * low:.3f} .. {1000 * high:.3f})"


if __name__ == "__main__":
    main()
