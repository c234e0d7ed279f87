"""The same seed and prompt id give the same text, whatever batch the prompt runs in (fp32; up to ties)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from llama_ssp.config import SamplingConfig
from llama_ssp.models.interface import Model
from llama_ssp.speculative.state import Prompt
from tests.families import VOCAB, build, runnable
from tests.rig import Run, perturbed, speculate

NEW = 24
END = 7
CONTROLS = {
    "plain": SamplingConfig(),
    "filtered": SamplingConfig(top_k=40, top_p=0.95, min_p=0.01),
    "penalised": SamplingConfig(
        temperature=0.9, top_p=0.98, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2,
        logit_bias={9: 2.0}, bad_tokens=[11], min_new_tokens=4,
    ),
}  # fmt: skip
# Each prompt stands alone and beside others, in other places, in batches of 3 and 8.
BATCHES = ((0, 1, 2), (4, 0, 7), (2, 6, 5), (6, 3, 7, 1, 0, 5, 2, 4))


@cache
def model(family: str, drafts: bool) -> Model:
    module = build(family)
    return runnable(perturbed(module, 0.02) if drafts else module, family)


def prompts() -> list[Prompt]:
    """Ragged, and repetitive enough for lookup to find something."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for number, length in enumerate((4, 19, 9, 1, 26, 12, 7, 15)):
        ids = torch.randint(12, VOCAB, (length,), generator=generator).tolist()
        made.append(Prompt(f"p{number}", tuple(ids + ids[: length // 2])))
    return made


def write(family: str, drafter: str, batch: list[Prompt], **how: Any) -> Run:
    draft = {"model": lambda: model(family, True), "ngram": lambda: "ngram", "none": lambda: None}[drafter]()
    k = 8 if how.get("adaptive") else 4
    return speculate(
        model(family, False), batch, draft, k=k, max_new=NEW, ends=frozenset({END}), chunk=8,
        **{"sampling": CONTROLS["plain"], "seed": 5, **how},
    )  # fmt: skip


# Of family, drafter, rule, controls, and K, fixed or adaptive: any two choices meet.
MEETINGS = [
    "llama-gqa model block penalised adaptive", "llama-gqa model token filtered fixed",
    "llama-gqa ngram block plain adaptive", "llama-gqa none token penalised fixed",
    "mistral-window model block penalised fixed", "mistral-window ngram token plain adaptive",
    "mistral-window ngram block filtered fixed", "gpt_neo model token plain fixed",
    "gpt_neo ngram block penalised adaptive", "gpt_neo model token filtered adaptive",
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("meeting", MEETINGS)
def test_no_text_depends_on_its_batch(meeting: str) -> None:
    family, drafter, rule, controls, drafts = meeting.split()
    adaptive = drafts == "adaptive"
    everyone, how = prompts(), {"rule": rule, "sampling": CONTROLS[controls], "adaptive": adaptive}
    alone = [write(family, drafter, [prompt], **how) for prompt in everyone]
    texts = [run.texts[0] for run in alone]
    assert len({tuple(text) for text in texts}) == len(texts)
    if drafter == "model":
        assert 0 < sum(run.accepted for run in alone) < sum(run.drafted for run in alone)
    elif drafter == "ngram":
        assert sum(run.drafted for run in alone) > 0
    assert not adaptive or len({k for run in alone for k in run.longest}) > 1
    for places in BATCHES:
        run = write(family, drafter, [everyone[i] for i in places], **how)
        assert run.texts == [texts[i] for i in places]
        assert run.finish == [alone[i].finish[0] for i in places]


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_id_and_seed_name_the_text(drafter: str) -> None:
    """The id alone, and the seed alone, make another text; both again make the same."""
    ids = prompts()[0].token_ids
    batch = [Prompt(name, ids) for name in ("a", "b", "c")]
    first, again = write("llama-gqa", drafter, batch), write("llama-gqa", drafter, batch[::-1])
    other = write("llama-gqa", drafter, batch, seed=6)
    assert again.texts == first.texts[::-1]
    assert len({tuple(text) for text in first.texts + other.texts}) == 6
    assert write("llama-gqa", drafter, [batch[0], batch[0]]).texts == [first.texts[0]] * 2
