"""The wheel holds what the program needs, and the README's commands run as they stand."""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from llama_ssp.models.kept_files import compiler
from tests import checkpoints
from tests.test_own import SCRIPTS
from tests.test_real import file_of
from tests.warm import LAUNCH, ROOT, python

pytestmark = pytest.mark.slow


# What only extras and developers need.
OPTIONAL = (
    "blobfile", "compressed_tensors", "deepspeed", "hypothesis", "lm_eval",
    "matplotlib", "pytest", "scipy", "sentencepiece", "tiktoken", "triton",
)  # fmt: skip
BLOCKED = """
import sys
from importlib.machinery import PathFinder
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else super().find_spec(name, path, target)
sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
from llama_ssp.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


def ran(command: list[str], folder: Path, **more: str) -> str:
    """Standard output of a command in a folder of its own, away from the tree."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_wheel_holds_the_configuration(built: Path) -> None:
    names = zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
    shipped = {f"llama_ssp/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    shipped |= {str(path.relative_to(ROOT)) for path in (ROOT / "llama_ssp/shipped").rglob("*.*")}
    assert shipped <= set(names)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "llama_ssp").rglob("*.py")} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "launch", "bench"))]


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree that the sdist holds."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        # Python 3.11.2, as Debian 12 has it, knows no filters; the archive is our own.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,) = folder.iterdir()
    return tree


def test_the_sdist_holds_the_tree(unpacked: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    ours = [name for name in tracked if not name.startswith(".") and (ROOT / name).exists()]
    assert [name for name in ours if not (unpacked / name).exists()] == []


def test_the_sdist_builds_the_same_wheel(built: Path, unpacked: Path) -> None:
    ran([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "again"], unpacked)
    wheels = (next(built.glob("*.whl")), next((unpacked / "again").glob("*.whl")))
    names = [sorted(zipfile.ZipFile(wheel).namelist()) for wheel in wheels]
    assert names[0] == names[1]


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which has what it depends on from this one."""
    folder = tmp_path_factory.mktemp("installed")
    place = folder / "venv"
    ran([sys.executable, "-m", "venv", "--without-pip", str(place)], folder)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install = [sys.executable, "-m", "pip", "--python", str(place / "bin/python"), "install", "--no-deps"]
    ran([*install, "--no-index", "--quiet", str(next(built.glob("*.whl")))], folder)
    return place


def test_the_installed_wheel_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    program = str(installed / "bin/llama-ssp")
    assert "fits" in ran([program, "task=plan", "model=65B", "draft=7B", "cluster=p4d"], tmp_path)
    asked = ['task.prompts=["def hello"]', "task.max_new_tokens=4", "seed=1", "output=json"]
    summary = json.loads(ran([program, *asked], tmp_path).splitlines()[-1])
    assert summary["outputs"][0]["output_tokens"] == 4 and summary["tokens_drafted"] > 0
    assert (tmp_path / summary["run_folder"] / "summary.json").is_file()
    where = [str(installed / "bin/python"), "-c", "import llama_ssp; print(llama_ssp.__file__)"]
    assert ran(where, tmp_path).startswith(str(installed))


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_the_installed_wheel_runs_the_scripts_of_own_parts(
    number: int, installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[number], encoding="utf-8")
    words = list[str]()
    if "sys.argv" in SCRIPTS[number]:
        words.append(str(checkpoints.save(tmp_path / "model", max_position_embeddings=512)))
    assert ran([str(installed / "bin/python"), "script.py", *words], tmp_path)


HEAVY = ("torch", "transformers", "accelerate", "bitsandbytes", "safetensors")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (HEAVY, "task=plan model=65B draft=7B cluster=p4d"),
        (("bitsandbytes",), "task.max_new_tokens=2 task.prompts=[a] seed=1"),
    ],
    ids=["plan without heavy libraries", "generate without bitsandbytes"],
)
def test_it_imports_no_more_than_it_needs(missing: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """A plan needs no torch; a run none of the extras."""
    program = BLOCKED.format(names=(*missing, *OPTIONAL))
    assert ran([sys.executable, "-c", program, *words.split()], tmp_path, PYTHONPATH=str(ROOT))


# The commands as they stand, on fewer prompts and texts; with a seed where one run in 1,000 is a false alarm.
SMALLER = {
    "eval": ["sizes=5"], "generate": ["max_new_tokens=16"], "compare": ["max_new_tokens=16"],
    "certify": ["samples=16", "law_tokens=64", "law_rounds=8", "greedy_tokens=8", "seed=1"],
    "measure": ["prompt=def hello"],
}  # fmt: skip


def readme_commands() -> list[str]:
    """Every command of the README that needs no files of the reader's, no network and no other ranks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line.split("  #")[0].strip() for line in text.splitlines()]
    commands = [line for line in lines if line.startswith("llama-ssp ")]
    others = r"/models/|download=true|(prompts|openings|on_slurm)\.jsonl"
    return [command for command in commands if not re.search(others, command)]


assert len(readme_commands()) >= 8


@pytest.mark.few(1)
@pytest.mark.parametrize("command", readme_commands())
def test_readme_command(command, tmp_path):
    words = shlex.split(command)[1:]
    words += [word for task, smaller in SMALLER.items() if task in words for word in smaller]
    done = python([LAUNCH, *words], tmp_path, stdin="def hello\n")
    assert done.code == 0 and done.out.strip(), done.err


@pytest.mark.long
@pytest.mark.parametrize("model", [pytest.param("real", marks=pytest.mark.real), "shipped"])
def test_make_demo_shows_all_three_parts(model: str, tmp_path: Path) -> None:
    """Without the package index it shows the pair that ships, and says so."""
    if model == "real":
        file_of("smollm2")
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(tmp_path)}
    env = {**os.environ, **(offline if model == "shipped" else {})}
    done = python([ROOT / "bench" / "demo.py", "new=24", "repeats=1", "samples=64"], tmp_path, env)
    assert done.code == 0, done.err[-800:]
    assert ("cannot be fetched" in done.out) == (model == "shipped") and "{" not in done.out
    assert re.search(r"--- [0-9.]+ times as fast: ", done.out)
    regular, speculative = re.findall(r"\n--- .*\n((?:.*\n)+?)\([0-9]+ tokens", done.out)
    assert regular == speculative
    assert ("NotImplemented" if model == "shipped" else "bananas, cherries") in regular
    greedy = re.findall("greedy: same, ([0-9]+) of transformers' ([0-9]+) tokens", done.out)
    assert len(greedy) == 2 and all(equal == length for equal, length in greedy)
    assert "sampled: same, 64 texts" in done.out and "every draft is kept: different" in done.out
    assert "times as fast as transformers with drafts" in done.out
    assert ("There is no C++ compiler" in done.out) == (compiler() is None)


def test_the_harness_that_is_not_installed_is_named() -> None:
    """One line, also for --help; and the module can be imported without it."""
    program = "import sys; sys.modules['lm_eval'] = None; from llama_ssp.tasks.harness import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 5 and done.stderr.count("\n") == 1 and not done.stdout
    assert done.stderr.startswith("error: lm_eval is not installed for this Python; ")
    assert '-e ".[lm-eval]"' in done.stderr
