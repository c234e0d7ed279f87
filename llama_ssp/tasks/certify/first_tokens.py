"""The first token of a round against its exact probabilities, over many rounds without a forward.

A round's logits are recorded once. Drafts are then drawn anew from the recorded distributions, by the
engine's own draws, and the engine decides on the recorded logits, for prompts with other names: only the
random numbers differ. Whatever the later drafts are, the first committed token has the target's probabilities
at the first position.
"""

from __future__ import annotations

from itertools import chain
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray

from llama_ssp.report.statistics import sum_band, uniform_band, uniform_distance
from llama_ssp.speculative.drafters.siblings import with_siblings
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.rng import Purpose
from llama_ssp.speculative.siblings import CHAIN
from llama_ssp.speculative.state import Prompt, Proposal, State
from llama_ssp.tasks.certify.recorder import Round, Witness
from llama_ssp.tasks.certify.replay import Numbers
from llama_ssp.tasks.certify.verdict import Check, Outcome, judged

ROUNDS = 24  # for each text that is sampled: 24,576 at the default size
PREFIXES = 8  # recorded rounds that are drawn from
LIKELIEST = 4  # tokens of the target that are counted one by one


class FirstTokens:
    """First tokens, pooled over prefixes: places in the target's distribution, and counts in a few cells."""

    def __init__(self, seed: int) -> None:
        self._uniforms = np.random.Generator(np.random.Philox(seed ^ 2))
        self.rounds = self.impossible = 0
        self.places: list[float] = []
        self.counted, self.expected, self.spread = (np.zeros(1 + LIKELIEST) for _ in range(3))

    def see(self, token_N: NDArray[np.int64], target_V: Numbers, draft_V: Numbers) -> None:
        """First tokens of one prefix. The cells: tokens likelier in the draft, and the target's likeliest."""
        order = np.argsort(-target_V, kind="stable")
        before = np.empty_like(target_V)
        before[order] = np.cumsum(target_V[order]) - target_V[order]
        self.rounds += len(token_N)
        self.impossible += int((target_V[token_N] <= 0).sum())
        placed = before[token_N] + target_V[token_N] * self._uniforms.random(len(token_N))
        self.places += np.clip(placed, 0, 1).tolist()
        cells = [draft_V > target_V, *(np.arange(len(target_V)) == token for token in order[:LIKELIEST])]
        for number, cell in enumerate(cells):
            share = min(1.0, float(target_V[cell].sum()))
            self.counted[number] += cell[token_N].sum()
            self.expected[number] += share * len(token_N)
            self.spread[number] += share * (1 - share) * len(token_N)


def first_tokens(engine: Engine, witness: Witness, count: int, rows: int) -> FirstTokens:
    """Draws and decides `count` rounds, `rows` at a time, from a few of the recorded ones.

    The witness replays these decisions, and counts nothing of them.
    """
    witness.counting = False
    found = FirstTokens(witness.seed)
    known = [seen for seen in witness.rounds if len(seen.logit_WV)]
    chosen = Random(witness.seed).sample(known, min(PREFIXES, len(known)))
    for number, seen in enumerate(chosen):
        each = -(-count // len(chosen))
        tokens: list[int] = []
        while len(tokens) < each:
            names = [f"first {number} {len(tokens) + row}" for row in range(min(rows, each - len(tokens)))]
            tokens += _drawn(engine, seen, names)
        found.see(np.asarray(tokens), seen.target_WV[0].numpy(), seen.draft_KV[0].numpy())
    witness.counting = True
    return found


@torch.inference_mode()
def _drawn(engine: Engine, seen: Round, names: list[str]) -> list[int]:
    """The first token of a round of each of these prompts."""
    text, counts = seen.text[: len(seen.text) - seen.count], (seen.count,) * len(names)
    device = engine.target.model.device
    state = State([Prompt(name, text) for name in names], len(seen.text) + 1, device)
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
    """Whether first tokens have their exact probabilities."""
    figures: dict[str, object] = {"rounds": seen.rounds, "tokens_impossible": seen.impossible}
    if not seen.rounds:
        return Check("first token", Outcome.blind, "nothing was drafted", figures)
    distance, band = uniform_distance(seen.places), uniform_band(seen.rounds, level / 2)
    bands = [sum_band(spread, level / 2 / len(seen.spread)) for spread in seen.spread.tolist()]
    excess = (seen.counted - seen.expected).tolist()
    names = ["draft's favourites", *(f"likeliest {n + 1}" for n in range(LIKELIEST))]
    off = [name for name, more, most in zip(names, excess, bands, strict=True) if abs(more) > most]
    figures |= {
        "largest_distance": distance,
        "largest_distance_by_chance": band,
        "excess_by_cell": [more / seen.rounds for more in excess],
        "excess_by_cell_by_chance": [most / seen.rounds for most in bands],
    }
    most = max([distance, *(abs(more) / seen.rounds for more in excess)])
    elsewhere = (
        f"first tokens do not have their exact probabilities: {most:.1%} of {seen.rounds} lie elsewhere"
    )
    impossible = (
        f"{seen.impossible} of {seen.rounds} first tokens have probability 0 in the target's distribution"
    )
    faults = [
        (seen.impossible, impossible),
        (off, f"{elsewhere} ({', '.join(off)})"),
        (distance > band, elsewhere),
    ]
    right = f"{seen.rounds} first tokens have their exact probabilities within {distance:.1%}"
    right += f"; {bands[0] / seen.rounds:.1%} too many of the draft's favourites would show"
    return judged("first token", faults, right, figures)
