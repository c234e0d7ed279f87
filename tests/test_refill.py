"""Rows that are refilled as their texts end: every text is the one its prompt gets alone."""

from __future__ import annotations

import pytest
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from tests.families import build, decoder_of, ragged_prompts
from tests.rig import GREEDY, Queue, drive_refilled, engine_of, perturbed, speculate

SAMPLED = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
LENGTHS = (9, 4, 1, 6, 2, 13, 1, 5, 3, 7)
PROMPTS = ragged_prompts(*LENGTHS)


@pytest.fixture(scope="module")
def models() -> tuple[CausalModel, CausalModel]:
    target, draft = build("llama-gqa"), perturbed(build("llama-gqa"), 0.05)
    return CausalModel(target, "target"), CausalModel(draft, "draft")


@pytest.mark.few(2)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("drafting", "k", "adaptive"),
    [("none", 0, False), ("model", 4, False), ("model", 6, True), ("ngram", 4, False)],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_text_does_not_know_whose_row_it_took(rows, drafting, k, adaptive, sampling, models):
    target, draft = models
    chosen = {"none": None, "model": draft, "ngram": "ngram"}[drafting]
    how = {"k": k, "adaptive": adaptive, "max_new": 20}
    free = speculate(target, PROMPTS[:2], chosen, sampling=sampling, **how)
    ends = frozenset({free.texts[0][5], free.texts[1][9]})
    alone = {
        prompt.id: speculate(target, [prompt], chosen, sampling=sampling, ends=ends, **how).texts[0]
        for prompt in PROMPTS
    }
    engine = engine_of(target, chosen, sampling=sampling, ends=ends)
    found = drive_refilled(engine, PROMPTS, rows, longest=max(LENGTHS) + 20, ends=ends, **how)
    assert found == alone
    assert len({len(text) for text in found.values()}) > 1  # rows ended at different times


def test_nothing_of_a_damaged_text_stays_in_its_row(models):
    """0 times NaN is NaN: what a mask hides must be numbers."""
    target, _ = models
    token_BS = torch.arange(3, 33).view(2, 15)
    runner, fresh = ModelRunner(target), ModelRunner(target)
    for one in (runner, fresh):
        one.start(2, 14)
        one.prefill(token_BS, [12, 12])
    with torch.inference_mode():
        for keys, values in runner._cache._layers.values():
            keys[0], values[0] = torch.nan, torch.inf
    for one in (runner, fresh):
        one.refill(token_BS, {0: 4}, {})
    found, wanted = (one.logits(token_BS, [5, 13], [1, 1]) for one in (runner, fresh))
    assert torch.equal(found, wanted) and found.isfinite().all()


def test_a_rows_lookahead_begins_with_its_text(models):
    """Rounds of the text before it say nothing of it."""
    target, _ = models
    long = Prompt("long", tuple(range(3, 43)))
    engine = engine_of(target, sampling=GREEDY)
    told: list[tuple[int, int | None]] = []

    class Noted(FixedDraftLength):
        def restart(self, row):
            told.append((row, len(state.texts[row]) if state.finished[row] is None else None))

    queue = Queue([long])
    state = engine.prefill(PROMPTS[:2], 12, 60)
    limits = Limits(12, by_row={0: 2})
    list(generate(engine, state, limits, Noted(0, 2), queue))
    assert told == [(0, 40)]


@pytest.mark.parametrize(("name", "passes"), [("decoder", 2), ("transformers", 3)])
def test_rows_that_end_together_are_read_together(name, passes, models):
    """A pass a chunk for all of them; of a model that pads, a pass a row and chunk. Drafts are, too."""
    module = models[0].module
    target = models[0] if name == "transformers" else DecoderModel(decoder_of(module), module.config, name)
    engine = engine_of(target, target, sampling=GREEDY, chunk=10)
    state = engine.prefill(ragged_prompts(3, 5, 2), 1, 40)
    list(generate(engine, state, Limits(1), FixedDraftLength(0, 3)))
    before = engine.target_forwards
    engine.admit(state, {0: Prompt("x", (7, 8, 9)), 2: Prompt("y", tuple(range(3, 20)))})
    assert engine.target_forwards - before == engine.draft_forwards - 1 == passes
    list(generate(engine, state, Limits(6), FixedDraftLength(2, 3)))
    for row, prompt in ((0, state.prompts[0]), (2, state.prompts[2])):
        alone = speculate(target, [prompt], None, k=0, max_new=6).texts[0]
        assert state.generated(row) == alone


def test_a_long_prompt_is_read_in_chunks(models):
    target, _ = models
    long = Prompt("long", tuple(range(3, 43)))
    fed: list[int] = []

    class Watched(CausalModel):
        def logits(self, token_BW, feed, cache, last_only):
            if feed.width > 1:
                fed.append(feed.width)
            return super().logits(token_BW, feed, cache, last_only)

    watched = Watched(target.module, "target")
    engine = engine_of(watched, sampling=GREEDY, chunk=10)
    short = [Prompt("a", (5,)), Prompt("b", (6, 7))]
    texts = drive_refilled(engine, [*short, long], 2, k=0, longest=80, max_new=8)
    assert fed == [10, 10, 10, 9]
    assert texts["long"] == speculate(target, [long], None, k=0, max_new=8).texts[0]
