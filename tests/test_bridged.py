"""Drafters of another vocabulary: what they declare, the caches they keep, what they leave alone."""

from typing import Any

import pytest
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.state import Prompt, State
from tests.proofs.choices import ReplayDraws
from tests.proofs.toy import toy
from tests.rig import drive_refilled, engine_of, steps_of
from tests.tongues import PAIRS, bridge

PROMPTS = [Prompt(str(n), ids) for n, ids in enumerate([(0, 1, 1, 0), (1,), (0, 0, 1), (1, 0, 1, 1, 0)])]


def bridged(name: str, small: Any = None, **how: Any) -> Engine:
    target, draft = PAIRS[name]
    given = {"draws": 5, "ends": target.ends, "bridge": bridge(name), **how}
    return engine_of(toy(target.size, 0), small or toy(draft.size, 1), **given)


def proposed(engine: Engine, prompt: Prompt, count: int) -> Any:
    state = State([prompt], 16, torch.device("cpu"))
    engine.drafter.start(1, 16)
    engine.drafter.prefill(state)
    return engine.drafter.propose(state, (count,))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "nothing shared"])
def test_a_shared_token_has_the_probabilities_of_all_its_namesakes(name: str, temperature: float) -> None:
    """Against plain sums over the draft's whole distribution."""
    target, draft = PAIRS[name]
    model, how, prompt = toy(draft.size, 1), bridge(name), PROMPTS[0]
    sampling = SamplingConfig(temperature=temperature)
    engine = bridged(name, model, draws=ReplayDraws([]), sampling=sampling)
    ids = torch.tensor([how.prompt_ids(prompt.token_ids)])
    probs = model.module(input_ids=ids, use_cache=False).logits[0, -1].softmax(-1).tolist()
    pairs = list(zip(probs, how.match.target_of, strict=True))
    sums = [sum(prob for prob, token in pairs if token == i) for i in range(target.size)]
    expected = [share / sum(sums) if temperature else float(share == max(sums)) for share in sums]
    assert proposed(engine, prompt, 1).draft_BKV[0, 0].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["overlapping", "target within draft", "disjoint but for bytes"])
def test_what_it_kept_is_what_it_would_compute_anew(name: str) -> None:
    """Round by round, rows of different lengths: with the cache that was kept, and with none."""
    engine, compared = bridged(name, draws=3), 0
    propose = engine.drafter.propose

    def both(state: State, count: tuple[int, ...]) -> Any:
        nonlocal compared
        fresh = bridged(name, draws=3).drafter
        fresh.start(state.rows, state.capacity)
        anew, kept = fresh.propose(state, count), propose(state, count)
        assert anew.count == kept.count
        for row, n in enumerate(kept.count):
            assert anew.drafted_BK[row, :n].tolist() == kept.drafted_BK[row, :n].tolist()
            if n:
                torch.testing.assert_close(anew.draft_BKV[row, :n], kept.draft_BKV[row, :n])
            compared += n
        return kept

    engine.drafter.propose = both  # type: ignore[method-assign]
    steps_of(engine, PROMPTS[:3], 12, 3)
    assert compared > 20


@pytest.mark.parametrize("adaptive", [False, True])
def test_rows_are_refilled(adaptive: bool) -> None:
    """What a prompt gets is what it gets alone, in whichever row, beside whom, whatever was there before."""

    def texts(prompts: list[Prompt], rows: int, longest: int) -> dict[str, list[int]]:
        engine = bridged("target within draft", chunk=2)
        return drive_refilled(engine, prompts, rows, k=3, longest=longest, max_new=24, adaptive=adaptive)

    together = texts(PROMPTS, 2, 40)
    assert together == {prompt.id: texts([prompt], 1, 0)[prompt.id] for prompt in PROMPTS}
    assert len({tuple(ids) for ids in together.values()}) > 1


def test_prompts_too_long_for_the_draft_are_continued_without_it() -> None:
    engine = bridged("overlapping", toy(PAIRS["overlapping"][1].size, 1, context=2))
    state, steps = steps_of(engine, [PROMPTS[3], PROMPTS[1]], 6, 2)
    drafted = [sum(len(row.drafted) for step in steps for row in step.rows if row.row == n) for n in (0, 1)]
    assert drafted[0] == 0 < drafted[1]
    assert [len(state.generated(row)) for row in (0, 1)] == [6, 6]


def test_the_draft_model_is_not_changed() -> None:
    small = toy(PAIRS["overlapping"][1].size, 1)
    before = {key: tensor.clone() for key, tensor in small.module.state_dict().items()}
    steps_of(bridged("overlapping", small), PROMPTS, 6, 2)
    after = small.module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def padded() -> Any:
    """A draft of whose output matrix two rows beyond its tokens win every argmax, and are no tokens."""
    size = PAIRS["overlapping"][1].size
    small = toy(size + 2, 1)
    small.module.head.weight[size:] *= 100
    return small


@torch.no_grad()
def test_damaged_logits_are_noticed() -> None:
    small = padded()
    small.module.head.weight[0] = torch.nan
    state, _ = steps_of(bridged("overlapping", small), PROMPTS[:1], 6, 2)
    assert state.finished == ["error"]


@torch.no_grad()
def test_padding_is_no_text() -> None:
    state, steps = steps_of(bridged("overlapping", padded()), PROMPTS[:1], 6, 2)
    assert state.finished == ["length"]
    assert sum(len(row.drafted) for step in steps for row in step.rows) > 2


def test_shared_tokens_beyond_the_targets_logits_are_left_out() -> None:
    """A tokenizer may have more tokens than the target's model has rows."""
    proposal = proposed(bridged("target within draft", vocab=1), Prompt("0", (0, 0)), 2)
    assert proposal.draft_BKV.shape[-1] == 1 and bool((proposal.draft_BKV == 1).all())
