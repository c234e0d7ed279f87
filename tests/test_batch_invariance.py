"""The same seed and prompt id give the same text, whatever batch the prompt runs in (fp32; up to ties)."""

from __future__ import annotations

from functools import cache

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


def write(
    family: str, drafter: str, rule: str, controls: str, adaptive: bool, batch: list[Prompt], seed: int = 5
) -> Run:
    draft = {"model": lambda: model(family, True), "ngram": lambda: "ngram", "none": lambda: None}[drafter]()
    return speculate(
        model(family, False), batch, draft, k=8 if adaptive else 4, rule=rule, max_new=NEW,
        ends=frozenset({END}), chunk=8, sampling=CONTROLS[controls], seed=seed, adaptive=adaptive,
    )  # fmt: skip


def check(family: str, drafter: str, rule: str, controls: str, adaptive: bool) -> None:
    everyone = prompts()
    alone = [write(family, drafter, rule, controls, adaptive, [prompt]) for prompt in everyone]
    texts = [run.texts[0] for run in alone]
    assert len({tuple(text) for text in texts}) == len(texts)
    if drafter == "model":
        assert 0 < sum(run.accepted for run in alone) < sum(run.drafted for run in alone)
    elif drafter == "ngram":
        assert sum(run.drafted for run in alone) > 0
    if adaptive:
        assert len({k for run in alone for k in run.longest}) > 1
    for places in BATCHES:
        run = write(family, drafter, rule, controls, adaptive, [everyone[i] for i in places])
        assert run.texts == [texts[i] for i in places]
        assert run.finish == [alone[i].finish[0] for i in places]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "drafter, rule, controls, adaptive",
    [
        ("model", "block", "penalised", True), ("model", "token", "filtered", False),
        ("ngram", "block", "plain", True), ("none", "token", "penalised", False),
    ],
)  # fmt: skip
def test_a_text_does_not_depend_on_its_batch(drafter: str, rule: str, controls: str, adaptive: bool) -> None:
    check("llama-gqa", drafter, rule, controls, adaptive)


# Of family, controls and drafter; rule and K, fixed or adaptive, follow. Any two choices of the five meet.
MEETINGS = [
    (0, 0, "model"), (0, 1, "model"), (0, 2, "ngram"), (1, 0, "ngram"), (1, 1, "ngram"), (1, 2, "model"),
    (2, 0, "model"), (2, 0, "ngram"), (2, 1, "ngram"), (2, 2, "model"),
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("family", "controls", "drafter"), MEETINGS)
def test_no_text_depends_on_its_batch(family: int, controls: int, drafter: str) -> None:
    rule = ("token", "block")[(family + controls + (drafter == "ngram")) % 2]
    adaptive = ((family + 2 * controls) % 3 == 0) != (drafter == "ngram")
    name = ("llama-gqa", "mistral-window", "gpt_neo")[family]
    check(name, drafter, rule, list(CONTROLS)[controls], adaptive)


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_id_and_seed_name_the_text(drafter: str) -> None:
    """The id alone, and the seed alone, make another text; both again make the same."""
    ids = prompts()[0].token_ids
    batch = [Prompt(name, ids) for name in ("a", "b", "c")]
    first = write("llama-gqa", drafter, "block", "plain", False, batch)
    again = write("llama-gqa", drafter, "block", "plain", False, batch[::-1])
    other = write("llama-gqa", drafter, "block", "plain", False, batch, seed=6)
    assert again.texts == first.texts[::-1]
    assert len({tuple(text) for text in first.texts + other.texts}) == 6
    twins = write("llama-gqa", drafter, "block", "plain", False, [batch[0], batch[0]])
    assert twins.texts == [first.texts[0]] * 2
