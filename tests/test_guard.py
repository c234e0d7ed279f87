"""The guard ends a process whose main thread hears no signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from llama_ssp import cli
from tests.conftest import Command
from tests.warm import ROOT

# The digest runs for minutes without a look at Python's signal handlers, as a collective does.
DEAF = """
import hashlib, sys
from llama_ssp.distributed.signals import GUARD, leave_within
GUARD.start({grace})
{before}
def digest():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
try:
    print("deaf", flush=True)
    digest()
except KeyboardInterrupt:  # it came before the digest began
    digest()
"""


def deaf(grace: float | None, before: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF.format(grace=grace, before=before)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "deaf\n"
    return process


PARTING = "own = GUARD.parting('nothing was begun'); own.__enter__()"


@pytest.mark.parametrize(
    ("grace", "before", "number", "code", "says"),
    [
        (0.1, "", signal.SIGTERM, 143, ""),
        (0.1, "", signal.SIGINT, 130, ""),
        (0.1, "GUARD.on_signal.append(lambda: 1 / 0)", signal.SIGTERM, 143, ""),
        (None, PARTING, signal.SIGINT, 130, "error: nothing was begun\n"),
        (None, "leave_within(0.1, 5, 'one\\nline'); leave_within(0.2, 6)", None, 5, "error: one line\n"),
        (None, "leave_within(0.1, 5).cancel(); leave_within(0.2, 6)", None, 6, ""),
    ],
    ids=["terminated", "interrupted", "what-fails-upon-it", "alone", "alarm", "alarm-taken-back"],
)
def test_a_process_that_hears_no_signal_ends(
    grace: float | None, before: str, number: int | None, code: int, says: str
):
    process = deaf(grace, before)
    if number is not None:
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (code, says)


def test_the_second_signal_acts_at_once():
    process = deaf(grace=None)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def finished(script: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", script]
    return subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=60)


# Signals itself where an exception is lost: in a destructor, a weak callback, an import that swallows it.
LOST = """
import os, signal, sys, time, weakref
from llama_ssp.distributed.signals import GUARD
class Key:
    def __hash__(self):
        if armed:
            strike()
        return 1
class Thing:
    pass
class Doomed:
    def __del__(self):
        strike()
def strike():
    os.kill(os.getpid(), {number})
    {then}
def swallow():
    try:
        strike()
    except BaseException:
        pass
armed = []
thing = Thing()
table = weakref.WeakValueDictionary({{Key(): thing}})
armed.append(True)
sys.path.insert(0, {folder!r})
GUARD.start(None)
try:
    {inside}
    time.sleep(30)
except KeyboardInterrupt as stop:
    print(stop.args[0])
GUARD.stop()
"""


@pytest.mark.parametrize(
    ("inside", "number"),
    [
        ("import swallowing", signal.SIGINT),
        ("del thing", signal.SIGTERM),
        ("del (things := [Doomed()])[0]", signal.SIGTERM),
        ("del (things := [Doomed()])[0]", signal.SIGINT),
    ],
    ids=["import", "callback", "destructor-term", "destructor-int"],
)
def test_a_signal_interrupts_later_where_it_would_be_lost(inside: str, number: int, tmp_path: Path):
    (tmp_path / "swallowing.py").write_text("from __main__ import swallow\nswallow()\n")
    then = "for _ in range(3): time.sleep(0.05)"
    done = finished(LOST.format(number=int(number), folder=str(tmp_path), inside=inside, then=then))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{int(number)}\n", "")


def test_a_second_signal_acts_also_while_the_first_one_waits():
    """The first one waits for the destructor's end, which the second one does not."""
    then = f"time.sleep(0.3); os.kill(os.getpid(), {int(signal.SIGTERM)}); time.sleep(30)"
    inside = "del (things := [Doomed()])[0]"
    done = finished(LOST.format(number=int(signal.SIGINT), folder="", inside=inside, then=then))
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


def test_ctrl_c_while_the_configuration_is_composed(command: Command, monkeypatch: pytest.MonkeyPatch):
    """Hydra and OmegaConf make other errors of what interrupts them."""
    load = ConfigLoaderImpl.load_configuration

    def struck(*args: Any, **more: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise AttributeError("there is no _invalidate_flags_cache") from None
        return load(*args, **more)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", struck)
    answer = command('task.prompts=["hello"]')
    assert answer.code == 130
    assert len(answer.errors) == 1 and "stopped by a signal" in answer.errors[0]


def test_ctrl_c_while_an_error_is_said_leaves_no_traceback(command: Command, monkeypatch: pytest.MonkeyPatch):
    say = cli.one_line

    def struck(text: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return say(text)

    monkeypatch.setattr(cli, "one_line", struck)
    answer = command("speculation.k=-1")
    assert answer.code == 2
    assert len(answer.errors) == 1 and "speculation.k is out of range" in answer.errors[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_rank_ends_with_its_launcher():
    """The launcher is a shell that is killed."""
    code = "from llama_ssp.distributed.signals import *; end_with_launcher(); print(flush=1); time.sleep(99)"
    launcher = subprocess.Popen(
        ["sh", "-c", f'"{sys.executable}" -c "{code}" & echo $!; wait'], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "TORCHELASTIC_RUN_ID": "1"},
    )  # fmt: skip
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.stdout.readline()
    launcher.kill()
    assert launcher.stdout.read() == ""  # its end is the rank's: nobody else holds it open
    launcher.wait()
    with pytest.raises(ProcessLookupError):
        while True:  # until it has been waited for by whoever inherited it
            os.kill(rank, 0)


SOFTENED = """
import os, signal, time
from llama_ssp.distributed.signals import GUARD
GUARD.start(None)
def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
heard, told = [], []
GUARD.on_soft.append(lambda: told.append("soft"))
def soft():
    heard.append("soft")
    return len(heard) <= {most}
with GUARD.softened(soft):
    with GUARD.softened(lambda: True):
        press()
    for _ in range({most}):
        press()
print(len(heard), len(told), GUARD.signalled, flush=True)
try:
    with GUARD.softened(soft):
        press()
        print("not reached")
except KeyboardInterrupt:
    print(len(heard), GUARD.signalled, flush=True)
    press()
    time.sleep(30)
"""


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_ctrl_c_may_be_for_a_call(most: int):
    """Then nothing ends, however often it comes; the call itself may let it end the process, as any other."""
    run = finished(SOFTENED.format(most=most))
    assert run.stdout.splitlines() == [f"{most} {most + 1} 0", f"{most + 1} 2"], run.stderr
    assert run.returncode == 130  # after the one that interrupts, the next one ends the process at once


LATE = """
import os, signal, sys, threading, time
from llama_ssp.distributed.signals import GUARD
GUARD.start({grace})
late = threading.Event()
GUARD.on_soft.append(lambda: late.wait(30))
pressed = []
def soft():
    pressed.append("soft")
    return len(pressed) < 3
def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
try:
    with GUARD.softened(soft):
        for _ in range(3):
            press()
        print("not reached")
except KeyboardInterrupt:
    late.set()
    while not GUARD._warned:
        time.sleep(0.01)
    time.sleep(0.2)
    print(len(pressed), GUARD.signalled, "in good order")
    sys.exit(3)
"""


@pytest.mark.parametrize("grace", [None, 30.0])
def test_a_ctrl_c_that_the_guard_hears_late_is_what_it_was(grace: float | None) -> None:
    """On a busy machine its thread may hear all at once, when the last one has ended the program."""
    run = finished(LATE.format(grace=grace))
    assert (run.stdout, run.returncode) == ("3 2 in good order\n", 3), run.stderr
