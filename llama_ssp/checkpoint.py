"""What a model folder claims to be, read from its JSON and from safetensors headers. No torch.

Everything here is checked before a weight is read: the folder is there, is complete, stays inside
itself, needs no code of its own, and has the shape that the config says.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_ssp.config import ModelConf, Weights, home_expanded
from llama_ssp.errors import ModelError, UsageError

MAX_JSON_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 100 * 2**20
SHIPPED, SHIPPED_FOLDER = "shipped:", Path(__file__).parent / "shipped"  # models that come with us
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INDEX = "model.safetensors.index.json"
CODE_KEYS = ("auto_map", "trust_remote_code", "custom_generate")
HEADS = ("lm_head.weight", "embed_out.weight")  # absent where the embedding serves as head
READ_BY_LIBRARIES = (".json", ".jinja", ".txt", ".model", ".safetensors")
# Bits of an element of each number format that can be loaded here.
BITS = {
    "F64": 64, "F32": 32, "BF16": 16, "F16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8,
    "BOOL": 8, "U16": 16, "U32": 32, "U64": 64,
}  # fmt: skip


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
            raise ModelError(
                f"{role}.path is not a folder", where=str(path),
                fix="give the folder that holds config.json and *.safetensors",
            )  # fmt: skip
        return path
    if model.repo is None:
        raise UsageError(
            f"{role} {model.name} has neither a path nor a repo",
            fix=f"write {role}.path=FOLDER, or {role}.weights=synthetic to try it without weights",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.repo,
                revision=model.revision,
                local_files_only=not model.download,
                allow_patterns=["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"],
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        found = "no local copy" if not model.download else str(error)
        raise ModelError(
            f"{role} {model.name} is not at hand", where=f"hub repository {model.repo}", found=found,
            fix=f"write {role}.path=FOLDER, or {role}.download=true with {role}.revision=COMMIT, "
            f"or {role}.weights=synthetic to try the machine without weights",
        ) from None  # fmt: skip


def inspect(path: Path) -> Checkpoint:
    """Reads and checks the folder."""
    config = _json(path / "config.json")
    _require_plain(path)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        content = _json(path / name) if (path / name).exists() else {}
        wants = [key for key in CODE_KEYS if content.get(key)]
        if wants:
            raise ModelError(
                "the model wants to run code of its own", where=str(path / name), found=", ".join(wants),
                fix=f"use a model of a built-in architecture, or a copy whose {name} has no {wants[0]}",
            )  # fmt: skip
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            "config.json names no model_type",
            where=str(path),
            fix="use a Hugging Face model folder",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for file, expected in _weight_files(path).items():
        found = _header(file)
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
    return Checkpoint(path, config, shapes)


def _require_plain(path: Path) -> None:
    """What libraries open must be files: opening a pipe would wait for ever."""
    for entry in sorted(path.iterdir()):
        if entry.suffix in READ_BY_LIBRARIES and entry.exists() and not entry.is_file():
            raise ModelError(
                "not a regular file", where=str(entry), found="a folder, a pipe or a device",
                fix="copy the model's files into the folder",
            )  # fmt: skip


def with_shape(model: ModelConf, checkpoint: Checkpoint, role: str) -> ModelConf:
    """The model with the checkpoint's shape; a preset that says otherwise is refused."""
    found = shape_of(checkpoint)
    claimed = {key: getattr(model, key) for key in found}
    wrong = [
        f"{key} {claimed[key]} in the config, {value} in config.json"
        for key, value in found.items()
        if key != "tied" and claimed[key] not in (0, "", None, value)  # a tied head may be saved, too
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
        raise ModelError(
            f"config.json has no usable {names[0]}", where=str(checkpoint.path),
            found=repr(config.get(names[0])), allowed="a positive whole number", fix="fetch the model again",
        )  # fmt: skip

    def given(default: int, *names: str) -> int:
        return first(*names) if any(config.get(name) is not None for name in names) else default

    heads, dim = first("num_attention_heads", "num_heads", "n_head"), first("hidden_size", "n_embd")
    shape = {
        "family": config["model_type"],
        "n_layers": first("num_hidden_layers", "num_layers", "n_layer"),
        "n_heads": heads,
        "n_kv_heads": given(heads, "num_key_value_heads"),
        "head_dim": given(dim // heads, "head_dim"),
        "dim": dim,
        "ffn": given(4 * dim, "intermediate_size", "ffn_dim", "n_inner"),
        "vocab": first("vocab_size"),
        "context": first("max_position_embeddings", "n_positions"),
        "tied": not any(name.endswith(HEADS) for name in checkpoint.shapes),
    }
    if heads % shape["n_kv_heads"]:
        raise ModelError(
            "query heads do not divide into groups of KV heads", where=str(checkpoint.path),
            found=f"{heads} and {shape['n_kv_heads']}", allowed="a whole number of query heads per KV head",
            fix="fetch the model again",
        )  # fmt: skip
    _compare_embedding(checkpoint, shape["vocab"], dim)
    return shape


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


def _weight_files(path: Path) -> dict[Path, list[str] | None]:
    """The files that hold weights, with the tensors each should hold where an index says so."""
    if (path / INDEX).exists():
        weight_map = _json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError("the index has no weight_map", where=str(path / INDEX), fix="fetch it again")
        files: dict[Path, list[str] | None] = {}
        for tensor, name in weight_map.items():
            names = files.setdefault(_inside(path, name, str(path / INDEX)), [])
            assert names is not None
            names.append(tensor)
        return files
    if (path / "model.safetensors").exists() or (path / "model.safetensors").is_symlink():
        return {_inside(path, "model.safetensors", str(path)): None}
    pickled = sorted(p.name for p in path.iterdir() if p.suffix in PICKLED)
    if pickled:
        raise ModelError(
            "the weights are pickled, which can run code", where=str(path), found=", ".join(pickled[:5]),
            allowed="*.safetensors",
            fix="convert them where you trust them: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW_DIR, safe_serialization=True)",
        )  # fmt: skip
    raise ModelError(
        "the folder holds no weights", where=str(path), allowed=f"model.safetensors or {INDEX}",
        fix="give the folder of a saved model",
    )  # fmt: skip


def _inside(path: Path, name: object, source: str) -> Path:
    """The file a checkpoint names, if it is a plain file of that folder.

    Hub copies keep links to a `blobs` folder two levels up; those count as inside.
    """
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
        raise ModelError(
            "a shard's name leaves the folder", where=source, found=repr(name), allowed="a plain file name",
            fix="do not use this model: its index points outside",
        )  # fmt: skip
    file = path / name
    try:
        mode = file.stat().st_mode
    except (OSError, ValueError):
        raise ModelError(
            "a shard is missing",
            where=f"{source}: {name}",
            found="no such file",
            fix=f"put it into {path}",
        ) from None
    real, home = file.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not stat.S_ISREG(mode) or not (real.is_relative_to(home) or real.is_relative_to(blobs)):
        raise ModelError(
            "a shard is not a plain file of the folder", where=str(file), found=str(real),
            fix="copy the weights into the folder",
        )  # fmt: skip
    return file


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes in a safetensors file, whose length must be exactly what its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            raise ModelError(
                "the weights are a Git LFS pointer, not the file",
                where=str(file),
                fix="run git lfs pull",
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(file, f"a header of {length} bytes in a file of {size}")
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_twins)
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        shapes = {k: tuple(int(n) for n in v["shape"]) for k, v in entries.items()}
        spans = sorted((int(v["data_offsets"][0]), int(v["data_offsets"][1])) for v in entries.values())
        formats = {k: str(v["dtype"]) for k, v in entries.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        twice = str(error) if isinstance(error, _TwinsError) else "that is not a table of tensors"
        raise _damaged(file, f"a header {twice}") from None
    for name, (first, last) in ((k, v["data_offsets"]) for k, v in entries.items()):
        if formats[name] not in BITS:
            raise ModelError(
                "a tensor has a number format that cannot be loaded", where=f"{file}: {name}",
                found=formats[name], allowed=", ".join(BITS), fix="use a copy of the model in bf16 or fp16",
            )  # fmt: skip
        if min(shapes[name], default=0) < 0 or math.prod(shapes[name]) * BITS[formats[name]] != 8 * (
            last - first
        ):
            raise _damaged(file, f"{last - first} bytes for {name} of {shapes[name]} in {formats[name]}")
    end = 0
    for first, last in spans:
        if first != end or last < first:
            raise _damaged(file, f"tensors that overlap or leave a gap at byte {end}")
        end = last
    if 8 + length + end != size:
        raise _damaged(file, f"{size} bytes where the header promises {8 + length + end}")
    return shapes


class _TwinsError(ValueError):
    """A key stands twice in a JSON object: which one holds is anyone's guess."""


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise _TwinsError(f"where {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return record


def _damaged(file: Path, found: str) -> ModelError:
    return ModelError(
        "the weights file is damaged or cut short",
        where=str(file),
        found=found,
        fix="fetch it again",
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ModelError("not a regular file", where=str(file), fix="use a Hugging Face model folder")
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(
                "the file is too large",
                where=str(file),
                found=file.stat().st_size,
                allowed=str(MAX_JSON_BYTES),
            )
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_no_twins)
    except FileNotFoundError:
        raise ModelError(
            f"there is no {file.name}",
            where=str(file.parent),
            fix="use a Hugging Face model folder",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{file.name} is not JSON",
            where=str(file.parent),
            found=str(error),
            fix="fetch it again",
        ) from None
    if not isinstance(content, dict):
        raise ModelError(f"{file.name} is not a JSON object", where=str(file.parent), fix="fetch it again")
    return content


def complete(model: ModelConf, role: str) -> tuple[ModelConf, Path | None]:
    """The model with its shape checked against its files, and where they are; a synthetic one has none."""
    if model.weights is Weights.synthetic:
        return model, None
    path = find(model, role)
    return with_shape(model, inspect(path), role), path
