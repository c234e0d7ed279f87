"""An EAGLE-3 head: one block that reads the target's hidden states and the next token's embedding.

At position t the head is given g, which is made of the target's hidden states at t (`fused`), and token t+1;
what it gives is the logits of token t+2, and z. To draft further it takes z for the next position's g.

Suffixes of shapes as in decoder.py; X numbers of the target's hidden states, E the head's own vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.distributed.comm import ALONE
from llama_ssp.models.assemble import Assembly, Outline, Sizes
from llama_ssp.models.attention import Feed, Rotary
from llama_ssp.models.decoder import Attention, KeysValues, Mlp, Norm
from llama_ssp.models.heads.settings import HeadSettings
from llama_ssp.models.linear import Product, plain
from llama_ssp.models.safetensors_io import Source

EMBEDDING = "embed_tokens.weight"
MAPS = "d2t", "t2d"  # a drafted token's id is its place plus d2t; t2d says which ids there are


class Eagle3(nn.Module):
    """The head's layers."""

    def __init__(
        self, settings: HeadSettings, embedding_VH: Tensor, fc: nn.Module, state_norms: list[Norm],
        norms: dict[str, Norm], attention: Attention, mlp: Mlp, rotary: Rotary, head: nn.Module,
    ) -> None:  # fmt: skip
        """`state_norms`: of all hidden states at once, or of each layer's, or none."""
        super().__init__()
        self.embedding = nn.Parameter(embedding_VH, requires_grad=False)
        self.fc, self.state_norms = fc, nn.ModuleList(state_norms)
        self.norms = nn.ModuleDict(norms)  # of the token, of the states, before the MLP, before the head
        self.attention, self.mlp, self.rotary, self.head = attention, mlp, rotary, head
        self.normed_residual, self.normed_output = settings.norm_before_residual, settings.norm_output

    def fused(self, state_TX: Tensor) -> Tensor:
        """g, (T, H), of the target's hidden states."""
        if self.state_norms:
            parts = state_TX.chunk(len(self.state_norms), -1)
            state_TX = torch.cat([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], -1)
        found: Tensor = self.fc(state_TX)
        return found

    def forward(self, token_T: Tensor, g_TH: Tensor, feed: Feed, cache: KeysValues) -> Tensor:
        """z, (T, H); keys and values are written into the cache."""
        norms = self.norms
        normed_TH = norms["states"](g_TH)
        both_TH = torch.cat([norms["token"](self.embedding[token_T]), normed_TH], -1)
        turns = {self.attention.rotary or "": self.rotary(feed)}
        x_TH = normed_TH if self.normed_residual else g_TH
        x_TH = x_TH + self.attention(both_TH, turns, cache, feed)
        x_TH = x_TH + self.mlp(norms["before_mlp"](x_TH))
        z_TH: Tensor = norms["output"](x_TH) if self.normed_output else x_TH
        return z_TH

    def logits(self, z_RH: Tensor) -> Tensor:
        """Of the head's own tokens, (R, E)."""
        found: Tensor = self.head(z_RH if self.normed_output else self.norms["output"](z_RH))
        return found


class HeadAssembly(Assembly):
    """Reads a head's tensors; `config` is transformers' of the block alone."""

    def __init__(
        self, config: Any, settings: HeadSettings, source: Source, dtype: torch.dtype, product: Product,
        head: Product, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(config, source, ALONE, dtype, product, head, device, drafts=True)
        self.settings = settings
        self.attention_inputs = 2 * self.shape.dim

    def made(self, embedding_VH: Tensor | None) -> Eagle3:
        """The head; `embedding_VH` is the target's, if the head has none of its own."""
        settings, dim, name = self.settings, self.shape.dim, self.settings.prefix
        if embedding_VH is None:
            embedding_VH = self.read(EMBEDDING, (self.shape.vocab, dim))
        (block,) = self.shape.blocks
        return Eagle3(
            settings, embedding_VH, self.head(self.read("fc.weight", (dim, settings.inputs)), None),
            self.state_norms(),
            {
                "token": self.norm(f"{name}.input_layernorm"), "states": self.norm(f"{name}.hidden_norm"),
                "before_mlp": self.norm(f"{name}.post_attention_layernorm"), "output": self.norm("norm"),
            },
            self.attention(f"{name}.", block), self.dense_mlp(f"{name}."),
            self.rotaries()[block.rotary or ""],
            self.head(self.read("lm_head.weight", (settings.vocab, dim)), None),
        ).eval()  # fmt: skip

    def state_norms(self) -> list[Norm]:
        settings = self.settings
        if settings.norm_before_fc:
            return [self.norm("input_norm", settings.inputs)]
        count = len(settings.taps or range(3)) if settings.fc_norm else 0
        return [self.norm(f"fc_norm.{number}", settings.inputs // count) for number in range(count)]

    def ids(self) -> Tensor | None:
        """The target's id of each of the head's tokens, (E,); None where both count alike."""
        if MAPS[0] not in self.source.shapes:
            return None
        offset_E = self.source.read(MAPS[0], None)
        assert isinstance(offset_E, Tensor)
        return torch.arange(len(offset_E)) + offset_E.to(torch.int64)


def wanted(config: Any, settings: HeadSettings) -> dict[str, Sizes]:
    """The tensors that the head has on disk, by name, but for the maps of its vocabulary."""
    meta = torch.device("meta")
    whole = HeadAssembly(config, settings, Outline({}), torch.float32, plain, plain, meta)
    table_VH = None if settings.embeds else torch.empty(whole.shape.vocab, whole.shape.dim, device=meta)
    whole.made(table_VH)
    return whole.wanted
