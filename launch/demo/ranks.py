"""Training in several processes, by torchrun: each has its own batches, and gradients are averaged."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=7)  # the others wait while the first process samples the target's texts
OF_TORCHRUN = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def join(device: torch.device) -> torch.device:
    """Meets the other processes, if there are any; gives the device of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        on_gpu = device.type == "cuda"
        if on_gpu:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    return device


def leave() -> None:
    """Waits for the others, at the end."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def average_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if world() > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world()


def of_the_first(number: float, device: torch.device) -> float:
    """The first process's number: clocks differ, and all must end at the same step."""
    shared = torch.tensor([number], dtype=torch.float64, device=device)
    if world() > 1:
        dist.broadcast(shared, 0)
    return float(shared)


@contextmanager
def first_alone() -> Iterator[None]:
    """The first process does the work as if it were alone; the others do it when it has ended."""
    if rank():
        dist.barrier()
    hidden = {name: os.environ.pop(name) for name in OF_TORCHRUN if name in os.environ}
    yield
    os.environ.update(hidden)
    if world() > 1 and rank() == 0:
        dist.barrier()
