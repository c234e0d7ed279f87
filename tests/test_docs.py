"""Every command of the README and the guides, until its run begins: its words are keys, options and values.

tests/test_packaging.py and tests/slurm/test_readme.py run those that need no files of the reader's.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from llama_ssp.config import RunConf
from tests.conftest import Command

ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(
    r"\s*(?:cat \S+ \| |\[?torchrun [^]]*?|python )?(?:launch/run\.py|llama-ssp)(?= \S)(?P<words>.*)"
)
OTHERS = re.compile(r"\.\.\.|--config-dir|^ (?:runs|report|diff)\b")  # what the reader has


def commands() -> list[tuple[str, str]]:
    """Each with the file it stands in; a line that ends in \\ goes on in the next."""
    found = []
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r" \\\n\s*", " ", file.read_text(encoding="utf-8"))
        for line in text.splitlines():
            said = COMMAND.fullmatch(re.split(r"\s+#|\s+> | \| (?!python)", line)[0])
            if said and not OTHERS.search(said["words"]):
                found.append((file.name, said["words"].strip()))
    return found


@pytest.mark.few(12)
@pytest.mark.parametrize(("file", "words"), commands())
def test_a_command_is_taken_as_it_stands(
    file: str, words: str, command: Command, taken: list[RunConf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has models under /models."""
    is_folder = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: str(path).startswith("/models/") or is_folder(path))
    answer = command.line(*shlex.split(words))
    assert answer.code == 0, answer.err


def test_there_are_commands_in_each_guide() -> None:
    files = [file for file, _ in commands()]
    assert len(files) > 45 and {"README.md", "ranks.md", "plan.md", "compare.md", "batch.md"} <= set(files)
