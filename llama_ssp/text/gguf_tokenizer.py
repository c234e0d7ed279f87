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
        if self.said.get("model") == "llama":  # Gemma's tokens of several spaces are written with spaces
            self.names = [name if name.strip(" ") else SPACE_MARK * len(name) for name in self.names]
        same = isinstance(kinds, list) and len(kinds) == len(self.names)
        self.kinds = kinds if same else [1] * len(self.names)

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
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    tokens = HeaderTokens(path)
    said, names, row, count = tokens.said, tokens.names, tokens.row, len(tokens.names)
    kind, pre, marked = said.get("model"), said.get("pre"), said.get("model") == "llama"
    known = (*GPT_2, *mapping.GGUF_PRE_TOKENIZER_SPLITS)
    if not marked and (kind != "gpt2" or pre not in known):
        what, allowed = "the GGUF file's tokenizer is not known", f"llama, or gpt2 by {', '.join(known)}"
        raise ModelError(what, path, f"{kind} by {pre!r}", allowed, BESIDE)
    if not names or sum(len(name) ** 2 for name in names) > MAX_PIECES:
        what = "the GGUF file has no tokenizer, or tokens that are too long"
        raise ModelError(what, path, f"{count} tokens", fix=BESIDE)
    scores = dict(zip(names, said.get("scores", ()) if row.scored else range(0, -count, -1), strict=marked))
    every = list(
        enumerate(zip(names, tokens.kinds, strict=True))
    )  # some names only fill rows of the embedding
    ids = {name: i for i, (name, each) in every if each != UNUSED or name != f"[PAD{i}]"}
    unknown = next((names[i] for i in tokens.role("unknown")), None) if marked else None
    merges, whole = mapping.get_merges(said | {"tokens": names}, scores), pre in WHOLE and not marked
    how = {"byte_fallback": marked, "fuse_unk": marked, "unk_token": unknown, "ignore_merges": whole}
    made = Tokenizer(models.BPE(ids, merges, **how))
    prefix = said.get("add_space_prefix", row.space_before)
    style = "phi3" if prefix else "gemma3"  # of sentencepiece
    frame, _ = mapping.convert_gguf_tokenizer(
        style, {"tokenizer_type": kind, "pre_tokenizer_type": pre, "tokens": [], "merges": []}
    )
    made.normalizer = normalizers.NFC() if pre in COMPOSED and not marked else frame.normalizer
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*digits, *filter(None, [frame.pre_tokenizer])])
    made.decoder = frame.decoder
    for name, each in zip(names, tokens.kinds, strict=True):
        if name.strip(SPACE_MARK) and each in (CONTROL, USER_DEFINED):
            strips = row.stripped and marked and name not in UNSTRIPPED
            made.add_tokens([AddedToken(name, rstrip=strips, normalized=False, special=each == CONTROL)])
    roles = {f"{key}_token": names[i] for key in ("bos", "eos") for i in tokens.role(key)}
    begins, template = said.get("add_bos_token", marked or whole), said.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        add_bos_token=bool(begins) and "bos_token" in roles,
        add_eos_token=bool(said.get("add_eos_token")) and "eos_token" in roles,
        chat_template=template if isinstance(template, str) else None,
        **roles,
    )
