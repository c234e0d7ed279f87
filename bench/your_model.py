"""Writes the page "Your model" of docs: by model type what runs, how, and what may draft for it.

    python bench/your_model.py [write=docs/your_model.md]

It reads the rows of llama_ssp/models/families.py, the text parts of wrapped.py, and the last results of
`python bench/all.py only=architectures`, where each other causal architecture of transformers has run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from llama_ssp.models.families import FAMILIES, Family
from llama_ssp.models.support import support_of
from llama_ssp.models.wrapped import SAME_ON_TEXT, TEXT_TYPES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
FINDING = re.compile(r"(\S+)  +(same text|another text|refused|not built)  +(.*)")
START = """# Your model

Look for the `model_type` of your model's `config.json`; `llama-ssp plan FOLDER` ends with the line for it.
`python bench/your_model.py write=docs/your_model.md` writes this page.
"""


def findings() -> dict[str, tuple[str, str]]:
    """Returns the outcome and the reason for each architecture of the last results."""
    file = max(RESULTS.glob("architectures_*.md"), key=lambda path: path.stem[-6:])
    matches = map(FINDING.fullmatch, file.read_text().splitlines())
    return {match[1]: (match[2], match[3]) for match in matches if match}


def with_rows() -> Iterator[str]:
    """Gives the lines of the families that are split over ranks."""
    yield "\n## Split over ranks, compiled and planned\n"
    yield f"What may draft: {support_of('llama').drafts}.\n"
    yield "| `model_type` | experts | GGUF | DeepSpeed | what has its text part |"
    yield "|---|---|---|---|---|"
    for kind, family in sorted(FAMILIES.items()):
        wholes = ", ".join(f"`{whole}`" for whole in wholes_of(kind))
        cells = [f"`{kind}`", experts(family), family.gguf.architecture, yes(family.deepspeed), wholes]
        yield f"| {' | '.join(cells)} |"
    yield "\nOf these a model with another value of a key than the usual one runs in one process:\n"
    for kind, family in sorted(FAMILIES.items()):
        if family.needs:
            yield f"* `{kind}`: {', '.join(f'`{key}`' for key in family.needs)}"


def wholes_of(kind: str) -> list[str]:
    """Returns the multimodal models whose text part is usually of this type."""
    return [whole for whole, text in TEXT_TYPES.items() if SAME_ON_TEXT.get(text, text) == kind]


def experts(family: Family) -> str:
    return yes(bool(family.names.router))


def yes(holds: bool) -> str:
    return "yes" if holds else ""


def without_rows() -> Iterator[str]:
    """Gives the lines of the other architectures."""
    others = {kind: found for kind, found in findings().items() if kind not in FAMILIES}
    same = sorted(kind for kind, (outcome, _) in others.items() if outcome == "same text")
    yield "\n## In one process, by transformers' module\n"
    yield f"What may draft: {support_of('').drafts}. Greedy texts of tiny models equal transformers' own.\n"
    yield ", ".join(f"`{kind}`" for kind in same) + "."

    yield "\n## Refused\n"
    yield "| `model_type` | why |"
    yield "|---|---|"
    for kind, (outcome, why) in sorted(others.items()):
        if outcome == "refused":
            yield f"| `{kind}` | {reason(why)} |"


def reason(why: str) -> str:
    """Returns the reason in a few words."""
    if "cannot roll back" in why:
        layers = re.search(r"found ([^;]*), allowed", why)
        return f"layers that cannot be rolled back: {layers[1] if layers else why}"
    if "names no context" in why:
        return "no explicit positions"
    if "explicit positions and masks" in why:
        return "does not obey explicit positions and masks"
    return why.partition(";")[0]


def page() -> str:
    """Returns the whole page."""
    return "\n".join([START, *with_rows(), *without_rows()]).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    words = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if "write" in words:
        Path(words["write"]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
