"""task=certify: is the speculative distribution the target's, on this pair, placement and settings?"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.text import Text

from llama_ssp.config import CertifyConf, RunConf, SamplingConfig
from llama_ssp.errors import UsageError
from llama_ssp.pair.assembly import lookahead_for
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.report.console import Progress
from llama_ssp.report.task_tables import STYLES
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES
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
        task, run = self._task, self._run
        if self._inputs.pairs[0].drafter is None:
            found = f"drafter {run.speculation.drafter.value}, k {run.speculation.k}"
            what = "nothing drafts, so there is nothing to certify"
            fix = "choose a draft with draft=NAME, or speculation=ngram"
            raise UsageError(what, "speculation", found, fix=fix)
        pair = self._open()
        self._texts = [prompt for _, prompt in self._prompts(pair)]
        new = max(task.max_new_tokens, task.law_tokens, task.greedy_tokens)
        # At most there are the certified sampler, the regular one, and the one that is wrong on purpose.
        pair.load(task.batch_size, longest(self._texts) + new, caches=(3, 2))
        self._examine(pair)
        self._finished = True
        told = [int(verdict(self._found) == DIFFERENT)] if self._ranks.is_leader else []
        failed = self._ranks.broadcast_ints(told)
        self._print([self._sentence()])
        return "failed" if failed[0] else "done"

    def figures(self) -> dict[str, Any]:
        """Returns the findings; there is a verdict once all checks are made."""
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
        greedy_only = run.sampling.controls.temperature == 0
        target, spec = pair.models.target, run.speculation
        seed, level, rule = self._inputs.seed, task.false_alarm / RANDOM_CHECKS, RULES[spec.verification]
        copies = max(1, task.batch_size // count)
        long_texts = [replace(p, id=f"{p.id} law {n}") for p in self._texts for n in range(copies)]
        drawn = list[Check]()
        total = len(long_texts) + count * (2 + (0 if greedy_only else 3 * task.samples) + greedy_only)
        watch = RoundObserver(Decisions(rule, seed), task.law_rounds)
        with Progress("certify", total, "texts") as progress:

            def make(name: str, run: RunConf, rule: Any = None, watch: Any = None) -> EngineSampler:
                engine, lookahead = pair.engine(seed, run, rule=rule), partial(lookahead_for, run)
                given = engine, lookahead, pair.end_ids, task.batch_size, progress.advance, watch
                return EngineSampler(name, *given)

            subject = make("speculative", run, watch=watch)
            subject.texts(long_texts, task.law_tokens)
            watch.room = 0
            ends, vocab = tuple(sorted(pair.end_ids)), min(pair.models.vocab, pair.tokens.size)
            heat, rows, chunk = run.sampling.controls.temperature, task.batch_size, pair.models.prefill_chunk
            self._add(check_law(target, rule, watch.rounds, heat, vocab, rows, chunk))
            if leads:
                transform = SamplingTransform(run.sampling, ends, vocab)
                self._add(check_filters(watch.rounds, transform))
            if not greedy_only:
                plain = make("regular", regular(run))
                samplers = Samplers(subject, plain, make(WRONG.name, run, rule=WRONG))
                drawn = check_samples(samplers, self._texts, task, seed, level, leads)
                self._measure(pair, plain, regular(run))
                del samplers, plain
            if leads:
                self._add(check_decisions(watch.decisions, level))
            del subject  # and with it its caches
            self._add(*drawn)
            greedy = replace(run, sampling=SamplingConfig(temperature=0.0))
            wrong = make(WRONG.name, greedy, rule=WRONG) if greedy_only else None
            ours, plain = make("speculative, greedy", greedy), make("regular, greedy", regular(greedy))
            greedy_ones = Samplers(ours, plain, wrong)
            self._add(*check_greedy_texts(target, greedy_ones, spec.longest, self._texts, task, chunk))
            self._measure(pair, ours, greedy)
            self._measure(pair, plain, regular(greedy))

    def _measure(self, pair: PairSession, sampler: EngineSampler, run: RunConf) -> None:
        """Measures a sampler of the certified rule that is not watched: watching takes time."""
        figures = sampler.counts.figures()
        self._measured.append(pair.measurement(sampler.name, figures, run, sampler.rows))

    def _add(self, *checks: Check | None) -> None:
        """Says each finding as it comes."""
        for check in checks:
            if check is None:
                continue
            self._found.append(check)
            outcome = check.outcome.value
            row = f"{check.name:>16}  ", (f"{outcome:7}", STYLES.get(outcome, "")), f"  {check.says}"
            self._print([Text.assemble(*row)])

    def _sentence(self) -> str:
        entry, spec = self._inputs.pairs[0], self._run.speculation
        how = f"{spec.verification.value} verification, {'adaptive K' if spec.adaptive else f'K = {spec.k}'}"
        subject = f"{entry.target} with {entry.drafter} ({how})"
        return sentence(subject, self._found, self._task.false_alarm)
