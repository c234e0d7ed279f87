"""Compiled steps and packed weights: the same products and texts, and one reason where there are none."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from llama_ssp.config import Dtype, ModelConf, RunConf, SamplingConfig, Splitting, Steps
from llama_ssp.models import compile as compiling
from llama_ssp.models import cuda_graphs as graphs
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.compile import CompiledModel, StepFile, traced
from llama_ssp.models.cuda_graphs import GraphedModel
from llama_ssp.models.kernels import build as building
from llama_ssp.models.kernels.build import is_ours
from llama_ssp.models.kernels.linear import PackedLinear, operators, packable
from llama_ssp.pair.placements import compiles, impossible, quickens, unproven
from llama_ssp.speculative.drafters.local import ModelDrafter
from llama_ssp.speculative.engine import Engine
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.rng import CounterDraws
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.state import Prompt
from llama_ssp.speculative.verification import RULES
from tests.families import VOCAB, build
from tests.rig import GREEDY, drive_refilled, perturbed, speculate

CPU = torch.device("cpu")
SAMPLED = SamplingConfig(temperature=0.9, top_p=0.95)
needs_compiler = pytest.mark.slow  # the kernel takes some ten seconds to build, a step as long


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"p{n}", tuple((7 * n + 3 * i) % (VOCAB - 3) + 3 for i in range(length)))
        for n, length in enumerate((9, 1, 6, 4, 12)[:count])
    ]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (97, 48), (5, 2), (33, 1026)])
def test_a_packed_layer_gives_the_product(outputs, inputs, dtype):
    """Within the rounding of the number format, for few rows and for many, with a bias and without."""
    operators()
    torch.manual_seed(0)
    for bias in (True, False):
        linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
        layer = PackedLinear(linear)
        for rows in (1, 2, 11, 12, 13, 30):
            x = torch.randn(rows, 2, inputs, dtype=dtype)
            exact = linear.double()(x.double())
            linear.to(dtype)
            found = layer(x)
            assert found.dtype == dtype
            assert found.shape == exact.shape
            unit = torch.finfo(dtype).eps
            bound = unit * exact.abs() + inputs * 2**-22 * exact.abs().max()
            assert ((found.double() - exact).abs() <= bound).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype):
    """To the bit: so a block of K+1 tokens is multiplied as each of its tokens is alone."""
    operators()
    layer = PackedLinear(nn.Linear(300, 70, dtype=dtype))
    x = torch.randn(29, 300, dtype=dtype)
    whole = layer(x)
    for row in range(29):
        assert torch.equal(layer(x[row : row + 1])[0], whole[row])


def test_what_is_packed():
    assert packable(nn.Linear(6, 4))
    assert packable(nn.Linear(6, 4, dtype=torch.bfloat16))
    assert not packable(nn.Linear(5, 4, dtype=torch.bfloat16))  # half a word
    assert not packable(nn.Linear(6, 4, dtype=torch.float16))
    assert not packable(nn.LayerNorm(6))


@needs_compiler
def test_texts_are_those_of_eager_steps():
    """In fp32 every token: one row and several, K = 0 and not, greedy and drawn, rows that are refilled."""
    target, draft = (CausalModel(small("llama-gqa"), "target"), CausalModel(_noisy("llama-gqa"), "draft"))
    fast, quick = (
        CompiledModel(CausalModel(small("llama-gqa"), "target")),
        CompiledModel(CausalModel(_noisy("llama-gqa"), "draft")),
    )
    for sampling in (GREEDY, SAMPLED):
        for count in (1, 3):
            for k in (0, 4):
                how = {"k": k, "sampling": sampling, "max_new": 40}
                plain = speculate(target, prompts(count), draft if k else None, **how)
                found = speculate(fast, prompts(count), quick if k else None, **how)
                assert found.texts == plain.texts
                assert (found.drafted, found.accepted) == (plain.drafted, plain.accepted)
        alone = {
            prompt.id: speculate(target, [prompt], draft, k=3, sampling=sampling, max_new=20).texts[0]
            for prompt in prompts(5)
        }
        transform, draws = SamplingTransform(sampling, (), VOCAB), CounterDraws(0)
        engine = Engine(
            ModelRunner(fast),
            ModelDrafter(ModelRunner(quick), transform, draws),
            transform,
            RULES["block"],
            draws,
        )
        assert drive_refilled(engine, prompts(5), 2, k=3, longest=40, max_new=20) == alone
    assert not fast._failed and not quick._failed
    assert set(fast._steps) == {(False, True), (True, False), (True, True)}


@needs_compiler
@pytest.mark.parametrize(("family", "layers"), [("gemma2", 2), ("gpt_neox", 1)])
def test_other_families(family, layers):
    """Windows, softcaps, biases and parallel layers, past the window's length."""
    plain = speculate(CausalModel(small(family, layers), "eager"), prompts(1), None, k=0, max_new=40)
    fast = CompiledModel(CausalModel(small(family, layers), "compiled"))
    assert speculate(fast, prompts(1), "ngram", k=3, max_new=40).texts == plain.texts
    assert not fast._failed


@needs_compiler
def test_a_compiled_model_adapts_the_module_once():
    """GPT-Neo's masks were opened when the eager model was made."""
    causal = CausalModel(build("gpt_neo"), "m")
    local = causal.module.transformer.h[1].attn.attention
    size = local.bias.shape
    fast = CompiledModel(causal)
    assert (local.bias.shape, len(local._forward_pre_hooks)) == (size, 1)
    assert fast.module is causal.module and fast.caches is causal.caches and fast.vocab == causal.vocab


@needs_compiler
def test_in_bf16_logits_differ_by_rounding():
    """Compiled steps are as near to the wide model as eager ones are."""
    torch.manual_seed(0)
    wide = CausalModel(small("llama-gqa", 1, mild=True), "wide")
    narrow = CausalModel(small("llama-gqa", 1, dtype=torch.bfloat16, mild=True), "narrow")
    fast = CompiledModel(CausalModel(small("llama-gqa", 1, dtype=torch.bfloat16, mild=True), "compiled"))
    token_BS = torch.randint(3, VOCAB, (1, 60))
    found = []
    for model in (wide, narrow, fast):
        runner = ModelRunner(model)
        runner.start(1, 60)
        runner.prefill(token_BS, [10])
        found.append(torch.cat([runner.logits(token_BS, [end], [5]).double() for end in range(15, 60, 5)], 1))
    exact, eager, quick = found
    assert (quick - exact).abs().max() <= 1.5 * (eager - exact).abs().max()
    assert (quick - eager).abs().max() > 0  # else nothing was compiled


@needs_compiler
def test_steps_are_kept_for_the_next_start(monkeypatch, caplog, tmp_path):
    """Found by all that they are made of; another's weights are read, not those they were made with."""
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    first = CompiledModel(CausalModel(small("llama-gqa"), "first"))
    texts = speculate(first, prompts(1), "ngram", k=3).texts
    assert len(list(tmp_path.rglob("step-*.bin"))) == 1
    monkeypatch.setattr(CompiledModel, "_compiled", lambda self, kind: pytest.fail("it was compiled again"))
    again = CompiledModel(CausalModel(small("llama-gqa"), "again"))
    assert speculate(again, prompts(1), "ngram", k=3).texts == texts
    other, plain = CompiledModel(CausalModel(_noisy("llama-gqa"), "other")), _noisy("llama-gqa")
    found = speculate(other, prompts(1), "ngram", k=3).texts
    assert found == speculate(CausalModel(plain, "plain"), prompts(1), "ngram", k=3).texts != texts
    assert StepFile(again, (True, True)).load() is None
    assert StepFile(CompiledModel(CausalModel(small("gpt_neox"), "alien")), (False, True)).load() is None
    kept = StepFile(again, (False, True))
    kept.path.write_bytes(kept.path.read_bytes()[:1000])
    assert kept.load() is None


class Replayed(GraphedModel):
    """Without a GPU: steps as they are, and a capture that only remembers the call."""

    def _compiled(self, kind):
        return traced(self)

    def _captured(self, call):
        return call


def test_a_library_that_others_may_write_is_not_loaded(tmp_path):
    place = tmp_path / "kept" / "linear.so"
    place.parent.mkdir(mode=0o700)
    place.touch(mode=0o600)
    assert is_ours(place)
    place.parent.chmod(0o770)
    assert not is_ours(place)
    place.parent.chmod(0o700)
    place.chmod(0o602)
    assert not is_ours(place)


def test_what_a_graph_reads_stays_where_it_was(monkeypatch):
    """A replay knows addresses only: whoever made the graph has to hold all that it was captured with."""
    seen: list[weakref.ref[torch.Tensor]] = []

    class Captured(Replayed):
        def _arguments(self, token_BW, feed, layers):
            arguments = super()._arguments(token_BW, feed, layers)
            seen.extend(map(weakref.ref, arguments[3:5]))
            return arguments

        def _captured(self, call):
            made = call()
            del call
            return lambda: made

    runner = ModelRunner(Captured(CausalModel(build("llama-gqa"), "target")))
    runner.start(1, 40)
    token_BS = torch.arange(3, 44).view(1, 41)
    runner.prefill(token_BS, [4])
    runner.logits(token_BS, [6], [2])  # compiles
    seen.clear()
    runner.logits(token_BS, [8], [2])  # captures
    assert len(seen) == 2 and all(tensor() is not None for tensor in seen)


def test_graphs_have_buffers_for_each_shape_and_bucket(monkeypatch):
    """All of a graph but its capture: texts that outgrow buckets, rows that differ, K that differs."""
    monkeypatch.setattr(graphs, "BUCKET", 16)
    target, draft = CausalModel(build("llama-gqa"), "target"), CausalModel(_noisy("llama-gqa"), "draft")
    fast, quick = Replayed(target), Replayed(draft)
    for count in (1, 3):
        for k in (0, 4):
            how = {"k": k, "max_new": 40, "adaptive": k > 0}
            plain = speculate(target, prompts(count), draft if k else None, **how)
            found = speculate(fast, prompts(count), quick if k else None, **how)
            assert found.texts == plain.texts
    runner = ModelRunner(fast)
    runner.start(2, 40)
    token_BS = torch.arange(3, 85).view(2, 41)
    runner.prefill(token_BS, [4, 9])
    runner.logits(token_BS, [6, 11], [2, 2])
    kept = runner.logits(token_BS, [8, 13], [2, 2])
    before = kept.clone()
    runner.logits(token_BS, [10, 15], [2, 2])
    runner.logits(token_BS, [12, 18], [2, 2])
    assert torch.equal(kept, before)  # what was given stays, though buffers are used again
    programs = fast._programs[runner._cache]
    assert set(programs) == {(2, 2, 16), (2, 2, 32)}


def test_why_steps_are_eager():
    assert impossible(CPU, 1) is None
    assert "cuda" in str(unproven(torch.device("cuda:0"))) and unproven(CPU) is None
    assert "spread" in str(impossible(CPU, 2))


def test_where_8_bit_layers_are_ours():
    run = RunConf(model=_model(2), engine=Steps.compiled)
    assert quickens(run, Dtype.int8, Splitting.tensor)
    assert not quickens(run, Dtype.bf16, Splitting.tensor) and not quickens(run, Dtype.int8, Splitting.layers)
    assert not any(
        quickens(replace(run, engine=how), Dtype.int8, Splitting.tensor) for how in (Steps.auto, Steps.eager)
    )


def test_without_a_compiler_steps_are_eager(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = RunConf(model=_model(16), engine=Steps.compiled)
    with caplog.at_level(logging.WARNING):
        assert not compiles(run, "model", run.model, CPU, Dtype.bf16, Splitting.tensor, 1)
    assert [r.message for r in caplog.records] == [
        "engine: model m runs eagerly: there is no C++ compiler (CXX, g++ or clang++)"
    ]


def test_a_compiler_that_fails_leaves_the_model_as_it_is(monkeypatch, caplog, tmp_path):
    """And says so in one line."""
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(building, "cache_folder", lambda: tmp_path)
    operators.cache_clear()
    causal = CausalModel(build("llama-mha"), "m")
    assert compiling.compiled(causal) is causal
    assert type(causal.module.lm_head) is nn.Linear
    assert [record.message.split(": ")[1] for record in caplog.records] == ["m runs eagerly"]


@needs_compiler
def test_a_model_that_does_not_compile_runs_eagerly(monkeypatch, caplog):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not this one\nand so on")

    monkeypatch.setattr(CompiledModel, "_compiled", lambda self, kind: refuse)
    fast = CompiledModel(CausalModel(build("llama-mha"), "m"))
    plain = speculate(CausalModel(build("llama-mha"), "m"), prompts(1), None, k=0)
    assert speculate(fast, prompts(1), None, k=0).texts == plain.texts
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["engine: m runs eagerly: it does not compile: not this one"]


@needs_compiler
def test_the_command_compiles_before_it_writes(command, caplog):
    sizes = ("model.n_layers=1", "draft.n_layers=1")
    with caplog.at_level(logging.INFO, logger="llama_ssp"):
        answer = command("engine=compiled", *sizes, "task.prompts=[a]", "task.max_new_tokens=8", "seed=1")
    assert answer.code == 0 and not answer.errors
    said = "\n".join(record.message for record in caplog.records)
    assert "compile: 2 of 2 steps" in said and "runs eagerly" not in said


@pytest.mark.parametrize(("layers", "new", "expected"), [(2, 64, False), (32, 2048, True)])
def test_auto_compiles_where_it_pays(layers, new, expected):
    model = _model(layers)
    run = RunConf(model=model)
    run.task.max_new_tokens = new  # type: ignore[attr-defined]
    how = CPU, Dtype.bf16, Splitting.tensor, 1
    assert compiles(run, "model", model, *how) is expected
    assert not compiles(replace(run, engine=Steps.eager), "model", model, *how)
    assert compiles(replace(run, engine=Steps.compiled), "model", model, *how)


def _model(layers: int) -> ModelConf:
    sizes = {"n_heads": 16, "n_kv_heads": 16, "head_dim": 64, "dim": 1024, "ffn": 2816, "vocab": 8192}
    return ModelConf(name="m", family="llama", n_layers=layers, context=4096, **sizes)


def small(family: str, layers: int = 2, **changes):
    """Few layers: each takes its seconds to compile."""
    return build(family, num_hidden_layers=layers, **changes)


def _noisy(family: str):
    return perturbed(small(family), 0.05)
