"""task=chat: history, commands, the limit of the context, and what is kept of the KV cache."""

import re
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import load_pair
from llama_ssp.pair.conversation import Conversation, written
from llama_ssp.tasks.interactive import block_of
from tests import checkpoints
from tests.conftest import Command
from tests.test_chat import tokens
from tests.warm import Started

FP32 = ("model.dtype=fp32", "draft.dtype=fp32")
SMALL = ("task=chat", "seed=1", "out=null", "task.max_new_tokens=8", *FP32)
SAID = ["hello there", "and then?", "go on"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = checkpoints.save(tmp_path_factory.mktemp("model"), vocab_size=320, max_position_embeddings=512)
    tokens(place)
    return place


def talk(pair: Any, **changes: Any) -> Conversation:
    how: dict[str, Any] = {"seed": 3, "limit": 400, "new_tokens": 12, **changes}
    return Conversation(pair._session, **how)


@pytest.mark.parametrize("drafting", ["draft", "ngram", "none"])
def test_replies_with_a_kept_cache_are_those_without(drafting: str, folder: Path) -> None:
    """The second prompt begins with the first; with another system message only the beginning is kept."""
    words = list(FP32) if drafting == "draft" else [FP32[0], *["speculation=ngram"] * (drafting == "ngram")]
    with load_pair(folder, folder if drafting == "draft" else None, max_tokens=400, overrides=words) as pair:
        kept, fresh = talk(pair), talk(pair)
        for number, text in enumerate([*SAID, SAID[0]]):
            for one in (kept, fresh):
                one.system = None if number < 3 else "be brief"
                assert "".join(one.reply(text)) == one.replies[-1].text
            fresh._state = None
            assert [reply.text for reply in kept.replies] == [reply.text for reply in fresh.replies], number
        assert kept.history == fresh.history and [reply.kept for reply in fresh.replies] == [0] * 4
        lengths = [reply.prompt_tokens for reply in kept.replies]
        assert kept.replies[0].kept == 0 and kept.replies[3].kept < 5
        for number in (1, 2):  # all of the prompt before it
            assert lengths[number] > kept.replies[number].kept >= lengths[number - 1] - 1
        tokens = pair._session.tokens
        assert lengths[1] == len(tokens.chat([*kept.history[:2], {"role": "user", "content": SAID[1]}]))


def test_a_reply_that_is_stopped(folder: Path) -> None:
    """The reply ends after its round. Its text is printed and kept in the history; the next is whole."""
    with load_pair(folder, folder, max_tokens=400, overrides=FP32) as pair:
        # Of every text the last letter may begin a stop string.
        one, read = talk(pair, new_tokens=60, stops=[chr(n) + "\1" for n in range(32, 127)]), ""
        for n, piece in enumerate(one.reply(SAID[0])):
            read += piece
            if n == 1:
                one.stop()
        first = one.replies[0]
        assert read == first.text
        assert first.finish_reason == "stopped" and 0 < first.counts.committed < 30
        assert one.history[-1] == {"role": "assistant", "content": first.text.strip()}
        for _ in one.reply(SAID[1]):
            pass
        assert one.replies[1].counts.committed > first.counts.committed


def test_through_a_pipe(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    typed = ["hello", "/stats", "/nothing", "/help", '"""two', 'lines"""', "/system be brief", "/reset"]
    answer = command(*SMALL, stdin="\n".join([*typed, "again", "/exit", "x"]).encode())
    assert answer.code == 0 and "no chat template" in caplog.text
    found = answer.document
    assert found["messages"][0] == {"role": "user", "content": "again"} and len(found["messages"]) == 2
    assert [one["output_tokens"] for one in found["replies"]] == [8, 8, 8]
    before = [("user", "hello"), ("assistant", found["replies"][0]["text"].strip()), ("user", "two\nlines")]
    whole = written([{"role": role, "content": content} for role, content in before])
    assert found["replies"][1]["prompt_tokens"] == len(whole.encode())
    said = ("replies: 1; 8 tokens", "command /nothing", "/system TEXT", "message is set", "begins anew")
    assert all(part in answer.out for part in said) and "{" not in answer.out


def test_the_context_s_end_is_said(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    """A reply is cut there, a longer message is not sent; nothing is dropped silently."""
    answer = command(*SMALL, "task.context=40", stdin=f"hello, you\n{'x' * 60}\n/reset\nhi\n".encode())
    found = answer.document
    assert "the conversation is full: the message was not sent" in caplog.text
    assert "fewer than 40; take back what was said last" in caplog.text
    assert [one["finish_reason"] for one in found["replies"]] == ["length", "length"]
    assert [one["content"] for one in found["messages"][::2]] == ["hi"]
    cut = command(*SMALL, "task.context=30", stdin=b"hello, you")
    assert cut.document["replies"][0]["finish_reason"] == "context"
    assert "cut: the conversation is full" in caplog.text


@pytest.mark.parametrize(
    ("typed", "said"),
    [(b"a\0b\nhello", "NUL"), (b"/system a\xff\nhello\n/system\nhello", "not UTF-8, .*the system message")],
    ids=["a NUL", "half a system message"],
)
def test_a_message_that_is_refused_ends_nothing(
    typed: bytes, said: str, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    answer = command(*SMALL, stdin=typed)
    assert answer.code == 0 and re.search(said, caplog.text)
    assert len(answer.document["messages"]) == 2


def test_blocks() -> None:
    for text, block in (
        ('"""a\nb"""', "a\nb"), ('"""\na\n"""', "a"), ("a", None), ('"""', None), ('""""""', ""),
    ):  # fmt: skip
        assert block_of(text) == block


@pytest.mark.slow
def test_over_ranks_the_leader_reads(command: Command, tmp_path: Path) -> None:
    """In fp32 the replies are those of one process, after commands, too."""
    words = [*SMALL, "model=tiny", "draft=tiny_draft", "output=json"]
    typed = "hello\n/system be brief\nagain\n/reset\nonce more\n"
    alone = command(*words, stdin=typed.encode()).document
    leader, other = Started(tmp_path, 2, *words, stdin=typed).finish()
    assert (leader.code, other.code, other.out) == (0, 0, ""), leader.err + other.err
    found = leader.document
    assert found["messages"] == alone["messages"] and found["replies"] == alone["replies"]
    assert len(found["messages"]) == 2
