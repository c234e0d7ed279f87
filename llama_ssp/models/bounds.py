"""What a model's small files may ask of time and memory, before libraries give it to them. No torch."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import MAX_JSON_BYTES

MAX_COUNT = 100_000  # of layers or labels: libraries make a list of so many, whatever the weights are
MAX_GROWTH = 32  # times as long as a text a tokenizer may make it; llama's makes 3 bytes of a space
COUNTED = re.compile("layer|label|attention_types")  # in a key of config.json


def require_counts(path: Path, config: dict[str, Any]) -> None:
    """Refuses a config.json that would have libraries make a list without end."""
    parts: list[tuple[str, Any]] = list(config.items())
    while parts:
        name, value = parts.pop()
        if isinstance(value, dict):
            parts += value.items()
        elif isinstance(value, list):
            parts += [(name, item) for item in value]
        elif isinstance(value, int) and value > MAX_COUNT and COUNTED.search(name):
            raise ModelError(
                "config.json has a number of layers or labels that no model has", where=str(path),
                found=f"{name} {value}", allowed=f"at most {MAX_COUNT}", fix="fetch the model again",
            )  # fmt: skip


def require_short_texts(path: Path) -> None:
    """Refuses tokenizers that make a text very much longer, by each file that one may be read from."""
    for file in sorted(path.glob("tokenizer*.json")):
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(
                "the file is too large", where=str(file), found=file.stat().st_size,
                allowed=f"{MAX_JSON_BYTES} bytes", fix="fetch the model again",
            )  # fmt: skip
        with suppress(ValueError, RecursionError):  # what no tokenizer can be read from is said by who reads
            require_short_text(file, json.loads(file.read_bytes()))


def require_short_text(file: Path, content: Any) -> None:
    """The same of what a tokenizer's file holds."""
    for step in ("normalizer", "post_processor", "decoder"):
        parts, growth = [content.get(step) if isinstance(content, dict) else None], 1.0
        while parts:
            part = parts.pop()
            parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
            growth *= _growth(part) if isinstance(part, dict) else 1
            if growth > MAX_GROWTH:
                raise ModelError(
                    "the tokenizer makes texts longer without reason", where=f"{file}: {step}",
                    found=f"{growth:.3g} times as long, or more", allowed=f"{MAX_GROWTH} times",
                    fix="do not use this model: a prompt could fill the memory",
                )  # fmt: skip


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a step of a tokenizer may make a text: replacements, and texts put twice."""
    pattern, content, single = part.get("pattern"), part.get("content"), part.get("single")
    if part.get("type") == "Replace" and isinstance(content, str):
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        added, taken = (len(text.encode(errors="surrogatepass")) for text in (content, str(plain or "")))
        return max(1.0, added / taken if taken else 1.0 + added)  # an expression may stand for nothing at all
    if part.get("type") == "TemplateProcessing" and isinstance(single, list):
        return max(1, sum("Sequence" in piece for piece in single if isinstance(piece, dict)))
    return 1
