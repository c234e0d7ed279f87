"""Figures that are asked for: what is met, by how much others are not, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterator

from bench.bars import Bar, all_met, bars_table, counted, most, needs, safely
from bench.surroundings import without_folder


def test_each_figure_is_met_or_says_by_how_much_not() -> None:
    found = [
        Bar("faster", 1.5, 2.0), Bar("faster", 2.0, 2.0), most("slower", 1.5, 1.2), most("slower", 1.2, 1.2),
        counted(3, 7, "texts that differ"), needs("graphs"), Bar("ms", 4.0), Bar("faster", None, 2.0),
        Bar("not a number", float("nan"), 1.0),
    ]  # fmt: skip
    assert [bar.verdict for bar in found] == [
        "NO, by 25 %", "met", "NO, by 25 %", "met", "NO, by 3", "not measured", "", "not measured",
        "NO, by nan %",
    ]  # fmt: skip
    assert not all_met(found) and all_met(found[1:2] + found[5:8])
    assert " ".join(bars_table(found)[5].split()) == "texts that differ <= 0 3 of 7 NO, by 3"


def test_an_error_ends_a_part_and_is_a_figure_that_misses() -> None:
    def bars() -> Iterator[Bar]:
        yield Bar("ms", 4.0)
        raise ValueError("no\nroom")

    first, last = safely("texts", bars())
    assert first == Bar("ms", 4.0)
    assert last.met is False and last.what == "texts: ends" and last.note == "ValueError: no room"


def test_a_results_file_names_no_folder_of_one_machine() -> None:
    assert without_folder("against=/home/me/checkout") == "against=FOLDER"
    assert without_folder("write=bench/results/ranks.md") == "write=bench/results/ranks.md"
    assert without_folder("turns=2") == "turns=2"
