"""Reads a head's tensors from its folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.distributed.comm import ALONE
from llama_ssp.models.assemble import META, Assembly, Outline, Sizes
from llama_ssp.models.decoder import Norm
from llama_ssp.models.heads.layers import DFlash, Eagle3
from llama_ssp.models.heads.model import DFlashModel, Eagle3Model, HeadModel
from llama_ssp.models.heads.settings import MAPS, Eagle3Settings, HeadSettings
from llama_ssp.models.linear import LayerFormat
from llama_ssp.models.safetensors_io import Source

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class HeadAssembly(Assembly):
    """Reads a head's tensors; `config` is transformers' of its blocks alone. `model` runs what is `made`."""

    model: Callable[..., HeadModel]

    def __init__(self, config: Any, settings: HeadSettings, source: Source, form: LayerFormat) -> None:
        super().__init__(config, source, ALONE, form, drafts=True)
        self.settings = settings

    def made(self, embedding_VH: Tensor | None, output_EH: Tensor | None) -> Eagle3 | DFlash:
        """Returns the head; embedding and output matrix are the target's, if the head has none."""
        settings, dim = self.settings, self.shape.dim
        if embedding_VH is None:
            embedding_VH = self.read(EMBEDDING, (self.shape.vocab, dim))
        if output_EH is None:
            output_EH = self.read(OUTPUT, (settings.vocab, dim))
        fc = self.form.head(self.read("fc.weight", (dim, settings.inputs)))
        return self._joined(embedding_VH, fc, self.form.head(output_EH))

    def _joined(self, embedding_VH: Tensor, fc: nn.Module, output: nn.Module) -> Eagle3 | DFlash:
        raise NotImplementedError

    def ids(self) -> Tensor | None:
        """Returns the target's id of each of the head's tokens, (E,); None where they are the same."""
        if MAPS[0] not in self.source.shapes:
            return None
        offset_E: Any = self.source.read(MAPS[0], None)
        id_E: Tensor = torch.arange(len(offset_E)) + offset_E.to(torch.int64)
        return id_E


class DFlashAssembly(HeadAssembly):
    """Reads a head that gives all drafts in one pass."""

    model = DFlashModel

    def _joined(self, embedding_VH: Tensor, fc: nn.Module, output: nn.Module) -> DFlash:
        blocks = [self.block(f"layers.{n}.", block) for n, block in enumerate(self.shape.blocks)]
        rotary = self.rotaries()[self.shape.blocks[0].rotary or ""]
        norms = self.norm("hidden_norm"), self.norm("norm")
        return DFlash(embedding_VH, fc, *norms, blocks, rotary, output).eval()


class Eagle3Assembly(HeadAssembly):
    """Reads a head that drafts one token after the other."""

    model = Eagle3Model
    settings: Eagle3Settings

    def _joined(self, embedding_VH: Tensor, fc: nn.Module, output: nn.Module) -> Eagle3:
        settings, (block,) = self.settings, self.shape.blocks
        name = settings.prefix
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


def assembly_of(config: Any, settings: HeadSettings, source: Source, form: LayerFormat) -> HeadAssembly:
    """Returns what reads a head of this kind."""
    kind = DFlashAssembly if settings.drafts else Eagle3Assembly
    return kind(config, settings, source, form)


def wanted(config: Any, settings: HeadSettings) -> dict[str, Sizes]:
    """Returns the tensors that the head has on disk, by name, without the maps of its vocabulary."""
    assembly = assembly_of(config, settings, Outline({}), LayerFormat(device=META))
    table_VH = torch.empty(assembly.shape.vocab, assembly.shape.dim, device=META)
    assembly.made(None if settings.embeds else table_VH, None if settings.heads else table_VH)
    return assembly.wanted
