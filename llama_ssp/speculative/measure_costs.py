"""Measures what rounds cost the pair, when a run begins: the adaptive draft length depends on it."""

from __future__ import annotations

import logging
import time
from collections import defaultdict

from llama_ssp.config import RunConf
from llama_ssp.models.heads.model import DFlashModel, HeadModel
from llama_ssp.models.interface import Model
from llama_ssp.speculative.decision import draws_for
from llama_ssp.speculative.draft_length import Costs
from llama_ssp.speculative.drafters.block_head import head_drafter
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import rule_for

log = logging.getLogger(__name__)

TURNS = 4
SHORT_S = 0.1  # if all rounds are shorter, every K is measured


def measured(target: Model, draft: Model | HeadModel, run: RunConf, rows: int, slots: int) -> Costs | None:
    """Seconds of whole rounds, probabilities and draws included; None where texts are too short to tell.

    On meaningless texts, half as long as texts may get. The least of a few turns counts, as other load only
    adds; and a round with more drafts never costs less. On a CPU costs rise in steps, as kernels read weights
    again for every few rows: there each K is measured, if rounds are short.
    """
    half = min(slots, draft.context) // 2
    k_max = min(run.speculation.k_max, half - 1)
    if isinstance(draft, DFlashModel):
        k_max = min(k_max, draft.drafts)
    if k_max < 1:
        return None
    siblings, beside = run.speculation.siblings, k_max * run.speculation.siblings
    rule = rule_for(run.speculation.verification.value, siblings)
    transform, draws = SamplingTransform(run.sampling, (), target.vocab), draws_for(target, rule, 0)
    runner = ModelRunner(target)
    if isinstance(draft, HeadModel):
        drafter: Drafter = head_drafter(draft, runner, transform, draws)
    else:
        drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    engine = Engine(runner, drafter, transform, rule, draws, siblings=beside)
    state = engine.prefill([Prompt(str(row), (0,) * half) for row in range(rows)], half)
    drafting: dict[int, list[float]] = defaultdict(list)
    rounds: dict[tuple[int, int], list[float]] = defaultdict(list)  # by drafts, and siblings of each
    tried = sorted({0, 1, k_max, *(2**n for n in range(1, 7) if 2**n < k_max)})
    trees = [(k, s) for s in range(1, siblings + 1) for k in {max(k_max // (1 + s), 1), k_max}]
    for _ in range(TURNS):
        for k, each in [*((k, 0) for k in tried), *trees]:
            engine.synchronize()
            began = time.perf_counter()
            proposal = engine.draft(state, [k] * rows, [each] * rows)
            engine.synchronize()
            drafted = time.perf_counter()
            engine.verify(state, proposal)
            engine.roll_back(state)
            if not each:
                drafting[k].append(drafted - began)
            rounds[k, each].append(time.perf_counter() - began)
        if target.device.type == "cpu" and max(map(min, rounds.values())) < SHORT_S:
            tried = list(range(k_max + 1))
    at_once = isinstance(draft, DFlashModel)
    first = 1 if at_once else 0  # from there on each draft costs the same
    step = max(min(drafting[k_max]) - min(drafting[first]), 0.0)
    draft_s = step / max(k_max - first, 1)
    once_s = max(min(drafting[1]) - min(drafting[0]) - draft_s, 0.0) if at_once else 0.0
    chains = {k: min(taken) for (k, each), taken in rounds.items() if not each}
    least = {k: min(spent for more, spent in chains.items() if more >= k) for k in chains}
    verify_s = {k: max(spent - k * draft_s - (once_s if k else 0.0), least[0]) for k, spent in least.items()}
    costs = Costs.between(draft_s, verify_s, run.speculation.k_max, once_s)
    costs = costs.with_trees({shape: min(rounds[shape]) for shape in trees}, siblings)
    log.info(
        "adaptive: a draft step takes %.2f ms, a target step %.2f ms, one over %d drafts %.2f ms; K depends "
        "on these times: another run of this seed may differ, unless speculation.cost_ratio=%.2g is given",
        1000 * (draft_s + once_s), 1000 * costs.verify[0], k_max, 1000 * costs.verify[k_max],
        (draft_s + once_s) / costs.verify[0],
    )  # fmt: skip
    return costs
