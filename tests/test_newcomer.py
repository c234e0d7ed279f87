"""The README as a newcomer runs it (tests/newcomer.py): which lines are commands, and what came of them."""

from __future__ import annotations

from tests.newcomer import ROOT, Told, commands, needs, run, transcript

BLOCK = """Words.
```
git clone <this repository>
make demo      # sets everything up
a table of figures
python launch/run.py task.input=mine.jsonl task=batch   # many
```
```
python launch/run.py model=13B download=true
```
"""


def test_commands_are_found_and_what_they_need(tmp_path):
    found = list(commands(BLOCK))
    assert found[1:3] == ["make demo", "python launch/run.py task.input=mine.jsonl task=batch"]
    needed = [needs(command, tmp_path) for command in found]
    assert needed == ["a place of the reader's", "", "the reader's mine.jsonl", "a network"]
    (tmp_path / "mine.jsonl").touch()
    assert needs(found[2], tmp_path) == ""


def test_the_readme_is_told_whole():
    found = list(commands((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"make demo", "make test", "llama-ssp --help"} <= set(found)
    assert sum("llama-ssp" in command or "launch/run.py" in command for command in found) > 20


def test_a_failure_is_told(tmp_path):
    told = [
        run("printf 'a\\nb\\n'", tmp_path),
        run("echo no >&2; exit 3", tmp_path),
        Told("x", why="a network"),
    ]
    assert [(one.code, one.last, one.failed) for one in told] == [
        (0, "b", False), (3, "no", True), (None, "", False),
    ]  # fmt: skip
    said = transcript(told)
    assert "1 commands of the README ended well, 1 did not, 1 were not run." in said
    assert "not run: needs a network" in said
