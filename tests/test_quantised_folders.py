"""Quantised folders: each weight is the library's to the bit, in one process and over ranks; experts, too."""

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import ModelError
from llama_ssp.models.assemble import decoder, wanted
from llama_ssp.models.checkpoint import SHIPPED_FOLDER, complete, inspect
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.experts import Experts, apply_on_gpu
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.formats.coded_source import source_of
from llama_ssp.models.formats.quantised_config import quantised_config
from llama_ssp.models.kernels import expert_stacks
from llama_ssp.models.kernels.coded import DecodedLinear, operators
from llama_ssp.models.kernels.expert_stacks import Stack
from llama_ssp.models.kernels.kernel_sizes import DECODED
from llama_ssp.models.linear import Concatenated, Kernels, LayerFormat
from llama_ssp.models.loader import differences, load, read
from llama_ssp.models.model_config import config_of
from llama_ssp.models.sharding import COLUMNS, ROWS, Cut
from llama_ssp.models.steps import SteppedModel
from llama_ssp.models.wrapped import naming
from tests import quantised_folders
from tests.checkpoints import WEIGHTS, Tensors, copied, edit, edit_tensors
from tests.conftest import Command
from tests.distributed.test_quantised import off
from tests.distributed.test_tensor import walked as by_steps
from tests.distributed.threads import ranks_of, together
from tests.families import require_same, walked
from tests.memory_trace import LiveBytes
from tests.quantised_folders import ALL, FORMATS, WITH_ACTIVATIONS, matrices, plain, quantised, weights_of
from tests.test_gguf import require_near, whole
from tests.test_packed_bytes import same, some_plain

IN_BF16 = (
    "nf4-bf16",
    "nvfp4",
    "nvfp4-modelopt",
)  # the library gives bf16; other numbers are rounded once less in fp32
STACKED = None, Cut(2, ((6, 40),)), Cut(2, ((0, 8), (30, 64))), Cut(1, ((32, 64),)), Cut(1, ((16, 50),))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def opened(folder: Path) -> Any:
    config = config_of(None, folder, "model")  # type: ignore[arg-type]
    content = inspect(folder).config
    claim = quantised_config(content, folder)
    return closing(source_of(folder, wanted(config), "model", claim, naming(content)))


def loaded(folder: Path, ranks: Ranks = ALONE, **how: Any) -> Decoder:
    config = config_of(None, folder, "model")  # type: ignore[arg-type]
    with opened(folder) as source:
        found = differences(wanted(config), source.shapes, config)
        assert not any(found.values()), found
        return decoder(config, source, ranks, LayerFormat(**how))


def walked_by(folder: Path, world: int, **how: Any) -> tuple[list[Decoder], list[list[Tensor]]]:
    ranks = ranks_of(world)
    parts = [loaded(folder, rank, **how) for rank in ranks]
    return parts, together([lambda part=part: walked(part)[0] for part in parts], ranks)  # type: ignore[misc]


def like(weight: Tensor, part: Tensor) -> Tensor:
    """Experts of one tensor, as it has them: inputs first."""
    return part.view(len(weight), -1, part.shape[-1]).transpose(1, 2) if weight.ndim == 3 else part


@pytest.mark.parametrize("name", ALL)
def test_every_weight_is_that_of_the_library(name: str, folders: Path) -> None:
    """Of the first layer: whole, and parts that begin and end inside groups and words."""
    folder = quantised(name, folders / name)
    expected = weights_of(name, folder)
    with opened(folder) as source:
        for key in [key for key in matrices(plain(folder)) if ".layers.0." in key]:
            weight = expected[key]
            outputs, inputs = weight.shape[-2:]
            cuts = STACKED if weight.ndim == 3 else [
                None, Cut(ROWS, ((4, outputs * 3 // 8 + 4),)), Cut(ROWS, ((0, 8), (outputs - 30, outputs))),
                Cut(COLUMNS, ((0, 128),)), Cut(COLUMNS, ((64, inputs),)),
                Cut(COLUMNS, ((inputs * 3 // 8, inputs * 7 // 8),)),
            ]  # fmt: skip
            assert weight.flatten()[:4096].unique().numel() > 8, key
            for cut in cuts:
                part = like(weight, whole(source.read(key, cut), weight.dtype))
                assert torch.equal(part, taken(weight, cut)), (key, cut)


DYNAMIC = {
    "a layer in 8 bit": ("gptq-8-bit", {"bits": 8}),
    "a layer in groups of 64": ("gptq-64", {"group_size": 64}),
    "a layer with act-order": ("gptq-act-order", {"desc_act": True}),
}


@pytest.mark.parametrize("case", DYNAMIC)
@torch.inference_mode()
def test_gptq_with_settings_of_single_layers(case: str, folders: Path, tmp_path: Path) -> None:
    """Keys of the first layer as another folder has them: read, and planned to the byte."""
    other, settings = DYNAMIC[case]
    usual = quantised("gptq-zeros", folders / "gptq-zeros")
    unusual = quantised(other, folders / other)
    keys = "model.layers.0.self_attn.k_proj"
    own = {name: tensor for name, tensor in load_file(unusual / WEIGHTS).items() if keys in name}
    path = copied(usual, tmp_path / "mixed")
    edit_tensors(path, lambda tensors: tensors.update(own))
    with pytest.raises((ModelError, AssertionError)):
        same(path)  # the control: without the rule the layer does not fit, or is planned wrong

    rules = {"-:.*lm_head.*": {}, r"+:.*layers\.0\..*k_proj": settings}
    edit(path / "config.json", lambda c: c["quantization_config"].update(dynamic=rules))
    same(path)
    with opened(path) as source:
        part = whole(source.read(f"{keys}.weight", None), torch.float16)
    assert torch.equal(part, weights_of(other, unusual)[f"{keys}.weight"])


def test_a_pattern_that_may_take_for_ever_is_refused(folders: Path, tmp_path: Path) -> None:
    path = copied(quantised("gptq", folders / "gptq"), tmp_path / "slow")
    rules = {r"(.|\w|[a-z])+[XY]": {"bits": 8}}
    edit(path / "config.json", lambda c: c["quantization_config"].update(dynamic=rules))
    with pytest.raises(ModelError, match="takes too long"):
        same(path)


def test_a_folder_that_was_saved_uncompressed_is_refused_by_name(folders: Path, tmp_path: Path) -> None:
    """With save_compressed=False weights are plain, next to the scales by which the library rounds them."""
    source = quantised("int8-channel", folders / "int8-channel")
    path = copied(source, tmp_path / "uncompressed")
    inspect(path)
    edit_tensors(path, lambda tensors: tensors.update(weights_of("int8-channel", source)))
    with pytest.raises(
        ModelError, match=r"saved uncompressed .*use a copy of the model in another"
    ) as raised:
        inspect(path)
    assert "fetch" not in str(raised.value)


def test_packed_says_that_all_layers_with_act_order_are_decoded(folders: Path) -> None:
    path = quantised("gptq-act-order", folders / "gptq-act-order")
    model = ModelConf(name="ordered", path=str(path), dtype=Dtype.packed)
    with pytest.raises(ModelError, match=r"found gptq.*act-order, which is decoded .*model\.dtype=bf16$"):
        complete(model, "model")


def test_experts_by_the_names_of_other_tools(folders: Path, tmp_path: Path) -> None:
    """gptqmodel writes Mixtral's experts as `mlp.experts.N.gate_proj`."""
    usual = quantised("mixtral-gptq", folders / "mixtral-gptq")
    path = copied(usual, tmp_path / "other")
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if "block_sparse_moe" in name]:
            other = name.replace("block_sparse_moe", "mlp")
            for old, new in names.items():
                other = other.replace(f".{old}.", f".{new}.")
            tensors[other] = tensors.pop(name)

    edit_tensors(path, rename)
    same(path)
    with torch.inference_mode():
        assert all(map(torch.equal, walked(loaded(path))[0], walked(loaded(usual))[0]))


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_logits_are_those_of_transformers_with_the_librarys_weights(name: str, folders: Path) -> None:
    """In one process, and over two and three; decoded, and with codes that are kept (test_packed_bytes.py).

    Two decode where three keep codes, and the other way round in the next format.
    """
    folder = quantised(name, folders / name)
    expected, texts = walked(loaded(folder))
    if name not in IN_BF16:
        require_same(quantised_folders.reference(name, folder), expected, texts)
    turn = list(ALL).index(name) % 2
    for world, keeps in [(2 + turn, False), (1, True), (3 - turn, True)]:
        if keeps and name == "gptq-act-order":
            continue
        parts, found = walked_by(folder, world, keeps_codes=keeps)
        for logits in found:
            require_near(logits, expected)
        if keeps and name in FORMATS and name != "mxfp4":  # these have experts alone
            layers = [layer for part in parts for layer in part.modules() if isinstance(layer, DecodedLinear)]
            assert len(layers) == 4 * len(parts[0].blocks) * world
        elif not keeps and not name.endswith("-blocks"):
            assert len({sum(weight.numel() for weight in part.parameters()) for part in parts}) > 1, "uneven"


@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.packed])
@pytest.mark.parametrize("name", [*WITH_ACTIVATIONS, "fine-grained", "int8-channel"])
def test_one_line_says_that_activations_are_not_quantised(
    name: str, dtype: Dtype, folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last format does not ask for it."""
    folder = quantised(name, folders / name)
    with caplog.at_level(logging.DEBUG):
        load(ModelConf(name="x"), folder, dtype, torch.device("cpu"), "model")
    end = f"; activations are not quantised: inputs stay in {str(TORCH_DTYPES[dtype]).removeprefix('torch.')}"
    (line,) = (text for text in caplog.messages if text.startswith(f"model x: {dtype.value} on cpu, from "))
    assert line.endswith(end) is (name != "int8-channel")


@pytest.mark.long
def test_a_packed_target_gives_its_own_distribution_with_a_draft(command: Command, tmp_path: Path) -> None:
    """Of the shipped pair, certified; and its score is that without the draft."""
    folder = copied(SHIPPED_FOLDER / "demo", tmp_path / "demo")
    quantised_folders.rewrite(folder, FORMATS["int4-groups-of-32"])
    pair = f"model={folder}", "model.dtype=packed", "draft=demo_draft", "seed=1", "output=json", "out=null"
    sizes = "samples=100", "max_new_tokens=10", "law_tokens=12", "law_rounds=20", "greedy_tokens=12"
    prompts = 'task.prompts=["hello there", "def f"]'
    answer = command(*pair, "task=certify", *(f"task.{size}" for size in sizes), prompts)
    assert answer.document["verdict"] == "same"
    answer = command(*pair, "task=eval", "task.quick=true", "sampling=greedy")
    regular, speculative = answer.document["rows"]
    assert regular["score"] == speculative["score"] > 0.7 and speculative["tokens_accepted"] > 0


@torch.inference_mode()
def test_layers_of_other_formats_may_stand_beside_each_other(folders: Path, tmp_path: Path) -> None:
    """As values that are not quantised, next to queries and keys that are."""
    sound = quantised("int4-groups", folders / "int4-groups")
    folder = some_plain(sound, tmp_path / "mixed", "v_proj")
    expected, _ = walked(loaded(folder))
    kept = loaded(folder, keeps_codes=True)
    assert isinstance(kept.blocks[0].attention.qkv, Concatenated)
    require_near(walked(kept)[0], expected)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.fp32])
def test_a_module_of_an_fp8_folder_has_one_type(dtype: Dtype, folders: Path) -> None:
    """On a CPU transformers decodes codes and leaves other weights as stored; it could not run."""
    module = read(quantised("fine-grained", folders / "fine-grained"), dtype, {"": "cpu"})
    assert {weight.dtype for weight in module.parameters()} == {TORCH_DTYPES[dtype]}
    assert module(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize(
    ("end", "change"),
    [("blocks", lambda t: t[..., :8]), ("scales", lambda t: t[:, :, 1:]), ("scales", lambda t: t.float())],
    ids=["half-blocks", "an-exponent-fewer", "numbers"],
)
def test_broken_experts_are_refused(end: str, change: Any, folders: Path, tmp_path: Path) -> None:
    """MXFP4, of which the hostile corpus has none."""
    folder = copied(quantised("mxfp4", folders / "mxfp4"), tmp_path / "broken")
    name = f"model.layers.0.mlp.experts.down_proj_{end}"
    edit_tensors(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(ModelError, match=r"of a quantised matrix (is|are) .*down_proj_"):
        loaded(folder)


def experts_of(part: Decoder) -> list[Experts]:
    found = [layer for layer in part.modules() if isinstance(layer, Experts)]
    assert found and all(how for layer in found for how in layer.hows)
    return found


@pytest.mark.parametrize("name", ["mixtral-int4", "mixtral-gptq", "mixtral-blocks"])
@torch.inference_mode()
def test_chosen_experts_are_decoded_where_the_choice_is_not_waited_for(
    name: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in CUDA graphs; here on a CPU, one after the other, and several at once."""
    experts = experts_of(loaded(quantised(name, folders / name), keeps_codes=True))[0]
    x_TH = torch.randn(5, 128)
    expected = experts(x_TH)
    for numbers in (1, 3 * 128 * 1000):
        monkeypatch.setattr(expert_stacks, "DECODED", numbers)
        monkeypatch.setattr("llama_ssp.models.experts.triton_runs", lambda: True)
        weights = list(experts.up), list(experts.down), *experts.hows
        found = apply_on_gpu(x_TH, *experts._chosen(x_TH), *weights, None, None, "silu", 0.0, 0.0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Copies(TorchDispatchMode):
    """Counts the operations that read a tensor of the host, on a model that is on another device."""

    count = 0

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.count += any(tensor.device.type == "cpu" for tensor in tensors)
        return op(*args, **(kwargs or {}))


@torch.inference_mode()
def test_chosen_experts_are_decoded_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's up layers, of no content: 16 matrices of 224 MiB at once, and the next 16, took 7.9 GiB.

    The first call may copy a table of codes; a CUDA graph is captured later, and cannot.
    """
    outputs, inputs, pairs, how = 28672, 4096, 36, torch.device("meta")
    codes_ENC = torch.empty(8, outputs, inputs // 2, dtype=torch.uint8, device=how)
    scale_ENG = torch.empty(8, outputs, inputs // 128, dtype=torch.bfloat16, device=how)
    stack = Stack([codes_ENC, scale_ENG], f"uint4 128 1.0 {outputs} False False")
    x_TK = torch.empty(pairs // 2, inputs, dtype=torch.bfloat16, device=how)
    expert_P, one = torch.empty(pairs, dtype=torch.int64, device=how), 2 * outputs * inputs
    peaks = []
    for numbers in (DECODED, 16 * outputs * inputs):
        monkeypatch.setattr(expert_stacks, "DECODED", numbers)
        expert_stacks.products(x_TK, expert_P, stack, None)
        live = LiveBytes()
        live.ignore([codes_ENC, scale_ENG, x_TK, expert_P])
        with Copies() as copies, live.phase():
            assert expert_stacks.products(x_TK, expert_P, stack, None).shape == (pairs, outputs), numbers
        assert copies.count == 0, numbers
        peaks.append(live.peak)
    assert one < peaks[0] < 1.5 * one and peaks[1] > 16 * one


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["mixtral-blocks", "qwen3_moe-int4"])
@torch.inference_mode()
def test_experts_are_multiplied_by_the_kernel(name: str, folders: Path) -> None:
    """On 1 to 3 ranks, in the planned bytes.

    Libraries round a weight to the type of its scale; of blocks that is fp32, else 16 bit.
    """
    folder = quantised(name, folders / name)
    operators("cpu")
    kept = loaded(folder, keeps_codes=True, kernels=Kernels.codes)
    assert all(how.endswith("True") for layer in experts_of(kept) for how in layer.hows)
    expected = walked(loaded(folder))[0]
    assert off(walked(kept)[0], expected) < (1e-5 if name.endswith("blocks") else 3e-2)
    for fast in (False, True):
        same(folder, fast)


@pytest.mark.long
@pytest.mark.compiler
@torch.inference_mode()
def test_experts_in_codes_are_compiled(folders: Path) -> None:
    folder, cpu = quantised("qwen3_moe-int4", folders / "qwen3_moe-int4"), torch.device("cpu")
    eager = load(ModelConf(name="x"), folder, Dtype.packed, cpu, "model")
    model = load(ModelConf(name="x"), folder, Dtype.packed, cpu, "model", fast=True)
    assert isinstance(model, SteppedModel)
    assert off(by_steps(model), by_steps(eager)) < 0.05
    assert model._step is not None
