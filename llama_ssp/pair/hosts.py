"""Which ranks are on which node: what they tell each other of it, what the log says, and what is refused."""

import json
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from llama_ssp.config import Dtype, RunConf, Splitting
from llama_ssp.config.environment import rank_environment
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.placement import Placement, spans
from llama_ssp.distributed.process_group import MIG, NO_GPU, gpu_of
from llama_ssp.errors import DistributedError
from llama_ssp.models.sharding import is_planned
from llama_ssp.planner.speed import pass_cost
from llama_ssp.planner.workload import TARGET, Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank is: its node, by the launcher's number and by the host's name, and its GPU."""

    node: int
    host: str
    gpu: str


def say_nodes(ranks: Ranks, device: torch.device, run: RunConf, placement: Placement) -> None:
    """Says which ranks are on which of several nodes, and warns where a model is split over them.

    All ranks call it. Raises DistributedError, on all of them, where ranks of a node share a GPU.
    """
    if ranks.world == 1:
        return
    places = places_of(ranks, device)
    if len({place.node for place in places}) == 1:
        return
    require_own_gpus(places)
    if ranks.is_leader:
        log.info("%s", in_words(places, range(ranks.world)))
        for line in crossing_lines(places, run, placement):
            log.warning("%s", line)


def places_of(ranks: Ranks, device: torch.device) -> list[RankPlace]:
    """Returns where every rank is; all ranks call it."""
    own = {"node": rank_environment().node, "host": socket.gethostname(), "gpu": gpu_of(device)}
    told = [json.loads(text) for text in ranks.gather_texts(json.dumps(own))]
    return [RankPlace(node=one["node"], host=one["host"], gpu=one["gpu"]) for one in told]


def in_words(places: Sequence[RankPlace], ranks: Sequence[int]) -> str:
    """Returns which of these ranks are on which node: "ranks 0-7 on node 0 (alpha), 8,9 on node 1 (beta)"."""
    parts = list[str]()
    for node in sorted({places[rank].node for rank in ranks}):
        here = [rank for rank in ranks if places[rank].node == node]
        parts.append(f"{spans(here)} on node {node} ({places[here[0]].host})")
    return f"ranks {', '.join(parts)}"


def require_own_gpus(places: Sequence[RankPlace]) -> None:
    """Refuses ranks of one node that share a GPU: over several nodes that is a mistake in the start."""
    first: dict[tuple[int, str], int] = {}
    for rank, place in enumerate(places):
        if place.gpu in (NO_GPU, MIG):
            continue
        other = first.setdefault((place.node, place.gpu), rank)
        if other != rank:
            gpus = len({one.gpu for one in places if one.node == place.node})
            raise DistributedError(
                "ranks of one node share a GPU",
                where=f"node {place.node} ({place.host})",
                found=f"ranks {other} and {rank} on {place.gpu}",
                allowed="a GPU for each rank",
                fix=f"start as many ranks on a node as it has GPUs: --nproc-per-node={gpus}",
            )


def crossing_lines(places: Sequence[RankPlace], run: RunConf, placement: Placement) -> Iterator[str]:
    """Yields a line for each model that is split over several nodes: its passes cross the network."""
    models = [(TARGET, "target", run.model, placement.target)]
    if run.draft is not None and placement.draft_degree > 1:
        models.append(("draft", "draft", run.draft, placement.draft))
    for role, name, model, members in models:
        nodes = {places[rank].node for rank in members}
        if len(nodes) == 1:
            continue
        times = ""
        if placement.splitting is Splitting.tensor and is_planned(model):
            times = f" {pass_cost(Role(role, model, Dtype.bf16), len(members)).sums} times"
        where = in_words(places, members)
        yield f"the {name} is split over {len(nodes)} nodes, {where}: each pass crosses the network{times}"
