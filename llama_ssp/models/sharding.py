"""Who holds which part of a model that is split over ranks: units, shares, refusals. No torch.

A share always ends on a unit: a KV head with its query heads, 64 columns of the MLP, one row of the
vocabulary. Shares may be uneven, by one unit at most: 52 heads over 8 ranks are 7,7,7,7,6,6,6,6.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import DistributedError, ModelError

WIDEST_UNIT = 64  # columns of the MLP: keeps matrices aligned
NF4_BLOCK = (
    64  # weights of one scale; bitsandbytes' CPU kernel is wrong where a row is not made of whole ones
)
# Families whose layers are cut by tensor_parallel.py and compared with the whole model in tests.
SPLIT_FAMILIES = (
    "gemma2", "gpt_neo", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3",
)  # fmt: skip

# Families whose every attention variant is tested against transformers' own generate.
TESTED_FAMILIES = tuple(sorted((*SPLIT_FAMILIES, "falcon", "mixtral", "qwen3_moe")))

# Families whose every tensor and moment the plan knows; others run in one process, unplanned.
PLANNED_FAMILIES = SPLIT_FAMILIES

# Families that DeepSpeed cuts rightly, as compared with the whole model in tests; it cuts phi3's fused MLP
# wrongly, and refuses gpt2.
DEEPSPEED_FAMILIES = (
    "gemma2", "gpt_neo", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3",
)  # fmt: skip

OTHER_RANKS = "start another number of ranks (torchrun --nproc-per-node); for a draft, placement.draft_degree"

Span = tuple[int, int]  # half-open


@dataclass(frozen=True)
class Heads:
    """The query and KV heads of one rank."""

    query: Span
    kv: Span

    @property
    def queries(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def kvs(self) -> int:
        return self.kv[1] - self.kv[0]


def share(total: int, world: int, rank: int, unit: int = 1) -> Span:
    """The rank's part of `total` in whole units; the last unit may be short."""
    base, extra = divmod(-(-total // unit), world)
    first = rank * base + min(rank, extra)
    last = first + base + (rank < extra)
    return min(first * unit, total), min(last * unit, total)


def filled_share(what: str, total: int, world: int, rank: int, unit: int = 1) -> Span:
    """`share`, refused where a rank would hold nothing."""
    if -(-total // unit) < world:
        raise DistributedError(
            f"the model has too little {what} for the ranks", found=f"{total} over {world} ranks",
            allowed=f"at most {-(-total // unit)} ranks", fix="start fewer ranks",
        )  # fmt: skip
    return share(total, world, rank, unit)


def mlp_share(width: int, world: int, rank: int) -> Span:
    """The rank's columns of the MLP, in the widest unit, up to 64, that leaves no rank empty."""
    unit = WIDEST_UNIT
    while unit > 1 and -(-width // unit) < world:
        unit //= 2
    return filled_share("MLP width", width, world, rank, unit)


def vocab_share(vocab: int, world: int, rank: int) -> Span:
    return filled_share("vocabulary", vocab, world, rank)


def head_ranges(n_heads: int, n_kv: int, world: int, rank: int, where: str = "") -> Heads:
    """Whole KV groups; where there are fewer KV heads than ranks, each is held by several ranks alike."""
    if world <= n_kv:
        first, last = share(n_kv, world, rank)
        group = n_heads // n_kv
        return Heads((first * group, last * group), (first, last))
    if n_kv == n_heads or world % n_kv or n_heads % world:
        fitting = [n for n in range(1, n_heads + 1) if n <= n_kv or _replicates(n_heads, n_kv, n)]
        raise DistributedError(
            "the model's heads cannot be split over the ranks", where=where,
            found=f"{n_heads} heads, {n_kv} KV heads, {world} ranks",
            allowed=f"{_in_words(fitting)} ranks", fix=OTHER_RANKS,
        )  # fmt: skip
    query = share(n_heads, world, rank)
    kv = query[0] * n_kv // n_heads
    return Heads(query, (kv, kv + 1))


def is_planned(model: ModelConf) -> bool:
    return model.family in PLANNED_FAMILIES


def require_planned(model: ModelConf, role: str) -> None:
    """Refuses a plan of a model whose layers the plan does not know: its figures would be another's."""
    if not is_planned(model):
        raise ModelError(
            "the architecture cannot be planned", where=f"{role} {model.name}", found=model.family,
            allowed=", ".join(PLANNED_FAMILIES), fix="run it in one process: nothing is foretold of it",
        )  # fmt: skip


def require_split(model: ModelConf, world: int, role: str = "model") -> None:
    """Refuses, alike on every rank and before anything is opened, a model that cannot be split so."""
    where = f"{role} {model.name}"
    if model.family not in SPLIT_FAMILIES:
        raise ModelError(
            "the architecture cannot be split over ranks", where=where, found=model.family,
            allowed=", ".join(SPLIT_FAMILIES), fix="run it in one process, a draft with placement=leader",
        )  # fmt: skip
    head_ranges(model.n_heads, model.n_kv_heads, world, 0, where)
    mlp_share(model.ffn, world, 0)
    vocab_share(model.vocab, world, 0)
    require_quantised(model, world)


def require_quantised(model: ModelConf, world: int = 1) -> None:
    """Refuses a model whose layers, or parts of layers, cannot be held in the number format asked for."""
    if model.dtype is not Dtype.nf4:
        return
    parts = [head_ranges(model.n_heads, model.n_kv_heads, world, rank) for rank in range(world)]
    shares = [mlp_share(model.ffn, world, rank) for rank in range(world)]
    inputs = {
        "dim": {model.dim},
        "heads of a rank": {part.queries * model.head_dim for part in parts},
        "MLP width of a rank": {last - first for first, last in shares},
    }
    for what, found in inputs.items():
        odd = sorted(size for size in found if size % NF4_BLOCK)
        if odd:
            raise DistributedError(
                "nf4 wants layers whose inputs are whole blocks", where=f"model {model.name}, {what}",
                found=odd[0], allowed=f"multiples of {NF4_BLOCK}",
                fix="use dtype=int8 or bf16" + (", or other ranks" if "rank" in what and world > 1 else ""),
            )  # fmt: skip


def require_deepspeed(model: ModelConf, world: int) -> None:
    """Refuses, alike on every rank and before anything is opened, a model that DeepSpeed would not cut."""
    if model.family not in DEEPSPEED_FAMILIES:
        raise ModelError(
            "DeepSpeed does not cut the architecture", where=f"model {model.name}", found=model.family,
            allowed=", ".join(DEEPSPEED_FAMILIES), fix="use placement.splitting=tensor, or one process",
        )  # fmt: skip
    if model.dtype in (Dtype.int8, Dtype.nf4):
        raise DistributedError(
            "DeepSpeed would lose the scales of quantised layers", where=f"model {model.name}",
            found=model.dtype.value, allowed="fp32, bf16, fp16", fix="use placement.splitting=tensor",
        )  # fmt: skip
    filled_share("attention heads", model.n_heads, world, 0)


def _replicates(n_heads: int, n_kv: int, world: int) -> bool:
    return n_kv != n_heads and world % n_kv == 0 and n_heads % world == 0


def _in_words(counts: list[int]) -> str:
    """1..4, 8 for 1, 2, 3, 4, 8."""
    run = next((i for i, n in enumerate(counts, start=1) if n != i), len(counts) + 1) - 1
    return ", ".join([f"1..{run}"] * (run > 2) + [str(n) for n in counts[run if run > 2 else 0 :]])
