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

    def message(self, text: str) -> dict[str, str]:
        """Returns a reply as a message for the chat template, which decides what of its thoughts stays.

        The thoughts are a field of their own where the template reads one and does not look for them in the
        text.
        """
        whole = {"role": "assistant", "content": text}
        if not self.field or not (self.open in text or self.close in text):
            return whole
        ended = text if self.close in text else text + self.close  # the reply may end before its answer
        thought, _, answer = ended.rpartition(self.close)
        for mark in (self.open, self.close, *self.between):
            thought = thought.replace(mark, "\n")
        return whole | {"content": answer.strip(), self.field: thought.strip()}


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
