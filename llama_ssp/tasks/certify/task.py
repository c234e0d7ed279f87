"""task=certify: is the speculative distribution the target's, on this pair, placement and settings?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from llama_ssp.config import CertifyConf, RunConf, SamplingConfig
from llama_ssp.errors import UsageError
from llama_ssp.pair.assembly import lookahead_for, rule_of
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.report.console import Progress
from llama_ssp.report.run_folder import versions
from llama_ssp.report.task_tables import check_row
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import Rule
from llama_ssp.tasks.certify.acceptance import check_acceptance, check_drafts
from llama_ssp.tasks.certify.checks import check_greedy_texts, check_probs, check_samples, level_of
from llama_ssp.tasks.certify.first_tokens import ROUNDS, check_first, first_tokens
from llama_ssp.tasks.certify.plain_filters import check_filters
from llama_ssp.tasks.certify.recorder import KeepsEveryDraft, Witness
from llama_ssp.tasks.certify.replay import check_decisions, check_numbers
from llama_ssp.tasks.certify.samplers import EngineSampler
from llama_ssp.tasks.certify.verdict import DIFFERENT, Check, page, sentence, verdict
from llama_ssp.tasks.common import Task, longest

WRONG = KeepsEveryDraft()  # the negative control


class CertifyTask(Task[CertifyConf]):
    """Makes every check on the run's pair, and says what they find together."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._finished = False
        self._texts: list[Prompt] = []

    def run(self) -> str:
        task, run = self._task, self._run
        if self._inputs.pairs[0].drafter is None:
            found = f"drafter {run.speculation.drafter.value}, k {run.speculation.k}"
            what = "nothing drafts, so there is nothing to certify"
            raise UsageError(
                what, "speculation", found, fix="choose a draft with draft=NAME, or speculation=ngram"
            )
        pair = self._open()
        self._texts = [prompt for _, prompt in self._prompts(pair)]
        new = max(task.max_new_tokens, task.law_tokens, task.greedy_tokens)
        # At most there are the certified sampler, the regular one, and the one that is wrong on purpose.
        pair.load(task.batch_size, longest(self._texts) + new, caches=(3, 2))
        self._examine(pair)
        self._finished = True
        told = [int(verdict(self._found) == DIFFERENT)] if self._ranks.is_leader else []
        failed = self._ranks.broadcast_ints(told)
        self._report()
        return "failed" if failed[0] else "done"

    def figures(self) -> dict[str, Any]:
        """Without all checks there is no verdict."""
        return {
            "verdict": verdict(self._found) if self._finished else None,
            "says": self._sentence() if self._finished else None,
            "checks": [check.record() for check in self._found],
            "false_alarm": self._task.false_alarm,
            "prompts": [prompt.id for prompt in self._texts],
            **self._pair_figures(),
        }

    def _examine(self, pair: PairSession) -> None:
        run, task, leads, count = self._run, self._task, self._ranks.is_leader, len(self._texts)
        greedy_only, target = run.sampling.temperature == 0, pair.models.target
        seed, level = self._inputs.seed, level_of(task)
        total = count * (3 + (0 if greedy_only else 3 * task.samples) + greedy_only)
        spec = run.speculation
        witness, drawn = Witness(rule_of(run), seed, spec.siblings), list[Check]()
        with Progress("certify", total, "texts") as progress:
            make = partial(self._sampler, pair, progress.advance)
            subject = make("speculative", run, witness=witness)
            ends, vocab = tuple(sorted(pair.end_ids)), min(pair.models.vocab, pair.tokens.size)
            transform = SamplingTransform(run.sampling, ends, vocab)
            self._add(check_probs(subject, witness, target, transform, self._texts, task, leads))
            if leads:
                self._add(check_filters([*witness.rounds, *witness.behind], transform))
            if not greedy_only:
                others = make("regular", regular(run)), make(WRONG.name, run, rule=WRONG)
                drawn = check_samples(subject, *others, self._texts, task, seed, leads)
                self._measure(pair, others[0], regular(run))
                del others
            if isinstance(subject.engine, Engine):
                rounds = ROUNDS * count * (1 if greedy_only else task.samples)
                first = first_tokens(subject.engine, witness, rounds, task.batch_size)
                decisions = witness.decisions
                self._add(check_drafts(witness, level), check_acceptance(witness, level))
                self._add(check_decisions(decisions), check_numbers(decisions, level))
                self._add(check_first(first, level))
            del subject  # and with it its caches
            self._add(*drawn)
            greedy = replace(run, sampling=SamplingConfig(temperature=0.0))
            wrong = make(WRONG.name, greedy, rule=WRONG) if greedy_only else None
            ours, plain = make("speculative, greedy", greedy), make("regular, greedy", regular(greedy))
            widest = spec.longest * (1 + spec.siblings)
            self._add(*check_greedy_texts(target, ours, plain, wrong, widest, self._texts, task))
            self._measure(pair, ours, greedy)
            self._measure(pair, plain, regular(greedy))

    def _sampler(
        self, pair: PairSession, advance: Callable[[int], None], name: str, run: RunConf,
        rule: Rule | None = None, witness: Witness | None = None,
    ) -> EngineSampler:  # fmt: skip
        engine, lookahead = pair.engine(self._inputs.seed, run, rule=rule), partial(lookahead_for, run)
        return EngineSampler(name, engine, lookahead, pair.end_ids, self._task.batch_size, advance, witness)

    def _measure(self, pair: PairSession, sampler: EngineSampler, run: RunConf) -> None:
        """Of a sampler that uses the certified rule and is not watched, as watching takes time."""
        figures = sampler.counts.figures()
        self._measured.append(pair.measurement(sampler.name, figures, run, sampler.rows))

    def _add(self, *checks: Check | None) -> None:
        """Says each finding as it comes."""
        for check in checks:
            if check is None:
                continue
            self._found.append(check)
            self._print([check_row(check.name, check.outcome.value, check.says)])

    def _sentence(self) -> str:
        return sentence(self._subject(), self._found, self._task.false_alarm)

    def _subject(self) -> str:
        """What is judged, in words."""
        entry, spec = self._inputs.pairs[0], self._run.speculation
        how = f"{spec.verification.value} verification, {'adaptive K' if spec.adaptive else f'K = {spec.k}'}"
        if spec.siblings:
            how += f", {'up to ' * spec.adaptive}{spec.siblings} siblings of each draft"
        return f"{entry.target} with {entry.drafter} ({how})"

    def _report(self) -> None:
        if not self._ranks.is_leader:
            return
        self._print([self._sentence()])
        facts = {
            "pair": self._subject(), "devices": self.figures()["devices"], "ranks": self._ranks.world,
            "sampling": vars(self._run.sampling), "seed": self._inputs.seed, "prompts": len(self._texts),
            "versions": versions(),
        }  # fmt: skip
        self._folder.write("report.md", page("Certificate", self._sentence(), self._found, facts))
