"""Drafts what followed the last few tokens where they stood in the text before (n-grams). No draft model.

A text's contexts are indexed as it grows, so a round reads only its new tokens, and a look-up takes the same
time in a text of any length. A draft is the token that followed its context most often, the latest of equals;
the next draft's context ends with it. The declared distribution is certain of the token: so a
draft is accepted with the probability that the target gives it, and a correction is another token. If
drafts were drawn from the counts, the shipped target would accept one draft in a hundred more when sampling
and one less when greedy (bench/ngram.py): too little for draws over the whole vocabulary.

Only the row's own text is read. Drafts from other answers would depend on which rows ran before them; so
would a prompt's text, unless it is greedy, and a restarted job would write other texts.
"""

from collections.abc import Callable

from llama_ssp.config import Drafting, SpeculationConfig
from llama_ssp.speculative.drafters.local import Drafter, Sampler
from llama_ssp.speculative.state import Proposal, State


class Followers:
    """Counts how often each token followed a context that occurred twice or more."""

    __slots__ = ("_counts", "best")

    def __init__(self, token: int) -> None:
        self._counts = {token: 1}
        self.best = token

    def add(self, token: int) -> None:
        """Counts the token; the latest of equals is the best."""
        count = self._counts.get(token, 0) + 1
        self._counts[token] = count
        if count >= self._counts[self.best]:
            self.best = token


class NgramIndex:
    """Indexes the contexts of one text, which only grows: of at most `longest` tokens, found in O(longest).

    A context that occurred once is kept as the position after it, and longer contexts that end there are not
    kept. So a text has a few entries a token, however long contexts may be.
    """

    def __init__(self, text: list[int], shortest: int, longest: int) -> None:
        self.text = text
        self._shortest = shortest
        self._longest = longest
        self._known: dict[tuple[int, ...], int | Followers] = {}
        self._read = 0  # tokens of the text that have been indexed

    def update(self) -> None:
        """Indexes the tokens that the text has got since the last call."""
        for position in range(self._read, len(self.text)):
            self._add(position)
        self._read = len(self.text)

    def _add(self, position: int) -> None:
        """Counts the token at `position` for every context that ends before it."""
        text = self.text
        known = self._known
        for size in range(1, min(self._longest, position) + 1):
            context = tuple(text[position - size : position])
            entry = known.get(context)
            if entry is None:
                known[context] = position
                return
            if isinstance(entry, int):  # occurred once: from now on its longer context is kept, too
                if size < min(self._longest, entry):
                    known[tuple(text[entry - size - 1 : entry])] = entry
                entry = Followers(text[entry])
                known[context] = entry
            entry.add(text[position])

    def drafts(self, count: int) -> list[int]:
        """Returns up to `count` tokens that may follow the text; fewer where a context is new."""
        tail = self.text[-self._longest :]
        start = len(tail)
        while len(tail) < start + count:
            token = self._next(tail)
            if token is None:
                break
            tail.append(token)
        return tail[start:]

    def _next(self, tail: list[int]) -> int | None:
        """Returns the token that followed the longest known context most often; None if that is too short."""
        best: int | None = None
        end = len(tail)
        shortest = self._shortest
        for size in range(1, min(self._longest, end) + 1):
            entry = self._known.get(tuple(tail[end - size :]))
            if entry is None:
                return best

            if isinstance(entry, int):
                # It occurred once, and longer contexts that end there are not kept: the text itself tells
                # whether the shortest that counts is the same.
                is_long_enough = size >= shortest
                if not is_long_enough and shortest <= min(entry, end):
                    is_long_enough = self.text[entry - shortest : entry] == tail[-shortest:]
                return self.text[entry] if is_long_enough else best

            if size >= shortest:
                best = entry.best
        return best


class NgramDrafter(Drafter):
    """Drafts from an index of each row's text. A row that is refilled has another text, and a new index."""

    def __init__(self, shortest: int, longest: int, sampler: Sampler) -> None:
        self._shortest = shortest
        self._longest = longest
        self._sampler = sampler
        self._indexes: dict[int, NgramIndex] = {}  # by row

    def start(self, rows: int, capacity: int) -> None:
        self._indexes.clear()

    def limit(self, length: int) -> int:
        return length

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        drafts = [self._drafts(row, state.texts[row], wanted) for row, wanted in enumerate(count)]
        return self._sampler.certain(state, drafts)

    def _drafts(self, row: int, text: list[int], wanted: int) -> list[int]:
        if wanted <= 0:
            return []
        index = self._indexes.get(row)
        if index is None or index.text is not text:
            index = NgramIndex(text, self._shortest, self._longest)
            self._indexes[row] = index
        index.update()

        return index.drafts(wanted)


def _ngram_drafter(spec: SpeculationConfig, sampler: Sampler) -> Drafter:
    return NgramDrafter(spec.ngram_min, spec.ngram_max, sampler)


# What drafts from the text alone, by the name of `speculation.drafter`: made of the settings and of what a
# drafter needs of a run.
TEXT_DRAFTERS: dict[Drafting, Callable[[SpeculationConfig, Sampler], Drafter]] = {
    Drafting.ngram: _ngram_drafter,
}
