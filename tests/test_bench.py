"""Benchmarks that take long, or a GPU, on little models: their code runs, and says what it has to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.warm import ROOT, python

pytestmark = pytest.mark.slow


def bench(name: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, the text, and the document of its last line."""
    done = python([ROOT / "bench" / name, *arguments], ROOT)
    assert done.stdout, done.stderr[-800:]
    *lines, last = done.stdout.splitlines()
    return done.returncode, "\n".join(lines), json.loads(last)


@pytest.mark.long
def test_two_ranks_and_their_parts():
    """Figures of little models mean nothing; every one is there, and those that are asked are judged."""
    small = ("small=true", "engine=eager", "turns=1", "repeats=1", "new=4")
    code, text, found = bench("ranks.py", *small, f"against={ROOT}", "asked=0")
    bars = {bar["what"]: bar for bar in found["bars"]}
    assert all(bar["found"] > 0 for bar in bars.values()) and "K = 4: there over here" in bars
    judged = [bar for bar in bars.values() if bar["asked"]]
    assert len(judged) == 2 and all(bar["at_most"] for bar in judged)
    assert code == int(any(bar["found"] > bar["asked"] for bar in judged))
    assert text.count("NO, by") == sum(bar["found"] > bar["asked"] for bar in judged)


@pytest.mark.long
def test_all_that_is_required_of_one_process_is_measured():
    few = ("small=true", "repeats=1", "new=4", "ks=4", "peers=4", "threads=1")
    _, text, found = bench("fast.py", *few)
    for what in ("regular / its bytes", "a step of 5 tokens", "prefill of 2048"):
        assert any(bar["what"].startswith(what) and bar["asked"] for bar in found["bars"])
    assert all(bar["found"] > 0 for bar in found["bars"]) and "A round beside its parts" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("adaptive.py", ("agreements=0.5", "repeats=1", "ks=2")),
        ("trees.py", ("agreements=0.6", "drafts=2x64", "ks=2", "trees=2x1", "texts=2", "more=2")),
    ],
)
def test_adaptive_speculation_goes_by_measured_costs(name: str, how: tuple[str, ...], tmp_path: Path):
    report = tmp_path / "report.md"
    done = python([ROOT / "bench" / name, "small=true", "new=8", "threads=1", *how, f"write={report}"], ROOT)
    assert done.returncode in (0, 1), done.stderr[-800:]
    assert "adaptive: a draft step takes" in done.stderr and "adaptive" in report.read_text()


@pytest.mark.long
@pytest.mark.parametrize("part", ["faults", "large"])
def test_a_part_for_a_gpu(part: str, tmp_path: Path):
    """Two of them, on little models: one of each kind. Figures are kept as JSON, too."""
    report = tmp_path / "gpu.md"
    _, text, found = bench("gpu.py", "small=true", f"parts={part}", f"write={report}")
    bars = found["parts"][part]
    assert len(bars) > 3 and not [bar for bar in bars if bar["what"].endswith(": ends")], text
    assert text.count("needs a GPU") == sum(bar["note"] == "needs a GPU" for bar in bars)
    assert json.loads(report.with_suffix(".json").read_text()) == found


def test_parts_without_time_are_said_and_stop_nothing(tmp_path: Path):
    code, text, found = bench("gpu.py", "small=true", "minutes=0", f"write={tmp_path / 'gpu.md'}")
    assert code == 1 and text.count("no time is left") == len(found["parts"]) == 8
    code, text, _ = bench("gpu.py", "small=true", "minutes=0.02", "parts=command")
    assert code == 1 and "stopped after 1 s" in text


def test_n_gram_drafts_are_timed_and_their_acceptance_counted():
    few = ("lengths=64,128", "turns=2", "new=4", "temperatures=0", "threads=1")
    code, text, found = bench("ngram.py", *few)
    assert code == 0 and len(found["times"]) == 4 and "most frequent" in text
    (row,) = found["accepted"]
    assert row["positions"] > 0 and all(0 <= row[way] <= 1 for way in ("latest", "most_frequent", "drawn"))
