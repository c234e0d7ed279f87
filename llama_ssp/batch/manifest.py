"""What a job is: its input and settings, by hash, and how its records are divided into shards."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from llama_ssp.errors import DataError


@dataclass(frozen=True)
class Shard:
    """Consecutive records of the input."""

    name: str
    indices: range


GONE = (("speculation.siblings", 0),)  # settings of earlier versions that change nothing


@dataclass(frozen=True)
class Manifest:
    """What run.json holds. `settings` is all that decides the output, flat; `facts` follow from the input."""

    input_sha256: str
    records: int
    settings: dict[str, Any]
    shards: tuple[Shard, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def as_bytes(self) -> bytes:
        body = {**vars(self), "shards": len(self.shards)}
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

    @staticmethod
    def read(data: bytes, where: str) -> Manifest:
        try:
            body = json.loads(data)
            count = body["shards"]  # 0.3 listed them
            shards = dealt(body["records"], count if isinstance(count, int) else len(count))
            settings = {key: value for key, value in body["settings"].items() if (key, value) not in GONE}
            return Manifest(body["input_sha256"], body["records"], settings, shards, body["facts"])
        except (ValueError, KeyError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
            fix = "it is not ours, or damaged: choose another folder"
            raise DataError("run.json cannot be read", where, found, fix=fix) from None

    def require_same(self, held: Manifest, where: str) -> None:
        """Raises DataError if the folder's manifest `held` is another job's."""
        changed = [key for key in ("input_sha256", "records") if getattr(held, key) != getattr(self, key)]
        for key in sorted(held.settings.keys() | self.settings.keys()):
            old, new = held.settings.get(key), self.settings.get(key)
            changed += [f"{key}={old!r} now {new!r}"] * (old != new)
        if changed:
            what, allowed = "the folder holds the results of another job", "the same input and settings"
            fix = "undo the change, or choose another task.output"
            raise DataError(what, where, "; ".join(changed[:8]), allowed, fix)


def shards_of(records: int, most: int) -> tuple[Shard, ...]:
    """Shards of at most `most` records, as even as can be."""
    return dealt(records, -(-records // most))


def dealt(records: int, number: int) -> tuple[Shard, ...]:
    """So many shards, as even as can be."""
    bounds = [*(-(-records * n // number) for n in range(number)), records]
    return tuple(Shard(f"{n:05d}", range(start, end)) for n, (start, end) in enumerate(pairwise(bounds)))
