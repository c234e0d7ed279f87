"""A batch job: its input, its settings, and the folder it is kept in. No torch.

job = job_of(run, files, seed)       # the input is read and checked, or known from an earlier start
journal = job.begin(longest, bad)    # run.json is written, once
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llama_ssp.batch.journal import Journal
from llama_ssp.batch.manifest import Manifest, Shard, shards_of
from llama_ssp.batch.requests import Form, Reader, Refused, Request
from llama_ssp.config import BatchConf, OnBadRow, RunConf, home_expanded, resolved
from llama_ssp.errors import DataError, RunError, UsageError
from llama_ssp.models.folder import fingerprint
from llama_ssp.text.prompts import file_bytes, has_objects, lines_of

OF_MODEL = ("name", "repo", "revision", "weights", "dtype", "seed", "agreement")
OF_TASK = ("chat", "system", "max_new_tokens", "stop", "ignore_eos", "on_bad_row")
LONGEST, REFUSED = "longest", "refused"
SHOWN = 5  # bad lines that a message quotes


@dataclass(frozen=True)
class Source:
    """The whole input. A record's place is its first byte and the number of its line."""

    sha256: str
    size: int
    places: list[tuple[int, int]]
    records: list[Request | Refused]


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
        if self.source is None:
            return Journal.begin(self.work, self.manifest)
        facts = {LONGEST: longest, REFUSED: [{**asdict(r), "form": r.form.value} for r in refused]}
        return Journal.begin(self.work, replace(self.manifest, facts=facts))

    def read(self, journal: Journal, shard: Shard) -> list[Request | Refused]:
        """The records of a shard, with the lines that were found bad when the job began."""
        plain = journal.manifest.facts[REFUSED]
        refused = {one["index"]: Refused(**{**one, "form": Form(one["form"])}) for one in plain}
        if self.source is not None:
            return [refused.get(index, self.source.records[index]) for index in shard.indices]
        return read_shard(self.run, shard, refused)


def longest_in(journal: Journal) -> int:
    """How many tokens the longest text of the job may get to have, prompt included."""
    return int(journal.manifest.facts[LONGEST])


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
    held = Journal.held(folders_of(run)[0])
    return None if held is None else int(held.settings["seed"])


def job_of(run: RunConf, files: dict[str, Path | None], seed: int) -> Job:
    """The job that the run asks for, new or continued. Raises DataError if the folder holds another.

    `files` are the models' folders, None for synthetic ones, by the roles that take part.
    """
    assert isinstance(run.task, BatchConf)
    if run.task.input is None:
        raise UsageError("task.input is missing", fix="write task.input=prompts.jsonl")
    work, output = folders_of(run)
    settings, held = _settings(run, files, seed), Journal.held(work)
    if held is not None:
        sha = hashlib.sha256(_opened(run)[1]).hexdigest()
        Manifest(sha, held.records, settings, held.shards).require_same(held, str(work))
        return Job(run, work, output, held, None)
    if output.exists():
        what, fix = "the output file exists and is not this job's", "choose another name, or move it away"
        raise DataError(what, output, allowed=f"a new name, or the job's own folder {work.name}", fix=fix)
    source = read_source(run)
    shards = shards_of(source.places, source.size, run.task.shard_size)
    return Job(run, work, output, Manifest(source.sha256, len(source.records), settings, shards), source)


def read_source(run: RunConf) -> Source:
    """Every line of the input, checked before anything is loaded. Raises DataError for bad lines."""
    name, data, reader = _opened(run)
    places, records = list[tuple[int, int]](), list[Request | Refused]()
    for line in lines_of(data, name):
        places.append((line.start, line.number))
        try:
            records.append(reader.read(line, len(records)))
        except RunError as error:
            records.append(reader.refused(line, len(records), error))
    require_good(run, records)
    return Source(hashlib.sha256(data).hexdigest(), len(data), places, records)


def require_good(run: RunConf, records: Sequence[Request | Refused]) -> None:
    """Raises DataError with all bad lines, unless the job is to go on without them."""
    assert isinstance(run.task, BatchConf)
    bad = [record.error for record in records if isinstance(record, Refused)]
    if not bad or run.task.on_bad_row is OnBadRow.skip:
        return
    if len(bad) == 1:
        raise DataError(bad[0])
    more = f" (the first {SHOWN})" if len(bad) > SHOWN else ""
    fix = "correct them, or write task.on_bad_row=skip to have them answered with their errors"
    raise DataError(f"{len(bad)} lines are bad: {' | '.join(bad[:SHOWN])}{more}", fix=fix)


def read_shard(run: RunConf, shard: Shard, refused: dict[int, Refused]) -> list[Request | Refused]:
    """The records of a shard; `refused` are those known to be bad."""
    name, data, reader = _opened(run)
    lines = lines_of(data[shard.start : shard.end], name, shard.start, shard.line)
    return [
        refused[index] if index in refused else reader.read(line, index)
        for index, line in enumerate(lines, shard.first)
    ]


def _opened(run: RunConf) -> tuple[str, bytes, Reader]:
    """The input's name, its bytes, and a reader of its lines."""
    assert isinstance(run.task, BatchConf) and run.task.input is not None
    name = run.task.input
    return name, file_bytes("task.input", name), Reader(run, not has_objects(name))


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
