"""LoRA adapters: merged while a model is read, they give the logits of peft's merged model, on every rank.

tests/adapter_files/ has two that peft has made, with what it made of them. Tests with `peft` make others, of
every kind of matrix; they are skipped where peft is not installed.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf, RunConf, Weights
from llama_ssp.errors import ModelError
from llama_ssp.models.adapter import is_targeted
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.checkpoint import complete, outlined
from llama_ssp.models.device_map import load_layers
from llama_ssp.models.folder import ADAPTER_WEIGHTS
from llama_ssp.models.formats import adapted_source
from llama_ssp.models.formats.adapted_source import AdapterFile, summed
from llama_ssp.models.heads.load import table_on_disk
from llama_ssp.models.loader import load, load_module
from tests.adapters import ATTENTION, FILES, KEPT, LOGITS, MLP, TOKENS, adapt, edited, merged, with_tensors
from tests.conftest import Command
from tests.distributed.test_tensor import UNEVEN, require_close
from tests.distributed.test_tensor import walked as walked_parts
from tests.distributed.threads import ranks_of, together
from tests.families import TOLERANCE, module_of, require_same, tiny, walked

CPU = torch.device("cpu")
MODEL = FILES / "model"


def local(folder: Path, adapter: Path | None, **changes: Any) -> ModelConf:
    return ModelConf(name="local", path=str(folder), adapter=str(adapter) if adapter else None, **changes)


def loaded(folder: Path, adapter: Path | None, dtype: Dtype = Dtype.fp32) -> Any:
    model, path = complete(local(folder, adapter, dtype=dtype), "model")
    return load(model, path, dtype, CPU, "model")


def on_ranks_of(folder: Path, adapter: Path | None, world: int) -> list[list[Tensor]]:
    """What each rank of this many gives, as tests/distributed/test_tensor.py walks."""
    model, path = complete(local(folder, adapter), "model")
    ranks = ranks_of(world)
    parts = [load(model, path, Dtype.fp32, CPU, "model", rank) for rank in ranks]
    return together([partial(walked_parts, part) for part in parts], ranks)


def kept_logits(name: str) -> Tensor:
    return load_file(FILES / LOGITS)[name]


def logits_of(folder: Path, adapter: Path | None) -> Tensor:
    """The logits of TOKENS, one text after the other."""
    causal = CausalModel(load_module(local(folder, adapter), folder, Dtype.fp32, CPU, "model"), "m")
    with torch.inference_mode():
        logits: Tensor = causal.module(torch.tensor(TOKENS)).logits
    return logits


def is_near(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def decoded(folder: Path, adapter: Path | None, **how: Any) -> Tensor:
    """The logits of TOKENS by the decoder."""
    from llama_ssp.models.passes import Pass, all_rows

    model = loaded(folder, adapter, **how)
    cache = model.new_cache(len(TOKENS), 16)
    length = len(TOKENS[0])
    with torch.inference_mode():
        whole = Pass(spans=all_rows((0,) * len(TOKENS), (length,) * len(TOKENS)), device=CPU)
        logits: Tensor = model.logits(torch.tensor(TOKENS), whole, cache)
    return logits


@pytest.mark.parametrize("name", KEPT)
def test_kept_logits_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """Controls: without the adapter, with a scale that is 1 % off, and for the other one's."""
    expected = kept_logits(name)
    assert is_near(decoded(MODEL, FILES / name), expected)
    assert not is_near(decoded(MODEL, None), expected) and is_near(decoded(MODEL, None), kept_logits("base"))
    (other,) = KEPT.keys() - {name}
    assert not is_near(decoded(MODEL, FILES / other), expected)
    wrong = edited(FILES / name, tmp_path / "wrong", lora_alpha=6.06)
    assert not is_near(decoded(MODEL, wrong), expected)


OTHER_SCALES = [
    {"use_rslora": False},
    {"alpha_pattern": {}},
    {"alpha_pattern": {"v": 9}},
]


@pytest.mark.parametrize("change", OTHER_SCALES)
def test_every_part_of_the_scale_counts(change: dict[str, Any], tmp_path: Path) -> None:
    wrong = edited(FILES / "patterns", tmp_path / "wrong", **change)
    assert not is_near(decoded(MODEL, wrong), kept_logits("patterns"))


@pytest.mark.parametrize("name", KEPT)
def test_by_transformers_module(name: str, tmp_path: Path) -> None:
    """In one process, and by whole layers on a disk."""
    assert is_near(logits_of(MODEL, FILES / name), kept_logits(name))
    assert not is_near(logits_of(MODEL, None), kept_logits(name))
    model, path = complete(local(MODEL, FILES / name), "model")
    limits = {"cpu": "8KB"}
    spread = load_layers(model, path, Dtype.fp32, limits, tmp_path / "spill", "model")
    assert "disk" in spread.module.hf_device_map.values()
    with torch.inference_mode():
        assert is_near(spread.module(torch.tensor(TOKENS)).logits, kept_logits(name))


@pytest.mark.parametrize("dtype", [Dtype.bf16, Dtype.int4])
def test_the_sum_is_rounded_once_and_then_quantised(dtype: Dtype, tmp_path: Path) -> None:
    """As a folder whose weights are the sums in fp32: every number of the model is the same."""
    whole = tmp_path / "whole"
    shutil.copytree(MODEL, whole)
    module = load_module(local(MODEL, FILES / "plain"), MODEL, Dtype.fp32, CPU, "model")
    module.save_pretrained(whole)
    ours, theirs = (
        loaded(*each, dtype).decoder.state_dict() for each in [(MODEL, FILES / "plain"), (whole, None)]
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_numbers_of_16_bit_are_summed_in_fp32() -> None:
    """Each product is below half a step of bf16 at 1, and their sum is not."""
    weight, left, right = (
        torch.ones(3, 5).bfloat16(),
        torch.full((3, 4), 2.0**-5),
        torch.full((4, 5), 2.0**-5),
    )
    assert (summed(weight.clone(), left, right, 1.0, torch.float32) == 1 + 2.0**-8).all()
    assert (summed(weight.clone(), left, right, 2.0, torch.bfloat16) == 1 + 2.0**-7).all()
    kept = weight.clone()
    assert summed(kept, left, right, 2.0, torch.bfloat16) is kept
    exact = summed(torch.ones(3, 5).double(), left.double() / 3, right, 1.0, torch.float64)
    assert (exact == 1 + 4 * (2.0**-5 / 3 * 2.0**-5)).all()


def test_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, left, right = (torch.randn(n, m, generator=generator) for n, m in [(9, 7), (9, 3), (3, 7)])
    whole = summed(weight.clone(), left, right, 0.5, torch.float32)
    monkeypatch.setattr(adapted_source, "DECODED_AT_ONCE", 15)
    assert torch.allclose(summed(weight.clone(), left, right, 0.5, torch.float32), whole)


CASES: dict[str, dict[str, Any]] = {
    "llama-gqa-uneven": {"target_modules": [*ATTENTION, *MLP, "lm_head", "embed_tokens"]},
    "llama-tied": {"target_modules": [*ATTENTION, *MLP]},
    "qwen2-uneven": {"target_modules": "all-linear", "use_rslora": True},
    "phi3-uneven": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]},
    "gpt_neox-uneven": {
        "target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "embed_in"],
        "rank_pattern": {"dense": 2, "query_key_value": 5}, "alpha_pattern": {r"layers\.[02]\..*_h": 11},
    },
    "gpt_neo-uneven": {"target_modules": ["q_proj", "out_proj", "c_fc", "c_proj", "wte", "wpe"]},
    "opt-uneven": {"target_modules": r".*\.(q_proj|out_proj|fc1|fc2)", "exclude_modules": r".*\.1\..*"},
    "falcon-gqa-uneven": {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    "gemma2-uneven": {"target_modules": ["q_proj", "o_proj", "down_proj"], "layers_to_transform": [0, 2]},
    "mixtral-uneven": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "gate.weight"],
    },
    "qwen3_moe-uneven": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "gate.weight"],
        "rank_pattern": {"gate_up_proj": 3}, "use_rslora": True,
    },
    "gpt_oss-uneven": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_are_those_of_pefts_merged_model(name: str, tmp_path: Path) -> None:
    """On one rank, and on two and three with uneven parts. Controls: without it; with a wrong scale."""
    pytest.importorskip("peft")
    family, changes = UNEVEN.get(name, (name, {}))
    folder = tmp_path / "model"
    module_of(family, **changes).save_pretrained(folder)
    with torch.inference_mode(False):
        adapter = adapt(folder, tmp_path / "adapter", **CASES[name])
        theirs = merged(folder, adapter)
    outlined(local(folder, adapter), "model")
    ours = loaded(folder, adapter)
    require_same(theirs, *walked(ours.decoder))

    wrong = edited(adapter, tmp_path / "wrong", lora_alpha=6.1)
    for other in (None, wrong):
        with pytest.raises(AssertionError):
            require_same(theirs, *walked(loaded(folder, other).decoder))
    whole = walked_parts(ours)
    for world in (2, 3) if name in UNEVEN else (2, 4):
        for part in on_ranks_of(folder, adapter, world):
            require_close(part, whole)


@pytest.mark.slow
@torch.inference_mode()
def test_experts_with_pairs_of_their_own(tmp_path: Path) -> None:
    """As peft saved them where transformers had a module for each expert; its newer versions convert them."""
    pytest.importorskip("peft")
    folder = tmp_path / "model"
    module_of("mixtral").save_pretrained(folder)
    with torch.inference_mode(False):
        adapter = adapt(folder, tmp_path / "q", target_modules=["q_proj"])
    generator = torch.Generator().manual_seed(3)

    def with_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in range(3):
            for expert in range(4):
                for name, outputs, inputs in (("w1", 48, 32), ("w3", 48, 32), ("w2", 32, 48)):
                    module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                    tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.3
                    tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.3
        return tensors

    own = with_tensors(adapter, tmp_path / "own", with_experts)
    old = edited(own, tmp_path / "old", target_modules=["q_proj", "w1", "w2", "w3"])
    with torch.inference_mode(False):
        theirs = merged(folder, old)
    ours = loaded(folder, old)
    require_same(theirs, *walked(ours.decoder))
    for part in on_ranks_of(folder, old, 2):
        require_close(part, walked_parts(ours))
    with pytest.raises(AssertionError):
        require_same(theirs, *walked(loaded(folder, adapter).decoder))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "stablelm"])
@torch.inference_mode()
def test_an_architecture_without_a_row(architecture: str, tmp_path: Path) -> None:
    """GPT-2's matrices have inputs before outputs, which is fan_in_fan_out."""
    pytest.importorskip("peft")
    folder = tmp_path / "model"
    tiny(architecture).save_pretrained(folder)
    own = {"target_modules": ["q_proj", "v_proj"]}
    if architecture == "gpt2":
        own = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    with torch.inference_mode(False):
        adapter = adapt(folder, tmp_path / "adapter", **own)
        theirs = merged(folder, adapter)(torch.tensor(TOKENS)).logits
    model, path = complete(local(folder, adapter), "model")
    ours = load(model, path, Dtype.fp32, CPU, "model")
    assert is_near(ours.module(torch.tensor(TOKENS)).logits, theirs)
    assert not is_near(logits_of(folder, None), theirs)


def test_each_rank_reads_its_slices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries their rows of B and all of A, of the output matrix their columns of A and all of B."""
    read: list[tuple[str, tuple[int, ...]]] = []
    part_of = AdapterFile._part

    def noted(file: AdapterFile, key: str, *where: Any) -> Tensor:
        part = part_of(file, key, *where)
        read.append((key.removeprefix("base_model.model.model.layers.0."), tuple(part.shape)))
        return part

    monkeypatch.setattr(AdapterFile, "_part", noted)
    model, path = complete(local(MODEL, FILES / "plain"), "model")
    load(model, path, Dtype.fp32, CPU, "model", ranks_of(4)[0])
    found = dict(read)
    expected = {"q_proj.lora_A": (4, 16), "q_proj.lora_B": (4, 4), "o_proj.lora_A": (4, 4)}
    for name, sizes in (expected | {"o_proj.lora_B": (16, 4)}).items():
        assert found[f"self_attn.{name}.weight"] == sizes, name
    assert len(read) == 2 * 2 * 7, "once each"


def test_a_trained_head_is_lent_the_sums(tmp_path: Path) -> None:
    """Where ranks hold parts of the tables, the leader reads them whole for a head that has none."""
    names = {"model.embed_tokens.lora_embedding_A": (4, 40), "model.embed_tokens.lora_embedding_B": (16, 4)}
    names |= {"lm_head.lora_A.weight": (4, 16), "lm_head.lora_B.weight": (40, 4)}
    more = {f"base_model.model.{name}": torch.full(sizes, 0.5) for name, sizes in names.items()}
    tables = with_tensors(FILES / "plain", tmp_path / "tables", lambda kept: kept | more)
    targets = [*KEPT["plain"]["target_modules"], "lm_head", "embed_tokens"]
    adapter = edited(tables, tmp_path / "adapter", target_modules=targets)
    model, path = complete(local(MODEL, adapter), "model")
    whole = load(model, path, Dtype.fp32, CPU, "model")
    plain, _ = complete(local(MODEL, None), "model")
    for output in (False, True):
        table = table_on_disk(path, model, output)
        held = whole.table(output)
        assert held is not None and torch.equal(table, held)
        assert torch.allclose(table_on_disk(path, plain, output) + 1.5, table)


@pytest.mark.parametrize("draft", ["int4", "int8"])
def test_the_targets_own_weights_draft_with_its_adapter(
    draft: str, command: Command, taken: list[RunConf]
) -> None:
    command(f"model={MODEL}", f"draft={draft}", f"model.adapter={FILES / 'plain'}")
    (run,) = taken
    assert run.draft is not None and run.draft.adapter == run.model.adapter == str(FILES / "plain")


TARGETS: list[tuple[dict[str, Any], str, bool]] = [
    ({"target_modules": ["q_proj"]}, "model.layers.1.self_attn.q_proj", True),
    ({"target_modules": ["proj"]}, "model.layers.1.self_attn.q_proj", False),
    ({"target_modules": ["self_attn.q_proj"]}, "model.layers.1.self_attn.q_proj", True),
    ({"target_modules": ["lm_head"]}, "lm_head", True),
    ({"target_modules": "q_proj"}, "model.layers.1.self_attn.q_proj", False),
    ({"target_modules": r".*\.q_proj"}, "model.layers.1.self_attn.q_proj", True),
    ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, "a.self_attn.q_proj", False),
    ({"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"}, "layers.0.q_proj", False),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "model.layers.1.q_proj", True),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "model.layers.11.q_proj", False),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1}, "model.layers.1.experts.3.q_proj", True),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "h"}, "m.h.1.q_proj", True),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": ["h"]}, "l.1.q_proj", False),
]  # fmt: skip


@pytest.mark.parametrize(("config", "module", "expected"), TARGETS)
def test_modules_are_matched_as_by_peft(config: dict[str, Any], module: str, expected: bool) -> None:
    assert is_targeted(config, module) is expected
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    from peft import LoraConfig

    theirs = tuners.check_target_module_exists(LoraConfig(**config), module)
    assert bool(theirs) is expected


def replaced_tensors(change: Any) -> Any:
    return lambda where: with_tensors(FILES / "plain", where, change)


def changed_config(**values: Any) -> Any:
    return lambda where: edited(FILES / "plain", where, **values)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def without(*names: str) -> Any:
    return replaced_tensors(lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(names)})


def others(**tensors: Tensor) -> Any:
    return replaced_tensors(
        lambda kept: kept | {f"{Q}.{name.replace('__', '.')}": t for name, t in tensors.items()}
    )


def pickled(where: Path) -> Path:
    shutil.copytree(FILES / "plain", where)
    (where / ADAPTER_WEIGHTS).rename(where / "adapter_model.bin")
    return where


def cut_short(where: Path) -> Path:
    shutil.copytree(FILES / "plain", where)
    (where / ADAPTER_WEIGHTS).write_bytes((where / ADAPTER_WEIGHTS).read_bytes()[:-9])
    return where


def no_weights(where: Path) -> Path:
    shutil.copytree(FILES / "plain", where)
    (where / ADAPTER_WEIGHTS).unlink()
    return where


def linked_away(where: Path) -> Path:
    shutil.copytree(FILES / "plain", where)
    (where / ADAPTER_WEIGHTS).unlink()
    (where / ADAPTER_WEIGHTS).symlink_to(FILES / "plain" / ADAPTER_WEIGHTS)
    return where


REFUSALS: dict[str, tuple[Any, str]] = {
    "dora": (changed_config(use_dora=True), "found DoRA,.*merge_and_unload"),
    "dora-tensors": (others(lora_magnitude_vector=torch.ones(16)), "lora_magnitude_vector, of DoRA"),
    "other-kind": (changed_config(peft_type="IA3"), "found peft_type IA3"),
    "no-kind": (changed_config(peft_type=None), "found peft_type None"),
    "bias": (changed_config(bias="lora_only"), "found bias lora_only"),
    "lora-bias": (changed_config(lora_bias=True), "found lora_bias"),
    "saved-modules": (changed_config(modules_to_save=["lm_head"]), "modules_to_save, which replaces whole"),
    "tokens": (changed_config(trainable_token_indices=[1]), "trainable_token_indices"),
    "alora": (changed_config(alora_invocation_tokens=[1]), "found aLoRA"),
    "pissa": (changed_config(init_lora_weights="pissa_niter_4"), "init_lora_weights pissa_niter_4"),
    "replication": (changed_config(layer_replication=[[0, 2]]), "layer_replication"),
    "pickled": (pickled, "the adapter is pickled.*adapter_model.bin"),
    "cut-short": (cut_short, "damaged or cut short"),
    "linked": (linked_away, "a file leaves the folder"),
    "no-weights": (no_weights, "holds no adapter"),
    "other-rank": (changed_config(r=5), r"found A \(4, \d+\), B \(\d+, 4\), allowed rank 5.*for: ../model"),
    "rank-pattern": (changed_config(rank_pattern={"q_proj": 3}), "self_attn.q_proj;.*allowed rank 3"),
    "no-rank": (changed_config(r=None), "no usable r;"),
    "rank-0": (changed_config(r=0), "no usable r;"),
    "alpha": (changed_config(lora_alpha="8"), "no usable lora_alpha"),
    "alpha-nan": (changed_config(alpha_pattern={"q_proj": float("inf")}), "no usable alpha_pattern q_proj"),
    "patterns": (changed_config(rank_pattern=[1]), "no usable rank_pattern"),
    "regex": (changed_config(target_modules="("), "no usable pattern"),
    "targets": (changed_config(target_modules=["k_proj"]), "do not belong together.*model.layers.0"),
    "layers": (changed_config(layers_to_transform=[0]), "do not belong together.*layers.1"),
    "half": (without("0.self_attn.q_proj.lora_B.weight"), "without its other half"),
    "none": (replaced_tensors(lambda _: {"lm_head.weight": torch.ones(40, 16)}), "no lora_A and"),
    "other-tensor": (others(lora_E=torch.ones(3)), "lora_E"),
    "codes": (others(lora_A__weight=torch.ones(4, 16, dtype=torch.int8)), "in codes.*I8"),
    "other-sizes": (others(lora_A__weight=torch.ones(4, 8)), "does not fit the model.*A .4, 8."),
    "unknown-module": (
        replaced_tensors(lambda kept: {n.replace("layers.1", "layers.2"): t for n, t in kept.items()}),
        "model.layers.2.*a module that the model does not have",
    ),
    "vocabulary": (
        replaced_tensors(lambda kept: kept | {"base_model.model.lm_head.weight": torch.ones(44, 16)}),
        "lm_head; found a whole table .44, 16., allowed .40, 16.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """By what a run does and by what a plan does, before a weight is read."""
    make, says = REFUSALS[name]
    adapter = make(tmp_path / "adapter")
    for reads in (complete, outlined):
        with pytest.raises(ModelError, match=says) as refused:
            reads(local(MODEL, adapter), "model")
        assert "\n" not in str(refused.value)


def test_no_folder_of_an_adapter(tmp_path: Path) -> None:
    for adapter, says in (
        ("ORG/NAME", "hf download ORG/NAME --local-dir"),
        (str(tmp_path), "no adapter_config"),
    ):
        with pytest.raises(ModelError, match=says):
            complete(local(MODEL, Path(adapter)), "model")
    with pytest.raises(ModelError, match=f"an adapter .LoRA.*model.adapter={FILES / 'plain'}"):
        complete(local(FILES / "plain", None), "model")


def test_refused_for_what_has_no_plain_weights(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "codes")
    file = tmp_path / "codes" / "config.json"
    claim = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": claim}))
    tensors = load_file(MODEL / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    tensors[f"{key}_scale_inv"] = torch.ones(2, 1)
    save_file(tensors, tmp_path / "codes" / "model.safetensors")
    coded = "cannot be merged into weights in codes.*use the model's plain weights"
    synthetic = ModelConf(
        name="m", weights=Weights.synthetic, family="llama", n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4,
        dim=16, ffn=24, vocab=40, context=64, adapter=str(FILES / "plain"),
    )  # fmt: skip
    for model, says in ((local(tmp_path / "codes", FILES / "plain"), coded), (synthetic, "found synthetic")):
        for reads in (complete, outlined):
            with pytest.raises(ModelError, match=says):
                reads(model, "model")


def test_a_tied_model_is_refused_for_its_tables(tmp_path: Path) -> None:
    """peft changes both, or unties them; which one was trained, its files do not say."""
    folder = tmp_path / "tied"
    shutil.copytree(MODEL, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    heads = {"lm_head.lora_A.weight": (4, 16), "lm_head.lora_B.weight": (40, 4)}
    tables = {"model.embed_tokens.lora_embedding_A": (4, 40), "model.embed_tokens.lora_embedding_B": (16, 4)}
    for number, added in enumerate((heads, tables)):
        more = {f"base_model.model.{name}": torch.ones(sizes) for name, sizes in added.items()}
        adapter = with_tensors(FILES / "plain", tmp_path / str(number), lambda kept, more=more: kept | more)
        targets = [*KEPT["plain"]["target_modules"], "lm_head", "embed_tokens"]
        changed = edited(adapter, tmp_path / f"{number}c", target_modules=targets)
        with pytest.raises(ModelError, match="in the model they are one"):
            complete(local(folder, changed), "model")
        complete(local(MODEL, changed), "model")
    assert not is_near(decoded(folder, FILES / "plain"), decoded(folder, None))


def test_modules_without_tensors_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As by peft, they stay as they are."""
    adapter = without("self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight")(tmp_path / "a")
    complete(local(MODEL, adapter), "model")
    assert "2 modules that adapter_config.json names have no tensors" in caplog.text


def test_a_module_in_8_bit_would_be_quantised_before(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a model that transformers runs.*dtype=int8"):
        load_layers(local(MODEL, FILES / "plain"), MODEL, Dtype.int8, {}, None, "model")


def test_adapters_of_experts_are_for_the_decoder(tmp_path: Path) -> None:
    """transformers' modules have one tensor for all experts, by names that are not those of the files."""
    for number, module in enumerate(("mlp.experts", "mlp.experts.base_layer", "mlp.experts.3.up_proj")):
        name = f"base_model.model.model.layers.0.{module}.lora_A.weight"
        adapter = with_tensors(
            FILES / "plain", tmp_path / str(number), lambda _, n=name: {n: torch.ones(4, 16)}
        )
        with pytest.raises(ModelError, match=rf"a model that transformers runs.*{module}.*merge_and_unload"):
            load_module(local(MODEL, adapter), MODEL, Dtype.fp32, CPU, "model")
