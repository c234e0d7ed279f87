"""Continuous batching: a row of the batch whose text ends takes the next request at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits, Step, generate
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.rng import prompt_key
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.detokenizer import Decode, Stop, TextSoFar
from llama_ssp.text.logprobs import ScoredToken, are_damaged


@dataclass(frozen=True, kw_only=True)
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
    def of_plain(plain: dict[str, Any]) -> TokenRequest:
        """Returns the request whose `asdict` went through JSON."""
        sampling = replace(SamplingConfig(), **plain["sampling"])
        if sampling.logit_bias:  # JSON's keys are texts
            sampling.logit_bias = {int(token): bias for token, bias in sampling.logit_bias.items()}
        return TokenRequest(
            index=plain["index"],
            prompt=Prompt(plain["prompt"]["id"], tuple(plain["prompt"]["token_ids"])),
            sampling=sampling,
            max_new_tokens=plain["max_new_tokens"],
            stop=tuple(plain["stop"]),
            seed=plain["seed"],
            logprobs=plain["logprobs"],
            echo=plain["echo"],
        )


@dataclass(kw_only=True)
class Reply:
    """The text of a request so far. `echoed` are the prompt's log-probabilities."""

    request: TokenRequest
    written: TextSoFar
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # once it has ended
    logprobs: list[ScoredToken] = field(default_factory=list)
    echoed: list[ScoredToken] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def text(self) -> str:
        return self.written.text

    @property
    def index(self) -> int:
        return self.request.index

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt.token_ids)

    @property
    def end(self) -> tuple[str, int, str | None]:
        """The text as `require_numbers` takes it."""
        return self.request.prompt.id, self.prompt_tokens + len(self.token_ids), self.finish_reason


@dataclass(frozen=True)
class Supply:
    """The functions that a batch calls, and how long the texts are that it gets by them.

    `begin` is called with the indices of requests just before these begin; when an echoed prompt has been
    scored and is continued, once more. `more` is called when a row would have no request, and returns further
    ones, the same on every rank and none with `echo`; when it returns none, it is not called again. Texts of
    these requests have `longest` tokens at most, prompt and new ones together.
    """

    begin: Callable[[list[int]], None] = lambda _: None
    more: Callable[[], list[TokenRequest]] = list
    longest: int = 0


NONE = Supply()


@dataclass(kw_only=True)
class ContinuousBatch:
    """Writes the texts of requests on one engine. `figures` is right at any moment, also after a failure.

    With `clocked` prompts are timed apart from rounds, and clocks wait for a GPU.
    """

    engine: RankEngine
    decode: Decode
    lookahead: Callable[[int], DraftLength]
    ends: frozenset[int]
    sampled: bool = False  # log-probabilities are of the distribution that is sampled from
    clocked: bool = False
    replies: dict[int, Reply] = field(default_factory=dict)  # by request, of all that have begun in `rounds`
    _counts: Counts = field(default_factory=Counts)

    def write(self, requests: list[TokenRequest], rows: int, supply: Supply = NONE) -> Iterator[Reply]:
        """Yields each reply when its text ends. Arguments are those of `rounds`.

        Prompts that are echoed come first, `rows` at a time: they are scored by a pass of their own, then
        continued, so that few are under way at once.
        """
        echoed = [request for request in requests if request.echo]
        for start in range(0, len(echoed), rows):
            batch = echoed[start : start + rows]
            supply.begin([request.index for request in batch])
            scores = self.scored(batch)
            for request in batch:
                if not request.max_new_tokens:
                    reply = Reply(request=request, written=self._text_of(request), finish_reason="length")
                    yield self._ended(reply, scores)
            wanted = [one for one in batch if one.max_new_tokens]
            yield from self._write(wanted, rows, Supply(supply.begin), scores)
        yield from self._write([one for one in requests if not one.echo], rows, supply, {})

    def _write(
        self, requests: list[TokenRequest], rows: int, supply: Supply, scores: dict[int, list[ScoredToken]]
    ) -> Iterator[Reply]:
        for step in self.rounds(requests, rows, supply):
            for row in step.rows:
                if row.finish is not None:
                    yield self._ended(self.replies.pop(row.row), scores)

    def _ended(self, reply: Reply, scores: dict[int, list[ScoredToken]]) -> Reply:
        reply.echoed = scores.get(reply.index, [])
        if are_damaged(reply.echoed):
            reply.finish_reason = "error"
        return reply

    def scored(self, requests: Sequence[TokenRequest]) -> dict[int, list[ScoredToken]]:
        """Returns the log-probabilities of each prompt's tokens, by its request; on the leader."""
        reader = LogprobReader(None, self.sampled)
        for row, request in enumerate(requests):
            self.engine.transform.assign(row, request.sampling)
            reader.by_row[row] = request.logprobs
        found = self.engine.score([request.prompt for request in requests], reader)
        return {request.index: scores for request, scores in zip(requests, found, strict=False)}

    def rounds(self, requests: list[TokenRequest], rows: int, supply: Supply = NONE) -> Iterator[Step]:
        """Yields rounds until all texts have ended; their rows have the indices of requests as numbers."""
        self._began = time.perf_counter()
        self.engine.logprobs = LogprobReader(None, self.sampled)
        self._waiting = deque(requests)
        self._begin = supply.begin
        self._more = supply.more
        self._goes_on = True  # until `more` has given nothing
        self._fill(rows)
        if not self._waiting:
            return
        longest = max(supply.longest, *(request.longest for request in self._waiting))
        self._in_row = dict[int, Reply]()
        self._limits = Limits(0, self.ends, self)
        prompts = [*self._take(range(rows)).values()]
        with self._reading():
            state = self.engine.prefill(prompts, 0, longest)
        lookahead = self.lookahead(state.rows)
        try:
            for step in generate(self.engine, state, self._limits, lookahead, self):
                if self.clocked:
                    self.engine.synchronize()
                spent = time.perf_counter() - self._began
                self._counts.decode_s += spent
                lookahead.took(step.rows, spent)
                for row in step.rows:
                    self._counts.add(row)
                    reply = self._in_row[row.row]
                    reply.token_ids += row.tokens
                    reply.finish_reason = row.finish
                    reply.logprobs = state.logprobs[row.row]
                    reply.drafted += len(row.drafted)
                    reply.accepted += row.accepted
                    if row.finish is not None:  # a job may have millions of requests with seeds
                        self.engine.draws.own.pop(prompt_key(reply.request.prompt.id), None)
                yield Step(step.round, [replace(row, row=self._in_row[row.row].index) for row in step.rows])
                self._began = time.perf_counter()
        finally:
            # The old limits refer to this batch, and it to them. Without this cycle caches are freed at once,
            # not when the garbage collector comes by.
            self._limits = Limits(0)

    def admit(self, engine: RankEngine, state: State) -> list[int]:
        """Puts waiting requests into rows that have ended; called by `generate` before each round."""
        free = [row for row, reason in enumerate(state.finished) if reason is not None]
        if self._goes_on and len(self._waiting) < len(free):
            engine.flush()  # what `more` exchanges must not come between a decision's messages
            self._fill(len(free))
        if prompts := self._take(free):
            with self._reading():
                engine.admit(state, prompts)
        return list(prompts)

    def kept(self, row: int, tokens: list[int], last: bool) -> int | None:
        """Adds the row's next tokens to its text; called by `generate` (`TextEnd`)."""
        return self._in_row[row].written.kept(tokens, last)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Takes the time of prompts out of the round's, if the batch is `clocked`."""
        if not self.clocked:
            yield
            return
        forwards = self.engine.target_forwards
        self.engine.synchronize()
        began = time.perf_counter()
        yield
        self.engine.synchronize()
        spent = time.perf_counter() - began
        self._began += spent
        self._counts.prefill_s += spent
        self._counts.prefill_forwards += self.engine.target_forwards - forwards

    def _fill(self, count: int) -> None:
        """Has at least so many requests wait, if there are more."""
        while self._goes_on and len(self._waiting) < count:
            requests = self._more()
            self._waiting.extend(requests)
            self._goes_on = bool(requests)  # else it is not asked again: other ranks no longer answer

    def _take(self, rows: Sequence[int]) -> dict[int, Prompt]:
        """Puts waiting requests into rows, with all that each has of its own; returns their prompts."""
        taken = {row: self._waiting.popleft() for row in rows[: len(self._waiting)]}
        if taken:
            self._begin([request.index for request in taken.values()])
        for row, request in taken.items():
            self._in_row[row] = self.replies[request.index] = Reply(
                request=request, written=self._text_of(request)
            )
            self._limits.by_row[row] = request.max_new_tokens
            self.engine.transform.assign(row, request.sampling)
            self.engine.logprobs.by_row[row] = request.logprobs
            if request.seed is not None:
                self.engine.draws.own[prompt_key(request.prompt.id)] = request.seed
        return {row: request.prompt for row, request in taken.items()}

    def _text_of(self, request: TokenRequest) -> TextSoFar:
        return TextSoFar(self.decode, request.prompt.token_ids, request.stop)

    def figures(self) -> dict[str, Any]:
        """Returns the counters and clocks under the names of the JSON interface."""
        return {
            "target_forwards": self.engine.target_forwards,
            "target_forwards_prefill": self._counts.prefill_forwards,
            "draft_forwards": self.engine.draft_forwards,
            "overlap": self.engine.overlap,
            **self._counts.figures(),
            "tokens_per_s": self._counts.tokens_per_s,
        }
