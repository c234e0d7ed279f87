"""The count that people see while a job runs, and claims that nobody stands behind any more."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_ssp.batch import attempt_log
from llama_ssp.batch.journal import Journal, count_finished
from llama_ssp.batch.manifest import Manifest, shards_of
from llama_ssp.batch.status import RECENT_S, Pace, pace

RECORDS = 7


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.begin(tmp_path, Manifest("ab" * 32, RECORDS, {"seed": 1}, shards_of(RECORDS, 4)))


def test_it_grows_with_the_files(journal: Journal, tmp_path: Path):
    assert count_finished(tmp_path / "none") == 0
    shard = journal.manifest.shards[0]
    attempt = journal.attempt(shard)
    for count, index in enumerate(shard.indices, start=1):
        attempt.begin([index], 2)
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


def test_the_pace_is_that_of_the_last_minutes(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    """Two groups at a time; a record that both have finished counts once, a refusal has no tokens."""
    now = 1e9
    clock = SimpleNamespace(time=lambda: now, monotonic=time.monotonic)
    monkeypatch.setattr(attempt_log, "time", clock)
    first, second = (journal.attempt(shard) for shard in journal.manifest.shards)
    again = journal.attempt(journal.manifest.shards[0], "again")
    first.begin([0, 1], 2)
    now += 2 * RECENT_S  # a pause, as between two submissions
    second.begin([4], 2)
    now += 10
    body = {"usage": {"completion_tokens": 40}}
    again.finish(0, {"id": "0", "output_tokens": 20})
    second.finish(4, {"custom_id": "4", "response": {"body": body}})
    second.finish(5, {"id": "5", "error": {"code": 400}})
    standing = journal.standing()
    assert pace(journal, standing, now) == Pace(60, 6.0, 0.3, pytest.approx(4 / 0.3))
    now += 10
    assert pace(journal, standing, now) == Pace(60, 3.0, 0.15, pytest.approx(4 / 0.15))
    first.finish(0, {"id": "0", "output_tokens": 20})  # the long attempt is at work: the window is full
    assert pace(journal, standing, now).tokens_per_s == 60 / RECENT_S
    now += 2 * RECENT_S
    assert pace(journal, standing, now) == Pace(60, None, None, None)
