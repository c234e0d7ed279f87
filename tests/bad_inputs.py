"""Cases of bad input: what is run, how far it may come, and the one line and exit code that it must give.

The row numbers are those of the table of bad inputs in the reliability research; 0 stands for cases
that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.pair import assembly as pair
from tests.checkpoints import copied
from tests.conftest import Command, Saved
from tests.hostile.corpus import CONFIG, FILES
from tests.hostile.damage import Damage

PROMPT = 'task.prompts=["hello"]'
ILLEGAL = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com for more information.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
LARGE = ("model=7B", "model.weights=synthetic", "draft=none")


@dataclass(frozen=True)
class Making:
    """Where a case builds its files."""

    folder: Path
    saved: Saved

    def model(self, change: Callable[[Path], object] = lambda _: None, sharded: bool = False) -> Path:
        """A copy of a model folder, changed."""
        source = self.saved.sharded if sharded else self.saved.whole
        path = copied(source, self.folder / f"model{len(list(self.folder.iterdir()))}")
        change(path)
        return path

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


Build = Callable[[Making], list[str]]


@dataclass(frozen=True)
class Case:
    row: int
    name: str
    build: Build | tuple[str, ...]
    code: int
    holds: tuple[str, ...]
    reach: str = CONFIG
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    answers: bool = False  # what was written before it showed is given out

    def arguments(self, making: Making) -> list[str]:
        return list(self.build) if isinstance(self.build, tuple) else self.build(making)

    def __str__(self) -> str:
        return f"{self.row}-{self.name}"


def usage(row: int, name: str, *overrides: str, holds: tuple[str, ...], **more: Any) -> Case:
    """A case of the command line alone."""
    return Case(row, name, (PROMPT, *overrides), 2, holds, **more)


def target(
    row: int, name: str, change: Damage, *holds: str, reach: str = CONFIG, code: int = 4,
    extra: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    """A case of one model folder."""

    def build(making: Making) -> list[str]:
        return [PROMPT, *alone(making.model(change)), *extra]

    return Case(row, name, build, code, holds, reach)


def duo(row: int, name: str, change: Damage, *holds: str, whose: str = "draft") -> Case:
    """A case of a sound model and a changed one."""

    def build(making: Making) -> list[str]:
        paths = {"model": making.saved.whole, "draft": making.saved.whole, whose: making.model(change)}
        return [PROMPT, *both(paths["model"], paths["draft"])]

    return Case(row, name, build, 4, holds, FILES)


def prompt_file(row: int, name: str, file: str, content: bytes | str, *holds: str) -> Case:
    return Case(row, name, lambda m: [f"task.prompt_file={m.write(file, content)}"], 3, holds)


def alone(path: Path) -> list[str]:
    return [f"model={path}", "draft=none", "task.max_new_tokens=4", "seed=1"]


def both(model: Path, draft: Path) -> list[str]:
    return [
        f"model={model}", f"draft={draft}",
        "task.max_new_tokens=4", "seed=1",
    ]  # fmt: skip


def require_one_line(
    case: Case, command: Command, saved: Saved, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    """Runs the case, which may come as far as it says."""
    for name, value in case.env.items():
        patch.setenv(name, value)
    if case.reach == CONFIG:
        patch.setattr("llama_ssp.tasks.runner", _too_far, raising=False)  # it may not be imported yet
    if case.reach in (CONFIG, FILES):
        patch.setattr(pair, "load", _too_far)
    (folder / "made").mkdir()
    answer = command(*case.arguments(Making(folder / "made", saved)), stdin=case.stdin)
    assert len(answer.errors) == 1, answer.err
    assert answer.code == case.code, answer.err
    assert "Traceback" not in answer.err
    assert answer.out == "" or case.answers
    assert [text for text in case.holds if text not in answer.errors[0]] == [], answer.errors[0]
    assert len(answer.errors[0]) < 1500


def _too_far(*_: object) -> None:
    pytest.fail("the run went on past what is wrong")
