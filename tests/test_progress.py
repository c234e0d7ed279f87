"""The count that people see while a job runs, and claims that nobody stands behind any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_ssp.batch.journal import Journal, count_finished
from llama_ssp.batch.manifest import Manifest, shards_of

RECORDS = 7


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.begin(tmp_path, Manifest("ab" * 32, RECORDS, {"seed": 1}, shards_of(RECORDS, 4)))


def test_nothing_is_there_yet(tmp_path: Path):
    assert count_finished(tmp_path / "none") == 0


def test_it_grows_with_the_files(journal: Journal):
    shard = journal.manifest.shards[0]
    attempt = journal.attempt(shard)
    for count, index in enumerate(shard.indices, start=1):
        attempt.begin([index])
        attempt.finish(index, {"id": str(index), "text": '\n{"finished":6'})
        assert count_finished(journal.folder) == count
    attempt.publish()
    assert count_finished(journal.folder) == shard.count
    assert count_finished(journal.folder) == journal.standing().records_finished


def test_a_record_counts_once_and_a_torn_line_when_it_is_whole(journal: Journal):
    for name in ("a", "b"):
        attempt = journal.attempt(journal.manifest.shards[0], name)
        attempt.finish(0, {"id": "0"})
    assert count_finished(journal.folder) == 1
    with next((journal.folder / "parts").glob("*a.jsonl")).open("ab") as file:
        file.write(b'00000000 {"finished":1,')
        file.flush()
        assert count_finished(journal.folder) == 1
        file.write(b'"record":{}}\n')
    assert count_finished(journal.folder) == 2


def test_what_jobs_held_is_released_and_nothing_else(journal: Journal):
    claims = journal.folder / "claims"
    for name, job in (("00000", "7"), ("00001", None)):
        (claims / name).write_text(json.dumps({"host": "n1", "pid": 1, "job": job, "restart": 0}))
    (claims / "torn").write_text('{"job": "7"')
    journal.release_jobs()
    assert sorted(path.name for path in claims.iterdir()) == ["00001", "torn"]
