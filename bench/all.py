"""Makes the figures of README and docs anew, one after the other, at one commit.

    python bench/all.py                    # everything; first it prints how long each takes
    python bench/all.py only=fast,demo     # some of them; only=times those that need a quiet machine
    python bench/all.py list=true          # runs nothing
    python bench/all.py anyway=true        # on a busy machine, or with uncommitted changes: the files say so

Each figure's file is bench/results/NAME_MACHINE.md (machine=xeon-2-cores_202611). Benchmarks and tests write
their own; of a command of the program the file has what it prints, its seconds, and its memory. A figure that
misses what is asked (exit code 1) is written, and the next ones follow. The exit code is 1 if a file was not
written. llama_cpp=PYTHON is an interpreter with llama-cpp-python, without which `real` is left out. So are
`coded` and `linear` without AVX-512: the plan's times of products come from their files.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.real_model import PROMPT, REAL  # noqa: E402
from bench.surroundings import Watch, commit, surroundings, write  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.placing.this_machine import cpu_has_bf16  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402

BUSY = 0.25  # of the cores, in the load average: then times are not this machine's
RUN = "launch/run.py"


@dataclass(frozen=True)
class Figure:
    """What is run, and about how many minutes it takes on two cores."""

    name: str
    minutes: float
    command: str  # it gets `write=`, if there is no title
    title: str = ""  # of what the command prints
    is_time: bool = True
    of_bf16: bool = False  # for processors with AVX-512 alone


FIGURES = [
    Figure("fast", 10, "bench/fast.py repeats=3 new=96 ks=4,8,12"),
    Figure("busy", 12, "bench/busy.py base=9bf7ec36"),
    Figure("demo_real", 2, "bench/demo.py repeats=5"),
    Figure("demo", 3, "bench/side_by_side.py temperatures=0,0.5,1 repeats=5 new=64 ks=1,2,3,4"),
    Figure("start", 1, "bench/start.py"),
    Figure("real", 4, "bench/real.py python={llama_cpp}"),
    Figure("adaptive", 5, "bench/adaptive.py agreements=0.05,0.3,0.6,0.95 repeats=2 new=128 ks=1,2,4,8"),
    Figure("heads", 5, "bench/heads.py repeats=3 new=64"),
    Figure("batch_rows", 3, "bench/batch_rows.py rows=8,32"),
    Figure("overlap", 8, "bench/overlap.py"),
    Figure("coded", 1.5, "bench/coded.py repeats=30", of_bf16=True),
    Figure("linear", 1, "bench/linear.py", of_bf16=True),
    Figure("attention", 2, "bench/attention.py"),
    Figure("without", 4, "bench/without.py"),
    Figure("parts", 4, "bench/parts.py"),
    Figure("ngram", 1.5, "bench/ngram.py"),
    Figure("ranks", 2, "bench/ranks.py turns=3 repeats=3"),
    Figure("plan_speed", 25, "bench/plan_speed.py groups=synthetic"),
    Figure("plan_speed_real", 55, "bench/plan_speed.py groups=real minutes=90"),
    Figure(
        "measure", 2, f"{RUN} measure seed=1 max_new_tokens=24 plot=docs/measure.svg",
        "Where the time of the pair that ships goes",
    ),
    Figure(
        "compare", 0.5,
        f"{RUN} compare {REAL} speculation=ngram engine=compiled download=true chat=true prompt='{PROMPT}' "
        "seed=1 max_new_tokens=64 plot=docs/compare.svg",
        "One prompt, side by side",
    ),
    Figure("plan", 0.2, f"{RUN} plan 65B 7B cluster=p4d prompt_tokens=1536 engine=compiled", "A plan"),
    # These are no times: other work on the machine does not change them.
    Figure("agree", 0.2, f"{RUN} agree seed=1 plot=docs/agree.svg", "How far both models agree", False),
    Figure("eval", 2, f"{RUN} eval sampling.temperature=0.5 seed=0", "The score, both ways", False),
    Figure(
        "shipped", 3, "launch/measure_demo.py --threads 2 --multiplications 250",
        "The models that ship, on held-out text", False,
    ),
    Figure(
        "load", 3, "bench/load_memory.py gib=2.1 ranks=4 ways=files:bf16,seed:bf16,files:int8,files:nf4",
        is_time=False,
    ),
    Figure("certify", 9, "-m tests.certify_faults seeds=1 jobs=2", is_time=False),
    Figure("faults_torchrun", 13, "-m tests.distributed.faults", is_time=False),
    Figure("faults_command", 13, "-m tests.distributed.faults by=command", is_time=False),
    Figure("nodes", 12, "-m tests.distributed.nodes", is_time=False),
    Figure("architectures", 1, "-m tests.architectures", "Which architectures run", False),
]  # fmt: skip


@dataclass
class Asked(Words):
    """The command line."""

    only: str = ""
    list: bool = False
    anyway: bool = False
    machine: str = "xeon-2-cores_202611"
    llama_cpp: str = ""

    def figures(self) -> list[Figure]:
        names = set(self.only.split(",")) if self.only else set()
        if unknown := names - {figure.name for figure in FIGURES} - {"times"}:
            sys.exit(
                f"error: only={','.join(sorted(unknown))}; known: times, {', '.join(f.name for f in FIGURES)}"
            )
        return [
            figure for figure in FIGURES
            if not names or figure.name in names or ("times" in names and figure.is_time)
        ]  # fmt: skip

    def place(self, figure: Figure) -> Path:
        return ROOT / "bench" / "results" / f"{figure.name}_{self.machine}.md"


def main() -> int:
    asked = Asked.of(sys.argv[1:])
    chosen = asked.figures()
    print(*aligned([[one.name, f"{one.minutes:g} min"] for one in chosen], 1), sep="\n")
    print(
        f"about {sum(one.minutes for one in chosen):.0f} minutes on two quiet cores, at {commit()}",
        flush=True,
    )
    if asked.list:
        return 0
    if not asked.anyway and (why := unfit()):
        print(f"error: {why}, or give anyway=true")
        return 1
    missing = []
    for figure in chosen:
        began = time.time()
        said = made(figure, asked)
        written = asked.place(figure).exists() and asked.place(figure).stat().st_mtime >= began
        missing += [] if written else [figure.name]
        took = f"{(time.time() - began) / 60:.1f} min"
        print(f"{figure.name}: {took}; {said if written else f'NOT WRITTEN, {said}'}", flush=True)
    return int(bool(missing))


def unfit() -> str:
    """Why figures made now would not be this commit's, or this machine's."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if commit().endswith("-dirty"):
        return "there are uncommitted changes; commit them"
    return f"the machine is busy, load {load:.2f} on {cores} cores; wait" if load > BUSY * cores else ""


def made(figure: Figure, asked: Asked) -> str:
    """Runs the figure's command; how it went."""
    if "{llama_cpp}" in figure.command and not asked.llama_cpp:
        return "give llama_cpp=PYTHON"
    if figure.of_bf16 and not cpu_has_bf16():
        return "this processor lacks AVX-512"
    words = [sys.executable, *shlex.split(figure.command.format(llama_cpp=asked.llama_cpp))]
    if figure.title:
        code = printed(figure, words, asked)
    else:
        words.append(f"write={asked.place(figure).relative_to(ROOT)}")
        code = subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    return {0: "done", 1: "done; it misses what is asked, see the file"}.get(code, f"exit code {code}")


def printed(figure: Figure, words: list[str], asked: Asked) -> int:
    """Writes what the command prints, without the program's last line, a document in JSON; its exit code."""
    watch, began = Watch(), time.monotonic()
    words += ["out=null"] * (RUN in words)
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        said = run.stdout.read()
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    spent, busy = time.monotonic() - began, used.ru_utime + used.ru_stime
    shown = [line.rstrip() for line in said.splitlines() if not line.startswith('{"')]
    lines = [
        f"# {figure.title}", "",
        *surroundings({}, f"python bench/all.py only={figure.name}", watch), "",
        f"`{figure.command.replace(RUN, 'llama-ssp')}`: {spent:.1f} s, {busy:.1f} s of processors, at most "
        f"{used.ru_maxrss / 1024:.0f} MiB.", "", "```", *shown, "```", "",
    ]  # fmt: skip
    if not run.returncode:
        write(str(asked.place(figure)), "\n".join(lines))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
