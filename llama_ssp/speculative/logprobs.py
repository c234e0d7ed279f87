"""Log-probabilities of tokens, from the target's logits that a round has in any case.

Two distributions can be asked for: the target's own, unfiltered and at temperature 1; and the one that tokens
are sampled from, after every control. The draft's distribution plays no part in either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from llama_ssp.models.passes import sent
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import Prefix, SamplingTransform
from llama_ssp.speculative.state import State
from llama_ssp.text.logprobs import ScoredToken

NUMBERS = 2**24  # logits at once: of a text that is scored whole there are many

Continuation = tuple[int, ...]  # token ids after a context


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
    last = [length - 1 for length in state.lengths]  # what follows the last token is not wanted
    yield from _fed(runner, state, last)


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


def scored_continuations(
    target: ModelRunner,
    state: State,
    continuations: Sequence[Sequence[Continuation]],
    reader: LogprobReader,
    vocab: int,
    leads: bool,
) -> list[dict[Continuation, list[ScoredToken]]]:
    """Returns the log-probabilities of the tokens of several continuations of each row's text, its context.

    A context is read once: what was fed of a continuation is forgotten before the next one. Those that differ
    in their last token alone are one pass: their stem, all but that token, is fed, and the last token of each
    is looked up at the same place.

        context       0 1 2 3        cached before each pass: 0 1 2
        continuation          4 5 6  fed: 3, and the stem 4 5; their logits are those of 4, 5 and 6

    They are the target's, unfiltered. Every rank of the target computes; only where `leads` is set there are
    values. `target` begins anew.
    """
    target.start(state.rows, state.capacity)
    lengths = state.lengths

    # Of each row the last tokens by stem; a pass takes one stem of each row that has one left.
    stems: list[dict[Continuation, list[int]]] = [{} for _ in lengths]
    for row, of_row in enumerate(continuations):
        for continuation in dict.fromkeys(of_row):
            stems[row].setdefault(continuation[:-1], []).append(continuation[-1])
    passes = [list(of_row.items()) for of_row in stems]

    result: list[dict[Continuation, list[ScoredToken]]] = [{} for _ in lengths]
    if target.model.cuts and not any(chain(*stems)):  # of one token each: what follows the contexts is enough
        logit_B1V = target.last_logits(state.token_BS, lengths)
        fed = {row: stem for row, (stem,) in enumerate(passes)}
        span = [length - 1 for length in lengths], lengths
        if leads:
            for row, continuation, tokens in _parts_of(fed, lengths, span, logit_B1V, reader, vocab):
                result[row][continuation] = tokens
        return result

    for number in range(max(map(len, passes))):
        # Once, but of a model with recurrent states: a longer stem than its cache has states is begun anew.
        target.prefill(state.token_BS, [length - 1 for length in lengths])
        fed = {row: of_row[number] for row, of_row in enumerate(passes) if number < len(of_row)}
        blocks = [list(fed[row][0]) if row in fed else [] for row in range(state.rows)]
        later = state.extended(blocks)
        later.write_texts(dict(enumerate(lengths)))
        ends = [later.lengths[row] if row in fed else cached for row, cached in enumerate(target.cached)]
        for starts, stops, logit_BWV in _fed(target, later, ends):
            if leads:
                parts = _parts_of(fed, lengths, (starts, stops), logit_BWV, reader, vocab)
                for row, continuation, tokens in parts:
                    result[row].setdefault(continuation, []).extend(tokens)
        target.roll_back(lengths)
    return result


def _parts_of(
    fed: dict[int, tuple[Continuation, list[int]]],
    lengths: list[int],
    span: tuple[list[int], list[int]],
    logit_BWV: Tensor,
    reader: LogprobReader,
    vocab: int,
) -> Iterator[tuple[int, Continuation, list[ScoredToken]]]:
    """Yields a row, a continuation and those of its tokens that these logits predict.

    `fed` has the stem of each row and the last tokens after it; `span` says from which position of a row to
    which one the logits are.
    """
    for number in range(max(len(last) for _, last in fed.values())):
        whole = {row: (*stem, last[number]) for row, (stem, last) in fed.items() if number < len(last)}
        blocks: list[list[int]] = []
        for row, (start, stop) in enumerate(zip(*span, strict=True)):
            before = lengths[row] - 1  # the position whose logits are those of a continuation's first token
            blocks.append(list(whole[row][start - before : stop - before]) if row in whole else [])
        parts = reader.read(logit_BWV, None, vocab, blocks)
        for row, continuation in whole.items():
            yield row, continuation, parts[row]


def _fed(target: ModelRunner, state: State, ends: list[int]) -> Iterator[tuple[list[int], list[int], Tensor]]:
    """Feeds each row up to its end, in chunks; yields logits, and from which position to which they are."""
    size = max(1, NUMBERS // (state.rows * target.model.vocab))
    width = target.prefill_chunk if target.model.cuts else min(target.prefill_chunk, size)
    while target.cached != ends:
        starts = list(target.cached)
        chunk_ends = [
            min(start + width, end, start + 1 + target.room(start + 1))
            for start, end in zip(starts, ends, strict=True)
        ]
        for logit_BWV in target.parts(state.token_BS, chunk_ends, size):
            stops = [min(start + size, end) for start, end in zip(starts, chunk_ends, strict=True)]
            yield starts, stops, logit_BWV
            starts = stops


def _prefix(state: State, starts: list[int], width: int) -> Prefix:
    """Returns the prefixes of positions after `starts`; a text's first token stands for its prompt."""
    start_B = sent(starts, state.device)
    length_BW = start_B[:, None] + torch.arange(1, width + 1, device=state.device)
    return Prefix(state.token_BS, length_BW.clamp_(max=state.capacity), torch.ones_like(start_B))
