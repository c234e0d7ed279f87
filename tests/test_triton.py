"""Kernels for GPUs: they compile for every generation, and the interpreter gives the reference's numbers."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from llama_ssp.config import Dtype  # noqa: E402
from llama_ssp.distributed.comm import ALONE  # noqa: E402
from llama_ssp.models import experts  # noqa: E402
from llama_ssp.models.attention import Places, Scores, attend_rows  # noqa: E402
from llama_ssp.models.formats.coded import TABLES  # noqa: E402
from llama_ssp.models.kernels import attention, attention_triton, coded_triton, experts_triton, probe  # noqa: E402
from llama_ssp.models.kernels.build import triton_runs  # noqa: E402
from llama_ssp.models.kernels.coded import available  # noqa: E402
from llama_ssp.models.kernels.kernel_sizes import MOST_PAIRS  # noqa: E402
from llama_ssp.models.steps import SteppedModel, has_kernels  # noqa: E402
from llama_ssp.planner.activations import GPU, code_bytes, decoded_bytes  # noqa: E402
from llama_ssp.planner.weights import ModelPart, RolePart, weights  # noqa: E402
from llama_ssp.planner.workload import TARGET, Role  # noqa: E402
from tests import plans, test_attention  # noqa: E402
from tests.distributed.test_quantised import off  # noqa: E402
from tests.families import decoder_of, module_of, require_same, walked  # noqa: E402
from tests.memory_trace import LiveBytes  # noqa: E402
from tests.test_coded_linear import held, wide  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
by_kernel = attention.attend  # once it is registered for the interpreter
SHARED = {86: 99, 90: 227, 100: 227}  # KiB that a program may have


class OtherGpu:
    """A driver of a GPU that is not here: triton compiles for it, and starts nothing."""

    def __init__(self, generation: int) -> None:
        self.generation = generation

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.generation, 32)

    def get_current_device(self) -> int:
        return self.generation

    def get_current_stream(self, _: int) -> int:
        return 0


def require_compiled(start: Callable[[], object], generation: int) -> None:
    """Each kernel that `start` launches compiles for this generation, and finds room in its memory."""
    programs, run = [], JITFunction.run

    def compiled(kernel: Any, *given: Any, warmup: bool, **how: Any) -> None:
        programs.append(run(kernel, *given, warmup=True, **how))

    driver = patch.object(triton.runtime.driver, "_active", OtherGpu(generation))
    with driver, patch.object(JITFunction, "run", compiled):
        start()
    assert programs and all("cubin" in program.asm for program in programs)
    assert max(program.metadata.shared for program in programs) <= SHARED[generation] * 1024


def tensor(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def codes(
    table: str, group: int, rows: int, scale: torch.dtype, offset: torch.dtype | None = None,
    bias: bool = False, top_k: int = 0,
) -> Callable[[], object]:  # fmt: skip
    """The products with codes: of all rows with one matrix, or of each with those of `top_k` experts."""
    size, count = 4096, (128,) if top_k else ()
    width = size // 2 if table in ("uint4", "e2m1", "nf4") else size
    factors = tensor(256), tensor(*count, size, size // group, dtype=scale)
    offsets = None if offset is None else tensor(*count, size, size // group, dtype=offset)
    added = tensor(*count, size, dtype=BF16) if bias else None
    weight = tensor(*count, size, width, dtype=torch.uint8), *factors, offsets, added
    sizes, expert_P = (size, group, list(TABLES).index(table)), tensor(rows * top_k, dtype=torch.int64)
    x, pairs = tensor(rows, size, dtype=BF16), {"expert_P": expert_P if top_k else None}
    return partial(coded_triton.linear_coded, x, *weight, *sizes, **pairs)


def attends(
    tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype, window: int = 0,
    softcap: float = 0.0, sinks: bool = False,
) -> Callable[[], object]:  # fmt: skip
    cache, place = tensor(groups, 4096, size, dtype=dtype), tensor(tokens, dtype=torch.int64)
    given = tensor(tokens, heads, size, dtype=dtype), cache, cache, place, place
    return partial(attention_triton.attend, *given, 0.125, window, softcap, tensor(heads) if sinks else None)


def chosen(tokens: int, top_k: int, rows: int, dtype: torch.dtype, bias: bool) -> Callable[[], object]:
    """The products with experts: of tokens, or of pairs, which have rows of their own."""
    weight, added = tensor(8, 4096, 2048, dtype=dtype), tensor(8, 4096, dtype=dtype) if bias else None
    pair = tensor(tokens * top_k, dtype=torch.int64)
    return partial(experts_triton.products, tensor(rows, 2048, dtype=dtype), pair, weight, added)


KERNELS = {
    "llm-int8": codes("int8", 4096, 5, FP32, bias=True),
    "fp8": codes("e4m3", 128, 5, FP32),
    "awq": codes("uint4", 128, 9, FP16, torch.uint8),
    "awq-rows": codes("uint4", 128, 40, FP16, torch.uint8),
    "awq-prompt": codes("uint4", 128, 512, FP16, torch.uint8),
    "llm-int8-prompt": codes("int8", 4096, 512, FP32, bias=True),
    "q4_k-prompt": codes("uint4", 32, 512, FP32, FP32),
    "q4_k": codes("uint4", 32, 5, FP32, FP32),
    "mxfp4": codes("e2m1", 32, 5, BF16, None, True),
    "nf4-prompt": codes("nf4", 4096, 17, FP32),
    "e5m2": codes("e5m2", 128, 9, FP32),
    "llama": attends(1, 32, 8, 128, BF16),
    "llama-verify": attends(9, 64, 8, 128, FP16),
    "gemma2": attends(5, 8, 4, 256, BF16, 4096, 50.0),
    "gemma2-prompt": attends(600, 8, 4, 256, FP32, 4096, 50.0),
    "gemma4": attends(5, 32, 4, 512, BF16),
    "gemma4-prompt": attends(600, 16, 2, 512, BF16),
    "odd": attends(5, 32, 32, 80, FP32, sinks=True),
    "falcon": attends(5, 71, 1, 64, BF16),
    "mixtral": chosen(1, 2, 1, BF16, False),
    "qwen3-moe": chosen(128, 8, 1024, FP16, False),
    "gpt-oss": chosen(5, 4, 5, FP32, True),
    "mixtral-prompt": chosen(1024, 2, 1024, BF16, False),
    "gpt-oss-prompt": chosen(1024, 4, 4096, FP32, True),
    "gpt-oss-mxfp4": codes("e2m1", 32, 5, BF16, None, True, top_k=4),
    "qwen3-moe-awq": codes("uint4", 128, 128, FP16, torch.uint8, top_k=8),
    "qwen3-moe-awq-prompt": codes("uint4", 128, 512, FP16, torch.uint8, top_k=8),
}


@pytest.mark.few(3)  # a second each, unless triton's cache has it
@pytest.mark.parametrize(
    ("name", "generation"),
    [(name, generation) for number, name in enumerate(KERNELS) for generation in (86, (90, 100)[number % 2])],
)
def test_kernels_compile(name: str, generation: int):
    """For 80, 86 and 89 Triton has one code generator, and 86 has the least memory; 90 and 100 take turns."""
    require_compiled(KERNELS[name], generation)


# Outputs and inputs of the products with codes of a layer, on one of the ranks.
LAYERS = {
    "7B": [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)],
    "65B over 8 ranks": [(3072, 8192), (8192, 1024), (5504, 8192), (8192, 2752)],
    "llama3.1-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
}
PROCESSORS = 132  # of an H100 or an H200


def product(table: str, group: int, rows: int, outputs: int, inputs: int, **how: Any) -> Callable[[], object]:
    """A product with codes, of no content."""
    weight = tensor(outputs, inputs if table == "int8" else inputs // 2, dtype=torch.uint8)
    scales = tensor(outputs, inputs // group if group else 1)
    sizes = (outputs, group or inputs, list(TABLES).index(table))
    x = tensor(rows, inputs, dtype=BF16)
    return partial(coded_triton.linear_coded, x, weight, tensor(256), scales, None, None, *sizes, **how)


def launched(start: Callable[[], object]) -> list[tuple[str, int]]:
    """Returns the kernels that `start` launches, and how many programs each has; none is compiled."""
    launches = []

    def noted(kernel: Any, *_: Any, grid: tuple[int, ...], **__: Any) -> None:
        launches.append((kernel.__name__, math.prod(grid)))

    with patch.object(JITFunction, "run", noted):
        start()
    return launches


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 256])
@pytest.mark.parametrize("kind", [("int8", 0), ("int4", 32), ("uint4", 128)])
@pytest.mark.parametrize("layer", LAYERS)
def test_products_with_codes_have_a_program_for_each_processor(
    layer: str, kind: tuple[str, int], rows: int
) -> None:
    for outputs, inputs in LAYERS[layer]:
        (name, programs), *rest = launched(product(*kind, rows, outputs, inputs))
        assert programs >= PROCESSORS, (name, outputs, inputs)
        assert [each for each, _ in rest] in ([], ["_add"])


def test_prompts_decode_a_weight_in_codes_once() -> None:
    """In slices, so that little memory is needed; an output matrix, whose sums stay exact, never."""
    small, large = product("int4", 32, 300, 4096, 4096), product("int8", 0, 2048, 28672, 4096)
    assert [name for name, _ in launched(small)] == ["_decode"]
    assert [name for name, _ in launched(large)] == ["_decode"] * 2
    assert [name for name, _ in launched(product("int8", 0, 300, 512, 4096, wide=True))] == ["_multiply"]


@pytest.mark.parametrize("kind", [(Dtype.int8, "int8", 0), (Dtype.int4, "int4", 32), (Dtype.nf4, "nf4", 64)])
@pytest.mark.parametrize("name", ["7B", "llama3.2-1b", "tiny"])
def test_what_products_with_codes_keep_is_planned(name: str, kind: tuple[Dtype, str, int]) -> None:
    """Decoded numbers, and sums of parts of the inputs, beside the result."""
    dtype, table, group = kind
    model = plans.model(name)
    part = ModelPart.of(model)
    role = Role(TARGET, model, dtype)
    own = RolePart.of(role, part, 800, compiled=True)
    for rows in (1, 16, 17, 64, 256, 257, 700):
        planned = max(code_bytes(own, GPU, rows), decoded_bytes(own, GPU, rows))
        kept = []
        for weight in weights(part):
            if weight.linear:
                live = LiveBytes()
                start = product(table, group, rows, weight.outputs, weight.inputs)
                live.ignore([each for each in start.args if isinstance(each, Tensor)])
                with live.phase():
                    launched(start)
                kept.append(live.peak - rows * weight.outputs * 2)
        assert max(kept) <= planned, rows
        assert rows < 17 or max(kept) > 0, rows


# Heads of queries and of keys, the size of a head, scores, sinks; of each row its first slot, start, tokens.
RAGGED = [(0, 5, 3), (20, 0, 1), (100, 70, 5), (300, 99, 1)]
CASES: list[tuple[tuple[int, int], int, Scores, bool, list[tuple[int, int, int]]]] = [
    ((2, 2), 64, Scores(0.25), False, RAGGED),
    ((6, 2), 80, Scores(0.22, window=11), True, RAGGED),
    ((8, 1), 96, Scores(0.2, softcap=3.0), False, RAGGED),
    ((4, 1), 128, Scores(0.18, 40, 3.0), True, RAGGED),
    ((2, 1), 256, Scores(0.125, window=30), False, RAGGED),
    ((71, 1), 64, Scores(0.25), True, RAGGED[:2]),  # more heads than a product has rows
    ((8, 2), 16, Scores(0.5, 20, 3.0), True, [(40, 37, 40), (0, 3, 1)]),  # more tokens than a program has
    ((2, 1), 64, Scores(0.25), False, [(7, 0, 1)]),
    ((8, 1), 512, Scores(0.05), False, RAGGED),
]


def inputs(case: int) -> tuple[Places, tuple[Any, ...]]:
    """Random arguments of `attend`; what has not been written, or is stale, is NaN."""
    heads, size, scores, sinks, rows = CASES[case]
    return test_attention.inputs(heads, size, rows, scores, sinks)


@pytest.mark.long  # a minute in the interpreter
@pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"),
    reason="this Triton's interpreter takes numpy below 2.4",
)
def test_kernels_are_those_of_the_reference():
    """In one process of its own: triton decides at its import whether to interpret."""
    code = "from tests import test_coded_linear, test_triton\n" + "\n".join(
        [f"test_triton.{function.__name__}()" for function in REQUIRED]
        + ["test_coded_linear.require_kernel_for_gpus()"]
    )
    how = {"cwd": Path(__file__).resolve().parents[1], "env": {**os.environ, "TRITON_INTERPRET": "1"}}
    subprocess.run([sys.executable, "-c", code], check=True, **how)


def small() -> None:
    """Parts and tiles of a few slots, chunks of a few tokens, so that short texts have several."""
    attention_triton.UNIT, attention_triton.TILE_BYTES, attention_triton.MOST = 32, 4096, 32
    attention_triton.PROGRAMS = attention_triton.LEAST_PARTS = 4


def require_attention() -> None:
    """And a kernel that looks one slot too far, has no sinks or no soft cap, or reads a NaN, is found out."""
    attention._define()
    torch.library.impl(attention.OPERATOR, "cpu")(attention_triton.attend)
    small()
    for case in range(len(CASES)):
        places, given = inputs(case)
        torch.testing.assert_close(
            by_kernel(places, *given), attend_rows(places, *given), rtol=1e-5, atol=1e-5
        )
    places, (*tensors, scores, sinks) = inputs(3)
    expected = attend_rows(places, *tensors, scores, sinks)
    for other, own in (
        (Scores(scores.scale, 41, scores.softcap), sinks), (Scores(scores.scale, 40), sinks), (scores, None),
    ):  # fmt: skip
        assert not torch.allclose(by_kernel(places, *tensors, other, own), expected, rtol=1e-3, atol=1e-3)
    tensors[2][:, 100 + 60] = torch.nan  # seen by the third row alone
    damaged_T = by_kernel(places, *tensors, scores, sinks).isnan().any(-1).all(-1)
    assert torch.equal(damaged_T, places.first_T == 100)


def require_one_reading() -> None:
    """Attention's, of all tokens of a row and all heads of a KV head together; a window alone, in tiles."""
    from triton.runtime.interpreter import InterpreterBuilder

    small()
    places, (*tensors, _, sinks) = inputs(2)
    keys_GND = tensors[1]
    begin, end, loads = keys_GND.data_ptr(), keys_GND.data_ptr() + keys_GND.nbytes, []
    plain = InterpreterBuilder.create_masked_load

    def counted(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        inside = (pointers.data >= begin) & (pointers.data < end) & mask.data
        loads.append(int(inside.sum()))
        return plain(self, pointers, mask, *rest)

    with patch.object(InterpreterBuilder, "create_masked_load", counted):
        by_kernel(places, *tensors, Scores(0.1), sinks)
        texts = [start + count for _, start, count in RAGGED]
        assert sum(loads) == sum(texts) * keys_GND.shape[2]
        loads.clear()
        by_kernel(places, *tensors, Scores(0.1, 1), sinks)
    tile = attention_triton.constants(1, 1, keys_GND.shape[2], 4)["TILE"]
    assert sum(loads) <= len(RAGGED) * (tile + 5) * keys_GND.shape[2]


@torch.inference_mode()
def require_model() -> None:
    """Attention with windows and sinks of real layers; ragged rows, rollbacks, slots that are garbage."""
    small()
    attention_triton.UNIT = 16
    module = module_of("gpt_oss")
    require_same(module, *walked(decoder_of(module), attend=by_kernel))


def stacked(count: int, outputs: int, inputs: int, kind: Any, dtype: torch.dtype) -> Any:
    """Returns random weights of experts as a stack has them, and their numbers in fp64."""
    if kind is None:
        weight = torch.randn(count, outputs, inputs).to(dtype)
        return [weight], "", [weight.double()]
    table, group, offset = kind
    weights = held(count * outputs, inputs, table, group, offset)
    parts = [part.view(count, outputs, -1) for part in weights._tensors().values()]
    how = f"{table} {group} 1.0 {outputs} {offset == 'zero'} True"
    return parts, how, [wide(weights).view(count, outputs, inputs)]


def mixture(
    sizes: tuple[int, ...], kind: Any = None, clamped: bool = False, dtype: torch.dtype = FP32
) -> Any:
    """Returns random tokens with their experts, the experts, and the result by fp64 numbers.

    All tokens have the first expert, none the last of many; `kind`: table, inputs of a group, offset.
    """
    tokens, count, top_k, dim, ffn = sizes
    choice_TK = torch.stack([1 + torch.randperm(count - 1 - count // 8)[:top_k] for _ in range(tokens)])
    choice_TK[:, 0] = 0
    up, up_how, wide_up = stacked(count, 2 * ffn, dim, kind, dtype)
    down, down_how, wide_down = stacked(count, dim, ffn, kind, dtype)
    biases = (torch.randn(count, 2 * ffn), torch.randn(count, dim)) if clamped else (None, None)
    x_TH, share_TK = torch.randn(tokens, dim).to(dtype), torch.rand(tokens, top_k).to(dtype)
    given, rest = (x_TH, share_TK, choice_TK), (*biases, "silu", 1.7, 7.0 * clamped)
    numbers = *given, wide_up, wide_down, "", "", *rest
    numbers = tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, numbers)
    return given, (up, down, up_how, down_how, *rest), experts.apply(*numbers)


@patch.object(experts, "triton_runs", lambda: True)
@patch.object(experts, "experts_run", lambda *_: True)
def require_experts() -> None:
    """Experts, of more tokens that choose the same than a product has rows; weights that fill no block."""
    numbers = (1, 4, 2, 72, 40), (5, 8, 4, 64, 32), (20, 3, 2, 40, 50), (9, 32, 4, 24, 16)
    codes = ("nf4", 0, None), ("e2m1", 32, None), ("int8", 16, "shift"), ("int4", 0, "zero")
    coded = (2, 8, 2, 72, 40), (20, 4, 3, 64, 32), (9, 32, 4, 24, 16), (70, 3, 2, 40, 50)
    require_mixtures([(sizes, None) for sizes in numbers] + list(zip(coded, codes, strict=True)))


@patch.object(experts, "triton_runs", lambda: True)
@patch.object(experts, "experts_run", lambda *_: True)
@patch.object(experts, "MOST_PAIRS", 4)
@patch.object(experts_triton, "MOST_PAIRS", 4)
def require_sorted_experts() -> None:
    """As in prompts: experts of several programs, of one, and of none."""
    require_mixtures([((70, 3, 2, 40, 50), None), ((5, 8, 4, 64, 32), None), ((9, 32, 4, 24, 16), None)])


@patch.object(probe, "triton_runs", lambda: True)
@patch.object(probe, "EXPERTS", 3)
@patch.object(probe, "INPUTS", 72)
@patch.object(probe, "MOST_PAIRS", 50)
@patch.object(experts_triton, "MOST_PAIRS", 50)
def require_probed_experts() -> None:
    """The probe takes the kernels to be sound."""
    for many in (False, True):
        assert probe.experts_run.__wrapped__(FP32, torch.device("cpu"), many)


def require_mixtures(cases: list[tuple[tuple[int, ...], Any]]) -> None:
    for seed, (sizes, kind) in enumerate(cases):
        torch.manual_seed(seed)
        given, layers, exact = mixture(sizes, kind, clamped=seed % 2 == 1)
        assert off([experts.apply_on_gpu(*given, *layers)], [exact]) < 1e-6, kind
        given[2][-1] = given[2][-1].roll(1)
        assert off([experts.apply_on_gpu(*given, *layers)[-1:]], [exact[-1:]]) > 1e-2, kind


@pytest.mark.parametrize("clamped", [False, True])
def test_grouped_experts_are_those_that_run_in_turn(clamped: bool) -> None:
    """Control: another choice."""
    torch.manual_seed(1)
    (*given, choice_TK), layers, exact = mixture((50, 16, 4, 24, 40), clamped=clamped)
    for choice, is_right in ((choice_TK, True), (choice_TK.roll(1, 0), False)):
        result = experts.grouped(*given, choice, experts.Layers.of(*layers))
        assert (off([result], [exact]) < 1e-6) is is_right


REQUIRED = (
    require_attention,
    require_one_reading,
    require_model,
    require_experts,
    require_sorted_experts,
    require_probed_experts,
)
CODES = "int4 16 1.0 64 False {}"  # of a stack: whether the kernel reads them is left open


def stacks(dtype: torch.dtype, how: str = "") -> tuple[experts.Stack, experts.Stack]:
    """Layers of four experts, of no content, on a GPU that is not here."""
    with FakeTensorMode():
        up_EFH = torch.empty(4, 64, 48, dtype=dtype, device="cuda")
        down_EHF = torch.empty(4, 48, 32, dtype=dtype, device="cuda")
    return experts.Stack([up_EFH], how), experts.Stack([down_EHF], how)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), "ours"), ((8, 9), "ours"), ((9, 0), "torch's"), ((10, 3), "torch's"), ((12, 0), "ours")],
)
def test_experts_of_a_prompt_do_not_wait_on_any_gpu(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's grouped product is a loop that waits, but on two generations of GPUs."""

    class Chosen(Exception):
        """Which product was taken; it ends the layer."""

    def chosen(name: str, *_: object) -> None:
        raise Chosen(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(experts, "triton_runs", lambda: True)
    monkeypatch.setattr(experts, "experts_run", lambda *_: True)
    for function, name in (("grouped", "torch's"), ("products", "ours"), ("_one_by_one", "in turn")):
        monkeypatch.setattr(experts, function, partial(chosen, name))

    up, down = stacks(BF16)
    with up.parts[0].fake_mode:  # type: ignore[attr-defined]
        x_TH = torch.empty(600, 48, dtype=BF16, device="cuda")
        choice_TK = torch.empty(600, 2, dtype=torch.int64, device="cuda")
        weight_TK = torch.empty(600, 2, dtype=BF16, device="cuda")
        rest = ("", "", None, None, "silu", 0.0, 0.0)
        with pytest.raises(Chosen, match=expected):
            experts.apply_on_gpu(x_TH, weight_TK, choice_TK, up.parts, down.parts, *rest)
    assert not experts.waits_for_host(BF16, up, down, choice_TK.numel())


@pytest.mark.parametrize(
    ("dtype", "how", "triton", "in_steps", "in_prompts"),
    [
        (BF16, "", True, False, False), (FP16, "", True, False, False), (FP32, "", True, False, False),
        (torch.float64, "", True, True, True), (BF16, "", False, True, True),
        (BF16, CODES.format(True), True, False, False), (BF16, CODES.format(False), True, False, True),
    ],
)  # fmt: skip
def test_which_experts_wait(
    dtype: torch.dtype,
    how: str,
    triton: bool,
    in_steps: bool,
    in_prompts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By their format, and by how many pairs of a token and an expert there are."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(experts, "triton_runs", lambda: triton)
    monkeypatch.setattr(experts, "experts_run", lambda *_: True)
    up, down = stacks(dtype, how)
    waits = [experts.waits_for_host(dtype, up, down, pairs) for pairs in (MOST_PAIRS, MOST_PAIRS + 1)]
    assert waits == [in_steps, in_prompts]


def test_a_layer_says_whether_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts a token; its router has the numbers of its tokens."""
    monkeypatch.setattr(experts, "triton_runs", lambda: True)
    monkeypatch.setattr(experts, "experts_run", lambda *_: True)
    parts = decoder_of(module_of("mixtral")).modules()
    layers = [part for part in parts if isinstance(part, experts.Experts)]
    assert layers and not any(layer.waits_for_host(MOST_PAIRS) for layer in layers)
    layers[0].hows = (CODES.format(False),) * 2
    assert [layers[0].waits_for_host(tokens) for tokens in (MOST_PAIRS // 2, MOST_PAIRS)] == [False, True]
    layers[0].router.double()
    assert layers[0].waits_for_host(1)


@pytest.mark.parametrize("missing", ["compiler", "headers"])
@torch.inference_mode()
def test_what_triton_cannot_compile_is_known_before_the_first_step(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a machine with a GPU, whose driver triton compiles: codes are decoded, and experts run in turn."""
    from triton.backends.nvidia import driver

    for name in ("_active", "_default"):
        monkeypatch.setattr(triton.runtime.driver, name, None)
    monkeypatch.setattr(driver.CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for name, place in (("TRITON_LIBCUDA_PATH", tmp_path), ("TRITON_CACHE_DIR", tmp_path), ("CC", "false")):
        monkeypatch.setenv(name, str(place))
    if missing == "compiler":
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", str(tmp_path))
    for function in (kept := (triton_runs, driver.library_dirs, driver.libcuda_dirs)):
        function.cache_clear()
    gpu = torch.device("cuda:0")
    assert not any(has_kernels("m", dtype, gpu, (4, 4, 16)) for dtype in (Dtype.packed, Dtype.bf16))
    assert not available(gpu)
    given, layers, _ = mixture((3, 4, 2, 72, 40))
    assert torch.equal(experts.apply_on_gpu(*given, *layers), experts.apply(*given, *layers))
    (line,) = caplog.messages
    assert "install a C compiler and Python's headers (gcc, python3-dev): " in line
    for function in kept:
        function.cache_clear()


@pytest.mark.parametrize("tokens", [3, 600])
@torch.inference_mode()
def test_experts_whose_kernel_fails_run_in_turn(
    tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here triton finds no GPU to start it on. Of a step, and of a prompt; the log says so, once."""
    for module in (experts, probe):
        monkeypatch.setattr(module, "triton_runs", lambda: True)
    probe.experts_run.cache_clear()
    given, layers, _ = mixture((tokens, 4, 2, 72, 40))
    for _ in range(2):
        assert torch.equal(experts.apply_on_gpu(*given, *layers), experts.apply(*given, *layers))
    probe.experts_run.cache_clear()
    (line,) = caplog.messages
    assert line.startswith(f"engine: experts in {'prompts' if tokens > 512 else 'steps'}")
    assert " run one after the other: their kernel fails: " in line


@pytest.mark.parametrize(("family", "kernel"), [("llama-gqa", False), ("gemma2", True), ("gpt_oss", True)])
def test_prompts_on_gpus_make_no_matrix_of_scores(family: str, kernel: bool) -> None:
    """Torch's attention has no soft caps and no sinks; it remains what compiled steps are compared with."""
    module = module_of(family)
    model = SteppedModel(decoder_of(module).to("meta"), module.config, "m", ALONE)
    with model.eagerly():
        assert model.attend is attend_rows
    assert model.attend is (attention.attend if kernel else attend_rows)
    model.give_up()
    assert model.attend is attend_rows


def test_the_operator_of_gpus():
    attention.operators("cuda")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(attention.OPERATOR, "CUDA")
    with FakeTensorMode():
        query_THD, cache_GND = torch.empty(5, 8, 64, device="cuda"), torch.empty(2, 100, 64, device="cuda")
        place_T = torch.empty(5, dtype=torch.int64, device="cuda")
        places = Places(position_T=place_T, first_T=place_T, attend=attention.attend)
        result = attention.attend(places, query_THD, cache_GND, cache_GND, Scores(1.0), None)
    assert result.shape == query_THD.shape and result.device.type == "cuda"
