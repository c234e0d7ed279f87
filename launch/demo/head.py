"""An EAGLE-3 head in training: reads the target's hidden states, and from the second draft on its own output.

The names of its tensors are those of the speculators layout. llama_ssp/models/heads/layers.py is the same
head for drafting, which tests compare with this one. Suffixes of shapes: T positions, W = T - step of them,
X the target's hidden states, H the head's width, V the target's tokens, E the head's.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from demo.batches import Batch
from demo.recipes import Training
from demo.train import Losses, disagreement, has_compiler

DECAY = 0.8  # of a step's loss to that of the step before, as in EAGLE-3


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(Training):
    """A head for one target, a model folder; `data` is a JSON Lines file, None the shipped pair's data."""

    out: str
    target: str = str(Path(__file__).parents[2] / "llama_ssp" / "shipped" / "demo")
    data: str | None = None
    start: str | None = None  # a head of this target to go on from: its vocabulary, layers and weights
    name: str = "demo_head"
    minutes: float = 14.0
    batch_tokens: int = 2048
    vocab: int = 2048  # tokens that the head can draft: the most frequent of the data
    depth: int = 4  # drafts in a row that it learns
    prompts: int = 2400  # that the target answers, of the shipped pair's data
    new_tokens: int = 160  # of an answer
    compile: bool = False  # the steps in a row take minutes to compile
    seed: int = 0
    threads: int = 2
    device: str = "auto"


Memory = list[tuple[Tensor, Tensor]]  # keys and values of each step


class Attention(nn.Module):
    """Of position t at a step: to all positions up to t of the first step, and to its own later steps."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.size, self.groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        wide, narrow = config.num_attention_heads * self.size, config.num_key_value_heads * self.size
        self.q_proj = nn.Linear(2 * config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x_BWH: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        parts = [proj(x_BWH) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *turn)
        memory.append((repeat_kv(k, self.groups), repeat_kv(v, self.groups)))
        (first_k, first_v), later, count = memory[0], memory[1:], x_BWH.shape[1]
        ahead_WT = torch.ones(count, first_k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ first_k.transpose(-1, -2)).masked_fill(ahead_WT, -torch.inf)]
        scores += [(q * key[:, :, :count]).sum(-1, keepdim=True) for key, _ in later]
        weight = (torch.cat(scores, -1).float() / self.size**0.5).softmax(-1).to(first_v.dtype)
        first, *own = weight.split([first_k.shape[2]] + [1] * len(later), -1)
        seen = first @ first_v
        for share, (_, value) in zip(own, later, strict=True):
            seen = seen + share * value[:, :, :count]
        found: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn, self.mlp = Attention(config), LlamaMLP(config)

    def forward(self, token: Tensor, g: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        both = torch.cat([self.input_layernorm(token), self.hidden_norm(g)], -1)
        x = g + self.self_attn(both, turn, memory)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Head(nn.Module):
    def __init__(self, config: LlamaConfig, inputs: int, vocab: int) -> None:
        """`inputs`: numbers of a token's hidden states."""
        super().__init__()
        self.fc = nn.Linear(inputs, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Block(config)])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, vocab, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, state_BTX: Tensor, token_BTH: Tensor, depth: int) -> list[Tensor]:
        """Logits of each step, (B, W, E): at position t of the token t + 2 + step.

        `token_BTH` are embeddings of the tokens behind the positions.
        """
        g: Tensor = self.fc(state_BTX)
        count, memory, found = state_BTX.shape[1], Memory(), list[Tensor]()
        for step in range(depth):
            position = torch.arange(step, count, device=g.device)[None]
            g = g[:, : count - step]
            g = self.layers[0](token_BTH[:, step:], g, self.rotary(g, position), memory)
            found.append(self.lm_head(self.norm(g)))
        return found


def unrolled(
    head: Head, state_BTX: Tensor, token_BTH: Tensor, logit_BTV: Tensor, ids_E: Tensor | slice, depth: int
) -> tuple[Tensor, Tensor]:
    """The loss over all steps, and each step's overlap with the target.

    `logit_BTV`: the target's, at position t those of token t + 2.
    """
    kept, parts = [], []
    for step, logit_BWE in enumerate(head(state_BTX, token_BTH, depth)):
        kl, apart = disagreement(logit_BWE.float(), logit_BTV[:, step:].float(), ids_E)
        parts.append(DECAY**step * (0.5 * kl + 1.5 * apart).mean())
        kept.append(1 - apart.detach().mean())
    return torch.stack(parts).sum(), torch.stack(kept)


def head_losses(
    head: Head, teacher: Any, taps: list[int], ids_E: Tensor | slice, recipe: HeadRecipe
) -> Losses:
    """The losses of a batch; the target reads it anew."""
    compute: Callable[..., tuple[Tensor, Tensor]] = unrolled
    if recipe.compile and has_compiler():
        compute = torch.compile(unrolled, dynamic=False)

    def losses(batch: Batch) -> tuple[Tensor, dict[str, float]]:
        ids = batch.ids[:, :-1]
        with torch.no_grad():
            read = teacher(input_ids=ids, use_cache=False, output_hidden_states=True)
            state_BTX = torch.cat([read.hidden_states[tap] for tap in taps], -1)[:, :-1]
            token_BTH = F.embedding(ids[:, 1:], teacher.get_input_embeddings().weight)
        loss, overlap = compute(head, state_BTX, token_BTH, read.logits[:, 1:], ids_E, recipe.depth)
        named = {f"draft {step + 1}": value for step, value in enumerate(overlap.tolist())}
        return loss, {"overlap": float(overlap.mean()), **named}

    return losses


def taps_of(layers: int) -> list[int]:
    """The blocks whose inputs the head reads: one near the first, the middle one, one near the last."""
    usual = (2, layers // 2, layers - 3) if layers >= 12 else (layers // 4, layers // 2, layers - 1)
    return sorted(set(usual))


def frequent(count_V: Tensor, vocab: int) -> Tensor | None:
    """The ids of the most frequent tokens; None if there are no others."""
    return None if vocab >= len(count_V) else count_V.argsort(descending=True, stable=True)[:vocab].sort()[0]


def block_sizes(config: Any) -> dict[str, Any]:
    """The head's block, as wide as the target."""
    heads, dim = config.num_attention_heads, config.hidden_size
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": dim, "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or dim // heads,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * dim,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-6, "rope_theta": rope.get("rope_theta", 10000.0), "hidden_act": "silu",
    }  # fmt: skip


def build(teacher: Any, taps: list[int], ids_E: Tensor | None, seed: int) -> Head:
    """A fresh head; its logits begin with the target's own matrix."""
    torch.manual_seed(seed)
    config = teacher.config.get_text_config()
    table_EH = teacher.get_output_embeddings().weight.detach()
    table_EH = table_EH if ids_E is None else table_EH[ids_E]
    own = LlamaConfig.from_dict(block_sizes(config))
    head = Head(own, len(taps) * config.hidden_size, len(table_EH))
    head.lm_head.weight.data.copy_(table_EH)
    return head


def begun(folder: Path) -> tuple[dict[str, Tensor], Tensor | None, list[int]]:
    """The tensors, the target's ids and the layers of a head that `save` wrote."""
    tensors = load_file(folder / "model.safetensors")
    offset_E = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    ids_E = None if offset_E is None else torch.arange(len(offset_E)) + offset_E
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return tensors, ids_E, content["eagle_aux_hidden_state_layer_ids"]


def save(
    folder: Path, head: Head, ids_E: Tensor | None, taps: list[int], config: Any, recipe: HeadRecipe,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Writes the head in the speculators layout; its embedding is the target's, and not written."""
    tensors = {name: value.to("cpu", dtype).contiguous() for name, value in head.state_dict().items()}
    if ids_E is not None:
        tensors["d2t"] = ids_E.cpu() - torch.arange(len(ids_E))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids_E.cpu(), True)
    verifier = {"name_or_path": Path(recipe.target).name, "architectures": config.architectures}
    proposal = {"proposal_type": "greedy", "speculative_tokens": recipe.depth}
    content = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": block_sizes(config), "draft_vocab_size": head.lm_head.out_features,
        "eagle_aux_hidden_state_layer_ids": taps,
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
