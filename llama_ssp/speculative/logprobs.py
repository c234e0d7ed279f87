"""Log-probabilities of tokens, from the target's logits that a round has in any case.

Two distributions can be asked for: the target's own, unfiltered and at temperature 1; and the one that tokens
are sampled from, after every control. The draft's distribution plays no part in either.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llama_ssp.models.passes import sent
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import Prefix, SamplingTransform
from llama_ssp.speculative.state import State
from llama_ssp.text.logprobs import ScoredToken

NUMBERS = 2**24  # logits at once: of a text that is scored whole there are many


@dataclass
class LogprobReader:
    """Reads log-probabilities: says which rows' tokens get them, and with how many alternatives.

    `top` is for all rows but those in `by_row`; None keeps nothing. With `sampled` they are of the
    distribution that tokens are sampled from, where alternatives of probability 0 are left out.
    """

    top: int | None = None
    sampled: bool = False
    by_row: dict[int, int | None] = field(default_factory=dict)

    @property
    def reads(self) -> bool:
        """Returns whether any row's tokens get log-probabilities."""
        return any(top is not None for top in (self.top, *self.by_row.values()))

    def read(
        self, logit_BWV: Tensor, probs_BWV: Tensor | None, vocab: int, blocks: list[list[int]]
    ) -> list[list[ScoredToken]]:
        """Returns the log-probabilities of each row's tokens, which columns 0, 1, ... predict.

        `probs_BWV` is what the sampling controls make of the logits; `vocab` is how many tokens there are:
        logits after that are padding.
        """
        tops = [self.by_row.get(row, self.top) for row in range(len(blocks))]
        chosen = [row for row, top in enumerate(tops) if top is not None]
        kept = [(row, i) for row in chosen for i in range(len(blocks[row]))]
        if not kept:
            return [[] for _ in blocks]

        # N tokens of all rows: token i of a block is predicted by column i.
        row_N, column_N = sent(list(zip(*kept, strict=True)), logit_BWV.device)
        if self.sampled and probs_BWV is not None:
            logprob_NV = probs_BWV[row_N, column_N].log()
        else:
            logit_NV = logit_BWV[row_N, column_N][:, :vocab]
            wide = torch.promote_types(logit_NV.dtype, torch.float32)
            logprob_NV = logit_NV.to(wide).log_softmax(-1)

        token_N1 = sent([[blocks[row][i]] for row, i in kept], logit_BWV.device)
        max_top = min(logprob_NV.shape[-1], max(top or 0 for top in tops))
        best = logprob_NV.topk(max_top)

        # One transfer; ids below 2^53 are exact in fp64.
        parts = logprob_NV.gather(1, token_N1), best.values, best.indices
        rows_NT = torch.cat([part.double() for part in parts], 1).tolist()

        texts: list[list[ScoredToken]] = [[] for _ in blocks]
        for (row, i), (logprob, *rest) in zip(kept, rows_NT, strict=True):
            pairs = zip(rest[max_top:], rest[: tops[row] or 0], strict=False)
            top = tuple((int(token), value) for token, value in pairs if value > -torch.inf)
            texts[row].append(ScoredToken(blocks[row][i], logprob, top))
        return texts


def text_parts(runner: ModelRunner, state: State) -> Iterator[tuple[list[int], list[int], Tensor]]:
    """Feeds whole texts; yields the logits part by part, as (starts, stops, logits).

    Column i of row b is of the token at `starts[b] + 1 + i`, up to `stops[b]`. The runner begins anew.
    """
    runner.start(state.rows, state.capacity)
    size = max(1, NUMBERS // (state.rows * runner.model.vocab))
    width = runner.prefill_chunk if runner.model.cuts else min(runner.prefill_chunk, size)
    last = [length - 1 for length in state.lengths]  # what follows the last token is not wanted
    while runner.cached != last:
        starts = list(runner.cached)
        ends = [
            min(start + width, end, start + 1 + runner.room(start + 1))
            for start, end in zip(starts, last, strict=True)
        ]
        for logit_BWV in runner.parts(state.token_BS, ends, size):
            stops = [min(start + size, end) for start, end in zip(starts, ends, strict=True)]
            yield starts, stops, logit_BWV
            starts = stops


def scored(
    target: ModelRunner, state: State, transform: SamplingTransform, reader: LogprobReader, leads: bool
) -> list[list[ScoredToken]]:
    """Returns the log-probabilities of each text's tokens, given those before it; None of the first one.

    Every rank of the target computes; only where `leads` is set there are values. `target` begins anew.
    """
    result = [[ScoredToken(text[0], None)] if leads else [] for text in state.texts]
    for starts, stops, logit_BWV in text_parts(target, state):
        if not leads:
            continue
        spans = zip(state.texts, starts, stops, strict=True)
        blocks = [text[start + 1 : stop + 1] for text, start, stop in spans]
        probs_BWV = None
        if reader.sampled:
            probs_BWV = transform(logit_BWV, _prefix(state, starts, logit_BWV.shape[1]))
        parts = reader.read(logit_BWV, probs_BWV, transform.vocab, blocks)
        result = [before + part for before, part in zip(result, parts, strict=True)]
    return result


def _prefix(state: State, starts: list[int], width: int) -> Prefix:
    """Returns the prefixes of positions after `starts`; a text's first token stands for its prompt."""
    start_B = sent(starts, state.device)
    length_BW = start_B[:, None] + torch.arange(1, width + 1, device=state.device)
    return Prefix(state.token_BS, length_BW.clamp_(max=state.capacity), torch.ones_like(start_B))
