"""What bench/gpu.py needs where pip finds no index: collected here, and installed there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ["hydra-core==1.3.8", "omegaconf==2.3.1", "bitsandbytes==0.50.2"]
WITHOUT_WHEEL = "antlr4-python3-runtime==4.9.3"
LIBRARY = re.compile(r"libbitsandbytes_(?!cpu|cuda130).*\.so")  # of other versions of CUDA: most of the wheel
BEFORE = ["llama_ssp", "bench", "conf", ":!llama_ssp/shipped/*/model.safetensors", ":!bench/results"]
PLATFORMS = ("manylinux_2_24_x86_64", "manylinux_2_17_x86_64")


def collect(place: Path, before: str) -> None:
    """Gets what has to be brought along into `place`/bring.

    `before` names an earlier commit whose code comes along, too.
    """
    pip = [sys.executable, "-m", "pip"]
    folder = place / "bring"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    how = ["--no-deps", "--python-version=3.12", "--implementation=cp", "-q", "-d", str(folder)]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    command = [*pip, "download", "--only-binary=:all:", *how, *platforms, *WHEELS]
    subprocess.run(command, check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "-q", "-w", str(folder), WITHOUT_WHEEL], check=True)
    (library,) = folder.glob("bitsandbytes*.whl")
    thin(library)
    if before:
        archive = f"--output={folder.resolve()}/before.tar.gz"
        subprocess.run(["git", "archive", archive, before, "--", *BEFORE], cwd=ROOT, check=True)
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size / 2**20:6.1f} MiB  {os.path.relpath(file, place)}")


def thin(wheel: Path) -> None:
    """Takes what this machine will not load out of a wheel: pip asks for no file that RECORD lists."""
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if not LIBRARY.fullmatch(Path(name).name):
                new.writestr(name, old.read(name))
    whole.unlink()


def unpack(place: Path) -> None:
    """Installs what was brought along to `place`, for this process and for those it starts."""
    site = place / "site"
    wheels = sorted(place.glob("bring/*.whl"))
    if wheels and not site.exists():
        how = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", f"--target={site}"]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *how, *map(str, wheels)])
    if site.exists():
        sys.path.insert(0, str(site))
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), given]))
