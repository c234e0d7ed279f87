"""What bench/gpu.py needs where pip finds no index: collected into pieces, and joined and installed there."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("bench")
WHEELS = ["hydra-core==1.3.8", "omegaconf==2.3.1", "bitsandbytes==0.50.2", "gguf==0.19.0"]
WITHOUT_WHEEL = "antlr4-python3-runtime==4.9.3"
MODEL = "smollm2-135m-instruct-q4"  # a preset whose file is in a package
LIBRARY = re.compile(r"libbitsandbytes_(?!cpu|cuda130).*\.so")  # of other versions of CUDA: most of the wheel
BEFORE = ["llama_ssp", "bench", "conf", ":!llama_ssp/shipped/*/model.safetensors", ":!bench/results"]
PLATFORMS = ("manylinux_2_24_x86_64", "manylinux_2_17_x86_64")


def collect(place: Path, size: int, before: str) -> None:
    """Gets what has to be brought along, and cuts it into pieces of at most `size` bytes in `place`/bring.

    `before` names an earlier commit whose code comes along, too.
    """
    from llama_ssp.config.compose import composed  # needs Hydra, which is brought along
    from llama_ssp.models.packages import package_copy

    pip = [sys.executable, "-m", "pip"]
    shutil.rmtree(place / "bring", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        how = ["--no-deps", "--python-version=3.12", "--implementation=cp", "-q", "-d", folder]
        platforms = [f"--platform={name}" for name in PLATFORMS]
        command = [*pip, "download", "--only-binary=:all:", *how, *platforms, *WHEELS]
        subprocess.run(command, check=True)
        subprocess.run([*pip, "wheel", "--no-deps", "-q", "-w", folder, WITHOUT_WHEEL], check=True)
        model = composed([f"model={MODEL}", "draft=none"]).model
        shutil.copy(package_copy(model, "model", download=True), folder)
        (library,) = Path(folder).glob("bitsandbytes*.whl")
        thin(library)
        if before:
            archive = f"--output={folder}/before.tar.gz"
            subprocess.run(["git", "archive", archive, before, "--", *BEFORE], cwd=ROOT, check=True)
        files = sorted(Path(folder).iterdir(), key=lambda file: file.stat().st_size)
        pieces = cut(files, place / "bring", size)
        for path in [*files, *(file for piece in pieces for file in sorted(piece.iterdir()))]:
            print(f"{path.stat().st_size / 2**20:6.1f} MiB  {os.path.relpath(path, path.parents[1])}")


def thin(wheel: Path) -> None:
    """Takes what this machine will not load out of a wheel: pip asks for no file that RECORD lists."""
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if not LIBRARY.fullmatch(Path(name).name):
                new.writestr(name, old.read(name))
    whole.unlink()


def cut(files: list[Path], folder: Path, size: int) -> list[Path]:
    """Writes the files into folders 1, 2, ... of at most so many bytes each; returns these folders."""
    pieces, room = list[Path](), 0
    for file in files:
        content, at, number = file.read_bytes(), 0, 0
        while at < len(content):
            if room == 0:
                pieces.append(folder / str(len(pieces) + 1))
                pieces[-1].mkdir(parents=True)
                room = size
            name = f"{file.name}.{len(content)}.{number:02}"  # the whole size, and which part this is
            (pieces[-1] / name).write_bytes(content[at : at + room])
            taken = min(room, len(content) - at)
            at, room, number = at + taken, room - taken, number + 1
    return pieces


def join(folder: Path, into: Path) -> list[str]:
    """Joins pieces to files; returns a line for each file of which a piece is missing."""
    parts: dict[str, list[Path]] = {}
    for piece in sorted(folder.glob("*/*.*.*"), key=lambda path: path.name):
        parts.setdefault(piece.name.rpartition(".")[0], []).append(piece)
    lacks = []
    into.mkdir(parents=True, exist_ok=True)
    for named, pieces in parts.items():
        name, _, size = named.rpartition(".")
        if sum(piece.stat().st_size for piece in pieces) != int(size):
            lacks.append(f"{name}: a piece is missing")
        elif not (into / name).exists():
            with (into / f"{name}.part").open("wb") as file:
                for piece in pieces:
                    file.write(piece.read_bytes())
            (into / f"{name}.part").replace(into / name)
    return lacks


def unpack(place: Path) -> None:
    """Joins and installs what was brought along to `place`, for this process and for those it starts."""
    site = place / "site"
    for line in join(place / "bring", place / "brought"):
        log.warning("%s", line)
    wheels = sorted(place.glob("brought/*.whl"))
    if wheels and not site.exists():
        how = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", f"--target={site}"]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *how, *map(str, wheels)])
    if site.exists():
        sys.path.insert(0, str(site))
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), given]))
