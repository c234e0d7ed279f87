"""The tokenizer that a GGUF header describes, as the content of a tokenizer.json. No torch.

The header has tokens, their kinds, and scores or merges. How a text is split before that it only names; where
the name is not known here, the model's tokenizer.json is needed next to the file, and used where it is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.formats.gguf_header import Header, read_header
from llama_ssp.models.formats.gguf_model import EMBEDDING, row_of

JsonStep = dict[str, Any]  # of a tokenizer.json
PREFIX = "tokenizer.ggml."
SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"  # kinds of tokenizers, whatever the architecture
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # kinds of tokens
SPACE_MARK = "\u2581"
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other added tokens take the space behind them
ENDINGS = ("eos", "eot", "eom")
# Tokens that end a turn; a header names one of them, where config files list all.
TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
MOST_PIECES = 2**28  # characters of tokens that are cut in two everywhere: real vocabularies have a tenth


@dataclass(frozen=True)
class Splitting:
    """How a byte-level tokenizer splits a text before merges."""

    steps: tuple[JsonStep, ...]
    whole: bool = False  # a piece that is a token is not merged
    composed: bool = False  # letters and their accents are made one character first
    begins: bool = False  # a text begins with the begin token, where the header does not say


def _expression(pattern: str) -> tuple[JsonStep, ...]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return split, _letters(own_split=False)


def _letters(own_split: bool) -> JsonStep:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": own_split}


def _words(digits: str) -> str:
    """GPT-4's expression, with this many digits in a piece."""
    letters, rest = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return rf"{ENGLISH}|{letters}|\p{{N}}{digits}|{rest}"


def _cased_words(digits: str, ending: str = "") -> str:
    """GPT-4o's, which splits before a capital letter."""
    before, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    )
    letters = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{letters}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = Splitting(_expression(_words("{1,3}")), whole=True, begins=True)
QWEN = Splitting(_expression(_words("")), composed=True)
SPLITTINGS = {
    "llama-bpe": LLAMA_3, "llama3": LLAMA_3, "llama-v3": LLAMA_3, "qwen2": QWEN, "deepseek-r1-qwen": QWEN,
    "dbrx": Splitting(_expression(_words("{1,3}"))), "gpt-2": Splitting((_letters(own_split=True),)),
    "gpt-4o": Splitting(_expression(_cased_words("{1,3}", f"{ENGLISH}?"))),
    "smollm": Splitting(({"type": "Digits", "individual_digits": True}, _letters(own_split=True))),
    "tekken": Splitting(_expression(_cased_words("")), whole=True, begins=True),
}  # fmt: skip


def read_content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What tokenizer.json and tokenizer_config.json would say; a ModelError if the header does not tell."""
    return _HeaderTokenizer(read_header(path)).content()


def require_same_tokens(path: Path, ids: Mapping[str, int]) -> None:
    """Refuses a tokenizer.json next to a GGUF file with the ids of another model."""
    tokens = _HeaderTokenizer(read_header(path)).tokens
    same = sum(i < len(tokens) and tokens[i] == name for name, i in ids.items())
    if tokens and same < len(ids) // 2:  # a few may be written otherwise
        what, fix = "the tokenizer.json next to the GGUF file is that of another model", "move it elsewhere"
        found = f"{same} of {len(ids)} tokens as in its header"
        raise ModelError(what, path.parent / "tokenizer.json", found, fix=f"{fix}, or the GGUF file")


def end_ids(path: Path) -> frozenset[int]:
    """All tokens that end a text."""
    reading = _HeaderTokenizer(read_header(path))
    named = {i for key in ENDINGS if (i := reading.token(key)) is not None}
    turn = {i for i, name in enumerate(reading.tokens) if name in TURN_ENDS and reading.kind(i) == CONTROL}
    return frozenset(named | turn)


class _HeaderTokenizer:
    def __init__(self, header: Header) -> None:
        self.header, self.path = header, header.path
        self.model = header.metadata.get(f"{PREFIX}model")
        self.tokens = self.texts("tokens")
        if self.model == SENTENCEPIECE:  # Gemma's tokens of several spaces are written with spaces
            self.tokens = [name if name.strip(" ") else SPACE_MARK * len(name) for name in self.tokens]
        kinds = header.metadata.get(f"{PREFIX}token_type")
        self.kinds = kinds if isinstance(kinds, array) and len(kinds) == len(self.tokens) else None
        rows = header.tensors[EMBEDDING].shape[0]
        if len(self.tokens) > rows:
            what = "the header's tokens are not those of the model"
            raise ModelError(what, self.path, f"{len(self.tokens)} tokens", f"at most {rows}", REFETCH)

    def content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.tokens:
            raise ModelError("the GGUF file has no tokenizer", self.path, "no tokens", fix=BESIDE)
        if self.model not in (BYTE_LEVEL, SENTENCEPIECE):
            raise self.unknown(f"the model {self.model!r}", f"{BYTE_LEVEL}, {SENTENCEPIECE}")
        steps = self.byte_level() if self.model == BYTE_LEVEL else self.sentencepiece()
        found = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": self.added(), **steps}
        names = {key: self.tokens[i] for key in ("bos", "eos") if (i := self.token(key)) is not None}
        settings = {f"{key}_token": name for key, name in names.items()}
        template = self.header.metadata.get("tokenizer.chat_template")
        return found, settings | ({"chat_template": template} if isinstance(template, str) else {})

    def byte_level(self) -> dict[str, Any]:
        """BPE over letters that stand for bytes."""
        name = self.header.metadata.get(f"{PREFIX}pre")
        splitting = SPLITTINGS.get(name) if isinstance(name, str) else None
        if splitting is None:
            raise self.unknown(f"splitting by {name!r}", ", ".join(SPLITTINGS))
        merges = [merge.split(" ") for merge in self.texts("merges")]
        if any(len(merge) != 2 for merge in merges):
            raise ModelError("a merge is not two pieces", self.path, fix=REFETCH)
        return {
            "normalizer": {"type": "NFC"} if splitting.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(splitting.steps)},
            "post_processor": self.around(splitting.begins),
            "decoder": _letters(own_split=True),
            "model": self.merging(merges, ignore_merges=splitting.whole),
        }

    def sentencepiece(self) -> dict[str, Any]:
        """BPE: merges follow from scores, with bytes for characters that have no token."""
        row = row_of(self.header)
        prefix = self.flag("add_space_prefix", row is None or row.space_before)
        marks: JsonStep = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
        spaces: JsonStep = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
        prepend: JsonStep = {"type": "Prepend", "prepend": SPACE_MARK}
        before: JsonStep = {"type": "Sequence", "normalizers": [prepend, marks]}
        strip: list[JsonStep] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
        merges = self.scored_merges(by_place=row is not None and not row.scored)
        unknown = self.token("unknown")
        decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        return {
            "normalizer": before if prefix else marks,
            "pre_tokenizer": None,
            "post_processor": self.around(begins=True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self.merging(
                merges, byte_fallback=True, fuse_unk=True,
                unk_token=None if unknown is None else self.tokens[unknown],
            ),
        }  # fmt: skip

    def merging(self, merges: list[list[str]], **settings: Any) -> JsonStep:
        absent = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
        off = ("fuse_unk", "byte_fallback", "ignore_merges")
        usual = {**dict.fromkeys(absent), **dict.fromkeys(off, False)}
        return {"type": "BPE", **usual, **settings, "vocab": self.vocabulary(), "merges": merges}

    def vocabulary(self) -> dict[str, int]:
        """Without the names of rows that only fill the embedding."""
        return {
            name: i for i, name in enumerate(self.tokens) if self.kind(i) != UNUSED or name != f"[PAD{i}]"
        }

    def added(self) -> list[JsonStep]:
        """Tokens that are found in a text before it is split."""
        found = []
        row = row_of(self.header)
        stripped = row is not None and row.stripped and self.model == SENTENCEPIECE
        for i, name in enumerate(self.tokens):
            kind = self.kind(i)
            if name.strip(SPACE_MARK) and kind in (CONTROL, USER_DEFINED):
                step = {"id": i, "content": name, "single_word": False, "lstrip": False, "normalized": False}
                found.append(
                    {**step, "rstrip": stripped and name not in UNSTRIPPED, "special": kind == CONTROL}
                )
        return found

    def around(self, begins: bool) -> JsonStep | None:
        """The tokens before and after every text."""
        before = self.token("bos") if self.flag("add_bos_token", begins) else None
        after = self.token("eos") if self.flag("add_eos_token", False) else None
        special = [i for i in (before, after) if i is not None]
        if not special:
            return None
        text = {"Sequence": {"id": "A", "type_id": 0}}
        pieces = [
            *([] if before is None else [_named(self.tokens[before])]), text,
            *([] if after is None else [_named(self.tokens[after])]),
        ]  # fmt: skip
        names = {
            self.tokens[i]: {"id": self.tokens[i], "ids": [i], "tokens": [self.tokens[i]]} for i in special
        }
        second = {"Sequence": {"id": "B", "type_id": 1}}
        return {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": [*pieces, second],
            "special_tokens": names,
        }

    def scored_merges(self, by_place: bool) -> list[list[str]]:
        """Each token as every two tokens that it is made of, the best score first.

        `by_place`: by the tokens' order; Gemma's scores are not those of its merges.
        """
        vocabulary, scores = self.vocabulary(), self.header.metadata.get(f"{PREFIX}scores")
        if not by_place and (not isinstance(scores, array) or len(scores) != len(self.tokens)):
            raise ModelError("the header has no score for each token", self.path, fix=BESIDE)
        pieces = sum(len(name) ** 2 for name in vocabulary)  # characters of all pieces
        if pieces > MOST_PIECES:
            found = f"{pieces} characters"
            raise ModelError("the header's tokens are too long", self.path, found, MOST_PIECES, REFETCH)
        found_at: list[tuple[float, int, int, list[str]]] = []
        for name, i in vocabulary.items():
            score = float(-i if by_place else scores[i])  # type: ignore[index]
            for cut in range(1, len(name)):
                left = vocabulary.get(name[:cut])
                right = None if left is None else vocabulary.get(name[cut:])
                if left is not None and right is not None:
                    found_at.append((-score, left, right, [name[:cut], name[cut:]]))
        return [merge for *_, merge in sorted(found_at, key=lambda each: each[:3])]

    def texts(self, key: str) -> list[str]:
        found = self.header.metadata.get(f"{PREFIX}{key}")
        return found if isinstance(found, list) else []

    def kind(self, i: int) -> int:
        return int(self.kinds[i]) if self.kinds is not None else 1

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.header.metadata.get(f"{PREFIX}{key}", default))

    def token(self, key: str) -> int | None:
        """The id of a token by its role."""
        found = self.header.metadata.get(f"{PREFIX}{key}_token_id")
        return found if type(found) is int and 0 <= found < len(self.tokens) else None

    def unknown(self, found: str, allowed: str) -> ModelError:
        return ModelError("the GGUF file's tokenizer is not known", self.path, found, allowed, BESIDE)


def _named(token: str) -> JsonStep:
    return {"SpecialToken": {"id": token, "type_id": 0}}


BESIDE = "put the model's tokenizer.json and tokenizer_config.json next to the GGUF file"
