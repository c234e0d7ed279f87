"""One GPU in fifteen minutes: are its texts right, how fast is it, and where does the time go?

    python bench/gpu.py collect=true [before=COMMIT]  # with a network: what has to be brought
    python bench/gpu.py plan=true                     # the parts of all calls, with the seconds of each
    python bench/gpu.py call=1 [archive=FILE.tar.gz] [write=bench/results/gpu_CARD_YYYYMM.md]
    python bench/gpu.py call=2 [...]                  # what call 1 has left, then the parts of call 2
    python bench/gpu.py call=3 [...]                  # another day: what H200s have shown before
    python bench/gpu.py parts=steps,codes             # these parts
    python bench/gpu.py small=true                    # small models, on a CPU, too: the code of all parts
    python bench/gpu.py rehearse=true                 # without a GPU: parts that fail, on a pretended card

Calls 1 and 2 together take 740 s at most, which leaves 160 of fifteen minutes to start a machine and to copy
files. What no GPU has run comes first.

1. The machine. Then, at the same time: tests/gpu, those of sums in graphs first; texts by eager and compiled
   steps, also under each sampling control; products in fp32, and prompts in chunks without a mask; a trial of
   compiled steps by two ranks; the command as it is typed, and the check of the machine. Then one after the
   other: rounds by control, 64 rows with K by measuring, experts, memory, weights in codes, steps with a
   profile, and the reply of a draft on a rank of its own.
2. Two ranks on the one GPU, while ranks are killed or run out of memory; then 30B.
3. Tests and logits that H200s have shown to be right, races of the smallest kernels, further placements, the
   memory's bandwidth, products next to cuBLAS, number formats, and this code next to an earlier commit.

Each part is a process with a time limit; nothing that happens to one stops the others. A figure is written
to `folder` (.gpu/run) as it comes, with the card's clocks, power and driver. A part becomes a line of JSON
there when it ends, and the whole folder an archive. A call runs the parts that no earlier call in this folder
has ended: give the folder to another machine, and it goes on there. The exit code is 1 if a part has not
ended, or a figure misses what is asked.

What is brought along, where pip finds no index (sizes in MiB; `collect=true` puts them into .gpu/bring; a
part that needs what is missing is skipped, and says so):

    hydra-core 1.3.8               0.2    everything that loads a pair
    omegaconf 2.3.1                0.1    the same
    antlr4-python3-runtime 4.9.3   0.1    the same; it has no wheel, and one is built
    bitsandbytes 0.50.2            3.4    codes and more_ranks, in 8 bit (its library for CUDA 13.0 alone)
    before.tar.gz                  0.9    beside: the code of the commit that `before` names

These files have 5 MiB. torch is not among them: a wheel of torch 2.13 for CUDA has hundreds of MiB, and the
libraries that it needs more. So a machine without an index runs the torch that it has, and its results do not
speak for 2.13; where pip finds an index, install 2.13 first. Nothing here is newer
than torch 2.11, transformers 5.17, Python 3.12 and the triton of that torch. What a part needs of them is in
PARTS, and the first part tries it.
"""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bars import ENDS, Bar, bars_table, failed  # noqa: E402
from gpu_bring import collect, unpack  # noqa: E402
from words import Words  # noqa: E402

log = logging.getLogger("bench")
RIGHT = "gpu_right"
RANKS = "gpu_ranks"
KERNELS = "gpu_kernels"
FIGURES = "gpu_figures"
BESIDE = "gpu_beside"
REHEARSAL = "gpu_rehearsal"
TOGETHER = (RIGHT, RANKS)  # parts of these files that follow each other run at the same time: none is timed
SECONDS = {1: 540, 2: 200, 3: 320}  # of a call
ENDING_S = 4  # of a call, for its archive
SMALL_LIMIT_S = 600
BROUGHT = ROOT / ".gpu"
CARD = (
    "name", "driver_version", "power.limit", "power.draw", "clocks.sm", "clocks.max.sm", "clocks.mem",
    "temperature.gpu",
)  # fmt: skip
PRETENDED = "a pretended card, 0.0, 700, 300, 1980, 1980, 3201, 40"
EVERY_S = 2.0  # between two looks at the card
NOT_BEGUN = "no time", "skipped"  # states of a part
MISSING = "missing: "


@dataclass(frozen=True)
class Part:
    """A function `name` of `module`. Parts of TOGETHER that follow each other run at the same time.

    The planned seconds are those that two runs on H200s have taken, with some room; of parts that are new
    since then they are guessed.
    """

    name: str
    module: str
    planned_s: int
    limit_s: int
    call: int = 1
    needs: tuple[str, ...] = ()  # names to import, `program:NAME`, `file:BEGINNING` of what is brought


PARTS = [
    Part("machine", "gpu", 11, 20),
    Part("tests", RIGHT, 140, 180, needs=("hydra", "triton", "pytest")),
    Part("texts", RIGHT, 145, 180, needs=("hydra", "triton")),
    Part("controlled", RIGHT, 90, 150, needs=("hydra", "triton")),
    Part("numbers", RIGHT, 30, 90, needs=("hydra", "triton")),
    Part("trial", RANKS, 60, 120, needs=("hydra", "triton")),
    Part("start", RANKS, 80, 150, needs=("hydra", "triton")),
    Part("fit", RANKS, 40, 90, needs=("hydra",)),
    Part("controls", FIGURES, 60, 90, needs=("hydra", "triton")),
    Part("rows", FIGURES, 60, 90, needs=("hydra", "triton")),
    Part("experts", FIGURES, 40, 60, needs=("hydra", "triton")),
    Part("memory", FIGURES, 40, 60, needs=("hydra", "triton")),
    Part("codes", FIGURES, 90, 120, needs=("hydra", "triton", "bitsandbytes")),
    Part("steps", FIGURES, 65, 90, needs=("hydra", "triton", "torch.profiler.record_function")),
    Part("replies", FIGURES, 20, 40, needs=("hydra",)),
    Part("ranks", RANKS, 110, 150, 2, needs=("hydra", "triton")),
    Part("faults", RANKS, 90, 110, 2, needs=("hydra", "triton")),
    Part("large", FIGURES, 65, 85, 2, needs=("hydra", "triton")),
    Part("again", RIGHT, 30, 60, 3, needs=("hydra", "triton", "pytest")),
    Part("known_tests", RIGHT, 60, 90, 3, needs=("hydra", "triton", "pytest")),
    Part("logits", RIGHT, 100, 130, 3, needs=("hydra", "triton")),
    Part("races", RIGHT, 85, 120, 3, needs=("hydra", "triton", "program:compute-sanitizer")),
    Part("more_ranks", RANKS, 130, 160, 3, needs=("hydra", "triton", "bitsandbytes")),
    Part("bandwidth", KERNELS, 11, 20, 3, needs=("hydra", "triton", "torch.cuda.CUDAGraph")),
    Part("products", KERNELS, 17, 30, 3, needs=("hydra", "triton.language.dot", "torch.cuda.CUDAGraph")),
    Part("formats", FIGURES, 90, 120, 3, needs=("hydra", "triton", "bitsandbytes")),
    Part("beside", BESIDE, 50, 90, 3, needs=("hydra", "triton", "file:before")),
]
# They fail, each in another way: what a rehearsal survives.
FAULTY = [
    *(Part(name, REHEARSAL, 1, 5) for name in ("ends", "killed", "raises", "full")),
    Part("hangs", REHEARSAL, 1, 2),
    Part("lacks", REHEARSAL, 1, 5, needs=("torch.no_such_name",)),
]
ALL = [*PARTS, *FAULTY]
# What is expected on an H200 and on an H100, by part and figure; None: nothing is known.
EXPECTED: dict[str, tuple[float, float | None]] = {
    "bandwidth: GB/s of a sum": (4221, 2900),
    "bandwidth: GB/s of the best": (4520, 3100),
    "steps: 64 slots, 1 tokens: ms of a step": (4.51, 5.85),
    "steps: 64 slots, 1 tokens: share of the bandwidth": (0.645, 0.72),
    "steps: 2048 slots, 1 tokens: ms of a step": (4.80, 6.3),
    "steps: 32000 slots, 1 tokens: ms of a step": (8.23, 11.4),
    "steps: ms of a draft step": (1.21, 1.5),
    "steps: a step: us in products": (3700, 5000),
    "steps: a step: us in other kernels": (550, 550),
    "steps: a step: us in gaps inside a graph": (250, 250),
    "steps: a round: us in gaps behind the readback": (400, 400),
    "steps: ms of a round": (9.9, 12.4),
    "steps: K = 0: ms/token": (5.13, 6.4),
    "steps: K = 4: ms/token": (2.88, 3.6),
    "products: 7B, 1 rows: all products of a step, cuBLAS over the best tiles": (1.03, 1.1),
    "large: the best K over regular": (1.8, None),
    "codes: a step of 1 tokens: int8 over bf16": (1.5, 1.4),
}


@dataclass
class Asked(Words):
    """The command line. With `part` this process is a part."""

    call: int = 1
    seconds: float = 0.0
    parts: str = ""
    folder: str = str(BROUGHT / "run")
    archive: str = str(BROUGHT / "gpu.tar.gz")
    write: str = ""
    small: bool = False
    plan: bool = False
    rehearse: bool = False
    collect: bool = False
    before: str = ""
    part: str = ""
    limit: float = 0.0


@dataclass(frozen=True)
class How:
    """What a part is told: whether models are small, its seconds, and the folder of the results."""

    small: bool
    limit_s: float
    folder: Path

    def file(self, beginning: str) -> Path:
        """Returns the file that was brought along under a name that begins so. Raises FileNotFoundError."""
        for file in (BROUGHT / "bring").glob(f"{beginning}*"):
            return file
        raise FileNotFoundError(f"{BROUGHT / 'bring'} has no {beginning}*")

    def earlier(self, part: str) -> list[Bar]:
        """Returns the figures that the part gave when it ran last."""
        record = latest(records_in(self.folder)).get(part, {"bars": []})
        return list(map(bar_of, record["bars"]))


class Card(threading.Thread):
    """What the first GPU says of itself, every two seconds."""

    def __init__(self, pretended: bool) -> None:
        super().__init__(daemon=True)
        query = ["nvidia-smi", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader,nounits", "--id=0"]
        self._command = ["echo", PRETENDED] if pretended else query
        self.now: dict[str, str] = {}
        self.look()

    def look(self) -> None:
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(self._command, capture_output=True, text=True, timeout=10)
            if done.returncode == 0:
                self.now = dict(zip(CARD, map(str.strip, done.stdout.split(",")), strict=False))

    def run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self.look()

    def __str__(self) -> str:
        if not self.now:
            return "no GPU"
        now = self.now
        clocks = f"{now['clocks.sm']} of {now['clocks.max.sm']} MHz, memory {now['clocks.mem']} MHz"
        power = f"{now['power.draw']} of {now['power.limit']} W, {now['temperature.gpu']} C"
        return f"{now['name']}, driver {now['driver_version']}, {clocks}, {power}"


@dataclass
class Call:
    """One call: its parts, its clock, and what was found so far. Also works if nothing can be written."""

    asked: Asked
    card: Card
    began: float = field(default_factory=time.monotonic)
    records: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def folder(self) -> Path:
        return Path(self.asked.folder)

    def left_s(self) -> float:
        return (self.asked.seconds or SECONDS[self.asked.call]) - ENDING_S - (time.monotonic() - self.began)

    def missing(self) -> set[str]:
        """Returns what parts need and the machine has not, as the first part said last."""
        bars = latest([*records_in(self.folder), *self.records]).get(PARTS[0].name, {"bars": []})["bars"]
        return {bar["what"].removeprefix(MISSING) for bar in bars if bar["what"].startswith(MISSING)}

    def states(self) -> dict[str, str]:
        """Returns how each part has ended."""
        return {record["part"]: record["state"] for record in self.records}

    def figure(self, part: Part, bar: dict[str, Any]) -> dict[str, Any]:
        """Keeps a figure with what the card says now; returns both."""
        document = {**bar, "card": str(self.card)}
        self._append("figures.jsonl", {"part": part.name, **document})
        return document

    def end(self, part: Part, state: str, why: str, seconds: float, figures: list[dict[str, Any]]) -> None:
        """Keeps a part that has ended, as a line of JSON, and all of the folder as an archive."""
        if why:
            figures.append(self.figure(part, asdict(failed(part.name, why))))
        record = {"part": part.name, "call": self.asked.call, "state": state, "seconds": round(seconds, 1)}
        record |= {"why": why, "card": str(self.card), "bars": figures}
        with self.lock:
            self.records.append(record)
        self._append("parts.jsonl", record)
        log.info("%s: %s after %.0f s; %.0f s are left", part.name, state, seconds, self.left_s())
        with suppress(ImportError):  # the table's library
            log.info("%s", "\n".join(f"  {line}" for line in bars_table(list(map(bar_of, figures)))))
        self._archive(Path(self.asked.archive))

    def _append(self, name: str, document: dict[str, Any]) -> None:
        """Adds a line. The line before it may be torn, so this one begins anew."""
        with self.lock:
            try:
                with (self.folder / name).open("a", encoding="utf-8") as file:
                    file.write(f"\n{json.dumps(document)}\n")
            except OSError as error:
                log.warning("%s is not written: %s. It says: %s", name, error, json.dumps(document))

    def _archive(self, file: Path) -> None:
        part = file.with_name(f"{file.name}.part")
        with self.lock:
            try:
                with tarfile.open(part, "w:gz") as archive:
                    archive.add(self.folder, self.folder.name)
                part.replace(file)
            except OSError as error:
                log.warning("%s is not written: %s", file, error)

    def run(self, part: Part) -> None:
        """Runs a part as a process, which is killed with all that it started when its time is over."""
        asked, is_small = self.asked, self.asked.small and part.module != REHEARSAL
        limit_s = min(SMALL_LIMIT_S if is_small else part.limit_s, self.left_s())
        if lacks := [need for need in part.needs if need in self.missing()]:
            return self.end(part, "skipped", f"needs {', '.join(lacks)}, which is not here", 0.0, [])
        if limit_s < (1 if asked.small else part.planned_s / 2):
            return self.end(part, "no time", f"{max(self.left_s(), 0):.0f} s are left", 0.0, [])
        began, figures, said = time.monotonic(), list[dict[str, Any]](), deque[str](maxlen=40)
        words = [f"part={part.name}", f"limit={limit_s:.0f}", f"folder={self.folder}"]
        command = [sys.executable, __file__, *words, f"small={str(asked.small).lower()}"]
        interpreted = {"TRITON_INTERPRET": "1"} if is_small and part.module == KERNELS else {}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            process_group=0, env={**os.environ, **interpreted},
        )  # fmt: skip

        def keep(line: str) -> None:
            with suppress(ValueError, TypeError, AttributeError):  # what a library prints is no figure
                figures.append(self.figure(part, asdict(bar_of(json.loads(line)))))

        def read(stream: IO[str], seen: Callable[[str], object]) -> None:
            for line in stream:
                seen(line)

        streams = ((process.stdout, keep), (process.stderr, said.append))
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        try:
            state, why = state_of(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            state, why = "stopped", f"stopped after {limit_s:.0f} s"
            for pid in descendants(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        with suppress(ProcessLookupError):  # what it has left running
            os.killpg(process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join(2)  # a process that has left the group may hold the output
        if why:
            why += "".join(f": {line.strip()}" for line in list(said)[-1:])
        with suppress(OSError):
            (self.folder / f"{part.name}.err").write_text("".join(said), encoding="utf-8")
        self.end(part, state, why, time.monotonic() - began, figures)

    def run_all(self, parts: list[Part]) -> None:
        """Runs parts in their order; at the same time those of TOGETHER, and small ones."""

        def is_machine(part: Part) -> object:
            return part.module == "gpu"  # looked at before all others

        for _, group in groupby(parts, is_machine if self.asked.small else shared):
            together = list(group)
            with ThreadPoolExecutor(2 if self.asked.small else len(together)) as pool:
                for done in [pool.submit(self.run, part) for part in together]:
                    done.result()


def machine(how: How) -> Iterator[Bar]:
    """Versions, the GPU's memory, and what parts need that is not here."""
    import torch

    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        yield Bar("GiB of the GPU", whole / 2**30, note=f"{free / 2**30:.1f} free")
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Bar("multiprocessors", torch.cuda.get_device_properties(0).multi_processor_count)
        yield Bar(
            "NCCL", 0, note=f"{nccl}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        )
    for name in ("torch", "transformers", "triton", "accelerate", "bitsandbytes", "gguf"):
        with suppress(PackageNotFoundError):
            yield Bar(name, 0, note=version(name))
    yield Bar("cores", os.cpu_count(), note=f"Python {sys.version.split()[0]}")
    yield Bar("MPS", 0, note=shutil.which("nvidia-cuda-mps-control") or "none")
    needs = dict.fromkeys(need for part in ALL for need in part.needs)
    for need in needs:
        if not is_here(need, how):
            wanting = [part.name for part in ALL if need in part.needs]
            yield Bar(f"{MISSING}{need}", None, note=f"needed by {', '.join(wanting)}")


def is_here(need: str, how: How) -> bool:
    """Whether there is this program, this brought file, or this name to import."""
    kind, _, name = need.partition(":")
    try:
        if kind == "program":
            return shutil.which(name) is not None
        if kind == "file":
            return bool(how.file(name))
        if "." not in need:
            return find_spec(need) is not None
        pkgutil.resolve_name(need)
    except Exception:  # whatever a package raises that is not whole
        return False
    return True


def state_of(code: int) -> tuple[str, str]:
    """Returns how a part ended with this exit code, and why."""
    if code < 0:
        return "killed", f"killed by {signal.Signals(-code).name}"
    return ("raised", f"exit code {code}") if code else ("ended", "")


def descendants(pid: int) -> set[int]:
    """Returns the process and all that descend from it, also those that have made a session of their own."""
    parents = {}
    for table in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            words = table.read_text("ascii", "replace").rpartition(")")[2].split()
            parents[int(table.parent.name)] = int(words[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def bar_of(document: dict[str, Any]) -> Bar:
    """Returns the figure. Raises TypeError for another document."""
    return Bar(**{key: given for key, given in document.items() if key not in ("card", "part")})


def records_in(folder: Path) -> list[dict[str, Any]]:
    """Returns the parts that earlier calls have run; a line that is not whole is left out."""
    records, file = [], folder / "parts.jsonl"
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
    return records


def latest(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the last time of each part; one that did not begin leaves the figures of an earlier call."""
    result: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["state"] not in NOT_BEGUN or record["part"] not in result:
            result[record["part"]] = record
    return result


def due(call: int, records: list[dict[str, Any]], parts: list[Part] = PARTS) -> list[Part]:
    """Returns what a call runs: the machine, what did not begin before, and at last what failed before."""
    states = {name: record["state"] for name, record in latest(records).items()}
    left = [part for part in parts[1:] if part.call <= call and states.get(part.name) != "ended"]
    failed_before = [part for part in left if states.get(part.name, NOT_BEGUN[0]) not in NOT_BEGUN]
    return [parts[0], *(part for part in left if part not in failed_before), *failed_before]


def shared(part: Part) -> object:
    """Returns a key that neighbours have in common if they run at the same time."""
    return TOGETHER if part.module in TOGETHER else part.name


def planned_s(parts: list[Part]) -> int:
    """Returns the seconds of these parts, of which some run at the same time."""
    groups = groupby(parts, shared)
    return sum(max(part.planned_s for part in group) for _, group in groups)


def plan_table() -> list[str]:
    """Returns a line for each part of a call, then the sum."""
    lines = []
    for call, most in SECONDS.items():
        parts = [PARTS[0], *(part for part in PARTS[1:] if part.call == call)]
        for part in parts:
            together = ", with its neighbours" if part.module in TOGETHER else ""
            lines.append(
                f"call {call}  {part.name:14} {part.planned_s:4} s, {part.limit_s:3} at most{together}"
            )
        lines.append(f"call {call}: {planned_s(parts)} s planned, {most} at most")
    return lines


def end_table(records: list[dict[str, Any]], card: str) -> list[list[str]]:
    """Returns what was expected, what was seen, and the ratio."""
    seen = {f"{record['part']}: {bar['what']}": bar["found"] for record in records for bar in record["bars"]}
    lines = [["expected beside seen", "expected", "seen", "seen / expected"]]
    for name, by_card in EXPECTED.items():
        expected, value = by_card["H100" in card], seen.get(name)
        ratio = f"{value / expected:.2f}" if expected and value is not None else "-"
        cells = (f"{each:.4g}" if each is not None else "-" for each in (expected, value))
        lines.append([name, *cells, ratio])
    return lines


def report(call: Call, records: list[dict[str, Any]]) -> str:
    """Returns the results file: the parts, the last time of each, and what was expected."""
    from surroundings import surroundings

    from llama_ssp.report.tables import aligned

    size = "small models, for their code alone" if call.asked.small else "synthetic weights, batch 1"
    lines = ["# One GPU", "", *surroundings({"GPU": f"{call.card}, {size}"}), ""]
    for record in records:
        state = f"{record['state']} after {record['seconds']:.0f} s of call {record['call']}"
        bars = list(map(bar_of, record["bars"]))
        lines += [f"{record['part']}: {state}; {record['card']}", "", "```", *bars_table(bars), "```", ""]
        for bar in bars:
            if "\n" in bar.note:  # a message of a test
                lines += [f"{bar.what}:", "", "```", bar.note, "```", ""]
    missed = [(record["part"], bar) for record in records for bar in map(bar_of, record["bars"])]
    lines += ["Missed:", "", "```"]
    lines += [
        f"{part}: {bar.what}: {bar.verdict} {' '.join(bar.note.split())[-160:]}"
        for part, bar in missed
        if bar.met is False
    ]
    return "\n".join([*lines, "", *aligned(end_table(records, str(call.card)), 1), "```", ""])


def called(asked: Asked, parts: list[Part]) -> Call:
    """Runs parts as one call; prints what all calls have found, and what to run next."""
    call = Call(asked, Card(asked.rehearse))
    call.card.start()
    with suppress(OSError):
        call.folder.mkdir(parents=True, exist_ok=True)
    call.run_all(parts)
    records = [*records_in(call.folder), *call.records]  # twice, where they could be written
    last = list(latest(records).values())
    try:
        text = report(call, last)
    except Exception as error:  # whatever a package that is not whole raises
        text = f"no report: {type(error).__name__}: {error}"
    print(text)
    left = due(max(SECONDS), records)[1:]
    folder = "" if asked.folder == Asked.folder else f" folder={asked.folder}"
    what = f"call={max([2, *(part.call for part in left)])}{folder}: {', '.join(part.name for part in left)}"
    print(f"next: python bench/gpu.py {what}" if left else "next: nothing is left")
    if asked.write:
        path = Path(asked.write)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(last, indent=1), encoding="utf-8")
    return call


def be_a_part(asked: Asked) -> None:
    """Prints the figures of a part, a line each."""
    (part,) = [part for part in ALL if part.name == asked.part]
    function = getattr(import_module(part.module), part.name)
    for bar in function(How(asked.small, asked.limit, Path(asked.folder))):
        timed = part.module in (FIGURES, KERNELS, BESIDE) and not bar.what.endswith((ENDS, ": error"))
        if asked.small and timed:
            bar = replace(bar, asked=None)  # times of small models mean nothing
        print(json.dumps(asdict(bar)), flush=True)


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if asked.part:
        return be_a_part(asked)
    if asked.plan:
        return print("\n".join(plan_table()))
    if asked.collect:
        return collect(BROUGHT, asked.before)
    if asked.rehearse:
        wrong = import_module(REHEARSAL).rehearse(asked)
        print("\n".join(["rehearsal:", *(wrong or ["every failure was survived"])]))
        sys.exit(int(bool(wrong)))
    unpack(BROUGHT)
    named = asked.parts.split(",") if asked.parts else []
    if unknown := set(named) - {part.name for part in PARTS}:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(part.name for part in PARTS)}")
    parts = due(asked.call, records_in(Path(asked.folder)))
    if named:
        parts = [PARTS[0], *(part for part in PARTS[1:] if part.name in named)]
    call = called(asked, parts)
    bars = [bar_of(figure) for record in call.records for figure in record["bars"]]
    sys.exit(int(any(bar.met is False for bar in bars)))


if __name__ == "__main__":
    main()
