"""A head on the leader of several ranks: the text, and the drafts, of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.config import DraftSeat, Dtype, Overlap, PlacementConf, SamplingConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.placement import resolve
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.pair.placements import model_placements
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.weights import held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from tests.distributed.pairs import Case, OverRanks, entry_of, opened, refilled, written
from tests.families import VOCAB, build, ragged_prompts
from tests.heads import save_dflash, save_head

LEADER = PlacementConf(draft=DraftSeat.leader)
SAMPLED = Case(3, 4, SamplingConfig(temperature=4.0, top_p=0.95, repetition_penalty=1.1), overlap=Overlap.off)
RAGGED = ragged_prompts(*(1 + 5 * n % 11 for n in range(16)))
SIZES: dict[str, Any] = {"vocab": VOCAB, "dim": 32, "ids": [token for token in range(VOCAB) if token % 4]}
SAVED = {
    "EAGLE-3": (save_head, {"target_dim": 32, "taps": (0, 1, 3)}),
    # Of which each rank holds a part; and a DFlash head has no output matrix of its own, either.
    "the target's embedding": (save_head, {"target_dim": 32, "taps": (0, 1, 3), "embeds": False}),
    "DFlash": (save_dflash, {"taps": (1, 2), "ids": None}),
}


def saved(folder: Path, kind: str) -> tuple[Path, Path]:
    build("llama-mha").save_pretrained(folder / "target")
    save, how = SAVED[kind]
    return folder / "target", save(folder / "head", **{**SIZES, **how})


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "world"), [("EAGLE-3", 2), ("DFlash", 2), ("the target's embedding", 3)])
def test_a_head_on_the_leader_writes_what_one_process_writes(kind: str, world: int, tmp_path: Path) -> None:
    """One row and ragged ones, with ends, adaptive K, rows that are refilled: a text is its prompt's alone.

    The head's weights, its cache and the states that wait take what was planned, to the byte.
    """
    folders = saved(tmp_path, kind)
    alone, pairs = opened(*folders, LEADER, ALONE), OverRanks(*folders, LEADER, world)
    assert [pair.head is not None for pair, _ in pairs.held] == [True] + [False] * (world - 1)
    free = written(*alone, SAMPLED)
    assert free.drafted > free.accepted > 0
    ended = replace(SAMPLED, ends=frozenset({free.texts[0][6], free.texts[1][11]}))
    for case in (ended, replace(SAMPLED, adaptive=True), Case(4, 4)):
        expected = written(*alone, case)
        for run in pairs.run(written, case):
            assert (run.texts, run.finish, run.drafted) == (expected.texts, expected.finish, expected.drafted)
    texts = written(*alone, ended).texts
    assert all(found == texts for found in (refilled(*alone, ended), *pairs.run(refilled, ended)))
    texts = [written(*alone, replace(SAMPLED, rows=1), [prompt]).texts[0] for prompt in RAGGED]
    assert len({tuple(text[-SAMPLED.max_new :]) for text in texts}) > 8
    for rows in (1, 16):
        case = replace(SAMPLED, rows=rows)
        runs = [written(*alone, case, RAGGED), *pairs.run(written, case, RAGGED)]
        assert all(run.texts == texts[:rows] for run in runs)
    longest = max(len(prompt.token_ids) for prompt in RAGGED)
    work = Workload(rows=16, prompt_tokens=longest, new_tokens=SAMPLED.max_new, k=SAMPLED.k)
    for size, (pair, run) in ((1, alone), (world, pairs.held[0])):
        assert pair.head is not None and run.draft is not None
        roles = Role(TARGET, run.model, Dtype.fp32), Role(DRAFT, run.draft, Dtype.fp32)
        planned = rank_work(*roles, resolve(LEADER, size, True), work, 0).draft
        assert planned is not None and planned.caches_bytes(16) == pair.head.caches.most
        assert sum(held(planned.part, Dtype.fp32).values()) == pair.head.weights_bytes


def test_a_target_without_a_head_keeps_no_states(tmp_path: Path) -> None:
    """The same loaded target, with a head and then without."""
    cache = ModelCache(ALONE, LEADER)
    placed = model_placements(entry_of(*saved(tmp_path, "EAGLE-3"), LEADER, 1))
    first, again = cache.open(placed), cache.open(placed)
    assert first.head is again.head and first.target is again.target and first.target.taps == (0, 1, 3)
    bare = cache.open(replace(placed, head=None))
    assert bare.head is None and bare.target is first.target and bare.target.taps == ()
