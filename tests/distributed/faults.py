"""Every fault in every phase on every kind of rank: are all gone, soon, with one cause? A table says.

    python -m tests.distributed.faults [by=command] [write=FILE.md] [only=TEXT]

A cell starts ranks by torchrun, or by the command itself (ranks=N), breaks one of them in its second round,
or while it starts, loads or reads prompts, and waits for all to be gone. In "start" it breaks before it has
imported torch. Faults are put in from here: the program has no door for them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from bench.surroundings import report
from llama_ssp import cli
from llama_ssp.distributed.signals import CODE_FILE
from tests.processes import stands_still, wait_for
from tests.warm import ROOT, Started, start

PATIENCE_S = 120  # of the harness, not of the program
TIMEOUT_S = 6  # placement.timeout_s where a rank falls silent; elsewhere nothing has to wait for it
LIMIT_S = 15.0  # from the fault until nobody is left
TORCHRUN = ["-m", "torch.distributed.run"]
TORCHRUNS_OWN = re.compile(r"[WEI]\d{4} |\*{5}|$")  # lines of its log
PHASES = ("load", "prefill", "draft", "verify", "commit")
EARLY = "start"  # the phase in which no rank can say or find anything: whoever started them has to
RUN = (
    "model=tiny", "draft=tiny_draft", 'task.prompts=["hello"]', "task.max_new_tokens=64",
    "task.ignore_eos=true", "seed=1", "output=json", "placement.on_draft_loss=stop",
)  # fmt: skip


class Victim(NamedTuple):
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


class Fault(NamedTuple):
    """What befalls a rank, its exit code, the others', and what is said; `tells`: by the rank itself."""

    strike: Callable[[], None]
    own_code: int
    code: int
    said: str
    tells: bool = False


FAULTS = {
    "SIGKILL": Fault(partial(kill, signal.SIGKILL), -signal.SIGKILL, 5, "is gone (killed by a signal"),
    "SIGTERM": Fault(partial(kill, signal.SIGTERM), 143, 143, "was stopped by SIGTERM", tells=True),
    "SIGSTOP": Fault(partial(kill, signal.SIGSTOP), -signal.SIGKILL, 5, "has not answered for"),
    "exception": Fault(fail, 5, 5, "MemoryError: nothing left", tells=True),
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
            struck(strike)

    Group.enter = entering  # type: ignore[method-assign]


class Cell(NamedTuple):
    fault: str
    phase: str
    victim: str

    @property
    def words(self) -> list[str]:
        silent = [f"placement.timeout_s={TIMEOUT_S}"] if self.fault == "SIGSTOP" else []
        return [*RUN, VICTIMS[self.victim].placement, *silent]


CELLS = [
    *(Cell(fault, EARLY, victim) for fault in ("SIGKILL", "os._exit") for victim in VICTIMS),
    *(Cell(fault, phase, victim) for fault in FAULTS for phase in PHASES for victim in VICTIMS),
]
# Seconds from the fault until the last process was gone, what was said, and what was wrong.
Outcome = tuple[float, str, list[str]]


def outcome(cell: Cell, folder: Path) -> Outcome:
    """The cell on ranks that are started here, in a moment, as torchrun would."""
    fault, victim = FAULTS[cell.fault], VICTIMS[cell.victim]
    strike = partial(strike_at, victim.rank, cell.phase, fault.strike)
    answers = Started(folder, victim.world, *cell.words, fault=strike).finish()
    codes = [answer.code for answer in answers]
    expected = [fault.own_code if rank == victim.rank else fault.code for rank in range(victim.world)]
    wrong = [f"codes {codes}, expected {expected}"] if codes != expected else []
    return _judged(cell, folder, "".join(answer.err for answer in answers), wrong)


def as_rank(fault: str, phase: str, victim: str) -> NoReturn:
    """The command on a rank that a launcher started with FAULT="SIGKILL,verify,other rank".

    In phase "start" the fault may be an override that only the victim has: "speculation.k=-1,start,leader".
    """
    rank = int(os.environ["RANK"])
    Path(f"{rank}.pid").write_text(str(os.getpid()))
    if phase == EARLY and rank == VICTIMS[victim].rank:
        if fault in FAULTS:
            wait_for(lambda: len([*Path().glob("*.pid")]) == int(os.environ["WORLD_SIZE"]))
            struck(FAULTS[fault].strike)
        sys.argv.append(fault)
    elif phase != EARLY and fault:
        strike_at(VICTIMS[victim].rank, phase, FAULTS[fault].strike, rank)
    cli.main()


def struck(strike: Callable[[], None]) -> None:
    Path("struck").write_text(str(time.time()))
    strike()


def launched(folder: Path, world: int, fault: str, *words: str) -> Any:
    """torchrun's process; its ranks run `as_rank`, and what they say is in ranks.err."""
    streams = [os.devnull, folder / "ranks.out", folder / "ranks.err"]
    run = ["--standalone", "--nproc-per-node", str(world), "-m", "tests.distributed.faults", *words]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FAULT": fault}
    return start([*TORCHRUN, *run], folder, streams, {**os.environ, **own, CODE_FILE: str(folder / "code")})


def ranks_with_faults() -> None:
    """Has the command in this process start ranks that run `as_rank`."""
    from llama_ssp.distributed import launcher

    started = subprocess.Popen

    def starting(command: list[str], **how: Any) -> Any:
        at = command.index("llama_ssp")
        return started([*command[:at], "tests.distributed.faults", *command[at + 1 :]], **how)

    replaced = {**vars(subprocess), "Popen": starting}
    launcher.subprocess = SimpleNamespace(**replaced)  # type: ignore[assignment]


def of_command(folder: Path, world: int, fault: str, *words: str) -> Any:
    """The process of `ranks=N`; its ranks run `as_rank`."""
    folder.mkdir(parents=True, exist_ok=True)
    streams = [os.devnull, folder / "ranks.out", folder / "ranks.err"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FAULT": fault}
    run = ["-m", "llama_ssp", *words, f"ranks={world}"]
    return start(run, folder, streams, {**os.environ, **own}, ranks_with_faults)


def by_command(cell: Cell, folder: Path) -> Outcome:
    """The cell on ranks that the command starts; its exit code is the cause's."""
    fault, world = FAULTS[cell.fault], VICTIMS[cell.victim].world
    process = of_command(folder, world, ",".join(cell), "-q", *cell.words)
    process.join(PATIENCE_S)
    ended, code = time.time(), process.exitcode
    process.kill()
    wrong = [f"code {code}, expected {fault.code}"] if code != fault.code else []
    return _judged(cell, folder, (folder / "ranks.err").read_text(), wrong + _left(folder, world), ended)


def by_torchrun(cell: Cell, folder: Path) -> Outcome:
    """The cell under torchrun itself. Its own exit code is always 1; ours is in the file for it."""
    victim, world, _ = VICTIMS[cell.victim]
    process = launched(folder, world, ",".join(cell), "-q", *cell.words)
    process.join(PATIENCE_S)
    ended = time.time()
    wrong = ["torchrun has not ended"] * (process.exitcode is None)
    process.kill()
    wrong += _left(folder, world)

    # torchrun ends with a traceback and a summary of its own.
    said, _, summary = (folder / "ranks.err").read_text().rpartition("Traceback (most recent call last):")
    ours = [line for line in said.splitlines() if not TORCHRUNS_OWN.match(line)]
    if (
        cell.phase == EARLY
    ):  # torchrun alone knows of the rank; it stops the others, and they say at most that
        seconds = ended - float((folder / "struck").read_text())
        wrong += [] if re.search(rf"Root Cause.*rank +: {victim}\b", summary, re.DOTALL) else ["not named"]
        errors = [line for line in ours if line.startswith("error:")]
        wrong += [f"said: {errors}"] * (len(errors) > 1)
        wrong += ["too late"] * (seconds > LIMIT_S)
        return seconds, f"torchrun's summary names rank {victim}", wrong

    code, expected = (folder / "code").read_text().strip(), str(FAULTS[cell.fault].code)
    wrong += [f"code {code}, expected {expected}"] * (code != expected)
    wrong += [f"first line: {ours[:1]}"] * (not ours or not ours[0].startswith("error:"))
    return _judged(cell, folder, said, wrong, ended)


def _left(folder: Path, world: int) -> list[str]:
    """Returns what is wrong with the processes of ranks that have run."""
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    wrong = [f"{len(pids)} ranks of {world}"] * (len(pids) != world)
    return wrong + [f"process {pid} is left" for pid in pids if not stands_still(pid)]


def _judged(cell: Cell, folder: Path, said: str, wrong: list[str], ended: float | None = None) -> Outcome:
    """Whether all of it took little time, and one line names the rank and what happened, as records do."""
    struck = folder / "struck"
    began = float(struck.read_text()) if struck.exists() else float("nan")
    seconds = (ended or time.time()) - began
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    line = lines[0].removeprefix("error: ") if lines else ""
    causes = {json.loads(path.read_text())["cause"] for path in folder.glob("outputs/*/*/error.rank*.json")}
    wrong = wrong + [f"{len(lines)} error lines"] * (len(lines) != 1)
    wrong += [f"not said: {part}" for part in _parts(cell) if not re.search(part, line)]
    wrong += [name for name in ("Traceback", "terminate called") if name in said]
    wrong += ["too late"] * (not seconds <= LIMIT_S)
    if causes != (set() if cell.phase == EARLY else {line}):
        wrong.append(f"records name {sorted(causes)}")
    return seconds, line, wrong


def _parts(cell: Cell) -> list[str]:
    """Returns what a cell's line has to have, as patterns: the rank, what happened, and where."""
    fault, rank = FAULTS[cell.fault], VICTIMS[cell.victim].rank
    if cell.phase == EARLY:
        return [rf"^rank {rank} (was killed by SIGKILL|ended with 7) during start$"]
    in_rounds = cell.phase not in ("load", "prefill")
    if fault.tells:
        where = f"{cell.phase}, round 2" if in_rounds else cell.phase
    else:  # the others know the phase at once, and the round by the heartbeat of each second
        where = "last heard of in " + (
            "(draft|verify|commit), round [12]$" if in_rounds else f"{cell.phase}$"
        )
    return [rf"^rank {rank} ", re.escape(fault.said), where]


BY = {"torchrun": by_torchrun, "command": by_command}
HEAD = f"""\
gloo ranks on one machine, by %s. placement.timeout_s={TIMEOUT_S} for SIGSTOP.

%d of %d cells passed: who started the ranks and all of them were gone within {LIMIT_S:g} s; the first line on
standard error that is not torchrun's log is our only one, and names the rank, what happened, and the phase
(and the round, where the rank itself says it); the exit code, under torchrun that in LLAMA_SSP_CODE_FILE, is
the cause's (5, or 143 for SIGTERM), and every record of a rank names that cause. torchrun's own summary is
not counted, except that of a rank which ends in "start", of which torchrun alone knows.

| fault | phase | on | seconds | said | |
|---|---|---|---|---|---|"""


def main() -> None:
    if "FAULT" in os.environ:
        as_rank(*os.environ["FAULT"].split(","))
    own = dict(argument.split("=", 1) for argument in sys.argv[1:])
    by = own.get("by", "torchrun")
    cells = [cell for cell in CELLS if own.get("only", "") in ", ".join(cell)]
    rows, passed = [], 0
    for cell in cells:
        with tempfile.TemporaryDirectory() as folder:
            seconds, line, wrong = BY[by](cell, Path(folder))
        passed += not wrong
        rows.append(f"| {' | '.join(cell)} | {seconds:.2f} | {line} | {'; '.join(wrong) or 'passed'} |")
        print(rows[-1], file=sys.stderr, flush=True)
    title = "Faults: what ends, how soon, and what is said"
    report(own.get("write", ""), title, {}, HEAD % (by, passed, len(cells)), *rows)
    sys.exit(passed < len(cells))


if __name__ == "__main__":
    main()
