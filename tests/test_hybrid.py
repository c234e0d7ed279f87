"""Targets and drafts with recurrent states: texts, refills, chats and log-probabilities are transformers'.

The layers themselves are compared in test_decoder.py and test_delta.py, the distribution of texts in
proofs/test_loop_exact.py.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import Dtype, PlacementConf, Splitting
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.placement import resolve
from llama_ssp.errors import ModelError
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.graph_sizes import rewinds_of
from llama_ssp.models.kv_cache import has_states
from llama_ssp.models.loader import load
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.search import placements, require_possible
from llama_ssp.planner.weights import ModelPart, RolePart
from llama_ssp.planner.workload import TARGET, Role
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from tests.conftest import Command
from tests.distributed.threads import ranks_of
from tests.families import (
    HYBRIDS,
    VOCAB,
    build,
    decoder_of,
    greedy_text,
    model_of,
    ragged_prompts,
    synthetic,
)
from tests.plans import alone, machine, request
from tests.rig import GREEDY, Queue, drive_refilled, engine_of, perturbed, speculate, steps_of
from tests.test_batch import launched
from tests.test_families import ENDS, save
from tests.test_journal import KILLED, Deadly, in_child

PROMPTS = ragged_prompts(9, 2, 21, 1, 13)
NEW, NEAR = 20, 1e-5


@cache
def model(name: str, noise: float = 0.0) -> DecoderModel:
    return model_of(name, noise=noise)


@cache
def plain(name: str) -> Any:
    module = build(name)
    module.generation_config.eos_token_id = None
    return module


@cache
def texts(name: str) -> list[list[int]]:
    """What transformers writes of each prompt alone."""
    return [greedy_text(plain(name), prompt.token_ids, NEW) for prompt in PROMPTS]


DRAFTS: dict[str, Any] = {
    "itself": lambda name: model(name),
    "one of its kind": lambda name: model(name, 0.02),
    "attention": lambda _: model("qwen3"),
    "n-grams": lambda _: "ngram",
}


@pytest.mark.few(6)
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_texts_are_transformers(name: str, draft: str, k: int) -> None:
    """In ragged batches, and in rows that are refilled; a ring has the states of K drafts, and no others."""
    target, drafter = model(name), DRAFTS[draft](name)
    run = speculate(target, PROMPTS, drafter, k=k, max_new=NEW, rewinds=k)
    assert run.texts == texts(name)
    assert run.drafted > 0
    if draft == "itself":
        assert run.accepted == run.drafted

    engine = engine_of(target, drafter, sampling=GREEDY, rewinds=k)
    found = drive_refilled(engine, PROMPTS, 2, k=k, max_new=NEW, longest=21 + NEW)
    assert [found[prompt.id] for prompt in PROMPTS] == texts(name)


@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_texts_without_drafts(name: str) -> None:
    assert speculate(model(name), PROMPTS, None, k=0, max_new=NEW, rewinds=0, chunk=5).texts == texts(name)


def test_the_models_write_texts_that_differ() -> None:
    """The control of those above."""
    assert all(len(set(map(tuple, texts(name)))) == len(PROMPTS) for name in HYBRIDS)


@pytest.mark.parametrize("draft", [name for name in DRAFTS if name != "n-grams"])
def test_rolling_back_feeds_nothing_again(draft: str) -> None:
    """The target is fed once a round, and the draft once a draft, as models without states are."""
    counts = []
    for name in ("qwen3_5", "qwen3"):
        target = model(name)
        drafter = model(name, 0.02) if draft == "one of its kind" else DRAFTS[draft](name)
        engine = engine_of(target, drafter, sampling=GREEDY, rewinds=4)
        before = engine.target_forwards
        state, steps = steps_of(engine, PROMPTS, NEW, 4)
        assert before == 0 and engine.target_forwards == len(steps) + 1
        drafted = sum(max(len(row.drafted) for row in step.rows) for step in steps)
        counts.append(engine.draft_forwards - drafted)
        assert state.finished == ["length"] * len(PROMPTS)
    assert counts == [1, 1]  # the prompts


def test_a_roll_back_beyond_what_is_kept_reads_the_text_anew() -> None:
    """Nothing is wrong, and one more pass is needed."""
    target = model("qwen3_5")
    runner, wide = ModelRunner(target, rewinds=1), ModelRunner(target, rewinds=9)
    token_BS = torch.arange(40)[None] * 7 % VOCAB
    logits = []
    for each in (runner, wide):
        each.start(1, 40)
        each.prefill(token_BS, [30])
        each.roll_back([24])
        logits.append(each.logits(token_BS, [26], [2]))
    assert runner.forwards == wide.forwards + 1
    assert (logits[0] - logits[1]).abs().max() <= NEAR * logits[1].abs().max()


def logits_of(engine: Engine, token_BS: Tensor, end: int) -> Tensor:
    assert engine.target is not None
    return engine.target.logits(token_BS, [end], [1])[0, 0]


def test_a_refilled_row_begins_without_a_state() -> None:
    """It has the logits of a batch of its own, whatever the row held; a longer text leaves no trace."""
    for first in (PROMPTS[2], PROMPTS[1]):
        engine = engine_of(model("qwen3_5"), None, sampling=GREEDY, rewinds=4)
        state = engine.prefill([first], NEW, longest=60)
        engine.admit(state, {0: PROMPTS[0]})
        fresh = engine_of(model("qwen3_5"), None, sampling=GREEDY, rewinds=4)
        expected = fresh.prefill([PROMPTS[0]], NEW)
        found = logits_of(engine, state.token_BS, 9)
        wanted = logits_of(fresh, expected.token_BS, 9)
        assert (found - wanted).abs().max() <= NEAR * wanted.abs().max()


@pytest.mark.parametrize("draft", ["itself", "attention"])
def test_a_chat_that_goes_on_keeps_its_state(draft: str) -> None:
    """The next prompt begins with the text before it: nothing of it is read again."""
    name = "qwen3_5"
    engine = engine_of(model(name), DRAFTS[draft](name), sampling=GREEDY, rewinds=4)
    state, _ = steps_of(engine, PROMPTS[:1], NEW, 4, longest=90)
    before = len(state.texts[0])
    turn = Prompt("turn", (*state.texts[0], 5, 9, 14))
    assert engine.admit(state, {0: turn}, reuse=True) == before - 1
    wanted = plain(name)(torch.tensor([turn.token_ids]), use_cache=False).logits[0, -1]
    found = logits_of(engine, state.token_BS, len(turn.token_ids))
    assert (found - wanted).abs().max() <= NEAR * wanted.abs().max()


def test_a_text_that_parts_from_the_one_before_it_begins_anew() -> None:
    """A state of that length is no longer kept; what other models keep would be of another text."""
    name = "qwen3_5"
    for parts in (3, 12, 22):
        engine = engine_of(model(name), None, sampling=GREEDY, rewinds=2)
        state, _ = steps_of(engine, PROMPTS[:1], NEW, 0, longest=90)
        turn = Prompt("turn", (*state.texts[0][:parts], 5, 9, 14))
        assert engine.admit(state, {0: turn}, reuse=True) == 0
        wanted = plain(name)(torch.tensor([turn.token_ids]), use_cache=False).logits[0, -1]
        found = logits_of(engine, state.token_BS, len(turn.token_ids))
        assert (found - wanted).abs().max() <= NEAR * wanted.abs().max()


def test_continuations_longer_than_the_ring_begin_their_context_anew() -> None:
    """The next one finds no state after the context in the ring, and must not go on from the wrong place."""
    engine = engine_of(model("qwen3_5"), None, sampling=GREEDY, rewinds=0)
    contexts = [Prompt("a", (5, 9, 14, 3)), Prompt("b", (8, 2))]
    wanted = [[tuple(range(4, 16)), (7, 6), (9,)], [(3, 4), tuple(range(20, 30)), (5, 5)]]
    found = engine.score_continuations(contexts, wanted, LogprobReader(0))
    for context, of_context, by_ids in zip(contexts, wanted, found, strict=True):
        texts = [Prompt(str(n), (*context.token_ids, *ids)) for n, ids in enumerate(of_context)]
        for ids, text in zip(of_context, texts, strict=True):
            (scores,) = engine.score([text], LogprobReader(0))
            alone = [token.logprob for token in scores[len(context.token_ids) :]]
            assert [token.logprob for token in by_ids[ids]] == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(("draft", "k"), [("n-grams", 4), ("itself", 3), ("attention", 2)])
def test_log_probabilities_are_a_plain_pass_s(draft: str, k: int) -> None:
    name = "qwen3_5_moe"
    engine = engine_of(model(name), DRAFTS[draft](name), sampling=GREEDY, rewinds=k)
    engine.logprobs = LogprobReader(0)
    state, _ = steps_of(engine, PROMPTS, NEW, k)
    for row, text in enumerate(state.texts):
        logit_SV = plain(name)(torch.tensor([text]), use_cache=False).logits[0].double()
        logprob_SV = logit_SV.log_softmax(-1)
        first = state.prompt_lengths[row] - 1
        for at, scored in enumerate(state.logprobs[row], start=first):
            assert scored.logprob is not None
            assert abs(scored.logprob - logprob_SV[at, scored.token_id].item()) < 1e-3
    echoed = engine.score(PROMPTS[:2], LogprobReader(0))
    for prompt, scores in zip(PROMPTS, echoed, strict=False):
        logit_SV = plain(name)(torch.tensor([prompt.token_ids]), use_cache=False).logits[0].double()
        logprob_SV = logit_SV.log_softmax(-1)
        for at, scored in enumerate(scores[1:]):
            assert scored.logprob is not None
            assert abs(scored.logprob - logprob_SV[at, scored.token_id].item()) < 1e-3


def test_a_damaged_row_damages_no_other() -> None:
    """Its state is not a number from then on; the next text in the row has none of it."""
    target = model_of("qwen3_5")
    runner = ModelRunner(target, rewinds=2)
    runner.start(2, 40)
    token_BS = torch.stack([torch.arange(40), torch.arange(40) * 3]) % VOCAB
    runner.prefill(token_BS, [10, 7])
    assert runner._cache is not None
    for layer in runner._cache.layers:
        if has_states(layer):
            layer[1].view(2, -1)[0] = torch.nan
    logit_BWV = runner.logits(token_BS, [12, 9], [2, 2])
    assert logit_BWV[0].isnan().any() and logit_BWV[1].isfinite().all()
    runner.refill(token_BS, {0: 10}, {})
    assert runner.logits(token_BS, [10, 9], [1, 1])[0].isfinite().all()


@pytest.mark.few(4)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("chunk", [7, 64, 100, 512])
def test_prompts_of_any_length(name: str, chunk: int) -> None:
    """Ragged, in chunks, against one plain pass of each text."""
    module = build(name, mild=True, max_position_embeddings=400)
    target = DecoderModel(decoder_of(module), module.config, name)
    lengths = [1, 2, 63, 64, 65, 150, 300]
    token_BS = torch.randint(0, VOCAB, (len(lengths), 310), generator=torch.Generator().manual_seed(1))
    runner = ModelRunner(target, chunk, rewinds=4)
    runner.start(len(lengths), 310)
    runner.prefill(token_BS, [length - 1 for length in lengths])
    drafted = runner.logits(token_BS, [length + 4 for length in lengths], [5] * len(lengths))
    runner.roll_back([length + 1 for length in lengths])
    again = runner.logits(token_BS, [length + 4 for length in lengths], [4] * len(lengths))
    with torch.inference_mode():
        for row, length in enumerate(lengths):
            text = token_BS[row : row + 1, : length + 4]
            wanted = module(text, use_cache=False).logits[0, length - 1 :]
            scale = wanted.abs().max()
            assert (drafted[row] - wanted).abs().max() <= NEAR * scale, length
            assert (again[row] - wanted[1:]).abs().max() <= NEAR * scale, length


def test_a_draft_of_another_temper_and_refills() -> None:
    """A draft that agrees sometimes: each kind of round occurs, and rows take turns."""
    engine = engine_of(model("qwen3_next"), model("qwen3_next", 0.02), sampling=GREEDY, rewinds=4)
    queue = Queue(list(PROMPTS[2:]))
    _, steps = steps_of(engine, PROMPTS[:2], NEW, 4, queue=queue, longest=21 + NEW)
    rows = [row for step in steps for row in step.rows if row.drafted]
    assert {0 < row.accepted < len(row.drafted) for row in rows} == {True, False}
    assert [queue.texts[prompt.id] for prompt in PROMPTS] == texts("qwen3_next")


def test_noise_changes_texts() -> None:
    """The control of the drafts: perturbed models are others."""
    module = perturbed(build("qwen3_5"), 0.3)
    assert greedy_text(module, PROMPTS[2].token_ids, NEW) != texts("qwen3_5")[2]


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on(command: Command, tmp_path: Path) -> None:
    """With a hybrid target and a hybrid draft: the output is that of a job that nobody disturbed."""
    target = save(tmp_path / "target", build("qwen3_5", **ENDS))
    draft = save(tmp_path / "draft", perturbed(build("qwen3_5", **ENDS), 0.02))
    records = [{"id": f"r{n}", "prompt": "the quick brown " * (1 + n % 3)} for n in range(8)]
    Path("in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [
        "task=batch", f"model={target}", f"draft={draft}", "task.input=in.jsonl", "seed=3", "k=3", "out=null",
        "model.dtype=fp32", "draft.dtype=fp32", "task.max_new_tokens=6", "task.batch_size=2",
        "task.shard_size=2",
    ]  # fmt: skip
    assert in_child(lambda: launched(*words, "task.output=calm.jsonl")) == 0
    kills = 0
    length = sum(path.stat().st_size for path in Path("calm.jsonl.work").rglob("*") if path.is_file())
    for share in (0.3, 0.6):
        deadly = Deadly(int(length * share))
        code = in_child(lambda d=deadly: (d.install(), launched(*words, "task.output=out.jsonl")))
        assert code in (0, KILLED)
        kills += code == KILLED
    assert kills > 0
    assert command(*words, "task.output=out.jsonl").code == 0
    assert Path("out.jsonl").read_bytes() == Path("calm.jsonl").read_bytes()


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_states_are_planned_to_the_byte(family: str, world: int, k: int) -> None:
    """On every rank: keys and values, states, tails, and a few numbers that say where they are."""
    conf = synthetic(family)
    for rank in ranks_of(world) if world > 1 else [ALONE]:
        target = load(conf, None, Dtype.bf16, torch.device("cpu"), "model", rank)
        runner = ModelRunner(target, rewinds=rewinds_of(k, ahead=False))
        runner.start(3, 50)
        part = RolePart.of(Role(TARGET, conf, Dtype.bf16), ModelPart.of(conf, world, rank.rank), 50)
        assert target.caches.now == replace(part, rewinds=k).caches_bytes(3)
        assert target.caches.now > part.caches_bytes(3) or k == 0


def test_a_draft_apart_may_go_back_further() -> None:
    """It drafts K tokens, a guess, and K more; the plan counts their states, too."""
    on = request("qwen3.5-27b", "qwen3.5-35b-a3b", machine("dgx_h100", gpus=4), k=4)
    are_apart = set()
    for place in placements(2, True):
        works = [
            rank_work(on.target, on.draft, place, on.work, rank, compiled=("model", "draft"))
            for rank in range(2)
        ]
        rewinds = {work.draft.rewinds for work in works if work.draft is not None}
        assert rewinds == {9 if place.draft_apart else 4}
        assert {work.target.rewinds for work in works if work.target is not None} == {4}
        are_apart.add(place.draft_apart)
    assert are_apart == {True, False}


def test_a_split_by_layers_is_refused_by_name() -> None:
    on = request("qwen3.5-27b", None, machine("p4d", gpus=2))
    layers = resolve(PlacementConf(splitting=Splitting.layers), 1, drafts=False)
    with pytest.raises(ModelError, match=r"keeps states that it cannot roll back.*qwen3.5-27b"):
        require_possible(on, layers)


def test_a_plan_counts_states_and_not_their_texts() -> None:
    """A row more costs K + 3 states; a longer text costs keys of the few layers that have some."""
    on = request("qwen3.5-27b", None, machine("dgx_h100", gpus=1))

    def caches(**work: int) -> int:
        (memory,) = on.memories(alone(1), replace(on.work, **work))
        return sum(line.bytes for line in memory.lines if line.name == "cache")

    state = 48 * 48 * 128 * 128 * 4
    tails = 48 * 10240 * 2
    assert caches(rows=2, k=4) - caches(rows=1, k=4) > 7 * state
    assert caches(k=5) - caches(k=4) >= 2 * (state + tails)  # of the row, and of pads
    assert caches(prompt_tokens=1024, k=4) - caches(prompt_tokens=512, k=4) == 512 * 16 * 2 * 4 * 256 * 2


@pytest.mark.slow
def test_a_run_holds_what_its_plan_says(command: Command, tmp_path: Path) -> None:
    """Weights, states and tails of the target and of the draft; without drafts there are fewer states."""
    target = save(tmp_path / "target", build("qwen3_5", **ENDS))
    draft = save(tmp_path / "draft", perturbed(build("qwen3_5", **ENDS), 0.02))
    words = (f"model={target}", "seed=1", "prompt=the quick brown", "task.max_new_tokens=8", "output=json")
    sizes = []
    for drafting in (["draft=none"], ["draft=none", "speculation=ngram", "k=4"], [f"draft={draft}", "k=3"]):
        answer = command(*words, *drafting)
        assert (answer.code, answer.errors) == (0, [])
        (memory,) = answer.document["plan"]["memory"]
        held = memory["held_bytes"]
        assert held["predicted"] == held["measured"], drafting
        sizes.append(held["measured"])
    assert sizes == sorted(set(sizes))
