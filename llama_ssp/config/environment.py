"""The rank of this process, from the environment that its launcher set. No torch."""

import os
import re
from dataclasses import dataclass

from llama_ssp.errors import DistributedError, UsageError

START = "write ranks=N, or start with torchrun --nproc-per-node N -m llama_ssp"
MAX_WORLD = 2**20  # as in a plan: 1024 nodes of 1024 GPUs
COPIERS = (  # a launcher, the variables with its number of copies and this copy's, and how it starts one
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun --ntasks=1 --gpus={}"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "without mpirun:"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK", "without mpiexec:"),
)
NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class RankEnvironment:
    """This rank and the number of ranks. Without a launcher: rank 0 of 1."""

    rank: int
    world: int

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


def rank_environment() -> RankEnvironment:
    """Reads the environment. Raises DistributedError, which this rank reports, if it is inconsistent."""
    world = number_of("WORLD_SIZE", 1, MAX_WORLD, default=1)
    rank = number_of("RANK", 0, world - 1, default=0)
    number_of("LOCAL_RANK", 0, world - 1, default=0)  # for the device; refused before anything is read
    return RankEnvironment(rank, world)


def refuse_copies() -> None:
    """Raises UsageError, which the first task reports, where a launcher started this command several times.

    torchrun's ranks are no copies. SLURM_NTASKS says nothing of copies: it is also set in a batch script,
    which runs once.
    """
    if "WORLD_SIZE" in os.environ:
        return
    for launcher, count, number, alone in COPIERS:
        tasks = os.environ.get(count, "1")
        if tasks == "1":
            continue
        error = UsageError(
            f"{launcher} started this command several times, and each would load the whole pair",
            where=count,
            found=tasks,
            allowed="1",
            fix=f"{alone.format(tasks)} llama-ssp ... ranks={tasks}; several nodes: {launcher} torchrun",
        )
        error.speaks = os.environ.get(number, "0") == "0"
        raise error


def number_of(name: str, least: int, most: int, default: int | None = None) -> int:
    """Returns the number in this variable; the default where it is not set or empty."""
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    if not NUMBER.fullmatch(text) or not least <= int(text) <= most:
        allowed = f"{least}..{most}" if least < most else str(least)
        error = DistributedError(f"{name} is not a usable number", "environment", repr(text), allowed, START)
        error.speaks = True  # each rank has an environment of its own
        raise error
    return int(text)
