"""Laws, draws and the block rule in sizes: sampling, verify, draws and the engine's judging, line by line.

At temperature 1 without filters or penalties. As everywhere (tape.py), locals live as long as theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llama_ssp.plan.tape import Block, Tape

INT, FP32, FP64 = 8, 4, 8


@dataclass
class Laws:
    """Of `rows` texts over `vocab` tokens, from logits of numbers of `width`."""

    tape: Tape
    rows: int
    vocab: int

    def law(self, logits: Block, columns: int, width: int, vocab: int) -> Block:
        """sampling.Laws.__call__; `vocab` is how many logits there are"""
        t, positions, wide = self.tape, self.rows * columns, max(width, FP32)
        n = positions * min(vocab, self.vocab)
        h = t.same(logits, n, wide, width < FP32)
        law = t(n, wide, h)
        return t(positions * self.vocab, wide, law) if vocab < self.vocab else law

    def lawless(self, _law: Block, columns: int) -> Block:
        """sampling.lawless, and whether any position is, as the drafter and the engine ask it"""
        return self.tape(self.rows, 1, self.tape(self.rows * columns, 1))

    def drawn(self, law: Block, width: int) -> Block:
        """draws.inverse_cdf"""
        t, n = self.tape, self.rows * self.vocab
        rising = t(n, FP64, t.same(law, n, FP64, width < FP64))
        token = t(self.rows, INT, t(self.rows, FP64, rising))
        possible = t(self.rows, 1, t(self.rows, FP32))
        return t(self.rows, INT, possible, token, t(self.rows, INT))

    def raced(self, law: Block, width: int) -> Block:
        """draws.CounterDraws.categorical of a correction, draws.race"""
        t, rows = self.tape, self.rows
        size = math.isqrt(self.vocab - 1) + 1
        heats = self.vocab // size
        rest = self.vocab - heats * size
        mass = t(rows * heats, FP64, t.same(law, rows * heats * size, FP64, width < FP64))
        if rest:
            own = t(rows, FP64, t.same(law, rows * rest, FP64, width < FP64))
            mass = t(rows * (heats + 1), FP64, mass, own)
        heat = self._first(mass, heats + bool(rest))
        token = t(rows * size, INT, heat)
        inside = t.same(t(rows * size, width, t(rows * size, INT)), rows * size, FP64, width < FP64)
        outside = t(rows * size, 1)
        del outside
        return t(rows, INT, self._first(inside, size), token)

    def _first(self, _rate: Block, count: int) -> Block:
        """draws._first"""
        n = self.rows * count
        return self.tape(self.rows, INT, self.tape(n, FP64), self.tape(n, 1, self.tape(n, 1)))

    def in_double(self, law: Block, columns: int, wide: int) -> Block:
        """engine.engine._in_double"""
        t, n = self.tape, self.rows * columns * self.vocab
        law = t.same(law, n, FP64, wide < FP64)
        mass = t(self.rows * columns, FP64)
        return law if wide < FP64 else t(n, FP64, law, mass)

    def decided(self, law: Block, drafted: Block, k: int, wide: int) -> tuple[Block, ...]:
        """engine.engine._decide with the block rule: the law of the token that follows comes first"""
        t, rows = self.tape, self.rows
        target, draft = self.in_double(law, k + 1, wide), self.in_double(drafted, k, wide)
        count = t(rows, INT)
        carried = t(rows * (k + 1), FP64)
        spare, chances = self._chances(k)
        passed = t(rows * k, 1, chances)
        accepted = t(rows, INT)
        law = self._remaining()
        overlap = self._overlap(k)
        standing = t(rows * k, FP64, t(rows * (k - 1), FP64))
        seen = t(3 * rows * k, FP64, overlap, standing)
        del target, draft, count, carried, passed, spare
        return law, accepted, seen

    def _one(self, *inputs: Block) -> Block:
        """A law of one position, in double"""
        return self.tape(self.rows * self.vocab, FP64, *inputs)

    def _chances(self, k: int) -> tuple[Block, Block]:
        """verify.BlockRule.accept_chances, and what of it the block keeps"""
        spare = self.tape(self.rows * (k - 1), FP64, self.tape(self.rows * (k - 1) * self.vocab, FP64))
        return spare, self.tape(self.rows * k, FP64)

    def _remaining(self) -> Block:
        """verify.BlockRule.correction_law, verify._remaining_law"""
        _weight = self.tape(self.rows, FP64)
        target = self._one()
        _last = self.tape(self.rows, INT)
        rest = self._one(self._one(), target)
        return self._one(target, self._one(rest))

    def _overlap(self, k: int) -> Block:
        """verify.overlap"""
        return self.tape(self.rows * k, FP64, self.tape(self.rows * k * self.vocab, FP64))
