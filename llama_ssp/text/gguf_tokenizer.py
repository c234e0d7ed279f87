"""The tokenizer that a GGUF header describes, by transformers' merges and its ways to split texts. No torch.

It is kept for later starts, which import transformers for chats alone.

Not by transformers' conversion of a whole tokenizer: that adds tokens that the model has no row for, and
leaves out special tokens with characters that are not in the byte alphabet.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.kept_files import kept

# Kinds of tokens.
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
ROLES = ("bos", "unknown", "eos", "eot", "eom")  # the last three end a text
SPACE_MARK = "\u2581"
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other added tokens take the space after them
# Tokens that end a turn; a header names one of them, where config files list all.
TURN_ENDS = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
]
# What transformers' table lacks: kinds that split as GPT-2 does; those where a piece that is a token is not
# merged, and a text has a begin token; those where letters and their accents are made one character first.
GPT_2 = ("gpt-2", "smollm")
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")
COMPOSED = ("qwen2", "deepseek-r1-qwen")
MAX_PIECES = 2**28  # characters of tokens that are cut in two everywhere: real vocabularies have a tenth
BESIDE = "put the model's tokenizer.json and tokenizer_config.json next to the GGUF file"


class HeaderTokens:
    """The tokens of a header, and what it says of them."""

    def __init__(self, path: Path) -> None:
        from llama_ssp.models.formats.gguf_header import read_header  # imports gguf

        header = read_header(path)
        self.row = header.family.gguf
        self.said = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
        names = self.said.get("tokens")
        kinds = self.said.get("token_type")
        self.names = [str(name) for name in names] if isinstance(names, list) else []
        self.marked = self.said.get("model") == "llama"  # SentencePiece, whatever the architecture
        if self.marked:  # Gemma's tokens of several spaces are written with spaces
            self.names = [name if name.strip(" ") else SPACE_MARK * len(name) for name in self.names]
        said = isinstance(kinds, list) and len(kinds) == len(self.names)
        self.kinds: list[Any] = kinds if said else [1] * len(self.names)  # type: ignore[assignment]
        self.ids = {key: self.said[at] for key in ROLES if (at := f"{key}_token_id") in self.said}
        if any(i not in range(len(self.names) or 2**31) for i in self.ids.values()):
            raise ModelError(
                "the header names a token that is not in its vocabulary",
                where=path,
                found=self.ids,
                allowed=f"below {len(self.names)}",
                fix="fetch the model again",
            )


def require_same_tokens(path: Path, ids: Mapping[str, int]) -> None:
    """Refuses a tokenizer.json next to a GGUF file with the ids of another model."""
    names = HeaderTokens(path).names
    same = sum(i < len(names) and names[i] == name for name, i in ids.items())
    if names and same < len(ids) // 2:  # a few may be written otherwise
        what = "the tokenizer.json next to the GGUF file is that of another model"
        fix = "move it elsewhere"
        raise ModelError(
            what,
            where=path.parent / "tokenizer.json",
            found=f"{same} of {len(ids)} tokens as in its header",
            fix=f"{fix}, or the GGUF file",
        )


def end_ids(path: Path) -> frozenset[int]:
    """Returns all tokens that end a text."""
    tokens = HeaderTokens(path)
    turns = (i for i, name in enumerate(tokens.names) if name in TURN_ENDS and tokens.kinds[i] == CONTROL)
    return frozenset([*(i for key, i in tokens.ids.items() if key in ROLES[2:]), *turns])


class HeaderTokenizer:
    """The tokenizer of a header, with the names of transformers' own."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the header does not say how texts are split."""
        from tokenizers import Tokenizer

        from llama_ssp.models.formats.gguf_header import read_header  # imports gguf

        facts = read_header(path).digest + Path(__file__).read_text(encoding="utf-8")
        content, self._settings = kept("tokenizer", facts, partial(_made, path))
        self.backend_tokenizer: Any = Tokenizer.from_str(content)
        self.chat_template = self._settings["chat_template"]
        roles = (self._settings.get(name) for name in ("bos_token", "eos_token"))
        self.all_special_ids = [role and self.backend_tokenizer.token_to_id(role) for role in roles]
        self.bos_token_id, self.eos_token_id = self.all_special_ids
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        self.get_vocab = self.backend_tokenizer.get_vocab
        self.decode = self.backend_tokenizer.decode

    def encode(self, text: str, add_special_tokens: bool, split_special_tokens: bool) -> Any:
        """Returns the text's ids."""
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    @cached_property
    def apply_chat_template(self) -> Any:
        """transformers' way to write a conversation as a text."""
        from transformers import PreTrainedTokenizerFast

        hub = PreTrainedTokenizerFast(tokenizer_object=self.backend_tokenizer, **self._settings)
        return hub.apply_chat_template


def _made(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns what would be the content of tokenizer.json, and settings by transformers' names."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    tokens = HeaderTokens(path)
    said = tokens.said
    names = tokens.names
    row = tokens.row
    marked = tokens.marked
    kind = said.get("model")
    pre = said.get("pre")
    known = (*GPT_2, *mapping.GGUF_PRE_TOKENIZER_SPLITS)
    if not marked and (kind != "gpt2" or pre not in known):
        raise ModelError(
            "the GGUF file's tokenizer is not known",
            where=path,
            found=f"{kind} by {pre!r}",
            allowed=f"llama, or gpt2 by {', '.join(known)}",
            fix=BESIDE,
        )
    if not names or sum(len(name) ** 2 for name in names) > MAX_PIECES:
        raise ModelError("the GGUF file has no tokens, or some that are too long", where=path, fix=BESIDE)
    # Merges that are not listed follow from scores, or for Gemma from the tokens' places.
    scores = said.get("scores", ()) if row.scored else range(0, -len(names), -1)
    merges = mapping.get_merges(said | {"tokens": names}, dict(zip(names, scores, strict=marked)))
    roles = {f"{key}_token": names[i] for key, i in tokens.ids.items() if key in ("bos", "eos")}
    unknown = names[tokens.ids["unknown"]] if marked and "unknown" in tokens.ids else None
    # Without the names of rows that only fill the embedding.
    ids = {name: i for i, name in enumerate(names) if tokens.kinds[i] != UNUSED or name != f"[PAD{i}]"}
    how = {"byte_fallback": marked, "fuse_unk": marked, "unk_token": unknown, "ignore_merges": pre in WHOLE}
    tokenizer = Tokenizer(models.BPE(ids, merges, **how))
    style = "phi3" if said.get("add_space_prefix", row.space_before) else "gemma3"  # of SentencePiece
    empty: dict[str, Any] = {"tokenizer_type": kind, "pre_tokenizer_type": pre, "tokens": [], "merges": []}
    frame, _ = mapping.convert_gguf_tokenizer(style, empty)
    tokenizer.normalizer = normalizers.NFC() if pre in COMPOSED else frame.normalizer
    steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, *filter(None, [frame.pre_tokenizer])])
    tokenizer.decoder = frame.decoder
    strips = row.stripped and marked
    added = [
        AddedToken(name, rstrip=strips and name not in UNSTRIPPED, normalized=False, special=each == CONTROL)
        for name, each in zip(names, tokens.kinds, strict=True)
        if name.strip(SPACE_MARK) and each in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    begins = "bos_token" in roles and bool(said.get("add_bos_token", marked or pre in WHOLE))
    settings = {"chat_template": said.get("tokenizer.chat_template"), **roles}
    hub = PreTrainedTokenizerFast(tokenizer_object=tokenizer, add_bos_token=begins, **settings)
    return hub.backend_tokenizer.to_str(), settings
