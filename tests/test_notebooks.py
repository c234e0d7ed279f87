"""The notebooks run as they stand, cell by cell, through the Python API alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def cells(name: str) -> list[str]:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    assert not any(one["outputs"] for one in code)  # nothing of the machine that wrote them
    return ["".join(one["source"]) for one in code]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.ipynb")))
def test_a_notebook_runs(name: str, capsys: pytest.CaptureFixture[str]):
    known: dict[str, Any] = {}
    for number, source in enumerate(cells(name)):
        exec(compile(source, f"{name}, cell {number}", "exec"), known)
    imported = [line for source in cells(name) for line in source.splitlines() if "llama_ssp" in line]
    assert imported and all(line.startswith("from llama_ssp import") for line in imported)
    said = capsys.readouterr().out
    assert known["passes"][0] > known["passes"][4] > 0 and "passes of the target" in said
