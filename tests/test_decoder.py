"""The decoder gives the logits of transformers' module, for every family that has a row."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.models.assemble import decoder, wanted
from llama_ssp.models.attention import Pass
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder import Decoder
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.kernels import attention as kernel
from llama_ssp.models.kernels import linear
from llama_ssp.models.linear import Products, formats
from llama_ssp.models.loader import load_module
from llama_ssp.models.programs import ProgramSpec, compiled
from llama_ssp.models.safetensors_io import FileSource
from llama_ssp.models.shape import reason_against, shape_of
from llama_ssp.models.steps import Section, has_kernels, run_section
from llama_ssp.speculative.state import Prompt
from tests.distributed.test_quantised import NO_WORSE, off
from tests.families import CONTEXT, FAMILIES, VOCAB, build, ragged_prompts
from tests.rig import speculate

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of the largest logit
CAPACITY = 48
# What each pass feeds: (kept before, fed) a row. Prefill in chunks, ragged steps, rollbacks over stale keys,
# and texts beyond the window.
PASSES = [
    ((0, 0, 0), (9, 5, 1)), ((9, 5, 1), (4, 1, 3)), ((10, 6, 2), (3, 5, 0)), ((13, 11, 2), (1, 2, 4)),
    ((14, 13, 6), (17, 9, 1)), ((31, 22, 7), (1, 5, 1)), ((30, 27, 8), (1, 1, 1)),
]  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-mha": ("falcon", {"multi_query": False, "bias": True, "parallel_attn": False}),
    "neox-in-turn": ("gpt_neox", {"use_parallel_residual": False}),
    "neox-tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "opt-untied": ("opt", {"tie_word_embeddings": False}),
    "mlp-bias": ("llama-gqa", {"mlp_bias": True, "attention_bias": True}),
    "qwen3-moe-mixed": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "phi3-window": ("phi3", {"sliding_window": 11}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "linear-scaled": (
        "llama-mha", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "yarn": (
        "llama-mha",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40,
            },
        },
    ),
}  # fmt: skip
NAMES = [*FAMILIES, *VARIANTS]


def module_of(name: str) -> Any:
    """A random module of transformers, with biases and sinks that are not zero."""
    base, changes = VARIANTS.get(name, (name, {}))
    module = build(base, mild=True, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif "norm" in key or ".ln_" in key:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def saved(module: Any, folder: Path, ranks: Ranks = ALONE, **how: Any) -> Decoder:
    """The decoder of the module, by way of its files."""
    if not (folder / "config.json").exists():
        module.save_pretrained(folder)
    with closing(FileSource(folder, wanted(module.config), module.base_model_prefix)) as source:
        return decoder(module.config, source, ranks, **how)


def caches_of(found: Decoder, rows: int, capacity: int = CAPACITY) -> list[tuple[Tensor, Tensor]]:
    """Keys and values that are garbage where nothing has been written."""
    made = []
    for block in found.blocks:
        size = block.attention.head_dim
        heads = block.attention.sizes[1] // size
        dtype = found.embedding.weight.dtype
        made.append(tuple(torch.full((heads, rows * capacity, size), 7.0, dtype=dtype) for _ in "kv"))
    return made  # type: ignore[return-value]


def walked(found: Decoder, **how: Any) -> tuple[list[Tensor], list[list[int]]]:
    """The logits of every row in every pass, and the text that they follow."""
    caches, texts, generator = caches_of(found, 3), [[], [], []], torch.Generator().manual_seed(0)
    logits, prefixes = [], []
    for start, count in PASSES:
        tokens = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in count]
        texts = [text[:s] + new for text, s, new in zip(texts, start, tokens, strict=True)]
        rows = [(row * CAPACITY, s, n) for row, (s, n) in enumerate(zip(start, count, strict=True))]
        feed = Pass.of(rows, CPU, **how)
        token_T = torch.tensor([token for new in tokens for token in new])
        logit_TV, _ = found(token_T, feed, caches)
        logits += [part for part, n in zip(logit_TV.split(count), count, strict=True) if n]
        prefixes += [text for text, n in zip(texts, count, strict=True) if n]
    return logits, prefixes


def require_same(module: Any, logits: list[Tensor], prefixes: list[list[int]]) -> None:
    """By transformers' own pass over each whole text, with its own masks and without a cache."""
    for logit_WV, text in zip(logits, prefixes, strict=True):
        expected_WV = module(torch.tensor([text]), use_cache=False).logits[0, -len(logit_WV) :]
        worst, scale = float((logit_WV - expected_WV).abs().max()), float(expected_WV.abs().max())
        assert worst <= TOLERANCE * scale, (worst, scale, len(text), len(logit_WV))


@pytest.mark.few(14)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(name, tmp_path):
    module = module_of(name)
    assert reason_against(module.config) is None
    require_same(module, *walked(saved(module, tmp_path)))


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "gpt_neo", "gpt_oss", "mistral-window", "qwen3"])
@torch.inference_mode()
def test_the_kernel_gives_the_same(name, tmp_path):
    """Ragged rows, windows, soft caps, sinks, heads of odd sizes; garbage in unused slots is never read."""
    kernel.operators()
    module = module_of(name)
    require_same(module, *walked(saved(module, tmp_path), attend=kernel.attend))


OTHERS = {
    "final_logit_softcapping": 1.0, "swiglu_limit": 0.1, "swiglu_alpha": 3.0,
    "hidden_activation": "relu", "activation_function": "relu", "activation": "relu", "hidden_act": "gelu",
    "rms_norm_eps": 0.5, "layer_norm_eps": 0.5, "layer_norm_epsilon": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama-gqa", "mixtral", "gpt_neox", "opt", "falcon"])
@torch.inference_mode()
def test_keys_of_other_architectures_are_ignored(name, tmp_path):
    """transformers' config keeps them, and its module does not read them."""
    plain = build(name).config
    module = build(
        name, mild=True, **{key: value for key, value in OTHERS.items() if not hasattr(plain, key)}
    )
    assert module.config.final_logit_softcapping == 1.0 and shape_of(module.config) == shape_of(plain)
    require_same(module, *walked(saved(module, tmp_path)))


def test_gpt_oss_of_a_config_without_its_gate():
    """transformers 5.17 has the two numbers in its code alone."""
    config = build("gpt_oss").config.to_dict()
    shape = shape_of(SimpleNamespace(**{key: value for key, value in config.items() if "swiglu" not in key}))
    assert (shape.gate_alpha, shape.gate_limit) == (1.702, 7.0)


@torch.inference_mode()
def test_neighbours_do_not_change_a_row_by_a_bit(tmp_path):
    """In fp32, where the pass has as many tokens: whatever the other rows hold, wherever the row stands.

    Another number of tokens may be another kernel, which adds in another order. The control: another text.
    """
    found, text = saved(build("llama-gqa"), tmp_path), torch.arange(13) % VOCAB

    def logits(place: int, neighbours: int, own: Tensor) -> Tensor:
        caches, generator = caches_of(found, 3), torch.Generator().manual_seed(neighbours)
        for start, count in (((0, 0, 0), (9, 5, 2)), ((9, 5, 2), (4, 1, 3))):
            parts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in count]
            parts[0] = own[start[0] : start[0] + count[0]]
            order = sorted(range(3), key=lambda row: (row - place) % 3)
            rows = [(i * CAPACITY, start[row], count[row]) for i, row in enumerate(order)]
            logit_TV, _ = found(torch.cat([parts[row] for row in order]), Pass.of(rows, CPU), caches)
        return logit_TV.split([count[row] for row in order])[order.index(0)]

    expected = logits(0, 0, text)
    assert all(torch.equal(logits(place, n, text), expected) for place in range(3) for n in range(3))
    assert not torch.equal(logits(0, 0, text.flip(0)), expected)


def prompts(count: int) -> list[Prompt]:
    return ragged_prompts(*(9, 1, 6, 4, 12)[:count])


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_texts_are_those_of_the_module(name, tmp_path):
    """Token for token, rows that are refilled and rolled back, with drafts and without."""
    module = build(name)
    ours = DecoderModel(saved(module, tmp_path), module.config, "m")
    theirs = CausalModel(module, "m")
    for count, k in ((1, 0), (3, 4)):
        how: dict[str, Any] = {"k": k, "max_new": 30}
        draft = "ngram" if k else None
        assert speculate(ours, prompts(count), draft, **how).texts == (  # type: ignore[arg-type]
            speculate(theirs, prompts(count), draft, **how).texts
        )


# Rows, where they start, their tokens, and the capacity of the cache. The first is traced: there, and in one
# later step, the tokens are as many as the slots, which are other sizes all the same.
STEPS = ((1, 0, 9, 9), (1, 4, 3, 20), (1, 7, 1, 20), (3, 5, 1, 33), (3, 5, 4, 48), (2, 0, 5, 5), (1, 0, 1, 9))


@pytest.mark.long
@pytest.mark.compiler
@torch.inference_mode()
def test_one_program_serves_every_width(tmp_path):
    """One token and several, one row and several, caches of other sizes.

    Six models step in turn, two of one size, others of one family or none: none runs another's program.
    """
    kernel.operators()
    linear.operators()
    models = []
    for number, name in enumerate(("llama-gqa", "llama-gqa", "llama-mha", "gpt_oss", "mixtral", "qwen3_moe")):
        module = module_of(name)
        for parameter in module.parameters():
            parameter.mul_(1 + min(number, 1) / 8)
        models.append(saved(module, tmp_path / str(number), product=Products(CPU, fast=True)))
    sections: list[Section] = []
    steps: list[Any] = []
    for rows, start, count, capacity in STEPS:
        feed = Pass.of([(row * capacity, start, count) for row in range(rows)], CPU)
        token_T = torch.arange(rows * count) + 5
        for number, found in enumerate(models):
            caches = caches_of(found, rows, capacity)
            for layer in caches:
                for tensor in layer:
                    tensor.normal_(generator=torch.Generator().manual_seed(start))
            expected, _ = found(token_T, feed, [(k.clone(), v.clone()) for k, v in caches])
            arguments = token_T, feed.position_T, feed.first_T, feed.slot_T, caches
            if number == len(steps):
                sections.append(Section(found, slice(None), first=True, last=True, tapped=False))
                steps.append(compiled(ProgramSpec(run_section, sections[number], arguments, ())))
            (logit_TV,) = steps[number](sections[number], *arguments)
            assert (logit_TV - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["llama-gqa", "gpt_neox"])
@torch.inference_mode()
def test_in_8_bit_logits_are_as_near_as_those_of_llm_int8(name, tmp_path):
    """Rounding to bf16 and 8-bit weights alone move these small models' logits by 3 %."""
    exact, prefixes = walked(saved(module_of(name), tmp_path))
    assert has_kernels("m", Dtype.int8, CPU)
    product, head = formats(Dtype.int8, CPU, fast=True)
    found, _ = walked(saved(module_of(name), tmp_path, product=product, head=head, dtype=torch.bfloat16))
    plain = load_module(ModelConf(name="small"), tmp_path, Dtype.int8, CPU, "model")
    parts = zip(exact, prefixes, strict=True)
    theirs = [plain(torch.tensor([text]), use_cache=False).logits[0, -len(part) :] for part, text in parts]
    assert off(found, exact) <= NO_WORSE * off(theirs, exact)


@torch.inference_mode()
def test_named_layers_give_their_hidden_states(tmp_path):
    module = module_of("llama-gqa")
    found = saved(module, tmp_path)
    token_T = torch.arange(3, 12)
    logit_RV, kept = found(
        token_T, Pass.of([(0, 0, 9)], CPU), caches_of(found, 1), torch.tensor([8]), taps=(1, 2)
    )
    expected = module(token_T[None], use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(logit_RV, expected.logits[0, -1:], rtol=1e-4, atol=1e-5)
    for state_TH, theirs in zip(kept, expected.hidden_states[1:3], strict=True):
        torch.testing.assert_close(state_TH, theirs[0], rtol=1e-4, atol=1e-5)


def test_what_the_decoder_does_not_run():
    bare = build("opt", layer_norm_elementwise_affine=False).config
    assert reason_against(bare) == "layer_norm_elementwise_affine: False"
    assert reason_against(build("falcon", alibi=True).config) == "alibi: True"
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert reason_against(build("llama-mha", rope_parameters=dynamic).config) == "rope_type: dynamic"


assert CAPACITY < CONTEXT
