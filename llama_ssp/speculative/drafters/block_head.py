"""A head that gives all drafts of a round in one pass (DFlash).

Of a text of n committed tokens it has read the target's hidden states of all but the last one: each pass of
the target brings them, and what they give does not depend on the text. What was read at positions that were
rejected, and what the head's own pass wrote, is read anew before it counts.
"""

from __future__ import annotations

from torch import Tensor

from llama_ssp.models.heads.model import DFlashModel, Eagle3Model, HeadModel
from llama_ssp.models.slot_cache import SlotCache
from llama_ssp.models.transfer import sent
from llama_ssp.speculative.drafters.head import HeadDrafter, SamplesFromHead
from llama_ssp.speculative.drafters.local import Drawn, nothing, proposal_of
from llama_ssp.speculative.model_runner import ModelRunner, Span
from llama_ssp.speculative.rng import Draws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Proposal, State


class BlockHeadDrafter(SamplesFromHead):
    """Draws each draft from the distribution that the pass gave at its place."""

    def __init__(
        self, head: DFlashModel, target: ModelRunner, transform: SamplingTransform, draws: Draws
    ) -> None:
        """`target` is the runner whose passes the head reads; its model has the head's taps."""
        super().__init__(head, transform, draws)
        self._head = head
        target.observer = self.observe

    def start(self, rows: int, capacity: int) -> None:
        self._slots = min(capacity + self._head.width, self._head.context)
        self._cache: SlotCache = self._head.new_cache(rows, self._slots)

    def limit(self, length: int) -> int:
        """The block stands within the head's context."""
        return self._head.drafts if length - 1 + self._head.width <= self._head.context else 0

    def observe(self, token_BS: Tensor, fed: list[Span], state_TX: Tensor) -> None:
        """Reads the target's hidden states of a pass, as far as the cache goes."""
        kept = [(row, start, min(count, self._slots - start)) for row, start, count in fed]
        if any(own[2] < span[2] for own, span in zip(kept, fed, strict=True)):
            inside = [start + i < self._slots for _, start, count in fed for i in range(count)]
            state_TX = state_TX[sent(inside, state_TX.device)]
        if kept := [span for span in kept if span[2] > 0]:
            self._head.remember(state_TX, kept, self._cache)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        if not max(count):
            return nothing(state)
        self._passes += 1
        rows, last = zip(*[(row, state.lengths[row] - 1) for row, n in enumerate(count) if n], strict=True)
        row_R, last_R = sent([list(rows), list(last)], state.device)
        logit_RKE = self._head.logits(state.token_BS[row_R, last_R], [*last], [*rows], self._cache)
        drawn = list[Drawn]()
        for offset in range(max(count)):
            wanted = [row for row, n in enumerate(count) if n > offset]
            places = sent([rows.index(row) for row in wanted], logit_RKE.device)
            drawn.append(self._drawn(state, offset, wanted, logit_RKE[places, offset]))
            state.write_draft(drawn[-1].token_B, offset, count)
        return proposal_of(drawn, count)


def head_drafter(
    head: HeadModel, target: ModelRunner, transform: SamplingTransform, draws: Draws
) -> SamplesFromHead:
    """The drafter of a head of this kind."""
    if isinstance(head, DFlashModel):
        return BlockHeadDrafter(head, target, transform, draws)
    assert isinstance(head, Eagle3Model)
    return HeadDrafter(head, target, transform, draws)
