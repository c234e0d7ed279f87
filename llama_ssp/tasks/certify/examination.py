"""Makes every check on a pair that is loaded: what task=certify and `llama_ssp.certify` share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from llama_ssp.config import CertifyConf, RunConf, SamplingConfig
from llama_ssp.pair.run import RunSettings
from llama_ssp.pair.session import PairSession, regular
from llama_ssp.placing.prediction import RunMeasurement
from llama_ssp.speculative.draft_length import lookahead_for
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import Rule
from llama_ssp.tasks.certify.decisions import Decisions, RoundObserver, check_decisions
from llama_ssp.tasks.certify.filters import check_filters
from llama_ssp.tasks.certify.greedy import check_greedy_texts
from llama_ssp.tasks.certify.law import check_law
from llama_ssp.tasks.certify.samples import EngineSampler, KeepsEveryDraft, Samplers, check_samples
from llama_ssp.tasks.certify.verdict import Check

WRONG = KeepsEveryDraft()  # the negative control
RANDOM_CHECKS = 2  # decisions and two samples share the false-alarm rate


@dataclass(kw_only=True)
class Examination:
    """Certifies `rule` on a pair with the settings of `run`; `checks` are the findings so far.

    `tell` is called with each finding as it comes, and `advance` with numbers of texts. Every rank takes
    part; only the leader has findings.
    """

    pair: PairSession
    run: RunConf
    task: CertifyConf
    texts: Sequence[Prompt]
    seed: int
    rule: Rule
    tell: Callable[[Check], None] = lambda _: None
    advance: Callable[[int], None] = lambda _: None
    checks: list[Check] = field(default_factory=list)
    measured: list[RunMeasurement] = field(default_factory=list)

    @property
    def is_greedy(self) -> bool:
        return self.run.sampling.controls.temperature == 0

    @property
    def total(self) -> int:
        """How many texts it writes."""
        texts = len(self.texts)
        if self.is_greedy:  # ours, regular ones, and those of the wrong rule
            return texts * (self._long_copies + 3)
        return texts * (self._long_copies + 2 + 3 * self.task.samples)

    def examine(self) -> None:
        """Makes all checks; what the first part held, caches included, is free when the second begins."""
        self._examine_rounds()
        self._examine_greedy_texts()

    @property
    def _long_copies(self) -> int:
        """How many texts of a prompt the rounds are recorded of: a full batch, if prompts are few."""
        return max(1, self.task.batch_size // len(self.texts))

    def _examine_rounds(self) -> None:
        """Samples as the run would, and checks the rounds and, unless it is greedy, the texts."""
        pair = self.pair
        run = self.run
        task = self.task
        vocab = min(pair.models.vocab, pair.tokens.size)
        level = task.false_alarm / RANDOM_CHECKS
        leads = pair.ranks.is_leader

        watch = RoundObserver(Decisions(rule=self.rule, seed=self.seed), task.law_rounds)
        subject = self._sampler("speculative", run, self.rule, watch=watch)
        long_texts = [
            replace(prompt, id=f"{prompt.id} law {number}")
            for prompt in self.texts
            for number in range(self._long_copies)
        ]
        subject.texts(long_texts, task.law_tokens)
        watch.room = 0  # from here on rounds are decided again, but no more are kept
        law = check_law(
            pair.models.target,
            self.rule,
            watch.rounds,
            heat=run.sampling.controls.temperature,
            vocab=vocab,
            rows=task.batch_size,
            chunk=pair.models.prefill_chunk,
        )
        self._add(law)
        if leads:
            transform = SamplingTransform(run.sampling, tuple(sorted(pair.ends_of(run))), vocab)
            self._add(check_filters(watch.rounds, transform))

        samples = list[Check]()
        if not self.is_greedy:
            plain = self._sampler("regular", regular(run), self.rule)
            wrong = self._sampler(WRONG.name, run, WRONG)
            samplers = Samplers(subject, plain, wrong)
            samples = check_samples(samplers, self.texts, task, self.seed, level, leads)
            self._measure(plain, regular(run))
        if leads:
            self._add(check_decisions(watch.decisions, level))  # those of the samples, too
        self._add(*samples)

    def _examine_greedy_texts(self) -> None:
        """Checks greedy texts; where the run's own are greedy, those of the wrong rule are the control."""
        pair = self.pair
        greedy = replace(self.run, sampling=SamplingConfig(temperature=0.0))
        wrong = self._sampler(WRONG.name, greedy, WRONG) if self.is_greedy else None
        ours = self._sampler("speculative, greedy", greedy, self.rule)
        plain = self._sampler("regular, greedy", regular(greedy), self.rule)
        checks = check_greedy_texts(
            pair.models.target,
            Samplers(ours, plain, wrong),
            k=self.run.speculation.longest,
            prompts=self.texts,
            task=self.task,
            chunk=pair.models.prefill_chunk,
        )
        self._add(*checks)
        self._measure(ours, greedy)
        self._measure(plain, regular(greedy))

    def _sampler(
        self, name: str, run: RunConf, rule: Rule, watch: RoundObserver | None = None
    ) -> EngineSampler:
        """Returns a sampler with an engine of its own."""
        return EngineSampler(
            name=name,
            engine=self.pair.engine(self.seed, run, rule=rule),
            sampling=run.sampling,
            settings=RunSettings(
                rows=self.task.batch_size, lookahead=partial(lookahead_for, run), ends=self.pair.ends_of(run)
            ),
            advance=self.advance,
            watch=watch,
        )

    def _measure(self, sampler: EngineSampler, run: RunConf) -> None:
        """Measures a sampler of the certified rule that is not watched: watching takes time."""
        figures = sampler.counts.figures()
        self.measured.append(self.pair.measurement(sampler.name, figures, run, sampler.rows))

    def _add(self, *checks: Check | None) -> None:
        """Notes findings, and tells each; on ranks that do not judge there are none."""
        for check in checks:
            if check is not None:
                self.checks.append(check)
                self.tell(check)
