"""A target cut over ranks writes what the whole one writes, with any drafter; the leader alone decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.cache import Feed, RaggedCache
from llama_ssp.config import Dtype, ModelConf, SamplingConf
from llama_ssp.engine import Prompt
from llama_ssp.errors import DistributedError
from llama_ssp.load.causal import CausalModel
from llama_ssp.load.models import load, load_part
from llama_ssp.ranks import Ranks
from tests.distributed.processes import on_ranks
from tests.distributed.threads import ThreadRank, ranks_of, together
from tests.families import VOCAB, build
from tests.rig import GREEDY, Run, perturbed, speculate

CPU = torch.device("cpu")
MODEL = ModelConf(name="small")
SAMPLED = SamplingConf(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
TOKENS = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(4)).tolist()
PROMPTS = [
    Prompt(str(row), tuple(ids[:n])) for row, (ids, n) in enumerate(zip(TOKENS, (9, 4, 1), strict=True))
]


@dataclass
class Models:
    """A whole target, its parts by rank count, and a draft that agrees sometimes."""

    folder: Path
    whole: CausalModel
    draft: CausalModel
    parts: dict[int, tuple[list[ThreadRank], list[CausalModel]]] = field(default_factory=dict)

    def cut(self, world: int) -> tuple[list[ThreadRank], list[CausalModel]]:
        if world not in self.parts:
            ranks = ranks_of(world)
            parts = [load_part(MODEL, self.folder, Dtype.fp32, CPU, "model", rank) for rank in ranks]
            self.parts[world] = ranks, parts
        return self.parts[world]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("target")
    build("llama-mha").save_pretrained(folder)
    draft = CausalModel(perturbed(build("llama-mha"), 0.05), "draft")
    return Models(folder, load(MODEL, folder, Dtype.fp32, CPU, "model"), draft)


def on_parts(models: Models, world: int, drafter: Any, **how: Any) -> tuple[list[Run], list[ThreadRank]]:
    """The same run on every rank; only the leader has the draft, and a seed that matters."""
    ranks, parts = models.cut(world)
    for rank in ranks:
        rank.counts = dict.fromkeys(rank.counts, 0)
    seed = how.pop("seed", 0)

    def one(rank: ThreadRank) -> Run:
        own = drafter if rank.is_leader else None
        mine = seed if rank.is_leader else 999
        return speculate(parts[rank.rank], PROMPTS, own, ranks=rank, seed=mine, **how)

    return together([lambda rank=rank: one(rank) for rank in ranks], ranks), ranks


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("drafting", "k", "adaptive"),
    [("none", 0, False), ("model", 0, False), ("model", 4, False), ("model", 6, True), ("ngram", 4, False)],
)
def test_ranks_write_what_one_process_writes(
    world: int, sampling: SamplingConf, drafting: str, k: int, adaptive: bool, models: Models
):
    drafter = {"none": None, "model": models.draft, "ngram": "ngram"}[drafting]
    how: dict[str, Any] = {"k": k, "sampling": sampling, "adaptive": adaptive, "max_new": 20}
    free = speculate(models.whole, PROMPTS, drafter, seed=7, **how)
    ends = frozenset({free.texts[0][6], free.texts[1][11]})
    expected = speculate(models.whole, PROMPTS, drafter, seed=7, ends=ends, **how)
    runs, ranks = on_parts(models, world, drafter, seed=7, ends=ends, **how)
    assert "eos" in expected.finish
    for run in runs:
        assert (run.texts, run.finish) == (expected.texts, expected.finish)
        assert (run.rounds, run.drafted, run.accepted) == (
            expected.rounds,
            expected.drafted,
            expected.accepted,
        )
    assert {rank.counts["messages"] for rank in ranks} == {2 * expected.rounds}


def test_drafts_are_accepted_and_refused(models: Models):
    runs, _ = on_parts(models, 2, models.draft, k=4, max_new=24)
    assert 0 < runs[0].accepted < runs[0].drafted


class Noisy(CausalModel):
    """One rank's logits are off by noise: its own decisions would differ."""

    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        logits = super().logits(token_BW, feed, cache, last_only)
        return logits + 50 * torch.randn(logits.shape)


def test_what_another_rank_would_decide_does_not_matter(models: Models):
    _, parts = models.cut(2)
    how: dict[str, Any] = {"k": 4, "max_new": 24, "sampling": SAMPLED}
    expected = speculate(models.whole, PROMPTS, models.draft, **how)
    kept = parts[1]
    try:
        parts[1] = Noisy(kept.module, "noisy", kept.vocab)
        runs, _ = on_parts(models, 2, models.draft, **how)
    finally:
        parts[1] = kept
    assert [run.texts for run in runs] == [expected.texts] * 2


def test_a_damaged_row_ends_on_every_rank(models: Models):
    class Damaged(CausalModel):
        def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
            logits = super().logits(token_BW, feed, cache, last_only).clone()
            logits[1] = torch.nan
            return logits

    _, parts = models.cut(2)
    kept = parts[0]
    try:
        parts[0] = Damaged(kept.module, "damaged", kept.vocab)
        runs, _ = on_parts(models, 2, models.draft, k=4, max_new=8)
    finally:
        parts[0] = kept
    assert all(run.finish == ["length", "error", "length"] for run in runs)
    assert runs[0].texts == runs[1].texts and runs[0].texts[1] == []


def test_texts_of_different_lengths_are_found_within_a_round(models: Models):
    ranks, parts = models.cut(2)
    longer = [PROMPTS[0], PROMPTS[1], Prompt("2", (*PROMPTS[2].token_ids, 5))]

    def one(rank: ThreadRank) -> Run:
        prompts = PROMPTS if rank.is_leader else longer
        return speculate(parts[rank.rank], prompts, None, k=0, max_new=8, ranks=rank)

    with pytest.raises(DistributedError, match="out of step: their texts differ in length"):
        together([lambda rank=rank: one(rank) for rank in ranks], ranks)
    models.parts.clear()  # this meeting has been broken off


CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {"k": 0}),
    "greedy": ("model", {"k": 4}),
    "sampled": ("model", {"k": 4, "sampling": SAMPLED}),
    "lookup": ("ngram", {"k": 4, "sampling": SAMPLED}),
}


def written(ranks: Ranks, folder: Path) -> dict[str, list[list[int]]]:
    """Every case on a real rank, with the seed on the leader only."""
    target = load_part(MODEL, folder, Dtype.fp32, CPU, "model", ranks)
    found = {}
    for name, (drafting, how) in CASES.items():
        own: Any = drafting if ranks.is_leader else None
        if own == "model":
            own = CausalModel(perturbed(build("llama-mha"), 0.05), "draft")
        seed = 7 if ranks.is_leader else 999
        found[name] = speculate(target, PROMPTS, own, ranks=ranks, seed=seed, max_new=16, **how).texts
    return found


@pytest.mark.slow
def test_real_ranks_write_what_one_process_writes(models: Models):
    every = on_ranks(2, written, models.folder)
    for name, (drafting, how) in CASES.items():
        drafter: Any = models.draft if drafting == "model" else drafting
        expected = speculate(models.whole, PROMPTS, drafter, seed=7, max_new=16, **how)
        assert [every[0][name], every[1][name]] == [expected.texts] * 2, name
