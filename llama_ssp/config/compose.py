"""Has Hydra merge overrides: those of the command line into its jobs, others into a checked run. No torch."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.config import RunConf, few_resolvers, register
from llama_ssp.config.overrides import SWEEP, check_arguments, translated
from llama_ssp.config.presets import CONF, quoted
from llama_ssp.config.validation import to_run
from llama_ssp.config.validation.values import listed

COMPOSING = threading.Lock()


@dataclass(frozen=True)
class ComposedJob:
    """A job's merged config, the private folders with presets for it, and its overrides."""

    cfg: DictConfig
    folders: list[Path]
    words: list[str]


def composed_jobs() -> list[ComposedJob]:
    """The jobs of the command line: of a sweep, or the one; none if Hydra only printed something.

    Changes sys.argv. Raises UsageError.
    """
    sys.argv[1:] = check_arguments(sys.argv[1:])
    register()
    GlobalHydra.instance().clear()
    found: list[ComposedJob] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
    def keep(cfg: DictConfig) -> None:
        hydra_ = HydraConfig.get()
        private = [Path(s.path) for s in hydra_.runtime.config_sources if s.provider == "command-line"]
        found.append(ComposedJob(cfg, private, list(hydra_.overrides.task)))

    try:
        with tempfile.TemporaryDirectory() as scratch, few_resolvers():
            if SWEEP & set(sys.argv):  # Hydra keeps a record of a sweep, the user none
                sys.argv.insert(1, f"hydra.sweep.dir={scratch}")
            keep()
    except (RecursionError, MemoryError):
        raise
    except SystemExit as end:  # Hydra exits after --cfg; what it printed is still to be flushed
        if end.code:
            raise
    except Exception as error:  # what Hydra cannot merge is the user's mistake, whatever its class
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            raise
        raise translated(error) from error
    return found


def composed(overrides: Sequence[str], folders: Sequence[Path] = ()) -> RunConf:
    """The run of these overrides; `folders` are private ones that may hold presets. Raises UsageError."""
    register()
    places = ",".join(quoted(f"file://{folder}") for folder in folders)
    try:
        with _own_hydra(), few_resolvers(), initialize_config_dir(str(CONF), version_base="1.3"):
            return to_run(compose("run", [*overrides, f"hydra.searchpath=[{places}]"]))
    except (HydraException, OmegaConfBaseException) as error:
        raise translated(error) from error


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Sets aside the Hydra of an application that calls this. One thread at a time: it is the process's."""
    with COMPOSING:
        instance = GlobalHydra.instance()
        before = instance.hydra
        instance.clear()
        try:
            yield
        finally:
            instance.hydra = before
            GlobalHydra.set_instance(instance)


def pair_words(model: str | Path, draft: str | Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """The checked overrides of a pair, or of a target without a draft. Raises UsageError."""
    names = zip(("model", "draft"), (model, "none" if draft is None else draft), strict=True)
    given = [f"{role}={Path(name).absolute() if isinstance(name, Path) else name}" for role, name in names]
    return check_arguments([*given, *listed("overrides", overrides)])
