"""Attention of a few new tokens over the cache on a CPU, by attention.cpp: the cache is read once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llama_ssp.models.kernels.build import load_library

if TYPE_CHECKING:
    from llama_ssp.models.attention import Feed, Scores

WIDEST_HEAD = 256  # numbers, as in attention.cpp


def attend(
    feed: Feed, query_THD: Tensor, keys_GND: Tensor, values_GND: Tensor, scores: Scores, sink_H: Tensor | None
) -> Tensor:
    """As `models.attention.attend_rows`; the tokens of a row stand together, at ascending positions."""
    y_THD: Tensor = torch.ops.llama_ssp.attend(
        query_THD, keys_GND, values_GND, feed.first_T, feed.position_T, scores.scale, scores.window or 0,
        scores.softcap or 0.0, sink_H,
    )  # fmt: skip
    return y_THD


@functools.cache
def operators() -> None:
    """Registers the operator in torch."""
    load_library(Path(__file__).with_suffix(".cpp"))
    torch.library.register_fake("llama_ssp::attend", lambda query, *_: torch.empty_like(query))
