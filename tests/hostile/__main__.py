"""Tries each folder of the corpus with each loading engine.

    python -m tests.hostile [engine=NAME ...] [group=NAME ...] [ROW ...]

Without names all rows with all engines that are installed; the exit code is 1 if a trial fails. A trial fails
if it takes more than 10 s, too: the machine should do nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests import checkpoints
from tests.hostile.corpus import GROUPS, NOT_BY_DEEPSPEED, Hostile
from tests.hostile.trial import LIMIT_S, Result, access_times_tell, run

ENGINES: dict[str, tuple[int, tuple[str, ...]]] = {
    "own": (1, ("placement=cpu",)),
    "cut": (2, ("placement=leader",)),
    "layers": (1, ("placement=layers",)),
    "deepspeed": (2, ("placement=deepspeed",)),
}
DECODER = ("own", "cut")
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


def due(row: Hostile, engine: str) -> tuple[int, tuple[str, ...]]:
    """The exit code that the engine must have, and what its error must say."""
    if engine == "deepspeed" and row in NOT_BY_DEEPSPEED:
        return 5, ("DeepSpeed would lose the scales", "use placement.splitting=tensor")
    if engine not in DECODER and row.modules:
        return 4, row.modules
    return row.code, row.says


def wrong(row: Hostile, engine: str, found: Result) -> list[str]:
    """What is not as it must be; nothing of the clock."""
    code, says = due(row, engine)
    problems = list(found.misdeeds)
    if set(found.codes) != {code}:
        problems.append(f"exit codes {found.codes}, not {code}")
    if len(found.errors) != (code != 0):
        problems.append(f"{len(found.errors)} lines of error")
    if "Traceback" in found.err:
        problems.append("a traceback")
    if code and found.out and not row.answers:
        problems.append("something on standard output")
    problems += [f"nothing of {text!r}" for text in says if not any(text in e for e in found.errors)]
    if any(len(line) > 1500 for line in found.errors):
        problems.append("a line too long")
    return problems


def main() -> int:
    import torch
    import transformers  # noqa: F401  forked processes have what is imported here
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    torch.set_num_threads(1)
    names = [word for word in sys.argv[1:] if "=" not in word]
    asked, groups = (
        [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"{key}=")]
        for key in ("engine", "group")
    )
    engines = [name for name in ENGINES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]
    total = failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        if not access_times_tell(base):
            print("the file system keeps no access times: only Python's own opening of files is seen")
        whole, sharded = sources(base)
        rows = [
            (group, row) for group, rows in GROUPS.items() for row in rows if group in (groups or [group])
        ]
        for group, row in rows:
            if names and row.name not in names:
                continue
            for engine in asked or engines:
                result = tried(row, engine, whole, sharded, base / f"{total}")
                problems = wrong(row, engine, result)
                problems += [f"took more than {LIMIT_S:g} s"] if result.seconds > LIMIT_S else []
                total, failed = total + 1, failed + bool(problems)
                said = (result.errors or ["runs, and leaves it alone"])[0]
                print(f"{group:22} {row!s:26} {engine:9} {result.seconds:4.1f} s  {said[:110]}", flush=True)
                print("".join(f"    {problem}\n" for problem in problems), end="")
    print(f"{failed} of {total} trials failed")
    return int(failed > 0 or not total)


if __name__ == "__main__":
    sys.exit(main())
