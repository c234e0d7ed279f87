"""Reads what a LoRA adapter's folder says, and finds the model's weights that it changes. No torch.

An adapter, as peft saves it, adds to some weights W of a model the product of two small matrices:

    W + scale * B A        W: (outputs, inputs), B: (outputs, rank), A: (rank, inputs)

The names of its tensors say which weights these are, and adapter_config.json has the scale. What would change
the model in another way is refused by name. formats/adapted_source.py computes the sums.
"""

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ssp.config import MAX_INT, OWN_CODES, Dtype, ModelConf, home_expanded
from llama_ssp.config.presets import HUB_ID
from llama_ssp.errors import ModelError
from llama_ssp.models.families import TESTED, Family, family_of
from llama_ssp.models.folder import ADAPTER, adapter_file, headers, read_json
from llama_ssp.models.layout import model_name, tensors_on_disk
from llama_ssp.models.layout_sizes import sizes_of_model
from llama_ssp.models.patterns import complaint, fully_matched, matched
from llama_ssp.models.sharding import Span, is_planned
from llama_ssp.models.sizes import HEADS, LAYER, Checkpoint
from llama_ssp.models.wrapped import kind_left_out, text_name

log = logging.getLogger(__name__)

Sizes = tuple[int, ...]
Shapes = Mapping[str, Sizes]  # of a model's weights

KIND = "LORA"
ALL_LINEAR = "all-linear"  # of target_modules: all matrices but the last one
OUTER = "base_model.model."  # what peft puts before the names of the model's modules
INNER = ".base_layer"  # and after that of a module that it has wrapped
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<factor>[AB])(\.weight)?")
OF_EXPERTS = re.compile(r"\.experts\.")
TABLE = re.compile(rf"(?P<module>.+?)({re.escape(INNER)})?\.weight")
PLAIN = ("F64", "F32", "F16", "BF16")
# Keys of adapter_config.json for what is not W + scale * B A, with names; without a value they are off.
REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save, which replaces whole modules",
    "trainable_token_indices": "trainable_token_indices, which replaces rows of the embedding",
    "lora_bias": "lora_bias",
    "layer_replication": "layer_replication",
    "alora_invocation_tokens": "aLoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "Arrow",
}
MAGNITUDE = "lora_magnitude_vector"  # of DoRA
# How training may begin, so that the model's weights stay as they are. Others (PiSSA, OLoRA, CorDA, LoftQ,
# LoRA-GA) take a part out of the weights, and the adapter belongs to what is left.
KEEPS_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Parameters of transformers' experts, each of all experts of a layer: gates and what they multiply; the rest.
EXPERTS_UP = "gate_up_proj"
EXPERTS_DOWN = "down_proj"
# Of a mixture of experts: the module's name in transformers, and in the files of some models.
OLDER_NAMES = {".mlp.": ".block_sparse_moe."}
MERGE = "merge it where you trust it, with peft's merge_and_unload, and save the whole model"
NEEDS_PLAIN = "use the model's plain weights; dtype=int8 or nf4 quantises them after the sum"


@dataclass(frozen=True)
class Adapter:
    """A folder that `read` has checked: its adapter_config.json, and the sizes of its tensors by name."""

    path: Path
    config: dict[str, Any]
    shapes: dict[str, Sizes]


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """What is added to one weight: scale * left @ right, with left: (rows, rank), right: (rank, columns).

    These are B and A; `transposed`: A and B, of a weight with inputs before outputs, as an embedding's table.
    One pair for all experts of a layer has an expert's ranks one after the other in A, and in B by turns with
    those of the other experts.
    """

    a: str  # names of the adapter's tensors
    b: str
    rank: int  # of one expert
    scale: float
    transposed: bool = False
    experts: int = 1
    expert: int = 0  # whose the weight is; of a stack of all it is the number of the cut
    outputs: Span | None = None  # B's rows of this weight, where B is that of several; None: all


@dataclass(frozen=True)
class Changes:
    """What an adapter does to a model's tensors, by their names.

    `replaced` has the names that the adapter gives to tables that peft has saved whole.
    """

    added: dict[str, LowRank]
    replaced: dict[str, str]


@dataclass(frozen=True)
class Base:
    """What is known of the model that an adapter is for.

    `flipped`: weights of modules that have inputs before outputs, embeddings apart; None: where the adapter's
    `fan_in_fan_out` says so. `prefix`: what may lack before a name on disk.
    """

    shapes: Shapes
    family: Family
    prefix: str
    tied: bool
    flipped: Collection[str] | None = ()


def adapter_folder(model: ModelConf) -> Path | None:
    """Returns the folder of the model's adapter; None if it has none."""
    return None if model.adapter is None else home_expanded(model.adapter)


def require_fitting(model: ModelConf, role: str, checkpoint: Checkpoint | None) -> None:
    """Refuses an adapter that cannot be merged into the model; nothing for a model without one.

    `checkpoint` has the model's headers, if its files are here; else its sizes tell.
    """
    folder = adapter_folder(model)
    if folder is None:
        return
    adapter = read_adapter(folder, role)
    if model.code_bits:
        raise coded(f"{role} {model.name}")
    family = family_of(model.family)
    known = tensors_on_disk(sizes_of_model(model)) if is_planned(model) else {}
    prefix = family.names.embedding.partition(".")[0]
    tied = model.tied
    shapes: Shapes = known
    if checkpoint is not None:
        on_disk = {name: sizes for name, (_, sizes) in checkpoint.tensors.items()}
        shapes = {model_name(name, known, prefix): sizes for name, sizes in on_disk.items()} or known
        tied = tied or bool(checkpoint.config.get("tie_word_embeddings", family.tied))
    if not shapes:
        return  # of an architecture without a row the files are not here yet

    flipped = () if known else None
    base = Base(shapes=shapes, family=family, prefix=prefix, tied=tied, flipped=flipped)
    result = changes(adapter, base)
    if left_out := _without_tensors(adapter, base, result):
        log.warning(
            "%s %s: %d modules that %s names have no tensors in the adapter, and stay as they are: %s",
            role,
            model.name,
            len(left_out),
            ADAPTER,
            ", ".join(left_out[:3]),
        )


def coded(where: object) -> ModelError:
    """Returns the error for a model in codes, into which nothing can be merged."""
    return ModelError(
        "an adapter cannot be merged into weights in codes",
        where=where,
        found="a quantised checkpoint",
        allowed="plain weights",
        fix=NEEDS_PLAIN,
    )


def require_for_module(model: ModelConf, dtype: Dtype, role: str) -> None:
    """Refuses what cannot be merged into transformers' module; nothing for a model without an adapter.

    The module is quantised while it is read, before the sum, and its experts are not those of the files.
    """
    folder = adapter_folder(model)
    if folder is None:
        return
    reason = ""
    if dtype in (Dtype.int8, Dtype.nf4, *OWN_CODES):
        reason = f"dtype={dtype.value}"
    fix = f"write {role}.dtype=bf16"
    experts = [name for name in read_adapter(folder, role).shapes if OF_EXPERTS.search(name)]
    if experts:
        reason = experts[0]
        fix = MERGE
    if reason:
        raise ModelError(
            "the adapter cannot be merged into a model that transformers runs",
            where=f"{role} {model.name}",
            found=reason,
            allowed=f"bf16, fp16, fp32, and no experts; with placement.splitting=tensor all, for {TESTED}",
            fix=fix,
        )


def not_for(role: str, what: str) -> ModelError:
    """Returns the error for what has no weights of its own to merge an adapter into."""
    return ModelError(
        f"{role}.adapter is for a model with plain weights",
        found=what,
        allowed="a model's folder, or a repository on the hub",
        fix=f"leave {role}.adapter out",
    )


def read_adapter(folder: Path, role: str) -> Adapter:
    """Reads and checks the folder's files; raises ModelError."""
    if not folder.is_dir():
        fix = f"give the folder that holds {ADAPTER}"
        if HUB_ID.fullmatch(str(folder)):
            fix += f"; a hub repository becomes one with: hf download {folder} --local-dir FOLDER"
        raise ModelError(f"{role}.adapter is not a folder", where=folder, fix=fix)
    config = read_json(folder / ADAPTER)
    _require_lora(folder, config)
    _require_usable(folder, config)
    file = adapter_file(folder)
    shapes: dict[str, Sizes] = {}
    for name, (kind, sizes) in headers([file]).items():
        if kind not in PLAIN:
            raise ModelError(
                "the adapter's numbers are in codes",
                where=file,
                found=f"{name}, {kind}",
                allowed=", ".join(PLAIN),
                fix=MERGE,
            )
        shapes[name] = sizes
    return Adapter(folder, config, shapes)


def _require_lora(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses by name what adds anything else than scale * B A."""
    refused = [what for key, what in REFUSED.items() if config.get(key)]
    if config.get("peft_type") != KIND:
        refused = [f"peft_type {config.get('peft_type')}"]
    if config.get("bias", "none") not in (None, "none"):
        refused.append(f"bias {config['bias']}")
    start = config.get("init_lora_weights")
    if start not in KEEPS_WEIGHTS:
        refused.append(f"init_lora_weights {start}, which changes the model's own weights")
    if refused:
        raise ModelError(
            "this kind of adapter is not merged here",
            where=folder / ADAPTER,
            found=", ".join(refused),
            allowed="peft_type LORA, with bias none",
            fix=MERGE,
        )


def _require_usable(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses ranks and scales that are no numbers, and patterns that are no regular expressions."""
    patterns: list[str] = []
    numbers: dict[str, Any] = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha")}
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict):
            raise _unusable(folder, key, pattern, "numbers by names of modules")
        numbers |= {f"{key} {name}": value for name, value in pattern.items()}
        patterns += pattern
    for key, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_number = is_number and abs(value) <= MAX_INT  # NaN is not
        is_rank = isinstance(value, int) and value > 0
        if not is_number or (key.startswith("r") and not is_rank):
            raise _unusable(folder, key, value, "a number; of ranks a whole one above 0")

    for key in ("target_modules", "exclude_modules", "target_parameters", "layers_pattern"):
        value = config.get(key)
        is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
        if value is not None and not isinstance(value, str) and not is_list:
            raise _unusable(folder, key, value, "a list of names, or a regular expression")
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), str):
            patterns.append(config[key])
    patterns += _listed(config.get("layers_pattern"))
    layers = config.get("layers_to_transform")
    if not all(isinstance(layer, int) for layer in _listed(layers)):
        raise _unusable(folder, "layers_to_transform", layers, "numbers of layers")
    for pattern in patterns:
        if why := complaint(pattern):
            raise _unusable(folder, "pattern", f"{pattern}: {why}", "a regular expression")


def _unusable(folder: Path, key: str, value: object, allowed: str) -> ModelError:
    return ModelError(
        f"{ADAPTER} has no usable {key}",
        where=folder,
        found=repr(value),
        allowed=allowed,
        fix="correct it, or fetch the adapter again",
    )


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def changes(adapter: Adapter, base: Base) -> Changes:
    """Returns what the adapter does to the model's tensors; raises ModelError if they do not fit together."""
    pairs: dict[str, dict[str, str]] = {}
    embeddings: set[str] = set()
    tables: dict[str, str] = {}
    for name in adapter.shapes:
        plain = name.removeprefix(OUTER)
        if kind_left_out(plain):
            continue  # of vision or audio, which the text part does not have
        factor = FACTOR.fullmatch(plain)
        table = TABLE.fullmatch(plain)
        if MAGNITUDE in plain:
            raise _odd(adapter, f"{name}, of DoRA", MERGE)
        if factor is not None:
            pairs.setdefault(factor["module"], {})[factor["factor"]] = name
            embeddings |= {factor["module"]} if factor["kind"] else set()
        elif table is not None and ".lora_" not in plain:
            tables[table["module"]] = name
        else:
            raise _odd(adapter, name, MERGE)
    if not pairs:
        raise _odd(adapter, "no lora_A and lora_B among its tensors", "give the folder of a LoRA adapter")
    if single := [next(iter(pair.values())) for pair in pairs.values() if len(pair) == 1]:
        raise _odd(adapter, f"{single[0]} without its other half", "fetch the adapter again")

    added: dict[str, LowRank] = {}
    for module, pair in pairs.items():
        if base.tied and (module in embeddings or f"{module}.".startswith(HEADS)):
            raise _tied(adapter, module)
        if module.removesuffix(INNER).endswith(".experts"):
            further = _of_experts(adapter, base, module, pair)
        else:
            _require_targeted(adapter, module)
            further = _of_module(adapter, base, module, pair, module in embeddings)
        if twice := added.keys() & further.keys():
            raise _odd(adapter, f"two pairs for {min(twice)}", "fetch the adapter again")
        added |= further
    replaced = {_replaced(adapter, base, module, name): name for module, name in tables.items()}
    return Changes(added=added, replaced=replaced)


def _odd(adapter: Adapter, found: str, fix: str) -> ModelError:
    return ModelError("the adapter's tensors are not those of LoRA", where=adapter.path, found=found, fix=fix)


def _tied(adapter: Adapter, module: str) -> ModelError:
    """Returns the error for one of two tied matrices: peft's own merge changes both, or unties them."""
    return ModelError(
        "the adapter changes the embedding or the output matrix, and in the model they are one",
        where=adapter.path,
        found=module,
        allowed="other modules, or a model with two matrices",
        fix="save a copy of the model with tie_word_embeddings=false and both matrices, and use it",
    )


def _unfit(adapter: Adapter, module: str, found: str, allowed: str) -> ModelError:
    """Returns the error for an adapter of another model; which one, its config may say."""
    fix = "use the model that the adapter was made for"
    if named := adapter.config.get("base_model_name_or_path"):
        fix += f": {named}"
    return ModelError(
        "the adapter does not fit the model",
        where=f"{adapter.path}, {module}",
        found=found,
        allowed=allowed,
        fix=fix,
    )


def _named(base: Base, module: str) -> str | None:
    """Returns the model's name of the module's weight; None if it has no such module."""
    older = [module.replace(name, of_files) for name, of_files in OLDER_NAMES.items()]
    in_text = text_name(f"{module}.weight") or ""  # of a multimodal checkpoint
    on_disk = [in_text, *(f"{name}.weight" for name in (module, *older))]
    names = [model_name(name, base.shapes, base.prefix) for name in on_disk]
    return next((name for name in names if name in base.shapes), None)


def _replaced(adapter: Adapter, base: Base, module: str, name: str) -> str:
    """Returns the model's name of a table that the adapter's file holds whole."""
    target = _named(base, module)
    sizes = adapter.shapes[name]
    if target is None or base.shapes[target] != sizes:
        expected = "no such module" if target is None else f"{base.shapes[target]}, as in the model"
        raise _unfit(adapter, module, f"a whole table {sizes}", expected)
    if base.tied and len(sizes) == 2:
        raise _tied(adapter, module)
    return target


def _of_module(
    adapter: Adapter, base: Base, module: str, pair: Mapping[str, str], is_embedding: bool
) -> dict[str, LowRank]:
    """Returns what is added to a module's weight, by its name; raises ModelError unless the sizes fit."""
    target = _named(base, module)
    if target is None:
        raise _unfit(adapter, module, "a module that the model does not have", "the model's modules")
    rank = _by_pattern(adapter, "rank_pattern", module, adapter.config["r"])
    a_sizes = adapter.shapes[pair["A"]]
    b_sizes = adapter.shapes[pair["B"]]
    sizes = base.shapes[target]
    flipped = base.flipped
    if flipped is None:
        flipped = [target] if adapter.config.get("fan_in_fan_out") else []
    transposed = is_embedding or target in flipped
    outputs_inputs = sizes[::-1] if transposed else sizes
    if len(sizes) != 2 or (a_sizes, b_sizes) != ((rank, outputs_inputs[1]), (outputs_inputs[0], rank)):
        raise _unfit(adapter, module, f"A {a_sizes}, B {b_sizes}", f"rank {rank}, and a weight of {sizes}")
    scale = _scale(adapter, module, rank)
    return {target: LowRank(a=pair["A"], b=pair["B"], rank=rank, scale=scale, transposed=transposed)}


def _of_experts(adapter: Adapter, base: Base, module: str, pair: Mapping[str, str]) -> dict[str, LowRank]:
    """Returns what is added to each expert by one pair for a parameter of all (peft's target_parameters).

    The module's parameters have pairs of their own, whose names are those of the module and of what peft has
    wrapped in it: the sizes tell them apart.
    """
    module = module.removesuffix(INNER)
    names = base.family.names
    layer = LAYER.search(f"{module}.")
    prefix = f"{names.blocks}.{layer[1] if layer else ''}."
    a_sizes = adapter.shapes[pair["A"]]
    b_sizes = adapter.shapes[pair["B"]]
    both_sizes = f"A {a_sizes}, B {b_sizes}"
    if (len(a_sizes), len(b_sizes)) != (2, 2):
        raise _unfit(adapter, module, both_sizes, "two matrices")
    for parameter, rows in ((EXPERTS_UP, names.expert_up), (EXPERTS_DOWN, (names.expert_down,))):
        weights = [list(_experts_of(base, prefix, name)) for name in rows if name]
        if not all(weights) or not weights:
            raise _unfit(adapter, module, both_sizes, "a model with experts")
        sizes = base.shapes[weights[0][0]]
        is_stack = len(sizes) == 3  # (experts, inputs, outputs)
        experts = sizes[0] if is_stack else len(weights[0])
        inputs = sizes[-2] if is_stack else sizes[1]
        outputs = sizes[-1] if is_stack else sizes[0]
        if (a_sizes[-1], b_sizes[0]) != (inputs, outputs * len(weights)):
            continue

        name = f"{module}.{parameter}"
        if not _is_listed(adapter.config.get("target_parameters"), name):
            raise _untargeted(adapter, name, "target_parameters")
        rank = _by_pattern(adapter, "rank_pattern", name, adapter.config["r"])
        if (a_sizes[0], b_sizes[1]) != (rank * experts, rank * experts):
            raise _unfit(adapter, name, both_sizes, f"rank {rank} of {experts} experts")
        return {
            weight: LowRank(
                a=pair["A"],
                b=pair["B"],
                rank=rank,
                scale=_scale(adapter, name, rank),
                transposed=is_stack,
                experts=experts,
                expert=expert,
                outputs=(place * outputs, (place + 1) * outputs),
            )
            for place, of_row in enumerate(weights)
            for expert, weight in enumerate(of_row)
        }
    raise _unfit(adapter, module, both_sizes, "the sizes of the model's experts")


def _experts_of(base: Base, prefix: str, name: str) -> Iterator[str]:
    """Yields the names of one matrix of all experts of a layer: one for each, or one for all."""
    if prefix + name in base.shapes:
        yield prefix + name
        return
    number = 0
    while "{}" in name and (weight := f"{prefix}{name.format(number)}.weight") in base.shapes:
        yield weight
        number += 1


def _scale(adapter: Adapter, module: str, rank: int) -> float:
    alpha = _by_pattern(adapter, "alpha_pattern", module, adapter.config["lora_alpha"])
    return float(alpha / math.sqrt(rank) if adapter.config.get("use_rslora") else alpha / rank)


def _by_pattern(adapter: Adapter, key: str, module: str, usual: Any) -> Any:
    """Returns the value of the first name that the module's name ends with, as peft takes it."""
    for name, value in (adapter.config.get(key) or {}).items():
        if matched(rf"(.*\.)?({name})$", module):
            return value
    return usual


def _require_targeted(adapter: Adapter, module: str) -> None:
    """Refuses tensors of a module that adapter_config.json does not name: one of the two is another's."""
    name = module
    if not is_targeted(adapter.config, name) and not _is_listed(
        adapter.config.get("target_parameters"), f"{name}.weight"
    ):
        raise _untargeted(adapter, name, "target_modules")


def _untargeted(adapter: Adapter, name: str, key: str) -> ModelError:
    return ModelError(
        f"{ADAPTER} and the adapter's tensors do not belong together",
        where=adapter.path,
        found=f"tensors of {name}",
        allowed=f"modules of {key}, within layers_to_transform",
        fix="fetch the adapter again",
    )


def _is_listed(names: Any, name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in _listed(names))


def is_targeted(config: Mapping[str, Any], module: str) -> bool:
    """Returns whether peft adapts the module by this config."""
    excluded = config.get("exclude_modules")
    if isinstance(excluded, str):
        is_excluded = fully_matched(excluded, module)
    else:
        is_excluded = _is_listed(excluded, module)
    targets = config.get("target_modules")
    if is_excluded or targets is None:
        return False
    if targets == ALL_LINEAR:
        return not f"{module}.".startswith(HEADS)
    if isinstance(targets, str):
        return fully_matched(targets, module)
    if module in targets:
        return True
    if not _is_listed(targets, module):
        return False
    layers = _listed(config.get("layers_to_transform"))
    if not layers:
        return True
    patterns = _listed(config.get("layers_pattern"))
    # The first number in the name, after what precedes numbers of layers.
    searched = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns] or [r".*?\.[^.]*\.(\d+)\."]
    places = [place for pattern in searched if (place := matched(pattern, module))]
    return bool(places) and int(places[0][1]) in layers


def _without_tensors(adapter: Adapter, base: Base, found: Changes) -> list[str]:
    """Returns the model's matrices that adapter_config.json names and the adapter does not change."""
    matrices = [name for name, sizes in base.shapes.items() if len(sizes) == 2 and name.endswith(".weight")]
    return [
        name
        for name in sorted(matrices)
        if name not in found.added and is_targeted(adapter.config, name.removesuffix(".weight"))
    ]
