"""The plan's bound of a pass beside what a trace of the runner's own modules finds (memory_trace.py)."""

from typing import Any

import pytest

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.planner.activations import GPU, Kernels, pass_bytes
from llama_ssp.planner.weights import ModelPart, RolePart, held
from llama_ssp.planner.workload import TARGET, Role
from tests.memory_trace import Pass, Traced, trace
from tests.plan_bytes import ALLOWED_BYTES, ALLOWED_SHARE
from tests.plans import model as preset_model

TRACED = Kernels(cpu=True)  # a trace does not see what kernels take
ROWS, CAPACITY = 2, 120
PASSES = [Pass(32, True), Pass(32, True), Pass(9, True), Pass(5), Pass(1)]
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 344}
LINEAR = {
    "linear_layers": 2, "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 16,
    "linear_value_dim": 32, "linear_kernel": 4,
}  # fmt: skip
SHARED = {**EXPERTS, "expert_ffn": 96, "shared_ffn": 112}
FULL_HEADS = {"full_layers": 2, "full_kv_heads": 1, "full_head_dim": 64, "keys_are_values": True}
OWN: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 24}, "phi3": {}, "mistral": {"sliding_window": 11},
    "gemma2": {"sliding_window": 11, "tied": True}, "gpt_neox": {"n_kv_heads": 4},
    "opt": {"n_kv_heads": 4, "tied": True}, "gpt_neo": {"n_kv_heads": 4, "tied": True},
    "falcon": {"n_kv_heads": 1}, "gemma3_text": {"sliding_window": 11, "tied": True}, "granite": {},
    "olmo2": {}, "smollm3": {}, "mixtral": EXPERTS, "gpt_oss": {**EXPERTS, "sliding_window": 11},
    "qwen3_moe": {**EXPERTS, "expert_ffn": 96, "head_dim": 24, "dense_layers": 1},
    "glm4_moe": {**EXPERTS, "expert_ffn": 96, "head_dim": 24, "dense_layers": 1, "shared_ffn": 192},
    "apertus": {}, "cohere": {"qk_norm": True, "tied": True}, "exaone4": {"sliding_window": 11},
    "cohere2": {"sliding_window": 11, "tied": True}, "gemma": {"tied": True}, "glm4": {},
    "hunyuan_v1_dense": {}, "ministral3": {}, "olmo3": {"sliding_window": 11}, "seed_oss": {"head_dim": 24},
    "qwen3_5_text": LINEAR, "qwen3_5_moe_text": {**LINEAR, **SHARED, "ffn": 96},
    "qwen3_next": {**LINEAR, **SHARED, "dense_layers": 1},
    "gemma4_text": {**FULL_HEADS, **EXPERTS, "sliding_window": 11, "tied": True},
}  # fmt: skip
# Presets of each family: those whose heads, groups and ties differ; others are as these, wider or deeper.
PRESETS: dict[str, tuple[str, ...]] = {
    "llama": ("30B", "llama3.1-70b", "llama3.2-1b", "smollm2-135m"), "qwen2": ("qwen2.5-0.5b", "qwen2.5-7b"),
    "qwen3": ("qwen3-0.6b", "qwen3-32b"), "mistral": ("mistral-7b",), "gemma2": ("gemma2-2b", "gemma2-27b"),
    "gpt_neox": ("gpt-neox-20b",), "gpt_neo": ("gpt-neo-1.3b",), "gpt_oss": ("gpt-oss-20b",),
}  # fmt: skip


def model(family: str, **changes: Any) -> ModelConf:
    sizes: dict[str, Any] = {
        "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "dim": 128, "ffn": 344, "vocab": 500,
        "context": 256, **OWN[family], **changes,
    }  # fmt: skip
    return ModelConf(name=family, family=family, weights=Weights.synthetic, **sizes)


def bound(role: Role, passes: list[Pass], rows: int, capacity: int, world: int, rank: int) -> Traced:
    own = RolePart.of(role, ModelPart.of(role.model, world, rank), capacity)
    peaks, fed = [], 0
    for step in passes:
        fed += step.columns
        logits = rows * (1 if step.last_only else step.columns)
        parts = pass_bytes(own, TRACED, rows=rows, columns=step.columns, span=fed, logits=logits)
        peaks.append(sum(parts.values()))
    return Traced(sum(held(own.part, role.dtype).values()), own.caches_bytes(rows), tuple(peaks))


def compare(conf: ModelConf, dtype: Dtype, passes: list[Pass] = PASSES, **how: int) -> None:
    """Weights and caches to the byte; what passes through is never below, and not far above."""
    role = Role(TARGET, conf, dtype)
    how = {"rows": ROWS, "capacity": CAPACITY, "world": 1, "rank": 0, **how}
    found, said = trace(role, passes, **how), bound(role, passes, **how)
    assert (said.weights, said.caches) == (found.weights, found.caches)
    for real, planned in zip(found.peaks, said.peaks, strict=True):
        total = found.weights + found.caches + real
        assert real <= planned <= real + max(ALLOWED_SHARE * total, ALLOWED_BYTES)


def test_a_llama_is_bounded() -> None:
    compare(model("llama"), Dtype.bf16)


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rank"), [(family, rank) for family in OWN for rank in (0, 1) if rank or family not in PRESETS]
)
def test_every_family_is_bounded(family: str, rank: int) -> None:
    """Compares bf16 on one rank, fp32 on the last of two; families with presets have theirs on one."""
    dtype = Dtype.fp32 if rank else Dtype.bf16
    compare(model(family), dtype, world=1 + rank, rank=rank)


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", sum(PRESETS.values(), ()))
def test_a_preset_is_bounded(name: str) -> None:
    """At its own sizes: chunks of a prompt, a verification, a draft's first step."""
    conf = preset_model(name)
    chunk = min(512, (conf.context - 7) // 2)
    passes = [Pass(chunk, True), Pass(chunk, True), Pass(5), Pass(2)]
    compare(conf, Dtype.bf16, passes, capacity=2 * chunk + 7)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "rows"),
    [
        *((family, {"sliding_window": 11}, ROWS) for family in ("phi3", "qwen2", "qwen3", "llama")),
        ("mistral", {"sliding_window": None}, ROWS),
        *(("llama", {"n_kv_heads": kvs}, rows) for kvs, rows in ((1, 1), (2, 3), (4, 3))),
        *(("gemma2", {"n_kv_heads": kvs}, rows) for kvs, rows in ((1, 3), (2, 1), (4, 1))),
    ],
    ids=lambda value: str(value),
)
def test_variants_of_attention(family: str, changes: dict[str, Any], rows: int) -> None:
    """Adds windows where others have none; one row, and one key head, are looked at, others are copied."""
    compare(model(family, **changes), Dtype.fp32, rows=rows)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "rank"), [("30B", 8, 7), ("65B", 3, 1), ("65B", 6, 5)])
def test_ranks_of_uneven_parts_are_bounded(name: str, world: int, rank: int) -> None:
    """Takes ranks whose heads and parts of a vocabulary differ from those of others."""
    compare(preset_model(name), Dtype.fp16, rows=1, capacity=2048, world=world, rank=rank)


@pytest.mark.slow
def test_depth_is_extrapolated_exactly() -> None:
    """What two and three layers say of five is what five say."""
    role = Role(TARGET, model("llama", n_layers=5), Dtype.bf16)
    short = trace(role, PASSES, ROWS, CAPACITY)
    whole = trace(role, PASSES, ROWS, CAPACITY, depths=(5,))
    assert short == whole


@pytest.mark.parametrize("kernels", [TRACED, GPU], ids=["cpu", "gpu"])
def test_a_step_over_a_long_text_copies_no_keys(kernels: Kernels) -> None:
    """Eight queries share a key: repeated keys would be eight times one layer's."""
    role = Role(TARGET, preset_model("llama3.1-70b"), Dtype.bf16)
    own = RolePart.of(role, ModelPart.of(role.model), 32768)
    step = pass_bytes(own, kernels, rows=1, columns=5, span=32768, logits=5)
    assert sum(step.values()) < own.caches_bytes(1) / own.part.layers / 4


@pytest.mark.parametrize("name", ["gemma2-2b", "gpt-oss-20b"])
def test_a_prompt_on_a_gpu_has_no_matrix_of_scores(name: str) -> None:
    """Bounds what passes through by the chunk alone; eager models have the matrix."""
    role = Role(TARGET, preset_model(name), Dtype.bf16)
    short, long, eager_short, eager_long = (
        sum(pass_bytes(own, GPU, rows=1, columns=2048, span=span, logits=1).values())
        for own in (RolePart.of(role, ModelPart.of(role.model), 8192, 1, way) for way in (True, False))
        for span in (2048, 8192)
    )
    assert long < 1.01 * short < eager_short < eager_long / 2
