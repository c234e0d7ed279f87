"""Trained heads: logits against a second reading of the formulas, what is declared, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from llama_ssp.config import SamplingConfig
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.speculative.coupled import source
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters.head import HeadDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.verification import RULES
from tests.families import VOCAB, build, decoder_of
from tests.heads import Reference, loaded, save_head

TAPS = (0, 1, 3)  # of three blocks: before the first, between, behind the last
DIM = 32  # of the small targets
SOME = [token for token in range(VOCAB) if token % 3]
PROMPTS = [
    Prompt(str(n), tuple((7 * n + 3 * i) % (VOCAB - 3) + 3 for i in range(length)))
    for n, length in enumerate([9, 1, 4, 2])
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "raw": {"raw": True},
    "raw, own width": {"raw": True, "dim": 12, "target_hidden_size": DIM},
    "reduced vocabulary": {"ids": SOME},
    "norm_before_residual": {"flags": ("norm_before_residual",)},
    "norm_before_fc": {"flags": ("norm_before_fc", "norm_before_residual")},
    "fc_norm, norm_output": {"flags": ("fc_norm", "norm_output")},
    "qwen3 block": {"block": "qwen3", "ids": SOME},
    "the target's embedding": {"embeds": False, "dim": DIM, "raw": True},
}


def target_of(name: str = "llama-gqa") -> tuple[Any, DecoderModel]:
    module = build(name)
    model = DecoderModel(decoder_of(module), module.config, "target")
    model.tap(TAPS)
    return module, model


def head_of(folder: Path, **how: Any) -> Path:
    return save_head(folder, **({"vocab": VOCAB, "target_dim": DIM, "taps": TAPS} | how))


def states_of(module: Any, text: list[int]) -> Tensor:
    """The target's hidden states at the taps, by transformers; what the last block gives, before its norm."""
    given: list[Tensor] = []
    hook = module.model.norm.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    hidden = module(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    states = [*hidden[:-1], given[-1]]
    return torch.cat([states[tap][0] for tap in TAPS], -1)


class Compared:
    """A drafter whose proposals are compared, one by one, with what the reference declares from nothing."""

    def __init__(self, module: Any, folder: Path, drafter: HeadDrafter, heat: float = 1.0) -> None:
        table = module.get_input_embeddings().weight
        has_table = "embed_tokens.weight" in load_file(folder / "model.safetensors")
        self.module, self.reference = module, Reference(folder, None if has_table else table)
        self.heat, self.count, self._propose = heat, 0, drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, state: State, count: tuple[int, ...]) -> Any:
        proposal = self._propose(state, count)
        for row, drafted in enumerate(proposal.count):
            text, drafts = state.texts[row], proposal.drafted_BK[row, :drafted].tolist()
            for place in range(drafted):
                states = states_of(self.module, text)[:-1]
                expected = self.reference.probs(states, text, drafts[:place], VOCAB, self.heat)
                found = proposal.draft_BKV[row, place].double()
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
                self.count += 1
        return proposal


HEAT = 4.0  # the small targets are so certain that they would accept nothing


def compared(folder: Path, rows: int = 4, k: int = 3, new: int = 10, chunk: int = 3, **how: Any) -> int:
    """A sampled run of ragged rows with rejections; how many declared distributions were compared."""
    module, model = target_of()
    table = None if how.pop("embeds", True) else model.decoder.embedding.weight
    head = loaded(folder, 3, table, **how)
    sampling = SamplingConfig(temperature=HEAT)
    transform, rule, draws = SamplingTransform(sampling, (), VOCAB), RULES["block"], source(RULES["block"], 3)
    runner = ModelRunner(model, chunk)
    drafter = HeadDrafter(head, runner, transform, draws)
    drafter._window = 8  # so that states wait in few places
    watched = Compared(module, folder, drafter, HEAT)
    engine = Engine(runner, drafter, transform, rule, draws)
    state = engine.prefill(PROMPTS[:rows], new)
    accepted = rejected = 0
    for step in generate(engine, state, Limits(new), FixedDraftLength(k, rows)):
        accepted += sum(row.accepted for row in step.rows)
        rejected += sum(len(row.drafted) - row.accepted for row in step.rows)
    assert rejected and accepted, "the run saw no rejection, or no draft that stood"
    return watched.count


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_declared_distributions_are_the_published_formulas(layout: str, tmp_path: Path) -> None:
    """After rejections, of ragged rows, in every layout and with every flag; the reference keeps nothing."""
    how = LAYOUTS[layout]
    folder = head_of(tmp_path, **how)
    assert compared(folder, embeds=how.get("embeds", True)) > 15


@pytest.mark.parametrize(
    "flags", [(), ("norm_before_residual", "norm_before_fc"), ("fc_norm", "norm_output")]
)
@torch.inference_mode()
def test_the_second_reading_is_that_of_speculators(flags: tuple[str, ...], tmp_path: Path) -> None:
    """All logits of its training pass of three steps: where that library is installed."""
    core = pytest.importorskip("speculators.models.eagle3.core", reason="speculators is not installed")
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    folder = head_of(tmp_path, flags=flags, dim=DIM)
    content = json.loads((folder / "config.json").read_text())
    layer = {**content["transformer_layer_config"], "attn_implementation": "eager"}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=VOCAB, **dict.fromkeys(flags, True),
        eagle_aux_hidden_state_layer_ids=list(TAPS),
    )  # fmt: skip
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = core.Eagle3DraftModel(config).float().eval()
    missing = theirs.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys
    made: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, logits: made.append(logits[0]))
    reference, text = Reference(folder), [5, 9, 30, 31, 60, 7, 7, 12]
    states = torch.randn(len(text) - 1, 3 * DIM, generator=torch.Generator().manual_seed(2))
    theirs(states[None], torch.tensor([text[1:]]), torch.zeros(1, len(text) - 1, dtype=torch.int64))
    for step, logits in enumerate(made):
        for place in range(len(text) - 1 - step):
            now, drafts = text[: place + 2], text[place + 2 : place + 2 + step]
            expected = reference.logits(states[: place + 1], now, drafts)
            assert (logits[place] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert len(made) == 3
