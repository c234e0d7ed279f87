"""task=chat over ranks: they wait for a person without a limit, and only a rank that is lost ends that."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import stands_still, wait_for
from tests.test_kept_conversation import LONG, kept, rank_named
from tests.test_terminal import CHAT, END, INTERRUPT, Terminal, open_terminal  # noqa: F401

STOP_OUTPUT, GO_ON = "\x13", "\x11"
SUSPEND = "\x1a"
PATIENCE_S = 15  # for a rank that does not answer; to start takes ranks less on a busy machine, too
LONGER_S = 1.5 * PATIENCE_S


def suspended(terminal: Terminal) -> None:
    """Ctrl-Z, and fg when all ranks have stood still for a while."""
    ranks = [rank_named(terminal, rank).pid for rank in range(2)]
    terminal.type(SUSPEND)
    wait_for(lambda: all(map(stands_still, [terminal.pid, *ranks])))
    time.sleep(LONGER_S)
    for pid in (terminal.pid, ranks[0]):  # as a shell's fg does, to all that the terminal's keys reach
        os.kill(pid, signal.SIGCONT)


def held(terminal: Terminal) -> None:
    """Ctrl-S, and Ctrl-Q after a while."""
    terminal.type(STOP_OUTPUT)
    time.sleep(LONGER_S)
    terminal.type(GO_ON)


def idle(_: Terminal) -> None:
    time.sleep(LONGER_S)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("pause", [idle, suspended, held], ids=["idle", "Ctrl-Z", "Ctrl-S"])
def test_ranks_wait_for_a_person(pause: Any, open_terminal: Any, tmp_path: Path) -> None:  # noqa: F811
    """For longer than they wait for a rank that does not answer: at the prompt, and in a reply."""
    limits = (*LONG, "task.max_new_tokens=50000", f"placement.timeout_s={PATIENCE_S}")
    terminal = open_terminal(*limits, "ranks=2", "engine=eager", session=CHAT, columns=120)
    terminal.until("> ")
    terminal.type("/stats\n")
    terminal.until("replies: 0")
    terminal.until("> ")
    if pause is not held:  # the prompt is there already
        pause(terminal)
    terminal.type("hello\n")
    terminal.until("<")  # the reply has begun
    if pause is not idle:
        pause(terminal)
    terminal.until("<")  # and goes on
    terminal.type(INTERRUPT)
    terminal.until("stopped by Ctrl-C]")
    terminal.until("> ")
    terminal.type("/set max_new_tokens 8\n")
    terminal.until("max_new_tokens 8")
    terminal.until("> ")
    terminal.type("again\n")
    terminal.until("context ")
    terminal.until("> ")
    terminal.type(END)
    assert terminal.leave() == 0, terminal.seen[-2000:]
    assert [message["content"] for message in kept(tmp_path)[::2]] == ["hello", "again"]


@pytest.mark.slow
def test_a_rank_that_freezes_alone_ends_the_chat(open_terminal: Any, tmp_path: Path) -> None:  # noqa: F811
    """The control: nobody said that it would."""
    terminal = open_terminal(f"placement.timeout_s={PATIENCE_S}", "ranks=2", session=CHAT, columns=120)
    terminal.until("> ")
    rank_named(terminal, 1).suspend()
    assert terminal.leave() == 5
    assert "rank 1 has not answered" in terminal.seen
