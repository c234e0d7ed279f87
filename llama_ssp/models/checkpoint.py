"""What a model folder claims to be, read from its JSON and from safetensors headers. No torch.

Everything here is checked before a weight is read: the folder is there, is complete, stays inside
itself, needs no code of its own, and has the shape that the config says.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_ssp.config import SIZES, ModelConf, Weights, home_expanded
from llama_ssp.config.environment import rank_environment
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models.bounds import require_counts, require_short_texts
from llama_ssp.models.families import SCALED_BY_PASS, TESTED_FAMILIES, Window, family_of
from llama_ssp.models.folder import header, read_json, require_no_code, require_plain, weight_files

log = logging.getLogger(__name__)

SHIPPED, SHIPPED_FOLDER = "shipped:", Path(__file__).parents[1] / "shipped"  # models that come with us
REPO = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # as the hub names them
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")  # in a tensor's name
# Of a repository: no pickle, no code, and no second copy of the weights in another layout.
WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]
SCALES = (".SCB", ".absmax")  # how the names of tensors end that bitsandbytes quantised weights with
PROJECTED = ("word_embed_proj_dim", "embedding_size")  # where embeddings may be narrower than layers
SUPPORTED = ", ".join(TESTED_FAMILIES) + ", and others that have attention with explicit positions only"
SCALED_FROM = "original_max_position_embeddings"
HEADS = ("lm_head.weight", "embed_out.weight")  # absent where the embedding serves as head


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed: its config, and every tensor's shape."""

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


def find(model: ModelConf, role: str) -> Path:
    """The folder of a model: `path`, or the local copy of its hub repository."""
    if model.path is not None:
        own = model.path.removeprefix(SHIPPED)
        path = home_expanded(model.path) if own == model.path else SHIPPED_FOLDER / Path(own).name
        if not path.is_dir():
            hub = (
                f"; for a hub repository write {role}.repo={model.path}" if REPO.fullmatch(model.path) else ""
            )
            raise ModelError(
                f"{role}.path is not a folder", where=str(path),
                fix=f"give the folder that holds config.json and *.safetensors{hub}",
            )  # fmt: skip
        return path
    if model.repo is None:
        raise UsageError(
            f"{role} {model.name} has neither a path nor a repo",
            fix=f"write {role}.path=FOLDER, or {role}.weights=synthetic to try it without weights",
        )
    return _hub_copy(model, model.repo, role)


def _hub_copy(model: ModelConf, repo: str, role: str) -> Path:
    """The repository's folder in the local store, fetched if that is allowed, and named by its commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not rank_environment().is_leader:
        disable_progress_bars()  # one voice
    try:
        path = Path(
            snapshot_download(
                repo,
                revision=model.revision,
                local_files_only=not model.download,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        found = "no local copy" if not model.download else str(error)
        raise ModelError(
            f"{role} {model.name} is not at hand", where=f"hub repository {repo}", found=found,
            fix=f"write {role}.path=FOLDER, or {role}.download=true with {role}.revision=COMMIT, "
            f"or {role}.weights=synthetic to try the machine without weights",
        ) from None  # fmt: skip
    commit = commit_of(path)
    pinned = "" if model.revision == commit else f"; {role}.revision={commit} keeps to it"
    log.info("%s %s: %s at commit %s%s", role, model.name, repo, commit, pinned)
    return path


def commit_of(path: Path) -> str | None:
    """Which commit of a hub repository the folder holds, if it is a copy of one."""
    return path.name if path.parent.name == "snapshots" else None


def inspect(path: Path) -> Checkpoint:
    """Reads and checks the folder."""
    config = read_json(path / "config.json")
    require_plain(path)
    require_no_code(path)
    require_counts(path, config)
    require_short_texts(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            "config.json names no model_type",
            where=str(path),
            fix="use a Hugging Face model folder",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for file, expected in weight_files(path).items():
        found = header(file)
        missing = sorted(set(expected) - set(found)) if expected is not None else []
        extra = sorted(set(found) - set(expected)) if expected is not None else []
        twins = sorted(set(found) & set(shapes))
        for problem, names in (("lacks", missing), ("holds unlisted", extra), ("repeats", twins)):
            if names:
                raise ModelError(
                    f"{file.name} {problem} tensors", where=str(file),
                    found=f"{len(names)}: {', '.join(names[:5])}", fix="fetch the model again",
                )  # fmt: skip
        shapes.update(found)
    _require_scales(path, config.get("quantization_config"), shapes)
    return Checkpoint(path, config, shapes)


def _require_scales(path: Path, claim: object, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuses plain weights that config.json calls quantised by bitsandbytes: they would be read as codes."""
    if not isinstance(claim, dict) or any(name.endswith(SCALES) for name in shapes):
        return
    if claim.get("quant_method") == "bitsandbytes" or claim.get("load_in_8bit") or claim.get("load_in_4bit"):
        raise ModelError(
            "config.json says that bitsandbytes quantised the weights, but they are plain",
            where=f"{path / 'config.json'}: quantization_config", found="no scales among the tensors",
            fix="remove quantization_config from config.json; dtype=int8 or nf4 quantises plain weights",
        )  # fmt: skip


def with_shape(model: ModelConf, checkpoint: Checkpoint, role: str) -> ModelConf:
    """The model with the checkpoint's shape; a preset that says otherwise is refused."""
    found = shape_of(checkpoint)
    claimed = {key: getattr(model, key) for key in found}
    wrong = [
        f"{key} {claimed[key]} in the config, {value} in config.json"
        for key, value in found.items()
        if key not in ("tied", "sliding_window")  # a tied head may be saved, too; versions differ in windows
        and claimed[key] not in (0, "", None, value)
    ]
    if wrong:
        raise ModelError(
            f"the checkpoint is not a {model.name}", where=str(checkpoint.path), found="; ".join(wrong),
            fix=f"choose the preset that matches, or {role}=local {role}.path=FOLDER",
        )  # fmt: skip
    return replace(model, **found)


def shape_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The six integers and their company, under the config's names."""
    config = checkpoint.config

    def first(*names: str) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                return value
        found = [config[name] for name in names if config.get(name) is not None]
        if not found:
            _require_tested(checkpoint, f"its config.json has no {names[0]}")
        elif isinstance(found[0], list):
            _require_tested(checkpoint, f"its layers differ in {names[0]}")
        raise ModelError(
            f"config.json has no usable {names[0]}", where=str(checkpoint.path),
            found=repr(next(iter(found), None)), allowed="a positive whole number",
            fix="correct it, or fetch the model again",
        )  # fmt: skip

    def given(default: int, *names: str) -> int:
        return first(*names) if any(config.get(name) is not None for name in names) else default

    family = family_of(config["model_type"])
    heads, dim = first("num_attention_heads", "num_heads", "n_head"), first("hidden_size", "n_embd")
    positions = "max_position_embeddings", "n_positions"
    # Falcon's config.json has a number of KV heads for its newer kind only.
    newer = config.get("new_decoder_architecture") or not config.get("multi_query", True)
    one_kv = family.multi_query and not newer
    for name in PROJECTED:
        if config.get(name) not in (None, dim):
            raise _unsupported(checkpoint, f"its embeddings are projected ({name})", f"embeddings of {dim}")
    shape = {
        "family": config["model_type"],
        "n_layers": first("num_hidden_layers", "num_layers", "n_layer"),
        "n_heads": heads,
        "n_kv_heads": 1 if one_kv else given(heads, "num_key_value_heads", "num_kv_heads"),
        "head_dim": given(dim // heads, "head_dim"),
        "dim": dim,
        "ffn": given(4 * dim, "intermediate_size", "ffn_dim", "n_inner"),
        "vocab": first("vocab_size"),
        "context": context_within(
            given(family.context, *positions) if family.context else first(*positions), config
        ),
        "tied": not any(name.endswith(HEADS) for name in checkpoint.shapes),
        "sliding_window": None,
    }
    if heads % shape["n_kv_heads"]:
        raise ModelError(
            "query heads do not divide into groups of KV heads", where=str(checkpoint.path),
            found=f"{heads} and {shape['n_kv_heads']}", allowed="a whole number of query heads per KV head",
            fix="fetch the model again",
        )  # fmt: skip
    if window := _window(config, family.window, shape["n_layers"]):
        shape["sliding_window"] = given(*window)
    _compare_embedding(checkpoint, shape["vocab"], dim)
    _compare_layers(checkpoint, shape["n_layers"])
    return shape


def _require_tested(checkpoint: Checkpoint, why: str) -> None:
    """A config that lacks what the tested families have is another architecture's, or else damaged."""
    if checkpoint.config["model_type"] not in TESTED_FAMILIES:
        raise _unsupported(checkpoint, why)


def _unsupported(checkpoint: Checkpoint, why: str, allowed: str = SUPPORTED) -> ModelError:
    return ModelError(
        f"the architecture is not supported: {why}", where=str(checkpoint.path),
        found=checkpoint.config["model_type"], allowed=allowed, fix="choose another model",
    )  # fmt: skip


def context_within(positions: int, config: dict[str, Any]) -> int:
    """How many of these positions can be used: all, or those before all rows would need the same scale."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] not in SCALED_BY_PASS or not isinstance(rope, dict):
        return positions
    if "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return positions
    unscaled = config.get(SCALED_FROM) or rope.get(SCALED_FROM)
    return min(positions, unscaled) if isinstance(unscaled, int) else positions


def _window(config: dict[str, Any], window: Window | None, n_layers: int) -> tuple[int, str] | None:
    """The default and the key of the family's window, if config.json switches it on.

    causal_lm.windows_of reads the same off the code of any architecture.
    """
    if window is None or config.get(window.key, window.default) is None:
        return None
    if window.switched:
        kinds, first = config.get("layer_types"), config.get("max_window_layers", 28)
        later = isinstance(first, int) and first < n_layers
        slides = "sliding_attention" in kinds if isinstance(kinds, list) else later
        if not config.get("use_sliding_window") or (window.partial and not slides):
            return None
    return window.default or 0, window.key


def _compare_layers(checkpoint: Checkpoint, claimed: int) -> None:
    """Before a module of so many layers is made."""
    numbers = [int(found[1]) for name in checkpoint.shapes if (found := LAYER.search(name))]
    if numbers and 1 + max(numbers) != claimed:
        raise ModelError(
            "the number of layers contradicts config.json", where=str(checkpoint.path),
            found=f"{1 + max(numbers)} in the weights, {claimed} in config.json", fix="fetch the model again",
        )  # fmt: skip


def _compare_embedding(checkpoint: Checkpoint, vocab: int, dim: int) -> None:
    for name, shape in checkpoint.shapes.items():
        if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")) and shape != (
            vocab,
            dim,
        ):
            raise ModelError(
                "a tensor's shape contradicts config.json", where=f"{checkpoint.path}: {name}",
                found=shape, allowed=str((vocab, dim)), fix="fetch the model again",
            )  # fmt: skip


def complete(model: ModelConf, role: str) -> tuple[ModelConf, Path | None]:
    """The model with its shape checked against its files, and where they are; a synthetic one has none."""
    if model.weights is Weights.synthetic:
        return model, None
    path = find(model, role)
    return with_shape(model, inspect(path), role), path


def outlined(model: ModelConf, role: str) -> ModelConf:
    """The model with its shape from config.json alone; a preset that has it needs no files at all."""
    known = bool(model.family) and all(getattr(model, size) for size in SIZES)
    if model.weights is Weights.synthetic or (known and not _is_here(model)):
        return model
    file = _config_file(model, role)
    checkpoint = Checkpoint(file.parent, read_json(file), {})
    require_counts(file.parent, checkpoint.config)
    if not isinstance(checkpoint.config.get("model_type"), str):
        raise ModelError(
            "config.json names no model_type", where=str(file), fix="use a Hugging Face model folder"
        )
    usual = family_of(checkpoint.config["model_type"]).tied
    tied = checkpoint.config.get("tie_word_embeddings", usual)
    return replace(with_shape(model, checkpoint, role), tied=bool(tied))


def _is_here(model: ModelConf) -> bool:
    return model.path is not None and (model.path.startswith(SHIPPED) or home_expanded(model.path).is_dir())


def folder_at_hand(model: ModelConf) -> Path | None:
    """Where a tokenizer of the model is on this machine; nothing is fetched for it. None if there is none."""
    if model.weights is Weights.synthetic:
        return None
    if model.path is not None or model.repo is None:
        return find(model, "model") if _is_here(model) else None
    if not (_hub_cache() / f"models--{model.repo.replace('/', '--')}").is_dir():
        return None  # known without the library, which takes a while to import
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.repo, "tokenizer.json", revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def _hub_cache() -> Path:
    """Where the hub's library keeps what it has fetched."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return home_expanded(own or f"{home}/hub")


def _config_file(model: ModelConf, role: str) -> Path:
    """The config.json, of a hub repository fetched where download=true."""
    if model.path is not None or model.repo is None:
        return find(model, role) / "config.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            hf_hub_download(
                model.repo, "config.json", revision=model.revision, local_files_only=not model.download
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        found = "no local copy" if not model.download else str(error)
        raise ModelError(
            f"{role} {model.name}: config.json is not at hand", where=f"hub repository {model.repo}",
            found=found, fix=f"write {role}.download=true, or {role}.path=FOLDER",
        ) from None  # fmt: skip
