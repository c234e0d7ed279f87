"""Do target and draft speak the same tokens? The finding, in words and figures. No torch, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from llama_ssp.text.matching import Match, match
from llama_ssp.text.prompts import SENTENCES, SHORT
from llama_ssp.text.vocabulary import Vocabulary, readable, shown

PROBES = [
    "The quick brown fox", " leading space", "trailing  ", "\n\n\tdef f(x):\n    return x ** 2",
    "1234567890 3.14159", "naïve café", "日本語のテキスト", "🙂🙃", "a\u0301", "<s></s>", "(){}[]", "'\"\\",
]  # fmt: skip
SAMPLE = "\n".join([*SENTENCES, *SHORT])  # what shares are taken of


class VocabularyMatch(Enum):
    """`misleading`: as many ids, which mean other tokens; who compares sizes takes them for the same."""

    same = "same"
    padded = "same but padded"
    different = "different"
    misleading = "same size but different"


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `ceiling` is the share of a sample's target tokens that the draft has, too:
    no more of them can be accepted one for one. `expansion` is draft tokens for a target token there.
    """

    verdict: VocabularyMatch
    tokens: tuple[int, int]
    widths: tuple[int, int]
    match: Match
    differing: int  # tokens
    examples: tuple[str, ...]
    cut: str | None
    beyond: tuple[str, ...]
    notes: tuple[str, ...]
    ceiling: float = 1.0
    expansion: float = 1.0

    @property
    def bridged(self) -> bool:
        """Whether ids have to be translated."""
        return self.verdict in (VocabularyMatch.different, VocabularyMatch.misleading)

    def in_words(self) -> str:
        """One line, without what is done about it."""
        if self.verdict is VocabularyMatch.same:
            said = f"same, {self.tokens[0]} tokens"
        elif self.verdict is VocabularyMatch.padded:
            said = (
                f"same but padded, {min(self.tokens)} tokens in {self.widths[0]} and {self.widths[1]} rows; "
                "the others are never drawn"
            )
        else:
            said = (
                f"{self.verdict.value}, {self.match.shared} of the target's {self.tokens[0]} tokens are "
                f"among the draft's {self.tokens[1]}; of a sample text {self.ceiling:.0%}, with "
                f"{self.expansion:.1f} draft tokens for one of the target's"
            )
        return "; ".join([said, *self.notes])

    def record(self) -> dict[str, Any]:
        """The same for the summary."""
        return {
            "verdict": self.verdict.value,
            "target_tokens": self.tokens[0],
            "draft_tokens": self.tokens[1],
            "target_rows": self.widths[0],
            "draft_rows": self.widths[1],
            "shared_tokens": self.match.shared,
            "shared_share": self.match.shared / max(self.tokens[0], 1),
            "ceiling_on_sample": self.ceiling,
            "draft_tokens_per_target_token": self.expansion,
            "differing_tokens": self.differing,
            "examples": list(self.examples),
            "notes": list(self.notes),
        }


def diagnose(target: Vocabulary, draft: Vocabulary, widths: tuple[int, int]) -> Diagnosis:
    """`widths` are how many logits each has: they may differ by padding, which no token stands for."""
    differing = sorted(t for t in {*target.ids, *draft.ids} if target.ids.get(t) != draft.ids.get(t))
    counts = len(target.ids), len(draft.ids)
    extra = differing and _only_added(target, draft, differing)
    if not differing or extra:
        verdict = (
            VocabularyMatch.same
            if widths == (target.size, draft.size) and not extra
            else VocabularyMatch.padded
        )
        cut = next((text for text in PROBES if target.encode(text) != draft.encode(text)), None)
        beyond = [] if extra else sorted(t for t, i in target.ids.items() if min(widths) <= i < max(widths))
        known = _identity(min(target.size, draft.size))
        notes = (*_extras(target, draft, differing), *_habits(target, draft))
        return Diagnosis(verdict, counts, widths, known, 0, (), cut, tuple(beyond), notes)
    known, alike = match(target, draft), counts[0] == counts[1] or widths[0] == widths[1]
    telling = _telling(target, draft, differing)[:3]
    sample = target.encode(SAMPLE)
    return Diagnosis(
        VocabularyMatch.misleading if alike else VocabularyMatch.different,
        counts,
        widths,
        known,
        len(differing),
        tuple(f"{readable(t)}: {target.ids.get(t)} and {draft.ids.get(t)}" for t in telling),
        None,
        (),
        _habits(target, draft),
        sum(known.draft_of[i] >= 0 for i in sample) / max(len(sample), 1),
        len(draft.encode(SAMPLE)) / max(len(sample), 1),
    )


def _identity(size: int) -> Match:
    return Match(tuple(range(size)), tuple(range(size)))


def _telling(target: Vocabulary, draft: Vocabulary, differing: list[str]) -> list[str]:
    """Those that both have first: they show best that ids mean other tokens."""
    return sorted(differing, key=lambda t: (t not in target.ids or t not in draft.ids, t))


def _only_added(target: Vocabulary, draft: Vocabulary, differing: list[str]) -> bool:
    """Whether one has the other's tokens with their ids, and added tokens on top."""
    wide, narrow = (target, draft) if len(target.ids) > len(draft.ids) else (draft, target)
    return all(t not in narrow.ids and wide.ids[t] in wide.added for t in differing)


def _extras(target: Vocabulary, draft: Vocabulary, differing: list[str]) -> tuple[str, ...]:
    if not differing:
        return ()
    whose = "target" if len(target.ids) > len(draft.ids) else "draft"
    return (f"{len(differing)} added tokens only in the {whose} ({shown(differing)})",)


def _habits(target: Vocabulary, draft: Vocabulary) -> tuple[str, ...]:
    """What differs beside the tokens. It costs acceptance at most: texts are cut once, by the target's."""
    notes = []
    if target.normaliser != draft.normaliser:
        notes.append("other normalisers")
    begins = [[v.names.get(i, str(i)) for i in v.start] for v in (target, draft)]
    if begins[0] != begins[1]:
        notes.append(f"texts begin with {begins[0] or 'nothing'} and {begins[1] or 'nothing'}")
    ends = [sorted(v.names.get(i, str(i)) for i in v.ends) for v in (target, draft)]
    if ends[0] != ends[1]:
        notes.append(f"texts end with {ends[0] or 'nothing'} and {ends[1] or 'nothing'}, the target's hold")
    if target.template != draft.template:
        notes.append("other chat templates, the target's holds")
    return tuple(notes)
