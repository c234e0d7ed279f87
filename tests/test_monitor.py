"""The live monitor: under the token rule, accepted over sum(min(target, draft)) is 1."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative import verification as verify
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters.local import ModelDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from llama_ssp.speculative.verification import RULES
from tests.proofs.mutants import _lenient, verify_ratios
from tests.proofs.toy import toy

pytestmark = pytest.mark.slow

BAND = 0.005
VOCAB, ROWS, NEW, K = 8, 725, 150, 4


def run(rule: str, rows: int = ROWS) -> Counts:
    draws = CounterDraws(11)
    transform = SamplingTransform(SamplingConfig(temperature=2.0), (), VOCAB)
    target, draft = (toy(VOCAB, seed, context=NEW + 8, sharpness=0.8) for seed in (0, 1))
    engine = Engine(
        ModelRunner(target), ModelDrafter(ModelRunner(draft), transform, draws), transform, RULES[rule], draws
    )
    state = engine.prefill([Prompt(str(row), (row % VOCAB, 1)) for row in range(rows)], NEW)
    counts = Counts()
    for step in generate(engine, state, Limits(NEW), FixedDraftLength(K, rows)):
        for row in step.rows:
            counts.add(row)
    return counts


def test_accepted_over_expected_is_one():
    counts = run("token")
    assert counts.decided >= 100_000
    assert abs(counts.summary()["accepted_over_expected"] - 1) < BAND


def test_the_monitor_sees_a_lenient_rule():
    with patch.object(verify, "_ratios", _lenient(verify_ratios)):
        counts = run("token", 250)
    assert counts.summary()["accepted_over_expected"] > 1 + BAND


def test_the_block_rule_accepts_more():
    assert run("block", 100).summary()["acceptance_rate"] > run("token", 100).summary()["acceptance_rate"]
