"""Decides every round again, with its random numbers made anew, and sees whether the engine did the same.

What a round must do follows from its recorded probabilities and from its random numbers. Their addresses are
stated here once more (rng.py), without that code: number n of a round is word n of Philox with the key
(seed, prompt) and the counter (0, 0, stream, length of the text). Stream 0 has the number of draft i at 3i,
its acceptance coin at 3i + 1; stream 1 has the clocks of the race that draws the token after the drafts. So
every fault in what is drawn, compared or kept shows: also one that touches few rounds, as thousands are
decided again.

Where a number is within rounding of its chance, both outcomes are right. law.py shows that the rule's own
functions are right. A drafter that drops what it has drawn leaves no wrong draft, but a gap among the places
of the others in their distributions. `RoundObserver` looks at an engine's rounds and keeps some; it changes
nothing.
Probabilities are known on the leader alone; which texts were verified, on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_ssp.models.passes import sent
from llama_ssp.report.statistics import uniform_band
from llama_ssp.speculative.decision import Decision, block_of
from llama_ssp.speculative.engine import Observer, OnLeader
from llama_ssp.speculative.rng import heat, race
from llama_ssp.speculative.state import Proposal, State
from llama_ssp.speculative.verification import DraftBlock, Rule
from llama_ssp.tasks.certify.verdict import Check, Outcome, judged

TIE = 1e-9  # a number this close to its chance may pass or not
ROUNDING = 1e-12  # of a probability; a chance that is a quotient of small differences may move by more
BITS = 53  # of a number
# Streams.
ROUNDS = 0
RACES = 1
# The stream of rounds has EACH numbers a draft; of these two are used, at these places.
EACH = 3
DRAFT = 0
COIN = 1

UNKNOWN = torch.empty(0)


@dataclass(frozen=True)
class RecordedDraws:
    """A round's numbers, made anew: each draft's coin and what it was drawn with, and a race's clocks."""

    uniform_BK: Tensor
    clock_BN: Tensor
    draft_BK: Tensor

    @classmethod
    def of(cls, seed: int, state: State, k: int, vocab: int) -> RecordedDraws:
        """Makes the numbers of a batch of K drafts."""
        texts = list(zip(state.keys, state.lengths, strict=True))
        round_BKE = _uniform(seed, texts, ROUNDS, EACH * k).reshape(state.rows, k, EACH)
        race_BN = _uniform(seed, texts, RACES, 2 * heat(vocab)) * 2.0 ** (BITS - 1)
        clock_BN = -np.log((np.floor(race_BN) + 0.5) * 2.0 ** (1 - BITS))
        return cls(
            uniform_BK=_tensor(round_BKE[..., COIN], state.device),
            clock_BN=_tensor(clock_BN, state.device),
            draft_BK=_tensor(round_BKE[..., DRAFT], state.device),
        )


def _tensor(table: NDArray[np.float64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(device)


def _uniform(seed: int, texts: list[tuple[int, int]], stream: int, count: int) -> NDArray[np.float64]:
    """Returns uniform numbers of each row, (B, count); a text is its key and its length."""
    rows = []
    for key, length in texts:
        source = np.random.Philox(key=np.array([seed, key], dtype=np.uint64), counter=[0, 0, stream, length])
        rows.append(source.random_raw(count) >> np.uint64(64 - BITS))
    return np.stack(rows) * 2.0**-BITS


@dataclass(kw_only=True)
class Decisions:
    """Counts the draws and decisions that are not those of the rule, and keeps the places of drafts."""

    rule: Rule
    seed: int
    drafted: int = 0
    drafted_wrong: int = 0
    taken: int = 0
    lengths_wrong: int = 0
    tokens_wrong: int = 0
    places: list[float] = field(default_factory=list)  # of drafts in their distributions, likeliest first

    def see(self, state: State, decision: Decision, probs_BWV: Tensor, block: DraftBlock | None) -> None:
        """Looks at one round of the batch, before it is committed. Ended and damaged rows decide nothing."""
        rows = [row for row, ended in enumerate(state.ended) if not (ended or decision.damaged[row])]
        k = block.k if block else 0
        draws = RecordedDraws.of(self.seed, state, k, vocab=probs_BWV.shape[-1])
        self.taken += len(rows)
        if block is None:  # a token is drawn, and nothing else decided
            token_B = race(probs_BWV[:, 0], draws.clock_BN).tolist()
            self.tokens_wrong += sum(token_B[row] != decision.token[row] for row in rows)
        else:
            self._see_drafts(block, draws, rows)
            self._see_decision(block, draws, rows, decision)

    def _see_drafts(self, block: DraftBlock, draws: RecordedDraws, rows: list[int]) -> None:
        """Checks that a draft is the token in whose part of the cumulated distribution its number lies."""
        probs_BKV = block.draft_BKV
        token_BK1 = block.drafted_BK[..., None]
        number_BK = draws.draft_BK
        is_drawn_BK = torch.arange(block.k, device=number_BK.device) < block.count_B[:, None]

        # The token's part of the cumulated distribution: as long as its probability, up to `end`.
        end_BK = probs_BKV.cumsum(-1).gather(2, token_BK1)[..., 0]
        share_BK = probs_BKV.gather(2, token_BK1)[..., 0]
        is_inside_BK = (number_BK <= end_BK + TIE) & (number_BK >= end_BK - share_BK - TIE)
        is_right_BK = is_inside_BK & (share_BK > 0)
        self.drafted += int(is_drawn_BK[rows].sum())
        self.drafted_wrong += int((is_drawn_BK & ~is_right_BK)[rows].sum())

        # The number's place if tokens stood with the likeliest first. Equally likely ones share their part,
        # of which it takes as much as of its own token's. A certain draft has no place.
        higher_BK = torch.where(probs_BKV > share_BK[..., None], probs_BKV, 0).sum(-1)
        equal_BK = torch.where(probs_BKV == share_BK[..., None], probs_BKV, 0).sum(-1)
        place_BK = higher_BK + equal_BK * (number_BK - end_BK + share_BK) / share_BK.clamp(min=TIE)
        has_place_BK = is_drawn_BK & is_right_BK & (share_BK < 1 - TIE)
        self.places += place_BK[rows][has_place_BK[rows]].clamp(0, 1).tolist()

    def _see_decision(
        self, block: DraftBlock, draws: RecordedDraws, rows: list[int], decision: Decision
    ) -> None:
        """Compares what stands, and the token after it; within rounding every outcome is right."""
        kept = list(zip(decision.accepted, decision.token, strict=True))
        decided_again = _decided(self.rule, block, draws)
        wrong = {row for row in rows if decided_again[row] != kept[row]}

        # With coins and probabilities a little higher or lower the outcome may be the one that was kept.
        for shift, growth in product((TIE, -TIE), (ROUNDING, -ROUNDING)):
            if not wrong:
                return
            near_block = replace(block, target_BWV=block.target_BWV * (1 + growth))
            near_draws = replace(draws, uniform_BK=draws.uniform_BK - shift)
            decided_near = _decided(self.rule, near_block, near_draws)
            wrong -= {row for row in wrong if decided_near[row] == kept[row]}

        wrong_lengths = {row for row in wrong if decided_again[row][0] != kept[row][0]}
        self.lengths_wrong += len(wrong_lengths)
        self.tokens_wrong += len(wrong - wrong_lengths)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One row of a round; probabilities and logits are empty where they are unknown.

    `text` ends with the `count` drafts. `target_WV` (W = count + 1) are the distributions that verification
    used, `draft_KV` those declared for the drafts, both in fp64; `logit_WV` are the logits of `target_WV`.
    """

    prompt_length: int
    text: tuple[int, ...]
    count: int
    target_WV: Tensor
    draft_KV: Tensor
    logit_WV: Tensor = UNKNOWN

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.text[len(self.text) - self.count :]

    def prefix(self, at: int) -> tuple[int, ...]:
        """Returns the text before position `at` of the round."""
        return self.text[: len(self.text) - self.count + at]


@dataclass
class RoundObserver(Observer):
    """Keeps `room` rounds, a random choice of all that had drafts, the same on every rank."""

    decisions: Decisions
    room: int = 0
    rounds: list[Round] = field(default_factory=list)
    _seen: int = 0
    _random: Random = field(default_factory=lambda: Random(0))

    def decided(
        self, state: State, proposal: Proposal, decision: Decision, probs_BWV: OnLeader, logit_BWV: OnLeader
    ) -> None:
        """Looks at one round over the batch, before it is committed."""
        block = None
        if probs_BWV is not None and proposal.draft_BKV is not None and proposal.k:
            count_B = sent(proposal.count, probs_BWV.device)
            block = block_of(probs_BWV, proposal.draft_BKV, proposal.drafted_BK, count_B)
        if probs_BWV is not None:
            self.decisions.see(state, decision, probs_BWV, block)

        for row, count in enumerate(proposal.count):
            if not count or decision.damaged[row]:
                continue
            self._seen += 1
            # A reservoir: once it is full, the n-th round that is seen takes a place with chance room / n.
            is_full = len(self.rounds) == self.room
            place = self._random.randrange(self._seen) if is_full else len(self.rounds)
            if place >= self.room:
                continue
            kept = Round(
                prompt_length=state.prompt_lengths[row],
                text=(*state.texts[row], *decision.drafted[row]),
                count=count,
                target_WV=_copied(block.target_BWV[row, : count + 1] if block else None),
                draft_KV=_copied(block.draft_BKV[row, :count] if block else None),
                logit_WV=_copied(None if logit_BWV is None else logit_BWV[row, : count + 1]),
            )
            self.rounds[place : place + 1] = [kept]


def _copied(tensor_WV: Tensor | None) -> Tensor:
    return UNKNOWN if tensor_WV is None else tensor_WV.to("cpu", copy=True)


def _decided(rule: Rule, block: DraftBlock, draws: RecordedDraws) -> list[tuple[int, int]]:
    """Returns each row's standing drafts and the token after them, by the functions that law.py sums."""
    accepted_B = rule.accepted(draws.uniform_BK < rule.accept_chances(block))
    token_B = race(rule.correction_probs(block, accepted_B), draws.clock_BN)
    return list(zip(accepted_B.tolist(), token_B.tolist(), strict=True))


def check_decisions(seen: Decisions, level: float) -> Check:
    """Checks that every draft and decision is the one that its random numbers give, and that no draft was
    dropped after a look at it, which a right drafter seems to do at most at this `level`."""
    gap = 0.0
    explained = 1.0
    if seen.places and not seen.drafted_wrong:  # else the places are those of a choice
        # How far the places' distribution function is from the uniform one (Kolmogorov and Smirnov).
        n = len(seen.places)
        gap = max(max((i + 1) / n - place, place - i / n) for i, place in enumerate(sorted(seen.places)))
        explained = uniform_band(n, level)

    figures = {
        "decisions": seen.taken,
        "accepted_otherwise": seen.lengths_wrong,
        "tokens_otherwise": seen.tokens_wrong,
        "tokens_drafted": seen.drafted,
        "drafts_otherwise": seen.drafted_wrong,
        "largest_distance_of_drafts": gap,
        "largest_distance_of_drafts_by_chance": explained,
    }
    if not seen.drafted:
        return Check("decisions", Outcome.blind, "nothing was drafted", figures)

    wrong_drafts = (
        f"{seen.drafted_wrong} of {seen.drafted} drafts are not drawn from their declared distributions"
    )
    wrong_decisions = (
        f"of {seen.taken} decisions {seen.lengths_wrong} keep other drafts than the rule, "
        f"{seen.tokens_wrong} another token after them"
    )
    chosen_drafts = (
        f"drafts were chosen after a look at them: {gap:.1%} of {len(seen.places)} lie elsewhere "
        f"in their distributions, by chance at most {explained:.1%} would"
    )
    right = f"{seen.drafted} drafts and {seen.taken} decisions are those of their random numbers and the rule"
    faults = [
        (seen.drafted_wrong, wrong_drafts),
        (seen.lengths_wrong or seen.tokens_wrong, wrong_decisions),
        (gap > explained, chosen_drafts),
    ]
    return judged("decisions", faults, right, figures)
