"""Makes a head of its folder: checks its tensors, and takes from the target what it does not have."""

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import ALONE, Ranks
from llama_ssp.errors import ModelError
from llama_ssp.models.assemble import Assembly
from llama_ssp.models.attention import Scores
from llama_ssp.models.cache_layout import cache_shapes
from llama_ssp.models.decoder import HeadLayout
from llama_ssp.models.families import family_of
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.formats.adapted_source import adapted
from llama_ssp.models.heads.layers import Assistant, AssistantBlocks, DFlash, Eagle3, ReadingAttention
from llama_ssp.models.heads.model import AssistantModel, DFlashModel, Eagle3Model, HeadLayers, HeadModel
from llama_ssp.models.heads.settings import (
    MAPS,
    ORDER,
    AssistantSettings,
    Eagle3Settings,
    HeadSettings,
    head_settings,
)
from llama_ssp.models.layout import rows_of, tensors_on_disk
from llama_ssp.models.layout_sizes import HeadSizes
from llama_ssp.models.linear import Embedding, Kernels, LayerFormat
from llama_ssp.models.loader import differences, opened, require_complete
from llama_ssp.models.model_config import require_supported
from llama_ssp.models.safetensors_io import FileSource, Source
from llama_ssp.models.shape import BlockShape, Shape, reason_against, shape_of
from llama_ssp.models.steps import has_kernels
from llama_ssp.models.tensor_row import Part

# The target's embedding, or with True its output matrix, and whether that is the target's own memory.
Tables = Callable[[bool], tuple[Tensor, bool]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TargetOfHead:
    """What a head that reads the target's cache is told of the target.

    `config` is transformers'. `look_up` embeds tokens where the target is split, and no rank has the table.
    """

    config: Any
    look_up: Callable[[Tensor], Tensor] | None = None


class HeadAssembly(Assembly):
    """Reads a head's tensors; `config` is transformers' of its blocks alone.

    `model` is the class that runs what is `made`.
    """

    model: Callable[..., HeadModel]

    def __init__(
        self,
        config: Any,
        settings: HeadSettings,
        source: Source,
        form: LayerFormat,
        target: TargetOfHead | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`target`: of a head that reads its cache."""
        self.target = target
        shape = shape_of_head(config, settings)
        super().__init__(shape, config, source, ranks, form, drafts=True)
        self.settings = settings

    def made(self, embedding_VH: Tensor | None, output_EH: Tensor | None) -> HeadLayers:
        """Returns the head; embedding and output matrix are the target's, if the head has none."""
        if embedding_VH is None:
            embedding_VH = self.read(self.row(Part.embedding))
        if output_EH is None:
            output_EH = self.read(self.row(Part.head))
        fc = self.form.head(self.read(self.row(Part.states)))
        return self._joined(embedding_VH, fc, self.form.head(output_EH))

    def _joined(self, embedding_VH: Tensor, fc: nn.Module, output: nn.Module) -> HeadLayers:
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
        blocks = [self.block(self.shape.prefix(n), block) for n, block in enumerate(self.shape.blocks)]
        head = DFlash(
            embedding_VH=embedding_VH,
            fc=fc,
            norms=(self.norm(self.row(Part.state_norm)), self.norm(self.row(Part.norm))),
            blocks=blocks,
            rotary=self.rotaries()[self.shape.blocks[0].rotary or ""],
            head=output,
        )
        return head.eval()


class Eagle3Assembly(HeadAssembly):
    """Reads a head that drafts one token after the other."""

    model = Eagle3Model
    settings: Eagle3Settings

    def _joined(self, embedding_VH: Tensor, fc: nn.Module, output: nn.Module) -> Eagle3:
        (block,) = self.shape.blocks
        prefix = self.shape.prefix(0)
        token_norm, states_norm = rows_of(self.shape, Part.before_attention)
        head = Eagle3(
            settings=self.settings,
            embedding_VH=embedding_VH,
            fc=fc,
            state_norms=[self.norm(row) for row in rows_of(self.shape, Part.state_norm)],
            norms={
                "token": self.norm(token_norm, prefix),
                "states": self.norm(states_norm, prefix),
                "before_mlp": self.norm(self.row(Part.before_mlp), prefix),
                "output": self.norm(self.row(Part.norm)),
            },
            attention=self.attention(prefix, block),
            mlp=self.dense_mlp(prefix),
            rotary=self.rotaries()[block.rotary or ""],
            head=output,
        )
        return head.eval()


class AssistantAssembly(HeadAssembly):
    """Reads an assistant, whose blocks make queries alone."""

    model = AssistantModel
    settings: AssistantSettings

    def attention(self, prefix: str, own: BlockShape) -> ReadingAttention:
        heads = self.share.heads_of(own.full)
        size = self.shape.heads_of(own.full).head_dim
        # Its last key is that of the position before its own, and it sees one more than the window says.
        window = None if own.window is None else own.window + 1
        layout = HeadLayout(
            sizes=[heads.queries * size],
            head_dim=size,
            scores=Scores(scale=self.shape.scale, window=window),
            rotary=own.rotary,
        )
        return ReadingAttention(
            qkv=self.columns(prefix, Part.qkv, own.full),
            output=self.rows(prefix, Part.output, own.full),
            heads=layout,
            norms=self.norm(self.row(Part.query_norm, own.full), prefix),
            sink_H=None,
        )

    def made(self, embedding_VH: Tensor | None, output_EH: Tensor | None) -> HeadLayers:
        """Returns the assistant; over ranks all but the first one have its blocks alone."""
        assert self.target is not None
        target = shape_of(self.target.config)
        look_up = self.target.look_up
        if embedding_VH is not None:
            look_up = Embedding(embedding_VH, target.embedding_scale)
        assert look_up is not None, "no rank has the target's embedding"
        last = {block.window is None: number for number, block in enumerate(target.blocks)}
        blocks = AssistantBlocks(
            look_up=look_up,
            blocks=[self.block(self.shape.prefix(n), block) for n, block in enumerate(self.shape.blocks)],
            sources=[last[block.window is None] for block in self.shape.blocks],
            rotaries=self.rotaries(),
            reduce=self.reduce,
        )
        if not self.ranks.is_leader:
            return blocks.eval()

        centroids = None
        group_V = None
        if self.settings.centroids:
            centroids = self.form.head(self.read(self.row(Part.centroids)))
            group_V = self.groups().to(self.device)
        head = Assistant(
            before=self.form.head(self.read(self.row(Part.states))),
            blocks=blocks,
            norm=self.norm(self.row(Part.norm)),
            head=self.form.head(self.read(self.row(Part.head))),
            after=self.form.head(self.read(self.row(Part.back))),
            centroids=centroids,
            group_V=group_V,
            chosen=self.settings.chosen,
        )
        return head.eval()

    def groups(self) -> Tensor:
        """Returns the group of each token, (V,); the tensor on disk has the tokens group by group."""
        token_V: Any = self.source.read(ORDER, None) if ORDER in self.source.shapes else torch.empty(0)
        token_V = token_V.to(torch.int64)
        place_V = torch.arange(self.settings.vocab)
        if not torch.equal(token_V.sort().values, place_V):
            raise ModelError(
                "the assistant's order of tokens is none",
                where=ORDER,
                found=f"{len(token_V)} numbers",
                allowed=f"each of {self.settings.vocab} tokens once",
                fix=REFETCH,
            )
        group_V = torch.empty_like(place_V)
        group_V[token_V] = place_V // (self.settings.vocab // self.settings.centroids)
        return group_V


def load_head(
    path: Path,
    dtype: Dtype,
    device: torch.device,
    layers: int,
    tables: Tables,
    name: str,
    fast: bool,
    target: TargetOfHead | None = None,
    ranks: Ranks = ALONE,
) -> HeadModel:
    """Loads the head of a folder, or this rank's part of one that reads the cache of a split target.

    `layers` are the target's; `tables` gives what the head does not have; `target`: of such a head.
    Raises ModelError where folder and target do not fit.
    """
    settings = head_settings(path)
    config = block_config(path, settings)
    fast = fast and not settings.drafts and not settings.shares_cache
    if fast:
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        fast = has_kernels(name, dtype, device, heads)
    kernels = Kernels.all if fast else Kernels.none
    form = LayerFormat(dtype=dtype, device=device, kernels=kernels)
    names = wanted(config, settings)
    taps = settings.taps_of(layers)
    _require_taps(path, settings, taps, layers)

    # The target's own memory, where it lends a table on the same device in the same format.
    lent: list[Tensor | None] = [None, None]
    shared = []
    for output in (False, True):
        has_table = settings.heads if output else settings.embeds
        if has_table or ranks.world > 1:
            continue
        target_table, is_shared = tables(output)
        table = target_table.to(device, form.numbers)
        lent[output] = table
        if is_shared and table.data_ptr() == target_table.data_ptr():
            shared.append(table)

    source = FileSource(path, {*names, *MAPS, ORDER}, "model")
    with closing(source):
        shapes = {name: shape for name, shape in source.shapes.items() if not settings.ignores(name)}
        require_complete(path, differences(names, shapes, config))
        assembly = assembly_of(config, settings, source, form, target, ranks)
        head = assembly.made(*lent)
        ids_E = assembly.ids()
        _require_ids(path, settings, ids_E, source)
    log.debug("draft %s: %s head, %s on %s", name, settings.kind, dtype.value, device)

    model = assembly.model(
        head,
        config,
        settings,
        cache_shapes=cache_shapes(assembly.share),
        taps=taps,
        name=name,
        fast=fast,
    )
    model.ids_E = None if ids_E is None else ids_E.to(model.device)
    model.shared = {tensor.data_ptr() for tensor in shared}
    return model


def _require_taps(path: Path, settings: HeadSettings, taps: tuple[int, ...], layers: int) -> None:
    """Refuses taps that a target of `layers` blocks does not have."""
    last = layers
    if settings.drafts:
        last = layers - 1  # what the last block gives is normed for some
    wrong = [tap for tap in taps if not 0 <= tap <= last or taps.count(tap) > 1]
    if wrong:
        raise ModelError(
            "the head reads layers that the target cannot give",
            where=path,
            found=", ".join(map(str, wrong)),
            allowed=f"0..{last}, each once",
            fix="use a head of this target",
        )


def block_config(path: Path, settings: HeadSettings) -> Any:
    """Returns transformers' config of the head's block. Raises ModelError if it cannot be run."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config: Any = CONFIG_MAPPING[settings.block["model_type"]].from_dict(dict(settings.block))
        against = reason_against(config)
    except MemoryError:
        raise
    except Exception as error:  # values of wrong types fail in any way
        raise ModelError(
            "config.json cannot be read", where=path, found=str(error)[:160], fix=REFETCH
        ) from None
    if against:
        raise ModelError(
            "the head's block is of another kind", where=path, found=against, fix="use another head"
        )
    return config


def _require_ids(path: Path, settings: HeadSettings, ids_E: Tensor | None, source: FileSource) -> None:
    """Refuses a reduced vocabulary whose two maps do not agree."""
    whole = int(settings.block["vocab_size"])
    count = settings.vocab
    fits = count == whole
    if ids_E is not None:
        fits = ids_E.shape == (count,) and int(ids_E.min()) >= 0 and int(ids_E.max()) < whole
    if fits and ids_E is not None:
        drafted_V = torch.zeros(whole, dtype=torch.bool)
        drafted_V[ids_E] = True
        fits = int(drafted_V.sum()) == count  # each token once
        if fits and MAPS[1] in source.shapes:
            listed_V = source.read(MAPS[1], None)
            fits = isinstance(listed_V, Tensor) and torch.equal(listed_V.bool(), drafted_V)

    if not fits:
        raise ModelError(
            "the maps of the head's vocabulary do not agree",
            where=f"{path}: d2t, t2d",
            found="other tokens",
            allowed=f"{count} tokens of the {whole}",
            fix=REFETCH,
        )


def table_on_disk(path: Path | None, model: ModelConf, output: bool) -> Tensor:
    """Reads the target's table whole, for the leader of several ranks, each of which holds a part."""
    if path is None:
        raise ModelError(
            "the head has no embedding, and the target none on disk",
            where=model.name,
            found="a synthetic target",
            fix="use a head with embed_tokens",
        )
    names = family_of(model.family).names
    layer = names.head if output and not model.tied else names.embedding
    name = f"{layer}.weight"
    config = require_supported(path)
    with (
        closing(opened(path, config, tensors_on_disk(shape_of(config)))) as files,
        adapted(files, model, config, "model", torch.float32) as source,
    ):
        table_VH = source.read(name, None)
    return table_VH if isinstance(table_VH, Tensor) else table_VH.decoded(torch.float32)


def assembly_of(
    config: Any,
    settings: HeadSettings,
    source: Source,
    form: LayerFormat,
    target: TargetOfHead | None = None,
    ranks: Ranks = ALONE,
) -> HeadAssembly:
    """Returns what reads a head of this kind."""
    kind: type[HeadAssembly] = DFlashAssembly if settings.drafts else Eagle3Assembly
    if settings.shares_cache:
        kind = AssistantAssembly
    return kind(config, settings, source, form, target, ranks)


def shape_of_head(config: Any, settings: HeadSettings) -> Shape:
    """Returns the shape of a head, whose block has this config."""
    prefix = ""
    state_norms: list[tuple[str, int]] = []
    if isinstance(settings, Eagle3Settings):
        prefix = settings.prefix
        if settings.fc_norm:
            count = len(settings.taps or range(3))
            state_norms = [(f"fc_norm.{n}", settings.inputs // count) for n in range(count)]
        elif settings.norm_before_fc:
            state_norms = [("input_norm", settings.inputs)]
    trained_head = HeadSizes(
        inputs=settings.inputs,
        vocab=settings.vocab,
        has_block=settings.drafts > 0,
        prefix=prefix,
        state_norms=tuple(state_norms),
        embeds=settings.embeds,
        heads=settings.heads,
        shares_cache=settings.shares_cache,
        centroids=settings.centroids if isinstance(settings, AssistantSettings) else 0,
    )
    return replace(shape_of(config), trained_head=trained_head)


def wanted(config: Any, settings: HeadSettings) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that the head has on disk, by name, without the maps of its vocabulary."""
    return tensors_on_disk(shape_of_head(config, settings))
