"""What ends a row, what is counted, and how K is chosen."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.speculative.draft_length import (
    Acceptance,
    AdaptiveDraftLength,
    Costs,
    FixedDraftLength,
    tokens_per_round,
)
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, commit, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.speculative.verification import RULES
from llama_ssp.text.detokenizer import Writing
from tests.proofs.toy import Toy, toy
from tests.rig import speculate

quiet = settings(derandomize=True, deadline=None, database=None, max_examples=40)


def verdict(drafted: list[int], accepted: int, token: int) -> RoundResult:
    return RoundResult([drafted], [accepted], [token], [[0.5] * len(drafted)], [False], [[]])


def one_row(prompt: tuple[int, ...] = (1, 2), room: int = 50) -> State:
    return State([Prompt("a", prompt)], room, torch.device("cpu"))


def committed(result: RoundResult, limits: Limits, context: int = 50):
    state = one_row()
    step = commit(state, result, limits, context, 0, [0])
    return state, step.rows[0]


def test_a_block_is_cut_at_eos_before_it_is_counted():
    state, row = committed(verdict([5, 9, 7, 8], 4, 6), Limits(20, frozenset({9})))
    assert state.generated(0) == [5, 9] and state.finished == ["eos"]
    assert (row.drafted, row.accepted, row.discarded) == ([5, 9], 2, 2)
    counts = Counts()
    counts.add(row)
    summary = counts.summary()
    assert summary["drafted_by_position"] == summary["accepted_by_position"] == [1, 1]
    assert summary["tokens_discarded_after_end"] == 2 and summary["acceptance_rate"] == 1
    assert summary["finish_reasons"] == {"eos": 1}


def test_eos_as_the_correction_ends_the_row_and_counts_every_draft():
    _, row = committed(verdict([5, 6, 7], 1, 9), Limits(20, frozenset({9})))
    assert (row.tokens, row.finish, row.drafted, row.accepted) == ([5, 9], "eos", [5, 6, 7], 1)
    assert [row.origin(i) for i in range(2)] == ["drafted", "corrected"]


def test_a_rejected_eos_does_not_end_the_row():
    _, row = committed(verdict([5, 9], 1, 4), Limits(20, frozenset({9})))
    assert (row.tokens, row.finish) == ([5, 4], None)


def test_origins():
    _, row = committed(verdict([5, 6], 2, 7), Limits(20))
    assert [row.origin(i) for i in range(3)] == ["drafted", "drafted", "bonus"]
    _, row = committed(verdict([], 0, 7), Limits(20))
    assert row.origin(0) == "sampled"


def test_length_and_context_are_told_apart():
    assert committed(verdict([5, 6], 2, 7), Limits(3))[1].finish == "length"
    assert committed(verdict([5, 6], 2, 7), Limits(30), context=5)[1].finish == "context"


def test_a_stop_string_across_blocks_cuts_the_second():
    state = one_row()
    writing = Writing(lambda ids: "".join(chr(96 + i) for i in ids), [(1, 2)], ["cde"])
    limits = Limits(20, frozenset(), writing)
    first = commit(state, verdict([3], 1, 4), limits, 50, 0, [0]).rows[0]
    second = commit(state, verdict([5, 6, 7], 3, 8), limits, 50, 1, [0]).rows[0]
    assert first.finish is None and writing.printable(0, ended=False) == ""
    assert (second.finish, second.tokens, second.drafted, second.discarded) == ("stop", [5], [5], 2)
    assert writing.text(0) == "" and state.generated(0) == [3, 4, 5]


def test_a_stop_string_is_not_sought_in_the_end_token():
    """A token that ends texts is none of the text, whatever a tokenizer writes for it."""
    writing = Writing(lambda ids: "".join(chr(96 + i) for i in ids), [(1, 2)], ["ei", "i"])
    state, row = committed(verdict([3, 5, 9, 7], 4, 6), Limits(20, frozenset({9}), writing))
    assert (row.finish, row.tokens, writing.text(0)) == ("eos", [3, 5, 9], "ce")
    assert state.generated(0) == [3, 5, 9]


@pytest.mark.parametrize(("most", "finishes"), [(20, [None, "stop"]), (2, ["stop"])])
def test_a_stop_string_may_be_complete_only_as_the_row_ends(most: int, finishes: list[str | None]):
    """By the end token, or by the limit: until then its last character may be half of another."""
    state = one_row()
    writing = Writing(lambda ids: "".join("abc\ufffd"[i] for i in ids), [(1, 2)], ["c\ufffd"])
    limits = Limits(most, frozenset({9}), writing)
    blocks = [verdict([2], 1, 3), verdict([], 0, 9)]
    rows = [commit(state, block, limits, 50, 0, [0]).rows for block in blocks]
    assert [row.finish for step in rows for row in step] == finishes
    assert (writing.text(0), state.generated(0)) == ("", [2, 3])


@pytest.mark.parametrize("damaged", ["target", "draft"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_damaged_logits_stop_their_row_only(damaged, rule):
    """Those of a draft, too: the text would stay exact, but nobody would know that drafting is broken."""
    toys = {"target": Toy(5, 0), "draft": Toy(5, 1)}
    forward = toys[damaged].forward

    def broken(input_ids, **rest):
        result = forward(input_ids, **rest)
        if len(input_ids) == 3:
            result.logits[1] = torch.nan
        return result

    toys[damaged].forward = broken
    target, draft = (ModelRunner(CausalModel(toy, name)) for name, toy in toys.items())
    transform, draws = SamplingTransform(SamplingConfig(), (), 5), CounterDraws(0)
    k, drafter = (0, Drafter()) if damaged == "target" else (3, ModelDrafter(draft, transform, draws))
    engine = Engine(target, drafter, transform, RULES[rule], draws)
    state = engine.prefill([Prompt(str(row), (row, 1)) for row in range(3)], 6)
    list(generate(engine, state, Limits(6), FixedDraftLength(k, 3)))
    assert state.finished == ["length", "error", "length"]
    assert [len(state.generated(row)) for row in range(3)] == [6, 0, 6]


def test_a_damaged_draft_is_noticed_where_all_that_it_has_is_forbidden():
    draft, sampling = Toy(2, 1), SamplingConfig(bad_tokens=[0, 1])
    forward = draft.forward

    def broken(input_ids, **rest):
        result = forward(input_ids, **rest)
        result.logits[1] = torch.nan
        return result

    draft.forward = broken
    transform, draws = SamplingTransform(sampling, (), 5), CounterDraws(0)
    drafter = ModelDrafter(ModelRunner(CausalModel(draft, "broken")), transform, draws)
    engine = Engine(ModelRunner(toy(5, 0)), drafter, transform, RULES["block"], draws)
    state = engine.prefill([Prompt(str(row), (row, 1)) for row in range(3)], 6)
    list(generate(engine, state, Limits(6), FixedDraftLength(2, 3)))
    assert state.finished == ["length", "error", "length"]


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # transformers before 5.24, and from then on
def test_the_module_is_given_its_cache_by_the_name_that_it_takes(name):
    target, given = Toy(5, 0), []
    forward = target.forward

    def old(input_ids, past_key_values=None, **rest):
        given.append("past_key_values")
        return forward(input_ids, past_key_values=past_key_values, **rest)

    def new(input_ids, cache=None, past_key_values=None, **rest):
        given.append("cache" if past_key_values is None else "past_key_values")
        return forward(input_ids, past_key_values=cache or past_key_values, **rest)

    target.forward = new if name == "cache" else old
    run = speculate(CausalModel(target, name), [Prompt("a", (1, 2))], None, k=0)
    assert set(given) == {name}
    assert run.texts == speculate(toy(5, 0), [Prompt("a", (1, 2))], None, k=0).texts


@quiet
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=5),
    st.integers(0, 6), st.integers(1, 12), st.booleans(), st.sampled_from(list(RULES)), st.integers(0, 10**6),
)  # fmt: skip
def test_counters_add_up(prompts, k, new, ends, rule, seed):
    """Committed tokens are the texts; nothing follows EOS; no limit is passed; accepted <= drafted."""
    end_ids = frozenset({2}) if ends else frozenset()
    draws, transform = CounterDraws(seed), SamplingTransform(SamplingConfig(), tuple(end_ids), 5)
    target, draft = toy(5, 0, context=14), toy(5, 1, context=10)
    engine = Engine(
        ModelRunner(target, 3),
        ModelDrafter(ModelRunner(draft, 3), transform, draws),
        transform,
        RULES[rule],
        draws,
    )
    state = engine.prefill([Prompt(str(i), tuple(p)) for i, p in enumerate(prompts)], new)
    counts, lookahead = Counts(), FixedDraftLength(k, len(prompts))
    for step in generate(engine, state, Limits(new, end_ids), lookahead):
        for row in step.rows:
            counts.add(row)
            assert row.accepted <= len(row.drafted) <= k
            assert len(row.tokens) <= row.accepted + 1
    summary = counts.summary()
    texts = [state.generated(row) for row in range(state.rows)]
    assert summary["tokens_committed"] == sum(map(len, texts))
    assert sum(summary["finish_reasons"].values()) == len(prompts)
    for prompt, text, reason in zip(prompts, texts, state.finished, strict=True):
        assert 1 <= len(text) <= new and len(prompt) + len(text) <= 14
        assert 2 not in text[:-1] or not ends
        full = "length" if len(text) == new else "context"
        assert reason == ("eos" if ends and text[-1] == 2 else full)


def test_best_k_follows_acceptance_and_cost():
    for acceptance, ratio, k in ((0.0, 0.1, 0), (0.8, 0.1, 6), (0.6, 0.3, 1), (0.99, 0.01, 16)):
        assert Costs.of_ratio(ratio, 16).best(acceptance, acceptance) == (k, 0)


@dataclass
class Seen:
    """A round whose drafts had these overlaps, and stand under the token rule."""

    overlap: list[float]
    row: int = 0
    tree: None = None

    @property
    def standing(self) -> list[tuple[float, float]]:
        before = [1.0, *accumulate(self.overlap, mul)]
        return list(pairwise(before))


def test_adaptive_k_grows_shrinks_and_tries_again():
    lookahead = AdaptiveDraftLength(Costs.of_ratio(0.2, 16), 1)
    [(start, _)] = lookahead.choose()
    for _ in range(30):
        lookahead.observe([Seen([1.0] * 4)])
    [(grown, _)] = lookahead.choose()
    for _ in range(200):
        lookahead.observe([Seen([0.0] * 4)])
    chosen = [lookahead.choose()[0][0] for _ in range(300)]
    tries = [number for number, k in enumerate(chosen) if k]
    assert grown > start > 0
    assert [later - sooner for sooner, later in pairwise(tries)] == [1, 1, 62] * 3 + [1, 1]
    assert tries[0] == 61 and {chosen[number] for number in tries} == {1}
    for _ in range(200):
        lookahead.observe([Seen([1.0] * 4)])
    assert lookahead.choose()[0][0] >= grown


def test_k_goes_by_how_later_drafts_stand_where_the_first_ones_do():
    """Two rows whose first drafts stand alike; behind them one's draft is sure, the other's useless."""
    lookahead = AdaptiveDraftLength(Costs.of_ratio(0.1, 8), 2)
    for _ in range(60):
        sure = Seen([0.5, 1.0, 1.0, 1.0], row=0)
        useless = Seen([0.5, 0.0, 0.0, 0.0], row=1)
        lookahead.observe([sure, useless])
    assert lookahead.choose() == [(8, 0), (1, 0)]
    first, second = lookahead.acceptance
    assert first.first.value == pytest.approx(second.first.value, abs=0.05)
    assert first.later.value > 0.95 and second.later.value < 0.1
    lookahead.restart(0)
    assert lookahead.choose()[0] == AdaptiveDraftLength(Costs.of_ratio(0.1, 8), 1).choose()[0]


def test_a_draft_token_costs_one_draft_forward():
    """Also after wholly accepted blocks, when the draft model lacks two tokens."""
    draws, transform, rows, k = CounterDraws(0), SamplingTransform(SamplingConfig(), (), 5), 3, 4
    drafter = ModelDrafter(ModelRunner(toy(5, 0)), transform, draws)
    engine = Engine(ModelRunner(toy(5, 0)), drafter, transform, RULES["block"], draws)
    state = engine.prefill([Prompt(str(row), (row, 1)) for row in range(rows)], 4 * (k + 1))
    before, target_before = drafter.forwards, engine.target.forwards
    steps = list(generate(engine, state, Limits(4 * (k + 1)), FixedDraftLength(k, rows)))
    assert all(row.accepted == len(row.drafted) == k for step in steps for row in step.rows)
    assert drafter.forwards - before == k * len(steps) == 4 * k
    assert engine.target.forwards - target_before == len(steps)


def emulated(alpha: float, costs: Costs, tokens: int, seed: int) -> float:
    """Time of one text by the clock of `costs`, K adaptive; drafts stand with chance alpha on average."""
    generator, lookahead = random.Random(seed), AdaptiveDraftLength(costs, 1)
    spent, made = 0.0, 0
    while made < tokens:
        [(k, _)] = lookahead.choose()
        overlap = [generator.betavariate(5 * alpha, 5 * (1 - alpha)) for _ in range(k)]
        stood = next((i for i in range(k) if generator.random() >= overlap[i]), k)
        lookahead.observe([Seen(overlap)])
        spent, made = spent + costs.round(k), made + stood + 1
    return spent / made


@pytest.mark.few(4)
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft", [0.05, 0.3])
def test_adaptive_k_is_near_the_best_fixed_k_and_no_slower_than_none(alpha, draft):
    """Emulated, costs known: within 3 % of the best fixed K, and of regular sampling, over 200 tokens."""
    costs = Costs([[1 + (draft + 0.01) * k] for k in range(17)])
    best = min(costs.round(k) / tokens_per_round(alpha, k) for k in range(17))
    adaptive = sum(emulated(alpha, costs, 200, seed) for seed in range(100)) / 100
    assert adaptive <= 1.03 * best
    assert adaptive <= costs.round(0) / 0.97


@pytest.mark.parametrize("alpha", [0.05, 0.95])
def test_a_k_that_learns_nothing_of_the_text_is_farther_from_the_best(alpha):
    """Control of the emulation."""
    costs = Costs([[1 + 0.31 * k] for k in range(17)])
    best = min(costs.round(k) / tokens_per_round(alpha, k) for k in range(17))
    with patch.object(Acceptance, "observe", lambda *_: None):
        assert sum(emulated(alpha, costs, 200, seed) for seed in range(10)) / 10 > 1.06 * best
