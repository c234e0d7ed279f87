"""From checked inputs to a finished task: what every task shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from llama_ssp.config import EvalConf, GenerateConf, Output, TaskConf
from llama_ssp.inputs import Inputs
from llama_ssp.report import Console, RunFolder, config_sha256, versions
from llama_ssp.tasks.eval import EvalTask
from llama_ssp.tasks.generate import GenerateTask


class Task(Protocol):
    """One run of a task."""

    def run(self) -> str:
        """Does the work; the status that the summary shows."""

    def has_output(self) -> bool:
        """Whether there is anything to report, should it have been stopped."""

    def figures(self) -> dict[str, Any]:
        """The task's part of the summary, right at any moment."""


TASKS: dict[type[TaskConf], Callable[[Inputs, Console, RunFolder], Task]] = {
    GenerateConf: GenerateTask,
    EvalConf: EvalTask,
}


def execute(inputs: Inputs) -> int:
    """Runs the task; the exit code. Whatever stops it, what was finished is reported."""
    run = inputs.run
    console, folder = Console(), RunFolder(run, inputs.seed)
    began = time.perf_counter()
    task = TASKS[type(run.task)](inputs, console, folder)
    status = "error"
    try:
        status = task.run()
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        summary: dict[str, Any] = {
            "task": run.task.name,
            "status": status,
            "config_sha256": config_sha256(run),
            "seed": inputs.seed,
            "versions": versions(),
            **task.figures(),
            "wall_s": time.perf_counter() - began,
            "run_folder": str(folder.path) if folder.path else None,
        }
        folder.close(summary)
        if status == "done" or task.has_output():
            _show(console, run.output, summary)
    return 0


def _show(console: Console, output: Output, summary: dict[str, Any]) -> None:
    """The JSON document, which a piped text run leaves out: there the text alone is the product."""
    if output is Output.json or console.is_terminal or summary["task"] != "generate":
        console.document(summary)
