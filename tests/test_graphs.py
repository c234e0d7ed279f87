"""Steps as CUDA graphs, all but the capture: what is captured when, where it reads, what runs without it."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bench import frames
from llama_ssp.config import SamplingConfig, SpeculationConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.roles import SOLE
from llama_ssp.errors import DistributedError
from llama_ssp.models import cuda_graphs, steps
from llama_ssp.models.attention import Places, Scores, attend_rows
from llama_ssp.models.cuda_graphs import ALIGNMENT, GraphedModel, room_of
from llama_ssp.models.experts import Experts
from llama_ssp.models.graph_sizes import KEPT_BYTES, MOST, padded
from llama_ssp.models.interface import log_slow
from llama_ssp.models.kernels.kernel_sizes import MOST_PAIRS
from llama_ssp.pair.assembly import prepare, prepare_anew
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.search import placements
from llama_ssp.planner.workload import DRAFT, TARGET
from llama_ssp.speculative.decision import decide
from llama_ssp.speculative.measure_costs import measured_ks
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws, Purpose, Slot
from llama_ssp.speculative.sampling import Prefix, SamplingTransform
from llama_ssp.speculative.verification import RULES
from tests.distributed import threads
from tests.distributed.threads import Meeting, ThreadRank, ranks_of, together
from tests.families import PROMPTS, VOCAB, build, decoder_of, model_of, ragged_prompts
from tests.plans import machine, request
from tests.rig import eager_step, speculate
from tests.warm import ROOT

Call = Callable[[], Tensor]


def one_by_one(
    places: Places, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Attention as on a GPU: of each token by its position and first slot alone."""
    found = []
    for token, place in enumerate(zip(places.first_T.tolist(), places.position_T.tolist(), strict=True)):
        alone = Places(
            position_T=places.position_T, first_T=places.first_T, attend=attend_rows, rows=((*place, 1),)
        )
        found.append(attend_rows(alone, query[token : token + 1], keys, values, scores, sinks))
    return torch.cat(found)


@pytest.fixture(autouse=True)
def _attention_of_a_gpu(monkeypatch):
    monkeypatch.setattr(steps.attention_kernel, "attend", one_by_one)


class Replayed(GraphedModel):
    """Without a GPU and a compiler: steps run eagerly, and a captured step is a call into fixed memory."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self.captures: list[int] = []

    def _made(self, arguments: Any) -> bool:
        self._step = eager_step(self)
        return True

    def _warm(self, step: Call) -> None:
        step()

    def _captured(self, step: Call) -> tuple[Call, Any]:
        """Returns tensors, and a call that overwrites them, as the launch of a graph does."""
        memory = step()
        self.captures.append(len(memory[0] if isinstance(memory, list) else memory))

        @torch.inference_mode()  # a launch is no operation of torch
        def launch() -> None:
            tree_map(lambda place, result: place.copy_(result), memory, step())

        return launch, memory


class Refusing(Replayed):
    def _captured(self, step: Call) -> tuple[Call, Any]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")


llama = partial(model_of, "llama-gqa")
TEXT = torch.arange(3, 63)[None] % VOCAB


def stepping(model: Any, *steps: tuple[int, int], capacity: int = 60) -> tuple[ModelRunner, list[Tensor]]:
    """Feeds the text, and takes the logits of the last tokens up to each end: (end, how many)."""
    runner = ModelRunner(model)
    runner.start(1, capacity)
    return runner, [runner.logits(TEXT, [end], [count]) for end, count in steps]


@pytest.mark.parametrize(("rows", "k"), [(1, 0), (1, 4), (3, 4), (5, 4)])
def test_texts_are_those_of_eager_steps(rows: int, k: int):
    """Rows that differ in length, K that differs, steps that are padded: five rows have up to 25 tokens."""
    how: dict[str, Any] = {"k": k, "max_new": 30, "adaptive": k > 0}
    graphed, plain = llama(Replayed), llama()
    result = speculate(graphed, PROMPTS[:rows], llama(Replayed, 0.3) if k else None, **how)
    assert result.texts == speculate(plain, PROMPTS[:rows], llama(noise=0.3) if k else None, **how).texts
    assert graphed.captures and all(size == padded(size) for size in graphed.captures)


def test_nothing_is_captured_while_a_trial_compiles():
    """A capture with sums in it may hang: that must come when the trial has begun to count."""
    model = llama(Replayed)
    with model.uncaptured():
        _, compiled = stepping(model, (30, 3))
        assert model.captures == [] and model._step is not None
    _, captured = stepping(model, (30, 3))
    assert model.captures and torch.equal(compiled[0], captured[0])


@pytest.mark.parametrize(
    ("engine", "last"), [("eager", "forward"), ("compiled", "run_programs"), ("graphs", "__call__")]
)
def test_a_forward_is_eight_frames_from_the_loop_at_most(engine: str, last: str):
    """Of a draft and of the target: a reader on the way from `generate` to a kernel opens few functions."""
    paths = frames.frames_of(engine)
    ends = {(path[1], path[-1]) for path in paths}
    assert ends == {("draft", last), ("verify", last)}
    assert all(len(path) <= 8 for path in paths), paths


FILTERED = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
GREEDY = SamplingConfig(temperature=0.0, bad_tokens=[3])


@pytest.mark.parametrize(  # `kinds` of graphs: that draw, decide and, but for a mere softmax, filter
    ("rule", "rows", "sampling", "kinds"),
    [("block", 3, SamplingConfig(), 2), ("token", 1, FILTERED, 3), ("block", 3, GREEDY, 3)],
    ids=["block", "token, filtered", "block, greedy"],
)
def test_rounds_of_graphs_are_those_of_the_definitions(rule: str, rows: int, sampling: Any, kinds: int):
    """Rows that end early, K that differs; what is captured stays for the next engine."""
    how: dict[str, Any] = {"k": 4, "max_new": 12, "adaptive": True, "rule": rule}
    how |= {"sampling": sampling, "ends": frozenset({5, 6})}
    graphed, draft, plain_pair = llama(Replayed), llama(Replayed, 0.3), (llama(), llama(noise=0.3))
    for seed in (0, 1, 2):
        plain = speculate(plain_pair[0], PROMPTS[:rows], plain_pair[1], **how, seed=seed)
        draws = CounterDraws(seed, graphed.replay)
        assert speculate(graphed, PROMPTS[:rows], draft, **how, draws=draws).texts == plain.texts, seed
    captured = len(graphed._functions)
    assert len({function for function, *_ in graphed._functions}) == kinds
    speculate(graphed, PROMPTS[:rows], draft, **how, draws=CounterDraws(0, graphed.replay))
    assert len(graphed._functions) == captured


def test_states_of_named_layers_are_those_of_eager_steps():
    """Padded steps, too; without taps there are none, and graphs with them are made anew."""
    plain, graphed = llama(), llama(Replayed)
    states = []
    for model in (plain, graphed):
        model.tap((0, 2))
        runner = ModelRunner(model)
        runner.start(3, 30)
        token_BS = torch.arange(3 * 30).view(3, 30) % VOCAB
        runner.prefill(token_BS, [3, 1, 2])
        runner.logits(token_BS, [10, 9, 8], [6, 6, 6])
        states.append(model.tapped_TX)
    assert graphed.captures
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)  # a padded step's sums are in another order
    graphed.tap(())
    assert graphed._step is None and graphed.tapped_TX is None
    assert not any(memory.graphs for memory in graphed._memories)


@pytest.fixture
def replayed() -> Replayed:
    """A model that says anew what it computes without graphs."""
    log_slow.cache_clear()
    return llama(Replayed)


NUMBERS = torch.arange(3.0)


def test_a_function_is_captured_once(replayed: Replayed):
    for offset in (0, 1):
        assert torch.equal(replayed.replay(torch.square, NUMBERS + offset), (NUMBERS + offset).square()), (
            offset
        )
    assert replayed.captures == [3]


def test_a_function_is_replayed_in_inference_mode_and_outside(replayed: Replayed):
    """The leader draws in it, ranks that only draft do not; a measurement has both, of one model."""
    with torch.inference_mode():
        assert torch.equal(replayed.replay(torch.square, NUMBERS), NUMBERS.square())
    assert torch.equal(replayed.replay(torch.square, NUMBERS + 1), (NUMBERS + 1).square())
    assert torch.equal(replayed.replay(torch.neg, NUMBERS), -NUMBERS)
    assert replayed.captures == [3, 3]


def test_a_function_of_large_tensors_runs_as_it_is(replayed: Replayed, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "LARGEST", 4)
    assert replayed.replay(torch.square, torch.arange(5.0)).tolist() == [0, 1, 4, 9, 16]
    assert replayed.captures == []


def test_functions_read_the_same_memory(replayed: Replayed):
    """That of the largest: where one needs more, the others go, and are captured anew."""
    many = torch.arange(9.0)
    turns = ((NUMBERS, [3]), (NUMBERS[:2], [3, 2]), (many, [3, 2, 9]), (NUMBERS, [3, 2, 9, 3]))
    for given, captures in (*turns, (many, [3, 2, 9, 3])):
        assert torch.equal(replayed.replay(torch.square, given), given.square())
        assert replayed.captures == captures
    assert replayed._inputs.size == room_of([many])


def test_what_functions_give_is_bounded(replayed: Replayed, monkeypatch):
    """Where it is too much, those before go."""
    monkeypatch.setattr(cuda_graphs, "KEPT_BYTES", room_of([NUMBERS]) + 2 * NUMBERS.nbytes)
    for function, kept in ((torch.square, 1), (torch.neg, 2), (torch.exp, 1), (torch.square, 2)):
        assert torch.equal(replayed.replay(function, NUMBERS), function(NUMBERS))
        assert len(replayed._functions) == kept
    monkeypatch.setattr(cuda_graphs, "KEPT_BYTES", room_of([NUMBERS]) - 1)
    assert torch.equal(replayed.replay(torch.add, NUMBERS, NUMBERS), 2 * NUMBERS)
    assert len(replayed.captures) == 4


def decided(draws: CounterDraws, k: int, vocab: int) -> None:
    """Decides a round of 64 rows with k drafts each, of tensors that have no memory."""
    nothing = partial(torch.empty, device="meta")
    slot = Slot(keys=(None,) * 64, bases=(9,) * 64, purpose=Purpose.ACCEPT)
    drafted_BK, count_B = nothing(64, k, dtype=torch.int64), nothing(64, dtype=torch.int64)
    probs_BWV, draft_BKV = nothing(64, k + 1, vocab), nothing(64, k, vocab)
    draws.round(decide, RULES["block"], slot, probs_BWV, draft_BKV, drafted_BK, count_B)


@pytest.mark.parametrize(("vocab", "most"), [(32_000, 16), (128_256, 4)])
def test_after_k_is_measured_rounds_of_every_k_have_graphs(replayed: Replayed, vocab: int, most: int):
    """But for decisions that are too large for one. They stay: each is captured once more at most."""
    draws = CounterDraws(0, replayed.replay)
    for k in (1, 16, 4, 0, *range(most + 1)):
        decided(draws, k, vocab)
    ks = {shape[1] - 1 for _, _, _, (shape, _), *_ in replayed._functions}
    assert ks >= set(range(most + 1))
    captures = len(replayed.captures)
    for k in range(most + 1):
        decided(draws, k, vocab)
    assert len(replayed.captures) == captures
    assert replayed._inputs.size + replayed._results_bytes <= KEPT_BYTES


def test_what_runs_as_it_is_is_said_once_a_kind(replayed: Replayed, monkeypatch, caplog):
    monkeypatch.setattr(cuda_graphs, "LARGEST", 4)
    for function in (torch.square, torch.neg):
        replayed.replay(function, torch.arange(5.0))
    transform = SamplingTransform(FILTERED, (), VOCAB, replayed.replay)
    transform.assign(0, SamplingConfig(top_k=2))
    for _ in range(2):
        transform(torch.rand(2, 1, VOCAB), Prefix(*3 * (torch.zeros(2, 1, dtype=torch.int64),)))
    said = " ".join(caplog.messages).split(" are computed without graphs: ")
    assert [line.rpartition("engine: ")[2][:6] for line in said[:-1]] == ["drafts", "rows w"]


def test_a_function_that_cannot_be_captured_runs_as_it_is(caplog):
    log_slow.cache_clear()
    refusing = llama(Refusing)
    for factor in (1, 2):
        assert refusing.replay(torch.add, NUMBERS, torch.tensor(factor)).tolist() == [*(NUMBERS + factor)]
    assert caplog.text.count("without graphs: RuntimeError: CUDA error") == 1


def test_graphs_are_kept_from_text_to_text(monkeypatch):
    """Texts of other lengths, batches of other sizes; only a batch that does not fit needs memory anew."""
    monkeypatch.setattr(cuda_graphs, "BUCKET", 64)
    model, captured = llama(Replayed), []
    for rows, longest in ((1, 20), (1, 30), (1, 10), (2, 15), (3, 30), (1, 20), (3, 20)):
        speculate(model, PROMPTS[:rows], None, k=0, max_new=longest)
        captured.append(len(model.captures))
    assert captured == [1, 1, 1, 2, 3, 4, 4]
    assert model.captures == [1, 2, 3, 1] and len(model._memories) == 1


def test_short_prompts_are_read_by_graphs_that_are_there():
    """By the smallest that is large enough; longer ones eagerly. Texts are those of eager models."""
    prepared, plain = llama(Replayed), llama()
    seen, step = list[int](), eager_step(prepared)
    prepared._step = lambda *given: seen.append(len(given[0])) or step(*given)
    prepared.prepare(range(1, 4), rows=2, capacity=80)
    ready = len(prepared.captures)
    # The last token of each is fed by the first round.
    for lengths, read in ((3, 4), [5]), ((9, 12), [80]), ((20, 30), []):
        seen.clear()
        prompts = ragged_prompts(*lengths)
        texts = speculate(prepared, prompts, None, k=0, max_new=6).texts
        assert [size for size in seen if size > 3] == read
        assert texts == speculate(plain, prompts, None, k=0, max_new=6).texts, lengths
    assert len(prepared.captures) == ready


def test_a_cache_in_use_keeps_its_memory():
    """Two batches at once have graphs of their own, and neither writes where the other reads."""
    model, logits = llama(Replayed), []
    for each in (model, llama()):
        first, _ = stepping(each, (9, 1))
        second, _ = stepping(each, (20, 1))
        logits.append([first.logits(TEXT, [10], [1]), second.logits(TEXT, [21], [1])])
    assert model.captures == [2, 2, 1, 1]
    for ours, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("waits", "most"), [(True, 3), (False, 40)])
def test_steps_with_experts_that_do_not_wait_are_captured(waits: bool, most: int, monkeypatch):
    """However many pairs of a token and an expert they have; others up to MOST_PAIRS."""
    monkeypatch.setattr(cuda_graphs, "MOST_PAIRS", 6)
    monkeypatch.setattr(Experts, "waits_for_host", lambda *_: waits)
    model = model_of("mixtral", Replayed)
    model.prepare([4], rows=2, capacity=40)
    assert max(model.captures) == most


def test_experts_that_wait_on_one_rank_limit_the_captures_of_all(monkeypatch):
    """GPUs may differ; captures have sums, which all ranks take part in."""
    monkeypatch.setattr(cuda_graphs, "MOST_PAIRS", 6)
    ranks = ranks_of(2)
    module = build("mixtral")
    models = [Replayed(decoder_of(module, ranks=rank), module.config, "moe", rank) for rank in ranks]
    waiting = set(models[1].decoder.modules())
    monkeypatch.setattr(Experts, "waits_for_host", lambda layer, _: layer in waiting)

    def work(rank: int) -> list[int]:
        models[rank].prepare([4], rows=1, capacity=40)
        return models[rank].captures

    assert together([partial(work, rank) for rank in range(2)], ranks) == [[1, 2, 3]] * 2


def test_steps_in_which_experts_run_one_after_the_other_are_not_captured():
    """They wait for the router's choice: a capture would fail, and no step would have a graph any more."""
    model, config = llama(Replayed), build("mixtral").config
    experts = Replayed(model.decoder, config, "moe", ALONE)
    assert (model.most_tokens, experts.most_tokens * config.num_experts_per_tok) == (MOST, MOST_PAIRS)
    model.most_tokens = 3
    stepping(model, (4, 4), (7, 3), (11, 4), (13, 2))
    assert model.captures == [3, 2]


def test_what_was_given_stays():
    """Though buffers are used again, and their number of tokens differs: 17 and 20 have one graph."""
    model = llama(Replayed)
    runner, (first,) = stepping(model, (20, 20))
    before, other_BS = first.clone(), TEXT.clone()
    runner.roll_back([10])
    other_BS[0, 9:] = other_BS[0, 9:].flip(0)  # so the first step's last tokens are not this text's
    second = runner.logits(other_BS, [26], [17])
    runner.logits(other_BS, [27], [1])
    assert torch.equal(first, before) and model.captures == [20, 1]
    plain = ModelRunner(llama())
    plain.start(1, 60)
    torch.testing.assert_close(second, plain.logits(other_BS, [26], [26])[:, 9:], rtol=1e-4, atol=1e-4)


def test_sizes_of_graphs():
    sizes = [padded(tokens) for tokens in range(1, 200)]
    assert sizes[:16] == list(range(1, 17))
    assert all(tokens <= size < 1.25 * tokens for tokens, size in enumerate(sizes, start=1))
    assert len({size for size in sizes if 64 <= size < 128}) == 4


def prepared(rows: int, k: int) -> tuple[Replayed, Replayed]:
    """A pair whose graphs were captured before it runs."""
    models = llama(Replayed), llama(Replayed, 0.3)
    pair: Any = SimpleNamespace(loaded=dict(zip((TARGET, DRAFT), models, strict=True)), trials={}, roles=SOLE)
    prepare(pair, SpeculationConfig(k=k), rows, 100)
    return models


RUNS = pytest.mark.parametrize(("rows", "k"), [(1, 16), (3, 4), (8, 4), (1, 0)])


@RUNS
def test_graphs_are_those_that_plans_count(rows: int, k: int):
    on = request("tiny", "tiny_draft", machine("p4d", gpus=1), rows=rows, k=k)
    (place,) = placements(1, True)
    planned = rank_work(on.target, on.draft, place, on.work, 0, compiled=(TARGET, DRAFT))
    counted = [planned.graphs(role) for role in planned.roles]
    assert [tuple(sorted(model.captures)) for model in prepared(rows, k)] == counted


def is_up_to_alignment(kept: int, bytes_: int) -> bool:
    """Whether so much is kept, with each of nine tensors at most made longer."""
    return bytes_ <= kept < bytes_ + 9 * ALIGNMENT


def kept_bytes(model: Replayed) -> int:
    """The memory of what the model's graphs give, which several may share."""
    graphs = [graph for memory in model._memories for graph in memory.graphs.values()]
    storages = [tensor.untyped_storage() for graph in graphs for tensor in graph.result]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@RUNS
def test_graphs_keep_the_logits_that_plans_count(rows: int, k: int):
    """Those of the largest, and of the first two steps."""
    on = request("tiny", "tiny_draft", machine("p4d", gpus=1), rows=rows, k=k)
    (place,) = placements(1, True)
    planned = rank_work(on.target, on.draft, place, on.work, 0, compiled=(TARGET, DRAFT))
    for role, model in zip(planned.roles, prepared(rows, k), strict=True):
        tokens = planned.outputs_of_graphs(role) // (4 * role.part.whole_vocab)
        assert tokens == max(model.captures) + 3
        assert is_up_to_alignment(kept_bytes(model), tokens * model.vocab * 4)


def test_all_results_of_a_step_share_memory():
    """Logits, and the states that a head reads."""
    model = llama(Replayed)
    model.tap((0, 2))
    model.prepare([4], rows=2, capacity=60)
    numbers = model.vocab + 2 * model.decoder.embedding.weight.shape[1]
    assert is_up_to_alignment(kept_bytes(model), (padded(60) + 3) * numbers * 4)


def test_only_rounds_of_the_k_that_is_kept_have_graphs():
    """To measure K, full rounds of some K are captured, and then freed. A draft's steps stay."""
    target, draft = llama(Replayed), llama(Replayed, 0.3)
    pair: Any = SimpleNamespace(target=target, loaded={TARGET: target, DRAFT: draft}, trials={}, roles=SOLE)
    prepare(pair, SpeculationConfig(adaptive=True), 3, 100, measured_ks(16))
    assert target.captures == [1, 2, 80, padded(51), 15, 6, 3]
    drafts = list(draft.captures)
    target.replay(torch.square, NUMBERS)
    largest = target._pool = object()
    target.captures.clear()

    prepare_anew(pair, SpeculationConfig(k=2), 3, 100)
    assert target.captures == [1, 2, 80, 9, 8, 7, 6, 5, 4, 3]
    assert [sorted(memory.graphs) for memory in target._memories] == [[*range(1, 10), 80]]
    assert not target._functions and target._inputs.size == 0 and target._pool is not largest
    assert is_up_to_alignment(kept_bytes(target), 83 * target.vocab * 4)
    assert draft.captures == drafts

    target.captures.clear()
    assert all(speculate(target, ragged_prompts(1, 2, 3), draft, k=2, max_new=20).texts)
    assert target.captures == [] and draft.captures == drafts


@RUNS
def test_graphs_are_captured_before_they_are_needed(rows: int, k: int):
    """Also of rows that end one after the other: the run captures no more."""
    models = prepared(rows, k)
    for model in models:
        model.captures.clear()
    assert all(speculate(models[0], ragged_prompts(*range(1, rows + 1)), models[1], k=k, max_new=20).texts)
    assert [model.captures for model in models] == [[], []]


def test_without_graphs_steps_run_all_the_same(caplog, monkeypatch):
    """Where a capture fails, and where sums go through the host; the log says so once."""
    model = llama(Refusing)
    assert model.has_graphs
    texts = speculate(model, PROMPTS[:2], "ngram", k=3).texts
    assert texts == speculate(llama(), PROMPTS[:2], "ngram", k=3).texts and not model.has_graphs
    error = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert caplog.messages == [f"engine: m runs without graphs: {error}"]
    caplog.clear()
    monkeypatch.setattr(ThreadRank, "through_host", True)
    model = llama(Replayed, ranks=ThreadRank(0, Meeting(1)))
    assert speculate(model, PROMPTS[:2], None, k=0).texts and not model.captures
    assert caplog.messages[0].startswith("engine: m runs without graphs: its sums go through the host: ")


def test_ranks_capture_together():
    """Also if one of them still has a cache that the others have freed; if one alone cannot, all end."""

    class Second(Replayed):
        def _captured(self, step: Call) -> tuple[Call, Any]:
            if self.ranks.rank == 1 and len(self.captures) == 2:
                raise RuntimeError("out of memory")
            return super()._captured(step)

    ranks = ranks_of(2)
    models = [llama(Second, ranks=rank) for rank in ranks]

    def work(rank: int) -> list[int]:
        model, kept = models[rank], []
        for end in (1, 1, 2):
            with pytest.raises(DistributedError, match="not captured") if end == 2 else nullcontext():
                runner, _ = stepping(model, (end, end))
                kept += [runner] if rank == 0 else []
        assert len(model._memories) == 3
        return [len(model.captures), model._refused]

    assert together([lambda rank=rank: work(rank) for rank in range(2)], ranks) == [[3, True], [2, True]]


@pytest.mark.parametrize("what", ["a head on the leader", "no program on rank 1"])
def test_what_differs_on_one_rank_changes_the_captures_of_all(what: str):
    """Warm-ups and captures have sums: a rank that makes more of them than the others would wait for ever."""

    class Own(Replayed):
        programs = 0
        _made = GraphedModel._made

        def _programs(self, arguments: Any) -> Any:
            self.programs += 1
            if what.startswith("no program") and self.ranks.rank == 1:
                raise RuntimeError("no")
            return eager_step(self)

        def _warm(self, step: Call) -> None:
            self.ranks.barrier()
            step()

    ranks = ranks_of(2)
    models = [llama(Own, ranks=rank) for rank in ranks]

    def work(rank: int) -> list[Any]:
        model = models[rank]
        for taps in ((), (0, 2) if rank == 0 and what.startswith("a head") else (), ()):
            model.tap(taps)
            model.prepare([1, 2, 3], rows=1, capacity=40)
        return [model.captures, model.programs, model.is_compiled]

    first, second = together([lambda rank=rank: work(rank) for rank in range(2)], ranks)
    assert first == second
    assert first == ([[1, 2, 40, 3] * 3, 3, True] if what.startswith("a head") else [[], 1, False])


def test_ranks_free_and_capture_anew_together():
    """Also where the leader alone decides rounds, by graphs of its own."""
    meeting = Meeting(2)
    ranks = [Logged(rank, meeting) for rank in range(2)]
    module = build("llama-gqa")
    models = [LoggedModel(decoder_of(module, ranks=rank), module.config, "m", rank) for rank in ranks]

    def work(rank: int) -> list[int]:
        model = models[rank]
        model.prepare([1, 5], rows=1, capacity=40, ragged=False)
        if rank == 0:
            model.replay(torch.square, NUMBERS)
            ranks[0].log.remove(("capture", 3))
            ranks[0].log.remove(("replay", 3))
            model.captures.remove(3)
        model.drop_graphs()
        model.prepare([1, 2, 3], rows=1, capacity=40)
        return model.captures

    wanted = [1, 2, 40, 5, 1, 2, 40, 3]
    assert together([partial(work, rank) for rank in range(2)], ranks) == [wanted, wanted]
    assert ranks[0].log == ranks[1].log


class Logged(ThreadRank):
    """Keeps what this rank takes part in, in order: collectives with their sizes, captures, replays."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting)
        self.log: list[tuple[str, Any]] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.log.append(("sum", tensor.shape))
        return super().all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.log.append(("gather", tensor.shape))
        return super().all_gather(tensor)

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        self.log.append(("integers", len(values)))
        return super().gather_ints(values)


class LoggedModel(Replayed):
    ranks: Logged
    _made = GraphedModel._made

    def _programs(self, arguments: Any) -> Any:
        time.sleep(0.1 * self.ranks.rank)  # one rank compiles what another loads
        return eager_step(self)

    def _captured(self, step: Call) -> tuple[Call, Any]:
        launch, result = super()._captured(step)
        self.ranks.log.append(("capture", self.captures[-1]))

        def logged() -> None:
            self.ranks.log.append(("replay", self.captures[-1]))
            launch()

        return logged, result


def forgetful(model: LoggedModel, *given: Any) -> Any:
    for memory in model._memories:
        memory.graphs.clear()
    return GraphedModel._step_for(model, *given)


BREAKS: dict[str, dict[str, Callable[..., Any]]] = {  # what rank 1 does instead
    "nothing": {}, "warm-ups": {"_warm": lambda *_: None}, "graphs": {"_step_for": forgetful},
    "agreement": {"_on_all_ranks": lambda _, facts: facts},
}  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("broken", BREAKS)
def test_ranks_take_part_in_the_same_collectives_in_the_same_order(broken: str, world: int, monkeypatch):
    """Over caches that only one rank keeps, taps of one rank, padded steps; wrong models show.

    NCCL would wait for ever, or add up what does not belong together.
    """
    monkeypatch.setattr(threads, "PATIENCE_S", 3)
    meeting = Meeting(world)
    ranks = [Logged(rank, meeting) for rank in range(world)]
    module = build("llama-gqa")
    models = [LoggedModel(decoder_of(module, ranks=rank), module.config, "m", rank) for rank in ranks]
    for name, method in BREAKS[broken].items():
        monkeypatch.setattr(models[1], name, partial(method, models[1]))

    def work(rank: int) -> None:
        model, kept = models[rank], []
        model.prepare([1, 2, 5], rows=1, capacity=40)
        for end, taps in ((4, ()), (20, (0, 2) if rank == 0 else ()), (4, ())):
            model.tap(taps)
            runner, _ = stepping(model, (end, end), (end + 1, 1))
            kept += [runner] if rank == 0 else []

    wrong = False
    try:
        together([partial(work, rank) for rank in range(world)], ranks)
    except (threading.BrokenBarrierError, RuntimeError, TypeError, AssertionError):  # out of step
        wrong = True
    same = all(rank.log == ranks[0].log for rank in ranks) and not wrong
    assert same == (broken == "nothing")
    if same:
        assert {what for what, _ in ranks[0].log} == {"sum", "gather", "integers", "capture", "replay"}


@pytest.fixture(scope="module")
def on_far() -> list[dict[str, Any]]:
    """What tests/far.py says of a far device: of each case, then of one row with four drafts."""
    words = [sys.executable, "-m", "tests.far"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]  # libraries print, too


@pytest.mark.long
def test_a_round_launches_little(on_far: list[dict[str, Any]]):
    """Each pass is one launch."""
    assert on_far[-1]["launches"] <= 60


@pytest.mark.long
def test_on_a_far_device_texts_are_the_same(on_far: list[dict[str, Any]]):
    cases = on_far[:-1]
    assert len(cases) == 9
    for case in cases:
        assert case["same"], case


@pytest.mark.long
def test_a_round_has_the_host_wait_once(on_far: list[dict[str, Any]]):
    """For what was decided: no state of a model that has some is copied to the host."""
    for case in on_far[:-1]:
        counts = dict(case["seen"])
        assert counts.pop("sent, queued") > 0, case
        assert counts == {"read, waiting": case["rounds"]}, case
