"""A plan's time of a batch job against a hundred groups that share its folder, some killed, some slow.

    python bench/groups.py [groups=100] [shards=400] [shard_s=8] [seed=0] [write=FILE.md] [OVERRIDES]

A group is a process that claims shards, keeps the journal and publishes as task=batch does, but sleeps for
the time that the plan says in the place of models. Time is scaled: a shard takes `shard_s` seconds. In each
case the time of the job is compared with what the plan says (planner/groups.py), and with two limits. It is
at least that of all work, shared evenly. As each group takes the next shard when it has ended one, the last
group ends at most one shard, and one restart, after the work has run out. The exit code is 1 if a time is
outside of these limits by more than a tenth, or if an answer is missing, twice there, or out of order.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surroundings import surroundings, write  # noqa: E402

from bench.words import divided  # noqa: E402
from llama_ssp.batch.journal import Journal  # noqa: E402
from llama_ssp.batch.manifest import Manifest, shards_of  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.planner.groups import GroupPlan, JobPlan, JobSize, job_s, plan_job  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.tasks.plan import planned  # noqa: E402

OWN = {"groups": "100", "shards": "400", "shard_s": "8", "seed": "0", "write": ""}
PAIR = ["model=13B", "draft=7B", "cluster=p4d", "engine=compiled", "task.batch_size=8"]
RECORDS = 64  # of a shard
RESTART_S = 2.0  # from a group's end to its next start
SLOWER = 2.0  # of a slow group
ALLOWED = 0.1


@dataclass
class Case:
    """What happens to the groups: how many kills, at random moments, and how many groups are slow."""

    name: str
    kills: int = 0
    slow: int = 0


@dataclass
class Outcome:
    """Seconds of a case, and its limits."""

    case: Case
    planned_s: float
    least_s: float
    most_s: float
    measured_s: float = 0.0
    again: int = 0  # records that were answered more than once
    sound: bool = False

    @property
    def within(self) -> bool:
        return self.least_s * (1 - ALLOWED) <= self.measured_s <= self.most_s * (1 + ALLOWED)


@dataclass
class Fleet:
    """Groups that share the job in `folder`; `batch_s` are the seconds of a batch of `rows` records."""

    folder: Path
    manifest: Manifest
    rows: int
    batch_s: float
    running: dict[int, int] = field(default_factory=dict)  # the group of each process

    def start(self, group: int, factor: float, delay_s: float = 0.0) -> None:
        if pid := os.fork():
            self.running[pid] = group
            return
        code = 1
        try:
            time.sleep(delay_s)
            self._work(factor)
            code = 0
        finally:
            os._exit(code)

    def _work(self, factor: float) -> None:
        """What a group does (tasks/batch.py)."""
        journal = Journal.begin(self.folder, self.manifest)
        while (taken := journal.claim()) is not None:
            shard, claim = taken
            with claim:
                attempt = journal.attempt(shard)
                missing = attempt.missing
                for first in range(0, len(missing), self.rows):
                    batch = missing[first : first + self.rows]
                    attempt.begin(batch)
                    time.sleep(self.batch_s * factor)
                    for index in batch:
                        attempt.finish(index, {"id": index})
                attempt.publish()


def main() -> None:
    own, overrides = divided(OWN, sys.argv[1:])
    groups, shards, shard_s = int(own["groups"]), int(own["shards"]), float(own["shard_s"])
    job = planned_job([*PAIR, *overrides], groups, shards)
    group = job.nodes[0].group
    few = max(groups // 10, 1)
    cases = [
        Case("undisturbed"), Case(f"{3 * few} kills", kills=3 * few), Case(f"{few} slow groups", slow=few),
        Case("both", kills=3 * few, slow=few),
    ]  # fmt: skip
    drawn = random.Random(int(own["seed"]))
    found = [played(case, job, group, groups, shard_s, drawn) for case in cases]
    text = report(found, job, group, groups, shard_s)
    print(text)
    print(json.dumps({"cases": [asdict(one) for one in found], "job": job.document()}))
    write(own["write"], text)
    sys.exit(0 if all(one.within and one.sound for one in found) else 1)


def planned_job(words: list[str], groups: int, shards: int) -> JobPlan:
    """The plan on the nodes that these groups fill."""
    request = planned(composed(["task=plan", *words]), 1)[1].request
    size = JobSize(shards * RECORDS, RECORDS)
    width = plan_job(request, size, [1], None).nodes[0].group.gpus
    return plan_job(request, size, [max(groups * width // request.machine.gpus, 1)], None)


def played(
    case: Case, job: JobPlan, group: GroupPlan, groups: int, shard_s: float, drawn: random.Random
) -> Outcome:
    """The job from its first group's start to its output."""
    rows, size = job.request.work.rows, job.size
    scale = shard_s / group.shard_s(size.largest, rows)
    batch_s = rows * group.record_s * scale
    factors = [SLOWER if number < case.slow else 1.0 for number in range(groups)]
    speed = sum(1 / factor for factor in factors)
    work_s = size.shards * shard_s
    lost_s = case.kills * (batch_s * max(factors) + RESTART_S)  # at most the batch under way, and the restart
    found = Outcome(
        case,
        job_s(size.shards, shard_s, groups),
        work_s / speed,
        (work_s + lost_s) / speed + shard_s * max(factors) + RESTART_S * bool(case.kills),
    )
    moments = sorted(drawn.uniform(0.05, 0.9) * found.planned_s for _ in range(case.kills))
    with tempfile.TemporaryDirectory() as home:
        manifest = Manifest("0" * 64, size.records, {}, shards_of(size.records, size.shard_size))
        fleet = Fleet(Path(home) / "work", manifest, rows, batch_s)
        began = time.monotonic()
        for number, factor in enumerate(factors):
            fleet.start(number, factor)
        follow(fleet, moments, factors, began, drawn)
        found.measured_s = time.monotonic() - began
        journal = Journal.find(fleet.folder)
        journal.merge(output := Path(home) / "out")
        lines = [json.loads(line)["id"] for line in output.read_text().splitlines()]
        answered = sum(len(past.finished) for past in journal.past_attempts())
        found.sound, found.again = lines == list(range(size.records)), answered - size.records
    return found


def follow(
    fleet: Fleet, moments: list[float], factors: list[float], began: float, drawn: random.Random
) -> None:
    """Kills a random group at each of the moments, and starts it again, until all have ended."""
    while fleet.running:
        if moments and time.monotonic() - began >= moments[0]:
            moments.pop(0)
            os.kill(drawn.choice(list(fleet.running)), signal.SIGKILL)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            number = fleet.running.pop(pid)
            if os.WIFSIGNALED(status):
                fleet.start(number, factors[number], RESTART_S)
            elif status:
                raise RuntimeError(f"group {number} ended with {status}")
        else:
            time.sleep(0.01)


def report(found: list[Outcome], job: JobPlan, group: GroupPlan, groups: int, shard_s: float) -> str:
    """A complete results file."""
    rows = [["groups", "planned, s", "measured, s", "off", "least", "most", "answered again", "output"]]
    for one in found:
        limits = f"{one.least_s:.1f}", f"{one.most_s:.1f}"
        off = f"{one.measured_s / one.planned_s - 1:+.1%}"
        seconds = f"{one.planned_s:.1f}", f"{one.measured_s:.1f}"
        right = "right" if one.sound else "WRONG"
        rows.append([one.case.name, *seconds, off, *limits, str(one.again), right])
    within = sum(one.within for one in found)
    planned_s = group.shard_s(job.size.largest, job.request.work.rows)
    return "\n".join(
        [
            f"# A planned batch job against {groups} groups", "",
            *surroundings({"groups": "processes that sleep"}),
            f"{job.size.shards} shards of {RECORDS} records. Planned: {group.option.placement.in_words()}, "
            f"{job.request.machine.in_words()}; a shard takes {planned_s:.1f} s, here {shard_s:g} s.",
            f"A killed group comes back after {RESTART_S:g} s; a slow one takes {SLOWER:g} times as long. "
            "`least` and `most` are the limits of any order of shards (bench/groups.py).",
            f"{within} of {len(found)} within these limits, give or take {ALLOWED:.0%}.", "",
            "```", *aligned(rows, 1), "```", "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    main()
