"""What ends a row, and what is counted: of made-up rounds, and of runs."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.pair.requests import Reply, requests_of
from llama_ssp.pair.run import RepliesByRow
from llama_ssp.speculative.decision import Decision
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters.local import ModelDrafter, Sampler
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, commit, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.stats import Counts, RowStep
from llama_ssp.speculative.verification import RULES
from llama_ssp.text.detokenizer import Decode, TextSoFar
from tests.proofs.mutants import every
from tests.proofs.toy import Toy, toy
from tests.rig import engine_of, speculate, steps_of


def result_of(drafted: list[int], accepted: int, token: int) -> Decision:
    return Decision(
        drafted=[drafted],
        accepted=[accepted],
        token=[token],
        overlap=[[0.5] * len(drafted)],
        damaged=[False],
        standing=[[]],
    )


def committed(*results: Decision, limits: Limits, context: int = 50) -> tuple[State, list[RowStep]]:
    """A prompt of two tokens, and what it gets of these rounds."""
    state = State([Prompt("a", (1, 2))], 50, torch.device("cpu"))
    steps = [commit(state, result, limits, context, n) for n, result in enumerate(results)]
    return state, [row for step in steps for row in step.rows]


# What is drafted, accepted, and follows; what limits it; what is committed, why it ends, how it is counted.
BLOCKS = {
    "EOS inside": ([5, 9, 7, 8], 4, 6, {}, [5, 9], "eos", (2, 2, 2), ["drafted", "drafted"]),
    "EOS as the correction": ([5, 6, 7], 1, 9, {}, [5, 9], "eos", (3, 1, 0), ["drafted", "corrected"]),
    "a rejected EOS": ([5, 9], 1, 4, {}, [5, 4], None, (2, 1, 0), ["drafted", "corrected"]),
    "all stand": ([5, 6], 2, 7, {}, [5, 6, 7], None, (2, 2, 0), ["drafted", "drafted", "bonus"]),
    "no drafts": ([], 0, 7, {}, [7], None, (0, 0, 0), ["sampled"]),
    "the limit": ([5], 1, 7, {"new": 2}, [5, 7], "length", (1, 1, 0), ["drafted", "bonus"]),
    "the context": ([5], 1, 7, {"context": 4}, [5, 7], "context", (1, 1, 0), ["drafted", "bonus"]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_a_round_commits(name: str):
    drafted, accepted, token, limited, tokens, finish, counted, origins = BLOCKS[name]
    limits = Limits(limited.get("new", 20), frozenset({9}))
    result = result_of(drafted, accepted, token)
    state, [row] = committed(result, limits=limits, context=limited.get("context", 50))
    assert (row.tokens, row.finish) == (tokens, finish) == (state.generated(0), state.finished[0])
    assert (len(row.drafted), row.accepted, row.discarded) == counted
    assert [row.origin(i) for i in range(len(tokens))] == origins


def texts_by_row(decode: Decode, prompts: list[Prompt], stops: list[str]) -> RepliesByRow:
    """What ends rows by their texts."""
    replies = RepliesByRow()
    for request in requests_of(prompts, SamplingConfig(), 20, tuple(stops)):
        text = TextSoFar(decode, request.prompt.token_ids, request.stop)
        replies[request.index] = Reply(request=request, written=text)
    return replies


def writing(stops: list[str], letters: str = "`abcdefghij") -> RepliesByRow:
    return texts_by_row(lambda ids: "".join(letters[i] for i in ids), [Prompt("0", (1, 2))], stops)


def test_a_possible_beginning_of_a_stop_string_is_its_rows_own() -> None:
    prompts = [Prompt("0", ()), Prompt("1", (0,))]
    texts = texts_by_row(lambda ids: "".join("ab"[i] for i in ids), prompts, ["ab"])
    assert texts.kept(0, [0], last=False) is None
    assert texts.kept(1, [1], last=False) is None
    assert [texts[0].text, texts[1].text] == ["a", "b"]


def test_a_stop_string_across_blocks_cuts_the_second():
    first, second = result_of([3], 1, 4), result_of([5, 6, 7], 3, 8)
    text = writing(["cde"])
    _, [row] = committed(first, limits=Limits(20, frozenset(), text))
    assert row.finish is None and text[0].printable(has_ended=False) == ""  # it may have begun
    text = writing(["cde"])
    state, [_, row] = committed(first, second, limits=Limits(20, frozenset(), text))
    assert (row.finish, row.tokens, row.drafted, row.discarded) == ("stop", [5], [5], 2)
    assert text[0].text == "" and state.generated(0) == [3, 4, 5]


def test_a_stop_string_is_not_sought_in_the_end_token():
    """A token that ends texts is none of the text, whatever a tokenizer writes for it."""
    text = writing(["ei", "i"])
    state, [row] = committed(result_of([3, 5, 9, 7], 4, 6), limits=Limits(20, frozenset({9}), text))
    assert (row.finish, row.tokens, text[0].text) == ("eos", [3, 5, 9], "ce")
    assert state.generated(0) == [3, 5, 9]


@pytest.mark.parametrize(("most", "finishes"), [(20, [None, "stop"]), (2, ["stop"])])
def test_a_stop_string_may_be_complete_only_as_the_row_ends(most: int, finishes: list[str | None]):
    """By the end token, or by the limit: until then its last character may be half of another."""
    text = writing(["c\ufffd"], "abc\ufffd")
    blocks = result_of([2], 1, 3), result_of([], 0, 9)
    state, rows = committed(*blocks, limits=Limits(most, frozenset({9}), text))
    assert [row.finish for row in rows] == finishes
    assert (text[0].text, state.generated(0)) == ("", [2, 3])


def broken(model: Toy) -> Toy:
    """The logits of the second of three rows are no numbers."""
    forward = model.forward

    def damaged(input_ids, **rest):
        result = forward(input_ids, **rest)
        if len(input_ids) == 3:
            result.logits[1] = torch.nan
        return result

    model.forward = damaged
    return model


def finished(target: Toy, draft: Toy | None, k: int, **how: Any) -> tuple[list[str | None], list[int]]:
    models = [model and CausalModel(model, "toy") for model in (target, draft)]
    prompts = [Prompt(str(row), (row, 1)) for row in range(3)]
    state, _ = steps_of(engine_of(*models, **how), prompts, 6, k)
    return state.finished, [len(state.generated(row)) for row in range(3)]


@pytest.mark.parametrize("damaged", ["target", "draft"])
@pytest.mark.parametrize("rule", RULES)
def test_damaged_logits_stop_their_row_only(damaged, rule):
    """Those of a draft, too: the text would stay exact, but nobody would know that drafting is broken."""
    target, draft = Toy(5, 0), broken(Toy(5, 1))
    given = (broken(target), None, 0) if damaged == "target" else (target, draft, 3)
    assert finished(*given, rule=rule) == (["length", "error", "length"], [6, 0, 6])


def test_a_damaged_draft_is_noticed_where_all_that_it_has_is_forbidden():
    reasons, _ = finished(Toy(5, 0), broken(Toy(2, 1)), 2, sampling=SamplingConfig(bad_tokens=[0, 1]))
    assert reasons == ["length", "error", "length"]


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


def test_a_draft_token_costs_one_draft_forward():
    """Also after wholly accepted blocks, when the draft model lacks two tokens."""
    rows, k, new = 3, 4, 20
    engine = engine_of(toy(5, 0), toy(5, 0))
    state = engine.prefill([Prompt(str(row), (row, 1)) for row in range(rows)], new)
    before, target_before = engine.draft_forwards, engine.target_forwards
    steps = list(generate(engine, state, Limits(new), FixedDraftLength(k, rows)))
    assert all(row.accepted == len(row.drafted) == k for step in steps for row in step.rows)
    assert engine.draft_forwards - before == k * len(steps) == 4 * k
    assert engine.target_forwards - target_before == len(steps)


EOS = 9
quiet = settings(derandomize=True, deadline=None, database=None, max_examples=40)

# Drafted, how many were accepted, and the token behind them.
TRACE = [
    ([1, 2, 3, 4], 4, 5),  # wholly accepted, with a bonus
    ([1, 2, 3, 4], 1, 6),  # corrected at position 1
    ([], 0, 7),  # nothing drafted
    ([1, EOS, 3, 4], 3, 8),  # EOS inside: of 4 accepted or corrected tokens 2 stand
]


def traced(rounds: list[tuple[list[int], int, int]]) -> Any:
    """One row after these rounds, and its counters' summary."""
    state, counts = State([Prompt("a", (1, 1))], 50, torch.device("cpu")), Counts()
    for number, (drafted, accepted, token) in enumerate(rounds):
        result = result_of(drafted, accepted, token)
        counts.add(commit(state, result, Limits(40, frozenset({EOS})), 50, number).rows[0])
    return state, counts.summary()


def test_every_counter_of_a_trace_with_eos_inside_a_block() -> None:
    state, summary = traced(TRACE)
    assert state.generated(0) == [1, 2, 3, 4, 5, 1, 6, 7, 1, EOS] and state.finished == ["eos"]
    assert summary == {
        "row_rounds": 4,
        "tokens_drafted": 10,  # 4 + 4 + 0 + 2
        "tokens_accepted": 7,  # 4 + 1 + 0 + 2
        "tokens_committed": 10,
        "tokens_committed_by_origin": {"bonus": 1, "corrected": 1, "drafted": 7, "sampled": 1},
        "tokens_discarded_after_end": 2,  # drafts 3 and 4 of the last block
        "tokens_cut_after_end": 2,  # the accepted 3 and the correction 8
        "blocks_by_accepted": [0, 1, 1, 0, 1],
        "drafted_by_position": [3, 3, 2, 2],
        "accepted_by_position": [3, 2, 1, 1],
        "acceptance_by_position": [1, 2 / 3, 1 / 2, 1 / 2],
        "acceptance_rate": 7 / 10,
        "acceptance_rate_decided": 7 / 8,
        "acceptance_expected": 0.5,
        "accepted_over_expected": 7 / 4,
        "tokens_per_target_forward": 10 / 4,
        "finish_reasons": {"eos": 1},
    }
    _, summary = traced([([1, EOS], 2, 7)])  # the bonus is cut, though no draft is
    assert (summary["tokens_cut_after_end"], summary["tokens_discarded_after_end"]) == (1, 0)
    assert "bonus" not in summary["tokens_committed_by_origin"]


class Submissions(Engine):
    """Counts on its own what was drafted, and what verification gave back."""

    submitted = verified = 0

    def verify(self, state: State, proposal: Proposal) -> Decision:
        verdict = super().verify(state, proposal)
        live = [row for row, finish in enumerate(state.finished) if finish is None]
        self.submitted += sum(len(verdict.drafted[row]) for row in live)
        self.verified += sum(len(verdict.tokens(row)) for row in live)
        return verdict


PLAYED = (
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=5),
    st.integers(0, 6), st.integers(1, 12), st.sampled_from(["", "eos", "stop", "both"]),
    st.sampled_from(list(RULES)), st.integers(0, 10**6),
)  # fmt: skip


@dataclass(frozen=True)
class Played:
    """A whole run."""

    engine: Submissions
    state: State
    steps: list[Any]
    end_ids: frozenset[int]
    stops: list[str]


def played(prompts: list[list[int]], k: int, new: int, ends: str, rule: str, seed: int) -> Played:
    end_ids = frozenset({2}) if ends in ("eos", "both") else frozenset[int]()
    stops = ["bd", "dde"] if ends in ("stop", "both") else []
    sampler = Sampler(SamplingTransform(SamplingConfig(), tuple(end_ids), 5), CounterDraws(seed))
    target, draft = toy(5, 0, context=14), toy(5, 1, context=10)
    drafter = ModelDrafter(ModelRunner(draft, 3), sampler)
    engine = Submissions(ModelRunner(target, 3), drafter, sampler, RULES[rule])
    rows = [Prompt(str(i), tuple(p)) for i, p in enumerate(prompts)]
    state = engine.prefill(rows, new)
    writing = texts_by_row(lambda ids: "".join("abcde"[i] for i in ids), rows, stops)
    steps = list(generate(engine, state, Limits(new, end_ids, writing), FixedDraftLength(k, len(rows))))
    return Played(engine=engine, state=state, steps=steps, end_ids=end_ids, stops=stops)


@quiet
@given(*PLAYED)
def test_no_limit_is_passed(
    prompts: list[list[int]], k: int, new: int, ends: str, rule: str, seed: int
) -> None:
    """Nothing follows an end."""
    run = played(prompts, k, new, ends, rule, seed)
    for row in [row for step in run.steps for row in step.rows]:
        assert row.accepted <= len(row.drafted) <= k and len(row.tokens) <= row.accepted + 1
    for row, (prompt, reason) in enumerate(zip(prompts, run.state.finished, strict=True)):
        text = run.state.generated(row)
        assert len(text) <= new and len(prompt) + len(text) <= 14 and not run.end_ids & {*text[:-1]}
        full = "length" if len(text) == new else "context"
        at_end = "eos" if run.end_ids & {*text[-1:]} else full
        assert reason == at_end or (run.stops and reason == "stop")


@quiet
@given(*PLAYED)
def test_counts_add_up_exactly(
    prompts: list[list[int]], k: int, new: int, ends: str, rule: str, seed: int
) -> None:
    """Committed is final lengths less prompt lengths; nothing that was drafted or verified is lost."""
    run, counts = played(prompts, k, new, ends, rule, seed), Counts()
    for row in [row for step in run.steps for row in step.rows]:
        counts.add(row)

    summary = counts.summary()
    committed = summary["tokens_committed"]
    assert sum(summary["finish_reasons"].values()) == len(prompts)
    assert committed == sum(run.state.lengths) - sum(run.state.prompt_lengths)
    assert committed + summary["tokens_cut_after_end"] == run.engine.verified
    assert summary["tokens_drafted"] + summary["tokens_discarded_after_end"] == run.engine.submitted

    by_origin = summary["tokens_committed_by_origin"]
    assert sum(by_origin.values()) == committed
    assert by_origin.get("drafted", 0) == summary["tokens_accepted"]
    for name in ("drafted", "accepted"):
        assert sum(summary[f"{name}_by_position"]) == summary[f"tokens_{name}"], name
    blocks = summary["blocks_by_accepted"]
    assert sum(accepted * count for accepted, count in enumerate(blocks)) == summary["tokens_accepted"]
    assert sum(blocks) + by_origin.get("sampled", 0) == summary["row_rounds"]


VOCAB, NEW, K = 8, 150, 4


def counts_of(rule: str, rows: int) -> Counts:
    target, draft = (toy(VOCAB, seed, context=NEW + 8, sharpness=0.8) for seed in (0, 1))
    engine = engine_of(target, draft, rule, sampling=SamplingConfig(temperature=2.0), draws=11)
    counts, prompts = Counts(), [Prompt(str(row), (row % VOCAB, 1)) for row in range(rows)]
    for step in steps_of(engine, prompts, NEW, K)[1]:
        for row in step.rows:
            counts.add(row)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "band"), [(110, 0.015), pytest.param(725, 0.005, marks=pytest.mark.long)])
def test_accepted_over_expected_is_one(rows: int, band: float) -> None:
    """Of the token rule; a lenient one shows, and the block rule accepts more."""
    counts, block = counts_of("token", rows), counts_of("block", 110).summary()
    found = counts.summary()
    assert counts.decided >= 138 * rows and abs(found["accepted_over_expected"] - 1) < band
    assert block["acceptance_rate"] > found["acceptance_rate"]
    with every()["lenience of 5 %"].planted():
        assert counts_of("token", 110).summary()["accepted_over_expected"] > 1.015
