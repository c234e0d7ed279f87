"""python -m tests.covered [FILE.json]: what `coverage json` found, by folder; 1 if a bar is not met.

Lines and branches count alike. Pure modules are those that run without torch (tests/test_layers.py).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from llama_ssp.report.tables import aligned
from tests.test_layers import needs_no_torch

PURE, ALL = 95.0, 85.0  # percent
GAP = 90.0  # modules below are named


def percent(counts: list[int]) -> float:
    """Of [tried, all]."""
    return 100.0 * counts[0] / counts[1] if counts[1] else 100.0


def main(place: str) -> int:
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    modules: dict[str, list[int]] = {}
    for name, found in json.loads(Path(place).read_text(encoding="utf-8"))["files"].items():
        inside = name.partition("llama_ssp/")[2]
        summary = found["summary"]
        counts = [
            summary["covered_lines"] + summary["covered_branches"],
            summary["num_statements"] + summary["num_branches"],
        ]
        modules[inside] = counts
        first = inside.partition("/")[0]
        room = "llama_ssp" if first == "__init__.py" else first.removesuffix(".py")
        rooms[room] = [a + b for a, b in zip(rooms[room], counts, strict=True)]
    light = [counts for name, counts in modules.items() if needs_no_torch(_dotted(name))]
    pure = [sum(counts[i] for counts in light) for i in (0, 1)]
    whole = [sum(counts[i] for counts in rooms.values()) for i in (0, 1)]
    rows = [["folder", "lines and branches", "tried"]]
    rows += [
        [room, f"{counts[1]}", f"{percent(counts):.1f} %"]
        for room, counts in sorted(rooms.items(), key=lambda item: percent(item[1]))
    ]
    rows += [["all pure modules", f"{pure[1]}", f"{percent(pure):.1f} %"]]
    rows += [["the package", f"{whole[1]}", f"{percent(whole):.1f} %"]]
    print("\n".join(aligned(rows, words=1)))
    gaps = sorted((percent(counts), name) for name, counts in modules.items() if percent(counts) < GAP)
    print(f"below {GAP:g} %: " + (", ".join(f"{name} {share:.0f}" for share, name in gaps) or "none"))
    return 0 if percent(pure) >= PURE and percent(whole) >= ALL else 1


def _dotted(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    return ".".join(["llama_ssp", *(parts[:-1] if parts[-1] == "__init__" else parts)])


if __name__ == "__main__":
    sys.exit(main((sys.argv[1:] or ["coverage.json"])[0]))
