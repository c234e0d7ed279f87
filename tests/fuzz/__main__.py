"""python -m tests.fuzz [inputs=2000] [seed=0] [only=NUMBER]: random files of prompts and of requests.

Prints each file that meets a fault: an exception, an answer other than documented. The exit code is 1 if
there is one. What hangs ends the command, which shows where it was.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.words import Words
from tests.fuzz.files import made, problems

LIMIT_S = 60.0


@dataclass
class Fuzz(Words):
    """The command line."""

    inputs: int = 2000
    seed: int = 0
    only: int = -1


def faults(seed: int, numbers: range, folder: Path) -> Iterator[str]:
    """Tries the files with these numbers. A seed and a number always make the same file."""
    for number in numbers:
        text = made(Random(f"{seed}/files/{number}"))
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            wrong = problems(folder, text)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"[:300]]
        finally:
            faulthandler.cancel_dump_traceback_later()
        if wrong:
            yield f"{number} {'; '.join(wrong)} {text!r:.1000}"


def main() -> int:
    asked = Fuzz.of(sys.argv[1:])
    logging.disable(logging.ERROR)  # each skipped line is a warning
    numbers = range(asked.only, asked.only + 1) if asked.only >= 0 else range(asked.inputs)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for fault in faults(asked.seed, numbers, Path(folder)):
            print(fault, flush=True)
            count += 1
    print(f"{count} of {len(numbers)} files met a fault")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
