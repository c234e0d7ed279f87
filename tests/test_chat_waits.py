"""task=chat over ranks: they wait for a person without a limit, and only a rank that is lost ends that."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.test_kept_conversation import kept, rank_named
from tests.test_terminal import CHAT, END, open_terminal  # noqa: F401

STOP_OUTPUT, GO_ON = "\x13", "\x11"
SUSPEND = "\x1a"
PATIENCE_S = 5
LONGER_S = 3 * PATIENCE_S


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["idle", "Ctrl-Z", "Ctrl-Z in a reply", "Ctrl-S in a reply"])
def test_ranks_wait_for_a_person(how: str, open_terminal: Any, tmp_path: Path) -> None:  # noqa: F811
    """For three times as long as they wait for a rank that does not answer."""
    words = (f"placement.timeout_s={PATIENCE_S}", "ranks=2", "task.max_new_tokens=900", "task.context=1024")
    terminal = open_terminal(*words, session=CHAT, columns=120)
    terminal.until("> ")
    if "reply" in how:
        terminal.type("hello\n")
        terminal.until("<")
    else:
        terminal.type("/stats\n")
        terminal.until("replies: 0")
        terminal.until("> ")
    if "Z" in how:
        terminal.type(SUSPEND)
        stopped = [psutil.Process(terminal.pid), rank_named(terminal, 0), rank_named(terminal, 1)]
        until = time.monotonic() + 20
        while {one.status() for one in stopped} != {psutil.STATUS_STOPPED} and time.monotonic() < until:
            time.sleep(0.05)
        assert {one.status() for one in stopped} == {psutil.STATUS_STOPPED}
        time.sleep(LONGER_S)
        for one in stopped[:2]:  # as a shell's fg does, to all that the terminal's keys reach
            os.kill(one.pid, signal.SIGCONT)
    elif "S" in how:
        terminal.type(STOP_OUTPUT)
        time.sleep(LONGER_S)
        terminal.type(GO_ON)
    else:
        time.sleep(LONGER_S)
    if "reply" in how:
        terminal.until("context ")
        terminal.until("> ")
    terminal.type("again\n")
    terminal.until("context ")
    terminal.until("> ")
    terminal.type(END)
    assert terminal.leave() == 0, terminal.seen[-2000:]
    said = [message["content"] for message in kept(tmp_path)[::2]]
    assert said == (["hello", "again"] if "reply" in how else ["again"])


@pytest.mark.slow
def test_a_rank_that_freezes_alone_ends_the_chat(open_terminal: Any, tmp_path: Path) -> None:  # noqa: F811
    """The control: nobody said that it would."""
    terminal = open_terminal(f"placement.timeout_s={PATIENCE_S}", "ranks=2", session=CHAT, columns=120)
    terminal.until("> ")
    rank_named(terminal, 1).suspend()
    assert terminal.leave() == 5
    assert "rank 1 has not answered" in terminal.seen
