"""The memory of each rank, and the cases in which others say "it fits" and then run out of memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llama_ssp.config import Dtype, ModelConf, PlacementConf, Splitting, Steps
from llama_ssp.distributed.placement import Placement, resolve
from llama_ssp.errors import DistributedError
from llama_ssp.models import synthetic
from llama_ssp.models.assemble import wanted
from llama_ssp.models.checkpoint import outlined
from llama_ssp.models.device_map import spread_of
from llama_ssp.models.families import FAMILIES
from llama_ssp.models.formats import kept
from llama_ssp.models.formats.quantised_config import QuantisedConfig
from llama_ssp.models.graph_sizes import BUCKET
from llama_ssp.models.kernels.kernel_sizes import DECODED
from llama_ssp.models.model_config import empty
from llama_ssp.models.sizes import LAYER
from llama_ssp.models.tensor_row import EMBEDDING, HEAD, LAYERS
from llama_ssp.models.wrapped import text_part
from llama_ssp.placing.prediction import HOST_BYTES, Prediction, require_host
from llama_ssp.planner import fit
from llama_ssp.planner.activations import GPU, Kernels, decoded_bytes
from llama_ssp.planner.fit import LIBRARIES, OUTPUTS, SCRATCH, FitVerdict, RankMemory
from llama_ssp.planner.memory import PROBS, RankWork, peaks, rank_work, segments, tensor_lines
from llama_ssp.planner.search import PlanRequest, option
from llama_ssp.planner.storage import CUDA, UNIT, WEIGHTS, Storage
from llama_ssp.planner.weights import ModelPart, RolePart, held, parameters
from llama_ssp.planner.workload import BOUND, DRAFT, GIB, MIB, TARGET, MemoryLine, Role, Workload
from tests.conftest import Command
from tests.distributed.test_large import part
from tests.plans import CPU, P4D, alone, machine, model, named, request, shapes, stepping
from tests.published_configs import CONFIGS

WORK = Workload(rows=1, prompt_tokens=1920, new_tokens=128, k=4, prefill_chunk=512)
REGULAR = replace(WORK, k=0)
ONE, WHOLE = machine("p4d", gpus=1), named("target 0, draft 0 (whole)", 1)
BY_LAYERS = resolve(PlacementConf(splitting=Splitting.layers), 1, drafts=False)


def role(name: str, size: str, dtype: Dtype = Dtype.fp16, **changes: Any) -> Role:
    return Role(name, model(size, **changes), dtype)


def placed(target: int, draft: int = 0, copies: bool = False) -> Placement:
    return Placement(Splitting.tensor, target, tuple(range(target)), tuple(range(draft)), copies)


LARGE, SMALL = role(TARGET, "65B"), role(DRAFT, "7B")


def lines_of(*what: Any) -> tuple[MemoryLine, ...]:
    return tensor_lines(rank_work(*what))


def total(
    target: Role, draft: Role | None, placement: Placement, work: Workload = WORK, rank: int = 0
) -> int:
    return sum(line.bytes for line in lines_of(target, draft, placement, work, rank))


def cache(target: Role, world: int, rank: int) -> int:
    lines = lines_of(target, None, placed(world), REGULAR, rank)
    return next(line.bytes for line in lines if line.name == "cache")


def phase_bytes(*what: Any) -> dict[str, int]:
    return {phase: sum(parts.values()) for phase, parts in peaks(rank_work(*what)).items()}


def weight_bytes(part: ModelPart, dtype: Dtype, *what: Any) -> int:
    return sum(held(part, dtype, *what).values())


@pytest.mark.few(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", shapes())
def test_every_preset_holds_what_the_real_model_holds(name: str) -> None:
    """Parameters and bytes, buffers included, of the decoder, on meta."""
    made = part(model(name), 1, 0)[0].decoder
    once = {p.untyped_storage()._cdata: p for p in (*made.parameters(), *made.buffers())}.values()
    own = {p.untyped_storage()._cdata: p for p in made.parameters()}.values()
    assert parameters(model(name)) == sum(p.numel() for p in own)
    assert weight_bytes(ModelPart.of(model(name)), Dtype.bf16) == sum(p.nbytes for p in once)


GEMMA4 = ("google/gemma-4-26B-A4B", "nvidia/Gemma-4-31B-IT-NVFP4", "google/gemma-4-12B-it")


@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", GEMMA4)
def test_heads_of_two_kinds_are_planned_to_the_byte(name: str, world: int, tmp_path: Path) -> None:
    """Of published configs: weights, buffers and caches of the first and the last rank, on meta."""
    content = {key: value for key, value in CONFIGS[name].config.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    conf = outlined(ModelConf(name="made", path=str(tmp_path)), "model")
    if world == 1:
        config = CONFIG_MAPPING[conf.family].from_dict(text_part(content))
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        assert parameters(conf) == sum(p.numel() for p in module.parameters())

    for rank in {0, world - 1}:
        made = part(conf, world, rank)[0].decoder
        once = {p.untyped_storage()._cdata: p for p in (*made.parameters(), *made.buffers())}.values()
        own = ModelPart.of(conf, world, rank)
        assert weight_bytes(own, Dtype.bf16) == sum(p.nbytes for p in once)
        numbers = sum(2 * heads * size for heads, size in made.cache_shapes)
        planned = RolePart.of(Role(TARGET, conf, Dtype.bf16), own, 100)
        assert planned.caches_bytes(rows=3) == 2 * 3 * 100 * numbers


def test_an_uneven_split_is_counted_by_its_largest_part() -> None:
    """30B over 8: seven heads on four ranks, six on the others, as published: 7.765 and 7.385 GiB."""
    parts = [ModelPart.of(model("30B"), 8, rank) for rank in range(8)]
    assert [round(weight_bytes(part, Dtype.fp16) / GIB, 3) for part in parts] == [7.765] * 4 + [7.385] * 4
    first, last = (cache(role(TARGET, "30B"), 8, rank) for rank in (0, 7))
    assert first * 6 == last * 7
    few_keys = role(TARGET, "65B", n_kv_heads=4)  # over more ranks than there are, each is on two
    assert sum(cache(few_keys, 8, rank) for rank in range(8)) == 2 * cache(few_keys, 1, 0)


def test_the_draft_is_counted() -> None:
    """vLLM #9995: 70B over 4 GPUs "fits" until an 8B draft on one of them is loaded."""
    without, unsharded = total(LARGE, None, placed(8), REGULAR), total(LARGE, SMALL, placed(8, 1))
    leader, last = (total(LARGE, SMALL, placed(8, 8), rank=rank) for rank in (0, 7))
    assert unsharded - without > 12.5 * GIB
    assert last - without < 1.75 * GIB
    embedding = 2 * 32000 * 4096
    assert 0.8 * embedding < leader - last < 1.2 * embedding, "the leader looks up for all"
    other = total(LARGE, SMALL, placed(8, 1), rank=1)
    assert other < without + GIB, "only the rank that holds the draft pays for it"
    copy, share = (total(LARGE, SMALL, placed(4, 4, copies), rank=3) for copies in (True, False))
    assert copy - share > 0.74 * weight_bytes(ModelPart.of(SMALL.model), Dtype.fp16)


def test_a_draft_apart_is_on_its_own_ranks() -> None:
    apart = Placement(Splitting.tensor, 8, tuple(range(6)), (6, 7))
    assert {line.role for line in lines_of(LARGE, SMALL, apart, WORK, 7)} == {DRAFT}
    assert {line.role for line in lines_of(LARGE, SMALL, apart, WORK, 5)} == {TARGET}
    leader = peaks(rank_work(LARGE, SMALL, apart, WORK, 0))["verify"]
    assert leader["laws"] > 4 * 32000 * 4, "who decides has the draft's laws"


def test_quantising_while_loading_needs_more_than_the_result() -> None:
    """torchao's README: a 7B in 8 bit peaks 2 GB above what it holds. Ours holds one layer in 16 bit."""
    found = phase_bytes(
        role(TARGET, "7B", Dtype.int8),
        None,
        placed(1),
        Workload(rows=1, prompt_tokens=8, new_tokens=8, k=0),
        0,
    )
    caches = 2 * 32 * 16 * 4096 * 2
    assert found["load"] == max(found.values()) == 2 * 2 * 4096 * 11008 - caches


def test_eight_bit_has_a_workspace() -> None:
    """int8 products are summed in 32 bit before they are 16 bit again."""
    work = replace(REGULAR, prompt_tokens=1024, prefill_chunk=1024)
    narrow, wide = (
        phase_bytes(role(TARGET, "7B", dtype), None, placed(1), work, 0) for dtype in (Dtype.int8, Dtype.bf16)
    )
    assert narrow["prefill"] > wide["prefill"] + 1023 * 11008 * 4


def test_what_is_too_large_is_refused_without_a_plan() -> None:
    """What is checked where nothing else can be planned: weights and caches of the whole models."""
    roles = [(role(TARGET, "7B"), 1), (SMALL, 1)]
    whole = weight_bytes(ModelPart.of(SMALL.model), Dtype.fp16) + 2 * 32 * 4096 * 2 * WORK.slots
    fit.require_capacity(roles, 1, WORK.slots, "cuda:0", 2 * whole, 0.0)
    with pytest.raises(DistributedError, match=r"model 7B: weights 12\.6 GiB, cache 1\.0 GiB; draft 7B"):
        fit.require_capacity(roles, 1, WORK.slots, "cuda:0", 2 * whole - 1, 0.0)


def test_a_run_without_a_plan_leaves_the_reserve_free(command: Command) -> None:
    """By layers the draft's weights and cache are compared alone: they fit in 2 MiB, not in a tenth of it."""
    words = ("placement=layers", "prompt=x", "task.max_new_tokens=2", "seed=1", "out=null")
    words += ("cluster.gib=0.002",)
    assert command(*words, "cluster.reserve=0").code == 0
    refused = command(*words, "cluster.reserve=0.9")
    assert refused.code == 5 and "do not fit on cpu; draft tiny_draft" in refused.errors[0]
    assert "less 90% reserve" in refused.errors[0]


def test_what_deepspeed_splits_is_counted_by_its_part() -> None:
    """70B over four GPUs of 80 GB: all of it was compared with one of them."""
    large, gib = role(TARGET, "llama3.1-70b", Dtype.bf16), 79 * GIB
    fit.require_capacity([(large, 4)], 1, 2048, "cuda:0", gib, 0.1)
    with pytest.raises(DistributedError, match=r"weights 131\.4 GiB.*found 132\.0 GiB needed"):
        fit.require_capacity([(large, 1)], 1, 2048, "cuda:0", gib, 0.1)
    with pytest.raises(DistributedError, match=r"on the host; model llama3.1-70b: [^;]*; found 525\.7 GiB"):
        fit.require_capacity([(large, 1)] * 4, 0, 1, "the host", 512 * GIB, 0.1)


def test_experts_in_codes_are_decoded_within_a_bound() -> None:
    """Those that no kernel reads: pairs of a chunk, but few matrices at once, or one that is larger."""

    def decoded(tokens: int, kernels: Kernels = GPU, group: int = 16, ffn: int = 14336) -> int:
        mix = f"expert_gate+expert_up:32:4:{group}:3:uint4 expert_down:32:4:{group}:3:uint4"
        sizes = {"experts": 8, "experts_per_token": 2, "expert_ffn": ffn, "dense_layers": 0}
        moe = role(TARGET, "mistral-7b", Dtype.packed, family="mixtral", code_bits=4, code_mix=mix, **sizes)
        own = RolePart.of(moe, ModelPart.of(moe.model), 600)
        return decoded_bytes(own, kernels, tokens)

    one, dense = 2 * 14336 * 4096 * 2, 6144 * 4096 * 2
    for tokens in (1, 18, 512):
        assert decoded(tokens) == one
        assert decoded(tokens, group=128) == decoded(tokens, Kernels(cpu=True)) == dense
    assert decoded(512, ffn=256) == 2 * DECODED
    assert decoded(10, ffn=256) == 2 * 20 * 512 * 4096


def headers(layout: str, outputs: int, inputs: int) -> kept.Headers:
    """What the files of a repository say of one matrix."""
    words, groups, scales = outputs // 8, inputs // 128, (-(-outputs // 128), -(-inputs // 128))
    codes = "F8_E4M3", (outputs, inputs)
    packed, shape, wide = ("I32", (outputs, inputs // 8)), ("I64", (2,)), ("BF16", (outputs, groups))
    zeros, factors = ("I32", (groups, words)), ("F16", (groups, outputs))
    return {
        "awq": {".qweight": ("I32", (inputs, words)), ".qzeros": zeros, ".scales": factors},
        "w4a16": {".weight_packed": packed, ".weight_shape": shape, ".weight_scale": wide},
        "blocks": {".weight": codes, ".weight_scale_inv": ("BF16", scales)},
        "rows": {".weight": codes, ".weight_scale": ("BF16", (outputs, 1))},
    }[layout]


AWQ = QuantisedConfig(method="awq", name="awq", bits=4, group=128, zeros=True)
COMPRESSED = QuantisedConfig(method="compressed-tensors", name="compressed-tensors")
FINE = QuantisedConfig(method="fp8", name="fp8", bits=8, group=128, block=(128, 128))
QUANTISED = {
    **dict.fromkeys(("qwen3-8b-awq", "qwen3-32b-awq", "llama3.1-70b-awq", "qwen2.5-72b-awq"), ("awq", AWQ)),
    **dict.fromkeys(("qwen3-8b-fp8", "qwen3-32b-fp8"), ("blocks", FINE)),
    "llama3.1-8b-int4": ("w4a16", COMPRESSED),
    "llama3.3-70b-fp8": ("rows", COMPRESSED),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_a_preset_has_the_bytes_of_its_repositorys_headers(name: str) -> None:
    layout, config = QUANTISED[name]
    known = model(name)
    files = {
        f"{matrix.removesuffix('.weight')}{end}": header
        for matrix, shape in wanted(synthetic.config_for(known)).items()
        if ".layers." in matrix and len(shape) == 2
        for end, header in headers(layout, *shape).items()
    }
    inputs = dict.fromkeys(kept.MATRICES, known.dim)
    inputs |= {"attn_output": known.n_heads * known.head_dim, "ffn_down": known.ffn}
    names = kept.names_of(FAMILIES[known.family].names)
    found = kept.sizes(kept.of_folder(files, config, names, inputs, LAYER))
    assert {**found, "code_mix": ""} == {key: getattr(known, key) for key in found}
    assert found["code_mix"].count(f":{known.n_layers}:") == 4


def test_pages_of_segments_are_counted() -> None:
    """And a share of what passes through."""
    work = rank_work(LARGE, None, placed(8), REGULAR, 0)
    line, passing = segments(work), max(sum(parts.values()) for parts in peaks(work).values())
    assert line.kind == BOUND and line.bytes == 22 * MIB + int(1.4 * passing) - passing


@pytest.mark.parametrize(
    ("words", "world", "counts"),
    [
        ("target 0, draft 0 (whole)", 1, [0]),
        ("target 0-3, draft 0-3 (split)", 4, [1] * 4),
        ("target 0-3, draft 0,1 (split)", 4, [2, 2, 1, 1]),
        ("target 0-2, draft 3,4 (own)", 5, [1] * 5),
        ("target 0-2, draft 3 (own)", 4, [1, 1, 1, 0]),
    ],
    ids=["whole", "split", "split over two", "own", "one of its own"],
)
def test_communicators_are_counted(words: str, world: int, counts: list[int]) -> None:
    """Every communicator takes its own: nccl issue 864. Only ranks that share a model have one."""
    assert [fit.communicators(named(words, world), rank) for rank in range(world)] == counts


def test_verdict() -> None:
    for needed, capacity, verdict in (
        (10.0, 11.0, FitVerdict.fits),
        (10.0, 10.2, FitVerdict.uncertain),
        (10.0, 9.8, FitVerdict.uncertain),
        (10.0, 9.0, FitVerdict.does_not_fit),
        (40.0, 41.0, FitVerdict.uncertain),  # 3 % of a large estimate
        (0.0, 0.0, FitVerdict.uncertain),
    ):
        line = MemoryLine(TARGET, "layers", int(needed * GIB))
        assert RankMemory(0, (line,), int(capacity * GIB)).verdict is verdict


def graphs_of(memory: RankMemory) -> tuple[float, dict[str, int]]:
    """How many graphs of 25 MiB are counted, and what those of each role keep."""
    constant = sum(
        line.bytes for line in memory.lines if line.name.endswith("CUDA graphs") and line.role == LIBRARIES
    )
    return constant / (25 * MIB), {line.role: line.bytes for line in memory.lines if line.name == OUTPUTS}


@pytest.mark.parametrize(
    ("count", "target_tokens", "draft_tokens", "work"),
    [
        (9, 83, 83, {"k": 4}),
        (18, 83, 83, {"k": 4, "target_caches": 2, "draft_caches": 2}),
        (36 + 36, 515, 515, {"k": 64, "rows": 1000}),  # no graph has more than 512 tokens
    ],
    ids=["one cache", "two caches", "many rows"],
)
def test_graphs_are_counted(count: int, target_tokens: int, draft_tokens: int, work: dict[str, int]) -> None:
    """One for each size of a step in each cache, and one of prompts; the logits of the largest are kept.

    So are those of the first two steps, of one and two tokens (test_graphs.py).
    """
    on = request("7B", "7B", ONE, **work)
    kept_bytes = {"model": target_tokens * 32000 * 4, "draft": draft_tokens * 32000 * 4}
    for same in (on, stepping(on, Steps.auto)):
        assert graphs_of(same.memories(WHOLE, on.work)[0]) == (count, kept_bytes)
    for none in (stepping(on, Steps.eager), replace(on, machine=CPU)):
        assert graphs_of(none.memories(WHOLE, on.work)[0]) == (0, {})


def test_graphs_next_to_a_head_are_the_targets() -> None:
    on = request("7B", "7B", ONE)
    head = role(DRAFT, "7B", Dtype.bf16, head_inputs=3 * 4096, head_vocab=32000)
    (memory,) = replace(on, draft=head).memories(WHOLE, on.work)
    assert graphs_of(memory) == (6, {"model": 83 * (32000 + 3 * 4096) * 4})


PLENTY = 10**13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "dtype"),
    [
        ("7B", 4, Dtype.bf16), ("llama2-70b", 8, Dtype.bf16), ("llama3.1-8b", 3, Dtype.bf16),
        ("qwen2.5-0.5b", 3, Dtype.bf16), ("gemma2-2b", 4, Dtype.bf16), ("65B", 4, Dtype.int8),
        ("65B", 4, Dtype.nf4), ("gpt-neo-1.3b", 2, Dtype.bf16), ("gpt-neox-20b", 4, Dtype.fp16),
    ],
)  # fmt: skip
def test_accelerate_deals_out_no_more_layers_than_are_planned(name: str, gpus: int, dtype: Dtype) -> None:
    """By its own function, on the module of this preset."""
    conf = model(name)
    with torch.device("meta"):
        module: Any = empty(synthetic.config_for(conf), torch.bfloat16)
    spread = spread_of(module, dtype, {**dict.fromkeys(range(gpus), PLENTY), "cpu": PLENTY})
    layers = dict.fromkeys(range(gpus), 0)
    for part_name, gpu in spread.items():
        layers[int(gpu)] += part_name.rpartition(".")[2].isdecimal()  # of model.layers.7
    assert sum(layers.values()) == conf.n_layers

    memories = request(name, None, machine("p4d", gpus=gpus), dtype=dtype).memories(BY_LAYERS, WORK)
    whole = held(ModelPart.of(conf), dtype, Storage(UNIT, CUDA))[LAYERS]
    for memory in memories:
        (planned,) = [line.bytes for line in memory.lines if line.name == LAYERS]
        assert layers[memory.rank] * whole <= (planned + 1) * conf.n_layers, memory.rank


@pytest.mark.parametrize("name", ["7B", "gemma2-2b", "gpt-neo-1.3b"])
@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.nf4])
@pytest.mark.parametrize("gpus", [1, 3, 4])
def test_together_the_gpus_hold_the_model(name: str, dtype: Dtype, gpus: int) -> None:
    """All layers, and some more; the first holds the embedding, the last the head."""
    on = request(name, None, machine("p4d", gpus=gpus), dtype=dtype)
    whole = held(ModelPart.of(on.target.model), dtype, Storage(UNIT, CUDA))
    memories = on.memories(BY_LAYERS, on.work)
    found = [{line.name: line.bytes for line in memory.lines if line.name in WEIGHTS} for memory in memories]
    assert len(found) == gpus
    layers = [sizes[LAYERS] for sizes in found]
    assert sum(layers) >= whole[LAYERS] - gpus
    if name == "7B":  # where an embedding is large, GPUs without it may have many layers more
        assert sum(layers) <= whole[LAYERS] * (1 + 2 * gpus / on.target.model.n_layers)
    assert found[0][EMBEDDING] == whole[EMBEDDING]
    if HEAD in whole:
        assert found[-1][HEAD] == whole[HEAD] and sum(HEAD in sizes for sizes in found) == 1


@pytest.fixture(scope="module")
def over_two() -> tuple[PlanRequest, Placement, RankMemory, RankMemory]:
    """A pair by layers over two GPUs: what is asked for, the placement, and the memory of both GPUs."""
    on = request("13B", "7B", machine("p4d", gpus=2))
    place = resolve(PlacementConf(splitting=Splitting.layers), 1, drafts=True)
    first, second = option(on, place).ranks
    return on, place, first, second


def test_by_layers_the_draft_is_on_the_first_gpu(over_two: Any) -> None:
    _, _, first, second = over_two
    assert {line.role for line in second.lines} == {"model", "libraries"}
    assert any(line.role == "draft" for line in first.lines)
    assert not any(line.name.startswith("laws") for line in second.lines)
    assert first.total - second.total > 13 * 10**9


def test_by_layers_the_draft_alone_has_graphs(over_two: Any) -> None:
    on, place, first, second = over_two
    assert on.draft is not None and on.why_eager(on.draft, place) is None
    assert on.why_eager(on.target, place) == "placement.splitting=layers"
    assert graphs_of(first) == (3, {"draft": 83 * 32000 * 4}) and graphs_of(second) == (0, {})


def test_what_passes_through_a_full_gpu_is_counted() -> None:
    """accelerate #608: a device_map that fills the cards runs with one row, and out of memory with eight."""
    card = machine("p4d", gpus=2, gib=17.0)
    few, many = (
        option(request("13B", None, card, rows=rows, prompt_tokens=1900), BY_LAYERS) for rows in (1, 8)
    )
    assert few.verdict is FitVerdict.fits and many.verdict is FitVerdict.does_not_fit
    weights = [sum(line.bytes for line in gpu.lines if line.name in WEIGHTS) for gpu in many.ranks]
    assert max(weights) < 14 * GIB, "by weights alone it would fit"


def test_by_layers_one_gpu_computes_at_a_time() -> None:
    """As long as a pass on one GPU takes; and with one GPU it holds what that holds."""
    many = stepping(request("7B", None, P4D), Steps.eager)
    assert option(many, BY_LAYERS).ms_per_token == option(many, alone(1)).ms_per_token
    single = replace(many, machine=ONE)
    assert option(single, BY_LAYERS).worst.total == option(single, alone(1)).worst.total


def ranks_work(pair: tuple[str, str], rows: int, place: Placement, rank: int = 0) -> RankWork:
    """A rank's work with compiled steps of both roles, K = 8."""
    on = request(*pair, P4D, k=8, rows=rows)
    return rank_work(on.target, on.draft, place, on.work, rank, GPU, (TARGET, DRAFT))


@pytest.mark.parametrize(("rows", "mib"), [(1, 187), (8, 343), (56, 873)])
def test_graphs_hold_their_scratch_for_good(rows: int, mib: int) -> None:
    """Of both models; with few rows that of a short prompt is larger. None where steps are eager."""
    work = ranks_work(("llama3.1-8b", "llama3.2-1b"), rows, WHOLE)
    found = sum(map(work.scratch_of_graphs, work.roles))
    assert found / MIB == pytest.approx(mib, abs=1)
    on = request("llama3.1-8b", "llama3.2-1b", ONE, k=8, rows=rows)
    said, unsaid = (
        [line.bytes for line in each.memories(WHOLE, on.work)[0].lines if line.name == SCRATCH]
        for each in (on, stepping(on, Steps.eager))
    )
    assert (sum(said), unsaid) == (found, [])


@pytest.mark.parametrize(("rows", "prompt"), [(1, 127), (1, 383), (3, 500), (8, 512)])
def test_caches_of_graphs_are_of_whole_buckets(rows: int, prompt: int) -> None:
    """As `GraphedModel.new_cache` makes them; those of eager steps are not."""
    on = request("7B", None, ONE, rows=rows, prompt_tokens=prompt, k=0)
    for compiled in ((TARGET,), ()):
        own = rank_work(on.target, None, alone(1), on.work, 0, GPU, compiled).target
        slots = rows * (prompt + 128)
        if compiled:
            slots = -(-(slots + 1) // BUCKET) * BUCKET
        assert own is not None and own.caches_bytes(rows) == 32 * 2 * slots * 4096 * 2, compiled


@pytest.mark.parametrize(("rows", "mib"), [(1, 4), (8, 31), (64, 250)])
def test_a_draft_on_ranks_of_its_own_holds_the_next_proposal(rows: int, mib: int) -> None:
    """Beside the one that it sends; a draft with the target does not."""
    pair = "llama3.1-70b", "llama3.2-1b"
    apart = ranks_work(pair, rows, Placement(Splitting.tensor, 3, (0, 1), (2,)), 2)
    found, other = (work.peaks()["draft"][PROBS] for work in (apart, replace(apart, target=apart.draft)))
    assert (found - other) / MIB == pytest.approx(mib, abs=1)


def test_the_hosts_memory_is_compared_too() -> None:
    """What 64 rows send from a draft of its own is 753 MiB at each end; weights are staged twice."""
    on = request("llama3.1-70b", "llama3.2-1b", machine("p4d", gpus=3, gib=90.0), k=8, rows=64)
    apart = Placement(Splitting.tensor, 3, (0, 1), (2,))
    needed = 3 * (HOST_BYTES + 2 * 2 * 128256 * 8192 // 2) + 3 * 4 * 64 * 8 * 128256
    prediction = Prediction(on, option(on, apart, 8))
    require_host(prediction, 3, needed)
    with pytest.raises(DistributedError, match=r"memory of the host is short; 3 ranks; found \d\.\d GiB"):
        require_host(prediction, 3, needed - 1)


def test_what_weights_leave_free_by_layers() -> None:
    """70B by layers with a draft on 24 GB: the draft's 2.3 GiB, a pass, and 2.5 MiB of caches a layer."""
    on = request("llama3.1-70b", "llama3.2-1b", machine("rtx_4090", gpus=1), k=8)
    first, other, layer = on.room_by_layers()
    draft = weight_bytes(ModelPart.of(model("llama3.2-1b")), Dtype.bf16)
    assert draft < first - other < draft + 64 * MIB and 0 < other < GIB
    assert layer == 2 * on.work.slots * 8 * 128 * 2
    assert replace(on, draft=None).room_by_layers()[:2] == (other, other)
