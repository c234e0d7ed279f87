"""A batch job: its input, its settings, and the folder it is kept in. No torch.

job = job_of(run, files, seed)       # the input is read and checked, or known from an earlier start
journal = job.begin(longest, bad)    # run.json is written, once
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llama_ssp.batch.journal import Journal
from llama_ssp.batch.manifest import Manifest, Shard, shards_of
from llama_ssp.batch.requests import Form, Refused, Request
from llama_ssp.batch.source import Source, read_shard, read_source
from llama_ssp.config import BatchConf, RunConf, home_expanded, resolved
from llama_ssp.errors import DataError, UsageError
from llama_ssp.models.folder import fingerprint
from llama_ssp.text.prompts import file_bytes

OF_MODEL = ("name", "repo", "revision", "weights", "dtype", "seed", "agreement")
OF_TASK = ("chat", "system", "max_new_tokens", "stop", "ignore_eos", "on_bad_row")
LONGEST, REFUSED = "longest", "refused"


@dataclass(frozen=True)
class Job:
    """One job. `source` is the input, unless the job was begun before: then it is read by shards."""

    run: RunConf
    work: Path
    output: Path
    manifest: Manifest
    source: Source | None

    def begin(self, longest: int, refused: list[Refused]) -> Journal:
        """The job's journal; a new one keeps how long a text may get, and which lines are bad."""
        facts = {LONGEST: longest, REFUSED: [{**asdict(r), "form": r.form.value} for r in refused]}
        manifest = self.manifest if self.source is None else self.manifest.with_facts(facts)
        return Journal.begin(self.work, manifest)

    def read(self, journal: Journal, shard: Shard) -> list[Request | Refused]:
        """The records of a shard."""
        if self.source is not None:
            known = {refused.index: refused for refused in refused_in(journal)}
            return [known.get(i, self.source.records[i]) for i in shard.indices]
        refused = {record.index: record for record in refused_in(journal)}
        return read_shard(self.run, shard, refused)


def longest_in(journal: Journal) -> int:
    """How many tokens the longest text of the job may get to have, prompt included."""
    longest: int = journal.manifest.facts[LONGEST]
    return longest


def refused_in(journal: Journal) -> list[Refused]:
    """The lines that were found bad when the job began."""
    return [Refused(**{**plain, "form": Form(plain["form"])}) for plain in journal.manifest.facts[REFUSED]]


def folders_of(run: RunConf) -> tuple[Path, Path]:
    """Where the job is kept, and where its output goes."""
    task = run.task
    assert isinstance(task, BatchConf)
    if task.output is None:
        raise UsageError("task.output is missing", fix="write task.output=answers.jsonl")
    output = home_expanded(task.output)
    return home_expanded(task.work) if task.work else output.with_name(output.name + ".work"), output


def held_seed(run: RunConf) -> int | None:
    """The seed of a job that has begun."""
    work, _ = folders_of(run)
    held = Journal.held(work)
    return None if held is None else int(held.settings["seed"])


def job_of(run: RunConf, files: dict[str, Path | None], seed: int) -> Job:
    """The job that the run asks for, new or continued; refused if the folder holds another's.

    `files` are the models' folders, None for synthetic ones, by the roles that take part.
    """
    task = run.task
    assert isinstance(task, BatchConf)
    if task.input is None:
        raise UsageError("task.input is missing", fix="write task.input=prompts.jsonl")
    work, output = folders_of(run)
    settings, held = _settings(run, files, seed), Journal.held(work)
    if held is not None:
        sha = hashlib.sha256(file_bytes("task.input", task.input)).hexdigest()
        Manifest(sha, held.records, settings, held.shards).require_same(held, str(work))
        return Job(run, work, output, held, None)
    if output.exists():
        raise DataError(
            "the output file exists and is not this job's", where=str(output),
            allowed=f"a new name, or the job's own folder {work.name} beside it",
            fix="choose another task.output, or move the file away",
        )  # fmt: skip
    source = read_source(run)
    shards = shards_of(source.places, source.size, task.shard_size)
    manifest = Manifest(source.sha256, len(source.records), settings, shards)
    return Job(run, work, output, manifest, source)


def _settings(run: RunConf, files: dict[str, Path | None], seed: int) -> dict[str, Any]:
    """All that decides the output, flat. Where it is computed, and how many rows at once, does not."""
    plain = resolved(run)
    chosen: dict[str, Any] = {"seed": seed}
    for role, path in files.items():
        keys = ("dtype",) if path else OF_MODEL  # files say the rest themselves, wherever they lie
        chosen |= {f"{role}.{key}": plain[role][key] for key in keys}
        chosen[f"{role}.files"] = fingerprint(path) if path else None
    for group in ("sampling", "speculation"):
        chosen |= {f"{group}.{key}": value for key, value in plain[group].items()}
    return chosen | {f"task.{key}": plain["task"][key] for key in OF_TASK}
