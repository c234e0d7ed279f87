"""GGUF files of models with linear attention: the changes of llama.cpp's converter are undone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.config import ModelConf
from llama_ssp.errors import ModelError
from llama_ssp.models.assemble import wanted
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.formats.coded import Coded, Codes
from llama_ssp.models.formats.gguf_header import read_header
from llama_ssp.models.formats.gguf_source import GgufSource, UnitOrder
from llama_ssp.models.loader import differences, require_complete
from llama_ssp.models.model_config import require_supported
from tests.distributed.threads import ranks_of, together
from tests.families import build, module_of, require_same, walked
from tests.gguf_hybrids import write_hybrid
from tests.test_gguf import opened, require_near

MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3.5-one-value-a-key", "qwen3.5-three-values-a-key")
# Heads of values are whole groups of 32 inputs, and of which 3 ranks have unequal shares; K-quants have
# blocks of 256 numbers, in which are several heads.
CODED: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
MIXED = {
    "": "Q4_K", "attn_qkv": "Q5_K", "ssm_alpha": "F16", "ssm_beta": "Q8_0", "ssm_ba": "Q8_0",
    "ssm_out": "Q6_K", "ffn_down_exps": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K",
}  # fmt: skip
# A change of the converter, and a model in which its lack is seen.
CHANGES = {
    "decays": "qwen3_5", "norms": "qwen3_next", "in_proj_qkv": "qwen3_5", "in_proj_z": "qwen3_5",
    "in_proj_b": "qwen3_5", "in_proj_a": "qwen3_5", "A_log": "qwen3_5", "dt_bias": "qwen3_5",
    "conv1d": "qwen3_5", "out_proj": "qwen3_5",
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_are_those_of_the_module(name: str, tmp_path: Path) -> None:
    module = module_of(name)
    path = write_hybrid(tmp_path / "model.gguf", module)
    require_same(module, *walked(opened(path)))
    model, _ = complete(ModelConf(name="x", path=str(path)), "model")
    config = module.config
    assert (model.n_layers, model.linear_layers) == (3, 2)
    assert (model.linear_key_heads, model.linear_value_heads) == (
        config.linear_num_key_heads,
        config.linear_num_value_heads,
    )
    assert model.experts == getattr(config, "num_experts", 0)


@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_each_change_of_the_converter_counts(change: str, tmp_path: Path) -> None:
    """A file that lacks one is read as another model."""
    module = module_of(CHANGES[change])
    path = write_hybrid(tmp_path / "model.gguf", module, without=change)
    with pytest.raises(AssertionError):
        require_same(module, *walked(opened(path)))


@torch.inference_mode()
def test_other_forms_of_the_same_tensors(tmp_path: Path) -> None:
    """Gates and ups of experts in one tensor, and the gate of the shared experts as a vector."""
    module = module_of("qwen3_5_moe")
    path = write_hybrid(tmp_path / "model.gguf", module, fused=True, gates_as_vectors=True)
    require_same(module, *walked(opened(path)))


@torch.inference_mode()
def test_layers_for_multi_token_prediction_are_not_read(tmp_path: Path) -> None:
    module = module_of("qwen3_5")
    path = write_hybrid(tmp_path / "model.gguf", module, further=1)
    require_same(module, *walked(opened(path)))
    model, _ = complete(ModelConf(name="x", path=str(path)), "model")
    assert model.n_layers == 3
    other = write_hybrid(tmp_path / "other.gguf", module, further=1, block_count=3, nextn_predict_layers=None)
    with pytest.raises(ModelError, match=r"contradicts the header.*blk\.3\.attn_norm"):
        complete(ModelConf(name="x", path=str(other)), "model")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@torch.inference_mode()
def test_parts_in_codes_give_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    """Values stay in the file's codes, also where a block of 256 inputs has several heads."""
    module = build(name, mild=True, **CODED)
    path = write_hybrid(tmp_path / "model.gguf", module, MIXED)
    expected, texts = walked(opened(path))
    require_same(module, expected, texts)
    for world, keeps in [(2, False), (3, False), (1, True), (2, True), (3, True)]:
        ranks = ranks_of(world)
        parts = [opened(path, rank, keeps_codes=keeps) for rank in ranks]
        for logits in together([lambda part=part: walked(part)[0] for part in parts], ranks):
            require_near(logits, expected)


def test_codes_of_heads_that_are_no_groups_are_decoded(tmp_path: Path) -> None:
    module = build("qwen3_5", mild=True, **CODED | {"linear_value_head_dim": 16})
    path = write_hybrid(tmp_path / "model.gguf", module, {"": "Q8_0", "token_embd": "F16", "output": "F16"})
    source = GgufSource(read_header(path), module.config, wanted(module.config))
    for part, is_coded in (("in_proj_qkv", True), ("out_proj", False)):
        name = f"model.layers.0.linear_attn.{part}.weight"
        weight = source.read(name, None)
        assert isinstance(weight, Coded) == is_coded
        found = weight.decoded(torch.float32) if isinstance(weight, Coded) else weight
        assert torch.equal(found, module.state_dict()[name])


def test_places_of_an_order() -> None:
    order = UnitOrder(first=2, size=3, places=(1, 0, 2))
    assert order.in_file([(0, 11)]) == [(0, 2), (5, 8), (2, 5), (8, 11)]
    assert order.in_file([(1, 4), (7, 9)]) == [(1, 2), (5, 7), (4, 5), (8, 9)]
    assert UnitOrder(size=2, places=(0, 1, 2)).in_file([(1, 6)]) == [(1, 6)]
    weight = Coded(
        kind=Codes("int4", 4),
        inputs=8,
        codes_NC=torch.arange(4, dtype=torch.uint8)[None],
        scale_NG=torch.tensor([[1.0, 2.0]]),
    )
    turned = weight.chosen([(4, 8), (0, 4)])
    whole = weight.decoded(torch.float32)
    assert torch.equal(turned.decoded(torch.float32), torch.cat([whole[:, 4:], whole[:, :4]], 1))
    with pytest.raises(ValueError, match="groups of 4"):
        weight.chosen([(2, 4)])


def test_what_is_refused(tmp_path: Path) -> None:
    """Experts in a family without them, sizes that contradict the tensors, and decays that grow."""
    module = module_of("qwen3_5")
    wrong = {"expert_count": 4, "ssm.inner_size": 44, "ssm.group_count": 4, "ssm.conv_kernel": 3}
    for key, value in wrong.items():
        path = write_hybrid(tmp_path / f"{key}.gguf", module, **{key: value})
        with pytest.raises(ModelError, match="qwen35 with experts" if "expert" in key else "contradicts"):
            complete(ModelConf(name="x", path=str(path)), "model")

    moe = module_of("qwen3_5_moe")
    path = write_hybrid(tmp_path / "fewer.gguf", moe, expert_count=3)
    with pytest.raises(ModelError, match=r"contradicts.*ffn_down_exps"):
        complete(ModelConf(name="x", path=str(path)), "model")

    with torch.no_grad():
        module.model.layers[0].linear_attn.A_log.fill_(0.5)
    path = write_hybrid(tmp_path / "grows.gguf", module, without="decays")
    config = require_supported(path)
    source = GgufSource(read_header(path), config, wanted(config))
    require_complete(path, differences(wanted(config), source.shapes, config))
    with pytest.raises(ModelError, match="decays of linear attention are above 0"):
        source.read("model.layers.0.linear_attn.A_log", None)
