"""A mixture of experts: each token goes through the few that a router chooses.

The loop over the chosen experts depends on the tokens, so for torch.compile it is one operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighed."""

    top_k: int
    normed: bool  # the weights of the chosen sum to one
    after: bool = False  # weights are a softmax over the chosen alone


class Experts(nn.Module):
    """Router, and experts with stacked weights: up (E, 2F, H) is gate and up, down (E, H, F)."""

    def __init__(
        self, router: nn.Module, up_EFH: Tensor, down_EHF: Tensor, activation: Activation, routing: Routing,
        biases: tuple[Tensor, Tensor | None] | None = None, reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.router, self.activation, self.routing, self.reduce = router, activation, routing, reduce
        self.up, self.down = (nn.Parameter(weight, requires_grad=False) for weight in (up_EFH, down_EHF))
        up_bias, down_bias = biases or (None, None)
        self.up_bias = None if up_bias is None else nn.Parameter(up_bias, requires_grad=False)
        self.down_bias = None if down_bias is None else nn.Parameter(down_bias, requires_grad=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        weight_TK, expert_TK = self._chosen(x_TH)
        y_TH = torch.zeros_like(x_TH)
        for expert in expert_TK.unique().tolist():
            token_C, place_C = torch.where(expert_TK == expert)
            y_CH = self._expert(x_TH[token_C], expert) * weight_TK[token_C, place_C, None]
            y_TH.index_add_(0, token_C, y_CH.to(y_TH.dtype))
        return y_TH if self.reduce is None else self.reduce(y_TH)

    def _chosen(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts."""
        logit_TE = self.router(x_TH)
        if self.routing.after:
            logit_TK, expert_TK = logit_TE.topk(self.routing.top_k, -1)
            return logit_TK.softmax(-1), expert_TK
        weight_TK, expert_TK = logit_TE.float().softmax(-1).topk(self.routing.top_k, -1)
        if self.routing.normed:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return weight_TK.to(x_TH.dtype), expert_TK

    def _expert(self, x_CH: Tensor, number: int) -> Tensor:
        up, down = (None if bias is None else bias[number] for bias in (self.up_bias, self.down_bias))
        gate, wide = functional.linear(x_CH, self.up[number], up).chunk(2, -1)
        return functional.linear(self.activation(gate) * wide, self.down[number], down)


class ClampedExperts(Experts):
    """Experts as gpt-oss has them: both halves are clamped, and the gate is x sigmoid(alpha x)."""

    alpha: float
    limit: float

    def _expert(self, x_CH: Tensor, number: int) -> Tensor:
        assert self.up_bias is not None and self.down_bias is not None
        gate, wide = functional.linear(x_CH, self.up[number], self.up_bias[number]).chunk(2, -1)
        gate, wide = gate.clamp(max=self.limit), wide.clamp(-self.limit, self.limit)
        wide = (wide + 1) * gate * torch.sigmoid(gate * self.alpha)
        return functional.linear(wide, self.down[number], self.down_bias[number])
