"""Heads that give all drafts in one pass, against a second reading of the formulas; what a proposal costs.

What they have in common with other heads is in test_heads.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from llama_ssp.planner.speed import RoundTimes
from llama_ssp.speculative.draft_length import Costs
from tests.families import VOCAB
from tests.heads import DFlashReference
from tests.test_heads import DIM, SOME, compared, dflash, theirs_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "raw": {"raw": True},
    "reduced vocabulary": {"ids": SOME},
    "tables of its own, a draft at the anchor": {"whole": True, "anchor": True, "width": 3},
    "a wider block, three layers": {"width": 7, "layers": 3},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_declared_distributions_are_those_of_the_published_code(layout: str) -> None:
    """After rejections, of ragged rows, in every layout; the reference keeps nothing."""
    with TemporaryDirectory() as folder:
        assert compared(dflash(Path(folder), **LAYOUTS[layout]), DFlashReference) > 15


@torch.inference_mode()
def test_the_second_reading_is_that_of_speculators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of two blocks of its training pass: where that library is installed."""
    core = pytest.importorskip("speculators.models.dflash.core", reason="speculators is not installed")
    folder = dflash(tmp_path, whole=True)
    keys = {"block_size": 4, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": VOCAB - 1}
    theirs = theirs_of(core.DFlashDraftModel, core.DFlashSpeculatorConfig, folder, **keys)
    anchors = torch.tensor([3, 6])
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(2, dtype=torch.bool)))
    text = [5, 9, 30, 31, 60, 7, 7, 12, 40, 41, 3, 8]
    states = torch.randn(len(text), 2 * DIM, generator=torch.Generator().manual_seed(2))
    ones, last = torch.ones(1, len(text)), torch.zeros(1, len(text), DIM)
    given = states[None], torch.tensor([text]), ones, last, torch.zeros(1, len(text), dtype=torch.int64)
    logits = theirs._backbone_forward(*given, max_anchors=2)[1][0].view(2, 4, VOCAB)
    reference = DFlashReference(folder)
    for block, anchor in enumerate(anchors.tolist()):
        for place in range(3):
            expected = reference.logits(states[:anchor], text[: anchor + 1], [0] * place)
            assert (logits[block, place + 1] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_proposal_has_one_price() -> None:
    """Where a pass gives all drafts, more of them cost only what their verification costs."""
    for_each, at_once = (Costs.of_ratio(0.5, 8, at_once=at_once) for at_once in (False, True))
    assert for_each.rounds[4] == 3.0 and at_once.rounds[4] == 1.5 and at_once.rounds[0] == 1.0
    assert for_each.best(0.7, 0.7) == 1 and at_once.best(0.7, 0.7) == 8
    times = RoundTimes(0.0, (1.0,) * 9, 1, once=0.5)
    assert times.best_k(0.7) == 8 and replace(times, draft=0.5, once=0.0).best_k(0.7) == 1
    assert times.round_s(0, 0.7) == 1.0 and times.round_s(3, 0.7) == 1.5
