"""Bad settings of task=eval, compare and measure as a table: one line and an exit code. A full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import config
from llama_ssp.config import Output, RunConf
from llama_ssp.distributed.comm import ALONE
from llama_ssp.errors import StorageError
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.runner import TASKS, _run
from llama_ssp.text.prompts import Reading
from tests.bad_inputs import (
    LARGE,
    PROMPT,
    Case,
    Making,
    require_one_line,
)
from tests.conftest import Command, Saved
from tests.hostile.corpus import FILES


def scored(name: str, *overrides: str, holds: tuple[str, ...], **more: Any) -> Case:
    """A case of task=eval, whose settings have no row of their own in the table."""
    return Case(0, f"eval-{name}", ("task=eval", *overrides), more.pop("code", 2), holds, **more)


def job_in_quotes(making: Making) -> list[str]:
    """A job of 0.2, whose command had Hydra's quotes around a path."""
    (making.folder / "o.jsonl.work").mkdir()
    return ["task=batch", "task.input=in.txt", f"task.output='{making.folder}/o.jsonl'"]


def broken_preset(making: Making) -> list[str]:
    making.write("conf/model/mine.yaml", "defaults: [tiny]\nname: mine\nn_heads: 6\n")
    return ["--config-dir", str(making.folder / "conf"), "task=eval", "task.pairs=[mine]"]


EVALUATIONS = [
    scored("no-target", "task.pairs=[llama2-7B]", holds=("no model=llama2-7B", "mean model=llama2-7b?")),
    scored("no-model", "task.pairs=[tiny,none]", holds=("there is no model=none",)),
    scored("half", "task.pairs=[tiny/]", holds=("task.pairs", "'tiny/'", "TARGET/DRAFT")),
    scored("outside", "task.pairs=['../x']", holds=("task.pairs", "'../x'")),
    scored("twice", "task.pairs=[tiny,tiny]", holds=("task.pairs holds an entry twice",)),
    scored(
        "ngram-draft", "task.pairs=[tiny/tiny_draft]", "speculation=ngram", holds=("none drafts", "ngram")
    ),
    scored("no-files", "task.pairs=[tiny,30B/7B]", holds=("30B is not at hand", "huggyllama"), code=4),
    Case(0, "eval-private-preset", broken_preset, 2, ("model.n_heads", "6 and 4")),
    scored("no-seeds", "task.seeds=[]", holds=("task.seeds is an empty list",)),
    scored("size-zero", "task.sizes=[0]", holds=("task.sizes entry", "found 0")),
    scored("size-empty", "task.sizes=", holds=("task.sizes", "not a ListConfig")),
    scored("past-context", "task.max_new_tokens=1024", holds=("1024", "1023", "context of 1024")),
    Case(
        0, "eval-short-context",
        lambda m: [
            "task=eval", "task.quick=true", "task.shots=30", f"model={m.saved.whole}",
            "draft=none",
        ], 3, ("fills the model's context", "task.shots"), FILES,
    ),
    scored("no-room", *LARGE, "cluster.gib=1", holds=("do not fit", "GiB needed"), code=5, reach=FILES),
]  # fmt: skip

COMPARED, MEASURED = ("task=compare", PROMPT), ("task=measure", PROMPT)
SIDE_BY_SIDE = [
    Case(0, "compare-no-draft", (*COMPARED, "draft=none"), 2, ("nothing drafts", "speculation=ngram")),
    Case(0, "picture-kind", (*COMPARED, "task.plot=a.gif"), 2, ("task.plot", "'a.gif'", ".svg")),
    Case(0, "picture-nowhere", (*COMPARED, "task.plot=no/a.svg"), 2, ("task.plot is in no folder",)),
    Case(0, "compare-nothing", ("task=compare",), 2, ("there is no prompt", "standard input"), stdin=b"\n"),
    Case(
        0, "compare-system", (*COMPARED, "task.chat=true", "task.system=a\udcff"), 3,
        ("not UTF-8, or half a surrogate pair", "task.system", "at character 1"),
    ),
    Case(0, "measure-k", (*MEASURED, "task.ks=[1,0]"), 2, ("task.ks entry", "found 0", "[1, 64]")),
    Case(
        0, "measure-wide", (*MEASURED, "speculation.siblings=8", "task.ks=[8]"), 2,
        ("drafts and siblings are 64 at most", "task.ks", "72 with 8 siblings"),
    ),
    Case(0, "measure-both", (*MEASURED, "task.lengths=[8]"), 2, ("both task.prompts and task.lengths",)),
    Case(0, "batch-in-quotes", job_in_quotes, 2, ("task.output has quotes", "write task.output=/")),
    Case(
        0, "measure-long", ("task=measure", "task.lengths=[1024]"), 3,
        ("fills the model's context", "task.lengths, 1024"), FILES,
    ),
]  # fmt: skip


TABLE = [*EVALUATIONS, *SIDE_BY_SIDE]


@pytest.mark.few(8)
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_one_line_and_its_code(
    case: Case, command: Command, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_one_line(case, command, saved, tmp_path, monkeypatch)


class Done:
    """A task that has done its work."""

    def __init__(self, *_: object) -> None:
        pass

    def run(self) -> str:
        return "done"

    def has_output(self) -> bool:
        return True

    def figures(self) -> dict[str, Any]:
        return {"figure": 5}

    def measurements(self) -> list[RunMeasurement]:
        return []


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for all files but the summary."""
    write = Path.write_text

    def writing(path: Path, *args: Any, **more: Any) -> int:
        if path.name.startswith("summary.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **more)

    monkeypatch.setattr(Path, "write_text", writing)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("kind", TASKS)
def test_a_full_disk_costs_no_document(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of any task."""
    monkeypatch.setitem(TASKS, kind, Done)
    run = RunConf(task=config.TASKS[kind](name=kind), out=str(tmp_path), output=Output.json)
    with pytest.raises(StorageError, match="cannot write the run folder: No space left"):
        _run(RunInputs(run, 1, (), Reading([], []), None), ALONE)
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["figure"]) == ("done", 5)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize(
    "words", [(PROMPT, "task.max_new_tokens=2"), ("task=plan",)], ids=["generate", "plan"]
)
def test_a_full_disk_costs_no_work(words: tuple[str, ...], command: Command) -> None:
    answer = command(*words, "seed=1", "output=json")
    assert answer.code == 6 and len(answer.errors) == 1 and "No space left" in answer.errors[0]
    assert json.loads(answer.out)["status"] == "done"
