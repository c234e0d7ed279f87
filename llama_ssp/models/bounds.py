"""Refuses small files of a model that would make libraries take unbounded time or memory. No torch."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import REFETCH, require_small

MAX_COUNT = 100_000  # of layers or labels: libraries make a list of this length, whatever the weights are
MAX_GROWTH = 32  # a tokenizer may make a text this many times as long; llama's makes 3 bytes of a space
COUNTED = re.compile("layer|label|attention_types")  # in a key of config.json


def require_counts(path: Path, config: dict[str, Any]) -> None:
    """Refuses a config.json with a number of layers or labels that libraries would make a huge list of."""
    parts: list[tuple[str, Any]] = list(config.items())
    while parts:
        name, value = parts.pop()
        if isinstance(value, dict):
            parts += value.items()
        elif isinstance(value, list):
            parts += [(name, item) for item in value]
        elif isinstance(value, int) and value > MAX_COUNT and COUNTED.search(name):
            what = "config.json has a number of layers or labels that no model has"
            raise ModelError(what, path, f"{name} {value}", f"at most {MAX_COUNT}", REFETCH)


def require_short_texts(path: Path) -> None:
    """Refuses a folder with a tokenizer's file that fails `require_short_text`."""
    for file in sorted(path.glob("tokenizer*.json")):
        require_small(file)
        with suppress(ValueError, RecursionError):  # text/tokenizer.py says what cannot be read
            require_short_text(file, json.loads(file.read_bytes()))


def require_short_text(file: Path, content: Any) -> None:
    """Refuses a tokenizer that makes a text very much longer; `content` is what its file holds."""
    for step in ("normalizer", "post_processor", "decoder"):
        parts, growth = [content.get(step) if isinstance(content, dict) else None], 1.0
        while parts:
            part = parts.pop()
            parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
            growth *= _growth(part) if isinstance(part, dict) else 1
            if growth > MAX_GROWTH:
                what, where = "the tokenizer makes texts longer without reason", f"{file}: {step}"
                found = f"{growth:.3g} times as long, or more"
                fix = "do not use this model: a prompt could fill the memory"
                raise ModelError(what, where, found, f"{MAX_GROWTH} times", fix)


def _growth(part: dict[str, Any]) -> float:
    """How many times as long one step of a tokenizer may make a text, by replacing or by repeating."""
    pattern, content, single = part.get("pattern"), part.get("content"), part.get("single")
    if part.get("type") == "Replace" and isinstance(content, str):
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        added, taken = (len(text.encode(errors="surrogatepass")) for text in (content, str(plain or "")))
        return max(1.0, added / taken if taken else 1.0 + added)  # an expression may match nothing at all
    if part.get("type") == "TemplateProcessing" and isinstance(single, list):
        return max(1, sum("Sequence" in piece for piece in single if isinstance(piece, dict)))
    return 1
