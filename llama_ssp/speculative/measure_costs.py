"""Measures what rounds cost the pair, when a run begins: the adaptive draft length depends on it."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from llama_ssp.config import RunConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.speculative.draft_length import Acceptance, Costs, FixedDraftLength
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import RowStep

log = logging.getLogger(__name__)

MEASURED = (0, 1, 4, 16)  # K, and the largest; others lie on the lines between them
TURNS, MAX_TURNS = 4, 25  # of all K
ENOUGH_S = 1.5  # more than TURNS only until they have taken this together


def measured(
    engine: RankEngine,
    run: RunConf,
    rows: int,
    slots: int,
    ranks: Ranks = ALONE,
    prompts: Sequence[Prompt] = (),
) -> Costs | None:
    """Returns the seconds of whole rounds, from the choice to the commit; None where texts are too short.

    Texts have at most `slots` tokens. Rounds of all K take turns, and the shortest counts: other
    programs make rounds longer, never shorter. All ranks call it; what counts are the leader's times.
    With `prompts` of the run it also measures how likely drafts stand after them.
    """
    half = slots // 2
    k_max = min(run.speculation.k_max, half - 1, engine.drafter.limit(half) if engine.drafter else 0)
    k_max = ranks.broadcast_ints([k_max])[0]
    if k_max < 1:
        return None
    ks = sorted({k_max, *(k for k in MEASURED if k < k_max)})
    lookahead, seconds = FixedDraftLength(0, rows), defaultdict[int, list[float]](list)
    steps, began = list[RowStep](), time.perf_counter()
    rounds = timed_rounds(engine, lookahead, half, prompts, steps)
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
    usual = Acceptance()
    if prompts:
        usual.observe(steps)
    costs = Costs(round_s, usual, drafter=run.drafter_name, learns=True)
    took = f"{1e3 * round_s[0]:.2f} ms without drafts, {1e3 * round_s[1]:.2f} ms with one"
    took += f", {1e3 * round_s[k_max]:.2f} ms with {k_max}"
    if run.task.chooses_k:
        kept = f"the job keeps K = {costs.k_for_all}"
    else:
        kept = "K depends on such times: another run of this seed may differ, unless "
        kept += f"speculation.cost_ratio={ratio:.2g} is given"
    log.info("adaptive: a round takes %s; %s", took, kept)
    return costs


def timed_rounds(
    engine: RankEngine,
    lookahead: FixedDraftLength,
    half: int,
    prompts: Sequence[Prompt],
    taken: list[RowStep],
) -> Iterator[float]:
    """Yields the seconds of rounds, each with the K that `lookahead` has then; adds the rounds to `taken`.

    Texts continue the prompts, or are meaningless. They have about `half` tokens on average; where they are
    full, others begin.
    """
    begins = [prompt.token_ids[-half:] for prompt in prompts] or [(0,) * max(half // 2, 1)]
    texts = [Prompt(str(row), begins[row % len(begins)]) for row in range(lookahead.rows)]
    while True:
        state = engine.prefill(texts, half)
        steps = generate(engine, state, Limits(half), lookahead)
        while max(state.lengths) + lookahead.k < state.capacity:
            engine.synchronize()
            began = time.perf_counter()
            step = next(steps, None)
            engine.synchronize()
            yield time.perf_counter() - began
            taken += step.rows if step else []
