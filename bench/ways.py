"""The contenders of bench/trees.py, and what their rounds took and brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, stdev

from contenders import begun
from without_forwards import expected_of

from llama_ssp.pair.session import PairSession
from llama_ssp.speculative.draft_length import Costs
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Shape

Brought = Callable[[Shape], tuple[float, float]]  # tokens a round, and their standard error
VOCAB, TOKENS = 2048, 16  # of a synthetic pair, and of its prompts


@dataclass
class Cell:
    """A pair, ready; `brought` if it is synthetic, or else its prompts."""

    draft: str
    dial: str
    ready: PairSession
    brought: Brought | None = None
    prompts: tuple[tuple[int, ...], ...] = ()

    def text(self, number: int) -> tuple[int, tuple[int, ...]]:
        """The seed and the prompt of a text."""
        own = Random(f"{self.draft}, {self.dial}, {number}")
        seed, prompt = own.getrandbits(32), own.choices(range(VOCAB), k=TOKENS)
        return seed, self.prompts[number % len(self.prompts)] if self.prompts else tuple(prompt)


@dataclass(frozen=True)
class Round:
    """What one round took and brought; `mean` on average over the draws that decide it."""

    shape: Shape
    ms: float
    tokens: int
    mean: float


@dataclass
class Way:
    """A contender: K, null for adaptive, and siblings; the rounds of its texts, by their numbers."""

    k: int | None
    siblings: int
    texts: dict[int, list[Round]] = field(default_factory=dict)
    costs: Costs | None = None  # each contender learns from its own rounds

    def play(self, cell: Cell, new: int, number: int) -> Iterator[int]:
        """Writes a text, round by round; the tokens of each. The first text does not count."""
        rounds: list[Round] = []
        seed, ids = cell.text(number)
        self.costs = self.costs or deepcopy(cell.ready.costs)
        prompt = Prompt(str(number), ids)
        _, steps = begun(cell.ready, new, seed, self.k, prompt, self.siblings, self.costs)
        for step, spent in steps:
            row = step.rows[0]
            mean = cell.brought(row.shape)[0] if cell.brought else expected_of(row)
            rounds.append(Round(row.shape, 1000 * spent, len(row.tokens), mean))
            yield len(row.tokens)
        if number:
            self.texts[number] = rounds

    @property
    def rounds(self) -> list[Round]:
        return [one for text in self.texts.values() for one in text]

    def counted(self) -> tuple[float, float]:
        """Tokens a round, and the standard error."""
        tokens = [one.tokens for one in self.rounds]
        return fmean(tokens), stdev(tokens) / len(tokens) ** 0.5

    def predicted(self, brought: Brought) -> tuple[float, float]:
        """The same by the shapes of its rounds."""
        found = [brought(one.shape) for one in self.rounds]
        return fmean(mean for mean, _ in found), fmean(error for _, error in found)

    def clock(self) -> dict[int, float]:
        """Milliseconds a token, by text."""
        return {number: taken(text) / sum(one.tokens for one in text) for number, text in self.texts.items()}

    def fair(self) -> dict[int, float]:
        """The same without the luck of draws."""
        return {number: taken(text) / brings(text) for number, text in self.texts.items()}

    def evened(self, usual: dict[Shape, float]) -> float:
        """Milliseconds a token of all texts, as if each round had taken the usual time of its shape."""
        return sum(usual[one.shape] for one in self.rounds) / brings(self.rounds)

    def shapes(self) -> str:
        """The shapes that it chose most often."""
        common = Counter(one.shape for one in self.rounds).most_common(2)
        return ", ".join(f"{k}x{s} {n / len(self.rounds):.0%}" for (k, s), n in common)


def taken(rounds: list[Round]) -> float:
    return sum(one.ms for one in rounds)


def brings(rounds: list[Round]) -> float:
    return sum(one.mean for one in rounds)


def over(theirs: dict[int, float], ours: dict[int, float]) -> tuple[float, float]:
    """How many times as fast ours is on the texts of both, together, and the standard error."""
    both = sorted(theirs.keys() & ours.keys())
    ratio = sum(theirs[text] for text in both) / sum(ours[text] for text in both)
    apart = [theirs[text] - ratio * ours[text] for text in both]
    return ratio, stdev(apart) / len(both) ** 0.5 / fmean(ours[text] for text in both)
