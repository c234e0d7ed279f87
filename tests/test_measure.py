"""task=measure: its document, files and turns; where the time goes. How fast anything is, no test says."""

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.models import host_memory
from llama_ssp.pair.requests import requests_of
from llama_ssp.pair.run import Run, RunSettings
from llama_ssp.placing.prediction import DEVICE
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks import profiling as stopwatch
from llama_ssp.tasks.common import memory_of_ranks
from llama_ssp.tasks.measure import MeasuredPair
from llama_ssp.tasks.profiling import COMMUNICATE, DECIDE, DRAFT, HOST, PARTS, VERIFY, Stopwatch, timed_ranks
from tests.conftest import Command
from tests.proofs.toy import toy
from tests.rig import engine_of
from tests.warm import Answer

QUICK = ("task=measure", "task.max_new_tokens=6", "task.repeats=2", "seed=1", 'task.prompts=["a","b"]')
SPEED = {
    "ms_per_token", "ms_per_token_low", "ms_per_token_high", "tokens_per_s", "time_to_first_token_ms",
    "inter_token_ms_p50", "inter_token_ms_p90", "inter_token_ms_p99",
    "time_split_ms_per_token", "acceptance_rate", "acceptance_by_position", "tokens_per_target_forward",
    "tokens_committed", "repeats",
}  # fmt: skip
PAIR = SPEED | {"k", "speedup", "speedup_low", "speedup_high", "predicted_speedup"}


@pytest.fixture
def measured(once: Callable[..., Answer]) -> dict[str, Any]:
    """The document of a measurement with two lengths of drafts."""
    answer = once(*QUICK, "task.ks=[1,3]")
    assert (answer.code, answer.errors) == (0, [])
    return answer.document


@pytest.fixture
def rows(measured: dict[str, Any]) -> list[dict[str, Any]]:
    return [measured["target_alone"], measured["draft_alone"], *measured["pair"]]


def test_a_measurement_is_done(measured: dict[str, Any]) -> None:
    assert (measured["task"], measured["status"]) == ("measure", "done")


def test_each_model_is_measured_alone(measured: dict[str, Any]) -> None:
    assert measured["target_alone"].keys() >= SPEED and measured["draft_alone"].keys() >= SPEED
    assert measured["cost_ratio"] > 0


def test_the_pair_is_measured_with_each_k(measured: dict[str, Any]) -> None:
    assert [row["k"] for row in measured["pair"]] == [1, 3]
    assert all(row.keys() >= PAIR for row in measured["pair"])
    assert len(measured["pair"][1]["acceptance_by_position"]) == 3


def test_all_write_the_same_tokens_as_often(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["tokens_committed"] == 2 * 2 * 6  # repeats, prompts, tokens
        assert row["repeats"] == 2


def test_only_the_pair_drafts(measured: dict[str, Any]) -> None:
    assert measured["target_alone"]["tokens_drafted"] == 0 < measured["pair"][0]["tokens_drafted"]


def test_a_time_lies_within_its_interval(measured: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["ms_per_token_low"] <= row["ms_per_token"] <= row["ms_per_token_high"]
    assert measured["interval_coverage"] == 0.5
    assert len(measured["pair"][1]["ms_per_token_by_repeat"]) == 2


def test_the_time_of_a_token_is_split(measured: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert set(row["time_split_ms_per_token"]) == set(PARTS)
    split = measured["pair"][0]["time_split_ms_per_token"]
    assert split["draft"] > 0
    assert split["communicate"] == 0


def test_a_measurement_leaves_its_files(command: Command) -> None:
    measured = command(*QUICK, "task.ks=[1]", "task.repeats=1").document
    folder = Path(measured["run_folder"])
    assert "<svg" in (folder / "plot.svg").read_text() and measured["plot"] == str(folder / "plot.svg")
    assert json.loads((folder / "summary.json").read_text())["pair"] == measured["pair"]


def test_a_measurement_is_shown(once: Callable[..., Answer]) -> None:
    said = once(*QUICK, "task.ks=[1,3]").out
    assert "where the time goes" in said and "pair, K = 3" in said


def test_the_memory_of_a_process_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not `ru_maxrss`, which in a child begins with its parent's."""
    status, cpu = tmp_path / "status", torch.device("cpu")
    status.write_text("Name:\tpython\nVmHWM:\t  4321 kB\n", encoding="utf-8")
    monkeypatch.setattr(host_memory, "STATUS", status)
    assert memory_of_ranks(0, cpu, ALONE)[0][DEVICE] == 4321 * 1024


def test_contenders_take_turns_in_order(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every batch, so that what slows the machine slows all; first a warm-up on one prompt."""
    turn, order = MeasuredPair._turn, list[tuple[str, str, int]]()

    def seen(pair: MeasuredPair, contender: Any, batch: Any, repeat: int, sample: Any) -> None:
        order.append((contender.record.name, batch[0][1].id, repeat))
        turn(pair, contender, batch, repeat, sample)

    monkeypatch.setattr(MeasuredPair, "_turn", seen)
    command(*QUICK, "task.ks=[2]", "out=null", "output=json")
    names = ["target alone", "draft alone", "pair, K = 2"]
    at = [("0", 0), ("0", 0), ("1", 0), ("0", 1), ("1", 1)]
    assert order == [(name, prompt, repeat) for prompt, repeat in at for name in names]


def test_a_text_that_ends_on_damaged_logits_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the first round: the round has given no token, and none has a time."""
    logits, number = ModelRunner.logits, count()

    def damaged(self: ModelRunner, *given: Any) -> Any:
        return logits(self, *given) * (torch.nan if next(number) else 1.0)

    monkeypatch.setattr(ModelRunner, "logits", damaged)
    answer = command(*QUICK, "draft=none")
    assert answer.code == 4 and "not numbers" in answer.errors[0]


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "pairs", "has_draft"),
    [
        ("draft=none", [], False),
        ("speculation=none", [], False),
        ("draft=none speculation=ngram task.ks=[2]", [2], False),
        ("speculation=adaptive task.ks=[2]", [2, None], True),
        ("task.ks=[]", [], False),
        # No prompt fits the draft's context.
        ("task.lengths=[60] task.prompts=null task.ks=[2] draft.context=64", [2], False),
    ],
)
def test_who_takes_part(overrides: str, pairs: list[int | None], has_draft: bool, command: Command) -> None:
    answer = command(*QUICK, "task.repeats=1", *overrides.split())
    assert (answer.code, answer.errors) == (0, [])
    found = answer.document
    assert [row["k"] for row in found["pair"]] == pairs
    assert (found["draft_alone"] is not None) == has_draft == (found["cost_ratio"] is not None)
    assert Path(found["plot"]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["task.batch_size=2"]], ids=["one row", "two rows"])
def test_a_grid_of_lengths(more: list[str], command: Command) -> None:
    grid = (*QUICK, "task.lengths=[5,40,17]", "task.prompts=null", "task.ks=[2]", "task.repeats=1")
    document = command(*grid, *more).document
    assert document["prompt_tokens"] == [5, 40, 17] and document["pair"][0]["tokens_committed"] == 3 * 6


@pytest.mark.slow
def test_what_was_measured_remains_when_it_is_stopped(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turns = MeasuredPair._turn, list[int]()

    def stopping(task: MeasuredPair, *rest: Any) -> Any:
        turns.append(1)
        if len(turns) == 11:  # after the warm-up of three and a repeat of six: the second counts nothing
            raise KeyboardInterrupt
        turn(task, *rest)

    monkeypatch.setattr(MeasuredPair, "_turn", stopping)
    answer = command(*QUICK, "task.ks=[2]")
    assert answer.code == 130
    found = answer.document
    assert found["status"] == "interrupted" and found["target_alone"]["repeats"] == 1
    assert found["pair"][0]["speedup"] > 0 and found["interval_coverage"] == 0
    assert "target alone" in answer.out and "(not measured)" in answer.out


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: self.now)

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_time_belongs_to_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails ends all the same."""
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
    watch = Stopwatch()
    with watch.running(lambda: None):
        with pytest.raises(ValueError, match="broken"), watch.part(VERIFY):
            clock.work(1)
            raise ValueError("broken")
        clock.work(2)
    assert watch.spent == {VERIFY: 1, HOST: 2}


def engine() -> Engine:
    return engine_of(toy(5, 0), toy(5, 1), draws=3)


PROMPTS = [Prompt("a", (1, 2, 3)), Prompt("b", (4,))]


def run_of(engine: Engine) -> Run:
    requests = requests_of(PROMPTS, SamplingConfig(), 20)
    return Run(engine, requests, RunSettings(rows=2, lookahead=partial(FixedDraftLength, 3)))


@pytest.fixture(scope="module")
def timed() -> tuple[Run, Stopwatch]:
    """A run whose parts were timed."""
    watch, measured = Stopwatch(), engine()
    measured.observer = watch
    run = run_of(measured)
    run.begin()
    with watch.running(lambda: None):
        list(run.rounds())
    return run, watch


def test_a_timed_engine_gives_the_same_texts(timed: tuple[Run, Stopwatch]) -> None:
    run, _ = timed
    plain = engine()
    state = plain.prefill(PROMPTS, 20)
    list(generate(plain, state, Limits(20), FixedDraftLength(3, 2)))
    assert [run.replies[row].token_ids for row in range(2)] == [state.generated(row) for row in range(2)]


def test_the_parts_of_a_timed_run_add_up(timed: tuple[Run, Stopwatch]) -> None:
    run, watch = timed
    assert set(watch.spent) == {DRAFT, VERIFY, DECIDE, HOST}
    assert all(spent > 0 for spent in watch.spent.values())
    assert sum(watch.spent.values()) >= run.counts.decode_s


def test_ranks_on_a_stopwatch_say_the_same() -> None:
    watch = Stopwatch()
    ranks = timed_ranks(ALONE, watch)
    with watch.running(lambda: None):
        assert ranks.broadcast_ints([1, 2]) == [1, 2]
        assert ranks.all_reduce(torch.ones(2)).tolist() == [1, 1]
        assert len(ranks.all_gather(torch.ones(2))) == 1
    assert watch.spent[COMMUNICATE] > 0
    assert (ranks.rank, ranks.world, ranks.is_leader) == (0, 1, True)


@pytest.fixture
def slow_run(monkeypatch: pytest.MonkeyPatch) -> tuple[Run, list[float]]:
    """A run whose prefills take 5 s, verifications 2 s, and whose caller a minute a round; its rounds."""
    clock, slow = Clock(monkeypatch), engine()
    prefill, verify = slow.prefill, slow.verify
    monkeypatch.setattr(slow, "prefill", lambda *given: (clock.work(5), prefill(*given))[1])
    monkeypatch.setattr(slow, "verify", lambda *given: (clock.work(2), verify(*given))[1])
    run, spent = run_of(slow), []
    for step in run.rounds():
        spent.append(step.seconds)
        clock.work(60)
    return run, spent


def test_a_run_counts_prefill_apart(slow_run: tuple[Run, list[float]]) -> None:
    run, _ = slow_run
    assert (run.counts.prefill_s, run.first_token_s) == (5, 7)


def test_a_run_does_not_count_its_caller(slow_run: tuple[Run, list[float]]) -> None:
    run, spent = slow_run
    assert spent == [2.0] * len(spent)
    figures = run.counts.figures()
    assert (figures["prefill_ms"], figures["decode_ms"]) == (5000, 2000 * len(spent))
    assert figures["tokens_committed"] == 40 and figures["ms_per_token"] == figures["decode_ms"] / 40
