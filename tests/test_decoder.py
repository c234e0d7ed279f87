"""The decoder gives the logits of transformers' module, for every family that has a row."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_ssp.models.decoder import Attention, Block, Decoder, Xielu
from llama_ssp.models.delta import DeltaNet
from llama_ssp.models.experts import Experts, GatedExperts
from llama_ssp.models.families import FAMILIES, TESTED_FAMILIES
from llama_ssp.models.interface import Tally
from llama_ssp.models.kernels import attention as kernel
from llama_ssp.models.kernels.large_pages import PAGE
from llama_ssp.models.kv_cache import KVCache
from llama_ssp.models.passes import all_rows
from llama_ssp.models.shape import reason_against, shape_of
from tests import families
from tests.families import VOCAB, build, changed_module, decoder_of, module_of, require_same, walked

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*families.FAMILIES, *families.VARIANTS])
@torch.inference_mode()
def test_logits_are_those_of_transformers(name):
    module = module_of(name)
    assert reason_against(module.config) is None
    require_same(module, *walked(decoder_of(module)))


@pytest.mark.parametrize("architecture", TESTED_FAMILIES)
@torch.inference_mode()
def test_the_decoder_follows_every_value_of_the_config(architecture):
    """Of those that it reads none is its default, 1, or a limit that nothing reaches: a fault would show."""
    module = changed_module(architecture)
    assert reason_against(module.config) is None
    require_same(module, *walked(decoder_of(module)))


# A model, and its row without one of its flags.
CONTROLS: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"layer_norm": False}),
    ("cohere", {"unbiased_norms": False}),
    ("cohere", {"rotary_pairs": False}),
    ("cohere", {"in_parallel": False}),
    ("cohere", {"logit_key": ""}),
    ("cohere-normed", {"norm_by_head": False}),
    ("cohere-normed", {"qk_norm_key": "attention_bias"}),
    ("cohere2", {"layer_norm": False}),
    ("cohere2", {"rotary_pairs": False}),
    ("cohere2", {"rotary_in_windows": False}),
    ("cohere2", {"in_parallel": False}),
    ("cohere2", {"logit_key": ""}),
    ("cohere2", {"window": None}),
    ("exaone4", {"rotary_in_windows": False}),
    ("exaone4", {"window": None}),
    ("gemma", {"norm_offset": 0}),
    ("gemma", {"scaled_embedding": False}),
    ("gemma4", {"scaled_embedding": False}),
    ("gemma4", {"values_key": "attention_bias"}),
    ("gemma4", {"normed_values": False}),
    ("gemma4", {"plain_scores": False}),
    ("gemma4", {"norm_offset": 1}),
    ("gemma4", {"window": None}),
    ("gemma4", {"names": replace(FAMILIES["gemma4_text"].names, block_scale="")}),
    ("gemma4-equal-heads", {"full_heads": False}),
    ("gemma4-moe", {"experts_key": "attention_bias"}),
    ("gemma4-moe", {"expert_keys": ("num_experts", "num_hidden_layers")}),
    ("gemma4-moe", {"dense_too": False}),
    ("glm4", {"rotary_pairs": False}),
    ("glm4", {"unbiased_output": False}),
    ("glm4_moe", {"sigmoids": False}),
    ("glm4_moe", {"names": replace(FAMILIES["glm4_moe"].names, correction="")}),
    ("glm4_moe", {"first_dense": ""}),
    ("glm4-moe-one-group", {"qk_norm_key": ""}),
    ("glm4-moe-one-group", {"unbiased_output": False}),
    ("hunyuan", {"norm_turned": False}),
    ("ministral3", {"growing_queries": False}),
    ("ministral3-window", {"window": None}),
    ("olmo3", {"whole_qk_norm": False}),
    ("olmo3", {"window": None}),
    ("seed_oss", {"unbiased_output": False}),
    ("qwen3_5", {"norm_offset": 0}),
    ("qwen3_5", {"gated_attention": False}),
    ("qwen3_5_moe", {"names": replace(FAMILIES["qwen3_5_moe_text"].names, shared_gate="")}),
    ("qwen3_next", {"names": replace(FAMILIES["qwen3_next"].names, shared_gate="")}),
    ("qwen3-next-mixed", {"normed_top": None}),
]


@pytest.mark.parametrize(
    ("name", "without"), [pytest.param(*case, id=f"{case[0]}, {next(iter(case[1]))}") for case in CONTROLS]
)
@torch.inference_mode()
def test_a_row_without_a_flag_gives_other_logits(
    name: str, without: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or looks for other tensors."""
    module = module_of(name)
    family = module.config.model_type
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], **without))
    with pytest.raises(AssertionError):
        require_same(module, *walked(decoder_of(module)))


def use_one_base(decoder: Decoder) -> None:
    for rotary in decoder.rotaries.values():
        rotary.frequency = 1.0 / 1e4 ** torch.linspace(0, 1, len(rotary.frequency) + 1)[:-1]


def route(decoder: Decoder, **how: Any) -> None:
    """Changes how experts are chosen, or weighed; `count`, `chosen` and `scale` are of their groups."""
    for block in decoder.blocks:
        if isinstance(block.mlp, Experts):
            routing = block.mlp.routing
            own = {key: how[key] for key in how if key != "normed"}
            groups = replace(routing.groups, **own)
            block.mlp.routing = replace(routing, normed=how.get("normed", routing.normed), groups=groups)


def without(decoder: Decoder, kind: type[nn.Module], name: str, number: float | None = 0.0) -> None:
    """Gives a tensor of each module of this kind this number, or the module no such part."""
    for module in decoder.modules():
        if isinstance(module, kind):
            if number is None:
                setattr(module, name, None)
            else:
                getattr(module, name).fill_(number)


def one_tap(decoder: Decoder) -> None:
    for module in decoder.modules():
        if isinstance(module, DeltaNet):
            module.kernel[:, :-1] = 0.0


def forget(decoder: Decoder) -> None:
    """Each pass begins as a text does."""
    for module in decoder.modules():
        if isinstance(module, DeltaNet):
            plain = module.forward
            module.forward = lambda x, turns, cache, places, plain=plain: plain(
                x, turns, [cache[0], torch.zeros_like(cache[1]), cache[2]], places
            )


def open_gates(decoder: Decoder) -> None:
    for module in decoder.modules():
        if isinstance(module, GatedExperts):
            module.gate.weight.fill_(0.0)


def turn_all(decoder: Decoder) -> None:
    """Turns all numbers of the heads that see the whole text, as the other heads' table would."""
    rotary = decoder.rotaries["full_attention"]
    size = len(rotary.frequency)
    rotary.frequency = 1.0 / 1e4 ** (torch.arange(size) / size)


def route_by_experts_norm(decoder: Decoder) -> None:
    for block in decoder.blocks:
        block.branch.router = block.branch.before


def swap_norms(decoder: Decoder) -> None:
    """Norms what the MLP gives as what experts give, and the reverse."""
    for block in decoder.blocks:
        branch = block.branch
        branch.after, branch.after_dense = branch.after_dense, branch.after


FAULTS: dict[str, tuple[str, Callable[[Decoder], None]]] = {
    "a base that follows the text": ("hunyuan", use_one_base),
    "one table for all kinds of layers": ("olmo3", use_one_base),
    "scores that are not corrected": ("glm4_moe", partial(without, kind=Experts, name="correction")),
    "experts of all groups": ("glm4_moe", partial(route, chosen=4)),
    "other groups": ("glm4_moe", partial(route, count=2, chosen=1)),
    "weights that are not scaled": ("glm4_moe", partial(route, scale=1.0)),
    "weights with another sum": ("glm4_moe", partial(route, normed=False)),
    "normed weights": ("glm4-moe-one-group", partial(route, normed=True)),
    "no shared experts": ("glm4_moe", partial(without, kind=Experts, name="shared", number=None)),
    "decays of 1": ("qwen3_5", partial(without, kind=DeltaNet, name="decay", number=-100.0)),
    "steps of one size": ("qwen3_5", partial(without, kind=DeltaNet, name="step")),
    "no convolution": ("qwen3_next", one_tap),
    "another norm of what is read": ("qwen3_5_moe", partial(without, kind=DeltaNet, name="norm", number=1.0)),
    "states that are lost between passes": ("qwen3_5", forget),
    "a gate that is open": ("qwen3_5_moe", open_gates),
    "another curve above 0": ("apertus", partial(without, kind=Xielu, name="above")),
    "another curve below 0": ("apertus", partial(without, kind=Xielu, name="below")),
    "the usual beta": ("apertus", partial(without, kind=Xielu, name="beta", number=0.5)),
    "heads that turn as a whole": ("gemma4", turn_all),
    "one table for heads of two sizes": ("gemma4-like-others", use_one_base),
    "no factors of blocks": ("gemma4", partial(without, kind=Block, name="factor", number=1.0)),
    "values that are not normed": (
        "gemma4",
        partial(without, kind=Attention, name="value_epsilon", number=None),
    ),
    "no factors of experts": ("gemma4-moe", partial(without, kind=Experts, name="scale", number=1.0)),
    "a router that reads what experts do": ("gemma4-moe", route_by_experts_norm),
    "another norm after experts": ("gemma4-moe", swap_norms),
    "the usual limit": ("apertus", partial(without, kind=Xielu, name="limit", number=-1e-6)),
}


@pytest.mark.parametrize("fault", FAULTS)
@torch.inference_mode()
def test_a_decoder_with_a_fault_gives_other_logits(fault: str) -> None:
    name, change = FAULTS[fault]
    module = module_of(name)
    decoder = decoder_of(module)
    change(decoder)
    with pytest.raises(AssertionError):
        require_same(module, *walked(decoder))


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "gpt_neo", "gpt_oss", "mistral-window", "qwen3"])
@torch.inference_mode()
def test_the_kernel_gives_the_same(name):
    """Ragged rows, windows, soft caps, sinks, heads of odd sizes; garbage in unused slots is never read."""
    kernel.operators()
    module = module_of(name)
    require_same(module, *walked(decoder_of(module), attend=kernel.attend))


SHARING = ["sliding_attention", "full_attention", "full_attention"]
OTHERS = {
    "final_logit_softcapping": 1.0, "swiglu_limit": 0.1, "swiglu_alpha": 3.0,
    "hidden_activation": "relu", "activation_function": "relu", "activation": "relu", "hidden_act": "gelu",
    "rms_norm_eps": 0.5, "layer_norm_eps": 0.5, "layer_norm_epsilon": 0.5, "sliding_window": 24,
    "layer_types": families.KINDS,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama-gqa", "mixtral", "gpt_neox", "opt", "falcon"])
@torch.inference_mode()
def test_keys_of_other_architectures_are_ignored(name):
    """transformers' config keeps them, and its module does not read them."""
    plain = build(name).config
    others = {key: value for key, value in OTHERS.items() if not hasattr(plain, key)}
    module = build(name, mild=True, **others)
    assert module.config.final_logit_softcapping == 1.0 and shape_of(module.config) == shape_of(plain)
    require_same(module, *walked(decoder_of(module)))


def test_gpt_oss_of_a_config_without_its_gate():
    """transformers 5.17 has the two numbers in its code alone."""
    config = build("gpt_oss").config.to_dict()
    shape = shape_of(SimpleNamespace(**{key: value for key, value in config.items() if "swiglu" not in key}))
    assert (shape.gate_alpha, shape.gate_limit) == (1.702, 7.0)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3_5"])
def test_neighbours_do_not_change_a_row_by_a_bit(family):
    """In fp32, where the pass has as many tokens: whatever the other rows hold, wherever the row stands.

    Another number of tokens may be another kernel, which adds in another order. The control: another text.
    """
    decoder, text = decoder_of(build(family)), torch.arange(13) % VOCAB

    def logits(place: int, neighbours: int, text: Tensor) -> Tensor:
        """The last pass's logits of the row with the text."""
        cache, generator = families.cache_of(decoder, 3), torch.Generator().manual_seed(neighbours)
        order = [(row - place) % 3 for row in range(3)]  # the text is row 0
        for start, count in (((0, 0, 0), (9, 5, 2)), ((9, 5, 2), (4, 1, 3))):
            parts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in count]
            parts[0] = text[start[0] : start[0] + count[0]]
            spans = all_rows([start[row] for row in order], [count[row] for row in order])
            token_T = torch.cat([parts[row] for row in order])
            logit_TV, _ = decoder(token_T, cache.places(spans), cache.layers)
        return logit_TV.split([count[row] for row in order])[place]

    expected = logits(0, 0, text)
    assert all(torch.equal(logits(place, n, text), expected) for place in range(3) for n in range(3))
    assert not torch.equal(logits(0, 0, text.flip(0)), expected)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine: False"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: False"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm: True"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim: 16"),
        ("falcon", {"alibi": True}, "alibi: True"),
        ("llama-mha", families.rope("dynamic", factor=2.0), "rope_type: dynamic"),
        ("hunyuan", families.rope("dynamic", factor=2.0), "rope_type: dynamic"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias: True"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act: silu"),
        ("gemma4", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: 8"),
        ("gemma4", {"num_kv_shared_layers": 1, "layer_types": SHARING}, "num_kv_shared_layers: 1"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: all"),
    ],
    ids=[
        "no affine",
        "norm last",
        "no final norm",
        "a projection",
        "alibi",
        "dynamic rope",
        "dynamic rope without an alpha",
        "attention to later tokens",
        "a biased output",
        "another activation",
        "embeddings for each layer",
        "layers that share keys",
        "attention of Gemma 4 to later tokens",
    ],
)
def test_what_the_decoder_does_not_run(name: str, changes: dict[str, Any], reason: str):
    assert reason_against(build(name, **changes).config) == reason


def test_long_caches_begin_at_large_pages():
    """Each tensor in memory of its own: torch.compile need not ask which of those it writes overlap."""
    shapes = [(2, 128), (1, 8)]
    cache = KVCache.of(rows=1, capacity=4096, shapes=shapes, dtype=torch.bfloat16, device=CPU, tally=Tally())
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert [tensor.data_ptr() % PAGE for tensor in tensors[:2]] == [0, 0]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4
    assert not any(tensor.storage_offset() for tensor in tensors)
