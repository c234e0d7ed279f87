"""Constants of this machine: found again, noticed where they are stale, and not used by a job under way."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_ssp.config import CalibrateConf, ClusterConf, Dtype, RunConf, TimesConf
from llama_ssp.config.compose import composed
from llama_ssp.distributed.comm import ALONE
from llama_ssp.models.host_cores import FreeCores
from llama_ssp.models.kernels import linear
from llama_ssp.placing import kept_constants as kept
from llama_ssp.placing.draft_length import Why
from llama_ssp.placing.pairs import pair_specs
from llama_ssp.placing.this_machine import machine_for
from llama_ssp.planner.speed import CPU_BAND, WIDE_BAND
from llama_ssp.tasks import calibrate, first_measurement
from llama_ssp.tasks.calibrate import FITTED, Effort, fitted, has_time, in_turn, predicted
from llama_ssp.tasks.first_measurement import measure_first, short_cases
from tests.conftest import Command
from tests.test_calibrate import TRUE, cluster_with, less_of_everything
from tests.warm import Started

TIMES = TimesConf(bandwidth_share=0.5, flops_share=1.0, **TRUE, all_reduce_us={2: 40.0}, message_us=9.0)
MEASURED = ClusterConf(gpu="cpu", gb_s=40.0, tflops=2.0, times=TIMES)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a user whose machine may be measured."""
    monkeypatch.delenv(kept.SWITCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "llama-ssp" / "machine"


@pytest.fixture
def measured_here(cache: Path) -> Path:
    """The file of a machine that has been measured."""
    return kept.keep_constants(MEASURED, kept.key_here("cpu", 1), kept.BY_CALIBRATE)


def test_plans_of_this_machine_go_by_what_was_measured(measured_here: Path) -> None:
    here, before = machine_for(ClusterConf()), machine_for(ClusterConf(gpu="cpu"))
    assert here.times.bytes_per_s == pytest.approx(40e9 * 0.5) != before.times.bytes_per_s
    assert (here.times.layer, here.times.message) == (500e-6, 9e-6) and here.times.reduce == ((2, 40e-6),)
    assert here.constants_from.startswith("this machine, measured by llama-ssp calibrate, 20")
    assert (here.is_borrowed, before.is_borrowed) == (False, True)
    assert here.times.band < before.times.band == WIDE_BAND


def test_a_named_machine_and_the_switch_leave_it_alone(
    measured_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine_for(ClusterConf(gpu="cpu", gb_s=5.0)).lacks == ""
    given = machine_for(ClusterConf(gb_s=5.0))
    assert given.times.bytes_per_s == 5e9 * 0.5, "what the user says goes before"
    monkeypatch.setenv(kept.SWITCH, "0")
    off = machine_for(ClusterConf())
    assert off.is_borrowed and "LLAMA_SSP_MEASURED=0" in off.constants_from
    assert not kept.can_keep()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"torch": "1.0"}, "what was measured with torch 1.0 is not used with"),
        ({"meaning": 0}, "an earlier version of llama-ssp has measured is not used"),
        ({"processor": "another"}, "this machine is not measured yet"),
        ({"threads": 97}, "this machine is not measured yet"),
        ({"ranks": 2}, "this machine is not measured yet"),
    ],
    ids=["another torch", "an earlier meaning", "another processor", "other threads", "other ranks"],
)
def test_what_is_stale_is_noticed_and_not_used(cache: Path, changed: dict[str, Any], says: str) -> None:
    key = kept.key_here("cpu", 1)
    kept.keep_constants(MEASURED, replace(key, **changed), kept.BY_RUN)
    here = machine_for(ClusterConf())
    assert here.is_borrowed and says in here.constants_from
    kept.keep_constants(MEASURED, key, kept.BY_RUN)
    assert not machine_for(ClusterConf()).is_borrowed, "a fresh measurement is used"


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"{}",
        b'{"key": {}}',
        "negative",
        "not a number",
        "a key that is not a number",
        "no figures",
    ],
    ids=str,
)
def test_a_damaged_file_is_not_used(measured_here: Path, damage: bytes | str) -> None:
    content = json.loads(measured_here.read_bytes())
    match damage:
        case "negative":
            content["times"]["layer_us"] = -1.0
        case "not a number":
            content["figures"]["gb_s"] = "fast"
        case "a key that is not a number":
            content["times"]["all_reduce_us"] = {"two": 1.0}
        case "no figures":
            del content["figures"]
    measured_here.write_bytes(damage if isinstance(damage, bytes) else json.dumps(content).encode())
    here = machine_for(ClusterConf())
    assert here.is_borrowed and f"{measured_here} is not used: " in here.constants_from


def test_sums_over_other_ranks_are_kept_on_a_gpu(cache: Path) -> None:
    """On a CPU ranks share the machine, and each number of them has a file of its own."""
    for ranks in (2, 4):
        times = replace(TIMES, all_reduce_us={ranks: 10.0 * ranks})
        kept.keep_constants(replace(MEASURED, times=times), kept.key_here("H200", ranks), kept.BY_RUN)
    found = kept.kept_constants("H200", 1).constants
    assert found is not None and found.times.all_reduce_us == {2: 20.0, 4: 40.0}
    assert found.lacks_sums(8) and not found.lacks_sums(4) and not found.lacks_sums(1)
    preset = {"times": {"source": "a preset", "all_reduce_us": {8: 99.0}, "layer_us": 3.0}}
    times = found.over(ClusterConf(gpu="H200"), preset).times
    assert times.all_reduce_us == {2: 20.0, 4: 40.0, 8: 99.0} and times.layer_us == TRUE["layer_us"]
    assert kept.kept_constants("cpu", 2).constants is None


def test_the_network_is_kept_with_the_sums_of_a_node(cache: Path) -> None:
    """Of GPUs; a run on one node leaves it as it was measured."""
    over = replace(MEASURED, gpu="H200", between_us=42.0, between_gb_s=7.0)
    kept.keep_constants(over, kept.key_here("H200", 16), kept.BY_RUN)
    kept.keep_constants(replace(MEASURED, gpu="H200"), kept.key_here("H200", 2), kept.BY_RUN)
    found = kept.kept_constants("H200", 1).constants
    assert found is not None and not found.lacks_sums(2, nodes=2)
    on = found.over(ClusterConf(gpu="H200"), {})
    assert (on.between_us, on.between_gb_s) == (42.0, 7.0)
    named = found.over(ClusterConf(gpu="H200", between_us=9.0), {})
    assert named.between_us == 9.0, "what the user gives holds"
    assert kept.Constants(times=TIMES).lacks_sums(2, nodes=2), "the control: nothing is known of a network"


def test_the_plan_says_what_its_times_are_of(cache: Path, command: Command) -> None:
    words = ("task=plan", "model=smollm2-135m", "draft=none", "out=null", "output=json")
    before = command(*words)
    kept.keep_constants(MEASURED, kept.key_here("cpu", 1), kept.BY_RUN)
    after = command(*words)
    assert before.document["cluster"]["constants_from"].endswith("; this machine is not measured yet")
    assert after.document["cluster"]["constants_from"].startswith(
        "this machine, measured by the end of a run"
    )
    assert (before.document["best"]["band"], after.document["best"]["band"]) == (WIDE_BAND, CPU_BAND)
    shown = command(*words[:-1])
    assert (
        f"times within {CPU_BAND:.0%}, constants of this machine, measured by the end of a run" in shown.out
    )


def test_new_runs_are_decided_by_it(cache: Path) -> None:
    run = composed(["model=demo", "draft=demo_draft", "out=null"])
    (before,) = pair_specs(run, [], 1)
    kept.keep_constants(MEASURED, kept.key_here("cpu", 1), kept.BY_RUN)
    (after,) = pair_specs(run, [], 1)
    assert (before.decision.drafts.why, after.decision.drafts.why) == (Why.default, Why.planned)
    assert after.decision.placement.why is Why.planned


# --- the first measurement


def of_little_models(_rank: int = 0, put: Callable[..., None] = setattr) -> None:
    """Has this process, or another one, measure little models, as if nobody else used the cores."""
    less_of_everything(put=put)
    small = [calibrate.Case(calibrate.shape(layers, 64, 300, head_dim=8)) for layers in (1, 2)]
    small.append(calibrate.Case(small[1].target, small[0].target, 2))
    put(first_measurement, "short_cases", lambda: small)
    put(first_measurement, "STREAMED", {"cpu": 2**20})
    put(first_measurement, "MOST_S", 60.0)
    put(first_measurement, "_others_compute", lambda *_: False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """Little models, and cores that nobody else uses."""
    of_little_models(put=monkeypatch.setattr)
    return cache


@pytest.mark.long
def test_two_ranks_measure_what_they_say_to_each_other(cache: Path, tmp_path: Path) -> None:
    """When their run has ended well; its own plan is of the constants before."""
    words = ("task=generate", "model=tiny", "draft=none", "prompt=Once", "task.max_new_tokens=2")
    words += ("placement=leader", "engine=eager", "out=null", "output=json")
    answers = Started(tmp_path / "run", 2, *words, fault=of_little_models).finish()
    assert [answer.code for answer in answers] == [0, 0], answers[0].err
    assert "plans of this machine go by it from now on" in answers[0].err
    (file,) = cache.glob("*.json")
    content = json.loads(file.read_bytes())
    assert content["key"]["ranks"] == 2
    assert content["times"]["all_reduce_us"]["2"] > 0 and content["times"]["message_us"] > 0
    assert answers[0].document["plan"]["band"] == WIDE_BAND
    assert machine_for(ClusterConf()).is_borrowed and not machine_for(ClusterConf(), ranks=2).is_borrowed


def test_the_first_run_measures_and_later_ones_do_not(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_first(RunConf(), ALONE)
    (file,) = quick.glob("*.json")
    content = json.loads(file.read_bytes())
    assert (
        content["by"] == kept.BY_RUN and content["figures"]["gb_s"] > 0 and content["figures"]["tflops"] > 0
    )
    assert {*FITTED, "bandwidth_share"} <= content["times"].keys()
    assert "context_mib" not in content["figures"], "the run's own memory is in it"
    assert not machine_for(ClusterConf()).is_borrowed

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(first_measurement, "measured", never)
    measure_first(RunConf(), ALONE)
    measure_first(RunConf(cluster=ClusterConf(gpu="cpu")), ALONE)
    measure_first(RunConf(task=CalibrateConf()), ALONE)
    with pytest.raises(AssertionError, match="measured again"):
        file.unlink()
        measure_first(RunConf(), ALONE)


def test_the_first_run_with_our_kernels_measures_them(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager runs measure the machine once, without them."""
    monkeypatch.setattr(linear, "is_loaded", lambda: False)
    measure_first(RunConf(), ALONE)
    (file,) = quick.glob("*.json")
    without = file.read_bytes()
    measure_first(RunConf(), ALONE)
    assert file.read_bytes() == without
    assert "kernel_gb_s" not in json.loads(without)["times"]

    linear.operators()
    monkeypatch.setattr(linear, "is_loaded", lambda: True)
    measure_first(RunConf(), ALONE)
    found = json.loads(file.read_bytes())["times"]
    times = machine_for(ClusterConf()).times
    assert times.kernel_bytes_per_s == found["kernel_gb_s"] * 1e9 > 0
    assert times.kernel_flops_per_s == found["kernel_tflops"] * 1e12 > 0


def test_of_a_gpu_sums_alone_are_measured_by_a_run(cache: Path) -> None:
    """The rest is of CUDA graphs, which only a calibration makes: its constants replace the preset's."""
    on_gpu = replace(MEASURED, gpu="H200", gb_s=3500.0)
    kept.keep_constants(first_measurement._what_holds(on_gpu), kept.key_here("H200", 2), kept.BY_RUN)
    before, preset = ClusterConf(gpu="H200"), {"times": {"source": "a preset", "layer_us": 3.0}}
    found = kept.kept_constants("H200", 2).constants
    assert found is not None and found.over(before, preset).gb_s is None
    times = found.over(before, preset).times
    assert (times.layer_us, times.bandwidth_share, times.all_reduce_us) == (3.0, None, {2: 40.0})
    assert times.source.startswith("a preset; sums over ranks: this machine, measured by the end of a run")

    kept.keep_constants(on_gpu, kept.key_here("H200", 2), kept.BY_CALIBRATE)
    found = kept.kept_constants("H200", 2).constants
    assert found is not None and found.over(before, preset).gb_s == 3500.0
    assert found.over(before, preset).times.layer_us == TRUE["layer_us"]


def test_nothing_is_measured_while_others_compute(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_measurement, "_others_compute", lambda *_: True)
    measure_first(RunConf(), ALONE)
    assert not [*quick.glob("*.json")]
    turns = iter([False, True])  # others begin meanwhile
    monkeypatch.setattr(first_measurement, "_others_compute", lambda *_: next(turns))
    measure_first(RunConf(), ALONE)
    assert not [*quick.glob("*.json")] and next(turns, None) is None


def test_a_run_ends_well_though_its_machine_cannot_be_measured(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(first_measurement, "measured", fails)
    measure_first(RunConf(), ALONE)
    assert not [*quick.glob("*.json")]


def test_measuring_that_takes_too_long_is_given_up(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others begin to use the cores meanwhile, a run must not wait a minute for its last figure."""
    monkeypatch.setattr(first_measurement, "MOST_S", 0.0)
    measure_first(RunConf(), ALONE)
    assert not [*quick.glob("*.json")]
    with pytest.raises(calibrate.TooSlow):
        calibrate.within(ALONE, 0.0, lambda: pytest.fail("it goes on"))


def test_others_on_the_cores_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cores that one rank of two threads needs, others may use a third of one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(first_measurement, "LOOK_S", 0.0)
    for taken, busy in ((0.0, False), (0.2, False), (0.4, True), (2.0, True)):
        free = FreeCores(cores=[0, 1], taken=taken)
        monkeypatch.setattr(first_measurement, "free_cores", lambda _, free=free: free)
        assert first_measurement._others_compute(ALONE, torch.device("cpu")) == busy
    monkeypatch.setattr(first_measurement, "free_cores", lambda _: None)  # as on macOS
    assert not first_measurement._others_compute(ALONE, torch.device("cpu"))


def test_few_rounds_find_what_a_plan_needs() -> None:
    """Constants of the short cases give the rounds of a calibration's cases, with noise of 3 %."""
    true = cluster_with(bandwidth_share=0.8, **TRUE)
    machine = machine_for(true)
    noise = np.random.default_rng(1).normal(1, 0.03, len(short_cases()))
    spent = [predicted(case, machine, Dtype.bf16, 1).round_s(case.k, 1.0) for case in short_cases()]
    found = fitted(cluster_with(), short_cases(), list(np.array(spent) * noise), Dtype.bf16, 1)
    again = machine_for(replace(true, times=found))
    for case in calibrate.cases():
        true_s, found_s = (
            predicted(case, each, Dtype.bf16, 1).round_s(case.k, 1.0) for each in (machine, again)
        )
        assert found_s == pytest.approx(true_s, rel=0.15)


def test_time_is_limited() -> None:
    calls = list[int]()

    def work() -> float:
        calls.append(1)
        return float(len(calls))

    assert in_turn([work], 3, lambda _: False) == [1.0] and len(calls) == 1
    assert in_turn([work], 3, lambda _: True) == [3.0] and len(calls) == 5
    assert has_time(ALONE, 2.0, 0.9) and not has_time(ALONE, 2.0, 1.1)
    assert Effort(cases=[], new=1, streamed=1, repeats=1).limit_s == float("inf")


def test_calibrate_keeps_the_same_file_and_goes_before(
    quick: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    measure_first(RunConf(), ALONE)
    answer = command("task=calibrate", "task.repeats=1", "task.folder=mine", "out=null")
    assert answer.code == 0, answer.err
    (file,) = quick.glob("*.json")
    content = json.loads(file.read_bytes())
    assert content["by"] == kept.BY_CALIBRATE and content["figures"]["context_mib"] > 0
    assert content["times"]["layer_us"] == answer.document["cluster"]["times"]["layer_us"]


# --- a job under way


def test_a_job_keeps_what_it_was_planned_by(
    cache: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured later, or measured anew: neither its K nor its placement goes by that; a new job's does."""
    Path("in.jsonl").write_text('{"id": "a", "prompt": "Once"}\n', encoding="utf-8")
    words = ("task=batch", "model=demo", "draft=demo_draft", "task.input=in.jsonl", "out=null", "seed=1")
    words += ("task.max_new_tokens=4", "task.batch_size=1", "speculation.cost_ratio=0.1")
    assert command(*words, "task.output=a.jsonl").code == 0
    kept_file = Path("a.jsonl.work/machine.json")
    assert json.loads(kept_file.read_bytes()) == {}
    place = kept.keep_constants(MEASURED, kept.key_here("cpu", 1), kept.BY_CALIBRATE)

    def planned_by(output: str) -> tuple[str, str | None]:
        """Returns where the constants of a job's plan are from, and the switch of what it starts."""
        seen = list[str]()

        def note(*given: Any, **named: Any) -> Any:
            machine = machine_for(*given, **named)
            seen.append(machine.constants_from)
            return machine

        with monkeypatch.context() as patched:
            patched.setattr("llama_ssp.placing.request.machine_for", note)
            patched.delenv(kept.SWITCH, raising=False)
            assert command(*words, f"task.output={output}").code == 0
            return seen[0], os.environ.get(kept.SWITCH)

    source, switch = planned_by("a.jsonl")
    assert "not measured yet, as when this job began" in source and switch == str(kept_file.absolute())
    source, switch = planned_by("b.jsonl")
    assert source.startswith("this machine, measured by llama-ssp calibrate") and switch is None
    assert json.loads(Path("b.jsonl.work/machine.json").read_bytes()) == json.loads(place.read_bytes())

    other = replace(MEASURED, times=replace(TIMES, layer_us=1.0))
    kept.keep_constants(other, kept.key_here("cpu", 1), kept.BY_RUN)
    assert planned_by("b.jsonl")[0].startswith("this machine, measured by llama-ssp calibrate")
    assert planned_by("c.jsonl")[0].startswith("this machine, measured by the end of a run")
