"""DeepSpeed's AutoTP: every rank loads the whole model, then DeepSpeed cuts it; our ranks sum the parts.

DeepSpeed gets a loaded model: files it would unpickle. Its own sum for CPUs is not used: it needs shared
memory, a compiler and one machine, waits busily, and leaves segments behind. So a cut layer gets no group,
and is wrapped like the layers of our own loader.
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
OWN = "placement.splitting=tensor"  # the split of this program


def load_deepspeed(
    model: ModelConf, path: Path | None, dtype: Dtype, device: torch.device, role: str, ranks: Ranks
) -> CausalModel:
    """This rank's part as DeepSpeed cuts the model; first, every rank needs memory for the whole model."""
    require_deepspeed(model, ranks.world)
    where = f"{role} {model.name}"
    allowed = [Dtype.fp32, Dtype.bf16, *([Dtype.fp16] if device.type == "cuda" else [])]
    if dtype not in allowed:
        raise DistributedError(
            f"DeepSpeed does not compute in this format on {device.type}",
            where=where,
            found=dtype.value,
            allowed=", ".join(d.value for d in allowed),
            fix=f"use bf16, or {OWN}",
        )
    deepspeed = _imported(device)
    module = load_module(model, path, dtype, torch.device("cpu"), role)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            engine = deepspeed.init_inference(
                module,
                tensor_parallel={"tp_size": ranks.world},
                dtype=TORCH_DTYPES[dtype],
                replace_with_kernel_inject=False,
            )
    except (AssertionError, ValueError, RuntimeError, AttributeError, ImportError) as error:
        raise DistributedError(
            "DeepSpeed cannot cut the model", where=where, found=str(error)[:200], fix=f"use {OWN}"
        ) from error
    if not all(weight.numel() for weight in engine.module.parameters()):
        # Perhaps no heads are here: torch 2.11's fused attention divides by their number, and the rank dies.
        engine.module.set_attn_implementation("eager")
    causal = CausalModel(_summed_by(engine.module, ranks), model.name)
    log.info("%s: %s on %s, by DeepSpeed over %d ranks", where, dtype.value, device, ranks.world)
    return causal


def _imported(device: torch.device) -> Any:
    """DeepSpeed, quiet, and without the operations that it would compile."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import deepspeed
            import deepspeed.ops
    except ImportError as error:
        raise DistributedError(
            "DeepSpeed is not installed",
            found=str(error)[:100],
            fix=f"pip install 'llama-ssp[deepspeed]', or use {OWN}",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def _summed_by(module: Any, ranks: Ranks) -> Any:
    """The cut module, with layers that `ranks` sum; a layer without a group does not sum itself."""
    from deepspeed.module_inject.layers import LinearAllreduce

    for name, layer in list(module.named_modules()):
        if isinstance(layer, LinearAllreduce):
            layer.mp_group = None
            module.set_submodule(name, RowParallel(layer, ranks))
    return module


class RowParallel(nn.Module):
    """A linear layer, in any number format, with some of the inputs: sums over ranks, adds the bias once."""

    def __init__(self, inner: Any, ranks: Ranks) -> None:
        super().__init__()
        self.bias: Tensor | None = inner.bias
        inner.bias = None
        self.inner = inner
        self.ranks = ranks

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.inner.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.all_reduce(self.inner(x))
        return y if self.bias is None else y + self.bias
