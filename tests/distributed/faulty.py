"""The command with a fault in it, for launchers that start the ranks: FAULT="SIGKILL,verify,other rank".

In phase "start" the fault is an override that only the victim has: FAULT="speculation.k=-1,start,leader".
"""

import os
import sys
from pathlib import Path

from llama_ssp import cli
from tests.distributed.faults import FAULTS, VICTIMS, strike_at

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    Path(f"{rank}.pid").write_text(str(os.getpid()))
    fault, phase, victim = os.environ["FAULT"].split(",")
    if phase == "start":  # a setting of its own
        sys.argv += [fault] * (rank == VICTIMS[victim].rank)
    elif fault:
        strike_at(VICTIMS[victim].rank, phase, FAULTS[fault].strike, rank)
    cli.main()
