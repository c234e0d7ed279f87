"""Runs a drafter from outside of the package, and refuses a proposal that the target cannot be fed.

What such a drafter needs of a run is its `Sampler`, which its class is called with:

    class Mine(Drafter):
        def __init__(self, sampler: Sampler) -> None:
            self.sampler = sampler

        def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
            drafts = [look_up(state.texts[row], wanted) for row, wanted in enumerate(count)]
            return self.sampler.certain(state, drafts)

Whether the declared distributions are those that were drawn from, only task=certify can tell.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from llama_ssp.errors import UsageError
from llama_ssp.speculative.drafters.local import Drafter, Sampler
from llama_ssp.speculative.model_runner import UNLIMITED
from llama_ssp.speculative.state import Proposal, State

MakeDrafter = Callable[[Sampler], Drafter]
WHERE_TO_LOOK = "docs/own.md shows a drafter"


def own_drafter(make: MakeDrafter, sampler: Sampler) -> Drafter:
    """Returns the drafter that `make` returns, guarded. Raises UsageError if it is none."""
    drafter = make(sampler)
    if not isinstance(drafter, Drafter):
        raise UsageError(
            "what drafter=... makes is no Drafter",
            found=type(drafter).__name__,
            allowed="an object of a class that inherits from llama_ssp.Drafter",
            fix=WHERE_TO_LOOK,
        )
    return GuardedDrafter(drafter, sampler.transform.vocab)


class GuardedDrafter(Drafter):
    """Calls another drafter, and checks what it proposes.

    The host waits for the device once a round to look at probabilities: an error in the midst of a kernel
    would end the process.
    """

    def __init__(self, own: Drafter, vocab: int) -> None:
        self._own = own
        self._vocab = vocab
        self._where = f"drafter {type(own).__name__}"
        self._is_limited = type(own).limit is not Drafter.limit

    @property
    def forwards(self) -> int:
        return self._own.forwards

    @property
    def name(self) -> str:
        return f"the {self._where}"

    def start(self, rows: int, capacity: int) -> None:
        self._own.start(rows, capacity)

    def prefill(self, state: State) -> None:
        self._own.prefill(state)

    def refill(self, state: State, kept: dict[int, int]) -> None:
        self._own.refill(state, kept)

    def limit(self, length: int) -> int:
        return self._own.limit(length) if self._is_limited else UNLIMITED

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        proposal = self._own.propose(state, count)
        self._require_shape(proposal, state, count)
        if proposal.k:
            self._require_probabilities(proposal)
            # The target is fed what stands after the texts.
            state.write_drafts(proposal.drafted_BK, proposal.count)
        return proposal

    def roll_back(self, lengths: list[int]) -> None:
        self._own.roll_back(lengths)

    def free(self) -> None:
        self._own.free()

    def _require_shape(self, proposal: Proposal, state: State, wanted: tuple[int, ...]) -> None:
        """Raises UsageError for a proposal that is none, or of more drafts than there may be."""
        if not isinstance(proposal, Proposal):
            raise self._error("propose returns no Proposal", type(proposal).__name__, "llama_ssp.Proposal")
        if len(proposal.count) != state.rows or any(
            not 0 <= drafted <= most for drafted, most in zip(proposal.count, wanted, strict=False)
        ):
            raise self._error("propose drafts more than it may", proposal.count, f"up to {wanted}, by row")
        if not proposal.k:
            return
        shape = (state.rows, proposal.k)
        if proposal.drafted_BK.shape != shape or proposal.drafted_BK.dtype != torch.int64:
            found = f"{tuple(proposal.drafted_BK.shape)}, {proposal.drafted_BK.dtype}"
            raise self._error("the drafts are of another shape", found, f"{shape}, torch.int64")
        probs_BKV = proposal.draft_BKV
        found = "None" if probs_BKV is None else str(tuple(probs_BKV.shape))
        if probs_BKV is None or probs_BKV.shape != (*shape, self._vocab):
            allowed = f"{(*shape, self._vocab)}, over the target's vocabulary"
            raise self._error("the drafts' probabilities are of another shape", found, allowed)

    def _require_probabilities(self, proposal: Proposal) -> None:
        """Raises UsageError for a token that the target has not, and for what is no distribution.

        NaN is let pass: it marks a draft model's damaged logits, which end the text.
        """
        token_BK = proposal.drafted_BK
        probs_BKV = proposal.draft_BKV
        assert probs_BKV is not None
        number_K = torch.arange(proposal.k, device=token_BK.device)
        count_B = torch.tensor(proposal.count, device=token_BK.device)
        is_real_BK = number_K < count_B[:, None]
        is_odd_BK = (token_BK < 0) | (token_BK >= self._vocab)
        is_wrong_BK = _is_no_distribution(probs_BKV).to(is_odd_BK.device)
        odd, wrong = torch.stack([(is_real_BK & is_odd_BK).any(), (is_real_BK & is_wrong_BK).any()]).tolist()
        if odd:
            raise self._error("a draft is no token of the target", token_BK.tolist(), f"0..{self._vocab - 1}")
        if wrong:
            what = "the drafts' probabilities are no distributions"
            raise self._error(what, "one that is negative, or sums to 0", "what each draft was drawn from")

    def _error(self, what: str, found: object, allowed: str) -> UsageError:
        return UsageError(what, where=self._where, found=found, allowed=allowed, fix=WHERE_TO_LOOK)


def _is_no_distribution(probs_BKV: Tensor) -> Tensor:
    """Returns which positions have a negative number, or nothing at all, (B, K)."""
    return (probs_BKV < 0).any(-1) | (probs_BKV.sum(-1) <= 0)
