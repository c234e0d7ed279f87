"""Whatever befalls a rank, all end, with one cause; whoever starts them, none is left behind.

`python -m tests.distributed.faults` goes through every cell and measures how soon; here a few stand for all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.distributed.faults import ROOT, RUN, TORCHRUN, Cell, Started, launched, outcome, strike_at
from tests.processes import free_port, wait_for
from tests.warm import as_launched, start

pytestmark = pytest.mark.slow

PATIENCE_S = 120
LAUNCH = str(ROOT / "launch" / "run.py")
# So long a run would have compiled steps, which take a minute of a core to make.
ENDLESS = (*RUN, "task.max_new_tokens=100000", "model.context=200000", "draft.context=200000", "engine=eager")
SOME = [
    Cell("SIGKILL", "load", "leader"),
    Cell("SIGKILL", "verify", "other rank"),
    Cell("SIGKILL", "draft", "draft's rank"),
    Cell("SIGTERM", "prefill", "other rank"),
    Cell("SIGTERM", "verify", "leader"),
    Cell("SIGSTOP", "load", "other rank"),
    Cell("SIGSTOP", "draft", "leader"),
    Cell("exception", "commit", "leader"),
    Cell("exception", "load", "draft's rank"),
    Cell("os._exit", "commit", "other rank"),
    Cell("os._exit", "draft", "leader"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("cell", SOME, ids=str)
def test_all_end_with_one_cause(cell: Cell, tmp_path: Path):
    assert outcome(cell, tmp_path / "run").wrong == []


def stop_the_other_in_the_second_round(rank: int) -> None:
    def strike() -> None:
        Path(f"there-{rank}").touch()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    strike_at(rank, "verify", strike, rank)


def test_a_signal_reaches_a_rank_that_waits_in_a_collective(tmp_path: Path):
    """The other rank is stopped, and the timeout far away."""
    run = Started(tmp_path / "run", 2, *RUN, fault=stop_the_other_in_the_second_round)
    leader, other = run.processes
    wait_for(lambda: all((tmp_path / "run" / f"there-{rank}").exists() for rank in range(2)))
    assert leader.pid and other.pid
    os.kill(leader.pid, signal.SIGTERM)
    leader.join(PATIENCE_S)
    assert leader.exitcode == 143
    other.kill()
    said = run.finish()[0].errors
    assert len(said) == 1 and "rank 0 was stopped by SIGTERM during verify, round 2" in said[0]


def go_before_the_first_sum(rank: int) -> None:
    """The leader goes while the other rank waits for it in torch's store, as NCCL does."""
    from torch.distributed.distributed_c10d import _world

    from llama_ssp.distributed.process_group import Group

    def waiting(self: Any) -> None:
        store = _world.pg_map[self._tensors][1]
        store.set(f"waits/{rank}", "")
        if rank == 0:
            store.get("waits/1")
            os.kill(os.getpid(), signal.SIGKILL)
        store.get("id")

    Group.barrier = waiting  # type: ignore[method-assign]


def test_a_rank_that_waits_in_the_store_ends_with_the_other(tmp_path: Path):
    answers = Started(tmp_path / "run", 2, *RUN, "placement=leader", fault=go_before_the_first_sum).finish()
    assert [answer.code for answer in answers] == [-signal.SIGKILL, 5]
    (line,) = answers[1].errors
    assert "rank 0 is gone (killed by a signal" in line


def skip_a_message(rank: int) -> None:
    """The other rank takes an old message for the third."""
    from llama_ssp.distributed.process_group import Group

    hear, heard = Group.broadcast_ints, []

    def hearing(self: Group, values: list[int]) -> list[int]:
        if self._watch.place.round == 3:
            return list(heard[-1])
        heard.append(hear(self, values))
        return heard[-1]

    if rank == 1:
        Group.broadcast_ints = hearing  # type: ignore[method-assign]


def skip_a_sum(rank: int) -> None:
    """The other rank leaves out one sum of the third round's forward."""
    from llama_ssp.distributed.process_group import Group

    add, skipped = Group.all_reduce, []

    def adding(self: Group, tensor: Any) -> Any:
        if self._watch.place.round == 3 and not skipped:
            skipped.append(tensor)
            return tensor
        return add(self, tensor)

    if rank == 1:
        Group.all_reduce = adding  # type: ignore[method-assign]


def another_configuration(rank: int) -> None:
    if rank == 1:
        sys.argv.append("sampling.temperature=0.7")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (skip_a_message, ["rank 1 failed during verify, round 3: the ranks are out of step",
                          "3 rounds are decided here, 2 with the leader"]),
        (skip_a_sum, ["gets no answer", "rank 0: verify, round 3", "rank 1: verify, round 3"]),
        (another_configuration, ["during start: the ranks differ in configuration", "ranks 1 unlike rank 0",
                                 "sampling.temperature 0.7 on rank 1, 1.0 on rank 0"]),
    ],
    ids=["message", "sum", "configuration"],
)  # fmt: skip
def test_ranks_out_of_step_are_found(fault: Any, said: list[str], tmp_path: Path):
    answers = Started(
        tmp_path / "run", 2, *RUN, "placement=leader", "placement.timeout_s=6", fault=fault
    ).finish()
    assert [answer.code for answer in answers] == [5, 5]
    (line,) = [line for answer in answers for line in answer.errors]
    assert all(part in line for part in said), line


K, FOLDER = "speculation.k=-1", "model=/no/such"
OUT_OF_RANGE, NO_FOLDER = "speculation.k is out of range", "model: there is no such folder or file"
IMPORT = "a package cannot be imported; import of llama_ssp.tasks.runner halted"


def fail_at_start(own: dict[int, str], rank: int) -> None:
    """Ranks with settings of their own, or without a module."""
    setting = own.get(rank, "")
    if setting == IMPORT:
        sys.modules["llama_ssp.tasks.runner"] = None  # type: ignore[assignment]
    elif setting:
        group = setting.partition("=")[0]
        sys.argv[1:] = [*(word for word in sys.argv[1:] if not word.startswith(f"{group}=")), setting]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("own", "codes", "said"),
    [
        ({1: K}, [2, 2], {1: f"rank 1: {OUT_OF_RANGE}"}),
        ({1: FOLDER}, [4, 4], {1: f"rank 1: {NO_FOLDER}"}),
        ({1: IMPORT}, [5, 5], {1: f"rank 1: {IMPORT}"}),
        ({0: FOLDER}, [4, 4], {0: NO_FOLDER}),
        ({0: K, 1: K}, [2, 2], {0: OUT_OF_RANGE}),
        ({0: K, 1: FOLDER}, [2, 2], {0: OUT_OF_RANGE}),
    ],
    ids=["setting", "folder", "import", "leader", "alike", "each-its-own"],
)
def test_a_cause_before_the_ranks_have_met_is_said_once(
    own: dict[int, str], codes: list[int], said: dict[int, str], tmp_path: Path
):
    fault = partial(fail_at_start, own)
    answers = Started(tmp_path / "run", 2, *RUN, "out=null", fault=fault).finish()
    assert [answer.code for answer in answers] == codes, answers
    for rank, answer in enumerate(answers):
        assert answer.out == "" and len(answer.errors) == (rank in said), answers
        assert answer.err.startswith(f"error: {said.get(rank, '')}") or rank not in said


def test_torchrun_does_not_hide_the_cause_of_a_rank(tmp_path: Path):
    """It stops the other rank, which then has no cause of its own."""
    launcher = launched(tmp_path, 2, f"{K},start,other rank", *RUN, "out=null")
    code, (line,) = ended(launcher, tmp_path)
    assert code == 1 and line.startswith(f"error: rank 1: {OUT_OF_RANGE}")


def come_late(rank: int) -> None:
    if rank == 1:
        time.sleep(PATIENCE_S)


def test_a_rank_that_is_stopped_while_it_waits_for_the_others(tmp_path: Path):
    run = Started(tmp_path / "run", 2, *RUN, "out=null", fault=come_late)
    leader, other = run.processes
    wait_for(lambda: run.has_come(0))
    assert leader.pid
    os.kill(leader.pid, signal.SIGTERM)
    leader.join(PATIENCE_S)
    other.kill()
    answer = run.finish()[0]
    assert answer.code == 143
    assert answer.err.splitlines()[-1] == "error: rank 0 was stopped by SIGTERM during start"


def test_a_rank_that_never_comes(tmp_path: Path):
    leader, other = Started(
        tmp_path / "run", 2, *RUN, "out=null", "placement.timeout_s=3", fault=come_late
    ).finish(20)
    assert leader.code == 5 and other.code is None
    assert "not all ranks have come; rank 0 of 2; found no rank 1 after 3 s" in leader.errors[0]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"MASTER_PORT": "many"}, "MASTER_PORT is not a usable number"),
        ({"TORCHELASTIC_USE_AGENT_STORE": ""}, "several ranks were asked for, but not by torchrun"),
    ],
)
def test_an_environment_that_torchrun_does_not_make(own: dict[str, str], said: str, tmp_path: Path):
    streams = [os.devnull, tmp_path / "out", tmp_path / "err"]
    env = {**os.environ, **as_launched(0, 2, free_port()), **own}
    process = start([LAUNCH, *RUN, "out=null"], tmp_path, streams, env)
    process.join(PATIENCE_S)
    (line,) = streams[2].read_text().splitlines()
    assert process.exitcode == 5 and line.startswith(f"error: {said}")


ROUND = " at 0: "  # in the line of a first round in a trace


def wait_for_round(said: Path) -> None:
    """`said` has a rank's output, and the errors are in a file of that name beside it."""
    wait_for(lambda: said.exists() and ROUND in said.read_text(), said.with_suffix(".err").read_text)


def ended(launcher: Any, folder: Path) -> tuple[int, list[str]]:
    """The exit code, and the lines of errors, once no rank is left."""
    errors = folder / "ranks.err"
    wait_for(lambda: launcher.exitcode is not None, errors.read_text)
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert len(pids) == 2, errors.read_text()
    wait_for(lambda: not any(alive(pid) for pid in pids), errors.read_text)
    said = errors.read_text().splitlines()
    return launcher.exitcode, [line for line in said if line.startswith("error:")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_torchrun_leaves_nobody_behind(tmp_path: Path):
    code, (line,) = ended(launched(tmp_path, 2, "SIGKILL,verify,other rank", *RUN), tmp_path)
    assert code == 1 and "rank 1 is gone" in line


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path):
    launcher = launched(tmp_path, 2, ",,", *ENDLESS, "task.trace=true", "output=text")
    wait_for_round(tmp_path / "ranks.out")
    launcher.kill()
    ended(launcher, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_torchrun_stops_the_run_in_good_order(number: int, tmp_path: Path):
    """What is done is reported."""
    launcher = launched(tmp_path, 2, ",,", *ENDLESS, "task.trace=true", "output=text")
    wait_for_round(tmp_path / "ranks.out")
    os.kill(launcher.pid, number)
    _, (line,) = ended(launcher, tmp_path)
    assert f"was stopped by {signal.Signals(number).name}" in line
    (summary,) = (tmp_path / "outputs").rglob("summary.json")
    content = json.loads(summary.read_text())
    assert content["status"] in ("interrupted", "error") and content["outputs"][0]["output_tokens"] > 0


def test_two_nodes_write_what_one_process_writes(command: Command, tmp_path: Path):
    """Two launchers that each start one rank, as on two machines."""
    run = (*RUN, "model.dtype=fp32", "draft.dtype=fp32", "out=null")
    expected = json.loads(command(*run).out)
    port = free_port()
    words = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port}".split()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        start(
            [*TORCHRUN, *words, "--node-rank", node, LAUNCH, *run],
            tmp_path,
            [os.devnull, tmp_path / f"{node}.out", tmp_path / f"{node}.err"],
            env,
        )
        for node in "01"
    ]
    for node in nodes:
        node.join(PATIENCE_S)
    said = [[(tmp_path / f"{node}.{stream}").read_text() for stream in ("out", "err")] for node in "01"]
    assert [node.exitcode for node in nodes] == [0, 0], said
    found = json.loads(said[0][0])
    assert found["outputs"] == expected["outputs"] and said[1][0] == ""
    assert "over 2 ranks" in found["devices"]["model"]
