"""Random heads in the published layouts, and a second reading of their formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from llama_ssp.config import Dtype, ModelConf, PlacementConf
from llama_ssp.distributed.placement import resolve
from llama_ssp.models.heads.load import load_head
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.weights import held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload

CPU = torch.device("cpu")
HEADS, KVS, SIZE, FFN = 4, 2, 6, 20
FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"


class Drawn:
    """Random tensors of a head, all from one generator."""

    def __init__(self, seed: int, loud: float) -> None:
        self._generator, self._loud = torch.Generator().manual_seed(seed), loud

    def matrix(self, *shape: int) -> Tensor:
        return self._loud * torch.randn(*shape, generator=self._generator)

    def norm(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self._generator)

    def block(self, name: str, dim: int, inputs: int, normed: bool) -> dict[str, Tensor]:
        """Attention to `inputs` numbers of each token, and an MLP; `normed`: as queries and keys may be."""
        shapes = {
            "self_attn.q_proj": (HEADS * SIZE, inputs), "self_attn.k_proj": (KVS * SIZE, inputs),
            "self_attn.v_proj": (KVS * SIZE, inputs), "self_attn.o_proj": (dim, HEADS * SIZE),
            "mlp.gate_proj": (FFN, dim), "mlp.up_proj": (FFN, dim), "mlp.down_proj": (dim, FFN),
        }  # fmt: skip
        norms = {"input_layernorm": dim, "post_attention_layernorm": dim}
        if normed:
            norms |= {"self_attn.q_norm": SIZE, "self_attn.k_norm": SIZE}
        matrices = {f"{name}.{part}.weight": self.matrix(*shape) for part, shape in shapes.items()}
        return matrices | {f"{name}.{part}.weight": self.norm(size) for part, size in norms.items()}


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
    drawn, name = Drawn(seed, loud), "midlayer" if raw else "layers.0"
    own, inputs = vocab if ids is None else len(ids), target_dim * len(taps or range(3))
    tensors = {
        "fc.weight": drawn.matrix(dim, inputs), "lm_head.weight": drawn.matrix(own, dim),
        "norm.weight": drawn.norm(dim), f"{name}.hidden_norm.weight": drawn.norm(dim),
        **drawn.block(name, dim, 2 * dim, block == "qwen3"),
    }  # fmt: skip
    if embeds:
        tensors["embed_tokens.weight"] = drawn.matrix(vocab, dim)
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = drawn.norm(inputs)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{n}.weight": drawn.norm(target_dim) for n in range(inputs // target_dim)}
    sizes = saved(folder, tensors, ids, block, layers=1, dim=dim, vocab=vocab, context=context)
    content: dict[str, Any] = {"draft_vocab_size": own, **dict.fromkeys(flags, True), **extra}
    if taps is not None:
        content["eagle_aux_hidden_state_layer_ids"] = list(taps)
    if raw:
        content |= {"architectures": ["LlamaForCausalLMEagle3"], **sizes}
    else:
        content |= {
            "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "speculators_model_type": "eagle3", "transformer_layer_config": sizes,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def save_dflash(
    folder: Path, *, vocab: int, dim: int, taps: tuple[int, ...], raw: bool = False,
    ids: list[int] | None = None, layers: int = 2, width: int = 4, anchor: bool = False, whole: bool = False,
    context: int = 160, seed: int = 0, loud: float = 0.5,
) -> Path:  # fmt: skip
    """A random DFlash head; `ids` as above; `whole`: with an embedding and an output matrix of its own."""
    drawn, own = Drawn(seed, loud), vocab if ids is None else len(ids)
    tensors = {
        "fc.weight": drawn.matrix(dim, dim * len(taps)), "hidden_norm.weight": drawn.norm(dim),
        "norm.weight": drawn.norm(dim),
    }  # fmt: skip
    for layer in range(layers):
        tensors |= drawn.block(f"layers.{layer}", dim, dim, normed=True)
    if whole:
        tensors["embed_tokens.weight"] = drawn.matrix(vocab, dim)
    if whole or ids is not None:
        tensors["lm_head.weight"] = drawn.matrix(own, dim)
    sizes = saved(folder, tensors, ids, "qwen3", layers=layers, dim=dim, vocab=vocab, context=context)
    mask = vocab - 1
    if raw:
        reads = {"mask_token_id": mask, "target_layer_ids": [tap - 1 for tap in taps]}
        content = {"architectures": ["DFlashDraftModel"], **sizes, "dflash_config": reads}
    else:
        content = {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
            "transformer_layer_config": sizes, "draft_vocab_size": own, "mask_token_id": mask,
            "aux_hidden_state_layer_ids": list(taps), "sample_from_anchor": anchor,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**content, "block_size": width}))
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


def planned(
    target: ModelConf, head: ModelConf, work: Workload, world: int = 1, placement: PlacementConf | None = None
) -> tuple[int, int]:
    """Bytes of the head's weights, and of its caches with the states that wait, on the leader."""
    roles = Role(TARGET, target, Dtype.fp32), Role(DRAFT, head, Dtype.fp32)
    own = rank_work(*roles, resolve(placement or PlacementConf(), world, True), work, 0).draft
    assert own is not None
    return sum(held(own.part, Dtype.fp32).values()), own.caches_bytes(work.rows)


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

    def probs(self, states_TX: Tensor, text: list[int], drafts: list[int], vocab: int, heat: float) -> Tensor:
        """Over the target's tokens."""
        probs = torch.zeros(vocab, dtype=torch.float64)
        probs[self.ids()] = (self.logits(states_TX, text, drafts) / heat).softmax(-1)
        return probs

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
        g = list(self.linear(states, "fc"))
        tokens = text[1:]
        for token in [*drafts, None]:
            z = self.block(torch.stack(g), tokens)
            out = self.normed(z, "norm")
            if token is not None:
                g.append((out if self.flags["norm_output"] else z)[-1])
                tokens = [*tokens, token]
        return self.linear(out[-1], "lm_head")

    def block(self, g: Tensor, tokens: list[int]) -> Tensor:
        embedded = self.normed(self.weights["embed_tokens.weight"][tokens], f"{self.name}.input_layernorm")
        normed = self.normed(g, f"{self.name}.hidden_norm")
        read = torch.cat([embedded, normed], -1)
        x = normed if self.flags["norm_before_residual"] else g
        return self.mlp(x + self.attention(read, read, self.name, causal=True), self.name)

    def attention(self, asks: Tensor, told: Tensor, name: str, causal: bool) -> Tensor:
        """Of queries from `asks`, the last tokens of those that keys and values are from."""
        heads, groups = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        q = self.linear(asks, f"{name}.self_attn.q_proj").unflatten(-1, (heads, -1))
        k, v = (self.linear(told, f"{name}.self_attn.{part}_proj") for part in "kv")
        k, v = k.unflatten(-1, (groups, -1)), v.unflatten(-1, (groups, -1))
        if f"{name}.self_attn.q_norm.weight" in self.weights:
            q, k = self.normed(q, f"{name}.self_attn.q_norm"), self.normed(k, f"{name}.self_attn.k_norm")
        q, k = self.turned(q, len(k) - len(q)), self.turned(k)
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        if causal:
            score = score.masked_fill(torch.ones(score.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        seen = torch.einsum("hqk,khd->qhd", score.softmax(-1), v)
        return self.linear(seen.flatten(1), f"{name}.self_attn.o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        y = self.normed(x, f"{name}.post_attention_layernorm")
        gate, up = (self.linear(y, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return x + self.linear(silu(gate) * up, f"{name}.mlp.down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

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


class DFlashReference(Reference):
    """A DFlash head by its formulas."""

    def logits(self, states_TX: Tensor, text: list[int], drafts: list[int]) -> Tensor:
        """Over its own tokens; of the drafts only the number counts."""
        width = self.content["block_size"]
        mask = self.content.get("mask_token_id", self.sizes.get("dflash_config", {}).get("mask_token_id"))
        g = self.normed(self.linear(states_TX.double(), "fc"), "hidden_norm")
        x = self.weights["embed_tokens.weight"][[text[-1], *[mask] * (width - 1)]]
        for layer in range(self.sizes["num_hidden_layers"]):
            name = f"layers.{layer}"
            asks = self.normed(x, f"{name}.input_layernorm")
            x = self.mlp(x + self.attention(asks, torch.cat([g, asks]), name, causal=False), name)
        place = len(drafts) + (not self.content.get("sample_from_anchor", False))
        return self.linear(self.normed(x, "norm"), "lm_head")[place]
