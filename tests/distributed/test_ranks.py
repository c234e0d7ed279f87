"""What ranks say to each other arrives whole, in step, or ends them."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _world as groups

from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.process_group import PACKET, differing, open_ranks
from llama_ssp.errors import DistributedError
from tests.distributed.processes import on_ranks

LONG = list(range(-PACKET, 3 * PACKET))
MESSAGES = [[], [5], [-1, 2**62], LONG]


def test_a_rank_alone_leads():
    assert ALONE.is_leader and ALONE.world == 1


def test_a_rank_alone_hears_what_it_says():
    assert ALONE.broadcast_ints([1, 2]) == [1, 2]


def test_a_rank_alone_has_the_sum():
    tensor = torch.ones(2)
    assert ALONE.all_reduce(tensor) is tensor and ALONE.all_gather(tensor) == [tensor]


def test_a_rank_alone_opens_no_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert open_ranks(torch.device("cpu")) is ALONE


@pytest.mark.parametrize(
    ("text", "leaders", "said"),
    [
        ("bf16", "fp32", ""),
        ('{"a": 1}', "plain", ""),
        ('{"a": {"b": null}}', '{"a": 5}',
         ": a nothing on rank 3, 5 on rank 0; a.b null on rank 3, nothing on rank 0"),
        ('{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}', '{"a": 1, "b": 2, "c": 2, "d": 2, "e": 2}',
         ": b 1 on rank 3, 2 on rank 0; c 1 on rank 3, 2 on rank 0; d 1 on rank 3, 2 on rank 0; and 1 more"),
    ],
    ids=["a text", "no object", "in another", "more than three"],
)  # fmt: skip
def test_what_differs_is_named(text: str, leaders: str, said: str):
    assert differing(text, leaders, (3, 0)) == said


def refusal(act: Callable[[], object]) -> str:
    """What is raised; nothing if nothing is."""
    try:
        act()
    except DistributedError as error:
        return str(error)
    return ""


def talk(ranks: Ranks) -> dict[str, object]:
    """Everything that ranks do, then a message that one of them skips."""
    heard = [ranks.broadcast_ints(m if ranks.is_leader else [77]) for m in MESSAGES]
    mine = torch.full((3,), float(ranks.rank + 1))
    gathered = [t.tolist() for t in ranks.all_gather(mine.clone())]
    summed = ranks.all_reduce(mine)
    ranks.require_same("the configuration", "alike")
    ranks.barrier()
    other = json.dumps({"a": {"b": ranks.rank, "c": 1}, "d": [2] * ranks.rank})
    refused = refusal(lambda: ranks.require_same("the configuration", other))

    def skip() -> None:
        if ranks.is_leader:
            ranks.broadcast_ints([1])  # the other is not listening: it takes the next one for this one
            ranks._sent += 1  # type: ignore[attr-defined]
        ranks.broadcast_ints([2])
        ranks.broadcast_ints([3])

    return {"heard": heard, "gathered": gathered, "summed": summed.tolist(), "in place": summed is mine,
            "refused": refused, "astray": refusal(skip)}  # fmt: skip


@pytest.mark.slow
def test_two_real_ranks():
    results = on_ranks(2, talk)
    differing = "ranks 1 unlike rank 0: a.b 1 on rank 1, 0 on rank 0; d [2] on rank 1, [] on rank 0"
    for rank, said in results.items():
        assert said["heard"] == MESSAGES, rank
        assert said["gathered"] == [[1.0] * 3, [2.0] * 3]
        assert said["summed"] == [3.0] * 3 and said["in place"]
        assert "the ranks differ in the configuration" in said["refused"] and differing in said["refused"]
    assert "out of step" in results[1]["astray"] and "allowed number" in results[1]["astray"]


class Freed:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def free(self) -> None:
        self.said.append(self.name)


def left(ranks: Ranks) -> tuple[list[str], list[str]]:
    said: list[str] = []
    kept, gone = Freed("kept", said), Freed("gone", said)
    for each in (kept, gone):
        ranks.before_close(each.free)
    del each, gone
    ranks.close()
    return said, [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_ranks_part_in_good_order():
    """Graphs that somebody keeps are freed, and no thread is left that Python would end inside the store."""
    for freed, names in on_ranks(2, left).values():
        assert freed == ["kept"] and all("watch" not in name for name in names)


PATIENCE_S = 4.0


def load_late(ranks: Ranks) -> tuple[str, str]:
    """Each rank in turn compiles for longer than ranks wait in a round; then one does so after loading.

    Before a group's first sum, NCCL's first rank writes an id into torch's store, and the others wait for it.
    """
    store = groups.pg_map[ranks._tensors][1]  # type: ignore[attr-defined]
    if ranks.is_leader:
        time.sleep(1.5 * PATIENCE_S)
        store.set("id", "a")
    found: str = store.get("id").decode()
    ranks.barrier()
    group = ranks.among((1, 0))
    assert group is not None
    with ranks.loading():
        if ranks.rank == 1:
            time.sleep(1.5 * PATIENCE_S)
        for one in (group, ranks):
            one.all_reduce(torch.ones(2))
    if ranks.rank == 1:
        time.sleep(1.5 * PATIENCE_S)
    return found, refusal(lambda: group.all_reduce(torch.ones(2)))


@pytest.mark.slow
def test_a_rank_that_loads_late_is_waited_for():
    """While ranks load, and only then; the id of NCCL, too."""
    said = on_ranks(2, load_late, ranks_patience_s=PATIENCE_S)
    assert said[0][0] == said[1][0] == "a" and "Timed out waiting 4000ms" in said[0][1], said


def sum_with_the_gone(ranks: Ranks) -> str:
    """Rank 1 has gone when rank 0 sums as a compiled step does."""
    if ranks.rank == 1:
        return ""
    try:
        functional.all_reduce(torch.ones(2), "sum", ranks._tensors) + 0  # type: ignore[attr-defined]
    except RuntimeError as error:
        return str(ranks.cause_of(error))
    return "summed"


@pytest.mark.slow
def test_a_rank_lost_in_a_compiled_step_is_named():
    """Not the rank that waited for it."""
    assert "rank 1 is gone" in on_ranks(2, sum_with_the_gone)[0]


def gather_compiled(ranks: Ranks) -> list[tuple[list[float], bool]]:
    """What a compiled step gathers, without and with GPUs, and whether it used gloo's own gather."""
    label, gather, results = ranks.label, functional.all_gather_tensor, []
    for has_gpus in (False, True):
        ranks._has_gpus, used = has_gpus, []  # type: ignore[attr-defined]
        assert (ranks.label != label) == has_gpus  # such a step is not loaded for ranks that gather otherwise

        def gathering(*args: Any, used: list[bool] = used) -> torch.Tensor:
            used.append(True)
            return gather(*args)

        functional.all_gather_tensor = gathering
        torch.compiler.reset()
        step = torch.compile(
            lambda own: torch.stack(ranks.all_gather(own)), backend="aot_eager", fullgraph=True
        )
        results.append((step(torch.tensor([float(ranks.rank + 1), -5.0])).flatten().tolist(), bool(used)))
    return results


@pytest.mark.slow
def test_a_compiled_step_gathers_by_a_sum_where_gloo_has_tensors_of_gpus():
    """There gloo's own gather would crash; pytorch issue 152645."""
    found, both = on_ranks(2, gather_compiled), [1, -5, 2, -5]
    assert found[0] == found[1] == [(both, True), (both, False)]
