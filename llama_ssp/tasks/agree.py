"""task=agree: how far draft and target agree greedily, prompt by prompt, and what each takes where they part.

The draft writes a chunk, and the target reads it in one pass; both go on with the tokens that both choose.
The target's correction is never taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from llama_ssp.config import AgreeConf, Drafting, Verification
from llama_ssp.errors import UsageError
from llama_ssp.pair.requests import require_numbers
from llama_ssp.pair.session import PairSession
from llama_ssp.report.console import Progress
from llama_ssp.report.task_tables import agreements as agreements_shown
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import ratio
from llama_ssp.tasks.common import Task, longest
from llama_ssp.text.prompts import TextPrompt

Fork = tuple[int, int]  # the target's token and the draft's, where they part


class AgreeTask(Task[AgreeConf]):
    """Follows every prompt until the two models part or the text ends."""

    _engine: RankEngine | None = None

    def run(self) -> str:
        task = self._task
        run = self._inputs.pairs[0].run
        if run.draft is None or run.speculation.drafter is not Drafting.model:
            raise UsageError(
                "task=agree compares two models, but there is one",
                where="draft",
                found=f"drafter {run.speculation.drafter.value}" if run.draft else "no draft",
                fix="name the draft with draft=NAME",
            )

        speculation = replace(run.speculation, k=task.chunk, adaptive=False, verification=Verification.token)
        run = replace(run, speculation=speculation, sampling=replace(run.sampling, temperature=0.0))
        pair = self._open(replace(self._inputs.pairs[0], run=run))
        prompts = self._prompts(pair)
        length = longest(prompt for _, prompt in prompts)
        pair.load(min(task.batch_size, len(prompts)), length + task.max_new_tokens)
        self._engine = pair.engine(self._inputs.seed)

        try:
            with Progress("agree", len(prompts), "prompts") as progress:
                for first in range(0, len(prompts), task.batch_size):
                    batch = prompts[first : first + task.batch_size]
                    self._batch(pair, self._engine, batch)
                    progress.advance(len(batch))
        finally:
            self._print(agreements_shown(self.figures()))
        self._draw(task.plot)
        return "done"

    def figures(self) -> dict[str, Any]:
        agreed = [row["agreed_tokens"] for row in self._results]
        forks = sum(row["fork"] is not None for row in self._results)
        return {
            "prompts": self._results,
            "tokens_agreed": sum(agreed),
            "tokens_agreed_mean": mean(agreed) if agreed else None,
            "tokens_agreed_median": median(agreed) if agreed else None,
            "prompts_parted": forks,
            "agreement_rate": ratio(sum(agreed), sum(agreed) + forks),
            "target_forwards": self._engine.target_forwards if self._engine else 0,
            "draft_forwards": self._engine.draft_forwards if self._engine else 0,
            "plot": self._plot,
            **self._pair_figures(),
        }

    def _batch(self, pair: PairSession, engine: RankEngine, batch: list[tuple[TextPrompt, Prompt]]) -> None:
        """Follows a batch of prompts, and adds what came of each to the results."""
        task = self._task
        tokens = pair.tokens
        prompts = [prompt for _, prompt in batch]
        state, forks = agreements(engine, prompts, task.chunk, task.max_new_tokens, pair.end_ids)

        for row, (text, prompt) in enumerate(batch):
            agreed = state.generated(row)
            fork = None
            if (parted := forks[row]) is not None:
                fork = {
                    side: {"token_id": token, "text": tokens.decode([token])}
                    for side, token in zip(("target", "draft"), parted, strict=True)
                }
            self._results.append(
                {
                    "id": text.id,
                    "prompt": text.text,
                    "prompt_tokens": len(prompt.token_ids),
                    "agreed_tokens": len(agreed),
                    "agreed_text": tokens.decode(agreed),
                    "token_ids": agreed,
                    "finish_reason": state.finished[row],
                    "fork": fork,
                }
            )


def agreements(
    engine: RankEngine, prompts: Sequence[Prompt], chunk: int, max_new_tokens: int, ends: frozenset[int]
) -> tuple[State, list[Fork | None]]:
    """Runs a batch on a greedy engine until every row has parted or ended.

    Returns the texts that both models choose, an end token included, and where they part.
    `state.finished` is "fork", or, where they never part, "eos", "length" or "context". Raises ModelError for
    logits that are not numbers.
    """
    state = engine.prefill(list(prompts), max_new_tokens)
    limits = Limits(max_new_tokens, ends)
    forks: list[Fork | None] = [None] * state.rows
    while not limits.reached(state):
        room = [limits.room(state, row, engine.context) for row in range(state.rows)]
        proposal = engine.draft(state, [min(chunk, left) for left in room])
        for row, count in enumerate(proposal.count):
            if not count and state.finished[row] is None:
                state.finished[row] = "context"  # the draft's own, which may be shorter

        result = engine.verify(state, proposal)
        for row, count in enumerate(proposal.count):
            if not count:
                continue
            if result.damaged[row]:
                state.finished[row] = "error"
                continue
            accepted = result.drafted[row][: result.accepted[row]]
            kept, reason = limits.trim(state, row, accepted, engine.context)
            state.append({row: accepted[:kept]})
            if reason is None and len(accepted) < count:
                reason = "fork"
                forks[row] = result.token[row], result.drafted[row][len(accepted)]
            state.finished[row] = reason
        engine.roll_back(state)

    engine.flush()
    names = [prompt.id for prompt in state.prompts]
    require_numbers(*zip(names, state.lengths, state.finished, strict=True))
    return state, forks
