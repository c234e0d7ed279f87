"""Which process works on what: a file that the process touches now and then, and deletes at the end.

A claim only saves double work. What is published stays right without: the first to publish wins.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from llama_ssp.batch import atomic_files as files
from llama_ssp.distributed.identity import Identity, own_element, own_identity

BEAT_S, STALE_S = 10.0, 60.0  # a heartbeat keeps a claim, so that others take over from a dead process


def claim(path: Path) -> AbstractContextManager[None] | None:
    """The right to work on what `path` names, for a `with`; None while a living process has it."""
    own = json.dumps(this_process()).encode()
    if path.exists() and is_abandoned(path):
        path.unlink(missing_ok=True)
    # Of many groups that find it abandoned at once one takes it; two may, if they look and unlink at once.
    return _held(path, own) if not path.exists() and files.write_once(path, own) else None


@contextmanager
def _held(path: Path, own: bytes) -> Iterator[None]:
    """Keeps the claim while the body runs, unless another process has taken it over."""
    released = threading.Event()

    def beat() -> None:
        is_over = False
        while not is_over:
            is_over = released.wait(BEAT_S)
            with suppress(OSError):
                if path.read_bytes() == own:
                    path.unlink() if is_over else os.utime(path)

    thread = threading.Thread(target=beat, name=f"claim {path.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()


def this_process() -> dict[str, Any]:
    element = own_element()
    return {"host": socket.gethostname(), **asdict(own_identity()), **(asdict(element) if element else {})}


def read(path: Path) -> tuple[dict[str, Any], float] | None:
    """Who holds the claim, and when it was renewed last; None where it is being released, or is no claim."""
    with suppress(OSError, ValueError):
        holder = json.loads(path.read_bytes())  # first: NFS looks at a file's time anew when it is opened
        return holder, path.stat().st_mtime
    return None


def is_abandoned(path: Path, now: float | None = None) -> bool:
    """Whether the claim's process is gone, or silent for long; by the folder's clock where `now` is None."""
    if (found := read(path)) is None:
        return True
    holder, renewed = found
    if now is None:  # what stamps the files may be another machine
        with files.storing(path), NamedTemporaryFile(dir=path.parent, prefix=".now.") as probe:
            now = os.stat(probe.name).st_mtime
    return now - renewed > STALE_S or lives(holder) is False


def lives(holder: dict[str, Any]) -> bool | None:
    """Whether a claim's process runs; None where this machine, or an older version's claim, does not tell."""
    element = own_element()
    if element and holder.get("job") == element.job and holder.get("restart") != element.restart:
        return False  # a scheduler starts an element again when it has ended
    return Identity(holder.get("machine", ""), holder.get("pid", 0), holder.get("started", "")).lives
