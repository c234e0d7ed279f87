"""A batch job's input, line by line, and the shape of its answers."""

import hashlib
import json
import math
import re
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.batch import records
from llama_ssp.batch.atomic_files import sealed
from llama_ssp.batch.index import Index
from llama_ssp.batch.job import job_of, require_good
from llama_ssp.batch.records import COMPLETIONS, Reader, Refused, Request, answer, refusal
from llama_ssp.config import BatchConf, ModelConf, OnBadRow, RunConf, SamplingConfig
from llama_ssp.errors import DataError
from llama_ssp.pair.requests import Reply, TokenRequest
from llama_ssp.speculative.state import Prompt
from llama_ssp.text.detokenizer import TextSoFar
from llama_ssp.text.logprobs import ScoredToken
from llama_ssp.text.prompts import Line
from tests.test_journal import KILLED, Deadly, in_child

SAMPLING = SamplingConfig(temperature=0.7)
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "u"}


def run_of(path: Path, **changes: Any) -> RunConf:
    task = replace(BatchConf(name="batch", input=str(path), output="out.jsonl", max_new_tokens=32), **changes)
    return RunConf(model=ModelConf(name="m", vocab=100, context=64), task=task, sampling=SAMPLING)


def read(folder: Path, content: bytes | str, name: str = "in.jsonl", **changes: Any) -> list[Any]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return records_of(run_of(path, **changes), folder / "work")


def records_of(run: RunConf, work: Path) -> list[Any]:
    """Every record of the input. Raises DataError for bad lines."""
    index = Index.of_run(run, work)
    require_good(run, list(index.refused.values()))
    return [read_or_refused(index, number, run) for number in range(len(index))]


def read_or_refused(index: Index, number: int, run: RunConf) -> Request | Refused:
    try:
        return index.read(number, run)
    except Refused as refused:
        return refused


def openai(body: dict[str, Any], **more: Any) -> str:
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body, **more})


def chat(**more: Any) -> str:
    return json.dumps({"custom_id": "b", "url": CHAT, "body": {"messages": [USER], **more}})


def test_a_plain_line_has_the_runs_settings_or_its_own(tmp_path: Path):
    lines = [
        {"id": "a/b", "prompt": "x", "body": "of a letter"},
        {"prompt": "y", "temperature": 0, "max_tokens": 5, "stop": "\n", "seed": 9, "logit_bias": {"3": -1}},
        {"id": 7, "messages": [{"role": "system", "content": "s"}, USER]},
    ]
    found = read(tmp_path, "\n".join(map(json.dumps, lines)))
    assert [(r.index, r.id, r.url) for r in found] == [
        (0, "a/b", ""), (1, "line-2", ""), (2, "7", ""),
    ]  # fmt: skip
    assert (found[0].sampling, found[0].max_new_tokens, found[0].seed) == (SAMPLING, 32, None)
    assert found[1].sampling == replace(SAMPLING, temperature=0, logit_bias={3: -1})
    assert (found[1].max_new_tokens, found[1].stop, found[1].seed) == (5, ("\n",), 9)
    assert found[2].messages[1]["content"] == "u" and found[2].said == "s\nu"


@pytest.mark.parametrize(
    "line",
    ['{"prompt": "x", "seed": 0}', openai({"prompt": "x", "seed": 0}), chat(seed=0)],
    ids=["plain", "completion", "chat"],
)
def test_seed_0_of_a_line_is_its_own_seed(line: str, tmp_path: Path):
    """It is not the lack of one."""
    (request,) = read(tmp_path, line)
    assert request.seed == 0


def test_a_line_that_was_edited_after_the_job_began_is_refused(tmp_path: Path):
    """It is another request, though it is as long as before; other lines are read as ever."""
    path, run = tmp_path / "in.jsonl", run_of(tmp_path / "in.jsonl")
    path.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n')
    index = Index.of_run(run, tmp_path / "work")
    path.write_text(path.read_text().replace("two", "six"))
    assert index.read(0, run).prompt == "one"
    with pytest.raises(DataError, match=r"the input has changed while the job runs; .*in\.jsonl line 2"):
        index.read(1, run)


def test_an_openai_line(tmp_path: Path):
    body = {"model": "any", "prompt": "x", "max_tokens": 4, "temperature": 0, "n": 1, "stop": None}
    completion, conversation = read(tmp_path, openai(body) + "\n" + chat())
    assert (completion.url, completion.prompt, completion.max_new_tokens) == (COMPLETIONS, "x", 4)
    assert completion.sampling.temperature == 0
    assert (conversation.url, conversation.id) == (CHAT, "b")


def test_what_has_no_meaning_here_is_taken(tmp_path: Path):
    """Text parts are joined, a developer is the system, a name is left out."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "name": "ann", "content": parts}]
    harmless = {"store": True, "service_tier": "flex", "tools": [], "response_format": {"type": "text"}}
    (request,) = read(tmp_path, chat(messages=messages, **harmless))
    assert request.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"})


@pytest.mark.parametrize(
    "change",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
    ],
    ids=["a format", "a tool", "an image", "a tool's reply", "a list of roles"],
)
def test_what_has_a_meaning_that_is_not_kept_is_refused(change: dict[str, Any], tmp_path: Path):
    with pytest.raises(DataError):
        read(tmp_path, chat(**change))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x"', "line 2.*"),
        ('{"prompt": 5}', "no prompt.*found a prompt of type int"),
        ('{"prompt": "x", "messages": []}', "no prompt.*found both a prompt and messages"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
            "not text.*message 1: a part of type image_url",
        ),
        ('{"messages": []}', "no prompt.*found messages that are no list, or an empty one"),
        ('{"text": "x"}', "no prompt.*found text"),
        (chat(messages=[USER, {"role": "tool", "content": "x"}]), "no prompt.*found message 2: .*'tool'"),
        ('{"prompt": "x", "max_tokens": 3, "max_new_tokens": 4}', "found max_tokens 3, max_new_tokens 4"),
        ('{"prompt": "x", "prompt": "y"}', "twice"),
        ('{"id": "first", "prompt": "x"}', "an id is used twice.*line 1 and .*line 2"),
        ('{"id": "a\\nb", "prompt": "x"}', "an id is unusable"),
        ('{"id": true, "prompt": "x"}', "neither text nor a whole number"),
        ('{"prompt": "x", "temperatur": 1}', "did you mean temperature"),
        ('{"prompt": "x", "temperature": -1}', "sampling.temperature is out of range"),
        ('{"prompt": "x", "temperature": "hot"}', "wrong type"),
        ('{"prompt": "x", "max_new_tokens": 64}', "task.max_new_tokens is out of range"),
        ('{"prompt": "x", "min_new_tokens": 33}', "min_new_tokens exceeds"),
        ('{"prompt": "x", "stop": [""]}', "stop is not a list"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "not a map of tokens"),
        ('{"prompt": "x", "logit_bias": {"' + "9" * 5000 + '": 1}}', "not a map of tokens"),
        ('{"prompt": "x", "logit_bias": {"-1": 1}}', "not a map of tokens"),
        ('{"prompt": "x", "logit_bias": {"100": 1}}', "model m has 100 tokens"),
        ('{"prompt": "x", "seed": -1}', "seed is out of range"),
        (openai({"prompt": "x"}, url="/v1/embeddings"), "method and url"),
        (openai({"prompt": "x"}, url=CHAT), "choose the other url"),
        (openai({"prompt": "x", "n": 2}), "asks for n.*found 2, allowed 1"),
        (openai({"prompt": "x", "functions": []}), "asks for functions, which is not served"),
        (openai({"prompt": "x", "logprobs": 21}), "logprobs is out of range"),
        (openai({"prompt": "x", "echo": 1}), "echo is unusable"),
        (chat(logprobs=2), "logprobs is unusable"),
        (chat(top_logprobs=2), "top_logprobs is given without"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs is out of range"),
        (chat(echo=True), "asks for echo"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "no body"),
        ('{"url": "/v1/completions", "body": {"prompt": "x"}}', "no custom_id"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": "x"}', "body is not an object; .*found str"),
    ],
    ids=lambda value: value[:60],
)
def test_a_bad_line_is_named(line: str, said: str, tmp_path: Path):
    content = '{"id": "first", "prompt": "good"}\n' + line + "\n"
    with pytest.raises(DataError, match=said) as error:
        read(tmp_path, content)
    assert "line 2" in str(error.value)
    good, bad = read(tmp_path, content, on_bad_row=OnBadRow.skip)
    assert isinstance(good, Request) and isinstance(bad, Refused)
    assert bad.error == str(error.value)


PLAIN = [
    '{"id": "a b", "prompt": "x \\n\\" \\\\ é"}', '{"prompt":"x","id":"a"}', '{"prompt": ""}'"\r",
]  # fmt: skip
OTHERS = [
    '{"id": "é", "prompt": "x"}', '{"id": 1, "prompt": "x"}', '{"id": "", "prompt": "x"}', '{"id": "a"}',
    '{"id": "\\u0061", "prompt": "x"}', '{"id": "' + "a" * 257 + '", "prompt": "x"}', '{"prompt": "x"} ',
    '{"prompt": "\\u0000"}', '{"prompt": "\\q"}', '{"prompt": "x}', '{"prompt": "x\t"}', '{"prompt": "x\0"}',
    '{"id": "a", "prompt": "x", "seed": 1}', '{"prompt": "x", "prompt": "y"}', "[]",
    '{"id": "a", "id": "b", "prompt": "x"}', '{"id": "a", "prompt": "x", "id": "b"}',
]  # fmt: skip


@pytest.mark.parametrize("text", [*PLAIN, *OTHERS])
def test_a_line_that_is_read_fast_is_the_request_that_a_whole_reading_gives(text: str, tmp_path: Path):
    """Any other line is read whole."""
    line, reader = Line(3, 0, text.encode(), "in.jsonl"), Reader(run_of(tmp_path / "in.jsonl"), is_text=False)
    found, whole = reader.simple_id(line), None
    with suppress(Refused):
        whole = reader.read(line, 0)
    assert (found is not None) is (text in PLAIN)
    if found is not None:
        assert isinstance(whole, Request)
        assert (whole.id, whole.max_new_tokens, whole.url) == (found, 32, "")
    damaged = line._replace(raw=text.encode().replace(b"x", b"\xff"))
    assert b"x" not in line.raw or reader.simple_id(damaged) is None


def test_the_settings_that_are_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They spare a second check; each line may have its own."""
    monkeypatch.setattr(records, "MAX_CHECKED", 3)
    reader = Reader(run_of(tmp_path / "in.jsonl"), is_text=False)
    for number in range(5):
        line = json.dumps(
            {"prompt": "x", "logit_bias": {str(number): 1}, "max_tokens": 5, "max_new_tokens": 5}
        )
        assert reader.read(Line(number, 0, line.encode(), "in.jsonl"), number).max_new_tokens == 5
    assert len(reader.checked) == 3


GOOD, BAD = '{"id": "dup", "prompt": "f"}', '{"id": "dup", "prompt": "f", "tempratur": 1}'
BAD_COMPLETION = json.dumps({"custom_id": "dup", "url": "/v1/completions", "body": {"n": 2}})


@pytest.mark.parametrize(
    "lines",
    [
        [GOOD, BAD], [BAD, GOOD], [BAD, BAD, GOOD], [BAD_COMPLETION, GOOD], [GOOD, BAD_COMPLETION],
        ["{", GOOD.replace("dup", "line-1")],
    ],
    ids=["good, bad", "bad, good", "bad, bad, good", "completion, good", "good, completion", "no JSON"],
)  # fmt: skip
def test_an_id_of_a_refused_line_is_used(lines: list[str], tmp_path: Path):
    """The error is an answer with this id. Lines after it are answered by their number, and say so."""
    first, *others = read(tmp_path, "\n".join(lines), on_bad_row=OnBadRow.skip)
    assert isinstance(first, Request) if lines[0] == GOOD else "used twice" not in first.error
    for number, record in enumerate(others, start=2):
        assert isinstance(record, Refused) and record.id == f"line-{number}" != first.id
        assert re.search(f"an id is used twice; .* line 1 and .* line {number};", record.error)


LONG_VALUE = json.dumps({"prompt": "x", "temperature": "y" * 1000})


def test_many_bad_lines_are_said_at_once(tmp_path: Path):
    """In short: each alone would repeat much of its value."""
    with pytest.raises(DataError, match=r"6 lines are bad.*line 5.*the first 5") as error:
        read(tmp_path, f"{LONG_VALUE}\n" * 6)
    assert len(str(error.value)) < 1500 and "\n" not in str(error.value)


def test_a_bad_line_alone_repeats_three_hundred_characters_of_its_value(tmp_path: Path):
    (alone,) = read(tmp_path, LONG_VALUE, on_bad_row=OnBadRow.skip)
    assert isinstance(alone, Refused) and len(alone.error) > 300


@pytest.mark.parametrize(
    ("size", "fits"), [(16 * 2**20, True), (16 * 2**20 + 1, False)], ids=["16 MiB", "a byte more"]
)
def test_the_longest_line_that_is_read(size: int, fits: bool, tmp_path: Path):
    line = '{"prompt": "' + "a" * (size - len('{"prompt": ""}')) + '"}\n'
    (record,) = read(tmp_path, line, on_bad_row=OnBadRow.skip)
    assert isinstance(record, Request) is fits


def test_not_utf8(tmp_path: Path):
    with pytest.raises(DataError, match=r"line 2, byte 8 of the file; found byte 0xff"):
        read(tmp_path, b"one\nabcd\xff\n", "in.txt")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["no mark", "a mark"])
def test_shards_hold_what_the_whole_holds(mark: bytes, tmp_path: Path):
    lines = [b'{"id": "%d", "prompt": "p%d"}' % (i, i) for i in range(10)]
    lines[3] = b"{"
    content = mark + b"\r\n\n".join(lines)
    whole = read(tmp_path, content, on_bad_row=OnBadRow.skip)
    output = str(tmp_path / "out.jsonl")
    run = run_of(tmp_path / "in.jsonl", on_bad_row=OnBadRow.skip, output=output, shard_size=4)
    job = job_of(run, {}, seed=1)
    shards = job.begin(9).manifest.shards
    again = job_of(run, {}, seed=1)
    assert [job.is_new, again.is_new] == [True, False]
    for known in (job, again):
        found = [read_or_refused(known.index, i, run) for shard in shards for i in shard.indices]
        assert [*map(str, found)] == [*map(str, whole)], known
    assert job.journal.manifest.input_sha256 == hashlib.sha256(content).hexdigest()


def test_a_job_with_biases_goes_on(tmp_path: Path):
    """As whole numbers their tokens are in another order than as the texts that JSON has for keys."""
    path, output = tmp_path / "in.txt", str(tmp_path / "out.jsonl")
    path.write_text("a prompt\n")
    run = run_of(path, output=output)
    run = replace(run, sampling=replace(run.sampling, logit_bias={9: 1.0, 10: 2.0}))
    job_of(run, {}, seed=1).begin(9)
    assert not job_of(run, {}, seed=1).is_new
    other = replace(run, sampling=replace(run.sampling, temperature=0.5))
    with pytest.raises(DataError) as refused:
        job_of(other, {}, seed=1)
    assert "temperature" in str(refused.value) and "logit_bias" not in str(refused.value)


def test_corrections_that_are_killed_anywhere_are_made_once(tmp_path: Path):
    """A job of four records, of which the second had an error; its line is corrected."""
    path, run = tmp_path / "in.jsonl", run_of(tmp_path / "in.jsonl", output=str(tmp_path / "out.jsonl"))
    run = replace(run, task=replace(run.task, on_bad_row=OnBadRow.skip, shard_size=2))
    path.write_text("".join(f'{{"id": "{i}", "prompt": {i if i == 1 else chr(34) * 2}}}\n' for i in range(4)))
    job = job_of(run, {}, seed=1)
    journal = job.begin(9)
    for shard in journal.manifest.shards:
        attempt = journal.attempt(shard)
        for index in shard.indices:
            attempt.finish(
                index, {"id": str(index), **({"error": {"code": 5}} if index == 1 else {"text": ""})}
            )
        attempt.publish()
    path.write_text(path.read_text().replace(": 1}", ': "good"}'))
    kills = 0
    for at in count(0, 30):
        deadly = Deadly(at)
        code = in_child(lambda d=deadly: (d.install(), job_of(run, {}, seed=1).reopen()))
        assert code in (0, KILLED), at
        kills += code == KILLED
        if code == 0:
            break
    job_of(run, {}, seed=1).reopen()
    assert kills > 30 and not job_of(run, {}, seed=1).corrected
    assert [job.journal.attempt(shard).missing for shard in journal.manifest.shards[:1]] == [[1]]
    assert job.journal.standing().records_finished == 3


WRITTEN = TextSoFar(lambda _: "", (), ())
WRITTEN.text = "text"
ASKED = TokenRequest(
    index=0, prompt=Prompt("0", (1, 2, 3)), sampling=SamplingConfig(), max_new_tokens=2, stop=()
)
REPLY = Reply(request=ASKED, written=WRITTEN, token_ids=[5, 6], finish_reason="eos")


def spell(token: int) -> tuple[str, bytes | None]:
    """Tokens are letters; 6 ends a text."""
    return ("<end>", None) if token == 6 else (chr(96 + token), bytes([96 + token]))


def test_answers_follow_the_form_of_the_question(tmp_path: Path):
    asked = ['{"id": "p", "prompt": "x"}', openai({"prompt": "x"}), chat()]
    plain, completion, conversation = read(tmp_path, "\n".join(asked))
    assert answer(plain, REPLY, "m", spell) == {
        "id": "p", "prompt": "x", "text": "text", "token_ids": [5, 6], "finish_reason": "eos",
        "prompt_tokens": 3, "output_tokens": 2,
    }  # fmt: skip
    line = answer(completion, REPLY, "m", spell)
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("a", None, 200)
    told = line["response"]["body"]
    assert told["choices"][0] == {"index": 0, "text": "text", "logprobs": None, "finish_reason": "stop"}
    assert told["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    said = answer(conversation, REPLY, "m", spell)["response"]["body"]
    assert said["object"] == "chat.completion" and said["id"].startswith("chatcmpl-")
    assert said["choices"][0]["message"] == {"role": "assistant", "content": "text"}
    assert answer(completion, REPLY, "m", spell) == line


def test_a_chat_s_log_probabilities_have_openai_s_form(tmp_path: Path):
    (asked,) = read(tmp_path, chat(logprobs=True, top_logprobs=1))
    assert asked.logprobs == 1
    scores = [ScoredToken(5, -0.25, ((7, -math.inf),)), ScoredToken(6, -1.0, ())]
    line = answer(asked, replace(REPLY, logprobs=scores), "m", spell)
    assert line["response"]["body"]["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "e", "logprob": -0.25, "bytes": [101],
                "top_logprobs": [{"token": "g", "logprob": -9999.0, "bytes": [103]}],
            },
            {"token": "<end>", "logprob": -1.0, "bytes": None, "top_logprobs": []},
        ]
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ['{"id": "OWN", "prompt": "x"}', openai({"prompt": "x"}, custom_id="OWN")],
    ids=["ours", "OpenAI's"],
)
@pytest.mark.parametrize("own", ["\\ud800", "x" * 257, ""], ids=["half a pair", "257 letters", "empty"])
def test_a_refused_line_whose_id_cannot_be_written_goes_by_its_number(line: str, own: str, tmp_path: Path):
    (found,) = read(tmp_path, line.replace("OWN", own), on_bad_row=OnBadRow.skip)
    assert found.id == "line-1" and "an id is unusable" in found.error
    sealed(refusal(found, found.error))


def test_refusals_follow_it_too(tmp_path: Path):
    plain, completion = read(tmp_path, "\n".join(['{"id": "p"}', openai({})]), on_bad_row=OnBadRow.skip)
    assert refusal(plain, "why") == {"id": "p", "error": {"code": 400, "message": "why"}}
    line = refusal(completion, "why", 500)
    assert line["response"]["status_code"] == 500 and line["response"]["body"]["error"]["message"] == "why"
