"""The draws of rng.py and `decision.decide` on a CPU, in C++ (native.cpp). It gives the same numbers sooner.

tests/test_deciding.py compares it with the Python functions, and with the enumeration that proves them. It is
kept because torch.compile of the same functions has 21 to 76 % of its gain for a whole round of a vocabulary
of 8k, 42 to 84 % of 32k, and 70 to 89 % of 128k, with one row to eight (`python bench/overhead.py
compiled=true`).
"""

from __future__ import annotations

import functools
import logging
import subprocess
from array import array
from ctypes import CDLL, c_bool, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_ssp.config import MAX_SIBLINGS
from llama_ssp.models.kernels.build import complaint, library
from llama_ssp.speculative.rng import RACES, CounterDraws, Draws, Purpose, Slot, heat
from llama_ssp.speculative.state import Proposal, State
from llama_ssp.speculative.verification import Rule

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
# Without fused multiply-add: of two equal distributions the difference must be exactly 0.
FLAGS = ("-ffp-contract=off",)
PROBS, INTEGERS, NUMBERS = (c_bool, c_void_p), c_void_p, c_void_p  # PROBS: whether fp64 (else fp32), address


class HostDraws(CounterDraws):
    """The draws of `CounterDraws`, for probabilities on the host."""

    def _by_cdf(self, probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
        probs_BV, (rows, vocab) = probs_BV.contiguous(), probs_BV.shape
        token_B = torch.empty(rows, dtype=torch.int64)
        uniforms = uniform_B1.data_ptr(), uniform_B1.stride(0)
        operators().draw(*_address(probs_BV), rows, vocab, *uniforms, token_B.data_ptr())
        return token_B

    def _numbers(self, stream: int, slot: Slot, width: int) -> Tensor:
        number_BN = torch.empty(len(slot.keys), width, dtype=torch.float64)
        seeds = array("Q", (self.own.get(key, self.seed) for key in slot.keys))
        columns = seeds, array("Q", slot.keys), array("Q", slot.bases)
        addresses = (column.buffer_info()[0] for column in columns)
        rows, out = len(slot.keys), number_BN.data_ptr()
        operators().numbers(stream == RACES, rows, *addresses, stream, width, out)
        return number_BN


def can_decide(rule: Rule, draws: Draws) -> bool:
    """Whether `decide` has this very rule, and these are its draws."""
    return isinstance(draws, HostDraws) and "kernel" in vars(type(rule))


def decide(rule: Rule, draws: Draws, state: State, proposal: Proposal, probs_BWV: Tensor) -> Tensor:
    """The same as `decision.decide`."""
    assert isinstance(draws, HostDraws)
    target_BWV, drafted_BK, k = probs_BWV.contiguous(), proposal.drafted_BK.contiguous(), proposal.k
    draft_BKV = target_BWV if proposal.draft_BKV is None else proposal.draft_BKV.contiguous()
    vocab, size = target_BWV.shape[-1], heat(target_BWV.shape[-1])
    coin_BK = draws._uniforms(state.slot(Purpose.ACCEPT), k, target_BWV.device)
    clock_BN = draws._clocks(state.slot(Purpose.CORRECT), 2 * size, target_BWV.device)
    decided_BN = torch.zeros(state.rows, 3 + 4 * k, dtype=torch.float64)
    counts, idle = array("q", proposal.count), array("q", state.ended)
    operators().decide(
        rule.kernel, *_address(target_BWV), *_address(draft_BKV), state.rows, k, vocab, size,
        drafted_BK.data_ptr(), counts.buffer_info()[0], idle.buffer_info()[0],
        coin_BK.data_ptr(), *coin_BK.stride(), clock_BN.data_ptr(), clock_BN.stride(0), decided_BN.data_ptr(),
    )  # fmt: skip
    return decided_BN


def decide_tree(rule: Rule, draws: Draws, state: State, proposal: Proposal, probs_BWV: Tensor) -> Tensor:
    """The same as `decision.decide_tree`."""
    assert isinstance(draws, HostDraws)
    assert proposal.siblings is not None and proposal.draft_BKV is not None
    target_BWV, draft_BKV = probs_BWV.contiguous(), proposal.draft_BKV.contiguous()
    k, siblings, vocab = proposal.k, proposal.siblings, target_BWV.shape[-1]
    most, size = siblings.most, heat(vocab)
    coin_BK = draws._uniforms(state.slot(Purpose.ACCEPT), k, target_BWV.device)
    slot = state.slot(Purpose.ACCEPT_SIBLING)
    side_BN = draws._uniforms(slot, k * MAX_SIBLINGS, target_BWV.device)
    clock_BN = draws._clocks(state.slot(Purpose.CORRECT), 2 * size, target_BWV.device)
    width = 4 + 4 * k + k * (3 * most + 1)
    decided_BN = torch.zeros(state.rows, width, dtype=torch.float64)
    counts, idle, each = (array("q", numbers) for numbers in (proposal.count, state.ended, siblings.each))
    tokens = proposal.drafted_BK.contiguous(), siblings.token_BKS.contiguous(), *siblings.columns()
    drafted_BK, token_BKS, main_BW, aside_BN = tokens
    step = side_BN.stride(1)
    operators().decide_tree(
        *_address(target_BWV), *_address(draft_BKV), state.rows, k, vocab, size,
        drafted_BK.data_ptr(), counts.buffer_info()[0], idle.buffer_info()[0],
        coin_BK.data_ptr(), *coin_BK.stride(), clock_BN.data_ptr(), clock_BN.stride(0),
        target_BWV.shape[1], most, main_BW.data_ptr(), aside_BN.data_ptr(), token_BKS.data_ptr(),
        each.buffer_info()[0], side_BN.data_ptr(), side_BN.stride(0), step, MAX_SIBLINGS * step,
        decided_BN.data_ptr(), width,
    )  # fmt: skip
    return decided_BN


def _address(probs: Tensor) -> tuple[bool, int]:
    """The transform's probabilities are fp32 or fp64."""
    return probs.dtype == torch.float64, probs.data_ptr()


@functools.cache
def operators() -> Any:
    """The library's functions; raises OSError or CalledProcessError where it cannot be built."""
    found = CDLL(str(library(SOURCE, *FLAGS)))
    found.numbers.argtypes = [c_bool, c_int64, *3 * (INTEGERS,), c_uint64, c_int64, NUMBERS]
    found.draw.argtypes = [*PROBS, c_int64, c_int64, NUMBERS, c_int64, INTEGERS]
    strided = NUMBERS, c_int64, c_int64, NUMBERS, c_int64  # coins by row and step, clocks by row
    found.decide.argtypes = [c_bool, *PROBS, *PROBS, *4 * (c_int64,), *3 * (INTEGERS,), *strided, NUMBERS]
    trees = *2 * (c_int64,), *4 * (INTEGERS,), NUMBERS, *3 * (c_int64,), NUMBERS, c_int64
    rounds = *PROBS, *PROBS, *4 * (c_int64,), *3 * (INTEGERS,)
    found.decide_tree.argtypes = [*rounds, *strided, *trees]
    for function in (found.numbers, found.draw, found.decide, found.decide_tree):
        function.restype = None
    return found


def by_kernel(draws: CounterDraws) -> CounterDraws:
    """The same draws by native.cpp; unchanged, with a line in the log, where it cannot be built.

    Draws of other kinds are returned as they are.
    """
    if type(draws) is not CounterDraws:
        return draws
    try:
        operators()
    except (OSError, subprocess.CalledProcessError) as error:
        log.info("engine: rounds are decided without a kernel: %s", complaint(error))
        return draws
    return HostDraws(draws.seed, draws.own)
