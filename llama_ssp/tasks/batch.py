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
import torch

from llama_ssp.batch.attempts import BEAT_S, STALE_S, Attempt, JournalThread, Shard
from llama_ssp.batch.job import Job, job_of, require_good
from llama_ssp.batch.journal import COSTS, MACHINE, ROWS, Journal
from llama_ssp.batch.preview import BYTES_PER_TOKEN
from llama_ssp.batch.records import BROKEN, Refused, Request, answer, refusal
from llama_ssp.config import BatchConf, Splitting
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.process_group import NO_GPU, gpu_of
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import DataError, DistributedError, StorageError, first_line, lacks_gpu_memory
from llama_ssp.models.devices import describe, every_device
from llama_ssp.pair.requests import NOT_NUMBERS, Reply, TokenRequest
from llama_ssp.pair.run import RunSettings, Supply, run_figures, runs
from llama_ssp.pair.session import PairSession
from llama_ssp.pair.token_prompts import prompt_of
from llama_ssp.placing.prediction import RunMeasurement
from llama_ssp.placing.this_machine import kept_of
from llama_ssp.planner.workload import TARGET
from llama_ssp.report.accepted import of_run
from llama_ssp.report.console import Console, Progress
from llama_ssp.report.machine import processor_name
from llama_ssp.report.run_folder import RunFolder
from llama_ssp.report.tables import figure
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.common import Task
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.interactive import while_others_wait
from llama_ssp.text.prompts import TextPrompt

log = logging.getLogger(__name__)

LOOK_S = 2.0  # between looks at claims that may lapse
BEGUN_S = 5.0  # that the disk may take for the line about texts that begin
LAST_S = 10.0  # and for the last lines of a task that ends
# Prompts that are tokenised before a job begins: the longest; the shortest, and the first ones.
MANY = 1000
FEW = 16
DAMAGED_IN_ROW = 3  # texts one after another without numbers show a broken device, not broken records


def fix_k(pair: PairSession, kept: dict[str, Any]) -> None:
    """Has a pair write with the K that a job keeps, if it keeps one."""
    if kept:
        pair.run = replace(pair.run, speculation=replace(pair.run.speculation, k=kept["k"], adaptive=False))


class BatchTask(Task[BatchConf]):
    """One process's part in a job: shards until none is left to take.

    A text goes through these states, on the leader: open (`_texts`), handed out (`_left`), in a row
    (`_under_way`), answered. Some are written by themselves (`_apart`), some are held back (`_damaged`).
    """

    _job: Job  # the leader's
    _journal: Journal | None = None
    _engine: RankEngine | None = None
    _settings: RunSettings
    _answered = 0
    _refused = 0
    _set_aside = 0
    _max_rows = 1  # rows at a time; fewer than at first where the GPU's memory was full
    _thread: JournalThread  # the leader's
    _taken: tuple[Shard, AbstractContextManager[None]] | None = None  # claimed by `_await_claims`, not begun
    _goes_on = False  # whether rows that become free take texts of further shards
    _damaged_in_row = 0

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        super().__init__(inputs, console, folder, ranks)
        self._claims: dict[Attempt, ExitStack] = {}  # by shard in work; closing it gives the claim back
        self._texts: dict[int, tuple[Attempt, Request]] = {}  # open requests of these shards, by record
        self._left: dict[int, TokenRequest] = {}  # of these, handed out to be written, not committed
        self._under_way: set[int] = set()  # records that occupy a row now
        self._apart: deque[list[TokenRequest]] = deque()  # groups of texts, each written by itself
        self._damaged: list[int] = []  # records with NaN or infinite logits, not answered yet
        self._counts = Counts()

    def run(self) -> str:
        pair = self._open()
        ranks = self._ranks
        gpus = gpus_of(pair, ranks)
        longest, records, missing, shards = while_others_wait(ranks, partial(self._begin, pair, gpus))

        if missing:
            rows = pair.rows_for(records, longest)
            kept = while_others_wait(ranks, partial(self._keep_rows, pair, rows))
            self._max_rows, prompts, costs = kept
            fix_k(pair, costs)
            with self._journal.loading() if self._journal else nullcontext():
                pair.load(
                    min(self._max_rows, missing),
                    longest,
                    prompts=[Prompt(str(row), tuple(token_ids)) for row, token_ids in enumerate(prompts)],
                )
                fix_k(pair, while_others_wait(ranks, partial(self._keep, pair)))
                pair.settle()
                while_others_wait(ranks, partial(self._keep_trials, pair))
            self._engine = pair.engine(self._inputs.seed)
            self._settings = pair.run_settings(self._max_rows, is_clocked=False)

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
        pair = self._pair_figures()
        return {
            "output": self._task.output,
            "work": str(self._journal.folder) if self._journal else None,
            "records": standing.records if standing else None,
            "records_finished": standing.records_finished if standing else None,
            "records_failed": standing.records_failed if standing else None,
            "shards": standing.shards if standing else None,
            "shards_done": standing.shards_done if standing else None,
            "records_answered_here": self._answered,
            "records_refused_here": self._refused,
            "records_set_aside_here": self._set_aside,
            "devices": pair["devices"],
            "engines": pair["engines"],
            **run_figures(self._engine, self._counts),
            "acceptance": of_run(self._run, self._counts),
        }

    def measurements(self) -> list[RunMeasurement]:
        """Returns one; prompts are read between the rounds, so they are in its time."""
        if self._engine is None:
            return []
        return self._measurement(run_figures(self._engine, self._counts), ", with prompts")

    # The job's beginning. The leader runs these, and the others get what they return.

    def _begin(self, pair: PairSession, gpus: int) -> list[int]:
        """Opens the job; returns the tokens of its longest text, its records, and open records and shards."""
        self._job = job_of(self._inputs.run, self._inputs.pairs[0].files, self._inputs.seed)
        self._job.reopen()
        self._journal = begin(self._job, pair)
        kept = kept_of(self._inputs.run, self._ranks.world)
        self._journal.kept(MACHINE, kept.content if kept else {})
        device = device_name(pair.placements.target.device)
        formats = {placed.role: placed.dtype.value for placed in pair.placements}
        for line in self._journal.keep_formats(TARGET, formats, device):
            log.info("%s", line)
        self._journal.note(
            node=socket.gethostname(),
            device=device,
            ranks=self._ranks.world,
            gpus=gpus,
            began=time.time(),
        )

        standing = self._journal.standing()
        log.info("job %s: %s", self._journal.folder, standing.in_words())
        if not standing.records:
            log.warning("%s holds no records", self._task.input)
        missing = standing.records - standing.records_finished
        shards = standing.shards - standing.shards_done
        return [self._journal.manifest.longest, standing.records, missing, shards]

    def _keep_rows(self, pair: PairSession, rows: int) -> tuple[int, list[tuple[int, ...]], dict[str, Any]]:
        """Returns how many rows to write at a time, the job's first prompts, and the costs that it keeps.

        Costs that nobody has stored yet are measured on these prompts. The rows are `task.batch_size` if it
        is given, else the number that the job's first process stored, or fewer where this one has less room.
        """
        assert self._journal is not None
        if not self._task.batch_size:
            kept = int(self._journal.kept(ROWS, rows))
            if rows < kept:
                said = (
                    "%d rows at a time, not %d as the job began: more do not fit or pay; 16-bit texts differ"
                )
                log.info(said, rows, kept)
            rows = min(rows, kept)

        prompts = list[tuple[int, ...]]()
        for index in range(min(max(rows, FEW), self._journal.manifest.records)):
            with suppress(Refused):
                work = tokenised(self._job.index.read(index, pair.run), pair)
                prompts.append(work.prompt.token_ids)

        file = self._journal.folder / COSTS
        costs = json.loads(file.read_bytes()) if file.exists() else {}
        return rows, prompts, costs

    def _keep(self, pair: PairSession) -> dict[str, Any]:
        """Stores costs if this process is the job's first; returns the costs that were stored."""
        assert self._journal is not None
        if pair.costs is None:
            return {}
        usual = pair.costs.usual
        costs = {
            "k": pair.costs.k_for_all,
            "rounds": pair.costs.rounds,
            "first": usual.first.value,
            "later": usual.later.value,
        }
        return dict(self._journal.kept(COSTS, costs))

    def _keep_trials(self, pair: PairSession) -> None:
        """Stores the trials' verdicts if this process is the job's first; else they have to be the same."""
        assert self._journal is not None
        tried = [placed.role for placed in pair.placements if placed.on_trial]
        self._journal.keep_trials({role: pair.engines[role] for role in tried})

    # What is written next. The leader runs these.

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
        longest = 0
        if self._goes_on:
            longest = max(2, self._journal.manifest.longest, *(work.longest for work in works))
        return {"works": works, "rows": self._max_rows, "longest": longest, "goes_on": self._goes_on}

    def _await_claims(self, journal: Journal) -> bool:
        """Waits until a dead process's claim lapses, and takes its shard; returns False if none lapses.

        A process on another machine counts as alive once it renews its claims; if not, they lapse.
        """
        silent = journal.silent()
        if silent:
            log.info("all shards left are claimed; claims that nobody renews lapse after %.0f s", STALE_S)
        until = time.monotonic() + STALE_S + BEAT_S  # whatever the clock of the claims says
        while silent and time.monotonic() < until:
            time.sleep(LOOK_S)
            self._taken = journal.claim()
            if self._taken is not None:
                return True
            silent &= journal.silent()
        return False

    def _next_texts(self, pair: PairSession) -> list[TokenRequest]:
        """Returns the texts of the next shard that has some; [] without one, or while `_apart` has texts.

        Rows thus pass from shard to shard without a break. Lines that make no request are answered here.
        `_apart` takes texts with `echo`, texts longer than a row, and those during which an attempt died.
        """
        journal = self._journal
        assert journal is not None
        while not self._apart:
            claimed = self._taken or journal.claim()
            self._taken = None
            if claimed is None:
                break
            shard, claim = claimed
            attempt = journal.attempt(shard)
            self._claims[attempt] = ExitStack()
            self._claims[attempt].enter_context(claim)

            usual = list[TokenRequest]()
            unusual = list[TokenRequest]()
            suspects = list[TokenRequest]()
            for work in self._ready(attempt, pair):
                if attempt.deaths[work.index]:
                    suspects.append(work)
                elif work.echo or min(work.longest, pair.run.model.context) > journal.manifest.longest:
                    unusual.append(work)
                else:
                    usual.append(work)
            if unusual:
                self._apart.append(unusual)
            self._apart += suspect_groups(suspects, attempt, self._max_rows)

            self._thread.do(partial(self._publish, attempt))  # if all its lines were answered
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

            deaths = attempt.deaths_alone[index]  # the nodes
            is_to_blame = len(set(deaths)) >= min(2, len(nodes)) and len(deaths) >= self._task.retries
            if is_to_blame:
                log.warning("set aside: %s, after %d attempts died during it alone", record.id, len(deaths))
                self._set_aside += 1
                error = f"set aside: {len(deaths)} attempts died while they worked on this record alone"
                self._refuse(attempt, record, refusal(record, error, BROKEN))
            else:
                self._texts[index] = attempt, record
                ready.append(work)
        return sorted(ready, key=lambda work: -work.longest)

    # All ranks write.

    def _write(self, message: dict[str, Any], pair: PairSession) -> None:
        """Writes the message's texts, then those of further shards, on all ranks; the leader commits them.

        If GPU memory is full on a run of one rank, returns and leaves the rest to a call with half the rows.
        """
        assert self._engine is not None
        rows = message["rows"]
        is_leader = self._ranks.is_leader

        def requests_of(works: list[Any]) -> list[TokenRequest]:
            """Returns the requests of a message, which went to other ranks as JSON."""
            return works if is_leader else [TokenRequest.of_plain(work) for work in works]

        def further() -> list[TokenRequest]:
            return requests_of(while_others_wait(self._ranks, partial(self._next_texts, pair)))

        supply = Supply(
            begin=self._begun if is_leader else lambda _: None,
            more=further if message["goes_on"] else None,
            longest=message["longest"],
        )
        requests = requests_of(message["works"])
        settings = replace(self._settings, rows=rows)
        try:
            for text_run in runs(self._engine, requests, settings, self._counts, supply):
                for written in text_run.ended():
                    if is_leader:
                        self._commit(written)
                        del self._left[written.index]
        except RuntimeError as error:
            # Other ranks do not know that one of them lacks memory, and wait.
            if self._ranks.world > 1 or rows == 1 or not lacks_gpu_memory(error):
                raise
            self._max_rows = rows // 2
            reason = self.full_gpu(error) or first_line(error)
            log.warning("%d rows at a time from here on, as with %d: %s", self._max_rows, rows, reason)
            self._under_way.clear()

    # What becomes of a text. The leader runs these.

    def _begun(self, indices: list[int]) -> None:
        """Notes in each shard's journal which texts are about to begin, and how many are under way in all.

        Waits at most BEGUN_S for the disk: a disk that stalls must not stop a rank.
        """
        self._under_way.update(indices)
        by_attempt: dict[Attempt, list[int]] = {}
        for index in indices:
            attempt, _ = self._texts[index]
            by_attempt.setdefault(attempt, []).append(index)
        for attempt, members in by_attempt.items():
            self._thread.do(partial(attempt.begin, members, len(self._under_way)))
        self._thread.wait(BEGUN_S)
        self._thread.check()

    def _commit(self, written: Reply) -> None:
        """Answers a request with its text, unless its logits were not numbers."""
        assert self._pair is not None
        attempt, request = self._texts[written.index]
        self._under_way.discard(written.index)
        if written.finish_reason == "error":
            self._keep_damaged(attempt, request)
            return

        self._damaged_in_row = 0
        self._refuse_damaged()  # this text shows that the device is sound
        self._answered += 1
        line = answer(
            request,
            written,
            model=self._inputs.pairs[0].target,
            spell=self._pair.tokens.spell,
            fields=self._task.fields,
        )
        is_whole = not request.url and not self._task.fields
        if is_whole and request.sampling.controls != self._pair.run.sampling.controls:
            line["sampling"] = request.sampling.effective  # else the answer does not say how it was drawn
        self._finish(attempt, request.index, line)

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

        _, last = self._texts[self._damaged[-1]]
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
        damaged = self._damaged
        self._damaged = []
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
        journal = self._journal
        assert journal is not None
        figures = self.figures()
        journal.note(drafted=figures["tokens_drafted"], accepted=figures["tokens_accepted"])
        standing = journal.standing()
        speed = f"{figures['tokens_committed']} tokens, {figure(figures['tokens_per_s'], 1)} tokens/s"
        if figures["acceptance_rate"] is not None:
            speed += f", {figures['acceptance_rate']:.0%} accepted"
        log.info(
            "%s; here: %d answered, %d refused, %d set aside, %s",
            standing.in_words(),
            self._answered,
            self._refused,
            self._set_aside,
            speed,
        )

        output = self._job.output
        if not standing.whole:
            log.info("others are at work on the rest; the last to end writes %s", output)
            return False
        journal.merge(output)
        log.info("output: %s", output)
        if standing.records and standing.records_failed == standing.records:
            raise DataError(
                "every record was answered with an error",
                where=output,
                found=f"{standing.records_failed} errors",
                fix="read them there; task.retry_errors=true tries them again",
            )
        return True


def device_name(device: torch.device) -> str:
    """Returns the GPU's name, or the processor's."""
    return processor_name() if device.type == "cpu" else describe(device)


def gpus_of(pair: PairSession, ranks: Ranks) -> int:
    """Returns how many GPUs the ranks use: they may share one, or have several each. All ranks call it."""
    here = [placed for placed in pair.placements if ranks.rank in placed.ranks]
    devices = [placed.device for placed in here]
    if any(placed.splitting is Splitting.layers for placed in here):
        devices = every_device()
    gpus = {gpu_of(device) for device in devices} - {NO_GPU}
    gpus_of_ranks = ranks.gather_texts(" ".join(gpus))
    return len({*" ".join(gpus_of_ranks).split()})


def suspect_groups(suspects: list[TokenRequest], attempt: Attempt, rows: int) -> Iterator[list[TokenRequest]]:
    """Yields groups of texts during which attempts have died: with each death half as many at once.

    After one death a group fills a batch of `rows` again, after two half of it: the text to blame is found.
    """
    for deaths in sorted({attempt.deaths[work.index] for work in suspects}):
        members = [work for work in suspects if attempt.deaths[work.index] == deaths]
        size = max(1, rows >> (deaths - 1))
        for start in range(0, len(members), size):
            yield members[start : start + size]


def begin(job: Job, pair: PairSession) -> Journal:
    """Returns the job's journal. For a new job, first tokenises prompts that may be bad or the longest.

    These are the MANY longest by bytes, the FEW shortest, and all that may fill the model's context.
    """
    context = pair.run.model.context
    rows = job.index.rows
    by_size = np.argsort(rows["bytes"].astype(np.int64) + rows["new"], kind="stable")
    may_be_too_long = np.flatnonzero(rows["bytes"] > BYTES_PER_TOKEN * context)
    chosen = sorted({*by_size[:FEW], *by_size[-MANY:], *may_be_too_long}) if job.is_new else []

    longest = 2
    refused = list[Refused]()
    with Progress("tokenising prompts", len(chosen), "prompts") as progress:
        for number in map(int, chosen):
            try:
                work = tokenised(job.index.read(number, pair.run), pair)
                longest = max(longest, min(work.longest, context))
            except Refused as bad:
                refused.append(bad)
            progress.advance(1)
    require_good(job.run, refused)
    return job.begin(longest)


def tokenised(record: Request, pair: PairSession) -> TokenRequest:
    """Returns the request as token ids. Raises Refused where the model cannot continue it."""
    text = TextPrompt(record.id, record.said, record.where)
    task = pair.run.task_as(BatchConf)
    task = replace(
        task, max_new_tokens=record.max_new_tokens, enable_thinking=None, template=dict(record.template)
    )
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
