"""Runs one model with its KV cache: feeds the tokens that the cache lacks, and rolls back on request.

After a round a cache holds at most len-1 tokens of a row, and the next forward feeds the rest. So there are
no special cases: prefill is the first catching up, and a draft model that was not fed its own last token
after full acceptance is fed it next round. To roll back is to forget a length (models/passes.py): keys after
it are overwritten when their positions come again. A model with recurrent states goes on from the state after
that length, which its cache still has (models/kv_cache.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llama_ssp.models.graph_sizes import LAG
from llama_ssp.models.interface import Cache, Model
from llama_ssp.models.passes import Pass, RowSpan, all_rows, sent

# Called after each pass with the texts, what was fed of them, and what the model's taps gave of these tokens.
Observer = Callable[[Tensor, list[RowSpan], Tensor], None]
# Called before each chunk of a prompt, with how many tokens have been read and are to be read. It may raise.
BeforeChunk = Callable[[int, int], None]
UNLIMITED = 2**31  # drafts


class ModelRunner:
    """Runs a model on one batch, holds its cache, and counts forwards."""

    def __init__(self, model: Model, prefill_chunk: int = 512, rewinds: int = 0) -> None:
        """`rewinds`: how many tokens a roll back takes back at most. Of recurrent states so many are kept.

        Where a roll back goes further, a model with such states reads the row's text anew.
        """
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.rewinds = rewinds
        self.forwards = 0
        self.cached: list[int] = []  # how many tokens of each row's text the cache holds
        # Texts that grow longer than this are fed anew, because all their positions then have another scale.
        # A draft's runner may mix both scales: its tokens are drawn from the distribution that results.
        self.limit: int | None = model.restart
        self._given: list[int] = []  # the length of each text when it was first fed
        self._cache: Cache | None = None
        self.observer: Observer | None = None
        self.before_chunk: BeforeChunk | None = None

    @property
    def cache(self) -> Any:
        """Returns the cache, which its model made; a head may read it."""
        assert self._cache is not None, "start() comes first"
        return self._cache

    def start(self, rows: int, capacity: int) -> None:
        """Begins a batch with an empty cache."""
        self.cached = [0] * rows
        self._given = [0] * rows
        self._cache = None  # first: its memory may be needed
        self._cache = self.model.new_cache(rows, capacity, self.rewinds)

    def free(self) -> None:
        """Frees the cache, also where a traceback keeps hold of it."""
        if self._cache is not None:
            self._cache.free()
        self._cache = None

    def prefill(self, token_BS: Tensor, ends: list[int]) -> None:
        """Feeds each row up to its end, in chunks; the texts have one token more."""
        self._begin(ends, [end + 1 for end in ends])
        self._prefill(token_BS, ends)

    def _prefill(self, token_BS: Tensor, ends: list[int]) -> None:
        """Feeds what rows lack up to their ends, in chunks, so that a long prompt needs no more memory."""
        lacking = sum(span.tokens for span in self._lacking(ends))
        total = lacking
        while lacking:
            if self.before_chunk is not None:
                self.before_chunk(total - lacking, total)
            chunk_ends = [min(e, c + self.prefill_chunk) for e, c in zip(ends, self.cached, strict=True)]
            self._forward(token_BS, chunk_ends, last_only=True)
            lacking = sum(span.tokens for span in self._lacking(ends))

    @torch.inference_mode()
    def refill(self, token_BS: Tensor, lengths: dict[int, int], kept: dict[int, int]) -> int:
        """Gives rows other texts of these lengths, and feeds all but the last token of each, in chunks.

        The rows are fed together, other rows nothing. At most `kept` tokens of a row stay in the cache: all
        of them, or none where the cache has no recurrent state after them. Returns how many did in all. A row
        of which none stay is cleared: no NaN of a damaged text may stay, as 0 times NaN is NaN.
        """
        assert self._cache is not None, "start() comes first"

        for row, length in lengths.items():
            has_other_scale = self._is_long(length) != self._is_long(self._given[row])
            staying = min(kept.get(row, 0), self.cached[row])
            self.cached[row] = 0 if has_other_scale else self._cache.resumable(row, staying)
            self._given[row] = length
            if not self.cached[row]:
                self._cache.clear(row)
        stayed = sum(self.cached[row] for row in lengths)

        # A model that pads computes all rows as wide as the longest: one row after the other is less work.
        groups = [[row] for row in lengths] if self.model.pads else [list(lengths)]
        for group in groups:
            ends = [lengths[row] - 1 if row in group else cached for row, cached in enumerate(self.cached)]
            self._prefill(token_BS, ends)
        return stayed

    def room(self, length: int) -> int:
        """Returns how many drafts of a text of this length the model can verify in one pass.

        Positions up to `limit` and those beyond it have two scales, and cannot share a pass.
        """
        if self.limit is None or length > self.limit:
            return UNLIMITED
        return self.limit - length

    def logits(self, token_BS: Tensor, ends: list[int], wanted: list[int]) -> Tensor:
        """Feeds up to `ends`; returns the logits of each row's last `wanted` positions, (B, W, V).

        They begin at column 0; columns after them are undefined. They come from one forward, however small
        the prefill chunk is:

            text     0 1 2 3 4 5 6 | drafts           ends = 10, wanted = 4
            cached   - - - - -                        the cache may lack `LAG` tokens and more
            fed                5 6 7 8 9              one pass; column 0 of the result is position 6
        """
        # The text of which drafts are verified ends with the token before the first of them, column 0's.
        self._begin(ends, [max(e - w, 0) + 1 for e, w in zip(ends, wanted, strict=True)])
        # What is lacking before that, more than LAG tokens, is fed first, for its keys alone.
        self._prefill(token_BS, [max(e - w - LAG + 1, 0) for e, w in zip(ends, wanted, strict=True)])
        pass_, logit_BWV = self._forward(token_BS, ends, last_only=False)

        # Rows that lacked more were fed more columns: of each, the first ones are skipped.
        first = [max(span.tokens - w, 0) for span, w in zip(pass_.spans, wanted, strict=True)]
        width = max(span.tokens - skipped for span, skipped in zip(pass_.spans, first, strict=True))
        if not any(first) and pass_.width == width:
            return logit_BWV

        # Column i of row b is its fed column first[b] + i; beyond the pass any will do.
        column_BW = torch.tensor(first)[:, None] + torch.arange(width)
        column_BW = sent(column_BW.clamp(max=pass_.width - 1), logit_BWV.device)
        return torch.take_along_dim(logit_BWV, column_BW[..., None], 1)

    def last_logits(self, token_BS: Tensor, ends: list[int]) -> Tensor:
        """Feeds all rows up to `ends`; returns the logits of what follows each row's end, (B, 1, V).

        It is for models that `cut`: others give those of the last column, which is padding in a short row.
        """
        self._begin(ends, ends)
        self._prefill(token_BS, [max(end - self.prefill_chunk, 0) for end in ends])
        _, logit_B1V = self._forward(token_BS, ends, last_only=True)
        return logit_B1V

    def parts(self, token_BS: Tensor, ends: list[int], size: int) -> Iterator[Tensor]:
        """Feeds up to `ends` in one pass; yields the logits of `size` columns after the other."""
        assert self._cache is not None, "start() comes first"
        starts = list(self.cached)
        self._begin(ends, [start + 1 for start in starts])
        self._prefill(token_BS, starts)  # of a text whose positions have the other scale from here on
        pass_ = Pass(
            spans=self._lacking(ends),
            device=self.model.device,
            given=tuple(self._given),
            part_width=size,
        )
        self.cached = ends
        self.forwards += 1
        yield from self.model.parts(self._input(token_BS, pass_), pass_, self._cache)

    def _lacking(self, ends: list[int]) -> tuple[RowSpan, ...]:
        """Returns what the cache lacks of each row up to its end."""
        missing = [max(end - cached, 0) for end, cached in zip(ends, self.cached, strict=True)]
        return all_rows(self.cached, missing)

    def _begin(self, ends: list[int], lengths: list[int]) -> None:
        """Fixes the scale of rows that are about to be fed, by the lengths of their texts.

        A row whose keys have the other scale begins anew.
        """
        for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            if end <= self.cached[row]:
                continue
            if self._is_long(length) != self._is_long(self._given[row]):
                self.cached[row] = 0
            if not self.cached[row]:
                self._given[row] = length

    def _is_long(self, length: int) -> bool:
        """Returns whether positions of a text of this length have the second scale."""
        return self.limit is not None and length > self.limit

    def roll_back(self, lengths: list[int]) -> None:
        """Keeps at most len-1 tokens of each row.

        The last token of a text is always fed again, so that there are logits of what follows it.
        """
        assert self._cache is not None, "start() comes first"
        kept = [min(cached, length - 1) for cached, length in zip(self.cached, lengths, strict=True)]
        self.cached = [self._cache.resumable(row, length) for row, length in enumerate(kept)]

    def _forward(self, token_BS: Tensor, ends: list[int], last_only: bool) -> tuple[Pass, Tensor]:
        """Feeds each row up to its end, in one pass; returns the pass, and the logits of its columns."""
        assert self._cache is not None, "start() comes first"
        spans = self._lacking(ends)
        fed = [span for span in spans if span.tokens]
        if last_only and len(fed) == 1:  # the other rows take no place in the pass
            spans = tuple(fed)

        pass_ = Pass(
            spans=spans,
            device=self.model.device,
            given=tuple(self._given[span.row] for span in spans),
            last_only=last_only,
        )
        logits = self.model.logits(self._input(token_BS, pass_), pass_, self._cache)
        self.cached = [max(end, cached) for end, cached in zip(ends, self.cached, strict=True)]
        self._observed(token_BS, fed)
        return pass_, logits

    def _observed(self, token_BS: Tensor, fed: list[RowSpan]) -> None:
        """Counts a pass, and shows it to the observer."""
        self.forwards += 1
        if self.observer is not None and self.model.tapped_TX is not None:
            self.observer(token_BS, fed, self.model.tapped_TX)

    def _input(self, token_BS: Tensor, pass_: Pass) -> Tensor:
        """Returns the tokens of one forward, (B, W).

        A draft's vocabulary may lack padding rows that the target has. If one is drawn, the draft is fed
        another token instead; it is still drawn from the distribution that the draft declares.
        """
        if len(pass_.spans) == 1:
            ((row, start, count),) = pass_.spans
            token_BW = token_BS[row : row + 1, start : start + count].to(pass_.device)
        else:  # all rows
            token_BW = torch.take_along_dim(token_BS.to(pass_.device), pass_.position_BW, 1)
        return token_BW.clamp(max=self.model.vocab - 1)
