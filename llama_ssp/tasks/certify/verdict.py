"""What a check says, and what all of them amount to: one verdict, one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Outcome = StrEnum("Outcome", ["passed", "failed", "blind"])  # of a check: blind could not have seen a fault


@dataclass(frozen=True)
class Check:
    """One check: what it says in a sentence, and the figures that this rests on."""

    name: str
    outcome: Outcome
    says: str
    figures: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Returns the check under the names of the JSON interface."""
        return {"name": self.name, "outcome": self.outcome.value, "says": self.says, **self.figures}


# Verdicts.
SAME = "same"
DIFFERENT = "different"
INCONCLUSIVE = "inconclusive"


def verdict(checks: Sequence[Check]) -> str:
    """Returns DIFFERENT if a check failed, SAME if all passed, else INCONCLUSIVE."""
    outcomes = {check.outcome for check in checks}
    if Outcome.failed in outcomes:
        return DIFFERENT
    return SAME if outcomes == {Outcome.passed} else INCONCLUSIVE


def judged(name: str, faults: Sequence[tuple[object, str]], right: str, figures: dict[str, Any]) -> Check:
    """Returns a check that failed and says the first fault present, or passed and says `right`."""
    for is_there, says in faults:
        if is_there:
            return Check(name, Outcome.failed, says, figures)
    return Check(name, Outcome.passed, right, figures)


def control(wrong: str, differs: bool, against: str, figures: dict[str, Any]) -> Check:
    """Returns the negative control: passed if the wrong rule differs, blind if it does not."""
    outcome = Outcome.passed if differs else Outcome.blind
    word = "differs" if differs else "does not differ"
    return Check("negative control", outcome, f"a rule that {wrong} {word} {against}", figures)


def sentence(subject: str, checks: Sequence[Check], false_alarm: float) -> str:
    """Returns the verdict for people."""
    word = verdict(checks)
    if word == DIFFERENT:
        failed = ", ".join(check.name for check in checks if check.outcome is Outcome.failed)
        says = f"{subject} does not give the target's distribution ({failed} failed)."
    elif word == INCONCLUSIVE:
        blind = ", ".join(check.name for check in checks if check.outcome is Outcome.blind)
        says = f"nothing wrong was seen of {subject}, but {blind or 'every check'} could not have seen it."
    else:
        says = (
            f"{subject} gives the target's distribution, as far as {len(checks)} checks see; "
            f"a right sampler fails one of them in at most {false_alarm:g} of runs."
        )
    return f"{word}: {says}"
