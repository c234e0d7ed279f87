"""Runs a rank that does not decide: it computes its part of the target, of the draft, or of both."""

from torch import Tensor

from llama_ssp.speculative.decision import Decision
from llama_ssp.speculative.drafters.local import Drafter
from llama_ssp.speculative.engine import RankEngine, target_logits
from llama_ssp.speculative.round_protocol import FollowerProtocol
from llama_ssp.speculative.state import Proposal, State


class Follower(RankEngine):
    """Runs rounds on every rank but the leader, which broadcasts what it drafts and commits."""

    _rounds: FollowerProtocol
    _protocol = FollowerProtocol
    _agreed_B: Tensor | None = None  # how many drafts of a copy of the draft model are the leader's

    def draft(self, state: State, wanted: list[int]) -> Proposal:
        """Takes part in drafting, if this rank does, then receives the leader's drafts."""
        self._enter("draft", self._rounds.decided + 1)
        if self.drafter is None:
            return self._rounds.drafts(state)

        drawn_here = self.drafter.propose(state, self._rounds.count(state))
        if self.target is None:
            return drawn_here

        proposal = self._rounds.drafts(state)
        if drawn_here.draft_BKV is not None:
            # A copy of the draft model may have drawn other tokens, by rounding; those of the leader are
            # submitted.
            self._agreed_B = (drawn_here.drafted_BK == proposal.drafted_BK).long().cumprod(1).sum(1)
        return proposal

    def verify(self, state: State, proposal: Proposal) -> Decision:
        """Takes part in the target's forward, or drafts ahead meanwhile; then receives the decision."""
        self._enter("verify", self._rounds.decided + 1)
        if self.target:
            target_logits(self.target, state, proposal.count)  # for its part of the sums over ranks
        if self.drafter:
            self._keep_agreed(state, self.drafter)
            self.drafter.meanwhile(state, proposal)
        decision = self._rounds.result(state)
        self.observer.decided(state, proposal, decision, None, None)
        self._enter("commit", self._rounds.decided)
        return decision

    def _keep_agreed(self, state: State, drafter: Drafter) -> None:
        """Lets the cache of a copy of the draft model keep keys of drafts up to the first that differs.

        Only now, when the target's pass is queued: the host waits for the device to know them.
        """
        if self._agreed_B is not None:
            agreed = self._agreed_B.tolist()
            self._agreed_B = None
            drafter.roll_back([length + n + 1 for length, n in zip(state.lengths, agreed, strict=True)])

    def synchronize(self) -> None:
        """Followers have no clocks."""
