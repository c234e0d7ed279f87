"""The command, however it is started: llama-ssp, python -m llama_ssp, launch/run.py."""

import signal
import sys
from typing import NoReturn

NOT_INSTALLED = 5  # as for every package that cannot be imported (errors.py)
OF_UNIX = ("fcntl", "pwd", "resource", "termios")  # modules that Python has on Linux and macOS alone
INSTALL = "run ./machine-install.sh once, then source .venv/bin/activate"


def main() -> NoReturn:
    """Until modules are loaded and the guard is up, Ctrl-C ends this process as any other: no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.version_info < (3, 11):  # noqa: UP036  a checkout runs with any Python
        _fail(f"llama-ssp needs Python 3.11 or later; {sys.executable}; found {sys.version.split()[0]}")
    if sys.flags.optimize > 1:  # transformers and --help are made of docstrings
        _fail("Python without docstrings; -OO or PYTHONOPTIMIZE; found 2, allowed 0 or 1", "unset it")
    try:
        from llama_ssp import cli

        times = cli.load(sys.argv[1:])
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "llama_ssp":
            raise
        if missing.name in OF_UNIX:
            _fail(f"llama-ssp needs Linux; {sys.executable}; found {sys.platform}", "use WSL2 on Windows")
        _fail(f"{missing.name} is not installed for this Python; {sys.executable}")

    cli.main(times)


def _fail(what: str, fix: str = INSTALL) -> NoReturn:
    print(f"error: {what}; {fix}", file=sys.stderr)
    sys.exit(NOT_INSTALLED)


if __name__ == "__main__":
    main()
