"""The endurance command: it finds what it is there to find, and a short one passes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import kill_all, wait_for
from tests.soak import trials
from tests.soak.__main__ import endure
from tests.soak.processes import MARK, Held, left_of, marked
from tests.soak.scenarios import FAULTS, NOTHING, PAIRS, PLACEMENTS, SAMPLINGS, TASKS, Scenario, drawn
from tests.soak.trials import Bench, Ended, Trial, differing, judged
from tests.soak.verdict import MIB, Law, Soak, growing

CALM = Scenario("batch", "demo", 1, "auto", "T = 1", "K = 1", 2, NOTHING, 0.5, 1)


def ended(
    code: int | None = 0, out: str = '{"status": "done"}', err: str = "", struck: bool = False
) -> Ended:
    return Ended(code, out, err, 1.0, struck)


def test_a_seed_draws_the_same_scenarios_and_all_kinds_come() -> None:
    found, again = ([drawn(r) for _ in range(400)] for r in (random.Random(4), random.Random(4)))
    assert found == again
    for what, kinds in (("task", TASKS), ("pair", PAIRS), ("sampling", SAMPLINGS), ("fault", set(FAULTS))):
        assert {getattr(scenario, what) for scenario in found} == set(kinds)
    assert {(s.ranks, s.placement) for s in found} == {
        (n, p) for n, names in PLACEMENTS.items() for p in names
    }


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ended(None), "had not ended"),
        (ended(1), "exit code 1"),
        (ended(out='{"status": "error"}'), "reported as error"),
        (ended(out="nonsense"), "reported as None"),
        (
            ended(err="Traceback (most recent call last):\n  File x\nValueError: y\n"),
            "ending in ValueError: y",
        ),
        (ended(err="error: process 5 outlived its command"), "outlived"),
        (ended(err="error: a"), "1 errors"),
        (ended(5, struck=True), "exit code 5"),
    ],
)
def test_what_is_wrong_is_said(answer: Ended, said: str) -> None:
    scenario = Scenario("batch", "demo", 1, "auto", "T = 1", "K = 1", 2, "SIGTERM", 0.5, 1)
    (wrong,) = judged(scenario, answer)
    assert said in wrong


@pytest.mark.parametrize(("file", "wrong"), [("torch/__init__.py", 0), ("llama_ssp/cli.py", 1)])
def test_a_launcher_struck_while_it_imports_torch_may_say_so(file: str, wrong: int) -> None:
    """Workers of a job are started with -m, too: their tracebacks count."""
    frames = (
        f'  File "<frozen runpy>", line 189, in _run_module_as_main\n  File "/a/{file}", line 4, in load\n'
    )
    trace = f"Traceback (most recent call last):\n{frames}KeyboardInterrupt\n"
    assert len(judged(CALM, ended(err=trace))) == wrong


@pytest.mark.parametrize(
    ("function", "error", "wrong"),
    [
        ("<module>", "KeyboardInterrupt", 0),
        ("main", "KeyboardInterrupt", 1),
        ("<module>", "ValueError: y", 1),
    ],
)
def test_python_says_so_if_it_is_struck_before_the_program_runs(
    function: str, error: str, wrong: int
) -> None:
    frames = (
        f'  File "/a/launch/run.py", line 3, in <module>\n  File "/a/llama_ssp/x.py", line 4, in {function}\n'
    )
    trace = f"Traceback (most recent call last):\n{frames}{error}\n"
    assert len(judged(CALM, ended(err=trace))) == wrong


def test_what_is_right_is_not() -> None:
    struck = Scenario("batch", "demo", 1, "auto", "T = 1", "K = 1", 2, "SIGTERM", 0.5, 1)
    assert judged(CALM, ended()) == []
    assert judged(struck, ended(143, struck=True, err="error: stopped by a signal")) == []
    launcher = 'Traceback (most recent call last):\n  File "torch/distributed/elastic/x.py"\nSignal: y\n'
    assert judged(CALM, ended(err=launcher)) == []


def test_growth_is_seen() -> None:
    flat = [Held(float(i), 500 * MIB + i % 3 * MIB, 20 + i % 2) for i in range(80)]
    leak = [Held(float(i), 500 * MIB + i * MIB, 20) for i in range(80)]
    handles = [Held(float(i), 500 * MIB, 20 + i) for i in range(80)]
    assert growing(flat) == []
    assert "memory grew by 20.0 MiB" in growing(leak)[0] and "20 more handles" in growing(handles)[0]
    with pytest.raises(ValueError, match="too short"):
        growing(flat[:15])


def test_a_wrong_law_is_seen() -> None:
    probs, wrong = Law(), Law()
    for _ in range(100):
        probs.add(CALM, {"tokens_decided": 100, "tokens_accepted": 70, "acceptance_expected": 0.695})
        wrong.add(CALM, {"tokens_decided": 100, "tokens_accepted": 70, "acceptance_expected": 0.66})
    assert probs.decided == 10_000 and probs.wrong == []
    assert "+8.4 standard deviations off" in wrong.wrong[0]
    never = Law()
    never.add(CALM, {"tokens_decided": 100, "tokens_accepted": 0, "acceptance_expected": 0.6})
    assert never.wrong


def test_other_answers_are_seen(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert differing(one, other) == ["the job has no output"]
    one.write_text("a\nb\n")
    other.write_text("a\nc\n")
    assert "in lines [2]" in differing(one, other)[0] and differing(one, one) == []


@pytest.mark.parametrize(
    ("again", "fine", "tied"), [("b", "c", True), ("a", "c", False), ("b", "d", False)], ids=str
)
def test_a_tie_of_rounding_is_told_from_another_answer(again, fine, tied, tmp_path, monkeypatch) -> None:
    """Found are b, and a in a calm process; in fp64 a calm process gives c."""
    texts = {"calm": "a", "again": again, "fine": fine, "fine_calm": "c"}

    def run(scenario: Scenario, folder: Path, expected_s: float, *more: str) -> Ended:
        (output,) = (word for word in more if word.startswith("task.output="))
        name = output.removeprefix("task.output=")
        assert (scenario.ranks == 1) == ("calm" in name) and ("model.dtype=fp64" in more) == ("fine" in name)
        (folder / name).write_text(texts[name.removesuffix(".jsonl")])
        return ended()

    monkeypatch.setattr(trials, "run", run)
    (tmp_path / "out.jsonl").write_text("b")
    (tmp_path / "out.jsonl.work" / "parts").mkdir(parents=True)
    trial = Trial(Scenario("batch", "demo", 2, "own", "T = 1", "K = 4", 4, NOTHING, 0.5, 1))
    Bench(tmp_path)._finish(trial, ended(), tmp_path)
    assert trial.tied is tied and bool(trial.wrong) is not tied


def test_who_outlives_its_command_is_found() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, MARK: "outlives", "RANK": "1"},
    )
    try:
        wait_for(lambda: marked("outlives"))  # its environment is there a moment after its start
        (found,) = left_of("outlives", 0.3)
        assert (found.pid, found.rank) == (child.pid, 1)
        kill_all(f"{MARK}=outlives")
        child.wait(timeout=10)
        assert marked("outlives") == []
    finally:
        child.kill()


@pytest.mark.long
def test_a_short_soak_passes(tmp_path: Path) -> None:
    """Its beginning alone: the long job, and as many scenarios as begin within ten seconds."""
    soak = Soak(seed=11)
    endure(soak, 1 / 6, tmp_path, records=60)
    report = soak.report()
    assert soak.held and soak.trials and not soak.found, report
