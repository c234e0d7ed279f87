"""A sweep (--multirun): folders that are named by what differs, and a line for each job. No torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from llama_ssp.config import home_expanded

log = logging.getLogger(__name__)

LONGEST = 120  # characters of a folder's name


class Sweep:
    """The jobs of a sweep by their overrides; `out` is where run folders go, None for nowhere."""

    def __init__(self, jobs: Sequence[Sequence[str]], out: str | None) -> None:
        shared = set.intersection(*map(set, jobs))
        self._differing = [[word for word in words if word not in shared] for words in jobs]
        place = f"{datetime.now():%Y-%m-%d/%H-%M-%S}-sweep"
        self._folder = home_expanded(out) / place if out is not None else None

    def begin(self, number: int) -> Path | None:
        """Logs a job's line, and returns its folder."""
        place = self.place(number)
        said = f"job {number + 1} of {len(self._differing)}: {' '.join(self._differing[number])}"
        log.info("%s", said if place is None else f"{said}; {place}")
        return place

    def place(self, number: int) -> Path | None:
        """Returns the folder of a job; None where runs have none."""
        if self._folder is None:
            return None
        labels = [re.sub(r"[^\w.=,+-]", "_", ",".join(words))[:LONGEST] for words in self._differing]
        is_unique = labels[number] and labels.count(labels[number]) == 1
        return self._folder / (labels[number] if is_unique else f"{labels[number]}-job{number}")
