"""A causal model of one layer of linear attention and one with gates in fp64, for walked runs, and its law.

The model is made of the program's own layers and cache, so that a state that is stale, of another position or
of another text changes its distribution. Norms and rotary positions are left out: these are in fp32. `Plain`
has the same weights, and computes a whole text token by token, as the equations stand, by code of its own.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.models.attention import Scores
from llama_ssp.models.cache_layout import DeltaShape
from llama_ssp.models.decoder import Attention, Block, Decoder, HeadLayout, Mlp
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.delta import DeltaNet
from llama_ssp.models.linear import Embedding, Head, dense

WIDTH, KEYS, VALUES, KEY_DIM, VALUE_DIM, KERNEL = 6, 1, 2, 3, 2, 3
HEADS, HEAD_DIM = 2, 3
CHANNELS = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
EPSILON = 1e-6


def weights_of(vocab: int, seed: int, context: int, sharpness: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gates = VALUES * VALUE_DIM
    return {
        "embedding": random(vocab, WIDTH),
        "place": random(context + 8, WIDTH),
        "in": random(CHANNELS + gates + 2 * VALUES, WIDTH),
        "kernel": random(CHANNELS, KERNEL),
        "decay": -2 + random(VALUES).abs(),
        "step": random(VALUES) - 1,
        "norm": 1 + 0.3 * random(VALUE_DIM),
        "out": random(WIDTH, gates),
        "qkv": random(2 * HEADS * HEAD_DIM + 2 * HEAD_DIM, WIDTH),
        "o": random(WIDTH, HEADS * HEAD_DIM),
        "up": random(WIDTH, WIDTH),
        "down": random(WIDTH, WIDTH) / WIDTH,
        "head": random(vocab, WIDTH) * sharpness,
    }


def hybrid(
    vocab: int, seed: int, context: int = 64, window: int | None = None, sharpness: float = 0.7
) -> DecoderModel:
    """Returns the model; one without a window, which it does not have."""
    weights = weights_of(vocab, seed, context, sharpness)
    no_norms = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    linear = DeltaNet(
        inputs=dense(weights["in"]),
        output=dense(weights["out"]),
        kernel_CK=weights["kernel"],
        decay_H=weights["decay"],
        step_H=weights["step"],
        norm_E=weights["norm"],
        key_heads=KEYS,
        key_dim=KEY_DIM,
        activation="silu",
        epsilon=EPSILON,
    )
    queries = HEADS * HEAD_DIM
    layout = HeadLayout(
        sizes=[queries, queries, HEAD_DIM, HEAD_DIM],
        head_dim=HEAD_DIM,
        scores=Scores(scale=HEAD_DIM**-0.5),
        rotary=None,
        gated=True,
    )
    gated = Attention(
        qkv=dense(weights["qkv"]), output=dense(weights["o"]), heads=layout, norms=None, sink_H=None
    )
    blocks = [
        Block(
            attention,
            Mlp(up=dense(weights["up"]), down=dense(weights["down"]), activation=torch.tanh, gated=False),
            {place: nn.Identity() for place in no_norms},
            scale=1.0,
            parallel=False,
        )
        for attention in (linear, gated)
    ]
    state = DeltaShape(heads=VALUES, key_dim=KEY_DIM, value_dim=VALUE_DIM, channels=CHANNELS, tail=KERNEL - 1)
    decoder = Decoder(
        embedding=Embedding(weights["embedding"], 1.0),
        position_table=weights["place"],
        position_offset=0,
        rotaries={},
        blocks=blocks,
        norm=nn.Identity(),
        head=Head(dense(weights["head"]), [vocab], None),
        cache_shapes=[state, (1, HEAD_DIM)],
    )
    config = SimpleNamespace(model_type="toy", vocab_size=vocab, max_position_embeddings=context)
    return DecoderModel(decoder.eval(), config, f"hybrid-{seed}")


class TokenByToken:
    """The same model, token by token: no cache, no chunks, no triangular system."""

    def __init__(self, vocab: int, seed: int, context: int = 64, sharpness: float = 0.7) -> None:
        self.weights = weights_of(vocab, seed, context, sharpness)

    def __call__(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        w = self.weights
        (ids,) = input_ids.tolist()
        x_SH = torch.stack([w["embedding"][token] + w["place"][at] for at, token in enumerate(ids)])
        for layer in (self._linear, self._gated):
            x_SH = x_SH + layer(x_SH)
            x_SH = x_SH + torch.tanh(x_SH @ w["up"].T) @ w["down"].T
        return SimpleNamespace(logits=(x_SH @ w["head"].T)[None])

    def _linear(self, x_SH: Tensor) -> Tensor:
        w = self.weights
        gates = VALUES * VALUE_DIM
        made_S = x_SH @ w["in"].T
        state = [torch.zeros(KEY_DIM, VALUE_DIM, dtype=torch.float64) for _ in range(VALUES)]
        rows = []
        for at in range(len(x_SH)):
            mixed = torch.zeros(CHANNELS, dtype=torch.float64)
            for back in range(KERNEL):
                if at >= back:
                    mixed += w["kernel"][:, KERNEL - 1 - back] * made_S[at - back, :CHANNELS]
            mixed = mixed * torch.sigmoid(mixed)
            query, key, values = mixed[:KEY_DIM], mixed[KEY_DIM : 2 * KEY_DIM], mixed[2 * KEY_DIM :]
            query = query / (query.square().sum() + EPSILON).sqrt() / KEY_DIM**0.5
            key = key / (key.square().sum() + EPSILON).sqrt()
            parts = []
            for head in range(VALUES):
                value = values[head * VALUE_DIM : (head + 1) * VALUE_DIM]
                place = CHANNELS + gates + head
                beta = 1 / (1 + torch.exp(-made_S[at, place]))
                speed = torch.log(1 + torch.exp(made_S[at, place + VALUES] + w["step"][head]))
                state[head] = state[head] * torch.exp(-torch.exp(w["decay"][head]) * speed)
                state[head] = state[head] + torch.outer(key, beta * (value - key @ state[head]))
                read = query @ state[head]
                read = read / (read.square().mean() + EPSILON).sqrt() * w["norm"]
                gate = made_S[at, CHANNELS + head * VALUE_DIM : CHANNELS + (head + 1) * VALUE_DIM]
                parts.append(read * gate * torch.sigmoid(gate))
            rows.append(torch.cat(parts) @ w["out"].T)
        return torch.stack(rows)

    def _gated(self, x_SH: Tensor) -> Tensor:
        w = self.weights
        queries = HEADS * HEAD_DIM
        made_S = x_SH @ w["qkv"].T
        key_SD, value_SD = made_S[:, 2 * queries : -HEAD_DIM], made_S[:, -HEAD_DIM:]
        rows = []
        for at in range(len(x_SH)):
            heads = []
            for head in range(HEADS):
                query = made_S[at, head * HEAD_DIM : (head + 1) * HEAD_DIM]
                weight = torch.softmax(key_SD[: at + 1] @ query / HEAD_DIM**0.5, 0)
                heads.append(weight @ value_SD[: at + 1])
            gate = made_S[at, queries : 2 * queries]
            rows.append((torch.cat(heads) * torch.sigmoid(gate)) @ w["o"].T)
        return torch.stack(rows)
