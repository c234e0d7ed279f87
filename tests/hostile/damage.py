"""What may be wrong with a model folder: each function gives a change that makes a sound folder so."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import checkpoints
from tests.checkpoints import INDEX, edit, join, split

WEIGHTS = "model.safetensors"
OUTSIDE, EXECUTED = "outside", "executed"  # beside the model's folder: not to be read, not to come to be
Tensors = dict[str, Tensor]
Damage = Callable[[Path], object]


def damage(change: Callable[..., object]) -> Callable[..., Damage]:
    """Makes change(path, *arguments) a function of the arguments, which gives the change of a path."""

    @wraps(change)
    def given(*arguments: Any, **settings: Any) -> Damage:
        return lambda path: change(path, *arguments, **settings)

    return given


def nothing(path: Path) -> None:
    """A sound folder."""


@damage
def both(path: Path, *changes: Damage) -> None:
    """One change after the other."""
    for change in changes:
        change(path)


@damage
def with_tokenizer(path: Path, made: Callable[[], Any] = checkpoints.tokenizer, **settings: Any) -> None:
    checkpoints.write_tokenizer(path, made(), **settings)


@damage
def edited(path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """A JSON file with other content."""
    edit(path / name, change)


def sets(name: str, **values: Any) -> Damage:
    return edited(name, lambda content: content.update(values))


def config_sets(**values: Any) -> Damage:
    return sets("config.json", **values)


@damage
def reworked(path: Path, change: Callable[[Tensors], object]) -> None:
    """A weights file written again with other tensors."""
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path / WEIGHTS, {"format": "pt"})


@damage
def header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A weights file whose header claims something else."""
    content, data = split(path / WEIGHTS)
    change(content)
    join(path / WEIGHTS, content, data)


@damage
def cut_short(path: Path, count: int) -> None:
    """A weights file without its last bytes."""
    os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size - count)


def maps_to(name: object) -> Damage:
    """An index that says so of the place of one tensor."""
    return edited(INDEX, lambda content: content["weight_map"].update({"model.norm.weight": name}))


@damage
def linked_outside(path: Path, name: str) -> None:
    """A file of the model that lies elsewhere."""
    outside = path.parent / OUTSIDE
    outside.mkdir(exist_ok=True)
    (path / name).rename(outside / name)
    (path / name).symlink_to(outside / name)


@damage
def linked_to(path: Path, name: str, place: str) -> None:
    """A link in a file's stead."""
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(place)


@damage
def pipe(path: Path, name: str) -> None:
    """A named pipe, at which a reader waits for ever."""
    (path / name).unlink(missing_ok=True)
    (path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(path / name)


@damage
def removed(path: Path, *names: str) -> None:
    for name in names:
        (path / name).unlink()


@damage
def replaced(path: Path, name: str, content: bytes | str) -> None:
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


class Payload:
    """Runs when it is unpickled: says so by a file."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._place),)


@damage
def pickled(path: Path, name: str) -> None:
    """A file that runs code when it is unpickled."""
    (path / name).write_bytes(pickle.dumps(Payload(path.parent / EXECUTED)))


@damage
def torch_pickled(path: Path, name: str) -> None:
    """Such a file as torch.save writes it: a zip archive."""
    torch.save({"a": Payload(path.parent / EXECUTED)}, path / name)


@damage
def code(path: Path, name: str) -> None:
    """A module that says by a file that it was imported."""
    text = f"import os\nos.mkdir({str(path.parent / EXECUTED)!r})\nclass C:\n    pass\n"
    replaced(name, text)(path)


@damage
def sparse(path: Path, name: str, start: bytes, size: int) -> None:
    """A huge file that takes no room."""
    (path / name).write_bytes(start)
    os.truncate(path / name, size)


@damage
def many_tensors(path: Path, count: int) -> None:
    """A header of so many tensors, each of nothing."""
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(f'"t{number}":{entry}' for number in range(count)) + "}"
    join(path / WEIGHTS, text.encode(), b"")


def as_bytes(value: object) -> Tensor:
    """The tensor in which bitsandbytes keeps JSON."""
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
