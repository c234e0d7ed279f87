"""From Hydra overrides to a checked run, without a command line. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.config import RunConf, few_resolvers, register
from llama_ssp.config.overrides import CONF, translated
from llama_ssp.config.validation import to_run
from llama_ssp.errors import UsageError


def composed(overrides: Sequence[str], folders: Sequence[Path] = ()) -> RunConf:
    """The run of these overrides; `folders` are private ones that may hold presets. Raises UsageError."""
    register()
    places = ",".join(f"'file://{quoted(folder)}'" for folder in folders)
    try:
        with few_resolvers(), initialize_config_dir(str(CONF), version_base="1.3"):
            return to_run(compose("run", [*overrides, f"hydra.searchpath=[{places}]"]))
    except (HydraException, OmegaConfBaseException) as error:
        raise translated(error) from error


def quoted(text: object) -> str:
    """The text for an override in single quotes."""
    return str(text).replace("\\", "\\\\").replace("'", "\\'")


def pair_words(model: str | Path, draft: str | Path | None) -> list[str]:
    """The overrides that choose a pair, or a target without a draft. Raises UsageError as `model_words`."""
    drafted = ["draft=none"] if draft is None else model_words("draft", draft)
    return [*model_words("model", model), *drafted]


def model_words(role: str, name: str | Path) -> list[str]:
    """The overrides for a model given by a preset's name, a folder, a GGUF file, or an id on the hub.

    `role` is model or draft. Raises UsageError where the name is none of the three.
    """
    presets = sorted(file.stem for file in (CONF / role).glob("*.yaml"))
    if isinstance(name, str) and name in presets:
        return [f"{role}={name}"]
    path = Path(name).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return [f"{role}=local", f"{role}.path='{quoted(name)}'"]
    if isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return [f"{role}=local", f"{role}.repo='{quoted(name)}'"]
    by_letters = {preset.lower(): preset for preset in presets}
    near = [by_letters[one] for one in difflib.get_close_matches(str(name).lower(), by_letters, 1)]
    what, allowed = f"{role} is no preset, no folder and no hub id", "a name under conf/model, an existing"
    fix = f"did you mean {near[0]}?" if near else "check the path"
    raise UsageError(what, "", repr(str(name)), f"{allowed} folder, ORG/NAME", fix)
