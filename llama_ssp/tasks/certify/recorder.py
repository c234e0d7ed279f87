"""Watching an engine at work: what it declared, what it drew, what it kept. It changes nothing.

The distributions are there on the rank that decides alone; which texts were looked at is known on all of
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from llama_ssp.errors import DistributedError
from llama_ssp.speculative.array_ops import Array
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.follower import AnyEngine, Follower
from llama_ssp.speculative.native import HostDraws
from llama_ssp.speculative.rng import Draws
from llama_ssp.speculative.round_protocol import RoundResult
from llama_ssp.speculative.state import Proposal, State
from llama_ssp.speculative.verification import Block, BlockRule, CoupledRule, Rule, TokenRule, meeting
from llama_ssp.tasks.certify.replay import Decisions

CERTAIN = 1 - 1e-9  # a distribution this sure of a token says nothing about how it was drawn


@dataclass(frozen=True)
class Round:
    """One row's round: its text with the drafts behind it, and the distributions where they are known.

    `text` ends with the `count` drafts, of which `accepted` stand, with `token` behind them; `key` stands for
    the prompt's id, as in every draw. `target_WV` has the count + 1 distributions that verification used,
    `draft_KV` the declared distributions of the drafts, both in fp64; `logit_WV` the logits behind
    `target_WV`.
    """

    prompt_length: int
    text: tuple[int, ...]
    count: int
    accepted: int
    target_WV: Tensor | None
    draft_KV: Tensor | None
    key: int = 0
    token: int = 0
    logit_WV: Tensor | None = None

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.text[len(self.text) - self.count :]


@dataclass
class Witness:
    """What was seen of all rounds, and whole rounds for as long as there is room for more.

    The name of the rule says by which theory acceptance is expected: the block rule carries the chance that
    all drafts so far stand on to the next, the others start anew at every draft.
    """

    rule: str
    seed: int
    room: int = 0
    rounds: list[Round] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    impossible: int = 0
    drafted: int = 0
    tried: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)

    @property
    def carries(self) -> bool:
        return self.rule == BlockRule.name

    def __post_init__(self) -> None:
        self._uniforms = np.random.Generator(np.random.Philox(self.seed))
        self.decisions = Decisions(self.seed)

    def see(
        self, state: State, proposal: Proposal, verdict: RoundResult, block: Block | None,
        logit_BWV: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One round over the batch; `block` and `logit_BWV` are there where this rank has decided."""
        rows = [row for row, count in enumerate(proposal.count) if count and not verdict.damaged[row]]
        if block is not None:
            self._tally(block, rows, verdict.accepted)
            self._place(block, rows, verdict.accepted)
        for row in rows[: max(0, self.room - len(self.rounds))]:
            count = proposal.count[row]
            self.rounds.append(
                Round(
                    prompt_length=state.prompt_lengths[row],
                    text=(*state.texts[row], *verdict.drafted[row]),
                    count=count,
                    accepted=verdict.accepted[row],
                    target_WV=None
                    if block is None
                    else block.target_BWV[row, : count + 1].to("cpu", copy=True),
                    draft_KV=None if block is None else block.draft_BKV[row, :count].to("cpu", copy=True),
                    key=state.keys[row],
                    token=verdict.token[row],
                    logit_WV=None if logit_BWV is None else logit_BWV[row, : count + 1].to("cpu", copy=True),
                )
            )

    def _tally(self, block: Block, rows: list[int], accepted: list[int]) -> None:
        """What stood at each position, beside what had to be expected given the drafts before it."""
        weight_B, count = torch.ones_like(block.target_BWV[:, 0, 0]), block.count_B.tolist()
        met_BK = meeting(block) if self.rule == CoupledRule.name else None
        for position in range(block.k):
            target_BV, draft_BV = block.target_BWV[:, position], block.draft_BKV[:, position]
            kept_B = torch.minimum(weight_B[:, None] * target_BV, draft_BV).sum(-1)
            chance = (kept_B if met_BK is None else met_BK[:, position]).clamp(max=1).tolist()
            if position == len(self.tried):
                for tally in (self.tried, self.stood, self.expected, self.spread):
                    tally.append(0)
            for row in rows:
                reached = self.carries or accepted[row] >= position
                if reached and count[row] > position:
                    self.tried[position] += 1
                    self.stood[position] += accepted[row] > position
                    self.expected[position] += chance[row]
                    self.spread[position] += chance[row] * (1 - chance[row])
            if self.carries:
                token_B1 = block.drafted_BK[:, position, None]
                drawn_B = draft_BV.gather(1, token_B1)[:, 0]
                kept_B = weight_B * target_BV.gather(1, token_B1)[:, 0]
                weight_B = torch.where(drawn_B > 0, (kept_B / drawn_B).clamp(max=1), 0)

    def _place(self, block: Block, rows: list[int], accepted: list[int]) -> None:
        """Where each draft lies in its declared distribution, likeliest tokens first: uniform, if drawn from
        it.

        A distribution that is certain of its token places it anywhere; it is only asked whether it was that
        one. A coupled draft behind one that fell says nothing of its own: the next round drafts there once
        more, with the same noise.
        """
        drawn_BK = block.draft_BKV.gather(2, block.drafted_BK[..., None])[..., 0]
        likelier_BK = torch.where(block.draft_BKV > drawn_BK[..., None], block.draft_BKV, 0).sum(-1)
        tied_BK = torch.where(block.draft_BKV == drawn_BK[..., None], block.draft_BKV, 0).sum(-1)
        drawn, likelier, equal = drawn_BK.tolist(), likelier_BK.tolist(), tied_BK.tolist()
        for row in rows:
            for position in range(int(block.count_B[row])):
                own, before, tied = drawn[row][position], likelier[row][position], equal[row][position]
                self.drafted += 1
                if own <= 0:
                    self.impossible += 1
                elif own < CERTAIN and (self.rule != CoupledRule.name or accepted[row] >= position):
                    self.places.append(min(1.0, before + tied * float(self._uniforms.random())))


class RuledEngine(Engine):
    """An engine that decides by another rule; all else is the given one's."""

    def __init__(self, engine: Engine, rule: Rule) -> None:
        vars(self).update(vars(engine))
        self._rule = rule


class WatchedEngine(RuledEngine):
    """An engine whose rounds a witness sees."""

    def __init__(self, engine: Engine, witness: Witness) -> None:
        super().__init__(engine, engine._rule)
        self.witness = witness
        self._seen: Block | None = None
        self._logit_BWV: Tensor | None = None

    @property
    def rule(self) -> Rule:
        """The rule that decides."""
        return self._rule

    @property
    def draws(self) -> Draws:
        return self._draws

    def verify(self, state: State, proposal: Proposal) -> RoundResult:
        self._seen = self._logit_BWV = None
        verdict = super().verify(state, proposal)
        self.witness.see(state, proposal, verdict, self._seen, self._logit_BWV)
        if self._seen is not None:
            self.witness.decisions.see(self._rule, self._draws, state, self._seen, verdict)
        self._logit_BWV = None
        return verdict

    def decided(self, state: State, proposal: Proposal, logit_BWV: Tensor) -> RoundResult:
        """What this engine decides on these logits, without a pass; replayed as any other decision is."""
        self._seen = None
        verdict = super()._judge(state, proposal, logit_BWV)
        if self._seen is not None:
            self.witness.decisions.see(self._rule, self._draws, state, self._seen, verdict)
        return verdict

    def _judge(self, state: State, proposal: Proposal, logit_BWV: Tensor) -> RoundResult:
        self._logit_BWV = logit_BWV
        return super()._judge(state, proposal, logit_BWV)

    def _block(self, state: State, proposal: Proposal, probs_BWV: Tensor) -> Block:
        self._seen = super()._block(state, proposal, probs_BWV)
        return self._seen

    def _by_kernel(self, draws: HostDraws, state: State, proposal: Proposal, probs_BWV: Tensor) -> Tensor:
        if proposal.k:
            self._block(state, proposal, probs_BWV)
        return super()._by_kernel(draws, state, proposal, probs_BWV)


class WatchedFollower(Follower):
    """Another rank's engine, whose witness sees the texts and no law."""

    def __init__(self, engine: Follower, witness: Witness) -> None:
        vars(self).update(vars(engine))
        self.witness = witness

    @property
    def rule(self) -> Rule:
        raise DistributedError("only the leader has a rule", fix="report it")

    @property
    def draws(self) -> Draws:
        raise DistributedError("only the leader draws what is committed", fix="report it")

    def verify(self, state: State, proposal: Proposal) -> RoundResult:
        verdict = super().verify(state, proposal)
        self.witness.see(state, proposal, verdict, None)
        return verdict


def watched(engine: AnyEngine, witness: Witness) -> WatchedEngine | WatchedFollower:
    """The engine of any rank, with its rounds seen."""
    return WatchedEngine(engine, witness) if isinstance(engine, Engine) else WatchedFollower(engine, witness)


class KeepsEveryDraft(TokenRule):
    """The negative control: a rule that is wrong on purpose. Whatever was drafted stands."""

    name = "keeps every draft"

    def accept_chances(self, block: Block) -> Array:
        column_K = torch.arange(block.k, device=block.count_B.device)
        return (column_K < block.count_B[:, None]).to(torch.float64)
