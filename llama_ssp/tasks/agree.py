"""task=agree: how far draft and target agree greedily, prompt by prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any

from llama_ssp.config import AgreeConf, Drafting, Output, RunConf, Verification
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import UsageError
from llama_ssp.pair.assembly import RankModels, engine_for, open_pair
from llama_ssp.pair.batches import damaged, prompt_of, usable_prompts
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.planner.resolve import PairSpec
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.plots import plot_agreements, plot_place
from llama_ssp.report.run_folder import Console, Progress, RunFolder
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.stats import ratio
from llama_ssp.tasks.greedy_match import GreedyMatch, Rounds, agreements, fork_chances, from_any
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.run_measurement import way
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.tokenizer import Tokens

HEAD = ["prompt", "agreed", "ended by", "target takes", "draft takes"]


class AgreeTask:
    """One run of the task. `figures` is right at any moment, also after an interrupt."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        assert isinstance(inputs.run.task, AgreeConf)
        self._ranks, self._inputs, self._task = ranks, inputs, inputs.run.task
        self._console, self._folder = console, folder
        self._pair: RankModels | None = None
        self._engine: AnyEngine | None = None
        self._found: list[dict[str, Any]] = []
        self._skipped = list(inputs.reading.skipped)
        self._plot: str | None = None
        self._fork_forwards = 0
        self._rounds, self._rows = Rounds(), 0

    def run(self) -> str:
        """Loads the pair, goes along every prompt; the status."""
        task, entry = self._task, _greedy(self._inputs.pairs[0], self._task.chunk)
        run, found = entry.run, model_placements(entry)
        tokens = tokens_of(found)
        made = partial(prompt_of, tokens=tokens, model=run.model)
        prompts = usable_prompts(self._inputs.reading.prompts, made, task.on_bad_row, self._skipped)
        longest = max(len(prompt.token_ids) for _, prompt in prompts)
        slots = min(longest + task.max_new_tokens, run.model.context)
        self._rows = rows = min(task.batch_size, len(prompts))
        # Beside those of the engine each model has one to look at the forks with, one after the other.
        self._pair = open_pair(found, run, rows, slots, self._ranks, caches=(2, 2))
        ends = frozenset() if task.ignore_eos else tokens.end_ids
        self._engine = engine_for(self._pair, run, tokens, ends, self._inputs.seed, task.prefill_chunk)
        transform = SamplingTransform(
            run.sampling, tuple(sorted(ends)), min(self._pair.vocab, tokens.size)
        ).uncut()
        try:
            with Progress("agree", len(prompts), "prompts") as progress:
                for first in range(0, len(prompts), task.batch_size):
                    part = prompts[first : first + task.batch_size]
                    self._batch(self._pair, self._engine, transform, part, ends, tokens)
                    progress.advance(len(part))
        finally:
            self._show()
        place = plot_place(task.plot, self._folder.path)
        if place is not None and self._ranks.is_leader:
            plot_agreements(self._found, task.max_new_tokens, place)
            self._plot = str(place)
        return "done"

    def has_output(self) -> bool:
        return bool(self._found)

    def figures(self) -> dict[str, Any]:
        """The task's part of the summary."""
        agreed = [one["agreed_tokens"] for one in self._found]
        forks = sum(one["fork"] is not None for one in self._found)
        return {
            "prompts": self._found,
            "rows_skipped": len(self._skipped),
            "tokens_agreed": sum(agreed),
            "tokens_agreed_mean": mean(agreed) if agreed else None,
            "tokens_agreed_median": median(agreed) if agreed else None,
            "prompts_parted": forks,
            "agreement_rate": ratio(sum(agreed), sum(agreed) + forks),
            "target_forwards": self._engine.target_forwards if self._engine else 0,
            "target_forwards_at_forks": self._fork_forwards,
            "draft_forwards": self._engine.draft_forwards if self._engine else 0,
            "devices": self._pair.devices if self._pair else {},
            "plot": self._plot,
        }

    def ways(self) -> list[RunMeasurement]:
        """One, if it brought a token: how many a round brings is counted, as texts end where models part."""
        if self._pair is None or not self._rounds.count:
            return []
        agreed = sum(one["agreed_tokens"] for one in self._found)
        if not agreed:
            return []
        took = {"ms_per_token": ratio(1000 * self._rounds.seconds, agreed), "acceptance_rate_decided": None}
        run = _greedy(self._inputs.pairs[0], self._task.chunk).run
        found = way("agreeing", self._pair, run, self._rows, took)
        return [replace(found, tokens_per_round=ratio(agreed, self._rounds.count))]

    def _batch(
        self,
        pair: RankModels,
        engine: AnyEngine,
        transform: SamplingTransform,
        part: list[tuple[TextPrompt, Prompt]],
        ends: frozenset[int],
        tokens: Tokens,
    ) -> None:
        task = self._task
        found = agreements(
            engine, [prompt for _, prompt in part], task.chunk, task.max_new_tokens, ends, self._rounds
        )
        broken = [one for one in found if one.finish == "error"]
        if broken:
            first = broken[0]
            position = len(first.prompt.token_ids) + len(first.tokens)
            raise damaged(first.prompt.id, position, len(broken), len(found))
        by_target, forwards = fork_chances(pair.target, found, transform, task.prefill_chunk)
        self._fork_forwards += forwards
        own = pair.draft if tokens.paired is None or tokens.paired.bridge is None else None
        by_draft, _ = fork_chances(own, found, transform, task.prefill_chunk)
        if pair.crew.drafts_apart:
            by_draft = from_any(self._ranks, by_draft)
        for (text, _), one, target, draft in zip(part, found, by_target, by_draft, strict=True):
            whole = one if one.fork is None else replace(
                one, fork=replace(one.fork, by_target=target, by_draft=draft)
            )  # fmt: skip
            self._found.append(_record(text, whole, tokens))

    def _show(self) -> None:
        if self._inputs.run.output is not Output.text or not self._found:
            return
        for line in table(self._found):
            self._console.line(line)
        figures = self.figures()
        self._console.line(
            f"{figures['tokens_agreed']} tokens agreed on in {len(self._found)} prompts, "
            f"{figures['tokens_agreed_mean']:.1f} a prompt (median {figures['tokens_agreed_median']:g}); "
            f"{figures['prompts_parted']} parted; {figures['target_forwards']} target forwards"
        )


def table(found: list[dict[str, Any]]) -> list[str]:
    """A line for each prompt."""
    lines = [HEAD, *(_cells(one) for one in found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines]  # fmt: skip


def _cells(one: dict[str, Any]) -> list[str]:
    fork = one["fork"]
    takes = ["-", "-"] if fork is None else [_held(fork["target"]), _held(fork["draft"])]
    return [one["id"], str(one["agreed_tokens"]), one["finish_reason"], *takes]


def _held(token: dict[str, Any]) -> str:
    """A token, and its chance in the target's distribution | in the draft's."""
    chances = (token["target_probability"], token["draft_probability"])
    return f"{token['text']!r} {' | '.join('-' if p is None else f'{p:.3f}' for p in chances)}"


def _record(text: TextPrompt, one: GreedyMatch, tokens: Tokens) -> dict[str, Any]:
    fork = None
    if one.fork is not None:
        sides = (("target", one.fork.target_token), ("draft", one.fork.draft_token))
        fork = {
            side: {
                "token_id": token,
                "text": tokens.decode([token]),
                "target_probability": one.fork.by_target[index] if one.fork.by_target else None,
                "draft_probability": one.fork.by_draft[index] if one.fork.by_draft else None,
            }
            for index, (side, token) in enumerate(sides)
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


def _greedy(entry: PairSpec, chunk: int) -> PairSpec:
    """The same pair, greedy, the draft writing a chunk at a time."""
    run = entry.run
    if run.draft is None or run.speculation.drafter is not Drafting.model:
        raise UsageError(
            "task=agree compares two models, but there is one", where="draft",
            found=f"drafter {run.speculation.drafter.value}" if run.draft else "no draft",
            fix="name the draft with draft=NAME",
        )  # fmt: skip
    speculation = replace(run.speculation, k=chunk, adaptive=False, verification=Verification.token)
    sampling = replace(run.sampling, temperature=0.0)
    greedy: RunConf = replace(run, speculation=speculation, sampling=sampling)
    return replace(entry, run=greedy)
