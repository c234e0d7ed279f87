"""task=chat as people type: Ctrl-C at each place, pastes, blocks, tabs, long lines."""

import os
import pty
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import load_pair
from llama_ssp.tasks.interactive import as_block, block_of, names_path
from llama_ssp.text.transcript import FILE, read_transcript
from tests.conftest import Command
from tests.test_conversation import FP32, SAID, folder, talk  # noqa: F401
from tests.test_terminal import CHAT, END, INTERRUPT, open_terminal, summary  # noqa: F401
from tests.warm import LAUNCH

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
SHORT = (*CHAT, "task.max_new_tokens=8", "task.context=1024")
LEAVES = "so does another Ctrl-C"


@pytest.mark.parametrize("chunk", [4, 512])
def test_a_stop_before_the_first_token_leaves_the_history(chunk: int, folder: Path) -> None:  # noqa: F811
    """In the prompt, between chunks of it, and in the first round; the next reply is that of one sitting."""
    words = [*FP32, "sampling=greedy"]
    with load_pair(folder, folder, max_tokens=400, overrides=words) as pair:
        alone, stopped = talk(pair), talk(pair)
        for one in (alone, stopped):
            one._engine.target.prefill_chunk = one._engine.drafter.runner.prefill_chunk = chunk
            "".join(one.reply(SAID[0]))
        history = list(stopped.history)
        shown = list[tuple[int, int]]()

        def stop(done: int, total: int) -> None:
            shown.append((done, total))
            if len(shown) == (3 if chunk == 4 else 1):
                stopped.stop()

        stopped.on_reading = stop
        assert "".join(stopped.reply(SAID[1] * 3)) == ""
        assert stopped.history == history and len(stopped.replies) == 1
        read = [done for done, _ in shown]
        assert read == ([0, 4, 8] if chunk == 4 else [0])  # and no further
        stopped.on_reading = alone.on_reading
        stopped.stop()  # heard after the first round, of which nothing was shown
        if chunk == 512:
            stopped._engine.target.before_chunk = None
            stopped._stop_reading = lambda _done, _total: None  # type: ignore[method-assign]
        assert "".join(stopped.reply(SAID[2])) == ""
        assert stopped.history == history and len(stopped.replies) == 1
        for one in (alone, stopped):
            "".join(one.reply(SAID[1]))
        assert stopped.history == alone.history


@pytest.mark.slow
def test_ctrl_c_at_each_place(open_terminal: Any, tmp_path: Path) -> None:  # noqa: F811
    """It drops half a line, and half a block; twice in a reply it stops that; on empty lines it leaves."""
    terminal = open_terminal("task.max_new_tokens=900", session=SHORT, columns=120)
    terminal.until("> ")
    for typed in ("half a message", '"""half a block\nand more', ""):
        terminal.type(typed)
        terminal.until(typed[-4:])
        terminal.type(INTERRUPT)
        terminal.until(LEAVES)
        terminal.until("> ")
        terminal.type("/help\n")  # so the next one is a first one again
        terminal.until("> ")
    terminal.type("hello\n")
    terminal.until("<")
    for _ in range(3):
        terminal.type(INTERRUPT)
        time.sleep(0.05)
    terminal.until("stopped by Ctrl-C]")
    terminal.until("> ")
    terminal.type("again\n")
    terminal.until("<")
    terminal.type(INTERRUPT)
    terminal.until("stopped by Ctrl-C]")
    time.sleep(2)  # those that come at once are still for the reply
    terminal.type(INTERRUPT)
    terminal.until(LEAVES)
    terminal.type(INTERRUPT)
    assert terminal.leave() == 130
    assert "Traceback" not in terminal.seen
    assert [message["content"] for message in summary(tmp_path)["messages"][::2]] == ["hello", "again"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_while_a_long_message_is_read(ranks: int, open_terminal: Any, tmp_path: Path) -> None:  # noqa: F811
    """A bar says how far it is; nothing of it stays, and the chat goes on."""
    words = ("task.context=60000", "model.context=60000", "draft.context=60000", f"ranks={ranks}")
    terminal = open_terminal(*words, "task.prefill_chunk=64", session=(*CHAT, "task.max_new_tokens=8"))
    terminal.until("> ")
    terminal.type(f"{PASTE}{'long ' * 8000}\n.{PASTED}\n")
    terminal.until(" of 40")
    terminal.type(INTERRUPT)
    terminal.until("stopped before the first token")
    terminal.until("> ")
    terminal.type("hello\n")
    terminal.until("context ")
    terminal.until("> ")
    terminal.type(END)
    assert terminal.leave() == 0
    assert [message["content"] for message in summary(tmp_path)["messages"][::2]] == ["hello"]


@pytest.mark.slow
def test_what_is_pasted_is_one_message(open_terminal: Any, tmp_path: Path) -> None:  # noqa: F811
    """With its tabs, its fences and its slash; a bare fence ends at a bare fence alone."""
    pasted = 'Traceback:\n\tFile "x"\n/reset\n"""doc."""\n    return 1'
    block = 'def f():\n\t"""Says it."""\n    return 1'
    terminal = open_terminal(session=SHORT, columns=120)
    typed = [
        (f"{PASTE}{pasted}{PASTED}\n", pasted),
        (f"{PASTE}/usr/lib\n/etc{PASTED}\n", "/usr/lib\n/etc"),
        (f'"""\n{block}\n"""\n', block),
        ('"""two\nlines"""\n', "two\nlines"),
        ("a\tb\n", "a\tb"),
        ("/usr/bin/python fails, why?\n", "/usr/bin/python fails, why?"),
    ]
    for text, _ in typed:
        terminal.until("> ")
        terminal.type(text)
        terminal.until("context ")
    terminal.until("> ")
    terminal.type('"""\nas in ollama"""\n')
    terminal.until("ends with a line that is")
    terminal.type('"""\n')
    typed.append(("", 'as in ollama"""'))
    terminal.until("context ")
    terminal.until("> ")
    terminal.type(END)
    assert terminal.leave() == 0
    (file,) = (tmp_path / "outputs").rglob(FILE)
    assert [message["content"] for message in read_transcript(file)[::2]] == [said for _, said in typed]


@pytest.mark.slow
def test_a_long_line_is_whole_where_the_output_goes_to_a_pipe(tmp_path: Path) -> None:
    """A terminal itself would cut it after 4,095 bytes."""
    master, slave = pty.openpty()
    words = [sys.executable, LAUNCH, *SHORT, "task.context=9000", "model.context=9000", "draft.context=9000"]
    with subprocess.Popen(
        words, cwd=tmp_path, stdin=slave, stdout=subprocess.PIPE, stderr=slave,
        env={**os.environ, "TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(slave)
        shown = bytearray()

        def watch() -> None:
            with suppress(OSError):
                while data := os.read(master, 65536):
                    shown.extend(data)

        threading.Thread(target=watch, daemon=True).start()
        until = time.monotonic() + 60
        while b"> " not in shown and time.monotonic() < until:
            time.sleep(0.05)
        text = "long " * 1200
        os.write(master, f"{PASTE}{text}{PASTED}\n".encode())
        os.write(master, END.encode())
        reply, _ = process.communicate(timeout=60)
        assert process.returncode == 0, shown[-2000:]
    os.close(master)
    assert reply and b"long" not in reply  # what is typed is no output
    (file,) = (tmp_path / "outputs").rglob(FILE)
    assert read_transcript(file)[0]["content"].strip() == text.strip()


def test_through_a_pipe_too(command: Command) -> None:
    """Blocks, a block that the end of the input ends, paths, long lines, tabs."""
    long = "x" * 700
    typed = f'"""\na """b"""\n"""\n{long}\ta\n/usr/bin is a folder\n/etc/hosts\n/tmp\n"""\nnot closed'
    small = ("task=chat", "seed=1", "task.max_new_tokens=2", "task.context=4000", "model.context=4000", *FP32)
    answer = command(*small, "draft.context=4000", stdin=typed.encode())
    said = [message["content"] for message in answer.document["messages"][::2]]
    assert said == ['a """b"""', f"{long}\ta", "/usr/bin is a folder", "/etc/hosts", "/tmp", "not closed"]


@pytest.mark.parametrize(
    ("line", "is_path"),
    [
        ("/usr/bin/python fails", True),
        ("/tmp is full", True),
        ("/no/such/thing", True),
        ("/reset", False),
        ("/rest", False),
        ("/", True),
        ("and /tmp", False),
        ("", False),
    ],
)
def test_paths_are_no_commands(line: str, is_path: bool) -> None:
    assert names_path(line, ("/reset",)) == is_path
    assert block_of(as_block(line)) == line
