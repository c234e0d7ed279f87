"""Whatever befalls a rank, all end, with one cause; whoever starts them, none is left behind.

`python -m tests.distributed.faults` goes through every cell and measures how soon; here a few stand for all.
"""

import json
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.distributed.faults import RUN, TORCHRUN, Cell, launched, outcome, strike_at
from tests.processes import stands_still, wait_for
from tests.warm import LAUNCH, Started, start

pytestmark = pytest.mark.slow

PATIENCE_S = 120
# So long a run would have compiled steps, which take a minute of a core to make.
ENDLESS = (
    *RUN, "task.max_new_tokens=100000", "model.context=200000", "draft.context=200000", "engine=eager",
    "task.trace=true", "output=text",
)  # fmt: skip
SOME = [
    Cell("SIGKILL", "load", "leader"),
    Cell("SIGKILL", "verify", "other rank"),
    Cell("SIGTERM", "prefill", "other rank"),
    Cell("SIGKILL", "draft", "draft's rank"),
    Cell("SIGTERM", "verify", "leader"),
    Cell("SIGSTOP", "load", "other rank"),
    Cell("SIGSTOP", "draft", "leader"),
    Cell("exception", "commit", "leader"),
    Cell("exception", "load", "draft's rank"),
    Cell("os._exit", "commit", "other rank"),
    Cell("os._exit", "draft", "leader"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("cell", SOME, ids=", ".join)
def test_all_end_with_one_cause(cell: Cell, tmp_path: Path):
    assert outcome(cell, tmp_path / "run")[-1] == []


def stop_the_other_in_the_second_round(rank: int) -> None:
    def strike() -> None:
        Path(f"there-{rank}").touch()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    strike_at(rank, "verify", strike, rank)


def come_late(rank: int) -> None:
    if rank == 1:
        time.sleep(PATIENCE_S)


@pytest.mark.parametrize(
    ("fault", "where"),
    [(stop_the_other_in_the_second_round, "verify, round 2"), (come_late, "start")],
    ids=["collective", "start"],
)
def test_a_signal_reaches_a_rank_that_waits_for_another(fault: Any, where: str, tmp_path: Path):
    """In a collective, and before the ranks have met; the timeout is far away."""
    run = Started(tmp_path, 2, *RUN, "out=null", fault=fault)
    leader, other = run.processes
    there = [tmp_path / f"there-{rank}" for rank in range(2)]
    wait_for(lambda: run.has_come(0) if fault is come_late else all(map(Path.exists, there)))
    os.kill(leader.pid, signal.SIGTERM)
    leader.join(PATIENCE_S)
    other.kill()
    answer = run.finish()[0]
    assert answer.code == 143
    assert answer.errors == [f"error: rank 0 was stopped by SIGTERM during {where}"]


def test_a_rank_that_never_comes(tmp_path: Path):
    started = Started(tmp_path, 2, *RUN, "out=null", "placement.appear_s=3", fault=come_late)
    started.processes[0].join(PATIENCE_S)
    leader, other = started.finish(0)
    assert leader.code == 5 and other.code is None
    assert "not all ranks have come; rank 0 of 2; found no rank 1 after 3 s" in leader.errors[0]


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
    ("fault", "codes", "said"),
    [
        (go_before_the_first_sum, [-signal.SIGKILL, 5], ["rank 0 is gone (killed by a signal"]),
        (skip_a_message, [5, 5], ["rank 1 failed during verify, round 3: the ranks are out of step",
                                  "3 rounds are decided here, 2 with the leader"]),
        (skip_a_sum, [5, 5], ["gets no answer", "rank 0: verify, round 3", "rank 1: verify, round 3"]),
        (another_configuration, [5, 5],
         ["during start: the ranks differ in configuration", "ranks 1 unlike rank 0",
          "sampling.temperature 0.7 on rank 1, null on rank 0"]),
    ],
    ids=["store", "message", "sum", "configuration"],
)  # fmt: skip
def test_ranks_that_wait_in_vain_or_are_out_of_step_end(
    fault: Any, codes: list[int], said: list[str], tmp_path: Path
):
    run = (*RUN, "placement=leader", "placement.timeout_s=6")
    answers = Started(tmp_path, 2, *run, fault=fault).finish()
    assert [answer.code for answer in answers] == codes
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


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("own", "code", "by", "said"),
    [
        ({1: K}, 2, 1, OUT_OF_RANGE),
        ({1: IMPORT}, 5, 1, IMPORT),
        ({0: FOLDER}, 4, 0, NO_FOLDER),
        ({0: K, 1: K}, 2, 0, OUT_OF_RANGE),
        ({0: K, 1: FOLDER}, 2, 0, OUT_OF_RANGE),
    ],
    ids=["setting", "import", "leader", "alike", "each-its-own"],
)
def test_a_cause_before_the_ranks_have_met_is_said_once(
    own: dict[int, str], code: int, by: int, said: str, tmp_path: Path
):
    answers = Started(tmp_path, 2, *RUN, "out=null", fault=partial(fail_at_start, own)).finish()
    if own.get(1) == FOLDER and answers[1].errors:  # a busy machine: rank 1 was first, and is the cause
        code, by, said = 4, 1, NO_FOLDER
    assert [(answer.code, answer.out) for answer in answers] == [(code, "")] * 2, answers
    assert answers[by].err.startswith(f"error: {'rank 1: ' * by}{said}")
    assert len(answers[by].errors) == 1 and not answers[1 - by].errors


def ended(launcher: Any, folder: Path) -> tuple[int, list[str]]:
    """torchrun's exit code, and the lines of errors, once no rank is left."""
    errors = folder / "ranks.err"
    wait_for(lambda: launcher.exitcode is not None, errors.read_text)
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert len(pids) == 2, errors.read_text()
    wait_for(lambda: all(map(stands_still, pids)), errors.read_text)
    said = errors.read_text().splitlines()
    return launcher.exitcode, [line for line in said if line.startswith("error:")]


def endless(folder: Path) -> Any:
    launcher = launched(folder, 2, ",,", *ENDLESS)
    said, first_round = folder / "ranks.out", "0 at 0: "
    wait_for(lambda: said.exists() and first_round in said.read_text(), (folder / "ranks.err").read_text)
    return launcher


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fault", "said"),
    [("SIGKILL,verify", "error: rank 1 is gone"), (f"{K},start", f"error: rank 1: {OUT_OF_RANGE}")],
    ids=["killed", "refused"],
)
def test_torchrun_ends_all_ranks_with_the_first_cause(fault: str, said: str, tmp_path: Path):
    """It stops the other rank, which then has no cause of its own."""
    code, (line,) = ended(launched(tmp_path, 2, f"{fault},other rank", *RUN), tmp_path)
    assert code == 1 and line.startswith(said)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path):
    launcher = endless(tmp_path)
    launcher.kill()
    ended(launcher, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_torchrun_stops_the_run_in_good_order(number: int, tmp_path: Path):
    if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests were started with nohup: what they start does not hear SIGHUP")
    launcher = endless(tmp_path)
    os.kill(launcher.pid, number)
    _, (line,) = ended(launcher, tmp_path)
    assert f"was stopped by {signal.Signals(number).name}" in line
    (summary,) = (tmp_path / "outputs").rglob("summary.json")
    content = json.loads(summary.read_text())
    assert content["status"] in ("interrupted", "error") and content["outputs"][0]["output_tokens"] > 0


@pytest.mark.long
def test_two_nodes_write_what_one_process_writes(command: Command, tmp_path: Path):
    """Two launchers that each start one rank, as on two machines."""
    run = (*RUN, "model.dtype=fp32", "draft.dtype=fp32", "out=null")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port}".split()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes, said = [], [[tmp_path / f"{node}.{stream}" for stream in ("out", "err")] for node in range(2)]
    for node, streams in enumerate(said):
        launch = [*TORCHRUN, *words, "--node-rank", node, LAUNCH, *run]
        nodes.append(start(launch, tmp_path, [os.devnull, *streams], env))
    expected = command(*run).document
    for node in nodes:
        node.join(PATIENCE_S)
    assert [node.exitcode for node in nodes] == [0, 0], [err.read_text() for _, err in said]
    found = json.loads(said[0][0].read_text())
    assert found["outputs"] == expected["outputs"] and said[1][0].read_text() == ""
    assert "over 2 ranks" in found["devices"]["model"]
