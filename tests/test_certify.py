"""task=certify: each check by itself, on right and on wrong samplers, and the command as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from llama_ssp.config import CertifyConf, SamplingConfig
from llama_ssp.errors import FAILED_CHECK
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.interface import Model
from llama_ssp.report.statistics import uniform_band
from llama_ssp.speculative import verification as verify
from llama_ssp.speculative.decision import StateDraws
from llama_ssp.speculative.draft_length import FixedDraftLength
from llama_ssp.speculative.drafters import local as drafters
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter
from llama_ssp.speculative.drafters.ngram import NgramDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import (
    RULES,
    TREE,
    BlockRule,
    DraftBlock,
    Rule,
    TokenRule,
    TreeRule,
)
from llama_ssp.tasks.certify.decisions import Decisions, Round, Watch, check_decisions
from llama_ssp.tasks.certify.filters import check_filters
from llama_ssp.tasks.certify.greedy import check_greedy_texts
from llama_ssp.tasks.certify.law import MAX_TRIED, check_law, compared, own_logits, rule_error, spread
from llama_ssp.tasks.certify.samples import EngineSampler, KeepsEveryDraft, check_samples, compare
from llama_ssp.tasks.certify.verdict import Check, Outcome, sentence, verdict
from tests import certify_faults
from tests.conftest import Command
from tests.proofs import mutants
from tests.proofs.toy import Toy, toy

SURE = 1e-7  # false-alarm rate of a check in these tests
VOCAB = 8
WATCHED = [*RULES, "tree"]  # drafts have two siblings
BY_CHANCE = ["token", "block"]  # the rules that leave something to chance when both distributions are known
PLAN = CertifyConf(
    samples=40, max_new_tokens=6, law_tokens=12, law_rounds=30, greedy_tokens=12, false_alarm=0.01,
    batch_size=16,
)  # fmt: skip
PROMPTS = [Prompt("a", (1, 2, 3)), Prompt("b", (4,)), Prompt("c", (5, 6))]


def random_round(seed: int, vocab: int, k: int, flat: bool = False) -> Round:
    """Random distributions, with zeros unless flat, and drafts drawn from theirs."""
    generator = torch.Generator().manual_seed(seed)

    def transform(count: int) -> torch.Tensor:
        weight = torch.rand(count, vocab, generator=generator, dtype=torch.float64)
        weight = weight if flat else weight * (torch.rand(count, vocab, generator=generator) < 0.7) + 1e-9
        weight = torch.where(weight < 1e-6, 0, weight**3)
        return weight / weight.sum(-1, keepdim=True)

    target_WV, draft_KV = transform(k + 1), transform(k)
    drafted = torch.multinomial(draft_KV, 1, generator=generator)[:, 0].tolist()
    return Round(1, (0, *drafted), k, target_WV, draft_KV)


def worst(rule: Rule, rounds: Sequence[Round]) -> float:
    """The largest error over all nodes that can be reached."""
    errors = [rule_error(rule, seen, at) for seen in rounds for at in range(seen.count + 1)]
    return max(error for error in errors if error is not None)


@pytest.fixture(scope="module")
def rounds() -> list[Round]:
    return [random_round(seed, vocab=6, k=3) for seed in range(16)]


@pytest.mark.parametrize("rule", BY_CHANCE)
def test_the_exact_law_of_the_rules_is_the_targets(rule: str, rounds: list[Round]) -> None:
    assert worst(RULES[rule], rounds) < 1e-13


@pytest.mark.parametrize("rule", BY_CHANCE)
def test_a_wide_flat_law_is_tried_in_part(rule: str) -> None:
    assert worst(RULES[rule], [random_round(7, vocab=3 * MAX_TRIED, k=3, flat=True)]) < 1e-12


@pytest.mark.parametrize("rule", BY_CHANCE)
def test_a_wide_flat_law_hides_no_swapped_ratio(rule: str) -> None:
    with patch.object(verify, "_ratios", mutants._swapped):
        assert worst(RULES[rule], [random_round(7, vocab=3 * MAX_TRIED, k=3, flat=True)]) > 0.01


RULE_FAULTS = [
    mutant
    for mutant in mutants.MUTANTS
    if mutant.place in (verify, TokenRule, BlockRule) and not mutant.name.startswith("tree: ")
]


@pytest.mark.parametrize("mutant", RULE_FAULTS, ids=lambda mutant: mutant.name)
def test_every_planted_fault_of_the_rules_shows(mutant: mutants.Mutant, rounds: list[Round]) -> None:
    """All that tests/proofs/mutants.py plants into the rules, on 16 rounds of three drafts."""
    place = {TokenRule: ["token"], BlockRule: ["block"]}.get(mutant.place, BY_CHANCE)
    with patch.object(mutant.place, mutant.attribute, mutant.fault):
        assert max(worst(RULES[rule], rounds) for rule in place) > 1e-6


def test_there_are_planted_faults() -> None:
    assert len(RULE_FAULTS) >= 15


SIBLING_FAULTS = {
    "a sibling is drawn with its draft's number": "decisions",
    "a sibling may be its draft again": "decisions",
    "an unlikely sibling is dropped": "decisions",
    "siblings see each other": "law",
    "a sibling sees its draft": "law",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SIBLING_FAULTS)
def test_planted_faults_of_siblings_show(name: str) -> None:
    """In how they are drawn, and in what they see."""
    mutant = next(mutant for mutant in mutants.MUTANTS if mutant.name == name)
    with patch.object(mutant.place, mutant.attribute, mutant.fault):
        if SIBLING_FAULTS[name] == "law":
            assert law_check("tree").outcome is Outcome.failed
            return
        seen = watched("tree", texts=120).watch.decisions
    assert check_decisions(seen, 1e-3).outcome is Outcome.failed


def sampler(
    name: str, rule: Rule, draft: Model | str | None, watch: Watch | None = None,
    sampling: SamplingConfig | None = None, target: Model | None = None, k: int = 3,
    ends: frozenset[int] = frozenset(), rows: int = 16, siblings: int = 0,
) -> Any:  # fmt: skip
    """Toy models behind the interface that certify judges."""
    target = target or toy(VOCAB, 0, sharpness=0.8)
    transform, draws = (
        SamplingTransform(sampling or SamplingConfig(), tuple(ends), target.vocab),
        CounterDraws(watch.decisions.seed if watch else 11),
    )
    drafter: Drafter = Drafter()
    if draft == "ngram":
        drafter = NgramDrafter(1, 4, target.vocab, torch.float64)
    elif draft is not None:
        drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    engine = Engine(ModelRunner(target), drafter, transform, rule, draws, siblings=k * siblings)
    lookahead = lambda count: FixedDraftLength(k if draft else 0, count, siblings)  # noqa: E731
    return EngineSampler(name, engine, lookahead, ends, rows, watch=watch)


def draft_model() -> CausalModel:
    return toy(VOCAB, 1, sharpness=0.8)


def watched(rule: str, texts: int = 0, draft: CausalModel | str | None = None, **settings: Any) -> Any:
    """A watched sampler that has drawn so many texts of 30 tokens."""
    own, siblings = (TREE, 2) if rule == TREE.name else (RULES[rule], 0)
    watch = Watch(Decisions(own, 3), PLAN.law_rounds)
    found = sampler("ours", own, draft or draft_model(), watch, rows=100, siblings=siblings, **settings)
    if texts:
        found.texts([Prompt(f"{n}", (n % VOCAB, 1)) for n in range(texts)], 30)
    return found


def _twice_in_trees(self: TreeRule, block: DraftBlock) -> Any:
    return (2 * tree_chances(self, block)).clamp(max=1)


tree_chances = TreeRule.tree_chances


@pytest.mark.slow
@pytest.mark.parametrize("fault", [mutants._declares_mixture, mutants._drops_what_it_saw])
def test_drafts_that_are_not_from_their_laws_show(fault: Any) -> None:
    """What was dropped after a look leaves no trace but a gap among the others."""
    with patch.object(drafters.ModelDrafter, "propose", fault):
        seen = watched("block", texts=200, draft=toy(VOCAB, 1, sharpness=3)).watch.decisions
    assert check_decisions(seen, 1e-3).outcome is Outcome.failed
    if fault is mutants._drops_what_it_saw:
        assert (seen.drafted_wrong, seen.lengths_wrong, seen.tokens_wrong) == (0, 0, 0)


def test_ngram_drafts_are_certain() -> None:
    seen = watched("block", texts=50, draft="ngram").watch.decisions
    assert (check_decisions(seen, SURE).outcome, seen.places) == (Outcome.passed, [])
    assert seen.drafted > 100
    with patch.object(NgramDrafter, "propose", _another_token):
        seen = watched("block", texts=20, draft="ngram").watch.decisions
    assert check_decisions(seen, SURE).outcome is Outcome.failed


def _another_token(self: Any, state: Any, count: Any) -> Any:
    proposal = mutants.ngram_propose(self, state, count)
    if proposal.draft_BKV is None:
        return proposal
    return replace(proposal, draft_BKV=proposal.draft_BKV.roll(1, -1))


def test_nothing_drafted_proves_nothing() -> None:
    seen = Decisions(RULES["block"], 0)
    assert check_decisions(seen, SURE).outcome is Outcome.blind


SAMPLINGS = {
    "plain": SamplingConfig(),
    "nucleus": SamplingConfig(temperature=0.9, top_p=0.8),
    "top-k": SamplingConfig(top_k=3),
    "penalties": SamplingConfig(repetition_penalty=1.3, presence_penalty=0.4, bad_tokens=[3]),
    "greedy": SamplingConfig(temperature=0.0),
}


def law_check(rule: str = "block", texts: int = 24, **settings: Any) -> Check:
    sampling = settings.setdefault("sampling", SamplingConfig())
    subject = watched(rule, **settings)
    subject.texts(
        [replace(prompt, id=f"{prompt.id} {n}") for prompt in PROMPTS for n in range(texts // 3)], 12
    )
    found = check_law(
        toy(VOCAB, 0, sharpness=0.8), own(rule), subject.watch.rounds, subject.watch.behind,
        sampling.temperature, VOCAB, PLAN.batch_size, 512, True,
    )  # fmt: skip
    assert found is not None
    return found


def own(rule: str) -> Any:
    return TREE if rule == TREE.name else RULES[rule]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("rule", "controls"),
    [
        pytest.param(rule, name, marks=[pytest.mark.slow] * (rule == TREE.name and name != "penalties"))
        for rule in WATCHED
        for name in SAMPLINGS
    ],
)
def test_the_laws_are_the_targets_own(rule: str, controls: str) -> None:
    found = law_check(rule, sampling=SAMPLINGS[controls])
    assert found.outcome is Outcome.passed, found.says
    assert found.figures["positions"] >= 30
    assert found.figures["largest_total_variation_rule"] < 1e-12
    assert found.figures["largest_total_variation"] < 1e-6


@pytest.mark.parametrize("controls", SAMPLINGS)
def test_filters_are_those_of_a_plain_implementation(controls: str) -> None:
    found = filter_check(SAMPLINGS[controls])
    assert found.outcome is Outcome.passed, found.says
    assert found.figures["positions"] >= 20


FILTER_FAULTS = [
    (mutants.SamplingTransform, "_probs", mutants._unfiltered_target, SAMPLINGS["nucleus"]),
    (mutants.SamplingTransform, "_probs", mutants._unfiltered_target, SAMPLINGS["top-k"]),
    (certify_faults.sampling, "_nucleus_edge", certify_faults._wider_nucleus, SamplingConfig(top_p=0.8)),
    (
        certify_faults.sampling,
        "greatest",
        lambda probs, k: mutants_greatest(probs, k + 1),
        SAMPLINGS["top-k"],
    ),
    (mutants.State, "prefix", mutants._committed_prefix_only, SAMPLINGS["penalties"]),
    (mutants.SamplingTransform, "_probs", mutants._soft_at_zero, SAMPLINGS["greedy"]),
]
mutants_greatest = certify_faults.sampling.greatest


@pytest.mark.parametrize(("place", "attribute", "fault", "sampling"), FILTER_FAULTS)
def test_filters_that_are_wrong_everywhere_show(
    place: Any, attribute: str, fault: Any, sampling: SamplingConfig
) -> None:
    """In the target, the draft and regular passes alike."""
    with patch.object(place, attribute, fault):
        found = filter_check(sampling)
    assert found.outcome is Outcome.failed


def filter_check(sampling: SamplingConfig) -> Check:
    subject = watched("block", sampling=sampling)
    subject.texts(PROMPTS, 20)
    return check_filters(subject.watch.rounds, SamplingTransform(sampling, (), VOCAB))


@pytest.mark.parametrize(("rule", "draft"), [("token", 1), ("block", 1), ("block", 0), ("tree", 1)])
def test_decisions_are_the_rules_own(rule: str, draft: int) -> None:
    """Also with a draft that is the target, where chances are quotients of rounding."""
    decisions = watched(rule, texts=60, draft=toy(VOCAB, draft, sharpness=0.8)).watch.decisions
    found = check_decisions(decisions, SURE)
    assert found.outcome is Outcome.passed, found.says
    assert found.figures["decisions"] > 300


decide, chances = BlockRule.decide, BlockRule.accept_chances


def _lenient_decision(self: BlockRule, block: DraftBlock, draws: Any) -> Any:
    """The engine accepts a tenth more than the rule, which replays call."""
    with patch.object(BlockRule, "accept_chances", lambda rule, block: 1.1 * chances(rule, block)):
        return decide(self, block, draws)


def _lenient_to_siblings(self: TreeRule, block: DraftBlock, draws: Any) -> Any:
    with patch.object(TreeRule, "tree_chances", _twice_in_trees):
        return decide_tree(self, block, draws)


decide_tree = TreeRule.decide_tree


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (BlockRule, "decide", _lenient_decision),
        (StateDraws, "token", mutants._first_row_decides),
        (TreeRule, "decide_tree", _lenient_to_siblings),
    ],
)
def test_decisions_that_the_rule_does_not_take_show(place: Any, name: str, fault: Any) -> None:
    """The rule itself is right, so the distribution check sees nothing of this."""
    with patch.object(place, name, fault):
        decisions = watched("tree" if place is TreeRule else "block", texts=50).watch.decisions
    assert check_decisions(decisions, SURE).outcome is Outcome.failed


COIN_FAULTS = [fault for fault in certify_faults.FAULTS if fault.attribute in ("slot", "_row")]


@pytest.mark.parametrize("fault", COIN_FAULTS, ids=lambda fault: fault.name)
def test_coins_that_are_not_a_rounds_own_show(fault: certify_faults.Fault) -> None:
    """Also where few rounds have them."""
    with fault.planted():
        seen = watched("block", texts=400).watch.decisions
    assert check_decisions(seen, SURE).outcome is Outcome.failed


@pytest.mark.parametrize("blunted", certify_faults.BLUNTED, ids=lambda mutant: mutant.name)
def test_certify_itself_is_sharp(blunted: mutants.Mutant) -> None:
    """Each way to blunt it is caught by a proof that it passes as it ships."""
    assert blunted.caught_by() is None
    assert mutants.verdict(blunted) is not None


WORLD_FAULTS = [
    (mutants.RaggedCache, "update", mutants._keeps_stale, "plain"),
    (mutants.RaggedCache, "update", mutants._keeps_stale, "nucleus"),
]


@pytest.mark.parametrize(("place", "attribute", "fault", "controls"), WORLD_FAULTS)
def test_laws_that_are_not_the_targets_own_show(
    place: Any, attribute: str, fault: Any, controls: str
) -> None:
    with patch.object(place, attribute, fault):
        found = law_check(sampling=SAMPLINGS[controls])
    assert found.outcome is Outcome.failed
    assert found.figures["largest_total_variation"] > 0.01


def test_what_a_small_batch_rounds_differently_is_rounding() -> None:
    """A batch of few rows may be multiplied by another kernel: where rounds had few rows, and all regular
    passes many, their distributions would seem to be another model's."""
    plain = Toy.forward

    def rounds_by_rows(self: Toy, input_ids: torch.Tensor, **rest: Any) -> Any:
        seen = plain(self, input_ids, **rest)
        if len(input_ids) < 4:
            seen.logits = seen.logits * 1.01
        return seen

    target, nothing = toy(VOCAB, 0), torch.zeros(2, VOCAB)
    rounds = [Round(2, (1, 2, token), 1, nothing, nothing[:1], nothing) for token in range(4)]
    for forward, differs in ((plain, False), (rounds_by_rows, True)):
        with patch.object(Toy, "forward", forward):
            noise, _ = compared(rounds, own_logits(target, rounds, 2, 4, 512), 1.0, VOCAB)
        assert (noise.largest > 1e-4) is differs


def two_samples(subject: Any, wrong: Any = None) -> dict[str, Check]:
    regular = sampler("regular", TokenRule(), None)
    wrong = wrong or sampler("keeps every draft", KeepsEveryDraft(), draft_model())
    return {
        check.name: check for check in check_samples(subject, regular, wrong, PROMPTS, PLAN, 5, 2e-3, True)
    }


def test_the_same_texts_are_not_told_apart() -> None:
    found = two_samples(sampler("ours", RULES["block"], draft_model()))
    assert [check.outcome for check in found.values()] == [Outcome.passed] * 2
    assert min(found["two samples"].figures["p_values"].values()) > 0.01


def test_other_texts_are_told_apart() -> None:
    found = two_samples(sampler("ours", KeepsEveryDraft(), draft_model()))
    assert found["two samples"].outcome is Outcome.failed


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
    greedy = SamplingConfig(temperature=0.0)
    regular = sampler("regular", TokenRule(), None, sampling=greedy)
    ours = sampler("ours", RULES["block"], draft_model(), sampling=greedy)
    wrong = sampler("keeps every draft", KeepsEveryDraft(), draft_model(), sampling=greedy)
    target = toy(VOCAB, 0, sharpness=0.8)
    found = check_greedy_texts(target, ours, regular, wrong, 3, PROMPTS, PLAN)
    assert [check.outcome for check in found] == [Outcome.passed] * 2
    assert found[0].figures["texts_equal"] == len(PROMPTS)
    found = check_greedy_texts(target, wrong, regular, None, 3, PROMPTS, PLAN)
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


@pytest.mark.parametrize("how", ["default", pytest.param("tree", marks=pytest.mark.slow)])
def test_the_command(command: Command, how: str) -> None:
    """The synthetic pair, too few texts to tell a wrong rule: one line a check, a page, a document."""
    answer = command("task=certify", "seed=1", f"speculation={how}", *SMALL)
    assert (answer.code, answer.errors) == (0, [])
    found = answer.document
    assert (found["task"], found["status"]) == ("certify", "done")
    assert [check["name"] for check in found["checks"]] == CHECKS
    assert found["verdict"] in ("same", "inconclusive") and found["says"].startswith(found["verdict"])
    lines = answer.out.splitlines()
    assert len(lines) == len(CHECKS) + 2 and lines[-2] == found["says"]
    written = (Path(found["run_folder"]) / "checks.csv").read_text()
    assert all(check["name"] in written for check in found["checks"])


def test_a_wrong_rule_fails_the_command(command: Command) -> None:
    with patch.object(verify, "_ratios", mutants._swapped):
        answer = command("task=certify", "seed=1", "output=json", *SMALL)
    found = answer.document
    assert (answer.code, found["status"], found["verdict"]) == (FAILED_CHECK, "failed", "different")
    assert {c["name"]: c["outcome"] for c in found["checks"]}["law"] == "failed"


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

    monkeypatch.setattr("llama_ssp.tasks.certify.task.check_samples", stopped)
    answer = command("task=certify", "seed=1", "output=json", *SMALL)
    found = answer.document
    assert (answer.code, found["status"], found["verdict"]) == (130, "interrupted", None)
    assert [c["name"] for c in found["checks"]] == ["law", "filters"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("speculation=none", "nothing drafts"),
        ("task.samples=3", "task.samples"),
        ("task.false_alarm=1e-9", "task.false_alarm"),
        ("speculation.k=32", "up to 32 drafts a round"),
    ],
)
def test_what_cannot_be_certified_is_refused(command: Command, override: str, said: str) -> None:
    answer = command("task=certify", override)
    assert answer.code == 2
    assert said in answer.errors[0]


def test_positions_are_spread_over_rounds_of_one_length():
    """The last of a round, with the bonus, is among them, whatever K is."""
    for k in (1, 3, 5, 7, 15):
        places = [(number, at) for number in range(64) for at in range(k + 1)]
        chosen = spread(places, 128)
        assert len(set(chosen)) == min(128, len(places)) and {at for _, at in chosen} == set(range(k + 1))
