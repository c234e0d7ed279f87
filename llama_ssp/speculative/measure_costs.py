"""Measures what rounds cost the pair, when a run begins: the adaptive draft length depends on it."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from llama_ssp.config import RunConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.speculative.draft_length import Acceptance, Costs, FixedDraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.state import Prompt

log = logging.getLogger(__name__)

MEASURED = (0, 1, 4, 16)  # K, and the largest; others lie on the lines between them
TURNS, MAX_TURNS = 4, 25  # of all K
ENOUGH_S = 1.5  # more than TURNS only until they have taken this together


def measured(engine: RankEngine, run: RunConf, rows: int, slots: int, ranks: Ranks = ALONE) -> Costs | None:
    """Returns the seconds of whole rounds, from the choice to the commit; None where texts are too short.

    Texts have at most `slots` tokens. Rounds of all K take turns, and the shortest counts: other
    programs make rounds longer, never shorter. All ranks call it; what counts are the leader's times.
    """
    half = slots // 2
    k_max = min(run.speculation.k_max, half - 1, engine.drafter.limit(half) if engine.drafter else 0)
    k_max = ranks.broadcast_ints([k_max])[0]
    if k_max < 1:
        return None
    ks = sorted({k_max, *(k for k in MEASURED if k < k_max)})
    lookahead, seconds = FixedDraftLength(0, rows), defaultdict[int, list[float]](list)
    rounds, began = timed_rounds(engine, lookahead, half), time.perf_counter()
    for turn in range(MAX_TURNS):
        if turn >= TURNS and (ranks.world > 1 or time.perf_counter() - began > ENOUGH_S):
            break
        lookahead.k = 1
        next(rounds)  # not counted: after a round without drafts the draft model reads more
        for k in reversed(ks):
            lookahead.k = k
            seconds[k].append(next(rounds))
    engine.flush()
    round_s = np.interp(range(k_max + 1), ks, [min(seconds[k]) for k in ks]).tolist()
    ratio = max(round_s[1] / round_s[0] - 1, 0.0)
    kept = f"another run of this seed may differ, unless speculation.cost_ratio={ratio:.2g} is given"
    log.info(
        "adaptive: a round takes %.2f ms without drafts, %.2f ms with one, %.2f ms with %d; K depends on "
        "such times: %s",
        *(1000 * round_s[k] for k in (0, 1, k_max)), k_max,
        "the job keeps them" if run.task.chooses_k else kept,
    )  # fmt: skip
    return Costs(round_s, Acceptance(), drafter=run.drafter_name)


def timed_rounds(engine: RankEngine, lookahead: FixedDraftLength, half: int) -> Iterator[float]:
    """Yields the seconds of rounds, each with the K that `lookahead` has then, on meaningless texts.

    These have about `half` tokens on average; where they are full, others begin.
    """
    prompts = [Prompt(str(row), (0,) * max(half // 2, 1)) for row in range(lookahead.rows)]
    while True:
        state = engine.prefill(prompts, half)
        steps = generate(engine, state, Limits(half), lookahead)
        while max(state.lengths) + lookahead.k < state.capacity:
            engine.synchronize()
            began = time.perf_counter()
            next(steps, None)
            engine.synchronize()
            yield time.perf_counter() - began
