"""What a machine is timed with: streamed weights, sums and messages over ranks, and rounds of small models.

The rounds go through the same engine as every task, so that what is measured is what is predicted. All are
taken in turn, repeatedly, because machines drift; a round's time is the median of its run's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch.nn import functional

from llama_ssp.config import Drafting, Dtype, ModelConf, RunConf, Steps, Verification, Weights
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import ModelError
from llama_ssp.models.devices import TORCH_DTYPES, describe, device_of
from llama_ssp.models.steps import SteppedModel
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.pair.batches import TimedRun
from llama_ssp.pair.session import PairSession
from llama_ssp.planner.engine import of_constants
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Counts

now = time.perf_counter  # the clock
PROMPT = tuple(range(4, 36))
# Of the matrices that are streamed. On a GPU one takes several times as long as its launch, or launches
# would be timed: 128 MiB of bf16 take 16 us at 8 TB/s, a launch about 5.
SIDE = {"cpu": 2048, "cuda": 8192}
RESIDUAL = 2048  # numbers of a token's residual, which ranks sum
STREAMED = {"cpu": 2**28, "cuda": 2**32}  # bytes: more than any cache holds
GEMM_ROWS = 512  # of a long prompt's chunk


@dataclass(frozen=True)
class Case:
    """A synthetic pair and its K; without a draft, regular sampling."""

    target: ModelConf
    draft: ModelConf | None = None
    k: int = 0


def shape(
    layers: int, dim: int, vocab: int, ffn: int | None = None, agreement: float = 0.8, head_dim: int = 64
) -> ModelConf:
    """A Llama of these sizes, from a seed."""
    heads = max(dim // head_dim, 1)
    return ModelConf(
        name=f"{layers}x{dim}, vocabulary {vocab}", weights=Weights.synthetic, family="llama",
        agreement=agreement, n_layers=layers, n_heads=heads, n_kv_heads=heads, head_dim=dim // heads,
        dim=dim, ffn=ffn or 11 * dim // 4, vocab=vocab, context=1024,
    )  # fmt: skip


def in_turn(works: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """The least of each work's figures, taken in turn, as disturbances only add; the first does not count."""
    taken = [[work() for work in works] for _ in range(repeats + 1)]
    return [min(figures) for figures in zip(*taken[1:], strict=True)]


def streaming_s(rows: int, weights: list[torch.Tensor]) -> float:
    """Seconds to multiply rows of tokens with every weight once; on a CPU, as many median multiplications."""
    x = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
    _wait(x.device)
    spent, began = [], now()
    with torch.inference_mode():
        for weight in weights:
            functional.linear(x, weight)
            if x.device.type == "cpu":
                spent.append(now() - began)
                began = now()
    _wait(x.device)
    return median(spent) * len(weights) if spent else now() - began


def streamed(device: torch.device, dtype: Dtype) -> list[torch.Tensor]:
    """Matrices that no cache holds all of."""
    kind, side = TORCH_DTYPES[dtype], SIDE[device.type]
    count = max(STREAMED[device.type] // (side * side * kind.itemsize), 2)
    return [torch.ones(side, side, dtype=kind, device=device) for _ in range(count)]


def sum_s(ranks: Ranks, device: torch.device, dtype: Dtype, calls: int = 50) -> float:
    """Seconds of one sum over the ranks, of a token's residual."""
    x = torch.zeros(RESIDUAL, dtype=TORCH_DTYPES[dtype], device=device)
    ranks.barrier()
    began = now()
    for _ in range(calls):
        ranks.all_reduce(x)
    _wait(device)
    return (now() - began) / calls


def message_s(ranks: Ranks, calls: int = 50) -> float:
    """Seconds of one broadcast to all ranks: the mean of several, one after the other."""
    ranks.barrier()
    began = now()
    for number in range(calls):
        ranks.broadcast_ints([number] * 8)
    ranks.barrier()
    return (now() - began) / calls


class Player:
    """Runs cases, by the steps that constants are of; models that were loaded stay loaded."""

    def __init__(self, run: RunConf, ranks: Ranks, new: int) -> None:
        self._device = device_of(run.placement.target_device, "placement.target_device")
        self._run = replace(run, engine=of_constants(self._device.type == "cpu"))
        self._ranks, self._new = ranks, new
        self._pairs: dict[str, PairSession] = {}

    def play(self, case: Case) -> tuple[list[float], Counts]:
        """One text by the token rule, the rule of the acceptance rate in plans: seconds of its rounds."""
        spec = replace(
            self._run.speculation, k=case.k, adaptive=False, verification=Verification.token,
            drafter=Drafting.model if case.draft else Drafting.none,
        )  # fmt: skip
        run = replace(self._run, model=case.target, draft=case.draft, speculation=spec)
        engine = self._pair(run).engine(0, run, frozenset())
        timed = TimedRun(engine, [Prompt("0", PROMPT)], self._new)
        spent = [seconds for _, seconds in timed.rounds(Limits(self._new), lookahead_for(run, 1))]
        return spent, timed.counts

    @property
    def held_bytes(self) -> int:
        """Weights and caches of the models that are loaded."""
        return sum(pair.models.held_bytes for pair in self._pairs.values())

    def round_s(self, case: Case) -> float:
        return median(self.play(case)[0])

    def _pair(self, run: RunConf) -> PairSession:
        key = f"{run.model} {run.draft}"
        if key not in self._pairs:
            placement = resolve(run.placement, self._ranks.world, run.has_draft_model)
            pair = PairSession(PairSpec(run, None, None, placement), self._ranks)
            self._pairs[key] = pair.load(1, len(PROMPT) + self._new)
            self._require_graphs(pair)
        return self._pairs[key]

    def _require_graphs(self, pair: PairSession) -> None:
        """Refuses a GPU on which steps have no graphs: their times would be taken for those of graphs."""
        models = [model for model in (pair.models.target, pair.models.draft) if model]
        graphed = all(isinstance(model, SteppedModel) and model.is_compiled for model in models)
        if self._run.engine is Steps.compiled and not graphed:
            what = "a GPU is calibrated with CUDA graphs, and steps run without them here"
            fix = "the warning above says why; plans of eager steps need no calibration"
            raise ModelError(what, describe(self._device), fix=fix)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
