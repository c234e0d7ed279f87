"""Drafts with a draft model, or not at all. A drafter returns up to K tokens a row and their probabilities.

A drafter declares, for each token, the distribution it was drawn from: the model's, or a one-hot distribution
for a token that was looked up. How many tokens to draw is decided before they are drawn, and every drawn
token is submitted. More the rules do not need: a bad draft costs time, never exactness.

Shapes: B rows, K drafts, V the target's vocabulary.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from llama_ssp.errors import UsageError
from llama_ssp.models.passes import sent
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws, Purpose, Slot
from llama_ssp.speculative.sampling import SamplingTransform, likeliest, one_hot
from llama_ssp.speculative.state import Proposal, State


@dataclass(frozen=True)
class Drawn:
    """Holds one draft of each row, and the distribution it was drawn from."""

    token_B: Tensor
    probs_BV: Tensor


@dataclass(frozen=True)
class Sampler:
    """Draws drafts from logits, under the same controls as the target, or proposes tokens that were found.

    `dtype` is that of probabilities. Drafts are drawn from the `top` likeliest tokens alone; None: from all.
    """

    transform: SamplingTransform
    draws: CounterDraws
    dtype: torch.dtype = torch.float32
    top: int | None = None

    @property
    def vocab(self) -> int:
        """Returns how many tokens the target has."""
        return self.transform.vocab

    def draw(
        self, state: State, offset: int, count: tuple[int, ...], logit_BV: Tensor, slot: Slot | None = None
    ) -> Drawn:
        """Draws draft number `offset` of each row that has one, and writes it after the row's text.

        Written there it is part of the prefix of the next draft, and of the target's positions after it.

        The logits may be -inf for some tokens, which then have probability 0. Where the controls forbid all
        others nothing is damaged: any distribution is right, and certainty of token 0 is one.
        """
        # A pass of one position a row, (B, 1, V), whose prefix ends with the draft before this one.
        probs_BV = self.transform(logit_BV[:, None], state.prefix(offset, 1))[:, 0]

        if self.transform.forbids:
            damaged_B = (logit_BV.isnan() | logit_BV.isposinf()).any(-1)
            probs_BV = certain_where(probs_BV.isnan().any(-1) & ~damaged_B, probs_BV)

        # In this one place, wherever the draft is and whatever drafts. What is cut off is never drafted:
        # corrections bring it. So the law stays the one that is drawn from, and is declared as it is.
        probs_BV = likeliest(probs_BV, self.top)

        resting_BV = probs_BV
        idle = [offset >= n for n in count]
        if any(idle):  # nothing random may happen in rows without this draft
            resting_BV = certain_where(sent(idle, probs_BV.device), probs_BV)

        token_B = self.draws.categorical(resting_BV, slot or state.slot(Purpose.DRAFT, offset))
        state.write_draft(token_B, offset, count)
        return Drawn(token_B, probs_BV)

    def proposal(self, state: State, drawn: list[Drawn], count: tuple[int, ...]) -> Proposal:
        """Returns a proposal of what `draw` returned, draft after draft."""
        return proposal_of(drawn, count) if drawn else nothing(state)

    def certain(self, state: State, tokens: list[list[int]]) -> Proposal:
        """Proposes each row's tokens, written after its text, with one-hot probabilities.

        A token x that was looked up has q(x) = 1: it is accepted with p(x) / q(x) = p(x), and the residual
        max(p - q, 0) is p without x. A row is cut before the first token that the target has no logits of: a
        prompt may have such.
        """
        if len(tokens) != state.rows:
            raise UsageError(
                "tokens were found for another number of rows",
                found=f"{len(tokens)} lists",
                allowed=f"{state.rows}, one for each row, which may be empty",
                fix="give a list for each row",
            )
        known = [[*takewhile(lambda token: 0 <= token < self.vocab, row)] for row in tokens]
        count = tuple(map(len, known))
        if not max(count):
            return nothing(state)

        drafted_BK = sent([row + [0] * (max(count) - len(row)) for row in known], state.device)
        state.write_drafts(drafted_BK, count)
        like = torch.empty(*drafted_BK.shape, self.vocab, dtype=self.dtype, device=state.device)
        return Proposal(drafted_BK, one_hot(drafted_BK, like), count)


class Drafter:
    """Proposes up to `count` tokens a row. This base is regular sampling: it proposes nothing."""

    @property
    def forwards(self) -> int:
        return 0

    @property
    def device(self) -> torch.device | None:
        """Returns the draft model's device; None without a model on this rank."""
        return None

    @property
    def runner(self) -> ModelRunner | None:
        """Returns what reads prompts for the draft; None where nothing here does."""
        return None

    @property
    def name(self) -> str:
        """Returns what drafts, for messages."""
        return "the draft"

    def start(self, rows: int, capacity: int) -> None:
        """Begins a batch."""

    def prefill(self, state: State) -> None:
        """Feeds all of each prompt but its last token."""

    def refill(self, state: State, kept: dict[int, int]) -> None:
        """Prefills new prompts of these rows; of each the cache may keep so many tokens."""

    def limit(self, length: int) -> int:
        """Returns how many tokens it can draft for a text of this length."""
        return 0

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        """Returns `count` drafts a row, or fewer, written after its text, and what each was drawn from."""
        return nothing(state)

    def meanwhile(self, state: State, proposal: Proposal) -> None:
        """Works while the target verifies; for a draft on ranks of its own."""

    def roll_back(self, lengths: list[int]) -> None:
        """Drops what was not committed; the texts have these lengths."""

    def free(self) -> None:
        """Frees what it holds for the batch; it is not used afterwards."""

    def figures(self) -> dict[str, Any] | None:
        """Returns figures of a draft on ranks of its own, under the names of the JSON interface."""
        return None


class DraftModel(Drafter):
    """Runs the draft model. Subclasses sample from its logits, or only compute a share of them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        runner.limit = None  # see ModelRunner: a draft may mix both scales of positions

    @property
    def forwards(self) -> int:
        return self._runner.forwards

    @property
    def device(self) -> torch.device:
        return self._runner.model.device

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def name(self) -> str:
        return f"the draft {self._runner.model.name}"

    def start(self, rows: int, capacity: int) -> None:
        self._runner.start(rows, min(capacity, self._runner.model.context))

    def prefill(self, state: State) -> None:
        # A text that is too long to draft for is not read.
        ends = [length - 1 if self.limit(length) else 0 for length in state.lengths]
        self._runner.prefill(state.token_BS, ends)

    def refill(self, state: State, kept: dict[int, int]) -> None:
        lengths = {row: state.lengths[row] if self.limit(state.lengths[row]) else 1 for row in kept}
        self._runner.refill(state.token_BS, lengths, kept)

    def limit(self, length: int) -> int:
        return reach(self._runner.model.context, length)

    def roll_back(self, lengths: list[int]) -> None:
        self._runner.roll_back(lengths)

    def free(self) -> None:
        self._runner.free()

    def _next_ends(self, state: State, offset: int, count: tuple[int, ...]) -> list[int]:
        """Returns where the pass for draft number `offset` ends; rows without that draft are fed nothing."""
        return [
            length + offset if offset < wanted else cached
            for length, wanted, cached in zip(state.lengths, count, self._runner.cached, strict=True)
        ]


class ModelDrafter(DraftModel):
    """Samples from the draft model's own distribution, under the controls that the target has."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        super().__init__(runner)
        self._sampler = sampler

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        # K forwards, each fed the draft before it; the first also what the cache lacks of the text: the last
        # correction, or after full acceptance the last draft and the token after it.
        drawn = [self._step(state, offset, count) for offset in range(max(count))]
        return proposal_of(drawn, count) if drawn else nothing(state)

    def _step(self, state: State, offset: int, count: tuple[int, ...], slot: Slot | None = None) -> Drawn:
        """Draws draft number `offset` of each row that has one."""
        ends = self._next_ends(state, offset, count)
        logit_BV = self._runner.logits(state.token_BS, ends, [1] * state.rows)[:, 0]  # each row's last
        return self._sampler.draw(state, offset, count, logit_BV.to(state.device), slot)


class DraftShard(DraftModel):
    """Computes its share of a split draft model's forwards, in step with the rank that draws.

    It does not need the drawn tokens: that rank holds the whole embedding, and the all-reduce after each
    look-up sends the embedded rows here (models/assemble.py).
    """

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        for offset in range(max(count)):
            ends = self._next_ends(state, offset, count)
            self._runner.logits(state.token_BS, ends, [1] * state.rows)
        return Proposal(nothing(state).drafted_BK, None, count)


def proposal_of(drawn: list[Drawn], count: tuple[int, ...]) -> Proposal:
    """Returns a proposal of these drafts, the first of each row first."""
    probs_BKV = torch.stack([draft.probs_BV for draft in drawn], 1)
    drafted_BK = torch.stack([draft.token_B for draft in drawn], 1)
    return Proposal(drafted_BK, probs_BKV, count)


def reach(context: int, length: int) -> int:
    """Returns how many tokens a model of this context can draft for a text of this length.

    The last draft is drawn but never fed to it: a full context gives one more.
    """
    return max(0, context - length + 1)


def nothing(state: State) -> Proposal:
    """Returns the empty proposal, K = 0."""
    empty_B0 = torch.empty(state.rows, 0, dtype=torch.int64, device=state.device)
    return Proposal(empty_B0, None, (0,) * state.rows)


def certain_where(condition: Tensor, probs: Tensor) -> Tensor:
    """Returns the probabilities, made certain of token 0 where the condition holds."""
    probs = probs.masked_fill(condition[..., None], 0)
    probs[..., 0] += condition
    return probs
