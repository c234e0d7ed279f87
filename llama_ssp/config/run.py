"""The configuration of a whole run, its keys, and its plain form. No torch."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from llama_ssp.config.schema import (
    MAX_SEED,
    ClusterConf,
    Drafting,
    ModelConf,
    Output,
    PlacementConf,
    PlanningConf,
    SamplingConfig,
    SpeculationConfig,
    Steps,
    key,
    not_empty,
    number,
)
from llama_ssp.config.tasks import TASKS, TaskConf

SettingsT = TypeVar("SettingsT", bound=TaskConf)
SIZES = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "ffn", "vocab", "context")
RANKS = (
    "Processes that the command starts on this machine, one a GPU; null, or auto, is as many as the pair "
    "needs. Under torchrun its own number holds."
)


@dataclass(kw_only=True)
class RunConf:
    """The whole run."""

    model: ModelConf = key(ModelConf, "The target: a preset, a folder, a GGUF file, or ORG/NAME on the hub.")
    draft: ModelConf | None = key(None, "The draft, in the same way; none is no draft.")
    placement: PlacementConf = key(PlacementConf, "Which ranks and devices hold what.")
    cluster: ClusterConf = key(ClusterConf, "The machines, for plans and schedulers.")
    sampling: SamplingConfig = key(
        SamplingConfig, "The distribution to sample from; null is what the model recommends."
    )
    speculation: SpeculationConfig = key(SpeculationConfig, "How tokens are drafted and verified.")
    task: TaskConf = key(TaskConf, "What the run does.")
    plan: PlanningConf = key(PlanningConf, "The plan that the run is compared with.")
    engine: Steps = key(Steps.auto, "Whether steps are compiled; auto: on GPUs, and on a CPU where it pays.")
    download: bool = key(False, "Fetch models from the Hugging Face hub that are not on this machine.")
    ranks: int | None = number(None, 1, 1024, RANKS)
    seed: int | None = number(None, 0, MAX_SEED, "The seed of all random numbers; null draws one.")
    output: Output = key(Output.text, "Standard output: text, one json document, or jsonl: a line a text.")
    out: str | None = not_empty("The folder for run folders; null writes none.", "outputs")

    def task_as(self, kind: type[SettingsT]) -> SettingsT:
        """Returns the task's settings, which are of this kind. Raises TypeError for another task."""
        if not isinstance(self.task, kind):
            raise TypeError(f"task={self.task.name} is no {kind.__name__}")
        return self.task

    @property
    def has_draft_model(self) -> bool:
        """Returns whether a draft model takes part."""
        spec = self.speculation
        return self.draft is not None and spec.drafter is Drafting.model and spec.may_draft

    @property
    def drafts_from_text(self) -> bool:
        """Returns whether tokens are looked up in the text so far."""
        return self.speculation.drafter not in (Drafting.model, Drafting.none) and self.speculation.may_draft

    @property
    def most_drafts(self) -> int:
        """Returns the largest number of drafts of a round; 0 where nothing drafts."""
        return self.speculation.longest if self.has_draft_model or self.drafts_from_text else 0

    @property
    def drafter_name(self) -> str | None:
        """Returns the name of the draft model, or of what drafts from the text; None without drafts."""
        if self.drafts_from_text:
            return self.speculation.drafter.value
        return self.draft.name if self.draft and self.has_draft_model else None


@cache
def register() -> None:
    """Gives Hydra the schemas, under the names that `conf/` refers to."""
    from hydra.core.config_store import ConfigStore  # Hydra's import takes longer than --help

    store = ConfigStore.instance()
    store.store(name="schema", node=RunConf)
    for name, schema in TASKS.items():
        store.store(group="task", name=name, node=schema(name=name))


@cache
def key_types(schema: type = RunConf, prefix: str = "") -> dict[str, Any]:
    """Returns the type of every dotted key of the schema, of all tasks."""
    result = dict[str, Any]()
    hints = get_type_hints(schema)
    for entry in fields(schema):
        name = prefix + entry.name
        result[name] = hints[entry.name]
        for inner in TASKS.values() if name == "task" else kinds_of(result[name]):
            if is_dataclass(inner):
                result |= key_types(inner, f"{name}.")
    return result


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a type allows: those of a union, or itself."""
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def resolved(run: RunConf) -> dict[str, Any]:
    """Converts a run to plain data for hashes and records; resolves no "${...}"."""
    return asdict(run, dict_factory=lambda items: {k: str(v) if isinstance(v, Enum) else v for k, v in items})


def flat(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the values of a JSON document as JSON, each with its dotted key."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(node, ensure_ascii=False, default=str)


def home_expanded(name: str) -> Path:
    """Returns the path with a leading ~ expanded, except an unknown user's."""
    return Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
