"""A track's figures: what has come, and nothing else."""

from __future__ import annotations

import pytest

from llama_ssp.report.timeline import Arrival, Track, speedup


def track(rounds: int = 3) -> Track:
    arrivals = [
        Arrival(0.2, (("ab", "drafted"), ("c", "drafted"), ("d", "bonus")), 3, 2, 2),
        Arrival(0.3, (("e", "corrected"),), 1, 2, 0),
        Arrival(0.5, (("f", "drafted"), ("ghi", "corrected")), 2, 2, 1),
    ]
    return Track("speculative", 0.1, arrivals[:rounds], "eos" if rounds == 3 else None, None)


def test_a_track_holds_what_has_come() -> None:
    view = track(2)
    assert view.pieces() == [("abc", "drafted"), ("d", "bonus"), ("e", "corrected")]
    assert (view.tokens, len(view.arrivals), view.drafted) == (4, 2, 4)
    assert view.accepted_lengths == [1, 0, 1]
    assert view.finish is None and view.seconds == 0.3
    assert view.ms_per_token == pytest.approx(50) and view.tokens_per_s == pytest.approx(20)
    assert (view.acceptance_rate, view.tokens_per_round) == (0.5, 2)


def test_before_the_first_token_there_are_no_rates() -> None:
    view = track(0)
    assert (view.text, view.tokens, view.ms_per_token, view.acceptance_rate) == ("", 0, None, None)
    assert view.accepted_lengths == [] and view.finish is None


def test_at_its_end_a_track_says_how_it_ended() -> None:
    assert track().finish == "eos" and track().text == "abcdefghi"


def test_a_stop_string_is_no_part_of_the_text_though_its_tokens_count() -> None:
    cut = track()
    cut.length = 4
    view = cut
    assert view.text == "abcd" and view.tokens == 6
    assert all(origin in ("drafted", "bonus", "corrected") for _, origin in view.pieces())


def test_speedup_is_by_the_token_without_prefill() -> None:
    slow = Track("regular", 5.0, [Arrival(5.0 + n / 10, (), 1, 0, 0) for n in range(1, 9)])
    fast = track()
    assert fast.ms_per_token == pytest.approx(400 / 6)
    assert speedup(slow, fast) == pytest.approx(100 / (400 / 6))
    assert speedup(Track("regular"), fast) is None
