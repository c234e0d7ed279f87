"""Runs a command for a limited time, even one that cannot be killed, as in a driver that hangs. No torch."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

KILLED_S = 2.0  # for a killed process to go; one that waits for a driver stays, and is left behind


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a command said, and how it ended: with a `code`, late, or not even started (`fails`)."""

    out: str = ""
    err: str = ""
    code: int | None = None
    is_late: bool = False
    fails: str = ""


def said_within(
    limit_s: float, command: Sequence[str], text: str = "", environment: Mapping[str, str] | None = None
) -> Said:
    """Runs the command with `text` as its input; returns what it said until then."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=given, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        except OSError as error:
            return Said(fails=error.strerror or str(error))

        is_late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # also where a signal ends the check
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # compilers that it has started, too
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILLED_S)
        out.seek(0)
        err.seek(0)
        return Said(
            out=out.read().decode(errors="replace"),
            err=err.read().decode(errors="replace"),
            code=None if is_late else process.returncode,
            is_late=is_late,
        )
