"""Synthetic models that stand in for a document's own where these are not on this machine. No torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import gcd

from llama_ssp.config import ModelConf, PromptedConf, RunConf
from llama_ssp.config.documents import DOCUMENTS
from llama_ssp.config.schema import Dtype, Weights
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models.checkpoint import find
from llama_ssp.planner.weights import parameters

log = logging.getLogger(__name__)

MOST_PARAMETERS = 10**8  # of the largest: a few milliseconds a token on two cores
CONTEXT = 2048
STEP = 64  # of sizes
STAR = "*"  # ends the name of a model that stands in


def with_stand_ins(runs: list[RunConf]) -> list[RunConf]:
    """The runs of a document's table; with synthetic models, scaled, unless all their models are here.

    A table compares alike with alike, so one model that is missing replaces all. Names end in a star then.
    """
    missing = {model.name: problem for run in runs for model, problem in _missing(run)}
    if not missing:
        return runs
    problem = next(iter(missing.values()))
    largest = max(parameters(model) for run in runs for model in _models(run))
    factor = max(1.0, (largest / MOST_PARAMETERS) ** (1 / 3))
    log.warning(
        "not on this machine: %s (%s); names with a star are synthetic models of these shapes, %.1f times "
        "narrower and shallower, whose texts mean nothing; download=true fetches the models themselves",
        ", ".join(missing), problem, factor,
    )  # fmt: skip
    return [_replaced(run, factor) for run in runs]


def _models(run: RunConf) -> list[ModelConf]:
    return [run.model, *([run.draft] if run.draft else [])]


def _missing(run: RunConf) -> list[tuple[ModelConf, str]]:
    found = []
    for role, model in zip(("model", "draft"), _models(run), strict=False):
        try:
            if model.weights is Weights.checkpoint:
                find(model, role, run.download)
        except (ModelError, UsageError) as problem:
            found.append((model, str(problem).partition(";")[0]))
    return found


def _replaced(run: RunConf, factor: float) -> RunConf:
    vocab = _sized(run.model.vocab, factor)
    overlap = DOCUMENTS[run.document].overlap if run.document else 1.0
    model = scaled(run.model, factor, vocab, overlap)
    draft = run.draft and scaled(run.draft, factor, vocab, overlap)
    task = run.task
    if isinstance(task, PromptedConf):  # their tokens are bytes, which have no chat template
        task = replace(task, chat=False, system=None)
    return replace(run, model=model, draft=draft, task=task)


def scaled(model: ModelConf, factor: float, vocab: int, overlap: float) -> ModelConf:
    """A synthetic model of the shape, its layers, heads and MLP divided by `factor`."""
    heads = max(1, round(model.n_heads / factor))
    return replace(
        model, name=model.name + STAR, repo=None, revision=None, path=None, weights=Weights.synthetic,
        dtype=Dtype.auto if model.dtype is Dtype.packed else model.dtype, agreement=overlap, vocab=vocab,
        n_layers=2 * max(1, round(model.n_layers / factor / 2)), n_heads=heads,
        n_kv_heads=gcd(heads, max(1, round(model.n_kv_heads / factor))), dim=heads * model.head_dim,
        ffn=_sized(model.ffn, factor), context=min(model.context, CONTEXT), sliding_window=None,
    )  # fmt: skip


def _sized(size: int, factor: float) -> int:
    return STEP * max(1, round(size / factor / STEP))
