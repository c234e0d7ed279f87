"""Whole layers of one model on all devices of one process (accelerate): GPUs, the CPU, a folder on disk.

Nothing is computed twice or cut, so the logits are those of the plain model, to the bit where all
devices compute alike. A layer off the GPUs is brought to one, or up from disk, each time it runs.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import DistributedError, StorageError, UsageError
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.loader import made, read, ready, shaped
from llama_ssp.models.quantization import QUANTISED
from llama_ssp.models.sharding import require_quantised

log = logging.getLogger(__name__)
CPU, DISK = "cpu", "disk"
Spread = dict[str, int | str]  # a module's name, and its device


def load_layers(
    model: ModelConf,
    path: Path | None,
    dtype: Dtype,
    max_memory: dict[str, str],
    offload: Path | None,
    role: str,
) -> CausalModel:
    """The model over all devices there are, or over those of `max_memory`; what is left goes to `offload`."""
    require_quantised(model)
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # the log line below says it better
    empty = shaped(model, path, dtype, role)
    spread = spread_of(empty, dtype, _limits(max_memory))
    _require_possible(spread, dtype, offload, f"{role} {model.name}")
    folder = _folder(offload) if DISK in spread.values() else None
    if path is not None:
        module = read(path, dtype, spread, Path(folder.name) if folder else None)
    else:
        module = _dispatched(made(empty, model, dtype, torch.device(CPU), role), spread, folder)
    module.offload_folder = folder  # goes, with what is in it, when the module goes
    causal = CausalModel(module, model.name, device=_first(module))
    ready(causal, model)
    counts = Counter(map(str, spread.values()))
    where = ", ".join(f"{count} modules on {device}" for device, count in sorted(counts.items()))
    log.info("%s %s: %s, %s", role, model.name, dtype.value, where)
    return causal


def spread_of(module: Any, dtype: Dtype, limits: dict[int | str, int]) -> Spread:
    """Which device each module sits on: GPUs evenly, then the CPU, then the disk."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import CustomDtype, get_balanced_memory

    held = {Dtype.int8: torch.int8, Dtype.nf4: CustomDtype.INT4}.get(dtype, TORCH_DTYPES[dtype])
    kept = {
        name: TORCH_DTYPES[dtype]
        for name, parameter in module.named_parameters()
        if dtype in QUANTISED and (parameter.ndim == 1 or "embed" in name or "lm_head" in name)
    }
    whole = {"no_split_module_classes": module._no_split_modules, "dtype": held, "special_dtypes": kept}
    module.tie_weights()
    balanced = get_balanced_memory(module, max_memory=limits, **whole)
    spread: Spread = dict(infer_auto_device_map(module, max_memory=balanced, **whole))
    if spread == {"": DISK}:  # accelerate finds no weights under the empty name
        spread = {name: DISK for name, _ in module.named_children()}
    return spread


def _limits(max_memory: dict[str, str]) -> dict[int | str, int]:
    """Bytes for each device: as asked, else what is free."""
    from accelerate.utils import get_max_memory

    there = [*map(str, range(torch.cuda.device_count())), CPU]
    strange = sorted(set(max_memory) - set(there))
    if strange:
        raise DistributedError(
            "placement.max_memory names a device that is not there", found=", ".join(strange),
            allowed=", ".join(there), fix="correct it",
        )  # fmt: skip
    try:
        asked = {int(key) if key.isdigit() else key: size for key, size in max_memory.items()}
        found: dict[int | str, int] = get_max_memory(asked or None)
    except ValueError:
        raise UsageError(
            "placement.max_memory holds a size that is none", found=", ".join(max_memory.values()),
            allowed="such as 20GiB or 500MB", fix="correct it",
        ) from None  # fmt: skip
    return found


def _require_possible(spread: Spread, dtype: Dtype, offload: Path | None, where: str) -> None:
    """Refuses, before weights are read, what would fail or be wrong after."""
    devices = set(spread.values())
    gpus = devices - {CPU, DISK}
    if DISK in devices and offload is None:
        raise DistributedError(
            "the model does not fit the devices", where=where,
            found=f"{sum(device == DISK for device in spread.values())} modules left over",
            fix="set placement.offload_folder=FOLDER, raise placement.max_memory, or take a smaller dtype",
        )  # fmt: skip
    if dtype in QUANTISED and (DISK in devices or (gpus and CPU in devices)):
        raise DistributedError(
            "quantised layers cannot be kept away from the device that runs them", where=where,
            found=f"{dtype.value}, with layers on {DISK if DISK in devices else CPU}",
            allowed="all layers on GPUs, or all on the CPU", fix="use bf16, or give the GPUs more memory",
        )  # fmt: skip


def _folder(offload: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A folder of our own: accelerate would take an older model's files for this one's."""
    assert offload is not None
    try:
        offload.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="layers-", dir=offload)
    except OSError as error:
        raise StorageError(
            "placement.offload_folder cannot be written", where=str(offload), found=error.strerror,
            fix="choose another folder",
        ) from None  # fmt: skip


def _dispatched(module: Any, spread: Spread, folder: tempfile.TemporaryDirectory[str] | None) -> Any:
    from accelerate import dispatch_model

    return dispatch_model(
        module,
        spread,
        offload_dir=folder.name if folder else None,
        skip_keys=module._skip_keys_device_placement,
    )


def _first(module: Any) -> torch.device:
    """Where tokens go in and logits come out."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        found: torch.device = module.get_input_embeddings().weight.device
        return found
    return torch.device(hook.execution_device)
