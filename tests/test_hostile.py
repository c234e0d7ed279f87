"""The hostile corpus in processes under watch; each check can fail.

`python -m tests.hostile` does all rows by every engine.
"""

import sys
from pathlib import Path

import pytest

from llama_ssp.models import kept_files
from llama_ssp.models.kernels import build
from tests.conftest import Saved
from tests.hostile import INSTALLED, access_times_tell, tried
from tests.refusals import CORPUS, ESCAPES, Case, code, harmless, linked_outside

EACH_NAMES = (
    "armed-beside", "auto-map", "link", "missing-tensor", "pipe-model.safetensors", "plan-number",
    "sound-int4",
)  # fmt: skip
EACH = [row for row in CORPUS if row.name in EACH_NAMES]
ONE_PROCESS = [row for row in CORPUS if (not row.code or row in ESCAPES) and row not in EACH]


@pytest.fixture(scope="module", autouse=True)
def built_kernels() -> None:
    """The watched processes have limited time, and a first build takes most of it on a busy machine."""
    for source in Path(build.__file__).parent.glob("*.cpp") if kept_files.compiler() else ():
        build.load_library(source)


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("row", "engine"),
    [*((row, engine) for row in EACH for engine in INSTALLED), *((row, "own") for row in ONE_PROCESS)],
    ids=str,
)
def test_nothing_is_run_or_read_elsewhere(row: Case, engine: str, saved: Saved, tmp_path: Path) -> None:
    """Some rows by each engine; what runs after all, and templates that want to escape, in one process."""
    assert tried(row, engine, saved.whole, saved.sharded, tmp_path / "trial") == []


def follow_links() -> None:
    """Plants a fault: links are not looked at."""
    from llama_ssp.models import folder

    folder.require_inside = lambda *_: None


def import_what_the_model_brings() -> None:
    sys.path.insert(0, "model")
    __import__("evil")


@pytest.mark.slow
def test_the_watch_sees_what_it_should(saved: Saved, tmp_path: Path) -> None:
    """Without the check of links a file outside is read, and the trial says so; so it does of code."""
    assert access_times_tell(tmp_path)
    for change, fault, says in (
        (linked_outside("tokenizer.json"), follow_links, "read tokenizer.json outside"),
        (code("evil.py"), import_what_the_model_brings, "executed what the model brought"),
    ):
        folder = tmp_path / fault.__name__
        assert tried(harmless("x", change), "own", saved.whole, saved.sharded, folder, first=fault) == [says]
