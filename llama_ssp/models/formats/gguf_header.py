"""Reads the header of a GGUF file, which may be hostile: the model's config, and where tensors lie. No torch.

The gguf package's reader believes every count, and makes some arrays for each item of a list: ten seconds for
a vocabulary, and no end for a lie. Here no byte after the header's limit is read, and a list is one piece.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from llama_ssp.errors import ModelError
from llama_ssp.models.families import FAMILIES, FULL, GGUF_FAMILIES, GGUF_ROWS, Family, Gguf
from llama_ssp.models.folder import REFETCH, require_fetched, shards
from llama_ssp.models.formats.kept import BLOCK, GGUF_FORMATS, STATE_OUTPUT
from llama_ssp.models.sizes import LINEAR

MAX_HEADER_BYTES = 64 * 2**20  # a vocabulary of 260 000 tokens, with its merges, takes a quarter
MAX_TEXTS = 2**21  # in a list: each takes more memory than the file's eight bytes
MAX_ENTRIES = 100_000  # of metadata, or of tensors
# Tensors that are part of the config: factors for all positions, or for short and long texts.
ROTARY = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
FFN = "feed_forward_length"
NEXT_LAYERS = "nextn_predict_layers"  # a key: how many layers for multi-token prediction there are


def read_header(path: Path) -> Header:
    """Reads the header of a model in one file or several; a ModelError unless its tensors lie in them."""
    try:
        return _read_header(path, tuple((file, file.stat().st_mtime_ns) for file in shards(path)))
    except FileNotFoundError as error:
        raise ModelError("a file of the model is missing", where=error.filename, fix=REFETCH) from None


@lru_cache(maxsize=2)  # config, tokenizer and weights need it, and a vocabulary takes a second
def _read_header(path: Path, states: tuple[tuple[Path, int], ...]) -> Header:
    readers = []
    for file, _ in states:
        require_fetched(file)
        try:
            readers.append(_Reader(file))
        except (MemoryError, OSError, ModelError):
            raise
        except Exception as error:  # bytes that are no header make the reader fail in any way
            raise ModelError(
                "the GGUF file cannot be read: it is damaged, cut short, or of another version",
                where=file,
                found=str(error),
                fix="fetch it again, or update gguf if the file's version is newer",
            ) from None
    metadata = readers[0].metadata
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    shapes = {name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in tensors.items()}
    digest = hashlib.sha256(readers[0].data[: readers[0].data_offset].tobytes()).hexdigest()
    return Header(
        path=path,
        architecture=str(metadata.get("general.architecture")),
        metadata=metadata,
        tensors=tensors,
        shapes=shapes,
        digest=digest,
    )


class _Reader(GGUFReader):
    """The header of one file, whose tensors follow one another up to its end."""

    def __init__(self, file: Path) -> None:
        if max(np.fromfile(file, "<u8", 2, offset=8), default=0) > MAX_ENTRIES:
            raise ValueError("more tensors or keys than a model has")
        with np.errstate(over="raise"):  # else a place of 2^64 - 1 is one in the header
            super().__init__(file)
        self.metadata = {name: field.contents() for name, field in self.fields.items()}
        end = self.data_offset
        for each in sorted(self.tensors, key=lambda each: each.data_offset):
            kind = each.tensor_type.name
            start = each.data_offset
            if kind not in GGUF_FORMATS:
                raise ModelError(
                    "a tensor has a number format that cannot be loaded",
                    where=f"{file}: {each.name}",
                    found=kind,
                    allowed=", ".join(GGUF_FORMATS),
                    fix="use a copy in one of these",
                )
            if start != end + -end % self.alignment:
                raise ValueError(f"{each.name} of {each.shape.tolist()} at byte {start}, after byte {end}")
            end = start + each.n_bytes
        if self.data.size - end > self.alignment:
            raise ValueError(f"{self.data.size} bytes, where tensors end at {end}")

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        # A tensor may be as long as the file; it is read when the end of the header is known.
        limit = self.data.size if hasattr(self, "data_offset") else min(MAX_HEADER_BYTES, self.data.size)
        if offset + int(count) * np.dtype(dtype).itemsize > limit:
            raise ValueError(f"{count} numbers or letters at byte {offset} of {limit}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        start = orig_offs + 12
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        types = [GGUFValueType.ARRAY, kind]
        if kind != GGUFValueType.STRING:
            numbers = self._get(start, self.gguf_scalar_to_np[kind], count)
            return 12 + numbers.nbytes, [numbers], [0], types
        if count > MAX_TEXTS:
            raise ValueError(f"a list of {count} texts")
        content = self.data.data
        at = start
        texts = []
        for _ in range(count):
            first = at + 8
            at = at + 8 + struct.unpack_from("<Q", content, at)[0]
            texts.append(content[first:at])
        self._get(start, np.uint8, at - start)  # refused unless they end before the limit
        return at - orig_offs, texts, list(range(count)), types


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the files of a model say of it."""

    path: Path
    architecture: str
    metadata: dict[str, Any]  # of the first file
    tensors: dict[str, ReaderTensor]
    shapes: dict[str, tuple[int, ...]]  # of the tensors, in the order of torch: inputs last
    digest: str  # of the first file's header

    @property
    def family(self) -> Family:
        """Returns the row that the model is read as."""
        return FAMILIES[GGUF_FAMILIES[self._known()]]

    @property
    def row(self) -> Gguf:
        """Returns what files of the architecture have."""
        return GGUF_ROWS[self._known()]

    def _known(self) -> str:
        """Returns the architecture; raises ModelError if it has no row, or experts that its row lacks."""
        kind = self.architecture
        is_known = kind in GGUF_FAMILIES
        if self.get("expert_count") and not (is_known and FAMILIES[GGUF_FAMILIES[kind]].names.router):
            kind = f"{kind} with experts"
            is_known = False
        if not is_known:
            raise ModelError(
                "the architecture of the GGUF file cannot be loaded",
                where=self.path,
                found=kind,
                allowed=", ".join(GGUF_FAMILIES),
                fix="use a folder with safetensors",
            )
        return kind

    @property
    def layers(self) -> int:
        """Returns the model's layers; those for multi-token prediction come after them."""
        further: int = self.number(NEXT_LAYERS) if self.get(NEXT_LAYERS) else 0
        every: int = self.number("block_count")
        return every - further

    def reads(self, name: str) -> bool:
        """Returns whether a tensor is one of the model's weights."""
        place = BLOCK.fullmatch(name)
        return name not in ROTARY and (place is None or int(place[1]) < self.layers)

    def get(self, name: str) -> Any:
        """Returns the value of one of the architecture's keys; None without it."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def number(self, name: str, kind: Any = int, default: Any = None, most: int = 2**31 - 1) -> Any:
        """Returns the value, a positive number of this type; the default where the header has none."""
        value: Any = default if self.get(name) is None else self.get(name)
        if type(value) is not kind or not 0 < value <= most:
            raise ModelError(
                "the header has no usable value",
                where=f"{self.path}: {self.architecture}.{name}",
                found=str(value),
                allowed=f"{kind.__name__}, above 0, to {most}",
                fix=REFETCH,
            )
        return value

    def config(self) -> dict[str, Any]:
        """Returns what config.json would say; a ModelError where the header contradicts itself."""
        family = self.family
        window = "attention.sliding_window"
        dim = self.number("embedding_length")
        layers = self.layers
        heads = self.number("attention.head_count")
        kv_heads = self.number("attention.head_count_kv", default=heads)
        head_dim = self.number("attention.key_length", default=max(1, dim // heads))
        rotary_dim = self.number("rope.dimension_count", default=head_dim, most=head_dim)
        shapes = {name.removesuffix(".weight"): shape for name, shape in self.shapes.items()}
        rows, *_ = shapes.get("token_embd", (0,))
        every = range(min(layers, MAX_ENTRIES))
        kinds = [LINEAR if f"blk.{n}.{STATE_OUTPUT}" in shapes else FULL for n in every]
        attending = kinds.index(FULL) if FULL in kinds else 0
        mlp = self._experts() if family.names.router else {"intermediate_size": self.number(FFN)}
        linear = self._linear(kinds) if family.names.delta is not None else {}

        # These are compared here, before memory is planned, and all tensors before a weight is read.
        queries = heads * head_dim
        keys = kv_heads * head_dim
        claimed: dict[str, Any] = {"token_embd": (rows, dim)}
        if f"blk.{attending}.attn_qkv" in shapes:
            claimed[f"blk.{attending}.attn_qkv"] = (queries + 2 * keys, dim)
        else:
            claimed[f"blk.{attending}.attn_k"] = (keys, dim)
        claimed[f"blk.{attending}.attn_output"] = (dim, queries)
        claimed[f"blk.{self.number('block_count')}.attn_norm"] = None
        if family.names.router:
            width = mlp["moe_intermediate_size"]
            claimed[f"blk.{layers - 1}.ffn_down_exps"] = (mlp["num_experts"], dim, width)
        else:
            claimed[f"blk.{layers - 1}.ffn_down"] = (dim, mlp["intermediate_size"])
        if LINEAR in kinds and linear:
            values = linear["linear_num_value_heads"] * linear["linear_value_head_dim"]
            channels = 2 * linear["linear_num_key_heads"] * linear["linear_key_head_dim"] + values
            first = kinds.index(LINEAR)
            claimed[f"blk.{first}.{STATE_OUTPUT}"] = (dim, values)
            claimed[f"blk.{first}.ssm_conv1d"] = (channels, linear["linear_conv_kernel_dim"])
        for name, shape in claimed.items():
            if shapes.get(name) != shape:
                raise ModelError(
                    "a tensor contradicts the header's sizes",
                    where=f"{self.path}: {name}.weight",
                    found=shapes.get(name),
                    allowed=shape,
                    fix=REFETCH,
                )
        config: dict[str, Any] = {
            "model_type": GGUF_FAMILIES[self.architecture],
            "vocab_size": rows,
            "hidden_size": dim,
            "num_hidden_layers": layers,
            "max_position_embeddings": self.number("context_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": "output" not in shapes,
            "attention_bias": f"blk.{attending}.attn_q.bias" in shapes,
            "mlp_bias": "blk.0.ffn_up.bias" in shapes,
            "rope_theta": self.number("rope.freq_base", float, 10_000.0),
            "partial_rotary_factor": rotary_dim / head_dim,
            "sliding_window": self.number(window) if self.get(window) else None,
            # text/gguf_tokenizer.py reads them, and transformers' own may lie beyond the vocabulary.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
            **self._scaling(),
            **mlp,
            **linear,
        }
        if self.row.other_scale:
            config["query_pre_attn_scalar"] = dim // heads if layers == self.row.other_scale else head_dim
            for key in ("attn_logit_softcapping", "final_logit_softcapping"):
                config[key] = self.number(key, float) if self.get(key) else None
        return config

    def _experts(self) -> dict[str, int]:
        """Returns the sizes of experts by the config's keys."""
        return {
            "num_experts": self.number("expert_count"),
            "num_experts_per_tok": self.number("expert_used_count"),
            "moe_intermediate_size": self.number("expert_feed_forward_length"),
            "shared_expert_intermediate_size": self.number("expert_shared_feed_forward_length"),
        }

    def _linear(self, kinds: list[str]) -> dict[str, Any]:
        """Returns the kinds of layers and the sizes of linear attention by the config's keys."""
        values = self.number("ssm.time_step_rank")
        return {
            "layer_types": kinds,
            "linear_num_key_heads": self.number("ssm.group_count"),
            "linear_num_value_heads": values,
            "linear_key_head_dim": self.number("ssm.state_size"),
            "linear_value_head_dim": max(1, self.number("ssm.inner_size") // values),
            "linear_conv_kernel_dim": self.number("ssm.conv_kernel"),
        }

    def _scaling(self) -> dict[str, Any]:
        """Returns the keys of the config that say how rotary positions are scaled.

        Llama 3's parameters are in a file as the factors that they make: one scale for all positions.
        """
        kind = self.get("rope.scaling.type")
        original = "rope.scaling.original_context_length"
        every, short, long = ROTARY
        for first, second, limit in ((every, every, "context_length"), (short, long, original)):
            if {first, second} <= self.tensors.keys():
                factors = [self.tensors[name].data.tolist() for name in (first, second)]
                scaling = {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
                return {"rope_scaling": scaling, "original_max_position_embeddings": self.number(limit)}
        if kind in (None, "none", "longrope"):  # the last one without factors: Phi-3's short context
            return {}
        if kind not in ("linear", "yarn"):
            raise ModelError(
                "rotary positions are scaled in an unknown way",
                where=f"{self.path}: rope.scaling.type",
                found=kind,
                allowed="none, linear or yarn",
                fix=REFETCH,
            )
        whole = {"original_max_position_embeddings": self.number(original)} if self.get(original) else {}
        factor = self.number("rope.scaling.factor", float)
        return {"rope_scaling": {"rope_type": kind, "factor": factor, **whole}}
