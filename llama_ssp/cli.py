"""The command line: Hydra's overrides in, exit code out. Nothing here imports torch.

Overrides are checked before Hydra sees them, so that a slip gets one line with a suggestion, and so
that no override or private config folder can reach Hydra's own settings, which can run code.
"""

from __future__ import annotations

import difflib
import io
import logging
import os
import re
import secrets
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from llama_ssp import config
from llama_ssp.checkpoint import complete
from llama_ssp.config import GenerateConf, RunConf
from llama_ssp.errors import (
    INPUT_OUTPUT,
    USAGE,
    DistributedError,
    RunError,
    StorageError,
    UsageError,
    one_line,
    shortened,
)
from llama_ssp.inputs import Inputs
from llama_ssp.prompts import read_prompts

_packaged = Path(__file__).parent / "conf"  # in an installed wheel
CONF = _packaged if _packaged.is_dir() else Path(__file__).parents[1] / "conf"
GROUPS = ("model", "draft", "placement", "cluster", "sampling", "speculation", "task", "experiment")
REFUSED_FLAGS = {
    "--config-path": "it would replace the project's configuration",
    "-cp": "it would replace the project's configuration",
    "--config-name": "it would replace the project's configuration",
    "-cn": "it would replace the project's configuration",
    "--experimental-rerun": "it reads pickled files",
}
ADDED_TO = "sampling.logit_bias"
HYDRA_NOISE = ("object_type", "reference_type", "Set the env", "Config search path", "provider=")
UNSAFE_KEYS = re.compile(r"hydra|_target_|_partial_|_recursive_|\(\)|class")
PACKAGE_HEADER = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)
# Hydra's flags and the values each may have: () is none, None is any. Hydra itself would take the
# beginning of a flag for the flag, past what is refused above.
FLAGS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--version", "--resolve"), ()),
    **dict.fromkeys(("--run", "-r", "--multirun", "-m", "--shell-completion", "-sc"), ()),
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(("--config-dir", "-cd", "--package", "-p"), None),
    **dict.fromkeys(
        ("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    ),
}
WRONG_TYPE = re.compile(
    r"[Vv]alue '(?P<found>.*?)' .*(?:could not be converted to|is not a valid) (?P<wanted>\w+)",
    re.DOTALL,
)
NOT_IN_ENUM = re.compile(r"Invalid value '(?P<found>.*?)', expected one of \[(?P<wanted>.*?)\]", re.DOTALL)
NOT_A_LIST = re.compile(r"Invalid value assigned: (?P<found>\w+) is not a ListConfig")
NOT_OPTIONAL = re.compile(r"is not Optional|Incompatible value '?None'?")
NO_OPTION = re.compile(r"Could not find '(?P<group>[^'/]+)/(?P<option>[^']*)'")
TYPE_NAMES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def main() -> NoReturn:
    """Runs the command and leaves with its exit code."""
    logging.basicConfig(
        level=logging.INFO if _is_leader() else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    signal.signal(signal.SIGTERM, _terminate)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as exceptions
    code = _guarded()
    _forget_unwritable_output()
    sys.exit(code)


def _guarded() -> int:
    try:
        _prepare_output()
        code = max((run(cfg) for cfg in _compose()), default=0)
        sys.stdout.flush()
        return code
    except RunError as error:
        return _fail(str(error), error.code, error)
    except RecursionError as error:
        return _fail("the configuration is nested too deeply; fix: flatten it", USAGE, error)
    except BrokenPipeError as error:
        return _fail("standard output was closed by its reader", INPUT_OUTPUT, error)
    except OSError as error:
        return _fail(f"{error.strerror or error}; {error.filename or 'input or output'}", INPUT_OUTPUT, error)
    except KeyboardInterrupt as stop:
        number = signal.SIGTERM if stop.args == (signal.SIGTERM,) else signal.SIGINT
        return _fail("stopped by a signal; what was finished is in the run folder", 128 + number, stop)


def _compose() -> list[DictConfig]:
    """The merged config, one for each job of a sweep; none when Hydra only printed something."""
    check_arguments(sys.argv[1:])
    config.register()
    GlobalHydra.instance().clear()
    found: list[DictConfig] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
    def keep(cfg: DictConfig) -> None:
        found.append(cfg)

    try:
        with tempfile.TemporaryDirectory() as scratch:
            if {"--multirun", "-m"} & set(sys.argv):  # Hydra keeps a record of a sweep, the user none
                sys.argv.append(f"hydra.sweep.dir={scratch}")
            keep()
    except RecursionError:
        raise
    except OverrideParseException as error:
        raise UsageError(
            "an override cannot be read", where=error.override[:80],
            found=" ".join(str(error).split()).partition(" See ")[0],
            fix="quote overrides for the shell: 'task.prompts=[\"a prompt\"]'",
        ) from error  # fmt: skip
    except Exception as error:  # what Hydra cannot merge is a slip of the user's, whatever its class
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            raise
        raise _translated(error) from error
    return found


def run(cfg: DictConfig) -> int:
    """One run: everything that needs no model is checked, then torch enters."""
    try:
        checked = config.to_run(cfg)
    except OmegaConfBaseException as error:
        raise _translated(error) from error
    if _ranks() > 1:
        raise DistributedError(
            "this version runs in one process", where="torchrun", found=f"{_ranks()} ranks",
            allowed="1", fix="use --nproc-per-node 1",
        )  # fmt: skip
    checked.model, target_path = complete(checked.model, "model")
    draft_path = None
    if checked.draft is not None:
        checked.draft, draft_path = complete(checked.draft, "draft")
    config.check_context(checked)
    reading = read_prompts(_generate(checked))
    seed = checked.seed if checked.seed is not None else secrets.randbelow(2**31)
    if checked.seed is None:
        logging.getLogger(__name__).info("seed=%d (drawn; give it again to repeat this run)", seed)
    inputs = Inputs(checked, seed, target_path, draft_path, reading)
    from llama_ssp.tasks import execute

    return execute(inputs)


def check_arguments(arguments: list[str]) -> None:
    """Refuses what Hydra would take but we do not, and suggests what was meant."""
    known, dropped = config.known_keys(), "draft=none" in arguments
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            _check_flag(name, value if equals else None, waiting)
        elif equals or name.startswith("~"):
            _check_override(name, value if equals else None, known)
            if dropped and name.startswith("draft."):
                raise UsageError(f"{name} is set, but draft=none leaves no draft", fix="drop one of the two")


def _check_flag(flag: str, value: str | None, waiting: Iterator[str]) -> None:
    if flag in REFUSED_FLAGS:
        raise UsageError(f"{flag} is refused", fix=REFUSED_FLAGS[flag])
    if flag not in FLAGS:
        close = difflib.get_close_matches(flag, FLAGS, n=1)
        raise UsageError(f"unknown flag {flag}", fix=f"did you mean {close[0]}?" if close else "see --help")
    if flag in ("--multirun", "-m") and _ranks() > 1:
        raise UsageError(f"{flag} needs one process", fix="loop over torchrun in the shell")
    allowed = FLAGS[flag]
    if allowed == ():
        return
    value = next(waiting, "") if value is None else value
    optional = flag in ("--info", "-i")
    if (not value and not optional) or (value and allowed and value not in allowed):
        raise UsageError(
            f"{flag} needs a value", found=repr(value), allowed=", ".join(allowed or ("text",)),
            fix=f"write {flag} {(allowed or ('VALUE',))[0]}",
        )  # fmt: skip
    if flag in ("--config-dir", "-cd"):
        check_config_folder(Path(value))


def check_config_folder(folder: Path) -> None:
    """A private config folder may hold models and settings, nothing that Hydra would run."""
    if not folder.is_dir():
        raise UsageError("--config-dir is not a folder", found=str(folder), fix="check the path")
    if (folder / "run.yaml").exists():
        raise UsageError(
            "a private run.yaml is refused", where=str(folder), fix=REFUSED_FLAGS["--config-name"]
        )
    for file in _yaml_files(folder):
        unsafe = sorted({key for key in _keys(file) if _is_unsafe(key)})
        if unsafe or file.relative_to(folder).parts[0] == "hydra":
            raise UsageError(
                "a private config may not set what Hydra itself runs", where=str(file),
                found=", ".join(unsafe) or "a hydra/ group", allowed=", ".join(GROUPS), fix="remove it",
            )  # fmt: skip


def _yaml_files(folder: Path) -> Iterator[Path]:
    """Every yaml that Hydra could reach below the folder; links are refused, as they lead elsewhere."""
    for entry in sorted(folder.rglob("*")):
        linked = entry.is_symlink() and entry.is_dir()
        if linked or (entry.suffix == ".yaml" and not entry.is_file()):
            raise UsageError(
                "a private config folder may hold plain files only", where=str(entry),
                found="a link to a folder" if linked else "no regular file", fix="copy the files into it",
            )  # fmt: skip
        if entry.suffix == ".yaml":
            yield entry


def _is_unsafe(key: str) -> bool:
    """Whether a key, or the group or package it names, is Hydra's own."""
    names = [name.strip().lstrip("/") for name in re.split(r"[@:]", key)]
    return any(UNSAFE_KEYS.fullmatch(re.split(r"[./]", name)[0] or name) for name in names)


def _keys(file: Path) -> list[str]:
    """Every key, every entry of a defaults list, and the package that a header names."""
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("the file is not yaml", where=str(file), found=str(error)) from None
    keys = PACKAGE_HEADER.findall(text)
    if isinstance(content, dict) and isinstance(content.get("defaults"), list):
        keys += [item for item in content["defaults"] if isinstance(item, str)]
    stack, seen = [content], set[int]()
    while stack:
        node = stack.pop()
        if not isinstance(node, (dict, list)) or id(node) in seen:  # an alias may stand many times
            continue
        seen.add(id(node))
        keys += [str(key) for key in node] if isinstance(node, dict) else []
        stack += node.values() if isinstance(node, dict) else node
    return [key.removeprefix("override ") for key in keys]


def _check_override(key: str, value: str | None, known: list[str]) -> None:
    bare, _, package = key.lstrip("+~").partition("@")
    if _is_unsafe(bare) or package:
        raise UsageError(
            "Hydra's own settings are not for overriding",
            found=key,
            fix="use out=FOLDER for where results go",
        )
    if key.startswith("~"):
        raise UsageError(
            f"{key} is refused: a setting cannot be deleted",
            fix="write draft=none" if bare == "draft" else f"give {bare} another value",
        )
    if bare in GROUPS and value in ("", "null") and bare != "experiment":
        raise UsageError(
            f"{bare}={value} names no option", allowed=", ".join(_options(bare)),
            fix="write draft=none" if bare == "draft" else "choose one",
        )  # fmt: skip
    if bare.startswith(f"{ADDED_TO}.") or key == ADDED_TO:  # Hydra adds to maps, and takes keys for text
        raise UsageError(f"{key} cannot be set so", fix=f"write '+{ADDED_TO}={{5: -2.0}}', token: bias")
    if bare in known or bare in GROUPS:
        return
    leaf = bare.rpartition(".")[2]
    if leaf in config.LOSSY:
        raise UsageError(
            f"{bare} is refused: not lossless", found=config.LOSSY[leaf],
            fix="the output law here is exactly the target's; there is no option to change that",
        )  # fmt: skip
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(bare, [*known, *GROUPS], n=1, cutoff=0.6)
    meant = (same_leaf or close or [""])[0]
    raise UsageError(
        f"unknown key {bare}", fix=f"did you mean {meant}?" if meant else "see --help for the keys"
    )


def _generate(run: RunConf) -> GenerateConf:
    assert isinstance(run.task, GenerateConf)
    return run.task


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def _translated(error: Exception) -> UsageError:
    """Hydra's and OmegaConf's messages as one of our lines: the key, what was found, what may stand there."""
    text = f"{error}\n{error.__cause__ or ''}"
    key = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "full_key:" in line), "")
    if found := NO_OPTION.search(text):
        group, option = found["group"], found["option"]
        otherwise = f"or use {group}=local with {group}.path" if group in ("model", "draft") else "choose one"
        close = difflib.get_close_matches(option, _options(group), n=1)
        return UsageError(
            f"there is no {group}={option}", allowed=", ".join(_options(group)),
            fix=f"did you mean {group}={close[0]}?" if close else otherwise,
        ) if _options(group) else UsageError(f"there is no {group}={option}", fix="see --help")  # fmt: skip
    if found := WRONG_TYPE.search(text):
        allowed = TYPE_NAMES.get(found["wanted"], found["wanted"])
        return UsageError(f"{key} is of the wrong type", found=repr(found["found"]), allowed=allowed)
    if found := NOT_IN_ENUM.search(text):
        return UsageError(f"{key} has no such choice", found=repr(found["found"]), allowed=found["wanted"])
    if found := NOT_A_LIST.search(text):
        return UsageError(
            f"{key} is not a list", found=found["found"], allowed="a list", fix=f"write '{key}=[\"...\"]'"
        )
    if NOT_OPTIONAL.search(text):
        return UsageError(f"{key} may not be null", found="null", fix="give it a value, or leave it out")
    return UsageError(_plain(error), fix="see --help for keys and values")


def _plain(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if cause is not None:
        lines = [*lines[:1], *(line.strip() for line in str(cause).splitlines() if line.strip())]
    lines = [line for line in dict.fromkeys(lines) if not line.startswith(HYDRA_NOISE)]
    return shortened("; ".join(lines) or type(error).__name__, 400)


def _prepare_output() -> None:
    """Standard output must be there; texts may hold any character, whatever the locale."""
    if sys.stdout is None:
        raise StorageError("standard output is closed", fix="send it somewhere: > /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _forget_unwritable_output() -> None:
    """What cannot be written was reported; Python would complain once more, and exit with 120."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ranks() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise DistributedError(
            "WORLD_SIZE is not a number", where="environment", found=repr(text), fix="start with torchrun"
        )
    return int(text)


def _fail(message: str, code: int, error: BaseException) -> int:
    if os.environ.get("LLAMA_SSP_DEBUG") == "1":
        traceback.print_exception(error)
    if _is_leader() and sys.stderr is not None:
        print(f"error: {one_line(message)}", file=sys.stderr)
    return code


def _is_leader() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.SIGTERM)
