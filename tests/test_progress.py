"""The count that people see while a job runs, and claims that nobody stands behind any more."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_ssp.batch import attempt_log
from llama_ssp.batch.journal import Journal, Piece, count_finished
from llama_ssp.batch.manifest import Manifest, shards_of
from llama_ssp.batch.status import RECENT_S, Pace, groups_of, pace

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
    monkeypatch.setattr(attempt_log, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic))
    first, second = (journal.attempt(shard) for shard in journal.manifest.shards)
    again = journal.attempt(journal.manifest.shards[0], "again")
    second.begin([4], 2)
    again.begin([0], 2)
    now += 10
    body = {"usage": {"completion_tokens": 40}}
    again.finish(0, {"id": "0", "output_tokens": 20})
    first.finish(0, {"id": "0", "output_tokens": 20})
    second.finish(4, {"custom_id": "4", "response": {"body": body}})
    second.finish(5, {"id": "5", "error": {"code": 400}})
    standing, pieces = journal.survey()
    assert (standing.records_finished, standing.records_failed, standing.attempts_unended) == (3, 1, 3)
    assert pace(pieces, standing, now) == Pace(60, 6.0, 0.3, pytest.approx(4 / 0.3))
    now += 10
    assert pace(pieces, standing, now) == Pace(60, 3.0, 0.15, pytest.approx(4 / 0.15))
    assert pace(pieces, standing, now + 2 * RECENT_S) == Pace(60, None, None, None)
    long = [Piece("a", now - 3 * RECENT_S, now, 300, 0, 900)]  # two thirds of it are not of the last minutes
    assert pace(long, standing, now).records_per_s == pytest.approx(100 / RECENT_S)


def test_done_shards_are_counted_by_their_groups_and_not_read(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    """Unless a process was killed between the two; what it had published is read then."""
    journal.enter(4)
    for shard in journal.manifest.shards:
        attempt = journal.attempt(shard)
        for index in shard.indices:
            error = {"error": {"code": 500}} if index == 2 else {"output_tokens": 3}
            attempt.finish(index, {"id": str(index), **error})
        attempt.publish()
    assert not list((journal.folder / "parts").iterdir())
    (group,) = (journal.folder / "groups").iterdir()
    lines = group.read_bytes().splitlines(keepends=True)
    for kept in (lines, lines[:-1]):
        group.write_bytes(b"".join(kept))
        standing, pieces = journal.survey()
        assert (standing.records_finished, standing.records_failed, standing.whole) == (RECORDS, 1, True)
        assert sum(piece.tokens for piece in pieces) == 3 * (RECORDS - 1)
    (told,) = groups_of(group.parent, pieces)
    assert (told["ranks"], told["records"]) == (4, 4) and told["hours"] >= 0
    group.write_bytes(b"".join(lines))
    for path in (journal.folder / "done").iterdir():
        path.write_bytes(b"not read")
    assert journal.standing() == standing
