"""A trial of an architecture without a row in families.py: does it obey positions and masks?

An architecture that reads positions or causality off slot numbers would give wrong distributions in ragged
batches, without an error. So its logits, fed raggedly and in pieces, are compared with its own plain forward
pass. The texts are longer than every length in the config, as far as a quick start allows, because an
architecture may behave otherwise beyond such a length.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llama_ssp.errors import ModelError
from llama_ssp.models.causal_lm import OTHER, CausalModel
from llama_ssp.models.families import READ_TOGETHER_BEYOND
from llama_ssp.models.kv_cache import Feed

log = logging.getLogger(__name__)

SHORTEST, LONGEST = 64, 1024  # tokens of a trial's text
BEYOND = 1.25  # how far a text goes beyond a length
WORK = 10**11  # tokens times parameters that a text may cost, beyond the shortest: seconds on two cores
PIECES = (4, 2)  # tokens that are fed at a time, for each row
# The part of positions that may differ more in 16 bit, where rounding chooses another expert: far fewer than
# the positions behind a length that the text goes beyond.
STRAY = 0.05
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
READ_TOGETHER = "the architecture's logits depend on how many tokens are read together"


@torch.no_grad()
def require_faithful(causal: CausalModel) -> None:
    """Refuses a model whose ragged, cached logits differ from its plain ones."""
    config = causal.module.config
    where = f"{causal.name} ({config.model_type})"
    key = READ_TOGETHER_BEYOND.get(config.model_type, "")
    if key and int(getattr(config, key)) < causal.context:
        least = f"the model's context, {causal.context}, or more"
        raise ModelError(f"{READ_TOGETHER} beyond {key}", where, getattr(config, key), least, OTHER)
    longest = length_of(causal)
    log.info("%s: not a tested family; tried on %d of %d tokens", where, longest, causal.context)
    try:
        worst, scale, alone = _trial(causal, longest)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
        what = "the architecture cannot be run with explicit positions, masks and a ragged cache"
        raise ModelError(what, where, f"{type(error).__name__}: {str(error)[:160]}", fix=OTHER) from error
    allowed = TOLERANCE[causal.dtype] * max(1.0, scale)
    if not alone <= allowed:
        found = f"logits off by {alone:.3g} between {longest} tokens and half of them"
        raise ModelError(READ_TOGETHER, where, found, f"{allowed:.3g}", OTHER)
    if not worst <= allowed:
        what = "the architecture does not obey explicit positions and masks, so probabilities would be wrong"
        raise ModelError(what, where, f"logits off by {worst:.3g}", f"{allowed:.3g}", OTHER)


def length_of(causal: CausalModel) -> int:
    """The length of the trial's text: beyond every number in the config, within the bounds above."""
    most = min(LONGEST, max(SHORTEST, WORK // causal.parameters))
    beyond = [int(n * BEYOND) + 1 for n in _numbers(causal.module.config.to_dict())]
    return min(causal.context, max([SHORTEST, *(n for n in beyond if n <= most)]))


def _numbers(part: Any) -> Iterator[int]:
    """The whole numbers of a config; some of them are lengths."""
    if isinstance(part, int) and not isinstance(part, bool):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ():
        yield from _numbers(inner)


def _pieces(length: int, size: int) -> list[int]:
    """The lengths of a text's parts: small ones, most of it at once, small ones again."""
    parts, left = [], length
    for part in (size, size, max(length - 4 * size - 1, 0), size, size, 1):
        parts.append(min(part, left))
        left -= parts[-1]
    return parts


def _trial(causal: CausalModel, longest: int) -> tuple[float, float, float]:
    """How far ragged logits are off, the largest plain logit, and how far logits of half a text are off."""
    generator = torch.Generator().manual_seed(0)
    lengths = longest, longest // 2 + 1
    texts = [torch.randint(0, causal.vocab, (n,), generator=generator) for n in lengths]
    cache = causal.new_cache(len(texts), longest)
    plain = [_plain(causal, text) for text in texts]
    scale = max(float(logits.abs().max()) for logits in plain)
    half = _plain(causal, texts[0][: lengths[1]])
    alone = _worst(causal, [_off(half, plain[0][: len(half)])])
    padded = torch.stack([torch.nn.functional.pad(t, (0, longest - len(t))) for t in texts]).to(causal.device)
    done, off = [0] * len(texts), list[Tensor]()
    for count in zip(*map(_pieces, lengths, PIECES), strict=True):
        if not any(count):
            continue
        feed = Feed(tuple(done), count, longest, causal.device)
        token_BW = torch.take_along_dim(padded, feed.positions(), 1)
        logits = causal.logits(token_BW, feed, cache, last_only=False)
        off += [_off(logits[row, :n], plain[row][done[row] : done[row] + n]) for row, n in enumerate(count)]
        done = [d + n for d, n in zip(done, count, strict=True)]
    return _worst(causal, off), scale, alone


def _off(logits: Tensor, expected: Tensor) -> Tensor:
    """The largest difference at each position."""
    return (logits - expected).abs().amax(-1).double().cpu()


def _worst(causal: CausalModel, off: list[Tensor]) -> float:
    """The largest difference, in 16 bit without strays; NaN if there is one."""
    wide = causal.dtype in (torch.float32, torch.float64)
    return float(torch.cat(off).quantile(1.0 if wide else 1 - STRAY))


def _plain(causal: CausalModel, text: Tensor) -> Tensor:
    logits: Tensor = causal.module(input_ids=text[None].to(causal.device), use_cache=False).logits[0]
    return logits
