"""Compares what CUDA graphs of functions give with what the functions themselves give, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self
from unittest.mock import patch

import torch
from bars import Bar, counted, most, needs
from torch import Tensor

from llama_ssp.models.cuda_graphs import GraphedModel

ROUNDING = 1e-6  # of the largest number: scans of a GPU sum in another order each time


class Replays:
    """Counts calls of `GraphedModel.replay` while it is entered, those without a graph, and wrong results.

    Each call is also made without a graph. Models that are asked for their `replay` before are not seen.
    """

    def __init__(self) -> None:
        self.by_graph = 0
        self.without = 0
        self.differing = 0
        self._replay: Any = GraphedModel.replay
        self._patch: Any = None

    def __enter__(self) -> Self:
        def compared(model: GraphedModel, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
            return self._compared(model, function, given)

        self._patch = patch.object(GraphedModel, "replay", compared)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _compared(self, model: GraphedModel, function: Callable[..., Tensor], given: Any) -> Tensor:
        result: Tensor = self._replay(model, function, *given)
        key = (function, *((tensor.shape, tensor.dtype) for tensor in given))
        if model._functions.get(key, function) is function:
            self.without += 1
            return result

        self.by_graph += 1
        expected = function(*given)
        if result.is_floating_point():
            off = (result - expected).abs().max()
            self.differing += not bool(off <= ROUNDING * expected.abs().max())
        else:
            self.differing += not torch.equal(result, expected)
        return result

    def bars(self, what: str) -> Iterator[Bar]:
        """Yields how many results differ, and how many calls had no graph; none may."""
        if not torch.cuda.is_available():
            yield needs(f"{what}: what graphs give, and what their functions give")
            return
        yield counted(self.differing, self.by_graph, f"{what}: results of graphs unlike those of functions")
        yield most(f"{what}: filters, draws and decisions without a graph", self.without, 0)
        yield Bar(f"{what}: filters, draws and decisions by a graph", self.by_graph, 1)
