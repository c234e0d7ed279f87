"""The count that people see while a job runs, and claims that nobody stands behind any more."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_ssp.batch import atomic_files, attempts
from llama_ssp.batch import journal as journals
from llama_ssp.batch.atomic_files import sealed
from llama_ssp.batch.journal import Journal, Manifest, count_finished, shards_of
from llama_ssp.batch.status import RECENT_S, pace
from llama_ssp.errors import DataError

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
    assert count_finished(journal.folder) == len(shard.indices)
    assert count_finished(journal.folder) == journal.standing().records_finished


def test_a_record_counts_once_and_a_torn_line_when_it_is_whole(journal: Journal):
    for name in ("a", "b"):
        attempt = journal.attempt(journal.manifest.shards[0], name)
        attempt.finish(0, {"id": "0"})
    assert count_finished(journal.folder) == 1
    line = sealed({"finished": 1, "record": {}})
    with next((journal.folder / "parts").glob("*a.jsonl")).open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert count_finished(journal.folder) == 1
        file.write(line[20:])
    assert count_finished(journal.folder) == 2


def test_the_pace_is_that_of_groups_at_work(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    """A record that two attempts have finished counts once, a refusal has no tokens, GPUs are not ranks."""
    now, began, name = 1e9, 1e9, "a"
    for module in (attempts, journals):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic))
    monkeypatch.setattr(atomic_files, "unique_name", lambda: name)
    shard = journal.manifest.shards[0]
    first, again = journal.attempt(shard), journal.attempt(shard, "b")
    journal.note(ranks=4, gpus=2, began=now)
    name = "b"
    journal.note(gpus=1, began=now)
    second = journal.attempt(journal.manifest.shards[1])
    now += 36
    first.finish(0, {"id": "0", "output_tokens": 20})
    again.finish(0, {"id": "0", "output_tokens": 20})
    second.finish(4, {"custom_id": "4", "response": {"body": {"usage": {"completion_tokens": 52}}}})
    second.finish(5, {"id": "5", "error": {"code": 400}})
    journal.note(drafted=10, accepted=4)
    standing, groups = journal.survey()
    assert (standing.records_finished, standing.records_failed) == (3, 1)
    assert [(group.records, group.failed, group.tokens, group.gpus) for group in groups] == [
        (1, 0, 20, 2), (2, 1, 52, 1),
    ]  # fmt: skip
    assert [group.began for group in groups] == [began, began]
    assert sum(group.hours * group.gpus for group in groups) == pytest.approx(0.03)
    told = pace(groups, standing, now)
    assert (told["tokens_committed"], told["acceptance_rate"]) == (72, 0.4)
    assert (told["records_per_s"], told["tokens_per_s"]) == (pytest.approx(3 / 36), pytest.approx(2.0))
    assert told["eta_s"] == pytest.approx(4 * 12)
    assert pace(groups, standing, now + 2 * RECENT_S)["records_per_s"] is None


def test_done_shards_are_counted_by_their_groups_and_not_read(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    """Unless a process was killed between the two; what it had published is read then."""
    journal.note(ranks=4, gpus=2, began=1.0)
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
        standing, groups = journal.survey()
        assert (standing.records_finished, standing.records_failed, standing.whole) == (RECORDS, 1, True)
        assert sum(one.tokens for one in groups) == 3 * (RECORDS - 1)
    assert (groups[0].ranks, groups[0].gpus, groups[0].records, groups[1].records) == (4, 2, 4, 3)
    group.write_bytes(b"".join(lines))
    for path in (journal.folder / "done").iterdir():
        path.write_bytes(b"not read")
    assert journal.standing() == standing


def test_answers_of_corrected_records_are_taken_back_where_they_are_errors(journal: Journal):
    """In a shard that is done, and in one that is not; a record that is open stays open."""
    for shard in journal.manifest.shards:
        attempt = journal.attempt(shard)
        for index in attempt.missing:
            if index != 6:
                attempt.finish(
                    index, {"id": str(index), **({"error": {"code": 5}} if index in (2, 5) else {"text": ""})}
                )
        if not attempt.missing:
            attempt.publish()
    with pytest.raises(DataError, match=r"the input has changed.*another record 2, which has an answer"):
        journal.reopen({1, 5})
    assert journal.reopen({2, 5, 6}) == 2
    assert journal.reopen({2, 5, 6}) == 0
    assert [journal.attempt(shard).missing for shard in journal.manifest.shards] == [[2], [5, 6]]
