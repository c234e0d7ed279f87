"""A recording is a file that others can read: pictures with the texts in them, a cast that plays."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len

from llama_ssp.errors import StorageError, UsageError
from llama_ssp.plot import check_record
from llama_ssp.recording import HOLD_S, Recording
from llama_ssp.screen import Scene
from llama_ssp.track import Arrival, Track

WIDTH, HEIGHT = 80, 20
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def scene(word: str = "def f(<a>):") -> Scene:
    regular = Track(
        "regular", 0.1, [Arrival(0.1 + n / 5, ((word, "sampled"),), 1, 0, 0) for n in range(1, 6)]
    )
    blocks = [Arrival(0.1 + n / 4, ((word, "drafted"), (" 日本", "bonus")), 2, 4, 1) for n in range(1, 4)]
    return Scene("a prompt", regular, Track("speculative", 0.1, blocks, "length"))


def recorded(path: Path, *scenes: Scene) -> str:
    recording = Recording(path, WIDTH, HEIGHT, "a pair")
    for one in scenes:
        recording.add(one)
    assert recording.save() == str(path)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("ending", [".svg", ".html"])
def test_a_picture_holds_how_every_comparison_ended(ending: str, tmp_path: Path) -> None:
    text = recorded(tmp_path / f"a{ending}", scene(), scene("second"))
    if ending == ".svg":
        ElementTree.fromstring(text)  # well-formed
    plain = unescape(re.sub(r"<[^>]*>", "", text)).replace("\N{NO-BREAK SPACE}", " ")
    for held in ("def f(<a>):", "second", "日本", "a prompt", "times as fast", "drafted and accepted"):
        assert held in plain, held


def test_a_cast_plays_at_the_speed_that_was_measured(tmp_path: Path) -> None:
    header, *events = map(json.loads, recorded(tmp_path / "a.cast", scene(), scene("second")).splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, WIDTH, HEIGHT)
    times = [event[0] for event in events]
    assert times == sorted(times)
    assert all(kind == "o" for _, kind, _ in events)
    assert times[-1] == pytest.approx(2 * (scene().seconds + HOLD_S), abs=0.01)
    frames = [(at, ESCAPE.sub("", data).split("\r\n")) for at, _, data in events if "│" in data]
    for _, lines in frames:
        assert len(lines) <= HEIGHT and max(map(cell_len, lines)) <= WIDTH
    at = next(at for at, lines in frames if any("1 tokens" in line for line in lines))
    assert at == pytest.approx(0.3, abs=0.051)  # the first token came at 0.3 s; there are 20 frames a second
    assert "times as fast" in frames[-1][1][-1] and any("second" in line for line in frames[-1][1])


def test_nothing_is_saved_of_nothing(tmp_path: Path) -> None:
    assert Recording(tmp_path / "a.svg", WIDTH, HEIGHT, "").save() is None
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    recording = Recording(tmp_path, WIDTH, HEIGHT, "")  # a folder
    recording._path = tmp_path / "no" / "a.svg"
    recording.add(scene())
    with pytest.raises(StorageError, match="cannot write the recording"):
        recording.save()
    with pytest.raises(UsageError, match="in no folder"):
        check_record(str(tmp_path / "no" / "a.svg"))
    check_record(str(tmp_path / "a.svg"))
