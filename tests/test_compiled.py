"""Compiled steps and packed weights: the same products and texts, and one reason where there are none."""

import logging
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype, ModelConf, RunConf, SamplingConfig, Splitting, Steps
from llama_ssp.models import kept_files, programs, steps
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels import attention, coded, probe
from llama_ssp.models.kernels import build as building
from llama_ssp.models.kernels.coded import CodedLinear
from llama_ssp.models.kernels.expert_stacks import Stack, product
from llama_ssp.models.kernels.kernel_sizes import FEW_ROWS, MANY_ROWS, MOST_PAIRS
from llama_ssp.models.kernels.linear import PackedLinear, operators
from llama_ssp.models.linear import Kernels
from llama_ssp.models.programs import quick_builds
from llama_ssp.models.steps import SteppedModel
from llama_ssp.pair import assembly, placements, session
from llama_ssp.pair.placements import compiles
from llama_ssp.speculative.model_runner import ModelRunner
from tests.distributed.test_tensor import walked
from tests.distributed.threads import ranks_of, together
from tests.families import PROMPTS, TOLERANCE, VOCAB, model_of
from tests.rig import GREEDY, drive_refilled, engine_of, speculate

CPU = torch.device("cpu")
SAMPLED = SamplingConfig(temperature=0.9, top_p=0.95)


def ours(family: str, layers: int = 2, fast: bool = False, noise: float = 0.0, **changes) -> DecoderModel:
    """A model with few layers: each takes its seconds to compile. `fast`: compiled, with packed weights."""
    if fast:
        assert steps.has_kernels("m", Dtype.bf16, CPU, (4, 4, 16))
    kind, kernels = (SteppedModel, Kernels.all) if fast else (DecoderModel, Kernels.none)
    return model_of(family, kind, noise, kernels=kernels, num_hidden_layers=layers, **changes)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (97, 48), (5, 2), (33, 1026)])
def test_a_packed_layer_gives_the_product(outputs, inputs, dtype):
    """Within the rounding of the number format; and what a row gives depends on it alone, to the bit."""
    operators()
    torch.manual_seed(0)
    for bias in (True, False):
        linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
        layer, x = PackedLinear(linear), torch.randn(30, 2, inputs, dtype=dtype)
        product, exact = layer(x), deepcopy(linear).double()(x.double())
        assert product.dtype == dtype, bias
        bound = torch.finfo(dtype).eps * exact.abs() + inputs * 2**-22 * exact.abs().max()
        assert ((product.double() - exact).abs() <= bound).all(), bias
        for rows in (*(slice(row, row + 1) for row in range(30)), slice(0, 6), slice(7, 13)):
            assert torch.equal(layer(x[rows]), product[rows])


@pytest.mark.slow
@pytest.mark.compiler
def test_texts_are_those_of_eager_steps():
    """In fp32 every token: one row and several, K = 0 and not, greedy and drawn, rows that are refilled."""
    target, draft = ours("llama-gqa"), ours("llama-gqa", noise=0.05)
    fast, quick = ours("llama-gqa", fast=True), ours("llama-gqa", fast=True, noise=0.05)
    for sampling, rows, k in ((GREEDY, 1, 4), (GREEDY, 3, 4), (SAMPLED, 1, 4), (SAMPLED, 3, 0)):
        how = {"k": k, "sampling": sampling, "max_new": 40}
        expected = speculate(target, PROMPTS[:rows], draft if k else None, **how)
        result = speculate(fast, PROMPTS[:rows], quick if k else None, **how)
        assert result.texts == expected.texts, (rows, k)
        assert (result.drafted, result.accepted) == (expected.drafted, expected.accepted), (rows, k)
    expected, result = (
        drive_refilled(engine_of(*pair, sampling=SAMPLED), PROMPTS, 2, k=3, longest=40, max_new=20)
        for pair in ((target, draft), (fast, quick))
    )
    assert result == expected
    assert fast._step is not None and quick._step is not None


@pytest.mark.slow
@pytest.mark.compiler
def test_programs_are_kept_for_the_next_start(monkeypatch, tmp_path):
    """Found by all that they are made of; another's weights are read, not those they were made with."""
    texts = speculate(ours("llama-gqa", fast=True), PROMPTS[:1], "ngram", k=3).texts
    monkeypatch.setattr(programs, "compiled", lambda *_: pytest.fail("it was compiled again"))
    again = ours("llama-gqa", fast=True)
    assert speculate(again, PROMPTS[:1], "ngram", k=3).texts == texts
    result = speculate(ours("llama-gqa", fast=True, noise=0.05), PROMPTS[:1], "ngram", k=3).texts
    assert result == speculate(ours("llama-gqa", noise=0.05), PROMPTS[:1], "ngram", k=3).texts != texts

    def path_of(model: DecoderModel) -> Path:
        kinds = steps.kinds_of(model.decoder, model.config)
        ((section, _),) = steps.sections_of(model.decoder, kinds, tapped=False)
        return programs.program_path(model, programs.ProgramSpec(steps.run_section, section, (), kinds))

    path = path_of(again)
    others = [path_of(ours("gpt_neox", fast=True)), path_of(ours("llama-gqa", fast=True, rms_norm_eps=0.5))]
    monkeypatch.setitem(programs.OPTIONS_BY_DEVICE, "cpu", {"unbacked_symint_fallback": 8})
    assert len({path, *others, path_of(again)}) == 4 and programs.load(path) is not None
    half = tmp_path / path.name
    half.write_bytes(path.read_bytes()[:1000])
    assert programs.load(half) is None


@pytest.mark.slow
@pytest.mark.compiler
def test_a_step_in_bf16(monkeypatch):
    """Logits are as near to the wide model's as eager ones; no cache is copied.

    Buffers have sizes of tokens alone. A size that might be 0 would be written as max(1, size).
    """
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(programs, "load", lambda _: None)
    wide, eager = (ours("llama-gqa", 1, dtype=kind, mild=True) for kind in (torch.float32, torch.bfloat16))
    fast = ours("llama-gqa", 1, fast=True, dtype=torch.bfloat16, mild=True)
    _, (code,) = run_and_get_code(fast.prepare)
    buffers = re.findall(r"empty_strided_cpu\(\((.*?)\), ", code)
    assert buffers and all(len(set(re.findall(r"u\d+", sizes))) == 1 for sizes in buffers)
    assert len(set(re.findall(r"u\d+", " ".join(buffers)))) == 1 and "max(1, " not in code
    logits, token_BS = [], torch.randint(3, VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))
    for model in (wide, eager, fast):
        runner = ModelRunner(model)
        runner.start(1, 60)
        runner.prefill(token_BS, [10])
        parts = [runner.logits(token_BS, [end], [5]) for end in range(15, 60, 5)]
        logits.append(torch.cat(parts, 1).double())
    exact, rounded, result = logits
    assert (result - exact).abs().max() <= 1.5 * (rounded - exact).abs().max()
    assert (result - rounded).abs().max() > 0  # else nothing was compiled


@pytest.mark.slow
@pytest.mark.compiler
def test_a_step_with_states(monkeypatch):
    """Texts and refills are those of eager steps; rings of states and of tails are written in place."""
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(programs, "load", lambda _: None)
    fast = ours("qwen3_5", 3, fast=True)
    _, (code,) = run_and_get_code(fast.prepare)
    buffers = re.findall(r"empty_strided_cpu\(\((.*?)\), ", code)
    assert buffers and len(set(re.findall(r"u\d+", " ".join(buffers)))) == 1

    eager = ours("qwen3_5", 3)
    expected, result = (
        drive_refilled(engine_of(model, model, sampling=GREEDY), PROMPTS, 2, k=3, longest=40, max_new=20)
        for model in (eager, fast)
    )
    assert result == expected
    assert fast._step is not None
    for found, wanted in zip(walked(fast), walked(eager), strict=True):
        assert (found - wanted).abs().max() <= 10 * TOLERANCE * wanted.abs().max()


FEW_LAYERS = {
    "llama-gqa": 2, "llama-mha": 2, "gemma2": 2, "gpt_neox": 1, "gpt_neo": 3, "gpt_oss": 3, "mixtral": 2,
    "qwen3_moe": 2, "apertus": 2, "cohere2": 3, "cohere": 2, "exaone4": 3, "gemma": 2, "glm4": 2,
    "glm4_moe": 3, "hunyuan": 2, "ministral3": 2, "olmo3": 3, "seed_oss": 2, "qwen3_5": 3, "qwen3_5_moe": 3,
    "qwen3_next": 3, "gemma4": 3, "gemma4-moe": 3,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.compiler
def test_one_program_serves_all_steps_of_one_model_alone():
    """Models step in turn, two of one size: windows, softcaps, biases, parallel layers, experts.

    One token and several, one row and several, caches of other sizes, texts beyond the window.
    """
    families = [*((name, layers, 0.0) for name, layers in FEW_LAYERS.items()), ("llama-gqa", 2, 0.05)]
    models = [[ours(name, layers, fast, noise) for fast in (False, True)] for name, layers, noise in families]
    for rows, k in ((1, 0), (3, 4), (2, 1)):
        for eager, fast in models:
            texts = speculate(eager, PROMPTS[:rows], None, k=0, max_new=40).texts
            assert speculate(fast, PROMPTS[:rows], "ngram", k=k, max_new=40).texts == texts
    for eager, fast in models:
        assert fast._step is not None
        for result, expected in zip(walked(fast), walked(eager), strict=True):
            assert (result - expected).abs().max() <= 10 * TOLERANCE * expected.abs().max()  # sharp models


@pytest.mark.long
@pytest.mark.compiler
def test_groups_of_blocks_share_a_program(monkeypatch, tmp_path):
    """Logits, and states of named layers, inside of a group and between two, are those of eager steps.

    With windows in turn. Programs for a group with all blocks are those of the tests above.
    """
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(steps, "GROUP", 2)
    blocks, compile_ = [], programs.compiled
    counted = lambda spec: (blocks.append(len(spec.module.blocks)), compile_(spec))[1]  # noqa: E731
    monkeypatch.setattr(programs, "compiled", counted)
    results = []
    for fast in (False, True):
        model = ours("gemma2", 5, fast=fast)
        model.tap((0, 3, 4, 5))
        runner = ModelRunner(model)
        runner.start(2, 20)
        token_BS = torch.arange(2 * 20).view(2, 20) % VOCAB
        runner.prefill(token_BS, [6, 3])
        assert len(model.tapped_TX) == 9, fast
        logits, states = runner.logits(token_BS, [10, 6], [4, 3]), model.tapped_TX
        model.tap(())
        results.append((logits[:, :3], states, runner.logits(token_BS, [11, 7], [1, 1])))
        assert model.tapped_TX is None, fast
    assert results[0][1].shape[0] == 7 and not torch.equal(results[0][1], results[1][1])
    for eager, fast in zip(*results, strict=True):
        assert (eager - fast).abs().max() <= 1e-5 * eager.abs().max()
    assert blocks == [0, 2, 1, 0] * 2


def test_groups_repeat_each_other():
    """So that one program serves all; where that cannot be, the last one is shorter, or the first one odd."""
    ends = {
        "a" * 9: [3, 6, 9], "a" * 11: [4, 8, 11], "aaaaab" * 2 + "aa": [6, 12, 14], "abc" * 3 + "d": [10],
        "daa": [3], "daaaaaa": [1, 4, 7], "ddd" + "a" * 8: [3, 7, 11], "dddd" + "a" * 8: [12], "abcde": [5],
    }  # fmt: skip
    assert {kinds: [group.stop for group in steps.groups_of(tuple(kinds))] for kinds in ends} == ends


def test_processes_that_start_together_compile_once(monkeypatch, tmp_path):
    """Here threads, which hold a file of their own each, as processes do."""
    compiled: list[Path] = []

    def compiling(command: list[str], place: Path) -> None:
        compiled.append(place)
        time.sleep(0.1)
        place.touch(0o700)

    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(building, "compiler", lambda: sys.executable)
    monkeypatch.setattr(building, "_compile", compiling)
    (source := tmp_path / "some.cpp").touch()
    with ThreadPoolExecutor() as pool:
        libraries = list(pool.map(building.library, [source] * 3))
    assert len(compiled) == 1 and libraries == compiled * 3


@pytest.mark.compiler
def test_half_a_kernel_is_none(monkeypatch, tmp_path):
    """torch takes any file for one: after a kill -9 in the compiler each start ended in a bus error."""
    from torch._inductor import cpp_builder

    def killed(command: str, _: str) -> None:
        Path(command.split("-o ")[1].split()[0]).write_text("half")
        raise KeyboardInterrupt

    (source := tmp_path / "one.cpp").write_text("int one() { return 1; }")
    how = {"name": "one", "sources": str(source), "BuildOption": cpp_builder.CppOptions()}
    for context, is_left in ((nullcontext(), True), (quick_builds(), False)):
        builder = cpp_builder.CppBuilder(**how, output_dir=str(tmp_path / type(context).__name__))
        place = Path(builder.get_target_file_path())
        with context:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(cpp_builder, "_run_compile_cmd", killed)
                builder.build()
            assert place.exists() is is_left
            builder.build()
        assert place.stat().st_size > 1000, is_left


@pytest.mark.parametrize("is_quoted", [False, True], ids=["plain", "quoted"])
def test_folders_with_blanks_reach_the_compiler(
    is_quoted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch quotes some paths of its command, and not others."""
    site = tmp_path / "my dïr" / "torch"
    cache = tmp_path / "a  home" / "cache"
    monkeypatch.setattr(torch, "__file__", str(site / "__init__.py"))
    monkeypatch.setattr(kept_files, "cache_folder", lambda: cache / "llama_ssp")
    cache.mkdir(parents=True)
    include = shlex.quote(str(site / "include")) if is_quoted else f"{site}/include"

    def run(command: str, cwd: str) -> None:
        words = shlex.split(command)
        assert words[:4] == ["g++", f"{cache}/a.cpp", f"-I{site}/include", f"-L{site}/lib"]
        assert words[4] == "-o"
        Path(words[5]).touch()

    command = f"g++ {cache}/a.cpp -I{include} -L{site}/lib -o {cache}/a.so"
    programs.compile_beside(run, command, str(tmp_path))
    assert [file.name for file in cache.iterdir()] == ["a.so"]


def test_python_3_13_0_gives_no_warning_of_slow_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives it several times a program; and ours have no guards."""
    said = []

    def compile_nothing(*_: object, **__: object) -> None:
        said.append(torch._dynamo.config.issue_3_13_0_warning)
        raise InterruptedError

    monkeypatch.setattr(torch, "compile", compile_nothing)
    spec = programs.ProgramSpec(lambda module, x: x, torch.nn.Identity(), (torch.zeros(1),), ())
    with pytest.raises(InterruptedError):
        programs.compiled(spec)
    assert said == [False]
    assert torch._dynamo.config.issue_3_13_0_warning, "elsewhere it is torch's"


def test_one_thread_compiles_at_a_time():
    """torch says of no function that it may be traced in two: a pair may be loaded in each of two threads."""

    def builds() -> bool:
        with quick_builds():
            return True

    with ThreadPoolExecutor() as pool:
        with quick_builds():
            other = pool.submit(builds)
            with pytest.raises(TimeoutError):
                other.result(timeout=0.1)
        assert other.result()


LARGE = {"n_heads": 16, "n_kv_heads": 16, "head_dim": 64, "dim": 1024, "ffn": 2816, "vocab": 8192}


@pytest.mark.compiler
@pytest.mark.parametrize(("layers", "new", "expected"), [(2, 64, False), (32, 2048, True)])
def test_auto_compiles_where_it_pays(layers, new, expected, monkeypatch, caplog):
    model = ModelConf(name="m", family="llama", n_layers=layers, context=4096, **LARGE)
    run, how = RunConf(model=model), (CPU, Dtype.bf16, Splitting.tensor)
    run.task.max_new_tokens = new  # type: ignore[attr-defined]
    assert compiles(run, "model", model, *how) is expected
    assert not compiles(replace(run, engine=Steps.eager), "model", model, *how)
    wanted = replace(run, engine=Steps.compiled)
    assert compiles(wanted, "model", model, *how)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not compiles(wanted, "model", model, *how)
    reason = "there is no C++ compiler (CXX=no-such-compiler)"
    line = f"engine: model m runs eagerly: {reason}; {placements.SLOWER}"
    assert caplog.messages == [line]
    for asked, splitting in ((Steps.eager, Splitting.tensor), (Steps.auto, Splitting.layers)):
        gpu = torch.device("cuda"), Dtype.bf16, splitting
        assert not compiles(replace(run, engine=asked), "model", model, *gpu)
    cost = f"the host takes {32 if expected else 2} ms to launch a step"
    reasons = "engine=eager", "placement.splitting=layers"
    assert caplog.messages[1:] == [f"engine: model m runs eagerly: {reason}; {cost}" for reason in reasons]


@pytest.mark.parametrize(
    ("role", "new", "bits", "engine", "says"),
    [
        ("model", 2048, 0, Steps.auto, True),
        ("model", 64, 0, Steps.auto, False),
        ("model", 64, 4, Steps.auto, True),
        ("model", 2048, 4, Steps.eager, False),
        ("draft", 2048, 4, Steps.auto, False),
    ],
    ids=["would be compiled", "too short to compile", "codes are decoded", "asked for", "of a pair once"],
)
def test_a_machine_without_a_compiler_says_what_it_costs(
    role: str,
    new: int,
    bits: int,
    engine: Steps,
    says: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, and only where a compiler would make a difference."""
    monkeypatch.setattr(placements, "compiler", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    model = ModelConf(name="m", family="llama", n_layers=32, context=4096, code_bits=bits, **LARGE)
    run = RunConf(model=model, engine=engine)
    run.task.max_new_tokens = new  # type: ignore[attr-defined]
    assert not compiles(run, role, model, CPU, Dtype.bf16, Splitting.tensor)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    line = "engine: model m runs eagerly: there is no C++ compiler (g++ 11 or later); " + placements.SLOWER
    assert warned == ([line] if says else [])


def test_a_compiler_that_fails_leaves_the_model_as_it_is(monkeypatch, caplog, tmp_path):
    """And says so in one line: the compiler's error, not the line before it, which names a function."""
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(steps.linear, "operators", operators.__wrapped__)  # builds anew
    assert not steps.has_kernels("m", Dtype.bf16, CPU, (4, 4, 16))
    assert len(caplog.messages) == 1 and "engine: m runs eagerly: " in caplog.text
    says = "a.cpp: In function 'f':\na.cpp:3: error: no\n 3 | x"
    errors = subprocess.CalledProcessError(1, "g++", stderr=says), OSError("full"), OSError()
    assert [*map(building.complaint, errors)] == ["a.cpp:3: error: no", "full", "OSError"]


@pytest.fixture(scope="module")
def probes():
    """What is asked of a GPU's kernels, here of a CPU's: attention, then each kind of codes, and experts."""
    attention.operators("cpu")
    coded.operators("cpu")
    kinds = [*CODED_KINDS, replace(CODED_KINDS[0], experts=True)]
    codes = [partial(probe.require_coded.__wrapped__, kind, CPU) for kind in kinds]
    return [
        partial(probe.require_attention.__wrapped__, 2, 64, torch.bfloat16, CPU),
        *codes,
        partial(probe.require_experts, torch.float32, CPU, False),
        partial(probe.require_experts, torch.bfloat16, CPU, True),
    ]


# What models keep: made while loading, of files of AWQ, FP8, MXFP4 and GGUF.
CODED_KINDS = [
    *(kind for dtype in (Dtype.int4, Dtype.nf4, Dtype.int8) for kind in probe.kinds_of(dtype, "")),
    *probe.kinds_of(
        Dtype.packed,
        "attn_output:2:4:128:3:uint4 ffn_down:2:8:128:4:e4m3 ffn_up:1:4:32:2:e2m1 "
        "attn_q+attn_k:1:4:32:8:uint4 attn_v:1:8:16:4:int8 attn_v:1:0:0:0:",
    ),
]


def in_turn(x_PK: Tensor, expert_P: Tensor, stack: Stack, bias_EN: Tensor | None) -> Tensor:
    """Products with experts, one expert after the other: in the place of the kernels for GPUs."""
    y_PN = x_PK.new_empty(len(expert_P), probe.OUTPUTS)
    for expert in expert_P.unique().tolist():
        y_PN[expert_P == expert] = product(x_PK[expert_P == expert], stack, bias_EN, expert, probe.OUTPUTS)
    return y_PN


@pytest.mark.compiler
def test_sound_kernels_pass_their_probe(probes, monkeypatch):
    monkeypatch.setattr(probe, "products", in_turn)
    for require in probes:
        require()


@pytest.mark.compiler
def test_wrong_kernels_do_not_pass_their_probe(probes, monkeypatch):
    monkeypatch.setattr(probe, "attend", lambda _, query, *__: query)
    monkeypatch.setattr(probe.CodedLinear, "forward", lambda _, x: x[:, :128])
    monkeypatch.setattr(probe, "products", lambda x, *_: x[:, :128])
    for require in probes:
        with pytest.raises(ArithmeticError, match="of the largest number"):
            require()


@pytest.mark.compiler
@pytest.mark.parametrize("part", range(2), ids=["codes", "scales"])
def test_a_kernel_that_takes_another_experts_codes_is_found(part, probes, monkeypatch):
    """Each expert has codes, and scales, of its own."""

    def of_the_first(x_PK: Tensor, expert_P: Tensor, stack: Stack, bias_EN: Tensor | None) -> Tensor:
        parts = list(stack.parts)
        parts[part] = parts[part][:1].expand_as(parts[part])
        return in_turn(x_PK, expert_P, Stack(parts, stack.how), bias_EN)

    monkeypatch.setattr(probe, "products", of_the_first)
    with pytest.raises(ArithmeticError, match="pairs with experts in codes is off"):
        probe.require_coded.__wrapped__(replace(CODED_KINDS[0], experts=True), CPU)


def fail(*_: object) -> None:
    raise RuntimeError("out of resource: shared memory, Required: 200000, Hardware limit: 101376")


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", probe.CODED_ROWS)
def test_each_kernel_for_codes_is_tried(kernel, probes, monkeypatch):
    """A step's, that of several rows, a prompt's."""
    forward = probe.CodedLinear.forward

    def one_fails(layer: CodedLinear, x: Tensor) -> Tensor:
        return fail() if len(x) == kernel else forward(layer, x)

    monkeypatch.setattr(probe.CodedLinear, "forward", one_fails)
    with pytest.raises(RuntimeError, match="out of resource"):
        probes[1]()
    rows = sorted(probe.CODED_ROWS)
    assert rows[0] <= FEW_ROWS < rows[1] <= MANY_ROWS < rows[2]


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("experts", "are_many"), [("codes", False), ("codes", True), ("steps", False), ("prompts", True)]
)
def test_each_kernel_for_experts_is_tried(experts, are_many, probes, monkeypatch):
    """For pairs that a program finds by itself, and for those that are sorted."""

    def one_fails(x_PK: Tensor, expert_P: Tensor, *rest: Any) -> Tensor:
        is_many = len(expert_P) > MOST_PAIRS
        return fail() if is_many is are_many else in_turn(x_PK, expert_P, *rest)

    monkeypatch.setattr(probe, "products", one_fails)
    require = {"codes": probes[-3], "steps": probes[-2], "prompts": probes[-1]}[experts]
    with pytest.raises(RuntimeError, match="out of resource"):
        require()


MOE = ModelConf(name="m", family="mixtral", experts=8, experts_per_token=2)
PACKED_MOE = replace(MOE, code_mix="expert_down:2:4:128:3:uint4 expert_gate+expert_up:2:4:128:3:uint4")
EAGER = "m runs eagerly: its kernels fail: "
IN_TURN = "experts in steps, which are not compiled, run one after the other: their kernel fails: "


@pytest.mark.parametrize(
    ("fails", "dtype", "model", "line"),
    [
        ("require_attention", Dtype.bf16, None, EAGER),
        ("require_coded", Dtype.int4, None, EAGER),
        ("require_coded", Dtype.packed, PACKED_MOE, EAGER),
        ("require_experts", Dtype.bf16, MOE, IN_TURN),
        ("require_experts", Dtype.int8, MOE, IN_TURN),
        ("require_coded", Dtype.bf16, MOE, ""),
        ("require_experts", Dtype.bf16, replace(MOE, experts=0), ""),
        ("require_experts", Dtype.packed, PACKED_MOE, ""),
    ],
)
def test_a_gpu_whose_kernels_fail_runs_eagerly(fails, dtype, model, line, monkeypatch, caplog):
    """One that this model uses; a line says so."""
    for module in (steps, probe):
        monkeypatch.setattr(module, "triton_runs", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(steps.coded, "available", lambda _: True)
    for module in (steps.attention_kernel, steps.coded):
        monkeypatch.setattr(module, "operators", lambda _: None)
    for name in ("require_attention", "require_coded", "require_experts"):
        monkeypatch.setattr(probe, name, fail if name == fails else lambda *_: None)

    probe.experts_run.cache_clear()
    able = steps.has_kernels("m", dtype, torch.device("cuda:0"), (8, 4, 64), model)
    probe.experts_run.cache_clear()
    assert able is not bool(line) and len(caplog.messages) == bool(line)
    assert all(message.startswith(f"engine: {line}") for message in caplog.messages)
    assert all("out of resource: shared" in message for message in caplog.messages)


@pytest.mark.parametrize("able", [(True, False), (True, True)], ids=["one is not able", "both are able"])
def test_ranks_have_compiled_steps_all_or_none(able, monkeypatch):
    """A rank that cannot build the kernels left the others waiting in the first step for half an hour."""
    answers = iter(able)
    monkeypatch.setattr(assembly, "has_kernels", lambda *_: next(answers))
    model = SimpleNamespace(
        model=ModelConf(name="m"), dtype=Dtype.bf16, device=CPU, compiled=True, on_trial=True
    )
    ranks = ranks_of(2)
    results = together([partial(assembly._all_compile, model, rank) for rank in ranks], ranks)
    assert [(compiled, trial is not None) for compiled, trial in results] == [(all(able), all(able))] * 2


@pytest.mark.slow
@pytest.mark.compiler
def test_a_model_that_does_not_compile_runs_eagerly(monkeypatch, caplog):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not this one\nand so on")

    monkeypatch.setattr(programs, "load", lambda _: None)
    monkeypatch.setattr(programs, "compiled", refuse)
    fast, eager = ours("llama-mha", fast=True), ours("llama-mha")
    assert speculate(fast, PROMPTS[:1], None, k=0).texts == speculate(eager, PROMPTS[:1], None, k=0).texts
    assert caplog.messages == ["engine: m runs eagerly: it does not compile: not this one"]


@pytest.mark.slow
@pytest.mark.compiler
def test_the_command_compiles_before_it_writes(command, caplog, monkeypatch, tmp_path):
    """And marks that it has, for later runs; an eager run marks nothing."""
    monkeypatch.setattr(session, "compiled_before", lambda model, _: tmp_path / model.name)
    words = "model.n_layers=1", "draft=none", "prompt=a", "max_new_tokens=8"
    assert command("engine=eager", *words).code == 0 and not list(tmp_path.glob("tiny*"))
    with caplog.at_level(logging.INFO, logger="llama_ssp"):
        answer = command("engine=compiled", *words)
    assert answer.code == 0 and not answer.errors
    assert answer.document["engines"] == {"model": "compiled"} and "runs eagerly" not in caplog.text
    assert [file.name for file in tmp_path.glob("tiny*")] == ["tiny"]
