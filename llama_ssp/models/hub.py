"""Finds copies of Hugging Face hub repositories on this machine, and fetches them where the user allows it.

The copies are those of huggingface_hub: HF_HUB_CACHE/models--ORG--NAME/snapshots/COMMIT. In this file `role`
is "model" or "draft", as messages name the model. No torch.
"""

import errno
import logging
import re
import sys
from pathlib import Path
from typing import Any

from llama_ssp.config import ModelConf
from llama_ssp.config.environment import rank_environment
from llama_ssp.errors import ModelError, RunError, StorageError, first_line, visible

log = logging.getLogger(__name__)

# Patterns of the files that are fetched: no pickle, no code, and no second copy of the weights in another
# layout (in folders, or as consolidated*).
WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def hub_copy(model: ModelConf, role: str, download: bool, file: str | None = None) -> Path:
    """Returns the folder of the repository's copy, or the path of one `file`; may fetch it (`download`).

    A download that was interrupted continues with the files that are missing. Ranks of one machine share it:
    the library locks each file, and the leader alone shows progress. Raises ModelError or StorageError.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    if not rank_environment().is_leader:
        disable_progress_bars()
    logging.getLogger("huggingface_hub").handlers.clear()  # our log shows its lines, too
    settings: dict[str, Any] = {
        "revision": revision_of(model),
        "local_files_only": not download,
        "tqdm_class": _bars(),
    }
    wanted = WANTED
    if model.file:  # the end of a GGUF file's name, such as Q4_K_M; the file may be in several parts
        either_case = "".join(f"[{letter.lower()}{letter.upper()}]" for letter in model.file)
        wanted = [f"*{either_case}.gguf", f"*{either_case}-0*-of-*.gguf"]
    if download and model.licence:
        log.info("%s %s: %s, whose licence is %s", role, model.name, model.repo, model.licence)
    try:
        if file is not None:
            return Path(hf_hub_download(model.repo, file, **settings))
        return Path(
            snapshot_download(model.repo, allow_patterns=wanted, ignore_patterns=UNWANTED, **settings)
        )
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise _explained(error, model, role, download, file) from None


def _bars() -> type:
    """Returns the class of the library's progress bars, drawn on the terminal itself.

    Standard error shows what is written to it as text alone (report/terminal.py), and bars move the cursor.
    So they go to the stream behind it; the names of files in them, which others chose, are made visible text.
    """
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, desc: str | None = None, **settings: Any) -> None:
            settings.setdefault("file", getattr(sys.stderr, "rich_proxied_file", None))
            super().__init__(*args, desc=visible(desc) if desc else desc, **settings)

    return Bar


def revision_of(model: ModelConf) -> str | None:
    """Returns the commit, tag or branch to look for; None is the main branch.

    A preset names the commit that is fetched, so that its files do not change under the user. A copy that the
    user has, at whatever commit its main branch was then, is used as it is.
    """
    if model.revision is not None or model.commit is None:
        return model.revision

    from huggingface_hub import constants

    folder = f"models--{(model.repo or '').replace('/', '--')}"
    has_main = Path(constants.HF_HUB_CACHE, folder, "refs", "main").is_file()
    return None if has_main else model.commit


def cached_gguf(model: ModelConf) -> Path | None:
    """Returns the folder with the newest GGUF file among the copies of the repository; None without one.

    Nothing is fetched.
    """
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE, f"models--{(model.repo or '').replace('/', '--')}", "snapshots")
    files = sorted(place.glob(f"{model.revision or '*'}/*.gguf"), key=lambda file: file.lstat().st_mtime)
    return files[-1].parent if files else None


def file_of(folder: Path, model: ModelConf, role: str) -> Path:
    """Returns the repository's GGUF file that the model names by its end; of several parts the first.

    Raises ModelError if there is none.
    """
    # `Q4_K_M` names llama-Q4_K_M.gguf, and llama-Q4_K_M-00001-of-00003.gguf.
    ends = re.compile(rf"(.*[.-])?{re.escape(model.file)}(-0*1-of-\d+)?\.gguf", re.IGNORECASE)
    files = sorted(folder.glob("*.gguf"))
    for file in files:
        if ends.fullmatch(file.name):
            return file
    raise ModelError(
        f"{role} {model.name} is not at hand",
        where=f"hub repository {model.repo}",
        found=", ".join(file.name for file in files) or "no GGUF file",
        allowed=f"*{model.file}.gguf",
        fix="add download=true, or correct what follows the colon",
    )


def commit_of(path: Path) -> str | None:
    """Returns the commit of the hub repository that the folder is a copy of; None for any other folder."""
    return path.name if path.parent.name == "snapshots" else None


def cached_tokenizer(model: ModelConf) -> Path | None:
    """Returns the folder with a copy's tokenizer.json; None without one. Nothing is fetched."""
    from huggingface_hub import constants

    repo = model.repo or ""
    if not Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}").is_dir():
        return None  # without the import of the rest of the library, which is slow
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repo, "tokenizer.json", revision=revision_of(model))
    return Path(file).parent if isinstance(file, str) else None


def _explained(error: Exception, model: ModelConf, role: str, download: bool, file: str | None) -> RunError:
    """Returns the error that says why the repository is not at hand, and what helps."""
    from huggingface_hub import constants

    folder = f"give a folder: {role}=PATH"
    # The library wraps errors: the reason may be any of the chain, and the first cause is its end.
    causes: list[BaseException] = [error]
    while (before := causes[-1].__cause__ or causes[-1].__context__) and before not in causes:
        causes.append(before)

    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in CANNOT_WRITE:
            return StorageError(
                f"a download cannot be kept: {cause.strerror}",
                where=constants.HF_HUB_CACHE,
                fix="make room, or choose another place with HF_HUB_CACHE=FOLDER",
            )

    if not download:
        missing = f": {file}" if file else ""
        if model.n_layers:  # a preset has the shape that random weights need
            folder += f"; {role}.weights=synthetic tries the machine without weights"
        return ModelError(
            f"{role} {model.name}{missing} is not at hand",
            where=f"hub repository {model.repo}",
            found=f"no whole copy in {constants.HF_HUB_CACHE}",
            fix=f"add download=true, or {folder}",
        )

    reasons = {
        "GatedRepoError": ("it is gated", "ask for access on this page, and set HF_TOKEN"),
        "RevisionNotFoundError": ("there is no such revision", f"correct {role}.revision"),
        "RepositoryNotFoundError": (
            "there is no such repository, or it is private",
            "check the name; for a private one set HF_TOKEN",
        ),
        "OfflineModeIsEnabled": ("HF_HUB_OFFLINE is set", f"unset it, or {folder}"),
    }
    unknown = (
        "the hub refuses, or cannot be reached",
        f"check the network, its proxy and HF_ENDPOINT, or {folder}",
    )
    kinds = [type(cause).__name__ for cause in causes]
    reason, fix = next((reasons[kind] for kind in kinds if kind in reasons), unknown)
    return ModelError(
        f"{role} {model.name} cannot be fetched: {reason}",
        where=f"{constants.ENDPOINT}/{model.repo}",
        found=first_line(causes[-1]),
        fix=fix,
    )
