"""What a model thinks before it answers: how families mark it, and where it stands in a text. No torch.

thoughts = thoughts_of(template, names)
stream = ThoughtStream(thoughts, begins=thoughts.are_open_after(prompt))
for piece in pieces:
    for part in stream.take(piece):
        print(part.text, "thought" if part.is_thought else "answer")
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

# The names under which templates read a message's thoughts, the usual one first.
FIELDS = ("reasoning_content", "thinking", "reasoning")
READ = re.compile(rf"""(?:\.|\[\s*['"]|\bget\(\s*['"])({"|".join(FIELDS)})\b""")


class TextPart(NamedTuple):
    """A part of a text."""

    text: str
    is_thought: bool


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """The marks around a family's thoughts.

    A text begins within a thought where its prompt ends with `begins`, by default with `open`. `between` are
    special tokens that stand between two thoughts. `field` is the name under which the chat template reads
    the thoughts of earlier messages; it is empty where the template takes a text as it was written.
    """

    open: str
    close: str
    begins: str = ""
    between: tuple[str, ...] = ()
    field: str = ""

    def has(self, token: str) -> bool:
        """Returns whether a special token is part of a mark: it then stays in texts."""
        return token in self.between or token in self.open + self.close

    def are_open_after(self, prompt: str) -> bool:
        """Returns whether what follows this prompt begins within a thought."""
        return prompt.rstrip().endswith(self.begins or self.open)

    def message(self, text: str, begins: bool = False) -> dict[str, str]:
        """Returns a reply as a message for the chat template, which decides what of its thoughts stays.

        `begins`: the prompt has opened a thought. The thoughts are a field of their own where the template
        reads one and does not look for them in the text. A thought that was cut before its end is left out:
        it would stand open in every later prompt.
        """
        text = self._without_open_thought(text, begins)
        whole = {"role": "assistant", "content": text}
        is_apart = bool(self.field or self.between)  # the text of channels is none that a template takes
        if not is_apart or self.close not in text:
            return whole
        thought, _, answer = text.rpartition(self.close)
        whole["content"] = answer.strip()
        if self.field:
            for mark in (self.open, self.close, *self.between):
                thought = thought.replace(mark, "\n")
            whole[self.field] = thought.strip()
        return whole

    def _without_open_thought(self, text: str, begins: bool) -> str:
        # A channel of another name may have been cut in the midst of its mark, too.
        channel = f"{self.close.partition('>')[0]}>" if self.between else self.open
        last_open = text.rfind(channel)
        last_close = text.rfind(self.close)
        if last_close >= last_open and last_close >= 0:
            return text
        if last_open < 0:
            return "" if begins and not self.between else text
        before = text[:last_open]
        for mark in self.between:
            before = before.removesuffix(mark)
        # What stands before it may be a thought of the same kind, which ended without an answer.
        return self._without_open_thought(before, begins).rstrip() if self.between else before.rstrip()


USUAL = Thoughts(open="<think>", close="</think>")
FAMILIES = (
    # gpt-oss: a turn has messages on several channels, the last of which is the answer.
    Thoughts(
        open="<|channel|>analysis<|message|>",
        close="<|channel|>final<|message|>",
        begins="<|start|>assistant",
        between=("<|end|><|start|>assistant", "<|end|>", "<|start|>"),
    ),
    Thoughts(open="<|channel>thought", close="<channel|>"),  # Gemma 4
    Thoughts(open="[THINK]", close="[/THINK]"),  # Magistral, Ministral 3
    Thoughts(open="<seed:think>", close="</seed:think>"),
    Thoughts(open="<|START_THINKING|>", close="<|END_THINKING|>"),  # Cohere
    Thoughts(open="<|inner_prefix|>", close="<|inner_suffix|>"),  # Apertus
    Thoughts(open="\u25c1think\u25b7", close="\u25c1/think\u25b7"),  # Kimi
    USUAL,
)


def thoughts_of(template: str, names: Container[str] = ()) -> Thoughts:
    """Returns how thoughts are marked, by the chat template and the names of added tokens; else as usual."""
    family = next((row for row in FAMILIES if row.close in template or row.close in names), USUAL)
    looks_itself = re.search(rf"""split\(\s*['"]{re.escape(family.close)}""", template)
    read = set(READ.findall(template))
    field = next((name for name in FIELDS if name in read), "")
    return Thoughts(
        open=family.open,
        close=family.close,
        begins=family.begins,
        between=family.between,
        field="" if looks_itself else field,
    )


class ThoughtStream:
    """Divides a text that comes in pieces into thoughts and answer. Marks are part of the thoughts."""

    def __init__(self, thoughts: Thoughts, begins: bool) -> None:
        self._thoughts = thoughts
        self.begins = begins
        self._is_thought = begins
        self._is_after = False  # a thought: the blanks there are still its own
        self._held = ""  # the end of the text so far, which may be the beginning of a mark

    def take(self, piece: str, ended: bool = False) -> list[TextPart]:
        """Returns what the next piece of the text completes; with `ended` all that was held back, too."""
        parts = list[TextPart]()
        text = self._held + piece
        while text:
            if self._is_after:
                rest = text.lstrip()
                parts.append(TextPart(text[: len(text) - len(rest)], True))
                self._is_after = not rest
                text = rest
                continue

            mark = self._thoughts.close if self._is_thought else self._thoughts.open
            before, found, rest = text.partition(mark)
            if not found:
                break
            parts.append(TextPart(before, self._is_thought))
            parts.append(TextPart(mark, True))
            text = rest
            self._is_after = self._is_thought
            self._is_thought = not self._is_thought

        self._held = "" if ended else self._beginning_of_mark(text)
        parts.append(TextPart(text.removesuffix(self._held), self._is_thought))
        return [part for part in parts if part.text]

    def _beginning_of_mark(self, text: str) -> str:
        """Returns the longest end of the text that the next mark begins with."""
        mark = self._thoughts.close if self._is_thought else self._thoughts.open
        sizes = range(min(len(mark) - 1, len(text)), 0, -1)
        return next((text[-size:] for size in sizes if mark.startswith(text[-size:])), "")
