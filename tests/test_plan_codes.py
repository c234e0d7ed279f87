"""The speed of quantised weights in the plan: as measured, and named where 16 bit is faster."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.config import ClusterConf, Dtype, GenerateConf, ModelConf, RunConf, Steps
from llama_ssp.models.families import FAMILIES
from llama_ssp.models.formats import kept
from llama_ssp.models.formats.kept import Headers, Kept
from llama_ssp.models.formats.quantised_config import QuantisedConfig
from llama_ssp.models.sizes import LAYER
from llama_ssp.planner.efficiency import efficiency_of, of_plain
from llama_ssp.planner.plan import make_plan
from llama_ssp.planner.resolve import choose_placement
from llama_ssp.planner.run_plan import predict, require_fit, warn_of_codes
from llama_ssp.planner.search import NOTABLE, PlanRequest
from llama_ssp.planner.speed import CodedCost, PassCost, Times, forward_s
from llama_ssp.planner.storage import CPU, LAYERS, Storage, Weight, sizes_of
from llama_ssp.planner.table import drawing
from llama_ssp.planner.weights import ModelPart, held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.report.tables import text_of
from tests.plans import cluster, machine, model

RESULTS = Path(__file__).parents[1] / "bench" / "results"
FILES = sorted(RESULTS.glob("coded_*.md"))
TIMES_OFF = 1.5  # in both directions
GAP = 0.1  # over 16 bit: which is faster must be known
OUTPUTS = INPUTS = 4096
# By the names of the measurement.
FORMATS = {
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
}
TOKENS = 1, 2, 5, 12, 64
BF16, TORCH, LLM_INT8 = "bf16", "bf16, torch's own", "int8, bitsandbytes"
MADE = {LLM_INT8: Dtype.int8, "nf4, bitsandbytes": Dtype.nf4}
GROUPS_OF_20 = {"int4, decoded for each product": Kept(4, 20, 2, "int4")}  # for which there is no kernel


def table_of(file: Path) -> list[list[str]]:
    lines = file.read_text(encoding="utf-8").split("```")[1].strip().splitlines()[1:]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def machine_with(bytes_per_s: float, products: Iterable[tuple[int, float]], numbers: int) -> Times:
    """No time but of products: (tokens, seconds), of which the fastest tells the operations a second."""
    rate = max(2 * numbers * tokens / spent for tokens, spent in products)
    return replace(machine("cpu").times, bytes_per_s=bytes_per_s, flops_per_s=rate, layer=0.0, step=0.0)


def measured(file: Path) -> tuple[Times, dict[str, list[float]]]:
    """A machine with the fastest reading and multiplication; and seconds of a product, for TOKENS."""
    found = {name: [1e-6 * float(each) for each in numbers[2:7]] for name, *numbers in table_of(file)}
    gb_s = float(re.findall(r"fastest reading was ([\d.]+) GB/s", file.read_text(encoding="utf-8"))[0])
    products = [one for times in found.values() for one in zip(TOKENS, times, strict=True)]
    return machine_with(1e9 * gb_s, products, OUTPUTS * INPUTS), found


def product_s(
    times: Times, tokens: int, dtype: Dtype, codes: Kept = kept.PLAIN, compiled: bool = True
) -> float:
    """As planned."""
    weight = Weight(LAYERS, OUTPUTS, INPUTS, linear=True, codes=codes)
    store = Storage(kernel=CPU, compiled=compiled)
    how, size = efficiency_of(weight, dtype, store), sum(bytes_ for _, bytes_ in sizes_of(weight, dtype))
    own = (CodedCost(size, weight.count, how),) if how else ()
    cost = PassCost(1, 0, size, 0.0, 2.0 * weight.count, 0, 0, 0, coded=own, share=of_plain(store))
    return forward_s(cost, times, 1, tokens, 0)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_products_take_as_long_as_measured(file: Path) -> None:
    """With memory of either speed; and the plan knows where 16 bit is faster."""
    times, found = measured(file)
    eager = replace(times, bytes_per_s=2 * OUTPUTS * INPUTS / min(found[TORCH])) if TORCH in found else times
    assert len(found) >= len(FORMATS) + 1
    for name, spent in found.items():
        ours = name not in (*MADE, TORCH)
        codes = {**FORMATS, **GROUPS_OF_20}.get(name, kept.PLAIN)
        dtype = MADE.get(name, Dtype.packed if codes.bits else Dtype.bf16)
        for number, tokens in enumerate(TOKENS):
            here, wide = (times, found[BF16]) if ours else (eager, found[TORCH])
            planned = product_s(here, tokens, dtype, codes, ours)
            planned_wide = product_s(here, tokens, Dtype.bf16, compiled=ours)
            ratio, over = planned / planned_wide, spent[number] / wide[number]
            assert 1 / TIMES_OFF < planned / spent[number] < TIMES_OFF, (name, tokens)
            assert abs(over - 1) < GAP or (ratio > 1 + NOTABLE) == (over > 1), (name, tokens)


def test_eight_bit_of_bitsandbytes_takes_as_long_as_measured() -> None:
    """Beside torch's product in 16 bit."""
    rows = table_of(RESULTS / "linear_epyc-2-cores_202611.md")
    found = {int(tokens): [1e-3 * float(each) for each in others[:4]] for tokens, *others in rows}
    numbers = 206_000_000
    products = [(tokens, ours) for tokens, (_, _, ours, _) in found.items()]
    times = machine_with(2 * numbers / found[1][0], products, numbers)
    for tokens, (plain, _, _, spent) in found.items():
        planned, wide = (
            numbers / (OUTPUTS * INPUTS) * product_s(times, tokens, dtype, compiled=False)
            for dtype in (Dtype.int8, Dtype.bf16)
        )
        assert 1 / TIMES_OFF < planned / spent < TIMES_OFF, tokens
        assert abs(spent / plain - 1) < GAP or (planned > wide) == (spent > plain), tokens


def awq(outputs: int, inputs: int) -> Headers:
    words, groups = outputs // 8, inputs // 128
    return {
        ".qweight": ("I32", (inputs, words)), ".qzeros": ("I32", (groups, words)),
        ".scales": ("F16", (groups, outputs)),
    }  # fmt: skip


def w4a16(outputs: int, inputs: int) -> Headers:
    return {
        ".weight_packed": ("I32", (outputs, inputs // 8)), ".weight_shape": ("I64", (2,)),
        ".weight_scale": ("BF16", (outputs, inputs // 128)),
    }  # fmt: skip


def fp8_blocks(outputs: int, inputs: int) -> Headers:
    scales = -(-outputs // 128), -(-inputs // 128)
    return {".weight": ("F8_E4M3", (outputs, inputs)), ".weight_scale_inv": ("BF16", scales)}


def fp8_rows(outputs: int, inputs: int) -> Headers:
    return {".weight": ("F8_E4M3", (outputs, inputs)), ".weight_scale": ("BF16", (outputs, 1))}


AWQ = QuantisedConfig("awq", "awq", 4, 128, True)
COMPRESSED = QuantisedConfig("compressed-tensors", "compressed-tensors")
FINE = QuantisedConfig("fp8", "fp8", 8, 128, block=(128, 128))
PRESETS = {
    "qwen3-8b-awq": (awq, AWQ), "qwen3-32b-awq": (awq, AWQ), "llama3.1-70b-awq": (awq, AWQ),
    "qwen2.5-72b-awq": (awq, AWQ), "llama3.1-8b-int4": (w4a16, COMPRESSED),
    "qwen3-8b-fp8": (fp8_blocks, FINE), "qwen3-32b-fp8": (fp8_blocks, FINE),
    "llama3.3-70b-fp8": (fp8_rows, COMPRESSED),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_bytes_of_its_repositorys_headers(name: str) -> None:
    """On each of 1, 3 and 8 ranks, as they are in files and as kernels keep them."""
    write, config = PRESETS[name]
    known = model(name)
    width, keys = known.n_heads * known.head_dim, known.n_kv_heads * known.head_dim
    matrices = {
        "self_attn.q_proj": (width, known.dim), "self_attn.k_proj": (keys, known.dim),
        "self_attn.v_proj": (keys, known.dim), "self_attn.o_proj": (known.dim, width),
        "mlp.gate_proj": (known.ffn, known.dim), "mlp.up_proj": (known.ffn, known.dim),
        "mlp.down_proj": (known.dim, known.ffn),
    }  # fmt: skip
    headers = {
        f"model.layers.{layer}.{matrix}{end}": header
        for layer in range(known.n_layers) for matrix, shape in matrices.items()
        for end, header in write(*shape).items()
    }  # fmt: skip
    inputs = dict.fromkeys(kept.MATRICES, known.dim) | {"attn_output": width, "ffn_down": known.ffn}
    names = kept.names_of(FAMILIES[known.family].names)
    found = kept.sizes(kept.of_folder(headers, config, names, inputs, LAYER))
    assert {**found, "code_mix": ""} == {key: getattr(known, key) for key in found}
    assert found["code_mix"].count(f":{known.n_layers}:") == 4
    exact = replace(known, **found)
    for store in (Storage(), Storage(kernel=CPU, compiled=True)):
        for world in (1, 3, 8):
            for rank in (0, world - 1):
                parts = (ModelPart.of(each, world, rank) for each in (known, exact))
                assert len({sum(held(part, Dtype.packed, store).values()) for part in parts}) == 1


def packed(table: str, bits: int, group: int = 64) -> ModelConf:
    sizes = {"code_bits": bits, "code_group": group, "code_bytes": 4}
    words = "attn_q+attn_k+attn_v attn_output ffn_gate+ffn_up ffn_down"
    mix = " ".join(f"{names}:32:{bits}:{group}:4:{table}" for names in words.split())
    return replace(model("7B"), dtype=Dtype.packed, code_mix=mix, **sizes)


def asked(target: ModelConf, k: int, draft: ModelConf | None = None, **changes: object) -> PlanRequest:
    """On a CPU with the memory of a measurement."""
    here, (found, _) = machine("cpu", gib=64.0), measured(FILES[0])
    own = replace(here.times, bytes_per_s=found.bytes_per_s, flops_per_s=found.flops_per_s)
    here = replace(here, times=own)
    role = Role(TARGET, target, target.dtype)
    drafter = Role(DRAFT, draft, draft.dtype) if draft else None
    work = Workload(1, 512, 128, k)
    return PlanRequest(
        here, role, drafter, work, 0.8, k, draft is None and k > 0, engine=Steps.compiled, **changes
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
    request = replace(asked(packed(table, bits, group), k), acceptance=1.0)  # so K is the largest
    plan = make_plan(request)
    said = any("slower than bf16 here" in line for line in text_of(drawing(plan)))
    assert plan.chosen.k == k and bool(plan.slower) == slower == said
    assert plan.document()["best"]["slower_than_16_bit"] == plan.slower
    assert not slower or plan.slower["model"] > 1.05


@pytest.mark.parametrize(
    ("dtype", "rows", "lines"),
    [(Dtype.nf4, 4, 0), (Dtype.int8, 4, 1), (Dtype.int8, 1, 0), (Dtype.bf16, 4, 0)],
)
def test_a_run_warns_once(dtype: Dtype, rows: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """bitsandbytes' layers on a CPU."""
    conf = RunConf(
        model=replace(model("7B"), dtype=dtype), draft=None, cluster=cluster("cpu", gib=64.0),
        engine=Steps.eager, task=GenerateConf(name="generate", max_new_tokens=128, batch_size=rows),
    )  # fmt: skip
    assert isinstance(conf.cluster, ClusterConf)
    prediction = predict(conf, choose_placement(conf, 1), slots=640)
    assert prediction is not None
    with caplog.at_level(logging.WARNING):
        require_fit(prediction, enforce=True)
        warn_of_codes(prediction)
    said = [line for line in caplog.messages if "slower than bf16" in line]
    assert len(said) == lines == sum(f"model.dtype={dtype.value} saves memory" in line for line in said)


def test_when_a_draft_of_the_targets_own_weights_pays() -> None:
    """From some acceptance on; never for a target that has as few bytes itself."""
    wide = replace(model("7B"), dtype=Dtype.bf16)
    four, eight = (
        make_plan(asked(wide, 8, replace(wide, dtype=dtype))) for dtype in (Dtype.int4, Dtype.int8)
    )
    assert four.pays_from is not None and eight.pays_from is not None
    assert 0.25 < four.pays_from < eight.pays_from < 0.8 and four.speedup > 1.2
    own = packed("int4", 4)
    same = make_plan(asked(own, 8, replace(own, dtype=Dtype.int4)))
    assert same.pays_from is None or same.pays_from > 0.95
    assert "drafting does not pay" in same.sentence()
