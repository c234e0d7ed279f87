"""What the way of a draft apart costs a round: bytes, host time at both ends, how long the leader waits.

    python bench/wire.py [rows=1,8,32] [k=4] [vocab=128256] [top=64] [repeats=10] [base=COMMIT]
                         [write=FILE.md]

Two processes with the run's own connection, without the models, as in bench/replies.py. The draft's rank has
its proposal ready when the request comes; what is timed is the request, the reply's way through both hosts,
and what the leader makes of it. The laws are softmaxes of which the last 256 tokens are 0, as of a draft that
lacks the target's padding. `whole` sends them as they are, `top` from their likeliest tokens alone
(speculation.draft_top), and `early` the same before the request comes. CPU is the time of a core. `base` is
measured with whole laws, too: another commit, which may lack the setting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TREE = next((Path(word[5:]) for word in sys.argv if word.startswith("tree=") and word != "tree="), ROOT)
sys.path[:0] = [str(TREE), str(ROOT / "bench")]

import torch  # noqa: E402
from same_texts import worktree  # noqa: E402
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
PADDED = 256
TEXT = 500  # tokens
WHOLE, TOP, EARLY = "whole", "top", "early"
Figures = dict[str, float]


@dataclass
class Asked(Words):
    """The command line; `tree` is for the process that measures the base."""

    rows: str = "1,8,32"
    k: int = 4
    vocab: int = 128_256
    top: int = 64
    repeats: int = 10
    base: str = ""
    tree: str = ""
    write: str = ""


def measured(asked: Asked, kinds: list[str]) -> list[Figures]:
    """The figures of each number of rows and kind of law, in the median over rounds."""
    answers = on_ranks(2, job, asked, kinds, patience_s=PATIENCE_S)
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return [{**leaders, **drafts} for leaders, drafts in zip(answers[0], answers[1], strict=True)]


def job(ranks: Ranks, asked: Asked, kinds: list[str]) -> list[Figures]:
    """Runs on both ranks: the leader, and the draft's first."""
    link: Any = ranks.link(0, 1)
    end: Any = DraftClient(link=link, patience_s=60.0) if ranks.is_leader else DraftServer(link, ALONE)
    result = []
    for rows in map(int, asked.rows.split(",")):
        for kind in kinds:
            if ranks.is_leader:
                found = of_leader(ranks, end, asked, rows)
            else:
                found = of_draft(ranks, end, asked, rows, kind)
            result.append({"rows": float(rows), **found})
    return result


def of_leader(ranks: Ranks, end: Any, asked: Asked, rows: int) -> Figures:
    """Requests proposals and reads them."""
    state = state_of(rows)
    remote = RemoteDrafter(end, 2 * TEXT, asked.vocab, torch.float32)
    waits, works = list[float](), list[float]()
    for _ in range(asked.repeats + 3):
        ranks.barrier()
        time.sleep(0.01)  # the other end waits by then; what was sent before its request has come
        began, worked = time.perf_counter(), time.process_time()
        end.broadcast_ints([asked.k] * rows)
        proposal = remote.propose(state, (asked.k,) * rows)
        waits.append(time.perf_counter() - began)
        works.append(time.process_time() - worked)
        assert proposal.k == asked.k
        ranks.barrier()
    return {"wait_ms": 1000 * median(waits[3:]), "leader_ms": 1000 * median(works[3:])}


def of_draft(ranks: Ranks, end: Any, asked: Asked, rows: int, kind: str) -> Figures:
    """Replies to requests; counts the bytes of a reply."""
    state = state_of(rows)
    top = None if kind == WHOLE else asked.top
    transform = SamplingTransform(SamplingConfig(), (), asked.vocab)
    sampler = Sampler(transform, CounterDraws(0), **({} if top is None else {"top": top}))
    runner: Any = SimpleNamespace(forwards=0, model=None)
    drafter = AheadDrafter(runner, sampler, ALONE, end, Overlap.off)
    proposal = proposal_of(asked, rows, top)

    sent, send = [0], end.link.send

    def counted(head: bytes, payload: Tensor | None = None) -> None:
        sent[0] += len(head) + (0 if payload is None else payload.nbytes)
        send(head, payload)

    end.link.send = counted
    works = list[float]()
    for _ in range(asked.repeats + 3):
        sent[0] = 0
        before = time.process_time()
        if kind == EARLY:
            send_early(drafter, end, state, proposal)
        before = time.process_time() - before
        ranks.barrier()
        worked = time.process_time()
        end.broadcast_ints([])
        drafter._reply(state, proposal)
        works.append(before + time.process_time() - worked)
        ranks.barrier()
    end.link.send = send
    return {"draft_ms": 1000 * median(works[3:]), "bytes": float(sent[0])}


def send_early(drafter: Any, end: Any, state: State, proposal: Proposal) -> None:
    """As at the end of drafting ahead."""
    from llama_ssp.speculative.drafters.remote import tags

    values, payload = drafter._message(proposal, drafter.counts)
    end.send_early(tags(state, proposal.count), values, payload)


def state_of(rows: int) -> State:
    """Returns the same on both ranks."""
    return State([Prompt(str(row), (1,) * TEXT) for row in range(rows)], 2 * TEXT, torch.device("cpu"))


def proposal_of(asked: Asked, rows: int, top: int | None) -> Proposal:
    generator = torch.Generator().manual_seed(1)
    logit_BKV = 4 * torch.randn(rows, asked.k, asked.vocab, generator=generator)
    logit_BKV[..., -PADDED:] = -torch.inf
    probs_BKV = logit_BKV.softmax(-1)
    if top is not None:
        from llama_ssp.speculative.sampling import likeliest

        probs_BKV = likeliest(probs_BKV, top)
    return Proposal(torch.ones(rows, asked.k, dtype=torch.int64), probs_BKV, (asked.k,) * rows)


def of_base(asked: Asked) -> list[Figures]:
    """The figures of another commit, whole laws, by a process with its package."""
    with worktree(asked.base) as tree:
        settings = {**vars(asked), "base": "", "write": "", "tree": tree}
        words = [f"{key}={value}" for key, value in settings.items()]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, check=True, cwd=tree, env=env
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    torch.set_num_threads(1)
    if asked.tree:
        for figures in measured(asked, [WHOLE]):
            print(json.dumps(figures))
        return

    kinds = [WHOLE, TOP, EARLY]
    here = measured(asked, kinds)
    by_kind = {kind: here[number :: len(kinds)] for number, kind in enumerate(kinds)}
    if asked.base:
        by_kind = {f"base {asked.base[:8]}": of_base(asked), **by_kind}
    lines = [["rows", "laws", "KiB a round", "leader waits, ms", "leader CPU, ms", "draft CPU, ms"]]
    for number, rows in enumerate(asked.rows.split(",")):
        for kind, figures in by_kind.items():
            of_rows = figures[number]
            times = [f"{of_rows[name]:.2f}" for name in ("wait_ms", "leader_ms", "draft_ms")]
            lines.append([rows, kind, f"{of_rows['bytes'] / 1024:.1f}", *times])
    report(
        asked.write, "The way of a draft on ranks of its own", {"both ranks": "cpu, a thread each"},
        f"K = {asked.k}, {asked.vocab} tokens, top {asked.top}; the median of {asked.repeats} rounds.",
        "", "```", *aligned(lines, words=2), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
