"""What every task says of its plan at its end: predicted beside measured, in its summary and in words."""

from __future__ import annotations

import json
import logging

import pytest

PROMPTS = """task.prompts=["a b c","d e f g"]"""
TINY = ("model=tiny", "draft=tiny_draft", "seed=3", "output=json")
WAYS = {
    "generate": ((PROMPTS, "task.max_new_tokens=8"), ["speculative"]),
    "generate, regular": ((PROMPTS, "task.max_new_tokens=8", "speculation=none"), ["regular"]),
    "eval": (("task.quick=true",), ["tiny/tiny_draft, regular", "tiny/tiny_draft, speculative"]),
    "compare": ((PROMPTS, "task.max_new_tokens=8"), ["regular", "speculative"]),
    "measure": (
        (PROMPTS, "task.max_new_tokens=8", "task.repeats=1", "task.ks=[2,3]"),
        ["target alone", "pair, K = 2", "pair, K = 3"],
    ),
    "certify": (
        (PROMPTS, "task.max_new_tokens=4", "task.samples=20", "task.law_rounds=4", "task.greedy_tokens=8"),
        ["regular", "speculative, greedy", "regular, greedy"],
    ),
}


SLOW = ("certify", "eval", "measure")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WAYS]
)
def test_every_task_keeps_predicted_beside_measured(command, name, caplog):
    words, ways = WAYS[name]
    with caplog.at_level(logging.INFO):
        answer = command(f"task={name.partition(',')[0]}", *TINY, *words)
    assert answer.errors == [], answer.err
    found = answer.document
    with open(f"{found['run_folder']}/summary.json", encoding="utf-8") as file:
        assert json.load(file)["plan"] == found["plan"]
    plan = found["plan"]
    assert plan["verdict"] == "fits" and plan["placement"].startswith("target 0")
    assert [way["name"] for way in plan["ways"]] == ways
    for way in plan["ways"]:
        both = way["ms_per_token"]
        assert both["predicted"] / both["measured"] == pytest.approx(both["predicted_over_measured"])
    (memory,) = plan["memory"]
    held, everything = memory["held_bytes"], memory["device_bytes"]
    assert 0 < held["measured"] <= held["predicted"]
    if name.startswith("generate") or name in ("eval", "compare", "measure"):
        assert held["measured"] == held["predicted"], "weights and caches, to the byte"
    assert held["measured"] < everything["measured"]
    assert memory["tensor_bytes"]["measured"] is None, "a CPU does not tell"
    assert "plan against actual" in caplog.text and "rank 0, weights and caches, MiB" in caplog.text
