"""Real gloo ranks: runs a function on each of N processes and returns what each returned."""

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

from llama_ssp.distributed.process_group import WORKING_S, open_ranks
from tests.warm import as_launched, launcher_store, server

PATIENCE_S = 120


def on_ranks(
    world: int, job: Callable[..., Any], *args: Any, patience_s: float = PATIENCE_S,
    ranks_patience_s: float = WORKING_S,
) -> dict[int, Any]:  # fmt: skip
    """{rank: job(ranks, *args)}; a job that raised gives its exception. No process is left behind.

    `patience_s` is how long the test waits for an answer, `ranks_patience_s` how long ranks wait.
    """
    context, store = server(), launcher_store()
    results = context.Queue()
    processes = [
        context.Process(
            target=_run, args=(as_launched(rank, world, store.port), results, ranks_patience_s, job, *args),
            daemon=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for process in processes:
        process.start()
    try:
        return dict(results.get(timeout=patience_s) for _ in processes)
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _run(variables: dict[str, str], results: Any, patience_s: float, job: Any, *args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(variables)
    ranks = open_ranks(torch.device("cpu"), patience_s)
    try:
        result = job(ranks, *args)
    except Exception as error:
        traceback.print_exc()
        result = RuntimeError(f"{type(error).__name__}: {error}")
    results.put((ranks.rank, result))
    results.close()
    results.join_thread()
    os._exit(0)  # a group that has failed aborts when it is taken down
