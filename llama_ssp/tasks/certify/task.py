"""task=certify: is the speculative distribution the target's, on this pair, placement and settings?"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.text import Text

from llama_ssp.config import CertifyConf, RunConf, SamplingConfig
from llama_ssp.errors import UsageError
from llama_ssp.pair.run import RunSettings
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.report.console import Progress
from llama_ssp.report.task_tables import STYLES
from llama_ssp.speculative.draft_length import lookahead_for
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES, Rule
from llama_ssp.tasks.certify.decisions import Decisions, RoundObserver, check_decisions
from llama_ssp.tasks.certify.filters import check_filters
from llama_ssp.tasks.certify.greedy import check_greedy_texts
from llama_ssp.tasks.certify.law import check_law
from llama_ssp.tasks.certify.samples import EngineSampler, KeepsEveryDraft, Samplers, check_samples
from llama_ssp.tasks.certify.verdict import DIFFERENT, Check, sentence, verdict
from llama_ssp.tasks.common import Task, longest

WRONG = KeepsEveryDraft()  # the negative control
RANDOM_CHECKS = 2  # decisions and two samples share the false-alarm rate


class CertifyTask(Task[CertifyConf]):
    """Makes every check on the run's pair, and says what they find together."""

    _finished = False
    _texts: Sequence[Prompt] = ()

    def run(self) -> str:
        task = self._task
        spec = self._run.speculation
        if self._inputs.pairs[0].drafter is None:
            raise UsageError(
                "nothing drafts, so there is nothing to certify",
                where="speculation",
                found=f"drafter {spec.drafter.value}, {spec.k_in_words}",
                fix="choose a draft with draft=NAME, or speculation=ngram",
            )

        pair = self._open()
        self._texts = [prompt for _, prompt in self._prompts(pair)]
        new = max(task.max_new_tokens, task.law_tokens, task.greedy_tokens)
        # At most there are the certified sampler, the regular one, and the one that is wrong on purpose.
        pair.load(task.batch_size, longest(self._texts) + new, caches=(3, 2))
        self._examine(pair)
        self._finished = True

        has_failed = [int(verdict(self._results) == DIFFERENT)] if self._ranks.is_leader else []
        (failed,) = self._ranks.broadcast_ints(has_failed)
        self._print([self._sentence()])
        return "failed" if failed else "done"

    def figures(self) -> dict[str, Any]:
        """Returns the findings; there is a verdict once all checks are made."""
        return {
            "verdict": verdict(self._results) if self._finished else None,
            "says": self._sentence() if self._finished else None,
            "checks": [check.record() for check in self._results],
            "false_alarm": self._task.false_alarm,
            "prompts": [prompt.id for prompt in self._texts],
            **self._pair_figures(),
        }

    def _examine(self, pair: PairSession) -> None:
        """Makes all checks; what the first part held, caches included, is free when the second begins."""
        is_greedy = self._run.sampling.controls.temperature == 0
        texts = len(self._texts)
        total = texts * self._long_copies()
        if is_greedy:
            total += 3 * texts  # greedy ones: ours, regular ones, and those of the wrong rule
        else:
            total += (2 + 3 * self._task.samples) * texts
        with Progress("certify", total, "texts") as progress:
            self._examine_rounds(pair, progress)
            self._examine_greedy_texts(pair, progress)

    def _long_copies(self) -> int:
        """Returns how many texts of a prompt the rounds are recorded of: a full batch, if prompts are few."""
        return max(1, self._task.batch_size // len(self._texts))

    def _examine_rounds(self, pair: PairSession, progress: Progress) -> None:
        """Samples as the run would, and checks the rounds and, unless it is greedy, the texts."""
        run = self._run
        task = self._task
        seed = self._inputs.seed
        rule = RULES[run.speculation.verification]
        vocab = min(pair.models.vocab, pair.tokens.size)
        level = task.false_alarm / RANDOM_CHECKS

        watch = RoundObserver(Decisions(rule=rule, seed=seed), task.law_rounds)
        subject = self._sampler("speculative", pair, run, progress, watch=watch)
        long_texts = [
            replace(prompt, id=f"{prompt.id} law {number}")
            for prompt in self._texts
            for number in range(self._long_copies())
        ]
        subject.texts(long_texts, task.law_tokens)
        watch.room = 0  # from here on rounds are decided again, but no more are kept
        law = check_law(
            pair.models.target,
            rule,
            watch.rounds,
            heat=run.sampling.controls.temperature,
            vocab=vocab,
            rows=task.batch_size,
            chunk=pair.models.prefill_chunk,
        )
        self._add(law)
        if self._ranks.is_leader:
            transform = SamplingTransform(run.sampling, tuple(sorted(pair.end_ids)), vocab)
            self._add(check_filters(watch.rounds, transform))

        samples = list[Check]()
        if run.sampling.controls.temperature != 0:
            plain = self._sampler("regular", pair, regular(run), progress)
            wrong = self._sampler(WRONG.name, pair, run, progress, rule=WRONG)
            samplers = Samplers(subject, plain, wrong)
            samples = check_samples(samplers, self._texts, task, seed, level, self._ranks.is_leader)
            self._measure(pair, plain, regular(run))
        if self._ranks.is_leader:
            self._add(check_decisions(watch.decisions, level))  # those of the samples, too
        self._add(*samples)

    def _examine_greedy_texts(self, pair: PairSession, progress: Progress) -> None:
        """Checks greedy texts; where the run's own are greedy, those of the wrong rule are the control."""
        greedy = replace(self._run, sampling=SamplingConfig(temperature=0.0))
        wrong = None
        if self._run.sampling.controls.temperature == 0:
            wrong = self._sampler(WRONG.name, pair, greedy, progress, rule=WRONG)
        ours = self._sampler("speculative, greedy", pair, greedy, progress)
        plain = self._sampler("regular, greedy", pair, regular(greedy), progress)
        checks = check_greedy_texts(
            pair.models.target,
            Samplers(ours, plain, wrong),
            k=self._run.speculation.longest,
            prompts=self._texts,
            task=self._task,
            chunk=pair.models.prefill_chunk,
        )
        self._add(*checks)
        self._measure(pair, ours, greedy)
        self._measure(pair, plain, regular(greedy))

    def _sampler(
        self,
        name: str,
        pair: PairSession,
        run: RunConf,
        progress: Progress,
        rule: Rule | None = None,
        watch: RoundObserver | None = None,
    ) -> EngineSampler:
        """Returns a sampler with an engine of its own; `rule` replaces the run's."""
        return EngineSampler(
            name=name,
            engine=pair.engine(self._inputs.seed, run, rule=rule),
            sampling=run.sampling,
            settings=RunSettings(
                rows=self._task.batch_size, lookahead=partial(lookahead_for, run), ends=pair.end_ids
            ),
            advance=progress.advance,
            watch=watch,
        )

    def _measure(self, pair: PairSession, sampler: EngineSampler, run: RunConf) -> None:
        """Measures a sampler of the certified rule that is not watched: watching takes time."""
        figures = sampler.counts.figures()
        self._measured.append(pair.measurement(sampler.name, figures, run, sampler.rows))

    def _add(self, *checks: Check | None) -> None:
        """Says each finding as it comes; on ranks that do not judge there is none."""
        for check in checks:
            if check is None:
                continue
            self._results.append(check)
            outcome = check.outcome.value
            line = Text(f"{check.name:>16}  ")
            line.append(f"{outcome:7}", STYLES.get(outcome, ""))
            line.append(f"  {check.says}")
            self._print([line])

    def _sentence(self) -> str:
        pair = self._inputs.pairs[0]
        spec = self._run.speculation
        rule = f"{spec.verification.value} verification, {spec.k_in_words}"
        subject = f"{pair.target} with {pair.drafter} ({rule})"
        return sentence(subject, self._results, self._task.false_alarm)
