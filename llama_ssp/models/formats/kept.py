"""What a packed model keeps of each matrix, from the headers of its files alone. No torch.

The layouts themselves (layouts.py, block_layouts.py, gguf_source.py) need torch, which a plan does without;
tests/test_packed_bytes.py holds the plan against the bytes of loaded models, in every format.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from llama_ssp.models.families import Names
from llama_ssp.models.formats.quantised_config import NVFP4_GROUP, QuantisedConfig

Headers = Mapping[str, tuple[str, tuple[int, ...]]]  # of a matrix's tensors, by the end of their names


class Kept(NamedTuple):
    """The codes of a matrix in memory: the words of `ModelConf.code_mix`, in their order."""

    bits: int = 0  # of a code; 0: the matrix is plain
    group: int = 0  # inputs that share a scale; 0: all of a row
    bytes: int = 0  # of a scale with its zero or shift
    table: str = ""  # of coded.TABLES; empty where it is not known


PLAIN = Kept()
# Formats of GGUF: scales and shifts are kept in fp32, and codes of 5 and 6 bits in a byte.
GGUF = {
    "Q4_0": Kept(4, 32, 4, "int4"),
    "Q4_1": Kept(4, 32, 8, "uint4"),
    "Q5_0": Kept(8, 32, 4, "int8"),
    "Q5_1": Kept(8, 32, 8, "uint8"),
    "Q8_0": Kept(8, 32, 4, "int8"),
    "Q2_K": Kept(4, 16, 8, "uint4"),
    "Q3_K": Kept(4, 16, 4, "int4"),
    "Q4_K": Kept(4, 32, 8, "uint4"),
    "Q5_K": Kept(8, 32, 8, "uint8"),
    "Q6_K": Kept(8, 16, 4, "int8"),
}
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")  # a layer's number and a name in it, in GGUF
STATE_OUTPUT = "ssm_out"  # of a layer with linear attention, which others do not have
GGUF_FORMATS = ("F32", "F16", "BF16", *GGUF)
Matrices = Mapping[tuple[int, str], Kept]  # by the layer's number and the matrix's name in GGUF
# Matrices with the same inputs, which are one product if they have the same codes. By their names in GGUF.
FUSED = [
    ("attn_q", "attn_k", "attn_v"),
    ("attn_qkv",),
    ("attn_output",),
    ("delta_qkv", "delta_z", "delta_b", "delta_a"),  # of linear attention, as in HYBRID
    ("delta_qkvz", "delta_ba"),
    ("delta_out",),
    ("ffn_gate", "ffn_up"),
    ("ffn_down",),
    ("shared_gate", "shared_up"),  # of experts that all tokens go through
    ("shared_down",),
    ("expert_gate", "expert_up"),
    ("expert_down",),
    ("full_attn_q", "full_attn_k", "full_attn_v"),  # of layers that see the whole text, of other sizes
    ("full_attn_output",),
]
EXPERT = ("expert_gate", "expert_up", "expert_down")  # of the first expert of a layer, for all of them
# What GGUF calls matrices of families with linear attention, and their names here.
HYBRID = {
    "attn_qkv": ("delta_qkv",),
    "attn_gate": ("delta_z",),
    "ssm_beta": ("delta_b",),
    "ssm_alpha": ("delta_a",),
    "ssm_ba": ("delta_b", "delta_a"),  # of each head of keys betas of its values, then their decays
    STATE_OUTPUT: ("delta_out",),
    "ffn_gate_shexp": ("shared_gate",),
    "ffn_up_shexp": ("shared_up",),
    "ffn_down_shexp": ("shared_down",),
    "ffn_gate_exps": ("expert_gate",),  # the matrices of all experts in one tensor
    "ffn_up_exps": ("expert_up",),
    "ffn_gate_up_exps": ("expert_gate", "expert_up"),
    "ffn_down_exps": ("expert_down",),
}
MATRICES = [name for group in FUSED for name in group]
SCALE_BYTES = {"F16": 2, "BF16": 2}  # others are kept in fp32
BYTE_TABLES = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "I8": "int8"}
# Bytes of the numbers in whose place bitsandbytes stores its 4-bit codes (bnb_4bit_quant_storage).
STORAGE_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}


def names_of(names: Names) -> dict[str, str]:
    """Returns the names in GGUF of a block's matrices, by the family's."""
    qkv = ("attn_q", "attn_k", "attn_v") if len(names.qkv) > 1 else ("attn_qkv",)
    up = ("ffn_gate", "ffn_up") if len(names.up) > 1 else ("ffn_up",)
    others = {names.output: "attn_output", names.down: "ffn_down"}
    if names.delta is not None:
        inputs: tuple[str, ...] = ("delta_qkv", "delta_z", "delta_b", "delta_a")
        if len(names.delta.inputs) == 2:
            inputs = ("delta_qkvz", "delta_ba")
        others |= dict(zip(names.delta.inputs, inputs, strict=True)) | {names.delta.output: "delta_out"}
    if names.shared_down:
        shared = ("shared_gate", "shared_up", "shared_down")
        others |= dict(zip((*names.shared_up, names.shared_down), shared, strict=True))
    return dict(zip(names.qkv, qkv, strict=True)) | dict(zip(names.up, up, strict=True)) | others


def in_full_layers(names: Mapping[str, str]) -> dict[str, str]:
    """Returns the names in which attention's matrices have those of layers that see the whole text."""
    return {own: f"full_{name}" if name.startswith("attn_") else name for own, name in names.items()}


def sizes(matrices: Matrices) -> dict[str, Any]:
    """The codes of a model, by the names of ModelConf: those of most matrices, and the mix of all."""
    counts = Counter(codes for codes in matrices.values() if codes.bits)
    most = max(counts.items(), key=lambda each: each[1], default=(PLAIN, 0))[0]
    return {**usual(most), "code_mix": _mix(matrices)}


def usual(codes: Kept) -> dict[str, Any]:
    """The sizes of a model in which all matrices have these codes."""
    return {"code_bits": codes.bits, "code_group": codes.group, "code_bytes": codes.bytes, "code_mix": ""}


def _mix(matrices: Matrices) -> str:
    """A word for each kind of product: its matrices, how many layers have it so, and its codes."""
    counts: Counter[tuple[str, Kept]] = Counter()
    for number in {number for number, _ in matrices}:
        for group in FUSED:
            found = {name: matrices[number, name] for name in group if (number, name) in matrices}
            if group[0] in EXPERT and not coded_experts(matrices, number):
                continue
            if len(set(found.values())) == 1:
                counts["+".join(found), next(iter(found.values()))] += 1
            else:
                counts.update(found.items())
    return " ".join(":".join(map(str, (names, n, *codes))) for (names, codes), n in sorted(counts.items()))


def products_of_mix(mix: str) -> Iterator[tuple[list[str], int, Kept]]:
    """Yields each kind of product of a mix: its matrices, how many layers have it so, and its codes."""
    for word in mix.split():
        names, times, bits, group, size, table = word.split(":")
        codes = Kept(bits=int(bits), group=int(group), bytes=int(size), table=table)
        yield names.split("+"), int(times), codes


def kinds_of_mix(mix: str) -> set[tuple[Kept, bool]]:
    """Returns the codes of a mix whose tables are known, each with whether they are those of experts."""
    kinds = set()
    for names, _, codes in products_of_mix(mix):
        if codes.bits and codes.table:
            kinds.add((codes, names[0] in EXPERT))
    return kinds


def coded_experts(matrices: Matrices, number: int) -> bool:
    """Whether a layer's experts are kept in codes: gates and ups are one matrix."""
    gate, up, down = (matrices.get((number, name)) for name in EXPERT)
    return bool(up and down and up.bits and down.bits and gate in (None, up))


def of_config(config: QuantisedConfig | None) -> Kept:
    """What config.json says of all matrices. Most files have scales in 16 bit.

    Codes of GPTQ with act-order are not kept.
    """
    if config is None or config.act_order or not config.bits:
        return PLAIN
    wide = config.method in ("fp8", "bitsandbytes")
    return Kept(config.bits, config.group, (4 if wide else 2) + config.zeros)


def of_gguf(formats: Mapping[str, str], value_dim: int = 0) -> dict[tuple[int, str], Kept]:
    """Returns what is kept of each matrix of a GGUF file; `formats` has those of all tensors.

    `value_dim`: of linear attention, numbers of a head of values; 0: the model has none. These heads come in
    another order in the output's inputs, so that its codes are kept if heads are whole groups of inputs.
    """
    result = {}
    for name, kind in formats.items():
        place = BLOCK.fullmatch(name.removesuffix(".weight"))
        if place is None:
            continue
        codes = GGUF.get(kind, PLAIN)
        if place[2] == STATE_OUTPUT and codes.group and value_dim % codes.group:
            codes = PLAIN
        for own in HYBRID.get(place[2], (place[2],)) if value_dim else (place[2],):
            result[int(place[1]), own] = codes
    return result


def of_folder(
    tensors: Headers,
    config: QuantisedConfig,
    names: Mapping[str, str],
    inputs: Mapping[str, int],
    layer: Any,
    full: Collection[int] = (),
) -> dict[tuple[int, str], Kept]:
    """What is kept of each matrix of the folder's blocks.

    `names`: in GGUF, by the names in this family's blocks; `inputs`: by the names in GGUF; `layer`: finds a
    block's number in the name of a tensor; `full`: blocks whose attention has other sizes.
    """
    found: dict[tuple[int, str], dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    stems: dict[tuple[int, str], str] = {}
    for tensor, header in tensors.items():
        if match := layer.search(tensor):
            leaf = tensor[match.end() :]
            own = next((own for own in names if leaf.startswith((f"{own}.", f"{own}_"))), None)
            if own is not None:
                number = int(match[1])
                place = number, (in_full_layers(names) if number in full else names)[own]
                stems[place] = tensor[: match.end()] + own
                found[place][leaf.removeprefix(own)] = header
    result = {}
    for place, stored in found.items():
        result[place] = kept(stored, config.of_layer(stems[place]), inputs[place[1]])
    return result


def kept(stored: Headers, config: QuantisedConfig, inputs: int) -> Kept:
    """What is kept of the matrix with these tensors and `inputs` inputs, in any format of a folder.

    Of tensors that contradict each other nothing: reading them is refused, with the reason.
    """
    try:
        return _kept(stored, config, inputs)
    except (LookupError, TypeError, ValueError, ZeroDivisionError, StopIteration):
        return PLAIN


def _kept(stored: Headers, config: QuantisedConfig, inputs: int) -> Kept:
    if config.act_order:
        return PLAIN
    if ".weight_global_scale" in stored or ".weight_scale_2" in stored:
        return Kept(4, NVFP4_GROUP, 4, "e2m1")
    if ".qweight" in stored:  # awq, gptq
        type_, shape = stored[".scales"]
        group = config.group if shape[0] > 1 else 0
        return Kept(config.bits, group, SCALE_BYTES.get(type_, 4) + 1, f"uint{config.bits}")
    if "_blocks" in stored:  # mxfp4
        return Kept(4, 32, 2, "e2m1")
    if ".weight_packed" in stored:
        return _packed(stored, inputs)
    if ".weight.absmax" in stored:
        table = next(table for table in ("nf4", "fp4") if any(end.endswith(table) for end in stored))
        storage, shape = stored[".weight"]
        codes = 2 * math.prod(shape) * STORAGE_BYTES[storage]
        scales = math.prod(stored[".weight.absmax"][1])
        return Kept(4, codes // max(scales, 1), 4, table)
    if ".SCB" in stored:
        return Kept(8, 0, 4, "int8")
    scale = next((end for end in (".weight_scale_inv", ".weight_scale") if end in stored), None)
    return PLAIN if scale is None else _scaled(stored, scale, config)


def _packed(stored: Headers, inputs: int) -> Kept:
    """compressed-tensors' words of codes."""
    bits = 4 if stored[".weight_packed"][1][1] == -(-inputs // 8) else 8
    type_, shape = stored[".weight_scale"]
    zeros = ".weight_zero_point" in stored
    groups = shape[1] if len(shape) == 2 else 1
    size = SCALE_BYTES.get(type_, 4) + zeros
    table = f"uint{bits}" if zeros else f"int{bits}"
    return Kept(bits=bits, group=inputs // groups if groups > 1 else 0, bytes=size, table=table)


def _scaled(stored: Headers, scale: str, config: QuantisedConfig) -> Kept:
    """Codes of a byte each, and a grid of scales."""
    type_, (outputs, inputs) = stored[".weight"]
    scale_type, shape = stored[scale]
    rows, groups = shape if len(shape) == 2 else (math.prod(shape), 1)
    group = -(-inputs // groups)
    if config.block and (rows not in (1, outputs) or groups != 1):
        group = config.block[1]
    zeros = ".weight_zero_point" in stored
    size = 4 if config.method == "fp8" else SCALE_BYTES.get(scale_type, 4)
    return Kept(8, group if groups > 1 else 0, size + zeros, "uint8" if zeros else BYTE_TABLES[type_])
