"""Reads what a host has for a run: processor, memory, limits, compilers, folders. No torch."""

import os
import resource
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_ssp.distributed.bounded import said_within
from llama_ssp.distributed.cores import cores_here
from llama_ssp.distributed.launcher import IN_MEMORY
from llama_ssp.models.host_memory import memory_here
from llama_ssp.models.kept_files import TRITON, cache_folder, compiler, processor, use_safe_triton_folder
from llama_ssp.report.machine import processor_name

COMPILE_S = 8.0  # for a program of three lines
FABRIC = Path("/sys/class/infiniband")
AMD = Path("/dev/kfd")
TRIED_BYTES = 2**20  # that are written into a folder, as a quota may be full that no figure shows
IN_TEMPORARY = "llama-ssp-"  # how a folder of ours among temporary files begins, as in models/kept_files.py
C_COMPILERS = ("gcc", "clang", "cc")  # in Triton's order
CXX_PROGRAM = """
#include <omp.h>
#include <vector>
int tried() { return std::vector<int>(omp_get_max_threads()).size(); }
"""
C_PROGRAM = """
#include <Python.h>
int tried(void) { return 1; }
"""


@dataclass(frozen=True)
class Space:
    """A file system: its bytes, and those that are free."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A compiler: its path, None where there is none, and why it fails on a small program, else empty."""

    path: str | None
    fails: str = ""


@dataclass(frozen=True, kw_only=True)
class CacheFolder:
    """A folder for compiled code: why it cannot be used, else empty; and what is free there."""

    path: str
    fails: str = ""
    free: int | None = None
    runs_code: bool = True  # False on a file system that is mounted with noexec
    is_temporary: bool = False  # among temporary files, since the user's own cannot be used


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host as this process sees it.

    `memlock` is None where there is no limit, `shared` where there is no /dev/shm.
    """

    processor: str
    features: frozenset[str]
    cores: int
    memory: int
    memlock: int | None
    shared: Space | None
    has_fabric: bool
    has_amd: bool
    interfaces: tuple[str, ...]
    variables: dict[str, str]


def host_here() -> Host:
    """Reads this host."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        processor=processor_name(),
        features=frozenset(processor().partition(":")[2].split()),
        cores=cores_here(),
        memory=memory_here(),
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        shared=_space(IN_MEMORY),
        has_fabric=FABRIC.is_dir() and any(FABRIC.iterdir()),
        has_amd=AMD.exists(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        variables=dict(os.environ),
    )


def cxx_compiler(flags: Sequence[str]) -> Compiler:
    """Tries the C++ compiler on a small program, with the flags of our kernels."""
    return _tried(compiler(), CXX_PROGRAM, "c++", flags)


def c_compiler() -> Compiler:
    """Tries the C compiler that Triton takes, with Python's headers."""
    named = os.environ.get("CC")
    paths = map(shutil.which, [named] if named else C_COMPILERS)
    headers = sysconfig.get_paths()["include"]
    return _tried(next(filter(None, paths), None), C_PROGRAM, "c", ["-fPIC", "-shared", f"-I{headers}"])


def _tried(path: str | None, program: str, language: str, flags: Sequence[str]) -> Compiler:
    """Builds the program as a library, which also needs a linker."""
    if path is None:
        return Compiler(path=None)
    with tempfile.TemporaryDirectory(prefix=IN_TEMPORARY) as folder:
        command = [path, *flags, "-x", language, "-", "-o", str(Path(folder, "tried.so"))]
        said = said_within(COMPILE_S, command, program)
    if said.is_late:
        fails = f"no end after {COMPILE_S:g} s"
    elif said.code:
        lines = said.err.strip().splitlines() or [f"exit code {said.code}"]
        fails = next((line for line in lines if "error" in line), lines[0])
    else:
        fails = said.fails
    return Compiler(path=path, fails=fails)


def cache_folders(with_triton: bool) -> list[CacheFolder]:
    """Tries the folder of compiled code, and that of Triton's kernels where there are GPUs."""
    folders = [cache_folder()]
    if with_triton:
        use_safe_triton_folder()
        folders.append(Path(os.environ[TRITON]))
    return [_tried_folder(folder) for folder in folders]


def _tried_folder(folder: Path) -> CacheFolder:
    """Writes a file into the folder, as a disk may be full or a quota used up."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIED_BYTES))
        facts = os.statvfs(folder)
    except OSError as error:
        return CacheFolder(path=str(folder), fails=error.strerror or str(error))
    return CacheFolder(
        path=str(folder),
        free=facts.f_bavail * facts.f_frsize,
        runs_code=not facts.f_flag & getattr(os, "ST_NOEXEC", 0),
        is_temporary=any(part.startswith(IN_TEMPORARY) for part in folder.parts),
    )


def _space(folder: str) -> Space | None:
    """Returns the file system that the folder is on; None if there is no such folder."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return Space(total=facts.f_blocks * facts.f_frsize, free=facts.f_bavail * facts.f_frsize)
