"""A trial of a model that is not among the tested families: does it obey positions and masks?

An architecture that reads positions or causality off slot numbers would give wrong laws in ragged
batches without a word. So its logits, fed raggedly and in pieces, are compared with its own plain
forward pass.
"""

from __future__ import annotations

import torch

from llama_ssp.cache import Feed
from llama_ssp.errors import ModelError
from llama_ssp.load.causal import CausalModel

LENGTHS, PIECES = (13, 7), (4, 2)  # a row: how long its text is, and how much of it is fed at a time
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


def require_faithful(causal: CausalModel) -> None:
    """Refuses a model whose ragged, cached logits differ from its plain ones."""
    where = f"{causal.name} ({causal.module.config.model_type})"
    try:
        worst, scale = _trial(causal)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
        raise ModelError(
            "the architecture cannot be run with explicit positions, masks and a ragged cache", where=where,
            found=f"{type(error).__name__}: {str(error)[:160]}", fix="choose another architecture",
        ) from error  # fmt: skip
    allowed = TOLERANCE[causal.dtype] * max(1.0, scale)
    if not worst <= allowed:
        raise ModelError(
            "the architecture does not obey explicit positions and masks, so its laws would be wrong",
            where=where, found=f"logits off by {worst:.3g}", allowed=f"{allowed:.3g}",
            fix="choose another architecture",
        )  # fmt: skip


def _trial(causal: CausalModel) -> tuple[float, float]:
    """How far ragged logits are from plain ones, and how large these are."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, causal.vocab, (n,), generator=generator) for n in LENGTHS]
    cache = causal.new_cache(len(texts), max(LENGTHS))
    done = [0] * len(texts)
    worst = torch.zeros((), dtype=torch.float64)  # a tensor, because its maximum keeps a NaN
    plain = [_plain(causal, text) for text in texts]
    scale = max(float(logits.abs().max()) for logits in plain)
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        count = tuple(min(p, len(t) - d) for p, d, t in zip(PIECES, done, texts, strict=True))
        feed = Feed(tuple(done), count, max(LENGTHS), causal.device)
        padded = [torch.nn.functional.pad(t, (0, max(LENGTHS) - len(t))) for t in texts]
        token_BW = torch.take_along_dim(torch.stack(padded).to(causal.device), feed.positions(), 1)
        logits = causal.logits(token_BW, feed, cache, last_only=False)
        for row, n in enumerate(count):
            expected = plain[row][done[row] : done[row] + n]
            if n:
                worst = torch.maximum(worst, (logits[row, :n] - expected).abs().max().double().cpu())
        done = [d + n for d, n in zip(done, count, strict=True)]
    return float(worst), scale


@torch.inference_mode()
def _plain(causal: CausalModel, text: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = causal.module(input_ids=text[None].to(causal.device), use_cache=False).logits[0]
    return logits
