"""The picture of a comparison fits its terminal, whatever the size and whatever the models write."""

import io
import re
from collections import Counter
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from llama_ssp.errors import StorageError, UsageError
from llama_ssp.report.live_view import STYLES, Scene, Track, bars, save, trace_line, verdict
from llama_ssp.report.plots import check_plot
from llama_ssp.speculative.stats import Counts

quiet = settings(derandomize=True, deadline=None, database=None, max_examples=60)
WRITTEN = "def f(x):\n    return 日本語 🎉 x\t# tab\n\x1b[31mred\x07\u202e\n"


def counted(rounds: int, drafted: int) -> Counts:
    """Rounds of a token in 0.1 s each, less a prefill; half of the drafts of each stand."""
    if not rounds:
        return Counts()
    accepted = Counter(dict.fromkeys(range(drafted // 2), rounds))
    return Counts(
        row_rounds=rounds, drafted=Counter(dict.fromkeys(range(drafted), rounds)), accepted=accepted,
        committed=rounds, accepted_lengths=Counter({drafted // 2: rounds} if drafted else {}),
        prefill_s=0.05, decode_s=max(0.1 * rounds - 0.05, 0.0),
    )  # fmt: skip


def scene(prompt: str = "def hello", texts: tuple[str, str] = (WRITTEN, WRITTEN * 3)) -> Scene:
    origins = list(STYLES)
    tracks = []
    for name, text, drafted in zip(("regular", "speculative, K = 4"), texts, (0, 4), strict=True):
        pieces = [(character, origins[i % 4]) for i, character in enumerate(text)]
        tracks.append(Track(name, counted(len(text), drafted), pieces, "length"))
    return Scene(prompt, tracks[0], tracks[1])


def drawn(picture: Scene, width: int, height: int, colours: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=colours, highlight=False,
        color_system="256" if colours else None, _environ={},
    )  # fmt: skip
    console.print(picture, height=None if picture.whole else height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@quiet
@given(st.text(max_size=80), st.text(max_size=200), st.integers(60, 200), st.integers(16, 60), st.booleans())
@example("x" * 500, "日" * 300, 61, 16, False)
@example("def hello", WRITTEN, 81, 24, True)
def test_any_text_fits_any_terminal(prompt: str, text: str, width: int, height: int, whole: bool) -> None:
    """In width and, unless it is whole, in height, with nothing on the way that would steer the terminal."""
    output = drawn(scene(prompt, (text, text[::-1])).end(whole), width, height)
    lines = output.removesuffix("\n").split("\n")
    assert whole or len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert not [c for c in output if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]


def test_eighty_columns_hold_two_panes() -> None:
    output = drawn(scene().end(whole=True), 80, 24)
    first = next(line for line in output.splitlines() if "regular" in line)
    assert "speculative, K = 4" in first and cell_len(first) == 80


def test_the_verdict_is_below_the_panes() -> None:
    assert "times as fast" in drawn(scene().end(whole=True), 80, 24).splitlines()[-2]


def test_controls_of_a_text_are_shown_by_their_numbers() -> None:
    assert r"\x1b[31mred\x07\u202e" in drawn(scene().end(whole=True), 80, 24)


def test_few_lines_hold_the_end_of_the_text() -> None:
    """A whole picture has all of it."""
    long = scene(texts=("\n".join(map(str, range(100))), "short"))
    low, whole = drawn(long.end(whole=False), 80, 16), drawn(long.end(whole=True), 80, 16)
    assert "│ 99" in low and "│ 47" not in low and "│ 47" in whole


def by_origin() -> Scene:
    """A token of each origin, which is its text."""
    return Scene("p", Track("a", arrived=[(origin, origin) for origin in STYLES]), Track("b"), whole=True)


def test_tokens_are_coloured_by_origin() -> None:
    output = drawn(by_origin(), 100, 30, colours=True)
    body = next(line for line in output.splitlines() if "bonus" in line and "│" in line)
    for code, origin in ((32, "drafted"), (33, "corrected"), (36, "bonus")):
        assert f"\x1b[{code}m{origin}\x1b[0m" in body
    assert "\x1b[0msampled" in body


def test_without_colours_the_marks_remain() -> None:
    """NO_COLOR: what was accepted is underlined, what was rejected struck through; the legend shows it."""
    record = {
        "id": "0", "round": 2, "position": 9, "drafted": [1, 2], "drafted_text": ["yes", "no"], "accepted": 1,
        "last_origin": "corrected", "last_text": "so",
    }  # fmt: skip
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, no_color=True, _environ={"TERM": "xterm"})
    console.print(by_origin(), trace_line(record, console.no_color))
    said = file.getvalue()
    for marked in ("[4mdrafted\x1b[0m", "[4mdrafted and accepted", "[4m'yes'\x1b[0m", "[9m~'no'~\x1b[0m"):
        assert f"\x1b{marked}" in said
    assert not re.search(r"\x1b\[3\dm", said)
    assert trace_line(record).plain == "0 at 9: 'yes' ~'no'~ (1 of 2), corrected 'so'"


def test_the_bar_of_accepted_lengths() -> None:
    assert bars([8, 0, 4, 1]) == "0█8  1 0  2▄4  3▁1"
    assert bars([]) == "" and bars([0, 0]) == "0 0  1 0"


def test_the_verdict_on_times() -> None:
    said = verdict(scene(texts=("ab" * 10, "c" * 40)).end(whole=True))
    assert said == "0.99 times as fast: 97.50 ms/token, then 98.75; prefill excluded"


def test_without_times_there_is_no_verdict() -> None:
    assert verdict(Scene("p", Track("a"), Track("b")).end(whole=True)) == ""


@pytest.mark.parametrize("ending", [".svg", ".html"])
def test_a_saved_picture_holds_how_every_comparison_ended(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}"
    said = [
        Track("regular", counted(1, 4), [(text, "sampled")])
        for text in ("def f(<a>):", "日本", "second", "x")
    ]
    save([Scene("a prompt", *said[:2]), Scene("another", *said[2:])], path, 80, "a pair")
    text = path.read_text(encoding="utf-8")
    if ending == ".svg":
        ElementTree.fromstring(text)  # well-formed
    plain = unescape(re.sub(r"<[^>]*>", "", text)).replace("\N{NO-BREAK SPACE}", " ")
    for held in ("def f(<a>):", "second", "日本", "a prompt", "times as fast", "drafted and accepted"):
        assert held in plain, held


def test_a_picture_has_light_colours_too(tmp_path: Path) -> None:
    """Each style in both, by the same name; and nothing is fetched to show it."""
    path = tmp_path / "a.svg"
    texts = [("a", "drafted"), ("b", "corrected"), ("c", "bonus"), ("d", "sampled")]
    tracks = [Track(name, counted(1, 4), texts) for name in ("regular", "speculative")]
    save([Scene("a prompt", *tracks)], path, 80, "a pair")
    text = path.read_text(encoding="utf-8")
    dark, light = text.split("@media (prefers-color-scheme: light)")
    style = re.compile(r"\.compare-(r\d+) {")
    names = style.findall(dark)
    assert len(names) > 4 and names == style.findall(light)
    assert 'url("http' not in text
    used = set(re.findall(r'class="compare-(r\d+)"', light))
    assert used == set(names)


def test_a_picture_in_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write the picture"):
        save([scene()], tmp_path / "no" / "a.svg", 80, "")
    with pytest.raises(UsageError, match="in no folder"):
        check_plot(str(tmp_path / "no" / "a.svg"))
    check_plot(str(tmp_path / "a.svg"))


PIECES = [
    ("ab", "drafted"), ("c", "drafted"), ("d", "bonus"), ("e", "corrected"), ("f", "drafted"),
    ("ghi", "corrected"),
]  # fmt: skip


def track(seconds: float = 0.4, tokens: int = 6) -> Track:
    counts = Counts(committed=tokens, prefill_s=0.1, decode_s=seconds)
    return Track("speculative", counts, PIECES, "eos")


def test_neighbours_of_one_origin_are_one_piece() -> None:
    assert track().pieces()[:3] == [("abc", "drafted"), ("d", "bonus"), ("e", "corrected")]
    assert track().text == "abcdefghi"
    cut = track()
    cut.length = 4  # a stop string is no part of the text
    assert cut.text == "abcd"
    assert all(origin in ("drafted", "bonus", "corrected") for _, origin in cut.pieces())


def test_prefill_is_in_no_speed() -> None:
    slow = track(0.8, 8)
    slow.counts.prefill_s = 5.0
    assert track().ms_per_token == pytest.approx(400 / 6) and slow.ms_per_token == pytest.approx(100)
