"""How many ranks a command starts, on which GPUs, and the command line that says so. No torch."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from llama_ssp.config import CalibrateConf, GenerateConf, RunConf, Splitting
from llama_ssp.config.arguments import divided, each_key_once
from llama_ssp.config.run import key_types
from llama_ssp.distributed.placement import spans
from llama_ssp.errors import DistributedError, ModelError, UsageError
from llama_ssp.planner.fit import FitVerdict
from llama_ssp.planner.gpus import Gpu, gpus_here
from llama_ssp.planner.hardware import machine_of
from llama_ssp.planner.plan import worlds_of
from llama_ssp.planner.resolve import PairFiles, PairSpec, options, pair_files, placed, plannable
from llama_ssp.planner.search import NOTABLE, Option
from llama_ssp.planner.workload import MIB

HELD = 512 * MIB  # a driver takes less of an idle GPU, a program takes more


@dataclass(frozen=True)
class Start:
    """The ranks to start, the environment that gives them their GPUs, and what the user should know."""

    ranks: int
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def prepared(
    run: RunConf, folders: list[Path], world: int, dry: bool = False
) -> tuple[tuple[PairSpec, ...], Start]:
    """The pairs with their places, and the ranks to start; `world` is torchrun's number of ranks, or 1.

    `dry`: on the cluster that the configuration names, in place of this machine.
    """
    task = run.task
    if isinstance(task, GenerateConf) and task.prompt_file is None:  # K is for the rows that there will be
        run = replace(run, task=replace(task, batch_size=min(task.batch_size, len(task.prompts or [""]))))
    files = pair_files(run, folders, dry)
    start = Start(world) if world > 1 else start_of(run, files, dry)
    # Several pairs share the ranks; a calibration measures every one.
    all_work = len(files) > 1 or isinstance(task, CalibrateConf)
    worlds = [start.ranks] if all_work else worlds_of(start.ranks)
    pairs = tuple(placed(one, worlds, 0 if run.task.may_not_draft else 1) for one in files)
    used = max(pair.placement.world for pair in pairs)
    if used < start.ranks:
        idle = f"no work for ranks {spans(range(used, start.ranks))}: ranks={used} is as fast"
        start = replace(start, ranks=used, notes=(*start.notes, idle))
    return pairs if dry else tuple(replace(pair, run=replace(pair.run, task=task)) for pair in pairs), start


def start_of(run: RunConf, pairs: Sequence[PairFiles], dry: bool) -> Start:
    """What one process starts: as configured; else one rank where all fits one GPU, else what is fastest.

    A GPU on which another program holds memory is left out, if the others suffice.
    """
    conf, is_elsewhere = run.placement, dry and run.cluster.gpu is not None
    if is_elsewhere:
        machine = machine_of(run.cluster)
        if machine.nodes > 1:
            return Start(machine.world)
        gpus = [] if machine.is_cpu else [Gpu(machine.gpu)] * machine.gpus
    else:
        gpus = gpus_here()
    devices = {conf.target_device, conf.draft_device}
    if not gpus or conf.splitting is not Splitting.tensor or devices != {"auto"}:
        return Start(run.ranks or 1)
    if run.ranks is not None and run.ranks > len(gpus):
        fix = f"lower it; torchrun --nproc-per-node {run.ranks} -m llama_ssp lets ranks share a GPU"
        raise DistributedError("there is a GPU for each rank", "ranks", run.ranks, f"1..{len(gpus)}", fix)
    held = [number for number, gpu in enumerate(gpus) if gpu.used > HELD]
    idle = [gpu for gpu in gpus if gpu.used <= HELD] or gpus
    ranks, notes = (run.ranks, []) if run.ranks else _needed(pairs, idle, is_elsewhere)
    if held:
        notes += [f"GPU {spans(held)}: held by other programs, and left out if the others suffice"]
    chosen = [*idle, *(gpu for gpu in gpus if gpu not in idle)][:ranks]
    names = [gpu.uuid for gpu in chosen]
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(names)} if all(names) else {}
    return Start(ranks, shown, tuple(notes))


def _needed(pairs: Sequence[PairFiles], idle: Sequence[Gpu], is_elsewhere: bool) -> tuple[int, list[str]]:
    """The ranks that the pairs need of these GPUs, and what more ranks would bring."""
    free = [gpu.free for gpu in idle if gpu.free]
    most, notes = 1, list[str]()
    for files in pairs:
        found = _planned(files, len(idle), None if is_elsewhere or not free else min(free))
        alone = next((one for one in found if one.placement.world == 1), None)
        if alone is None or alone.verdict is not FitVerdict.fits:
            most = max([most, *(one.placement.world for one in found[:1])])
        elif (gain := alone.ms_per_token / found[0].ms_per_token) > 1 + NOTABLE and len(pairs) == 1:
            world = found[0].placement.world
            notes = [f"{len(idle) - 1} more GPUs are idle: ranks={world} is planned {gain:.1f} times as fast"]
    return most, notes


def _planned(files: PairFiles, gpus: int, free: int | None) -> list[Option]:
    """What the configuration allows on these GPUs, the fastest that fits first; empty where none is known."""
    found = list[Option]()
    for world in worlds_of(gpus):
        with suppress(UsageError, DistributedError, ModelError):  # no figures, or heads that do not divide
            request = plannable(files, gpus, free)
            found += options(request, files.run.placement, [world]) if request else []
    return sorted(found, key=lambda one: one.order)


def command_line(words: Sequence[str], ranks: int, gpus: int) -> str:
    """The command to paste for what these words plan; over several nodes of `gpus` GPUs the one for each.

    The words of a plan that its task alone knows are left out.
    """
    given, _ = divided(words)
    kept = dict[str, str]()
    for key, word in each_key_once(given).items():
        kept |= {} if key == "ranks" or key.partition(".")[0] == "cluster" else {key: word}
    bare = [word for key, word in kept.items() if key.startswith(" ")]
    keyed = {key: word for key, word in kept.items() if not key.startswith(" ")}
    task = bare[0] if bare else keyed.pop("task", "task=generate").partition("=")[2]
    if task == "plan":
        task, known = "generate", key_types(GenerateConf, "task.")
        keyed = {key: word for key, word in keyed.items() if key in known or not key.startswith("task.")}
    command = [task, *bare[1:], *keyed.values()]
    if ranks <= gpus:
        return shlex.join(["llama-ssp", *command, f"ranks={ranks}"])
    nodes = f"--nnodes={-(-ranks // gpus)} --nproc-per-node={gpus}"
    meeting = "--rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=FIRST_NODE:29500"
    return f"torchrun {nodes} {meeting} -m llama_ssp {shlex.join(command)}"


def to_paste(command: str) -> str:
    """The last line of a plan."""
    return f"{'on each node' if command.startswith('torchrun') else 'run it'}: {command}"
