"""Bounds of YAML that users give, in private presets and in run folders. No torch.

An alias (`*name`) stands for a part of the file as often as it is written, also for a part with aliases: nine
lines can mean nine to the ninth values. They are counted before anything makes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins

from llama_ssp.errors import UsageError

MAX_BYTES = 16 * 2**20
MAX_VALUES = 100_000  # keys count, too; the largest preset has sixty


@dataclass
class _Part:
    """A list or a mapping that is being read: its name, if any, and how many values it holds so far."""

    anchor: str | None
    values: int = 1


def values_in(text: str) -> int:
    """Returns how many values a YAML text holds with its aliases written out.

    Above MAX_VALUES it stops counting. Raises yaml.YAMLError for what is not YAML.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sizes = dict[str, int]()
    parts = [_Part(None)]
    for event in yaml.parse(text, Loader=loader):
        count = 0
        if isinstance(event, yaml.CollectionStartEvent):
            parts.append(_Part(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            part = parts.pop()
            count = part.values
            if part.anchor is not None:
                sizes[part.anchor] = count
        elif isinstance(event, yaml.AliasEvent):
            # Of a part that is still being read: who reads it refuses it.
            count = sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            count = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        parts[-1].values += count
        if parts[-1].values > MAX_VALUES:
            break
    return max(part.values for part in parts)


def require_bounded(file: Path) -> None:
    """Refuses a YAML file that is too large, or that means too many values. Raises UsageError.

    What is wrong otherwise is left to who reads the file.
    """
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise UsageError(
            "the file is too large", where=file, found=f"{size} bytes", allowed=f"{MAX_BYTES} bytes"
        )
    content = file.read_bytes()
    if b"*" not in content:
        return
    try:
        values = values_in(content.decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError):
        return
    if values > MAX_VALUES:
        raise UsageError(
            "the file means too many values",
            where=file,
            found=f"more than {MAX_VALUES}, with its aliases written out",
            allowed=f"at most {MAX_VALUES}",
            fix="write fewer values, and no aliases (*NAME) inside of what an alias stands for",
        )


class BoundedFiles(FileConfigSource):
    """Hydra's reader of files, which looks at the bounds of each file that it reads."""

    def load_config(self, config_path: str) -> Any:
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.is_file():
            require_bounded(file)
        return super().load_config(config_path)


@contextmanager
def bounded_files() -> Iterator[None]:
    """Has Hydra read files by `BoundedFiles` inside."""
    Plugins.instance()  # registers Hydra's own readers, once
    readers: dict[str, Any] = SourcesRegistry.instance().types
    before = readers["file"]
    readers["file"] = BoundedFiles
    try:
        yield
    finally:
        readers["file"] = before
