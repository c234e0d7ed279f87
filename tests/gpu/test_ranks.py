"""Steps with NCCL's sums in graphs, on one GPU, and every number format: what the trial of a run does.

One rank pretends to be the first of two: its sums go through a real NCCL group, which has this rank alone.
So compiled sums, captures, the order of closing and the watch are those of several GPUs. What NCCL sends, and
how fast, only several GPUs show.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.failures import meet
from llama_ssp.distributed.process_group import Group
from llama_ssp.models.cuda_graphs import GraphedModel
from llama_ssp.models.step_check import PASSED, difference, small_model
from llama_ssp.pair.trial import ROWS, STEPS, WIDTHS
from tests.warm import as_launched, launcher_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda:0")
FORMATS = (Dtype.bf16, Dtype.fp16, Dtype.fp32, Dtype.int8, Dtype.int4, Dtype.nf4)


class FirstOfTwo(Group):
    """Has half of the weights; the other half is taken for zero."""

    def pretend(self) -> None:
        self.connect()
        self.world = 2

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [self.all_reduce(tensor.clone()), torch.zeros_like(tensor)]

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        return [values, values]


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[FirstOfTwo]:
    server = launcher_store()
    for name, value in as_launched(0, 1, server.port).items():
        monkeypatch.setenv(name, value)
    torch.cuda.set_device(GPU)
    store, watch = meet(60.0)
    dist.init_process_group("gloo", store=store.clone(), rank=0, world_size=1)
    group = FirstOfTwo((0,), "nccl", watch)
    group.pretend()
    yield group
    group.close()


@pytest.mark.parametrize("dtype", FORMATS)
def test_compiled_steps_of_every_format(dtype: Dtype) -> None:
    model = small_model(dtype, GPU, ALONE)
    assert difference(model, WIDTHS, ROWS, STEPS) == PASSED and model.is_compiled


@pytest.mark.parametrize("dtype", FORMATS)
def test_sums_of_nccl_in_graphs(dtype: Dtype, first_of_two: FirstOfTwo) -> None:
    """With a second cache, an eager sum between replays, and graphs that are kept until the ranks part."""
    model = small_model(dtype, GPU, first_of_two)
    assert isinstance(model, GraphedModel)
    assert difference(model, WIDTHS, ROWS, STEPS) == PASSED and model.is_compiled
    assert sum(len(memory.graphs) for memory in model._memories) >= len(WIDTHS)
