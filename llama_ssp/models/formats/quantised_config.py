"""What config.json says of quantised weights: the format, and what its tensors do not say. No torch.

What cannot be read is refused here, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError

METHODS = ("compressed-tensors", "fp8", "awq", "gptq", "mxfp4", "bitsandbytes")
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense")
# Endings of the tensors that these add to quantised weights, or put in their place.
SCALES = (".SCB", ".absmax", ".qweight", ".weight_packed", "_scale", "_scale_inv", "_scales")
BLOCK_OF_4_BIT = 64  # of bitsandbytes: weights with one scale
# Of these tensors and of other formats' codes: endings that no plain model has.
CODES = (
    ".SCB", ".absmax", ".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".q_weight",
    ".W_q", "_qdata",
)  # fmt: skip
ACTIVATIONS = ("input_activations", "output_activations")  # of a group of compressed-tensors
PLAIN = {"F64", "F32", "F16", "BF16"}
READABLE = (
    "compressed-tensors (FP8, int8, int4), fp8, awq (4 bit), gptq (4 and 8 bit), mxfp4, bitsandbytes, GGUF"
)
PLAIN_COPY = "use a copy of the model in another format, or with plain weights and dtype=int8 or nf4"
ODD = "correct config.json, or fetch the model again"


@dataclass(frozen=True)
class QuantisedConfig:
    """The `quantization_config` of a folder whose weights can be read."""

    method: str  # of METHODS
    name: str  # for messages
    bits: int = 0  # of a code
    group: int = 0  # inputs with one scale; 0: all
    zeros: bool = False  # of groups
    block: tuple[int, int] | None = None  # of fp8: outputs and inputs with one scale
    act_order: bool = False
    less_one: bool = False  # gptq: zeros are stored less one
    activations: bool = False  # asks for quantised activations, which stay as they are
    every: tuple[tuple[int, int], ...] = ()  # compressed-tensors: bits and group of each group of layers


def quantised_config(config: Mapping[str, Any], where: Path) -> QuantisedConfig | None:
    """None for plain weights; a ModelError for a format that cannot be read."""
    method, claim = _claim(config)
    return _ClaimReader(claim, method, _place(where)).read() if method in METHODS else None


def require_readable(path: Path, config: Mapping[str, Any], formats: Mapping[str, str]) -> None:
    """A ModelError for a format that cannot be read, and for plain weights that config.json calls quantised.

    `formats`: that of every tensor's numbers. Some libraries would read plain weights as codes.
    """
    method, claim = _claim(config)
    if not method:
        if codes := sorted(name for name in formats if name.endswith(CODES)):
            what, where = "the weights are quantised, but config.json does not say how", path / "config.json"
            fix = f"add the model's quantization_config; or {PLAIN_COPY}"
            raise ModelError(what, where, f"{codes[0]}, no quant_method", READABLE, fix)
        return
    coded = any(name.endswith(SCALES) for name in formats) or not PLAIN.issuperset(formats.values())
    if coded and method not in METHODS:
        raise unreadable(_named(method, claim), _place(path))
    if method in METHODS and not coded:
        what = f"config.json says that {method} quantised the weights, but they are plain"
        fix = "remove quantization_config from config.json; dtype=int8 or nf4 quantises plain weights"
        raise ModelError(what, _place(path), "no scales among the tensors", fix=fix)
    if any(name.endswith(".weight_g_idx") for name in formats):
        raise unreadable("compressed-tensors with act-order (weight_g_idx)", _place(path))
    quantised_config(config, path)


def _claim(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The method, empty where there is none, and what config.json says of it."""
    claim = config.get("quantization_config")
    if not isinstance(claim, Mapping):
        return "", {}
    short = "bitsandbytes" if claim.get("load_in_8bit") or claim.get("load_in_4bit") else ""
    return str(claim.get("quant_method") or short), claim


def _named(method: str, claim: Mapping[str, Any]) -> str:
    """The method, and what it calls its format."""
    kind = next((claim[key] for key in ("quant_algo", "quant_type") if isinstance(claim.get(key), str)), "")
    return f"{method}, {kind}" if kind else method


def _place(folder: Path) -> str:
    return f"{folder / 'config.json'}: quantization_config"


def unreadable(found: str, where: str) -> ModelError:
    what = "the weights are quantised in a format that cannot be read"
    return ModelError(what, where, found, READABLE, PLAIN_COPY)


class _ClaimReader:
    def __init__(self, claim: Mapping[str, Any], method: str, place: str) -> None:
        self.claim, self.method, self.place = claim, method, place

    def read(self) -> QuantisedConfig:
        match self.method:
            case "gptq" | "awq":
                return self._by_input()
            case "fp8":
                return self._fp8()
            case "compressed-tensors":
                return self._compressed()
            case "bitsandbytes":
                return self._bitsandbytes()
        return QuantisedConfig(self.method, self.method)

    def _bitsandbytes(self) -> QuantisedConfig:
        if self.claim.get("load_in_4bit"):
            return QuantisedConfig(self.method, "bitsandbytes, 4 bits", 4, BLOCK_OF_4_BIT)
        return QuantisedConfig(self.method, "bitsandbytes, 8 bits", 8, activations=True)

    def _by_input(self) -> QuantisedConfig:
        """GPTQ and AWQ."""
        awq = self.method == "awq"
        bits = self._number("bits", "w_bit", default=4)
        group = self._number("group_size", "q_group_size", default=128)
        layout = str(
            self.claim.get("checkpoint_format") or self.claim.get("format") or self.claim.get("version") or ""
        )
        allowed = (("", "gemm"), (4,)) if awq else (("", "gptq", "gptq_v2"), (4, 8))
        if layout.lower() not in allowed[0] or bits not in allowed[1]:
            raise unreadable(f"{self.method}: {bits} bits, layout {layout or 'usual'}", self.place)
        if group == 0 or group < -1 or (group % 8 and group != -1):
            raise self._odd("group_size", group, "-1, or a multiple of 8")
        act_order = bool(self.claim.get("desc_act")) and not awq
        words = f"{self.method}, {bits} bits, " + (f"groups of {group}" if group > 0 else "a scale a row")
        name = words + (", act-order" if act_order else "")
        less_one = layout.lower() != "gptq_v2"
        group = max(group, 0)
        return QuantisedConfig(self.method, name, bits, group, True, act_order=act_order, less_one=less_one)

    def _fp8(self) -> QuantisedConfig:
        block = self.claim.get("weight_block_size", [128, 128])
        if block is not None:
            if not (
                isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
            ):
                raise self._odd("weight_block_size", block, "two positive numbers")
            block = block[0], block[1]
        where = f"blocks of {block[0]} x {block[1]}" if block else "a scale a matrix"
        group, activations = block[1] if block else 0, self.claim.get("activation_scheme") is not None
        return QuantisedConfig(self.method, f"fp8, {where}", 8, group, block=block, activations=activations)

    def _compressed(self) -> QuantisedConfig:
        own = self._groups()
        weights: list[Mapping[str, Any]] = [group["weights"] for group in own if group.get("weights")]
        formats = {str(self.claim.get("format") or "dense")}
        formats |= {str(group["format"]) for group in own if group.get("format")}
        other = sorted(formats - {*FORMATS, "mixed-precision"})
        if other:
            raise unreadable(f"compressed-tensors {', '.join(other)}", self.place)
        if self.claim.get("transform_config"):
            raise unreadable(
                "compressed-tensors with transforms of activations (transform_config)", self.place
            )
        sparse = self.claim.get("sparsity_config")
        if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
            raise unreadable(f"compressed-tensors, {sparse['format']}", self.place)
        blocks = {block for args in weights if (block := _block(args)) is not None}
        if len(blocks) > 1:
            raise unreadable("compressed-tensors with blocks of several sizes", self.place)
        kinds = sorted({self._kind(args) for args in weights})
        name = f"compressed-tensors, {', '.join(kinds)}"
        block = next(iter(blocks), None)
        args: Mapping[str, Any] = next(iter(weights), {})
        zeros = args.get("symmetric") is False
        activations = any(group.get(key) for group in own for key in ACTIVATIONS)
        sizes, every = _sizes(args, block), tuple(_sizes(args, _block(args)) for args in weights)
        return QuantisedConfig(
            self.method, name, *sizes, zeros=zeros, block=block, activations=activations, every=every
        )

    def _groups(self) -> list[Mapping[str, Any]]:
        """The groups of layers."""
        groups = self.claim.get("config_groups") or {}
        own = list(groups.values()) if isinstance(groups, Mapping) else [groups]
        for group in own:
            if not isinstance(group, Mapping) or not isinstance(group.get("weights") or {}, Mapping):
                raise self._odd("config_groups", group, "groups with the arguments of their weights")
        return own

    def _kind(self, args: Mapping[str, Any]) -> str:
        """As `int4 in groups of 128`."""
        bits, group, type_ = args.get("num_bits", 8), args.get("group_size"), args.get("type", "int")
        if type(bits) is not int:
            raise self._odd("num_bits", bits, "4 or 8")
        if group is not None and (type(group) is not int or group == 0 or group < -1):
            raise self._odd("group_size", group, "-1, or a positive number")
        if (type_, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise unreadable(f"compressed-tensors, {bits} bits, {type_}", self.place)
        table = f"{'FP' if type_ == 'float' else 'int'}{bits}"
        return f"{table} in groups of {group}" if (group or 0) > 0 else f"{table} by {args.get('strategy')}"

    def _number(self, *keys: str, default: int) -> int:
        value = next((self.claim[key] for key in keys if self.claim.get(key) is not None), default)
        if type(value) is not int:
            raise self._odd(keys[0], value, "a whole number")
        return value

    def _odd(self, key: str, found: object, allowed: str) -> ModelError:
        what = f"config.json has no usable {key} of its quantised weights"
        return ModelError(what, self.place, repr(found), allowed, ODD)


def _block(args: object) -> tuple[int, int] | None:
    block = args.get("block_structure") if isinstance(args, Mapping) else None
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    return None


def _sizes(args: Mapping[str, Any], block: tuple[int, int] | None) -> tuple[int, int]:
    """Bits of a code, and inputs with one scale."""
    bits, group = args.get("num_bits"), block[1] if block else args.get("group_size")
    return bits if bits in (4, 8) else 0, group if type(group) is int and group > 0 else 0
