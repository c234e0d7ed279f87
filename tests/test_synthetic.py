"""Synthetic pairs: the right shape, and the agreement that was asked for."""

from __future__ import annotations

import pytest
import torch

from llama_ssp.config import Dtype, ModelConf, SamplingConfig, Weights
from llama_ssp.models.loader import load
from llama_ssp.models.synthetic import agreement_at, flips_for
from llama_ssp.planner.weights import parameters
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

CPU = torch.device("cpu")


def shape(family: str, dim: int, tied: bool = False, **changes) -> ModelConf:
    sizes = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": dim // 4, "ffn": 2 * dim}
    return ModelConf(
        name=f"{family}-{dim}", weights=Weights.synthetic, family=family, dim=dim, vocab=600, context=300,
        tied=tied, **{**sizes, **changes},
    )  # fmt: skip


@pytest.mark.parametrize("asked", [0.2, 0.5, 0.8, 0.95])
def test_flips_give_the_agreement_asked_for(asked):
    assert abs(agreement_at(flips_for(asked, 600, 0), 600, 0) - asked) < 0.02


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt_neo", "gpt_neox", "opt", "qwen2", "qwen3", "mistral"]
)
def test_a_pair_of_any_family_agrees_as_asked(family):
    """Also of different widths, where the distributions must still be the same but for the flips."""
    tied = family in ("gemma2", "gpt_neo")
    target = load(shape(family, 128, tied), None, Dtype.fp32, CPU, "model")
    draft = load(shape(family, 64, tied, agreement=0.7), None, Dtype.fp32, CPU, "draft")
    transform, draws = SamplingTransform(SamplingConfig(), (), 600), CounterDraws(0)
    engine = Engine(
        ModelRunner(target),
        ModelDrafter(ModelRunner(draft), transform, draws),
        transform,
        RULES["token"],
        draws,
    )
    state = engine.prefill([Prompt(str(row), (row, 3 * row)) for row in range(40)], 60)
    counts = Counts()
    for step in generate(engine, state, Limits(60), FixedDraftLength(3, 40)):
        for row in step.rows:
            counts.add(row)
    assert abs(counts.summary()["acceptance_expected"] - 0.7) < 0.05
    assert len({token for row in range(40) for token in state.generated(row)}) > 100


def test_the_shape_is_the_real_one():
    for family in ("llama", "gpt_neox", "qwen3"):
        model = shape(family, 64)
        decoder = load(model, None, Dtype.bf16, CPU, "model").decoder
        assert sum(p.numel() for p in decoder.parameters()) == parameters(model)


def test_a_pair_without_flips_is_one_law():
    assert agreement_at(0.0, 600, 0) == pytest.approx(1)
