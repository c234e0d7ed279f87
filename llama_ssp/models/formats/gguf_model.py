"""The model that a GGUF header describes: transformers' config, and its names of tensors. No torch."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from llama_ssp.errors import ModelError
from llama_ssp.models.families import FAMILIES, GGUF_FAMILIES, Family
from llama_ssp.models.folder import REFETCH
from llama_ssp.models.formats.kept import BLOCK

if TYPE_CHECKING:  # its module imports gguf, which a run without such a file does not wait for
    from llama_ssp.models.formats.gguf_header import Header

EMBEDDING, NORM, HEAD = OUTER = ("token_embd", "output_norm", "output")
FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROTARY = (FACTORS, SHORT, LONG)  # tensors that are part of the config
ENDS = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
SIZES = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}  # fmt: skip


class HeaderConfig:
    """What the model's config.json would say; a ModelError where the header contradicts itself."""

    def __init__(self, header: Header) -> None:
        self.metadata, self.tensors, self.path = header.metadata, header.tensors, header.path
        self.architecture = str(header.metadata.get("general.architecture"))
        self.model_type = GGUF_FAMILIES.get(self.architecture, "")
        experts = " with experts" if self.said("expert_count") else ""
        if not self.model_type or experts:
            what, allowed = "the architecture of the GGUF file cannot be loaded", ", ".join(GGUF_FAMILIES)
            fix = "use the model's folder with safetensors"
            raise ModelError(what, self.path, f"{self.architecture}{experts}", allowed, fix)
        self.family = FAMILIES[self.model_type]

    def config(self) -> dict[str, Any]:
        row, sizes = self.family.gguf, {key: self.value(name, int) for key, name in SIZES.items()}
        assert row is not None
        dim, layers, _, heads, _ = sizes.values()
        head_dim = self.value("attention.key_length", int, max(1, dim // heads))
        window = "attention.sliding_window"
        config: dict[str, Any] = sizes | {
            "model_type": self.model_type,
            "num_key_value_heads": self.value("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "rms_norm_eps": self.value("attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": f"{HEAD}.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "rope_theta": self.value("rope.freq_base", float, 10_000.0),
            "partial_rotary_factor": self.value("rope.dimension_count", int, head_dim, head_dim) / head_dim,
            "sliding_window": self.value(window, int) if self.said(window) else None,
            # text/gguf_tokenizer.py reads them, and transformers' own may lie beyond the vocabulary.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        config["vocab_size"] = self.require_tensors(config)
        if scaling := self.scaling(config):
            config["rope_scaling"] = scaling
        if row.every:
            kinds = [(layer + 1) % row.every == 0 for layer in range(layers)]
            config["layer_types"] = ["full_attention" if whole else "sliding_attention" for whole in kinds]
            config["query_pre_attn_scalar"] = dim // heads if layers == row.other_scale else head_dim
            for key in ("attn_logit_softcapping", "final_logit_softcapping"):
                config[key] = self.value(key, float) if self.said(key) is not None else None
        return config

    def require_tensors(self, config: dict[str, Any]) -> int:
        """Refuses tensors and tokens that contradict the sizes; returns the embedding's number of rows."""
        dim, head, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
        queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        table = self.tensors.get(f"{EMBEDDING}.weight")
        rows = table.shape[0] if table else 0
        shapes = {
            EMBEDDING: (rows, dim), HEAD: (rows, dim), "attn_q": (queries, dim), "attn_k": (keys, dim),
            "attn_v": (keys, dim), "attn_qkv": (queries + 2 * keys, dim), "attn_output": (dim, queries),
            "ffn_gate": (ffn, dim), "ffn_up": ((1 + self.family.fused_mlp) * ffn, dim),
            "ffn_down": (dim, ffn), "attn_q_norm": (head,), "attn_k_norm": (head,),
        }  # fmt: skip
        for leaf in leaves(self.family):
            shape, layers = shapes.get(leaf, (dim,)), range(config["num_hidden_layers"])
            for name in (leaf,) if leaf in OUTER else (f"blk.{layer}.{leaf}" for layer in layers):
                tensor = self.tensors.get(f"{name}.weight")
                if tensor.shape != shape if tensor else leaf != HEAD:
                    what, where = "a tensor contradicts the header's sizes", f"{self.path}: {name}.weight"
                    raise ModelError(what, where, tensor.shape if tensor else "none", shape, REFETCH)
        numbers = [int(block[1]) for name in self.tensors if (block := BLOCK.fullmatch(name))]
        if max(numbers) + 1 != config["num_hidden_layers"]:
            what, count = "the header's number of blocks is not that of its tensors", max(numbers) + 1
            raise ModelError(what, self.path, count, config["num_hidden_layers"], REFETCH)
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        count = len(tokens) if isinstance(tokens, list) else rows
        ends = {key: self.metadata[key] for key in ENDS if key in self.metadata}
        if count > rows or any(end not in range(count) for end in ends.values()):
            what, found = "the header's tokens are not those of the model", f"{count} tokens, {ends}"
            raise ModelError(what, self.path, found, f"at most {rows}, and end tokens among them", REFETCH)
        return rows

    def scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """Returns how rotary positions are scaled; sets the key of transformers that belongs to it.

        Llama 3's parameters are in a file as the factors that they make: one scale for all positions.
        """
        kind, original = self.said("rope.scaling.type"), "rope.scaling.original_context_length"
        names = (FACTORS, FACTORS) if FACTORS in self.tensors else (SHORT, LONG)
        if self.tensors.keys() >= set(names):
            whole = config["max_position_embeddings"] if FACTORS in names else self.value(original, int)
            config["original_max_position_embeddings"] = whole
            count = int(config["head_dim"] * config["partial_rotary_factor"]) // 2
            short, long = (self.factors(name, count) for name in names)
            return {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if kind in (None, "none", "longrope"):  # the last one without factors: Phi-3's short context
            return None
        if kind not in ("linear", "yarn"):
            what, where = "rotary positions are scaled in an unknown way", f"{self.path}: rope.scaling.type"
            raise ModelError(what, where, kind, "none, linear or yarn", REFETCH)
        scaling = {"rope_type": kind, "factor": self.value("rope.scaling.factor", float)}
        if self.said(original):
            scaling["original_max_position_embeddings"] = self.value(original, int)
        return scaling

    def factors(self, name: str, count: int) -> list[float]:
        import numpy as np

        tensor = self.tensors[name]
        factors: list[float] = np.fromfile(tensor.file, "<f4", count, offset=tensor.start).tolist()
        if tensor[1:3] != ("F32", (count,)) or not all(0 < factor < math.inf for factor in factors):
            what, where = "the file's scale of rotary positions cannot be used", f"{self.path}: {name}"
            raise ModelError(what, where, f"{tensor.format} {factors}", f"{count} positive numbers", REFETCH)
        return factors

    def said(self, name: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}")

    def value(self, name: str, kind: type, default: float | None = None, max_value: int = 2**31 - 1) -> Any:
        """Returns a positive number of this type; the default where the header has none."""
        value: Any = default if self.said(name) is None else self.said(name)
        is_kind = type(value) is kind
        if not is_kind or not 0 < value <= max_value:
            what, where = "the header has no usable value", f"{self.path}: {self.architecture}.{name}"
            raise ModelError(what, where, str(value), f"{kind.__name__}, above 0, to {max_value}", REFETCH)
        return value


def name_of(model_type: str, name: str) -> str:
    """Returns transformers' name of a tensor of the file; the file's where the model has no such tensor."""
    family, (path, _, kind) = FAMILIES[model_type], name.rpartition(".")
    block = BLOCK.fullmatch(path)
    leaf = leaves(family).get(block[2] if block else path)
    before = f"{family.names.blocks}.{block[1]}." if block else ""
    return f"{before}{leaf}.{kind}" if leaf else name


@cache
def leaves(family: Family) -> dict[str, str]:
    """Returns transformers' names of layers by the file's; in a block what follows its number."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    assert family.gguf is not None
    (number,) = (n for n, name in MODEL_ARCH_NAMES.items() if name == family.gguf.architecture)
    table, result = get_tensor_name_map(number, 1), {}
    for names in vars(family.names).values():
        for name in (names,) if isinstance(names, str) else names:
            if theirs := table.get_name(name) or table.get_name(f"{family.names.blocks}.0.{name}"):
                result[theirs.removeprefix("blk.0.")] = name
    return result
