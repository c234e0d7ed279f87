"""What every test gets: one thread, no network, and a folder of its own to run in.

Loads no torch: the process that starts the workers has no use for it.
"""

import gc
import io
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NoReturn
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
os.environ["LLAMA_SSP_MEASURED"] = "0"  # plans do not depend on what was measured of a machine
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command has it before torch is imported

import pytest
from hydra._internal.hydra import Hydra

# Their assertions are pytest's, too: under `python -O` Python's own are none.
pytest.register_assert_rewrite(
    "tests.distributed.threads", "tests.processes", "tests.proofs.choices", "tests.proofs.rational",
    "tests.slurm.jobs", "tests.slurm.lab", "tests.warm",
)  # fmt: skip

from llama_ssp import cli
from llama_ssp.config import Output, RunConf, validation
from llama_ssp.config.validation import check_sharing
from llama_ssp.report.console import Console
from tests.processes import ends_its_processes
from tests.warm import Answer

gc.disable()  # while modules are imported and tests collected: what they make stays


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Finds the long cases, then deals the tests out to the workers."""
    import torch

    from llama_ssp.models import programs
    from llama_ssp.models.kept_files import compiler

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
        shuffle(items, Random(seed))
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


def shuffle(items: list[pytest.Item], random: Random) -> None:
    """The files in another order, and the tests of each: does one need what another leaves?"""
    places: dict[Path, float] = {}
    random.shuffle(items)
    items.sort(key=lambda item: places.setdefault(item.path, random.random()))


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests in an order where each worker's first part, an equal count, begins with its slow ones.

    So the tests that run last are quick, and all workers end together. Tests on Slurm, which wait most,
    come first of all, on two workers, each with a cluster of its own.
    """
    kinds: dict[str, list[pytest.Item]] = {"slurm": [], "slow": [], "": []}
    for item in items:
        kinds[next((name for name in ("slurm", "slow") if item.get_closest_marker(name)), "")].append(item)
    on_slurm, slow, quick = kinds.values()
    order: list[pytest.Item] = []
    for worker in range(workers):
        order += on_slurm[worker :: min(2, workers)] if worker < 2 else []
        order += slow[len(slow) * worker // workers : len(slow) * (worker + 1) // workers]
        room = max(0, len(items) * (worker + 1) // workers - len(order))
        order, quick = order + quick[:room], quick[room:]
    return order


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    with ends_its_processes():
        yield


# Random weights, unless a test says otherwise: nothing to read, nothing to wait for.
SMALL = {"model=": "model=tiny", "draft=": "draft=tiny_draft"}


class Command:
    """Runs the command in this process, in a folder of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *overrides: str, stdin: bytes = b"") -> Answer:
        pairs = any(o.startswith("task.pairs=") for o in overrides)  # they name the models
        named = [group for group in SMALL if pairs or any(o.startswith(group) for o in overrides)]
        small = [name for group, name in SMALL.items() if group not in named]
        return self.line(*small, *overrides, stdin=stdin)

    def line(self, *words: str, stdin: bytes = b"") -> Answer:
        self._monkeypatch.setattr(sys, "argv", ["llama-ssp", *words])
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capfd.readouterr()
        ended, told = list[dict[str, Any]](), Console.document

        def document(console: Console, summary: dict[str, Any], output: Output) -> None:
            ended.append(json.loads(json.dumps(summary)))
            told(console, summary, output)

        self._monkeypatch.setattr(Console, "document", document)
        with pytest.raises(SystemExit) as left:
            cli.main()
        self._monkeypatch.setattr(Console, "document", told)
        said = self._capfd.readouterr()
        return Answer(int(left.value.code or 0), said.out, said.err, ended[-1] if ended else None)


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
    ranks = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*ranks, "LLAMA_SSP_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    handler, log = signal.getsignal(signal.SIGTERM), logging.getLogger("llama_ssp")
    level = log.level
    with patch.dict(os.environ):  # what a command sets for its process is not left to other tests
        yield Command(monkeypatch, capfd)
    log.setLevel(level)  # a run as another rank than the leader logs errors alone
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def kept_answers() -> dict[tuple[str | bytes, ...], Answer]:
    """The answers of a module's tests to each other: `once` keeps them."""
    return {}


@pytest.fixture
def once(command: Command, kept_answers: dict[tuple[str | bytes, ...], Answer]) -> Callable[..., Answer]:
    """Runs a command line for the first test of a module that asks: each test looks at another part.

    For what is said, and for files of the run's folder by an absolute path: the folder is the first test's.
    """

    def answer(*overrides: str, stdin: bytes = b"") -> Answer:
        line = (stdin, *overrides)
        if line not in kept_answers:
            kept_answers[line] = command(*overrides, stdin=stdin)
        return kept_answers[line]

    return answer


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[RunConf]:
    """Ends the command where its run would begin: the runs whose configuration it took."""
    runs: list[RunConf] = []

    def end(run: RunConf, words: list[str]) -> NoReturn:
        check_sharing(run, words)
        runs.append(run)
        sys.exit(0)

    monkeypatch.setattr(validation, "check_sharing", end)
    return runs


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
