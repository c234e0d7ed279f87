"""Matches the tokens of two vocabularies, and translates the target's text for the draft model. No torch.

A draft model of another tokenizer proposes from its distribution restricted to the tokens that both have:
the intersection. It reads the target's text in its own tokens: the prompt as its tokenizer cuts it, the text
after it token for token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from llama_ssp.text.vocabulary import Vocabulary

NONE = -1  # no counterpart


@dataclass(frozen=True)
class Match:
    """Tokens of two vocabularies that stand for the same text; NONE: no counterpart.

    Every draft token has at most one target token, so no probability is counted twice. Several draft tokens
    may have the same one, and their probabilities add up; the draft model reads `draft_of` it.
    """

    target_of: tuple[int, ...]
    draft_of: tuple[int, ...]

    @cached_property
    def shared(self) -> int:
        """Returns how many of the target's tokens the draft can propose."""
        return sum(i != NONE for i in self.draft_of)


def match(target: Vocabulary, draft: Vocabulary) -> Match:
    """Matches by name where the bytes are the same, else by bytes; tokens that end a text match."""
    target_of = [_counterpart(i, target, draft) for i in range(draft.size)]
    draft_of = [NONE] * target.size

    def rank(i: int) -> tuple[bool, bool, int]:
        text = draft.surfaces[i]
        plain = text is not None and draft.by_surface.get(text) == i
        return draft.names[i] != target.names[target_of[i]], not plain, i

    for i in sorted((i for i, t in enumerate(target_of) if t != NONE), key=rank, reverse=True):
        draft_of[target_of[i]] = i
    return Match(tuple(target_of), tuple(draft_of))


def _counterpart(i: int, target: Vocabulary, draft: Vocabulary) -> int:
    name = draft.names.get(i)
    if name is None:
        return NONE
    namesake = target.ids.get(name, NONE)
    if i in draft.special:
        if namesake in target.special:
            return namesake
        return min(target.ends, default=NONE) if i in draft.ends else NONE
    text = draft.surfaces[i]
    if not text:
        return NONE
    if namesake != NONE and target.surfaces[namesake] == text:
        return namesake
    return target.by_surface.get(text, NONE)


@dataclass(frozen=True)
class Intersection:
    """Translates target ids to draft ids; `expansion` is the usual number of draft ids for a target id."""

    target: Vocabulary
    draft: Vocabulary
    match: Match
    expansion: float

    def prompt_ids(self, prompt: Sequence[int]) -> list[int]:
        """Returns the draft ids of a prompt: the draft's tokenizer cuts what is between special tokens."""
        start = self.target.start
        ids = [*self.draft.start]
        rest = prompt[len(start) :] if tuple(prompt[: len(start)]) == start else prompt
        for number, (special, run) in enumerate(groupby(rest, lambda i: i in self.target.special)):
            if special:  # a name is text where the draft has no such token
                names = self.target.names
                ids += [i for t in run for i in self._own(t) or self.draft.encoded(names.get(t, "").encode())]
                continue
            text = self.target.text_of(run)
            if number == 0 and self.target.begins_with_space:
                text = text.removeprefix(b" ")  # the target's tokenizer put it there
            ids += self.draft.encoded(text)
        return ids

    def later_ids(self, written: Sequence[int]) -> list[int]:
        """Returns the draft ids of the text after the prompt; a token that the draft lacks is cut."""
        return [i for t in written for i in self._own(t) or self.draft.cut(self.target.text_of([t]))]

    def _own(self, token: int) -> list[int]:
        """Returns the draft's token for a target token; nothing if it has none."""
        return [i for i in self.match.draft_of[token : token + 1] if i != NONE]
