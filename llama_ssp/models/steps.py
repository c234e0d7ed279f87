"""A decoder with compiled steps: one program for all widths and all numbers of rows, all-reduces inside.

A step has any number of tokens, of one row or of several, at any positions, over a cache of any size: these
are sizes that the program knows nothing of, so that nothing is compiled twice. Long passes, such as prompts,
run eagerly: their time is that of the products.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llama_ssp.models import attention
from llama_ssp.models.decoder import Decoder, KeysValues
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels.attention import attend
from llama_ssp.models.slot_cache import SlotCache

Step = Callable[..., Tensor]
MOST = 128  # tokens of a step
NUMBERS = itertools.count()  # of the decoders that this process compiles
OPTIONS: dict[str, Any] = {
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False,
    "cpp.threads": 1,  # what is between two linear layers is too little to be divided
}  # fmt: skip


class SteppedModel(DecoderModel):
    """The same logits, up to rounding in 16 bit, in less time."""

    def __init__(self, decoder: Decoder, config: Any, name: str, vocab: int) -> None:
        super().__init__(decoder, config, name, vocab)
        self._step: Step | None = None

    def _run(self, token_T: Tensor, feed: attention.Feed, cache: SlotCache, last_only: bool) -> Tensor:
        if last_only or len(token_T) > MOST or feed.long_T is not None:
            return super()._run(token_T, feed, cache, last_only)
        arguments = token_T, feed.position_T, feed.first_T, cache.layers
        if self._step is None:
            self._step = compiled(self.decoder)
            arguments = marked(*arguments)
        return self._step(*arguments)


def compiled(decoder: Decoder) -> Step:
    """The program, made at the first call, with `marked` arguments.

    torch keeps programs by code, and no guards are checked that would tell decoders apart: each has code of
    its own. torch also keeps, by place in the source, which sizes and numbers differed from an earlier
    decoder's, and would take those for variables, unguarded: `dynamic=False` keeps it to the marked ones.
    """
    step: Any = traced(decoder)
    name = f"step_{next(NUMBERS)}"
    code = step.__code__.replace(co_name=name, co_qualname=name)
    own = types.FunctionType(code, step.__globals__, name, None, step.__closure__)
    options = dict(OPTIONS)  # torch.compile takes the filter out of the dictionary that it is given
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


def traced(decoder: Decoder) -> Step:
    """One step as torch traces it: everything that differs from call to call is an argument."""

    def step(token_T: Tensor, position_T: Tensor, first_T: Tensor, caches: list[KeysValues]) -> Tensor:
        logit_TV: Tensor = decoder(token_T, attention.Feed(position_T, first_T, attend), caches)[0]
        return logit_TV

    return step


def marked(
    token_T: Tensor, position_T: Tensor, first_T: Tensor, caches: list[KeysValues]
) -> tuple[Tensor, Tensor, Tensor, list[KeysValues]]:
    """The arguments, with sizes marked that may differ in the next call; a number of tokens may be 1."""
    for tensor in (token_T, position_T, first_T):
        torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id="T")
    for layer in caches:
        for tensor in layer:
            torch._dynamo.decorators.mark_unbacked(tensor, 1, shape_id="N")
    return token_T, position_T, first_T, caches
