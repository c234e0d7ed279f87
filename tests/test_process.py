"""The command as a process of its own: what it imports, how it ends, what its streams do to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llama_ssp import __version__
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

SPINS = (
    "import os; from llama_ssp import cli\ntry: cli.main()\nfinally: print(os.environ.get('GOMP_SPINCOUNT'))"
)


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_waiting_threads_spin_less_unless_the_user_has_said(given: dict[str, str], found: str) -> None:
    env = {name: value for name, value in environment().items() if not name.startswith(("GOMP", "OMP_WAIT"))}
    done = subprocess.run(
        [sys.executable, "-c", SPINS, "--version"], env=env | given, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == found, done.stderr


def environment(**more: str) -> dict[str, str]:
    ours = ("WORLD_SIZE", "RANK", "LLAMA_SSP_DEBUG", "PYTHONUNBUFFERED")
    kept = {k: v for k, v in os.environ.items() if k not in ours}
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
        ([PROMPT, "speculation.kk=1"], 2, "unknown key"),
        (["task=eval", "task.pairs=[tiny,8B]"], 2, "there is no model=8B"),
        (["task=eval", "task.pairs=[tiny/7B]", "task.plot=a.doc"], 2, "task.plot"),
        (["task.prompt_file=/no/such"], 3, "does not exist"),
        ([PROMPT, "model=/no/such", "draft=none"], 4, "no such folder or file"),
        (["task=plan", "model=65B", "draft=7B", "cluster=p4d", "out=null"], 0, "run it: "),
    ],
    ids=["help", "task-help", "cfg", "version", "range", "key", "pair", "plot", "prompts", "folder", "plan"],
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
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
@pytest.mark.parametrize("arguments", [LONG, ["--help"]], ids=["run", "help"])
def test_a_reader_that_went_away(arguments: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*RUN, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60,
        env=environment(), cwd=tmp_path,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 6
    assert len(errors(done.stderr)) == 1 and "closed by its reader" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [LONG, ["--help"]], ids=["run", "help"])
def test_a_full_disk(arguments: list[str], tmp_path: Path) -> None:
    """Row 47, with the device that is always full."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*RUN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            env=environment(), cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 6
    assert len(errors(done.stderr)) == 1 and "No space left" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_no_standard_output(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *RUN, PROMPT], stderr=subprocess.PIPE, text=True, timeout=60,
        env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 6
    assert len(errors(done.stderr)) == 1 and "standard output is closed" in done.stderr


def test_any_character_in_any_locale(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN, 'task.prompts=["日本"]', "task.max_new_tokens=1", "model=nöpe"], capture_output=True,
        timeout=60, env=environment(PYTHONIOENCODING="ascii"), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nöpe" in done.stderr.decode()


def test_the_traceback_is_there_when_asked_for(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN, PROMPT, "speculation.k=-1"], capture_output=True, text=True, timeout=60,
        env=environment(LLAMA_SSP_DEBUG="1"), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" in done.stderr and len(errors(done.stderr)) == 1


def test_another_rank_without_a_way_to_the_leader_says_its_cause(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN, PROMPT], capture_output=True, text=True, timeout=60,
        env=environment(WORLD_SIZE="2", RANK="1"), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 5 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: rank 1: several ranks were asked for, but not by torchrun")


@pytest.mark.parametrize("start", [[str(ROOT / "launch" / "run.py")], ["-m", "llama_ssp"]])
def test_ctrl_c_while_modules_load_leaves_no_traceback(start: list[str], tmp_path: Path) -> None:
    """A slow disk: the first library that is imported takes its time."""
    (tmp_path / "hydra.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, *start], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored behind a shell's &
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")


def test_ctrl_c_while_torch_loads_is_not_swallowed(tmp_path: Path) -> None:
    """A library that catches everything while it is imported, as several do."""
    lines = ("import time", "try:", " print('loading', flush=True)", " time.sleep(60)")
    (tmp_path / "torch.py").write_text("\n".join([*lines, "except BaseException:", " pass", ""]))
    process = subprocess.Popen(
        [*RUN, PROMPT], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors(err) == ["error: stopped by a signal before the run began"]
