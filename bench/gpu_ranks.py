"""Parts of bench/gpu.py: commands as they are typed, and ranks. Each is a function that yields its figures.

As a script it is a rank, started by torchrun: of a command of which one rank runs out of memory, or with the
word `trial` of a trial of compiled steps.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from bars import Bar, most, needs  # noqa: E402

if TYPE_CHECKING:
    from gpu import How

RUN = ROOT / "launch" / "run.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PROMPTS = ["def hello(name):", "7 * 8 =", "The capital of France is the largest of all the"]
FEW_BYTES = 0.01  # of the GPU's memory, for the rank that runs out of it
LIMIT_S = 100 if torch.cuda.is_available() else 400  # of a command
TRIAL = "trial"
KEPT_S = 5.0  # to read a verdict that was kept


def start(how: How) -> Iterator[Bar]:
    """The command as it is typed: its GPU and its K are the plan's; more ranks than GPUs are refused."""
    models = ["demo", "demo_draft"] if how.small else ["llama3.1-8b", "llama3.2-1b"]
    words = [str(RUN), "generate", *models, "prompt=1 2", "seed=5", "out=null", "output=json"]
    if not how.small:
        words += ["model.weights=synthetic", "draft.weights=synthetic"]
    dry = _ran([*words, "--dry-run"])
    yield most("a dry run fails", int(dry.code != 0), 0, "; ".join(dry.errors()) or dry.last())
    done = _ran(words)
    yield most("the command fails", int(done.code != 0), 0, "; ".join(done.errors())[:160] or done.last())
    if not torch.cuda.is_available():
        yield needs("two ranks on one GPU: ends otherwise than with one line that says so")
        return
    yield from _ended("two ranks on one GPU", _ran([*words, "ranks=2"]), "a GPU for each rank")


def fit(_: How) -> Iterator[Bar]:
    """The check of the machine, `calibrate`: what is not well, and what it measures while other parts run."""
    done = _ran([str(RUN), "calibrate", "measure=false", "output=json"])
    said = [line for line in done.out.splitlines() if line.startswith("{")]
    if not said:
        yield most(
            "the check does not end with a verdict", 1, 0, "; ".join(done.errors())[:160] or done.last()
        )
        return
    machine = json.loads(said[-1])["machine"]
    faults_of = [check for check in machine["checks"] if check["verdict"] == "fault"]
    yield most("faults of the machine", len(faults_of), 0, machine["says"])
    for check in machine["checks"]:
        fix = f"; {check['fix']}" if check["fix"] else ""
        yield Bar(check["name"], 0, note=f"{check['verdict']}: {check['found']}{fix}")


def trial(_: How) -> Iterator[Bar]:
    """Two ranks on one GPU try compiled steps in small processes, as a run over several GPUs does.

    Sums go through the host, as NCCL takes a GPU for each rank.
    """
    done = _ran([*TORCHRUN, __file__, TRIAL])
    said = [line for line in done.out.splitlines() if line.startswith("{")]
    if done.code or not said:
        yield most("two ranks do not come to a verdict", 1, 0, "; ".join(done.errors())[:160] or done.last())
        return
    first, *later = json.loads(said[-1])["trials"]
    note = first["verdict"] or f"{first['seconds']:.0f} s"
    yield most("compiled steps fail their trial", int(first["verdict"] != ""), 0, note)
    is_kept = bool(later) and later[0]["seconds"] < KEPT_S
    yield most("the verdict is not kept for later starts", int(not is_kept), 0)


def try_steps() -> None:
    """Tries compiled steps as a rank of `trial`, then reads the verdict that was kept; prints both."""
    from llama_ssp.config import Dtype
    from llama_ssp.distributed.process_group import open_ranks
    from llama_ssp.pair import trial as trials

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if has_gpu else "cpu")
    patch.object(trials, "cache_folder", Path.cwd).start()  # this command's folder: no earlier verdict counts
    ranks = open_ranks(device)
    documents = []
    for _ in range(2):
        tried = trials.Trial(
            name="the trial's model", dtype=Dtype.bf16 if has_gpu else Dtype.fp32, device=device, ranks=ranks
        )
        began = time.monotonic()
        tried.passes()
        documents.append({"verdict": tried.verdict, "seconds": time.monotonic() - began})
        if not tried.is_lasting:
            break
    if ranks.is_leader:
        print(json.dumps({"trials": documents}), flush=True)
    ranks.close()


def ranks(how: How) -> Iterator[Bar]:
    """Two ranks on one GPU, over gloo: the text is that of one process."""
    yield from _over_ranks(("own",) if how.small else ("sharded", "own"), how.small)


def more_ranks(how: How) -> Iterator[Bar]:
    """Two ranks again: with the draft on the leader alone, and with a target in 8 bit."""
    yield from _over_ranks(("leader",), how.small)
    what = "sharded in 8 bit: commands that fail"
    if not torch.cuda.is_available():
        yield needs(what)
        return
    words = [*_words("compiled", how.small), "model.dtype=int8", "placement=sharded"]
    done = _ran([*TORCHRUN, str(RUN), *words])
    yield most(what, int(done.code != 0), 0, "; ".join(done.errors())[:160])


def _over_ranks(placements: Sequence[str], small: bool) -> Iterator[Bar]:
    alone = _ran([str(RUN), *_words("eager", small)]).texts()
    for placement in placements:
        engine = "eager" if small else "compiled"
        done = _ran([*TORCHRUN, str(RUN), *_words(engine, small), f"placement={placement}"])
        pairs = zip(done.texts(), alone, strict=True)
        wrong = sum(not text or text != expected for text, expected in pairs)  # a failed command has none
        what = f"{placement}: texts unlike those of one process"
        yield most(what, wrong, 0, "; ".join([f"{done.seconds:.0f} s", *done.errors()])[:160])


def faults(how: How) -> Iterator[Bar]:
    """A rank that is killed, and one that runs out of memory: all end, with one line that says why."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fault = {"FAULT": "SIGKILL,verify,other rank", "PYTHONPATH": path}
    words = [*_words("eager", how.small), "placement=leader"]
    done = _ran([*TORCHRUN, "-m", "tests.distributed.faults", *words], **fault)
    struck = float((done.folder / "struck").read_text()) if (done.folder / "struck").exists() else 0.0
    yield from _ended("a killed rank", done, "is gone")
    yield most("a killed rank: seconds until all have ended", done.ended - struck, 10)
    if not torch.cuda.is_available():
        yield needs("a rank without memory: ends otherwise than with one line that says so")
        return
    model = ["model=7B", "model.weights=synthetic", "draft=none", "placement=sharded"]
    done = _ran([*TORCHRUN, __file__, *model, "out=null", "prompt=1 2"])
    yield from _ended("a rank without memory", done, "memory")


def _ended(what: str, done: _Done, said: str) -> Iterator[Bar]:
    errors = done.errors()
    wrong = done.code == 0 or len(errors) != 1 or said not in errors[0]
    what = f"{what}: ends otherwise than with one line that says so"
    yield most(what, int(wrong), 0, "; ".join(errors)[:200] or done.last())


class _Done:
    """A command that has ended."""

    def __init__(self, code: int, out: str, err: str, seconds: float, folder: Path) -> None:
        self.code = code
        self.out = out
        self._err = err
        self.seconds = seconds
        self.folder = folder
        self.ended = time.time()

    def errors(self) -> list[str]:
        return [line for line in self._err.splitlines() if line.startswith("error:")]

    def last(self) -> str:
        """What it said last, where there is no line for a user."""
        return f"exit code {self.code}; {' '.join(self._err.splitlines()[-3:])[-200:]}"

    def texts(self) -> list[list[int]]:
        """Token ids of each prompt's text; empty lists where the command has failed."""
        if self.code:
            return [[]] * len(PROMPTS)
        return [output["token_ids"] for output in json.loads(self.out.splitlines()[-1])["outputs"]]


def _words(engine: str, small: bool) -> list[str]:
    given = json.dumps(PROMPTS)
    length = f"task.max_new_tokens={12 if small else 200}"
    formats = ["model.dtype=fp32", "draft.dtype=fp32"]
    words = [f"task.prompts={given}", length, *formats, f"engine={engine}"]
    return [*words, "seed=5", "out=null", "output=json"]


def _ran(words: list[str], **env: str) -> _Done:
    """Python with these words, in a folder of its own; code 124 if it does not end."""
    folder = Path(tempfile.mkdtemp())
    threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, **env}
    began = time.monotonic()
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdout=out, stderr=err, env=environment
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            code = 124
    said, told = ((folder / name).read_text() for name in ("out", "err"))
    return _Done(code, said, told, time.monotonic() - began, folder)


if __name__ == "__main__":
    if sys.argv[1:] == [TRIAL]:
        try_steps()
    else:
        if os.environ["RANK"] == "1":
            torch.cuda.set_per_process_memory_fraction(FEW_BYTES, 0)
        sys.path.insert(0, str(RUN.parent))
        runpy.run_path(str(RUN), run_name="__main__")
