"""8 and 4 bit over ranks: each quantises its own slices, and no accuracy is lost by it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.errors import DistributedError, ModelError
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.kernels.coded import CodedLinear
from llama_ssp.models.linear import Summed
from llama_ssp.models.loader import load
from llama_ssp.models.quantization import QUANTISED
from llama_ssp.models.shape import shape_of
from llama_ssp.models.sharding import NF4_BLOCK, ROWS, Cut, Span, head_ranges, mlp_share, require_split
from tests.distributed.test_tensor import SMALL as MODEL
from tests.distributed.test_tensor import on_all, parts_of, walked
from tests.distributed.threads import ranks_of
from tests.families import build, module_of

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NO_WORSE = 1.1
NEEDS = {Dtype.int4: [pytest.mark.compiler]}
DTYPES = [pytest.param(dtype, marks=NEEDS.get(dtype, ())) for dtype in QUANTISED]
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 704}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-gqa", {**WIDE, "num_key_value_heads": 4}),
    "replicated-kv": ("llama-mqa", {**WIDE, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {**WIDE, "num_key_value_heads": 4}),
    "gpt_neox": ("gpt_neox", WIDE),
    "opt": ("opt", {**WIDE, "word_embed_proj_dim": 256, "ffn_dim": 704}),
    "phi3": ("phi3", {**WIDE, "num_key_value_heads": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (family, changes) in CASES.items():
        made[name] = tmp_path_factory.mktemp(name)
        module_of(family, **changes).save_pretrained(made[name])
    return made


def kinds() -> tuple[type, type, type]:
    """The layers of 8 and of 4 bits; their library takes two seconds to import, so not at collection."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return Linear8bitLt, Linear4bit, CodedLinear


def off(found: list[Tensor], exact: list[Tensor]) -> float:
    ours, theirs = torch.cat(found).double(), torch.cat(exact).double()
    return float((ours - theirs).norm() / theirs.norm())


def numbers(layer: Any) -> tuple[Tensor, Tensor]:
    """What a quantised layer holds: codes and scales, by row of the weight."""
    if isinstance(layer, kinds()[0]):
        return layer.weight.CB, layer.weight.SCB
    rows = layer.out_features
    if isinstance(layer, CodedLinear):  # in blocks of outputs
        return tuple(part.transpose(1, 2).flatten(0, 1)[:rows] for part in (layer.codes, layer.scales))
    return layer.weight.data.view(rows, -1), layer.weight.quant_state.absmax.view(rows, -1)


def rows_of(config: Any, world: int, rank: int) -> dict[str, Cut]:
    """The rank's rows of layers that are cut by their outputs."""
    shape = shape_of(config)
    heads, mlp = head_ranges(shape.n_heads, shape.n_kv, world, rank), mlp_share(shape.ffn, world, rank)

    def at(begin: int, span: Span, size: int = 1) -> Span:
        return (begin + span[0]) * size, (begin + span[1]) * size

    fused = at(0, heads.query), at(shape.n_heads, heads.kv), at(shape.n_heads + shape.n_kv, heads.kv)
    qkv = tuple(at(0, span, shape.head_dim) for span in fused)
    gated = shape.family.gated
    up = (mlp, at(shape.ffn, mlp)) if gated else (mlp,)
    return {"attention.qkv": Cut(ROWS, qkv), "mlp.up": Cut(ROWS, up)}


@dataclass(frozen=True)
class Split:
    """A model in fp32, the same quantised, and its quantised parts with the ranks that hold them."""

    world: int
    plain: Any
    whole: Any
    parts: list[Any]
    ranks: list[Any]


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module", params=DTYPES)
def split(folder: Path, world: int, request: pytest.FixtureRequest) -> Split:
    plain, whole = (load(MODEL, folder, held, CPU, "model") for held in (Dtype.fp32, request.param))
    parts, ranks = parts_of(folder, world, request.param)
    return Split(world, plain, whole, parts, ranks)


@pytest.mark.few(6)
def test_parts_hold_the_whole_layers_numbers(split: Split):
    for rank, part in enumerate(split.parts):
        for block, full in zip(part.decoder.blocks, split.whole.decoder.blocks, strict=True):
            for layer, cut in rows_of(split.plain.config, split.world, rank).items():
                both = numbers(block.get_submodule(layer)), numbers(full.get_submodule(layer))
                for held, all_rows in zip(*both, strict=True):
                    assert torch.equal(held, taken(all_rows, cut)), (rank, layer)


@pytest.mark.few(6)
def test_parts_are_quantised_where_inputs_are_cut(split: Split):
    """The first rank alone adds the bias."""
    for rank, part in enumerate(split.parts):
        for block in part.decoder.blocks:
            for layer in (block.attention.output, block.mlp.down):
                assert isinstance(layer, Summed) and isinstance(layer.product, kinds()), rank
                assert rank == 0 or layer.product.bias is None, rank


@pytest.mark.few(6)
def test_the_head_of_a_part_is_not_quantised(split: Split):
    for rank, part in enumerate(split.parts):
        assert type(part.decoder.head.product) is nn.Linear, rank
        assert part.decoder.head.product.weight.dtype is torch.bfloat16, rank


@pytest.mark.few(6)
def test_parts_lose_no_accuracy(split: Split):
    exact = walked(split.plain)
    single = off(walked(split.whole), exact)
    by_rank = on_all(split.parts, split.ranks)
    assert 0 < single < 1
    for rank, logits in enumerate(by_rank):
        assert off(logits, exact) <= NO_WORSE * single, rank
        assert all(torch.equal(one, other) for one, other in zip(logits, by_rank[0], strict=True)), rank


MADE = ModelConf(
    name="made", weights=Weights.synthetic, family="llama", n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64,
    dim=256, ffn=320, vocab=101, context=64,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_synthetic_weights_are_quantised_after_they_are_made(dtype: Dtype):
    """Over ranks as in one process, and the distribution, which is in 16 bit, stays."""
    whole = load(MADE, None, dtype, CPU, "model")
    layers = [m for m in whole.decoder.modules() if isinstance(m, kinds())]
    assert len(layers) == 2 * 4
    expected, exact = walked(whole), walked(load(MADE, None, Dtype.bf16, CPU, "model"))
    assert off(expected, exact) < 0.02
    for logits in on_all(*parts_of(None, 2, dtype, MADE)):
        assert off(logits, exact) < 0.02


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["replicated-kv", "opt"])
def test_parts_with_our_kernel_lose_no_accuracy(name: str, folders: dict[str, Path]):
    """Cut outputs and cut inputs, with biases and without; every rank has the same logits."""
    folder, ranks = folders[name], ranks_of(2)
    plain, whole = (load(MODEL, folder, held, CPU, "model") for held in (Dtype.fp32, Dtype.int8))
    parts = [load(MODEL, folder, Dtype.int8, CPU, "model", rank, fast=True) for rank in ranks]
    inner = [layer.product for layer in parts[0].decoder.modules() if isinstance(layer, Summed)]
    assert inner and all(isinstance(layer, CodedLinear) for layer in inner)

    exact = walked(plain)
    by_rank = on_all(parts, ranks)
    assert off(by_rank[0], exact) <= NO_WORSE * off(walked(whole), exact)
    assert all(torch.equal(one, other) for one, other in zip(*by_rank, strict=True))


def test_parts_of_blocks_are_refused_before_anything_is_read():
    """Alike on every rank: the line names no rank. bitsandbytes would give wrong numbers in silence."""
    odd = replace(MADE, dtype=Dtype.nf4, n_heads=12, n_kv_heads=12, head_dim=32, dim=384)
    require_split(odd, 2)
    for world, what, found in ((4, "heads of a rank", 96), (5, "heads of a rank", 96)):
        with pytest.raises(DistributedError, match=f"whole blocks; model made, {what}; found {found}"):
            require_split(odd, world)
    require_split(replace(odd, dtype=Dtype.int8), 5)
    with pytest.raises(DistributedError, match="MLP width of a rank; found 16"):
        require_split(replace(odd, ffn=16 + 64), 2)
    with pytest.raises(DistributedError, match="dim; found 416"):
        load(replace(MADE, dtype=Dtype.nf4, dim=416), None, Dtype.nf4, CPU, "model")


def test_a_checkpoint_of_unknown_shape_is_refused_too(tmp_path: Path):
    build("llama-gqa").save_pretrained(tmp_path)  # inputs of 32 and 48
    for world in (1, 2):
        with pytest.raises(ModelError, match=f"whole blocks of nf4; .*allowed a multiple of {NF4_BLOCK}"):
            parts_of(tmp_path, world, Dtype.nf4)


def test_outputs_that_the_fast_kernel_does_not_take(tmp_path: Path):
    """A KV head of 16 columns: no multiple of the kernel's 32 outputs."""
    changes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    build("llama-mqa", mild=True, **changes).save_pretrained(tmp_path)
    exact = walked(load(MODEL, tmp_path, Dtype.fp32, CPU, "model"))
    assert off(walked(load(MODEL, tmp_path, Dtype.nf4, CPU, "model")), exact) < 0.5
