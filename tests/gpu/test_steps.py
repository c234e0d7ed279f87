"""What only a GPU can show: captured graphs, the kernels, how often a round waits. Never run yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.profiled import WAITS, called, total
from llama_ssp.config import SamplingConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.models.attention import attend_rows
from llama_ssp.models.cuda_graphs import GraphedModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels import attention
from llama_ssp.speculative.drafters.local import ModelDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES
from tests.families import build, decoder_of
from tests.rig import perturbed, speculate
from tests.test_triton import CASES, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAST = max(torch.cuda.device_count() - 1, 0)  # not the current one, where there are several
SAMPLED = SamplingConfig(temperature=0.9, top_k=20)
PROMPTS = [Prompt(str(row), tuple(range(3, 9 - 2 * row))) for row in range(2)]


def on_gpu(graphs: bool, noise: float = 0.0) -> DecoderModel:
    """A small Llama in fp32, the draft's with noise; as it is, or in graphs."""
    module = perturbed(build("llama-gqa"), noise) if noise else build("llama-gqa")
    attention.operators("cuda")
    decoder = decoder_of(module, device=torch.device(f"cuda:{LAST}"))
    return (GraphedModel if graphs else DecoderModel)(decoder, module.config, "model", ALONE)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("k", [0, 4])
def test_graphs_write_the_text_of_eager_steps(rule: str, rows: int, k: int) -> None:
    """Long enough for graphs to be replayed, and for several parts of the context."""
    how: Any = {"k": k, "rule": rule, "max_new": 300, "sampling": SAMPLED}
    plain, graphed = (
        speculate(on_gpu(graphs), PROMPTS[:rows], on_gpu(graphs, 0.3) if k else None, **how)
        for graphs in (False, True)
    )
    assert graphed.texts == plain.texts


def test_a_round_waits_once() -> None:
    transform, draws = SamplingTransform(SAMPLED, (), on_gpu(False).vocab), CounterDraws(0)
    drafter = ModelDrafter(ModelRunner(on_gpu(True, 0.3)), transform, draws)
    engine = Engine(ModelRunner(on_gpu(True)), drafter, transform, RULES["block"], draws)
    state = engine.prefill(PROMPTS[:1], 64)

    def one_round() -> None:
        verdict = engine.verify(state, engine.draft(state, [4]))
        state.append(0, verdict.tokens(0))
        engine.roll_back(state)

    for _ in range(4):  # captures
        one_round()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen, record_function("round"):
        one_round()
    assert total(called(seen.events(), "round"), WAITS) == 1


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_the_kernel_for_8_bit(rows: int) -> None:
    """Beside the exact product, and row by row the same."""
    from llama_ssp.models.kernels.int8_triton import linear_int8

    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (96, 320), generator=generator, dtype=torch.int8).to(f"cuda:{LAST}")
    scales = torch.rand(96, generator=generator).to(f"cuda:{LAST}")
    x = torch.randn(rows, 320, generator=generator).to(f"cuda:{LAST}", torch.bfloat16)
    found = linear_int8(x, codes, scales, None)
    exact = x.double() @ (codes.double() * scales.double()[:, None] / 127).T
    assert (found.double() - exact).norm() / exact.norm() < 2**-8
    assert torch.equal(linear_int8(x[:1], codes, scales, None)[0], found[0])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_attention(case: int, dtype: torch.dtype, bound: float) -> None:
    """Against the reference in fp64, whatever slots that are not the text's hold."""
    attention.operators("cuda")
    feed, (*tensors, scores, sinks) = inputs(case)
    query, keys, values = (tensor.to(dtype) for tensor in tensors)
    exact = attend_rows(feed, query.double(), keys.double(), values.double(), scores, sinks)
    device = torch.device(f"cuda:{LAST}")
    feed.position_T, feed.first_T = feed.position_T.to(device), feed.first_T.to(device)
    there = [each.to(device) for each in (query, keys, values)]
    found = attention.attend(feed, *there, scores, None if sinks is None else sinks.to(device))
    assert (found.cpu().double() - exact).abs().max() <= bound * exact.abs().max()
