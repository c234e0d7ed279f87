"""Holds the texts of a batch, and one round's proposal.

Shapes: B rows, K drafted, W = K+1 positions, V vocabulary, S slots of the token buffer, N tokens to write.
Slot t of a row's buffer holds the token at position t of its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_ssp.models.passes import sent
from llama_ssp.speculative.rng import Purpose, Slot, prompt_key
from llama_ssp.speculative.sampling import Prefix
from llama_ssp.text.logprobs import ScoredToken

AT_ONCE = 16  # positions whose lengths are sent to the device together, so that most rounds send them once


@dataclass(frozen=True)
class Prompt:
    """Holds a prompt as token ids; `id` names its random stream."""

    id: str
    token_ids: tuple[int, ...]


class StatePrefix(Prefix):
    """Names `width` positions of each row; the first is `first` drafts after the row's text.

    Their lengths go to the device when a sampling control first reads them: few do.
    """

    def __init__(self, state: State, first: int, width: int) -> None:
        self._state = state
        self._columns = slice(first, first + width)

    @property
    def token_BS(self) -> Tensor:
        return self._state.token_BS

    @property
    def length_BW(self) -> Tensor:
        length_BW, _ = self._state.prefix_lengths(self._columns.stop)
        return length_BW[:, self._columns]

    @property
    def prompt_B(self) -> Tensor:
        _, prompt_B = self._state.prefix_lengths(self._columns.stop)
        return prompt_B


@dataclass(frozen=True)
class Proposal:
    """Holds the drafts of a round. Of a row's K columns the first `count[row]` are real.

    `draft_BKV` holds the probabilities that each token was drawn from, the very tensor: NaN where the draft's
    logits were not numbers. It is None where no one needs it: without drafts, and on ranks that do not
    decide.
    """

    drafted_BK: Tensor  # token ids
    draft_BKV: Tensor | None
    count: tuple[int, ...]

    @property
    def k(self) -> int:
        return max(self.count)


class State:
    """Holds the batch: each text on the host, and all of them in a buffer on the device.

    `texts` are token ids, prompts included, and `keys` name the rows' random streams. After a text the buffer
    holds this round's drafts: they are part of the prefix of the positions after them. The next round
    overwrites what was not accepted.
    """

    def __init__(self, prompts: list[Prompt], room: int, device: torch.device) -> None:
        """`room` is how many tokens the longest row can grow to."""
        self.prompts = list(prompts)
        self.keys = [prompt_key(prompt.id) for prompt in prompts]
        self.prompt_lengths = [len(prompt.token_ids) for prompt in prompts]
        self.texts = [list(prompt.token_ids) for prompt in prompts]
        self.finished: list[str | None] = [None] * len(prompts)  # why each row ended
        self.logprobs: list[list[ScoredToken]] = [[] for _ in prompts]  # of generated tokens, if asked for

        # S is one slot more than a text can fill: drafts that a row does not have are written there.
        self.capacity = room
        padded = [text + [0] * (room + 1 - len(text)) for text in self.texts]
        self.token_BS = sent(padded, device)
        self._lengths_changed()

    def _lengths_changed(self) -> None:
        """Drops the cached tensors of positions, which the texts' lengths decide."""
        self._prefixes: tuple[Tensor, Tensor] | None = None  # of `prefix_lengths`
        self._places: tuple[tuple[int, ...], Tensor] | None = None  # of `write_draft`: a count, and its slots

    @property
    def rows(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    @property
    def ended(self) -> list[bool]:
        return [reason is not None for reason in self.finished]

    @property
    def device(self) -> torch.device:
        return self.token_BS.device

    def replace(self, row: int, prompt: Prompt) -> None:
        """Replaces an ended row by a new prompt, which has draws of its own (`prompt_key`)."""
        self.prompts[row] = prompt
        self.keys[row] = prompt_key(prompt.id)
        self.prompt_lengths[row] = len(prompt.token_ids)
        # A new list: what keeps an index of the old text sees by that that it is another one.
        self.texts[row] = list(prompt.token_ids)
        self.finished[row] = None
        self.logprobs[row] = []

        # Nothing of the old text stays after the new one.
        padded = [*prompt.token_ids, *[0] * (self.capacity + 1 - len(prompt.token_ids))]
        self.token_BS[row] = sent(padded, self.device)
        self._lengths_changed()

    def generated(self, row: int) -> list[int]:
        """Returns the row's tokens after its prompt."""
        return self.texts[row][self.prompt_lengths[row] :]

    def slot(self, purpose: Purpose, offset: int = 0) -> Slot:
        """Names a draw of each row, `offset` positions after its text; rows that have ended draw nothing."""
        pairs = zip(self.keys, self.finished, strict=True)
        keys = tuple(key if reason is None else None for key, reason in pairs)
        return Slot(keys, tuple(self.lengths), purpose, offset)

    def prefix(self, first: int, width: int) -> Prefix:
        """Returns the prefixes of `width` positions a row, the first of them `first` drafts past its length.

        The first continues the row's text and its first `first` drafts, the next one also the draft after
        them, and so on.
        """
        return StatePrefix(self, first, width)

    def prefix_lengths(self, width: int) -> tuple[Tensor, Tensor]:
        """Returns the lengths of `width` or more prefixes a row, (B, W), and of the prompts, (B,)."""
        if self._prefixes is None or self._prefixes[0].shape[1] < width:
            text_B, prompt_B = sent([self.lengths, self.prompt_lengths], self.device)
            length_BW = text_B[:, None] + torch.arange(max(width, AT_ONCE), device=self.device)
            self._prefixes = length_BW.clamp_(max=self.capacity), prompt_B
        return self._prefixes

    def write_draft(self, token_B: Tensor, offset: int, count: tuple[int, ...]) -> None:
        """Writes draft number `offset` (from 0) after each text that has one; row b has `count[b]` drafts."""
        if offset >= max(count):
            return
        if self.rows == 1:
            self.token_BS[:, len(self.texts[0]) + offset].copy_(token_B)
            return

        # Where each row's drafts stand, (B, K): kept for all drafts of a round, so that it is sent once.
        if self._places is None or self._places[0] != count:
            places = [
                [length + i if i < drafted else self.capacity for i in range(max(count))]
                for length, drafted in zip(self.lengths, count, strict=True)
            ]
            self._places = count, sent(places, self.device)
        self.token_BS.scatter_(1, self._places[1][:, offset, None], token_B[:, None])

    def write_drafts(self, drafted_BK: Tensor, count: tuple[int, ...]) -> None:
        """Writes all drafts of a round after their texts."""
        for offset in range(max(count)):
            self.write_draft(drafted_BK[:, offset], offset, count)

    def extended(self, blocks: list[list[int]]) -> State:
        """Returns a view of the batch as if these tokens were committed, a block for each row.

        It has texts of its own, and shares the buffer, into which it writes nothing by itself.
        """
        later = copy(self)
        later.keys = list(self.keys)
        later.prompt_lengths = list(self.prompt_lengths)
        later.texts = [[*text, *block] for text, block in zip(self.texts, blocks, strict=True)]
        later._lengths_changed()
        return later

    def append(self, blocks: Mapping[int, list[int]]) -> None:
        """Commits a block of tokens to each of these rows."""
        starts = {row: len(self.texts[row]) for row in blocks}
        for row, tokens in blocks.items():
            self.texts[row] += tokens
        self.write_texts(starts)
        self._lengths_changed()

    def write_texts(self, starts: Mapping[int, int]) -> None:
        """Writes rows' texts into the buffer, each from the position in `starts` on.

        What a view (`extended`) has written there is replaced.
        """
        # The buffer as one line: slot t of row b is at b * S + t.
        written = [
            (row * (self.capacity + 1) + place, self.texts[row][place])
            for row, start in starts.items()
            for place in range(start, len(self.texts[row]))
        ]
        if written:
            place_N, token_N = sent([*zip(*written, strict=True)], self.device)
            self.token_BS.view(-1).index_copy_(0, place_N, token_N)
