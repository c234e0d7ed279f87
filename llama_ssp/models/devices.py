"""Which device and which number format, from what was asked and what there is."""

from __future__ import annotations

import torch

from llama_ssp.config import Dtype
from llama_ssp.config.environment import MAX_WORLD, number_of
from llama_ssp.errors import DistributedError, UsageError
from llama_ssp.models.host_memory import memory_here

TORCH_DTYPES = {
    Dtype.fp64: torch.float64, Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16,
    Dtype.fp16: torch.float16, Dtype.int8: torch.bfloat16, Dtype.nf4: torch.bfloat16,
}  # fmt: skip


def device_of(asked: str, key: str) -> torch.device:
    """The device a config value names; `auto` is the first GPU (the rank's own), else the CPU."""
    rank = number_of("LOCAL_RANK", 0, MAX_WORLD, default=0)  # each rank of a machine takes the next GPU
    if asked == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return torch.device(f"cuda:{rank % count}" if count else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise UsageError(
            f"{key} names no device", found=asked, allowed="auto, cpu, cuda:N", fix="correct it"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"{key} names a device this program does not use",
            found=asked,
            allowed="auto, cpu, cuda:N",
        )
    count = torch.cuda.device_count()
    if device.type == "cuda" and device.index is None:
        # By its number: one name a device, or two roles would each count it as theirs.
        device = torch.device(f"cuda:{rank % max(count, 1)}")
    if device.type == "cuda" and device.index >= count:
        raise DistributedError(
            f"{key} names a GPU that is not there", found=asked,
            allowed=f"{count} visible to torch {torch.__version__}",
            fix="use placement=cpu, or check the driver, CUDA_VISIBLE_DEVICES and the torch build",
        )  # fmt: skip
    return device


def dtype_of(asked: Dtype, device: torch.device, key: str) -> Dtype:
    """`auto` is bf16 where the device computes in it, else fp16 on a GPU and fp32 on a CPU."""
    if device.type == "cpu":
        return asked if asked is not Dtype.auto else (Dtype.bf16 if _cpu_has_bf16() else Dtype.fp32)
    modern = torch.cuda.get_device_capability(device) >= (8, 0)
    if asked is Dtype.auto:
        return Dtype.bf16 if modern else Dtype.fp16
    if asked is Dtype.bf16 and not modern:
        raise DistributedError(
            f"{key}=bf16 is not supported", where=torch.cuda.get_device_name(device),
            allowed="compute capability 8.0 or later", fix=f"use {key}=fp16",
        )  # fmt: skip
    return asked


def memory_of(device: torch.device) -> int:
    """Bytes free for us there."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return memory_here()


def every_device() -> list[torch.device]:
    """The host, and the GPUs it has."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def describe(device: torch.device) -> str:
    """The device in words, for records."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )


def _cpu_has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
