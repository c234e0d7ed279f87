"""A trial of an architecture without a row in families.py: does it obey positions and masks?

An architecture that reads positions or causality off slot numbers would give wrong distributions in ragged
batches, without an error. So its logits, fed raggedly and in pieces, are compared with its own plain forward
pass.
"""

import logging

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.errors import ModelError
from llama_ssp.models.causal_lm import OTHER, CausalModel
from llama_ssp.models.families import READ_TOGETHER_BEYOND
from llama_ssp.models.passes import Pass, all_rows

log = logging.getLogger(__name__)

LENGTH = 64  # tokens of the longer of two texts: a large model on two cores reads them in seconds
# How many tokens of each text a pass feeds: few, most of them, few again. They end in different passes.
PIECES = ((4, 4, 47, 4, 4, 1), (2, 2, 24, 2, 2, 1))
# The part of positions that may differ more in 16 bit, where rounding chooses another expert.
STRAY = 0.05
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@torch.no_grad()
def require_faithful(causal: CausalModel) -> None:
    """Refuses a model whose ragged, cached logits differ from its plain ones."""
    config = causal.module.config
    where = f"{causal.name} ({config.model_type})"
    key = READ_TOGETHER_BEYOND.get(config.model_type)
    if key and int(getattr(config, key)) < causal.context:
        raise ModelError(
            f"the architecture's logits depend on how many tokens are read together beyond {key}",
            where=where,
            found=getattr(config, key),
            allowed=f"the model's context, {causal.context}, or more",
            fix=OTHER,
        )
    log.info("%s: not a tested family; tried on %d of %d tokens", where, LENGTH, causal.context)
    try:
        difference, scale = _trial(causal)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
        raise ModelError(
            "the architecture cannot be run with explicit positions, masks and a ragged cache",
            where=where,
            found=f"{type(error).__name__}: {str(error)[:160]}",
            fix=OTHER,
        ) from error
    allowed = TOLERANCE[causal.dtype] * max(1.0, scale)
    if not difference <= allowed:  # which NaN is not
        raise ModelError(
            "the architecture does not obey explicit positions and masks, so probabilities would be wrong",
            where=where,
            found=f"logits off by {difference:.3g}",
            allowed=f"{allowed:.3g}",
            fix=OTHER,
        )


def _trial(causal: CausalModel) -> tuple[float, float]:
    """Returns how far ragged logits are off, in 16 bit without strays, and the largest plain logit."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, causal.vocab, (sum(sizes),), generator=generator) for sizes in PIECES]
    texts = [text[: causal.context].to(causal.device) for text in texts]
    plain = [causal.module(input_ids=text[None], use_cache=False).logits[0] for text in texts]
    padded_BS = torch.stack([pad(text, (0, LENGTH - len(text))) for text in texts])
    cache = causal.new_cache(len(texts), LENGTH)
    done = [0] * len(texts)
    differences = list[Tensor]()
    for sizes in zip(*PIECES, strict=True):
        count = [min(n, len(text) - start) for n, text, start in zip(sizes, texts, done, strict=True)]
        if not any(count):
            break
        pass_ = Pass(spans=all_rows(done, count), device=causal.device)
        token_BW = torch.take_along_dim(padded_BS, pass_.position_BW, 1)
        logit_BWV = causal.logits(token_BW, pass_, cache)
        for row, (start, n) in enumerate(zip(done, count, strict=True)):
            off_WV = (logit_BWV[row, :n] - plain[row][start : start + n]).abs()
            differences.append(off_WV.amax(-1).double().cpu())
        done = [start + n for start, n in zip(done, count, strict=True)]
    exact = causal.dtype in (torch.float32, torch.float64)
    difference = torch.cat(differences).quantile(1.0 if exact else 1 - STRAY)
    return float(difference), max(float(logits.abs().max()) for logits in plain)
