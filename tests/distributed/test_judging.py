"""certify and agree on two real ranks: the verdict, the exit code and the figures of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_ssp.errors import FAILED_CHECK
from tests.conftest import Command
from tests.distributed.test_command import on_two, pair

pytestmark = pytest.mark.slow

CERTIFY = (
    "task=certify", "seed=5", "speculation.k=3", 'task.prompts=["hello","def f"]', "task.samples=24",
    "task.max_new_tokens=4", "task.law_tokens=8", "task.law_rounds=6", "task.greedy_tokens=8",
)  # fmt: skip
AGREE = ("task=agree", "seed=5", 'task.prompts=["hello","def f","a fox"]', "task.max_new_tokens=16")


def accept_all(rank: int) -> None:
    """The rule is wrong, on the leader, which alone decides."""
    from llama_ssp.speculative.verification import RULES, BlockRule

    class AcceptsAll(BlockRule):
        def accept_chances(self, block: Any) -> Any:
            return (super().accept_chances(block) > 0).double()

    if rank == 0:
        RULES["block"] = AcceptsAll()


def certificate(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(check["name"], check["outcome"]) for check in found["checks"]]


def test_two_ranks_certify_as_one(command: Command, saved: Any, tmp_path: Path) -> None:
    run = (*pair(saved), *CERTIFY)
    alone, found = command(*run).document, on_two(tmp_path / "two", *run).document
    assert certificate(found) == certificate(alone) and found["verdict"] == alone["verdict"]
    assert [c["outcome"] for c in found["checks"] if c["name"] == "law"] == ["passed"]


def test_every_rank_leaves_with_the_verdict(saved: Any, tmp_path: Path) -> None:
    run = (*pair(saved), *CERTIFY)
    leader = on_two(tmp_path / "two", *run, fault=accept_all, code=FAILED_CHECK)
    assert leader.document["verdict"] == "different"


def test_two_ranks_agree_as_one(command: Command, saved: Any, tmp_path: Path) -> None:
    run = (*pair(saved), *AGREE)
    alone, found = command(*run).document, on_two(tmp_path / "two", *run).document
    for one, same in zip(found["prompts"], alone["prompts"], strict=True):
        assert one["token_ids"] == same["token_ids"] and one["finish_reason"] == same["finish_reason"]
        assert one["fork"] == same["fork"]
    assert found["target_forwards"] == alone["target_forwards"]
