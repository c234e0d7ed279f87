"""task=chat: a conversation is never lost: not with the terminal, not with a rank, not overnight."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_ssp.errors import DataError, StorageError, UsageError
from llama_ssp.text.transcript import FILE, Transcript, read_transcript, transcript_named
from tests.conftest import Command
from tests.processes import wait_for
from tests.test_terminal import CHAT, Terminal, open_terminal  # noqa: F401
from tests.warm import ROOT

FP32 = ("model.dtype=fp32", "draft.dtype=fp32")
GREEDY = (*CHAT, *FP32, "sampling=greedy", "task.context=300", "task.max_new_tokens=8")
SYSTEM = {"role": "system", "content": "be brief"}


def turns(count: int, about: str = "turn") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"{about} {n} \N{PARTY POPPER}"} for n in range(2 * count)]


def kept(folder: Path) -> list[dict[str, str]]:
    """The messages of the only conversation below this folder."""
    (file,) = (folder / "outputs").rglob(FILE)
    return read_transcript(file)


def test_a_line_says_how_a_conversation_goes_on(tmp_path: Path) -> None:
    """Turns that are added, taken back, or all replaced; what does not change is not written."""
    file = tmp_path / FILE
    transcript = Transcript(file)
    states = [turns(1), turns(2), turns(1), [SYSTEM, *turns(1)], [SYSTEM, *turns(1)], turns(3, "new"), []]
    for state in states:
        transcript.keep(state)
        assert read_transcript(file) == state
    starts = [json.loads(line)["from"] for line in file.read_text().splitlines()]
    assert starts == [0, 2, 2, 0, 0, 0]
    Transcript(None).keep(turns(1))  # and that is all


def test_a_torn_line_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever it is torn, in the middle of a letter, too; another line that is damaged is an error."""
    file = tmp_path / FILE
    transcript = Transcript(file)
    transcript.keep(turns(1))
    first = file.stat().st_size
    transcript.keep(turns(2))
    whole = file.read_bytes()
    for size in range(first, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert read_transcript(file) == turns(1), size
    assert "torn" in caplog.text
    file.write_bytes(whole[:-1])  # only the end of the line is missing
    assert read_transcript(file) == turns(2)
    file.write_bytes(whole[: first - 5] + whole[first:] + whole[:first])
    with pytest.raises(DataError, match=f"{FILE}:1"):
        read_transcript(file)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([1], "no conversation"),
        ({"messages": "hi"}, "no conversation"),
        ({"from": 1, "messages": []}, "does not follow"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "cannot be used"),
        ({"messages": [{"role": "user"}]}, "cannot be used"),
        ({"messages": [{"role": "user", "content": 1}]}, "cannot be used"),
    ],
)
def test_a_file_of_something_else_is_refused(record: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_text(json.dumps(record) + "\n" + json.dumps({"messages": []}) + "\n")
    with pytest.raises(DataError, match=said):
        read_transcript(file)


def test_a_full_disk_costs_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn that was not written comes with the next one, and no half line stays."""
    file = tmp_path / FILE
    transcript = Transcript(file)
    transcript.keep(turns(1))
    before = file.read_bytes()

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: bytes) -> int:
            return int(self._file.write(data[: len(data) // 2]))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    real = transcript._file
    monkeypatch.setattr(transcript, "_file", Full(real))
    with pytest.raises(StorageError, match="disk is full"):
        transcript.keep(turns(2))
    assert file.read_bytes() == before
    monkeypatch.setattr(transcript, "_file", real)
    transcript.keep(turns(3))
    assert read_transcript(file) == turns(3)


def test_conversations_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / "outputs" / "day" / name for name in ("a", "b", "own")]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        Transcript(folder / FILE).keep(turns(number + 1))
        os.utime(folder / FILE, (number, number))
    assert transcript_named("last", "outputs", folders[2]).samefile(folders[1] / FILE)
    assert transcript_named(str(folders[0]), None, None) == folders[0] / FILE
    assert transcript_named(str(folders[0] / FILE), None, None) == folders[0] / FILE
    (folders[0] / "summary.json").write_text(json.dumps({"messages": turns(4)}, indent=1))
    assert read_transcript(folders[0] / "summary.json") == turns(4)
    (folders[0] / FILE).unlink()
    assert transcript_named(str(folders[0]), None, None).name == "summary.json"
    for name, out in (("nothing", "outputs"), (str(tmp_path), None), ("last", None), ("last", "empty")):
        with pytest.raises(UsageError):
            transcript_named(name, out, None)


def test_a_conversation_is_resumed(command: Command) -> None:
    """From its folder, the newest, a summary; on another pair, too. The next reply is that of one sitting."""
    small = ("task=chat", "seed=3", "task.max_new_tokens=8", "task.context=300", *FP32)
    whole = command(*small, "out=null", stdin=b"hello\nagain\nand then?").document
    first = command(*small, stdin=b"/system be kind\n/system\nhello\nagain").document
    folder = first["run_folder"]
    assert read_transcript(Path(folder) / FILE) == whole["messages"][:4]
    for name in ("last", folder, f"{folder}/summary.json"):
        later = command(*small, f"resume={name}", stdin=b"and then?").document
        assert later["messages"] == whole["messages"], name
        assert read_transcript(Path(later["run_folder"]) / FILE) == whole["messages"]
    words = ("task=chat", "draft=none", "model=tiny_draft", "task.max_new_tokens=8")
    other = command(*words, f"resume={first['run_folder']}", stdin=b"so?")
    assert other.document["messages"][:4] == whole["messages"][:4]


@pytest.mark.parametrize(("name", "code"), [("nowhere", 2), ("last", 2), ("torn.json", 3)])
def test_what_cannot_be_resumed_is_a_line(name: str, code: int, command: Command) -> None:
    Path("torn.json").write_text('{"a": 1}')
    answer = command("task=chat", f"resume={name}", stdin=b"hello")
    assert answer.code == code and len(answer.errors) == 1


LONG = ("task.context=60000", "model.context=60000", "draft.context=60000", "task.prefill_chunk=512")


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fate", ["the connection drops", "a rank is killed"])
@pytest.mark.parametrize("place", ["idle", "in a reply"])
def test_what_was_said_goes_on_as_if_nothing_had_happened(
    place: str,
    fate: str,
    ranks: int,
    open_terminal: Any,  # noqa: F811
    tmp_path: Path,
    command: Command,
) -> None:
    """The next reply is that of a conversation that nobody disturbed. A reply that was cut is not part of it.

    Of two ranks the one is killed that waits for the other.
    """
    terminal = open_terminal(*LONG, f"ranks={ranks}", session=GREEDY, columns=120)
    terminal.until("kept in")
    terminal.until("> ")
    terminal.type("hello\n")
    terminal.until("context ")
    terminal.until("> ")
    if place == "in a reply":
        terminal.type("/set max_new_tokens 50000\n")
        terminal.until("max_new_tokens 50000")
        terminal.until("> ")
        terminal.type("tell me more\n")
        terminal.until("<")  # the reply has begun
    if fate == "the connection drops":
        terminal.hang_up()
        assert terminal.ended() in (0, 6, 129)  # by what comes first: no input, no output, or the signal
        assert list((tmp_path / "outputs").rglob("summary.json"))
    elif ranks == 1:
        psutil.Process(terminal.pid).kill()
        assert terminal.ended() == -signal.SIGKILL
    else:
        rank_named(terminal, 1 if place == "in a reply" else 0).kill()
        assert terminal.leave() in (5, 128 + signal.SIGKILL)
    said = kept(tmp_path)
    assert [message["content"] for message in said[::2]] == ["hello"] and len(said) == 2
    (file,) = (tmp_path / "outputs").rglob(FILE)
    resumed = command(*GREEDY, f"resume={file}", stdin=b"and then?")
    alone = command(*GREEDY, "out=null", stdin=b"hello\nand then?")
    assert (resumed.code, alone.code) == (0, 0), resumed.err
    assert resumed.document["messages"] == alone.document["messages"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_leaves_the_terminal_as_it_was(
    victim: int,
    open_terminal: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """It is killed while a line is typed, which takes the terminal's echo away."""
    terminal = open_terminal("ranks=2", session=GREEDY, columns=120)
    before = terminal.settings()
    terminal.until("> ")
    wait_for(lambda: terminal.settings() != before)
    rank_named(terminal, victim).kill()
    assert terminal.leave() in (5, 128 + signal.SIGKILL)
    assert terminal.settings() == before
    assert "waiting for a message" in terminal.seen


def rank_named(terminal: Terminal, rank: int) -> psutil.Process:
    for process in psutil.Process(terminal.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"no rank {rank}")


def test_a_hang_up_that_is_ignored_ends_nothing(tmp_path: Path) -> None:
    """As nohup starts a program; without it the same signal ends it in good order."""
    script = """
import os, signal, sys
from llama_ssp.distributed.signals import GUARD
GUARD.start(None)
try:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGHUP)
    print("goes on")
except KeyboardInterrupt as stop:
    print("ended by", stop.args[0])
    os.kill(os.getpid(), signal.SIGHUP)  # the second one of a terminal that is closed
    print("in good order")
"""
    for ignored, said in ((True, ["goes on"]), (False, [f"ended by {int(signal.SIGHUP)}", "in good order"])):
        first = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_{'IGN' if ignored else 'DFL'})\n"
        run = subprocess.run(
            [sys.executable, "-c", first + script], cwd=ROOT, text=True, capture_output=True, timeout=60
        )
        assert (run.stdout.split("\n")[:-1], run.returncode) == (said, 0), run.stderr
