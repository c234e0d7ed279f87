"""The trial of compiled steps over ranks: it passes, it fails in every way, and the run goes on or ends.

On CPUs nothing is tried by default, as no graph can hang there: these tests ask for it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp.batch.attempts import Attempt
from llama_ssp.config import Dtype
from llama_ssp.distributed import process_group
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.gpus import Gpu
from llama_ssp.errors import DATA, DISTRIBUTED
from llama_ssp.models import step_check, steps
from llama_ssp.models.step_check import PASSED, difference, small_model
from llama_ssp.pair import trial
from llama_ssp.pair.trial import Trial
from tests.conftest import Command
from tests.warm import ROOT, Answer, Started

pytestmark = pytest.mark.slow

CPU, FP32 = torch.device("cpu"), ("model.dtype=fp32", "output=json", "speculation.drafter=ngram")
RUN = ("task.max_new_tokens=12", "seed=5", "speculation.k=3", "prompt=hello")
STUCK_S = 1000.0
SLOW_S = 45.0
FAILS = ["sh", "-c"]
PASSES = ["sh", "-c", f"echo {trial.READY}"]


def hang() -> None:
    time.sleep(STUCK_S)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_step(number: int, strike: Callable[[], object], before: int) -> None:
    """Rank 1 meets its fate in this compiled step of its process, after those `before` it."""
    whole, ranks_of_calls = steps.run_programs, []

    def struck(calls: Any, taps: Any, ranks: Ranks, *given: Any) -> list[torch.Tensor]:
        ranks_of_calls.append(ranks.rank)
        if ranks_of_calls == [1] * (before + number):
            strike()
        return whole(calls, taps, ranks, *given)

    steps.run_programs = struck


def be_wrong(_before: int) -> None:
    """Compiled steps of rank 1 give logits that are a little off."""
    whole = steps.run_programs

    def off(calls: Any, taps: Any, ranks: Ranks, *given: Any) -> list[torch.Tensor]:
        logit_TV, *kept = whole(calls, taps, ranks, *given)
        return [logit_TV * (1.01 if ranks.rank == 1 else 1), *kept]

    steps.run_programs = off


def compile_slowly(_before: int) -> None:
    """The compiler takes longer than a trial may."""
    compiled = steps.SteppedModel._programs

    def programs(*given: Any) -> Any:
        time.sleep(SLOW_S)
        return compiled(*given)

    steps.SteppedModel._programs = programs  # type: ignore[method-assign]


# By name, what is done first in a process, given how many compiled steps there are before those that count.
FAULTS: dict[str, Callable[[int], None]] = {
    "none": lambda _: None,
    "hangs": partial(in_step, 3, hang),
    "hangs at once": partial(in_step, 1, hang),
    "dies": partial(in_step, 3, die),
    "is wrong": be_wrong,
    "compiles slowly": compile_slowly,
}


def small_process(fault: str) -> None:
    """What a rank starts in place of `python -m llama_ssp.pair.trial`: it, with a fault."""
    torch.set_num_threads(1)
    FAULTS[fault](len(trial.WIDTHS) * len(trial.ROWS))  # a step of each shape compiles
    trial.main()


def command_of(fault: str) -> list[str]:
    """Starts a small process with a fault."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    code = f"{start}; from tests.distributed.test_trial import small_process; small_process({fault!r})"
    return [sys.executable, "-c", code]


def trying(
    _: int, verdicts: Path, small: str = "none", real: str = "none", stops: bool = False,
    small_s: float = 600.0, real_s: float = 600.0,
) -> None:  # fmt: skip
    """Run the command on CPUs with a trial, and with faults in the small processes and in the real model.

    `small_s`, `real_s`: how long each may take; short only where it hangs. `stops`: a job dies after its
    first shard.
    """
    from llama_ssp.pair import placements

    placements.needs_trial = lambda *_: True
    trial.COMMAND = command_of(small)
    trial.TRIAL_S, trial.CHECK_S = small_s, real_s
    process_group.FIRST_STEP_S = real_s
    trial.cache_folder = lambda: verdicts  # type: ignore[assignment]
    FAULTS[real](0)
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("small", "seconds", "line"),
    [
        ("dies", 600.0, "rank 1 is gone (killed by a signal"),
        ("none", 600.0, ""),
        ("hangs", 40.0, "no answer in 40 s"),
        ("compiles slowly", 40.0, ""),
    ],
    ids=["dies", "passes", "hangs", "compiles slowly"],
)
def test_a_run_is_compiled_if_the_trial_passes(
    small: str, seconds: float, line: str, command: Command, saved: Any, tmp_path: Path
):
    """Else it runs eagerly, with one line, and the verdict is kept for the next start."""
    expected = command(*run_of(saved, engine="eager"))
    first = on_two(tmp_path / "first", run_of(saved), small=small, small_s=seconds)
    again = on_two(tmp_path / "again", run_of(saved), small="dies")
    for run in (first, again):
        assert run.code == 0, run.err
        assert run.document["outputs"] == expected.document["outputs"]
        engine, said = run.document["engines"]["model"], run.err.count("failed their trial (")
        assert (engine == "compiled", said) == (not line, bool(line)), run.err
        assert line in engine and line in run.err and ("to try again delete" in run.err) == bool(line)
    assert "trying compiled steps" in first.err and "trying compiled steps" not in again.err


@pytest.mark.long
def test_the_real_model_is_compared_too(command: Command, saved: Any, tmp_path: Path):
    """After a trial that has passed: where its steps differ, it runs eagerly and writes the right text."""
    run = on_two(tmp_path / "run", run_of(saved), real="is wrong")
    assert run.code == 0 and "logits are off" in run.document["engines"]["model"], run.err
    assert run.document["outputs"] == command(*run_of(saved, engine="eager")).document["outputs"]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["hangs", "hangs at once"])
def test_after_real_steps_that_hang_the_next_start_is_eager(fault: str, saved: Any, tmp_path: Path):
    """In the check, and in the first step while loading: not after the half hour that reading may take."""
    stuck = on_two(tmp_path / "stuck", run_of(saved, "placement.timeout_s=30"), real=fault, real_s=30.0)
    assert (stuck.code, len(stuck.errors)) == (DISTRIBUTED, 1), stuck.err
    assert re.search("(a step|compiled steps): no end after 30 s, in load", stuck.errors[0]), stuck.err
    again = on_two(tmp_path / "again", run_of(saved))
    assert again.code == 0 and "did not end in time" in again.document["engines"]["model"], again.err


@pytest.mark.parametrize(
    "kept", ["whole", "torn", "not a verdict", "of another GPU", "of another world", "unwritten"]
)
def test_a_kept_verdict(
    kept: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """It counts if it is whole and about these versions, GPUs and ranks; else the trial is repeated."""
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(trial, "COMMAND", PASSES)
    if kept == "unwritten":
        monkeypatch.setattr(trial, "part_of", lambda _: Path("/dev/full"))
    first = Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ALONE)
    assert first.passes()
    monkeypatch.setattr(trial, "COMMAND", [*FAILS, "echo ready; echo error: no >&2; exit 5"])
    assert first.file.exists() == (kept != "unwritten") == ("the verdict is not kept: " not in caplog.text)
    if kept in ("torn", "not a verdict"):
        first.file.write_text('{"verd' if kept == "torn" else "[1]")
    if kept == "of another GPU":
        monkeypatch.setattr(trial, "gpu_of", lambda _: "another")
    ranks: Any = ALONE if kept != "of another world" else Pretended()
    second = Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ranks)
    assert second.passes() == (kept == "whole")
    assert second.verdict == (PASSED if kept == "whole" else "no")


@pytest.mark.parametrize(
    "command",
    [[*FAILS, "echo no module >&2; exit 1"], ["/no/such/program"], [*FAILS, "sleep 9"]],
    ids=["an error", "no such program", "hangs"],
)
def test_what_fails_before_the_first_step_is_not_kept(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Such as memory that is short, or a slow disk: the next start tries again."""
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(trial, "PREPARE_S", 1.0)
    monkeypatch.setattr(trial, "COMMAND", command)
    first = Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ALONE)
    assert not first.passes() and first.verdict and not any(tmp_path.iterdir())
    assert str(first).endswith("; engine=compiled skips the trial; the next start tries again")
    monkeypatch.setattr(trial, "COMMAND", PASSES)
    assert Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ALONE).passes() and first.file.exists()


@pytest.mark.parametrize(
    ("script", "verdict", "kept"),
    [
        ("sleep 2; echo ready", PASSED, True),
        ("echo already; echo ready; sleep 60", "no answer in 1 s", True),
        ("echo already; sleep 60", "not ready in 4 s", False),
    ],
    ids=["compiles slowly", "hangs", "compiles without end"],
)
def test_a_trial_counts_from_when_its_process_is_ready(
    script: str, verdict: str, kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """How long compiling takes depends on how busy the machine is, and is no verdict."""
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(trial, "PREPARE_S", 4.0)
    monkeypatch.setattr(trial, "TRIAL_S", 1.0)
    monkeypatch.setattr(trial, "COMMAND", [*FAILS, script])
    tried = Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ALONE)
    assert tried.passes() == (verdict == PASSED) and tried.verdict == verdict
    assert tried.file.exists() == kept


def test_a_process_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It waits for a driver that hangs: the run would wait with it."""
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(trial, "TRIAL_S", 0.5)
    monkeypatch.setattr(trial, "KILLED_S", 0.5)
    monkeypatch.setattr(trial, "COMMAND", [*FAILS, "echo ready; exec sleep 60"])
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    tried = Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ALONE)
    began = time.monotonic()
    assert not tried.passes() and tried.verdict == "no answer in 0.5 s"
    assert time.monotonic() - began < 30


def test_a_trial_that_still_compiles_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The small process itself says that it is ready when it has compiled, and not before."""
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    for limit in ("PREPARE_S", "TRIAL_S"):
        monkeypatch.setattr(trial, limit, 20.0)
    monkeypatch.setattr(trial, "COMMAND", command_of("compiles slowly"))
    tried = Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ALONE)
    assert not tried.passes() and tried.verdict == "not ready in 20 s"
    assert not any(tmp_path.iterdir())


def test_a_small_process_has_the_allocator_of_its_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Segments that grow, graphs and NCCL together are what has hung on other machines."""
    done: list[str] = []
    model = SimpleNamespace(uncaptured=nullcontext, is_compiled=True)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "argv", ["trial", "cuda:0", "fp32"])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", done.append, raising=False)
    monkeypatch.setattr(torch, "empty", lambda *_, device: done.append(f"a tensor on {device}"))
    monkeypatch.setattr(trial, "end_with_parent", lambda _: None)
    monkeypatch.setattr(trial, "small_model", lambda *_: done.append("a model") or model)
    monkeypatch.setattr(trial, "difference", lambda *_, **__: PASSED)
    trial.main()
    assert done == ["expandable_segments:True", "a tensor on cuda:0", "a model"]
    assert capsys.readouterr().out == "ready\n"


@pytest.mark.parametrize("modes", [(True, False), (False, True), (False, False)])
def test_no_small_process_is_started_on_a_gpu_that_admits_none(
    modes: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
):
    """On this rank or on another: all go eagerly, say why, and keep no verdict."""
    caplog.set_level("INFO")
    gpus = [Gpu(name="NVIDIA H200", uuid="GPU-1", exclusive=modes[0]), Gpu(name="NVIDIA H200", uuid="GPU-2")]

    class Two(Ranks):
        world = 2

        def gather_ints(self, values: list[int]) -> list[list[int]]:
            return [values, [int(modes[1])]]

        def gather_texts(self, text: str) -> list[str]:
            return [text, text]

    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(trial, "gpu_of", lambda _: "1")
    monkeypatch.setattr(trial, "gpus_here", lambda: gpus)
    monkeypatch.setattr(Trial, "__post_init__", lambda self: setattr(self, "file", tmp_path / "verdict"))
    monkeypatch.setattr(Trial, "_run", lambda _, limit_s: ("no", False))
    tried = Trial(name="m", dtype=Dtype.fp32, device=torch.device("cuda:0"), ranks=Two())
    assert not tried.passes() and not tried.file.exists()
    said = (
        "were not tried (a GPU is in compute mode EXCLUSIVE_PROCESS, which admits no process for a trial); "
    )
    assert (said in str(tried)) == any(modes) == ("trying compiled steps" not in caplog.text)


@pytest.mark.parametrize("limit_s", [0.5, 600.0], ids=["cut short", "its own limit"])
def test_a_trial_that_is_cut_short_has_no_verdict(
    limit_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Though it came to its first step: with more time it may pass."""
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(trial, "TRIAL_S", 1.0)
    monkeypatch.setattr(trial, "COMMAND", [*FAILS, "echo ready; sleep 9"])
    attempt = Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ALONE)
    assert not attempt.passes(limit_s)
    is_cut_short = limit_s < 1.0
    assert (attempt.is_lasting, attempt.file.exists()) == (not is_cut_short, not is_cut_short)
    assert attempt.verdict == f"no answer in {min(limit_s, 1.0):g} s"


def test_the_command_of_the_trial_runs_from_a_checkout_in_any_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The program need not be installed, and nothing of the working folder is imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(trial, "COMMAND", [*trial.COMMAND, "cpu", "no such format"])
    assert not (first := Trial(name="m", dtype=Dtype.fp32, device=CPU, ranks=ALONE)).passes()
    assert "'no such format' is not a valid Dtype" in first.verdict


class Pretended(Ranks):
    """Two ranks, of which the other always says what this one does."""

    world = 2

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        return [values, values]


def test_what_the_comparison_sees(monkeypatch: pytest.MonkeyPatch):
    """Compiled steps that ignore their tokens, and steps that are not numbers; sound ones pass."""
    model = small_model(Dtype.fp32, CPU, ALONE)
    assert difference(model, (1, 3), (1, 2), 3) == PASSED
    whole, first = model._step, []

    def of_the_first_token(*given: Any) -> list[torch.Tensor]:
        first.append(whole(*given))
        return first[0]

    monkeypatch.setattr(model, "_step", of_the_first_token)
    assert "step 2 of 1 tokens in 1 rows: logits are off" in difference(model, (1,), (1,), 2)
    monkeypatch.setattr(step_check, "TOLERANCE", {torch.float32: 10.0})
    assert difference(model, (1,), (1,), 2) == "other tokens have the same logits"
    monkeypatch.setattr(model, "_step", lambda *_: [torch.full((1, model.vocab), torch.nan)])
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
    assert other.code == DATA and "the job has begun with another engine" in other.err, other.err
    assert "found model: compiled, allowed model: eager; give engine=eager" in other.err
    last = on_two(tmp_path / "last", (*words, "engine=eager"))
    assert last.code == 0 and len(output.read_text(encoding="utf-8").splitlines()) == 6, last.err
