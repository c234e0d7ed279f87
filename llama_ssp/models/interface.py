"""What a model offers to those that run it: DecoderModel and CausalModel are models, HeadModel is loaded."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from llama_ssp.errors import ModelError
from llama_ssp.models.passes import Pass

log = logging.getLogger(__name__)


@cache
def log_slow(what: str, fix: str) -> None:
    """Logs, once, why filters, draws or decisions are no graphs."""
    cost = "rounds have 30 to 160 more launches, some 1 to 3 ms"  # bench/results/launches_emulated_202611.md
    log.warning("engine: %s are computed without graphs: %s; %s", what, cost, fix)


@dataclass
class Tally:
    """Bytes of the caches of one model, now and at most."""

    now: int = 0
    most: int = 0

    def add(self, tensor: Tensor) -> None:
        """Counts it until it is freed."""
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._end, tensor.nbytes).atexit = False

    def _end(self, size: int) -> None:
        self.now -= size


class Cache(Protocol):
    """Keys and values, or states, of a batch of rows (`KVCache`); only its model looks inside."""

    def clear(self, row: int) -> None:
        """Forgets a row, before another text takes its place."""

    def resumable(self, row: int, length: int) -> int:
        """Returns from which of a row's first `length` tokens on a pass can go on: `length`, or else 0."""

    def free(self) -> None:
        """Frees the memory of all rows; the cache cannot be used afterwards."""


class Loaded(Protocol):
    """A target, a draft model or a head in memory."""

    name: str
    vocab: int
    context: int
    device: torch.device
    dtype: torch.dtype
    caches: Tally
    is_compiled: bool = False  # of its steps; known once one has run

    def prepare(
        self,
        widths: Iterable[int] = (),
        rows: int = 1,
        capacity: int = 8,
        ragged: bool = True,
        rewinds: int = 0,
    ) -> None:
        """Compiles the steps, if they are to be, before they are needed: `rows` of up to `widths` tokens.

        If steps are not `ragged`, all rows have the same one of these widths. `rewinds`: as of `new_cache`.
        """
        return None

    def drop_graphs(self) -> None:
        """Frees CUDA graphs, which are captured anew when they are needed. All ranks call it."""
        return None

    @property
    def has_graphs(self) -> bool:
        """Whether steps are CUDA graphs."""
        return False

    @property
    def weights_bytes(self) -> int:
        """Bytes of this rank's weights."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights, and of the caches at most so far."""
        return self.weights_bytes + self.caches.most

    def replay(self, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Calls a function of tensors; a model with CUDA graphs runs it as one.

        The function must not make the host wait. Its result is valid until the next call.
        """
        return function(*given)


class Model(Loaded, Protocol):
    """Tokens and a cache in, logits out; over ranks, all ranks call it at the same time."""

    restart: int | None = None  # texts that grow longer are fed anew
    taps: tuple[int, ...] = ()
    pads: bool = False  # whether a pass of some rows computes all of them, as wide as the longest
    cuts: bool = False  # whether `parts` keeps no more logits than it yields
    tapped_TX: Tensor | None = None  # the inputs of the tapped blocks in the last pass; None without taps

    def tap(self, blocks: tuple[int, ...]) -> None:
        """Sets the taps: the blocks whose inputs (hidden states) each pass from now on keeps for a head.

        They stand token after token as they are fed, the blocks' states one after the other.
        """
        self.taps = blocks
        self.tapped_TX = None

    def table(self, output: bool) -> Tensor | None:
        """Returns the embedding, or the output matrix, if this process has all of it as numbers."""
        return None

    def normed(self, state_TH: Tensor) -> Tensor:
        """Returns what the output matrix is given of these states, which the last block has given."""
        raise self._not_given()

    def look_up(self, token_T: Tensor) -> Tensor:
        """Returns what the first block is given of these tokens; all ranks of the model call it."""
        raise self._not_given()

    def _not_given(self) -> ModelError:
        return ModelError(
            "a head reads what this model does not give",
            where=self.name,
            found=type(self).__name__,
            allowed="a model that the decoder runs",
            fix="use another draft",
        )

    def new_cache(self, rows: int, capacity: int, rewinds: int = 0) -> Any:
        """Returns a Cache of so many rows and tokens of each.

        A row that is rolled back by `rewinds` tokens at most is never read anew.
        """

    def logits(self, token_BW: Tensor, pass_: Pass, cache: Any) -> Tensor:
        """Returns logits, (B, W, V); with `last_only` those of each row's last token, (B, 1, V)."""

    def parts(self, token_BW: Tensor, pass_: Pass, cache: Any) -> Iterator[Tensor]:
        """Yields the logits of one pass, `part_width` columns after the other, (B, that or fewer, V)."""
        assert pass_.part_width is not None
        yield from torch.split(self.logits(token_BW, pass_, cache), pass_.part_width, 1)
