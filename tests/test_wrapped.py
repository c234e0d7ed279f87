"""The text part of multimodal checkpoints: next to transformers' whole module, and in every other way."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import complete, outlined
from llama_ssp.models.families import FAMILIES as ROWS
from llama_ssp.models.loader import load, load_module
from llama_ssp.models.wrapped import ALWAYS, DEFAULTS, SAME_ON_TEXT, TEXT_TYPES, text_part
from llama_ssp.text.tokenizer import HubTokens
from llama_ssp.text.vocabulary import end_ids_of, read_vocabulary
from tests import checkpoints
from tests.conftest import Command
from tests.distributed.threads import ranks_of, together
from tests.families import require_same, walked
from tests.quantised_folders import FORMATS, quantised
from tests.wrapped import PUBLISHED, WRAPPED, publish, whole_model, wrap

CPU = torch.device("cpu")
MADE = ModelConf(name="made", path="x")
SIZE = 300
ENDS = {"vocab_size": SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
FORMS = [(name, "saved") for name in WRAPPED] + [(name, "published") for name in PUBLISHED if name in WRAPPED]


def saved(name: str, form: str, folder: Path, **changes: Any) -> Any:
    """Saves a whole model in this form; returns its module."""
    module = whole_model(name, **changes)
    module.save_pretrained(folder)
    if form == "published":
        publish(name, folder)
    return module


def loaded(folder: Path, **how: Any) -> Any:
    model, path = complete(replace(MADE, path=str(folder)), "model")
    return load(model, path, Dtype.fp32, CPU, "model", **how)


@pytest.mark.parametrize(("name", "form"), FORMS, ids=["-".join(case) for case in FORMS])
def test_logits_are_those_of_the_whole_module(name: str, form: str, tmp_path: Path) -> None:
    module = saved(name, form, tmp_path)
    with torch.inference_mode():
        require_same(module, *walked(loaded(tmp_path).decoder))


def test_another_base_of_positions_is_seen(tmp_path: Path) -> None:
    """The control: with another base next to the sections of positions, logits differ."""
    module = saved("qwen3-vl", "saved", tmp_path)
    checkpoints.edit(
        tmp_path / "config.json", lambda config: config["text_config"]["rope_parameters"].pop("rope_theta")
    )
    with torch.inference_mode(), pytest.raises(AssertionError):
        require_same(module, *walked(loaded(tmp_path).decoder))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["gemma3", "qwen3-vl-moe", "qwen3.5-moe", "gemma4", "gemma4-moe"])
def test_ranks_read_their_parts(name: str, world: int, tmp_path: Path) -> None:
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    heads |= {"linear_num_key_heads": 3, "linear_num_value_heads": 9} if name == "qwen3.5-moe" else {}
    changes = {"moe_intermediate_size": 20} if name.endswith("moe") else {"intermediate_size": 50}
    form = "published" if name == "qwen3.5-moe" else "saved"
    module = saved(name, form, tmp_path, **heads, **changes)
    ranks = ranks_of(world)
    parts = [loaded(tmp_path, ranks=rank) for rank in ranks]
    with torch.inference_mode():
        results = together([partial(walked, part.decoder) for part in parts], ranks)
        for logits, texts in results:
            require_same(module, logits, texts)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe"])
def test_what_the_class_of_the_text_part_ignores_is_ignored(name: str, tmp_path: Path) -> None:
    """transformers' classes of Qwen3-VL have no windows, and always norm the weights of experts."""
    module = saved(name, "saved", tmp_path)
    ignored = {
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 0,
        "norm_topk_prob": False,
    }
    checkpoints.edit(tmp_path / "config.json", lambda config: config["text_config"].update(ignored))
    with torch.inference_mode():
        require_same(module, *walked(loaded(tmp_path).decoder))


@pytest.mark.parametrize("name", ["gemma3", "qwen3-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe"])
def test_greedy_text_of_a_speculative_run(name: str, command: Command, tmp_path: Path) -> None:
    module = saved(name, "saved", tmp_path, **ENDS)
    checkpoints.write_tokenizer(tmp_path, checkpoints.tokenizer(SIZE))
    answer = command(
        f"model={tmp_path}", "model.dtype=fp32", "speculation=ngram", "k=4", "sampling=greedy",
        "task.max_new_tokens=12", "prompt=the quick brown", "output=json",
    )  # fmt: skip
    assert (answer.code, answer.errors) == (0, [])
    (output,) = answer.document["outputs"]
    # By whole passes: with its cache transformers 5.23 writes another text of the experts' model.
    ids = checkpoints.tokenizer(SIZE).encode("the quick brown").ids
    expected = list[int]()
    for _ in range(12):
        with torch.inference_mode():
            logit_V = module(torch.tensor([ids + expected]), use_cache=False).logits[0, -1]
        expected.append(int(logit_V.argmax()))
    assert output["token_ids"] == expected


def test_says_what_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved("gemma3", "published", tmp_path)
    with caplog.at_level("INFO"):
        loaded(tmp_path)
    assert [line for line in caplog.messages if "left out" in line] == [
        "model made: vision: 34 tensors left out; text only"
    ]


def test_a_tensor_that_is_of_neither_part_is_refused(tmp_path: Path) -> None:
    saved("llava", "published", tmp_path)
    checkpoints.edit_tensors(
        tmp_path, lambda tensors: tensors.update({"language_model.model.extra.weight": torch.ones(2)})
    )
    with pytest.raises(ModelError, match=r"unexpected keys.*model.extra.weight"):
        loaded(tmp_path)


@pytest.mark.few(16)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_quantised_text_part_is_planned_and_read_as_without_the_whole(name: str, tmp_path: Path) -> None:
    plain = quantised(name, tmp_path / "plain")
    whole = quantised(name, tmp_path / "whole")
    wrap(whole)
    sizes = [outlined(replace(MADE, path=str(folder)), "model") for folder in (plain, whole)]
    assert sizes[1] == replace(sizes[0], path=str(whole))

    results = []
    for folder in (plain, whole):
        model, path = complete(replace(MADE, path=str(folder)), "model")
        with torch.inference_mode():
            results.append(walked(load(model, path, Dtype.fp32, CPU, "model").decoder)[0])
    assert all(map(torch.equal, *results))


def test_an_adapter_of_the_whole_is_merged_into_its_text_part(tmp_path: Path) -> None:
    """It has the names of the whole, and changes of vision, which no text sees."""
    module = saved("gemma3", "saved", tmp_path / "model")
    projection = module.model.language_model.layers[1].self_attn.q_proj
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, projection.in_features, generator=generator)
    b = torch.randn(projection.out_features, 2, generator=generator)
    stem = "base_model.model.model.language_model.layers.1.self_attn.q_proj"
    seen = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj"
    tensors = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    tensors |= {f"{seen}.lora_A.weight": a.clone(), f"{seen}.lora_B.weight": b.clone()}
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))

    asked = replace(MADE, path=str(tmp_path / "model"), adapter=str(tmp_path / "adapter"))
    model, path = complete(asked, "model")
    decoder = load(model, path, Dtype.fp32, CPU, "model").decoder
    with torch.inference_mode():
        with pytest.raises(AssertionError):
            require_same(module, *walked(decoder))  # the control: before the sum
        projection.weight += 1.5 * b @ a
        require_same(module, *walked(decoder))


def test_transformers_reads_the_text_part(tmp_path: Path) -> None:
    """As for a placement by layers, and for a family without a row."""
    module = saved("gemma3", "published", tmp_path)
    model, path = complete(replace(MADE, path=str(tmp_path)), "model")
    text = load_module(model, path, Dtype.fp32, CPU, "model")
    token_BW = torch.tensor([[5, 9, 11, 7]])
    with torch.inference_mode():
        expected, result = (each(token_BW).logits for each in (module, text))
    assert torch.allclose(expected, result, rtol=0, atol=1e-5 * float(expected.abs().max()))


REFUSED = {
    "paligemma": (
        {"model_type": "paligemma", "text_config": {"model_type": "gemma"}},
        "not known.*paligemma",
    ),
    "llama4": (
        {
            "model_type": "llama4",
            "text_config": {"model_type": "llama4_text", "layer_types": ["chunked_attention"]},
        },
        "cannot roll back.*llama4_text.*chunked_attention",
    ),
    "glm4v": (
        {"model_type": "glm4v", "text_config": {"model_type": "glm4v_text"}},
        "not supported.*glm4v_text",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_the_name_of_their_text_part(name: str, tmp_path: Path) -> None:
    content, says = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=says):
        outlined(replace(MADE, path=str(tmp_path)), "model")


@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_what_configs_leave_out_is_what_transformers_has(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {kind}")
    usual = CONFIG_MAPPING[kind]().to_dict()
    theta = DEFAULTS[kind].get("rope_theta")
    rope = usual["rope_parameters"]
    said = {key: value for key, value in DEFAULTS[kind].items() if key in usual}
    assert said == {key: usual[key] for key in said}
    assert theta in (None, rope.get("rope_theta"))

    # A causal model of another class stands for it: what the classes have differently is said.
    other = SAME_ON_TEXT.get(kind)
    if other is not None:
        instead = CONFIG_MAPPING[other]().to_dict()
        differs = {key for key in usual.keys() & instead.keys() if usual[key] != instead[key]}
        differs -= {"model_type", "layer_types", "rope_parameters", "tie_word_embeddings", *TOKENS}
        differs = {"num_experts" if key == "num_local_experts" else key for key in differs}
        assert differs <= DEFAULTS[kind].keys() | ALWAYS.get(kind, {}).keys()
        assert rope.get("rope_theta") == theta


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def test_every_text_part_with_a_row_has_its_defaults() -> None:
    kinds = set(TEXT_TYPES.values())
    with_rows = {kind for kind in kinds if SAME_ON_TEXT.get(kind, kind) in ROWS}
    assert with_rows <= DEFAULTS.keys()


def test_the_abbreviated_config_of_a_published_gemma3() -> None:
    """google/gemma-3-4b-it: what its text_config says is all there is."""
    config = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    part = text_part(config)
    said = {
        key: part[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    }
    assert said == {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    }
    assert part["tie_word_embeddings"] and part["eos_token_id"] == [1, 106]


TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}"


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "processor_config.json"])
def test_a_chat_template_is_found_where_processors_look(file: str, tmp_path: Path) -> None:
    checkpoints.save(tmp_path)
    content = TEMPLATE if file.endswith("jinja") else json.dumps({"chat_template": TEMPLATE})
    (tmp_path / file).write_text(content)
    assert HubTokens(tmp_path).rendered([{"role": "user", "content": "hello"}]) == "[user] hello "
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary is not None and vocabulary.template == TEMPLATE


PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}"
    "{% if part.type == 'text' %} {{ part.text }} {% endif %}{% endfor %}{% endfor %}"
)


def test_a_template_that_wants_parts_gets_them(tmp_path: Path) -> None:
    checkpoints.save(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    tokens = HubTokens(tmp_path)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert tokens.rendered(messages) == "[system] be brief [user] hello "
    assert tokens.chat(messages) == tokens.encode("[system] be brief [user] hello ", begin=False)


def test_end_tokens_of_the_text_part_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral3", "text_config": {"eos_token_id": [2, 7]}})
    )
    assert end_ids_of(tmp_path) == {2, 7}


def test_a_plan_ends_with_what_runs_of_the_folder(command: Command, tmp_path: Path) -> None:
    saved("qwen3-vl", "saved", tmp_path)
    tokens = ("task.prompt_tokens=20", "task.max_new_tokens=20")
    answer = command("task=plan", f"model={tmp_path}", "cluster=p4d", *tokens)
    expected = (
        f"model {tmp_path.name} (qwen3, the text part of qwen3_vl) runs split over ranks, with compiled "
        "steps, planned to the byte; drafts: another model, draft=int8, draft=int4, speculation=ngram, "
        "EAGLE-3 and DFlash heads"
    )
    assert answer.code == 0, answer.err
    assert expected in answer.out.splitlines()[-2:]
