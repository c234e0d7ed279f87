"""Prompts of any characters: to tokens and back, as they stream, cut by stop strings, on a screen, in a chat."""

from __future__ import annotations

import io
import tempfile
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from rich.cells import cell_len
from rich.console import Console

from llama_ssp.errors import DataError
from llama_ssp.report.live_view import Scene
from llama_ssp.report.timeline import Track
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.detokenizer import Detokenizer, Writing, visible
from llama_ssp.text.tokenizer import HubTokens, Tokens, conversation, read_tokens
from tests import checkpoints
from tests.fuzz.nasty import LETTERS, NASTY
from tests.fuzz.trial import Trial

SHIPPED = Path(__file__).resolve().parents[2] / "llama_ssp" / "shipped"
BEGIN, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PIECES = (
    "def f(x):\n    return", "7 * 8 = ", "naïve café", "漢字かな", "👩‍👩‍👧‍👦", "e\u0301\u0302", "\u202eabc\u202c", "\r\n", "\t", "  ", "\n\n\n",
    "<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|im_", "<0x41>", "<0xFF>", "\u2581", "Ġ", "Ċ", "\ufffd", "\ufeff",
    "\ue000", "\ue0000\ue000", "\U0010ffff", "\x1b[2J", "\x07", "\u2028", "\u0085", "ﬁ", "İ", "ß", "aaaaaaaaaaaaaaaa", "0" * 40,
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """`of` is the tokenizer that reads it."""

    of: str
    text: str
    stops: tuple[str, ...]
    size: tuple[int, int]
    blocks: int


@cache
def tokenizers() -> dict[str, Tokens]:
    with tempfile.TemporaryDirectory() as folder:
        own = checkpoints.tokenizer()
        own.add_special_tokens([BEGIN, END])
        checkpoints.write_tokenizer(Path(folder), own, chat_template=CHATML)
        chats = read_tokens(Path(folder), 400)
    return {
        "demo": read_tokens(SHIPPED / "demo", 0), "bytes": read_tokens(None, 256), "chats": chats,
    }  # fmt: skip


def made(random: Random) -> Prompt:
    def text(most: int) -> str:
        parts = (
            random.choice(
                (random.choice(PIECES), random.choice(LETTERS), random.choice(NASTY)[:300], chr(_any(random)))
            )
            for _ in range(random.randrange(most))
        )
        return "".join(c for c in "".join(parts) if c != "\0" and not "\ud800" <= c <= "\udfff")

    written = text(12)
    stops = [stop for stop in (text(3), written[1:3], "\n") if stop and random.random() < 0.4]
    of = random.choice(tuple(tokenizers()))
    return Prompt(
        of,
        written,
        tuple(stops),
        (random.randrange(8, 130), random.randrange(16, 60)),
        random.randrange(1, 6),
    )


def _any(random: Random) -> int:
    return random.choice(
        (random.randrange(1, 0x300), random.randrange(1, 0xD800), random.randrange(0xE000, 0x110000))
    )


def tried(made: Prompt) -> Trial:
    tokens = tokenizers()[made.of]
    ids = tokens.encode(made.text)
    wrong = [f"token {i}" for i in ids if not 0 <= i < tokens.size][:1]
    whole = tokens.decode(ids)
    if made.of != "bytes" and whole != made.text:
        wrong.append(f"comes back as {whole!r:.200}")
    wrong += _streams(tokens, ids, whole) + _stops(tokens, ids, whole, made)
    shown = visible(made.text)
    if any(unicodedata.category(c) in ("Cc", "Cs") and c != "\n" for c in shown):
        wrong.append(f"not harmless on a terminal: {shown!r:.200}")
    error = str(DataError("x", found=made.text, where=made.text[:50]))
    if len(error.splitlines()) > 1:
        wrong.append("an error of two lines")
    outcome = made.of
    if made.blocks == 1:
        wrong += _on_screen(made)
    if isinstance(tokens, HubTokens) and made.of == "chats":
        wrong += _chat(tokens, made.text)
    return Trial(outcome, tuple(wrong), repr(made)[:1000] if wrong else "")


def _streams(tokens: Tokens, ids: list[int], whole: str) -> list[str]:
    """Pieces add up to the text."""
    stream = Detokenizer(tokens.decode, [])
    said = "".join([*map(stream.push, ids), stream.end()])
    return [] if said == whole else [f"streams as {said!r:.100}, not {whole!r:.100}"]


def _stops(tokens: Tokens, ids: list[int], whole: str, made: Prompt) -> list[str]:
    """What is printed is the text, and no stop string is in it."""
    writing, printed, ended = Writing(tokens.decode, [()], list(made.stops)), "", False
    for start in range(0, len(ids), made.blocks):
        block = ids[start : start + made.blocks]
        ended = writing.kept(0, block, start + len(block) == len(ids)) is not None
        printed += writing.printable(0, ended)
        if ended:
            break
    printed += writing.printable(0, True)
    text = writing.text(0)
    wrong = [] if printed == text else [f"printed {printed!r:.100}, wrote {text!r:.100}"]
    wrong += [] if whole.startswith(text) else [f"wrote {text!r:.100} of {whole!r:.100}"]
    wrong += [] if ended or text == whole else [f"wrote {text!r:.100}, not {whole!r:.100}"]
    return wrong + [f"stop string {stop!r} in {text!r:.100}" for stop in made.stops if stop in text]


def _on_screen(made: Prompt) -> list[str]:
    width, height = made.size
    half = max(1, len(made.text) // 2)
    pieces = [(made.text[at : at + half], "drafted") for at in range(0, len(made.text), half)]
    rounds = Counts(
        row_rounds=len(pieces), drafted=Counter(range(4)), accepted=Counter(range(2)), committed=Counter(range(3)),
        accepted_lengths=Counter({2: len(pieces)}), prefill_s=0.1, decode_s=0.1 * len(pieces),
    )  # fmt: skip
    counts = rounds if pieces else Counts()
    tracks = Track("regular", counts, pieces), Track("speculative", counts, pieces[::-1], "stop")
    scene = Scene(made.text, *tracks)
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=False, highlight=False, color_system=None,
                      _environ={})  # fmt: skip
    console.print(scene.end(whole=False), height=height)
    lines = file.getvalue().removesuffix("\n").split("\n")
    wrong = [] if len(lines) <= height else [f"{len(lines)} lines on a screen of {height}"]
    wide = max(map(cell_len, lines))
    return wrong + ([] if wide <= width else [f"{wide} columns on a screen of {width}"])


def _chat(tokens: HubTokens, text: str) -> list[str]:
    """Names of special tokens that a person types are text."""
    ids = tokens.chat(conversation(text, None))
    marks = [tokens.encode(mark, special=True)[-1] for mark in (BEGIN, END)]
    found = [ids.count(mark) for mark in marks]
    return [] if found == [2, 1] else [f"a chat with {found} marks, not [2, 1]"]
