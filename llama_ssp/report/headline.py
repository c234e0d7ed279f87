"""The figures that a run is about, task by task: reports, differences and sweeps compare them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llama_ssp.report.statistics import Estimate
from llama_ssp.report.tables import GIB, Row
from llama_ssp.report.task_tables import REGULAR, SPECULATIVE

PACE = {"ms_per_token": "ms/token", "tokens_per_s": "tokens/s"}
QUESTIONS = {"speedup": "times as fast", "tokens_per_round": "tokens a round"}
RATES = {"acceptance_rate": "drafts accepted", "tokens_per_target_forward": "tokens a round"}


@dataclass(frozen=True)
class Figure:
    """A figure, with its interval where it has one. Of shares the difference is compared, else the ratio."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    is_share: bool = False

    @property
    def estimate(self) -> Estimate | None:
        """The figure with its interval; None without one."""
        if self.low is None or self.high is None:
            return None
        return Estimate(self.value, self.low, self.high)


def headline(summary: Row) -> list[Figure]:
    """The figures of a run, from its summary.json; none of a task that has none."""
    find = FIGURES.get(summary["task"])
    return list(find(summary)) if find is not None else []


def _figures(row: Row, names: dict[str, str], of: str = "") -> Iterator[Figure]:
    """Those of a row that are there, with their intervals."""
    for key, name in names.items():
        if isinstance(row.get(key), int | float):
            label = f"{of}, {name}" if of else name
            is_share = key.endswith(("_rate", "score"))
            yield Figure(label, row[key], row.get(f"{key}_low"), row.get(f"{key}_high"), is_share)


def _measured(found: Row) -> Iterator[Figure]:
    for one in found.get("pairs", [found]):
        of = f"{one['name']}, " if "pairs" in found else ""
        for row in one.get("pair", ()):
            k = "adaptive" if row["k"] is None else row["k"]
            yield from _figures(row, {"speedup": "times as fast", **PACE, **RATES}, f"{of}K = {k}")
            for part in row.get("by_category") or ():  # of a suite
                yield from _figures(part, QUESTIONS, f"{of}K = {k}, {part['category']}")
        for alone in ("target alone", "draft alone"):
            yield from _figures(one.get(alone.replace(" ", "_")) or {}, PACE, of + alone)


def _scored(found: Row) -> Iterator[Figure]:
    for row in found["rows"]:
        name = f"{row['pair']}, {row['mode']}, {row['prompts_per_seed']} a seed"
        yield from _figures(row, {"score": "score", "ms_per_token": "ms/token", **RATES}, name)


def _compared(found: Row) -> Iterator[Figure]:
    yield from _figures(found, {"speedup": "times as fast"})
    for one in found["comparisons"]:
        for side in (REGULAR, SPECULATIVE):
            yield from _figures(one[side], {"ms_per_token": "ms/token"}, f"prompt {one['id']}, {side}")


def _agreed(found: Row) -> Iterator[Figure]:
    yield from _figures(found, {"tokens_agreed_mean": "tokens agreed, mean", "agreement_rate": "agreement"})


def _generated(found: Row) -> Iterator[Figure]:
    yield from _figures(found, {**PACE, **RATES, "tokens_committed": "tokens"})


def _certified(found: Row) -> Iterator[Figure]:
    outcomes = [check["outcome"] for check in found["checks"]]
    for outcome in ("passed", "failed", "blind"):
        yield Figure(f"checks {outcome}", outcomes.count(outcome))


def _planned(found: Row) -> Iterator[Figure]:
    yield from _figures(found["best"], {"ms_per_token": "ms/token", "speedup": "times as fast", "k": "K"})
    yield Figure("fullest GPU, GiB", max(gpu["total_bytes"] for gpu in found["per_gpu"]) / GIB)


FIGURES: dict[str, Callable[[dict[str, Any]], Iterator[Figure]]] = {
    "generate": _generated, "batch": _generated, "compare": _compared, "measure": _measured, "eval": _scored,
    "agree": _agreed, "certify": _certified, "plan": _planned,
}  # fmt: skip
