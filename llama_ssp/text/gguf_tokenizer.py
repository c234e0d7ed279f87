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
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
ENDS = ("eos", "eot", "eom")  # tokens that end a text
ROLES = ("bos", "unknown", *ENDS)
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
COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen")
MAX_PIECES = 2**28  # characters of tokens that are cut in two everywhere: real vocabularies have a tenth
BESIDE = "put the model's tokenizer.json and tokenizer_config.json next to the GGUF file"


class HeaderTokens:
    """The tokens of a header, and what it says of them."""

    def __init__(self, path: Path) -> None:
        from llama_ssp.models.formats.gguf_header import read_header  # imports gguf

        header = read_header(path)
        self.row = header.row
        self.said = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
        names = self.said.get("tokens")
        self.names = [str(name) for name in names] if isinstance(names, list) else []
        self.marked = self.said.get("model") == "llama"  # SentencePiece, whatever the architecture
        if self.marked:  # Gemma's tokens of several spaces are written with spaces
            self.names = [name if name.strip(" ") else SPACE_MARK * len(name) for name in self.names]

        self.kinds: list[Any] = [NORMAL] * len(self.names)
        kinds = self.said.get("token_type")
        if isinstance(kinds, list) and len(kinds) == len(self.names):
            self.kinds = kinds

        self.ids: dict[str, Any] = {}
        for role in ROLES:
            if f"{role}_token_id" in self.said:
                self.ids[role] = self.said[f"{role}_token_id"]
        known_ids = range(len(self.names) or 2**31)
        if any(token_id not in known_ids for token_id in self.ids.values()):
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
    same = sum(token_id < len(names) and names[token_id] == name for name, token_id in ids.items())
    if names and same < len(ids) // 2:  # a few may be written otherwise
        raise ModelError(
            "the tokenizer.json next to the GGUF file is that of another model",
            where=path.parent / "tokenizer.json",
            found=f"{same} of {len(ids)} tokens as in its header",
            fix="move it elsewhere, or the GGUF file",
        )


def end_ids(path: Path) -> frozenset[int]:
    """Returns all tokens that end a text."""
    tokens = HeaderTokens(path)
    named = {token_id for role, token_id in tokens.ids.items() if role in ENDS}
    kinds = zip(tokens.names, tokens.kinds, strict=True)
    turns = {i for i, (name, kind) in enumerate(kinds) if name in TURN_ENDS and kind == CONTROL}
    return frozenset(named | turns)


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
        self.bos_token_id = self._id_of(self._settings["bos_token"])
        self.eos_token_id = self._id_of(self._settings["eos_token"])
        self.all_special_ids = [self.bos_token_id, self.eos_token_id]
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        self.get_vocab = self.backend_tokenizer.get_vocab
        self.decode = self.backend_tokenizer.decode

    def _id_of(self, name: str | None) -> Any:
        return self.backend_tokenizer.token_to_id(name) if name else None

    def encode(self, text: str, add_special_tokens: bool, split_special_tokens: bool) -> Any:
        """Returns the text's ids."""
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def get_chat_template(self, tools: Any = None) -> Any:
        """Returns the template, which is the same with `tools`."""
        return self.chat_template

    @cached_property
    def apply_chat_template(self) -> Any:
        """transformers' way to write a conversation as a text."""
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            chat_template=self.chat_template,
            bos_token=self._settings["bos_token"],
            eos_token=self._settings["eos_token"],
        )
        return tokenizer.apply_chat_template


def _made(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns what would be the content of tokenizer.json, and settings by transformers' names."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, __version__
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    if not hasattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS"):
        raise ModelError(
            "this transformers cannot make a GGUF file's tokenizer",
            where=path,
            found=f"transformers {__version__}",
            allowed="5.18 or later",
            fix=f"update transformers, or {BESIDE}",
        )

    tokens = HeaderTokens(path)
    said = tokens.said
    names = tokens.names
    marked = tokens.marked
    algorithm = said.get("model")
    splits = said.get("pre")
    known_splits = (*GPT_2, *mapping.GGUF_PRE_TOKENIZER_SPLITS)
    if not marked and (algorithm != "gpt2" or splits not in known_splits):
        raise ModelError(
            "the GGUF file's tokenizer is not known",
            where=path,
            found=f"{algorithm} by {splits!r}",
            allowed=f"llama, or gpt2 by {', '.join(known_splits)}",
            fix=BESIDE,
        )
    if not names or sum(len(name) ** 2 for name in names) > MAX_PIECES:
        raise ModelError("the GGUF file has no tokens, or some that are too long", where=path, fix=BESIDE)

    # Merges that are not listed follow from scores, or for Gemma from the tokens' places.
    scores = said.get("scores", ()) if tokens.row.scored else range(0, -len(names), -1)
    merges = mapping.get_merges(said | {"tokens": names}, dict(zip(names, scores, strict=marked)))
    vocabulary = {
        name: token_id
        for token_id, (name, kind) in enumerate(zip(names, tokens.kinds, strict=True))
        if kind != UNUSED or name != f"[PAD{token_id}]"  # a name of a row that only fills the embedding
    }
    unknown = names[tokens.ids["unknown"]] if marked and "unknown" in tokens.ids else None
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=unknown,
            fuse_unk=marked,
            byte_fallback=marked,
            ignore_merges=splits in WHOLE,
        )
    )

    # How texts are split, and tokens joined, as in transformers' conversion of a header without tokens.
    style = "phi3" if said.get("add_space_prefix", tokens.row.space_before) else "gemma3"  # of SentencePiece
    frame, _ = mapping.convert_gguf_tokenizer(
        style,
        {"tokenizer_type": algorithm, "pre_tokenizer_type": splits, "tokens": [], "merges": []},
    )
    tokenizer.normalizer = normalizers.NFC() if splits in COMPOSED else frame.normalizer
    steps = []
    if splits == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if frame.pre_tokenizer is not None:
        steps.append(frame.pre_tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = frame.decoder

    strips = marked and tokens.row.stripped
    added = [
        AddedToken(name, rstrip=strips and name not in UNSTRIPPED, normalized=False, special=kind == CONTROL)
        for name, kind in zip(names, tokens.kinds, strict=True)
        if name.strip(SPACE_MARK) and kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)

    chat_template = said.get("tokenizer.chat_template")
    begin = names[tokens.ids["bos"]] if "bos" in tokens.ids else None
    end = names[tokens.ids["eos"]] if "eos" in tokens.ids else None
    begins = begin is not None and bool(said.get("add_bos_token", marked or splits in WHOLE))
    hub = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=begins,
        chat_template=chat_template,
        bos_token=begin,
        eos_token=end,
    )
    settings = {"chat_template": chat_template, "bos_token": begin, "eos_token": end}
    return hub.backend_tokenizer.to_str(), settings
