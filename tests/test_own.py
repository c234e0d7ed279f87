"""A script's own drafter, rule and model: the page's scripts as they are printed, and what is refused."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp import (
    DraftBlock,
    Drafter,
    Pair,
    Proposal,
    Rule,
    Sampler,
    Settings,
    State,
    TokenRule,
    certify,
    load_pair,
)
from llama_ssp.errors import UsageError
from tests import checkpoints
from tests.conftest import Command
from tests.warm import ROOT, Started, python

PAGE = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
NAMES = ("drafter", "bigrams", "rule", "model")
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
FP32 = {"model.dtype": "fp32", "engine": "eager"}


def run_script(number: int, folder: Path, *words: object) -> str:
    """What the page's script prints."""
    (folder / "script.py").write_text(SCRIPTS[number], encoding="utf-8")
    answer = python([folder / "script.py", *words], folder)
    assert answer.code == 0, answer.err
    return answer.out


@pytest.mark.slow
def test_the_page_s_drafter(tmp_path: Path) -> None:
    said = re.match(r"(\d+) passes of the target in place of (\d+)", run_script(0, tmp_path))
    assert said is not None and int(said[1]) * 4 < int(said[2])


@pytest.mark.slow
def test_the_page_s_drafter_that_draws(tmp_path: Path) -> None:
    said = re.fullmatch(r"(\d+) of (\d+) drafts accepted\n", run_script(1, tmp_path))
    assert said is not None and int(said[2]) > 20


@pytest.mark.long
def test_the_page_s_rules(tmp_path: Path) -> None:
    said = run_script(2, tmp_path)
    assert "Half" in said and "Lenient" in said and said.count("drafts accepted") == 2


@pytest.mark.slow
def test_the_page_s_model(tmp_path: Path) -> None:
    """On random weights; tests/test_real.py runs it on the published ones."""
    folder = checkpoints.save(tmp_path / "random", initializer_range=0.4, max_position_embeddings=512)
    assert "tokens as model.generate writes them" in run_script(3, tmp_path, folder)


def test_the_page_has_a_script_for_each() -> None:
    assert len(SCRIPTS) == len(NAMES)


class Repeat(Drafter):
    """Drafts the last token again."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.seen = list[tuple[int, ...]]()

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        self.seen.append(count)
        return self.sampler.certain(
            state, [text[-1:] * n for text, n in zip(state.texts, count, strict=True)]
        )


class Drawn(Drafter):
    """Draws each draft from fixed logits, as a draft model does from its own."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.logit_V = torch.linspace(0, 4, sampler.vocab)

    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        logit_BV = self.logit_V.expand(state.rows, -1)
        drawn = [self.sampler.draw(state, i, count, logit_BV) for i in range(max(count))]
        return self.sampler.proposal(state, drawn, count)


@pytest.mark.parametrize("drafter", [Repeat, Drawn])
def test_greedy_texts_are_those_without_drafts(drafter: type[Drafter]) -> None:
    prompts = ["def hello", "x", "7 * 8 = 56\n"]
    with load_pair("demo", overrides=FP32) as pair:
        expected = [one.token_ids for one in pair.generate(prompts, **GREEDY)]
    with load_pair("demo", drafter=drafter, batch_size=2, overrides=FP32) as pair:
        found = pair.generate(prompts, k=3, **GREEDY)
        assert [one.token_ids for one in found] == expected
        assert all(one.drafted > 0 for one in found) and "own" in repr(pair)
        plain = pair.generate(prompts, drafter="none", **GREEDY)
        assert [one.token_ids for one in plain] == expected and not any(one.drafted for one in plain)


def test_each_call_has_a_drafter_of_its_own_and_what_it_was_given() -> None:
    made = list[Repeat]()

    def make(sampler: Sampler, into: list[Repeat]) -> Repeat:
        into.append(Repeat(sampler))
        return into[-1]

    with load_pair("tiny", drafter=partial(make, into=made)) as pair:
        for _ in range(2):
            pair.generate(["hello"], max_new_tokens=6, k=2, seed=1)
    assert len(made) == 2 and made[0].seen == made[1].seen and max(made[0].seen) == (2,)


class TooMany(Repeat):
    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        return self.sampler.certain(state, [[1] * (n + 1) for n in count])


class Nothing(Repeat):
    def propose(self, state: State, count: tuple[int, ...]) -> Any:
        return [[1]]


class OtherVocabulary(Repeat):
    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        sound = super().propose(state, count)
        assert sound.draft_BKV is not None
        return Proposal(sound.drafted_BK, sound.draft_BKV[..., :-1], sound.count)


class UnknownToken(Repeat):
    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        sound = super().propose(state, count)
        return Proposal(sound.drafted_BK + 10**6, sound.draft_BKV, sound.count)


class OtherRows(Repeat):
    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        return self.sampler.certain(state, [])


class NoDistribution(Repeat):
    def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
        sound = super().propose(state, count)
        assert sound.draft_BKV is not None
        return Proposal(sound.drafted_BK, sound.draft_BKV * 0, sound.count)


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (TooMany, r"drafts more than it may; drafter TooMany; found \(3,\)"),
        (Nothing, "propose returns no Proposal; drafter Nothing; found list"),
        (OtherVocabulary, "probabilities are of another shape"),
        (UnknownToken, "a draft is no token of the target"),
        (OtherRows, "another number of rows; found 0 lists"),
        (NoDistribution, "no distributions"),
        (lambda sampler: 3, "makes is no Drafter; found int"),
    ],
)
def test_a_proposal_that_cannot_be_fed_is_refused_and_the_pair_goes_on(drafter: Any, says: str) -> None:
    with load_pair("tiny", drafter=drafter) as pair:
        with pytest.raises(UsageError, match=says):
            pair.generate(["hello"], max_new_tokens=8, k=2, seed=1)
        assert pair.generate(["hello"], max_new_tokens=2, drafter="none", seed=1)[0].token_ids


class OneChance(TokenRule):
    """One chance for all drafts of a row, which torch would spread over them."""

    def accept_chances(self, block: DraftBlock) -> Tensor:
        return super().accept_chances(block)[:, :1]


def test_a_rule_that_is_given_again_is_the_same_object(pair: Pair) -> None:
    """Graphs are kept by it."""
    own = OneChance()
    assert pair.rule_of(own) is pair.rule_of(own)
    assert pair.rule_of(own) is not pair.rule_of(OneChance())
    assert pair.rule_of(OneChance) is pair.rule_of(OneChance)


class Fractions(TokenRule):
    def accepted(self, passed_BK: Tensor) -> Tensor:
        return super().accepted(passed_BK).float()


class NoCorrection(TokenRule):
    name = "mine"

    def correction_probs(self, block: DraftBlock, accepted_B: Tensor) -> Any:
        return None


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (
            OneChance,
            r"accept_chances returns another tensor; rule OneChance; found \(1, 1\).*allowed \(1, 3\)",
        ),
        (Fractions, r"accepted returns another tensor; .*float32.*whole numbers"),
        (NoCorrection, "correction_probs returns another tensor; rule mine; found NoneType"),
    ],
)
def test_a_rule_that_returns_another_tensor_is_refused(rule: type[Rule], says: str, pair: Pair) -> None:
    with pytest.raises(UsageError, match=says):
        pair.generate(["hello"], rule=rule, k=3, max_new_tokens=8, seed=1)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"draft": "tiny_draft", "drafter": Repeat}, "both a draft and a drafter"),
        ({"drafter": 3}, "drafter makes no drafter; found an object of int"),
        ({"overrides": ["speculation.drafter=own"]}, "no drafter of your own"),
    ],
)
def test_what_is_no_drafter_is_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_pair("tiny", **how)


def test_the_command_line_has_no_drafter_of_your_own(command: Command) -> None:
    answer = command("task=generate", "model=tiny", "draft=none", "speculation.drafter=own", "prompt=x")
    assert answer.code == 2 and "load_pair(..., drafter=Mine)" in answer.err


class Half(TokenRule):
    """Accepts half as often; the correction makes up for it."""

    def accept_chances(self, block: DraftBlock) -> Tensor:
        return super().accept_chances(block) / 2

    def correction_probs(self, block: DraftBlock, accepted_B: Tensor) -> Tensor:
        target_BV, draft_BV = block.probs_after(accepted_B)
        return block.correction(target_BV - torch.minimum(target_BV, draft_BV) / 2, accepted_B)


class FirstAlone(Rule):
    """A rule from scratch: decides the first draft by the token rule, and keeps no later one."""

    def accept_chances(self, block: DraftBlock) -> Tensor:
        first_K = torch.arange(block.k) == 0
        return block.within_count(block.ratio_BK.clamp(max=1) * first_K)

    def accepted(self, passed_BK: Tensor) -> Tensor:
        return passed_BK[:, 0].long()

    def correction_probs(self, block: DraftBlock, accepted_B: Tensor) -> Tensor:
        target_BV, draft_BV = block.probs_after(accepted_B)
        rest_BV = torch.where(accepted_B[:, None] == 0, (target_BV - draft_BV).clamp(min=0), target_BV)
        return block.correction(rest_BV, accepted_B)


class Lenient(TokenRule):
    """Accepts twice as often: wrong."""

    def accept_chances(self, block: DraftBlock) -> Tensor:
        return (super().accept_chances(block) * 2).clamp(max=1)


@pytest.fixture(scope="module")
def pair() -> Any:
    with load_pair("demo", draft="demo_draft", batch_size=16, overrides=FP32) as made:
        yield made


SMALL: dict[str, Any] = {
    "samples": 12, "max_new_tokens": 3, "law_tokens": 12, "law_rounds": 12, "greedy_tokens": 8,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "is_exact"), [(Half, True), (FirstAlone, True), (Lenient, False)])
def test_certify_judges_a_rule(rule: type[Rule], is_exact: bool, pair: Pair) -> None:
    """By the rounds, which few samples show; two samples need more."""
    found = certify(pair, ["def hello", "x"], Settings(seed=1, k=3), rule=rule, **SMALL)
    by_name = {check.name: check.outcome.value for check in found.checks}
    assert by_name["decisions"] == by_name["filters"] == "passed"
    assert by_name["law"] == ("passed" if is_exact else "failed")
    assert (found.verdict == "different") is not is_exact and rule.__name__ in str(found)


@pytest.mark.slow
def test_certify_judges_a_drafter() -> None:
    """A drafter that draws by other numbers is found."""

    class OtherNumbers(Drawn):
        def propose(self, state: State, count: tuple[int, ...]) -> Proposal:
            sound = super().propose(state, count)
            if not sound.k:
                return sound
            other_BK = torch.randint(0, self.sampler.vocab, sound.drafted_BK.shape)
            return Proposal(other_BK, sound.draft_BKV, sound.count)

    for drafter, outcome in ((Drawn, "passed"), (OtherNumbers, "failed")):
        with load_pair("demo", drafter=drafter, batch_size=16, overrides=FP32) as made:
            found = certify(made, ["def hello"], Settings(seed=1, k=2), **SMALL)
        assert {check.name: check.outcome.value for check in found.checks}["decisions"] == outcome


def test_certify_needs_something_that_drafts() -> None:
    with load_pair("tiny") as plain, pytest.raises(UsageError, match="nothing drafts"):
        certify(plain)


def test_a_rule_changes_what_is_accepted_and_may_be_an_object(pair: Pair) -> None:
    how: dict[str, Any] = {"max_new_tokens": 60, "seed": 1, "k": 4}
    (usual,) = pair.generate("def hello", verification="token", **how)
    (half,) = pair.generate("def hello", rule=Half, **how)
    (same,) = pair.generate("def hello", rule=Half(), **how)
    assert half == same and half.accepted / half.drafted < 0.7 * usual.accepted / usual.drafted
    with pytest.raises(UsageError, match="rule is no Rule; found str"):
        pair.generate("def hello", rule="half")  # type: ignore[arg-type]


SCRIPT = """
import sys
from llama_ssp import load_pair
from tests.test_own import Half, Repeat

with load_pair("tiny", drafter=Repeat) as pair:
    print([one.token_ids for one in pair.generate(["hello", "x"], max_new_tokens=8, seed=3, k=2, rule=Half)])
"""


@pytest.mark.slow
def test_over_ranks_a_drafter_and_a_rule_are_the_leader_s(tmp_path: Path) -> None:
    with load_pair("tiny", drafter=Repeat) as alone:
        texts = alone.generate(["hello", "x"], max_new_tokens=8, seed=3, k=2, rule=Half)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    for rank, (code, out, errors, _) in enumerate(Started(tmp_path, 2, program="script.py").finish()):
        assert (code, out.splitlines()) == (0, ["[]" if rank else str([one.token_ids for one in texts])]), (
            errors
        )
