"""What a job is: its input and settings, by hash, and how its records are dealt out into shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llama_ssp.errors import DataError


@dataclass(frozen=True)
class Shard:
    """Some of the input's records, one after the other: its bytes `start` to `end`, from line `line` on."""

    number: int
    first: int
    count: int
    start: int
    end: int
    line: int

    @property
    def indices(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def name(self) -> str:
        return f"{self.number:05d}"


@dataclass(frozen=True)
class Manifest:
    """What run.json holds. `settings` is all that decides the output, flat; `facts` follow from the input."""

    input_sha256: str
    records: int
    settings: dict[str, Any]
    shards: tuple[Shard, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def with_facts(self, facts: dict[str, Any]) -> Manifest:
        return replace(self, facts=facts)

    def as_bytes(self) -> bytes:
        body = {**asdict(self), "key": self.key}
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

    @property
    def key(self) -> str:
        """Equal for the same job alone."""
        body = {"input": self.input_sha256, "records": self.records, "settings": self.settings}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    @staticmethod
    def read(data: bytes, where: str) -> Manifest:
        try:
            body = json.loads(data)
            shards = tuple(Shard(**shard) for shard in body["shards"])
            return Manifest(body["input_sha256"], body["records"], body["settings"], shards, body["facts"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "run.json cannot be read", where=where, found=f"{type(error).__name__}: {error}",
                fix="it is not this program's, or damaged: choose another folder",
            ) from None  # fmt: skip

    def require_same(self, held: Manifest, where: str) -> None:
        """Refuses to go on with a job that has become another one."""
        if held.key == self.key:
            return
        changed = [key for key in ("input_sha256", "records") if getattr(held, key) != getattr(self, key)]
        keys = sorted(held.settings.keys() | self.settings.keys())
        changed += [
            f"{key}={held.settings.get(key)!r} now {self.settings.get(key)!r}"
            for key in keys
            if held.settings.get(key) != self.settings.get(key)
        ]
        raise DataError(
            "the folder holds the results of another job", where=where, found="; ".join(changed[:8]),
            allowed="the same input and settings", fix="undo the change, or choose another task.output",
        )  # fmt: skip


def shards_of(places: Sequence[tuple[int, int]], size: int, most: int) -> tuple[Shard, ...]:
    """Shards of at most `most` records, as even as can be, of a file of `size` bytes.

    A record's place is its first byte and the number of its line.
    """
    records = len(places)
    number = -(-records // most)
    found, first = [], 0
    for shard in range(number):
        count = records // number + (shard < records % number)
        start, line = places[first]
        end = places[first + count][0] if first + count < records else size
        found.append(Shard(shard, first, count, start, end, line))
        first += count
    return tuple(found)
