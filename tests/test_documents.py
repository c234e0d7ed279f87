"""Published write-ups: each has its command, its figures stand beside, and stand-ins are of one kind."""

from __future__ import annotations

import json

import pytest

from llama_ssp.config.compose import composed
from llama_ssp.config.documents import DOCUMENTS
from llama_ssp.config.presets import CONF
from llama_ssp.config.schema import Weights
from llama_ssp.planner.resolve import pair_specs
from llama_ssp.planner.stand_ins import MOST_PARAMETERS
from llama_ssp.planner.weights import parameters
from llama_ssp.report.document_tables import document_items
from llama_ssp.report.tables import Table
from tests.conftest import Command


@pytest.mark.parametrize("name", DOCUMENTS)
def test_models_that_are_missing_are_replaced_alike(name: str):
    assert (CONF / "experiment" / f"{name}.yaml").exists()
    runs = [spec.run for spec in pair_specs(composed([f"experiment={name}"]), [], 1)]
    models = [model for run in runs for model in (run.model, run.draft) if model]
    assert {model.weights for model in models} == {Weights.synthetic}
    assert len({model.vocab for model in models}) == 1 and all(model.name.endswith("*") for model in models)
    assert max(map(parameters, models)) < 1.6 * MOST_PARAMETERS
    assert not any(getattr(run.task, "chat", False) for run in runs)
    drafted = [run for run in runs if run.draft and run.draft.name != run.model.name]
    assert drafted and all(run.draft and parameters(run.model) > parameters(run.draft) for run in drafted)


def test_models_that_are_here_are_kept():
    words = ["experiment=clay2024", "model=demo", "draft=demo_draft"]
    (spec,) = pair_specs(composed(words), [], 1)
    assert (spec.run.model.name, spec.drafter) == ("demo", "demo_draft") and spec.target_path


def test_a_table_stands_beside_the_document_s(command: Command):
    words = ("experiment=llamassp2023", "task.pairs=[13B/7B]", "task.max_new_tokens=2", 'task.prompts=["a"]')
    answer = command(*words, "out=null")
    assert answer.code == 0 and "synthetic models" in answer.out
    found = json.loads(answer.out.splitlines()[-1])
    assert found["stand_ins"] == ["13B*", "7B*"] and [one["name"] for one in found["pairs"]] == ["13B*/7B*"]
    (table,) = (item for item in document_items(found) if isinstance(item, Table))
    rows = {row["name"]: row for row in table.rows}
    assert rows["13B/7B"]["ms_per_token_document"] == 114
    assert rows["13B/7B"]["speedup_here"] == found["pairs"][0]["pair"][0]["speedup"]
    assert rows["13B"]["ms_per_token_here"] == found["pairs"][0]["target_alone"]["ms_per_token"]
    assert rows["65B"]["ms_per_token_here"] is None and "13B/7B" in answer.out
