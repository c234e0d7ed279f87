"""The line that answers a request: plain, or as OpenAI's batch output has it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llama_ssp.batch.requests import Form, Refused, Request
from llama_ssp.text.logprobs import ScoredToken, Spell, chat, completions, plain, spelled

BY_OPENAI = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
BAD_REQUEST, BROKEN = 400, 500
ALWAYS = ("id", "output_tokens")  # of a plain answer: what jobs are counted by


@dataclass(frozen=True)
class Reply:
    """A generated text; `index` is the request's. `echoed` are the prompt's log-probabilities."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    logprobs: list[ScoredToken] = field(default_factory=list)
    echoed: list[ScoredToken] = field(default_factory=list)


def answer(
    request: Request, reply: Reply, model: str, spell: Spell, fields: list[str] | None = None
) -> dict[str, Any]:
    """The line for a generated text; `spell` gives tokens' text. A plain line has these `fields`, or all."""
    prompt_tokens, output_tokens = reply.prompt_tokens, len(reply.token_ids)
    if request.form is Form.plain:
        asked = {"messages": list(request.messages)} if request.messages else {"prompt": request.prompt}
        line: dict[str, Any] = {"id": request.id, **asked, "text": reply.text, "token_ids": reply.token_ids}
        line |= {"finish_reason": reply.finish_reason, "prompt_tokens": prompt_tokens}
        line["output_tokens"] = output_tokens
        if request.logprobs is not None:
            line["logprobs"] = plain(spelled(reply.logprobs, spell))
            line |= {"prompt_logprobs": plain(spelled(reply.echoed, spell))} if request.echo else {}
        return {key: line[key] for key in line if not fields or key in (*fields, *ALWAYS)}
    is_chat, text = request.form is Form.chat, request.prompt * request.echo + reply.text
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None}
    if is_chat:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None}
    if request.logprobs is not None:
        found = spelled([*reply.echoed, *reply.logprobs], spell)
        choice["logprobs"] = chat(found) if is_chat else completions(found, text)
    choice["finish_reason"] = BY_OPENAI[reply.finish_reason]
    name, kind = ("chatcmpl-", "chat.completion") if is_chat else ("cmpl-", "text_completion")
    # `created` is 0: equal runs write equal files
    body = {"id": _name(name, request.id), "object": kind, "created": 0, "model": model, "choices": [choice]}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    body["usage"] = {**usage, "total_tokens": prompt_tokens + output_tokens}
    return _openai(request.id, 200, body)


def counted(answers: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many answers these are, how many of them are errors, and how many tokens were generated."""
    records = failed = tokens = 0
    for line in answers:
        usage = ((line.get("response") or {}).get("body") or {}).get("usage") or {}
        records += 1
        failed += is_error(line)
        tokens += int(line.get("output_tokens", usage.get("completion_tokens", 0)))
    return {"records": records, "failed": failed, "tokens": tokens}


def is_error(line: dict[str, Any]) -> bool:
    return bool(line.get("error")) or (line.get("response") or {}).get("status_code", 200) != 200


def refusal(record: Request | Refused, error: str, code: int = BAD_REQUEST) -> dict[str, Any]:
    """The line for a request that gets no text."""
    about: dict[str, Any] = {"code": code, "message": error}
    if record.form is Form.plain:
        return {"id": record.id, "error": about}
    about["type"] = "invalid_request_error" if code == BAD_REQUEST else "error"
    return _openai(record.id, code, {"error": about})


def _openai(name: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": _name("req_", name), "body": body}
    return {"id": _name("batch_req_", name), "custom_id": name, "response": response, "error": None}


def _name(kind: str, of: str) -> str:
    """Returns an id that the same request always gets."""
    return f"{kind}{hashlib.sha256(of.encode()).hexdigest()[:24]}"
