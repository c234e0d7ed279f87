"""task=certify: is the speculative distribution the target's, on this pair, placement and settings?"""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from llama_ssp.config import CertifyConf
from llama_ssp.errors import UsageError
from llama_ssp.pair.session import PairSession
from llama_ssp.report.console import Progress
from llama_ssp.report.task_tables import STYLES
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES
from llama_ssp.tasks.certify.examination import Examination
from llama_ssp.tasks.certify.verdict import DIFFERENT, Check, sentence, verdict
from llama_ssp.tasks.common import Task, longest


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
        """Makes all checks; the findings are the task's results as they come."""
        examination = Examination(
            pair=pair,
            run=self._run,
            task=self._task,
            texts=self._texts,
            seed=self._inputs.seed,
            rule=RULES[self._run.speculation.verification],
            tell=self._tell,
            checks=self._results,
            measured=self._measured,
        )
        with Progress("certify", examination.total, "texts") as progress:
            examination.advance = progress.advance
            examination.examine()

    def _tell(self, check: Check) -> None:
        """Prints a finding."""
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
