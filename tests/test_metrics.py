"""The counters, on made-up traces and on runs; under the token rule accepted over expected is 1."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative.decision import Decision
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters.local import ModelDrafter, Sampler
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, commit, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.speculative.verification import RULES
from llama_ssp.text.detokenizer import Writing
from tests.proofs.mutants import every
from tests.proofs.toy import toy
from tests.rig import engine_of, steps_of

EOS = 9
quiet = settings(derandomize=True, deadline=None, database=None, max_examples=40)

# Drafted, how many were accepted, and the token behind them.
TRACE = [
    ([1, 2, 3, 4], 4, 5),  # wholly accepted, with a bonus
    ([1, 2, 3, 4], 1, 6),  # corrected at position 1
    ([], 0, 7),  # nothing drafted
    ([1, EOS, 3, 4], 3, 8),  # EOS inside: of 4 accepted or corrected tokens 2 stand
]


def committed(rounds: list[tuple[list[int], int, int]]) -> Any:
    """One row after these rounds, and its counters' summary."""
    state, counts = State([Prompt("a", (1, 1))], 50, torch.device("cpu")), Counts()
    for number, (drafted, accepted, token) in enumerate(rounds):
        result = Decision([drafted], [accepted], [token], [[0.5] * len(drafted)], [False], [[]])
        counts.add(commit(state, result, Limits(40, frozenset({EOS})), 50, number).rows[0])
    return state, counts.summary()


def test_every_counter_of_a_trace_with_eos_inside_a_block() -> None:
    state, summary = committed(TRACE)
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
    _, summary = committed([([1, EOS], 2, 7)])  # the bonus is cut, though no draft is
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


@quiet
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=5),
    st.integers(0, 6), st.integers(1, 12), st.sampled_from(["", "eos", "stop", "both"]),
    st.sampled_from(list(RULES)), st.integers(0, 10**6),
)  # fmt: skip
def test_counts_add_up_exactly(
    prompts: list[list[int]], k: int, new: int, ends: str, rule: str, seed: int
) -> None:
    """Committed is final lengths less prompt lengths; nothing that was drafted or verified is lost.

    Nothing follows an end, and no limit is passed.
    """
    end_ids = frozenset({2}) if ends in ("eos", "both") else frozenset[int]()
    stops = ["bd", "dde"] if ends in ("stop", "both") else []
    sampler = Sampler(SamplingTransform(SamplingConfig(), tuple(end_ids), 5), CounterDraws(seed))
    target, draft = toy(5, 0, context=14), toy(5, 1, context=10)
    drafter = ModelDrafter(ModelRunner(draft, 3), sampler)
    engine = Submissions(ModelRunner(target, 3), drafter, sampler, RULES[rule])
    rows = [Prompt(str(i), tuple(p)) for i, p in enumerate(prompts)]
    state, counts = engine.prefill(rows, new), Counts()
    writing = Writing(lambda ids: "".join("abcde"[i] for i in ids), [p.token_ids for p in rows], stops)
    for step in generate(engine, state, Limits(new, end_ids, writing), FixedDraftLength(k, len(rows))):
        for row in step.rows:
            counts.add(row)
            assert row.accepted <= len(row.drafted) <= k and len(row.tokens) <= row.accepted + 1
    for row, (prompt, reason) in enumerate(zip(prompts, state.finished, strict=True)):
        text = state.generated(row)
        assert len(text) <= new and len(prompt) + len(text) <= 14 and not end_ids & {*text[:-1]}
        full = "length" if len(text) == new else "context"
        assert reason == ("eos" if end_ids & {*text[-1:]} else full) or (stops and reason == "stop")
    found = counts.summary()
    assert sum(found["finish_reasons"].values()) == len(prompts)
    assert found["tokens_committed"] == sum(state.lengths) - sum(state.prompt_lengths)
    assert found["tokens_committed"] + found["tokens_cut_after_end"] == engine.verified
    assert found["tokens_drafted"] + found["tokens_discarded_after_end"] == engine.submitted
    by_origin = found["tokens_committed_by_origin"]
    assert sum(by_origin.values()) == found["tokens_committed"]
    assert by_origin.get("drafted", 0) == found["tokens_accepted"]
    for name in ("drafted", "accepted"):
        assert sum(found[f"{name}_by_position"]) == found[f"tokens_{name}"]
    blocks = found["blocks_by_accepted"]
    assert sum(accepted * count for accepted, count in enumerate(blocks)) == found["tokens_accepted"]
    assert sum(blocks) + by_origin.get("sampled", 0) == found["row_rounds"]


VOCAB, NEW, K = 8, 150, 4


def run(rule: str, rows: int) -> Counts:
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
    counts, block = run("token", rows), run("block", 110).summary()
    found = counts.summary()
    assert counts.decided >= 138 * rows and abs(found["accepted_over_expected"] - 1) < band
    assert block["acceptance_rate"] > found["acceptance_rate"]
    with every()["lenience of 5 %"].planted():
        assert run("token", 110).summary()["accepted_over_expected"] > 1.015
