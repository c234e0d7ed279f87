"""Siblings of drafts: further tokens drawn at a draft's position, which make a chain of drafts a tree.

They need no further pass of the draft model: they are drawn from the distribution that their draft was drawn
from, without the tokens drawn before them. The target's one pass has a column for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from llama_ssp.models.feed import Feed, sent
from llama_ssp.speculative.stats import TreeResult, expected_tokens

CHAIN = -1  # of a column that is no sibling


@dataclass(frozen=True)
class Siblings:
    """Row b has `each[b]` siblings at each of its `drafts[b]` drafts; S is the most of all rows.

    The columns of the target's pass: the token before the drafts, then each draft and its siblings.
    """

    token_BKS: Tensor
    drafts: tuple[int, ...]
    each: tuple[int, ...]

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.drafts, self.each, strict=True))

    @property
    def most(self) -> int:
        """S."""
        return int(self.token_BKS.shape[2])

    @cached_property
    def numbers(self) -> list[list[int]]:
        """Of each row's columns: which sibling it is, counted over drafts, or CHAIN."""
        rows = []
        for drafts, each in self.shapes:
            groups = [[CHAIN, *(i * self.most + j for j in range(each))] for i in range(drafts)]
            rows.append([CHAIN, *(number for group in groups for number in group)])
        return rows

    def columns(self) -> tuple[Tensor, Tensor]:
        """The columns of the token before the drafts and of drafts, (B, K+1), and of siblings, (B, K*S).

        Where there is none: the first column.
        """
        places = self.token_BKS.shape[1] * self.most
        main = [[0] * (1 + self.token_BKS.shape[1]) for _ in self.numbers]
        aside = [[0] * places for _ in self.numbers]
        for row, numbers in enumerate(self.numbers):
            chain = [column for column, number in enumerate(numbers) if number == CHAIN]
            main[row][: len(chain)] = chain
            for column, number in enumerate(numbers):
                if number != CHAIN:
                    aside[row][number] = column
        device = self.token_BKS.device
        return sent(main, device), sent(aside, device)

    def trees(self, rows: list[list[float]]) -> list[TreeResult | None]:
        """What each row's tree brought, from its outcome and the columns that `decision.decide_tree` adds."""
        k, most = self.token_BKS.shape[1], self.most
        found: list[TreeResult | None] = []
        for (outcome, *values), (drafts, each), numbers in zip(rows, self.shapes, self.numbers, strict=True):
            rest = iter(values)
            tokens, chances = ([[*islice(rest, most)][:each] for _ in range(k)] for _ in range(2))
            weights, last = [[*islice(rest, most + 1)] for _ in range(k)], next(rest)
            accepted, place = divmod(int(outcome), most + 1)
            aside = int(tokens[accepted][most - place]) if place else None
            columns = [column for column, number in enumerate(numbers) if number == CHAIN][: accepted + 1]
            if place:
                columns.append(numbers.index(accepted * most + most - place))
            own = chances[:drafts], weights[:drafts], last
            means = [expected_tokens(*own, n) for n in range(each + 1)]
            gain = [mean - means[0] for mean in means[1:]]
            drawn = [list(map(int, some)) for some in tokens[:drafts]]
            found.append(TreeResult(accepted, aside, drawn, gain, 1 - last, columns))
        return found

    def fed(self, feed: Feed) -> list[list[int]]:
        """`numbers` of a pass, which may begin with earlier tokens; empty for rows that are fed nothing."""
        return [
            [*[CHAIN] * (count - drafts - 1), *numbers] if count else []
            for count, drafts, numbers in zip(feed.count, self.drafts, self.numbers, strict=True)
        ]

    def input(self, token_BS: Tensor, feed: Feed) -> Tensor:
        """The tokens of a pass, (B, W): some before the drafts, the drafts and their siblings."""
        size, sources = token_BS.shape[1], []
        for start, numbers in zip(feed.start, self.fed(feed), strict=True):
            place, own = start, []
            for number in numbers:
                own.append(place if number == CHAIN else size + number)
                place += number == CHAIN
            sources.append(own + [0] * (feed.width - len(own)))
        both_BS = torch.cat([token_BS, self.token_BKS.flatten(1)], 1)
        return torch.take_along_dim(both_BS, sent(sources, both_BS.device), 1).to(feed.device)
