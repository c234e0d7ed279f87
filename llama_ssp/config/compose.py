"""Has Hydra run the jobs of a command line, or merge other overrides into a checked run. No torch."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.config import RunConf, register
from llama_ssp.config.arguments import completable, hydra_arguments, in_full
from llama_ssp.config.presets import CONF, quoted
from llama_ssp.config.translation import translated
from llama_ssp.config.validation import listed, to_run
from llama_ssp.errors import OK, USAGE, RunError

COMPOSING = threading.Lock()


@dataclass(frozen=True)
class ComposedJob:
    """A job's merged config, the private folders with presets for it, and its overrides.

    `number` counts the jobs of a sweep, None is a single run; `varied` are the overrides that differ in it.
    """

    cfg: DictConfig
    folders: list[Path]
    words: list[str]
    number: int | None
    varied: list[str]


def run_jobs(arguments: Sequence[str], run: Callable[[ComposedJob], int]) -> int:
    """Has Hydra run the command line's job, or those of a sweep; the greatest code that `run` returned.

    0 if Hydra only printed something. The first error of a job ends a sweep, and is raised.
    """
    register()
    GlobalHydra.instance().clear()
    codes, errors, before = [OK], list[Exception](), sys.argv
    try:
        if {"--shell-completion", "-sc"} & {*arguments} and "COMP_LINE" in os.environ:
            os.environ["COMP_LINE"] = completable(os.environ["COMP_LINE"])
        words = hydra_arguments(arguments)
        with tempfile.TemporaryDirectory() as scratch:
            if {"--multirun", "-m"} & {*words}:  # Hydra records a sweep where the user says so, else nowhere
                words.insert(0, f"hydra.sweep.dir={scratch}")

            def start(cfg: DictConfig) -> None:
                sys.argv = before
                try:
                    codes.extend([] if errors else [run(_job(cfg, words))])
                except Exception as error:  # Hydra would add lines of its own
                    errors.append(error)

            if any(word.startswith("-") or "hydra.mode" in word for word in words):
                sys.argv = [before[0], *words]
                hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")(start)()
            else:  # as `hydra.main` does, which merges all words twice to see whether this is a sweep
                with initialize_config_dir(str(CONF), version_base="1.3"):
                    GlobalHydra.instance().hydra.run("run", start, words)  # type: ignore[union-attr]
    except (RunError, RecursionError, MemoryError):
        raise
    except SystemExit as end:  # Hydra has printed what was asked for, or what is wrong
        if end.code:
            return USAGE
    except Exception as error:  # what Hydra cannot merge is the user's mistake, whatever its class
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            raise
        raise translated(error) from error
    finally:
        sys.argv = before
    if errors:
        raise errors[0]
    return max(codes)


def _job(cfg: DictConfig, given: Sequence[str]) -> ComposedJob:
    """The job that Hydra has merged now; `given` are the words that it was given."""
    hydra_conf = HydraConfig.get()
    folders = [
        Path(source.path)
        for source in hydra_conf.runtime.config_sources
        if source.schema == "file" and source.provider != "main"
    ]
    words = OmegaConf.to_container(hydra_conf.overrides.task)  # ${...} as it is written
    assert isinstance(words, list)
    number = hydra_conf.job.num if hydra_conf.mode is RunMode.MULTIRUN else None
    return ComposedJob(cfg, folders, words, number, [word for word in words if word not in given])


def composed(overrides: Sequence[str], folders: Sequence[Path] = ()) -> RunConf:
    """The run of these overrides; `folders` are private ones that may hold presets. Raises UsageError."""
    register()
    places = ",".join(quoted(f"file://{folder}") for folder in folders)
    try:
        with COMPOSING:  # Hydra is the process's: that of an application that calls this is set aside
            instance = GlobalHydra.instance()
            before = instance.hydra
            instance.clear()
            try:
                with initialize_config_dir(str(CONF), version_base="1.3"):
                    return to_run(compose("run", [*overrides, f"hydra.searchpath=[{places}]"]))
            finally:
                instance.hydra = before
                GlobalHydra.set_instance(instance)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise translated(error) from error


def pair_words(model: str | Path, draft: str | Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides of a pair, or of a target without a draft, in full. Raises UsageError or ModelError."""
    names = zip(("model", "draft"), (model, "none" if draft is None else draft), strict=True)
    given = [f"{role}={Path(name).absolute() if isinstance(name, Path) else name}" for role, name in names]
    return in_full([*given, *listed("overrides", overrides)])
