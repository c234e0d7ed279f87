"""task=chat: what its commands do, and how a conversation goes on when its context is full."""

import json
from dataclasses import replace
from operator import sub
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_ssp import load_pair
from llama_ssp.config import ChatConf, RunConf
from llama_ssp.errors import DataError, DistributedError, UsageError
from llama_ssp.pair.conversation import Conversation
from llama_ssp.tasks.chat_settings import in_words, with_setting
from llama_ssp.text.messages import Message
from llama_ssp.text.transcript import FILE, Transcript, read_transcript
from tests.conftest import Command
from tests.test_conversation import FP32, SAID, folder, talk  # noqa: F401
from tests.warm import Answer, Started

SMALL = ("task=chat", "seed=1", "task.max_new_tokens=8", "task.context=600", *FP32)
WIDE = ("model.context=600", "draft.context=600")


def answer_to(command: Command, *lines: str, words: tuple[str, ...] = ()) -> Answer:
    answer = command(*SMALL, *WIDE, *words, stdin="\n".join(lines).encode())
    assert answer.code == 0, answer.err
    return answer


def said(answer: Answer) -> list[str]:
    return [message["content"] for message in answer.document["messages"]]


def test_undo_and_retry(folder: Path) -> None:  # noqa: F811
    """Another reply has draws of its own; what was taken back leaves no trace in the next reply."""
    with load_pair(folder, folder, max_tokens=400, overrides=FP32) as pair:
        one, other = talk(pair), talk(pair)
        for text in SAID[:2]:
            for each in (one, other):
                "".join(each.reply(text))
        first = one.history[-1]["content"]
        "".join(one.retry())
        assert one.history[:3] == other.history[:3] and len(one.history) == 4
        assert one.history[-1]["content"] != first
        assert one.undo() == SAID[1] and one.history == other.history[:2]
        one._turn = other._turn = 1
        other.history = other.history[:2]
        for each in (one, other):
            "".join(each.reply(SAID[2]))
        assert one.history == other.history
        assert [one.undo(), one.undo(), one.undo()] == [SAID[2], SAID[0], None]
        with pytest.raises(DataError, match="no reply to make anew"):
            "".join(one.retry())


def test_a_retry_that_is_stopped_leaves_the_reply(folder: Path) -> None:  # noqa: F811
    with load_pair(folder, folder, max_tokens=400, overrides=FP32) as pair:
        one = talk(pair)
        "".join(one.reply(SAID[0]))
        history = list(one.history)
        one.stop()
        assert "".join(one.retry()) == "" and one.history == history


def test_commands_through_a_pipe(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    """By all their names, with all that can be wrong: each is a line, and the chat goes on."""
    answer = answer_to(
        command,
        "/undo", "/retry", "hello", "again", "/undo", "/save kept.json", "/save /", "/save", "/load",
        "/load no",
        "/set", "/set temperature", "/set temperature hot", "/set temperature -1", "/set tempreature 1",
        "/set num_ctx 5", "/set temperature [", "/set k 99", "/set temperature 0", "/set nothink", "/what",
        "/set system be short", "/show", "/set system",
        "/clear", "new", "/load kept.json", "/system be brief", "more", "/retry", "/?", "/bye", "never sent",
    )  # fmt: skip
    assert said(answer)[::2] == ["hello", "more"]
    assert json.loads(Path("kept.json").read_text()) == {"messages": answer.document["messages"][:2]}
    for line in (
        "There is nothing to take back", "Taken back, with its reply: again", "2 messages are in kept.json",
        "begins anew", "goes on after 2 messages", "system message is set", "no command /what", "/undo  ",
        ", at most ",
        "temperature 0, K =", "enable_thinking False", "system message: be short", "message is removed",
    ):  # fmt: skip
        assert line in answer.out, line
    for problem in (
        "no reply to make anew", "/save needs a file", "/load needs a file", "no such conversation",
        "/set temperature needs a value", "is of the wrong type", "sampling.temperature is out of range",
        "no such setting; found tempreature", "context is fixed", "cannot be read", "k is out of range",
    ):  # fmt: skip
        assert problem in caplog.text, problem


def test_a_file_of_something_else_is_not_written_over(
    command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    Path("notes.txt").write_text("mine")
    answer = answer_to(command, "hello", "/save notes.txt", "/save new.json", "again", "/save new.json")
    assert Path("notes.txt").read_text() == "mine" and "no conversation" in caplog.text
    assert json.loads(Path("new.json").read_text())["messages"] == answer.document["messages"]


def test_settings_change_the_next_reply(command: Command) -> None:
    """Greedy is greedy's own text, with K = 0 and drafts; a longer reply has more tokens."""
    greedy = said(answer_to(command, "hello", words=("sampling=greedy",)))
    sampled = said(answer_to(command, "hello"))
    assert greedy != sampled
    assert said(answer_to(command, "/set temperature 0", "hello")) == greedy
    answer = answer_to(command, "/set temperature=0", "/set k 0", "/set max_new_tokens 20", "hello")
    assert said(answer)[1].startswith(greedy[1])
    [reply] = answer.document["replies"]
    assert reply["output_tokens"] == 20 and answer.document["tokens_drafted"] == 0
    both = answer_to(command, "/set k 0", "/set k auto", "hello")
    assert both.document["tokens_drafted"] > 0 and said(both) == sampled


@pytest.fixture
def run(command: Command, taken: list[RunConf]) -> RunConf:
    command("task=chat", "k=3", stdin=b"")
    return taken[0]


def test_what_can_be_set(run: RunConf) -> None:
    for words, expected in (
        ("temperature 0.5", {"temperature": 0.5}),
        ("parameter top_k 7", {"top_k": 7}),
        ("repeat_penalty 1.5", {"repetition_penalty": 1.5}),
        ("bad_tokens [1, 2]", {"bad_tokens": [1, 2]}),
        ("temperature null", {"temperature": None}),
    ):
        changed = with_setting(run, words, run)
        assert changed.sampling == replace(run.sampling, **expected) and run is not changed
    for words, value in (("think", True), ("nothink", False), ("enable_thinking null", None)):
        assert with_setting(run, words, run).task.enable_thinking is value
    assert with_setting(run, "num_predict 9", run).task.max_new_tokens == 9
    assert not with_setting(run, "show_thinking false", run).task_as(ChatConf).show_thinking
    assert with_setting(run, "k 1", run).speculation.k == 1
    without = replace(run, draft=None)
    for wrong in ("k 4", "k -1", "k x", "bad_tokens [99999999]", "top_p 2", "max_new_tokens -1", "model x"):
        with pytest.raises(UsageError):
            with_setting(run, wrong, run)
    with pytest.raises(UsageError, match=r"allowed \[0, 0\]"):
        with_setting(without, "k 1", without)
    assert "K = 3" in in_words(run) and "K = " not in in_words(without)


def test_a_full_conversation_goes_on(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    """A line says by which command: with more context, or with room that is made."""
    lines = ("hello, you", "x" * 200, "/undo", "hi")
    answer = answer_to(command, *lines, words=("task.context=100",))
    assert said(answer)[::2] == ["hi"]
    place = answer.document["run_folder"]
    assert f"start with resume={place} context=200" in caplog.text
    more = command(*SMALL, *WIDE, f"resume={place}", "task.context=200", stdin=b"hello, you")
    assert said(more)[::2] == ["hi", "hello, you"]
    caplog.clear()
    answer_to(command, "x" * 200, words=("task.context=100", "model.context=100", "out=null"))
    assert "It has all of the model's context" in caplog.text
    caplog.clear()
    answer_to(command, "x" * 200, words=("task.context=100", "out=null"))
    assert "/save FILE" in caplog.text


@pytest.mark.parametrize(("least", "context"), [(2048, 300), (100, 300)])
def test_the_context_is_the_model_s_own(
    least: int, context: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a reply may fill it."""
    monkeypatch.setattr("llama_ssp.pair.session.LEAST_CONTEXT", least)
    words = ("task=chat", "seed=1", f"model.context={context}", "draft.context=300")
    answer = command(*words, stdin=b"hello")
    [reply] = answer.document["replies"]
    assert reply["finish_reason"] == "context"
    assert reply["prompt_tokens"] + reply["output_tokens"] == context


def test_the_context_is_what_fits(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one is refused, which is the control."""
    limits = list[int]()

    class Spy(Conversation):
        def __init__(self, pair: Any, seed: int, limit: int, new_tokens: int, stops: Any = ()) -> None:
            limits.append(limit)
            raise DataError("that is all")

    monkeypatch.setattr("llama_ssp.tasks.chat.Conversation", Spy)
    monkeypatch.setattr("llama_ssp.pair.session.PairSession.load", lambda *_: None)
    words = ("task=chat", "draft=none", "model.context=50000000", "cluster.gib=2", "cluster.reserve=0.1")
    command(*words, stdin=b"hello")
    [limit] = limits
    assert 10_000 < limit < 40_000_000
    monkeypatch.undo()
    with pytest.raises(DistributedError):
        load_pair("tiny", None, max_tokens=limit * 2, overrides=list(words[2:]))


@pytest.mark.long
def test_a_day(command: Command) -> None:
    """300 turns with every command: the file has the conversation, memory stays where it was, and a turn
    reads only what is new.
    """
    held = list[int]()
    told = Transcript.keep

    def keep(transcript: Transcript, messages: list[Message]) -> None:
        told(transcript, messages)
        held.append(psutil.Process().memory_info().rss)

    typed = list[str]()
    for number in range(300):
        typed.append(f"message {number}")
        if number % 10 == 9:
            typed += ["/undo", "/retry", f"/set temperature {1 + number / 1000}", "/set k 1", "/set k auto"]
            typed += ["/stats", "/save day.json", "/load day.json", "/system be brief", "/system", "/?"]
        if number % 40 == 39:
            typed.append("/clear")
    words = (*SMALL, "task.max_new_tokens=4", "task.context=2000", "model.context=2000", "draft.context=2000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transcript, "keep", keep)
        answer = command(*words, stdin="\n".join(typed).encode())
    assert answer.code == 0
    found = answer.document
    assert len(found["replies"]) == 330
    assert read_transcript(Path(found["run_folder"]) / FILE) == found["messages"]
    assert max(held) - held[100] < 60e6
    prompts = [reply["prompt_tokens"] for reply in found["replies"]]
    kept = [reply["prompt_tokens_kept"] for reply in found["replies"]]
    assert max(prompts) > 1000 and max(map(sub, prompts, kept)) < 100


@pytest.mark.slow
def test_over_ranks_the_leader_s_file_is_read(command: Command, tmp_path: Path) -> None:
    """Commands that change what was said act on every rank."""
    words = [*SMALL, *WIDE, "model=tiny", "draft=tiny_draft", "output=json", "out=null"]
    typed = (
        "hello\nagain\n/undo\n/save kept.json\n/clear\n/load kept.json\n/set temperature 0\n/set k 1\nso\n"
    )
    typed += "/load nothing\n/retry\n"
    alone = command(*words, stdin=typed.encode()).document
    leader, other = Started(tmp_path, 2, *words, stdin=typed).finish()
    assert (leader.code, other.code, other.out) == (0, 0, ""), leader.err + other.err
    assert leader.document["messages"] == alone["messages"] and len(alone["messages"]) == 4
