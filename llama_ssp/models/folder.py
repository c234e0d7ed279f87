"""The files of a model folder, opened with suspicion: plain, inside, whole, no pickle, no code. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import stat
import struct
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError

MAX_JSON_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 10 * 2**20  # of 100 000 tensors; a shard of a large model has a hundredth of it
MAX_NAME = 255  # characters of a file's or a tensor's name
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
POINTER = b"version https://git-lfs"  # how a Git LFS pointer begins, which stands in a file's place
INDEX = "model.safetensors.index.json"
SAMPLES, SAMPLE_BYTES = 32, 512  # of a weight file, for its fingerprint
TEMPLATES = "additional_chat_templates"  # a folder that libraries look into
CODE_KEYS = ("auto_map", "trust_remote_code", "custom_generate")
CODE_FILES = (
    "config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip
ADAPTER = "adapter_config.json"
READ_BY_LIBRARIES = (".json", ".jinja", ".txt", ".model", ".safetensors")

# Bits of an element of each number format that can be loaded here.
BITS = {
    "F64": 64, "F32": 32, "BF16": 16, "F16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8,
    "BOOL": 8, "U16": 16, "U32": 32, "U64": 64,
}  # fmt: skip


def weight_files(path: Path) -> dict[Path, list[str] | None]:
    """The files that hold weights, with the tensors each should hold where an index says so."""
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
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


def header(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes in a safetensors file, whose length must be exactly what its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == POINTER[:8]:
            raise _pointer(file)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(file, f"a header of {length} bytes in a file of {size}")
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_twins)
        unfit = next((k for k in header if len(k) > MAX_NAME or not k.isprintable()), None)
        if unfit is not None:
            raise _damaged(file, f"a tensor by the name of {unfit[:MAX_NAME]!r}")
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        shapes = {k: _whole_numbers(v["shape"]) for k, v in entries.items()}
        places = {k: _whole_numbers(v["data_offsets"]) for k, v in entries.items()}
        spans = sorted((first, last) for first, last in places.values())
        formats = {k: str(v["dtype"]) for k, v in entries.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        twice = str(error) if isinstance(error, _TwinsError) else "that is not a table of tensors"
        raise _damaged(file, f"a header {twice}") from None
    for name, (first, last) in places.items():
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


def _whole_numbers(value: list[Any]) -> tuple[int, ...]:
    """The list's numbers; TypeError where one is not whole: JSON has fractions, Python's also Infinity."""
    if not isinstance(value, list) or any(type(n) is not int for n in value):
        raise TypeError("not a list of whole numbers")
    return tuple(value)


def fingerprint(path: Path) -> str:
    """What tells this model from another in moments, whatever its size: a hash for ranks to compare.

    Of the small files, the tokenizer's among them, everything counts; of the weight files, their names,
    sizes and headers, and some bytes of each at fixed places.
    """
    digest = hashlib.sha256()
    weights = weight_files(path)
    small = [p for p in path.iterdir() if p.suffix in READ_BY_LIBRARIES and p not in weights and p.is_file()]
    for file in sorted(small):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    for file in sorted(weights):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            start = stream.read(8)
            digest.update(start + stream.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)))
            for sample in range(SAMPLES + 1):
                stream.seek(max(0, size - SAMPLE_BYTES) * sample // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ModelError("not a regular file", where=str(file), fix="use a Hugging Face model folder")
        require_inside(file)
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(
                "the file is too large",
                where=str(file),
                found=file.stat().st_size,
                allowed=str(MAX_JSON_BYTES),
            )
        require_fetched(file)
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


def require_plain(path: Path) -> None:
    """What libraries open must be whole files of the folder: opening a pipe would wait for ever."""
    for entry in sorted([*path.iterdir(), *path.glob(f"{TEMPLATES}/*")]):
        if entry.suffix in READ_BY_LIBRARIES and entry.exists():
            if not entry.is_file():
                raise ModelError(
                    "not a regular file", where=str(entry), found="a folder, a pipe or a device",
                    fix="copy the model's files into the folder",
                )  # fmt: skip
            require_inside(entry, path)
            if entry.suffix != ".safetensors":  # those that are used have their headers read
                require_fetched(entry)


def require_fetched(file: Path) -> None:
    """Refuses a Git LFS pointer in the place of a file."""
    with file.open("rb") as stream:
        if stream.read(len(POINTER)) == POINTER:
            raise _pointer(file)


def require_no_code(path: Path) -> None:
    """Refuses what would have code run that is not ours, or weights changed by what lies beside them."""
    for name in CODE_FILES:
        content = read_json(path / name) if (path / name).exists() else {}
        wants = [key for key in CODE_KEYS if content.get(key)] + _kernels_of_others(content)
        if wants:
            raise ModelError(
                "the model wants to run code of its own", where=str(path / name), found=", ".join(wants),
                fix=f"use a model of a built-in architecture, or a copy whose {name} has no {wants[0]}",
            )  # fmt: skip
        listed = content.get("fast_tokenizer_files")
        outside = [str(n) for n in listed if str(n) != Path(str(n)).name] if isinstance(listed, list) else []
        if outside:  # libraries open one of them
            raise ModelError(
                "the model names a file outside of its folder", where=str(path / name),
                found=", ".join(outside), fix="do not use this model",
            )  # fmt: skip
    if (path / ADAPTER).exists():  # whether libraries apply it hangs on what else is installed
        raise ModelError(
            "an adapter lies beside the weights", where=str(path / ADAPTER),
            fix="merge it into the weights where you trust it, or use a copy of the model without it",
        )  # fmt: skip


def _kernels_of_others(content: dict[str, Any]) -> list[str]:
    """Attention and the like that would be fetched from a hub repository, as code."""
    return [
        f"{key} {value}"
        for key, value in content.items()
        if key.endswith("_implementation") and isinstance(value, str) and "/" in value
    ]


def require_inside(file: Path, folder: Path | None = None) -> None:
    """Refuses a link that leaves the model's folder, by default that of the file.

    Hub copies keep links to a `blobs` folder two levels up; those count as inside.
    """
    real, home = file.resolve(), (folder or file.parent).resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (real.is_relative_to(home) or real.is_relative_to(blobs)):
        raise ModelError(
            "a file leaves the folder", where=str(file), found=str(real), fix="copy it into the folder"
        )


def _inside(path: Path, name: object, source: str) -> Path:
    """The file a checkpoint names, if it is a plain file of that folder."""
    if (
        not isinstance(name, str)
        or name != Path(name).name
        or name in ("", ".", "..")
        or len(name) > MAX_NAME
    ):
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
    if not stat.S_ISREG(mode):
        raise ModelError(
            "a shard is not a plain file of the folder", where=str(file), found=str(file.resolve()),
            fix="copy the weights into the folder",
        )  # fmt: skip
    require_inside(file)
    return file


def _pointer(file: Path) -> ModelError:
    return ModelError(
        f"{file.name} is a Git LFS pointer, not the file", where=str(file),
        fix="run git lfs pull in the model's folder, or fetch the model again",
    )  # fmt: skip


def _damaged(file: Path, found: str) -> ModelError:
    return ModelError(
        "the weights file is damaged or cut short",
        where=str(file),
        found=found,
        fix="fetch it again",
    )


class _TwinsError(ValueError):
    """A key stands twice in a JSON object: which one holds is anyone's guess."""


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict[str, Any]()
    for name, value in pairs:
        if name in record:
            raise _TwinsError(f"where {name!r} stands twice")
        record[name] = value
    return record
