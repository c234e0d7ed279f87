"""What was measured of this machine, in a file for later plans: written, found again, or noticed as stale.

A file is for one processor, GPU, number of ranks and of threads, and for one version of torch and of what the
constants mean. `llama-ssp calibrate` writes it, else the first run that ends well, less exactly. No torch.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llama_ssp.config import ClusterConf, TimesConf
from llama_ssp.distributed.cores import cores_here
from llama_ssp.models.host_cores import given_threads
from llama_ssp.models.kept_files import ONLY_US, part_of, processor, user_folder
from llama_ssp.planner.storage import CPU
from llama_ssp.report.machine import processor_name

log = logging.getLogger(__name__)

FOLDER = "machine"
# 0: no file is written or read, so that plans are the same on every machine. A path is that of a job's file:
# the job is planned as when it began (batch/job.py), with what is in this file, or with nothing.
SWITCH = "LLAMA_SSP_MEASURED"
OFF = "0"
MEANING = 2  # of the constants; one more whenever the plan's formula gives one another meaning
OF_NETWORK = "between_us", "between_gb_s"
FIGURES = ("gb_s", "tflops", "context_mib", *OF_NETWORK)
NOT_YET = "this machine is not measured yet"
OF_TIMES = tuple(each.name for each in fields(TimesConf) if each.name not in ("source", "all_reduce_us"))
WRONG_CONTENT = ValueError, KeyError, TypeError, AttributeError
BY_CALIBRATE = "llama-ssp calibrate"
BY_RUN = "the end of a run"
MAX_FIGURE = 1e9  # as of the keys of the configuration


@dataclass(frozen=True, kw_only=True)
class MachineKey:
    """What constants are of. On a GPU they do not depend on ranks and threads, which are 0 then."""

    processor: str
    gpu: str
    ranks: int
    threads: int
    torch: str
    meaning: int = MEANING

    @property
    def place(self) -> Path:
        """Returns the file. Raises RuntimeError if the user has no home."""
        of_versions = _digest([self.torch, self.meaning])
        return user_folder() / FOLDER / f"{self._of_machine}-{of_versions}.json"

    @property
    def _of_machine(self) -> str:
        return _digest([self.processor, self.gpu, self.ranks, self.threads])

    def others(self) -> list[Path]:
        """Returns the files of this machine that other versions have written, the newest first."""
        written = self.place.parent.glob(f"{self._of_machine}-*.json")
        return sorted(written, key=lambda file: file.stat().st_mtime, reverse=True)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Measured figures of a cluster's preset, and who measured them, and when."""

    by: str = ""
    day: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    times: TimesConf = field(default_factory=TimesConf)

    @property
    def source(self) -> str:
        return f"this machine, measured by {self.by}, {self.day}"

    @property
    def lacks_kernels(self) -> bool:
        """Returns whether a run has measured a CPU of which it had not loaded our kernels."""
        return self.by == BY_RUN and self.times.kernel_gb_s is None

    def lacks_sums(self, of_node: int, nodes: int = 1) -> bool:
        """Returns whether sums over so many ranks of a node, or over nodes, have not been measured."""
        if nodes > 1 and "between_us" not in self.figures:
            return True
        return of_node > 1 and of_node not in self.times.all_reduce_us

    def over(self, cluster: ClusterConf, preset: dict[str, Any]) -> ClusterConf:
        """Returns the cluster with these constants where it leaves figures open, else as the GPU's preset."""
        open_figures: dict[str, Any] = {
            name: figure for name, figure in self.figures.items() if getattr(cluster, name) is None
        }
        if cluster.times != TimesConf():
            return replace(cluster, **open_figures)

        of_preset = replace(TimesConf(), **preset.get("times", {}))
        measured: dict[str, Any] = _known(self.times)
        reduce = {**of_preset.all_reduce_us, **self.times.all_reduce_us}
        source = self.source
        if self.times.layer_us is None:
            source = f"{of_preset.source}; sums over ranks: {source}"
        times = replace(of_preset, **{**measured, "all_reduce_us": reduce, "source": source})
        return replace(cluster, **open_figures, times=times)


@dataclass(frozen=True, kw_only=True)
class KeptConstants:
    """The constants that are kept for this machine, and the file's content; else None, and why."""

    on_cpu: bool
    constants: Constants | None = None
    content: dict[str, Any] = field(default_factory=dict)
    lacks: str = ""


def is_switched_off() -> bool:
    """Returns whether nothing may be kept: the user says so, or this is a job that was begun earlier."""
    return bool(os.environ.get(SWITCH))


def plan_as_begun(file: Path | None) -> None:
    """Has this process, and what it starts, plan by a job's file; None: by what is kept, for a new job."""
    if os.environ.get(SWITCH) == OFF:
        return
    os.environ.pop(SWITCH, None)
    if file is not None:
        os.environ[SWITCH] = str(file.absolute())


def can_keep() -> bool:
    """Returns whether constants are kept at all, and can be written."""
    if is_switched_off():
        return False
    try:
        folder = user_folder() / FOLDER
        folder.mkdir(parents=True, exist_ok=True, mode=ONLY_US)
    except (OSError, RuntimeError):
        return False
    return os.access(folder, os.W_OK)


def threads_of(ranks: int) -> int:
    """Returns the threads of each of so many ranks on this machine, as what starts them says."""
    return given_threads() or max(cores_here() // ranks, 1)


def key_here(gpu: str, ranks: int) -> MachineKey:
    """Returns what constants of this machine are kept by."""
    on_cpu = gpu == CPU
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return MachineKey(
        processor=f"{processor_name()}, features {_digest([processor()])}",
        gpu=gpu,
        ranks=ranks if on_cpu else 0,
        threads=threads_of(ranks) if on_cpu else 0,
        torch=torch,
    )


def kept_constants(gpu: str, ranks: int) -> KeptConstants:
    """Returns what is kept of this machine; with a reason where there is nothing, or it is stale."""
    on_cpu = gpu == CPU
    given = os.environ.get(SWITCH)
    if given == OFF:
        lacks = f"{SWITCH}={OFF}: what was measured of this machine is not used"
        return KeptConstants(on_cpu=on_cpu, lacks=lacks if on_cpu else "")
    key = key_here(gpu, ranks)
    with suppress(RuntimeError, OSError):  # a user without a home
        place = Path(given) if given else key.place
        try:
            content = json.loads(place.read_text(encoding="utf-8"))
            if not given or content:
                return KeptConstants(on_cpu=on_cpu, constants=_constants_of(content, key), content=content)
        except FileNotFoundError:
            pass
        except WRONG_CONTENT as error:
            return KeptConstants(on_cpu=on_cpu, lacks=f"{place} is not used: {error}")

        for file in [] if given else key.others():
            with suppress(*WRONG_CONTENT):
                written = json.loads(file.read_text(encoding="utf-8"))["key"]
                return KeptConstants(on_cpu=on_cpu, lacks=f"{NOT_YET}; {_of_others(written, key)}")
    when = ", as when this job began" if given else ""
    return KeptConstants(on_cpu=on_cpu, lacks=f"{NOT_YET}{when}" if on_cpu else "")  # a GPU's preset serves


def _of_others(written: dict[str, Any], key: MachineKey) -> str:
    """Returns why what another version has measured is not used."""
    if written["torch"] != key.torch:
        return f"what was measured with torch {written['torch']} is not used with {key.torch}"
    return "what an earlier version of llama-ssp has measured is not used: its constants meant something else"


def _constants_of(content: dict[str, Any], key: MachineKey) -> Constants:
    """Returns a file's constants. Raises one of WRONG_CONTENT for what this program did not write."""
    if content["key"] != asdict(key):
        raise ValueError("it is of another machine or version")
    written = content["times"]
    times: dict[str, Any] = {name: _figure(written[name]) for name in OF_TIMES if name in written}
    reduce = {int(ranks): _figure(us) for ranks, us in written.get("all_reduce_us", {}).items()}
    return Constants(
        by=str(content["by"]),
        day=str(content["day"]),
        figures={name: _figure(content["figures"][name]) for name in content["figures"] if name in FIGURES},
        times=replace(TimesConf(all_reduce_us=reduce), **times),
    )


def _known(times: TimesConf) -> dict[str, float]:
    """Returns the constants that are known, those of sums left out."""
    return {name: getattr(times, name) for name in OF_TIMES if getattr(times, name) is not None}


def _figure(value: object) -> float:
    """Returns the number. Raises ValueError for one that no measurement gives."""
    number = float(str(value))
    if not (math.isfinite(number) and 0 <= number <= MAX_FIGURE):
        raise ValueError(f"{value} is no figure")
    return number


def keep_constants(cluster: ClusterConf, key: MachineKey, by: str) -> Path:
    """Writes what was measured. Raises OSError or RuntimeError where the user's cache cannot be written.

    On a GPU sums over another number of ranks, and over nodes, stay as they were measured.
    """
    reduce = dict(cluster.times.all_reduce_us)
    figures = {name: getattr(cluster, name) for name in FIGURES if getattr(cluster, name) is not None}
    with suppress(OSError, *WRONG_CONTENT):
        before = _constants_of(json.loads(key.place.read_text(encoding="utf-8")), key)
        reduce = before.times.all_reduce_us | reduce
        figures = {name: before.figures[name] for name in OF_NETWORK if name in before.figures} | figures
    content = {
        "key": asdict(key),
        "by": by,
        "day": time.strftime("%Y-%m-%d"),
        "figures": figures,
        "times": {**_known(cluster.times), "all_reduce_us": reduce},
    }

    place = key.place
    place.parent.mkdir(parents=True, exist_ok=True, mode=ONLY_US)
    part = part_of(place)
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.chmod(0o600)
    part.replace(place)
    return place


def _digest(facts: Sequence[object]) -> str:
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:16]
