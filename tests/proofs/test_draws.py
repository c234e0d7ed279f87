"""The source of randomness: what it draws, what a draw depends on, and that no random number has two uses.

Enumerated: where each number of a run stands in Philox's counters (the key is seed and prompt), for every
draft, coin and clock up to the greatest K and 300,000 tokens: all places differ, whatever was asked before.
So draws of different keys are independent, which the walked proofs take for granted. Compared besides, by
G-tests and binomial tests at a false-alarm rate of 1e-9 with fixed seeds: tokens and coins with their
distributions, and texts of real draws with the target's. Controls: a distribution 0.03 away is rejected
(power above 0.999), and mutants.py lets coins read the drafts' numbers, and races those of coins.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy import stats

from llama_ssp.config.schema import MAX_K
from llama_ssp.speculative import rng
from llama_ssp.speculative.rng import CounterDraws, Purpose, Slot, heat, inverse_cdf, prompt_key, race
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES, RoundDraws
from tests.proofs import scenarios
from tests.proofs.toy import toy
from tests.rig import drive_refilled, engine_of

FALSE_ALARM, DRAWS = 1e-9, 60_000


def g_test(counts: np.ndarray, probs: np.ndarray) -> float:
    """The p-value of a G-test; tokens of probability 0 must not occur."""
    assert not counts[probs == 0].any()
    seen = probs > 0
    due = probs[seen] * counts.sum()
    return float(stats.power_divergence(counts[seen], due, lambda_="log-likelihood")[1])


def coins(source: Any, chance_BN: torch.Tensor, slot: Slot) -> torch.Tensor:
    rows, count = chance_BN.shape
    return source.round(_coins, None, slot, torch.ones(rows, count + 1, 1), chance_BN)


def _coins(_rule: None, draws: RoundDraws, _probs: torch.Tensor, chance_BN: torch.Tensor) -> torch.Tensor:
    return draws.bernoulli(chance_BN)


def _correction(_rule: None, draws: RoundDraws, probs_BWV: torch.Tensor) -> torch.Tensor:
    return draws.categorical(probs_BWV[:, 0])


def draws_of(probs: torch.Tensor, purpose: Purpose = Purpose.CORRECT) -> np.ndarray:
    """Counts over many positions of one text, as a run would make them."""
    source, rows = CounterDraws(0), 200
    counts = np.zeros(len(probs), dtype=int)
    for first in range(0, DRAWS, rows):
        slot = Slot((7,) * rows, tuple(range(first, first + rows)), purpose)
        counts += np.bincount(source.categorical(probs.expand(rows, -1), slot).numpy(), minlength=len(probs))
    return counts


def random_probs(seed: int, size: int = 27) -> torch.Tensor:
    probs = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2
    probs[::9] = 0
    return probs / probs.sum()


@pytest.mark.few(1)
@pytest.mark.parametrize("purpose", list(Purpose))
def test_categorical_draws_its_distribution(purpose):
    probs = random_probs(0)
    assert g_test(draws_of(probs, purpose), probs.numpy()) > FALSE_ALARM


@pytest.mark.slow
def test_a_distribution_3_percent_away_is_rejected():
    """With a probability above 0.999 whatever the seed, by the test's power; and with this one."""
    probs = random_probs(0)
    moved = probs.clone()
    moved[1] += 0.03
    moved[probs.argmax()] -= 0.03
    seen = probs > 0
    noncentrality = DRAWS * float(((moved - probs)[seen] ** 2 / probs[seen]).sum())
    freedom = int(seen.sum()) - 1
    assert stats.ncx2.sf(stats.chi2.isf(FALSE_ALARM, freedom), freedom, noncentrality) > 0.999
    assert g_test(draws_of(moved), probs.numpy()) < FALSE_ALARM


@pytest.mark.few(1)
@pytest.mark.parametrize("chance", [0.02, 0.5, 0.97])
def test_bernoulli_passes_at_its_chance(chance):
    source, passed = CounterDraws(1), 0
    for base in range(DRAWS // 8):
        passed += int(coins(source, torch.full((1, 8), chance), Slot((3,), (base,), Purpose.ACCEPT)).sum())
    other = chance * 0.97 if chance > 0.5 else chance + 0.03  # control
    right, wrong = (stats.binomtest(passed, DRAWS // 8 * 8, p).pvalue for p in (chance, other))
    assert wrong < FALSE_ALARM < right


@pytest.fixture(scope="module", params=[1, 2, 5, 9, 10], ids="vocabulary of {}".format)
def raced(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns probabilities, every third of them zero, and the tokens' shares of 200,000 races, (V,) each."""
    vocab = request.param
    probs = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab)) + 0.05
    probs[1::3] = -0.0
    probs /= probs.sum()
    uniform = torch.rand(200_000, 2 * heat(vocab), generator=torch.Generator().manual_seed(1)).double()
    token = race(probs.expand(200_000, vocab), -uniform.log())
    return probs, torch.bincount(token, minlength=vocab) / 200_000


def test_a_race_has_its_distribution(raced: tuple[torch.Tensor, torch.Tensor]):
    probs, shares = raced
    assert float((shares - probs).abs().max()) < 0.006


def test_a_race_never_ends_with_the_impossible(raced: tuple[torch.Tensor, torch.Tensor]):
    probs, shares = raced
    assert (shares[probs == 0] == 0).all()


def test_prompts_of_one_length_have_numbers_of_their_own():
    """A batch of one row shows one source a prompt after the other, often at equal lengths."""
    probs, chance = torch.full((1, 27), 1 / 27), torch.full((1, 8), 0.5)
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.CORRECT):
        slots, shared = [Slot((key,), (9,), purpose) for key in range(40)], CounterDraws(1)
        tokens = [int(shared.categorical(probs, slot)) for slot in slots]
        tossed = [coins(shared, chance, slot).tolist() for slot in slots]
        assert tokens == [int(CounterDraws(1).categorical(probs, slot)) for slot in slots], purpose
        assert tossed == [coins(CounterDraws(1), chance, slot).tolist() for slot in slots], purpose
        assert len(set(tokens)) > 10 and len(set(map(str, tossed))) > 10, purpose


def test_a_draw_depends_on_its_key_alone():
    """Whatever was drawn before, in whichever batch, however many at a time."""
    probs = random_probs(3)
    slots = [Slot((key,), (5,), Purpose.DRAFT, 2) for key in range(6)]
    alone = [int(CounterDraws(9).categorical(probs[None], slot)) for slot in slots]
    source = CounterDraws(9)
    coins(source, torch.rand(6, 40), Slot(tuple(range(6)), (5,) * 6, Purpose.ACCEPT))
    together = source.categorical(probs.expand(6, -1), Slot(tuple(range(6)), (5,) * 6, Purpose.DRAFT, 2))
    assert together.tolist() == alone
    assert len(set(alone)) > 1
    assert prompt_key("a") != prompt_key("b")


def test_a_prompt_s_key_uses_all_of_its_64_bits():
    """With 32 bits, two of 100,000 prompts would share their random numbers with probability 0.7."""
    keys = [prompt_key(f"record {number}") for number in range(100)]
    always = never = 2**64 - 1
    for key in keys:
        always, never = always & key, never & ~key
    assert (always, never) == (0, 0)


@pytest.mark.parametrize("seed", [0, 1], ids=lambda seed: f"seed {seed}")
def test_a_prompt_s_own_seed_stands_for_the_run_s(seed: int):
    """Also where it is 0: such a text would not be written again by another run."""
    probs, slot = torch.full((1, 1000), 1e-3), Slot((7,), (5,), Purpose.DRAFT)
    own, of_run, other = (
        int(source.categorical(probs, slot))
        for source in (CounterDraws(9, own={7: seed}), CounterDraws(seed), CounterDraws(9))
    )
    assert own == of_run != other


def test_no_uniform_reaches_a_token_of_probability_zero_or_none():
    """Many sizes, with zeros everywhere and vanishing shares among them, at both ends and on every edge."""
    generator = torch.Generator().manual_seed(4)
    ends = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-52, 1 - 2.0**-53], dtype=torch.float64)
    for size in (1, 2, 33, 1000):
        for dtype in (torch.float32, torch.float64):
            probs = torch.rand(len(ends), size, generator=generator, dtype=dtype) ** 40
            probs[:, torch.rand(size, generator=generator) < 0.5] = 0
            probs[:, size // 2] += 1e-38
            token = inverse_cdf(probs, ends[:, None])
            assert (probs.gather(1, token[:, None]) > 0).all(), (size, dtype)
    edges = torch.tensor([[0.0], [0.25], [0.5], [1 - 2.0**-53]], dtype=torch.float64)
    token = inverse_cdf(torch.tensor([[0, 0.25, 0, 0.25, 0.5, 0]]).expand(4, -1), edges)
    assert token.tolist() == [1, 3, 4, 4]
    # What is no distribution gives some token: its row ends with an error, the rows next to it go on.
    probs = torch.tensor([[0.5, 0.5, 0.0], [torch.nan] * 3])
    token = inverse_cdf(probs, torch.tensor([[0.6], [0.6]], dtype=torch.float64))
    assert token[0] == 1 and 0 <= token[1] < 3


@pytest.mark.parametrize(("raw", "uniform"), [(0, 0.0), (2**63, 0.5), (2**64 - 1, 1 - 2.0**-53)])
def test_a_uniform_that_equals_the_chance_does_not_pass(raw, uniform):
    """So not even a uniform of 0 accepts what the target cannot produce; a chance of 1 always passes."""
    chance_BK = torch.tensor([[uniform, uniform + 2.0**-53]], dtype=torch.float64)
    always = SimpleNamespace(random_raw=lambda count: np.full(count, raw, np.uint64))
    with patch.object(np.random, "Philox", lambda **_: always):
        passed = coins(CounterDraws(0), chance_BK, Slot((0,), (0,), Purpose.ACCEPT))
    assert passed.tolist() == [[False, True]]


# No random number has two uses. A number is known by where it stands: Philox's key, counter and lane.
SEEDS, KEYS = (0, 1, 2**63, 2**64 - 1), (0, 1, 2**63 + 1, 2**64 - 1)  # floats would cut some of them
TEXTS = [(key, base) for key in KEYS for base in (0, 1, 2, 3, 4, 2**20, 2**32)]
KS, VOCABS = (1, 33, MAX_K), (1, 2, 5, 600, 300_000)
STREAMS = {Purpose.DRAFT: rng.ROUNDS, Purpose.ACCEPT: rng.ROUNDS, Purpose.CORRECT: rng.RACES}


class Place(NamedTuple):
    """Where a number stands: the whole counter as one integer, its first word the lowest."""

    key: tuple[int, ...]
    counter: int
    lane: int


class Use(NamedTuple):
    """What a number is for; `index` counts drafts, coins, or a race's clocks."""

    purpose: Purpose
    seed: int
    key: int
    base: int
    index: int


class Addresses:
    """In the place of numpy's Philox: each number says where it stands, and still does as a float."""

    def __init__(self) -> None:
        self._tags: dict[Place, int] = {}

    def __call__(self, key: Any, counter: Any) -> Any:
        start = sum(int(word) << 64 * place for place, word in enumerate(counter))
        words = tuple(int(word) for word in key)

        def random_raw(count: int) -> np.ndarray:
            where = [Place(words, start + 1 + n // 4, n % 4) for n in range(count)]
            tags = [self._tags.setdefault(place, len(self._tags)) for place in where]
            return (np.array(tags, dtype=np.uint64) << np.uint64(32)) | np.uint64(2**31)

        return SimpleNamespace(random_raw=random_raw)

    def of(self, uniform: np.ndarray) -> list[Place]:
        """Where uniforms stand, in the order in which they were made."""
        places = list(self._tags)
        return [places[int(one * 2**32)] for one in uniform.ravel()]


def uniforms_behind(source: Any, slot: Slot, count: int) -> np.ndarray:
    """The uniforms of `count` draws, to the last bit: the largest chance that does not pass."""
    low_BN = torch.zeros(len(slot.keys), count, dtype=torch.float64)
    for bit in range(1, 54):
        mark_BN = low_BN + 2.0**-bit
        if slot.purpose is Purpose.ACCEPT:
            passed_BN = coins(source, mark_BN, slot)
        else:
            pairs = torch.stack([mark_BN, 1 - mark_BN], -1).unbind(1)
            slots = [replace(slot, offset=slot.offset + n) for n in range(count)]
            drawn = [source.categorical(*given) for given in zip(pairs, slots, strict=True)]
            passed_BN = torch.stack(drawn, 1) == 0
        low_BN = torch.where(passed_BN, low_BN, mark_BN)
    return low_BN.numpy()


def clocks_behind(source: Any, slot: Slot, vocab: int) -> np.ndarray:
    found: list[torch.Tensor] = []

    def noted(probs_BV: torch.Tensor, clock_BN: torch.Tensor) -> torch.Tensor:
        found.append(clock_BN)
        return torch.zeros(len(probs_BV), dtype=torch.int64)

    with patch.object(rng, "race", noted):
        source.round(_correction, None, slot, torch.ones(1).expand(len(slot.keys), 1, vocab))
    assert found, "a correction is no race"
    return found[0][:, : 2 * heat(vocab)].numpy()


def read(source: CounterDraws, ks: Iterable[int], vocabs: Iterable[int]) -> Iterator[tuple[Use, float]]:
    """Every number that rounds of all texts read, as a uniform number, found by what is drawn."""
    keys, bases = (tuple(of) for of in zip(*TEXTS, strict=True))
    parts: list[tuple[Purpose, np.ndarray]] = []
    for k in ks:
        for purpose in set(Purpose) - {Purpose.CORRECT}:
            parts.append((purpose, uniforms_behind(source, Slot(keys, bases, purpose), k)))
    for vocab in vocabs:
        clocks = clocks_behind(source, Slot(keys, bases, Purpose.CORRECT), vocab)
        parts.append((Purpose.CORRECT, np.exp(-clocks)))
    for purpose, found_BN in parts:
        for (key, base), row in zip(TEXTS, found_BN, strict=True):
            yield from ((Use(purpose, source.seed, key, base, index), one) for index, one in enumerate(row))


def test_numpy_counts_as_the_proof_takes_for_granted():
    """Number n of a counter is lane n % 4 of the block 1 + n // 4 further on."""
    key, start = np.array([3, 2**64 - 1], dtype=np.uint64), [0, 0, 2, 7]
    row = np.random.Philox(key=key, counter=start).random_raw(23)
    for n, number in enumerate(row):
        block = np.random.Philox(key=key, counter=[n // 4, *start[1:]]).random_raw(4)
        assert block[n % 4] == number


def test_no_number_has_two_uses():
    """Every draft, coin and clock of every seed, prompt and length stands somewhere of its own.

    Whatever was asked for before, and however much at a time. Enumerated up to the greatest K and more tokens
    than any vocabulary has; for all seeds, prompts and lengths beyond those tried it follows from the layout:
    the key is (seed, prompt), and of the counter's four words the last is the length and the third the
    stream, so what is left to tell apart is a text's own numbers at one length.
    """
    where: dict[Use, Place] = {}
    addresses = Addresses()
    with patch.object(np.random, "Philox", addresses):
        for seed in SEEDS:
            orders = [(KS, VOCABS), (KS[::-1], VOCABS[::-1])] if seed == SEEDS[0] else [(KS, VOCABS[:3])]
            for ks, vocabs in orders:
                found = list(read(CounterDraws(seed), ks, vocabs))
                uniform = np.array([one for _, one in found])
                for (use, _), place in zip(found, addresses.of(uniform), strict=True):
                    assert where.setdefault(use, place) == place
    assert len(set(where.values())) == len(where) > 45_000
    inner = defaultdict(set)
    for use, place in where.items():
        assert place.key == (use.seed, use.key) and place.counter >> 192 == use.base
        assert place.counter >> 128 & 2**64 - 1 == STREAMS[use.purpose]
        inner[use.purpose, use.index].add((place.counter & 2**128 - 1, place.lane))
    assert rng.ROUNDS != rng.RACES
    assert all(len(places) == 1 for places in inner.values())


class Noted:
    """Draws that note every number that is asked for, and how often."""

    def __init__(self, source: CounterDraws) -> None:
        self.own, self._source = source.own, source
        self.uniforms, self.clocks = Counter[float](), Counter[float]()

    def round(self, decide: Any, rule: Any, slot: Slot, probs_BWV: torch.Tensor, *given: Any) -> torch.Tensor:
        _, width, vocab = probs_BWV.shape
        self.uniforms.update(uniforms_behind(self._source, slot, width - 1).ravel().tolist())
        self.clocks.update(clocks_behind(self._source, slot, vocab).ravel().tolist())
        return self._source.round(decide, rule, slot, probs_BWV, *given)

    def categorical(self, probs_BV: torch.Tensor, slot: Slot) -> torch.Tensor:
        self.uniforms.update(uniforms_behind(self._source, slot, 1).ravel().tolist())
        return self._source.categorical(probs_BV, slot)


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", RULES)
def test_a_run_asks_for_no_number_twice(rule):
    """Of one row after the other, round for round: every coin, draft and clock has a number of its own."""
    noted = Noted(CounterDraws(3))
    engine = engine_of(toy(12, 0), toy(12, 1), rule, draws=noted, chunk=8)
    prompts = [Prompt(str(n), tuple(range(1, 2 + n % 3))) for n in range(6)]
    texts = drive_refilled(engine, prompts, 1, k=5, longest=60, max_new=30)
    assert [len(text) for text in texts.values()] == [30] * 6
    assert len(noted.uniforms) > 200 and set(noted.uniforms.values()) == {1}
    assert len(noted.clocks) > 400 and set(noted.clocks.values()) == {1}


@pytest.mark.parametrize("rule", RULES)
def test_texts_have_the_targets_distribution(rule):
    """Texts of 2000 prompts by real draws, three tokens of three with drafts of two, by a G-test."""
    text = scenarios.Scenario(draft=3)
    many = replace(text, prompts=text.prompts * 2000, rule=rule)
    target, draft = scenarios.models(text)
    with torch.inference_mode():
        found = Counter(scenarios.play(many, target, draft, CounterDraws(5)))
    probs = {texts[0]: share for texts, share in scenarios.expected(text, target.module).items()}
    assert found.keys() <= probs.keys()
    counts = np.array([found[text] for text in probs])
    assert g_test(counts, np.array(list(probs.values()))) > FALSE_ALARM
