"""task=agree: how far draft and target agree greedily, prompt by prompt, and what each takes where they part.

The draft writes a chunk, and the target reads it in one pass; both go on with the tokens that both choose.
The target's correction is never taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from llama_ssp.config import AgreeConf, Drafting, Verification
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import UsageError
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.models.interface import Model
from llama_ssp.pair.batches import require_numbers, texts_of
from llama_ssp.pair.session import PairSession
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.console import Progress
from llama_ssp.report.task_tables import agreements as agreements_shown
from llama_ssp.speculative.engine import RankEngine
from llama_ssp.speculative.generate import Limits
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import Prefix, SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import ratio
from llama_ssp.tasks.common import Task, longest
from llama_ssp.text.prompts import TextPrompt

Fork = tuple[int, int]  # the target's token and the draft's, where they part
Chances = tuple[float, float]  # the probabilities of these two tokens


@dataclass(frozen=True)
class Agreements:
    """A batch: the tokens that both models choose, an end token included, and where they part.

    `state.finished` is "fork", or, where they never part, "eos", "length" or "context".
    """

    state: State
    forks: list[Fork | None]
    rounds: int
    seconds: float  # of the rounds


class AgreeTask(Task[AgreeConf]):
    """Follows every prompt until the two models part or the text ends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._engine: RankEngine | None = None
        self._fork_forwards = self._rounds = 0
        self._seconds = 0.0  # of the rounds

    def run(self) -> str:
        task, pair = self._task, self._open(_greedy(self._inputs.pairs[0], self._task.chunk))
        prompts = self._prompts(pair)
        rows, length = min(task.batch_size, len(prompts)), longest(prompt for _, prompt in prompts)
        # One KV cache of each model is the engine's; the other one reads the forks.
        pair.load(rows, length + task.max_new_tokens, caches=(2, 2))
        self._engine = pair.engine(self._inputs.seed)
        try:
            with Progress("agree", len(prompts), "prompts") as progress:
                for first in range(0, len(prompts), task.batch_size):
                    part = prompts[first : first + task.batch_size]
                    self._batch(pair, self._engine, part)
                    progress.advance(len(part))
        finally:
            self._print(agreements_shown(self.figures()))
        self._draw(task.plot)
        return "done"

    def figures(self) -> dict[str, Any]:
        agreed = [row["agreed_tokens"] for row in self._found]
        forks = sum(row["fork"] is not None for row in self._found)
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
        """Returns one, if a token was agreed on. Tokens a round are counted: texts end where models part."""
        agreed = sum(row["agreed_tokens"] for row in self._found)
        if self._pair is None or not agreed:
            return []
        took = {"ms_per_token": 1000 * self._seconds / agreed, "acceptance_rate_decided": None}
        measurement = self._pair.measurement("agreeing", took)
        return [replace(measurement, tokens_per_round=ratio(agreed, self._rounds))]

    def _batch(self, pair: PairSession, engine: RankEngine, part: list[tuple[TextPrompt, Prompt]]) -> None:
        task, models, tokens = self._task, pair.models, pair.tokens
        prompts, ends = [prompt for _, prompt in part], pair.end_ids
        found = agreements(engine, prompts, task.chunk, task.max_new_tokens, ends)
        self._rounds, self._seconds = self._rounds + found.rounds, self._seconds + found.seconds
        vocab = min(models.vocab, tokens.size)
        transform = SamplingTransform(pair.run.sampling, tuple(sorted(ends)), vocab).uncut()
        by_target, forwards = fork_chances(models.target, found, transform, task.prefill_chunk)
        self._fork_forwards += forwards
        # A head does not read texts by itself, and a draft of another tokenizer has other token ids.
        is_bridged = tokens.paired is not None and tokens.paired.bridge is not None
        draft = None if is_bridged or isinstance(models.draft, HeadModel) else models.draft
        by_draft, _ = fork_chances(draft, found, transform, task.prefill_chunk)
        if models.roles.drafts_apart:
            by_draft = from_any(self._ranks, by_draft)
        for row, (text, prompt) in enumerate(part):
            p_target, p_draft, forked = by_target[row], by_draft[row], found.forks[row]
            agreed = found.state.generated(row)
            fork = forked and {
                side: {
                    "token_id": token,
                    "text": tokens.decode([token]),
                    "target_probability": p_target and p_target[index],
                    "draft_probability": p_draft and p_draft[index],
                }
                for index, (side, token) in enumerate(zip(("target", "draft"), forked, strict=True))
            }
            self._found.append(
                {
                    "id": text.id,
                    "prompt": text.text,
                    "prompt_tokens": len(prompt.token_ids),
                    "agreed_tokens": len(agreed),
                    "agreed_text": tokens.decode(agreed),
                    "token_ids": agreed,
                    "finish_reason": found.state.finished[row],
                    "fork": fork,
                }
            )


def _greedy(spec: PairSpec, chunk: int) -> PairSpec:
    """Returns the pair with greedy sampling and `chunk` drafts a round. Raises UsageError without a draft."""
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


def agreements(
    engine: RankEngine, prompts: Sequence[Prompt], chunk: int, max_new_tokens: int, ends: frozenset[int]
) -> Agreements:
    """Runs a batch on a greedy engine until every row has parted or ended.

    Raises ModelError for logits that are not numbers.
    """
    state = engine.prefill(list(prompts), max_new_tokens)
    engine.synchronize()
    began, rounds = time.perf_counter(), 0
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
            state.append(row, accepted[:kept])
            if reason is None and len(accepted) < count:
                reason = "fork"
                forks[row] = result.token[row], result.drafted[row][len(accepted)]
            state.finished[row] = reason
        engine.roll_back(state)
        rounds += 1
    engine.flush()
    engine.synchronize()
    seconds = time.perf_counter() - began
    require_numbers(*texts_of(state))
    return Agreements(state, forks, rounds, seconds)


def fork_chances(
    model: Model | None, found: Agreements, transform: SamplingTransform, chunk: int
) -> tuple[list[Chances | None], int]:
    """Returns the model's probabilities of the two tokens at each fork, and the forward passes that it took.

    None for texts without a fork, and for all texts where this rank has no part of the model.
    """
    state, parts = found.state, [fork is not None for fork in found.forks]
    if model is None or not any(parts):
        return [None] * state.rows, 0
    token_BS, runner = state.token_BS.to(model.device), ModelRunner(model, chunk)
    runner.start(state.rows, max(state.lengths))
    ends = [length * parted for length, parted in zip(state.lengths, parts, strict=True)]
    logit_B1V = runner.logits(token_BS, ends, [int(parted) for parted in parts])
    length_B, prompt_B = token_BS.new_tensor([state.lengths, state.prompt_lengths])
    probs_BV = transform(logit_B1V, Prefix(token_BS, length_B[:, None], prompt_B))[:, 0]
    chances = [
        fork and (float(probs_V[fork[0]]), float(probs_V[fork[1]]))
        for fork, probs_V in zip(found.forks, probs_BV, strict=True)
    ]
    return chances, runner.forwards


def from_any(ranks: Ranks, own: list[Chances | None]) -> list[Chances | None]:
    """Returns the chances of whichever rank has them, on every rank; they are sent in units of 2^-53."""
    packed = [round(p * 2**53) for pair in own for p in pair or (-1.0, -1.0)]
    known = [max(said) / 2**53 for said in zip(*ranks.gather_ints(packed), strict=True)]
    return [(a, b) if a >= 0 else None for a, b in zip(known[::2], known[1::2], strict=True)]
