"""A causal model of one attention layer in fp64, with transformers' calling convention, for walked runs.

It is small enough that every branch of a run can be followed, and real enough that a wrong position, a stale
key or a mask that looks ahead changes its distribution: mutants.py plants each of these, and scenarios.py
must show it.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from llama_ssp.models.causal_lm import CausalModel

WIDTH = 6


@dataclass
class ToyConfig:
    max_position_embeddings: int = 64
    model_type: str = "toy"
    _attn_implementation: str = "sdpa"
    sliding_window: int | None = None
    num_hidden_layers: int = 3  # the states that it shows

    def to_dict(self):
        return {"model_type": self.model_type}


class Toy(nn.Module):
    """`sharpness` scales the logits: the higher, the more certain the law."""

    def __init__(
        self, vocab: int, seed: int, context: int = 64, sharpness: float = 1.5, window: int | None = None
    ):
        super().__init__()
        self.config = ToyConfig(context, sliding_window=window)
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.embedding = nn.Embedding.from_pretrained(random(vocab, WIDTH))
        self.place = random(context + 8, WIDTH)
        self.query, self.key, self.value = random(WIDTH, WIDTH), random(WIDTH, WIDTH), random(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False).requires_grad_(False)
        self.head.weight = nn.Parameter(random(vocab, WIDTH) * sharpness, requires_grad=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        past_key_values=None,
        use_cache=True,
        logits_to_keep=0,
        output_hidden_states=False,
    ):
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length).expand_as(input_ids)
        state = self.embedding(input_ids) + self.place[position_ids]
        key, value = (state @ self.key)[:, None], (state @ self.value)[:, None]
        if past_key_values is not None:
            make = create_sliding_window_causal_mask if self.config.sliding_window else create_causal_mask
            attention_mask = make(self.config, state, None, past_key_values)
            key, value = past_key_values.update(key, value, 0)
        else:
            window = self.config.sliding_window or length
            attention_mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)[None, None]
        score = (state @ self.query)[:, None] @ key.transpose(-1, -2) / WIDTH**0.5
        weight = score.masked_fill(~attention_mask, -torch.inf).softmax(-1)
        seen = (weight @ value)[:, 0]
        first, state = state, torch.tanh(state + seen)
        shown = (first, seen, state) if output_hidden_states else None
        logits = self.head(state[:, -logits_to_keep:] if logits_to_keep else state)
        return SimpleNamespace(logits=logits, hidden_states=shown)


def toy(vocab: int, seed: int, **changes) -> CausalModel:
    return CausalModel(Toy(vocab, seed, **changes), f"toy-{seed}")
