"""Tasks in a real terminal: what is typed, a resize, Ctrl-C, the end; and texts that would steer it."""

import codecs
import fcntl
import json
import logging
import os
import re
import select
import shutil
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
from rich.cells import cell_len
from rich.panel import Panel
from rich.text import Text
from safetensors.torch import load_file, save_file

from llama_ssp import cli
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.report import console as report
from llama_ssp.report.tables import Column, Table
from llama_ssp.report.terminal import rich_console, show_text_alone
from tests import checkpoints
from tests.warm import LAUNCH, start

SESSION = ("task=compare", "model=tiny", "draft=tiny_draft", "seed=1", "task.max_new_tokens=24")
ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"
PATIENCE_S = 150  # on a busy machine
INTERRUPT, END = "\x03", "\x04"


class Terminal:
    """A command in a pseudo-terminal of its own; `seen` is all that it has shown."""

    def __init__(
        self, folder: Path, *overrides: str, columns: int = 80, lines: int = 24,
        session: tuple[str, ...] = SESSION,
    ) -> None:  # fmt: skip
        self._master, slave = os.openpty()
        self.resize(columns, lines)
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "WORLD_SIZE", "RANK")}
        # The terminal controls the process: Ctrl-C is a signal.
        words = [LAUNCH, *session, *overrides]
        env = {**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        self._process = start(words, folder, [os.ttyname(slave)] * 3, env)
        self._slave: int | None = slave  # kept open until the process has opened it
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
        self._looked_at = 0
        self._is_there = True

    def resize(self, columns: int, lines: int) -> None:
        """The kernel tells the process by SIGWINCH."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, awaited: str) -> str:
        """What was shown from the last look on until this came."""
        limit = time.monotonic() + PATIENCE_S
        while (found := self.seen.find(awaited, self._looked_at)) < 0:
            assert time.monotonic() < limit and self._read(), f"no {awaited!r} in {self.seen[-2000:]!r}"
        begun, self._looked_at = self._looked_at, found + len(awaited)
        return self.seen[begun : self._looked_at]

    def leave(self) -> int:
        """Its exit code, after all that it still shows."""
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit and self._read():
            pass
        self._process.join(PATIENCE_S)
        return int(self._process.exitcode)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def settings(self) -> list[Any]:
        """How the terminal takes what is typed. It must not have been closed."""
        return termios.tcgetattr(self._master)

    def hang_up(self) -> None:
        """The other end of the connection goes away."""
        os.close(self._master)
        self._is_there = False

    def ended(self) -> int:
        """Its exit code, where nothing can be shown any more."""
        self._process.join(PATIENCE_S)
        return int(self._process.exitcode)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        if self._is_there:
            os.close(self._master)

    def _read(self) -> bool:
        """Takes what there is; False once the other side is closed."""
        if not select.select([self._master], [], [], 1)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux says that nobody has the terminal open any more
            return False
        if self._slave is not None:
            os.close(self._slave)
            self._slave = None
        self.seen += self._decoder.decode(data)
        return bool(data)


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(*overrides: str, **size: Any) -> Terminal:
        opened.append(Terminal(tmp_path, *overrides, **size))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def summary(folder: Path) -> dict[str, Any]:
    (file,) = (folder / "outputs").rglob("summary.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def lines(shown: str) -> list[str]:
    return ESCAPE.sub("", shown).replace("\r\n", "\n").split("\n")


@pytest.mark.slow
def test_a_whole_session(open_terminal: Any, tmp_path: Path) -> None:
    # Long enough for several pictures of each side on a fast processor.
    terminal = open_terminal("task.plot=session.svg", "task.max_new_tokens=120", columns=80)
    terminal.until("prompt> ")
    terminal.type("hello\n")
    terminal.until(ALTERNATE)
    terminal.until("speculative sampling: running")
    terminal.until(BACK)
    kept = lines(terminal.until("prompt> "))
    assert max(map(cell_len, kept)) == 80 and any("times as fast" in line for line in kept)
    assert any("regular" in line and "speculative, tiny_draft, K = 4" in line for line in kept)

    terminal.type("日本 \N{PARTY POPPER}\n")
    terminal.until(ALTERNATE)
    terminal.resize(50, 20)  # while it is drawing
    terminal.until(BACK)
    kept = lines(terminal.until("prompt> "))
    assert max(map(cell_len, kept)) == 50 and any("日本 \N{PARTY POPPER}" in line for line in kept)

    terminal.type("\n")  # an empty line asks again
    terminal.until("prompt> ")
    terminal.type("\x1b[A\x1b[A\n")  # the history: two lines up
    assert "hello" in terminal.until(ALTERNATE)
    terminal.until("prompt> ")
    terminal.type(END)
    assert terminal.leave() == 0
    found = summary(tmp_path)
    assert [one["prompt"] for one in found["comparisons"]] == ["hello", "日本 \N{PARTY POPPER}", "hello"]
    assert found["status"] == "done" and found["plot"] == "session.svg"
    assert (tmp_path / "session.svg").read_text().count("times&#160;as&#160;fast") == 3
    assert "Traceback" not in terminal.seen


@pytest.mark.slow
@pytest.mark.parametrize("half", ["half a prom", ""])
def test_interrupted_at_the_prompt(half: str, open_terminal: Any, tmp_path: Path) -> None:
    """Also where it comes before readline listens."""
    terminal = open_terminal()
    terminal.until("prompt> ")
    terminal.type(half + INTERRUPT)
    assert terminal.leave() == 130
    assert "stopped by a signal" in terminal.seen and "Traceback" not in terminal.seen
    assert summary(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
def test_interrupted_while_it_draws(open_terminal: Any, tmp_path: Path) -> None:
    """The terminal is given back as it was, and what was finished is kept."""
    terminal = open_terminal("task.max_new_tokens=400")
    terminal.until("prompt> ")
    terminal.type("hello\n")
    terminal.until("regular sampling: running")
    terminal.type(INTERRUPT)
    assert terminal.leave() == 130
    assert terminal.seen.index(BACK) > terminal.seen.index(ALTERNATE)
    assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l")  # the cursor is there again
    assert "Traceback" not in terminal.seen
    assert summary(tmp_path)["comparisons"] == []


@pytest.mark.slow
def test_a_prompt_from_the_config(open_terminal: Any, tmp_path: Path) -> None:
    terminal = open_terminal('task.prompts=["hello"]', columns=100)
    terminal.until("times as fast")
    assert terminal.leave() == 0
    assert "prompt>" not in terminal.seen
    assert '"task"' not in terminal.seen  # a person at a terminal reads no JSON


CHAT = ("task=chat", *SESSION[1:4])


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "code"), [(END, 0), (INTERRUPT, 130)])
def test_a_chat_ends_while_its_model_gets_ready(
    typed: str, code: int, open_terminal: Any, tmp_path: Path
) -> None:
    """Nothing is waited for, and nothing of it is shown."""
    terminal = open_terminal("model=demo", "draft=none", "engine=compiled", session=CHAT[:1], columns=120)
    terminal.until("The model gets ready while you type.")
    terminal.until("> ")
    terminal.type(typed)
    if typed == INTERRUPT:
        terminal.until("another Ctrl-C")
        terminal.type(typed)
    assert terminal.leave() == code
    assert "compil" not in terminal.seen and "Traceback" not in terminal.seen
    assert summary(tmp_path)["replies"] == []


@pytest.mark.slow
def test_a_chat_says_what_ends_its_loading(open_terminal: Any, tmp_path: Path) -> None:
    """After the line that was typed meanwhile."""
    folder = tmp_path / "damaged"
    shutil.copytree(SHIPPED_FOLDER / "demo_draft", folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors")
    terminal = open_terminal(f"model.path={folder}", session=("task=chat", "model=local", "draft=none"))
    terminal.until("> ")
    terminal.type("hello\n")
    assert terminal.leave() == 4
    assert "error: " in terminal.seen and "Traceback" not in terminal.seen


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_conversation(ranks: int, open_terminal: Any, tmp_path: Path) -> None:
    """Ctrl-C stops the reply and not the program, nor a rank; a block of lines is one message; at the prompt
    it ends by the second one.
    """
    words = "task.max_new_tokens=900", "task.context=1024", f"ranks={ranks}"
    terminal = open_terminal(*words, session=CHAT, columns=120)
    terminal.until("/help lists the commands")
    for typed, stopped in (
        ("hello\n", "stopped by Ctrl-C]"),
        ("/reset\n", ""),
        ('"""two\nlines"""\n', "stopped by Ctrl-C]"),
    ):
        terminal.until("> ")
        terminal.type(typed)
        if not stopped:
            terminal.until("begins anew")
            continue
        terminal.until("<")  # the reply has begun
        terminal.type(INTERRUPT)
        shown = terminal.until(stopped)
        assert "ms/token, " in shown and " of 1024, " in shown, typed
    terminal.until("> ")
    time.sleep(1.5)
    terminal.type(INTERRUPT)
    terminal.until("another Ctrl-C")
    terminal.type(INTERRUPT)
    assert terminal.leave() == 130
    assert "Traceback" not in terminal.seen and '"task"' not in terminal.seen
    assert "stopped by a signal" in terminal.seen or "rank 0 was stopped by SIGINT" in terminal.seen
    found = summary(tmp_path)
    assert [reply["finish_reason"] for reply in found["replies"]] == ["stopped", "stopped"]
    assert found["messages"][0] == {"role": "user", "content": "two\nlines"}
    assert found["status"] == "interrupted"


STEERING = {
    "ESC": "\x1b[2J",
    "title": "\x1b]0;pwned\x07",
    "C1": "\x9b31m",
    "DEL": "\x7f",
    "backspaces": "\x08\x08",
    "return": "\rall is well",
    "override": "\u202e",
    "separator": "\u2028",
}
HOSTILE = "".join(STEERING.values())
OWN_CONTROLS = re.compile(
    r"\x1b\[([0-9;]*m|\?25[lh]|[12]?K|[0-9]*A)|\r\n|\r(?=\x1b\[)"
)  # of rich's bar and colours


class Screen:
    """A terminal in place of this process's outputs."""

    def __init__(self) -> None:
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))

    def stream(self) -> TextIO:
        return os.fdopen(self._slave, "w", encoding="utf-8", errors="backslashreplace", closefd=False)

    def shown(self) -> str:
        """All that it has been sent."""
        sys.stdout.flush()
        sys.stderr.flush()
        text = b""
        while select.select([self._master], [], [], 0.05)[0]:
            text += os.read(self._master, 65536)
        return text.decode("utf-8")

    def close(self) -> None:
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def screened() -> Iterator[Screen]:
    """Makes this process's outputs a terminal, as the command does; in the test itself, not in a fixture:
    pytest gives each of its phases outputs anew.
    """
    screen = Screen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", screen.stream())
        patch.setattr(sys, "stderr", screen.stream())
        patch.setenv("TERM", "xterm-256color")
        rich_console.cache_clear()  # it has looked at the outputs that were there before
        show_text_alone()
        yield screen
    rich_console.cache_clear()
    screen.close()


def log_by(handler: logging.Handler) -> None:
    handler.emit(logging.LogRecord("x", logging.WARNING, __file__, 1, f"log {HOSTILE}", None, None))


def fail() -> None:
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError:
        traceback.print_exc()


def move_a_bar() -> None:
    level = report.log.level
    report.log.setLevel(logging.INFO)
    with report.Progress(f"model {HOSTILE}", 2, f"texts {HOSTILE}") as progress:
        progress.advance(2)
    report.log.setLevel(level)


def draw_above_a_bar() -> None:
    with report.waiting("x"):
        report.Console().write(HOSTILE)


DOORS: dict[str, Callable[[], object]] = {
    "print": lambda: print(HOSTILE),
    "print-log": lambda: print(HOSTILE, file=sys.stderr),
    "lines": lambda: sys.stdout.writelines([HOSTILE, HOSTILE]),
    "log": lambda: log_by(report.LogHandler()),
    "log-of-a-library": lambda: log_by(logging.StreamHandler()),
    "traceback": fail,
    "error": lambda: cli.report(ModelError("what", where=HOSTILE, found=HOSTILE)),
    "text": lambda: report.Console().write(HOSTILE),
    "dim-text": lambda: report.Console().write(HOSTILE, is_dim=True),
    "line": lambda: report.Console().show([HOSTILE]),
    "coloured-line": lambda: report.Console().show([Text(HOSTILE, style="red")]),
    "panel": lambda: report.Console().show([Panel(Text(HOSTILE), title=Text(HOSTILE), subtitle=HOSTILE)]),
    "table": lambda: report.Console().show(
        [Table("t", [Column(key="a", title=HOSTILE, is_text=True)], [{"a": HOSTILE}], title=HOSTILE)]
    ),
    "bar": move_a_bar,
    "above-a-bar": draw_above_a_bar,
}


@pytest.mark.parametrize("door", DOORS)
def test_no_text_steers_a_terminal(door: str) -> None:
    """By whatever door it comes, as long as it ends on a terminal."""
    with screened() as screen:
        DOORS[door]()
        shown = screen.shown()
    rest = OWN_CONTROLS.sub("", shown)
    assert not [c for c in rest if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)], repr(rest)
    assert "\u202e" not in rest and "\u2028" not in rest
    assert "pwned" in rest or "\N{REPLACEMENT CHARACTER}" in rest, repr(rest)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sequence_in_pieces_is_shown(size: int) -> None:
    """A text that streams may be cut anywhere."""
    text = f"a\tb\n{HOSTILE}\ud800c"
    with screened() as screen:
        console = report.Console()
        for first in range(0, len(text), size):
            console.write(text[first : first + size])
        shown = screen.shown()
    rest = shown.replace("\r\n", "\n")
    assert rest == "a\tb\n" + r"\x1b[2J\x1b]0;pwned\x07\x9b31m\x7f\x08\x08\rall is well\u202e\u2028\ud800c"


@pytest.mark.parametrize("name", STEERING)
def test_a_file_gets_the_text_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out"
    with file.open("w", encoding="utf-8", errors="surrogatepass", newline="") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        show_text_alone()
        report.Console().write(STEERING[name])
        report.Console().show([STEERING[name]])
    assert file.read_bytes().decode("utf-8", "surrogatepass") == 2 * STEERING[name] + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["generate", "chat"])
def test_no_text_of_a_model_steers_a_terminal(task: str, open_terminal: Any, tmp_path: Path) -> None:
    """The model writes ESC alone; its folder's name, its path and the prompt would steer the terminal."""
    made = checkpoints.tokenizer()
    escape = made.token_to_id(chr(256 + 27))  # GPT-2's letter for the byte
    folder = checkpoints.save(tmp_path / "m\x1b]0;pwned\x07", made=made)
    words = f"model.path={folder}", "model.name=m\x1b]0;pwned\x07", "draft=none", "task.max_new_tokens=6"
    session = (f"task={task}", "model=local", *words, f"+sampling.logit_bias={{{escape}: 100}}", "-v")
    if task == "generate":
        terminal = open_terminal("prompt=\x1b[2Jhello\x1b]0;pwned\x07", session=session, columns=200)
    else:
        terminal = open_terminal(session=session, columns=200)
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("context ")
        terminal.until("> ")
        terminal.type(END)
    assert terminal.leave() == 0
    seen = terminal.seen
    assert r"\x1b\x1b\x1b" in seen and "\x1b\x1b" not in seen
    assert "\x1b]" not in seen and "\x07" not in seen and "\x1b[2J" not in seen
    if task == "generate":  # the log of a chat has no name
        assert r"m\x1b]0;pwned\x07" in seen
