"""Attention of steps on a CPU (kernels/attention.cpp): as exact as torch's; a token's result is its own."""

import pytest
import torch
from torch import Tensor

from llama_ssp.models import attention
from llama_ssp.models.attention import Places, Row, Scores, attend_rows
from llama_ssp.models.kernels import attention as kernel

pytestmark = [pytest.mark.slow, pytest.mark.compiler]
CPU = torch.device("cpu")
CAPACITY = 1200
# First slot, start and tokens of each row: parts and tiles of the kernel begin within the texts.
ROWS = [(0, 1021, 5), (CAPACITY, 0, 1), (2 * CAPACITY, 126, 3), (3 * CAPACITY, 520, 1), (4 * CAPACITY, 61, 5)]
# Of prompts, one of which goes on behind a text. Results of the longest are merged in several turns.
PROMPTS = [(0, 0, 600), (CAPACITY, 500, 90), (2 * CAPACITY, 63, 2), (3 * CAPACITY, 0, 73)]
STEPS = [  # heads of queries and of keys, the size of a head, and rows
    *((heads, 64, ROWS) for heads in ((1, 1), (4, 4), (6, 2), (8, 1), (16, 2), (11, 1))),
    *(((16, 2), size, ROWS) for size in (80, 96, 128, 256, 512, 20)), ((4, 4), 80, ROWS), ((4, 4), 20, ROWS),
    ((16, 2), 128, PROMPTS), ((4, 4), 64, PROMPTS), ((3, 1), 80, PROMPTS), ((20, 1), 20, PROMPTS),
    ((8, 1), 512, PROMPTS),
]  # fmt: skip
KINDS = {
    "plain": (Scores(0.125), False), "window": (Scores(0.125, window=70), False),
    "far window": (Scores(0.2, window=600), False), "softcap": (Scores(0.3, softcap=2.0), False),
    "sinks": (Scores(0.125, window=33), True),
}  # fmt: skip
TOLERANCE = 1e-5  # in fp32, of the largest number
Given = tuple[Tensor, Tensor, Tensor, Scores, Tensor | None]


def inputs(
    heads: tuple[int, int], size: int, rows: list[Row], scores: Scores, sinks: bool
) -> tuple[Places, Given]:
    """Random arguments of `attend`; slots that no token sees are not numbers."""
    torch.manual_seed(sum(heads) + size)
    places = Places.of(rows, CPU)
    query_THD = torch.randn(len(places.slot_T), heads[0], size)
    keys_GND, values_GND = (torch.full((heads[1], 5 * CAPACITY, size), torch.nan) for _ in "kv")
    for tensor in (keys_GND, values_GND):
        for first, start, count in rows:
            tensor[:, first : first + start + count] = torch.randn(heads[1], start + count, size)
    return places, (query_THD, keys_GND, values_GND, scores, torch.randn(heads[0]) if sinks else None)


def in_format(given: Given, dtype: torch.dtype) -> Given:
    query_THD, keys_GND, values_GND, *rest = given
    return query_THD.to(dtype), keys_GND.to(dtype), values_GND.to(dtype), *rest


def only(given: Given, token_T: slice | Tensor) -> Given:
    return given[0][token_T], *given[1:]


@pytest.fixture(autouse=True)
def _inference():
    kernel.operators()
    with torch.inference_mode():
        yield


@pytest.fixture(params=STEPS, ids="{0[0]} heads of {0[1]}".format)
def step(request: pytest.FixtureRequest) -> tuple[tuple[int, int], int, list[Row]]:
    """Returns the heads of queries and of keys, the size of a head, and rows."""
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_torch(step, kind):
    places, given = inputs(*step, *KINDS[kind])
    expected = attend_rows(places, *given)
    assert (kernel.attend(places, *given) - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_results_are_as_exact_as_those_of_torch(step, kind):
    """Torch rounds at the same places."""
    places, given = inputs(*step, *KINDS[kind])
    narrow = in_format(given, torch.bfloat16)
    exact = attend_rows(places, *in_format(narrow, torch.float64))
    off = [float((attend(places, *narrow) - exact).norm()) for attend in (kernel.attend, attend_rows)]
    assert off[0] <= 1.05 * off[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_a_tokens_own(step, kind, dtype):
    """To the bit they are those of a step of the token alone (of a prompt: of the row alone)."""
    rows = step[2]
    places, given = inputs(*step, *KINDS[kind])
    numbers = in_format(given, dtype)
    parts = [(first, start + n, 1) for first, start, count in rows for n in range(count)]
    together, begin = kernel.attend(places, *numbers), 0
    for row in parts if rows is ROWS else rows:
        own = slice(begin, begin := begin + row[2])
        assert torch.equal(kernel.attend(Places.of([row], CPU), *only(numbers, own)), together[own]), row


def test_a_wrong_mask_is_noticed():
    """The control: a token that does not see itself."""
    places, given = inputs((16, 2), 128, PROMPTS, *KINDS["plain"])
    expected = kernel.attend(places, *given)
    places.position_T[-1] -= 1
    assert (kernel.attend(places, *given) - expected).abs().max() > TOLERANCE * expected.abs().max()


def test_a_wrong_value_is_noticed():
    """The control: the tokens of its row alone see it."""
    places, given = inputs((16, 2), 64, ROWS, *KINDS["plain"])
    expected, (first, start, count) = kernel.attend(places, *given), ROWS[0]
    given[2][:, first + start - 20] *= 1.5
    changed_T = (kernel.attend(places, *given) != expected).flatten(1).any(1)
    assert changed_T.nonzero().flatten().tolist() == list(range(count))


def test_prompts_behind_a_text_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's kernel has no groups of heads there is one, with equal results; a window's is kept."""
    places, given = inputs((16, 2), 64, PROMPTS, *KINDS["plain"])
    expected = attend_rows(places, *given)
    assert not places.masks
    monkeypatch.setattr(attention, "_kernel_has_groups", lambda _: False)
    masked = attend_rows(places, *given)
    assert (masked - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert len(places.masks) == 2  # of the rows that start behind a text
    places, given = inputs((16, 2), 64, PROMPTS, *KINDS["window"])
    attend_rows(places, *given)
    assert places.masks
