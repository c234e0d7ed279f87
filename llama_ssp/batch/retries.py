"""When a group of ranks that ended is started again, and when no more. No torch.

torchrun leaves with 1 whatever its ranks left with, so a rank leaves its code in a file as well.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from pathlib import Path

from llama_ssp.errors import DATA, MODEL, OK, USAGE

LASTING = (USAGE, DATA, MODEL)  # what another go would end with again


class Next(Enum):
    """What follows the end of a group."""

    done = "done"
    again = "again"
    give_up = "give up"


def after(code: int, fruitless: int, retries: int) -> Next:
    """`fruitless` is how many ends in a row, this one included, came without one more record finished."""
    if code == OK:
        return Next.done
    if code in LASTING or fruitless > most_fruitless(retries):
        return Next.give_up
    return Next.again


def most_fruitless(retries: int) -> int:
    """A record that kills its ranks does so once among others and `retries` times alone; then it is set
    aside, which counts as finished. So more ends in a row are the fault of something else."""
    return retries + 1


def code_of(returned: int, file: Path) -> int:
    """How the group ended: 0, or what its ranks said, or else what the process that started them did."""
    if returned == OK:
        return OK
    with suppress(OSError, ValueError):
        return int(file.read_text(encoding="ascii"))
    return 128 - returned if returned < 0 else returned
