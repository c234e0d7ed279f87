"""The pair that ships: certify's checks pass what is right, and each fault of the list fails its check.

The checks run by themselves, at the size of the default run or below; `python -m tests.certify_faults`
runs the whole command on every fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llama_ssp.config import CertifyConf, Dtype, ModelConf, SamplingConfig
from llama_ssp.models.checkpoint import SHIPPED_FOLDER, complete
from llama_ssp.models.interface import Model
from llama_ssp.models.loader import load
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES, Rule, TokenRule
from llama_ssp.tasks.certify.decisions import Decisions, Watch, check_decisions
from llama_ssp.tasks.certify.filters import check_filters
from llama_ssp.tasks.certify.law import check_law
from llama_ssp.tasks.certify.samples import KeepsEveryDraft, check_samples
from llama_ssp.tasks.certify.task import RANDOM_CHECKS
from llama_ssp.tasks.certify.verdict import Check, Outcome
from llama_ssp.text.prompts import SHORT
from llama_ssp.text.tokenizer import Tokens, read_tokens
from tests.certify_faults import FAULTS, PENALTY, Fault, TransformersSampler
from tests.certify_faults import NUCLEUS as NUCLEUS_RUN
from tests.test_certify import sampler

pytestmark = pytest.mark.slow

NUCLEUS = SamplingConfig(temperature=0.8, top_p=0.95)
PLAN = CertifyConf()
LEVEL = PLAN.false_alarm / RANDOM_CHECKS
Shipped = tuple[Model, Model, Tokens]


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    models = []
    for name in ("demo", "demo_draft"):
        model, path = complete(ModelConf(name=name, path=f"shipped:{name}"), "model")
        models.append(load(model, path, Dtype.bf16, torch.device("cpu"), "model"))
    return models[0], models[1], read_tokens(SHIPPED_FOLDER / "demo", 4096)


def prompts_of(shipped: Shipped, copies: int = 1) -> list[Prompt]:
    return [
        Prompt(f"{number} {copy}", tuple(shipped[2].encode(text)))
        for number, text in enumerate(SHORT)
        for copy in range(copies)
    ]


def ours(shipped: Shipped, rule: Rule, sampling: SamplingConfig | None = None, seed: int | None = 1) -> Any:
    """The shipped pair, its rounds watched if there is a seed."""
    target, draft, tokens = shipped
    watch = None if seed is None else Watch(Decisions(rule, seed), PLAN.law_rounds)
    rows = PLAN.batch_size
    return sampler(rule.name, rule, draft, watch, sampling, target, 4, tokens.end_ids, rows)


def transform_of(shipped: Shipped, sampling: SamplingConfig) -> SamplingTransform:
    target, _, tokens = shipped
    return SamplingTransform(sampling, tuple(tokens.end_ids), target.vocab)


def laws_checked(shipped: Shipped, sampling: SamplingConfig) -> Check:
    """The check of the law, over texts of 24 tokens."""
    rule = RULES["block"]
    subject = ours(shipped, rule, sampling)
    subject.texts(prompts_of(shipped), 24)
    rounds = subject.watch.rounds
    with torch.inference_mode():
        found = check_law(
            shipped[0], rule, rounds, [], sampling.temperature, shipped[0].vocab, PLAN.batch_size, 512, True
        )
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.parametrize("sampling", [SamplingConfig(), NUCLEUS], ids=["plain", "nucleus"])
def test_the_laws_are_right(shipped: Shipped, sampling: SamplingConfig) -> None:
    found = laws_checked(shipped, sampling)
    assert found.outcome is Outcome.passed, found.says
    assert found.figures["positions"] > 250


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.check == "law"], ids=lambda fault: fault.name)
def test_faults_of_the_laws(shipped: Shipped, fault: Fault) -> None:
    with fault.planted():
        sampling = NUCLEUS if fault.overrides else SamplingConfig()
        found = laws_checked(shipped, sampling)
    assert found.outcome is Outcome.failed
    shown = found.figures["usual_total_variation"] > 3 * found.figures["rounding_usual_total_variation"]
    assert shown or found.figures["positions_rule_wrong"] + found.figures["positions_astray"] > 5


OWN_CHECKS = ["decisions", "filters"]
OTHERS = [fault for fault in FAULTS if fault.check in OWN_CHECKS]
CONTROLS = {NUCLEUS_RUN: NUCLEUS, PENALTY: SamplingConfig(repetition_penalty=1.3)}


def test_the_faults_have_their_checks() -> None:
    assert len(OTHERS) == 12
    assert {fault.name for fault in FAULTS if fault.check == "law"} > {
        "stale target cache", "bonus token from the draft",
    }  # fmt: skip


def by_rounds(shipped: Shipped, sampling: SamplingConfig, texts: int) -> dict[str, Outcome]:
    """What the checks of rounds say of the default run's long texts, and of so many of 8 tokens."""
    subject = ours(shipped, RULES["block"], sampling)
    long_texts = prompts_of(shipped, PLAN.batch_size // len(SHORT))
    subject.texts([replace(prompt, id=f"{prompt.id} law") for prompt in long_texts], PLAN.law_tokens)
    subject.texts(prompts_of(shipped, texts // len(SHORT)), 8)
    decisions = subject.watch.decisions
    found = [
        check_decisions(decisions, LEVEL),
        check_filters(subject.watch.rounds, transform_of(shipped, sampling)),
    ]  # fmt: skip
    return {check.name: check.outcome for check in found}


def test_sound_rounds_pass(shipped: Shipped) -> None:
    assert set(by_rounds(shipped, NUCLEUS, 256).values()) == {Outcome.passed}


@pytest.mark.long
@pytest.mark.parametrize("fault", OTHERS, ids=lambda fault: fault.name)
def test_faults_of_rounds(shipped: Shipped, fault: Fault) -> None:
    """A quarter of the default run's texts."""
    with fault.planted():
        found = by_rounds(shipped, CONTROLS.get(fault.overrides, SamplingConfig()), 256)
    assert found[fault.check] is Outcome.failed


@pytest.mark.long
def test_transformers_with_another_tokenizer(shipped: Shipped) -> None:
    """A quarter of the default run's texts, and nothing but the texts: its distribution is far from the
    target's."""
    target, _, tokens = shipped
    plan = replace(PLAN, samples=PLAN.samples // 4)
    regular = sampler("regular", TokenRule(), None, None, None, target, 4, tokens.end_ids, PLAN.batch_size)
    wrong = ours(shipped, KeepsEveryDraft(), seed=None)
    prompts = prompts_of(shipped)
    found = check_samples(TransformersSampler(), regular, wrong, prompts, plan, 1, LEVEL, True)
    assert [check.outcome for check in found] == [Outcome.failed, Outcome.passed]
