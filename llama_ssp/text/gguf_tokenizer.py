"""The tokenizer that a GGUF header describes, by transformers' merges and its ways to split texts. No torch.

Not by transformers' conversion of a whole tokenizer: that adds tokens that the model has no row for, and
leaves out special tokens with characters that are not in the byte alphabet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.families import FAMILIES, GGUF_FAMILIES, Gguf

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # kinds of tokens
SPACE_MARK = "\u2581"
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other added tokens take the space behind them
# Tokens that end a turn; a header names one of them, where config files list all.
TURN_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
)  # fmt: skip
# What transformers' table lacks: kinds that split as GPT-2 does; those where a piece that is a token is not
# merged, and a text has a begin token; those where letters and their accents are made one character first.
GPT_2, WHOLE = ("gpt-2", "smollm"), ("llama-bpe", "llama3", "llama-v3", "tekken")
COMPOSED = ("qwen2", "deepseek-r1-qwen")
MAX_PIECES = 2**28  # characters of tokens that are cut in two everywhere: real vocabularies have a tenth
BESIDE = "put the model's tokenizer.json and tokenizer_config.json next to the GGUF file"


class HeaderTokens:
    """The tokens of a header, and what it says of them."""

    def __init__(self, path: Path) -> None:
        from llama_ssp.models.formats.gguf_header import read_header  # imports gguf

        metadata = read_header(path).metadata
        self.said = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        self.row = FAMILIES[GGUF_FAMILIES[metadata["general.architecture"]]].gguf or Gguf("")
        names, kinds = self.said.get("tokens"), self.said.get("token_type")
        self.names = [str(name) for name in names] if isinstance(names, list) else []
        self.marked = self.said.get("model") == "llama"  # SentencePiece, whatever the architecture
        if self.marked:  # Gemma's tokens of several spaces are written with spaces
            self.names = [name if name.strip(" ") else SPACE_MARK * len(name) for name in self.names]
        said = isinstance(kinds, list) and len(kinds) == len(self.names)
        self.kinds: list[Any] = kinds if said else [1] * len(self.names)  # type: ignore[assignment]

    def role(self, key: str) -> list[int]:
        """Returns the id of the token with this role, if there is one."""
        i = self.said.get(f"{key}_token_id")
        return [i] if type(i) is int and 0 <= i < len(self.names) else []


def require_same_tokens(path: Path, ids: Mapping[str, int]) -> None:
    """Refuses a tokenizer.json next to a GGUF file with the ids of another model."""
    names = HeaderTokens(path).names
    same = sum(i < len(names) and names[i] == name for name, i in ids.items())
    if names and same < len(ids) // 2:  # a few may be written otherwise
        what, fix = "the tokenizer.json next to the GGUF file is that of another model", "move it elsewhere"
        found = f"{same} of {len(ids)} tokens as in its header"
        raise ModelError(what, path.parent / "tokenizer.json", found, fix=f"{fix}, or the GGUF file")


def end_ids(path: Path) -> frozenset[int]:
    """Returns all tokens that end a text."""
    tokens = HeaderTokens(path)
    turns = (i for i, name in enumerate(tokens.names) if name in TURN_ENDS and tokens.kinds[i] == CONTROL)
    return frozenset([*tokens.role("eos"), *tokens.role("eot"), *tokens.role("eom"), *turns])


def read_tokenizer(path: Path) -> Any:
    """Returns transformers' tokenizer; a ModelError if the header does not say how texts are split."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, __version__
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    if not hasattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS"):
        what = "this transformers cannot make a GGUF file's tokenizer"
        raise ModelError(what, path, __version__, "5.18 and later", f"update transformers, or {BESIDE}")
    tokens = HeaderTokens(path)
    said, names, row, marked = tokens.said, tokens.names, tokens.row, tokens.marked
    kind, pre, known = said.get("model"), said.get("pre"), (*GPT_2, *mapping.GGUF_PRE_TOKENIZER_SPLITS)
    if not marked and (kind != "gpt2" or pre not in known):
        what, allowed = "the GGUF file's tokenizer is not known", f"llama, or gpt2 by {', '.join(known)}"
        raise ModelError(what, path, f"{kind} by {pre!r}", allowed, BESIDE)
    if not names or sum(len(name) ** 2 for name in names) > MAX_PIECES:
        what = "the GGUF file has no tokenizer, or tokens that are too long"
        raise ModelError(what, path, f"{len(names)} tokens", fix=BESIDE)
    tokenizer = _merging(tokens, mapping.get_merges)
    style = "phi3" if said.get("add_space_prefix", row.space_before) else "gemma3"  # of SentencePiece
    empty: dict[str, Any] = {"tokenizer_type": kind, "pre_tokenizer_type": pre, "tokens": [], "merges": []}
    frame, _ = mapping.convert_gguf_tokenizer(style, empty)
    tokenizer.normalizer, tokenizer.decoder = frame.normalizer, frame.decoder
    steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, *filter(None, [frame.pre_tokenizer])])
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    strips = row.stripped and marked
    added = [
        AddedToken(name, rstrip=strips and name not in UNSTRIPPED, normalized=False, special=each == CONTROL)
        for name, each in zip(names, tokens.kinds, strict=True)
        if name.strip(SPACE_MARK) and each in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    roles = {f"{key}_token": names[i] for key in ("bos", "eos") for i in tokens.role(key)}
    begins, template = said.get("add_bos_token", marked or pre in WHOLE), said.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        add_bos_token=bool(begins) and "bos_token" in roles,
        add_eos_token=bool(said.get("add_eos_token")) and "eos_token" in roles,
        chat_template=template if isinstance(template, str) else None,
        **roles,
    )


def _merging(tokens: HeaderTokens, get_merges: Any) -> Any:
    """Returns a BPE; merges that are not listed follow from scores, or for Gemma from the tokens' places."""
    from tokenizers import Tokenizer, models

    names, marked, count = tokens.names, tokens.marked, len(tokens.names)
    scores = tokens.said.get("scores", ()) if tokens.row.scored else range(0, -count, -1)
    merges = get_merges(tokens.said | {"tokens": names}, dict(zip(names, scores, strict=marked)))
    rest = next((names[i] for i in tokens.role("unknown")), None) if marked else None
    # Without the names of rows that only fill the embedding.
    ids = {name: i for i, name in enumerate(names) if tokens.kinds[i] != UNUSED or name != f"[PAD{i}]"}
    whole = tokens.said.get("pre") in WHOLE
    how = {"byte_fallback": marked, "fuse_unk": marked, "unk_token": rest, "ignore_merges": whole}
    return Tokenizer(models.BPE(ids, merges, **how))
