"""The live monitor: under the token rule, accepted over sum(min(target, draft)) is 1."""

from __future__ import annotations

import pytest

from llama_ssp.config import SamplingConfig
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from tests.proofs.mutants import every
from tests.proofs.toy import toy
from tests.rig import engine_of, steps_of

pytestmark = pytest.mark.slow

BAND = 0.005
VOCAB, ROWS, NEW, K = 8, 725, 150, 4


def run(rule: str, rows: int = ROWS) -> Counts:
    target, draft = (toy(VOCAB, seed, context=NEW + 8, sharpness=0.8) for seed in (0, 1))
    engine = engine_of(target, draft, rule, sampling=SamplingConfig(temperature=2.0), draws=11)
    counts, prompts = Counts(), [Prompt(str(row), (row % VOCAB, 1)) for row in range(rows)]
    for step in steps_of(engine, prompts, NEW, K)[1]:
        for row in step.rows:
            counts.add(row)
    return counts


def test_accepted_over_expected_is_one():
    counts = run("token")
    assert counts.decided >= 100_000
    assert abs(counts.summary()["accepted_over_expected"] - 1) < BAND


def test_the_monitor_sees_a_lenient_rule():
    with every()["lenience of 5 %"].planted():
        counts = run("token", 250)
    assert counts.summary()["accepted_over_expected"] > 1 + BAND


def test_the_block_rule_accepts_more():
    assert run("block", 100).summary()["acceptance_rate"] > run("token", 100).summary()["acceptance_rate"]
