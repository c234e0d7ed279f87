"""The command, however it is started: llama-ssp, python -m llama_ssp, launch/run.py."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Until modules are loaded and the guard is up, Ctrl-C ends this process as any other: no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llama_ssp.cli import main as command

    command()


if __name__ == "__main__":
    main()
