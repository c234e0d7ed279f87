"""The low-precision checker: near ties are forgiven, planted faults are not."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from llama_ssp.models.causal_lm import CausalModel, RaggedCache
from llama_ssp.models.feed import Feed
from llama_ssp.models.slot_cache import Tally
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.certify.greedy import (
    Finding,
    GreedyReport,
    check_greedy,
    finding_of,
    first_difference,
)
from tests.families import FAMILIES, VOCAB, build
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
    """Without the draft and with it."""
    target, draft = pair(*model)
    plain = speculate(target, PROMPTS, None, k=0, max_new=NEW)
    return plain, speculate(target, PROMPTS, draft, k=K, max_new=NEW)


def reported(model: Model, run: Run) -> GreedyReport:
    return check_greedy(pair(*model)[0], PROMPTS, runs(*model)[0].texts, run.texts, K)


SKIPPED = ("falcon", "gpt_neo")  # the one repeats one token; the other has a decoder only


@pytest.mark.few(7)
@pytest.mark.slow
@pytest.mark.parametrize("mild", [True, False], ids=["mild", "sharp"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SKIPPED])
def test_every_family_is_explained(family: str, mild: bool) -> None:
    """In both formats, mild in one and sharp in the other, which change places from family to family.

    In fp32 the same weights give blocks and single tokens the same logits.
    """
    dtype = (torch.bfloat16, torch.float16)[(list(FAMILIES).index(family) + mild) % 2]
    plain, run = runs(family, mild, dtype)
    assert 0 < run.accepted < run.drafted
    report = reported((family, mild, dtype), run)
    assert report.positions >= len(PROMPTS) * NEW and report.count(Finding.unexplained) == 0, report.texts
    for text in report.texts:
        assert (text.finding is Finding.equal) == (text.fork is None)
    wide = CausalModel(build(family, dtype=dtype, mild=mild).float(), family)
    assert check_greedy(wide, PROMPTS, plain.texts, plain.texts, K).band < 1e-3


def far_token(model: CausalModel, text: list[int], epsilon: float) -> int:
    """A token that is no near tie behind this text, though as near to one as there is."""
    with torch.inference_mode():
        logits = model.module(torch.tensor([text])).logits[0, -1].float()
    margin = logits.max() - logits
    return int(torch.where(margin > 1.5 * epsilon, margin, torch.inf).argmin())


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("llama-gqa", NEW // 2),
        *(pytest.param("opt", where, marks=pytest.mark.slow) for where in (0, NEW - 1)),
    ],
)
def test_a_wrong_token_is_unexplained(family: str, where: int) -> None:
    """Whether it stands in the speculative text alone, or in both (then the replay finds it)."""
    model = family, True, torch.bfloat16
    target, batch, plain = pair(*model)[0], PROMPTS[:2], runs(*model)[0].texts[:2]
    epsilon = check_greedy(target, batch, plain, plain, K).epsilon
    before = [*batch[1].token_ids, *plain[1][:where]]
    before.append(far_token(target, before, epsilon))
    rest = speculate(target, [Prompt("x", tuple(before))], None, k=0, max_new=NEW).texts[0]
    wrong = [plain[0], [*plain[1][:where], before[-1], *rest[: NEW - where - 1]]]
    report = check_greedy(target, batch, plain, wrong, K)
    assert [text.finding for text in report.texts] == [Finding.equal, Finding.unexplained]
    assert report.verdict is Finding.unexplained
    text = report.texts[1]
    assert (text.fork, len(text.margins)) == (where, NEW)
    assert epsilon < text.margins[where] == max(text.margins) < 30 * epsilon + 0.5
    assert check_greedy(target, batch, wrong, wrong, K).verdict is Finding.unexplained


class FirstKeys(RaggedCache):
    """Keeps the first key a slot ever got: a rejected draft's."""

    def expect(self, feed: Feed) -> None:
        if not hasattr(self, "taken"):
            self.taken = torch.zeros(self.rows, self.capacity + 1, dtype=torch.bool)
        wrong, slots = copy(feed), feed.slots()
        kept = slots.masked_fill(self.taken.gather(1, slots), self.capacity)
        vars(wrong)["_places"] = feed.positions(), kept
        self.taken.scatter_(1, slots, True)
        self.taken[:, self.capacity] = False
        super().expect(wrong)


class Stale(CausalModel):
    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return FirstKeys(rows, capacity, self.caches)


class Leaking(CausalModel):
    """Every token sees the one behind it, if that is fed along: a mask off by one."""

    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        visible = Feed.visible

        def leaking(feed: Feed, *rule: Any) -> Tensor:
            return visible(feed, *rule) | visible(feed, *rule).roll(1, -1)

        with patch.object(Feed, "visible", leaking):
            return super().logits(token_BW, feed, cache, last_only)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", [Stale, Leaking])
@pytest.mark.parametrize("family", ["llama-gqa", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_a_faulty_run_is_unexplained(family: str, fault: type[CausalModel], dtype: torch.dtype) -> None:
    model = family, False, dtype
    faulty = fault(build(family, dtype=dtype), family)
    wrong = speculate(faulty, PROMPTS, pair(*model)[1], k=K, max_new=NEW)
    assert reported(model, wrong).count(Finding.unexplained) >= 2
    assert reported(model, runs(*model)[1]).count(Finding.unexplained) == 0


class Scripted:
    """Token t is followed by t+1, 3 and 4 by 1 and 3.

    Behind token 1 the tokens 2 and 4 are 0.25 apart, and trade places in a block if `moved` is larger.
    """

    vocab, context, device, restart = 6, 64, torch.device("cpu"), None

    def __init__(self, moved: float = 0.5) -> None:
        self.moved = moved

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return RaggedCache(rows, capacity, Tally())

    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        follows = torch.tensor([1, 2, 3, 1, 3, 0])
        logits = 8 * torch.nn.functional.one_hot(follows[token_BW], self.vocab).float()
        logits[..., 4] += (token_BW == 1) * (7.75 + self.moved * (feed.width > 1))
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
        (torch.nan, PLAIN, PLAIN),
    ],
)
def test_what_is_unexplained(moved: float, plain: list[int], speculative: list[int]) -> None:
    """The control: the same fork where rounding just reaches it."""
    assert check_greedy(Scripted(moved), [A], [plain], [speculative], 1).verdict is Finding.unexplained
    assert check_greedy(Scripted(0.125), [A], [PLAIN], [FORKED], 1).verdict is Finding.near_tie


TIE, FAR, NAN = 0.5, 0.75, float("nan")
FINDINGS = {
    Finding.equal: [(None, [TIE], 0.25)],
    Finding.near_tie: [(1, [0.0, TIE], 0.25)],
    Finding.unexplained: [
        (None, [0.0, FAR], 0.25), (None, [NAN, 0.0], 0.25), (None, [0.0], NAN), (None, [0.0], torch.inf),
        (1, [0.0, FAR], 0.25), (1, [0.0, NAN], 0.25), (1, [FAR, TIE], 0.25), (1, [0.0, torch.inf], 0.25),
    ],
}  # fmt: skip


def test_the_finding() -> None:
    for finding, cases in FINDINGS.items():
        assert {finding_of(*case) for case in cases} == {finding}
    texts = {None: ([], []), 0: ([], [1]), 1: ([1, 2], [1, 3]), 2: ([1, 2], [1, 2, 3])}
    assert {fork: first_difference(*pair) for fork, pair in texts.items()} == {fork: fork for fork in texts}


@pytest.mark.slow
def test_fp32_has_a_narrow_band() -> None:
    wide, narrow = (pair("llama-gqa", True, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    batch = [replace(prompt, token_ids=prompt.token_ids[:2]) for prompt in PROMPTS]
    texts = [prompt.token_ids[2:] for prompt in PROMPTS]
    single, low = (check_greedy(model, batch, texts, texts, K) for model in (wide, narrow))
    assert 0 < single.epsilon < 1e-4 < 1e-2 < low.epsilon
    assert check_greedy(wide, batch, texts, texts, 0, rows=1).epsilon == 0
