"""What a run says of its machine: asking does not get in the user's way."""

import subprocess
from pathlib import Path

import pytest

from llama_ssp.report import machine
from llama_ssp.report.machine import said_by_git


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit, and a file that git would look at again: it was written since."""
    words = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "file"], [*words, "commit", "-q", "-m", "first"]):
        (tmp_path / "file").write_text("text")
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "file").unlink()
    (tmp_path / "file").write_text("text")
    return tmp_path


def test_git_is_asked_without_a_lock(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would write the index, and a commit of the user at that moment would fail."""
    index = checkout / ".git/index"
    before = index.stat().st_mtime_ns, index.read_bytes()
    monkeypatch.setattr(machine, "SOURCES", checkout)
    said = machine.commit.__wrapped__()
    assert said and not said.endswith("-dirty")
    assert (index.stat().st_mtime_ns, index.read_bytes()) == before

    (checkout / "file").write_text("another")
    assert machine.commit.__wrapped__() == f"{said}-dirty"
    (checkout / "file").write_text("text")
    (checkout / "new").write_text("not tracked")
    assert machine.commit.__wrapped__() == said


def test_what_git_does_not_say_is_nothing(tmp_path: Path) -> None:
    assert said_by_git(tmp_path, "no-such-command") == ""
