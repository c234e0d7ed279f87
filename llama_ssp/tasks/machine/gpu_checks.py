"""Judges GPUs, and the sums over ranks: is it well, and if not, what to do? No torch.

Each check takes the facts of one rank and yields its findings: none where it has nothing to look at. What is
of a whole node is told by the node's first rank.
"""

import re
from collections.abc import Sequence

from llama_ssp.config.presets import machines
from llama_ssp.distributed.placement import LEADER
from llama_ssp.planner.hardware import matching
from llama_ssp.planner.workload import GIB, MIB
from llama_ssp.tasks.machine.driver import Card
from llama_ssp.tasks.machine.facts import DEVICE, KERNELS, LAUNCH, MEMORY, PEERS, START, SUMS, Facts
from llama_ssp.tasks.machine.finding import BANDWIDTH, Finding, Findings, Problem, Verdict, judged

HOST_BANDWIDTH = "host_gb_s"  # ranks share it: how much each gets says nothing of the rank
HELD_MIB = 512  # a driver takes less of an idle GPU, a program takes more
LESS_POWER = 0.95  # of the usual limit
SLOW_COPY = 0.6  # of the data sheet's bandwidth: a healthy GPU reaches 0.8 and more
SLOW_LAUNCH_US = 20.0  # on a GPU's host; on a quiet one it is about 5
SLOW_SUM_US = 200.0  # of 16 KiB over NCCL: about 20 by NVLink, 60 through the host
CONTAINER = "in a container: docker run --gpus all"
# What CUDA says that does not start, and what helps.
CUDA_FIXES = {
    "driver on your system is too old": "update the driver, or install a torch for it: "
    "./machine-install.sh --cuda=cu126",
    "system not yet initialized": "start Fabric Manager of the driver's version: "
    "systemctl enable --now nvidia-fabricmanager",
    "busy or unavailable": "another program has the GPU for itself: end it, or nvidia-smi -c DEFAULT",
    "no CUDA-capable device": f"check CUDA_VISIBLE_DEVICES; {CONTAINER}",
    "No CUDA GPUs are available": f"check CUDA_VISIBLE_DEVICES; {CONTAINER}",
    "no kernel image": "install a torch that is built for this GPU: ./machine-install.sh --cuda",
    "unknown error": "load the driver's module anew (modprobe -r nvidia_uvm; modprobe nvidia_uvm), or reboot",
    "out of memory": "another program holds the GPU's memory: nvidia-smi names it",
}
CHECK_GPU = "check the GPU and the driver: nvidia-smi, dmesg"
NO_PEERS = "switch ACS and the IOMMU off in the firmware, or set NCCL_P2P_DISABLE=1"


def gpus(facts: Facts) -> Findings:
    """Tells which GPUs there are, and whether torch can use them."""
    if facts.node is None:
        return
    driver = facts.node.driver
    build = facts.build
    is_for_cpus = build.cuda is None and build.rocm is None

    problems = list[Problem]()
    if driver.cards:
        found = _counted([_in_words(card) for card in driver.cards])
        unused = f"; torch {build.version} is the build for CPUs and cannot use them"
        problems = [Problem(is_for_cpus, Verdict.fault, "./machine-install.sh --cuda", unused)]
    elif driver.fails:
        found = f"nvidia-smi fails: {driver.fails}"
        fix = "install the driver (Ubuntu: ubuntu-drivers install), or reboot after its update"
        problems = [Problem(True, Verdict.fault, fix)]
    elif driver.has_device:
        found = "a GPU of NVIDIA without nvidia-smi: plans and ranks=auto do not see it"
        problems = [Problem(True, Verdict.note, f"install nvidia-smi (nvidia-utils); {CONTAINER}")]
    elif facts.host.has_amd and build.rocm is None:
        found = f"a GPU of AMD, which torch {build.version} cannot use"
        problems = [Problem(True, Verdict.note, "./machine-install.sh --rocm")]
    else:
        found = "one that torch finds" if build.has_gpu else "none: models run on the CPU"
    yield judged("gpus", found, problems)


def gpu_health(facts: Facts) -> Findings:
    """Tells of errors of a GPU's memory, of a lower power limit, and of what other programs hold."""
    cards = list(enumerate(facts.node.driver.cards)) if facts.node else []
    if not cards:
        return
    errors = [f"GPU {n} {card.memory_errors:.0f}" for n, card in cards if card.memory_errors]
    limits = [
        f"GPU {n} {card.power_w:.0f} of {card.usual_power_w:.0f} W"
        for n, card in cards
        if card.power_w and card.usual_power_w and card.power_w < LESS_POWER * card.usual_power_w
    ]
    held = [f"GPU {n} {card.used_mib:.0f} MiB" for n, card in cards if (card.used_mib or 0) > HELD_MIB]

    kinds = [
        (
            errors,
            "uncorrected errors of memory",
            Verdict.note,
            "a program that meets one ends; nvidia-smi -r resets a GPU; leave it out (CUDA_VISIBLE_DEVICES) "
            "if they come again",
        ),
        (limits, "a lower power limit", Verdict.note, "nvidia-smi -pl WATTS raises it (as root)"),
        (
            held,
            "memory that other programs hold",
            Verdict.note,
            "nvidia-smi names them; ranks=auto leaves these GPUs out if the others suffice",
        ),
    ]
    for words, what, verdict, fix in kinds:
        if words:
            yield judged("gpu_health", f"{what}: {', '.join(words)}", [Problem(True, verdict, fix)])
    if not errors and not limits and not held:
        yield Finding(name="gpu_health", found="no errors of memory, usual power limit, no other programs")


def driver(facts: Facts) -> Findings:
    """Tells whether the driver is new enough for torch, and whether CUDA starts on this rank."""
    build = facts.build
    if build.cuda is None:
        return
    cards = facts.node.driver.cards if facts.node else ()
    why = facts.measured.why
    complaint = f"{why} {build.warning}".lower()
    fixes = [fix for said, fix in CUDA_FIXES.items() if said.lower() in complaint]
    does_not_start = Problem(
        facts.measured.failed in (START, DEVICE),
        Verdict.fault,
        [*fixes, CHECK_GPU][0],
        f", which does not start: {why}",
    )
    finds_no_gpu = Problem(
        bool(cards) and not build.has_gpu,
        Verdict.fault,
        [*fixes, "check CUDA_VISIBLE_DEVICES, and the driver: nvidia-smi, dmesg"][0],
        f", which finds no GPU{': ' if build.warning else ''}{build.warning}",
    )
    found = f"torch is for CUDA {build.cuda}"
    if cards:
        found = f"{', '.join(dict.fromkeys(card.driver for card in cards))}; {found}"
    if cards or does_not_start.is_there:
        yield judged("driver", found, [does_not_start, finds_no_gpu])


def compute_mode(facts: Facts) -> Findings:
    """Tells whether several processes may use one GPU: the trial needs it next to its rank."""
    cards = facts.node.driver.cards if facts.node else ()
    modes = sorted({card.mode for card in cards if card.is_shown})
    if not modes:
        return
    fix = "nvidia-smi -c DEFAULT (as root; on a cluster ask its administrators)"
    eager = ": one process a GPU, so the trial of compiled steps cannot start, and steps run eagerly"
    problems = [
        Problem("Prohibited" in modes, Verdict.fault, fix, ": no program may use such a GPU"),
        Problem("Exclusive_Process" in modes and facts.world > 1, Verdict.fault, fix, eager),
        Problem("Exclusive_Process" in modes, Verdict.note, fix, ": one process a GPU"),
    ]
    yield judged("compute_mode", ", ".join(modes), problems)


def torch_build(facts: Facts) -> Findings:
    """Tells whether torch has code for this GPU, and whether the GPU computes in bf16."""
    build = facts.build
    purpose = "for CPUs"
    if build.cuda is not None:
        purpose = f"for CUDA {build.cuda}"
    elif build.rocm is not None:
        purpose = f"for ROCm {build.rocm}"

    problems = list[Problem]()
    device = facts.measured.figures.get(DEVICE)
    if device is not None and build.cuda is not None:
        major, minor = device["capability"]
        problems = [
            Problem(
                not _has_code(major, minor, device["built_for"]),
                Verdict.fault,
                "install a build that has it: ./machine-install.sh --cuda; for older GPUs --cuda=cu126",
                f", without code for {device['name']} (sm_{major}{minor})",
            ),
            Problem(
                major < 8,
                Verdict.note,
                "nothing: models run in fp16, and weights in codes are decoded",
                f"; {device['name']} has no bf16",
            ),
        ]
    yield judged("torch", f"{build.version}, {purpose}", problems)


def peer_access(facts: Facts) -> Findings:
    """Tells whether the GPUs of a node reach each other's memory, and whether what they copy arrives."""
    if facts.measured.failed == PEERS:
        fails = f"copies between GPUs fail: {facts.measured.why}"
        yield judged(PEERS, fails, [Problem(True, Verdict.fault, NO_PEERS)])
        return
    links = facts.node.driver.links if facts.node else ()
    by = f" ({', '.join(links)})" if links else ""
    figures = facts.measured.figures.get(PEERS)
    if figures is None:
        return
    if not figures["pairs"]:
        count = len(facts.node.driver.cards) if facts.node else 0
        if count > 1:
            yield Finding(name=PEERS, found=f"tried by llama-ssp calibrate ranks={count}{by}")
        return

    some = "all" if figures["reachable"] == figures["pairs"] else f"{figures['reachable']} of"
    wrong = ", ".join(f"GPU {source} to {target}" for source, target in figures["wrong"])
    problems = [
        Problem(wrong != "", Verdict.fault, NO_PEERS, f"; what is copied arrives wrong: {wrong}"),
        Problem(
            figures["reachable"] < figures["pairs"],
            Verdict.note,
            "nothing, if it is so by design (GeForce since the 40 series, GPUs of two sockets): sums between "
            "the others go through the host's memory",
        ),
    ]
    yield judged(PEERS, f"{some} {figures['pairs']} pairs of GPUs reach each other{by}", problems)


def nccl(facts: Facts) -> Findings:
    """Tells whether NCCL sums, and by which way."""
    device = facts.measured.figures.get(DEVICE)
    if device is None or facts.world == 1:
        return
    version = f"NCCL {device['nccl']}"
    if facts.measured.failed == SUMS:
        fails = f"{version} does not sum: {facts.measured.why}"
        yield judged("nccl", fails, [Problem(True, Verdict.fault, _for_nccl(facts))])
        return
    sums = facts.measured.figures.get(SUMS)
    if sums is None:
        return
    if sums["through_host"]:
        shared = "not used: ranks share a GPU, or one has none, so sums go through the host"
        yield judged("nccl", shared, [Problem(True, Verdict.note, "start as many ranks as there are GPUs")])
        return

    ways = facts.measured.transports
    kinds = {way.partition("/")[0] for way in ways}
    has_tcp = any(way.startswith("NET/Socket") for way in ways)
    problems = [
        Problem(
            "NET" in kinds and facts.nodes == 1,
            Verdict.note,
            "enlarge /dev/shm (docker run --ipc=host); unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE",
            ": over the network within one node",
        ),
        Problem(
            has_tcp and facts.host.has_fabric,
            Verdict.note,
            "unset NCCL_IB_DISABLE; docker run --device /dev/infiniband --ulimit memlock=-1",
            ": TCP, though there is InfiniBand",
        ),
        Problem(
            "SHM" in kinds,
            Verdict.note,
            "nothing, if GPUs do not reach each other (peer access); else unset NCCL_P2P_DISABLE",
            ": through the host's memory",
        ),
    ]
    yield judged("nccl", f"{version} over {', '.join(ways) or 'a way that it does not tell'}", problems)


def sums(facts: Facts) -> Findings:
    """Tells how long sums over the ranks take, by their size, and whether they are right."""
    figures = facts.measured.figures.get(SUMS)
    if facts.measured.failed == SUMS and DEVICE not in facts.measured.figures:
        fix = "check the network between the ranks: GLOO_SOCKET_IFNAME, firewalls"
        yield judged(SUMS, f"they fail: {facts.measured.why}", [Problem(True, Verdict.fault, fix)])
    if figures is None:
        return
    if not figures["us"]:
        count = len(facts.node.driver.cards) if facts.node else 0
        if count > 1:
            yield Finding(
                name=SUMS, found=f"one rank has none: llama-ssp calibrate ranks={count} measures them"
            )
        return

    # Each rank sends, and receives, 2 (n - 1) / n of the bytes.
    share = 2 * (figures["world"] - 1) / figures["world"]
    words = list[str]()
    values: dict[str, float] = {}
    for word, us in figures["us"].items():
        size = int(word)
        of = f"{size // 1024}_kib"
        values[f"us_{of}"] = us
        values[f"bus_gb_s_{of}"] = share * size / us / 1e3
        word = f"{whole_size(size)} {{us_{of}}} us"
        words.append(word if size < MIB else f"{word} ({{bus_gb_s_{of}}} GB/s)")
    is_slow = facts.on_gpu and not figures["through_host"] and min(figures["us"].values()) > SLOW_SUM_US
    problems = [
        Problem(not figures["is_right"], Verdict.fault, _for_nccl(facts), "; and they are wrong"),
        Problem(
            is_slow,
            Verdict.note,
            "a step has two sums a layer, and small ones are slow here: see nccl and environment, or use "
            "fewer ranks",
        ),
    ]
    finding = judged(SUMS, f"over {figures['world']} ranks: {', '.join(words)}", problems, values)
    if facts.rank == LEADER or finding.verdict is not Verdict.ok:  # all ranks have measured the same sums
        yield finding


def memory_bandwidth(facts: Facts) -> Findings:
    """Tells the bandwidth of copies, next to the data sheet's where that is known."""
    yield from _stopped(facts, MEMORY)
    figures = facts.measured.figures.get(MEMORY)
    if figures is None:
        return
    device = facts.measured.figures.get(DEVICE)
    sheet = _data_sheet_gb_s(device["name"]) if device else None
    name = BANDWIDTH if facts.on_gpu else HOST_BANDWIDTH
    found = f"{{{name}}} GB/s read and written by copies"
    if sheet is not None:
        found += f", {sheet:.0f} by the data sheet"
    elif facts.world > 1:
        found += ", on all ranks at once"
    slow = Problem(
        sheet is not None and figures["gb_s"] < SLOW_COPY * sheet,
        Verdict.note,
        "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER says what holds it back: heat, power, another program, or "
        "locked clocks (nvidia-smi -rgc -rmc)",
    )
    yield judged(MEMORY, found, [slow], {name: figures["gb_s"]})


def launch_cost(facts: Facts) -> Findings:
    """Tells how long the host takes to call one operation."""
    yield from _stopped(facts, LAUNCH)
    figures = facts.measured.figures.get(LAUNCH)
    if figures is None:
        return
    slow = Problem(
        facts.on_gpu and figures["us"] > SLOW_LAUNCH_US,
        Verdict.note,
        "the host is slow or busy, so eager steps are slow: look for other programs (top), or a governor "
        "that saves power",
    )
    yield judged(LAUNCH, "{us} us for a call of a small operation", [slow], {"us": figures["us"]})


def kernels(facts: Facts) -> Findings:
    """Tells whether our kernels for GPUs work here."""
    measured = facts.measured
    if measured.failed == KERNELS and measured.is_late:
        again = (
            "check again: what is compiled is kept; if it ends here again, a kernel hangs: engine=eager, and "
            "report it"
        )
        yield judged(KERNELS, f"{measured.why}, compiling them", [Problem(True, Verdict.note, again)])
        return
    fails = measured.figures.get(KERNELS, {"fails": ""})["fails"]
    if measured.failed == KERNELS:
        fails = measured.why
    if fails:
        fix = "see compiler and cache folder; if they are well, report it: this GPU may be new to the kernels"
        yield judged(KERNELS, f"steps would run eagerly: {fails}", [Problem(True, Verdict.fault, fix)])
    elif KERNELS in measured.figures:
        yield Finding(
            name=KERNELS, found="those for attention and for weights in codes give the right numbers"
        )


def _stopped(facts: Facts, step: str) -> Findings:
    """Yields a fault where this step of measuring did not end well."""
    if facts.measured.failed == step:
        fix = CHECK_GPU if facts.on_gpu else "report it"
        yield judged(step, f"it fails: {facts.measured.why}", [Problem(True, Verdict.fault, fix)])


def _for_nccl(facts: Facts) -> str:
    """Returns what to try where NCCL hangs, fails or sums wrongly."""
    network = "" if facts.nodes == 1 else "; between nodes NCCL_SOCKET_IFNAME, firewalls, NCCL_IB_DISABLE=1"
    return (
        "try NCCL_P2P_DISABLE=1: if it helps, switch ACS and the IOMMU off in the firmware; in a container "
        f"docker run --ipc=host --ulimit memlock=-1{network}; NCCL_DEBUG=INFO says more"
    )


def _counted(words: Sequence[str]) -> str:
    """Returns each word with how often it is there."""
    return ", ".join(f"{words.count(word)} x {word}" for word in dict.fromkeys(words))


def _in_words(card: Card) -> str:
    return card.name if card.total_mib is None else f"{card.name} of {card.total_mib * MIB / GIB:.1f} GiB"


def whole_size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


def _has_code(major: int, minor: int, built_for: Sequence[str]) -> bool:
    """Whether a build has code for a GPU of this capability.

    That is code of its own generation, of this minor number or a lower one, or any PTX that is not newer.
    """
    for word in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", word)
        if match is None:
            continue
        kind, major_there, minor_there, is_special = match.groups()
        there = (int(major_there), int(minor_there))
        if there == (major, minor) or (kind == "compute" and there <= (major, minor)):
            return True
        if there[0] == major and there[1] <= minor and not is_special:
            return True
    return False


def _data_sheet_gb_s(name: str) -> float | None:
    """Returns the bandwidth of the preset with this GPU; None where there is none."""
    presets = list(machines().values())
    gpu = matching(name, [str(preset["gpu"]) for preset in presets])
    return next((float(preset["gb_s"]) for preset in presets if preset["gpu"] == gpu), None)
