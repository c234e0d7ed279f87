"""The sizes of a model, from its config.json and the formats of its tensors. No torch."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.families import (
    EXPERTS,
    FULL,
    SLIDING,
    TESTED,
    TESTED_FAMILIES,
    Family,
    Window,
    expert_layers,
    family_of,
)
from llama_ssp.models.folder import REFETCH, is_gguf
from llama_ssp.models.formats import kept
from llama_ssp.models.formats.quantised_config import quantised_config

# Layers whose keys can be forgotten from any position on.
LAYER_KINDS = (FULL, SLIDING)
LINEAR = "linear_attention"  # whose states decoder.py keeps, of families that have names for it
# Keys of recurrent states, of convolutions along the text, of attention within chunks, to the tokens that an
# index chooses, and to compressed ones.
OF_STATES = re.compile(
    r"(linear_|mamba_|n_mamba|ssm_|time_step_|lru_|conv_kernel|state_size|attention_chunk|index_|compress_)"
)
GLOBAL_HEAD_DIM = 512  # of layers that see the whole text, where a Gemma 4 does not say
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")  # in a tensor's name
PROJECTED = ("word_embed_proj_dim", "embedding_size")  # in these, embeddings may be narrower than layers
SCALED_FROM = "original_max_position_embeddings"
HEADS = ("lm_head.", "embed_out.", "output.")  # absent where the embedding is the head, too
SUPPORTED = TESTED + ", and others that have attention with explicit positions only"
POSITIONS = ("max_position_embeddings", "n_positions")
# Of linear attention: the names of sizes, and the config's; that of the layers is counted.
LINEAR_SIZES = {
    "linear_layers": "",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "linear_kernel": "linear_conv_kernel_dim",
}
# Of rotary positions: keys with a number above 0, keys with a share of a head, and what holds them, too.
BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "factor", SCALED_FROM)
SHARES = ("partial_rotary_factor", "rotary_pct")
ROTARY = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Checkpoint:
    """A folder, or GGUF file, that was checked: its config.json, and each tensor's format and shape."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    left_out: str = ""  # says which tensors of vision and audio are not among them


def config_file(path: Path) -> Path:
    """Returns the file that says what the model is."""
    return path if is_gguf(path) else path / "config.json"


def layer_kinds(family: Family) -> set[str]:
    """Returns the kinds of layers from which decoder.py can take a rejected draft back."""
    return {*LAYER_KINDS, LINEAR} if family.names.delta is not None else set(LAYER_KINDS)


def require_forgetting(config: dict[str, Any]) -> None:
    """Refuses layers that keep what decoder.py does not: a rejected draft could not be taken back.

    Where config.json does not name the kinds of layers, its keys tell; transformers says the rest at load.
    """
    kinds = set(config.get("layer_types") or ()) - layer_kinds(family_of(config["model_type"]))
    where = f"layer_types of {config['model_type']}"
    if not kinds and not config.get("layer_types") and config["model_type"] not in TESTED_FAMILIES:
        kinds = {key for key in config if OF_STATES.match(key) and config[key] is not None}
        where = config["model_type"]
    if kinds:
        raise unforgetting(where, kinds)


def unforgetting(where: str, kinds: Iterable[str]) -> ModelError:
    """Returns the error for a model that keeps more than keys and values, and what decoder.py has."""
    return ModelError(
        "the model has layers that this program cannot roll back",
        where=where,
        found=", ".join(sorted(kinds)),
        allowed=", ".join(LAYER_KINDS),
        fix="choose a model with attention layers only",
    )


def sizes_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the model's sizes by the config's names; raises ModelError if config.json lacks one."""
    config = checkpoint.config
    require_forgetting(config)
    size = partial(_size, checkpoint)
    family = family_of(config["model_type"])
    heads = size("num_attention_heads", "num_heads", "n_head")
    dim = size("hidden_size", "n_embd")
    for name in PROJECTED:
        if config.get(name) not in (None, dim):
            raise _unsupported(checkpoint, f"its embeddings are projected ({name})", f"embeddings of {dim}")

    layers = size("num_hidden_layers", "num_layers", "n_layer")
    # Falcon's config.json has a number of KV heads for its newer kind only.
    newer = config.get("new_decoder_architecture") or not config.get("multi_query", True)
    one_kv = family.multi_query and not newer
    kv_heads = 1 if one_kv else size("num_key_value_heads", "num_kv_heads", default=heads)
    window = _window(config, family.window, layers)
    head_dim = size("head_dim", default=dim // heads)
    ffn = size(family.mlp_key, "intermediate_size", "ffn_dim", "n_inner", default=4 * dim)

    attention_bias, mlp_bias = family.biases(config)
    shape = {
        "family": config["model_type"],
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "dim": dim,
        "ffn": ffn,
        **_experts(checkpoint, family, layers, ffn),
        "vocab": size("vocab_size"),
        "context": context_within(size(*POSITIONS, default=family.context), config),
        "tied": not any(name.startswith(HEADS) for name in checkpoint.tensors),
        "sliding_window": size(window.key, default=window.default) if window else None,
        "qk_norm": config.get(family.qk_norm_key) if family.qk_norm_key else None,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        **_linear(checkpoint, family, layers),
    }
    shape |= _full_heads(checkpoint, family, shape)
    shape |= _codes(checkpoint, shape)
    shape["lacking"] = family.lacking(config.get) or ""
    odd = [kvs for kvs in (kv_heads, shape["full_kv_heads"] or kv_heads) if heads % kvs]
    if odd:
        raise ModelError(
            "query heads do not divide into groups of KV heads",
            where=checkpoint.path,
            found=f"{heads} and {odd[0]}",
            allowed="a whole number of query heads per KV head",
            fix=REFETCH,
        )
    return shape


def _full_heads(checkpoint: Checkpoint, family: Family, shape: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes of layers that see the whole text, where their heads are others; else zeros."""
    result: dict[str, Any] = {
        "full_layers": 0,
        "full_kv_heads": 0,
        "full_head_dim": 0,
        "keys_are_values": False,
    }
    config = checkpoint.config
    if not family.full_heads:
        return result
    places = full_places(config.get("layer_types"), shape["n_layers"])
    keys_are_values = bool(config.get(family.values_key))

    by_layer = config.get("per_layer_config")
    if isinstance(by_layer, dict):  # what transformers saves from 5.23 on: the differences from other layers
        numbers = {int(layer): own for layer, own in by_layer.items() if layer.isdecimal()}
        own = numbers.get(places[0])
        changes = own if isinstance(own, dict) else {}
    else:
        changes = {"head_dim": config.get("global_head_dim", GLOBAL_HEAD_DIM)}
        if keys_are_values and config.get("num_global_key_value_heads") is not None:
            changes["num_key_value_heads"] = config["num_global_key_value_heads"]

    full = replace(checkpoint, config=config | changes)
    kv_heads = _size(full, "num_key_value_heads", default=shape["n_kv_heads"])
    head_dim = _size(full, "head_dim", default=shape["head_dim"])
    if keys_are_values or (kv_heads, head_dim) != (shape["n_kv_heads"], shape["head_dim"]):
        result["full_layers"] = len(places)
        result["full_kv_heads"] = kv_heads
        result["full_head_dim"] = head_dim
        result["keys_are_values"] = keys_are_values
    return result


def full_places(kinds: Any, layers: int) -> tuple[int, ...]:
    """Returns which layers see the whole text, by the config's kinds: the last one always does (Gemma 4)."""
    if not isinstance(kinds, list):
        return tuple(n for n in range(layers) if n % 6 == 5 or n == layers - 1)
    return tuple(n for n, kind in enumerate(kinds) if kind == FULL or n == layers - 1)


def _codes(checkpoint: Checkpoint, shape: dict[str, Any]) -> dict[str, Any]:
    """Returns what a packed model keeps: of each matrix, or without headers what config.json says of all."""
    if is_gguf(checkpoint.path):
        formats = {name: kind for name, (kind, _) in checkpoint.tensors.items()}
        return kept.sizes(kept.of_gguf(formats, shape["linear_value_dim"]))
    claimed = quantised_config(checkpoint.config, checkpoint.path)
    family = family_of(shape["family"])
    usual = kept.of_config(claimed)
    if claimed is None or not checkpoint.tensors:
        return kept.usual(usual)
    if not usual.bits and not claimed.rules and claimed.method != "mxfp4":
        return kept.usual(usual)

    names = kept.names_of(family.names)
    experts = *family.names.expert_up, family.names.expert_down  # of each expert, or of all
    leaves = zip(experts, kept.EXPERT[-len(experts) :], strict=True)
    full: tuple[int, ...] = ()
    if shape["full_layers"]:
        full = full_places(checkpoint.config.get("layer_types"), shape["n_layers"])
    names |= {name.format(0): leaf for name, leaf in leaves if name}
    inputs = dict.fromkeys(kept.MATRICES, shape["dim"]) | {"expert_down": shape["expert_ffn"]}
    inputs |= {"attn_output": shape["n_heads"] * shape["head_dim"], "ffn_down": shape["ffn"]}
    inputs["full_attn_output"] = shape["n_heads"] * shape["full_head_dim"]
    inputs["shared_down"] = shape["shared_ffn"]
    inputs["delta_out"] = shape["linear_value_heads"] * shape["linear_value_dim"]
    matrices = kept.of_folder(checkpoint.tensors, claimed, names, inputs, LAYER, full)
    layers = range(shape["n_layers"])  # those for multi-token prediction come after them, and are not read
    return kept.sizes({place: codes for place, codes in matrices.items() if place[0] in layers})


def _experts(checkpoint: Checkpoint, family: Family, layers: int, ffn: int) -> dict[str, int]:
    """Returns the sizes of experts; zeros for a family that has none, or that is not known here."""
    if not family.has_experts(checkpoint.config.get(family.experts_key)):
        keys = ("experts", "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers")
        return dict.fromkeys(keys, 0)
    dense = checkpoint.config.get("mlp_only_layers")
    step = _size(checkpoint, "decoder_sparse_step", default=1)
    have_experts = expert_layers(layers, dense if isinstance(dense, list) else (), step)
    if family.first_dense:
        first = _size(checkpoint, family.first_dense, default=1, least=0)
        have_experts = expert_layers(layers, range(first), 1)

    expert_ffn = _size(checkpoint, "moe_intermediate_size", default=ffn)
    shared_ffn = 0
    if family.shared_key:
        shared_ffn = _size(checkpoint, family.shared_key)
    elif family.names.shared_down:
        shared_ffn = expert_ffn * _size(checkpoint, "n_shared_experts", default=1)
    return {
        "experts": _size(checkpoint, *EXPERTS),
        "experts_per_token": _size(checkpoint, family.expert_keys[1]),
        "expert_ffn": expert_ffn,
        "shared_ffn": shared_ffn,
        "dense_layers": have_experts.count(False),
    }


def _linear(checkpoint: Checkpoint, family: Family, layers: int) -> dict[str, int]:
    """Returns the sizes of linear attention; zeros for a family that has none."""
    if family.names.delta is None:
        return dict.fromkeys(LINEAR_SIZES, 0)
    kinds = checkpoint.config.get("layer_types")
    if isinstance(kinds, list):
        linear = kinds.count(LINEAR)
    else:
        linear = layers - layers // _size(checkpoint, "full_attention_interval", default=4)
    sizes = {name: _size(checkpoint, key) for name, key in LINEAR_SIZES.items() if key}
    return {"linear_layers": linear, **sizes}


def require_positions(path: Path, config: dict[str, Any]) -> None:
    """Refuses numbers of rotary positions that no model has: its angles would not be numbers."""
    parts = [config]
    for key in ROTARY:
        if isinstance(value := config.get(key), dict):
            kinds = [kind for kind in value.values() if isinstance(kind, dict)]  # one for each kind of layer
            parts += [value, *kinds]

    for part in parts:
        for name in (*BASES, *SHARES):
            value = part.get(name)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and math.isfinite(value)
            highest = 1 if name in SHARES else math.inf
            least = 0 if name in SHARES else math.ulp(0.0)
            if is_number and least <= value <= highest:
                continue
            raise ModelError(
                f"{config_file(path).name} has no usable {name}",
                where=path,
                found=repr(value),
                allowed="a number in [0, 1]" if name in SHARES else "a number above 0",
                fix="correct it, or fetch the model again",
            )


def _size(checkpoint: Checkpoint, *names: str, default: int | None = None, least: int = 1) -> int:
    """Returns the value of the first of these keys that has a usable one, or else the default."""
    values = [value for name in names if (value := checkpoint.config.get(name)) is not None]
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31:
            return value
    if not values and default is not None:
        return default
    if not values and checkpoint.config["model_type"] not in TESTED_FAMILIES:  # else it is damaged
        raise _unsupported(checkpoint, f"its config.json has no {names[0]}")
    raise ModelError(
        f"{config_file(checkpoint.path).name} has no usable {names[0]}",
        where=checkpoint.path,
        found=repr(values[0] if values else None),
        allowed="a positive whole number" if least else "a whole number from 0 on",
        fix="correct it, or fetch the model again",
    )


def _unsupported(checkpoint: Checkpoint, why: str, allowed: str = SUPPORTED) -> ModelError:
    return ModelError(
        f"the architecture is not supported: {why}",
        where=checkpoint.path,
        found=checkpoint.config["model_type"],
        allowed=allowed,
        fix="choose another model",
    )


def context_within(positions: int, config: dict[str, Any]) -> int:
    """Returns how many of these positions can be used: all, or those that transformers gives one scale."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] in TESTED_FAMILIES or not isinstance(rope, dict):
        return positions
    if "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return positions
    unscaled = config.get(SCALED_FROM) or rope.get(SCALED_FROM)
    return min(positions, unscaled) if isinstance(unscaled, int) else positions


def _window(config: dict[str, Any], window: Window | None, n_layers: int) -> Window | None:
    """Returns the family's window, if config.json switches it on."""
    if window is None or config.get(window.key, window.default) is None:
        return None
    if window.switched:
        kinds = config.get("layer_types")
        first = config.get("max_window_layers", 28)
        later = isinstance(first, int) and first < n_layers
        slides = "sliding_attention" in kinds if isinstance(kinds, list) else later
        if not config.get("use_sliding_window") or (window.partial and not slides):
            return None
    return window
