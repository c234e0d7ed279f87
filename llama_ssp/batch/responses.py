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
    """What was written."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int


def answer(request: Request, reply: Reply, model: str) -> dict[str, Any]:
    """The line of a text that was written."""
    if request.form in (Form.text, Form.plain):
        asked = {"messages": list(request.messages)} if request.messages else {"prompt": request.prompt}
        return {
            "id": request.id, **asked, "text": reply.text, "token_ids": reply.token_ids,
            "finish_reason": reply.finish_reason, "prompt_tokens": reply.prompt_tokens,
            "output_tokens": len(reply.token_ids),
        }  # fmt: skip
    is_chat, written = request.form is Form.chat, len(reply.token_ids)
    said = {"message": {"role": "assistant", "content": reply.text}} if is_chat else {"text": reply.text}
    body = {
        "id": _name("cmpl", request.id),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,  # equal runs write equal files
        "model": model,
        "choices": [
            {"index": 0, **said, "logprobs": None, "finish_reason": BY_OPENAI[reply.finish_reason]}
        ],
        "usage": {
            "prompt_tokens": reply.prompt_tokens, "completion_tokens": written,
            "total_tokens": reply.prompt_tokens + written,
        },
    }  # fmt: skip
    return _openai(
        request.id, {"status_code": 200, "request_id": _name("req", request.id), "body": body}, None
    )


def refusal(record: Request | Refused, error: str, code: int = BAD_REQUEST) -> dict[str, Any]:
    """The line of a request that gets no text."""
    if record.form in (Form.text, Form.plain):
        return {"id": record.id, "error": {"code": code, "message": error}}
    body = {
        "error": {"code": code, "message": error, "type": "invalid_request_error" if code == 400 else "error"}
    }
    return _openai(
        record.id, {"status_code": code, "request_id": _name("req", record.id), "body": body}, None
    )


def _openai(name: str, response: dict[str, Any], error: None) -> dict[str, Any]:
    return {"id": _name("batch_req", name), "custom_id": name, "response": response, "error": error}


def _name(kind: str, of: str) -> str:
    """An id that the same request always gets."""
    return f"{kind}_{hashlib.sha256(of.encode()).hexdigest()[:24]}"
