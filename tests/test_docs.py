"""Every command of the README and the guides, as far as the door: its words are keys, options and values.

tests/test_packaging.py and tests/slurm/test_readme.py run those that need no files of the reader's.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.door import Door

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


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with Door().open() as opened:
        yield opened


@pytest.mark.few(12)
@pytest.mark.parametrize(("file", "words"), commands())
def test_a_command_is_taken_as_it_stands(
    file: str, words: str, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has models under /models."""
    is_folder = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: str(path).startswith("/models/") or is_folder(path))
    said, _ = door(tuple(shlex.split(words)))
    assert said.code == 0, said.err


def test_there_are_commands_in_each_guide() -> None:
    files = [file for file, _ in commands()]
    assert len(files) > 45 and {"README.md", "ranks.md", "plan.md", "compare.md", "batch.md"} <= set(files)


RESULTS = re.compile(r"bench/results/([\w-]+_\d{6}\.md)")
NUMBER = r"\d[\d,]*(?:\.\d+)?"


def quotations() -> list[tuple[str, str]]:
    """Each paragraph that names results files, with the list or table that it introduces, and its page."""
    found = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        blocks = [""]
        for block in re.split(r"\n\s*\n", page.read_text(encoding="utf-8")):
            if blocks[-1].endswith(":") and not block.startswith("#"):
                blocks[-1] += f"\n\n{block}"
            else:
                blocks.append(block)
        found += [(page.name, block) for block in blocks if RESULTS.search(block)]
    return found


def not_measured(text: str, results: str) -> list[str]:
    """The figures of a text that are no figure of the results, rounded. Code is what was run, no figure."""
    words = re.sub(r"`[^`]+`|\]\([^)]*\)|[\w.-]+/[\w./-]+", " ", re.sub(r"```.*?```", "", text, flags=re.S))
    measured = [float(figure.replace(",", "")) for figure in re.findall(NUMBER, results)]
    measured += [100 * one for one in measured if one <= 1]  # a share, in percent
    wrong = []
    for figure in re.findall(rf"(?<![\w.-]){NUMBER}", words):
        value = float(figure.replace(",", ""))
        half = 0.5001 * 10.0 ** -len(figure.partition(".")[2])
        if not any(abs(value - one) <= half for one in measured):
            wrong.append(figure)
    return wrong


@pytest.mark.parametrize(("page", "text"), quotations())
def test_a_figure_is_in_the_results_file_beside_it(page: str, text: str) -> None:
    """`python bench/all.py` makes the files; a figure that is no longer theirs has to be written anew."""
    files = [ROOT / "bench" / "results" / name for name in RESULTS.findall(text)]
    assert not not_measured(text, "\n".join(file.read_text(encoding="utf-8") for file in files)), text


def test_every_results_file_is_named_and_a_wrong_figure_is_seen() -> None:
    named = {name for _, text in quotations() for name in RESULTS.findall(text)}
    unnamed = {file.name for file in (ROOT / "bench" / "results").glob("*.md")} - named
    assert not unnamed, "nothing quotes them"
    rows = (ROOT / "bench" / "all.py").read_text(encoding="utf-8")
    made = set(re.findall(r'Figure\(\s*"(\w+)"', rows))
    unquoted = made - {name.rsplit("_", 2)[0] for name in named}
    assert len(made) > 25 and unquoted <= {"shipped", "llama_cpp"}
    assert not_measured("4.5 times, 96 % of `3` 1,280 tokens ", "4.482 1280 96.04") == []
    assert not_measured("4.6 times, 97 % of 1,281 tokens", "4.482 1280 96.04") == ["4.6", "97", "1,281"]
