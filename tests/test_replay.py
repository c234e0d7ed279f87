"""Replay of texts: equal to what runs of drafts do to them (the mathematics: proofs/test_replay_exact.py).

Greedy runs have no chance in them, so rounds and drafts by position are compared exactly, with the counters
of real speculative runs: a draft model, n-grams, a trained head, a draft of another tokenizer, all of them at
several K. Sampled runs are compared by every branch of the real loop on toy models. Controls: each comparison
fails with the texts or the laws of another model.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_ssp.config import SamplingConfig, Verification
from llama_ssp.config.compose import composed
from llama_ssp.distributed.comm import ALONE
from llama_ssp.pair import replay as passes
from llama_ssp.pair.replay import DraftLaws, TokenText, draft_laws, target_laws
from llama_ssp.pair.run import Run
from llama_ssp.pair.session import PairSession
from llama_ssp.placing.pairs import PairSpec, pair_specs
from llama_ssp.speculative.drafters.local import ModelDrafter, Sampler
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.replay import (
    ExpectedRounds,
    counts_of,
    expected_rounds,
    kept_chances,
    ratios,
    windows,
)
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.stats import Counts
from llama_ssp.speculative.text_laws import TextDraws, _laws, laws_by_start, token_laws
from llama_ssp.tasks.replay import origin
from tests.conftest import Command
from tests.proofs.choices import every_branch
from tests.proofs.scenarios import Scenario, models
from tests.proofs.toy import toy
from tests.rig import engine_of, steps_of
from tests.tongues import PAIRS, bridge
from tests.warm import Answer

CPU = torch.device("cpu")
K = 4
NEW = 24
TEXTS = ("def mean(values):", "import os\n", "12 * 34 = 408\n7 * 8 =", "class Queue:\n    def", "The boats")


def by_law(target: Any, laws: DraftLaws, rule: str, k: int, room: int | None) -> ExpectedRounds:
    chance_TK = kept_chances(
        ratios(windows(target, laws.logprob_TK.shape[1]), laws.logprob_TK), Verification(rule)
    )
    return expected_rounds(chance_TK[:, :k], counts_of(k, laws.reach_T, room))


# Sampled: every branch of the real loop.


def laws_of_text(
    target: Any, draft: Any, text: tuple[int, ...], prompt: Prompt, k: int, how: Any, top: int | None = None
) -> Any:
    """The target's log-probabilities of a text, and the draft's by one pass, under the same controls."""
    state = State([prompt], len(prompt.token_ids) + len(text), CPU)
    state.append({0: list(text)})
    places = [[len(prompt.token_ids) + number for number in range(len(text))]]
    transform = SamplingTransform(how, (), target.vocab)
    found = [
        token_laws(ModelRunner(model), state, places, state, transform, top=of_model)[0]
        for model, of_model in ((target, None), (draft, top))
    ]
    target_T, draft_T = (np.array([law.logprob for law in laws]) for laws in found)
    return target_T, DraftLaws(windows(draft_T, k), np.full(len(text), 99))


CONTROLS = {
    "plain": SamplingConfig(),
    "filters": SamplingConfig(temperature=2.0, top_k=2, top_p=0.95),
    "penalties": SamplingConfig(frequency_penalty=0.5, repetition_penalty=1.3),
    "likeliest": SamplingConfig(temperature=2.0),
}
TOPS = {"likeliest": 2}  # by controls: from how many of its likeliest tokens the draft draws


OVERLAPPING = "overlapping"  # two tokenizers
HEADS = {"head": Scenario(head=(0, 2)), "DFlash head": Scenario(head=(0, 2), width=4)}


def pair_of(drafter: str, seed: int = 2) -> tuple[Any, Any, dict[str, Any]]:
    """A small target, what drafts for it, and what their engine needs besides. The seed is that of a
    model."""
    if drafter in HEADS:
        return *models(HEADS[drafter]), {}
    if drafter == OVERLAPPING:
        target, draft = PAIRS[OVERLAPPING]
        return toy(target.size, 0), toy(draft.size, seed), {"bridge": bridge(OVERLAPPING)}
    return toy(3, 1), "ngram" if drafter == "ngram" else toy(3, seed), {}


def asked_at_each(
    drafter: str, text: tuple[int, ...], prompt: Prompt, k: int, how: Any, seed: int = 2,
    top: int | None = None,
) -> DraftLaws:  # fmt: skip
    """The drafter's laws, asked at each token of a text."""
    target, draft, given = pair_of(drafter, seed)
    draws = TextDraws(0, texts=[[*prompt.token_ids, *text]])
    engine = engine_of(target, draft, draws=draws, sampling=how, top=top, **given)
    reads = engine.target if drafter in HEADS else None
    state = State([prompt], len(prompt.token_ids) + len(text) + k, CPU)
    (laws,) = laws_by_start(engine.drafter, reads, state, [text], k)
    return DraftLaws(np.array(laws.logprobs).reshape(len(text), k), np.array(laws.reach))


CASES = [("model", name) for name in CONTROLS] + [(name, "plain") for name in (*HEADS, "ngram", OVERLAPPING)]
CASES += [("head", "likeliest"), (OVERLAPPING, "likeliest")]


@pytest.mark.few(11)
@pytest.mark.parametrize(("drafter", "controls"), CASES)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_rounds_of_sampled_texts_are_those_of_every_branch(rule: str, drafter: str, controls: str) -> None:
    target, draft, given = pair_of(drafter)
    prompt, new, k, how = Prompt("p", (1, 0)), 3, 2, CONTROLS[controls]
    top = TOPS.get(controls)

    def play(draws: Any) -> tuple[tuple[int, ...], int]:
        engine = engine_of(target, draft, rule, draws=draws, sampling=how, top=top, **given)
        state, steps = steps_of(engine, [prompt], new, k)
        return tuple(state.generated(0)), len(steps)

    branches, _ = every_branch(play)
    weights, rounds = dict[Any, float](), dict[Any, float]()
    for (text, number), weight in branches.items():
        weights[text] = weights.get(text, 0.0) + weight
        rounds[text] = rounds.get(text, 0.0) + weight * number
    assert len(weights) >= 8

    other = 0
    for text, weight in weights.items():
        target_T, laws = laws_of_text(target, target, text, prompt, k, how)
        assert np.exp(target_T.sum()) == pytest.approx(weight, abs=1e-9)
        if drafter == "model":
            _, laws = laws_of_text(target, draft, text, prompt, k, how, top)
        else:
            laws = asked_at_each(drafter, text, prompt, k, how, top=top)
        found = by_law(target_T, laws, rule, k, new).rounds
        assert found == pytest.approx(rounds[text] / weight, abs=1e-6 if drafter in HEADS else 1e-9)

        # Control: the laws of another drafter, or of one that draws from all tokens.
        if drafter == "model" and top is not None:
            _, wrong = laws_of_text(target, draft, text, prompt, k, how)
        else:
            wrong = asked_at_each("ngram" if drafter in HEADS else "model", text, prompt, k, how, seed=5)
        other += abs(by_law(target_T, wrong, rule, k, new).rounds - rounds[text] / weight) > 1e-3
    assert other > 3


def test_a_draft_models_law_does_not_depend_on_where_the_round_began() -> None:
    """One pass over whole texts gives what the drafter itself declares, asked at every token."""
    target, draft = toy(5, 1), toy(5, 2)
    answers = [[1, 4, 2, 0, 3, 3], [2, 2, 1]]
    prompts = [Prompt("a", (1, 0, 2)), Prompt("b", (4,))]
    how = SamplingConfig(temperature=0.8, top_k=4)
    transform = SamplingTransform(how, (), 5)
    draws = TextDraws(
        0, texts=[[*prompt.token_ids, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    )
    drafter = ModelDrafter(ModelRunner(draft), Sampler(transform, draws))
    by_start = laws_by_start(drafter, ModelRunner(target), State(prompts, 12, CPU), answers, 3)

    for prompt, answer, laws in zip(prompts, answers, by_start, strict=True):
        _, by_pass = laws_of_text(target, draft, tuple(answer), prompt, 3, how)
        assert laws.reach == [3] * len(answer)
        for start in range(len(answer)):
            left = min(3, len(answer) - start)
            assert laws.logprobs[start][:left] == pytest.approx(by_pass.logprob_TK[start][:left].tolist())


def test_a_draft_of_another_tokenizer_is_read_as_it_drafts() -> None:
    """One pass over the translated texts gives what its drafter declares, asked at every token."""
    name = "overlapping"
    target, draft = PAIRS[name]
    small, how = toy(draft.size, 1), bridge(name)
    answers = [(0, 1, 1, 0, 1), (1, 1)]
    texts = [TokenText(Prompt(str(n), (0, 1)), answer) for n, answer in enumerate(answers)]
    transform = SamplingTransform(SamplingConfig(), (), target.size)
    runner = ModelRunner(small)
    bridged = passes._Bridged(runner, transform, how)
    fed, places, reaches = bridged.translated(texts, 2)
    state = passes._state(texts, CPU)
    by_pass = token_laws(runner, fed, places, state, transform, bridged.in_target)

    engine = engine_of(toy(target.size, 0), small, bridge=how, draws=0, ends=target.ends)
    draws = TextDraws(0, texts=[text.whole for text in texts])
    engine.drafter._sampler = Sampler(transform, draws)  # type: ignore[attr-defined]
    prompts = [text.prompt for text in texts]
    by_start = laws_by_start(engine.drafter, None, State(prompts, 12, CPU), answers, 2)
    for answer, of_pass, laws, reach_T in zip(answers, by_pass, by_start, reaches, strict=True):
        assert len(laws.reach) == len(reach_T) == len(answer)
        assert all(made == min(2, most) for made, most in zip(laws.reach, reach_T, strict=True))
        for start in range(len(answer)):
            assert laws.logprobs[start][0] == pytest.approx(of_pass[start].logprob, abs=1e-9)


# Greedy: real runs of the shipped pair.


@pytest.fixture(scope="module")
def greedy_texts() -> tuple[PairSpec, Any, list[TokenText], list[int | None]]:
    """What the shipped target writes, and how many tokens each text could get."""
    words = ["model=demo", "draft=none", "speculation=none", "sampling=greedy", "engine=eager", "out=null"]
    run = composed([*words, f"task.max_new_tokens={NEW}", "model.dtype=fp32"])
    spec = pair_specs(run, [], 1)[0]
    pair = PairSession(spec).load(len(TEXTS), 64)
    prompts = [Prompt(str(n), tuple(pair.tokens.encode(text))) for n, text in enumerate(TEXTS)]
    written = Run(pair.engine(0), pair.requests(prompts), pair.run_settings(len(TEXTS)))
    for _ in written.rounds():
        pass
    replies = [written.replies[number] for number in range(len(TEXTS))]
    texts = [
        TokenText(prompt, tuple(reply.token_ids)) for prompt, reply in zip(prompts, replies, strict=True)
    ]
    assert {reply.finish_reason for reply in replies} <= {"eos", "length"}
    return spec, pair.tokens, texts, [NEW] * len(texts)


def drafted_pair(*words: str) -> PairSpec:
    plain = ["model=demo", "model.dtype=fp32", "sampling=greedy", "engine=eager", "out=null"]
    return pair_specs(composed([*plain, f"task.max_new_tokens={NEW}", *words]), [], 1)[0]


DRAFTERS = {
    "model": ("draft=demo_draft", "draft.dtype=fp32"),
    "head": ("draft=demo_head", "draft.dtype=fp32"),
    "ngram": ("draft=none", "speculation=ngram"),
    "int4": ("draft=int4",),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_of_greedy_texts_are_those_of_real_runs(name: str, k: int, greedy_texts: Any) -> None:
    _, tokens, texts, rooms = greedy_texts
    words = (*DRAFTERS[name], f"speculation.k={k}")
    spec = drafted_pair(*words)
    target = target_laws(spec, tokens, texts, ALONE)
    laws = draft_laws(spec, tokens, texts, k, ALONE)

    for rule in ("token", "block"):
        pair = PairSession(drafted_pair(*words, f"speculation.verification={rule}")).load(len(texts), 64)
        counts = Counts()
        run = Run(
            pair.engine(0), pair.requests([text.prompt for text in texts]), pair.run_settings(8), counts
        )
        for _ in run.rounds():
            pass
        assert [tuple(run.replies[n].token_ids) for n in range(len(texts))] == [
            text.token_ids for text in texts
        ]

        found = [
            by_law(np.array([law.logprob for law in of_target]), of_draft, rule, k, room)
            for of_target, of_draft, room in zip(target, laws, rooms, strict=True)
        ]
        assert sum(one.rounds for one in found) == pytest.approx(counts.row_rounds)
        for place in range(k):
            assert sum(one.drafted[place] for one in found) == pytest.approx(counts.drafted[place])
            assert sum(one.accepted[place] for one in found) == pytest.approx(counts.accepted[place])
        assert counts.accepted.total() > 5, "nothing was accepted, so nothing is compared"
        assert counts.accepted.total() < counts.drafted.total() or name == "int4"


# The command.

PROMPTS = "task.prompts=[" + ",".join(json.dumps(text) for text in ("12 * 34 =", "def f(", "import os")) + "]"
WRITE = ("task=generate", PROMPTS, "task.max_new_tokens=12", "seed=3", "sampling=plain", "engine=eager")


def written(command: Command, *words: str) -> dict[str, Any]:
    answer = command(*WRITE, *words)
    assert (answer.code, answer.errors) == (0, [])
    return answer.document


def replay(command: Command, texts: object, *words: str) -> Answer:
    return command("task=measure", f"task.replay={texts}", "task.ks=[1,2]", *words)


def test_a_run_folder_is_replayed_for_several_drafts(command: Command) -> None:
    folder = written(command, "model=demo", "draft=none")["run_folder"]
    answer = replay(command, folder, "model=demo", "task.drafts=[demo_draft,demo_head,ngram,int4]")
    assert (answer.code, answer.errors) == (0, [])
    document = answer.document
    assert document["replay"]["drawn_from_target"] is True and document["replay"]["texts"] == 3
    assert document["replay"]["sampling"]["temperature"] == 1.0

    drafters = ["demo_draft", "demo_head", "ngram", "demo_int4"]
    assert [(one["drafter"], one["rule"]) for one in document["acceptance"]] == [
        (name, rule) for name in drafters for rule in ("block", "token")
    ]
    for one in document["acceptance"]:
        first, second = one["curve"]
        assert (
            0 < first["tokens_per_round_low"] <= first["tokens_per_round"] <= first["tokens_per_round_high"]
        )
        assert first["tokens_per_round"] <= 2 and second["tokens_per_round"] <= 3
        assert len(second["acceptance_by_position"]) == len(second["acceptance_by_position_low"]) == 2
    block, token = document["acceptance"][:2]
    assert block["curve"][1]["tokens_per_round"] > token["curve"][1]["tokens_per_round"] - 0.02
    assert {row["drafter"] for row in document["ranking"]} == set(drafters)
    assert "tokens a round, by the rule block" in answer.out and "demo_head" in answer.out
    assert (Path(document["run_folder"]) / "replayed.csv").is_file()


def test_a_ranking_is_also_for_a_cluster_that_is_named(command: Command) -> None:
    folder = written(command, "model=demo", "draft=none")["run_folder"]
    words = ("model=demo", "task.drafts=[demo_draft,ngram]", "cluster=a10")
    ranking = replay(command, folder, *words).document["ranking"]
    assert {row["cluster"] for row in ranking} == {"this machine", "a10"}
    assert {row["k"] for row in ranking} <= {0, 1, 2}


def test_control_texts_of_another_model_are_noticed(
    command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("model=demo_draft", "draft=none", "task.max_new_tokens=256")
    folder = written(command, *words)["run_folder"]
    answer = replay(command, folder, "model=demo", "task.drafts=[demo_draft]")
    assert answer.code == 0
    assert answer.document["replay"]["drawn_from_target"] is False
    assert "not this target's under these settings" in caplog.text and "demo_draft's" in caplog.text
    assert "NOT this target's" in answer.out
    made = answer.document["run_folder"]
    plan = command("task=plan", "model=demo", "draft=demo_draft", f"task.acceptance_from={made}")
    assert plan.code == 3 and "not drawn from this target" in plan.errors[0]


def test_a_run_s_texts_keep_the_settings_of_the_run(command: Command) -> None:
    folder = written(command, "model=demo", "draft=none")["run_folder"]
    answer = replay(command, folder, "model=demo", "task.drafts=[ngram]", "sampling.temperature=0.5")
    assert answer.code == 3
    assert "drawn by other settings" in answer.errors[0] and "temperature=0.5" in answer.errors[0]
    same = replay(command, folder, "model=demo", "task.drafts=[ngram]", "sampling.temperature=1.0")
    assert same.code == 0


def test_control_texts_of_another_temperature_are_noticed(command: Command) -> None:
    folder = written(
        command, "model=demo", "draft=none", "sampling.temperature=0.3", "task.max_new_tokens=48"
    )
    lines = [
        {
            "id": one["id"],
            "prompt": one["prompt"],
            "token_ids": one["token_ids"],
            "sampling": {"temperature": 1.0},
        }
        for one in folder["outputs"]
    ]
    texts = Path("texts.jsonl")
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = replay(command, texts, "model=demo", "task.drafts=[ngram]").document["replay"]
    assert about["drawn_from_target"] is False and about["standard_errors"] > 5


def test_whose_texts_are_is_said_by_a_standard_normal_number() -> None:
    """Texts drawn from laws by chance: the number is small. Control: always the likeliest token."""
    generator = torch.Generator().manual_seed(1)
    probs_NV = torch.rand(2000, 50, generator=generator).pow(4)
    probs_NV /= probs_NV.sum(1, keepdim=True)
    drawn_N = torch.multinomial(probs_NV, 1, generator=generator)[:, 0]
    assert origin([_laws(probs_NV, drawn_N)])["drawn_from_target"]
    likeliest = origin([_laws(probs_NV, probs_NV.argmax(1))])
    assert not likeliest["drawn_from_target"] and likeliest["standard_errors"] > 5


def never(*_: Any) -> None:
    raise AssertionError("the target is read")


def test_log_probabilities_that_are_given_take_the_targets_place(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is not read; the figures are those of a replay that reads it."""
    words = ("task.logprobs=0", "model=demo", "draft=none", "model.dtype=fp32")
    folder = Path(written(command, *words)["run_folder"])
    with monkeypatch.context() as patch:
        patch.setattr("llama_ssp.tasks.replay.target_laws", never)
        given = replay(command, folder, "model=demo", "task.drafts=[demo_draft]").document
    summary = json.loads((folder / "summary.json").read_text())
    for output in summary["outputs"]:
        del output["logprobs"]
    (folder / "summary.json").write_text(json.dumps(summary))
    read = replay(command, folder, "model=demo", "model.dtype=fp32", "task.drafts=[demo_draft]").document

    assert given["replay"]["drawn_from_target"] is None and read["replay"]["drawn_from_target"] is True
    for one, other in zip(given["acceptance"], read["acceptance"], strict=True):
        for point, same in zip(one["curve"], other["curve"], strict=True):
            assert point["tokens_per_round"] == pytest.approx(same["tokens_per_round"], abs=1e-4)


def test_answers_of_a_job_are_replayed(command: Command) -> None:
    Path("in.jsonl").write_text('{"id": "a", "prompt": "12 * 34 ="}\n{"id": "b", "prompt": "def f("}\n')
    words = ("task=batch", "task.input=in.jsonl", "task.output=out.jsonl", "task.max_new_tokens=8", "seed=1")
    batch = command(*words, "model=demo", "draft=demo_draft", "sampling=plain", "speculation.k=2").document
    by_folder = replay(command, batch["run_folder"], "model=demo", "task.drafts=[demo_draft]").document
    by_file = replay(
        command, "out.jsonl", "model=demo", "task.drafts=[demo_draft]", "sampling=plain"
    ).document
    assert by_folder["acceptance"][0]["curve"] == by_file["acceptance"][0]["curve"]
    assert batch["acceptance"][0]["curve"][1]["k"] == 2


def test_an_answer_says_settings_of_its_own(command: Command) -> None:
    """And a replay refuses texts of several settings."""
    lines = ({"id": "a", "prompt": "12 * 34 ="}, {"id": "b", "prompt": "def f(", "temperature": 0.5})
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("task=batch", "task.input=in.jsonl", "task.output=out.jsonl", "task.max_new_tokens=8", "seed=1")
    assert command(*words, "model=demo", "draft=none", "sampling=plain").code == 0
    first, second = (json.loads(line) for line in Path("out.jsonl").read_text().splitlines())
    assert "sampling" not in first and second["sampling"]["temperature"] == 0.5
    answer = replay(command, "out.jsonl", "model=demo", "task.drafts=[ngram]", "sampling=plain")
    assert (
        answer.code == 3
        and "out.jsonl line 2" in answer.errors[0]
        and "temperature 1.0 and 0.5" in answer.errors[0]
    )


# Plans.


def test_a_plan_goes_by_what_a_replay_has_measured(command: Command) -> None:
    folder = written(command, "model=demo", "draft=none")["run_folder"]
    words = ("model=demo", "task.drafts=[demo_draft]", "task.ks=[1,2,5]")
    measured = command("task=measure", f"task.replay={folder}", *words).document
    plan_of = ("task=plan", "model=demo", "draft=demo_draft", "cluster=a10")
    plan = command(*plan_of, f"task.acceptance_from={measured['run_folder']}")
    assert (plan.code, plan.errors) == (0, [])
    curve = [1.0, *(point["tokens_per_round"] for point in measured["acceptance"][0]["curve"])]
    assert plan.document["workload"]["acceptance_from"] == measured["run_folder"]
    assert plan.document["workload"]["acceptance"] == pytest.approx(curve[1] - 1)
    assert measured["run_folder"] in plan.out

    # Control: a plan with the first draft's acceptance as one number gives another time.
    by_curve = command(*plan_of, f"task.acceptance_from={measured['run_folder']}", "speculation.k=5").document
    by_number = command(*plan_of, f"task.acceptance={curve[1] - 1}", "speculation.k=5").document
    times = [one["best"]["ms_per_token"] for one in (by_curve, by_number)]
    geometric = sum((curve[1] - 1) ** i for i in range(6))
    assert times[0] * curve[5] == pytest.approx(times[1] * geometric) and curve[5] != pytest.approx(geometric)
    assert 0 <= plan.document["best"]["k"] <= 5


# What cannot be replayed.

GOOD: dict[str, Any] = {
    "id": "a",
    "prompt_token_ids": [1, 2],
    "token_ids": [3, 4, 5],
    "logprobs": [-0.5, -1.0, 0.0],
    "finish_reason": "length",
    "sampling": {"temperature": 1.0},
}
WITHOUT: dict[str, Any] = {}  # of a key: it is left out
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"token_ids": []}, "has no tokens"),
    "no token ids": ({"token_ids": WITHOUT}, "has no token_ids"),
    "a token that is no number": ({"token_ids": [3, "4", 5]}, r"token_ids\[1\]"),
    "a token below 0": ({"token_ids": [3, 4, -5]}, r"token_ids\[2\]"),
    "a token outside the vocabulary": ({"token_ids": [3, 999999, 5]}, r"token_ids\[1\].*below"),
    "a prompt outside the vocabulary": ({"prompt_token_ids": [999999]}, "does not know"),
    "no prompt": ({"prompt_token_ids": WITHOUT}, "has no prompt"),
    "cut": ({"output_tokens": 4}, "is cut"),
    "too few log-probabilities": ({"logprobs": [-0.5, -1.0]}, "2 of 3"),
    "a log-probability above 0": ({"logprobs": [-0.5, 0.1, -1.0]}, r"logprobs\[1\]"),
    "no log-probability": ({"logprobs": [-0.5, None, -1.0]}, r"logprobs\[1\]"),
    "one of another token": (
        {"logprobs": [{"token_id": token, "logprob": -1.0} for token in (3, 9, 5)]}, r"logprobs\[1\]"
    ),
    "an unknown end": ({"finish_reason": "tired"}, "finish_reason"),
    "an error": ({"error": {"code": 500}}, "is an error"),
    "OpenAI's format": ({"custom_id": "a"}, "OpenAI"),
    "no settings": ({"sampling": WITHOUT}, "settings of the text are not known"),
    "a misspelt setting": ({"sampling": {"temprature": 1.0}}, "did you mean temperature"),
    "a wrong setting": ({"sampling": {"top_p": 2.0}}, "sampling setting is wrong"),
    "settings that are no object": ({"sampling": 0.7}, "no object"),
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("name", BAD)
def test_a_record_that_cannot_be_replayed_is_refused_by_its_line(name: str, command: Command) -> None:
    change, said = BAD[name]
    record = {key: value for key, value in {**GOOD, **change}.items() if value is not WITHOUT}
    good = {**GOOD, "id": "b"}
    Path("texts.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(record)}\n")
    answer = replay(command, "texts.jsonl", "task.drafts=[ngram]")
    assert answer.code == 3 and len(answer.errors) == 1
    assert "texts.jsonl line 2" in answer.errors[0]
    assert re.search(said, answer.errors[0]), answer.errors[0]

    skipping = replay(command, "texts.jsonl", "task.drafts=[ngram]", "task.on_bad_row=skip")
    assert skipping.code == 0 and skipping.document["rows_skipped"] == 1


@pytest.mark.parametrize("number", ["NaN", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(number: str, command: Command) -> None:
    line = json.dumps(GOOD).replace("-0.5", number)
    Path("texts.jsonl").write_text(line + "\n")
    answer = replay(command, "texts.jsonl", "task.drafts=[ngram]")
    assert answer.code == 3 and "texts.jsonl line 1" in answer.errors[0]


def test_a_text_that_is_cut_inside_a_record_is_refused(command: Command) -> None:
    lines = f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, 'id': 'b'})[:60]}"
    Path("texts.jsonl").write_text(lines)
    answer = replay(command, "texts.jsonl", "task.drafts=[ngram]")
    assert answer.code == 3 and "texts.jsonl line 2" in answer.errors[0] and "not JSON" in answer.errors[0]


def test_what_is_no_source_of_texts_is_refused(command: Command) -> None:
    Path("empty").mkdir()
    for place in ("empty", "nowhere.jsonl"):
        answer = replay(command, place, "task.drafts=[ngram]")
        assert answer.code == 3 and "does not exist" in answer.errors[0]
    made = command("task=plan").document["run_folder"]
    answer = replay(command, made, "task.drafts=[ngram]")
    assert answer.code == 3 and "no texts to replay" in answer.errors[0]


def test_settings_that_contradict_a_replay_are_refused(command: Command) -> None:
    Path("texts.jsonl").write_text(json.dumps(GOOD) + "\n")
    for words, said in (
        (("task.drafts=[ngram]",), "task.drafts is for a replay"),
        (("task.replay=texts.jsonl", "task.pairs=[tiny/tiny_draft]"), "task.pairs is not for a replay"),
        (("task.replay=texts.jsonl", "draft=none"), "nothing drafts"),
        (("task.replay=texts.jsonl", "task.drafts=[none]"), "nothing that drafts"),
        (("task.replay=texts.jsonl", "task.drafts=[demo_drft]"), "demo_draft"),
        (("task.replay=texts.jsonl", "ranks=2"), "one process"),
        (("task.replay=texts.jsonl", 'task.prompts=["a"]'), "both"),
    ):
        answer = command("task=measure", *words)
        assert answer.code == 2 and said in answer.errors[0], (words, answer.err)
