"""Attention over a cache, and rotary positions.

A pass has T tokens, of one row of the batch after the other. Of each, `position_T` is its place in the row's
text and `first_T` the row's first slot: slot first + p holds the key of position p. A query sees the slots of
its own row from its own position back, all of them or a window. Slots behind it are stale and are never read.

`Places.attend` is how: `attend_rows` by torch's own attention, for eager models (on a CPU those without
codes), prompts on a GPU (without soft caps and sinks) and as the reference, or `kernels.attention.attend`,
which reads the cache once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.models.families import family_of
from llama_ssp.models.passes import sent
from llama_ssp.models.shape import (
    ALL,
    FIXED_ALPHA,
    PROPORTIONAL,
    layer_config,
    rotary_kind,
    rotary_parameters,
    shape_of,
)


@dataclass(frozen=True)
class Scores:
    """How one layer's scores are made."""

    scale: float
    window: int | None = None
    softcap: float | None = None


Row = tuple[int, int, int]  # first slot, first position, number of tokens
Attend = Callable[["Places", Tensor, Tensor, Tensor, Scores, "Tensor | None"], Tensor]


@dataclass(kw_only=True)
class Places:
    """Where each token of a pass stands, as the tensors that compiled steps take; and how the tokens attend.

    The programs of compiled steps have no `rows`, and no sizes of the cache (kv_cache.py): `capacity` slots
    of a row, and a `ring` of states, or 0. `long_T` says which tokens have the second scale of positions;
    None: those at positions beyond its limit.
    """

    position_T: Tensor
    first_T: Tensor
    attend: Attend
    rows: tuple[Row, ...] = ()
    capacity: int = 0
    ring: int = 0
    long_T: Tensor | None = None
    masks: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)
    _slot_T: Tensor | None = None

    @property
    def slot_T(self) -> Tensor:
        """Where each token's key and value are written; who replays a graph does not ask for it."""
        if self._slot_T is None:  # no cached_property: torch.compile cannot trace it
            self._slot_T = self.first_T + self.position_T
        return self._slot_T

    @staticmethod
    def of(rows: list[Row], device: torch.device, attend: Attend | None = None) -> Places:
        """A row that is fed nothing is left out."""
        positions = [position for _, start, count in rows for position in range(start, start + count)]
        firsts = [first for first, _, count in rows for _ in range(count)]
        position_T, first_T = sent([positions, firsts], device)
        return Places(
            position_T=position_T,
            first_T=first_T,
            attend=attend or attend_rows,
            rows=tuple(row for row in rows if row[2]),
        )


def attend_rows(
    places: Places,
    query_THD: Tensor,
    keys_GND: Tensor,
    values_GND: Tensor,
    scores: Scores,
    sink_H: Tensor | None,
) -> Tensor:
    """Returns attention, (T, H, D), of the rows of `places.rows`, one after the other.

    Of a prompt torch's kernels know which slots a token does not see. Else there is a mask, and keys are not
    repeated: the queries of a group of heads are further queries of its KV head. Slots before the window of
    the row's first token are not read.
    """
    parts = []
    begin = 0
    plain = scores.softcap is None and sink_H is None
    has_groups = _kernel_has_groups(query_THD)
    for first, start, count in places.rows:
        query_WHD = query_THD[begin : begin + count]
        slots = slice(first + _least(start, scores.window), first + start + count)
        keys_GSD = keys_GND[:, slots]
        values_GSD = values_GND[:, slots]
        sees_all = scores.window is None or scores.window >= start + count
        if plain and sees_all and count > 1 and (has_groups or start == 0):
            parts.append(_attend_text(query_WHD, keys_GSD, values_GSD, scores.scale, has_groups))
        else:
            mask_WS = _mask(places, start, count, scores.window)
            parts.append(_attend_row(query_WHD, keys_GSD, values_GSD, mask_WS, scores, sink_H))
        begin += count
    return torch.cat(parts)


def attend_blocks(
    places: Places,
    query_THD: Tensor,
    keys_GND: Tensor,
    values_GND: Tensor,
    scores: Scores,
    sink_H: Tensor | None,
) -> Tensor:
    """Attends as `attend_rows` does, but each token also sees the later ones of its row."""
    parts = []
    begin = 0
    for first, start, count in places.rows:
        keys_GSD, values_GSD = (part[:, first : first + start + count] for part in (keys_GND, values_GND))
        query_WHD = query_THD[begin : begin + count]
        parts.append(_attend_row(query_WHD, keys_GSD, values_GSD, None, scores, sink_H))
        begin += count
    return torch.cat(parts)


def _attend_text(
    query_WHD: Tensor, keys_GSD: Tensor, values_GSD: Tensor, scale: float, has_groups: bool
) -> Tensor:
    """Returns attention of the last W tokens of S, each to those up to itself, (W, H, D).

    On a GPU there is no mask of W x S cells, which would grow with each chunk of a prompt.
    """
    if not has_groups:
        group = query_WHD.shape[1] // keys_GSD.shape[0]
        keys_GSD, values_GSD = (part.repeat_interleave(group, 0) for part in (keys_GSD, values_GSD))
    width = len(query_WHD)
    slots = keys_GSD.shape[1]
    seen: Tensor | None = None
    if width < slots and query_WHD.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes a second

        seen = cast(Tensor, causal_lower_right(width, slots))  # names the mask, and does not make it
    elif width < slots:
        seen = query_WHD.new_ones(width, slots, dtype=torch.bool).tril(slots - width)

    y_1HWD = functional.scaled_dot_product_attention(
        query_WHD.transpose(0, 1)[None],
        keys_GSD[None],
        values_GSD[None],
        seen,
        is_causal=seen is None,
        scale=scale,
        enable_gqa=has_groups,
    )
    return y_1HWD[0].transpose(0, 1)


def _kernel_has_groups(query_THD: Tensor) -> bool:
    """Returns whether torch's causal kernel reads the keys of a group of heads once.

    On GPUs that of 16 bit does.
    """
    if query_THD.device.type != "cuda":
        return True
    return query_THD.element_size() == 2 and torch.cuda.get_device_capability(query_THD.device) >= (8, 0)


def _attend_row(
    query_WHD: Tensor,
    keys_GSD: Tensor,
    values_GSD: Tensor,
    mask_WS: Tensor | None,
    scores: Scores,
    sink_H: Tensor | None,
) -> Tensor:
    """Returns attention of a row's W tokens to its S slots, (W, H, D); a mask of None hides nothing.

    The queries of a group of heads are Q = heads / groups * W queries of its KV head.
    """
    width, heads, size = query_WHD.shape
    groups = keys_GSD.shape[0]
    folded_GQD = query_WHD.view(width, groups, -1, size).permute(1, 2, 0, 3).reshape(groups, -1, size)
    copies = heads // groups  # not kept: of many rows with long texts they would be large
    mask_QS = mask_WS if mask_WS is None or copies == 1 else mask_WS.repeat(copies, 1)
    if scores.softcap is None and sink_H is None:
        y_1GQD = functional.scaled_dot_product_attention(
            folded_GQD[None], keys_GSD[None], values_GSD[None], mask_QS, scale=scores.scale
        )
        y_GQD = y_1GQD[0]
    else:
        score_GQS = (folded_GQD @ keys_GSD.transpose(1, 2)).float() * scores.scale
        if scores.softcap is not None:
            score_GQS = torch.tanh(score_GQS / scores.softcap) * scores.softcap
        if mask_QS is not None:
            score_GQS = score_GQS.masked_fill(~mask_QS, -torch.inf)
        if sink_H is not None:
            sink_GQ1 = sink_H.view(groups, -1, 1).float().repeat_interleave(width, 1)
            score_GQS = torch.cat([score_GQS, sink_GQ1], -1)
        prob_GQS = score_GQS.softmax(-1)[..., : keys_GSD.shape[1]]
        y_GQD = prob_GQS.to(values_GSD.dtype) @ values_GSD
    return y_GQD.view(groups, -1, width, size).permute(2, 0, 1, 3).reshape(width, heads, size)


def _mask(places: Places, start: int, count: int, window: int | None) -> Tensor | None:
    """Returns which slots each of a row's tokens sees, (W, S); None: all of them. Made once a pass."""
    key = start, count, window
    if key not in places.masks:
        places.masks[key] = None
        if count > 1:
            device = places.position_T.device
            position_W1 = torch.arange(start, start + count, device=device)[:, None]
            slot_S = torch.arange(_least(start, window), start + count, device=device)
            mask_WS = slot_S <= position_W1
            if window is not None:
                mask_WS &= slot_S > position_W1 - window
            places.masks[key] = mask_WS
    return places.masks[key]


def _least(start: int, window: int | None) -> int:
    """Returns the least position that a token at `start` sees."""
    return 0 if window is None else max(0, start + 1 - window)


class Rotary(nn.Module):
    """Cosines and sines of rotary positions; of two scales (longrope), the text of a token decides which."""

    frequency: Tensor
    long_frequency: Tensor | None

    def __init__(
        self, frequency_R: Tensor, factor: float, long_R: Tensor | None = None, limit: int = 0
    ) -> None:
        super().__init__()
        self.register_buffer("frequency", frequency_R, persistent=False)
        self.register_buffer("long_frequency", long_R, persistent=False)
        self.factor = factor
        self.limit = limit

    def forward(self, places: Places) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, (T, 1, R) each, for pairs of numbers of all heads."""
        position_T11 = places.position_T[:, None, None]
        frequency = self.frequency
        if self.long_frequency is not None:
            long_T = places.long_T
            if long_T is None:
                long_T = places.position_T >= self.limit
            frequency = torch.where(long_T[:, None, None], self.long_frequency, frequency)
        angle_T1R = position_T11.float() * frequency
        return angle_T1R.cos() * self.factor, angle_T1R.sin() * self.factor

    @staticmethod
    def of(config: Any, kind: str) -> Rotary:
        """Returns the table of one kind of layer."""
        parameters = rotary_parameters(config)[kind]
        family = family_of(config.model_type)
        rope_type = rotary_kind(parameters, family)
        shape = shape_of(config)
        is_full = any(block.full for block in shape.blocks if block.rotary == kind)
        head_dim = shape.heads_of(is_full).head_dim
        if rope_type == PROPORTIONAL:
            return Rotary(frequency_R=proportional(parameters, head_dim), factor=1.0)
        if rope_type in ("default", FIXED_ALPHA):
            size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            if size % 2 and size == head_dim:
                raise ValueError(f"rotary positions need an even head size, and it is {head_dim}")
            exponent_R = torch.arange(0, size, 2).float() / size
            base = parameters["rope_theta"]
            if rope_type == FIXED_ALPHA:
                base *= parameters["alpha"] ** (size / (size - 2))
            return Rotary(frequency_R=1.0 / base**exponent_R, factor=1.0)

        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        init = ROPE_INIT_FUNCTIONS[rope_type]
        layer = {} if kind == ALL else {"layer_type": kind}
        own = layer_config(config, family, is_full)
        frequency_R, factor = init(own, torch.device("cpu"), **layer)
        if rope_type != "longrope":
            return Rotary(frequency_R=frequency_R, factor=factor)
        limit = int(parameters["original_max_position_embeddings"])
        long_R, _ = init(own, torch.device("cpu"), seq_len=limit + 1, **layer)
        return Rotary(frequency_R=frequency_R, factor=factor, long_R=long_R, limit=limit)


def proportional(parameters: dict[str, Any], head_dim: int) -> Tensor:
    """Returns frequencies of which only the first are not 0, as many as the parameters say, (D / 2,)."""
    turned = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
    exponent_R = torch.arange(0, 2 * turned, 2).float() / head_dim
    frequency_R = torch.zeros(head_dim // 2)
    frequency_R[:turned] = 1.0 / parameters["rope_theta"] ** exponent_R
    factor: float = parameters.get("factor", 1.0)
    return frequency_R / factor


def rotate(x_THD: Tensor, turn: tuple[Tensor, Tensor], in_pairs: bool = False) -> Tensor:
    """Turns the first 2R numbers of each head: number i with number R + i, or `in_pairs` 2i with 2i + 1."""
    cos, sin = turn
    size = cos.shape[-1]
    turned = x_THD[..., : 2 * size]
    rest = x_THD[..., 2 * size :]
    first = turned[..., :size]
    second = turned[..., size:]
    if in_pairs:
        first = turned[..., 0::2]
        second = turned[..., 1::2]
    turned_first = (first * cos - second * sin).to(x_THD.dtype)
    turned_second = (second * cos + first * sin).to(x_THD.dtype)
    if in_pairs:
        turned_THD = torch.stack([turned_first, turned_second], -1).flatten(-2)
        return torch.cat([turned_THD, rest], -1)
    return torch.cat([turned_first, turned_second, rest], -1)
