"""Files for later starts, of compiled code and of what transformers makes of a model's files. No torch."""

import atexit
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llama_ssp.errors import StorageError
from llama_ssp.models.ownership import Fault, fault_inside, fault_on_the_way

log = logging.getLogger(__name__)

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
TRITON = "TRITON_CACHE_DIR"
TRITON_HOME = "TRITON_HOME"
UNUSED_S = 60 * 86400  # files of earlier versions and of other models, which nobody has read since
MODELS = Path(__file__).parent  # the code that programs are made from, with the sums over ranks below
SUMS = MODELS.parent / "distributed" / "process_group.py"
COMPILERS = ("g++", "clang++")
OTHER_PLACES = ("/tmp", "/var/tmp")  # for temporary files, where the usual one is not safe
ONLY_US = 0o700


def cache_folder() -> Path:
    """Returns where libraries and compiled steps are kept: in inductor's folder, named here if it was not.

    inductor reads the variable later, in this process and in others, and keeps its kernels there, too. All of
    it is run. So a folder that other users can change, or that has a file of theirs, is not used, and a line
    says so. Raises StorageError if no folder is safe.
    """
    named = os.environ.get(INDUCTOR, "")
    if not named or _fault_of(named) is not None:
        os.environ[INDUCTOR] = str(_safe_folder(named))
    return Path(os.environ[INDUCTOR]).absolute() / "llama_ssp"


def use_safe_triton_folder() -> None:
    """Has Triton keep its kernels in inductor's folder, except where the user has named a safe one."""
    named = os.environ.get(TRITON, "")
    if not named and os.environ.get(TRITON_HOME):
        named = str(Path(os.environ[TRITON_HOME], ".triton", "cache"))
    fault = _fault_of(named) if named else None
    if named and fault is None:
        return

    folder = cache_folder().parent / "triton"
    os.environ[TRITON] = str(folder)
    if fault is not None:
        _warn(named, fault, folder, TRITON)


def user_folder() -> Path:
    """Returns our folder among the user's caches. Raises RuntimeError if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llama-ssp").absolute()


def _safe_folder(named: str) -> Path:
    """Returns a folder where the variable names none, or one that is not safe.

    That is the user's own, or one of a fixed name for temporary files, so that later starts find it again,
    or, if somebody else has taken this name, a new one, which is removed when this process ends.
    """
    faults: list[tuple[Path, Fault]] = []
    fault = _fault_of(named) if named else None
    if fault is not None:
        faults.append((Path(named), fault))

    error: Exception | None = None
    folder: Path | None = None
    try:
        folder = user_folder() / "compiled"
        _make(folder)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)  # compilers lock files, which some network file systems cannot
        fault = fault_inside(folder)
        if fault is not None:
            faults.append((folder, fault))
            folder = None
    except (RuntimeError, OSError) as failed:
        error = failed
        folder = None

    folder = folder or _temporary_folder(faults)
    if folder is None:
        raise StorageError(
            "there is no folder for compiled code that other users cannot change",
            where=INDUCTOR,
            found=str(faults[0][1]) if faults else error,
            fix=f"name one: {INDUCTOR}=FOLDER",
        )
    if faults:
        _warn(faults[0][0], faults[0][1], folder, INDUCTOR)
    elif error is not None:
        log.info("engine: compiled code is kept in %s, as the user's cache folder fails: %s", folder, error)
    return folder


def _temporary_folder(faults: list[tuple[Path, Fault]]) -> Path | None:
    """Returns a folder that only this user may enter, where temporary files are; adds what was not safe."""
    places = [Path(place) for place in dict.fromkeys([tempfile.gettempdir(), *OTHER_PLACES])]
    for place in places:
        folder = place / f"llama-ssp-{os.geteuid()}"
        try:
            _make(folder)
            if folder.lstat().st_uid == os.geteuid():
                folder.chmod(ONLY_US)
            fault = fault_inside(folder)
        except OSError:
            continue
        if fault is None:
            return folder
        faults.append((folder, fault))

    for place in places:
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="llama-ssp-", dir=place))
            atexit.register(_remove, folder, os.getpid())
            if fault_inside(folder) is None:
                return folder
    return None


@functools.cache
def _fault_of(named: str) -> Fault | None:
    """Returns why others can change the folder, which is made if need be; None if they cannot."""
    folder = Path(named)
    try:
        _make(folder)
        return fault_inside(folder)
    except OSError:
        # It cannot be made or read: nothing is loaded from it, unless another user can make it later.
        parent = next(parent for parent in folder.absolute().parents if parent.is_dir())
        return fault_on_the_way(parent)


def _make(folder: Path) -> None:
    """Makes the folder, and those above it, for this user alone, whatever the umask."""
    if not folder.parent.exists():
        _make(folder.parent)
    folder.mkdir(mode=ONLY_US, exist_ok=True)


def _remove(folder: Path, pid: int) -> None:
    """Removes a folder, in the process that made it: one that was forked ends earlier."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _warn(unsafe: Path | str, fault: Fault, used: Path, variable: str) -> None:
    reason = f"another user could have put it there: {fault}"
    advice = f"to use it again {fault.fix}; {variable} names another"
    log.warning(
        "engine: no compiled code is loaded from %s: %s; %s is used; %s", unsafe, reason, used, advice
    )


def drop_unused() -> None:
    """Deletes what nobody has read for UNUSED_S, if compiled code is in the user's folder."""
    folder = cache_folder().parent
    for file in folder.rglob("*") if folder.parent == user_folder() else ():
        with suppress(OSError):  # another process may have deleted it
            stats = file.lstat()
            if file.is_file() and max(stats.st_atime, stats.st_mtime) < time.time() - UNUSED_S:
                file.unlink()


def compiler() -> str | None:
    """Returns the C++ compiler that CXX names, or else the first of COMPILERS that is installed."""
    named = os.environ.get("CXX")
    paths = map(shutil.which, [named] if named else COMPILERS)
    return next(filter(None, paths), None)


def is_ours(file: Path) -> bool:
    """Returns whether only this user, and root, can write the file or exchange it.

    What is in the file is run. Raises FileNotFoundError if there is none.
    """
    return fault_on_the_way(file) is None


def part_of(place: Path) -> Path:
    """Returns where this process writes what takes the place when it is whole.

    Containers that share the folder may have equal host names and process ids: the name ends at random.
    """
    return place.with_name(f"{place.name}.{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}.part")


def processor() -> str:
    """Returns the features of the processor that decide which instructions it has."""
    table = Path("/proc/cpuinfo")
    if not table.exists():
        return platform.platform() + platform.processor()
    lines = table.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def source_text() -> str:
    """Returns the code that programs are made from."""
    files = [SUMS, *sorted(MODELS.rglob("*.py")), *sorted(MODELS.rglob("*.cpp"))]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def place_of(prefix: str, *facts: object, suffix: str = "") -> Path:
    """Returns the file that is named by a hash of the facts, whether it is there or not."""
    digest = hashlib.sha256("\0".join(map(str, facts)).encode(errors="surrogatepass")).hexdigest()[:16]
    return cache_folder() / f"{prefix}-{digest}{suffix}"


def mark_of(sizes: str) -> Path:
    """Returns the empty file that says that steps of a model of these sizes have been compiled here."""
    return place_of("steps-of", sizes, version("torch"), version("transformers"), processor(), source_text())


def kept(prefix: str, facts: str, make: Callable[[], Any]) -> Any:
    """Returns what `make` gives for these facts, as JSON has it: of an earlier start, or made and kept."""
    place = place_of(
        prefix, facts, version("transformers"), version("tokenizers"), source_text(), suffix=".json"
    )
    with suppress(OSError, ValueError):
        if is_ours(place):
            return json.loads(place.read_text(encoding="utf-8"))

    content = json.dumps(make())
    with suppress(OSError):  # the next start makes it again
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = part_of(place)
        part.write_text(content, encoding="utf-8")
        part.chmod(0o600)  # whatever the umask: a file that others may write is not read
        part.replace(place)
    return json.loads(content)
