"""A draft that runs ahead changes nothing but time: every order of events has the target's law."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.distributed.draft_messages import DraftClient, Message, MessageKind
from llama_ssp.speculative.drafters import ahead, remote
from llama_ssp.speculative.drafters.ahead import AheadDrafter, Memo
from llama_ssp.speculative.drafters.local import Drawn
from llama_ssp.speculative.rng import CounterDraws, Purpose, Slot
from llama_ssp.speculative.state import Prompt, State
from tests.proofs.interleaved import Schedule, Seen, SharedDraws, overlapped, schedules, walk
from tests.proofs.scenarios import BASE, Scenario, models, play

CUT = SamplingConfig(top_p=0.75)  # some distributions are certain then, and trees smaller
CUT_LESS = SamplingConfig(top_p=0.85)
TWO, OTHER_TWO = ((1,), (0, 1, 1)), ((1, 1, 0), (0,))

# A scenario, and for how many rounds schedules differ.
WALKS: dict[str, tuple[Scenario, int]] = {
    "one row, K = 1": (Scenario(vocab=2, k=1, new=4), 2),
    "one row, K = 2": (Scenario(vocab=2, k=2, new=6, sampling=CUT_LESS), 2),
    "one row, token rule": (Scenario(vocab=2, k=2, new=6, sampling=CUT_LESS, rule="token"), 2),
    "every guess is right": (Scenario(vocab=2, k=2, new=6, draft="same"), 2),
    "two rows, K = 2": (Scenario(prompts=TWO, vocab=2, k=2, new=5, draft="same", sampling=CUT), 3),
    "two rows, EOS": (
        Scenario(prompts=OTHER_TWO, vocab=2, k=1, new=4, ends=frozenset({1}), sampling=CUT), 2,
    ),
    "two rows, the context ends": (Scenario(prompts=TWO, vocab=2, k=2, new=10, context=6, sampling=CUT), 2),
    "two rows, adaptive K": (
        Scenario(prompts=TWO, vocab=2, k=2, new=5, adaptive=True, draft="same", sampling=CUT_LESS), 1,
    ),
    "a stop sequence": (Scenario(vocab=2, k=2, new=6, stop=(0, 1), sampling=CUT_LESS), 2),
    "the draft's context ends": (Scenario(draft_context=5, vocab=2, k=2, new=6, sampling=CUT), 2),
    "all that the draft has is forbidden": (replace(BASE["all that the draft has is forbidden"], k=1), 2),
}  # fmt: skip
# With these every order of two rounds is tried; elsewhere, what else differs meets every order of one.
WHOLE = ("one row, K = 1", "one row, K = 2", "two rows, K = 2", "two rows, adaptive K")
# Ends come first, or the guess is forbidden.
RARELY_READY = (
    "two rows, EOS", "a stop sequence", "the draft's context ends", "all that the draft has is forbidden",
)  # fmt: skip


def test_an_interleaving_has_the_targets_law():
    scenario, _ = WALKS["two rows, K = 2"]
    error, seen = walk(scenario, iter(schedules(2, 1)))
    assert error < 1e-12 and seen.schedules == 4 and seen.used > 0


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_every_interleaving_has_the_targets_law(name: str):
    (scenario, rounds), whole = WALKS[name], name in WHOLE
    error, seen = walk(scenario, schedules(scenario.k, rounds, whole))
    assert error < 1e-12
    assert seen.schedules == ((scenario.k + 2) ** rounds if whole else 2 * (scenario.k + 2))
    assert seen.drafted > 0 and (seen.used > 0 or name in RARELY_READY)


def test_a_memo_stands_for_its_own_prompt_and_text_alone():
    """Two prompts may have the same text; their drafts differ, as each has draws of its own."""

    def batch(*prompts: tuple[str, tuple[int, ...]]) -> State:
        return State([Prompt(*prompt) for prompt in prompts], 9, torch.device("cpu"))

    memo = Memo(batch(("a", (1, 2)), ("b", (1, 2))), (2, 2))
    now = batch(("a", (1, 2)), ("c", (1, 2)))
    assert [memo.stands(now, row) for row in (0, 1)] == [True, False]
    now.append(0, [1])
    assert not memo.stands(now, 0)
    other = batch(("b", (1, 2)), ("b", (1, 2)))
    assert [memo.stands(other, row) for row in (0, 1)] == [False, True]


def test_rows_of_two_memos_are_merged_whole():
    """Each row's token comes with the very probabilities it was drawn from."""
    generator = torch.Generator().manual_seed(1)
    one, other = (
        Drawn(torch.randint(5, (3,), generator=generator) + 5 * n, torch.rand(3, 5, generator=generator))
        for n in range(2)
    )
    chosen = [True, False, True]
    found = ahead.merged(chosen, one, other)
    for row, first in enumerate(chosen):
        wanted = one if first else other
        for part in ("token_B", "probs_BV"):
            assert torch.equal(getattr(found, part)[row], getattr(wanted, part)[row])


def test_drafts_are_ready_when_there_is_time_and_the_guess_is_right():
    scenario, _ = WALKS["every guess is right"]
    target, draft = models(scenario)
    assert draft is not None
    used = []
    for looks in (0, 1, 2, 3):
        seen = Seen()
        overlapped(scenario, target, draft, SharedDraws([]), Schedule((looks,) * 9), seen)
        used.append(seen.used)
    assert used == [0, 0, 1, 2]  # a pass for the guess, then a draft a pass


def test_the_text_is_that_of_one_process():
    """Draw for draw: what is drafted ahead takes the keys that the proposal would have taken."""
    for seed in range(6):
        scenario = Scenario(prompts=TWO, vocab=5, k=3, new=12, ends=frozenset({4}))
        target, draft = models(scenario)
        assert draft is not None
        alone = play(scenario, target, draft, CounterDraws(seed))
        for looks in (0, 2, 5):
            schedule = Schedule((looks,) * 20, deaf=seed % 2 > 0, twice=seed % 3 > 0)
            assert overlapped(scenario, target, draft, CounterDraws(seed), schedule) == alone


@pytest.mark.parametrize("zeros", [0, 5, 11, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_arrive_to_the_last_bit(zeros: int, dtype: torch.dtype):
    probs = torch.rand(12, dtype=dtype)
    probs[:zeros] = 0
    probs = probs.view(1, 2, 6)
    for sent in (probs, probs.pow(40), probs * torch.finfo(dtype).tiny):  # the least is a probability, too
        how, load = remote.written(sent)
        assert torch.equal(remote.read(how, load, (1, 2, 6), dtype), sent)
        assert len(load) <= sent.nbytes


def test_two_laws_alike_are_raced_to_the_same_token():
    """Laws that overlap by 0.9 give the same token nearly as often; by inverted CDFs they do not."""
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(400, 300, generator=generator)
    one = torch.softmax(logits, -1)
    other = torch.softmax(logits + 0.25 * torch.randn(400, 300, generator=generator), -1)
    apart = float((one - other).abs().sum(-1).mean() / 2)
    assert 0.05 < apart < 0.15
    slot = Slot(tuple(range(400)), (7,) * 400, Purpose.CORRECT)
    alike = [
        float((draws.categorical(one, how) == draws.categorical(other, how)).double().mean())
        for draws, how in ((CounterDraws(0), slot), (CounterDraws(0), replace(slot, purpose=Purpose.DRAFT)))
    ]
    assert alike[0] > (1 - apart) / (1 + apart) - 0.05 and alike[0] > alike[1] + 0.2


# Faults, each of which must show in the distribution (or break the run).


def _any_reply(asker: DraftClient, seconds: float) -> bool:
    """Takes whatever reply comes for the one to this ask."""
    frame = asker.link.receive(seconds)
    if frame is None:
        return False
    message = Message.unpack(frame)
    asker._acknowledged = message.number
    if message.kind is MessageKind.REPLY:
        asker._reply = message
    return True


def _about_anything(state: State, count: tuple[int, ...]) -> list[int]:
    return [0] * (3 * state.rows)


def _of_any_text(memo: Memo, state: State, row: int) -> bool:
    return True


def _if_it_pleases(memo: Memo, state: State, row: int) -> bool:
    """Looks at what was drafted, not only at what was committed."""
    stands = state.keys[row] == memo.state.keys[row] and state.texts[row] == memo.state.texts[row]
    return stands and bool(memo.drawn) and int(memo.drawn[0].token_B[row]) == 0


_extended, _step = State.extended, AheadDrafter._step


def _with_own_draws(state: State, blocks: list[list[int]]) -> State:
    """Drafts ahead by other keys than the proposal's."""
    later: Any = _extended(state, blocks)
    later.slot = lambda purpose, offset=0: State.slot(later, purpose, offset + 8)
    return later


def _law_of_another_text(drafter: AheadDrafter, state: State, offset: int, count: tuple[int, ...]) -> Drawn:
    drawn = _step(drafter, state, offset, count)
    ready = offset < max(drafter._ready)
    return replace(drawn, probs_BV=drawn.probs_BV.flip(-1)) if ready else drawn


def _of_another_correction(memo: Memo, state: State, row: int) -> bool:
    """Looks how far the text has come, not which it is."""
    return len(state.texts[row]) == len(memo.state.texts[row])


PATIENT = Schedule((3,) * 6)  # all that can be drafted ahead is


@dataclass(frozen=True)
class Fault:
    """What is replaced by what, and where it must show."""

    changes: tuple[tuple[Any, str, Any], ...]
    scenario: Scenario = WALKS["one row, K = 1"][0]
    schedule: Schedule = PATIENT


WHIM, ALIKE = "whether it is used depends on a token that nobody committed", "every guess is right"
FAULTS = {
    "a stale proposal is used": Fault(
        (
            (DraftClient, "_take", _any_reply),
            (remote, "tags", _about_anything),
            (ahead, "tags", _about_anything),
        ),
        schedule=Schedule((0,) * 6, twice=True),
    ),
    "a proposal for another prefix is used": Fault(((Memo, "stands", _of_any_text),)),
    "whether it is used depends on a token that nobody committed": Fault(
        ((Memo, "stands", _if_it_pleases), (State, "extended", _with_own_draws)),
        WALKS["every guess is right"][0],
    ),
    "the law is another text's": Fault(((AheadDrafter, "_step", _law_of_another_text),)),
}


def shows(fault: Fault) -> bool:
    """Whether texts have another distribution with it."""
    with ExitStack() as stack:
        for place, name, instead in fault.changes:
            stack.enter_context(patch.object(place, name, instead))
        return walk(fault.scenario, iter([fault.schedule]))[0] > 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows(name: str):
    assert shows(FAULTS[name])


# Faults by which each draft still comes with its distribution: the distribution of the texts holds, but not a
# seed's text.
ASIDE = {"a guess is used behind another correction": (Memo, "stands", _of_another_correction)}


def alike_over_a_long_text(seed: int, *fault: Any) -> bool:
    """Whether a text, perhaps with a fault, is that of one process."""
    scenario = Scenario(vocab=5, k=3, new=40)
    target, draft = models(scenario)
    assert draft is not None
    with patch.object(*fault) if fault else nullcontext():
        run = overlapped(scenario, target, draft, CounterDraws(seed), Schedule((16,) * 60))
    return run == play(scenario, target, draft, CounterDraws(seed))


def test_a_long_text_drafted_ahead_is_that_of_one_process():
    assert alike_over_a_long_text(1) and alike_over_a_long_text(4)


@pytest.mark.parametrize("name", ASIDE)
def test_a_planted_fault_shows_in_the_text(name: str):
    assert not all(alike_over_a_long_text(seed, *ASIDE[name]) for seed in range(1, 8))


@pytest.mark.slow
def test_keys_make_the_choice_harmless_by_themselves():
    """A proposal that is thrown away for what it holds is drawn again by the same keys: the same one."""
    whim = FAULTS[WHIM]
    assert not shows(replace(whim, changes=whim.changes[:1]))
