"""The loop that ships gives the target's distribution over whole texts.

Enumerated: every branch of every draw and coin of a run, for each scenario of scenarios.py (rows of other
lengths, ends inside a block, stop strings, contexts that end, every sampling control, n-grams, another
tokenizer, trained heads, an assistant that reads the target's cache, drafts from the likeliest tokens alone),
and for four of transformers' model classes. Compared: the joint distribution of the texts and of why they
ended, with the product of the target's own next-token distributions. Bound: a total variation of 1e-12 in
fp64; 1e-6 for transformers' classes, which compute rope or attention in fp32. Controls: the faults that
mutants.py plants in drafts, caches, masks, controls and ends each fail a scenario here.
"""

from dataclasses import replace

import pytest
import torch

from llama_ssp.models.interface import Model
from llama_ssp.speculative.verification import RULES
from tests.families import build, runnable
from tests.proofs.scenarios import ASSISTED, BRIDGED, HEADS, SCENARIOS, TOPS, Scenario, walk

# Scenarios that have a single path; the others have many.
FOLLOWED = dict.fromkeys([name for name in SCENARIOS if name.endswith("greedy")], 1)
# A rule sees distributions and tokens, however they were drafted: the block rule walks all scenarios, the
# token rule these.
BY_TOKEN = (
    "plain", "full length", "EOS inside the block", "stop sequence across blocks",
    "two ragged rows, longer block", "two ragged rows with EOS", "adaptive K", "n-gram drafts, two rows",
    "draft equals target", "every control", "penalties, long block", "minimum length", "greedy",
    "the context ends", "narrower draft vocabulary", "all that the draft has is forbidden",
    "Intersection, overlapping", "Intersection, every control",
    "head", "head, two ragged rows with EOS", "DFlash head, every control", "assistant",
    "likeliest tokens", "likeliest tokens, every control", "likeliest tokens, head",
)  # fmt: skip
AT_ONCE = ("overlapping", "greedy", "the draft's context ends")  # of those with two vocabularies


MINUTE = ("draft equals target", "block")  # has most branches: it takes a minute


def marks_of(name: str, rule: str) -> list[pytest.MarkDecorator]:
    """Returns how long a case takes, as markers."""
    if (name, rule) == MINUTE:
        return [pytest.mark.long]
    return [pytest.mark.slow] if is_slow(name, rule) else []


def is_slow(name: str, rule: str) -> bool:
    if name in TOPS:
        return name.endswith(("Intersection", "head", "assistant")) or rule == "token"
    return (name in BRIDGED and not name.endswith(AT_ONCE)) or (name in HEADS | ASSISTED and rule == "token")


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(name, rule, marks=marks_of(name, rule))
        for rule, names in {"block": SCENARIOS, "token": BY_TOKEN}.items()
        for name in names
    ],
)
def test_joint_distribution_of_whole_texts(name, rule):
    error, branches = walk(replace(SCENARIOS[name], rule=rule))
    assert error < 1e-12
    assert branches >= FOLLOWED.get(name, 8), "too few branches to prove anything"


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rule"), [("llama-gqa", rule) for rule in RULES] + [("gemma2", "block"), ("gpt_neo", "block")]
)
def test_joint_distribution_with_transformers_models(family, rule):
    """Real model classes in fp64, two ragged rows, EOS, and a window shorter than the text."""

    def module(seed: int = 0) -> object:
        return build(family, seed, torch.float64, vocab_size=3, eos_token_id=1)

    def real(_: int, seed: int, **__: object) -> Model:
        return runnable(module(seed), family)

    prompts = ((1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1), (0,))
    ends = frozenset({1})
    scenario = Scenario(prompts=prompts, k=2, new=2, rule=rule, build=real, plain=module, ends=ends)
    with torch.inference_mode():
        error, branches = walk(scenario)
    assert error < 1e-6
    assert branches > 50
