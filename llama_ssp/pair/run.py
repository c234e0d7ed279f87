"""Drives rounds: requests go in, and what each text gets comes out, round by round. Every task uses it.

    text_run = Run(engine, requests, settings)
    for step in text_run.rounds():
        for row in step.rows:
            print(row.row, text_run.replies[row.row].text)     # the request's index, and its text so far

A row takes up a request; when its text ends, the row takes up the next request at once, while other rows are
in the midst of theirs (continuous batching). Every rank makes the same calls, and all get the same texts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from llama_ssp.pair.requests import Reply, TokenRequest
from llama_ssp.speculative.draft_length import DraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits, Step, generate
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.rng import prompt_key
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.detokenizer import Decode, TextSoFar
from llama_ssp.text.logprobs import ScoredToken


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Says how texts are written: what is the same for all requests of a run.

    With `is_clocked` prompts are timed apart from rounds, and clocks wait for a GPU. Without it a round's
    time is all that passes, the reading of prompts included.
    """

    rows: int  # texts at a time, at most
    lookahead: Callable[[int], DraftLength]  # chooses K, for this many rows
    ends: frozenset[int] = frozenset()  # tokens that end a text
    decode: Decode | None = None  # None: texts are wanted as token ids alone
    is_sampled: bool = False  # log-probabilities are of the distribution that is sampled from
    is_clocked: bool = True


@dataclass(frozen=True)
class Supply:
    """The functions that a run calls, and how long the texts are that it gets by them.

    `begin` is called with the indices of requests just before these begin; when an echoed prompt has been
    scored and is continued, once more. `more` is called when a row would have no request, and returns further
    ones, the same on every rank and none with `echo`; when it returns none, it is not called again. Texts of
    later requests have `longest` tokens at most, prompt and new ones together.
    """

    begin: Callable[[list[int]], None] = lambda _: None
    more: Callable[[], list[TokenRequest]] | None = None
    longest: int = 0


NONE = Supply()


@dataclass(frozen=True)
class TimedStep(Step):
    """Holds what requests got in one round: `row` of each is the request's index."""

    seconds: float = 0.0


class RepliesByRow(dict[int, Reply]):
    """The texts that are being written. Tells `generate` where a stop string ends one (`TextEnd`)."""

    def kept(self, row: int, tokens: list[int], last: bool) -> int | None:
        return self[row].kept(tokens, last)


class Run:
    """Writes the texts of requests on one engine.

    `replies` has the requests that have begun, by index. Also after a failure, these and `counts` are right.
    """

    def __init__(
        self,
        engine: RankEngine,
        requests: Sequence[TokenRequest],
        settings: RunSettings,
        counts: Counts | None = None,
        supply: Supply = NONE,
    ) -> None:
        """Adds to `counts`, if given, what is counted."""
        self.engine = engine
        self.counts = Counts() if counts is None else counts
        self.replies: dict[int, Reply] = {}
        self.state: State | None = None  # the rows, once the first prompts are read
        self.kept = 0  # tokens of the first prompts that were in caches, and not read again
        self.first_token_s: float | None = None  # the first prompts, and the first round

        self._settings = settings
        self._supply = supply
        self._waiting = deque(requests)
        self._goes_on = supply.more is not None  # until `more` has given nothing
        self._scores: dict[int, list[ScoredToken]] = {}  # of echoed prompts, by request
        self._in_row = RepliesByRow()
        self._limits = Limits(0, settings.ends, self._in_row)  # of each row, those of its request
        self._began = 0.0  # when the round that is running did

    def rounds(self) -> Iterator[TimedStep]:
        """Yields rounds until all texts have ended and no further ones come."""
        self._began = time.perf_counter()
        if self.state is None:
            self.begin()
        if self.state is None:
            return
        lookahead = self._settings.lookahead(self.state.rows)
        if self._settings.is_clocked:
            self._began = time.perf_counter()

        for step in generate(self.engine, self.state, self._limits, lookahead, self):
            if self._settings.is_clocked:
                self.engine.synchronize()
            seconds = time.perf_counter() - self._began
            self.counts.decode_s += seconds
            if self.first_token_s is None:
                self.first_token_s = self.counts.prefill_s + self.counts.decode_s
            lookahead.took(step.rows, seconds)

            by_request = []
            for row in step.rows:
                reply = self._in_row[row.row]
                reply.take(row, self.state.logprobs[row.row])
                reply.counts.decode_s += seconds
                self.counts.add(row)
                by_request.append(replace(row, row=reply.index))
                if row.finish is not None:  # a job may have millions of requests with seeds
                    self.engine.draws.own.pop(prompt_key(reply.request.prompt.id), None)
            yield TimedStep(step.round, by_request, seconds)
            if self.engine.were_left:  # the leader's caller does not want the rest
                self.engine.flush()
                return
            self._began = time.perf_counter()

    def free(self) -> None:
        """Frees the engine's caches, also while a traceback keeps the run. The engine cannot be used then."""
        self.state = None
        self.engine.free()

    def begin(self, state: State | None = None) -> None:
        """Takes up the first requests and reads their prompts; `rounds` does it where it was not done.

        `state` is a batch of this engine whose texts have ended. Prompts then replace these texts, and what a
        row's old and new text begin with is not read again.
        """
        self._fill(self._settings.rows)
        if not self._waiting:
            return
        longest = max(self._supply.longest, *(request.longest for request in self._waiting))
        self.engine.logprobs = LogprobReader(None, self._settings.is_sampled)
        prompts = self._take_up(range(self._settings.rows))
        with self._reading():
            if state is None:
                self.state = self.engine.prefill(list(prompts.values()), 0, longest)
            else:
                self.state = state
                self.kept = self.engine.admit(state, prompts, reuse=True)

    def admit(self, engine: RankEngine, state: State) -> list[int]:
        """Puts waiting requests into rows that have ended; called by `generate` before each round."""
        free = [row for row, has_ended in enumerate(state.ended) if has_ended]
        if self._goes_on and len(self._waiting) < len(free):
            engine.flush()  # what `more` exchanges must not come between a decision's messages
            self._fill(len(free))
        prompts = self._take_up(free)
        if prompts:
            with self._reading():
                engine.admit(state, prompts)
        return list(prompts)

    def _take_up(self, rows: Sequence[int]) -> dict[int, Prompt]:
        """Puts waiting requests into rows, with all that each has of its own; returns their prompts."""
        taken = {row: self._waiting.popleft() for row in rows[: len(self._waiting)]}
        if taken:
            self._supply.begin([request.index for request in taken.values()])
        for row, request in taken.items():
            self._in_row[row] = self._reply_to(request)
            self._limits.by_row[row] = request.max_new_tokens
            self.engine.transform.assign(row, request.sampling)
            self.engine.logprobs.by_row[row] = request.logprobs
            if request.seed is not None:
                self.engine.draws.own[prompt_key(request.prompt.id)] = request.seed
        return {row: request.prompt for row, request in taken.items()}

    def _fill(self, count: int) -> None:
        """Has at least so many requests wait, if there are more."""
        while self._goes_on and self._supply.more and len(self._waiting) < count:
            requests = self._supply.more()
            self._waiting.extend(requests)
            self._goes_on = bool(requests)  # else it is not asked again: other ranks no longer answer

    def _reply_to(self, request: TokenRequest) -> Reply:
        """Returns a new reply, which has no text yet."""
        decode = self._settings.decode
        written = TextSoFar(decode, request.prompt.token_ids, request.stop) if decode else None
        reply = Reply(request=request, written=written, echoed=self._scores.get(request.index, []))
        self.replies[request.index] = reply
        return reply

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Takes the time of prompts out of the round's, if the run is clocked."""
        if not self._settings.is_clocked:
            yield
            return
        forwards = self.engine.target_forwards
        self.engine.synchronize()
        began = time.perf_counter()
        yield
        self.engine.synchronize()
        seconds = time.perf_counter() - began
        self._began += seconds
        self.counts.prefill_s += seconds
        self.counts.prefill_forwards += self.engine.target_forwards - forwards

    def ended(self) -> Iterator[Reply]:
        """Yields each reply when its text ends, and forgets it; first those that are only scored."""
        for reply in list(self.replies.values()):
            if reply.finish_reason is not None:
                yield self.replies.pop(reply.index)
        for step in self.rounds():
            for row in step.rows:
                if row.finish is not None:
                    yield self.replies.pop(row.row)

    def score(self) -> None:
        """Scores all prompts, which are echoed, in a pass of its own. What asks for no new token then ends.

        It is called before `begin`: the pass uses the caches anew.
        """
        requests = list(self._waiting)
        self._supply.begin([request.index for request in requests])
        reader = LogprobReader(None, self._settings.is_sampled)
        for row, request in enumerate(requests):
            self.engine.transform.assign(row, request.sampling)
            reader.by_row[row] = request.logprobs
        scores = self.engine.score([request.prompt for request in requests], reader)
        self._scores = {request.index: of_prompt for request, of_prompt in zip(requests, scores, strict=True)}

        self._waiting = deque(request for request in requests if request.max_new_tokens)
        for request in requests:
            if not request.max_new_tokens:
                self._reply_to(request).end("length")


def runs(
    engine: RankEngine,
    requests: Sequence[TokenRequest],
    settings: RunSettings,
    counts: Counts,
    supply: Supply = NONE,
) -> Iterator[Run]:
    """Yields the runs that write these requests; each must be at its end before the next is taken.

    Prompts that are echoed come first, as many as there are rows at a time: their run has scored them, and
    continues them, so that few are under way at once. All other requests are one run.
    """
    echoed = [request for request in requests if request.echo]
    for start in range(0, len(echoed), settings.rows):
        batch = echoed[start : start + settings.rows]
        text_run = Run(engine, batch, settings, counts, Supply(supply.begin))
        text_run.score()
        yield text_run

    plain = [request for request in requests if not request.echo]
    if plain or supply.more:
        yield Run(engine, plain, settings, counts, supply)


def run_figures(engine: RankEngine | None, counts: Counts) -> dict[str, Any]:
    """Returns the counters and clocks of an engine's runs under the names of the JSON interface.

    Without an engine they are those of a run that got no further than its checks.
    """
    return {
        "target_forwards": engine.target_forwards if engine else 0,
        "target_forwards_prefill": counts.prefill_forwards,
        "draft_forwards": engine.draft_forwards if engine else 0,
        "overlap": engine.overlap if engine else None,
        **counts.figures(),
        "tokens_per_s": counts.tokens_per_s,
    }
