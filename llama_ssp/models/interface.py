"""What a model offers to those that run it: CausalModel and DecoderModel are models."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from llama_ssp.models.feed import Feed


class Cache(Protocol):
    """Keys and values of a batch of rows; only its model looks inside."""

    rows: int
    capacity: int

    def row(self, index: int) -> Any:
        """One row as a cache of its own, in the same memory."""

    def clear(self, row: int) -> None:
        """Forgets a row, before another text takes its place."""


class Model(Protocol):
    """Tokens and a cache in, logits out; over ranks, all ranks call it at the same time."""

    name: str
    vocab: int
    context: int
    restart: int | None  # texts that grow longer are fed anew
    device: torch.device
    dtype: torch.dtype
    is_compiled: bool  # of its steps; known once one has run
    tapped_TX: Tensor | None  # the inputs of the tapped blocks in the last pass; None without taps

    @property
    def weights_bytes(self) -> int:
        """Bytes of this rank's weights."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights, and of the caches at most so far."""

    def tap(self, blocks: tuple[int, ...]) -> None:
        """Sets the taps: the blocks whose inputs (hidden states) each pass from now on keeps for a head."""

    def new_cache(self, rows: int, capacity: int) -> Any:
        """A Cache of the model's own kind."""

    def logits(self, token_BW: Tensor, feed: Feed, cache: Any, last_only: bool) -> Tensor:
        """Logits, (B, W, V); of the last column only, (B, 1, V), for a pass that is fed for its keys."""
