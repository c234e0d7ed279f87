"""The model that a GGUF header describes: transformers' config, and its names of tensors. No torch."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import fields
from functools import cache
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.families import FAMILIES, Family, Gguf
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.formats.gguf_header import ARCHITECTURE, KEPT, Header
from llama_ssp.models.formats.kept import PLAIN, sizes

# Of `general.architecture`: transformers' model_type.
ARCHITECTURES = {row.gguf.architecture: name for name, row in FAMILIES.items() if row.gguf}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
ROTARY = (FACTORS, SHORT_FACTORS, LONG_FACTORS)  # tensors that are part of the config
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
LEAVES: dict[str, str | tuple[str, ...]] = {  # by the fields of families.Names
    "embedding": "token_embd", "norm": "output_norm", "head": "output", "before_attention": "attn_norm",
    "after_attention": "post_attention_norm", "before_mlp": "ffn_norm", "after_mlp": "post_ffw_norm",
    "qkv": ("attn_q", "attn_k", "attn_v"), "qk_norm": ("attn_q_norm", "attn_k_norm"),
    "output": "attn_output", "up": ("ffn_gate", "ffn_up"), "down": "ffn_down",
}  # fmt: skip
FUSED_LEAVES = {"qkv": ("attn_qkv",), "up": ("ffn_up",)}  # where a family has one tensor for all
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def row_of(header: Header) -> Gguf | None:
    """What is known of its architecture's files."""
    named = ARCHITECTURES.get(str(header.metadata.get(ARCHITECTURE)))
    return FAMILIES[named].gguf if named else None


def config_of(header: Header) -> dict[str, Any]:
    """What the model's config.json would say; a ModelError if the header has no usable size of a kind."""
    return _HeaderConfig(header).config()


class _HeaderConfig:
    def __init__(self, header: Header) -> None:
        self.header, self.path = header, header.path
        self.architecture = str(header.metadata.get(ARCHITECTURE))
        row = row_of(header)
        if row is None or self.optional("expert_count"):
            what = "the architecture of the GGUF file cannot be loaded"
            found = f"{self.architecture}{' with experts' if row else ''}"
            fix = "use the model's folder with safetensors"
            raise ModelError(what, self.path, found, ", ".join(ARCHITECTURES), fix)
        self.row = row
        self.family = FAMILIES[ARCHITECTURES[self.architecture]]

    def config(self) -> dict[str, Any]:
        dim, heads = self.whole("embedding_length"), self.whole("attention.head_count")
        tensors, architecture = self.header.tensors, self.architecture
        if EMBEDDING not in tensors:
            fix = "use a file with weights"
            raise ModelError(f"the file has no {EMBEDDING}", self.path, f"{len(tensors)} tensors", fix=fix)
        head_dim = self.whole("attention.key_length", self._usual_head(dim, heads))
        if head_dim % 2:
            raise self.wrong("attention.key_length", head_dim, "an even number")
        layers = self.whole("block_count")
        if layers > len(tensors):  # lists of this length are made
            raise self.wrong("block_count", layers, f"fewer than the {len(tensors)} tensors")
        found: dict[str, Any] = {
            "model_type": ARCHITECTURES[architecture],
            "hidden_size": dim,
            "num_hidden_layers": layers,
            "intermediate_size": self.whole("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.whole("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.whole("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "vocab_size": tensors[EMBEDDING].shape[0],
            "tie_word_embeddings": HEAD not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "rope_theta": self.number("rope.freq_base", 10_000.0),
            "partial_rotary_factor": self.whole("rope.dimension_count", head_dim) / head_dim,
            "sliding_window": self._window(),
            "bos_token_id": None,  # text/gguf_tokenizer.py reads them
            "eos_token_id": None,
            "pad_token_id": None,  # transformers' own may lie beyond the vocabulary
        }
        if scaling := self._scaling(found):
            found["rope_scaling"] = scaling
        if self.row.every:
            whole = [(layer + 1) % self.row.every == 0 for layer in range(layers)]
            found["layer_types"] = ["full_attention" if each else "sliding_attention" for each in whole]
            other = layers == self.row.other_scale
            found["query_pre_attn_scalar"] = dim // heads if other else head_dim
            for key in ("attn_logit_softcapping", "final_logit_softcapping"):
                found[key] = self.number(key) if self.optional(key) is not None else None
        return found

    def _window(self) -> int | None:
        key = "attention.sliding_window"
        return self.whole(key) if self.optional(key) else None

    def _usual_head(self, dim: int, heads: int) -> int:
        usual = max(1, dim // heads)
        return self.whole("rope.dimension_count", usual) if self.row.rotary_size else usual

    def _scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """How rotary positions are scaled; sets the keys of transformers that belong to it."""
        tensors, kind = self.header.tensors, self.optional("rope.scaling.type")
        if FACTORS in tensors:
            return self._llama_3(config)
        if LONG_FACTORS in tensors and SHORT_FACTORS in tensors:
            config["original_max_position_embeddings"] = self.whole("rope.scaling.original_context_length")
            short, long = self._factors(SHORT_FACTORS), self._factors(LONG_FACTORS)
            return {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if kind in (None, "none") or (kind == "longrope" and self.family.rereads):
            return None
        if kind not in ("linear", "yarn"):
            raise self.wrong("rope.scaling.type", kind, "none, linear or yarn")
        found: dict[str, Any] = {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            positions = self.whole("rope.scaling.original_context_length")
            found["original_max_position_embeddings"] = positions
        return found

    def _llama_3(self, config: dict[str, Any]) -> dict[str, Any]:
        """Llama 3's parameters, of which the file has what they make of each frequency."""
        found = self._factors(FACTORS)
        most, size = max(found, default=1.0), config["head_dim"]
        low, high, positions = LLAMA_3.values()
        expected = []
        for i in range(size // 2):
            wavelength = 2 * math.pi * config["rope_theta"] ** (2 * i / size)
            turns = positions / wavelength  # in the original context
            part = min(1.0, max(0.0, (turns - low) / (high - low)))
            expected.append(1 / ((1 - part) / most + part))
        same = len(found) == len(expected)
        if not same or any(abs(a / b - 1) > 1e-3 for a, b in zip(found, expected, strict=True)):
            fix = "use the model's folder with safetensors"
            what, allowed = "the file's rotary positions are scaled in an unknown way", "as those of Llama 3"
            raise ModelError(what, f"{self.path}: {FACTORS}", f"{len(found)} factors", allowed, fix)
        return {"rope_type": "llama3", "factor": most, **LLAMA_3}

    def _factors(self, name: str) -> list[float]:
        tensor = self.header.tensors[name]
        if tensor.format != "F32" or tensor.n_bytes > 2**16:
            raise ModelError("a tensor cannot be read", f"{self.path}: {name}", tensor.format, "F32", REFETCH)
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.start)
            found = array("f", stream.read(tensor.n_bytes)).tolist()
        if not all(math.isfinite(factor) and factor > 0 for factor in found):
            raise ModelError("a factor is not a positive number", f"{self.path}: {name}", fix=REFETCH)
        return found

    def optional(self, name: str) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{name}")

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.optional(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 2**31:
            raise self.wrong(name, value, "a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.optional(name)
        value = default if value is None else value
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(name, value, "a positive number")
        return value

    def wrong(self, name: str, found: object, allowed: str) -> ModelError:
        found = f"a list of {len(found)}" if isinstance(found, array | list) else found
        found = "nothing" if found is None else found
        where = f"{self.path}: {self.architecture}.{name}"
        return ModelError("the header has no usable value", where, found, allowed, REFETCH)


def codes_of(header: Header) -> dict[str, Any]:
    """What a packed model keeps, by the names of ModelConf."""
    found = {}
    for name, tensor in header.tensors.items():
        match = BLOCK.fullmatch(name.removesuffix(".weight"))
        if match and len(tensor.shape) == 2:
            found[int(match[1]), match[2]] = KEPT.get(tensor.format, PLAIN)
    return sizes(found)


def name_of(model_type: str, name: str) -> str:
    """transformers' name of a tensor of the file; the file's own where the model has no such tensor."""
    family = FAMILIES[model_type]
    path, _, kind = name.rpartition(".")
    if match := BLOCK.fullmatch(path):
        own = leaves(family).get(match[2])
        return f"{family.names.blocks}.{match[1]}.{own}.{kind}" if own else name
    own = leaves(family).get(path)
    return f"{own}.{kind}" if own else name


@cache
def leaves(family: Family) -> dict[str, str]:
    """transformers' names of layers by the file's."""
    found: dict[str, str] = {}
    for field in fields(family.names):
        own, theirs = getattr(family.names, field.name), LEAVES.get(field.name)
        if isinstance(own, tuple) and isinstance(theirs, tuple):
            theirs = theirs if len(own) == len(theirs) else FUSED_LEAVES.get(field.name, ())
            found |= zip(theirs, own, strict=False)
        elif own and isinstance(theirs, str):
            found[theirs] = own
    return found
