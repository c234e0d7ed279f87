"""Ranks know their nodes, by a launcher's variables: what the log says of them, and what is refused."""

import json
import logging
import os
from typing import Any

import pytest
import torch

from llama_ssp.config.compose import composed
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DistributedError
from llama_ssp.pair import hosts
from llama_ssp.pair.hosts import RankPlace, crossing_lines, in_words, places_of, require_own_gpus, say_nodes
from tests.plans import named
from tests.warm import Started

CPU = torch.device("cpu")
PAIR = composed(["task=generate", "model=llama3.1-70b", "draft=llama3.1-8b"])


def two_nodes(first: int, second: int, gpus: int | None = None) -> list[RankPlace]:
    """The places of ranks on two nodes, each with so many GPUs; None: one a rank."""
    places = []
    for node, (host, ranks) in enumerate((("zeta", first), ("alpha", second))):
        for rank in range(ranks):
            places.append(RankPlace(node=node, host=host, gpu=f"{host}-{rank % (gpus or ranks)}"))
    return places


def test_ranks_are_said_by_node() -> None:
    said = in_words(two_nodes(8, 2), range(10))
    assert said == "ranks 0-7 on node 0 (zeta), 8,9 on node 1 (alpha)"


@pytest.mark.parametrize(
    ("sizes", "words", "lines"),
    [
        ((4, 4), "target 0-7, draft 0-7 (split)", [
            "the target is split over 2 nodes, ranks 0-3 on node 0 (zeta), 4-7 on node 1 (alpha): each pass "
            "crosses the network 162 times",
            "the draft is split over 2 nodes, ranks 0-3 on node 0 (zeta), 4-7 on node 1 (alpha): each pass "
            "crosses the network 66 times",
        ]),
        ((4, 4), "target 0-3, draft 4-7 (own)", []),
        ((4, 4), "target 0-7, draft 0 (whole)", [
            "the target is split over 2 nodes, ranks 0-3 on node 0 (zeta), 4-7 on node 1 (alpha): each pass "
            "crosses the network 162 times",
        ]),
        ((2, 8), "target 0-7, draft 8,9 (own)", [
            "the target is split over 2 nodes, ranks 0,1 on node 0 (zeta), 2-7 on node 1 (alpha): each pass "
            "crosses the network 162 times",
        ]),
    ],
    ids=["both", "none", "target", "a small first node"],
)  # fmt: skip
def test_a_model_over_several_nodes_is_warned_of(
    sizes: tuple[int, int], words: str, lines: list[str]
) -> None:
    places = two_nodes(*sizes)
    assert [*crossing_lines(places, PAIR, named(words, len(places)))] == lines


def test_ranks_that_share_a_gpu_by_mistake_are_refused() -> None:
    require_own_gpus(two_nodes(8, 8))
    with pytest.raises(DistributedError) as refused:
        require_own_gpus(two_nodes(8, 9, gpus=8))
    said = str(refused.value)
    assert "ranks of one node share a GPU; node 1 (alpha); found ranks 8 and 16 on alpha-0" in said
    assert said.endswith("--nproc-per-node=8") and "\n" not in said


class Told(Ranks):
    """Ranks of which each has told its place."""

    def __init__(self, places: list[RankPlace], rank: int = 0) -> None:
        self._told = [json.dumps(vars(place)) for place in places]
        self.world = len(places)
        self.rank = rank

    def gather_texts(self, text: str) -> list[str]:
        return self._told


def test_ranks_of_one_node_are_not_talked_about(caplog: pytest.LogCaptureFixture) -> None:
    """They may share a GPU, as in a test on a machine that has one."""
    caplog.set_level(logging.INFO)
    place = named("target 0-7, draft 0-7 (split)", 8)
    say_nodes(Told(two_nodes(8, 0, gpus=1)), CPU, PAIR, place)
    assert not caplog.messages
    say_nodes(Told(two_nodes(4, 4)), CPU, PAIR, place)
    assert caplog.messages[0] == "ranks 0-3 on node 0 (zeta), 4-7 on node 1 (alpha)"
    assert len(caplog.messages) == 3
    caplog.clear()
    say_nodes(Told(two_nodes(4, 4), rank=1), CPU, PAIR, place)
    assert not caplog.messages, "the leader says it"
    with pytest.raises(DistributedError, match="share a GPU"):
        say_nodes(Told(two_nodes(4, 4, gpus=2)), CPU, PAIR, place)


def test_a_rank_says_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "beta")
    assert places_of(Ranks(), CPU) == [RankPlace(node=3, host="beta", gpu=hosts.NO_GPU)]


def on_a_node_of_its_own(rank: int) -> None:
    """As torchrun starts one rank on each of several nodes."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}


def with_one_gpu_for_two(rank: int) -> None:
    on_a_node_of_its_own(rank // 2)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    hosts.gpu_of = lambda _: f"GPU-{rank // 2}"  # type: ignore[assignment]


def run_of(tmp_path: Any, world: int, fault: Any, *words: str) -> list[Any]:
    task = ("task=generate", "task.prompts=[abc]", "task.max_new_tokens=4", "out=null", "output=json")
    pair = ("model=tiny", "draft=tiny_draft", "placement=sharded", "seed=1", "model.dtype=fp32")
    return Started(tmp_path, world, *task, *pair, *words, fault=fault).finish()


@pytest.mark.few(1)
def test_two_nodes_of_one_rank_each(tmp_path: Any) -> None:
    """They say where they are, each has its node's memory, and the text is that of one node."""
    there = run_of(tmp_path / "two", 2, on_a_node_of_its_own)
    assert [answer.code for answer in there] == [0, 0], there[0].err
    assert "ranks 0 on node 0 (" in there[0].err and ", 1 on node 1 (" in there[0].err
    assert "the target is split over 2 nodes, " in there[0].err
    assert "on node 1" not in there[1].err
    here = run_of(tmp_path / "one", 2, None)
    assert here[0].code == 0 and " on node " not in here[0].err
    texts = [answer[0].document["outputs"][0]["token_ids"] for answer in (there, here)]
    assert texts[0] == texts[1]


@pytest.mark.few(1)
def test_a_nodes_memory_is_not_shared_with_the_other_nodes_ranks(tmp_path: Any) -> None:
    """Of two nodes with one rank each, each may take all of its node; of one node each takes half."""
    plan = run_of(tmp_path / "one", 2, None)[0].document["plan"]["memory"]
    needed = max(rank["device_bytes"]["predicted"] for rank in plan)
    words = (f"cluster.gib={needed / 2**30 + 0.32:.4f}", "cluster.reserve=0")
    there = run_of(tmp_path / "two", 2, on_a_node_of_its_own, *words)
    here = run_of(tmp_path / "half", 2, None, *words)
    assert "it may not fit" not in there[0].err and there[0].code == 0, there[0].err
    assert here[0].code == 5 or "it may not fit" in here[0].err


@pytest.mark.few(1)
def test_a_shared_gpu_over_nodes_ends_in_one_line(tmp_path: Any) -> None:
    answers = run_of(tmp_path, 4, with_one_gpu_for_two)
    assert {answer.code for answer in answers} == {5}
    lines = [line for answer in answers for line in answer.errors]
    assert len(lines) == 1 and "ranks 0 and 1 on GPU-0" in lines[0] and "--nproc-per-node=1" in lines[0]
