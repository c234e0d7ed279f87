"""Attention over the cache, which a step reads once: attention.cpp, or triton on a GPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llama_ssp.models.kernels.build import load_library

if TYPE_CHECKING:
    from llama_ssp.models.attention import Places, Scores

OPERATOR = "llama_ssp::attend"


def attend(
    places: Places,
    query_THD: Tensor,
    keys_GND: Tensor,
    values_GND: Tensor,
    scores: Scores,
    sink_H: Tensor | None,
) -> Tensor:
    """Computes `models.attention.attend_rows`; a row's tokens stand together, at rising positions."""
    y_THD: Tensor = torch.ops.llama_ssp.attend(
        query_THD,
        keys_GND,
        values_GND,
        places.first_T,
        places.position_T,
        scores.scale,
        scores.window or 0,
        scores.softcap or 0.0,
        None if sink_H is None else sink_H.float(),
    )
    return y_THD


@functools.cache
def operators(device: str = "cpu") -> None:
    """Registers the operator in torch for this kind of device."""
    _define()
    if device == "cpu":
        load_library(Path(__file__).with_suffix(".cpp"))
    else:
        from llama_ssp.models.kernels import attention_triton

        torch.library.impl(OPERATOR, device)(attention_triton.attend)


@functools.cache
def _define() -> None:
    tensors = "Tensor query, Tensor keys, Tensor values, Tensor first, Tensor position"
    numbers = "float scale, int window, float softcap"
    torch.library.define(OPERATOR, f"({tensors}, {numbers}, Tensor? sinks) -> Tensor")
    torch.library.register_fake(OPERATOR, _shaped)


def _shaped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Returns a tensor of the shape that the operator gives: that of the queries."""
    return query.new_empty(query.shape)
