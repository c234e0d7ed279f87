"""Synthetic pairs: the agreement that was asked for."""

import pytest
import torch

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.models.loader import load
from llama_ssp.models.synthetic import agreement_at, flips_for
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts
from tests.rig import engine_of, steps_of

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
    engine = engine_of(target, draft, "token", vocab=600)
    prompts, counts = [Prompt(str(row), (row, 3 * row)) for row in range(40)], Counts()
    state, steps = steps_of(engine, prompts, 60, 3)
    for step in steps:
        for row in step.rows:
            counts.add(row)
    assert abs(counts.summary()["acceptance_expected"] - 0.7) < 0.05
    assert len({token for row in range(40) for token in state.generated(row)}) > 100


def test_a_pair_without_flips_is_one_law():
    assert agreement_at(0.0, 600, 0) == pytest.approx(1)
