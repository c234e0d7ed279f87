"""How two vocabularies compare, and are used: directly, by the tokens of both, or not at all. No torch."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from llama_ssp.config import Bridging
from llama_ssp.errors import ModelError
from llama_ssp.text.prompts import SENTENCES, SHORT
from llama_ssp.text.translation import Intersection, Match, match
from llama_ssp.text.vocabulary import Vocabulary

PROBES = [
    "The quick brown fox",
    " leading space",
    "trailing  ",
    "\n\n\tdef f(x):\n    return x ** 2",
    "1234567890 3.14159",
    "naïve café",
    "日本語のテキスト",
    "🙂🙃",
    "a\u0301",
    "<s></s>",
    "(){}[]",
    "'\"\\",
]
SAMPLE = "\n".join([*SENTENCES, *SHORT])  # the text that shares are measured on
# The least share of a sample text's tokens that the draft must have: a token that it lacks ends a round's
# drafts, so at one half a round keeps one draft on average, however good the draft is.
LEAST_SHARED = 0.5


class VocabularyMatch(Enum):
    """`misleading`: the same number of ids, but they stand for other tokens."""

    same = "same"
    padded = "same but padded"
    different = "different"
    misleading = "same size but different"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """How two vocabularies compare, and the translation between them. `widths` are the logits of each model.

    `ceiling` is the share of a sample's target tokens that the draft has, too: an upper bound for acceptance
    one for one. `expansion` is the draft tokens for a target token there.
    """

    verdict: VocabularyMatch
    tokens: tuple[int, int]
    widths: tuple[int, int]
    match: Match
    notes: tuple[str, ...]
    differing: int = 0  # tokens
    examples: tuple[str, ...] = ()
    cut: str | None = None  # a text that both tokenize differently
    beyond: tuple[str, ...] = ()  # tokens that only the wider model has logits for
    ceiling: float = 1.0
    expansion: float = 1.0
    bridge: Intersection | None = None  # where ids have to be translated

    @property
    def bridged(self) -> bool:
        """Returns whether ids would have to be translated."""
        return self.verdict in (VocabularyMatch.different, VocabularyMatch.misleading)

    def in_words(self) -> str:
        """Returns it in one line."""
        if self.verdict is VocabularyMatch.same:
            words = f"same, {self.tokens[0]} tokens"
        elif self.verdict is VocabularyMatch.padded:
            rows = f"{self.widths[0]} and {self.widths[1]} rows"
            words = f"same but padded, {min(self.tokens)} tokens in {rows}; the others are never drawn"
        else:
            words = (
                f"{self.verdict.value}, {self.match.shared} of the target's {self.tokens[0]} tokens are "
                f"among the draft's {self.tokens[1]}; of a sample text {self.ceiling:.0%}, with "
                f"{self.expansion:.1f} draft tokens for one of the target's"
            )
        drafts = ["drafts are tokens of both"] if self.bridge else []
        return "; ".join([f"vocabularies: {words}", *self.notes, *drafts])

    def record(self) -> dict[str, Any]:
        """Returns it as plain data, for the summary."""
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
            "bridge": "intersection" if self.bridge else None,
        }


def diagnose(target: Vocabulary, draft: Vocabulary, widths: tuple[int, int]) -> Diagnosis:
    """Compares two vocabularies; `widths` are the logits of each model, which may include padding."""
    differing = sorted(t for t in {*target.ids, *draft.ids} if target.ids.get(t) != draft.ids.get(t))
    counts = (len(target.ids), len(draft.ids))
    notes = _other_settings(target, draft)
    wide, narrow = (target, draft) if counts[0] > counts[1] else (draft, target)
    if all(t not in narrow.ids and wide.ids[t] in wide.added for t in differing):  # extra tokens, or none
        if differing:
            owner = "target" if wide is target else "draft"
            notes = (f"{len(differing)} added tokens only in the {owner} ({_shown(differing)})", *notes)
        unpadded = not differing and widths == (target.size, draft.size)
        verdict = VocabularyMatch.same if unpadded else VocabularyMatch.padded
        cut = next((text for text in PROBES if target.encode(text) != draft.encode(text)), None)
        wider = [t for t, i in target.ids.items() if min(widths) <= i < max(widths) and not differing]
        both = tuple(range(min(target.size, draft.size)))  # each id is the other's
        same = Match(both, both)
        return Diagnosis(
            verdict=verdict,
            tokens=counts,
            widths=widths,
            match=same,
            notes=notes,
            cut=cut,
            beyond=tuple(sorted(wider)),
        )
    known = match(target, draft)
    sample = target.encode(SAMPLE)
    # Tokens of both come first: they show best that ids stand for other tokens.
    first = sorted(differing, key=lambda t: (t not in target.ids or t not in draft.ids, t))[:3]
    examples = tuple(f"{_shown([t])}: {target.ids.get(t)} and {draft.ids.get(t)}" for t in first)
    misleading = counts[0] == counts[1] or widths[0] == widths[1]
    verdict = VocabularyMatch.misleading if misleading else VocabularyMatch.different
    ceiling = sum(known.draft_of[i] >= 0 for i in sample) / max(len(sample), 1)
    expansion = len(draft.encode(SAMPLE)) / max(len(sample), 1)
    return Diagnosis(
        verdict=verdict,
        tokens=counts,
        widths=widths,
        match=known,
        notes=notes,
        differing=len(differing),
        examples=examples,
        ceiling=ceiling,
        expansion=expansion,
    )


def _other_settings(target: Vocabulary, draft: Vocabulary) -> tuple[str, ...]:
    """Differences that cost acceptance at most: the target's tokenizer alone reads the texts."""
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


def _shown(tokens: list[str]) -> str:
    """Returns the first three, for messages."""
    return ", ".join(repr(token if len(token) <= 40 else token[:40] + "...") for token in tokens[:3])


def pair(target: Vocabulary, draft: Vocabulary, widths: tuple[int, int], how: Bridging) -> Diagnosis:
    """Returns how the two are used; `widths` are the logits of each. Raises ModelError if they cannot be."""
    found = diagnose(target, draft, widths)
    family = "choose a draft of the same family"
    misleading = found.verdict is VocabularyMatch.misleading
    if (misleading and how is Bridging.auto) or (found.bridged and how is Bridging.off):
        what = "target and draft have different tokenizers"
        if misleading:
            what += " of the same size"
        counts = f"{found.tokens[0]} and {found.tokens[1]} tokens, {found.differing} differ"
        raise ModelError(
            what,
            found=f"{counts} ({', '.join(found.examples)})",
            allowed="the same tokens with the same ids",
            fix=f"{family}, or pair what tokens stand for: speculation.bridge=intersection",
        )
    if found.bridged and how is Bridging.auto and found.ceiling < LEAST_SHARED:
        what = "the vocabularies of target and draft share too little"
        share = f"the draft has {found.ceiling:.0%} of a sample text's tokens"
        fix = f"{family}, draft with n-grams (speculation=ngram draft=none), "
        fix += "or draft by the shared tokens all the same: speculation.bridge=intersection"
        raise ModelError(what, found=share, allowed=f"{LEAST_SHARED:.0%} or more", fix=fix)
    if found.cut is not None:
        raise ModelError(
            "target and draft have the same tokens but cut text differently",
            found=repr(found.cut),
            allowed="the same merges and special tokens",
            fix=family,
        )
    if found.beyond:
        what = "target and draft have the same tokens but not the same vocabulary sizes"
        only = f"{len(found.beyond)} tokens only in the larger ({', '.join(map(repr, found.beyond[:3]))})"
        raise ModelError(
            what,
            found=f"{found.widths[0]} and {found.widths[1]} logits, {only}",
            allowed="sizes that differ by padding only",
            fix=family,
        )
    if not found.bridged:
        return found
    return replace(found, bridge=Intersection(target, draft, found.match, found.expansion))
