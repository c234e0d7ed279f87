"""Parts of bench/gpu.py: is what a GPU writes right? Each part is a function that yields its figures.

As a script it is a rank of the command that runs out of memory, started by torchrun.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import torch
from bars import Bar, counted, failed, most, needs, safely

from llama_ssp import SamplingConfig, SpeculationConfig, load_pair
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.speculative.model_runner import ModelRunner
from tests.families import build

if TYPE_CHECKING:
    from gpu import How

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "launch" / "run.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENGINES = ("eager", "compiled")
FP32 = ["model.dtype=fp32"]
OFF_BY = 1e-5  # of the largest logit: programs with a wrong size were off by 1.7e-3 and more
# Capacities of caches and lengths of texts: below, at and above whole buckets of 256 slots, full and not.
CACHES = ((20, 12), (255, 40), (256, 256), (300, 200), (300, 300), (512, 300), (1000, 40), (1000, 1000))
PROMPTS = ["def hello(name):", "7 * 8 =", "The capital of France is the largest of all the"]
FEW_BYTES = 0.01  # of the GPU's memory, for the rank that runs out of it
WINDOW = 64  # tokens that a family with windows sees
ENDING_S = 15  # for pytest, to write its report
LINES = 12  # of a failing test's message
SMALLEST = [  # cases of each kernel
    f"tests/gpu/test_steps.py::test_{name}"
    for name in (
        "attention[7-dtype0-1e-05]",
        "the_kernel_for_codes[int8-1]",
        "experts[None-1-4-2-dtype0-1e-05]",
    )
]
LIMIT_S = 100 if torch.cuda.is_available() else 400  # of a command


def tests(how: How) -> Iterator[Bar]:
    """tests/gpu, four at a time; names and messages of those that fail."""
    given = ["tests/test_profiled.py"] if how.small else ["tests/gpu"]
    yield from _tested(given, how, "tests", "-n", "0" if how.small else "4")


def again(how: How) -> Iterator[Bar]:
    """The tests that failed in an earlier call, each alone."""
    names = [bar.what for bar in how.earlier("tests") if bar.met is False and "::" in bar.what]
    if names:
        yield from _tested(names, how, "again", "-n", "0")
    else:
        yield Bar("tests that had failed", 0)


def races(how: How) -> Iterator[Bar]:
    """The smallest case of each kernel under compute-sanitizer: bad addresses, and races of shared memory."""
    for tool in ("memcheck", "racecheck"):
        checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        python = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SMALLEST]
        done = subprocess.run([*checker, *python], cwd=ROOT, capture_output=True, text=True)
        note = "\n".join(done.stdout.splitlines()[-LINES:]) if done.returncode else ""
        yield most(f"{tool}: exit code", done.returncode, 0, note)


def _tested(names: list[str], how: How, report: str, *words: str) -> Iterator[Bar]:
    """Runs pytest; if its time ends it is interrupted, and says what has ended so far."""
    file = how.folder / f"{report}.xml"
    command = [sys.executable, "-m", "pytest", *names, "-q", "-p", "no:cacheprovider", f"--junitxml={file}"]
    words = tuple(word for word in words if find_spec("xdist"))
    timeout = ["--timeout=90"] if find_spec("pytest_timeout") else []
    with (how.folder / f"{report}.txt").open("w+") as out:
        process = subprocess.Popen([*command, *words, *timeout], cwd=ROOT, stdout=out, stderr=out)
        try:
            process.wait(how.limit_s - ENDING_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it writes its report
            yield failed(report, "stopped before the last test")
            process.wait(ENDING_S / 2)
    yield from junit(file)


def junit(file: Path) -> Iterator[Bar]:
    """A figure for each test that failed, with the last lines of its message, and how many there were."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    count = 0
    for case in cases:
        problems = [*case.iter("failure"), *case.iter("error")]
        for problem in problems[:1]:
            count += 1
            place = case.get("classname", "").replace(".", "/")
            lines = (problem.text or problem.get("message", "")).strip().splitlines()
            yield Bar(f"{place}.py::{case.get('name')}", 0, 1, note="\n".join(lines[-LINES:]))
    yield counted(count, len(cases), "tests that fail")
    yield Bar("tests that were skipped", sum(case.find("skipped") is not None for case in cases))


def logits(how: How) -> Iterator[Bar]:
    """Logits of each engine through load_pair; the random models read the whole text before a token."""
    for family in ("llama-gqa",) if how.small else ("llama-gqa", "mistral-window"):
        yield from safely(family, _logits_of(family, how.small))


def _logits_of(family: str, small: bool) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        _write(family, Path(folder), small)
        words = {engine: [f"engine={engine}", *FP32] for engine in ENGINES}
        eager, compiled = (
            stack.enter_context(load_pair(folder, batch_size=3, max_tokens=1000, overrides=words[engine]))
            for engine in ENGINES
        )
        for capacity, length in CACHES[::4] if small else CACHES:
            off = []
            for rows, width in product((1, 3), (1, 5)):
                case = rows, capacity, length, width
                expected, found = (_logits(pair, *case) for pair in (eager, compiled))
                off.append((_off(found, expected), _off(_logits(eager, *case, other=True), expected)))
            what = f"{family}, capacity {capacity}, length {length}: logits off by, of the largest"
            yield most(what, max(one for one, _ in off), OFF_BY)
            least = min(one for _, one in off)
            yield Bar("control: off by, if an early token is another", least, 100 * OFF_BY)


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _write(family: str, folder: Path, small: bool) -> None:
    """A random checkpoint with the shipped tokenizer."""
    sizes: dict[str, Any] = {"hidden_size": 64 if small else 256, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 512, "vocab_size": 4096, "max_position_embeddings": 2048}
    if family == "mistral-window":
        sizes["sliding_window"] = WINDOW
    module = build(family, mild=True, **sizes)
    module.save_pretrained(folder)
    for file in (SHIPPED_FOLDER / "demo").glob("tokenizer*"):
        shutil.copy(file, folder)


def _logits(
    pair: Any, rows: int, capacity: int, length: int, width: int, other: bool = False
) -> torch.Tensor:
    """The logits of each row's last `width` tokens, by the runner of the engine; rows differ in length."""
    model = pair._session.models.target
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, 4000, (rows, capacity), generator=generator)
    ends = [max(length - 3 * row, width + 1) for row in range(rows)]
    if other:
        for row, end in enumerate(ends):
            ids[row, max(end - width - WINDOW // 2, 0)] += 1  # every family sees it
    runner = ModelRunner(model)
    runner.start(rows, capacity)
    ids = ids.to(model.device)
    runner.prefill(ids, [end - width for end in ends])
    return runner.logits(ids, ends, [width] * rows).float().cpu()


def texts(how: How) -> Iterator[Bar]:
    """Sampled texts of the shipped pair in fp32: the same by each engine, from one pair for all of them."""
    lengths = (5,) if how.small else (5, 40, 600)
    for rows in (3,) if how.small else (1, 3):
        yield from safely(f"texts of {rows} rows", _texts_of(rows, lengths))
    if not how.small:
        yield from safely("texts with demo_head", _texts_with_head())


def _texts_of(rows: int, lengths: tuple[int, ...]) -> Iterator[Bar]:
    cuda, captures = torch.cuda.is_available(), _Captures()
    written: dict[str, dict[str, list[Any]]] = {}
    for engine in ENGINES:
        words = [f"engine={engine}", *FP32, "draft.dtype=fp32"]
        with load_pair("demo", "demo_draft", batch_size=rows, max_tokens=1000, overrides=words) as pair:
            for room in (2, 3, 4):  # the last rounds of a text draft fewer tokens: they are captured here
                _text(pair, PROMPTS[:1], 4, room)
            captures.news()
            for k, prompts in product((0, 4), [[one] for one in PROMPTS] if rows == 1 else [PROMPTS]):
                own = written.setdefault(f"K = {k}", {}).setdefault(engine, [])
                own += [_text(pair, prompts, k, length) for length in lengths]
                if cuda and rows == 1 and engine == "compiled":
                    captures.after(f"K = {k}")
    for key, by in written.items():
        differing = sum(a != b for a, b in zip(*by.values(), strict=True))
        yield counted(differing, len(by["eager"]), f"rows {rows}, {key}: texts that differ between engines")
    if rows == 1:
        yield from captures.bars() if cuda else [needs("captures of the second and third prompt")]


def _texts_with_head() -> Iterator[Bar]:
    found = []
    for engine in ENGINES:
        words = [f"engine={engine}", *FP32, "draft.dtype=fp32"]
        with load_pair("demo", "demo_head", max_tokens=200, overrides=words) as pair:
            found.append([_text(pair, [prompt], 4, 40) for prompt in PROMPTS])
    differing = sum(a != b for a, b in zip(*found, strict=True))
    yield counted(differing, len(PROMPTS), "demo_head: texts that differ between engines")


def _text(pair: Any, prompts: list[str], k: int, length: int) -> list[list[int]]:
    how = {"sampling": SamplingConfig(), "speculation": SpeculationConfig(k=k), "seed": 7}
    return [one.token_ids for one in pair.generate(prompts, max_new_tokens=length, **how)]


class _Captures:
    """Counts the graphs that are captured, and the memory that stays reserved."""

    def __init__(self) -> None:
        self._count, self._known = 0, 0
        self._found: dict[str, list[tuple[int, float]]] = {}
        begin: Any = torch.cuda.CUDAGraph.capture_begin

        def counting(*args: Any, **how: Any) -> Any:
            self._count += 1
            return begin(*args, **how)

        torch.cuda.CUDAGraph.capture_begin = counting  # type: ignore[method-assign]

    def news(self) -> int:
        """Captures since the last call."""
        new, self._known = self._count - self._known, self._count
        return new

    def after(self, key: str) -> None:
        """A prompt has been continued."""
        self._found.setdefault(key, []).append((self.news(), torch.cuda.memory_reserved() / 2**20))

    def bars(self) -> Iterator[Bar]:
        for key, found in self._found.items():
            (first, before), *later = found
            yield Bar(f"{key}: captures while the first prompt is continued", first)
            yield most(f"{key}: captures of the later prompts", sum(new for new, _ in later), 0)
            yield most(f"{key}: MiB reserved more after the last prompt", later[-1][1] - before, 0)


def ranks(how: How) -> Iterator[Bar]:
    """Two ranks on one GPU, over gloo: the text is that of one process."""
    engine, tokens = ("eager", 12) if how.small else ("compiled", 200)
    new = f"task.max_new_tokens={tokens}"
    alone = _ran([str(RUN), *_words("eager"), new]).texts()
    for placement in ("own",) if how.small else ("leader", "sharded", "own"):
        done = _ran([*TORCHRUN, str(RUN), *_words(engine), new, f"placement={placement}"])
        wrong = sum(a != b for a, b in zip(done.texts(), alone, strict=True))
        what = f"{placement}: texts unlike those of one process"
        yield most(what, wrong, 0, "; ".join([f"{done.seconds:.0f} s", *done.errors()])[:160])
    if not torch.cuda.is_available():
        yield needs("sharded in 8 bit: commands that fail")
        return
    words = [*_words(engine), "model.dtype=int8", "placement=sharded", new]
    done = _ran([*TORCHRUN, str(RUN), *words])
    what = "sharded in 8 bit: commands that fail"
    yield most(what, int(done.code != 0), 0, "; ".join(done.errors())[:160])


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


def faults(how: How) -> Iterator[Bar]:
    """A rank that is killed, and one that runs out of memory: all end, with one line that says why."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fault = {"FAULT": "SIGKILL,verify,other rank", "PYTHONPATH": path}
    words = [*_words("eager"), "placement=leader"]
    done = _ran([*TORCHRUN, "-m", "tests.distributed.faults", *words], **fault)
    struck = float((done.folder / "struck").read_text()) if (done.folder / "struck").exists() else 0.0
    yield from _ended("a killed rank", done, "is gone")
    yield most("a killed rank: seconds until all have ended", done.ended - struck, 10)
    if not torch.cuda.is_available():
        yield needs("a rank without memory: ends otherwise than with one line that says so")
        return
    model = [
        "model=7B",
        "model.weights=synthetic",
        "draft=none",
        "placement=sharded",
        "out=null",
        "prompt=1 2",
    ]
    yield from _ended("a rank without memory", _ran([*TORCHRUN, __file__, *model]), "memory")


def _ended(what: str, done: _Done, said: str) -> Iterator[Bar]:
    errors = done.errors()
    wrong = done.code == 0 or len(errors) != 1 or said not in errors[0]
    what = f"{what}: ends otherwise than with one line that says so"
    yield most(what, int(wrong), 0, "; ".join(errors)[:200] or done.last())


class _Done:
    """A command that has ended."""

    def __init__(self, code: int, out: str, err: str, seconds: float, folder: Path) -> None:
        self.code, self._out, self._err, self.seconds, self.folder = code, out, err, seconds, folder
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
        return [one["token_ids"] for one in json.loads(self._out.splitlines()[-1])["outputs"]]


def _words(engine: str) -> list[str]:
    given = json.dumps(PROMPTS)
    how = ["model.dtype=fp32", "draft.dtype=fp32", f"engine={engine}", "seed=5", "out=null", "output=json"]
    return [f"task.prompts={given}", *how]


def _ran(words: list[str], **env: str) -> _Done:
    """Python with these words, in a folder of its own; code 124 if it does not end."""
    folder = Path(tempfile.mkdtemp())
    began = time.monotonic()
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdout=out, stderr=err, env={**os.environ, **threads, **env}
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
    if os.environ["RANK"] == "1":
        torch.cuda.set_per_process_memory_fraction(FEW_BYTES, 0)
    sys.path.insert(0, str(RUN.parent))
    runpy.run_path(str(RUN), run_name="__main__")
