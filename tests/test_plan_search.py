"""Placements of a pair, ranked, and what is advised where none fits; the clusters that they are on."""

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.config import ClusterConf, Dtype, Overlap, PlacementConf
from llama_ssp.config.compose import composed
from llama_ssp.config.presets import machines
from llama_ssp.distributed import control_groups
from llama_ssp.distributed.gpus import gpus_here
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.models import host_memory
from llama_ssp.models.host_memory import memory_here
from llama_ssp.placing.prediction import LEAST_GAIN, Prediction
from llama_ssp.placing.request import PairFiles, plannable
from llama_ssp.placing.this_machine import machine_for
from llama_ssp.planner.advice import advice, largest, overrides
from llama_ssp.planner.fit import FitVerdict
from llama_ssp.planner.hardware import GPU_RESERVE, Machine, matching
from llama_ssp.planner.plan import make_plan, worlds_of
from llama_ssp.planner.search import (
    Option,
    PlanRequest,
    draft_bytes,
    messages,
    option,
    placements,
    regular_sampling,
    round_times,
    search,
)
from llama_ssp.planner.speed import MESSAGE_S
from llama_ssp.planner.workload import GIB
from tests.plans import CPU, H100, P4D, alone, cluster, machine, model, named, request

Driver = Callable[..., None]
ONE = machine("p4d", gpus=1)


def test_every_kind_of_placement_is_there() -> None:
    words = [one.in_words() for one in placements(3, True)]
    assert words == [
        "target 0-2, draft 0 (whole)", "target 0-2, draft 0,1 (split)", "target 0-2, draft 0-2 (split)",
        "target 0,1, draft 2 (own)", "target 0, draft 1,2 (own)", "target 0-2, draft 0-2 (copies)",
    ]  # fmt: skip
    assert [one.in_words() for one in placements(1, True)] == ["target 0, draft 0 (whole)"]
    assert [one.in_words() for one in placements(4, False)] == ["target 0-3"]
    degrees = [one.draft_degree for one in placements(300, True) if one.draft_apart]
    assert degrees == [1, 2, 4, 8, 16, 32, 64, 128, 256]  # over many ranks the powers of two alone
    assert len(list(placements(256, True))) == 2 * 256
    assert worlds_of(8) == list(range(1, 9)) and worlds_of(24) == [1, 2, 4, 8, 16, 24]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_placements_are_asked_for_as_they_are_said(world: int) -> None:
    for one in placements(world, True):
        words = dict(word.split("=") for word in overrides(one).split())
        seat = PlacementConf(draft=type(PlacementConf().draft)(words["placement"]))
        degree = words.get("placement.draft_degree")
        assert resolve(replace(seat, draft_degree=int(degree) if degree else None), world, True) == one


def test_a_huge_cluster_is_planned_by_what_the_models_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 and 32 heads: more than 96 ranks are no use to any placement, and no table of them is made."""
    worlds = set[int]()

    def counted(conf, world, drafts):
        worlds.add(world)
        return resolve(conf, world, drafts)

    monkeypatch.setattr("llama_ssp.planner.search.resolve", counted)
    huge = request("65B", "7B", replace(P4D, nodes=1024, gpus=4))
    assert search(huge, [1, 64, 128, 4096])[0].placement.world <= 64
    assert worlds == {1, 64}
    with pytest.raises(DistributedError, match=r"heads cannot be split.*4096 ranks"):
        search(huge, [4096])
    many = replace(huge, target=replace(huge.target, model=replace(huge.target.model, n_heads=2**20)))
    with pytest.raises(DistributedError, match=r"too many ranks.*1048576 ranks.*at most 4096"):
        search(many, [2**20])


def test_the_fastest_that_fits_comes_first() -> None:
    """65B over 4 GPUs of 40 GB: with the whole 7B on the leader it does not fit, split it does."""
    found = search(request("65B", "7B", P4D, prompt_tokens=1536), list(range(1, 9)))
    assert [one.verdict.rank for one in found] == sorted(one.verdict.rank for one in found)
    fitting = [one for one in found if one.verdict is FitVerdict.fits]
    assert [one.ms_per_token for one in fitting] == sorted(one.ms_per_token for one in fitting)
    assert found[0].placement.in_words() == "target 0-7, draft 0-7 (split)"
    by_words = {one.placement.in_words(): one for one in found}
    assert by_words["target 0-3, draft 0 (whole)"].verdict is FitVerdict.does_not_fit
    assert by_words["target 0-3, draft 0-3 (split)"].verdict is FitVerdict.fits
    copies, whole = by_words["target 0-7, draft 0-7 (copies)"], by_words["target 0-7, draft 0 (whole)"]
    assert copies.k == whole.k and copies.times.draft == whole.times.draft
    waits = copies.times.verify[1] - whole.times.verify[1]
    assert waits == pytest.approx(MESSAGE_S), "the ranks with copies are asked first"
    assert sum(one.total for one in copies.ranks) > sum(one.total for one in whole.ranks)


@pytest.mark.parametrize("target", ["65B_8bit", "30B"])
def test_a_draft_apart_is_not_taken_for_free(target: str) -> None:
    """With probabilities by a link of 450 GB/s both pairs were planned with the draft on ranks of its own.

    They go through the host, which takes longer than what is gained.
    """
    pair = plannable(PairFiles(composed([f"model={target}", "draft=7B", "cluster=dgx_h100"]), None, None))
    assert pair is not None
    best = search(pair, worlds_of(8))[0]
    assert best.placement.in_words() == "target 0-7, draft 0-7 (split)"


@pytest.mark.parametrize(
    ("words", "regular", "drafting"),
    [
        ("target 0, draft 0 (whole)", 0, 0),
        ("target 0-3, draft 0 (whole)", 1, 1),
        ("target 0-3, draft 0,1 (split)", 2, 2),
        ("target 0-3, draft 0-3 (copies)", 2, 2),
        ("target 0, draft 1 (own)", 1, 2),
        ("target 0-2, draft 3 (own)", 2, 3),
    ],
    ids=["alone", "whole", "split", "copies", "own, target on one", "own"],
)
def test_messages_of_a_round_are_counted(words: str, regular: int, drafting: int) -> None:
    """As round_protocol.py sends them: one to the target's ranks, one to those that draft, one back."""
    world = max(int(digit) for digit in words if digit.isdigit()) + 1
    place = named(words, world)
    assert [len(messages(place, k)) for k in (0, 1, 4)] == [regular, drafting, drafting]


def test_a_message_takes_time_where_the_cluster_does_not_say_it() -> None:
    on = request("30B", "7B", H100)
    quick = replace(on, machine=replace(H100, times=replace(H100.times, message=0.0)))
    for words, steps in (("target 0-3, draft 0-3 (split)", 0), ("target 0,1, draft 2,3 (own)", 1)):
        place = named(words, 4)
        found, other = round_times(on, place), round_times(quick, place)
        assert found.verify[2] - other.verify[2] == pytest.approx(len(messages(place, 2)) * MESSAGE_S), words
        assert found.draft - other.draft == pytest.approx(steps * MESSAGE_S), words


def test_probabilities_of_a_draft_apart_are_waited_for() -> None:
    """They take the time that was measured, within a half, and also where the draft has run ahead.

    Measured by bench/replies.py, quiet: half a millisecond of each reply is the messages' on two cores.
    """
    for pair, rows, k, measured_ms in (
        (("30B", "7B"), 1, 2, 0.8),
        (("llama3.1-70b", "llama3.1-8b"), 1, 4, 1.4),
        (("30B", "7B"), 64, 2, 9.7),
    ):
        times = round_times(request(*pair, H100, rows=rows), named("target 0-3, draft 4 (own)", 5))
        through_host_ms = 1000 * k * times.sending + 0.5
        assert 2 / 3 < through_host_ms / measured_ms < 1.5, (pair, rows)
        free = replace(times, sending=0.0)
        for overlap in (Overlap.ahead, Overlap.off):
            waits = [replace(one, overlap=overlap).round_s(k, 0.8) for one in (times, free)]
            assert waits[0] - waits[1] == pytest.approx(k * times.sending), overlap


def test_a_draft_apart_sends_its_likeliest_tokens_alone() -> None:
    """Half a KiB a draft, and the leader waits for that much less; of a small vocabulary all is sent."""
    assert [draft_bytes(128_256), draft_bytes(128_256, 64), draft_bytes(100, 64)] == [513_024, 512, 400]
    on = request("llama3.1-70b", "llama3.1-8b", H100, rows=8)
    few, whole = (
        round_times(one, named("target 0-3, draft 4 (own)", 5)) for one in (replace(on, draft_top=64), on)
    )
    assert few.sending == pytest.approx(whole.sending * 512 / 513_024)
    assert (few.draft, few.verify) == (whole.draft, whole.verify)
    pair = ("model=llama3.1-70b", "draft=llama3.1-8b", "cluster=dgx_h100")
    run = composed([*pair, "speculation.draft_top=64"])
    planned = plannable(PairFiles(run, None, None))
    assert planned is not None and planned.draft_top == 64


def test_speed_up_is_over_the_best_regular_run() -> None:
    on, worlds = request("65B", "7B", P4D), [1, 3, 8]
    options = search(on, worlds)
    alone = search(replace(on, draft=None), worlds)[0]
    assert regular_sampling(on, options, worlds).ms_per_token == alone.ms_per_token
    tight = replace(on, machine=machine("p4d", gib=1.0))
    least = min(one.regular_ms for one in options)
    assert regular_sampling(tight, options, worlds).ms_per_token == least


def test_no_drafts_a_round_is_a_k_like_any_other() -> None:
    """Where the request says K = 0, every placement is planned at it, though a larger K would be faster."""
    on = request("65B", "7B", P4D)
    assert make_plan(on).chosen.k > 0
    document = make_plan(replace(on, k=0)).document()
    assert {one["k"] for one in document["placements"]} == {document["best"]["k"]} == {0}


def test_the_largest_is_the_largest() -> None:
    on = request("13B", None, ONE)
    chosen = search(on, [1])[0]
    room = largest(on, chosen)
    for rows, verdict in ((room.rows, True), (room.rows + 1, False)):
        other = replace(on, work=replace(on.work, k=0, rows=rows))
        assert (option(other, chosen.placement, 0).verdict is FitVerdict.fits) is verdict
    assert 1 < room.rows < 100
    assert room.context_tokens == 2048 and room.k == 0 and room.is_model_limit  # no draft
    long = request("llama3.1-8b", None, machine("l4x4", gpus=1))
    room = largest(long, search(long, [1])[0])
    assert long.work.slots < room.context_tokens < 131072 and not room.is_model_limit


def test_narrower_formats_are_advised_where_they_help() -> None:
    """nf4 where int8 is still too much: 65B on one GPU of 40 GiB; int8 is enough on one of 80 GB."""
    for target, on, dtype in (
        ("13B", machine("l4x4", gpus=1), "int8"),
        ("65B", machine("p4de", gpus=1), "int8"),
        ("65B", machine("p4d", gpus=1, gib=40.0), "nf4"),
        ("llama3.1-70b", machine("cpu", gib=1.0), None),
    ):
        what = request(target, None, on)
        chosen = search(what, [1])[0]
        said = advice(what, chosen, [1])
        formats = [words for words in said if "dtype" in words]
        assert chosen.verdict is FitVerdict.does_not_fit, (target, dtype)
        assert formats == [f"model.dtype={dtype} (target 0)"] if dtype else said == []


@pytest.fixture(scope="module")
def too_long() -> tuple[PlanRequest, Option, list[str]]:
    """A model that does not fit with its rows and its context: what is asked for, the plan, the advice."""
    on = request("13B", None, ONE, rows=32, prompt_tokens=1900)
    chosen = search(on, [1])[0]
    return on, chosen, advice(on, chosen, [1])


def test_fewer_rows_are_advised(too_long: tuple[PlanRequest, Option, list[str]]) -> None:
    on, chosen, said = too_long
    assert f"{largest(on, chosen).rows} rows instead of 32 (task.batch_size)" in said


def test_a_shorter_context_is_advised(too_long: tuple[PlanRequest, Option, list[str]]) -> None:
    on, chosen, said = too_long
    tokens = largest(on, chosen).context_tokens
    assert f"context {tokens} instead of 2028 (prompt and new tokens)" in said


def test_a_split_draft_is_advised() -> None:
    """And none at all; where it fits nothing is advised."""
    pair = request("65B", "7B", machine("p4d", gpus=4), prompt_tokens=1536)
    said = advice(pair, option(pair, named("target 0-3, draft 0 (whole)", 4)), [1, 2, 3, 4])
    assert said[0] == "draft split over 4 (placement=sharded ranks=4)"
    assert "draft=none: the target alone fits" in said
    assert not advice(pair, search(pair, [4])[0], [4])


def test_more_ranks_are_advised() -> None:
    target = request("65B", None, P4D)
    said = advice(target, option(target, alone(2)), list(range(1, 9)))
    assert said[0].startswith("target over 8 ranks instead of 2")


def test_splits_that_are_impossible_are_refused() -> None:
    on = request("qwen2.5-7b", None, P4D)  # 28 heads, 4 KV heads
    found = {len(one.placement.target) for one in search(on, list(range(1, 9)))}
    assert found == {1, 2, 3, 4, 8}  # over 8, two ranks share the queries of each KV head
    with pytest.raises(DistributedError, match=r"cannot be split.*28 heads, 4 KV heads, 6 ranks"):
        option(on, alone(6))
    odd = request("65B", None, P4D, dtype=Dtype.nf4)
    odd = replace(odd, target=replace(odd.target, model=model("65B", dtype=Dtype.nf4, dim=8200)))
    for world in (1, 2):
        with pytest.raises(DistributedError, match="nf4 needs inputs in whole blocks"):
            option(odd, alone(world))


NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40", "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100-80", "NVIDIA H200": "H200", "NVIDIA L4": "L4", "NVIDIA L40S": "L40S",
    "NVIDIA A10G": "A10G", "Tesla V100-SXM2-32GB": "V100-32", "NVIDIA A10": "A10", "NVIDIA L40": "L40",
    "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H100 NVL": "H100-NVL", "NVIDIA H20": "H20",
    "NVIDIA B200": "B200", "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GeForce RTX 4090": "RTX-4090", "NVIDIA GeForce RTX 5090": "RTX-5090",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": "A100-40", "NVIDIA H100 80GB HBM3 MIG 3g.40gb": "H100-80",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA GeForce RTX 4080": None, "NVIDIA A40": None,
    "NVIDIA GB200": None, "Tesla V100-SXM2-16GB": None,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_drivers_name_is_understood(name: str) -> None:
    gpus = [str(preset["gpu"]) for preset in machines().values()]
    assert matching(name, gpus) == NAMES[name]


@pytest.mark.parametrize("name", sorted(machines()))
def test_every_preset_is_whole(name: str) -> None:
    on = machine(name)
    assert on.capacity > 0 and on.world >= 1 and on.times.bytes_per_s > 0 and on.times.flops_per_s > 0
    assert on.times.source and on.taken["context"] > 0


@pytest.mark.parametrize("name", ["rtx_4090", "rtx_5090"])
def test_gpus_without_peer_access_sum_through_the_host(name: str) -> None:
    """That takes three times as long as NCCL's own model of PCIe says, at least."""
    other = dict(machine("l40").times.reduce)
    assert all(seconds >= 3 * other[ranks] for ranks, seconds in machine(name).times.reduce)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Says in the place of nvidia-smi what it is told to, and what else for -L; of None it fails."""

    def install(said: str | None, listed: str = "", shown: str | None = None) -> None:
        def run(command: list[str], **_: Any) -> Any:
            if said is None:
                raise subprocess.CalledProcessError(9, command)
            return SimpleNamespace(stdout=listed if "-L" in command else said)

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # so that it is taken back what the code sets
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        gpus_here.cache_clear()

    yield install
    gpus_here.cache_clear()


TWO = """NVIDIA A100-SXM4-40GB, 39000, GPU-11aa, Disabled
NVIDIA A100-SXM4-40GB, [N/A], GPU-22bb, Enabled"""
TWO_LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11aa)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-22bb)
  MIG 3g.20gb     Device  0: (UUID: MIG-3333)
  MIG 1g.5gb      Device  1: (UUID: MIG-4444)"""
WHOLE = 39000 * 2**20 / 1e9


@pytest.mark.parametrize(
    ("shown", "gigabytes", "reads", "computes"),
    [
        ("0", WHOLE, 1, 1),
        ("GPU-11", WHOLE, 1, 1),
        (None, 20, 20 / 42.3, 3 / 7),
        ("MIG-4444,MIG-3333", 5, 5 / 42.3, 1 / 7),
        ("0,GPU-99,1", WHOLE, 1, 1),
    ],
    ids=["by number", "by UUID", "a part", "two parts", "before an unknown"],
)
def test_what_cuda_shows_is_what_is_planned_for(
    shown: str | None, gigabytes: float, reads: float, computes: float, driver: Driver
) -> None:
    """As CUDA shows them: one part in all, and nothing behind a name that is none. Never as a CPU."""
    driver(TWO, listed=TWO_LISTED, shown=shown)
    on = machine_for(ClusterConf(reserve=0.0))
    assert (on.gpu, on.world, on.taken) == ("A100-40", 1, P4D.taken)
    assert on.capacity == pytest.approx(gigabytes * 1e9, rel=1e-6)
    assert on.times.bytes_per_s == pytest.approx(reads * P4D.times.bytes_per_s, rel=1e-3)
    assert on.times.flops_per_s == pytest.approx(computes * P4D.times.flops_per_s)


KINDS = """NVIDIA T400, 2000, GPU-11aa, [N/A], 0, Default
NVIDIA GeForce RTX 4090, 24000, GPU-22bb, [N/A], 0, Default"""


@pytest.mark.parametrize("own", [None, "FASTEST_FIRST"])
def test_numbers_of_gpus_mean_to_cuda_what_they_mean_here(
    own: str | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest is CUDA's number 0 unless it is told otherwise: here it would be the other GPU."""
    driver(KINDS, shown="1")
    if own:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", own)
    assert [gpu.uuid for gpu in gpus_here()] == ["GPU-22bb"]
    assert os.environ["CUDA_DEVICE_ORDER"] == (own or "PCI_BUS_ID")


def test_equal_gpus_are_numbered_as_they_were(driver: Driver) -> None:
    driver(TWO, shown="0")
    assert len(gpus_here()) == 1 and "CUDA_DEVICE_ORDER" not in os.environ


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "MPS"])
def test_a_gpu_for_one_process_is_known(
    is_shared: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In which mode a GPU is, nvidia-smi says; a server (MPS) may have it for others."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if is_shared:
        (tmp_path / "control").touch()
    lines = [f"NVIDIA L4, 23000, GPU-{mode}, [N/A], 0, {mode}" for mode in ("Default", "Exclusive_Process")]
    driver("\n".join(lines))
    assert [gpu.exclusive for gpu in gpus_here()] == [False, not is_shared]


@pytest.fixture
def two_gpus(driver: Driver) -> None:
    driver("NVIDIA A100-SXM4-40GB, 40000\nNVIDIA A100-SXM4-40GB, 30000")


@pytest.mark.usefixtures("two_gpus")
def test_the_gpu_with_least_memory_decides() -> None:
    on = machine_for(ClusterConf(reserve=0.0))
    assert (on.world, on.capacity) == (2, 30000 * 2**20)


@pytest.mark.usefixtures("two_gpus")
def test_of_a_gpu_a_little_stays_free() -> None:
    assert machine_for(ClusterConf()).capacity == 30000 * 2**20 - GPU_RESERVE


@pytest.mark.usefixtures("two_gpus")
def test_of_a_cpu_a_tenth_stays_free() -> None:
    assert machine_for(ClusterConf(gpu="cpu"), 10 * GIB).capacity == 9 * GIB


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("connected", [False, True], ids=["alone", "with a communicator"])
@pytest.mark.parametrize("conf", [ClusterConf(), cluster("p4d")], ids=["local", "p4d"])
def test_what_was_measured_goes_before_what_the_driver_said(conf: ClusterConf, connected: bool) -> None:
    """A process that measures has its context, and perhaps a communicator: the plan counts them, so they
    are added."""
    own = 20 * GIB - GPU_RESERVE + P4D.taken["context"] + P4D.taken["nccl"] * connected
    assert machine_for(conf, 20 * GIB, connected).capacity == own


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("connected", [False, True], ids=["alone", "with a communicator"])
def test_a_limit_in_gib_holds_for_what_was_measured(connected: bool) -> None:
    here = ClusterConf(reserve=0.0, gib=2.0)
    assert machine_for(here, 20 * GIB, connected).capacity == 2 * GIB


@pytest.mark.usefixtures("two_gpus")
def test_the_size_of_a_preset_is_a_limit_of_what_was_measured() -> None:
    assert machine_for(cluster("p4d"), 80 * GIB).capacity == P4D.capacity


@pytest.mark.parametrize("mode", ["Disabled", "[N/A]"])
def test_what_a_driver_does_not_say_is_the_presets(mode: str, driver: Driver) -> None:
    driver(f"NVIDIA H200, [N/A], GPU-1, {mode}")
    assert machine_for(ClusterConf(reserve=0.0)).capacity == machine("h200x8").capacity


@pytest.mark.parametrize(
    ("said", "shown"),
    [("", None), (None, None), (TWO, ""), (TWO, "-1"), (TWO, "GPU-99"), (TWO, "MIG-99")],
    ids=["no driver's word", "no driver", "none shown", "minus one", "an unknown GPU", "an unknown part"],
)
def test_without_gpus_the_cpu_is_planned(said: str | None, shown: str | None, driver: Driver) -> None:
    """Its ranks share its memory, and its constants are another machine's."""
    driver(said, TWO_LISTED, shown)
    on = machine_for(ClusterConf(reserve=0.0))
    assert on.is_cpu and on.world == 1 and on.times.band > P4D.times.band
    assert on.capacity == pytest.approx(memory_here(), rel=0.2)
    assert on.capacity_of(4) == on.capacity // 4 and P4D.capacity_of(4) == P4D.capacity


def test_figures_can_be_edited() -> None:
    on = machine("p4d", gpus=4, nodes=2, gib=70.0, gb_s=3110.0)
    assert (on.world, on.capacity) == (8, 70 * GIB)
    assert on.times.bytes_per_s == pytest.approx(2 * P4D.times.bytes_per_s)


def test_the_format_auto_is_what_the_machine_computes_in() -> None:
    assert P4D.dtype(Dtype.auto) is Dtype.bf16 and P4D.dtype(Dtype.int8) is Dtype.int8
    assert machine("v100x8").dtype(Dtype.auto) is Dtype.fp16
    assert machine("cpu", bf16=False).dtype(Dtype.auto) is Dtype.fp32


def test_unknown_gpus_are_refused(driver: Driver) -> None:
    """A known one is enough, and so are all figures of an unknown one."""
    driver("NVIDIA GeForce RTX 4080, 16000")
    with pytest.raises(UsageError, match=r"not known; cluster local; found NVIDIA GeForce RTX 4080.*A100-40"):
        machine_for(ClusterConf())
    on = machine_for(ClusterConf(gpu="H200", gpus=2, gib=139.0, reserve=0.0))
    assert (on.world, on.capacity, on.link) == (2, machine("h200x8").capacity, "NVLink4")
    assert machine_for(replace(cluster("p4d"), name="mine", gpu="RTX 4080", gpus=1)).gpu == "RTX 4080"


V1 = "9:cpu:/\n4:memory:/pods/own\n", "memory", "total_", "memory.limit_in_bytes", "memory.usage_in_bytes"
V2 = "0::/pods/own\n", "", "", "memory.max", "memory.current"


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("place", ["pods/own", "pods", "."])
def test_a_container_has_less_memory_than_its_machine(version, place, monkeypatch, tmp_path):
    """The limit may be of its own group, of one above, or shown as the root's; cached files count as free."""
    table, folder, first, limit, used = version
    (memory := tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:     80 kB\n")
    monkeypatch.setattr(host_memory, "MEMORY_TABLE", memory)
    (groups := tmp_path / "cgroup").write_text(table)
    monkeypatch.setattr(control_groups, "GROUPS_TABLE", groups)
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    group = tmp_path / folder / place
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.stat").write_text(f"anon 5\n{first}inactive_file 300\n{first}active_file 40\n")
    for most, now, left in (("9000", "1000", 9000 - 1000 + 340), ("9000", "10000", 0)):
        (group / limit).write_text(f"{most}\n")
        (group / used).write_text(f"{now}\n")
        assert memory_here() == left
    (group / limit).write_text("max\n")
    assert memory_here() == 80 * 1024
    monkeypatch.setattr(host_memory, "MEMORY_TABLE", tmp_path / "none")
    assert memory_here() > 2**20


def test_prompts_are_read_in_smaller_chunks_where_larger_ones_do_not_fit() -> None:
    """Unless the size is given; the plan is of what then runs."""
    place = alone(1)
    asked = replace(
        request("llama3.1-8b", None, H100, prompt_tokens=4000, prefill_chunk=2048), least_chunk=512
    )
    roomy = option(asked, place)
    short = roomy.worst.margin - roomy.worst.uncertainty + 1
    tight = replace(asked, machine=replace(H100, capacity=H100.capacity - short))
    small, given = option(tight, place), option(replace(tight, least_chunk=None), place)
    fits = FitVerdict.fits
    assert (roomy.verdict, roomy.prefill_chunk, small.verdict, small.prefill_chunk) == (fits, 2048, fits, 512)
    assert (given.verdict, given.prefill_chunk) == (FitVerdict.uncertain, 2048)
    assert make_plan(tight, place).request.work.prefill_chunk == 512
    assert make_plan(tight, place).prefill_ms > 1.5 * make_plan(asked, place).prefill_ms


def planned(on: Machine, rows: int = 1, **work: int) -> Prediction:
    """The plan of a pair on one rank."""
    asked = request("llama3.1-8b", "llama3.2-1b", on, rows=rows, **work)
    return Prediction(asked, option(asked, named("target 0, draft 0 (whole)", 1), 4))


def test_rows_are_doubled_while_that_pays() -> None:
    """Up to what memory, the texts or the machine's arithmetic allow."""
    rows = planned(H100).rows_that_pay(4096)
    assert rows >= 64
    _, best, more = plans = [planned(H100, rows=n) for n in (rows // 2, rows, 2 * rows)]
    less_ms, best_ms, more_ms = (one.ms_per_token(one.request.work.rows, None, None)[1] for one in plans)
    assert best.option.verdict is FitVerdict.fits and best_ms <= less_ms / LEAST_GAIN
    assert more.option.verdict is not FitVerdict.fits or more_ms > best_ms / LEAST_GAIN


def test_rows_are_not_more_than_the_texts() -> None:
    rows = planned(H100).rows_that_pay(4096)
    assert planned(H100).rows_that_pay(rows - 1) == rows - 1


def test_rows_with_long_prompts_are_fewer() -> None:
    assert planned(H100, prompt_tokens=30_000).rows_that_pay(4096) < planned(H100).rows_that_pay(4096)


def test_on_a_cpu_rows_are_at_most_32() -> None:
    rates = {"flops_per_s": 1e15, "kernel_flops_per_s": 1e15}
    quick = replace(CPU, times=replace(CPU.times, **rates))
    usual, more = (planned(on).rows_that_pay(4096) for on in (CPU, quick))
    assert planned(CPU).rows_that_pay(3) == 3 < usual < more == 32
