"""A conversation with a model: its history, and replies that are streamed.

conversation = Conversation(session, seed=0, limit=4096, new_tokens=512)
for piece in conversation.reply("Hello"):
    print(piece, end="")

Every rank makes the same calls, and gets the same pieces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llama_ssp.errors import DataError
from llama_ssp.pair.requests import TokenRequest, require_numbers
from llama_ssp.pair.run import Run, Supply
from llama_ssp.pair.session import PairSession
from llama_ssp.pair.token_prompts import usable
from llama_ssp.speculative.model_runner import BeforeChunk
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.messages import Message
from llama_ssp.text.prompts import TextPrompt, require_usable
from llama_ssp.text.thoughts import ThoughtStream

# How a conversation is written for a model without a chat template.
NAMES = {"system": "", "user": "User: ", "assistant": "Assistant: "}
ROUNDS = 8  # several ranks check whether `stop` was called once in so many rounds
STOPPED = "stopped"  # the finish reason of a reply that `stop` ended; the engine gives the other reasons


class _StoppedReading(Exception):
    """Ends the reading of a prompt between two chunks of it."""


@dataclass(kw_only=True)
class ChatReply:
    """A reply so far, and what it took. Of its prompt, `kept` tokens were in the target's KV cache.

    `thoughts` divides its pieces, as they come, into what the model thinks and what it answers.
    """

    prompt_tokens: int
    kept: int
    thoughts: ThoughtStream
    text: str = ""
    finish_reason: str = STOPPED
    counts: Counts = field(default_factory=Counts)


class Conversation:
    """A user and the model in turn. `history` has their messages, `replies` what each reply took."""

    def __init__(
        self, pair: PairSession, seed: int, limit: int, new_tokens: int, stops: Sequence[str] = ()
    ) -> None:
        """Takes the most tokens of the conversation, and of a reply (`new_tokens`; 0: the room that is left).

        `run` is how the next reply is sampled, drafted and rendered.
        """
        self._pair = pair
        self._engine = pair.engine(seed)
        self.run = pair.run
        self.limit = limit
        self.new_tokens = new_tokens
        self.has_template = pair.tokens.has_template
        turn = [] if self.has_template else ["\n" + NAMES["user"].rstrip()]
        self._stops = tuple(pair.tokens.stops([*stops, *turn]))
        self.system: str | None = None
        self.history = list[Message]()
        self.replies = list[ChatReply]()
        self.is_full = False  # whether the last message had no room
        self._turn = 0  # each reply has draws of its own, by this number
        self._state: State | None = None  # whose text the KV cache holds
        self._stop_asked = False
        # Called with how many tokens of a message have been read, and are to be read, before each chunk.
        self.on_reading: BeforeChunk = lambda _done, _total: None

    @property
    def messages(self) -> list[Message]:
        """Returns the whole conversation, the system message first, if there is one."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history]

    def go_on_from(self, messages: list[Message]) -> None:
        """Replaces what was said. The system message stays where there is none among these."""
        if messages and messages[0]["role"] == "system":
            self.system = messages[0]["content"]
            messages = messages[1:]
        self.history = list(messages)
        # As if they had been said here: the next reply has the same draws.
        self._turn = sum(1 for message in messages if message["role"] == "user")

    def reset(self) -> None:
        """Forgets what was said; the system message stays."""
        self.history.clear()

    def stop(self) -> None:
        """Ends the reply after this chunk of the prompt or this round, over several ranks within ROUNDS.

        The leader's call decides. Before the first token nothing was said, and the history stays as it was.
        """
        self._stop_asked = True

    def undo(self) -> str | None:
        """Forgets the last message and its reply; returns that message. None where there is none."""
        text = self._last_text()
        if text is not None:
            self.history = self.history[:-2]
        return text

    def _last_text(self) -> str | None:
        """Returns the last message of the user, which has been answered."""
        roles = [message["role"] for message in self.history[-2:]]
        return self.history[-2]["content"] if roles == ["user", "assistant"] else None

    def retry(self) -> Iterator[str]:
        """Yields another reply to the last message, with draws of its own, in place of the one that it has.

        Raises DataError where nothing was said.
        """
        text = self._last_text()
        self.is_full = False
        if text is None:
            raise DataError("there is no reply to make anew", fix="write a message first")
        yield from self.reply(text, anew=True)

    def reply(self, text: str, anew: bool = False) -> Iterator[str]:
        """Yields the reply, piece by piece; then both messages are in the history. Raises DataError.

        With `anew` they replace the last two. Where it was stopped before the first token, `replies` and the
        history are as before.
        """
        try:
            yield from self._reply(text, self.history[:-2] if anew else self.history)
        finally:
            self._stop_asked = False

    def _reply(self, text: str, before_it: list[Message]) -> Iterator[str]:
        messages = [*before_it, {"role": "user", "content": text}]
        prompt = self._prompt(messages)
        length = len(prompt.token_ids)
        pair = self._pair
        ranks = self._pair.ranks
        room = self.limit - length
        asked = self.new_tokens or room
        before = self._state
        self._state = None
        request = TokenRequest(
            index=0,
            prompt=prompt,
            sampling=self.run.sampling,
            max_new_tokens=min(asked, room),
            stop=self._stops,
        )
        supply = Supply(longest=self.limit)  # later turns take the same row
        text_run = Run(self._engine, [request], pair.run_settings(rows=1, run=self.run), supply=supply)
        try:
            with self._stopped_between_chunks():
                text_run.begin(before)
        except _StoppedReading:  # the caches have a part of the prompt: they begin anew
            return
        written = text_run.replies[0]

        reply = ChatReply(
            prompt_tokens=length,
            kept=text_run.kept,
            thoughts=pair.tokens.thought_stream(prompt.token_ids),
            counts=text_run.counts,
        )
        self.replies.append(reply)
        self._turn += 1
        for step in text_run.rounds():
            ended = step.rows[0].finish is not None
            reply.text = written.text
            if step.round == 0 and not ended and self._is_stopped():
                self.replies.pop()
                self._state = text_run.state
                return
            yield written.printable(ended)
            if ended or (ranks.world > 1 and step.round % ROUNDS):
                continue
            if self._is_stopped():
                yield written.printable(True)
                break
        require_numbers(written.outcome)
        self._state = text_run.state
        reply.finish_reason = written.finish_reason or STOPPED
        if reply.finish_reason == "length" and (room < asked or not self.new_tokens):
            reply.finish_reason = "context"
        said = pair.tokens.thoughts.message(reply.text.strip(), reply.thoughts.begins)
        self.history = [*messages, said]

    def _is_stopped(self) -> bool:
        """Returns whether the reply ends here; every rank then has this round's decision."""
        ranks = self._pair.ranks
        is_stopped = self._stop_asked
        if ranks.world > 1:  # the other ranks get a round's decision with the next one's drafts
            self._engine.flush()
            is_stopped = bool(ranks.broadcast_ints([int(is_stopped)])[0])
        if is_stopped:
            self._engine.flush()
        return is_stopped

    @contextmanager
    def _stopped_between_chunks(self) -> Iterator[None]:
        """Has models look between chunks of a prompt whether it is still wanted.

        Over several ranks all must stop at the same chunk, which they know where all read the target's.
        """
        ranks = self._pair.ranks
        target = self._engine.target
        drafter = self._engine.drafter
        draft = drafter.runner if drafter and ranks.world == 1 else None
        if target is not None and len(self._pair.spec.placement.target) == ranks.world:
            target.before_chunk = self._show_and_stop
        if draft is not None:
            draft.before_chunk = self._stop_reading
        try:
            yield
        finally:
            for runner in (target, draft):
                if runner is not None:
                    runner.before_chunk = None

    def _show_and_stop(self, done: int, total: int) -> None:
        self.on_reading(done, total)
        self._stop_reading(done, total)

    def _stop_reading(self, _done: int, _total: int) -> None:
        if self._pair.ranks.broadcast_ints([int(self._stop_asked)])[0]:
            raise _StoppedReading

    def figures(self) -> dict[str, Any]:
        """Returns the conversation, counters and clocks, under the names of the JSON interface."""
        counts = Counts()
        engine = self._engine
        for reply in self.replies:
            counts.merge(reply.counts)
        return {
            "messages": self.history,
            "replies": [
                {
                    "text": reply.text,
                    "finish_reason": reply.finish_reason,
                    "prompt_tokens": reply.prompt_tokens,
                    "prompt_tokens_kept": reply.kept,
                    "output_tokens": reply.counts.committed,
                }
                for reply in self.replies
            ],
            "target_forwards": engine.target_forwards,
            "draft_forwards": engine.draft_forwards,
            "overlap": engine.overlap,
            "prompt_tokens": sum(reply.prompt_tokens for reply in self.replies),
            "prompt_tokens_kept": sum(reply.kept for reply in self.replies),
            **counts.figures(),
            "tokens_per_s": counts.tokens_per_s,
        }

    def _prompt(self, messages: list[Message]) -> Prompt:
        """Returns the conversation up to the model's answer, as token ids. Raises DataError."""
        self.is_full = False
        text = TextPrompt(f"turn {self._turn}", messages[-1]["content"], "the conversation")
        for given in (text, TextPrompt("system", self.system or "", "the system message")):
            require_usable(given)
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *messages]
        tokens = self._pair.tokens
        if self.has_template:
            ids = tokens.chat(messages, self.run.task.template_arguments)
        else:
            ids = tokens.encode(written(messages))
        self.is_full = len(ids) >= self.limit
        if self.is_full:
            raise DataError(
                "the conversation is full: the message was not sent",
                found=f"{len(ids)} tokens with it",
                allowed=f"fewer than {self.limit}",
                fix="take back what was said last, or begin a new one (in chat: /undo, /reset)",
            )
        return usable(text, ids, tokens, self.run)


def written(messages: list[Message]) -> str:
    """Returns a conversation as lines, for a model without a template, up to the model's answer."""
    lines = [f"{NAMES[message['role']]}{message['content']}\n" for message in messages]
    return "".join(lines) + NAMES["assistant"].rstrip()
