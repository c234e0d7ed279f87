"""The script for a GPU, without one: what fails stops nothing, calls go on, and figures are what they say."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import gpu
from gpu_bring import cut, join
from gpu_kernels import BLOCK, ROUNDS, ROWS, TILES, multiply, read

from tests.test_triton import require_compiled, tensor
from tests.warm import ROOT, python

NEED_MORE = ("races", "smollm2", "beside")  # a tool of CUDA; files that are brought along
INTERPRETED = ("bandwidth", "products")
ELSEWHERE = (*NEED_MORE, *INTERPRETED)
SCRIPT = ROOT / "bench" / "gpu.py"


@pytest.mark.long
def test_a_rehearsal_survives_every_failure():
    """A part that is killed, hangs, raises, has a full disk, lacks a name; and a call with a full disk."""
    done = subprocess.run([sys.executable, SCRIPT, "rehearse=true"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["rehearsal:", "every failure was survived"]
    for said in (
        "killed by SIGKILL", "stopped after 2 s", "the GPU has fallen off the bus", "No space left on device",
        "needs torch.no_such_name, which is not here", "a pretended card, driver 0.0, 1980 of 1980 MHz",
        "next: python bench/gpu.py call=4", "expected beside seen", "small o 48 x 160, 5 rows: error",
    ):  # fmt: skip
        assert said in done.stdout, said
    assert "parts.jsonl is not written" in done.stderr and "full.tar.gz is not written" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("part", [part.name for part in gpu.PARTS[1:] if part.name not in ELSEWHERE])
def test_the_code_of_a_part_runs(part: str, tmp_path: Path):
    """Runs on small models and a CPU; what needs a GPU says so. Figures of small models mean nothing."""
    done = python([SCRIPT, f"part={part}", "small=true", "limit=600", f"folder={tmp_path}"], ROOT)
    lines = [line for line in done.out.splitlines() if line.startswith('{"what"')]
    bars = [gpu.bar_of(json.loads(line)) for line in lines]
    assert done.code == 0 and bars, done.err[-2000:]
    assert not [bar for bar in bars if bar.met is False], done.err[-2000:]


@pytest.mark.long
def test_a_call_keeps_what_its_parts_say(tmp_path: Path):
    """Runs the parts whose kernels Triton interprets, which a process has to be told at its start."""
    parts = INTERPRETED
    files = f"folder={tmp_path / 'run'}", f"archive={tmp_path / 'all.tar.gz'}", f"write={tmp_path / 'gpu.md'}"
    done = python([SCRIPT, "small=true", f"parts={','.join(parts)}", *files], ROOT)
    assert done.code == 0, done.err[-2000:]
    machine, *records = gpu.records_in(tmp_path / "run")
    assert machine["part"] == "machine" and {record["part"] for record in records} == set(parts)
    assert all(record["state"] == "ended" and record["bars"] for record in records)
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"{part}: ended after" in page for part in parts)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert {record["part"]: record for record in kept} == {each["part"]: each for each in (machine, *records)}


def test_calls_fit_into_their_time():
    lines = gpu.plan_table()
    for call, limit_s in gpu.SECONDS.items():
        planned_s = gpu.planned_s([gpu.PARTS[0], *(part for part in gpu.PARTS[1:] if part.call == call)])
        assert planned_s <= limit_s and f"call {call}: {planned_s} s planned, {limit_s} at most" in lines
    assert all(part.planned_s <= part.limit_s for part in gpu.ALL)
    figures = {name.partition(":")[0] for name in gpu.EXPECTED}
    assert figures <= {part.name for part in gpu.PARTS}


STATES = dict(machine="ended", tests="stopped", logits="ended", steps="raised", products="no time")
RECORDS = [{"part": name, "state": state} for name, state in STATES.items()]


def due(gpus: int) -> list[str]:
    """The parts of a second call, in their order."""
    return [part.name for part in gpu.due(gpus, RECORDS)]


def test_a_second_call_runs_what_is_left():
    """And looks at the machine again."""
    assert due(2)[0] == "machine" and "logits" not in due(2)


def test_a_second_call_runs_failures_last():
    assert due(2)[-2:] == ["tests", "steps"]


def test_a_second_call_keeps_to_the_order_of_the_parts():
    assert due(2).index("products") < due(2).index("large") < due(2).index("beside")


def test_a_part_for_two_gpus_is_not_run_on_one():
    assert "beside" not in due(1)


CONTENTS = {"a.whl": b"1234567", "b.gguf": bytes(range(40)), "c.txt": b"xyz"}


@pytest.fixture
def pieces(tmp_path: Path) -> list[Path]:
    """Folders of 16 bytes, to which files were cut."""
    files = []
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
        files.append(tmp_path / name)
    return cut(files, tmp_path / "bring", 16)


def test_what_is_brought_along_is_cut_to_its_bound(pieces: list[Path]):
    assert [sum(file.stat().st_size for file in piece.iterdir()) for piece in pieces] == [16, 16, 16, 2]


@pytest.mark.usefixtures("pieces")
def test_what_is_brought_along_is_joined(tmp_path: Path):
    assert join(tmp_path / "bring", tmp_path / "brought") == []
    assert {file.name: file.read_bytes() for file in (tmp_path / "brought").iterdir()} == CONTENTS


def test_a_file_that_lacks_a_piece_is_not_joined(pieces: list[Path], tmp_path: Path):
    next(pieces[1].iterdir()).unlink()
    assert join(tmp_path / "bring", tmp_path / "other") == ["b.gguf: a piece is missing"]
    assert not (tmp_path / "other" / "b.gguf").exists()


@pytest.mark.slow
def test_kernels_compile_for_the_gpus_that_they_are_for():
    numbers, width = tensor(2**20, dtype=torch.int32), 4096
    require_compiled(lambda: read[(1,)](numbers, numbers, BLOCK, ROUNDS, num_warps=8), 90)
    x, weight = tensor(ROWS, width, dtype=torch.bfloat16), tensor(width, width, dtype=torch.bfloat16)
    for warps, *tile, stages in TILES:
        how = {"num_warps": warps, "num_stages": stages}
        given = x, weight, x, ROWS, width, width, warps, ROWS, *tile
        require_compiled(partial(multiply[(1,)], *given, **how), 90)
