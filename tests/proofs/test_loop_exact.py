"""The loop that ships gives the target's distribution over whole texts: every branch walked."""

from __future__ import annotations

import pytest
import torch

from llama_ssp.models.interface import Model
from llama_ssp.speculative.verification import RULES
from tests.families import build, runnable
from tests.proofs.scenarios import BRIDGED, HEADS, SCENARIOS, Scenario, walk

# Scenarios that have a single path; the others have many.
FOLLOWED = dict.fromkeys(["greedy", "Intersection, greedy", "head, greedy"], 1)
# A rule sees distributions and tokens, however they were drafted: the block rule walks all scenarios, the
# token rule these.
CORNERS = {
    "token": (
        "plain", "full length", "EOS inside the block", "stop sequence across blocks",
        "two ragged rows, longer block", "two ragged rows with EOS", "adaptive K", "n-gram drafts, two rows",
        "draft equals target", "every control", "penalties, long block", "minimum length", "greedy",
        "the context ends", "narrower draft vocabulary", "all that the draft has is forbidden",
        "Intersection, overlapping", "Intersection, every control",
        "head", "head, two ragged rows with EOS", "DFlash head, every control",
    ),
}  # fmt: skip
WALKED = [(name, rule) for name, rule in SCENARIOS if rule == "block" or name in CORNERS[rule]]
AT_ONCE = ("overlapping", "greedy", "the draft's context ends")  # of those with two vocabularies


@pytest.mark.few(10)
@pytest.mark.parametrize(
    "name,rule",
    [
        pytest.param(name, rule, marks=[pytest.mark.slow] if late else [])
        for name, rule in WALKED
        for late in [(name in BRIDGED and not name.endswith(AT_ONCE)) or (name in HEADS and rule == "token")]
    ],
)
def test_joint_law_of_whole_texts(name, rule):
    error, branches = walk(SCENARIOS[name, rule])
    assert error < 1e-12
    assert branches >= FOLLOWED.get(name, 8), "too few branches to prove anything"


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rule"), [("llama-gqa", rule) for rule in RULES] + [("gemma2", "block"), ("gpt_neo", "block")]
)
def test_joint_law_with_transformers_models(family, rule):
    """The same with real model classes in fp64, two ragged rows, EOS, and a window shorter than the text."""

    def module(seed: int = 0) -> object:
        return build(family, seed, torch.float64, vocab_size=3, eos_token_id=1)

    def real(_: int, seed: int, **__: object) -> Model:
        return runnable(module(seed), family)

    prompts = ((1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1), (0,))
    ends = frozenset({1})
    scenario = Scenario(prompts=prompts, k=2, new=2, rule=rule, build=real, plain=module, ends=ends)
    with torch.inference_mode():
        error, branches = walk(scenario)
    assert error < 1e-6  # these families compute rope or attention in fp32 whatever their weights
    assert branches > 50


def test_corners_are_scenarios():
    assert all((name, rule) in SCENARIOS for rule, names in CORNERS.items() for name in names)
