"""A trained head in memory: its layers, what reads them from its folder, and its steps, eager or compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_ssp.config import Dtype, ModelConf
from llama_ssp.distributed.comm import ALONE
from llama_ssp.errors import ModelError
from llama_ssp.models import attention
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder import KeysValues
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.families import family_of
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.heads.eagle3 import MAPS, Eagle3, HeadAssembly, wanted
from llama_ssp.models.heads.settings import HeadSettings, head_settings
from llama_ssp.models.interface import Model
from llama_ssp.models.kernels import attention as attention_kernel
from llama_ssp.models.kv_cache import Tally
from llama_ssp.models.linear import formats
from llama_ssp.models.loader import opened, require_supported
from llama_ssp.models.programs import Part, Program, ProgramFile, compiled
from llama_ssp.models.quantization import scales_of
from llama_ssp.models.safetensors_io import FileSource
from llama_ssp.models.shape import reason_against
from llama_ssp.models.slot_cache import SlotCache
from llama_ssp.models.steps import WIDEST, has_kernels

log = logging.getLogger(__name__)


class HeadModel:
    """A head on one device. `vocab` and `context` are of the texts that it reads, in the target's tokens."""

    ranks = ALONE

    def __init__(
        self, head: Eagle3, config: Any, settings: HeadSettings, taps: tuple[int, ...], name: str,
        ids_E: Tensor | None = None, fast: bool = False, shares_embedding: bool = False,
    ) -> None:  # fmt: skip
        """`ids_E`: the target's ids of the head's tokens; None if they are the same.

        `shares_embedding`: the table is the target's, and counts there.
        """
        self.head, self.config, self.settings, self.name = head, config, settings, name
        self.taps, self.fast = taps, fast
        self.vocab, self.context = int(config.vocab_size), int(config.max_position_embeddings)
        self.device, self.dtype, self.dim = (
            head.embedding.device,
            head.embedding.dtype,
            int(config.hidden_size),
        )
        self.ids_E = None if ids_E is None else ids_E.to(self.device)
        self.shares_embedding = shares_embedding
        self.caches = Tally()
        self.attend: attention.Attend = attention.attend_rows
        if fast and self.device.type == "cpu":
            self.attend = attention_kernel.attend
        attended = head.attention
        self._cache_shapes = [(attended.sizes[1] // attended.head_dim, attended.head_dim)]
        self._programs: list[Program] = []

    @property
    def weights_bytes(self) -> int:
        tensors = [*self.head.parameters(), *self.head.buffers(), *scales_of(self.head)]
        if self.ids_E is not None:
            tensors.append(self.ids_E)
        shared = {self.head.embedding.data_ptr()} if self.shares_embedding else set[int]()
        return sum({t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in shared}.values())

    @property
    def held_bytes(self) -> int:
        return self.weights_bytes + self.caches.most

    def new_cache(self, rows: int, capacity: int) -> SlotCache:
        return SlotCache.of(rows, capacity, self._cache_shapes, self.dtype, self.device, self.caches)

    def new_states(self, rows: int, window: int) -> Tensor:
        """Room for g of `window` positions of each row, (rows * window, H)."""
        state_NH = torch.empty(rows * window, self.dim, dtype=self.dtype, device=self.device)
        self.caches.add(state_NH)
        return state_NH

    @torch.inference_mode()
    def fused(self, state_TX: Tensor) -> Tensor:
        """g, (T, H), of the target's hidden states."""
        return self.head.fused(state_TX.to(self.device, self.dtype))

    @torch.inference_mode()
    def states(
        self, token_T: Tensor, g_TH: Tensor, rows: list[tuple[int, int, int]], cache: SlotCache
    ) -> Tensor:
        """z, (T, H), of tokens and their g; `rows` has a row's number, its start and how many there are."""
        feed = attention.Feed.of(
            [(row * cache.capacity, start, count) for row, start, count in rows], self.device, self.attend
        )
        token_T = token_T.to(self.device).clamp(max=self.vocab - 1)
        (layer,) = cache.layers
        if self.fast and max(count for _, _, count in rows) <= WIDEST:
            given = token_T, g_TH, feed.position_T, feed.first_T, [layer]
            if self._programs or self._compile(*given):
                z_TH: Tensor = self._programs[0](self.head, *given)
                return z_TH
        found: Tensor = self.head(token_T, g_TH, feed, layer)
        return found

    @torch.inference_mode()
    def logits(self, z_RH: Tensor) -> Tensor:
        """Of the head's own tokens, (R, E)."""
        if self._programs:
            logit_RE: Tensor = self._programs[1](self.head, z_RH)
            return logit_RE
        return self.head.logits(z_RH)

    def prepare(self) -> None:
        """Loads or compiles the steps before they are needed."""
        if self.fast:
            zero_T = torch.zeros(2, dtype=torch.int64, device=self.device)
            g_TH = torch.zeros(2, self.dim, dtype=self.dtype, device=self.device)
            self.states(zero_T, g_TH, [(0, 0, 2)], self.new_cache(1, 8))

    def _compile(self, *given: Any) -> bool:
        """Loads or compiles the two programs; whether the head can be compiled."""
        kinds = (repr(self.settings),)
        files = [
            ProgramFile(self, Part(function, self.head, arguments, kinds))
            for function, arguments in ((block_step, given), (logits_step, (given[1],)))
        ]
        try:
            found: list[Program] = []
            for file in files:
                program = file.load()
                if program is None:
                    log.info("engine: compiling a part of the step of %s", self.name)
                    program = compiled(file.part)
                    file.save(program)
                found.append(program)
            self._programs = found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises
            said = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("engine: %s runs eagerly: it does not compile: %s", self.name, said[0][:200])
            self.fast = False
        return self.fast


# The functions that torch traces.


def block_step(
    head: Eagle3, token_T: Tensor, g_TH: Tensor, position_T: Tensor, first_T: Tensor,
    caches: list[KeysValues],
) -> Tensor:  # fmt: skip
    check: Callable[..., None] = torch._check
    for tensor in (token_T, caches[0][0][0]):
        check(tensor.shape[0] >= 1)
    feed = attention.Feed(position_T, first_T, first_T + position_T, attention_kernel.attend)
    z_TH: Tensor = head(token_T, g_TH, feed, caches[0])
    return z_TH


def logits_step(head: Eagle3, z_RH: Tensor) -> Tensor:
    check: Callable[..., None] = torch._check
    check(z_RH.shape[0] >= 1)
    return head.logits(z_RH)


def load_head(
    path: Path, dtype: Dtype, device: torch.device, layers: int, table: Callable[[], Tensor], shares: bool,
    name: str, fast: bool,
) -> HeadModel:  # fmt: skip
    """The head of a folder, whole.

    `layers` are the target's; `table` gives its embedding, for a head that has none, and `shares` says
    whether that is the target's own memory. Raises ModelError where folder and target do not fit.
    """
    settings = head_settings(path)
    config = block_config(path, settings)
    fast = fast and has_kernels(name, dtype, device)
    product, head = formats(dtype, device, fast)
    names = wanted(config, settings)
    embedding_VH = None if settings.embeds else table().to(device, TORCH_DTYPES[dtype])
    source = FileSource(path, {*names, *MAPS}, "model")
    with closing(source):
        _require_tensors(path, names, source.shapes, config)
        assembly = HeadAssembly(config, settings, source, TORCH_DTYPES[dtype], product, head, device)
        made, ids_E = assembly.made(embedding_VH), assembly.ids()
        _require_ids(path, settings, ids_E, source)
    log.info("draft %s: an EAGLE-3 head, %s on %s", name, dtype.value, device)
    shares = shares and not settings.embeds
    return HeadModel(made, config, settings, settings.taps_of(layers), name, ids_E, fast, shares)


def block_config(path: Path, settings: HeadSettings) -> Any:
    """transformers' config of the head's block; a ModelError if it cannot be run."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config: Any = CONFIG_MAPPING[settings.block["model_type"]].from_dict(dict(settings.block))
        against = reason_against(config)
    except MemoryError:
        raise
    except Exception as error:  # values of wrong types fail in any way
        raise ModelError("config.json cannot be read", path, str(error)[:160], fix=REFETCH) from None
    if against:
        raise ModelError("the head's block is of another kind", path, against, fix="use another head")
    return config


def _require_tensors(
    path: Path, names: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], config: Any
) -> None:
    """Refuses a tensor that is missing, misshapen, or that the head does not have."""
    maps = {name: shape for name, shape in found.items() if name in MAPS}
    problems = [
        *(f"{name} is missing" for name in sorted(names.keys() - found.keys())),
        *(
            f"{name} is {found[name]}, not {names[name]}"
            for name in names
            if found.get(name, names[name]) != names[name]
        ),
        *(f"{name} is not known" for name in sorted(found.keys() - names.keys() - maps.keys())),
    ]
    if problems:
        what, fix = "the head's tensors are not those of config.json", f"{REFETCH}, or use another head"
        raise ModelError(what, path, f"{len(problems)}: {'; '.join(problems[:4])}", fix=fix)


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
        raise ModelError(what, f"{path}: d2t, t2d", "other tokens", allowed, REFETCH)


def table_of(target: Model) -> Tensor | None:
    """The target's embedding, if this process has all of it."""
    if isinstance(target, DecoderModel):
        table_VH = target.decoder.embedding.weight
        return table_VH if len(table_VH) == target.vocab else None
    if isinstance(target, CausalModel):
        found: Tensor = target.module.get_input_embeddings().weight
        return found
    return None


def table_on_disk(path: Path | None, model: ModelConf) -> Tensor:
    """The target's embedding, read whole; for the leader of several ranks, each of which holds a part."""
    if path is None:
        what, fix = "the head has no embedding, and the target none on disk", "use a head with embed_tokens"
        raise ModelError(what, model.name, "a synthetic target over several ranks", fix=fix)
    name = f"{family_of(model.family).names.embedding}.weight"
    with closing(opened(path, require_supported(path), {name: ()})) as source:
        table_VH = source.read(name, None)
    return table_VH if isinstance(table_VH, Tensor) else table_VH.decoded(torch.float32)
