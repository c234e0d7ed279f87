"""What every test gets: one thread, no network, and a folder of its own to run in.

Loads no torch: the process that starts the workers has no use for it.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command has it before torch is imported

import pytest
from hydra._internal.hydra import Hydra

# Their assertions are pytest's, too: under `python -O` Python's own are none.
pytest.register_assert_rewrite(
    "tests.distributed.threads", "tests.processes", "tests.proofs.choices", "tests.proofs.interleaved",
    "tests.proofs.rational", "tests.slurm.jobs", "tests.slurm.lab", "tests.warm",
)  # fmt: skip

from llama_ssp import cli
from tests.processes import ends_its_processes, note_starts
from tests.warm import Answer

note_starts()

gc.disable()  # while modules are imported and tests collected: what they make stays


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Finds the long cases, then deals the tests out to the workers."""
    import torch

    from llama_ssp.models import programs
    from llama_ssp.models.kernels.build import compiler

    torch.set_num_threads(1)
    programs.HEADERS_FIRST = bool(shutil.which("openssl"))  # torch's way to tell headers apart
    gc.freeze()
    gc.enable()
    find_long(items)
    if compiler() is None:
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason="there is no C++ compiler"))
    if seed := os.environ.get("LLAMA_SSP_TEST_ORDER"):
        items[:] = shuffled(items, Random(seed))
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def find_long(items: list[pytest.Item]) -> None:
    """Of a test marked few(n), all but n cases are long: these are spread evenly, so each kind is met.

    What is long is slow, too.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("few")
        assert marker is not None
        kept = {found[len(found) * number // marker.args[0]].nodeid for number in range(marker.args[0])}
        for item in found:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.long)
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)


def shuffled(items: list[pytest.Item], random: Random) -> list[pytest.Item]:
    """The files in another order, and the tests of each: does one need what another leaves?"""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = [random.sample(own, len(own)) for own in files.values()]
    random.shuffle(order)
    return [item for own in order for item in own]


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests in an order where each worker's first part, an equal count, begins with its slow ones.

    So the tests that run last are quick, and all workers end together. Tests on Slurm, which wait most,
    come first of all, on two workers, each with a cluster of its own.
    """
    kinds: list[list[pytest.Item]] = [[], [], []]
    on_slurm, slow, quick = kinds
    for item in items:
        marks = [item.get_closest_marker(name) is not None for name in ("slurm", "slow")]
        kinds[marks.index(True) if any(marks) else 2].append(item)
    order: list[pytest.Item] = []
    for worker in range(workers):
        end = len(order) + (len(items) - len(order)) // (workers - worker)
        order += on_slurm[worker :: min(2, workers)] if worker < 2 else []
        order += slow[len(slow) * worker // workers : len(slow) * (worker + 1) // workers]
        count = max(0, end - len(order)) if worker < workers - 1 else len(quick)
        order += quick[:count]
        del quick[:count]
    return order


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    with ends_its_processes():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the process said that took too long or did not end well."""
    report = yield
    error = call.excinfo and call.excinfo.value
    if isinstance(error, subprocess.TimeoutExpired | subprocess.CalledProcessError):
        for name, said in (("output", error.stdout), ("errors", error.stderr)):
            text = said.decode(errors="replace") if isinstance(said, bytes) else said
            report.sections.append((f"its {name}", (text or "")[-3000:]))
    return report


def crash_file(run: str, worker: str) -> Path:
    return Path(tempfile.gettempdir(), f"crash-{run}-{worker}")


@pytest.hookimpl(trylast=True)  # pytest sends it to stderr
def pytest_configure(config: pytest.Config) -> None:
    """A worker that crashes leaves a file that says where."""
    if own := getattr(config, "workerinput", None):
        place = crash_file(own["testrunuid"], own["workerid"])
        faulthandler.enable(place.open("w"))
        atexit.register(place.unlink)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """The failure of a test that crashed its worker says by which signal, and where."""
    worker = report.node
    report.longrepr += f"\nIt ended with {worker.gateway._io.wait()}."
    place = crash_file(worker.workerinput["testrunuid"], worker.gateway.id)
    if place.exists():
        report.longrepr += f"\n{place.read_text()[:6000]}"
        place.unlink()


RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Random weights, unless a test says otherwise: nothing to read, nothing to wait for.
SMALL = {"model=": "model=tiny", "draft=": "draft=tiny_draft"}


def needs_transformers(least: str) -> None:
    """Skips a test that compares with what transformers does since that version."""
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(least):
        pytest.skip(f"compares with transformers {least} or later")


class Command:
    """Runs the command in this process, in a folder of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *overrides: str, stdin: bytes = b"") -> Answer:
        pairs = any(o.startswith("task.pairs=") for o in overrides)  # they name the models
        named = [group for group in SMALL if pairs or any(o.startswith(group) for o in overrides)]
        small = [name for group, name in SMALL.items() if group not in named]
        self._monkeypatch.setattr(sys, "argv", ["llama-ssp", *small, *overrides])
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = self._capfd.readouterr()
        return Answer(int(left.value.code or 0), said.out, said.err)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Command]:
    """The command line, callable; what `main` changes in the process is put back."""
    home = tmp_path / "run"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # composes all again; the flags decide
    for name in (*RANKS, "MASTER_ADDR", "MASTER_PORT", "LLAMA_SSP_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    handler, log = signal.getsignal(signal.SIGTERM), logging.getLogger("llama_ssp")
    level = log.level
    yield Command(monkeypatch, capfd)
    log.setLevel(level)  # a run as another rank than the leader logs errors alone
    signal.signal(signal.SIGTERM, handler)


@dataclass(frozen=True)
class Saved:
    """Model folders that are whole; copy one to break it."""

    whole: Path
    sharded: Path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    from tests import checkpoints

    base = tmp_path_factory.mktemp("checkpoints")
    return Saved(checkpoints.save(base / "whole"), checkpoints.save(base / "sharded", shard="100KB"))
