"""A text is its prompt's alone: whatever batch it runs in, whatever row it takes (fp32; up to ties)."""

from functools import cache
from typing import Any

import pytest
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.interface import Model
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, FixedDraftLength
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from tests.families import VOCAB, build, decoder_of, ragged_prompts, runnable
from tests.proofs.toy import toy
from tests.rig import GREEDY, Queue, Run, drive_refilled, engine_of, perturbed, speculate, steps_of

NEW = 24
END = 7
CONTROLS = {
    "plain": SamplingConfig(),
    "filtered": SamplingConfig(top_k=40, top_p=0.95, min_p=0.01),
    "penalised": SamplingConfig(
        temperature=0.9, top_p=0.98, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2,
        logit_bias={9: 2.0}, bad_tokens=[11], min_new_tokens=4,
    ),
}  # fmt: skip
# Each prompt stands alone and beside others, in other places, in batches of 3 and 8.
BATCHES = ((0, 1, 2), (4, 0, 7), (2, 6, 5), (6, 3, 7, 1, 0, 5, 2, 4))


@cache
def model(family: str, drafts: bool) -> Model:
    module = build(family)
    return runnable(perturbed(module, 0.02) if drafts else module, family)


def prompts() -> list[Prompt]:
    """Ragged, and repetitive enough for lookup to find something."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for number, length in enumerate((4, 19, 9, 1, 26, 12, 7, 15)):
        ids = torch.randint(12, VOCAB, (length,), generator=generator).tolist()
        made.append(Prompt(f"p{number}", tuple(ids + ids[: length // 2])))
    return made


def write(family: str, drafter: str, batch: list[Prompt], **how: Any) -> Run:
    draft = {"model": lambda: model(family, True), "ngram": lambda: "ngram", "none": lambda: None}[drafter]()
    k = 8 if how.get("adaptive") else 4
    return speculate(
        model(family, False), batch, draft, k=k, max_new=NEW, ends=frozenset({END}), chunk=8,
        **{"sampling": CONTROLS["plain"], "seed": 5, **how},
    )  # fmt: skip


# Of family, drafter, rule, controls, and K, fixed or adaptive: any two choices meet.
MEETINGS = [
    "llama-gqa model block penalised adaptive", "llama-gqa model token filtered fixed",
    "llama-gqa ngram block plain adaptive", "llama-gqa none token penalised fixed",
    "mistral-window model block penalised fixed", "mistral-window ngram token plain adaptive",
    "mistral-window ngram block filtered fixed", "gpt_neo model token plain fixed",
    "gpt_neo ngram block penalised adaptive", "gpt_neo model token filtered adaptive",
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("meeting", MEETINGS)
def test_no_text_depends_on_its_batch(meeting: str) -> None:
    family, drafter, rule, controls, drafts = meeting.split()
    adaptive = drafts == "adaptive"
    everyone, how = prompts(), {"rule": rule, "sampling": CONTROLS[controls], "adaptive": adaptive}
    alone = [write(family, drafter, [prompt], **how) for prompt in everyone]
    texts = [run.texts[0] for run in alone]
    assert len({tuple(text) for text in texts}) == len(texts)
    if drafter == "model":
        assert 0 < sum(run.accepted for run in alone) < sum(run.drafted for run in alone)
    elif drafter == "ngram":
        assert sum(run.drafted for run in alone) > 0
    assert not adaptive or len({k for run in alone for k in run.longest}) > 1
    for places in BATCHES:
        run = write(family, drafter, [everyone[i] for i in places], **how)
        assert run.texts == [texts[i] for i in places]
        assert run.finish == [alone[i].finish[0] for i in places]


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_id_and_seed_name_the_text(drafter: str) -> None:
    """The id alone, and the seed alone, make another text; both again make the same."""
    ids = prompts()[0].token_ids
    batch = [Prompt(name, ids) for name in ("a", "b", "c")]
    first, again = write("llama-gqa", drafter, batch), write("llama-gqa", drafter, batch[::-1])
    other = write("llama-gqa", drafter, batch, seed=6)
    assert again.texts == first.texts[::-1]
    assert len({tuple(text) for text in first.texts + other.texts}) == 6
    assert write("llama-gqa", drafter, [batch[0], batch[0]]).texts == [first.texts[0]] * 2


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
    ids=["none", "model", "adaptive", "ngram"],
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
        for keys_RGCD, values_RGCD in runner._cache.layers:
            keys_RGCD[0] = torch.nan
            values_RGCD[0] = torch.inf
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


def test_a_refilled_row_drafts_as_many_tokens_as_its_text_alone() -> None:
    """K goes by what this text's drafts did, and by nothing of the text before it in the row."""
    first, second = Prompt("first", (1, 2)), Prompt("second", (3, 1, 4))

    def drafted(prompts: list[Prompt]) -> list[int]:
        engine = engine_of(toy(5, 0), toy(5, 1), draws=3)
        lookahead = AdaptiveDraftLength(Costs.of_ratio(0.1, 6), 1)
        _, steps = steps_of(engine, prompts[:1], NEW, lookahead, queue=Queue(prompts[1:]), longest=40)
        return [len(row.drafted) for step in steps for row in step.rows]

    before, alone = drafted([first]), drafted([second])
    assert drafted([first, second]) == before + alone
    assert len(set(before)) > 2, "the first text changed its K"


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
        def logits(self, token_BW, pass_, cache):
            if pass_.width > 1:
                fed.append(pass_.width)
            return super().logits(token_BW, pass_, cache)

    watched = Watched(target.module, "target")
    engine = engine_of(watched, sampling=GREEDY, chunk=10)
    short = [Prompt("a", (5,)), Prompt("b", (6, 7))]
    texts = drive_refilled(engine, [*short, long], 2, k=0, longest=80, max_new=8)
    assert fed == [10, 10, 10, 9]
    assert texts["long"] == speculate(target, [long], None, k=0, max_new=8).texts[0]
