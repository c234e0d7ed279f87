"""What may be wrong with a model folder: each function gives a change that makes a sound folder so."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests import checkpoints
from tests.checkpoints import INDEX, edit, join, split

WEIGHTS = "model.safetensors"
OUTSIDE, EXECUTED = "outside", "executed"  # beside the model's folder: not to be read, not to come to be
Damage = Callable[[Path], object]


def nothing(path: Path) -> None:
    """A sound folder."""


def both(*changes: Damage) -> Damage:
    """One change after the other."""

    def apply(path: Path) -> None:
        for change in changes:
            change(path)

    return apply


def with_tokenizer(made: Callable[[], Tokenizer], **settings: Any) -> Damage:
    return lambda path: checkpoints.write_tokenizer(path, made(), **settings)


def sets(name: str, **values: Any) -> Damage:
    """A JSON file that says something else."""
    return lambda path: edit(path / name, lambda content: content.update(values))


def config_sets(**values: Any) -> Damage:
    return sets("config.json", **values)


def reworked(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """A weights file written again with other tensors."""

    def apply(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS, {"format": "pt"})

    return apply


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A weights file whose header claims something else."""

    def apply(path: Path) -> None:
        content, data = split(path / WEIGHTS)
        change(content)
        join(path / WEIGHTS, content, data)

    return apply


def bytes_of(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: (path / WEIGHTS).write_bytes(change((path / WEIGHTS).read_bytes())) and None


def maps_to(name: object) -> Damage:
    """An index that says so of the place of one tensor."""

    def apply(path: Path) -> None:
        edit(path / INDEX, lambda content: content["weight_map"].update({"model.norm.weight": name}))

    return apply


def linked_outside(name: str) -> Damage:
    """A file of the model that lies elsewhere."""

    def apply(path: Path) -> None:
        outside = path.parent / OUTSIDE
        outside.mkdir(exist_ok=True)
        (path / name).rename(outside / name)
        (path / name).symlink_to(outside / name)

    return apply


def linked_to(name: str, place: str) -> Damage:
    """A link in a file's stead."""

    def apply(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(place)

    return apply


def pipe(name: str) -> Damage:
    """A named pipe, at which a reader waits for ever."""

    def apply(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(path / name)

    return apply


def renamed(old: str, new: str) -> Damage:
    return lambda path: (path / old).rename(path / new)


def removed(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def replaced(name: str, content: bytes | str) -> Damage:
    return lambda path: (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


class Payload:
    """Runs when it is unpickled: says so by a file."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._place),)


def pickled(name: str) -> Damage:
    """A file that runs code when it is unpickled."""
    return lambda path: (path / name).write_bytes(pickle.dumps(Payload(path.parent / EXECUTED)))


def torch_pickled(name: str) -> Damage:
    """The same as torch.save writes it: a zip archive."""
    return lambda path: torch.save({"a": Payload(path.parent / EXECUTED)}, path / name)


def code(name: str) -> Damage:
    """A module that says by a file that it was imported."""

    def apply(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(
            f"import os\nos.mkdir({str(path.parent / EXECUTED)!r})\nclass C:\n    pass\n"
        )

    return apply


def sparse(name: str, start: bytes, size: int) -> Damage:
    """A huge file that takes no room."""

    def apply(path: Path) -> None:
        with (path / name).open("wb") as file:
            file.write(start)
            file.truncate(size)

    return apply


def many_tensors(count: int) -> Damage:
    """A header of so many tensors, each of nothing."""

    def apply(path: Path) -> None:
        entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        text = "{" + ",".join(f'"t{number}":{entry}' for number in range(count)) + "}"
        join(path / WEIGHTS, text.encode(), b"")

    return apply


def templated(text: str) -> Damage:
    return with_tokenizer(checkpoints.tokenizer, chat_template=text)


def tokenizer_says(**values: Any) -> Damage:
    return sets("tokenizer_config.json", **values)


def as_json(value: object) -> str:
    return json.dumps(value)


def gguf_bytes(
    keys: Mapping[str, object], tensors: Sequence[tuple[str, tuple[int, ...], int, int]], data: int
) -> bytes:  # fmt: skip
    """A GGUF file, which may lie: of each tensor the name, the shape, inputs first, its format and its place.

    Values are texts, whole numbers, fractions, lists of texts, or bytes, which stand there as they are.
    """
    found = b"GGUF\x03\0\0\0" + struct.pack("<QQ", len(tensors), len(keys))
    for name, value in keys.items():
        found += _text(name) + _value(value)
    for name, shape, kind, place in tensors:
        found += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, place)
    return found + b"\0" * (-len(found) % 32 + data)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def gguf(content: bytes, name: str = "model.gguf", size: int = 0) -> Damage:
    """A GGUF file in the place of the other weights, and of the tokenizer; with `size` a file with a hole."""

    def apply(path: Path) -> None:
        for other in (WEIGHTS, "tokenizer.json"):
            (path / other).unlink()
        (path / name).write_bytes(content)
        if size:
            os.truncate(path / name, size)

    return apply
