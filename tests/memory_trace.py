"""What the runner's own modules allocate, found by running them on tensors that have no content.

The plan's bound (plan/activations.py) must not be below it. Every output of an operator is counted as
long as its memory lives; what kernels take for themselves is not seen. Models of two and three layers are
traced, and depth is extrapolated, which is exact: layers between the first and the last are alike.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama_ssp.config import Weights
from llama_ssp.distributed.comm import Ranks
from llama_ssp.models.assemble import decoder
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.linear import LayerFormat
from llama_ssp.models.sharding import Cut
from llama_ssp.models.synthetic import SyntheticSource, config_for
from llama_ssp.planner.workload import DRAFT, Role
from llama_ssp.speculative.model_runner import ModelRunner

DEPTHS = (2, 3)
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of every tensor that an operator makes, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, int] = {}
        self._count = 0

    def ignore(self, tensors: list[Tensor]) -> None:
        """Memory that was there before."""
        for tensor in tensors:
            self._meet(tensor, counted=False)

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Starts a new peak."""
        self.peak = self.live
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), COMPOSITE
        ):
            with self:  # made of operators that are counted one by one
                return func._op_dk(COMPOSITE, *args, **kwargs)
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._meet(leaf, counted=True)
        return made

    def _meet(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._count += 1
        number, size = self._count, storage.nbytes() if counted else 0
        self._known[storage._cdata] = number
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._end, storage._cdata, number, size)

    def _end(self, key: int, number: int, size: int) -> None:
        self.live -= size
        if self._known.get(key) == number:
            del self._known[key]


class FakeRanks(Ranks):
    """One of several ranks, the others of which answer at once."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(self.world)]


@dataclass(frozen=True)
class Pass:
    """A forward pass that feeds so many more tokens of every row."""

    columns: int
    last_only: bool = False


@dataclass(frozen=True)
class Traced:
    """Bytes of one rank: weights, caches, and beside them the most in each pass."""

    weights: int
    caches: int
    peaks: tuple[int, ...]


def trace(
    role: Role, passes: list[Pass], rows: int, capacity: int, world: int = 1, rank: int = 0, depths: Any = ()
) -> Traced:
    """One rank's part of the model through these passes, one after the other."""
    layers = role.model.n_layers
    if not depths:  # GPT-Neo's layers come in pairs, and those with other heads after some others
        is_even = role.model.family != "gpt_neo" and not role.model.full_layers
        depths = DEPTHS if layers > DEPTHS[-1] and is_even else (layers,)
    found = [_trace(_at_depth(role, depth), passes, rows, capacity, world, rank) for depth in depths]
    if len(found) == 1:
        return found[0]
    low, high = found

    def deep(a: int, b: int) -> int:
        return a + (b - a) * (layers - DEPTHS[0])

    peaks = tuple(deep(a, b) for a, b in zip(low.peaks, high.peaks, strict=True))
    return Traced(deep(low.weights, high.weights), deep(low.caches, high.caches), peaks)


def _at_depth(role: Role, layers: int) -> Role:
    model = replace(role.model, n_layers=layers, weights=Weights.synthetic, agreement=1.0)
    return replace(role, model=model)


def _trace(role: Role, passes: list[Pass], rows: int, capacity: int, world: int, rank: int) -> Traced:
    with FakeTensorMode(allow_non_fake_inputs=True):
        causal = _filled(role, world, rank)
        count, runner = LiveBytes(), ModelRunner(causal, prefill_chunk=capacity)
        token_BS = torch.zeros(rows, capacity + 1, dtype=torch.int64)
        count.ignore([*causal.decoder.parameters(), *causal.decoder.buffers(), token_BS])
        runner.start(rows, capacity)
        peaks = []
        for step in passes:
            with count.phase():
                runner._forward(token_BS, [done + step.columns for done in runner.cached], step.last_only)
            assert runner._cache is not None
            peaks.append(count.peak - cache_bytes(runner._cache))
        caches = cache_bytes(runner._cache) if runner._cache else 0
        return Traced(_held(causal), caches, tuple(peaks))


class BlankSource:
    """Weights without what is in them; a tied head is not among them."""

    def __init__(self, role: Role, config: Any) -> None:
        how = role.model, torch.float32, torch.device("cpu")
        self.shapes = SyntheticSource.of_config(config, *how, drafts=False).shapes

    def read(self, name: str, cut: Cut | None) -> Tensor:
        shape = list(self.shapes[name])
        if cut is not None:
            shape[cut.dim] = sum(last - first for first, last in cut.spans)
            shape = shape[cut.number is not None :]
        return torch.empty(shape)


def _filled(role: Role, world: int, rank: int) -> DecoderModel:
    """Cut as the loader cuts, and made of nothing."""
    config, ranks = config_for(role.model), FakeRanks(rank, world)
    drafts = role.role == DRAFT
    made = decoder(config, BlankSource(role, config), ranks, LayerFormat(role.dtype), drafts)
    return DecoderModel(made, config, role.model.name, ranks)


def _held(causal: DecoderModel) -> int:
    tensors = [*causal.decoder.parameters(), *causal.decoder.buffers()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def cache_bytes(cache: KVCache) -> int:
    tensors = {id(tensor): tensor for layer in cache.layers for tensor in layer}  # layers may share one
    return sum(tensor.nbytes for tensor in tensors.values())
