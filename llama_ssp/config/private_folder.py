"""Checks of a private config folder (--config-dir): models and settings, nothing that Hydra runs. No torch.

Keys, defaults lists and packages of every yaml are checked before Hydra reads one, within bounds of size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import yaml

from llama_ssp.errors import UsageError

UNSAFE_NAMES = {"hydra", "_target_", "_partial_", "_recursive_", "()", "class"}
MAX_ENTRIES, MAX_YAML_BYTES = 10_000, 2**18  # of a private config folder
MAX_VALUES = 10_000  # of a file in it
# An entry of a private defaults list: a plain group or option, and the package it goes to.
ENTRY = re.compile(r"(?:(?:optional|override) )*/?[\w-][\w.-]*(?:/[\w-][\w.-]*)*(?:@[\w.:-]+)?")
# Keys of cluster.slurm that end in a shell script.
RUN_ON_NODES = {"setup", "options", "torchrun", "python"}
PACKAGE_HEADER = re.compile(r"@package\s+(\S+)")  # anywhere in a line, as Hydra may read it


def check_folder(folder: Path, groups: Sequence[str]) -> None:
    """Refuses a private config folder with anything but models and settings. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError("--config-dir is not a folder", "", folder, fix="check the path")
    if (folder / "run.yaml").exists():
        fix = "it would replace the project's configuration"
        raise UsageError("a private run.yaml is refused", folder, fix=fix)
    for file in _yaml_files(folder):
        keys = set(_keys(file))
        unsafe = sorted(key for key in keys if is_unsafe(key))
        if is_unsafe(str(file.relative_to(folder))):  # folders are groups, and names of packages
            unsafe.append("a hydra/ group, or a file so named")
        if running := sorted(RUN_ON_NODES & keys):
            what = "a private config may not set what runs on the nodes of a cluster"
            fix = f"write cluster.slurm.{running[0]}=... on the command line"
            raise UsageError(what, file, ", ".join(running), fix=fix)
        if unsafe:
            what = "a private config may not set what Hydra itself runs"
            raise UsageError(what, file, ", ".join(unsafe), ", ".join(groups), "remove it")


def is_unsafe(key: str) -> bool:
    """Whether a key, or a part of the group, package or file that it names, is Hydra's own.

    Hydra drops everything in a package up to the last `_global_` and the character after it.
    """
    parts = re.split(r"[^\w()-]+", key)
    parts += [part.rpartition("_global_")[2][1:] for part in parts if "_global_" in part]
    return not UNSAFE_NAMES.isdisjoint(parts)


def _yaml_files(folder: Path) -> Iterator[Path]:
    """Every yaml that Hydra could reach below the folder. Raises UsageError for links and large folders."""
    entries = list(islice(folder.rglob("*"), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        found, allowed = f"more than {MAX_ENTRIES} files", f"{MAX_ENTRIES} files and folders"
        fix = "give a folder that holds configurations only"
        raise UsageError("--config-dir holds too much", folder, found, allowed, fix)
    left = MAX_YAML_BYTES
    for entry in sorted(entries):
        linked, is_yaml = entry.is_symlink() and entry.is_dir(), entry.name.endswith(".yaml")
        if linked or (is_yaml and not entry.is_file()):
            what = "a private config folder may hold plain files only"
            found = "a link to a folder" if linked else "no regular file"
            raise UsageError(what, entry, found, fix="copy the files into it")
        if is_yaml:
            left -= entry.stat().st_size
            if left < 0:
                what, allowed = "the private configurations are too long", f"{MAX_YAML_BYTES} bytes"
                found, fix = f"more than {allowed} of yaml in {folder}", "take out what the run does not need"
                raise UsageError(what, entry, found, allowed, fix)
            yield entry


def _keys(file: Path) -> list[str]:
    """Every key, every entry of a defaults list, and the package that a header names."""
    try:
        text = file.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is not None and _values(root, {}) > MAX_VALUES:
            found, allowed = "more, with its aliases written out", f"{MAX_VALUES} values"
            raise UsageError("the file holds too many values", file, found, allowed, "take aliases out")
        content = None if root is None else loader.construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError("the file is not yaml", file, error, fix="correct it, or take it out") from None
    keys = PACKAGE_HEADER.findall(text)
    if isinstance(content, dict) and "defaults" in content:
        keys += _entries(content["defaults"], file)
    stack = [content]
    while stack:  # it ends: values are counted with aliases written out
        node = stack.pop()
        if isinstance(node, dict):
            keys += map(str, node)
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return keys


def _entries(defaults: object, file: Path) -> list[str]:
    """The entries of a defaults list: plain names of groups and options."""
    found = list[str]()
    for item in defaults if isinstance(defaults, list) else [defaults]:
        for part in [*item.keys(), *item.values()] if isinstance(item, dict) else [item]:
            found += [str(name) for name in (part if isinstance(part, list) else [part]) if name is not None]
    odd = [name for name in found if not ENTRY.fullmatch(name)]
    if odd or not isinstance(defaults, list):
        what, allowed = "a private config names its defaults plainly", 'a list such as "- /model: tiny"'
        fix = "write out the names of group and option"
        raise UsageError(what, file, ", ".join(odd) or type(defaults).__name__, allowed, fix)
    return found


def _values(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values of a yaml node, aliases written out; infinite for an alias inside itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [item for part in parts for item in (part if isinstance(part, tuple) else (part,))]
        known[id(node)] = 1 + sum(_values(item, known) for item in flat)
    return known[id(node)]
