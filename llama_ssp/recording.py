"""A comparison as a file: how it ended (.svg, .html), or how it moved (.cast, for asciinema). No torch."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from llama_ssp.errors import StorageError
from llama_ssp.screen import FRAMES_PER_S, Picture, Scene

HOLD_S = 2.0  # how long the end of a comparison stands before the next begins
CLEAR, HOME, HIDE, SHOW = "\x1b[2J", "\x1b[H", "\x1b[?25l", "\x1b[?25h"


class Recording:
    """Keeps the scenes of a session; `save` writes them in the format that the name's ending says."""

    def __init__(self, path: Path, width: int, height: int, title: str) -> None:
        self._path, self._width, self._height, self._title = path, width, height, title
        self._scenes: list[Scene] = []

    def add(self, scene: Scene) -> None:
        self._scenes.append(scene)

    def save(self) -> str | None:
        """Where it was saved; None if there was nothing to save."""
        if not self._scenes:
            return None
        content = {".svg": self._svg, ".html": self._html, ".cast": self._cast}[self._path.suffix]()
        try:
            self._path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"cannot write the recording: {error.strerror}", where=str(self._path)
            ) from None
        return str(self._path)

    def _svg(self) -> str:
        return self._ends().export_svg(title=self._title)

    def _html(self) -> str:
        return self._ends().export_html()

    def _ends(self) -> Console:
        console = self._console(record=True)
        for scene in self._scenes:
            console.print(scene.end(whole=True))
        return console

    def _cast(self) -> str:
        """asciicast v2: a header, then [seconds, "o", what was written] a line."""
        size = {"width": self._width, "height": self._height}
        lines = [json.dumps({"version": 2, **size, "title": self._title})]
        lines.append(json.dumps([0.0, "o", HIDE + CLEAR]))
        began = 0.0
        for scene in self._scenes:
            last = ""
            for number in range(int(scene.seconds * FRAMES_PER_S) + 1):
                now = number / FRAMES_PER_S
                drawn = self._frame(scene.at(now))
                if drawn != last:
                    lines.append(json.dumps([round(began + now, 3), "o", drawn]))
                last = drawn
            began += scene.seconds
            lines.append(json.dumps([round(began, 3), "o", self._frame(scene.end(whole=False))]))
            began += HOLD_S
        lines.append(json.dumps([round(began, 3), "o", SHOW]))
        return "\n".join(lines) + "\n"

    def _frame(self, picture: Picture) -> str:
        console = self._console(record=False)
        console.print(picture, height=self._height, end="")
        assert isinstance(console.file, io.StringIO)
        rows = console.file.getvalue().split("\n")[: self._height]
        return HOME + "\r\n".join(f"{row}\x1b[K" for row in rows) + "\x1b[J"

    def _console(self, record: bool) -> Console:
        return Console(
            record=record, width=self._width, height=self._height, file=io.StringIO(), force_terminal=True,
            color_system="256", highlight=False, legacy_windows=False, _environ={},
        )  # fmt: skip
