"""Kernels for GPUs: they compile for every generation, and the interpreter gives the reference's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from llama_ssp.config import Dtype  # noqa: E402
from llama_ssp.models import experts  # noqa: E402
from llama_ssp.models.attention import NO_SIDES, Pass, Scores, Sides, attend_rows  # noqa: E402
from llama_ssp.models.kernels import attention, attention_triton, coded_triton, experts_triton  # noqa: E402
from llama_ssp.models.kernels.build import triton_runs  # noqa: E402
from llama_ssp.models.kernels.coded import available  # noqa: E402
from llama_ssp.models.steps import has_kernels  # noqa: E402

tl = triton.language
CPU = torch.device("cpu")
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # KiB that a program may have


def coded(
    table: str, group: int, rows: int, scale: str, offset: str | None = None, bias: str | None = None
) -> dict[str, Any]:
    """The arguments of the kernel for codes: their types, and the constants among them."""
    pointers = {"x_ptr": "*bf16", "code_ptr": "*u8", "table_ptr": "*fp32", "scale_ptr": f"*{scale}"}
    others = {"offset_ptr": offset and f"*{offset}", "bias_ptr": bias, "y_ptr": "*bf16"}
    sizes = dict.fromkeys(("rows", "outputs", "inputs", "bytes_", "groups", "group"), "i32")
    chosen = coded_triton.constants(rows, 4096, group, table, True)
    return {**pointers, **others, **sizes, **chosen, "FACTORS": tl.bfloat16}


def parts(
    size: int, kind: str, tokens: int, groups: int, group: int, window: int = 0, softcap: float = 0.0
) -> dict[str, Any]:
    """Of attention's first kernel, as `attend` calls it."""
    bytes_ = {"bf16": 2, "fp16": 2, "fp32": 4}[kind]
    pointers = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), f"*{kind}")
    places = dict.fromkeys(("first_ptr", "position_ptr", "slot_ptr"), "*i64")
    sums = dict.fromkeys(("sum_ptr", "top_ptr", "total_ptr"), "*fp32")
    scores = {"SCALE": 0.125, "WINDOW": window, "SOFTCAP": softcap}
    sizes = attention_triton.constants(tokens, group, size, bytes_)
    counts = {"tokens": "i32", "slots": "i32", "PARTS": attention_triton.parts_of(tokens, groups)}
    return {**pointers, **places, **sums, **scores, **sizes, **counts}


def merged(size: int, kind: str, tokens: int, groups: int, sinks: str | None) -> dict[str, Any]:
    """Of attention's second kernel."""
    first = parts(size, kind, tokens, groups, 4, softcap=50.0 if sinks else 0.0)
    sums = ("sum_ptr", "top_ptr", "total_ptr")
    others = ("query_ptr", "key_ptr", "value_ptr", "first_ptr", "position_ptr", "slot_ptr", "slots")
    same = ("SCALE", "SOFTCAP", "GROUP", "SIZE", "PADDED", "PARTS")
    return {
        **{name: first[name] for name in sums}, "sink_ptr": sinks, "y_ptr": f"*{kind}", "heads": "i32",
        **{name: first[name] for name in (*others, *same)}, "CHUNK": attention_triton.CHUNK,
    }  # fmt: skip


def chosen(kind: str, tokens: int, top_k: int, own_rows: bool, bias: bool) -> dict[str, Any]:
    """Of the products with experts: of tokens, or of pairs, which have rows of their own."""
    pairs, bytes_ = tokens * top_k, 4 if kind == "fp32" else 2
    pointers = {"x_ptr": f"*{kind}", "expert_ptr": "*i64", "weight_ptr": f"*{kind}"}
    others = {"bias_ptr": f"*{kind}" if bias else None, "y_ptr": f"*{kind}"}
    sizes = dict.fromkeys(("pairs", "outputs", "inputs"), "i32")
    rows = pairs if own_rows else tokens
    return {**pointers, **others, **sizes, **experts_triton.constants(pairs, rows, bytes_)}


def of_codes(
    table: str, group: int, rows: int, *others: Any, **bias: Any
) -> tuple[Any, dict[str, Any], int, int]:
    """The kernel, its arguments, its warps and its stages."""
    arguments = coded(table, group, rows, *others, **bias)
    kernel = coded_triton.multiply_few if "PARTS" in arguments else coded_triton.multiply
    return kernel, arguments, *coded_triton.how(rows, arguments)


WAYS = experts_triton.WARPS, experts_triton.STAGES
HOW = attention_triton.WARPS, attention_triton.STAGES
KERNELS: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "llm-int8": of_codes("int8", 4096, 5, "fp32", bias="*bf16"),
    "fp8": of_codes("e4m3", 128, 5, "fp32"),
    "awq": of_codes("uint4", 128, 9, "fp16", "u8"),
    "awq-prompt": of_codes("uint4", 128, 512, "fp16", "u8"),
    "q4_k": of_codes("uint4", 32, 5, "fp32", "fp32"),
    "mxfp4": of_codes("e2m1", 32, 5, "bf16", None, "*bf16"),
    "nf4-prompt": of_codes("nf4", 4096, 17, "fp32"),
    "e5m2": of_codes("e5m2", 128, 9, "fp32"),
    "llama": (attention_triton.attend_part, parts(128, "bf16", 1, 8, 4), *HOW),
    "llama-verify": (attention_triton.attend_part, parts(128, "fp16", 9, 8, 8), *HOW),
    "gemma2": (attention_triton.attend_part, parts(256, "bf16", 5, 4, 2, 4096, 50.0), *HOW),
    "odd": (attention_triton.attend_part, parts(80, "fp32", 5, 32, 1), *HOW),
    "mixtral": (experts_triton.multiply, chosen("bf16", 1, 2, False, False), *WAYS),
    "qwen3-moe": (experts_triton.multiply, chosen("fp16", 128, 8, True, False), *WAYS),
    "gpt-oss": (experts_triton.multiply, chosen("fp32", 5, 4, False, True), *WAYS),
    "merge": (attention_triton.merge_parts, merged(128, "bf16", 5, 8, None), *HOW),
    "merge-sinks": (attention_triton.merge_parts, merged(80, "fp32", 5, 1, "*fp32"), *HOW),
}


def compiled(kernel: Any, arguments: dict[str, Any], generation: int, warps: int, stages: int) -> Any:
    """The kernel for a GPU of this generation; pointers are those of whole tensors, so they are aligned."""
    constants = {name: given for name, given in arguments.items() if not isinstance(given, str)}
    signature = {name: "constexpr" if name in constants else given for name, given in arguments.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }  # fmt: skip
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)


@pytest.mark.few(3)  # a second each, unless triton's cache has it
@pytest.mark.parametrize(
    ("name", "generation"),
    [
        (name, generation)
        for number, name in enumerate(KERNELS)
        for generation in ((80, 89)[number % 2], 86, 90, 100)
    ],
)
def test_kernels_compile(name: str, generation: int):
    """For 80, 86 and 89 Triton has one code generator; 86 and 89 have the least memory."""
    kernel, arguments, warps, stages = KERNELS[name]
    found = compiled(kernel, arguments, generation, warps, stages)
    assert "cubin" in found.asm
    assert found.metadata.shared <= SHARED[generation] * 1024


# Head size, heads, KV heads; window, soft cap, sinks; of each row its first slot, its start and its tokens.
RAGGED = [(0, 5, 3), (20, 0, 1), (100, 70, 5), (300, 99, 1)]
CASES: list[tuple[int, int, int, int | None, float | None, bool, list[tuple[int, int, int]]]] = [
    (64, 2, 2, None, None, False, RAGGED),
    (80, 6, 2, 11, None, True, RAGGED),
    (96, 8, 1, None, 3.0, False, RAGGED),
    (128, 4, 1, 40, 3.0, True, RAGGED),
    (256, 2, 1, 30, None, False, RAGGED),
    (64, 71, 1, None, None, True, RAGGED[:2]),  # more heads than a product has rows
    (16, 8, 2, 20, None, False, [(40, 37, 40), (0, 3, 1)]),  # more tokens than a program serves
    (64, 2, 1, None, None, False, [(7, 0, 1)]),
]
SIDES = [Sides(2, 2, 405), NO_SIDES, Sides(4, 1, 410), NO_SIDES]  # of RAGGED


def inputs(case: int, siblings: bool = True) -> tuple[Pass, tuple[Any, ...]]:
    """Random arguments of `attend`; what has not been written, or is stale, is NaN."""
    size, heads, groups, window, softcap, sinks, rows = CASES[case]
    torch.manual_seed(case)
    feed = Pass.of(rows, CPU, sides=SIDES if siblings and rows is RAGGED else None)
    query_THD = torch.randn(len(feed.position_T), heads, size)
    caches = [torch.full((groups, 420, size), torch.nan) for _ in "kv"]
    for first, start, count in rows:
        for cache_GND in caches:
            written = slice(first, first + start + count)
            cache_GND[:, written] = torch.randn(groups, start + count, size)
    for cache_GND in caches if feed.sides else ():
        cache_GND[:, 405:414] = torch.randn(groups, 9, size)
    scores = Scores(2 * size**-0.5, window, softcap)
    return feed, (query_THD, *caches, scores, torch.randn(heads) if sinks else None)


def by_kernel(
    feed: Pass, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """`Pass.attend` by the kernel for GPUs."""
    numbers = scores.scale, scores.window or 0, scores.softcap or 0.0
    return attention_triton.attend(
        query, keys, values, feed.first_T, feed.position_T, feed.slot_T, *numbers, sinks
    )


@pytest.mark.long  # a minute in the interpreter
@pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"),
    reason="this Triton's interpreter takes numpy below 2.4",
)
def test_kernels_are_those_of_the_reference():
    """In one process of its own: triton decides at its import whether to interpret."""
    code = "\n".join(
        [
            "from tests import test_coded_linear, test_triton",
            *(f"test_triton.{function.__name__}()" for function in REQUIRED),
            "test_coded_linear.require_kernel_for_gpus()",
        ]
    )
    where = Path(__file__).resolve().parents[1]
    subprocess.run(
        [sys.executable, "-c", code], cwd=where, check=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )


def small() -> None:
    """Parts and tiles of a few slots, so that short texts have several."""
    attention_triton.UNIT, attention_triton.TILE_BYTES = 32, 4096
    attention_triton.PROGRAMS = attention_triton.LEAST_PARTS = 4


def require_attention() -> None:
    """And a kernel that looks one slot too far, has no sinks or no soft cap, or reads a NaN, is found out."""
    small()
    for case in range(len(CASES)):
        feed, (*tensors, scores, sinks) = inputs(case)
        expected = attend_rows(feed, *tensors, scores, sinks)
        torch.testing.assert_close(by_kernel(feed, *tensors, scores, sinks), expected, rtol=1e-5, atol=1e-5)
    feed, (*tensors, scores, sinks) = inputs(3)
    expected = attend_rows(feed, *tensors, scores, sinks)
    for other, own in (
        (Scores(scores.scale, 41, scores.softcap), sinks), (Scores(scores.scale, 40), sinks), (scores, None),
    ):  # fmt: skip
        assert not torch.allclose(by_kernel(feed, *tensors, other, own), expected, rtol=1e-3, atol=1e-3)
    tensors[2][:, 100 + 60] = torch.nan  # seen by the third row alone
    damaged_T = by_kernel(feed, *tensors, scores, sinks).isnan().any(-1).all(-1)
    assert torch.equal(damaged_T, feed.first_T == 100)


def require_one_reading() -> None:
    """Attention's, of all tokens of a row and all heads of a KV head together; a window alone, in tiles."""
    from triton.runtime.interpreter import InterpreterBuilder

    small()
    feed, (*tensors, _, sinks) = inputs(2, siblings=False)
    keys_GND = tensors[1]
    begin, end, loads = keys_GND.data_ptr(), keys_GND.data_ptr() + keys_GND.nbytes, []
    plain = InterpreterBuilder.create_masked_load

    def counted(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        inside = (pointers.data >= begin) & (pointers.data < end) & mask.data
        loads.append(int(inside.sum()))
        return plain(self, pointers, mask, *rest)

    with patch.object(InterpreterBuilder, "create_masked_load", counted):
        by_kernel(feed, *tensors, Scores(0.1), sinks)
        texts = [start + count for _, start, count in RAGGED]
        assert sum(loads) == sum(texts) * keys_GND.shape[2]
        loads.clear()
        by_kernel(feed, *tensors, Scores(0.1, 1), sinks)
    tile = attention_triton.constants(1, 1, keys_GND.shape[2], 4)["TILE"]
    assert sum(loads) <= len(RAGGED) * (tile + 5) * keys_GND.shape[2]


@torch.inference_mode()
def require_model() -> None:
    """Attention with windows and sinks of real layers; ragged rows, rollbacks, slots that are garbage."""
    from tempfile import TemporaryDirectory

    from tests.test_decoder import module_of, require_same, saved, walked

    small()
    attention_triton.UNIT = 16
    with TemporaryDirectory() as folder:
        module = module_of("gpt_oss")
        require_same(module, *walked(saved(module, Path(folder)), attend=by_kernel))


@patch.object(experts, "triton_runs", lambda: True)
def require_experts() -> None:
    """Experts, of more tokens that choose the same than a product has rows; weights that fill no block."""
    for seed, (tokens, count, top_k, dim, wide) in enumerate(
        [(1, 4, 2, 72, 40), (5, 8, 4, 64, 32), (20, 3, 2, 40, 50), (9, 32, 4, 24, 16)]
    ):
        torch.manual_seed(seed)
        choice_TK = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)])
        up, down = torch.randn(count, 2 * wide, dim), torch.randn(count, dim, wide)
        biases = (torch.randn(count, 2 * wide), torch.randn(count, dim)) if seed % 2 else (None, None)
        weights = [up], [down], "", ""
        arguments = torch.randn(tokens, dim), torch.rand(tokens, top_k), choice_TK, *weights, *biases
        gate = ("silu", 1.7, 7.0) if seed % 2 else ("silu", 0.0, 0.0)
        expected = experts.apply(*arguments, *gate)
        torch.testing.assert_close(experts.apply_on_gpu(*arguments, *gate), expected, rtol=1e-4, atol=1e-3)
        choice_TK[-1] = choice_TK[-1].roll(1)
        assert not torch.allclose(experts.apply_on_gpu(*arguments, *gate), expected, rtol=1e-2, atol=1e-1)


@pytest.fixture(params=["no compiler", "no headers"])
def _without(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Triton takes this machine for one with a GPU, and cannot compile its driver."""
    from triton.backends.nvidia import driver

    kept: list[Any] = [triton_runs, driver.library_dirs, driver.libcuda_dirs]
    for name in ("_active", "_default"):
        monkeypatch.setattr(triton.runtime.driver, name, None)
    monkeypatch.setattr(driver.CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for name in ("TRITON_LIBCUDA_PATH", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    if request.param == "no compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CC", "false")
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.mark.usefixtures("_without")
@torch.inference_mode()
def test_what_triton_cannot_compile_is_known_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """Models in codes, and with experts, ended in their first step. Now codes are decoded."""
    gpu = torch.device("cuda:0")
    assert not any(has_kernels("m", dtype, gpu) for dtype in (Dtype.packed, Dtype.bf16))
    assert not available(gpu)
    up, down, x_TH = torch.randn(4, 80, 72), torch.randn(4, 72, 40), torch.randn(3, 72)
    given = x_TH, torch.rand(3, 2), torch.tensor([[0, 3]] * 3), [up], [down], "", "", None, None
    gate = "silu", 0.0, 0.0
    assert torch.equal(experts.apply_on_gpu(*given, *gate), experts.apply(*given, *gate))
    (line,) = caplog.messages
    assert "install a C compiler and Python's headers (gcc, python3-dev): " in line


REQUIRED = require_attention, require_one_reading, require_model, require_experts


def test_the_number_of_parts():
    """A power of two; it falls with the number of tokens, which bounds the memory of what parts give."""
    for groups in (1, 2, 8, 32, 52):
        found = [attention_triton.parts_of(tokens, groups) for tokens in (1, 16, 17, 64, 128, 1000)]
        assert found == sorted(found, reverse=True) and all(n & (n - 1) == 0 for n in found)
        assert found[0] <= attention_triton.MOST_PARTS and found[-1] >= attention_triton.LEAST_PARTS


def test_the_operator_of_gpus():
    attention.operators("cuda")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(attention.OPERATOR, "CUDA")
    with FakeTensorMode():
        query_THD, cache_GND = torch.empty(5, 8, 64, device="cuda"), torch.empty(2, 100, 64, device="cuda")
        place_T = torch.empty(5, dtype=torch.int64, device="cuda")
        feed = Pass(place_T, place_T, place_T, attention.attend)
        found = attention.attend(feed, query_THD, cache_GND, cache_GND, Scores(1.0), None)
    assert found.shape == query_THD.shape and found.device.type == "cuda"
