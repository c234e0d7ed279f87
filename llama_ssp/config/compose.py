"""From Hydra overrides to a checked run, without a command line. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.config import RunConf, few_resolvers, register
from llama_ssp.config.overrides import check_arguments, translated
from llama_ssp.config.presets import CONF, quoted
from llama_ssp.config.validation import to_run


def composed(overrides: Sequence[str], folders: Sequence[Path] = ()) -> RunConf:
    """The run of these overrides; `folders` are private ones that may hold presets. Raises UsageError."""
    register()
    places = ",".join(quoted(f"file://{folder}") for folder in folders)
    try:
        with few_resolvers(), initialize_config_dir(str(CONF), version_base="1.3"):
            return to_run(compose("run", [*overrides, f"hydra.searchpath=[{places}]"]))
    except (HydraException, OmegaConfBaseException) as error:
        raise translated(error) from error


def pair_words(model: str | Path, draft: str | Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """The checked overrides of a pair, or of a target without a draft. Raises UsageError."""
    names = zip(("model", "draft"), (model, "none" if draft is None else draft), strict=True)
    given = [f"{role}={Path(name).absolute() if isinstance(name, Path) else name}" for role, name in names]
    return check_arguments([*given, *overrides])
