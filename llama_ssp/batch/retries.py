"""Whether a group of ranks that ended is started again. No torch.

torchrun exits with 1 whatever its ranks exit with, so a rank writes its code into a file as well.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from pathlib import Path

from llama_ssp.errors import DATA, MODEL, OK, USAGE

LASTING = (USAGE, DATA, MODEL)  # another run would end with these again


class Next(Enum):
    """What follows the end of a group."""

    done = "done"
    again = "again"
    give_up = "give up"


def after(code: int, fruitless: int, retries: int) -> Next:
    """`fruitless` is how many runs in a row, this one included, finished no record."""
    if code == OK:
        return Next.done
    return Next.give_up if code in LASTING or fruitless > most_fruitless(retries) else Next.again


def most_fruitless(retries: int) -> int:
    """A record that kills its ranks does so once among others and `retries` times alone; then it is set
    aside, which counts as finished. So more fruitless runs in a row have another cause."""
    return retries + 1


def code_of(returned: int, file: Path) -> int:
    """How the group ended: 0, the code that a rank wrote, or that of the process that started the ranks."""
    if returned == OK:
        return OK
    with suppress(OSError, ValueError):
        return int(file.read_text(encoding="ascii"))
    return 128 - returned if returned < 0 else returned
