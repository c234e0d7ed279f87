"""Has Hydra run the jobs of a command line, or merge other overrides into a checked run. No torch.

Errors of Hydra and OmegaConf become UsageErrors: one line with the key, what was found, what is allowed.
"""

import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.config import RunConf, register
from llama_ssp.config.arguments import completable, hydra_arguments, in_full, unknown_key
from llama_ssp.config.gone import gone
from llama_ssp.config.presets import CONF, GROUPS, NAMES_OF_A_MODEL, ROLES, nearest, options, quoted
from llama_ssp.config.validation import check, listed
from llama_ssp.config.yaml_files import bounded_files
from llama_ssp.errors import OK, USAGE, RunError, UsageError, shortened

COMPOSING = threading.Lock()
SEVERAL = re.compile(r"Ambiguous value for argument '(?P<key>[\w.]+)=")
HYDRA_NOISE = re.compile(
    "full_key:|object_type|reference_type|Set the env|Config search path|provider=|To append to|Error merging"
)
NO_KEY = re.compile(r"Key '(?P<key>[^']*)' (?:not in '(?P<schema>\w+)'|is not in struct)")
NOT_THERE = re.compile(r"Could not override '(?P<key>[^']*)'")
NO_CHOICE = re.compile(r"Invalid value '(?P<value>[^']*)', expected one of")
NO_OPTION = re.compile(r"Could not find '(?P<group>[^']+)/(?P<option>[^'/]*)'")


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
    codes = [OK]
    errors = list[Exception]()
    before = sys.argv
    try:
        if {"--shell-completion", "-sc"} & {*arguments} and "COMP_LINE" in os.environ:
            os.environ["COMP_LINE"] = completable(os.environ["COMP_LINE"])
        words = hydra_arguments(arguments)
        with tempfile.TemporaryDirectory() as scratch, bounded_files():
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
        raise _translated(error) from error
    finally:
        sys.argv = before
    if errors:
        raise errors[0]
    return max(codes)


def _job(cfg: DictConfig, given: Sequence[str]) -> ComposedJob:
    """Returns the job that Hydra has merged now; `given` are the words that it was given."""
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


def to_run(cfg: DictConfig) -> RunConf:
    """Returns Hydra's merged config as dataclasses, checked. Raises UsageError."""
    try:
        run = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise _translated(error) from error
    if not isinstance(run, RunConf):
        raise UsageError("the configuration does not start from the schema", where="conf/run.yaml")
    check(run)
    return run


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
                with initialize_config_dir(str(CONF), version_base="1.3"), bounded_files():
                    return to_run(compose("run", [*overrides, f"hydra.searchpath=[{places}]"]))
            finally:
                instance.hydra = before
                GlobalHydra.set_instance(instance)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _translated(error) from error


def pair_words(
    model: str | Path, draft: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> list[str]:
    """The overrides of a pair, or of a target without a draft, in full. Raises UsageError or ModelError."""
    names = zip(("model", "draft"), (model, "none" if draft is None else draft), strict=True)
    given = []
    for role, name in names:
        if not isinstance(name, str | Path):
            raise UsageError(
                f"{role} is no model",
                found=type(name).__name__,
                allowed=f"{NAMES_OF_A_MODEL}, as a text or a Path",
                fix="name one",
            )
        given.append(f"{role}={Path(name).absolute() if isinstance(name, Path) else name}")
    if not isinstance(overrides, Mapping):
        return in_full([*given, *listed("overrides", overrides)])
    return in_full([*given, *(f"{key}={_word(value)}" for key, value in overrides.items())])


def _word(value: Any) -> str:
    """Returns a plain value of Python as the command line has it."""
    if getattr(value, "shape", None) == ():  # one number of NumPy
        value = value.item()
    if isinstance(value, str | Path):
        return str(value)
    return json.dumps(value)  # true, null, [1,2], {"0":"20GiB"}


def _translated(error: Exception) -> UsageError:
    """Returns the error in one line."""
    if override := getattr(error, "override", ""):  # a word that is not in Hydra's grammar
        fix = 'write KEY=VALUE; quote a text in a list: KEY=["a b"]'
        return UsageError("an override cannot be read", where=shortened(override, 80), fix=fix)
    text = f"{error}\n{error.__cause__ or ''}"
    key = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "full_key:" in line), "")
    if match := NO_OPTION.search(text):
        return _no_option(match["group"], match["option"])
    if match := NO_KEY.search(text):
        given = NOT_THERE.search(text)  # has the whole key even if its group is unknown
        return unknown_key(given["key"] if given else key, match["schema"])
    if (match := SEVERAL.search(text)) and (known_before := gone(match["key"])):
        return known_before
    if (match := NO_CHOICE.search(text)) and (known_before := gone(f"{key}={match['value']}")):
        return known_before
    batch_hint = "; task=batch writes its answers to task.output=FILE" if key == "output" else ""
    lines = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    said = "; ".join(line for line in lines if not HYDRA_NOISE.match(line)) or type(error).__name__
    return UsageError(shortened(said, 400), where=key, fix=f"see --help for keys and values{batch_hint}")


def _no_option(group: str, option: str) -> UsageError:
    if known_before := gone(f"{group}={option}"):
        return known_before
    known = options(group) if group in GROUPS else []
    near = nearest(option, known)
    allowed = NAMES_OF_A_MODEL if group in ROLES else ", ".join(known)
    fix = f"did you mean {group}={near}?" if near else "see --help; a text is prompt='...'"
    return UsageError(f"there is no {group}={option}", allowed=allowed, fix=fix)
