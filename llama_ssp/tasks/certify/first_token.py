"""The first token of a round against its exact probabilities, over many rounds without a forward.

A round's logits are recorded once. Drafts are then drawn anew from the recorded distributions, by the
engine's own draws, and the engine decides on the recorded logits, for prompts with other names: only the
random numbers differ. Whatever the later drafts are, the first committed token has the target's probabilities
at the first position.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from llama_ssp.report.statistics import sum_band, uniform_band, uniform_distance
from llama_ssp.speculative.drafters.siblings import with_siblings
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.rng import Purpose
from llama_ssp.speculative.siblings import CHAIN
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.tasks.certify.law import spread
from llama_ssp.tasks.certify.verdict import Check, Outcome, judged
from llama_ssp.tasks.certify.watch import Round

ROUNDS = 24  # for each text that is sampled: 24,576 at the default size
PREFIXES = 8  # recorded rounds that are drawn from


class FirstTokens:
    """Pools first tokens over prefixes: their places in the target's distribution, and how many of them are
    favourites of the draft: tokens to which it gives more than the target does."""

    def __init__(self, seed: int) -> None:
        self._uniforms = np.random.Generator(np.random.Philox(seed ^ 2))
        self.rounds = self.impossible = 0
        self.places: list[float] = []
        self.excess = self.variance = 0.0  # of favourites

    def see(
        self, token_N: NDArray[np.int64], target_V: NDArray[np.float64], draft_V: NDArray[np.float64]
    ) -> None:
        """Adds first tokens of one prefix."""
        order = np.argsort(-target_V, kind="stable")
        before_V = np.empty_like(target_V)
        before_V[order] = np.cumsum(target_V[order]) - target_V[order]
        self.rounds += len(token_N)
        self.impossible += int((target_V[token_N] <= 0).sum())
        place_N = before_V[token_N] + target_V[token_N] * self._uniforms.random(len(token_N))
        self.places += np.clip(place_N, 0, 1).tolist()
        favourite_V = draft_V > target_V
        share = min(1.0, float(target_V[favourite_V].sum()))
        self.excess += float(favourite_V[token_N].sum()) - share * len(token_N)
        self.variance += share * (1 - share) * len(token_N)


def first_tokens(engine: Engine, rounds: list[Round], seed: int, count: int, rows: int) -> FirstTokens:
    """Draws and decides `count` rounds, `rows` at a time, from a few of the recorded ones."""
    result = FirstTokens(seed)
    chosen = spread(rounds, PREFIXES)
    for number, seen in enumerate(chosen):
        each = -(-count // len(chosen))
        tokens: list[int] = []
        while len(tokens) < each:
            names = [f"first {number} {len(tokens) + row}" for row in range(min(rows, each - len(tokens)))]
            tokens += _drawn(engine, seen, names)
        result.see(np.asarray(tokens), seen.target_WV[0].numpy(), seen.draft_KV[0].numpy())
    return result


@torch.inference_mode()
def _drawn(engine: Engine, seen: Round, names: list[str]) -> list[int]:
    """Returns the first token of a round of each of these prompts."""
    counts, device = (seen.count,) * len(names), engine.target.model.device
    state = State([Prompt(name, seen.prefix(0)) for name in names], len(seen.text) + 1, device)
    state.prompt_lengths = [seen.prompt_length] * len(names)
    draft_BKV = seen.draft_KV.to(device).expand(len(names), -1, -1)
    drafted = []
    for offset in range(seen.count):
        drafted.append(engine.draws.categorical(draft_BKV[:, offset], state.slot(Purpose.DRAFT, offset)))
        state.write_draft(drafted[-1], offset, counts)
    proposal = Proposal(torch.stack(drafted, 1), draft_BKV, counts)
    logit_WV = seen.logit_WV
    if seen.siblings:
        proposal = with_siblings(proposal, state, engine.draws, [len(seen.siblings[0])] * len(names))
        assert proposal.siblings is not None
        main, aside = iter(logit_WV), (one.logit_WV[0] for one in chain(*seen.behind))
        numbers = proposal.siblings.numbers[0]
        logit_WV = torch.stack([next(main if number == CHAIN else aside) for number in numbers])
    result = engine.judge(state, proposal, logit_WV.to(device).expand(len(names), -1, -1))
    return [result.tokens(row)[0] for row in range(len(names))]


def check_first(seen: FirstTokens, level: float) -> Check:
    """Checks that first tokens have their exact probabilities."""
    figures: dict[str, object] = {"rounds": seen.rounds, "tokens_impossible": seen.impossible}
    if not seen.rounds:
        return Check("first token", Outcome.blind, "nothing was drafted", figures)
    distance, band = uniform_distance(seen.places), uniform_band(seen.rounds, level / 2)
    excess, most = seen.excess / seen.rounds, sum_band(seen.variance, level / 2) / seen.rounds
    figures |= {
        "largest_distance": distance,
        "largest_distance_by_chance": band,
        "excess_of_favourites": excess,
        "excess_of_favourites_by_chance": most,
    }
    impossible = f"{seen.impossible} of {seen.rounds} first tokens have probability 0"
    elsewhere = (
        f"{distance:.1%} of {seen.rounds} first tokens lie elsewhere than their exact probabilities say"
    )
    favours = f"first tokens are {excess:.1%} too often those to which the draft gives more than the target"
    faults = [(seen.impossible, impossible), (abs(excess) > most, favours), (distance > band, elsewhere)]
    right = f"{seen.rounds} first tokens have their exact probabilities within {distance:.1%}"
    right += f"; {most:.1%} too many of the draft's favourites would show"
    return judged("first token", faults, right, figures)
