"""python -m tests.soak [minutes=10] [seed=N] [write=FILE.md] [keep=FOLDER]"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.soak.scenarios import drawn
from tests.soak.trials import Bench, watched
from tests.soak.verdict import Soak, calm

RECORDS = 300  # of the job whose memory is watched


def main() -> int:
    own = {"minutes": "10", "seed": str(time.time_ns() % 2**31), "write": "", "keep": ""}
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key not in own:
            sys.exit(f"unknown: {argument}; known: {', '.join(own)}")
        own[key] = value
    soak = Soak(int(own["seed"]))
    with tempfile.TemporaryDirectory() as scratch:
        endure(soak, float(own["minutes"]), Path(own["keep"] or scratch))
    text = soak.report()
    print(text)
    if own["write"]:
        Path(own["write"]).write_text(text, encoding="utf-8")
    return 1 if soak.found else 0


def endure(soak: Soak, minutes: float, folder: Path, records: int = RECORDS) -> None:
    random, bench = Random(soak.seed), Bench(folder)
    held, ended = watched(calm(soak.seed), folder / "long", records)
    if ended.code != 0:
        soak.wrong.append(f"the long job ended with {ended.code}: {ended.err.splitlines()[-1:]}")
    else:
        soak.add_held(records, held)
    while soak.minutes < minutes or not soak.trials:
        trial = bench.try_(drawn(random), len(soak.trials))
        soak.add(trial)
        verdict = "; ".join(trial.wrong) or "passed"
        print(f"{soak.minutes:5.1f} min {trial.scenario}: {verdict}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
