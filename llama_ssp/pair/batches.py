"""Prompts as token ids, and batches of them through an engine: the clocks and counters that tasks share."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from llama_ssp.config import RunConf
from llama_ssp.errors import DataError, ModelError
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits, Step, generate
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.prompts import TextPrompt, require_usable
from llama_ssp.text.tokenizer import Message, Tokens

CHARACTERS_A_TOKEN = 16  # more than texts have on average: a text's beginning shows that it is too long
NOT_NUMBERS = "a model gave logits that are not numbers (NaN or infinite)"


class TimedRun:
    """One batch, on a clock that runs only while the engine works, until a GPU has finished."""

    def __init__(
        self, engine: RankEngine, prompts: list[Prompt], room: int | State, counts: Counts | None = None
    ) -> None:
        """Prefills the prompts; adds to `counts` what is counted.

        `room` is for so many new tokens; or it is a batch of one row, whose text the prompt replaces: what
        both begin with is not prefilled (`kept` tokens).
        """
        self._engine = engine
        self.counts = counts or Counts()
        self.kept = 0
        self.first_token_s: float | None = None
        forwards = engine.target_forwards
        engine.synchronize()
        began = time.perf_counter()
        if isinstance(room, int):
            self.state = engine.prefill(prompts, room)
        else:
            self.state = room
            self.kept = engine.admit(room, {0: prompts[0]}, reuse=True)
        engine.synchronize()
        self.counts.prefill_s += time.perf_counter() - began
        self.counts.prefill_forwards += engine.target_forwards - forwards

    @property
    def seconds(self) -> float:
        """Prefill and all rounds so far."""
        return self.counts.prefill_s + self.counts.decode_s

    def rounds(self, limits: Limits, lookahead: DraftLength) -> Iterator[tuple[Step, float]]:
        """Yields every round until the last row has ended, and its seconds."""
        began = time.perf_counter()
        for step in generate(self._engine, self.state, limits, lookahead):
            self._engine.synchronize()
            spent = time.perf_counter() - began
            self.counts.decode_s += spent
            if self.first_token_s is None:
                self.first_token_s = self.seconds
            lookahead.took(step.rows, spent)
            for row in step.rows:
                self.counts.add(row)
            yield step, spent
            began = time.perf_counter()

    def figures(self) -> dict[str, Any]:
        """Returns times and counters under the names of the JSON interface."""
        first_s = self.first_token_s
        return {
            **self.counts.figures(),
            "time_to_first_token_ms": None if first_s is None else 1000 * first_s,
            "tokens_per_s": self.counts.tokens_per_s,
        }


def nothing_run() -> dict[str, Any]:
    """Returns the figures of a run that got no further than its checks."""
    forwards = dict.fromkeys(("target_forwards", "target_forwards_prefill", "draft_forwards"), 0)
    return {**forwards, "overlap": None, **Counts().figures(), "tokens_per_s": None}


def require_numbers(*texts: tuple[str, int, str | None]) -> None:
    """Raises ModelError if one of the texts, as `texts_of` gives them, ended on logits without numbers."""
    stopped = [(name, length) for name, length, reason in texts if reason == "error"]
    if stopped:
        name, position = stopped[0]
        raise ModelError(
            NOT_NUMBERS,
            where=f"prompt {name!r}, position {position}",
            found=f"{len(stopped)} of {len(texts)} prompts stopped there",
            fix="try model.dtype=bf16 or fp32, or fetch the model again",
        )


def texts_of(state: State) -> list[tuple[str, int, str | None]]:
    """Returns the batch's texts as `require_numbers` takes them."""
    names = [prompt.id for prompt in state.prompts]
    return list(zip(names, state.lengths, state.finished, strict=True))


def prompt_of(text: TextPrompt, tokens: Tokens, run: RunConf, messages: Sequence[Message] = ()) -> Prompt:
    """Returns the prompt, or a conversation, as token ids. Raises DataError where it does not fit."""
    task = run.task
    if messages or task.chat:
        messages = list(messages) or [{"role": "user", "content": text.text}]
        if task.system and messages[0]["role"] != "system":
            require_usable(TextPrompt("system", task.system, "task.system"))
            messages.insert(0, {"role": "system", "content": task.system})
        ids = tokens.chat(messages)
    else:
        # The beginning of a text that is far too long is enough to refuse it.
        context = run.model.context
        special = task.special_tokens
        head = text.text[: CHARACTERS_A_TOKEN * context]
        if len(head) < len(text.text) and len(ids := tokens.encode(head, special)) >= 2 * context:
            raise _too_long(text, f"more than {len(ids)} tokens", context)
        ids = tokens.encode(text.text, special)
    return usable(text, ids, tokens, run, 0 if task.max_new_tokens else 2)


def usable(text: TextPrompt, ids: list[int], tokens: Tokens, run: RunConf, beyond: int = 0) -> Prompt:
    """Returns the prompt of these tokens; where there are none, of the model's first token, if it has one.

    Raises DataError where the model cannot continue it. A text that is only scored may be longer: its last
    token is not read, and none follows it, so `beyond` is 2. Its tokens must be the tokenizer's: logits that
    only fill up the model's vocabulary have no probability.
    """
    context = run.model.context
    vocab = run.model.vocab
    vocab = min(vocab, tokens.size) if beyond else vocab
    if not ids and tokens.bos_id is not None:
        ids = [tokens.bos_id]
    if not ids:
        raise DataError(
            "the prompt is empty and the model has no token to begin a text with",
            where=text.where,
            fix="give the prompt some text",
        )
    if len(ids) >= context + beyond:
        raise _too_long(text, f"{len(ids)} tokens", context, beyond)
    if (odd := next((i for i in ids if not 0 <= i < vocab), None)) is not None:
        raise DataError(
            "the prompt has a token that the model does not know",
            where=text.where,
            found=f"id {odd}",
            allowed=f"ids from 0, below {vocab}",
            fix="remove the tokenizer's added tokens from the text",
        )
    return Prompt(text.id, tuple(ids))


def _too_long(text: TextPrompt, found: str, context: int, beyond: int = 0) -> DataError:
    allowed = f"at most {context + beyond - 1}"
    if not beyond:
        allowed += f" of {context}"
    return DataError(
        "the prompt fills the model's context",
        where=text.where,
        found=found,
        allowed=allowed,
        fix="shorten it; it is never cut silently",
    )
