"""One line of the input as a request, read strictly: what to continue, and with which settings."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from llama_ssp.config import BatchConf, RunConf, SamplingConfig
from llama_ssp.config.validation import check, check_context
from llama_ssp.config.validation.groups import MAX_SEED
from llama_ssp.errors import DataError, RunError
from llama_ssp.text.prompts import Line, TextPrompt, is_usable, name_of, parsed_object, problem_of

Message = dict[str, str]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROLES = ("system", "user", "assistant")
TOKEN_ID = re.compile(r"\d{1,10}")  # as a key; longer ones are beyond every vocabulary
SAMPLING = tuple(entry.name for entry in fields(SamplingConfig))
ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
OWN = ("prompt", "messages", "max_new_tokens", "stop", "seed", *SAMPLING)
# What an OpenAI request may also say, if it says what we do anyway; None is: whatever it says.
SAID_ANYWAY = {
    "model": None, "user": None, "metadata": None, "n": 1, "best_of": 1, "stream": False, "echo": False,
    "logprobs": False,
}  # fmt: skip


class Form(Enum):
    """The kind of line, which its answer follows."""

    text = "text"
    plain = "plain"
    completions = "completions"
    chat = "chat"


@dataclass(frozen=True)
class Request:
    """One record. `messages` stand in the place of a prompt; `seed` in that of the run's."""

    index: int
    id: str
    form: Form
    where: str
    prompt: str
    messages: tuple[Message, ...]
    sampling: SamplingConfig
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int | None = None

    @property
    def said(self) -> str:
        """All text of it."""
        return self.prompt or "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True)
class Refused:
    """A line that makes no request: it is answered with its error."""

    index: int
    id: str
    form: Form
    error: str


@dataclass
class Reader:
    """Reads lines by the run's settings; remembers ids, which may stand once."""

    run: RunConf
    is_text: bool
    _seen: dict[str, str] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def read(self, line: Line, index: int) -> Request:
        """The line's request, or the reason why it makes none."""
        request = self._request(line, index)
        problem = problem_of(TextPrompt(request.id, request.said, request.where), self._seen)
        if problem is not None:
            raise problem
        self._seen[request.id] = request.where
        return request

    def refused(self, line: Line, index: int, error: RunError) -> Refused:
        """What is known of a line that made no request."""
        found, form = f"line-{line.number}", Form.text if self.is_text else Form.plain
        try:
            record = {} if self.is_text else parsed_object(line)
            form = Form.completions if "custom_id" in record else form
            own = name_of(record.get("custom_id", record.get("id", found)), line.where)
            found = own if is_usable(own) else found
        except DataError:
            pass
        return Refused(index, found, form, str(error))

    def _request(self, line: Line, index: int) -> Request:
        task = self.run.task
        assert isinstance(task, BatchConf)
        usual = Request(
            index, f"line-{line.number}", Form.text, line.where, "", (), self.run.sampling,
            task.max_new_tokens, tuple(task.stop),
        )  # fmt: skip
        if self.is_text:
            return replace(usual, prompt=line.text)
        record = parsed_object(line)
        if "custom_id" in record or "body" in record:
            return self._openai(record, usual)
        name = name_of(record.pop("id", usual.id), line.where)
        for key in record:  # other columns of somebody's table are left alone, misspelt settings are not
            near = difflib.get_close_matches(key, (*OWN, *ALIASES), n=1, cutoff=0.8)
            if key not in OWN and key not in ALIASES and near:
                raise DataError(
                    f"the line has an unknown setting {key}", where=line.where,
                    fix=f"did you mean {near[0]}?",
                )  # fmt: skip
        return self._asked(record, replace(usual, id=name, form=Form.plain))

    def _openai(self, record: dict[str, Any], usual: Request) -> Request:
        """The same settings, in OpenAI's envelope; what it asks for beyond them is refused by name."""
        url, body, where = record.get("url"), record.get("body"), usual.where
        if url not in (COMPLETIONS, CHAT) or record.get("method", "POST") != "POST":
            raise DataError(
                "the request's method and url are not served", where=where,
                found=f"{record.get('method', 'POST')} {url}", allowed=f"POST {COMPLETIONS}, POST {CHAT}",
                fix="correct them",
            )  # fmt: skip
        if not isinstance(body, dict) or "custom_id" not in record:
            missing = "custom_id" if isinstance(body, dict) else "body"
            raise DataError(
                f"the request has no {missing}", where=where, found=", ".join(record), fix="add it"
            )
        asked = {key: value for key, value in body.items() if value is not None}
        for key, only in SAID_ANYWAY.items():
            if key in asked and asked.pop(key) != only and only is not None:
                raise DataError(
                    f"the request asks for {key}", where=where, found=repr(body[key])[:60],
                    allowed=repr(only), fix="leave it out",
                )  # fmt: skip
        for key in asked:
            if key not in OWN and key not in ALIASES:
                raise DataError(
                    f"the request asks for {key}, which is not served", where=where,
                    allowed=", ".join((*OWN, *ALIASES)), fix="leave it out",
                )  # fmt: skip
        wrong = "prompt" if url == CHAT else "messages"
        if wrong in asked:
            raise DataError(f"a request to {url} has {wrong}", where=where, fix="choose the other url")
        form = Form.chat if url == CHAT else Form.completions
        return self._asked(asked, replace(usual, id=name_of(record["custom_id"], where), form=form))

    def _asked(self, record: dict[str, Any], usual: Request) -> Request:
        """The request with what the line itself says."""
        where = usual.where
        prompt, messages = _said(record, where)
        changes: dict[str, Any] = {ALIASES.get(key, key): value for key, value in record.items()}
        stop = changes.get("stop", list(usual.stop))
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise DataError("stop is no list of texts", where=where, found=repr(stop), fix='write ["\\n"]')
        request = replace(
            usual, prompt=prompt, messages=messages, stop=tuple(stop),
            max_new_tokens=_whole(changes, "max_new_tokens", usual.max_new_tokens, 1, where),
            seed=_whole(changes, "seed", 0, 0, where) if changes.get("seed") is not None else None,
        )  # fmt: skip
        own = {key: changes[key] for key in SAMPLING if key in changes}
        if "logit_bias" in own:
            own["logit_bias"] = _biases(own["logit_bias"], where)
        if not own and request.max_new_tokens == usual.max_new_tokens:
            return request
        request = replace(request, sampling=replace(usual.sampling, **own) if own else usual.sampling)
        self._check(request)
        return request

    def _check(self, request: Request) -> None:
        """Settings of a line have to be ones that a run could have."""
        settings = f"{request.sampling} {request.max_new_tokens}"
        if settings in self._checked:
            return
        assert isinstance(self.run.task, BatchConf)
        task = replace(self.run.task, max_new_tokens=request.max_new_tokens)
        run = replace(self.run, sampling=request.sampling, task=task)
        try:
            check(run)
            check_context(run)
        except RunError as error:
            raise DataError(f"a setting of the line is wrong: {error}", where=request.where) from None
        self._checked.add(settings)


def _said(record: dict[str, Any], where: str) -> tuple[str, tuple[Message, ...]]:
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(prompt, str) and messages is None:
        return prompt, ()
    if prompt is None and isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return "", tuple(messages)
    raise DataError(
        "the line has no prompt", where=where, found=", ".join(record),
        allowed='a string "prompt", or "messages" of {"role", "content"} with roles ' + ", ".join(ROLES),
        fix="give it one of them",
    )  # fmt: skip


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and message["role"] in ROLES
        and isinstance(message["content"], str)
    )


def _biases(value: object, where: str) -> dict[int, float]:
    """JSON has texts for keys."""
    if isinstance(value, dict) and all(TOKEN_ID.fullmatch(token) for token in value):
        return {int(token): bias for token, bias in value.items()}
    raise DataError(
        "logit_bias is no map of tokens to numbers", where=where, found=repr(value), fix='write {"42": -1.5}',
    )  # fmt: skip


def _whole(record: dict[str, Any], key: str, default: int, least: int, where: str) -> int:
    value = record.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_SEED:
        return value
    raise DataError(
        f"{key} is out of range", where=where, found=repr(value), allowed=f"whole numbers from {least}",
        fix="correct it",
    )  # fmt: skip
