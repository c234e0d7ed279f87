"""Judges what a host has: is it enough, and if not, what to do? No torch.

Each check takes the facts of one rank and yields its findings: none where it has nothing to look at. What is
of a whole node is told by the node's first rank.
"""

import re

from llama_ssp.planner.workload import GIB, MIB
from llama_ssp.tasks.machine.facts import Facts
from llama_ssp.tasks.machine.finding import Finding, Findings, Problem, Verdict, judged
from llama_ssp.tasks.machine.host import Compiler

# Below the first figure of each pair runs end; below the second they may.
LEAST_MEMORY = GIB
SOME_MEMORY = 4 * GIB
LEAST_SHARED = 64 * MIB  # Docker gives as much, and NCCL needs about 10 MiB for each two GPUs
SOME_SHARED = GIB
LEAST_DISK = 64 * MIB
SOME_DISK = GIB
LEAST_MEMLOCK = 64 * MIB  # InfiniBand registers its buffers
# Features of a processor, and what they are called.
FEATURES = {
    "avx2": "AVX2",
    "avx512bw": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "bf16": "bf16",
}
MORE_SHARED = "docker run --ipc=host, or --shm-size=8g; Kubernetes: an emptyDir of medium Memory at /dev/shm"
OTHER_FOLDER = "TORCHINDUCTOR_CACHE_DIR=FOLDER names another"
# Variables that hurt where there are GPUs: at which values, how bad it is, and why.
HURTFUL: dict[str, tuple[str, Verdict, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", Verdict.fault, "the host waits for each kernel, and no graph is captured"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", Verdict.fault, "no graph can be captured"),
    "NCCL_P2P_DISABLE": ("1", Verdict.note, "sums go through the host's memory"),
    "NCCL_SHM_DISABLE": ("1", Verdict.note, "sums may go over the network within a node"),
    "NCCL_IB_DISABLE": ("1", Verdict.note, "sums between nodes go over TCP"),
    "NCCL_P2P_LEVEL": ("(?!NVL$|SYS$|5$).+", Verdict.note, "it may keep GPUs from reaching each other"),
    "NCCL_ALGO": (".+", Verdict.note, "NCCL chooses the fastest way by itself"),
    "NCCL_PROTO": (".+", Verdict.note, "NCCL chooses the fastest way by itself"),
    "NCCL_GRAPH_REGISTER": (
        "1",
        Verdict.note,
        "sums in CUDA graphs may hang if the allocator's segments grow",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", Verdict.note, "the host waits for each sum"),
    "NCCL_DEBUG": ("(?i)trace", Verdict.note, "NCCL logs every call"),
}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # variables that name network interfaces


def cpu(facts: Facts) -> Findings:
    """Tells of the processor, and whether there are more threads than cores for them."""
    cores = facts.host.cores
    threads = facts.build.threads
    names = [name for feature, name in FEATURES.items() if feature in facts.host.features]

    words = [
        f"{cores} cores" if cores > 1 else "one core",
        f"{threads} threads" if threads > 1 else "one thread",
    ]
    if facts.world > 1:
        words[1] += " a rank"
    found = f"{facts.host.processor}; {', '.join([*words, *names])}"
    fewer = Problem(
        threads > cores,
        Verdict.note,
        f"fewer cores are free than there are threads: end other programs, or OMP_NUM_THREADS={cores}",
    )
    slow = Problem(
        not names and not facts.on_gpu, Verdict.note, "models are slow on such a processor", ", without AVX2"
    )
    yield judged("cpu", found, [fewer, slow])


def host_memory(facts: Facts) -> Findings:
    """Tells how much memory is available to this process, its container and its job."""
    memory = facts.host.memory
    fix = (
        "end other programs, or raise the limit (docker run --memory, sbatch --mem): "
        "a run with small models takes 2 GiB a rank"
    )
    problems = [
        Problem(memory < LEAST_MEMORY, Verdict.fault, fix),
        Problem(memory < SOME_MEMORY, Verdict.note, fix),
    ]
    figures = {"available_gib": memory / GIB}
    yield judged("host_memory", "{available_gib} GiB available", problems, figures)


def memlock(facts: Facts) -> Findings:
    """Tells how much memory may be locked, which InfiniBand does."""
    limit = facts.host.memlock
    if limit is None:
        yield Finding(name="memlock", found="no limit")
        return
    too_little = Problem(
        facts.host.has_fabric and facts.on_gpu and limit < LEAST_MEMLOCK,
        Verdict.fault if facts.nodes > 1 else Verdict.note,
        "ulimit -l unlimited (/etc/security/limits.conf); docker run --ulimit memlock=-1; "
        "Slurm: PropagateResourceLimitsExcept=MEMLOCK",
        ", too little for InfiniBand",
    )
    yield judged("memlock", f"{size_text(limit)} may be locked (ulimit -l)", [too_little])


def shared_memory(facts: Facts) -> Findings:
    """Tells of /dev/shm, through which NCCL sums where GPUs do not reach each other."""
    if facts.node is None:
        return
    shared = facts.host.shared
    several = len(facts.node.driver.cards) > 1
    if shared is None:
        found = "there is no /dev/shm"
        elsewhere = "nothing: ranks=N meets in the folder for temporary files (TMPDIR) instead"
        problems = [Problem(several, Verdict.fault, MORE_SHARED), Problem(True, Verdict.note, elsewhere)]
    else:
        found = f"/dev/shm has {size_text(shared.free)} free of {size_text(shared.total)}"
        left = "delete what programs have left there: ls -l /dev/shm"
        problems = [
            Problem(several and shared.free < LEAST_SHARED, Verdict.fault, MORE_SHARED),
            Problem(several and shared.free < SOME_SHARED, Verdict.note, MORE_SHARED),
            Problem(shared.free < MIB, Verdict.note, left),
        ]
    yield judged("shared_memory", found, problems)


def compiler(facts: Facts) -> Findings:
    """Tells whether there are compilers, and whether they build a small program.

    Our kernels for CPUs need the one for C++. Triton needs the one for C, with Python's headers.
    """
    if facts.node is None:
        return
    cxx = facts.node.cxx_compiler
    c = facts.node.c_compiler
    if c is None:
        yield _compiler(cxx, "C++", "apt install g++, or name one with CXX", Verdict.note)
        return

    findings = [
        _compiler(cxx, "C++", "apt install g++, or name one with CXX", Verdict.note),
        _compiler(c, "C", "apt install gcc python3-dev, or name one with CC", Verdict.fault),
    ]
    bad = [finding for finding in findings if finding.verdict is not Verdict.ok]
    if bad:
        yield from bad
    else:
        yield Finding(name="compiler", found="; ".join(finding.found for finding in findings))


def _compiler(tried: Compiler, language: str, fix: str, verdict: Verdict) -> Finding:
    eager = "; steps run eagerly, several times slower"
    if tried.path is None:
        return judged("compiler", f"none for {language}", [Problem(True, verdict, fix, eager)])
    if tried.fails:
        found = f"{tried.path} fails on a small program: {tried.fails}"
        return judged("compiler", found, [Problem(True, verdict, fix, eager)])
    return Finding(name="compiler", found=f"{tried.path} builds {language}")


def cache_folder(facts: Facts) -> Findings:
    """Tells whether compiled code can be kept, loaded, and found by later starts."""
    bad = Verdict.fault if facts.on_gpu else Verdict.note
    for folder in facts.folders:
        free = folder.free or 0
        eager = "; steps run eagerly, or are compiled at each start"
        left = f", {size_text(free)} free"
        problems = [
            Problem(folder.fails != "", bad, OTHER_FOLDER, f": {folder.fails}{eager}"),
            Problem(not folder.runs_code, bad, OTHER_FOLDER, f": no code runs from there (noexec){eager}"),
            Problem(free < LEAST_DISK, bad, f"make room there; {OTHER_FOLDER}", left),
            Problem(
                folder.is_temporary,
                Verdict.note,
                f"make ~/.cache/llama-ssp writable; {OTHER_FOLDER}",
                ", among temporary files: gone after a restart",
            ),
            Problem(free < SOME_DISK, Verdict.note, f"make room there; {OTHER_FOLDER}", left),
        ]
        yield judged("cache_folder", folder.path, problems)


def environment(facts: Facts) -> Findings:
    """Tells of variables that make runs slower, or end them."""
    has_gpus = facts.on_gpu or bool(facts.node and facts.node.driver.cards)
    findings = list[Finding]()
    for name, (values, verdict, why) in HURTFUL.items():
        value = facts.host.variables.get(name, "")
        if has_gpus and re.fullmatch(values, value):
            hurts = Problem(True, verdict, f"unset {name}", f": {why}")
            findings.append(judged("environment", f"{name}={value}", [hurts]))

    there = ", ".join(facts.host.interfaces)
    for name in INTERFACES:
        value = facts.host.variables.get(name, "")
        if value and facts.world > 1 and not _is_there(value, facts.host.interfaces):
            unknown = Problem(
                True,
                Verdict.fault,
                f"correct or unset {name}; ip address lists the interfaces",
                f" names no network interface; here are {there}",
            )
            findings.append(judged("environment", f"{name}={value}", [unknown]))
    yield from findings or [Finding(name="environment", found="no variable that is known to hurt")]


def _is_there(value: str, interfaces: tuple[str, ...]) -> bool:
    """Whether an interface is meant: NCCL takes beginnings of names, =NAME is a whole one, ^ leaves out."""
    if value.startswith("^"):
        return True
    names = [name.removeprefix("=").partition(":")[0] for name in value.split(",")]
    return any(interface.startswith(name) for name in names for interface in interfaces)


def size_text(size: int) -> str:
    """Returns bytes as text, in GiB or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
