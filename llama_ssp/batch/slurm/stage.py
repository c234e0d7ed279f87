"""Copies models to a node's own disk, in a batch job's script, once a node (models/staged.py). No torch.

    python -m llama_ssp.batch.slurm.stage PLACE MODEL...

What cannot be copied is read from where it is, and a line says so: the job goes on.
"""

import logging
import socket
import sys
from pathlib import Path

from llama_ssp.errors import RunError
from llama_ssp.models.staged import place_of, stage

log = logging.getLogger("stage")


def main(place: str, models: list[str]) -> None:
    """Copies each model, or says why not."""
    for model in models:
        try:
            log.info("%s: %s", socket.gethostname(), stage(Path(model), place_of(place)))
        except RunError as error:
            log.warning("%s: not copied, and read from %s: %s", socket.gethostname(), model, error)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    main(sys.argv[1], sys.argv[2:])
