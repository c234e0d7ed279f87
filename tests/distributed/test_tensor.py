"""A model cut over ranks gives the whole model's logits, on every rank, from the ranks' slices alone."""

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import DistributedError
from llama_ssp.models.assemble import decoder
from llama_ssp.models.decoder import WholeNorms
from llama_ssp.models.delta import DeltaNet
from llama_ssp.models.families import FAMILIES as FAMILY_ROWS
from llama_ssp.models.families import TESTED_FAMILIES
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.loader import DRAFT, load
from llama_ssp.models.model_config import empty
from llama_ssp.models.passes import Pass, all_rows
from llama_ssp.models.sharding import Cut
from llama_ssp.models.synthetic import SyntheticSource, config_for
from llama_ssp.models.tensor_row import BUFFERS
from llama_ssp.planner.weights import ModelPart, held, parameters
from tests.distributed.processes import on_ranks
from tests.distributed.threads import ThreadRank, ranks_of, together
from tests.families import FAMILIES, TOLERANCE, VOCAB, module_of, synthetic

CPU = torch.device("cpu")
SMALL = ModelConf(name="small")
CAPACITY = 24
REWINDS = 3
# What each pass feeds: (kept before, fed) a row. Prefill, ragged steps, rollbacks over stale keys.
PASSES = [((0, 0, 0), (9, 5, 1)), ((9, 5, 1), (4, 1, 3)), ((10, 6, 2), (3, 5, 0)), ((13, 11, 2), (1, 2, 4))]


def uneven(name: str) -> dict[str, Any]:
    """Sizes of which 2, 3 and 4 ranks have unequal shares, as of the vocabulary."""
    family, own = FAMILIES[name]
    grouped = {key for key in ("num_key_value_heads", "num_kv_heads") if own.get(key, 1) > 1}
    sizes = {"hidden_size": 40, FAMILY_ROWS[family].mlp_key: 56, **dict.fromkeys(grouped, 5)}
    sizes["num_attention_heads"] = 10 if grouped else 5
    if own.get("num_key_value_heads") is None:
        sizes["num_key_value_heads"] = 5
    other = {"moe_intermediate_size": 28, "word_embed_proj_dim": 40}
    if FAMILY_ROWS[family].names.delta is not None:
        sizes |= {"linear_num_key_heads": 5, "linear_num_value_heads": 10}
    return sizes | {key: size for key, size in other.items() if key in own}


SIX_HEADS: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
TIED = {"tie_word_embeddings": True}
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}-uneven": (name, uneven(name)) for name in FAMILIES},
    "falcon-mha-uneven": ("falcon-mha", uneven("falcon")),
    "qwen3-moe-mixed-uneven": ("qwen3-moe-mixed", uneven("qwen3_moe")),
    "seven-heads": ("llama-mha", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7}),
    "three-kv": ("llama-gqa", SIX_HEADS),
    "one-kv": ("llama-mqa", {**SIX_HEADS, "num_key_value_heads": 1}),
    "gemma2-three-kv": ("gemma2", SIX_HEADS),
    "qwen2-three-kv": ("qwen2", SIX_HEADS),
    "phi3-three-kv": ("phi3", SIX_HEADS),
    "odd-mlp": ("llama-mha", {"intermediate_size": 687}),
    "odd-neox": ("gpt_neox", {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 99}),
    "neox-tied": ("gpt_neox", TIED),
    "opt-tied": ("opt", TIED),
    "neo-tied": ("gpt_neo", TIED),
    "qwen3-tied": ("qwen3", TIED),
    "qwen3.5-one-key-head": ("qwen3_5", {"linear_num_key_heads": 1, "linear_num_value_heads": 5}),
    "qwen3-next-three-ranks": (
        "qwen3_next",
        {**SIX_HEADS, "linear_num_key_heads": 3, "linear_num_value_heads": 9},
    ),
    "even-vocabulary": ("llama-gqa", {"vocab_size": 96}),
    "mlp-bias": ("llama-gqa", {"mlp_bias": True, "attention_bias": True}),
    # The first of two ranks has 4 of 6 query heads where there are 3 KV heads, and 3 where there is one.
    "gemma4-six": ("gemma4-moe", SIX_HEADS),
    "gemma4-six-kv": ("gemma4", {**SIX_HEADS, "num_key_value_heads": 6, "num_global_key_value_heads": 3}),
    "gemma4-values-six": ("gemma4-values", SIX_HEADS),
}
assert VOCAB % 2 and VOCAB % 3, "the vocabulary is to be cut unevenly"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple[str, str], Path] = {}

    def saved(name: str, shard: str = "1GB") -> Path:
        if (name, shard) not in made:
            family, changes = UNEVEN.get(name, (name, {}))
            module = module_of(family, **changes)
            made[name, shard] = tmp_path_factory.mktemp(name)
            module.save_pretrained(made[name, shard], max_shard_size=shard)
        return made[name, shard]

    return saved


def walked(causal: Any) -> list[Tensor]:
    """The real columns' logits of every pass, over one ragged cache."""
    cache = causal.new_cache(3, CAPACITY, REWINDS)
    found = []
    for number, (start, count) in enumerate(PASSES):
        pass_ = Pass(spans=all_rows(start, count), device=CPU)
        tokens = torch.randint(
            0, causal.vocab, (3, pass_.width), generator=torch.Generator().manual_seed(number)
        )
        logits = causal.logits(tokens, pass_, cache)
        found.append(logits.flatten(0, 1)[pass_.column_T])
    return found


def require_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        worst, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
        assert ours.shape == theirs.shape and worst <= tolerance * scale, (worst, scale)


def parts_of(
    folder: Path | None, world: int, dtype: Dtype = Dtype.fp32, model: ModelConf = SMALL, role: str = "model"
) -> tuple[list[Any], list[ThreadRank]]:
    ranks = ranks_of(world)
    return [load(model, folder, dtype, CPU, role, rank) for rank in ranks], ranks


def on_all(parts: list[Any], ranks: list[ThreadRank]) -> list[list[Tensor]]:
    return together([partial(walked, part) for part in parts], ranks)


@lru_cache(1)  # tests of one model follow each other
def whole_of(folder: Path, dtype: Dtype) -> tuple[Any, list[Tensor]]:
    whole = load(SMALL, folder, dtype, CPU, "model")
    return whole, walked(whole)


def compare(folder: Path, world: int, dtype: Dtype = Dtype.fp32, tolerance: float = TOLERANCE) -> None:
    whole, expected = whole_of(folder, dtype)
    parts, ranks = parts_of(folder, world, dtype)
    found = on_all(parts, ranks)
    for part, logits in zip(parts, found, strict=True):
        assert part.vocab == whole.vocab
        require_close(logits, expected, tolerance)
    for pass_logits in zip(*found, strict=True):
        assert all(torch.equal(one, pass_logits[0]) for one in pass_logits)
    blocks = whole.decoder.blocks
    norms = getattr(blocks[0].attention, "norms", None)
    each = 3 if isinstance(norms, WholeNorms) or blocks[0].branch is not None else 2
    passes = len(PASSES) if world > 1 else 0  # that exchange anything
    assert {rank.counts["sums"] for rank in ranks} == {passes * (each * len(blocks) + 1)}
    assert {rank.counts["gathers"] for rank in ranks} == {passes}


def splits(folder: Path, world: int) -> bool:
    """Whether the heads can be split over `world` ranks: those of attention, and of linear attention."""
    counts = set()
    for block in whole_of(folder, Dtype.fp32)[0].decoder.blocks:
        attention = block.attention
        if isinstance(attention, DeltaNet):
            counts.add((len(attention.decay), attention.key_heads))
        else:
            sizes = attention.sizes
            keys = sizes[1 + attention.gated]
            counts.add((sizes[0] // attention.head_dim, keys // attention.head_dim))
    return all(world <= groups or (world % groups == 0 and world <= heads) for heads, groups in counts)


# Of each model two of three numbers of ranks, in turn.
GRID = [
    pytest.param(name, world, marks=pytest.mark.slow if world > 3 else ())
    for number, name in enumerate((*FAMILIES, *UNEVEN))
    for world in (2, 3, 4)
    if (number + world) % 3
]


@pytest.mark.few(20)
@pytest.mark.parametrize(("name", "world"), GRID)
def test_the_parts_give_the_whole_models_logits(name: str, world: int, folder_of: Any):
    if splits(folder_of(name), world):
        compare(folder_of(name), world)
        return
    assert not name.endswith("-uneven")
    with pytest.raises(DistributedError, match="heads cannot be split"):
        parts_of(folder_of(name), world)


def test_every_rank_count_of_a_model_with_seven_heads(folder_of: Any):
    for world in (1, 4, 7):
        compare(folder_of("seven-heads"), world)


@pytest.mark.parametrize("name", ["three-kv", "gpt_neox", "phi3", "gpt_neo"])
def test_several_files(name: str, folder_of: Any):
    folder = folder_of(name, "20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    compare(folder, 2)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "opt"])
def test_half_precision(name: str, folder_of: Any):
    compare(folder_of(name), 2, Dtype.bf16, tolerance=0.05)


def test_a_norm_of_one_ranks_heads_alone_is_seen(folder_of: Any):
    folder = folder_of("olmo2-uneven")
    parts, ranks = parts_of(folder, 2)
    for part in parts:
        for block in part.decoder.blocks:
            block.attention.norms.reduce = None
    with pytest.raises(AssertionError):
        require_close(on_all(parts, ranks)[0], walked(load(SMALL, folder, Dtype.fp32, CPU, "model")), 1e-3)


def test_a_rank_holds_its_share_only(folder_of: Any):
    """And a tied head once."""
    folder = folder_of("odd-mlp")
    whole = load(SMALL, folder, Dtype.fp32, CPU, "model")
    parts, _ = parts_of(folder, 2)

    def cut(model: Any) -> int:
        """The number of weights of which each rank has a part."""
        return sum(p.numel() for name, p in model.decoder.named_parameters() if "norm" not in name)

    assert sum(map(cut, parts)) == cut(whole)
    for part in parts:
        for name, parameter in part.decoder.named_parameters():
            size = parameter.untyped_storage().nbytes()
            assert size == parameter.nbytes, f"{name} keeps more of the file than its slice"
    for part in parts_of(folder_of("llama-tied"), 2)[0]:
        assert part.decoder.head.product.weight.data_ptr() == part.decoder.embedding.weight.data_ptr()


def planned_bytes(model: ModelConf, world: int, rank: int, dtype: Dtype) -> int:
    """The plan's bytes of a rank's weights; it counts a buffer that is no weight, too."""
    planned = held(ModelPart.of(model, world, rank), dtype)
    return sum(planned.values()) - planned.get(BUFFERS, 0)


@pytest.mark.parametrize("family", TESTED_FAMILIES)
def test_parts_have_the_planned_sizes(family: str):
    model = synthetic(family)
    config = config_for(model)
    source = SyntheticSource.of_config(config, model, torch.float32, CPU, drafts=False)
    module = empty(config_for(model), torch.float32)
    assert parameters(model) == sum(p.numel() for p in module.parameters())
    for rank in (ALONE, *ranks_of(3)):
        size = sum(p.nbytes for p in decoder(config, source, rank).parameters())
        assert size == planned_bytes(model, rank.world, rank.rank, Dtype.fp32)


class Sliced:
    """A source that compares each part with that part of the whole."""

    def __init__(self, source: SyntheticSource) -> None:
        self._source, self.shapes = source, source.shapes

    def read(self, name: str, cut: Cut | None) -> Tensor:
        part = self._source.read(name, cut)
        assert torch.equal(part, taken(self._source.read(name, None), cut)), name
        assert part.untyped_storage().nbytes() == part.nbytes, "no more is made than is held"
        return part


@pytest.mark.few(5)
@pytest.mark.parametrize("role", ["model", "draft"])
@pytest.mark.parametrize("family", TESTED_FAMILIES)
def test_synthetic_weights_are_made_by_slices(family: str, role: str):
    """A rank makes its part of each weight alone, and it is that part of what one process makes."""
    model = synthetic(family, agreement=0.7, tied=family == "gemma2")
    how = config_for(model), model, torch.float32, CPU, role == "draft"
    for rank in ranks_of(3):
        decoder(how[0], Sliced(SyntheticSource.of_config(*how)), rank, drafts=role == "draft")
    expected = walked(load(model, None, Dtype.fp32, CPU, role))
    for found in on_all(*parts_of(None, 3, model=model, role=role)):
        require_close(found, expected)


@pytest.mark.parametrize(
    "family", ["llama-mha", "llama-tied", "gemma2", "opt", "gpt_neo", "gpt_neox", "qwen3"]
)
def test_other_ranks_of_a_draft_need_not_know_the_tokens(family: str, folder_of: Any):
    """The first one alone looks them up; the others compute their share of what they do not see."""

    def logits(model: Any, tokens: Tensor) -> Tensor:
        pass_ = Pass(spans=all_rows([0, 0], [7, 4]), device=CPU)
        return model.logits(tokens, pass_, model.new_cache(2, 10))

    tokens = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))
    whole = logits(load(SMALL, folder_of(family), Dtype.fp32, CPU, DRAFT), tokens)
    parts, ranks = parts_of(folder_of(family), 2, role=DRAFT)
    assert [part.decoder.embedding.weight.shape[0] for part in parts] == [VOCAB, 1]
    seen = tokens, torch.zeros_like(tokens)
    for found in together([partial(logits, *given) for given in zip(parts, seen, strict=True)], ranks):
        require_close([found[0], found[1, :4]], [whole[0], whole[1, :4]])


def logits_on(ranks: Ranks, folders: dict[str, Path]) -> dict[str, list[Any]]:
    parts = {name: load(SMALL, folder, Dtype.fp32, CPU, "model", ranks) for name, folder in folders.items()}
    return {name: [logits.tolist() for logits in walked(part)] for name, part in parts.items()}


@pytest.mark.slow
def test_real_ranks(folder_of: Any):
    folders = {name: folder_of(name) for name in ("seven-heads", "three-kv", "gpt_neox", "opt-tied")}
    every = on_ranks(3, logits_on, folders)
    assert every[0] == every[1] == every[2]
    for name, folder in folders.items():
        expected = walked(load(SMALL, folder, Dtype.fp32, CPU, "model"))
        require_close([torch.tensor(logits) for logits in every[0][name]], expected)
