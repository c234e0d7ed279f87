"""task=chat: a conversation on a terminal, or with one message a line from a pipe; every rank gets it."""

import logging
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from rich.text import Text

from llama_ssp.config import ChatConf, Output
from llama_ssp.distributed.comm import broadcast_json
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import DataError, StorageError
from llama_ssp.pair.conversation import STOPPED, Conversation
from llama_ssp.pair.run import run_figures
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.common import ReplyScreen, Task, pace_in_words
from llama_ssp.tasks.interactive import FENCE, Terminal, block_of, typed_lines, typed_while
from llama_ssp.text.tokenizer import Message
from llama_ssp.text.transcript import FILE, Transcript, read_transcript, transcript_named

log = logging.getLogger(__name__)

HELP = f"""/reset        forget what was said
/system TEXT  set the system message; without TEXT, remove it
/stats        tokens, speed and acceptance so far
/help         this list
/exit         end; so does Ctrl-D
A message of several lines begins with {FENCE} and ends with {FENCE}.
Ctrl-C stops a reply; twice, or while you type, it ends the program."""
NO_TEMPLATE = (
    "the model has no chat template: the conversation is written as lines that begin with User: and "
    "Assistant:, which a model that is not trained for them may not follow"
)
ENDINGS = {
    STOPPED: "stopped by Ctrl-C",
    "length": "cut after task.max_new_tokens",
    "context": "cut: the conversation is full, /reset begins a new one",
}


SHOWN = 200  # characters of what a conversation goes on from


def last_words(messages: list[Message]) -> list[Text]:
    """Returns the end of the last message of each side, dim, for whoever goes on with it."""
    names = {"user": "> ", "assistant": ""}
    lines = list[Text]()
    for message in messages[-2:]:
        if message["role"] in names:
            text = " ".join(message["content"].split())
            end = f"... {text[-SHOWN:]}" if len(text) > SHOWN else text
            lines.append(Text(names[message["role"]] + end, style="dim"))
    return lines


class ChatTask(Task[ChatConf]):
    """Answers message after message until the input ends."""

    _talk: Conversation | None = None
    _transcript = Transcript(None)

    def run(self) -> str:
        task = self._task
        resumed = self._resumed()
        if self._folder.path is not None:
            self._transcript = Transcript(self._folder.path / FILE)
        pair = self._open()
        limit = min(task.context, self._run.model.context)
        if not pair.tokens.has_template:
            log.warning("%s", NO_TEMPLATE)
            if task.template_arguments:
                log.warning(
                    "without a template its arguments change nothing: %s", ", ".join(task.template_arguments)
                )
        terminal = Terminal("> ", has_blocks=True) if self._ranks.is_leader else None
        lines = typed_lines(self._ranks, terminal)
        load = partial(pair.load, 1, limit)

        on_cpu = self._ranks.world == 1 and pair.placements.target.device.type == "cpu"
        loads_while_typing = self._console.is_terminal and on_cpu
        if self._console.is_terminal:
            ready = " The model gets ready while you type." if loads_while_typing else ""
            place = self._transcript.path
            kept = f"kept in {place}" if place else "of which nothing is kept (out=null)"
            words = f"A conversation of at most {limit} tokens, {kept}."
            self._print([f"{words} /help lists the commands.{ready}"])
            if resumed:
                self._print([f"It goes on after {len(resumed)} messages.", *last_words(resumed)])
        if loads_while_typing:
            first = typed_while(load, lines)
            if not first:
                return "done"
            lines = chain(first, lines)
        else:
            load()

        talk = Conversation(pair, self._inputs.seed, limit, task.max_new_tokens, task.stop)
        talk.go_on_from(resumed)
        talk.system = task.system or talk.system
        self._talk = talk
        self._keep(talk)
        for text in lines:
            block = block_of(text)
            if block is not None or not text.startswith("/"):
                self._answer(talk, text if block is None else block)
            elif not self._obey(talk, text.strip()):
                break
            self._keep(talk)
        if self._console.is_terminal and talk.history and self._transcript.path:
            with suppress(StorageError):  # the terminal may be gone
                self._print([f"The conversation is kept: resume={self._transcript.path.parent}"])
        return "done"

    def _resumed(self) -> list[Message]:
        """Returns the messages that the conversation goes on from, on every rank."""
        messages = list[Message]()
        name = self._task.resume
        if name is not None and self._ranks.is_leader:
            messages = read_transcript(transcript_named(name, self._run.out, self._folder.path))
        return list(broadcast_json(messages, self._ranks))

    def _keep(self, talk: Conversation) -> None:
        """Writes what has changed into the run folder; a full disk ends no conversation."""
        if self._ranks.is_leader:
            try:
                self._transcript.keep(talk.messages)
            except StorageError as problem:
                log.warning("%s", problem)

    def has_output(self) -> bool:
        return self._talk is not None and bool(self._talk.replies)

    def figures(self) -> dict[str, Any]:
        counted = self._talk.figures() if self._talk else run_figures(None, Counts())
        return {"messages": [], "replies": [], **self._pair_figures(), **counted}

    def _obey(self, talk: Conversation, command: str) -> bool:
        """Does what the command says; False if it ends the conversation."""
        name, _, rest = command.partition(" ")
        if name == "/reset":
            talk.reset()
            self._print(["The conversation begins anew."])
        elif name == "/system":
            talk.system = rest.strip() or None
            self._print([f"The system message is {'set' if talk.system else 'removed'}."])
        elif name == "/stats":
            self._print([f"replies: {len(talk.replies)}; {pace_in_words(talk.figures())}"])
        elif name == "/help":
            self._print(HELP.splitlines())
        elif name != "/exit":
            self._print([f"There is no command {name}; /help lists them."])
        return name != "/exit"

    def _answer(self, talk: Conversation, text: str) -> None:
        """Streams the reply, then a line about it."""
        screen: ReplyScreen | None = None
        try:
            with GUARD.softened(talk.stop):
                for piece in talk.reply(text):
                    if screen is None:
                        piece = piece.lstrip()
                    if piece and screen is None:
                        thoughts = talk.replies[-1].thoughts
                        screen = ReplyScreen(self._console, thoughts, self._task.show_thinking)
                    if screen is not None and self._run.output is Output.text:
                        screen.write(piece)
        except DataError as problem:  # nothing was sent
            log.warning("%s", problem)
            return
        finally:
            if screen is not None and self._run.output is Output.text:
                screen.end()

        reply = talk.replies[-1]
        figures = reply.counts.figures()
        context = reply.prompt_tokens + figures["tokens_committed"]
        words = f"{pace_in_words(figures)}, context {context} of {talk.limit}"
        if ending := ENDINGS.get(reply.finish_reason):
            words += f", {ending}"
        if self._console.is_terminal:
            self._console.show([Text(f"[{words}]", style="dim")])
        else:
            level = logging.WARNING if reply.finish_reason == "context" else logging.INFO
            log.log(level, "%s", words)
