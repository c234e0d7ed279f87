"""How fast products with weights of each number format are: one rate a format and device. No torch.

A rate is a share of what the machine's own figures say, so that it holds for machines with other memories: of
our CPU kernels' product with packed 16-bit weights, or of torch's product in 16 bit. Which of the two is
faster, and by how much, depends on the processor: both are measured.
"""

from dataclasses import dataclass

from llama_ssp.config import Dtype
from llama_ssp.planner.storage import CPU, CUDA, Storage, Weight, by_bitsandbytes


@dataclass(frozen=True)
class Rate:
    """Bytes of weights and scales are read at the share `read` of a bandwidth, and multiplied at the share
    `multiply` of an arithmetic rate: those of our CPU kernels, or, without `by_kernel`, of torch."""

    read: float
    multiply: float
    by_kernel: bool = False


PLAIN_RATE = Rate(read=1.0, multiply=1.0)

# Formats, as products have them in memory.
PACKED = "16 bit, packed"
FOUR = "4 bit"
FOUR_FINE = "4 bit in small groups"
EIGHT = "8 bit"
FP8 = "FP8"
CURVE = "nf4"
DECODED = "decoded for each product"
LLM_INT8 = "LLM.int8"
BITSANDBYTES_NF4 = "nf4 of bitsandbytes"

WIDE = 64  # inputs of a group that is not small
FP8_TABLES = ("e4m3", "e5m2")

# Where our CPU kernels are not measured: they read bytes in this share of the time that torch's product
# takes, in compiled steps on an EPYC (bench/results/plan_speed_compiled_epyc-2-cores_202611.md), and multiply
# at this share of torch's rate (coded_*epyc*.md). On processors with matrix units (AMX) torch multiplies
# several times as fast as our kernels do.
PACKED_READ = 0.35
PACKED_MULTIPLY = 0.85

RATES: dict[tuple[str, str], Rate] = {
    # Measured on two processors, with AVX-512 and with AMX (bench/results/coded_*.md), and chosen between the
    # two: codes are almost as fast a byte as packed 16 bit; from some ten tokens on a product takes the time
    # of the cores.
    (CPU, PACKED): Rate(read=1.0, multiply=1.0, by_kernel=True),
    (CPU, FOUR): Rate(read=0.8, multiply=0.9, by_kernel=True),
    (CPU, FOUR_FINE): Rate(read=0.8, multiply=0.9, by_kernel=True),
    (CPU, EIGHT): Rate(read=0.8, multiply=0.7, by_kernel=True),
    (CPU, FP8): Rate(read=0.8, multiply=0.7, by_kernel=True),
    (CPU, CURVE): Rate(read=0.75, multiply=0.76, by_kernel=True),
    (CPU, DECODED): Rate(read=0.0102, multiply=0.8),
    # Measured in the same files and in linear_*.md. One token of LLM.int8 is faster: 0.57 and 0.87 of the
    # time in 16 bit; two and more take 1.4 to 1.5 of it.
    (CPU, LLM_INT8): Rate(read=0.33, multiply=0.8),
    (CPU, BITSANDBYTES_NF4): Rate(read=1.0, multiply=0.6),
    # Measured on an H200, 1 and 5 rows (bench/results/gpu_h200_second_202611.md): kernels for nf4 and small
    # groups read few inputs at a time. How fast many rows are multiplied is an estimate.
    (CUDA, FOUR): Rate(read=0.43, multiply=0.5),
    (CUDA, FOUR_FINE): Rate(read=0.24, multiply=0.5),
    (CUDA, EIGHT): Rate(read=0.76, multiply=0.5),
    (CUDA, FP8): Rate(read=0.33, multiply=0.5),
    (CUDA, CURVE): Rate(read=0.22, multiply=0.5),
    # Estimated.
    (CUDA, DECODED): Rate(read=0.04, multiply=1.0),
    # Documented: matmul_4bit of bitsandbytes decodes to 16 bit first if there are several tokens; LLM.int8 is
    # 15 to 23 % slower than 16 bit for the largest models (huggingface.co/blog/hf-bitsandbytes-integration).
    (CUDA, BITSANDBYTES_NF4): Rate(read=0.11, multiply=1.0),
    (CUDA, LLM_INT8): Rate(read=0.42, multiply=1.0),
}


def plain_rate(store: Storage) -> Rate:
    """Returns the rate of weights that are not quantised."""
    return RATES[CPU, PACKED] if store.packs else PLAIN_RATE


def rate_of(weight: Weight, dtype: Dtype, store: Storage) -> Rate:
    """Returns the rate of a quantised matrix."""
    codes = weight.kept(dtype)
    if by_bitsandbytes(dtype, store):
        form = LLM_INT8 if dtype is Dtype.int8 else BITSANDBYTES_NF4
    elif not store.reads(codes, weight.inputs):
        form = DECODED
    elif codes.table in ("nf4", "fp4"):
        form = CURVE
    elif codes.bits == 4:
        form = FOUR_FINE if 0 < codes.group < WIDE else FOUR
    else:
        form = FP8 if codes.table in FP8_TABLES else EIGHT
    return RATES[CPU if store.kernel == CPU else CUDA, form]
