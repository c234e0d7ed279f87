"""task=batch: every record of a file answered exactly once, whatever is killed when.

The leader reads, keeps the journal and writes; the other ranks are told each shard's texts. In fp32, what a
record gets depends on the job's seed and the record alone; in 16 bit and less also on how its batch rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from llama_ssp.batch.attempt_log import Attempt
from llama_ssp.batch.continuous_batching import ContinuousBatch, TokenRequest
from llama_ssp.batch.job import longest_in
from llama_ssp.batch.journal import Journal
from llama_ssp.batch.manifest import Shard
from llama_ssp.batch.requests import Refused, Request
from llama_ssp.batch.responses import BROKEN, Reply, answer, refusal
from llama_ssp.config import BatchConf
from llama_ssp.distributed.comm import Ranks, broadcast_json
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import StorageError
from llama_ssp.pair.assembly import RankModels, engine_with, lookahead_for, open_pair, rule_of
from llama_ssp.pair.batches import nothing_run
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.run_folder import Console, Progress, RunFolder
from llama_ssp.report.tables import aligned, figure
from llama_ssp.speculative.native import draws_for
from llama_ssp.speculative.sampling import RowTransforms
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.batch_begin import begin, token_ids
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.interactive import while_others_wait
from llama_ssp.tasks.run_measurement import way
from llama_ssp.text.tokenizer import Tokens

log = logging.getLogger(__name__)

NAN = "a model gave logits that are not numbers (NaN or infinite)"


class BatchTask:
    """One process's part in a job. `figures` is right at any moment, also after a failure."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        assert isinstance(inputs.run.task, BatchConf)
        self._inputs, self._task, self._ranks = inputs, inputs.run.task, ranks
        self._run = inputs.pairs[0].run
        self._journal: Journal | None = None
        self._pair: RankModels | None = None
        self._rows: ContinuousBatch | None = None
        self._row_count = 0
        self._answered = self._refused = self._set_aside = 0

    def run(self) -> str:
        """Takes on shards until none is left to take; done once the job's output is there."""
        found = model_placements(self._inputs.pairs[0])
        tokens = tokens_of(found)
        longest, missing, shards = while_others_wait(self._ranks, partial(self._begin, tokens))
        if missing:
            self._row_count = min(self._task.batch_size, missing)
            self._pair = open_pair(found, self._run, self._row_count, longest, self._ranks)
            self._rows = self._writer(self._pair, tokens)
        if shards and self._ranks.is_leader:
            self._lead(tokens)
        elif shards:
            self._follow()
        return self._end() if self._journal is not None else "done"

    def has_output(self) -> bool:
        return self._answered > 0

    def figures(self) -> dict[str, Any]:
        """The task's part of the summary."""
        figures = self._rows.figures() if self._rows else {**nothing_run(), "tokens_per_s": None}
        standing = self._journal.standing() if self._journal else None
        return {
            "output": self._task.output,
            "work": str(self._journal.folder) if self._journal else None,
            "records": standing.records if standing else None,
            "records_finished": standing.finished if standing else None,
            "records_answered_here": self._answered,
            "records_refused_here": self._refused,
            "records_set_aside_here": self._set_aside,
            "shards": standing.shards if standing else None,
            "shards_done": standing.shards_done if standing else None,
            "attempts": standing.attempts if standing else None,
            "devices": self._pair.devices if self._pair else {},
            **figures,
        }

    def ways(self) -> list[RunMeasurement]:
        """One; prompts are read between the rounds, so they are in its time."""
        if self._pair is None or self._rows is None:
            return []
        drafter = self._inputs.pairs[0].drafter
        name = "regular" if drafter is None else "speculative"
        return [way(f"{name}, with prompts", self._pair, self._run, self._row_count, self._rows.figures())]

    def _begin(self, tokens: Tokens) -> list[int]:
        """The journal, new or continued: how long a text may get, how many records and shards are missing."""
        job = self._inputs.job
        assert job is not None
        self._journal = begin(job, tokens)
        standing = self._journal.standing()
        log.info("job %s: %s", self._journal.folder, standing.in_words())
        if not standing.records:
            log.warning("%s holds no records", self._task.input)
        missing, shards = standing.records - standing.finished, standing.shards - standing.shards_done
        return [longest_in(self._journal), missing, shards]

    def _writer(self, pair: RankModels, tokens: Tokens) -> ContinuousBatch:
        run, ends = self._run, frozenset() if self._task.ignore_eos else tokens.end_ids
        transform = RowTransforms(run.sampling, tuple(sorted(ends)), min(pair.vocab, tokens.size))
        draws = draws_for(pair.target, rule_of(run), self._inputs.seed)
        engine = engine_with(pair, run, tokens, transform, draws, self._task.prefill_chunk)
        return ContinuousBatch(
            engine,
            transform,
            draws,
            tokens.decode,
            partial(lookahead_for, run),
            ends,
            self._task.prefill_chunk,
        )

    def _lead(self, tokens: Tokens) -> None:
        """Shard by shard, until none is left that nobody works on."""
        journal = self._journal
        assert journal is not None
        with Progress("batch", journal.manifest.records, "records") as progress:
            progress.start(journal.standing().finished)
            while (taken := journal.claim()) is not None:
                shard, claim = taken
                with claim:
                    self._shard(journal, shard, tokens, progress.advance)
        broadcast_json([], self._ranks)

    def _follow(self) -> None:
        """Writes along, in step with the leader, until no work comes."""
        while plain := broadcast_json([], self._ranks):
            assert self._rows is not None
            works = [TokenRequest.of_plain(one) for one in plain["works"]]
            for _ in self._rows.write(works, plain["rows"], lambda _: None):
                pass

    def _shard(self, journal: Journal, shard: Shard, tokens: Tokens, advance: Callable[[int], None]) -> None:
        """One attempt at a shard: what earlier ones have not finished, those they died at one by one."""
        attempt = journal.attempt(shard)
        GUARD.on_signal.append(attempt.excuse)
        try:
            ready = self._ready(attempt, shard, tokens)
            alone = [work for work, _ in ready if attempt.failures[work.index]]
            others = [work for work, _ in ready if not attempt.failures[work.index]]
            asked = {work.index: request for work, request in ready}
            for works, rows in [*(([work], 1) for work in alone), (others, self._task.batch_size)]:
                self._write(works, rows, attempt, asked, advance)
            attempt.publish()
        except (KeyboardInterrupt, StorageError):
            attempt.excuse()
            raise
        finally:
            GUARD.on_signal.remove(attempt.excuse)

    def _ready(self, attempt: Attempt, shard: Shard, tokens: Tokens) -> list[tuple[TokenRequest, Request]]:
        """What is to be written, the longest first; lines that make no request are answered here."""
        job = self._inputs.job
        assert job is not None and self._journal is not None
        missing, ready = set(attempt.missing), []
        for record in job.read(self._journal, shard):
            if record.index not in missing:
                continue
            deaths = attempt.failures_alone[record.index]
            if isinstance(record, Refused):
                self._refuse(attempt, record, refusal(record, record.error))
            elif deaths >= self._task.retries:
                log.warning("set aside: %s, after %d attempts died during it alone", record.where, deaths)
                self._set_aside += 1
                said = f"set aside: {deaths} attempts died while they worked on this record alone"
                self._refuse(attempt, record, refusal(record, said, BROKEN))
            else:
                ready.append((self._work(record, tokens), record))
        return sorted(ready, key=lambda pair: -pair[0].longest)

    def _work(self, request: Request, tokens: Tokens) -> TokenRequest:
        ids = token_ids(request, tokens, self._run)
        return TokenRequest(
            request.index, Prompt(request.id, tuple(ids)), request.sampling, request.max_new_tokens,
            request.stop, request.seed,
        )  # fmt: skip

    def _write(
        self, works: list[TokenRequest], rows: int, attempt: Attempt, asked: dict[int, Request],
        advance: Callable[[int], None],
    ) -> None:  # fmt: skip
        if not works:
            return
        assert self._rows is not None
        broadcast_json({"works": [asdict(work) for work in works], "rows": rows}, self._ranks)
        for written in self._rows.write(works, rows, attempt.begin):
            self._keep(attempt, asked[written.index], written)
            advance(1)

    def _keep(self, attempt: Attempt, request: Request, written: Reply) -> None:
        """Commits an answer."""
        if written.finish_reason == "error":
            log.warning("%s: %s", request.where, NAN)
            self._refuse(attempt, request, refusal(request, NAN, BROKEN))
            return
        attempt.finish(request.index, answer(request, written, self._inputs.pairs[0].target))
        self._answered += 1

    def _refuse(self, attempt: Attempt, record: Request | Refused, line: dict[str, Any]) -> None:
        attempt.finish(record.index, line)
        self._refused += 1

    def _end(self) -> str:
        """Writes the output if the whole job is done, by whomever."""
        journal, job = self._journal, self._inputs.job
        assert journal is not None and job is not None
        standing = journal.standing()
        for line in table(self.figures()):
            log.info("%s", line)
        if not standing.whole:
            log.info("others are at work on the rest; the last to end writes %s", job.output)
            return "partial"
        journal.merge(job.output)
        log.info("output: %s", job.output)
        return "done"


def table(figures: dict[str, Any]) -> list[str]:
    """A job's end, for people: the job, and this process's part in it."""
    accepted, pace = figures["acceptance_rate"], figures["tokens_per_s"]
    rows = [
        ["records", f"{figures['records_finished']} of {figures['records']}"],
        ["shards", f"{figures['shards_done']} of {figures['shards']}"],
        ["attempts", f"{figures['attempts']}"],
        ["answered here", f"{figures['records_answered_here']}"],
        ["refused here", f"{figures['records_refused_here']}"],
        ["set aside here", f"{figures['records_set_aside_here']}"],
        ["tokens", f"{figures['tokens_committed']}"],
        ["tokens/s", figure(pace, 1)],
        ["drafts accepted", "-" if accepted is None else f"{accepted:.0%}"],
    ]
    return aligned(rows, 1)
