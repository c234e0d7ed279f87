"""How many ranks a command starts, on which GPUs, and the command line that says so. No torch."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from llama_ssp.config import CalibrateConf, GenerateConf, RunConf, Splitting
from llama_ssp.config.arguments import divided, each_key_once
from llama_ssp.config.environment import rank_environment
from llama_ssp.config.run import key_types
from llama_ssp.distributed.gpus import Gpu, gpus_here
from llama_ssp.distributed.placement import spans
from llama_ssp.errors import DistributedError, ModelError, UsageError
from llama_ssp.models.sharding import is_planned
from llama_ssp.placing.pairs import PairSpec, pair_files, placed
from llama_ssp.placing.request import PairFiles, options, plannable, request_for
from llama_ssp.placing.this_machine import machine_for
from llama_ssp.planner.fit import FitVerdict
from llama_ssp.planner.plan import make_plan, worlds_of
from llama_ssp.planner.search import NOTABLE, Option
from llama_ssp.planner.workload import MIB

HELD = 512 * MIB  # a driver takes less of an idle GPU, a program takes more
ONE_MACHINE = "cluster.nodes starts nothing on other machines: --dry-run prints the command for each node"
OF_NETWORK = "cluster.between_us", "cluster.between_gb_s"  # of a cluster what also a run is planned with
MEETING = "--master-addr=FIRST_NODE --master-port=29500"
FIRST_LEADS = "run it on each node; FIRST_NODE is the address of node 0, which leads, prints and writes"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The ranks to start, the environment that gives them their GPUs, and what the user should know.

    `of_node`: how many of them are on each of several nodes; None on one.
    """

    ranks: int
    of_node: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def prepared(
    run: RunConf, folders: list[Path], world: int, dry: bool = False
) -> tuple[tuple[PairSpec, ...], Start]:
    """Returns the pairs, decided, and the ranks to start; `world` is torchrun's number of ranks, or 1.

    `dry`: on the cluster that the configuration names, in place of this machine.
    """
    task = run.task
    if isinstance(task, GenerateConf) and task.prompt_file is None:
        # K is for the rows that there will be.
        rows = min(task.batch_size, len(task.prompts or [""]))
        run = replace(run, task=replace(task, batch_size=rows))
    if run.download and not dry:
        _require_room(run, pair_files(run, folders, dry=True), world)
    files = pair_files(run, folders, dry)
    if world > 1:
        here = rank_environment()
        start = Start(ranks=world, of_node=here.of_node if here.nodes > 1 else None)
    else:
        start = start_of(run, files, dry)
        if run.cluster.nodes > 1 and not dry:
            start = replace(start, notes=(*start.notes, ONE_MACHINE))

    # Several pairs share the ranks; a calibration measures every one.
    all_work = len(files) > 1 or isinstance(task, CalibrateConf)
    worlds = [start.ranks] if all_work else worlds_of(start.ranks, start.of_node)
    least_k = 0 if task.may_not_draft else 1
    pairs = tuple(placed(one, worlds, least_k) for one in files)
    used = max(pair.placement.world for pair in pairs)
    if used < start.ranks:
        idle = f"no work for ranks {spans(range(used, start.ranks))}: ranks={used} is as fast"
        if start.of_node is not None and used <= start.of_node:
            idle = f"no work for ranks {spans(range(used, start.ranks))}: over the network it is no faster"
        start = replace(start, ranks=used, notes=(*start.notes, idle))
    if not dry:
        pairs = tuple(replace(pair, run=replace(pair.run, task=task)) for pair in pairs)
    return pairs, start


def _require_room(run: RunConf, pairs: Sequence[PairFiles], world: int) -> None:
    """Refuses what this machine cannot run, before hours are spent on fetching it."""
    start = Start(ranks=world) if world > 1 else start_of(run, pairs, dry=False)
    for files in pairs:
        if not all(is_planned(model) for model in (files.run.model, files.run.draft) if model is not None):
            continue
        spec = placed(files, worlds_of(start.ranks))
        plan = make_plan(request_for(files), spec.placement)
        if not plan.runs:
            raise DistributedError(
                "the models do not fit here, so they are not fetched",
                where=files.run.model.name,
                found=plan.sentence(),
                fix="the same command with --dry-run shows the plan; cluster=NAME plans for another machine",
            )


def start_of(run: RunConf, pairs: Sequence[PairFiles], dry: bool) -> Start:
    """Returns what one process starts: as configured; else one rank where all fits one GPU, else the fastest.

    A GPU on which another program holds memory is left out, if the others suffice.
    """
    conf = run.placement
    is_elsewhere = dry and run.cluster.gpu is not None
    if is_elsewhere:
        machine = machine_for(run.cluster)
        if machine.nodes > 1:
            return Start(ranks=machine.world, of_node=machine.gpus)
        gpus = [] if machine.is_cpu else [Gpu(name=machine.gpu)] * machine.gpus
    else:
        gpus = gpus_here()

    devices = {conf.target_device, conf.draft_device}
    if not gpus or conf.splitting is not Splitting.tensor or devices != {"auto"}:
        return Start(ranks=run.ranks or 1)
    if run.ranks is not None and run.ranks > len(gpus):
        raise DistributedError(
            "there is a GPU for each rank",
            where="ranks",
            found=run.ranks,
            allowed=f"1..{len(gpus)}",
            fix=f"lower it; torchrun --nproc-per-node {run.ranks} -m llama_ssp lets ranks share a GPU",
        )

    held = [number for number, gpu in enumerate(gpus) if gpu.used > HELD]
    idle = [gpu for gpu in gpus if gpu.used <= HELD] or gpus
    ranks, notes = (run.ranks, []) if run.ranks else _needed(pairs, idle, is_elsewhere)
    if held:
        notes += [f"GPU {spans(held)}: held by other programs, and left out if the others suffice"]
    chosen = [*idle, *(gpu for gpu in gpus if gpu not in idle)][:ranks]
    names = [gpu.uuid for gpu in chosen]
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(names)} if all(names) else {}
    return Start(ranks=ranks, environment=shown, notes=tuple(notes))


def _needed(pairs: Sequence[PairFiles], idle: Sequence[Gpu], is_elsewhere: bool) -> tuple[int, list[str]]:
    """Returns the ranks that the pairs need of these GPUs, and notes of what more ranks would bring."""
    free = [gpu.free for gpu in idle if gpu.free]
    most = 1
    notes = list[str]()
    for files in pairs:
        planned = _planned(files, len(idle), None if is_elsewhere or not free else min(free))
        alone = next((one for one in planned if one.placement.world == 1), None)
        if alone is None or alone.verdict is not FitVerdict.fits:
            most = max([most, *(one.placement.world for one in planned[:1])])
            continue
        gain = alone.ms_per_token / planned[0].ms_per_token
        if gain > 1 + NOTABLE and len(pairs) == 1:
            world = planned[0].placement.world
            notes = [f"{len(idle) - 1} more GPUs are idle: ranks={world} is planned {gain:.1f} times as fast"]
    return most, notes


def _planned(files: PairFiles, gpus: int, free: int | None) -> list[Option]:
    """Returns what the configuration allows on these GPUs, the fastest that fits first; empty if unknown."""
    planned = list[Option]()
    for world in worlds_of(gpus):
        with suppress(UsageError, DistributedError, ModelError):  # no figures, or heads that do not divide
            request = plannable(files, gpus, free)
            planned += options(request, files.run.placement, [world]) if request else []
    return sorted(planned, key=lambda one: one.order)


def command_lines(words: Sequence[str], ranks: int, gpus: int, is_shared: bool = False) -> list[str]:
    """Returns the command to paste for what these words plan; over nodes of `gpus` GPUs one for each node.

    The words of a plan that its task alone knows are left out. Of a job that is shared among groups of ranks
    the command stays as it is: it starts the groups, and each starts its ranks.
    """
    given, _ = divided(words)
    if is_shared:
        return [shlex.join(["llama-ssp", *each_key_once(given).values()])]
    kept = dict[str, str]()
    for key, word in each_key_once(given).items():
        is_elsewhere = key.partition(".")[0] == "cluster" and key not in OF_NETWORK
        kept |= {} if key == "ranks" or is_elsewhere else {key: word}
    bare = [word for key, word in kept.items() if key.startswith(" ")]
    keyed = {key: word for key, word in kept.items() if not key.startswith(" ")}
    task = bare[0] if bare else keyed.pop("task", "task=generate").partition("=")[2]
    if task == "plan":
        task = "generate"
        known = key_types(GenerateConf, "task.")
        keyed = {key: word for key, word in keyed.items() if key in known or not key.startswith("task.")}
    command = [task, *bare[1:], *keyed.values()]
    if ranks <= gpus:
        return [shlex.join(["llama-ssp", *command, f"ranks={ranks}"])]
    nodes = -(-ranks // gpus)
    # By their numbers, not by a rendezvous of equals: torch would number the nodes by their names' order.
    return [
        f"torchrun --nnodes={nodes} --node-rank={node} --nproc-per-node={gpus} {MEETING} "
        f"-m llama_ssp {shlex.join(command)}"
        for node in range(nodes)
    ]


def to_paste(commands: Sequence[str]) -> str:
    """Returns the last lines of a plan: the command, or one for each node, of which the first leads."""
    if len(commands) == 1:
        return f"run it: {commands[0]}"
    lines = [f"on node {node}: {command}" for node, command in enumerate(commands)]
    return "\n".join([FIRST_LEADS, *lines])
