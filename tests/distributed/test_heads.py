"""A head on the leader of several ranks: the text, and the drafts, of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.config import DraftSeat, Dtype, Overlap, PlacementConf, SamplingConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.placement import resolve
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.pair.placements import model_placements
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.weights import held as weights_held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.speculative.state import Prompt
from tests.distributed.pairs import Case, OverRanks, entry_of, load_one_at_a_time, opened, refilled, written
from tests.families import VOCAB, build
from tests.heads import save_dflash, save_head

SOME = [token for token in range(VOCAB) if token % 4]  # of a reduced vocabulary
LEADER = PlacementConf(draft=DraftSeat.leader)
SAMPLED = Case(3, 4, SamplingConfig(temperature=4.0, top_p=0.95, repetition_penalty=1.1), overlap=Overlap.off)


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    load_one_at_a_time(monkeypatch)


def target_in(folder: Path) -> Path:
    build("llama-mha").save_pretrained(folder / "target")
    return folder / "target"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("embeds", [True, False])
def test_a_head_on_the_leader_writes_what_one_process_writes(
    world: int, embeds: bool, tmp_path: Path
) -> None:
    """One row and ragged ones, with ends, adaptive K, rows that are refilled; with the target's embedding,
    of which each rank holds a part, too."""
    sizes = {"vocab": VOCAB, "target_dim": 32, "dim": 32, "taps": (0, 1, 3), "ids": SOME, "embeds": embeds}
    target, head = target_in(tmp_path), save_head(tmp_path / "head", **sizes)
    alone, pairs = opened(target, head, LEADER, ALONE), OverRanks(target, head, LEADER, world)
    assert [pair.draft is not None for pair, _ in pairs.held] == [True] + [False] * (world - 1)
    free = written(*alone, SAMPLED)
    ends = frozenset({free.texts[0][6], free.texts[1][11]})
    ended = replace(SAMPLED, ends=ends)
    for case in (ended, replace(SAMPLED, rows=1), replace(SAMPLED, adaptive=True), Case(4, 4)):
        expected = written(*alone, case)
        for run in pairs.run(written, case):
            assert (run.texts, run.finish, run.drafted) == (expected.texts, expected.finish, expected.drafted)
    assert free.drafted > free.accepted > 0
    expected = dict(zip("0123", written(*alone, ended).texts, strict=True))
    assert refilled(*alone, ended) == expected
    assert all(found == expected for found in pairs.run(refilled, ended))


RAGGED = [
    Prompt(str(n), tuple((7 * n + 3 * i) % (VOCAB - 3) + 3 for i in range(1 + 5 * n % 11))) for n in range(16)
]


@pytest.mark.parametrize("kind", ["EAGLE-3", "DFlash"])
def test_batches_of_ragged_rows(kind: str, tmp_path: Path) -> None:
    """1, 4 and 16 rows, on one rank and on two: each text is that of its prompt alone, in one process.

    The head's weights, its cache and the states that wait take what was planned, to the byte.
    """
    if kind == "DFlash":
        head = save_dflash(tmp_path / "head", vocab=VOCAB, dim=32, taps=(1, 2), ids=SOME)
    else:
        head = save_head(tmp_path / "head", vocab=VOCAB, target_dim=32, taps=(0, 1, 3), ids=SOME)
    target = target_in(tmp_path)
    alone, pairs = opened(target, head, LEADER, ALONE), OverRanks(target, head, LEADER, 2)
    texts = [written(*alone, replace(SAMPLED, rows=1), [prompt]).texts[0] for prompt in RAGGED]
    assert len({tuple(text[-SAMPLED.max_new :]) for text in texts}) > 8
    for rows in (1, 4, 16):
        case = replace(SAMPLED, rows=rows)
        assert written(*alone, case, RAGGED).texts == texts[:rows]
        assert all(run.texts == texts[:rows] for run in pairs.run(written, case, RAGGED))
    longest, new = max(len(prompt.token_ids) for prompt in RAGGED), SAMPLED.max_new
    for world, (pair, run) in ((1, alone), (2, pairs.held[0])):
        assert isinstance(pair.draft, HeadModel) and run.draft is not None
        roles = Role(TARGET, run.model, Dtype.fp32), Role(DRAFT, run.draft, Dtype.fp32)
        work = Workload(16, longest, new, SAMPLED.k, 512)
        planned = rank_work(*roles, resolve(LEADER, world, True), work, 0).draft
        assert planned is not None
        assert pair.draft.weights_bytes == sum(weights_held(planned.part, Dtype.fp32).values())
        assert pair.draft.caches.most == planned.caches_bytes(16)


def test_a_target_without_a_head_keeps_no_states(tmp_path: Path) -> None:
    """The same loaded target, with a head and then without."""
    target = target_in(tmp_path)
    head = save_head(tmp_path / "head", vocab=VOCAB, target_dim=32, taps=(0, 1, 3))
    cache = ModelCache(ALONE, LEADER)
    found = model_placements(entry_of(target, head, LEADER, 1))
    first, again = cache.open(found), cache.open(found)
    assert first.draft is again.draft and first.target is again.target and first.target.taps == (0, 1, 3)
    bare = cache.open(found[:1])
    assert bare.draft is None and bare.target is first.target and bare.target.taps == ()
