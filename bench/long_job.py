"""A long batch job without a model: what start, resume, status, merge and the disk cost, and use of rows.

    python bench/long_job.py [RECORDS] [FOLDER]

Answers come from a stand-in that answers at once; each step is a process of its own, with its own memory.
Seconds are of the wall, and in brackets of the processor: on shared cores the first say little.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llama_ssp.batch import attempts
from llama_ssp.batch.index import Index
from llama_ssp.batch.journal import Journal, Manifest, shards_of
from llama_ssp.batch.status import pace
from llama_ssp.config import BatchConf, ModelConf, RunConf

WORDS = ["the", "harbour", "was", "still", "dark", "when", "first", "boats", "came", "home", "on", "quay"]
BYTES, SHARD = 480, 256


def measured(what: str, step: Callable[[], object]) -> None:
    """Runs a step in a process of its own and prints its seconds and the most memory that the process had."""
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{what} failed")
        return
    began, cpu = time.perf_counter(), time.process_time()
    found = step()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{what:30} {seconds:8.2f} s ({cpu:7.2f})  {most:6.0f} MiB  {'' if found is None else found}",
        flush=True,
    )
    os._exit(0)


def write_input(path: Path, records: int) -> None:
    draw = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            line = {"id": f"record-{number:07d}", "prompt": " ".join(draw.choices(WORDS, k=90))[: BYTES - 45]}
            file.write(json.dumps(line) + "\n")


def started(run: RunConf, work: Path) -> tuple[Index, Journal]:
    """What a leader does before it loads a model, but for the prompts that it tokenises."""
    index = Index.of_run(run, work)
    manifest = Manifest(index.sha256, len(index), {"seed": 1}, shards_of(len(index), SHARD), 600)
    journal = Journal.begin(work, manifest)
    index.save(work)
    return index, journal


def resume(run: RunConf, work: Path) -> str:
    """A further start: up to the first shard's texts."""
    index, journal = started(run, work)
    standing = journal.standing()
    if (taken := journal.claim()) is not None:
        with taken[1]:
            for number in journal.attempt(taken[0]).missing:
                index.read(number, run)
    return standing.in_words()


def work_until(run: RunConf, work: Path, share: float) -> None:
    """Answers that share of the shards, and half of the next one."""
    attempts.SYNC_EVERY = 10**9
    _, journal = started(run, work)
    journal.note(node="here", ranks=4, gpus=4, began=time.time())
    last = round(share * len(journal.manifest.shards))
    for shard in journal.manifest.shards[: last + 1]:
        if journal.is_done(shard):
            continue
        attempt = journal.attempt(shard)
        missing = attempt.missing
        attempt.begin(missing[:8], 8)
        for number in missing if int(shard.name) < last else missing[: SHARD // 2]:
            line = {"id": f"record-{number:07d}", "text": "word " * 80, "token_ids": list(range(100))}
            attempt.finish(number, {**line, "finish_reason": "length", "output_tokens": 100})
        if int(shard.name) < last:
            attempt.publish()


def status(work: Path) -> str:
    journal = Journal.find(work)
    standing, groups = journal.survey()
    rate = pace(groups, standing, time.time())["records_per_s"]
    return f"{standing.in_words()}, {rate or 0:.0f} records/s"


def size_of(folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size / 1e9:.2f} GB in the job's folder"


def use_of_rows(rows: int, shard: int | None) -> float:
    """The share of row-rounds that write a text; None refills rows across shards. Lengths are simulated."""
    draw = random.Random(2)
    lengths = [min(1024, 1 + int(draw.expovariate(1 / 200))) for _ in range(40 * 256)]
    rounds, step = 0, shard or len(lengths)
    for start in range(0, len(lengths), step):
        ends = [0] * rows
        parts = [lengths[at : at + 256] for at in range(start, min(start + step, len(lengths)), 256)]
        for length in (length for part in parts for length in sorted(part, reverse=True)):
            heapq.heapreplace(ends, ends[0] + length)
        rounds += max(ends)
    return sum(lengths) / (rounds * rows)


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None))
    source, work, output = folder / "in.jsonl", folder / "work", folder / "out.jsonl"
    task = BatchConf(name="batch", input=str(source), output=str(output), max_new_tokens=100)
    run = RunConf(model=ModelConf(name="m", vocab=512, context=4096), task=task)
    try:
        measured(f"(input of {records} records)", lambda: write_input(source, records))
        measured("first start", lambda: started(run, work) and None)
        for share in (0.0, 0.5, 0.99, 1.0):
            if share:
                measured(f"(answers to {share:.0%})", lambda: work_until(run, work, share))  # noqa: B023
            measured(f"resume at {share:.0%}", lambda: resume(run, work))
            measured(f"status at {share:.0%}", lambda: status(work))
        measured("merge", lambda: Journal.find(work).merge(output))
        print(f"output {output.stat().st_size / 1e9:.2f} GB, {size_of(work)}")
    finally:
        shutil.rmtree(folder)
    for rows in (8, 64, 128):
        by_shard, across = use_of_rows(rows, SHARD), use_of_rows(rows, None)
        print(f"{rows:4} rows: {by_shard:.0%} used shard by shard, {across:.0%} across shards")


if __name__ == "__main__":
    main()
