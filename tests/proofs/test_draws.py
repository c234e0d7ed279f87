"""The real source of randomness: its statistics, that a draw depends on its key alone, and that no random
number has two uses.

Each statistical check has a false-alarm rate of 1e-9, a fixed seed, a negative control that must be
rejected, and enough draws to reject a total variation of 0.03 with a probability above 0.999.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy import stats

from llama_ssp.config import SamplingConfig
from llama_ssp.config.schema import MAX_K
from llama_ssp.speculative import rng as draws
from llama_ssp.speculative.drafters.local import ModelDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws, Purpose, Slot, heat, inverse_cdf, prompt_key, race
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES
from tests.proofs import scenarios as trees
from tests.proofs.toy import toy
from tests.rig import drive_refilled

FALSE_ALARM = 1e-9
CPU = torch.device("cpu")
DRAWS = 60_000


def g_test(counts: np.ndarray, probs: np.ndarray) -> float:
    """The p-value of a G-test; tokens of probability 0 must not occur."""
    assert not counts[probs == 0].any()
    seen = probs > 0
    return float(
        stats.power_divergence(counts[seen], probs[seen] * counts.sum(), lambda_="log-likelihood")[1]
    )


def test_a_race_has_its_law_and_never_ends_with_the_impossible():
    for vocab in (1, 2, 5, 9, 10):
        probs = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab)) + 0.05
        probs[1::3] = -0.0
        probs /= probs.sum()
        noise = (
            -torch.rand(200_000, 2 * heat(vocab), generator=torch.Generator().manual_seed(1)).double().log()
        )
        found = torch.bincount(race(probs.expand(200_000, vocab), noise), minlength=vocab) / 200_000
        assert (found[probs == 0] == 0).all() and float((found - probs).abs().max()) < 0.006


def draws_of(probs: torch.Tensor, purpose: Purpose = Purpose.CORRECT, seed: int = 0) -> np.ndarray:
    """Counts over many positions of one text, as a run would make them."""
    source, rows = CounterDraws(seed), 200
    counts = np.zeros(len(probs), dtype=int)
    for first in range(0, DRAWS, rows):
        slot = Slot((7,) * rows, tuple(range(first, first + rows)), purpose)
        counts += np.bincount(source.categorical(probs.expand(rows, -1), slot).numpy(), minlength=len(probs))
    return counts


def power(probs: np.ndarray, other: np.ndarray) -> float:
    """The probability that the G-test rejects `law` when `other` is drawn from."""
    seen = probs > 0
    noncentrality = DRAWS * float(((other - probs)[seen] ** 2 / probs[seen]).sum())
    freedom = int(seen.sum()) - 1
    return float(stats.ncx2.sf(stats.chi2.isf(FALSE_ALARM, freedom), freedom, noncentrality))


def random_law(seed: int, size: int = 27) -> torch.Tensor:
    probs = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2
    probs[::9] = 0
    return probs / probs.sum()


@pytest.mark.few(1)
@pytest.mark.parametrize("purpose", list(Purpose))
def test_categorical_draws_its_law(purpose):
    probs = random_law(0)
    assert g_test(draws_of(probs, purpose), probs.numpy()) > FALSE_ALARM


@pytest.mark.slow
def test_a_law_3_percent_away_is_rejected():
    probs = random_law(0)
    moved = probs.clone()
    moved[1] += 0.03
    moved[probs.argmax()] -= 0.03
    assert power(probs.numpy(), moved.numpy()) > 0.999
    assert g_test(draws_of(moved), probs.numpy()) < FALSE_ALARM


@pytest.mark.few(1)
@pytest.mark.parametrize("chance", [0.02, 0.5, 0.97])
def test_bernoulli_passes_at_its_chance(chance):
    source, passed = CounterDraws(1), 0
    for base in range(DRAWS // 8):
        passed += int(source.bernoulli(torch.full((1, 8), chance), Slot((3,), (base,), Purpose.ACCEPT)).sum())
    assert stats.binomtest(passed, DRAWS // 8 * 8, chance).pvalue > FALSE_ALARM
    assert (
        stats.binomtest(passed, DRAWS // 8 * 8, chance * 0.97 if chance > 0.5 else chance + 0.03).pvalue
        < FALSE_ALARM
    )


@pytest.mark.slow
def test_draws_with_different_keys_are_independent():
    """Accept and correct of one position, neighbouring positions, and equal positions of two prompts."""
    source, half = CounterDraws(2), torch.tensor([[0.5, 0.5]])
    pairs = {"purpose": [], "base": [], "prompt": []}
    for base in range(4000):

        def bit(key: int, at: int, purpose: Purpose) -> int:
            return int(source.categorical(half, Slot((key,), (at,), purpose)))

        here = bit(1, base, Purpose.ACCEPT)
        pairs["purpose"].append((here, bit(1, base, Purpose.CORRECT)))
        pairs["base"].append((here, bit(1, base + 1, Purpose.ACCEPT)))
        pairs["prompt"].append((here, bit(2, base, Purpose.ACCEPT)))
    for both in pairs.values():
        table = np.zeros((2, 2))
        np.add.at(table, tuple(np.array(both).T), 1)
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_prompts_of_one_length_have_numbers_of_their_own():
    """A batch of one row shows one source a prompt after the other, often at equal lengths."""
    probs, chance = torch.full((1, 27), 1 / 27), torch.full((1, 8), 0.5)
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.CORRECT):
        slots, shared = [Slot((key,), (9,), purpose) for key in range(40)], CounterDraws(1)
        tokens = [int(shared.categorical(probs, slot)) for slot in slots]
        coins = [shared.bernoulli(chance, slot).tolist() for slot in slots]
        assert tokens == [int(CounterDraws(1).categorical(probs, slot)) for slot in slots]
        assert coins == [CounterDraws(1).bernoulli(chance, slot).tolist() for slot in slots]
        assert len(set(tokens)) > 10 and len(set(map(str, coins))) > 10


def test_a_draw_depends_on_its_key_alone():
    """Whatever was drawn before, in whichever batch, however many at a time."""
    probs = random_law(3)
    alone = [
        int(CounterDraws(9).categorical(probs[None], Slot((k,), (5,), Purpose.DRAFT, 2))) for k in range(6)
    ]
    source = CounterDraws(9)
    source.bernoulli(torch.rand(6, 40), Slot(tuple(range(6)), (5,) * 6, Purpose.ACCEPT))
    together = source.categorical(probs.expand(6, -1), Slot(tuple(range(6)), (5,) * 6, Purpose.DRAFT, 2))
    assert together.tolist() == alone
    assert len(set(alone)) > 1
    assert prompt_key("a") != prompt_key("b")


def test_no_uniform_reaches_a_token_of_probability_zero_or_none():
    """Laws of many sizes with zeros everywhere, vanishing shares among them, at both ends of the uniforms."""
    generator = torch.Generator().manual_seed(4)
    ends = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-52, 1 - 2.0**-53], dtype=torch.float64)
    for size in (1, 2, 33, 1000):
        for dtype in (torch.float32, torch.float64):
            probs = torch.rand(len(ends), size, generator=generator, dtype=dtype) ** 40
            probs[:, torch.rand(size, generator=generator) < 0.5] = 0
            probs[:, size // 2] += 1e-38
            token = inverse_cdf(probs, ends[:, None])
            assert (probs.gather(1, token[:, None]) > 0).all()


def test_what_is_no_law_gives_some_token():
    """Its row ends with an error; the rows beside it go on."""
    probs = torch.tensor([[0.5, 0.5, 0.0], [torch.nan] * 3])
    token = inverse_cdf(probs, torch.tensor([[0.6], [0.6]], dtype=torch.float64))
    assert token[0] == 1 and 0 <= token[1] < 3


def test_a_chance_of_one_always_passes_and_of_zero_never():
    slot = Slot((1,) * 1000, tuple(range(1000)), Purpose.ACCEPT)
    assert CounterDraws(0).bernoulli(torch.ones(1000, 4), slot).all()
    assert not CounterDraws(0).bernoulli(torch.zeros(1000, 4), slot).any()


def test_every_bit_of_seed_and_prompt_counts():
    """Also beside a number of 64 bits, which numpy would turn into a float with its neighbour."""

    def first(seed: int, key: int) -> float:
        return float(CounterDraws(seed)._uniforms(Slot((key,), (1,), Purpose.DRAFT), 1, CPU))

    seeds, keys = (0, 1, 2**62, 2**62 + 1, 2**63 - 1), (0, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1)
    assert len({first(seed, key) for seed in seeds for key in keys}) == len(seeds) * len(keys)


# No random number has two uses. A number is known by where it stands: Philox's key, counter and lane.
SEEDS = (0, 1, 2**63, 2**64 - 1)
KEYS = (0, 1, 2**32, 2**64 - 1)
BASES = (0, 1, 2, 3, 4, 2**20, 2**32)
TEXTS = [(key, base) for key in KEYS for base in BASES]
KS, VOCABS = (1, 33, MAX_K), (1, 2, 5, 600, 300_000)
WORD = 2**64 - 1


class Place(NamedTuple):
    """Where a number stands: the whole counter as one integer, its first word the lowest."""

    key: tuple[int, ...]
    counter: int
    lane: int


PURPOSES = {
    "draft": Purpose.DRAFT, "coin": Purpose.ACCEPT, "sibling": Purpose.SIBLING,
    "coin of a sibling": Purpose.ACCEPT_SIBLING,
}  # fmt: skip


class Use(NamedTuple):
    """What a number is for; `index` counts drafts, coins, or a race's clocks."""

    kind: str
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
        self._key, self._start = tuple(int(word) for word in key), start
        return self

    def random_raw(self, count: int) -> np.ndarray:
        where = [Place(self._key, self._start + 1 + n // 4, n % 4) for n in range(count)]
        tags = [self._tags.setdefault(place, len(self._tags)) for place in where]
        return (np.array(tags, dtype=np.uint64) << np.uint64(32)) | np.uint64(2**31)

    def of(self, uniform: np.ndarray) -> list[Place]:
        """Where uniforms stand, in the order in which they were made."""
        places = list(self._tags)
        return [places[int(one * 2**32)] for one in uniform.ravel()]


def read(source: CounterDraws, ks: Iterator[int] | tuple, vocabs: Any) -> Iterator[tuple[Use, float]]:
    """Every number that rounds of all texts read, as a uniform number, found by what is drawn."""
    keys, bases = (tuple(of) for of in zip(*TEXTS, strict=True))
    for k in ks:
        for kind, purpose in PURPOSES.items():
            yield from _uses(kind, source.seed, _halved(source, Slot(keys, bases, purpose), k))
    for vocab in vocabs:
        probs_BV = torch.ones(1).expand(len(keys), vocab)
        with _noted(draws, "race") as clocks:
            source.categorical(probs_BV, Slot(keys, bases, Purpose.CORRECT))
        yield from _uses("clock", source.seed, np.exp(-clocks[0][:, : 2 * heat(vocab)]))


def _uses(kind: str, seed: int, found_BN: np.ndarray) -> Iterator[tuple[Use, float]]:
    for (key, base), row in zip(TEXTS, found_BN, strict=True):
        yield from ((Use(kind, seed, key, base, index), one) for index, one in enumerate(row))


def _halved(source: CounterDraws, slot: Slot, count: int) -> np.ndarray:
    """The uniforms behind `count` draws, to the last bit: the largest chance that does not pass."""
    low_BN = torch.zeros(len(slot.keys), count, dtype=torch.float64)
    for bit in range(1, 54):
        mark_BN = low_BN + 2.0**-bit
        if slot.purpose in (Purpose.ACCEPT, Purpose.ACCEPT_SIBLING):
            passed_BN = source.bernoulli(mark_BN, slot)
        else:
            transform = torch.stack([mark_BN, 1 - mark_BN], -1)
            drawn = [
                source.categorical(transform[:, n], Slot(slot.keys, slot.bases, slot.purpose, n))
                for n in range(count)
            ]
            passed_BN = torch.stack(drawn, 1) == 0
        low_BN = torch.where(passed_BN, low_BN, mark_BN)
    return low_BN.numpy()


@contextmanager
def _noted(place: Any, race: str) -> Iterator[list[np.ndarray]]:
    """The noise that a race is given."""
    found: list[np.ndarray] = []

    def noted(probs_BV: torch.Tensor, noise_BN: torch.Tensor) -> torch.Tensor:
        found.append(noise_BN.numpy())
        return torch.zeros(len(probs_BV), dtype=torch.int64)

    with patch.object(place, race, noted):
        yield found


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
    assert len(set(where.values())) == len(where) > 50_000
    streams, inner = defaultdict(set), defaultdict(set)
    for use, place in where.items():
        assert place.key == (use.seed, use.key) and place.counter >> 192 == use.base
        streams[use.kind].add(place.counter >> 128 & WORD)
        inner[use.kind, use.index].add((place.counter & 2**128 - 1, place.lane))
    assert streams == {
        "draft": {draws.ROUNDS}, "coin": {draws.ROUNDS}, "clock": {draws.RACES},
        "sibling": {draws.SIDES}, "coin of a sibling": {draws.SIDES},
    }  # fmt: skip
    assert len({draws.ROUNDS, draws.RACES, draws.SIDES}) == 3
    assert all(len(places) == 1 for places in inner.values())


class Noting:
    """Draws that remember which numbers were asked for, and how often."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.uniforms: Counter[float] = Counter()
        self.clocks: dict[float, set[tuple[int, int]]] = defaultdict(set)

    def _uniforms(self, slot: Slot, count: int, device: torch.device) -> torch.Tensor:
        found: torch.Tensor = super()._uniforms(slot, count, device)
        self.uniforms.update(found.flatten().tolist())
        return found

    def _clocks(self, slot: Slot, count: int, device: torch.device) -> torch.Tensor:
        found: torch.Tensor = super()._clocks(slot, count, device)
        for clock in found[0].tolist():
            self.clocks[clock].add((slot.keys[0], slot.bases[0]))
        return found


def test_a_run_asks_for_no_number_twice():
    """Of one row after the other, round for round: every coin and draft has a number that no other has."""
    for rule in ("token", "block"):
        noted, transform = (
            type("Noted", (Noting, CounterDraws), {})(3),
            SamplingTransform(SamplingConfig(), (), 12),
        )
        drafter = ModelDrafter(ModelRunner(toy(12, 1), 8), transform, noted)
        engine = Engine(ModelRunner(toy(12, 0), 8), drafter, transform, RULES[rule], noted)
        prompts = [Prompt(str(n), tuple(range(1, 2 + n % 3))) for n in range(6)]
        texts = drive_refilled(engine, prompts, 1, k=5, longest=60, max_new=30)
        assert [len(text) for text in texts.values()] == [30] * 6
        assert len(noted.uniforms) > 200 and set(noted.uniforms.values()) == {1}
        assert len(noted.clocks) > 400 and {len(rounds) for rounds in noted.clocks.values()} == {1}


# Texts by real draws: their distribution is the target's, whichever draws share a round.

TEXT = trees.Scenario(draft=3, new=3)  # three tokens of three, drafts of two
TEXTS_DRAWN = 2000


def text_p_value(rule: str) -> float:
    """Of many prompts' texts against the target's law."""
    many = replace(TEXT, prompts=TEXT.prompts * TEXTS_DRAWN, rule=rule)
    target, draft = trees.models(TEXT)
    with torch.inference_mode():
        found = Counter(trees.play(many, target, draft, CounterDraws(5)))
    probs = {texts[0]: share for texts, share in trees.expected(TEXT, target.module).items()}
    assert found.keys() <= probs.keys()
    return g_test(np.array([found[text] for text in probs]), np.array(list(probs.values())))


def shared_by_races(self: CounterDraws, stream: int, slot: Slot, width: int) -> torch.Tensor:
    """Clocks out of the numbers that drafts and coins have."""
    uniform = numbers(self, draws.ROUNDS, slot, width)
    return -(((uniform * 2**52).floor() + 0.5) * 2.0**-52).log() if stream == draws.RACES else uniform


def shared_by_coins(self: CounterDraws, slot: Slot, count: int, device: torch.device) -> torch.Tensor:
    """Every purpose has the drafts' numbers."""
    own = Slot(slot.keys, slot.bases, Purpose.DRAFT, slot.offset)
    return uniforms(self, own, count, device)


uniforms, numbers = CounterDraws._uniforms, CounterDraws._numbers


@pytest.mark.parametrize("rule", ["token", "block"])
def test_texts_have_the_targets_law(rule):
    assert text_p_value(rule) > FALSE_ALARM


@pytest.mark.parametrize(("name", "fault"), [("_numbers", shared_by_races), ("_uniforms", shared_by_coins)])
def test_texts_of_shared_numbers_have_not(name, fault):
    with patch.object(CounterDraws, name, fault):
        assert text_p_value("block") < FALSE_ALARM
