"""What a run keeps of ended texts, and when it completes messages for further requests."""

from functools import partial
from typing import Any

import pytest

from llama_ssp.config import SamplingConfig
from llama_ssp.pair.requests import TokenRequest
from llama_ssp.pair.run import NONE, Run, RunSettings, Supply
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.state import Prompt
from tests.proofs.toy import toy
from tests.rig import engine_of


def requests_of(*lengths: int) -> list[TokenRequest]:
    """A request for each number of new tokens, with a seed of its own."""
    return [
        TokenRequest(
            index=index,
            prompt=Prompt(f"p{index}", (1, 2)),
            sampling=SamplingConfig(),
            max_new_tokens=new,
            stop=(),
            seed=index,
        )
        for index, new in enumerate(lengths)
    ]


def run_of(engine: Engine, requests: list[TokenRequest], rows: int, supply: Supply = NONE) -> Run:
    settings = RunSettings(rows=rows, lookahead=partial(FixedDraftLength, 2), decode=str)
    return Run(engine, requests, settings, supply=supply)


def test_seeds_of_texts_that_have_ended_are_forgotten() -> None:
    engine = engine_of(toy(5, 0), toy(5, 1))
    alone = [
        reply.token_ids
        for request in requests_of(3, 9, 4)
        for reply in run_of(engine_of(toy(5, 0), toy(5, 1)), [request], 1).ended()
    ]
    replies = {reply.index: reply.token_ids for reply in run_of(engine, requests_of(3, 9, 4), 2).ended()}
    assert [replies[index] for index in range(3)] == alone
    assert engine.draws.own == {}


def test_decisions_wait_for_the_next_round_when_no_request_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is free for many rounds; `more` is asked once, and messages are completed before that."""
    engine = engine_of(toy(5, 0), toy(5, 1))
    said: list[str] = []
    flush = Engine.flush

    def noted(self: Any) -> None:
        said.append("flush")
        flush(self)

    def more() -> list[TokenRequest]:
        said.append("more")
        return []

    monkeypatch.setattr(Engine, "flush", noted)
    replies = list(run_of(engine, requests_of(1, 30), 2, Supply(more=more)).ended())
    assert [reply.index for reply in replies] == [0, 1]
    assert said == ["flush", "flush", "more", "flush"]  # the first before the prompts, the last at the end
