"""Which tokens of two vocabularies are the same text: tables by bytes, whatever order they came in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llama_ssp.text.vocabulary import Vocabulary

NONE = -1


@dataclass(frozen=True)
class Match:
    """Every draft token has at most one target token, so no chance is counted twice.

    Several draft tokens may have the same one: their chances add up. `draft_of` is the one of them that a
    draft model reads for it. NONE stands for no counterpart.
    """

    target_of: tuple[int, ...]
    draft_of: tuple[int, ...]

    @cached_property
    def shared(self) -> int:
        """How many of the target's tokens the draft can propose."""
        return sum(i != NONE for i in self.draft_of)


def match(target: Vocabulary, draft: Vocabulary) -> Match:
    """By name where both mean the same bytes by it, else by bytes; ends of texts match ends of texts."""
    target_of = [_counterpart(i, target, draft) for i in range(draft.size)]
    draft_of = [NONE] * target.size
    for i, t in enumerate(target_of):
        if t != NONE and (draft_of[t] == NONE or _better(i, draft_of[t], t, target, draft)):
            draft_of[t] = i
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


def _better(one: int, other: int, token: int, target: Vocabulary, draft: Vocabulary) -> bool:
    """Whether the draft would rather read `one` than `other` for the target's token."""
    return _rank(one, token, target, draft) < _rank(other, token, target, draft)


def _rank(i: int, token: int, target: Vocabulary, draft: Vocabulary) -> tuple[bool, bool, int]:
    text = draft.surfaces[i]
    plain = text is not None and draft.by_surface.get(text) == i
    return draft.names[i] != target.names[token], not plain, i
