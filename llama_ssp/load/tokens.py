"""Tokenizers: one interface, and the check that a pair speaks the same tokens."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, Protocol

from llama_ssp.errors import DataError, ModelError

log = logging.getLogger(__name__)

PROBES = [
    "The quick brown fox", " leading space", "trailing  ", "\n\n\tdef f(x):\n    return x ** 2",
    "1234567890 3.14159", "naïve café", "日本語のテキスト", "🙂🙃", "a\u0301", "<s></s>", "(){}[]", "'\"\\",
]  # fmt: skip


class Tokens(Protocol):
    """Text to token ids and back."""

    end_ids: frozenset[int]
    bos_id: int | None
    size: int  # ids from here on have no token: rows that pad a model's vocabulary

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def chat(self, text: str, system: str | None) -> list[int]: ...

    def converse(self, messages: list[dict[str, str]]) -> list[int]: ...


class HubTokens:
    """A Hugging Face tokenizer, read from a local folder."""

    def __init__(self, path: Path, end_ids: frozenset[int]) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except Exception as error:  # the Rust tokenizers raise bare Exceptions
            raise _unreadable(path, str(error)) from None
        if not len(self._tokenizer):
            raise _unreadable(path, "no tokens")
        own = self._tokenizer.eos_token_id
        self.end_ids = end_ids or (frozenset({own}) if own is not None else frozenset())
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.size = 1 + max(self.vocabulary().values(), default=-1)

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
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is the model's own program and may raise anything
            raise DataError(
                "the model's chat template refuses the prompt", where="task.chat=true",
                found=str(error)[:200], fix="leave out task.system, or use task.chat=false",
            ) from None  # fmt: skip
        ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False)
        return ids

    def converse(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation, of `role` and `content`, by the model's own template, up to where it answers."""
        if messages[-1]["role"] == "user" and all(m["role"] == "system" for m in messages[:-1]):
            return self.chat(messages[-1]["content"], "\n".join(m["content"] for m in messages[:-1]) or None)
        raise DataError(
            "conversations of several turns are not served", fix="give a system and a user message"
        )

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def fingerprint(self) -> str:
        """A hash of every token with its id, and of how a set of strings is cut."""
        content = [sorted(self.vocabulary().items()), [self.encode(text) for text in PROBES]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _unreadable(path: Path, found: str) -> ModelError:
    return ModelError(
        "the tokenizer cannot be read", where=str(path), found=found[:200],
        fix="put the model's tokenizer.json and tokenizer_config.json beside its weights",
    )  # fmt: skip


class ByteTokens:
    """Bytes as tokens, for models without a tokenizer (synthetic weights). Ids above 255 have no text."""

    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None

    def __init__(self, vocab: int) -> None:
        self.size = vocab

    def encode(self, text: str) -> list[int]:
        return [byte % self.size for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) if 32 <= i < 127 or i == 10 else f"<{i}>" for i in ids)

    def chat(self, text: str, system: str | None) -> list[int]:
        raise DataError("synthetic models have no chat template", fix="use task.chat=false")

    def converse(self, messages: list[dict[str, str]]) -> list[int]:
        return self.chat("", None)


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


def require_same_tokens(target: Tokens, draft: Tokens, widths: tuple[int, int]) -> None:
    """Refuses a pair whose ids mean different things.

    `widths` are how many logits each has: they may differ by padding, which no token stands for.
    """
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
    beyond = sorted(t for t, i in ours.items() if min(widths) <= i < max(widths))
    if beyond:
        raise ModelError(
            "target and draft have the same tokens but not the same vocabulary sizes",
            found=f"{widths[0]} and {widths[1]} logits, {len(beyond)} tokens only in the larger "
            f"({', '.join(map(repr, beyond[:3]))})",
            allowed="sizes that differ by padding only", fix="choose a draft of the same family",
        )  # fmt: skip
    if target.end_ids != draft.end_ids:
        log.warning(
            "target and draft end texts with different tokens: %s and %s; the target's hold",
            sorted(target.end_ids), sorted(draft.end_ids),
        )  # fmt: skip
