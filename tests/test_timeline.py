"""A few rounds as bars and as text."""

from __future__ import annotations

from dataclasses import replace

from llama_ssp.engine.ahead import Span
from llama_ssp.engine.apart import Exchange
from llama_ssp.tasks.timeline import Bar, Work, bars, lines

# Asked at 0, 100 and 200; 40 drafting, 60 verifying, in which the draft goes on for 30.
HISTORY = [
    Exchange(0, 40, (Span(False, 0, 20), Span(False, 20, 40))),
    Exchange(100, 140, (Span(True, 50, 80), Span(False, 100, 140))),
    Exchange(200, 240, (Span(True, 150, 180), Span(False, 200, 240))),
]


def test_bars_are_whole_rounds():
    found = bars(HISTORY)
    assert [bar for bar in found if bar.work.is_targets] == [
        Bar(Work.waits, 0, 40), Bar(Work.verifies, 40, 100), Bar(Work.waits, 100, 140),
        Bar(Work.verifies, 140, 200),
    ]  # fmt: skip
    assert [bar for bar in found if bar.work is Work.ahead] == [
        Bar(Work.ahead, 50, 80), Bar(Work.ahead, 150, 180),
    ]  # fmt: skip
    assert bars(HISTORY, rounds=1)[0] == Bar(Work.waits, 100, 140)
    assert bars(HISTORY[:1]) == [] == lines(HISTORY[:1])


def test_a_letter_is_so_much_time():
    assert lines(HISTORY, width=20) == [
        "target ░░░░██████░░░░██████",
        "draft  ▓▓▓▓ ▒▒▒  ▓▓▓▓ ▒▒▒",
        "2 rounds in 0.2 ms: █ verifies, ░ waits for drafts, ▒ drafts ahead, ▓ drafts when asked",
    ]


def test_a_draft_on_another_machines_clock_is_left_out():
    late = [
        replace(one, spans=tuple(Span(ahead, began + 999, ended + 999) for ahead, began, ended in one.spans))
        for one in HISTORY
    ]
    assert all(bar.work.is_targets for bar in bars(late)) and len(lines(late)) == 2
