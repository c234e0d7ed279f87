"""The script for a GPU, without one: what fails stops nothing, calls go on, and figures are what they say."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import gpu
from gpu_kernels import BLOCK, ROUNDS, ROWS, TILES, multiply, read
from replays import Replays

from llama_ssp.models.cuda_graphs import GraphedModel
from tests.test_triton import require_compiled, tensor
from tests.warm import ROOT, python

NEED_MORE = ("races", "beside")  # a tool of CUDA; a file that is brought along
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
        "next: python bench/gpu.py call=3", "expected beside seen", "small o 48 x 160, 5 rows: error",
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


STATES = dict(machine="ended", tests="stopped", texts="ended", codes="raised", steps="no time")
RECORDS = [{"part": name, "state": state} for name, state in STATES.items()]


def due(call: int) -> list[str]:
    """The parts that a call runs after that first one, in their order."""
    return [part.name for part in gpu.due(call, RECORDS)]


def test_a_second_call_runs_what_is_left():
    """And looks at the machine again."""
    assert due(2)[0] == "machine" and "texts" not in due(2)


def test_a_second_call_runs_failures_last():
    assert due(2)[-2:] == ["tests", "codes"]


def test_a_second_call_keeps_to_the_order_of_the_parts():
    assert due(2).index("steps") < due(2).index("ranks") < due(2).index("large")


def test_a_part_of_a_later_call_is_not_run():
    assert not {"ranks", "beside"} & {*due(1)}


def test_what_has_run_before_comes_last():
    assert not {"logits", "races", "bandwidth", "products"} & {*due(1), *due(2)}
    assert {"logits", "races", "bandwidth", "products"} <= {*due(3)}


def test_two_calls_fit_into_fifteen_minutes():
    """Of 900 s about 150 pass until a machine is there, and while files are copied to it and back."""
    assert gpu.SECONDS[1] + gpu.SECONDS[2] <= 750 and gpu.SECONDS[1] <= 600


def test_parts_that_time_something_run_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Those that time nothing run with their neighbours."""
    running, most = [], dict[str, int]()

    def run(call: gpu.Call, part: gpu.Part) -> None:
        running.append(part.name)
        time.sleep(0.2)
        most[part.name] = len(running)
        running.remove(part.name)

    monkeypatch.setattr(gpu.Call, "run", run)
    call = gpu.Call(gpu.Asked(folder=str(tmp_path)), gpu.Card(pretended=True))
    call.run_all([part for part in gpu.PARTS if part.call == 2])
    assert most["large"] == 1 and max(most["ranks"], most["faults"]) == 2


class Doubled(GraphedModel):
    """Graphs of this model give twice what their functions give."""

    def __init__(self) -> None:
        self._functions = {}

    def replay(self, function: Any, *given: torch.Tensor) -> torch.Tensor:
        self._functions[function, *((each.shape, each.dtype) for each in given)] = partial(function)
        return 2 * function(*given)


def negative(x: torch.Tensor) -> torch.Tensor:
    return -x


def test_wrong_graphs_are_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GraphedModel, "replay", Doubled.replay)
    monkeypatch.delattr(Doubled, "replay")
    usual = GraphedModel.replay
    with Replays() as replays:
        for x in (torch.ones(2), torch.zeros(2), torch.tensor([1]), torch.tensor([0])):
            Doubled().replay(negative, x)
    assert (replays.by_graph, replays.differing, replays.without) == (4, 2, 0)
    assert GraphedModel.replay is usual


def test_calls_without_a_graph_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GraphedModel, "replay", lambda _, function, *given: function(*given))
    monkeypatch.delattr(Doubled, "replay")
    with Replays() as replays:
        Doubled().replay(negative, torch.ones(2))
    assert (replays.by_graph, replays.differing, replays.without) == (0, 0, 1)


@pytest.mark.slow
def test_kernels_compile_for_the_gpus_that_they_are_for():
    numbers, width = tensor(2**20, dtype=torch.int32), 4096
    require_compiled(lambda: read[(1,)](numbers, numbers, BLOCK, ROUNDS, num_warps=8), 90)
    x, weight = tensor(ROWS, width, dtype=torch.bfloat16), tensor(width, width, dtype=torch.bfloat16)
    for warps, *tile, stages in TILES:
        how = {"num_warps": warps, "num_stages": stages}
        given = x, weight, x, ROWS, width, width, warps, ROWS, *tile
        require_compiled(partial(multiply[(1,)], *given, **how), 90)
