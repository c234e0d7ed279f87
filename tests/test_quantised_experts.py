"""Quantised experts: each weight is the library's, and logits are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.experts import Experts, apply_on_gpu
from llama_ssp.models.kernels import expert_stacks
from llama_ssp.models.kernels.coded import operators
from llama_ssp.models.kernels.expert_stacks import Stack
from llama_ssp.models.linear import formats
from llama_ssp.models.loader import load
from llama_ssp.models.steps import SteppedModel
from tests.distributed.test_quantised import off
from tests.distributed.test_tensor import walked as by_steps
from tests.quantised_folders import quantised
from tests.test_decoder import walked
from tests.test_packed_bytes import same
from tests.test_quantised_folders import loaded


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def experts_of(part: Decoder) -> list[Experts]:
    found = [layer for layer in part.modules() if isinstance(layer, Experts)]
    assert found and all(how for layer in found for how in layer.hows)
    return found


@pytest.mark.parametrize("name", ["mixtral-int4", "mixtral-gptq", "mixtral-blocks"])
@torch.inference_mode()
def test_chosen_experts_are_decoded_where_the_choice_is_not_waited_for(
    name: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in CUDA graphs; here on a CPU, for fewer pairs than are decoded at once, and for more."""
    experts, x_TH = (
        experts_of(loaded(quantised(name, folders / name), keeps_codes=True))[0],
        torch.randn(5, 128),
    )
    expected = experts(x_TH)
    for pairs in (3, 16):
        monkeypatch.setattr(expert_stacks, "DECODED_PAIRS", pairs)
        monkeypatch.setattr("llama_ssp.models.experts.triton_runs", lambda: True)
        weights = list(experts.up), list(experts.down), *experts.hows
        found = apply_on_gpu(x_TH, *experts._chosen(x_TH), *weights, None, None, "silu", 0.0, 0.0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Copies(TorchDispatchMode):
    """Counts the operations that read a tensor of the host, on a model that is on another device."""

    count = 0

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.count += any(tensor.device.type == "cpu" for tensor in tensors)
        return op(*args, **(kwargs or {}))


@torch.inference_mode()
def test_chosen_experts_are_decoded_without_copies_from_the_host() -> None:
    """The first call may copy a table of codes; a CUDA graph is captured later, and cannot."""
    how = torch.device("meta")
    codes_ENC, scale_ENG = torch.empty(4, 8, 32, dtype=torch.uint8), torch.empty(4, 8, 2)
    stack = Stack([codes_ENC.to(how), scale_ENG.to(how)], "e2m1 32 1.0 8 False False")
    given = torch.empty(5, 64, device=how), torch.empty(10, dtype=torch.int64, device=how), stack, None
    expert_stacks.products(*given)
    with Copies() as copies:
        assert expert_stacks.products(*given).shape == (10, 8)
    assert copies.count == 0


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["mixtral-blocks", "qwen3_moe-int4"])
@torch.inference_mode()
def test_experts_are_multiplied_by_the_kernel(name: str, folders: Path) -> None:
    """On 1 to 3 ranks, in the planned bytes.

    Libraries round a weight to the type of its scale; of blocks that is fp32, else 16 bit.
    """
    folder, cpu = quantised(name, folders / name), torch.device("cpu")
    operators("cpu")
    product, head = formats(Dtype.packed, cpu, fast=False, coded_too=True)
    kept = loaded(folder, keeps_codes=True, product=product, head=head)
    assert all(how.endswith("True") for layer in experts_of(kept) for how in layer.hows)
    expected = walked(loaded(folder))[0]
    assert off(walked(kept)[0], expected) < (1e-5 if name.endswith("blocks") else 3e-2)
    for fast in (False, True):
        same(folder, fast)


@pytest.mark.long
@pytest.mark.compiler
@torch.inference_mode()
def test_experts_in_codes_are_compiled(folders: Path) -> None:
    folder, cpu = quantised("qwen3_moe-int4", folders / "qwen3_moe-int4"), torch.device("cpu")
    eager = load(ModelConf(name="x"), folder, Dtype.packed, cpu, "model")
    model = load(ModelConf(name="x"), folder, Dtype.packed, cpu, "model", fast=True)
    assert isinstance(model, SteppedModel)
    assert off(by_steps(model), by_steps(eager)) < 0.05
    assert model._step is not None
