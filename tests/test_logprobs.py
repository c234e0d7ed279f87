"""Log-probabilities are the target's own: those of one plain forward over the whole text."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp import SamplingConfig, SpeculationConfig, load_pair
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, FixedDraftLength
from llama_ssp.speculative.drafters.local import Drafter, ModelDrafter
from llama_ssp.speculative.drafters.ngram import NgramDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.verification import RULES
from llama_ssp.text.logprobs import TokenLogprob, completions
from tests.conftest import Command
from tests.families import VOCAB, build
from tests.proofs.toy import toy
from tests.rig import perturbed
from tests.test_bridged import PROMPTS as BRIDGED
from tests.test_bridged import made
from tests.tongues import PAIRS
from tests.warm import python, ranks

NEAR = 1e-5
TOP = 3
SAMPLED = SamplingConfig(temperature=0.8, top_k=20, repetition_penalty=1.2)
PROMPTS = [Prompt(f"p{n}", tuple((7 * n + 3 * i) % (VOCAB - 3) + 3 for i in range(n))) for n in (9, 1, 5)]


NEAR_64 = 1e-10
Pair = tuple[CausalModel, CausalModel]


def made_pair(dtype: torch.dtype, mild: bool) -> Pair:
    def one() -> Any:
        return build("llama-gqa", dtype=dtype, mild=mild)

    return CausalModel(one(), "target"), CausalModel(perturbed(one(), 0.05), "draft")


@cache
def pair_64() -> Pair:
    """A pair in fp64: what differs there is no rounding."""
    return made_pair(torch.float64, mild=False)


@pytest.fixture(scope="module")
def models() -> Pair:
    return pair_64()


def plain(target: CausalModel, text: list[int], vocab: int) -> Tensor:
    """The target's log-probabilities behind each token of a text, by one forward without a cache."""
    with torch.inference_mode():
        logit_SV = target.module(input_ids=torch.tensor([text]), use_cache=False).logits[0, :, :vocab]
    return logit_SV.double().log_softmax(-1)


def written(engine: Engine, prompts: list[Prompt], lookahead: Any, limits: Limits) -> tuple[State, Counter]:
    engine.logprobs = LogprobReader(TOP)
    state, origins = engine.prefill(prompts, 24), Counter[str]()
    for step in generate(engine, state, limits, lookahead):
        origins.update(row.origin(i) for row in step.rows for i in range(len(row.tokens)))
    return state, origins


def off(state: State, target: CausalModel, vocab: int, shift: int = 0) -> float:
    """The largest difference of the state's log-probabilities, and alternatives, from a plain forward's."""
    worst = 0.0
    for row in range(state.rows):
        logprob_SV = plain(target, state.texts[row], vocab)
        found, first = state.logprobs[row], state.prompt_lengths[row]
        assert [one.token_id for one in found] == state.generated(row)
        for at, one in enumerate(found, start=first - 1 + shift):
            assert one.logprob is not None and len(one.top) == min(TOP, vocab)
            assert all(token < vocab for token, _ in one.top)
            pairs = [(one.token_id, one.logprob), *one.top]
            worst = max([worst, *(abs(value - float(logprob_SV[at, token])) for token, value in pairs)])
            best = zip(one.top, logprob_SV[at].topk(len(one.top)).values.tolist(), strict=True)
            worst = max([worst, *(abs(value - other) for (_, value), other in best)])
    return worst


@pytest.mark.few(4)
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("drafting", ["none", "model", "adaptive", "ngram"])
def test_they_are_a_plain_forward_s(drafting: str, rule: str, models: Any) -> None:
    """At accepted drafts, corrections and bonus tokens, in rows of different lengths, cut by an end."""
    target, draft = models
    transform, draws = SamplingTransform(SAMPLED, (11,), target.vocab), CounterDraws(1)
    drafter: Drafter = {
        "none": lambda: Drafter(),
        "model": lambda: ModelDrafter(ModelRunner(draft), transform, draws),
        "adaptive": lambda: ModelDrafter(ModelRunner(draft), transform, draws),
        "ngram": lambda: NgramDrafter(1, 4, target.vocab, target.dtype),
    }[drafting]()
    k = 0 if drafting == "none" else 4
    lookahead: Any = FixedDraftLength(k, len(PROMPTS))
    if drafting == "adaptive":
        lookahead = AdaptiveDraftLength(Costs.of_ratio(0.1, 6), len(PROMPTS))
    engine = Engine(ModelRunner(target), drafter, transform, RULES[rule], draws)
    state, origins = written(engine, PROMPTS, lookahead, Limits(24, frozenset({11})))
    assert off(state, target, target.vocab) < NEAR_64 < off(state, target, target.vocab, shift=-1)
    if drafting == "model":
        assert min(origins[name] for name in ("drafted", "corrected", "bonus")) > 0
        assert off(state, draft, target.vocab) > NEAR  # the draft's own would be others


def test_a_refilled_row_has_those_of_its_own_text() -> None:
    """One row answers all prompts: nothing is left of the text before."""
    target, draft = pair_64()
    transform, draws = SamplingTransform(SAMPLED, (), target.vocab), CounterDraws(4)
    drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    engine = Engine(ModelRunner(target), drafter, transform, RULES["block"], draws)
    state, _ = written(engine, PROMPTS[:1], FixedDraftLength(3, 1), Limits(9))
    for prompt in PROMPTS[1:]:
        engine.admit(state, 0, prompt)
        for _ in generate(engine, state, Limits(9), FixedDraftLength(3, 1)):
            pass
        assert len(state.logprobs[0]) == 9 and off(state, target, target.vocab) < NEAR_64


@pytest.mark.parametrize("same", [1, 5, 11])
def test_a_text_that_parts_from_the_one_before_it_reads_no_stale_keys(same: int) -> None:
    """Of the cache stays what both texts begin with, without its last token: not one token more."""
    target, draft = pair_64()
    transform, draws = SamplingTransform(SAMPLED, (), target.vocab), CounterDraws(5)
    drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    engine = Engine(ModelRunner(target), drafter, transform, RULES["block"], draws)
    engine.logprobs = LogprobReader(TOP)
    state = engine.prefill(PROMPTS[:1], 60)
    for _ in generate(engine, state, Limits(9), FixedDraftLength(3, 1)):
        pass
    first = state.texts[0]
    other = Prompt("other", (*first[:same], *((token + 1) % VOCAB for token in first[same:])))
    assert engine.go_on(state, other) == same - 1
    for _ in generate(engine, state, Limits(9), FixedDraftLength(3, 1)):
        pass
    assert off(state, target, target.vocab) < NEAR_64


def test_padding_of_the_vocabulary_takes_no_part() -> None:
    """The model has more logits than the tokenizer has tokens, as most published ones have."""
    target, draft = pair_64()
    tokens = VOCAB - 10
    transform, draws = SamplingTransform(SAMPLED, (), tokens), CounterDraws(6)
    drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    engine = Engine(ModelRunner(target), drafter, transform, RULES["block"], draws)
    prompts = [Prompt(p.id, tuple(token % tokens for token in p.token_ids)) for p in PROMPTS]
    state, origins = written(engine, prompts, FixedDraftLength(4, len(prompts)), Limits(24))
    assert origins["drafted"] and off(state, target, tokens) < NEAR_64 < off(state, target, VOCAB)
    texts = [Prompt("x", tuple(text)) for text in state.texts]
    for row, scores in enumerate(engine.score(texts, LogprobReader(TOP))):
        state.logprobs[row] = scores[state.prompt_lengths[row] :]
    assert off(state, target, tokens) < NEAR_64


def test_in_single_precision() -> None:
    target, draft = made_pair(torch.float32, mild=True)
    transform, draws = SamplingTransform(SamplingConfig(), (), target.vocab), CounterDraws(1)
    drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    engine = Engine(ModelRunner(target), drafter, transform, RULES["block"], draws)
    state, origins = written(engine, PROMPTS, FixedDraftLength(4, len(PROMPTS)), Limits(24))
    assert min(origins[name] for name in ("drafted", "corrected", "bonus")) > 0
    assert off(state, target, target.vocab) < NEAR < off(state, target, target.vocab, shift=-1)


def test_of_a_draft_of_another_vocabulary() -> None:
    name = "overlapping"
    target, draft = PAIRS[name]
    model = toy(target.size, 0)
    drafter, transform = made(name, toy(draft.size, 1), CounterDraws(3))
    engine = Engine(ModelRunner(model), drafter, transform, RULES["block"], CounterDraws(3))
    state, origins = written(engine, BRIDGED, FixedDraftLength(3, len(BRIDGED)), Limits(12))
    assert origins["drafted"] > 0
    assert off(state, model, target.size) < NEAR < off(state, model, target.size, shift=-1)


def test_as_sampled_they_are_of_the_distribution_that_was_sampled(models: Any) -> None:
    """After temperature, filters and penalties; what a filter has dropped is not listed."""
    target, draft = models
    transform, draws = SamplingTransform(SAMPLED, (), target.vocab), CounterDraws(2)
    drafter = ModelDrafter(ModelRunner(draft), transform, draws)
    engine = Engine(ModelRunner(target), drafter, transform, RULES["block"], draws)
    engine.logprobs = LogprobReader(VOCAB, sampled=True)
    state = engine.prefill(PROMPTS[:1], 12)
    for _ in generate(engine, state, Limits(12), FixedDraftLength(3, 1)):
        pass
    text, first = state.texts[0], state.prompt_lengths[0]
    for at, one in enumerate(state.logprobs[0], start=first):
        with torch.inference_mode():
            logits = target.module(input_ids=torch.tensor([text[:at]]), use_cache=False).logits[0, -1]
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[text[:at]] = True
        logits = torch.where(seen & (logits > 0), logits / 1.2, torch.where(seen, logits * 1.2, logits)) / 0.8
        kept = logits.topk(20)
        expected = dict(zip(kept.indices.tolist(), kept.values.log_softmax(-1).tolist(), strict=True))
        assert dict(one.top) == pytest.approx(expected, abs=NEAR)
        assert one.logprob == pytest.approx(expected[one.token_id], abs=NEAR)


@pytest.mark.parametrize("numbers", [2**24, 4 * VOCAB], ids=["whole", "in parts"])
def test_given_texts(numbers: int, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = models
    monkeypatch.setattr("llama_ssp.speculative.logprobs.NUMBERS", numbers)
    transform = SamplingTransform(SamplingConfig(), (), target.vocab)
    engine = Engine(ModelRunner(target), Drafter(), transform, RULES["block"], CounterDraws(0))
    found = engine.score(PROMPTS, LogprobReader(TOP))
    for prompt, scores in zip(PROMPTS, found, strict=True):
        text = list(prompt.token_ids)
        state = State([Prompt("x", tuple(text[:1]))], len(text), torch.device("cpu"))
        state.append(0, text[1:])
        state.logprobs = [scores[1:]]
        assert scores[0].logprob is None and off(state, target, target.vocab) < NEAR_64


TEXTS = ["hello", "a longer prompt", "x"]
FP32 = ("model.dtype=fp32", "draft.dtype=fp32")
SMALL = (*FP32, "seed=3", "task.max_new_tokens=10", "out=null")


def agree(found: list[Any], expected: list[Any]) -> None:
    """The same tokens, with log-probabilities that differ by rounding only."""
    assert [one["token_id"] for one in found] == [one["token_id"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=NEAR)


def test_of_the_command_and_the_api(command: Command) -> None:
    """A continuation's are those of the whole text when it is scored; asking for them changes no token."""
    with load_pair("tiny", draft="tiny_draft", batch_size=2, overrides=FP32) as pair:
        how = {"max_new_tokens": 10, "seed": 3}
        bare = pair.generate(TEXTS, **how)
        found = pair.generate(TEXTS, **how, logprobs=2)
        whole = pair.score(
            [[*text.encode(), *one.token_ids] for text, one in zip(TEXTS, found, strict=True)], top=2
        )
        streamed: dict[int, list[TokenLogprob]] = {n: [] for n in range(len(TEXTS))}
        for rows in pair.stream(TEXTS, **how, logprobs=2):
            for row in rows:
                streamed[row.index] += row.logprobs or []
        sampled = pair.generate(
            TEXTS[:1], **how, logprobs=0, logprobs_of="sampled", sampling=SamplingConfig(top_k=1)
        )
    for one, plain_one, score in zip(found, bare, whole, strict=True):
        assert one.token_ids == plain_one.token_ids and plain_one.logprobs is None and one.logprobs
        assert score.logprobs[0].logprob is None and math.isfinite(score.total)
        for mine, other in zip(one.logprobs, score.logprobs[-len(one.token_ids) :], strict=True):
            assert (mine.token_id, len(mine.top)) == (other.token_id, 2)
            assert mine.logprob == pytest.approx(other.logprob, abs=NEAR)
    assert [streamed[n] for n in streamed] == [one.logprobs for one in found]
    assert sum(one.accepted for one in found) > 0
    assert [one.logprob for one in sampled[0].logprobs or []] == [0.0] * 10

    asked = command(
        *SMALL,
        f"task.prompts={json.dumps(TEXTS)}",
        "output=jsonl",
        "task.batch_size=2",
        "task.logprobs=2",
        "task.echo=true",
    )
    lines = {line["id"]: line for line in map(json.loads, asked.out.splitlines())}
    assert sorted(lines) == ["0", "1", "2"]
    for n, score in enumerate(whole):
        told = lines[str(n)]
        given = [{"token_id": one.token_id, "logprob": one.logprob} for one in score.logprobs]
        agree([*told["prompt_logprobs"], *told["logprobs"]], given)
        assert all(len(one["top_logprobs"]) == 2 for one in told["logprobs"])
    only = command(
        *SMALL[:3],
        "out=null",
        "prompt=hello",
        "task.max_new_tokens=0",
        "task.logprobs=0",
        "task.echo=true",
    )
    assert only.code == 0 and "0: 4 tokens, log-probability -" in only.out


def test_what_generates_nothing_has_no_least_length_and_needs_no_room(command: Command) -> None:
    """The tiny model has a context of 1024 tokens; the last token of a text is not read."""
    line = {"prompt": "a" * 1025, "logprobs": 0, "echo": True, "max_new_tokens": 0, "min_new_tokens": 5}
    Path("in.jsonl").write_text(json.dumps(line), encoding="utf-8")
    assert command("task=batch", "task.input=in.jsonl", "task.output=out.jsonl", "draft=none").code == 0
    (scored,) = map(json.loads, Path("out.jsonl").read_text(encoding="utf-8").splitlines())
    assert len(scored["prompt_logprobs"]) == 1025
    words = ("task.max_new_tokens=0", "task.echo=true", "task.logprobs=0", "sampling.min_new_tokens=5")
    found = command(f"prompt={line['prompt']}", *words, "draft=none", "output=json").document
    assert len(found["outputs"][0]["prompt_logprobs"]) == 1025


def test_of_trees_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that was a sibling of a draft has the target's log-probability at its own place."""
    trees, read = SpeculationConfig(k=3, siblings=2), LogprobReader.read
    words = (*FP32, "speculation.siblings=2")

    def worst(pair: Any) -> float:
        found = pair.generate(TEXTS, max_new_tokens=16, seed=3, speculation=trees, logprobs=1)
        whole = pair.score([[*text.encode(), *one.token_ids] for text, one in zip(TEXTS, found, strict=True)])
        pairs = [
            (mine.logprob, other.logprob)
            for one, score in zip(found, whole, strict=True)
            for mine, other in zip(one.logprobs, score.logprobs[-len(one.token_ids) :], strict=True)
        ]
        return max(abs(one - other) for one, other in pairs)

    with load_pair("tiny", draft="tiny_draft", batch_size=3, overrides=words) as pair:
        assert worst(pair) < NEAR
        monkeypatch.setattr(LogprobReader, "read", lambda *given: read(*given[:5]))  # as if it were a chain
        assert worst(pair) > NEAR


def test_of_a_batch(command: Command) -> None:
    """In OpenAI's fields; a job that was interrupted gives the same."""
    plain_line = {"id": "p", "prompt": "hello", "logprobs": 1, "echo": True}
    body = {"prompt": "hello", "max_tokens": 3}
    both = {"custom_id": "c", "url": "/v1/completions", "body": {**body, "logprobs": 2, "echo": True}}
    score = {
        "custom_id": "s",
        "url": "/v1/completions",
        "body": {"prompt": "hello", "max_tokens": 0, "logprobs": 1, "echo": True},
    }
    none = {"custom_id": "n", "url": "/v1/completions", "body": body}
    bare = [{"id": f"b{n}", "prompt": "hello", "logprobs": 1} for n in range(3)]
    lines = [plain_line, both, score, none, *bare]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = ("task=batch", "task.input=in.jsonl", *SMALL, "task.batch_size=2")
    assert command(*job, "task.output=out.jsonl").code == 0
    told, *others = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    choices = [one["response"]["body"]["choices"][0] for one in others[:3]]
    assert [len(told["logprobs"]), len(told["prompt_logprobs"])] == [10, 5]
    assert [len(one["logprobs"]) for one in others[3:]] == [10] * 3  # the last takes another's row
    assert choices[0]["text"].startswith("hello") and choices[1]["text"] == "hello"
    assert choices[2]["logprobs"] is None
    echoed = choices[0]["logprobs"]
    assert echoed["text_offset"][:6] == [0, 1, 2, 3, 4, 5] and len(echoed["tokens"]) == 5 + 3
    assert echoed["token_logprobs"][0] is None and echoed["top_logprobs"][0] is None
    assert choices[1]["logprobs"]["token_logprobs"] == echoed["token_logprobs"][:5]
    agree(
        told["prompt_logprobs"],
        [{"token_id": i, "logprob": v} for i, v in zip(b"hello", echoed["token_logprobs"], strict=False)],
    )
    with load_pair("tiny", draft="tiny_draft", overrides=FP32) as pair:
        (whole,) = pair.score(["hello"])
    assert echoed["token_logprobs"][1:5] == pytest.approx(
        [one.logprob for one in whole.logprobs[1:]], abs=NEAR
    )


@pytest.mark.parametrize(
    ("url", "own", "says"),
    [
        ("completions", {"logprobs": 21}, "logprobs is out of range"),
        ("completions", {"logprobs": True}, "logprobs is out of range"),
        ("completions", {"echo": 1}, "echo is unusable"),
        ("completions", {"max_tokens": 0}, "max_new_tokens is out of range"),
        ("chat/completions", {"logprobs": 2}, "logprobs is unusable"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs is given without"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs is out of range"),
        ("chat/completions", {"echo": True}, "asks for echo"),
    ],
)
def test_refused_by_name(url: str, own: Any, says: str, command: Command) -> None:
    said = {"messages": [{"role": "user", "content": "x"}]} if "chat" in url else {"prompt": "x"}
    line = {"custom_id": "a", "url": f"/v1/{url}", "body": {**said, **own}}
    Path("in.jsonl").write_text(json.dumps(line) + "\n")
    answer = command("task=batch", "task.input=in.jsonl", "task.output=out.jsonl")
    assert answer.code == 3 and says in answer.errors[0]


def test_offsets_are_of_the_text() -> None:
    """Special tokens take no room; a space that a tokenizer puts before a text does not count."""
    pieces: list[tuple[str, bytes | None]] = [
        ("<s>", None),
        (" the", b" the"),
        ("\ufffd", b"\xc3"),
        ("\ufffd", b"\xa9"),
        ("!", b"!"),
    ]
    found = [TokenLogprob(n, *piece, None if n == 0 else -1.0) for n, piece in enumerate(pieces)]
    assert completions(found, "the\u00e9!")["text_offset"] == [0, 0, 3, 3, 4]


@pytest.mark.slow
def test_over_ranks(tmp_path: Path) -> None:
    """The leader has those of one process."""
    (tmp_path / "script.py").write_text(
        "import sys, json\n"
        "from llama_ssp import load_pair\n"
        "placement = ['placement=' + sys.argv[1]] if len(sys.argv) > 1 else []\n"
        f"overrides = [*{FP32!r}, *placement]\n"
        "with load_pair('tiny', draft='tiny_draft', batch_size=2, overrides=overrides) as pair:\n"
        f"    found = pair.generate({TEXTS!r}, max_new_tokens=8, seed=3, logprobs=1)\n"
        f"    scores = pair.score({TEXTS!r})\n"
        "if found:\n"
        "    rows = [one.logprobs for one in [*found, *scores]]\n"
        "    print(json.dumps([[[token.token_id, token.logprob] for token in row] for row in rows]))\n",
        encoding="utf-8",
    )

    alone = json.loads(python(["script.py"], tmp_path).stdout)
    for placement in ("leader", "own"):
        said = ranks(2, ["script.py", placement], tmp_path)
        assert [code for code, _, _ in said] == [0, 0], said
        for mine, other in zip(json.loads(said[0][1]), alone, strict=True):
            assert [token for token, _ in mine] == [token for token, _ in other]
            assert [v for _, v in mine if v is not None] == pytest.approx(
                [v for _, v in other if v is not None], abs=NEAR
            )
