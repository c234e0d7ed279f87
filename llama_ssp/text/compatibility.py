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
    wide, narrow = (target, draft) if counts[0] > counts[1] else (draft, target)
    if all(t not in narrow.ids and wide.ids[t] in wide.added for t in differing):  # extra tokens, or none
        return _of_equal_ids(target, draft, widths, differing)

    known = match(target, draft)
    sample = target.encode(SAMPLE)
    # Tokens of both come first: they show best that ids stand for other tokens.
    first = sorted(differing, key=lambda t: (t not in target.ids or t not in draft.ids, t))[:3]
    is_misleading = counts[0] == counts[1] or widths[0] == widths[1]
    return Diagnosis(
        verdict=VocabularyMatch.misleading if is_misleading else VocabularyMatch.different,
        tokens=counts,
        widths=widths,
        match=known,
        notes=_other_settings(target, draft),
        differing=len(differing),
        examples=tuple(f"{_shown([t])}: {target.ids.get(t)} and {draft.ids.get(t)}" for t in first),
        ceiling=sum(known.draft_of[i] >= 0 for i in sample) / max(len(sample), 1),
        expansion=len(draft.encode(SAMPLE)) / max(len(sample), 1),
    )


def _of_equal_ids(
    target: Vocabulary, draft: Vocabulary, widths: tuple[int, int], extra: list[str]
) -> Diagnosis:
    """Returns the diagnosis where all shared tokens have equal ids; the larger has `extra` added tokens."""
    notes = _other_settings(target, draft)
    if extra:
        owner = "target" if len(target.ids) > len(draft.ids) else "draft"
        notes = (f"{len(extra)} added tokens only in the {owner} ({_shown(extra)})", *notes)
    is_unpadded = not extra and widths == (target.size, draft.size)
    beyond = list[str]()
    if not extra:
        beyond = [t for t, i in target.ids.items() if min(widths) <= i < max(widths)]
    shared = tuple(range(min(target.size, draft.size)))  # each id is the other's
    return Diagnosis(
        verdict=VocabularyMatch.same if is_unpadded else VocabularyMatch.padded,
        tokens=(len(target.ids), len(draft.ids)),
        widths=widths,
        match=Match(shared, shared),
        notes=notes,
        cut=next((text for text in PROBES if target.encode(text) != draft.encode(text)), None),
        beyond=tuple(sorted(beyond)),
    )


def _other_settings(target: Vocabulary, draft: Vocabulary) -> tuple[str, ...]:
    """Differences that cost acceptance at most: the target's tokenizer alone reads the texts."""
    notes = []
    if target.normaliser != draft.normaliser:
        notes.append("other normalisers")
    target_begin = [target.names.get(i, str(i)) for i in target.start]
    draft_begin = [draft.names.get(i, str(i)) for i in draft.start]
    if target_begin != draft_begin:
        notes.append(f"texts begin with {target_begin or 'nothing'} and {draft_begin or 'nothing'}")
    target_ends = sorted(target.names.get(i, str(i)) for i in target.ends)
    draft_ends = sorted(draft.names.get(i, str(i)) for i in draft.ends)
    if target_ends != draft_ends:
        ends = f"{target_ends or 'nothing'} and {draft_ends or 'nothing'}"
        notes.append(f"texts end with {ends}, the target's hold")
    if target.template != draft.template:
        notes.append("other chat templates, the target's holds")
    return tuple(notes)


def _shown(tokens: list[str]) -> str:
    """Returns the first three, for messages."""
    return ", ".join(repr(token if len(token) <= 40 else token[:40] + "...") for token in tokens[:3])


def pair(target: Vocabulary, draft: Vocabulary, widths: tuple[int, int], bridging: Bridging) -> Diagnosis:
    """Returns how the two are used; `widths` are the logits of each. Raises ModelError if they cannot be."""
    result = diagnose(target, draft, widths)
    family = "choose a draft of the same family"
    is_misleading = result.verdict is VocabularyMatch.misleading
    if (is_misleading and bridging is Bridging.auto) or (result.bridged and bridging is Bridging.off):
        of_same_size = " of the same size" if is_misleading else ""
        counts = f"{result.tokens[0]} and {result.tokens[1]} tokens, {result.differing} differ"
        raise ModelError(
            f"target and draft have different tokenizers{of_same_size}",
            found=f"{counts} ({', '.join(result.examples)})",
            allowed="the same tokens with the same ids",
            fix=f"{family}, or pair what tokens stand for: speculation.bridge=intersection",
        )
    if result.bridged and bridging is Bridging.auto and result.ceiling < LEAST_SHARED:
        raise ModelError(
            "the vocabularies of target and draft share too little",
            found=f"the draft has {result.ceiling:.0%} of a sample text's tokens",
            allowed=f"{LEAST_SHARED:.0%} or more",
            fix=f"{family}, draft with n-grams (speculation=ngram draft=none), "
            "or draft by the shared tokens all the same: speculation.bridge=intersection",
        )

    if result.cut is not None:
        raise ModelError(
            "target and draft have the same tokens but cut text differently",
            found=repr(result.cut),
            allowed="the same merges and special tokens",
            fix=family,
        )
    if result.beyond:
        examples = ", ".join(map(repr, result.beyond[:3]))
        beyond = f"{len(result.beyond)} tokens only in the larger ({examples})"
        raise ModelError(
            "target and draft have the same tokens but not the same vocabulary sizes",
            found=f"{result.widths[0]} and {result.widths[1]} logits, {beyond}",
            allowed="sizes that differ by padding only",
            fix=family,
        )

    if not result.bridged:
        return result
    return replace(result, bridge=Intersection(target, draft, result.match, result.expansion))
