"""A conversation with a model: its history, and replies that are streamed.

conversation = Conversation(session, seed=0, limit=4096, new_tokens=512)
for piece in conversation.reply("Hello"):
    print(piece, end="")

Every rank makes the same calls, and gets the same pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_ssp.errors import DataError
from llama_ssp.pair.requests import TokenRequest, require_numbers
from llama_ssp.pair.run import Run, Supply
from llama_ssp.pair.session import PairSession
from llama_ssp.pair.token_prompts import usable
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.text.messages import Message
from llama_ssp.text.prompts import TextPrompt, require_usable
from llama_ssp.text.thoughts import ThoughtStream

# How a conversation is written for a model without a chat template.
NAMES = {"system": "", "user": "User: ", "assistant": "Assistant: "}
ROUNDS = 8  # several ranks check whether `stop` was called once in so many rounds
STOPPED = "stopped"  # the finish reason of a reply that `stop` ended; the engine gives the other reasons


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
        """Takes the most tokens of the conversation (`limit`), and of a reply (`new_tokens`)."""
        self._pair = pair
        self._engine = pair.engine(seed)
        self.limit = limit
        self._new_tokens = new_tokens
        self.has_template = pair.tokens.has_template
        turn = [] if self.has_template else ["\n" + NAMES["user"].rstrip()]
        self._stops = tuple(pair.tokens.stops([*stops, *turn]))
        self.system: str | None = None
        self.history = list[Message]()
        self.replies = list[ChatReply]()
        self._turn = 0  # each reply has draws of its own, by this number
        self._state: State | None = None  # whose text the KV cache holds
        self._stop_asked = False

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
        """Ends the reply after this round, over several ranks within ROUNDS. The leader's call decides."""
        self._stop_asked = True

    def reply(self, text: str) -> Iterator[str]:
        """Yields the reply, piece by piece; then both messages are in the history. Raises DataError."""
        messages = [*self.history, {"role": "user", "content": text}]
        prompt = self._prompt(messages)
        length = len(prompt.token_ids)
        pair = self._pair
        ranks = self._pair.ranks
        room = min(self._new_tokens, self.limit - length)
        before = self._state
        self._state = None
        self._stop_asked = False
        request = TokenRequest(
            index=0, prompt=prompt, sampling=pair.run.sampling, max_new_tokens=room, stop=self._stops
        )
        supply = Supply(longest=self.limit)  # later turns take the same row
        text_run = Run(self._engine, [request], pair.run_settings(rows=1), supply=supply)
        text_run.begin(before)
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
            yield written.printable(ended)
            if ended or (ranks.world > 1 and step.round % ROUNDS):
                continue
            is_stopped = self._stop_asked
            if ranks.world > 1:  # the other ranks get a round's decision with the next one's drafts
                self._engine.flush()
                is_stopped = bool(ranks.broadcast_ints([int(is_stopped)])[0])
            if is_stopped:
                self._engine.flush()
                yield written.printable(True)
                break
        require_numbers(written.outcome)
        self._state = text_run.state
        reply.finish_reason = written.finish_reason or STOPPED
        if reply.finish_reason == "length" and room < self._new_tokens:
            reply.finish_reason = "context"
        self.history = [*messages, pair.tokens.thoughts.message(reply.text.strip())]

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
        text = TextPrompt(f"turn {self._turn}", messages[-1]["content"], "the conversation")
        for given in (text, TextPrompt("system", self.system or "", "the system message")):
            require_usable(given)
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *messages]
        tokens = self._pair.tokens
        if self.has_template:
            ids = tokens.chat(messages, self._pair.run.task.template_arguments)
        else:
            ids = tokens.encode(written(messages))
        if len(ids) >= self.limit:
            raise DataError(
                "the conversation is full: the message was not sent",
                found=f"{len(ids)} tokens with it",
                allowed=f"fewer than {self.limit}",
                fix="begin a new one (in chat: /reset), or start with a larger task.context",
            )
        return usable(text, ids, tokens, self._pair.run)


def written(messages: list[Message]) -> str:
    """Returns a conversation as lines, for a model without a template, up to the model's answer."""
    lines = [f"{NAMES[message['role']]}{message['content']}\n" for message in messages]
    return "".join(lines) + NAMES["assistant"].rstrip()
