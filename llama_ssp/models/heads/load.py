"""Makes a head of its folder: checks its tensors, and takes from the target what it does not have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.errors import ModelError
from llama_ssp.models.families import family_of
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.heads.assemble import assembly_of, wanted
from llama_ssp.models.heads.model import HeadModel
from llama_ssp.models.heads.settings import MAPS, HeadSettings, head_settings
from llama_ssp.models.linear import Kernels, LayerFormat
from llama_ssp.models.loader import differences, opened, require_complete
from llama_ssp.models.model_config import require_supported
from llama_ssp.models.safetensors_io import FileSource
from llama_ssp.models.shape import reason_against
from llama_ssp.models.steps import has_kernels

# The target's embedding, or with True its output matrix, and whether that is the target's own memory.
Tables = Callable[[bool], tuple[Tensor, bool]]
log = logging.getLogger(__name__)


def load_head(
    path: Path, dtype: Dtype, device: torch.device, layers: int, tables: Tables, name: str, fast: bool
) -> HeadModel:
    """Loads the head of a folder.

    `layers` are the target's; `tables` gives what the head does not have. Raises ModelError where folder and
    target do not fit.
    """
    settings = head_settings(path)
    config = block_config(path, settings)
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    fast = fast and not settings.drafts and has_kernels(name, dtype, device, heads)
    form = LayerFormat(dtype=dtype, device=device, kernels=Kernels.all if fast else Kernels.none)
    names, taps = wanted(config, settings), settings.taps_of(layers)
    last = layers - bool(settings.drafts)  # what is there is normed for some
    if wrong := [tap for tap in taps if not 0 <= tap <= last or taps.count(tap) > 1]:
        raise ModelError(
            "the head reads layers that the target cannot give", path, found=", ".join(map(str, wrong)),
            allowed=f"0..{last}, each once", fix="use a head of this target",
        )  # fmt: skip
    lent: list[Tensor | None] = [None, None]
    shared = []
    for output in (False, True):
        if not (settings.heads if output else settings.embeds):
            given, is_shared = tables(output)
            lent[output] = table = given.to(device, form.numbers)
            shared += [table] if is_shared and table.data_ptr() == given.data_ptr() else []
    source = FileSource(path, {*names, *MAPS}, "model")
    with closing(source):
        shapes = {name: shape for name, shape in source.shapes.items() if name not in MAPS}
        require_complete(path, differences(names, shapes, config))
        assembly = assembly_of(config, settings, source, form)
        layers_of_head, ids_E = assembly.made(*lent), assembly.ids()
        _require_ids(path, settings, ids_E, source)
    log.debug("draft %s: %s head, %s on %s", name, settings.kind, dtype.value, device)
    return assembly.model(layers_of_head, config, settings, taps, name, ids_E, tuple(shared), fast)


def block_config(path: Path, settings: HeadSettings) -> Any:
    """Returns transformers' config of the head's block. Raises ModelError if it cannot be run."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config: Any = CONFIG_MAPPING[settings.block["model_type"]].from_dict(dict(settings.block))
        against = reason_against(config)
    except MemoryError:
        raise
    except Exception as error:  # values of wrong types fail in any way
        raise ModelError("config.json cannot be read", path, found=str(error)[:160], fix=REFETCH) from None
    if against:
        raise ModelError("the head's block is of another kind", path, found=against, fix="use another head")
    return config


def _require_ids(path: Path, settings: HeadSettings, ids_E: Tensor | None, source: FileSource) -> None:
    """Refuses a reduced vocabulary whose two maps do not agree."""
    whole = int(settings.block["vocab_size"])
    count, inside = settings.vocab, torch.zeros(whole, dtype=torch.bool)
    fits = settings.vocab == whole
    if ids_E is not None:
        fits = ids_E.shape == (count,) and int(ids_E.min()) >= 0 and int(ids_E.max()) < whole
        if fits:
            inside[ids_E] = True
            fits = int(inside.sum()) == count
    if fits and MAPS[1] in source.shapes and ids_E is not None:
        listed_V = source.read(MAPS[1], None)
        fits = isinstance(listed_V, Tensor) and torch.equal(listed_V.bool(), inside)
    if not fits:
        what, allowed = "the maps of the head's vocabulary do not agree", f"{count} tokens of the {whole}"
        raise ModelError(what, f"{path}: d2t, t2d", found="other tokens", allowed=allowed, fix=REFETCH)


def table_on_disk(path: Path | None, model: ModelConf, output: bool) -> Tensor:
    """Reads the table whole, for the leader of several ranks, each of which holds a part."""
    if path is None:
        what, fix = "the head has no embedding, and the target none on disk", "use a head with embed_tokens"
        raise ModelError(what, model.name, found="a synthetic target", fix=fix)
    names = family_of(model.family).names
    name = f"{names.head if output and not model.tied else names.embedding}.weight"
    with closing(opened(path, require_supported(path), {name: ()})) as source:
        table_VH = source.read(name, None)
    return table_VH if isinstance(table_VH, Tensor) else table_VH.decoded(torch.float32)
