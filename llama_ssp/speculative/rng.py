"""Makes all randomness: `bernoulli` and `categorical`, keyed by what is drawn, not by when it is drawn.

A draw depends only on (run seed, prompt id, base, purpose, offset). `base` is the length of the text when the
round began. It grows every round, so no key is used twice, although block verification may discard a drafted
token whose value took part in a decision. So a prompt's draws do not depend on its batch, on a restart, or on
the number of ranks. Nor does its text, if its probabilities and its K do not: in fp32, with K fixed or chosen
by `speculation.cost_ratio`. In 16 bit and less, a batch of another size rounds differently, and adaptive K
depends on measured times: the distribution stays the same, the text does not.

No number has two uses. Each comes from Philox (Salmon et al. 2011) with the key (seed, prompt) and a counter
of the words (block, 0, stream, base), four numbers a block. The streams are ROUNDS, with a number for each
offset and purpose, and RACES, with a correction's clocks (tests/proofs/test_draws.py enumerates them).

Tests replace this source by one that walks every branch (tests/proofs/choices.py).
"""

import hashlib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache

import numpy as np
import torch
from torch import Tensor

from llama_ssp.models.passes import sent


class Purpose(IntEnum):
    """Says what a draw decides."""

    DRAFT = 0  # a draft, from the draft's distribution
    ACCEPT = 1  # whether a draft's coin passes
    CORRECT = 2  # the token after the accepted drafts


PURPOSES = len(Purpose)

# Streams: a word of the counter, so that they never meet.
ROUNDS = 0
RACES = 1

PREPARED = 96  # numbers a row that are made at once: enough for 32 drafts
NOTHING = (None, torch.empty(0, 0))


@dataclass(frozen=True)
class Slot:
    """Names one draw per row: the prompts' keys, the texts' lengths, the purpose and the offset.

    A row without a key draws nothing: its numbers are 0.
    """

    keys: tuple[int | None, ...]
    bases: tuple[int, ...]
    purpose: Purpose
    offset: int = 0


Decide = Callable[..., Tensor]  # decides a round, of a rule, `RoundDraws` and tensors


def prompt_key(prompt_id: str) -> int:
    """Returns 64 bits for a prompt id, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class RoundNumbers:
    """Makes one round's `RoundDraws` of its random numbers: a uniform for each draft, and a race's clocks."""

    uniform_BK: Tensor
    clock_BN: Tensor

    def bernoulli(self, chance_BK: Tensor) -> Tensor:
        # Strictly, as a uniform is in [0, 1): a chance of 0 never passes, a chance of 1 always does.
        return self.uniform_BK < chance_BK

    def categorical(self, probs_BV: Tensor) -> Tensor:
        return race(probs_BV, self.clock_BN)


@cache
def _by_numbers(decide: Decide, rule: Hashable) -> Callable[..., Tensor]:
    """Returns `decide` as a function of tensors, one function a rule: graphs are kept by function."""

    def by_numbers(uniform_BK: Tensor, clock_BN: Tensor, *given: Tensor) -> Tensor:
        return decide(rule, RoundNumbers(uniform_BK, clock_BN), *given)

    return by_numbers


@dataclass
class CounterDraws:
    """Makes all random numbers: drafts are drawn by `categorical`, the rest of a round by `round`.

    Philox is addressed by counter: (seed, prompt) is its key, the base its counter. `own` has the seeds of
    prompts that have one, by prompt key. `replay` runs functions of tensors: a model's may have them as
    CUDA graphs.
    """

    seed: int
    replay: Callable[..., Tensor] = lambda function, *given: function(*given)
    own: dict[int, int] = field(default_factory=dict)
    _held: dict[int, tuple[object, Tensor]] = field(default_factory=dict, repr=False)  # tables by stream

    def categorical(self, probs_BV: Tensor, slot: Slot) -> Tensor:
        """Draws one token a row from its distribution, which need not be normalised.

        Corrections are drawn by a race, so that drafting ahead guesses them best (drafters/ahead.py).

        The race's clocks are made with the round's first draft: after a target's forward, which fills a CPU's
        caches, making them takes many times as long.
        """
        if slot.purpose is Purpose.CORRECT or slot.offset == 0:
            clock_BN = self.clocks(slot, 2 * heat(probs_BV.shape[1]), probs_BV.device)
        if slot.purpose is Purpose.CORRECT:
            return race(probs_BV, clock_BN)

        uniform_B1 = self.uniforms(slot, 1, probs_BV.device)
        # A copy: the next replay overwrites what this one gave.
        return self.replay(inverse_cdf, probs_BV, uniform_B1).clone()

    def round(self, decide: Decide, rule: Hashable, slot: Slot, probs_BWV: Tensor, *given: Tensor) -> Tensor:
        """Returns `decide(rule, draws, probs_BWV, *given)`, with `RoundDraws` of a round of W - 1 drafts.

        The coins are uniforms, one a draft; the token after the accepted drafts is drawn by a race.
        """
        rows, width, vocab = probs_BWV.shape

        uniform_BK = probs_BWV.new_empty(rows, 0)
        if width > 1:
            coins = replace(slot, purpose=Purpose.ACCEPT)
            uniform_BK = self.uniforms(coins, width - 1, probs_BWV.device)
        clock_BN = self.clocks(slot, 2 * heat(vocab), probs_BWV.device)
        return self.replay(_by_numbers(decide, rule), uniform_BK, clock_BN, probs_BWV, *given)

    def clocks(self, slot: Slot, count: int, device: torch.device) -> Tensor:
        """Returns a round's exponentials, (B, count)."""
        return self._table(RACES, slot, count, device)[:, :count]

    def uniforms(self, slot: Slot, count: int, device: torch.device) -> Tensor:
        """Returns one number for each row and offset, (B, count).

        In the stream they stand by offset, then purpose: every number has one place, whoever wants it.
        """
        first = PURPOSES * slot.offset + slot.purpose
        end = first + PURPOSES * count
        return self._table(ROUNDS, slot, end, device)[:, first:end:PURPOSES]

    def _table(self, stream: int, slot: Slot, width: int, device: torch.device) -> Tensor:
        """Returns `width` or more of a round's numbers, (B, N).

        They are made and sent to the device when first needed. A wider table starts with the narrower one, so
        its width never changes a draw.
        """
        texts = slot.keys, slot.bases, device
        known, table = self._held.get(stream, NOTHING)
        if known != texts or table.shape[1] < width:
            whole = width if stream == RACES else max(PREPARED, 2 * width)
            table = sent(self._numbers(stream, slot, whole), device)
            self._held[stream] = texts, table
        return table

    def _numbers(self, stream: int, slot: Slot, width: int) -> Tensor:
        """Returns uniforms of 53 bits; for races exponentials of 52 bits, so that none is 0."""
        texts = zip(slot.keys, slot.bases, strict=True)
        whole_BN = np.stack([self._row(key, base, width, stream) for key, base in texts])
        if stream != RACES:
            return torch.from_numpy(whole_BN * 2.0**-53)
        # -log(u) is exponential, with u in the midst of one of 2**52 equal parts of (0, 1).
        return torch.from_numpy(-np.log(((whole_BN >> np.uint64(1)) + 0.5) * 2.0**-52))

    def _row(self, key: int | None, base: int, width: int, stream: int) -> np.ndarray:
        """Returns a row's numbers, of 53 bits."""
        if key is None:  # the row has ended
            return np.zeros(width, dtype=np.uint64)
        # As an array: from a list with a number beyond 2**63 numpy makes floats, which cut both keys.
        keys = np.array([self.own.get(key, self.seed), key], dtype=np.uint64)
        return np.random.Philox(key=keys, counter=[0, 0, stream, base]).random_raw(width) >> np.uint64(11)


def heat(vocab: int) -> int:
    """Returns how many tokens run in each heat of a race: the root of the vocabulary, rounded up."""
    return math.isqrt(vocab - 1) + 1


def race(probs_BV: Tensor, clock_BN: Tensor) -> Tensor:
    """Returns the token with the least exponential / probability in each row, (B,).

    Of exponentials E_i, the least E_i / p_i is that of i with probability p_i / sum(p). A token of
    probability 0 never wins.

    Two distributions raced with the same noise agree with chance (1 - TV) / (1 + TV) at least. By an inverted
    CDF, in which a small shift moves every later token, they agree far less often unless they are peaked. The
    race has two heats, of sums and then inside the winning sum: few clocks are enough, little is lost.
    """
    rows, vocab = probs_BV.shape
    size = heat(vocab)

    # The first heat is run by H sums of `size` neighbours each; the last sum may have fewer.
    whole = vocab - vocab % size
    mass_BH = probs_BV[:, :whole].view(rows, -1, size).sum(-1, dtype=torch.float64)
    if whole < vocab:
        rest_B1 = probs_BV[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
        mass_BH = torch.cat([mass_BH, rest_B1], 1)
    heat_B1 = _first(clock_BN[:, : mass_BH.shape[1]], mass_BH)

    # The second by the C = `size` tokens of the sum that won, with clocks of their own.
    token_BC = heat_B1 * size + torch.arange(size, device=probs_BV.device)
    probs_BC = probs_BV.gather(1, token_BC.clamp(max=vocab - 1)).double()
    won_B1 = _first(clock_BN[:, size:], probs_BC.masked_fill_(token_BC >= vocab, 0))
    return token_BC.gather(1, won_B1)[:, 0]


def _first(clock_BN: Tensor, rate_BN: Tensor) -> Tensor:
    """Returns the index of the least clock / rate, (B, 1); never of a rate of 0 (also -0.0) or NaN."""
    return (clock_BN / rate_BN).masked_fill_(~(rate_BN > 0), torch.inf).argmin(-1, keepdim=True)


def inverse_cdf(probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Returns the token at which the cumulated probabilities first exceed the uniform, (B,).

    It is never one of probability 0. The uniform is scaled by the sum, as that is 1 only up to rounding.

    A uniform is 1 - 2**-53 at most; that part of a number, rounded, is less than the number.
    """
    rising_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    mark_B1 = uniform_B1 * rising_BV[:, -1:]
    token_B1 = torch.searchsorted(rising_BV, mark_B1, right=True)
    token_B1 = token_B1.clamp_(max=probs_BV.shape[1] - 1)  # beyond the last where probabilities are NaN

    if probs_BV.device.type == "cpu":  # sequential sums: a token of probability 0 adds nothing
        return token_B1[:, 0]

    # A parallel sum may round a token of probability 0 into a sliver; it must not be drawn even so.
    possible_B1 = probs_BV.gather(1, token_B1) > 0
    return torch.where(possible_B1, token_B1, probs_BV.argmax(-1, keepdim=True))[:, 0]
