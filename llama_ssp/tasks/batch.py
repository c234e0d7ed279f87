"""task=batch: every record of a file answered exactly once, whatever is killed when.

The leader reads the input, keeps the journal and writes; it broadcasts each shard's texts to the other ranks.
The distribution of a record's answer depends on the job's settings and the record alone. Its bytes depend on
rounding, too: equal batches give equal bytes; others, in fp32, equal bytes up to ties (docs/batch.md).
"""

import json
import logging
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llama_ssp.batch.attempts import BEAT_S, STALE_S, Attempt, JournalThread, Shard
from llama_ssp.batch.job import Job, job_of, require_good
from llama_ssp.batch.journal import COSTS, ROWS, Journal
from llama_ssp.batch.records import BROKEN, Refused, Request, answer, refusal
from llama_ssp.batch.workers import BYTES_PER_TOKEN
from llama_ssp.config import BatchConf, Splitting
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.process_group import NO_GPU, gpu_of
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import DataError, DistributedError, StorageError, first_line, lacks_gpu_memory
from llama_ssp.models.devices import every_device
from llama_ssp.pair.batches import NOT_NUMBERS, nothing_run, prompt_of
from llama_ssp.pair.continuous_batching import ContinuousBatch, Reply, Supply, TokenRequest
from llama_ssp.pair.session import PairSession
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.console import Progress
from llama_ssp.report.tables import figure
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.common import Task
from llama_ssp.tasks.interactive import while_others_wait
from llama_ssp.text.prompts import TextPrompt

log = logging.getLogger(__name__)

LOOK_S = 2.0  # between looks at claims that may lapse
BEGUN_S = 5.0  # that the disk may take for the line about texts that begin
LAST_S = 10.0  # and for the last lines of a task that ends
MANY, FEW = 1000, 16  # prompts tokenised before a job begins: the longest; the shortest, the first ones
DAMAGED_IN_ROW = 3  # texts one after another without numbers show a broken device, not broken records


def fix_k(pair: PairSession, kept: dict[str, Any]) -> None:
    """Has a pair write with the K that a job keeps, if it keeps one."""
    if kept:
        pair.run = replace(pair.run, speculation=replace(pair.run.speculation, k=kept["k"], adaptive=False))


class BatchTask(Task[BatchConf]):
    """One process's part in a job: shards until none is left to take."""

    _job: Job  # the leader's
    _journal: Journal | None = None
    _rows: ContinuousBatch | None = None
    _answered = _refused = _set_aside = 0
    _max_rows = 1  # rows at a time; fewer than at first where the GPU's memory was full
    _thread: JournalThread  # the leader's
    _taken: tuple[Shard, AbstractContextManager[None]] | None = None  # claimed by `_await_claims`, not begun
    _goes_on = False  # whether rows that become free take texts of further shards
    _damaged_in_row = 0

    def __init__(self, *of_task: Any) -> None:
        super().__init__(*of_task)
        self._claims: dict[Attempt, ExitStack] = {}  # by shard in work; closing it gives the claim back
        self._texts: dict[int, tuple[Attempt, Request]] = {}  # open requests of these shards, by record
        self._left: dict[int, TokenRequest] = {}  # of these, handed out to be written, not committed
        self._under_way: set[int] = set()  # records that occupy a row now
        self._apart: deque[list[TokenRequest]] = deque()  # groups of texts, each written by itself
        self._damaged: list[int] = []  # records with NaN or infinite logits, not answered yet

    def run(self) -> str:
        pair, ranks = self._open(), self._ranks
        gpus = gpus_of(pair, ranks)
        longest, missing, shards = while_others_wait(ranks, partial(self._begin, pair, gpus))
        if missing:
            keep = partial(self._keep_rows, pair, pair.rows_for(missing, longest))
            self._max_rows, texts, kept = while_others_wait(ranks, keep)
            fix_k(pair, kept)
            prompts = [Prompt(str(row), tuple(token_ids)) for row, token_ids in enumerate(texts)]
            pair.load(min(self._max_rows, missing), longest, prompts=prompts)
            fix_k(pair, while_others_wait(ranks, partial(self._keep, pair)))
            self._rows = pair.writer(self._inputs.seed, clocked=False)
        if shards:
            with self._leading() if ranks.is_leader else nullcontext():
                while message := while_others_wait(ranks, partial(self._next_batch, pair)):
                    self._write(message, pair)
        is_whole = while_others_wait(ranks, self._end)  # to merge a long output takes minutes
        return "done" if is_whole else "partial"

    def has_output(self) -> bool:
        return self._answered > 0

    def figures(self) -> dict[str, Any]:
        standing = self._journal.standing() if self._journal else None
        counts = ("records", "records_finished", "records_failed", "shards", "shards_done")
        return {
            "output": self._task.output,
            "work": str(self._journal.folder) if self._journal else None,
            **{name: getattr(standing, name, None) for name in counts},
            "records_answered_here": self._answered,
            "records_refused_here": self._refused,
            "records_set_aside_here": self._set_aside,
            **{key: self._pair_figures()[key] for key in ("devices", "engines")},
            **(self._rows.figures() if self._rows else nothing_run()),
        }

    def measurements(self) -> list[RunMeasurement]:
        """One; prompts are read between the rounds, so they are in its time."""
        return self._measurement(self._rows.figures(), ", with prompts") if self._rows else []

    def _begin(self, pair: PairSession, gpus: int) -> list[int]:
        """Opens the job; returns the tokens of its longest text, and how many records and shards are open."""
        self._job = job_of(self._inputs.run, self._inputs.pairs[0].files, self._inputs.seed)
        self._job.reopen()
        self._journal = begin(self._job, pair)
        self._journal.note(node=socket.gethostname(), ranks=self._ranks.world, gpus=gpus, began=time.time())
        standing = self._journal.standing()
        log.info("job %s: %s", self._journal.folder, standing.in_words())
        if not standing.records:
            log.warning("%s holds no records", self._task.input)
        missing, shards = standing.records - standing.records_finished, standing.shards - standing.shards_done
        return [self._journal.manifest.longest, missing, shards]

    def _keep_rows(self, pair: PairSession, rows: int) -> tuple[int, list[tuple[int, ...]], dict[str, Any]]:
        """Returns how many rows to write at a time, the job's first prompts, and the costs that it keeps.

        Costs that nobody has stored yet are measured on these prompts. The rows are `task.batch_size` if it
        is given, else the number that the job's first process stored.
        """
        assert self._journal is not None
        rows = rows if self._task.batch_size else int(self._journal.kept(ROWS, rows))
        prompts = list[tuple[int, ...]]()
        for index in range(min(max(rows, FEW), self._journal.manifest.records)):
            with suppress(Refused):
                prompts.append(tokenised(self._job.index.read(index, pair.run), pair).prompt.token_ids)
        stored = self._journal.folder / COSTS
        return rows, prompts, json.loads(stored.read_bytes()) if stored.exists() else {}

    def _keep(self, pair: PairSession) -> dict[str, Any]:
        """Stores trials and costs if this process is the job's first; returns the costs that were stored."""
        assert self._journal is not None
        tried = [placed.role for placed in pair.placements if placed.on_trial]
        self._journal.keep_trials({role: pair.engines[role] for role in tried})
        if pair.costs is None:
            return {}
        stand, rounds, k = pair.costs.usual, pair.costs.rounds, pair.costs.k_for_all
        costs = {"k": k, "rounds": rounds, "first": stand.first.value, "later": stand.later.value}
        return dict(self._journal.kept(COSTS, costs))

    @contextmanager
    def _leading(self) -> Iterator[None]:
        """What the leader has while texts are written: the journal's thread, a bar, and claims."""
        assert self._journal is not None
        GUARD.on_signal.append(self._excuse)
        self._thread = JournalThread()
        try:
            with Progress("batch", self._journal.manifest.records, "records") as self._progress:
                self._progress.start(self._journal.standing().records_finished)
                yield
        except (KeyboardInterrupt, StorageError):
            self._excuse()
            raise
        finally:
            GUARD.on_signal.remove(self._excuse)
            self._thread.close(LAST_S)
            for claim in list(self._claims.values()):
                claim.close()
        self._thread.check()

    def _excuse(self) -> None:
        """Notes in each claimed shard that no record is to blame for this end. Any thread may call it."""
        for attempt in list(self._claims):
            attempt.excuse()

    def _next_batch(self, pair: PairSession) -> dict[str, Any]:
        """Returns what all ranks write next: a shard's texts, then those set apart from it; {} at the end."""
        assert self._journal is not None
        if not self._left:  # else they are written again, fewer at a time
            self._goes_on = True
        while not self._left and not self._next_texts(pair):
            if self._apart:
                self._left = {work.index: work for work in self._apart.popleft()}
                self._goes_on = False
                continue
            self._settle_damaged()
            self._thread.wait()
            if not self._await_claims(self._journal):
                return {}
        works = list(self._left.values())
        foreseen = self._journal.manifest.longest
        longest = max(foreseen, *(work.longest for work in works), 2) if self._goes_on else 0
        return {"works": works, "rows": self._max_rows, "longest": longest, "goes_on": self._goes_on}

    def _await_claims(self, journal: Journal) -> bool:
        """Waits until a dead process's claim lapses, and takes its shard; returns False if none lapses.

        A process on another machine counts as alive once it renews its claims; if not, they lapse.
        """
        if silent := journal.silent():
            log.info("all shards left are claimed; claims that nobody renews lapse after %.0f s", STALE_S)
        until = time.monotonic() + STALE_S + BEAT_S  # whatever the clock of the claims says
        while silent and time.monotonic() < until:
            time.sleep(LOOK_S)
            if (taken := journal.claim()) is not None:
                self._taken = taken
                return True
            silent &= journal.silent()
        return False

    def _next_texts(self, pair: PairSession) -> list[TokenRequest]:
        """Returns the texts of the next shard that has some; [] without one, or while `_apart` has texts.

        Rows thus pass from shard to shard without a break. Lines that make no request are answered here.
        `_apart` takes texts with `echo`, texts longer than a row, and those during which an attempt died.
        """
        journal, rows = self._journal, self._max_rows
        assert journal is not None
        while not self._apart and (taken := self._taken or journal.claim()) is not None:
            self._taken, attempt = None, journal.attempt(taken[0])
            self._claims[attempt] = ExitStack()
            self._claims[attempt].enter_context(taken[1])
            usual, others, suspects = list[TokenRequest](), list[TokenRequest](), list[TokenRequest]()
            for work in self._ready(attempt, pair):
                is_other = work.echo or min(work.longest, pair.run.model.context) > journal.manifest.longest
                (suspects if attempt.deaths[work.index] else others if is_other else usual).append(work)
            self._apart += [others] if others else []
            for count in sorted({attempt.deaths[work.index] for work in suspects}):
                size = max(1, rows >> (count - 1))  # after one death a full batch again, after two half of it
                again = [work for work in suspects if attempt.deaths[work.index] == count]
                self._apart += [again[start : start + size] for start in range(0, len(again), size)]
            self._thread.do(partial(self._publish, attempt))
            if usual:
                self._left.update({work.index: work for work in usual})
                return usual
        return []

    def _ready(self, attempt: Attempt, pair: PairSession) -> list[TokenRequest]:
        """Returns the shard's open requests, longest first; answers lines that make no request.

        Sets a record aside if `retries` attempts died during it alone, on two nodes if the job has two.
        """
        ready = []
        groups = self._journal.survey()[1] if self._journal and attempt.deaths_alone else []
        nodes = {group.node for group in groups if group.node}
        for index in attempt.missing:
            try:
                record = self._job.index.read(index, pair.run)
                work = tokenised(record, pair)
            except Refused as refused:
                self._refuse(attempt, refused, refusal(refused, refused.error))
                continue
            deaths = attempt.deaths_alone[index]
            is_to_blame = len(set(deaths)) >= min(2, len(nodes)) and len(deaths) >= self._task.retries
            if is_to_blame:
                log.warning("set aside: %s, after %d attempts died during it alone", record.id, len(deaths))
                self._set_aside += 1
                said = f"set aside: {len(deaths)} attempts died while they worked on this record alone"
                self._refuse(attempt, record, refusal(record, said, BROKEN))
            else:
                self._texts[index] = attempt, record
                ready.append(work)
        return sorted(ready, key=lambda work: -work.longest)

    def _write(self, message: dict[str, Any], pair: PairSession) -> None:
        """Writes the message's texts, then those of further shards, on all ranks; the leader commits them.

        If GPU memory is full on a run of one rank, returns and leaves the rest to a call with half the rows.
        """
        assert self._rows is not None
        rows, leads = message["rows"], self._ranks.is_leader

        def of(told: list[Any]) -> list[TokenRequest]:  # to other ranks it went as JSON
            return told if leads else list(map(TokenRequest.of_plain, told))

        def further() -> list[TokenRequest]:
            return of(while_others_wait(self._ranks, partial(self._next_texts, pair)))

        more = further if message["goes_on"] else list
        supply = Supply(self._begun if leads else lambda _: None, more, message["longest"])
        try:
            for written in self._rows.write(of(message["works"]), rows, supply):
                if leads:
                    self._commit(written)
                    del self._left[written.index]
        except RuntimeError as error:
            # Other ranks do not know that one of them lacks memory, and wait.
            if self._ranks.world > 1 or rows == 1 or not lacks_gpu_memory(error):
                raise
            self._max_rows = rows // 2
            said = self.full_gpu(error) or first_line(error)
            log.warning("%d rows at a time from here on, as with %d: %s", self._max_rows, rows, said)
            self._under_way.clear()

    def _begun(self, indices: list[int]) -> None:
        """Notes in each shard's journal which texts are about to begin, and how many are under way in all.

        Waits at most BEGUN_S for the disk: a disk that stalls must not stop a rank.
        """
        self._under_way.update(indices)
        for attempt in {self._texts[index][0]: None for index in indices}:
            ours = [index for index in indices if self._texts[index][0] is attempt]
            self._thread.do(partial(attempt.begin, ours, len(self._under_way)))
        self._thread.wait(BEGUN_S)
        self._thread.check()

    def _commit(self, written: Reply) -> None:
        attempt, request = self._texts[written.index]
        self._under_way.discard(written.index)
        if written.finish_reason == "error":
            self._keep_damaged(attempt, request)
            return
        self._damaged_in_row = 0
        self._refuse_damaged()
        assert self._pair is not None
        model, spell = self._inputs.pairs[0].target, self._pair.tokens.spell
        self._answered += 1
        self._finish(attempt, request.index, answer(request, written, model, spell, self._task.fields))

    def _keep_damaged(self, attempt: Attempt, request: Request) -> None:
        """Holds back a text whose logits were not numbers, until it is known whether the device is sound.

        Raises DistributedError at DAMAGED_IN_ROW such texts in a row; their records stay open for another
        device. Refuses a record at once if its logits were not numbers on another node, too.
        """
        log.warning("%s: %s", request.where, NOT_NUMBERS)
        node = socket.gethostname()
        if attempt.damaged_on[request.index] - {node}:
            self._refuse(attempt, request, refusal(request, NOT_NUMBERS, BROKEN))
            return
        self._damaged.append(request.index)
        self._damaged_in_row += 1
        if self._damaged_in_row >= DAMAGED_IN_ROW:
            raise self._broken_device(f"{DAMAGED_IN_ROW} texts one after another ended where {NOT_NUMBERS}")

    def _broken_device(self, what: str) -> DistributedError:
        """Notes the damaged texts of this node, whose records stay open; returns the error that says so."""
        for index in self._damaged:
            self._thread.do(partial(self._texts[index][0].keep_damaged, [index]))
        self._excuse()

        last = self._texts[self._damaged[-1]][1]
        devices = ", ".join(sorted(set(map(str, self._pair_figures()["devices"].values()))))
        return DistributedError(
            what,
            where=f"{socket.gethostname()}, {devices}",
            found=f"the last was {last.id} in {last.where}",
            allowed="numbers",
            fix="the records stay open: start the command on another node or device; "
            "if it ends there, too, try model.dtype=bf16 or fp32",
        )

    def _settle_damaged(self) -> None:
        """Refuses the texts that are kept when nothing else is left to write.

        Raises DistributedError where the job has no sound text: nothing shows that the device is sound.
        """
        assert self._journal is not None
        if self._damaged and not self._answered:
            self._thread.wait()
            standing = self._journal.standing()
            if standing.records_finished == standing.records_failed:
                raise self._broken_device(f"all texts, {len(self._damaged)}, ended where {NOT_NUMBERS}")
        self._refuse_damaged()

    def _refuse_damaged(self) -> None:
        """Answers kept texts with their errors: the device has proved sound, or nothing else is left."""
        damaged, self._damaged = self._damaged, []
        for index in damaged:
            attempt, request = self._texts[index]
            self._refuse(attempt, request, refusal(request, NOT_NUMBERS, BROKEN))

    def _refuse(self, attempt: Attempt, record: Request | Refused, line: dict[str, Any]) -> None:
        self._refused += 1
        self._finish(attempt, record.index, line)

    def _finish(self, attempt: Attempt, index: int, line: dict[str, Any]) -> None:
        """Commits an answer, by the journal's thread."""
        self._texts.pop(index, None)
        self._progress.advance(1)
        self._thread.do(partial(attempt.finish, index, line))
        self._thread.do(partial(self._publish, attempt))

    def _publish(self, attempt: Attempt) -> None:
        """Publishes a shard whose records are all finished, and gives its claim back."""
        if attempt in self._claims and not attempt.missing:
            attempt.publish()
            self._claims.pop(attempt).close()

    def _end(self) -> bool:
        """Writes the output if all processes together have done the whole job; returns whether they have."""
        journal, job = self._journal, self._job
        assert journal is not None
        figures = self.figures()
        journal.note(drafted=figures["tokens_drafted"], accepted=figures["tokens_accepted"])
        standing, accepted = journal.standing(), figures["acceptance_rate"]
        told = f"{figures['tokens_committed']} tokens, {figure(figures['tokens_per_s'], 1)} tokens/s"
        told += "" if accepted is None else f", {accepted:.0%} accepted"
        counts = self._answered, self._refused, self._set_aside
        log.info("%s; here: %d answered, %d refused, %d set aside, %s", standing.in_words(), *counts, told)
        if not standing.whole:
            log.info("others are at work on the rest; the last to end writes %s", job.output)
            return False
        journal.merge(job.output)
        log.info("output: %s", job.output)
        if standing.records and standing.records_failed == standing.records:
            raise DataError(
                "every record was answered with an error",
                where=job.output,
                found=f"{standing.records_failed} errors",
                fix="read them there; task.retry_errors=true tries them again",
            )
        return True


def gpus_of(pair: PairSession, ranks: Ranks) -> int:
    """How many GPUs the ranks use: they may share one, or have several each. All ranks call it."""
    here = [placed for placed in pair.placements if ranks.rank in placed.ranks]
    spread = any(placed.splitting is Splitting.layers for placed in here)
    own = {gpu_of(device) for device in (every_device() if spread else [placed.device for placed in here])}
    return len({*" ".join(ranks.gather_texts(" ".join(own - {NO_GPU}))).split()})


def begin(job: Job, pair: PairSession) -> Journal:
    """Returns the job's journal. For a new job, first tokenises prompts that may be bad or the longest.

    These are the MANY longest by bytes, the FEW shortest, and all that may fill the model's context.
    """
    longest, refused, rows = 2, list[Refused](), job.index.rows
    by_size = np.argsort(rows["bytes"].astype(np.int64) + rows["new"], kind="stable")
    long = np.flatnonzero(rows["bytes"] > BYTES_PER_TOKEN * pair.run.model.context)
    chosen = sorted({*by_size[:FEW], *by_size[-MANY:], *long}) if job.is_new else []
    with Progress("tokenising prompts", len(chosen), "prompts") as progress:
        for number in map(int, chosen):
            try:
                work = tokenised(job.index.read(number, pair.run), pair)
                longest = max(longest, min(work.longest, pair.run.model.context))
            except Refused as bad:
                refused.append(bad)
            progress.advance(1)
    require_good(job.run, refused)
    return job.begin(longest)


def tokenised(record: Request, pair: PairSession) -> TokenRequest:
    """Returns the request as token ids. Raises Refused where the model cannot continue it."""
    text = TextPrompt(record.id, record.said, record.where)
    task = replace(pair.run.task_as(BatchConf), max_new_tokens=record.max_new_tokens)
    run = replace(pair.run, task=task)
    try:
        return TokenRequest(
            index=record.index,
            prompt=prompt_of(text, pair.tokens, run, record.messages),
            sampling=record.sampling,
            max_new_tokens=record.max_new_tokens,
            stop=tuple(pair.tokens.stops(record.stop)),
            seed=record.seed,
            logprobs=record.logprobs,
            echo=record.echo,
        )
    except DataError as error:
        raise Refused(index=record.index, id=record.id, url=record.url, error=str(error)) from None
