"""The corpus: hostile and damaged model folders by what is wrong with them, and what must be said of each.

A row that may run (code 0) brings something that is never touched: it must be as if it were not there.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from tests import checkpoints
from tests.checkpoints import INDEX
from tests.hostile import quantised as quantised_folders
from tests.hostile.damage import (
    OUTSIDE,
    WEIGHTS,
    Damage,
    as_json,
    both,
    bytes_of,
    code,
    config_sets,
    gguf,
    gguf_bytes,
    header,
    linked_outside,
    linked_to,
    many_tensors,
    maps_to,
    nothing,
    pickled,
    pipe,
    removed,
    renamed,
    replaced,
    reworked,
    sets,
    sparse,
    templated,
    tokenizer_says,
    torch_pickled,
    with_tokenizer,
)

CONFIG, FILES, LOADED = "config", "files", "loaded"
"""How far a case may come: no torch is needed, no weights are read, weights are read."""

CHAT = ("task.chat=true",)
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@dataclass(frozen=True)
class Hostile:
    """One folder: `row` is that of the table of bad inputs in the reliability research, 0 if it lacks it."""

    row: int
    name: str
    damage: Damage
    says: tuple[str, ...]
    reach: str = CONFIG
    sharded: bool = False
    code: int = 4
    extra: tuple[str, ...] = ()
    answers: bool = False  # what was written before it showed is given out
    modules: tuple[str, ...] = ()  # what transformers' modules refuse it with; the decoder does not read it

    def __str__(self) -> str:
        return f"{self.row}-{self.name}"


def hostile(
    row: int, name: str, damage: Damage, *says: str, reach: str = CONFIG, sharded: bool = False, code: int = 4,
    extra: tuple[str, ...] = (), answers: bool = False,
) -> Hostile:  # fmt: skip
    return Hostile(row, name, damage, says, reach, sharded, code, extra, answers)


def harmless(
    row: int, name: str, damage: Damage, extra: tuple[str, ...] = (), modules: tuple[str, ...] = ()
) -> Hostile:
    """What is never touched, but perhaps by transformers' modules."""
    return Hostile(row, name, damage, (), LOADED, code=0, extra=extra, modules=modules)


def pattern(regex: str) -> Damage:
    """A tokenizer that cuts text by this pattern first."""
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return sets("tokenizer.json", pre_tokenizer=cut)


def overlapping(content: dict) -> None:
    """Two tensors in the same bytes, as many bytes left over."""
    names = sorted((n for n in content if n != "__metadata__"), key=lambda n: content[n]["data_offsets"])
    one, other = next(
        (a, b) for a in names for b in names if a < b and content[a]["shape"] == content[b]["shape"]
    )
    content[other]["data_offsets"] = content[one]["data_offsets"]


def tokenizer_outside(path: Path) -> None:
    """tokenizer_config.json names a file that lies elsewhere."""
    (path.parent / OUTSIDE).mkdir()
    (path.parent / OUTSIDE / "tokenizer.4.0.json").write_text((path / "tokenizer.json").read_text())
    tokenizer_says(fast_tokenizer_files=["../outside/tokenizer.4.0.json"])(path)


def shard_of_pickles(path: Path) -> None:
    """The index says that a shard is a pickled file."""
    shard = "model-00002-of-00005.safetensors"
    (path / shard).unlink()
    torch_pickled("pytorch_model.bin")(path)
    (path / INDEX).write_text((path / INDEX).read_text().replace(shard, "pytorch_model.bin"))


PICKLES = [
    hostile(25, "bin", renamed(WEIGHTS, "pytorch_model.bin"), "pickled", "pytorch_model", "save_pretrained"),
    hostile(25, "armed-pkl", both(removed(WEIGHTS), pickled("model.pkl")), "pickled", "model.pkl"),
    hostile(25, "named-safetensors", pickled(WEIGHTS), "damaged or cut short"),
    hostile(25, "shard-is-bin", shard_of_pickles, "of another kind", "pytorch_model.bin", sharded=True),
    harmless(25, "armed-beside", both(torch_pickled("pytorch_model.bin"), torch_pickled("training_args.bin"))),
]  # fmt: skip

POINTERS = [
    hostile(19, "lfs-pointer", replaced(WEIGHTS, POINTER), "git lfs pull"),
    hostile(
        19, "lfs-config", replaced("config.json", POINTER), "config.json is a Git LFS pointer", "git lfs"
    ),
]

SAFETENSORS = [
    hostile(19, "truncated", bytes_of(lambda b: b[:-7]), "damaged or cut short", "not fully covered"),
    hostile(20, "sparse-header", sparse(WEIGHTS, struct.pack("<Q", 2**31), 2**33), "damaged", "2147483648"),
    hostile(20, "million-tensors", many_tensors(1_000_000), "damaged"),
    hostile(20, "overlapping", header(overlapping), "invalid offset for tensor"),
    hostile(20, "no-metadata", header(lambda h: h.pop("__metadata__")), code=0, reach=LOADED),
    hostile(
        20, "name-with-escapes",
        reworked(lambda t: t.update({"\x1b[2J\nerror: all is well" + "x" * 10**5: torch.ones(1)})),
        "a tensor by the name of",
    ),
]  # fmt: skip

NAMES = [
    hostile(18, "missing-shard", removed("model-00002-of-00005.safetensors"),
            "a shard is missing", "model-00002-of-00005", INDEX, sharded=True),
    hostile(18, "no-weights", removed(WEIGHTS), "holds no weights", "model.safetensors"),
    hostile(18, "no-config", removed("config.json"), "there is no config.json"),
    hostile(24, "escapes", maps_to("\x1b[2J\nerror: all is well"), "a shard's name", sharded=True),
    hostile(21, "no-map", replaced(INDEX, "{}"), "no weight_map", sharded=True),
]  # fmt: skip

LINKS = [
    hostile(24, "link", linked_outside(WEIGHTS), "leaves the folder", "outside"),
    hostile(24, "link-tokenizer", linked_outside("tokenizer.json"), "leaves the folder", "tokenizer.json"),
    hostile(24, "link-loop", linked_to(WEIGHTS, WEIGHTS), WEIGHTS),
    hostile(24, "link-environ", linked_to("tokenizer_config.json", "/proc/self/environ"), "tokenizer_config"),
    hostile(24, "link-random", linked_to("config.json", "/dev/urandom"), "not a regular file"),
    hostile(24, "pipe", pipe(WEIGHTS), "not a regular file", WEIGHTS),
    hostile(24, "template-folder-pipe", pipe("additional_chat_templates/a.jinja"), "not a regular file"),
]  # fmt: skip

CODE = [
    hostile(26, "auto-map", both(code("evil.py"), config_sets(auto_map={"AutoConfig": "evil.C"})),
            "code of its own", "auto_map"),
    hostile(26, "generates", both(code("custom_generate/generate.py"), config_sets(custom_generate="a/b")),
            "code of its own", "custom_generate"),
    hostile(26, "tokenizer-auto-map",
            both(code("e.py"), with_tokenizer(checkpoints.tokenizer, auto_map={"AutoTokenizer": ["e.C", "e.C"]})),
            "code of its own", "tokenizer_config.json"),
    hostile(26, "kernel", config_sets(attn_implementation="evil/kernel"), "code of its own", "evil/kernel"),
    hostile(26, "adapter", replaced("adapter_config.json", as_json({"base_model_name_or_path": "../outside"})),
            "adapter"),
    hostile(16, "backtracks", pattern("(x+x+)+y"), "the tokenizer fails on a text", "retry-limit", reach=FILES,
            code=3, extra=(f'task.prompts=["{"x" * 60}"]',)),
    hostile(27, "unknown", config_sets(model_type="nonesuch"), "nonesuch", "llama", reach=FILES),
    hostile(26, "dtype-is-code", config_sets(dtype="load"), "config.json cannot be read", reach=FILES),
    hostile(26, "tokenizer-class", tokenizer_says(tokenizer_class="os.system"), code=0, reach=LOADED),
    harmless(26, "modules-beside", both(code("modeling_llama.py"), code("__init__.py"), code("torch.py"))),
    harmless(26, "other-home", config_sets(_name_or_path="../outside")),
]  # fmt: skip


def chat_template(name: str, content: object, *says: str) -> Hostile:
    """A template that is refused when it is applied."""
    damage = templated(content)  # type: ignore[arg-type]
    return hostile(17, name, damage, "chat template", *says, reach=FILES, code=3, extra=CHAT)


TEMPLATES = [
    hostile(17, "no-chat-template", nothing, "no chat template", reach=FILES, code=3, extra=CHAT),
    chat_template("broken-chat-template", "{{ raise_exception('no') }}", "no"),
    chat_template("escape-by-format", "{{ '{0.__class__.__mro__}'.format(messages) }}"),
    chat_template("escape-by-globals", "{{ cycler.__init__.__globals__.os.mkdir('executed') }}"),
    chat_template("include", "{% include '/etc/passwd' %}"),
]  # fmt: skip

VALUES = [
    hostile(23, "nan", reworked(lambda t: t[NORM].fill_(torch.nan)), "not numbers", reach=LOADED, answers=True),
]  # fmt: skip

TENSORS = [
    hostile(21, "missing-tensor", reworked(lambda t: t.pop(NORM)), "missing keys", NORM, reach=LOADED),
    hostile(21, "unexpected", reworked(lambda t: t.update({"other.weight": torch.zeros(2)})), "unexpected keys",
            "other.weight", reach=LOADED),
    hostile(22, "vocabulary", config_sets(vocab_size=299), "embed_tokens", "mismatched keys", reach=LOADED),
    hostile(22, "shape", reworked(lambda t: t.update({NORM: torch.ones(32)})), "mismatched keys", NORM,
            reach=LOADED),
    hostile(22, "fewer-layers", config_sets(num_hidden_layers=1), "unexpected keys", "layers.1.", reach=LOADED),
]  # fmt: skip


def misread(
    name: str, key: str, value: object, said: str, how: str = "config.json cannot be read", reach: str = FILES
) -> Hostile:
    """A value of config.json that transformers refuses, in its words."""
    says = how, said
    return hostile(22, name, config_sets(**{key: value}), *says, reach=reach)


BY_BITSANDBYTES = {"quant_method": "bitsandbytes"}
NUMBERS = [
    hostile(22, "text-size", config_sets(num_key_value_heads="two"), "num_key_value_heads", "'two'"),
    hostile(22, "negative-size", config_sets(num_hidden_layers=-2), "num_hidden_layers", "-2"),
    hostile(22, "head-groups", config_sets(num_key_value_heads=3), "KV heads", "4 and 3"),
    hostile(22, "endless-layers", config_sets(num_hidden_layers=2**31 - 1), "number of layers", "2147483647"),
    hostile(22, "endless-width", config_sets(hidden_size=2**31), "hidden_size", "2147483648"),
    hostile(22, "endless-ffn", config_sets(intermediate_size=2**31 - 1), "do not fit", code=5, reach=FILES),
    hostile(22, "no-context", config_sets(max_position_embeddings=0), "max_position_embeddings"),
    misread("epsilon-text", "rms_norm_eps", "x", "'rms_norm_eps' expected float, got str (value: 'x')"),
    misread("rope-lacks", "rope_parameters", {"rope_type": "llama3"}, "Missing required keys in `rope_parameters`"),
    misread("odd-head", "head_dim", 15, "`head_dim`=15"),
    misread("rope-kind", "rope_scaling", {"rope_type": "evil", "factor": 2}, "KeyError: 'evil'", "cannot be loaded", LOADED),
    harmless(22, "plan-number", config_sets(base_model_tp_plan=5), modules=("cannot be loaded", "correct config.json")),
    harmless(22, "returns", config_sets(return_dict=False, output_hidden_states=True, output_attentions=True)),
    hostile(22, "plain-4bit", config_sets(quantization_config={**BY_BITSANDBYTES, "load_in_4bit": True}),
            "bitsandbytes", "config.json: quantization_config", "plain", "nf4"),
    hostile(22, "window", config_sets(sliding_window=-1, model_type="mistral"), "sliding_window", "-1"),
    hostile(22, "not-json", replaced("config.json", "{"), "config.json is not JSON"),
    hostile(22, "deep-config", replaced("config.json", "[" * 10**5), "config.json is not JSON"),
    hostile(22, "huge-config", sparse("config.json", b"{", 2**33), "too large"),
    hostile(22, "preset", nothing, "the checkpoint is not a", "n_layers", extra=("model.n_layers=7",)),
]  # fmt: skip


IS = quantised_folders
QUANTISED = [
    hostile(22, "sound-int4", IS.quantised(IS.int4, IS.INT4), code=0, reach=LOADED),
    *(hostile(22, name, IS.quantised(IS.gptq, claim), "cannot be read", "quantization_config", found, "GGUF")
      for name, claim, found in (
        ("gptq-3-bit", {**IS.GPTQ, "bits": 3}, "3 bits"),
        ("rotated", {**IS.INT4, "transform_config": {"config_groups": {"u": {}}}}, "transforms"),
    )),
    hostile(22, "bias-beyond", both(
        IS.quantised(IS.gptq, IS.GPTQ), reworked(lambda t: t.update({f"{IS.UP}.bias": torch.ones(96)}))),
        "unexpected keys", f"{IS.UP}.bias", reach=LOADED),
    hostile(22, "group-zero", IS.quantised(IS.gptq, {**IS.GPTQ, "group_size": 0}),
            "cannot be read", "group_size 0", "quantization_config"),
    *(hostile(22, name, IS.broken(write, claim, end, tensor), "of a quantised matrix", found, reach=LOADED)
      for name, write, claim, end, tensor, found in (
        ("scales-rows", IS.gptq, IS.GPTQ, ".scales", torch.rand(3, 96).half(), "(2, 96)"),
        ("zeros-missing", IS.awq, IS.AWQ, ".qzeros", None, "not complete"),
        ("group-beyond", IS.gptq, IS.GPTQ, ".g_idx", torch.full((64,), 9).int(), "0..1"),
        ("codes-plain", IS.fp8, IS.FP8, ".weight", torch.rand(96, 64), "F32"),
        ("blocks-shape", IS.fp8, IS.FP8, ".weight_scale_inv", torch.rand(2, 2), "(3, 2)"),
        ("scale-odd", IS.int4, IS.INT4, ".weight_scale", torch.rand(96, 3).half(), "divide 64"),
        ("shape-lies", IS.int4, IS.INT4, ".weight_shape", torch.tensor([2**40, 2**40]), "4 or 8 bits"),
        ("table", IS.nf4, IS.NF4, ".weight.quant_map", torch.rand(16), "nf4"),
        ("state", IS.nf4, IS.NF4, ".weight.quant_state.bitsandbytes__nf4", IS.text([1]), "list indices"),
        ("state-shape", IS.nf4, IS.NF4, ".weight.quant_state.bitsandbytes__nf4",
         IS.text({"shape": [2**40, 2**40], "blocksize": 32}), "U8"),
        ("bytes-order", IS.int8, IS.INT8, ".weight_format", torch.tensor(2, dtype=torch.uint8), "row after row"),
    )),
    hostile(22, "bits-text", IS.quantised(IS.int4, IS.weights_say(num_bits="4")), "num_bits", "quantization_config"),
    hostile(22, "nested-block", IS.nested(nested_blocksize=0), "of a quantised matrix", "nested_absmax; found (1,)", reach=LOADED),
    hostile(22, "nan-scales", IS.broken(IS.int4, IS.INT4, ".weight_scale", torch.full((96, 2), torch.nan).half()),
            "not numbers", reach=LOADED, answers=True),
    hostile(22, "codes-and-numbers", both(
        IS.quantised(IS.gptq, IS.GPTQ), reworked(lambda t: t.update({f"{IS.UP}.weight": torch.rand(96, 64)}))),
        "of a quantised matrix", ".weight and .qweight", reach=LOADED),
    hostile(22, "without-a-claim", both(IS.quantised(IS.awq, {}), config_sets(quantization_config=None)),
            "quantised, but config.json does not say how", ".qweight", "quantization_config"),
    hostile(22, "other-format", IS.quantised(IS.awq, {"quant_method": "hqq"}), "cannot be read", "found hqq",
            "config.json: quantization_config", "gptq (4 and 8 bit)", "plain weights and dtype=int8 or nf4"),
]  # fmt: skip
NOT_BY_DEEPSPEED = [row for row in QUANTISED if row.reach == LOADED]  # it refuses their weights


def projected(path: Path) -> None:
    """As opt-350m: embeddings narrower than the layers."""
    config_sets(model_type="opt", word_embed_proj_dim=32)(path)
    reworked(lambda t: t.update({EMBEDDING: t[EMBEDDING][:, :32].contiguous()}))(path)


ARCHITECTURES = [
    hostile(27, "bloom", replaced("config.json", as_json({"model_type": "bloom", "vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4})),
            "the architecture is not supported", "max_position_embeddings", "found bloom", "llama"),
    hostile(27, "projected", projected, "the architecture is not supported", "word_embed_proj_dim", "found opt"),
    hostile(22, "no-layers", config_sets(num_hidden_layers=None), "has no usable num_hidden_layers", "None"),
]  # fmt: skip

SIZES = [
    hostile(22, "endless-labels", config_sets(num_labels=10**9), "num_labels 1000000000", "at most 100000"),
    hostile(22, "endless-attention", config_sets(model_type="gpt_neo", attention_types=[[["global"], 10**9]]),
            "attention_types 1000000000"),
    hostile(24, "tokenizer-outside", tokenizer_outside, "names a file outside", "../outside/tokenizer.4.0.json"),
]  # fmt: skip

LLAMA = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 64,
    "llama.block_count": 1, "llama.feed_forward_length": 96, "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "c", "d"],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": struct.pack("<IB", 7, 1),
}  # fmt: skip
Table = tuple[str, tuple[int, ...], int, int]
TABLE: Table = ("token_embd.weight", (64, 4), 0, 0)


def lying_gguf(name: str, tensors: list[Table], *says: str, size: int = 0, **wrong: object) -> Hostile:
    """A GGUF file of these tensors; `wrong` are its other keys."""
    return hostile(20, f"gguf-{name}", gguf(gguf_bytes(LLAMA | wrong, tensors, 1024), size=size), *says)


GGUF = [  # tests/test_gguf_damage.py has more numbers that lie, and more cuts
    lying_gguf("sparse-texts", [TABLE], f"a list of {2**22} texts", x=struct.pack("<IIQ", 9, 8, 2**22), size=2**36),
    lying_gguf("overlapping", [TABLE, ("output.weight", (64, 4), 0, 0)], "output.weight of (4, 64) at byte"),
    lying_gguf("twice", [TABLE, TABLE], "duplicated tensor", "token_embd"),
    hostile(24, "gguf-pipe", both(gguf(b""), removed("model.gguf"), lambda p: os.mkfifo(p / "model.gguf")), "not a regular file", "model.gguf"),
]  # fmt: skip


GROUPS: dict[str, list[Hostile]] = {
    "pickled weights": PICKLES,
    "LFS pointers": POINTERS,
    "safetensors files": SAFETENSORS,
    "names of files": NAMES,
    "links, pipes, folders": LINKS,
    "code": CODE,
    "chat templates": TEMPLATES,
    "weights' values": VALUES,
    "tensors": TENSORS,
    "config.json": NUMBERS,
    "quantised weights": QUANTISED,
    "architectures": ARCHITECTURES,
    "time and memory": SIZES,
    "GGUF": GGUF,
}
CORPUS = [row for rows in GROUPS.values() for row in rows]
