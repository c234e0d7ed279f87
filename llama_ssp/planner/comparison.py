"""Predicted beside measured: what every run says of its plan at its end, and keeps. No torch.

A run has written texts in one way or several (regular, speculative, with this K or that); what each took
stands beside what its plan says of it, and beside the bill of every rank what that rank has held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_ssp.planner.constants import LIBRARIES
from llama_ssp.planner.fit import GpuBill
from llama_ssp.planner.memory import SEGMENTS
from llama_ssp.planner.room import GIB
from llama_ssp.planner.run_plan import Prediction
from llama_ssp.planner.weights import CACHE, HELD

# What is counted of a rank's memory, each more than the one before.
HELD_BYTES, TENSORS, RESERVED, DEVICE = COUNTED = (
    "held_bytes", "tensor_bytes", "reserved_bytes", "device_bytes",
)  # fmt: skip
WORDS = {
    HELD_BYTES: "weights and caches", TENSORS: "tensors", RESERVED: "reserved", DEVICE: "in all",
}  # fmt: skip
MIB = 2**20


@dataclass(frozen=True)
class RunMeasurement:
    """One way in which texts were written: how many rows and drafts a round, how fast, and what stood.

    `k` is None where it was chosen while running. `held_bytes` are weights and caches on this rank.
    `tokens_per_round` is given where the acceptance does not say it.
    """

    name: str
    prediction: Prediction | None
    rows: int
    k: int | None
    ms_per_token: float | None
    acceptance: float | None
    held_bytes: int = 0
    tokens_per_round: float | None = None

    def predicted(self, prediction: Prediction) -> tuple[int, float]:
        """K, and milliseconds a token at the acceptance that there was."""
        pace = prediction.pace(self.rows)
        acceptance = prediction.asked.acceptance if self.acceptance is None else self.acceptance
        k = pace.best_k(acceptance) if self.k is None else min(self.k, len(pace.verify) - 1)
        if self.tokens_per_round is not None:
            return k, 1000 * pace.round_s(k, acceptance) / self.tokens_per_round
        return k, pace.ms_per_token(acceptance, k)


@dataclass(frozen=True)
class Memory:
    """The most a rank has held, in bytes, by what is counted; None where nobody tells."""

    rank: int
    bytes: dict[str, int | None]


def beside(ways: Sequence[RunMeasurement], measured: Sequence[Memory]) -> dict[str, Any] | None:
    """The `plan` of a summary; None where the run was not planned."""
    predictions = list({id(way.prediction): way.prediction for way in ways if way.prediction}.values())
    if not predictions:
        return None
    fullest = max(predictions, key=lambda one: one.option.worst.total)
    return {
        "verdict": max((one.option.verdict for one in predictions), key=lambda verdict: verdict.rank).value,
        "placement": fullest.option.placement.in_words(),
        "band": max(one.asked.band for one in predictions),
        "ways": [_pace(way, way.prediction) for way in ways if way.prediction],
        "memory": [_memory(memory, predictions) for memory in measured],
    }


def in_words(plan: dict[str, Any]) -> Iterator[str]:
    """The same in few lines for people."""
    for way in plan["ways"]:
        if (found := way["ms_per_token"])["measured"]:
            yield f"plan against actual: {way['name']}, ms/token {_compared(found, 1)}"
    for memory in plan["memory"]:
        told = [name for name in COUNTED if memory[name]["measured"]]
        words = [f"{WORDS[name]} {_compared(memory[name], *_unit(memory[name]))}" for name in told]
        if words:
            yield f"plan against actual: rank {memory['rank']}, {'; '.join(words)}"


def _pace(way: RunMeasurement, prediction: Prediction) -> dict[str, Any]:
    k, ms = way.predicted(prediction)
    return {
        "name": way.name,
        "placement": prediction.option.placement.in_words(),
        "rows": way.rows,
        "k": k,
        "acceptance": way.acceptance,
        "ms_per_token": _both(ms, way.ms_per_token),
    }


def _memory(memory: Memory, predictions: list[Prediction]) -> dict[str, Any]:
    """Of several pairs, one after the other, the one that needs most there."""
    bills = [one.option.bills[memory.rank] for one in predictions]
    said = {name: max(counted(bill)[name] for bill in bills) for name in COUNTED}
    return {"rank": memory.rank, **{name: _both(said[name], memory.bytes[name]) for name in COUNTED}}


def counted(bill: GpuBill) -> dict[str, int]:
    """A bill's sums: weights and caches; all tensors; with what the allocator keeps; with libraries."""
    ours = [line for line in bill.lines if line.role != LIBRARIES]
    return {
        HELD_BYTES: sum(line.bytes for line in ours if line.name in HELD or line.name == CACHE),
        TENSORS: sum(line.bytes for line in ours if line.name != SEGMENTS),
        RESERVED: sum(line.bytes for line in ours),
        DEVICE: bill.total,
    }


def _both(said: float, found: float | None) -> dict[str, Any]:
    return {"predicted": said, "measured": found, "predicted_over_measured": said / found if found else None}


def _compared(both: dict[str, Any], unit: float, name: str = "") -> str:
    said, found, off = both["predicted"] / unit, both["measured"] / unit, both["predicted_over_measured"]
    return f"{said:.4g} predicted, {found:.4g}{name} measured ({off:.2f}x)"


def _unit(both: dict[str, Any]) -> tuple[int, str]:
    return (GIB, " GiB") if both["measured"] >= GIB else (MIB, " MiB")
