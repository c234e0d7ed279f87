"""A model cut over ranks gives the whole model's logits, on every rank, from the ranks' slices alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.models.assemble import decoder
from llama_ssp.models.families import TESTED_FAMILIES
from llama_ssp.models.feed import Feed
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.loader import load
from llama_ssp.models.shape import shape_of
from llama_ssp.models.sharding import Cut, head_ranges
from llama_ssp.models.synthetic import SyntheticSource, config_for
from tests.distributed.processes import on_ranks
from tests.distributed.threads import ranks_of, together
from tests.families import FAMILIES, VOCAB, build, synthetic

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of the largest logit
CAPACITY = 24
# What each pass feeds: (kept before, fed) a row. Prefill, ragged steps, rollbacks over stale keys.
PASSES = [((0, 0, 0), (9, 5, 1)), ((9, 5, 1), (4, 1, 3)), ((10, 6, 2), (3, 5, 0)), ((13, 11, 2), (1, 2, 4))]
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "seven-heads": ("llama-mha", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7}),
    "three-kv": ("llama-gqa", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "one-kv": ("llama-mqa", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "odd-mlp": ("llama-mha", {"intermediate_size": 687}),
    "odd-neox": ("gpt_neox", {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 99}),
    "neox-tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "opt-tied": ("opt", {"tie_word_embeddings": True}),
    "neo-tied": ("gpt_neo", {"tie_word_embeddings": True}),
    "even-vocabulary": ("llama-gqa", {"vocab_size": 96}),
    "phi3-uneven": ("phi3", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    **{
        f"{family}-three-kv": (
            family, {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
        )
        for family in ("mistral-window", "qwen2", "qwen3", "gemma2")
    },
    "mlp-bias": ("llama-gqa", {"mlp_bias": True, "attention_bias": True}),
}  # fmt: skip
THIRTEEN: dict[str, Any] = {"hidden_size": 52, "num_attention_heads": 13, "intermediate_size": 45}
TWELVE: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 45}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "thirteen-heads": ("llama-mha", {**THIRTEEN, "num_key_value_heads": 13}),
    "thirteen-neox": ("gpt_neox", THIRTEEN),
    "thirteen-opt": ("opt", {**THIRTEEN, "word_embed_proj_dim": 52, "ffn_dim": 45}),
    "thirteen-neo": ("gpt_neo", {"hidden_size": 52, "num_heads": 13, "intermediate_size": 45}),
    **{
        f"{family}-{kv}-of-twelve": (family, {**TWELVE, "num_key_value_heads": kv})
        for family in ("mistral-window", "qwen2", "qwen3", "gemma2", "phi3")
        for kv in (1, 2, 3)
    },
    **{
        f"{family}-tied": (family, {"tie_word_embeddings": True})
        for family in ("mistral-window", "qwen2", "qwen3", "gemma2", "phi3")
    },
}  # fmt: skip
UNEVEN.update(MORE)


def randomised_biases(module: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """Saves a family once, in one file or in several."""
    made: dict[tuple[str, str], Path] = {}

    def saved(name: str, shard: str = "1GB") -> Path:
        if (name, shard) not in made:
            family, changes = UNEVEN.get(name, (name, {}))
            folder = tmp_path_factory.mktemp(name)
            randomised_biases(build(family, mild=True, **changes)).save_pretrained(
                folder, max_shard_size=shard
            )
            made[name, shard] = folder
        return made[name, shard]

    return saved


def walked(causal: Any) -> list[torch.Tensor]:
    """The real columns' logits of every pass, over one ragged cache."""
    cache = causal.new_cache(3, CAPACITY)
    found = []
    for number, (start, count) in enumerate(PASSES):
        feed = Feed(start, count, CAPACITY, CPU)
        tokens = torch.randint(
            0, causal.vocab, (3, feed.width), generator=torch.Generator().manual_seed(number)
        )
        logits = causal.logits(tokens, feed, cache, last_only=False)
        found.append(logits[feed.slots() < feed.capacity])
    return found


def parts_of(folder: Path, world: int, dtype: Dtype = Dtype.fp32) -> tuple[list[Any], Any]:
    ranks = ranks_of(world)
    model = ModelConf(name="small")
    return [load(model, folder, dtype, CPU, "model", rank) for rank in ranks], ranks


def compare(folder: Path, world: int, dtype: Dtype = Dtype.fp32, tolerance: float = TOLERANCE) -> None:
    whole = load(ModelConf(name="small"), folder, dtype, CPU, "model")
    expected = walked(whole)
    parts, ranks = parts_of(folder, world, dtype)
    found = together([lambda part=part: walked(part) for part in parts], ranks)
    for rank, logits in enumerate(found):
        assert parts[rank].vocab == whole.vocab
        for ours, theirs in zip(logits, expected, strict=True):
            worst, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
            assert ours.shape == theirs.shape and worst <= tolerance * scale, (rank, worst, scale)
    for pass_logits in zip(*found, strict=True):
        assert all(torch.equal(one, pass_logits[0]) for one in pass_logits)
    layers, each = whole.config.num_hidden_layers, 3 if whole.config.model_type == "olmo2" else 2
    passes = len(PASSES) if world > 1 else 0  # that exchange anything
    assert {rank.counts["sums"] for rank in ranks} == {passes * (each * layers + 1)}
    assert {rank.counts["gathers"] for rank in ranks} == {passes}


def splits(name: str, world: int) -> bool:
    family, changes = UNEVEN.get(name, (name, {}))
    config = build(family, **changes).config
    try:
        head_ranges(config.num_attention_heads, shape_of(config).n_kv, world, 0)
    except DistributedError:
        return False
    return True


assert VOCAB % 2 and VOCAB % 3, "the vocabulary is to be cut unevenly"


# Of each model two of three numbers of ranks, in turn.
GRID = [
    pytest.param(name, world, marks=pytest.mark.slow if world > 3 or name in MORE else ())
    for number, name in enumerate((*FAMILIES, *UNEVEN))
    for world in (2, 3, 4)
    if (number + world) % 3
]


@pytest.mark.few(9)
@pytest.mark.parametrize(("name", "world"), GRID)
def test_the_parts_give_the_whole_models_logits(name: str, world: int, folder_of: Any):
    if not splits(name, world):
        with pytest.raises(DistributedError, match="heads cannot be split"):
            parts_of(folder_of(name), world)
        return
    compare(folder_of(name), world)


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


def numbers(model: Any, kind: str = "") -> int:
    """Of the parameters with this in their names."""
    return sum(p.numel() for name, p in model.decoder.named_parameters() if kind in name)


def test_a_rank_holds_its_share_only(folder_of: Any):
    folder = folder_of("odd-mlp")
    whole = load(ModelConf(name="small"), folder, Dtype.fp32, CPU, "model")
    parts, _ = parts_of(folder, 2)
    norms = numbers(whole, "norm")
    assert sum(numbers(part) - norms for part in parts) == numbers(whole) - norms
    for part in parts:
        for name, parameter in part.decoder.named_parameters():
            held = parameter.untyped_storage().nbytes()
            assert held == parameter.nbytes, f"{name} keeps more of the file than its slice"


def test_a_tied_head_is_held_once(folder_of: Any):
    parts, _ = parts_of(folder_of("llama-tied"), 2)
    for part in parts:
        assert part.decoder.head.product.weight.data_ptr() == part.decoder.embedding.weight.data_ptr()


class Sliced:
    """A source that compares each part with that part of the whole."""

    def __init__(self, source: SyntheticSource) -> None:
        self._source, self.shapes = source, source.shapes

    def read(self, name: str, cut: Cut | None) -> torch.Tensor:
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
    whole = load(model, None, Dtype.fp32, CPU, role)
    how = config_for(model), model, torch.float32, CPU, role == "draft"
    for rank in ranks_of(3):
        decoder(how[0], Sliced(SyntheticSource.of_config(*how)), rank, drafts=role == "draft")
    expected = walked(whole)
    ranks = ranks_of(3)
    parts = [load(model, None, Dtype.fp32, CPU, role, rank) for rank in ranks]
    for found in together([lambda part=part: walked(part) for part in parts], ranks):
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


def test_a_missing_weight_is_refused(folder_of: Any, tmp_path: Path):
    source = folder_of("llama-gqa")
    weights = load_file(source / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        (lambda w: w.pop(key), "missing keys"),
        (lambda w: w.update({key: w[key][:5].clone()}), "mismatched keys"),
        (lambda w: w.update({"model.extra.weight": w[key].clone()}), "unexpected keys"),
    ):
        broken = dict(weights)
        change(broken)
        folder = tmp_path / message.split()[0]
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            parts_of(folder, 2)


def logits_on(ranks: Ranks, folders: dict[str, Path]) -> dict[str, list[list[float]]]:
    return {
        name: [
            logits.flatten().tolist()
            for logits in walked(load(ModelConf(name="small"), folder, Dtype.fp32, CPU, "model", ranks))
        ]
        for name, folder in folders.items()
    }


@pytest.mark.slow
def test_real_ranks(folder_of: Any):
    folders = {name: folder_of(name) for name in ("seven-heads", "three-kv", "gpt_neox", "opt-tied")}
    every = on_ranks(3, logits_on, folders)
    for name, folder in folders.items():
        expected = walked(load(ModelConf(name="small"), folder, Dtype.fp32, CPU, "model"))
        for rank, found in every.items():
            assert found[name] == every[0][name], rank
            for ours, theirs in zip(found[name], expected, strict=True):
                worst = float((torch.tensor(ours) - theirs.flatten()).abs().max())
                assert worst <= TOLERANCE * float(theirs.abs().max())


class Subgroup(Ranks):
    """Some ranks of the world: `rank` is the place among them."""

    def __init__(self, members: list[int]) -> None:
        self.group = dist.new_group(members)
        self.rank, self.world = (
            members.index(dist.get_rank()) if dist.get_rank() in members else -1,
            len(members),
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts


def logits_on_some(_: Ranks, folder: Path) -> dict[str, list[list[float]]]:
    """A model over ranks 1 and 2; another over ranks 0 and 2."""
    found = {}
    for name, members in (("first", [1, 2]), ("second", [0, 2])):
        some: Any = Subgroup(members)
        if some.rank >= 0:
            part = load(ModelConf(name="small"), folder, Dtype.fp32, CPU, "model", some)
            found[name] = [logits.flatten().tolist() for logits in walked(part)]
    return found


@pytest.mark.slow
def test_a_model_over_some_of_the_ranks(folder_of: Any):
    folder = folder_of("three-kv")
    every = on_ranks(3, logits_on_some, folder)
    assert {rank: sorted(found) for rank, found in every.items()} == {
        0: ["second"],
        1: ["first"],
        2: ["first", "second"],
    }
    expected = walked(load(ModelConf(name="small"), folder, Dtype.fp32, CPU, "model"))
    for found in every.values():
        for passes in found.values():
            for ours, theirs in zip(passes, expected, strict=True):
                worst = float((torch.tensor(ours) - theirs.flatten()).abs().max())
                assert worst <= TOLERANCE * float(theirs.abs().max())
