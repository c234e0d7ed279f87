"""What a continuous batch keeps of ended texts, and when it completes messages for further requests."""

from typing import Any

import pytest

from llama_ssp.config import SamplingConfig
from llama_ssp.pair.continuous_batching import ContinuousBatch, Supply, TokenRequest
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


def writer_of(engine: Engine) -> ContinuousBatch:
    def lookahead(rows: int) -> FixedDraftLength:
        return FixedDraftLength(2, rows)

    return ContinuousBatch(engine=engine, decode=str, lookahead=lookahead, ends=frozenset())


def test_seeds_of_texts_that_have_ended_are_forgotten() -> None:
    engine = engine_of(toy(5, 0), toy(5, 1))
    alone = [
        reply.token_ids
        for request in requests_of(3, 9, 4)
        for reply in writer_of(engine_of(toy(5, 0), toy(5, 1))).write([request], 1)
    ]
    replies = {reply.index: reply.token_ids for reply in writer_of(engine).write(requests_of(3, 9, 4), 2)}
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
    writer = writer_of(engine)
    replies = list(writer.write(requests_of(1, 30), 2, Supply(more=more)))
    assert [reply.index for reply in replies] == [0, 1]
    assert said == ["flush", "flush", "more", "flush"]  # the first before the prompts, the last at the end
