"""n-gram drafts: what followed the last few tokens where they stood in the text before. No draft model.

A text's contexts are indexed as it grows, so a round reads only its new tokens, and a look-up takes the same
time in a text of any length. A draft is the token that followed its context most often, the latest of equals;
the next draft's context ends with it. The declared distribution is certain of the token (`certain`). If
drafts were drawn from the counts, the shipped target would accept one draft in a hundred more when sampling
and one less when greedy (bench/ngram.py): too little for draws over the whole vocabulary.

Only the row's own text is read. Drafts from other answers would depend on which rows ran before them; so
would a prompt's text, unless it is greedy, and a restarted job would write other texts.
"""

from collections.abc import Callable
from itertools import takewhile

import torch

from llama_ssp.config import Drafting, SpeculationConfig
from llama_ssp.speculative.drafters.local import Drafter, certain
from llama_ssp.speculative.state import Proposal, State


class Followers:
    """How often each token followed a context that occurred twice or more."""

    __slots__ = ("_counts", "best")

    def __init__(self, token: int) -> None:
        self._counts, self.best = {token: 1}, token

    def add(self, token: int) -> None:
        count = self._counts[token] = self._counts.get(token, 0) + 1
        if count >= self._counts[self.best]:
            self.best = token


class NgramIndex:
    """The contexts of one text, which only grows: at most `longest` tokens each, found in O(longest).

    A context that occurred once is kept as the position after it, and longer contexts that end there are not
    kept. So a text has a few entries a token, however long contexts may be.
    """

    def __init__(self, text: list[int], shortest: int, longest: int) -> None:
        self.text, self._shortest, self._longest = text, shortest, longest
        self._known: dict[tuple[int, ...], int | Followers] = {}
        self._read = 0  # tokens of the text that have been indexed

    def update(self) -> None:
        """Indexes the tokens that the text has got since the last call."""
        for position in range(self._read, len(self.text)):
            self._add(position)
        self._read = len(self.text)

    def _add(self, position: int) -> None:
        """Counts the token at `position` for every context that ends before it."""
        text, known = self.text, self._known
        for size in range(1, min(self._longest, position) + 1):
            context = tuple(text[position - size : position])
            entry = known.get(context)
            if entry is None:
                known[context] = position
                return
            if isinstance(entry, int):  # occurred once: from now on its longer context is kept, too
                if size < min(self._longest, entry):
                    known[tuple(text[entry - size - 1 : entry])] = entry
                known[context] = entry = Followers(text[entry])
            entry.add(text[position])

    def drafts(self, count: int) -> list[int]:
        """Up to `count` tokens that may follow the text; fewer where a context is new."""
        tail = self.text[-self._longest :]
        start = len(tail)
        while len(tail) < start + count and (token := self._next(tail)) is not None:
            tail.append(token)
        return tail[start:]

    def _next(self, tail: list[int]) -> int | None:
        """The token that followed the longest known context most often; None if that is too short."""
        best: int | None = None
        end = len(tail)
        for size in range(1, min(self._longest, end) + 1):
            found = self._known.get(tuple(tail[end - size :]))
            if isinstance(found, int):
                short = self._shortest
                same = size >= short or (
                    found >= short <= end and self.text[found - short : found] == tail[-short:]
                )
                return self.text[found] if same else best
            if found is None:
                return best
            if size >= self._shortest:
                best = found.best
        return best


class NgramDrafter(Drafter):
    """Drafts from an index of each row's text. A row that is refilled has another text, and a new index."""

    def __init__(self, shortest: int, longest: int, vocab: int, dtype: torch.dtype) -> None:
        self._shortest, self._longest, self._vocab, self._dtype = shortest, longest, vocab, dtype
        self._indexes: dict[int, NgramIndex] = {}  # by row

    def start(self, rows: int, capacity: int) -> None:
        self._indexes.clear()

    def limit(self, length: int) -> int:
        return length

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        drafts = [self._drafts(row, state.texts[row], wanted) for row, wanted in enumerate(count)]
        return certain(state, drafts, self._vocab, self._dtype)

    def _drafts(self, row: int, text: list[int], wanted: int) -> list[int]:
        if wanted <= 0:
            return []
        index = self._indexes.get(row)
        if index is None or index.text is not text:
            index = self._indexes[row] = NgramIndex(text, self._shortest, self._longest)
        index.update()
        return list(takewhile(lambda i: i < self._vocab, index.drafts(wanted)))  # a prompt may have others


# What drafts from the text alone, by the name of `speculation.drafter`: of the settings, the size of the
# vocabulary, and the format of probabilities.
TEXT_DRAFTERS: dict[Drafting, Callable[[SpeculationConfig, int, torch.dtype], Drafter]] = {
    Drafting.ngram: lambda spec, *sizes: NgramDrafter(spec.ngram_min, spec.ngram_max, *sizes),
}
