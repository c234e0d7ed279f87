"""A trial of a model that is not among the tested families: does it obey positions and masks?

An architecture that reads positions or causality off slot numbers would give wrong distributions in ragged
batches without a word. So its logits, fed raggedly and in pieces, are compared with its own plain
forward pass. The texts are longer than every length that the config names, as far as a quick start
allows, because an architecture may behave otherwise beyond such a length.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from llama_ssp.errors import ModelError
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.families import READ_TOGETHER_BEYOND
from llama_ssp.models.kv_cache import Feed

log = logging.getLogger(__name__)

SHORTEST, LONGEST, BEYOND = (
    64,
    1024,
    1.25,
)  # of a trial's text, in tokens; and how far beyond a length it goes
WORK = 10**11  # tokens times parameters that a text may cost, beyond the shortest: seconds on two cores
PIECES = (4, 2)  # a row: how many tokens are fed at a time
# Of positions that may be further off in 16 bit, where experts are chosen by a hair: far fewer than those
# behind a length that the text goes beyond.
STRAY = 0.05
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
READ_TOGETHER = "the architecture's logits depend on how many tokens are read together"


def require_faithful(causal: CausalModel) -> None:
    """Refuses a model whose ragged, cached logits differ from its plain ones."""
    config = causal.module.config
    where = f"{causal.name} ({config.model_type})"
    key = READ_TOGETHER_BEYOND.get(config.model_type, "")
    if key and int(getattr(config, key)) < causal.context:
        raise ModelError(
            f"{READ_TOGETHER} beyond {key}", where=where, found=getattr(config, key),
            allowed=f"the model's context, {causal.context}, or more", fix="choose another architecture",
        )  # fmt: skip
    longest = length_of(causal)
    log.info("%s: not a tested family; tried on %d of %d tokens", where, longest, causal.context)
    try:
        worst, scale, alone = _trial(causal, longest)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
        raise ModelError(
            "the architecture cannot be run with explicit positions, masks and a ragged cache", where=where,
            found=f"{type(error).__name__}: {str(error)[:160]}", fix="choose another architecture",
        ) from error  # fmt: skip
    allowed = TOLERANCE[causal.dtype] * max(1.0, scale)
    if not alone <= allowed:
        raise ModelError(
            READ_TOGETHER, where=where, fix="choose another architecture",
            found=f"logits off by {alone:.3g} between {longest} tokens and half of them",
            allowed=f"{allowed:.3g}",
        )  # fmt: skip
    if not worst <= allowed:
        raise ModelError(
            "the architecture does not obey explicit positions and masks, so its laws would be wrong",
            where=where, found=f"logits off by {worst:.3g}", allowed=f"{allowed:.3g}",
            fix="choose another architecture",
        )  # fmt: skip


def length_of(causal: CausalModel) -> int:
    """How long the trial's text is: beyond every number in the config, within the bounds above."""
    most = min(LONGEST, max(SHORTEST, WORK // causal.parameters))
    beyond = [int(n * BEYOND) + 1 for n in _numbers(causal.module.config.to_dict())]
    context = (
        causal.scale.limit if causal.scale else causal.context
    )  # plain passes have one scale for all rows
    return min(context, max([SHORTEST, *(n for n in beyond if n <= most)]))


def _numbers(part: Any) -> Iterator[int]:
    """The whole numbers of a config; some of them are lengths."""
    if isinstance(part, int) and not isinstance(part, bool):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ():
        yield from _numbers(inner)


def _pieces(length: int, size: int) -> list[int]:
    """A text's parts: small ones, most of it at once, small ones again."""
    parts, left = [], length
    for part in (size, size, max(length - 4 * size - 1, 0), size, size, 1):
        parts.append(min(part, left))
        left -= parts[-1]
    return parts


def _trial(causal: CausalModel, longest: int) -> tuple[float, float, float]:
    """How far ragged logits are from plain ones, how large these are, and how far those of half the text."""
    generator = torch.Generator().manual_seed(0)
    lengths = longest, longest // 2 + 1
    texts = [torch.randint(0, causal.vocab, (n,), generator=generator) for n in lengths]
    cache = causal.new_cache(len(texts), longest)
    done = [0] * len(texts)
    off: list[torch.Tensor] = []
    plain = [_plain(causal, text) for text in texts]
    scale = max(float(logits.abs().max()) for logits in plain)
    half = _plain(causal, texts[0][: lengths[1]])
    alone = _worst(causal, [_off(half, plain[0][: len(half)])])
    padded = torch.stack([torch.nn.functional.pad(t, (0, longest - len(t))) for t in texts]).to(causal.device)
    for count in zip(*map(_pieces, lengths, PIECES), strict=True):
        if not any(count):
            continue
        feed = Feed(tuple(done), count, longest, causal.device)
        token_BW = torch.take_along_dim(padded, feed.positions(), 1)
        logits = causal.logits(token_BW, feed, cache, last_only=False)
        for row, n in enumerate(count):
            expected = plain[row][done[row] : done[row] + n]
            off.append(_off(logits[row, :n], expected))
        done = [d + n for d, n in zip(done, count, strict=True)]
    return _worst(causal, off), scale, alone


def _off(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far off each position is, at its worst token."""
    return (logits - expected).abs().amax(-1).double().cpu()


def _worst(causal: CausalModel, off: list[torch.Tensor]) -> float:
    """The worst position, in 16 bit but for strays; a NaN stays one."""
    wide = causal.dtype in (torch.float32, torch.float64)
    return float(torch.cat(off).quantile(1.0 if wide else 1 - STRAY))


def _plain(causal: CausalModel, text: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = causal.module(input_ids=text[None].to(causal.device), use_cache=False).logits[0]
    return logits
