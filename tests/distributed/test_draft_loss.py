"""A draft on ranks of its own that dies, falls silent or is slow costs speed: the text is the target's."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.faults import Answer, Started, fail, kill, strike_at

# In fp32: whoever drafts, or nobody, the text is the same.
RUN = (
    "model=tiny", "draft=tiny_draft", "model.dtype=fp32", "draft.dtype=fp32", "placement=own",
    'task.prompts=["hello","a b c"]', "task.max_new_tokens=48", "task.batch_size=2", "task.ignore_eos=true",
    "seed=1", "output=json", "placement.draft_timeout_s=3",
)  # fmt: skip
GREEDY = "sampling.temperature=0"  # so that the text does not depend on the drafts
MIDDLE = 20  # passes of the draft, after which it is slowed
SLOWED = "from now on ten times as slow"
LOST = "the draft is lost"


@dataclass(frozen=True)
class Loss:
    """What befalls the draft's rank, when, what it leaves with, and what is said of it."""

    strike: Callable[[], None]
    phase: str
    code: int
    said: str


LOSSES = {
    "killed while it drafts": Loss(partial(kill, signal.SIGKILL), "draft", -9, "closed the connection"),
    "killed while the target verifies": Loss(partial(kill, signal.SIGKILL), "verify", -9, ""),
    "out of memory": Loss(fail, "draft", 0, "closed the connection"),
    "stopped": Loss(partial(kill, signal.SIGSTOP), "verify", 0, "it has not answered for 3.0 s"),
}


def answers(folder: Path, world: int, *more: str, fault: Any = None) -> list[Answer]:
    return Started(folder, world, *RUN, *more, fault=fault).finish()


def summary(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.out.splitlines()[-1])
    return found


def texts(answer: Answer) -> list[list[int]]:
    return [output["token_ids"] for output in summary(answer)["outputs"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[int]]]:
    whole = {}
    for world in (2, 3):
        found = answers(tmp_path_factory.mktemp("whole") / "run", world, GREEDY)
        assert [answer.code for answer in found] == [0] * world and LOST not in found[0].err
        assert summary(found[0])["overlap"]["draft_lost"] is None
        whole[world] = texts(found[0])
    return whole


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world"), [*((name, 3) for name in LOSSES), ("killed while it drafts", 2), ("stopped", 2)]
)
def test_the_target_goes_on_alone(
    name: str, world: int, tmp_path: Path, undisturbed: dict[int, list[list[int]]]
):
    loss = LOSSES[name]
    strike = partial(strike_at, world - 1, loss.phase, loss.strike)
    found = answers(tmp_path / "run", world, GREEDY, fault=strike)
    assert [answer.code for answer in found] == [0] * (world - 1) + [loss.code], found
    assert texts(found[0]) == undisturbed[world]
    assert found[0].err.count(LOST) == 1 and loss.said in found[0].err
    told = summary(found[0])
    assert told["status"] == "done" and loss.said in told["overlap"]["draft_lost"]
    assert told["tokens_committed"] == 96 and not any(a.errors for a in found[:-1])


def slowly(victim: int, rank: int) -> None:
    """In mid-run that rank's passes begin to take ten times as long."""
    if rank != victim:
        return
    from llama_ssp.speculative.drafters.local import DraftModel

    swift, passes = DraftModel._forward, iter(range(10**9))

    def slow(*args: Any) -> Any:
        began, number = time.perf_counter(), next(passes)
        made = swift(*args)
        if number == MIDDLE:
            print(SLOWED, file=sys.stderr, flush=True)
        if number >= MIDDLE:
            time.sleep(9 * (time.perf_counter() - began))
        return made

    DraftModel._forward = slow  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_slow_draft_is_waited_for(world: int, tmp_path: Path, undisturbed: dict[int, list[list[int]]]):
    found = answers(tmp_path / "run", world, GREEDY, fault=partial(slowly, world - 1))
    assert [answer.code for answer in found] == [0] * world and texts(found[0]) == undisturbed[world]
    assert LOST not in found[0].err and SLOWED in found[-1].err
    assert summary(found[0])["overlap"]["draft_lost"] is None


@pytest.mark.slow
def test_who_wants_it_stops_with_the_draft(tmp_path: Path):
    strike = partial(strike_at, 1, "draft", partial(os._exit, 7))
    found = answers(tmp_path / "run", 2, GREEDY, "placement.on_draft_loss=stop", fault=strike)
    assert [answer.code for answer in found] == [5, 7]
    assert len(found[0].errors) == 1 and "rank 1 is gone" in found[0].errors[0]


@pytest.mark.slow
def test_the_draft_may_be_listed_in_any_order(tmp_path: Path, undisturbed: dict[int, list[list[int]]]):
    strike = partial(strike_at, 2, "draft", partial(kill, signal.SIGKILL))
    found = answers(tmp_path / "run", 3, GREEDY, "placement.draft_ranks=[2,1]", fault=strike)
    assert [answer.code for answer in found] == [0, 0, -9], found
    assert texts(found[0]) == undisturbed[2] and LOST in found[0].err
