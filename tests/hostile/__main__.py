"""Each folder of the corpus by each loading engine, a table.

    python -m tests.hostile [engine=NAME ...] [group=NAME ...] [write=FILE.md] [ROW ...]

Without names all rows by all engines; the exit code is 1 if one is not met. An engine that is not installed
is said to be so. `write` makes a results file; a trial that took long is late there, as on the screen: the
machine should do nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.surroundings import surroundings, write
from tests import checkpoints
from tests.hostile.corpus import GROUPS, NOT_BY_DEEPSPEED, Hostile
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


@dataclass
class Table:
    """The lines, printed as they come, and what they add up to."""

    engines: list[str]
    lines: list[str] = field(default_factory=list)
    total: int = 0
    met: int = 0
    late: int = 0

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def row(self, group: str, row: Hostile, try_: Callable[[str, int], Result]) -> Result | None:
        """One folder by all engines. Returns the last result that is wrong."""
        cells, problems, said, bad = [], [], "", None
        for engine in self.engines:
            if (PACKED in row.extra or row.decoder) and engine not in DECODER:
                cells.append("   -")
                continue
            found = try_(engine, self.total)
            own, late = wrong(row, engine, found), found.seconds > LIMIT_S
            self.total, self.late, bad = self.total + 1, self.late + late, found if own else bad
            self.met += not own and not late
            cells.append(f"{found.seconds:4.1f}s{' LATE' if late else ''}{' WRONG' if own else ''}")
            problems += [f"    {engine}: {problem}" for problem in own]
            said = (found.errors or ["runs, and leaves it alone"])[0]
        self.say(f"{group:22} {row!s:26} {row.code}  {'  '.join(cells)}  {said[:110]}")
        for problem in problems:
            self.say(problem)
        return bad

    def sum(self) -> str:
        return (
            f"{self.met} of {self.total} trials met ({', '.join(self.engines)}); "
            f"{self.late} took longer than {LIMIT_S:g} s"
        )

    def page(self) -> str:
        return "\n".join([
            "# Hostile folders by each loading engine", "", *surroundings({}), f"{self.sum()}.", "",
            "Of each row its group, its name, the exit code that the decoder must have, the time of each "
            "engine, and what the last one said. Others may refuse what the decoder reads: DeepSpeed "
            "quantised weights, transformers' modules two keys of config.json.",
            "", "```", *self.lines, "```", "",
        ])  # fmt: skip


def main() -> int:
    import torch
    import transformers  # noqa: F401  forked processes have what is imported here
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    torch.set_num_threads(1)
    names = [word for word in sys.argv[1:] if "=" not in word]
    asked, groups, files = (
        [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"{key}=")]
        for key in ("engine", "group", "write")
    )
    asked = asked or list(ENGINES)
    table = Table([name for name in asked if name != "deepspeed" or importlib.util.find_spec("deepspeed")])
    for name in set(asked) - set(table.engines):
        table.say(f"{name}: not installed, not tried")
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        if not access_times_tell(base):
            table.say("the file system keeps no access times: only Python's own opening of files is seen")
        whole, sharded = sources(base)
        for group, rows in GROUPS.items():
            for row in rows:
                if (groups and group not in groups) or (names and row.name not in names):
                    continue
                bad = table.row(
                    group, row, lambda engine, n, row=row: tried(row, engine, whole, sharded, base / f"{n}")
                )
                if bad and names:
                    print(bad.err[-3000:])
    print(table.sum())
    for file in files:
        write(file, table.page())
    return 0 if table.met == table.total > 0 else 1


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s in all")
    sys.exit(code)
