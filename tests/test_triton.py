"""Kernels for GPUs: they compile for every generation, and the interpreter gives the reference's numbers."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from llama_ssp.models.kernels import int8_triton  # noqa: E402

tl = triton.language
GENERATIONS = (80, 86, 89, 90, 100)
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # KiB that a program may have


def products(bias: str) -> dict[str, Any]:
    """The arguments of the kernel for 8 bit: their types, and the constants among them."""
    return {
        "x_ptr": "*bf16", "code_ptr": "*i8", "scale_ptr": "*fp32", "bias_ptr": bias, "y_ptr": "*bf16",
        "rows": "i32", "outputs": "i32", "inputs": "i32", "ROWS": int8_triton.ROWS,
        "OUTPUTS": int8_triton.OUTPUTS, "INPUTS": int8_triton.INPUTS, "FACTORS": tl.bfloat16,
    }  # fmt: skip


KERNELS = [
    (int8_triton.multiply, products(bias), int8_triton.WARPS, int8_triton.STAGES) for bias in ("", "*bf16")
]


def compiled(kernel: Any, arguments: dict[str, Any], generation: int, warps: int, stages: int) -> Any:
    """The kernel for a GPU of this generation; pointers are those of whole tensors, so they are aligned."""
    constants = {
        name: given or None for name, given in arguments.items() if not isinstance(given, str) or not given
    }
    signature = {name: "constexpr" if name in constants else given for name, given in arguments.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }  # fmt: skip
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)


@pytest.mark.few(3)  # a second each, unless triton's cache has it
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("case", range(len(KERNELS)))
def test_kernels_compile(case: int, generation: int):
    kernel, arguments, warps, stages = KERNELS[case]
    found = compiled(kernel, arguments, generation, warps, stages)
    assert "cubin" in found.asm
    assert found.metadata.shared <= SHARED[generation] * 1024
