"""The `layers` engine: whole layers spread over devices, the CPU and a disk give the plain model's logits."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.errors import DistributedError, StorageError, UsageError
from llama_ssp.models import device_map as layers
from llama_ssp.models.causal_lm import CausalModel, ModuleCache
from llama_ssp.models.device_map import load_layers, spread_of, spread_with_room
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.loader import load_module, shaped
from llama_ssp.models.passes import Pass, all_rows
from llama_ssp.speculative.state import Prompt
from tests.distributed.test_tensor import walked
from tests.families import FAMILIES, HYBRIDS, build
from tests.rig import speculate

CPU = torch.device("cpu")
MODEL = ModelConf(name="small")
MADE = ModelConf(
    name="made", weights=Weights.synthetic, family="llama", n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16,
    dim=64, ffn=96, vocab=101, context=64,
)  # fmt: skip
PROMPTS = [Prompt("a", (5, 6, 7, 8)), Prompt("b", (9,))]
# Of the tiny models here, which are some 100 KB each, most layers find no room.
LITTLE = {"cpu": "60KB"}
# Of the others transformers' module is refused with our cache.
AS_MODULES = [name for name in FAMILIES if name not in ("gpt_neo", *HYBRIDS)]


def saved(folder: Path, name: str, **changes: Any) -> Path:
    build(name, **changes).save_pretrained(folder)
    return folder


def plain_of(model: ModelConf, folder: Path | None, dtype: Dtype = Dtype.fp32) -> CausalModel:
    return CausalModel(load_module(model, folder, dtype, CPU, "model"), "plain")


def on_disk(causal: Any) -> int:
    return sum(device == "disk" for device in getattr(causal.module, "hf_device_map", {}).values())


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", AS_MODULES)
def test_layers_on_disk_change_no_bit(name: str, tmp_path: Path):
    folder = saved(tmp_path / "model", name)
    plain = plain_of(MODEL, folder)
    spread = load_layers(MODEL, folder, Dtype.fp32, LITTLE, tmp_path / "spill", "model")
    assert on_disk(spread) and spread.device == CPU and spread.vocab == plain.vocab
    assert spread.weights_bytes < plain.weights_bytes
    for ours, theirs in zip(walked(spread), walked(plain), strict=True):
        assert torch.equal(ours, theirs)
    runs = [speculate(m, PROMPTS, m, k=3, max_new=12) for m in (spread, plain)]
    assert runs[0].texts == runs[1].texts and runs[0].accepted == runs[1].accepted > 0


def test_synthetic_layers_on_disk(tmp_path: Path):
    """Twice into one folder: what the first has left must not serve as the second's weights."""
    for seed in (0, 1):
        model = replace(MADE, seed=seed)
        spread = load_layers(model, None, Dtype.fp32, LITTLE, tmp_path, "model")
        assert on_disk(spread) and any(tmp_path.iterdir()), seed
        plain = plain_of(model, None)
        for ours, theirs in zip(walked(spread), walked(plain), strict=True):
            assert torch.equal(ours, theirs)
    del spread
    gc.collect()
    assert not any(tmp_path.iterdir()), "the folder is left as it was found"


def test_synthetic_experts_in_fp64():
    """Only transformers' plain experts compute in fp64."""
    model = replace(MADE, family="mixtral", experts=4, experts_per_token=2, expert_ffn=96)
    exact, rounded = (
        load_layers(model, None, dtype, {}, None, "model") for dtype in (Dtype.fp64, Dtype.fp32)
    )
    for ours, theirs in zip(walked(exact), walked(rounded), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-4)


@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.int8, Dtype.nf4])
def test_all_in_one_place_is_the_plain_model(dtype: Dtype, tmp_path: Path):
    folder = saved(tmp_path, "llama-gqa", mild=True, hidden_size=64, intermediate_size=128)
    spread = load_layers(MODEL, folder, dtype, {}, None, "model")
    assert on_disk(spread) == 0
    for ours, theirs in zip(walked(spread), walked(plain_of(MODEL, folder, dtype)), strict=True):
        assert torch.equal(ours, theirs)


def test_gpus_are_filled_evenly_then_the_cpu_then_the_disk():
    """By the sizes alone: no GPU is needed to say where layers go."""
    module = shaped(replace(MADE, n_layers=12), None, Dtype.fp32, "model")
    layer = 4 * sum(p.numel() for p in module.model.layers[0].parameters())
    even = spread_of(module, Dtype.fp32, {0: 20 * layer, 1: 20 * layer, "cpu": 20 * layer})
    assert set(even.values()) == {0, 1}
    counts = [sum(device == gpu and "layers" in name for name, device in even.items()) for gpu in (0, 1)]
    assert sum(counts) == 12 and max(counts) - min(counts) <= 3
    full = spread_of(module, Dtype.fp32, {0: 4 * layer, 1: 5 * layer, "cpu": 2 * layer})
    order = [device for name, device in full.items() if "layers" in name]
    assert order == sorted(order, key=[0, 1, "cpu", "disk"].index) and set(order) == {0, 1, "cpu", "disk"}


REFUSED: dict[str, tuple[dict[str, str], bool, Dtype, type[Exception], str]] = {
    "no-room": (LITTLE, False, Dtype.fp32, DistributedError, "does not fit.*placement.offload_folder"),
    "no-gpu": ({"7": "1GiB"}, True, Dtype.fp32, DistributedError, "does not exist; found 7, allowed cpu"),
    "no-device": ({"tpu": "1GiB"}, True, Dtype.fp32, DistributedError, "found tpu"),
    "no-size": ({"cpu": "much"}, True, Dtype.fp32, UsageError, "text that is not a size; found much"),
    "int8-disk": (LITTLE, True, Dtype.int8, DistributedError, "quantised layers cannot be kept away.*int8"),
    "nf4-disk": ({"cpu": "20KB"}, True, Dtype.nf4, DistributedError, "quantised layers cannot.*nf4.*disk"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_weights_are_read(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits, spills, dtype, error, message = REFUSED[case]
    monkeypatch.setattr(layers, "read", lambda *_: pytest.fail("weights were read"))
    folder = saved(tmp_path / "model", "llama-gqa", hidden_size=64, intermediate_size=128)
    with pytest.raises(error, match=message) as refused:
        load_layers(MODEL, folder, dtype, limits, tmp_path / "spill" if spills else None, "model")
    assert "\n" not in str(refused.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="offload_folder cannot be written"):
        load_layers(MADE, None, Dtype.fp32, LITTLE, tmp_path / "file", "model")


def test_quantised_layers_on_a_cpu_next_to_a_gpu_are_refused():
    with pytest.raises(DistributedError, match="int8, with layers on cpu"):
        layers._require_possible({"model": 0, "lm_head": "cpu"}, Dtype.int8, None, "model")


def test_quantised_layers_on_two_gpus_are_possible():
    layers._require_possible({"model": 0, "lm_head": 1}, Dtype.int8, None, "model")


def test_keys_sit_on_the_layers_device():
    """Here the second layer is on torch's meta device, which takes the place of another GPU."""
    pass_ = Pass(spans=all_rows([0], [3]), device=CPU)
    cache = ModuleCache(KVCache(rows=1, capacity=8, device=CPU, is_masked=True), pass_)
    for layer, device in enumerate(("cpu", "meta", "cpu", "meta")):
        new = torch.ones(1, 2, 3, 4, device=device)
        keys, values = cache.update(new, new, layer)
        assert keys.device.type == values.device.type == device and keys.shape == (1, 2, 3, 4)


def test_gpus_have_room_for_what_is_no_weight():
    """The first GPU's draft, activations, and the caches of its layers and of those that are on no GPU."""
    module = shaped(replace(MADE, n_layers=12), None, Dtype.fp32, "model")
    layer = 4 * sum(p.numel() for p in module.model.layers[0].parameters())
    ends = 4 * sum(p.numel() for p in module.parameters()) - 12 * layer
    limits: dict[int | str, int] = {0: 7 * layer, 1: 4 * layer, "cpu": 40 * layer}

    def needed(room: tuple[int, int, int]) -> dict[int, int]:
        spread = spread_with_room(module, Dtype.fp32, limits, room)
        at = [device for name, device in spread.items() if ".layers." in name]
        caches = {0: len(at) - at.count(1), 1: at.count(1)}
        return {
            gpu: layer * at.count(gpu) + ends * (gpu == 0) + room[gpu] + room[2] * caches[gpu]
            for gpu in (0, 1)
        }

    for room in ((2 * layer, layer, 0), (layer, layer // 2, layer // 5), (3 * layer, 2 * layer, layer // 4)):
        assert all(needed(room)[gpu] <= limits[gpu] for gpu in (0, 1)), room
        full = spread_of(module, Dtype.fp32, limits)
        counts = [
            sum(device == gpu and ".layers." in name for name, device in full.items()) for gpu in (0, 1)
        ]
        caches = room[2] * (12 - counts[1])
        assert layer * counts[0] + ends + room[0] + caches > limits[0], "without, the first is too full"
    assert spread_with_room(module, Dtype.fp32, limits, (0, 0, 0)) == spread_of(module, Dtype.fp32, limits)
