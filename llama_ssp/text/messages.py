"""Messages of a conversation, as OpenAI's clients write them and as chat templates know them. No torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from llama_ssp.errors import DataError, shortened
from llama_ssp.text.thoughts import FIELDS

Message = dict[str, str]  # its role and its content, and what was thought where the template reads that
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def message_of(message: object) -> Message | None:
    """Returns a message as chat templates know it: without its name, its parts joined. None if it is none.

    OpenAI's content is a text, or a list of parts; parts that are no text are not served. A message of the
    model may have its thoughts, as servers name them.
    """
    if not isinstance(message, Mapping) or message.keys() - {"name", *FIELDS} != {"role", "content"}:
        return None
    role = message["role"]
    content = message["content"]
    thoughts = {name: message[name] for name in FIELDS if message.get(name) is not None}
    if thoughts and not (role == "assistant" and all(isinstance(text, str) for text in thoughts.values())):
        return None
    if isinstance(content, list):
        texts = []
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                return None
            texts.append(part["text"])
        content = "\n".join(texts)  # OpenAI does not say how parts are joined
    if not (isinstance(content, str) and isinstance(role, str) and role in ROLES):
        return None
    return {"role": ROLES[role], "content": content, **thoughts}


def messages_of(given: Iterable[Any], where: str) -> list[Message]:
    """Returns the messages as chat templates know them. Raises DataError for one that is none."""
    result = []
    for number, item in enumerate(given):
        message = message_of(item)
        if message is None:
            raise DataError(
                "a message cannot be used",
                where=f"{where}, message {number}",
                found=shortened(repr(item), 200),
                allowed='{"role": ..., "content": ...} with roles ' + ", ".join(ROLES),
                fix="correct it",
            )
        result.append(message)
    return result
