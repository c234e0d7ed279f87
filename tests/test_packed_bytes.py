"""The plan's bytes are those of loaded models, to the byte, on 1, 2 and 3 ranks; and the peak of loading."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.distributed.comm import ALONE
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.families import TESTED_FAMILIES, family_of
from llama_ssp.models.kernels import coded
from llama_ssp.models.kernels.coded import CodedLinear, DecodedLinear
from llama_ssp.models.loader import load
from llama_ssp.planner.memory import loading_bytes
from llama_ssp.planner.storage import CPU, IN_LAYERS, Storage
from llama_ssp.planner.weights import ModelPart, RolePart, held
from llama_ssp.planner.workload import TARGET, Role
from tests import checkpoints
from tests.checkpoints import WEIGHTS, Tensors, copied, edit, edit_tensors
from tests.distributed.threads import ranks_of
from tests.families import build, synthetic
from tests.gguf_hybrids import write_hybrid
from tests.memory_trace import LiveBytes
from tests.quantised_folders import FORMATS, ROWS, quantised, weights_of
from tests.test_gguf import made
from tests.test_gguf_hybrids import CODED, MIXED

pytestmark = [pytest.mark.slow, pytest.mark.compiler]
KEPT = [
    *(name for name in FORMATS if name != "gptq-act-order"), *ROWS, "glm4_moe-int4", "glm4_moe-blocks",
    "qwen3_5_moe-int4", "qwen3_next-blocks",
]  # fmt: skip
# Outputs and words of codes that do not fill the kernel's blocks; the MLP in unequal units of 32.
ODD = {"hidden_size": 200, "head_dim": 20, "intermediate_size": 80, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def off(model: ModelConf, path: Path | None, dtype: Dtype, world: int, fast: bool) -> list[int]:
    """Of each rank, by how many bytes the loaded model differs from the plan."""
    found = []
    for rank in ranks_of(world) if world > 1 else [ALONE]:
        held_bytes = load(model, path, dtype, torch.device("cpu"), "model", rank, fast).weights_bytes
        planned = held(ModelPart.of(model, world, rank.rank), dtype, Storage(1, CPU, fast))
        found.append(held_bytes - sum(planned.values()))
    return found


def same(path: Path, fast: bool = False, most: int = 3) -> None:
    """The plan's bytes, on each of 1 to `most` ranks."""
    model, folder = complete(ModelConf(name="x", path=str(path), dtype=Dtype.packed), "model")
    for world in range(1, most + 1):
        assert off(model, folder, Dtype.packed, world, fast) == [0] * world, world


@pytest.mark.few(8)
@pytest.mark.parametrize("name", KEPT)
def test_folders(name: str, folders: Path) -> None:
    same(quantised(name, folders / name))


def test_layers_for_multi_token_prediction_are_not_planned(folders: Path, tmp_path: Path) -> None:
    """Their codes are on disk, after those of the last layer."""
    path = copied(quantised("glm4_moe-int4", folders / "glm4_moe-int4"), tmp_path / "model")

    def add(tensors: Tensors) -> None:
        last = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
        tensors |= {name.replace(".layers.1.", ".layers.2."): tensor.clone() for name, tensor in last.items()}

    edit_tensors(path, add)
    same(path)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("family", "fast"),
    [(family, fast) for family in TESTED_FAMILIES for fast in (False, not family_of(family).names.router)],
)
def test_every_family(family: str, fast: bool) -> None:
    """With buffers: frequencies of positions, corrections of scores, constants of activations."""
    model = synthetic(family)
    assert [off(model, None, Dtype.bf16, world, fast) for world in (1, 3)] == [[0], [0, 0, 0]]


@pytest.mark.parametrize("name", ["int4-channel", "fp8-tensor", "llm-int8"])
@pytest.mark.parametrize("fast", [False, True])
def test_sizes_that_do_not_fill_blocks(name: str, fast: bool, folders: Path) -> None:
    same(quantised(name, folders / f"{name}-odd", **ODD), fast)


@pytest.mark.parametrize(
    "said",
    [{}, {"attention_bias": True}, {"mlp_bias": True}],
    ids=["no biases", "biases of attention", "biases of MLPs"],
)
def test_biases_by_config(said: dict[str, bool], tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path / "model", **said)
    model, folder = complete(ModelConf(name="x", path=str(path)), "model")
    for world in (1, 2):
        assert off(model, folder, Dtype.bf16, world, fast=False) == [0] * world
    made = replace(model, path=None, weights=Weights.synthetic)
    assert off(made, None, Dtype.bf16, 1, fast=False) == [0]


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_gguf(name: str, tmp_path: Path) -> None:
    """Queries in 16 bit, keys in 4, values in 8; of the second layer all in 4."""
    kinds = {"": "Q4_K", "0.attn_q": "F16", "0.attn_v": "Q6_K", "ffn_down": "Q3_K", "token_embd": "Q6_K"}
    same(made(name, tmp_path, kinds, intermediate_size=512)[0])


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_gguf_of_models_with_states(name: str, tmp_path: Path) -> None:
    """Inputs of linear attention in their own formats; then heads that are no groups, which are decoded."""
    for value_dim in (32, 16):
        module = build(name, mild=True, **CODED | {"linear_value_head_dim": value_dim})
        kinds = MIXED if value_dim == 32 else {"": "Q8_0", "token_embd": "F16", "output": "F16"}
        same(write_hybrid(tmp_path / f"{value_dim}.gguf", module, kinds))


def some_plain(folder: Path, to: Path, *stems: str) -> Path:
    """A copy of int4-groups in which the matrices with these names are plain numbers."""
    weights = weights_of("int4-groups", folder)

    def change(tensors: Tensors) -> None:
        for name in weights:
            if name.removesuffix(".weight").endswith(stems):
                for key in [key for key in tensors if key.startswith(f"{name}_")]:
                    del tensors[key]
                tensors[name] = weights[name]

    edit_tensors(copied(folder, to), change)
    return to


@pytest.mark.parametrize("fast", [False, True])
def test_plain_matrices_among_coded_ones(fast: bool, folders: Path, tmp_path: Path) -> None:
    """The values of both layers, and the second layer's last matrix."""
    sound = quantised("int4-groups", folders / "int4-groups")
    same(some_plain(sound, tmp_path / "mixed", "self_attn.v_proj", "1.mlp.down_proj"), fast)


def test_several_kinds_of_codes(folders: Path, tmp_path: Path) -> None:
    """Keys of a layer in 8 bit, where queries and values have 4."""
    wide = load_file(quantised("int8-groups", folders / "int8-groups") / WEIGHTS)
    keys = {name: tensor for name, tensor in wide.items() if "0.self_attn.k_proj" in name}
    path = copied(quantised("int4-groups", folders / "int4-groups"), tmp_path / "two")
    edit_tensors(path, lambda tensors: tensors.update(keys))
    group = {"1": FORMATS["int8-groups"].claim["config_groups"]["0"]}
    edit(path / "config.json", lambda c: c["quantization_config"]["config_groups"].update(group))
    model, folder = complete(ModelConf(name="x", path=str(path), dtype=Dtype.packed), "model")
    decoder = load(model, folder, Dtype.packed, torch.device("cpu"), "model").decoder
    kinds = [type(layer) for layer in decoder.modules()]
    assert kinds.count(CodedLinear) == 4 + 2 + 4 and DecodedLinear not in kinds
    same(path)


@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.int8, Dtype.int4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_weights_that_were_plain(dtype: Dtype, tied: bool, fast: bool) -> None:
    """With compiled steps a CPU has a packed copy of a tied head."""
    model = ModelConf(
        name="x", weights=Weights.synthetic, family="llama", dtype=dtype, tied=tied, n_layers=2, n_heads=8,
        n_kv_heads=4, head_dim=20, dim=200, ffn=80, vocab=300, context=64,
    )  # fmt: skip
    assert [off(model, None, dtype, world, fast) for world in (1, 2, 3)] == [[0] * n for n in (1, 2, 3)]


class OwnBytes(LiveBytes):
    """Without pages of the files, of which memory cannot be resized, and tensors that have no content."""

    def _meet(self, tensor: torch.Tensor, counted: bool) -> None:
        own = tensor.untyped_storage().resizable() and tensor.device.type != "meta"
        super()._meet(tensor, counted and own)


LARGE = {"hidden_size": 512, "intermediate_size": 1792}
EXPERTS = {"hidden_size": 256, "intermediate_size": 896, "moe_intermediate_size": 896}
STACKED = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 3}
SIZES = {
    **dict.fromkeys(["fp8-tensor", "fine-grained", "int4-zeros", "nf4", "llm-int8", "awq", "gptq"], LARGE),
    **dict.fromkeys(["mixtral-int4", "mixtral-awq", "qwen3_moe-blocks"], EXPERTS), "mxfp4": STACKED,
}  # fmt: skip


# Decoding goes through fewer ways than there are kinds of codes.
LOADED = [(name, Dtype.packed) for name in SIZES]
LOADED += [(name, Dtype.bf16) for name in ("fp8-tensor", "int4-zeros", "mixtral-int4", "mxfp4")]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "dtype"), LOADED)
def test_loading_takes_at_most_a_layer_more(
    name: str, dtype: Dtype, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than the share, on one rank, and on the second of three, whose part ends inside groups at both sides.

    Intermediate results are as small next to a layer as those of large models.
    """
    monkeypatch.setattr("llama_ssp.models.formats.coded.DECODED_AT_ONCE", 1 << 14)
    coded.operators("cpu")
    path = quantised(name, folders / f"{name}-large", **SIZES[name])
    model, folder = complete(ModelConf(name="x", path=str(path), dtype=dtype), "model")
    for rank in (ALONE, ranks_of(3)[1]):
        live, part = OwnBytes(), ModelPart.of(model, rank.world, rank.rank)
        with live.phase():
            share = load(model, folder, dtype, torch.device("cpu"), "model", rank).weights_bytes
        groups = held(part, dtype)
        layer = sum(groups.get(group, 0) for group in IN_LAYERS) // model.n_layers
        assert share < live.peak <= share + layer, (rank.world, rank.rank)
        if dtype is Dtype.packed:
            assert loading_bytes(RolePart.of(Role(TARGET, model, dtype), part, 0)) == layer, rank.world
