"""A decoder with CUDA graphs as steps: captured once for each number of tokens, then one launch a step.

A graph reads and writes memory at fixed places: the cache of its capture, and buffers for a step's tokens,
positions and first slots. So the model keeps the memory of a cache that is no longer used, with its
graphs, for the next batch that fits. Lengths and slots are read on the device (kernels/attention_triton.py):
a graph serves all contexts and all rows. Longer steps are padded to the next size that has a graph
(graph_sizes.py); keys of pads go to a spare slot. A model's graphs share scratch memory, the memory for their
results, and so a stream.

All ranks of a model do the same, because steps with all-reduces come before each capture.

All but the capture is tested with a capture that calls the step anew each time (tests/test_graphs.py), and
the capture on a GPU (tests/gpu).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DistributedError, first_line
from llama_ssp.models.attention import Places
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.decoder_model import Step
from llama_ssp.models.experts import Experts
from llama_ssp.models.graph_sizes import (
    BUCKET,
    KEPT_BYTES,
    LARGEST,
    MOST,
    WIDEST,
    padded,
    ring_of,
    sizes_up_to,
)
from llama_ssp.models.interface import log_slow
from llama_ssp.models.kernels.kernel_sizes import MOST_PAIRS
from llama_ssp.models.kv_cache import Caches, KVCache
from llama_ssp.models.passes import Pass, all_rows, sent
from llama_ssp.models.shape import shape_of
from llama_ssp.models.steps import SteppedModel

log = logging.getLogger(__name__)

FEWER = "give fewer rows (batch_size) or drafts (k)"
WARM_UPS = 3  # what is made at first use (handles, workspaces, kernels) must be there before a capture
ALIGNMENT = 16  # bytes: kernels may have been compiled for tensors that begin at multiples of it
Call = Callable[[], Any]  # gives a tensor, or a step's list of them


class GraphedModel(SteppedModel):
    """A decoder that gives the logits of `SteppedModel` with one launch a step."""

    def __init__(self, decoder: Decoder, config: Any, name: str, ranks: Ranks) -> None:
        super().__init__(decoder, config, name, ranks)
        self._memories: list[Memory] = []  # the same on all ranks
        self._pool: Any = None
        self._side: Any = None  # the stream of captures
        self._refused = False  # whether a capture has failed
        if self.ranks.through_host:
            cost = "the host launches each kernel of a step; give each rank a whole GPU of its own"
            log.warning("engine: %s runs without graphs: its sums go through the host: %s", self.name, cost)
        self._outputs = SharedMemory()  # what steps give
        self._functions: dict[object, Callable[..., Tensor]] = {}
        self._inputs = SharedMemory()  # what these read
        self._results_bytes = 0  # what these give
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ranks.before_close(self.free)
        shape = shape_of(self.config)
        # With more pairs of a token and an expert, the host may wait for the choice of experts (`prepare`).
        self.most_tokens = min(MOST, MOST_PAIRS // shape.top_k) if shape.experts else MOST

    @torch.inference_mode()
    def prepare(
        self,
        widths: Iterable[int] = (),
        rows: int = 1,
        capacity: int = 8,
        ragged: bool = True,
        rewinds: int = 0,
    ) -> None:
        """Also captures steps of `rows` texts, in caches of this capacity; one more serves short prompts.

        Rows that end or draft less make steps of any number of tokens, up to those of the largest width. If
        steps are not `ragged`, all rows have the same width.
        Larger steps come first: smaller ones use their scratch memory, and the memory for their results.
        """
        widths = sorted(widths)
        if self.most_tokens < MOST:
            layers = [layer for layer in self.decoder.modules() if isinstance(layer, Experts)]
            never_waits = not any(layer.waits_for_host(MOST) for layer in layers)
            if self._on_all_ranks([never_waits])[0]:  # GPUs may differ
                self.most_tokens = MOST

        # Memory for the largest cache is made first. The cache itself is dropped at once; its memory stays,
        # unused, so that both caches below are in it, also that of super().prepare(), and with them all
        # captures.
        ring = self.new_cache(rows, capacity, rewinds).ring

        widest = max(widths, default=0)
        prompt = min(WIDEST, capacity, self.most_tokens, ring or WIDEST)
        tokens = min(rows * widest, self.most_tokens)
        self.longest_prompt = max(self.longest_prompt, tokens)
        super().prepare()

        cache = self.new_cache(rows, capacity, rewinds)
        sizes = sizes_up_to(tokens, prompt) if widest else ()
        if not ragged:
            needed = {padded(prompt), *(padded(rows * width) for width in widths)}
            sizes = tuple(size for size in sizes if size in needed)
        for size in reversed(sizes):
            # The tokens of a prompt are of one row; those of a step fill one row after the other.
            width = prompt if size > padded(tokens) else widest
            counts = [min(max(size - row * width, 0), width) for row in range(rows)]
            token_BW = torch.zeros(rows, max(counts), dtype=torch.int64, device=self.device)
            pass_ = Pass(spans=all_rows([0] * rows, counts), device=self.device)
            self._try(token_BW, pass_, cache)

    def new_cache(self, rows: int, capacity: int, rewinds: int = 0, spare: int = 0) -> KVCache:
        """Returns a cache in memory that no other uses any more and that is large enough.

        Smaller unused memory is freed before other memory is made.
        """
        slots = -(-(rows * capacity + 1) // BUCKET) * BUCKET
        ring = ring_of(rewinds) if self.has_states else 0
        needed = Room(slots=slots, texts=rows + 1 if ring else 0, ring=ring)
        unused = self._on_all_ranks([memory.is_unused for memory in self._memories])
        pairs = list(zip(self._memories, unused, strict=True))
        self._memories = [memory for memory, is_unused in pairs if not is_unused or memory.room.holds(needed)]
        memory = next((each for each, is_unused in pairs if is_unused and each.room.holds(needed)), None)
        del pairs  # else it would keep what is to be freed
        self._drop_unused_pool()
        if memory is None:
            made = super().new_cache(rows, capacity, rewinds, spare=slots - rows * capacity)
            memory = Memory(room=needed, layers=made.layers)
            self._memories.append(memory)

        cache = KVCache(
            rows=rows,
            capacity=capacity,
            device=self.device,
            layers=memory.layers,
            tally=self.caches,
            ring=ring,
        )
        cache.take()
        memory.user = weakref.ref(cache)
        return cache

    @property
    def has_graphs(self) -> bool:
        """Whether steps are captured.

        This says nothing of `replay`: drawing and deciding have no all-reduces, so they are captured also
        where these go through the host.
        """
        return self.is_compiled and not (self._refused or self.ranks.through_host)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        most_tokens = self.most_tokens
        self.most_tokens = 0
        try:
            yield
        finally:
            self.most_tokens = most_tokens

    def _drop_steps(self) -> None:
        super()._drop_steps()
        self._drop_graphs_of_steps()

    def drop_graphs(self) -> None:
        """Frees all graphs, with what they share: each is captured anew when it is next needed.

        All ranks call it. What was captured only to be measured should not hold memory in the run.
        """
        self._drop_functions()
        self._drop_graphs_of_steps()
        torch.cuda.empty_cache()  # the pool of the dropped graphs goes back to the GPU

    def _drop_graphs_of_steps(self) -> None:
        for memory in self._memories:
            memory.graphs.clear()
        self._outputs = SharedMemory()
        self._drop_unused_pool()

    def _drop_functions(self) -> None:
        self._functions.clear()
        self._inputs = SharedMemory()
        self._results_bytes = 0
        self._drop_unused_pool()

    def _drop_unused_pool(self) -> None:
        """A pool whose graphs are all gone cannot be used again."""
        if not self._functions and not any(memory.graphs for memory in self._memories):
            self._pool = None

    def _step_for(self, token_T: Tensor, pass_: Pass, places: Places, cache: KVCache) -> Step | None:
        """Returns a graph, or where there is none the compiled step.

        A step captures the graph that it lacks. A prompt does not: no plan counts such a graph.
        """
        step = super()._step_for(token_T, pass_, places, cache)
        size = padded(len(token_T))
        if step is None or size > self.most_tokens or not self.has_graphs:
            return step

        memory = next(memory for memory in self._memories if memory.layers is cache.layers)
        if pass_.last_only:
            size = min((larger for larger in memory.graphs if larger >= size), default=0)
        elif size not in memory.graphs:
            self._capture(size, memory, step)
        return memory.graphs.get(size, step)

    def replay(self, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Calls a function of these tensors by a graph for each set of shapes.

        The function must not have the host wait. Its result is valid until the next graph of the model runs.

        All graphs read the same memory. Where one needs more, the others go, and are captured anew when they
        are next needed: the sizes of rounds soon come to an end. So do they where results take too much.
        """
        size = room_of(given)
        is_large = sum(tensor.numel() for tensor in given) > LARGEST or size > KEPT_BYTES
        if is_large:
            log_slow("drafts and decisions of so many rows", FEWER)
        if is_large or self._refused:
            return function(*given)

        key = (function, *((tensor.shape, tensor.dtype) for tensor in given))
        if key in self._functions:
            return self._functions[key](*given)

        if size > self._inputs.size:
            self._drop_functions()
        graph = self._function(function, given)
        result = graph(*given)
        if self._inputs.size + self._results_bytes + result.nbytes > KEPT_BYTES:
            self._functions.clear()
            self._results_bytes = 0
        self._functions[key] = graph
        self._results_bytes += result.nbytes
        return result

    def _function(self, function: Callable[..., Tensor], given: Sequence[Tensor]) -> Callable[..., Tensor]:
        """Returns the function as a graph; if it cannot be captured, as it is, and the log says why."""
        buffers = self._inputs.filled(given)
        compute: Call = partial(function, *buffers)
        self._warm(compute)
        try:
            launch, result = self._captured(compute)
        except Exception as error:  # whatever CUDA raises
            log.warning("engine: rounds are decided without graphs: %s", first_line(error)[:200])
            return function

        def run(*given: Tensor) -> Tensor:
            for buffer, tensor in zip(buffers, given, strict=True):
                buffer.copy_(tensor)
            launch()
            return result  # type: ignore[no-any-return]

        return run

    def _capture(self, size: int, memory: Memory, step: Step) -> None:
        """Adds a graph; if that fails, steps stay compiled, and the log says why.

        On several ranks it is an error: what connects them may be broken by half a capture.
        """
        graph = Graph(size, memory.room.slots - 1, self.device)
        token_T, position_T, first_T = graph.buffer_3T

        def compute() -> list[Tensor]:
            # Results are copied out at once: the memory of one serves all, and the step's own is scratch.
            return self._outputs.filled(step(token_T, position_T, first_T, memory.layers))

        with self.ranks.during("a capture"):
            self._warm(compute)
            try:
                graph.launch, graph.result = self._captured(compute)
                memory.graphs[size] = graph
            except Exception as error:  # whatever CUDA and its libraries raise
                log.warning("engine: %s runs without graphs: %s", self.name, first_line(error)[:200])
        self._refused = not self._on_all_ranks([size in memory.graphs])[0]
        if self._refused and self.ranks.world > 1:
            raise DistributedError(
                "a step over ranks was not captured", where=self.name, fix="give engine=eager"
            )

    def _warm(self, step: Call) -> None:
        """Steps before a capture, on its stream. An error ends the run: other ranks wait in all-reduces."""
        stream: Any = torch.cuda.Stream
        self._side = self._side or stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _captured(self, step: Call) -> tuple[Call, Any]:
        """Returns what launches the step as a graph, and its result, which each launch overwrites."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        # Other threads, such as NCCL's, may query the device during a capture: theirs are not errors.
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
                ):
                    result = step()
            finally:  # a capture that fails may leave its own stream as the current one
                torch.cuda.set_stream(current)
        return graph.replay, result

    def free(self) -> None:
        """Gives the graphs back, also those that somebody still keeps; no step may follow."""
        for graph in self._graphs:
            graph.reset()


class Graph:
    """A captured step and its buffers: tokens, positions and first slots, (3, T)."""

    launch: Call
    result: list[Tensor]

    def __init__(self, size: int, spare: int, device: torch.device) -> None:
        pad_31 = sent([[0], [0], [spare]], device)
        self._pad_3T = pad_31.expand(3, size)
        # Each begins at a multiple of 16 bytes, as kernels may have been compiled for.
        self.buffer_3T = pad_31.repeat(1, size + size % 2)[:, :size]

    def __call__(self, token_T: Tensor, position_T: Tensor, first_T: Tensor, _caches: Caches) -> list[Tensor]:
        """Computes a step of `size` tokens or fewer, on the caches of the capture, and returns what it gives.

        tokens         17 43  9   0   0 ...
        positions       8  9 10   0   0 ...
        first slots     0  0  0   s   s ...     pads write into the spare slot s
        """
        count = len(token_T)
        torch.stack((token_T, position_T, first_T), out=self.buffer_3T[:, :count])
        if count < self.buffer_3T.shape[1]:
            self.buffer_3T[:, count:] = self._pad_3T[:, count:]
        self.launch()
        # The caller may keep them beyond the next launch.
        return [tensor[:count].clone() for tensor in self.result]


class SharedMemory:
    """Memory that graphs use one after the other, as large as the largest of them needs.

    Where a graph needs more, it has other memory, which later ones share; those before it keep theirs.
    """

    def __init__(self) -> None:
        self._memory_N: Tensor | None = None

    @property
    def size(self) -> int:
        return 0 if self._memory_N is None else len(self._memory_N)

    def filled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies of the tensors in this memory, one after the other:

        | (T, V) fp32 | (T, H) fp32 | ... | free |
        """
        # Ranks that only draft draw outside of inference mode, where its tensors may not be written.
        with torch.inference_mode(False):
            places = self._places(tensors)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        return places

    def _places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the memory of tensors of these shapes, made first where it is too small."""
        size = room_of(tensors)
        if self._memory_N is None or size > self.size:
            self._memory_N = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)

        parts = torch.split(self._memory_N[:size], [room_of([tensor]) for tensor in tensors])
        return [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]


def room_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors that stand one after the other, each at a multiple of ALIGNMENT."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


@dataclass(frozen=True)
class Room:
    """How much a cache needs: slots for keys and values; rings of states for its texts, and one for pads."""

    slots: int
    texts: int
    ring: int

    def holds(self, needed: Room) -> bool:
        """Returns whether memory made for this has room for what is needed, of states and of their tails."""
        states = self.texts * self.ring >= needed.texts * needed.ring
        return self.slots >= needed.slots and states and self.texts >= needed.texts


@dataclass(eq=False)
class Memory:
    """Memory of caches, one after the other, and the graphs that have their cache there."""

    room: Room
    layers: Caches
    user: Callable[[], KVCache | None] = lambda: None
    graphs: dict[int, Graph] = field(default_factory=dict)

    @property
    def is_unused(self) -> bool:
        """Whether no cache is in it: the last one is gone, or has let go of its slots."""
        user = self.user()
        return user is None or user.layers is not self.layers
