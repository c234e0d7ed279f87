"""Prompts as a script gives them: texts, token ids, conversations, in a list or from a generator."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

from llama_ssp.config import RunConf
from llama_ssp.config.validation import listed
from llama_ssp.errors import DataError, UsageError
from llama_ssp.pair.token_prompts import prompt_of, usable
from llama_ssp.speculative.state import Prompt
from llama_ssp.text.messages import messages_of
from llama_ssp.text.prompts import TextPrompt, require_usable
from llama_ssp.text.tokenizer import Tokens

GivenPrompt = str | Iterable[Any]  # a text, its token ids, or the messages of a conversation
Prompts = str | Iterable[GivenPrompt]


def given_prompts(prompts: Prompts, messages: Iterable[Any] | None) -> list[GivenPrompt]:
    """Returns the prompts one by one; `messages` are those of one conversation, or of several.

    Raises UsageError for what has no order, and for both.
    """
    if messages is None:
        return [prompts] if isinstance(prompts, str) else ordered("prompts", prompts)
    given = ordered("messages", messages)
    if not given or not isinstance(prompts, tuple) or prompts:
        raise UsageError(
            "messages are empty" if not given else "both prompts and messages are given",
            fix="give one of the two",
        )
    return [given] if is_conversation(given) else given


def ordered(name: str, given: Iterable[Any]) -> list[Any]:
    """Returns the entries, a generator's too. Raises UsageError for a text, a set or a mapping."""
    if isinstance(given, Mapping | set | frozenset):
        raise UsageError(
            f"{name} is of the wrong type",
            found=f"a {type(given).__name__}, whose entries have no order",
            allowed="a list",
            fix="make a list of it",
        )
    # A generator among the entries is read once.
    return [[*entry] if isinstance(entry, Iterator) else entry for entry in listed(name, given)]


def is_conversation(given: GivenPrompt) -> bool:
    """Returns whether a prompt is a list of messages."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    return bool(given) and all(isinstance(item, Mapping) for item in given)


def read(number: int, given: GivenPrompt, tokens: Tokens, run: RunConf, shorter: bool = True) -> Prompt:
    """Returns one prompt as token ids, `shorter` than the context or not. Raises DataError."""
    where = f"prompt {number}"
    text = TextPrompt(str(number), given if isinstance(given, str) else "", where)
    require_usable(text)
    if isinstance(given, str) and shorter:
        return prompt_of(text, tokens, run)
    if not isinstance(given, str) and is_conversation(given):
        return prompt_of(text, tokens, run, messages_of(given, where))

    try:  # integers of NumPy and torch are token ids, too
        if isinstance(given, str):
            ids = tokens.encode(given, run.task.special_tokens)
        else:
            ids = [index(item) for item in listed(where, given)]
    except (TypeError, UsageError):
        raise DataError(
            "a prompt is neither a text nor token ids",
            where=where,
            found=repr(given),
            allowed="a text, whole numbers, or messages",
        ) from None
    if run.task.chat:
        raise DataError(
            "token ids are not put into a chat template",
            where=where,
            fix="give the text, or leave out chat",
        )
    return usable(text, ids, tokens, run, 0 if shorter else 2)


def text_of(given: GivenPrompt, tokens: Tokens) -> str:
    """Returns a prompt as text: of a conversation its last message."""
    if isinstance(given, str):
        return given
    if is_conversation(given):
        return messages_of(given, "the prompt")[-1]["content"]
    ids: Iterable[Any] = given
    return tokens.decode([index(item) for item in ids])
