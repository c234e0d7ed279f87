"""Makes ranks agree: the leader decides and broadcasts; the others derive all they do from its messages.

A round has one message to the ranks of the target: the last round's decision, and this round's drafts. Ranks
that take part in drafting get one before it: the decision, and how many tokens to draft. So equal seeds or
equal rounding are never relied on. Between GPUs the message holds no drafts: it is sent while they are
drawn, and a sum over the ranks, after it, brings them from GPU to GPU. So the leader's host reads no drafts,
and waits for its GPU once a round, for the decision. Each message carries the number of decided rounds and a
checksum of the lengths of the leader's texts; a rank where either differs stops the run.
"""

import logging
from abc import ABC, abstractmethod

import torch

from llama_ssp.distributed.comm import LeaderChannel, Ranks, checksum
from llama_ssp.distributed.roles import Roles
from llama_ssp.errors import DistributedError, LostPeer
from llama_ssp.models.passes import sent
from llama_ssp.speculative.decision import Decision
from llama_ssp.speculative.state import Proposal, State

log = logging.getLogger(__name__)

Count = tuple[int, ...]

# Flags of a message.
DECIDED = 1  # it holds a decision
ALONE = 2  # the draft is lost
LEFT = 4  # the leader's rounds end here, before their texts do


class RoundProtocol(ABC):
    """Holds what the leader and the other ranks both keep of the last decision."""

    def __init__(self, roles: Roles) -> None:
        self._draft_channel = roles.draft_channel
        self._target = roles.target
        self._everyone = roles.everyone
        self._basis: int | None = None  # checksum of the texts' lengths at the last decision
        self.decided = 0  # rounds, since this engine began
        self.were_left = False  # whether the leader's rounds ended before their texts did

    @abstractmethod
    def flush(self) -> None:
        """Completes the last decision's messages where no round follows."""

    def leave(self) -> None:
        """Completes them where texts have not ended: the other ranks' rounds end, too."""
        self.were_left = True
        self.flush()

    def _basis_of(self, state: State) -> int:
        """Returns the checksum at the last decision; before the first, of the texts as they are."""
        return checksum(state.lengths) if self._basis is None else self._basis


class LeaderProtocol(RoundProtocol):
    """Sends for the leader. It keeps a decision until it is sent with the next round's drafts."""

    def __init__(self, roles: Roles) -> None:
        super().__init__(roles)
        if self._target is not None and self._target.world == 1:
            self._target = None
        self._unsent: list[int] = []  # the last decision

    def ask(self, state: State, count: Count) -> None:
        """Sends the ranks that draft the last decision, and how many tokens to draft."""
        self._send(self._draft_channel, self._basis_of(state), [*count])

    def submit(self, state: State, proposal: Proposal) -> None:
        """Sends the ranks of the target the last decision, and the drafts."""
        self._require_draft()
        if self._target is not None:
            self._submit(self._target, self._basis_of(state), proposal)
        self._all_sent()

    def _submit(self, ranks: Ranks, basis: int, proposal: Proposal) -> None:
        values = [*proposal.count]
        if not proposal.k:
            self._send(ranks, basis, values)
        elif proposal.drafted_BK.device.type == "cpu" or ranks.through_host:
            self._send(ranks, basis, values + proposal.drafted_BK.flatten().tolist())
        else:
            self._send(ranks, basis, values)
            # The other ranks add zeros.
            ranks.all_reduce(proposal.drafted_BK.to(torch.int64).contiguous())

    def decide(self, state: State, result: Decision) -> None:
        """Keeps the decision for the next messages."""
        self.decided += 1
        if self._target is not None or self._draft_channel is not None:
            self._unsent = result.to_ints()
            self._basis = checksum(state.lengths)

    def flush(self) -> None:
        if self._basis is not None:
            self._send(self._draft_channel, self._basis, [])
            if self._draft_channel is not None:
                self._draft_channel.flush()
                self._require_draft()
            self._send(self._target, self._basis, [])
            self._all_sent()

    def _send(self, ranks: LeaderChannel | None, basis: int, values: list[int]) -> None:
        if ranks is None:
            return
        kind = 0
        if self._unsent:
            kind |= DECIDED
        if self._is_alone:
            kind |= ALONE
        if self.were_left:
            kind |= LEFT
        ranks.broadcast_ints([self.decided, basis, kind, *self._unsent, *values])

    def _all_sent(self) -> None:
        self._unsent = []
        self._basis = None
        if self._is_alone:  # all other ranks have been told
            self._everyone.drop_lost()

    @property
    def _is_alone(self) -> bool:
        """Returns whether the draft, on ranks of its own, is lost."""
        return self._draft_channel is not None and self._draft_channel.lost is not None

    def _require_draft(self) -> None:
        """Raises LostPeer if a draft on other ranks is lost and the run may not continue without it."""
        channel = self._draft_channel
        if channel is None or channel.lost is None or channel.loss_logged:
            return
        if channel.essential:
            raise LostPeer(
                "the draft has gone or does not answer",
                where="its first rank",
                found=channel.lost,
                fix="look there for the first error; placement.on_draft_loss=continue lets the target go on",
            )
        log.warning("the draft is lost (%s): the target continues alone", channel.lost)
        channel.loss_logged = True


class FollowerProtocol(RoundProtocol):
    """Receives for any other rank: the end of one round and the start of the next come together."""

    def __init__(self, roles: Roles) -> None:
        super().__init__(roles)
        self._start: list[int] | None = None  # of the next round

    def count(self, state: State) -> Count:
        """Returns how many tokens to draft; for ranks that draft."""
        return tuple(self._round_start(state))

    def drafts(self, state: State) -> Proposal:
        """Returns the drafts, without probabilities, written after the texts; for ranks of the target."""
        if self._draft_channel is None:
            values = self._round_start(state)
        else:
            _, values = self._receive(self._target, self._basis_of(state), state.rows)

        count = tuple(values[: state.rows])
        drafted = values[state.rows :]
        shape = state.rows, max(count)
        if drafted:
            drafted_BK = sent(drafted, state.device).view(shape)
        else:
            drafted_BK = torch.zeros(shape, dtype=torch.int64, device=state.device)
            if max(count):  # they come by the GPUs
                assert self._target is not None, "drafts are for the ranks of the target"
                drafted_BK = self._target.all_reduce(drafted_BK)
        state.write_drafts(drafted_BK, count)
        return Proposal(drafted_BK, None, count)

    def result(self, state: State) -> Decision:
        """Returns the decision. What comes with it starts the next round."""
        self._basis = checksum(state.lengths)
        self.decided += 1
        result, self._start = self._receive(self._first, self._basis, state.rows)
        if result is None:
            raise self._out_of_step("a round ended without a decision")
        return result

    def flush(self) -> None:
        if self._basis is not None and self._draft_channel is not None and self._target is not None:
            self._receive(self._target, self._basis, 0)
        self._start = self._basis = None

    @property
    def _first(self) -> LeaderChannel | None:
        """Returns what brings a round's first message."""
        return self._target if self._draft_channel is None else self._draft_channel

    def _round_start(self, state: State) -> list[int]:
        """Returns the start of this round; the first one's comes by itself."""
        values = self._start
        self._start = None
        if values is None:
            _, values = self._receive(self._first, self._basis_of(state), state.rows)
        return values

    def _receive(
        self, ranks: LeaderChannel | None, basis: int, rows: int
    ) -> tuple[Decision | None, list[int]]:
        """Returns a message's decision on this many rows, if it has one, and what follows it."""
        assert ranks is not None, "this rank has no channel to receive from"
        number, theirs, kind, *values = ranks.broadcast_ints([])
        if number != self.decided:
            raise self._out_of_step(f"{self.decided} rounds are decided here, {number} with the leader")
        if theirs != basis:
            raise self._out_of_step("their texts differ in length")
        self.were_left = bool(kind & LEFT)
        if kind & ALONE:
            self._everyone.drop_lost()
        rest = iter(values)
        return Decision.from_ints(rest, rows) if kind & DECIDED else None, list(rest)

    def _out_of_step(self, how: str) -> DistributedError:
        return DistributedError(
            f"the ranks are out of step: {how}",
            where=f"rank {self._everyone.rank}",
            fix="report it: ranks derive all they do from the leader's messages",
        )
