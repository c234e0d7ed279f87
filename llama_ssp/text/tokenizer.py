"""Tokenizers: prompts and chats to token ids and back, and the check of a pair's vocabularies."""

import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from llama_ssp.config import Bridging
from llama_ssp.config.environment import importing
from llama_ssp.errors import DataError, ModelError, UsageError
from llama_ssp.models.folder import is_gguf
from llama_ssp.models.library_log import quiet_library
from llama_ssp.text.compatibility import Diagnosis, pair
from llama_ssp.text.detokenizer import Stop
from llama_ssp.text.gguf_tokenizer import HeaderTokenizer, require_same_tokens
from llama_ssp.text.messages import Message
from llama_ssp.text.template_trial import excess_of
from llama_ssp.text.thoughts import USUAL, Thoughts, ThoughtStream, thoughts_of
from llama_ssp.text.vocabulary import (
    Vocabulary,
    ends_with_token,
    notation_guessed,
    template_of,
    tokenizer_folder,
    tokenizing,
    vocabulary_of,
)

log = logging.getLogger(__name__)

PIECES = "tokenizer.model"  # of SentencePiece or tiktoken, where there is no tokenizer.json
# Enclose the name of a special token that a message has, to find it in a rendered template.
BEGIN_MARK = "\ue000"
END_MARK = "\ue001"
MARK_TOKENS = 32  # at the end of a prompt, which show whether it begins a thought
WORD = "7046215937"  # begins a message that no template rewrites, to see whether it is rendered at all
# What transformers warns of once for each tokenizer, unless it has.
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"


class Tokens:
    """Text to token ids and back. This base class is for models without a tokenizer (synthetic weights).

    Its tokens are bytes; ids above 255 have no text.
    """

    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_id: int | None = None  # the one that the tokenizer names; `end_ids` may have others
    template = ""  # of chats
    paired: Diagnosis | None = None  # with the draft's tokenizer; None without one, and for bytes

    def __init__(self, size: int) -> None:
        self.size = size  # larger ids have no token: rows that pad a model's vocabulary

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """Returns the meaning of the ids; None for bytes."""
        return None

    @cached_property
    def thoughts(self) -> Thoughts:
        """Returns how the model marks what it thinks."""
        return USUAL

    def thought_stream(self, prompt: Sequence[int]) -> ThoughtStream:
        """Returns what divides the text after this prompt into thoughts and answer."""
        end = self.decode(list(prompt[-MARK_TOKENS:]))
        return ThoughtStream(self.thoughts, begins=self.thoughts.are_open_after(end))

    @property
    def library(self) -> Any:
        """Returns transformers' tokenizer, to be read; None where none was loaded (bytes, a GGUF header)."""
        return None

    @property
    def has_template(self) -> bool:
        """Returns whether there is a chat template, so that `chat` can be called."""
        return bool(self.template)

    def encode(self, text: str, special: bool = False, begin: bool = True) -> list[int]:
        """Returns a text's ids. Names of special tokens in it are read as text, with `special` as tokens.

        With `begin`, the special tokens that the tokenizer adds to a text are added.
        """
        return [byte % self.size for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        """Returns the text of these tokens; special ones have none, except those that mark thoughts."""
        return "".join(chr(i) if 32 <= i < 127 or i == 10 else f"<{i}>" for i in ids)

    def stops(self, texts: Sequence[str]) -> list[Stop]:
        """Returns the stop strings, and the ids of special tokens that they name: no text has these."""
        return [*texts]

    def spell(self, token_id: int) -> tuple[str, bytes | None]:
        """Returns the token's text and bytes; of a special token its name, and None."""
        text = self.decode([token_id])
        return text, text.encode()

    def rendered(
        self, messages: list[Message], goes_on: bool = False, arguments: Mapping[str, Any] = {}
    ) -> str:
        """Returns a conversation as text, by the model's own template, up to the model's answer.

        `arguments` are the template's own, such as enable_thinking. With `goes_on` the last message is left
        open. Raises DataError.
        """
        raise DataError("synthetic models have no chat template", fix="use task.chat=false")

    def chat(self, messages: list[Message], arguments: Mapping[str, Any] = {}) -> list[int]:
        """Returns the ids of the text that `rendered` returns."""
        return self.encode(self.rendered(messages, arguments=arguments), special=True, begin=False)


class IdsAlone(Tokens):
    """Stands for the tokenizer of a model that has none: prompts are token ids, and texts are empty."""

    def __init__(self, size: int, end_ids: frozenset[int]) -> None:
        super().__init__(size)
        self.end_ids = end_ids

    def encode(self, text: str, special: bool = False, begin: bool = True) -> list[int]:
        raise self._error()

    def decode(self, ids: list[int]) -> str:
        return ""

    def stops(self, texts: Sequence[str]) -> list[Stop]:
        if texts:
            raise self._error()
        return []

    def spell(self, token_id: int) -> tuple[str, bytes | None]:
        return "", None

    def rendered(
        self, messages: list[Message], goes_on: bool = False, arguments: Mapping[str, Any] = {}
    ) -> str:
        raise self._error()

    def _error(self) -> DataError:
        return DataError(
            "the pair has no tokenizer",
            found="a text",
            allowed="token ids",
            fix="give load_pair one: tokenizer=...",
        )


class HubTokens(Tokens):
    """A Hugging Face tokenizer, read from a local folder, or one that a script has loaded."""

    def __init__(self, path: Path, loaded: Any = None) -> None:
        """Takes the folder; or a name for messages, and a tokenizer that is `loaded`, which is copied."""
        self._path = path
        self._warned = False
        self._looked_up = set[str]()  # arguments: whether the template reads them has been said
        self._tried = False  # whether the template has rendered a conversation within its bounds
        self._lock = threading.Lock()  # a tokenizer keeps a call's split_special_tokens for the next one

        folder = tokenizer_folder(path)
        try:
            self._tokenizer: Any = _tokenizer_of(path, folder, loaded)
        except (MemoryError, ModelError, UsageError):
            raise
        except Exception as error:  # the Rust tokenizers raise bare Exceptions
            raise _unreadable(path, str(error)) from None
        limit = getattr(self._tokenizer, "model_max_length", 0)
        if not isinstance(limit, int | float):  # transformers compares each text's length with it
            raise _unreadable(path, f"model_max_length {limit!r}, which is not a number")

        ids = self._tokenizer.get_vocab()
        if is_gguf(path) and folder is not None:
            require_same_tokens(path, ids)
        if not {*ids.values()}.difference(self._tokenizer.all_special_ids):
            raise _unreadable(path, "no tokens but special ones")  # a class without its files
        self._warn_of_twins(ids)

        self.end_ids = ends_with_token(path, ids, warns=True)
        self.bos_id = self._tokenizer.bos_token_id
        self.eos_id = self._tokenizer.eos_token_id
        if not self.end_ids and self.eos_id is not None:
            self.end_ids = frozenset({self.eos_id})
        self.size = 1 + max(ids.values())
        template = self._tokenizer.chat_template or ""
        if isinstance(template, dict):  # several, by name
            template = template.get("default") or next(iter(template.values()), "")
        self.template = str(template)

    @property
    def library(self) -> Any:
        return None if isinstance(self._tokenizer, HeaderTokenizer) else self._tokenizer

    def _warn_of_twins(self, ids: dict[str, int]) -> None:
        """Warns of words with one id; of renamed tokens a model's files keep the old names, too."""
        if len({*ids.values()}) == len(ids):
            return
        names = dict[int, str]()
        for name, token_id in sorted(ids.items()):
            if token_id in names:
                first = names[token_id]
                log.warning(
                    "%s: %r and %r have one id, %d, in the vocabulary", self._path, first, name, token_id
                )
                return
            names[token_id] = name

    def encode(self, text: str, special: bool = False, begin: bool = True) -> list[int]:
        with self._lock, tokenizing(self._path):
            ids: list[int] = self._tokenizer.encode(
                text, add_special_tokens=begin, split_special_tokens=not special
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        skips = not self._special_of_thoughts
        if not skips:
            hidden = self._special_ids - self._special_of_thoughts
            ids = [token_id for token_id in ids if token_id not in hidden]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skips)
        return text

    @cached_property
    def thoughts(self) -> Thoughts:
        names = {str(token) for token in self._tokenizer.added_tokens_decoder.values()}
        return thoughts_of(self.template, names)

    def stops(self, texts: Sequence[str]) -> list[Stop]:
        return [*texts, *(self._special[text] for text in texts if text in self._special)]

    def spell(self, token_id: int) -> tuple[str, bytes | None]:
        known = self.vocabulary
        letters = known.surfaces[token_id] if token_id < known.size else None
        if letters is None:
            return known.names.get(token_id, ""), None
        return letters.decode("utf-8", "replace"), letters

    def chat(self, messages: list[Message], arguments: Mapping[str, Any] = {}) -> list[int]:
        """Reads special tokens of the template, and of its arguments, as such; those in messages are text."""
        rendered = self.rendered(messages, arguments=arguments)
        marked = [self._marked(message) for message in messages]
        if marked == messages:
            return self.encode(rendered, special=True, begin=False)

        # Rendered once more with marks around the names of special tokens, which shows where they are typed.
        pieces = self._typed.split(self.rendered(marked, arguments=arguments))
        if "".join(pieces) != rendered:
            raise DataError(
                "the prompt names special tokens, and the chat template rewrites the prompt",
                where="task.chat=true",
                found=next(iter(self._named_in(messages)), ""),
                fix="take the special token out of the prompt",
            )
        token_ids = list[int]()
        for number, piece in enumerate(pieces):
            is_typed = number % 2 == 1  # a name, between two pieces of other text
            if number:
                token_ids += self._encode_within(piece, special=not is_typed)
            else:
                token_ids += self.encode(piece, special=True, begin=False)
        return token_ids

    def _marked(self, message: Message) -> Message:
        """Returns the message with marks around the names of special tokens in it.

        Those that mark a thought are tokens in what the model has said itself, except where its channels are
        taken apart: there they are in the template.
        """
        may_think = message["role"] == "assistant" and not self.thoughts.between

        def mark(match: re.Match[str]) -> str:
            is_thought = may_think and self.thoughts.has(match[0])
            return match[0] if is_thought else f"{BEGIN_MARK}{match[0]}{END_MARK}"

        texts = {key: self._names.sub(mark, text) for key, text in message.items() if key != "role"}
        return {**message, **texts}

    def _named_in(self, messages: list[Message]) -> list[str]:
        """Returns the special tokens that the messages name."""
        return [name for message in messages for name in self._names.findall(message["content"])]

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """Returns what finds the names of special tokens: where one begins another, the longer one."""
        names = sorted(self._special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    @cached_property
    def _typed(self) -> re.Pattern[str]:
        """Returns what finds such names between marks."""
        return re.compile(f"{BEGIN_MARK}({self._names.pattern}){END_MARK}")

    def _encode_within(self, piece: str, special: bool) -> list[int]:
        """Returns the ids of a later piece of a text: SentencePiece would begin a text with a blank."""
        line_end = self.encode("\n", begin=False)
        ids = self.encode(f"\n{piece}", special=special, begin=False)
        if ids[: len(line_end)] == line_end:
            return ids[len(line_end) :]
        return self.encode(piece, special=special, begin=False)

    @cached_property
    def _special(self) -> dict[str, int]:
        """Returns the ids of special tokens by name: of all, not only those with a role."""
        added = self._tokenizer.added_tokens_decoder
        return {str(token): token_id for token_id, token in added.items() if token.special}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._special.values())

    @cached_property
    def _special_of_thoughts(self) -> frozenset[int]:
        """Returns the special tokens that mark thoughts, which texts keep."""
        kept = {token_id for name, token_id in self._special.items() if self.thoughts.has(name)}
        return frozenset(kept - self.end_ids)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        ids: dict[str, int] = self._tokenizer.get_vocab()
        if backend is not None:
            content = json.loads(backend.to_str())
        else:
            added = self._tokenizer.added_tokens_decoder
            content = {"added_tokens": [{"id": i, "special": t.special} for i, t in added.items()]}
        content["chat_template"] = self._tokenizer.chat_template
        bare = partial(self.encode, begin=False)
        result = vocabulary_of(content, ids, bare, self.encode, self.end_ids)
        return result if backend is not None else replace(result, notation=notation_guessed(list(ids)))

    def rendered(
        self, messages: list[Message], goes_on: bool = False, arguments: Mapping[str, Any] = {}
    ) -> str:
        where = "task.chat=true"
        without = "use task.chat=false"
        if not self.has_template:
            raise DataError(
                "the model has no chat template", where=where, fix="use an instruct model, or task.chat=false"
            )

        def render() -> str:
            text: str = self._tokenizer.apply_chat_template(
                self._in_parts(messages) if self._tried and self._takes_parts else messages,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                tokenize=False,
                **arguments,
            )
            return text

        if not self._tried:  # the first conversation, in a process of its own
            excess = excess_of(render)
            if excess is not None:
                raise ModelError(
                    "the model's chat template makes too much",
                    where=self._path,
                    found=excess,
                    fix=f"correct its chat_template, or {without}",
                )
            self._tried = True
        try:
            rendered = render()
            self._warn_of_unread(arguments)
        except Exception as error:  # a template may raise anything
            suspects = ["the system message"] if messages[0]["role"] == "system" else []
            suspects += ["task.template"] if arguments else []
            raise DataError(
                "the model's chat template refuses the prompt",
                where=where,
                found=str(error)[:200] or type(error).__name__,
                fix=", or ".join([*(f"leave out {suspect}" for suspect in suspects), without]),
            ) from None

        changed = [m for m in messages if m["role"] != "assistant" and m["content"].strip() not in rendered]
        left_out = {message["role"] for message in changed if message["content"].startswith(WORD)}
        if "system" in left_out:
            raise DataError(
                "the model's chat template leaves the system prompt out",
                where=self._path,
                fix="leave out the system message, or begin the prompt with it",
            )
        if left_out:
            raise DataError(
                "the model's chat template leaves the prompt out",
                where=self._path,
                fix=f"correct chat_template in tokenizer_config.json, or {without}",
            )
        if changed:  # a template may rewrite a message: WORD in its place shows whether it is rendered
            probes = [{**m, "content": f"{WORD}{n}"} if m in changed else m for n, m in enumerate(messages)]
            self.rendered(probes, arguments=arguments)
            if not self._warned:
                log.warning("the chat template of %s changes the words of prompts", self._path)
            self._warned = True
        return rendered

    @cached_property
    def _takes_parts(self) -> bool:
        """Returns whether the template shows a message only where its content is a list of parts."""
        probe: list[Message] = [{"role": "user", "content": WORD}]

        def shows(messages: Sequence[Any]) -> bool:
            try:
                return WORD in self._tokenizer.apply_chat_template(list(messages), tokenize=False)
            except Exception:  # a template may raise anything
                return False

        if shows(probe):
            return False
        in_parts = self._in_parts(probe)
        return excess_of(lambda: str(shows(in_parts))) is None and shows(in_parts)

    @staticmethod
    def _in_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Returns the messages with the content of each as a list of one part, as models that see want it."""
        return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]

    def _warn_of_unread(self, arguments: Mapping[str, Any]) -> None:
        """Warns, once of each, of arguments that the template does not read: transformers ignores them."""
        new = arguments.keys() - self._looked_up
        if not new:
            return
        self._looked_up |= new
        template = self._tokenizer.get_chat_template(tools=arguments.get("tools"))
        if unread := sorted(new - variables_of(template)):
            names = ", ".join(unread)
            log.warning("the chat template of %s does not read %s: it changes nothing", self._path, names)


def variables_of(template: str) -> frozenset[str]:
    """Returns the names that a chat template reads and does not set itself."""
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment  # with transformers' own tags
    return frozenset(find_undeclared_variables(environment.parse(template)))


def _tokenizer_of(path: Path, folder: Path | None, loaded: Any) -> Any:
    """Returns the tokenizer of a folder, of a GGUF file's header, or a copy of one that is loaded."""
    if loaded is not None:
        copy = deepcopy(loaded)
        copy.clean_up_tokenization_spaces = False
        return copy
    return HeaderTokenizer(path) if folder is None else _of_folder(folder)


def _of_folder(folder: Path) -> Any:
    """Returns transformers' tokenizer of a model folder."""
    with importing():
        from transformers import AutoTokenizer

    with quiet_library():  # `_unreadable` says in a line what transformers warns of
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, clean_up_tokenization_spaces=False
        )
    # A text that is longer than a model reads is refused here, or cut with a line that says so.
    getattr(tokenizer, "deprecation_warnings", {})[TOO_LONG] = True
    if tokenizer.chat_template is None:
        tokenizer.chat_template = template_of(folder)
    return tokenizer


def _unreadable(path: Path, found: str) -> ModelError:
    fix = "put the model's tokenizer.json and tokenizer_config.json next to its weights"
    if (path / PIECES).is_file() and not (path / "tokenizer.json").exists():
        package = "sentencepiece" if (path / PIECES).read_bytes()[:1] == b"\n" else "tiktoken"
        fix = f"install what reads {PIECES} (pip install 'llama-ssp[{package}]'), or {fix}"
    return ModelError("the tokenizer cannot be read", where=str(path), found=found[:200], fix=fix)


def read_tokens(path: Path | None, vocab: int) -> Tokens:
    """Returns the tokenizer of a model folder; bytes for no folder."""
    return Tokens(vocab) if path is None else HubTokens(path)


def paired(target: Tokens, draft: Tokens, widths: tuple[int, int], how: Bridging) -> Diagnosis | None:
    """Returns how the vocabularies match; None for bytes. `widths` count logits. Raises ModelError."""
    if target.vocabulary is not None and draft.vocabulary is not None:
        return pair(target.vocabulary, draft.vocabulary, widths, how)
    if target.vocabulary is not draft.vocabulary:
        raise ModelError(
            "one model has a tokenizer and the other has none",
            fix="give both by path, or both weights=synthetic",
        )
    return None
