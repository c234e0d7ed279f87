"""What config.json says of quantised weights: the format, and what its tensors do not say. No torch.

What cannot be read is refused here, before a weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.patterns import complaint, matched

METHODS = ("compressed-tensors", "fp8", "awq", "gptq", "mxfp4", "bitsandbytes", "modelopt")
FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "dense",
)
MODELOPT = "hf_quant_config.json"  # where modelopt says what config.json does not
NVFP4_GROUP = 16  # inputs with one scale
DYNAMIC = "dynamic"  # gptq: settings of single layers, by patterns of their names
# Endings of the tensors that these add to quantised weights, or put in their place.
SCALES = (".SCB", ".absmax", ".qweight", ".weight_packed", "_scale", "_scale_inv", "_scales")
BLOCK_OF_4_BIT = 64  # of bitsandbytes: weights with one scale
# Of these tensors and of other formats' codes: endings that no plain model has.
CODES = (*SCALES[:4], ".weight_scale", ".weight_scale_inv", ".q_weight", ".W_q", "_qdata")
ACTIVATIONS = ("input_activations", "output_activations")  # of a group of compressed-tensors
PLAIN = {"F64", "F32", "F16", "BF16"}
READABLE = (
    "compressed-tensors (FP8, int8, int4, NVFP4), fp8, awq (4 bit), gptq (4 and 8 bit), mxfp4, bitsandbytes, "
    "modelopt (FP8, NVFP4), GGUF"
)
PLAIN_COPY = "use a copy of the model in another format, or with plain weights and dtype=int8 or nf4"


@dataclass(frozen=True, kw_only=True)
class LayerRule:
    """What layers have whose names begin as the pattern says, where gptq quantised them in another way."""

    pattern: str
    bits: int
    group: int
    act_order: bool


@dataclass(frozen=True, kw_only=True)
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
    rules: tuple[LayerRule, ...] = ()  # gptq: of single layers; the first that fits counts

    def of_layer(self, name: str) -> "QuantisedConfig":
        """Returns what holds for the layer with this name."""
        rule = next((rule for rule in self.rules if matched(rule.pattern, name)), None)
        if rule is None:
            return self
        return replace(self, bits=rule.bits, group=rule.group, act_order=rule.act_order, rules=())


class Unreadable(ValueError):
    """A format that is not read."""


def quantised_config(config: Mapping[str, Any], where: Path) -> QuantisedConfig | None:
    """None for plain weights; a ModelError for a format that cannot be read."""
    method, claim = _claim(config)
    if method not in METHODS:
        return None
    try:
        match method:
            case "gptq" | "awq":
                return _by_input(method, claim)
            case "fp8":
                return _fp8(claim)
            case "compressed-tensors":
                return _compressed(claim)
            case "modelopt":
                return _modelopt(claim)
            case "bitsandbytes" if claim.get("load_in_4bit"):
                return QuantisedConfig(
                    method=method, name="bitsandbytes, 4 bits", bits=4, group=BLOCK_OF_4_BIT
                )
            case "bitsandbytes":
                return QuantisedConfig(method=method, name="bitsandbytes, 8 bits", bits=8, activations=True)
        return QuantisedConfig(method=method, name=method)
    except Unreadable as error:
        raise unreadable(str(error), _place(where)) from None
    except (TypeError, ValueError, AttributeError) as error:  # a value of another type than the format has
        raise ModelError(
            f"config.json has no usable values of {method}",
            where=_place(where),
            found=error,
            fix="correct it, or fetch the model again",
        ) from None


def require_readable(path: Path, config: Mapping[str, Any], formats: Mapping[str, str]) -> None:
    """A ModelError for a format that cannot be read, and for plain weights that config.json calls quantised.

    `formats`: that of every tensor's numbers. Some libraries would read plain weights as codes.
    """
    method, claim = _claim(config)
    if not method:
        if codes := sorted(name for name in formats if name.endswith(CODES)):
            raise ModelError(
                "the weights are quantised, but config.json does not say how",
                where=path / "config.json",
                found=f"{codes[0]}, no quant_method",
                allowed=READABLE,
                fix=f"add the model's quantization_config; or {PLAIN_COPY}",
            )
        return
    coded = any(name.endswith(SCALES) for name in formats) or not PLAIN.issuperset(formats.values())
    if coded and method not in METHODS:
        raise unreadable(_named(method, claim), _place(path))
    if method in METHODS and not coded:
        raise ModelError(
            f"config.json says that {method} quantised the weights, but they are plain",
            where=_place(path),
            found="no scales among the tensors",
            fix="remove quantization_config from config.json; dtype=int8 or nf4 quantises plain weights",
        )
    if method == "compressed-tensors" and (plain := _uncompressed(formats)):
        raise unreadable(f"compressed-tensors that were saved uncompressed ({plain} is plain)", _place(path))
    if any(name.endswith(".weight_g_idx") for name in formats):
        raise unreadable("compressed-tensors with act-order (weight_g_idx)", _place(path))
    quantised_config(config, path)


def _uncompressed(formats: Mapping[str, str]) -> str:
    """Returns the name of a matrix that has scales, and is stored in plain numbers; empty without one.

    With save_compressed=False the library keeps the weights as they were, and rounds them in each forward.
    """
    scales = (name for name in formats if name.endswith(".weight_scale"))
    weights = (name.removesuffix("_scale") for name in scales)
    return next((name for name in weights if formats.get(name) in PLAIN), "")


def left_out(config: Mapping[str, Any]) -> str:
    """Names what config.json claims of weights that `require_readable` found plain; empty if it has no claim.

    transformers reads such models, too, and says so: their authors left the claim of another copy in them.
    """
    method, claim = _claim(config)
    if not claim or method in METHODS:
        return ""
    return method or "no quant_method"


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
    return ModelError(what, where=where, found=found, allowed=READABLE, fix=PLAIN_COPY)


def _by_input(method: str, claim: Mapping[str, Any]) -> QuantisedConfig:
    """GPTQ and AWQ."""
    awq = method == "awq"
    bits = _first(claim, "bits", "w_bit", default=4)
    group = _first(claim, "group_size", "q_group_size", default=128)
    layout = str(claim.get("checkpoint_format") or claim.get("format") or claim.get("version") or "").lower()
    layouts, readable_bits = (("", "gemm"), (4,)) if awq else (("", "gptq", "gptq_v2"), (4, 8))
    if layout not in layouts or bits not in readable_bits:
        raise Unreadable(f"{method}: {bits} bits, layout {layout or 'usual'}")
    _require_group(method, group)
    # With one scale a row the order of inputs does not matter.
    act_order = bool(claim.get("desc_act")) and not awq and group > 0
    words = f"{method}, {bits} bits, " + (f"groups of {group}" if group > 0 else "a scale a row")
    name = words + (", act-order" if act_order else "")
    return QuantisedConfig(
        method=method,
        name=name,
        bits=bits,
        group=max(group, 0),
        zeros=True,
        act_order=act_order,
        less_one=layout != "gptq_v2",
        rules=() if awq else _rules(claim, bits, group),
    )


def _require_group(method: str, group: int) -> None:
    if group != -1 and (group < 1 or group % 8):
        raise Unreadable(f"{method}: group_size {group}")


def _rules(claim: Mapping[str, Any], bits: int, group: int) -> tuple[LayerRule, ...]:
    """Returns gptq's settings of single layers. Those of layers that are left in numbers need no rule."""
    result = []
    for pattern, own in (claim.get(DYNAMIC) or {}).items():
        plain = pattern.removeprefix("+:")
        if plain.startswith("-:") or not own:
            continue
        if why := complaint(plain):
            raise Unreadable(f"gptq: dynamic {pattern[:80]!r}: {why}")

        own_bits = int(own.get("bits", bits))
        own_group = int(own.get("group_size", group))
        _require_group("gptq", own_group)
        if own_bits not in (4, 8):
            raise Unreadable(f"gptq: {own_bits} bits of {pattern[:80]!r}")
        ordered = bool(own.get("desc_act", claim.get("desc_act"))) and own_group > 0
        result.append(LayerRule(pattern=plain, bits=own_bits, group=max(own_group, 0), act_order=ordered))
    return tuple(result)


def _first(claim: Mapping[str, Any], *keys: str, default: int) -> int:
    return int(next((claim[key] for key in keys if claim.get(key) is not None), default))


def _fp8(claim: Mapping[str, Any]) -> QuantisedConfig:
    block = claim.get("weight_block_size", [128, 128])
    activations = claim.get("activation_scheme") is not None
    if block is None:
        return QuantisedConfig(
            method="fp8", name="fp8, a scale a matrix", bits=8, group=0, activations=activations
        )
    rows, columns = map(int, block)
    if min(rows, columns) < 1:
        raise Unreadable(f"fp8: weight_block_size {block}")
    return QuantisedConfig(
        method="fp8",
        name=f"fp8, blocks of {rows} x {columns}",
        bits=8,
        group=columns,
        block=(rows, columns),
        activations=activations,
    )


def _compressed(claim: Mapping[str, Any]) -> QuantisedConfig:
    groups = list((claim.get("config_groups") or {}).values())
    weights: list[Mapping[str, Any]] = [group["weights"] for group in groups if group.get("weights")]
    formats = {str(claim.get("format") or "dense")}
    formats |= {str(group["format"]) for group in groups if group.get("format")}
    other = sorted(formats - {*FORMATS, "mixed-precision"})
    if other:
        raise Unreadable(f"compressed-tensors {', '.join(other)}")
    if claim.get("transform_config"):
        raise Unreadable("compressed-tensors with transforms of activations (transform_config)")
    sparse = claim.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
        raise Unreadable(f"compressed-tensors, {sparse['format']}")
    blocks = {block for args in weights if (block := _block(args)) is not None}
    if len(blocks) > 1:
        raise Unreadable("compressed-tensors with blocks of several sizes")
    name = f"compressed-tensors, {', '.join(sorted({_kind(args) for args in weights}))}"
    block = next(iter(blocks), None)
    args = next(iter(weights), dict[str, Any]())
    bits, group = _sizes(args, block)
    return QuantisedConfig(
        method="compressed-tensors",
        name=name,
        bits=bits,
        group=group,
        zeros=args.get("symmetric") is False,
        block=block,
        activations=any(each.get(key) for each in groups for key in ACTIVATIONS),
        every=tuple(_sizes(each, _block(each)) for each in weights),
    )


def modelopt_claim(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the quantization_config of a folder in which modelopt wrote it into a file of its own."""
    said = content.get("quantization")
    return {"quant_method": "modelopt", **(said if isinstance(said, Mapping) else {})}


def _modelopt(claim: Mapping[str, Any]) -> QuantisedConfig:
    """NVIDIA's Model Optimizer."""
    algorithm = str(claim.get("quant_algo"))
    if algorithm == "NVFP4":
        return QuantisedConfig(
            method="modelopt", name="modelopt, NVFP4", bits=4, group=NVFP4_GROUP, activations=True
        )
    if algorithm == "FP8":
        return QuantisedConfig(method="modelopt", name="modelopt, FP8", bits=8, activations=True)
    raise Unreadable(f"modelopt, {algorithm}")


def _kind(args: Mapping[str, Any]) -> str:
    """Describes the codes, as in `int4 in groups of 128`. Raises Unreadable for others than are read."""
    bits = args.get("num_bits", 8)
    group = args.get("group_size") or -1
    type_ = args.get("type", "int")
    if (type_, bits, group) == ("float", 4, NVFP4_GROUP):
        return "NVFP4"
    if (type_, bits) not in (("int", 4), ("int", 8), ("float", 8)) or group < -1:
        raise Unreadable(f"compressed-tensors, num_bits {bits!r}, {type_}, group_size {group}")
    table = f"{'FP' if type_ == 'float' else 'int'}{bits}"
    return f"{table} in groups of {group}" if group > 0 else f"{table} by {args.get('strategy')}"


def _block(args: Mapping[str, Any]) -> tuple[int, int] | None:
    block = args.get("block_structure")
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    return None


def _sizes(args: Mapping[str, Any], block: tuple[int, int] | None) -> tuple[int, int]:
    """Bits of a code, and inputs with one scale."""
    bits = args.get("num_bits")
    group = block[1] if block else args.get("group_size")
    return bits if bits in (4, 8) else 0, group if type(group) is int and group > 0 else 0
