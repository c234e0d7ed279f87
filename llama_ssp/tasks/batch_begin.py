"""A batch job's first start: every prompt is tokenised once, to refuse bad ones before any is answered."""

from __future__ import annotations

from llama_ssp.batch.job import Job, require_good
from llama_ssp.batch.journal import Journal
from llama_ssp.batch.requests import Refused, Request
from llama_ssp.config import BatchConf, RunConf
from llama_ssp.errors import DataError
from llama_ssp.pair.batches import begun, encoded, unusable
from llama_ssp.report.run_folder import Progress
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens, conversation


def begin(job: Job, tokens: Tokens) -> Journal:
    """The job's journal; the input of a new one is checked to the last line."""
    longest, refused = 2, list[Refused]()
    records = job.source.records if job.source is not None else []
    with Progress("reading prompts", len(records), "prompts") as progress:
        for record in records:
            found = record if isinstance(record, Refused) else _checked(record, tokens, job.run)
            if isinstance(found, Refused):
                refused.append(found)
            else:
                longest = max(longest, found)
            progress.advance(1)
    require_good(job.run, [*refused])
    return job.begin(longest, refused)


def token_ids(request: Request, tokens: Tokens, run: RunConf) -> list[int]:
    """The request's prompt as tokens; refused if the model cannot continue it."""
    task, text = run.task, TextPrompt(request.id, request.said, request.where)
    assert isinstance(task, BatchConf)
    if request.messages:
        own = [dict(message) for message in request.messages]
        speaks = task.system and own[0]["role"] != "system"
        ids = tokens.chat([{"role": "system", "content": str(task.system)}, *own] if speaks else own)
    elif task.chat:
        ids = tokens.chat(conversation(request.prompt, task.system))
    else:
        ids = encoded(text, tokens, run.model.context)
    ids = begun(ids, tokens)
    problem = unusable(text, ids, run.model.context, run.model.vocab)
    if problem is not None:
        raise problem
    return ids


def _checked(request: Request, tokens: Tokens, run: RunConf) -> int | Refused:
    """How many tokens its text may get to have, or why it cannot be continued."""
    try:
        length = len(token_ids(request, tokens, run)) + request.max_new_tokens
    except DataError as error:
        return Refused(request.index, request.id, request.form, str(error))
    return min(length, run.model.context)
