"""Part of bench/gpu.py: this code beside that of an earlier commit, in turn on one machine.

Machines of one kind differ: one ran the same Python loop in 73 ms and, minutes later, in 129. So what a run
says of an earlier one on another machine is little. As a script it is one side, which reads names of works
from its standard input and prints the milliseconds of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bars import Bar
    from gpu import How

ROOT = Path(__file__).resolve().parents[1]
SLOWER = 1.03  # than before, at most
NEW, TURNS = 64, 9
BEFORE, NOW = "before", "now"


def beside(how: How) -> Iterator[Bar]:
    """Steps, rounds and texts of 7B with 1B, now over before."""
    from bars import most

    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(how.file(BEFORE)) as archive:
            archive.extractall(folder, filter="data")
        sides = {name: _Side(root, how.small) for name, root in ((BEFORE, Path(folder)), (NOW, ROOT))}
        works = [side.answer() for side in sides.values()][-1]  # both are ready
        taken: dict[tuple[str, str], list[float]] = {}
        for _ in range(2 if how.small else TURNS):
            for work in works:
                for name, side in sides.items():
                    taken.setdefault((work, name), []).append(side.ms(work))
        for work in works:
            before, now = median(taken[work, BEFORE]), median(taken[work, NOW])
            yield most(f"{work}: now over before", now / before, SLOWER, f"{now:.3f} and {before:.3f} ms")


class _Side:
    """A process that runs the code of one commit."""

    def __init__(self, root: Path, small: bool) -> None:
        paths = [str(root), str(root / "bench"), os.environ.get("PYTHONPATH", "")]
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(root / ".cache")} if root != ROOT else {}
        env = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, __file__, str(root), *["small"] * small]
        self._process = subprocess.Popen(
            command, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):  # others are a library's
                return json.loads(line)["answer"]
        raise RuntimeError(f"a side ended with exit code {self._process.wait()}")

    def ms(self, work: str) -> float:
        assert self._process.stdin
        print(work, file=self._process.stdin, flush=True)
        return float(self.answer())


def serve(root: str, small: bool) -> None:
    """Loads the pair of this commit, then runs what is asked for."""
    sys.path[:0] = [root, f"{root}/bench"]
    works = works_of(small)
    for work in works.values():
        work()  # compiles and captures
    print(json.dumps({"answer": list(works)}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"answer": works[line.strip()]()}), flush=True)


def works_of(small: bool) -> dict[str, Callable[[], float]]:
    """Returns what is timed, by name; each call gives milliseconds. All names are in the earlier commit."""
    from contenders import PROMPTS, by_us, in_turn, one_round
    from gpu_figures import K, session_of, steps_after

    from llama_ssp.speculative.state import Prompt

    pair = session_of(small, "7B", "llama3.2-1b")
    engine = pair.engine(0, end_ids=frozenset())
    state = engine.prefill([Prompt("0", PROMPTS[0])], 4 * NEW)
    target, other = (steps_after(model, NEW, (1, K + 1)) for model in (pair.models.target, pair.models.draft))
    steps = {
        "a step": target["1"], f"a step of {K + 1} tokens": target[str(K + 1)],
        "a draft step": other["1"], "a round": partial(one_round, engine, state, K),
    }  # fmt: skip
    timed = {name: partial(_median, in_turn, work) for name, work in steps.items()}
    return timed | {f"a token, K = {k}": partial(_of_a_text, by_us, pair, k) for k in (0, K)}


def _median(in_turn: Any, work: Callable[[], object]) -> float:
    return median(in_turn({"": work}, 3)[""])


def _of_a_text(by_us: Any, pair: Any, k: int) -> float:
    return float(by_us(pair, NEW, 1, k)[0])


if __name__ == "__main__":
    serve(sys.argv[1], "small" in sys.argv)
