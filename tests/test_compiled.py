"""Compiled steps and packed weights: the same products and texts, and one reason where there are none."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import cpp_builder
from torch._inductor.fx_passes import pad_mm
from torch._inductor.utils import run_and_get_code

from llama_ssp.config import Dtype, ModelConf, RunConf, SamplingConfig, Splitting, Steps
from llama_ssp.distributed.comm import ALONE
from llama_ssp.models import loader, programs, steps
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels import build as building
from llama_ssp.models.kernels.build import is_ours
from llama_ssp.models.kernels.linear import PackedLinear, operators, packable
from llama_ssp.models.linear import Products
from llama_ssp.models.programs import quick_builds
from llama_ssp.models.steps import SteppedModel
from llama_ssp.pair import assembly
from llama_ssp.pair.placements import compiles, impossible
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.state import Prompt
from tests.distributed.threads import ranks_of, together
from tests.families import VOCAB, build, decoder_of, ragged_prompts
from tests.rig import GREEDY, drive_refilled, engine_of, perturbed, speculate

CPU = torch.device("cpu")
SAMPLED = SamplingConfig(temperature=0.9, top_p=0.95)


def prompts(count: int) -> list[Prompt]:
    return ragged_prompts(*(9, 1, 6, 4, 12)[:count])


@pytest.mark.slow
@pytest.mark.compiler
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


@pytest.mark.slow
@pytest.mark.compiler
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


@pytest.mark.slow
@pytest.mark.compiler
def test_texts_are_those_of_eager_steps():
    """In fp32 every token: one row and several, K = 0 and not, greedy and drawn, rows that are refilled."""
    target, draft = ours("llama-gqa"), ours("llama-gqa", noise=0.05)
    fast, quick = ours("llama-gqa", fast=True), ours("llama-gqa", fast=True, noise=0.05)
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
        engine = engine_of(fast, quick, sampling=sampling, vocab=VOCAB)
        assert drive_refilled(engine, prompts(5), 2, k=3, longest=40, max_new=20) == alone
    assert fast._step is not None and quick._step is not None


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("family", "layers"), [("gemma2", 2), ("gpt_neox", 1), ("gpt_neo", 3), ("gpt_oss", 3)]
)
def test_other_families(family, layers):
    """Windows, softcaps, biases, parallel layers and experts, past the window's length."""
    plain = speculate(ours(family, layers), prompts(1), None, k=0, max_new=40)
    fast = ours(family, layers, fast=True)
    assert speculate(fast, prompts(1), "ngram", k=3, max_new=40).texts == plain.texts
    assert fast._step is not None


@pytest.mark.slow
@pytest.mark.compiler
def test_a_step_copies_no_cache(monkeypatch):
    """Its buffers have sizes of tokens alone. A size that might be 0 would be written as max(1, size)."""
    monkeypatch.setattr(programs, "load", lambda _: None)
    model = ours("llama-gqa", layers=1, fast=True)
    _, (code,) = run_and_get_code(model.prepare)
    made = re.findall(r"empty_strided_cpu\(\((.*?)\), ", code)
    assert made and all(len(set(re.findall(r"u\d+", sizes))) == 1 for sizes in made)
    assert len(set(re.findall(r"u\d+", " ".join(made)))) == 1 and "max(1, " not in code


@pytest.mark.slow
@pytest.mark.compiler
def test_a_step_pads_no_weight(monkeypatch):
    """To sizes that suit a GPU: a head of 50257 tokens would be copied in every step."""
    asked = []
    monkeypatch.setattr(pad_mm, "check_device", lambda *tensors: bool(asked.append(tensors)))
    decoder = decoder_of(build("llama-gqa", num_hidden_layers=1))
    last = steps.Section(decoder, slice(1, 1), first=False, last=True, tapped=False)
    where = [torch.arange(3)] * 3
    programs.compiled(programs.ProgramSpec(steps.run_section, last, (torch.zeros(3, 32), *where, []), ()))
    assert not asked


@pytest.mark.slow
@pytest.mark.compiler
def test_in_bf16_logits_differ_by_rounding():
    """Compiled steps are as near to the wide model as eager ones are."""
    torch.manual_seed(0)
    wide = ours("llama-gqa", 1, mild=True)
    narrow = ours("llama-gqa", 1, dtype=torch.bfloat16, mild=True)
    fast = ours("llama-gqa", 1, fast=True, dtype=torch.bfloat16, mild=True)
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


@pytest.mark.slow
@pytest.mark.compiler
def test_steps_are_kept_for_the_next_start(monkeypatch, caplog, tmp_path):
    """Found by all that they are made of; another's weights are read, not those they were made with."""
    monkeypatch.setattr(programs, "cache_folder", lambda: tmp_path)
    texts = speculate(ours("llama-gqa", fast=True), prompts(1), "ngram", k=3).texts
    assert len(list(tmp_path.rglob("step-*.bin"))) == 1
    monkeypatch.setattr(programs, "compiled", lambda *_: pytest.fail("it was compiled again"))
    again = ours("llama-gqa", fast=True)
    assert speculate(again, prompts(1), "ngram", k=3).texts == texts
    found = speculate(ours("llama-gqa", fast=True, noise=0.05), prompts(1), "ngram", k=3).texts
    assert found == speculate(ours("llama-gqa", noise=0.05), prompts(1), "ngram", k=3).texts != texts
    other = ours("gpt_neox", fast=True)
    paths = []
    for model in (other, again):
        kinds = steps.kinds_of(model.decoder, model.config)
        ((section, _),) = steps.sections_of(model.decoder, kinds, tapped=False)
        spec = programs.ProgramSpec(steps.run_section, section, (), kinds)
        paths.append(programs.program_path(model, spec))
    assert programs.load(paths[0]) is None and programs.load(paths[1]) is not None
    monkeypatch.setitem(programs.OPTIONS_BY_DEVICE, "cpu", {"unbacked_symint_fallback": 8})
    assert programs.program_path(again, spec) != paths[1]
    paths[1].write_bytes(paths[1].read_bytes()[:1000])
    assert programs.load(paths[1]) is None


@pytest.mark.slow
@pytest.mark.compiler
def test_models_of_equal_sizes_that_differ_in_a_constant_share_no_program(monkeypatch, tmp_path):
    """The norm's epsilon is compiled in. One cache folder, two configs: each model writes its own text."""
    monkeypatch.setattr(programs, "cache_folder", lambda: tmp_path)
    texts = []
    for epsilon in (1e-6, 0.5):
        plain, fast = (
            ours("llama-gqa", 1, fast=fast, mild=True, rms_norm_eps=epsilon) for fast in (False, True)
        )
        texts.append(speculate(fast, prompts(1), None, k=0).texts)
        assert fast._step is not None and texts[-1] == speculate(plain, prompts(1), None, k=0).texts
    assert texts[0] != texts[1]


@pytest.mark.long
@pytest.mark.compiler
def test_groups_of_blocks_share_a_program(monkeypatch, tmp_path):
    """Each with its own weights: two blocks, two blocks, one block, with windows in turn."""
    monkeypatch.setattr(programs, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(steps, "GROUP", 2)
    made = noted(monkeypatch)
    fast, plain = ours("gemma2", 5, fast=True), ours("gemma2", 5)
    texts = speculate(fast, prompts(1), "ngram", k=3, max_new=40).texts
    assert texts == speculate(plain, prompts(1), None, k=0, max_new=40).texts
    assert fast._step is not None
    assert made == [0, 2, 1, 0]


def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each program has that is compiled from now on."""
    made: list[int] = []
    compiled = programs.compiled
    monkeypatch.setattr(
        programs, "compiled", lambda spec: (made.append(len(spec.module.blocks)), compiled(spec))[1]
    )
    return made


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize(("layers", "group", "taps"), [(5, 2, (0, 3, 4, 5)), (2, 8, (0, 1, 2))])
def test_states_of_named_layers_are_those_of_eager_steps(layers, group, taps, monkeypatch, tmp_path):
    """In groups of two blocks, inside of one and between two, and as one program. Logits are, too."""
    monkeypatch.setattr(programs, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(steps, "GROUP", group)
    made, found = noted(monkeypatch), []
    for fast in (False, True):
        model = ours("llama-gqa", layers, fast=fast)
        model.tap(taps)
        runner = ModelRunner(model)
        runner.start(2, 20)
        token_BS = torch.arange(2 * 20).view(2, 20) % VOCAB
        runner.prefill(token_BS, [6, 3])
        assert len(model.tapped_TX) == 9
        logits = runner.logits(token_BS, [10, 6], [4, 3])
        states = model.tapped_TX
        model.tap(())
        found.append((logits[:, :3], states, runner.logits(token_BS, [11, 7], [1, 1])))
        assert model.tapped_TX is None
    assert found[0][1].shape[0] == 7 and not torch.equal(found[0][1], found[1][1])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()
    assert made == ([0, 2, 1, 0, 0, 2, 1, 0] if group == 2 else [2, 2])


@pytest.mark.parametrize(
    ("kinds", "ends"),
    [
        ("aaa", [3]),
        ("a" * 8, [4, 8]),
        ("a" * 9, [3, 6, 9]),
        ("a" * 11, [4, 8, 11]),
        ("ab" * 5, [2, 4, 6, 8, 10]),
        ("aaaaab" * 2 + "aa", [6, 12, 14]),
        ("abc" * 3 + "d", [10]),
    ],
)
def test_groups_repeat_each_other(kinds, ends):
    assert [group.stop for group in steps.groups_of(tuple(kinds))] == ends


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


def test_processes_that_start_together_compile_once(monkeypatch, tmp_path):
    """Here threads, which hold a file of their own each, as processes do."""
    made: list[Path] = []

    def compiling(command: list[str], place: Path) -> None:
        made.append(place)
        time.sleep(0.1)
        place.touch(0o700)

    monkeypatch.setattr(building, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(building, "compiler", lambda: sys.executable)
    monkeypatch.setattr(building, "_compile", compiling)
    (source := tmp_path / "some.cpp").touch()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(building.library, [source] * 3))
    assert len(made) == 1 and found == made * 3


@pytest.mark.compiler
def test_half_a_kernel_is_none(monkeypatch, tmp_path):
    """torch takes any file for one: after a kill -9 in the compiler each start ended in a bus error."""

    def killed(command: str, _: str) -> None:
        Path(command.split("-o ")[1].split()[0]).write_text("half")
        raise KeyboardInterrupt

    (source := tmp_path / "one.cpp").write_text("int one() { return 1; }")
    how = {"name": "one", "sources": str(source), "BuildOption": cpp_builder.CppOptions()}
    left = {}
    for context in (nullcontext(), quick_builds()):
        builder = cpp_builder.CppBuilder(**how, output_dir=str(tmp_path / type(context).__name__))
        place = Path(builder.get_target_file_path())
        with context:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(cpp_builder, "_run_compile_cmd", killed)
                builder.build()
            left[type(context)] = place.exists()
            builder.build()
        assert place.stat().st_size > 1000
    assert list(left.values()) == [True, False]


def test_one_thread_compiles_at_a_time():
    """torch says of no function that it may be traced in two: a pair may be loaded in each of two threads."""
    inside, most = 0, 0

    def compiling(_: int) -> None:
        nonlocal inside, most
        with quick_builds():
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compiling, range(8)))
    assert most == 1


@pytest.mark.compiler
def test_why_steps_are_eager():
    assert impossible(CPU) is None


def test_without_a_compiler_steps_are_eager(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = RunConf(model=_model(16), engine=Steps.compiled)
    with caplog.at_level(logging.WARNING):
        assert not compiles(run, "model", run.model, CPU, Dtype.bf16, Splitting.tensor, 1)
    assert [r.message for r in caplog.records] == [
        "engine: model m runs eagerly: there is no C++ compiler (CXX=no-such-compiler)"
    ]


def test_a_compiler_that_fails_leaves_the_model_as_it_is(monkeypatch, caplog, tmp_path):
    """And says so in one line."""
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(building, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(steps.linear, "operators", operators.__wrapped__)  # builds anew
    assert not steps.has_kernels("m", Dtype.bf16, CPU)
    said = [record.message.split(": ")[1] for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["m runs eagerly"]


def test_kernels_that_cannot_be_built_are_tried_once(command, monkeypatch):
    """Codes have theirs in eager steps, too: a model in codes tried, and warned, twice more."""
    tried = []
    for module in (assembly, loader):
        monkeypatch.setattr(module, "has_kernels", lambda *what: bool(tried.append(what)))
    answer = command("engine=compiled", "draft=none", "model.dtype=int4", "prompt=a", "max_new_tokens=4")
    assert answer.code == 0 and len(tried) == 1


@pytest.mark.parametrize("able", [(True, False), (True, True)])
def test_ranks_have_compiled_steps_all_or_none(able, monkeypatch):
    """A rank that cannot build the kernels left the others waiting in the first step for half an hour."""
    answers = iter(able)
    monkeypatch.setattr(assembly, "has_kernels", lambda *_: next(answers))
    model = SimpleNamespace(model=ModelConf(name="m"), dtype=Dtype.bf16, device=CPU, compiled=True)
    ranks = ranks_of(2)
    found = together([partial(assembly._all_compile, model, rank) for rank in ranks], ranks)
    assert found == [all(able)] * 2


def test_what_a_compiler_says_is_its_error():
    """Not its first line, which names a function."""
    error = subprocess.CalledProcessError(
        1, "g++", stderr="a.cpp: In function 'f':\na.cpp:3: error: no\n 3 | x"
    )
    assert building.complaint(error) == "a.cpp:3: error: no"
    assert building.complaint(OSError("full")) == "full"


def test_an_error_without_text_is_said_by_its_kind():
    assert building.complaint(OSError()) == "OSError"


@pytest.mark.slow
@pytest.mark.compiler
def test_a_model_that_does_not_compile_runs_eagerly(monkeypatch, caplog):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not this one\nand so on")

    monkeypatch.setattr(programs, "load", lambda _: None)
    monkeypatch.setattr(programs, "compiled", refuse)
    fast, plain = ours("llama-mha", fast=True), ours("llama-mha")
    assert speculate(fast, prompts(1), None, k=0).texts == speculate(plain, prompts(1), None, k=0).texts
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["engine: m runs eagerly: it does not compile: not this one"]


@pytest.mark.slow
@pytest.mark.compiler
def test_the_command_compiles_before_it_writes(command, caplog):
    sizes = ("model.n_layers=1", "draft.n_layers=1")
    with caplog.at_level(logging.INFO, logger="llama_ssp"):
        answer = command("engine=compiled", *sizes, "prompt=a", "task.max_new_tokens=8", "seed=1")
    assert answer.code == 0 and not answer.errors
    said = "\n".join(record.message for record in caplog.records)
    assert "compile: 2 of 2 models" in said and "runs eagerly" not in said


@pytest.mark.compiler
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


def ours(family: str, layers: int = 2, fast: bool = False, noise: float = 0.0, **changes) -> DecoderModel:
    """A decoder with few layers: each takes its seconds to compile. `fast`: with packed weights."""
    module = build(family, num_hidden_layers=layers, **changes)
    module = perturbed(module, noise) if noise else module
    if not fast:
        return DecoderModel(decoder_of(module), module.config, "m")
    assert steps.has_kernels("m", Dtype.bf16, CPU)
    return SteppedModel(decoder_of(module, product=Products(CPU, fast=True)), module.config, "m", ALONE)
