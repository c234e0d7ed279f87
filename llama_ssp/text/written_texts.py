"""Texts that are there, with what is known of how they were sampled: read strictly; nothing is guessed. No
torch.

TEXTS are the folder of a run that wrote texts (generate, batch), the answers of a batch job, or JSONL:

    {"id": "a", "prompt_token_ids": [1, 2], "token_ids": [7, 8, 9], "logprobs": [-0.2, -1.5, -0.1],
     "finish_reason": "eos", "sampling": {"temperature": 0.7, "top_p": 0.9}}

Needed are `token_ids`, and `prompt_token_ids` or a `prompt` or `messages` that the target's tokenizer reads.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import yaml

from llama_ssp.config import (
    Controls,
    LogprobsOf,
    MeasureConf,
    OnBadRow,
    RunConf,
    SamplingConfig,
    home_expanded,
)
from llama_ssp.config.presets import nearest
from llama_ssp.config.validation import check_values
from llama_ssp.errors import DataError, RunError, UsageError, shortened
from llama_ssp.text.logprobs import LEAST
from llama_ssp.text.prompts import (
    CORRECT_PROMPTS,
    TextPrompt,
    lines_of,
    name_of,
    opened,
    parsed_object,
    reading,
    require_usable,
)

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
CONFIG = "config.yaml"
KEY = "task.replay"
FULL = ("length", "context")  # why a text ended that got all the tokens that it could
FINISHES = ("eos", "stop", *FULL)
FORMS = "the folder of a run of generate or batch, a batch job's answers, or JSONL with token_ids"
PROMPT_KEYS = ("chat", "system", "enable_thinking", "template")  # of a task: how prompts become tokens
MAX_ID = 2**31


@dataclass(frozen=True, kw_only=True)
class WrittenText:
    """One text. `room` is how many tokens it could get, None where that is not known.

    `logprobs` are those of the distribution that its tokens were drawn from, None where they are not known.
    Of `prompt_ids`, `messages` and `prompt` one holds the prompt.
    """

    id: str
    where: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...] | None = None
    prompt: str = ""
    messages: tuple[dict[str, str], ...] = ()
    logprobs: tuple[float, ...] | None = None
    finish: str | None = None
    room: int | None = None

    @property
    def as_prompt(self) -> TextPrompt:
        """Returns the prompt as one of a run."""
        said = self.prompt or "\n".join(message["content"] for message in self.messages)
        return TextPrompt(self.id, said, self.where)


@dataclass(frozen=True, kw_only=True)
class WrittenTexts:
    """All texts of one replay, which were sampled under the same settings.

    `target` is the name of what wrote them, where they say it; `task` has what its prompts were made by.
    """

    texts: list[WrittenText]
    skipped: list[str]
    sampling: SamplingConfig
    target: str | None = None
    task: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, run: RunConf) -> RunConf:
        """Returns the run with the settings of the texts."""
        task = replace(run.task, **self.task) if self.task else run.task
        return replace(run, sampling=self.sampling, task=task)


@dataclass(kw_only=True)
class RecordFacts:
    """What the records of TEXTS have in common.

    `sampling` is how their tokens were drawn, None where each record says it; `has_sampled` tells that
    log-probabilities are those of the distribution that tokens were drawn from, whatever the settings.
    """

    sampling: SamplingConfig | None
    has_sampled: bool = False
    room: int | None = None


def taken_up(run: RunConf, world: int) -> tuple[WrittenTexts, RunConf]:
    """Returns the texts that the run replays, and the run with their settings.

    Raises UsageError for several ranks, DataError for texts that cannot be replayed.
    """
    if world > 1 or (run.ranks or 1) > 1:
        raise UsageError(
            "texts are replayed by one process",
            where="task.replay",
            found=f"{max(world, run.ranks or 1)} ranks",
            allowed="1",
            fix="let the run that writes the texts give their log-probabilities "
            "(logprobs=0 logprobs_of=sampled); the target is then not needed here",
        )
    texts = read_texts(run)
    return texts, replace(texts.applied(run), ranks=1)


def read_texts(run: RunConf) -> WrittenTexts:
    """Returns the texts that `task.replay` names. Raises DataError or StorageError."""
    task = run.task_as(MeasureConf)
    assert task.replay is not None
    path = home_expanded(task.replay)
    # What the command says holds for texts that do not say it themselves.
    given = RecordFacts(sampling=run.sampling if run.sampling.named else None)
    if path.is_dir():
        texts_of_run = _of_folder(path, task.on_bad_row)
        _require_settings(run.sampling, texts_of_run.sampling, path)
        return texts_of_run
    with opened(KEY, task.replay) as file:
        records = ((line.where, partial(parsed_object, line)) for line in lines_of(file, task.replay))
        texts, skipped, sampling = _all(records, given, task.on_bad_row)
    return WrittenTexts(texts=texts, skipped=skipped, sampling=sampling)


def _require_settings(asked: SamplingConfig, used: SamplingConfig | None, path: Path) -> None:
    """Raises DataError where the command line names other settings than the run that wrote the texts had."""
    drawn = {} if used is None else asdict(used.controls)
    for name, value in asked.named.items():
        if name in drawn and drawn[name] != value:
            raise DataError(
                "the texts were drawn by other settings",
                where=path,
                found=f"sampling.{name}={value} on the command line",
                allowed=f"{name} {drawn[name]}, as the run that wrote them had",
                fix="leave the setting out, or write texts with it",
            )


def _of_folder(path: Path, policy: OnBadRow) -> WrittenTexts:
    """Returns the texts of a run's folder. Raises DataError for the folder of a run that wrote none."""
    summary = _document(path / SUMMARY, json.loads)
    config = _document(path / CONFIG, yaml.safe_load)
    task = config.get("task")
    sampling = config.get("sampling")
    if not isinstance(task, dict) or not isinstance(sampling, dict):
        raise _no_texts(path, f"a {CONFIG} without task and sampling")
    if task.get("special_tokens"):
        raise DataError(
            "names of special tokens in prompts cannot be read again",
            where=path / CONFIG,
            found="task.special_tokens=true",
            fix="give the texts as JSONL with prompt_token_ids",
        )

    source = RecordFacts(
        sampling=_sampling(sampling, str(path / CONFIG)),
        has_sampled=task.get("logprobs_of") == LogprobsOf.sampled.value,
    )
    if summary.get("task") == "generate" and isinstance(summary.get("outputs"), list):
        source.room = task.get("max_new_tokens")
        records = (
            (f"{path / SUMMARY} outputs[{number}]", partial(_object, output))
            for number, output in enumerate(summary["outputs"])
        )
        texts, skipped, used = _all(records, source, policy)
    elif summary.get("task") == "batch" and isinstance(summary.get("output"), str):
        name = summary["output"]
        with opened("output", name) as file:
            lines = ((line.where, partial(parsed_object, line)) for line in lines_of(file, name))
            texts, skipped, used = _all(lines, source, policy)
    else:
        raise _no_texts(path, f"a run of {summary.get('task')}")

    return WrittenTexts(
        texts=texts,
        skipped=skipped,
        sampling=used,
        target=summary.get("target"),
        task={name: task[name] for name in PROMPT_KEYS if name in task},
    )


def _document(path: Path, read: Callable[[str], Any]) -> dict[str, Any]:
    """Returns what a file of a run's folder says. Raises DataError."""
    with reading(KEY, path):
        text = path.read_bytes()
    try:
        content = read(text.decode())
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise _no_texts(path, shortened(str(error), 100)) from None
    if not isinstance(content, dict):
        raise _no_texts(path, type(content).__name__)
    return content


def _no_texts(path: Path, found: str) -> DataError:
    return DataError(
        "there are no texts to replay", where=path, found=found, allowed=FORMS, fix="name one of these"
    )


def _object(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError("the record is no object", found=type(record).__name__, fix="write the texts anew")
    return record


def _all(
    records: Iterable[tuple[str, Callable[[], dict[str, Any]]]], source: RecordFacts, policy: OnBadRow
) -> tuple[list[WrittenText], list[str], SamplingConfig]:
    """Returns the texts, what was skipped by the policy, and the settings that all have. Raises DataError."""
    texts = list[WrittenText]()
    skipped = list[str]()
    seen = dict[str, str]()
    common: SamplingConfig | None = None
    for where, read in records:
        try:
            text, sampling = _text(read(), where, source)
            require_usable(text.as_prompt, seen)
            if common is not None and sampling.controls != common.controls:
                raise DataError(
                    "the texts were sampled under different settings",
                    where=f"{texts[0].where} and {where}",
                    found=_difference(common.controls, sampling.controls),
                    fix="replay those of each setting by themselves",
                )
        except DataError as problem:
            if policy is OnBadRow.fail:
                raise
            log.warning("skipped: %s", problem)
            skipped.append(str(problem))
            continue
        common = common or sampling
        seen[text.id] = where
        texts.append(text)

    if common is None:
        found = f"{len(skipped)} bad ones, first: {skipped[0]}" if skipped else "no record"
        raise DataError("no usable text is left", where=KEY, found=found, fix=CORRECT_PROMPTS)
    return texts, skipped, common


def _difference(one: Controls, other: Controls) -> str:
    """Returns the first setting that differs, with both values."""
    for name, value in asdict(one).items():
        if getattr(other, name) != value:
            return f"{name} {value} and {getattr(other, name)}"
    return ""


def _text(record: dict[str, Any], where: str, source: RecordFacts) -> tuple[WrittenText, SamplingConfig]:
    """Returns a record's text and its settings. Raises DataError for what is missing, or cannot be."""
    if record.get("error"):
        raise DataError(
            "the record is an error, not a text", where=where, fix="leave it out, or write on_bad_row=skip"
        )
    if "custom_id" in record:
        raise DataError(
            "an answer in OpenAI's format has no token ids",
            where=where,
            fix='let the job answer plain lines: {"id": ..., "prompt": ...}',
        )
    own_id = name_of(record.get("id", where.rpartition("/")[2]), where)
    token_ids = _ids(record, "token_ids", where)
    if not token_ids:
        raise DataError("the text has no tokens", where=where, fix="leave it out, or write on_bad_row=skip")
    count = record.get("output_tokens", len(token_ids))
    if count != len(token_ids):
        raise DataError(
            "the record is cut",
            where=where,
            found=f"{len(token_ids)} token_ids",
            allowed=f"output_tokens, {count}",
            fix="write the texts anew",
        )

    finish = record.get("finish_reason")
    if finish is not None and finish not in FINISHES:
        raise DataError(
            "the finish_reason is not known",
            where=where,
            found=repr(finish),
            allowed=", ".join(FINISHES),
            fix="correct it, or leave it out",
        )
    prompt_ids, prompt, messages = _prompt(record, where)
    sampling = _own_sampling(record, where, source)
    text = WrittenText(
        id=own_id,
        where=where,
        token_ids=token_ids,
        prompt_ids=prompt_ids,
        prompt=prompt,
        messages=messages,
        logprobs=_logprobs(record, where, source, sampling, token_ids),
        finish=finish,
        room=len(token_ids) if finish in FULL else source.room,
    )
    return text, sampling


def _ids(record: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Returns a list of token ids. Raises DataError."""
    value = record.get(key)
    if not isinstance(value, list):
        raise DataError(
            f"the record has no {key}",
            where=where,
            found=", ".join(record),
            allowed="a list of token ids",
            fix="add it: texts are replayed by their tokens",
        )
    for place, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < MAX_ID:
            raise DataError(
                f"{key} holds what is no token id",
                where=f"{where}, {key}[{place}]",
                found=shortened(repr(token), 40),
                allowed=f"whole numbers from 0, below {MAX_ID}",
                fix="correct it",
            )
    return tuple(value)


def _prompt(
    record: Mapping[str, Any], where: str
) -> tuple[tuple[int, ...] | None, str, tuple[dict[str, str], ...]]:
    """Returns the prompt as token ids, as a text and as messages; two of the three are empty."""
    if "prompt_token_ids" in record:
        return _ids(record, "prompt_token_ids", where), "", ()
    prompt = record.get("prompt")
    messages = record.get("messages")
    if isinstance(prompt, str):
        return None, prompt, ()
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return None, "", tuple(messages)
    raise DataError(
        "the record has no prompt",
        where=where,
        found=", ".join(record),
        allowed="prompt_token_ids, prompt, messages",
        fix="add prompt_token_ids",
    )


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and {"role", "content"} <= message.keys()
        and all(isinstance(value, str) for value in message.values())
    )


def _own_sampling(record: Mapping[str, Any], where: str, source: RecordFacts) -> SamplingConfig:
    """Returns how the record's tokens were drawn. Raises DataError where nothing says it."""
    own = record.get("sampling")
    if own is None and source.sampling is not None:
        return source.sampling
    if own is None:
        raise DataError(
            "the sampling settings of the text are not known",
            where=where,
            allowed='"sampling" in the record, or sampling=plain or temperature=0.7 on the command line',
            fix="say them: the replay is of the distribution that the tokens were drawn from",
        )
    return _sampling(own, where)


def _sampling(own: object, where: str) -> SamplingConfig:
    """Returns settings that a record or a run's folder says. Raises DataError."""
    known = list(vars(SamplingConfig()))
    if not isinstance(own, dict):
        raise DataError(
            "sampling is no object", where=where, found=repr(own)[:60], fix='write {"temperature": 0.7}'
        )
    if unknown := [str(key) for key in own if key not in known]:
        near = nearest(unknown[0], known)
        fix = f"did you mean {near}?" if near else "leave it out"
        raise DataError(
            f"there is no sampling setting {unknown[0]}", where=where, allowed=", ".join(known), fix=fix
        )
    try:
        sampling = replace(SamplingConfig(), **own)
        if sampling.logit_bias and isinstance(sampling.logit_bias, dict):  # JSON has texts for keys
            sampling.logit_bias = {int(token): bias for token, bias in sampling.logit_bias.items()}
        check_values(sampling, "sampling.")
    except (RunError, ValueError) as error:
        raise DataError(f"a sampling setting is wrong: {error}", where=where, fix="correct it") from None
    return sampling


def _logprobs(
    record: Mapping[str, Any],
    where: str,
    source: RecordFacts,
    sampling: SamplingConfig,
    token_ids: tuple[int, ...],
) -> tuple[float, ...] | None:
    """Returns the log-probabilities of the distribution that tokens were drawn from; None without them.

    A list of numbers is of that distribution. A list of objects is as answers have it, of the target's own
    distribution unless the run says otherwise: it is the same where no setting changes anything.
    """
    value = record.get("logprobs")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != len(token_ids):
        found = f"{len(value)} of {len(token_ids)}" if isinstance(value, list) else type(value).__name__
        raise DataError(
            "there is not one log-probability for each token",
            where=where,
            found=found,
            allowed=f"{len(token_ids)}",
            fix="write the texts anew, or leave logprobs out: the target then reads them",
        )

    numbers = list[float]()
    is_own = False
    for place, (entry, token) in enumerate(zip(value, token_ids, strict=True)):
        logprob = entry
        if isinstance(entry, dict):
            is_own = True
            logprob = entry.get("logprob")
            if entry.get("token_id", token) != token:
                logprob = None
        is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if not is_number or not -inf < logprob <= 0:
            raise DataError(
                "a log-probability is missing, not a number, or above 0",
                where=f"{where}, logprobs[{place}]",
                found=shortened(repr(entry), 60),
                allowed="a number up to 0, of the token in its place",
                fix="write the texts anew, or leave logprobs out: the target then reads the texts",
            )
        numbers.append(float(logprob) if logprob > LEAST else -inf)

    if is_own and not source.has_sampled and sampling.controls != Controls():
        return None
    return tuple(numbers)
