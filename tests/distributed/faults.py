"""Every fault in every phase on every kind of rank: are all gone, soon, with one cause? A table says.

    python -m tests.distributed.faults [write=FILE.md] [only=TEXT]

A cell starts fresh processes, as torchrun would, breaks one of them in its second round (or while it loads
or reads prompts), and waits for all to be gone. Faults are put in from here: the program has no door for
them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from bench.surroundings import surroundings, write
from llama_ssp import cli
from tests.warm import server

PATIENCE_S = 120  # of the harness, not of the program
TIMEOUT_S = 6  # placement.timeout_s where a rank falls silent; elsewhere nothing has to wait for it
KILL_S, STOP_S = 5.0, TIMEOUT_S + 10.0  # what is promised
PHASES = ("load", "prefill", "draft", "verify", "commit")
RUN = (
    "model=tiny", "draft=tiny_draft", 'task.prompts=["hello"]', "task.max_new_tokens=64",
    "task.ignore_eos=true", "seed=1", "output=json", "placement.on_draft_loss=stop",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What one rank said and left with."""

    code: int | None
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


@dataclass(frozen=True)
class Victim:
    """Which rank is broken, in which placement."""

    rank: int
    world: int
    placement: str


VICTIMS = {
    "leader": Victim(0, 2, "placement=leader"),
    "other rank": Victim(1, 2, "placement=leader"),
    "draft's rank": Victim(2, 3, "placement=own"),
}


def fail() -> None:
    raise MemoryError("nothing left")


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


@dataclass(frozen=True)
class Fault:
    """What befalls a rank, its exit code, the others', and what is said of it."""

    strike: Callable[[], None]
    own_code: int
    code: int
    said: str


FAULTS = {
    "SIGKILL": Fault(partial(kill, signal.SIGKILL), -signal.SIGKILL, 5, "is gone (killed by a signal"),
    "SIGTERM": Fault(partial(kill, signal.SIGTERM), 143, 143, "was stopped by SIGTERM"),
    "SIGSTOP": Fault(partial(kill, signal.SIGSTOP), -signal.SIGKILL, 5, "has not answered for"),
    "exception": Fault(fail, 5, 5, "MemoryError: nothing left"),
    "os._exit": Fault(partial(os._exit, 7), 7, 5, "or it exited without a word"),
}


def strike_at(victim: int, phase: str, strike: Callable[[], None], rank: int) -> None:
    """On that rank, the fault comes when the phase begins, in its second round if it has rounds."""
    if rank != victim:
        return
    from llama_ssp.distributed.process_group import Group

    enter = Group.enter

    def entering(self: Group, entered: str, number: int = 0) -> None:
        enter(self, entered, number)
        if entered == phase and number in (0, 2):
            Path("struck").write_text(str(time.time()))
            strike()

    Group.enter = entering  # type: ignore[method-assign]


class Started:
    """Ranks that are running, in a folder that gets what they say."""

    def __init__(self, folder: Path, world: int, *overrides: str, fault: Any = None, stdin: str = "") -> None:
        """`fault(rank)` goes first on each rank."""
        folder.mkdir(parents=True)
        (folder / "stdin").write_text(stdin)
        self._folder = folder
        context = server()
        # As torchrun does it: the store outlives the ranks.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            context.Process(
                target=_rank, args=(folder, rank, world, self._store.port, overrides, fault), daemon=True
            )
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def has_come(self, rank: int) -> bool:
        """Whether the rank waits for the others, or did."""
        return bool(self._store.check([f"llama_ssp/0/0/here/{rank}"]))

    def finish(self, patience_s: float = PATIENCE_S) -> list[Answer]:
        """When all have ended. Who has not after this long gives None, and is killed."""
        until = time.monotonic() + patience_s
        left = {process.sentinel for process in self.processes}
        while left and time.monotonic() < until:
            left -= set(wait(list(left), timeout=0.5))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        read = [
            [(self._folder / f"{rank}.{name}").read_text() for name in ("out", "err")]
            for rank in range(len(codes))
        ]
        return [Answer(code, *said) for code, said in zip(codes, read, strict=True)]


def _rank(folder: Path, rank: int, world: int, port: int, overrides: tuple[str, ...], fault: Any) -> None:
    os.chdir(folder)
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        os.dup2(os.open(f"{rank}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), stream.fileno())
    sys.stdin = open("stdin", encoding="utf-8")  # noqa: SIM115
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    sys.argv = ["llama-ssp", *overrides]
    if fault:
        fault(rank)
    cli.main()


@dataclass(frozen=True)
class Cell:
    """One fault, in one phase, on one kind of rank."""

    fault: str
    phase: str
    victim: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, {self.victim}"


CELLS = [Cell(fault, phase, victim) for fault in FAULTS for phase in PHASES for victim in VICTIMS]


@dataclass(frozen=True)
class Outcome:
    """What came of it: seconds from the fault until the last process was gone, and what was wrong."""

    seconds: float
    codes: list[int | None]
    line: str
    wrong: list[str]


def outcome(cell: Cell, folder: Path) -> Outcome:
    fault, victim = FAULTS[cell.fault], VICTIMS[cell.victim]
    strike = partial(strike_at, victim.rank, cell.phase, fault.strike)
    silent = [f"placement.timeout_s={TIMEOUT_S}"] if cell.fault == "SIGSTOP" else []
    answers = Started(folder, victim.world, *RUN, victim.placement, *silent, fault=strike).finish()
    ended = time.time()
    struck = folder / "struck"
    seconds = ended - float(struck.read_text()) if struck.exists() else float("nan")
    codes = [answer.code for answer in answers]
    lines = [line for answer in answers for line in answer.errors]
    last = [line for answer in answers for line in answer.err.splitlines()[-1:] if line.startswith("error:")]
    where = cell.phase if cell.phase in ("load", "prefill") else f"{cell.phase}, round 2"
    expected = [fault.own_code if rank == victim.rank else fault.code for rank in range(victim.world)]
    line = last[0] if last else ""
    wrong = []
    if codes != expected:
        wrong.append(f"codes {codes}, expected {expected}")
    if len(lines) != 1 or lines != last:
        wrong.append(f"{len(lines)} error lines, {len(last)} of them last")
    wrong += [f"not said: {part}" for part in (f"rank {victim.rank} ", where, fault.said) if part not in line]
    wrong += [name for answer in answers for name in ("Traceback", "terminate called") if name in answer.err]
    wrong += _records(folder, line.removeprefix("error: "))
    return Outcome(seconds, codes, line, wrong)


def _records(folder: Path, line: str) -> list[str]:
    """The survivors' records name the same cause."""
    causes = {json.loads(path.read_text())["cause"] for path in folder.glob("outputs/*/*/error.rank*.json")}
    return [] if causes == {line} else [f"records name {sorted(causes)}"]


def in_time(cell: Cell, found: Outcome) -> bool:
    return found.seconds <= (STOP_S if cell.fault == "SIGSTOP" else KILL_S)


def main() -> None:
    own = dict(argument.split("=", 1) for argument in sys.argv[1:])
    cells = [cell for cell in CELLS if own.get("only", "") in str(cell)]
    rows, bad = [], 0
    for number, cell in enumerate(cells, start=1):
        with tempfile.TemporaryDirectory() as scratch:
            found = outcome(cell, Path(scratch) / "run")
        wrong = [*found.wrong, *([] if in_time(cell, found) else ["too late"])]
        bad += bool(wrong)
        verdict = "; ".join(wrong) or "passed"
        codes = " ".join(map(str, found.codes))
        rows.append(
            f"| {cell.fault} | {cell.phase} | {cell.victim} | {found.seconds:.2f} | {codes} | "
            f"{found.line.removeprefix('error: ')} | {verdict} |"
        )
        print(f"{number}/{len(cells)} {cell}: {found.seconds:.2f} s, {verdict}", file=sys.stderr, flush=True)
    text = table(rows, bad)
    print(text)
    if "write" in own:
        write(own["write"], text)
    sys.exit(1 if bad else 0)


def table(rows: list[str], bad: int) -> str:
    """A results file that needs nothing beside it."""
    return "\n".join(
        [
            "# Faults: what ends, how soon, and what is said",
            "",
            *surroundings({}),
            f"gloo ranks on one machine. placement.timeout_s={TIMEOUT_S} for SIGSTOP.",
            "",
            f"{len(rows) - bad} of {len(rows)} cells passed. A cell passes when all processes are gone",
            f"within {KILL_S:g} s of the fault ({STOP_S:g} s for SIGSTOP: the timeout + 10 s), with the exit",
            "codes shown (negative: killed by that signal), and one rank's last line on standard error, the",
            "only error there is, names the rank, the phase, the round and what happened.",
            "",
            "| fault | phase | on | seconds | exit codes by rank | said | |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
