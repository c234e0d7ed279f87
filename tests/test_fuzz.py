"""A few hundred inputs of `python -m tests.fuzz`, what it found once, and that it finds what there is."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llama_ssp.config import TASKS, ModelConf, RunConf
from llama_ssp.config import validation as checks
from llama_ssp.errors import UsageError
from llama_ssp.text import prompts
from tests.fuzz import files, overrides
from tests.fuzz.__main__ import SHARES, _begin, counts, trials
from tests.fuzz.door import Door, tried
from tests.fuzz.found import FOUND
from tests.fuzz.overrides import MAY_BE_NEGATIVE, Words, leaves
from tests.fuzz.trial import Said, Trial, ill_said, judged

ROOT = Path(__file__).resolve().parents[1]
ABSURD = {int: (-5, 10**30), float: (-5.0, 1e30, -1e30, math.nan, math.inf)}


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with Door().open() as opened:
        yield opened


def faults(kind: str, numbers: range, folder: Path) -> list[tuple[int, tuple[str, ...], str]]:
    return [(n, trial.wrong, trial.shown) for n, trial in trials(kind, 7, numbers, folder) if trial.wrong]


@pytest.mark.parametrize(("kind", "count"), [("files", 300), ("prompts", 150), ("overrides", 8)])
def test_inputs(kind: str, count: int, tmp_path: Path) -> None:
    assert faults(kind, range(count), tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize(("kind", "count"), [("overrides", 80), ("commands", 6)])
def test_more_inputs(kind: str, count: int, tmp_path: Path) -> None:
    """In a new process: a command is a fork, and hangs where earlier tests have started OpenMP's threads."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin) as pool:
        assert pool.submit(faults, kind, range(100, 100 + count), tmp_path).result() == []


@pytest.mark.long
def test_without_assertions() -> None:
    """What refuses is no `assert`, and what judges neither."""
    asked = [sys.executable, "-O", "-m", "tests.fuzz", "inputs=30", "seed=3"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "`python -O -m tests.fuzz" in done.stdout and "no faults" in done.stdout


@pytest.mark.parametrize("found", FOUND, ids=lambda words: " ".join(words.words)[:40])
def test_what_was_found_once(found: Words, door: Door) -> None:
    assert tried(door, found).wrong == ()


@pytest.mark.parametrize("task", TASKS)
def test_no_number_out_of_reason_is_taken(task: str) -> None:
    """Each key by itself, past Hydra; those of all tasks once."""
    taken = []
    for key, hint in leaves(task).items():
        if task != "generate" and not key.startswith("task."):
            continue
        kind, inside, _ = overrides.kind_of(hint)
        values: list[Any] = list(ABSURD.get(kind, ()))
        if kind is dict and inside is float:
            values = [{1: value} for value in ABSURD[float]] + [{-1: 1.0}, {10**30: 1.0}]
        for value in values:
            run = RunConf(model=ModelConf(name="m"), draft=ModelConf(name="d"), task=TASKS[task](name=task))
            *path, last = key.split(".")
            node: Any = run
            for name in path:
                node = getattr(node, name)
            setattr(node, last, value)
            if key in MAY_BE_NEGATIVE and value in (-5, {1: -5}):
                continue
            try:
                checks.check(run)
            except UsageError:
                continue
            taken.append(f"{key}={value}")
    assert taken == []


def test_a_seed_and_a_number_make_the_same_input_and_all_kinds_come() -> None:
    for source in (overrides, files):
        assert source.made(Random("0/x/3")) == source.made(Random("0/x/3"))
    assert sum(SHARES.values()) == pytest.approx(1) and counts(100_000) == {
        "overrides": 6000, "files": 50_000, "prompts": 43_900, "commands": 100,
    }  # fmt: skip
    drawn = [overrides.made(Random(f"0/overrides/{number}")) for number in range(400)]
    assert (
        min(sum(bool(words.nonsense) for words in drawn), sum(words.good is not None for words in drawn)) > 20
    )


def test_nonsense_that_is_taken_is_a_fault(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check", lambda _: None)
    trial = tried(door, Words(("sampling.temperature=nan",), "nan"))
    assert len(trial.wrong) == 2 and "let through: sampling.temperature" in trial.wrong[1]


def test_a_good_value_that_is_refused_or_lost_is_a_fault(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "good, but refused" in tried(door, Words(("seed=-1",), good=("seed=-1",))).wrong[0]
    assert tried(door, Words(("seed=1",), good=("seed=2",))).wrong == ("not as written: seed=2",)


def test_a_traceback_an_exit_code_and_two_lines_are_faults() -> None:
    assert len(ill_said(Said(120, "", "Traceback (most recent call last):"))) == 3
    assert ill_said(Said(2, "", "error: a")) == []
    assert ill_said(Said(2, "", "error: a\nerror: b")) and ill_said(Said(0, "", "error: a"))


def test_what_is_wrong_with_prompts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading that lets everything through meets a fault in some file."""
    monkeypatch.setattr(prompts, "problem_of", lambda *_: None)
    monkeypatch.setattr("llama_ssp.batch.requests.problem_of", lambda *_: None)
    assert faults("files", range(150), tmp_path)


@pytest.mark.parametrize("work", [lambda: sum(range(1000)), lambda: time.sleep(0.001)], ids=["busy", "waits"])
def test_a_hang_and_an_exception_are_faults(work: Callable[[], object]) -> None:
    def hangs() -> Trial:
        while True:
            try:
                work()
            except Exception:
                continue

    assert judged(hangs, "x", seconds=0.1).outcome == "hang"
    assert judged(lambda: Trial(str(1 / 0)), "x").outcome == "exception"
