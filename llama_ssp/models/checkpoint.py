"""What a model claims to be, read from its JSON files and safetensors headers, or its GGUF header. No torch.

All checks are made before a weight is read: the folder is complete, stays inside itself and needs no code of
its own, and its tensors have the shapes that config.json says (sizes.py).
"""

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_ssp.config import SIZES, Dtype, ModelConf, Weights, home_expanded
from llama_ssp.config.presets import HUB_ID
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models.adapter import coded, not_for, require_fitting
from llama_ssp.models.families import family_of
from llama_ssp.models.folder import (
    MODEL_FOLDER,
    gguf_in,
    is_gguf,
    read_json,
    require_counts,
    require_safe,
    tensors_of,
    weights_here,
)
from llama_ssp.models.formats.quantised_config import (
    MODELOPT,
    QuantisedConfig,
    left_out,
    modelopt_claim,
    quantised_config,
    require_readable,
)
from llama_ssp.models.heads.settings import AssistantSettings, head_settings, kind_of
from llama_ssp.models.hub import cached_gguf, cached_tokenizer, commit_of, file_of, hub_copy
from llama_ssp.models.packages import kept_file, package_copy
from llama_ssp.models.sizes import LINEAR_SIZES, Checkpoint, config_file, require_positions, sizes_of
from llama_ssp.models.staged import staged
from llama_ssp.models.wrapped import TEXT, TEXT_TYPES, WHOLE, left_out_in_words, naming, text_part

log = logging.getLogger(__name__)

# Models in this package.
SHIPPED = "shipped:"
SHIPPED_FOLDER = Path(__file__).parents[1] / "shipped"
# What config.json calls the types of weights; others have no name here.
DTYPES_ON_DISK = {
    "float64": Dtype.fp64,
    "float32": Dtype.fp32,
    "float16": Dtype.fp16,
    "bfloat16": Dtype.bf16,
}


def complete(model: ModelConf, role: str, download: bool = False) -> tuple[ModelConf, Path | None]:
    """Returns the model with the shape that its checked folder says, and the folder.

    The folder is None for a synthetic model.
    """
    if model.weights is Weights.synthetic:
        return _synthetic(model, role), None
    if model.weights is Weights.loaded:
        return _loaded(model, role), None
    path = find(model, role, download)
    if kind_of(path):
        return _with_head(model, path, role), path
    checkpoint = inspect(path)
    if method := left_out(checkpoint.config):
        log.warning(
            "%s %s: its weights are plain; quantization_config (%s) of its config.json is left out",
            role,
            model.name,
            method,
        )
    if checkpoint.left_out:
        log.info("%s %s: %s left out; text only", role, model.name, checkpoint.left_out)
    return _whole(model, checkpoint, role), path


def outlined(model: ModelConf, role: str, download: bool = False) -> ModelConf:
    """Returns the model with its shape from config.json; a preset that has the shape needs no files.

    Of a folder whose weights are here their headers are read, too: what a run refuses is refused here.
    """
    known = bool(model.family) and all(getattr(model, size) for size in SIZES)
    if model.weights is Weights.synthetic:
        return _synthetic(model, role)
    if known and not _is_here(model):
        require_fitting(model, role, None)
        return _possible(model, role)
    local = model.path is not None or model.repo is None or bool(model.file or cached_gguf(model))
    if local:
        path = find(model, role, download)
    else:
        config_json = hub_copy(model, role, download, "config.json")
        path = config_json.parent
    if kind_of(path):
        return _with_head(model, path if local else find(model, role, download), role)

    if local and weights_here(path):
        return _whole(model, inspect(path), role)
    config = read_config(path)
    checkpoint = Checkpoint(path=path, config=config, tensors={})
    tied = config.get("tie_word_embeddings", family_of(config["model_type"]).tied)
    shaped = replace(with_shape(model, checkpoint, role), tied=bool(tied))
    require_fitting(shaped, role, checkpoint)
    return _possible(shaped, role, quantised_config(config, path))


def _with_head(model: ModelConf, path: Path, role: str) -> ModelConf:
    """Returns the model with the shape of the folder's head; tied if it embeds by the target's table."""
    if role != "draft":
        raise ModelError(
            "a trained head is not a model of its own",
            where=path,
            found=kind_of(path),
            fix="give it as the draft of its target: draft.path",
        )
    if model.adapter is not None:
        raise not_for(role, f"a trained head, {kind_of(path)}")
    head = head_settings(path)
    shaped = with_shape(model, Checkpoint(path=path, config=head.block, tensors={}), role)
    return replace(
        shaped,
        head_inputs=head.inputs,
        head_vocab=head.vocab,
        head_block=head.drafts,
        tied=not head.embeds,
        head_shares_cache=head.shares_cache,
        head_centroids=head.centroids if isinstance(head, AssistantSettings) else 0,
    )


def _loaded(model: ModelConf, role: str) -> ModelConf:
    """Returns the model, whose shape load_pair has read. Raises UsageError where it has not."""
    if not model.family:
        raise UsageError(
            "a model that is loaded is given in Python",
            where=f"{role}.weights",
            found="loaded",
            allowed="checkpoint, synthetic",
            fix="give it to load_pair, as the model or the draft",
        )
    return model


def _synthetic(model: ModelConf, role: str) -> ModelConf:
    """Returns the model; raises ModelError if it is to have an adapter, or cannot be."""
    if model.adapter is not None:
        raise not_for(role, "synthetic weights")
    return _possible(model, role)


def _whole(model: ModelConf, checkpoint: Checkpoint, role: str) -> ModelConf:
    """Returns the model with the checkpoint's shape; raises ModelError if it or its adapter does not fit."""
    if model.adapter is not None and (
        is_gguf(checkpoint.path) or quantised_config(checkpoint.config, checkpoint.path)
    ):
        raise coded(checkpoint.path)
    shaped = with_shape(model, checkpoint, role)
    require_fitting(shaped, role, checkpoint)
    return _possible(shaped, role, quantised_config(checkpoint.config, checkpoint.path))


def _possible(model: ModelConf, role: str, claimed: QuantisedConfig | None = None) -> ModelConf:
    """Returns the model; raises ModelError if it is to keep codes, or has experts, that cannot be.

    `claimed` is the format of its files as config.json says it; None of plain weights.
    """
    if model.dtype is Dtype.packed and (not model.code_bits or model.weights is Weights.synthetic):
        raise ModelError(
            "dtype=packed keeps the codes of a quantised checkpoint, and there are none to keep",
            where=f"{role} {model.name}",
            found=f"{claimed.name}, which is decoded while it is read" if claimed else "plain weights",
            fix=f"write {role}.dtype=bf16" + ("" if claimed else "; int8 and nf4 quantise plain weights"),
        )
    family = family_of(model.family)
    may_lack = bool(family.experts_key) and not model.experts
    if bool(family.names.router) != bool(model.experts) and not may_lack:
        raise ModelError(
            "the family has no experts" if model.experts else "the family has experts",
            where=f"{role} {model.name}",
            found=f"{model.family} with {model.experts} experts",
            fix=f"correct {role}.experts, {role}.experts_per_token and {role}.expert_ffn",
        )
    shared = family.names.shared_down
    is_whole = not model.shared_ffn or (bool(shared) and model.shared_ffn % model.expert_ffn == 0)
    is_whole = is_whole or bool(family.shared_key)
    if bool(shared) != bool(model.shared_ffn) or not is_whole:
        allowed = "a multiple of expert_ffn" if shared else "0"
        raise ModelError(
            "the family's experts for all tokens have another width",
            where=f"{role} {model.name}",
            found=f"{model.family} with {model.shared_ffn}",
            allowed="a width above 0" if family.shared_key else allowed,
            fix=f"correct {role}.shared_ffn",
        )
    _require_linear(model, role)
    return model


def _require_linear(model: ModelConf, role: str) -> None:
    """Raises ModelError if the sizes of linear attention are not those of a model of this family."""
    sizes = {name: getattr(model, name) for name in LINEAR_SIZES}
    is_hybrid = family_of(model.family).names.delta is not None
    is_whole = all(sizes.values()) if is_hybrid else not any(sizes.values())
    if is_whole and is_hybrid:
        in_groups = model.linear_value_heads % model.linear_key_heads == 0
        is_whole = in_groups and model.linear_layers <= model.n_layers
    if not is_whole:
        allowed = "whole groups of heads, in some of the layers" if is_hybrid else "0"
        raise ModelError(
            "the sizes of linear attention do not make a model",
            where=f"{role} {model.name}, {model.family}",
            found=", ".join(f"{name}={size}" for name, size in sizes.items()),
            allowed=allowed,
            fix=f"correct {role}.linear_layers and the others",
        )


def find(model: ModelConf, role: str, download: bool = False) -> Path:
    """Returns a model's folder, or its GGUF file: its `path`, or the local copy of its hub repository.

    Of one that was copied to this node's own disk it is that copy.
    """
    return staged(_found(model, role, download))


def _found(model: ModelConf, role: str, download: bool) -> Path:
    """Returns where a model's files are, as the configuration names them. Raises UsageError or ModelError."""
    if model.path is None and model.repo is not None:
        copied = None if model.file or download else cached_gguf(model)
        path = copied or hub_copy(model, role, download)
        commit = commit_of(path)
        pinned = ""
        if commit not in (model.revision, model.commit):
            pinned = f"; {role}.revision={commit} keeps to it"
        log.info("%s %s: %s at commit %s%s", role, model.name, model.repo, commit, pinned)
        return gguf_in(file_of(path, model, role) if model.file else path) or path
    if model.path is None and model.package:
        return package_copy(model, role, download)
    if model.path is None:
        raise UsageError(
            f"{role} {model.name} has neither a path nor a repo",
            fix=f"write {role}.path=FOLDER, or {role}.weights=synthetic to try it without weights",
        )

    path = home_expanded(model.path)
    if model.path.startswith(SHIPPED):
        path = SHIPPED_FOLDER / Path(model.path.removeprefix(SHIPPED)).name
    if file := gguf_in(path):
        return file
    if not path.is_dir():
        hub = ""
        if HUB_ID.fullmatch(model.path):
            hub = f"; for a hub repository write {role}={model.path}"
        raise ModelError(
            f"{role}.path is not a folder",
            where=path,
            fix=f"give the folder that holds config.json and *.safetensors, or a *.gguf file{hub}",
        )
    return path


def folder_at_hand(model: ModelConf) -> Path | None:
    """Returns a local folder with a tokenizer of the model; None if there is none. Nothing is fetched."""
    if model.weights is Weights.synthetic:
        return None
    if model.path is not None or model.package or model.repo is None:
        return find(model, "model") if _is_here(model) else None
    if model.file or cached_gguf(model):
        with suppress(ModelError):  # it is not here yet
            return find(model, "model")
    return cached_tokenizer(model)


def _is_here(model: ModelConf) -> bool:
    if model.path is None and model.package:
        return kept_file(model).is_file()
    if model.path is None or model.path.startswith(SHIPPED):
        return model.path is not None
    path = home_expanded(model.path)
    return path.is_dir() or (is_gguf(path) and path.is_file())


def inspect(path: Path) -> Checkpoint:
    """Reads and checks the folder; raises ModelError."""
    config = read_config(path)
    if is_gguf(path):
        from llama_ssp.models.formats.gguf_header import read_header

        stored = read_header(path)
        if (path.parent / "tokenizer.json").exists():  # then it is used
            require_safe(path.parent)
        tensors = {
            name: (stored.tensors[name].tensor_type.name, shape)
            for name, shape in stored.shapes.items()
            if stored.reads(name)
        }
        return Checkpoint(path=path, config=config, tensors=tensors)
    require_safe(path)
    tensors = tensors_of(path)
    left_out = left_out_in_words(tensors) if WHOLE in config else ""
    name_of = naming(config)
    tensors = {own: tensor for name, tensor in tensors.items() if (own := name_of(name)) is not None}
    require_readable(path, config, {name: kind for name, (kind, _) in tensors.items()})
    return Checkpoint(path=path, config=config, tensors=tensors, left_out=left_out)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of config.json, or what it would be for a GGUF file.

    For a multimodal checkpoint it is the config of its text part.
    """
    if is_gguf(path):
        from llama_ssp.models.formats.gguf_header import read_header

        config = read_header(path).config()
    else:
        config = read_json(path / "config.json")
        if "quantization_config" not in config and (path / MODELOPT).is_file():
            config["quantization_config"] = modelopt_claim(read_json(path / MODELOPT))
    require_counts(path, config)
    require_positions(path, config)
    if not isinstance(config.get("model_type"), str):
        raise ModelError("config.json has no model_type", where=path, fix=MODEL_FOLDER)
    part = text_part(config)
    inner = part.get(TEXT)
    if isinstance(inner, dict):
        raise ModelError(
            "the text part of this architecture is not known",
            where=path,
            found=f"{config['model_type']}, with {inner.get('model_type', 'a text part')}",
            allowed=", ".join(TEXT_TYPES),
            fix="use a text model of the same family",
        )
    return part


def dtype_on_disk(path: Path) -> Dtype | None:
    """Returns the type that config.json gives the weights; None where it gives none, and of a GGUF file."""
    config = {} if is_gguf(path) else text_part(read_json(path / "config.json"))
    name = config.get("dtype", config.get("torch_dtype"))
    return DTYPES_ON_DISK.get(str(name))


def with_shape(model: ModelConf, checkpoint: Checkpoint, role: str) -> ModelConf:
    """Returns the model with the checkpoint's shape; raises ModelError if a preset says another one."""
    sizes = sizes_of(checkpoint)
    # A tied head may be saved, too, and versions of a model differ in windows.
    wrong = [
        f"{key} {claimed} in the config, {value} in {config_file(checkpoint.path).name}"
        for key, value in sizes.items()
        if key not in ("tied", "sliding_window", "code_bytes", "code_mix")
        and (claimed := getattr(model, key)) not in (0, "", None, value)
    ]
    if wrong:
        raise ModelError(
            f"the checkpoint is not a {model.name}",
            where=checkpoint.path,
            found="; ".join(wrong),
            fix=f"choose the preset that matches, or write {role}=FOLDER alone",
        )
    return replace(model, **sizes)
