"""A batch job: its input, its settings, and the folder it is kept in. No torch."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ssp.batch.atomic_files import drafted, replace_whole, storing
from llama_ssp.batch.journal import MACHINE, MANIFEST, Journal, Manifest, shards_of
from llama_ssp.batch.records import Refused
from llama_ssp.config import (
    BatchConf,
    OnBadRow,
    RunConf,
    SamplingConfig,
    Scheduler,
    home_expanded,
    resolved,
)
from llama_ssp.errors import DataError, UsageError
from llama_ssp.models.folder import adapter_fingerprint, fingerprint
from llama_ssp.placing.draft_length import decided_words, kept_of_job
from llama_ssp.placing.kept_constants import plan_as_begun

if TYPE_CHECKING:
    from llama_ssp.batch.index import Index

log = logging.getLogger(__name__)

OF_MODEL = ("name", "repo", "revision", "weights", "dtype", "seed", "agreement")
OF_TASK = ("chat", "system", "max_new_tokens", "stop", "ignore_eos", "on_bad_row", "logprobs", "logprobs_of")
SHOWN = 5  # bad lines that a message quotes
# Characters of what is said of each; a long value or path is in the middle.
BEGIN = 150
END = 90


@dataclass(frozen=True)
class Job:
    """One job, and where the records of its input are."""

    run: RunConf
    journal: Journal  # none of its files is there before a process begins the job
    output: Path
    index: Index
    corrected: frozenset[int] = frozenset()  # records whose lines differ from those of the job so far

    @property
    def is_new(self) -> bool:
        """Whether no process had begun it when the input was read."""
        return not self.journal.manifest.longest

    @property
    def words(self) -> list[str]:
        """The words that give every group the job's seed, and the same drafts a round, whatever its GPUs."""
        return [f"seed={self.journal.manifest.settings['seed']}", *decided_words(self.run.speculation)]

    def reopen(self) -> None:
        """Takes back errors, if that is wanted, and those of corrected records.

        Raises DataError where a corrected record has another answer, or groups work on the job meanwhile.
        """
        work = self.journal.folder
        manifest = self.journal.manifest
        if self.is_new:
            return
        if self.run.task_as(BatchConf).retry_errors and self.journal.standing().records_failed:
            log.info("%d errors are tried again", self.journal.reopen())
        if manifest != Journal.held(work):  # its input differs
            if holders := self.journal.holders():
                raise DataError(
                    "the input has changed while groups work on the job",
                    where=work,
                    found=f"{len(holders)} groups",
                    fix="put it back, or stop them",
                )
            count = self.journal.reopen({*self.corrected})
            log.info("%d lines are corrected: %d errors are taken back", len(self.corrected), count)
            replace_whole(work / MANIFEST, manifest.as_bytes())
            self.index.save(work)

    @property
    def missing(self) -> int:
        """Shards that are not done."""
        return len(self.journal.manifest.shards) - len(self.journal.done())

    def begin(self, longest: int) -> Journal:
        """Returns the job's journal; a new one keeps how long a text may get. Tries to write the output."""
        if not self.output.exists():
            with storing(self.output):
                self.output.parent.mkdir(parents=True, exist_ok=True)
            with drafted(self.output):  # only tries to write there
                pass
        held = self.journal.manifest
        journal = Journal.begin(self.journal.folder, replace(held, longest=held.longest or longest))
        self.index.save(journal.folder)
        return journal


def folders_of(run: RunConf) -> tuple[Path, Path]:
    """Where the job is kept, and where its output goes."""
    task = run.task_as(BatchConf)
    if task.output is None:
        raise UsageError("task.output is missing", fix="write task.output=answers.jsonl")
    output = home_expanded(task.output)
    if not output.name:
        raise UsageError("task.output does not name a file", found=task.output, fix="write task.output=FILE")
    for key, text, end in (("output", task.output, ".work"), ("work", task.work or "", "")):
        plain = text.strip("'\"")  # as 0.2 took a value in quotes
        if plain != text and home_expanded(plain + end).is_dir():
            raise UsageError(
                f"task.{key} has quotes, and there is a job without them",
                where=home_expanded(plain + end),
                found=text,
                fix=f"write task.{key}={plain}",
            )
    return home_expanded(task.work) if task.work else output.with_name(output.name + ".work"), output


def chosen_seed(run: RunConf, is_job: bool) -> int:
    """The run's seed; else the seed of the job that it continues; else a new one."""
    if run.seed is not None:
        return run.seed
    work = folders_of(run)[0] if is_job else None
    if work and (held := Journal.held(work)):
        return int(held.settings["seed"])
    seed = secrets.randbelow(2**31)
    why = "drawn; give it again to repeat this run"
    if work and run.cluster.scheduler is not Scheduler.none:  # the printed script is the submitted one
        digest = hashlib.sha256(str(work.absolute()).encode(errors="surrogateescape")).digest()
        seed = int.from_bytes(digest[:4]) >> 1
        why = "this folder's; seed=N is for another"
    log.debug("seed=%d (%s)", seed, why)
    return seed


def continued(run: RunConf) -> RunConf:
    """Returns the run; what it leaves to the model or the plan, sampling and drafts, is as in its job.

    What has been measured of the machine since the job began does not decide in it.
    """
    plan_as_begun(None)
    if not (run.task_as(BatchConf).output and (held := Journal.held(folders_of(run)[0]))):
        return run
    plan_as_begun(folders_of(run)[0] / MACHINE)
    settings = held.settings
    acting: dict[str, Any] = {
        name: settings[f"sampling.{name}"] for name in vars(run.sampling) if f"sampling.{name}" in settings
    }
    if acting.get("logit_bias"):  # JSON has texts for keys
        acting["logit_bias"] = {int(token): bias for token, bias in acting["logit_bias"].items()}
    sampling = run.sampling.over(replace(SamplingConfig(), **acting))
    return replace(run, speculation=kept_of_job(run.speculation, settings), sampling=sampling)


def job_of(run: RunConf, files: dict[str, Path | None], seed: int) -> Job:
    """The job that the run asks for, new or continued. Raises DataError if the folder holds another."""
    task = run.task_as(BatchConf)
    if task.input is None:
        raise UsageError("task.input is missing", fix="write task.input=prompts.jsonl")
    work, output = folders_of(run)
    Journal.require_free(work, output)
    settings = _settings(run, files, seed)
    if Journal.held(work) is None and output.exists():
        raise DataError(
            "the output file exists and is not this job's",
            where=output,
            allowed=f"a new name, or the job's own folder {work.name}",
            fix="choose another name, or move it away",
        )
    from llama_ssp.batch.index import Index  # it imports numpy, which other tasks do without at their start

    index = Index.of_run(run, work)
    manifest = Manifest(index.sha256, len(index), settings, shards_of(len(index), task.shard_size))
    held = Journal.held(work)  # after the input, which is only then known to be that of this job
    if held is None:
        require_good(run, list(index.refused.values()))
        return Job(run, Journal(work, manifest), output, index)
    corrected = None if index.sha256 == held.input_sha256 else index.corrected(Index.kept(work))
    if corrected is not None:
        held = replace(held, input_sha256=index.sha256)
        require_good(run, [index.refused[number] for number in corrected & index.refused.keys()])
    manifest.require_same(held, str(work))
    if len(held.shards) != len(manifest.shards):
        size = max(len(shard.indices) for shard in held.shards)
        log.info("the job keeps its shards of %d records: task.shard_size is for a new job", size)
    return Job(run, Journal(work, held), output, index, frozenset(corrected or ()))


def require_good(run: RunConf, refused: Sequence[Refused]) -> None:
    """Raises DataError with all bad lines, unless the job is to go on without them."""
    bad = [record.error for record in refused]
    if not bad or run.task.on_bad_row is OnBadRow.skip:
        return
    if len(bad) == 1:
        raise DataError(bad[0])
    shown = [one if len(one) <= BEGIN + END else f"{one[:BEGIN]} ... {one[-END:]}" for one in bad[:SHOWN]]
    more = f" (the first {SHOWN})" if len(bad) > SHOWN else ""
    raise DataError(
        f"{len(bad)} lines are bad: {' | '.join(shown)}{more}",
        fix="correct them, or write task.on_bad_row=skip to have them answered with their errors",
    )


def _settings(run: RunConf, files: dict[str, Path | None], seed: int) -> dict[str, Any]:
    """All that decides the output, flat. Where it is computed, and how many rows at once, does not."""
    plain = resolved(run)
    chosen: dict[str, Any] = {"seed": seed}
    for role, path in files.items():  # the models' folders, None for synthetic ones
        keys = ("dtype",) if path else OF_MODEL  # files say the rest themselves, wherever they lie
        chosen |= {f"{role}.{key}": plain[role][key] for key in keys}
        chosen[f"{role}.files"] = fingerprint(path) if path else None
        if plain[role]["adapter"] is not None:  # 0.3 had none
            chosen[f"{role}.adapter"] = adapter_fingerprint(home_expanded(plain[role]["adapter"]))
    acting = asdict(run.sampling.controls)
    for group, values in (("sampling", acting), ("speculation", plain["speculation"])):
        chosen |= {f"{group}.{key}": value for key, value in values.items()}
    chosen |= {f"task.{key}": plain["task"][key] for key in OF_TASK}
    # Jobs of earlier versions have neither.
    chosen |= {"task.fields": fields} if (fields := sorted(plain["task"]["fields"])) else {}
    chosen |= {"task.template": arguments} if (arguments := run.task.template_arguments) else {}
    return dict(json.loads(json.dumps(chosen)))  # in run.json the keys of `logit_bias` are texts
