"""What rounding of logits does: ties of the first place, greedy texts that differ with drafts, errors.

    python bench/ties.py [model=smollm2-135m-instruct-q4] [dtype=packed] [engine=compiled] [prompts=50]
                         [draft=none] [new=128] [write=FILE.md]

Greedy texts of prompts of facts, code, prose and sums, with K = 0 and with K = 4 (n-grams, or draft=int4). A
tie is a position of a K = 0 text at which the two largest logits are equal. A text differs where a pass of
several tokens rounds to another first place than passes of one; how far the two largest logits are apart
there is printed. Errors are of the logits at the end of each prompt, against fp32 weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surroundings import report  # noqa: E402
from torch import Tensor  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config.compose import composed, pair_words  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.planner.resolve import pair_specs  # noqa: E402
from llama_ssp.speculative.draft_length import FixedDraftLength  # noqa: E402
from llama_ssp.speculative.engine import Observer  # noqa: E402
from llama_ssp.speculative.generate import Limits, generate  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.tasks.arithmetic import questions  # noqa: E402
from llama_ssp.text.prompts import SENTENCES, SHORT  # noqa: E402

FACTS = [f"What is {what}? Answer:" for what in (
    "the capital of France", "photosynthesis", "a prime number", "the largest ocean", "an adjective",
    "the boiling point of water", "a leap year", "gravity", "the theory of evolution", "inflation",
)]  # fmt: skip
TEXTS = [*FACTS, *SHORT, *SENTENCES, *(question.text for question in questions(0, 17, 2))]


@dataclass
class Settings(Words):
    model: str = "smollm2-135m-instruct-q4"
    dtype: str = "packed"
    engine: str = "compiled"
    draft: str = "none"
    prompts: int = 50
    new: int = 128
    write: str = ""


@dataclass
class Seen(Observer):
    """Keeps the first round's logits, and of each round how far the two largest are apart."""

    first: Tensor | None = None
    gaps: list[float] = field(default_factory=list)

    def decided(self, state: Any, _: Any, __: Any, ___: Any, logit_BWV: Any) -> None:
        best, second = logit_BWV[0, 0].float().topk(2).values.tolist()
        self.gaps.append(best - second)
        self.first = logit_BWV[0, 0].double() if self.first is None else self.first


def loaded(told: Settings, dtype: str, engine: str, draft: str = "none") -> PairSession:
    drafts = "speculation=ngram" if draft == "none" else "speculation.k=4"
    words = [f"model.dtype={dtype}", f"engine={engine}", drafts, "sampling=greedy", "out=null"]
    words = pair_words(told.model, None if draft == "none" else draft, [*words, "download=true"])
    run = composed(words)
    return PairSession(pair_specs(run, [], 1)[0]).load(1, 512 + told.new)


def written(pair: PairSession, text: str, k: int, new: int) -> tuple[list[int], Seen]:
    """The text's continuation, whatever would end it, and what was seen."""
    engine = pair.engine(0)
    engine.observer = seen = Seen()
    state = engine.prefill([Prompt("0", tuple(pair.tokens.encode(text)))], new)
    for _ in generate(engine, state, Limits(new), FixedDraftLength(k, 1)):
        pass
    return state.generated(0), seen


def lines(told: Settings) -> Iterator[str]:
    texts = TEXTS[: told.prompts]
    with closing(loaded(told, "fp32", "eager")) as exact:
        right = [written(exact, text, 0, 1)[1].first for text in texts]
    ties = positions = equal = 0
    errors = []
    with closing(loaded(told, told.dtype, told.engine, told.draft)) as pair:
        for text, logit_V in zip(texts, right, strict=True):
            (plain, seen), (drafted, _) = (written(pair, text, k, told.new) for k in (0, 4))
            ties, positions = ties + seen.gaps.count(0.0), positions + len(seen.gaps)
            equal += plain == drafted
            errors.append((seen.first - logit_V).abs())
            if plain != drafted:
                at = next(i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b)
                yield f"{text[:30]!r} differs at token {at}, where the two are {seen.gaps[at]:.4f} apart"
    yield f"{Path(told.model).stem}, {told.dtype}, {told.engine}, draft {told.draft}:"
    yield f"ties of the first place: {ties} in {positions} positions"
    yield f"texts of {told.new} tokens that are equal with K = 0 and K = 4: {equal} of {len(texts)}"
    largest, mean = max(float(e.max()) for e in errors), sum(float(e.mean()) for e in errors) / len(errors)
    yield f"error of logits: at most {largest:.4f}, mean {mean:.5f}"


if __name__ == "__main__":
    settings = Settings.of(sys.argv[1:])
    report(
        settings.write,
        "Ties of logits, and texts with and without drafts",
        {"model": "cpu"},
        *lines(settings),
    )
