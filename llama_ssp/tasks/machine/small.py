"""Measures a GPU in a small process of each rank, which is ended where it hangs: then the check says so.

The small processes of all ranks sum together, over NCCL, with ranks of their own. Each writes a line of JSON
for each step that it has done, and NCCL writes into a file how it connects the GPUs.
"""

import json
import re
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from llama_ssp.distributed.bounded import Said, said_within
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.launcher import of_small_process
from llama_ssp.distributed.process_group import open_ranks
from llama_ssp.distributed.signals import end_with_parent, leave
from llama_ssp.errors import DISTRIBUTED, RunError, first_line, one_line, shortened
from llama_ssp.tasks.machine.device import Measure, steps
from llama_ssp.tasks.machine.facts import START, Figures, Measured

COMMAND = [sys.executable, "-m", "llama_ssp.tasks.machine.small"]
LIMIT_S = 30.0  # for all steps, those of importing torch and connecting NCCL among them
WITH_PEERS = "peers"  # the word by which a small process copies between GPUs, too
# Kinds of lines.
BEGUN = "begun"
DONE = "done"
FAILED = "failed"
MAX_REASON = 300  # characters
TRANSPORT = re.compile(r"Channel \d+\S* : .* via (\S+)")


def measured_here(measures: Iterable[Measure]) -> Measured:
    """Takes the steps in this process."""
    figures: dict[str, Figures] = {}
    for name, measure in measures:
        try:
            figures[name] = measure()
        except (RunError, RuntimeError, OSError) as error:
            return Measured(figures=figures, failed=name, why=_reason(error))
    return Measured(figures=figures)


def measured_apart(device: torch.device, ranks: Ranks, tries_peers: bool) -> Measured:
    """Takes the steps in a small process of this rank; all ranks call it."""
    command = [*COMMAND, str(device), *([WITH_PEERS] if tries_peers else [])]
    with tempfile.TemporaryDirectory(prefix="llama-ssp-check-") as folder:
        log = Path(folder, "nccl")
        nccl = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
        said = said_within(LIMIT_S, command, environment=of_small_process(ranks, "check") | nccl)
        nccl_log = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return measured_of(said, nccl_log)


def measured_of(said: Said, nccl_log: str = "") -> Measured:
    """Returns what a small process has said of each step, and why it ended early, if it did."""
    why: str | None = None
    if said.is_late:
        why = f"no end after {LIMIT_S:g} s"
    elif said.fails:
        why = f"its process did not start: {said.fails}"
    elif said.code:
        why = _last_line(said.err)

    figures: dict[str, Figures] = {}
    step = START
    for line in said.out.splitlines():
        try:
            kind, name, given = json.loads(line)
        except ValueError:  # of a library, or cut off
            continue
        step = name
        if kind == DONE:
            figures[name] = given
            step = ""
        elif kind == FAILED:
            why = given
    # Between two steps it ends because another rank has failed, which says so itself.
    is_failed = why is not None and step != ""
    return Measured(
        figures=figures,
        failed=step if is_failed else "",
        why=(why or "") if is_failed else "",
        is_late=said.is_late,
        transports=tuple(sorted(set(TRANSPORT.findall(nccl_log)))),
    )


def _reason(error: BaseException) -> str:
    """Returns why a step failed, in a line."""
    text = str(error) if isinstance(error, RunError) else first_line(error)
    return shortened(one_line(text), MAX_REASON)


def _last_line(errors: str) -> str:
    """Returns what a process said last on standard error."""
    line = errors.strip().rpartition("\n")[2].removeprefix("error: ")
    return shortened(one_line(line), MAX_REASON) or "it ended without a word"


def main() -> None:
    """Takes the steps on the device that is named; exits with 0, or with a line on standard error."""
    end_with_parent(signal.SIGKILL)
    device = torch.device(sys.argv[1])
    opened = list[Ranks]()

    def open_group() -> Ranks:
        opened.append(open_ranks(device))
        return opened[0]

    for name, measure in steps(device, open_group, WITH_PEERS in sys.argv[2:]):
        _say(BEGUN, name, None)
        try:
            _say(DONE, name, measure())
        except BaseException as error:
            cause = opened[0].cause_of(error) if opened else error
            _say(FAILED, name, _reason(cause))
            leave(DISTRIBUTED, _reason(cause))
    for ranks in opened:
        ranks.close()


def _say(kind: str, name: str, given: object) -> None:
    print(json.dumps([kind, name, given]), flush=True)


if __name__ == "__main__":
    main()
