"""task=agree: how far draft and target agree greedily, prompt by prompt."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median
from typing import Any

from llama_ssp.config import AgreeConf, Drafting, Verification
from llama_ssp.errors import UsageError
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.pair.session import PairSession
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.console import Progress
from llama_ssp.report.task_tables import agreements as agreements_shown
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import ratio
from llama_ssp.tasks.common import Task, longest
from llama_ssp.tasks.greedy_match import Chances, GreedyMatch, MatchRounds, agreements, fork_chances, from_any
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens


class AgreeTask(Task[AgreeConf]):
    """Follows every prompt until the two models part or the text ends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._engine: RankEngine | None = None
        self._fork_forwards = 0
        self._rounds = MatchRounds()

    def run(self) -> str:
        task, pair = self._task, self._open(_greedy(self._inputs.pairs[0], self._task.chunk))
        prompts = self._prompts(pair)
        rows, most = min(task.batch_size, len(prompts)), longest(prompt for _, prompt in prompts)
        # One KV cache of each model is the engine's; the other one reads the forks.
        pair.load(rows, most + task.max_new_tokens, caches=(2, 2))
        self._engine = pair.engine(self._inputs.seed)
        try:
            with Progress("agree", len(prompts), "prompts") as progress:
                for first in range(0, len(prompts), task.batch_size):
                    part = prompts[first : first + task.batch_size]
                    self._batch(pair, self._engine, part)
                    progress.advance(len(part))
        finally:
            self._show()
        self._draw(task.plot)
        return "done"

    def figures(self) -> dict[str, Any]:
        agreed = [one["agreed_tokens"] for one in self._found]
        forks = sum(one["fork"] is not None for one in self._found)
        return {
            "prompts": self._found,
            "tokens_agreed": sum(agreed),
            "tokens_agreed_mean": mean(agreed) if agreed else None,
            "tokens_agreed_median": median(agreed) if agreed else None,
            "prompts_parted": forks,
            "agreement_rate": ratio(sum(agreed), sum(agreed) + forks),
            "target_forwards": self._engine.target_forwards if self._engine else 0,
            "target_forwards_at_forks": self._fork_forwards,
            "draft_forwards": self._engine.draft_forwards if self._engine else 0,
            "plot": self._plot,
            **self._pair_figures(),
        }

    def measurements(self) -> list[RunMeasurement]:
        """One, if a token was agreed on. Tokens a round are counted: texts end where the models part."""
        agreed = sum(one["agreed_tokens"] for one in self._found)
        if self._pair is None or not self._rounds.count or not agreed:
            return []
        took = {"ms_per_token": ratio(1000 * self._rounds.seconds, agreed), "acceptance_rate_decided": None}
        found = self._pair.measurement("agreeing", took)
        return [replace(found, tokens_per_round=ratio(agreed, self._rounds.count))]

    def _batch(self, pair: PairSession, engine: RankEngine, part: list[tuple[TextPrompt, Prompt]]) -> None:
        task, models, tokens = self._task, pair.models, pair.tokens
        prompts, most = [prompt for _, prompt in part], task.max_new_tokens
        found = agreements(engine, prompts, task.chunk, most, pair.end_ids, self._rounds)
        ends, vocab = tuple(sorted(pair.end_ids)), min(models.vocab, tokens.size)
        transform = SamplingTransform(pair.run.sampling, ends, vocab).uncut()
        by_target, forwards = fork_chances(models.target, found, transform, task.prefill_chunk)
        self._fork_forwards += forwards
        own = models.draft if tokens.paired is None or tokens.paired.bridge is None else None
        if isinstance(own, HeadModel):
            own = None
        by_draft, _ = fork_chances(own, found, transform, task.prefill_chunk)
        if models.roles.drafts_apart:
            by_draft = from_any(self._ranks, by_draft)
        for (text, _), one, target, draft in zip(part, found, by_target, by_draft, strict=True):
            self._found.append(_record(text, one, target, draft, tokens))

    def _show(self) -> None:
        self._print(agreements_shown(self.figures()))


def _record(
    text: TextPrompt, one: GreedyMatch, by_target: Chances | None, by_draft: Chances | None, tokens: Tokens
) -> dict[str, Any]:
    fork = one.fork and {
        side: {
            "token_id": token,
            "text": tokens.decode([token]),
            "target_probability": by_target[index] if by_target else None,
            "draft_probability": by_draft[index] if by_draft else None,
        }
        for index, (side, token) in enumerate(zip(("target", "draft"), one.fork, strict=True))
    }
    return {
        "id": text.id,
        "prompt": text.text,
        "prompt_tokens": len(one.prompt.token_ids),
        "agreed_tokens": len(one.tokens),
        "agreed_text": tokens.decode(list(one.tokens)),
        "token_ids": list(one.tokens),
        "finish_reason": one.finish,
        "fork": fork,
    }


def _greedy(spec: PairSpec, chunk: int) -> PairSpec:
    """The same pair, greedy, with `chunk` drafts a round."""
    run = spec.run
    if run.draft is None or run.speculation.drafter is not Drafting.model:
        found = f"drafter {run.speculation.drafter.value}" if run.draft else "no draft"
        what = "task=agree compares two models, but there is one"
        raise UsageError(what, "draft", found, fix="name the draft with draft=NAME")
    speculation = replace(
        run.speculation, k=chunk, siblings=0, adaptive=False, verification=Verification.token
    )
    sampling = replace(run.sampling, temperature=0.0)
    return replace(spec, run=replace(run, speculation=speculation, sampling=sampling))
