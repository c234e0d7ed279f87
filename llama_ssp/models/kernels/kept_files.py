"""Files for later starts, of compiled code and of what transformers makes of a model's files. No torch."""

import fcntl
import functools
import getpass
import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
UNUSED_S = 60 * 86400  # files of earlier versions and of other models, which nobody has read since
MODELS = Path(__file__).parents[1]  # the code that programs are made from, with the sums over ranks below
SUMS = MODELS.parent / "distributed" / "process_group.py"
OTHERS_WRITE = 0o022
COMPILERS = ("g++", "clang++")


def cache_folder() -> Path:
    """Returns where libraries and compiled steps are kept: in inductor's folder, named here if it was not.

    inductor reads the variable later, in this process and in others, and keeps its kernels there, too.
    """
    if not os.environ.get(INDUCTOR):
        os.environ[INDUCTOR] = str(_writable())
    return Path(os.environ[INDUCTOR]).absolute() / "llama_ssp"


def user_folder() -> Path:
    """Returns our folder among the user's caches. Raises RuntimeError if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llama-ssp").absolute()


def _writable() -> Path:
    """Returns the user's folder for compiled code, or one for temporary files if that cannot be written."""
    try:
        folder = user_folder() / "compiled"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)  # compilers lock files, which some network file systems cannot
    except (RuntimeError, OSError) as error:
        folder = Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
        log.info("engine: compiled code is kept in %s, as the user's cache folder fails: %s", folder, error)
    return folder


def drop_unused() -> None:
    """Deletes what nobody has read for UNUSED_S, if compiled code is in the user's folder."""
    folder = cache_folder().parent
    for file in folder.rglob("*") if folder.parent == user_folder() else ():
        with suppress(OSError):  # another process may have deleted it
            stats = file.lstat()
            if file.is_file() and max(stats.st_atime, stats.st_mtime) < time.time() - UNUSED_S:
                file.unlink()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without a name
        return f"uid_{os.getuid()}"


def compiler() -> str | None:
    """The C++ compiler that CXX names, or else the first of COMPILERS that is installed."""
    own = os.environ.get("CXX")
    found = map(shutil.which, [own] if own else COMPILERS)
    return next(filter(None, found), None)


def is_ours(file: Path) -> bool:
    """Whether only this user may write the file and its folder: what is in the file is run."""
    stats = [path.stat() for path in (file, file.parent)]
    return all(one.st_uid == os.getuid() and not one.st_mode & OTHERS_WRITE for one in stats)


def part_of(place: Path) -> Path:
    """Where this process writes what takes the place when it is whole."""
    return place.with_name(f"{place.name}.{platform.node()}-{os.getpid()}.part")


def processor() -> str:
    """The features of the processor that decide which instructions it has."""
    table = Path("/proc/cpuinfo")
    if not table.exists():
        return platform.platform() + platform.processor()
    lines = table.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def source_text() -> str:
    """The code that programs are made from."""
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
    libraries = version("transformers"), version("tokenizers")
    place = place_of(prefix, facts, *libraries, source_text(), suffix=".json")
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
