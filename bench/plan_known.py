"""What is planned for rows of plan_rows.py that were measured before, and what was measured. No torch."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench.plan_rows import EngineRow, GpuRow, PublishedRow
from llama_ssp.config import ClusterConf, DraftSeat, Dtype, ModelConf, PlacementConf, Steps, TimesConf
from llama_ssp.config.presets import CONF
from llama_ssp.distributed.placement import resolve
from llama_ssp.placing.engine import step_rule
from llama_ssp.placing.this_machine import machine_for
from llama_ssp.planner.hardware import Machine
from llama_ssp.planner.search import PlanRequest, cost_of, round_times, step_s
from llama_ssp.planner.speed import forward_s, pass_cost
from llama_ssp.planner.weights import ModelPart
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload

RESULTS = Path(__file__).with_name("results")
RUNS = {"first": "gpu_h200_202611.json", "second": "gpu_h200_second_202611.json"}
VOCABULARY = 32000  # of every model of bench/gpu.py
PROMPT = 18  # tokens of its texts, on average, and how many it writes
NEW = 64


def planned_ms(row: PublishedRow | GpuRow | EngineRow) -> float:
    """Returns the milliseconds of a token, a step or a round by the plan."""
    if isinstance(row, PublishedRow):
        return 1000 / published_rate(row.model, row.gpus)
    if isinstance(row, EngineRow):
        return _token_ms(row)
    return _round_ms(row) if row.k is not None else _step_ms(row)


def measured_ms(row: PublishedRow | GpuRow | EngineRow) -> float:
    """Returns what was published, or what the results file has."""
    if isinstance(row, PublishedRow | EngineRow):
        return 1000 / row.tokens_per_s
    figure = _figures(row.run)[row.part, row.figure]
    if row.k is not None:
        return float(re.findall(r"a round: ([\d.]+) ms", figure["note"])[0])
    if row.figure.endswith("share of the bandwidth"):
        return float(figure["note"].removesuffix(" ms"))
    return float(figure["found"])


def published_rate(model: str, gpus: int, cluster: str = "p4de") -> float:
    """Returns tokens a second by the plan, in the form of the engine that was published.

    gpt-fast holds embedding and output matrix whole on each GPU, so it has two sums less a step.
    """
    cost = pass_cost(Role(TARGET, preset_model(model), Dtype.bf16), gpus)
    part = ModelPart.of(preset_model(model), gpus)
    elsewhere = (part.whole_vocab - part.vocab) * part.dim
    plain = replace(
        cost.plain, bytes=cost.plain.bytes + 2 * elsewhere, numbers=cost.plain.numbers + elsewhere
    )
    cost = replace(cost, plain=plain, sums=2 * part.layers if gpus > 1 else 0)
    return 1 / forward_s(cost, preset_machine(cluster).times, 1, 1, 5)


def _token_ms(row: EngineRow) -> float:
    """Returns the milliseconds of a token of this engine, without drafts, after a prompt of 512 tokens."""
    request = PlanRequest(
        machine=replace(preset_machine(row.machine), gpus=row.gpus),
        target=Role(TARGET, preset_model(row.model), Dtype(row.dtype)),
        draft=None,
        work=Workload(rows=1, prompt_tokens=512, new_tokens=128, k=0),
        acceptance=1.0,
        steps=step_rule(Steps.compiled, 0, on_cpu=False),
    )
    place = resolve(PlacementConf(), row.gpus, drafts=False)
    return 1000 * round_times(request, place).round_s(0, 1.0)


def _step_ms(row: GpuRow) -> float:
    request = _request(row, Workload(rows=1, prompt_tokens=row.slots, new_tokens=0, k=0))
    alone = resolve(PlacementConf(), 1, drafts=False)
    cost = cost_of(request, request.target, alone)
    return 1000 * step_s(request, request.target, alone, cost, row.tokens)


def _round_ms(row: GpuRow) -> float:
    request = _request(row, Workload(rows=1, prompt_tokens=PROMPT, new_tokens=NEW, k=row.k or 0))
    place = resolve(PlacementConf(draft=DraftSeat.leader), 1, drafts=True)
    return 1000 * round_times(request, place).round_s(row.k or 0, 1.0)


def _request(row: GpuRow, work: Workload) -> PlanRequest:
    draft = None
    if row.draft is not None:
        draft = Role(DRAFT, preset_model(row.draft, vocab=VOCABULARY), Dtype.bf16)
    return PlanRequest(
        machine=replace(preset_machine("h200x8"), gpus=1),
        target=Role(TARGET, preset_model(row.model, vocab=VOCABULARY), Dtype(row.dtype)),
        draft=draft,
        work=work,
        acceptance=1.0,
        steps=step_rule(Steps(row.engine), 0, on_cpu=False),
    )


@cache
def _figures(run: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns a run's figures by the names of their parts and their own."""
    content = json.loads((RESULTS / RUNS[run]).read_text(encoding="utf-8"))
    parts = content if isinstance(content, list) else []
    by_part = {one["part"]: one["bars"] for one in parts} or content["parts"]
    return {(part, bar["what"]): bar for part, bars in by_part.items() for bar in bars}


def preset_model(name: str, **changes: Any) -> ModelConf:
    content = preset("model", name)
    return replace(ModelConf(**{**content, "dtype": Dtype(content.get("dtype", "auto"))}), **changes)


@cache
def preset_machine(name: str) -> Machine:
    content = preset("cluster", name)
    times = TimesConf(**content.pop("times", {}))
    return machine_for(ClusterConf(**content, times=times))


def preset(group: str, name: str) -> dict[str, Any]:
    """Returns a yaml of conf/, with those that it builds on."""
    content = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
    bases = [preset(group, one) for one in content.pop("defaults", []) if isinstance(one, str)]
    return {key: value for part in (*bases, content) for key, value in part.items()}
