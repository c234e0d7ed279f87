"""The speed of quantised weights in the plan: as measured, and named where 16 bit is faster."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.config import ClusterConf, Dtype, GenerateConf, ModelConf, RunConf, Steps
from llama_ssp.models.checkpoint import LAYER
from llama_ssp.models.families import FAMILIES
from llama_ssp.models.formats import kept
from llama_ssp.models.formats.gguf_model import leaves
from llama_ssp.models.formats.kept import Headers, Kept
from llama_ssp.models.formats.quantised_config import QuantisedConfig
from llama_ssp.planner.efficiency import efficiency_of
from llama_ssp.planner.plan import make_plan
from llama_ssp.planner.resolve import choose_placement
from llama_ssp.planner.run_plan import predict, require_fit, warn_of_codes
from llama_ssp.planner.search import PlanRequest
from llama_ssp.planner.speed import CodedCost
from llama_ssp.planner.storage import CPU, LAYERS, Store, Weight, sizes_of
from llama_ssp.planner.table import drawing
from llama_ssp.planner.weights import Part, held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.report.tables import text_of
from tests.plans import cluster, machine, model

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "coded_epyc-2-cores_202611.md"
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


def measured() -> tuple[float, dict[str, list[float]]]:
    """Bytes a second, and microseconds of a layer by its format, for TOKENS."""
    text = RESULTS.read_text(encoding="utf-8")
    bandwidth = float(re.findall(r"fastest reading was ([\d.]+) GB/s", text)[0])
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.split("```")[1].strip().splitlines()[1:]]
    return 1e9 * bandwidth, {name: [float(n) for n in numbers[2:7]] for name, *numbers in rows}


def test_products_take_as_long_as_measured() -> None:
    """Of the machine's figures: reading, and the operations of 64 tokens in 16 bit."""
    bandwidth, found = measured()
    flops = 2 * OUTPUTS * INPUTS * 64 / found["bf16"][-1] * 1e6
    times = replace(machine("cpu").times, bytes_per_s=bandwidth, flops_per_s=flops)
    for name, codes in FORMATS.items():
        weight = Weight(LAYERS, OUTPUTS, INPUTS, linear=True, codes=codes)
        how = efficiency_of(weight, Dtype.packed, Store(kernel=CPU))
        assert how is not None
        size = sum(bytes_ for _, bytes_ in sizes_of(weight, Dtype.packed))
        own = CodedCost(size, weight.count, how)
        for tokens, spent in zip(TOKENS, found[name], strict=True):
            assert 1e6 * own.seconds(times, tokens) == pytest.approx(spent, rel=0.35), (name, tokens)


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
    names = {own: theirs for theirs, own in leaves(FAMILIES[known.family]).items() if theirs in kept.MATRICES}
    found = kept.sizes(kept.of_folder(headers, config, names, inputs, LAYER))
    assert {**found, "code_mix": ""} == {key: getattr(known, key) for key in found}
    assert found["code_mix"].count(f":{known.n_layers}:") == 4
    exact = replace(known, **found)
    for store in (Store(), Store(kernel=CPU, compiled=True)):
        for world in (1, 3, 8):
            for rank in (0, world - 1):
                parts = (Part.of(each, world, rank) for each in (known, exact))
                assert len({sum(held(part, Dtype.packed, store).values()) for part in parts}) == 1


def packed(table: str, bits: int, group: int = 64) -> ModelConf:
    sizes = {"code_bits": bits, "code_group": group, "code_bytes": 4}
    words = "attn_q+attn_k+attn_v attn_output ffn_gate+ffn_up ffn_down"
    mix = " ".join(f"{names}:32:{bits}:{group}:4:{table}" for names in words.split())
    return replace(model("7B"), dtype=Dtype.packed, code_mix=mix, **sizes)


def asked(target: ModelConf, k: int, draft: ModelConf | None = None, **changes: object) -> PlanRequest:
    """On a CPU with the memory of the measurement."""
    here = machine("cpu", gib=64.0)
    bandwidth, found = measured()
    flops = 2 * OUTPUTS * INPUTS * 64 / found["bf16"][-1] * 1e6
    here = replace(here, times=replace(here.times, bytes_per_s=bandwidth, flops_per_s=flops))
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


@pytest.mark.parametrize(("dtype", "lines"), [(Dtype.nf4, 1), (Dtype.int8, 1), (Dtype.bf16, 0)])
def test_a_run_warns_once(dtype: Dtype, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """bitsandbytes' layers on a CPU."""
    conf = RunConf(
        model=replace(model("7B"), dtype=dtype), draft=None, cluster=cluster("cpu", gib=64.0),
        engine=Steps.eager, task=GenerateConf(name="generate", max_new_tokens=128, batch_size=1),
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
