"""Log-probabilities are the target's own: those of one plain forward over the whole text."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp import SamplingConfig, load_pair
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.speculative.draft_length import AdaptiveDraftLength, Costs, FixedDraftLength
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.generate import Limits, generate
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.state import Prompt, State
from llama_ssp.speculative.verification import RULES
from llama_ssp.text.logprobs import TokenLogprob, completions
from tests.conftest import Command
from tests.families import VOCAB, build, decoder_of, ragged_prompts
from tests.proofs.toy import toy
from tests.rig import engine_of, perturbed, steps_of
from tests.test_bridged import PROMPTS as BRIDGED
from tests.tongues import PAIRS, bridge
from tests.warm import LAUNCH, Started, python

NEAR, NEAR_64 = 1e-5, 1e-10
TOP = 3
SAMPLED = SamplingConfig(temperature=0.8, top_k=20, repetition_penalty=1.2)
PROMPTS = ragged_prompts(9, 1, 5)
KINDS = ("drafted", "corrected", "bonus")


@cache
def models(dtype: torch.dtype = torch.float64) -> tuple[CausalModel, CausalModel]:
    """A pair; what differs in fp64 is no rounding."""

    def one() -> Any:
        return build("llama-gqa", dtype=dtype, mild=dtype is torch.float32)

    return CausalModel(one(), "target"), CausalModel(perturbed(one(), 0.05), "draft")


def reading(*pair: Any, sampling: SamplingConfig = SAMPLED, reader: Any = None, **how: Any) -> Engine:
    """The engine of the pair in fp64, or of another one, which keeps log-probabilities."""
    engine = engine_of(*(pair or models()), sampling=sampling, **how)
    engine.logprobs = reader or LogprobReader(TOP)
    return engine


def written(engine: Engine, prompts: list[Prompt], drafting: Any, new: int = 24, end: int = -1) -> Any:
    """The state, and how many tokens there were of each origin."""
    state, steps = steps_of(engine, prompts, new, drafting, frozenset({end}))
    return state, Counter(
        row.origin(i) for step in steps for row in step.rows for i in range(len(row.tokens))
    )


def off(state: State, target: CausalModel, vocab: int, shift: int = 0) -> float:
    """The largest difference of log-probabilities, and alternatives, from a forward's without a cache."""
    worst = 0.0
    for row in range(state.rows):
        text, found, first = state.texts[row], state.logprobs[row], state.prompt_lengths[row]
        with torch.inference_mode():
            logit_SV = target.module(input_ids=torch.tensor([text]), use_cache=False).logits[0, :, :vocab]
        logprob_SV: Tensor = logit_SV.double().log_softmax(-1)
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
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafting", ["none", "model", "adaptive", "ngram"])
def test_they_are_a_plain_forward_s(drafting: str, rule: str) -> None:
    """At accepted drafts, corrections and bonus tokens, in rows of different lengths, cut by an end."""
    target, draft = models()
    adaptive = AdaptiveDraftLength(Costs.of_ratio(0.1, 6), len(PROMPTS))
    drafter, k = {
        "none": (None, 0), "model": (draft, 4), "adaptive": (draft, adaptive), "ngram": ("ngram", 4),
    }[drafting]  # fmt: skip
    engine = reading(target, drafter, rule=rule, ends=(11,), draws=1)
    state, origins = written(engine, PROMPTS, k, end=11)
    assert off(state, target, target.vocab) < NEAR_64 < off(state, target, target.vocab, shift=-1)
    if drafting == "model":
        assert min(origins[name] for name in KINDS) > 0
        assert off(state, draft, target.vocab) > NEAR  # the draft's own would be others


def test_in_single_precision() -> None:
    target, draft = models(torch.float32)
    state, origins = written(reading(target, draft, sampling=SamplingConfig(), draws=1), PROMPTS, 4)
    assert min(origins[name] for name in KINDS) > 0
    assert off(state, target, target.vocab) < NEAR < off(state, target, target.vocab, shift=-1)


def test_of_a_draft_of_another_vocabulary() -> None:
    name = "overlapping"
    target, draft = (toy(vocabulary.size, seed) for seed, vocabulary in enumerate(PAIRS[name]))
    engine = reading(target, draft, sampling=SamplingConfig(), bridge=bridge(name), draws=3)
    state, origins = written(engine, BRIDGED, 3, new=12)
    assert origins["drafted"] > 0
    assert off(state, target, target.vocab) < NEAR < off(state, target, target.vocab, shift=-1)


def test_a_refilled_row_has_those_of_its_own_text() -> None:
    """One row answers all prompts: nothing is left of the text before."""
    engine = reading(draws=4)
    state, _ = written(engine, PROMPTS[:1], 3, new=9)
    for prompt in PROMPTS[1:]:
        engine.admit(state, {0: prompt})
        list(generate(engine, state, Limits(9), FixedDraftLength(3, 1)))
        assert len(state.logprobs[0]) == 9 and off(state, models()[0], VOCAB) < NEAR_64, prompt


@pytest.mark.parametrize("same", [1, 5, 11])
def test_a_text_that_parts_from_the_one_before_it_reads_no_stale_keys(same: int) -> None:
    """Of the cache stays what both texts begin with, without its last token: not one token more."""
    engine = reading(draws=5)
    state = engine.prefill(PROMPTS[:1], 60)
    list(generate(engine, state, Limits(9), FixedDraftLength(3, 1)))
    first = state.texts[0]
    other = Prompt("other", (*first[:same], *((token + 1) % VOCAB for token in first[same:])))
    assert engine.admit(state, {0: other}, reuse=True) == same - 1
    list(generate(engine, state, Limits(9), FixedDraftLength(3, 1)))
    assert off(state, models()[0], VOCAB) < NEAR_64


def test_padding_of_the_vocabulary_takes_no_part() -> None:
    """The model has more logits than the tokenizer has tokens, as most published ones have."""
    target, tokens = models()[0], VOCAB - 10
    engine = reading(vocab=tokens, draws=6)
    prompts = [Prompt(p.id, tuple(token % tokens for token in p.token_ids)) for p in PROMPTS]
    state, origins = written(engine, prompts, 4)
    assert origins["drafted"] and off(state, target, tokens) < NEAR_64 < off(state, target, VOCAB)
    texts = [Prompt("x", tuple(text)) for text in state.texts]
    for row, scores in enumerate(engine.score(texts, LogprobReader(TOP))):
        state.logprobs[row] = scores[state.prompt_lengths[row] :]
    assert off(state, target, tokens) < NEAR_64


def test_as_sampled_they_are_of_the_distribution_that_was_sampled() -> None:
    """After temperature, filters and penalties; what a filter has dropped is not listed."""
    target, _ = models()
    engine = reading(reader=LogprobReader(VOCAB, sampled=True), draws=2)
    state, _ = written(engine, PROMPTS[:1], 3, new=12)
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
@pytest.mark.parametrize("kind", ["module", "decoder"])
def test_given_texts(numbers: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder reads its texts in one pass, and makes logits of a part at a time."""
    monkeypatch.setattr("llama_ssp.speculative.logprobs.NUMBERS", numbers)
    target, _ = models(torch.float64 if kind == "module" else torch.float32)
    near = NEAR_64 if kind == "module" else NEAR
    decoder = DecoderModel(decoder_of(target.module), target.module.config, "target")
    engine = reading(target if kind == "module" else decoder, None, sampling=SamplingConfig())
    for prompt, scores in zip(PROMPTS, engine.score(PROMPTS, LogprobReader(TOP)), strict=True):
        text = list(prompt.token_ids)
        state = State([Prompt("x", tuple(text[:1]))], len(text), torch.device("cpu"))
        state.append({0: text[1:]})
        state.logprobs = [scores[1:]]
        assert scores[0].logprob is None and off(state, target, VOCAB) < near
    assert engine.target.forwards == (1 if kind == "decoder" or numbers > 4 * VOCAB else 8)


# Of one context: some differ in their last token alone, and some begin another.
CONTINUATIONS = [
    [(5,), (6,), (7,)],
    [(5, 6), (5, 9), (8,), (5, 6, 7, 8, 9)],
    [(3, 4), (3, 4, 5)],
]


@pytest.mark.parametrize("numbers", [2**24, 2 * len(PROMPTS) * VOCAB], ids=["whole", "in parts"])
@pytest.mark.parametrize("kind", ["module", "decoder"])
def test_continuations_have_those_of_whole_texts(
    numbers: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context is read once, and each stem once: continuations that differ at the end alone share a pass."""
    monkeypatch.setattr("llama_ssp.speculative.logprobs.NUMBERS", numbers)
    target, _ = models(torch.float64 if kind == "module" else torch.float32)
    near = NEAR_64 if kind == "module" else NEAR
    decoder = DecoderModel(decoder_of(target.module), target.module.config, "target")
    model = target if kind == "module" else decoder

    engine = reading(model, None, sampling=SamplingConfig())
    contexts = [Prompt(prompt.id, prompt.token_ids) for prompt in PROMPTS]
    found = engine.score_continuations(contexts, CONTINUATIONS, LogprobReader(TOP))
    if numbers == 2**24:
        assert engine.target.forwards == 1 + 3, "the contexts, and three stems of the second one"

    whole = reading(model, None, sampling=SamplingConfig())
    for context, wanted, by_ids in zip(contexts, CONTINUATIONS, found, strict=True):
        assert set(by_ids) == set(wanted)
        texts = [Prompt(str(n), (*context.token_ids, *ids)) for n, ids in enumerate(wanted)]
        for ids, scores in zip(wanted, whole.score(texts, LogprobReader(TOP)), strict=True):
            for one, other in zip(by_ids[ids], scores[len(context.token_ids) :], strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=near)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(("kind", "forwards"), [("module", 2), ("decoder", 1)])
def test_continuations_of_one_token_are_read_where_their_context_ends(kind: str, forwards: int) -> None:
    """In one pass, where the model gives the logits of each row's last token; the rows differ in length."""
    target, _ = models(torch.float32)
    decoder = DecoderModel(decoder_of(target.module), target.module.config, "target")
    engine = reading(target if kind == "module" else decoder, None, sampling=SamplingConfig())
    wanted = [[(5,), (6,)], [(7,)], [(5,), (8,), (9,)]]
    found = engine.score_continuations(PROMPTS, wanted, LogprobReader(TOP))
    assert engine.target.forwards == forwards
    for prompt, of_prompt, by_ids in zip(PROMPTS, wanted, found, strict=True):
        assert set(by_ids) == set(of_prompt)
        texts = [Prompt(str(n), (*prompt.token_ids, *ids)) for n, ids in enumerate(of_prompt)]
        for ids, scores in zip(of_prompt, engine.score(texts, LogprobReader(TOP)), strict=True):
            (one,) = by_ids[ids]
            assert one.token_id == scores[-1].token_id
            assert one.logprob == pytest.approx(scores[-1].logprob, abs=NEAR)


TEXTS = ["hello", "a longer prompt", "x"]
FP32 = ("model.dtype=fp32", "draft.dtype=fp32")
SMALL = (*FP32, "seed=3", "task.max_new_tokens=10", "out=null")


def told(token: Any) -> tuple[int, float | None]:
    """The id and the log-probability of a token of the API, of a JSON document, or of a pair."""
    if isinstance(token, dict):
        return token["token_id"], token["logprob"]
    return (token.token_id, token.logprob) if isinstance(token, TokenLogprob) else tuple(token)


def alike(found: Any, expected: Any) -> None:
    """The same tokens, with log-probabilities that differ by rounding only, or that both lack."""
    for one, other in zip(map(told, found), map(told, expected), strict=True):
        assert one[0] == other[0] and (one[1] is None) == (other[1] is None)
        assert one[1] is None or one[1] == pytest.approx(other[1], abs=NEAR)


def scored(pair: Any, found: Any, **how: Any) -> Any:
    """What the pair says of whole texts, given their continuations."""
    texts = [[*text.encode(), *one.token_ids] for text, one in zip(TEXTS, found, strict=True)]
    return pair.score(texts, **how)


HOW: dict[str, Any] = {"max_new_tokens": 10, "seed": 3}


@dataclass(frozen=True)
class FromPython:
    """What the API gives for TEXTS: without and with log-probabilities, and the whole texts scored."""

    bare: list[Any]
    texts: list[Any]
    whole: list[Any]
    streamed: list[list[TokenLogprob]]
    sampled: Any  # those of the distribution that was sampled from, which allows one token


@pytest.fixture(scope="module")
def from_python() -> FromPython:
    with load_pair("tiny", draft="tiny_draft", batch_size=2, overrides=FP32) as pair:
        bare, texts = pair.generate(TEXTS, **HOW), pair.generate(TEXTS, **HOW, logprobs=2)
        whole = scored(pair, texts, top=2)
        streamed: list[list[TokenLogprob]] = [[] for _ in TEXTS]
        for rows in pair.stream(TEXTS, **HOW, logprobs=2):
            for row in rows:
                streamed[row.index] += row.logprobs or []
        certain = {"logprobs": 0, "logprobs_of": "sampled", "sampling": SamplingConfig(top_k=1)}
        (sampled,) = pair.generate(TEXTS[:1], **HOW, **certain)
    return FromPython(bare=bare, texts=texts, whole=whole, streamed=streamed, sampled=sampled)


def test_asking_for_log_probabilities_changes_no_token(from_python: FromPython) -> None:
    for text, plain in zip(from_python.texts, from_python.bare, strict=True):
        assert text.token_ids == plain.token_ids and plain.logprobs is None and text.logprobs
    assert sum(text.accepted for text in from_python.texts) > 0


def test_a_continuation_has_those_of_the_whole_text_when_it_is_scored(from_python: FromPython) -> None:
    for text, score in zip(from_python.texts, from_python.whole, strict=True):
        assert score.logprobs[0].logprob is None and math.isfinite(score.total)
        alike(text.logprobs, score.logprobs[-len(text.token_ids) :])
        assert all(len(token.top) == 2 for token in text.logprobs)


def test_a_stream_has_those_of_the_texts(from_python: FromPython) -> None:
    assert from_python.streamed == [text.logprobs for text in from_python.texts]


def test_those_of_the_sampled_distribution_tell_what_it_allows(from_python: FromPython) -> None:
    assert [token.logprob for token in from_python.sampled.logprobs or []] == [0.0] * 10


def test_the_command_gives_those_of_the_api(command: Command, from_python: FromPython) -> None:
    prompts = f"task.prompts={json.dumps(TEXTS)}"
    asked = command(*SMALL, prompts, "output=jsonl", "task.batch_size=2", "task.logprobs=2", "task.echo=true")
    lines = {line["id"]: line for line in map(json.loads, asked.out.splitlines())}
    assert sorted(lines) == ["0", "1", "2"]
    for n, score in enumerate(from_python.whole):
        line = lines[str(n)]
        alike([*line["prompt_logprobs"], *line["logprobs"]], score.logprobs)
        assert all(len(one["top_logprobs"]) == 2 for one in line["logprobs"]), n


def test_the_command_scores_a_prompt_alone(command: Command) -> None:
    nothing = "prompt=hello", "task.max_new_tokens=0", "task.logprobs=0", "task.echo=true"
    only = command(*FP32, "seed=3", "out=null", *nothing)
    assert only.code == 0 and "0: 4 tokens, log-probability -" in only.out


def test_limits_of_new_tokens_do_not_bind_what_generates_nothing(command: Command) -> None:
    """The tiny model has a context of 1024 tokens; the last token of a text is not read."""
    words = ("task.max_new_tokens=0", "task.echo=true", "task.logprobs=0", "sampling.min_new_tokens=5")
    found = command(f"prompt={'a' * 1025}", *words, "draft=none", "output=json").document
    assert len(found["outputs"][0]["prompt_logprobs"]) == 1025


def test_of_a_batch(command: Command) -> None:
    """In OpenAI's fields; a job that was interrupted gives the same."""
    asked: list[dict[str, Any]] = [
        {"max_tokens": 3, "logprobs": 2, "echo": True},
        {"max_tokens": 0, "logprobs": 1, "echo": True},
        {"max_tokens": 3},
    ]
    lines = [{"id": "p", "prompt": "hello", "logprobs": 1, "echo": True}]
    for n, body in enumerate(asked):
        lines.append({"custom_id": f"{n}", "url": "/v1/completions", "body": {"prompt": "hello", **body}})
    lines += [{"id": f"b{n}", "prompt": "hello", "logprobs": 1} for n in range(3)]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = ("task=batch", "task.input=in.jsonl", *SMALL, "task.batch_size=2")
    assert command(*job, "task.output=out.jsonl").code == 0
    first, *others = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    choices = [one["response"]["body"]["choices"][0] for one in others[:3]]
    assert [len(first["logprobs"]), len(first["prompt_logprobs"])] == [10, 5]
    assert [len(one["logprobs"]) for one in others[3:]] == [10] * 3  # the last takes another's row
    assert choices[0]["text"].startswith("hello") and choices[1]["text"] == "hello"
    assert choices[2]["logprobs"] is None
    echoed = choices[0]["logprobs"]
    assert echoed["text_offset"][:6] == [0, 1, 2, 3, 4, 5] and len(echoed["tokens"]) == 5 + 3
    assert echoed["token_logprobs"][0] is None and echoed["top_logprobs"][0] is None
    assert choices[1]["logprobs"]["token_logprobs"] == echoed["token_logprobs"][:5]
    alike(first["prompt_logprobs"], list(zip(b"hello", echoed["token_logprobs"], strict=False)))
    with load_pair("tiny", draft="tiny_draft", overrides=FP32) as pair:
        (whole,) = pair.score(["hello"])
    alike(first["prompt_logprobs"], whole.logprobs)


def answered(command: Command, records: list[dict[str, Any]], *words: str) -> list[dict[str, Any]]:
    """Returns the answers to these records; K is fixed, as measuring costs takes longer than writing them."""
    Path("in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    job = "task=batch", "task.input=in.jsonl", "task.output=out.jsonl", *SMALL, "speculation.k=4"
    assert command(*job, *words).code == 0
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_a_record_has_as_many_alternatives_as_it_asks_for(command: Command) -> None:
    """Whatever the records ask for that are written together with it."""
    asked = [0, 5, 2]
    records = [{"id": f"{n}", "prompt": "hello", "max_tokens": 3, "logprobs": n} for n in asked]
    for answer in answered(command, records, "task.batch_size=3"):
        given = [len(token["top_logprobs"]) for token in answer["logprobs"]]
        assert given == [int(answer["id"])] * 3, answer["id"]


def test_of_a_record_that_asks_for_none_none_are_computed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the text before it in its row had some: they cost each round a copy to the host."""
    whole, computed = LogprobReader.read, list[int]()

    def counted(self: LogprobReader, *given: Any) -> list[list[Any]]:
        result = whole(self, *given)
        computed.append(sum(map(len, result)))
        return result

    monkeypatch.setattr(LogprobReader, "read", counted)
    longest_first = [
        {"id": "asks", "prompt": "hello", "max_tokens": 9, "logprobs": 5},
        {"id": "does not", "prompt": "hello", "max_tokens": 3},
    ]
    answered(command, longest_first, "task.batch_size=1")
    assert sum(computed) == 9


def test_offsets_are_of_the_text() -> None:
    """Special tokens take no room; a space that a tokenizer puts before a text does not count."""
    pieces = ("<s>", None), (" the", b" the"), ("\ufffd", b"\xc3"), ("\ufffd", b"\xa9"), ("!", b"!")
    found = [TokenLogprob(n, *piece, None if n == 0 else -1.0) for n, piece in enumerate(pieces)]
    assert completions(found, "the\u00e9!")["text_offset"] == [0, 0, 3, 3, 4]


@pytest.mark.slow
def test_over_ranks(tmp_path: Path) -> None:
    """The leader has those of one process, of given texts and of generated ones."""
    asked = "task.batch_size=2", "task.logprobs=1", "task.echo=true", "output=json"
    words = [str(LAUNCH), *SMALL, f"task.prompts={json.dumps(TEXTS)}", *asked]

    def told_in(document: str) -> list[Any]:
        return [[*one["prompt_logprobs"], *one["logprobs"]] for one in json.loads(document)["outputs"]]

    alone = told_in(python(words, tmp_path).out)
    said = Started(tmp_path, 2, *words[1:], "placement=leader").finish()
    assert [code for code, *_ in said] == [0, 0], said
    for mine, other in zip(told_in(said[0][1]), alone, strict=True):
        alike(mine, other)
