"""Two ways to draft in another vocabulary. Neither changes the distribution of the output. No torch.

Intersection: the draft's distribution restricted to the tokens that both have. Text: what the draft writes is
cut into the target's tokens anew, and each is proposed as a certainty (a one-hot distribution), so that it
stands exactly as often as the target would have drawn it.

Both read the target's text to the draft in the draft's own tokens: the prompt as the draft's tokenizer
cuts it, what was written since as the bridge says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from llama_ssp.text.matching import NONE, Match
from llama_ssp.text.vocabulary import Vocabulary

STRIDE = 48  # target tokens that are translated together at least, if there are so many
TAIL = 8  # target tokens before a draft that are cut with it: a tokenizer looks at what comes before


@dataclass(frozen=True)
class _Reading:
    """`expansion` is about how many tokens of the draft's stand for one of the target's."""

    target: Vocabulary
    draft: Vocabulary
    match: Match
    expansion: float

    def begun(self, prompt: Sequence[int]) -> list[int]:
        """A prompt."""
        start = self.target.start
        parts = _parts(prompt[len(start) :] if tuple(prompt[: len(start)]) == start else prompt, self.target)
        if parts and isinstance(parts[0], bytes) and self.target.begins_with_space:
            parts[0] = parts[0].removeprefix(b" ")  # which its tokenizer put there
        return [*self.draft.start, *self._read(parts)]

    def _read(self, parts: list[bytes | int]) -> list[int]:
        """Texts between special tokens as the draft's tokenizer cuts them, these by their counterparts."""
        return [i for part in parts for i in self._part(part)]

    def _part(self, part: bytes | int) -> list[int]:
        if isinstance(part, bytes):
            return self.draft.encoded(part)
        own = self._own(part)
        if own != NONE:
            return [own]
        return self.draft.encoded(self.target.names[part].encode()) if part in self.target.names else []

    def _own(self, token: int) -> int:
        return self.match.draft_of[token] if token < len(self.match.draft_of) else NONE


@dataclass(frozen=True)
class Intersection(_Reading):
    """Token for token. What only the target has, the draft reads in pieces."""

    def continued(self, written: Sequence[int]) -> list[int]:
        """What was written after it."""
        return [i for token in written for i in self.piece(token)]

    def parting(self, written: Sequence[int], begun: int) -> int | None:
        """The next place at which what was written may be parted: translations of the parts add up."""
        return begun + STRIDE if begun + STRIDE < len(written) else None

    def piece(self, token: int) -> list[int]:
        """One token of the target's."""
        own = self._own(token)
        if own != NONE:
            return [own]
        text = self.target.surfaces[token] if token < self.target.size else None
        return self.draft.cut(text) if text else []


@dataclass(frozen=True)
class Text(_Reading):
    """Through the text itself."""

    def continued(self, written: Sequence[int]) -> list[int]:
        """What was written after it."""
        return self._read(_parts(written, self.target))

    def parting(self, written: Sequence[int], begun: int) -> int | None:
        """The next place at which what was written may be parted: before a space, where words begin."""
        for at in range(begun + STRIDE, len(written)):
            if self.target.text_of(written[at : at + 1])[:1].isspace():
                return at
        return None

    def back(self, before: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What the draft wrote, in the target's tokens, cut as the target would after `before`.

        An end of a text is one of the target's, and nothing comes after it.
        """
        bare = [i for i in drafted if i not in self.draft.special]
        ids = self._cut(before, self.draft.text_of(bare))
        ended = bool(drafted) and drafted[-1] in self.draft.special
        end = self.match.target_of[drafted[-1]] if ended else NONE
        return [*ids, end] if end != NONE else ids

    def _cut(self, before: Sequence[int], text: bytes) -> list[int]:
        if not text:
            return []
        special = self.target.special
        tail = list(before[-TAIL:])
        tail = tail[1 + max((n for n, i in enumerate(tail) if i in special), default=-1) :]
        whole = self.target.encoded(self.target.text_of(tail) + text)
        rest = whole[len(tail) :]
        if whole[: len(tail)] == tail and self.target.text_of(rest) == text:
            return rest
        return self.target.cut(text)


def _parts(ids: Sequence[int], vocabulary: Vocabulary) -> list[bytes | int]:
    """Runs of text as bytes, and special tokens."""
    parts: list[bytes | int] = []
    for special, run in groupby(ids, lambda i: i in vocabulary.special):
        of_one_kind = list(run)
        parts += of_one_kind if special else [vocabulary.text_of(of_one_kind)]
    return parts


Bridge = Intersection | Text
