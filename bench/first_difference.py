"""Finds the first difference between texts that two commits wrote, and says whether it is a tie.

Both sides write a text that differs again, with log-probabilities. In a greedy text the difference is a tie
if, on both sides, the log-probabilities of both tokens are within 1e-5; in a sampled text if both sides write
equal texts with each of the next three seeds. A run may have one tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

APART = 1e-5 + 1e-9  # of log-probabilities, which are printed with six digits
NEXT_SEEDS, MAX_TIES = (1, 2, 3), 1


@dataclass(frozen=True)
class Text:
    """A text's token ids, or a chat's characters. `scores` are log-probabilities, the prompt's first."""

    tokens: Sequence[int | str]
    is_greedy: bool = False
    scores: Sequence[dict[str, Any]] = ()

    def likely(self, place: int) -> dict[int | str, float]:
        """Returns the log-probabilities by token at a place; 0 for a prompt's first token, which has none."""
        if not 0 <= place < len(self.scores):
            return {}
        score = self.scores[place]
        return {entry["token_id"]: entry["logprob"] or 0.0 for entry in [*score["top_logprobs"], score]}


Key = tuple[int, str]  # seed and id
Texts = Mapping[Key, Text]
# Writes a text again on both sides: with seeds so far from its seed, and with log-probabilities or without.
Rewrite = Callable[[Key, Sequence[int], bool], list[tuple[Text, Text]]]


def first_difference(name: str, base: Texts, today: Texts, rewrite: Rewrite, ties: list[str]) -> str:
    """Returns the first difference, or nothing; a difference that counts as a tie is added to `ties`."""
    for key in {**base, **today}:
        text = f"{name}, seed {key[0]}, text {key[1]!r}"
        if key not in base or key not in today:
            return f"{text}: only {'base' if key in base else 'today'} has it"
        old, new = base[key], today[key]
        if old.tokens != new.tokens:
            said, is_tie = judged(key, old, new, rewrite)
            if not is_tie or len(ties) == MAX_TIES:
                return f"{text}, {said}{'; a run may have one tie' * is_tie}"
            ties.append(f"{text}, {said}")
        elif apart := scores_apart(old, new):
            return f"{text}, {apart}"
    return ""


def scores_apart(old: Text, new: Text) -> str:
    """Returns the first log-probability that differs by more than 1e-5, or nothing.

    A token in one list alone is compared with the least likely of the other: both may share a last place.
    """
    if len(old.scores) != len(new.scores):
        return f"{len(old.scores)} log-probabilities by base, {len(new.scores)} by today"
    prompt = len(old.scores) - len(old.tokens)
    for place in range(len(old.scores)):
        tables = old.likely(place), new.likely(place)
        tops = [[x["logprob"] for x in text.scores[place]["top_logprobs"]] for text in (old, new)]
        least = [min(top, default=0.0) for top in tops]
        for token in {**tables[0], **tables[1]}:
            left, right = (table.get(token, low) for table, low in zip(tables, least, strict=True))
            if abs(left - right) > APART:
                at = f"position {place - prompt}" if place >= prompt else f"position {place} of the prompt"
                return f"{at}, token {token}: log-probability {left:.6f} by base, {right:.6f} by today"
    return ""


def judged(key: Key, old: Text, new: Text, rewrite: Rewrite) -> tuple[str, bool]:
    """Returns the first difference of two texts, and whether it is a tie."""
    place = next(i for i, (a, b) in enumerate(zip_longest(old.tokens, new.tokens)) if a != b)
    again, end = rewrite(key, [0], True)[0], place + 1
    repeats = all(x.tokens[:end] == y.tokens[:end] for x, y in zip((old, new), again, strict=True))
    tables = [text.likely(len(text.scores) - len(text.tokens) + place) if repeats else {} for text in again]
    tokens: list[Any] = [text.tokens[place] if place < len(text.tokens) else None for text in (old, new)]
    entries = [entry for text in again for score in text.scores for entry in [score, *score["top_logprobs"]]]
    spelled = {entry["token_id"]: f"{entry['token_id']} {entry['token']!r}" for entry in entries}
    names = [spelled.get(token, "no token" if token is None else repr(token)) for token in tokens]
    said = f"position {place}: {names[0]} by base, {names[1]} by today"
    for table, side in zip(tables, ("base", "today"), strict=True):
        values = [f"{table[token]:.6f}" if token in table else "unknown" for token in tokens]
        said += f", log-probabilities {' and '.join(values)} by {side}"
    if not repeats:
        return f"{said}; no tie: written again, the texts are others", False
    if old.is_greedy:
        gaps = [abs(table[tokens[0]] - table[tokens[1]]) for table in tables if {*tokens} <= {*table}]
        is_tie = len(gaps) == 2 and max(gaps) <= APART
        return f"{said}; {'a tie' if is_tie else 'no tie'}", is_tie
    is_tie = all(x.tokens == y.tokens for x, y in rewrite(key, NEXT_SEEDS, False))
    return f"{said}; {'a tie: ' if is_tie else 'no tie: not '}equal with each of the next three seeds", is_tie
