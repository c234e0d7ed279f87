"""Measures what rounds cost the pair, when a run begins: the adaptive draft length depends on it."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import fmean, median, pstdev

from llama_ssp.config import RunConf
from llama_ssp.models.heads.model import DFlashModel, HeadModel
from llama_ssp.models.interface import Model
from llama_ssp.speculative.decision import draws_for
from llama_ssp.speculative.draft_length import JUMP, Costs, Experience, FixedDraftLength
from llama_ssp.speculative.drafters.block_head import head_drafter
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter
from llama_ssp.speculative.engine import DRAFT, Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import Shape
from llama_ssp.speculative.verification import rule_for

log = logging.getLogger(__name__)

TURNS, MOST_TURNS = 4, 25  # of all shapes: the least, and the most
ENOUGH_S = 1.5  # more than the least only until they have taken this together
SHORT_S = 0.1  # if all rounds are shorter, every K is measured


class Rounds:
    """A run's rounds on meaningless texts, each of a given shape. Where texts are full others begin."""

    def __init__(self, engine: Engine, rows: int, half: int) -> None:
        """Texts have about `half` tokens on average."""
        self._engine, self._half, self._lookahead = engine, half, FixedDraftLength(0, rows)
        self._prompts = [Prompt(str(row), (0,) * max(half // 2, 1)) for row in range(rows)]
        self._drafting_s = 0.0
        engine.part = self._part
        self._begin()

    def _begin(self) -> None:
        self.state = self._engine.prefill(self._prompts, self._half)
        self._steps = generate(self._engine, self.state, Limits(self._half), self._lookahead)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if name == DRAFT:
            self._engine.synchronize()
            self._drafting_s = time.perf_counter() - began

    def close(self) -> None:
        """The engine forgets this object: in a cycle with it, the KV caches would outlive the measurement."""
        self._engine.part = nullcontext

    def seconds(self, k: int, siblings: int) -> tuple[float, float]:
        """What one round takes, and its drafts."""
        if max(self.state.lengths) + k >= self.state.capacity:
            self._begin()
        self._lookahead.k, self._lookahead.each = k, siblings
        self._engine.synchronize()
        began = time.perf_counter()
        next(self._steps, None)
        self._engine.synchronize()
        return time.perf_counter() - began, self._drafting_s


def measured(target: Model, draft: Model | HeadModel, run: RunConf, rows: int, slots: int) -> Costs | None:
    """Seconds of whole rounds, from the choice to the commit; None where texts are too short to tell.

    Shapes take turns, and the mean of each counts. A target step over more drafts never costs less. The run's
    own rounds correct these times.
    On a CPU costs rise in steps, as kernels read weights again for every few rows: there each K is measured,
    if rounds are short.
    """
    half = min(slots, draft.context) // 2
    k_max = min(run.speculation.k_max, half - 1)
    if isinstance(draft, DFlashModel):
        k_max = min(k_max, draft.drafts)
    if k_max < 1:
        return None
    siblings = run.speculation.siblings
    rounds = Rounds(engine_of(target, draft, run, k_max * siblings), rows, half)
    tried = {0, 1, k_max, *(2**n for n in range(1, 7) if 2**n < k_max)}
    trees = [(k, s) for s in range(1, siblings + 1) for k in {max(k_max // (1 + s), 1), k_max}]
    taken: dict[Shape, list[tuple[float, float]]] = defaultdict(list)
    began = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= TURNS and time.perf_counter() - began > ENOUGH_S:
            break
        if turn and target.device.type == "cpu" and max(min(own)[0] for own in taken.values()) < SHORT_S:
            tried = set(range(k_max + 1))
        rounds.seconds(1, 0)  # not counted: behind a round without drafts the draft model lacks more
        for shape in [*trees, *((k, 0) for k in sorted(tried, reverse=True))]:
            taken[shape].append(rounds.seconds(*shape))
    rounds.close()
    at_once = isinstance(draft, DFlashModel)
    each_s = {shape: usual(spent for spent, _ in own) for shape, own in taken.items()}
    whole_s = {shape: fmean(own) for shape, own in each_s.items()}
    drafting_s = {k: fmean(usual(drafts for _, drafts in taken[k, 0])) for k in tried}
    first = 1 if at_once else 0  # from there on each draft costs the same
    draft_s = max(drafting_s[k_max] - drafting_s[first], 0.0) / max(k_max - first, 1)
    once_s = max(drafting_s[1] - drafting_s[0] - draft_s, 0.0) if at_once else 0.0
    drafts_s = {k: k * draft_s + (once_s if k else 0.0) for k in tried}
    verify_s = {k: max(whole_s[k, 0] - drafts_s[k], whole_s[0, 0]) for k in tried}
    costs = Costs.between(draft_s, rising(verify_s), run.speculation.k_max, once_s)
    costs = costs.with_trees({shape: whole_s[shape] for shape in trees}, siblings)
    apart = fmean(pstdev(own) / whole_s[shape] for shape, own in each_s.items())
    costs = replace(costs, experience=Experience(costs, apart, len(each_s[0, 0]), rows))
    log.info(
        "adaptive: a draft step takes %.2f ms, a target step %.2f ms, one over %d drafts %.2f ms; K depends "
        "on such times: another run of this seed may differ, unless speculation.cost_ratio=%.2g is given",
        1000 * (draft_s + once_s), 1000 * costs.verify[0], k_max, 1000 * costs.verify[k_max],
        (draft_s + once_s) / costs.verify[0],
    )  # fmt: skip
    return costs


def usual(seconds: Iterable[float]) -> list[float]:
    """The same, each at most `JUMP` times the median: a stall says nothing of a shape."""
    found = list(seconds)
    most = JUMP * median(found)
    return [min(each, most) for each in found]


def rising(found: dict[int, float]) -> dict[int, float]:
    """The nearest values that do not fall: neighbours that do get their mean."""
    pools: list[list[float]] = []
    for key in sorted(found):
        pools.append([found[key]])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return dict(zip(sorted(found), (fmean(pool) for pool in pools for _ in pool), strict=True))


def engine_of(target: Model, draft: Model | HeadModel, run: RunConf, siblings: int) -> Engine:
    """As the run's own, without its vocabularies and stop strings."""
    rule = rule_for(run.speculation.verification.value, siblings)
    transform, draws = SamplingTransform(run.sampling, (), target.vocab), draws_for(target, 0)
    runner = ModelRunner(target)
    if isinstance(draft, HeadModel):
        drafter: Drafter = head_drafter(draft, runner, transform, draws)
    else:
        drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    return Engine(runner, drafter, transform, rule, draws, siblings=siblings)
