"""The script for a GPU, without one: what fails stops nothing, calls go on, and figures are what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import gpu
from gpu_bring import cut, join

from tests.gpu import expected
from tests.test_triton import SHARED, compiled
from tests.warm import ROOT, python

NEED_MORE = ("races", "smollm2")  # a tool of CUDA; a file that is brought along
SCRIPT = ROOT / "bench" / "gpu.py"


@pytest.mark.slow
def test_a_rehearsal_survives_every_failure():
    """A part that is killed, hangs, raises, has a full disk, lacks a name; and a call with a full disk."""
    done = subprocess.run([sys.executable, SCRIPT, "rehearse=true"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["rehearsal:", "every failure was survived"]
    for said in (
        "killed by SIGKILL", "stopped after 2 s", "the GPU has fallen off the bus", "No space left on device",
        "needs torch.no_such_name, which is not here", "a pretended card, driver 0.0, 1980 of 1980 MHz",
        "next: python bench/gpu.py call=2", "expected beside seen", "small o 48 x 160, 5 rows: error",
    ):  # fmt: skip
        assert said in done.stdout, said
    assert "parts.jsonl is not written" in done.stderr and "full.tar.gz is not written" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("part", [part.name for part in gpu.PARTS[1:] if part.name not in NEED_MORE])
def test_the_code_of_a_part_runs(part: str, tmp_path: Path):
    """On a small model and a CPU; what needs a GPU says so. Figures of small models mean nothing."""
    files = [
        f"folder={tmp_path / 'run'}",
        f"archive={tmp_path / 'all.tar.gz'}",
        f"write={tmp_path / 'gpu.md'}",
    ]
    done = python([SCRIPT, "small=true", f"parts={part}", *files], ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    machine, record = gpu.records_in(tmp_path / "run")
    assert (machine["part"], record["part"], record["state"]) == ("machine", part, "ended") and record["bars"]
    assert f"{part}: ended after" in (tmp_path / "gpu.md").read_text()
    assert json.loads((tmp_path / "gpu.json").read_text()) == [machine, record]


def test_calls_fit_into_their_time():
    lines = gpu.plan_table()
    for call, limit_s in gpu.SECONDS.items():
        planned_s = gpu.planned_s([gpu.PARTS[0], *(part for part in gpu.PARTS[1:] if part.call == call)])
        assert planned_s <= limit_s and f"call {call}: {planned_s} s planned, {limit_s} at most" in lines
    assert all(part.planned_s <= part.limit_s for part in gpu.ALL)
    figures = {name.partition(":")[0] for name in gpu.EXPECTED}
    assert figures <= {part.name for part in gpu.PARTS}


def test_a_second_call_runs_what_is_left_and_failures_last():
    states = {
        "machine": "ended",
        "tests": "stopped",
        "logits": "ended",
        "steps": "raised",
        "products": "no time",
    }
    records = [{"part": name, "state": state} for name, state in states.items()]
    names = [part.name for part in gpu.due(2, records)]
    assert names[0] == "machine" and names[-2:] == ["tests", "steps"] and "logits" not in names
    assert names.index("products") < names.index("large") < names.index("trees")
    assert "trees" not in [part.name for part in gpu.due(1, records)]


def test_figures_of_an_earlier_call_stay_where_a_later_one_had_no_time(tmp_path: Path):
    kept = {
        "part": "tests",
        "state": "stopped",
        "bars": [{"what": "a::b", "found": 0, "asked": 1, "card": "x"}],
    }
    later = {"part": "tests", "state": "no time", "bars": []}
    lines = [json.dumps(kept), json.dumps(kept)[:30], json.dumps(later)]
    (tmp_path / "parts.jsonl").write_text("\n".join(lines))
    (bar,) = gpu.How(True, 1.0, tmp_path).earlier("tests")
    assert bar.what == "a::b" and bar.met is False


def test_names_and_messages_of_failing_tests_are_kept(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(
        "def test_good(): pass\n\ndef test_bad():\n    assert 1 == 2, 'why'\n"
    )
    report = tmp_path / "report.xml"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_it.py"]
    subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True)
    from gpu_right import junit

    bad, count, skipped = junit(report)
    assert bad.what == "test_it.py::test_bad" and bad.met is False and "why" in bad.note
    assert (count.found, count.note, skipped.found) == (1, "of 2", 0)


def test_what_is_brought_along_is_cut_and_joined(tmp_path: Path):
    contents = {"a.whl": b"1234567", "b.gguf": bytes(range(40)), "c.txt": b"xyz"}
    files = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        files.append(tmp_path / name)
    pieces = cut(files, tmp_path / "bring", 16)
    assert [sum(file.stat().st_size for file in piece.iterdir()) for piece in pieces] == [16, 16, 16, 2]
    assert join(tmp_path / "bring", tmp_path / "brought") == []
    assert {file.name: file.read_bytes() for file in (tmp_path / "brought").iterdir()} == contents
    next(pieces[1].iterdir()).unlink()
    assert join(tmp_path / "bring", tmp_path / "other") == ["b.gguf: a piece is missing"]
    assert not (tmp_path / "other" / "b.gguf").exists()


def kernels() -> dict[str, tuple[Any, dict[str, Any], int, int]]:
    import gpu_kernels
    import triton

    sizes = {"BLOCK": gpu_kernels.BLOCK, "ROUNDS": gpu_kernels.ROUNDS}
    result = {"read": (gpu_kernels.read, {"x_ptr": "*i32", "y_ptr": "*i32", **sizes}, 8, 3)}
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), "*bf16")
    numbers = dict.fromkeys(("rows", "outputs", "inputs"), "i32")
    for warps, outputs, inputs, stages in gpu_kernels.TILES:
        tile = {"PARTS": warps, "ROWS": gpu_kernels.ROWS, "OUTPUTS": outputs, "INPUTS": inputs}
        arguments = {**pointers, **numbers, **tile}
        result[f"{warps}x{outputs}x{inputs}"] = gpu_kernels.multiply, arguments, warps, stages
    assert triton.__version__
    return result


@pytest.mark.slow
def test_kernels_compile_for_the_gpus_that_they_are_for():
    for name, (kernel, arguments, warps, stages) in kernels().items():
        done = compiled(kernel, arguments, 90, warps, stages)
        assert "cubin" in done.asm and done.metadata.shared <= SHARED[90] * 1024, name


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (torch.tensor([1.0, 2.5, float("nan")]), "2 of 3 miss it: [2] is nan, not 3; [1] is 2.5, not 2"),
        (torch.ones(2), "expected the shape (3,); it is (2,)"),
    ],
)
def test_a_test_on_a_gpu_names_what_it_expects(result: torch.Tensor, said: str):
    exact = torch.tensor([1.0, 2.0, 3.0])
    expected.near("numbers", exact + 0.01, exact, 0.1)
    with pytest.raises(pytest.fail.Exception) as failure:
        expected.near("numbers", result, exact, 0.1)
    assert said in str(failure.value)


def test_texts_and_norms_that_miss_are_shown():
    exact = torch.tensor([1.0, 2.0, 3.0])
    expected.near_by_norm("products", exact + 0.001, exact, 0.01)
    with pytest.raises(pytest.fail.Exception, match=r"below 0.01 of the norm; .*\[1\] is 9, not 2"):
        expected.near_by_norm("products", torch.tensor([1.0, 9.0, 3.0]), exact, 0.01)
    expected.same_tokens("texts", [[1, 2]], [[1, 2]])
    with pytest.raises(
        pytest.fail.Exception, match=r"1 of 2 rows differ: row 1 from token 1 on: \[5\], not \[4\]"
    ):
        expected.same_tokens("texts", [[1], [3, 5]], [[1], [3, 4]])
