"""`ranks=N`: a process that starts its ranks, speaks with one voice, and ends with them."""

import errno
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_ssp.batch.journal import count_finished
from llama_ssp.distributed import launcher
from llama_ssp.distributed.board import FOLDER
from llama_ssp.distributed.launcher import meeting_folder, run_ranks
from llama_ssp.errors import DATA, DISTRIBUTED, INPUT_OUTPUT, MODEL, USAGE, StorageError
from tests.conftest import Command
from tests.distributed.faults import EARLY, Cell, by_command
from tests.processes import kill, stands_still, wait_for
from tests.warm import Answer, Started, answers, start

pytestmark = pytest.mark.slow

FP32 = ("model.dtype=fp32", "draft.dtype=fp32", "output=json", "out=null")
TINY = ("generate", "model=tiny", "draft=tiny_draft", *FP32, "seed=5", "prompt=hello", "n=24")
LONG = ("max_new_tokens=4000", "ignore_eos=true", "model.context=8192", "draft.context=8192")


class Parent:
    """The command, running; what it says goes to files."""

    def __init__(self, folder: Path, *words: str, stdin: str = "", **variables: str) -> None:
        self._said = [folder / "out", folder / "err"]
        (folder / "in").write_text(stdin)
        words = tuple("max_new_tokens=24" if word == "n=24" else word for word in words)
        env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self.process = start(["-m", "llama_ssp", *words], folder, [folder / "in", *self._said], env)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for child in psutil.Process(self.pid).children() if psutil.pid_exists(self.pid) else ():
            if child.status() != psutil.STATUS_ZOMBIE and "RANK" in child.environ():
                found[int(child.environ()["RANK"])] = child
        return found

    def until(self, said: str) -> None:
        file = self._said[1]
        wait_for(lambda: file.exists() and said in file.read_text(), lambda: file.read_text())

    def finish(self) -> Answer:
        (answer,) = answers([self.process], [self._said], 300.0)
        return answer


def run(folder: Path, *words: str, stdin: str = "", **variables: str) -> Answer:
    return Parent(folder, *words, stdin=stdin, **variables).finish()


def texts(answer: Answer) -> list[Any]:
    assert answer.code == 0, answer.err
    return [output["token_ids"] for output in answer.document["outputs"]]


# What is wrong, the code, and a part of the line. Some are found by this process, some by a rank with torch.
MISTAKES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "an unknown key": (("modle=x",), USAGE, "modle"),
    "no such model": (("model=/no/such/folder",), MODEL, "no/such/folder"),
    "too many ranks for the heads": (("ranks=5",), DISTRIBUTED, "heads"),
    "by layers": (("placement=layers",), DISTRIBUTED, "layers"),
    "no number of ranks": (("ranks=0",), USAGE, "ranks"),
    "no prompts": (("task.prompts=null", "prompt_file=/no/such/file"), DATA, "/no/such/file"),
    "more new tokens than the context": (("max_new_tokens=99999",), USAGE, "prompt included"),
    "a prompt that is longer than the context": (("prompt=" + "word " * 900,), DATA, "context"),
    "no room for results": (("out=/proc/none",), INPUT_OUTPUT, "/proc/none"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_its_own_code(mistake: str, tmp_path: Path):
    words, code, said = MISTAKES[mistake]
    given = [word for word in TINY if not (word == "prompt=hello" and any("prompt" in w for w in words))]
    answer = run(tmp_path, *given, *(() if any("ranks" in w for w in words) else ("ranks=2",)), *words)
    assert (answer.code, len(answer.errors), answer.out) == (code, 1, ""), answer.err
    assert said in answer.errors[0] and "Traceback" not in answer.err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("loaded", "victim", "by", "code", "line"),
    [
        (False, 1, signal.SIGKILL, DISTRIBUTED, "rank 1 was killed by SIGKILL during start"),
        (False, None, signal.SIGINT, 130, "SIGINT during start"),
        (True, None, signal.SIGTERM, 143, "stopped by SIGTERM"),
        (True, 0, signal.SIGKILL, DISTRIBUTED, "rank 0 is gone"),
        (True, None, signal.SIGKILL, -9, ""),
    ],
    ids=[
        "a rank is killed at start",
        "Ctrl-C at start",
        "TERM",
        "the leader is killed",
        "the parent is killed",
    ],
)
def test_whoever_is_stopped_all_end(
    loaded: bool, victim: int | None, by: signal.Signals, code: int, line: str, tmp_path: Path
):
    """With one line, if anybody is left to say it, and no process."""
    count = 3 if victim == 0 else 2
    parent = Parent(tmp_path, *TINY, *LONG, f"ranks={count}", "-v")
    wait_for(lambda: len(parent.ranks()) == count)
    if loaded:
        parent.until(f"over {count} ranks")
    ranks = parent.ranks()
    kill(parent.pid if victim is None else ranks[victim].pid, by=by)
    answer = parent.finish()
    assert (answer.code, len(answer.errors)) == (code, bool(line)), answer.err
    assert line in answer.err and "Traceback" not in answer.err
    wait_for(lambda: not any(rank.is_running() and rank.status() != "zombie" for rank in ranks.values()))


# How the two ranks of a program end, and the code of the process that started them.
ENDS = {
    "the leader is killed": ("os.kill(os.getpid(), 9)", "sys.exit(4)", MODEL),
    "both are killed": ("os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 9)", 128 + 9),
    "the leader leaves": ("sys.exit(3)", "sys.exit(4)", DATA),
}


@pytest.mark.parametrize(("leader", "other", "code"), ENDS.values(), ids=ENDS)
def test_the_exit_code_is_the_leader_s_or_if_it_was_killed_another_rank_s(
    leader: str, other: str, code: int, tmp_path: Path
) -> None:
    """A short program takes the place of the command in the ranks: Python finds it before the package.

    The ranks meet, as those of the command do: each waits for the other's sign of life.
    """
    program = f"""
import os, sys, time
folder = os.path.join(os.environ["{FOLDER}"], "0", "0")
os.makedirs(folder, exist_ok=True)
rank = os.environ["RANK"]
with open(os.path.join(folder, "rank-" + rank), "w") as file:
    file.write("here")
while len(os.listdir(folder)) < 2:
    time.sleep(0.01)
if rank == "0":
    {leader}
{other}
"""
    (tmp_path / "llama_ssp.py").write_text(program)
    assert run_ranks(2, {"PYTHONPATH": str(tmp_path)}) == code


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "cell",
    [
        Cell("os._exit", "load", "leader"),
        Cell("SIGKILL", "verify", "draft's rank"),
        Cell("SIGKILL", EARLY, "other rank"),
        Cell("os._exit", EARLY, "leader"),
        Cell("SIGKILL", "prefill", "leader"),
    ],
    ids=", ".join,
)
def test_all_end_with_one_cause_that_names_the_rank_in_its_phase(cell: Cell, tmp_path: Path):
    """Before torch is imported, while models are loaded, while text is written; of ranks of the command."""
    _, _, wrong = by_command(cell, tmp_path / "run")
    assert [each for each in wrong if each != "too late"] == []


def test_ranks_meet_where_no_other_user_can_come(tmp_path: Path):
    """In a folder, not at a port; and if the command is killed, the next one removes what is left."""
    parent = Parent(tmp_path, *TINY, *LONG, "ranks=2")
    wait_for(lambda: len(parent.ranks()) == 2)
    processes = [psutil.Process(parent.pid), *parent.ranks().values()]
    (folder,) = {Path(rank.environ()[FOLDER]) for rank in processes[1:]}
    wait_for(lambda: any(folder.rglob("rank-0")))
    facts = folder.stat()
    assert (facts.st_mode & 0o777, facts.st_uid) == (0o700, os.geteuid())
    assert processes[0].net_connections() == []
    assert not [word for process in processes for word in process.cmdline() if str(folder) in word]
    kill(parent.pid)
    parent.finish()
    assert folder.is_dir()
    os.utime(folder, (0, 0))
    with meeting_folder() as held:
        assert not folder.exists() and held.parent == folder.parent
        os.utime(held, (0, 0))
        with meeting_folder():
            assert held.is_dir(), "its command still runs"
    assert not held.exists()


def test_ranks_meet_elsewhere_where_the_first_place_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And where no place has room, a line says what to set."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launcher, "IN_MEMORY", str(full := tmp_path / "full"))
    full.mkdir()
    write = Path.write_bytes

    def writing(path: Path, content: bytes) -> int:
        if path.is_relative_to(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", writing)
    with meeting_folder() as folder:
        assert folder.parent == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(full))
    with pytest.raises(StorageError, match="No space left on device; TMPDIR names another"), meeting_folder():
        pass
    assert list(tmp_path.rglob("*")) == [full]


def test_ranks_take_the_folder_for_compiled_code_that_the_command_has_chosen(tmp_path: Path):
    """In place of one that others can write, which one line names."""
    unsafe, used = Path(tempfile.mkdtemp()), f"{tmp_path}/llama-ssp/compiled"
    unsafe.chmod(0o777)
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(unsafe), "XDG_CACHE_HOME": str(tmp_path)}
    parent = Parent(tmp_path, *TINY, "ranks=2", **variables)
    wait_for(lambda: len(parent.ranks()) == 2)
    folders = [rank.environ()["TORCHINDUCTOR_CACHE_DIR"] for rank in parent.ranks().values()]
    kill(parent.pid)
    answer = parent.finish()
    unsafe.rmdir()
    assert folders == [used, used]
    (line,) = [line for line in answer.err.splitlines() if "no compiled code is loaded" in line]
    assert f"{unsafe} may be written by everybody" in line and f"{used} is used" in line


def test_a_job_of_the_shell_is_whole_after_a_stop(command: Command, tmp_path: Path):
    """Ctrl-Z, and fg: texts are those of one process, of prompts from a pipe; one rank writes, one line."""
    words = (*(word for word in TINY[:-1] if word != "prompt=hello"), "max_new_tokens=200", "ignore_eos=true")
    parent = Parent(tmp_path, *words, "ranks=2", "-v", stdin="hello\na b c\n")
    parent.until("over 2 ranks")
    ranks = parent.ranks().values()
    kill(parent.pid, by=signal.SIGTSTP)
    wait_for(lambda: all(stands_still(pid) for pid in (parent.pid, *(rank.pid for rank in ranks))))
    kill(parent.pid, by=signal.SIGCONT)
    answer = parent.finish()
    assert texts(answer) == texts(command("task=generate", *words[1:], stdin=b"hello\na b c\n"))
    assert len(answer.out.splitlines()) == 1 and "over 2 ranks" in answer.document["devices"]["model"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("message_us", "used"), [(0, 2), (10**6, 1)])
def test_ranks_of_torchrun_without_work_leave_the_others_to_it(
    message_us: int, used: int, command: Command, tmp_path: Path
):
    """By a plan in which sums, or messages too, are dear."""
    words = ("task=generate", *TINY[1:-1], "task.max_new_tokens=12", "cluster=cpu", "speculation.k=3")
    times = "cluster.times.all_reduce_us={2: 90000, 3: 190000}", f"cluster.times.message_us={message_us}"
    leader, *others = Started(tmp_path, 3, *words, *times).finish()
    assert texts(leader) == texts(command(*words)), leader.err
    assert f"ranks={used} is as fast" in leader.err
    assert [(other.code, other.out, other.errors) for other in others] == [(0, "", [])] * 2


@pytest.mark.long
def test_the_text_is_whole_where_the_drafts_rank_is_killed(command: Command, tmp_path: Path):
    """torchrun would end all ranks with it."""
    words = (*TINY[:-1], "max_new_tokens=600", "ignore_eos=true", "sampling.temperature=0")
    words = (*words, "placement=own", "engine=eager")
    parent = Parent(tmp_path, *words, "ranks=3", "placement.draft_timeout_s=3", "trace=true", "out=runs")
    wait_for(lambda: any(file.stat().st_size for file in (tmp_path / "runs").rglob("rounds*")))
    kill(parent.ranks()[2].pid)
    answer = parent.finish()
    expected = command("task=generate", *words[1:], "placement=auto").document["outputs"]
    assert texts(answer) == [output["token_ids"] for output in expected]
    assert answer.document["overlap"]["draft_lost"] and not answer.errors


@pytest.mark.long
def test_each_job_of_a_sweep_over_ranks_has_its_folder(tmp_path: Path):
    sweep = [word for word in TINY[:-1] if word not in ("out=null", "seed=5", "output=json")]
    answer = run(tmp_path, *sweep, "max_new_tokens=8", "ranks=2", "--multirun", "seed=1,2", "out=runs")
    assert answer.code == 0 and len(list((tmp_path / "runs").rglob("summary.json"))) == 2, answer.err


@pytest.mark.long
def test_a_batch_job_over_ranks_that_was_killed_is_completed(command: Command, tmp_path: Path):
    """Its answers are those of a whole job of one process."""
    (tmp_path / "prompts.txt").write_text("".join(f"question {n}\n" for n in range(30)))
    pair = ("model=tiny", "draft=tiny_draft", *FP32, "seed=5", "speculation.k=4", "ignore_eos=true")
    batch = ("batch", *pair, "max_new_tokens=40", "task.batch_size=2", "shard_size=10")
    files = [
        f"task.{name}={tmp_path / file}" for name, file in (("input", "prompts.txt"), ("output", "answers"))
    ]

    parent = Parent(tmp_path, *batch, *files, "ranks=2")
    wait_for(lambda: count_finished(tmp_path / "answers.work") >= 8)
    kill(parent.pid)
    assert parent.finish().code != 0

    assert run(tmp_path, *batch, *files, "ranks=2").code == 0
    assert command.line(*batch, files[0], "task.output=whole").code == 0
    assert (tmp_path / "answers").read_bytes() == Path("whole").read_bytes()


def test_srun_that_starts_several_copies_is_refused_by_one_of_them(tmp_path: Path):
    for number, said in ((0, 1), (1, 0)):
        answer = run(tmp_path, *TINY, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID=str(number))
        assert (answer.code, len(answer.errors)) == (USAGE, said) and answer.err.count("ranks=2") == said
