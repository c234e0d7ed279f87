"""Random heads in the published layouts, and a second reading of their formulas.

The blocks of a head, which are those of a usual model, are transformers' own.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from llama_ssp.config import Dtype
from llama_ssp.models.heads.load import TargetOfHead, load_head
from llama_ssp.models.heads.model import HeadModel

SIZES: dict[str, Any] = {
    "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "hidden_act": "silu",
    "attention_bias": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
RAW = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel"}  # classes that config.json names


def saved(
    folder: Path, kind: str, raw: bool, shapes: dict[str, tuple[int, ...]], ids: list[int] | None,
    embeds: bool, keys: dict[str, Any], loud: float = 0.5, **changes: Any,
) -> Path:  # fmt: skip
    """Draws the weights of a head, and writes them with config.json; returns the folder.

    `shapes` has what a model of its sizes has not, or in another shape; `ids` are the target's tokens that
    the head can draft, None all of them; `keys` are those of config.json that do not describe the blocks.
    """
    sizes = {**SIZES, **changes}
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(**sizes)).state_dict()
    shapes = {name.removesuffix(".weight"): tuple(part.shape) for name, part in model.items()} | shapes
    if not embeds:
        del shapes["embed_tokens"]
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        number = torch.randn(shape, generator=generator)
        place = name.replace("layers.0", "midlayer") if raw and kind == "eagle3" else name
        tensors[f"{place}.weight"] = 1 + 0.3 * number if "norm" in name else loud * number
    if ids is not None:
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        tensors["t2d"] = torch.tensor([token in ids for token in range(sizes["vocab_size"])])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    nested = {"speculators_model_type": kind, "auto_map": {"": "x.Config"}, "transformer_layer_config": sizes}
    layout = {"architectures": [RAW[kind]], **sizes} if raw else nested
    (folder / "config.json").write_text(json.dumps({**layout, **keys}))
    return folder


def save_head(
    folder: Path, *, vocab: int, target_dim: int, taps: tuple[int, ...], raw: bool = False,
    ids: list[int] | None = None, block: str = "llama", dim: int = 16, embeds: bool = True,
    context: int = 160, loud: float = 0.5, flags: tuple[str, ...] = (), **keys: Any,
) -> Path:  # fmt: skip
    own, inputs = len(ids or range(vocab)), target_dim * len(taps)
    shapes = {"fc": (dim, inputs), "lm_head": (own, dim), "layers.0.hidden_norm": (dim,)}
    for part, outputs in (("q", 24), ("k", 12), ("v", 12)):
        shapes[f"layers.0.self_attn.{part}_proj"] = outputs, 2 * dim
    if "norm_before_fc" in flags:
        shapes["input_norm"] = (inputs,)
    if "fc_norm" in flags:
        shapes |= {f"fc_norm.{n}": (target_dim,) for n in range(len(taps))}
    keys |= {"draft_vocab_size": own, "eagle_aux_hidden_state_layer_ids": taps, **dict.fromkeys(flags, True)}
    return saved(
        folder, "eagle3", raw, shapes, ids, embeds, keys, loud, model_type=block, hidden_size=dim,
        num_hidden_layers=1, vocab_size=vocab, max_position_embeddings=context,
    )  # fmt: skip


def save_dflash(
    folder: Path, *, vocab: int, dim: int, taps: tuple[int, ...], raw: bool = False,
    ids: list[int] | None = None, layers: int = 2, width: int = 4, anchor: bool = False, whole: bool = False,
    context: int = 160,
) -> Path:  # fmt: skip
    """A random DFlash head; `whole`: with an embedding and an output matrix of its own."""
    own, keys = len(ids or range(vocab)), {"block_size": width}
    shapes: dict[str, tuple[int, ...]] = {"fc": (dim, dim * len(taps)), "hidden_norm": (dim,)}
    if whole or ids is not None:
        shapes["lm_head"] = own, dim
    if raw:
        outputs = [tap - 1 for tap in taps]
        keys["dflash_config"] = {"mask_token_id": vocab - 1, "target_layer_ids": outputs}
    else:
        keys |= {"draft_vocab_size": own, "mask_token_id": vocab - 1, "sample_from_anchor": anchor}
        keys["aux_hidden_state_layer_ids"] = taps
    return saved(
        folder, "dflash", raw, shapes, ids, whole, keys, model_type="qwen3", hidden_size=dim,
        num_hidden_layers=layers, vocab_size=vocab, max_position_embeddings=context,
    )  # fmt: skip


def loaded(
    folder: Path, layers: int = 5, table: Tensor | None = None, output: Tensor | None = None,
    fast: bool = False, dtype: Dtype = Dtype.fp32, target: Any = None,
) -> HeadModel:  # fmt: skip
    """The head of the folder; `table` and `output` are the target's own embedding and output matrix.

    `target` is its config, for a head that reads its cache.
    """
    where = dtype, torch.device("cpu"), layers
    tables = (table, output)
    told = None if target is None else TargetOfHead(config=target)
    return load_head(folder, *where, lambda is_output: (tables[is_output], True), "head", fast, told)


class Reference:
    """A head by the formulas of the published code, in fp64, anew for each text: nothing is kept."""

    def __init__(self, folder: Path, table: Tensor | None = None, output: Tensor | None = None) -> None:
        """`table` and `output` are the target's, for a head that lacks them."""
        self.content = json.loads((folder / "config.json").read_text())
        weights = {"embed_tokens.weight": table, "lm_head.weight": output}
        weights |= load_file(folder / "model.safetensors")
        self.weights = {
            key.replace("midlayer", "layers.0"): value.double()
            for key, value in weights.items()
            if value is not None
        }
        config = AutoConfig.for_model(**self.content.get("transformer_layer_config", self.content))
        self.model = AutoModel.from_config(config, dtype=torch.float64)
        for name, part in self.model.named_modules():
            if f"{name}.weight" in self.weights:
                part.weight = torch.nn.Parameter(self.weights[f"{name}.weight"], requires_grad=False)

    def ids(self) -> list[int]:
        own = len(self.weights["lm_head.weight"])
        return (torch.arange(own) + self.weights.get("d2t", torch.zeros(own)).long()).tolist()

    def probs(self, states_TX: Tensor, text: list[int], drafts: list[int], vocab: int, heat: float) -> Tensor:
        probs = torch.zeros(vocab, dtype=torch.float64)
        probs[self.ids()] = (self.logits(states_TX, text, drafts) / heat).softmax(-1)
        return probs

    def logits(self, states_TX: Tensor, text: list[int], drafts: list[int]) -> Tensor:
        """Over its own tokens, for the one after `drafts`, given the target's states of all but the last."""
        assert len(states_TX) == len(text) - 1
        says, states, tokens = self.content.get, states_TX.double(), text[1:]
        if says("norm_before_fc"):
            states = self.normed(states, "input_norm")
        if says("fc_norm"):
            count = sum(key.startswith("fc_norm.") for key in self.weights)
            parts = states.chunk(count, -1)
            states = torch.cat([self.normed(part, f"fc_norm.{n}") for n, part in enumerate(parts)], -1)
        g, layer = list(self.linear(states, "fc")), self.model.layers[0]
        for token in [*drafts, None]:
            embedded = layer.input_layernorm(self.model.embed_tokens(torch.tensor(tokens)))
            normed = self.normed(torch.stack(g), "layers.0.hidden_norm")
            x = normed if says("norm_before_residual") else torch.stack(g)
            z = x + self.attention(layer, torch.cat([embedded, normed], -1), None)
            z = z + layer.mlp(layer.post_attention_layernorm(z))
            out = self.normed(z, "norm")
            if token is not None:
                g.append((out if says("norm_output") else z)[-1])
                tokens = [*tokens, token]
        return self.linear(out[-1], "lm_head")

    def attention(self, layer: Any, read_TX: Tensor, mask: Tensor | None) -> Tensor:
        """Of every token to those before it and itself, or as the mask says."""
        turns = self.model.rotary_emb(read_TX[None], torch.arange(len(read_TX))[None])
        result: Tensor = layer.self_attn(read_TX[None], turns, mask)[0][0]
        return result

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    def normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], SIZES["rms_norm_eps"])


class DFlashReference(Reference):
    def logits(self, states_TX: Tensor, text: list[int], drafts: list[int]) -> Tensor:
        """Over its own tokens; of the drafts only the number counts. Each token of a block sees the block."""
        width = self.content["block_size"]
        mask = self.content.get("dflash_config", self.content)["mask_token_id"]
        g = self.normed(self.linear(states_TX.double(), "fc"), "hidden_norm")
        x = self.model.embed_tokens(torch.tensor([text[-1], *[mask] * (width - 1)]))
        all_see_all = torch.zeros(1, 1, len(g) + width, len(g) + width, dtype=torch.float64)
        for layer in self.model.layers:
            read = torch.cat([g, layer.input_layernorm(x)])
            x = x + self.attention(layer, read, all_see_all)[len(g) :]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        place = len(drafts) + (not self.content.get("sample_from_anchor", False))
        return self.linear(self.normed(x, "norm"), "lm_head")[place]


# Of an assistant's text part, whose keys and values are the target's (tests.families.GEMMA4).
ASSISTANT: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
OF_TARGET = ("sliding_window", "rope_parameters", "vocab_size", "max_position_embeddings", "attention_k_eq_v")


@contextmanager
def sharing() -> Iterator[None]:
    """Has transformers 5.23 build a text model whose layers all read another model's keys."""
    kind = CONFIG_MAPPING["gemma4_text"]
    usual = kind.kv_sharing_modes

    def modes(config: Any) -> list[str | None]:
        count = config.num_hidden_layers
        return ["reuse"] * count if config.num_kv_shared_layers == count else usual.fget(config)

    kind.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        kind.kv_sharing_modes = usual


def save_assistant(
    folder: Path, target: Any, groups: int = 0, chosen: int = 2, dtype: torch.dtype = torch.float32,
    loud: float = 12.0, **changes: Any,
) -> Any:  # fmt: skip
    """Saves a random assistant of the target with this config; returns transformers' module.

    With `groups` only tokens of the `chosen` ones have logits.
    """
    kinds = [target.per_layer_config[kind] for kind in ("sliding_attention", "full_attention")]
    text = {key: getattr(target, key) for key in OF_TARGET} | ASSISTANT
    text |= {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_key_value_heads": kinds[0].num_key_value_heads, "head_dim": kinds[0].head_dim,
        "num_global_key_value_heads": kinds[1].num_key_value_heads, "global_head_dim": kinds[1].head_dim,
    }  # fmt: skip
    config = CONFIG_MAPPING["gemma4_assistant"](
        text_config=CONFIG_MAPPING["gemma4_text"](**text | changes), backbone_hidden_size=target.hidden_size,
        use_ordered_embeddings=groups > 0, num_centroids=groups or 1, centroid_intermediate_top_k=chosen,
    )  # fmt: skip
    torch.manual_seed(5)
    with sharing():
        module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            else:
                parameter.mul_(loud)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape))
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
    module = module.to(dtype).eval()
    module.save_pretrained(folder)
    return module
