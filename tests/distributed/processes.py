"""Real gloo ranks: runs a function on each of N processes and returns what each returned."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

from llama_ssp.distributed.comm import Ranks
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
    context = server()
    results = context.Queue()
    store = launcher_store()
    ranks = [
        context.Process(
            target=_rank, args=(rank, world, store.port, results, ranks_patience_s, job, args), daemon=True
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        return dict(results.get(timeout=patience_s) for _ in ranks)
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _rank(
    rank: int, world: int, port: int, results: Any, patience_s: float, job: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(as_launched(rank, world, port))
    ranks: Ranks = open_ranks(torch.device("cpu"), patience_s)
    try:
        results.put((rank, job(ranks, *args)))
    except Exception as error:
        traceback.print_exc()
        results.put((rank, RuntimeError(f"{type(error).__name__}: {error}")))
    results.close()
    results.join_thread()
    os._exit(0)  # a group that has failed aborts when it is taken down
