"""Every family from a folder to a text: greedy as transformers writes it, speculative runs certified."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llama_ssp.config import SIZES, Dtype, ModelConf, Weights
from llama_ssp.config.presets import CONF
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.families import FAMILIES as FAMILY_ROWS
from llama_ssp.models.families import GGUF_FAMILIES, READ_TOGETHER_BEYOND, TESTED_FAMILIES
from llama_ssp.planner.speed import pass_cost
from llama_ssp.planner.weights import parameters
from llama_ssp.planner.workload import Role
from tests import checkpoints
from tests.architectures import DOC, EQUAL, REFUSED, UNBUILT, Finding, document, examine, row_of
from tests.conftest import Command
from tests.families import FAMILIES, build, tiny
from tests.rig import perturbed

PACKAGE = Path(__file__).resolve().parents[1] / "llama_ssp"
SIZE = 300
NAMES = FAMILIES
PROMPT, TEXT = 'task.prompts=["the quick brown"]', "the quick brown"
NEW = 12


def save(folder: Path, name: str, changed: bool = False) -> Path:
    """A random model of the family with a tokenizer; a changed one agrees with it sometimes."""
    module = build(name, vocab_size=SIZE, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    (perturbed(module, 0.02) if changed else module).save_pretrained(folder)
    checkpoints.write_tokenizer(folder, checkpoints.tokenizer(SIZE))
    return folder


def pair(name: str, folder: Path) -> list[str]:
    target, draft = save(folder / "target", name), save(folder / "draft", name, changed=True)
    return [
        f"model={target}", f"draft={draft}", "seed=3",
        "model.dtype=fp32", "draft.dtype=fp32", "output=json", PROMPT,
    ]  # fmt: skip


def test_every_preset_is_of_a_tested_family() -> None:
    presets = [yaml.safe_load(file.read_text()) for file in sorted((CONF / "model").glob("*.yaml"))]
    families = {preset["family"] for preset in presets if preset.get("family")}
    assert families <= set(TESTED_FAMILIES)
    assert {family for family, _ in FAMILIES.values()} == set(TESTED_FAMILIES)


@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_what_transformers_writes(name: str, command: Command, tmp_path: Path) -> None:
    arguments = pair(name, tmp_path)
    answer = command(*arguments, "sampling=greedy", f"task.max_new_tokens={NEW}")
    assert (answer.code, answer.errors) == (0, [])
    (output,) = json.loads(answer.out.splitlines()[-1])["outputs"]
    module = build(name, vocab_size=SIZE, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    ids = torch.tensor([checkpoints.tokenizer(SIZE).encode(TEXT).ids])
    text = module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=1
    )[0, ids.shape[1] :].tolist()
    assert output["token_ids"] == text


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_speculative_run_is_certified(name: str, command: Command, tmp_path: Path) -> None:
    # As many positions as by default: of fewer one learns too little of what rounding does.
    small = ("task.samples=24", "task.max_new_tokens=4", "task.law_tokens=24", "task.greedy_tokens=8")
    answer = command("task=certify", *pair(name, tmp_path), *small)
    found = json.loads(answer.out.splitlines()[-1])
    assert (answer.code, answer.errors) == (0, []), found["checks"]
    assert found["verdict"] in ("same", "inconclusive"), found["says"]
    probs = next(check for check in found["checks"] if check["name"] == "law")
    assert probs["outcome"] == "passed", probs


@pytest.mark.parametrize(("name", "kv"), [("falcon", 1), ("falcon-gqa", 2), ("mixtral", 2), ("qwen3_moe", 2)])
def test_shapes_of_families_with_keys_of_their_own(name: str, kv: int, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    model, _ = complete(ModelConf(name="local", path=str(tmp_path)), "model")
    assert (model.n_heads, model.n_kv_heads, model.context) == (4, kv, 160)
    if name == "falcon":
        checkpoints.edit(tmp_path / "config.json", lambda c: c.pop("max_position_embeddings"))
        assert complete(ModelConf(name="local", path=str(tmp_path)), "model")[0].context == 2048


@pytest.mark.parametrize(
    ("name", "changes", "sizes"),
    [
        ("llama-gqa", {}, (0, 0, 0, 0)),
        ("mixtral", {}, (4, 2, 48, 0)),
        ("qwen3_moe", {}, (4, 2, 24, 0)),
        ("qwen3_moe", {"mlp_only_layers": [1]}, (4, 2, 24, 1)),
        ("qwen3_moe", {"decoder_sparse_step": 2}, (4, 2, 24, 2)),
        ("gpt_oss", {}, (4, 2, 48, 0)),
    ],
)
def test_shapes_of_experts(
    name: str, changes: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    module = build(name, **changes)
    module.save_pretrained(tmp_path)
    model, _ = complete(ModelConf(name="local", path=str(tmp_path)), "model")
    assert (model.experts, model.experts_per_token, model.expert_ffn, model.dense_layers) == sizes
    assert parameters(model) == sum(p.numel() for p in module.parameters())


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
    assert [(cost.read(n) - cost.weights) / one for n in (1, 2, 100)] == pytest.approx([2, 3, 4])
    wide = replace(model, experts_per_token=4)
    assert pass_cost(Role("", wide, Dtype.bf16), 1).flops - cost.flops == 2 * one


def test_what_is_not_planned_or_split_says_so_by_name(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    tiny("cohere", vocab_size=SIZE).save_pretrained(folder)
    checkpoints.write_tokenizer(folder, checkpoints.tokenizer(SIZE))
    alone = (f"model={folder}", "draft=none", "seed=1")
    answer = command("task=plan", *alone, "task.prompt_tokens=8", "task.max_new_tokens=8")
    assert answer.code == 4 and "cannot be planned" in answer.errors[0]
    assert "cohere" in answer.errors[0] and "llama" in answer.errors[0]
    ran = command(PROMPT, *alone, "task.max_new_tokens=4", "output=json")
    assert (ran.code, ran.errors) == (0, [])
    assert json.loads(ran.out.splitlines()[-1])["plan"] is None


def test_a_falcon_that_places_tokens_by_slots_is_refused(command: Command, tmp_path: Path) -> None:
    """Its biases come from the mask's slots; the family is tested without them."""
    build("falcon", vocab_size=SIZE, alibi=True).save_pretrained(tmp_path)
    checkpoints.write_tokenizer(tmp_path, checkpoints.tokenizer(SIZE))
    answer = command(PROMPT, f"model={tmp_path}", "draft=none", "task.max_new_tokens=4")
    assert answer.code == 4 and "explicit positions" in answer.errors[0]


def test_the_page_of_architectures_is_what_its_command_writes() -> None:
    """Every architecture of transformers is on it once, and the tested ones write transformers' text."""
    text = DOC.read_text(encoding="utf-8")
    rows = [
        line for line in text.splitlines() if re.match(r"\| [a-z]", line) and "| architecture |" not in line
    ]
    names = [row.split("|")[1].strip() for row in rows]
    assert len(names) == len(set(names)) and set(TESTED_FAMILIES) <= set(names)
    if f"transformers {transformers.__version__}\n" in text.replace("  \n", "\n"):
        assert set(names) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    equal = [row for row in rows if row.endswith("| tested |")]
    assert {row.split("|")[1].strip() for row in equal} == set(TESTED_FAMILIES)
    head = [line.removesuffix("  ") for line in text.splitlines() if line.endswith("  ")]
    findings = []
    for kind, part in zip((EQUAL, REFUSED, UNBUILT), parts(text), strict=True):
        for row in filter(rows.__contains__, part):
            name, _, note = row.removeprefix("| ").removesuffix(" |").partition(" | ")
            findings.append(Finding(name, kind, note.rsplit(" | ", 1)[0] if kind == EQUAL else note))
    assert document(findings, head) == text


def parts(text: str) -> list[list[str]]:
    """The lines below each heading of the page: none gives another text."""
    assert "## Another text" not in text
    return [part.splitlines() for part in text.split("\n## ")[1:]]


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["olmo2", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_an_architecture_of_the_page_writes_transformers_text(architecture: str) -> None:
    found = examine(architecture)
    assert found.outcome == EQUAL and f"| {row_of(found)} |" in DOC.read_text(encoding="utf-8")


def test_the_page_says_why_an_architecture_is_refused() -> None:
    found = examine("llama4_text")
    assert found.outcome == REFUSED and f"| llama4_text | {found.note} |" in DOC.read_text(encoding="utf-8")


def test_a_family_is_one_row() -> None:
    """No other module of the package names an architecture: what differs is in the rows of families.py."""
    every = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    named = {
        (path.relative_to(PACKAGE).as_posix(), node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in every
    }
    rows = {("models/families.py", name) for name in (*FAMILY_ROWS, *READ_TOGETHER_BEYOND)}
    rows |= {("models/families.py", name) for name in GGUF_FAMILIES}
    rows.add(("tasks/calibrate.py", "llama"))  # its synthetic models are Llamas
    tokenizers = {
        ("text/gguf_tokenizer.py", name) for name in ("gemma3", "gpt2", "llama", "phi3", "qwen2")
    }  # GGUF's kinds of them
    heads = {("models/heads/settings.py", name) for name in ("llama", "qwen3")}  # kinds of their blocks
    assert named - {("report/machine.py", "git")} == rows | tokenizers | heads  # the program, not a model


def test_a_row_names_the_layers_of_its_module() -> None:
    """Every linear layer in a block, with its bias, and the norms, as transformers builds them."""
    for name, (family, _) in FAMILIES.items():
        module, row = build(name), FAMILY_ROWS[family]
        (blocks,) = (part for part in module.modules() if isinstance(part, torch.nn.ModuleList))
        linears = [
            (path.rpartition(".")[2], part)
            for path, part in blocks[0].named_modules()
            if isinstance(part, torch.nn.Linear)
        ]
        mlp = () if row.names.router else (*row.names.up, row.names.down)
        named = {path.rpartition(".")[2] for path in (*row.names.qkv, row.names.output, *mlp)}
        assert {leaf for leaf, _ in linears} == named, name
        assert {leaf for leaf, part in linears if part.bias is not None} == set(row.biased), name
        norms = [part for part in blocks[0].modules() if "norm" in type(part).__name__.lower()]
        fewer = row.multi_query and not module.config.new_decoder_architecture
        assert len(norms) == row.norms - fewer + 2 * row.qk_norm, name
        assert all(hasattr(norm, "bias") == row.layer_norm for norm in norms), name
