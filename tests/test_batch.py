"""task=batch: every record answered once, the same whatever happened on the way."""

import ctypes
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llama_ssp import cli
from llama_ssp.batch.atomic_files import append_line
from llama_ssp.batch.index import Index
from llama_ssp.batch.job import Job
from llama_ssp.batch.journal import Journal, count_finished
from llama_ssp.config import Splitting
from llama_ssp.distributed.process_group import NO_GPU
from llama_ssp.errors import DATA
from llama_ssp.pair import assembly, session
from llama_ssp.pair.requests import Reply
from llama_ssp.pair.run import Run
from llama_ssp.pair.session import PairSession
from llama_ssp.pair.trial import Trial
from llama_ssp.report.console import Progress
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.tasks import batch
from llama_ssp.text.prompts import MAX_LINE_BYTES, MAX_UNENDED_BYTES
from tests.conftest import Command
from tests.processes import wait_for
from tests.test_journal import KILLED, Deadly, child_of, in_child
from tests.warm import Answer

RECORDS = 10
# In fp32 the tiny pair's ties are decided by rounding, which depends on how many rows are read together.
MODELS = ["task=batch", "task.input=in.jsonl", "seed=3", "model.dtype=fp64", "draft.dtype=fp64", "out=null"]
JOB = [*MODELS, "speculation.k=4"]
SMALL = [*JOB, "task.max_new_tokens=6", "task.batch_size=3", "task.shard_size=4"]


def record(index: int) -> dict[str, Any]:
    """Short and long prompts, short and long answers, some with settings of their own."""
    own: list[dict[str, Any]] = [{}, {"temperature": 0.3, "top_k": 5}, {"max_new_tokens": 2}, {"seed": 5}]
    return {"id": f"r/{index}", "prompt": "word " * (1 + index * 7 % 5), **own[index % 4]}


def write_lines(*records: dict[str, Any]) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def write_input(records: int = RECORDS) -> None:
    write_lines(*map(record, range(records)))


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]


def finished(output: str) -> int:
    return Journal.find(Path(output + ".work")).standing().records_finished


def launched(*overrides: str) -> None:
    """A run in a forked child: exits as the command does, or is ended if it does not."""
    signal.alarm(120)
    sys.argv = ["llama-ssp", "model=tiny", "draft=tiny_draft", *overrides]
    try:
        cli.main()
    except SystemExit as left:
        os._exit(int(left.code or 0))
    except BaseException:
        traceback.print_exc()
        os._exit(77)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the input, a whole job and its output."""
    folder = tmp_path_factory.mktemp("calm")

    def whole() -> None:
        os.chdir(folder)
        write_input()
        launched(*SMALL, "task.output=calm.jsonl")

    assert in_child(whole) == 0
    return folder


@pytest.fixture
def undisturbed(command: Command, calm: Path) -> bytes:
    shutil.copytree(calm, ".", dirs_exist_ok=True)
    return Path("calm.jsonl").read_bytes()


def test_answers_stand_in_the_order_of_the_input(command: Command):
    write_input()
    done = command(*SMALL, "task.output=out.jsonl")
    told = lines("out.jsonl")
    assert [line["id"] for line in told] == [f"r/{i}" for i in range(RECORDS)]
    assert [line["output_tokens"] for line in told] == [2 if i % 4 == 2 else 6 for i in range(RECORDS)]
    said = done.document
    assert (said["status"], said["records_finished"], said["shards_done"]) == ("done", RECORDS, 3)
    assert said["tokens_committed"] == sum(line["output_tokens"] for line in told)
    assert said["tokens_per_s"] > 0


def test_a_job_goes_on_with_the_k_that_it_began_with(command: Command, monkeypatch: pytest.MonkeyPatch):
    """Which follows what rounds cost at its begin: after a kill, and with other rows. Control: another K."""
    write_input()
    adaptive = [*MODELS, *SMALL[len(JOB) :]]
    assert command(*adaptive, "task.output=whole.jsonl").code == 0
    work = Path("whole.jsonl.work")
    held = json.loads((work / "costs.json").read_bytes())
    assert json.loads((work / "run.json").read_bytes())["settings"]["speculation.adaptive"] is True
    assert held["k"] in range(len(held["rounds"]))
    monkeypatch.setattr("llama_ssp.pair.session.measured", lambda *_: pytest.fail("costs are known"))
    for name, k, rows in (("a", 0, 3), ("b", 0, 2), ("c", 3, 3)):
        shutil.copytree(work, f"{name}.jsonl.work")
        for folder in ("parts", "done"):
            shutil.rmtree(f"{name}.jsonl.work/{folder}")
            Path(f"{name}.jsonl.work/{folder}").mkdir()
        Path(f"{name}.jsonl.work/costs.json").write_text(json.dumps(held | {"k": k}))
        drafted = command(*adaptive, f"task.output={name}.jsonl", f"task.batch_size={rows}").document
        assert (drafted["tokens_drafted"] > 0) == (k > 0)
    texts = [Path(f"{name}.jsonl").read_bytes() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


def test_a_job_goes_on_with_the_drafts_that_it_began_with(command: Command):
    """Which draw from their likeliest tokens, or from all: also where an older version began the job."""
    write_input()
    manifest = Path("out.jsonl.work/run.json")

    def begun(*words: str) -> Any:
        shutil.rmtree("out.jsonl.work", ignore_errors=True)
        Path("out.jsonl").unlink(missing_ok=True)
        assert command(*SMALL, "task.output=out.jsonl", *words).code == 0
        return json.loads(manifest.read_bytes())["settings"]["speculation.draft_top"]

    def again(*words: str) -> int:
        for folder in ("parts", "done"):
            shutil.rmtree(f"out.jsonl.work/{folder}")
            Path(f"out.jsonl.work/{folder}").mkdir()
        Path("out.jsonl").unlink()
        return command(*SMALL, "task.output=out.jsonl", *words).code

    assert begun() is None
    whole = Path("out.jsonl").read_bytes()
    held = json.loads(manifest.read_bytes())
    del held["settings"]["speculation.draft_top"]  # as versions before this setting wrote it
    manifest.write_text(json.dumps(held))
    assert again() == 0 and Path("out.jsonl").read_bytes() == whole
    assert command(*SMALL, "task.output=out.jsonl", "speculation.draft_top=2").code == DATA

    assert begun("speculation.draft_top=2") == 2
    narrow = Path("out.jsonl").read_bytes()
    assert narrow != whole, "other drafts, and so other texts of a seed"
    assert again() == 0 and Path("out.jsonl").read_bytes() == narrow
    assert command(*SMALL, "task.output=out.jsonl", "speculation.draft_top=3").code == DATA


def test_rounds_are_prepared_once_the_k_that_a_job_keeps_is_known(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    """At first those that are measured. All at once where K is known, and where drafts are looked up."""
    prepared: list[Any] = []
    prepare = session.prepare

    def noted(pair: Any, speculation: Any, rows: int, slots: int, ks: Sequence[int]) -> None:
        prepared.append((speculation.longest, *ks))
        prepare(pair, speculation, rows, slots, ks)

    monkeypatch.setattr(session, "prepare", noted)
    monkeypatch.setattr(session, "prepare_anew", lambda _, spec, *sizes: prepared.append(spec.longest))
    write_input()
    adaptive = [*MODELS, *SMALL[len(JOB) :]]
    assert command(*adaptive, "task.output=whole.jsonl").code == 0
    work = Path("whole.jsonl.work")
    kept = json.loads((work / "costs.json").read_bytes())["k"]
    assert prepared == [(16, 0, 1, 4, 16), kept]

    prepared.clear()
    shutil.copytree(work, "a.jsonl.work")
    for folder in ("parts", "done"):
        shutil.rmtree(f"a.jsonl.work/{folder}")
        Path(f"a.jsonl.work/{folder}").mkdir()
    assert command(*adaptive, "task.output=a.jsonl").code == 0
    assert prepared == [(kept,)]

    prepared.clear()
    assert command(*adaptive, "speculation.drafter=ngram", "task.output=b.jsonl").code == 0
    assert prepared == [(16,)]


def test_a_job_keeps_the_verdict_on_the_rounds_that_it_writes(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Those are prepared, and compared with eager ones, once K is known: here they differ, others did not."""
    load = assembly.ModelCache.open
    places = session.require_loadable

    def compiled(cache: assembly.ModelCache, placements: Any) -> assembly.RankModels:
        models = load(cache, placements)
        models.target.is_compiled = True  # type: ignore[union-attr]
        return models

    def on_trial(*given: Any) -> Any:
        placements, prediction = places(*given)
        return replace(placements, target=replace(placements.target, on_trial=True)), prediction

    def differing(models: assembly.RankModels, *_: Any) -> None:
        models.target.is_compiled = False  # type: ignore[union-attr]
        models.trials["model"] = cast(Trial, "other logits")

    monkeypatch.setattr(assembly.ModelCache, "open", compiled)
    monkeypatch.setattr(session, "compiled_before", lambda *_: tmp_path / "compiled")
    monkeypatch.setattr(session, "require_loadable", on_trial)
    monkeypatch.setattr(session, "prepare", lambda *_: None)
    monkeypatch.setattr(session, "prepare_anew", differing)
    write_input()
    done = command(*MODELS, *SMALL[len(JOB) :], "task.output=out.jsonl")
    assert done.document["engines"]["model"] == "eager: other logits"
    assert json.loads(Path("out.jsonl.work/trials.json").read_bytes()) == {"model": "eager"}
    assert [line for line in caplog.messages if "the steps of" in line] == [
        "engine: the steps of tiny run eager: other logits"
    ]


def test_a_job_keeps_the_number_of_rows_that_it_began_with(command: Command, monkeypatch: pytest.MonkeyPatch):
    """Where nothing names it; the plan may find another one for what is left."""
    write_input(5)
    load, rows = PairSession.load, list[int]()
    monkeypatch.setattr(
        PairSession, "load", lambda pair, n, *a, **k: rows.append(n) or load(pair, n, *a, **k)
    )
    job, work = [*JOB, "task.max_new_tokens=4", "task.output=out.jsonl"], Path("out.jsonl.work")
    assert command(*job).code == 0
    assert json.loads((work / "rows.json").read_bytes()) == rows[0] > 2
    (work / "rows.json").write_text("2")
    shutil.rmtree(work / "done")
    assert command(*job).code == 0 and rows[1] == 2


def job_with_rows(command: Command, monkeypatch: pytest.MonkeyPatch, kept: int) -> list[int]:
    """The rows that a job's second process loads for, where the first one has written this number."""
    write_input(5)
    load, rows = PairSession.load, list[int]()
    job, work = [*JOB, "task.max_new_tokens=4", "task.output=out.jsonl"], Path("out.jsonl.work")
    assert command(*job).code == 0
    (work / "rows.json").write_text(str(kept))
    shutil.rmtree(work / "done")
    monkeypatch.setattr(
        PairSession, "load", lambda pair, n, *a, **k: rows.append(n) or load(pair, n, *a, **k)
    )
    monkeypatch.setattr(PairSession, "rows_for", lambda *_: 3)
    assert command(*job).code == 0
    return rows


def test_a_process_with_less_room_takes_fewer_rows_than_the_job_began_with(
    command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It ended with code 5, and on Slurm its element was given up."""
    caplog.set_level("INFO")
    assert job_with_rows(command, monkeypatch, kept=5) == [3]
    said = "3 rows at a time, not 5 as the job began: more do not fit or pay; 16-bit texts differ"
    assert said in caplog.messages
    assert json.loads(Path("out.jsonl.work/rows.json").read_bytes()) == 5, "for the others"


def test_a_process_with_more_room_takes_the_rows_that_the_job_began_with(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    assert job_with_rows(command, monkeypatch, kept=2) == [2]


def test_a_job_keeps_its_number_formats_and_its_device(command: Command, caplog: pytest.LogCaptureFixture):
    """Another format of the target is refused, with both names; another device is said."""
    caplog.set_level("INFO")
    write_input(2)
    job, work = [*JOB, "task.max_new_tokens=4", "task.output=out.jsonl"], Path("out.jsonl.work")
    assert command(*job).code == 0
    formats = work / "formats.json"
    kept = json.loads(formats.read_bytes())
    assert kept["formats"].keys() == {"model", "draft"} and kept["device"]
    log = next((work / "groups").glob("*.jsonl")).read_text(encoding="utf-8")
    assert json.dumps(kept["device"]) in log

    shutil.rmtree(work / "done")
    formats.write_text(json.dumps({**kept, "device": "a GPU"}))
    assert command(*job).code == 0
    assert any(line.startswith("the job began on a GPU, this is ") for line in caplog.messages)

    shutil.rmtree(work / "done")
    other = {**kept, "formats": {**kept["formats"], "model": "fp16"}, "device": "a V100"}
    formats.write_text(json.dumps(other))
    refused = command(*job)
    (line,) = refused.errors
    assert refused.code == 3 and "another number format" in line
    assert f"found {kept['formats']['model']} on {kept['device']}, allowed fp16 on a V100" in line

    formats.write_text(json.dumps({**kept, "formats": {**kept["formats"], "draft": "fp16"}}))
    assert command(*job).code == 0, "a draft in another format gives the same distribution"
    assert any("the job began with its draft in fp16" in line for line in caplog.messages)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "how",
    [["task.batch_size=1"], ["task.shard_size=100", "task.batch_size=8"], ["task.prefill_chunk=2"]],
    ids=["one row", "one shard", "parts of prompts"],
)
def test_how_records_are_grouped_does_not_matter(how: list[str], command: Command, undisturbed: bytes):
    changed = [o for o in SMALL if o.partition("=")[0] not in {h.partition("=")[0] for h in how}]
    assert command(*changed, *how, "task.output=out.jsonl").code == 0
    assert Path("out.jsonl").read_bytes() == undisturbed


def test_each_text_is_what_generate_gives_it(command: Command, undisturbed: bytes):
    """Also with a line's own settings and seed, which are a run's settings and seed."""
    for index in (0, 1, 3):
        own = {"temperature": 1.0, "top_k": 0, "seed": 3, **record(index)}
        Path("one.jsonl").write_text(json.dumps({"id": own["id"], "prompt": own["prompt"]}) + "\n")
        done = command(
            "task.prompt_file=one.jsonl", "task.max_new_tokens=6", f"seed={own['seed']}", "output=json",
            "model.dtype=fp64", "draft.dtype=fp64", "out=null", f"sampling.temperature={own['temperature']}",
            f"sampling.top_k={own['top_k']}",
        )  # fmt: skip
        text, told = done.document["outputs"][0], lines("calm.jsonl")[index]
        for key in ("text", "token_ids", "finish_reason"):
            assert told[key] == text[key]


def test_rows_are_refilled_at_once(command: Command, monkeypatch: pytest.MonkeyPatch):
    """As long as texts wait, of any shard, no row rests: a round has fewer rows at the job's end alone."""
    write_input(9)
    busy: list[int] = []
    whole = ModelRunner.logits

    def watched(self: ModelRunner, token_BS: Any, ends: list[int], wanted: list[int], *more: Any) -> Any:
        if self.model.name == "tiny":
            busy.append(sum(end > cached for end, cached in zip(ends, self.cached, strict=True)))
        return whole(self, token_BS, ends, wanted, *more)

    monkeypatch.setattr(ModelRunner, "logits", watched)
    command(*SMALL, "task.output=out.jsonl", "speculation=none")
    assert sum(busy) == sum(line["output_tokens"] for line in lines("out.jsonl"))
    assert busy[0] == 3 and busy == sorted(busy, reverse=True)


def test_a_second_start_finds_nothing_to_do(
    command: Command, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Run, "begin", lambda *_: pytest.fail("something was written"))
    for _ in range(2):
        again = command(*SMALL, "task.output=calm.jsonl")
        assert again.code == 0 and again.document["records_answered_here"] == 0
        assert Path("calm.jsonl").read_bytes() == undisturbed
        Path("calm.jsonl").unlink()


def test_a_drawn_seed_is_kept(command: Command):
    write_input(3)
    job = [*(word for word in SMALL if not word.startswith("seed")), "task.output=out.jsonl"]
    assert command(*job).document["seed"] == command(*job).document["seed"]


def test_the_output_of_another_run_is_left_alone(command: Command):
    """Before the job has begun, and when it is done."""
    write_input(2)
    for _ in range(2):
        Path("out.jsonl").write_text("precious")
        refused = command(*SMALL, "task.output=out.jsonl")
        assert refused.code == 3 and "move it away" in refused.errors[0]
        assert Path("out.jsonl").read_text() == "precious"
        Path("out.jsonl").unlink()
        assert command(*SMALL, "task.output=out.jsonl").code == 0


def test_an_empty_input_has_an_empty_output(command: Command, caplog: pytest.LogCaptureFixture):
    Path("in.jsonl").write_text("\n")
    done = command(*SMALL, "task.output=out.jsonl")
    assert (done.code, Path("out.jsonl").read_bytes()) == (0, b"")
    assert "holds no records" in caplog.text


@pytest.fixture
def parts(undisturbed: bytes) -> Path:
    """The input in a folder of two files, one of them packed."""
    whole, folder = Path("in.jsonl").read_bytes().splitlines(keepends=True), Path("parts")
    folder.mkdir()
    (folder / "a.jl").write_bytes(b"".join(whole[:4]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(whole[4:])))
    return folder


@pytest.mark.parametrize("name", ["parts", "parts/*", "-"], ids=["a folder", "a pattern", "standard input"])
def test_files_of_any_kind_are_one_input_that_is_read_once(
    name: str, parts: Path, command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    """Among them gzip and .jl."""
    job = [*SMALL, f"task.input={name}", "task.output=out.jsonl"]
    assert command(*job, stdin=Path("in.jsonl").read_bytes()).code == 0
    assert Path("out.jsonl").read_bytes() == undisturbed
    monkeypatch.setattr(Index, "_build", lambda *_: pytest.fail("the input was read again"))
    assert command(*job).code == 0


def test_a_job_whose_input_has_changed_is_refused(parts: Path, command: Command):
    job = [*SMALL, "task.input=parts", "task.output=out.jsonl"]
    assert command(*job).code == 0
    (parts / "a.jl").write_bytes(b"".join(Path("in.jsonl").read_bytes().splitlines(keepends=True)[:3]))
    refused = command(*job)
    assert refused.code == 3 and "input_sha256" in refused.errors[0]


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1)


@pytest.mark.parametrize("name", ["sparse.jsonl", "bomb.jsonl.gz", "-"])
def test_a_line_without_an_end_is_refused_while_it_is_read(name: str, command: Command):
    """Not after it has been read: a file of gigabytes takes little memory."""
    endless = bytes(2 * MAX_UNENDED_BYTES)
    stdin = b""
    match name:
        case "sparse.jsonl":
            with Path(name).open("wb") as file:
                file.truncate(2**36)
        case "bomb.jsonl.gz":
            Path(name).write_bytes(gzipped(endless))
        case _:
            stdin = endless

    tracemalloc.start()
    refused = command(*JOB, f"task.input={name}", "task.output=out.jsonl", stdin=stdin)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert refused.code == 3 and len(refused.errors) == 1
    assert "line 1" in refused.errors[0] and "does not end" in refused.errors[0]
    assert peak < 3 * MAX_UNENDED_BYTES
    assert not Path("out.jsonl").exists()
    assert not list(Path("out.jsonl.work").glob("*")), "nothing is left of what was unpacked"


def test_lines_after_one_that_is_too_long_are_answered(command: Command):
    """A line that ends is a record that is refused; the others are not."""
    write_input(3)
    long_line = b'{"id": "long", "prompt": "%s"}\n' % (b"a" * MAX_LINE_BYTES)
    Path("in.jsonl").write_bytes(long_line + Path("in.jsonl").read_bytes())
    done = command(*SMALL, "task.output=out.jsonl", "task.on_bad_row=skip")
    assert done.code == 0
    assert ["error" in line for line in lines("out.jsonl")] == [True, False, False, False]
    assert "too long" in lines("out.jsonl")[0]["error"]["message"]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_so_many_bad_lines_are_no_input(policy: str, command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llama_ssp.batch.index.MAX_BAD", 5)
    monkeypatch.setattr("llama_ssp.batch.index.MAX_SKIPPED", 7)
    Path("in.jsonl").write_text("{\n" * 100)
    refused = command(*SMALL, "task.output=out.jsonl", f"task.on_bad_row={policy}")
    assert refused.code == 3 and len(refused.errors) == 1
    assert f"more than {5 if policy == 'fail' else 7} lines are bad" in refused.errors[0]


def test_a_job_has_a_bounded_number_of_records(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llama_ssp.batch.index.MAX_RECORDS", 4)
    write_input(4)
    assert command(*SMALL, "task.output=four.jsonl").code == 0
    write_input(5)
    refused = command(*SMALL, "task.output=five.jsonl")
    assert refused.code == 3 and "too many records; in.jsonl line 5" in refused.errors[0]


def test_a_pipe_that_nobody_writes_into_is_not_waited_for(command: Command):
    os.mkfifo("pipe")
    refused = command(*SMALL, "task.input=pipe", "task.output=out.jsonl")
    assert refused.code == 3 and "nothing comes through the pipe; " in refused.errors[0]


def test_a_pipe_by_its_name_is_an_input(command: Command, undisturbed: bytes):
    reader, writer = os.pipe()
    os.write(writer, Path("in.jsonl").read_bytes())
    os.close(writer)
    done = command(*SMALL, f"task.input=/dev/fd/{reader}", "task.output=out.jsonl")  # <(command) of a shell
    os.close(reader)
    assert done.code == 0 and Path("out.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["task.work=users"], 3, "holds other files, and no job"),
        (["task.work=/"], 3, "holds other files, and no job"),
        (["task.work=in.jsonl"], 3, "the job's folder is a file"),
        (["task.work=out.jsonl"], 2, "where the output goes"),
        (["task.work=job", "task.output=job/run.json"], 2, "a name that the job's folder needs"),
    ],
    ids=["users", "root", "file", "output", "manifest"],
)
def test_a_folder_that_is_no_job_s_is_refused_before_anything_is_written(
    words: list[str], code: int, says: str, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PairSession, "load", lambda *_: pytest.fail("a model was loaded"))
    write_input(2)
    Path("users/parts").mkdir(parents=True)
    for name in ("thesis.txt", "part.0001.csv"):
        Path("users/parts", name).write_text("mine")
    before = sorted(Path().rglob("*"))

    refused = command(*SMALL, "task.output=out.jsonl", *words)

    assert refused.code == code and len(refused.errors) == 1
    assert says in refused.errors[0]
    assert sorted(Path().rglob("*")) == before


@pytest.mark.slow
def test_what_a_user_puts_into_a_job_s_folder_stays(command: Command, undisturbed: bytes):
    """Killed, resumed, merged, and started again."""
    job = [*SMALL, "task.output=out.jsonl", "task.work=job"]
    names = {"thesis.txt", "part.0001.csv", "notes.jsonl"}

    def killed() -> None:
        Deadly(at=9000).install()
        launched(*job)

    assert in_child(killed) == KILLED
    Path("job/parts").mkdir(exist_ok=True)
    for name in names:
        Path("job/parts", name).write_text("mine")
    assert [command(*job).code for _ in range(2)] == [0, 0]
    assert Path("out.jsonl").read_bytes() == undisturbed
    assert {path.name for path in Path("job/parts").iterdir()} == names


def test_a_job_whose_folder_is_removed_meanwhile_ends_in_a_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    stopped_at(monkeypatch, 5, lambda: shutil.rmtree("out.jsonl.work"))
    ended = command(*SMALL, "task.output=out.jsonl")
    assert ended.code == 6 and len(ended.errors) == 1
    assert "folder was removed while this process worked on it" in ended.errors[0]
    assert not Path("out.jsonl.work").exists(), "it is not made anew"
    monkeypatch.undo()
    monkeypatch.chdir(Path("out.jsonl").absolute().parent)


CLONE_NEWPID = 0x20000000


@pytest.mark.slow
def test_two_containers_with_equal_names_share_a_job(command: Command, undisturbed: bytes):
    """In two pid namespaces both processes are number 1 of one host."""
    libc = ctypes.CDLL(None, use_errno=True)

    def contained() -> None:
        if libc.unshare(CLONE_NEWPID) != 0:
            os._exit(99)
        os._exit(in_child(lambda: launched(*SMALL, "task.output=out.jsonl")))

    codes = [wait() for wait in [child_of(contained), child_of(contained)]]
    if 99 in codes:
        pytest.skip("this machine makes no pid namespaces")
    assert codes == [0, 0]
    assert Path("out.jsonl").read_bytes() == undisturbed


def test_a_corrected_line_is_taken_where_its_answer_was_an_error(command: Command, undisturbed: bytes):
    """And no other line: an answer that is there stays that of its line."""
    whole, job = Path("in.jsonl").read_bytes(), [*SMALL, "task.on_bad_row=skip", "task.output=out.jsonl"]
    before = whole.splitlines(keepends=True)
    Path("in.jsonl").write_bytes(b"".join([*before[:4], b'{"id": "r/4", "prompt": 1}\n', *before[5:]]))
    assert command(*job).document["records_failed"] == 1
    Path("in.jsonl").write_bytes(whole)
    said = command(*job).document
    assert (said["records_failed"], said["records_answered_here"]) == (0, 1)
    assert Path("out.jsonl").read_bytes() == undisturbed
    for changed, why in (
        (whole.replace(b"word ", b"words ", 1), "has changed; .*another record 1, which has an answer"),
        (whole.replace(b"r/4", b"r/x"), "another job; .*input_sha256"),
    ):
        Path("in.jsonl").write_bytes(changed)
        refused = command(*job)
        assert refused.code == 3 and re.search(why, refused.errors[0])
    Path("in.jsonl").write_bytes(whole)
    assert command(*job).document["records_answered_here"] == 0
    assert Path("out.jsonl").read_bytes() == undisturbed


def test_answers_have_the_fields_that_are_asked_for(command: Command, undisturbed: bytes):
    """Log-probabilities too; a job keeps its fields."""
    job = [*SMALL, "task.logprobs=0", "task.output=out.jsonl"]
    assert command(*job, "task.fields=text", "task.fields=logprobs").code == 0
    told, calm = lines("out.jsonl"), lines("calm.jsonl")
    assert {tuple(line) for line in told} == {("id", "text", "output_tokens", "logprobs")}
    assert [(line["id"], line["text"]) for line in told] == [(line["id"], line["text"]) for line in calm]
    refused = command(*job)
    assert refused.code == 3 and "task.fields=['logprobs', 'text'] now None" in refused.errors[0]
    assert command(*job, "task.fields=texts").code == 2


def test_parquet_needs_its_library(command: Command, monkeypatch: pytest.MonkeyPatch):
    Path("in.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused = command(*SMALL, "task.input=in.parquet", "task.output=out.jsonl")
    assert refused.code == 2 and "pip install pyarrow" in refused.errors[0] and len(refused.errors) == 1


def test_rows_of_parquet_are_records(command: Command, undisturbed: bytes):
    """What is null in a row is left out; a file that is none is said to be so."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    columns = {name: None for index in range(RECORDS) for name in record(index)}
    table = arrow.Table.from_pylist([columns | record(index) for index in range(RECORDS)])
    parquet.write_table(table, "in.parquet")
    assert command(*SMALL, "task.input=in.parquet", "task.output=out.jsonl").code == 0
    assert Path("out.jsonl").read_bytes() == undisturbed
    Path("in.parquet").write_bytes(b"no table")
    refused = command(*SMALL, "task.input=in.parquet", "task.output=other.jsonl")
    assert refused.code == 3 and "cannot be unpacked" in refused.errors[0]


def test_a_text_longer_than_was_foreseen_is_written_apart(
    command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    """Only the longest of many prompts are tokenised before a job begins: another may have more tokens."""
    begin = Job.begin
    monkeypatch.setattr(Job, "begin", lambda job, _: begin(job, 15))
    assert command(*SMALL, "task.output=out.jsonl").code == 0
    assert Path("out.jsonl").read_bytes() == undisturbed


LONG = {"id": "b", "prompt": "y" * 2000}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([LONG, {"prompt": 1}], "line 3"),
        ([LONG], "fills the model's context"),
        ([{"prompt": "word " * 3_000_000}], "found more than 16384 tokens, allowed at most 1023"),
    ],
    ids=["not a prompt", "too long", "far too long"],
)
def test_bad_lines_end_the_job_before_it_begins(records: list[Any], said: str, command: Command):
    write_lines({"prompt": "x"}, *records)
    refused = command(*SMALL, "task.output=out.jsonl")
    assert refused.code == 3 and said in refused.errors[0]
    assert not Path("out.jsonl").exists() and not Path("out.jsonl.work/run.json").exists()


def test_or_are_answered_with_their_errors(command: Command, monkeypatch: pytest.MonkeyPatch):
    write_lines({"id": "a", "prompt": "x"}, LONG, {"id": "a", "prompt": "z"})
    with Path("in.jsonl").open("a") as file:
        file.write("{\n")
    shown = Counter[str]()
    monkeypatch.setattr(Progress, "advance", lambda bar, count: shown.update({bar._what: count}))
    done = command(*SMALL, "task.output=out.jsonl", "task.on_bad_row=skip")
    first, *bad = lines("out.jsonl")
    assert first["finish_reason"] == "length"
    assert [line["id"] for line in bad] == ["b", "line-3", "line-4"], "no id stands twice"
    for line, why in zip(bad, ("fills the model's context", "used twice", "not JSON"), strict=True):
        assert why in line["error"]["message"]
    assert (done.code, done.document["records_refused_here"]) == (0, 3)
    assert shown["batch"] == 4


def test_a_place_of_the_output_is_tried_before_a_model_is_loaded(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    """Where the journal is elsewhere, too; the journal's own folder is made, so this one is."""
    write_input(2)
    assert command(*SMALL, "task.work=work", "task.output=new/out.jsonl").code == 0
    assert [path.name for path in Path("new").iterdir()] == ["out.jsonl"]
    monkeypatch.setattr(PairSession, "load", lambda *_: pytest.fail("a model was loaded"))
    refused = command(*SMALL, "task.work=work2", "task.output=in.jsonl/out.jsonl")
    assert refused.code == 6 and len(refused.errors) == 1


def stopped_at(monkeypatch: pytest.MonkeyPatch, index: int, act: Any) -> None:
    """The process meets its fate as soon as this record is begun."""
    whole = Journal.attempt

    def attempt(self: Journal, *args: Any) -> Any:
        made = whole(self, *args)
        begin = made.begin

        def begun(indices: list[int], among: int) -> None:
            begin(indices, among)
            if index in indices:
                act()

        made.begin = begun  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(Journal, "attempt", attempt)


@pytest.mark.slow
def test_only_a_record_that_kills_is_set_aside(
    command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    """Where the job has run on two nodes, not for deaths on one of them."""
    with monkeypatch.context() as patch:
        stopped_at(patch, 5, lambda: os._exit(KILLED))
        kills = 0  # once among others, once with those of its shard again, three times alone
        while in_child(lambda: launched(*SMALL, "task.output=out.jsonl")) == KILLED:
            kills += 1
            if kills == 6:
                patch.setattr(socket, "gethostname", lambda: "another")
            if kills == 1:
                append_line(Path("out.jsonl.work/groups/x.jsonl"), {"node": "another"})
        assert kills == 7
    told, calm = lines("out.jsonl"), lines("calm.jsonl")
    assert "set aside" in told[5]["error"]["message"]
    assert [*told[:5], *told[6:]] == [*calm[:5], *calm[6:]]


def test_the_records_of_a_broken_device_stay_open(
    command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    """Between sound texts one without numbers is an error of its record; three in a row are the device's."""
    whole, broken = ModelRunner.logits, list[int]()

    def logits(self: ModelRunner, *args: Any) -> Any:
        found = whole(self, *args)
        broken.append(0)
        return found * float("nan") if self.model.name == "tiny" and len(broken) > 12 else found

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "logits", logits)
        stopped = command(*SMALL, "task.output=out.jsonl")
    assert stopped.code == 5 and "3 texts one after another" in stopped.errors[0]
    assert f"; {socket.gethostname()}, " in stopped.errors[0] and "stay open" in stopped.errors[0]
    assert command(*SMALL, "task.output=out.jsonl").code == 0
    assert Path("out.jsonl").read_bytes() == undisturbed


def test_a_small_job_without_one_sound_text_stays_open(command: Command, monkeypatch: pytest.MonkeyPatch):
    """Two texts are fewer than show a broken device in a long job; here nothing shows a sound one."""
    write_input(2)
    with monkeypatch.context() as patch:
        failing(patch, "r/0", "r/1")
        stopped = command(*SMALL, "task.output=out.jsonl")
    assert stopped.code == 5 and "all texts, 2, ended where" in stopped.errors[0]
    assert "the records stay open" in stopped.errors[0]
    assert command(*SMALL, "task.output=out.jsonl").code == 0
    assert ["error" in line for line in lines("out.jsonl")] == [False, False]


def test_a_job_of_errors_alone_does_not_end_with_0(command: Command):
    """The output is written all the same, and a second start says it again."""
    Path("in.jsonl").write_text("{\n{\n")
    for _ in range(2):
        ended = command(*SMALL, "task.output=out.jsonl", "task.on_bad_row=skip")
        assert ended.code == 3 and len(ended.errors) == 1
        assert "every record was answered with an error" in ended.errors[0]
        assert ["error" in line for line in lines("out.jsonl")] == [True, True]


def failing(monkeypatch: pytest.MonkeyPatch, *ids: str) -> None:
    """The answers to these records are errors."""
    whole = Run.ended

    def ended(self: Run) -> Iterator[Reply]:
        for said in whole(self):
            said.finish_reason = "error" if f"r/{said.index}" in ids else said.finish_reason
            yield said

    monkeypatch.setattr(Run, "ended", ended)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_record_without_numbers_is_to_blame_alone_or_on_two_nodes(
    nodes: int, command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    ids = ["r/4"] if nodes == 1 else ["r/0", "r/1", "r/2", "r/3"]
    failing(monkeypatch, *ids)
    for node in range(nodes):
        monkeypatch.setattr(batch.socket, "gethostname", lambda node=node: f"node{node}")
        done = command(*SMALL, "task.output=out.jsonl")
        assert done.code == (0 if node == nodes - 1 else 5)
    told, calm = lines("out.jsonl"), lines("calm.jsonl")
    assert [line["id"] for line in told if "error" in line] == ids
    assert [one for one in told if "error" not in one] == [one for one in calm if one["id"] not in ids]


def test_scattered_records_without_numbers_do_not_stop_a_job(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    """A sound text between two of them shows that the device is sound, however many there are."""
    write_lines(*({"id": f"r/{index}", "prompt": "word"} for index in range(8)))
    bad = ["r/1", "r/3", "r/5", "r/7"]
    assert len(bad) > batch.DAMAGED_IN_ROW
    failing(monkeypatch, *bad)
    alone = [
        word for word in SMALL if not word.startswith("task.batch_size=")
    ]  # so each ends before the next
    done = command(*alone, "task.batch_size=1", "task.output=out.jsonl")
    assert done.code == 0, done.err
    assert [line["id"] for line in lines("out.jsonl") if "error" in line] == bad


@pytest.fixture
def with_error(command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes) -> Answer:
    """A job that has answered one record with an error."""
    with monkeypatch.context() as patch:
        failing(patch, "r/4")
        return command(*SMALL, "task.output=out.jsonl")


def test_errors_are_counted(command: Command, with_error: Answer):
    assert with_error.document["records_failed"] == 1
    status = command("task=batch", "task.status=true", "task.output=out.jsonl").document
    assert (status["records_failed"], status["status"]) == (1, "done")
    assert [group["failed"] for group in status["groups"]] == [1] and status["gpu_hours"] == 0  # on a CPU


@pytest.mark.usefixtures("with_error")
def test_errors_are_answered_again_when_asked(command: Command, undisturbed: bytes):
    assert command(*SMALL, "task.output=out.jsonl").document["records_answered_here"] == 0
    again = command(*SMALL, "task.output=out.jsonl", "task.retry_errors=true").document
    assert (again["records_failed"], again["records_answered_here"]) == (0, 1)
    assert Path("out.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize(
    ("splitting", "others", "count"),
    [(Splitting.tensor, ["gpu-a", "gpu-b"], 2), (Splitting.tensor, [""], 1), (Splitting.layers, [], 3)],
    ids=["two GPUs", "the host", "by layers"],
)
def test_gpus_are_counted_not_ranks(
    splitting: Splitting, others: list[str], count: int, monkeypatch: pytest.MonkeyPatch
):
    """Two ranks may share one GPU; one rank may have several; a rank may compute on the host."""
    names = {"cpu": NO_GPU, "a": "gpu-a", "b": "gpu-b", "c": "gpu-c"}
    monkeypatch.setattr(batch, "gpu_of", names.__getitem__)
    monkeypatch.setattr(batch, "every_device", lambda: [*names])
    here = [SimpleNamespace(ranks=(0, 1), device="a", splitting=splitting)]
    away = [SimpleNamespace(ranks=(2,), device="c", splitting=splitting)]
    ranks: Any = SimpleNamespace(rank=0, gather_texts=lambda own: [own, *others])
    assert batch.gpus_of(cast(Any, SimpleNamespace(placements=[*here, *away])), ranks) == count


@pytest.mark.slow
@pytest.mark.parametrize("new", [0, 2])
def test_a_killed_run_keeps_the_batches_that_it_has_scored(
    new: int, command: Command, monkeypatch: pytest.MonkeyPatch
):
    asked = {"max_tokens": new, "echo": True, "logprobs": 0}
    write_lines(*({"id": str(i), "prompt": "a" * (12 - i), **asked} for i in range(6)))
    job = [*JOB, "task.batch_size=2", "task.shard_size=100", "task.output=out.jsonl"]
    with monkeypatch.context() as patch:
        stopped_at(patch, 4, lambda: os._exit(KILLED))
        assert in_child(lambda: launched(*job)) == KILLED
    assert finished("out.jsonl") == 4
    assert command(*job).document["records_answered_here"] == 2
    assert command(*job[:-1], "task.output=calm.jsonl").code == 0
    if not new:
        assert Path("out.jsonl").read_bytes() == Path("calm.jsonl").read_bytes()
    told, calm = ([line["token_ids"] for line in lines(name)] for name in ("out.jsonl", "calm.jsonl"))
    assert told == calm  # log-probabilities of rows alone are rounded in another way


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_blames_no_record(
    number: signal.Signals, command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    with monkeypatch.context() as patch:
        stopped_at(patch, 5, lambda: os.kill(os.getpid(), number))
        for _ in range(4):
            assert in_child(lambda: launched(*SMALL, "task.output=out.jsonl")) == 128 + number
    assert command(*SMALL, "task.output=out.jsonl").code == 0
    assert Path("out.jsonl").read_bytes() == undisturbed


@pytest.mark.slow
def test_the_status_keeps_a_process_that_was_killed(
    command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    """What it had finished, and that it failed, when it has just died and when the job is done."""
    with monkeypatch.context() as patch:
        stopped_at(patch, 5, lambda: os._exit(KILLED))
        assert in_child(lambda: launched(*SMALL, "task.output=out.jsonl")) == KILLED

    def status() -> Any:
        return command("task=batch", "task.status=true", "task.output=out.jsonl").document

    killed = status()
    (group,) = killed["groups"]
    assert killed["failures"] == 1 and group["died"] and 0 < group["records"] < RECORDS
    assert command(*SMALL, "task.output=out.jsonl").code == 0
    done = status()
    second, first = sorted(done["groups"], key=lambda one: one["died"])
    assert (done["failures"], first["records"], first["died"]) == (1, group["records"], True)
    assert second["records"] == RECORDS - first["records"] and not second["died"]


@pytest.mark.slow
def test_killed_anywhere_nothing_is_lost_or_done_twice(command: Command, undisturbed: bytes):
    """The real task, killed at random bytes on their way to the disk and between steps, until the end."""
    length = sum(path.stat().st_size for path in Path("calm.jsonl.work").rglob("*") if path.is_file())
    points, kills = random.Random(2), 0
    for run in range(2):
        output = f"{run}.jsonl"
        for _ in range(12):
            deadly = Deadly(points.randrange(length))
            before = count_finished(Path(output + ".work"))
            code = in_child(lambda d=deadly, o=output: (d.install(), launched(*SMALL, f"task.output={o}")))
            assert code in (0, KILLED), run
            kills += code == KILLED
            assert count_finished(Path(output + ".work")) >= before, run
            if code == 0:
                break
        else:
            assert command(*SMALL, f"task.output={output}").code == 0, run
        assert Path(output).read_bytes() == undisturbed, run
    assert kills >= 4


@pytest.mark.slow
def test_a_disk_that_takes_no_more_loses_nothing(command: Command, undisturbed: bytes):
    """The system itself refuses a write in the middle of the job, as a full disk does."""

    def cramped() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        most = Path("calm.jsonl.work/run.json").stat().st_size + 20  # the parts get longer
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        launched(*SMALL[:-1], "task.shard_size=100", "task.output=out.jsonl")

    assert in_child(cramped) == 6
    assert 0 < finished("out.jsonl") < RECORDS
    assert command(*SMALL[:-1], "task.shard_size=100", "task.output=out.jsonl").code == 0
    assert Path("out.jsonl").read_bytes() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("lives", [True, False, None], ids=["lives", "dead", "unknown"])
def test_claims_from_elsewhere_are_waited_for(
    lives: bool | None, command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    """A run that was killed on another machine, or in a container, has just claimed the rest.

    None: the clock of the machine that stamped the claim is an hour ahead.
    """
    with monkeypatch.context() as patch:
        stopped_at(patch, 5, lambda: os._exit(KILLED))
        assert in_child(lambda: launched(*SMALL, "task.output=out.jsonl")) == KILLED
    claims = list(Path("out.jsonl.work/claims").glob("[!.]*"))
    for claim in claims:
        claim.write_text(json.dumps({**json.loads(claim.read_bytes()), "machine": "another"}))
    done = threading.Event()

    def beat() -> None:
        while lives and not done.wait(0.1):
            for claim in claims:
                claim.touch()

    for name, value in (("LOOK_S", 0.5), ("STALE_S", 3.0), ("BEAT_S", 0.0)):
        monkeypatch.setattr(batch, name, value)
    monkeypatch.setattr("llama_ssp.batch.attempts.STALE_S", 3.0)
    if lives is None:
        for claim in claims:
            os.utime(claim, (time.time() + 3600,) * 2)
    thread = threading.Thread(target=beat)
    thread.start()
    said = command(*SMALL, "task.output=out.jsonl").document
    done.set()
    thread.join()
    assert said["status"] == ("done" if lives is False else "partial")
    whole = Path("out.jsonl").read_bytes() if Path("out.jsonl").exists() else None
    assert whole == (undisturbed if lives is False else None)


@pytest.mark.slow
def test_two_writers_at_once(command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes):
    """Both work, on different shards; whoever is last writes the output."""
    claim = Journal.claim

    def together(self: Journal) -> Any:
        """No shard is begun before the other writer has one, too."""
        found = claim(self)
        Path(f"writer-{os.getpid()}").touch()
        while len(list(Path().glob("writer-*"))) < 2:
            time.sleep(0.01)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "claim", together)
        codes = [child_of(lambda: launched(*SMALL, "task.output=out.jsonl")) for _ in range(2)]
    assert [code() for code in codes] == [0, 0]
    assert Path("out.jsonl").read_bytes() == undisturbed
    assert len(list(Path("out.jsonl.work/groups").iterdir())) == 2
    assert not list(Path("out.jsonl.work/parts").iterdir())


@pytest.mark.slow
def test_one_of_three_groups_has_a_device_that_gives_no_numbers(
    command: Command, monkeypatch: pytest.MonkeyPatch, undisturbed: bytes
):
    """It stops, with its node and device; the others answer its records, too."""
    claim, logits = Journal.claim, ModelRunner.logits

    def together(self: Journal) -> Any:
        """Each group has a shard before one is begun; sound ones go on when the broken one has ended."""
        if Path(f"group-{os.getpid()}").exists():
            wait_for(Path("ended").exists)
        found = claim(self)
        Path(f"group-{os.getpid()}").touch()
        wait_for(lambda: len(list(Path().glob("group-*"))) == 3)
        return found

    def damaged(self: ModelRunner, *args: Any) -> Any:
        return logits(self, *args) * float("nan")

    def group(errors: str) -> None:
        sys.stderr = open(errors, "w", buffering=1)  # noqa: SIM115
        launched(*SMALL, "task.output=out.jsonl")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "claim", together)
        sound = [child_of(lambda: group("err")) for _ in range(2)]
        patch.setattr(ModelRunner, "logits", damaged)
        broken = child_of(lambda: group("err-2"))
    assert broken() == 5
    assert finished("out.jsonl") < RECORDS
    Path("ended").touch()
    assert [code() for code in sound] == [0, 0]
    said = Path("err-2").read_text()
    assert "3 texts one after another" in said and f"; {socket.gethostname()}, " in said
    assert Path("out.jsonl").read_bytes() == undisturbed
