"""Small GGUF files, made by the gguf library's own writer and quantisers, from transformers' modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.gguf import gguf_tokenizer_mapping

gguf = pytest.importorskip("gguf")
reads_tokenizers = pytest.mark.skipif(
    not hasattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS"),
    reason="transformers makes the tokenizer of a GGUF file from 5.18 on",
)

VOCAB, CONTEXT = 300, 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": CONTEXT,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
WRITTEN = {"gemma3_text": "gemma3", "mistral": "llama"}  # the file's names of architectures
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # the library reads these, and writes none


def number(kind: str) -> Any:
    return gguf.GGMLQuantizationType[kind]


def random_blocks(kind: str, rows: int, inputs: int, seed: int) -> np.ndarray:
    """A matrix in a format that the library does not write: random codes, with scales of usual size.

    Their mean is about 0, as of a trained model. Otherwise all outputs have a large common part, and where
    that cancels, errors of rounding become large.
    """
    numbers, size = gguf.GGML_QUANT_SIZES[number(kind)]
    rng = np.random.default_rng([seed, rows, inputs])
    blocks = rng.integers(0, 256, (rows * inputs // numbers, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    step = {"Q2_K": 0.002, "Q3_K": 0.0006, "Q4_K": 0.0001, "Q5_K": 0.00005, "Q6_K": 0.00003}[kind]
    middle = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(kind, 0.0)  # of the codes; the second scale's part
    for place, times in zip(places, (1.0, middle), strict=False):
        scale = rng.uniform(times * step / 2, times * step, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def stored(weight: Tensor, kind: str) -> np.ndarray:
    """The matrix in this format, as the library writes it."""
    if kind in K_QUANTS:
        return random_blocks(kind, *weight.shape, seed=int(weight[0, 0].view(torch.int32)) & 0xFFFF)
    return gguf.quantize(weight.float().numpy(), number(kind))


def turned(weight: Tensor, *sizes: int) -> Tensor:
    """Rows of each head in another order: (2, n) interleaves halves, as Llama's files; (n, 2) undoes it."""
    return weight.unflatten(0, (-1, *sizes)).transpose(1, 2).reshape(weight.shape)


def write(
    path: Path, module: Any, kinds: dict[str, str], metadata: Any = None, split: int = 0, **changes: Any
) -> Path:
    """Writes the module, and gives it the weights that the library reads from the file.

    `kinds` has the formats of matrices by the ends of their names in the file; "" is that of the others.
    `metadata` may add to the writer; `split`: how many tensors a file has at most; `changes` are keys of the
    architecture, or None to leave one out.
    """
    config = module.config
    architecture = WRITTEN.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "rope.dimension_count": head_dim,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": 10000.0, "vocab_size": config.vocab_size, **changes,
    }  # fmt: skip
    for key, value in sizes.items():
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    if metadata:
        metadata(writer)
    kind_of_model = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind_of_model, config.num_hidden_layers)
    for name, weight in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        turns = architecture == "llama" and (".attn_q." in theirs or ".attn_k." in theirs)
        plus = int(architecture.startswith("gemma") and name.endswith("norm.weight"))
        content = turned(weight, 2, head_dim // 2) if turns else weight + plus
        ends = sorted((end for end in kinds if theirs.removesuffix(".weight").endswith(end)), key=len)
        kind = "F32" if content.dim() == 1 else kinds[ends[-1]]
        raw = stored(content, kind)
        writer.add_tensor(theirs, raw, raw_dtype=number(kind))
        known = torch.from_numpy(np.array(gguf.dequantize(raw, number(kind)), np.float32)) - plus
        weight.copy_(turned(known, head_dim // 2, 2) if turns else known)
    finish(writer)
    return path


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
