"""DeepSpeed's AutoTP: every rank loads the whole model, then DeepSpeed cuts it; the sums go by our ranks.

The model is handed over loaded: given files, DeepSpeed would unpickle them. Its own sum for CPUs (shared
memory, compiled at first use, one machine only, waiting busily, and leaving its segments behind) is left
out: a cut layer is told of no group, and wrapped like those of our own loader.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DistributedError
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.loader import made, read, require_finite, shaped
from llama_ssp.models.parallel_layers import RowParallel
from llama_ssp.models.sharding import require_deepspeed

log = logging.getLogger(__name__)
CPU = torch.device("cpu")


def load_deepspeed(
    model: ModelConf, path: Path | None, dtype: Dtype, device: torch.device, role: str, ranks: Ranks
) -> CausalModel:
    """This rank's part of the model as DeepSpeed cuts it; needs memory for the whole on every rank first."""
    require_deepspeed(model, ranks.world)
    _require_computed(dtype, device, f"{role} {model.name}")
    deepspeed = _opened(device)
    if path is None:
        module = made(shaped(model, None, dtype, role), model, dtype, CPU, role)
    else:
        module = read(path, dtype, {"": CPU})
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
            "DeepSpeed cannot cut the model", where=f"{role} {model.name}", found=str(error)[:200],
            fix="use placement.splitting=tensor",
        ) from error  # fmt: skip
    causal = CausalModel(_spoken(engine.module, ranks), model.name)
    if model.scan:
        require_finite(causal)
    log.info(
        "%s %s: %s on %s, by DeepSpeed over %d ranks", role, model.name, dtype.value, device, ranks.world
    )
    return causal


def _opened(device: torch.device) -> Any:
    """DeepSpeed, quiet, and without the operations that it would compile."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import deepspeed
            import deepspeed.ops
    except ImportError as error:
        raise DistributedError(
            "DeepSpeed is not installed", found=str(error)[:100],
            fix="pip install 'llama-ssp[deepspeed]', or use placement.splitting=tensor",
        ) from None  # fmt: skip
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def _require_computed(dtype: Dtype, device: torch.device, where: str) -> None:
    allowed = [Dtype.fp32, Dtype.bf16, *([Dtype.fp16] if device.type == "cuda" else [])]
    if dtype not in allowed:
        raise DistributedError(
            f"DeepSpeed does not compute in this format on {device.type}", where=where, found=dtype.value,
            allowed=", ".join(d.value for d in allowed), fix="use bf16, or placement.splitting=tensor",
        )  # fmt: skip


def _spoken(module: Any, ranks: Ranks) -> Any:
    """The cut module, whose layers sum by `ranks`; a layer without a group sums nothing itself."""
    from deepspeed.module_inject.layers import LinearAllreduce

    for name, layer in list(module.named_modules()):
        if isinstance(layer, LinearAllreduce):
            layer.mp_group = None
            module.set_submodule(name, RowParallel(layer, ranks))
    return module
