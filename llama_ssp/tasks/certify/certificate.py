"""`llama_ssp.certify`: task=certify for a pair that a script has loaded, with its own rule or drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llama_ssp.config import CertifyConf
from llama_ssp.config import validation as checks
from llama_ssp.config.settings import Settings
from llama_ssp.errors import UsageError
from llama_ssp.pair.api import GivenRule, Pair
from llama_ssp.pair.script_prompts import Prompts, given_prompts, read
from llama_ssp.report.console import Progress, showing_progress
from llama_ssp.speculative.verification import RULES
from llama_ssp.tasks.certify.examination import Examination
from llama_ssp.tasks.certify.verdict import DIFFERENT, INCONCLUSIVE, SAME, Check, sentence, verdict
from llama_ssp.text.prompts import SHORT

VERDICTS = (SAME, DIFFERENT, INCONCLUSIVE)


@dataclass(frozen=True)
class Certificate:
    """What the checks found together. `verdict` is same, different or inconclusive, and `says` a sentence.

    `checks` has each finding, with its figures; on ranks that do not lead there are none.
    """

    verdict: str
    says: str
    checks: list[Check]

    def __str__(self) -> str:
        return self.says


def certify(
    pair: Pair,
    prompts: Prompts = SHORT,
    settings: Settings | None = None,
    *,
    rule: GivenRule | None = None,
    samples: int = CertifyConf.samples,
    max_new_tokens: int = CertifyConf.max_new_tokens,
    law_tokens: int = CertifyConf.law_tokens,
    law_rounds: int = CertifyConf.law_rounds,
    greedy_tokens: int = CertifyConf.greedy_tokens,
    false_alarm: float = CertifyConf.false_alarm,
    batch_size: int | None = None,
    progress: bool = False,
) -> Certificate:
    """Tests whether texts of the pair have the target's distribution, by the checks of task=certify.

    `settings` and `rule` are those of `generate`; what drafts is the pair's. The other
    arguments are keys of the task (docs/keys.md); `batch_size` is the pair's, unless it is given. At most
    there are three caches of the target at once.

    Raises UsageError where nothing drafts, and what `generate` raises.
    """
    session = pair.session
    decides = pair.rule_of(rule) or RULES[session.run.speculation.verification]
    task = CertifyConf(
        name="certify",
        samples=samples,
        max_new_tokens=max_new_tokens,
        law_tokens=law_tokens,
        law_rounds=law_rounds,
        greedy_tokens=greedy_tokens,
        false_alarm=false_alarm,
        batch_size=session.rows if batch_size is None else batch_size,
    )
    asked = settings or Settings()
    run = replace(asked.over(session.run), task=task)
    checks.check(run)
    checks.check_context(run)
    if run.drafter_name is None:
        raise UsageError(
            "nothing drafts, so there is nothing to certify",
            where="speculation",
            found=f"drafter {run.speculation.drafter.value}, {run.speculation.k_in_words}",
            fix="load the pair with a draft or a drafter",
        )
    texts = [read(n, given, session.tokens, run) for n, given in enumerate(given_prompts(prompts, None))]
    if not texts:
        raise UsageError("there are no prompts to certify", fix="give some, or leave prompts out")

    with pair.computing():
        examination = Examination(
            pair=session, run=run, task=task, texts=texts, seed=run.seed or 0, rule=decides
        )
        with showing_progress(progress), Progress("certify", examination.total, "texts") as shown:
            examination.advance = shown.advance
            examination.examine()
        found = VERDICTS.index(verdict(examination.checks))
        (found,) = session.ranks.broadcast_ints([found])

    subject = f"{session.spec.name} ({decides.name} verification, {run.speculation.k_in_words})"
    says = sentence(subject, examination.checks, false_alarm)
    return Certificate(VERDICTS[found], says, examination.checks)
