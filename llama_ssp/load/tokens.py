"""Tokenizers: one interface, and the check that a pair speaks the same tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from llama_ssp.errors import DataError, ModelError

PROBES = [
    "The quick brown fox", " leading space", "trailing  ", "\n\n\tdef f(x):\n    return x ** 2",
    "1234567890 3.14159", "naïve café", "日本語のテキスト", "🙂🙃", "a\u0301", "<s></s>", "(){}[]", "'\"\\",
]  # fmt: skip


class Tokens(Protocol):
    """Text to token ids and back."""

    end_ids: frozenset[int]
    bos_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def chat(self, text: str, system: str | None) -> list[int]: ...


class HubTokens:
    """A Hugging Face tokenizer, read from a local folder."""

    def __init__(self, path: Path, end_ids: frozenset[int]) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise ModelError(
                "the tokenizer cannot be read", where=str(path), found=str(error)[:200],
                fix="put the model's tokenizer.json and tokenizer_config.json beside its weights",
            ) from None  # fmt: skip
        own = self._tokenizer.eos_token_id
        self.end_ids = end_ids or (frozenset({own}) if own is not None else frozenset())
        self.bos_id: int | None = self._tokenizer.bos_token_id

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def chat(self, text: str, system: str | None) -> list[int]:
        if not self._tokenizer.chat_template:
            raise DataError(
                "the model has no chat template", where="task.chat=true",
                fix="use an instruct model, or task.chat=false",
            )  # fmt: skip
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False)
        return ids

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def fingerprint(self) -> str:
        """A hash of every token with its id, and of how a set of strings is cut."""
        content = [sorted(self.vocabulary().items()), [self.encode(text) for text in PROBES]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


class ByteTokens:
    """Bytes as tokens, for models without a tokenizer (synthetic weights). Ids above 255 have no text."""

    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def encode(self, text: str) -> list[int]:
        return [byte % self._vocab for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) if 32 <= i < 127 or i == 10 else f"<{i}>" for i in ids)

    def chat(self, text: str, system: str | None) -> list[int]:
        raise DataError("synthetic models have no chat template", fix="use task.chat=false")


def read_tokens(path: Path | None, vocab: int) -> Tokens:
    """The tokenizer of a model folder; bytes where there is no folder."""
    return ByteTokens(vocab) if path is None else HubTokens(path, end_ids_of(path))


def end_ids_of(path: Path) -> frozenset[int]:
    """All tokens that end a text, from generation_config.json and config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((path / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        ids = found if isinstance(found, list) else [found]
        whole = [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
        if whole:
            return frozenset(whole)
    return frozenset()


def require_same_tokens(target: Tokens, draft: Tokens) -> None:
    """Refuses a pair whose ids mean different things; padding rows without a token do not matter."""
    if not (isinstance(target, HubTokens) and isinstance(draft, HubTokens)):
        if type(target) is not type(draft):
            raise ModelError(
                "one model has a tokenizer and the other has none",
                fix="give both by path, or both weights=synthetic",
            )
        return
    ours, theirs = target.vocabulary(), draft.vocabulary()
    differing = sorted(
        {t for t, i in ours.items() if theirs.get(t) != i} | {t for t in theirs if t not in ours}
    )
    if differing:
        shown = ", ".join(f"{t!r}: {ours.get(t)} and {theirs.get(t)}" for t in differing[:3])
        raise ModelError(
            "target and draft have different tokenizers",
            found=f"{len(ours)} and {len(theirs)} tokens, {len(differing)} differ ({shown})",
            allowed="the same tokens with the same ids",
            fix="choose a draft of the same family",
        )
    cut = next((text for text in PROBES if target.encode(text) != draft.encode(text)), None)
    if cut is not None:
        raise ModelError(
            "target and draft have the same tokens but cut text differently",
            found=f"{cut!r} as {target.encode(cut)[:8]} and {draft.encode(cut)[:8]}",
            allowed="the same merges and special tokens",
            fix="choose a draft of the same family",
        )
