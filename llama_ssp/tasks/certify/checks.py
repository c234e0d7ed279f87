"""The checks that run something: every rank takes part in what is run, the leader judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from llama_ssp.config import CertifyConf
from llama_ssp.models.interface import Model
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import TreeRule
from llama_ssp.tasks.certify.near_ties import Finding, check_greedy
from llama_ssp.tasks.certify.permutation_test import POWER, Samples
from llama_ssp.tasks.certify.recorder import Round, Witness
from llama_ssp.tasks.certify.rule_distribution import rule_error
from llama_ssp.tasks.certify.samplers import Sampler
from llama_ssp.tasks.certify.target_probs import (
    Departure,
    Noise,
    Reference,
    quantiles,
    tolerance,
    typical_excess,
)
from llama_ssp.tasks.certify.tree_distribution import tree_error
from llama_ssp.tasks.certify.verdict import Check, Outcome, judged

Item = TypeVar("Item")
RULE_TOLERANCE = 1e-10  # of arithmetic in fp64
MOST_NOISE = 0.2  # total variation between regular passes beyond which a distribution says too little
RANDOM_CHECKS = 5  # drafts, monitor, numbers, first token and two samples share the false-alarm rate


def level_of(task: CertifyConf) -> float:
    """One check's share of the false-alarm rate."""
    return task.false_alarm / RANDOM_CHECKS


def check_probs(
    sampler: Sampler, witness: Witness, model: Model | None, transform: SamplingTransform,
    prompts: Sequence[Prompt], task: CertifyConf, leads: bool,
) -> Check | None:  # fmt: skip
    """Runs the prompts once, then computes what verification committed against the target's own
    distributions.

    `witness` watches the sampler. None on ranks that do not judge.
    """
    witness.room = task.law_rounds
    sampler.texts([replace(prompt, id=f"{prompt.id} law") for prompt in prompts], task.law_tokens)
    witness.room, rounds = 0, witness.rounds
    if not rounds:
        return Check("law", Outcome.blind, "nothing was drafted, so verification had nothing to decide")
    if model is None:
        return None
    width = max(seen.count for seen in rounds) + 1
    looked_at = [*rounds, *spread(witness.behind, task.law_rounds)]
    reference = Reference(model, looked_at, width, task.batch_size, task.prefill_chunk)
    if not leads:
        return None
    noise = reference.noise(transform)
    if any(seen.siblings for seen in rounds):
        # Their pass has a mask, and may take another kernel of attention than every regular pass.
        noise = replace(noise, typical=(noise.total_variation,) * len(noise.typical))
    departures = [
        reference.departure(transform, noise, index, at)
        for index, seen in enumerate(looked_at)
        for at in range(seen.count + 1)
    ]
    places = [(seen, at) for seen in rounds for at in range(seen.count + 1)]
    errors = [_rule_error(witness, *place) for place in spread(places, 2 * task.law_rounds)]
    return _probs_finding(noise, departures, [error for error in errors if error is not None])


def _rule_error(witness: Witness, seen: Round, at: int) -> float | None:
    rule = witness.rule
    if seen.siblings:
        assert isinstance(rule, TreeRule)
        return tree_error(rule, seen, at)
    return rule_error(rule, seen, at)


def spread(places: list[Item], most: int) -> list[Item]:
    """A random subset: a fixed stride would hit the same positions of rounds of equal length."""
    chosen = Random(len(places)).sample(range(len(places)), min(len(places), most))
    return [places[number] for number in sorted(chosen)]


def _probs_finding(noise: Noise, departures: list[Departure], errors: list[float]) -> Check:
    wrong = sum(not error <= RULE_TOLERANCE for error in errors)
    astray = sum(not departure.within(noise) for departure in departures)
    by_rule = max(errors, default=0.0)
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
        "positions_rule": len(errors),
        "positions_rule_wrong": wrong,
        "largest_total_variation_rule": by_rule,
    }
    rule = f"the rule commits another distribution than it is given at {wrong} of {len(errors)} positions: "
    rule += f"total variation {by_rule:.2g} at worst"
    others = "verification used distributions other than the target's"
    some = f"{others} at {astray} of {len(departures)} positions: total variation {largest:.2g} at worst, "
    some += f"where rounding explains {tolerance(noise):.2g}"
    most = f"{others}: total variation {typical:.2g} at half of the {len(departures)} positions, "
    most += f"where regular passes differ by {noise.typical[0]:.2g}"
    faults = [(wrong, rule), (astray, some), (typical_excess(departures, noise), most)]
    right = f"verification commits the distribution it is given within {by_rule:.1g}, and that is "
    right += f"the target's own within {beyond:.2g} at {len(departures)} positions "
    right += f"(rounding: {noise.total_variation:.2g})"
    found = judged("law", faults, right, figures)
    if found.outcome is Outcome.failed or noise.total_variation <= MOST_NOISE:
        return found
    says = f"the target's own distribution moves by {noise.total_variation:.2g} with how its text is fed"
    return Check("law", Outcome.blind, says, figures)


def check_samples(
    subject: Sampler, regular: Sampler, wrong: Sampler, prompts: Sequence[Prompt], task: CertifyConf,
    seed: int, leads: bool,
) -> list[Check]:  # fmt: skip
    """The subject's texts against regular ones, and those of a wrong rule, which must differ from them."""
    regular_texts, subject_texts, wrong_texts = (
        _drawn(sampler, word, prompts, task)
        for sampler, word in ((regular, "regular"), (subject, "subject"), (wrong, "wrong"))
    )
    if not leads:
        return []
    samples = Samples(regular_texts, subject_texts, wrong_texts, task.max_new_tokens)
    found, control = (samples.compare(others, level_of(task), seed) for others in ("subject", "wrong"))
    share = samples.smallest_share(found, seed)
    texts, least = task.samples * len(prompts), min(found.p_values.values())
    figures = {
        "texts_each": texts,
        "tokens_a_text": task.max_new_tokens,
        "p_values": found.p_values,
        "p_value_that_fails": found.level,
        "smallest_share_seen": share,
        "power": POWER,
    }
    shown = "a wrong rule would not surely show"
    if share is not None:
        shown = f"{share:.0%} of them drawn by a rule that {wrong.name} would show"
    fault = f"the texts differ from regular ones: p value {least:.2g}, {texts} texts each"
    right = f"no difference from regular texts: least p value {least:.2g} of {texts} texts each; {shown}"
    against = f"from regular sampling (p value {min(control.p_values.values()):.2g})"
    return [
        judged("two samples", [(found.rejects, fault)], right, figures),
        _control(wrong, control.rejects, against, {"p_values": control.p_values}),
    ]


def check_greedy_texts(
    model: Model | None, subject: Sampler, regular: Sampler, wrong: Sampler | None, k: int,
    prompts: Sequence[Prompt], task: CertifyConf,
) -> list[Check]:  # fmt: skip
    """Greedy texts with and without speculation; those of a wrong rule, if given, must not pass."""
    samplers = [sampler for sampler in (regular, subject, wrong) if sampler is not None]
    plain, *others = [sampler.texts(prompts, task.greedy_tokens) for sampler in samplers]
    if model is None:  # a rank that only drafts
        return []
    rows, chunk = min(task.batch_size, len(prompts)), task.prefill_chunk
    reports = [check_greedy(model, prompts, plain, texts, k, rows=rows, chunk=chunk) for texts in others]
    report = reports[0]
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
        differs = reports[1].verdict is Finding.unexplained
        checks.append(_control(wrong, differs, "from greedy decoding", {}))
    return checks


def _control(wrong: Sampler, differs: bool, against: str, figures: dict[str, object]) -> Check:
    says = f"a rule that {wrong.name} {'differs' if differs else 'does not differ'} {against}"
    return Check("negative control", Outcome.passed if differs else Outcome.blind, says, figures)


def _drawn(
    sampler: Sampler, word: str, prompts: Sequence[Prompt], task: CertifyConf
) -> list[list[list[int]]]:
    """Each prompt's texts, with random streams of their own: the two samples must not share one."""
    numbers = range(task.samples)
    copies = [replace(prompt, id=f"{prompt.id} {word} {number}") for prompt in prompts for number in numbers]
    texts = sampler.texts(copies, task.max_new_tokens)
    return [texts[first : first + task.samples] for first in range(0, len(texts), task.samples)]
