"""Texts as prompts of token ids, which a model can continue; those that it cannot are refused."""

from collections.abc import Sequence

from llama_ssp.config import RunConf
from llama_ssp.errors import DataError
from llama_ssp.speculative.state import Prompt
from llama_ssp.text.messages import Message
from llama_ssp.text.prompts import TextPrompt, require_usable
from llama_ssp.text.tokenizer import Tokens

CHARACTERS_A_TOKEN = 16  # more than texts have on average: a text's beginning shows that it is too long


def prompt_of(text: TextPrompt, tokens: Tokens, run: RunConf, messages: Sequence[Message] = ()) -> Prompt:
    """Returns the prompt, or a conversation, as token ids. Raises DataError where it does not fit."""
    task = run.task
    if messages or task.chat:
        messages = list(messages) or [{"role": "user", "content": text.text}]
        if task.system and messages[0]["role"] != "system":
            require_usable(TextPrompt("system", task.system, "task.system"))
            messages.insert(0, {"role": "system", "content": task.system})
        ids = tokens.chat(messages, task.template_arguments)
    else:
        # The beginning of a text that is far too long is enough to refuse it.
        context = run.model.context
        special = task.special_tokens
        head = text.text[: CHARACTERS_A_TOKEN * context]
        if len(head) < len(text.text) and len(ids := tokens.encode(head, special)) >= 2 * context:
            raise _too_long(text, f"more than {len(ids)} tokens", context)
        ids = tokens.encode(text.text, special)
    return usable(text, ids, tokens, run, 0 if task.max_new_tokens else 2)


def usable(text: TextPrompt, ids: list[int], tokens: Tokens, run: RunConf, beyond: int = 0) -> Prompt:
    """Returns the prompt of these tokens; where there are none, of the model's first token, if it has one.

    Raises DataError where the model cannot continue it. A text that is only scored may be longer: its last
    token is not read, and none follows it, so `beyond` is 2. Its tokens must be the tokenizer's: logits that
    only fill up the model's vocabulary have no probability.
    """
    context = run.model.context
    vocab = run.model.vocab
    vocab = min(vocab, tokens.size) if beyond else vocab
    if not ids and tokens.bos_id is not None:
        ids = [tokens.bos_id]
    if not ids:
        raise DataError(
            "the prompt is empty and the model has no token to begin a text with",
            where=text.where,
            fix="give the prompt some text",
        )
    if len(ids) >= context + beyond:
        raise _too_long(text, f"{len(ids)} tokens", context, beyond)
    if (odd := next((i for i in ids if not 0 <= i < vocab), None)) is not None:
        raise DataError(
            "the prompt has a token that the model does not know",
            where=text.where,
            found=f"id {odd}",
            allowed=f"ids from 0, below {vocab}",
            fix="remove the tokenizer's added tokens from the text",
        )
    return Prompt(text.id, tuple(ids))


def _too_long(text: TextPrompt, found: str, context: int, beyond: int = 0) -> DataError:
    allowed = f"at most {context + beyond - 1}"
    if not beyond:
        allowed += f" of {context}"
    return DataError(
        "the prompt fills the model's context",
        where=text.where,
        found=found,
        allowed=allowed,
        fix="shorten it; it is never cut silently",
    )
