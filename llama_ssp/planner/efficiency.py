"""How fast products with quantised weights are, by their format and the device. No torch.

The one table of what is measured or documented. Shares are of the machine's own figures, so that they hold
for machines with other memories; plain weights in 16 bit on a GPU are what these figures are of.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.config import Dtype
from llama_ssp.planner.storage import CPU, CUDA, Store, Weight

Points = tuple[tuple[int, float], ...]  # (tokens of a pass, a figure), as speed.between takes them

PLAIN, FOUR, EIGHT, CURVE, DECODED = "plain", "4 bit", "8 bit", "nf4", "decoded"
LLM_INT8, BITSANDBYTES_NF4 = "LLM.int8", "nf4 of bitsandbytes"


@dataclass(frozen=True)
class Efficiency:
    """`read`: the time to read codes and scales, over that of as many bytes in 16 bit.

    `flops`: the share of the machine's operations a second. From `moves_from` tokens on a weight is decoded
    before its product, which moves `moved` bytes of memory.
    """

    read: float
    flops: Points
    moved: float = 0.0
    moves_from: int = 1


def _flat(share: float) -> Points:
    return ((1, share),)


EFFICIENCY: dict[tuple[str, str], Efficiency] = {
    # Measured, AVX-512 with bf16: bench/results/coded_epyc-2-cores_202611.md. It does not hold for
    # coded_second_epyc-2-cores_202611.md, when memory and wide products were faster, and products of codes
    # were not: there 5 tokens took up to 2.6 times as long as this table says, 12 tokens up to 3 times.
    # Passes of more than a few tokens are computed in another way, at which 64 tokens of plain weights attain
    # all there is.
    (CPU, PLAIN): Efficiency(1.0, ((16, 2.0), (64, 1.0), (65, 1.0))),  # by the kernel of compiled steps
    (CPU, FOUR): Efficiency(1.12, ((12, 2.2), (64, 0.84), (65, 0.84))),
    (CPU, CURVE): Efficiency(1.05, ((12, 1.25), (64, 0.45), (65, 0.45))),
    (CPU, EIGHT): Efficiency(1.07, ((12, 1.9), (64, 0.72), (65, 0.72))),
    # Measured: bench/results/linear_epyc-2-cores_202611.md.
    (CPU, LLM_INT8): Efficiency(5.3, ((2, 0.13), (5, 0.3), (9, 0.48), (16, 0.75), (17, 0.75))),
    # Estimates, by the bytes of what is made on the way: numbers in fp32 and indices; of bitsandbytes 16 bit.
    (CPU, DECODED): Efficiency(1.0, _flat(1.0), moved=18.0),
    (CPU, BITSANDBYTES_NF4): Efficiency(1.0, _flat(1.0), moved=4.0),
    # Estimates: these kernels have not been measured on a GPU.
    (CUDA, FOUR): Efficiency(1.3, _flat(0.5)),
    (CUDA, EIGHT): Efficiency(1.2, _flat(0.5)),
    (CUDA, DECODED): Efficiency(1.0, _flat(1.0), moved=18.0),
    # Documented: matmul_4bit of bitsandbytes has a kernel for one token; for more it decodes to 16 bit first.
    (CUDA, BITSANDBYTES_NF4): Efficiency(1.3, _flat(1.0), moved=4.0, moves_from=2),
    # Documented: for the largest models 15 to 23 % slower than 16 bit
    # (huggingface.co/blog/hf-bitsandbytes-integration).
    (CUDA, LLM_INT8): Efficiency(2.4, _flat(1.0)),
}  # fmt: skip


def efficiency_of(weight: Weight, dtype: Dtype, store: Store) -> Efficiency | None:
    """Of a quantised matrix; None for one that is not quantised, and where the device is not known."""
    kind = _kind(weight, dtype, store)
    return EFFICIENCY.get((CPU if store.kernel == CPU else CUDA, kind)) if store.kernel else None


def of_plain(store: Store) -> Points:
    """The share of the machine's operations that products of plain weights attain."""
    return EFFICIENCY[CPU, PLAIN].flops if store.packs else _flat(1.0)


def _kind(weight: Weight, dtype: Dtype, store: Store) -> str:
    codes = weight.kept(dtype)
    if weight.linear and dtype is Dtype.nf4:
        return BITSANDBYTES_NF4
    if not codes.bits:
        return ""
    if dtype is Dtype.int8 and not store.compiled:
        return LLM_INT8
    if not store.reads(codes, weight.inputs):
        return DECODED
    if store.kernel == CPU and codes.table in ("nf4", "fp4"):
        return CURVE
    return FOUR if codes.bits == 4 else EIGHT
