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


def test_growth_is_measured_at_every_point(tmp_path: Path):
    report = tmp_path / "growth.md"
    points = ("context=16,256", "rows=1,3", "K=0,2,4", "vocabulary=8192")
    code, text, found = bench(
        "growth.py", "engines=eager", "repeats=1", "threads=1", *points, f"write={report}"
    )
    assert code == 0 and "`growth`" in text
    assert {name: len(times["eager"]) for name, times in found["round_ms"].items()} == {
        "context": 2, "rows": 2, "K": 3, "vocabulary": 1,
    }  # fmt: skip
    assert found["round_ms"]["K"]["eager"][2] == found["round_ms"]["rows"]["eager"][0]  # one point, one time
    value, ms = found["ms_per_token"]["rows"]["eager"][1]
    assert value == 3 and ms == pytest.approx(
        found["round_ms"]["rows"]["eager"][1] / 3 / sum(0.8**i for i in range(5))
    )
    assert json.loads(report.with_suffix(".json").read_text())["points"]["rows"] == [1, 3]
    assert report.with_suffix(".svg").read_text().startswith("<?xml")


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


def test_all_that_is_required_of_one_process_is_measured():
    few = ("small=true", "repeats=1", "new=4", "ks=4", "peers=4", "threads=1")
    _, text, found = bench("fast.py", *few)
    for what in ("regular / its bytes", "a step of 5 tokens", "prefill of 2048", "cold start", "warm start"):
        assert any(bar["what"].startswith(what) and bar["asked"] for bar in found["bars"])
    assert all(bar["found"] > 0 for bar in found["bars"]) and "the pair that ships" in text


@pytest.mark.parametrize("part", ["regular", "syncs", "small"])
def test_the_parts_for_a_gpu(part: str):
    """int8 compiles; it is left to whoever has the time."""
    code, _, found = bench("gpu.py", f"part={part}", "small=true", "engine=eager", "new=4", "repeats=1")
    rows = found["parts"][part]
    assert rows and all(row["found"] >= 0 for row in rows)
    assert code == int(any(row["asked"] is not None and row["found"] < row["asked"] for row in rows))


def test_a_call_without_time_says_what_is_left_and_one_without_work_what_was_found(tmp_path: Path):
    report = tmp_path / "gpu.md"
    code, text, found = bench("gpu.py", "small=true", "minutes=0", f"write={report}")
    assert code == 1 and not found["parts"]
    assert "Left for another call: regular, int8, syncs, small, large." in text
    row = {"what": "something", "asked": 1.0, "found": 2.0}
    parts = {part: [row] for part in ("regular", "int8", "syncs", "small", "large")}
    report.with_suffix(".json").write_text(json.dumps({"parts": parts}))
    code, text, found = bench("gpu.py", "small=true", "minutes=0", f"write={report}")
    assert code == 0 and found["parts"] == parts and "Left" not in text
