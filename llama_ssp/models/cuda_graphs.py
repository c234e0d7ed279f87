"""A model whose steps are CUDA graphs: captured once for each shape and bucket of the cache, then one launch.

A graph needs memory that stays in its place: the cache of its capture, and buffers for each step's tokens and
lengths. So graphs belong to a cache, and are freed with it; all share one pool of scratch memory. The
compiled step (compile.py) is what is captured.

Not yet run on a GPU. All but the capture is tested with a capture that calls the step anew each time
(tests/test_compiled.py).
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
Call = Callable[[], Tensor]


class GraphedModel(CompiledModel):
    """The same logits, with one launch a step."""

    def _change_layers(self) -> None:
        """Only 8-bit layers: a GPU's own products read other weights at full speed."""
        quicken(self.module)
        self._programs: WeakKeyDictionary[RaggedCache, dict[Shape, Program]] = WeakKeyDictionary()
        self._pool: Any = None

    def _arguments(self, token_BW: Tensor, feed: Feed, layers: list[tuple[Tensor, Tensor]]) -> Arguments:
        """Those of the compiled step, with a span of whole buckets; slots behind the text are masked."""
        slots = min(-(-feed.span // BUCKET) * BUCKET, feed.capacity + 1)
        token_BW, start_B1, count_B1, column_W, _, keys, values = super()._arguments(token_BW, feed, layers)
        start_B1, count_B1 = sent(start_B1, self.device), sent(count_B1, self.device)
        slot_S = torch.arange(max(slots, 2), device=self.device)
        column_W = torch.arange(len(column_W), device=self.device)
        return token_BW, start_B1, count_B1, column_W, slot_S, keys, values

    def _run(self, kind: Kind, arguments: Arguments, cache: RaggedCache) -> Tensor:
        programs = self._programs.setdefault(cache, {})
        shape = (*arguments[0].shape, len(arguments[4]))
        if shape not in programs:
            programs[shape] = Program(self._steps[kind], arguments, self._captured)
        return programs[shape](arguments)

    def _captured(self, call: Call) -> Call:
        """The call as a graph; the next replay overwrites what it returns."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream
        side = stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):  # each writes the same keys to the same slots
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
    """A captured step with buffers of its own, always called with the same caches."""

    def __init__(self, step: Step, arguments: Arguments, capture: Callable[[Call], Call]) -> None:
        token_BW, start_B1, count_B1, *rest = arguments
        self._rest = rest  # a replay reads it in its place at the capture
        self._buffers = [tensor.clone() for tensor in (token_BW, start_B1, count_B1)]
        self._replay = capture(lambda: step(*self._buffers, *rest))

    def __call__(self, arguments: Arguments) -> Tensor:
        for buffer, tensor in zip(self._buffers, arguments[:3], strict=True):
            buffer.copy_(tensor, non_blocking=True)
        return self._replay().clone()  # the caller may keep it beyond the next replay
