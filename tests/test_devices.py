"""Which GPUs a rank touches, how ranks exchange tensors, what a GPU's error is called."""

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp.config import DraftSeat, Dtype, ModelConf, PlacementConf, RunConf
from llama_ssp.config.compose import composed
from llama_ssp.distributed import process_group
from llama_ssp.distributed.board import StoreBoard
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.distributed.failures import Watch
from llama_ssp.distributed.process_group import backend_of, gpu_of, open_ranks
from llama_ssp.distributed.signals import GUARD
from llama_ssp.errors import DISTRIBUTED, DistributedError, LostPeer, UsageError
from llama_ssp.models.checkpoint import SHIPPED_FOLDER
from llama_ssp.models.devices import memory_of
from llama_ssp.models.host_memory import memory_here
from llama_ssp.pair import placements as pair_placements
from llama_ssp.pair import session
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.pair.placements import model_placements
from llama_ssp.pair.session import PairSession
from llama_ssp.placing.pairs import pair_specs
from tests.distributed.pairs import entry_of
from tests.distributed.threads import ranks_of, together
from tests.refusals import ILLEGAL
from tests.rig import engine_of

CPU = torch.device("cpu")
FULL = """CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of 79.11 GiB of which \
8.00 MiB is free. Process 1 has 79.10 GiB memory in use."""


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine of eight GPUs; the devices that are waited for."""
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    return seen


class Allocator:
    """A GPU's allocator: what it is told, and what a first small tensor raises, time after time."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.errors: list[Exception] = []

    def tell(self, settings: str) -> None:
        self.told.append(settings)

    def give(self, _: int, device: torch.device) -> None:
        assert self.told and device.type == "cuda"
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    result = Allocator()
    for name in process_group.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", result.tell, raising=False)
    monkeypatch.setattr(torch, "empty", result.give)
    return result


def model_on(device: str) -> Any:
    return SimpleNamespace(
        device=torch.device(device), restart=None, context=64, vocab=8, dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("target", "draft", "waited"),
    [
        ("cuda:3", None, ["cuda:3"]),
        ("cuda:3", "cuda:3", ["cuda:3"]),
        ("cuda:3", "cuda:5", ["cuda:3", "cuda:5"]),
        ("cuda:3", "cpu", ["cuda:3"]),
        ("cpu", "cpu", []),
    ],
)
def test_only_the_models_gpus_are_waited_for(
    target: str, draft: str | None, waited: list[str], synchronised: list[torch.device]
) -> None:
    """A call to any other would make a context of half a GiB there, which no plan has."""
    engine_of(model_on(target), model_on(draft) if draft else None).synchronize()
    assert sorted(map(str, synchronised)) == waited


def gpu(name: str, uuid: str) -> Any:
    return SimpleNamespace(name=name, uuid=uuid)


@pytest.mark.parametrize(
    ("gpus", "backend", "reason"),
    [
        ([gpu("NVIDIA H200", str(rank)) for rank in range(8)], "nccl", "every rank has a GPU of its own"),
        ([gpu("NVIDIA H200", "1")] * 2, "gloo", "ranks 0 and 1 share one GPU"),
        ([gpu("NVIDIA H200", "1"), None], "gloo", "rank 1 has no GPU"),
        ([gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1"), gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "2")],
         "gloo", "a part of a GPU (MIG)"),
    ],
    ids=["own", "shared", "cpu", "mig"],
)  # fmt: skip
def test_the_backend_follows_the_gpus_of_all_ranks(
    gpus: list[Any], backend: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank may see one GPU alone (srun --gpus-per-task=1), so that its count says nothing."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = []
    for found in gpus:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        names.append(gpu_of(torch.device("cuda:0") if found else CPU))
    chosen, why = backend_of(names)
    assert chosen == backend and reason in why


@pytest.mark.parametrize(
    ("target", "draft", "seat", "refused"),
    [
        ("auto", "cpu", DraftSeat.sharded, True),
        ("auto", "cuda:0", DraftSeat.own, True),
        ("cuda:0", "cpu", DraftSeat.own, True),
        ("auto", "cuda", DraftSeat.sharded, False),
        ("cpu", "cuda:1", DraftSeat.own, False),  # tensors go by gloo
        ("auto", "cpu", DraftSeat.leader, False),
        ("auto", "cpu", DraftSeat.replicated, False),
    ],
)
@pytest.mark.usefixtures("synchronised")
def test_a_split_draft_is_on_the_targets_gpus(
    target: str, draft: str, seat: DraftSeat, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes neither a CPU nor one GPU for two ranks; each rank says the same before it loads."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    degree = None if seat in (DraftSeat.leader, DraftSeat.replicated) else 2
    conf = PlacementConf(draft=seat, draft_degree=degree, target_device=target, draft_device=draft)
    spec = entry_of(SHIPPED_FOLDER / "demo", SHIPPED_FOLDER / "demo_draft", conf, 4)
    for rank in "03":
        monkeypatch.setenv("LOCAL_RANK", rank)
        if not refused:
            assert model_placements(spec).draft is not None, rank
            continue
        with pytest.raises(
            UsageError, match=r"draft over several ranks.*draft_device; found .*; leave it out"
        ):
            model_placements(spec)


@pytest.mark.parametrize(
    ("device", "said", "asked", "expected"),
    [
        ("cuda:0", {"dtype": "float16"}, Dtype.auto, Dtype.fp16),
        ("cuda:0", {"torch_dtype": "float16"}, Dtype.auto, Dtype.fp16),
        ("cuda:0", {"dtype": "bfloat16"}, Dtype.auto, Dtype.bf16),
        ("cuda:0", {"dtype": "float16"}, Dtype.bf16, Dtype.bf16),
        ("cpu", {"dtype": "float16"}, Dtype.auto, None),
    ],
    ids=["dtype", "torch_dtype", "bfloat16", "asked for bf16", "on a CPU"],
)
@pytest.mark.usefixtures("synchronised")
def test_weights_in_fp16_stay_so_on_a_gpu(
    device: str, said: dict[str, str], asked: Dtype, expected: Dtype | None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    """A CPU computes in another format, and the log says so."""
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    (tmp_path / "config.json").write_text(json.dumps(said), encoding="utf-8")
    demo = SHIPPED_FOLDER / "demo"
    spec = entry_of(demo, demo, PlacementConf(target_device=device), 1)
    run = replace(spec.run, model=replace(spec.run.model, dtype=asked), draft=None)
    (target,) = model_placements(replace(spec, run=run, target_path=tmp_path))
    assert target.dtype is (expected or target.dtype)
    assert (target.dtype is Dtype.fp16) == (expected is Dtype.fp16)
    assert ("fp16 on disk" in caplog.text) == (device == "cpu")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Rank 1's over 2 ranks, without its thread."""
    monkeypatch.setattr(GUARD, "on_signal", [])
    return Watch(StoreBoard(torch.distributed.HashStore(), 1.0), 1, 2, 1.0)


@pytest.fixture
def meeting(watch: Watch, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two, which meets the other, whose GPU is b."""
    watch.rank = 0
    store = torch.distributed.HashStore()
    store.set("gpu/1", "b")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(process_group, "meet", lambda *_: (StoreBoard(store, 1.0), watch))
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(process_group, "Group", lambda *given: given)


@pytest.mark.parametrize(("own", "backend"), [("a", "nccl"), ("b", "gloo")])
@pytest.mark.usefixtures("meeting")
def test_ranks_say_once_how_they_exchange_tensors(
    own: str, backend: str, watch: Watch, allocator: Allocator, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And the rank's GPU is the current one: what is not a device would make a context on GPU 0."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu("NVIDIA H200", own))
    with caplog.at_level("INFO"):
        assert open_ranks(torch.device("cuda:1")) == ((0, 1), backend, watch, True)
    assert current == [torch.device("cuda:1")] and allocator.told == [process_group.GROWING]
    assert [line for line in caplog.messages if f"by {backend}" in line] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(8, 8, 1), (3, 8, 1), (64, 2, 32), (24, 4, 6)])
@pytest.mark.usefixtures("meeting")
def test_ranks_of_a_machine_compile_on_the_cores_that_they_may_use(
    cores: int, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on all that the machine has: Slurm gives a job a few of them."""
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(process_group, "cores_here", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    open_ranks(CPU)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == str(workers)


@pytest.mark.parametrize(
    ("error", "said", "helps"),
    [
        (torch.OutOfMemoryError(FULL), "the GPU's memory is full; summing; found OutOfMemoryError: CUDA out "
         "of memory. Tried to allocate 20.00 MiB. GPU 3 has", "a smaller batch"),
        (torch.AcceleratorError(ILLEGAL), "the GPU has failed; summing; found AcceleratorError: CUDA error: "
         "an illegal memory access was encountered; ", "CUDA_LAUNCH_BLOCKING=1"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"), "the GPU has failed", ""),
    ],
    ids=["memory", "illegal access", "cuBLAS"],
)  # fmt: skip
def test_a_gpus_error_is_no_lost_rank(error: Exception, said: str, helps: str, watch: Watch) -> None:
    """Nor is it outside of what is exchanged, where nothing takes it for another rank's."""
    watch.place = type(watch.place)("verify", 3)
    with pytest.raises(DistributedError) as found, watch.during("summing"):
        raise error
    assert not isinstance(found.value, LostPeer)
    assert said in str(found.value) and helps in str(found.value)
    assert "docs.nvidia.com" not in str(found.value)
    cause = watch._own(found.value)
    assert cause.line.startswith("rank 1 failed during verify, round 3: ") and cause.code == DISTRIBUTED
    in_a_pass = watch._own(error).line
    assert "CUBLAS" in in_a_pass or ("; found " in in_a_pass and "docs.nvidia.com" not in in_a_pass)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms"


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (RuntimeError(GLOO), True),
        (torch.distributed.DistBackendError("NCCL error: unhandled system error"), True),
        (RuntimeError("shape mismatch"), False),
        (RuntimeError("[enforce fail at /gloo/transport/tcp/device.cc:84] No address for: ib0"), False),
    ],
    ids=["gloo", "nccl", "a shape", "no address"],
)
def test_a_steps_own_error_is_no_lost_rank(error: Exception, broken: bool, watch: Watch) -> None:
    """A compiled step computes and sums: which of the two failed, its error says."""
    with pytest.raises(LostPeer if broken else RuntimeError) as found, watch.during("a step", computes=True):
        raise error
    assert str(error)[-160:] in str(found.value)
    if not broken:
        assert found.value is error
        assert watch._own(error).line.startswith("rank 1 failed during start: RuntimeError: ")
    with pytest.raises(LostPeer, match="another rank has gone"), watch.during("summing"):
        raise error


class Together(Ranks):
    """One of ranks with these GPUs."""

    def __init__(self, *gpus: str) -> None:
        self.gpus = gpus

    def gather_texts(self, text: str) -> list[str]:
        assert text == self.gpus[0]
        return list(self.gpus)


@pytest.mark.parametrize(
    ("others", "part"),
    [((), 1), (("b", "c"), 1), (("a",), 2), (("a", "b", "a"), 3)],
    ids=["alone", "others' own", "one besides", "three besides"],
)
@pytest.mark.usefixtures("synchronised")
def test_ranks_that_share_a_gpu_share_what_is_free(
    others: tuple[str, ...], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its UUID: each rank may see one GPU alone. On a CPU the plan shares the memory."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu("NVIDIA H200", "a"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (24 * 2**30, 80 * 2**30))
    assert memory_of(torch.device("cuda:0"), Together("a", *others)) == 24 * 2**30 // part
    assert memory_of(CPU, Together("", "")) == pytest.approx(memory_here(), rel=0.2)


def rows_of_ranks(monkeypatch: pytest.MonkeyPatch, *gib: int) -> list[int]:
    """Returns the rows of a batch that each rank takes; each has so much memory free."""
    words = ["model=tiny", "draft=tiny_draft", "model.context=65536", "draft.context=65536", "cluster.gib=64"]
    run = composed(["task=batch", "task.input=in.jsonl", "task.output=out.jsonl", *words])
    (spec,) = pair_specs(run, [], len(gib))
    monkeypatch.setattr(pair_placements, "memory_of", lambda _, ranks: gib[ranks.rank] * 2**30)
    ranks = ranks_of(len(gib))
    return together([partial(PairSession(spec, rank).rows_for, 64, 60_000) for rank in ranks], ranks)


@pytest.mark.parametrize("gib", [(16, 4), (4, 16)], ids=["less on rank 1", "less on rank 0"])
def test_ranks_with_unequal_memory_take_as_many_rows(
    gib: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plans by its own memory; all take what the one with least can hold."""
    few, _ = rows_of_ranks(monkeypatch, 4, 4)
    many, _ = rows_of_ranks(monkeypatch, 16, 16)
    assert few < many
    assert rows_of_ranks(monkeypatch, *gib) == [few, few]


def test_a_group_of_the_same_ranks_is_made_once(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that go on without a draft are those of the target, which have a communicator already."""
    made: list[list[int]] = []
    monkeypatch.setattr(process_group.dist, "new_group", lambda ranks, **_: made.append(ranks))
    watch.rank = 3
    everyone = process_group.Group((0, 1, 2, 3), "gloo", watch)
    assert everyone.among((0, 1)) is None and everyone.among((2, 3)) is not None
    everyone.may_lose((2, 3))
    each = [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert made == [ranks for ranks in each for _ in range(3)]
    everyone.may_lose((3,))
    assert made[9:] == [[0, 1, 2]] * 3


@dataclass
class Sums:
    """What goes through NCCL, in place of which nothing is sent: the sums, by the number of their group."""

    groups: list[tuple[int, ...]] = field(default_factory=list)
    by_group: list[int] = field(default_factory=list)
    deadlines: list[str] = field(default_factory=list)
    result: float = 0.0  # of a first sum, in place of the right one


@pytest.fixture
def sums(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Groups of ranks on GPUs, which are there once they have met."""
    seen = Sums()
    ones = torch.ones

    def new_group(ranks: list[int], backend: str, timeout: Any) -> int:
        seen.groups.append(tuple(ranks))
        return len(seen.groups) - 1

    def all_reduce(tensor: torch.Tensor, group: int) -> None:
        seen.by_group.append(group)
        seen.deadlines.append(watch._deadline[1])
        tensor.mul_(seen.result or len(seen.groups[group]))

    monkeypatch.setattr(process_group.dist, "new_group", new_group)
    monkeypatch.setattr(process_group.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(process_group.dist, "barrier", lambda group: None)
    monkeypatch.setattr(process_group.Group, "link", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "ones", lambda count, device: ones(count))
    return seen


@pytest.mark.parametrize(
    ("target", "draft", "connected"),
    [
        ((0, 1, 2), (3, 4), [[(0, 1, 2)]] * 3 + [[(3, 4)]] * 2),
        ((0, 1, 2, 3, 4), (0, 1), [[(0, 1, 2, 3, 4), (0, 1)]] * 2 + [[(0, 1, 2, 3, 4)]] * 3),
        ((0, 1, 2, 3), (4,), [[(0, 1, 2, 3)]] * 4 + [[]]),
        ((0,), (), [[]] * 5),
    ],
    ids=["own", "split", "one of its own", "one rank"],
)
def test_only_ranks_that_share_a_model_are_connected(
    target: tuple[int, ...], draft: tuple[int, ...], connected: list[list[tuple[int, ...]]], watch: Watch,
    sums: Sums,
) -> None:  # fmt: skip
    """A communicator takes half a GiB of a GPU. All ranks connect in one order, before models are loaded."""
    drafter = SimpleNamespace(ranks=draft, copies=False) if draft else None
    placed: Any = SimpleNamespace(target=SimpleNamespace(ranks=target), drafter=drafter)
    for rank, groups in enumerate(connected):
        watch.rank = rank
        sums.groups.clear()
        sums.by_group.clear()
        everyone = process_group.Group((0, 1, 2, 3, 4), "nccl", watch)
        cache = ModelCache(everyone, PlacementConf())
        for _ in range(2):
            cache._roles_of(placed)
        assert [sums.groups[group] for group in sums.by_group] == groups, rank
        for members in (target, draft):
            assert everyone.is_connected(members) == (members in groups), rank


def test_a_first_sum_connects_where_nothing_has_before(watch: Watch, sums: Sums) -> None:
    """As those of a calibration. Those that go on without a draft are connected as they were."""
    everyone = process_group.Group((0, 1, 2), "nccl", watch)
    assert everyone.among((0, 1)) is not None
    everyone.may_lose((2,))
    for _ in range(2):
        assert everyone.all_reduce(torch.full((1,), 2.0)).tolist() == [6.0]
    everyone.drop_lost()
    assert everyone.all_reduce(torch.full((1,), 2.0)).tolist() == [4.0]
    tensors = [number for number in range(len(sums.groups)) if number % 3 == 2]  # the third of each group
    assert sums.by_group == [tensors[0]] * 3 + [tensors[1]] * 2


def test_a_first_sum_ends_in_time_and_is_right(watch: Watch, sums: Sums) -> None:
    """Nobody else ends NCCL where it waits for a rank that it cannot reach."""
    everyone = process_group.Group((0, 1), "nccl", watch)
    sums.result = 3.0
    with pytest.raises(DistributedError, match="a sum over the ranks is wrong; rank 1; found 3, allowed 2"):
        everyone.connect()
    assert sums.deadlines == ["the first sum: no end after 60 s"]


def test_ranks_that_exchange_through_the_host_connect_nothing(watch: Watch, sums: Sums) -> None:
    everyone = process_group.Group((0, 1), "gloo", watch)
    everyone.connect()
    assert sums.by_group == [] and everyone.is_connected((0, 1))


@pytest.mark.parametrize(("held", "counted"), [((), 0), (((0, 1),), 1), (((0, 1), (2, 3)), 1)])
def test_communicators_that_are_there_are_not_planned_again(
    held: tuple[tuple[int, ...], ...], counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this rank alone: what is free was measured while they took their part."""
    conf = PlacementConf(draft=DraftSeat.own, draft_degree=2, target_device="cpu", draft_device="cpu")
    spec = entry_of(SHIPPED_FOLDER / "demo", SHIPPED_FOLDER / "demo_draft", conf, 4)
    asked: list[int] = []
    ranks = {"world": 4, "gather_ints": lambda values: [values] * 4}
    rank = SimpleNamespace(rank=1, is_connected=held.__contains__, **ranks)
    monkeypatch.setattr(pair_placements, "memory_of", lambda *_: 0)
    monkeypatch.setattr(pair_placements, "predict", lambda _run, _place, known: asked.append(known.connected))
    monkeypatch.setattr(pair_placements, "require_capacity", lambda *_: None)
    pair_placements.require_loadable(spec, model_placements(spec), rank, 1, 64, (1, 1))  # type: ignore[arg-type]
    assert asked == [counted]


@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.usefixtures("synchronised")
def test_segments_grow_unless_the_user_has_set_the_allocator(
    own: str | None, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the blocks of a prompt's chunks, each larger than the one before, fit nowhere."""
    if own:
        monkeypatch.setenv(own, "max_split_size_mb:128")
    for target in ("cpu", "cuda:0"):
        session.ranks_of(RunConf(model=ModelConf(name="m"), placement=PlacementConf(target_device=target)))
    assert allocator.told == ([] if own else ["expandable_segments:True"])


NO_MAPPING = "CUDA driver error: operation not supported"
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"


@pytest.mark.parametrize(
    ("errors", "told", "said"),
    [
        ([RuntimeError(NO_MAPPING)], [True, False], NO_MAPPING),
        ([torch.OutOfMemoryError(FULL)], [True], None),
        ([RuntimeError(BUSY)] * 2, [True, False], None),
    ],
    ids=["cannot map", "is full", "is busy"],
)
def test_segments_stay_fixed_where_a_gpu_cannot_map_memory(
    errors: list[Exception], told: list[bool], said: str | None, allocator: Allocator,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Such as a virtual GPU, with one line. What fails either way is the GPU's own error."""
    allocator.errors = list(errors)
    with pytest.raises(RuntimeError, match="busy") if len(errors) == 2 else nullcontext():
        assert open_ranks(torch.device("cuda:0")) is ALONE
    assert allocator.told == [f"expandable_segments:{grow}" for grow in told]
    assert len(caplog.messages) == bool(said) and (said or "") in caplog.text


@pytest.mark.filterwarnings("error")
def test_torch_does_not_warn_of_how_its_allocator_is_set() -> None:
    """A line a rank on standard error: its public function is deprecated."""
    for settings in (process_group.GROWING, process_group.FIXED):
        process_group._set_allocator(settings)


def test_an_older_torch_sets_its_allocator_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    process_group._set_allocator(process_group.GROWING)
    assert told == [process_group.GROWING]
