"""Layers for multi-token prediction: against transformers' own module; what is declared, written, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel as TheirMtp

from llama_ssp.config import Dtype, ModelConf, PlacementConf, RunConf, SamplingConfig, Weights
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import ModelError
from llama_ssp.models.causal_lm import CausalModel, kernels_of
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.families import MTP
from llama_ssp.models.heads.mtp import MtpModel, load_mtp
from llama_ssp.models.heads.settings import NORMED
from llama_ssp.models.loader import load
from llama_ssp.pair.assembly import ModelCache
from llama_ssp.pair.placements import model_placements
from llama_ssp.planner.resolve import PairSpec, require_head
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters.block_head import head_drafter
from llama_ssp.speculative.drafters.head import HeadDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.verification import RULES
from tests.conftest import needs_transformers
from tests.distributed.pairs import Case, refilled, written
from tests.families import VOCAB, tiny
from tests.heads import CPU
from tests.test_heads import HEAT, PROMPTS, Compared, goes_on

DIM, LAYERS = 32, 2


def checkpoint(folder: Path, family: str, vocab: int = VOCAB, seed: int = 0) -> Path:
    """A random target with a layer for multi-token prediction, in the published layout."""
    tiny(family, num_hidden_layers=LAYERS, vocab_size=vocab, pad_token_id=None).save_pretrained(folder)
    with TemporaryDirectory() as other:
        sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": vocab}
        tiny(family, **sizes, pad_token_id=None).save_pretrained(other)
        block = load_file(Path(other) / "model.safetensors")
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors, behind = load_file(file), f"model.layers.{LAYERS}"
    inside = {name: tensor for name, tensor in block.items() if name.startswith("model.layers.0.")}
    tensors |= {name.replace("model.layers.0", behind): tensor for name, tensor in inside.items()}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{behind}.{name}.weight"] = 0.5 + torch.rand(DIM, generator=generator)
    tensors[f"{behind}.eh_proj.weight"] = 0.3 * torch.randn(DIM, 2 * DIM, generator=generator)
    tensors[f"{behind}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{behind}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def opened(folder: Path) -> tuple[CausalModel, MtpModel]:
    model, path = complete(ModelConf(name="target", path=str(folder)), "model")
    target = load(model, path, Dtype.fp32, CPU, "model")
    assert isinstance(target, CausalModel)
    target.tap((NORMED,))
    return target, load_mtp(folder, Dtype.fp32, CPU, target, "mtp")


class Theirs:
    """The layer by transformers' module, which is given a whole text and keeps nothing."""

    def __init__(self, folder: Path) -> None:
        config = AutoModelForCausalLM.from_pretrained(folder).config
        self.target: Any = AutoModelForCausalLM.from_pretrained(folder, **kernels_of(config, torch.float32))
        self.target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]  # as of real sizes
        self.mtp = TheirMtp.from_pretrained(self.target).eval()

    def logits(self, text: list[int], drafts: list[int]) -> Tensor:
        """Of the token after `drafts`."""
        hidden = self.target(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        state_1TH, tokens = hidden[-1][:, :-1], text[1:]
        for place in range(len(drafts) + 1):
            z_1TH = self.mtp.forward_layer(
                0, state_1TH, torch.arange(1, len(tokens) + 1)[None], None, input_ids=torch.tensor([tokens])
            )
            if place < len(drafts):
                state_1TH = torch.cat([state_1TH, z_1TH[:, -1:]], 1)
                tokens = [*tokens, drafts[place]]
        found: Tensor = self.target.lm_head(z_1TH[0, -1])
        return found

    def probs(self, _: Tensor, text: list[int], drafts: list[int], __: int, heat: float) -> Tensor:
        return (self.logits(text, drafts).double() / heat).softmax(-1)


def engine_with(folder: Path, heat: float, rule: str = "block", chunk: int = 3) -> Engine:
    target, head = opened(folder)
    transform = SamplingTransform(SamplingConfig(temperature=heat), (), VOCAB)
    runner, draws = ModelRunner(target, chunk), CounterDraws(3)
    return Engine(runner, head_drafter(head, runner, transform, draws), transform, RULES[rule], draws)


@pytest.mark.parametrize("family", MTP)
@torch.inference_mode()
def test_declared_distributions_are_those_of_transformers(family: str) -> None:
    """Of chained drafts, after rejections, of ragged rows; transformers' layer reads each text anew."""
    needs_transformers("5.20")
    with TemporaryDirectory() as name:
        engine, theirs = engine_with(folder := checkpoint(Path(name), family), HEAT), Theirs(folder)
    assert isinstance(engine.drafter, HeadDrafter)
    engine.drafter._window = 8  # so that states wait in few places
    watched = Compared(theirs.target, theirs, engine.drafter, (0,))
    state, accepted, rejected = engine.prefill(PROMPTS, 8), 0, 0
    for step in generate(engine, state, Limits(8), FixedDraftLength(3, len(PROMPTS))):
        accepted += sum(row.accepted for row in step.rows)
        rejected += sum(len(row.drafted) - row.accepted for row in step.rows)
    assert rejected and accepted and watched.count > 15


def test_another_text_goes_on_from_a_common_beginning(tmp_path: Path) -> None:
    needs_transformers("5.20")
    engine, theirs = engine_with(folder := checkpoint(tmp_path, MTP[0]), HEAT), Theirs(folder)
    goes_on(engine, Compared(theirs.target, theirs, engine.drafter, (0,)))


def test_a_pair_drafts_with_its_target_s_own_layer(tmp_path: Path) -> None:
    """Ragged rows, greedy, in batches of 1 and 4, with rows that are refilled: the text of the target."""
    folder, local = checkpoint(tmp_path, MTP[0]), PlacementConf()
    model = complete(ModelConf(name="local", path=str(folder), dtype=Dtype.fp32), "model")[0]
    draft = complete(replace(layer_of(folder), dtype=Dtype.fp32), "draft")[0]
    run = RunConf(model=model, draft=draft, placement=local)
    spec = PairSpec(run, folder, folder, resolve(local, 1, True))
    pair = ModelCache(ALONE, local).open(model_placements(spec))
    expected = written(pair, run, Case(0, 4)).texts
    for rows in (1, 4):
        found = written(pair, run, Case(3, rows))
        assert found.texts == expected[:rows] and found.drafted > 0
    assert refilled(pair, run, Case(3)) == dict(zip("0123", expected, strict=True))


def layer_of(folder: Path) -> ModelConf:
    return ModelConf(name="mtp", path=str(folder), weights=Weights.mtp)


def changed(folder: Path, **keys: Any) -> Path:
    file = folder / "config.json"
    content = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def without(folder: Path, name: str) -> Path:
    file = folder / "model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if not key.endswith(name)}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another family": (lambda f: changed(f, model_type="llama"), "1 of llama, allowed"),
    "two layers": (lambda f: changed(f, num_nextn_predict_layers=2), "2 of glm4_moe, allowed"),
    "quantised": (lambda f: changed(f, quantization_config={"quant_method": "fp8"}), "quantised, allowed"),
    "left out": (lambda f: without(f, "eh_proj.weight"), "lacks its layer .*eh_proj"),
    "sizes are missing": (lambda f: changed(f, vocab_size=None), "vocab_size"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    change, words = WRONG[case]
    with pytest.raises(ModelError, match=words):
        complete(
            ModelConf(name="mtp", path=str(change(checkpoint(tmp_path, "glm4_moe"))), weights=Weights.mtp),
            "draft",
        )


def test_a_damaged_layer_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "glm4_moe")
    with pytest.raises(ModelError, match="not a model of its own"):
        complete(layer_of(folder), "model")
    head, _ = complete(layer_of(folder), "draft")
    assert (head.head_inputs, head.head_vocab, head.n_layers) == (DIM, VOCAB, 1)
    with pytest.raises(ModelError, match=r"not one of this target; .*found glm4_moe, allowed llama"):
        require_head(head, replace(head, family="llama"), PlacementConf(), 1)
    without(folder, f"layers.{LAYERS}.self_attn.k_proj.weight")
    with pytest.raises(ModelError, match="missing keys"):
        opened(folder)
