"""Steps as CUDA graphs, all but the capture: what is captured when, where it reads, what runs without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import SamplingConfig, SpeculationConfig
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import DistributedError
from llama_ssp.models import cuda_graphs, steps
from llama_ssp.models.attention import Pass, Scores, attend_rows
from llama_ssp.models.cuda_graphs import GraphedModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.graph_sizes import MOST, padded
from llama_ssp.models.kernels.expert_stacks import MOST_PAIRS
from llama_ssp.pair.assembly import prepare
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.search import placements
from llama_ssp.planner.workload import DRAFT, TARGET
from llama_ssp.speculative.decision import GraphedDraws, draws_for
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from tests.distributed.threads import Meeting, ThreadRank, ranks_of, together
from tests.families import VOCAB, build, decoder_of, ragged_prompts
from tests.plans import machine, request
from tests.rig import eager_step, perturbed, speculate

Call = Callable[[], Tensor]


def one_by_one(
    feed: Pass, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Attention as on a GPU: of each token by its position and first slot alone."""
    found = []
    for token, place in enumerate(zip(feed.first_T.tolist(), feed.position_T.tolist(), strict=True)):
        alone = Pass(feed.position_T, feed.first_T, feed.slot_T, attend_rows, ((*place, 1),))
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

    def _captured(self, step: Call) -> Call:
        """Returns a call that, as a graph does, gives the same tensors each time and overwrites them."""
        made = step()
        self.captures.append(len(made[0] if isinstance(made, list) else made))
        places = list(made) if isinstance(made, list) else [made]

        def replay() -> Any:
            again = step()
            for place, result in zip(places, again if isinstance(again, list) else [again], strict=True):
                place.copy_(result)
            return made

        return replay


def model_of(kind: type[DecoderModel], noise: float = 0.0, ranks: Ranks = ALONE) -> Any:
    module = perturbed(build("llama-gqa"), noise) if noise else build("llama-gqa")
    return kind(decoder_of(module), module.config, "model", ranks)


def prompts(count: int) -> list[Prompt]:
    return ragged_prompts(*range(9, 9 - 2 * count, -2))


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("k", [0, 4])
def test_texts_are_those_of_eager_steps(rows: int, k: int):
    """Rows that differ in length, K that differs, steps that are padded: five rows have up to 25 tokens."""
    how: dict[str, Any] = {"k": k, "max_new": 30, "adaptive": k > 0}
    graphed, quick = model_of(Replayed), model_of(Replayed, 0.3)
    found = speculate(graphed, prompts(rows), quick if k else None, **how)
    plain = speculate(
        model_of(DecoderModel), prompts(rows), model_of(DecoderModel, 0.3) if k else None, **how
    )
    assert found.texts == plain.texts
    assert graphed.captures and all(size == padded(size) for size in graphed.captures)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rounds_decided_by_graphs_are_those_of_the_definitions(rule: str, rows: int):
    """Rows that end early, K that differs; what is captured stays for the next engine."""
    how: dict[str, Any] = {"k": 4, "max_new": 12, "adaptive": True, "rule": rule}
    how |= {"sampling": SamplingConfig(), "ends": frozenset({5, 6})}
    graphed, draft = model_of(Replayed), model_of(Replayed, 0.3)
    for seed in (0, 1, 2):
        plain = speculate(graphed, prompts(rows), draft, **how, seed=seed)
        draws = draws_for(graphed, seed)
        assert isinstance(draws, GraphedDraws)
        assert speculate(graphed, prompts(rows), draft, **how, draws=draws).texts == plain.texts
    kept = len(graphed._functions)
    assert len({function for function, *_ in graphed._functions}) == 2
    speculate(graphed, prompts(rows), draft, **how, draws=draws_for(graphed, 0))
    assert len(graphed._functions) == kept


def test_states_of_named_layers_are_those_of_eager_steps():
    """Padded steps, too; without taps there are none, and graphs with them are made anew."""
    plain, graphed = model_of(DecoderModel), model_of(Replayed)
    graphed.tap((0, 2))
    found = []
    plain.tap((0, 2))
    for model in (plain, graphed):
        runner = ModelRunner(model)
        runner.start(3, 30)
        token_BS = torch.arange(3 * 30).view(3, 30) % VOCAB
        runner.prefill(token_BS, [3, 1, 2])
        runner.logits(token_BS, [10, 9, 8], [6, 6, 6])
        found.append(model.tapped_TX)
    assert graphed.captures
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)  # a padded step's sums are in another order
    graphed.tap(())
    assert graphed._step is None and graphed.tapped_TX is None
    assert not any(memory.graphs for memory in graphed._memories)


def test_large_functions_and_those_that_cannot_be_captured_run_as_they_are(monkeypatch, caplog):
    model, number = model_of(Replayed), torch.arange(3.0)
    assert model.replayed(torch.square, number).tolist() == [0, 1, 4]
    assert model.replayed(torch.square, number + 1).tolist() == [1, 4, 9] and len(model._functions) == 1
    monkeypatch.setattr(cuda_graphs, "LARGEST", 4)
    assert model.replayed(torch.square, torch.arange(5.0)).tolist() == [0, 1, 4, 9, 16]
    assert len(model._functions) == 1
    monkeypatch.setattr(model, "_captured", _refused)
    for factor in (1, 2):
        assert (
            model.replayed(torch.add, number, number[:0].sum() + factor).tolist()
            == (number + factor).tolist()
        )
    assert caplog.text.count("without graphs: RuntimeError: no") == 1


def _refused(_: Call) -> Call:
    raise RuntimeError("no")


def test_graphs_are_kept_from_text_to_text(monkeypatch):
    """Texts of other lengths, batches of other sizes; only a batch that does not fit needs memory anew."""
    monkeypatch.setattr(cuda_graphs, "BUCKET", 64)
    model, captured = model_of(Replayed), []
    for rows, longest in ((1, 20), (1, 30), (1, 10), (2, 15), (3, 30), (1, 20), (3, 20)):
        speculate(model, prompts(rows), None, k=0, max_new=longest)
        captured.append(len(model.captures))
    assert captured == [1, 1, 1, 2, 3, 4, 4]
    assert model.captures == [1, 2, 3, 1] and len(model._memories) == 1


def test_a_cache_in_use_keeps_its_memory():
    """Two batches at once have graphs of their own, and neither writes where the other reads."""
    model, plain = model_of(Replayed), model_of(DecoderModel)
    token_BS = torch.arange(3, 23)[None]
    found = []
    for one in (model, plain):
        runners = [ModelRunner(one), ModelRunner(one)]
        for runner, start in zip(runners, (0, 5), strict=True):
            runner.start(1, 40)
            runner.prefill(token_BS[:, start:], [9])
        found.append(
            [
                runner.logits(token_BS[:, start:], [10], [1])
                for runner, start in zip(runners, (0, 5), strict=True)
            ]
        )
        if one is model:
            assert model.captures == [1, 1]
            runners[0].start(1, 40)
            runners[0].logits(token_BS, [1], [1])
            assert model.captures == [1, 1]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_steps_in_which_experts_run_one_after_the_other_are_not_captured():
    """They wait for the router's choice: a capture would fail, and no step would have a graph any more."""
    model, moe = model_of(Replayed), build("mixtral")
    assert model.most_tokens == MOST
    model.most_tokens = Replayed(model.decoder, moe.config, "moe", ALONE).most_tokens
    assert model.most_tokens * moe.config.num_experts_per_tok == MOST_PAIRS
    model.most_tokens = 3
    runner = ModelRunner(model)
    runner.start(1, 40)
    for end, count in ((4, 4), (7, 3), (11, 4), (13, 2)):
        runner.logits(torch.arange(3, 23)[None], [end], [count])
    assert model.captures == [3, 2]


def test_what_was_given_stays():
    """Though buffers are used again, and their number of tokens differs: 17 and 20 have one graph."""
    model = model_of(Replayed)
    runner = ModelRunner(model)
    runner.start(1, 60)
    token_BS = torch.arange(3, 63)[None] % VOCAB
    first = runner.logits(token_BS, [20], [20])
    before = first.clone()
    runner.roll_back([10])
    token_BS[0, 9:] = token_BS[0, 9:].flip(0)  # so the first step's last tokens are not this text's
    second = runner.logits(token_BS, [26], [17])
    runner.logits(token_BS, [27], [1])
    assert torch.equal(first, before) and model.captures == [20, 1]
    torch.testing.assert_close(second, _plain(token_BS, 26)[:, 9:], rtol=1e-4, atol=1e-4)


def _plain(token_BS: Tensor, end: int) -> Tensor:
    runner = ModelRunner(model_of(DecoderModel))
    runner.start(1, 60)
    return runner.logits(token_BS, [end], [end])


def test_sizes_of_graphs():
    found = [padded(tokens) for tokens in range(1, 200)]
    assert found[:16] == list(range(1, 17))
    assert all(tokens <= size < 1.25 * tokens for tokens, size in enumerate(found, start=1))
    assert len({size for size in found if 64 <= size < 128}) == 4


def test_steps_are_captured_before_they_are_needed():
    model = model_of(Replayed)
    model.prepare([1, 3, 5], rows=2, capacity=50)
    assert sorted(model.captures) == [1, 2, 6, 10]
    speculate(model, prompts(2), None, k=0, max_new=20)
    assert len(model.captures) == 4


@pytest.mark.parametrize(("rows", "k", "siblings"), [(1, 4, 0), (1, 16, 0), (1, 3, 2), (3, 4, 0), (1, 0, 0)])
def test_graphs_are_those_that_plans_count(rows: int, k: int, siblings: int):
    """Of one row exactly; of rows that end one after the other the run captures no others."""
    models = model_of(Replayed), model_of(Replayed, 0.3)
    spec = SpeculationConfig(k=k, siblings=siblings)
    pair: Any = SimpleNamespace(target=models[0], draft=models[1])
    prepare(pair, spec, rows, 50)
    on = request("tiny", "tiny_draft", machine("p4d", gpus=1), rows=rows, k=k, siblings=siblings)
    (place,) = placements(1, True)
    planned = rank_work(on.target, on.draft, place, on.work, 0, compiled=(TARGET, DRAFT))
    counted = [planned.graphs(own) for own in planned.roles]
    if rows == 1:
        assert [tuple(sorted(model.captures)) for model in models] == counted
    if not siblings:
        speculate(models[0], prompts(rows), models[1], k=k, max_new=20)
    for model, sizes in zip(models, counted, strict=True):
        assert len(set(model.captures)) == len(model.captures) and set(model.captures) <= set(sizes)


def test_without_graphs_steps_run_all_the_same(caplog):
    """The log says so once."""

    class Refusing(Replayed):
        def _captured(self, step: Call) -> Call:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")

    found = speculate(model_of(Refusing), prompts(2), "ngram", k=3)
    assert found.texts == speculate(model_of(DecoderModel), prompts(2), "ngram", k=3).texts
    lines = [record.getMessage() for record in caplog.records if "without graphs" in record.getMessage()]
    said = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert lines == [f"engine: model runs without graphs: {said}"]
    model = model_of(Refusing)
    assert model.is_compiled
    model.prepare()
    assert not model.is_compiled


def test_ranks_capture_together():
    """Also if one of them still has a cache that the others have freed; if one alone cannot, all end."""

    class Second(Replayed):
        def _captured(self, step: Call) -> Call:
            if self.ranks.rank == 1 and len(self.captures) == 2:
                raise RuntimeError("out of memory")
            return super()._captured(step)

    ranks = ranks_of(2)
    models = [model_of(Second, 0.0, rank) for rank in ranks]

    def work(rank: int) -> list[int]:
        model, token_BS, kept = models[rank], torch.arange(3, 23)[None], []
        for end in (1, 1, 2):
            runner = ModelRunner(model)
            runner.start(1, 40)
            with pytest.raises(DistributedError, match="not captured") if end == 2 else nullcontext():
                runner.logits(token_BS, [end], [end])
            kept += [runner] if rank == 0 else []
        assert len(model._memories) == 3
        return [len(model.captures), model._refused]

    assert together([lambda rank=rank: work(rank) for rank in range(2)], ranks) == [[3, True], [2, True]]


@pytest.mark.parametrize("what", ["a head on the leader", "no program on rank 1"])
def test_what_differs_on_one_rank_changes_the_captures_of_all(what: str):
    """Warm-ups and captures have sums: a rank that makes more of them than the others would wait for ever."""

    class Own(Replayed):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.asked = 0

        def _programs(self, arguments: Any) -> Any:
            self.asked += 1
            if what.startswith("no program") and self.ranks.rank == 1:
                raise RuntimeError("no")
            return eager_step(self)

        def _made(self, arguments: Any) -> bool:
            return GraphedModel._made(self, arguments)

        def _warm(self, step: Call) -> None:
            self.ranks.barrier()
            step()

    ranks = ranks_of(2)
    models = [model_of(Own, 0.0, rank) for rank in ranks]

    def work(rank: int) -> list[Any]:
        model = models[rank]
        for taps in ((), (0, 2) if rank == 0 and what.startswith("a head") else (), ()):
            model.tap(taps)
            model.prepare([1, 2, 3], rows=1, capacity=40)
        return [model.captures, model.asked, model._failed]

    first, second = together([lambda rank=rank: work(rank) for rank in range(2)], ranks)
    assert first == second
    assert first == ([[1, 2, 3] * 3, 3, False] if what.startswith("a head") else [[], 1, True])


def test_where_sums_go_through_the_host_nothing_is_captured(caplog, monkeypatch):
    rank = ThreadRank(0, Meeting(1))
    monkeypatch.setattr(ThreadRank, "through_host", True)
    model = model_of(Replayed, 0.0, rank)
    assert speculate(model, prompts(2), None, k=0).texts and not model.captures
    assert caplog.text.count("model runs without graphs: its sums go through the host") == 1


def test_captures_of_a_model_share_a_stream_and_a_pool(monkeypatch):
    """Warm-ups are on that stream, too; what was before them comes first."""
    seen: list[Any] = []

    class Stream:
        def __init__(self, device: Any) -> None:
            seen.append("stream")

        def wait_stream(self, other: Any) -> None:
            seen.append("waits")

    class CurrentStream(Stream):
        def __init__(self) -> None:
            pass

    @contextmanager
    def on(what: str, *given: Any, **how: Any) -> Iterator[None]:
        seen.append((what, how.get("pool"), how.get("stream"), how.get("capture_error_mode")))
        yield

    class Captured:
        def replay(self) -> None:
            seen.append("replay")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: CurrentStream())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: seen.append(type(stream).__name__))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: on("side"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: on("device"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: seen.append("pool") or "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: on("graph", **how))
    monkeypatch.setattr(cuda_graphs, "WARM_UPS", 1)
    model = model_of(GraphedModel)
    calls = [lambda: torch.ones(1), lambda: torch.zeros(2)]
    for call in calls:
        model._warm(call)
        assert torch.equal(model._captured(call)(), call())
    side = ("side", None, None, None)
    graph = ("graph", "pool", model._side, "thread_local")
    warm, capture = ["waits", side, "waits"], [("device", None, None, None), graph, "CurrentStream", "replay"]
    assert seen == ["stream", *warm, "pool", *capture, *warm, *capture]
