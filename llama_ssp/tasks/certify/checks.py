"""The checks that run something: every rank takes part in what is run, the leader judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from llama_ssp.speculative.model_runner import Model
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import CoupledRule
from llama_ssp.tasks.certify.near_ties import Finding, GreedyReport, check_greedy
from llama_ssp.tasks.certify.permutation_test import POWER, Samples
from llama_ssp.tasks.certify.races import raced
from llama_ssp.tasks.certify.rule_distribution import Node, node
from llama_ssp.tasks.certify.samplers import Sampler, WatchedSampler
from llama_ssp.tasks.certify.target_probs import (
    Departure,
    Noise,
    Reference,
    quantiles,
    tolerance,
    typical_excess,
)
from llama_ssp.tasks.certify.verdict import Check, Outcome

RULE_TOLERANCE = 1e-10  # of arithmetic in fp64
MOST_NOISE = 0.2  # total variation between regular passes beyond which a distribution says too little
RANDOM_CHECKS = 5  # drafts, monitor, numbers, first token and two samples share the false-alarm rate


@dataclass(frozen=True)
class Effort:
    """How much is run, and how sure a check must be before it fails."""

    samples: int
    new_tokens: int
    law_tokens: int
    law_rounds: int
    law_positions: int
    greedy_tokens: int
    false_alarm: float
    shuffles: int
    rows: int
    chunk: int
    seed: int

    @property
    def level(self) -> float:
        """One check's share of the false-alarm rate."""
        return self.false_alarm / RANDOM_CHECKS


def check_probs(
    sampler: WatchedSampler,
    model: Model | None,
    transform: SamplingTransform,
    prompts: Sequence[Prompt],
    plan: Effort,
    leads: bool,
) -> Check | None:
    """Runs the prompts once, then computes what verification let out against the target's own
    distributions."""
    witness = sampler.witness
    witness.room = plan.law_rounds
    sampler.texts([replace(prompt, id=f"{prompt.id} law") for prompt in prompts], plan.law_tokens)
    witness.room = 0
    if not witness.rounds:
        return Check("law", Outcome.blind, "nothing was drafted, so verification had nothing to decide")
    if model is None:
        return None
    width = max(seen.count for seen in witness.rounds) + 1
    reference = Reference(model, witness.rounds, width, plan.rows, plan.chunk)
    if not leads:
        return None
    noise = reference.noise(transform)
    places = [(index, at) for index, seen in enumerate(witness.rounds) for at in range(seen.count + 1)]
    departures = [reference.departure(transform, noise, index, at) for index, at in places]
    coupled = isinstance(sampler.rule, CoupledRule)
    judge = partial(raced, sampler.draws) if coupled else partial(node, sampler.rule)
    nodes = [judge(witness.rounds[index], at) for index, at in spread(places, plan.law_positions)]
    return _probs_finding(noise, departures, [one for one in nodes if one is not None])


def spread(places: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """So many of them, not every so-manieth: of rounds of one length that would be the same few positions."""
    chosen = Random(len(places)).sample(range(len(places)), min(len(places), most))
    return [places[number] for number in sorted(chosen)]


def _probs_finding(noise: Noise, departures: list[Departure], nodes: list[Node]) -> Check:
    wrong = sum(not one.error <= RULE_TOLERANCE for one in nodes)
    astray = sum(not departure.within(noise) for departure in departures)
    by_rule = max((one.error for one in nodes), default=0.0)
    beyond = max(one.beyond for one in departures)
    largest = max(one.total_variation for one in departures)
    typical = quantiles([one.total_variation for one in departures])[0]
    figures = {
        "positions": len(departures),
        "positions_astray": astray,
        "largest_total_variation": largest,
        "median_total_variation": typical,
        "rounding_median_total_variation": noise.typical[0],
        "largest_total_variation_uncut": beyond,
        "rounding_band_total_variation": noise.total_variation,
        "rounding_tolerance_total_variation": tolerance(noise),
        "positions_rule": len(nodes),
        "positions_rule_wrong": wrong,
        "largest_total_variation_rule": by_rule,
    }
    if wrong:
        says = f"the rule lets out another distribution than it is given at {wrong} of {len(nodes)} positions"
        return Check("law", Outcome.failed, f"{says}: total variation {by_rule:.2g} at worst", figures)
    if astray:
        places = f"{astray} of {len(departures)} positions"
        says = f"verification used distributions other than the target's at {places}"
        most = f"total variation {largest:.2g} at worst, where rounding explains {tolerance(noise):.2g}"
        return Check("law", Outcome.failed, f"{says}: {most}", figures)
    if typical_excess(departures, noise):
        says = "verification used distributions other than the target's: "
        says += f"total variation {typical:.2g} at half of the"
        most = f"{len(departures)} positions, where regular passes differ by {noise.typical[0]:.2g}"
        return Check("law", Outcome.failed, f"{says} {most}", figures)
    if not noise.total_variation <= MOST_NOISE:
        says = f"the target's own distribution moves by {noise.total_variation:.2g} with how its text is fed"
        return Check("law", Outcome.blind, says, figures)
    says = (
        f"verification lets out the distribution it is given within {by_rule:.1g}, and that is "
        f"the target's own "
        f"within {beyond:.2g} at {len(departures)} positions (rounding alone: {noise.total_variation:.2g})"
    )
    return Check("law", Outcome.passed, says, figures)


def check_samples(
    subject: Sampler, regular: Sampler, wrong: Sampler, prompts: Sequence[Prompt], plan: Effort, leads: bool
) -> list[Check]:
    """Texts of the subject against regular ones, and those of a wrong rule, which must be told from them."""
    regular_texts, subject_texts, wrong_texts = (
        _drawn(sampler, word, prompts, plan)
        for sampler, word in ((regular, "regular"), (subject, "subject"), (wrong, "wrong"))
    )
    if not leads:
        return []
    samples = Samples(regular_texts, subject_texts, wrong_texts, plan.new_tokens)
    found = samples.compare_subject(plan.level, plan.shuffles, plan.seed)
    control = samples.compare_wrong(plan.level, plan.shuffles, plan.seed)
    share = samples.smallest_share(found, plan.seed)
    texts, least = plan.samples * len(prompts), min(found.p_values.values())
    figures = {
        "texts_each": texts,
        "tokens_a_text": plan.new_tokens,
        "p_values": found.p_values,
        "p_value_that_fails": found.level,
        "smallest_share_seen": share,
        "power": POWER,
    }
    if found.rejects:
        says = f"the texts are told from regular ones: p value {least:.2g}, {texts} texts each"
    else:
        says = f"not told from regular texts: least p value {least:.2g} of {texts} texts each; " + (
            "a wrong rule would not surely show"
            if share is None
            else f"{share:.0%} of them drawn by a rule that {wrong.name} would show"
        )
    outcome = Outcome.failed if found.rejects else Outcome.passed
    against = f"from regular sampling (p value {min(control.p_values.values()):.2g})"
    return [
        Check("two samples", outcome, says, figures),
        _control(wrong, control.rejects, against, {"p_values": control.p_values}),
    ]


def check_greedy_texts(
    model: Model | None, subject: Sampler, regular: Sampler, wrong: Sampler | None, k: int,
    prompts: Sequence[Prompt], plan: Effort,
) -> list[Check]:  # fmt: skip
    """Greedy texts with and without speculation; those of a wrong rule, if given, must not pass."""
    plain = regular.texts(prompts, plan.greedy_tokens)
    if model is None:  # a rank that only drafts
        for sampler in (subject, *([wrong] if wrong is not None else [])):
            sampler.texts(prompts, plan.greedy_tokens)
        return []
    report = _greedy(model, subject, plain, k, prompts, plan)
    counts = {finding: report.count(finding) for finding in Finding}
    figures = {
        "texts": len(prompts),
        "texts_equal": counts[Finding.equal],
        "texts_near_tie": counts[Finding.near_tie],
        "texts_unexplained": counts[Finding.unexplained],
        "rounding_band_logit": report.band.narrow,
        "positions_of_band": report.band.positions,
    }
    said = ", ".join(f"{count} {finding.name.replace('_', ' ')}" for finding, count in counts.items())
    outcome = Outcome.failed if report.verdict is Finding.unexplained else Outcome.passed
    checks = [Check("greedy", outcome, f"of {len(prompts)} greedy texts: {said}", figures)]
    if wrong is not None:
        told = _greedy(model, wrong, plain, k, prompts, plan).verdict is Finding.unexplained
        checks.append(_control(wrong, told, "from greedy decoding", {}))
    return checks


def _control(wrong: Sampler, told: bool, against: str, figures: dict[str, object]) -> Check:
    says = f"a rule that {wrong.name} is {'told' if told else 'not told'} {against}"
    return Check("negative control", Outcome.passed if told else Outcome.blind, says, figures)


def _greedy(
    model: Model, sampler: Sampler, plain: list[list[int]], k: int, prompts: Sequence[Prompt], plan: Effort
) -> GreedyReport:
    texts = sampler.texts(prompts, plan.greedy_tokens)
    rows = min(plan.rows, len(prompts))
    return check_greedy(model, prompts, plain, texts, k, positions=1, rows=rows, chunk=plan.chunk)


def _drawn(sampler: Sampler, word: str, prompts: Sequence[Prompt], plan: Effort) -> list[list[list[int]]]:
    """Each prompt's texts, drawn by streams of their own: the two samples must not share one."""
    asked = [
        replace(prompt, id=f"{prompt.id} {word} {number}")
        for prompt in prompts
        for number in range(plan.samples)
    ]
    texts = sampler.texts(asked, plan.new_tokens)
    return [texts[first : first + plan.samples] for first in range(0, len(texts), plan.samples)]
