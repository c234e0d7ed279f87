"""Compiles our C++ sources for the processor at hand, once: the library is kept beside inductor's own."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.cpp_extension import include_paths

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-fPIC", "-shared")
OTHERS_WRITE = 0o022
COMPILERS = ("g++", "clang++")


def compiler() -> str | None:
    """The C++ compiler: the one that CXX names, else the first that is there."""
    asked = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([asked] if asked else COMPILERS))
    return next((name for name in found if name), None)


def load_library(source: Path) -> None:
    """Makes the operators of a C++ file known to torch; an OSError or CalledProcessError where it cannot."""
    torch_operators: Any = torch.ops
    torch_operators.load_library(library(source, *_of_torch()))


def library(source: Path, *flags: str) -> Path:
    """The C++ file as a library: compiled, with `flags` beside those of all, if it has not been."""
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler")
    place = Path(cache_dir()) / "llama_ssp" / f"{source.stem}-{_print_of(source, command, flags)}.so"
    if not place.exists():
        _compile(command, source, place, flags)
    if not is_ours(place):
        raise PermissionError(f"others may write {place}; TORCHINDUCTOR_CACHE_DIR names another folder")
    return place


def complaint(error: OSError | subprocess.CalledProcessError) -> str:
    """Why there is no library, in a line."""
    said = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return said[0][:200]


def is_ours(file: Path) -> bool:
    """Whether the file and its folder are this user's own, and nobody else's to write: what is in it runs."""
    found = [path.stat() for path in (file, file.parent)]
    return all(one.st_uid == os.getuid() and not one.st_mode & OTHERS_WRITE for one in found)


def _of_torch() -> tuple[str, ...]:
    """Where torch's headers and its libraries are."""
    folder = Path(torch.__file__).parent / "lib"
    return *(f"-I{path}" for path in include_paths()), f"-L{folder}", "-lc10", "-ltorch_cpu"


def _compile(command: str, source: Path, place: Path, flags: tuple[str, ...]) -> None:
    """Another process may be doing the same: each writes a file of its own, and the last one stands."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    log.info("engine: compiling %s for this processor", source.name)
    began = time.perf_counter()
    part = place.with_suffix(f".{platform.node()}-{os.getpid()}.part")
    subprocess.run(
        [command, *FLAGS, str(source), "-o", str(part), *flags], check=True, capture_output=True, text=True
    )
    part.chmod(0o700)  # whatever the umask: what others may write is not loaded
    part.replace(place)
    log.info("engine: compiled in %.0f s, kept in %s", time.perf_counter() - began, place.parent)


def _print_of(source: Path, command: str, flags: tuple[str, ...]) -> str:
    """A hash of everything the library depends on."""
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    known = [source.read_text(encoding="utf-8"), torch.__version__, version, *FLAGS, *flags, processor()]
    return hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]


def processor() -> str:
    """What of the processor decides which instructions it has."""
    table = Path("/proc/cpuinfo")
    if not table.exists():
        return platform.platform() + platform.processor()
    lines = table.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
