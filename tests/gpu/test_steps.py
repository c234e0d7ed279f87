"""What only a GPU can show: captured graphs, the kernels, how often a round waits."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_map_only

from bench.profiled import WAITS, called, total
from llama_ssp.config import SamplingConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.models import experts
from llama_ssp.models.attention import Places, attend_rows
from llama_ssp.models.cuda_graphs import GraphedModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.formats.coded import TABLES
from llama_ssp.models.kernels import attention
from llama_ssp.models.kernels.coded import CodedLinear, operators
from llama_ssp.models.kernels.kernel_sizes import FEW_ROWS
from llama_ssp.speculative.drafters.local import ModelDrafter, Sampler
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES
from tests.families import build, decoder_of
from tests.rig import perturbed, speculate
from tests.test_coded_linear import held, rows_of, wide
from tests.test_triton import CASES, inputs, mixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAST = max(torch.cuda.device_count() - 1, 0)  # not the current one, where there are several
SAMPLED = SamplingConfig(temperature=0.9, top_k=20)
SHOWN = 5  # values of those that missed: the GPU may not be there again
PROMPTS = [Prompt(str(row), tuple(range(3, 9 - 2 * row))) for row in range(2)]


def near(what: str, result: Tensor, exact: Tensor, bound: float, order: float = torch.inf) -> None:
    """Expects the norm of this order of the errors to be at most `bound` times that of the exact numbers."""
    result, exact = result.detach().cpu().double(), exact.detach().cpu().double()
    if result.shape != exact.shape:
        pytest.fail(f"{what}: expected the shape {tuple(exact.shape)}; it is {tuple(result.shape)}")
    error, size = (float(torch.linalg.vector_norm(each, order)) for each in (result - exact, exact))
    if not error <= bound * size:  # NaN misses, too
        wanted = f"an error of at most {bound * size:g}, {bound:g} of the numbers"
        pytest.fail(f"{what}: expected {wanted}; it is {error:g}: {_worst(result, exact)}")


def same_tokens(what: str, result: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> None:
    """Expects these texts, row by row."""
    missed = []
    for row, (tokens, others) in enumerate(zip(result, wanted, strict=True)):
        pairs = enumerate(zip(tokens, others, strict=False))
        at = next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(others)))
        rest, other_rest = (list(text[at : at + SHOWN]) for text in (tokens, others))
        if rest or other_rest:
            missed.append(f"row {row} from token {at} on: {rest}, not {other_rest}")
    if missed:
        differ = f"{len(missed)} of {len(wanted)} rows differ"
        pytest.fail(f"{what}: expected the same tokens; {differ}: {'; '.join(missed)}")


def _worst(result: Tensor, exact: Tensor) -> str:
    """Returns the numbers that are furthest off, with their places."""
    off = (result - exact).abs().nan_to_num(torch.inf).flatten()
    places = [
        tuple(map(int, torch.unravel_index(at, exact.shape))) for at in off.topk(min(SHOWN, len(off)))[1]
    ]
    return "; ".join(f"{list(place)} is {result[place]:g}, not {exact[place]:g}" for place in places)


def on_gpu(graphs: bool, noise: float = 0.0) -> DecoderModel:
    """A small Llama in fp32, the draft's with noise; as it is, or in graphs."""
    device = torch.device(f"cuda:{LAST}")
    module = (perturbed(build("llama-gqa"), noise) if noise else build("llama-gqa")).to(device)
    attention.operators("cuda")
    decoder = decoder_of(module, device=device)
    return (GraphedModel if graphs else DecoderModel)(decoder, module.config, "model", ALONE)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("k", [0, 4])
def test_graphs_write_the_text_of_eager_steps(rule: str, rows: int, k: int) -> None:
    """Long enough for graphs to be replayed, and for several parts of the context."""
    how: Any = {"k": k, "rule": rule, "max_new": 300, "sampling": SAMPLED}
    plain, graphed = (
        speculate(on_gpu(graphs), PROMPTS[:rows], on_gpu(graphs, 0.3) if k else None, **how)
        for graphs in (False, True)
    )
    same_tokens(
        f"{rows} texts in graphs, K = {k}, rule {rule}, beside eager ones", graphed.texts, plain.texts
    )


def test_a_round_waits_once() -> None:
    sampler = Sampler(SamplingTransform(SAMPLED, (), on_gpu(False).vocab), CounterDraws(0))
    drafter = ModelDrafter(ModelRunner(on_gpu(True, 0.3)), sampler)
    engine = Engine(ModelRunner(on_gpu(True)), drafter, sampler, RULES["block"])
    state = engine.prefill(PROMPTS[:1], 64)

    def one_round() -> None:
        verdict = engine.verify(state, engine.draft(state, [4]))
        state.append({0: verdict.tokens(0)})
        engine.roll_back(state)

    for _ in range(4):  # captures
        one_round()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen, record_function("round"):
        one_round()
    calls = called(seen.events(), "round")
    waits = {name: calls[name] for name in WAITS if calls[name]}
    assert total(calls, WAITS) == 1, f"a round: expected 1 wait for the GPU; there are {waits}"


@pytest.mark.parametrize("rows", [1, 5, 16, 100, 300])
@pytest.mark.parametrize("table", TABLES)
def test_the_kernel_for_codes(table: str, rows: int) -> None:
    """Beside the exact product, and row by row the same: of few rows, and of so many that parts are added."""
    operators("cuda")
    offsets = (None, "zero", "shift") if "int" in table else (None, "shift")  # zeros are integers, too
    for group, offset in itertools.product((0, 32), offsets):
        weight = held(96, 1120, table, group, offset)
        layer = CodedLinear(weight, None, torch.device(f"cuda:{LAST}"))
        x = rows_of(rows, 1120).to(f"cuda:{LAST}")
        what = f"{table}, groups of {group}, offset {offset}, {rows} rows"
        near(what, layer(x), x.cpu().double() @ wide(weight).T, 2**-7, order=2)
        near(f"{what}: a row of 16 beside the row alone", layer(x[:16])[:1], layer(x[:1]), 0.0)
        if rows > FEW_ROWS:
            near(f"{what}: a row of 100 beside one of 17", layer(x[:100])[:1], layer(x[:17])[:1], 0.0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_attention(case: int, dtype: torch.dtype, bound: float) -> None:
    """Against the reference in fp64, whatever slots that are not the text's hold."""
    attention.operators("cuda")
    places, (*tensors, scores, sinks) = inputs(case)
    query, keys, values = (tensor.to(dtype) for tensor in tensors)
    exact = attend_rows(places, query.double(), keys.double(), values.double(), scores, sinks)
    device = torch.device(f"cuda:{LAST}")
    places = Places(
        position_T=places.position_T.to(device), first_T=places.first_T.to(device), attend=attention.attend
    )
    there = [each.to(device) for each in (query, keys, values)]
    result = attention.attend(places, *there, scores, None if sinks is None else sinks.to(device))
    near(f"attention, case {case} {CASES[case][:6]}, {dtype}", result, exact, bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 4, 2), (5, 8, 4), (20, 32, 3), (700, 32, 3)])
@pytest.mark.parametrize("kind", [None, ("int4", 0, "zero"), ("e2m1", 32, None), ("int8", 16, "shift")])
def test_experts(kind: Any, tokens: int, count: int, top_k: int, dtype: torch.dtype, bound: float) -> None:
    """Against the reference in fp64; some tokens choose the same experts.

    The experts do not run one after the other, which no kernel of ours would do.
    """
    operators("cuda")
    *arguments, exact = mixture((tokens, count, top_k, 72, 40), kind, dtype=dtype)
    given, layers = tree_map_only(Tensor, lambda each: each.to(f"cuda:{LAST}"), arguments)
    up, down, up_how, down_how, *_ = layers
    first = experts.Stack(up, up_how)
    second = experts.Stack(down, down_how)
    # Of 700 tokens in bf16, plain, Hopper takes torch's grouped product: our kernel for many pairs is not
    # compared there. bench/gpu_figures.py compares the two.
    assert not experts.waits_for_host(dtype, first, second, tokens * top_k)
    result = experts.apply_on_gpu(*given, *layers)
    near(f"{top_k} of {count} experts of {kind}, {tokens} tokens, {dtype}", result, exact, bound)
