"""A device of our own, for want of a GPU: it counts the copies between it and the host, and the launches.

Its tensors hold ordinary ones and compute with them, so what runs there gives what it gives on the host,
by the branches that are not a CPU's. What would have the host wait for a GPU is counted: a copy that is not
queued, a number read. torch lets one backend a process be written in Python, so this module is a program:
`python -m tests.far` runs pairs there and on the host: are texts the same, what was copied. bench/launches.py
counts launches with it.
"""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# In inference mode no views of tensors like these can be made.
torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[assignment,misc]

from llama_ssp.config import SamplingConfig  # noqa: E402
from llama_ssp.distributed.comm import ALONE  # noqa: E402
from llama_ssp.models import steps  # noqa: E402
from llama_ssp.models.attention import Places, Scores  # noqa: E402
from llama_ssp.models.cuda_graphs import Call, GraphedModel  # noqa: E402
from llama_ssp.models.decoder import Decoder  # noqa: E402
from llama_ssp.models.decoder_model import DecoderModel  # noqa: E402
from llama_ssp.speculative.rng import CounterDraws  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from tests.families import build, decoder_of  # noqa: E402
from tests.rig import eager_step, perturbed, speculate  # noqa: E402

_setup_privateuseone_for_python_backend("far")
FAR = torch.device("far:0")
ATEN = torch.ops.aten
# What looks like a change of the host's tensors, but is how torch makes one of numbers.
HARMLESS = {ATEN.lift_fresh.default, torch.ops.prim.device.default}
ALLOCATIONS = {ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.empty_strided.default}


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


class Watch(TorchDispatchMode):
    """Runs the device's operations, and counts what the host does between."""

    replaying, replays = False, 0  # graphs, each of which is one launch

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.launches = 0

    def __enter__(self) -> Watch:
        torch._C._set_only_lift_cpu_tensors(True)  # numbers become a host tensor, which is copied
        super().__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        wants_far = device is not None and torch.device(device).type == FAR.type
        if not wants_far and not any(isinstance(leaf, FarTensor) for leaf in tree_leaves((args, kwargs))):
            return op(*args, **kwargs)
        self._count(op, args, kwargs, wants_far)
        self.launches += not (Watch.replaying or op.is_view or op in HARMLESS | ALLOCATIONS)
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
                self.seen[_name("sent" if wants_far else "read", kwargs.get("non_blocking"))] += 1
        elif op is ATEN.copy_.default:
            to, source = (isinstance(one, FarTensor) for one in args[:2])
            if to != source:
                queued = args[2] if len(args) > 2 else kwargs.get("non_blocking")
                self.seen[_name("sent" if to else "read", queued)] += 1
        elif op in (ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.equal.default):
            self.seen["read, waiting"] += 1
        elif any(
            isinstance(one, Tensor) and not isinstance(one, FarTensor) and one.dim()
            for one in tree_leaves((args, kwargs))
        ):
            self.seen[f"host and device meet in {op}"] += 1


def _name(what: str, queued: object) -> str:
    return f"{what}, {'queued' if queued else 'waiting'}"


def _held(one: Any) -> Any:
    return one.held if isinstance(one, FarTensor) else one


def _far(one: Any, known: dict[int, FarTensor]) -> Any:
    if not isinstance(one, Tensor):
        return one
    return known[id(one)] if id(one) in known else FarTensor(one)


def brought(module: Decoder) -> Any:
    """The module on the device, its weights copied before anything is counted."""
    module = deepcopy(module)
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
        def computed() -> Any:
            Watch.replaying = True
            try:
                return tree_map(torch.clone, step())
            finally:
                Watch.replaying = False

        result = computed()

        def launch() -> None:
            Watch.replays += 1
            fresh = computed()
            Watch.replaying = True
            tree_map(lambda place, tensor: place.copy_(tensor), result, fresh)
            Watch.replaying = False

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


# rows, rule, controls, steps: every one of each at least once
CASES = (
    (1, "block", "plain", "eager"), (2, "block", "penalised", "eager"), (1, "token", "greedy", "graphs"),
    (2, "block", "filtered", "graphs"), (1, "token", "penalised", "graphs"),
    (2, "token", "greedy", "eager"),
)  # fmt: skip


def main() -> None:
    """One line a case: what it was, whether texts are the same as on the host, and what was seen."""
    modules = build("llama-gqa"), perturbed(build("llama-gqa"), 0.3)
    config, decoders = modules[0].config, [decoder_of(module) for module in modules]
    for case in CASES:
        rows, rule, controls, engine = case
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
    print(json.dumps({"launches": launches_of_a_round(config, decoders, 1, 4, "plain")[0]}))


def launches_of_a_round(
    config: Any, decoders: list[Decoder], rows: int, k: int, controls: str
) -> tuple[float, float]:
    """What a round launches, where each pass is a graph, which counts as one; and its copies to the device.

    Those of a longer text, less those of a shorter one.
    """
    found = []
    with Watch() as watch:
        target, draft = (Replayed(brought(one), config, "far", ALONE) for one in decoders)
        for longest in (10, 40):
            before, draws = watch.launches + watch.replays, CounterDraws(0, target.replay)
            sent = watch.seen["sent, queued"]
            how: Any = {"k": k, "max_new": longest, "sampling": CONTROLS[controls], "draws": draws}
            prompts = [Prompt(str(row), (3, 4, 5)) for row in range(rows)]
            run = speculate(target, prompts, draft if k else None, **how)
            launched = watch.launches + watch.replays - before
            found.append((launched, watch.seen["sent, queued"] - sent, run.rounds))
    (few, sent_few, short), (many, sent_many, long) = found
    return (many - few) / (long - short), (sent_many - sent_few) / (long - short)


if __name__ == "__main__":
    steps.attention_kernel.attend = attend
    main()
