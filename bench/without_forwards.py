"""Rounds without forward passes, of two models of which only the logits are there.

The next token depends on the last one alone, so a model is a table. A synthetic pair is of this kind
(llama_ssp/models/synthetic.py). `rounds` runs the shipping loop, and `in_the_long_run` says what its rounds
of a shape bring. `brings` says what first rounds of every shape bring, by the rule itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, stdev

import torch
from torch import Tensor

from llama_ssp.config import SamplingConfig
from llama_ssp.models.feed import Feed
from llama_ssp.speculative.draft_length import DraftLength, FixedDraftLength
from llama_ssp.speculative.drafters.local import ModelDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import RowStep, Shape, expected_tokens
from llama_ssp.speculative.verification import TREE, Branches, DraftBlock

MOST_SIBLINGS = 64  # of a round; tables keep nothing of them
APART = 16  # tokens between two contexts
PART = 250  # trees at once
TEXTS, SETTLED, COUNTED = 100, 6, 20  # of `in_the_long_run`: texts, and rounds of each


@dataclass
class NoCache:
    """What a table keeps of a text: nothing."""

    rows: int
    capacity: int

    def row(self, index: int) -> NoCache:
        return NoCache(1, self.capacity)

    def clear(self, row: int) -> None:
        pass

    def nbytes(self) -> int:
        return 0


class Table:
    """A model by its logits behind each token, (V, V)."""

    name, restart, tapped_TX = "table", None, None
    weights_bytes = held_bytes = 0
    context, device = 2**20, torch.device("cpu")

    def __init__(self, logit_VV: Tensor) -> None:
        self.logit_VV, self.vocab, self.dtype = logit_VV, len(logit_VV), logit_VV.dtype

    def tap(self, blocks: tuple[int, ...]) -> None:
        raise NotImplementedError("a table has no hidden states")

    def new_cache(self, rows: int, capacity: int) -> NoCache:
        return NoCache(rows, capacity)

    def logits(self, token_BW: Tensor, feed: Feed, cache: NoCache, last_only: bool) -> Tensor:
        return self.logit_VV[token_BW[:, -1:] if last_only else token_BW]


def rounds(
    target: Table, draft: Table, lookahead: DraftLength, prompts: list[tuple[int, ...]], new: int, seed: int
) -> Iterator[RowStep]:
    """Every row of every round of these prompts' texts, of `new` tokens each."""
    draws = CounterDraws(seed)
    transform = SamplingTransform(SamplingConfig(), (), target.vocab)
    drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    engine = Engine(ModelRunner(target), drafter, transform, TREE, draws, siblings=MOST_SIBLINGS)
    state = engine.prefill([Prompt(str(number), ids) for number, ids in enumerate(prompts)], new)
    for step in generate(engine, state, Limits(new), lookahead):
        yield from step.rows


def expected_of(step: RowStep) -> float:
    """The tokens that a round brings on average over the draws that decide it."""
    siblings = step.tree.gain[-1] if step.tree and step.tree.gain else 0.0
    return 1 + sum(standing for _, standing in step.standing) + siblings


def in_the_long_run(target: Table, draft: Table, shape: Shape) -> tuple[float, float]:
    """The tokens that a round of this shape brings on average, and the standard error.

    A round begins where one of this shape has ended: at a token that the draft may have missed. There it
    brings less than at any place of a text.
    """
    (k, siblings), generator = shape, torch.Generator().manual_seed(0)
    token_BT = torch.randint(target.vocab, (TEXTS, 2), generator=generator)
    lookahead, new = FixedDraftLength(k, TEXTS, siblings), (SETTLED + COUNTED) * (k + 1)
    prompts = [tuple(row) for row in token_BT.tolist()]
    steps = islice(rounds(target, draft, lookahead, prompts, new, 0), SETTLED * TEXTS, new // (k + 1) * TEXTS)
    means = [expected_of(step) for step in steps]
    each = [fmean(means[row::TEXTS]) for row in range(TEXTS)]
    return fmean(each), stdev(each) / TEXTS**0.5


def brings(
    target: Table, draft: Table, k_max: int, most: int, trees: int = 4000
) -> dict[Shape, tuple[float, float]]:
    """The tokens that a round of each shape brings on average, and the standard error: by the chances of
    random trees, of which smaller shapes are parts. Contexts are texts of the target."""
    generator = torch.Generator().manual_seed(0)
    probs = [torch.softmax(table.logit_VV.double(), -1) for table in (target, draft)]
    parts = [_parts(*probs, k_max, most, generator) for _ in range(trees // PART)]
    whole = {shape: torch.cat([part[shape] for part in parts]) for shape in parts[0]}
    return {shape: (float(own.mean()), float(own.std()) / len(own) ** 0.5) for shape, own in whole.items()}


def _parts(
    target_VV: Tensor, draft_VV: Tensor, k_max: int, most: int, generator: torch.Generator
) -> dict[Shape, Tensor]:
    """Of some trees, the tokens that each part of them brings on average."""
    token_B1 = torch.randint(len(target_VV), (PART, 1), generator=generator)
    for _ in range(APART):
        token_B1 = target_VV[token_B1[:, 0]].multinomial(1, generator=generator)
    path, siblings = [token_B1], []
    for _ in range(k_max):
        left_BV, drawn = draft_VV[path[-1][:, 0]], list[Tensor]()
        for _ in range(1 + most):
            none_B1 = left_BV.sum(1, keepdim=True) <= 0
            drawn.append(torch.where(none_B1, 1.0, left_BV).multinomial(1, generator=generator))
            left_BV = left_BV.scatter(1, drawn[-1], 0)
        path.append(drawn[0])
        siblings.append(torch.cat(drawn[1:], 1))
    path_BW, count_B = torch.cat(path, 1), torch.full((PART,), k_max)
    nothing = target_VV[:0]  # what follows a sibling does not matter
    branches = Branches(torch.stack(siblings, 1), torch.full((PART, k_max), most), nothing)
    laws = target_VV[path_BW], draft_VV[path_BW[:, :-1]]
    block = DraftBlock(*laws, path_BW[:, 1:], count_B, branches)
    closed = TREE.closed(block)
    chances, weights = (
        [[one[:, i] for one in found] for i in range(k_max)] for found in (closed.chances[1:], closed.weights)
    )
    shapes = [(k, s) for k in range(k_max + 1) for s in range(1 + most if k else 1)]
    return {
        (k, s): 1
        + block.carried_BW[:, 0] * expected_tokens(chances[:k], weights[:k], block.carried_BW[:, k], s)
        for k, s in shapes
    }
