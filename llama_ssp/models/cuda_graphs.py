"""A model whose steps are CUDA graphs: captured once for each shape and bucket of the cache, then one launch.

A graph runs on memory that stays where it is: the cache it was captured with, and buffers that take each
step's tokens and lengths. So graphs belong to a cache, and go with it; their scratch memory is one pool. What
is captured is the compiled step (compile.py).

Not yet run on a GPU. What does not need one, which is all but the capture itself, is tested with a capture
that calls the step anew each time (tests/test_compiled.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llama_ssp.models.compile import Arguments, CompiledModel, Kind, Step
from llama_ssp.models.kv_cache import Feed, RaggedCache
from llama_ssp.models.quantization import quicken
from llama_ssp.models.transfer import sent

BUCKET = 256  # slots: a step reads the cache up to the next multiple of it
WARM_UPS = 3  # what is made at first use (handles, workspaces) must be there before a capture
Shape = tuple[int, int, int]  # rows, columns, slots


class GraphedModel(CompiledModel):
    """The same logits, with one launch a step."""

    def _ready(self) -> None:
        """Weights stay as they are: a GPU's own products read them as fast as they can be read, but 8 bit."""
        quicken(self.module)
        self._programs: WeakKeyDictionary[RaggedCache, dict[Shape, Program]] = WeakKeyDictionary()
        self._pool: Any = None

    def _arguments(self, token_BW: Tensor, feed: Feed, layers: list[tuple[Tensor, Tensor]]) -> Arguments:
        """As the compiled step's, its span a whole number of buckets; slots behind the text are masked."""
        slots = min(-(-feed.span // BUCKET) * BUCKET, feed.capacity + 1)
        token_BW, start_B1, count_B1, column_W, _, keys, values = super()._arguments(token_BW, feed, layers)
        slot_S = torch.arange(max(slots, 2), device=self.device)
        column_W = torch.arange(len(column_W), device=self.device)
        return (
            token_BW,
            sent(start_B1, self.device),
            sent(count_B1, self.device),
            column_W,
            slot_S,
            keys,
            values,
        )

    def _run(self, kind: Kind, arguments: Arguments, cache: RaggedCache) -> Tensor:
        programs = self._programs.setdefault(cache, {})
        shape = (*arguments[0].shape, len(arguments[4]))
        if shape not in programs:
            programs[shape] = Program(self._steps[kind], arguments, self._captured)
        return programs[shape](arguments)

    def _captured(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The call as a graph; what it returns is overwritten by the next replay."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream
        side = stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):  # the same keys to the same slots: once is as good as often
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # On this model's device: torch's own stream for captures is one of the device that is current first.
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self._pool, stream=side):
            made = call()

        def replay() -> Tensor:
            graph.replay()
            return made

        return replay


class Program:
    """A step on buffers of its own, captured; the caches it is called with are always the same."""

    def __init__(
        self,
        step: Step,
        arguments: Arguments,
        capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]],
    ) -> None:
        token_BW, start_B1, count_B1, *rest = arguments
        self._rest = rest  # a replay reads it where it was when it was captured
        self._buffers = [tensor.clone() for tensor in (token_BW, start_B1, count_B1)]
        self._replay = capture(lambda: step(*self._buffers, *rest))

    def __call__(self, arguments: Arguments) -> Tensor:
        for buffer, tensor in zip(self._buffers, arguments[:3], strict=True):
            buffer.copy_(tensor, non_blocking=True)
        return self._replay().clone()  # whoever asked may keep it beyond the next replay
