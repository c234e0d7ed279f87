"""Siblings of drafts in models, in the choice of K, and in the plan; tests/proofs proves them exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llama_ssp.config import SamplingConfig
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.planner.search import round_times, search
from llama_ssp.planner.weights import CACHE
from llama_ssp.planner.workload import TARGET
from llama_ssp.speculative.draft_length import Costs, usual_gain
from llama_ssp.speculative.state import Prompt
from tests.families import build, decoder_of
from tests.plans import machine
from tests.plans import request as planned
from tests.rig import perturbed, speculate


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2"])
@pytest.mark.parametrize(
    "kernel", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.compiler])]
)
def test_the_decoder_writes_what_transformers_writes(family, kernel):
    """Texts of ragged rows in fp32, some with windows."""
    module, draft = build(family), perturbed(build(family), 0.2)
    models = [DecoderModel(decoder_of(each), module.config, "m") for each in (module, draft)]
    if kernel:
        attention_kernel.operators()
        for model in models:
            model.attend = attention_kernel.attend
    prompts = [Prompt(str(row), tuple(range(3, 9 - 2 * row))) for row in range(3)]
    how: Any = {"k": 3, "siblings": 2, "sampling": SamplingConfig(), "max_new": 40}
    found = speculate(models[0], prompts, models[1], **how)
    expected = speculate(CausalModel(module, "m"), prompts, CausalModel(draft, "m"), **how)
    assert found.texts == expected.texts and found.aside == expected.aside > 0
    without = speculate(models[0], prompts, models[1], **{**how, "siblings": 0})
    assert without.texts != found.texts  # control


def test_siblings_are_chosen_where_they_pay():
    """Free ones always, up to the most; those that cost more than they bring never."""
    free = Costs.of_ratio(0.1, 8, 2)
    k, siblings = free.best(0.7, 0.8, [0.25, 0.4])
    assert siblings == 2 and k >= 1 and free.k_max == 8
    dear = Costs([[1 + 0.1 * k + 0.2 * k * (1 + s) for s in range(3)] for k in range(9)])
    assert dear.best(0.7, 0.8, [0.25, 0.4])[1] == 0
    assert free.best(0.7, 0.8)[1] == 0  # control: they bring nothing


def test_the_plan_knows_siblings():
    """Their columns, their slots in the cache, and the tokens that they are assumed to bring."""
    chain = planned("llama2-70b", "llama2-7b", machine("dgx_h100"))
    tree = replace(chain, work=replace(chain.work, siblings=2))
    placement = search(chain, [8])[0].placement
    plain, wide = (round_times(request, placement) for request in (chain, tree))
    assert wide.verify[0] == plain.verify[0] and plain.verify[4] < wide.verify[4]
    assert wide.tokens(0.7, 4) - plain.tokens(0.7, 4) == pytest.approx((1 - 0.7**4) * usual_gain(2))
    # Of 32 lengths of a text: memory comes in buckets of 256 slots; for one of them 8 slots need another.
    caches = [0, 0]
    for number, request in enumerate((chain, tree)):
        for longer in range(0, 256, 8):
            work = replace(request.work, prompt_tokens=request.work.prompt_tokens + longer)
            lines = request.memories(placement, work)[0].lines
            caches[number] += sum(one.bytes for one in lines if (one.role, one.name) == (TARGET, CACHE))
    slot = 2 * 80 * 128 * 2  # keys and values of the one KV head of a rank, in 80 layers, in bf16
    assert caches[1] - caches[0] == 256 * slot
