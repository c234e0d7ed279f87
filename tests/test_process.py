"""The command as a process of its own: what it imports, how it ends, what its streams do to it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from llama_ssp import __version__
from tests.conftest import Command
from tests.processes import wait_for
from tests.warm import ROOT, start

RUN = [sys.executable, str(ROOT / "launch" / "run.py")]
PROMPT = 'task.prompts=["hello"]'
LONG = [PROMPT, "task.max_new_tokens=1000", "seed=1", "task.trace=true"]
# Runs the command, then says on standard error which heavy packages it has imported.
WATCHED = """
import sys
from llama_ssp import cli
try:
    cli.main()
except SystemExit as left:
    code = left.code
heavy = {"torch", "transformers", "accelerate", "huggingface_hub.hf_api"}  # its constants are light
if "--help" in sys.argv:
    heavy |= {"hydra", "numpy"}  # half of what the command imports; safetensors reads a header by numpy
heavy &= set(sys.modules)
print("heavy:", sorted(heavy), file=sys.stderr)
sys.exit(code)
"""
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
    ids=["unset", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"],
)
def test_waiting_threads_spin_less_unless_the_user_has_said(
    given: dict[str, str], expected: str | None, command: Command
) -> None:
    """Said in the environment, before torch is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP_WAIT"))}
    with patch.dict(os.environ, env | given, clear=True):
        command.line("--help")
        assert os.environ.get("GOMP_SPINCOUNT") == expected


def environment(**more: str) -> dict[str, str]:
    ours = ("WORLD_SIZE", "RANK", "LLAMA_SSP_DEBUG", "PYTHONUNBUFFERED")
    of_libraries = ("PYTORCH_", "TRANSFORMERS_")  # libraries set some when they are imported
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith(of_libraries)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error:")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "llama-ssp TASK"),
        (["measure", "--help"], 0, "repeats=6"),
        (["--cfg", "job"], 0, "speculation:"),
        (["--version"], 0, f"llama-ssp {__version__}"),
        ([PROMPT, "speculation.k=-1"], 2, "speculation.k is out of range"),
        (["task.prompt_file=/no/such"], 3, "does not exist"),
        ([PROMPT, "model=/no/such", "draft=none"], 4, "no such folder or file"),
        (["task=plan", "model=65B", "draft=7B", "cluster=p4d", "out=null"], 0, "run it: "),
    ],
    ids=["help", "task-help", "cfg", "version", "range", "prompts", "folder", "plan"],
)
def test_answers_without_torch(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments], capture_output=True, text=True, timeout=60,
        env=environment(), cwd=tmp_path, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr and not done.stdout.startswith("{") and '\n{"' not in done.stdout
    assert "heavy: []" in done.stderr
    assert len(errors(done.stderr)) == (1 if code else 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_signal_ends_the_run_with_its_code(number: int, code: int, tmp_path: Path) -> None:
    """Row 48: what was finished is in the run folder."""
    out, err = tmp_path / "out", tmp_path / "err"
    process = start([*RUN[1:], *LONG], tmp_path, [os.devnull, out, err], environment())
    wait_for(lambda: out.exists() and " at 0: " in out.read_text())
    os.kill(process.pid, number)
    process.join(60)
    said = err.read_text()
    assert process.exitcode == code
    assert len(errors(said)) == 1 and "stopped by a signal" in said
    assert "Traceback" not in said
    (summary,) = (tmp_path / "outputs").rglob("summary.json")
    content = json.loads(summary.read_text())
    assert content["status"] == "interrupted"
    assert content["outputs"][0]["output_tokens"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("taker", "arguments", "said"),
    [
        ("nobody", LONG, "closed by its reader"), ("nobody", ["--help"], "closed by its reader"),
        ("/dev/full", LONG, "No space left"), ("/dev/full", ["--help"], "No space left"),
    ],
    ids=["a reader that went away", "a reader that went away, help", "a full disk", "a full disk, help"],
)  # fmt: skip
def test_an_output_that_takes_nothing(taker: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    reading, writing = os.pipe() if taker == "nobody" else (os.open(taker, os.O_WRONLY) for _ in range(2))
    os.close(reading)
    done = subprocess.run(
        [*RUN, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60,
        env=environment(), cwd=tmp_path,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 6
    assert len(errors(done.stderr)) == 1 and said in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_no_standard_output(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *RUN, PROMPT], stderr=subprocess.PIPE, text=True, timeout=60,
        env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 6
    assert len(errors(done.stderr)) == 1 and "standard output is closed" in done.stderr


UNIMPORTABLE = "error: a library cannot be imported with these settings in the environment"


@pytest.mark.parametrize(
    ("variables", "words", "code", "said"),
    [
        ({"PYTHONIOENCODING": "ascii"}, ['task.prompts=["日本"]', "model=nöpe"], 2, "nöpe"),
        ({"LLAMA_SSP_DEBUG": "1"}, [PROMPT, "speculation.k=-1"], 2, "Traceback"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, [PROMPT], 5, "error: rank 1: several ranks were asked for, but"),
        ({"TORCH_LOGS": "bogus"}, [PROMPT], 2, f"{UNIMPORTABLE}; TORCH_LOGS; found ValueError: Invalid log"),
        ({"TORCH_LOGS": "bogus"}, [PROMPT, "ranks=2"], 2, f"{UNIMPORTABLE}; TORCH_LOGS; found ValueError:"),
        ({"TQDM_MININTERVAL": "x", "HF_TOKEN": "hush"}, [PROMPT], 2, f"{UNIMPORTABLE}; HF_TOKEN, TQDM_MINI"),
    ],
    ids=[
        "any-character-in-any-locale", "a-traceback-when-asked-for", "a-rank-without-a-way-to-the-leader",
        "a-setting-of-torch", "a-setting-of-torch-for-ranks", "a-setting-of-a-library-without-its-name",
    ],
)  # fmt: skip
def test_what_its_environment_makes_it_say(
    variables: dict[str, str], words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    env = environment(**variables)
    done = subprocess.run([*RUN, *words], capture_output=True, timeout=60, env=env, cwd=tmp_path)
    err = done.stderr.decode()
    if "ranks=2" in words:  # either rank may fail first; it says so, and ends the other
        err = err.replace("error: rank 1: ", "error: ")
    assert done.returncode == code and said in err and len(errors(err)) == 1
    assert ("Traceback" in err) == ("LLAMA_SSP_DEBUG" in variables)
    assert "hush" not in err


def test_the_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"rmdir '{gone}'; exec \"$@\""
    for words in ([PROMPT], ["plan", "65B", "cluster=p4d"]):
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", script, "sh", *RUN, *words],
            capture_output=True, text=True, timeout=60, env=environment(PYTHONPATH=str(ROOT)), cwd=gone,
        )  # fmt: skip
        assert done.returncode == 6, words
        said = "error: the current folder is gone; change to one that is there"
        assert [line for line in done.stderr.splitlines() if "error" in line] == [said], words


SLOW = "print('loading', flush=True); import time; time.sleep(60)"
SWALLOWS = f"try:\n    {SLOW}\nexcept BaseException:\n    pass\n"  # as several libraries do


@pytest.mark.parametrize(
    ("words", "library", "content", "code", "said"),
    [
        (RUN[1:], "hydra", SLOW, -signal.SIGINT, ""),
        (["-m", "llama_ssp"], "hydra", SLOW, -signal.SIGINT, ""),
        ([*RUN[1:], PROMPT], "torch", SWALLOWS, 130, "error: stopped by a signal before the run began\n"),
    ],
    ids=["run.py", "-m llama_ssp", "a swallowed signal"],
)
def test_ctrl_c_while_a_library_loads(
    words: list[str], library: str, content: str, code: int, said: str, tmp_path: Path
) -> None:
    """It leaves no traceback, and is not swallowed by a library that catches all while it is imported."""
    (tmp_path / f"{library}.py").write_text(content)
    process = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored behind a shell's &
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", said)
