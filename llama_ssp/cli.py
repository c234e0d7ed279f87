"""The command line: Hydra's overrides in, exit code out. Nothing here imports torch.

Overrides are checked before Hydra sees them, so that a slip gets one line with a suggestion, and so
that no override or private config folder can reach Hydra's own settings, which can run code.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import secrets
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from llama_ssp import config
from llama_ssp.checkpoint import complete
from llama_ssp.config import GenerateConf, RunConf
from llama_ssp.errors import INPUT_OUTPUT, USAGE, DistributedError, RunError, UsageError, one_line
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
HYDRA_NOISE = ("object_type", "reference_type", "Set the env", "Config search path", "provider=")
UNSAFE_KEYS = re.compile(r"hydra|_target_|_partial_|_recursive_|\(\)|class")


def main() -> NoReturn:
    """Runs the command and leaves with its exit code."""
    logging.basicConfig(
        level=logging.INFO if _is_leader() else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    signal.signal(signal.SIGTERM, _terminate)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as exceptions
    sys.exit(_guarded())


def _guarded() -> int:
    try:
        return max((run(cfg) for cfg in _compose()), default=0)
    except RunError as error:
        return _fail(str(error), error.code, error)
    except OverrideParseException as error:
        fix = "quote overrides for the shell: 'task.prompts=[\"a prompt\"]'"
        return _fail(f"an override cannot be read; {error}; {fix}", USAGE, error)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        return _fail(_plain(error), USAGE, error)
    except RecursionError as error:
        return _fail("the configuration is nested too deeply", USAGE, error)
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail("standard output was closed by its reader", INPUT_OUTPUT, error)
    except KeyboardInterrupt as stop:
        number = signal.SIGTERM if stop.args == (signal.SIGTERM,) else signal.SIGINT
        return _fail("stopped by a signal; what was finished is in the run folder", 128 + number, stop)


def _compose() -> list[DictConfig]:
    """The merged config, one for each job of a sweep; none when Hydra only printed something."""
    check_arguments(sys.argv[1:])
    config.register()
    found: list[DictConfig] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
    def keep(cfg: DictConfig) -> None:
        found.append(cfg)

    keep()
    return found


def run(cfg: DictConfig) -> int:
    """One run: everything that needs no model is checked, then torch enters."""
    checked = config.to_run(cfg)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DistributedError(
            "this version runs in one process", where="torchrun", found=f"{os.environ['WORLD_SIZE']} ranks",
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
    known = config.known_keys()
    for position, argument in enumerate(arguments):
        flag = argument.split("=", 1)[0]
        if flag in REFUSED_FLAGS:
            raise UsageError(f"{flag} is refused", fix=REFUSED_FLAGS[flag])
        if flag in ("--config-dir", "-cd"):
            value = argument.partition("=")[2] or "".join(arguments[position + 1 : position + 2])
            check_config_folder(Path(value))
        if flag in ("--multirun", "-m") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(f"{flag} needs one process", fix="loop over torchrun in the shell")
        if argument.startswith("-") or "=" not in argument:
            continue
        _check_override(flag, known)


def check_config_folder(folder: Path) -> None:
    """A private config folder may hold models and settings, nothing that Hydra would run."""
    if not folder.is_dir():
        raise UsageError("--config-dir is not a folder", found=str(folder), fix="check the path")
    for file in sorted(folder.rglob("*.yaml")):
        unsafe = sorted({key for key in _keys(file) if UNSAFE_KEYS.fullmatch(key.split("/")[0])})
        if unsafe or file.relative_to(folder).parts[0] == "hydra":
            raise UsageError(
                "a private config may not set what Hydra itself runs", where=str(file),
                found=", ".join(unsafe) or "a hydra/ group", allowed=", ".join(GROUPS), fix="remove it",
            )  # fmt: skip


def _keys(file: Path) -> list[str]:
    try:
        stack, keys = [yaml.safe_load(file.read_text(encoding="utf-8"))], list[str]()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError("the file is not yaml", where=str(file), found=str(error)) from None
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            keys += [str(key).removeprefix("override ").lstrip("/") for key in node]
            stack += node.values()
        elif isinstance(node, list):
            keys += [
                item
                for item in node
                if isinstance(item, str) and item.startswith(("override hydra", "hydra/"))
            ]
            stack += [item for item in node if not isinstance(item, str)]
    return keys


def _check_override(key: str, known: list[str]) -> None:
    bare = key.lstrip("+~").split("@", 1)[0]
    if bare == "hydra" or bare.startswith(("hydra.", "hydra/")):
        raise UsageError(
            "Hydra's own settings are not for overriding",
            found=key,
            fix="use out=FOLDER for where results go",
        )
    if bare in known or bare in GROUPS or bare.startswith("sampling.logit_bias."):
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


def _plain(error: Exception) -> str:
    """Hydra's and OmegaConf's messages as one of our lines."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if cause is not None:
        lines = [*lines[:1], *(line.strip() for line in str(cause).splitlines() if line.strip())]
    return "; ".join(line for line in dict.fromkeys(lines) if not line.startswith(HYDRA_NOISE))


def _fail(message: str, code: int, error: BaseException) -> int:
    if os.environ.get("LLAMA_SSP_DEBUG") == "1":
        traceback.print_exception(error)
    if _is_leader():
        print(f"error: {one_line(message)}", file=sys.stderr)
    return code


def _is_leader() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.SIGTERM)
