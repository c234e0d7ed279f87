"""Limits the size of YAML that users give, in private presets and in run folders. No torch.

An alias (`*name`) repeats a part of the file, and that part may hold aliases itself: nine lines can mean nine
to the ninth values (the "billion laughs"). The values are counted before any reader makes them.
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

from llama_ssp.config.presets import FAST_YAML
from llama_ssp.errors import UsageError

MAX_BYTES = 16 * 2**20
MAX_VALUES = 100_000  # with aliases written out; keys count, too. A shipped preset has some tens


@dataclass
class _Part:
    """A list or a mapping that is being read.

    `anchor` is the name by which aliases repeat it (`&name`), if it has one. `values` is how many values it
    means so far; it is one itself.
    """

    anchor: str | None
    values: int = 1


def values_in(text: str) -> int:
    """Returns how many values a YAML text means with its aliases written out, and one for the document.

    It stops counting above MAX_VALUES. Raises yaml.YAMLError for what is not YAML.
    """
    sizes = dict[str, int]()  # values of a part or a scalar, by its anchor
    parts = [_Part(None)]  # the document, and the parts within each other that are being read
    for event in yaml.parse(text, Loader=FAST_YAML):
        count = 0
        if isinstance(event, yaml.CollectionStartEvent):
            parts.append(_Part(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            part = parts.pop()
            count = part.values
            if part.anchor is not None:
                sizes[part.anchor] = count
        elif isinstance(event, yaml.AliasEvent):
            # Without a size, it repeats the part that it is in: Hydra refuses that as nested too deeply.
            count = sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            count = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        parts[-1].values += count
        if parts[-1].values > MAX_VALUES:
            break
    return max(part.values for part in parts)  # after a break, parts are left that nobody has added up


def require_bounded(file: Path) -> None:
    """Raises UsageError for a YAML file that is too large, or whose aliases may mean too many values.

    A file that is no YAML passes: its reader refuses it.
    """
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise UsageError(
            "the file is too large", where=file, found=f"{size} bytes", allowed=f"{MAX_BYTES} bytes"
        )
    content = file.read_bytes()
    if b"*" not in content:  # no alias: its bytes are limit enough
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
    """Hydra's reader of configuration files, which refuses those beyond the limits."""

    def load_config(self, config_path: str) -> Any:
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.is_file():
            require_bounded(file)
        return super().load_config(config_path)


@contextmanager
def bounded_files() -> Iterator[None]:
    """Has Hydra read configuration files by `BoundedFiles` while the context is open."""
    Plugins.instance()  # when first made it registers Hydra's own readers, which would replace ours
    readers: dict[str, Any] = SourcesRegistry.instance().types
    before = readers["file"]
    readers["file"] = BoundedFiles
    try:
        yield
    finally:
        readers["file"] = before
