"""8-bit layers by our own kernels: the weights are bitsandbytes', and products nearer to the exact ones."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.models.kernels import int8
from llama_ssp.models.kernels.int8 import OPERATOR, ROWS, Int8Linear, operators, usable
from llama_ssp.models.loader import load
from llama_ssp.models.quantization import quantised, scales_of
from llama_ssp.models.steps import SteppedModel
from tests.distributed.test_quantised import off
from tests.distributed.test_tensor import walked
from tests.families import build

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
SHAPES = [(64, 128), (70, 300), (33, 130), (5, 7)]  # outputs and inputs, whole portions and not
needs_compiler = pytest.mark.slow  # the kernel takes some ten seconds to build


def held(outputs: int, inputs: int, bias: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Tensor]:
    """A layer as LLM.int8 holds it, and what its codes say."""
    torch.manual_seed(outputs)
    shift = torch.randn(outputs, dtype=dtype) if bias else None
    layer = quantised(Dtype.int8, torch.randn(outputs, inputs).bfloat16(), shift, CPU)
    return layer, layer.weight.data.double() * next(scales_of(layer)).double()[:, None] / 127


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Inputs among which some are outliers, as LLM.int8 calls them."""
    x = torch.randn(count, inputs, dtype=dtype)
    x[:, :: max(inputs // 3, 1)] *= 20
    return x


def require_near(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, unit: float) -> None:
    """The rounding of the result, and of sums in 32 bits."""
    exact = x.double() @ weight.T + (0 if bias is None else bias.double())
    sums = x.double().abs() @ weight.abs().T
    assert ((found.double() - exact).abs() <= unit * exact.abs() + weight.shape[1] * 2**-24 * sums).all()


@needs_compiler
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_product_is_that_of_the_codes(outputs: int, inputs: int):
    operators("cpu")
    for bias in (True, False):
        layer, weight = held(outputs, inputs, bias)
        fast = Int8Linear(layer, next(scales_of(layer)))
        for count in range(1, ROWS + 1):
            x = rows_of(count, inputs)
            require_near(fast(x), x, weight, layer.bias, torch.finfo(x.dtype).eps)
            assert torch.equal(fast(x.view(1, count, -1))[0], fast(x))


@needs_compiler
def test_a_row_does_not_depend_on_the_rows_beside_it():
    """To the bit; also of a compiled step's many rows."""
    operators("cpu")
    layer, _ = held(70, 300, True)
    how = layer.weight.data, next(scales_of(layer)), layer.bias
    x = rows_of(29, 300)
    whole = torch.ops.llama_ssp.linear_int8(x, *how)
    for row in range(29):
        assert torch.equal(torch.ops.llama_ssp.linear_int8(x[row : row + 1], *how)[0], whole[row])
    torch.library.opcheck(torch.ops.llama_ssp.linear_int8.default, (x, *how))


@needs_compiler
def test_weights_are_those_of_the_layer_and_many_rows_its_own():
    layer, _ = held(64, 128, True)
    operators("cpu")
    x = rows_of(ROWS + 1, 128)
    plain = layer.eval()(x)
    fast = Int8Linear(layer, next(scales_of(layer)))
    assert torch.equal(fast(x), plain)
    assert not torch.equal(fast(x[1:]), layer(x[1:]))
    assert fast.codes.data_ptr() == layer.weight.data_ptr() == layer.state.CB.data_ptr()
    assert fast.scales.data_ptr() == layer.state.SCB.data_ptr()


@needs_compiler
def test_the_kernel_for_any_processor():
    """What is compiled where there are no instructions for such products."""
    code = """
import torch
from llama_ssp.models.kernels import build
from tests.test_int8 import SHAPES, held, operators, require_near, rows_of, scales_of
build.FLAGS = tuple(flag for flag in build.FLAGS if flag != "-march=native")
operators("cpu")
for shape in SHAPES:
    layer, weight = held(*shape, True)
    how = layer.weight.data, next(scales_of(layer)), layer.bias
    for count in (1, 5, 6, 13, 29):
        x = rows_of(count, shape[1])
        found = torch.ops.llama_ssp.linear_int8(x, *how)
        require_near(found, x, weight, layer.bias, torch.finfo(x.dtype).eps)
        assert torch.equal(torch.ops.llama_ssp.linear_int8(x[:1], *how)[0], found[0])
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@needs_compiler
def test_a_compiled_model_is_nearer_to_the_wide_one_than_llm_int8(tmp_path: Path):
    """And holds not a byte more."""
    changes = {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 704,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
    }
    build("llama-gqa", mild=True, **changes).save_pretrained(tmp_path)
    wide, narrow, eager = (
        load(ModelConf(name="small"), tmp_path, dtype, CPU, "model")
        for dtype in (Dtype.fp32, Dtype.bf16, Dtype.int8)
    )
    fast = load(ModelConf(name="small"), tmp_path, Dtype.int8, CPU, "model", fast=True)
    head, packed = eager.decoder.head.product.weight.nbytes, fast.decoder.head.product.packed.nbytes
    assert fast.weights_bytes - packed == eager.weights_bytes - head
    exact = walked(wide)
    least, ours, theirs = (off(walked(model), exact) for model in (narrow, fast, eager))
    assert least < ours < theirs
    assert isinstance(fast, SteppedModel) and fast._step is not None


@pytest.mark.slow  # a process of its own: triton must know before it is imported that it is to interpret
def test_the_kernel_for_gpus():
    code = "from tests.test_int8 import require_kernel_for_gpus; require_kernel_for_gpus()"
    interpreting = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=interpreting)


def require_kernel_for_gpus() -> None:
    """Portions of outputs, inputs and rows, whole and not, and no rows at all; a bias and none.

    The interpreter multiplies in 32 bits, and cuts 16 bits off where a GPU rounds.
    """
    from llama_ssp.models.kernels import int8_triton

    operators("cuda")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, "CUDA")
    int8_triton.FACTORS = int8_triton.tl.float32
    for shape, bias, dtype in itertools.product(SHAPES, (True, False), (torch.float32, torch.bfloat16)):
        layer, weight = held(*shape, bias, dtype)
        how = layer.weight.data, next(scales_of(layer)), layer.bias
        for count in (1, 5, ROWS, ROWS + 1):
            x = rows_of(count, shape[1], dtype)
            found = int8_triton.linear_int8(x.view(1, count, -1), *how)[0]
            assert found.dtype is dtype
            require_near(found, x, weight, layer.bias, 2 * torch.finfo(dtype).eps)
            assert torch.equal(int8_triton.linear_int8(x[:1], *how)[0], found[0])
        assert int8_triton.linear_int8(x[:0], *how).shape == (0, shape[0])


@pytest.mark.parametrize(("capability", "triton", "expected"), [
    ((9, 0), True, True), ((8, 0), True, True), ((7, 5), True, False), ((9, 0), False, False),
])  # fmt: skip
def test_where_there_is_a_kernel(monkeypatch, capability: tuple[int, int], triton: bool, expected: bool):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(int8, "find_spec", lambda _: object() if triton else None)
    assert usable(torch.device("cuda:0")) is expected and usable(CPU)
