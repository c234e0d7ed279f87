"""Whole layers of one model on all devices of one process (accelerate): GPUs, the CPU, a folder on disk.

No layer is cut, so the logits are those of the plain model, to the bit if all devices compute alike. A layer
that is not on a GPU is brought to one each time it runs.
"""

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
from llama_ssp.models.loader import load_module, made, read, shaped, tried
from llama_ssp.models.quantization import QUANTISED
from llama_ssp.models.sharding import require_module, require_quantised, require_transformers

log = logging.getLogger(__name__)
CPU = "cpu"
DISK = "disk"
Spread = dict[str, int | str]  # the device of each module by its name
# Bytes that weights leave free on the first GPU, on another, and for a layer's caches.
Room = tuple[int, int, int]
Limits = dict[str, str] | Room  # what each device may hold, or what is left free


def load_layers(
    model: ModelConf, path: Path | None, dtype: Dtype, limits: Limits, offload: Path | None, role: str
) -> CausalModel:
    """Loads the model on all devices, or on those of `limits`; what does not fit goes to folder `offload`."""
    require_quantised(model)
    require_module(model.family, f"{role} {model.name}")
    require_transformers(model.name, dtype, role)
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # our own log line says it
    empty = shaped(model, path, dtype, role)
    sizes: dict[str, str] = {}
    room: Room = (0, 0, 0)
    if isinstance(limits, dict):
        sizes = limits
    else:
        room = limits
    spread = spread_with_room(empty, dtype, _limits(sizes), room)
    _require_possible(spread, dtype, offload, f"{role} {model.name}")

    folder = _folder(offload) if offload and DISK in spread.values() else None
    spilled = Path(folder.name) if folder else None
    if path is not None and model.adapter is None:
        module = read(path, dtype, spread, spilled)
    else:  # whole on the CPU first
        from accelerate import dispatch_model

        if path is None:
            module = made(empty, model, dtype, torch.device(CPU), role)
        else:
            module = load_module(model, path, dtype, torch.device(CPU), role)
        skipped = module._skip_keys_device_placement
        module = dispatch_model(module, spread, offload_dir=spilled, skip_keys=skipped)
    module.offload_folder = folder  # is deleted with the module

    hook = getattr(module, "_hf_hook", None)
    device = torch.device(hook.execution_device) if hook else None  # where tokens go in and logits come out
    causal = tried(CausalModel(module, model.name, device=device))
    counts = Counter(map(str, spread.values()))
    where = ", ".join(f"{count} modules on {device}" for device, count in sorted(counts.items()))
    log.info("%s %s: %s, %s", role, model.name, dtype.value, where)
    return causal


def spread_of(module: Any, dtype: Dtype, limits: dict[int | str, int]) -> Spread:
    """Returns the device of each module: GPUs evenly, then the CPU, then the disk."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import CustomDtype, get_balanced_memory

    plain = TORCH_DTYPES[dtype]
    not_quantised = {
        name: plain
        for name, parameter in module.named_parameters()
        if dtype in QUANTISED and (parameter.ndim == 1 or "embed" in name or "lm_head" in name)
    }
    how_held = {
        "no_split_module_classes": module._no_split_modules,
        "dtype": {Dtype.int8: torch.int8, Dtype.nf4: CustomDtype.INT4}.get(dtype, plain),
        "special_dtypes": not_quantised,
    }
    module.tie_weights()
    balanced = get_balanced_memory(module, max_memory=limits, **how_held)
    spread: Spread = dict(infer_auto_device_map(module, max_memory=balanced, **how_held))
    if spread == {"": DISK}:  # accelerate finds no weights under the empty name
        spread = {name: DISK for name, _ in module.named_children()}
    return spread


def spread_with_room(module: Any, dtype: Dtype, limits: dict[int | str, int], room: Room) -> Spread:
    """Returns the device of each module, where the weights leave room on every GPU.

    A layer that is on no GPU runs on the first: its caches are there.
    """
    # Of each device; the first GPU, if any.
    layers = Counter[int | str]()
    first = min(limits, key=str)
    on_first, on_another, for_layer = room
    while True:
        taken = {
            gpu: (on_first if gpu == first else on_another) + for_layer * layers[gpu]
            for gpu in limits
            if gpu != CPU
        }
        left = {device: max(0, size - taken.get(device, 0)) for device, size in limits.items()}
        spread = spread_of(module, dtype, left)

        placed = Counter(spread[name] for name in spread if name.rpartition(".")[2].isdecimal())
        placed[first] += sum(placed.pop(device, 0) for device in (CPU, DISK))
        if placed <= layers or first == CPU:
            return spread
        layers |= placed  # the most of each, so that it ends


def _limits(max_memory: dict[str, str]) -> dict[int | str, int]:
    """Returns the bytes for each device: by the config, or else what is free."""
    from accelerate.utils import get_max_memory

    devices = [*map(str, range(torch.cuda.device_count())), CPU]
    unknown = sorted(set(max_memory) - set(devices))
    if unknown:
        raise DistributedError(
            "placement.max_memory names a device that does not exist",
            found=", ".join(unknown),
            allowed=", ".join(devices),
            fix="correct it",
        )
    try:
        wanted = {int(key) if key.isdigit() else key: size for key, size in max_memory.items()}
        limits: dict[int | str, int] = get_max_memory(wanted or None)
    except ValueError:
        raise UsageError(
            "placement.max_memory holds a text that is not a size",
            found=", ".join(max_memory.values()),
            allowed="such as 20GiB or 500MB",
            fix="correct it",
        ) from None
    return limits


def _require_possible(spread: Spread, dtype: Dtype, offload: Path | None, where: str) -> None:
    """Refuses, before weights are read, what would fail or be wrong later."""
    devices = set(spread.values())
    gpus = devices - {CPU, DISK}
    if DISK in devices and offload is None:
        raise DistributedError(
            "the model does not fit the devices",
            where=where,
            found=f"{sum(device == DISK for device in spread.values())} modules left over",
            fix="set placement.offload_folder=FOLDER, raise placement.max_memory, or take a smaller dtype",
        )
    if dtype in QUANTISED and (DISK in devices or (gpus and CPU in devices)):
        raise DistributedError(
            "quantised layers cannot be kept away from the device that runs them",
            where=where,
            found=f"{dtype.value}, with layers on {DISK if DISK in devices else CPU}",
            allowed="all layers on GPUs, or all on the CPU",
            fix="use bf16, or give the GPUs more memory",
        )


def _folder(offload: Path) -> tempfile.TemporaryDirectory[str]:
    """Makes a folder of this run: accelerate would use files that an older model left."""
    try:
        offload.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="layers-", dir=offload)
    except OSError as error:
        raise StorageError(
            "placement.offload_folder cannot be written",
            where=offload,
            found=error.strerror,
            fix="choose another folder",
        ) from None
