"""Greedy, fp32: every text equals the one transformers' generate writes, token for token.

References are written one prompt at a time, without padding, by a module of their own. Prompts whose
reference runs through a near tie (top two logits closer than NEAR) are not used: there rounding may
decide, and tests/test_numerics.py has the rule for that.
"""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from tests.families import FAMILIES, VOCAB, WINDOW, build, greedy_text, model_of, runnable
from tests.rig import GREEDY, Queue, Run, contrary, engine_of, perturbed, speculate, steps_of

EVERY = tuple(FAMILIES)
LENGTHS = (9, 2, 21, 1, 30, 13, 5, 26)
NEW, NEAR, VARIED = 24, 1e-3, 8
KS, ROWS, DRAFTS = (0, 1, 2, 4, 8, 16), (1, 3, 8), ("always", "sometimes", "never", "ngram")
RULES, CHUNKS, ENDS = ("token", "block"), (1, 4, 512), ("none", "early", "late")
TIGHT = 48  # a context that the texts reach
assert NEW > 2 * WINDOW


@dataclass(frozen=True)
class Case:
    k: int
    rows: int
    draft: str
    rule: str
    chunk: int
    end: str


def module(family: str, context: int | None) -> Any:
    return build(family, **({} if context is None else {"max_position_embeddings": context}))


@cache
def plain(family: str, context: int | None = None) -> Any:
    own = module(family, context)
    own.generation_config.eos_token_id = None
    return own


@cache
def model(family: str, draft: str = "always", context: int | None = None) -> Any:
    """The target, which is also the draft that always agrees; or another draft."""
    if draft == "ngram":
        return draft
    own = module(family, context)
    found = runnable(perturbed(own, 0.02) if draft == "sometimes" else own, family)
    return contrary(found) if draft == "never" else found


@cache
def reference(
    family: str, ids: tuple[int, ...], new: int = NEW, end: int | None = None, context: int | None = None
) -> tuple[int, ...]:
    """What transformers writes for one prompt alone, up to the end token."""
    if end is None:
        return tuple(greedy_text(plain(family, context), ids, new))
    text = reference(family, ids, new, None, context)
    return text[: text.index(end) + 1] if end in text else text


def test_transformers_itself_ends_where_the_reference_is_cut() -> None:
    family, ids = "llama-gqa", (3, 1, 4)
    free = reference(family, ids)
    end = free[len(free) // 2]
    cut = reference(family, ids, end=end)
    assert tuple(greedy_text(plain(family), ids, NEW, end)) == cut != free


def clear(family: str, ids: tuple[int, ...], new: int, context: int | None) -> bool:
    """Whether no choice along the reference is a near tie."""
    text = torch.tensor([ids + reference(family, ids, new, None, context)])
    with torch.inference_mode():
        top = plain(family, context)(text).logits[0, len(ids) - 1 : -1].topk(2).values
    return bool((top[:, 0] - top[:, 1]).min() > NEAR)


@cache
def prompt(family: str, number: int, new: int = NEW, context: int | None = None) -> Prompt:
    """A prompt whose reference varies and holds no near tie."""
    generator = torch.Generator().manual_seed(number)
    length = LENGTHS[number]
    new = new if context is None else min(new, context - length)
    for _ in range(9):
        ids = tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())
        varied = len(set(reference(family, ids, new, None, context))) >= min(VARIED, new)
        if varied and clear(family, ids, new, context):
            return Prompt(f"p{number}", ids)
    raise AssertionError(f"{family} writes texts too plain to test with")


def prompts(family: str, rows: int, new: int = NEW, context: int | None = None) -> list[Prompt]:
    return [prompt(family, number, new, context) for number in range(rows)]


def end_of(family: str, end: str) -> int | None:
    """A token that the first prompt's reference writes early, or first writes late."""
    text = reference(family, prompt(family, 0).token_ids)
    fresh = [token for i, token in enumerate(text) if token not in text[:i]]
    return {"none": None, "early": fresh[2], "late": fresh[-1]}[end]


def compared(
    family: str, draft: str, rows: int, k: int, *, new: int = NEW, end: int | None = None,
    context: int | None = None, drafter: Any = None, **how: Any,
) -> Run:  # fmt: skip
    batch = prompts(family, rows, new, context)
    ends = frozenset() if end is None else frozenset({end})
    target = model(family, "always", context)  # which drafts, too, where a draft is to agree always
    run = speculate(
        target, batch, drafter or model(family, draft, context), k=k, max_new=new, ends=ends, **how
    )
    room = [new if context is None else context - len(p.token_ids) for p in batch]
    expected = [
        list(reference(family, p.token_ids, most, end, context)) for p, most in zip(batch, room, strict=True)
    ]
    assert run.texts == expected and (end is not None or len(set(map(tuple, expected))) == rows)
    full = "length" if context is None else "context"
    assert run.finish == ["eos" if text[-1] == end else full for text in expected]
    return run


def check(family: str, case: Case) -> None:
    how: dict[str, Any] = {"rule": case.rule, "chunk": case.chunk, "end": end_of(family, case.end)}
    run = compared(family, case.draft, case.rows, case.k, **how)
    lengths = list(map(len, run.texts))
    if case.k == 0:
        assert run.drafted == 0 and run.rounds == max(lengths)
    elif case.draft == "always":
        assert run.accepted == run.drafted > 0
        assert run.rounds == max(-(-length // (case.k + 1)) for length in lengths)
    elif case.draft == "never":
        assert run.drafted > 0 == run.accepted
    if case.k and case.draft != "ngram" and case.end != "early":
        assert max(run.longest) == case.k


FULL = [
    Case(k, rows, draft, RULES[i % 2], CHUNKS[i % 3], ENDS[(i // 3) % 3])
    for i, (k, rows, draft) in enumerate(itertools.product(KS, ROWS, DRAFTS))
]


@pytest.mark.few(9)
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_matrix(case: Case) -> None:
    """K x rows x kind of draft in full; the other choices turn along."""
    check("llama-gqa", case)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in EVERY if name != "llama-gqa"])
def test_a_part_of_the_matrix(family: str) -> None:
    """Checks a case that all families have, and an eleventh of those of up to three rows, another in each."""
    some = [case for case in FULL if case.rows <= 3][EVERY.index(family) % 11 :: 11]
    for case in [Case(4, 3, "sometimes", "block", 4, "late"), *some]:
        try:
            check(family, case)
        except AssertionError as error:
            raise AssertionError(f"{family} {case}") from error


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gpt_neo"])
def test_the_perturbed_draft_agrees_sometimes(family: str) -> None:
    run = compared(family, "sometimes", 8, 4)
    assert 0.1 * run.drafted < run.accepted < 0.95 * run.drafted


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "draft"),
    [
        (family, draft)
        for number, family in enumerate(EVERY)
        for place, draft in enumerate(("always", "never", "ngram", "sometimes"))
        if number % 3 == place or family in ("llama-gqa", "opt")  # opt has a table of positions
    ],
)
def test_the_context_ends_in_every_family(family: str, draft: str) -> None:
    """Texts that fill the context: the last token stands at its last position."""
    assert model(family, "always", TIGHT).context == TIGHT
    compared(family, draft, 3, 4 if draft == "sometimes" else 8, new=2 * TIGHT, context=TIGHT, chunk=8)


@pytest.mark.parametrize("k", [1, 4, 16])
def test_a_draft_whose_context_is_shorter_stops_drafting(k: int) -> None:
    """Behind the draft's context the target goes on alone, with the same text."""
    short = runnable(build("llama-gqa", max_position_embeddings=28), "short")
    run = compared("llama-gqa", "", 8, k, drafter=short, chunk=8)
    assert 0 < run.accepted == run.drafted


@pytest.mark.parametrize("rows", [1, 3, 8], ids=["refilled", "both ways", "in one batch"])
def test_a_prompt_longer_than_the_draft_s_context_is_continued_without_drafts(rows: int) -> None:
    """Neither where a batch begins nor where a row is refilled; shorter prompts get drafts as usual.

    The draft is a decoder of our own: its cache has as many places as its context, and no more.
    """
    short = model_of("llama-gqa", max_position_embeddings=16)
    batch = prompts("llama-gqa", 8)
    are_long = [len(prompt.token_ids) > short.context for prompt in batch]
    engine = engine_of(model("llama-gqa"), short, sampling=GREEDY, chunk=8)
    queue = Queue(batch[rows:])

    _, steps = steps_of(engine, batch[:rows], NEW, 4, queue=queue, longest=max(LENGTHS) + NEW)

    for prompt in batch:
        assert tuple(queue.texts[prompt.id]) == reference("llama-gqa", prompt.token_ids), prompt.id
    assert sum(are_long) >= 3 and not all(are_long)
    assert max(len(row.drafted) for step in steps for row in step.rows) == 4


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "draft"),
    [
        ("mistral-window", "ngram"),
        ("qwen2-window", "sometimes"),
        ("gemma2", "always"),
        ("gpt_neo", "sometimes"),
    ],
)
def test_texts_far_past_the_window(family: str, draft: str) -> None:
    compared(family, draft, 3, 16, new=8 * WINDOW, chunk=WINDOW + 2)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma2", "gpt_neo", "gpt_neox"])
def test_cached_logits_equal_plain_ones(family: str) -> None:
    """Ragged rows, fed in pieces, rolled back and fed other tokens, against a plain pass of each text."""
    tolerance = 1e-11 if family == "gpt_neox" else 1e-5  # others keep fp32's digits in norms and softmax
    target = build(family, dtype=torch.float64)
    text_BS, wrong_BS = torch.randint(0, VOCAB, (2, 4, 50), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected_BSV = torch.stack([target(text[None]).logits[0] for text in text_BS])
    runner = ModelRunner(runnable(build(family, dtype=torch.float64), family), prefill_chunk=7)
    runner.start(4, 50)
    done, worst, scale = [3, 17, 1, 29], 0.0, float(expected_BSV.abs().max())
    for wanted in ([1, 1, 1, 1], [5, 3, 9, 1], [2, 6, 1, 12], [4, 0, 11, 3], [17, 4, 8, 2]):
        ends = [d + w for d, w in zip(done, wanted, strict=True)]
        fed_BS = torch.where(torch.arange(50) < torch.tensor(done)[:, None], text_BS, wrong_BS)
        runner.logits(fed_BS, ends, wanted)  # wrong drafts, which must leave no trace
        runner.roll_back([d + 1 for d in done])
        assert runner.cached == done, wanted
        logit_BWV = runner.logits(text_BS, ends, wanted)
        for row, (d, w) in enumerate(zip(done, wanted, strict=True)):
            off = (logit_BWV[row, :w] - expected_BSV[row, d : d + w]).abs()
            worst = max([worst, *off.flatten().tolist()])
        done = ends
    assert scale > 1 and worst <= tolerance * scale, f"off by {worst:.2g} of {scale:.2g}"


@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "gpt_neo", "qwen2-window"])
def test_windows_matter(family: str) -> None:
    """Without its window the family writes other texts: the tests above would notice a lost one."""
    wide = {"window_size": 150} if family == "gpt_neo" else {"sliding_window": 150}
    module = runnable(build(family, **wide), family)
    batch = prompts(family, 3)
    run = speculate(module, batch, None, k=0)
    assert all(text != list(reference(family, p.token_ids)) for text, p in zip(run.texts, batch, strict=True))
