"""Prompts through one engine, batch by batch: the clocks and counters that tasks share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llama_ssp.config import ModelConf, OnBadRow
from llama_ssp.errors import DataError, ModelError
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.generate import Limits, Step, generate
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts, counted
from llama_ssp.text.detokenizer import Decode, Writing
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens, conversation

log = logging.getLogger(__name__)

CHARACTERS_A_TOKEN = 16  # more than a text has on the average, so that its beginning tells its length


@dataclass(frozen=True)
class Batch:
    """Texts that are being written together."""

    state: State
    writing: Writing

    def texts(self) -> list[str]:
        """What each row has written so far."""
        return [self.writing.text(row) for row in range(self.state.rows)]


class Batches:
    """Runs batches on one engine. `figures` is right at any moment, also after a failure."""

    def __init__(
        self, engine: AnyEngine, decode: Decode, lookahead: Callable[[int], DraftLength],
        max_new_tokens: int, ends: frozenset[int], stops: list[str],
    ) -> None:  # fmt: skip
        """`lookahead` makes the choice of K for a batch of so many rows."""
        self._engine, self._decode, self._lookahead = engine, decode, lookahead
        self._max_new_tokens, self._ends, self._stops = max_new_tokens, ends, stops
        self._counts = Counts()
        self._prefill_s = self._decode_s = 0.0
        self._prefill_forwards = 0

    def begin(self, prompts: list[Prompt]) -> Batch:
        """Reads a batch's prompts."""
        began, forwards = time.perf_counter(), self._engine.target_forwards
        state = self._engine.prefill(prompts, self._max_new_tokens)
        self._engine.wait()
        self._prefill_s += time.perf_counter() - began
        self._prefill_forwards += self._engine.target_forwards - forwards
        return Batch(state, Writing(self._decode, [p.token_ids for p in prompts], self._stops))

    def steps(self, batch: Batch) -> Iterator[Step]:
        """Rounds until every row has ended; what the caller does between them is on no clock."""
        limits = Limits(self._max_new_tokens, self._ends, batch.writing)
        began = time.perf_counter()
        for step in generate(self._engine, batch.state, limits, self._lookahead(batch.state.rows)):
            self._decode_s += time.perf_counter() - began
            for row in step.rows:
                self._counts.add(row)
            yield step
            began = time.perf_counter()

    def figures(self) -> dict[str, Any]:
        """The counters and clocks under the names of the JSON interface."""
        return {
            "target_forwards": self._engine.target_forwards,
            "target_forwards_prefill": self._prefill_forwards,
            "draft_forwards": self._engine.draft_forwards,
            "overlap": self._engine.overlap,
            **counted(self._counts, self._prefill_s, self._decode_s),
        }


def nothing_run() -> dict[str, Any]:
    """The same figures of a run that got no further than its checks."""
    forwards = dict.fromkeys(("target_forwards", "target_forwards_prefill", "draft_forwards"), 0)
    return {**forwards, "overlap": None, **counted(Counts(), 0.0, 0.0)}


def unusable(text: TextPrompt, ids: list[int], context: int, vocab: int) -> DataError | None:
    """What keeps a model from continuing this prompt."""
    if not ids:
        return DataError(
            "the prompt is empty and the model has no token to begin a text with", where=text.where,
            fix="give the prompt some text",
        )  # fmt: skip
    if len(ids) >= context:
        return _too_long(text.where, f"{len(ids)} tokens", context)
    if max(ids) >= vocab:
        return DataError(
            "the prompt has a token that the model does not know", where=text.where, found=f"id {max(ids)}",
            allowed=f"ids below {vocab}", fix="remove the tokenizer's added tokens from the text",
        )  # fmt: skip
    return None


def encoded(text: TextPrompt, tokens: Tokens, context: int, special: bool = False) -> list[int]:
    """The prompt's tokens. Of a text that is far too long its beginning is enough to refuse it."""
    head = text.text[: CHARACTERS_A_TOKEN * context]
    if len(head) < len(text.text) and len(ids := tokens.encode(head, special)) >= 2 * context:
        raise _too_long(text.where, f"more than {len(ids)} tokens", context)
    return tokens.encode(text.text, special)


def _too_long(where: str, found: str, context: int) -> DataError:
    return DataError(
        "the prompt fills the model's context", where=where, found=found,
        allowed=f"at most {context - 1} of {context}", fix="shorten it; it is never cut silently",
    )  # fmt: skip


def prompt_of(
    text: TextPrompt, tokens: Tokens, model: ModelConf, chat: bool = False, system: str | None = None,
    special: bool = False,
) -> Prompt:  # fmt: skip
    """The prompt as tokens; refused if the model cannot continue it."""
    ids = (
        tokens.chat(conversation(text.text, system))
        if chat
        else encoded(text, tokens, model.context, special)
    )
    ids = begun(ids, tokens)
    problem = unusable(text, ids, model.context, model.vocab)
    if problem is not None:
        raise problem
    return Prompt(text.id, tuple(ids))


def usable_prompts(
    texts: list[TextPrompt], made: Callable[[TextPrompt], Prompt], policy: OnBadRow, skipped: list[str]
) -> list[tuple[TextPrompt, Prompt]]:
    """Those that `made` does not refuse; the others end the run or join the `skipped`, by the policy."""
    usable = []
    for text in texts:
        try:
            usable.append((text, made(text)))
        except DataError as problem:
            if policy is OnBadRow.fail:
                raise
            log.warning("skipped: %s", problem)
            skipped.append(str(problem))
    if texts and not usable:
        raise DataError("no usable prompt is left", found=f"{len(skipped)} bad ones")
    return usable


def begun(ids: list[int], tokens: Tokens) -> list[int]:
    """A text that has no tokens begins with the model's own first token, if it has one."""
    return [tokens.bos_id] if not ids and tokens.bos_id is not None else ids


def damaged(name: str, position: int, stopped: int, of: int) -> ModelError:
    """What is said when a model's logits made no law."""
    return ModelError(
        "a model gave logits that are not numbers (NaN or infinite)",
        where=f"prompt {name!r}, position {position}",
        found=f"{stopped} of {of} prompts stopped there",
        fix="try model.dtype=bf16 or fp32; model.scan=true names a damaged weight",
    )
