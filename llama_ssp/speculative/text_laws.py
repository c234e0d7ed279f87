"""What a model's distribution gives the tokens of texts that are there, for replays (replay.py).

A model's law at a place depends on the text before it alone, so one pass over whole texts gives all of them.
A drafter's may depend on where the round began: it is then asked at each place, and its drafts are made to be
the text's own tokens.

Shapes: B rows, K drafts, V the target's vocabulary, M places of a part of a pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.models.passes import sent
from llama_ssp.speculative.drafters.local import Drafter
from llama_ssp.speculative.logprobs import text_parts
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws, Slot
from llama_ssp.speculative.sampling import Prefix, SamplingTransform, likeliest
from llama_ssp.speculative.state import State

InTarget = Callable[[Tensor], Tensor]


class TokenLaw(NamedTuple):
    """Holds the log-probability of a token, and the mean and the variance of that of a token drawn there."""

    logprob: float
    mean: float = 0.0
    variance: float = 0.0


NEVER = TokenLaw(-inf)


@torch.inference_mode()
def token_laws(
    runner: ModelRunner,
    fed: State,
    places: Sequence[Sequence[int]],
    texts: State,
    transform: SamplingTransform,
    in_target: InTarget | None = None,
    top: int | None = None,
) -> list[list[TokenLaw]]:
    """Returns the laws of each text's tokens after its prompt, under the sampling settings.

    `fed` holds the texts in the model's own tokens: `places[b][j]` of them stand before token j of row b. At
    a place of 0, and after what is fed, the model has no law. `in_target` makes the model's logits, (M, its
    own vocabulary), those of the target's tokens. A draft's law is of its `top` likeliest tokens alone.
    """
    result = [[NEVER] * len(of_row) for of_row in places]
    done = [0] * fed.rows
    for starts, stops, logit_BWV in text_parts(runner, fed):
        wanted = list[tuple[int, int, int]]()  # row, token, column
        for row, of_row in enumerate(places):
            while done[row] < len(of_row) and of_row[done[row]] <= stops[row]:
                place = of_row[done[row]]
                if place:
                    wanted.append((row, done[row], place - 1 - starts[row]))
                done[row] += 1
        if not wanted:
            continue

        rows, numbers, columns = zip(*wanted, strict=True)
        device = logit_BWV.device
        row_M, column_M = sent([rows, columns], device)
        logit_MV = logit_BWV[row_M, column_M]
        if in_target is not None:
            logit_MV = in_target(logit_MV)

        prompts = [texts.prompt_lengths[row] for row in rows]
        lengths = [prompt + number for prompt, number in zip(prompts, numbers, strict=True)]
        length_M, prompt_M = sent([lengths, prompts], device)
        prefix = Prefix(texts.token_BS.to(device)[row_M], length_M[:, None], prompt_M)
        probs_MV = likeliest(transform(logit_MV[:, None], prefix)[:, 0], top)

        tokens = [texts.texts[row][length] for row, length in zip(rows, lengths, strict=True)]
        laws = _laws(probs_MV, sent(tokens, device))
        for row, number, law in zip(rows, numbers, laws, strict=True):
            result[row][number] = law
    return result


def _laws(probs_MV: Tensor, token_M: Tensor) -> list[TokenLaw]:
    """Returns the laws of these tokens; NaN where the distribution is NaN."""
    logprob_MV = probs_MV.log()
    own_M = logprob_MV.gather(1, token_M[:, None])[:, 0]
    finite_MV = logprob_MV.masked_fill(probs_MV == 0, 0.0)  # 0 * log(0) counts as 0
    mean_M = (probs_MV * finite_MV).sum(1)
    square_M = (probs_MV * finite_MV.square()).sum(1)
    variance_M = (square_M - mean_M.square()).clamp(min=0)
    rows = torch.stack([own_M, mean_M, variance_M], 1).tolist()
    return [TokenLaw(logprob=row[0], mean=row[1], variance=row[2]) for row in rows]


@dataclass
class TextDraws(CounterDraws):
    """Draws the texts' own tokens, by row: what declares how likely they are draws them, and goes on with
    them.

    After a text's end it draws token 0, which nobody reads.
    """

    texts: list[list[int]] = field(default_factory=list)

    def categorical(self, probs_BV: Tensor, slot: Slot) -> Tensor:
        places = [base + slot.offset for base in slot.bases]
        tokens = [
            text[place] if place < len(text) else 0 for text, place in zip(self.texts, places, strict=True)
        ]
        return sent(tokens, probs_BV.device)


@dataclass(frozen=True)
class StartLaws:
    """Holds what a drafter gives a text's tokens: `logprobs[t][i]` of token t + i in a round begun after t.

    `reach[t]` is how many drafts it makes there.
    """

    logprobs: list[list[float]]
    reach: list[int]


@torch.inference_mode()
def laws_by_start(
    drafter: Drafter, target: ModelRunner | None, state: State, answers: Sequence[Sequence[int]], k: int
) -> list[StartLaws]:
    """Returns the drafter's laws for rounds of k drafts that begin at each token of each answer.

    `state` has the prompts, and room for the answers and k tokens. The drafter's draws are `TextDraws`; the
    `target` is one whose passes it reads, and is fed token by token, as by regular sampling.
    """
    if target is not None:
        target.start(state.rows, state.capacity)
    drafter.start(state.rows, state.capacity)
    if target is not None:
        target.prefill(state.token_BS, [length - 1 for length in state.lengths])
    drafter.prefill(state)

    result = [StartLaws([], []) for _ in answers]
    for start in range(max(map(len, answers))):
        count = tuple(_count(drafter, target, state, row, k) for row in range(state.rows))
        proposal = drafter.propose(state, count)
        following = [list(answer[start : start + proposal.k]) for answer in answers]
        logprob_BK = _of_drafts(proposal.draft_BKV, following)

        for row, answer in enumerate(answers):
            if start < len(answer):
                made = proposal.count[row]
                known = logprob_BK[row][: min(made, len(following[row]))]
                result[row].logprobs.append([*known, *[-inf] * (k - len(known))])
                result[row].reach.append(made)

        state.append({row: [answer[start]] for row, answer in enumerate(answers) if start < len(answer)})
        for row, answer in enumerate(answers):
            if start + 1 == len(answer):
                state.finished[row] = "length"
        if target is not None and not all(state.ended):
            ends = [
                cached if ended else length - 1
                for cached, ended, length in zip(target.cached, state.ended, state.lengths, strict=True)
            ]
            target.prefill(state.token_BS, ends)
        drafter.roll_back(state.lengths)
    return result


def _count(drafter: Drafter, target: ModelRunner | None, state: State, row: int, k: int) -> int:
    """Returns how many drafts the row gets in a round that begins now, as `Engine.draft` has it."""
    if state.ended[row]:
        return 0
    length = state.lengths[row]
    count = min(k, drafter.limit(length))
    return count if target is None else min(count, target.room(length))


def _of_drafts(draft_BKV: Tensor | None, following: list[list[int]]) -> list[list[float]]:
    """Returns the drafts' log-probability of the tokens that follow, row by row; of others any number."""
    if draft_BKV is None:
        return [[] for _ in following]
    width = draft_BKV.shape[1]
    tokens = [[*of_row, *[0] * (width - len(of_row))] for of_row in following]
    token_BK = sent(tokens, draft_BKV.device)
    probs_BK = draft_BKV.gather(2, token_BK[:, :, None])[:, :, 0]
    logprobs: list[list[float]] = probs_BK.double().log().tolist()
    return logprobs
