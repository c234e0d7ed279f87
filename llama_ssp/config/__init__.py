"""The typed configuration: one dataclass per Hydra group.

Yaml and the command line are merged by Hydra into these schemas, then converted and checked once
(checks). Nothing past that door sees a DictConfig. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf.basecontainer import BaseContainer

from llama_ssp.config.schema import (
    MAX_SEED,
    USUAL_COST_RATIO,
    Bridging,
    ClusterConf,
    Drafting,
    DraftSeat,
    Dtype,
    ModelConf,
    OnBadRow,
    OnDraftLoss,
    Output,
    Overlap,
    PlacementConf,
    PlanningConf,
    SamplingConfig,
    Scheduler,
    SlurmConf,
    SpeculationConfig,
    Splitting,
    Steps,
    TimesConf,
    Verification,
    Weights,
    number,
)
from llama_ssp.config.tasks import (
    TASKS,
    AgreeConf,
    BatchConf,
    CalibrateConf,
    CertifyConf,
    CompareConf,
    EvalConf,
    GenerateConf,
    MeasureConf,
    PlanConf,
    PromptedConf,
    TaskConf,
)

__all__ = [
    "LOSSY",
    "RESOLVERS",
    "SIZES",
    "TASKS",
    "USUAL_COST_RATIO",
    "AgreeConf",
    "BatchConf",
    "Bridging",
    "CalibrateConf",
    "CertifyConf",
    "ClusterConf",
    "CompareConf",
    "DraftSeat",
    "Drafting",
    "Dtype",
    "EvalConf",
    "GenerateConf",
    "MeasureConf",
    "ModelConf",
    "OnBadRow",
    "OnDraftLoss",
    "Output",
    "Overlap",
    "PlacementConf",
    "PlanConf",
    "PlanningConf",
    "PromptedConf",
    "RunConf",
    "SamplingConfig",
    "Scheduler",
    "SlurmConf",
    "SpeculationConfig",
    "Splitting",
    "Steps",
    "TaskConf",
    "TimesConf",
    "Verification",
    "Weights",
    "few_resolvers",
    "home_expanded",
    "known_keys",
    "register",
    "resolved",
]


@dataclass
class RunConf:
    """The whole run."""

    model: ModelConf = field(default_factory=ModelConf)
    draft: ModelConf | None = None
    placement: PlacementConf = field(default_factory=PlacementConf)
    cluster: ClusterConf = field(default_factory=ClusterConf)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    task: TaskConf = field(default_factory=TaskConf)
    plan: PlanningConf = field(default_factory=PlanningConf)
    engine: Steps = Steps.auto
    seed: int | None = number(None, 0, MAX_SEED, "choose another seed, or leave it out to draw one")
    output: Output = Output.text
    out: str | None = "outputs"

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model takes part."""
        spec = self.speculation
        return self.draft is not None and spec.drafter is Drafting.model and spec.may_draft

    @property
    def drafts_from_text(self) -> bool:
        """Whether tokens are drafted by n-gram lookup."""
        return self.speculation.drafter is Drafting.ngram and self.speculation.may_draft


SIZES = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "ffn", "vocab", "context")

# The resolvers that a configuration may use, beside plain references to its own keys. The others reach what
# is none of a configuration's business: the environment with its secrets, and nodes made at will.
RESOLVERS = ("oc.select", "now")

LOSSY = {
    "lenience": "lenience accepts more than the exact rule",
    "lenient": "lenience accepts more than the exact rule",
    "typical_acceptance": "typical acceptance changes the law",
    "typical": "typical acceptance changes the law",
    "posterior_threshold": "typical acceptance changes the law",
    "accept_threshold": "an acceptance threshold changes the law",
    "ensemble_weight": "an ensemble of the two laws is not the target's law",
    "assistant_ensemble_weight": "an ensemble of the two laws is not the target's law",
}


def register() -> None:
    """Tells Hydra the schemas; `conf/` refers to them by these names."""
    store = ConfigStore.instance()
    store.store(name="schema", node=RunConf)
    for name, schema in TASKS.items():
        store.store(group="task", name=f"{name}_schema", node=schema)


def known_keys(schema: type = RunConf, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, every task's included: what an override may name."""
    keys: list[str] = []
    for entry in fields(schema):
        key = prefix + entry.name
        keys.append(key)
        nested = _nested(schema, entry.name)
        for inner in nested:
            keys += known_keys(inner, key + ".")
    return list(dict.fromkeys(keys))


def _nested(schema: type, name: str) -> list[type]:
    if schema is RunConf and name == "task":
        return list(TASKS.values())
    if schema is RunConf and name in ("model", "draft"):
        return [ModelConf]
    factory = next(f for f in fields(schema) if f.name == name).default_factory
    return [factory] if isinstance(factory, type) and is_dataclass(factory) else []


def resolved(run: RunConf) -> dict[str, Any]:
    """The run as plain data, for hashes and records. A text is kept as it is, "${...}" in it too."""
    return {entry.name: _plain(getattr(run, entry.name)) for entry in fields(run)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


@contextmanager
def few_resolvers() -> Iterator[None]:
    """Meanwhile an interpolation can use none but `RESOLVERS`; any other raises, whatever it stands in."""
    every = dict(BaseContainer._resolvers)
    for name in every.keys() - {*RESOLVERS}:
        del BaseContainer._resolvers[name]
    try:
        yield
    finally:
        BaseContainer._resolvers.update(every)


def home_expanded(name: str) -> Path:
    """The path, with a leading ~ for the home folder; an unknown user's stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)
