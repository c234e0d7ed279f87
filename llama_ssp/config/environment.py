"""The rank of this process, from the environment that its launcher set. No torch."""

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llama_ssp.errors import DistributedError, RunError, UsageError, first_line

START = "write ranks=N, or start with torchrun --nproc-per-node N -m llama_ssp"
MAX_WORLD = 2**20  # as in a plan: 1024 nodes of 1024 GPUs
COPIERS = (  # a launcher, the variables with its number of copies and this copy's, and how it starts one
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun --ntasks=1 --gpus={}"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "without mpirun:"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK", "without mpiexec:"),
)
# Beginnings of the names of variables that libraries read when they are imported. Left out is what a user has
# not set: variables of torchrun (TORCHELASTIC...), and those of SET_FOR_USERS.
READ_BY_LIBRARIES = re.compile(
    "(PY)?TORCH(?!ELASTIC)|TRITON|TQDM|HF_|HUGGINGFACE|TRANSFORMERS|ACCELERATE|BNB|BITSANDBYTES|DS_"
)
SET_FOR_USERS = (  # by this program; the last one by torchrun
    "TORCH_CPP_LOG_LEVEL",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CACHE_DIR",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_HUB_OFFLINE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class RankEnvironment:
    """This rank, the number of ranks, and how many of them are on this node. Without a launcher: rank 0 of 1.

    `node` is this node's number, as the launcher counts them.
    """

    rank: int
    world: int
    of_node: int = 1
    node: int = 0

    @property
    def nodes(self) -> int:
        """Returns how many nodes there are, if each has as many ranks as this one."""
        return -(-self.world // self.of_node)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


def rank_environment() -> RankEnvironment:
    """Reads the environment. Raises DistributedError, which this rank reports, if it is inconsistent."""
    world = number_of("WORLD_SIZE", 1, MAX_WORLD, default=1)
    rank = number_of("RANK", 0, world - 1, default=0)
    number_of("LOCAL_RANK", 0, world - 1, default=0)  # for the device; refused before anything is read
    of_node = number_of("LOCAL_WORLD_SIZE", 1, MAX_WORLD, default=world)
    node = number_of("GROUP_RANK", 0, MAX_WORLD, default=rank // of_node)  # of torchrun
    return RankEnvironment(rank, world, of_node, node)


def refuse_copies() -> None:
    """Raises UsageError, which the first task reports, where a launcher started this command several times.

    torchrun's ranks are no copies. SLURM_NTASKS says nothing of copies: it is also set in a batch script,
    which runs once.
    """
    if os.environ.get("WORLD_SIZE"):
        return
    for launcher, count, number, alone in COPIERS:
        tasks = os.environ.get(count, "")
        if tasks in ("", "1"):
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


@contextmanager
def importing() -> Iterator[None]:
    """Raises UsageError where the import of a library fails because of a variable that the library reads.

    The error names the variable; where the library's text does not say which it is, all that may be.
    """
    try:
        yield
    except (RunError, OSError, ImportError, MemoryError, RecursionError):  # have their own lines
        raise
    except Exception as error:
        matching = (name for name in os.environ if READ_BY_LIBRARIES.match(name))
        given = sorted(name for name in matching if name not in SET_FOR_USERS)
        given = [name for name in given if name in str(error)] or given
        if not given or _raised_here(error):
            raise
        raise UsageError(
            "a library cannot be imported with these settings in the environment",
            where=", ".join(given),  # not their values: HF_TOKEN is a secret
            found=first_line(error),
            fix="correct or unset the variable",
        ) from error


def _raised_here(error: Exception) -> bool:
    """Returns whether this package raised the error itself: then it is a fault of its own."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == __name__.partition(".")[0]


def number_of(name: str, least: int, most: int, default: int | None = None) -> int:
    """Returns the number in this variable; the default where it is not set or empty."""
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    if not NUMBER.fullmatch(text) or not least <= int(text) <= most:
        allowed = f"{least}..{most}" if least < most else str(least)
        error = DistributedError(
            f"{name} is not a usable number",
            where="environment",
            found=repr(text),
            allowed=allowed,
            fix=START,
        )
        error.speaks = True  # each rank has an environment of its own
        raise error
    return int(text)
