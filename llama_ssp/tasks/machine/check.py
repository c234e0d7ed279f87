"""Checks the machine before it is measured: each rank reads and judges what is its own, the leader tells all.

The ranks meet on the host, as NCCL may not work. What may hang is in small processes with a limit. Where the
machine is fit, the ranks meet again on their devices.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from llama_ssp.config import Dtype, RunConf
from llama_ssp.config.environment import MAX_WORLD, number_of
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.process_group import open_ranks
from llama_ssp.models.devices import device_of, dtype_of
from llama_ssp.models.kernels.build import FLAGS
from llama_ssp.pair.session import first_cause, ranks_of
from llama_ssp.pair.trial import Trial
from llama_ssp.tasks.machine import gpu_checks, host_checks
from llama_ssp.tasks.machine.device import steps
from llama_ssp.tasks.machine.driver import Driver, driver_here
from llama_ssp.tasks.machine.facts import Facts, NodeFacts, TorchBuild
from llama_ssp.tasks.machine.finding import (
    Finding,
    Findings,
    MachineCheck,
    Problem,
    Verdict,
    findings_of,
    judged,
    merged,
    text_of_findings,
)
from llama_ssp.tasks.machine.host import c_compiler, cache_folders, cxx_compiler, host_here
from llama_ssp.tasks.machine.small import measured_apart, measured_here

CHECK_S = 60.0  # the screen is there by then
LAST_S = 10.0  # for what comes before and after: Python starts, the ranks end

# In the order of the screen.
CHECKS: tuple[Callable[[Facts], Findings], ...] = (
    gpu_checks.gpus,
    gpu_checks.gpu_health,
    gpu_checks.driver,
    gpu_checks.compute_mode,
    gpu_checks.torch_build,
    gpu_checks.peer_access,
    gpu_checks.nccl,
    gpu_checks.sums,
    gpu_checks.memory_bandwidth,
    gpu_checks.launch_cost,
    gpu_checks.kernels,
    host_checks.cpu,
    host_checks.host_memory,
    host_checks.memlock,
    host_checks.shared_memory,
    host_checks.compiler,
    host_checks.cache_folder,
    host_checks.environment,
)


def check_machine(run: RunConf) -> tuple[MachineCheck, Ranks]:
    """Checks the machine; returns what was found and, if it is fit, the run's ranks. All ranks call it.

    If it is not, the ranks are those that met on the host: others might hang.
    """
    began = time.monotonic()
    ranks = open_ranks(
        torch.device("cpu"), run.placement.timeout_s, run.placement.appear_s, run.placement.loading_s
    )
    with first_cause(ranks):
        facts = facts_here(device_of(run.placement.target_device, "placement.target_device"), ranks)
        findings = judged_here(facts)
        rows = merged(_gathered(findings, ranks))
        is_fit = all(row.verdict is not Verdict.fault for row in rows)
        has_gpu = any(on_gpu for (on_gpu,) in ranks.gather_ints([int(facts.on_gpu)]))
        if is_fit and has_gpu:
            ranks.close()

    if is_fit and has_gpu:
        ranks = ranks_of(run)
    with first_cause(ranks):
        left_s = CHECK_S - LAST_S - (time.monotonic() - began)
        if is_fit:
            findings.append(trial(run, ranks, left_s))
        rows = merged(_gathered(findings, ranks))
    return MachineCheck(tuple(rows), time.monotonic() - began), ranks


def judged_here(facts: Facts) -> list[Finding]:
    """Returns what one rank finds."""
    return [finding for check in CHECKS for finding in check(facts)]


def facts_here(device: torch.device, ranks: Ranks) -> Facts:
    """Reads and measures what is this rank's part; all ranks call it."""
    local_rank = number_of("LOCAL_RANK", 0, MAX_WORLD, default=0)
    is_first = local_rank == 0  # of its node
    nodes = sum(rank == 0 for (rank,) in ranks.gather_ints([local_rank]))
    build = _build_here()
    node = _node_here(build.has_gpu) if is_first else None
    on_gpu = may_hang(device)
    is_apart = any(there for (there,) in ranks.gather_ints([int(on_gpu)]))  # all sum in the same way
    tries_peers = on_gpu and node is not None and _may_share(node.driver)
    ranks.barrier()  # the compilers are done: they would disturb what is measured

    if is_apart:
        measured = measured_apart(device, ranks, tries_peers)
    else:
        measured = measured_here(steps(device, lambda: ranks, tries_peers))
    return Facts(
        rank=ranks.rank,
        world=ranks.world,
        nodes=nodes,
        on_gpu=on_gpu,
        host=host_here(),
        build=build,
        folders=tuple(cache_folders(with_triton=on_gpu)),
        measured=measured,
        node=node,
    )


def may_hang(device: torch.device) -> bool:
    """Whether the device is a GPU, which is measured in a process of its own: its driver or NCCL may hang."""
    return device.type == "cuda"


def trial(run: RunConf, ranks: Ranks, left_s: float) -> Finding:
    """Returns the verdict of the trial of compiled steps over several GPUs: a kept one, or one made now."""
    device = device_of(run.placement.target_device, "placement.target_device")
    if ranks.world == 1 or device.type == "cpu":
        return Finding(name="trial", found="none is needed: it is of compiled steps over several GPUs")
    if ranks.through_host:
        return Finding(name="trial", found="none is made: steps that sum through the host run eagerly")

    attempt = Trial(
        name="the check", dtype=dtype_of(Dtype.auto, device, "model.dtype"), device=device, ranks=ranks
    )
    if attempt.passes(max(left_s, 0.0)):
        return Finding(name="trial", found="compiled steps over all ranks give the logits of eager ones")
    if not attempt.is_lasting:
        again = Problem(True, Verdict.note, "nothing: the next run tries again")
        return judged("trial", f"no verdict yet: {attempt.verdict}", [again])
    fix = f"see nccl and kernels; delete {attempt.file} to try again, or skip it with engine=compiled"
    failed = Problem(True, Verdict.fault, fix, "; steps run eagerly")
    return judged("trial", f"it failed: {attempt.verdict}", [failed])


def _node_here(has_gpu: bool) -> NodeFacts:
    """Reads what is the same for all ranks of a node; each of these calls has a limit."""
    with ThreadPoolExecutor() as pool:
        driver = pool.submit(driver_here)
        cxx = pool.submit(cxx_compiler, FLAGS)
        c = pool.submit(c_compiler)
        has_gpus = has_gpu or bool(driver.result().cards) or driver.result().has_device
        return NodeFacts(
            driver=driver.result(),
            cxx_compiler=cxx.result(),
            c_compiler=c.result() if has_gpus else None,
        )


def _build_here() -> TorchBuild:
    """Reads which torch this is, and what it warns of when it looks for GPUs."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        has_gpu = torch.cuda.is_available()
    lines = [str(warning.message).splitlines()[0] for warning in said]
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        threads=torch.get_num_threads(),
        has_gpu=has_gpu,
        warning=next((line for line in lines if "CUDA" in line), ""),
    )


def _may_share(driver: Driver) -> bool:
    """Whether a process may have a GPU that another rank has, to copy between both."""
    return all(card.mode == "Default" for card in driver.cards)


def _gathered(findings: Sequence[Finding], ranks: Ranks) -> list[list[Finding]]:
    """Returns the findings of every rank; all ranks call it."""
    return [findings_of(text) for text in ranks.gather_texts(text_of_findings(findings))]
