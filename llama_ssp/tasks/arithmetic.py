"""Few-shot multiplications: prompts from a seed, and whether what was written is the product. No torch.

The text is what the shipped pair was trained on: worked lines, then an open one that ends in a blank.
"""

import random
from dataclasses import dataclass

LARGEST = 98
STOP = "\n"


@dataclass(frozen=True)
class Question:
    """One multiplication. Its number counts the questions of its seed."""

    seed: int
    number: int
    text: str
    answer: str

    @property
    def id(self) -> str:
        return f"{self.seed}-{self.number}"

    def is_answered_by(self, written: str) -> bool:
        """Whether the first line holds the product and nothing else."""
        return written.partition(STOP)[0].strip() == self.answer


def questions(seed: int, count: int, shots: int) -> list[Question]:
    """Returns the first `count` questions of a seed; a larger count begins with the same ones."""
    rng = random.Random(f"multiplication {seed}")
    return [_question(rng, seed, number, shots) for number in range(count)]


def worked(a: int, b: int) -> str:
    """Returns a line with its answer."""
    return f"{a} * {b} = {a * b}"


def _question(rng: random.Random, seed: int, number: int, shots: int) -> Question:
    a, b = _pair(rng)
    lines: list[str] = []
    while len(lines) < shots:
        shown = _pair(rng)
        if set(shown) != {a, b}:  # in either order it would give the answer away
            lines.append(worked(*shown))
    text = "\n".join([*lines, f"{a} * {b} = "])
    return Question(seed, number, text, answer=str(a * b))


def _pair(rng: random.Random) -> tuple[int, int]:
    return rng.randint(1, LARGEST), rng.randint(1, LARGEST)
