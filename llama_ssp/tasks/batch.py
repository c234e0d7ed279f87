"""task=batch: every record of a file answered exactly once, whatever is killed when.

The leader reads the input, keeps the journal and writes; it broadcasts each shard's texts to the other ranks.
The distribution of a record's answer depends on the job's settings and the record alone. Its bytes depend on
rounding, too: equal batches give equal bytes; others, in fp32, equal bytes up to ties (docs/batch.md).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from llama_ssp.batch.attempt_log import Attempt
from llama_ssp.batch.continuous_batching import ContinuousBatch, TokenRequest
from llama_ssp.batch.job import Job, longest_in, require_good
from llama_ssp.batch.journal import BEAT_S, STALE_S, Journal
from llama_ssp.batch.manifest import Shard
from llama_ssp.batch.requests import Refused, Request
from llama_ssp.batch.responses import BROKEN, Reply, answer, refusal
from llama_ssp.config import MOST_ROWS, BatchConf, LogprobsOf
from llama_ssp.distributed.comm import broadcast_json
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import DataError, StorageError, first_line, lacks_gpu_memory
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.pair.batches import NOT_NUMBERS, nothing_run, prompt_of
from llama_ssp.pair.session import PairSession
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.console import Progress
from llama_ssp.report.tables import figure
from llama_ssp.tasks.common import Task
from llama_ssp.tasks.interactive import while_others_wait
from llama_ssp.text.prompts import TextPrompt

log = logging.getLogger(__name__)

LOOK_S = 2.0  # between looks at claims that may lapse


class BatchTask(Task[BatchConf]):
    """One process's part in a job: shards until none is left to take."""

    _journal: Journal | None = None
    _rows: ContinuousBatch | None = None
    _answered = _refused = _set_aside = 0
    _max_rows = MOST_ROWS  # fewer, where the GPU's memory was full

    def run(self) -> str:
        pair = self._open()
        longest, missing, shards = while_others_wait(self._ranks, partial(self._begin, pair))
        if missing:
            pair.load(min(self._task.batch_size, missing), longest)
            if self._journal is not None:  # the leader's
                tried = [placed.role for placed in pair.placements if placed.on_trial]
                self._journal.keep_trials({role: pair.engines[role] for role in tried})
            engine, lookahead = pair.engine(self._inputs.seed), partial(lookahead_for, pair.run)
            sampled = self._task.logprobs_of is LogprobsOf.sampled
            self._rows = ContinuousBatch(engine, pair.tokens.decode, lookahead, pair.end_ids, sampled)
        if shards and self._ranks.is_leader:
            self._lead(pair)
        elif shards:
            self._follow()
        return self._end() if self._journal is not None else "done"

    def has_output(self) -> bool:
        return self._answered > 0

    def figures(self) -> dict[str, Any]:
        standing = self._journal.standing() if self._journal else None
        counts = ("records", "records_finished", "shards", "shards_done", "attempts")
        return {
            "output": self._task.output,
            "work": str(self._journal.folder) if self._journal else None,
            **{name: getattr(standing, name, None) for name in counts},
            "records_answered_here": self._answered,
            "records_refused_here": self._refused,
            "records_set_aside_here": self._set_aside,
            **{key: self._pair_figures()[key] for key in ("devices", "engines")},
            **(self._rows.figures() if self._rows else {**nothing_run(), "tokens_per_s": None}),
        }

    def measurements(self) -> list[RunMeasurement]:
        """One; prompts are read between the rounds, so they are in its time."""
        return self._measurement(self._rows.figures(), ", with prompts") if self._rows else []

    def _begin(self, pair: PairSession) -> list[int]:
        """Opens the journal; the tokens of the longest text, and how many records and shards are missing."""
        self._journal = begin(self._job, pair)
        standing = self._journal.standing()
        log.info("job %s: %s", self._journal.folder, standing.in_words())
        if not standing.records:
            log.warning("%s holds no records", self._task.input)
        missing, shards = standing.records - standing.records_finished, standing.shards - standing.shards_done
        return [longest_in(self._journal), missing, shards]

    @property
    def _job(self) -> Job:
        """The job, which the leader alone has."""
        assert self._inputs.job is not None
        return self._inputs.job

    def _lead(self, pair: PairSession) -> None:
        """Shard by shard, until each is done or another process works on it."""
        journal = self._journal
        assert journal is not None
        with Progress("batch", journal.manifest.records, "records") as progress:
            progress.start(journal.standing().records_finished)
            while (taken := self._claimed(journal)) is not None:
                shard, claim = taken
                with claim:
                    self._shard(journal, shard, pair, progress.advance)
        broadcast_json([], self._ranks)

    def _claimed(self, journal: Journal) -> tuple[Shard, AbstractContextManager[None]] | None:
        """A shard, and the claim on it; None when each one left is a living process's.

        Whether a process of another machine lives shows within a minute: it renews its claims, or they lapse.
        """
        if (taken := journal.claim()) is None and (silent := journal.silent()):
            log.info("the rest is claimed: at most %.0f s until it shows whether others work on it", STALE_S)
            until = time.monotonic() + STALE_S + BEAT_S  # whatever the clock of the claims says
            while taken is None and silent and time.monotonic() < until:
                broadcast_json({"works": [], "rows": 1}, self._ranks)  # else they give the leader up
                time.sleep(LOOK_S)
                taken, silent = journal.claim(), silent & journal.silent()
        return taken

    def _follow(self) -> None:
        """Takes part in the leader's batches until it broadcasts an empty list."""
        while plain := broadcast_json([], self._ranks):
            if not plain["works"]:
                continue  # the leader waits
            assert self._rows is not None
            works = [TokenRequest.of_plain(one) for one in plain["works"]]
            for _ in self._rows.write(works, plain["rows"], lambda _: None):
                pass

    def _shard(
        self, journal: Journal, shard: Shard, pair: PairSession, advance: Callable[[int], None]
    ) -> None:
        """One attempt at a shard's missing records; each during which an attempt died is written alone."""
        attempt = journal.attempt(shard)
        GUARD.on_signal.append(attempt.excuse)
        try:
            missing = len(attempt.missing)
            ready = self._ready(attempt, pair)
            advance(missing - len(ready))
            alone = [work for work in ready if attempt.failures[work.index]]
            others = [work for work in ready if not attempt.failures[work.index]]
            for works, rows in [*(([work], 1) for work in alone), (others, self._task.batch_size)]:
                self._write(works, rows, attempt, advance)
            attempt.publish()
        except (KeyboardInterrupt, StorageError):
            attempt.excuse()
            raise
        finally:
            GUARD.on_signal.remove(attempt.excuse)

    def _ready(self, attempt: Attempt, pair: PairSession) -> list[TokenRequest]:
        """The shard's missing texts, the longest first. Lines that make no request are answered here."""
        ready = []
        for index in attempt.missing:
            record, deaths = self._job.records[index], attempt.failures_alone[index]
            work = tokenised(record, pair)
            if isinstance(work, Refused):
                self._refuse(attempt, work, refusal(work, work.error))
            elif deaths >= self._task.retries:
                log.warning("set aside: %s, after %d attempts died during it alone", record.id, deaths)
                self._set_aside += 1
                said = f"set aside: {deaths} attempts died while they worked on this record alone"
                self._refuse(attempt, record, refusal(record, said, BROKEN))
            else:
                ready.append(work)
        return sorted(ready, key=lambda work: -work.longest)

    def _write(
        self, works: list[TokenRequest], rows: int, attempt: Attempt, advance: Callable[[int], None]
    ) -> None:
        """Writes texts on every rank, `rows` at a time, and commits each answer.

        Where a single GPU's memory is full, the rest is written half as many rows at a time.
        """
        while works:
            assert self._rows is not None
            rows = min(rows, self._max_rows)
            broadcast_json({"works": [asdict(work) for work in works], "rows": rows}, self._ranks)
            left = {work.index: work for work in works}
            try:
                for written in self._rows.write(works, rows, attempt.begin):
                    self._commit(attempt, written)
                    del left[written.index]
                    advance(1)
            except RuntimeError as error:
                # Other ranks do not know that one of them lacks memory, and wait.
                if self._ranks.world > 1 or rows == 1 or not lacks_gpu_memory(error):
                    raise
                self._max_rows = rows // 2
                said = self.full_gpu(error) or first_line(error)
                log.warning("%d rows at a time from here on, as with %d: %s", self._max_rows, rows, said)
            works = list(left.values())

    def _commit(self, attempt: Attempt, written: Reply) -> None:
        request = self._job.records[written.index]
        assert isinstance(request, Request)
        if written.finish_reason == "error":
            log.warning("%s: %s", request.where, NOT_NUMBERS)
            self._refuse(attempt, request, refusal(request, NOT_NUMBERS, BROKEN))
            return
        assert self._pair is not None
        model, spell = self._inputs.pairs[0].target, self._pair.tokens.spell
        attempt.finish(request.index, answer(request, written, model, spell))
        self._answered += 1

    def _refuse(self, attempt: Attempt, record: Request | Refused, line: dict[str, Any]) -> None:
        attempt.finish(record.index, line)
        self._refused += 1

    def _end(self) -> str:
        """Writes the output if the whole job is done, also by other processes."""
        journal, job = self._journal, self._job
        assert journal is not None
        standing = journal.standing()
        accepted = (figures := self.figures())["acceptance_rate"]
        told = f"{figures['tokens_committed']} tokens, {figure(figures['tokens_per_s'], 1)} tokens/s"
        told += "" if accepted is None else f", {accepted:.0%} accepted"
        counts = self._answered, self._refused, self._set_aside
        log.info("%s; here: %d answered, %d refused, %d set aside, %s", standing.in_words(), *counts, told)
        if not standing.whole:
            log.info("others are at work on the rest; the last to end writes %s", job.output)
            return "partial"
        journal.merge(job.output)
        log.info("output: %s", job.output)
        return "done"


def begin(job: Job, pair: PairSession) -> Journal:
    """The job's journal. Of a new job every prompt is tokenised once, so that bad ones are refused first."""
    longest, refused = 2, list[Refused]()
    records = job.records if job.is_new else []
    with Progress("reading prompts", len(records), "prompts") as progress:
        for record in records:
            work = tokenised(record, pair)
            if isinstance(work, Refused):
                refused.append(work)
            else:
                longest = max(longest, min(work.longest, pair.run.model.context))
            progress.advance(1)
    require_good(job.run, refused)
    return job.begin(longest)


def tokenised(record: Request | Refused, pair: PairSession) -> TokenRequest | Refused:
    """The request as token ids, or why the model cannot continue it."""
    if isinstance(record, Refused):
        return record
    stops = tuple(pair.tokens.stops(record.stop))
    how = record.sampling, record.max_new_tokens, stops, record.seed, record.logprobs, record.echo
    text, task = TextPrompt(record.id, record.said, record.where), pair.run.task
    assert isinstance(task, BatchConf)
    run = replace(pair.run, task=replace(task, max_new_tokens=record.max_new_tokens))
    try:
        return TokenRequest(record.index, prompt_of(text, pair.tokens, run, record.messages), *how)
    except DataError as error:
        return Refused(record.index, record.id, record.form, str(error))
