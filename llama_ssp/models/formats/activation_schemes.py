"""What config.json says of activations: how the inputs of quantised layers are rounded. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_PATTERN, MOST_REPEATS = 200, 4  # of a pattern of names: bounds the time of a search
LLM_INT8_THRESHOLD = 6.0  # greater inputs are multiplied in 16 bit, unless config.json says otherwise


@dataclass(frozen=True)
class Rounding:
    """How the inputs of a layer are rounded. A scale is of a token's inputs, or of each group of them."""

    table: str = "int8"  # or int4, e4m3
    symmetric: bool = True  # no zeros
    group: int = 0  # inputs with one scale; 0: all of a token
    static: bool = False  # one scale, which the checkpoint has, for all tokens
    scale: float = 1.0  # if static
    zero: float = 0.0
    threshold: float | None = None  # LLM.int8: greater inputs stay as they are; 0: none do


@dataclass(frozen=True)
class Scheme:
    """A rounding, and the layers that have it."""

    targets: tuple[str, ...]
    rounding: Rounding | None  # None: inputs stay as they are


def schemes_of(groups: Sequence[Mapping[str, Any]]) -> tuple[Scheme, ...]:
    """Those of compressed-tensors' config groups; a ValueError says what cannot be run."""
    found = []
    for group in groups:
        targets = group.get("targets")
        names = tuple(map(str, targets)) if isinstance(targets, list) else ()
        if group.get("output_activations") is not None:
            raise ValueError("outputs of layers that are rounded (output_activations)")
        found.append(Scheme(names, _rounding(group.get("input_activations"))))
    if len({scheme.rounding for scheme in found}) > 1:
        for target in (target for scheme in found for target in scheme.targets):
            _require_simple(target)
    return tuple(found)


def rounding_of(layer: str, schemes: tuple[Scheme, ...]) -> Rounding | None:
    """That of the layer of this name; the target that fits best counts, as in compressed-tensors."""
    if len({scheme.rounding for scheme in schemes}) == 1:
        return schemes[0].rounding
    fitting = [
        (place, target, scheme)
        for scheme in schemes
        for target in scheme.targets
        if (place := _place(layer, target)) is not None
    ]
    return min(fitting, key=lambda each: each[:2])[2].rounding if fitting else None


def _place(layer: str, target: str) -> int | None:
    """The rank of a target that fits: names are before patterns, and these before kinds of layers."""
    if target == layer:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), layer) else None
    return 2 if target in ("Linear", "Module") else None


def _require_simple(target: str) -> None:
    """Refuses a pattern that takes long: a repeated group, or many repeats."""
    if not target.startswith("re:"):
        return
    pattern = target.removeprefix("re:")
    repeats = len(re.findall(r"(?<!\\)[*+?{]", pattern))
    if len(pattern) > LONGEST_PATTERN or repeats > MOST_REPEATS or re.search(r"(?<!\\)\)[*+?{]", pattern):
        raise ValueError(f"a pattern of layers that is not simple: {target[:40]}")
    try:
        re.compile(pattern)
    except re.error:
        raise ValueError(f"a pattern of layers that is none: {target[:40]}") from None


def _rounding(args: object) -> Rounding | None:
    if args is None:
        return None
    if not isinstance(args, Mapping):
        raise ValueError("input_activations that are no object")
    bits, kind, group = args.get("num_bits", 8), str(args.get("type", "int")), args.get("group_size")
    strategy, dynamic = args.get("strategy"), args.get("dynamic", False)
    if strategy is None:
        strategy = "tensor" if group is None else "group"
    symmetric = args.get("symmetric", True) is not False
    table = {"int8": "int8", "int4": "int4", "float8": "e4m3"}.get(f"{kind}{bits}")
    grouped = strategy == "group" and type(group) is int and group > 0
    known = (
        (strategy == "token" or grouped) if dynamic is True else (dynamic is False and strategy == "tensor")
    )
    plain = args.get("scale_dtype") is None and args.get("zp_dtype") in (None, "torch.int8")
    if table is None or not known or not plain or not (symmetric or table != "e4m3"):
        what = f"{kind}{bits} by {strategy}, {'dynamic' if dynamic else 'static'}"
        batch = "; one text would change another" if dynamic and strategy == "tensor" else ""
        raise ValueError(f"activations in {what}{batch}")
    return Rounding(table, symmetric, int(group or 0) if grouped else 0, static=not dynamic)
