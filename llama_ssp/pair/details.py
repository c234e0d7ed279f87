"""Keeps what the last round of an engine did, for a stream that gives its details."""

from torch import Tensor

from llama_ssp.pair.results import RoundDetails
from llama_ssp.speculative.decision import Decision
from llama_ssp.speculative.engine import Observer, OnLeader
from llama_ssp.speculative.state import Proposal, State


class RoundRecorder(Observer):
    """Keeps the details of the last round by the prompts' ids; on ranks that do not lead there are none."""

    def __init__(self, has_logits: bool) -> None:
        self._has_logits = has_logits
        self.by_prompt: dict[str, RoundDetails] = {}

    def decided(
        self, state: State, proposal: Proposal, decision: Decision, probs_BWV: OnLeader, logit_BWV: OnLeader
    ) -> None:
        self.by_prompt = {}
        if probs_BWV is None or logit_BWV is None:
            return
        drawn_with = _of_drafts(proposal.draft_BKV, proposal.drafted_BK)
        wanted = _of_drafts(probs_BWV[:, : proposal.k], proposal.drafted_BK)
        for row, count in enumerate(proposal.count):
            if state.finished[row] is not None or decision.damaged[row]:
                continue
            logit_WV = logit_BWV[row, : count + 1].to("cpu", copy=True) if self._has_logits else None
            self.by_prompt[state.prompts[row].id] = RoundDetails(
                drafts=list(decision.drafted[row]),
                draft_probs=drawn_with[row][:count],
                target_probs=wanted[row][:count],
                overlap=list(decision.overlap[row]),
                accepted=decision.accepted[row],
                token=decision.token[row],
                logit_WV=logit_WV,
            )


def _of_drafts(probs_BKV: Tensor | None, drafted_BK: Tensor) -> list[list[float]]:
    """Returns the probability of each draft, by row; columns beyond a row's drafts are not used."""
    if probs_BKV is None or not drafted_BK.shape[1]:
        return [[] for _ in drafted_BK]
    chosen_BK1 = drafted_BK[..., None].to(probs_BKV.device)
    result: list[list[float]] = probs_BKV.gather(2, chosen_BK1)[..., 0].double().tolist()
    return result
