"""A job's files after any crash: nothing lost, nothing twice, the same in the end; how they are counted."""

import errno
import io
import json
import os
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from llama_ssp.batch import atomic_files, attempts
from llama_ssp.batch import journal as journals
from llama_ssp.batch.atomic_files import append_line, require_file_system, sealed
from llama_ssp.batch.attempts import Attempt, JournalThread, read_part
from llama_ssp.batch.journal import Journal, Manifest, count_finished, shards_of
from llama_ssp.batch.slurm.supervisor import ENDS, FOLDER, End, ends
from llama_ssp.batch.status import RECENT_S, pace
from llama_ssp.distributed import identity
from llama_ssp.errors import DataError, StorageError, UsageError
from tests.processes import wait_for

RECORDS, SHARD = 14, 5
KILLED = 9


def manifest(**changes: Any) -> Manifest:
    settings = {"seed": 1, "model": "demo", **changes}
    return Manifest("ab" * 32, RECORDS, settings, shards_of(RECORDS, SHARD))


def answer(index: int) -> dict[str, Any]:
    return {"id": f"a/{index}\n", "text": "é" * (index % 7) + "\u2028", "output_tokens": index}


def begun(folder: Path) -> tuple[Journal, Attempt]:
    """A job, and an attempt at its first shard."""
    job = Journal.begin(folder, manifest())
    return job, job.attempt(job.manifest.shards[0])


def work(folder: Path, output: Path) -> int:
    """One process's go at the whole job, two records at a time; how many it computed."""
    journal, computed = Journal.begin(folder, manifest()), 0
    for shard in journal.manifest.shards:
        if journal.is_done(shard):
            continue
        attempt = journal.attempt(shard)
        while waiting := attempt.missing[:2]:
            attempt.begin(waiting, 2)
            for index in waiting:
                attempt.finish(index, answer(index))
                computed += 1
        attempt.publish()
    journal.merge(output)
    return computed


def undisturbed(folder: Path) -> bytes:
    work(folder / "calm", folder / "calm.jsonl")
    return (folder / "calm.jsonl").read_bytes()


def child_of(job: Any) -> Callable[[], int]:
    """Forks a process that runs the job; the parent's memory stays as it is. The result waits for its end."""
    child = os.fork()
    if child == 0:
        try:
            job()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(job: Any) -> int:
    return child_of(job)()


class Deadly:
    """Counts bytes, and files that are opened, named or removed, and kills the process at one of them."""

    STEPS = frozenset({"open", "os.link", "os.rename", "os.remove"})

    def __init__(self, at: int) -> None:
        self.left = at

    def spend(self, cost: int) -> int:
        """How much of it goes before the end."""
        allowed = min(cost, self.left)
        self.left -= allowed
        return allowed

    def install(self) -> None:
        """In the child alone."""
        whole = Path.open

        def opened(path: Path, mode: str = "r", *args: Any, **how: Any) -> Any:
            if "b" in mode and set(mode) & set("wxa"):
                return _File(path, mode.replace("b", ""), self)
            return whole(path, mode, *args, **how)

        def step(event: str, _: Any) -> None:
            if event in self.STEPS and not self.spend(1):
                os._exit(KILLED)

        Path.open = opened  # type: ignore[method-assign, assignment]
        sys.addaudithook(step)


class _File(io.FileIO):
    """An unbuffered file whose writes may stop in their middle, for good."""

    def __init__(self, path: Path, mode: str, deadly: Deadly) -> None:
        super().__init__(path, mode)
        self._deadly = deadly

    def write(self, data: Any) -> int:
        allowed = self._deadly.spend(len(data))
        super().write(data[:allowed])
        if allowed < len(data):
            os._exit(KILLED)
        return allowed


@pytest.mark.long
def test_kill_at_two_hundred_points(tmp_path: Path):
    """At any byte of any file or between steps, again and again: the end is the undisturbed end."""
    expected = undisturbed(tmp_path)
    length = sum(path.stat().st_size for path in (tmp_path / "calm").rglob("*") if path.is_file())
    points, kills, run = random.Random(1), 0, 0
    while kills < 200:
        folder, output, run = tmp_path / str(run), tmp_path / f"{run}.jsonl", run + 1
        for _ in range(40):
            deadly = Deadly(points.randrange(length))
            code = in_child(lambda d=deadly, f=folder, o=output: (d.install(), work(f, o)))
            assert code in (0, KILLED)
            kills += code == KILLED
            if code == 0:
                break
        else:
            work(folder, output)
        assert output.read_bytes() == expected
        ids = [json.loads(line)["id"] for line in output.read_bytes().splitlines()]
        assert len(set(ids)) == len(ids) == RECORDS


def test_what_any_earlier_attempt_finished_is_not_computed_again(tmp_path: Path):
    """Three attempts, each killed after a record of its own: the fourth has two left."""
    for index in range(3):
        attempt = begun(tmp_path / "job")[1]
        assert attempt.missing == list(range(index, SHARD))
        attempt.begin(attempt.missing[:2], 2)
        attempt.finish(index, answer(index))
    assert work(tmp_path / "job", tmp_path / "out.jsonl") == RECORDS - 3
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed(tmp_path)


def ended(folder: Path, finished: tuple[int, ...] = (), orderly: bool = False) -> None:
    """An attempt at two records that ended, when it had finished some of them."""
    attempt = begun(folder)[1]
    attempt.begin([0, 1], 2)
    for index in finished:
        attempt.finish(index, answer(index))
    if orderly:
        attempt.excuse()


def test_failures_are_counted_by_record(tmp_path: Path):
    ended(tmp_path)
    ended(tmp_path, finished=(1,))
    assert begun(tmp_path)[1].deaths == {0: 2, 1: 1}


def test_an_orderly_end_is_no_failure(tmp_path: Path):
    ended(tmp_path)
    ended(tmp_path, orderly=True)
    ended(tmp_path, finished=(1,))
    assert begun(tmp_path)[1].deaths == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("among", "alone"), [(1, [0]), (2, [])], ids=["alone", "beside another shard's text"]
)
def test_a_death_is_of_a_record_alone_only_if_no_other_text_was_under_way(
    among: int, alone: list[int], tmp_path: Path
):
    """Texts of other shards count, too: they are in the process, though not in this file."""
    begun(tmp_path)[1].begin([0], among)
    again = begun(tmp_path)[1]
    assert again.deaths == {0: 1}
    assert list(again.deaths_alone) == alone


def test_the_first_attempt_to_end_publishes(tmp_path: Path):
    job = Journal.begin(tmp_path, manifest())
    shard = job.manifest.shards[0]
    both = [job.attempt(shard, name) for name in ("a", "b")]
    for number, attempt in enumerate(both):
        for index in attempt.missing:
            attempt.finish(index, {**answer(index), "by": number})
    assert [both[1].publish(), both[0].publish()] == [True, False]
    lines = (tmp_path / "done" / f"{shard.name}.jsonl").read_bytes().splitlines()
    assert {json.loads(line)["by"] for line in lines} == {1} and len(lines) == len(shard.indices)


def test_a_name_whose_reply_was_lost_is_this_calls_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NFS sends a link again when a reply is lost. The second answer says that the name exists."""
    link = os.link

    def twice(source: Path, name: Path) -> None:
        with suppress(FileExistsError):
            link(source, name)
        link(source, name)

    monkeypatch.setattr(atomic_files.os, "link", twice)
    require_file_system(tmp_path)
    assert [atomic_files.write_once(tmp_path / "a", data) for data in (b"1", b"2")] == [True, False]
    assert (tmp_path / "a").read_bytes() == b"1" and len(list(tmp_path.iterdir())) == 1


def test_processes_of_equal_number_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two containers may have both; within a process the name stays what it is."""
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def write_name(file: str) -> None:
        names = {atomic_files.unique_name() for _ in range(2)}
        (tmp_path / file).write_text("\n".join(names))

    assert in_child(lambda: write_name("first")) == 0
    assert in_child(lambda: write_name("second")) == 0
    first, second = ((tmp_path / file).read_text() for file in ("first", "second"))
    prefix = f"{socket.gethostname()}-7-"
    assert first.startswith(prefix) and second.startswith(prefix)
    assert first != second and "\n" not in first + second


def test_a_user_s_files_in_a_job_s_folders_stay(tmp_path: Path):
    """Merging and publishing delete only what this journal named."""
    job = Journal.begin(tmp_path / "job", manifest())
    users = ["thesis.txt", "part.0001.csv", "a.jsonl", "00000.jsonl", "00000.a.jsonl", "99999.000.x.jsonl"]
    (job.folder / "parts").mkdir()
    for name in users:
        (job.folder / "parts" / name).write_text("mine")
    for folder, name in (("done", "notes.jsonl"), ("claims", "mine"), ("groups", "notes.txt")):
        (job.folder / folder).mkdir()
        (job.folder / folder / name).write_text("mine")

    work(job.folder, tmp_path / "out.jsonl")

    assert sorted(path.name for path in (job.folder / "parts").iterdir()) == sorted(users)
    for path in [job.folder / "parts" / name for name in users]:
        assert path.read_text() == "mine", path
    assert (job.folder / "done" / "notes.jsonl").read_text() == "mine"
    assert (job.folder / "claims" / "mine").read_text() == "mine"
    assert job.standing().records_finished == RECORDS


def test_drafts_that_a_killed_process_left_are_deleted_with_the_attempts(tmp_path: Path):
    job = Journal.begin(tmp_path / "job", manifest())
    (job.folder / "parts").mkdir()
    (job.folder / "parts" / ".00001.000.reopened-host-7-ab.jsonl.host-7-ab").write_text("half a line")
    work(job.folder, tmp_path / "out.jsonl")
    assert not list((job.folder / "parts").iterdir())


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: shutil.rmtree(folder),
        lambda folder: (folder / "run.json").unlink(),
        lambda folder: (folder / "run.json").write_bytes(manifest(seed=2).as_bytes()),
    ],
    ids=["removed", "no manifest", "another job"],
)
def test_a_process_whose_job_was_removed_says_so(change: Callable[[Path], None], tmp_path: Path):
    """It neither makes the folder anew nor writes into another job."""
    job, attempt = begun(tmp_path / "job")
    change(job.folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=r"folder was removed.*start the same command again"):
        job.claim()
    with pytest.raises(StorageError, match="folder was removed"):
        attempt.begin([0], 1)
    for index in attempt.missing:
        attempt.finish(index, answer(index))
    with pytest.raises(StorageError, match="folder was removed"):
        attempt.publish()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_shard_in_work_is_not_claimed_again_where_its_claim_was_deleted(tmp_path: Path):
    job = Journal.begin(tmp_path, manifest())
    first = job.claim()
    assert first is not None
    with first[1]:
        (tmp_path / "claims" / first[0].name).unlink()
        second = job.claim()
        assert second is not None and second[0].name != first[0].name
    third = job.claim()
    assert third is not None and third[0].name == first[0].name


@pytest.mark.parametrize(
    ("names", "free"),
    [
        ([], True),
        (["index", "input-0", "slurm/7.sbatch", "logs/group-0.log", ".index.host-7-ab", ".nfs0001"], True),
        (["run.json"], True),
        ([".out.jsonl.host-7-ab"], True),
        (["thesis.txt"], False),
        ([".profile"], False),
        (["parts/a.csv"], False),
        (["inputs-0"], False),
    ],
    ids=[
        "empty",
        "before the manifest",
        "a job",
        "draft of the output",
        "file",
        "hidden",
        "parts",
        "near name",
    ],
)
def test_a_folder_is_free_for_a_job(names: list[str], free: bool, tmp_path: Path):
    folder, output = tmp_path / "work", tmp_path / "out.jsonl"
    Journal.require_free(folder, output)
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")

    if free:
        Journal.require_free(folder, output)
    else:
        with pytest.raises(DataError, match=r"holds other files, and no job.*nothing was changed"):
            Journal.require_free(folder, output)


@pytest.mark.parametrize(
    ("work", "output", "says"),
    [
        ("a", "a", "where the output goes"),
        ("a", "b/../a", "where the output goes"),
        ("a/b", "a", "where the output goes"),
        ("a", "a/run.json", "a name that the job's folder needs"),
        ("a", "a/parts/out.jsonl", "a name that the job's folder needs"),
        ("a", "a/input-0", "a name that the job's folder needs"),
    ],
    ids=["the same", "the same by ..", "within it", "run.json", "a part", "an input"],
)
def test_a_job_is_refused_in_the_place_of_its_output(work: str, output: str, says: str, tmp_path: Path):
    (tmp_path / "b").mkdir()
    with pytest.raises(UsageError, match=says):
        Journal.require_free(tmp_path / work, tmp_path / output)


@pytest.mark.parametrize("output", ["a/out.jsonl", "b"])
def test_the_output_may_have_another_name_in_the_job_s_folder(output: str, tmp_path: Path):
    (tmp_path / "b").mkdir()
    Journal.require_free(tmp_path / "a", tmp_path / output)


def test_a_file_may_have_the_longest_name(tmp_path: Path):
    path = tmp_path / ("é" * 127)
    assert atomic_files.write_once(path, b"1") and not atomic_files.write_once(path, b"2")
    atomic_files.replace_whole(path, b"3")
    assert path.read_bytes() == b"3"
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_lines_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A torn end; zeros where another machine does not see a line yet; a line that was changed."""
    path = tmp_path / "part"
    lines = [sealed({"finished": index, "record": answer(index)}) for index in range(3)]
    whole = b"".join(lines)
    path.write_bytes(whole)
    assert set(read_part(path).finished) == {0, 1, 2} and not caplog.records
    ends = (*(whole[:-cut] for cut in (2, 9, 20, 60)), b"".join([*lines[:2], b"\0" * 400]))
    for end in (*ends, lines[0] + lines[1].replace(b"finished", b"finishes") + lines[2]):
        caplog.clear()
        path.write_bytes(end)
        assert set(read_part(path).finished) == ({0, 1} if end in ends else {0, 2})
        assert "damaged lines are left out" in caplog.text, end
    path.write_bytes(lines[0] + b"\0" * 400 + lines[2])
    assert set(read_part(path).finished) == {0, 2}


def test_a_file_that_cannot_be_read_is_said_so(tmp_path: Path):
    job, _ = begun(tmp_path)
    (tmp_path / "parts" / "00000.000.other.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"cannot read the journal: Is a directory; .*permissions"):
        job.standing()


def test_another_job_is_refused_by_its_differences(tmp_path: Path):
    Journal.begin(tmp_path, manifest())
    with pytest.raises(DataError, match=r"found seed=1 now 2, .*another task.output"):
        Journal.begin(tmp_path, manifest(seed=2))
    other = Manifest("cd" * 32, RECORDS, manifest().settings, shards_of(RECORDS, SHARD))
    with pytest.raises(DataError, match="input_sha256"):
        Journal.begin(tmp_path, other)
    regrouped = Manifest("ab" * 32, RECORDS, manifest().settings, shards_of(RECORDS, 3))
    assert Journal.begin(tmp_path, regrouped).manifest == manifest()  # dealt out as it was begun


def test_a_job_of_an_earlier_version_goes_on_unless_it_drafted_otherwise(tmp_path: Path):
    """0.2 kept `speculation.siblings` of each job: 0 of chains of drafts. It listed shards, and had facts."""
    Journal.begin(tmp_path / "chains", manifest(**{"speculation.siblings": 0}))
    assert Journal.begin(tmp_path / "chains", manifest()).manifest == manifest()
    path = tmp_path / "chains" / "run.json"
    body = json.loads(path.read_bytes())
    del body["longest"]
    path.write_text(
        json.dumps({**body, "facts": {"longest": 7}, "shards": [{"number": n} for n in range(3)]})
    )
    assert Journal.find(tmp_path / "chains").manifest == replace(manifest(), longest=7)
    Journal.begin(tmp_path / "trees", manifest(**{"speculation.siblings": 2}))
    finish = "finish it with the version that began it"
    with pytest.raises(DataError, match=rf"another job.*found speculation\.siblings=2 now None.*{finish}"):
        Journal.begin(tmp_path / "trees", manifest())
    Journal.begin(tmp_path / "coupled", manifest(**{"speculation.verification": "coupled"}))
    with pytest.raises(DataError, match=rf"found speculation\.verification='coupled' now .*{finish}"):
        Journal.begin(tmp_path / "coupled", manifest(**{"speculation.verification": "block"}))
    Journal.begin(tmp_path / "token", manifest(**{"speculation.verification": "token"}))
    with pytest.raises(DataError, match=r"undo the change, or choose another task\.output"):
        Journal.begin(tmp_path / "token", manifest(**{"speculation.verification": "block"}))


def test_a_job_stands_where_its_files_say(tmp_path: Path):
    job, attempt = begun(tmp_path)
    attempt.begin([0], 2)
    attempt.finish(0, answer(0))
    standing = job.standing()
    assert (standing.records_finished, standing.shards_done) == (1, 0) and not standing.whole
    work(tmp_path, tmp_path / "out.jsonl")
    assert job.standing().whole and job.standing().records_finished == RECORDS


def test_only_a_whole_job_is_merged(tmp_path: Path):
    job, attempt = begun(tmp_path)
    attempt.begin([0], 2)
    attempt.finish(0, answer(0))
    with pytest.raises(DataError, match="3 in all"):
        job.merge(tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("says", ["No space left.*start the same command again", "part of a line only"])
def test_a_full_disk_keeps_what_was_finished(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Room comes back: the attempt leaves in good order."""
    job, attempt = begun(tmp_path)
    attempt.begin([0, 1], 2)
    attempt.finish(0, answer(0))
    file = attempt._file

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

        def write(self, data: bytes) -> int:
            taken = file.write(data[:10])
            if says.startswith("No space"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return taken

    monkeypatch.setattr(attempt, "_file", Full())
    for _ in range(2):
        with pytest.raises(StorageError, match=says):
            attempt.finish(1, answer(1))
    assert job.attempt(attempt.shard).missing == [1, 2, 3, 4]
    monkeypatch.undo()
    attempt.excuse()
    past = read_part(attempt._path)
    assert set(past.finished) == {0} and past.left


@pytest.fixture
def thread_with_error() -> tuple[JournalThread, list[int]]:
    """The journal's thread, which has met an error between two calls, and what these have made."""
    thread, made, go = JournalThread(), list[int](), threading.Event()
    for call in (go.wait, partial(made.append, 1), partial(int, "x"), partial(made.append, 2)):
        thread.do(call)
    thread.wait(0.01)
    assert not made, "a call began before the one before it had ended"
    go.set()
    thread.wait()
    return thread, made


def test_the_journals_thread_writes_in_order(thread_with_error: tuple[JournalThread, list[int]]):
    _, made = thread_with_error
    assert made == [1, 2]


def test_the_journals_thread_passes_errors_on(thread_with_error: tuple[JournalThread, list[int]]):
    thread, _ = thread_with_error
    with pytest.raises(ValueError, match="invalid literal"):
        thread.do(lambda: None)
    thread.close(60)
    assert not thread.is_alive()


def test_a_torn_line_about_an_end_does_not_spoil_the_next(tmp_path: Path):
    one, other = (
        End(job="7", restart=restart, host="node", code=1, stopped_by="", finished=0) for restart in (0, 1)
    )
    file = tmp_path / FOLDER / f"7{ENDS}"
    append_line(file, asdict(one))
    with file.open("ab") as torn:
        torn.write(b'{"job": "7", "rest')
    assert ends(tmp_path) == [one]
    append_line(file, asdict(other))
    assert ends(tmp_path, "7") == [one, other]


def test_shards_are_even():
    assert [len(shard.indices) for shard in shards_of(14, 5)] == [5, 5, 4]
    assert [shard.indices for shard in shards_of(3, 1)] == [range(n, n + 1) for n in range(3)]
    assert shards_of(0, 5) == ()


def test_of_two_that_find_a_claim_abandoned_one_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both have taken the old claim away before either one's own is there: the first to name it has it."""
    path, first = tmp_path / "claim", ExitStack()
    path.write_text(json.dumps({**attempts.this_process(), "pid": 2**22 + 1}))
    synced = atomic_files.synced

    def meanwhile(file: BinaryIO) -> None:
        monkeypatch.setattr(atomic_files, "synced", synced)
        monkeypatch.setattr(atomic_files, "unique_name", lambda: "other")
        claim = attempts.claim(path)
        assert claim is not None
        first.enter_context(claim)
        synced(file)

    monkeypatch.setattr(atomic_files, "synced", meanwhile)
    with first:
        assert attempts.claim(path) is None
        assert path.exists()
    assert not path.exists()


def test_a_claim_that_another_has_taken_over_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its first holder was suspended for longer than a claim lasts, and then ends its shard."""
    path, second = tmp_path / "claim", ExitStack()
    first = attempts.claim(path)
    assert first is not None
    with first:
        os.utime(path, (0, 0))
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        taken = attempts.claim(path)
        assert taken is not None
        second.enter_context(taken)
    assert json.loads(path.read_bytes())["host"] == "elsewhere"
    second.close()
    assert not path.exists()


def test_a_process_is_not_the_earlier_one_of_its_number(tmp_path: Path):
    """In a container the next process has the same host and number."""
    path, own = tmp_path / "claim", attempts.this_process()
    path.write_text(json.dumps({**own, "started": "1"}))
    claim = attempts.claim(path)
    assert claim is not None
    with claim:
        assert attempts.claim(path) is None
    assert not path.exists()


def test_a_process_that_nobody_has_reaped_is_dead():
    """In a container nobody may ever do so."""
    waiting, go = os.pipe()
    if (child := os.fork()) == 0:
        os.read(waiting, 1)
        os._exit(0)
    process = replace(identity.own_identity(), pid=child, started=identity._started(child))
    assert process.lives
    os.write(go, b"!")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.lives is False
    os.waitpid(child, 0)
    assert process.lives is False


def test_a_process_that_proc_hides_may_live(monkeypatch: pytest.MonkeyPatch):
    """hidepid=2 hides another user's."""

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(identity, "_stat", lambda _: [])
    monkeypatch.setattr(os, "kill", refuse)
    assert identity.Identity(identity._machine(), os.getpid(), "1").lives is None


@pytest.mark.parametrize("lacking", ["machine", "started"])
def test_a_claim_that_names_too_little_lapses_with_its_heartbeat(lacking: str, tmp_path: Path):
    """That of an older version, or of a machine that does not tell when a process began."""
    job, own = Journal.begin(tmp_path, manifest()), attempts.this_process()
    (tmp_path / "claims").mkdir()
    for shard in job.manifest.shards:
        (tmp_path / "claims" / shard.name).write_text(json.dumps({**own, lacking: ""}))
    assert job.claim() is None and {name for name, _ in job.silent()} == {"00000", "00001", "00002"}
    path = tmp_path / "claims" / "00001"
    os.utime(path, (0, path.stat().st_mtime - attempts.STALE_S - 1))
    taken = job.claim()
    assert taken is not None and taken[0].name == "00001"
    with taken[1]:
        assert {name for name, _ in job.silent()} == {"00000", "00002"}


def test_a_claim_that_cannot_be_read_lapses_with_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """That of another user, or on a disk that fails just now: its process may live."""
    path = tmp_path / "claim"
    path.write_text(json.dumps(attempts.this_process()))

    def refuse(_: Path) -> bytes:
        raise PermissionError

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert attempts.claim(path) is None
    os.utime(path, (0, 0))
    assert attempts.is_abandoned(path)


@pytest.mark.parametrize("content", ["[]", "3", "{", ""])
def test_what_is_no_claim_holds_nothing(content: str, tmp_path: Path):
    path = tmp_path / "claim"
    path.write_text(content)
    claim = attempts.claim(path)
    assert claim is not None
    with claim:
        assert attempts.claim(path) is None


def test_an_element_that_slurm_starts_again_has_its_claims_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On whichever machine; a claim of another element lapses."""
    job = Journal.begin(tmp_path, manifest())
    with ExitStack() as held:
        for number in ("7", "8", "7"):
            monkeypatch.setenv("SLURM_JOB_ID", number)
            taken = job.claim()
            assert taken is not None, number
            held.enter_context(taken[1])
        monkeypatch.setattr(identity, "_machine", lambda: "elsewhere")
        assert job.claim() is None
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        again = Journal.find(tmp_path)
        for name in ("00000", "00002"):
            taken = again.claim()
            assert taken is not None and taken[0].name == name
            held.enter_context(taken[1])
        assert again.claim() is None


def test_who_counts_the_claims_writes_nothing(tmp_path: Path):
    """Anyone who may read the folder may ask for the job's state."""
    taken = Journal.begin(tmp_path, manifest()).claim()
    assert taken is not None
    with taken[1]:
        os.utime(tmp_path / "claims", (0, 0))
        assert len(Journal.find(tmp_path).holders()) == 1
        assert (tmp_path / "claims").stat().st_mtime == 0


def absent(*_: object) -> None:
    raise OSError(errno.ENOTSUP, "Operation not supported")


def copied(source: Path, path: Path) -> None:
    """A link that replaces, or copies: then two could publish a shard."""
    Path(path).write_bytes(Path(source).read_bytes())


@pytest.mark.parametrize(
    ("name", "act", "lacking"),
    [("link", absent, "hard links"), ("link", copied, "hard links"), ("fsync", absent, "fsync")],
    ids=["no links", "copies for links", "no fsync"],
)
def test_a_file_system_that_is_not_enough(
    name: str, act: Callable[..., None], lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    require_file_system(tmp_path)
    monkeypatch.setattr(os, name, act)
    with pytest.raises(StorageError, match=f"cannot be kept on this file system.*found no {lacking}"):
        require_file_system(tmp_path)
    assert not list(tmp_path.iterdir())


COUNTED = 7


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.begin(tmp_path, Manifest("ab" * 32, COUNTED, {"seed": 1}, shards_of(COUNTED, 4)))


def test_it_grows_with_the_files(journal: Journal, tmp_path: Path):
    assert count_finished(tmp_path / "none") == 0
    shard = journal.manifest.shards[0]
    attempt = journal.attempt(shard)
    for count, index in enumerate(shard.indices, start=1):
        attempt.begin([index], 2)
        attempt.finish(index, {"id": str(index), "text": '\n{"finished":6'})
        assert count_finished(journal.folder) == count
    attempt.publish()
    assert count_finished(journal.folder) == len(shard.indices)
    assert count_finished(journal.folder) == journal.standing().records_finished


@pytest.fixture
def twice(journal: Journal) -> Journal:
    """A journal of which two attempts finished the same record."""
    for name in ("a", "b"):
        attempt = journal.attempt(journal.manifest.shards[0], name)
        attempt.finish(0, {"id": "0"})
    return journal


def test_a_record_counts_once(twice: Journal):
    assert count_finished(twice.folder) == 1


def test_a_torn_line_counts_when_it_is_whole(twice: Journal):
    line = sealed({"finished": 1, "record": {}})
    with next((twice.folder / "parts").glob("*a.jsonl")).open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert count_finished(twice.folder) == 1
        file.write(line[20:])
    assert count_finished(twice.folder) == 2


def test_the_pace_is_that_of_groups_at_work(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    """A record that two attempts have finished counts once, a refusal has no tokens, GPUs are not ranks."""
    now, began, name = 1e9, 1e9, "a"
    for module in (attempts, journals):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic))
    monkeypatch.setattr(atomic_files, "unique_name", lambda: name)
    shard = journal.manifest.shards[0]
    first, again = journal.attempt(shard), journal.attempt(shard, "b")
    journal.note(ranks=4, gpus=2, began=now)
    name = "b"
    journal.note(gpus=1, began=now)
    second = journal.attempt(journal.manifest.shards[1])
    now += 36
    first.finish(0, {"id": "0", "output_tokens": 20})
    again.finish(0, {"id": "0", "output_tokens": 20})
    second.finish(4, {"custom_id": "4", "response": {"body": {"usage": {"completion_tokens": 52}}}})
    second.finish(5, {"id": "5", "error": {"code": 400}})
    journal.note(drafted=10, accepted=4)
    standing, groups = journal.survey()
    assert (standing.records_finished, standing.records_failed) == (3, 1)
    assert [(group.records, group.failed, group.tokens, group.gpus) for group in groups] == [
        (1, 0, 20, 2), (2, 1, 52, 1),
    ]  # fmt: skip
    assert [group.began for group in groups] == [began, began]
    assert sum(group.hours * group.gpus for group in groups) == pytest.approx(0.03)
    told = pace(groups, standing, now)
    assert (told["tokens_committed"], told["acceptance_rate"]) == (72, 0.4)
    assert (told["records_per_s"], told["tokens_per_s"]) == (pytest.approx(3 / 36), pytest.approx(2.0))
    assert told["eta_s"] == pytest.approx(4 * 12)
    assert pace(groups, standing, now + 2 * RECENT_S)["records_per_s"] is None


def test_time_in_which_a_group_loads_counts_also_where_it_is_killed_meanwhile(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    """The notes of a group that loads come again; of one that was killed the last one stands."""
    monkeypatch.setattr(journals, "NOTE_S", 0.01)
    began = time.time()
    journal.note(gpus=16, began=began)
    (group,) = journal.survey()[1]
    assert group.hours * 3600 < 0.2 and group.loading_since == 0
    with journal.loading():
        wait_for(lambda: journal.survey()[1][0].hours * 3600 > 0.3)
        (killed,) = journal.survey()[1]
        assert killed.loading_since >= began and killed.gpus == 16
    (loaded,) = journal.survey()[1]
    assert loaded.loading_since == 0 and loaded.hours >= killed.hours
    time.sleep(0.1)
    assert journal.survey()[1] == [loaded], "nothing is noted afterwards"


def test_a_group_that_fails_while_it_loads_keeps_its_time(journal: Journal):
    journal.note(gpus=2, began=time.time() - 36)
    with pytest.raises(MemoryError), journal.loading():
        raise MemoryError
    (group,) = journal.survey()[1]
    assert group.hours * group.gpus == pytest.approx(0.02, rel=0.1)


@pytest.fixture
def done(journal: Journal) -> Journal:
    """A whole job with one error."""
    journal.note(ranks=4, gpus=2, began=1.0)
    for shard in journal.manifest.shards:
        attempt = journal.attempt(shard)
        for index in shard.indices:
            error = {"error": {"code": 500}} if index == 2 else {"output_tokens": 3}
            attempt.finish(index, {"id": str(index), **error})
        attempt.publish()
    assert not list((journal.folder / "parts").iterdir())
    return journal


@pytest.mark.parametrize("lost", [0, 1], ids=["published", "killed before the group's note"])
def test_done_shards_are_counted_by_their_groups(lost: int, done: Journal):
    """Where a process was killed between the two, what it had published is read."""
    (group,) = (done.folder / "groups").iterdir()
    lines = group.read_bytes().splitlines(keepends=True)
    group.write_bytes(b"".join(lines[: len(lines) - lost]))
    standing, groups = done.survey()
    assert (standing.records_finished, standing.records_failed, standing.whole) == (COUNTED, 1, True)
    assert sum(one.tokens for one in groups) == 3 * (COUNTED - 1)
    if lost:
        assert (groups[0].ranks, groups[0].gpus, groups[0].records, groups[1].records) == (4, 2, 4, 3)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_a_group_keeps_what_it_finished_of_a_shard_that_another_ended(
    is_killed: bool, journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    """Before the other begins, and when it has published the shard; whether it died is kept, too."""
    name = "a"
    monkeypatch.setattr(atomic_files, "unique_name", lambda: name)
    shard = journal.manifest.shards[0]
    journal.note(gpus=1, began=1.0)
    first = journal.attempt(shard)
    first.begin([0, 1], 2)
    first.finish(0, {"id": "0", "output_tokens": 20})
    if not is_killed:
        first.excuse()
    (of_first,) = journal.survey()[1]
    assert (of_first.records, of_first.tokens, of_first.died) == (1, 20, is_killed)

    name = "b"
    journal.note(gpus=1, began=2.0)
    second = journal.attempt(shard)
    for index in second.missing:
        second.finish(index, {"id": str(index), "output_tokens": 3})
    second.publish()
    standing, groups = journal.survey()
    assert standing.records_finished == len(shard.indices)
    told = [(group.group, group.records, group.tokens, group.died) for group in groups]
    assert told == [("a", 1, 20, is_killed), ("b", 3, 9, False)]


def test_a_group_at_work_has_not_died(journal: Journal):
    """Its claim is renewed; without it the same files are those of a process that has gone."""
    shard, claim = journal.claim() or pytest.fail("nothing is open")
    with claim:
        journal.attempt(shard).begin([0], 1)
        assert [group.died for group in journal.survey()[1]] == [False]
    assert [group.died for group in journal.survey()[1]] == [True]


def test_done_shards_that_their_groups_count_are_not_read(done: Journal):
    standing, _ = done.survey()
    for path in (done.folder / "done").iterdir():
        path.write_bytes(b"not read")
    assert done.standing() == standing


def test_answers_of_corrected_records_are_taken_back_where_they_are_errors(journal: Journal):
    """In a shard that is done, and in one that is not; a record that is open stays open."""
    for shard in journal.manifest.shards:
        attempt = journal.attempt(shard)
        for index in attempt.missing:
            if index != 6:
                answered = {"error": {"code": 5}} if index in (2, 5) else {"text": ""}
                attempt.finish(index, {"id": str(index), **answered})
        if not attempt.missing:
            attempt.publish()
    with pytest.raises(DataError, match=r"the input has changed.*another record 2, which has an answer"):
        journal.reopen({1, 5})
    assert journal.reopen({2, 5, 6}) == 2
    assert journal.reopen({2, 5, 6}) == 0
    assert [journal.attempt(shard).missing for shard in journal.manifest.shards] == [[2], [5, 6]]
