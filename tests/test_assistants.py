"""Gemma 4's assistants: what they declare next to transformers' module, texts, bytes, what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache

from llama_ssp.config import ModelConf, PlacementConf, SamplingConfig
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.placing.pairs import require_head
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.verification import RULES
from tests import checkpoints
from tests.checkpoints import edit, edit_tensors
from tests.conftest import Command
from tests.families import WINDOW, build, decoder_of, model_of, ragged_prompts
from tests.heads import loaded, save_assistant, sharing
from tests.rig import drive, engine_of, speculate, steps_of

pytestmark = pytest.mark.skipif(
    "gemma4_assistant" not in CONFIG_MAPPING, reason="this transformers has no assistants of Gemma 4"
)
VOCAB = 96  # which groups of 8 tokens divide
HEAT = 4.0
PROMPTS = ragged_prompts(9, 1, 4, 2)
LONG = ragged_prompts(WINDOW + 7, 3)  # the first is longer than the window
KINDS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "groups of tokens": {"groups": 12, "chosen": 3},
    "one layer of each kind": {"num_hidden_layers": 2, "num_kv_shared_layers": 2,
                               "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


def pair_of(folder: Path, family: str = "gemma4", **how: Any) -> tuple[Any, Any, Engine]:
    """Modules of a target and of its assistant, and an engine of both."""
    module = build(family, vocab_size=VOCAB)
    assistant = save_assistant(folder, module.config, **how)
    model = DecoderModel(decoder_of(module), module.config, "target")
    head = loaded(folder, 3, model.table(False), target=module.config)
    model.tap(head.taps)
    sampling = SamplingConfig(temperature=HEAT)
    return module, assistant, engine_of(model, head, "block", sampling=sampling, draws=3, chunk=3)


def declared_by_transformers(module: Any, assistant: Any, text: list[int], drafts: list[int]) -> Tensor:
    """The distribution of the token after these drafts, of transformers' modules, from nothing.

    The target reads all of the text but its last token, with a cache that forgets nothing.
    """
    cache = DynamicCache()
    read = torch.tensor([text[:-1]])
    given = module(read, past_key_values=cache, use_cache=True, output_hidden_states=True)
    state = given.hidden_states[-1][:, -1:]
    kinds = module.config.layer_types
    last = {kind: max(n for n, own in enumerate(kinds) if own == kind) for kind in set(kinds)}
    shared = {kind: (cache.layers[n].keys, cache.layers[n].values) for kind, n in last.items()}
    for token in [text[-1], *drafts]:
        embedded = module.get_input_embeddings()(torch.tensor([[token]]))
        with sharing():
            output = assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=shared,
            )
        state = output.last_hidden_state
    return (output.logits[0, -1].double() / HEAT).softmax(-1)


class Compared:
    """A drafter whose proposals are compared, one by one, with what transformers' modules declare."""

    def __init__(self, module: Any, assistant: Any, engine: Engine) -> None:
        self.module, self.assistant, self.count = module, assistant, 0
        self._propose = engine.drafter.propose
        engine.drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, state: State, count: tuple[int, ...]) -> Any:
        proposal = self._propose(state, count)
        for row, drafted in enumerate(proposal.count):
            text, drafts = state.texts[row], proposal.drafted_BK[row, :drafted].tolist()
            for place in range(drafted):
                expected = declared_by_transformers(self.module, self.assistant, text, drafts[:place])
                declared = proposal.draft_BKV[row, place].double()
                torch.testing.assert_close(declared, expected, rtol=0, atol=1e-5)
                self.count += 1
        return proposal


@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe", "gemma4-values"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_declared_distributions_are_those_of_transformers(kind: str, family: str) -> None:
    """After rejections, of ragged rows, of texts that are shorter and longer than the window."""
    with TemporaryDirectory() as folder:
        module, assistant, engine = pair_of(Path(folder), family, **KINDS[kind])
    watched = Compared(module, assistant, engine)
    for prompts in (PROMPTS, LONG):
        _, steps = steps_of(engine, prompts, 8, 3)
        accepted = sum(row.accepted for step in steps for row in step.rows)
        drafted = sum(len(row.drafted) for step in steps for row in step.rows)
        assert 0 < accepted < drafted, "the run saw no rejection, or no draft that stood"
    assert watched.count > 20


@torch.inference_mode()
def test_another_text_goes_on_from_a_common_beginning(tmp_path: Path) -> None:
    """As in a conversation and in a batch: longer, changed in the middle, cut, and another."""
    module, assistant, engine = pair_of(tmp_path)
    watched = Compared(module, assistant, engine)
    state = engine.prefill(PROMPTS[:1], 40)
    first = list(PROMPTS[0].token_ids)
    turns = [first, [*first, 9, 9], [*first[:6], 7, 8, 9, 10], first[:4], [11, 12], [13], [13, 14, 15]]
    others = [[*range(1, 21)], [5], first]
    for reuse, text in [*((True, turn) for turn in turns), *((False, turn) for turn in others)]:
        before = watched.count
        engine.admit(state, {0: Prompt(str(len(text)), tuple(text))}, reuse)
        for _ in generate(engine, state, Limits(8), FixedDraftLength(2, 1)):
            pass
        assert watched.count >= before + 4, (reuse, text)


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("rule", RULES)
def test_greedy_texts_are_the_targets(rule: str, k: int, tmp_path: Path) -> None:
    module = build("gemma4", vocab_size=VOCAB)
    save_assistant(tmp_path, module.config)
    model = DecoderModel(decoder_of(module), module.config, "target")
    head = loaded(tmp_path, 3, model.table(False), target=module.config)
    model.tap(head.taps)
    greedy = SamplingConfig(temperature=0.0)
    run = drive(engine_of(model, head, rule, sampling=greedy, draws=5, chunk=3), PROMPTS, k=k)
    plain = model_of("gemma4", vocab_size=VOCAB)
    assert run.texts == speculate(plain, PROMPTS, None, k=0).texts
    assert run.texts == speculate(plain, PROMPTS, "ngram", k=k).texts
    assert run.texts == speculate(plain, PROMPTS, model_of("gemma4", noise=0.02, vocab_size=VOCAB), k=k).texts
    assert run.drafted > 0


@pytest.mark.parametrize("groups", [0, 12])
def test_an_assistant_holds_the_bytes_that_are_planned(groups: int, command: Command, tmp_path: Path) -> None:
    """Weights, states that wait, and no cache; its folder's config says what it is."""
    module = build("gemma4", vocab_size=300, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    module.save_pretrained(tmp_path / "target")
    checkpoints.write_tokenizer(tmp_path / "target", checkpoints.tokenizer(300))
    save_assistant(tmp_path / "assistant", module.config, groups=groups)
    pair = f"model={tmp_path / 'target'}", f"draft={tmp_path / 'assistant'}"
    formats = "model.dtype=fp32", "draft.dtype=fp32"
    limits = "speculation.k=3", "task.max_new_tokens=12", "task.ignore_eos=true", "seed=3"
    answer = command(*pair, *formats, *limits, "prompt=the fox", "output=json")
    assert answer.code == 0 and answer.document["tokens_drafted"] > 0, answer.errors
    (memory,) = answer.document["plan"]["memory"]
    assert memory["held_bytes"]["predicted"] == memory["held_bytes"]["measured"]


def local(folder: Path) -> ModelConf:
    return ModelConf(name="local", path=str(folder))


def test_where_an_assistant_may_draft(tmp_path: Path) -> None:
    """Next to its own target, which the decoder runs; the message has what does not fit."""
    module = build("gemma4", vocab_size=VOCAB)
    module.save_pretrained(tmp_path / "target")
    save_assistant(tmp_path / "assistant", module.config)
    target, _ = complete(local(tmp_path / "target"), "model")
    head, _ = complete(local(tmp_path / "assistant"), "draft")
    assert (head.head_inputs, head.head_vocab, head.head_shares_cache) == (32, VOCAB, True)
    require_head(head, target, PlacementConf(), 1)
    for changes, words in (
        ({"n_kv_heads": 4}, "n_kv_heads 2, of the target 4"),
        ({"full_head_dim": 32}, "full_head_dim 16, of the target 32"),
        ({"dim": 16}, "states of 32 numbers, of the target 16"),
        ({"family": "gemma3_text"}, "family gemma4_text, of the target gemma3_text"),
        ({"lacking": "num_kv_shared_layers: 18"}, "num_kv_shared_layers: 18, which transformers runs"),
    ):
        with pytest.raises(ModelError, match=words):
            require_head(head, replace(target, **changes), PlacementConf(), 1)
    with pytest.raises(ModelError, match="not a model of its own"):
        complete(local(tmp_path / "assistant"), "model")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "groups that do not divide": (
        lambda folder: edit(folder / "config.json", lambda content: content.update(num_centroids=7)),
        "no usable groups",
    ),
    "a token twice": (
        lambda folder: edit_tensors(folder, lambda t: t["masked_embedding.token_ordering"].fill_(1)),
        "order of tokens",
    ),
    "no projection": (
        lambda folder: edit_tensors(folder, lambda t: t.pop("post_projection.weight")),
        "lacks tensors",
    ),
    "another tensor": (
        lambda folder: edit_tensors(folder, lambda t: t.update({"more.weight": torch.ones(2)})),
        "unexpected keys.*more.weight",
    ),
    "a block less": (
        lambda folder: edit_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "missing keys.*layers.1.mlp.up_proj",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    change, words = REFUSED[what]
    module = build("gemma4", vocab_size=VOCAB)
    save_assistant(tmp_path, module.config, groups=12)
    change(tmp_path)
    with pytest.raises(ModelError, match=words):
        complete(local(tmp_path), "draft")
        loaded(tmp_path, 3, module.get_input_embeddings().weight, target=module.config)
