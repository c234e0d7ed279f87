"""Compares a model's compiled steps with its eager ones, and makes a small model to try that on."""

import itertools
import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from llama_ssp.config import MADE_FAMILY, Dtype, ModelConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DistributedError
from llama_ssp.models.assemble import decoder, wanted
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.linear import Kernels, LayerFormat
from llama_ssp.models.loader import stepped
from llama_ssp.models.passes import Pass, all_rows
from llama_ssp.models.sharding import Cut
from llama_ssp.models.steps import SteppedModel, has_kernels
from llama_ssp.models.synthetic import config_for

# How far logits may be off, as a share of the largest: compiled steps round less often than eager ones.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-5}
PASSED = ""


@torch.inference_mode()
def difference(
    model: SteppedModel, widths: Iterable[int], rows: Iterable[int], steps: int, slack: int = 1, room: int = 0
) -> str:
    """Why compiled steps give other logits than eager ones over the same tokens; PASSED if they do not.

    Each has a cache of its own. Eager steps, with their sums over ranks, come between the compiled ones.
    Caches with `room` for so many tokens are those that a run will have, one after the other.
    """
    rounding = TOLERANCE[model.dtype]
    caches = list[KVCache]()
    reason = PASSED
    for count, width in itertools.product(rows, widths):
        if room:
            caches.clear()  # the next one takes its memory
        caches.append(model.new_cache(count, max(room, steps * width), width - 1))
        eager_cache = DecoderModel.new_cache(model, count, steps * width, width - 1)
        numbers = torch.Generator().manual_seed(width)
        before_BWV = None
        for step in range(steps):  # all of them, whatever is found: other ranks wait in their sums
            token_BW = torch.randint(model.vocab, (count, width), generator=numbers).to(model.device)
            spans = all_rows([step * width] * count, [width] * count)
            pass_ = Pass(spans=spans, device=model.device)
            compiled_BWV = model.logits(token_BW, pass_, caches[-1]).float()
            with model.eagerly():
                eager_BWV = model.logits(token_BW, pass_, eager_cache).float()
            top = float(eager_BWV.abs().max())
            off = float((compiled_BWV - eager_BWV).abs().max()) / top
            if reason == PASSED and not off <= slack * rounding:
                reason = f"step {step + 1} of {width} tokens in {count} rows: logits are off by {off:.2g} of "
                reason += f"the largest, {slack * rounding:.2g} is allowed"
            if before_BWV is not None and float((compiled_BWV - before_BWV).abs().max()) <= rounding * top:
                reason = reason or "other tokens have the same logits"
            before_BWV = compiled_BWV
    return reason


class RandomWeights:
    """Weights by name, so that all that a layer writes reaches the logits."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self.shapes = shapes
        self._dtype = dtype

    def read(self, name: str, cut: Cut | None) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:  # a norm
            whole = torch.ones(shape)
        else:
            numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=numbers) / math.sqrt(shape[-1])
        return taken(whole, cut).to(self._dtype)


def small_model(dtype: Dtype, device: torch.device, ranks: Ranks) -> SteppedModel:
    """This rank's part of a Llama of two layers with random weights; raises DistributedError if eager."""
    heads = 2 * max(4, ranks.world), max(4, ranks.world), 64
    n_heads, n_kv_heads, head_dim = heads
    shape = ModelConf(
        name="trial",
        family=MADE_FAMILY,
        n_layers=2,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dim=1024,
        ffn=2048,
        vocab=4096,
        context=1024,
    )
    if not has_kernels(shape.name, dtype, device, heads):
        raise DistributedError("there is no kernel for compiled steps", where=str(device))
    config = config_for(shape)
    form = LayerFormat(dtype=dtype, device=device, kernels=Kernels.all)
    part = decoder(config, RandomWeights(wanted(config), form.numbers), ranks, form)
    return stepped(device)(part, config, shape.name, ranks)
