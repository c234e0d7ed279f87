"""The low-precision checker: near ties are forgiven, planted faults are not."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.passes import Pass
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.certify.greedy import Finding, GreedyReport, check_greedy
from tests.families import FAMILIES, HYBRIDS, VOCAB, build
from tests.proofs.mutants import every
from tests.rig import Run, perturbed, speculate

K, NEW = 4, 24
RANDOM = torch.Generator().manual_seed(3)
PROMPTS = [
    Prompt(f"p{n}", tuple(torch.randint(3, VOCAB, (n,), generator=RANDOM).tolist())) for n in (3, 8, 18)
]
Model = tuple[str, bool, torch.dtype]  # the family, whether it is mild, its number format


@cache
def pair(family: str, mild: bool, dtype: torch.dtype) -> tuple[CausalModel, CausalModel]:
    """The model in low precision, and a draft that agrees sometimes."""
    narrow = build(family, dtype=dtype, mild=mild)
    draft = perturbed(build(family, mild=mild), 0.02).to(dtype)
    return CausalModel(narrow, family), CausalModel(draft, family)


@cache
def runs(*model: Any) -> tuple[Run, Run]:
    target, draft = pair(*model)
    plain = speculate(target, PROMPTS, None, k=0, max_new=NEW)
    return plain, speculate(target, PROMPTS, draft, k=K, max_new=NEW)


def reported(model: Model, run: Run) -> GreedyReport:
    return check_greedy(pair(*model)[0], PROMPTS, runs(*model)[0].texts, run.texts, K)


# The first repeats one token; the others run on the decoder only.
SKIPPED = ("falcon", "gpt_neo", *HYBRIDS)


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SKIPPED])
def test_every_family_is_explained(family: str) -> None:
    """Takes a mild model or a sharp one, in either format, in turn.

    In fp32 the same weights give blocks and single tokens the same logits.
    """
    turn = list(FAMILIES).index(family)
    mild, dtype = turn % 2 == 0, (torch.bfloat16, torch.float16)[turn // 2 % 2]
    plain, run = runs(family, mild, dtype)
    assert 0 < run.accepted < run.drafted
    report = reported((family, mild, dtype), run)
    assert report.positions >= len(PROMPTS) * NEW and report.count(Finding.unexplained) == 0, report.texts
    for text in report.texts:
        assert (text.finding is Finding.equal) == (text.fork is None)
    wide = CausalModel(build(family, dtype=dtype, mild=mild).float(), family)
    assert check_greedy(wide, PROMPTS, plain.texts, plain.texts, K).band < 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", ["stale keys of rejected tokens", "mask sees one slot ahead"])
@pytest.mark.parametrize("family", ["llama-gqa", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_a_faulty_run_is_unexplained(family: str, fault: str, dtype: torch.dtype) -> None:
    model = family, False, dtype
    with every()[fault].planted():
        wrong = speculate(pair(*model)[0], PROMPTS, pair(*model)[1], k=K, max_new=NEW)
    assert reported(model, wrong).count(Finding.unexplained) >= 2
    assert reported(model, runs(*model)[1]).count(Finding.unexplained) == 0


class Scripted:
    """Token t is followed by t+1, 3 and 4 by 1 and 3.

    Behind token 1 the tokens 2 and 4 are 0.25 apart, and trade places in a block if `moved` is larger.
    """

    vocab, context, device, restart = 6, 64, torch.device("cpu"), None

    def __init__(self, moved: float = 0.5) -> None:
        self.moved = moved

    def new_cache(self, rows: int, capacity: int, rewinds: int = 0) -> KVCache:
        return KVCache(rows=rows, capacity=capacity, device=self.device)

    def logits(self, token_BW: Tensor, pass_: Pass, cache: KVCache) -> Tensor:
        follows = torch.tensor([1, 2, 3, 1, 3, 0])
        logits = 8 * torch.nn.functional.one_hot(follows[token_BW], self.vocab).float()
        logits[..., 4] += (token_BW == 1) * (7.75 + self.moved * (pass_.width > 1))
        return logits


A, B = Prompt("a", (0,)), Prompt("b", (3,))
PLAIN, FORKED = [1, 2, 3, 1, 2], [1, 4, 3, 1, 2]


def test_the_numbers_are_what_they_say() -> None:
    report = check_greedy(Scripted(), [A, B], [PLAIN, [1, 2]], [FORKED, [1, 2]], 3, rows=2)
    assert (report.band, report.positions, report.epsilon) == (0.5, 18, 1.0)
    assert [text.finding for text in report.texts] == [Finding.near_tie, Finding.equal]
    assert report.verdict is Finding.near_tie and report.count(Finding.equal) == 1
    assert [text.fork for text in report.texts] == [1, None]
    assert report.texts[0].margins == [0, 0.25, 0, 0, 0] and report.texts[1].margins == [0, 0]


@pytest.mark.parametrize(
    ("moved", "plain", "speculative"),
    [
        (0.0, PLAIN, FORKED),  # rounding does not reach that far
        (0.125 - 1e-3, PLAIN, FORKED),
        (0.5, PLAIN, [1, 4, 3, 1, 5]),  # wrong behind a fork
        (0.5, PLAIN, PLAIN[:-3]),  # a text that just ends
        (0.5, PLAIN[:-3], PLAIN),
        (0.5, PLAIN, []),
        (0.5, [], PLAIN),
        (0.5, [1, 2, 3, 1, 5], [1, 2, 3, 1, 5]),  # both are wrong: the replay shows it
        (torch.nan, PLAIN, PLAIN),
        (torch.inf, PLAIN, PLAIN),
    ],
    ids=[
        "no rounding",
        "too little",
        "wrong behind a fork",
        "too short",
        "too long",
        "no text",
        "no plain text",
        "both wrong",
        "nan",
        "inf",
    ],
)
def test_what_is_unexplained(moved: float, plain: list[int], speculative: list[int]) -> None:
    """The control: the same fork where rounding just reaches it."""
    assert check_greedy(Scripted(moved), [A], [plain], [speculative], 1).verdict is Finding.unexplained
    assert check_greedy(Scripted(0.125), [A], [PLAIN], [FORKED], 1).verdict is Finding.near_tie


@pytest.mark.slow
def test_fp32_has_a_narrow_band() -> None:
    wide, narrow = (pair("llama-gqa", True, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    batch = [replace(prompt, token_ids=prompt.token_ids[:2]) for prompt in PROMPTS]
    texts = [prompt.token_ids[2:] for prompt in PROMPTS]
    single, low = (check_greedy(model, batch, texts, texts, K) for model in (wide, narrow))
    assert 0 < single.epsilon < 1e-4 < 1e-2 < low.epsilon
    assert check_greedy(wide, batch, texts, texts, 0, rows=1).epsilon == 0
