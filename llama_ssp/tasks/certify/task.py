"""task=certify: is the speculative distribution the target's, on this pair, placement and settings?"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from llama_ssp.config import CertifyConf, Drafting, Output, RunConf, SamplingConfig
from llama_ssp.distributed.comm import Ranks
from llama_ssp.errors import UsageError
from llama_ssp.pair.assembly import RankModels, engine_for, lookahead_for, open_pair
from llama_ssp.pair.batches import prompt_of, usable_prompts
from llama_ssp.pair.placements import model_placements, tokens_of
from llama_ssp.planner.run_plan import RunMeasurement
from llama_ssp.report.run_folder import Console, Progress, RunFolder, versions
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.follower import AnyEngine
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.certify.acceptance import check_acceptance, check_drafts
from llama_ssp.tasks.certify.checks import Effort, check_greedy_texts, check_probs, check_samples
from llama_ssp.tasks.certify.first_tokens import ROUNDS, check_first, first_tokens
from llama_ssp.tasks.certify.plain_filters import check_filters
from llama_ssp.tasks.certify.recorder import KeepsEveryDraft, RuledEngine, WatchedEngine, Witness, watched
from llama_ssp.tasks.certify.replay import check_decisions, check_numbers
from llama_ssp.tasks.certify.samplers import Clock, EngineSampler, WatchedEngineSampler
from llama_ssp.tasks.certify.verdict import INCONCLUSIVE, SAME, Check, page, sentence, verdict
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.tasks.run_measurement import pace_of_counts, way
from llama_ssp.text.tokenizer import Tokens

log = logging.getLogger(__name__)

SHUFFLES = 20_000
WRONG = "keeps every draft"  # the negative control
VERDICTS = ("same", "different", "inconclusive")


class CertifyTask:
    """One run of the task. `figures` is right at any moment, also after an interrupt."""

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        assert isinstance(inputs.run.task, CertifyConf)
        self._ranks, self._inputs, self._task = ranks, inputs, inputs.run.task
        self._console, self._folder = console, folder
        self._pair: RankModels | None = None
        self._vocabulary: dict[str, Any] | None = None
        self._checks: list[Check] = []
        self._finished = False
        self._prompts: list[Prompt] = []
        self._skipped = list(inputs.reading.skipped)
        self._clocks: list[tuple[str, RunConf, Clock]] = []

    def run(self) -> str:
        """Loads the pair, makes every check; the status."""
        entry, task, run = self._inputs.pairs[0], self._task, self._inputs.run
        if entry.drafter is None:
            raise UsageError(
                "nobody drafts, so there is nothing to certify", where="speculation",
                found=f"drafter {run.speculation.drafter.value}, k {run.speculation.k}",
                fix="choose a draft with draft=NAME, or speculation=ngram",
            )  # fmt: skip
        found = model_placements(entry)
        tokens = tokens_of(found)
        self._vocabulary = tokens.paired.record() if tokens.paired else None
        made = partial(prompt_of, tokens=tokens, model=run.model)
        usable = usable_prompts(self._inputs.reading.prompts, made, task.on_bad_row, self._skipped)
        self._prompts = [prompt for _, prompt in usable]
        longest = max(len(prompt.token_ids) for prompt in self._prompts)
        new = max(task.max_new_tokens, task.law_tokens, task.greedy_tokens)
        slots = min(longest + new, run.model.context)
        # At most there are the certified sampler, the regular one, and the one that is wrong on purpose.
        self._pair = open_pair(found, run, task.batch_size, slots, self._ranks, caches=(3, 2))
        self._examine(self._pair, tokens)
        self._finished = True
        verdicts = [VERDICTS.index(verdict(self._checks))] if self._ranks.is_leader else []
        told = VERDICTS[self._ranks.broadcast_ints(verdicts)[0]]
        self._report()
        return "done" if told in (SAME, INCONCLUSIVE) else "failed"

    def has_output(self) -> bool:
        return bool(self._checks)

    def figures(self) -> dict[str, Any]:
        """The task's part of the summary. Without all checks there is no verdict."""
        return {
            "verdict": verdict(self._checks) if self._finished else None,
            "says": self._sentence() if self._finished else None,
            "checks": [check.record() for check in self._checks],
            "false_alarm": self._task.false_alarm,
            "prompts": [prompt.id for prompt in self._prompts],
            "rows_skipped": len(self._skipped),
            "devices": self._pair.devices if self._pair else {},
            "vocabulary": self._vocabulary,
        }

    def ways(self) -> list[RunMeasurement]:
        """What wrote texts that nobody watched, as watching takes time, by the rule that is certified."""
        if self._pair is None:
            return []
        usual = self._inputs.run.sampling
        return [
            way(
                name + (", greedy" if run.sampling != usual else ""), self._pair, run, clock.rows,
                pace_of_counts(clock.seconds, clock.counts),
            )
            for name, run, clock in self._clocks
            if clock.seconds and name != WRONG
        ]  # fmt: skip

    def _examine(self, pair: RankModels, tokens: Tokens) -> None:
        run, task, leads = self._inputs.run, self._task, self._ranks.is_leader
        greedy_only = run.sampling.temperature == 0
        plan = Effort(
            samples=task.samples, new_tokens=task.max_new_tokens, law_tokens=task.law_tokens,
            law_rounds=task.law_rounds, law_positions=2 * task.law_rounds, greedy_tokens=task.greedy_tokens,
            false_alarm=task.false_alarm, shuffles=SHUFFLES, rows=task.batch_size, chunk=task.prefill_chunk,
            seed=self._inputs.seed,
        )  # fmt: skip
        count = len(self._prompts)
        total = count * (3 + (0 if greedy_only else 3 * task.samples) + greedy_only)
        witness = Witness(run.speculation.verification.value, self._inputs.seed)
        with Progress("certify", total, "texts") as progress:
            make = partial(self._sampler, pair, tokens, progress=progress)
            subject = self._watched(make("speculative", run), witness)
            transform = SamplingTransform(
                run.sampling, tuple(sorted(tokens.end_ids)), min(pair.vocab, tokens.size)
            )
            self._add(check_probs(subject, pair.target, transform, self._prompts, plan, leads))
            if leads:
                self._add(check_filters(witness.rounds, transform))
            if not greedy_only:
                drawn = check_samples(
                    subject, make("regular", _regular(run)), _with_rule(make(WRONG, run)),
                    self._prompts, plan, leads,
                )  # fmt: skip
            if leads:
                texts = count * (1 if greedy_only else plan.samples)
                self._add(*self._by_rounds(subject.engine, witness, plan, ROUNDS * texts))
            del subject  # and with it its caches
            if not greedy_only:
                self._add(*drawn)
            greedy = replace(run, sampling=SamplingConfig(temperature=0.0))
            checks = check_greedy_texts(
                pair.target, make("speculative", greedy), make("regular", _regular(greedy)),
                _with_rule(make(WRONG, greedy)) if greedy_only else None,
                _longest_draft(run), self._prompts, plan,
            )  # fmt: skip
            self._add(*checks)

    @staticmethod
    def _by_rounds(engine: AnyEngine, witness: Witness, plan: Effort, rounds: int) -> list[Check]:
        """What all rounds that were watched say together, and many first tokens without a pass."""
        assert isinstance(engine, WatchedEngine)
        first = first_tokens(engine, witness.rounds, rounds, plan.rows, plan.seed)
        return [
            check_drafts(witness, plan.level), check_acceptance(witness, plan.level),
            check_decisions(witness.decisions), check_numbers(witness.decisions, plan.level),
            check_first(first, plan.level),
        ]  # fmt: skip

    def _sampler(
        self, pair: RankModels, tokens: Tokens, name: str, run: RunConf, progress: Progress
    ) -> EngineSampler:
        ends, task = tokens.end_ids, self._task
        engine = engine_for(pair, run, tokens, ends, self._inputs.seed, task.prefill_chunk)
        sampler = EngineSampler(
            name, engine, partial(lookahead_for, run), ends, task.batch_size, progress.advance
        )
        self._clocks.append((name, run, sampler.clock))
        return sampler

    @staticmethod
    def _watched(sampler: EngineSampler, witness: Witness) -> WatchedEngineSampler:
        return WatchedEngineSampler(
            sampler.name, watched(sampler.engine, witness), sampler.lookahead, sampler.ends,
            sampler.batch_size, sampler.advance,
        )  # fmt: skip

    def _add(self, *checks: Check | None) -> None:
        """Says each finding as it comes."""
        for check in checks:
            if check is None:
                continue
            self._checks.append(check)
            if self._inputs.run.output is Output.text:
                self._console.line(f"{check.name:>16}  {check.outcome.value:7}  {check.says}")

    def _sentence(self) -> str:
        return sentence(self._subject(), self._checks, self._task.false_alarm)

    def _subject(self) -> str:
        """What is judged, in words."""
        entry, run = self._inputs.pairs[0], self._inputs.run
        spec = run.speculation
        how = f"{spec.verification.value} verification, {'adaptive K' if spec.adaptive else f'K = {spec.k}'}"
        return f"{entry.target} with {entry.drafter} ({how})"

    def _report(self) -> None:
        if not self._ranks.is_leader:
            return
        if self._inputs.run.output is Output.text:
            self._console.line(self._sentence())
        facts = {
            "pair": self._subject(),
            "devices": "; ".join(f"{role}: {held}" for role, held in self.figures()["devices"].items()),
            "ranks": str(self._ranks.world),
            "sampling": ", ".join(f"{key} {value}" for key, value in vars(self._inputs.run.sampling).items()),
            "seed": str(self._inputs.seed),
            "prompts": str(len(self._prompts)),
            "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        }  # fmt: skip
        self._folder.write("report.md", page("Certificate", self._sentence(), self._checks, facts))


def _regular(run: RunConf) -> RunConf:
    return replace(run, speculation=replace(run.speculation, drafter=Drafting.none))


def _with_rule(sampler: EngineSampler) -> EngineSampler:
    """The negative control: the same sampler by a rule that is wrong on purpose, where it decides."""
    if not isinstance(sampler.engine, Engine):
        return sampler
    return replace(sampler, engine=RuledEngine(sampler.engine, KeepsEveryDraft()))


def _longest_draft(run: RunConf) -> int:
    return run.speculation.k_max if run.speculation.adaptive else run.speculation.k
