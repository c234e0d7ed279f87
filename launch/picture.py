"""Runs a command in a terminal of its own and saves what it shows: launch/picture.py OUT.svg COMMAND..."""

from __future__ import annotations

import io
import os
import pty
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH, LONGEST_LINE = 110, 600


def main() -> None:
    out, command = Path(sys.argv[1]), sys.argv[2:]
    shown: list[bytes] = []

    def keep(terminal: int) -> bytes:
        data = os.read(terminal, 65536)
        shown.append(data)
        return data

    os.environ["COLUMNS"] = str(WIDTH)
    code = os.waitstatus_to_exitcode(pty.spawn(command, keep))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {' '.join(command)}", style="bold"))
    for line in b"".join(shown).decode(errors="replace").replace("\r\n", "\n").split("\n"):
        line = line.rpartition("\r")[2]  # a line that was rewritten shows its last state
        longest = WIDTH - 4 if line.startswith("{") else LONGEST_LINE  # of JSON, the beginning will do
        text = Text.from_ansi(line[:longest] + ("..." if len(line) > longest else ""))
        indent = len(text.plain) - len(text.plain.lstrip(" "))
        console.print(Text("\N{NO-BREAK SPACE}" * indent) + text[indent:])
    console.save_svg(str(out), title="llama-ssp")
    sys.exit(code)


if __name__ == "__main__":
    main()
