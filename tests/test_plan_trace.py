"""The plan's closed form is what a trace of the runner's own modules finds, to the byte."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.plan import TARGET, Role
from llama_ssp.plan.bill import share_of
from llama_ssp.plan.forward import CACHE, Passes
from llama_ssp.plan.tape import Tape
from llama_ssp.plan.walk import TRACED, Kernels, packs_queries
from llama_ssp.plan.weights import Part, held
from llama_ssp.trace import Pass, Traced, trace

ROWS, CAPACITY = 2, 120
PASSES = [Pass(32, True), Pass(32, True), Pass(9, True), Pass(5), Pass(1)]
OWN: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 24}, "phi3": {}, "mistral": {"sliding_window": 11},
    "gemma2": {"sliding_window": 11, "tied": True}, "gpt_neox": {"n_kv_heads": 4},
    "opt": {"n_kv_heads": 4, "tied": True}, "gpt_neo": {"n_kv_heads": 4, "tied": True},
}  # fmt: skip
BIG = {
    "65B": (dict(n_layers=80, n_heads=64, n_kv_heads=64, dim=8192, ffn=22016, vocab=32000), 8, 0),
    "30B": (dict(n_layers=60, n_heads=52, n_kv_heads=52, dim=6656, ffn=17920, vocab=32000), 8, 7),
    "70B": (dict(n_layers=80, n_heads=64, n_kv_heads=8, dim=8192, ffn=28672, vocab=128256), 8, 3),
}


def model(family: str, **changes: Any) -> ModelConf:
    sizes: dict[str, Any] = {
        "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "dim": 128, "ffn": 344, "vocab": 500,
        "context": 256, **OWN[family], **changes,
    }  # fmt: skip
    return ModelConf(name=family, family=family, weights=Weights.synthetic, **sizes)


def closed(role: Role, passes: list[Pass], rows: int, capacity: int, world: int, rank: int) -> Traced:
    part = Part.of(role.model, world, rank)
    tape = Tape(apart=(CACHE,))
    share = share_of(role, part, capacity)
    walked = Passes(tape, part, role.dtype, rows, capacity, windowed=share.windowed, kernels=TRACED)
    peaks, fed = [], 0
    for number, step in enumerate(passes):
        tape.phase(str(number))
        fed += step.columns
        logits = walked.run(step.columns, fed, step.last_only)
        del logits
        peaks.append(sum(tape.peaks[str(number)].values()))
    caches = 2 * part.layers * walked.cells * walked.width
    return Traced(sum(held(part, role.dtype).values()), caches, tuple(peaks))


def compare(conf: ModelConf, dtype: Dtype, rows: int, capacity: int, world: int, rank: int) -> None:
    role = Role(TARGET, conf, dtype)
    found = trace(role, PASSES, rows, capacity, world, rank)
    assert closed(role, PASSES, rows, capacity, world, rank) == found


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_a_llama_is_planned_as_it_is_traced(world: int) -> None:
    compare(model("llama"), Dtype.bf16, ROWS, CAPACITY, world, 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1)])
def test_every_family_is_planned_as_it_is_traced(family: str, dtype: Dtype, world: int, rank: int) -> None:
    compare(model(family), dtype, ROWS, CAPACITY, world, rank)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "phi3", "qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("window", [None, 11])
def test_windows_are_planned_where_the_family_has_them(family: str, window: int | None) -> None:
    compare(model(family, sliding_window=window), Dtype.fp32, ROWS, CAPACITY, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kvs", [1, 2, 4])
def test_rows_and_key_heads(rows: int, kvs: int) -> None:
    """One row, and one key head, are looked at where others are copied."""
    for family in ("llama", "gemma2"):
        compare(model(family, n_kv_heads=kvs), Dtype.fp32, rows, CAPACITY, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG)
def test_large_models_at_every_depth(name: str) -> None:
    """Traced with two and three layers; depth is extrapolated."""
    sizes, world, rank = BIG[name]
    compare(model("llama", head_dim=128, context=2048, **sizes), Dtype.fp16, 1, 2048, world, rank)


@pytest.mark.slow
def test_depth_is_extrapolated_exactly() -> None:
    """What two and three layers say of five is what five say."""
    role = Role(TARGET, model("llama", n_layers=5), Dtype.bf16)
    short = trace(role, PASSES, ROWS, CAPACITY)
    whole = trace(role, PASSES, ROWS, CAPACITY, depths=(5,))
    assert short == whole


@pytest.mark.parametrize(
    ("installed", "packs"), [("5.17.0", False), ("5.23.0", True), ("6.0.0.dev0", True), (None, False)]
)
def test_the_bill_is_that_of_the_modules_that_are_installed(
    installed: str | None, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated keys of a single token's pass are billed where they are repeated, or nobody can tell."""

    def version(_: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(metadata, "version", version)
    role = Role(TARGET, model("llama"), Dtype.bf16)
    assert packs_queries() is packs
    monkeypatch.setattr("tests.test_plan_trace.TRACED", Kernels(cpu=True))
    last = closed(role, PASSES, ROWS, CAPACITY, 1, 0).peaks[-1]
    monkeypatch.setattr("tests.test_plan_trace.TRACED", Kernels(cpu=True, packs=True))
    assert (last > closed(role, PASSES, ROWS, CAPACITY, 1, 0).peaks[-1]) is not packs
