"""The command line: overrides in, exit code out. Torch enters with the task, after all checks.

What --help does not need is imported where it is used: Hydra and the planner take half a second.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from llama_ssp.config import BatchConf, PromptedConf, RunConf, Scheduler
from llama_ssp.config.arguments import COMMANDS, DRY, HELP, QUIET, VERBOSE, VERSION
from llama_ssp.config.environment import RankEnvironment, importing, rank_environment, refuse_copies
from llama_ssp.config.help import help_for
from llama_ssp.distributed.placement import LEADER
from llama_ssp.distributed.signals import GUARD, STOPPING, UNWAITED, end_with_launcher, leave, leave_code
from llama_ssp.errors import (
    DISTRIBUTED,
    INPUT_OUTPUT,
    OK,
    USAGE,
    DistributedError,
    JointError,
    RunError,
    StorageError,
    UsageError,
    machine_error,
    of_system,
    one_line,
)
from llama_ssp.models.host_cores import (
    CoreTimes,
    core_times,
    give_cores_away,
    keep_threads_to_share,
    shorten_spins,
)
from llama_ssp.report.console import Console, LogHandler, waiting
from llama_ssp.report.terminal import show_text_alone

if TYPE_CHECKING:
    from llama_ssp.config.compose import ComposedJob
    from llama_ssp.placing.start import Start

GRACE_S = 4.0  # for a rank to obey a signal
NEW_OBJECTS = 1_000_000  # before Python looks for garbage: a start makes 700,000 and no garbage, a token 3
JOB_OF_SWEEP = "LLAMA_SSP_JOB"  # for a rank: the job's number and its folder
log = logging.getLogger(__name__)


def load(words: list[str]) -> CoreTimes | None:
    """Imports what a run needs before torch, unless --help or the like answers: before the guard is up.

    Returns what the cores did until then: what they do until torch is imported is others' work.
    """
    times = core_times()
    gc.set_threshold(NEW_OBJECTS)
    if not (_asks_for_help(words) or {*VERSION} & set(words) or (words and words[0] in COMMANDS)):
        from llama_ssp.config import compose  # noqa: F401
        from llama_ssp.placing import start  # noqa: F401
        from llama_ssp.tasks import inputs  # noqa: F401
    return times


def main(times: CoreTimes | None = None) -> NoReturn:
    """Runs the command and leaves with its exit code; `times` are those of the cores when it began."""
    _prepare_streams()
    _begin_log()
    end_with_launcher()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    if os.environ.get("LLAMA_SSP_DEBUG") != "1":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what torch would log is raised, too
    shorten_spins()
    GUARD.start(None if _environment().world == 1 else GRACE_S)
    try:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # blocked by who started this rank
            code = _run_command(times)
        finally:
            GUARD.ending = True
    except BaseException as error:
        code = report(error)
    finally:
        GUARD.stop()
    _forget_unwritable_output()
    if any(thread.name == UNWAITED for thread in threading.enumerate()):
        leave(code)
    leave_code(code)
    sys.exit(code)


def _begin_log() -> None:
    """The log on standard error: the leader's own lines; warnings only with -q.

    With -v every rank logs, and libraries, too; each line has its time, rank and module.
    """
    level = logging.INFO if _environment().is_leader else logging.ERROR
    form = "%(message)s"
    if {*QUIET} & set(sys.argv):
        level = max(level, logging.WARNING)
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    libraries = max(level, logging.WARNING)
    if {*VERBOSE} & set(sys.argv):
        level = logging.DEBUG
        libraries = logging.INFO
        form = f"%(asctime)s rank {_environment().rank} %(name)s: %(message)s"
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info")
    logging.basicConfig(level=libraries, format=form, handlers=[LogHandler()])
    logging.getLogger("llama_ssp").setLevel(level)


def _run_command(times: CoreTimes | None) -> int:
    """Runs the command; returns its exit code."""
    rank_environment()
    if sys.stdout is None:
        raise StorageError("standard output is closed", fix="send it somewhere: > /dev/null")
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        from llama_ssp.report.page import execute

        code = execute(words[1:], Console()) if _environment().is_leader else OK
    elif (text := _answer(words)) is not None:
        code = OK
        sys.stdout.write(text if _environment().is_leader else "")
    else:
        from llama_ssp.config.compose import run_jobs

        code = run_jobs(words, partial(_run_job, datetime.now(), times))
    sys.stdout.flush()
    return code


def _run_job(began: datetime, times: CoreTimes | None, job: ComposedJob) -> int:
    """Runs a job that Hydra has merged; returns its exit code. A sweep `began` at this time."""
    from llama_ssp.report.run_folder import sweep_folder

    of_sweep, _, folder = os.environ.get(JOB_OF_SWEEP, "").partition(" ")
    if job.number is None:
        place = None
    elif of_sweep:  # this process is a rank of one job
        if str(job.number) != of_sweep:
            return OK
        place = Path(folder) if folder else None
    elif _environment().world > 1:
        raise UsageError("--multirun needs one process", fix="write ranks=N in place of torchrun")
    else:
        place = sweep_folder(job.number, job.varied, job.cfg.out, began)
    return run(job, place, times)


def _asks_for_help(words: list[str]) -> bool:
    """Whether these words are a request for help: --help anywhere, help as the first word or after it."""
    return bool({*HELP} & set(words)) or ("help" in words[:2] and not words[0].startswith("-"))


def _answer(words: list[str]) -> str | None:
    """What --help and --version print; None for a run."""
    if _asks_for_help(words):
        return help_for([word for word in words if word != "help"])
    if {*VERSION} & set(words):
        from llama_ssp.report.run_folder import versions

        own, *others = versions().items()
        return f"llama-ssp {own[1]} ({', '.join(' '.join(pair) for pair in others)})\n"
    return None


def report(error: BaseException) -> int:
    """Prints why this process ends, if it is for this rank to print; returns the exit code.

    Raises an error of this program itself again. After a signal any error is that of the interruption:
    libraries make others of it.
    """
    number = GUARD.signalled
    if not number and isinstance(error, KeyboardInterrupt):
        number = error.args[0] if error.args else signal.SIGINT
    if number and not isinstance(error, JointError):
        notes = getattr(error, "__notes__", [])
        line = "; ".join(["stopped by a signal", *notes])
        code = 128 + number
    else:
        line, code = _in_words(error)
    if os.environ.get("LLAMA_SSP_DEBUG") == "1":
        traceback.print_exception(error)
    here = _environment()
    speaks = error.speaks if isinstance(error, RunError) else None
    if speaks is None and here.world > 1:  # before the ranks have met
        if number:
            line = f"rank {here.rank} was stopped by {signal.Signals(number).name} during start"
        elif here.rank != LEADER:
            line = f"rank {here.rank}: {line}"
        line, code, speaks = _first_cause(line, code)
    if sys.stderr is not None and (here.is_leader if speaks is None else speaks):
        with suppress(OSError):  # the terminal may be gone
            print(f"error: {one_line(line)}", file=sys.stderr)
    if isinstance(error, JointError):  # taking a process group down may wait for lost ranks without end
        _forget_unwritable_output()
        leave(code)
    return code


def _first_cause(line: str, code: int) -> tuple[str, int, bool]:
    """What all ranks end with, by this rank's line and code, and whether this rank says it."""
    try:
        from llama_ssp.distributed.board import announce

        cause = announce(line, code)
        return cause.line, cause.code, cause.by == _environment().rank
    except Exception:  # the first error is the one to print, not why the others cannot be reached
        return line, code, True


def _in_words(error: BaseException) -> tuple[str, int]:
    """The error's line and exit code. Raises an error of this program itself again."""
    if isinstance(error, RunError):
        return str(error), error.code
    if known := machine_error(error):
        return str(known), known.code
    if isinstance(error, RecursionError):
        return "the configuration is nested too deeply; fix: flatten it", USAGE
    if isinstance(error, BrokenPipeError):
        return "standard output was closed by its reader", INPUT_OUTPUT
    if isinstance(error, OSError):
        return of_system(error), INPUT_OUTPUT
    if isinstance(error, ImportError):
        return f"a package cannot be imported; {error}; fix: run machine-install.sh again", DISTRIBUTED
    raise error


def run(job: ComposedJob, place: Path | None = None, times: CoreTimes | None = None) -> int:
    """One run: checks everything that needs no model, then imports torch; the exit code.

    `place` is a sweep's folder for the run, `times` are those of the cores when the process began.
    """
    from llama_ssp.config.compose import to_run
    from llama_ssp.config.validation import check_sharing

    checked = to_run(job.cfg)
    check_sharing(checked, job.words)
    task = checked.task
    leads = _environment().is_leader
    world = rank_environment().world
    dry = not {*DRY}.isdisjoint(sys.argv)
    if task.name == "plan":
        from llama_ssp.tasks import plan as planning

        # Each job of a sweep has words of its own.
        words = sys.argv[1:] if job.number is None else job.words
        return planning.execute(checked, world, leads, words, place, job.words)

    from llama_ssp.batch.index import names_of
    from llama_ssp.batch.job import chosen_seed, continued
    from llama_ssp.models.kept_files import cache_folder
    from llama_ssp.placing.start import prepared
    from llama_ssp.report.plots import check_plot
    from llama_ssp.tasks.inputs import RunInputs
    from llama_ssp.text.prompts import Reading, read_prompts

    cache_folder()  # all processes that this one starts inherit its name; a line about it comes once
    if task.name == "batch":
        checked = continued(checked)
        batch = checked.task_as(BatchConf)
        if batch.input is not None and batch.output is not None:
            names_of(batch.input)  # models are fetched only for a file that is there
        if not dry and (code := _shared(checked, job)) is not None:
            return code
    elif not dry:
        refuse_copies()
    texts = None
    if task.replay is not None:
        from llama_ssp.text.written_texts import taken_up

        texts, checked = taken_up(checked, world)
        task = checked.task
    check_plot(task.plot)
    pairs, start = prepared(checked, job.folders, world, dry)
    for note in start.notes if leads else ():
        log.info("%s", note)
    if dry:
        from llama_ssp.tasks import plan as planning

        return planning.dry_run(pairs, start, leads, sys.argv[1:])
    if world == 1 < start.ranks:
        return _run_ranks(start, job, place)
    os.environ.update(start.environment)
    recorded = checked if task.pairs else pairs[0].run
    # The leader reads prompts and draws the seed, and broadcasts both.
    if texts is not None:
        reading = Reading([], texts.skipped)
    else:
        reading = read_prompts(task) if isinstance(task, PromptedConf) and leads else Reading([], [])
    seed = chosen_seed(checked, task.name == "batch" and leads)
    inputs = RunInputs(
        run=recorded,
        seed=seed,
        pairs=pairs,
        reading=reading,
        texts=texts,
        place=place,
        words=tuple(job.words),
    )
    keep_threads_to_share()
    on_gpus = _computes_on_gpus(recorded)  # on every rank: it sets how CUDA numbers GPUs, before CUDA starts
    if world == 1 and not on_gpus:
        give_cores_away(times)
    with (
        GUARD.parting("stopped by a signal before the run began"),
        waiting("loading torch and transformers"),
        importing(),
    ):
        from llama_ssp.tasks.runner import execute
    return execute(inputs)


def _computes_on_gpus(run: RunConf) -> bool:
    """Whether a run's models are on GPUs: then its threads have little to do."""
    from llama_ssp.distributed.gpus import gpus_here
    from llama_ssp.planner.storage import CPU

    return run.placement.target_device != CPU and bool(gpus_here())


def _run_ranks(start: Start, job: ComposedJob, place: Path | None) -> int:
    """Runs the job as several ranks; each of them knows which of a sweep it is, and the folder for it."""
    from llama_ssp.distributed.launcher import run_ranks

    sweep = {} if job.number is None else {JOB_OF_SWEEP: f"{job.number} {place or ''}"}
    with GUARD.aside():
        return run_ranks(start.ranks, {**start.environment, **sweep})


def _shared(run: RunConf, job: ComposedJob) -> int | None:
    """Shares a batch job among groups of ranks, or shows its status; None where this process does the job."""
    from llama_ssp.batch import status, workers
    from llama_ssp.batch.slurm import submit

    task = run.task
    words = sys.argv[1:]
    shared = run.cluster.scheduler is not Scheduler.none or run.cluster.groups > 1
    if shared and job.number is not None:
        raise UsageError("a sweep cannot be shared by groups", fix="loop over the command in the shell")
    if task.status:
        return status.execute(run)
    if run.cluster.scheduler is Scheduler.slurm:
        return submit.execute(run, job.folders, words)
    return workers.execute(run, job.folders, words) if run.cluster.groups > 1 else None


def _prepare_streams() -> None:
    """Makes both outputs UTF-8, whatever the locale; those that are terminals show text alone."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    show_text_alone()


def _forget_unwritable_output() -> None:
    """Drops buffered output that cannot be written: Python would report it again, and exit with 120."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _environment() -> RankEnvironment:
    """This process's rank; that of a single process where torchrun's variables are wrong."""
    try:
        return rank_environment()
    except DistributedError:
        return RankEnvironment(LEADER, 1)
