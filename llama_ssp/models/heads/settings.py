"""What a head's config.json says: its kind, its block, what it reads of the target. No torch.

There are two layouts. `speculators`: `speculators_model_type` is the kind, and `transformer_layer_config`
describes the blocks. Raw: `architectures` names the kind's class, and the sizes stand among the keys.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ssp.errors import ModelError
from llama_ssp.models.folder import (
    INDEX,
    PICKLED,
    REFETCH,
    SINGLE,
    is_gguf,
    read_json,
    require_counts,
    require_whole,
    tensors_of,
)

EAGLE3 = "eagle3"
DFLASH = "dflash"
ASSISTANT = "gemma4_assistant"
ASSISTANTS = (ASSISTANT, "gemma4_unified_assistant")  # by model_type
FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
MAPS = "d2t", "t2d"  # a drafted token's id is its place plus d2t; t2d says which ids there are
ORDER = "masked_embedding.token_ordering"  # an assistant's tokens, group by group
# What an assistant's files may have and its layers do not read: they make no keys, and its tables are one.
UNREAD = re.compile(r"lm_head\.|.*\.self_attn\.(k_proj|v_proj|k_norm)\.")
TAPS = "eagle_aux_hidden_state_layer_ids"
BLOCK_TAPS = "aux_hidden_state_layer_ids"
BLOCKS = "llama", "qwen3"  # kinds of a head's block, by transformers' model_type
MOST_WIDTH = 64  # tokens of a block
PREFIXES = "layers.0", "midlayer"  # of the block's tensors: speculators' and the raw layout's
# Classes of drafters that are no models of their own, in `architectures`.
OTHERS = re.compile(r"eagle|medusa|dflash|dspark|speculator|(?-i:MTP)", re.IGNORECASE)
CLASSES = {EAGLE3: re.compile("eagle-?3", re.IGNORECASE), DFLASH: re.compile(r"dflash(?!\d)", re.IGNORECASE)}
Shapes = dict[str, tuple[int, ...]]
READ = "EAGLE-3 or DFlash, in the speculators layout or the raw one, and Gemma 4's assistants"


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """A head as its folder describes it.

    `block` is what a config.json of a model with its layers would hold; its `vocab_size` is the target's.
    `taps` are the target's blocks whose inputs it reads; None: by the target's number of blocks.
    """

    block: dict[str, Any]
    vocab: int
    taps: tuple[int, ...] | None
    inputs: int  # numbers of a token's hidden states
    embeds: bool  # it has an embedding of its own
    heads: bool  # it has an output matrix of its own

    kind = "an EAGLE-3"  # for the log
    shares_cache = False  # it reads the target's keys and values, and has none of its own

    @property
    def drafts(self) -> int:
        """Returns how many drafts one pass gives; 0: they come one after the other."""
        return 0

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor of the folder is not one of the head's layers."""
        return name in MAPS

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """Returns the taps in a target of `layers` blocks: those of config.json, or EAGLE-3's usual ones."""
        return self.taps or (2, layers // 2, layers - 3)


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(HeadSettings):
    """`prefix` is of its block's tensors."""

    prefix: str
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


@dataclass(frozen=True, kw_only=True)
class DFlashSettings(HeadSettings):
    """A head of one pass: it reads the last token and `width - 1` times `mask_token`.

    `from_anchor`: all of these places give a draft, else all but that of the last token.
    """

    width: int
    mask_token: int
    from_anchor: bool

    kind = "a DFlash"

    @property
    def drafts(self) -> int:
        return self.width if self.from_anchor else self.width - 1


@dataclass(frozen=True, kw_only=True)
class AssistantSettings(HeadSettings):
    """An assistant of a Gemma 4, which reads the last layers' keys and values in the target's cache.

    With `centroids` only tokens of some groups have logits: a group has a centroid, and the `chosen` groups
    whose centroids fit best are taken.
    """

    centroids: int
    chosen: int

    kind = "an assistant's"
    shares_cache = True

    def ignores(self, name: str) -> bool:
        return name == ORDER or bool(UNREAD.match(name))

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """Returns the tap of what the last block gives."""
        return (layers,)


def kind_of(path: Path) -> str | None:
    """Returns the kind of trained head in a folder, by its name there; None for another model."""
    if is_gguf(path):
        return None
    content = read_json(path / "config.json")
    if kind := content.get("speculators_model_type"):
        return str(kind)
    if content.get("model_type") in ASSISTANTS:
        return ASSISTANT
    names = content.get("architectures")
    if not isinstance(names, list):
        return None
    drafters = [str(name) for name in names if OTHERS.search(str(name))]
    if not drafters:
        return None
    return next((kind for kind, words in CLASSES.items() if words.search(drafters[0])), drafters[0])


def head_settings(path: Path) -> HeadSettings:
    """Reads and checks the folder of a head; a ModelError if it is of another kind, or cannot be read."""
    kind = kind_of(path)
    readers = {EAGLE3: _eagle3, DFLASH: _dflash, ASSISTANT: _assistant}
    if kind not in readers:
        raise ModelError(
            "this kind of trained head is not read",
            where=path,
            found=kind,
            allowed=READ,
            fix="use one of these, or a small draft model",
        )
    require_whole(path)
    require_counts(path, content := read_json(path / "config.json"))
    layer = content.get("transformer_layer_config")
    block = dict(layer if isinstance(layer, dict) else content)
    block.pop("quantization_config", None)
    return readers[kind](path, content, block, _shapes(path))


def _eagle3(path: Path, content: dict[str, Any], block: dict[str, Any], shapes: Shapes) -> Eagle3Settings:
    """Reads an EAGLE-3 head; completes `block`. Raises ModelError."""
    block.setdefault("model_type", "llama")
    if block["model_type"] not in BLOCKS or block.get("num_hidden_layers", 1) != 1:
        raise ModelError(
            "the head's block is of another kind",
            where=path,
            found=f"{block.get('num_hidden_layers', 1)} of {block['model_type']}",
            allowed=f"1 of {' or '.join(BLOCKS)}",
            fix="use another head",
        )

    fc_shape = shapes.get("fc.weight", ())
    output_shape = shapes.get("lm_head.weight", ())
    if len(fc_shape) != 2 or len(output_shape) != 2:
        raise ModelError(
            "the head lacks tensors",
            where=path,
            found=f"{len(shapes)} tensors",
            allowed="fc.weight and lm_head.weight, two dimensions each",
            fix=REFETCH,
        )

    flags = {key: content.get(key, False) for key in FLAGS}
    are_flags = all(isinstance(flag, bool) for flag in flags.values())
    if not are_flags or (flags["norm_before_fc"] and flags["fc_norm"]):
        raise ModelError(
            "config.json has flags that contradict each other",
            where=path,
            found=f"norm_before_fc, fc_norm: {flags}",
            allowed="true or false, one of the two",
            fix=REFETCH,
        )

    block.update(num_hidden_layers=1, tie_word_embeddings=False)
    return Eagle3Settings(
        block=block,
        vocab=output_shape[0],
        taps=_taps(path, content),
        inputs=fc_shape[1],
        embeds="embed_tokens.weight" in shapes,
        heads=True,
        prefix=next((name for name in PREFIXES if f"{name}.hidden_norm.weight" in shapes), PREFIXES[0]),
        norm_before_residual=flags["norm_before_residual"],
        norm_before_fc=flags["norm_before_fc"],
        fc_norm=flags["fc_norm"],
        norm_output=flags["norm_output"],
    )


def _dflash(path: Path, content: dict[str, Any], block: dict[str, Any], shapes: Shapes) -> DFlashSettings:
    """Reads a DFlash head; completes `block`. Raises ModelError."""
    fc_shape = shapes.get("fc.weight", ())
    kinds = block.get("layer_types") or []
    slides = not isinstance(kinds, list) or "sliding_attention" in kinds or block.get("use_sliding_window")
    if slides or "layers.0.self_attn.q_norm.weight" not in shapes or len(fc_shape) != 2:
        raise ModelError(
            "the head's blocks are of another kind",
            where=path,
            found=f"{len(shapes)} tensors, {kinds}",
            allowed="fc, and blocks as of Qwen3 without windows",
            fix="use another head",
        )

    # What config.json says at its top counts before what `dflash_config` says.
    said = {key: value for key, value in content.items() if value is not None}
    keys: dict[str, Any] = {**_object(content, "dflash_config"), **said}
    width: Any = keys.get("block_size")
    mask: Any = keys.get("mask_token_id")
    anchor: Any = keys.get("sample_from_anchor")
    vocab: Any = block.get("vocab_size")  # the target's
    is_width = type(width) is int and 2 <= width <= MOST_WIDTH
    is_token = type(mask) is int and type(vocab) is int and 0 <= mask < vocab
    if not (is_width and is_token and anchor in (None, False, True)):
        raise ModelError(
            "config.json describes no usable block",
            where=f"{path}: block_size, mask_token_id, sample_from_anchor",
            found=f"{width}, {mask}, {anchor}",
            allowed=f"2..{MOST_WIDTH}, a token of the target, true or false",
            fix=REFETCH,
        )

    taps = _layers(path, BLOCK_TAPS, _block_taps(keys))
    if taps is None or fc_shape[1] != len(taps) * fc_shape[0]:
        raise ModelError(
            "the head's fc does not fit the layers that it reads",
            where=path,
            found=f"{fc_shape}, layers {taps}",
            allowed="as many inputs as these layers give",
            fix=REFETCH,
        )

    output_shape = shapes.get("lm_head.weight", ())
    has_output = len(output_shape) == 2
    block.update(model_type="qwen3", tie_word_embeddings=False)
    return DFlashSettings(
        block=block,
        vocab=output_shape[0] if has_output else vocab,
        taps=taps,
        inputs=fc_shape[1],
        embeds="embed_tokens.weight" in shapes,
        heads=has_output,
        width=width,
        mask_token=mask,
        from_anchor=bool(anchor),
    )


def _assistant(
    path: Path, content: dict[str, Any], block: dict[str, Any], shapes: Shapes
) -> AssistantSettings:
    """Reads an assistant of a Gemma 4, whose layers all read another model's keys. Raises ModelError."""
    block = dict(_object(content, "text_config"))
    vocab: Any = block.get("vocab_size")
    before = shapes.get("pre_projection.weight", ())
    after = shapes.get("post_projection.weight", ())
    are_matrices = type(vocab) is int and len(before) == 2 and len(after) == 2
    if not are_matrices or before[::-1] != (2 * after[0], after[1]):
        raise ModelError(
            "the assistant lacks tensors",
            where=path,
            found=f"pre_projection {before}, post_projection {after}, a vocabulary of {vocab}",
            allowed="two projections between its width and the target's",
            fix=REFETCH,
        )

    is_ordered = content.get("use_ordered_embeddings", False)
    centroids: Any = content.get("num_centroids", 2048) if is_ordered else 0
    chosen: Any = content.get("centroid_intermediate_top_k", 32) if is_ordered else 0
    are_numbers = type(centroids) is int and type(chosen) is int
    fits = are_numbers and 1 <= chosen <= centroids and vocab % centroids == 0
    if is_ordered not in (False, True) or (is_ordered and not fits):
        raise ModelError(
            "config.json describes no usable groups of tokens",
            where=f"{path}: use_ordered_embeddings, num_centroids, centroid_intermediate_top_k",
            found=f"{is_ordered}, {centroids}, {chosen}",
            allowed=f"true or false, groups of one size of {vocab} tokens, some of them",
            fix=REFETCH,
        )

    # Of its layers only queries are its own: what makes keys is not there, and nothing else is shared.
    block.update(
        model_type="gemma4_text",
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        enable_moe_block=False,
        tie_word_embeddings=True,
    )
    return AssistantSettings(
        block=block,
        vocab=vocab,
        taps=None,
        inputs=after[0],
        embeds=False,
        heads=True,
        centroids=centroids,
        chosen=chosen,
    )


def _block_taps(keys: dict[str, Any]) -> Any:
    """Returns the blocks whose inputs a DFlash head reads, unchecked.

    The raw layout counts outputs: the output of block n is the input of block n + 1.
    """
    taps = keys.get(BLOCK_TAPS)
    outputs = keys.get("target_layer_ids")
    if taps is not None or not isinstance(outputs, list):
        return taps
    return [number + 1 if type(number) is int else number for number in outputs]


def _taps(path: Path, content: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the blocks whose inputs an EAGLE-3 head reads; None where config.json does not say."""
    nested = _object(content, "eagle_config")
    if nested.get("use_aux_hidden_state") is False:
        raise ModelError(
            "the head reads the target's last hidden state alone",
            where=path,
            found="use_aux_hidden_state: false",
            allowed="three named layers (EAGLE-3)",
            fix="use another head",
        )
    return _layers(path, TAPS, content.get(TAPS, nested.get(TAPS)))


def _object(content: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns the object at the key; an empty one if there is none."""
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _layers(path: Path, key: str, numbers: Any) -> tuple[int, ...] | None:
    """Returns the numbers of layers; None for None. Raises ModelError for what are no such numbers."""
    if numbers is None:
        return None
    if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**16 for n in numbers):
        raise ModelError(
            "config.json names no usable layers",
            where=f"{path}: {key}",
            found=numbers,
            allowed="numbers",
            fix=REFETCH,
        )
    return tuple(numbers)


def _shapes(path: Path) -> Shapes:
    """Returns every tensor's shape. Raises ModelError for pickled weights, with the way to convert them."""
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED)
    if pickled and not any((path / name).exists() for name in (SINGLE, INDEX)):
        load = f"torch.load({pickled[0]!r}, map_location='cpu', weights_only=True)"
        save = "save_file({k: v.contiguous() for k, v in w.items()}, 'model.safetensors')"
        code = f"import torch; from safetensors.torch import save_file; w = {load}; {save}"
        raise ModelError(
            "the weights are pickled, which can run code",
            where=path,
            found=", ".join(pickled[:5]),
            allowed="*.safetensors",
            fix=f'convert them there: python -c "{code}"',
        )
    return {name: shape for name, (_, shape) in tensors_of(path).items()}
