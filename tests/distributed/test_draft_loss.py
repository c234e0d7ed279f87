"""A draft on ranks of its own that dies, falls silent or is slow costs speed: the text is the target's."""

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.distributed.faults import fail, kill, strike_at
from tests.warm import Answer, Started

# Greedy, in fp32: whoever drafts, or nobody, the text is the same.
RUN = (
    "model=tiny", "draft=tiny_draft", "model.dtype=fp32", "draft.dtype=fp32", "placement=own",
    'task.prompts=["hello","a b c"]', "task.max_new_tokens=48", "task.batch_size=2", "task.ignore_eos=true",
    "seed=1", "output=json", "placement.draft_timeout_s=3", "sampling.temperature=0",
)  # fmt: skip
MIDDLE = 20  # passes of the draft, after which it is slowed
SLOWED = "from now on ten times as slow"
LOST = "the draft is lost"


@dataclass(frozen=True)
class Loss:
    """What befalls the last rank, which drafts, when, what it leaves with, and what is said of it."""

    strike: Callable[[], None]
    phase: str
    code: int
    said: str = "closed the connection"
    world: int = 3
    words: tuple[str, ...] = ()


KILL, STOP = partial(kill, signal.SIGKILL), partial(kill, signal.SIGSTOP)
SILENT = "it has not answered for 3.0 s"
LOSSES = {
    "killed while it drafts": Loss(KILL, "draft", -9),
    "killed while the target verifies": Loss(KILL, "verify", -9, ""),
    "out of memory": Loss(fail, "draft", 0),
    "stopped": Loss(STOP, "verify", 0, SILENT),
    "killed, of two ranks": Loss(KILL, "draft", -9, world=2),
    "stopped, of two ranks": Loss(STOP, "verify", 0, SILENT, world=2),
    "killed, the first of a draft in another order": Loss(
        KILL, "draft", -9, "", words=("placement.draft_ranks=[2,1]",)
    ),
}


def texts(answer: Answer) -> list[list[int]]:
    return [output["token_ids"] for output in answer.document["outputs"]]


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_target_goes_on_alone(name: str, command: Command, tmp_path: Path):
    loss = LOSSES[name]
    strike = partial(strike_at, loss.world - 1, loss.phase, loss.strike)
    found = Started(tmp_path, loss.world, *RUN, *loss.words, fault=strike).finish()
    assert [answer.code for answer in found] == [0] * (loss.world - 1) + [loss.code], found
    assert texts(found[0]) == texts(command(*RUN, "placement=auto"))
    assert found[0].err.count(LOST) == 1 and loss.said in found[0].err
    told = found[0].document
    assert told["status"] == "done" and loss.said in told["overlap"]["draft_lost"]
    assert told["tokens_committed"] == 96 and not any(a.errors for a in found[:-1])


def slowly(victim: int, rank: int) -> None:
    """In mid-run that rank's passes begin to take ten times as long."""
    if rank != victim:
        return
    from llama_ssp.speculative.model_runner import ModelRunner

    swift, passes = ModelRunner.logits, iter(range(10**9))

    def slow(*args: Any) -> Any:
        began, number = time.perf_counter(), next(passes)
        made = swift(*args)
        if number == MIDDLE:
            print(SLOWED, file=sys.stderr, flush=True)
        if number >= MIDDLE:
            time.sleep(9 * (time.perf_counter() - began))
        return made

    ModelRunner.logits = slow  # type: ignore[method-assign]


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_slow_draft_is_waited_for(world: int, command: Command, tmp_path: Path):
    found = Started(tmp_path, world, *RUN, fault=partial(slowly, world - 1)).finish()
    assert [answer.code for answer in found] == [0] * world
    assert texts(found[0]) == texts(command(*RUN, "placement=auto"))
    assert LOST not in found[0].err and SLOWED in found[-1].err
    assert found[0].document["overlap"]["draft_lost"] is None
