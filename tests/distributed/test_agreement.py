"""Every placement of a pair writes what one process writes; the leader alone decides."""

from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import DraftSeat, Overlap, PlacementConf, SamplingConfig, Splitting, Verification
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import DistributedError
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.passes import Pass
from llama_ssp.pair.assembly import RankModels
from llama_ssp.speculative import follower
from tests.distributed.pairs import RAGGED, Case, OverRanks, opened, refilled, written
from tests.distributed.processes import on_ranks
from tests.distributed.threads import ThreadRank
from tests.families import build
from tests.rig import Run, perturbed

LAYERS = 3  # of the tiny models
SAMPLED = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
FLAT = SamplingConfig(temperature=2.0)
SHARDED, OWN, COPIES, LEADER = DraftSeat.sharded, DraftSeat.own, DraftSeat.replicated, DraftSeat.leader
PLACEMENTS: dict[str, tuple[int, PlacementConf]] = {
    "2 leader": (2, PlacementConf(draft=LEADER)),
    "2 copies": (2, PlacementConf(draft=COPIES)),
    "2 split": (2, PlacementConf(draft=SHARDED)),
    "1+1 own": (2, PlacementConf(draft=OWN)),
    "3 leader": (3, PlacementConf(draft=LEADER)),
    "3 split over 2": (3, PlacementConf(draft=SHARDED, draft_degree=2)),
    "2+1 own": (3, PlacementConf(draft=OWN)),
    "1+2 own": (3, PlacementConf(draft=OWN, draft_degree=2)),
    "4 copies": (4, PlacementConf(draft=COPIES, draft_degree=2)),
    "2+2 own": (4, PlacementConf(draft=OWN, draft_degree=2)),
    "2+2 listed": (4, PlacementConf(draft=OWN, target_ranks=[0, 2], draft_ranks=[3, 1])),
}
NARROW = Case(4, 4, FLAT, draft_top=5)  # drafts from the likeliest tokens alone
CASES = [
    *(Case(*how) for how in product((0, 1, 4, 8), (1, 4), (Case(0).sampling, SAMPLED))),
    Case(6, 4, SAMPLED, adaptive=True),
    Case(4, 4, SAMPLED, verification=Verification.token),
    NARROW,
]
MATRIX = 16  # of them are K x rows x sampling


@dataclass
class Models:
    """A target and a draft that agrees sometimes, in files; what one process writes; pairs already open."""

    target: Path
    draft: Path
    alone: tuple[RankModels, Any]
    held: dict[str, OverRanks] = field(default_factory=dict)
    known: dict[str, Run] = field(default_factory=dict)

    def open(self, name: str) -> OverRanks:
        if name not in self.held:
            world, placement = PLACEMENTS[name]
            self.held[name] = OverRanks(self.target, self.draft, placement, world)
        return self.held[name]

    def expected(self, case: Case) -> Run:
        if str(case) not in self.known:
            self.known[str(case)] = written(*self.alone, case)
        return self.known[str(case)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    build("llama-mha").save_pretrained(target)
    perturbed(build("llama-mha"), 0.05).save_pretrained(draft)
    return Models(target, draft, opened(target, draft, PlacementConf(), ALONE))


def on_placement(models: Models, name: str, case: Case) -> list[Run]:
    pairs = models.open(name)
    for pair, _ in pairs.held:
        for group in (pair.roles.target, pair.roles.draft, pair.roles.draft_channel):
            if isinstance(group, ThreadRank):
                group.counts = dict.fromkeys(group.counts, 0)
    return pairs.run(written, case)


def same(run: Run, expected: Run) -> bool:
    return (run.texts, run.finish, run.rounds, run.drafted, run.accepted) == (
        expected.texts, expected.finish, expected.rounds, expected.drafted, expected.accepted,
    )  # fmt: skip


def ended(models: Models) -> Case:
    """With ends inside blocks, so that rows end at different times."""
    free = models.expected(Case(4, 4, SAMPLED))
    return Case(4, 4, SAMPLED, ends=frozenset({free.texts[0][6], free.texts[1][11]}))


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_writes_what_one_process_writes(name: str, models: Models):
    """Every case on every other placement: each placement has every pair of K, rows and sampling."""
    turn = list(PLACEMENTS).index(name)
    for number, case in enumerate([*CASES, ended(models)]):
        if number < MATRIX and (number + number // 2 + number // 4 + turn) % 2:
            continue
        expected = models.expected(case)
        for run in on_placement(models, name, case):
            assert same(run, expected), case
    assert expected.drafted > expected.accepted > 0


HYBRID = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
}


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A pair with recurrent states."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    build("qwen3_5", **HYBRID).save_pretrained(target)
    perturbed(build("qwen3_5", **HYBRID), 0.02).save_pretrained(draft)
    return Models(target, draft, opened(target, draft, PlacementConf(), ALONE))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["2 leader", "3 leader", "2 copies", "3 split over 2", "1+1 own", "2+1 own"])
def test_states_are_alike_on_every_rank(name: str, hybrids: Models):
    """A draft that runs ahead may go back by more than its drafts."""
    for case in (Case(0), Case(4), Case(3, 4, SAMPLED), Case(6, 4, SAMPLED, adaptive=True)):
        expected = hybrids.expected(case)
        for overlap in (Overlap.off, Overlap.ahead) if name.endswith("own") else (Overlap.auto,):
            for run in on_placement(hybrids, name, replace(case, overlap=overlap)):
                assert same(run, expected), (case, overlap)
        assert expected.drafted >= expected.accepted >= bool(case.k)
    again = ended(hybrids)
    assert all(found == hybrids.expected(again).texts for found in hybrids.open(name).run(refilled, again))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["3 leader", "3 split over 2", "2 copies", "2+2 own"])
def test_rows_are_refilled_alike_on_every_rank(name: str, models: Models):
    case = ended(models)
    expected = models.expected(case).texts
    assert all(found == expected for found in models.open(name).run(refilled, case))


@pytest.mark.parametrize("name", ["3 leader", "3 split over 2", "4 copies", "2+2 own"])
@pytest.mark.parametrize("k", [0, 4])
def test_a_round_has_one_message(name: str, k: int, models: Models):
    """To the ranks of the target, and one to those who are asked to draft; the rest are the models' sums."""
    runs = on_placement(models, name, Case(k))
    for (pair, _), run in zip(models.open(name).held, runs, strict=True):
        split, asked = pair.roles.target, pair.roles.draft_channel
        if isinstance(split, ThreadRank):
            assert split.counts["messages"] == run.rounds + 1  # what begins the first round, and ends each
            assert split.counts["sums"] == run.target_forwards * (1 + 2 * LAYERS)
            assert split.counts["gathers"] == run.target_forwards
        if isinstance(asked, ThreadRank) and not pair.roles.drafts_apart:
            assert asked.counts["messages"] == (run.rounds + 1 if k else 0)
            assert asked.counts["sums"] == asked.counts["gathers"] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["1+1 own", "2+1 own", "2+2 own", "2+2 listed"])
def test_a_draft_that_runs_ahead_writes_the_same(name: str, models: Models):
    """With one row drafts are ready now and then; with several, rows of either kind are in one pass."""
    narrow = replace(NARROW, k=3, rows=1)
    for case in (Case(3, 1), Case(4, 4, SAMPLED), Case(6, 4, SAMPLED, adaptive=True), NARROW, narrow):
        expected = models.expected(case)
        for overlap in (Overlap.off, Overlap.ahead):
            for run in on_placement(models, name, replace(case, overlap=overlap)):
                assert same(run, expected), (case, overlap)


def test_other_drafts_give_another_text(models: Models):
    """So the comparisons above are of drafts from the likeliest tokens, whose texts are of their own."""
    narrow, whole = models.expected(NARROW), models.expected(replace(NARROW, draft_top=None))
    assert narrow.texts != whole.texts and narrow.accepted > 0


def test_stopping_early_leaves_the_ranks_in_step(models: Models):
    """Who has seen enough settles, and nobody waits for the rest."""

    def stopped(pair: RankModels, run: Any) -> Run:
        written(pair, run, Case(4, rounds=2))
        return written(pair, run, Case(4))

    for name in ("3 leader", "3 split over 2", "2+1 own"):
        assert all(same(run, models.expected(Case(4))) for run in models.open(name).run(stopped)), name


class Noisy(DecoderModel):
    """One rank's logits are off by noise: its own decisions would differ."""

    def logits(self, token_BW: Tensor, pass_: Pass, cache: KVCache) -> Tensor:
        logits = super().logits(token_BW, pass_, cache)
        return logits + 50 * torch.randn(logits.shape)


class Damaged(DecoderModel):
    """The second row's logits are no numbers."""

    def logits(self, token_BW: Tensor, pass_: Pass, cache: KVCache) -> Tensor:
        logits = super().logits(token_BW, pass_, cache).clone()
        logits[1:2] = torch.nan
        return logits


def with_other(models: Models, name: str, rank: int, which: str, kind: type[DecoderModel]) -> Models:
    """The pair with its target's, or its draft's, weights in another kind of model on one rank."""
    changed = copy(models.open(name))
    pair, run = changed.held[rank]
    model = getattr(pair, which)
    other = kind(model.decoder, model.config, "other", model.ranks)
    changed.held = [*changed.held[:rank], (replace(pair, **{which: other}), run), *changed.held[rank + 1 :]]
    return replace(models, held={name: changed})


@pytest.mark.parametrize("name", ["2 leader", "3 split over 2", "2+1 own", "2 copies"])
def test_what_another_rank_would_decide_does_not_matter(name: str, models: Models):
    case = Case(4, 4, SAMPLED, max_new=40)
    runs = on_placement(with_other(models, name, 1, "target", Noisy), name, case)
    assert [run.texts for run in runs] == [models.expected(case).texts] * len(runs)


def test_a_copy_that_drafts_otherwise_is_put_right(models: Models):
    case = Case(4, 4, SAMPLED, max_new=40)
    for found in on_placement(with_other(models, "2 copies", 1, "draft", Noisy), "2 copies", case):
        assert same(found, models.expected(case))


def test_a_copy_is_compared_once_the_targets_pass_is_queued(models: Models, monkeypatch: pytest.MonkeyPatch):
    """The host waits for what was drawn: before the pass, the device would then have nothing to do."""
    order: list[str] = []
    whole = follower.target_logits
    keep = follower.Follower._keep_agreed

    def queued(*given: Any) -> Tensor:
        order.append("pass")
        return whole(*given)

    def compared(rank: follower.Follower, *given: Any) -> None:
        order.append("comparison")
        keep(rank, *given)

    monkeypatch.setattr(follower, "target_logits", queued)
    monkeypatch.setattr(follower.Follower, "_keep_agreed", compared)
    case = Case(4, 1)
    _, run = on_placement(models, "2 copies", case)
    assert same(run, models.expected(case)) and run.rounds > 1
    assert order == ["pass", "comparison"] * run.rounds


@pytest.mark.parametrize("name", ["2 leader", "2+1 own"])
def test_a_damaged_row_ends_on_every_rank(name: str, models: Models):
    runs = on_placement(with_other(models, name, 0, "target", Damaged), name, Case(4, max_new=8))
    assert all(run.finish == ["length", "error", "length", "length"] for run in runs)
    assert all(run.texts == runs[0].texts for run in runs) and runs[0].texts[1] == []


def test_prompts_that_differ_are_found_before_they_are_read(models: Models):
    longer = [*RAGGED[:2], replace(RAGGED[2], token_ids=(*RAGGED[2].token_ids, 5)), RAGGED[3]]
    prompts = iter([RAGGED, RAGGED, longer])
    with pytest.raises(DistributedError, match="the ranks differ in prompts"):
        models.open("3 leader").run(lambda pair, run: written(pair, run, Case(0), next(prompts)))
    models.held.clear()  # this meeting has been broken off


DEEPSPEED = PlacementConf(splitting=Splitting.deepspeed)
REAL = ["2 deepspeed", "2 copies", "2 split", "2+1 own", "2+2 listed"]
DEEPSPEED_CASES = [*CASES[:MATRIX:3], *CASES[MATRIX:]]  # every K, and every pair of rows and sampling
REAL_CASES = [Case(0), NARROW]
REAL_CASES += [Case(4, *how) for how in ((4, Case(0).sampling), (4, SAMPLED), (1, SAMPLED))]


def written_on_real(
    ranks: Ranks, target: Path, draft: Path, placement: PlacementConf, cases: list[Case]
) -> list[list[list[int]]]:
    pair = opened(target, draft, placement, ranks)
    return [written(*pair, case).texts for case in cases]


@pytest.mark.slow
def test_layers_write_what_one_device_writes(models: Models):
    pair = opened(models.target, models.draft, PlacementConf(splitting=Splitting.layers), ALONE)
    for case in CASES:
        assert same(written(*pair, case), models.expected(case))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_ranks_write_what_one_process_writes(name: str, models: Models):
    world, placement = PLACEMENTS.get(name, (2, DEEPSPEED))
    cases = DEEPSPEED_CASES if placement is DEEPSPEED else REAL_CASES  # threads have done the others
    if placement.draft is OWN:
        cases = [replace(case, overlap=overlap) for case in cases for overlap in (Overlap.off, Overlap.ahead)]
    every = on_ranks(world, written_on_real, models.target, models.draft, placement, cases)
    for texts in every.values():
        assert texts == [models.expected(case).texts for case in cases]
