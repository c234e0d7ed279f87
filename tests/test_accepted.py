"""Plans by what a run has accepted: runs say it, plans go by it, and refuse what is not of their pair."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.config import Verification
from llama_ssp.config.compose import composed
from llama_ssp.errors import DataError
from llama_ssp.placing.accepted import curve_of
from llama_ssp.planner.speed import RoundTimes
from llama_ssp.report.accepted import of_run
from llama_ssp.speculative.draft_length import AcceptanceCurve
from llama_ssp.speculative.stats import Counts, RowStep
from tests.conftest import Command

PAIR = ("model=demo", "draft=demo_draft")
WRITE = ("task=generate", 'task.prompts=["12 * 34 =","def f("]', "task.max_new_tokens=16", "seed=3")


def step(accepted: int, drafted: int) -> RowStep:
    overlap = [0.5] * drafted
    return RowStep(
        row=0, tokens=[1] * (accepted + 1), drafted=[1] * drafted, accepted=accepted, overlap=overlap,
        discarded=0, finish=None,
    )  # fmt: skip


def test_a_run_says_the_tokens_of_its_rounds() -> None:
    run, counts = composed([*PAIR]), Counts()
    for accepted in (0, 1, 3, 3):
        counts.add(step(accepted, 3))
    (one,) = of_run(run, counts)
    tokens = [point["tokens_per_round"] for point in one["curve"]]
    assert tokens == pytest.approx([1.75, 2.25, 2.75]) and tokens[2] * 4 == counts.committed
    assert one["curve"][1]["acceptance_by_position"] == [0.75, 0.5]
    assert of_run(composed(["model=demo", "draft=none"]), counts) == []
    assert of_run(run, Counts()) == []


def test_a_plan_goes_by_what_a_run_has_accepted(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    made = command(*WRITE, *PAIR, "sampling=plain", "speculation.k=3", "engine=eager").document
    (one,) = made["acceptance"]
    assert (one["drafter"], one["rule"], one["from"]) == ("demo_draft", "block", "run")
    rates = made["acceptance_by_position"]
    assert one["curve"][2]["tokens_per_round"] == pytest.approx(1 + sum(rates))
    words = ("task=plan", *PAIR, f"task.acceptance_from={made['run_folder']}")
    plan = command(*words)
    assert plan.document["workload"]["acceptance"] == pytest.approx(rates[0])
    assert (
        plan.document["workload"]["acceptance_from"] == made["run_folder"] and plan.document["best"]["k"] <= 3
    )
    assert f"acceptance as measured in {made['run_folder']}" in plan.out
    assert "what is accepted was measured" not in caplog.text
    command(*words, "sampling.temperature=0.5")
    assert "what is accepted was measured with temperature=1.0, and this plan is of 0.5" in caplog.text
    command(*words, "speculation.draft_top=64")
    assert "measured with speculation.draft_top=null, and this plan is of 64" in caplog.text
    assert command(*WRITE, "model=demo", "draft=none").document["acceptance"] == []


def test_times_go_by_the_tokens_that_were_measured() -> None:
    """Of a round that takes the same, tokens decide; as one number a curve of powers gives the same times."""
    times = RoundTimes(draft=1e-3, verify=(10e-3,) * 4, rows=1)
    assert times.ms_per_token(AcceptanceCurve((1.0, 1.5, 1.9, 2.0), "run"), 2) == pytest.approx(12 / 1.9)
    assert times.best_k(AcceptanceCurve((1.0, 1.5, 1.9, 2.0), "run")) == 2
    powers = AcceptanceCurve(tuple(sum(0.8**i for i in range(k + 1)) for k in range(4)), "run")
    for k in range(4):
        assert times.ms_per_token(powers, k) == pytest.approx(times.ms_per_token(0.8, k))
        assert times.guessed(k, powers) == pytest.approx(times.guessed(k, 0.8))


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no drafts": (lambda summary: {**summary, "acceptance": []}, "another pair"),
    "another target": (lambda summary: {**summary, "target": "other"}, "other/demo_draft"),
    "no acceptance": (lambda summary: {"target": "demo"}, "says nothing of drafts"),
    "a curve that cannot be": (
        lambda summary: {
            **summary,
            "acceptance": [{**summary["acceptance"][0], "curve": [{"k": 1, "tokens_per_round": 2.5}]}],
        },
        "at K = 1",
    ),
    "no object": (lambda summary: [], "says nothing of drafts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_a_plan_cannot_go_by_is_refused(name: str, tmp_path: Path) -> None:
    change, said = REFUSED[name]
    entry = {"drafter": "demo_draft", "rule": "block", "curve": [{"k": 1, "tokens_per_round": 1.5}]}
    summary = {"target": "demo", "acceptance": [entry]}
    run = composed([*PAIR])
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert curve_of(run, str(tmp_path), None).tokens == (1.0, 1.5)
    by_token = replace(run, speculation=replace(run.speculation, verification=Verification.token))
    with pytest.raises(DataError, match="by the rule token"):
        curve_of(by_token, str(tmp_path), None)
    with pytest.raises(DataError, match=r"speculation\.k=2"):
        curve_of(run, str(tmp_path), 2)
    (tmp_path / "summary.json").write_text(json.dumps(change(summary)))
    with pytest.raises(DataError, match=said):
        curve_of(run, str(tmp_path), None)


def test_acceptance_is_said_once(command: Command) -> None:
    answer = command("task=plan", "task.acceptance=0.5", "task.acceptance_from=outputs")
    assert answer.code == 2 and "acceptance_from" in answer.errors[0]
    answer = command("task=plan", "task.acceptance_from=outputs")
    assert answer.code == 3 and "does not exist" in answer.errors[0]
