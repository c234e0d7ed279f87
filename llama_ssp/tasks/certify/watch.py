"""Watches an engine's rounds: decides every one again, and keeps some. It changes nothing.

Probabilities are known on the leader alone; which texts were verified, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Protocol

import torch
from torch import Tensor

from llama_ssp.pair.batches import TimedRun, require_numbers, texts_of
from llama_ssp.speculative.array_ops import Array
from llama_ssp.speculative.decision import block_of
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.siblings import CHAIN
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.speculative.verification import DraftBlock, TreeRule
from llama_ssp.tasks.certify.decisions import Decisions

UNKNOWN = torch.empty(0)


@dataclass(frozen=True)
class Round:
    """One row of a round; probabilities and logits are empty where they are unknown.

    `text` ends with the `count` drafts. `target_WV` (W = count + 1) are the distributions that verification
    used, `draft_KV` those declared for the drafts, both in fp64; `logit_WV` are the logits of `target_WV`.
    `siblings` are those of each draft; `behind` has a round without drafts for each of them: the target's
    distribution after the drafts before it and itself.
    """

    prompt_length: int
    text: tuple[int, ...]
    count: int
    target_WV: Tensor
    draft_KV: Tensor
    logit_WV: Tensor = UNKNOWN
    siblings: tuple[tuple[int, ...], ...] = ()
    behind: tuple[tuple[Round, ...], ...] = ()

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.text[len(self.text) - self.count :]

    def prefix(self, at: int) -> tuple[int, ...]:
        """The text before position `at` of the round."""
        return self.text[: len(self.text) - self.count + at]


@dataclass
class Watch:
    """Keeps `room` rounds, a random choice of all that had drafts, the same on every rank."""

    decisions: Decisions
    room: int = 0
    rounds: list[Round] = field(default_factory=list)
    _seen: int = 0
    _random: Random = field(default_factory=lambda: Random(0))

    @property
    def behind(self) -> list[Round]:
        """The positions behind the siblings of the rounds kept."""
        return [position for seen in self.rounds for position in chain(*seen.behind)]

    def see(
        self, state: State, proposal: Proposal, result: RoundResult, probs_BWV: Tensor | None,
        logit_BWV: Tensor | None,
    ) -> None:  # fmt: skip
        """Looks at one round over the batch, before it is committed: an `engine.RoundWatch`."""
        if probs_BWV is not None:
            self.decisions.see(state, proposal, result, probs_BWV)
        for row, count in enumerate(proposal.count):
            if not count or result.damaged[row]:
                continue
            self._seen += 1
            place = self._random.randrange(self._seen)  # of a reservoir
            if len(self.rounds) < self.room:
                self.rounds.append(_round(state, proposal, result, row, probs_BWV, logit_BWV))
            elif place < self.room:
                self.rounds[place] = _round(state, proposal, result, row, probs_BWV, logit_BWV)


def _round(
    state: State, proposal: Proposal, result: RoundResult, row: int, probs_BWV: Tensor | None,
    logit_BWV: Tensor | None,
) -> Round:  # fmt: skip
    count, siblings, text = proposal.count[row], proposal.siblings, tuple(state.texts[row])
    block = None if probs_BWV is None else block_of(proposal, probs_BWV)
    numbers = siblings.numbers[row] if siblings else [CHAIN] * (count + 1)
    columns = [column for column, number in enumerate(numbers) if number == CHAIN]
    max_siblings, each = (siblings.most, siblings.each[row]) if siblings else (0, 0)
    token_KS = siblings.token_BKS[row].tolist() if siblings else []

    def behind(i: int, j: int) -> Round:
        branches, number = block.branches if block else None, max_siblings * i + j
        return Round(
            prompt_length=state.prompt_lengths[row],
            text=(*text, *result.drafted[row][:i], token_KS[i][j]),
            count=0,
            target_WV=_copied(branches.target_BKSV[row, i] if branches else None, [j]),
            draft_KV=UNKNOWN,
            logit_WV=_copied(None if logit_BWV is None else logit_BWV[row], [numbers.index(number)]),
        )

    return Round(
        prompt_length=state.prompt_lengths[row],
        text=(*text, *result.drafted[row]),
        count=count,
        target_WV=_copied(block.target_BWV[row] if block else None, range(count + 1)),
        draft_KV=_copied(block.draft_BKV[row] if block else None, range(count)),
        logit_WV=_copied(None if logit_BWV is None else logit_BWV[row], columns),
        siblings=tuple(tuple(token_KS[i][:each]) for i in range(count)) if each else (),
        behind=tuple(tuple(behind(i, j) for j in range(each)) for i in range(count)) if each else (),
    )


def _copied(tensor_WV: Tensor | None, columns: Sequence[int]) -> Tensor:
    return UNKNOWN if tensor_WV is None else tensor_WV[list(columns)].to("cpu", copy=True)


class Sampler(Protocol):
    """Continues prompts. A black box, such as another library's `generate`, is judged by its texts alone."""

    name: str

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """Returns the new tokens of each prompt, its end token included; each prompt draws for itself."""


@dataclass
class EngineSampler:
    """Samples with an engine, batch by batch, counted and timed; `watch` looks at its rounds, if given.

    `rows` is the number of rows of its largest batch.
    """

    name: str
    engine: RankEngine
    lookahead: Callable[[int], DraftLength]
    ends: frozenset[int]
    batch_size: int
    advance: Callable[[int], None] = lambda _: None
    watch: Watch | None = None
    counts: Counts = field(default_factory=Counts)
    rows: int = 0

    def __post_init__(self) -> None:
        self.engine.watch = self.watch.see if self.watch else None

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        result: list[list[int]] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = list(prompts[first : first + self.batch_size])
            run = TimedRun(self.engine, batch, max_new_tokens, self.counts)
            state = run.state
            for _ in run.rounds(Limits(max_new_tokens, self.ends), self.lookahead(state.rows)):
                pass
            self.rows = max(self.rows, state.rows)
            require_numbers(*texts_of(state))
            result += [state.generated(row) for row in range(state.rows)]
            self.advance(state.rows)
        return result


class KeepsEveryDraft(TreeRule):
    """Keeps every draft, siblings or not: the wrong rule that the negative control samples with."""

    name = "keeps every draft"

    def accept_chances(self, block: DraftBlock) -> Array:
        column_K = torch.arange(block.k, device=block.count_B.device)
        return (column_K < block.count_B[:, None]).to(torch.float64)

    def tree_chances(self, block: DraftBlock) -> Array:
        chance_BKC = super().tree_chances(block)
        return torch.cat([self.accept_chances(block)[..., None], chance_BKC[..., 1:]], -1)
