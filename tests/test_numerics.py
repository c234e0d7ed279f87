"""The low-precision checker: near ties are forgiven, planted faults are not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.kv_cache import Feed, RaggedCache
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.certify.near_ties import (
    Band,
    Finding,
    Fork,
    GreedyReport,
    Replay,
    check_greedy,
    finding_of,
    first_difference,
    noise_band,
)
from tests.families import FAMILIES, VOCAB, build
from tests.rig import Run, perturbed, speculate

K, NEW = 4, 24


@cache
def pair(family: str, mild: bool, dtype: torch.dtype) -> tuple[CausalModel, CausalModel, CausalModel]:
    """The model in low precision, a draft that agrees sometimes, and the same weights in fp32."""
    narrow = build(family, dtype=dtype, mild=mild)
    draft = perturbed(build(family, mild=mild), 0.02).to(dtype)
    wide = build(family, dtype=dtype, mild=mild).float()
    return CausalModel(narrow, family), CausalModel(draft, family), CausalModel(wide, family)


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    lengths = (3, 8, 18)
    return [
        Prompt(f"p{n}", tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist())) for n in lengths
    ]


@cache
def runs(family: str, mild: bool, dtype: torch.dtype) -> tuple[Run, Run]:
    target, draft, _ = pair(family, mild, dtype)
    plain = speculate(target, prompts(), None, k=0, max_new=NEW)
    return plain, speculate(target, prompts(), draft, k=K, max_new=NEW)


def judge(family: str, mild: bool, dtype: torch.dtype, positions: int) -> GreedyReport:
    target, _, wide = pair(family, mild, dtype)
    plain, speculative = runs(family, mild, dtype)
    assert 0 < speculative.accepted < speculative.drafted
    report = check_greedy(
        target, prompts(), plain.texts, speculative.texts, K, wide=wide, positions=positions
    )
    assert report.band.positions >= positions and report.band.width == K + 1
    assert report.band.wide_epsilon is not None and report.band.wide_epsilon > 0
    assert sum(report.count(finding) for finding in Finding) == len(prompts())
    return report


def test_a_bf16_run_is_explained() -> None:
    assert judge("llama-gqa", True, torch.bfloat16, 100).count(Finding.unexplained) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mild", [True, False], ids=["mild", "sharp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_explained(family: str, dtype: torch.dtype, mild: bool) -> None:
    report = judge(family, mild, dtype, 300)
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
    target, _, wide = pair(family, True, torch.bfloat16)
    batch, plain = prompts()[:2], runs(family, True, torch.bfloat16)[0].texts[:2]
    epsilon = check_greedy(target, batch, plain, plain, K, positions=50).band.epsilon
    wrong = [list(text) for text in plain]
    before = [*batch[1].token_ids, *plain[1][:where]]
    wrong[1][where] = far_token(target, before, epsilon)
    wrong[1][where + 1 :] = speculate(
        target, [Prompt("x", (*before, wrong[1][where]))], None, k=0, max_new=NEW
    ).texts[0][: NEW - where - 1]
    report = check_greedy(target, batch, plain, wrong, K, wide=wide, positions=50)
    assert [text.finding for text in report.texts] == [Finding.equal, Finding.unexplained]
    assert report.verdict is Finding.unexplained
    fork, replay = report.texts[1].fork, report.texts[1].replay
    assert fork is not None and replay is not None
    assert (fork.position, fork.speculative) == (replay.position, replay.token) == (where, wrong[1][where])
    assert epsilon < fork.margin == replay.margin < 30 * epsilon + 0.5
    assert check_greedy(target, batch, wrong, wrong, K, positions=50).verdict is Finding.unexplained


def test_a_wrong_token_behind_a_fork_is_unexplained() -> None:
    """The replay covers the text after the first fork."""
    model, batch = Scripted(), [Prompt("a", (0,))]
    plain, forked = [[1, 2, 3, 1, 2]], [[1, 4, 3, 1, 2]]
    assert check_greedy(model, batch, plain, forked, 1, positions=50).verdict is Finding.near_tie
    wrong = check_greedy(model, batch, plain, [[1, 4, 3, 1, 5]], 1, positions=50)
    assert wrong.verdict is Finding.unexplained
    assert wrong.texts[0].replay is not None and wrong.texts[0].replay.position == 4


class FirstKeys(RaggedCache):
    """Keeps the first key a slot ever got: a rejected draft's."""

    def expect(self, feed: Feed, masks: dict[str, Tensor]) -> None:
        super().expect(feed, masks)
        if not hasattr(self, "taken"):
            self.taken = torch.zeros(self.rows, self.capacity + 1, dtype=torch.bool)
        [(device, own)] = self._slots.items()
        slots = torch.where(self.taken.gather(1, own), self.capacity, own)
        self.taken.scatter_(1, own, True)
        self.taken[:, self.capacity] = False
        self._slots = {device: slots}


class Stale(CausalModel):
    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return FirstKeys(rows, capacity)


class Leaking(CausalModel):
    """Every token sees the one behind it, if that is fed along: a mask off by one."""

    def _mask(self, visible_BWS: Tensor) -> Tensor:
        return super()._mask(visible_BWS | visible_BWS.roll(1, -1))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", [Stale, Leaking])
@pytest.mark.parametrize("family", ["llama-gqa", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_a_faulty_run_is_unexplained(family: str, fault: type[CausalModel], dtype: torch.dtype) -> None:
    target, draft, wide = pair(family, False, dtype)
    faulty = fault(build(family, dtype=dtype), family)
    plain = speculate(target, prompts(), None, k=0, max_new=NEW)
    run = speculate(faulty, prompts(), draft, k=K, max_new=NEW)
    report = check_greedy(target, prompts(), plain.texts, run.texts, K, wide=wide, positions=50)
    assert report.count(Finding.unexplained) >= 2
    sound = speculate(target, prompts(), draft, k=K, max_new=NEW)
    report = check_greedy(target, prompts(), plain.texts, sound.texts, K, wide=wide, positions=50)
    assert report.count(Finding.unexplained) == 0


@pytest.mark.slow
def test_a_fault_does_not_excuse_itself() -> None:
    """Checked through the faulty code itself: a leaking mask widens the band, and the wide copy tells."""
    faulty, wide = (Leaking(build("llama-gqa", dtype=d), "leak") for d in (torch.bfloat16, torch.float32))
    batch = prompts()
    plain = speculate(faulty, batch, None, k=0, max_new=NEW)
    run = speculate(faulty, batch, pair("llama-gqa", False, torch.bfloat16)[1], k=K, max_new=NEW)
    alone = check_greedy(faulty, batch, plain.texts, run.texts, K, positions=50)
    both = check_greedy(faulty, batch, plain.texts, run.texts, K, wide=wide, positions=50)
    assert alone.band.epsilon > 1 and alone.band.sound
    assert not both.band.sound and both.count(Finding.unexplained) == len(batch)


@pytest.mark.slow
def test_a_text_that_just_ends_is_unexplained() -> None:
    target, _, wide = pair("llama-gqa", True, torch.bfloat16)
    batch, plain = prompts()[:1], runs("llama-gqa", True, torch.bfloat16)[0].texts[:1]
    for one, other in ((plain, [plain[0][:-3]]), ([plain[0][:-3]], plain), (plain, [[]]), ([[]], plain)):
        report = check_greedy(target, batch, one, other, K, wide=wide, positions=100)
        assert report.verdict is Finding.unexplained
        assert report.texts[0].fork is not None and report.texts[0].fork.margin == torch.inf


class Scripted:
    """Token t is followed by t+1, 3 and 4 by 1 and 3.

    Behind token 1 the tokens 2 and 4 are `gap` apart, and trade places in a block if `moved` is larger.
    """

    vocab, context, device = 6, 64, torch.device("cpu")

    def __init__(self, gap: float = 0.25, moved: float = 0.5) -> None:
        self.gap, self.moved = gap, moved

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return RaggedCache(rows, capacity)

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
    report = check_greedy(model, batch, plain, forked, 3, positions=60, rows=2)
    assert report.band == Band(4, report.band.positions, 0.5, None)
    assert report.band.epsilon == 1.0 and report.band.positions >= 60
    assert [text.finding for text in report.texts] == [Finding.near_tie, Finding.equal]
    assert report.verdict is Finding.near_tie and report.count(Finding.equal) == 1
    fork, replay = report.texts[0].fork, report.texts[0].replay
    assert fork is not None and replay is not None
    assert (fork.position, fork.plain, fork.speculative, fork.margin, fork.wide_margin) == (
        1,
        2,
        4,
        0.25,
        None,
    )
    assert (replay.position, replay.token, replay.margin) == (1, 4, 0.25)


def test_a_fork_wider_than_the_band_is_unexplained() -> None:
    """The same texts, where rounding does not reach that far."""
    batch, plain, forked = [Prompt("a", (0,))], [[1, 2, 3]], [[1, 4, 3]]
    for gap, moved, expected in (
        (0.25, 0.125, Finding.near_tie), (0.26, 0.125, Finding.unexplained), (0.25, 0.0, Finding.unexplained),
    ):  # fmt: skip
        report = check_greedy(Scripted(gap, moved), batch, plain, forked, 1, positions=60)
        assert report.verdict is expected


def test_the_wide_copy_has_a_say() -> None:
    """A wide copy that differs from the model more than rounding could explain the fork with."""
    batch, plain, forked = [Prompt("a", (0,))], [[1, 2, 3]], [[1, 4, 3]]
    near = check_greedy(Scripted(0.25, 0.375), batch, plain, forked, 1, wide=Scripted(0.5, 0), positions=60)
    assert near.verdict is Finding.near_tie
    assert near.texts[0].fork is not None and near.texts[0].fork.wide_margin == 0.5
    assert near.band.wide == 0.625 and near.band.wide_epsilon == 1.25
    assert near.band.wide_narrow == 0 and near.band.largest == 8


TIE, FAR, NAN = 0.5, 0.75, float("nan")


@pytest.mark.parametrize(
    "fork, wide, replay, band, expected",
    [
        (None, None, TIE, Band(2, 9, 0.25), Finding.equal),
        (None, None, FAR, Band(2, 9, 0.25), Finding.unexplained),
        (None, None, NAN, Band(2, 9, 0.25), Finding.unexplained),
        (None, None, 0.0, Band(2, 9, NAN), Finding.unexplained),
        (TIE, None, 0.0, Band(2, 9, 0.25), Finding.near_tie),
        (FAR, None, 0.0, Band(2, 9, 0.25), Finding.unexplained),
        (NAN, None, 0.0, Band(2, 9, 0.25), Finding.unexplained),
        (TIE, None, FAR, Band(2, 9, 0.25), Finding.unexplained),
        (TIE, TIE, 0.0, Band(2, 9, 0.25, 0.25, 0.0, 8.0), Finding.near_tie),
        (TIE, FAR, 0.0, Band(2, 9, 0.25, 0.25, 0.0, 8.0), Finding.unexplained),
        (TIE, NAN, 0.0, Band(2, 9, 0.25, 0.25, 0.0, 8.0), Finding.unexplained),
        (TIE, FAR, 0.0, Band(2, 9, 0.25, 0.5, 0.0, 8.0), Finding.near_tie),
        (TIE, TIE, 0.0, Band(2, 9, 0.25, 0.25, 0.1, 8.0), Finding.unexplained),
        (None, None, 0.0, Band(2, 9, 0.25, 0.25, 0.1, 8.0), Finding.unexplained),
    ],
)
def test_the_finding(
    fork: float | None, wide: float | None, replay: float, band: Band, expected: Finding
) -> None:
    parted = None if fork is None else Fork(3, 1, 2, fork, wide)
    assert finding_of(parted, Replay(3, 2, replay), band) is expected


def test_a_damaged_model_is_unexplained() -> None:
    class Damaged(Scripted):
        def logits(self, token_BW: Tensor, feed: Feed, cache: RaggedCache, last_only: bool) -> Tensor:
            return super().logits(token_BW, feed, cache, last_only) * torch.nan

    report = check_greedy(Damaged(), [Prompt("a", (0,))], [[1, 2]], [[1, 2]], 1, positions=20)
    assert report.verdict is Finding.unexplained


@pytest.mark.slow
def test_fp32_has_a_narrow_band() -> None:
    target, _, wide = pair("llama-gqa", True, torch.float32)
    texts = [list(prompt.token_ids) for prompt in prompts()]
    starts = [2] * len(texts)
    single = noise_band(target, texts, starts, K + 1, wide=wide, positions=100)
    long = [text * 3 for text in texts]
    narrow = pair("llama-gqa", True, torch.bfloat16)[0]
    low = noise_band(narrow, long, starts, K + 1, wide=wide, positions=100)
    assert 0 < single.epsilon < 1e-4 < 1e-2 < low.epsilon and low.sound
    assert noise_band(target, texts, starts, 1, positions=100, rows=1).epsilon == 0


@pytest.mark.parametrize(
    "one, other, expected",
    [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [1], 0)],
)
def test_first_difference(one: Any, other: Any, expected: int | None) -> None:
    assert first_difference(one, other) == expected
