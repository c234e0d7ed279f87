"""GGUF files: what the gguf library writes is read as it reads it, whole and over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.config.arguments import in_full
from llama_ssp.config.compose import composed
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import ModelError
from llama_ssp.models.assemble import decoder, wanted
from llama_ssp.models.attention import Rotary
from llama_ssp.models.checkpoint import inspect, with_shape
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.folder import fingerprint, gguf_in
from llama_ssp.models.formats import gguf_source
from llama_ssp.models.formats.coded import Coded
from llama_ssp.models.formats.gguf_header import read_header
from llama_ssp.models.formats.gguf_source import GgufSource
from llama_ssp.models.formats.kept import GGUF, GGUF_FORMATS
from llama_ssp.models.linear import LayerFormat
from llama_ssp.models.loader import differences
from llama_ssp.models.model_config import require_supported
from llama_ssp.models.shape import ALL
from llama_ssp.models.sharding import COLUMNS, ROWS, Cut, head_ranges
from llama_ssp.placing import pairs
from llama_ssp.placing.pairs import pair_specs
from tests.distributed.threads import ranks_of, together
from tests.families import TOLERANCE, require_same, rope, walked
from tests.gguf_files import SIZES, gguf, number, write
from tests.quantised_folders import quantised

# As people have them: most matrices in one format, some in a finer one.
MIXED = {
    "": "Q4_K", "ffn_down": "Q8_0", "attn_v": "Q6_K", "attn_output": "Q5_K", "token_embd": "Q6_K",
    "output": "Q6_K",
}  # fmt: skip
SHARP = 3.0  # times the weights that transformers draws: even attention hides errors
WINDOW = {"attention.sliding_window": 11}
LLAMA_3 = rope(
    "llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 11, "tie_word_embeddings": True}
WIDE_HEADS = {"head_dim": 64, "query_pre_attn_scalar": 64}  # not the width through the number of heads
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LONG = rope(
    "longrope", original_max_position_embeddings=64, short_factor=[1.0 + n / 8 for n in range(16)],
    long_factor=[2.0 + n for n in range(16)],
)  # fmt: skip
# By name: the model, its own sizes, and keys of the file.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-biased": ("llama", {"attention_bias": True, "tie_word_embeddings": True}, {}),
    "llama-3": ("llama", LLAMA_3, {"rope.freq_base": 500000.0}),
    "llama-yarn": (
        "llama", rope("yarn", factor=4.0, original_max_position_embeddings=32),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "qwen2": ("qwen2", {}, {"attention.key_length": None}),
    "qwen3": ("qwen3", {"head_dim": 64}, {}),
    "gemma2": ("gemma2", GEMMA | WIDE_HEADS, WINDOW | CAPS),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA, "num_hidden_layers": 6, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {**WINDOW, "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": 11}, WINDOW),
    "phi3-long": (
        "phi3", {**LONG, "pad_token_id": 0, "sliding_window": None, "original_max_position_embeddings": 64},
        {"rope.scaling.original_context_length": 64},
    ),
}  # fmt: skip


def factors(module: Any) -> dict[str, np.ndarray]:
    """The tensors with which files say how rotary positions are scaled."""
    parameters = module.config.rope_parameters
    if parameters.get("rope_type") == "llama3":
        plain = 500000.0 ** (torch.arange(0, 32, 2) / 32)
        return {"rope_freqs.weight": (1 / (module.model.rotary_emb.inv_freq * plain)).numpy()}
    if parameters.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(parameters[f"{kind}_factor"], np.float32)
            for kind in ("short", "long")
        }
    return {}


def made(
    name: str, folder: Path, kinds: dict[str, str] = MIXED, metadata: Any = None, split: int = 0, **sizes: Any
) -> tuple[Path, Any]:
    """A file, and the module with its weights as the library decodes them; `metadata` adds to the writer."""
    family, own, keys = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **own, **sizes})
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARP)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.3)

        def added(writer: Any) -> None:
            for each in factors(module).items():
                writer.add_tensor(*each)
            if metadata:
                metadata(writer)

        return write(folder / f"{name}.gguf", module, kinds, added, split, **keys), module


def opened(path: Path, ranks: Ranks = ALONE, **how: Any) -> Decoder:
    config = require_supported(path)
    source = GgufSource(read_header(path), config, wanted(config))
    assert not any(differences(wanted(config), source.shapes, config).values())
    return decoder(config, source, ranks, LayerFormat(**how))


@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_weights_are_those_of_the_library_to_the_bit(kind: str, tmp_path: Path) -> None:
    path, module = made(
        "qwen2", tmp_path, {"": "F32", "ffn_down": kind}, num_hidden_layers=1, intermediate_size=512
    )
    source = GgufSource(read_header(path), module.config, wanted(module.config))
    name = "model.layers.0.mlp.down_proj.weight"
    expected = module.state_dict()[name]
    cuts = [
        (None, expected),
        (Cut(ROWS, ((7, 40),)), expected[7:40]),
        (Cut(ROWS, ((0, 8), (64, 256))), torch.cat([expected[:8], expected[64:]])),
        *((Cut(COLUMNS, (span,)), expected[:, slice(*span)]) for span in ((0, 64), (192, 448), (32, 96))),
        (Cut(COLUMNS, ((8, 500),)), expected[:, 8:500]),
    ]  # fmt: skip
    for cut, part in cuts:
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(whole(source.read(name, cut), dtype), part.to(dtype)), cut


@pytest.mark.parametrize("kind", GGUF)
def test_any_bytes_are_decoded_as_the_library_does(kind: str) -> None:
    numbers, size = gguf.GGML_QUANT_SIZES[number(kind)]
    raw = np.random.default_rng(1).integers(0, 256, (24, 4, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw.reshape(24, -1), number(kind)))
    weight, (bits, group, scale, _) = gguf_source.coded(kind, torch.from_numpy(raw)), GGUF[kind]
    assert weight.nbytes == 24 * 4 * (numbers * bits // 8 + numbers // group * scale)
    found = weight.decoded(torch.float32)
    assert found.shape == (24, 4 * numbers) and found.isfinite().float().mean() > 0.8
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def whole(part: Tensor | Coded, dtype: torch.dtype) -> Tensor:
    return part.decoded(dtype) if isinstance(part, Coded) else part.to(dtype)


def require_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_are_those_of_the_decoded_weights(name: str, tmp_path: Path) -> None:
    path, module = made(name, tmp_path)
    require_same(module, *walked(opened(path)))
    checkpoint = inspect(path)
    model = with_shape(ModelConf(name="x", path=str(path)), checkpoint, "model")
    assert (model.n_layers, model.vocab) == (module.config.num_hidden_layers, 300)
    assert model.tied == module.config.tie_word_embeddings
    assert model.head_dim == getattr(module.config, "head_dim", 32)
    if name != "gemma3":  # which has two kinds
        rotary = Rotary.of(require_supported(path), ALL)
        assert torch.allclose(rotary.frequency, module.model.rotary_emb.inv_freq, rtol=1e-6)
        assert rotary.factor == pytest.approx(module.model.rotary_emb.attention_scaling)


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)], ids=["gemma2", "gemma3"])
def test_scores_of_the_largest_gemmas_have_another_scale(name: str, layers: int, tmp_path: Path) -> None:
    """A file does not say it: of 27B it is the width by the number of heads, not the heads' size."""
    small = {"hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    path, _ = made(name, tmp_path, {"": "F32"}, num_hidden_layers=layers, head_dim=16, **small)
    assert require_supported(path).query_pre_attn_scalar == 48 / 2


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "gemma3", "phi3"])
@torch.inference_mode()
def test_parts_give_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    """Shares differ, and end inside the blocks of 256 numbers of attention's output, and of an MLP of 512.

    Each matrix is in the format of the file, also where queries, keys and values differ.
    """
    kinds = MIXED | {"ffn_down": "Q3_K", "1.attn_q": "F16"}
    path, module = made(name, tmp_path, kinds, intermediate_size=512, hidden_size=256)
    assert len({head_ranges(8, 4, 3, rank).queries for rank in range(3)}) > 1
    expected, texts = walked(opened(path))
    require_same(module, expected, texts)
    for world, keeps in [(2, False), (3, False), *((world, True) for world in (1, 2, 3))]:
        ranks = ranks_of(world)
        parts = [opened(path, rank, keeps_codes=keeps) for rank in ranks]
        for logits in together([lambda part=part: walked(part)[0] for part in parts], ranks):
            require_near(logits, expected)
        plain = [layer for layer in parts[0].blocks.modules() if isinstance(layer, nn.Linear)]
        assert not keeps or bool(plain) == (name != "phi3"), "queries in 16 bit, other layers in codes"


# Sizes with which transformers reads what the file says: it has its own defaults for what it does not read.
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
READ_RIGHT: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 128, **TWO_HEADS},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, **TWO_HEADS},
}  # fmt: skip


@pytest.mark.parametrize("name", READ_RIGHT)
@torch.inference_mode()
def test_a_model_is_that_of_transformers_own_load(name: str, tmp_path: Path) -> None:
    path, _ = made(name, tmp_path, **READ_RIGHT[name])
    how: dict[str, Any] = {"gguf_file": path.name, "attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **how).eval()
    require_same(theirs, *walked(opened(path)))
    lower = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **how).state_dict()
    source = GgufSource(read_header(path), theirs.config, wanted(theirs.config))
    assert len(source.shapes) >= 2 + 9 * 2
    for name in source.shapes:
        assert torch.equal(whole(source.read(name, None), torch.bfloat16), lower[name]), name


def test_codes_stay_codes_by_default_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GGUF file's, and those of a quantised folder that has some to keep."""
    path, _ = made("llama", tmp_path, MIXED)
    (tmp_path / "plain").mkdir()
    plain = made("llama", tmp_path / "plain", dict.fromkeys(MIXED, "F16"))[0]

    def format_of(file: Path, *words: str) -> Dtype:
        run = composed(in_full([f"model={file}", "draft=none", "max_new_tokens=8", *words]))
        dtype = pair_specs(run, [], 1)[0].run.model.dtype
        assert pairs.pair_files(run, [], dry=True)[0].run.model.dtype is dtype  # of a plan
        return dtype

    monkeypatch.setattr(pairs, "compiler", lambda: "g++")
    assert format_of(path) is format_of(quantised("awq", tmp_path / "awq")) is Dtype.packed
    assert format_of(quantised("gptq-act-order", tmp_path / "gptq")) is Dtype.auto
    assert format_of(path, "model.dtype=bf16") is Dtype.bf16
    assert format_of(plain) is format_of(path, "cluster=p4d") is Dtype.auto
    assert format_of(path, "placement.splitting=layers") is Dtype.auto
    monkeypatch.setattr(pairs, "gpus_here", lambda: ["a GPU"])
    assert format_of(path) is Dtype.auto and format_of(path, "placement=cpu") is Dtype.packed
    monkeypatch.setattr(pairs, "gpus_here", list)
    monkeypatch.setattr(pairs, "compiler", lambda: None)
    assert format_of(path) is Dtype.auto


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    """Linux refuses to map so many bytes if the mapping can be written."""
    path, module = made("llama", tmp_path)
    source = GgufSource(read_header(path), module.config, wanted(module.config))
    name, place = next(iter(source._places.items()))
    tensor = place.tensor
    before = whole(source.read(name, None), torch.float32)
    table = Path("/proc/meminfo").read_text().splitlines()
    memory = next(line for line in table if line.startswith("MemTotal"))
    start = 8 * 1024 * int(memory.split()[1])
    with (tmp_path / "far").open("wb") as file:
        file.seek(start)
        file.write(path.read_bytes()[tensor.data_offset : tensor.data_offset + tensor.n_bytes])
    data = np.memmap(tmp_path / "far", np.uint8, "r", shape=(1,))
    source._places[name] = replace(place, tensor=tensor._replace(data=data, data_offset=start))
    assert torch.equal(whole(source.read(name, None), torch.float32), before)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """Any of its files names it; a missing one is named."""
    _, module = made("qwen2", tmp_path, {"": "Q8_0"}, split=14)
    first, second = (tmp_path / f"qwen2-{part:05}-of-00002.gguf" for part in (1, 2))
    assert gguf_in(first.parent) == gguf_in(second) == gguf_in(first) == first
    with torch.inference_mode():
        require_same(module, *walked(opened(first)))
    before = fingerprint(first)
    second.write_bytes(second.read_bytes()[:-1] + b"x")
    assert fingerprint(first) != before
    second.unlink()
    with pytest.raises(ModelError, match=r"a file of the model is missing.*qwen2-00002"):
        read_header(first)


def test_what_a_folder_means(tmp_path: Path) -> None:
    assert gguf_in(tmp_path) is None
    (tmp_path / "a.gguf").write_bytes(b"")
    assert gguf_in(tmp_path) == gguf_in(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"several GGUF models.*a\.gguf, b\.gguf.*path="):
        gguf_in(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_in(tmp_path) is None


def test_any_factors_of_rotary_positions_are_used(tmp_path: Path) -> None:
    odd = np.linspace(1, 8, 16, dtype=np.float32)
    path, _ = made("llama", tmp_path, metadata=lambda writer: writer.add_tensor("rope_freqs.weight", odd))
    rotary = Rotary.of(require_supported(path), ALL)
    plain = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    assert torch.allclose(rotary.frequency, plain / torch.from_numpy(odd)) and rotary.factor == 1
    assert torch.equal(rotary.frequency, rotary.long_frequency)
