"""What a head's config.json says: its kind, its block, what it reads of the target. No torch.

EAGLE-3 has two layouts. `speculators`: `speculators_model_type` is eagle3, and `transformer_layer_config`
describes the block. Raw: `architectures` names an Eagle3 class, and the block's sizes stand among the keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.bounds import require_counts
from llama_ssp.models.folder import (
    INDEX,
    PICKLED,
    REFETCH,
    SINGLE,
    header,
    is_gguf,
    read_json,
    require_whole,
    weight_files,
)

EAGLE3 = "eagle3"
FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
TAPS = "eagle_aux_hidden_state_layer_ids"
BLOCKS = "llama", "qwen3"  # kinds of a head's block, by transformers' model_type
PREFIXES = "layers.0", "midlayer"  # of the block's tensors: speculators' and the raw layout's
# Classes of drafters that are no models of their own, in `architectures`.
OTHERS = re.compile(r"eagle|medusa|dflash|dspark|speculator|(?-i:MTP)", re.IGNORECASE)
READ = "EAGLE-3, in the speculators layout or the raw one"


@dataclass(frozen=True)
class HeadSettings:
    """An EAGLE-3 head as its folder describes it.

    `block` is what a config.json of a model with this one layer would hold; its `vocab_size` is the target's.
    `taps` are the target's blocks whose inputs it reads; None: by the target's number of blocks.
    """

    block: dict[str, Any]
    vocab: int
    taps: tuple[int, ...] | None
    inputs: int  # numbers of a token's hidden states
    prefix: str  # of the block's tensors
    embeds: bool  # it has an embedding of its own
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """The taps in a target of so many blocks."""
        return self.taps or (2, layers // 2, layers - 3)


def kind_of(path: Path) -> str | None:
    """The kind of trained head in a folder, as it is named there; None for a model of its own."""
    if is_gguf(path):
        return None
    content = read_json(path / "config.json")
    if kind := content.get("speculators_model_type"):
        return str(kind)
    names = content.get("architectures")
    named = [str(name) for name in names if OTHERS.search(str(name))] if isinstance(names, list) else []
    return (EAGLE3 if re.search("eagle-?3", named[0], re.IGNORECASE) else named[0]) if named else None


def head_settings(path: Path) -> HeadSettings:
    """Reads and checks the folder of a head; a ModelError if it is of another kind, or cannot be read."""
    kind = kind_of(path)
    if kind != EAGLE3:
        what, fix = "this kind of trained head is not read", "use an EAGLE-3 head, or a small draft model"
        raise ModelError(what, path, kind, READ, fix)
    require_whole(path)
    require_counts(path, content := read_json(path / "config.json"))
    shapes = _shapes(path)
    layer = content.get("transformer_layer_config")
    block = dict(layer) if isinstance(layer, dict) else dict(content)
    block.setdefault("model_type", "llama")
    if block["model_type"] not in BLOCKS or block.get("num_hidden_layers", 1) != 1:
        found = f"{block.get('num_hidden_layers', 1)} of {block['model_type']}"
        what, allowed = "the head's block is of another kind", f"1 of {' or '.join(BLOCKS)}"
        raise ModelError(what, path, found, allowed, "use another head")
    wide = [shapes[name] for name in ("fc.weight", "lm_head.weight") if len(shapes.get(name, ())) == 2]
    if len(wide) < 2:
        what, allowed = "the head lacks tensors", "fc.weight and lm_head.weight, two dimensions each"
        raise ModelError(what, path, f"{len(shapes)} tensors", allowed, REFETCH)
    flags = {key: content.get(key, False) for key in FLAGS}
    if not all(isinstance(flag, bool) for flag in flags.values()) or (flags[FLAGS[1]] and flags[FLAGS[2]]):
        what, allowed = "config.json has flags that contradict each other", "true or false, one of the two"
        raise ModelError(what, path, f"norm_before_fc, fc_norm: {flags}", allowed, REFETCH)
    prefix = next((name for name in PREFIXES if f"{name}.hidden_norm.weight" in shapes), PREFIXES[0])
    (_, inputs), (vocab, _) = wide
    block.update(num_hidden_layers=1, tie_word_embeddings=False)
    block.pop("quantization_config", None)
    return HeadSettings(
        block, vocab, _taps(path, content), inputs, prefix, "embed_tokens.weight" in shapes, **flags
    )


def _taps(path: Path, content: dict[str, Any]) -> tuple[int, ...] | None:
    nested = content.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    found = content.get(TAPS, nested.get(TAPS))
    if nested.get("use_aux_hidden_state") is False:
        what, allowed = "the head reads the target's last hidden state alone", "three named layers (EAGLE-3)"
        raise ModelError(what, path, "use_aux_hidden_state: false", allowed, "use another head")
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < 2**16 for n in found):
        raise ModelError("config.json names no usable layers", f"{path}: {TAPS}", found, "numbers", REFETCH)
    return tuple(found)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor; a ModelError with the way to convert them for pickled weights."""
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED)
    if pickled and not any((path / name).exists() for name in (SINGLE, INDEX)):
        load = f"torch.load({pickled[0]!r}, map_location='cpu', weights_only=True)"
        save = "save_file({k: v.contiguous() for k, v in w.items()}, 'model.safetensors')"
        code = f"import torch; from safetensors.torch import save_file; w = {load}; {save}"
        what, fix = "the weights are pickled, which can run code", f'convert them there: python -c "{code}"'
        raise ModelError(what, path, ", ".join(pickled[:5]), "*.safetensors", fix)
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        found.update(header(file)[0])
    return found
