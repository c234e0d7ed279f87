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
Shipped = tuple[Model, Model | None, Tokens]


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


def ours(shipped: Shipped, rule: Rule, sampling: SamplingConfig | None = None, watch: Any = None) -> Any:
    target, draft, tokens = shipped
    how: dict[str, Any] = {"target": target, "k": 4, "ends": tokens.end_ids, "rows": PLAN.batch_size}
    return sampler(rule.name, rule, draft, watch, sampling=sampling, **how)


def outcomes(shipped: Shipped, sampling: SamplingConfig, texts: int) -> dict[str, Check]:
    """What the checks of rounds say of the default run's long texts, and of so many of 8 tokens."""
    target, _, tokens = shipped
    rule, transform = RULES["block"], SamplingTransform(sampling, tuple(tokens.end_ids), target.vocab)
    watch = Watch(Decisions(rule, 1), PLAN.law_rounds)
    subject = ours(shipped, rule, sampling, watch)
    long_texts = prompts_of(shipped, PLAN.batch_size // len(SHORT))
    subject.texts([replace(prompt, id=f"{prompt.id} law") for prompt in long_texts], PLAN.law_tokens)
    subject.texts(prompts_of(shipped, texts // len(SHORT)), 8)
    found = [check_decisions(watch.decisions, LEVEL), check_filters(watch.rounds, transform)]
    return {check.name: check for check in found}


def law_of(shipped: Shipped, sampling: SamplingConfig) -> Check:
    """The check of the distributions, over texts of 24 tokens."""
    target, rule = shipped[0], RULES["block"]
    watch = Watch(Decisions(rule, 1), PLAN.law_rounds)
    ours(shipped, rule, sampling, watch).texts(prompts_of(shipped), 24)
    how = sampling.temperature, target.vocab, PLAN.batch_size, 512, True
    with torch.inference_mode():
        found = check_law(target, rule, watch.rounds, [], *how)
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.parametrize("sampling", [SamplingConfig(), NUCLEUS], ids=["plain", "nucleus"])
def test_the_distributions_are_right(shipped: Shipped, sampling: SamplingConfig) -> None:
    found = law_of(shipped, sampling)
    assert found.outcome is Outcome.passed, found.says
    assert found.figures["positions"] > 250


def test_sound_rounds_pass(shipped: Shipped) -> None:
    assert {check.outcome for check in outcomes(shipped, NUCLEUS, 256).values()} == {Outcome.passed}


OF_LAW = [fault for fault in FAULTS if fault.check == "law"]
OF_ROUNDS = [fault for fault in FAULTS if fault.check in ("decisions", "filters")]
CONTROLS = {(): SamplingConfig(), NUCLEUS_RUN: NUCLEUS, PENALTY: SamplingConfig(repetition_penalty=1.3)}


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", OF_LAW, ids=lambda fault: fault.name)
def test_faults_of_the_distributions(shipped: Shipped, fault: Fault) -> None:
    with fault.planted():
        found = law_of(shipped, CONTROLS[fault.overrides])
    assert found.outcome is Outcome.failed
    shown = found.figures["usual_total_variation"] > 3 * found.figures["rounding_usual_total_variation"]
    assert shown or found.figures["positions_rule_wrong"] + found.figures["positions_astray"] > 5


@pytest.mark.long
@pytest.mark.parametrize("fault", OF_ROUNDS, ids=lambda fault: fault.name)
def test_faults_of_rounds(shipped: Shipped, fault: Fault) -> None:
    """A quarter of the default run's texts."""
    with fault.planted():
        found = outcomes(shipped, CONTROLS[fault.overrides], 256)
    assert found[fault.check].outcome is Outcome.failed


def test_the_faults_have_their_checks() -> None:
    assert (len(OF_LAW), len(OF_ROUNDS)) == (4, 12)


@pytest.mark.long
def test_transformers_with_another_tokenizer(shipped: Shipped) -> None:
    """A quarter of the default run's texts, and nothing but the texts: its distribution is far from the
    target's."""
    plan = replace(PLAN, samples=PLAN.samples // 4)
    regular, wrong = ours((shipped[0], None, shipped[2]), TokenRule()), ours(shipped, KeepsEveryDraft())
    prompts = prompts_of(shipped)
    found = check_samples(TransformersSampler(), regular, wrong, prompts, plan, 1, LEVEL, True)
    assert [check.outcome for check in found] == [Outcome.failed, Outcome.passed]
