"""DeepSpeed's AutoTP: every rank loads the whole model, then DeepSpeed cuts it; our ranks sum the parts.

We load the model and hand the module to DeepSpeed. It must not open the checkpoint itself: it would unpickle
the files, which runs any code that they hold.

DeepSpeed's own sum over ranks on CPUs is not used: it needs shared memory, a compiler and one machine, waits
busily, and leaves segments in /dev/shm. So a cut layer gets no process group, with which DeepSpeed would sum,
and is wrapped in a layer that our ranks sum.
"""

import contextlib
import io
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DistributedError
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.loader import load_module
from llama_ssp.models.sharding import require_deepspeed

log = logging.getLogger(__name__)
OWN_SPLIT = "placement.splitting=tensor"  # the split of this program, which errors suggest instead


def load_deepspeed(
    model: ModelConf, path: Path | None, dtype: Dtype, device: torch.device, role: str, ranks: Ranks
) -> CausalModel:
    """Returns this rank's part as DeepSpeed cuts the model. Raises ModelError or DistributedError.

    Each rank first loads the whole model into the host's memory. `path` is None for random weights, `role` is
    "model" or "draft". DeepSpeed moves the part to the accelerator's current device, which is `device`.
    """
    require_deepspeed(model, ranks.world)
    where = f"{role} {model.name}"
    allowed = [Dtype.fp32, Dtype.bf16, *([Dtype.fp16] if device.type == "cuda" else [])]
    if dtype not in allowed:
        raise DistributedError(
            f"DeepSpeed does not compute in this format on {device.type}",
            where=where,
            found=dtype.value,
            allowed=", ".join(d.value for d in allowed),
            fix=f"use bf16, or {OWN_SPLIT}",
        )
    deepspeed = _imported(device)
    module = load_module(model, path, dtype, torch.device("cpu"), role)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints; standard output is for results
            engine = deepspeed.init_inference(
                module,
                tensor_parallel={"tp_size": ranks.world},
                dtype=TORCH_DTYPES[dtype],
                replace_with_kernel_inject=False,
            )
    except (AssertionError, ValueError, RuntimeError, AttributeError, ImportError) as error:
        raise DistributedError(
            "DeepSpeed cannot cut the model", where=where, found=str(error)[:200], fix=f"use {OWN_SPLIT}"
        ) from error
    if not all(weight.numel() for weight in engine.module.parameters()):
        # An empty weight: with fewer KV heads than ranks, this rank may have no heads. The fused attention of
        # torch 2.11 divides by their number, and would kill the rank.
        engine.module.set_attn_implementation("eager")
    causal = CausalModel(_summed_by(engine.module, ranks), model.name)
    log.info("%s: %s on %s, by DeepSpeed over %d ranks", where, dtype.value, device, ranks.world)
    return causal


def _imported(device: torch.device) -> Any:
    """Returns DeepSpeed, quiet, and without the operations that it would compile."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # a user's own choice stays
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import deepspeed
            import deepspeed.ops
    except ImportError as error:
        raise DistributedError(
            "DeepSpeed is not installed",
            found=str(error)[:100],
            fix=f"pip install 'llama-ssp[deepspeed]', or use {OWN_SPLIT}",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # every operation is False: cannot be compiled
    return deepspeed


def _summed_by(module: Any, ranks: Ranks) -> Any:
    """Returns the cut module with the layers whose parts are summed wrapped, so that `ranks` sum them."""
    from deepspeed.module_inject.layers import LinearAllreduce

    for name, layer in list(module.named_modules()):
        if isinstance(layer, LinearAllreduce):
            layer.mp_group = None  # without a process group it leaves out its own sum
            module.set_submodule(name, RowParallel(layer, ranks))
    return module


class RowParallel(nn.Module):
    """A linear layer that holds some of the inputs (K) of all outputs (N); the others are on other ranks.

    It sums over ranks what each has computed, and adds the bias once, after that. `inner` is the layer of
    this rank's inputs.
    """

    def __init__(self, inner: Any, ranks: Ranks) -> None:
        super().__init__()
        self.bias: Tensor | None = inner.bias
        inner.bias = None
        self.inner = inner
        self.ranks = ranks

    @property
    def weight(self) -> Tensor:
        """Returns the part of the inner layer, for code that asks a linear layer for its weight."""
        weight: Tensor = self.inner.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.all_reduce(self.inner(x))  # x: (..., this rank's K), y: (..., N)
        return y if self.bias is None else y + self.bias
