"""A mixture of experts: each token goes through the few that a router chooses.

Which experts run depends on the tokens, so for torch.compile all of them together are one operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.models.kernels.build import triton_runs
from llama_ssp.models.kernels.expert_stacks import DTYPES, NUMBERS, Stack, outputs_of, product, products
from llama_ssp.models.kernels.kernel_sizes import MOST_PAIRS
from llama_ssp.models.kernels.probe import experts_run
from llama_ssp.models.linear import Reduce
from llama_ssp.models.shape import Groups

ARGUMENTS = (
    "Tensor x_TH, Tensor weight_TK, Tensor expert_TK, Tensor[] up, Tensor[] down, str up_how, "
    "str down_how, Tensor? up_bias, Tensor? down_bias, str activation, float alpha, float limit"
)
GROUPED = (9, 10)  # generations of GPUs for which torch has a kernel of grouped products
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighed.

    With `groups` their scores are sigmoids of the router's logits, and what chooses them is a score and a
    correction. A token first chooses groups, by the sum of the two best in a group, then experts in these.
    Weights are the scores of the chosen, times the groups' scale.
    """

    top_k: int
    normed: bool  # the weights of the chosen sum to one
    after: bool = False  # weights are a softmax over the chosen alone
    groups: Groups | None = None


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the function between an MLP's layers: torch's own, or one that transformers is imported for."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    from transformers.activations import ACT2FN

    activation: Callable[[Tensor], Tensor] = ACT2FN[name]
    return activation


@dataclass(frozen=True)
class Gate:
    """How an expert's gate and the other half make what goes into its second layer.

    With a limit, as in gpt-oss, both are clamped, and the gate is x sigmoid(alpha x).
    """

    activation: str
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gate: Tensor, wide: Tensor) -> Tensor:
        if not self.limit:
            return activation_of(self.activation)(gate) * wide
        gate = gate.clamp(max=self.limit)
        wide = wide.clamp(-self.limit, self.limit)
        return (wide + 1) * gate * torch.sigmoid(gate * self.alpha)


class Layers(NamedTuple):
    """Holds the two layers of all experts, and what is between them. Biases are (E, 2F) and (E, H)."""

    up: Stack
    down: Stack
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate: Gate

    @staticmethod
    def of(
        up: list[Tensor],
        down: list[Tensor],
        up_how: str,
        down_how: str,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        alpha: float,
        limit: float,
    ) -> Layers:
        """Returns the layers that the operator's arguments describe, in the order of ARGUMENTS."""
        return Layers(
            up=Stack(up, up_how),
            down=Stack(down, down_how),
            up_bias=up_bias,
            down_bias=down_bias,
            gate=Gate(activation=activation, alpha=alpha, limit=limit),
        )


@torch.library.custom_op("llama_ssp::experts", mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor")
def apply(
    x_TH: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    up: list[Tensor],
    down: list[Tensor],
    up_how: str,
    down_how: str,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """Returns the weighted sum of each token's experts, (T, H); weights as of `Stack`."""
    layers = Layers.of(
        up=up,
        down=down,
        up_how=up_how,
        down_how=down_how,
        up_bias=up_bias,
        down_bias=down_bias,
        activation=activation,
        alpha=alpha,
        limit=limit,
    )
    return _one_by_one(x_TH, weight_TK, expert_TK, layers)


def _one_by_one(x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, layers: Layers) -> Tensor:
    """Computes expert after expert, of those that are chosen, each for its C tokens."""
    y_TH = torch.zeros_like(x_TH)
    outputs = outputs_of(layers.up, layers.down)  # 2F
    for expert in torch.unique(expert_TK).tolist():
        token_C, place_C = torch.where(expert_TK == expert)
        wide_CF = product(x_TH[token_C], layers.up, layers.up_bias, expert, outputs)
        gate_CF, other_CF = wide_CF.chunk(2, -1)  # (C, F) each
        y_CH = product(layers.gate(gate_CF, other_CF), layers.down, layers.down_bias, expert, x_TH.shape[-1])
        y_TH.index_add_(0, token_C, (y_CH * weight_TK[token_C, place_C, None]).to(y_TH.dtype))
    return y_TH


def grouped(x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, layers: Layers) -> Tensor:
    """Sorts the pairs of a token and an expert by the expert, so that a product has all tokens of one.

    pair      (0,2) (0,5) (1,2) (1,0)      of tokens 0 and 1, two experts each
    sorted    (1,0) (0,2) (1,2) (0,5)      experts end at 1, 1, 3, 3, 3, 4

    On GPUs of other generations than GROUPED the host waits for the choice.
    """
    up_EFH = layers.up.parts[0]
    down_EHF = layers.down.parts[0]
    expert_P, order_P = expert_TK.flatten().sort(stable=True)
    numbers_E = torch.arange(len(up_EFH), device=expert_P.device)
    ends_E = torch.searchsorted(expert_P, numbers_E, right=True).int()

    x_PH = x_TH[order_P // expert_TK.shape[1]]
    wide_PF = functional.grouped_mm(x_PH, up_EFH.transpose(1, 2), offs=ends_E)
    if layers.up_bias is not None:
        wide_PF = wide_PF + layers.up_bias[expert_P]
    gate_PF, other_PF = wide_PF.chunk(2, -1)
    y_PH = functional.grouped_mm(layers.gate(gate_PF, other_PF), down_EHF.transpose(1, 2), offs=ends_E)
    if layers.down_bias is not None:
        y_PH = y_PH + layers.down_bias[expert_P]

    y_TKH = y_PH[order_P.argsort()].view(*expert_TK.shape, -1)  # in the order of the tokens again
    return (y_TKH * weight_TK[..., None]).sum(1)


def can_group(numbers: torch.dtype, up: Stack, down: Stack) -> bool:
    """Returns whether torch has a kernel for such products on this GPU: of bf16, in rows of 16 bytes.

    On GPUs of other generations its product is a loop over the experts, and the host waits for the choice.
    """
    weight = up.parts[0]
    if numbers is not torch.bfloat16 or up.how or down.how or weight.device.type != "cuda":
        return False
    in_rows = all(size % 8 == 0 for stack in (up, down) for size in stack.parts[0].shape[1:])
    return in_rows and torch.cuda.get_device_capability(weight.device)[0] in GROUPED


def waits_for_host(numbers: torch.dtype, up: Stack, down: Stack, pairs: int) -> bool:
    """Returns whether a GPU runs these experts one after the other, for pairs of a token and an expert.

    Then the host waits for the choice, and the step cannot be part of a graph. `numbers`: of the tokens.
    """
    many = pairs > MOST_PAIRS
    if many and can_group(numbers, up, down):
        return False
    if many and not all(stack.how == NUMBERS or stack.by_kernel for stack in (up, down)):
        return True  # the weights of each pair would be decoded
    if numbers not in DTYPES or not triton_runs():
        return True
    is_plain = up.how == NUMBERS or down.how == NUMBERS
    return is_plain and not experts_run(numbers, up.parts[0].device, many)


@apply.register_kernel("cuda")
def apply_on_gpu(
    x_TH: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    up: list[Tensor],
    down: list[Tensor],
    up_how: str,
    down_how: str,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """Waits for the choice of experts only where `waits_for_host` says so.

    Else a step can be part of a graph. Many tokens of bf16 go through torch's grouped product where it has a
    kernel, else through our own.
    """
    layers = Layers.of(
        up=up,
        down=down,
        up_how=up_how,
        down_how=down_how,
        up_bias=up_bias,
        down_bias=down_bias,
        activation=activation,
        alpha=alpha,
        limit=limit,
    )
    pairs = expert_TK.numel()
    if waits_for_host(x_TH.dtype, layers.up, layers.down, pairs):
        return _one_by_one(x_TH, weight_TK, expert_TK, layers)
    if pairs > MOST_PAIRS and can_group(x_TH.dtype, layers.up, layers.down):
        return grouped(x_TH, weight_TK, expert_TK, layers)

    expert_P = expert_TK.flatten()
    gate_PF, other_PF = products(x_TH, expert_P, layers.up, layers.up_bias).chunk(2, -1)
    y_PH = products(layers.gate(gate_PF, other_PF), expert_P, layers.down, layers.down_bias)
    y_TKH = y_PH.view(*expert_TK.shape, -1)
    return (y_TKH * weight_TK[..., None]).sum(1)


@apply.register_fake
def _(
    x_TH: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    up: list[Tensor],
    down: list[Tensor],
    up_how: str,
    down_how: str,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    return torch.empty_like(x_TH)


class GatedExperts(nn.Module):
    """Experts that all tokens go through, as one MLP, times a gate of each token."""

    def __init__(self, gate: nn.Linear, mlp: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.mlp = mlp

    def forward(self, x_TH: Tensor) -> Tensor:
        y_TH: Tensor = torch.sigmoid(self.gate(x_TH)) * self.mlp(x_TH)
        return y_TH


class Experts(nn.Module):
    """Router, and experts with stacked weights: up (E, 2F, H) is gate and up, down (E, H, F).

    `shared` are experts that all tokens go through, and `correction` (E) is added to what chooses experts.
    The weights of the chosen are multiplied by `scale` (E).
    Over ranks each has some of the F columns of every expert, and the first alone the bias of `down`. The
    router is on every rank, with the same input, so all choose the same experts.
    """

    correction: Tensor | None
    scale: Tensor | None

    def __init__(
        self,
        router: nn.Linear,
        layers: Layers,
        routing: Routing,
        reduce: Reduce | None,
        correction: Tensor | None = None,
        shared: nn.Module | None = None,
        scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.shared = shared
        self.register_buffer("correction", correction, persistent=False)
        self.gate = layers.gate
        self.routing = routing
        self.reduce = reduce
        self.hows = layers.up.how, layers.down.how
        self.up = _parameters(layers.up)
        self.down = _parameters(layers.down)
        others = {"up_bias": layers.up_bias, "down_bias": layers.down_bias, "scale": scale}
        for name, part in others.items():
            self.register_parameter(name, None if part is None else nn.Parameter(part, requires_grad=False))

    def extra_repr(self) -> str:
        """The name of a compiled step's file is made of it."""
        return f"{self.hows}"

    def waits_for_host(self, tokens: int) -> bool:
        """Returns whether a step of so many tokens waits on a GPU for the choice: it cannot be captured."""
        up_how, down_how = self.hows
        return waits_for_host(
            numbers=next(self.router.parameters()).dtype,
            up=Stack(list(self.up), up_how),
            down=Stack(list(self.down), down_how),
            pairs=tokens * self.routing.top_k,
        )

    def forward(self, x_TH: Tensor, seen_TH: Tensor | None = None) -> Tensor:
        """Returns the sum of each token's experts; the router sees `seen_TH`, else what experts are given."""
        weight_TK, expert_TK = self._chosen(x_TH if seen_TH is None else seen_TH)
        up_how, down_how = self.hows
        y_TH: Tensor = apply(
            x_TH,
            weight_TK,
            expert_TK,
            list(self.up),
            list(self.down),
            up_how,
            down_how,
            self.up_bias,
            self.down_bias,
            self.gate.activation,
            self.gate.alpha,
            self.gate.limit,
        )
        if self.shared is not None:
            y_TH = y_TH + self.shared(x_TH)
        return y_TH if self.reduce is None else self.reduce(y_TH)

    def _chosen(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and the numbers of each token's experts, (T, K) each."""
        if self.routing.groups is not None:
            return self._chosen_in_groups(x_TH, self.routing.groups)
        logit_TE = self.router(x_TH)
        if self.routing.after:
            logit_TK, expert_TK = logit_TE.topk(self.routing.top_k, -1)
            return logit_TK.softmax(-1), expert_TK
        weight_TK, expert_TK = logit_TE.float().softmax(-1).topk(self.routing.top_k, -1)
        if self.routing.normed:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        if self.scale is not None:
            weight_TK = weight_TK * self.scale[expert_TK].float()
        return weight_TK.to(x_TH.dtype), expert_TK

    def _chosen_in_groups(self, x_TH: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """Returns the same by sigmoids, which are computed in fp32."""
        score_TE = functional.linear(x_TH.float(), self.router.weight.float()).sigmoid()
        choice_TE = score_TE if self.correction is None else score_TE + self.correction
        if groups.chosen < groups.count:
            choice_TGE = choice_TE.view(-1, groups.count, choice_TE.shape[-1] // groups.count)
            group_TK = choice_TGE.topk(2, -1).values.sum(-1).topk(groups.chosen, -1).indices
            is_out_TG = torch.ones_like(choice_TGE[..., 0], dtype=torch.bool).scatter(-1, group_TK, False)
            choice_TE = choice_TGE.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1)

        expert_TK = choice_TE.topk(self.routing.top_k, -1).indices
        weight_TK = score_TE.gather(-1, expert_TK)
        if self.routing.normed:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return (weight_TK * groups.scale).to(x_TH.dtype), expert_TK


def _parameters(stack: Stack) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in stack.parts)
