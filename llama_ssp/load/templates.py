"""A model's chat template, rendered where it can do no harm: in a process of its own, with little of all.

A template is a program by whoever made the model. transformers runs it in a sandbox, which keeps it from
reaching out; but not from taking all time, or all memory. So it runs in a child that may have some seconds
and some memory, may write to no file, and is ended when it is late.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SECONDS = 5.0  # for one rendering
MEMORY_BYTES = 2**30  # beside what the process has when it begins
MOST_BYTES = 16 * 2**20  # of a rendered text

Render = Callable[[Any], str]


class TemplateError(Exception):
    """A template has failed, in words."""


class Renderer:
    """Renders in a child, which is begun at first use, and anew after it had to be ended."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._child: tuple[int, int, int] | None = None  # process, its ear, its mouth

    def __call__(self, messages: Any) -> str:
        """The text, or the template's own words for why not."""
        _, ear, mouth = self._child = self._child or _begun(self._render)
        try:
            _write(ear, json.dumps(messages).encode())
            answer: dict[str, str] = json.loads(_read(mouth, time.monotonic() + SECONDS))
        except (EOFError, BrokenPipeError):
            self.close()
            raise TemplateError(f"more than {MEMORY_BYTES >> 20} MiB, or its process has failed") from None
        except TimeoutError:
            self.close()
            raise TemplateError(f"not done after {SECONDS:g} seconds") from None
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            process, ear, mouth = self._child
            self._child = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(ear)
            os.close(mouth)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


def _begun(render: Render) -> tuple[int, int, int]:
    hears, ear = os.pipe()
    mouth, says = os.pipe()
    process = os.fork()
    if not process:
        os.close(ear)
        os.close(mouth)
        _serve(render, hears, says)
    os.close(hears)
    os.close(says)
    return process, ear, mouth


def _serve(render: Render, hears: int, says: int) -> NoReturn:
    """The child's life: until nobody asks any more."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends with its parent
        signal.set_wakeup_fd(-1)
        for open_one in sorted(map(int, os.listdir("/proc/self/fd"))):
            if open_one not in (1, 2, hears, says):  # others' pipes must not seem to have a reader here
                with contextlib.suppress(OSError):
                    os.close(open_one)
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        while True:
            messages = json.loads(_read(hears, None))
            signal.alarm(math.ceil(SECONDS) + 1)  # should nobody be there to end it
            try:
                text = render(messages)
                answer = {"text": text} if len(text) <= MOST_BYTES else {"error": "a text without end"}
            except MemoryError:
                answer = {"error": f"more than {MEMORY_BYTES >> 20} MiB"}
            except Exception as error:  # a template may raise anything
                answer = {"error": str(error)[:200] or type(error).__name__}
            signal.alarm(0)
            _write(says, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _write(pipe: int, content: bytes) -> None:
    content = struct.pack("<Q", len(content)) + content
    while content:
        content = content[os.write(pipe, content) :]


def _read(pipe: int, until: float | None) -> bytes:
    """One message; `until` is when to give up."""
    (length,) = struct.unpack("<Q", _exactly(pipe, 8, until))
    return _exactly(pipe, length, until)


def _exactly(pipe: int, count: int, until: float | None) -> bytes:
    found = b""
    while len(found) < count:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            raise TimeoutError
        piece = os.read(pipe, min(2**20, count - len(found)))
        if not piece:
            raise EOFError
        found += piece
    return found
