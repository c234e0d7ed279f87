"""How far two models agree greedily on a batch of prompts, and which tokens they take where they part.

The draft writes a chunk, and the target reads it in one pass; both go on with the tokens that both choose.
The target's correction is never taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.distributed.comm import Ranks
from llama_ssp.models.interface import Model
from llama_ssp.pair.batches import require_numbers, texts_of
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import Prefix, SamplingTransform
from llama_ssp.speculative.state import Prompt

Chances = tuple[float, float]  # probabilities of the target's token and of the draft's


@dataclass(frozen=True)
class GreedyMatch:
    """One prompt: the tokens that both choose, with an end token, and why there are no more.

    `finish` is "fork", or, where they never part, "eos", "length" or "context". At a `fork` the first token
    is the target's, the second the draft's.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    finish: str
    fork: tuple[int, int] | None


@dataclass
class MatchRounds:
    """How many there were, and how long they took."""

    count: int = 0
    seconds: float = 0.0


def agreements(
    engine: RankEngine, prompts: Sequence[Prompt], chunk: int, max_new_tokens: int, ends: frozenset[int],
    rounds: MatchRounds,
) -> list[GreedyMatch]:  # fmt: skip
    """Runs a batch on a greedy engine until every row has parted or ended; adds to `rounds`.

    Raises ModelError for logits that are not numbers.
    """
    state = engine.prefill(list(prompts), max_new_tokens)
    engine.synchronize()
    began = time.perf_counter()
    limits = Limits(max_new_tokens, ends)
    forks: list[tuple[int, int] | None] = [None] * state.rows
    while not limits.reached(state):
        room = [limits.room(state, row, engine.context) for row in range(state.rows)]
        proposal = engine.draft(state, [min(chunk, left) for left in room])
        for row, count in enumerate(proposal.count):
            if not count and state.finished[row] is None:
                state.finished[row] = "context"  # the draft's own, which may be shorter
        result = engine.verify(state, proposal)
        for row, count in enumerate(proposal.count):
            if not count:
                continue
            if result.damaged[row]:
                state.finished[row] = "error"
                continue
            accepted = result.drafted[row][: result.accepted[row]]
            kept, reason = limits.trim(state, row, accepted, engine.context)
            state.append(row, accepted[:kept])
            if reason is None and len(accepted) < count:
                reason = "fork"
                forks[row] = result.token[row], result.drafted[row][len(accepted)]
            state.finished[row] = reason
        engine.roll_back(state)
        rounds.count += 1
    engine.flush()
    engine.synchronize()
    rounds.seconds += time.perf_counter() - began
    require_numbers(*texts_of(state))
    return [
        GreedyMatch(state.prompts[row], tuple(state.generated(row)), str(state.finished[row]), fork)
        for row, fork in enumerate(forks)
    ]


def fork_chances(
    model: Model | None, found: Sequence[GreedyMatch], transform: SamplingTransform, chunk: int
) -> tuple[list[Chances | None], int]:
    """The model's probabilities of the two tokens at each fork, and the forward passes that took.

    None for texts without a fork, and for all texts where this rank has no part of the model.
    """
    forks = [(row, *one.fork) for row, one in enumerate(found) if one.fork is not None]
    chances: list[Chances | None] = [None] * len(found)
    if not forks or model is None:
        return chances, 0
    texts = [(*found[row].prompt.token_ids, *found[row].tokens) for row, *_ in forks]
    lengths = [len(text) for text in texts]
    token_BS = pad_sequence([torch.tensor(text) for text in texts], True).to(model.device)
    runner = ModelRunner(model, chunk)
    runner.start(len(texts), max(lengths))
    logit_B1V = runner.logits(token_BS, lengths, [1] * len(texts))
    prompt_B = token_BS.new_tensor([len(found[row].prompt.token_ids) for row, *_ in forks])
    probs_BV = transform(logit_B1V, Prefix(token_BS, token_BS.new_tensor(lengths)[:, None], prompt_B))[:, 0]
    for (row, target, draft), probs_V in zip(forks, probs_BV, strict=True):
        chances[row] = float(probs_V[target]), float(probs_V[draft])
    return chances, runner.forwards


def from_any(ranks: Ranks, own: list[Chances | None]) -> list[Chances | None]:
    """The chances of whichever rank has them, on every rank; they are sent in units of 2^-53."""
    packed = [round(p * 2**53) for pair in own for p in pair or (-1.0, -1.0)]
    known = [max(said) / 2**53 for said in zip(*ranks.gather_ints(packed), strict=True)]
    return [(a, b) if a >= 0 else None for a, b in zip(known[::2], known[1::2], strict=True)]
