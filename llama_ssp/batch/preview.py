"""What a batch job would run with, from its input alone, before anything is loaded. No torch.

The rows are planned for the longest text, which is known by its bytes until a job has begun. K is measured
when the job begins. What a job under way keeps, it keeps.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_ssp.batch.index import Index
from llama_ssp.batch.job import folders_of
from llama_ssp.batch.journal import COSTS, ROWS, Journal
from llama_ssp.config import BatchConf, RunConf
from llama_ssp.placing.decision import Chosen
from llama_ssp.placing.draft_length import Why
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.placing.prediction import predict
from llama_ssp.placing.request import Known
from llama_ssp.text.prompts import reading

BYTES_PER_TOKEN = 4  # of usual text


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A job's pair with the rows and the K that are known, and the tokens of its longest text."""

    pair: PairSpec
    slots: int


def longest_text(run: RunConf, index: Index, held: int) -> int:
    """Returns the tokens of the job's longest text: those that it `held` on to, else by its bytes."""
    rows = index.rows
    by_bytes = int((rows["bytes"] // BYTES_PER_TOKEN + 1 + rows["new"]).max(initial=2))
    return min(held or by_bytes, run.model.context)


def preview(pair: PairSpec) -> Preview:
    """Returns how the pair would write its job. Raises UsageError or DataError where it could not begin."""
    run = pair.run
    work, _ = folders_of(run)
    index = Index.of_run(run, work)
    held = Journal.held(work)
    slots = longest_text(run, index, held.longest if held else 0)

    decision = pair.decision
    if decision.rows.value is None:
        kept = _kept(work / ROWS)
        prediction = predict(run, pair.placement, Known(rows=1, slots=slots))
        planned = None if prediction is None else prediction.rows_that_pay(max(1, len(index)))
        if kept is not None and (planned is None or int(kept) <= planned):
            rows = Chosen[int | None](value=int(kept), why=Why.kept)
        elif planned is not None:
            rows = Chosen[int | None](value=planned, why=Why.planned)
        else:
            rows = decision.rows
        decision = replace(decision, rows=rows)
    if kept_costs := _kept(work / COSTS):
        spec = replace(run.speculation, k=kept_costs["k"], adaptive=False)
        decision = replace(decision, drafts=Chosen(value=spec, why=Why.kept))
    elif held is not None:  # another K than the job's would have been refused
        decision = replace(decision, drafts=replace(decision.drafts, why=Why.kept))

    task = replace(run.task_as(BatchConf), batch_size=decision.rows.value)
    run = replace(run, task=task, speculation=decision.drafts.value)
    return Preview(pair=replace(pair, run=run, decision=decision), slots=slots)


def _kept(path: Path) -> Any:
    """Returns what the job keeps in this file; None before it is there."""
    if not path.exists():
        return None
    with reading("the journal", path):
        return json.loads(path.read_bytes())
