"""machine-install.sh with a Python and a pip that only say what they were asked; and what the locks name."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions, requires
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.warm import ROOT

CUDA_LOCK = "requirements-cuda.lock"
LOCKS = ("requirements-build.lock", "requirements.lock", CUDA_LOCK, "requirements-dev.lock")
FILES = (*LOCKS, "machine-install.sh", "pyproject.toml")
OF_TORCH = re.compile(r"torch|triton.*|cuda-.*|nvidia-.*")  # other builds bring others than the locks name
# Of its metadata: the public index's build, and those for the processor and for another version of CUDA.
CUDA_13 = (
    'cuda-toolkit[cublas,nvtx]==13.0.3; platform_system == "Linux"',
    'cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"',
    'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
)
CPU = ("filelock", "typing-extensions>=4.10.0")
CUDA_12 = (
    'nvidia-cudnn-cu12==9.10.2.21; platform_system == "Linux"',
    'triton==3.7.1; platform_system == "Linux"',
)

# A Python that makes environments of itself. Its pip writes down what it was asked, and which torch it has.
# What it reads from its input, a real one runs.
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pip" ;;
    *" config list") printf '%s\\n' "$PIP_SAYS" ;;
    *" index versions "*) exit "$INDEX_FAILS" ;;
    *" install "*)
        echo "${*#-m pip --disable-pip-version-check install }" >>"$ASKED"
        case "$*" in *"$PIP_FAILS"*) echo "ERROR: No matching distribution" >&2; exit 1 ;; esac
        case "$*" in *torch==*) echo "${*##*==}" >"$ASKED.torch" ;; esac ;;
    "- "*) PYTHONPATH="$SITE" exec "$REAL_PYTHON" "$@" ;;
    *metadata*) cat "$ASKED.torch" 2>/dev/null ;;
    "-c import torch"*) echo "torch is here" ;;
esac
"""
UNAME = """#!/bin/sh
case "$1" in -s) echo "$SYSTEM" ;; *) echo "$SYSTEM x86_64" ;; esac
"""
PLAIN = {
    "PIP_SAYS": ":env:.extra-index-url='https://more'",
    "INDEX_FAILS": "0",
    "PIP_FAILS": "nothing",
    "SYSTEM": "Linux",
}
HASHED = "-q --require-hashes --no-deps --no-build-isolation -r {}"
CHECK = "is this machine fit? one screen says it, and what to do: .venv/bin/llama-ssp calibrate"
OTHERS = ("PIP_", "PYTHON", "TORCHINDUCTOR", "XDG_")  # what would speak for this machine
has_gpu = pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="a GPU chooses another build")


@dataclass(frozen=True)
class Run:
    code: int
    lines: list[str]  # that it said
    asked: list[str]  # of pip

    @property
    def torch(self) -> str:
        """Returns how torch was asked for, first alone, then with what it brings: from the same index."""
        alone, whole = (line for line in self.asked if "torch==" in line)
        assert alone.replace("--no-deps ", "") == whole != alone
        return whole


Install = Callable[..., Run]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def install(clone: Path, tmp_path: Path) -> Install:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("python3", PYTHON), ("uname", UNAME)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(*flags: str, brings: tuple[str, ...] = CPU, **settings: str) -> Run:
        """Runs the installer; `brings` is what torch's metadata asks for."""
        asked = tmp_path / "asked"
        asked.write_text("")
        facts = tmp_path / "site" / "torch-9.dist-info" / "METADATA"
        facts.parent.mkdir(parents=True, exist_ok=True)
        facts.write_text("\n".join(["Name: torch", *(f"Requires-Dist: {text}" for text in brings), ""]))
        env = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
        env |= PLAIN | {"PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(asked)} | settings
        env |= {"SITE": str(facts.parents[1]), "REAL_PYTHON": sys.executable}
        done = subprocess.run(
            ["bash", str(clone / "machine-install.sh"), *flags],
            capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Run(done.returncode, done.stderr.splitlines(), asked.read_text().splitlines())

    return run


@has_gpu
def test_locks_are_installed_with_their_hashes_and_nothing_else(install: Install) -> None:
    version = re.search(r"^TORCH=(.+)", (ROOT / "machine-install.sh").read_text(), re.MULTILINE)
    assert version is not None
    done = install("--dev")
    assert done.code == 0
    build, run, _, _, package, dev = done.asked
    for line, lock in zip((build, run, dev), ("-build", "", "-dev"), strict=True):
        assert line == HASHED.format(f"requirements{lock}.lock")
    assert done.torch == f"-q --index-url https://download.pytorch.org/whl/cpu torch=={version[1]}"
    assert package.endswith("--no-deps --no-build-isolation -e .")
    assert done.lines[-2:] == ["torch is here", CHECK]


@pytest.mark.parametrize(
    ("brings", "locked"),
    [(CUDA_13, True), (CPU, False), ((), False), (CUDA_12, False), ((*CUDA_13, *CUDA_12), False)],
    ids=["CUDA 13.0", "CPU", "nothing", "CUDA 12", "one more"],
)
@pytest.mark.parametrize("flag", ["--cuda", "--cpu"])
def test_cuda_s_libraries_are_the_lock_s_if_torch_asks_for_them(
    flag: str, brings: tuple[str, ...], locked: bool, install: Install
) -> None:
    """By torch's metadata, wherever it comes from; between torch itself and whatever else it brings."""
    done = install(flag, brings=brings)
    assert done.code == 0
    torch = [number for number, line in enumerate(done.asked) if "torch==" in line]
    assert done.asked[torch[0] + 1 : torch[1]] == [HASHED.format(CUDA_LOCK)] * locked


def test_a_run_that_was_stopped_after_torch_goes_on_with_its_libraries(install: Install) -> None:
    """From the public index, which has those of each build."""
    assert install("--cuda", brings=CUDA_13, PIP_FAILS=CUDA_LOCK).code == 5
    done = install(brings=CUDA_13, INDEX_FAILS="1")
    _, _, libraries, rest, package = done.asked
    assert libraries == HASHED.format(CUDA_LOCK) and package.endswith("-e .")
    assert re.fullmatch(r"-q torch==[0-9.]+", rest)
    assert not any("index" in line for line in done.lines)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, ""), (1, ""), (8, " ranks=8")])
def test_it_ends_by_naming_the_check_of_the_machine(
    gpus: int, ranks: str, install: Install, tmp_path: Path
) -> None:
    """Over all GPUs, with nothing installed anew, too."""
    smi = tmp_path / "programs" / "nvidia-smi"
    listed = "".join(f"echo 'GPU {number}: NVIDIA H200 (UUID: GPU-{number})'\n" for number in range(gpus))
    smi.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 0\n{listed}')
    smi.chmod(0o755)
    for done in (install("--cpu"), install("--cpu")):
        assert done.code == 0 and done.lines[-1] == CHECK + ranks


@has_gpu
def test_a_second_run_installs_nothing_until_a_lock_changes(install: Install, clone: Path) -> None:
    install("--dev")
    assert install("--dev").asked == []
    with (clone / "requirements-dev.lock").open("a") as lock:
        lock.write("# a change\n")
    assert [line.rpartition(" ")[2] for line in install("--dev").asked] == ["requirements-dev.lock"]


@has_gpu
def test_before_torch_it_says_what_it_takes_on_disk_and_how_much_is_free(install: Install) -> None:
    said = "\n".join(install().lines)
    assert re.search(
        r"installing torch [0-9.]+ from \S+/cpu: \.venv takes 2\.4 GB on disk; [0-9.]+ GB are free", said
    )


@has_gpu
def test_where_torch_s_index_does_not_answer_it_says_what_comes_instead(install: Install) -> None:
    done = install(INDEX_FAILS="1")
    assert re.fullmatch(r"-q torch==[0-9.]+", done.torch)
    said = "\n".join(done.lines)
    assert "whl/cpu does not answer: torch comes from pip's index" in said
    assert "the public index has CUDA's build (5.1 GB); --cpu insists on the CPU's (2.4 GB)" in said
    assert re.search(r"\.venv takes 5\.1 GB on disk; [0-9.]+ GB are free", said)


@has_gpu
@pytest.mark.parametrize(
    "setting", [":env:.index-url='https://me:word@mirror/simple'", "global.no-index='true'"]
)
def test_a_mirror_in_pip_s_settings_has_torch_too(setting: str, install: Install) -> None:
    done = install(PIP_SAYS=setting)
    assert "--index-url" not in done.torch
    assert "torch comes from the index of pip's settings" in done.lines
    assert "word" not in "".join(done.lines), "an address may have a password"


@pytest.mark.parametrize(
    ("flag", "folder"),
    [
        ("--cpu", "cpu"),
        ("--cuda", "cu130"),
        ("--cuda=cu126", "cu126"),
        ("--rocm", "rocm7.1"),
        ("--rocm=6.4", "rocm6.4"),
    ],
)
def test_a_build_that_is_asked_for_comes_from_torch_s_index(flag: str, folder: str, install: Install) -> None:
    done = install(flag, PIP_SAYS="global.index-url='https://mirror/simple'", INDEX_FAILS="1")
    assert f"--index-url https://download.pytorch.org/whl/{folder} torch==" in done.torch


@pytest.mark.parametrize(
    "at",
    ["requirements-build.lock", "requirements.lock", "--no-deps torch==", CUDA_LOCK, "-q torch==", "-e ."],
)
def test_where_pip_fails_it_ends_with_one_line_that_says_what_to_check(at: str, install: Install) -> None:
    done = install(brings=CUDA_13, INDEX_FAILS="1", PIP_FAILS=at)
    assert done.code == 5
    assert done.lines[-2:-1] == ["ERROR: No matching distribution"]
    assert done.lines[-1].startswith("error: pip could not install ")
    for word in ("network", "disk", "PIP_INDEX_URL", "HTTPS_PROXY", "pip.conf"):
        assert word in done.lines[-1]
    assert install(brings=CUDA_13).code == 0, "it goes on from there"


def test_a_python_that_does_not_start_is_said(install: Install) -> None:
    done = install(PYTHON="no-such-python")
    assert (done.code, done.asked) == (5, []) and done.lines[0].startswith("error: no no-such-python; ")
    done = install(PYTHON="/bin/false")
    assert (done.code, done.asked) == (5, [])
    assert done.lines == ["error: /bin/false does not start; name one that does: PYTHON=/usr/bin/python3.12"]


def test_a_clone_that_cannot_be_written_is_refused_in_one_line(install: Install, clone: Path) -> None:
    (clone / ".venv").symlink_to("/proc/nowhere")  # root may write in a folder without rights
    done = install()
    assert (done.code, len(done.lines), done.asked) == (5, 1, [])
    assert done.lines[0].startswith(f"error: {clone} cannot be written")


def test_another_system_is_refused_in_one_line(install: Install) -> None:
    done = install(SYSTEM="MINGW64_NT-10.0")
    assert (done.code, len(done.lines), done.asked) == (5, 1, [])
    assert "use Linux, or on Windows WSL2" in done.lines[0]


def test_macos_is_said_to_be_untested(install: Install) -> None:
    done = install(SYSTEM="Darwin")
    assert done.code == 0 and "not tested" in done.lines[0] and "--index-url" not in done.torch


# Arrays, though 3.2 has them; names of names, letters' case, both outputs at once, cases that go on, times.
NEWER = (
    r"\[[@*]\]", r"^\s*(local )?\w+\+?=\(", r"(declare|local) -[Aan]", r"mapfile|readarray|coproc",
    r"\$\{\w+[\^,@]", r"\|&|&>>", r";;?&", r"%\(",
)  # fmt: skip


@pytest.mark.parametrize("script", ["machine-install.sh", "lock.sh"])
def test_the_scripts_use_nothing_that_bash_3_2_lacks(script: str) -> None:
    """macOS has 3.2, where an empty array is an error under set -u."""
    text = (ROOT / script).read_text(encoding="utf-8")
    for newer in NEWER:
        assert not re.search(newer, text, re.MULTILINE), newer
    assert subprocess.run(["bash", "-n", str(ROOT / script)]).returncode == 0


@dataclass(frozen=True)
class Locked:
    requirement: Requirement  # its version and where it is needed
    hashes: list[str]


def locked(file: str) -> dict[str, Locked]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    result = {}
    for item in re.split(r"\n(?!\s)", text):
        first, *hashes = [part.strip() for part in item.split("\\\n")]
        requirement = Requirement(first)
        result[requirement.name] = Locked(requirement, hashes)
    return result


ALL = {name: item for file in LOCKS for name, item in locked(file).items()}


def test_every_package_of_a_lock_has_one_version_and_hashes() -> None:
    for name, item in ALL.items():
        assert re.fullmatch(r"==[^,*]+", str(item.requirement.specifier)), name
        assert item.hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in item.hashes), name

    build, run, cuda, dev = (locked(file) for file in LOCKS)
    assert all(build[name] == run[name] for name in build.keys() & run.keys())
    assert not (cuda.keys() | dev.keys()) & (build.keys() | run.keys())
    assert cuda.keys() & dev.keys() == {"triton"}, "builds for the processor do not bring it"
    assert cuda["triton"].requirement.specifier == dev["triton"].requirement.specifier
    assert all(OF_TORCH.fullmatch(name) for name in cuda) and "torch" not in cuda


def test_the_locks_name_no_index_and_no_path() -> None:
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in LOCKS)
    assert not re.search(r"https?:|file:|--(extra-)?index|--find-links|/(home|root|tmp|opt|work)/", text)


def test_the_locks_have_what_pyproject_asks_for() -> None:
    """With its markers; an environment of another Python or system takes no more than this."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["plots"], *extras["dev"]]:
        asked = Requirement(text)
        name = canonicalize_name(asked.name)
        if name == "torch":
            continue
        (version,) = ALL[name].requirement.specifier
        assert asked.specifier.contains(version.version), f"{text}: ./lock.sh --keep"
        marker = ALL[name].requirement.marker
        for system, platform in (("Linux", "linux"), ("Darwin", "darwin")):
            where = {"platform_system": system, "sys_platform": platform}
            is_asked = asked.marker is None or asked.marker.evaluate(where)
            assert (marker is None or marker.evaluate(where)) == is_asked, f"{name} on {system}"


def version_of(name: str) -> str:
    return str(ALL[name].requirement.specifier).removeprefix("==")


def is_of_another_build(name: str) -> bool:
    """Whether it is torch, or comes with a build of torch whose libraries no lock has."""
    has_locked_libraries = installed_version("torch").partition("+")[2] in ("", "cpu", "cu130")
    return name == "torch" or (OF_TORCH.fullmatch(name) is not None and not has_locked_libraries)


def here() -> dict[str, str]:
    """What is installed and must be what the locks name, without this package: name and version."""
    # Not what setuptools brings for itself, which it adds to sys.path once it is imported.
    places = list({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    found = distributions(path=places)
    versions = {canonicalize_name(each.metadata["Name"]): each.version for each in found}
    names = [name for name in versions if name != "llama-ssp" and not is_of_another_build(name)]
    return {name: versions[name] for name in names}


def needed(name: str) -> set[str]:
    """The packages that a package asks for, in this environment."""
    asked = [Requirement(text) for text in requires(name) or []]
    used = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {canonicalize_name(each.name) for each in used}


@pytest.mark.skipif(
    not Path(sys.prefix, ".installed-dev").exists(), reason="not what machine-install.sh --dev made"
)
def test_what_is_installed_is_what_the_locks_name() -> None:
    locked_versions = {name: version_of(name) for name in here() if name in ALL}
    assert here() == locked_versions, "run ./machine-install.sh --dev; or something was installed by hand"


def test_what_a_package_of_the_locks_needs_is_in_the_locks() -> None:
    """pip looks for nothing else. Other versions, which an environment of another kind has, may need more."""
    missing = {
        f"{name} needs {other}"
        for name, version in here().items()
        if name in ALL and version == version_of(name)
        for other in needed(name)
        if other not in ALL and not is_of_another_build(other)
    }
    assert missing == set()
