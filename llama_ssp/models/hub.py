"""Copies of Hugging Face hub repositories on this machine, fetched where the user allows it. No torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from llama_ssp.config import ModelConf, home_expanded
from llama_ssp.config.environment import rank_environment
from llama_ssp.errors import ModelError, RunError, StorageError, first_line

# Of a repository: no pickle, no code, and no second copy of the weights in another layout.
WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]
UNAUTHORISED, TOO_MANY = 401, 429
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def hub_copy(model: ModelConf, role: str, download: bool, file: str | None = None) -> Path:
    """The repository's folder in the local store, or one file; fetched if `download` is true.

    A download that was interrupted continues with the files that are missing. Ranks of one machine share it:
    the library locks each file, and the leader alone shows progress. Raises ModelError or StorageError.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    if not rank_environment().is_leader:
        disable_progress_bars()
    how: dict[str, Any] = {"revision": model.revision, "local_files_only": not download}
    try:
        if file is not None:
            return Path(hf_hub_download(model.repo, file, **how))
        return Path(snapshot_download(model.repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, **how))
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise _explained(error, model, role, download, file) from None


def commit_of(path: Path) -> str | None:
    """The commit of the hub repository that the folder is a copy of; None for another folder."""
    return path.name if path.parent.name == "snapshots" else None


def cached_tokenizer(repo: str, revision: str | None) -> Path | None:
    """The folder of the local copy's tokenizer.json; None without one. Nothing is fetched."""
    if not (_cache() / f"models--{repo.replace('/', '--')}").is_dir():
        return None  # without the import of the library, which is slow
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "tokenizer.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _cache() -> Path:
    """The folder where the hub's library keeps what it has downloaded."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return home_expanded(own or f"{home}/hub")


def _explained(error: Exception, model: ModelConf, role: str, download: bool, file: str | None) -> RunError:
    """Why the repository is not at hand, and what helps: never what is set already."""
    from huggingface_hub import get_token

    where, instead = f"hub repository {model.repo}", f"give a folder: {role}=PATH"
    causes = _causes(error)
    full = next((one for one in causes if isinstance(one, OSError) and one.errno in CANNOT_WRITE), None)
    if full is not None:
        fix = "make room, or choose another place with HF_HUB_CACHE=FOLDER"
        return StorageError(f"a download cannot be kept: {full.strerror}", _cache(), fix=fix)
    if not download:
        what = f"{role} {model.name}{f': {file}' if file else ''} is not at hand"
        if model.n_layers:  # of a preset
            instead += f"; {role}.weights=synthetic tries the machine without weights"
        return ModelError(what, where, f"no whole copy in {_cache()}", fix=f"add download=true, or {instead}")
    what, found, fix = _reason(causes, str(model.repo), model.revision, role, get_token() is not None)
    return ModelError(f"{role} {model.name} cannot be fetched: {what}", where, found, fix=fix)


def _causes(error: BaseException) -> list[BaseException]:
    """The error, and those that it was raised from, the first one last."""
    found: list[BaseException] = []
    last: BaseException | None = error
    while last is not None and last not in found:
        found.append(last)
        last = last.__cause__ or last.__context__
    return found


def _reason(
    causes: list[BaseException], repo: str, revision: str | None, role: str, has_token: bool
) -> tuple[str, str | None, str]:
    """What is wrong, what was found, and what helps."""
    from huggingface_hub import constants, errors

    endpoint, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{repo}"
    log_in = "" if has_token else ", then set HF_TOKEN or run hf auth login"
    for cause in causes:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, errors.GatedRepoError):
            account = "the account of your token" if has_token else "your account"
            return "it is gated", None, f"ask for access with {account} on {page}{log_in}"
        if isinstance(cause, errors.RevisionNotFoundError):
            return "there is no such revision", str(revision), f"correct {role}.revision; {page} lists them"
        if isinstance(cause, errors.RepositoryNotFoundError) or status == UNAUTHORISED:
            what = "there is no such repository, or it is private"
            login = "use a token that may read it" if has_token else "set HF_TOKEN"
            return what, None, f"check the name; for a private one {login}"
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set", None, "unset it, or fetch the model elsewhere and give its folder"
        if isinstance(cause, errors.RemoteEntryNotFoundError):
            return "it lacks a file", first_line(cause), "check that it is a model of transformers"
        if status is not None:
            fix = f"try again later{log_in}" if status == TOO_MANY else "try again later"
            return "the hub refuses", f"status {status} of {endpoint}", fix
    for cause in causes:
        if _is_of_the_network(cause):
            fix = "check the network and its proxy; HF_ENDPOINT names a mirror; or give a folder: "
            if os.environ.get("HF_ENDPOINT"):
                fix = "check HF_ENDPOINT and the network; or give a folder: "
            return f"{endpoint} cannot be reached", first_line(cause), f"{fix}{role}=PATH"
    return "the hub's library gave up", first_line(causes[0]), "run it again: what is complete is kept"


def _is_of_the_network(cause: BaseException) -> bool:
    names = {kind.__name__ for kind in type(cause).__mro__}
    return bool(names & {"ConnectionError", "TimeoutException", "TransportError", "ProxyError", "gaierror"})
