"""Watches an engine's rounds: what was declared, drawn and kept. It changes nothing.

Probabilities are known on the leader only; which texts were verified, on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from llama_ssp.speculative.array_ops import Array
from llama_ssp.speculative.decision import block_of
from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.state import Proposal, State
from llama_ssp.speculative.verification import Block, Rule, TokenRule
from llama_ssp.tasks.certify.replay import Decisions

UNKNOWN = torch.empty(0)
CERTAIN = 1 - 1e-9  # a distribution this sure of a token says nothing about how it was drawn


@dataclass(frozen=True)
class Round:
    """One row's round: its text with the drafts behind it, and probabilities, empty where they are unknown.

    `text` ends with the `count` drafts, of which `accepted` stand, followed by `token`; `key` stands for the
    prompt's id, as in every draw. `target_WV` are the count + 1 distributions that verification used,
    `draft_KV` those declared for the drafts, both in fp64; `logit_WV` are the logits behind `target_WV`.
    """

    prompt_length: int
    text: tuple[int, ...]
    count: int
    accepted: int
    target_WV: Tensor
    draft_KV: Tensor
    key: int = 0
    token: int = 0
    logit_WV: Tensor = UNKNOWN

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.text[len(self.text) - self.count :]


@dataclass
class Witness:
    """Counts of all rounds, and whole rounds as long as there is `room` for more.

    By position: `tried` drafts that the rule decided, how many `stood`, and the mean (`expected`) and
    variance (`spread`) of that number. `places` says where each draft lies in its declared distribution.
    Without `counting` decisions are replayed, but nothing is counted: for rounds without a forward.
    """

    rule: Rule
    seed: int
    room: int = 0
    counting: bool = True
    rounds: list[Round] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    impossible: int = 0
    drafted: int = 0
    tried: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._uniforms = np.random.Generator(np.random.Philox(self.seed))
        self.decisions = Decisions(self.rule, self.seed)

    def see(
        self, state: State, proposal: Proposal, result: RoundResult, probs_BWV: Tensor | None,
        logit_BWV: Tensor | None,
    ) -> None:  # fmt: skip
        """One round over the batch, as `engine.Watch` has it."""
        rows = [row for row, count in enumerate(proposal.count) if count and not result.damaged[row]]
        block = None
        if probs_BWV is not None and proposal.k:
            block = block_of(proposal, probs_BWV)
            self.decisions.see(state, block, result)
            if self.counting:
                self._tally(block, rows, result.accepted)
                self._place(block, rows, result.accepted)
        for row in rows[: max(0, self.room - len(self.rounds))]:
            count = proposal.count[row]
            self.rounds.append(
                Round(
                    prompt_length=state.prompt_lengths[row],
                    text=(*state.texts[row], *result.drafted[row]),
                    count=count,
                    accepted=result.accepted[row],
                    target_WV=_kept(block.target_BWV, row, count + 1) if block else UNKNOWN,
                    draft_KV=_kept(block.draft_BKV, row, count) if block else UNKNOWN,
                    key=state.keys[row],
                    token=result.token[row],
                    logit_WV=UNKNOWN if logit_BWV is None else _kept(logit_BWV, row, count + 1),
                )
            )

    def _tally(self, block: Block, rows: list[int], accepted: list[int]) -> None:
        """Counts what stood at each position, and what the rule let expect given the drafts before it."""
        chance_BK = self.rule.expected(block).clamp(0, 1).tolist()
        for tally in (self.tried, self.stood, self.expected, self.spread):
            tally += [0] * (block.k - len(tally))
        for row in rows:
            for position in range(int(block.count_B[row])):
                if self.rule.whole_block or accepted[row] >= position:
                    chance = chance_BK[row][position]
                    self.tried[position] += 1
                    self.stood[position] += accepted[row] > position
                    self.expected[position] += chance
                    self.spread[position] += chance * (1 - chance)

    def _place(self, block: Block, rows: list[int], accepted: list[int]) -> None:
        """Where each draft lies in its declared distribution, likeliest tokens first: uniform, if it was
        drawn from it.

        A distribution that is certain of its token places it anywhere; it only shows whether it was that
        token. With shared noise a draft behind a rejected one says nothing new: the next round draws there
        again, with the same noise.
        """
        drawn_BK = block.draft_BKV.gather(2, block.drafted_BK[..., None])[..., 0]
        likelier_BK = torch.where(block.draft_BKV > drawn_BK[..., None], block.draft_BKV, 0).sum(-1)
        tied_BK = torch.where(block.draft_BKV == drawn_BK[..., None], block.draft_BKV, 0).sum(-1)
        found = torch.stack([drawn_BK, likelier_BK, tied_BK], -1).tolist()
        for row in rows:
            for position in range(int(block.count_B[row])):
                own, before, tied = found[row][position]
                self.drafted += 1
                if own <= 0:
                    self.impossible += 1
                elif own < CERTAIN and (not self.rule.shared_noise or accepted[row] >= position):
                    self.places.append(min(1.0, before + tied * float(self._uniforms.random())))


def _kept(tensor: Tensor, row: int, count: int) -> Tensor:
    return tensor[row, :count].to("cpu", copy=True)


class KeepsEveryDraft(TokenRule):
    """The negative control, a wrong rule: every draft stands."""

    name = "keeps every draft"

    def accept_chances(self, block: Block) -> Array:
        column_K = torch.arange(block.k, device=block.count_B.device)
        return (column_K < block.count_B[:, None]).to(torch.float64)
