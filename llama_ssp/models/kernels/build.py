"""Compiles our C++ files for this processor, once; the libraries are kept in the user's cache folder.

Kernels for GPUs are Triton's, which compiles, too: `triton_runs` says whether it can.
"""

import fcntl
import functools
import logging
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from llama_ssp.models.kept_files import (
    compiler,
    is_ours,
    part_of,
    place_of,
    processor,
    use_safe_triton_folder,
)

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-fPIC", "-shared")


def load_library(source: Path) -> None:
    """Registers the operators of a C++ file in torch; raises OSError or CalledProcessError."""
    folder = Path(torch.__file__).parent
    flags = (f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu")
    torch_operators: Any = torch.ops
    torch_operators.load_library(library(source, *flags))


def library(source: Path, *flags: str) -> Path:
    """Returns the C++ file as a library, compiled with FLAGS and `flags` unless it has been.

    Raises PermissionError if other users may write it.
    """
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler")

    facts = Path(command).resolve().stat()  # by its file, not by what it says: a start needs no process
    place = place_of(
        source.stem,
        source.read_text(encoding="utf-8"),
        torch.__version__,
        f"{facts.st_size} {facts.st_mtime_ns}",
        *FLAGS,
        *flags,
        processor(),
        suffix=".so",
    )
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of a machine start together: one of them compiles
            if not place.exists():
                _compile([command, *FLAGS, str(source), *flags], place)

    if not is_ours(place):
        raise PermissionError(f"other users may write {place}; TORCHINDUCTOR_CACHE_DIR names another folder")
    return place


@functools.cache
def triton_runs() -> bool:
    """Returns whether Triton can start kernels on this machine's GPU. If not, the log says why, once.

    Triton compiles its driver, in C, when it is first used: so here, and not in the first step.
    """
    use_safe_triton_folder()
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # whatever Triton, the compiler or the loader of libraries raises
        needs = "install a C compiler and Python's headers (gcc, python3-dev)"
        log.warning("engine: kernels for GPUs are off, which is slow; %s: %s", needs, complaint(error))
        return False
    return True


def complaint(error: Exception) -> str:
    """Returns why something could not be compiled, in a line."""
    said = str(getattr(error, "stderr", None) or error).strip() or type(error).__name__
    lines = said.splitlines()  # of a compiler the first says where, not what
    return next((line for line in lines if "error:" in line), lines[0])[:200]


def _compile(command: list[str], place: Path) -> None:
    """Compiles into a file of this process, which takes the place when it is whole."""
    log.info("engine: compiling %s for this processor", place.stem.partition("-")[0])
    began = time.perf_counter()
    part = part_of(place)
    subprocess.run([*command, "-o", str(part)], check=True, capture_output=True, text=True)
    part.chmod(0o700)  # whatever the umask: a library that others may write is not loaded
    part.replace(place)
    log.info("engine: compiled in %.0f s, kept in %s", time.perf_counter() - began, place.parent)
