"""A batch job's input and output: what each line asks for, and how it is answered.

    plain     {"id": "a", "prompt": "..."} or {"id": "a", "messages": [...]}, settings beside them
    openai    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    text      a prompt a line, in files that are not .jsonl

Every line that is not blank gets one line in the output, at the same place. No torch here.
"""

from llama_ssp.records.answers import BROKEN, Reply, answer, refusal
from llama_ssp.records.request import Form, Refused, Request
from llama_ssp.records.source import Source, read_shard, read_source, require_good

__all__ = [
    "BROKEN", "Form", "Refused", "Reply", "Request", "Source", "answer", "read_shard", "read_source",
    "refusal", "require_good",
]  # fmt: skip
