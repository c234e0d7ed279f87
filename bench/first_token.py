"""How long a command takes until its first token, and what it imports: this checkout and a commit, in turn.

    python bench/first_token.py [base=COMMIT] [file=FILE.gguf] [repeats=5] [engine=compiled] [write=FILE.md]

Without a file it is SmolLM2's, out of a package. A start is `llama-ssp generate` with a prompt and 8 greedy
tokens; each side runs twice before the repeats, so that what later starts find is kept. The table has medians
of the repeats: seconds until the first byte of the text, seconds of the whole command, and CPU seconds, which
a busy machine changes least. The second table has milliseconds of imports by package, of one more start.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.commits import unpack  # noqa: E402
from bench.real import PROMPT, REAL  # noqa: E402
from bench.words import Words  # noqa: E402

HERE = "this checkout"
SHOWN = 8  # packages of the second table
IMPORT = re.compile(r"import time: +(\d+) \| +\d+ \| +([\w]+)")


@dataclass
class Asked(Words):
    """The command line."""

    base: str = ""
    file: str = ""
    repeats: int = 5
    engine: str = "compiled"
    threads: int = 2
    write: str = ""


def command(asked: Asked, *python: str) -> list[str]:
    words = [
        sys.executable,
        *python,
        "-m",
        "llama_ssp",
        "generate",
        asked.file,
        f"prompt={PROMPT}",
        "out=null",
    ]
    return [*words, "sampling=greedy", "ignore_eos=true", "max_new_tokens=8", f"engine={asked.engine}"]


def start(asked: Asked, tree: Path) -> tuple[float, float, float]:
    """Returns seconds until the first byte of the text, of the command, and of the processors."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(asked.threads)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command(asked), cwd=tree, env=env, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first_s = time.perf_counter() - began
        process.stdout.read()
        if process.wait():
            log.seek(0)
            sys.exit(log.read().decode()[-800:])
    whole_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return first_s, whole_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(asked: Asked, tree: Path) -> Counter[str]:
    """Returns milliseconds of one start's imports by package."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(asked.threads)}
    words = command(asked, "-X", "importtime")
    said = subprocess.run(words, cwd=tree, env=env, check=True, capture_output=True, text=True).stderr
    taken = Counter[str]()
    for line in said.splitlines():
        if match := IMPORT.match(line):
            taken[match[2]] += int(match[1]) / 1000  # type: ignore[assignment]
    return taken


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    from bench.surroundings import report
    from llama_ssp.config.compose import composed
    from llama_ssp.models.packages import package_copy
    from llama_ssp.report.tables import aligned

    asked.file = asked.file or str(package_copy(composed([f"model={REAL}"]).model, "model", download=True))
    with tempfile.TemporaryDirectory() as folder:
        trees = {HERE: ROOT}
        if asked.base:
            trees = {asked.base: unpack(asked.base, Path(folder)), HERE: ROOT}
        for tree in [*trees.values()] * 2:
            start(asked, tree)
        taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in trees}
        for turn in range(asked.repeats):
            for name in list(trees)[:: 1 if turn % 2 else -1]:
                taken[name].append(start(asked, trees[name]))
        packages = {name: imports(asked, tree) for name, tree in trees.items()}
    rows = [["start", "first token, s", "command, s", "CPU, s"]]
    for name, times in taken.items():
        rows.append([name, *(f"{median(column):.2f}" for column in zip(*times, strict=True))])
    shown = [package for package, _ in sum(packages.values(), Counter[str]()).most_common(SHOWN)]
    table = [["imports, ms", *packages]]
    table += [[each, *(f"{taken[each]:.0f}" for taken in packages.values())] for each in shown]
    report(
        asked.write, "From the command to the first token", {"target": f"{Path(asked.file).name}, on cpu"},
        f"engine={asked.engine}; {asked.threads} threads; medians of {asked.repeats} repeats.",
        "", "```", *aligned(rows, 0), "```", "", "```", *aligned(table, 0), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
