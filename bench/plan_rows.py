"""The rows of bench/plan_speed.py, by groups, and which of them are held out. No torch.

Of each group every second row, in the order of names, is held out: constants are chosen by the others alone.
The held-out names stand in plan_held_out.txt. That list was committed before any constant was chosen by it,
and a test compares it with this rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

HELD_OUT = Path(__file__).with_name("plan_held_out.txt")
REAL_MODELS = "smollm2", "gemma"
REGULAR = "regular"
INT4 = "int4 draft"
NGRAMS = "n-grams"
DRAFTING = REGULAR, INT4, NGRAMS
ENGINES = "eager", "compiled"
FORMATS = "bf16", "packed"
CORES = (1, 1), (2, 1), (1, 2), (1, 3)  # threads of a process, and ranks
# (layers, width, vocabulary) of a synthetic target, and (layers, width) of its draft.
SHAPES = [
    ((6, 512, 4096), (2, 256)),
    ((12, 512, 8192), (2, 256)),
    ((4, 1024, 8192), (2, 384)),
    ((8, 1024, 16000), (2, 512)),
    ((16, 768, 32000), (3, 384)),
    ((6, 1536, 8192), (2, 512)),
    ((24, 640, 4096), (4, 320)),
]
MANY_ROWS = 1, 8, 32

# Tokens a second that gpt-fast's README has: bf16, one row, a prompt of 5 tokens, by GPUs. A100-80 limited to
# 330 W. Those of llama2-7b gave the plan's four constants before this list was made.
PUBLISHED = {
    "llama2-7b": {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43},
    "llama2-70b": {2: 21.32, 4: 38.01, 8: 62.50},
    "llama3.1-8b": {1: 94.19, 2: 150.48, 4: 219.77, 8: 274.65},
    # A later version of the README. Nobody explains its row of 2 GPUs, which is slower than the older 70B's.
    "llama3.1-70b": {2: 16.03, 4: 37.45, 8: 58.78},
}

# One stream in plain decoding, as others published it: the engine and its source, the preset of the model and
# of the machine, GPUs, number format, tokens a second. Nobody says how long the prompts were.
OTHER_ENGINES = (
    ("gpt-fast, README", "llama2-7b", "p4de", 1, "int8", 155.6),
    ("gpt-fast, README", "llama2-7b", "p4de", 1, "int4", 196.8),
    ("gpt-fast, README", "llama3.1-8b", "p4de", 1, "int8", 137.6),
    ("gpt-fast, README", "llama2-70b", "p4de", 1, "int4", 25.25),
    ("gpt-fast, README", "llama3.1-70b", "p4de", 8, "int8", 78.0),  # 75.6 to 80.4
    ("gpt-fast, README", "llama3.1-70b", "p4de", 8, "int4", 90.8),
    ("torchao, ao#392", "llama3.1-8b", "p4de", 1, "bf16", 94.9),
    ("torchao, ao#392", "llama3.1-8b", "p4de", 1, "int8", 136.8),
    ("torchao, ao#392", "llama3.1-8b", "p4de", 1, "int4", 179.4),
    ("EAGLE with gpt-fast, README", "llama2-13b", "p4de", 1, "bf16", 33.2),
    ("EAGLE with gpt-fast, README", "llama2-13b", "p4de", 1, "int4", 47.4),
    ("SGLang, its documentation", "llama3.1-8b", "dgx_h100", 1, "bf16", 158.3),
    ("SGLang, sglang#4716", "llama3.3-70b", "dgx_h100", 8, "bf16", 88.6),
    ("SGLang, EAGLE#228", "qwen3-8b", "h200x8", 1, "bf16", 186.0),
    ("SGLang, EAGLE#228", "qwen3-30b-a3b", "h200x8", 1, "bf16", 147.0),
    ("SGLang, SpecForge#339", "qwen3-30b-a3b", "dgx_h100", 2, "bf16", 222.0),
    ("SGLang, SpecForge#339", "qwen3-30b-a3b", "dgx_h100", 4, "bf16", 219.0),
    ("vLLM, vllm#16937", "llama3.1-8b", "dgx_h100", 1, "bf16", 133.0),
    ("vLLM 0.31, vllm#62258", "qwen3-8b", "dgx_h100", 1, "bf16", 124.7),
    ("vLLM, vllm#12101", "llama3.3-70b", "dgx_h100", 4, "bf16", 52.3),
    ("vLLM, llm-d#2074, 1 request a second", "qwen3-32b", "h200x8", 2, "bf16", 75.8),
)


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """What another engine does in plain decoding: for information, by the plan of this engine."""

    source: str
    model: str
    machine: str
    gpus: int
    dtype: str
    tokens_per_s: float

    @property
    def name(self) -> str:
        return f"{self.source}: {self.model} {self.dtype} on {self.gpus} of {self.machine}"


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A row of gpt-fast's README."""

    model: str
    gpus: int
    tokens_per_s: float

    @property
    def name(self) -> str:
        return f"{self.model} on {self.gpus}"


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """A figure of bench/gpu.py on an H200: its part and its name there, in the results file of one run.

    `tokens` of one row are fed to a step after `slots`. A round has K drafts; `engine` is that of all steps.
    """

    run: str
    part: str
    figure: str
    model: str
    tokens: int = 1
    slots: int = 64
    engine: str = "compiled"
    dtype: str = "bf16"
    draft: str | None = None
    k: int | None = None

    @property
    def name(self) -> str:
        where = f"{self.run} run, {self.part}, {self.model}"
        if self.k is not None:
            return f"{where} with {self.draft}, a round of K = {self.k}"
        tokens = f"{self.tokens} token{'s' if self.tokens > 1 else ''}"
        return f"{where} {self.dtype}, {self.engine}, {self.slots} slots, a step of {tokens}"


@dataclass(frozen=True, kw_only=True)
class SyntheticRow:
    """A synthetic pair on this machine, with the steps of `engine`, by `threads` threads."""

    target: tuple[int, int, int]
    draft: tuple[int, int] | None
    rows: int
    engine: str
    threads: int

    @property
    def name(self) -> str:
        layers, width, vocabulary = self.target
        drafts = "regular" if self.draft is None else f"{self.draft[0]}x{self.draft[1]} drafts"
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        return f"{layers}x{width}/{vocabulary}, {self.engine}, {threads_of(self.threads)}, {rows}, {drafts}"


@dataclass(frozen=True, kw_only=True)
class RealRow:
    """A published model on this machine, over `ranks` processes of `threads` threads each."""

    model: str
    dtype: str
    engine: str
    drafting: str
    threads: int
    ranks: int = 1

    @property
    def name(self) -> str:
        who = f"{self.ranks} ranks" if self.ranks > 1 else threads_of(self.threads)
        return f"{self.model}, {self.dtype}, {self.engine}, {self.drafting}, {who}"


Row = PublishedRow | GpuRow | EngineRow | SyntheticRow | RealRow


def threads_of(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def published_rows() -> list[PublishedRow]:
    return [
        PublishedRow(model=model, gpus=gpus, tokens_per_s=rate)
        for model, rates in PUBLISHED.items()
        for gpus, rate in rates.items()
    ]


def engine_rows() -> list[EngineRow]:
    return [
        EngineRow(
            source=source,
            model=model,
            machine=machine,
            gpus=gpus,
            dtype=dtype,
            tokens_per_s=rate,
        )
        for source, model, machine, gpus, dtype, rate in OTHER_ENGINES
    ]


def gpu_rows() -> list[GpuRow]:
    """Returns the figures of two runs on H200s that a plan can be compared with."""
    rows = []
    for engine, slots, tokens in product(("compiled", "eager"), (64, 2048, 8192, 32000), (1, 2, 5)):
        figure = f"{engine}, {slots} slots, {tokens} tokens: share of the bandwidth"
        rows.append(
            GpuRow(
                run="first",
                part="steps",
                figure=figure,
                model="7B",
                tokens=tokens,
                slots=slots,
                engine=engine,
            )
        )
    for slots, tokens in product((64, 2048, 32000), (1, 2, 5)):
        figure = f"{slots} slots, {tokens} tokens: ms of a step"
        rows.append(GpuRow(run="second", part="steps", figure=figure, model="7B", tokens=tokens, slots=slots))
    rows.append(GpuRow(run="second", part="steps", figure="ms of a draft step", model="llama3.2-1b"))
    for dtype, tokens in product(("bf16", "int4"), (1, 5)):
        figure = f"{dtype}: ms of a step of {tokens} tokens"
        rows.append(GpuRow(run="second", part="codes", figure=figure, model="7B", tokens=tokens, dtype=dtype))
    for run, k in product(("first", "second"), (0, 2, 4, 6)):
        rows.append(
            GpuRow(run=run, part="steps", figure=f"K = {k}: ms/token", model="7B", draft="llama3.2-1b", k=k)
        )
    for k in (0, 4):
        rows.append(
            GpuRow(run="second", part="large", figure=f"K = {k}: ms/token", model="30B", draft="7B", k=k)
        )
    return rows


def synthetic_rows() -> list[SyntheticRow]:
    """Returns eager steps of one thread, with drafts and without, and compiled ones of two and many rows."""
    rows = []
    for target, draft in SHAPES:
        for drafts in (None, draft):
            rows.append(SyntheticRow(target=target, draft=drafts, rows=1, engine="eager", threads=1))
        for count in MANY_ROWS:
            rows.append(SyntheticRow(target=target, draft=None, rows=count, engine="compiled", threads=2))
    return rows


def real_rows() -> list[RealRow]:
    """Returns what runs of two published models are: how they draft, by 1 and 2 threads, and over ranks.

    Weights in codes of 4 bits have no draft of their own in 4 bits.
    """
    rows = []
    for model, dtype, engine in product(REAL_MODELS, FORMATS, ENGINES):
        for drafting, (threads, ranks) in product(DRAFTING, CORES):
            is_drafted = drafting == INT4 and (dtype == "packed" or ranks > 1)
            if is_drafted or (drafting == NGRAMS and ranks > 2):
                continue
            rows.append(
                RealRow(
                    model=model,
                    dtype=dtype,
                    engine=engine,
                    drafting=drafting,
                    threads=threads,
                    ranks=ranks,
                )
            )
    return rows


GROUPS = {
    "a100": published_rows,
    "h200": gpu_rows,
    "engines": engine_rows,
    "synthetic": synthetic_rows,
    "real": real_rows,
}
FOR_INFORMATION = ("engines",)  # groups of which nothing is held out: no constant is chosen by them


def every_second(rows: Sequence[Row]) -> list[str]:
    """Returns the names that are held out of a group: every second one, sorted."""
    return sorted(row.name for row in rows)[1::2]


def held_out() -> set[str]:
    """Returns the committed names."""
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if line.startswith("  ")}
