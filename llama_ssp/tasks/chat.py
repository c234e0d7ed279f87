"""task=chat: a conversation on a terminal, or with one message a line from a pipe; every rank gets it."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any

from rich.text import Text

from llama_ssp.config import ChatConf, Output, home_expanded
from llama_ssp.distributed.comm import broadcast_json
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import DataError, RunError, StorageError, UsageError, shortened
from llama_ssp.pair.conversation import STOPPED, Conversation
from llama_ssp.pair.run import run_figures
from llama_ssp.report.console import Item, Progress
from llama_ssp.speculative.stats import Counts
from llama_ssp.tasks.chat_settings import in_words, with_setting
from llama_ssp.tasks.common import ReplyScreen, Task, pace_in_words
from llama_ssp.tasks.interactive import (
    FENCE,
    Terminal,
    block_of,
    typed_lines,
    typed_while,
    while_others_wait,
)
from llama_ssp.text.messages import Message
from llama_ssp.text.transcript import (
    FILE,
    Transcript,
    read_transcript,
    save_transcript,
    transcript_named,
)

log = logging.getLogger(__name__)

HELP = f"""/undo            take back the last message and its reply
/retry           make another reply to the last message
/reset, /clear   forget what was said
/system TEXT     set the system message; without TEXT, remove it
/set KEY VALUE   change temperature, top_p, k, max_new_tokens, enable_thinking ...
/show            the models, the settings and the system message
/save FILE       write the conversation to a file
/load FILE       go on from a file, or from the folder of an earlier chat; settings stay as they are
/stats           tokens, speed and acceptance so far
/help, /?        this list
/exit, /bye      end; so does Ctrl-D
What is pasted is one message. To type one of several lines, begin it and end it with {FENCE}.
Ctrl-C stops a reply, or drops the line; a second one, with nothing typed since, ends the program."""
OTHER_NAMES = {"/clear": "/reset", "/bye": "/exit", "/quit": "/exit", "/?": "/help", "/regen": "/retry"}
COMMANDS = (
    "/undo",
    "/retry",
    "/reset",
    "/system",
    "/set",
    "/show",
    "/save",
    "/load",
    "/stats",
    "/help",
    "/exit",
    *OTHER_NAMES,
)
LEAVE = "Ctrl-D or /bye ends; so does another Ctrl-C."
UNSAID = "stopped before the first token: the message is not part of the conversation"
CALM_S = 1.0
LONG_READ = 512  # tokens of a message whose reading is shown
NO_TEMPLATE = (
    "the model has no chat template: the conversation is written as lines that begin with User: and "
    "Assistant:, which a model that is not trained for them may not follow"
)
ENDINGS = {
    STOPPED: "stopped by Ctrl-C",
    "length": "cut after task.max_new_tokens",
    "context": "cut: the conversation is full",
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
    _terminal: Terminal | None = None  # the leader's
    _replies = False  # whether a reply is being made
    _calm_until = 0.0  # until when a Ctrl-C is taken as one for the reply that has just ended

    def run(self) -> str:
        if not self._ranks.is_leader:
            return self._converse()
        self._terminal = Terminal("> ", has_blocks=True, commands=COMMANDS, hint=LEAVE)
        with GUARD.softened(self._pressed):
            return self._converse()

    def _pressed(self) -> bool:
        """Takes a Ctrl-C, in a signal's handler; returns False where it ends the program: while it loads."""
        assert self._terminal is not None, "the leader has one"
        if self._talk is None and not self._terminal.is_listening:
            return False
        is_late = time.monotonic() < self._calm_until  # a key that is pressed again and again
        if not (self._replies or is_late):
            return self._terminal.drop()
        if self._talk is not None and self._replies:
            self._talk.stop()
        self._calm_until = time.monotonic() + CALM_S
        return True

    def _converse(self) -> str:
        task = self._task
        resumed = self._resumed()
        if self._folder.path is not None:
            self._transcript = Transcript(self._folder.path / FILE)
        pair = self._open()
        limit = min(task.context or pair.longest_that_fits(), self._run.model.context)
        if not pair.tokens.has_template:
            log.warning("%s", NO_TEMPLATE)
            if task.template_arguments:
                log.warning(
                    "without a template its arguments change nothing: %s", ", ".join(task.template_arguments)
                )
        lines = typed_lines(self._ranks, self._terminal)
        load = partial(pair.load, 1, limit)

        on_cpu = self._ranks.world == 1 and pair.placements.target.device.type == "cpu"
        loads_while_typing = self._console.is_terminal and on_cpu
        if self._console.is_terminal:
            ready = " The model gets ready while you type." if loads_while_typing else ""
            place = self._transcript.path
            kept = f"kept in {place}" if place else "of which nothing is kept (out=null)"
            words = f"A conversation of at most {limit} tokens, {kept}."
            self._print([words, f"/help lists the commands.{ready}"])
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
        with self._ranks.patient():
            for text in lines:
                block = block_of(text)
                if block is not None or not text.startswith("/"):
                    self._answer(talk, talk.reply(text if block is None else block))
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
        name = OTHER_NAMES.get(name, name)
        rest = rest.strip()
        try:
            match name:
                case "/retry":
                    self._answer(talk, talk.retry())
                case "/save":
                    self._print([self._saved(talk, rest)])
                case "/load":
                    self._print(self._loaded(talk, rest))
                case "/set":
                    self._print([self._set(talk, rest)])
                case "/show":
                    drafter = f" with {talk.run.drafter_name}" if talk.run.most_drafts else ""
                    models = f"{talk.run.model.name}{drafter}, at most {talk.limit} tokens"
                    system = f"system message: {talk.system or 'none'}"
                    self._print([models, in_words(talk.run), system])
                case "/stats":
                    self._print([f"replies: {len(talk.replies)}; {pace_in_words(talk.figures())}"])
                case "/help":
                    self._print(HELP.splitlines())
                case "/exit":
                    return False
                case _:
                    self._print([changed(talk, name, rest)])
        except RunError as problem:
            if self._ranks.is_leader:
                log.warning("%s", problem)
        return True

    def _set(self, talk: Conversation, words: str) -> str:
        """Changes a setting or, as in ollama, the system message; returns what is said. Raises UsageError."""
        key, _, rest = words.partition(" ")
        if key == "system":
            return changed(talk, "/system", rest.strip())
        if words:
            talk.run = with_setting(talk.run, words, self._run)
            talk.new_tokens = talk.run.task.max_new_tokens
        return in_words(talk.run)

    def _saved(self, talk: Conversation, name: str) -> str:
        """Writes the conversation to a file; returns what is said about it. Raises RunError."""
        if not name:
            raise UsageError("/save needs a file", fix="write /save FILE")
        if self._ranks.is_leader:
            save_transcript(home_expanded(name), talk.messages)
        return f"{len(talk.messages)} messages are in {name}: /load and resume= go on from there."

    def _loaded(self, talk: Conversation, name: str) -> list[Item]:
        """Goes on from a file, which the leader reads; returns what is said about it. Raises RunError."""
        if not name:
            raise UsageError("/load needs a file", fix="write /load FILE, or /load and the folder of a run")

        def read() -> dict[str, Any]:
            try:
                file = transcript_named(name, self._run.out, self._folder.path)
                return {"messages": read_transcript(file)}
            except RunError as problem:
                return {"problem": str(problem)}

        result = while_others_wait(self._ranks, read)
        if "problem" in result:
            raise DataError(result["problem"])
        talk.go_on_from(result["messages"])
        return [f"It goes on after {len(talk.messages)} messages.", *last_words(talk.messages)]

    def _answer(self, talk: Conversation, pieces: Iterator[str]) -> None:
        """Streams the reply, then a line about it."""
        screen: ReplyScreen | None = None
        before = len(talk.replies)
        bar = ReadingBar()
        if self._ranks.is_leader:
            talk.on_reading = bar.show
        self._replies = True
        try:
            for piece in pieces:
                bar.close()
                if screen is None:
                    piece = piece.lstrip()
                if piece and screen is None:
                    thoughts = talk.replies[-1].thoughts
                    shows = talk.run.task_as(ChatConf).show_thinking
                    screen = ReplyScreen(self._console, thoughts, shows)
                if screen is not None and self._run.output is Output.text:
                    screen.write(piece)
        except DataError as problem:  # nothing was sent
            log.warning("%s", problem)
            if talk.is_full:
                self._say_more(talk)
            return
        finally:
            self._replies = False
            bar.close()
            if screen is not None and self._run.output is Output.text:
                screen.end()

        if len(talk.replies) == before:
            self._remark(UNSAID)
            return
        reply = talk.replies[-1]
        figures = reply.counts.figures()
        context = reply.prompt_tokens + figures["tokens_committed"]
        words = f"{pace_in_words(figures)}, context {context} of {talk.limit}"
        if ending := ENDINGS.get(reply.finish_reason):
            words += f", {ending}"
        is_full = reply.finish_reason == "context"
        self._remark(words, logging.WARNING if is_full else logging.INFO)
        if is_full:
            self._say_more(talk)

    def _say_more(self, talk: Conversation) -> None:
        """Says how a conversation that has filled its context can go on."""
        words = "The conversation is full. /undo and /reset make room."
        context = self._run.model.context
        if talk.limit < context:
            kept = self._transcript.path
            if kept is not None:
                first = f"end with /bye, then start with resume={kept.parent}"
            else:
                first = "/save FILE, /bye, then start with resume=FILE"
            words += f" To go on with more: {first} context={min(2 * talk.limit, context)}."
        else:
            words += " It has all of the model's context."
        self._remark(words, logging.WARNING)

    def _remark(self, words: str, level: int = logging.INFO) -> None:
        """Says something about a reply: dim on a terminal, else in the log."""
        if self._console.is_terminal:
            self._console.show([Text(f"[{words}]", style="dim")])
        else:
            log.log(level, "%s", words)


def changed(talk: Conversation, name: str, rest: str) -> str:
    """Does a command that changes what was said; returns what is said about it."""
    match name:
        case "/undo":
            text = talk.undo()
            if text is None:
                return "There is nothing to take back."
            return f"Taken back, with its reply: {shortened(' '.join(text.split()), SHOWN)}"
        case "/reset":
            talk.reset()
            return "The conversation begins anew."
        case "/system":
            talk.system = rest or None
            return f"The system message is {'set' if talk.system else 'removed'}."
    return f"There is no command {name}; /help lists them."


class ReadingBar:
    """Shows how much of a long message has been read."""

    def __init__(self) -> None:
        self._shown = ExitStack()
        self._progress: Progress | None = None
        self._done = 0

    def show(self, done: int, total: int) -> None:
        """Shows that `done` of `total` tokens have been read."""
        if total <= LONG_READ:
            return
        if self._progress is None:
            progress = Progress("reading", total, "tokens", ends_in_log=False, ticks=True)
            self._progress = self._shown.enter_context(progress)
        self._progress.advance(done - self._done)
        self._done = done

    def close(self) -> None:
        """Takes it off the screen."""
        self._shown.close()
