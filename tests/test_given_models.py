"""Models that a script has loaded: their greedy texts are transformers' own, and they are not changed."""

import gc
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from llama_ssp import RunError, load_pair
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from tests import checkpoints
from tests.families import greedy_text

NEW = 16
PROMPTS = [[5, 6, 7, 5, 6], [70, 71, 72], [9]]
EAGER = {"engine": "eager", "sampling": "plain"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    return checkpoints.save(place, initializer_range=0.4, max_position_embeddings=512)


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def texts(module: Any) -> list[list[int]]:
    return [greedy_text(module, ids, NEW, module.config.eos_token_id) for ids in PROMPTS]


def state_of(module: Any) -> list[Any]:
    """What must not change: tensors and where they are, the config, and hooks."""
    held = [(name, t.data_ptr(), t.requires_grad, t.clone()) for name, t in module.named_parameters()]
    hooks = [len(part._forward_hooks) for part in module.modules()]
    return [[entry[:3] for entry in held], [entry[3] for entry in held], module.config.to_dict(), hooks]


def same(before: list[Any], after: list[Any]) -> bool:
    tensors = zip(before[1], after[1], strict=True)
    return before[0] == after[0] and before[2:] == after[2:] and all(torch.equal(a, b) for a, b in tensors)


def hooked(module: Any) -> Any:
    """A module that does more than its tensors say."""
    module.model.layers[0].register_forward_hook(lambda _part, _given, output: output * 1.5)
    return module


class Halved(LlamaForCausalLM):
    """A class of the script's own."""

    def forward(self, *given: Any, **named: Any) -> Any:
        output = super().forward(*given, **named)
        output.logits = output.logits.roll(1, -1)
        return output


def of_own_class(module: Any) -> Any:
    module.__class__ = Halved
    return module


@pytest.mark.parametrize(
    ("change", "runs"),
    [(lambda module: module, DecoderModel), (hooked, CausalModel), (of_own_class, CausalModel)],
    ids=["decoder", "hook", "class"],
)
@pytest.mark.parametrize("drafting", ["none", "ngram", "itself"])
def test_greedy_texts_are_transformers_own(change: Any, runs: type, drafting: str, model: Any) -> None:
    """A hook, or a class of the script's own, is seen: the module itself runs."""
    plain = texts(model)
    module = change(model)
    expected = texts(module)
    assert (expected == plain) is (runs is DecoderModel)
    before = state_of(module)
    words = {**EAGER, **({"speculation": "ngram"} if drafting == "ngram" else {})}
    with load_pair(module, module if drafting == "itself" else None, batch_size=2, overrides=words) as pair:
        assert type(pair.session.models.target) is runs
        found = pair.generate(PROMPTS, k=3 if drafting != "none" else 0, **GREEDY)
        assert [one.token_ids for one in found] == expected
        assert all(one.text == "" for one in found) and any(one.drafted for one in found) is (
            drafting != "none"
        )
    assert same(before, state_of(module)) and texts(module) == expected


def test_what_is_used_as_it_is_is_shared(model: Any) -> None:
    """Joined matrices are copies; the plan counts these alone."""
    own = {tensor.data_ptr() for tensor in model.parameters()}
    with load_pair(model, overrides=EAGER) as pair:
        target = pair.session.models.target
        assert isinstance(target, DecoderModel)
        parts = {tensor.data_ptr(): tensor.nbytes for tensor in target.decoder.parameters()}
        shared = sum(size for place, size in parts.items() if place in own)
        given = pair.session.placements.target.given
        assert given is not None and given.shared == shared > 0
        assert 0 < sum(parts.values()) - shared < shared


def test_tokenizers_are_taken_as_they_are(model: Any, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = deepcopy(tokenizer).__dict__.keys()
    said = tokenizer("hello")["input_ids"]
    with (
        load_pair(model, tokenizer=tokenizer, overrides=EAGER) as pair,
        load_pair(folder, overrides=EAGER) as other,
    ):
        how: dict[str, Any] = {"max_new_tokens": 12, "seed": 3}
        given, named = pair.generate("hello", **how), other.generate("hello", **how)
        assert [one.prompt_tokens for one in given] == [len(said)] == [one.prompt_tokens for one in named]
        assert pair.tokenizer.encode("hello") == other.tokenizer.encode("hello")
        assert pair.tokenizer.end_ids == other.tokenizer.end_ids
    assert tokenizer.__dict__.keys() == before and tokenizer("hello")["input_ids"] == said
    with load_pair(model, tokenizer=folder, overrides=EAGER) as pair:
        assert pair.tokenizer.encode("hello") == said


def test_a_folder_without_a_tokenizer_takes_token_ids(folder: Path, tmp_path: Path) -> None:
    bare = checkpoints.copied(folder, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with load_pair(folder, overrides={**EAGER, "model.dtype": "fp32"}) as pair:
        expected = [one.token_ids for one in pair.generate(PROMPTS, **GREEDY)]
    with pytest.raises(RunError, match="tokenizer"):
        load_pair(bare, overrides=EAGER)
    with load_pair(bare, tokenizer=None, overrides={**EAGER, "model.dtype": "fp32"}) as pair:
        assert [one.token_ids for one in pair.generate(PROMPTS, **GREEDY)] == expected
        with pytest.raises(RunError, match="the pair has no tokenizer; found a text, allowed token ids"):
            pair.generate("hello")


def test_a_loaded_draft_of_a_folder(model: Any, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = {**EAGER, "model.dtype": "fp32"}
    with load_pair(folder, model, tokenizer=tokenizer, overrides=words) as pair:
        (found,) = pair.generate("hello hello", k=4, **GREEDY)
        assert found.accepted == found.drafted > 0


def test_it_may_be_quantised(model: Any) -> None:
    """A copy is."""
    before = state_of(model)
    with load_pair(model, overrides={**EAGER, "model.dtype": "int8"}) as pair:
        assert pair.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids
        assert "int8" in repr(pair)
    assert same(before, state_of(model))


def spread(module: Any) -> Any:
    module.model.layers[0].to("meta")
    return module


def flashing(module: Any) -> Any:
    module.config._attn_implementation = "flash_attention_2"
    return hooked(module)


@pytest.mark.parametrize(
    ("change", "how", "says"),
    [
        (lambda module: module.train(), {}, r"training mode.*call model.eval\(\) first"),
        (spread, {}, "not on one device; model LlamaForCausalLM; found cpu, meta"),
        (flashing, {}, "takes no masks.*found attn_implementation=flash_attention_2"),
        (lambda module: module.model.layers[0], {}, "no model of transformers; found transformers"),
        (lambda _: torch.nn.Linear(2, 2), {}, "no model of transformers; found torch.nn"),
        (lambda _: None, {}, "model is no model; found NoneType"),
        (lambda _: 3, {}, "model is no model; found int"),
        (lambda module: module, {"overrides": {"placement.target_device": "cuda:0"}}, "stays where it is"),
        (hooked, {"overrides": {"model.dtype": "int8"}}, "a module of the script runs as it is"),
        (lambda module: module, {"tokenizer": 3}, "no tokenizer of transformers; found int"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(
    change: Any, how: dict[str, Any], says: str, model: Any
) -> None:
    with pytest.raises(RunError, match=says) as raised:
        load_pair(change(model), **how)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_an_adapter_of_peft_runs_by_the_module(model: Any) -> None:
    peft = pytest.importorskip("peft")
    plain = texts(model)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, target_modules=["q_proj", "v_proj"]),
    ).eval()
    expected = texts(adapted)
    assert expected != plain
    with load_pair(adapted, overrides=EAGER) as pair:
        assert [one.token_ids for one in pair.generate(PROMPTS, **GREEDY)] == expected


def test_a_closed_pair_keeps_nothing_of_a_model(folder: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pair = load_pair(module, overrides=EAGER)
    pair.generate([[5, 6]], max_new_tokens=2)
    pair.close()
    gone = weakref.ref(module)
    del module, pair
    gc.collect()
    assert gone() is None
