"""conf/experiment: each file is a run that is valid, whose pairs can be planned; weights are not replaced."""

from __future__ import annotations

import pytest

from llama_ssp.config.compose import composed
from llama_ssp.config.presets import CONF
from llama_ssp.errors import ModelError
from llama_ssp.planner.resolve import pair_specs
from llama_ssp.tasks.plan import plan

WRITE_UPS = {
    "amd2024": ("compare", "mi300x8"),
    "clay2024": ("measure", "a10"),
    "guha": ("agree", "a10"),
    "llamassp2023": ("measure", "p4d"),
    "llamassp2023_g5": ("measure", "g5_12xlarge"),
    "llamassp2023_score": ("eval", "p4d"),
}  # the task of each, and the cluster that docs/compare.md plans it on
OTHERS = {"chen2023": "generate"}


def test_each_experiment_is_a_valid_run():
    tasks = {name: task for name, (task, _) in WRITE_UPS.items()} | OTHERS
    assert {file.stem for file in (CONF / "experiment").glob("*.yaml")} == tasks.keys()
    for name, task in tasks.items():
        assert composed([f"experiment={name}"]).task.name == task


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WRITE_UPS)
def test_the_pairs_of_a_write_up_are_planned(name: str):
    run = composed([f"experiment={name}"])
    own = f"{run.model.name}/{run.draft.name if run.draft else 'none'}"
    for pair in run.task.pairs or [own]:
        target, _, draft = pair.partition("/")
        chosen = plan(target, draft or None, cluster=WRITE_UPS[name][1]).chosen
        assert chosen.verdict.value == "fits"


@pytest.mark.parametrize("name", WRITE_UPS)
def test_models_that_are_missing_are_named(name: str):
    with pytest.raises(ModelError, match=r"is not at hand; hub repository .*add download=true"):
        pair_specs(composed([f"experiment={name}"]), [], 1)
