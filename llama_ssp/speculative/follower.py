"""A rank that does not decide: it computes its part of the target, of the draft, or of both."""

from llama_ssp.speculative.decision import Decision
from llama_ssp.speculative.engine import RankEngine, target_logits
from llama_ssp.speculative.round_protocol import FollowerProtocol
from llama_ssp.speculative.state import Proposal, State


class Follower(RankEngine):
    """The engine of every rank but the leader. The leader broadcasts what it drafts and commits."""

    _rounds: FollowerProtocol
    _protocol = FollowerProtocol

    def draft(self, state: State, wanted: list[int]) -> Proposal:
        """Takes part in drafting, if this rank does, then receives the leader's drafts."""
        self._enter("draft", self._rounds.decided + 1)
        if self.drafter is None:
            return self._rounds.drafts(state)
        own_proposal = self.drafter.propose(state, self._rounds.count(state))
        if self.target is None:
            return own_proposal
        proposal = self._rounds.drafts(state)
        if own_proposal.draft_BKV is not None:
            # A copy of the draft model may have drawn other tokens, by rounding; the leader's count.
            agreed = (own_proposal.drafted_BK == proposal.drafted_BK).long().cumprod(1).sum(1).tolist()
            self.drafter.roll_back([length + n + 1 for length, n in zip(state.lengths, agreed, strict=True)])
        return proposal

    def verify(self, state: State, proposal: Proposal) -> Decision:
        """Takes part in the target's forward, or drafts ahead meanwhile; then receives the decision."""
        self._enter("verify", self._rounds.decided + 1)
        if self.target:
            target_logits(self.target, state, proposal.count)
        if self.drafter:
            self.drafter.meanwhile(state, proposal)
        decision = self._rounds.result(state)
        self.observer.decided(state, proposal, decision, None, None)
        self._enter("commit", self._rounds.decided)
        return decision

    def synchronize(self) -> None:
        """Followers have no clocks."""
