"""Every family from a folder to a text: greedy as transformers writes it, speculative runs certified."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llama_ssp.config import SIZES, Dtype, ModelConf, Weights
from llama_ssp.config.presets import CONF
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.families import FAMILIES as FAMILY_ROWS
from llama_ssp.models.families import GGUF_FAMILIES, READ_TOGETHER_BEYOND, TESTED_FAMILIES
from llama_ssp.models.layout import layout
from llama_ssp.models.shape import shape_of
from llama_ssp.models.sharding import require_split
from llama_ssp.models.tensor_row import NORMS
from llama_ssp.planner.speed import pass_cost
from llama_ssp.planner.weights import parameters
from llama_ssp.planner.workload import Role
from tests import checkpoints
from tests.architectures import EQUAL, REFUSED, examine
from tests.conftest import Command
from tests.families import CONTEXT, FAMILIES, build, greedy_text, tiny
from tests.rig import perturbed
from tests.warm import ROOT

PACKAGE = ROOT / "llama_ssp"
PAGE = ROOT / "bench" / "results" / "architectures_epyc-2-cores_202611.md"
# Windows in turn, softcaps; positions in a table; parallel blocks; one key head; experts; sinks; heads of two
# kinds; states.
CERTIFIED = (
    "gemma2", "gpt_neo", "gpt_neox", "falcon", "qwen3_moe", "gpt_oss", "llama-gqa", "gemma4", "gemma4-moe",
    "qwen3_5",
)  # fmt: skip
SIZE, NEW, TEXT = 300, 12, "the quick brown"
ENDS = {"vocab_size": SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def save(folder: Path, module: Any) -> Path:
    module.save_pretrained(folder)
    checkpoints.write_tokenizer(folder, checkpoints.tokenizer(SIZE))
    return folder


def pair(name: str, folder: Path) -> list[str]:
    """A target, and a draft that agrees with it sometimes."""
    target = save(folder / "target", build(name, **ENDS))
    draft = save(folder / "draft", perturbed(build(name, **ENDS), 0.02))
    fp32 = "model.dtype=fp32", "draft.dtype=fp32"
    return [f"model={target}", f"draft={draft}", "seed=3", *fp32, "output=json", f"prompt={TEXT}"]


def test_every_preset_is_of_a_tested_family() -> None:
    presets = [yaml.safe_load(file.read_text()) for file in sorted((CONF / "model").glob("*.yaml"))]
    assert {preset["family"] for preset in presets if preset.get("family")} <= set(TESTED_FAMILIES)
    assert {family for family, _ in FAMILIES.values()} == set(TESTED_FAMILIES)


@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_what_transformers_writes(name: str, command: Command, tmp_path: Path) -> None:
    answer = command(*pair(name, tmp_path), "sampling=greedy", f"task.max_new_tokens={NEW}")
    assert (answer.code, answer.errors) == (0, [])
    (output,) = answer.document["outputs"]
    ids = checkpoints.tokenizer(SIZE).encode(TEXT).ids
    assert output["token_ids"] == greedy_text(build(name, **ENDS), ids, NEW)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CERTIFIED)
def test_a_speculative_run_is_certified(name: str, command: Command, tmp_path: Path) -> None:
    # As many positions as by default: of fewer one learns too little of what rounding does.
    small = ("task.samples=24", "task.max_new_tokens=4", "task.law_tokens=24", "task.greedy_tokens=8")
    answer = command("task=certify", *pair(name, tmp_path), *small)
    checks = {check["name"]: check for check in answer.document["checks"]}
    assert (answer.code, answer.errors) == (0, []), checks
    assert answer.document["verdict"] in ("same", "inconclusive"), answer.document["says"]
    assert checks["law"]["outcome"] == "passed", checks


@pytest.mark.parametrize(
    ("name", "changes", "kv", "experts"),
    [
        ("falcon", {}, 1, (0, 0, 0, 0)),
        ("falcon-gqa", {}, 2, (0, 0, 0, 0)),
        ("mixtral", {}, 2, (4, 2, 48, 0)),
        ("qwen3_moe", {}, 2, (4, 2, 24, 0)),
        ("qwen3_moe", {"mlp_only_layers": [1]}, 2, (4, 2, 24, 1)),
        ("qwen3_moe", {"decoder_sparse_step": 2}, 2, (4, 2, 24, 2)),
        ("gpt_oss", {}, 2, (4, 2, 48, 0)),
        ("glm4_moe", {}, 2, (8, 3, 24, 1)),
        ("glm4_moe", {"first_k_dense_replace": 0}, 2, (8, 3, 24, 0)),
        ("glm4_moe", {"mlp_only_layers": [2]}, 2, (8, 3, 24, 1)),
        ("gemma4", {}, 2, (0, 0, 0, 0)),
        ("gemma4-moe", {}, 2, (4, 2, 24, 0)),
    ],
    ids=[
        "falcon",
        "falcon-gqa",
        "mixtral",
        "qwen3_moe",
        "qwen3_moe, a dense layer",
        "qwen3_moe, every other",
        "gpt_oss",
        "glm4_moe",
        "glm4_moe, no dense layer",
        "glm4_moe, a key that it ignores",
        "gemma4",
        "gemma4, experts",
    ],
)
def test_shapes_are_read_from_files(
    name: str, changes: dict[str, Any], kv: int, experts: tuple[int, ...], tmp_path: Path
) -> None:
    module = build(name, **changes)
    module.save_pretrained(tmp_path)
    conf = ModelConf(name="local", path=str(tmp_path))
    model, _ = complete(conf, "model")
    assert (model.n_heads, model.n_kv_heads, model.context) == (4, kv, CONTEXT)
    assert (model.experts, model.experts_per_token, model.expert_ffn, model.dense_layers) == experts
    assert parameters(model) == sum(p.numel() for p in module.parameters())
    if name == "falcon":
        checkpoints.edit(tmp_path / "config.json", lambda content: content.pop("max_position_embeddings"))
        assert complete(conf, "model")[0].context == 2048


@pytest.mark.parametrize(("family", "experts"), [("llama", 4), ("mixtral", 0)])
def test_sizes_with_experts_are_those_of_a_family_with_experts(family: str, experts: int) -> None:
    model = ModelConf(name="made", family=family, weights=Weights.synthetic, experts=experts)
    with pytest.raises(ModelError, match=f"{family} with {experts} experts"):
        complete(model, "model")


def test_a_pass_reads_the_experts_that_its_tokens_choose() -> None:
    """Of 4 experts a token reads 2; two tokens read 3 on average, as half of the second's are the first's."""
    sizes = {name: 8 for name in SIZES} | {"dim": 64, "n_kv_heads": 4}
    model = ModelConf(name="made", family="mixtral", **sizes, experts=4, experts_per_token=2, expert_ffn=32)
    cost = pass_cost(Role("", model, Dtype.bf16), 1)
    one = 2 * 3 * 32 * 64 * 8  # bytes of an expert, in all layers
    assert [cost.experts_read(n) / one for n in (1, 2, 100)] == pytest.approx([2, 3, 4])
    wide = replace(model, experts_per_token=4)
    assert pass_cost(Role("", wide, Dtype.bf16), 1).flops - cost.flops == 2 * one


def test_a_model_without_a_row_is_planned_by_the_headers_of_its_files(
    command: Command, tmp_path: Path
) -> None:
    """In bf16, whatever its files have; without them there is nothing to plan by."""
    module = tiny("olmo", vocab_size=SIZE)
    folder = save(tmp_path / "olmo", module)
    words = ("task=plan", f"model={folder}", "draft=none", "cluster=p4d", "task.prompt_tokens=8")
    planned = command(*words, "output=json", "out=null").document
    numbers = sum(parameter.numel() for parameter in module.parameters())
    lines = planned["per_gpu"][0]["lines"]
    assert lines["model: weights"]["bytes"] == 2 * numbers
    assert planned["best"] is None and planned["command"].endswith("ranks=1")

    for file in folder.glob("*.safetensors"):
        file.unlink()
    bare = command(*words)
    assert bare.code == 4 and "headers of its weights, which are not here" in bare.err


@pytest.mark.few(1)
def test_a_gemma_4_with_embeddings_for_each_layer_runs_in_one_process(
    command: Command, tmp_path: Path
) -> None:
    """As E2B and E4B have them, with layers that share keys: the plan, a run and a split name the reason."""
    shared = {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", *["full_attention"] * 2]}
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SIZE, "attention_k_eq_v": False}
    module = build("gemma4", **ENDS, **shared, **own)
    folder = save(tmp_path / "e", module)
    words = (f"model={folder}", "model.dtype=fp32", "draft=none", "seed=1")
    answer = command("task=plan", *words, "task.prompt_tokens=8", "out=null")
    reason = "gemma4_text with hidden_size_per_layer_input: 8"
    assert answer.code == 0 and f"one process, by transformers' module, as {reason} has no row" in answer.out
    assert f"({reason}) runs in one process" in answer.out

    greedy = "sampling=greedy", f"task.max_new_tokens={NEW}", "speculation=ngram", "k=4", "output=json"
    answer = command(*words, *greedy, f"prompt={TEXT}")
    assert (answer.code, answer.errors) == (0, [])
    ids = checkpoints.tokenizer(SIZE).encode(TEXT).ids
    assert answer.document["outputs"][0]["token_ids"] == greedy_text(module, ids, NEW)

    model, _ = complete(ModelConf(name="local", path=str(folder)), "model")
    with pytest.raises(ModelError, match=f"cannot be split over ranks.*found {reason}"):
        require_split(model, 2)


RECURRENT = {
    "bamba": {"mamba_n_heads": 2},
    "llama4_text": {"attention_chunk_size": 8192},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "conv"]},
}


@pytest.mark.parametrize("family", RECURRENT)
def test_what_cannot_run_at_all_is_not_planned(family: str, command: Command, tmp_path: Path) -> None:
    """The same line as a run's: no plan says that it runs in one process."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": SIZE}
    content = {"model_type": family, "max_position_embeddings": 64, **sizes, **RECURRENT[family]}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    refused = command("task=plan", f"model={tmp_path}", "draft=none", "cluster=p4d")
    assert refused.code == 4 and "layers that this program cannot roll back" in refused.err


def test_what_is_not_planned_or_run_says_so_by_name(command: Command, tmp_path: Path) -> None:
    olmo = save(tmp_path / "olmo", tiny("olmo", vocab_size=SIZE))
    pair = (f"model={olmo}", "draft=none", "seed=1", "task.max_new_tokens=4")
    answer = command("task=plan", *pair, "task.prompt_tokens=8", "out=null")
    assert answer.code == 0 and "one process, by transformers' module, as olmo has no row" in answer.out
    answer = command(f"prompt={TEXT}", *pair, "output=json")
    assert (answer.code, answer.errors, answer.document["plan"]) == (0, [], None)
    # Its biases come from the mask's slots; the family is tested without them.
    by_slots = save(tmp_path / "falcon", build("falcon", vocab_size=SIZE, alibi=True))
    answer = command(f"prompt={TEXT}", f"model={by_slots}", "draft=none")
    assert answer.code == 4 and "explicit positions" in answer.errors[0]


def test_a_draft_in_4_bit_without_a_row_names_what_works(command: Command, tmp_path: Path) -> None:
    olmo = save(tmp_path, tiny("olmo", vocab_size=SIZE))
    run = f"prompt={TEXT}", f"model={olmo}", "seed=1", "task.max_new_tokens=4", "k=2", "output=json"
    refused = command(*run, "draft=int4")
    assert refused.code == 4
    assert "draft" in refused.errors[0] and refused.errors[0].endswith(
        "write draft=int8, or draft.dtype=int8 for another model"
    )
    answer = command(*run, "draft=int8")
    assert (answer.code, answer.errors) == (0, [])
    target = command(*run, "draft=none", "model.dtype=int4")
    assert target.code == 4 and target.errors[0].endswith("write model.dtype=int8")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("architecture", "outcome"),
    [
        ("olmo2", EQUAL), ("gemma3_text", EQUAL), ("deepseek_v3", EQUAL), ("gpt_oss", EQUAL),
        ("llama4_text", REFUSED),
    ],
)  # fmt: skip
def test_an_architecture_does_what_the_page_says(architecture: str, outcome: str) -> None:
    """It writes transformers' text, with as many accepted drafts; or the reason is given."""
    finding = examine(architecture)
    assert finding.outcome == outcome and f"{finding}\n" in PAGE.read_text(encoding="utf-8")


def test_a_family_is_one_row() -> None:
    """No other module of the package names an architecture: what differs is in the rows of families.py.

    wrapped.py has tables of the text parts of multimodal models, by their names.
    """
    every = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    named = {
        (path.relative_to(PACKAGE).as_posix(), node.value)
        for path in PACKAGE.rglob("*.py")
        if path.name != "wrapped.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in every
    }
    rows = {("models/families.py", name) for name in (*FAMILY_ROWS, *READ_TOGETHER_BEYOND)}
    rows |= {("models/families.py", name) for name in GGUF_FAMILIES if name in every}
    rows.add(("config/schema.py", "llama"))  # models that the program makes for itself
    kinds = "gemma3", "gpt2", "llama", "phi3", "qwen2"  # of tokenizers, in GGUF
    tokenizers = {("text/gguf_tokenizer.py", name) for name in kinds}
    kinds_of_blocks = ("llama", "qwen3", "gemma4_text")
    of_heads = (*kinds_of_blocks, "gemma4_assistant", "gemma4_unified_assistant")
    heads = {("models/heads/settings.py", name) for name in of_heads if name in every}
    assert named - {("report/machine.py", "git")} == rows | tokenizers | heads  # the program, not a model


def test_a_row_names_the_layers_of_its_module() -> None:
    """Every linear layer in a block, with its bias, and the norms, as transformers builds them."""
    for name, (family, _) in FAMILIES.items():
        module, row = build(name), FAMILY_ROWS[family]
        (blocks,) = (part for part in module.modules() if isinstance(part, torch.nn.ModuleList))
        number = shape_of(module.config).attending[0]  # layers of linear attention have other names
        linears = [
            (path.rpartition(".")[2], part)
            for path, part in blocks[number].named_modules()
            if isinstance(part, torch.nn.Linear)
        ]
        shape = shape_of(module.config)
        is_dense = not shape.blocks[number].experts or row.dense_too
        mlp = (*row.names.up, row.names.down) if is_dense else (row.names.shared_gate,)
        if row.names.shared_gate:
            mlp = (*mlp, *row.names.shared_up, row.names.shared_down)
        is_linear = row.dense_too and shape.experts  # the router; of other families it is another class
        router = (row.names.router,) if is_linear else ()
        paths = (*row.names.qkv, row.names.output, *mlp, *router)
        named = {path.rpartition(".")[2] for path in paths if path}
        assert {leaf for leaf, _ in linears} == named, name
        assert {leaf for leaf, part in linears if part.bias is not None} == set(row.biased), name
        norms = [part for part in blocks[number].modules() if "norm" in type(part).__name__.lower()]
        norms = [norm for norm in norms if list(norm.parameters())]  # Gemma 4's of values has no weight
        planned = [each for each in layout(shape) if each.group == NORMS and number in (each.blocks or ())]
        assert len(norms) == len(planned) - bool(router), name  # whose norm has its weight elsewhere
        has_biases = row.layer_norm and not row.unbiased_norms
        assert all(hasattr(norm, "bias") == has_biases for norm in norms), name
