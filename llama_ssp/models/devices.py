"""The device and the number format of a model, from the config and from what this machine has."""

import time
from typing import Any, cast

import torch

from llama_ssp.config import Dtype
from llama_ssp.config.environment import MAX_WORLD, number_of
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.models.host_memory import memory_here

# Of activations, and of weights that are not in codes.
TORCH_DTYPES = {
    **dict.fromkeys(Dtype, torch.bfloat16),
    Dtype.fp64: torch.float64,
    Dtype.fp32: torch.float32,
    Dtype.fp16: torch.float16,
}
ALLOWED = "auto, cpu, cuda:N"


def device_of(name: str, key: str) -> torch.device:
    """Returns the device that config value `key` names; `auto` is this rank's GPU, or else the CPU."""
    rank = number_of("LOCAL_RANK", 0, MAX_WORLD, default=0)  # each rank of a machine takes the next GPU
    if name == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return torch.device(f"cuda:{rank % count}" if count else "cpu")

    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{key} is not a device", found=name, allowed=ALLOWED, fix="correct it") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"{key} names a device this program does not use", found=name, allowed=ALLOWED, fix="choose one"
        )

    count = torch.cuda.device_count()
    if device.type == "cuda" and device.index is None:
        # By its number: one name a device, or two roles would each count it as theirs.
        device = torch.device(f"cuda:{rank % max(count, 1)}")
    if device.type == "cuda" and device.index >= count:
        raise DistributedError(
            f"{key} names a GPU that does not exist",
            found=name,
            allowed=f"{count} visible to torch {torch.__version__}",
            fix="use placement=cpu, or check the driver, CUDA_VISIBLE_DEVICES and the torch build",
        )
    return device


def dtype_of(dtype: Dtype, device: torch.device, key: str, in_fp16: bool = False) -> Dtype:
    """Returns the format; `auto` is bf16 if the device computes in it, else fp16 on a GPU and fp32 on a CPU.

    `in_fp16`: the weights are fp16 on disk, which has more digits than bf16. A GPU keeps them so.
    """
    if device.type == "cpu":
        modern = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        other = Dtype.fp32
    else:
        modern = torch.cuda.get_device_capability(device) >= (8, 0)
        other = Dtype.fp16
    if dtype is Dtype.auto and in_fp16 and device.type != "cpu":
        return Dtype.fp16
    if dtype is Dtype.auto:
        return Dtype.bf16 if modern else other
    if dtype is Dtype.bf16 and not modern and device.type != "cpu":
        raise DistributedError(
            f"{key}=bf16 is not supported",
            where=torch.cuda.get_device_name(device),
            allowed="compute capability 8.0 or later",
            fix=f"use {key}=fp16",
        )
    return dtype


def memory_of(device: torch.device, ranks: Ranks = ALONE) -> int:
    """Returns the bytes that are free on the device; ranks that share a GPU, each its part of them."""
    name = ""  # of this rank's GPU
    if device.type == "cuda":
        torch.cuda.mem_get_info(device)  # makes this rank's context: it is there when any rank measures
        name = str(torch.cuda.get_device_properties(device).uuid)
    sharing = ranks.gather_texts(name).count(name)
    if not name:
        return memory_here()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) // sharing


def usage_of(device: torch.device) -> dict[str, int]:
    """Returns a GPU's bytes: free, reserved by this process, of these for graphs, and held by all others."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    snapshot = cast(Any, torch.cuda.memory_snapshot)
    graphs = sum(part["total_size"] for part in snapshot() if any(part.get("segment_pool_id", ())))
    return {"free": free, "reserved": reserved, "graphs": graphs, "others": total - free - reserved}


def every_device() -> list[torch.device]:
    """Returns the host, and the GPUs it has."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def describe(device: torch.device) -> str:
    """Returns the device in words, for records."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def now() -> float:
    """Returns the clock's time, in seconds, after the GPU's work.

    Not torch.utils.benchmark's: every command would import torch's C++ extensions, and print what they say.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
