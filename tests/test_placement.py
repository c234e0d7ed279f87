"""Who holds what, for every kind of placement, and what is refused."""

from __future__ import annotations

import pytest

from llama_ssp.config import DraftSeat, PlacementConf, Splitting
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import DistributedError

OWN, SHARDED, COPIES = DraftSeat.own, DraftSeat.sharded, DraftSeat.replicated


@pytest.mark.parametrize(
    ("conf", "world", "target", "draft", "copies"),
    [
        (PlacementConf(), 1, (0,), (0,), False),
        (PlacementConf(), 4, (0, 1, 2, 3), (0,), False),
        (PlacementConf(draft=COPIES), 3, (0, 1, 2), (0, 1, 2), True),
        (PlacementConf(draft=COPIES, draft_degree=2), 3, (0, 1, 2), (0, 1), True),
        (PlacementConf(draft=SHARDED), 4, (0, 1, 2, 3), (0, 1, 2, 3), False),
        (PlacementConf(draft=SHARDED, draft_degree=2), 4, (0, 1, 2, 3), (0, 1), False),
        (PlacementConf(draft=OWN), 4, (0, 1, 2), (3,), False),
        (PlacementConf(draft=OWN, draft_degree=2), 4, (0, 1), (2, 3), False),
        (PlacementConf(draft=OWN, draft_ranks=[1]), 3, (0, 2), (1,), False),
        (PlacementConf(draft=OWN, target_ranks=[0, 3], draft_ranks=[2, 1]), 4, (0, 3), (2, 1), False),
        (PlacementConf(splitting=Splitting.deepspeed), 2, (0, 1), (0,), False),
        (PlacementConf(splitting=Splitting.layers), 1, (0,), (0,), False),
    ],
)
def test_table(conf, world, target, draft, copies):
    placement = resolve(conf, world, drafts=True)
    assert (placement.target, placement.draft, placement.copies) == (target, draft, copies)
    assert placement.draft_apart == (conf.draft is OWN)
    assert placement.draft_degree == (1 if copies else len(draft))


def test_without_a_draft_every_rank_is_the_targets():
    assert resolve(PlacementConf(draft=OWN), 3, drafts=False).target == (0, 1, 2)
    assert resolve(PlacementConf(draft=COPIES), 2, drafts=False).draft == ()


@pytest.mark.parametrize(
    ("conf", "world", "says"),
    [
        (PlacementConf(draft=OWN), 1, "no rank is left for the target"),
        (PlacementConf(draft=OWN, draft_degree=4), 4, "at least 5 ranks"),
        (PlacementConf(draft=SHARDED, draft_degree=3), 2, "1..2"),
        (PlacementConf(draft=OWN, draft_ranks=[7]), 4, "start 8 ranks"),
        (PlacementConf(target_ranks=[1, 2]), 3, "target's ranks do not begin with the leader"),
        (PlacementConf(target_ranks=[0, 0]), 2, "different ones of 0..1"),
        (PlacementConf(target_ranks=[0, 1]), 3, "ranks 2 of 3"),
        (PlacementConf(draft=SHARDED, target_ranks=[0, 1], draft_ranks=[1, 2]), 3, "partly"),
        (PlacementConf(draft=SHARDED, draft_ranks=[1, 0]), 2, "draft's ranks do not begin with the leader"),
        (PlacementConf(draft=OWN, target_ranks=[0, 1], draft_ranks=[1]), 2, "its ranks are the target's"),
        (PlacementConf(splitting=Splitting.layers), 2, "one process"),
        (PlacementConf(splitting=Splitting.deepspeed, draft=OWN), 2, "DeepSpeed"),
    ],
)
def test_refused(conf, world, says):
    with pytest.raises(DistributedError, match=says):
        resolve(conf, world, drafts=True)
