"""Watches an engine's rounds: what was declared, drawn and kept. It changes nothing.

Probabilities are known on the leader only; which texts were verified, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from llama_ssp.speculative.array_ops import Array
from llama_ssp.speculative.decision import block_of
from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.siblings import CHAIN
from llama_ssp.speculative.state import Proposal, State
from llama_ssp.speculative.verification import DraftBlock, Rule, TreeRule
from llama_ssp.tasks.certify.children import children, expected_siblings, siblings_that_stand
from llama_ssp.tasks.certify.replay import Decisions

UNKNOWN = torch.empty(0)
CERTAIN = 1 - 1e-9  # a distribution this sure of a token says nothing about how it was drawn


@dataclass(frozen=True)
class Round:
    """One row's round: its text with the drafts behind it, and probabilities, empty where they are unknown.

    `text` ends with the `count` drafts, of which `accepted` stand, followed by `token`; `key` stands for the
    prompt's id, as in every draw. `target_WV` are the count + 1 distributions that verification used,
    `draft_KV` those declared for the drafts, both in fp64; `logit_WV` are the logits behind `target_WV`.
    `siblings` has those of each draft, and `behind` for each a round without drafts: what the target says
    after the drafts before it, and itself.
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
    siblings: tuple[tuple[int, ...], ...] = ()
    behind: tuple[tuple[Round, ...], ...] = ()

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.text[len(self.text) - self.count :]


@dataclass
class PositionCounts:
    """By position: `tried` tokens that the rule decided, how many `stood`, and the mean (`expected`) and
    variance (`spread`) of that number."""

    tried: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)

    def see(self, position: int, stood: bool, chance: float) -> None:
        for numbers in (self.tried, self.stood, self.expected, self.spread):
            numbers += [0] * (position + 1 - len(numbers))
        self.tried[position] += 1
        self.stood[position] += stood
        self.expected[position] += chance
        self.spread[position] += chance * (1 - chance)


@dataclass
class Witness:
    """Counts of all rounds, and whole rounds as long as there is `room` for more.

    A draft has at most `most` siblings; sibling j of draft i is counted at position `most` * i + j. `places`
    says where each draft and sibling lies in its declared distribution. Without `counting` decisions are
    replayed, but nothing is counted: for rounds without a forward.
    """

    rule: Rule
    seed: int
    most: int = 0
    room: int = 0
    counting: bool = True
    rounds: list[Round] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    impossible: int = 0
    drafted: int = 0
    drafts: PositionCounts = field(default_factory=PositionCounts)
    siblings: PositionCounts = field(default_factory=PositionCounts)

    @property
    def behind(self) -> list[Round]:
        """What the target says behind the rounds' siblings."""
        return [one for seen in self.rounds for one in chain(*seen.behind)]

    def __post_init__(self) -> None:
        self._uniforms = np.random.Generator(np.random.Philox(self.seed))
        self.decisions = Decisions(self.rule, self.seed, self.most)

    def see(
        self, state: State, proposal: Proposal, result: RoundResult, probs_BWV: Tensor | None,
        logit_BWV: Tensor | None,
    ) -> None:  # fmt: skip
        """One round over the batch, as `engine.RoundWatch` has it."""
        rows = [row for row, count in enumerate(proposal.count) if count and not result.damaged[row]]
        block = None
        if probs_BWV is not None and proposal.k:
            block = block_of(proposal, probs_BWV)
            self.decisions.see(state, block, result)
            if self.counting:
                self._tally(block, rows, result.accepted)
                self._tally_siblings(block, rows, result)
                self._place(block, rows)
        for row in rows[: max(0, self.room - len(self.rounds))]:
            self.rounds.append(_round(state, proposal, result, row, block, logit_BWV))

    def _tally(self, block: DraftBlock, rows: list[int], accepted: list[int]) -> None:
        """Counts what stood at each position, and what the rule let expect given the drafts before it."""
        chance_BK = self.rule.expected(block).clamp(0, 1).tolist()
        for row in rows:
            for position in range(int(block.count_B[row])):
                if self.rule.whole_block or accepted[row] >= position:
                    self.drafts.see(position, accepted[row] > position, chance_BK[row][position])

    def _tally_siblings(self, block: DraftBlock, rows: list[int], result: RoundResult) -> None:
        """The same of siblings: of each all that was drawn before it is given."""
        if block.branches is None:
            return
        chance_BKS = expected_siblings(block).clamp(0, 1).tolist()
        drawn_BKS = torch.stack([drawn_BK for _, _, drawn_BK in children(block)][1:], -1)
        stood = siblings_that_stand(block, result)
        counted = set(rows)
        for row, i, j in drawn_BKS.nonzero().tolist():
            if row in counted:
                self.siblings.see(self.most * i + j, stood[row] == (i, j), chance_BKS[row][i][j])

    def _place(self, block: DraftBlock, rows: list[int]) -> None:
        """Where each draft lies in its declared distribution, likeliest tokens first: uniform, if it was
        drawn from it. The same of siblings, which are drawn without the tokens before them.

        A distribution that is certain of its token places it anywhere; it only shows whether it was that
        token.
        """
        counted = set(rows)
        for probs_BKV, token_BK, real_BK in children(block):
            drawn_BK = probs_BKV.gather(2, token_BK[..., None])[..., 0]
            likelier_BK = torch.where(probs_BKV > drawn_BK[..., None], probs_BKV, 0).sum(-1)
            tied_BK = torch.where(probs_BKV == drawn_BK[..., None], probs_BKV, 0).sum(-1)
            found = torch.stack([drawn_BK, likelier_BK, tied_BK], -1).tolist()
            for row, position in real_BK.nonzero().tolist():
                if row in counted:
                    self._place_one(*found[row][position])

    def _place_one(self, own: float, before: float, tied: float) -> None:
        self.drafted += 1
        if own <= 0:
            self.impossible += 1
        elif own < CERTAIN:
            self.places.append(min(1.0, before + tied * float(self._uniforms.random())))


def _round(
    state: State, proposal: Proposal, result: RoundResult, row: int, block: DraftBlock | None,
    logit_BWV: Tensor | None,
) -> Round:  # fmt: skip
    """A row's round; without `block` and logits where these are unknown."""
    count, siblings, text = proposal.count[row], proposal.siblings, tuple(state.texts[row])
    numbers = siblings.numbers[row] if siblings else [CHAIN] * (count + 1)
    columns = [column for column, number in enumerate(numbers) if number == CHAIN]
    most, each = (siblings.most, siblings.each[row]) if siblings else (0, 0)
    token_KS = siblings.token_BKS[row].tolist() if siblings else []

    def behind(i: int, j: int) -> Round:
        number, probs_BKSV = most * i + j, block.branches.target_BKSV if block and block.branches else None
        return Round(
            prompt_length=state.prompt_lengths[row],
            text=(*text, *result.drafted[row][:i], token_KS[i][j]),
            count=0,
            accepted=0,
            target_WV=UNKNOWN if probs_BKSV is None else _kept(probs_BKSV[row, i], [j]),
            draft_KV=UNKNOWN,
            logit_WV=UNKNOWN if logit_BWV is None else _kept(logit_BWV[row], [numbers.index(number)]),
        )

    return Round(
        prompt_length=state.prompt_lengths[row],
        text=(*text, *result.drafted[row]),
        count=count,
        accepted=result.accepted[row],
        target_WV=_kept(block.target_BWV[row], range(count + 1)) if block else UNKNOWN,
        draft_KV=_kept(block.draft_BKV[row], range(count)) if block else UNKNOWN,
        key=state.keys[row],
        token=result.token[row],
        logit_WV=UNKNOWN if logit_BWV is None else _kept(logit_BWV[row], columns),
        siblings=tuple(tuple(token_KS[i][:each]) for i in range(count)) if each else (),
        behind=tuple(tuple(behind(i, j) for j in range(each)) for i in range(count)) if each else (),
    )


def _kept(tensor_WV: Tensor, columns: Sequence[int]) -> Tensor:
    return tensor_WV[list(columns)].to("cpu", copy=True)


class KeepsEveryDraft(TreeRule):
    """The negative control, a wrong rule: every draft stands, with siblings and without."""

    name = "keeps every draft"

    def accept_chances(self, block: DraftBlock) -> Array:
        column_K = torch.arange(block.k, device=block.count_B.device)
        return (column_K < block.count_B[:, None]).to(torch.float64)

    def tree_chances(self, block: DraftBlock) -> Array:
        chance_BKC = super().tree_chances(block)
        return torch.cat([self.accept_chances(block)[..., None], chance_BKC[..., 1:]], -1)
