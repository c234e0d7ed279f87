"""Plans of presets, without Hydra, for the tests of the planner."""

from dataclasses import replace
from typing import Any

from bench.plan_known import preset
from bench.plan_known import preset_model as model
from llama_ssp.config import ClusterConf, Dtype, Steps, TimesConf
from llama_ssp.config.presets import CONF
from llama_ssp.distributed.placement import Placement
from llama_ssp.placing.engine import step_rule
from llama_ssp.placing.this_machine import machine_for
from llama_ssp.planner.hardware import Machine
from llama_ssp.planner.plan import Plan
from llama_ssp.planner.search import PlanRequest, placements
from llama_ssp.planner.table import drawing
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.report.tables import text_of

CODES = "code_bits", "code_group", "code_bytes", "code_mix"
FILES = "repo", "commit", "licence", "path", "package", "file", "sha256"
NO_SIZES = "name", "weights", "dtype", "seed", "agreement", "sampling", *FILES, *CODES


def shapes() -> list[str]:
    """Returns the presets of models, the first of each shape: long contexts and codes do not change one."""
    first: dict[str, str] = {}
    for name in sorted({file.stem for file in (CONF / "model").glob("*.yaml")} - {"local"}):
        sizes = {key: size for key, size in preset("model", name).items() if key not in NO_SIZES}
        sizes["context"] = min(sizes["context"], 2048)
        first.setdefault(str(sorted(sizes.items())), name)
    return [*first.values()]


def cluster(name: str, **changes: Any) -> ClusterConf:
    content = preset("cluster", name)
    times = TimesConf(**content.pop("times", {}))
    return replace(ClusterConf(**content, times=times), **changes)


def machine(name: str, **changes: Any) -> Machine:
    return machine_for(cluster(name, **changes))


P4D, H100, CPU = machine("p4d"), machine("dgx_h100"), machine("cpu", gib=64.0)


def request(
    target: str, draft: str | None, on: Machine, *, dtype: Dtype = Dtype.bf16, acceptance: float = 0.8,
    **work: int,
) -> PlanRequest:  # fmt: skip
    usual: dict[str, Any] = {"rows": 1, "prompt_tokens": 512, "new_tokens": 128, "k": 4}
    return PlanRequest(
        machine=on,
        target=Role(TARGET, model(target), dtype),
        draft=Role(DRAFT, model(draft), dtype) if draft else None,
        work=Workload(**{**usual, **work}),
        acceptance=acceptance,
        steps=step_rule(Steps.compiled, 0, on.is_cpu),
    )


def stepping(on: PlanRequest, engine: Steps, tokens: int = 0) -> PlanRequest:
    """The same with this engine, for a task that generates so many tokens."""
    return replace(on, steps=step_rule(engine, tokens, on.machine.is_cpu))


def alone(world: int) -> Placement:
    return next(placements(world, False))


def named(words: str, world: int) -> Placement:
    """The placement of a pair that a plan calls by these words."""
    return next(place for place in placements(world, True) if place.in_words() == words)


def drawn(plan: Plan) -> str:
    return "\n".join(text_of(drawing(plan)))
