"""How ranks agree: the leader decides, and the others do what they are told.

A round has one message to the ranks of the target: what the round before decided, and what is drafted
for this one. Ranks that take part in drafting are asked before: the decision, and how much to draft.
From these every rank derives all that it does, so nothing hangs on equal seeds or equal rounding. Each
message carries how many rounds are decided, and a checksum of what the leader holds the texts to be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llama_ssp.distributed.draft_messages import DraftClient
from llama_ssp.distributed.failures import LostPeer
from llama_ssp.distributed.process_group import checksum
from llama_ssp.distributed.roles import LeaderChannel, Roles
from llama_ssp.errors import DistributedError
from llama_ssp.speculative.state import Proposal, State

log = logging.getLogger(__name__)

Count = tuple[int, ...]
DECIDED, ALONE = 1, 2  # what a message says beside numbers: there is a decision in it; the draft is lost


@dataclass(frozen=True)
class RoundResult:
    """What was decided, on the host. Row b commits its first `accepted[b]` drafts and `token[b]`.

    Of each draft, whether it stood or not, `overlap` is what both distributions had in common, and `standing`
    how likely it was that those before it stand, and that it stands with them, before it was drawn.
    """

    drafted: list[list[int]]
    accepted: list[int]
    token: list[int]
    overlap: list[list[float]]
    damaged: list[bool]
    standing: list[list[tuple[float, float]]]

    def tokens(self, row: int) -> list[int]:
        return [*self.drafted[row][: self.accepted[row]], self.token[row]]

    def told(self) -> list[int]:
        """As integers. What was seen of drafts, which steers only the leader's drafting, stays behind."""
        values = []
        for row, drafted in enumerate(self.drafted):
            values += [self.accepted[row], self.token[row], int(self.damaged[row]), len(drafted), *drafted]
        return values

    @staticmethod
    def heard(values: Iterator[int], rows: int) -> RoundResult:
        verdict = RoundResult([], [], [], [], [], [])
        for _ in range(rows):
            verdict.accepted.append(next(values))
            verdict.token.append(next(values))
            verdict.damaged.append(bool(next(values)))
            verdict.drafted.append([next(values) for _ in range(next(values))])
            verdict.overlap.append([0.0] * len(verdict.drafted[-1]))
            verdict.standing.append([(0.0, 0.0)] * len(verdict.drafted[-1]))
        return verdict


class LeaderProtocol:
    """The leader's side. It holds a decision back until it can be sent with what is drafted next."""

    def __init__(self, crew: Roles) -> None:
        self._target = crew.target if crew.target is not None and crew.target.world > 1 else None
        self._asked, self._everyone = crew.draft_channel, crew.everyone
        link = crew.draft_link if crew.draft_channel is not None else None
        self._line = link if isinstance(link, DraftClient) else None
        self._untold: list[int] = []  # the last decision
        self._basis: int | None = None  # what the texts were when it was taken
        self._rows = 0
        self._decided = 0  # rounds, since this engine began
        self.round = 0  # that is going on

    def begin(self) -> int:
        """The number of the round that begins."""
        self.round = self._decided + 1
        return self.round

    def ask(self, state: State, count: Count) -> None:
        """Tells those who draft what was decided, and how much to draft now."""
        self._tell(self._asked, self._basis_of(state), [*count])

    def submit(self, state: State, proposal: Proposal) -> None:
        """Tells the ranks of the target what was decided, and what is drafted now."""
        self._require_line()
        if self._target is not None:
            drafted = [token for row in proposal.drafted_BK.tolist() for token in row]
            self._tell(self._target, self._basis_of(state), [*proposal.count, *drafted])
        self._untold, self._basis = [], None
        self._drop_lost()

    def decide(self, state: State, verdict: RoundResult) -> None:
        """Keeps the decision for the next messages."""
        self._decided += 1
        if self._target is not None or self._asked is not None:
            self._untold, self._basis = verdict.told(), checksum(state.lengths)
            self._rows = state.rows

    def settle(self) -> None:
        """Tells a decision that no drafts follow."""
        if self._basis is not None:
            self._tell(self._asked, self._basis, [0] * self._rows)
            if self._line is not None:
                self._line.flush()
                self._require_line()
            self._tell(self._target, self._basis, [0] * self._rows)
            self._untold, self._basis = [], None
            self._drop_lost()

    def _tell(self, ranks: LeaderChannel | None, basis: int, values: list[int]) -> None:
        if ranks is not None:
            kind = DECIDED * bool(self._untold) | ALONE * self._is_alone
            ranks.broadcast_ints([self._decided, basis, kind, *self._untold, *values])

    @property
    def _is_alone(self) -> bool:
        """Whether the draft, on ranks of its own, is lost."""
        return self._line is not None and self._line.lost is not None

    def _require_line(self) -> None:
        """A draft apart that is gone, or silent, ends the run only where it is wanted so."""
        line = self._line
        if line is None or line.lost is None or line.loss_logged:
            return
        if line.essential:
            raise LostPeer(
                "the draft has gone or does not answer", where="its first rank", found=line.lost,
                fix="look there for the first error; placement.on_draft_loss=continue lets the target go on",
            )  # fmt: skip
        log.warning("the draft is lost (%s): the target goes on alone", line.lost)
        line.loss_logged = True

    def _drop_lost(self) -> None:
        """After the others have been told."""
        if self._is_alone:
            self._everyone.drop_lost()

    def _basis_of(self, state: State) -> int:
        """What the texts were at the last decision; before the first, what they are."""
        return checksum(state.lengths) if self._basis is None else self._basis


class FollowerProtocol:
    """Any other rank's side: it hears the end of one round and the start of the next together."""

    def __init__(self, crew: Roles) -> None:
        self._me, self._asked, self._everyone = crew.everyone.rank, crew.draft_channel, crew.everyone
        self._target = crew.target
        self._start: list[int] | None = None  # of the round to come
        self._basis: int | None = None  # what the texts were at the last decision
        self._rows = 0
        self._decided = 0  # rounds, since this engine began
        self.round = 0  # that is going on

    def begin(self) -> int:
        """The number of the round that begins."""
        self.round = self._decided + 1
        return self.round

    def count(self, state: State) -> Count:
        """How much to draft; for ranks that are asked."""
        return tuple(self._begun(self._asked, state))

    def drafts(self, state: State) -> Proposal:
        """What is drafted, put behind the texts; for ranks of the target. Its distribution is the leader's to
        know."""
        alone = self._asked is None
        told = self._begun(self._target, state) if alone else self._heard(self._target, state)[1]
        count, drafted = tuple(told[: state.rows]), told[state.rows :]
        drafted_BK = torch.tensor(drafted, dtype=torch.int64, device=state.device)
        drafted_BK = drafted_BK.view(state.rows, max(count))
        for offset in range(max(count)):
            state.place(drafted_BK[:, offset], offset, count)
        return Proposal(drafted_BK, None, count)

    def verdict(self, state: State) -> RoundResult:
        """What was decided. What comes with it starts the next round."""
        self._basis, self._rows = checksum(state.lengths), state.rows
        self._decided += 1
        verdict, self._start = self._heard(self._target if self._asked is None else self._asked, state)
        if verdict is None:
            raise self._astray("a round ended without a decision")
        return verdict

    def settle(self) -> None:
        """Hears out the leader's last messages."""
        if self._basis is not None and self._asked is not None and self._target is not None:
            self._hear(self._target, self._basis, self._rows)
        self._start = self._basis = None

    def _begun(self, ranks: LeaderChannel | None, state: State) -> list[int]:
        """The start of this round; the first one's comes by itself."""
        told = self._heard(ranks, state)[1] if self._start is None else self._start
        self._start = None
        return told

    def _heard(self, ranks: LeaderChannel | None, state: State) -> tuple[RoundResult | None, list[int]]:
        basis = checksum(state.lengths) if self._basis is None else self._basis
        return self._hear(ranks, basis, state.rows)

    def _hear(
        self, ranks: LeaderChannel | None, basis: int, rows: int
    ) -> tuple[RoundResult | None, list[int]]:
        assert ranks is not None, "whom a rank hears from follows from its place"
        number, theirs, kind, *values = ranks.broadcast_ints([])
        if number != self._decided:
            raise self._astray(f"{self._decided} rounds are decided here, {number} with the leader")
        if theirs != basis:
            raise self._astray("their texts differ in length")
        if kind & ALONE:
            self._everyone.drop_lost()
        rest = iter(values)
        return RoundResult.heard(rest, rows) if kind & DECIDED else None, list(rest)

    def _astray(self, how: str) -> DistributedError:
        return DistributedError(
            f"the ranks are out of step: {how}", where=f"rank {self._me}, round {self.round}",
            fix="report it: ranks derive all they do from the leader's messages",
        )  # fmt: skip
