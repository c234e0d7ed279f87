"""What adaptive drafting goes by: measured where it can be, given where it is, and guessed otherwise."""

import gc
import logging
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, cycle, pairwise
from operator import mul
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from llama_ssp.config import USUAL_COST_RATIO, Drafting, ModelConf, RunConf, SpeculationConfig
from llama_ssp.pair import session
from llama_ssp.speculative import draft_length, measure_costs
from llama_ssp.speculative.draft_length import (
    Acceptance,
    AdaptiveDraftLength,
    Costs,
    FixedDraftLength,
    lookahead_for,
)
from llama_ssp.speculative.engine import Engine, Observer
from llama_ssp.speculative.measure_costs import best_k, measured, timed_rounds
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import RowStep
from tests.conftest import Command
from tests.proofs.toy import toy
from tests.rig import engine_of

RUN = RunConf(
    model=ModelConf(name="m"),
    draft=ModelConf(name="d"),
    speculation=SpeculationConfig(adaptive=True, k_max=8),
)


def with_(**changes: Any) -> RunConf:
    return replace(RUN, speculation=replace(RUN.speculation, **changes))


def two_toys() -> Engine:
    return engine_of(toy(5, 0), toy(5, 1), sampling=RUN.sampling)


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_are_measured_for_every_k(rows, caplog):
    """And the log says that a seed is not enough to repeat a run that goes by them."""
    with caplog.at_level(logging.INFO):
        costs = measured(two_toys(), RUN, rows, 40)
    assert "another run of this seed may differ, unless speculation.cost_ratio=" in caplog.text
    assert costs is not None and costs.k_max == 8
    assert all(cost > 0 for cost in costs.rounds)
    assert measured(two_toys(), RUN, rows, 3) is None, "texts are too short to draft"


def test_costs_lie_on_lines_between_measured_ones(monkeypatch):
    """Of each K the shortest round counts: two thirds of these are stalled."""
    stalls = cycle([100.0, 1.0, 3.0])

    def timed(_engine, lookahead, _half, _prompts, played):
        while True:
            played.append((0, lookahead.k, []))
            yield next(stalls) * (10.0 + lookahead.k**2)

    monkeypatch.setattr(measure_costs, "timed_rounds", timed)
    costs = measured(two_toys(), RUN, 1, 40)
    assert costs is not None
    assert [costs.rounds[k] for k in (0, 1, 2, 4, 6, 8)] == pytest.approx(
        [10.0, 11.0, 16.0, 26.0, 50.0, 74.0]
    )


def test_a_round_is_taken_to_cost_no_more_than_one_with_more_drafts(monkeypatch):
    """All rounds of K = 1 and 4 are stalled: else the noise would choose K."""
    stalls = {0: 1.0, 1: 9.0, 4: 3.0, 8: 1.0}

    def timed(_engine, lookahead, _half, _prompts, played):
        while True:
            played.append((0, lookahead.k, []))
            yield stalls[lookahead.k] * (10.0 + lookahead.k)

    monkeypatch.setattr(measure_costs, "timed_rounds", timed)
    costs = measured(two_toys(), RUN, 1, 40)
    assert costs is not None
    assert [costs.rounds[k] for k in (0, 1, 4, 8)] == [10.0, 18.0, 18.0, 18.0]


def test_k_is_chosen_by_what_is_known_of_costs():
    known = Costs(rounds=[1 + 0.5 * k for k in range(9)], drafter="d")
    usual = Costs.of_ratio(USUAL_COST_RATIO, 8)
    for run, costs, expected in (
        (RUN, known, known),
        (RUN, None, usual),
        (with_(cost_ratio=0.25), None, Costs.of_ratio(0.25, 8)),
        (with_(cost_ratio=0.25), known, Costs.of_ratio(0.25, 8)),
        (with_(k_max=4), known, Costs.of_ratio(USUAL_COST_RATIO, 4)),  # measured for another k_max
        (with_(drafter=Drafting.ngram), known, usual),  # measured of a draft model
    ):
        lookahead = lookahead_for(run, 2, costs)
        assert isinstance(lookahead, AdaptiveDraftLength) and lookahead.costs == expected
    fixed = lookahead_for(with_(adaptive=False, k=3), 2, known)
    assert isinstance(fixed, FixedDraftLength) and fixed.k == 3


def test_rounds_are_measured_as_a_run_plays_them():
    """Each has the K that was asked for and commits its tokens; where a text is full another begins."""
    engine, lookahead = two_toys(), FixedDraftLength(0, 2)
    rounds, lengths, ks = timed_rounds(engine, lookahead, 12, [], []), [], []

    class Lengths(Observer):
        def decided(self, state, proposal, *_):
            lengths.append(max(state.lengths))
            ks.append(proposal.k)

    engine.observer = Lengths()
    wanted = [0, 8, 3, 8] * 4
    for lookahead.k in wanted:
        assert next(rounds) > 0, lookahead.k
    assert ks == wanted
    assert len(set(lengths)) > 3 and max(lengths) < 6 + 12
    assert any(later < sooner for sooner, later in pairwise(lengths))


def seen(overlap: list[float], row: int = 0) -> RowStep:
    """A round whose drafts had these overlaps, and stand under the token rule."""
    standing = [*pairwise(accumulate(overlap, mul, initial=1.0))]
    return RowStep(
        row=row,
        tokens=[0],
        drafted=[0] * len(overlap),
        accepted=0,
        overlap=overlap,
        discarded=0,
        finish=None,
        standing=standing,
    )


@pytest.mark.parametrize(
    ("acceptance", "ratio", "k"), [(0.0, 0.1, 0), (0.8, 0.1, 6), (0.6, 0.3, 1), (0.99, 0.01, 16)]
)
def test_best_k(acceptance: float, ratio: float, k: int):
    """It grows with acceptance, and the less a draft costs."""
    assert Costs.of_ratio(ratio, 16).best(acceptance, acceptance) == k


class Walk:
    """Adaptive drafting of one row: K at first, after good drafts, then 300 times after bad ones."""

    def __init__(self) -> None:
        self.lookahead = AdaptiveDraftLength(Costs.of_ratio(0.2, 16), 1)
        [self.start] = self.lookahead.choose()
        self.observe(1.0, 30)
        [self.grown] = self.lookahead.choose()
        self.observe(0.0, 200)
        self.chosen = [self.lookahead.choose()[0] for _ in range(300)]

    def observe(self, overlap: float, rounds: int) -> None:
        for _ in range(rounds):
            self.lookahead.observe([seen([overlap] * 4)])


def test_adaptive_k_grows_while_drafts_stand():
    walk = Walk()
    assert walk.grown > walk.start > 0


def test_adaptive_k_that_has_shrunk_tries_again_now_or_then():
    chosen = Walk().chosen
    tries = [number for number, k in enumerate(chosen) if k]
    assert [later - sooner for sooner, later in pairwise(tries)] == [1, 1, 62] * 3 + [1, 1]
    assert tries[0] == 61 and {chosen[number] for number in tries} == {1}


def test_adaptive_k_that_has_shrunk_grows_again():
    walk = Walk()
    walk.observe(1.0, 200)
    assert walk.lookahead.choose()[0] >= walk.grown


def test_k_goes_by_how_later_drafts_stand_where_the_first_ones_do():
    """Two rows whose first drafts stand alike; behind them one's draft is sure, the other's useless."""
    lookahead = AdaptiveDraftLength(Costs.of_ratio(0.1, 8), 2)
    for _ in range(60):
        sure = seen([0.5, 1.0, 1.0, 1.0], row=0)
        useless = seen([0.5, 0.0, 0.0, 0.0], row=1)
        lookahead.observe([sure, useless])
    assert lookahead.choose() == [8, 1]
    first, second = lookahead.acceptance
    assert first.first.value == pytest.approx(second.first.value, abs=0.05)
    assert first.later.value > 0.95 and second.later.value < 0.1
    lookahead.restart(0)
    assert lookahead.choose()[0] == AdaptiveDraftLength(Costs.of_ratio(0.1, 8), 1).choose()[0]


@dataclass
class Machine:
    """Rounds of one row on a computed clock; drafts stand with a given probability on average."""

    costs: Costs
    reading: float = 0.0  # seconds of each token that the draft model has missed
    seed: int = 0

    def __post_init__(self) -> None:
        self.random, self.seconds, self.tokens = Random(self.seed), 0.0, 0.0

    def text(self, *parts: tuple[int, float]) -> list[int]:
        """The K of each round of a text of parts, each with its rounds and its acceptance."""
        lookahead, missed, chosen = AdaptiveDraftLength(self.costs, 1), 0, []
        for rounds, kept in parts:
            for _ in range(rounds):
                [k] = lookahead.choose()
                step = seen([self.random.betavariate(5 * kept, 5 * (1 - kept)) for _ in range(k)])
                lookahead.observe([step])
                seconds = self.costs.rounds[k] + (self.reading * missed if k else 0.0)
                lookahead.took([step], seconds)
                self.seconds += seconds
                self.tokens += 1 + sum(stands for _, stands in step.standing)
                missed = 0 if k else missed + 1
                chosen.append(k)
        return chosen


def best_of(costs: Costs, alpha: float) -> float:
    """The time of a token with the best fixed K."""
    return min(costs.rounds[k] / draft_length.tokens_per_round(alpha, k) for k in range(17))


def per_token(costs: Costs, alpha: float, seed: int) -> float:
    """The time of a token of a text of some 200, K adaptive."""
    machine, k = Machine(costs, seed=seed), costs.best(alpha, alpha)
    machine.text((round(200 / draft_length.tokens_per_round(alpha, k)), alpha))
    return machine.seconds / machine.tokens


@cache
def emulated(draft: float, alpha: float) -> tuple[float, float, float]:
    """The time of a token, costs known: K adaptive over 200 tokens, the best fixed K, regular sampling."""
    costs = Costs(rounds=[1 + (draft + 0.01) * k for k in range(17)])
    adaptive = sum(per_token(costs, alpha, seed) for seed in range(100)) / 100
    return adaptive, best_of(costs, alpha), costs.rounds[0]


@pytest.mark.few(4)
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft", [0.05, 0.3])
def test_adaptive_k_is_near_the_best_fixed_k(draft: float, alpha: float):
    """Within 3 %."""
    adaptive, best, _ = emulated(draft, alpha)
    assert adaptive <= 1.03 * best


@pytest.mark.few(4)
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft", [0.05, 0.3])
def test_adaptive_k_is_no_slower_than_no_drafts(draft: float, alpha: float):
    """Within 3 %."""
    adaptive, _, regular = emulated(draft, alpha)
    assert adaptive <= regular / 0.97


@pytest.mark.parametrize("alpha", [0.05, 0.95])
def test_a_k_that_learns_nothing_of_the_text_is_farther_from_the_best(alpha):
    """Control of the emulation."""
    costs = Costs(rounds=[1 + 0.31 * k for k in range(17)])
    best = best_of(costs, alpha)
    with patch.object(Acceptance, "observe", lambda *_: None):
        assert sum(per_token(costs, alpha, seed) for seed in range(10)) / 10 > 1.06 * best


def learning() -> Costs:
    """Costs as if measured: K = 1 pays from an acceptance of 0.35 on."""
    return Costs(rounds=[1.0 + 0.35 * k for k in range(9)], learns=True)


def test_a_text_drafts_again_where_drafting_begins_to_pay() -> None:
    """After a text that did not, and within two pauses in the same text. Control: nothing is tried."""
    undrafted: dict[int, list[float]] = {}
    for tries in (draft_length.TRIES, 0):
        with patch.object(draft_length, "TRIES", tries):
            machine = Machine(learning())
            bad, good = machine.text((150, 0.05)), machine.text((30, 0.95))
            assert bad[20:].count(0) > 100, tries
            undrafted[tries] = [good.count(0) / 30]
            for seed in range(10):
                machine = Machine(learning(), seed=seed)
                late = machine.text((200, 0.05), (200, 0.95))[200 + 2 * draft_length.PAUSE :]
                undrafted[tries].append(late.count(0) / len(late))
    assert undrafted == {draft_length.TRIES: [0] * 11, 0: [1] * 11}


def test_a_text_starts_as_the_texts_before_it_ended() -> None:
    """Only where costs are measured. With given ones a seed is enough to repeat a text."""
    costs = learning()
    first, second = (Machine(costs).text((20, 0.97)) for _ in range(2))
    assert second[0] > first[0]
    given = replace(costs, usual=Acceptance(), learns=False)
    assert Machine(given).text((20, 0.97)) == Machine(given).text((20, 0.97))


@pytest.mark.parametrize("reading", [0.0, 0.01, 0.1, 0.3])
def test_what_the_draft_model_reads_for_tries_takes_little(reading: float) -> None:
    """Never below 0.95 of regular sampling over a run of texts with a useless draft."""
    assert useless(Machine(learning(), reading)) > 0.95
    with patch.object(AdaptiveDraftLength, "took", lambda *_: None):  # control: no longer pauses
        assert (useless(Machine(learning(), reading)) < 0.9) == (reading == 0.3)


def test_how_often_drafts_stand_is_measured_on_the_prompts() -> None:
    """A model that drafts for itself always stands; one with other weights does not."""
    prompts = [Prompt("0", (1, 2, 3)), Prompt("1", (4,))]
    for draft, stands in ((toy(5, 0), True), (toy(5, 1), False)):
        costs = measured(engine_of(toy(5, 0), draft, sampling=RUN.sampling), RUN, 3, 40, prompts=prompts)
        assert costs and (costs.usual.first.value > 0.95) == (costs.usual.later.value > 0.95) == stands
    blind = measured(engine_of(toy(5, 0), toy(5, 1), sampling=RUN.sampling), RUN, 3, 40)
    assert blind is not None and blind.usual.first.value == Acceptance().first.value


def test_a_batch_drafts_only_where_that_is_clearly_faster() -> None:
    """Two drafts that always stand bring three tokens; a round that takes as long as three brings nothing.

    Most time goes to texts whose drafts do not stand. A round without drafts takes as long as one of K = 0.
    """
    always, often, never, none = ([seen(overlap)] for overlap in ([1.0, 1.0], [0.6, 0.5], [0.0, 0.0], []))
    for round_s, texts, k in (
        ([1.0, 1.1, 1.2], [always], 2), ([1.0, 1.9, 2.9], [always], 0), ([1.0, 1.1, 1.5], [often], 1),
        ([1.0, 1.5, 1.8], [often], 0), ([1.0, 1.2, 1.5], [always, never], 0),
        ([1.0, 1.2, 1.5], [always, none], 2), ([1.0, 1.2, 1.5], [always, []], 2),
    ):  # fmt: skip
        assert best_k(round_s, [(batch, 2, steps) for batch, steps in enumerate(texts)]) == k


def useless(machine: Machine) -> float:
    """Plays four texts with a useless draft; returns the tokens a second."""
    for _ in range(4):
        machine.text((400, 0.05))
    return machine.tokens / machine.seconds


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "times"),
    [
        (("generate", "prompt=Once"), 1),
        (("compare", "prompt=Once"), 1),
        (("agree", "prompt=Once"), 0),
        (("certify", "prompt=Once", "samples=8", "law_rounds=2", "law_tokens=8", "greedy_tokens=4"), 0),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_costs_are_measured_where_a_task_goes_by_them(
    words: tuple[str, ...], times: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a seed must be enough, and where K is not chosen, that would only take time."""
    dear, taken = Costs.of_ratio(9.0, 16), []
    monkeypatch.setattr(session, "measured", lambda *_: taken.append(dear) or dear)
    answer = command(*words, "speculation=adaptive", "max_new_tokens=30", "seed=1", "output=json")
    assert answer.code in (0, 1), answer.err
    assert len(taken) == times


def test_the_caches_of_a_measurement_are_freed_at_once() -> None:
    """Not when Python looks for cycles: the run allocates its own, and the plan counts one of each."""
    gc.collect()
    gc.disable()
    try:
        engine = two_toys()
        models = [engine.target.model, engine.drafter._runner.model]
        assert measured(engine, RUN, 3, 40) is not None
        del engine
        assert [model.caches.now for model in models] == [0, 0]
    finally:
        gc.enable()
