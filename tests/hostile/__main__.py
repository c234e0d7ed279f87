"""python -m tests.hostile [engine=NAME] [ROW ...]: each folder of the corpus by each loading engine, a table.

Without names all rows by all engines; the exit code is 1 if one is not met. An engine that is not installed
is said to be so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests import checkpoints
from tests.hostile.corpus import GROUPS, Hostile
from tests.hostile.trial import LIMIT_S, Result, access_times_tell, run

ENGINES: dict[str, tuple[int, tuple[str, ...]]] = {
    "own": (1, ("placement=cpu",)),
    "cut": (2, ("placement=leader",)),
    "layers": (1, ("placement=layers",)),
    "deepspeed": (2, ("placement=deepspeed",)),
}
DECODER, PACKED = ("own", "cut"), "model.dtype=packed"  # which transformers' modules do not have
PROMPT = 'task.prompts=["hello"]'


def sources(folder: Path) -> tuple[Path, Path]:
    """Sound folders: one file of weights, and five."""
    whole = checkpoints.save(folder / "whole")
    return whole, checkpoints.save(folder / "sharded", shard="100KB")


def tried(row: Hostile, engine: str, whole: Path, sharded: Path, folder: Path) -> Result:
    """The command on a fresh copy of the folder."""
    folder.mkdir()
    model = checkpoints.copied(sharded if row.sharded else whole, folder / "model")
    row.damage(model)
    world, placement = ENGINES[engine]
    asked = [PROMPT, f"model={model}", "draft=none", "task.max_new_tokens=4", "seed=1"]
    return run([*asked, *placement, *row.extra], folder, world)


def wrong(row: Hostile, found: Result) -> list[str]:
    """What is not as it must be; nothing of the clock."""
    problems = list(found.misdeeds)
    if set(found.codes) != {row.code}:
        problems.append(f"exit codes {found.codes}, not {row.code}")
    if len(found.errors) != (row.code != 0):
        problems.append(f"{len(found.errors)} lines of error")
    if "Traceback" in found.err:
        problems.append("a traceback")
    if row.code and found.out and not row.answers:
        problems.append("something on standard output")
    problems += [f"nothing of {text!r}" for text in row.says if not any(text in e for e in found.errors)]
    if any(len(line) > 1500 for line in found.errors):
        problems.append("a line too long")
    return problems


def main() -> int:
    import torch
    import transformers  # noqa: F401  forked processes have what is imported here
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    torch.set_num_threads(1)
    names, met, slow, total = [a for a in sys.argv[1:] if "=" not in a], 0, 0, 0
    asked = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith("engine=")] or list(ENGINES)
    engines = [name for name in asked if name != "deepspeed" or importlib.util.find_spec("deepspeed")]
    for name in set(asked) - set(engines):
        print(f"{name}: not installed, not tried")
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        if not access_times_tell(base):
            print("the file system keeps no access times: only Python's own opening of files is seen")
        whole, sharded = sources(base)
        for group, rows in GROUPS.items():
            for row in rows:
                if names and row.name not in names:
                    continue
                cells, problems, said = [], [], ""
                for engine in engines:
                    if PACKED in row.extra and engine not in DECODER:
                        cells.append("   -")
                        continue
                    found = tried(row, engine, whole, sharded, base / f"{total}")
                    own = wrong(row, found)
                    late = found.seconds > LIMIT_S
                    total, met, slow = total + 1, met + (not own and not late), slow + late
                    cells.append(f"{found.seconds:4.1f}s{' LATE' if late else ''}{' WRONG' if own else ''}")
                    problems += [f"{engine}: {problem}" for problem in own]
                    said = (found.errors or ["runs, and leaves it alone"])[0]
                print(f"{group:22} {row!s:26} {row.code}  {'  '.join(cells)}  {said[:110]}", flush=True)
                for problem in problems:
                    print(f"    {problem}", flush=True)
                if problems and names:
                    print(found.err[-3000:])
    print(f"{met} of {total} trials met ({', '.join(engines)}); {slow} took longer than {LIMIT_S:g} s")
    return 0 if met == total else 1


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s in all")
    sys.exit(code)
