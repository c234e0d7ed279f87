"""Draws, and a round's decision, by native.cpp: the same ones as rng.py and verification.py define,
sooner."""

from __future__ import annotations

import functools
import logging
import subprocess
from array import array
from collections.abc import Sequence
from ctypes import CDLL, c_bool, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.compile import CompiledModel
from llama_ssp.models.kernels.build import complaint, library
from llama_ssp.speculative.coupled import source
from llama_ssp.speculative.rng import RACES, ROUNDS, CounterDraws, Slot, heat
from llama_ssp.speculative.verification import BlockRule, Rule, TokenRule

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
# Products are rounded before they are summed: of two equal distributions one less the other must be nothing.
FLAGS = ("-ffp-contract=off",)
WIDE = {
    torch.float32: False,
    torch.float64: True,
}  # there are no distributions of other types (sampling.py)
LAW, INTEGERS, NUMBERS = (c_bool, c_void_p), c_void_p, c_void_p


class HostDraws(CounterDraws):
    """The draws of distributions on the host."""

    def _by_cdf(self, probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
        probs_BV, (rows, vocab) = probs_BV.contiguous(), probs_BV.shape
        token_B = torch.empty(rows, dtype=torch.int64)
        wide, probs = _probs(probs_BV)
        operators().draw(
            wide, probs, rows, vocab, uniform_B1.data_ptr(), uniform_B1.stride(0), token_B.data_ptr()
        )
        return token_B

    def _of_round(self, keys: tuple[int, ...], bases: tuple[int, ...], width: int) -> Tensor:
        return self._numbers(False, keys, bases, width, ROUNDS)

    def _of_races(self, keys: tuple[int, ...], bases: tuple[int, ...], width: int) -> Tensor:
        return self._numbers(True, keys, bases, width, RACES)

    def _numbers(
        self, of_race: bool, keys: tuple[int, ...], bases: tuple[int, ...], width: int, stream: int
    ) -> Tensor:
        number_BN = torch.empty(len(keys), width, dtype=torch.float64)
        seeds = array("Q", (self.own.get(key, self.seed) for key in keys))
        of, at = array("Q", keys), array("Q", bases)
        named = (numbers.buffer_info()[0] for numbers in (seeds, of, at))
        operators().numbers(of_race, len(keys), *named, stream, width, number_BN.data_ptr())
        return number_BN

    def decided(
        self, rule: Rule, target_BWV: Tensor, draft_BKV: Tensor | None, drafted_BK: Tensor,
        count: Sequence[int], idle: Sequence[bool], accept: Slot, correct: Slot,
    ) -> Tensor:  # fmt: skip
        """What Engine decides of a round, as it has it."""
        (rows, k), vocab = drafted_BK.shape, target_BWV.shape[-1]
        target_BWV, drafted_BK = target_BWV.contiguous(), drafted_BK.contiguous()
        draft_BKV = (
            target_BWV if draft_BKV is None else draft_BKV.contiguous()
        )  # with no draft it is not read
        coin_BK = self._uniforms(accept, k, target_BWV.device)
        size = heat(vocab)
        clock_BN = self._clocks(correct, 2 * size, target_BWV.device)
        decided = torch.zeros(rows, 3 + 4 * k, dtype=torch.float64)
        counts, rests = array("q", count), array("q", idle)
        operators().decide(
            isinstance(rule, BlockRule), *_probs(target_BWV), *_probs(draft_BKV), rows, k, vocab, size,
            drafted_BK.data_ptr(), counts.buffer_info()[0], rests.buffer_info()[0],
            coin_BK.data_ptr(), *coin_BK.stride(), clock_BN.data_ptr(), clock_BN.stride(0),
            decided.data_ptr(),
        )  # fmt: skip
        return decided


def by_kernel(draws: CounterDraws) -> CounterDraws:
    """The same draws, by native.cpp; as they are, with a line in the log, where it cannot be built.

    Draws of other kinds are left alone.
    """
    if type(draws) is not CounterDraws:
        return draws
    try:
        operators()
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("engine: rounds are decided without a kernel: %s", complaint(error))
        return draws
    return HostDraws(draws.seed, draws.own)


def can_decide(rule: Rule) -> bool:
    """Whether it is a rule that native.cpp has."""
    return type(rule) in (TokenRule, BlockRule)


def _probs(probs: Tensor) -> tuple[bool, int]:
    """Whether in double precision, and where."""
    return WIDE[probs.dtype], probs.data_ptr()


@functools.cache
def operators() -> Any:
    """The library's functions; an OSError or CalledProcessError where they cannot be built."""
    found = CDLL(str(library(SOURCE, *FLAGS)))
    found.numbers.argtypes = [c_bool, c_int64, *3 * (INTEGERS,), c_uint64, c_int64, NUMBERS]
    found.draw.argtypes = [*LAW, c_int64, c_int64, NUMBERS, c_int64, INTEGERS]
    found.decide.argtypes = [
        c_bool, *LAW, *LAW, *4 * (c_int64,), *3 * (INTEGERS,), NUMBERS, c_int64, c_int64, NUMBERS, c_int64,
        NUMBERS,
    ]  # fmt: skip
    found.numbers.restype = found.draw.restype = found.decide.restype = None
    return found


def draws_for(target: CausalModel | None, rule: Rule, seed: int) -> CounterDraws:
    """What this rank draws from: beside steps that are compiled for a CPU, by a kernel as well."""
    draws = source(rule, seed)
    beside = isinstance(target, CompiledModel) and target.device.type == "cpu"
    return by_kernel(draws) if beside else draws
