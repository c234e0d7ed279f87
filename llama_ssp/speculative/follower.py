"""A rank that does not decide: it computes its part of the target, the draft or both, as it is told."""

from __future__ import annotations

import torch

from llama_ssp.distributed.roles import Roles
from llama_ssp.speculative.drafters.ahead import AheadDraftShard
from llama_ssp.speculative.drafters.local import Drafter
from llama_ssp.speculative.drafters.remote import SendingDrafter
from llama_ssp.speculative.engine import Engine, room_of, target_logits
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.round_protocol import FollowerProtocol, RoundResult
from llama_ssp.speculative.state import Prompt, Proposal, State


class Follower:
    """Has the leader's calls, so that one loop drives every rank; what its caller wishes it does not hear."""

    def __init__(
        self,
        target: ModelRunner | None,
        drafter: Drafter | None,
        crew: Roles,
        context: int,
        device: torch.device,
    ) -> None:
        """`target` and `drafter` are None where this rank has no part in them."""
        self._target, self._drafter = target, drafter
        self._rounds = FollowerProtocol(crew)
        self._enter = crew.everyone.enter
        self._device = device
        self.context = context

    @property
    def target_forwards(self) -> int:
        return self._target.forwards if self._target else 0

    @property
    def draft_forwards(self) -> int:
        return self._drafter.forwards if self._drafter else 0

    @property
    def overlap(self) -> None:
        """The leader knows."""
        return None

    def prefill(self, prompts: list[Prompt], max_new_tokens: int, longest: int = 0) -> State:
        """The batch's state, with this rank's caches filled."""
        self._enter("prefill")
        state = State(prompts, room_of(prompts, max_new_tokens, self.context, longest), self._device)
        if self._target:
            self._target.start(state.rows, state.capacity)
            self._target.warm(state.token_BS, [length - 1 for length in state.lengths])
        if self._drafter:
            self._drafter.start(state.rows, state.capacity)
            self._drafter.warm(state)
        return state

    def admit(self, state: State, row: int, prompt: Prompt) -> None:
        """Puts another prompt into a row, as the leader does after the same decisions."""
        state.replace(row, prompt)
        for part in (self._target, self._drafter):
            if part:
                part.forget(row)

    def read(self, state: State, row: int, count: int) -> None:
        """Reads the next `count` tokens of a new prompt, while the other rows rest."""
        self.settle()  # passes between rounds come after the last one's decision, on every rank
        self._enter("prefill")
        end = state.read(row, count)
        if self._target:
            self._target.expect(row, state.lengths[row])
            self._target.read(state.token_BS, row, end)
        if self._drafter:
            self._drafter.read(state, row, end)

    def wait(self) -> None:
        """Followers have no clocks."""

    def draft(self, state: State, wanted: list[int]) -> Proposal:
        """Takes part in drafting, if it does, then hears what was drafted."""
        self._enter("draft", self._rounds.begin())
        if self._drafter is None:
            return self._rounds.drafts(state)
        own = self._drafter.propose(state, self._rounds.count(state))
        if self._target is None:
            return own
        proposal = self._rounds.drafts(state)
        if (
            own.draft_BKV is not None
        ):  # a copy of the draft may have drawn otherwise, by rounding: the leader's tokens stand
            alike = [
                _alike(*row)
                for row in zip(own.drafted_BK.tolist(), proposal.drafted_BK.tolist(), strict=True)
            ]
            self._drafter.roll_back([length + n + 1 for length, n in zip(state.lengths, alike, strict=True)])
        return proposal

    def verify(self, state: State, proposal: Proposal) -> RoundResult:
        """Takes part in the target's forward, or drafts ahead in the meantime; then hears the decision."""
        self._enter("verify", self._rounds.round)
        if self._target:
            target_logits(self._target, state, proposal.count)
        if isinstance(self._drafter, SendingDrafter | AheadDraftShard):
            self._drafter.meanwhile(state, proposal)
        verdict = self._rounds.verdict(state)
        self._enter("commit", self._rounds.round)
        return verdict

    def roll_back(self, state: State) -> None:
        """Every cache forgets what was not committed."""
        for part in (self._target, self._drafter):
            if part:
                part.roll_back(state.lengths)

    def settle(self) -> None:
        """No round follows."""
        self._rounds.settle()


def _alike(own: list[int], told: list[int]) -> int:
    """How many tokens from the start are the same."""
    return next((i for i, (a, b) in enumerate(zip(own, told, strict=True)) if a != b), len(own))


AnyEngine = Engine | Follower  # one rank's: the leader's, or another's
