"""The plan's times: calibrated on four published runs, right about others, by the engine that runs."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import pytest

from bench.plan_known import measured_ms, planned_ms, published_rate
from bench.plan_rows import (
    FOR_INFORMATION,
    GROUPS,
    PUBLISHED,
    every_second,
    gpu_rows,
    held_out,
    published_rows,
)
from llama_ssp.config import Dtype, ModelConf, Overlap, Splitting, Steps, TimesConf
from llama_ssp.models.formats.kept import PLAIN, Kept
from llama_ssp.models.tensor_row import LAYERS
from llama_ssp.placing.engine import FEW_TOKENS, compiled_before, why_eager
from llama_ssp.planner import speed
from llama_ssp.planner.engine import launching_s
from llama_ssp.planner.plan import make_plan
from llama_ssp.planner.rates import plain_rate, rate_of
from llama_ssp.planner.search import NOTABLE, PlanRequest, option, step_s
from llama_ssp.planner.search import cost_of as cost_of_role
from llama_ssp.planner.storage import CPU as CPU_KERNELS
from llama_ssp.planner.storage import Storage, Weight, bytes_of
from llama_ssp.planner.weights import parameters
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.speculative.draft_length import Costs, tokens_per_round
from tests.plans import CPU, H100, P4D, alone, drawn, machine, model, named, request, stepping
from tests.warm import ROOT

# The same README, Llama-2-7B on one GCD of an MI250X: another GPU, so within the wide band only.
OTHER_GPU = 76.33


def cost_of(name: str, ranks: int = 1, dtype: Dtype = Dtype.bf16) -> speed.PassCost:
    return speed.pass_cost(Role(TARGET, model(name), dtype), ranks)


def planned_rate(name: str, ranks: int) -> float:
    """Tokens a second of our engine, which splits the head: what task=plan prints."""
    on = request(name, None, machine("p4de"), prompt_tokens=5, new_tokens=200, k=0)
    return 1000 / option(on, alone(ranks)).ms_per_token


def test_the_page_has_every_published_row() -> None:
    """In the form of the engine that was published; rows that gave the constants are marked."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    off: dict[str, list[float]] = {}
    for name, rates in PUBLISHED.items():
        for ranks, published in rates.items():
            error = published_rate(name, ranks) / published - 1
            used = "yes" if name == "llama2-7b" else "no"
            row = f"| {name} | {ranks} | {published:.2f} | {error:+.1%} | {used} |"
            assert row.replace("%", " %") in page, row.replace("%", " %")
            off.setdefault(name, []).append(abs(error))
    apart = [*off["llama2-70b"], *off["llama3.1-8b"]]
    assert f"at most {max(apart):.1%}, and {mean(apart):.1%} in the mean".replace("%", " %") in page
    assert max(off["llama2-7b"]) < 0.01
    ours = planned_rate("llama3.1-8b", 8) / PUBLISHED["llama3.1-8b"][8] - 1
    assert f"{ours:.0%} for llama3.1-8b over eight GPUs".replace("%", " %") in page
    other = machine("mi250x").times.band
    assert abs(published_rate("llama2-7b", 1, "mi250x") / OTHER_GPU - 1) < other


def test_the_page_does_an_example_by_hand() -> None:
    """30B and 7B on eight H100: every figure of the table and of the sentence after it is the plan's."""
    page = " ".join((ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split())
    on = request("30B", "7B", H100)
    place = named("target 0-7, draft 0-7 (split)", 8)
    plan, times = make_plan(on, place), H100.times
    assert (plan.chosen.k, plan.chosen.placement) == (2, place)
    cells = []
    for role, tokens in zip(on.roles, (3, 1), strict=True):
        cost = cost_of_role(on, role, place)
        slots = on.work.prompt_tokens + on.work.new_tokens / 2
        traffic = 2 * cost.width * tokens * 7 / 8 / times.link_per_s
        parts_ms = {
            "weights": 1000 * cost.weights / times.bytes_per_s,
            "caches": 1000 * cost.slot * slots / times.bytes_per_s,
            "layers": 1000 * cost.layers * times.layer,
            "sums": 1000 * cost.sums * (speed.between(times.reduce, 8) + traffic),
        }
        step_ms = 1000 * step_s(on, role, place, cost, tokens)
        assert sum(parts_ms.values()) == pytest.approx(step_ms)
        cells.append(
            (
                f"{cost.weights / 1e9:.2f} GB: {parts_ms['weights']:.2f} ms",
                f"{parts_ms['caches']:.2f} ms",
                f"{cost.layers}: {parts_ms['layers']:.2f} ms",
                f"{cost.sums}: {parts_ms['sums']:.2f} ms",
                f"{step_ms:.2f} ms",
            )
        )
    for target, draft in zip(*cells, strict=True):
        assert f"| {target} | {draft} |" in page
    draft_ms, verify_ms = 1000 * plan.chosen.times.draft, float(cells[0][-1].split()[0])
    said = (
        f"A round of K = 2 takes 2 x {draft_ms:.2f} ms, {verify_ms:.2f} ms and two messages of 0.1 ms: "
        f"{1000 * plan.chosen.times.round_s(2, 0.8):.2f} ms. At acceptance 0.8 it gives "
        f"{tokens_per_round(0.8, 2):.2f} tokens, so a token takes {plan.chosen.ms_per_token:.2f} ms; without "
        f"drafts it takes {plan.regular_ms:.2f} ms"
    )
    assert said in page, said


def test_every_second_row_is_held_out() -> None:
    """Of each group, by name; the list was committed before any constant was chosen by it."""
    groups = [rows() for group, rows in GROUPS.items() if group not in FOR_INFORMATION]
    by_rule = [name for rows in groups for name in every_second(rows)]
    assert sorted(by_rule) == sorted(held_out()) and len(by_rule) == len(set(by_rule)) > 70


# The README of gpt-fast does not say why this one is slower than the older 70B; eager steps of several tokens
# after 32,000 slots had a mask of all slots then, which commit 033e5de3 took away.
MISSED = {
    "llama3.1-70b on 2",
    "first run, steps, 7B bf16, eager, 32000 slots, a step of 2 tokens",
    "first run, steps, 7B bf16, eager, 32000 slots, a step of 5 tokens",
}


def test_gpus_are_planned_within_15_percent() -> None:
    """Of each group one row that is held out may miss its band, with its reason."""
    for rows in (published_rows(), gpu_rows()):
        off = {row.name: planned_ms(row) / measured_ms(row) - 1 for row in rows}
        missed = {name for name, each in off.items() if abs(each) > 0.15}
        assert missed == MISSED & off.keys(), missed
        assert len(missed & held_out()) <= 1 < len(off.keys() & held_out())


def test_four_published_runs_determine_the_constants() -> None:
    """Each takes the time of its bytes, and of 32 layers with two sums each."""
    for ranks, rate in PUBLISHED["llama2-7b"].items():
        read = 2 * 6_476_005_376 / ranks + 2 * 32_000 * 4096
        sums = 64 * (speed.SUM_S + speed.SUM_S_PER_RANK * (ranks - 1)) * (ranks > 1)
        assert read / speed.BYTES_PER_S + 32 * speed.LAYER_S + sums == pytest.approx(1 / rate, rel=1e-9)


def test_own_constants_go_before_the_calibrated_ones() -> None:
    own = TimesConf(bandwidth_share=1.0, layer_us=1.0, step_us=2.0, all_reduce_us={2: 3.0}, message_us=4.0)
    times = speed.times_of(own, 100.0, 1.0, None)
    assert (times.bytes_per_s, times.layer, times.step, times.reduce) == (100e9, 1e-6, 2e-6, ((2, 3e-6),))
    assert times.message == 4e-6
    points = ((1, 1.0), (3, 2.0), (7, 10.0))  # figures between known ones
    assert [speed.between(points, n) for n in (0, 1, 2, 3, 5, 7, 8)] == [1, 1, 1.5, 2, 6, 10, 12]
    assert speed.between(((1, 4.0),), 9) == 4.0


def test_bytes_read_are_the_models_but_for_its_embedding() -> None:
    conf, tied = model("llama2-7b"), model("smollm2-135m")
    table = 2 * conf.vocab * conf.dim
    assert cost_of("llama2-7b").weights == 2 * parameters(conf) - table
    assert cost_of("smollm2-135m").weights == 2 * parameters(tied)
    wide, narrow = (cost_of("7B", dtype=dtype).weights - table for dtype in (Dtype.bf16, Dtype.int8))
    assert narrow == pytest.approx(wide / 2, rel=0.002)  # and its scales


def test_a_long_pass_is_bound_by_arithmetic() -> None:
    """And no slower eagerly: that takes longer than its launches."""
    cost, times = cost_of("7B"), P4D.times
    one, long = (speed.forward_s(cost, times, 1, tokens, 0) for tokens in (1, 2048))
    assert speed.forward_s(cost, times, 1, 8, 0) < 1.05 * one
    assert long == pytest.approx(cost.flops * 2048 / times.flops_per_s, rel=0.05)
    assert speed.prefill_s(cost, times, 1, 2048, 64) > speed.prefill_s(cost, times, 1, 2048, 2048) == long
    assert long > launching_s(cost.layers)


def test_a_very_long_prompt_costs_as_much_in_attention_again() -> None:
    """Of 70B over 8 ranks: each of 130k tokens attends to half of them on average."""
    cost, times = cost_of("llama3.1-70b", 8), machine("p4de").times
    length = 130_000
    matrices, scores = length * 2 * 68.5e9 / 8, 4 * 80 * 8192 / 8 * length * length / 2
    found = speed.prefill_s(cost, times, 1, length, 4096) * times.flops_per_s
    assert 0.9 < scores / matrices < 1.6
    assert found == pytest.approx(matrices + scores, rel=0.2)
    one = speed.forward_s(cost, times, 1, 1, 1000)  # a single token is bound by reading keys and values
    assert one == speed.forward_s(replace(cost, attention=0.0), times, 1, 1, 1000)


def paper(draft: float, verify: float, overlap: Overlap = Overlap.off) -> speed.RoundTimes:
    return speed.RoundTimes(draft=draft, verify=(1.0, *[verify] * 16), rows=1, overlap=overlap)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95], ids="acceptance {}".format)
@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.3, 0.6], ids="cost {}".format)
def test_best_k_is_the_papers_where_verifying_costs_a_step(ratio: float, acceptance: float) -> None:
    k = Costs.of_ratio(ratio, 16).best(acceptance, acceptance)
    assert paper(ratio, 1.0).best_k(acceptance) == k


def test_the_speed_up_is_the_papers_where_verifying_costs_a_step() -> None:
    times = paper(0.1, 1.03)
    speedup = 1000 / times.ms_per_token(0.8, 4)
    assert speedup == pytest.approx(tokens_per_round(0.8, 4) / (4 * 0.1 + 1.03))
    best = speed.at_acceptance([times], 0.8, 1000.0)
    assert speedup <= best["speedup"] == pytest.approx(1000 / times.ms_per_token(0.8, best["k"]))


def test_rows_share_the_time_of_a_round() -> None:
    times = paper(0.1, 1.03)
    assert 8 * replace(times, rows=8).ms_per_token(0.8, 4) == pytest.approx(times.ms_per_token(0.8, 4))


def test_drafting_pays_from_the_acceptance_that_a_round_costs() -> None:
    """With K = 1 it pays when 1 + a exceeds what a round costs."""
    assert speed.break_even([paper(0.3, 1.05)], 1000.0) == pytest.approx(0.35, abs=2e-3)
    assert speed.break_even([paper(20.0, 1.0)], 1000.0) is None
    assert speed.break_even([speed.RoundTimes(draft=0.0, verify=(1.0,), rows=1)], 1000.0) is None


def test_a_draft_that_runs_ahead() -> None:
    """A guess that holds takes a round the longer of both; one that does not costs the drafts once more."""
    waiting, ahead = paper(0.1, 1.0), paper(0.1, 1.0, overlap=Overlap.ahead)
    right = 0.8**4 * 0.8 / 1.2
    assert ahead.guessed(4, 0.8) == pytest.approx(right)
    assert ahead.round_s(4, 0.8) == pytest.approx(right * 1.0 + (1 - right) * 1.4)
    assert ahead.round_s(12, 1.0) == pytest.approx(1.3)  # drafting takes longer than verifying
    assert ahead.round_s(12, 0.0) == pytest.approx(2.2 + 0.05)  # and the ask waits for half a pass
    assert ahead.round_s(0, 0.8) == waiting.round_s(0, 0.8) == 1.0 and not ahead.goes_ahead(0, 0.8)
    auto = replace(waiting, overlap=Overlap.auto)
    assert auto.goes_ahead(12, 0.9) and not auto.goes_ahead(12, 0.1)
    assert auto.round_s(12, 0.1) == waiting.round_s(12, 0.1) < ahead.round_s(12, 0.1)
    assert replace(ahead, rows=8).guessed(4, 0.8) == pytest.approx(right**8)


ENOUGH = 10**6  # tokens for which compiling pays


@pytest.mark.parametrize(
    ("reason", "engine", "changes"),
    [
        (None, Steps.compiled, {}),
        (None, Steps.auto, {}),
        ("engine=eager", Steps.eager, {"tokens": ENOUGH}),
        ("placement.splitting=layers", Steps.compiled, {"splitting": Splitting.layers}),
        ("deepspeed", Steps.compiled, {"splitting": Splitting.deepspeed}),
        ("other has no row", Steps.compiled, {"model": model("7B", family="other")}),
        ("a DFlash head", Steps.compiled, {"model": model("7B", head_block=4)}),
        ("steps in nf4 are not compiled on a CPU", Steps.compiled, {"dtype": Dtype.nf4, "on_cpu": True}),
        (None, Steps.auto, {"dtype": Dtype.nf4}),
        (None, Steps.compiled, {"dtype": Dtype.int8, "on_cpu": True}),
        (None, Steps.auto, {"on_cpu": True, "tokens": ENOUGH}),
        (None, Steps.auto, {"dtype": Dtype.fp16}),
        ("steps in fp16 are not compiled on a CPU", Steps.compiled, {"dtype": Dtype.fp16, "on_cpu": True}),
        ("1 tokens save less than compiling", Steps.auto, {"on_cpu": True, "tokens": 1}),
        (None, Steps.compiled, {"model": model("7B", head_dim=512), "on_cpu": True}),
        ("heads of 514 numbers", Steps.compiled, {"model": model("7B", head_dim=514), "on_cpu": True}),
        (None, Steps.compiled, {"model": model("7B", head_dim=514)}),  # a GPU's kernel takes others
    ],
    ids=[
        "compiled",
        "auto",
        "eager",
        "layers",
        "deepspeed",
        "no row",
        "a DFlash head",
        "nf4 on a CPU",
        "nf4",
        "int8 on a CPU",
        "many tokens on a CPU",
        "fp16",
        "fp16 on a CPU",
        "one token on a CPU",
        "heads of 512 on a CPU",
        "heads of 514 on a CPU",
        "heads of 514",
    ],
)
def test_why_steps_run_eagerly(reason: str | None, engine: Steps, changes: dict[str, object]) -> None:
    usual = {"tokens": 0, "model": model("7B"), "dtype": Dtype.bf16, "splitting": Splitting.tensor}
    found = why_eager(engine, **{**usual, "on_cpu": False, **changes})
    assert found is None if reason is None else reason in str(found)


def test_what_was_compiled_once_is_compiled_for_fewer_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the model's sizes and the format, whatever the threads; a long run goes by its settings alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    small, medium = model("smollm2-135m"), "save less than compiling takes; engine=compiled does it once"

    def why(tokens: int, own: ModelConf = small, dtype: Dtype = Dtype.packed) -> str:
        return str(why_eager(Steps.auto, tokens, own, dtype, Splitting.tensor, on_cpu=True))

    assert medium in why(200) and medium not in why(20) and why(10_000) == "None"
    tiny = replace(small, n_layers=10, vocab=1000)
    assert medium in why(FEW_TOKENS - 1, tiny) and medium not in why(FEW_TOKENS, tiny) != "None"
    mark = compiled_before(small, Dtype.packed)
    mark.parent.mkdir()
    mark.touch()
    assert why(200) == why(200, replace(small, name="another", path="/x")) == "None" != why(20)
    others = {"n_layers": 29}, {"vocab": 1000}, {"code_mix": "x"}
    assert all(medium in why(200, replace(small, **other)) for other in others)
    assert medium in why(200, dtype=Dtype.bf16)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert why(200) == "None"


def on_gpus(engine: Steps) -> PlanRequest:
    return stepping(request("30B", None, H100), engine)


def test_eager_steps_on_gpus_take_what_the_host_takes() -> None:
    """30B over 8: a graph reads its bytes in a few ms; eagerly 2,715 launches and 122 sums take 62 ms."""
    graphs, eager, auto = (make_plan(on_gpus(how)) for how in (Steps.compiled, Steps.eager, Steps.auto))
    fast, slow = ({one.placement.world: one.regular_ms for one in plan.options} for plan in (graphs, eager))
    assert fast[8] < 8 < 60 < slow[8] < 65
    assert slow[1] == pytest.approx(max(fast[1], 59.7), rel=0.01)
    assert eager.band > graphs.band == auto.band
    assert "steps run eagerly: model, engine=eager" in drawn(eager)
    assert auto.chosen.placement.world == 8 and not auto.eager
    assert "the first start tries CUDA graphs over several GPUs" in drawn(auto)
    assert "eager" not in drawn(graphs) and graphs.document()["best"]["eager_steps"] == {}


FILES = sorted((ROOT / "bench" / "results").glob("coded_*.md"))
TIMES_OFF = 1.5  # in both directions
BY_TORCH = "bf16, torch's own"
# Where a product is faster than planned: in nf4 several tokens are as fast as in 16 bit on this one.
FASTER = {("coded_xeon-2-cores_202611", "nf4", tokens) for tokens in (5, 12)}
WITHOUT_PACKING = 1.5  # of one token's time, where a file does not have torch's own: as in the other two
GAP = 0.1  # over 16 bit: beyond it, which is faster must be known
# But for these: a format has one rate.
WRONG_SIDE = {("int4, groups of 128", 12), ("int4, groups of 32", 12), ("MXFP4", 12)}
OUTPUTS = INPUTS = 4096
TOKENS = 1, 2, 5, 12, 64
# By the names of the measurement.
FORMATS = {
    "bf16": PLAIN,
    "int4, groups of 128": Kept(4, 128, 2, "int4"),
    "int4, groups of 128, zeros (AWQ)": Kept(4, 128, 3, "uint4"),
    "int4, groups of 32": Kept(4, 32, 2, "int4"),
    "int4, groups of 32, shifts (Q4_K)": Kept(4, 32, 8, "uint4"),
    "MXFP4": Kept(4, 32, 2, "e2m1"),
    "nf4": Kept(4, 64, 4, "nf4"),
    "FP8, blocks of 128": Kept(8, 128, 4, "e4m3"),
    "FP8, a scale an output": Kept(8, 0, 2, "e4m3"),
    "int8, a scale an output": Kept(8, 0, 4, "int8"),
    "int8, groups of 32 (Q8_0)": Kept(8, 32, 2, "int8"),
    "int4, decoded for each product": Kept(4, 20, 2, "int4"),  # groups for which there is no kernel
}


def measured(file: Path) -> tuple[speed.Times, dict[str, list[float]]]:
    """A machine with the fastest reading and multiplication, and no other time; and products for TOKENS."""
    text = file.read_text(encoding="utf-8")
    table = [re.split(r"\s{2,}", line.strip()) for line in text.split("```")[1].strip().splitlines()[1:]]
    found = {name: [1e-6 * float(each) for each in numbers[2:7]] for name, *numbers in table}
    (gb_s,) = re.findall(r"fastest reading was ([\d.]+) GB/s", text)
    torch_us, *_, torch_of_many = found.get(BY_TORCH, [WITHOUT_PACKING * found["bf16"][0], *found["bf16"]])
    many = TOKENS[-1]
    by_kernel = [n / spent for n, spent in zip(TOKENS, found["bf16"], strict=True)]
    times = replace(
        CPU.times,
        bytes_per_s=2 * OUTPUTS * INPUTS / torch_us,
        flops_per_s=2 * OUTPUTS * INPUTS * many / torch_of_many,
        kernel_bytes_per_s=1e9 * float(gb_s),
        kernel_flops_per_s=2 * OUTPUTS * INPUTS * median(by_kernel[-2:]),
        layer=0.0,
        step=0.0,
    )
    return times, found


def product_s(times: speed.Times, tokens: int, codes: Kept) -> float:
    dtype = Dtype.packed if codes.bits else Dtype.bf16
    weight = Weight(group=LAYERS, outputs=OUTPUTS, inputs=INPUTS, linear=True, codes=codes)
    store = Storage(kernel=CPU_KERNELS, compiled=True)
    size = sum(bytes_ for _, bytes_ in bytes_of(weight, dtype))
    rate = rate_of(weight, dtype, store) if codes.bits else plain_rate(store)
    return speed.Product(rate, size, weight.count).seconds(times, tokens)


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in FILES])
def test_products_take_as_long_as_measured(file: Path) -> None:
    """With memory of either speed; and the plan knows where 16 bit is faster."""
    times, found = measured(file)
    for name, codes in FORMATS.items():
        for tokens, spent, wide in zip(TOKENS, found[name], found["bf16"], strict=True):
            planned, over = product_s(times, tokens, codes), spent / wide
            assert planned / spent > 1 / TIMES_OFF, (name, tokens)
            is_faster = (file.stem, name, tokens) in FASTER
            assert (planned / spent > TIMES_OFF) == is_faster, (name, tokens)
            is_slower = planned / product_s(times, tokens, PLAIN) > 1 + NOTABLE
            if (name, tokens) not in WRONG_SIDE and not is_faster:
                assert abs(over - 1) < GAP or is_slower == (over > 1), (name, tokens)


def packed(table: str, bits: int, group: int = 64) -> ModelConf:
    words = "attn_q+attn_k+attn_v attn_output ffn_gate+ffn_up ffn_down"
    mix = " ".join(f"{names}:32:{bits}:{group}:4:{table}" for names in words.split())
    sizes = {"code_bits": bits, "code_group": group, "code_bytes": 4, "code_mix": mix}
    return model("7B", dtype=Dtype.packed, **sizes)


def on_cpu(target: ModelConf, k: int, draft: ModelConf | None = None, acceptance: float = 0.8) -> PlanRequest:
    """On a CPU with the memory of a measurement."""
    found, _ = measured(FILES[0])
    times = replace(
        CPU.times,
        bytes_per_s=found.bytes_per_s,
        flops_per_s=found.flops_per_s,
        kernel_bytes_per_s=found.kernel_bytes_per_s,
        kernel_flops_per_s=found.kernel_flops_per_s,
    )
    return PlanRequest(
        machine=replace(CPU, times=times),
        target=Role(TARGET, target, target.dtype),
        draft=Role(DRAFT, draft, draft.dtype) if draft else None,
        work=Workload(rows=1, prompt_tokens=512, new_tokens=128, k=k),
        acceptance=acceptance,
        k_max=k,
        text_drafts=draft is None and k > 0,
    )


@pytest.mark.parametrize(
    ("table", "bits", "group", "k", "slower"),
    [("nf4", 4, 64, 0, False), ("nf4", 4, 64, 11, True), ("int4", 4, 64, 4, False), ("int4", 4, 20, 0, True),
     ("e4m3", 8, 64, 4, False)],
)  # fmt: skip
def test_where_16_bit_is_faster_the_plan_says_so(
    table: str, bits: int, group: int, k: int, slower: bool
) -> None:
    """Twelve tokens of nf4 are multiplied in fp32; groups of 20 have no kernel."""
    plan = make_plan(on_cpu(packed(table, bits, group), k, acceptance=1.0))  # so K is the largest
    assert plan.chosen.k == k and bool(plan.slower) == slower == ("slower than bf16 here" in drawn(plan))
    assert plan.document()["best"]["slower_than_16_bit"] == plan.slower
    assert not slower or plan.slower["model"] > 1.05


def test_when_a_draft_of_the_targets_own_weights_pays() -> None:
    """From some acceptance on; never for a target that has as few bytes itself."""
    wide = model("7B", dtype=Dtype.bf16)
    drafts = [replace(wide, dtype=dtype) for dtype in (Dtype.int4, Dtype.int8)]
    four, eight = (make_plan(on_cpu(wide, 8, draft)) for draft in drafts)
    assert four.pays_from is not None and eight.pays_from is not None
    assert 0.25 < four.pays_from < eight.pays_from < 0.8 and four.speedup > 1.2
    own = packed("int4", 4)
    same = make_plan(on_cpu(own, 8, replace(own, dtype=Dtype.int4)))
    assert same.pays_from is None or same.pays_from > 0.95
    assert "drafting does not pay" in same.sentence()


def test_where_drafting_pays_does_not_depend_on_the_acceptance_that_is_asked_for() -> None:
    """At a low one the fastest placement does not draft: others would, at a higher one."""
    low, high = (make_plan(request("30B", "7B", H100, acceptance=rate)) for rate in (0.2, 0.9))
    assert low.chosen.k == 0 and high.chosen.k > 0
    assert low.pays_from == high.pays_from and low.acceptances == high.acceptances
    assert low.acceptances[-1]["speedup"] > 1.5
