"""Planted faults: each must be caught by a proof. `python -m tests.proofs.mutants` prints the table.

A mutant replaces one attribute of the code that ships by a faulty one. The proofs are the rational
enumeration (tests/proofs/rational.py), the walked trees (tests/proofs/scenarios.py), and single tests of the quick tier; a
proof catches a mutant when it finds a total variation above its tolerance, or when the run or the test breaks.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.models import attention
from llama_ssp.models.causal_lm import RaggedCache
from llama_ssp.models.feed import Feed
from llama_ssp.models.formats import gguf_source
from llama_ssp.models.formats.coded import Coded
from llama_ssp.models.heads.model import DFlashModel
from llama_ssp.models.sharding import COLUMNS, Cut
from llama_ssp.speculative import decision, engine, logprobs, sampling, traversal
from llama_ssp.speculative import generate as loop
from llama_ssp.speculative import rng as draws
from llama_ssp.speculative import state as state_module
from llama_ssp.speculative import verification as verify
from llama_ssp.speculative.array_ops import pick, row_by_row, stack_last, where
from llama_ssp.speculative.drafters import ahead, remote
from llama_ssp.speculative.drafters import cross_vocab as bridged
from llama_ssp.speculative.drafters import head as heads
from llama_ssp.speculative.drafters import local as drafters
from llama_ssp.speculative.drafters import siblings as sibling_draws
from llama_ssp.speculative.drafters.block_head import BlockHeadDrafter
from llama_ssp.speculative.drafters.head import HeadDrafter
from llama_ssp.speculative.drafters.ngram import NgramDrafter
from llama_ssp.speculative.rng import CounterDraws, Purpose, Slot
from llama_ssp.speculative.sampling import Prefix, SamplingTransform
from llama_ssp.speculative.state import Proposal, State
from llama_ssp.speculative.verification import RULES, BlockRule, DraftBlock, TokenRule, TreeRule
from tests.proofs import rational
from tests.proofs import scenarios as trees

Catch = Callable[[], str | None]
_TESTS: dict[tuple[str, str, str], Catch] = {}


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is planted, and the proof that should catch it."""

    name: str
    place: Any
    attribute: str
    fault: Any
    caught_by: Catch


@cache
def healthy(proof: Catch) -> str | None:
    """What a proof finds where no fault is planted; mutants that share a proof share this."""
    return proof()


@cache
def by_rational(rule: str, count: int = 30) -> Catch:
    """The share of random pairs on which the fault shows."""

    def catch() -> str | None:
        wrong = 0
        for case in rational.cases(count):
            try:
                wrong += rational.total_variation(RULES[rule], case) != 0
            except (ZeroDivisionError, IndexError, AssertionError):
                wrong += 1
        return f"rational, {rule}: {wrong} of {count} pairs" if wrong else None

    return catch


@cache
def by_tree(scenario: str, rule: str = "block") -> Catch:
    """The total variation of a walked tree."""

    def catch() -> str | None:
        asked = trees.SCENARIOS[scenario, rule]
        try:
            error, _ = trees.walk(asked)
        except AssertionError as wrong:
            return f"tree, {scenario}: {str(wrong)[:60]}"
        return f"tree, {scenario}: TV {error:.1e}" if error > 1e-12 else None

    return catch


@cache
def by_rational_trees(most: int, count: int = 12) -> Catch:
    """The share of random trees on which the fault shows."""

    def catch() -> str | None:
        wrong = sum(rational.tree_variation(case, most) != 0 for case in rational.cases(count, 7))
        return f"rational trees, {most} siblings: {wrong} of {count}" if wrong else None

    return catch


@cache
def by_siblings(scenario: str) -> Catch:
    """The total variation of a walked tree of runs with siblings."""

    def catch() -> str | None:
        try:
            error, _ = trees.walk(trees.TREES[scenario])
        except AssertionError as wrong:
            return f"siblings, {scenario}: {str(wrong)[:60]}"
        return f"siblings, {scenario}: TV {error:.1e}" if error > 1e-12 else None

    return catch


def _rewritten(function: Any, old: str, new: str) -> Any:
    """The function with another piece of text."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, old
    made: dict[str, Any] = {}
    exec(source.replace(old, new), function.__globals__, made)
    return made[function.__name__]


def by_test(module: str, test: str, *given: Any) -> Catch:
    """A test of the quick tier, which fails."""

    def catch() -> str | None:
        try:
            getattr(import_module(f"tests.{module}"), test)(*given)
        except AssertionError:
            return f"{module}.{test}"
        return None

    return _TESTS.setdefault((module, test, str(given)), catch)


def strict_draws() -> str | None:
    """A chance of 0 must not pass, even when the uniform is exactly 0."""
    with patch.object(CounterDraws, "_uniforms", lambda *_: torch.zeros(1, 1, dtype=torch.float64)):
        passed = CounterDraws(0).bernoulli(torch.zeros(1, 1), Slot((0,), (0,), Purpose.ACCEPT))
    return "a uniform of 0 passes a chance of 0" if bool(passed.any()) else None


def _swapped(block: DraftBlock) -> Any:
    index = block.drafted_BK[:, :, None]
    target = pick(block.target_BWV[:, : block.k], index, 2)[:, :, 0]
    draft = pick(block.draft_BKV, index, 2)[:, :, 0]
    return where(target > 0, draft / where(target > 0, target, 1), 0)


def _lenient(original: Any) -> Any:
    return lambda block: original(block) * 21 / 20


def _shifted(block: DraftBlock) -> Any:
    """Ratios against the distribution of the position before."""
    late = np if isinstance(block.draft_BKV, np.ndarray) else torch
    moved = late.concatenate([block.draft_BKV[:, :1], block.draft_BKV[:, :-1]], 1)
    return verify_ratios(replace(block, draft_BKV=moved))


def _greedy_accept(self: TokenRule, block: DraftBlock) -> Any:
    return verify._within_count(block, where(verify_ratios(block) >= 1, 1, 0))


def _always(self: TokenRule, block: DraftBlock) -> Any:
    return verify._within_count(block, where(verify_ratios(block) >= 0, 1, 0))


def _target_again(block: DraftBlock, accepted: Any, weight: Any) -> Any:
    return row_by_row(block.target_BWV, accepted)


def _residual(shape: Callable[[Any, Any, Any], Any]) -> Any:
    """A remaining distribution whose rest is computed by a faulty `shape(target, draft, drafted)`."""

    def fault(block: DraftBlock, accepted: Any, weight: Any) -> Any:
        target = row_by_row(block.target_BWV, accepted)
        last = where(accepted < block.k, accepted, block.k - 1)
        draft = row_by_row(block.draft_BKV, last)
        drafted = pick(block.drafted_BK, last[:, None], 1)
        rest = shape(weight[:, None] * target, draft, drafted)
        mass = rest.sum(-1, keepdims=True)
        whole = (accepted == block.count_B)[:, None] | (mass <= 0)
        return where(whole, target, rest / where(mass > 0, mass, 1))

    return fault


def _masked(target: Any, draft: Any, drafted: Any) -> Any:
    token = np.arange(target.shape[-1]) if isinstance(target, np.ndarray) else torch.arange(target.shape[-1])
    return where(token[None] != drafted, target, target * 0)


def _bonus_from_draft(block: DraftBlock, accepted: Any, weight: Any) -> Any:
    probs = verify_remaining(block, accepted, weight)
    last = row_by_row(block.draft_BKV, where(accepted > 0, accepted - 1, 0))
    return where((accepted == block.k)[:, None], last, probs)


def _bonus_too_early(block: DraftBlock, accepted: Any, weight: Any) -> Any:
    probs = verify_remaining(block, accepted, weight)
    early = row_by_row(block.target_BWV, where(accepted > 0, accepted - 1, 0))
    return where((accepted == block.count_B)[:, None], early, probs)


def _plain_h(self: BlockRule, block: DraftBlock) -> Any:
    carried = verify._carried(block)
    return verify._within_count(block, stack_last([carried[:, i] for i in range(1, block.k + 1)]))


def _token_residual(self: BlockRule, block: DraftBlock, accepted: Any) -> Any:
    return verify._residual_probs(block, accepted, accepted * 0 + 1)


def _uncapped(block: DraftBlock) -> Any:
    ratio = verify_ratios(block)
    carried = [ratio[:, 0] * 0 + 1]
    for i in range(block.k):
        carried.append(where(ratio[:, i] < 1, ratio[:, i], 1))
    return stack_last(carried)


def _first_failure(self: BlockRule, passed: Any) -> Any:
    return TokenRule().accepted(passed)


def _declares_mixture(self: Any, state: State, count: tuple[int, ...]) -> Proposal:
    proposal = model_propose(self, state, count)
    if proposal.draft_BKV is None:
        return proposal
    probs = 0.95 * proposal.draft_BKV + 0.05 / proposal.draft_BKV.shape[-1]
    return replace(proposal, draft_BKV=probs)


def _drops_what_it_saw(self: Any, state: State, count: tuple[int, ...]) -> Proposal:
    """Drops the last token if its distribution was not confident: it was drawn, so it must be submitted."""
    proposal = model_propose(self, state, count)
    if proposal.draft_BKV is None:
        return proposal
    chosen = pick(proposal.draft_BKV, proposal.drafted_BK[..., None], 2)[..., 0]
    kept = tuple(
        n - 1 if n and float(chosen[row, n - 1]) < 0.5 else n for row, n in enumerate(proposal.count)
    )
    if not max(kept):
        return drafters.nothing(state)
    k = max(kept)
    return Proposal(proposal.drafted_BK[:, :k], proposal.draft_BKV[:, :k], kept)


def _declares_uniform(self: Any, state: State, count: tuple[int, ...]) -> Proposal:
    proposal = ngram_propose(self, state, count)
    if proposal.draft_BKV is None:
        return proposal
    return replace(proposal, draft_BKV=torch.full_like(proposal.draft_BKV, 1 / proposal.draft_BKV.shape[-1]))


def _keeps_stale(self: RaggedCache, key: Any, value: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
    """Slots that were written once stay as they are: rejected tokens leave their keys behind."""
    before = [stored.clone() for stored in self._layers.get(layer_idx, ())]
    found = cache_update(self, key, value, layer_idx)
    for stored, old in zip(self._layers[layer_idx], before, strict=False):
        stored.copy_(torch.where(old.abs().sum((1, 3), keepdim=True) > 0, old, stored))
    return found


def _sees_ahead(self: Feed, rule: Any, _slot: Any) -> Any:
    return rule(self.positions()[:, None, :, None] + 1)


def _late_positions(self: Feed) -> Any:
    return torch.where(self.slots() < self.capacity, feed_positions(self) + 1, 0).clamp(max=self.capacity - 1)


def _committed_prefix_only(self: State, first: int, width: int) -> Prefix:
    prefix = state_prefix(self, first, width)
    length_BW = torch.tensor(self.lengths)[:, None].expand(-1, width)
    return Prefix(prefix.token_BS, length_BW, prefix.prompt_B)


def _one_slot_a_text(self: State, purpose: Purpose, offset: int = 0) -> Slot:
    return Slot(self.keys, self.prompt_lengths, purpose, offset)


def _one_purpose(self: State, purpose: Purpose, offset: int = 0) -> Slot:
    return Slot(self.keys, tuple(self.lengths), Purpose.ACCEPT, offset)


def _runs_past_the_end(self: Any, state: State, row: int, tokens: list[int], context: int) -> Any:
    """Sees an end only in a block's last token, as transformers' stopping criteria do."""
    kept, reason = limits_trim(self, state, row, tokens, context)
    return (len(tokens), None) if kept < len(tokens) else (kept, reason)


def _first_row_decides(self: Any, probs: Any) -> Any:
    return state_token(self, probs[:1].expand_as(probs))


def _unfiltered_target(self: SamplingTransform, logits: Any, prefix: Prefix) -> Any:
    """Filters the draft (one position at a time), not the target."""
    if logits.shape[1] == 1:
        return laws_law(self, logits, prefix)
    return torch.softmax(logits / self.controls.temperature, -1)


def _soft_at_zero(self: SamplingTransform, logits: Any, prefix: Prefix) -> Any:
    """Temperature 0 as a small temperature."""
    controls = self.controls
    return torch.softmax(logits / 0.3, -1) if controls.temperature == 0 else laws_law(self, logits, prefix)


def _loose(self: CounterDraws, chance: Any, slot: Slot) -> Any:
    return self._uniforms(slot, chance.shape[1], chance.device) <= chance


def _adapts_to_the_future(self: Any, state: State, *asked: Any) -> Proposal:
    """Drafts, looks whether the target would agree, and only then decides how much to submit."""
    proposal = engine_draft(self, state, *asked)
    if proposal.k < 2 or proposal.draft_BKV is None:
        return proposal
    certain = proposal.drafted_BK[:, -1] == proposal.draft_BKV[:, -1].argmax(-1)
    kept = tuple(n if bool(ok) else 1 for n, ok in zip(proposal.count, certain, strict=True))
    k = max(kept)
    return Proposal(proposal.drafted_BK[:, :k], proposal.draft_BKV[:, :k], kept)


def _declares(change: Callable[[Any, Any], Any]) -> Any:
    """A draft of another tokenizer whose declared distribution is changed by `change(distribution, drafter)` after it was drawn from."""

    def fault(self: Any, state: State, count: tuple[int, ...]) -> Proposal:
        proposal = shared_propose(self, state, count)
        if proposal.draft_BKV is None:
            return proposal
        return replace(proposal, draft_BKV=change(proposal.draft_BKV, self))

    return fault


def _scattered_in_id_order(probs: Any, drafter: Any) -> Any:
    """Chances of shared tokens, taken in the draft's order, go to the target's in ascending order."""
    wrong = torch.zeros_like(probs)
    wrong[..., drafter._to_S.sort().values] = probs[..., drafter._to_S]
    return wrong


def _rest_kept(probs: Any, drafter: Any) -> Any:
    """What the draft gave to tokens of its own is not shared out: it stays where no shared token is."""
    alone = [t for t in range(probs.shape[-1]) if t not in drafter._to_S.tolist()]
    kept = 0.7 * probs
    kept[..., alone[0]] += 0.3
    return kept


def _counted_twice(probs: Any, drafter: Any) -> Any:
    """A token that two of the draft's stand for has their sum once for each."""
    return probs * torch.bincount(drafter._to_S, minlength=probs.shape[-1])


def _any_clock(self: CounterDraws, slot: Slot, count: int, device: Any) -> Any:
    """A round's clocks are made once for all rounds."""
    known = self._held.get(draws.RACES)
    if known is None or known[1].shape != (len(slot.keys), count):
        self._held[draws.RACES] = None, self._numbers(draws.RACES, slot, count)
    return self._held[draws.RACES][1]


def _clocks_of_rounds(numbers: Any) -> Any:
    """Clocks made of the numbers that drafts and coins have."""

    def fault(self: CounterDraws, stream: int, slot: Slot, width: int) -> Any:
        if stream != draws.RACES:
            return numbers(self, stream, slot, width)
        uniform = numbers(self, draws.ROUNDS, slot, width)
        return -(((uniform * 2**52).floor() + 0.5) * 2.0**-52).log()

    return fault


def _named(change: Callable[[Slot], Slot]) -> Any:
    """Numbers of another slot."""

    def fault(self: CounterDraws, slot: Slot, count: int, device: Any) -> Any:
        return draws_uniforms(self, change(slot), count, device)

    return fault


def _coins_of_drafts(self: CounterDraws, chance: Any, slot: Slot) -> Any:
    return draws_bernoulli(self, chance, replace(slot, purpose=Purpose.DRAFT))


def _overlapping(self: CounterDraws, slot: Slot, count: int, device: Any) -> Any:
    """Number offset + purpose, so that one draft's coin is the next one's number."""
    first = slot.offset + slot.purpose
    return self._table(draws.ROUNDS, slot, first + count, device)[:, first : first + count]


def _counted(counter: Callable[[int, int, int], list[int]]) -> Any:
    """Numbers from another place: of `counter(stream, base, width)`."""

    def fault(self: CounterDraws, key: int, base: int, width: int, stream: int) -> Any:
        keys = np.array([self.own.get(key, self.seed), key], dtype=np.uint64)
        source = np.random.Philox(key=keys, counter=counter(stream, base, width))
        return source.random_raw(width) >> np.uint64(11)

    return fault


def _in_groups(self: SamplingTransform, logits: Any, prefix: Prefix) -> Any:
    """Rows of equal controls stay together, in whatever order."""
    groups: dict[SamplingTransform, list[int]] = {}
    for row in range(len(logits)):
        groups.setdefault(self._by_row.get(row, self), []).append(row)
    parts = [
        transform._alike(
            logits[rows], Prefix(prefix.token_BS[rows], prefix.length_BW[rows], prefix.prompt_B[rows])
        )
        for transform, rows in groups.items()
    ]
    return torch.cat(parts)


def _as_any_other(self: SamplingTransform, row: int, sampling: SamplingConfig) -> None:
    """A row with controls of its own has those of the first such row."""
    self._by_row[row] = next(iter(self._by_row.values()), None) or SamplingTransform(
        sampling, self.end_ids, self.vocab
    )


def _merged(part: str) -> Any:
    """Rows of two memos, in which this part is the second one's throughout."""
    return lambda first, one, other: replace(memos_merged(first, one, other), **{part: getattr(other, part)})


def _shows_the_end(self: Any, state: State, row: int, tokens: list[int], context: int) -> Any:
    """Stop strings are sought in an end token, too."""
    if self.text_end is None:
        return limits_trim(self, state, row, tokens, context)
    ends = [i for i, token in enumerate(tokens) if token in self.end_ids]
    stopped = self.text_end.kept(row, tokens[: ends[0] + 1] if ends else tokens, False)
    if stopped is not None:
        return stopped, "stop"
    return limits_trim(replace(self, text_end=None), state, row, tokens, context)


def _of_any_prompt(self: ahead.Memo, state: State, row: int) -> bool:
    return state.texts[row] == self.state.texts[row]


def _keeps_rejected_states(self: HeadDrafter, token_BS: Any, fed: Any, state_TX: Any) -> None:
    """A position's first states stay, also where a rejected draft has made them."""
    seen = self.__dict__.setdefault("seen", {})
    places, old = torch.arange(len(self._state_NH))[self._places(fed)], self._state_NH.clone()
    head_observe(self, token_BS, fed, state_TX)
    each = [(row, start + i) for row, start, count in fed for i in range(count)]
    for place, (row, position) in zip(places.tolist(), each, strict=True):
        if position < seen.get(row, 0):
            self._state_NH[place] = old[place]
    seen.update({row: max(seen.get(row, 0), start + count) for row, start, count in fed})


def _own_guess_stays(self: HeadDrafter, row: int, length: int) -> Any:
    """What it read with its own z counts, though the target's states are there."""
    return row, length - 2, 1


def _block_states_stay(self: BlockHeadDrafter, token_BS: Any, fed: Any, state_TX: Any) -> None:
    """What was read at a position is never read anew."""
    seen = self.__dict__.setdefault("seen", {})
    new = [start + i >= seen.get(row, 0) for row, start, count in fed for i in range(count)]
    spans = []
    for row, start, count in fed:
        begin = max(start, seen.get(row, 0))
        spans.append((row, begin, max(start + count - begin, 0)))
        seen[row] = max(seen.get(row, 0), start + count)
    block_observe(self, token_BS, spans, state_TX[torch.tensor(new)])


def _one_place_on(self: DFlashModel, *given: Any) -> Any:
    return block_logits(self, *given).roll(1, 1)


def _first_state_again(self: HeadDrafter, token_BS: Any, fed: Any, g_TH: Any) -> Any:
    """Each draft of a round reads what the first one has read."""
    single = all(count == 1 for _, _, count in fed)
    kept = self.__dict__.get("first")
    if single and kept is not None and kept.shape == g_TH.shape and len(fed) == len(kept):
        g_TH = kept
    else:
        self.__dict__["first"] = g_TH[-len(fed) :]
    return head_forward(self, token_BS, fed, g_TH)


def _next_id(self: HeadDrafter, logits: Any, rows: Any, count: int) -> Any:
    return head_in_target(self, logits, rows, count).roll(1, -1)


def _mass_missing(transform: Any, logits: Any, state: State, offset: int) -> Any:
    """As if the tokens that the head lacks had kept their share."""
    found = some_probs(transform, logits, state, offset)
    return found * (1 - 0.5 * (logits == -torch.inf).double().mean(-1, keepdim=True))


def _before_controls(self: HeadDrafter, state: State, offset: int, rows: Any, logits: Any) -> Any:
    drawn = head_drawn(self, state, offset, rows, logits)
    plain = self._in_target(logits, rows, state.rows).softmax(-1)
    return replace(drawn, probs_BV=plain)


def _zero_after_the_scale(self: Coded) -> Any:
    """As if the zero were a number, not a code."""
    if self.zero_NG is None:
        return coded_decode(self)
    shift_NG = self.zero_NG.to(self.scale_NG.dtype)
    return coded_decode(replace(self, zero_NG=None, shift_NG=shift_NG))


def _groups_from_the_cut(self: Coded, cut: Any) -> Coded:
    """A part's groups begin where it begins, though a group of the whole does not."""
    part = coded_cut(self, cut)
    if cut is None or cut.dim == 0 or not self.kind.group:
        return part
    first, group = cut.spans[0][0] // self.kind.group, self.kind.group
    groups = -(-part.inputs // group)
    parts = {
        name: each[:, first : first + groups] for name, each in self._tensors().items() if name != "codes_NC"
    }
    return replace(part, kind=self.kind, **parts)


def _forgets_the_broken(self: Any, state: State, proposal: Proposal, logits: Any) -> Any:
    return engine_judge(self, state, replace(proposal, damaged=None), logits)


# The originals that faults build on, taken before anything is patched.
draws_uniforms, draws_bernoulli = CounterDraws._uniforms, CounterDraws.bernoulli
memos_merged = ahead.merged
engine_judge, state_token = engine.Engine.judge, decision.StateDraws.token
verify_ratios, verify_remaining = verify._ratios, verify._residual_probs
model_propose, ngram_propose = drafters.ModelDrafter.propose, NgramDrafter.propose
shared_propose = bridged.IntersectionDrafter.propose
feed_positions, cache_update = Feed.positions, RaggedCache.update
state_prefix, limits_trim = State.prefix, loop.Limits.trim
engine_draft, laws_law = engine.Engine.draft, SamplingTransform._probs
block_observe, block_logits = BlockHeadDrafter.observe, DFlashModel.logits
head_observe, head_in_target, head_drawn = HeadDrafter.observe, HeadDrafter._in_target, HeadDrafter._drawn
head_forward = HeadDrafter._forward
some_probs = heads.probs_of_some
DFLASH_TEST = "test_declared_distributions_are_those_of_the_published_code"
HEAD_TEST = "test_declared_distributions_are_the_published_formulas"

coded_decode, coded_cut = Coded._decoded, Coded.cut
MUTANTS = [
    Mutant("ratio swapped", verify, "_ratios", _swapped, by_rational("token")),
    Mutant("ratio swapped, block", verify, "_ratios", _swapped, by_rational("block")),
    Mutant("lenience of 5 %", verify, "_ratios", _lenient(verify_ratios), by_rational("token")),
    Mutant("lenience of 5 %, block", verify, "_ratios", _lenient(verify_ratios), by_rational("block")),
    Mutant("draft law of the position before", verify, "_ratios", _shifted, by_rational("token")),
    Mutant("accepts only where the target is surer", TokenRule, "accept_chances", _greedy_accept, by_rational("token")),
    Mutant("accepts always", TokenRule, "accept_chances", _always, by_rational("token")),
    Mutant("correction from the target's whole law", verify, "_residual_probs", _target_again, by_rational("token")),
    Mutant("residual |target - draft|", verify, "_residual_probs", _residual(lambda t, d, _: abs(t - d)), by_rational("token")),
    Mutant("residual masks the rejected token", verify, "_residual_probs", _residual(_masked), by_rational("token")),
    Mutant("residual max(draft - target)", verify, "_residual_probs", _residual(lambda t, d, _: (d - t).clip(0)), by_rational("block")),
    Mutant("bonus token from the draft", verify, "_residual_probs", _bonus_from_draft, by_rational("token")),
    Mutant("bonus token one position early", verify, "_residual_probs", _bonus_too_early, by_rational("block")),
    Mutant("block: h = P everywhere", BlockRule, "accept_chances", _plain_h, by_rational("block")),
    Mutant("block: the token rule's residual", BlockRule, "correction_probs", _token_residual, by_rational("block", 60)),
    Mutant("block: P forgets what came before", verify, "_carried", _uncapped, by_rational("block")),
    Mutant("block: stops at the first failure", BlockRule, "accepted", _first_failure, by_rational("block")),
    Mutant("declared law is not the drawn law (5 % uniform)", drafters.ModelDrafter, "propose", _declares_mixture, by_tree("plain")),
    Mutant("drops an unlikely draft after looking", drafters.ModelDrafter, "propose", _drops_what_it_saw, by_tree("plain", "token")),
    Mutant("K chosen after seeing the last draft", engine.Engine, "draft", _adapts_to_the_future, by_tree("plain", "token")),
    Mutant("looked-up draft declared uniform", NgramDrafter, "propose", _declares_uniform, by_tree("n-gram drafts")),
    Mutant("shared tokens scattered in the order of ids", bridged.IntersectionDrafter, "propose", _declares(_scattered_in_id_order), by_tree("Intersection, overlapping")),
    Mutant("law over shared tokens not renormalised", bridged.IntersectionDrafter, "propose", _declares(_rest_kept), by_tree("Intersection, overlapping")),
    Mutant("head: states of a rejected draft stay", HeadDrafter, "observe", _keeps_rejected_states, by_test("test_heads", HEAD_TEST, "speculators")),
    Mutant("head: its own guess where the target's states are known", HeadDrafter, "_unread", _own_guess_stays, by_test("test_heads", HEAD_TEST, "speculators")),
    Mutant("DFlash: states of a rejected draft stay", BlockHeadDrafter, "observe", _block_states_stay, by_test("test_dflash", DFLASH_TEST, "speculators")),
    Mutant("DFlash: drafts one place on", DFlashModel, "logits", _one_place_on, by_test("test_dflash", DFLASH_TEST, "speculators")),
    Mutant("DFlash: the block is causal", attention, "attend_blocks", attention.attend_rows, by_test("test_dflash", DFLASH_TEST, "speculators")),
    Mutant("head: the next draft reads the last state again", HeadDrafter, "_forward", _first_state_again, by_test("test_heads", HEAD_TEST, "speculators")),
    Mutant("head: d2t off by one", HeadDrafter, "_in_target", _next_id, by_test("test_heads", HEAD_TEST, "reduced vocabulary")),
    Mutant("head: law of the reduced vocabulary not renormalised", heads, "probs_of_some", _mass_missing, by_test("test_heads", HEAD_TEST, "reduced vocabulary")),
    Mutant("head: declares the law before the controls", HeadDrafter, "_drawn", _before_controls, by_tree("head, every control")),
    Mutant("draft tokens that are one counted twice", bridged.IntersectionDrafter, "propose", _declares(_counted_twice), by_tree("Intersection, two draft tokens for one")),
    Mutant("stale keys of rejected tokens", RaggedCache, "update", _keeps_stale, by_tree("plain", "token")),
    Mutant("mask sees one slot ahead", Feed, "visible", _sees_ahead, by_tree("plain")),
    Mutant("positions one too late", Feed, "positions", _late_positions, by_tree("plain")),
    Mutant("controls see the committed prefix only", State, "prefix", _committed_prefix_only, by_tree("penalties, long block")),
    Mutant("minimum length by the committed prefix only", State, "prefix", _committed_prefix_only, by_tree("minimum length")),
    Mutant("filters on the draft's side only", SamplingTransform, "_probs", _unfiltered_target, by_tree("every control")),
    Mutant("temperature 0 as a small number", SamplingTransform, "_probs", _soft_at_zero, by_tree("greedy")),
    Mutant("one random number for accept and correct", State, "slot", _one_purpose, by_tree("plain")),
    Mutant("draws not keyed by length", State, "slot", _one_slot_a_text, by_tree("plain")),
    Mutant("accepts at u = ratio = 0", CounterDraws, "bernoulli", _loose, strict_draws),
    Mutant("EOS seen only at a block's end", loop.Limits, "trim", _runs_past_the_end, by_tree("EOS inside the block")),
    Mutant("stop seen only at a block's end", loop.Limits, "trim", _runs_past_the_end, by_tree("stop sequence across blocks")),
    Mutant("one row's correction for all rows", decision.StateDraws, "token", _first_row_decides, by_tree("two ragged rows")),
    Mutant("races read the counters of drafts and coins", CounterDraws, "_numbers", _clocks_of_rounds(CounterDraws._numbers), by_test("proofs.test_draws", "test_no_number_has_two_uses")),
    Mutant("a coin is its draft's number", CounterDraws, "bernoulli", _coins_of_drafts, by_test("proofs.test_draws", "test_no_number_has_two_uses")),
    Mutant("a coin is its draft's number, in a run", CounterDraws, "bernoulli", _coins_of_drafts, by_test("proofs.test_draws", "test_a_run_asks_for_no_number_twice")),
    Mutant("all purposes have the same numbers", CounterDraws, "_uniforms", _named(lambda slot: replace(slot, purpose=Purpose.DRAFT)), by_test("proofs.test_draws", "test_texts_have_the_targets_law", "block")),
    Mutant("a coin is the next draft's number", CounterDraws, "_uniforms", _overlapping, by_test("proofs.test_draws", "test_no_number_has_two_uses")),
    Mutant("numbers do not know their length", CounterDraws, "_row", _counted(lambda stream, base, width: [0, 0, stream, 0]), by_test("proofs.test_draws", "test_a_run_asks_for_no_number_twice")),
    Mutant("the stream is added to the length", CounterDraws, "_row", _counted(lambda stream, base, width: [0, 0, 0, base + stream]), by_test("proofs.test_draws", "test_no_number_has_two_uses")),
    Mutant("lengths count in the lowest word", CounterDraws, "_row", _counted(lambda stream, base, width: [base, 0, stream, 0]), by_test("proofs.test_draws", "test_no_number_has_two_uses")),
    Mutant("a wider table has other numbers", CounterDraws, "_row", _counted(lambda stream, base, width: [0, width, stream, base]), by_test("proofs.test_draws", "test_no_number_has_two_uses")),
    Mutant("clocks kept over rounds", CounterDraws, "_clocks", _any_clock, by_test("proofs.test_draws", "test_a_run_asks_for_no_number_twice")),
    Mutant("rows of a batch are not put back in order", SamplingTransform, "_row_by_row", _in_groups, by_test("test_sampling", "test_each_row_of_a_batch_has_its_own_controls")),
    Mutant("controls of rows are merged", SamplingTransform, "assign", _as_any_other, by_test("test_sampling", "test_each_row_of_a_batch_has_its_own_controls")),
    *(
        Mutant(f"merged drafts have the second one's {what}", ahead, "merged", _merged(part), by_test("proofs.test_overlap", "test_rows_of_two_memos_are_merged_whole"))
        for part, what in (("token_B", "tokens"), ("probs_BV", "probabilities"))
    ),
    Mutant("a memo stands whatever its prompt", ahead.Memo, "stands", _of_any_prompt, by_test("proofs.test_overlap", "test_a_memo_stands_for_its_own_prompt_and_text_alone")),
    Mutant("codes: the zero is subtracted after the scale", Coded, "_decoded", _zero_after_the_scale, by_test("test_coded", "test_a_matrix_is_decoded_a_weight_at_a_time", "uint4", 32, torch.float32)),
    Mutant("codes: a part that begins inside a group has groups of its own", Coded, "cut", _groups_from_the_cut, by_test("test_coded", "test_a_part_has_the_weights_of_the_whole", "uint4", 128, Cut(COLUMNS, ((64, 130),)))),
    Mutant("GGUF: the last scales of a block lose their upper bits", gguf_source, "BLOCKS", {**gguf_source.BLOCKS, "Q4_K": _rewritten(gguf_source._q45_k, "last & 15 | first >> 2 & 48", "last & 15")}, by_test("test_gguf", "test_any_bytes_are_decoded_as_the_library_does", "Q4_K")),
    Mutant("tree: a node's weight lacks 1 - weight", verify, "closed", _rewritten(traversal.closed, "rest_X + 1 - weight_X", "weight_X * 0 + 1"), by_rational_trees(1)),
    Mutant("tree: a sibling's distribution is not renormalised", verify, "closed", _rewritten(traversal.closed, "draft_XV / where(mass_X1 > 0, mass_X1, 1)", "draft_XV"), by_rational_trees(1)),
    Mutant("tree: a sibling's distribution keeps its draft", verify, "closed", _rewritten(traversal.closed, "if c:", "if c > 1:"), by_rational_trees(1)),
    Mutant("tree: the sibling that stands is the wrong one", TreeRule, "outcome", _rewritten(TreeRule.outcome, "size - 1 - order", "1 + order"), by_siblings("two siblings")),
    Mutant("a sibling is drawn with its draft's number", engine, "with_siblings", _rewritten(sibling_draws.with_siblings, "Purpose.SIBLING, MAX_SIBLINGS * i + j", "Purpose.DRAFT, i"), by_siblings("one sibling")),
    Mutant("a sibling may be its draft again", engine, "with_siblings", _rewritten(sibling_draws.with_siblings, "left_BKV.scatter_(2, before_BK[..., None], 0)", "pass"), by_siblings("one sibling")),
    Mutant("an unlikely sibling is dropped", engine, "with_siblings", _rewritten(sibling_draws.with_siblings, "return replace(proposal, siblings=", "each = tuple(n if proposal.draft_BKV[b, 0, int(drawn[0][b, 0])] > 0.3 else 0 for b, n in enumerate(each))\n    return proposal if not max(each) else replace(proposal, siblings="), by_siblings("one sibling")),
    Mutant("siblings see each other", Feed, "visible", _rewritten(Feed.visible, "(slot_S == slot_B1W1)", "(slot_S >= self.capacity - 2)"), by_siblings("two siblings")),
    Mutant("a sibling sees its draft", Feed, "visible", _rewritten(Feed.visible, "visible_B1WS & (slot_S != position_B1W1)", "visible_B1WS"), by_siblings("one sibling")),
    Mutant("controls take a sibling for its draft", state_module.TreePrefix, "last_BW", None, by_siblings("penalties")),
    Mutant("caches keep the draft beside the sibling that stands", State, "cacheable", State.lengths, by_siblings("one sibling")),
    Mutant("prompts of one length share their numbers", CounterDraws, "_table", _rewritten(CounterDraws._table, "slot.keys, slot.bases", "slot.bases"), by_test("proofs.test_draws", "test_prompts_of_one_length_have_numbers_of_their_own")),
    Mutant("a few tokens are a nucleus if one row's are", sampling, "_nucleus_edge", _rewritten(sampling._nucleus_edge, "- 8 * torch.finfo(probs.dtype).eps >= top_p).all()", ">= top_p).any()"), by_test("test_sampling", "test_a_flat_distribution_keeps_its_nucleus_in_a_batch_with_a_steep_one", (0, 1))),
    Mutant("a nucleus has one token more than its sum needs", sampling, "_nucleus_edge", _rewritten(sampling._nucleus_edge, "down < top_p", "down <= top_p"), by_test("test_sampling", "test_a_nucleus_ends_where_its_sum_is_reached")),
    Mutant("a bias lifts a ban", SamplingTransform, "_biased", _rewritten(SamplingTransform._biased, "{**controls.logit_bias, **banned}", "{**banned, **controls.logit_bias}"), by_test("test_sampling", "test_a_bias_does_not_lift_a_ban", 0.7)),
    Mutant("greedy takes the last of tied tokens", SamplingTransform, "_probs", _rewritten(SamplingTransform._probs, "logit_BWV.argmax(-1)", "logit_BWV.shape[-1] - 1 - logit_BWV.flip(-1).argmax(-1)"), by_test("test_sampling", "test_temperature_zero_takes_the_first_of_tied_tokens")),
    Mutant("tiny probabilities of a draft on other ranks are not sent", remote, "written", _rewritten(remote.written, "flat.nonzero()", "(flat > 1e-9).nonzero()"), by_test("proofs.test_overlap", "test_laws_arrive_to_the_last_bit", 0, torch.float32)),
    Mutant("a damaged draft is not reported", decision, "decided", _rewritten(decision.decided, "damaged_BW[:, 1:] |= has_nan(draft_BKV)", "pass"), by_test("test_loop", "test_damaged_logits_stop_their_row_only", "draft", "token")),
    Mutant("a refilled row keeps the log-probabilities before", State, "replace", _rewritten(State.replace, "self.logprobs[row] = []", "pass"), by_test("test_logprobs", "test_a_refilled_row_has_those_of_its_own_text")),
    Mutant("padding of the vocabulary has log-probabilities", logprobs.LogprobReader, "read", _rewritten(logprobs.LogprobReader.read, "[:, :vocab]", ""), by_test("test_logprobs", "test_padding_of_the_vocabulary_takes_no_part")),
    Mutant("a conversation keeps one cached token too many", engine.RankEngine, "go_on", _rewritten(engine.RankEngine.go_on, "state.lengths[0] - 1))]", "state.lengths[0] - 1)) + 1]"), by_test("test_logprobs", "test_a_text_that_parts_from_the_one_before_it_reads_no_stale_keys", 5)),
    Mutant("stop strings are shown the end token", loop.Limits, "trim", _shows_the_end, by_test("test_loop", "test_a_stop_string_is_not_sought_in_the_end_token")),
    Mutant("broken drafts are forgotten", engine.Engine, "judge", _forgets_the_broken, by_test("proofs.test_deciding", "test_a_broken_draft_is_told_whatever_it_declares")),
]  # fmt: skip


def verdict(mutant: Mutant) -> str | None:
    """What the proof found; None if the mutant lives."""
    with patch.object(mutant.place, mutant.attribute, mutant.fault):
        return mutant.caught_by()


def main() -> int:
    torch.set_num_threads(1)
    lived = 0
    for number, mutant in enumerate(MUTANTS, start=1):
        sound, found = healthy(mutant.caught_by), verdict(mutant)
        lived += found is None or sound is not None
        print(f"{number:2}  {mutant.name:50}  {'caught' if found else 'LIVES':7} {found or ''}", flush=True)
        if sound is not None:
            print(f"    the proof fails without the fault, too: {sound}")
    print(f"{len(MUTANTS) - lived} of {len(MUTANTS)} planted faults caught")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
