"""Heads that give all drafts in one pass: against a second reading of the formulas; costs, plan, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama_ssp.config import Dtype, PlacementConf
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import ModelError
from llama_ssp.models.checkpoint import complete
from llama_ssp.models.heads.model import DFlashModel
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.speed import RoundTimes
from llama_ssp.planner.weights import held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.speculative.draft_length import Costs
from llama_ssp.speculative.verification import RULES
from tests.families import VOCAB
from tests.heads import DFlashReference, loaded, save_dflash
from tests.rig import drive, drive_refilled, speculate
from tests.test_heads import DIM, PROMPTS, SOME, compared, config_of, engine_with, local, tables_of, target_of

TAPS = 1, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "raw": {"raw": True},
    "reduced vocabulary": {"ids": SOME},
    "tables of its own, a draft at the anchor": {"whole": True, "anchor": True, "width": 3},
    "a wider block, three layers": {"width": 7, "layers": 3},
}


def dflash(folder: Path, **how: Any) -> Path:
    return save_dflash(folder, **({"vocab": VOCAB, "dim": DIM, "taps": TAPS} | how))


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_declared_distributions_are_those_of_the_published_code(layout: str) -> None:
    """After rejections, of ragged rows, in every layout; the reference keeps nothing."""
    with TemporaryDirectory() as folder:
        assert compared(dflash(Path(folder), **LAYOUTS[layout]), DFlashReference, TAPS) > 15


@torch.inference_mode()
def test_the_second_reading_is_that_of_speculators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of two blocks of its training pass: where that library is installed."""
    core = pytest.importorskip("speculators.models.dflash.core", reason="speculators is not installed")
    folder = dflash(tmp_path, whole=True)
    content = json.loads((folder / "config.json").read_text())
    layer = {**content["transformer_layer_config"], "attn_implementation": "eager"}
    config = core.DFlashSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=VOCAB, block_size=4,
        aux_hidden_state_layer_ids=list(TAPS), mask_token_id=VOCAB - 1,
    )  # fmt: skip
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = core.DFlashDraftModel(config).float().eval()
    found = theirs.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not found.unexpected_keys
    anchors = torch.tensor([3, 6])
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(2, dtype=torch.bool)))
    text = [5, 9, 30, 31, 60, 7, 7, 12, 40, 41, 3, 8]
    states = torch.randn(len(text), len(TAPS) * DIM, generator=torch.Generator().manual_seed(2))
    ones, last = torch.ones(1, len(text)), torch.zeros(1, len(text), DIM)
    given = states[None], torch.tensor([text]), ones, last, torch.zeros(1, len(text), dtype=torch.int64)
    logits = theirs._backbone_forward(*given, max_anchors=2)[1][0].view(2, 4, VOCAB)
    reference = DFlashReference(folder)
    for block, anchor in enumerate(anchors.tolist()):
        for place in range(3):
            expected = reference.logits(states[:anchor], text[: anchor + 1], [0] * place)
            assert (logits[block, place + 1] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_rows_are_refilled(tmp_path: Path) -> None:
    """What a prompt gets is what it gets alone, whatever was in its row before."""
    folder = dflash(tmp_path, ids=SOME)

    def texts(prompts: list[Any], rows: int, longest: int) -> dict[str, list[int]]:
        how: dict[str, Any] = {"k": 3, "max_new": 20, "adaptive": True}
        return drive_refilled(engine_with(folder, taps=TAPS), prompts, rows, longest=longest, **how)

    together = texts(PROMPTS, 2, 40)
    assert together == {p.id: texts([p], 1, 0)[p.id] for p in PROMPTS}


@pytest.mark.parametrize("rule", RULES)
def test_greedy_texts_are_the_targets(rule: str, tmp_path: Path) -> None:
    """A round has one pass of the head, and at most as many drafts as its block has places."""
    engine, (_, model) = engine_with(dflash(tmp_path), rule, 0.0, TAPS), target_of()
    found = drive(engine, PROMPTS, k=8)
    assert found.texts == speculate(model, PROMPTS, None, k=0).texts
    assert 0 < found.drafted <= 3 * len(PROMPTS) * engine.drafter.forwards


def test_a_proposal_has_one_price() -> None:
    """Where a pass gives all drafts, more of them cost only what their verification costs."""
    for_each, at_once = (Costs.of_ratio(0.5, 8, at_once=at_once) for at_once in (False, True))
    assert for_each.round(4) == 3.0 and at_once.round(4) == 1.5 and at_once.round(0) == 1.0
    assert for_each.best(0.7, 0.7) == (1, 0) and at_once.best(0.7, 0.7) == (8, 0)
    times = RoundTimes(0.0, (1.0,) * 9, 1, once=0.5)
    assert times.best_k(0.7) == 8 and replace(times, draft=0.5, once=0.0).best_k(0.7) == 1
    assert times.round_s(0, 0.7) == 1.0 and times.round_s(3, 0.7) == 1.5


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"mask_token_id": None}, "no usable block"),
    "a mask that is no token": ({"mask_token_id": VOCAB}, "no usable block"),
    "a block of one": ({"block_size": 1}, "no usable block"),
    "other layers": ({"aux_hidden_state_layer_ids": [1]}, "fc does not fit"),
    "no layers": ({"aux_hidden_state_layer_ids": None}, "fc does not fit"),
    "windows": ({"transformer_layer_config": {"layer_types": ["sliding_attention"]}}, "another kind"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    change, words = WRONG[case]
    with pytest.raises(ModelError, match=words):
        complete(local(config_of(dflash(tmp_path), **change)), "draft")


def test_a_layer_behind_the_last_is_refused(tmp_path: Path) -> None:
    """What is there is normed in transformers, and is not in the decoder."""
    with pytest.raises(ModelError, match=r"cannot give; .*found 3"):
        loaded(dflash(tmp_path, taps=(1, 3)), 3, *tables_of(target_of()[0]))


@pytest.mark.parametrize("how", [{}, {"ids": SOME}, {"whole": True}])
def test_the_plan_knows_what_a_head_holds(how: dict[str, Any], tmp_path: Path) -> None:
    folder, (module, _) = dflash(tmp_path, **how), target_of()
    head, _ = complete(local(folder), "draft")
    assert (head.head_block, head.n_layers, head.tied) == (3, 2, "whole" not in how)
    made = loaded(folder, 3, *tables_of(module))
    assert isinstance(made, DFlashModel)
    target = replace(head, dim=DIM, n_layers=3, head_inputs=0, head_vocab=0, head_block=0, tied=False)
    roles = Role(TARGET, target, Dtype.fp32), Role(DRAFT, head, Dtype.fp32)
    own = rank_work(*roles, resolve(PlacementConf(), 1, True), Workload(2, 20, 10, 3, 100), 0).draft
    assert own is not None
    assert sum(held(own.part, Dtype.fp32).values()) == made.weights_bytes
