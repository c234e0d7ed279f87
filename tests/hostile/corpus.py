"""The corpus: hostile and damaged model folders by what is wrong with them, and what must be said of each.

A row that may run (code 0) brings something that is never touched: it must be as if it were not there.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import INDEX
from tests.hostile.damage import (
    OUTSIDE,
    WEIGHTS,
    Damage,
    Tensors,
    as_bytes,
    both,
    code,
    config_sets,
    cut_short,
    damage,
    header,
    linked_outside,
    linked_to,
    many_tensors,
    maps_to,
    nothing,
    pickled,
    pipe,
    removed,
    replaced,
    reworked,
    sets,
    sparse,
    torch_pickled,
    with_tokenizer,
)
from tests.quantised_folders import Format, awq, compressed, eight_bit, fine_grained, four_bit, gptq, rewrite

CONFIG, FILES, LOADED = "config", "files", "loaded"
"""How far a case may come: no torch is needed, no weights are read, weights are read."""

PROMPT = 'task.prompts=["hello"]'
ALONE = (PROMPT, "model=./model", "draft=none", "task.max_new_tokens=4", "seed=1")
CHAT = ("task.chat=true",)
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@dataclass(frozen=True)
class Case:
    """A command that is refused: what it meets, its exit code, and what its one line of error says.

    `damage` is done to a copy of a sound model folder, ./model; without it there is none.
    """

    name: str
    words: tuple[str, ...]
    says: tuple[str, ...]
    code: int = 4
    reach: str = CONFIG
    damage: Damage | None = None
    sharded: bool = False  # the copy's weights are in several files
    makes: Damage = nothing  # other files, in the working folder
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    answers: bool = False  # what was written before it showed is given out
    modules: tuple[str, ...] = ()  # what transformers' modules refuse it with; the decoder does not read it

    def __str__(self) -> str:
        return self.name

    def problems(self, codes: list[int], out: str, err: str) -> list[str]:
        """What is not as it must be in the answer of all ranks."""
        errors = [line for line in err.splitlines() if line.startswith("error:")]
        checks = {
            f"exit codes {codes}, not {self.code}": set(codes) != {self.code},
            f"{len(errors)} lines of error: {err}": len(errors) != (self.code != 0),
            "a traceback": "Traceback" in err,
            "something on standard output": bool(self.code and out and not self.answers),
            "a line too long": any(len(line) > 1500 for line in errors),
            **{f"nothing of {text!r}: {err}": text not in "".join(errors) for text in self.says},
        }
        return [problem for problem, is_so in checks.items() if is_so]


def hostile(name: str, damage: Damage, *says: str, extra: tuple[str, ...] = (), **more: Any) -> Case:
    return Case(name, (*ALONE, *extra), says, damage=damage, **more)


def harmless(name: str, damage: Damage, **more: Any) -> Case:
    """What is never touched, but perhaps by transformers' modules."""
    return hostile(name, damage, code=0, reach=LOADED, **more)


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
    sets("tokenizer_config.json", fast_tokenizer_files=["../outside/tokenizer.4.0.json"])(path)


def shard_of_pickles(path: Path) -> None:
    """The index says that a shard is a pickled file."""
    shard = "model-00002-of-00005.safetensors"
    (path / shard).unlink()
    torch_pickled("pytorch_model.bin")(path)
    (path / INDEX).write_text((path / INDEX).read_text().replace(shard, "pytorch_model.bin"))


def projected(path: Path) -> None:
    """As opt-350m: embeddings narrower than the layers."""
    config_sets(model_type="opt", word_embed_proj_dim=32)(path)
    reworked(lambda t: t.update({EMBEDDING: t[EMBEDDING][:, :32]}))(path)


@damage
def has_gguf(path: Path, change: Damage) -> None:
    """A GGUF file in the place of the other weights, and of the tokenizer."""
    removed(WEIGHTS, "tokenizer.json")(path)
    change(path)


WEIGHT_FILES = [
    hostile("bin", both(removed(WEIGHTS), torch_pickled("pytorch_model.bin")), "pickled", "pytorch_model", "save_pretrained"),
    hostile("armed-pkl", both(removed(WEIGHTS), pickled("model.pkl")), "pickled", "model.pkl"),
    hostile("named-safetensors", pickled(WEIGHTS), "damaged or cut short"),
    hostile("shard-is-bin", shard_of_pickles, "of another kind", "pytorch_model.bin", sharded=True),
    harmless("armed-beside", both(torch_pickled("pytorch_model.bin"), torch_pickled("training_args.bin"))),
    hostile("lfs-pointer", replaced(WEIGHTS, POINTER), "git lfs pull"),
    hostile("lfs-config", replaced("config.json", POINTER), "config.json is a Git LFS pointer", "git lfs"),
    hostile("truncated", cut_short(7), "damaged or cut short", "not fully covered"),
    hostile("sparse-header", sparse(WEIGHTS, struct.pack("<Q", 2**31), 2**33), "damaged", "2147483648"),
    hostile("million-tensors", many_tensors(1_000_000), "damaged"),
    hostile("overlapping", header(overlapping), "invalid offset for tensor"),
    hostile("beyond-the-end", header(lambda h: h[NORM].update(data_offsets=[0, 10**9])), "damaged"),
    hostile("endless-shape", header(lambda h: h[NORM].update(shape=[2**62, 2**62])), "damaged"),
    hostile("no-metadata", header(lambda h: h.pop("__metadata__")), code=0, reach=LOADED),
    hostile("name-with-escapes", reworked(lambda t: t.update({"\x1b[2J\nerror: all is well" + "x" * 10**5: torch.ones(1)})),
            "a tensor by the name of"),
    # tests/test_gguf_damage.py has the numbers of a GGUF header that lie.
    hostile("gguf-counts", has_gguf(replaced("a.gguf", struct.pack("<4sIQQ", b"GGUF", 3, 2**40, 2**40))), "cannot be read"),
    hostile("gguf-pipe", has_gguf(pipe("a.gguf")), "not a regular file", "a.gguf"),
]  # fmt: skip

NO_TOKENIZER = "the tokenizer cannot be read"
NAMES = [
    hostile("missing-shard", removed("model-00002-of-00005.safetensors"), "a shard is missing", "model-00002-of-00005", INDEX,
            sharded=True),
    hostile("no-weights", removed(WEIGHTS), "holds no weights", "model.safetensors"),
    hostile("no-config", removed("config.json"), "there is no config.json"),
    hostile("an-adapter", both(removed("config.json"), replaced("adapter_config.json", "{}")), "there is no config.json, but an adapter (LoRA)"),
    hostile("no-tokenizer", removed("tokenizer.json", "tokenizer_config.json"), NO_TOKENIZER, "tokenizer.json", reach=FILES),
    hostile("class-alone", both(removed("tokenizer.json"), replaced("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}')),
            NO_TOKENIZER, "tokenizer.json", reach=FILES),
    hostile("tokenizer-not-json", replaced("tokenizer.json", "{"), NO_TOKENIZER, reach=FILES),
    hostile("escapes", maps_to("\x1b[2J\nerror: all is well"), "a shard's name", sharded=True),
    *(hostile(f"shard-{name!r}", maps_to(name), "leaves the folder", sharded=True)
      for name in ("../a", "/a", "a/../b", "..", ".", "", "a/b", None, 3, ["a"])),
    hostile("no-map", replaced(INDEX, "{}"), "no weight_map", sharded=True),
    hostile("link", linked_outside(WEIGHTS), "leaves the folder", "outside"),
    hostile("link-tokenizer", linked_outside("tokenizer.json"), "leaves the folder", "tokenizer.json"),
    hostile("link-loop", linked_to(WEIGHTS, WEIGHTS), WEIGHTS),
    hostile("link-environ", linked_to("tokenizer_config.json", "/proc/self/environ"), "tokenizer_config"),
    hostile("link-random", linked_to("config.json", "/dev/urandom"), "leaves the folder"),
    *(hostile(f"pipe-{name}", pipe(name), "not a regular file", name)
      for name in (WEIGHTS, "chat_template.jinja", "additional_chat_templates/a.jinja", "vocab.txt", "tokenizer.model", "added.json")),
    hostile("tokenizer-outside", tokenizer_outside, "names a file outside", "../outside/tokenizer.4.0.json"),
]  # fmt: skip

CODE = [
    hostile("auto-map", both(code("evil.py"), config_sets(auto_map={"AutoConfig": "evil.C"})), "code of its own", "auto_map"),
    hostile("generates", both(code("custom_generate/generate.py"), config_sets(custom_generate="a/b")),
            "code of its own", "custom_generate"),
    hostile("tokenizer-auto-map", both(code("e.py"), with_tokenizer(auto_map={"AutoTokenizer": ["e.C", "e.C"]})),
            "code of its own", "tokenizer_config.json"),
    hostile("kernel", config_sets(attn_implementation="evil/kernel"), "code of its own", "evil/kernel"),
    hostile("adapter", replaced("adapter_config.json", '{"base_model_name_or_path": "../outside"}'), "adapter"),
    hostile("backtracks", pattern("(x+x+)+y"), "the tokenizer fails on a text", "retry-limit", reach=FILES, code=3,
            extra=(f'task.prompts=["{"x" * 60}"]',)),
    hostile("unknown", config_sets(model_type="nonesuch"), "nonesuch", "llama", reach=FILES),
    hostile("dtype-is-code", config_sets(dtype="load"), "config.json cannot be read", reach=FILES),
    hostile("tokenizer-class", sets("tokenizer_config.json", tokenizer_class="os.system"), code=0, reach=LOADED),
    harmless("modules-beside", both(code("modeling_llama.py"), code("__init__.py"), code("torch.py"))),
    harmless("other-home", config_sets(_name_or_path="../outside")),
]  # fmt: skip


def chat_template(name: str, text: str, *says: str) -> Case:
    """A template that is refused when it is applied."""
    damage = with_tokenizer(chat_template=text)
    return hostile(name, damage, "chat template", *says, reach=FILES, code=3, extra=CHAT)


ESCAPES = [
    chat_template("escape-by-format", "{{ '{0.__class__.__mro__}'.format(messages) }}"),
    chat_template("escape-by-globals", "{{ cycler.__init__.__globals__.os.mkdir('executed') }}"),
    chat_template("include", "{% include '/etc/passwd' %}"),
]
TEMPLATES = [
    hostile("no-chat-template", nothing, "no chat template", reach=FILES, code=3, extra=CHAT),
    chat_template("broken-chat-template", "{{ raise_exception('no') }}", "no"),
    *ESCAPES,
]


def tensors(name: str, change: Callable[[Tensors], object], *says: str, **more: Any) -> Case:
    return hostile(name, reworked(change), *says, reach=LOADED, **more)


TENSORS = [
    tensors("nan", lambda t: t[NORM].fill_(torch.nan), "not numbers", answers=True),
    tensors("missing-tensor", lambda t: t.pop(NORM), "missing keys", NORM),
    tensors("unexpected", lambda t: t.update({"other.weight": torch.zeros(2)}), "unexpected keys", "other.weight"),
    tensors("shape", lambda t: t.update({NORM: torch.ones(32)}), "mismatched keys", NORM),
    hostile("vocabulary", config_sets(vocab_size=299), "embed_tokens", "mismatched keys", reach=LOADED),
    hostile("fewer-layers", config_sets(num_hidden_layers=1), "unexpected keys", "layers.1.", reach=LOADED),
]  # fmt: skip


def says(name: str, values: dict[str, Any], *said: str, **more: Any) -> Case:
    """A config.json with these values."""
    return hostile(name, config_sets(**values), *said, **more)


MISREAD = "config.json cannot be read"  # by transformers, in whose words it is told
BY_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BLOOM = {"model_type": "bloom", "vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4}
NUMBERS = [
    says("text-size", {"num_key_value_heads": "two"}, "num_key_value_heads", "'two'"),
    says("negative-size", {"num_hidden_layers": -2}, "num_hidden_layers", "-2"),
    says("no-layers", {"num_hidden_layers": None}, "has no usable num_hidden_layers", "None"),
    says("head-groups", {"num_key_value_heads": 3}, "KV heads", "4 and 3"),
    says("endless-layers", {"num_hidden_layers": 2**31 - 1}, "number of layers", "2147483647"),
    says("endless-width", {"hidden_size": 2**31}, "hidden_size", "2147483648"),
    says("endless-ffn", {"intermediate_size": 2**31 - 1}, "do not fit", code=5, reach=FILES),
    says("endless-labels", {"num_labels": 10**9}, "num_labels 1000000000", "at most 100000"),
    says("endless-attention", {"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]}, "attention_types 1000000000"),
    says("no-context", {"max_position_embeddings": 0}, "max_position_embeddings"),
    says("epsilon-text", {"rms_norm_eps": "x"}, MISREAD, "'rms_norm_eps' expected float, got str (value: 'x')", reach=FILES),
    says("rope-lacks", {"rope_parameters": {"rope_type": "llama3"}}, MISREAD, "Missing required keys in `rope_parameters`", reach=FILES),
    says("odd-head", {"head_dim": 15}, MISREAD, "`head_dim`=15", reach=FILES),
    says("rope-kind", {"rope_scaling": {"rope_type": "evil", "factor": 2}}, "cannot be loaded", "KeyError: 'evil'", reach=LOADED),
    harmless("plan-number", config_sets(base_model_tp_plan=5), modules=("cannot be loaded", "correct config.json")),
    harmless("returns", config_sets(return_dict=False, output_hidden_states=True, output_attentions=True)),
    says("plain-4bit", {"quantization_config": BY_BITSANDBYTES}, "bitsandbytes", "config.json: quantization_config", "plain", "nf4"),
    says("window", {"sliding_window": -1, "model_type": "mistral"}, "sliding_window", "-1"),
    hostile("not-json", replaced("config.json", "{"), "config.json is not JSON"),
    hostile("deep-config", replaced("config.json", "[" * 10**5), "config.json is not JSON"),
    hostile("huge-config", sparse("config.json", b"{", 2**33), "too large"),
    hostile("preset", nothing, "the checkpoint is not a", "n_layers", extra=("model.n_layers=7",)),
    hostile("bloom", replaced("config.json", json.dumps(BLOOM)),
            "the architecture is not supported", "max_position_embeddings", "found bloom", "llama"),
    hostile("projected", projected, "the architecture is not supported", "word_embed_proj_dim", "found opt"),
]  # fmt: skip

UP = "model.layers.0.mlp.up_proj"  # 96 outputs, 64 inputs
STATE = ".weight.quant_state.bitsandbytes__nf4"
INT4 = compressed(4, "int", "group", group_size=32, dtype=torch.float16)
GPTQ, AWQ, FP8, INT8 = gptq(group=32), awq(group=32), fine_grained(32), eight_bit()
NF4, NESTED = four_bit("nf4", block=32), four_bit("nf4", nested=True, block=32)
CLAIM = INT4.claim["config_groups"]["0"]
TEXT_BITS = {"0": {**CLAIM, "weights": {**CLAIM["weights"], "num_bits": "4"}}}


@damage
def quantised(path: Path, form: Format, **claim: Any) -> None:
    """The layers of attention and MLP in a format; `claim`: what quantization_config says instead."""
    rewrite(form, path, **claim)


def matrix(
    name: str,
    form: Format,
    end: str,
    tensor: Tensor | None,
    *found: str,
    what: str = "of a quantised matrix",
    **more: Any,
) -> Case:
    """One tensor of a quantised matrix is another, or is not there (None)."""

    def change(tensors: Tensors) -> None:
        tensors.pop(UP + end, None)
        tensors |= {} if tensor is None else {UP + end: tensor}

    return hostile(name, both(quantised(form), reworked(change)), what, *found, reach=LOADED, **more)


def state(name: str, form: Format, found: str, **values: Any) -> Case:
    """bitsandbytes' description of a quantised matrix has other values."""

    def change(tensors: Tensors) -> None:
        before = json.loads(bytes(tensors[UP + STATE].tolist()))
        tensors[UP + STATE] = as_bytes({**before, **values})

    return hostile(
        name, both(quantised(form), reworked(change)), "of a quantised matrix", found, reach=LOADED
    )


QUANTISED = [
    hostile("sound-int4", quantised(INT4), code=0, reach=LOADED),
    matrix("scales-rows", GPTQ, ".scales", torch.rand(3, 96).half(), "(2, 96)"),
    matrix("zeros-missing", AWQ, ".qzeros", None, "not complete"),
    matrix("group-beyond", GPTQ, ".g_idx", torch.full((64,), 9).int(), "0..1"),
    matrix("codes-plain", FP8, ".weight", torch.rand(96, 64), "F32"),
    matrix("blocks-shape", FP8, ".weight_scale_inv", torch.rand(2, 2), "(3, 2)"),
    matrix("scale-odd", INT4, ".weight_scale", torch.rand(96, 3).half(), "divide 64"),
    matrix("shape-lies", INT4, ".weight_shape", torch.tensor([2**40, 2**40]), "4 or 8 bits"),
    matrix("table", NF4, ".weight.quant_map", torch.rand(16), "nf4"),
    matrix("state", NF4, STATE, as_bytes([1]), "list indices"),
    state("state-shape", NF4, "U8", shape=[2**40, 2**40]),
    state("nested-block", NESTED, "nested_absmax; found (1,)", nested_blocksize=0),
    matrix("bytes-order", INT8, ".weight_format", torch.tensor(2, dtype=torch.uint8), "row after row"),
    matrix("codes-and-numbers", GPTQ, ".weight", torch.rand(96, 64), ".weight and .qweight"),
    matrix("bias-beyond", GPTQ, ".bias", torch.ones(96), f"{UP}.bias", what="unexpected keys"),
    matrix("nan-scales", INT4, ".weight_scale", torch.full((96, 2), torch.nan).half(), what="not numbers", answers=True),
    hostile("gptq-3-bit", quantised(GPTQ, bits=3), "cannot be read", "quantization_config", "3 bits", "GGUF"),
    hostile("rotated", quantised(INT4, transform_config={"config_groups": {"u": {}}}), "quantization_config", "transforms", "GGUF"),
    hostile("group-zero", quantised(GPTQ, group_size=0), "cannot be read", "group_size 0", "quantization_config"),
    hostile("bits-text", quantised(INT4, config_groups=TEXT_BITS), "num_bits", "quantization_config"),
    hostile("without-a-claim", both(quantised(AWQ), config_sets(quantization_config=None)),
            "quantised, but config.json does not say how", ".qweight", "quantization_config"),
    hostile("other-format", quantised(AWQ, quant_method="hqq"), "cannot be read", "found hqq",
            "config.json: quantization_config", "gptq (4 and 8 bit)", "plain weights and dtype=int8 or nf4"),
]  # fmt: skip
NOT_BY_DEEPSPEED = [row for row in QUANTISED if row.reach == LOADED]  # it refuses their weights

CORPUS = [*WEIGHT_FILES, *NAMES, *CODE, *TEMPLATES, *TENSORS, *NUMBERS, *QUANTISED]
