"""Drafters of another vocabulary: the distributions they declare, the caches they keep, what they leave
alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters.cross_vocab import IntersectionDrafter
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.text.translation import NONE
from tests.proofs.choices import ReplayDraws
from tests.proofs.toy import toy
from tests.rig import drive_refilled, engine_of, steps_of
from tests.tongues import PAIRS, bridge

PROMPTS = [Prompt(str(n), ids) for n, ids in enumerate([(0, 1, 1, 0), (1,), (0, 0, 1), (1, 0, 1, 1, 0)])]


def made(name: str, draft: Any, draws: Any, controls: SamplingConfig | None = None) -> Any:
    target = PAIRS[name][0]
    transform = SamplingTransform(controls or SamplingConfig(), tuple(target.ends), target.size)
    return IntersectionDrafter(ModelRunner(draft, 512), transform, draws, bridge(name)), transform


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "nothing shared"])
def test_the_shared_law_is_the_draft_s_own(name: str, temperature: float) -> None:
    """Against plain sums over the draft's whole distribution: a token has the chances of all its
    namesakes."""
    target, draft = PAIRS[name]
    model = toy(draft.size, 1)
    drafter, _ = made(name, model, ReplayDraws([]), SamplingConfig(temperature=temperature))
    how = bridge(name)
    state = State([PROMPTS[0]], 16, torch.device("cpu"))
    drafter.start(1, 16)
    drafter.prefill(state)
    declared = drafter.propose(state, (1,)).draft_BKV[0, 0]
    ids = torch.tensor([how.prompt_ids(PROMPTS[0].token_ids)])
    whole = model.module(input_ids=ids, use_cache=False).logits[0, -1].softmax(-1).tolist()
    sums = [
        sum(p for p, t in zip(whole, how.match.target_of, strict=True) if t == i) for i in range(target.size)
    ]
    if temperature:
        expected = [share / sum(sums) for share in sums]
    else:
        expected = [float(share == max(sums)) for share in sums]
    assert declared.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["overlapping", "target within draft", "disjoint but for bytes"])
def test_what_it_kept_is_what_it_would_compute_anew(name: str) -> None:
    """Round by round, rows of different lengths: with the cache that was kept, and with none."""
    target, draft = PAIRS[name]
    small = toy(draft.size, 1)
    engine = engine_of(toy(target.size, 0), small, bridge=bridge(name), draws=3)
    state = engine.prefill(PROMPTS[:3], 12)
    compared, proposed = 0, engine.drafter.propose

    def both(state: State, count: tuple[int, ...]) -> Any:
        nonlocal compared
        fresh, _ = made(name, small, CounterDraws(3))
        fresh.start(state.rows, state.capacity)
        anew, kept = fresh.propose(state, count), proposed(state, count)
        assert anew.count == kept.count
        for row, n in enumerate(kept.count):
            assert anew.drafted_BK[row, :n].tolist() == kept.drafted_BK[row, :n].tolist()
            if n:
                torch.testing.assert_close(anew.draft_BKV[row, :n], kept.draft_BKV[row, :n])
            compared += n
        return kept

    engine.drafter.propose = both
    for _ in generate(engine, state, Limits(12), FixedDraftLength(3, 3)):
        pass
    assert compared > 20


@pytest.mark.parametrize("adaptive", [False, True])
def test_rows_are_refilled(adaptive: bool) -> None:
    """What a prompt gets is what it gets alone, in whichever row, beside whom, whatever was there before."""
    target, draft = PAIRS["target within draft"]

    def texts(prompts: list[Prompt], rows: int, longest: int) -> dict[str, list[int]]:
        engine = engine_of(
            toy(target.size, 0), toy(draft.size, 1), bridge=bridge("target within draft"), draws=5, chunk=2
        )
        return drive_refilled(engine, prompts, rows, k=3, longest=longest, max_new=24, adaptive=adaptive)

    together = texts(PROMPTS, 2, 40)
    assert together == {p.id: texts([p], 1, 0)[p.id] for p in PROMPTS}
    assert len({tuple(ids) for ids in together.values()}) > 1


def test_prompts_too_long_for_the_draft_are_continued_without_it() -> None:
    target, draft = PAIRS["overlapping"]
    small = toy(draft.size, 1, context=2)
    engine = engine_of(toy(target.size, 0), small, bridge=bridge("overlapping"), draws=5)
    state, steps = steps_of(engine, [PROMPTS[3], PROMPTS[1]], 6, 2)
    drafted = [0, 0]
    for row in (row for step in steps for row in step.rows):
        drafted[row.row] += len(row.drafted)
    assert drafted[0] == 0 < drafted[1]
    assert [len(state.generated(row)) for row in (0, 1)] == [6, 6]


def test_the_draft_model_is_not_changed() -> None:
    target, draft = PAIRS["overlapping"]
    small = toy(draft.size, 1)
    before = {key: tensor.clone() for key, tensor in small.module.state_dict().items()}
    steps_of(engine_of(toy(target.size, 0), small, bridge=bridge("overlapping"), draws=5), PROMPTS, 6, 2)
    after = small.module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_logits_that_are_no_numbers_are_noticed() -> None:
    target, draft = PAIRS["overlapping"]
    small = toy(draft.size, 1)
    with torch.no_grad():
        small.module.head.weight[0] = torch.nan
    engine = engine_of(toy(target.size, 0), small, bridge=bridge("overlapping"), draws=5)
    state, _ = steps_of(engine, PROMPTS[:1], 6, 2)
    assert state.finished == ["error"]


def test_padding_of_the_draft_is_never_its_text() -> None:
    """Rows beyond the draft's tokens win every argmax, and are no tokens."""
    _, draft = PAIRS["overlapping"]
    small = toy(draft.size + 2, 1)
    with torch.no_grad():
        small.module.head.weight[draft.size :] *= 100
    drafter, _ = made("overlapping", small, CounterDraws(0))
    state = State(PROMPTS[:1], 12, torch.device("cpu"))
    drafter.start(1, 12)
    proposal = drafter.propose(state, (3,))
    assert proposal.count == (3,) and not bool(proposal.draft_BKV.isnan().any())


def test_shared_tokens_beyond_the_law_are_left_out() -> None:
    """A tokenizer may have more tokens than the target's model has rows."""
    name = "target within draft"
    drafter, transform = made(name, toy(PAIRS[name][1].size, 1), CounterDraws(0))
    narrow = replace(drafter._bridge)
    small = SamplingTransform(SamplingConfig(), (), 1)
    cut = IntersectionDrafter(ModelRunner(toy(4, 1), 512), small, CounterDraws(0), narrow)
    assert cut._to_S.tolist() == [0] and transform.vocab == 2
    assert sum(t != NONE for t in narrow.match.target_of) == 2
