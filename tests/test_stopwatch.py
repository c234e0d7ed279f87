"""Where the time goes: every moment in one part, and an engine on a stopwatch is the same engine."""

from __future__ import annotations

import pytest
import torch

from llama_ssp.distributed.comm import ALONE
from llama_ssp.pair.batches import TimedRun
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks import profiling as stopwatch
from llama_ssp.tasks.profiling import COMMUNICATE, DECIDE, DRAFT, HOST, VERIFY, Stopwatch, timed_ranks
from tests.proofs.toy import toy
from tests.rig import engine_of


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: self.now)

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_time_belongs_to_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watch, waits = Clock(monkeypatch), Stopwatch(), []
    with watch.part(DRAFT):
        clock.work(100)  # off: nobody's
    with watch.running(lambda: waits.append(1)):
        clock.work(1)
        with watch.part(DECIDE):
            clock.work(2)
            with watch.part(VERIFY):
                clock.work(4)
                with watch.part(COMMUNICATE):
                    clock.work(8)
                clock.work(16)
            clock.work(32)
        clock.work(64)
    clock.work(100)
    assert watch.spent == {HOST: 65, DECIDE: 34, VERIFY: 20, COMMUNICATE: 8}
    assert len(waits) == 8  # before every reading of the clock


def test_a_part_that_fails_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watch = Clock(monkeypatch), Stopwatch()
    with watch.running(lambda: None):
        with pytest.raises(ValueError, match="broken"), watch.part(VERIFY):
            clock.work(1)
            raise ValueError("broken")
        clock.work(2)
    assert watch.spent == {VERIFY: 1, HOST: 2}


def engine() -> Engine:
    return engine_of(toy(5, 0), toy(5, 1), draws=3)


PROMPTS = [Prompt("a", (1, 2, 3)), Prompt("b", (4,))]


def test_a_timed_engine_gives_the_same_texts_and_its_parts_add_up() -> None:
    plain = engine()
    state = plain.prefill(PROMPTS, 20)
    list(generate(plain, state, Limits(20), FixedDraftLength(3, 2)))
    watch, measured = Stopwatch(), engine()
    measured.observer = watch
    timed = TimedRun(measured, PROMPTS, 20)
    with watch.running(lambda: None):
        list(timed.rounds(Limits(20), FixedDraftLength(3, 2)))
    assert [timed.state.generated(row) for row in range(2)] == [state.generated(row) for row in range(2)]
    assert set(watch.spent) == {DRAFT, VERIFY, DECIDE, HOST}
    assert all(spent > 0 for spent in watch.spent.values())
    assert sum(watch.spent.values()) >= timed.counts.decode_s


def test_ranks_on_a_stopwatch_say_the_same() -> None:
    watch = Stopwatch()
    ranks = timed_ranks(ALONE, watch)
    with watch.running(lambda: None):
        assert ranks.broadcast_ints([1, 2]) == [1, 2]
        assert ranks.all_reduce(torch.ones(2)).tolist() == [1, 1]
        assert len(ranks.all_gather(torch.ones(2))) == 1
    assert watch.spent[COMMUNICATE] > 0
    assert (ranks.rank, ranks.world, ranks.is_leader) == (0, 1, True)


def test_a_run_counts_prefill_apart_and_the_caller_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prefill takes 5 s, each verification 2 s, and the caller a minute a round."""
    clock, slow = Clock(monkeypatch), engine()
    prefill, verify = slow.prefill, slow.verify
    monkeypatch.setattr(slow, "prefill", lambda *given: (clock.work(5), prefill(*given))[1])
    monkeypatch.setattr(slow, "verify", lambda *given: (clock.work(2), verify(*given))[1])
    timed, spent = TimedRun(slow, PROMPTS, 20), []
    for _, seconds in timed.rounds(Limits(20), FixedDraftLength(3, 2)):
        spent.append(seconds)
        clock.work(60)
    assert spent == [2.0] * len(spent)
    found = timed.figures()
    assert (found["prefill_ms"], found["time_to_first_token_ms"]) == (5000, 7000)
    assert found["decode_ms"] == 2000 * len(spent) and timed.seconds == 5 + 2 * len(spent)
    assert found["tokens_committed"] == 40 and found["ms_per_token"] == found["decode_ms"] / 40
