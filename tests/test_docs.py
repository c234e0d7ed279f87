"""Commands of the README and the guides are taken, until their runs begin; notebooks run cell by cell.

Pictures that a script draws are those that it draws now, and each stands on a page. bench/README.md names
every benchmark and every results file.

tests/test_packaging.py and tests/slurm/test_readme.py run the commands that need no files of the reader's.
"""

import json
import os
import re
import shlex
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import your_model
from bench.all import FIGURES
from bench.diagrams import PICTURES
from llama_ssp.config import RunConf
from tests.conftest import Command
from tests.warm import ROOT

NOTEBOOKS = {file.stem: file for file in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))}
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


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the Python API alone; it keeps nothing of the machine that wrote it."""
    notebook, known = json.loads(NOTEBOOKS[name].read_text(encoding="utf-8")), dict[str, Any]()
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    for number, cell in enumerate(code):
        exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), known)
    lines = "".join("".join(cell["source"]) + "\n" for cell in code).splitlines()
    imported = [line for line in lines if "llama_ssp" in line]
    assert imported and all(line.startswith("from llama_ssp import") for line in imported)
    said = capsys.readouterr().out
    assert known["passes"][0] > known["passes"][4] > 0 and "passes of the target" in said


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    """Its ranks, imports and decisions are those of the code: `python bench/diagrams.py` draws it anew."""
    committed = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == PICTURES[name]().svg(), "run python bench/diagrams.py"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_read(name: str) -> None:
    """By a screen reader, in a light and a dark scheme, at 12 pixels and more, inside its frame."""
    drawing = PICTURES[name]()
    root = ElementTree.fromstring(drawing.svg())
    assert root.findtext(f"{SVG}title") == drawing.title
    assert root.findtext(f"{SVG}desc") == drawing.description

    style = root.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme: dark" in style and "@import" not in style and "url(" not in style
    sizes = [int(size) for size in re.findall(r"(\d+)px", style)]
    assert sizes and min(sizes) >= 12 and int(root.attrib["width"]) <= 900
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["x"]) < 900 and 0 < float(text.attrib["y"]) < drawing.height


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_stands_on_a_page(name: str) -> None:
    shown = re.compile(rf"!\[[^]]+\]\((?:docs/)?pictures/{name}\.svg\)")
    assert any(shown.search(page.read_text(encoding="utf-8")) for page in PAGES)


BENCH = ROOT / "bench"
BENCH_PAGE = (BENCH / "README.md").read_text(encoding="utf-8")
ALL_PAGES = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "CHANGELOG.md"])
RESULTS = sorted(file.name for file in (BENCH / "results").iterdir())
RESULTS_NAME = re.compile(r"(?P<name>\w+)_[a-z0-9-]+_\d{6}\.\w+")


@pytest.mark.parametrize("name", sorted(file.name for file in BENCH.glob("*.py")))
def test_a_benchmark_stands_in_the_page_of_benchmarks(name: str) -> None:
    assert re.search(rf"(?<!\w){re.escape(name)}", BENCH_PAGE), f"bench/README.md does not name {name}"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\w+\.py\b", BENCH_PAGE))))
def test_the_page_of_benchmarks_names_files_that_are_there(name: str) -> None:
    folders = (BENCH, ROOT / "tests", ROOT / "llama_ssp")
    assert any(path for folder in folders for path in folder.rglob(name)), name


@pytest.mark.parametrize("file", RESULTS)
def test_a_results_file_stands_in_the_page_of_benchmarks(file: str) -> None:
    """By its whole name, or by NAME of NAME_MACHINE_YYYYMM."""
    names = {file.rpartition(".")[0], RESULTS_NAME.fullmatch(file)["name"]}  # type: ignore[index]
    assert any(f"`{name}`" in BENCH_PAGE for name in names), f"bench/README.md names none of {names}"


@pytest.mark.parametrize("file", [file for file in RESULTS if file.endswith(".md")])
def test_a_results_file_is_named_by_a_page(file: str) -> None:
    """By README, CONTRIBUTING, CHANGELOG or docs: the page of benchmarks alone does not keep it."""
    assert file in ALL_PAGES, f"no page names bench/results/{file}"


def test_the_page_of_models_is_what_its_command_writes_now() -> None:
    assert (ROOT / "docs" / "your_model.md").read_text() == your_model.page()


@pytest.mark.parametrize("name", [figure.name for figure in FIGURES])
def test_a_figure_makes_a_results_file_that_a_page_names(name: str) -> None:
    named = re.compile(rf"\bbench/results/{name}_[a-z0-9-]+_\d{{6}}\.md")
    assert named.search(ALL_PAGES), f"bench/all.py makes {name}, which no page names"


@pytest.mark.parametrize("command", [figure.command for figure in FIGURES])
def test_the_command_of_a_figure_is_there(command: str) -> None:
    script, *words = shlex.split(command)
    if script == "-m":
        script = f"{words[0].replace('.', '/')}.py"
    assert (ROOT / script).is_file(), command
