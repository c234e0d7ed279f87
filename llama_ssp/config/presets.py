"""Presets, models and machines by name. No torch.

A model is a preset, a folder, a GGUF file, or an id on the hub. A machine is a preset, or a GPU as people
type it: H200, a100-80, 8xH100.
"""

import difflib
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from llama_ssp.config.run import home_expanded
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import ModelError, UsageError

_packaged = Path(__file__).parents[1] / "conf"  # in an installed wheel
CONF = _packaged if _packaged.is_dir() else Path(__file__).parents[2] / "conf"
GROUPS = ("model", "draft", "placement", "cluster", "sampling", "speculation", "task", "experiment")
ROLES = ("model", "draft")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HUB_NAME = re.compile(rf"({HUB_ID.pattern})(?::([\w.-]+))?")  # with a GGUF file of it: ORG/NAME:Q4_K_M
HUB_PAGE = "https://huggingface.co/"
# How people write GPUs: h200, 8xH100, A100-80GB x4; a DGX or HGX has as many as its preset.
TYPED_GPU = re.compile(
    r"(?:(?P<count>\d+) ?[xX*] ?)?(?P<box>(?:[dD][gG][xX]|[hH][gG][xX])[ _-])?"
    r"(?P<gpu>[A-Za-z][\w -]*?)(?:(?<=[\d ])[xX*] ?(?P<count_behind>\d+))?"
)
FAST_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # where PyYAML was built with it
UNNAMED = "local"  # the preset of every folder and id
NAMES_OF_A_MODEL = "a preset, a folder, a GGUF file, or ORG/NAME[:Q4_K_M] on the Hugging Face hub"


def options(group: str) -> list[str]:
    """Returns the names that GROUP=NAME takes."""
    names = TASKS if group == "task" else (file.stem for file in (CONF / group).glob("*.yaml"))
    return sorted({*names} - ({UNNAMED} if group in ROLES else {""}))


def model_words(role: str, name: str) -> list[str]:
    """Returns the overrides that choose this model or draft (`role`). Raises ModelError for a wrong path."""
    if "${" in name:
        name = OmegaConf.create({role: name})[role]
    name = name.removeprefix(HUB_PAGE).rstrip("/") if name.startswith(HUB_PAGE) else name
    path = home_expanded(name)
    is_place = "/" in name or name.startswith(".")
    if name in options(role):
        return [f"{role}={name}"]
    if os.path.isdir(path) and (is_place or os.path.exists(path / "config.json")):
        keys = {"name": Path(os.path.abspath(path)).name, "path": name}
    elif path.suffix == ".gguf" and os.path.isfile(path):
        keys = {"name": path.name, "path": name}
    elif of_hub := HUB_NAME.fullmatch(name):
        keys = {"name": name, "repo": of_hub[1]} | ({"file": of_hub[2]} if of_hub[2] else {})
    elif os.path.isfile(path):
        raise ModelError(
            f"{role} is neither a model folder nor a GGUF file",
            where=path,
            fix="give the folder that holds the file",
        )
    elif is_place or path.suffix == ".gguf":
        raise ModelError(f"{role}: there is no such folder or file", where=path, fix="check the path")
    else:  # Hydra looks for a preset of the user's own
        return [f"{role}={quoted(name)}"]
    return [f"{role}={UNNAMED}", *(f"{role}.{key}={quoted(value)}" for key, value in keys.items())]


@cache
def machines() -> dict[str, dict[str, Any]]:
    """Returns the figures of every cluster preset that names a GPU, by its file's name."""
    files = sorted((CONF / "cluster").glob("*.yaml"))
    presets = {file.stem: _content(file) for file in files}
    return {name: preset for name, preset in presets.items() if preset.get("gpu")}


def _content(file: Path) -> dict[str, Any]:
    """Returns what a shipped YAML file says; by libyaml, as Python's own reader takes 0.1 s for all."""
    loader = FAST_YAML(file.read_bytes())
    try:
        content: dict[str, Any] = loader.get_single_data()
    finally:
        loader.dispose()
    return content


def cluster_words(name: str) -> list[str]:
    """Returns the overrides that choose this machine. Raises UsageError for a GPU of several sizes."""
    typed = TYPED_GPU.fullmatch(name)
    if name in options("cluster") or typed is None or not (presets := _with_gpu(typed["gpu"])):
        return [f"cluster={name}"]  # Hydra looks for a preset of the user's own
    if len(presets) > 1:
        kinds = ", ".join(sorted(str(machines()[preset]["gpu"]) for preset in presets))
        raise UsageError(f"cluster={name} may be several GPUs", allowed=kinds, fix="name one")
    of_node = int(machines()[presets[0]]["gpus"])
    if typed["count"] or typed["count_behind"]:
        gpus = int(typed["count"] or typed["count_behind"])
    else:
        gpus = of_node if typed["box"] else 1
    nodes = gpus // of_node if gpus > of_node > 1 and gpus % of_node == 0 else 1
    words = [f"cluster={presets[0]}", f"cluster.gpus={gpus // nodes}"]
    return words if nodes == 1 else [*words, f"cluster.nodes={nodes}"]


def _with_gpu(typed: str) -> list[str]:
    """Returns the presets whose GPU has this name, whatever its letters; else those of this family."""
    by_name = {_plain(str(preset["gpu"])): name for name, preset in reversed(machines().items())}
    if preset := by_name.get(_plain(typed)):
        return [preset]
    return [name for gpu, name in by_name.items() if re.fullmatch(rf"{re.escape(_plain(typed))}\d\d", gpu)]


def _plain(name: str) -> str:
    """Returns a GPU's name without what people write in different ways."""
    return re.sub(r"[^A-Z0-9]|NVIDIA|GEFORCE|SXM\d?|GB$", "", name.strip().upper())


def quoted(text: object, as_written: bool = True) -> str:
    """Quotes a text as an override's value. Without `as_written`, ${...} in it is still resolved."""
    plain = str(text)
    if plain == "???":  # by which OmegaConf means that a value is missing
        return """'${oc.select:_,"???"}'"""
    if as_written:
        plain = re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", plain)
    escaped = re.sub(r"(\\*)('|\Z)", lambda f: f[1] * 2 + ("\\'" if f[2] else ""), plain)
    return f"'{escaped}'"


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Returns the most similar name, also in other letters (7b for 7B); None if none is."""
    by_letters = {other.lower(): other for other in names}
    matches = difflib.get_close_matches(name.lower(), by_letters, n=1)
    return by_letters[matches[0]] if matches else None
