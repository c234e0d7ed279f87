"""How fast products with quantised weights are, by their format and the device. No torch.

The one table of what is measured or documented. Shares are of the machine's own figures, so that they hold
for machines with other memories; plain weights in 16 bit on a GPU are what these figures are of.
"""

from dataclasses import dataclass

from llama_ssp.config import Dtype
from llama_ssp.planner.storage import CPU, CUDA, Storage, Weight, by_bitsandbytes

Points = tuple[tuple[int, float], ...]  # (tokens of a pass, a figure), as speed.between takes them

FOUR, SHIFTED, EIGHT, CURVE, DECODED = "4 bit", "4 bit with zero points", "8 bit", "nf4", "decoded"
EIGHT_GROUPED = "8 bit in small groups"
WIDE = 128  # inputs of a group: 8 bit is as fast as without groups; in groups of 32 it is slower
LLM_INT8, BITSANDBYTES_NF4 = "LLM.int8", "nf4 of bitsandbytes"


@dataclass(frozen=True)
class Efficiency:
    """A product takes the longer of two times: to read its codes and scales, and to multiply.

    `read`: the first, over the time in which torch's product reads as many bytes in 16 bit. `share`: the
    machine's operations a second that the second attains. From `moves_from` tokens on, a weight is also
    decoded before its product, in the time to move `moved` bytes of memory for each number.
    """

    read: float
    share: float
    moved: float = 0.0
    moves_from: int = 1


# Over torch's product in 16 bit, our CPU kernels read bytes in this share of the time: in compiled steps
# (bench/plan_speed.py engine=compiled); single large matrices take 0.55 to 0.6 (bench/linear.py).
PACKED_READ = 0.35

EFFICIENCY: dict[tuple[str, str], Efficiency] = {
    # Measured, AVX-512 with bf16: bench/results/coded_*.md, with memory of two speeds.
    # A few tokens take the time of the bytes, and more that of the cores. Zero points are subtracted, and nf4
    # is multiplied in fp32.
    (CPU, FOUR): Efficiency(1.12 * PACKED_READ, 0.86),
    (CPU, SHIFTED): Efficiency(1.12 * PACKED_READ, 0.74),
    (CPU, CURVE): Efficiency(1.2 * PACKED_READ, 0.49),
    (CPU, EIGHT): Efficiency(1.07 * PACKED_READ, 0.7),
    (CPU, EIGHT_GROUPED): Efficiency(1.07 * PACKED_READ, 0.62),
    # Measured in the same way: torch decodes in many small steps.
    (CPU, DECODED): Efficiency(1.0, 1.0, moved=105.0 * PACKED_READ),
    # Measured, bench/results/linear_*.md too, over torch's own product in 16 bit, which is what steps without
    # our kernels have. One token of LLM.int8 took 0.57 of that in one file, and 0.87 in the other.
    (CPU, LLM_INT8): Efficiency(1.46, 0.8, moved=1.64, moves_from=2),
    (CPU, BITSANDBYTES_NF4): Efficiency(1.0, 0.6),
    # A step of 7B with int4 in groups of 32 took 1.22 times as long as in bf16, where its kernel, too, reads
    # few inputs at a time (bench/results/gpu_h200_second_202611.md); nf4 itself has not been measured.
    (CUDA, CURVE): Efficiency(4.5, 0.5),
    # Estimates: these kernels have not been measured on a GPU.
    (CUDA, FOUR): Efficiency(1.3, 0.5),
    (CUDA, EIGHT): Efficiency(1.2, 0.5),
    (CUDA, DECODED): Efficiency(1.0, 1.0, moved=18.0),
    # Documented: matmul_4bit of bitsandbytes has a kernel for one token; for more it decodes to 16 bit first.
    (CUDA, BITSANDBYTES_NF4): Efficiency(1.3, 1.0, moved=4.0, moves_from=2),
    # Documented: for the largest models 15 to 23 % slower than 16 bit
    # (huggingface.co/blog/hf-bitsandbytes-integration).
    (CUDA, LLM_INT8): Efficiency(2.4, 1.0),
}
# Of plain weights: by the kernel of compiled steps on a CPU (the same files), and elsewhere.
PACKED: Points = ((16, 0.78), (64, 1.0), (65, 1.0))
PLAIN: Points = ((1, 1.0),)


def efficiency_of(weight: Weight, dtype: Dtype, store: Storage) -> Efficiency | None:
    """Of a quantised matrix; None for one that is not quantised, and where the device is not known."""
    kind = _kind(weight, dtype, store)
    return EFFICIENCY.get((CPU if store.kernel == CPU else CUDA, kind)) if store.kernel else None


def of_plain(store: Storage) -> tuple[Points, float]:
    """Returns the share of the machine's operations that plain weights' products attain, and their `read`."""
    return (PACKED, PACKED_READ) if store.packs else (PLAIN, 1.0)


def _kind(weight: Weight, dtype: Dtype, store: Storage) -> str:
    codes = weight.kept(dtype)
    if not codes.bits:
        return ""
    if by_bitsandbytes(dtype, store):
        return LLM_INT8 if dtype is Dtype.int8 else BITSANDBYTES_NF4
    if not store.reads(codes, weight.inputs):
        return DECODED
    if codes.table in ("nf4", "fp4"):
        return CURVE
    if store.kernel == CPU and codes.table == "uint4":
        return SHIFTED
    if codes.bits == 4:
        return FOUR
    return EIGHT_GROUPED if store.kernel == CPU and 0 < codes.group < WIDE else EIGHT
