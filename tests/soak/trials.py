"""One scenario: the command is run, struck, and started again; what was wrong with it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llama_ssp.batch.attempt_log import read_part
from tests.processes import kill_all
from tests.soak.processes import MARK, Watcher, left_of, marked
from tests.soak.scenarios import (
    DISK,
    INT,
    KILL,
    KILL_RANK,
    NOTHING,
    STOP_RANK,
    TERM,
    WITHOUT_DRAFT_MODEL,
    Scenario,
)

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = str(ROOT / "launch" / "run.py")
PATIENCE_S = 240.0
SILENCE_S = 6  # placement.timeout_s where a rank is stopped
GONE_S = 20.0  # for all that a run started to be gone, once it has ended or been killed
RECORDS, ROOM = 20, 6000  # bytes of a file that a full disk takes, at most
JOB = ("task.input=in.jsonl", "task.output=out.jsonl", "task.max_new_tokens=24", "task.shard_size=7")
PROMPTS = ("Once upon a time", "3 * 4 =", "The king said that", "12 * 34 =")
OF_TASK = {
    "generate": (f"task.prompts={json.dumps(PROMPTS)}", "task.max_new_tokens=40"),
    "measure": ("task.prompts=[Once]", "task.max_new_tokens=8", "task.repeats=2", "task.ks=[2]"),
    "batch": JOB,
}
# Exit codes of a command that was struck; 0, if it was done before. The launcher has one for all failures.
CODES = {TERM: (143, -15), INT: (130, -2), KILL: (-9,), KILL_RANK: (), STOP_RANK: (), DISK: (6,)}
OF_LAUNCHER = (1, -15, -2, -9)
TRACE = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+.*", re.M)
LAUNCHERS = ("torch/distributed/elastic", "torch/distributed/launcher")


def of_launcher(trace: str) -> bool:
    """Whether torchrun failed, not a rank. Struck early, it still imports torch (`python -m torch...`)."""
    importing = "<frozen runpy>" in trace and "llama_ssp/" not in trace
    return importing or any(name in trace for name in LAUNCHERS)


def of_start(trace: str) -> bool:
    """Whether a Ctrl-C came before the first function of the program ran, which turns tracebacks off."""
    functions = re.findall(r"/(?:llama_ssp|launch)/.*, in (?!<module>)", trace)
    return trace.endswith("KeyboardInterrupt") and not functions


@dataclass
class Ended:
    """How one run of the command ended."""

    code: int | None  # None: it did not, in PATIENCE_S
    out: str
    err: str
    seconds: float
    struck: bool

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the command reports of itself, if it came to that."""
        try:
            found = json.loads(self.out.splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return found if isinstance(found, dict) else None

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def traces(self) -> list[str]:
        """Python's tracebacks, but for the launcher's own, and those of Python's start."""
        return [one for one in TRACE.findall(self.err) if not (of_launcher(one) or of_start(one))]


@dataclass
class Trial:
    """What came of a scenario."""

    scenario: Scenario
    runs: int = 0
    struck: int = 0
    seconds: float = 0.0
    tied: bool = False  # the answers of a job differ by rounding alone
    wrong: list[str] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)


class Bench:
    """Where trials are made: knows how long runs take here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._took: dict[tuple[str, int], float] = {}

    def try_(self, scenario: Scenario, number: int) -> Trial:
        folder = self._folder / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "in.jsonl").write_text("".join(json.dumps(record(i)) + "\n" for i in range(RECORDS)))
        trial = Trial(scenario)
        first = self._run(trial, scenario, folder)
        if scenario.task == "batch":
            self._finish(trial, first, folder)
        return trial

    def _finish(self, trial: Trial, last: Ended, folder: Path) -> None:
        """The job is started again until it is done; then it must be as if nothing had happened."""
        calm = replace(trial.scenario, fault=NOTHING)
        if trial.struck and last.code != 0:
            last = self._run(trial, calm, folder)
        if last.code != 0:
            return
        alone = replace(calm, ranks=1, placement="auto", rows=1)
        self._run(trial, alone, folder, "task.output=calm.jsonl")
        if wrong := differing(folder / "out.jsonl", folder / "calm.jsonl"):
            if self._tied(trial, calm, alone, folder):
                trial.tied = True
            else:
                trial.wrong += wrong
        trial.wrong += twice_done(folder / "out.jsonl.work" / "parts")

    def _tied(self, trial: Trial, calm: Scenario, alone: Scenario, folder: Path) -> bool:
        """Whether two fp32 roundings of a number lay on two sides of a draw's border.

        Then the same job, undisturbed, gives the answers that were found, and in fp64 there is no difference.
        """
        self._run(trial, calm, folder, "task.output=again.jsonl")
        fine = ["model.dtype=fp64", *(["draft.dtype=fp64"] if calm.pair not in WITHOUT_DRAFT_MODEL else [])]
        self._run(trial, calm, folder, "task.output=fine.jsonl", *fine)
        self._run(trial, alone, folder, "task.output=fine_calm.jsonl", *fine)
        pairs = ("out", "again"), ("fine", "fine_calm")
        return not any(differing(*(folder / f"{name}.jsonl" for name in names)) for names in pairs)

    def _run(self, trial: Trial, scenario: Scenario, folder: Path, *more: str) -> Ended:
        key = scenario.task, scenario.ranks
        ended = run(scenario, folder, self._took.get(key, 10.0), *more)
        trial.runs += 1
        trial.struck += ended.struck
        trial.seconds += ended.seconds
        if ended.code == 0 and not ended.struck:
            self._took[key] = ended.seconds
        trial.wrong += judged(scenario, ended)
        if (summary := ended.summary) is not None:
            trial.summaries.append(summary)
        return ended


def record(index: int) -> dict[str, Any]:
    """Prompts and answers of several lengths; some records have settings of their own."""
    own: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_k": 9}, {"max_new_tokens": 3}, {"seed": 5}]
    text = " ".join([PROMPTS[index % len(PROMPTS)]] * (1 + index % 3))
    return {"id": f"record {index}", "prompt": text, **own[index % 4]}


def command(scenario: Scenario, *more: str) -> list[str]:
    alone = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
    ranks = [*alone, f"--nproc-per-node={scenario.ranks}"]
    silence = [f"placement.timeout_s={SILENCE_S}"] if scenario.fault == STOP_RANK else []
    words = [*scenario.overrides, *OF_TASK[scenario.task], *silence, "output=json", "out=null", *more]
    return [sys.executable, *(ranks if scenario.ranks > 1 else []), LAUNCH, *words]


def run(scenario: Scenario, folder: Path, expected_s: float, *more: str) -> Ended:
    """The command from start to end, with its fault."""
    mark = uuid.uuid4().hex
    own = {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    disk = int(ROOM * scenario.moment) if scenario.fault == DISK else None
    began = time.monotonic()
    process = subprocess.Popen(
        command(scenario, *more), cwd=folder, env={**os.environ, **own}, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=cramped(disk),
    )  # fmt: skip
    struck = threading.Event()
    ended = threading.Event()
    fate = threading.Thread(
        target=strike,
        args=(scenario, process.pid, mark, scenario.moment * expected_s, ended, struck),
        daemon=True,
    )
    fate.start()
    code: int | None
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        kill_all(f"{MARK}={mark}")
        out, err = process.communicate()
        code = None
    ended.set()
    fate.join()
    seconds = time.monotonic() - began
    if left := left_of(mark, GONE_S):
        kill_all(f"{MARK}={mark}")
        err += "".join(f"\nerror: process {one.pid} outlived its command" for one in left)
    return Ended(code, out, err, seconds, struck.is_set() or disk is not None)


def cramped(most: int | None) -> Callable[[], None] | None:
    """In the child: no file may grow beyond so many bytes."""
    if most is None:
        return None
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def strike(
    scenario: Scenario, pid: int, mark: str, after_s: float, ended: threading.Event, struck: threading.Event
) -> None:
    """The fault, when its moment has come, unless the run has ended before."""
    if scenario.fault in (NOTHING, DISK) or ended.wait(after_s):
        return
    number = {TERM: signal.SIGTERM, INT: signal.SIGINT, STOP_RANK: signal.SIGSTOP}
    victim: int | None = pid
    if scenario.fault in (KILL_RANK, STOP_RANK):
        rank = scenario.seed % scenario.ranks
        while (victim := worker(mark, rank)) is None:
            if ended.wait(0.1):
                return
    if victim is not None and not ended.is_set():
        try:
            os.kill(victim, number.get(scenario.fault, signal.SIGKILL))
            struck.set()
        except ProcessLookupError:
            pass


def worker(mark: str, rank: int) -> int | None:
    """The rank itself came before all that it may have started."""
    return min((one.pid for one in marked(mark) if one.rank == rank), default=None)


def judged(scenario: Scenario, ended: Ended) -> list[str]:
    """What is wrong with how it ended."""
    if ended.code is None:
        return [f"it had not ended after {PATIENCE_S:g} s"]
    wrong = []
    allowed: tuple[int, ...] = (0,)
    if ended.struck:
        allowed += OF_LAUNCHER if scenario.ranks > 1 else CODES[scenario.fault]
    if ended.code not in allowed:
        said = ended.errors or ended.err.splitlines()  # of one taken down, its launcher's
        wrong.append(f"exit code {ended.code}, expected one of {allowed}: {' / '.join(said[-3:])}")
    if ended.code == 0 and (ended.summary or {}).get("status") != "done":
        wrong.append(f"done, but reported as {(ended.summary or {}).get('status')}")
    wrong += [f"a traceback ending in {trace.splitlines()[-1].strip()}" for trace in ended.traces]
    outlived = [line for line in ended.errors if "outlived" in line]
    errors = len(ended.errors) - len(outlived)
    if errors > (1 if ended.struck else 0):
        wrong.append(f"{errors} errors: {' / '.join(ended.errors)}")
    return wrong + outlived


def differing(found: Path, calm: Path) -> list[str]:
    """Where two files of answers differ."""
    if not (found.exists() and calm.exists()):
        return ["the job has no output"]
    pairs = zip(found.read_text().splitlines(), calm.read_text().splitlines(), strict=False)
    lines = [number for number, (one, other) in enumerate(pairs, start=1) if one != other]
    if found.read_bytes() == calm.read_bytes():
        return []
    return [f"answers differ from those of an undisturbed process, in lines {lines}"]


def twice_done(parts: Path) -> list[str]:
    """Records that more than one attempt has finished: each should be computed once."""
    seen: dict[int, str] = {}
    wrong = []
    for path in sorted(parts.glob("*.jsonl")):
        for index in read_part(path).finished:
            if index in seen:
                wrong.append(f"record {index} was finished in {seen[index]} and in {path.name}")
            seen[index] = path.name
    return wrong


def watched(scenario: Scenario, folder: Path, records: int) -> tuple[list[Any], Ended]:
    """A long job in one process: what it held from its first answer to its end, and how it ended."""
    folder.mkdir(parents=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(record(i)) + "\n" for i in range(records)))
    began = time.monotonic()
    process = subprocess.Popen(
        command(scenario), cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    parts = folder / "out.jsonl.work" / "parts"
    watcher = Watcher(process.pid, lambda: any(read_part(path).finished for path in parts.glob("*.jsonl")))
    out, err = process.communicate(timeout=PATIENCE_S * 4)
    return watcher.stop(), Ended(process.returncode, out, err, time.monotonic() - began, False)
