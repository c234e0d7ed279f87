"""What rounding of logits does: ties of the first place, greedy texts that differ with drafts, errors.

    python bench/ties.py [model=smollm2-135m-instruct-q4] [dtypes=packed,bf16] [engines=compiled,eager]
                         [drafts=none,int4] [rounded=false] [prompts=50] [new=128] [write=FILE.md]

Greedy texts of prompts of facts, code, prose and sums, with K = 0 and with K = 4 (drafts=none: n-grams). A
tie is a position of a K = 0 text at which the two largest logits are equal, or would be, were they rounded to
16 bit as a product in 16 bit rounds them; rounded=true writes the texts with such logits. A text differs
where a pass of several tokens rounds to another first place than passes of one; how far the two largest
logits are apart there is printed. Errors are of the logits at the end of each prompt, against fp32 weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from surroundings import report  # noqa: E402
from torch import Tensor  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config.compose import composed, pair_words  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.placing.pairs import pair_specs  # noqa: E402
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
    dtypes: str = "packed"
    engines: str = "compiled"
    drafts: str = "none"
    rounded: bool = False
    prompts: int = 50
    new: int = 128
    write: str = ""


@dataclass
class Seen(Observer):
    """Keeps the first round's logits, and of each round the two largest."""

    first: Tensor | None = None
    largest: list[Tensor] = field(default_factory=list)

    def decided(self, state: Any, _: Any, __: Any, ___: Any, logit_BWV: Any) -> None:
        self.largest.append(logit_BWV[0, 0].topk(2).values)
        self.first = logit_BWV[0, 0].double() if self.first is None else self.first

    def ties(self, dtype: torch.dtype) -> int:
        return sum(bool(best == second) for best, second in (pair.to(dtype) for pair in self.largest))


class Rounded:
    """A sampling transform that gets logits as a product in bf16 would give them."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform

    def __call__(self, logit_BWV: Tensor, prefix: Any) -> Any:
        return self._transform(logit_BWV.bfloat16().float(), prefix)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)


def loaded(told: Settings, dtype: str, engine: str, draft: str = "none") -> PairSession:
    drafts = "speculation=ngram" if draft == "none" else "speculation.k=4"
    words = [f"model.dtype={dtype}", f"engine={engine}", drafts, "sampling=greedy", "out=null"]
    words = pair_words(told.model, None if draft == "none" else draft, [*words, "download=true"])
    run = composed(words)
    return PairSession(pair_specs(run, [], 1)[0]).load(1, 512 + told.new)


def written(pair: PairSession, text: str, k: int, told: Settings, new: int) -> tuple[list[int], Seen]:
    """The text's continuation, whatever would end it, and what was seen."""
    engine = pair.engine(0)
    if told.rounded:
        engine.transform = Rounded(engine.transform)
    engine.observer = seen = Seen()
    state = engine.prefill([Prompt("0", tuple(pair.tokens.encode(text)))], new)
    for _ in generate(engine, state, Limits(new), FixedDraftLength(k, 1)):
        pass
    return state.generated(0), seen


def lines(told: Settings) -> Iterator[str]:
    texts = TEXTS[: told.prompts]
    with closing(loaded(told, "fp32", "eager")) as exact:
        right = [written(exact, text, 0, told, 1)[1].first for text in texts]
    for dtype, engine in product(told.dtypes.split(","), told.engines.split(",")):
        yield f"\n## {Path(told.model).stem}, {dtype}, {engine}"
        plain = list[tuple[list[int], Seen]]()
        for draft in told.drafts.split(","):
            with closing(loaded(told, dtype, engine, draft)) as pair:
                plain = plain or [written(pair, text, 0, told, told.new) for text in texts]
                drafted = [written(pair, text, 4, told, told.new)[0] for text in texts]
            equal = 0
            for text, (expected, seen), found in zip(texts, plain, drafted, strict=True):
                equal += expected == found
                if expected != found:
                    at = next(i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
                    apart = float(seen.largest[at][0] - seen.largest[at][1])
                    yield f"- {text[:30]!r}, draft {draft}: differs at token {at}, the two {apart:.4f} apart"
            yield f"- draft {draft}: {equal} of {len(texts)} texts equal with K = 0 and K = 4"
        ties, rounded = (sum(seen.ties(of) for _, seen in plain) for of in (torch.float32, torch.bfloat16))
        positions = sum(len(seen.largest) for _, seen in plain)
        yield f"- ties of the first place: {ties} of {positions} positions; rounded to bf16: {rounded}"
        errors = [(seen.first - logit_V).abs() for (_, seen), logit_V in zip(plain, right, strict=True)]
        largest = max(float(error_V.max()) for error_V in errors)
        mean = sum(float(error_V.mean()) for error_V in errors) / len(errors)
        yield f"- error of logits: at most {largest:.4f}, mean {mean:.5f}"


if __name__ == "__main__":
    settings = Settings.of(sys.argv[1:])
    found = list(lines(settings))
    title = "Ties of logits, and texts with and without drafts"
    report(settings.write, title, {"model": "cpu"}, *found)
