"""Parts of bench/gpu.py: is what a GPU writes right? Each part is a function that yields its figures."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import torch
from bars import Bar, counted, failed, most, needs, safely
from replays import Replays

from llama_ssp import SamplingConfig, SpeculationConfig, load_pair
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.speculative.model_runner import ModelRunner
from tests.families import build

if TYPE_CHECKING:
    from gpu import How

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("eager", "compiled")
FP32 = ["model.dtype=fp32"]
OFF_BY = 1e-5  # of the largest logit: programs with a wrong size were off by 1.7e-3 and more
# Capacities of caches and lengths of texts: below, at and above whole buckets of 256 slots, full and not.
CACHES = ((20, 12), (255, 40), (256, 256), (300, 200), (300, 300), (512, 300), (1000, 40), (1000, 1000))
PROMPTS = ["def hello(name):", "7 * 8 =", "The capital of France is the largest of all the"]
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
# Of the kernel for codes, a case of each way to decode, and few and many rows; all have run on H200s before.
NEW_CODES = " or ".join(f"[{table}-{rows}]" for table in ("int8", "uint4", "nf4") for rows in (5, 100))
CONTROLS = {
    "top-k": SamplingConfig(temperature=0.9, top_k=20),
    "top-p": SamplingConfig(top_p=0.9),
    "min-p": SamplingConfig(min_p=0.05),
    "penalties": SamplingConfig(repetition_penalty=1.2, presence_penalty=0.3),
    "biases": SamplingConfig(logit_bias={10: 2.0, 11: -3.0}, bad_tokens=[12]),
    "all": SamplingConfig(
        temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, logit_bias={10: 1.0}
    ),
}
HEADS = ((32000, 4096), (128256, 2048))  # tokens and inputs of output matrices
SUMMED = 2.0**-15  # error of sums in fp32; rounded to bf16 or fp16 they have more than twice as much
# Tokens of prompts: in chunks of 512, of which the last one is a part, whole, or a single token.
LENGTHS = (513, 1024, 1500)
PROMPT = max(LENGTHS)
EARLY = 256  # tokens that a control changes
ROUNDED = 0.05  # error of a prompt in bf16; on a CPU it is 0.02, and with other first tokens 0.5 and more


def tests(how: How) -> Iterator[Bar]:
    """tests/gpu, four at a time, without cases that have run before; names and messages of those that fail.

    Those of sums in graphs and of every number format come first: no GPU has run them.
    """
    names = ["tests/gpu/test_ranks.py", "tests/gpu/test_steps.py"]
    if how.small:
        names = ["tests/test_profiled.py"]
    chosen = ["-k", f"not kernel_for_codes or {NEW_CODES}"]
    yield from _tested([*names, *chosen], how, "tests", "-n", "0" if how.small else "4")


def known_tests(how: How) -> Iterator[Bar]:
    """The cases of tests/gpu that `tests` leaves out."""
    names = ["tests/test_profiled.py"] if how.small else ["tests/gpu/test_steps.py"]
    chosen = [] if how.small else ["-k", f"kernel_for_codes and not ({NEW_CODES})"]
    yield from _tested([*names, *chosen], how, "known_tests", "-n", "0" if how.small else "4")


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
    yield Bar("tests that ran", len(cases), 1)
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


def _write(family: str, folder: Path, small: bool, dtype: torch.dtype = torch.float32) -> None:
    """A random checkpoint with the shipped tokenizer."""
    sizes: dict[str, Any] = {"hidden_size": 64 if small else 256, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 512, "vocab_size": 4096, "max_position_embeddings": 2048}
    if family == "mistral-window":
        sizes["sliding_window"] = WINDOW
    module = build(family, dtype=dtype, mild=True, **sizes)
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


def _text(
    pair: Any, prompts: list[str], k: int, length: int, sampling: SamplingConfig | None = None
) -> list[list[int]]:
    speculation = SpeculationConfig(k=k)
    done = pair.generate(
        prompts, max_new_tokens=length, sampling=sampling or SamplingConfig(), speculation=speculation, seed=7
    )
    return [completion.token_ids for completion in done]


def controlled(how: How) -> Iterator[Bar]:
    """Texts in fp32 under each sampling control are the same by each engine, also those of one row."""
    length = 5 if how.small else 40
    names = ("top-p", "all") if how.small else tuple(CONTROLS)
    written: dict[str, dict[str, list[Any]]] = {}
    for engine in ENGINES:
        words = [f"engine={engine}", *FP32, "draft.dtype=fp32"]
        with (
            Replays() as replays,
            load_pair("demo", "demo_draft", batch_size=3, max_tokens=300, overrides=words) as pair,
        ):
            for name, k, prompts in product(names, (0, 4), (PROMPTS[:1], PROMPTS)):
                texts_of_engine = written.setdefault(f"{name}, K = {k}", {}).setdefault(engine, [])
                texts_of_engine += _text(pair, prompts, k, length, CONTROLS[name])
    for what, by_engine in written.items():
        eager, compiled = by_engine["eager"], by_engine["compiled"]
        differing = sum(text != expected for text, expected in zip(compiled, eager, strict=True))
        yield counted(differing, len(eager), f"{what}: texts that differ between engines")
    yield from replays.bars("texts")


def numbers(how: How) -> Iterator[Bar]:
    """Products with an output in fp32, and prompts in chunks without a mask."""
    yield from safely("products in fp32", _in_fp32(how.small))
    yield from safely("a prompt in chunks", _in_chunks(how.small))


def _in_fp32(small: bool) -> Iterator[Bar]:
    """Products of an output matrix of 16 bit, compared with exact ones; a control has rounded ones."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    numbers = torch.Generator(device).manual_seed(0)
    for dtype, (outputs, inputs) in product((torch.bfloat16, torch.float16), HEADS):
        if small:
            outputs = 1000
        weight_NK = torch.randn(outputs, inputs, generator=numbers, device=device).to(dtype)
        weight_NK /= inputs**0.5
        for rows in (1, 5, 64):
            x_TK = torch.randn(rows, inputs, generator=numbers, device=device).to(dtype)
            exact_TN = x_TK.double() @ weight_NK.double().T
            logit_TN = torch.ops.llama_ssp.linear_in_fp32(x_TK, weight_NK)
            what = f"{str(dtype).removeprefix('torch.')}, {outputs} x {inputs}, {rows} rows"
            yield most(f"{what}: an output in fp32 is off by", _norm_off(logit_TN, exact_TN), SUMMED)
            rounded = _norm_off(exact_TN.to(dtype), exact_TN)
            yield Bar(f"{what}: control: a rounded one is off by", rounded, 2 * SUMMED)


def _in_chunks(small: bool) -> Iterator[Bar]:
    """Logits after prompts in bf16, with those of the same weights in fp32; a control has another chunk."""
    with tempfile.TemporaryDirectory() as folder:
        _write("llama-gqa", Path(folder), small, torch.bfloat16)
        logits_of: dict[str, list[torch.Tensor]] = {}
        for dtype in ("fp32", "bf16"):
            words = [f"model.dtype={dtype}", "engine=eager"]
            with load_pair(folder, max_tokens=PROMPT + 8, overrides=words) as pair:
                for first in (3, 4):
                    logits_of[f"{dtype}, {first}"] = _after_prompts(pair, first)
    for number, length in enumerate(LENGTHS):
        expected_V = logits_of["fp32, 3"][number]
        off = _norm_off(logits_of["bf16, 3"][number], expected_V)
        yield most(f"a prompt of {length} tokens: logits in bf16 off by", off, ROUNDED)
        other = _norm_off(logits_of["bf16, 4"][number], expected_V)
        yield Bar("control: off by, if the first tokens are others", other, 2 * ROUNDED)


def _after_prompts(pair: Any, first: int) -> list[torch.Tensor]:
    """Logits after prompts of LENGTHS, whose first EARLY tokens are drawn by `first`."""
    model = pair._session.models.target
    ids = torch.randint(3, 4000, (1, PROMPT + 1), generator=torch.Generator().manual_seed(1))
    early = torch.randint(3, 4000, (EARLY,), generator=torch.Generator().manual_seed(first))
    ids[0, :EARLY] = early
    ids = ids.to(model.device)
    result = []
    for length in LENGTHS:
        runner = ModelRunner(model)
        runner.start(1, PROMPT + 1)
        runner.prefill(ids, [length])
        result.append(runner.logits(ids, [length + 1], [1])[0, 0].float().cpu())
    return result


def _norm_off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


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
