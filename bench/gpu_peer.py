"""A Llama with a cache of fixed size, written the way gpt-fast is: the peer of a compiled step of one token.

torch compiles the step and captures it as a graph by itself (`mode="reduce-overhead"`). Only layers are here:
the time of a layer is the difference of two numbers of layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """Attention and feed-forward of one token; weights are random."""

    def __init__(self, dim: int, heads: int, ffn: int, slots: int) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * ffn, bias=False), nn.Linear(ffn, dim, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, slots, self.size))

    def forward(self, x_1TD: Tensor, place_T: Tensor, mask_1TS: Tensor, turn_TS: Tensor) -> Tensor:
        query, key, value = (
            each.view(1, -1, self.heads, self.size).transpose(1, 2)
            for each in self.qkv(self.norm(x_1TD)).chunk(3, -1)
        )
        query, key = turned(query, turn_TS), turned(key, turn_TS)
        self.keys[:, :, place_T] = key
        self.values[:, :, place_T] = value
        seen = functional.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask_1TS)
        x_1TD = x_1TD + self.o(seen.transpose(1, 2).reshape(x_1TD.shape))
        gate, up = self.gate_up(self.ffn_norm(x_1TD)).chunk(2, -1)
        return x_1TD + self.down(functional.silu(gate) * up)


def turned(x: Tensor, turn_TS: Tensor) -> Tensor:
    """Returns queries or keys with their positions; the first half of `turn_TS` are cosines."""
    cos, sin = turn_TS.chunk(2, -1)
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class StaticLlama(nn.Module):
    """Layers in turn; `step` is one token at a place of the cache."""

    def __init__(self, layers: int, dim: int, heads: int, ffn: int, slots: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, heads, ffn, slots) for _ in range(layers))
        angle_SP = torch.arange(slots)[:, None] / 10000 ** (torch.arange(0, dim // heads, 2) * heads / dim)
        self.register_buffer("turn_ST", torch.cat([angle_SP.cos(), angle_SP.sin()], -1))
        self.register_buffer("mask_SS", torch.ones(slots, slots, dtype=torch.bool).tril())

    def forward(self, x_1TD: Tensor, place_T: Tensor) -> Tensor:
        mask_1TS, turn_TS = self.mask_SS[None, place_T], self.turn_ST[place_T]
        for layer in self.layers:
            x_1TD = layer(x_1TD, place_T, mask_1TS, turn_TS)
        return x_1TD
