"""A track: the text that has come, and the times of its run."""

from __future__ import annotations

import pytest

from llama_ssp.report.live_view import Track
from llama_ssp.speculative.stats import Counts

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


def test_before_the_first_token_there_is_nothing() -> None:
    empty = Track("regular")
    assert (empty.text, empty.ms_per_token, empty.finish) == ("", None, None)


def test_a_stop_string_is_no_part_of_the_text() -> None:
    cut = track()
    cut.length = 4
    assert cut.text == "abcd"
    assert all(origin in ("drafted", "bonus", "corrected") for _, origin in cut.pieces())


def test_prefill_is_in_no_speed() -> None:
    slow = track(0.8, 8)
    slow.counts.prefill_s = 5.0
    assert track().ms_per_token == pytest.approx(400 / 6) and slow.ms_per_token == pytest.approx(100)
