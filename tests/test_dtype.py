"""Number formats: weights are held as asked, and int8 and nf4 through bitsandbytes run on a CPU."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.config import Dtype, ModelConf, Weights
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.devices import device_of, dtype_of
from llama_ssp.models.interface import Model
from llama_ssp.models.loader import load
from llama_ssp.models.passes import Pass, all_rows
from llama_ssp.models.quantization import coded_of
from llama_ssp.planner.storage import Storage
from llama_ssp.planner.weights import ModelPart, held
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.certify.greedy import Finding, check_greedy
from tests import checkpoints
from tests.conftest import Command
from tests.distributed.threads import ranks_of
from tests.families import VOCAB, build, decoder_of
from tests.rig import Run, speculate

# int8 rounds each weight to 1/254 of the largest of its row and each activation likewise, and the rest of
# the pass is in bf16 (1/256): of a logit's size a tenth is allowed, twice what is seen.
INT8_TOLERANCE = 0.1
# nf4 rounds a weight to one of 16 levels: of normal weights in blocks of 64, 0.09 of their size is lost.
NF4_LOSS = (0.08, 0.10)
CPU = torch.device("cpu")
HELD = [
    (Dtype.fp64, torch.float64, 1e-5), (Dtype.fp32, torch.float32, 0.0), (Dtype.bf16, torch.bfloat16, 0.05),
    (Dtype.fp16, torch.float16, 0.02),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build("llama-gqa", mild=True).save_pretrained(path)
    return path


@cache
def opened(path: Path, dtype: Dtype) -> Any:
    return load(ModelConf(name="tiny", path=str(path)), path, dtype, CPU, "model")


SOME_1S = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))


def logits_of(model: Model, text_1S: torch.Tensor = SOME_1S) -> torch.Tensor:
    """Returns the logits of every token of one text, (S, V)."""
    length = text_1S.shape[1]
    pass_ = Pass(spans=all_rows([0], [length]), device=CPU)
    return model.logits(text_1S, pass_, model.new_cache(1, length))[0].double()


PROMPTS = [Prompt("a", (5, 6, 7, 8)), Prompt("b", (9,)), Prompt("c", tuple(range(20, 40)))]


def off(path: Path, dtype: Dtype) -> float:
    logits, exact = logits_of(opened(path, dtype)), logits_of(opened(path, Dtype.fp32))
    assert torch.isfinite(logits).all()
    return float((logits - exact).abs().max()) / float(exact.abs().max())


def speculates(target: Model, draft: Model, k: int = 4) -> Run:
    run = speculate(target, PROMPTS, draft, k=k, max_new=16)
    assert [len(text) for text in run.texts] == [16] * 3 and 0 < run.accepted <= run.drafted
    return run


@pytest.mark.parametrize("dtype, held, tolerance", HELD)
def test_weights_are_held_as_asked(
    checkpoint: Path, dtype: Dtype, held: torch.dtype, tolerance: float
) -> None:
    model = opened(checkpoint, dtype)
    assert {p.dtype for p in model.decoder.parameters()} == {held} == {model.dtype}
    speculates(model, model)
    assert off(checkpoint, dtype) <= tolerance


def quantised(path: Path, dtype: Dtype, kind: type) -> dict[str, Any]:
    """The quantised layers of a model that is in bf16 otherwise, by name."""
    model = opened(path, dtype)
    layers = {name: module for name, module in model.decoder.named_modules() if isinstance(module, kind)}
    assert len(layers) == 3 * 4  # qkv, o, gate and up, down; the head stays as it is
    assert model.dtype is torch.bfloat16 and model.weights_bytes < opened(path, Dtype.bf16).weights_bytes
    return layers


def test_int8_is_loaded_as_int8(checkpoint: Path) -> None:
    from bitsandbytes.nn import Linear8bitLt

    layers = quantised(checkpoint, Dtype.int8, Linear8bitLt)
    assert all(layer.weight.dtype is torch.int8 for layer in layers.values())


def test_int8_is_near_fp32(checkpoint: Path) -> None:
    assert 0 < off(checkpoint, Dtype.int8) <= INT8_TOLERANCE


@pytest.mark.parametrize("k", [1, 4])
def test_int8_speculates(k: int, checkpoint: Path) -> None:
    """As target and as draft. Greedy equality is not promised; what is written must be a near tie."""
    target, wide = opened(checkpoint, Dtype.int8), opened(checkpoint, Dtype.bf16)
    plain = speculate(target, PROMPTS, None, k=0, max_new=16)
    speculates(wide, target, k)
    report = check_greedy(target, PROMPTS, plain.texts, speculates(target, wide, k).texts, k)
    assert report.verdict is not Finding.unexplained


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sizes make whole blocks of 64 weights; others are refused (test_quantised)."""
    path = tmp_path_factory.mktemp("in_blocks")
    build("llama-gqa", mild=True, hidden_size=128, intermediate_size=192).save_pretrained(path)
    return path


def test_nf4_is_loaded_as_nf4(in_blocks: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, layer in quantised(in_blocks, Dtype.nf4, Linear4bit).items():
        state = layer.weight.quant_state
        assert state.quant_type == "nf4" and not state.nested, f"{name}: scales are not quantised"
        exact = opened(in_blocks, Dtype.fp32).decoder.get_submodule(name).weight.detach()
        held = dequantize_4bit(layer.weight.data, state)
        assert NF4_LOSS[0] < float((held - exact).norm() / exact.norm()) < NF4_LOSS[1], name


def test_nf4_is_multiplied_by_a_gpus_kernel_as_it_is_held(in_blocks: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, layer in quantised(in_blocks, Dtype.nf4, Linear4bit).items():
        held = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert torch.equal(coded_of(layer).decoded(held.dtype), held), name


def test_nf4_speculates(in_blocks: Path) -> None:
    speculates(opened(in_blocks, Dtype.nf4), opened(in_blocks, Dtype.bf16))


WIDE = ModelConf(
    name="wide", weights=Weights.synthetic, family="llama", n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64,
    dim=256, ffn=704, vocab=500, context=64,
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "dtype", [Dtype.bf16, Dtype.int8, pytest.param(Dtype.int4, marks=pytest.mark.compiler), Dtype.nf4]
)
def test_what_is_held_is_what_is_planned(dtype: Dtype) -> None:
    """Scales and tables of quantised layers included, as loaded and after a pass; by rank, too.

    A CPU with bf16 instructions keeps nf4's scales in bf16 from its first pass on.
    """
    model = load(replace(WIDE, dtype=dtype), None, dtype, CPU, "model")
    store = Storage(kernel="cpu")
    planned = sum(held(ModelPart.of(WIDE), dtype, store).values())
    assert model.weights_bytes == planned
    speculate(model, PROMPTS, None, k=0, max_new=2)
    packed = dtype is Dtype.nf4 and model.weights_bytes < planned
    scales = held(ModelPart.of(WIDE), dtype).get("quantisation scales", 0)
    assert model.weights_bytes == planned or (packed and model.weights_bytes > planned - scales)
    for rank in ranks_of(2):
        part = load(replace(WIDE, dtype=dtype), None, dtype, CPU, "model", rank)
        assert part.weights_bytes == sum(held(ModelPart.of(WIDE, 2, rank.rank), dtype, store).values())


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@torch.inference_mode()
def test_embeddings_are_scaled_by_transformers_rounded_factor(name: str) -> None:
    """To the bit in bf16, in which sqrt(32) is another number: what the first block is given."""
    module = build(name, dtype=torch.bfloat16)
    model = DecoderModel(decoder_of(module), module.config, name)
    model.tap((0,))
    text_1S = torch.arange(VOCAB)[None]
    logits_of(model, text_1S)

    expected_1SH = module(text_1S, output_hidden_states=True).hidden_states[0]
    assert torch.equal(model.tapped_TX, expected_1SH[0].float())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_a_router_in_bf16_tells_close_experts_apart(name: str) -> None:
    """Experts whose chances are one number in bf16 are ranked in fp32, as in transformers.

    One layer, in which attention adds nothing: routers then have the same inputs to the bit. Where another
    expert is chosen, logits are off by half of their size; rounding alone makes them off by 0.5 %.
    """
    module = build(name, mild=True, num_hidden_layers=1)
    for key, weight in module.named_parameters():
        if key.endswith("o_proj.weight"):
            weight.zero_()
        elif key.endswith("gate.weight"):
            weight.mul_(0.03)  # the chances of four experts are close to a quarter

    module = module.bfloat16()
    text_1S = torch.arange(VOCAB)[None]
    logit_SV = logits_of(DecoderModel(decoder_of(module), module.config, name), text_1S)
    expected_SV = module(text_1S, use_cache=False).logits[0].double()
    assert (logit_SV - expected_SV).abs().max() < 0.05 * expected_SV.abs().max()


def test_weights_bytes_count_a_tied_head_once() -> None:
    model = CausalModel(build("llama-tied"), "tied")
    own = sum(p.nbytes for p in model.module.parameters())
    assert own <= model.weights_bytes < 1.01 * own


def test_a_device_has_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {device_of(name, "x") for name in ("cuda", "auto", "cuda:0")} == {torch.device("cuda:0")}
    assert device_of("cuda:1", "x") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of("cuda", "x") == device_of("auto", "x") == torch.device("cuda:1")


def test_a_line_says_that_weights_in_fp32_are_rounded(
    command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, of the target, and only where nobody has said how they are held."""
    folder = str(checkpoints.save(tmp_path / "wide"))
    words = (f"model={folder}", f"draft={folder}", "task.prompts=[x]", "task.max_new_tokens=2", "seed=1")
    line = "model wide: fp32 on disk, bf16 here; model.dtype=fp32 keeps it"
    is_rounded = dtype_of(Dtype.auto, CPU, "model.dtype") is Dtype.bf16
    for given, count in ((), int(is_rounded)), (("model.dtype=fp32",), 0), (("model.dtype=bf16",), 0):
        caplog.clear()
        answer = command(*words, *given, "out=null")
        assert answer.code == 0, answer.err
        assert (caplog.text.count(line), caplog.text.count("on disk")) == (count, count), given
