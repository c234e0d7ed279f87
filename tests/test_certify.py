"""task=certify: each check by itself, on right and on wrong samplers, and the command as a whole."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from llama_ssp.config import CertifyConf, SamplingConfig
from llama_ssp.errors import FAILED_CHECK
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.pair.run import RunSettings
from llama_ssp.report.statistics import uniform_band
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES, BlockRule, Rule, TokenRule
from llama_ssp.tasks.certify import decisions, law
from llama_ssp.tasks.certify.decisions import Decisions, Round, RoundObserver, check_decisions
from llama_ssp.tasks.certify.examination import RANDOM_CHECKS
from llama_ssp.tasks.certify.filters import check_filters
from llama_ssp.tasks.certify.greedy import check_greedy_texts
from llama_ssp.tasks.certify.law import MAX_TRIED, check_law, compared, own_logits, rule_error, spread
from llama_ssp.tasks.certify.samples import EngineSampler, KeepsEveryDraft, Samplers, check_samples, compare
from llama_ssp.tasks.certify.verdict import Check, Outcome, sentence, verdict
from tests import certify_faults
from tests.certify_faults import FAULTS
from tests.conftest import Command
from tests.proofs.mutants import Mutant, every
from tests.proofs.toy import Toy, toy
from tests.proofs.wrong_rules import CHANCES, NGRAMS, declares
from tests.proofs.wrong_runs import FILTERS
from tests.rig import engine_of

SURE = 1e-7  # false-alarm rate of a check in these tests
VOCAB = 8
TOP = 3  # of a draft's likeliest tokens
PLAN = CertifyConf(
    samples=40, max_new_tokens=6, law_tokens=12, law_rounds=30, greedy_tokens=12, false_alarm=0.01,
    batch_size=16,
)  # fmt: skip
PROMPTS = [Prompt("a", (1, 2, 3)), Prompt("b", (4,)), Prompt("c", (5, 6))]
MUTANTS = every()


def random_round(seed: int, vocab: int, k: int, flat: bool = False) -> Round:
    """Random distributions, with zeros unless flat, and drafts drawn from theirs."""
    generator = torch.Generator().manual_seed(seed)

    def distributions(count: int) -> torch.Tensor:
        weight = torch.rand(count, vocab, generator=generator, dtype=torch.float64)
        weight = weight if flat else weight * (torch.rand(count, vocab, generator=generator) < 0.7) + 1e-9
        weight = torch.where(weight < 1e-6, 0, weight**3)
        return weight / weight.sum(-1, keepdim=True)

    target_WV, draft_KV = distributions(k + 1), distributions(k)
    drafted = torch.multinomial(draft_KV, 1, generator=generator)[:, 0].tolist()
    return Round(prompt_length=1, text=(0, *drafted), count=k, target_WV=target_WV, draft_KV=draft_KV)


def worst(rule: str, rounds: Sequence[Round]) -> float:
    """The largest error over all nodes that can be reached."""
    errors = [rule_error(RULES[rule], seen, at) for seen in rounds for at in range(seen.count + 1)]
    return max(error for error in errors if error is not None)


@pytest.fixture(scope="module")
def rounds() -> list[Round]:
    return [random_round(seed, vocab=6, k=3) for seed in range(16)]


@pytest.mark.parametrize("rule", RULES)
def test_the_exact_distribution_of_the_rules_is_the_targets(rule: str, rounds: list[Round]) -> None:
    """Also of a wide and flat one, which is tried in part, and which hides no swapped ratio."""
    assert worst(rule, rounds) < 1e-13
    wide = [random_round(7, vocab=3 * MAX_TRIED, k=3, flat=True)]
    assert worst(rule, wide) < 1e-12
    with MUTANTS["ratio swapped"].planted():
        assert worst(rule, wide) > 0.01


RULE_FAULTS = [mutant for mutant in MUTANTS.values() if mutant.places.startswith("speculative.verification:")]
assert len(RULE_FAULTS) >= 15


@pytest.mark.parametrize("mutant", RULE_FAULTS, ids=lambda mutant: mutant.name)
def test_every_planted_fault_of_the_rules_shows(mutant: Mutant, rounds: list[Round]) -> None:
    """All that tests/proofs plants into the rules, on 16 rounds of three drafts."""
    with mutant.planted():
        assert all(worst(*proof.given, rounds) > 1e-6 for proof in mutant.proofs)


def sampler(
    name: str, rule: Rule, draft: Any, watch: RoundObserver | None = None, *, target: Any = None, k: int = 3,
    rows: int = 16, ends: frozenset[int] = frozenset(), sampling: SamplingConfig | None = None,
    top: int | None = None,
) -> Any:  # fmt: skip
    """Models behind the interface that certify judges: toys, or those given."""
    engine = engine_of(
        target or toy(VOCAB, 0, sharpness=0.8), draft, rule, sampling=sampling, ends=ends,
        draws=watch.decisions.seed if watch else 11, top=top,
    )  # fmt: skip
    return EngineSampler(
        name=name,
        engine=engine,
        sampling=sampling or SamplingConfig(),
        settings=RunSettings(rows=rows, lookahead=partial(FixedDraftLength, k if draft else 0), ends=ends),
        watch=watch,
    )


def draft_model() -> CausalModel:
    return toy(VOCAB, 1, sharpness=0.8)


def watched_sampler(
    rule: str, draft: Any = None, sampling: SamplingConfig | None = None, top: int | None = None
) -> Any:
    watch = RoundObserver(Decisions(rule=RULES[rule], seed=3), PLAN.law_rounds)
    return sampler("ours", RULES[rule], draft or draft_model(), watch, rows=100, sampling=sampling, top=top)


def watched(rule: str, texts: int, draft: Any = None, top: int | None = None) -> Decisions:
    """What is seen of so many texts of 30 tokens."""
    subject = watched_sampler(rule, draft, top=top)
    subject.texts([Prompt(f"{n}", (n % VOCAB, 1)) for n in range(texts)], 30)
    seen: Decisions = subject.watch.decisions
    return seen


def test_ngram_drafts_are_certain() -> None:
    seen = watched("block", 50, "ngram")
    assert (check_decisions(seen, SURE).outcome, seen.places) == (Outcome.passed, [])
    assert seen.drafted > 100


def test_without_drafts_decisions_prove_nothing() -> None:
    assert check_decisions(Decisions(rule=RULES["block"], seed=0), SURE).outcome is Outcome.blind


SAMPLINGS = {
    "plain": SamplingConfig(),
    "nucleus": SamplingConfig(temperature=0.9, top_p=0.8),
    "top-k": SamplingConfig(top_k=3),
    "penalties": SamplingConfig(repetition_penalty=1.3, presence_penalty=0.4, bad_tokens=[3]),
    "greedy": SamplingConfig(temperature=0.0),
}


def law_check(rule: str = "block", controls: str = "plain", top: int | None = None) -> Check:
    subject = watched_sampler(rule, sampling=SAMPLINGS[controls], top=top)
    subject.texts([replace(prompt, id=f"{prompt.id} {n}") for prompt in PROMPTS for n in range(8)], 12)
    found = check_law(
        toy(VOCAB, 0, sharpness=0.8), RULES[rule], subject.watch.rounds,
        SAMPLINGS[controls].temperature, VOCAB, PLAN.batch_size, 512,
    )  # fmt: skip
    assert found is not None
    return found


@pytest.mark.few(6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("controls", SAMPLINGS)
def test_the_distributions_are_the_targets_own(rule: str, controls: str) -> None:
    found = law_check(rule, controls)
    assert found.outcome is Outcome.passed, found.says
    assert found.figures["positions"] >= 30
    assert found.figures["largest_total_variation_rule"] < 1e-12
    assert found.figures["largest_total_variation"] < 1e-6


def filter_check(controls: str) -> Check:
    subject = watched_sampler("block", sampling=SAMPLINGS[controls])
    subject.texts(PROMPTS, 20)
    return check_filters(subject.watch.rounds, SamplingTransform(SAMPLINGS[controls], (), VOCAB))


@pytest.mark.parametrize("controls", SAMPLINGS)
def test_filters_are_those_of_a_plain_implementation(controls: str) -> None:
    found = filter_check(controls)
    assert found.outcome is Outcome.passed, found.says
    assert found.figures["positions"] >= 20


def decisions_check(
    rule: str, texts: int, level: float = SURE, draft: Any = None, top: int | None = None
) -> Check:
    return check_decisions(watched(rule, texts, draft, top), level)


@pytest.mark.parametrize(("rule", "draft"), [("token", 1), ("block", 1), ("block", 0)])
def test_decisions_are_the_rules_own(rule: str, draft: int) -> None:
    """Also with a draft that is the target, where chances are quotients of rounding."""
    found = decisions_check(rule, 60, SURE, toy(VOCAB, draft, sharpness=0.8))
    assert found.outcome is Outcome.passed, found.says
    assert found.figures["decisions"] > 300


@pytest.mark.parametrize("rule", RULES)
def test_drafts_from_the_likeliest_tokens_are_certified(rule: str) -> None:
    """They are drawn from what they declare, and the rule commits the target's distribution all the same."""
    seen = watched(rule, 60, top=TOP)
    found = check_decisions(seen, SURE), law_check(rule, top=TOP)
    assert [check.outcome for check in found] == [Outcome.passed] * 2, [check.says for check in found]
    assert seen.drafted > 300


def lenient(decide: Any, *given: Any) -> Any:
    """While the engine decides, chances are greater; the rule itself is right, and replays call that."""
    chances = BlockRule.accept_chances
    with patch.object(BlockRule, "accept_chances", lambda *of: (2 * chances(*of)).clamp(max=1)):
        return decide(*given)


def one_more(filtered: Any, probs: Any, k: int, p: float, least: float) -> Any:
    """Filters keep one token more everywhere: in the target, the draft and regular passes alike."""
    return filtered(probs, k and k + 1, p, least)


ANOTHER_TOKEN = Mutant("another token", NGRAMS, (), declares(lambda probs: probs.roll(1, -1)))
LENIENT = Mutant("the engine is lenient", "speculative.verification:Rule.decide", (), lenient)
CUT_OTHERWISE = [
    MUTANTS[f"likeliest tokens: {fault}"]
    for fault in ("drawn from, and all tokens declared", "declared, and drawn from all tokens")
]
SHOWN: list[tuple[Any, Callable[..., Check], tuple[Any, ...]]] = [
    (ANOTHER_TOKEN, decisions_check, ("block", 20, SURE, "ngram")),
    (MUTANTS["stale keys of rejected tokens"], law_check, ("block", "plain")),
    (MUTANTS["stale keys of rejected tokens"], law_check, ("block", "nucleus")),
    (MUTANTS["filters on the draft's side only"], filter_check, ("nucleus",)),
    (MUTANTS["filters on the draft's side only"], filter_check, ("top-k",)),
    (Mutant("one token more", FILTERS, (), one_more), filter_check, ("top-k",)),
    (MUTANTS["controls see the committed prefix only"], filter_check, ("penalties",)),
    (MUTANTS["temperature 0 as a small number"], filter_check, ("greedy",)),
    (LENIENT, decisions_check, ("block", 50)),
    (MUTANTS["one row's correction for all rows"], decisions_check, ("block", 50)),
    *((fault, decisions_check, ("block", 60, SURE, None, TOP)) for fault in CUT_OTHERWISE),
    *((fault, filter_check, ("nucleus",)) for fault in FAULTS if fault.name.startswith("top-p")),
    *((fault, decisions_check, ("block", 400)) for fault in FAULTS if fault.check == "decisions"),
]


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("fault", "check", "given"), SHOWN, ids=[f"{fault.name} {given}" for fault, _, given in SHOWN]
)
def test_a_planted_fault_shows(fault: Any, check: Callable[..., Check], given: tuple[Any, ...]) -> None:
    with fault.planted():
        assert check(*given).outcome is Outcome.failed


@pytest.mark.slow
def test_what_was_dropped_after_a_look_leaves_a_gap_among_the_others() -> None:
    """And no other trace."""
    with MUTANTS["drops an unlikely draft after looking"].planted():
        seen = watched("block", 200, toy(VOCAB, 1, sharpness=3))
    assert check_decisions(seen, 1e-3).outcome is Outcome.failed
    assert (seen.drafted_wrong, seen.lengths_wrong, seen.tokens_wrong) == (0, 0, 0)


# What certify sees at its own bounds, and no more if they were three times as wide.

LEVEL = 1e-3 / RANDOM_CHECKS
NOISE = law.Noise(0.01, 0.0005)


def sees_a_rule_two_thousandths_too_lenient() -> bool:
    random = np.random.default_rng(2)
    target, draft = (torch.from_numpy(random.dirichlet([1.0] * 6, size)) for size in (4, 3))
    seen = Round(prompt_length=1, text=(0, 1, 2, 3), count=3, target_WV=target, draft_KV=draft)
    with Mutant("", CHANCES, (), lambda chances, *of: (1.002 * chances(*of)).clamp(max=1)).planted():
        errors = [law.rule_error(RULES["token"], seen, at) for at in range(4)]
    found = law.judge(NOISE, [0.0], [error for error in errors if error is not None])
    return found.outcome is Outcome.failed


def sees_that_drafts_never_lie_in_the_tail_of_4_percent() -> bool:
    seen = Decisions(rule=RULES["token"], seed=0, drafted=10_000)
    seen.places = (0.96 * np.arange(10_000) / 10_000).tolist()
    return check_decisions(seen, LEVEL).outcome is Outcome.failed


def sees(departures: list[float]) -> Callable[[], bool]:
    return lambda: law.judge(NOISE, departures, []).outcome is Outcome.failed


one_position = sees([0.03, *[0.0] * 99])  # off by half as much again as rounding explains
every_position = sees([0.006] * 99)  # within the band, by twelve times what regular passes usually differ by
BLUNTED = {
    "tolerance of the rule 1e-2": (law, "RULE_TOLERANCE", 1e-2, sees_a_rule_two_thousandths_too_lenient),
    "drafts' band x3": (
        decisions, "uniform_band", lambda *numbers: 3 * uniform_band(*numbers),
        sees_that_drafts_never_lie_in_the_tail_of_4_percent,
    ),
    "rounding's band x3": (law, "SAFETY", 3 * law.SAFETY, one_position),
    "multiple of rounding x3": (law, "MULTIPLE", 3 * law.MULTIPLE, every_position),
    "part of the largest x3": (law, "PART_OF_LARGEST", 0.75, every_position),
}  # fmt: skip


@pytest.mark.parametrize("name", BLUNTED)
def test_certify_itself_is_sharp(name: str) -> None:
    place, attribute, blunt, is_seen = BLUNTED[name]
    assert is_seen()
    with patch.object(place, attribute, blunt):
        assert not is_seen()


def test_what_a_small_batch_rounds_differently_is_rounding() -> None:
    """A batch of few rows may be multiplied by another kernel: where rounds had few rows, and all regular
    passes many, or the other way round, their distributions would seem to be another model's."""
    plain = Toy.forward

    def rounds_by_rows(self: Toy, input_ids: torch.Tensor, **rest: Any) -> Any:
        seen = plain(self, input_ids, **rest)
        if len(input_ids) < 4:
            seen.logits = seen.logits * 1.01
        return seen

    target, nothing = toy(VOCAB, 0), torch.zeros(2, VOCAB)
    rounds = [
        Round(
            prompt_length=2,
            text=(1, 2, token),
            count=1,
            target_WV=nothing,
            draft_KV=nothing[:1],
            logit_WV=nothing,
        )
        for token in range(4)
    ]
    for forward, count in product((plain, rounds_by_rows), (4, 2)):
        differs, seen = forward is rounds_by_rows, rounds[:count]
        with patch.object(Toy, "forward", forward):
            noise, _ = compared(seen, own_logits(target, seen, 2, 4, 512), 1.0, VOCAB)
        assert (noise.largest > 1e-4) is differs, (differs, count)


def two_samples(subject: Any, wrong: Any = None) -> dict[str, Check]:
    regular = sampler("regular", TokenRule(), None)
    wrong = wrong or sampler("keeps every draft", KeepsEveryDraft(), draft_model())
    found = check_samples(Samplers(subject, regular, wrong), PROMPTS, PLAN, 5, 2e-3, True)
    return {check.name: check for check in found}


def test_texts_of_one_distribution_are_not_told_apart() -> None:
    checks = two_samples(sampler("ours", RULES["block"], draft_model()))
    assert [check.outcome for check in checks.values()] == [Outcome.passed] * 2
    assert min(checks["two samples"].figures["p_values"].values()) > 0.01


def test_texts_of_another_distribution_are_told_apart() -> None:
    checks = two_samples(sampler("ours", KeepsEveryDraft(), draft_model()))
    assert checks["two samples"].outcome is Outcome.failed


def test_a_control_that_passes_leaves_it_open() -> None:
    """With the target for a draft, keeping every draft is right: no wrong rule would show."""
    own = sampler("keeps every draft", KeepsEveryDraft(), toy(VOCAB, 0, sharpness=0.8))
    found = two_samples(sampler("ours", RULES["block"], draft_model()), wrong=own)
    assert found["negative control"].outcome is Outcome.blind
    assert verdict(list(found.values())) == "inconclusive"


@pytest.mark.slow
def test_false_alarms_are_as_frequent_as_stated() -> None:
    """200 pairs of samples of one distribution: at most 5 % are told apart, and not many fewer."""
    random = np.random.default_rng(0)

    def draw(count: int) -> list[list[int]]:
        return [
            list(random.choice(4, size=random.integers(1, 4), p=[0.6, 0.2, 0.15, 0.05])) for _ in range(count)
        ]

    alarms = 0
    for seed in range(200):
        p_values = compare([draw(20)], [draw(20)], 3, seed, shuffles=200)
        alarms += min(p_values.values()) <= 0.05 / len(p_values)
    assert 1 <= alarms <= 24  # binomial(200, 0.05) exceeds 24 once in 20 000; the seeds are fixed


def test_texts_that_end_differ_from_texts_that_go_on() -> None:
    short, long = [[1]] * 40, [[1, 1]] * 40
    assert min(compare([short], [long], 2, 0).values()) < 0.001
    assert min(compare([short], [short], 2, 0).values()) > 0.01


def test_greedy_texts() -> None:
    greedy: Any = {"sampling": SAMPLINGS["greedy"]}
    regular = sampler("regular", TokenRule(), None, **greedy)
    ours = sampler("ours", RULES["block"], draft_model(), **greedy)
    wrong = sampler("keeps every draft", KeepsEveryDraft(), draft_model(), **greedy)
    target = toy(VOCAB, 0, sharpness=0.8)
    found = check_greedy_texts(target, Samplers(ours, regular, wrong), 3, PROMPTS, PLAN, 512)
    assert [check.outcome for check in found] == [Outcome.passed] * 2
    assert found[0].figures["texts_equal"] == len(PROMPTS)
    found = check_greedy_texts(target, Samplers(wrong, regular, None), 3, PROMPTS, PLAN, 512)
    assert [check.outcome for check in found] == [Outcome.failed]


def test_what_the_checks_amount_to() -> None:
    passed, failed, blind = (Check(o.value, o, "it says") for o in Outcome)
    assert verdict([passed]) == "same"
    assert verdict([passed, blind]) == "inconclusive"
    assert verdict([passed, blind, failed]) == "different"
    assert verdict([]) == "inconclusive"
    for checks in ([passed], [passed, blind], [failed]):
        line = sentence("a with b", checks, 1e-3)
        assert line.startswith(verdict(checks)) and "a with b" in line


def test_bands_hold() -> None:
    """2000 sets of 50 uniform draws: the band of 10 % is left by at most 10 %."""
    random = np.random.default_rng(1)
    place = np.sort(random.random((2000, 50)), axis=1)
    distance = np.maximum(np.arange(1, 51) / 50 - place, place - np.arange(50) / 50).max(1)
    assert 0.03 < (distance > uniform_band(50, 0.1)).mean() < 0.1


SMALL = ("task.samples=8", "task.max_new_tokens=3", "task.law_tokens=6", "task.law_rounds=6",
         "task.greedy_tokens=6", 'task.prompts=["hello there", "def f"]')  # fmt: skip
BY_ROUNDS = ["law", "filters", "decisions"]
CHECKS = [*BY_ROUNDS, "two samples", "negative control", "greedy"]


def test_the_command(command: Command) -> None:
    """The synthetic pair, too few texts to tell a wrong rule: one line a check, a page, a document."""
    answer = command("task=certify", "seed=1", *SMALL)
    assert (answer.code, answer.errors) == (0, [])
    found = answer.document
    assert (found["task"], found["status"]) == ("certify", "done")
    assert [check["name"] for check in found["checks"]] == CHECKS
    assert found["verdict"] in ("same", "inconclusive") and found["says"].startswith(found["verdict"])
    lines = answer.out.splitlines()
    assert len(lines) == len(CHECKS) + 1 and lines[-1] == found["says"]
    written = (Path(found["run_folder"]) / "checks.csv").read_text()
    assert all(check["name"] in written for check in found["checks"])


def test_a_wrong_rule_fails_the_command(command: Command) -> None:
    with MUTANTS["ratio swapped"].planted():
        answer = command("task=certify", "seed=1", "output=json", *SMALL)
    found = answer.document
    assert (answer.code, found["status"], found["verdict"]) == (FAILED_CHECK, "failed", "different")
    assert {c["name"]: c["outcome"] for c in found["checks"]}["law"] == "failed"


@pytest.mark.long
def test_the_fault_that_is_hardest_to_see_shows_in_long_texts_of_the_default_length() -> None:
    """Runs the pair that ships with few samples and laws; certify_faults.py has the default size, for all."""
    (row,) = [row for row in FAULTS if row.name == "coins are drafts' numbers in 1 % of rounds"]
    fewer = "task.samples=16", "task.law_rounds=8", "task.greedy_tokens=8"
    is_right, line = replace(row, overrides=("seed=1", *fewer)).certified()
    assert is_right and row.check in line, line


def test_the_table_of_faults_has_a_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["certify_faults.py", "--help"])
    assert certify_faults.main() == 0
    said = capsys.readouterr().out
    assert all(f"{key}=" in said and f"    {key} " in said for key in ("only", "seeds", "jobs", "write"))


@pytest.mark.slow
def test_a_greedy_run_needs_no_samples(command: Command) -> None:
    words = "task=certify", "seed=1", "sampling=greedy", "output=json", *SMALL, "task.greedy_tokens=24"
    found = command(*words).document
    assert [c["name"] for c in found["checks"]] == [*BY_ROUNDS, "greedy", "negative control"]
    assert found["verdict"] == "same"


@pytest.mark.slow
def test_a_run_that_was_stopped_gives_no_verdict(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llama_ssp.tasks.certify.examination.check_samples", stopped)
    answer = command("task=certify", "seed=1", "output=json", *SMALL)
    found = answer.document
    assert (answer.code, found["status"], found["verdict"]) == (130, "interrupted", None)
    assert [c["name"] for c in found["checks"]] == ["law", "filters"]


def test_positions_are_spread_over_rounds_of_one_length():
    """The last of a round, with the bonus, is among them, whatever K is."""
    for k in (1, 3, 5, 7, 15):
        places = [(number, at) for number in range(64) for at in range(k + 1)]
        chosen = spread(places, 128)
        assert len(set(chosen)) == min(128, len(places)) and {at for _, at in chosen} == set(range(k + 1))
