"""Continuous batching: a row of the batch whose text ends takes the next request at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from llama_ssp.batch.records import Reply
from llama_ssp.config import SamplingConfig
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.rng import prompt_key
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.detokenizer import Decode, Stop, Writing
from llama_ssp.text.logprobs import are_damaged


@dataclass(frozen=True)
class TokenRequest:
    """A request as token ids. `seed` replaces the run's."""

    index: int
    prompt: Prompt
    sampling: SamplingConfig
    max_new_tokens: int
    stop: tuple[Stop, ...]
    seed: int | None = None
    logprobs: int | None = None
    echo: bool = False

    @property
    def longest(self) -> int:
        return len(self.prompt.token_ids) + self.max_new_tokens

    @staticmethod
    def of_plain(plain: dict[str, Any] | TokenRequest) -> TokenRequest:
        """The request, also where its `asdict` went through JSON."""
        if isinstance(plain, TokenRequest):
            return plain
        biases = {int(token): bias for token, bias in plain["sampling"]["logit_bias"].items()}
        prompt = Prompt(plain["prompt"]["id"], tuple(plain["prompt"]["token_ids"]))
        sampling = SamplingConfig(**{**plain["sampling"], "logit_bias": biases})
        return TokenRequest(**{**plain, "prompt": prompt, "sampling": sampling, "stop": tuple(plain["stop"])})


@dataclass
class ContinuousBatch:
    """Answers requests on one engine. `figures` is right at any moment, also after a failure."""

    engine: RankEngine
    decode: Decode
    lookahead: Callable[[int], DraftLength]
    ends: frozenset[int]
    sampled: bool = False  # log-probabilities are of the distribution that is sampled from
    _counts: Counts = field(default_factory=Counts)

    def write(
        self, requests: list[TokenRequest], rows: int, begin: Callable[[list[int]], None],
        more: Callable[[], list[TokenRequest]] = list, longest: int = 0,
    ) -> Iterator[Reply]:  # fmt: skip
        """Yields each reply when its text ends; `begin` is called with the indices that are about to begin.

        `more` gives further requests, the same on every rank, whenever a row would wait; none is the end.
        `longest` is the length that they may have. Prompts that are echoed come first, `rows` at a time: they
        are scored by a pass of their own, then continued, so that few are under way at once.
        """
        echoed = [request for request in requests if request.echo]
        for start in range(0, len(echoed), rows):
            batch = echoed[start : start + rows]
            begin([request.index for request in batch])
            reader = LogprobReader(None, self.sampled)
            for row, request in enumerate(batch):
                self.engine.transform.assign(row, request.sampling)
                reader.by_row[row] = request.logprobs
            found = self.engine.score([request.prompt for request in batch], reader)
            self._echoed = {request.index: scores for request, scores in zip(batch, found, strict=True)}
            for request in batch:
                if not request.max_new_tokens:
                    length, scores = len(request.prompt.token_ids), self._echoed[request.index]
                    finish = "error" if are_damaged(scores) else "length"
                    yield Reply(request.index, "", [], finish, length, [], scores)
            yield from self._write([one for one in batch if one.max_new_tokens], rows, begin, list, 0)
        self._echoed = {}
        yield from self._write([one for one in requests if not one.echo], rows, begin, more, longest)

    def _write(
        self, requests: list[TokenRequest], rows: int, begin: Callable[[list[int]], None],
        more: Callable[[], list[TokenRequest]], longest: int,
    ) -> Iterator[Reply]:  # fmt: skip
        """Continues the prompts, if there are any, `rows` at a time."""
        began = time.perf_counter()
        self.engine.logprobs = LogprobReader(None, self.sampled)
        self._waiting, self._begin, self._more = deque(requests), begin, more
        self._fill(rows)
        if not self._waiting:
            return
        longest = max(longest, *(request.longest for request in self._waiting))
        self._in_row = dict[int, TokenRequest]()
        texts = [request.prompt.token_ids for request in islice(self._waiting, rows)]
        self._writing = Writing(self.decode, texts, [])
        self._limits = Limits(0, self.ends, self._writing)
        state = self.engine.prefill([*self._take(range(rows)).values()], 0, longest)
        for step in generate(self.engine, state, self._limits, self.lookahead(state.rows), self):
            for taken in step.rows:
                self._counts.add(taken)
            self._counts.decode_s += time.perf_counter() - began
            for taken in step.rows:
                if taken.finish is not None:
                    yield self._reply(state, taken.row, taken.finish)
            began = time.perf_counter()

    def admit(self, engine: RankEngine, state: State) -> list[int]:
        """Puts waiting requests into rows that have ended; called by `generate` before each round."""
        free = [row for row, reason in enumerate(state.finished) if reason is not None]
        if len(self._waiting) < len(free):
            engine.flush()  # what `more` exchanges must not come between a decision's messages
            self._fill(len(free))
        if prompts := self._take(free):
            engine.admit(state, prompts)
        return list(prompts)

    def _fill(self, count: int) -> None:
        """Has at least so many requests wait, if there are more."""
        while len(self._waiting) < count and (new := self._more()):
            self._waiting.extend(new)
        if len(self._waiting) < count:
            self._more = list  # it is not asked again: other ranks no longer answer

    def _take(self, rows: Sequence[int]) -> dict[int, Prompt]:
        """Puts waiting requests into rows, with all that each has of its own; returns their prompts."""
        taken = {row: self._waiting.popleft() for row in rows[: len(self._waiting)]}
        if taken:
            self._begin([request.index for request in taken.values()])
        for row, request in taken.items():
            self._in_row[row] = request
            self._limits.by_row[row] = request.max_new_tokens
            self._writing.begin(row, request.prompt.token_ids, request.stop)
            self.engine.transform.assign(row, request.sampling)
            self.engine.logprobs.by_row[row] = request.logprobs
            if request.seed is not None:
                self.engine.draws.own[prompt_key(request.prompt.id)] = request.seed
        return {row: request.prompt for row, request in taken.items()}

    def _reply(self, state: State, row: int, finish: str) -> Reply:
        text, ids, index = self._writing.text(row), state.generated(row), self._in_row[row].index
        echoed = self._echoed.get(index, [])
        finish = "error" if are_damaged(echoed) else finish
        return Reply(index, text, ids, finish, state.prompt_lengths[row], state.logprobs[row], echoed)

    def figures(self) -> dict[str, Any]:
        """The counters and clocks under the names of the JSON interface."""
        return {
            "target_forwards": self.engine.target_forwards,
            "draft_forwards": self.engine.draft_forwards,
            "overlap": self.engine.overlap,
            **self._counts.figures(),
            "tokens_per_s": self._counts.tokens_per_s,
        }
