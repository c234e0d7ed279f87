"""A device of our own, for want of a GPU: it counts the copies between it and the host, and the launches.

Its tensors hold ordinary ones and compute with them, so what runs there gives what it gives on the host,
by the branches that are not a CPU's. What would have the host wait for a GPU is counted: a copy that is not
queued, or not from pinned memory, a number read. torch lets one backend a process be written in Python, so
this module is a program: `python -m tests.far` runs pairs there and on the host: are texts the same, what was
copied. `python -m tests.far ranks` does so over two ranks, threads with a device each. bench/launches.py
counts launches with it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# In inference mode no views of tensors like these can be made.
torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[assignment,misc]

from llama_ssp.config import SamplingConfig  # noqa: E402
from llama_ssp.distributed.comm import ALONE, Ranks  # noqa: E402
from llama_ssp.distributed.roles import Roles  # noqa: E402
from llama_ssp.models import passes, steps  # noqa: E402
from llama_ssp.models.attention import Places, Scores  # noqa: E402
from llama_ssp.models.cuda_graphs import Call, GraphedModel  # noqa: E402
from llama_ssp.models.decoder import Decoder  # noqa: E402
from llama_ssp.models.decoder_model import DecoderModel  # noqa: E402
from llama_ssp.speculative.drafters.local import Drafter, DraftShard, ModelDrafter, Sampler  # noqa: E402
from llama_ssp.speculative.engine import Engine, RankEngine  # noqa: E402
from llama_ssp.speculative.follower import Follower  # noqa: E402
from llama_ssp.speculative.model_runner import ModelRunner  # noqa: E402
from llama_ssp.speculative.rng import CounterDraws  # noqa: E402
from llama_ssp.speculative.sampling import SamplingTransform  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.speculative.verification import RULES  # noqa: E402
from tests.distributed.threads import Meeting, ThreadRank, together  # noqa: E402
from tests.families import build, decoder_of  # noqa: E402
from tests.rig import Run, drive, eager_step, perturbed, speculate  # noqa: E402

_setup_privateuseone_for_python_backend("far")
FAR = torch.device("far:0")
ATEN = torch.ops.aten
# What looks like a change of the host's tensors, but is how torch makes one of numbers.
HARMLESS = {ATEN.lift_fresh.default, torch.ops.prim.device.default}
ALLOCATIONS = {ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.empty_strided.default}
# What has the host wait: it reads a number, or how large the result is.
WAITS = {
    ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.equal.default, ATEN.masked_select.default,
    ATEN._unique2.default,
}  # fmt: skip
BY_INDEX = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}  # a mask's size is read
HERE = threading.local()  # `watch` is what counts in this thread


def pinned(tensor: Tensor) -> Tensor:
    """In place of Tensor.pin_memory: without a GPU there is no pinned memory."""
    copy: Any = tensor.clone()
    copy.is_as_if_pinned = True
    return copy


Tensor.pin_memory = pinned  # type: ignore[assignment,method-assign]
passes.QUEUES.add(FAR.type)


class FarTensor(Tensor):
    """Stands for a tensor on the device; `held` is what it holds."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> FarTensor:
        made: FarTensor = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=FAR,
            storage_offset=held.storage_offset(),
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("tensors of this device live under Watch")

    def tolist(self) -> Any:
        return self.cpu().tolist()


@dataclass(frozen=True)
class Counts:
    """What a GPU would be given, and how often the host would wait for it."""

    launches: float
    copies: float  # to the device, queued
    pageable: float  # to the device from memory that is not pinned, or not queued: the host waits
    waits: float  # for what the host reads

    def since(self, before: Counts, rounds: int = 1) -> Counts:
        """How many more these are, for each of so many rounds."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return Counts(*((now - then) / rounds for now, then in pairs))


class Watch(TorchDispatchMode):
    """Runs this thread's operations on the device, and counts what the host does between."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.launches = 0
        self.replaying = False  # a graph, which is one launch

    def __enter__(self) -> Watch:
        torch._C._set_only_lift_cpu_tensors(True)  # numbers become a host tensor, which is copied
        HERE.watch = self
        super().__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)
        torch._C._set_only_lift_cpu_tensors(False)

    def counts(self) -> Counts:
        seen = self.seen
        return Counts(self.launches, seen["sent, queued"], seen["sent, waiting"], seen["read, waiting"])

    def replayed(self, work: Callable[[], Any]) -> Any:
        """Runs what is inside a graph."""
        self.replaying = True
        try:
            return work()
        finally:
            self.replaying = False

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        wants_far = device is not None and torch.device(device).type == FAR.type
        if not wants_far and not any(isinstance(leaf, FarTensor) for leaf in tree_leaves((args, kwargs))):
            return op(*args, **kwargs)
        self._count(op, args, kwargs, wants_far)
        self.launches += not (self.replaying or op.is_view or op in HARMLESS | ALLOCATIONS)
        if device is not None:
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        made = op(*tree_map(_held, args), **tree_map(_held, kwargs))
        if op is ATEN._to_copy.default and device is not None and not wants_far:
            return made
        known = {id(leaf.held): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FarTensor)}
        return tree_map(lambda one: _far(one, known), made)

    def _count(self, op: Any, args: Any, kwargs: Any, wants_far: bool) -> None:
        if op in HARMLESS:
            return
        if op is ATEN._to_copy.default:
            if kwargs.get("device") is not None and wants_far != isinstance(args[0], FarTensor):
                self.seen[_name(wants_far, args[0], kwargs.get("non_blocking"))] += 1
        elif op is ATEN.copy_.default:
            to, source = (isinstance(one, FarTensor) for one in args[:2])
            if to != source:
                queued = args[2] if len(args) > 2 else kwargs.get("non_blocking")
                self.seen[_name(to, args[1], queued)] += 1
        elif op in WAITS or (op in BY_INDEX and any(map(_is_mask, args[1]))):
            self.seen["read, waiting"] += 1
        elif any(
            isinstance(one, Tensor) and not isinstance(one, FarTensor) and one.dim()
            for one in tree_leaves((args, kwargs))
        ):
            self.seen[f"host and device meet in {op}"] += 1


def _name(sent: bool, source: Any, queued: object) -> str:
    if sent:
        queued = queued and getattr(source, "is_as_if_pinned", False)
    return f"{'sent' if sent else 'read'}, {'queued' if queued else 'waiting'}"


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype is torch.bool


def _held(one: Any) -> Any:
    return one.held if isinstance(one, FarTensor) else one


def _far(one: Any, known: dict[int, FarTensor]) -> Any:
    if not isinstance(one, Tensor):
        return one
    return known[id(one)] if id(one) in known else FarTensor(one)


def brought(module: Decoder) -> Any:
    """The module on the device, its weights copied before anything is counted."""
    return put(deepcopy(module))


def put(module: Decoder) -> Any:
    """The module itself, on the device: one over ranks cannot be copied."""
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                layer._parameters[name] = nn.Parameter(FarTensor(parameter.data), requires_grad=False)
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                layer._buffers[name] = FarTensor(buffer)
    return module


class Replayed(GraphedModel):
    """Graphs without compilation and capture: the step as it is traced, each time."""

    def _made(self, arguments: steps.Arguments) -> bool:
        self._step = eager_step(self)
        return True

    def _warm(self, step: Call) -> None:
        pass

    def _captured(self, step: Call) -> tuple[Call, Any]:
        watch: Watch = HERE.watch
        result = watch.replayed(lambda: tree_map(torch.clone, step()))

        def computed() -> None:
            tree_map(lambda place, tensor: place.copy_(tensor), result, step())

        def launch() -> None:
            watch.launches += 1
            watch.replayed(computed)

        return launch, result


def attend(
    places: Places,
    query_THD: Tensor,
    keys_GND: Tensor,
    values_GND: Tensor,
    scores: Scores,
    _sinks: Tensor | None,
) -> Tensor:
    """As the kernels of steps, of plain operations: every token against every slot, by a mask."""
    place_T1, first_T1 = places.slot_T[:, None], places.first_T[:, None]
    slot_N = torch.arange(keys_GND.shape[1], device=query_THD.device)
    seen_TN = (slot_N <= place_T1) & (slot_N >= first_T1)
    copies = query_THD.shape[1] // keys_GND.shape[0]
    keys_HND, values_HND = (each.repeat_interleave(copies, 0) for each in (keys_GND, values_GND))
    score_HTN = query_THD.transpose(0, 1) @ keys_HND.transpose(1, 2) * scores.scale
    prob_HTN = score_HTN.masked_fill(~seen_TN, -torch.inf).softmax(-1)
    return (prob_HTN @ values_HND.nan_to_num()).transpose(0, 1)


CONTROLS = {
    "plain": SamplingConfig(),
    "greedy": SamplingConfig(temperature=0.0),
    "filtered": SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": SamplingConfig(
        repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1, logit_bias={5: 1.0},
        bad_tokens=[7], min_new_tokens=3,
    ),
}  # fmt: skip


# rows, rule, controls, steps, family: every one of each at least once
CASES = (
    (1, "block", "plain", "eager", "llama-gqa"), (2, "block", "penalised", "eager", "llama-gqa"),
    (1, "token", "greedy", "graphs", "llama-gqa"), (2, "block", "filtered", "graphs", "llama-gqa"),
    (1, "token", "penalised", "graphs", "llama-gqa"), (2, "token", "greedy", "eager", "llama-gqa"),
    (2, "block", "plain", "eager", "qwen3_5"), (2, "block", "plain", "graphs", "qwen3_5"),
    (1, "block", "greedy", "graphs", "qwen3_5"),
)  # fmt: skip


def pair_of(family: str) -> tuple[Any, list[Decoder]]:
    """The config of a pair, and its decoders: one, and one that agrees with it sometimes."""
    modules = build(family), perturbed(build(family), 0.3)
    return modules[0].config, [decoder_of(module) for module in modules]


def main() -> None:
    """One line a case: what it was, whether texts are the same as on the host, and what was seen."""
    pairs = {family: pair_of(family) for *_, family in CASES}
    for case in CASES:
        rows, rule, controls, engine, family = case
        config, decoders = pairs[family]
        prompts = [Prompt(str(row), tuple(range(3, 9 - 2 * row))) for row in range(rows)]
        how: Any = {"k": 3, "rule": rule, "max_new": 8, "sampling": CONTROLS[controls]}
        here = [DecoderModel(one, config, "near") for one in decoders]
        near = speculate(here[0], prompts, here[1], **how)
        with Watch() as watch:
            kind = Replayed if engine == "graphs" else DecoderModel
            pair = [kind(brought(one), config, "far", ALONE) for one in decoders]
            draws = CounterDraws(0, pair[0].replay)
            far = speculate(pair[0], prompts, pair[1], **how, draws=draws)
        said = {"same": far.texts == near.texts, "rounds": far.rounds, "seen": watch.seen}
        print(json.dumps({"case": case, **said}))
    config, decoders = pairs["llama-gqa"]
    print(json.dumps({"launches": of_a_round(config, decoders, 1, 4, "plain").launches}))


LENGTHS = (10, 40)  # of texts: what a round takes is the difference, by the rounds
SHORT_LENGTHS = (6, 16)


def of_a_round(config: Any, decoders: list[Decoder], rows: int, k: int, controls: str) -> Counts:
    """What a round takes, where each pass is a graph, which counts as one launch."""
    found = []
    with Watch() as watch:
        target, draft = (Replayed(brought(one), config, "far", ALONE) for one in decoders)
        for longest in LENGTHS:
            before, draws = watch.counts(), CounterDraws(0, target.replay)
            how: Any = {"k": k, "max_new": longest, "sampling": CONTROLS[controls], "draws": draws}
            run = speculate(target, prompts_of(rows), draft if k else None, **how)
            found.append((watch.counts().since(before), run.rounds))
    (few, short), (many, long) = found
    return many.since(few, long - short)


def prompts_of(rows: int) -> list[Prompt]:
    return [Prompt(str(row), (3, 4, 5)) for row in range(rows)]


class FarRank(ThreadRank):
    """A rank with a device of its own. What ranks exchange goes between devices: one launch, no host."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        held = self._exchanged(tensor)
        super().all_reduce(held)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [FarTensor(part) for part in super().all_gather(self._exchanged(tensor))]

    @staticmethod
    def _exchanged(tensor: Tensor) -> Tensor:
        assert isinstance(tensor, FarTensor), "only what is on the device goes between devices"
        HERE.watch.launches += not HERE.watch.replaying
        return tensor.held


class HostRank(FarRank):
    """One whose sums go through the host: ranks share a GPU, or have parts of one."""

    @property
    def through_host(self) -> bool:
        return True


# Where the draft is, over two ranks: on the leader alone, whole on each, or split over both.
SEATS = ("leader", "copies", "split")


def over_ranks(
    seat: str, rows: int, k: int, lengths: tuple[int, int] = LENGTHS, kind: type[FarRank] = FarRank
) -> list[tuple[list[Run], Counts]]:
    """What two ranks write, the leader first, and what a round takes on each."""
    meeting = Meeting(2)
    ranks = [kind(rank, meeting) for rank in range(2)]
    modules = build("llama-gqa"), perturbed(build("llama-gqa"), 0.3)

    jobs = []
    for rank in ranks:  # one after the other: building modules is not for threads
        target = decoder_of(modules[0], rank)
        draft = None
        if rank.is_leader or seat != "leader":
            is_split = seat == "split"
            draft = decoder_of(modules[1], rank if is_split else ALONE, drafts=is_split)
        jobs.append(partial(_on_rank, rank, modules[0].config, target, draft, seat, rows, k, lengths))
    return together(jobs, ranks)


def _on_rank(
    rank: FarRank,
    config: Any,
    target: Decoder,
    draft: Decoder | None,
    seat: str,
    rows: int,
    k: int,
    lengths: tuple[int, int],
) -> tuple[list[Run], Counts]:
    runs, found = [], []
    with Watch() as watch:
        whole = Replayed(put(target), config, "far", rank)
        small = Replayed(put(draft), config, "far", rank if seat == "split" else ALONE) if draft else None
        for longest in (lengths[0], *lengths):  # the first one captures
            before = watch.counts()
            runs.append(drive(_engine(rank, whole, small, seat), prompts_of(rows), k=k, max_new=longest))
            found.append(watch.counts().since(before))
        rank.barrier()
    return runs[1:], found[2].since(found[1], runs[2].rounds - runs[1].rounds)


def _engine(rank: FarRank, target: Replayed, draft: Replayed | None, seat: str) -> RankEngine:
    """As pair/assembly.py makes it of a placement."""
    draws = CounterDraws(0 if rank.is_leader or seat == "copies" else 8, target.replay)
    transform = SamplingTransform(CONTROLS["plain"], (), target.vocab, target.replay)
    sampler = Sampler(transform, draws)
    draft_ranks: dict[str, Ranks | None] = {
        "leader": ALONE if rank.is_leader else None, "copies": ALONE, "split": rank,
    }  # fmt: skip
    drafting = None if seat == "leader" else rank
    roles = Roles(everyone=rank, target=rank, draft=draft_ranks[seat], drafting=drafting)

    drafter: Drafter | None = None
    if draft is not None:
        is_shard = seat == "split" and not rank.is_leader
        runner = ModelRunner(draft)
        drafter = DraftShard(runner) if is_shard else ModelDrafter(runner, sampler)
    if rank.is_leader:
        assert drafter is not None
        return Engine(ModelRunner(target), drafter, sampler, RULES["block"], roles)
    return Follower(ModelRunner(target), drafter, sampler, roles, target.context, FAR)


def main_of_ranks() -> None:
    """One line a seat of the draft, and one where sums go through the host."""
    modules = build("llama-gqa"), perturbed(build("llama-gqa"), 0.3)
    pair = [DecoderModel(decoder_of(each), modules[0].config, "near") for each in modules]
    near = speculate(
        pair[0], prompts_of(2), pair[1], k=3, max_new=SHORT_LENGTHS[1], sampling=SamplingConfig()
    )
    for seat, kind in (*((seat, FarRank) for seat in SEATS), ("leader", HostRank)):
        found = over_ranks(seat, 2, 3, SHORT_LENGTHS, kind)
        said: dict[str, Any] = {"seat": seat, "through_host": kind is HostRank}
        said["same"] = all(runs[-1].texts == near.texts for runs, _ in found)
        for name, (_, counts) in zip(("leader", "follower"), found, strict=True):
            said[name] = vars(counts)
        print(json.dumps(said))


if __name__ == "__main__":
    steps.attention_kernel.attend = attend
    if "ranks" in sys.argv[1:]:
        main_of_ranks()
    else:
        main()
