"""The bytes of one tensor: by its number format, and by how a device keeps it. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from llama_ssp.config import Dtype
from llama_ssp.models.formats.kept import PLAIN, Kept
from llama_ssp.models.kernels.kernel_sizes import BLOCK
from llama_ssp.models.sharding import NF4_BLOCK
from llama_ssp.models.tensor_row import BUFFERS, EMBEDDING, EXPERTS, HEAD, LAYERS, NORMS, POSITIONS

# Codes that are made while loading.
MADE = {
    Dtype.int8: Kept(8, 0, 4, "int8"),
    Dtype.int4: Kept(4, 32, 2, "int4"),
    Dtype.nf4: Kept(4, NF4_BLOCK, 4, "nf4"),
}
# Bytes of a layer's weight, without scales; of packed ones at most.
BYTES: dict[Dtype, float] = {
    Dtype.fp64: 8,
    Dtype.fp32: 4,
    Dtype.bf16: 2,
    Dtype.fp16: 2,
    Dtype.packed: 1,
    **{dtype: codes.bits / 8 for dtype, codes in MADE.items()},
}
NF4_TABLE = 16 * 4  # the sixteen values of nf4, in fp32, with every matrix of bitsandbytes

# The groups of tensors.
SCALES = "quantisation scales"
WEIGHTS = (EMBEDDING, HEAD, LAYERS, EXPERTS, NORMS, SCALES, POSITIONS, BUFFERS)
IN_LAYERS = LAYERS, EXPERTS, SCALES

UNIT = 512  # bytes to which torch rounds requests on a GPU
CPU = "cpu"
CUDA = "cuda"
OLD = "a GPU without bf16"  # which has no kernel for codes
WORD = {CPU: 4, CUDA: 16}  # bytes of codes of a group that a kernel reads at once (models/kernels/coded.py)


@dataclass(frozen=True)
class Storage:
    """How a device keeps tensors.

    `unit`: bytes to which its allocator rounds. `kernel`: CPU or CUDA, of the kernels for codes; else codes
    are decoded for each product. `compiled`: of a model with compiled steps.
    """

    unit: int = 1
    kernel: str = ""
    compiled: bool = False

    @property
    def packs(self) -> bool:
        """Returns whether plain matrices are packed for a kernel, too."""
        return self.compiled and self.kernel == CPU

    def reads(self, codes: Kept, inputs: int) -> bool:
        """Returns whether the kernel takes groups of this size."""
        unit = WORD.get(self.kernel, 0) * 8 // codes.bits if codes.bits else 0
        return unit > 0 and (codes.group in (0, inputs) or codes.group > inputs or codes.group % unit == 0)


AS_THEY_ARE = Storage()


@dataclass(frozen=True, kw_only=True)
class Weight:
    """`times` equal tensors: matrices of `outputs` x `inputs`, or vectors (`inputs` 1)."""

    group: str
    outputs: int
    inputs: int
    times: int = 1
    linear: bool = False  # a layer's matrix, which may be quantised
    wide: bool = False  # in fp32 at least
    first: int = 0  # input of the matrix on disk
    codes: Kept = PLAIN  # of a quantised checkpoint

    @property
    def count(self) -> int:
        """Returns how many numbers are in one of them."""
        return self.outputs * self.inputs

    def kept(self, dtype: Dtype) -> Kept:
        """Returns its codes in memory. A part that begins inside a group has smaller groups."""
        if not self.linear:
            return PLAIN
        if dtype is not Dtype.packed:
            return MADE.get(dtype, PLAIN)
        codes = self.codes
        if codes.group:
            codes = codes._replace(group=math.gcd(codes.group, self.first))
        return codes


def width(dtype: Dtype, wide: bool = False) -> int:
    """Returns the bytes of an activation, or of a plain weight; quantised models compute in bf16.

    What is `wide` is in fp32 at least.
    """
    return int(max(BYTES[dtype], 4 if wide else 2))


def bytes_of(weight: Weight, dtype: Dtype, store: Storage = AS_THEY_ARE) -> Iterator[tuple[str, int]]:
    """Yields (group, bytes) of one such tensor, and of its scales where it is quantised."""
    codes = weight.kept(dtype)
    outputs = weight.outputs
    if weight.linear and dtype is Dtype.nf4 and by_bitsandbytes(dtype, store):
        yield weight.group, -(-weight.count // 2)
        yield SCALES, -(-weight.count // NF4_BLOCK) * 4
        yield SCALES, NF4_TABLE
    elif codes.bits:
        row = -(-weight.inputs * codes.bits // 8)
        if store.kernel == CPU and table_of(weight, dtype, store):
            outputs = _whole(outputs, BLOCK)
            row = _whole(row, WORD[CPU])
        groups = -(-weight.inputs // codes.group) if codes.group else 1
        yield weight.group, outputs * row
        yield EXPERTS if weight.group == EXPERTS else SCALES, outputs * groups * codes.bytes
    else:
        matrix = weight.linear or weight.group == HEAD
        if matrix and store.packs and weight.inputs * width(dtype) % WORD[CPU] == 0:
            outputs = _whole(outputs, BLOCK)
        yield weight.group, outputs * weight.inputs * width(dtype, weight.wide)


def by_bitsandbytes(dtype: Dtype, store: Storage) -> bool:
    """Returns whether its layers multiply what it has quantised while loading, and not our kernel."""
    if dtype is Dtype.nf4:
        return not (store.compiled and store.kernel == CUDA)
    return dtype is Dtype.int8 and not store.compiled


def table_of(weight: Weight, dtype: Dtype, store: Storage) -> tuple[str, int] | None:
    """Returns the table that the kernel reads the codes by, and its bytes; all matrices share it."""
    codes = weight.kept(dtype)
    by_kernel = store.reads(codes, weight.inputs) and not by_bitsandbytes(dtype, store)
    return (codes.table, 4 * 2**codes.bits) if by_kernel else None


def _whole(number: int, unit: int) -> int:
    return -(-number // unit) * unit
