"""What a cache keeps of each block: keys and values, or states and tails (kv_cache.py). No torch.

The cache makes its tensors by these rows, and the planner sums their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.models.shares import Share

KEYS = "keys"
VALUES = "values"
STATES = "states"
TAILS = "tails"


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """What a cache keeps of each of these blocks.

    Of keys and values it keeps every position of a text, in the number format of the model. Of states and
    tails it keeps the last positions alone, as many as a roll back may need, and `tail` more.
    """

    name: str
    heads: int  # of this rank
    width: int
    blocks: tuple[int, ...]
    in_ring: bool = False  # the last positions alone
    tail: int = 0
    wide: bool = False  # in fp32 at least

    @property
    def numbers(self) -> int:
        """Returns how many numbers one position takes in one block."""
        return self.heads * self.width


def states(share: Share) -> tuple[StateRow, ...]:
    """Returns what this rank's cache keeps."""
    sizes = share.sizes
    if sizes.trained_head is not None and sizes.trained_head.shares_cache:
        return ()
    rows = [
        StateRow(
            name=name,
            heads=share.heads_of(heads is sizes.full).kvs,
            width=heads.head_dim,
            blocks=heads.blocks,
        )
        for heads in sizes.heads
        for name in (KEYS, VALUES)
    ]
    delta = sizes.delta
    if delta is not None:
        heads = share.delta_heads
        channels = 2 * heads.kvs * delta.key_dim + heads.queries * delta.value_dim
        rows.append(
            StateRow(
                name=TAILS, heads=1, width=channels, blocks=sizes.linear, in_ring=True, tail=delta.kernel - 1
            )
        )
        rows.append(
            StateRow(
                name=STATES,
                heads=heads.queries,
                width=delta.key_dim * delta.value_dim,
                blocks=sizes.linear,
                in_ring=True,
                wide=True,
            )
        )
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """What a cache keeps of a block with linear attention: the heads of this rank, and the convolution's."""

    heads: int
    key_dim: int
    value_dim: int
    channels: int
    tail: int  # inputs of the convolution before a token


CacheShape = tuple[int, int] | DeltaShape  # KV heads and their width, or what a state has


def cache_shapes(share: Share) -> list[CacheShape]:
    """Returns what a cache keeps of each block that keeps any; values have the shape of keys."""
    sizes = share.sizes
    every = states(share)
    shapes: dict[int, CacheShape] = {
        block: (row.heads, row.width) for row in every if row.name == KEYS for block in row.blocks
    }
    rows = {row.name: row for row in every}
    for block in sizes.linear:
        assert sizes.delta is not None
        shapes[block] = DeltaShape(
            heads=rows[STATES].heads,
            key_dim=sizes.delta.key_dim,
            value_dim=sizes.delta.value_dim,
            channels=rows[TAILS].width,
            tail=rows[TAILS].tail,
        )
    return [shapes[block] for block in sorted(shapes)]
