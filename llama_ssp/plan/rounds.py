"""A batch in sizes: prefill, then rounds of drafting and verifying, as the engine runs them, line by line.

The second round has what the first has not: the draft lacks two tokens after a wholly accepted block.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.plan.forward import LOGITS, Passes
from llama_ssp.plan.laws import FP32, FP64, INT, Laws
from llama_ssp.plan.tape import Block, Tape

LAWS, TOKENS = "laws", "tokens"
PREFILL, DRAFT_PREFILL, DRAFT, VERIFY = "prefill", "draft prefill", "draft", "verify"
LAG = 2  # engine.runner
AT_ONCE = 16  # engine.state


@dataclass
class Proposal:
    """engine.state.Proposal"""

    drafted: Block
    laws: Block | None
    damaged: Block | None


@dataclass(frozen=True)
class Duties:
    """What a rank does beside its passes: decide what stands, and sample drafts."""

    decides: bool
    drafts: bool


class Batch:
    """One rank's share of the work."""

    def __init__(
        self, tape: Tape, target: Passes | None, draft: Passes | None, laws: Laws, duties: Duties, chunk: int
    ) -> None:
        self.t, self.target, self.draft, self.laws = tape, target, draft, laws
        self.duties, self.chunk = duties, chunk
        self._told: list[Block] = []  # what the device is told of the texts, once a round

    def run(self, prompt: int, room: int, k: int) -> None:
        """Prefill and two rounds, the second at the end of the text, where spans are longest."""
        with self.t.labelled(TOKENS):
            _tokens = self.t(self.laws.rows * (room + 1), INT)
        self.t.phase(PREFILL)
        self.warm(self.target, prompt - 1)
        if self.draft is not None:
            self.t.phase(DRAFT_PREFILL)
            self.warm(self.draft, min(prompt, self.draft.part.context) - 1)
        rounds = (prompt, 1), (max(prompt, room - k), LAG)
        for length, lag in rounds:
            self.t.phase(DRAFT)
            proposal = self.propose(length, k, lag)
            self.t.phase(VERIFY)
            self.verify(length, k, proposal)
            del proposal
            self._told.clear()

    def warm(self, passes: Passes | None, end: int) -> None:
        """engine.runner.Runner.warm: the last whole chunk, which sees most, and what is left behind it.

        Chunks before see less; all but the first find the cache made.
        """
        whole, rest = divmod(end, self.chunk)
        if passes is not None and whole:
            passes.run(self.chunk, whole * self.chunk, last_only=True)
        if passes is not None and rest:
            passes.run(rest, end, last_only=True)

    def propose(self, length: int, k: int, lag: int) -> Proposal:
        """engine.drafters.ModelDrafter.propose; whoever decides needs the laws, the others the tokens.

        Between the first pass and the last none sees more than the last: only their laws are made.
        """
        rows, n = self.laws.rows, self.laws.rows * k * self.laws.vocab
        drafted, laws = [], []
        logits: Block | None = None
        wide = FP32 if self.draft is None else max(self.draft.width, FP32)
        for offset in range(k if self.draft is not None else 0):
            assert self.draft is not None
            if offset in (0, k - 1):
                logits = self._logits(self.draft, lag if offset == 0 else 1, length + offset, 1)
            assert logits is not None
            if not self.duties.drafts:
                continue
            with self.t.labelled(LAWS):
                self._tell(k)
                law = self.laws.law(logits, 1, self.draft.width, self.draft.part.whole_vocab)
                drafted.append(self.laws.drawn(law, wide))
                if offset == 0:
                    self._told.append(self.t(rows * k, INT))  # engine.state.State.place
                laws.append(law)
        logits = None
        with self.t.labelled(LAWS):
            if not k or not (self.duties.decides or self.duties.drafts):
                return Proposal(self.t(rows * k, INT), None, self.t(rows, 1) if k else None)
            like = (
                self.t(n, wide) if self.draft is None else None
            )  # what a looked-up token's law is made like
            law = self.t(n, wide, like)
            damaged = self.laws.lawless(law, k)
            return Proposal(self.t(rows * k, INT), law, damaged)

    def verify(self, length: int, k: int, proposal: Proposal) -> None:
        """engine.engine.Engine.verify"""
        if self.target is None:
            return
        logits = self._logits(self.target, k + 1, length + k, k + 1)
        if not self.duties.decides:
            return
        with self.t.labelled(LAWS):
            wide, width = max(self.target.width, FP32), self.target.width
            self._tell(k)
            law = self.laws.law(logits, k + 1, width, self.target.part.whole_vocab)
            _damaged = self.laws.lawless(law, k + 1)
            if proposal.laws is None:
                next_law, others = law, [self.t(self.laws.rows, INT)]
            else:
                next_law, *others = self.laws.decided(law, proposal.laws, k, wide)
            self.laws.raced(next_law, FP64 if k else wide)
            del others

    def _tell(self, k: int) -> None:
        """engine.state.State.prefix"""
        if not self._told:
            rows = self.laws.rows
            self._told += [self.t(2 * rows, INT), self.t(rows * max(k + 1, AT_ONCE), INT)]

    def _logits(self, passes: Passes, columns: int, span: int, wanted: int) -> Block:
        """engine.runner.Runner.logits; where it picks columns, its index is broadcast over the vocabulary

        A CPU gathers 16 bit through fp32.
        """
        logits = passes.run(columns, span, last_only=False)
        if columns == wanted:
            return logits
        n = self.laws.rows * wanted * passes.part.whole_vocab
        with self.t.labelled(LOGITS):
            column = self.t(self.laws.rows * wanted, INT)
            index = self.t(n, INT, column)
            chosen = self.t(n, passes.width, logits, index)
            if passes.kernels.threads and passes.width < FP32:
                self.t(n, FP32)
        del logits, column, index
        return chosen
