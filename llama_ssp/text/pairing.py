"""What is done about two vocabularies: nothing, a bridge, or a refusal with examples. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llama_ssp.config import USUAL_COST_RATIO, Bridging, RunConf
from llama_ssp.errors import ModelError
from llama_ssp.text.compatibility import Diagnosis, VocabularyMatch, diagnose
from llama_ssp.text.translation import Bridge, Intersection, Text
from llama_ssp.text.vocabulary import Vocabulary

# How often a draft of the target's own vocabulary is taken to stand, and how much less often one stands
# that is proposed as a certainty while the target samples (0.75 for 0.89 at temperature 1, measured).
USUAL_ACCEPTANCE, CERTAINTY_LOSS, LONGEST = 0.8, 0.84, 16


@dataclass(frozen=True)
class Pairing:
    """What was asked for, and what the choice of a bridge depends on."""

    how: Bridging = Bridging.auto
    greedy: bool = False
    cost_ratio: float = USUAL_COST_RATIO

    @staticmethod
    def of(run: RunConf) -> Pairing:
        spec = run.speculation
        ratio = USUAL_COST_RATIO if spec.cost_ratio is None else spec.cost_ratio
        return Pairing(spec.bridge, run.sampling.temperature == 0, ratio)


@dataclass(frozen=True)
class Paired:
    """What was found, and the bridge that follows; None where ids mean the same on both sides."""

    diagnosis: Diagnosis
    bridge: Bridge | None

    @property
    def word(self) -> str | None:
        """The bridge's name."""
        if self.bridge is None:
            return None
        how = Bridging.intersection if isinstance(self.bridge, Intersection) else Bridging.text
        return how.name

    def in_words(self) -> str:
        bridge = f"; bridge: {self.word}" if self.word else ""
        return f"vocabularies: {self.diagnosis.in_words()}{bridge}"

    def record(self) -> dict[str, Any]:
        return {**self.diagnosis.record(), "bridge": self.word}


def pair(target: Vocabulary, draft: Vocabulary, widths: tuple[int, int], asked: Pairing) -> Paired:
    """The pair, or a refusal; `widths` are how many logits each has."""
    found = diagnose(target, draft, widths)
    _require_usable(found, asked.how)
    if not found.bridged:
        return Paired(found, None)
    how = chosen(found, asked) if asked.how is Bridging.auto else asked.how
    made = Intersection if how is Bridging.intersection else Text
    return Paired(found, made(target, draft, found.match, found.expansion))


def chosen(found: Diagnosis, asked: Pairing) -> Bridging:
    """The bridge with the most to expect, by what both can propose and what that costs."""
    by_token = USUAL_ACCEPTANCE * found.ceiling
    by_text = USUAL_ACCEPTANCE * (1.0 if asked.greedy else CERTAINTY_LOSS)
    cost = max(asked.cost_ratio, 1e-3)
    gains = {
        Bridging.intersection: _best(by_token, cost, 0),
        Bridging.text: _best(by_text, cost * found.expansion, 1),  # one more is drafted than is proposed
    }
    return max(gains, key=lambda how: gains[how])


def _best(rate: float, cost: float, ahead: int) -> float:
    expected = [sum(rate**i for i in range(k + 1)) / (1 + (k + ahead) * cost) for k in range(1, LONGEST + 1)]
    return max(expected)


def _require_usable(found: Diagnosis, how: Bridging) -> None:
    suspect = how is Bridging.auto and found.verdict is VocabularyMatch.misleading
    if suspect or (found.bridged and how is Bridging.off):
        alike = " of the same size" if found.verdict is VocabularyMatch.misleading else ""
        raise ModelError(
            f"target and draft have different tokenizers{alike}",
            found=f"{found.tokens[0]} and {found.tokens[1]} tokens, {found.differing} differ "
            f"({', '.join(found.examples)})",
            allowed="the same tokens with the same ids",
            fix="choose a draft of the same family; if these are the right tokenizers, speculation.bridge="
            "intersection (or text) pairs them by what their tokens stand for",
        )  # fmt: skip
    if found.cut is not None:
        raise ModelError(
            "target and draft have the same tokens but cut text differently",
            found=repr(found.cut),
            allowed="the same merges and special tokens",
            fix="choose a draft of the same family",
        )
    if found.beyond:
        raise ModelError(
            "target and draft have the same tokens but not the same vocabulary sizes",
            found=f"{found.widths[0]} and {found.widths[1]} logits, {len(found.beyond)} tokens only in the "
            f"larger ({', '.join(map(repr, found.beyond[:3]))})",
            allowed="sizes that differ by padding only", fix="choose a draft of the same family",
        )  # fmt: skip
