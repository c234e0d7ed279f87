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


@cache
def pair(family: str, mild: bool, dtype: torch.dtype) -> tuple[CausalModel, CausalModel]:
    """The model in low precision, and a draft that agrees sometimes."""
    narrow = build(family, dtype=dtype, mild=mild)
    draft = perturbed(build(family, mild=mild), 0.02).to(dtype)
    return CausalModel(narrow, family), CausalModel(draft, family)


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    lengths = (3, 8, 18)
    return [
        Prompt(f"p{n}", tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist())) for n in lengths
    ]


@cache
def runs(family: str, mild: bool, dtype: torch.dtype) -> tuple[Run, Run]:
    target, draft = pair(family, mild, dtype)
    plain = speculate(target, prompts(), None, k=0, max_new=NEW)
    return plain, speculate(target, prompts(), draft, k=K, max_new=NEW)


def judge(family: str, mild: bool, dtype: torch.dtype) -> GreedyReport:
    """Through the model itself; in fp32 the same weights give blocks and single tokens the same logits."""
    target, (plain, speculative) = pair(family, mild, dtype)[0], runs(family, mild, dtype)
    assert 0 < speculative.accepted < speculative.drafted
    report = check_greedy(target, prompts(), plain.texts, speculative.texts, K)
    assert report.positions >= len(prompts()) * NEW
    wide = CausalModel(build(family, dtype=dtype, mild=mild).float(), family)
    assert check_greedy(wide, prompts(), plain.texts, plain.texts, K).band < 1e-3
    assert sum(report.count(finding) for finding in Finding) == len(prompts())
    return report


def test_a_bf16_run_is_explained() -> None:
    assert judge("llama-gqa", True, torch.bfloat16).count(Finding.unexplained) == 0


@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize("mild", [True, False], ids=["mild", "sharp"])
@pytest.mark.parametrize(
    "family",
    [name for name in FAMILIES if name not in ("falcon", "gpt_neo")],  # repeats one token; has a decoder only
)
def test_every_family_is_explained(family: str, mild: bool) -> None:
    """In both formats, mild in one and sharp in the other, which change places from family to family."""
    dtype = (torch.bfloat16, torch.float16)[(list(FAMILIES).index(family) + mild) % 2]
    report = judge(family, mild, dtype)
    assert report.count(Finding.unexplained) == 0, report.texts
    for text in report.texts:
        assert (text.finding is Finding.equal) == (text.fork is None)


def far_token(model: CausalModel, text: list[int], epsilon: float) -> int:
    """A token that is no near tie behind this text, though as near to one as there is."""
    with torch.inference_mode():
        logits = model.module(torch.tensor([text])).logits[0, -1].float()
    margin = logits.max() - logits
    return int(torch.where(margin > 1.5 * epsilon, margin, torch.inf).argmin())


@pytest.mark.parametrize(
    "family, where",
    [
        ("llama-gqa", NEW // 2),
        *(pytest.param("opt", where, marks=pytest.mark.slow) for where in (0, NEW // 2, NEW - 1)),
    ],
)
def test_a_wrong_token_is_unexplained(family: str, where: int) -> None:
    """Whether it stands in the speculative text alone, or in both (then the replay finds it)."""
    target = pair(family, True, torch.bfloat16)[0]
    batch, plain = prompts()[:2], runs(family, True, torch.bfloat16)[0].texts[:2]
    epsilon = check_greedy(target, batch, plain, plain, K).epsilon
    wrong = [list(text) for text in plain]
    before = [*batch[1].token_ids, *plain[1][:where]]
    wrong[1][where] = far_token(target, before, epsilon)
    wrong[1][where + 1 :] = speculate(
        target, [Prompt("x", (*before, wrong[1][where]))], None, k=0, max_new=NEW
    ).texts[0][: NEW - where - 1]
    report = check_greedy(target, batch, plain, wrong, K)
    assert [text.finding for text in report.texts] == [Finding.equal, Finding.unexplained]
    assert report.verdict is Finding.unexplained
    found = report.texts[1]
    assert (found.fork, len(found.margins)) == (where, NEW)
    assert epsilon < found.margins[where] == max(found.margins) < 30 * epsilon + 0.5
    assert check_greedy(target, batch, wrong, wrong, K).verdict is Finding.unexplained


def test_a_wrong_token_behind_a_fork_is_unexplained() -> None:
    """The replay covers the text after the first fork."""
    model, batch = Scripted(), [Prompt("a", (0,))]
    plain, forked = [[1, 2, 3, 1, 2]], [[1, 4, 3, 1, 2]]
    assert check_greedy(model, batch, plain, forked, 1).verdict is Finding.near_tie
    wrong = check_greedy(model, batch, plain, [[1, 4, 3, 1, 5]], 1)
    assert wrong.verdict is Finding.unexplained
    assert wrong.texts[0].margins[4] > wrong.epsilon >= max(wrong.texts[0].margins[:4])


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
    target, draft = pair(family, False, dtype)
    faulty = fault(build(family, dtype=dtype), family)
    plain = speculate(target, prompts(), None, k=0, max_new=NEW)
    run = speculate(faulty, prompts(), draft, k=K, max_new=NEW)
    report = check_greedy(target, prompts(), plain.texts, run.texts, K)
    assert report.count(Finding.unexplained) >= 2
    sound = speculate(target, prompts(), draft, k=K, max_new=NEW)
    report = check_greedy(target, prompts(), plain.texts, sound.texts, K)
    assert report.count(Finding.unexplained) == 0


@pytest.mark.slow
def test_a_text_that_just_ends_is_unexplained() -> None:
    target = pair("llama-gqa", True, torch.bfloat16)[0]
    batch, plain = prompts()[:1], runs("llama-gqa", True, torch.bfloat16)[0].texts[:1]
    for one, other in ((plain, [plain[0][:-3]]), ([plain[0][:-3]], plain), (plain, [[]]), ([[]], plain)):
        report = check_greedy(target, batch, one, other, K)
        assert report.verdict is Finding.unexplained
        assert report.texts[0].margins[-1] == torch.inf


class Scripted:
    """Token t is followed by t+1, 3 and 4 by 1 and 3.

    Behind token 1 the tokens 2 and 4 are `gap` apart, and trade places in a block if `moved` is larger.
    """

    vocab, context, device, restart = 6, 64, torch.device("cpu"), None

    def __init__(self, gap: float = 0.25, moved: float = 0.5) -> None:
        self.gap, self.moved = gap, moved

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return RaggedCache(rows, capacity, Tally())

    def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
        logits = 8 * torch.nn.functional.one_hot((token_BW + 1) % self.vocab, self.vocab).float()
        logits[..., 3] += 8.0 * (token_BW == 4)
        logits[..., 5] -= 8.0 * (token_BW == 4)
        logits[..., 1] += 8.0 * (token_BW == 3)
        logits[..., 4] -= 8.0 * (token_BW == 3)
        near = token_BW == 1
        logits[..., 4] += near * (8.0 - self.gap)
        if feed.width > 1:
            logits[..., 4] += near * self.moved
        return logits


def test_the_numbers_are_what_they_say() -> None:
    model, batch = Scripted(), [Prompt("a", (0,)), Prompt("b", (3,))]
    plain, forked = [[1, 2, 3, 1, 2], [1, 2]], [[1, 4, 3, 1, 2], [1, 2]]
    report = check_greedy(model, batch, plain, forked, 3, rows=2)
    assert (report.band, report.positions, report.epsilon) == (0.5, 18, 1.0)
    assert [text.finding for text in report.texts] == [Finding.near_tie, Finding.equal]
    assert report.verdict is Finding.near_tie and report.count(Finding.equal) == 1
    assert [text.fork for text in report.texts] == [1, None]
    assert report.texts[0].margins == [0, 0.25, 0, 0, 0] and report.texts[1].margins == [0, 0]


def test_a_fork_wider_than_the_band_is_unexplained() -> None:
    """The same texts, where rounding does not reach that far."""
    batch, plain, forked = [Prompt("a", (0,))], [[1, 2, 3]], [[1, 4, 3]]
    for gap, moved, expected in (
        (0.25, 0.125, Finding.near_tie), (0.26, 0.125, Finding.unexplained), (0.25, 0.0, Finding.unexplained),
    ):  # fmt: skip
        report = check_greedy(Scripted(gap, moved), batch, plain, forked, 1)
        assert report.verdict is expected


TIE, FAR, NAN = 0.5, 0.75, float("nan")


@pytest.mark.parametrize(
    "fork, margins, band, expected",
    [
        (None, [TIE], 0.25, Finding.equal),
        (None, [0.0, FAR], 0.25, Finding.unexplained),
        (None, [NAN, 0.0], 0.25, Finding.unexplained),
        (None, [0.0], NAN, Finding.unexplained),
        (None, [0.0], torch.inf, Finding.unexplained),
        (1, [0.0, TIE], 0.25, Finding.near_tie),
        (1, [0.0, FAR], 0.25, Finding.unexplained),
        (1, [0.0, NAN], 0.25, Finding.unexplained),
        (1, [FAR, TIE], 0.25, Finding.unexplained),
        (1, [0.0, torch.inf], 0.25, Finding.unexplained),
    ],
)
def test_the_finding(fork: int | None, margins: list[float], band: float, expected: Finding) -> None:
    assert finding_of(fork, margins, band) is expected


def test_a_damaged_model_is_unexplained() -> None:
    class Damaged(Scripted):
        def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
            return super().logits(token_BW, feed, cache, last_only) * torch.nan

    report = check_greedy(Damaged(), [Prompt("a", (0,))], [[1, 2]], [[1, 2]], 1)
    assert report.verdict is Finding.unexplained


@pytest.mark.slow
def test_fp32_has_a_narrow_band() -> None:
    wide, narrow = (pair("llama-gqa", True, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    batch = [replace(prompt, token_ids=prompt.token_ids[:2]) for prompt in prompts()]
    texts = [prompt.token_ids[2:] for prompt in prompts()]
    single, low = (check_greedy(model, batch, texts, texts, K) for model in (wide, narrow))
    assert 0 < single.epsilon < 1e-4 < 1e-2 < low.epsilon
    assert check_greedy(wide, batch, texts, texts, 0, rows=1).epsilon == 0


@pytest.mark.parametrize(
    "one, other, expected",
    [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [1], 0)],
)
def test_first_difference(one: Any, other: Any, expected: int | None) -> None:
    assert first_difference(one, other) == expected
