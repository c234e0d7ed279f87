"""The command, however it is started: llama-ssp, python -m llama_ssp, launch/run.py."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

STARTING = "llama-ssp is starting"


def main() -> NoReturn:
    """Until modules are loaded and the guard is up, Ctrl-C ends this process as any other: no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with _starting():
        from llama_ssp.cli import main as command

    command()


@contextmanager
def _starting() -> Iterator[None]:
    """Shows a line on a terminal while modules are loaded, for most of a second; it leaves nothing."""
    shows = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    if shows := shows and os.environ.get("TERM", "dumb") != "dumb":
        sys.stderr.write(STARTING)
        sys.stderr.flush()
    try:
        yield
    finally:
        if shows:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


if __name__ == "__main__":
    main()
