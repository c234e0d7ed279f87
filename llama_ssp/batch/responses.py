"""The line that answers a request: plain, or as OpenAI's batch output has it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from llama_ssp.batch.requests import Form, Refused, Request

BY_OPENAI = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
BAD_REQUEST, BROKEN = 400, 500


@dataclass(frozen=True)
class Reply:
    """A generated text; `index` is the request's."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int


def answer(request: Request, reply: Reply, model: str) -> dict[str, Any]:
    """The line for a generated text."""
    prompt_tokens, output_tokens = reply.prompt_tokens, len(reply.token_ids)
    if request.form is Form.plain:
        asked = {"messages": list(request.messages)} if request.messages else {"prompt": request.prompt}
        line: dict[str, Any] = {"id": request.id, **asked, "text": reply.text, "token_ids": reply.token_ids}
        line |= {"finish_reason": reply.finish_reason, "prompt_tokens": prompt_tokens}
        return {**line, "output_tokens": output_tokens}
    is_chat = request.form is Form.chat
    said = {"message": {"role": "assistant", "content": reply.text}} if is_chat else {"text": reply.text}
    total = prompt_tokens + output_tokens
    body = {
        "id": _name("cmpl", request.id),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,  # equal runs write equal files
        "model": model,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": BY_OPENAI[reply.finish_reason]}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens, "total_tokens": total},
    }
    return _openai(request.id, 200, body)


def refusal(record: Request | Refused, error: str, code: int = BAD_REQUEST) -> dict[str, Any]:
    """The line for a request that gets no text."""
    about: dict[str, Any] = {"code": code, "message": error}
    if record.form is Form.plain:
        return {"id": record.id, "error": about}
    about["type"] = "invalid_request_error" if code == BAD_REQUEST else "error"
    return _openai(record.id, code, {"error": about})


def _openai(name: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": _name("req", name), "body": body}
    return {"id": _name("batch_req", name), "custom_id": name, "response": response, "error": None}


def _name(kind: str, of: str) -> str:
    """An id that the same request always gets."""
    return f"{kind}_{hashlib.sha256(of.encode()).hexdigest()[:24]}"
