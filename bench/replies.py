"""How long the leader waits for a reply of a draft on ranks of its own, without the models.

    python bench/replies.py [repeats=30] [device=cuda:0] [write=FILE.md]

Two processes with the run's own connection. The draft's rank has its proposal ready when the request comes:
what is timed is the request, the reply's way through both hosts, and what the leader makes of it. With a GPU
as the device of both, the copies from it and to it are timed, too. Of each size there are probabilities of
which none is 0 (a softmax), and such of which 50 a draft are not (top-k).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from surroundings import report  # noqa: E402
from torch import Tensor  # noqa: E402
from words import Words  # noqa: E402

from llama_ssp.config import Overlap, SamplingConfig  # noqa: E402
from llama_ssp.distributed.comm import ALONE, Ranks  # noqa: E402
from llama_ssp.distributed.draft_messages import DraftClient, DraftServer  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.drafters.ahead import AheadDrafter  # noqa: E402
from llama_ssp.speculative.drafters.local import Sampler  # noqa: E402
from llama_ssp.speculative.drafters.remote import RemoteDrafter  # noqa: E402
from llama_ssp.speculative.rng import CounterDraws  # noqa: E402
from llama_ssp.speculative.sampling import SamplingTransform  # noqa: E402
from llama_ssp.speculative.state import Prompt, Proposal, State  # noqa: E402
from tests.distributed.processes import on_ranks  # noqa: E402

PATIENCE_S = 600
SIZES = ((1, 2, 32_000), (1, 4, 128_256), (8, 4, 32_000), (64, 2, 32_000))  # rows, K, vocabulary
KEPT = 50
Size = tuple[int, int, int]


@dataclass
class Asked(Words):
    """The command line."""

    repeats: int = 30
    device: str = "cpu"
    write: str = ""


def measured(sizes: Sequence[Size], device: str, repeats: int) -> list[tuple[float, float]]:
    """Returns of each size the seconds of a reply in which none is 0, and in which few are not."""
    answers: list[list[tuple[float, float]] | Exception]
    answers = on_ranks(2, job, sizes, device, repeats, patience_s=PATIENCE_S)
    times = answers[0]
    if isinstance(times, Exception):
        raise times
    return times


def job(ranks: Ranks, sizes: Sequence[Size], device: str, repeats: int) -> list[tuple[float, ...]]:
    """Runs on both ranks; returns the times, on the leader."""
    link: Any = ranks.link(0, 1)
    end: Any = DraftClient(link=link, patience_s=60.0) if ranks.is_leader else DraftServer(link, ALONE)
    place = torch.device(device)
    return [
        tuple(timed(end, ranks, size, is_dense, place, repeats) for is_dense in (True, False))
        for size in sizes
    ]


def timed(end: Any, ranks: Ranks, size: Size, is_dense: bool, device: torch.device, repeats: int) -> float:
    """Seconds of a reply in the median; the first ones do not count. 0 on the draft's rank."""
    rows, k, vocab = size
    state = State([Prompt(str(row), (1,) * 500) for row in range(rows)], 600, device)
    count = (k,) * rows
    proposal = proposal_of(size, is_dense, device)
    remote = RemoteDrafter(end, 2048, vocab, torch.float32) if ranks.is_leader else None
    taken = []
    for _ in range(repeats + 3):
        ranks.barrier()
        if remote is None:
            end.broadcast_ints([])
            drafter(end, vocab)._reply(state, proposal)
            continue
        time.sleep(0.002)  # the other end waits by then
        began = time.perf_counter()
        end.broadcast_ints([*count])
        arrived = remote.propose(state, count)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
        assert arrived.draft_BKV is not None and proposal.draft_BKV is not None
        assert torch.equal(arrived.draft_BKV, proposal.draft_BKV)
    return median(taken[3:]) if taken else 0.0


def drafter(end: Any, vocab: int) -> AheadDrafter:
    """A drafter that only replies."""
    runner: Any = SimpleNamespace(forwards=0, model=None)
    sampler = Sampler(SamplingTransform(SamplingConfig(), (), vocab), CounterDraws(0))
    return AheadDrafter(runner, sampler, ALONE, end, Overlap.off)


def proposal_of(size: Size, is_dense: bool, device: torch.device) -> Proposal:
    """Returns the same on both ranks."""
    rows, k, vocab = size
    generator = torch.Generator().manual_seed(1)
    probs_BKV: Tensor = torch.rand(rows, k, vocab, generator=generator).softmax(-1)
    if not is_dense:
        least_BK1 = probs_BKV.topk(KEPT).values[..., -1:]
        probs_BKV = probs_BKV.where(probs_BKV >= least_BK1, 0)
    drafted_BK = torch.ones(rows, k, dtype=torch.int64, device=device)
    return Proposal(drafted_BK, probs_BKV.to(device), (k,) * rows)


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    lines = [["rows", "K", "vocabulary", "MiB", "none is 0, us", f"{KEPT} a draft are not, us"]]
    for size, times in zip(SIZES, measured(SIZES, asked.device, asked.repeats), strict=True):
        rows, k, vocab = size
        mib = rows * k * vocab * 4 / 2**20
        lines.append([str(rows), str(k), str(vocab), f"{mib:.2f}", *(f"{1e6 * each:.0f}" for each in times)])
    report(
        asked.write, "A reply of a draft on ranks of its own", {"both ranks": asked.device},
        f"The median of {asked.repeats} replies; a thread a process.",
        "", "```", *aligned(lines, 0), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
