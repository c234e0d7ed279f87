"""The layer for multi-token prediction in a checkpoint (DeepSeek-V3, GLM-4 MoE), as a head.

At position t it is given what the target's last norm gives at t, and token t+1. What its own norm gives makes
the logits of token t+2, by the target's output matrix; for the next draft it takes the place of the target's.

The target runs as transformers' module, and so does the block, as a model of one layer of the same class.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from llama_ssp.config import Dtype
from llama_ssp.errors import ModelError
from llama_ssp.models.causal_lm import CausalModel, kernels_of
from llama_ssp.models.devices import TORCH_DTYPES
from llama_ssp.models.families import family_of
from llama_ssp.models.folder import REFETCH, weight_files
from llama_ssp.models.formats.coded import taken
from llama_ssp.models.heads.model import ChainedHead, Spans
from llama_ssp.models.heads.settings import MTP_OWN, NORMED, mtp_settings
from llama_ssp.models.kv_cache import Feed, RaggedCache
from llama_ssp.models.loader import require_complete

log = logging.getLogger(__name__)

COPIES = "embed_tokens.weight", "shared_head.head.weight"  # of the target's tables, which are used


class MtpModel(ChainedHead):
    """A layer for multi-token prediction: `block` is a model of its one layer, with the target's tables."""

    def __init__(
        self, block: CausalModel, norms: dict[str, nn.Module], both: nn.Linear, name: str,
        shared: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """`norms`: of the token's embedding and of the state; `both` joins them."""
        layers = nn.ModuleDict({**norms, "both": both, "block": block.module})
        super().__init__(layers, block.module.config, (NORMED,), name, None, shared)
        self._block, self._own = block, layers
        self._embedding = block.module.get_input_embeddings()
        self._output = block.module.get_output_embeddings()

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        return RaggedCache(rows, capacity, self.caches)

    @torch.inference_mode()
    def fused(self, state_TX: Tensor) -> Tensor:
        return state_TX.to(self.device, self.dtype)

    @torch.inference_mode()
    def states(self, token_T: Tensor, g_TH: Tensor, rows: Spans, cache: RaggedCache) -> Tensor:
        own, start, count = self._own, [0] * cache.rows, [0] * cache.rows
        for row, first, number in rows:
            start[row], count[row] = first, number
        feed = Feed(tuple(start), tuple(count), cache.capacity, self.device)
        token_TH = self._embedding(token_T.to(self.device).clamp(max=self.vocab - 1))
        x_BWH, place_T = g_TH.new_zeros(cache.rows, feed.width, self.dim), feed.real_places()
        both_T2H = torch.cat([own["token"](token_TH), own["state"](g_TH)], -1)
        x_BWH.flatten(0, 1)[place_T] = own["both"](both_T2H)
        return self._block.states(x_BWH, feed, cache).flatten(0, 1)[place_T]

    @torch.inference_mode()
    def logits(self, z_RH: Tensor) -> Tensor:
        found: Tensor = self._output(z_RH)
        return found


def load_mtp(path: Path, dtype: Dtype, device: torch.device, target: CausalModel, name: str) -> MtpModel:
    """The layer of the target's folder; a ModelError where it is not that of config.json."""
    mtp_settings(path)
    if dtype not in (Dtype.fp64, Dtype.fp32, Dtype.bf16, Dtype.fp16):
        what, allowed = "the layer for multi-token prediction is not quantised", "bf16, fp16, fp32"
        raise ModelError(what, f"draft {name}", f"dtype={dtype.value}", allowed, "write draft.dtype=bf16")
    held, own_config = TORCH_DTYPES[dtype], target.module.config
    config = deepcopy(own_config)
    config.num_hidden_layers, config.first_k_dense_replace = 1, 0
    tables = {
        f"{family_of(config.model_type).names.embedding}.weight": target.module.get_input_embeddings(),
        f"{family_of(config.model_type).names.head}.weight": target.module.get_output_embeddings(),
    }
    given = {key: layer.weight.detach().to(device, held) for key, layer in tables.items()}
    shared = [
        table
        for table, layer in zip(given.values(), tables.values(), strict=True)
        if table.data_ptr() == layer.weight.data_ptr()
    ]
    own, block = _tensors(path, own_config)
    module, report = type(target.module).from_pretrained(
        None, config=config, state_dict={**block, **given}, dtype=held, device_map={"": device},
        output_loading_info=True, ignore_mismatched_sizes=True, **kernels_of(config, held),
    )  # fmt: skip
    require_complete(path, report)
    norm, dim = type(module.get_decoder().norm), int(config.hidden_size)
    layers = {
        "token": norm(dim, eps=config.rms_norm_eps), "state": norm(dim, eps=config.rms_norm_eps),
        "both": nn.Linear(2 * dim, dim, bias=False),
    }  # fmt: skip
    for place, layer in layers.items():
        if own[place].shape != layer.weight.shape:
            shapes = tuple(own[place].shape), tuple(layer.weight.shape)
            raise ModelError(f"{MTP_OWN[place]} has another shape", path, *shapes, REFETCH)
        layer.weight = nn.Parameter(own[place].to(device, held), requires_grad=False)
    both = layers.pop("both")
    log.info("draft %s: a layer for multi-token prediction, %s on %s", name, dtype.value, device)
    return MtpModel(CausalModel(module, name), layers, both, name, tuple(shared))


def _tensors(path: Path, config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The layer's own tensors by their places, and those of a model with its block alone, by their names."""
    names = family_of(config.model_type).names
    prefix, places = f"{names.blocks}.{config.num_hidden_layers}.", {v: k for k, v in MTP_OWN.items()}
    own: dict[str, Tensor] = {}
    block: dict[str, Tensor] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118, a handle cannot be iterated
                name = key.removeprefix(prefix)
                if name == key or name in COPIES:
                    continue
                kind, place = (own, places[name]) if name in places else (block, f"{names.blocks}.0.{name}")
                kind[place] = taken(handle.get_tensor(key), None)
    block[f"{names.norm}.weight"] = own.pop("output")
    return own, block
