"""Laws, draws and the block rule in sizes: sampling, verify, draws and the engine's judging, line by line.

At temperature 1 without filters or penalties. As everywhere (tape.py), locals live as long as theirs.
"""

from __future__ import annotations

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
        damaged = t(positions, 1, t(n, 1, t(n, 1, h), t(n, 1, h)))
        law = t(n, wide, t(n, wide, h))
        law = t(n, wide, law)
        del h, damaged
        return t(positions * self.vocab, wide, law) if vocab < self.vocab else law

    def sound(self, law: Block, columns: int, wide: int) -> tuple[Block, Block]:
        """engine.drafters.sound"""
        positions = self.rows * columns
        damaged = self.tape(positions, 1, self.tape(positions * self.vocab, 1, law))
        return self.certain_where(damaged, law, columns, wide), damaged

    def certain_where(self, _condition: Block, law: Block, columns: int, wide: int) -> Block:
        """engine.drafters.certain_where"""
        n = self.rows * columns * self.vocab
        certain = self.tape(n, wide, self.tape(self.rows * columns, INT))
        return self.tape(n, wide, certain, law)

    def drawn(self, _law: Block) -> Block:
        """draws.inverse_cdf"""
        t, n = self.tape, self.rows * self.vocab
        _uniform = t(self.rows, FP64)
        rising = t(n, FP64, t(n, FP64))
        mark = t(self.rows, FP64, t(self.rows, FP64), t(self.rows, FP64, t(self.rows, FP64)))
        token = t(self.rows, INT, mark, rising)
        possible = t(self.rows, 1, t(self.rows, FP32))
        return t(self.rows, INT, possible, token, t(self.rows, INT))

    def in_double(self, law: Block, columns: int, wide: int) -> Block:
        """engine.engine._in_double"""
        t, n = self.tape, self.rows * columns * self.vocab
        law = t.same(law, n, FP64, wide < FP64)
        return t(n, FP64, law, t(self.rows * columns, FP64))

    def decided(self, law: Block, drafted: Block, k: int, wide: int) -> tuple[Block, ...]:
        """engine.engine._decide with the block rule: the law of the token that follows comes first"""
        t, rows = self.tape, self.rows
        target, draft = self.in_double(law, k + 1, wide), self.in_double(drafted, k, wide)
        count = t(rows, INT)
        self._chances(k)
        chances = t(rows * k, FP64)
        passed = t(rows * k, 1, chances, t(rows * k, FP64))
        accepted = t(rows, INT)
        law = self._remaining()
        overlap = self._overlap(k)
        del target, draft, count, passed
        return law, accepted, overlap

    def _one(self, *inputs: Block) -> Block:
        """A law of one position, in double"""
        return self.tape(self.rows * self.vocab, FP64, *inputs)

    def _positive(self, x: Block) -> Block:
        """arrays.positive"""
        return self._one(self.tape(self.rows * self.vocab, 1, x), self._one(x))

    def _chances(self, k: int) -> None:
        """verify.BlockRule.accept_chances"""
        for _ in range(k - 1):
            rest = self._one(self._one())
            _spare = self._positive(rest)
            del _spare

    def _picked(self) -> Block:
        """arrays.pick of one position in every row: its index is broadcast first"""
        return self._one(self.tape(self.rows * self.vocab, INT))

    def _remaining(self) -> Block:
        """verify.BlockRule.correction_law, verify._remaining_law"""
        _weight = self.tape(self.rows, FP64)
        target = self._picked()
        _last = self.tape(self.rows, INT)
        draft = self._picked()
        rest = self._positive(self._one(self._one(target), draft))
        return self._one(target, self._one(rest))

    def _overlap(self, k: int) -> Block:
        """verify.overlap"""
        n = self.rows * k * self.vocab
        return self.tape(self.rows * k, FP64, self.tape(n, FP64, self.tape(n, 1)))
