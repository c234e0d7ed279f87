"""A transformer decoder: tokens, positions and a cache in, logits out.

The tokens of a pass stand in one dimension, T, one row of the batch after the other: there is no padding, and
a step looks the same for one row and for several. `Places` says where each token stands (attention.py). What
differs between architectures is in the shape (families.py, shape.py); what is cut over ranks, and in which
number format weights are, in the linear layers (linear.py). All of it is traced as a whole by torch.compile.

Suffixes of shapes: T tokens, R those whose logits are wanted, H numbers of the residual stream (x_TH) or
heads of queries (query_THD), G KV heads, D numbers of a head, N slots of the cache, V vocabulary.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.models.attention import Places, Rotary, Scores, rotate
from llama_ssp.models.cache_layout import CacheShape
from llama_ssp.models.kv_cache import Caches, LayerCache
from llama_ssp.models.linear import Embedding, Head, Reduce
from llama_ssp.models.shape import Growth

Taps = Collection[int]  # blocks whose inputs are kept
Turns = dict[str, tuple[Tensor, Tensor]]  # cosines and sines by kind of rotary positions
Activation = Callable[[Tensor], Tensor]


class Norm(nn.Module):
    """An RMS norm, computed in fp32, or with `centred` a layer norm, computed in the format of its input.

    The result has the format of the weight. `offset` is of RMS norms, `bias` of layer norms. A layer norm of
    heads whose weight is (heads, D) has no bias.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool, offset: int = 0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.epsilon = epsilon
        self.centred = centred
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if self.centred and self.weight.ndim > 1:
            wide = functional.layer_norm(x.float(), self.weight.shape[-1:], None, None, self.epsilon)
            return (wide * self.weight.float()).to(self.weight.dtype)
        if self.centred:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            y = functional.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.epsilon)
            return y.to(self.weight.dtype)
        return (normed(x, self.epsilon) * (self.offset + self.weight.float())).to(self.weight.dtype)


def normed(x: Tensor, epsilon: float) -> Tensor:
    """Returns x over the root of its mean square, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


class HeadNorms(nn.Module):
    """Norms of queries and of keys, of every head alone."""

    def __init__(self, query: Norm, key: Norm) -> None:
        super().__init__()
        self.query = query
        self.key = key

    def forward(self, query_THD: Tensor, key_TGD: Tensor) -> tuple[Tensor, Tensor]:
        return self.query(query_THD), self.key(key_TGD)


class WholeNorms(nn.Module):
    """RMS norms of queries and of keys, over all heads of a token.

    Of a model over ranks, `reduce` adds the squares of all ranks, and weights are those of this rank's heads.
    `sizes`: how many numbers are squared, of queries and of keys; a key counts on every rank that holds it.
    """

    def __init__(
        self, weights: tuple[Tensor, Tensor], sizes: tuple[int, int], epsilon: float, reduce: Reduce | None
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
        self.sizes = sizes
        self.epsilon = epsilon
        self.reduce = reduce

    def forward(self, query_THD: Tensor, key_TGD: Tensor) -> tuple[Tensor, Tensor]:
        wide = query_THD.float(), key_TGD.float()
        squares_2T = torch.stack([part.square().sum((1, 2)) for part in wide])
        if self.reduce is not None:
            squares_2T = self.reduce(squares_2T)
        query, key = (
            (part * torch.rsqrt(squares_2T[i] / size + self.epsilon)[:, None, None] * weight.float())
            for i, (part, size, weight) in enumerate(zip(wide, self.sizes, self.weights, strict=True))
        )
        return query.to(query_THD.dtype), key.to(key_TGD.dtype)


class HeadLayout(NamedTuple):
    """Describes this rank's heads; `sizes` are outputs of the fused layer: queries, keys and values.

    With gates they stand between the queries and the keys, as many as queries. Without values keys, before
    their norm, are values.
    """

    sizes: list[int]
    head_dim: int
    scores: Scores
    rotary: str | None
    in_pairs: bool = False  # rotary positions turn neighbours
    norm_turned: bool = False  # norms come after the rotary positions
    growth: Growth | None = None  # of queries, with their position
    value_epsilon: float | None = None  # of the norm of values, which has no weight
    gated: bool = False


class Attention(nn.Module):
    """Computes the attention of this rank's heads."""

    def __init__(
        self,
        qkv: nn.Module,
        output: nn.Module,
        heads: HeadLayout,
        norms: nn.Module | None,
        sink_H: Tensor | None,
    ) -> None:
        super().__init__()
        self.qkv = qkv
        self.output = output
        self.norms = norms
        self.sizes = heads.sizes
        self.gated = heads.gated
        self.head_dim = heads.head_dim
        self.scores = heads.scores
        self.rotary = heads.rotary
        self.in_pairs = heads.in_pairs
        self.norm_turned = heads.norm_turned
        self.growth = heads.growth
        self.value_epsilon = heads.value_epsilon
        self.sinks = None if sink_H is None else nn.Parameter(sink_H, requires_grad=False)

    def forward(self, x_TH: Tensor, turns: Turns, cache: LayerCache, places: Places) -> Tensor:
        query, gate = self.remember(x_TH, turns, cache, places)
        keys_GND, values_GND = cache
        y_THD = places.attend(places, query, keys_GND, values_GND, self.scores, self.sinks)
        y = y_THD.flatten(1)
        if gate is not None:
            y = y * torch.sigmoid(gate)
        y_TH: Tensor = self.output(y)
        return y_TH

    def remember(
        self, x_TH: Tensor, turns: Turns, cache: LayerCache, places: Places
    ) -> tuple[Tensor, Tensor | None]:
        """Writes the tokens' keys and values into the cache.

        Returns their queries, (T, H, D), and gates of what they read, (T, H D); None without gates.
        """
        parts = list(self.qkv(x_TH).split(self.sizes, -1))
        gate = parts.pop(1) if self.gated else None
        query, key, *others = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        value = others[0] if others else key
        if self.value_epsilon is not None:
            value = normed(value, self.value_epsilon).to(value.dtype)
        if self.norms is not None and not self.norm_turned:
            query, key = self.norms(query, key)
        if self.rotary is not None:
            query = rotate(query, turns[self.rotary], self.in_pairs)
            key = rotate(key, turns[self.rotary], self.in_pairs)
        if self.norms is not None and self.norm_turned:
            query, key = self.norms(query, key)
        if self.growth is not None:
            query = query * grown(self.growth, places.position_T)[:, None, None].to(query.dtype)
        keys_GND, values_GND = cache
        keys_GND[:, places.slot_T] = key.transpose(0, 1)
        values_GND[:, places.slot_T] = value.transpose(0, 1)
        return query, gate


def grown(growth: Growth, position_T: Tensor) -> Tensor:
    """Returns the factors of queries at these positions, in fp32."""
    step_T = torch.floor(position_T / growth.length)
    return 1 + growth.beta * torch.log(1 + step_T)


class Xielu(nn.Module):
    """xIELU, computed in fp32, with two numbers that were trained, a for x > 0 and b.

    Above 0 it is softplus(a) x^2 + beta x, else (beta + softplus(b)) (exp(min(x, limit)) - 1 - x) + beta x.
    """

    beta: Tensor
    limit: Tensor

    def __init__(self, above: Tensor, below: Tensor, beta: Tensor, limit: Tensor) -> None:
        super().__init__()
        self.above = nn.Parameter(above, requires_grad=False)
        self.below = nn.Parameter(below, requires_grad=False)
        self.register_buffer("beta", beta, persistent=False)
        self.register_buffer("limit", limit, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        above = functional.softplus(self.above.float())
        below = self.beta + functional.softplus(self.below.float())
        negative = (torch.expm1(torch.minimum(wide, self.limit)) - wide) * below + self.beta * wide
        return torch.where(wide > 0, above * wide * wide + self.beta * wide, negative).to(x.dtype)


class Mlp(nn.Module):
    """Two linear layers with an activation; `gated`: the first gives a gate and what it multiplies."""

    def __init__(self, up: nn.Module, down: nn.Module, activation: Activation, gated: bool) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.activation = activation
        self.gated = gated

    def forward(self, x_TH: Tensor) -> Tensor:
        wide = self.up(x_TH)
        if self.gated:
            gate, wide = wide.chunk(2, -1)
            wide = self.activation(gate) * wide
        else:
            wide = self.activation(wide)
        y_TH: Tensor = self.down(wide)
        return y_TH


class ExpertsBranch(nn.Module):
    """Experts next to a dense MLP: both read a block's stream, and what each gives is normed and added.

    The router reads the stream by a norm of its own; what that gives is divided by the root of its width.
    """

    def __init__(
        self, *, experts: nn.Module, before: Norm, router: Norm, after: Norm, after_dense: Norm
    ) -> None:
        super().__init__()
        self.experts = experts
        self.before = before
        self.router = router
        self.after = after
        self.after_dense = after_dense

    def forward(self, x_TH: Tensor, dense_TH: Tensor) -> Tensor:
        """Returns the sum for the stream x_TH and what the dense MLP has made of it."""
        seen_TH = self.router(x_TH) * x_TH.shape[-1] ** -0.5
        routed_TH = self.experts(self.before(x_TH).to(dense_TH.dtype), seen_TH.to(dense_TH.dtype))
        result_TH: Tensor = self.after_dense(dense_TH) + self.after(routed_TH)
        return result_TH


class Block(nn.Module):
    """One layer; a norm that the architecture lacks is an nn.Identity. Attention may be linear (delta.py).

    `parallel`: attention and MLP both read x_TH, not one after the other. Where the MLP has no norm of its
    own, it reads attention's normed input. A parallel block has no norm after the MLP and no scale.
    `branch`: experts next to the MLP; `factor`: of all that the block gives, (1,).
    """

    factor: Tensor | None

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        norms: dict[str, nn.Module],
        scale: float,
        parallel: bool,
        branch: ExpertsBranch | None = None,
        factor: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.branch = branch
        self.register_buffer("factor", factor, persistent=False)
        self.attention: Any = attention
        self.mlp = mlp
        self.norms = nn.ModuleDict(norms)
        self.residual_scale = scale
        self.parallel = parallel
        self.shared_norm = isinstance(norms["before_mlp"], nn.Identity)

    def forward(self, x_TH: Tensor, turns: Turns, cache: LayerCache, places: Places) -> Tensor:
        norms = self.norms
        narrow = cache[0].dtype  # of the linear layers' inputs and outputs; x_TH itself is in fp32
        normed_TH = norms["before_attention"](x_TH).to(narrow)
        attended_TH = norms["after_attention"](self.attention(normed_TH, turns, cache, places))
        if self.parallel:
            if not self.shared_norm:
                normed_TH = norms["before_mlp"](x_TH).to(narrow)
            return x_TH + attended_TH + self.mlp(normed_TH)  # type: ignore[no-any-return]

        x_TH = self._added(x_TH, attended_TH)
        y_TH = self.mlp(norms["before_mlp"](x_TH).to(narrow))
        if self.branch is not None:
            y_TH = self.branch(x_TH, y_TH)
        x_TH = self._added(x_TH, norms["after_mlp"](y_TH))
        return x_TH if self.factor is None else x_TH * self.factor

    def _added(self, x_TH: Tensor, change_TH: Tensor) -> Tensor:
        if self.residual_scale != 1.0:
            change_TH = change_TH * self.residual_scale
        return x_TH + change_TH


class Decoder(nn.Module):
    """A whole model, or one rank's part; every rank gets all logits."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        position_table: Tensor | None,
        position_offset: int,
        rotaries: dict[str, Rotary],
        blocks: list[Block],
        norm: nn.Module,
        head: Head,
        cache_shapes: list[CacheShape],
        logit_divisor: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.norm = norm
        self.head = head
        self.positions = None if position_table is None else nn.Parameter(position_table, requires_grad=False)
        self.position_offset = position_offset
        self.rotaries = nn.ModuleDict(rotaries)
        self.blocks = nn.ModuleList(blocks)
        self.logit_divisor = logit_divisor
        self.logit_softcap = logit_softcap
        # The residual stream stays in fp32: rounded to 16 bit after each layer, it would change best tokens.
        self.residual_dtype = torch.promote_types(embedding.weight.dtype, torch.float32)
        self.cache_shapes = cache_shapes

    def forward(
        self, token_T: Tensor, places: Places, caches: Caches, wanted_R: Tensor | None = None, taps: Taps = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns logits (R, V) of the tokens `wanted_R`, or of all, and the states that are tapped.

        These are what the blocks `taps` are given, (T, H) each, in the order of the blocks. The number of
        blocks names what the last one gives.

        Keys and values of the tokens are written into the caches, and the states after them.
        """
        x_TH = self.embed(token_T, places)
        turns = {kind: rotary(places) for kind, rotary in self.rotaries.items()}
        tapped = [x_TH] if 0 in taps else []
        for number, (block, cache) in enumerate(zip(self.blocks, caches, strict=True), start=1):
            x_TH = block(x_TH, turns, cache, places)
            if number in taps:
                tapped.append(x_TH)
        x_RH = x_TH if wanted_R is None else x_TH[wanted_R]
        return self.to_logits(x_RH), tapped

    def embed(self, token_T: Tensor, places: Places) -> Tensor:
        """Returns what the first block is given, (T, H)."""
        x_TH: Tensor = self.embedding(token_T).to(self.residual_dtype)
        if self.positions is not None:
            x_TH = x_TH + self.positions[places.position_T + self.position_offset]
        return x_TH

    def to_logits(self, x_RH: Tensor) -> Tensor:
        """Returns the logits, (R, V), of what the last block gives."""
        logit_RV: Tensor = self.head(self.norm(x_RH))
        if self.logit_divisor != 1.0:
            logit_RV = logit_RV / self.logit_divisor
        if self.logit_softcap is not None:
            logit_RV = torch.tanh(logit_RV / self.logit_softcap) * self.logit_softcap
        return logit_RV
