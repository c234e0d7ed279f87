"""Batches of packed rows that depend on the seed and the step alone, so that training resumes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from demo.data import training_multiplications
from demo.recipes import Recipe
from demo.vocab import CONTEXT, EOS

ANSWER_WEIGHT = 2.0  # what a multiplication is about
OPERAND_WEIGHT = 0.1  # random numbers: nothing to learn but the form


@dataclass
class Batch:
    """Rows of tokens; `weights[i, j]` is what predicting `ids[i, j]` counts."""

    ids: torch.Tensor
    weights: torch.Tensor
    is_math: torch.Tensor  # one per row


class Stream:
    """Texts as token ids, one after the other."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.starts = np.cumsum([0] + [len(row) for row in rows[:-1]])
        self.ids = np.concatenate([np.array(row, dtype=np.int32) for row in rows])

    def window(self, rng: random.Random, length: int) -> np.ndarray:
        """Some tokens in a row; half of the windows begin with a text, as prompts do."""
        last = len(self.ids) - length
        at = rng.randint(0, last)
        if rng.random() < 0.5:
            at = min(int(self.starts[rng.randrange(len(self.starts))]), last)
        return self.ids[at : at + length]


class Batches:
    """Half text and half multiplications, or whatever share the recipe says."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
        """Encode all texts once, into one stream."""
        self.recipe, self.tokenizer, self.seed = recipe, tokenizer, seed
        self.eos = tokenizer.token_to_id(EOS)
        self.stream = Stream([[*encoding.ids, self.eos] for encoding in tokenizer.encode_batch(texts)])

    def batch(self, step: int) -> Batch:
        """The rows of one step."""
        rng = random.Random(f"{self.seed}-{step}")
        every = self.recipe.long_every
        length = CONTEXT if every and step % every == every - 1 else self.recipe.row
        count = max(2, self.recipe.batch_tokens // length)
        n_math = round(count * self.math_share(step))
        rows = [self.math_row(rng, length + 1) for _ in range(n_math)]
        rows += [self.text_row(rng, length + 1) for _ in range(count - n_math)]
        ids = torch.from_numpy(np.stack([row for row, _ in rows]).astype(np.int64))
        weights = torch.from_numpy(np.stack([weight for _, weight in rows]))
        return Batch(ids, weights, torch.arange(count) < n_math)

    def math_share(self, step: int) -> float:
        """The share of multiplications at a step."""
        return [share for start, share in self.recipe.math_shares if step >= start][-1]

    def text_row(self, rng: random.Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A window of the texts."""
        return self.stream.window(rng, length), np.ones(length, dtype=np.float32)

    def math_row(self, rng: random.Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Worked multiplications up to the row's length."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            text = training_multiplications(rng)
            encoding = self.tokenizer.encode(text)
            ids += [*encoding.ids, self.eos]
            weights += [*token_weights(text, encoding.offsets), ANSWER_WEIGHT]
        return np.array(ids[:length], dtype=np.int32), np.array(weights[:length], dtype=np.float32)


def token_weights(text: str, offsets: list[tuple[int, int]]) -> list[float]:
    """Weight the answers' tokens (and the line ends, which say that a number is over)."""
    answers: list[bool] = []
    for line in text.splitlines(keepends=True):
        before = line.index("= ") + 2
        answers += [False] * before + [True] * (len(line) - before)
    return [ANSWER_WEIGHT if end > start and answers[start] else OPERAND_WEIGHT for start, end in offsets]
