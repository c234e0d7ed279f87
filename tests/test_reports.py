"""Tables, the page of a run, and the folders of a sweep: on made-up runs."""

import csv
import html
import io
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.cells import cell_len
from rich.console import Console as RichConsole

from llama_ssp.config import RunConf
from llama_ssp.errors import DataError, UsageError
from llama_ssp.report.console import Console
from llama_ssp.report.page import execute
from llama_ssp.report.plots import svg
from llama_ssp.report.run_folder import RunFolder, sweep_folder
from llama_ssp.report.tables import Column, Table, text_of
from llama_ssp.report.task_tables import CHECK_MEANINGS
from llama_ssp.report.task_tables import speeds as shown
from tests.refusals import LAUGHS
from tests.test_speeds import speeds

HOSTILE = "<script>alert(1)</script> & \"'|"


def measured(**more: Any) -> dict[str, Any]:
    own = {"prompts": 3, "status": "done", "target": "big", "drafter": "small"}
    return {"task": "measure", **speeds(6).figures(), **own, **more}


def saved(folder: Path, summary: dict[str, Any], **settings: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(yaml.safe_dump({"sampling": settings, "out": str(folder)}))
    return str(folder)


def drawn(table: Any, width: int) -> list[str]:
    console = RichConsole(file=io.StringIO(), width=width, color_system=None, _environ={})
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def wide() -> Table:
    """A table that is wider than most terminals."""
    table = shown(measured())[0]
    assert isinstance(table, Table)
    return table


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(width: int, wide: Table) -> None:
    assert max(map(cell_len, drawn(wide, width))) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_tables_break_no_number(width: int, wide: Table) -> None:
    """What matters most stays."""
    row = next(line for line in drawn(wide, width) if line.startswith("pair, K = 4"))
    assert "2.00" in row.split() and "2.00..2.00" in row.split()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_say_that_columns_are_left_out(width: int, wide: Table) -> None:
    """And where they are."""
    left_out = [column.head for column in wide.columns if column not in wide.fitting(width)]
    assert ("first token" in left_out) == (width == 80)
    lines = drawn(wide, width)
    assert any("too narrow for" in line and "speeds.csv" in line for line in lines) == bool(left_out)


@pytest.mark.parametrize("width", [20, 40, 60, 104])
def test_a_narrow_table_has_every_cell_whole(width: int) -> None:
    """As several tables below one another; text is broken between words."""
    columns = [Column(key="name", title="", is_text=True), Column(key="words", is_text=True)]
    columns += [Column(key=key, digits=2) for key in "abcdef"]
    numbers = {key: 100.25 + number for number, key in enumerate("abcdef")}
    rows = [{"name": "one", "words": "two short words", **numbers}, {"name": "two", "a": 1.0}]
    lines = drawn(Table("t", columns, rows), width)
    assert max(map(cell_len, lines)) <= width

    words = " ".join(lines).split()
    figures = {f"{value:.2f}" for value in numbers.values()}
    assert {*"abcdef", "one", "two", "short", "words"} | figures <= {*words}
    assert words.count("one") == lines.count("") + 1  # in each of the tables
    assert (len(lines) == 3) == (width == 104)


@pytest.mark.parametrize("width", [40, 60])
def test_a_table_of_a_run_is_readable_on_a_narrow_terminal(width: int, wide: Table) -> None:
    lines = drawn(wide, width)
    shown_columns = wide.fitting(width)
    assert max(map(cell_len, lines)) <= width and len(shown_columns) > 2
    words = " ".join(lines).split()
    for column in shown_columns[1:]:
        for row in wide.rows:
            assert {*column.cell(row).split()} <= {*words}, column.key


def test_a_table_writes_every_form() -> None:
    columns = [Column(key="name", is_text=True), Column(key="ms", digits=1)]
    columns.append(Column(key="ms", title="interval", is_interval=True))
    rows = [{"name": HOSTILE, "ms": 1.25, "ms_low": 1.0, "ms_high": 2.0}, {"name": "b", "ms": None}]
    table = Table("times", columns, rows, "Times")
    assert text_of([table])[2].split() == ["name", "ms", "interval"]
    assert [row[1:] for row in csv.reader(io.StringIO(table.csv()))] == [
        ["ms", "ms_low", "ms_high"], ["1.25", "1.0", "2.0"], ["", "", ""],
    ]  # fmt: skip
    assert "<script" not in table.html() and "1.00..2.00" in table.html()


def test_a_run_folder_gets_its_tables(tmp_path: Path) -> None:
    """Also where the run was stopped before it had a figure."""
    for name, summary in (("a", measured()), ("b", {"task": "measure", "prompts": 0})):
        folder = RunFolder(RunConf(out=str(tmp_path)), 1, tmp_path / name)
        folder.close(summary)
    rows = list(csv.DictReader((tmp_path / "a" / "speeds.csv").open()))
    assert [row["contender"] for row in rows[:2]] == ["target alone", "draft alone"]
    assert float(rows[0]["ms_per_token"]) == measured()["target_alone"]["ms_per_token"]  # not rounded
    assert [file.name for file in (tmp_path / "b").glob("*.csv")] == []


def test_a_report_is_one_file_without_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its picture; what a run's texts hold does not become part of the page."""
    summary = measured(target=HOSTILE, seed=0, wall_s=12.3456)
    place = saved(tmp_path / "a", summary, top_k=1, top_p=None)
    assert execute([place], Console()) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file == tmp_path / "a" / "report.html"
    page = file.read_text()
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    assert not re.search(r"""\b(src|href|data)\s*=\s*["'][^#"']""", page), "nothing is fetched"
    assert page.count("<svg") == 1 and "&lt;script&gt;" in page and "@media print" in page
    assert "<td>12.3</td>" in page and "<tr><td>seed</td><td>0</td></tr>" in page
    changed, others = page.index("differ from the defaults"), page.index("Other settings")
    assert changed < page.index("sampling.top_k") < others < page.index("sampling.top_p")


def test_a_picture_of_odd_figures() -> None:
    """A dollar sign in a name is no mathematics."""
    pytest.importorskip("matplotlib")
    prompts = [{"agreed_tokens": 3, "fork": None}]
    found = {"task": "agree", "target": "$a_b", "drafter": "$c", "prompts": prompts}
    assert ">$a_b with $c; n = 1 prompts</text>" in (svg(found) or "")


def test_what_cannot_be_reported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Path("a"), measured())
    saved(Path("older"), {"task": "eval", "status": "done"})
    Path("killed").mkdir()
    Path("killed/config.yaml").write_text("out: outputs\n")
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/summary.json").write_text("{")
    saved(Path("laughs"), measured())
    Path("laughs/config.yaml").write_text(LAUGHS)
    for words, error, said in (
        ("", UsageError, None),
        ("a a", UsageError, None),
        ("a out=a.html", UsageError, None),
        ("--x", UsageError, None),
        ("missing", DataError, "not the folder of a run; .*missing; found No such file or directory"),
        (
            "empty",
            DataError,
            "not the folder of a run; .*empty; found no summary.json; give the folder of a run",
        ),
        (
            "killed",
            DataError,
            "has no summary: it was killed.*killed; .*start it again with the settings of config",
        ),
        ("broken", DataError, None),
        ("laughs", DataError, "cannot be read; .*config.yaml; found aliases make more than 100000 values"),
        ("older", DataError, "lacks figures of its task; .*summary.json; found KeyError"),
    ):
        with pytest.raises(error, match=said):
            execute(words.split(), Console())


def test_a_sweep_names_its_folders_by_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    began = datetime(2026, 1, 2)
    with caplog.at_level("INFO"):
        words = [[f"sampling.top_k={k}"] for k in (1, 2)]
        places = [sweep_folder(number, varied, str(tmp_path), began) for number, varied in enumerate(words)]
    assert [place and place.name for place in places] == ["sampling.top_k=1", "sampling.top_k=2"]
    assert f"job 2: sampling.top_k=2; {places[1]}" in caplog.text
    assert sweep_folder(0, ["seed=1"], None, began) is None
    for alike in (["x" * 200 + "1", "x" * 200 + "2"], ["out='a/b'", "out='a_b'"]):
        assert sweep_folder(0, alike[:1], "out", began) != sweep_folder(1, alike[1:], "out", began)


def test_a_report_shows_what_was_given_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not what the plan or the model decided, although it is not the default; a preset by its name."""
    place = saved(tmp_path / "a", measured(), top_k=7, temperature=0.6)
    words = ["task=measure", "model=demo", "sampling.top_k=7", f"out={tmp_path}"]
    (tmp_path / "a" / "overrides.yaml").write_text(yaml.safe_dump(words))
    assert execute([place], Console()) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    given, _, others = page.partition("Other settings")
    assert "Settings that were given" in given and "differ from the defaults" not in page
    assert "<td>model</td><td>demo</td>" in given and "<td>sampling.top_k</td><td>7</td>" in given
    assert "sampling.temperature" not in given and "sampling.temperature" in others
    assert "sampling.top_k" not in others and "<td>task</td>" not in page


def test_a_report_says_what_each_check_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [{"name": name, "outcome": "passed", "says": "well"} for name in CHECK_MEANINGS]
    summary = {"task": "certify", "status": "done", "checks": checks, "says": "same"}
    assert execute([saved(tmp_path / "a", summary)], Console()) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    assert all(page.count(f"<td>{name}</td>") == 2 for name in CHECK_MEANINGS)
    assert all(html.escape(meaning) in page for meaning in CHECK_MEANINGS.values())
