"""Measures what rounds cost the pair, when a run begins: the adaptive draft length depends on it."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from typing import Any

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
TURNS = 4  # of all K, at least
MAX_TURNS = 25
ENOUGH_S = 1.5  # more than TURNS only until they have taken this
LONG_S = 6.0  # in place of ENOUGH_S where few rows have prompts
ROW_TURNS = 24  # of all rows together, with prompts: a K that is kept should not hang on one text
NEW = 32  # tokens of a text that continues a prompt: later on some texts only repeat themselves
LEAST_GAIN = 1.15  # texts end within drafts, and costs are measured with noise
Played = tuple[int, int, list[RowStep]]  # a round: how many batches of texts were before, its K, and its rows


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
    programs make rounds longer, never shorter, and so do more drafts. All ranks call it; what counts are the
    leader's times. With `prompts` of the run it also measures how likely drafts stand after them.
    """
    half = slots // 2
    k_max = min(run.speculation.longest, half - 1, engine.drafter.limit(half) if engine.drafter else 0)
    k_max = ranks.broadcast_ints([k_max])[0]
    if k_max < 1:
        return None

    ks = measured_ks(k_max)
    lookahead = FixedDraftLength(0, rows)
    seconds = defaultdict[int, list[float]](list)  # of rounds, by K
    played: list[Played] = []
    began = time.perf_counter()
    rounds = timed_rounds(engine, lookahead, half, prompts, played)
    min_turns = max(TURNS, ROW_TURNS // rows) if prompts else TURNS

    for turn in range(MAX_TURNS):
        is_long = time.perf_counter() - began > (ENOUGH_S if turn >= min_turns else LONG_S)
        # Over ranks the number of turns is fixed: clocks differ, and all ranks must stop together.
        if turn >= TURNS and (is_long if ranks.world == 1 else turn >= min_turns):
            break
        lookahead.k = 1
        next(rounds)  # not counted: after a round without drafts the draft model reads more
        for k in reversed(ks):
            lookahead.k = k
            taken = next(rounds)
            _, _, steps = played[-1]
            drafted = max((step.k for step in steps), default=k)  # a text may give fewer
            seconds[drafted].append(taken)
    engine.flush()

    known = sorted(seconds)
    least_s = [min(min(seconds[more]) for more in known if more >= k) for k in known]
    round_s = np.interp(range(k_max + 1), known, least_s).tolist()
    ratio = max(round_s[1] / round_s[0] - 1, 0.0)
    usual = Acceptance()
    if prompts:
        usual.observe([step for *_, steps in played for step in steps])
    costs = Costs(
        rounds=round_s,
        usual=usual,
        drafter=run.drafter_name,
        learns=True,
        k_for_all=best_k(round_s, played),
    )

    took = f"{1e3 * round_s[0]:.2f} ms without drafts, {1e3 * round_s[1]:.2f} ms with one"
    took += f", {1e3 * round_s[k_max]:.2f} ms with {k_max}"
    if run.task.chooses_k:
        kept = f"the job keeps K = {costs.k_for_all}"
    else:
        kept = "K depends on such times: another run of this seed may differ, unless "
        kept += f"speculation.cost_ratio={ratio:.2g} is given"
    log.info("adaptive: a round takes %s; %s", took, kept)
    return costs


def measured_ks(k_max: int) -> list[int]:
    """Returns the K whose rounds are measured, the largest last."""
    return sorted({k_max, *(k for k in MEASURED if k < k_max)})


def best_k(round_s: Sequence[float], played: Sequence[Played]) -> int:
    """Returns the K for all rows in every round that would have written these texts in the least time.

    A text of n tokens takes n / t rounds, if a round commits t on average: so it is 1 / t that is averaged
    over texts. K is 0 unless drafts make it LEAST_GAIN times as fast.
    """

    def token_s(k: int) -> float:
        """Returns the mean seconds of a token with k drafts a round, from rounds of k or more."""
        sums = defaultdict[tuple[int, int], Any](lambda: np.zeros(2))  # by text: seconds, tokens
        for batch, round_k, steps in played:
            if round_k < k or not steps:
                continue
            spent = round_s[min(k, max(step.k for step in steps))]  # as long as its longest draft
            for step in steps:
                stand = sum(stands for _, stands in step.standing[:k])
                sums[batch, step.row] += spent, 1 + stand

        if not sums:
            return round_s[k]
        return float(np.mean([spent / tokens for spent, tokens in sums.values()]))

    token_s_of = [token_s(k) for k in range(len(round_s))]
    k = int(np.argmin(token_s_of))
    return k if token_s_of[0] >= LEAST_GAIN * token_s_of[k] else 0


def timed_rounds(
    engine: RankEngine,
    lookahead: FixedDraftLength,
    half: int,
    prompts: Sequence[Prompt],
    played: list[Played],
) -> Iterator[float]:
    """Yields the seconds of rounds, each with the K that `lookahead` has then; adds the rounds to `played`.

    Texts continue the prompts by about NEW tokens, more of many rows, whose prompts take long to read; then
    others begin. Without prompts they are meaningless, and are written until they are full.
    """
    begins = cycle([prompt.token_ids[-half:] for prompt in prompts] or [(0,) * max(half // 2, 1)])
    for batch in count():
        state = engine.prefill([Prompt(str(row), next(begins)) for row in range(lookahead.rows)], half)
        steps = generate(engine, state, Limits(half), lookahead)
        enough = state.capacity
        if prompts:
            enough = max(state.lengths) + NEW * max(1, lookahead.rows // 8)

        while True:
            length = max(state.lengths)
            if length >= enough or length + lookahead.k >= state.capacity:
                break
            engine.synchronize()
            began = time.perf_counter()
            step = next(steps, None)
            engine.synchronize()
            taken = time.perf_counter() - began
            played.append((batch, lookahead.k, step.rows if step else []))
            yield taken
