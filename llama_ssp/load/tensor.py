"""One rank's part of a model: its slices alone are read, and its layers put the parts together.

A layer's output is cut over ranks (rows: no talk), or its input (columns: one sum over ranks, and the
bias once, after it). What a weight's name says decides how it is cut; transformers' own plan, where a
family has one, must agree. The embedding and the head are cut by vocabulary. What is named nowhere,
such as norms, is read whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.errors import ModelError
from llama_ssp.ranges import SPLIT_FAMILIES, Heads, Span, head_ranges, mlp_share, vocab_share
from llama_ssp.ranks import Ranks

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
RENAMED = {"embed_out.": "lm_head."}  # a name on disk, and the module's
# Tables that old checkpoints hold and that modules compute.
COMPUTED = (".inv_freq", ".masked_bias", ".attention.bias", ".attn.bias")
ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class Cut:
    """Which rows, or which columns, of a weight a rank holds: one span, or one for each fused part."""

    dim: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(last - first for first, last in self.spans)


@dataclass(frozen=True)
class Sizes:
    """What cuts are made of: this rank's heads, and the model's."""

    heads: Heads
    head_dim: int
    n_heads: int
    n_kv: int
    world: int
    rank: int

    @staticmethod
    def of(config: Any, world: int, rank: int) -> Sizes:
        n_heads = int(config.num_attention_heads)
        n_kv = int(getattr(config, "num_key_value_heads", None) or n_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // n_heads)
        return Sizes(head_ranges(n_heads, n_kv, world, rank), size, n_heads, n_kv, world, rank)

    def queries(self, unit: int = 1) -> Span:
        return _scaled(self.heads.query, self.head_dim * unit)

    def keys(self) -> Span:
        return _scaled(self.heads.kv, self.head_dim)

    def mlp(self, width: int) -> Span:
        return mlp_share(width, self.world, self.rank)


def _fused_attention(sizes: Sizes, _width: int) -> tuple[Span, ...]:
    """Queries, keys, values, one block after the other (phi3)."""
    keys = sizes.n_heads * sizes.head_dim
    values = keys + sizes.n_kv * sizes.head_dim
    return sizes.queries(), _moved(sizes.keys(), keys), _moved(sizes.keys(), values)


def _fused_mlp(sizes: Sizes, width: int) -> tuple[Span, ...]:
    """Gate and up, one block after the other (phi3)."""
    half = sizes.mlp(width // 2)
    return half, _moved(half, width // 2)


Spans = Callable[[Sizes, int], tuple[Span, ...]]

# By a layer's name: which side is cut, and where, given the length of that side.
TABLE: dict[str, tuple[int, Spans]] = {
    "q_proj": (ROWS, lambda s, _: (s.queries(),)),
    "k_proj": (ROWS, lambda s, _: (s.keys(),)),
    "v_proj": (ROWS, lambda s, _: (s.keys(),)),
    "qkv_proj": (ROWS, _fused_attention),
    "query_key_value": (ROWS, lambda s, _: (s.queries(3),)),  # gpt_neox: query, key, value of each head
    **dict.fromkeys(("o_proj", "out_proj", "dense"), (COLUMNS, lambda s, _: (s.queries(),))),
    **dict.fromkeys(
        ("gate_proj", "up_proj", "fc1", "c_fc", "dense_h_to_4h"), (ROWS, lambda s, n: (s.mlp(n),))
    ),
    "gate_up_proj": (ROWS, _fused_mlp),
    **dict.fromkeys(("down_proj", "fc2", "c_proj", "dense_4h_to_h"), (COLUMNS, lambda s, n: (s.mlp(n),))),
}
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense")
PLANNED = {"colwise": ROWS, "rowwise": COLUMNS}  # transformers' words, for y = x W^T with W on disk


class Source(Protocol):
    """Where weights are read from, a slice at a time."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """The part, or all, in memory of its own."""


class ModuleSource:
    """Weights of a module that is already in memory (synthetic ones)."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = dict(module.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def read(self, name: str, cut: Cut | None) -> Tensor:
        return _taken(self._weights[name].detach(), cut)


class FileSource:
    """Weights of a folder of safetensors files, by the names that the module gives them."""

    def __init__(self, folder: Path, module: Any) -> None:
        self._opened = ExitStack()
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self._places: dict[str, tuple[Any, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(folder):
            handle = self._opened.enter_context(safe_open(file, framework="pt"))
            for key in handle.keys():  # noqa: SIM118, a handle cannot be iterated
                name = _module_name(key, known, module.base_model_prefix)
                if name not in known and name.endswith(COMPUTED):
                    continue
                self._places[name] = (handle, key)
                self.shapes[name] = tuple(handle.get_slice(key).get_shape())

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._places.clear()
        self._opened.close()

    def read(self, name: str, cut: Cut | None) -> Tensor:
        handle, key = self._places[name]
        if not self.shapes[name]:
            return _taken(handle.get_tensor(key), None)
        return _taken(handle.get_slice(key), cut)


class RowLinear(nn.Linear):
    """Holds some columns of the weight; sums over ranks, then adds the whole bias."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.all_reduce(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class GatheredHead(nn.Linear):
    """Holds some rows of the vocabulary; every rank gets all logits."""

    ranks: Ranks
    shares: list[int]

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        padded = functional.pad(y, (0, max(self.shares) - y.shape[-1])).contiguous()
        parts = self.ranks.all_gather(padded)
        return torch.cat([part[..., :n] for part, n in zip(parts, self.shares, strict=True)], -1)


def cut_module(
    module: Any, source: Source, ranks: Ranks, dtype: torch.dtype, device: torch.device,
    leader_looks_up: bool = False,
) -> int:  # fmt: skip
    """Turns a module without weights into this rank's part, with weights; the vocabulary's size.

    The module's names and shapes have been compared with the source's (`differences`). Where the leader
    looks up, it alone holds the embedding, and the others need not know which tokens are fed.
    """
    sizes = Sizes.of(module.config, ranks.world, ranks.rank)
    _require_known(module)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    vocab = int(head.weight.shape[0])
    cuts = _cuts(module, sizes)
    shares = [vocab_share(vocab, ranks.world, rank) for rank in range(ranks.world)]
    cuts[head] = Cut(ROWS, (shares[ranks.rank],))
    looked_up = shares[ranks.rank]
    if leader_looks_up:
        looked_up = (0, vocab if ranks.is_leader else 0)
    cuts[embedding] = Cut(ROWS, (looked_up if looked_up[1] else (0, 1),))
    tied = bool(getattr(module.config, "tie_word_embeddings", False))
    for name, layer in list(module.named_modules()):
        for leaf, parameter in list(layer._parameters.items()):
            key = f"{name}.{leaf}" if name else leaf
            if parameter is None or (layer is head and key not in source.shapes and tied):
                continue
            cut = cuts.get(layer)
            if cut is not None and parameter.ndim == 1 and cut.dim == COLUMNS:
                cut = None
            weight = source.read(key, cut).to(device, dtype)
            layer._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
    if tied and leader_looks_up:
        head.weight = _tied_rows(module, source, cuts, dtype, device)
    elif tied and (head.weight.is_meta or torch.equal(head.weight, embedding.weight)):
        head.weight = embedding.weight
    for layer, cut in cuts.items():
        _work_together(layer, cut, ranks)
    _cut_embedding(embedding, looked_up, ranks)
    head.__class__, head.ranks, head.shares = GatheredHead, ranks, [b - a for a, b in shares]
    _count_heads(module, sizes)
    _require_filled(module)
    module.to(device)
    return vocab


def _tied_rows(
    module: Any, source: Source, cuts: dict[nn.Module, Cut], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """The head's rows of a tied table that only the leader holds whole."""
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    first, last = cuts[head].spans[0]
    if table.weight.shape[0] >= last:
        return nn.Parameter(table.weight[first:last], requires_grad=False)
    name = next(name for name, layer in module.named_modules() if layer is table)
    return nn.Parameter(source.read(f"{name}.weight", cuts[head]).to(device, dtype), requires_grad=False)


def differences(module: Any, source: Source) -> dict[str, list[str]]:
    """What the source lacks, holds in another shape, or holds beyond the module, as transformers says it."""
    wanted = {n: tuple(p.shape) for n, p in module.named_parameters(remove_duplicate=False)}
    tied = {"lm_head.weight"} if getattr(module.config, "tie_word_embeddings", False) else set()
    both = wanted.keys() & source.shapes.keys()
    return {
        "missing_keys": sorted(wanted.keys() - source.shapes.keys() - tied),
        "mismatched_keys": sorted(
            f"{n}: {source.shapes[n]} not {wanted[n]}" for n in both if source.shapes[n] != wanted[n]
        ),
        "unexpected_keys": sorted(source.shapes.keys() - wanted.keys()),
    }


def _cuts(module: Any, sizes: Sizes) -> dict[nn.Module, Cut]:
    found: dict[nn.Module, Cut] = {}
    for name, layer in module.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(layer, nn.Linear) and leaf in TABLE:
            dim, spans = TABLE[leaf]
            found[layer] = Cut(dim, spans(sizes, layer.weight.shape[dim]))
    return found


def _work_together(layer: nn.Module, cut: Cut, ranks: Ranks) -> None:
    """Gives a cut linear layer its new sizes, and its sum if its input is cut."""
    if not isinstance(layer, nn.Linear):
        return
    layer.out_features, layer.in_features = layer.weight.shape
    if cut.dim == COLUMNS:
        layer.__class__ = RowLinear
        layer.ranks = ranks  # type: ignore[assignment]


def _cut_embedding(embedding: Any, held: Span, ranks: Ranks) -> None:
    """Tokens of other ranks' rows give zeros here, so that the sum over ranks has every row once.

    By hooks, because an embedding's class may do more than look up (gemma2 scales there).
    """
    first, last = held
    embedding.padding_idx = None

    def before(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        row = args[0] - first
        module.elsewhere = (row < 0) | (row >= last - first)
        return (row.masked_fill(module.elsewhere, 0),)

    def after(module: Any, _args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return ranks.all_reduce(y.masked_fill(module.elsewhere[..., None], 0))

    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)


def _count_heads(module: Any, sizes: Sizes) -> None:
    """Attention that counts its heads counts this rank's."""
    heads = sizes.heads
    for layer in module.modules():
        if not any(isinstance(getattr(layer, leaf, None), RowLinear) for leaf in ATTENTION_OUTPUTS):
            continue
        local = {
            "num_heads": heads.queries, "num_key_value_heads": heads.kvs,
            "num_key_value_groups": heads.queries // heads.kvs,
        }  # fmt: skip
        for name, count in local.items():
            if hasattr(layer, name):
                setattr(layer, name, count)
        if hasattr(layer, "qkv_proj"):  # phi3 asks its config where queries end; the model's stays whole
            layer.config = copy.copy(layer.config)
            layer.config.num_attention_heads = heads.queries


def _require_known(module: Any) -> None:
    """Refuses a family that is untested in parts, or that transformers cuts another way than the table."""
    if module.config.model_type not in SPLIT_FAMILIES:
        raise ModelError(
            "the architecture cannot be split over ranks", where=type(module).__name__,
            found=module.config.model_type, allowed=", ".join(SPLIT_FAMILIES), fix="run it in one process",
        )  # fmt: skip
    for pattern, way in (getattr(module.config, "base_model_tp_plan", None) or {}).items():
        leaf, side = pattern.rpartition(".")[2], PLANNED.get(way.partition("_")[0])
        if side is not None and (leaf not in TABLE or TABLE[leaf][0] != side):
            raise ModelError(
                "the architecture has a layer that this program cannot split", where=module.config.model_type,
                found=f"{pattern}: {way}", fix="run it in one process",
            )  # fmt: skip


def _require_filled(module: nn.Module) -> None:
    empty = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if empty:
        raise ModelError(
            "weights were left unread", where=type(module).__name__, found=f"{len(empty)}: {empty[0]}",
            fix="report it",
        )  # fmt: skip


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return [folder / SINGLE]
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(places))]


def _module_name(key: str, known: set[str], prefix: str) -> str:
    """What the module calls a tensor on disk."""
    for old, new in RENAMED.items():
        if key not in known and key.startswith(old):
            key = new + key.removeprefix(old)
    candidates = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
    return next((name for name in candidates if name in known), key)


def _taken(weight: Any, cut: Cut | None) -> Tensor:
    """A copy: a slice of a file is a view of all of it."""
    if cut is None:
        parts = [weight[:] if not isinstance(weight, Tensor) else weight]
    elif cut.dim == COLUMNS:
        parts = [weight[:, first:last] for first, last in cut.spans]
    else:
        parts = [weight[first:last] for first, last in cut.spans]
    return torch.cat(parts, cut.dim) if cut and len(parts) > 1 else _copied(parts[0])


def _copied(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


def _scaled(span: Span, unit: int) -> Span:
    return span[0] * unit, span[1] * unit


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
