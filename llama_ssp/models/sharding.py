"""Which part of a split model a rank holds, and which splits are refused. No torch.

A part ends on a whole unit: a KV head with its query heads, 64 columns of the MLP, one row of the vocabulary.
Parts differ by one unit at most: 52 heads over 8 ranks are 7,7,7,7,6,6,6,6.
"""

from dataclasses import dataclass

from llama_ssp.config import OWN_CODES, Dtype, ModelConf
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.models.families import DEEPSPEED_FAMILIES, TESTED, TESTED_FAMILIES, family_of

WIDEST_UNIT = 64  # columns of the MLP: keeps matrices aligned
NF4_BLOCK = 64  # weights with one scale; bitsandbytes' CPU kernel needs rows of whole blocks
OTHER_RANKS = "start another number of ranks (ranks=N); for a draft, placement.draft_degree"

# Of a weight: a layer's outputs, and its inputs.
ROWS = 0
COLUMNS = 1
Span = tuple[int, int]  # half-open


def length(span: Span) -> int:
    return span[1] - span[0]


@dataclass(frozen=True)
class Heads:
    """The query and KV heads of one rank."""

    query: Span
    kv: Span

    @property
    def queries(self) -> int:
        return length(self.query)

    @property
    def kvs(self) -> int:
        return length(self.kv)

    def first(self) -> "Heads":
        """Returns as many heads, from the first on."""
        return Heads(query=(0, self.queries), kv=(0, self.kvs))


def times(span: Span, size: int) -> Span:
    return span[0] * size, span[1] * size


def shifted(span: Span, by: int) -> Span:
    return by + span[0], by + span[1]


def share(total: int, world: int, rank: int, unit: int = 1) -> Span:
    """Returns the rank's part of `total` in whole units; the last unit may be short."""
    base, extra = divmod(-(-total // unit), world)
    first = rank * base + min(rank, extra)
    last = first + base
    if rank < extra:
        last += 1
    return min(first * unit, total), min(last * unit, total)


def filled_share(what: str, total: int, world: int, rank: int, unit: int = 1) -> Span:
    """Returns `share`; raises DistributedError if some rank's part would be empty."""
    most = -(-total // unit)
    if most < world:
        raise DistributedError(
            f"the model has too little {what} for the ranks",
            found=f"{total} over {world} ranks",
            allowed=f"at most {most} ranks",
            fix="start fewer ranks",
        )
    return share(total, world, rank, unit)


def mlp_share(width: int, world: int, rank: int) -> Span:
    """Returns the rank's columns of the MLP, in the widest unit, up to 64, that leaves no rank empty."""
    unit = WIDEST_UNIT
    while unit > 1 and -(-width // unit) < world:
        unit //= 2
    return filled_share("MLP width", width, world, rank, unit)


def vocab_share(vocab: int, world: int, rank: int) -> Span:
    return filled_share("vocabulary", vocab, world, rank)


def head_ranges(n_heads: int, n_kv: int, world: int, rank: int, where: str = "") -> Heads:
    """Returns whole KV groups; with fewer KV heads than ranks, several ranks share a group's queries.

    Each of these ranks holds the group's KV head.
    """
    group = n_heads // n_kv
    if world <= n_kv:
        first, last = share(n_kv, world, rank)
        return Heads(query=(first * group, last * group), kv=(first, last))
    copies = world // n_kv
    if world % n_kv or copies > group:
        fitting = [n for n in range(1, n_heads + 1) if n <= n_kv or n % n_kv == 0]
        raise DistributedError(
            "the model's heads cannot be split over the ranks",
            where=where,
            found=f"{n_heads} heads, {n_kv} KV heads, {world} ranks",
            allowed=f"{_in_words(fitting)} ranks",
            fix=OTHER_RANKS,
        )
    kv = rank // copies
    first, last = share(group, copies, rank % copies)
    return Heads(query=(kv * group + first, kv * group + last), kv=(kv, kv + 1))


def _in_words(counts: list[int]) -> str:
    """Returns 1..4, 8 for 1, 2, 3, 4, 8."""
    run = next((i for i, n in enumerate(counts, start=1) if n != i), len(counts) + 1) - 1
    if run <= 2:
        return ", ".join(map(str, counts))
    return ", ".join([f"1..{run}", *map(str, counts[run:])])


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a weight, along one dimension: one span, or one for each fused part.

    `number`: of a stack of matrices, the one to cut.
    """

    dim: int
    spans: tuple[Span, ...]
    number: int | None = None


def is_planned(model: ModelConf) -> bool:
    """Returns whether the decoder runs it, so that it is split, compiled and planned."""
    return model.family in TESTED_FAMILIES and not model.lacking


def architecture(model: ModelConf) -> str:
    """Returns the name of the architecture, with what of its config the decoder does not have."""
    return f"{model.family} with {model.lacking}" if model.lacking else model.family


def require_split(model: ModelConf, world: int, role: str = "model") -> None:
    """Refuses a model that cannot be split over `world` ranks: on every rank, before a file is opened."""
    where = f"{role} {model.name}"
    if not is_planned(model):
        raise unsplit(where, architecture(model), "run it in one process, a draft with placement=leader")
    for kvs, _ in kinds_of_heads(model):
        head_ranges(model.n_heads, kvs, world, 0, where)
    if model.linear_layers:
        head_ranges(model.linear_value_heads, model.linear_key_heads, world, 0, f"{where}, linear attention")
    for width in _dense_widths(model):
        mlp_share(width, world, 0)
    if model.experts:
        mlp_share(model.expert_ffn, world, 0)
    vocab_share(model.vocab, world, 0)
    require_quantised(model, world)


def unsplit(where: str, family: str, fix: str = "run it in one process") -> ModelError:
    return ModelError(
        "the architecture cannot be split over ranks", where=where, found=family, allowed=TESTED, fix=fix
    )


def kinds_of_heads(model: ModelConf) -> list[tuple[int, int]]:
    """Returns the KV heads and their size, of most layers and of those that see the whole text."""
    usual = (model.n_kv_heads, model.head_dim)
    return [usual, (model.full_kv_heads, model.full_head_dim)] if model.full_layers else [usual]


def _dense_widths(model: ModelConf) -> list[int]:
    """Returns the widths of MLPs, of which a model whose layers all have experts may have none."""
    shared = [model.shared_ffn] if model.shared_ffn else []
    has_none = model.experts and not model.dense_layers and not family_of(model.family).dense_too
    return shared if has_none else [model.ffn, *shared]


def require_quantised(model: ModelConf, world: int = 1) -> None:
    """Refuses nf4 for a model whose layers, or a rank's parts of them, are not whole blocks."""
    if model.dtype is not Dtype.nf4:
        return
    heads = {
        head_ranges(model.n_heads, kvs, world, rank).queries * size
        for rank in range(world)
        for kvs, size in kinds_of_heads(model)
    }
    inputs = {
        "dim": {model.dim},
        "heads of a rank": heads,
        "MLP width of a rank": {
            length(mlp_share(width, world, rank)) for rank in range(world) for width in _dense_widths(model)
        },
    }
    if model.linear_layers:
        values = model.linear_value_heads
        of_values = [head_ranges(values, model.linear_key_heads, world, rank) for rank in range(world)]
        inputs["values of a rank"] = {part.queries * model.linear_value_dim for part in of_values}
    for what, sizes in inputs.items():
        odd = sorted(size for size in sizes if size % NF4_BLOCK)
        if odd:
            fix = "use dtype=int8 or bf16"
            if "rank" in what and world > 1:
                fix += ", or other ranks"
            raise DistributedError(
                "nf4 needs inputs in whole blocks",
                where=f"model {model.name}, {what}",
                found=odd[0],
                allowed=f"multiples of {NF4_BLOCK}",
                fix=fix,
            )


def require_transformers(name: str, dtype: Dtype, role: str = "model") -> None:
    """Refuses formats that transformers' modules do not have."""
    if dtype not in OWN_CODES:
        return
    fix = f"write {role}.dtype=bf16, or another placement"
    if dtype is Dtype.int4:  # a module's linear layers are quantised by bitsandbytes, in 8 bit, too
        fix = f"write {role}.dtype=int8"
        if role == "draft":
            fix = "write draft=int8, or draft.dtype=int8 for another model"
    raise ModelError(
        "codes are kept by the decoder alone",
        where=f"{role} {name}",
        found=f"dtype={dtype.value}",
        allowed=f"{TESTED}, in one process or with placement.splitting=tensor",
        fix=fix,
    )


def require_module(family: str, where: str) -> None:
    """Refuses an architecture that decoder.py runs, and transformers' module with our cache does not."""
    row = family_of(family)
    problem = ""
    if row.masks_inside:
        problem = "attention makes its own masks, from slot numbers"
    elif row.names.delta is not None:
        problem = "transformers' module keeps states that it cannot roll back"
    if problem:
        raise ModelError(
            problem,
            where=where,
            found=family,
            allowed="placement.splitting=tensor, or one process",
            fix="run it on the decoder",
        )


def require_deepspeed(model: ModelConf, world: int) -> None:
    """Refuses a model that DeepSpeed would not cut: on every rank, before a file is opened."""
    where = f"model {model.name}"
    if model.family not in DEEPSPEED_FAMILIES:
        raise ModelError(
            "DeepSpeed does not cut the architecture",
            where=where,
            found=model.family,
            allowed=", ".join(DEEPSPEED_FAMILIES),
            fix="use placement.splitting=tensor, or one process",
        )
    if model.code_bits or model.dtype in (Dtype.int8, Dtype.nf4, *OWN_CODES):
        number_format = model.dtype.value
        if model.code_bits:
            number_format = f"a checkpoint in codes of {model.code_bits} bits"
        raise DistributedError(
            "DeepSpeed would lose the scales of quantised layers",
            where=where,
            found=number_format,
            allowed="plain weights in fp32, bf16, fp16",
            fix="use placement.splitting=tensor",
        )
    filled_share("attention heads", model.n_heads, world, 0)
