"""A sweep (--multirun): folders that are named by what differs, and a line for each job. No torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from llama_ssp.config import home_expanded

log = logging.getLogger(__name__)

MAX_NAME = 120  # characters of a folder's name


def begin(number: int, varied: Sequence[str], out: str | None, began: datetime) -> Path | None:
    """Logs a job's line, and returns its folder below `out`; None where runs have none.

    `varied` are the job's overrides that differ among the jobs; the sweep `began` at this time.
    """
    place = None
    if out is not None:
        whole = ",".join(varied)
        label = re.sub(r"[^\w.=,+-]", "_", whole)[:MAX_NAME]
        name = label if label and label == whole else f"{label}-job{number}"
        place = home_expanded(out) / f"{began:%Y-%m-%d/%H-%M-%S}-sweep" / name
    said = f"job {number + 1}: {' '.join(varied)}"
    log.info("%s", said if place is None else f"{said}; {place}")
    return place
