"""Quantised matrices: what their codes mean, their cuts, and products by our own kernels."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import ModelError
from llama_ssp.models import loader
from llama_ssp.models.attention import Places, Scores
from llama_ssp.models.device_map import load_layers
from llama_ssp.models.formats.coded import TABLES, Coded, Codes, joined, packed, unpacked, values
from llama_ssp.models.kernels import coded, linear
from llama_ssp.models.kernels.attention import attend
from llama_ssp.models.kernels.coded import OPERATOR, CodedLinear, DecodedLinear, available, operators, usable
from llama_ssp.models.kernels.linear import PackedLinear
from llama_ssp.models.linear import Kernels, LayerFormat, dense, in_fp32
from llama_ssp.models.loader import load
from llama_ssp.models.quantization import INT4, coded_of, in_groups, quantised
from llama_ssp.models.sharding import COLUMNS, ROWS, Cut, require_transformers
from llama_ssp.models.steps import SteppedModel
from llama_ssp.speculative.model_runner import ModelRunner
from tests.distributed.test_quantised import off
from tests.distributed.test_tensor import walked
from tests.families import build
from tests.warm import ROOT

CPU = torch.device("cpu")
SHAPES = [(64, 128), (70, 320), (33, 136)]  # outputs and inputs, whole blocks and not
GROUPS = [0, 32, 128]
SCALES = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = [None, "zero", "shift"]


def held(
    outputs: int, inputs: int, table: str, group: int, offset: str | None = None,
    dtype: torch.dtype = torch.bfloat16, **kind: float,
) -> Coded:  # fmt: skip
    """Random codes, among them the first and the last that are numbers, and random scales."""
    torch.manual_seed(outputs)
    numbers = values(table)
    finite_C = numbers.isfinite().nonzero().flatten()
    code_NK = finite_C[torch.randint(0, len(finite_C), (outputs, inputs))].to(torch.uint8)
    code_NK[:, 0], code_NK[:, 1] = finite_C[0], finite_C[-1]
    groups = -(-inputs // (group or inputs))
    scale_NG = (torch.rand(outputs, groups) + 0.5).to(dtype)
    zero_NG = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if offset == "zero" else None
    shift_NG = torch.randn(outputs, groups).to(dtype) if offset == "shift" else None
    codes_NC = packed(code_NK) if len(numbers) == 16 else code_NK
    return Coded(
        kind=Codes(table, group, **kind),
        inputs=inputs,
        codes_NC=codes_NC,
        scale_NG=scale_NG,
        zero_NG=zero_NG,
        shift_NG=shift_NG,
    )


def wide(weight: Coded) -> Tensor:
    """The numbers in fp64, nothing rounded."""
    shift_NG = None if weight.shift_NG is None else weight.shift_NG.double()
    return replace(weight, scale_NG=weight.scale_NG.double(), shift_NG=shift_NG).decoded(torch.float64)


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Inputs among which some are outliers, as LLM.int8 calls them."""
    x = torch.randn(count, inputs, dtype=dtype)
    x[:, :: max(inputs // 3, 1)] *= 20
    return x


def require_near(found: Tensor, x: Tensor, weight: Coded, bias: Tensor | None, unit: float) -> None:
    """The rounding of the result, and of sums in 32 bits: of codes, and of what is subtracted from them."""
    exact = x.double() @ wide(weight).T + (0 if bias is None else bias.double())
    zeroless = replace(weight, zero_NG=None, shift_NG=None)
    least = wide(zeroless).abs() + (wide(weight) - wide(zeroless)).abs()
    sums = x.double().abs() @ least.T
    assert ((found.double() - exact).abs() <= unit * exact.abs() + weight.inputs * 2**-24 * sums).all()


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("table", TABLES)
def test_the_product_is_that_of_the_codes(table: str):
    operators("cpu")
    numbers = itertools.product(SHAPES, GROUPS, OFFSETS, SCALES)
    for number, (shape, group, offset, kind) in enumerate(numbers):
        weight, dtype = held(*shape, table, group, offset, kind), (torch.bfloat16, torch.float32)[number % 2]
        bias = torch.randn(shape[0], dtype=dtype) if number % 3 else None
        layer = CodedLinear(weight, bias, CPU)
        x = rows_of(13, shape[1], dtype)
        whole = layer(x)
        require_near(whole, x, weight, bias, torch.finfo(dtype).eps)
        for count in (1, 2, 3, 4, 5, 6, 7, 12):  # the rows beside a row change nothing
            assert torch.equal(layer(x[None, :count])[0], whole[:count])
        assert layer(x[:0]).shape == (0, shape[0])


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_output_matrix_gives_its_sums_as_they_are(dtype: torch.dtype):
    """As near to the exact product as fp32 is, in every format; rounded to the inputs' 16 bit it is not."""
    operators("cpu")
    linear.operators()
    dense_NK, weight, x = torch.randn(5000, 128).to(dtype), held(300, 128, "int8", 32), rows_of(7, 128, dtype)
    ours = dtype is torch.bfloat16  # which our kernels take
    exact = x.double() @ dense_NK.double().T
    near = 128 * 2**-24 * (x.double().abs() @ dense_NK.double().abs().T)
    for layer in [dense(dense_NK), *([PackedLinear(dense(dense_NK))] if ours else [])]:
        assert in_fp32(layer, x).dtype is torch.float32
        assert ((in_fp32(layer, x).double() - exact).abs() <= near).all()
        assert ((layer(x).double() - exact).abs() > near).any()
    assert in_fp32(DecodedLinear(weight, None), x).dtype is torch.float32
    if ours:
        layer = CodedLinear(weight, None, CPU)
        require_near(in_fp32(layer, x), x, weight, None, 2**-23)
        with pytest.raises(AssertionError):
            require_near(layer(x), x, weight, None, 2**-23)


@pytest.mark.slow
@pytest.mark.compiler
def test_a_code_or_a_scale_that_is_wrong_is_found_out():
    operators("cpu")
    weight, x = held(64, 128, "int4", 32), rows_of(5, 128, torch.float32)
    changed = weight.codes_NC.clone()
    changed[7, 9] ^= 16
    for other in (replace(weight, codes_NC=changed), replace(weight, scale_NG=weight.scale_NG.roll(1, 1))):
        with pytest.raises(AssertionError):
            require_near(CodedLinear(other, None, CPU)(x), x, weight, None, torch.finfo(x.dtype).eps)
    fewer = replace(weight, scale_NG=weight.scale_NG[:, :3])
    with pytest.raises(RuntimeError, match="a scale a group"):
        CodedLinear(fewer, None, CPU)(x)


@pytest.mark.slow
@pytest.mark.compiler
def test_the_operator_is_one_that_torch_can_compile():
    operators("cpu")
    layer = CodedLinear(held(70, 320, "int8", 0), None, CPU)
    how = layer.codes, layer.table, layer.scales, layer.offsets, layer.bias, 70, 320, layer.table_number
    torch.library.opcheck(torch.ops.llama_ssp.linear_coded.default, (rows_of(3, 320), *how))


@pytest.mark.long
@pytest.mark.compiler
def test_the_kernel_for_any_processor():
    """What is compiled where there are no instructions for such products."""
    code = """
from tests.test_coded_linear import *
from llama_ssp.models.kernels import build
build.FLAGS = tuple(flag for flag in build.FLAGS if flag != "-march=native")
operators("cpu")
dtypes = torch.bfloat16, torch.float32
for table, offset, dtype in itertools.product(("int4", "nf4", "e4m3"), OFFSETS, dtypes):
    weight, x = held(70, 320, table, 32, offset, torch.float16), rows_of(13, 320, dtype)
    layer = CodedLinear(weight, None, CPU)
    found = layer(x)
    require_near(found, x, weight, None, torch.finfo(dtype).eps)
    assert torch.equal(layer(x[:1])[0], found[0])
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "layer",
    [lambda w: CodedLinear(w, None, CPU), lambda w: DecodedLinear(w, None)],
    ids=["kernel", "decoded"],
)
def test_layers_tell_their_codes_apart(layer: Callable[[Coded], nn.Module]):
    """Tables of one size have tensors of one shape: a compiled step is kept by what layers say."""
    said = [str(layer(held(70, 320, table, group))) for table in ("int8", "e4m3") for group in (0, 64)]
    assert len({*said}) == 4 and said[0] == str(layer(held(70, 320, "int8", 0)))


def test_a_decoded_product_is_that_of_the_library():
    for table in TABLES:
        weight, x = held(33, 136, table, 32, "shift"), rows_of(3, 136)
        layer = DecodedLinear(weight, None)
        expected = torch.nn.functional.linear(x, weight.decoded(x.dtype))
        assert torch.equal(layer(x), expected), table
        if table == "int4":
            assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), expected), table
            whole = layer.codes, layer.scales, layer.zeros, layer.shifts, layer.bias, *layer.kind
            torch.library.opcheck(torch.ops.llama_ssp.linear_decoded.default, (x, *whole))
        assert sum(part.nbytes for part in layer.buffers()) == weight.nbytes, table


@pytest.mark.slow
@pytest.mark.compiler
def test_which_product_a_weight_has():
    """Of codes that the kernel takes the kernel's, if there are kernels; with not a byte more."""
    operators("cpu")
    even, odd = held(64, 128, "int4", 32), held(64, 132, "int4", 4)
    assert usable(even, CPU) and not usable(odd, CPU)
    fast, eager = LayerFormat(Dtype.bf16, kernels=Kernels.all), LayerFormat(Dtype.bf16)
    found = fast.linear(even)
    assert isinstance(found, CodedLinear)
    assert sum(part.nbytes for part in (found.codes, found.scales)) == even.nbytes
    for form, weight in ((fast, odd), (eager, even)):
        assert isinstance(form.linear(weight), DecodedLinear)


def test_in_8_bit_weights_are_those_of_llm_int8():
    torch.manual_seed(0)
    layer = quantised(Dtype.int8, torch.randn(70, 300).bfloat16(), None, CPU)
    weight = coded_of(layer)
    assert weight.codes_NC.data_ptr() == layer.weight.data_ptr()
    exact = layer.weight.data.double() * weight.scale_NG.double() / 127
    assert torch.allclose(wide(weight), exact, rtol=1e-15)


def test_a_matrix_without_whole_blocks_is_named_before_it_is_quantised(monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(70, 96).bfloat16()
    monkeypatch.setattr("bitsandbytes.nn.Linear4bit", None)  # not even made
    with pytest.raises(ModelError, match="whole blocks of nf4; a matrix of 70 x 96; found 96"):
        quantised(Dtype.nf4, weight, None, CPU)


def test_in_4_bit_every_code_is_the_nearest():
    """Of each group one number is -8 times the scale, so no group wastes codes; zeros stay zeros."""
    torch.manual_seed(0)
    weight_NK = torch.randn(70, 300).bfloat16()
    weight_NK[3] = 0
    found = in_groups(weight_NK)
    assert found.kind == INT4 and found.scale_NG.shape == (70, 10) and found.scale_NG.dtype is torch.bfloat16
    number_NK, scale_NK = wide(found), found.scale_NG.double().repeat_interleave(32, 1)[:, :300]
    assert (number_NK[3] == 0).all()
    off_NK = (number_NK - weight_NK.double()).abs()
    ends_NK = number_NK == 7 * scale_NK  # there +8 would be nearer, but there is none
    assert (off_NK <= scale_NK.abs() * torch.where(ends_NK, 1.04, 0.5)).all()
    lowest_NG = (unpacked(found.codes_NC)[:, :288] == 0).view(70, 9, 32).any(-1)
    assert lowest_NG[torch.arange(70) != 3].all()
    assert 0.05 < float(off_NK.norm() / weight_NK.norm()) < 0.1


@pytest.mark.long
@pytest.mark.compiler
def test_a_draft_in_4_bit_is_near_to_its_target(tmp_path: Path, monkeypatch):
    """And a token has the same logits in a pass of its own and with its neighbours."""
    build("llama-gqa", mild=True, hidden_size=256, intermediate_size=704).save_pretrained(tmp_path)
    model = ModelConf(name="small", dtype=Dtype.int4)
    exact = walked(load(ModelConf(name="small"), tmp_path, Dtype.fp32, CPU, "model"))
    eager, fast = (load(model, tmp_path, Dtype.int4, CPU, "draft", fast=fast) for fast in (False, True))
    assert isinstance(fast, SteppedModel) and not isinstance(eager, SteppedModel)
    for each in (eager, fast):
        layers = [layer for layer in each.decoder.modules() if isinstance(layer, CodedLinear)]
        assert len(layers) == 4 * len(each.decoder.blocks)
    monkeypatch.setattr(loader, "has_kernels", lambda *_: False)
    decoded = walked(load(model, tmp_path, Dtype.int4, CPU, "draft"))
    monkeypatch.undo()
    for found in (walked(eager), walked(fast)):
        assert off(found, decoded) < 0.05 < 2 * off(decoded, exact) < 1.5
    assert apart(eager) < 1e-5 and apart(fast) < 1e-5
    eager.attend = attend_unevenly
    assert apart(eager) > 1e-3


def attend_unevenly(
    places: Places, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, *sink: Any
) -> Tensor:
    """Attends by our kernel, in a pass of several tokens with scores that are off by half a unit of bf16."""
    if len(query) > 1:
        scores = replace(scores, scale=scores.scale * (1 + 2**-8))
    return attend(places, query, keys, values, scores, *sink)


def apart(model: Any) -> float:
    """How far logits of steps of five tokens are from those of one."""
    return float((stepped(model, 1) - stepped(model, 5)).abs().max())


def stepped(model: Any, width: int) -> Tensor:
    """Logits of tokens 10 to 40, so many a step."""
    runner, token_BS = ModelRunner(model), torch.arange(3, 43)[None]
    runner.start(1, 40)
    runner.prefill(token_BS, [10])
    return torch.cat([runner.logits(token_BS, [end], [width]) for end in range(10 + width, 41, width)], 1)


def test_codes_are_not_for_modules_of_transformers():
    for dtype in Dtype:
        if dtype in (Dtype.int4, Dtype.packed):
            fix = "model.dtype=int8" if dtype is Dtype.int4 else "model.dtype=bf16"
            says = f"codes are kept by the decoder .*dtype={dtype.value}, allowed .*falcon.*write {fix}"
            with pytest.raises(ModelError, match=says):
                load_layers(ModelConf(name="small"), None, dtype, {}, None, "model")
        else:
            require_transformers("small", dtype)


def require_kernel_for_gpus() -> None:
    """Each table, group, offset and shape with each of the others, and no rows at all.

    Few rows, several, whose inputs are in parts, and many, for which weights are decoded. A row's product is
    the same whatever rows are beside it, of as many.

    tests/test_triton.py runs it by the interpreter, which multiplies in 32 bits, and cuts 16 bits off where
    a GPU rounds.
    """
    from llama_ssp.models.kernels import coded_triton, kernel_sizes

    operators("cuda")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, "CUDA")
    coded_triton.FACTORS = coded_triton.tl.float32
    coded_triton.MANY_ROWS, coded_triton.DECODED, kernel_sizes.LEAST_INPUTS = 80, 9000, 64
    for number, ((place, table), own) in enumerate(itertools.product(enumerate(TABLES), range(3))):
        shape, dtype = SHAPES[(place + 2 * own) % 3], (torch.float32, torch.bfloat16)[number % 2]
        weight = held(*shape, table, GROUPS[own], OFFSETS[(place + own) % 3], SCALES[place % 3])
        bias = torch.randn(shape[0], dtype=dtype) if number % 4 else None
        for count, fewer in ((5, 1), (70, 17)) if number % 9 == 0 else ((5, 1),):
            x = rows_of(count, shape[1], dtype)
            found = by_triton(x.view(1, count, -1), weight, bias)[0]
            assert found.dtype is dtype, (table, count)
            require_near(found, x, weight, bias, 2 * torch.finfo(dtype).eps)
            assert torch.equal(by_triton(x[:fewer], weight, bias), found[:fewer]), (table, count)
        require_decoded(rows_of(90, shape[1], dtype), weight, bias)
    assert by_triton(x[:0], weight, bias).shape == (0, shape[0])


def require_decoded(x: Tensor, weight: Coded, bias: Tensor | None) -> None:
    """The product with weights that are rounded to the type of the inputs."""
    exact = x.double() @ wide(weight).T + (0 if bias is None else bias.double())
    off = (by_triton(x, weight, bias).double() - exact).abs()
    sums = x.double().abs() @ wide(weight).abs().T
    unit = 2 * torch.finfo(x.dtype).eps
    assert (off <= unit * exact.abs() + max(unit, weight.inputs * 2**-24) * sums).all(), weight.kind


def by_triton(x: Tensor, weight: Coded, bias: Tensor | None) -> Any:
    from llama_ssp.models.kernels.coded_triton import linear_coded

    kind, offsets = weight.kind, weight.zero_NG if weight.shift_NG is None else weight.shift_NG
    factors = values(kind.table), weight.scale_NG, offsets, bias
    sizes = len(weight.codes_NC), kind.group or weight.inputs, list(TABLES).index(kind.table)
    return linear_coded(x, weight.codes_NC, *factors, *sizes)


@pytest.mark.parametrize(("capability", "triton", "expected"), [
    ((9, 0), True, True), ((8, 0), True, True), ((7, 5), True, False), ((9, 0), False, False),
], ids=["9.0", "8.0", "7.5", "9.0 without Triton"])  # fmt: skip
def test_where_there_is_a_kernel(monkeypatch, capability: tuple[int, int], triton: bool, expected: bool):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(coded, "triton_runs", lambda: triton)
    assert available(torch.device("cuda:0")) is expected and available(CPU)


INPUTS = 160


def made(table: str, group: int, outputs: int = 12, **how: Any) -> Coded:
    """A matrix of random codes, with zeros if its codes are unsigned, else with a shift."""
    return held(outputs, INPUTS, table, group, "zero" if table.startswith("u") else "shift", **how)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_a_value_for_every_code(table: str) -> None:
    assert len(values(table)) == 1 << Codes(table).bits


@pytest.mark.parametrize("table", TABLES)
def test_all_tables_but_those_of_bitsandbytes_are_exact_in_16_bit(table: str) -> None:
    numbers = values(table)
    rounded = numbers.bfloat16().float()
    assert (table in ("nf4", "fp4")) != torch.equal(rounded.nan_to_num(), numbers.nan_to_num())


def test_codes_of_4_bit_are_packed_two_in_a_byte() -> None:
    code_NK = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    assert packed(code_NK).tolist() == [[0x21, 0x03]]
    assert unpacked(packed(code_NK)).tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_is_decoded_a_weight_at_a_time(table: str, group: int, dtype: torch.dtype) -> None:
    """In the type of the scales, with the last group shorter; a few rows at a time, too."""
    matrix = made(table, group, dtype=dtype, unit=1 / 127)
    weight_NK = matrix.decoded(torch.float32)
    code_NK = unpacked(matrix.codes_NC) if matrix.kind.bits == 4 else matrix.codes_NC
    for n, k in ((0, 0), (3, 31), (5, 127), (5, 128), (11, 159)):
        g = k // group if group else 0
        value = values(table)[int(code_NK[n, k])].to(dtype)
        if matrix.zero_NG is not None:
            value = value - matrix.zero_NG[n, g].to(dtype)
        value = value * matrix.scale_NG[n, g] * (1 / 127)
        if matrix.shift_NG is not None:
            value = value - matrix.shift_NG[n, g]
        torch.testing.assert_close(weight_NK[n, k], value.float(), rtol=0, atol=0, equal_nan=True)
    with pytest.MonkeyPatch.context() as few:
        few.setattr("llama_ssp.models.formats.coded.DECODED_AT_ONCE", 5 * INPUTS)
        assert torch.equal(matrix.decoded(torch.float32), weight_NK)


SPANS = (0, 128), (128, 160), (64, 130), (6, 17)  # the third from the middle of a group to that of the next
CUTS = [None, Cut(ROWS, ((3, 7),)), Cut(ROWS, ((0, 2), (9, 12))), *(Cut(COLUMNS, (span,)) for span in SPANS)]


@pytest.mark.parametrize("table", ["uint4", "int8", "e4m3"])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("cut", CUTS)
def test_a_part_has_the_weights_of_the_whole(table: str, group: int, cut: Cut | None) -> None:
    matrix = made(table, group)
    part, whole = matrix.cut(cut), matrix.decoded(torch.float32)
    if cut is not None:
        whole = torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in cut.spans], cut.dim)
    assert part.shape == whole.shape
    torch.testing.assert_close(part.decoded(torch.float32), whole, rtol=0, atol=0, equal_nan=True)


def test_a_part_has_memory_of_its_own() -> None:
    """A slice may be a view of a file, and would keep all of it in memory."""
    matrix = made("uint4", 32)
    for cut in (None, Cut(ROWS, ((3, 7),)), Cut(COLUMNS, ((32, 64),))):
        part = matrix.cut(cut)
        held = [part.codes_NC, part.scale_NG, part.zero_NG]
        of_whole = {each.untyped_storage().data_ptr() for each in (matrix.codes_NC, matrix.scale_NG)}
        for each in held:
            assert each is not None and each.is_contiguous()
            assert each.untyped_storage().data_ptr() not in of_whole
            assert each.untyped_storage().nbytes() == each.nbytes
        assert part.nbytes == sum(each.nbytes for each in held if each is not None), cut
    with pytest.raises(ValueError, match="before input 3"):  # in the middle of a byte
        matrix.cut(Cut(COLUMNS, ((3, 9),)))


def test_matrices_are_joined_by_their_outputs() -> None:
    parts = [made("uint4", 32, outputs) for outputs in (12, 8, 20)]
    weights = torch.cat([each.decoded(torch.float32) for each in parts])
    assert torch.equal(joined(parts).decoded(torch.float32), weights)
    with pytest.raises(ValueError, match="different codes"):
        joined([made("uint4", 32), made("uint4", 128)])
