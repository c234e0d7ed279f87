"""Tries each folder of the corpus with each loading engine.

    python -m tests.hostile [engine=NAME] [row=NAME]

Without names all rows with all engines that are installed; the exit code is 1 if a trial fails. A trial fails
if it takes more than 10 s, too: the machine should do nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.words import Words
from tests import checkpoints
from tests.hostile.corpus import CORPUS, NOT_BY_DEEPSPEED, Case
from tests.hostile.trial import LIMIT_S, Result, access_times_tell, run

ENGINES: dict[str, tuple[int, tuple[str, ...]]] = {
    "own": (1, ("placement=cpu",)),
    "cut": (2, ("placement=leader",)),
    "layers": (1, ("placement=layers",)),
    "deepspeed": (2, ("placement=deepspeed",)),
}
DECODER = ("own", "cut")
INSTALLED = [name for name in ENGINES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]


def tried(row: Case, engine: str, whole: Path, sharded: Path, folder: Path) -> Result:
    """Runs the command on a fresh copy of the sound folder `whole`, or of the one in several files."""
    folder.mkdir()
    assert row.damage is not None
    row.damage(checkpoints.copied(sharded if row.sharded else whole, folder / "model"))
    world, placement = ENGINES[engine]
    return run([*row.words, *placement], folder, world)


def wrong(row: Case, engine: str, found: Result) -> list[str]:
    """What is not as it must be; nothing of the clock."""
    if engine == "deepspeed" and row in NOT_BY_DEEPSPEED:
        says = "DeepSpeed would lose the scales", "use placement.splitting=tensor"
        row = replace(row, code=5, says=says)
    elif engine not in DECODER and row.modules:
        row = replace(row, code=4, says=row.modules)
    return [*found.misdeeds, *row.problems(found.codes, found.out, found.err)]


@dataclass
class Trials(Words):
    """The command line."""

    engine: str = ""
    row: str = ""


def main() -> int:
    import torch
    import transformers  # noqa: F401  forked processes have what is imported here
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    torch.set_num_threads(1)
    asked = Trials.of(sys.argv[1:])
    total = failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        if not access_times_tell(base):
            print("the file system keeps no access times: only Python's own opening of files is seen")
        whole = checkpoints.save(base / "whole")
        sharded = checkpoints.save(base / "sharded", shard="100KB")
        for row in [row for row in CORPUS if asked.row in ("", row.name)]:
            for engine in [asked.engine] if asked.engine else INSTALLED:
                result = tried(row, engine, whole, sharded, base / f"{total}")
                problems = wrong(row, engine, result)
                problems += [f"took more than {LIMIT_S:g} s"] if result.seconds > LIMIT_S else []
                total, failed = total + 1, failed + bool(problems)
                said = (result.errors or ["runs, and leaves it alone"])[0]
                print(f"{row.name:26} {engine:9} {result.seconds:4.1f} s  {said[:110]}", flush=True)
                print("".join(f"    {problem}\n" for problem in problems), end="")
    print(f"{failed} of {total} trials failed")
    return int(failed > 0 or not total)


if __name__ == "__main__":
    sys.exit(main())
