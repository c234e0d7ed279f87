"""A chat template's process: it answers as often as it is asked, and takes no more than it may."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.load import templates
from llama_ssp.load.templates import Renderer, TemplateError

LATE, HUGE = "not done after", "more than 1024 MiB"


def refuses(_: Any) -> str:
    raise ValueError("no such role")


def ends(_: Any) -> str:
    os._exit(3)


def never_ends(_: Any) -> str:
    while True:
        pass


def huge(_: Any) -> str:
    return "a" * 10**11


def long(_: Any) -> str:
    return "a" * (templates.MOST_BYTES + 1)


def test_one_process_answers_many_times() -> None:
    seen = Renderer(lambda messages: f"{os.getpid()} {messages}")
    answers = [seen([number, "\u00e9\n"]) for number in range(3)]
    assert [answer.partition(" ")[2] for answer in answers] == [str([n, "\u00e9\n"]) for n in range(3)]
    (process,) = {int(answer.split()[0]) for answer in answers}
    assert process != os.getpid()
    seen.close()
    assert not Path(f"/proc/{process}").exists()


def test_it_ends_by_itself_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent may have been killed while it rendered."""
    monkeypatch.setattr(templates, "SECONDS", 0.0)
    process, ear, mouth = templates._begun(never_ends)
    templates._write(ear, b"[]")
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGALRM
    os.close(ear)
    os.close(mouth)


@pytest.mark.parametrize(
    ("render", "said"),
    [(refuses, "no such role"), (ends, HUGE), (never_ends, LATE), (huge, HUGE), (long, "without end")],
)
def test_what_it_may_not(render: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is asked anew."""
    if render is never_ends:
        monkeypatch.setattr(templates, "SECONDS", 0.2)
    renderer = Renderer(render)
    for _ in range(2):
        with pytest.raises(TemplateError, match=said):
            renderer([])
    renderer.close()


def test_it_writes_no_file(tmp_path: Path) -> None:
    renderer = Renderer(lambda _: str((tmp_path / "made").write_text("x" * 10)))
    with pytest.raises(TemplateError):
        renderer([])
    renderer.close()
    assert not (tmp_path / "made").exists() or not (tmp_path / "made").read_text()


def test_it_holds_no_pipe_of_others() -> None:
    """Who waits for a pipe to be closed would wait for it."""
    hears, says = os.pipe()
    renderer = Renderer(str)
    renderer([])
    os.close(says)
    assert os.read(hears, 1) == b""
    os.close(hears)
    renderer.close()
