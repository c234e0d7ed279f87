"""Several groups on one machine: GPUs dealt out, failures started again, and one output."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.batch import workers as groups
from llama_ssp.batch.job import Job
from llama_ssp.batch.journal import Journal, Manifest, shards_of
from llama_ssp.batch.workers import WorkerGroup, _dealt, code_of, words_of_one
from llama_ssp.config import BatchConf, ClusterConf, PlacementConf, RunConf
from llama_ssp.distributed.signals import CODE_FILE, leave_code
from llama_ssp.errors import UsageError
from tests.processes import kill, wait_for
from tests.slurm.jobs import COMMAND, EMPTY, RECORDS, Batches
from tests.warm import LAUNCH, Answer, start


def run_of(**cluster: Any) -> RunConf:
    return RunConf(cluster=ClusterConf(**cluster), task=BatchConf(name="batch"))


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "gpus_here", lambda: [("NVIDIA L4", 2**34)] * 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_dealt_out_where_there_are_some(four_gpus: None, monkeypatch: pytest.MonkeyPatch):
    assert _dealt(run_of(groups=2)) == [["0", "1"], ["2", "3"]]
    assert _dealt(run_of(groups=2, gpus=1)) == [["0"], ["1"]]
    for too_many in ({"groups": 5}, {"groups": 2, "gpus": 3}):
        with pytest.raises(UsageError, match="too few GPUs"):
            _dealt(run_of(**too_many))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert _dealt(run_of(groups=4)) == [["7"], ["5"], ["3"], ["1"]]
    assert _dealt(run_of(groups=2, gpu="cpu")) == [None, None]
    assert _dealt(replace(run_of(groups=2), placement=PlacementConf(target_device="cpu"))) == [None, None]
    monkeypatch.setattr(groups, "gpus_here", list)
    assert _dealt(run_of(groups=3)) == [None] * 3


def test_the_command_of_one_group_replaces_what_is_its_own():
    """Two models may have one name, and the texts of a key add up; of another key the last value counts."""
    slurm = ["cluster=slurm", "cluster.groups=8", "cluster.slurm.setup=[a]", "+cluster.gpus=9", "submit=true"]
    words = ["batch", "tiny", "tiny", "stop=a", *slurm, "stop=b", "--config-dir", "a=b", "-q", "k=1"]
    words += ["speculation.k=2", "-n", "3", "--max-new-tokens=4"]
    assert words_of_one(words, "seed=5", "cluster.gpus=2") == (
        "batch", "tiny", "tiny", "stop=a", "cluster=slurm", "cluster.groups=1", "cluster.gpus=2",
        "task.submit=false", "stop=b", "speculation.k=2", "max_new_tokens=4", "cluster.scheduler=none",
        "task.retry_errors=false", "seed=5", "--config-dir", "a=b", "-q",
    )  # fmt: skip


def ended(tmp_path: Path, script: str, fruitless: int = 0) -> WorkerGroup:
    """A group that has run a shell script, begun when no record was finished."""
    group = WorkerGroup(
        log=tmp_path / "log", command=["sh", "-c", script], devices=["3"], fruitless=fruitless
    )
    group.start(0)
    assert group.process is not None
    group.process.wait(30)
    return group


def test_a_group_that_fails_is_started_again_within_its_budget(tmp_path: Path):
    group = ended(tmp_path, "echo $CUDA_VISIBLE_DEVICES; exit 1", fruitless=3)
    group.follow(1, retries=2)
    assert group.process is not None and (group.began, group.fruitless, group.failures) == (1, 0, 1)
    group.process.wait(30)
    group.follow(1, retries=0)
    assert group.process is not None
    group.process.wait(30)
    for _ in range(2):
        group.follow(1, retries=0)
        assert group.process is None and (group.code, group.fruitless, group.failures) == (1, 2, 3)
    assert (tmp_path / "log").read_text() == "3\n" * 3
    group = ended(tmp_path, "exit 0")
    group.follow(0, retries=2)
    assert group.process is None and group.code == group.failures == 0


@pytest.mark.parametrize(("code", "status"), [(0, "partial"), (1, "error")])
def test_groups_that_leave_the_rest_to_others_have_not_failed(code: int, status: str, tmp_path: Path):
    journal = Journal(tmp_path, Manifest("ab", 2, {}, shards_of(2, 1)))
    job = Job(run_of(), journal, tmp_path / "out.jsonl", EMPTY)
    assert groups._figures(job, [], 1.0, code)["status"] == status
    job.output.touch()
    assert groups._figures(job, [], 1.0, 0)["status"] == "done"


@pytest.mark.parametrize(
    ("code", "fruitless", "given_up"),
    [
        (2, 0, True), (3, 0, True), (4, 0, True), (1, 0, False), (5, 4, False), (5, 5, True), (6, 1, False),
        (137, 2, False), (143, 0, False),
    ],
)  # fmt: skip
def test_what_follows_a_failure(
    code: int, fruitless: int, given_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    group, again = ended(tmp_path, f"exit {code}", fruitless - 1), list[int]()
    monkeypatch.setattr(group, "start", again.append)
    group.follow(0, retries=3)
    assert (not again) is given_up and group.code == code


def test_the_first_rank_that_fails_says_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a word the process tells; a code that cannot be kept is no second fault."""
    file = tmp_path / "code"
    monkeypatch.setenv(CODE_FILE, str(file))
    for code in (0, 3, 5):
        leave_code(code)
    assert code_of(1, file) == 3  # torchrun leaves with 1 whatever it was
    assert code_of(0, file) == 0
    monkeypatch.delenv(CODE_FILE)
    leave_code(3)
    (tmp_path / "torn").write_text("")
    assert code_of(-9, tmp_path / "none") == 137
    assert code_of(1, tmp_path / "torn") == 1
    monkeypatch.setenv(CODE_FILE, str(tmp_path / "no folder" / "code"))
    leave_code(6)


def started(batches: Batches) -> tuple[Any, list[int]]:
    """The command with two groups, at work, and its ranks; what it says goes to two files."""
    home = batches.home
    words = [LAUNCH, *COMMAND, "cluster.groups=2", "cluster.gpu=cpu", "output=json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = start(words, home, [os.devnull, home / "out", home / "err"], env)
    batches.wait_for_records(2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    return process, [int(child) for child in children]


@pytest.mark.long
def test_two_groups_one_of_which_is_killed(tmp_path: Path):
    for name in ("calm", "shared"):
        (tmp_path / name).mkdir()
    expected = Batches(tmp_path / "calm").alone()
    batches = Batches(tmp_path / "shared")
    process, ranks = started(batches)
    kill(ranks[0])
    process.join(300)
    out, err = ((batches.home / name).read_text() for name in ("out", "err"))
    assert process.exitcode == 0, err
    assert batches.output.read_bytes() == expected
    document = Answer(0, out, err).document
    assert document["status"] == "done" and document["failures"] == 1
    assert document["records_finished"] == RECORDS and "started again" in err
    assert 0 < document["tokens_committed"] <= 48 * RECORDS


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_after_a_stop_of_all_groups_the_next_command_goes_on(number: int, tmp_path: Path):
    """A killed command takes its groups with it; they have stopped in good order."""
    batches = Batches(tmp_path)
    process, ranks = started(batches)
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode == (143 if number == signal.SIGTERM else -number)
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    computed = batches.finished
    assert batches.run().document["records_answered_here"] == RECORDS - computed
