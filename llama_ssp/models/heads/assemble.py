"""Reads a head's tensors from its folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.distributed.comm import ALONE
from llama_ssp.models.assemble import Assembly, Outline, Sizes
from llama_ssp.models.decoder import Norm
from llama_ssp.models.heads.layers import DFlash, Eagle3
from llama_ssp.models.heads.settings import MAPS, DFlashSettings, Eagle3Settings, HeadSettings
from llama_ssp.models.linear import Product, plain
from llama_ssp.models.safetensors_io import Source

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class HeadAssembly(Assembly):
    """Reads a head's tensors; `config` is transformers' of its blocks alone."""

    def __init__(
        self, config: Any, settings: HeadSettings, source: Source, dtype: torch.dtype, product: Product,
        head: Product, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(config, source, ALONE, dtype, product, head, device, drafts=True)
        self.settings = settings

    def made(self, embedding_VH: Tensor | None, output_EH: Tensor | None) -> Eagle3 | DFlash:
        """The head; embedding and output matrix are the target's, if the head has none of its own."""
        settings, dim = self.settings, self.shape.dim
        if embedding_VH is None:
            embedding_VH = self.read(EMBEDDING, (self.shape.vocab, dim))
        if output_EH is None:
            output_EH = self.read(OUTPUT, (settings.vocab, dim))
        fc = self.head(self.read("fc.weight", (dim, settings.inputs)), None)
        output = self.head(output_EH, None)
        if isinstance(settings, DFlashSettings):
            return self._dflash(embedding_VH, fc, output)
        assert isinstance(settings, Eagle3Settings)
        return self._eagle3(settings, embedding_VH, fc, output)

    def _dflash(self, embedding_VH: Tensor, fc: nn.Module, output: nn.Module) -> DFlash:
        blocks = [self.block(f"layers.{n}.", block) for n, block in enumerate(self.shape.blocks)]
        rotary = self.rotaries()[self.shape.blocks[0].rotary or ""]
        norms = self.norm("hidden_norm"), self.norm("norm")
        return DFlash(embedding_VH, fc, *norms, blocks, rotary, output).eval()

    def _eagle3(
        self, settings: Eagle3Settings, embedding_VH: Tensor, fc: nn.Module, output: nn.Module
    ) -> Eagle3:
        name, (block,) = settings.prefix, self.shape.blocks
        self.attention_inputs = 2 * self.shape.dim
        state_norms: list[Norm] = []
        if settings.norm_before_fc:
            state_norms = [self.norm("input_norm", settings.inputs)]
        if settings.fc_norm:
            count = len(settings.taps or range(3))
            state_norms = [self.norm(f"fc_norm.{n}", settings.inputs // count) for n in range(count)]
        return Eagle3(
            settings, embedding_VH, fc, state_norms,
            {
                "token": self.norm(f"{name}.input_layernorm"), "states": self.norm(f"{name}.hidden_norm"),
                "before_mlp": self.norm(f"{name}.post_attention_layernorm"), "output": self.norm("norm"),
            },
            self.attention(f"{name}.", block), self.dense_mlp(f"{name}."),
            self.rotaries()[block.rotary or ""], output,
        ).eval()  # fmt: skip

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
    table_VH = torch.empty(whole.shape.vocab, whole.shape.dim, device=meta)
    whole.made(None if settings.embeds else table_VH, None if settings.heads else table_VH)
    return whole.wanted
