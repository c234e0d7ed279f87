"""Reads a line of the input as a request, strictly, and makes the line that answers it.

A line is plain text, a plain object with this program's own keys, or one of OpenAI's batch format: an
envelope with custom_id, url and body. Its answer has the same format.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from llama_ssp.config import BatchConf, RunConf, SamplingConfig
from llama_ssp.config.schema import MAX_SEED
from llama_ssp.config.tasks import MAX_LOGPROBS, require_arguments
from llama_ssp.config.validation import check, check_context, check_values
from llama_ssp.errors import DataError, RunError, UsageError, shortened
from llama_ssp.text import prompts
from llama_ssp.text.logprobs import Spell, chat, completions, plain, spelled
from llama_ssp.text.messages import ROLES, Message, message_of
from llama_ssp.text.prompts import Line, TextPrompt, is_usable, name_of, parsed_object, require_usable

if TYPE_CHECKING:
    from llama_ssp.pair.requests import Reply

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# A JSON string without \u escapes. Possessive repeats (*+) give up a long line that does not match at once.
TEXT = rb'"[^"\\\0-\x1f]*+(?:\\["\\/bfnrt][^"\\\0-\x1f]*+)*+"'
# An id of printable ASCII, without quotation marks and backslashes.
ID = rb'"id": ?"([ !#-\[\]-~]++)"'
# A line with nothing but a prompt, and perhaps an id before it or after it.
ID_FIRST = rb'\{(?:%b, ?)?"prompt": ?%b\}\r?' % (ID, TEXT)
ID_LAST = rb'\{"prompt": ?%b, ?%b\}\r?' % (TEXT, ID)
SIMPLE = re.compile(rb"%b|%b" % (ID_FIRST, ID_LAST))
TOKEN_ID = re.compile(r"\d{1,10}")  # as a key; longer ones are beyond every vocabulary
SAMPLING = tuple(entry.name for entry in fields_of(SamplingConfig))
ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
SETTINGS = ("prompt", "messages", "max_new_tokens", "stop", "seed", "logprobs", *SAMPLING, *ALIASES)
TEMPLATE = "chat_template_kwargs"  # as servers name the arguments of the chat template
PLAIN = (*SETTINGS, "echo", TEMPLATE)
MAX_CHECKED = 10_000  # settings that are kept, as each may hold a long logit_bias
# Codes of answers that are errors: the line was wrong; its text could not be made here.
BAD_REQUEST = 400
BROKEN = 500
ALWAYS = ("id", "output_tokens")  # of a plain answer, whatever `fields` says: jobs are counted by them
# Fields of an OpenAI request that are accepted with this value only (None: with any), and change nothing.
WITHOUT_EFFECT: dict[str, Any] = {
    "model": None,
    "user": None,
    "metadata": None,
    "store": None,
    "service_tier": None,
    "n": 1,
    "best_of": 1,
    "stream": False,
    "tools": [],
    "response_format": {"type": "text"},
}
nearest = lru_cache(1024)(partial(difflib.get_close_matches, possibilities=PLAIN, n=1, cutoff=0.8))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One record.

    `index` counts the records of all input files from 0, and `where` says the file and the line. `url` is
    that of an OpenAI line, and empty for a plain one. Either `prompt` or `messages` holds the text; `seed`
    replaces the run's. `template` are the arguments of the chat template.

    `logprobs` is how many likely tokens each token's log-probability comes with; None for none. With `echo`
    the prompt's tokens have theirs, too, and no new token needs to be asked for.
    """

    index: int
    id: str
    url: str
    where: str
    prompt: str
    messages: tuple[Message, ...]
    sampling: SamplingConfig
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int | None = None
    logprobs: int | None = None
    echo: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """Returns all its text: the prompt, or what the messages say."""
        return self.prompt or "\n".join(message["content"] for message in self.messages)


class Refused(DataError):
    """Says that a line makes no request: its response is the `error`.

    Of `url` it only matters whether it is empty: the response is a plain line, or one as OpenAI's.
    """

    def __init__(self, *, index: int, id: str, url: str, error: str) -> None:
        super().__init__(error)
        self.index = index
        self.id = id
        self.url = url
        self.error = error


@dataclass
class Reader:
    """Reads the lines of a file, with the run's settings as defaults.

    `named` is the prefix of the ids that lines without one get, where there are several files. `checked`
    holds the settings, as texts, that a run could have.
    """

    run: RunConf
    is_text: bool
    named: str = ""
    checked: set[str] = field(default_factory=set)

    def simple_id(self, line: Line) -> str | None:
        """Returns the id of a good line that has only a prompt and perhaps an id; None for any other line.

        It takes a tenth of the time of `read`: an input of millions of lines is indexed by it.
        """
        raw = line.raw
        if len(raw) > prompts.MAX_LINE_BYTES or b"\0" in raw:
            return None
        try:
            raw.decode()  # only to see whether it is UTF-8
        except UnicodeDecodeError:
            return None

        written_id = None
        if not self.is_text:
            match = SIMPLE.fullmatch(raw)
            if match is None:
                return None
            written_id = match[1] or match[2]
        result = written_id.decode() if written_id else self._name_of(line)
        return result if is_usable(result) else None

    def read(self, line: Line, index: int) -> Request:
        """Returns the line's request. Raises Refused with what is known of a line that makes none."""
        try:
            request = self._request(line, index)
            require_usable(TextPrompt(request.id, request.said, request.where))
            return request
        except DataError as error:
            problem = str(error)
        # Outside of the except, so that the new error does not carry the old one along.
        request_id, url = self._known_of(line)
        raise Refused(index=index, id=request_id, url=url, error=problem)

    def _known_of(self, line: Line) -> tuple[str, str]:
        """Returns the id and the url by which a refused line is answered, as far as they can be read."""
        request_id = self._name_of(line)
        url = ""
        with suppress(DataError):
            record = {} if self.is_text else parsed_object(line)
            url = COMPLETIONS if "custom_id" in record else ""  # without an id OpenAI's format is of no use
            written_id = name_of(record.get("custom_id", record.get("id", request_id)), line.where)
            request_id = written_id if is_usable(written_id) else request_id
        return request_id, url

    def _name_of(self, line: Line) -> str:
        """Returns the id of a line that has none."""
        return f"{self.named}line-{line.number}"

    def _request(self, line: Line, index: int) -> Request:
        task = self.run.task_as(BatchConf)
        name = self._name_of(line)
        where = line.where
        usual = Request(
            index=index,
            id=name,
            url="",
            where=where,
            prompt="",
            messages=(),
            sampling=self.run.sampling,
            max_new_tokens=task.max_new_tokens,
            stop=tuple(task.stop),
            logprobs=task.logprobs,
            template=task.template_arguments,
        )
        if self.is_text:
            return replace(usual, prompt=line.text)
        record = parsed_object(line)
        # Without its id it is one, too: the error then says what is missing.
        is_envelope = "custom_id" in record or (
            "body" in record and not {"prompt", "messages"} & record.keys()
        )
        if is_envelope:
            return self._from_envelope(record, usual)
        name = name_of(record.pop("id", name), where)
        for key in record:  # other columns of a table are ignored, misspelt settings are not
            if key not in PLAIN and (near := nearest(key)):
                raise DataError(
                    f"the line has an unknown setting {key}", where=where, fix=f"did you mean {near[0]}?"
                )
        return self._with_own(record, replace(usual, id=name))

    def _from_envelope(self, record: dict[str, Any], usual: Request) -> Request:
        """Returns the request of OpenAI's envelope. Raises DataError for what is not served."""
        url = record.get("url")
        body = record.get("body")
        where = usual.where
        method = record.get("method", "POST")
        if url not in (COMPLETIONS, CHAT) or method != "POST":
            raise DataError(
                "the request's method and url are not served",
                where=where,
                found=f"{method} {url}",
                allowed=f"POST {COMPLETIONS}, POST {CHAT}",
                fix="correct them",
            )
        missing = [key for key in ("body", "custom_id") if key not in record]
        if missing:
            raise DataError(
                f"the request has no {missing[0]}", where=where, found=", ".join(record), fix="add it"
            )
        if not isinstance(body, dict):
            raise DataError(
                "the request's body is not an object",
                where=where,
                found=type(body).__name__,
                fix='write {"prompt": "..."} or {"messages": [...]}',
            )

        # A chat has messages and top_logprobs, a completion a prompt and echo.
        if url == CHAT:
            served = [key for key in (*SETTINGS, "top_logprobs", TEMPLATE) if key != "prompt"]
        else:
            served = [key for key in (*SETTINGS, "echo") if key != "messages"]
        asked = {key: value for key, value in body.items() if value is not None}
        for key, allowed in WITHOUT_EFFECT.items():
            if key not in asked:
                continue
            value = asked.pop(key)
            if allowed is not None and value != allowed:
                raise DataError(
                    f"the request asks for {key}",
                    where=where,
                    found=repr(value)[:60],
                    allowed=repr(allowed),
                    fix="leave it out",
                )
        if unknown := [key for key in asked if key not in served]:
            raise DataError(
                f"the request to {url} asks for {unknown[0]}, which is not served",
                where=where,
                allowed=", ".join(served),
                fix="leave it out, or choose the other url",
            )
        return self._with_own(asked, replace(usual, id=name_of(record["custom_id"], where), url=url))

    def _with_own(self, record: dict[str, Any], usual: Request) -> Request:
        """Returns the request with the line's own settings. Raises DataError for what no run may have."""
        where = usual.where
        prompt, messages = _prompt_or_messages(record, where)

        changes: dict[str, Any] = {ALIASES.get(key, key): value for key, value in record.items()}
        lengths = {key: value for key, value in record.items() if ALIASES.get(key, key) == "max_new_tokens"}
        if any(value != changes["max_new_tokens"] for value in lengths.values()):
            raise DataError(
                "the line limits its new tokens in two ways",
                where=where,
                found=", ".join(f"{key} {value!r}" for key, value in lengths.items()),
                fix="write one of them",
            )

        stop = changes.get("stop", list(usual.stop))
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise DataError("stop is not a list of texts", where=where, found=repr(stop), fix='write ["\\n"]')
        logprobs = _logprobs(changes, usual)
        # A plain answer shows an echo by `prompt_logprobs` alone, OpenAI's also by its text.
        echo = changes.get("echo", False)
        if not isinstance(echo, bool) or (echo and not usual.url and logprobs is None):
            raise DataError(
                "echo is unusable",
                where=where,
                found=repr(echo),
                allowed="true or false" if usual.url else "true or false, and logprobs with true",
                fix="correct it",
            )
        # Whole numbers of 64 bits; `_check` compares the first with the model's context.
        new = changes.get("max_new_tokens", usual.max_new_tokens)
        _require_whole("max_new_tokens", new, 0 if echo else 1, MAX_SEED, where)
        seed = changes.get("seed")
        if seed is not None:
            _require_whole("seed", seed, 0, MAX_SEED, where)

        controls = {key: changes[key] for key in SAMPLING if changes.get(key) is not None}
        if "logit_bias" in controls:  # JSON has texts for keys
            biases = controls["logit_bias"]
            if not isinstance(biases, dict) or not all(map(TOKEN_ID.fullmatch, biases)):
                raise DataError(
                    "logit_bias is not a map of tokens to numbers",
                    where=where,
                    found=repr(biases),
                    fix='write {"42": -1.5}',
                )
            controls["logit_bias"] = {int(token): bias for token, bias in biases.items()}
        sampling = replace(usual.sampling, **controls)
        if controls or new != usual.max_new_tokens:
            self._check(sampling, new, where)
        is_chat = bool(messages) or self.run.task.chat
        template = {**usual.template, **_own_arguments(record, is_chat, where)}
        request = replace(usual, prompt=prompt, messages=messages, sampling=sampling, seed=seed)
        request = replace(request, max_new_tokens=new, stop=tuple(stop), logprobs=logprobs, echo=echo)
        return replace(request, template=template)

    def _check(self, sampling: SamplingConfig, new: int, where: str) -> None:
        """Raises DataError unless a run could have these settings."""
        settings = f"{sampling} {new}"  # a text, as a set cannot hold a logit_bias
        if settings in self.checked:
            return
        task = replace(self.run.task_as(BatchConf), max_new_tokens=max(1, new))
        run = replace(self.run, sampling=sampling, task=task)
        try:
            check_values(run)
            if not new:  # the prompt is scored alone; `check_values` has seen that min_new_tokens is a number
                run = replace(run, sampling=replace(sampling, min_new_tokens=0))
            check(run)
            check_context(run)
        except RunError as error:
            raise DataError(f"a setting of the line is wrong: {error}", where=where) from None
        if len(self.checked) < MAX_CHECKED:
            self.checked.add(settings)


def _prompt_or_messages(record: dict[str, Any], where: str) -> tuple[str, tuple[Message, ...]]:
    """Returns the prompt and the messages, one of them empty. Raises DataError with what is there instead."""
    prompt = record.get("prompt")
    messages = record.get("messages")
    if prompt is not None and messages is not None:
        found = "both a prompt and messages"
    elif isinstance(prompt, str):
        return prompt, ()
    elif prompt is not None:
        found = f"a prompt of type {type(prompt).__name__}"
    elif isinstance(messages, list) and messages:
        read = [message_of(message) for message in messages]
        if None not in read:
            return "", tuple(message for message in read if message)
        first_bad = read.index(None)
        if (kind := _other_part(messages[first_bad])) is not None:
            raise DataError(
                "a message has a part that is not text, and models run here on text alone",
                where=where,
                found=f"message {first_bad + 1}: a part of type {kind}",
                allowed="parts of type text",
                fix="leave the part out",
            )
        found = f"message {first_bad + 1}: {shortened(repr(messages[first_bad]), 200)}"
    elif messages is not None:
        found = "messages that are no list, or an empty one"
    else:
        found = ", ".join(record)
    raise DataError(
        "the line has no prompt that can be used",
        where=where,
        found=found,
        allowed='a string "prompt", or "messages" of {"role", "content"} with roles ' + ", ".join(ROLES),
        fix="give it one of them",
    )


def _other_part(message: object) -> str | None:
    """Returns the type of the first part that is not text, such as image_url; None if there is none."""
    content = message.get("content") if isinstance(message, dict) else None
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            return shortened(part["type"], 40)
    return None


def _own_arguments(record: dict[str, Any], is_chat: bool, where: str) -> dict[str, Any]:
    """Returns the line's own arguments of the chat template. Raises DataError."""
    arguments = record.get(TEMPLATE)
    if arguments is None:
        return {}
    if not isinstance(arguments, dict) or not is_chat:
        raise DataError(
            f"{TEMPLATE} is unusable",
            where=where,
            found=shortened(repr(arguments), 100) if is_chat else "a prompt that is no chat",
            allowed="an object, in a line with messages or with task.chat=true",
            fix='write {"enable_thinking": false}, or leave it out',
        )
    try:
        require_arguments(TEMPLATE, arguments)
    except UsageError as error:
        raise DataError(f"a setting of the line is wrong: {error}", where=where) from None
    return arguments


def _logprobs(record: dict[str, Any], usual: Request) -> int | None:
    """Returns how many alternatives each token comes with; None for no log-probabilities.

    A chat request says it by two keys: logprobs (true or false) and top_logprobs (how many). Other lines have
    the number in logprobs.
    """
    key = "logprobs"
    value = record.get("logprobs", usual.logprobs)
    where = usual.where
    if usual.url == CHAT and "logprobs" in record:
        if not isinstance(value, bool) or ("top_logprobs" in record and not value):
            raise DataError(
                "logprobs is unusable",
                where=where,
                found=repr(value),
                allowed="true or false, and true with top_logprobs",
                fix="correct it",
            )
        key = "top_logprobs"
        value = record.get("top_logprobs", 0) if value else None
    elif "top_logprobs" in record:
        raise DataError("top_logprobs is given without logprobs", where=where, fix='add "logprobs": true')
    if value is None or value is False:
        return None
    _require_whole(key, value, 0, MAX_LOGPROBS, where)
    return int(value)


def _require_whole(key: str, value: object, least: int, most: int, where: str) -> None:
    """Raises DataError unless the value is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise DataError(
            f"{key} is out of range",
            where=where,
            found=repr(value),
            allowed=f"{least}..{most}",
            fix="correct it",
        )


def answer(
    request: Request, reply: Reply, model: str, spell: Spell, fields: list[str] | None = None
) -> dict[str, Any]:
    """Returns the line for a generated text.

    `spell` gives a token's text and bytes. A plain line has these `fields` and those it always has; without
    `fields` it has all.
    """
    prompt_tokens = reply.prompt_tokens
    output_tokens = len(reply.token_ids)
    if not request.url:
        asked = {"messages": list(request.messages)} if request.messages else {"prompt": request.prompt}
        line: dict[str, Any] = {"id": request.id, **asked, "text": reply.text, "token_ids": reply.token_ids}
        line |= {"finish_reason": reply.finish_reason, "prompt_tokens": prompt_tokens}
        line["output_tokens"] = output_tokens
        if request.logprobs is not None:
            line["logprobs"] = plain(spelled(reply.logprobs, spell))
            if request.echo:
                line["prompt_logprobs"] = plain(spelled(reply.echoed, spell))
        if not fields:
            return line
        return {key: value for key, value in line.items() if key in (*fields, *ALWAYS)}

    is_chat = request.url == CHAT
    text = request.prompt + reply.text if request.echo else reply.text
    content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    logprobs = None
    if request.logprobs is not None:
        tokens = spelled([*reply.echoed, *reply.logprobs], spell)  # without echo nothing is echoed
        logprobs = chat(tokens) if is_chat else completions(tokens, text)
    # "context", a text that fills the model's context, is one of ours only.
    finish = "length" if reply.finish_reason in ("length", "context") else "stop"
    choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}
    body = {
        "id": _derived_id("chatcmpl-" if is_chat else "cmpl-", request.id),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,  # no time: equal runs write equal files
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        },
    }
    return _envelope(request.id, 200, body)


def counted(answers: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Returns how many answers these are, how many of them are errors, and how many tokens they have."""
    records = failed = tokens = 0
    for line in answers:
        usage = ((line.get("response") or {}).get("body") or {}).get("usage") or {}
        records += 1
        failed += is_error(line)
        tokens += int(line.get("output_tokens", usage.get("completion_tokens", 0)))
    return {"records": records, "failed": failed, "tokens": tokens}


def is_error(line: dict[str, Any]) -> bool:
    """Returns whether an answer, plain or as OpenAI's, is an error."""
    return bool(line.get("error")) or (line.get("response") or {}).get("status_code", 200) != 200


def refusal(record: Request | Refused, error: str, code: int = BAD_REQUEST) -> dict[str, Any]:
    """Returns the line for a request that gets no text."""
    about: dict[str, Any] = {"code": code, "message": error}
    if not record.url:
        return {"id": record.id, "error": about}
    about["type"] = "invalid_request_error" if code == BAD_REQUEST else "error"
    return _envelope(record.id, code, {"error": about})


def _envelope(request_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer in OpenAI's batch format."""
    response = {"status_code": status, "request_id": _derived_id("req_", request_id), "body": body}
    return {
        "id": _derived_id("batch_req_", request_id),
        "custom_id": request_id,
        "response": response,
        "error": None,
    }


def _derived_id(prefix: str, request_id: str) -> str:
    """Returns an id that the same request always gets."""
    return f"{prefix}{hashlib.sha256(request_id.encode()).hexdigest()[:24]}"
