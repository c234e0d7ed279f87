"""Linear attention by a Gated DeltaNet: a layer keeps a state of one size, however long the text is.

Of each head of values the state S is a matrix, (D, E). A token with key k, value v, decay g <= 0 and beta in
(0, 1) changes it, and its query q reads it:

    S  <-  exp(g) S                          it forgets
    S  <-  S + k (beta (v - k S))^T          it corrects what it has for this key
    y   =  q S

Some tokens at once give the same. With G_i the sum of g up to token i of a row, and S_0 the state before it:

    u_i  =  beta_i (v_i - exp(G_i) k_i S_0 - sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j)
    y_i  =  exp(G_i) q_i S_0  +  sum over j <= i of exp(G_i - G_j) (q_i . k_j) u_j
    S_i  =  exp(G_i) S_0      +  sum over j <= i of exp(G_i - G_j) k_j u_j^T

The first line is a triangular system. `delta_rule` is all of this, for tokens of several rows, too: each sees
those of its own row. Eager passes call it row by row, in chunks; compiled steps once for all rows.

Queries, keys and values come from a short convolution along the text. Queries and keys have a norm of 1.

Suffixes of shapes as in decoder.py and kv_cache.py; H heads of values, D numbers of a key, E of a value.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.models.attention import Places
from llama_ssp.models.experts import activation_of
from llama_ssp.models.kv_cache import LayerCache, in_ring

CHUNK = 64  # tokens of a prompt that are computed at once
EPSILON = 1e-6  # of the norms of queries and keys
DELTA_ARGUMENTS = (
    "Tensor query_THD, Tensor key_THD, Tensor value_THE, Tensor decay_TH, Tensor beta_TH, "
    "Tensor is_seen_TT, Tensor before_THDE"
)


def delta_rule(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THE: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    is_seen_TT: Tensor,
    before_THDE: Tensor,
    wanted: int,
) -> tuple[Tensor, Tensor]:
    """Returns what the tokens read, (T, H, E), and the states after the last `wanted` of them.

    `is_seen_TT` says which tokens each one sees: those of its row up to itself. `before_THDE` has the state
    before each token's row; of one row it may be one state, (1, H, D, E).
    """
    query_HTD, key_HTD, value_HTE = (part.transpose(0, 1) for part in (query_THD, key_THD, value_THE))
    old_HTE = _read(key_HTD, before_THDE)

    # What is not a number stays in its row: 0 times NaN, of another row, is NaN.
    checked = (query_HTD, key_HTD, value_HTE, old_HTE)
    numbers = torch.stack([part.sum((0, 2)) for part in checked] + [decay_TH.sum(1), beta_TH.sum(1)])
    is_damaged_T = ~numbers.isfinite().all(0)
    damage_T = torch.where((is_seen_TT & is_damaged_T).any(1), torch.nan, 0.0).to(decay_TH.dtype)
    query_HTD, key_HTD, value_HTE, old_HTE = (
        part.masked_fill(is_damaged_T[:, None], 0.0) for part in checked
    )
    decay_TH, beta_TH = (part.masked_fill(is_damaged_T[:, None], 0.0) for part in (decay_TH, beta_TH))

    # Sums of decays, of each row alone: what other rows hold changes no bit.
    sum_TH = is_seen_TT.to(decay_TH.dtype) @ decay_TH
    sum_HT = sum_TH.T
    between_HTT = (sum_HT[:, :, None] - sum_HT[:, None, :]).masked_fill(~is_seen_TT, -torch.inf).exp()
    fades_HT1 = (sum_HT.exp() + damage_T)[..., None]
    beta_HT1 = beta_TH.T[..., None]

    system_HTT = beta_HT1 * (key_HTD @ key_HTD.mT) * between_HTT  # its diagonal counts as 1
    new_HTE = value_HTE - old_HTE * sum_HT.exp()[..., None]
    u_HTE = torch.linalg.solve_triangular(system_HTT, beta_HT1 * new_HTE, upper=False, unitriangular=True)
    y_HTE = _read(query_HTD, before_THDE) * fades_HT1 + (query_HTD @ key_HTD.mT * between_HTT) @ u_HTE

    # One product for all states that are wanted: (H, N D, T) (H, T, E).
    heads, tokens, size = key_HTD.shape
    weight_HNT = between_HTT[:, tokens - wanted :]
    key_HNDT = weight_HNT[:, :, None, :] * key_HTD.mT[:, None]
    written_HNDE = (key_HNDT.reshape(heads, -1, tokens) @ u_HTE).view(heads, wanted, size, -1)
    left_NHDE = before_THDE[-wanted:] * fades_HT1.transpose(0, 1)[tokens - wanted :, :, :, None]
    return y_HTE.transpose(0, 1).contiguous(), (left_NHDE + written_HNDE.transpose(0, 1)).contiguous()


def _read(x_HTD: Tensor, state_THDE: Tensor) -> Tensor:
    """Returns the products of each token with its state, (H, T, E)."""
    if len(state_THDE) == 1:
        return x_HTD @ state_THDE[0]
    y_TH1E = x_HTD.transpose(0, 1)[:, :, None] @ state_THDE
    return y_TH1E[:, :, 0].transpose(0, 1)


@torch.library.custom_op(
    "llama_ssp::delta_step", mutates_args=(), schema=f"({DELTA_ARGUMENTS}) -> (Tensor, Tensor)"
)
def delta_step(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THE: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    is_seen_TT: Tensor,
    before_THDE: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns `delta_rule` with the state after every token; for torch.compile it is one operator."""
    return delta_rule(
        query_THD,
        key_THD,
        value_THE,
        decay_TH,
        beta_TH,
        is_seen_TT,
        before_THDE,
        wanted=len(query_THD),
    )


@delta_step.register_fake
def _(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THE: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    is_seen_TT: Tensor,
    before_THDE: Tensor,
) -> tuple[Tensor, Tensor]:
    return value_THE.new_empty(value_THE.shape), before_THDE.new_empty(before_THDE.shape)


class DeltaNet(nn.Module):
    """Computes the linear attention of this rank's heads."""

    def __init__(
        self,
        *,
        inputs: nn.Module,
        output: nn.Module,
        kernel_CK: Tensor,
        decay_H: Tensor,
        step_H: Tensor,
        norm_E: Tensor,
        key_heads: int,
        key_dim: int,
        activation: str,
        epsilon: float,
    ) -> None:
        """`inputs` makes queries, keys, values, gates, betas and decays, one after the other.

        `kernel_CK` is the convolution's; its last number is of the token itself. `decay_H` is the logarithm
        of how fast a head forgets, and `step_H` is added to what a token says of that.
        """
        super().__init__()
        self.inputs = inputs
        self.output = output
        self.kernel = nn.Parameter(kernel_CK, requires_grad=False)
        self.decay = nn.Parameter(decay_H, requires_grad=False)
        self.step = nn.Parameter(step_H, requires_grad=False)
        self.norm = nn.Parameter(norm_E, requires_grad=False)
        self.key_heads = key_heads
        self.key_dim = key_dim
        self.activation = activation_of(activation)
        self.activation_name = activation
        self.epsilon = epsilon
        heads = len(decay_H)
        keys = key_heads * key_dim
        values = heads * len(norm_E)
        self.sizes = [2 * keys + values, values, heads, heads]
        self.parts = [keys, keys, values]
        self.tail = kernel_CK.shape[1] - 1

    def extra_repr(self) -> str:  # a program's file is named by it, too
        return f"{self.key_heads} {self.key_dim} {self.activation_name} {self.epsilon}"

    def forward(self, x_TH: Tensor, _turns: object, cache: LayerCache, places: Places) -> Tensor:
        """Returns what the tokens read, (T, H) of the model's width; writes inputs and states."""
        mixed_TC, gate, beta_TH, decay_TH = self.inputs(x_TH).split(self.sizes, -1)
        wide = cache[1].dtype
        beta_TH = torch.sigmoid(beta_TH.to(wide))
        speed_H = torch.exp(self.decay.to(wide))
        decay_TH = -speed_H * functional.softplus(decay_TH.to(wide) + self.step.to(wide))
        if places.rows:
            y_THE = self._by_row(mixed_TC, decay_TH, beta_TH, cache, places)
        else:
            y_THE = self._at_once(mixed_TC, decay_TH, beta_TH, cache, places)

        y_THE = y_THE * torch.rsqrt(y_THE.square().mean(-1, keepdim=True) + self.epsilon)
        gate_THE = gate.to(wide).unflatten(-1, (-1, len(self.norm)))
        y_THE = y_THE * self.norm.to(wide) * functional.silu(gate_THE)
        y_TH: Tensor = self.output(y_THE.flatten(1).to(x_TH.dtype))
        return y_TH

    def _by_row(
        self, mixed_TC: Tensor, decay_TH: Tensor, beta_TH: Tensor, cache: LayerCache, places: Places
    ) -> Tensor:
        """Reads one row after the other, in chunks."""
        inputs_MC, states_SHDE, _ = cache
        device = mixed_TC.device
        ring = places.ring
        size = ring + self.tail
        parts = []
        begin = 0
        for first, start, count in places.rows:
            row = first // places.capacity
            own = slice(begin, begin + count)
            known = min(start, self.tail)
            window_WC = torch.cat(
                [
                    mixed_TC.new_zeros(self.tail - known, mixed_TC.shape[1]),
                    inputs_MC[in_ring(row, start - known, known, size, device)],
                    mixed_TC[own],
                ]
            )
            taps = [window_WC[self.tail - back : self.tail - back + count] for back in range(self.tail + 1)]
            query, key, value = self._convolved(taps, states_SHDE.dtype)
            kept = min(count, size)
            inputs_MC[in_ring(row, start + count - kept, kept, size, device)] = window_WC[-kept:]

            if start:
                state_1HDE = states_SHDE[in_ring(row, start - 1, 1, ring, device)]
            else:
                state_1HDE = torch.zeros_like(states_SHDE[:1])
            least = count - min(count, ring)  # states after earlier tokens are not kept
            for at in range(0, count, CHUNK):
                chunk = slice(at, min(at + CHUNK, count))
                tokens = slice(begin + at, begin + chunk.stop)
                tokens_here = chunk.stop - at
                kept = max(0, chunk.stop - max(at, least))
                is_seen_WW = torch.ones(tokens_here, tokens_here, dtype=torch.bool, device=device).tril()
                y_WHE, states_NHDE = delta_rule(
                    query[chunk],
                    key[chunk],
                    value[chunk],
                    decay_TH[tokens],
                    beta_TH[tokens],
                    is_seen_WW,
                    state_1HDE,
                    wanted=max(1, kept),
                )
                parts.append(y_WHE)
                state_1HDE = states_NHDE[-1:]
                if kept:
                    kept_places = in_ring(row, start + chunk.stop - kept, kept, ring, device)
                    states_SHDE[kept_places] = states_NHDE
            begin += count
        return torch.cat(parts)

    def _at_once(
        self, mixed_TC: Tensor, decay_TH: Tensor, beta_TH: Tensor, cache: LayerCache, places: Places
    ) -> Tensor:
        """Reads all rows at once, by tensors alone; a row has no more tokens than its ring.

        Pads of graphs stand after the last row, and are one more.
        """
        inputs_MC, states_SHDE, place_3 = cache
        capacity, ring, rows = place_3.unbind()
        position_T = places.position_T
        first_T = places.first_T
        row_T = torch.minimum(first_T // capacity, rows)
        number_T = torch.arange(mixed_TC.shape[0], device=mixed_TC.device)
        is_seen_TT = (first_T[:, None] == first_T) & (number_T[:, None] >= number_T)
        before_T = is_seen_TT.sum(-1) - 1  # tokens of the row, in this pass
        start_T = position_T - before_T

        # Of an input `back` tokens ago: from this pass, or from the cache, or before the text.
        size = ring + self.tail
        taps = [mixed_TC]
        for back in range(1, self.tail + 1):
            here_TC = mixed_TC[(number_T - back).clamp(min=0)]
            kept_TC = inputs_MC[row_T * size + (position_T - back) % size]
            earlier_TC = torch.where((position_T >= back)[:, None], kept_TC, 0)
            taps.append(torch.where((before_T >= back)[:, None], here_TC, earlier_TC))
        query, key, value = self._convolved(taps, states_SHDE.dtype)

        before_THDE = states_SHDE[row_T * ring + (start_T - 1) % ring]
        before_THDE = torch.where((start_T > 0)[:, None, None, None], before_THDE, 0)
        y_THE, states_THDE = delta_step(query, key, value, decay_TH, beta_TH, is_seen_TT, before_THDE)
        inputs_MC[row_T * size + position_T % size] = mixed_TC
        states_SHDE[row_T * ring + position_T % ring] = states_THDE
        return y_THE  # type: ignore[no-any-return]

    def _convolved(self, taps: list[Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, a key for each head of values, of inputs 0, 1, ... tokens ago."""
        kernel_CK = self.kernel.to(wide)
        mixed_TC = taps[0].to(wide) * kernel_CK[:, -1]
        for back, tap_TC in enumerate(taps[1:], start=1):
            mixed_TC = mixed_TC + tap_TC.to(wide) * kernel_CK[:, -1 - back]
        activated: Any = self.activation(mixed_TC)
        query, key, value = activated.split(self.parts, -1)

        value_THE = value.unflatten(-1, (-1, len(self.norm)))
        copies = value_THE.shape[1] // self.key_heads
        query_THD, key_THD = (
            _normed(part.unflatten(-1, (-1, self.key_dim))).repeat_interleave(copies, 1)
            for part in (query, key)
        )
        return query_THD * self.key_dim**-0.5, key_THD, value_THE


def _normed(x_THD: Tensor) -> Tensor:
    return x_THD * torch.rsqrt(x_THD.square().sum(-1, keepdim=True) + EPSILON)
