"""Coupled texts in fp32, one for a seed: three draft models, n-grams, none; K 0, 1, 4, 8; on ranks 1, 8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.config import Drafting, DraftSeat, PlacementConf, SpeculationConfig, Verification
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.pair.assembly import engine_for
from tests.distributed.pairs import RAGGED, Known, opened
from tests.distributed.processes import on_ranks
from tests.distributed.test_agreement import SAMPLED
from tests.families import build
from tests.rig import drive, perturbed

pytestmark = pytest.mark.slow

KS = (0, 1, 4, 8)
ON_RANKS = (1, 8)
NEW = 24
Texts = dict[tuple[str, int], list[list[int]]]


def written(
    ranks: Ranks, target: Path, drafts: dict[str, Path], placement: PlacementConf, rule: str,
    ks: tuple[int, ...] = KS,
) -> Texts:  # fmt: skip
    """What each draft gives at each K on this rank."""
    found: Texts = {}
    for name, path in drafts.items():
        pair, run = opened(target, path, placement, ranks)
        kinds = {name: Drafting.model, "n-gram": Drafting.ngram, "none": Drafting.none}
        for kind, drafter in kinds.items():
            for k in ks if (kind, ks[0]) not in found else ():
                spec = SpeculationConfig(k=k, drafter=drafter, verification=Verification(rule))
                known: Any = Known()
                how = replace(run, sampling=SAMPLED, speculation=spec)
                engine = engine_for(pair, how, known, frozenset(), 11, 512)
                found[kind, k] = drive(engine, RAGGED, k=k, max_new=NEW).texts
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    target = tmp_path_factory.mktemp("target")
    drafts = {name: tmp_path_factory.mktemp(name) for name in ("near", "far", "foreign")}
    build("llama-mha").save_pretrained(target)
    perturbed(build("llama-mha"), 0.05).save_pretrained(drafts["near"])
    build("llama-mha", 3).save_pretrained(drafts["far"])
    build("qwen2", 5).save_pretrained(drafts["foreign"])
    return target, drafts


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, dict[str, Path]]) -> Texts:
    """What one process writes."""
    return written(ALONE, *folders, PlacementConf(), "coupled")


@pytest.mark.few(1)
@pytest.mark.parametrize("seat", [DraftSeat.leader, DraftSeat.sharded, DraftSeat.own])
def test_one_text(folders: tuple[Path, dict[str, Path]], alone: Texts, seat: DraftSeat) -> None:
    assert len({str(texts) for texts in alone.values()}) == 1
    assert {name for name, _ in alone} == {"near", "far", "foreign", "n-gram", "none"}
    expected = {(name, k): texts for (name, k), texts in alone.items() if k in ON_RANKS}
    placement = PlacementConf(draft=seat)
    for rank, texts in on_ranks(2, written, *folders, placement, "coupled", ON_RANKS).items():
        assert texts == expected, rank


def test_many_texts_otherwise(folders: tuple[Path, dict[str, Path]]) -> None:
    """The same by block verification: the texts hang on draft and K."""
    found = written(ALONE, *folders, PlacementConf(), "block")
    assert len({str(texts) for (name, _), texts in found.items() if name == "far"}) > 2
    assert len({str(texts) for texts in found.values()}) > len(KS)
