"""The trial of compiled steps over ranks: it passes, it fails in every way, and the run goes on or ends.

On CPUs nothing is tried by default, as no graph can hang there: these tests ask for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.batch.attempt_log import Attempt
from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import DATA, DISTRIBUTED
from llama_ssp.models.steps import SteppedModel
from llama_ssp.pair import trial
from llama_ssp.pair.trial import PASSED, Trial, difference, small_model
from tests.conftest import Command
from tests.warm import ROOT, Answer, Started

pytestmark = pytest.mark.slow

CPU, FP32 = torch.device("cpu"), ("model.dtype=fp32", "output=json", "speculation.drafter=ngram")
RUN = ("task.max_new_tokens=12", "seed=5", "speculation.k=3", "prompt=hello")
STUCK_S = 1000.0


def hang() -> None:
    time.sleep(STUCK_S)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_step(number: int, strike: Callable[[], object]) -> None:
    """Rank 1 meets its fate in this compiled step of its process."""
    whole, calls = SteppedModel._call, []

    def struck(self: SteppedModel, arguments: Any) -> list[torch.Tensor]:
        calls.append(self.ranks.rank)
        if calls == [1] * number:
            strike()
        return whole(self, arguments)

    SteppedModel._call = struck  # type: ignore[method-assign]


def be_wrong() -> None:
    """Compiled steps of rank 1 give logits that are a little off."""
    whole = SteppedModel._call

    def off(self: SteppedModel, arguments: Any) -> list[torch.Tensor]:
        logit_TV, *kept = whole(self, arguments)
        return [logit_TV * (1.01 if self.ranks.rank == 1 else 1), *kept]

    SteppedModel._call = off  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "hangs": partial(in_step, 3, hang),
    "hangs at once": partial(in_step, 1, hang),
    "dies": partial(in_step, 3, die),
    "is wrong": be_wrong,
}


def small_process(fault: str) -> None:
    """What a rank starts in place of `python -m llama_ssp.pair.trial`: it, with a fault."""
    torch.set_num_threads(1)
    FAULTS[fault]()
    trial.main()


def trying(
    _: int, verdicts: Path, small: str = "none", real: str = "none", seconds: float = 120.0,
    stops: bool = False,
) -> None:  # fmt: skip
    """The command on CPUs with a trial, and with faults in the small processes and in the real model.

    `stops`: a job dies after its first shard.
    """
    from llama_ssp.pair import placements

    placements.needs_trial = lambda *_: True
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    code = f"{start}; from tests.distributed.test_trial import small_process; small_process({small!r})"
    trial.COMMAND = [sys.executable, "-c", code]
    trial.TRIAL_S = trial.CHECK_S = seconds
    trial.cache_folder = lambda: verdicts  # type: ignore[assignment]
    FAULTS[real]()
    if stops:
        publish = Attempt.publish
        Attempt.publish = lambda self: publish(self) and die()  # type: ignore[method-assign, return-value]


def on_two(folder: Path, words: tuple[str, ...], **how: Any) -> Answer:
    """The leader's answer, with what both say on standard error; verdicts are kept next to the folder."""
    fault = partial(trying, verdicts=folder.parent / "verdicts", **how)
    leader, other = Started(folder, 2, *words, fault=fault).finish()
    assert other.code == leader.code or how.get("stops"), leader.err + other.err
    return leader._replace(err=leader.err + other.err)


def run_of(saved: Any, *more: str, engine: str = "compiled") -> tuple[str, ...]:
    return f"model={saved.sharded}", *FP32, *RUN, f"engine={engine}", *more


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("small", "seconds", "line"),
    [
        ("dies", 120.0, "rank 1 is gone (killed by a signal"),
        ("none", 120.0, ""),
        ("is wrong", 120.0, "logits are off by 0.01 of the largest, 0.0001 is allowed"),
        ("hangs", 40.0, "no answer in 40 s"),
    ],
)
def test_a_run_is_compiled_if_the_trial_passes(
    small: str, seconds: float, line: str, command: Command, saved: Any, tmp_path: Path
):
    """Else it runs eagerly, with one line, and the verdict is kept for the next start."""
    expected = command(*run_of(saved, engine="eager"))
    first = on_two(tmp_path / "first", run_of(saved), small=small, seconds=seconds)
    again = on_two(tmp_path / "again", run_of(saved), small="dies")
    for run in (first, again):
        assert run.code == 0, run.err
        assert run.document["outputs"] == expected.document["outputs"]
        engine, said = run.document["engines"]["model"], run.err.count("failed their trial")
        assert (engine == "compiled", said) == (small == "none", small != "none"), run.err
        assert line in engine and line in run.err and ("to try again delete" in run.err) == bool(line)
    assert "trying compiled steps" in first.err and "trying compiled steps" not in again.err


@pytest.mark.long
def test_the_real_model_is_compared_too(command: Command, saved: Any, tmp_path: Path):
    """After a trial that has passed: where its steps differ, it runs eagerly and writes the right text."""
    run = on_two(tmp_path / "run", run_of(saved), real="is wrong")
    assert run.code == 0 and "logits are off" in run.document["engines"]["model"], run.err
    assert run.document["outputs"] == command(*run_of(saved, engine="eager")).document["outputs"]


@pytest.mark.long
def test_a_check_that_hangs_ends_all_ranks_and_the_next_start_is_eager(saved: Any, tmp_path: Path):
    stuck = on_two(tmp_path / "stuck", run_of(saved), real="hangs", seconds=40.0)
    assert (stuck.code, len(stuck.errors)) == (DISTRIBUTED, 1), stuck.err
    assert "the next start runs eagerly: no end after 40 s, in load" in stuck.errors[0]
    again = on_two(tmp_path / "again", run_of(saved))
    assert again.code == 0 and "did not end in 40 s" in again.document["engines"]["model"], again.err


@pytest.mark.long
def test_a_step_that_hangs_while_loading_ends_all_ranks(saved: Any, tmp_path: Path):
    """Within the ranks' patience, and not after the half hour that reading weights may take."""
    began = time.monotonic()
    stuck = on_two(tmp_path / "run", run_of(saved, "placement.timeout_s=10"), real="hangs at once")
    assert (stuck.code, len(stuck.errors)) == (DISTRIBUTED, 1), stuck.err
    assert "a step: no end after 10 s, in load" in stuck.errors[0] and time.monotonic() - began < STUCK_S / 4


@pytest.mark.parametrize(
    "kept", ["whole", "torn", "not a verdict", "of another GPU", "of another world", "unwritten"]
)
def test_a_kept_verdict(
    kept: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """It counts if it is whole and about these versions, GPUs and ranks; else the trial is repeated."""
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(trial, "TRIED", {})
    monkeypatch.setattr(trial, "COMMAND", ["true"])
    if kept == "unwritten":
        monkeypatch.setattr(trial, "part_of", lambda _: Path("/dev/full"))
    first = Trial("m", Dtype.fp32, CPU, ALONE)
    assert first.passes()
    monkeypatch.setattr(trial, "COMMAND", ["false"])
    if kept == "unwritten":  # on a full disk the process itself remembers
        assert not first.place.exists() and "the verdict is not kept: " in caplog.text
    else:
        trial.TRIED.clear()
    if kept in ("torn", "not a verdict"):
        first.place.write_text('{"verd' if kept == "torn" else "[1]")
    if kept == "of another GPU":
        monkeypatch.setattr(trial, "gpu_of", lambda _: "another")
    ranks: Any = ALONE if kept != "of another world" else Pretended()
    second = Trial("m", Dtype.fp32, CPU, ranks)
    assert second.passes() == (kept in ("whole", "unwritten"))
    assert second.verdict == (PASSED if kept in ("whole", "unwritten") else "exit code 1")


class Pretended(Ranks):
    """Two ranks, of which the other always says what this one does."""

    world = 2

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        return [values, values]


def test_what_the_comparison_sees(monkeypatch: pytest.MonkeyPatch):
    """Compiled steps that ignore their tokens, and steps that are not numbers; sound ones pass."""
    model = small_model(Dtype.fp32, CPU, ALONE)
    assert difference(model, (1, 3), (1, 2), 3) == PASSED
    whole, first = SteppedModel._call, []

    def of_the_first_token(self: SteppedModel, arguments: Any) -> list[torch.Tensor]:
        first.append(whole(self, arguments))
        return first[0]

    monkeypatch.setattr(SteppedModel, "_call", of_the_first_token)
    assert "step 2 of 1 tokens in 1 rows: logits are off" in difference(model, (1,), (1,), 2)
    monkeypatch.setattr(trial, "TOLERANCE", {torch.float32: 10.0})
    assert difference(model, (1,), (1,), 2) == "other tokens have the same logits"
    monkeypatch.setattr(SteppedModel, "_call", lambda *_: [torch.full((1, model.vocab), torch.nan)])
    assert "logits are off by nan" in difference(model, (1,), (1,), 2)


@pytest.mark.long
def test_a_batch_job_keeps_its_verdict(saved: Any, tmp_path: Path):
    """A start whose trial ends otherwise is refused; with the engine that the job began with it goes on."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"prompt": "hello {n}"}}\n' for n in range(6)), encoding="utf-8")
    words = (
        "task=batch", f"model={saved.sharded}", FP32[0], FP32[2], "seed=5",
        f"task.input={source}", f"task.output={output}", "task.shard_size=2", "task.max_new_tokens=8",
    )  # fmt: skip
    first = on_two(tmp_path / "first", (*words, "engine=compiled"), small="dies", stops=True)
    assert first.code != 0
    assert json.loads((tmp_path / "out.jsonl.work" / "trials.json").read_bytes()) == {"model": "eager"}
    for verdict in (tmp_path / "verdicts").iterdir():
        verdict.unlink()
    other = on_two(tmp_path / "other", (*words, "engine=compiled"))
    assert other.code == DATA and "the job has begun with other steps" in other.err, other.err
    assert "found model: compiled, allowed model: eager; give engine=eager" in other.err
    last = on_two(tmp_path / "last", (*words, "engine=eager"))
    assert last.code == 0 and len(output.read_text(encoding="utf-8").splitlines()) == 6, last.err
