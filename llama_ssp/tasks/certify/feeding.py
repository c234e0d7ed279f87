"""Feeds finished texts to a model once more, from an empty cache: its own logits, as regular sampling has
them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.models.interface import Model
from llama_ssp.speculative.model_runner import ModelRunner

Text = tuple[
    Sequence[int], int, int
]  # its tokens, how many are the prompt's, how many last ones are looked at


def fed(
    model: Model, texts: Sequence[Text], order: Sequence[int], width: int, rows: int, chunk: int
) -> list[Tensor]:
    """Returns each text's logits for its last `count` tokens and the one after, (count + 1, V), on the CPU.

    Prompts are prefilled as in a run, without their last token; the rest is fed `width` tokens at a time, or,
    if that is 0, prefilled, too, as far as no logits are asked for. `rows` texts are fed at a time, in this
    order. Every rank of the model takes part.
    """
    logits: dict[int, Tensor] = {}
    for first in range(0, len(order), rows):
        part = order[first : first + rows]
        lengths = [len(texts[n][0]) for n in part]
        starts = [length - texts[n][2] - 1 for n, length in zip(part, lengths, strict=True)]  # of the logits
        token_BS = pad_sequence([torch.tensor(texts[n][0]) for n in part], True).to(model.device)
        runner, kept = ModelRunner(model, chunk), [list[Tensor]() for _ in part]
        runner.start(len(part), max(lengths))
        runner.prefill(token_BS, [texts[n][1] - 1 for n in part] if width else starts)
        while runner.cached != lengths:
            cached = runner.cached
            ends = [min(c + (width or length), length) for c, length in zip(cached, lengths, strict=True)]
            fresh = [end - c for end, c in zip(ends, cached, strict=True)]
            logit_BWV = runner.logits(token_BS, ends, fresh)
            for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
                if fresh[row] and end > start:
                    skipped = max(start - cached[row], 0)
                    kept[row].append(logit_BWV[row, skipped : fresh[row]].cpu())
        for n, blocks in zip(part, kept, strict=True):
            logit_WV = torch.cat(blocks)
            logits[n] = logit_WV.to(torch.promote_types(logit_WV.dtype, torch.float32))
    return [logits[n] for n in range(len(texts))]


def largest_of(values: Sequence[float]) -> float:
    """Returns the maximum; NaN if there is one (which `max` would pass over)."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)
