"""The `deepspeed` engine: the whole model's logits, on every family it takes; no words, no remains."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.models import deepspeed_tp as autotp
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.deepspeed_tp import RowParallel, load_deepspeed
from llama_ssp.models.families import DEEPSPEED_FAMILIES
from llama_ssp.models.loader import load
from llama_ssp.models.sharding import require_deepspeed
from llama_ssp.planner.weights import parameters
from tests.distributed.processes import on_ranks
from tests.distributed.test_tensor import UNEVEN, require_close, walked
from tests.families import FAMILIES, module_of

CPU = torch.device("cpu")
MADE = ModelConf(
    name="made", weights=Weights.synthetic, family="llama", n_layers=2, n_heads=7, n_kv_heads=7, head_dim=16,
    dim=112, ffn=99, vocab=101, context=64,
)  # fmt: skip
UNEVENLY = [
    "seven-heads", "three-kv", "one-kv", "odd-mlp", "odd-neox", "neox-tied", "opt-tied", "mlp-bias",
    "gemma2-three-kv", "qwen2-three-kv",
]  # fmt: skip
NAMES = {
    2: [*(name for name, (family, _) in FAMILIES.items() if family in DEEPSPEED_FAMILIES), *UNEVENLY[:4]],
    3: UNEVENLY,
}


def cut(ranks: Ranks, folders: dict[str, Path]) -> dict[str, Any]:
    """Every model's logits on a rank, and what there is to see of how it was cut."""
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        model, path = complete(ModelConf(name="local", path=str(folder)), "model")
        part = load_deepspeed(model, path, Dtype.fp32, CPU, "model", ranks)
        found[name] = [logits.tolist() for logits in walked(part)]
        layers = part.module.config.num_hidden_layers
        summed = [m for m in part.module.modules() if isinstance(m, RowParallel)]
        assert len(summed) == 2 * layers + 1, "two a layer, and the head"
        assert all(m.inner.mp_group is None for m in summed), name
    made = load_deepspeed(MADE, None, Dtype.fp32, CPU, "model", ranks)
    found["synthetic"] = [logits.tolist() for logits in walked(made)]
    found["parameters"] = sum(weight.numel() for weight in made.module.parameters())
    return found


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_real_ranks_give_the_whole_models_logits(
    world: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    folders, expected = {}, {}
    for name in NAMES[world]:
        family, changes = UNEVEN.get(name, (name, {}))
        folders[name] = tmp_path / name
        module_of(family, **changes).save_pretrained(folders[name])
        expected[name] = walked(load(ModelConf(name="small"), folders[name], Dtype.fp32, CPU, "model"))
    whole = load(MADE, None, Dtype.fp32, CPU, "model")
    expected["synthetic"] = walked(whole)
    capfd.readouterr()
    every = on_ranks(world, cut, folders)
    assert capfd.readouterr().out == "", "standard output is the product's"
    for found in every.values():
        assert isinstance(found, dict), found
        assert found["parameters"] < 0.75 * parameters(MADE)
        for name, passes in expected.items():
            require_close([torch.tensor(logits) for logits in found[name]], passes)
    assert not [name for name in os.listdir("/dev/shm") if "deepspeed" in name]


@pytest.mark.parametrize(
    ("changes", "world", "kind", "message"),
    [
        ({"family": "phi3"}, 2, ModelError, "does not cut the architecture; model made; found phi3"),
        ({"family": "gpt2"}, 2, ModelError, "found gpt2"),
        ({"dtype": Dtype.int8}, 2, DistributedError, "lose the scales.*int8"),
        ({"dtype": Dtype.nf4}, 2, DistributedError, "lose the scales.*nf4"),
        ({"code_bits": 4}, 2, DistributedError, "lose the scales.*in codes of 4 bits"),
        ({}, 8, DistributedError, "too little attention heads for the ranks; found 7 over 8 ranks"),
    ],
    ids=["phi3", "gpt2", "int8", "nf4", "4 bits", "8 ranks"],
)
def test_refused_before_anything_is_read(
    changes: dict[str, Any], world: int, kind: type[Exception], message: str
):
    """Alike on every rank: nothing in it depends on one."""
    with pytest.raises(kind, match=message) as refused:
        require_deepspeed(replace(MADE, **changes), world)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", [Dtype.fp16, Dtype.fp64, Dtype.int8, Dtype.nf4])
def test_formats_that_it_does_not_compute_in(dtype: Dtype):
    with pytest.raises(DistributedError, match=f"in this format on cpu.*found {dtype.value}.*fp32, bf16"):
        load_deepspeed(MADE, None, dtype, CPU, "model", ALONE)


class Failing:
    @staticmethod
    def init_inference(*_: Any, **__: Any) -> None:
        raise AssertionError("AutoTP not supported for model.\nPlease use kernel injection")


@pytest.mark.parametrize(
    ("module", "said"),
    [(None, "DeepSpeed is not installed.*pip install 'llama-ssp\\[deepspeed\\]'"),
     (Failing, "DeepSpeed cannot cut the model; model made; found AutoTP")],
    ids=["not installed", "cannot cut"],
)  # fmt: skip
def test_a_package_that_is_not_there_or_fails_is_one_line(
    module: Any, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    monkeypatch.setattr(autotp, "_imported", (lambda _: module) if module else autotp._imported)
    with pytest.raises(DistributedError, match=said) as refused:
        load_deepspeed(MADE, None, Dtype.fp32, CPU, "model", ALONE)
    assert "\n" not in str(refused.value)
