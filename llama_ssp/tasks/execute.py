"""From checked inputs to a finished task: what every task shares."""

from __future__ import annotations

import logging
import time
from typing import Any

from llama_ssp.config import GenerateConf, Output
from llama_ssp.errors import UsageError
from llama_ssp.inputs import Inputs
from llama_ssp.report import Console, RunFolder, config_sha256, versions
from llama_ssp.tasks.generate import GenerateTask

log = logging.getLogger(__name__)


def execute(inputs: Inputs) -> int:
    """Runs the task; the exit code. Whatever stops it, what was finished is reported."""
    run = inputs.run
    console, folder = Console(), RunFolder(run, inputs.seed)
    began = time.perf_counter()
    if not isinstance(run.task, GenerateConf):
        raise UsageError("there is no such task", found=run.task.name, allowed="generate")
    task = GenerateTask(inputs, run.task, console, folder)
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
