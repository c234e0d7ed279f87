"""Random heads in the published layouts, and a second reading of their formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from llama_ssp.config import Dtype
from llama_ssp.models.heads.load import load_head
from llama_ssp.models.heads.model import HeadModel

CPU = torch.device("cpu")
HEADS, KVS, SIZE, FFN = 4, 2, 6, 20
FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"


def drawn(seed: int, loud: float) -> tuple[Callable[..., Tensor], Callable[[int], Tensor]]:
    """Returns what draws matrices and what draws norms, both from one generator."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return loud * torch.randn(*shape, generator=generator)

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    return random, norm


def saved(
    folder: Path, tensors: dict[str, Tensor], ids: list[int] | None, block: str, *, layers: int, dim: int,
    vocab: int, context: int,
) -> dict[str, Any]:  # fmt: skip
    """Writes the weights, and with `ids` the maps between vocabularies; returns the config of the layers."""
    if ids is not None:
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        tensors["t2d"] = torch.tensor([token in ids for token in range(vocab)])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return {
        "model_type": block, "hidden_size": dim, "intermediate_size": FFN, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KVS, "head_dim": SIZE, "vocab_size": vocab,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
        "hidden_act": "silu", "attention_bias": False, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def save_head(
    folder: Path, *, vocab: int, target_dim: int, raw: bool = False, ids: list[int] | None = None,
    taps: tuple[int, ...] | None = None, block: str = "llama", dim: int = 16, embeds: bool = True,
    context: int = 160, seed: int = 0, loud: float = 0.5, flags: tuple[str, ...] = (), **extra: Any,
) -> Path:  # fmt: skip
    """A random head; `ids` are the target's tokens that it can draft, None all of them."""
    random, norm = drawn(seed, loud)
    own, inputs = vocab if ids is None else len(ids), target_dim * len(taps or range(3))
    name = "midlayer" if raw else "layers.0"
    tensors = {
        "fc.weight": random(dim, inputs),
        f"{name}.self_attn.q_proj.weight": random(HEADS * SIZE, 2 * dim),
        f"{name}.self_attn.k_proj.weight": random(KVS * SIZE, 2 * dim),
        f"{name}.self_attn.v_proj.weight": random(KVS * SIZE, 2 * dim),
        f"{name}.self_attn.o_proj.weight": random(dim, HEADS * SIZE),
        f"{name}.mlp.gate_proj.weight": random(FFN, dim), f"{name}.mlp.up_proj.weight": random(FFN, dim),
        f"{name}.mlp.down_proj.weight": random(dim, FFN),
        f"{name}.input_layernorm.weight": norm(dim), f"{name}.hidden_norm.weight": norm(dim),
        f"{name}.post_attention_layernorm.weight": norm(dim), "norm.weight": norm(dim),
        "lm_head.weight": random(own, dim),
    }  # fmt: skip
    if block == "qwen3":
        tensors |= {f"{name}.self_attn.{part}_norm.weight": norm(SIZE) for part in "qk"}
    if embeds:
        tensors["embed_tokens.weight"] = random(vocab, dim)
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = norm(inputs)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{n}.weight": norm(target_dim) for n in range(inputs // target_dim)}
    sizes = saved(folder, tensors, ids, block, layers=1, dim=dim, vocab=vocab, context=context)
    own_keys: dict[str, Any] = {"draft_vocab_size": own, **dict.fromkeys(flags, True), **extra}
    if taps is not None:
        own_keys["eagle_aux_hidden_state_layer_ids"] = list(taps)
    if raw:
        content = {"architectures": ["LlamaForCausalLMEagle3"], **sizes, **own_keys}
    else:
        content = {
            "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "speculators_model_type": "eagle3", "transformer_layer_config": sizes, **own_keys,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def loaded(
    folder: Path, layers: int = 5, table: Tensor | None = None, output: Tensor | None = None, **how: Any
) -> HeadModel:
    """The head of the folder; `table` and `output` are the target's own embedding and output matrix."""

    def tables(is_output: bool) -> tuple[Tensor, bool]:
        found = output if is_output else table
        assert found is not None, "the head asks the target for a table"
        return found, True

    settings = {"dtype": Dtype.fp32, "device": CPU, "name": "head", "fast": False}
    return load_head(folder, layers=layers, tables=tables, **(settings | how))


class Reference:
    """A head by the formulas of the published code, in fp64, anew for each text: nothing is kept."""

    def __init__(self, folder: Path, table: Tensor | None = None, output: Tensor | None = None) -> None:
        """`table` and `output` are the target's, for a head that lacks them."""
        self.content = content = json.loads((folder / "config.json").read_text())
        self.sizes = content.get("transformer_layer_config", content)
        self.flags = {flag: content.get(flag, False) for flag in FLAGS}
        self.weights = {key: value.double() for key, value in load_file(folder / "model.safetensors").items()}
        for name, lent in (("embed_tokens.weight", table), ("lm_head.weight", output)):
            if lent is not None:
                self.weights.setdefault(name, lent.double())
        self.name = "midlayer" if "midlayer.hidden_norm.weight" in self.weights else "layers.0"

    def ids(self) -> list[int]:
        """The target's id of each of its tokens."""
        own = len(self.weights["lm_head.weight"])
        offset = self.weights.get("d2t", torch.zeros(own)).long().tolist()
        return [place + offset[place] for place in range(own)]

    def logits(self, states_TX: Tensor, text: list[int], drafts: list[int]) -> Tensor:
        """Over its own tokens, for the one after `drafts`, given the target's states of all but the last."""
        assert len(states_TX) == len(text) - 1
        states = states_TX.double()
        if self.flags["norm_before_fc"]:
            states = self.normed(states, "input_norm")
        if self.flags["fc_norm"]:
            count = sum(key.startswith("fc_norm.") for key in self.weights)
            parts = states.chunk(count, -1)
            states = torch.cat([self.normed(part, f"fc_norm.{n}") for n, part in enumerate(parts)], -1)
        g = list(linear(states, self.weights["fc.weight"]))
        tokens = text[1:]
        for token in [*drafts, None]:
            z = self.block(torch.stack(g), tokens)
            out = self.normed(z, "norm")
            if token is not None:
                g.append((out if self.flags["norm_output"] else z)[-1])
                tokens = [*tokens, token]
        return linear(out[-1], self.weights["lm_head.weight"])

    def probs(self, states_TX: Tensor, text: list[int], drafts: list[int], vocab: int, heat: float) -> Tensor:
        """Over the target's tokens."""
        found = torch.zeros(vocab, dtype=torch.float64)
        found[self.ids()] = (self.logits(states_TX, text, drafts) / heat).softmax(-1)
        return found

    def block(self, g: Tensor, tokens: list[int]) -> Tensor:
        weights, heads = self.weights, self.sizes["num_attention_heads"]
        kvs, size, name = self.sizes["num_key_value_heads"], self.sizes["head_dim"], self.name
        embedded = self.normed(weights["embed_tokens.weight"][tokens], f"{name}.input_layernorm")
        normed = self.normed(g, f"{name}.hidden_norm")
        both = torch.cat([embedded, normed], -1)
        q, k, v = (linear(both, weights[f"{name}.self_attn.{part}_proj.weight"]) for part in "qkv")
        q, k, v = q.view(-1, heads, size), k.view(-1, kvs, size), v.view(-1, kvs, size)
        if f"{name}.self_attn.q_norm.weight" in weights:
            q, k = self.normed(q, f"{name}.self_attn.q_norm"), self.normed(k, f"{name}.self_attn.k_norm")
        q, k = self.turned(q), self.turned(k)
        k, v = (part.repeat_interleave(heads // kvs, 1) for part in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        ahead = torch.ones(score.shape[1:], dtype=torch.bool).triu(1)
        seen = torch.einsum("hqk,khd->qhd", score.masked_fill(ahead, -torch.inf).softmax(-1), v)
        x = normed if self.flags["norm_before_residual"] else g
        x = x + linear(seen.flatten(1), weights[f"{name}.self_attn.o_proj.weight"])
        y = self.normed(x, f"{name}.post_attention_layernorm")
        gate, up = (linear(y, weights[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        return x + linear(silu(gate) * up, weights[f"{name}.mlp.down_proj.weight"])

    def normed(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.sizes["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def turned(self, x_THD: Tensor, begin: int = 0) -> Tensor:
        size = x_THD.shape[-1]
        speed = self.sizes["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = (begin + torch.arange(len(x_THD), dtype=torch.float64))[:, None, None] * speed
        first, second = x_THD.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def save_dflash(
    folder: Path, *, vocab: int, dim: int, taps: tuple[int, ...], raw: bool = False,
    ids: list[int] | None = None, layers: int = 2, width: int = 4, anchor: bool = False, whole: bool = False,
    context: int = 160, seed: int = 0, loud: float = 0.5,
) -> Path:  # fmt: skip
    """A random DFlash head; `ids` as above; `whole`: with an embedding and an output matrix of its own."""
    random, norm = drawn(seed, loud)
    own = vocab if ids is None else len(ids)
    tensors = {
        "fc.weight": random(dim, dim * len(taps)),
        "hidden_norm.weight": norm(dim),
        "norm.weight": norm(dim),
    }
    for layer in range(layers):
        name = f"layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": random(HEADS * SIZE, dim),
            f"{name}.self_attn.k_proj.weight": random(KVS * SIZE, dim),
            f"{name}.self_attn.v_proj.weight": random(KVS * SIZE, dim),
            f"{name}.self_attn.o_proj.weight": random(dim, HEADS * SIZE),
            f"{name}.self_attn.q_norm.weight": norm(SIZE), f"{name}.self_attn.k_norm.weight": norm(SIZE),
            f"{name}.mlp.gate_proj.weight": random(FFN, dim), f"{name}.mlp.up_proj.weight": random(FFN, dim),
            f"{name}.mlp.down_proj.weight": random(dim, FFN), f"{name}.input_layernorm.weight": norm(dim),
            f"{name}.post_attention_layernorm.weight": norm(dim),
        }  # fmt: skip
    if whole:
        tensors["embed_tokens.weight"] = random(vocab, dim)
    if whole or ids is not None:
        tensors["lm_head.weight"] = random(own, dim)
    sizes = saved(folder, tensors, ids, "qwen3", layers=layers, dim=dim, vocab=vocab, context=context)
    mask = vocab - 1
    if raw:
        reads = {"mask_token_id": mask, "target_layer_ids": [tap - 1 for tap in taps]}
        content: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"], **sizes, "block_size": width, "dflash_config": reads
        }  # fmt: skip
    else:
        content = {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
            "transformer_layer_config": sizes, "draft_vocab_size": own, "block_size": width,
            "aux_hidden_state_layer_ids": list(taps), "mask_token_id": mask, "sample_from_anchor": anchor,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    return folder


class DFlashReference(Reference):
    """The same of a DFlash head."""

    def logits(self, states_TX: Tensor, text: list[int], drafts: list[int]) -> Tensor:
        """Over its own tokens; of the drafts only the number counts."""
        weights, width = self.weights, self.content["block_size"]
        mask = self.content.get("mask_token_id", self.sizes.get("dflash_config", {}).get("mask_token_id"))
        g = self.normed(linear(states_TX.double(), weights["fc.weight"]), "hidden_norm")
        x = weights["embed_tokens.weight"][[text[-1], *[mask] * (width - 1)]]
        for layer in range(self.sizes["num_hidden_layers"]):
            x = self.layer(x, g, f"layers.{layer}")
        place = len(drafts) + (not self.content.get("sample_from_anchor", False))
        return linear(self.normed(x, "norm"), weights["lm_head.weight"])[place]

    def layer(self, x: Tensor, g: Tensor, name: str) -> Tensor:
        weights, heads = self.weights, self.sizes["num_attention_heads"]
        kvs, size = self.sizes["num_key_value_heads"], self.sizes["head_dim"]
        own = self.normed(x, f"{name}.input_layernorm")
        q, k, v = (
            linear(read, weights[f"{name}.self_attn.{part}_proj.weight"])
            for part, read in (("q", own), ("k", torch.cat([g, own])), ("v", torch.cat([g, own])))
        )
        q, k, v = q.view(-1, heads, size), k.view(-1, kvs, size), v.view(-1, kvs, size)
        q, k = self.normed(q, f"{name}.self_attn.q_norm"), self.normed(k, f"{name}.self_attn.k_norm")
        q, k = self.turned(q, len(g)), self.turned(k)
        k, v = (part.repeat_interleave(heads // kvs, 1) for part in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        seen = torch.einsum("hqk,khd->qhd", score.softmax(-1), v)
        x = x + linear(seen.flatten(1), weights[f"{name}.self_attn.o_proj.weight"])
        y = self.normed(x, f"{name}.post_attention_layernorm")
        gate, up = (linear(y, weights[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        return x + linear(silu(gate) * up, weights[f"{name}.mlp.down_proj.weight"])
