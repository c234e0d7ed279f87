"""A GPU whose memory is full all the same: one line says what was planned, who holds it, what would fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp import load_pair
from llama_ssp.errors import DistributedError
from llama_ssp.models.devices import usage_of
from llama_ssp.pair import assembly, session
from llama_ssp.speculative.model_runner import ModelRunner
from tests.conftest import Command
from tests.warm import Started

GIB = 2**30
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which"
USED = {"free": GIB, "reserved": 3 * GIB, "graphs": GIB, "others": 5 * GIB}
RUN = ("model=tiny", "draft=tiny_draft", 'task.prompts=["hello"]', "task.max_new_tokens=24", "seed=1", "k=3")
PAIR = ("model=tiny", "draft=tiny_draft", "out=null")


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(FULL)


def full_from(nth: int, method: Any) -> Any:
    """The method, until its memory is full at its nth call."""
    calls = iter(range(1, 10**6))
    return lambda *what, **how: full() if next(calls) >= nth else method(*what, **how)


def fill(phase: str, patch: Any) -> None:
    """Pretends a GPU that is full in this phase."""
    patch.setattr(session, "usage_of", lambda _: dict(USED))
    if phase == "load":
        patch.setattr(assembly, "load", full)
    elif phase == "capture":  # graphs are captured while steps are prepared
        patch.setattr(session, "prepare", full)
    elif phase == "prompt":
        patch.setattr(ModelRunner, "prefill", full)
    else:
        patch.setattr(ModelRunner, "logits", full_from(5, ModelRunner.logits))


@pytest.mark.parametrize("phase", ["load", "capture", "prompt", "step"])
def test_one_line_says_who_holds_the_memory(phase: str, command: Command, monkeypatch: Any) -> None:
    fill(phase, monkeypatch)
    answer = command(*RUN, "cluster.gib=64")
    assert (answer.code, len(answer.errors)) == (5, 1)
    (line,) = answer.errors
    assert line.startswith("error: the GPU's memory is full; planned ") and line.count("found ") == 1
    assert "graphs 1.00, other tensors " in line and "libraries and other programs 5.00; found Out" in line
    assert ("held weights" in line) == (phase != "load")
    assert "Tried to allocate 2.00 GiB" in line and "Traceback" not in answer.err
    monkeypatch.setattr(ModelRunner, "prefill", lambda *_: 1 / 0)
    if phase == "prompt":  # another error stays what it is
        with pytest.raises(ZeroDivisionError):
            command(*RUN)


def test_the_same_from_a_script(monkeypatch: Any) -> None:
    with load_pair("tiny", "tiny_draft", overrides=["cluster.gib=64"]) as pair:
        fill("step", monkeypatch)
        with pytest.raises(DistributedError, match=r"memory is full; planned .*held weights .*, caches "):
            pair.generate(["hello"], max_new_tokens=24, seed=1)


def fill_rank_1(rank: int) -> None:
    session.usage_of = lambda _: dict(USED)
    if rank == 1:
        ModelRunner.logits = full_from(3, ModelRunner.logits)  # type: ignore[method-assign]


@pytest.mark.slow
def test_one_rank_of_three_ends_all_with_its_line(tmp_path: Path) -> None:
    words = (*RUN, "placement=own", "placement.timeout_s=30")
    answers = Started(tmp_path, 3, *words, fault=fill_rank_1).finish()
    assert [answer.code for answer in answers] == [5, 5, 5]
    (line,) = [line for answer in answers for line in answer.errors]
    assert line.startswith("error: rank 1 failed during verify, round ") and "planned " in line
    assert "libraries and other programs 5.00" in line


def crowded(most: int, method: Any) -> Any:
    """The method, which has no memory for more than so many rows."""
    return lambda self, *what: method(self, *what) if len(self.cached) <= most else full()


def test_a_batch_job_goes_on_with_fewer_rows(command: Command, monkeypatch: Any, caplog: Any) -> None:
    """And gives the texts of a calm job; where one row is too many, it ends."""
    lines = [{"id": str(n), "prompt": "a" * (n + 1), "max_tokens": 5} for n in range(7)]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = ("task=batch", *PAIR, "seed=1", "task.input=in.jsonl", "task.batch_size=5")
    job = (*job, "model.dtype=fp64", "draft.dtype=fp64", "speculation.k=4")
    assert command(*job, "task.output=calm.jsonl").code == 0
    monkeypatch.setattr(session, "usage_of", lambda _: dict(USED))
    logits = ModelRunner.logits
    monkeypatch.setattr(ModelRunner, "logits", crowded(2, logits))
    with caplog.at_level("WARNING"):
        answer = command(*job, "task.output=out.jsonl")
    assert answer.code == 0 and Path("out.jsonl").read_bytes() == Path("calm.jsonl").read_bytes()
    said = [line for line in caplog.messages if "rows at a time from here on" in line]
    assert [line[:41] for line in said] == ["2 rows at a time from here on, as with 5:"]
    monkeypatch.setattr(ModelRunner, "logits", crowded(0, logits))
    ended = command(*job, "task.output=none.jsonl")
    assert ended.code == 5 and "the GPU's memory is full; planned" in ended.errors[0]


def test_what_a_gpu_holds(monkeypatch: Any) -> None:
    parts = [{"total_size": 5, "segment_pool_id": (0, 0)}, {"total_size": 7, "segment_pool_id": (0, 1)}]
    for name, value in (("mem_get_info", (10, 100)), ("memory_reserved", 12), ("memory_snapshot", parts)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert usage_of(torch.device("cuda:0")) == {"free": 10, "reserved": 12, "graphs": 7, "others": 78}
