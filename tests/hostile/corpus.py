"""The corpus: hostile and damaged model folders by what is wrong with them, and what must be said of each.

A row that may run (code 0) brings something that is never touched: it must be as if it were not there.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from tests import checkpoints
from tests.checkpoints import INDEX, join
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
    foldered,
    gguf,
    gguf_bytes,
    header,
    linked_outside,
    linked_to,
    many_tensors,
    maps_to,
    nested,
    nothing,
    pickled,
    pipe,
    removed,
    renamed,
    replaced,
    reworked,
    sets,
    socketed,
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
HUGE_FRACTION = b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,0]}}'
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


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
    decoder: bool = False  # not for transformers' modules, which want more libraries, or do not read it
    modules: tuple[str, ...] = ()  # what transformers' modules refuse it with; the decoder does not read it

    def __str__(self) -> str:
        return f"{self.row}-{self.name}"


def hostile(
    row: int, name: str, damage: Damage, *says: str, reach: str = CONFIG, sharded: bool = False, code: int = 4,
    extra: tuple[str, ...] = (), answers: bool = False, decoder: bool = False,
) -> Hostile:  # fmt: skip
    return Hostile(row, name, damage, says, reach, sharded, code, extra, answers, decoder)


def harmless(
    row: int, name: str, damage: Damage, extra: tuple[str, ...] = (), modules: tuple[str, ...] = ()
) -> Hostile:
    """What is never touched, but perhaps by transformers' modules."""
    return Hostile(row, name, damage, (), LOADED, code=0, extra=extra, modules=modules)


def first_tensor(**values: object) -> Damage:
    return header(lambda content: content[NORM].update(values))


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


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].t().contiguous()


def twins(path: Path) -> None:
    """A key stands twice behind very many that do not."""
    keys = ",".join(f'"k{number}":0' for number in [*range(400_000), 399_999])
    (path / "config.json").write_text(f"{{{keys}}}")


def grown(by: str) -> dict[str, object]:
    """A step that makes a text a hundred times as long: six of them fill any memory."""
    return {"type": "Replace", "pattern": {by: "l"}, "content": "l" * 100}


def nested_steps(kind: str, name: str, by: str = "String") -> dict[str, object]:
    step: dict[str, object] = {"type": "Sequence", name: [grown(by), grown(by)]}
    return {kind: {"type": "Sequence", name: [step, {"type": "Sequence", name: [step, step]}]}}


def texts_many_times(content: dict) -> None:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    once = {"type": "TemplateProcessing", "single": [text] * 100, "pair": [text] * 100, "special_tokens": {}}
    content["post_processor"] = {"type": "Sequence", "processors": [once] * 6}


def other_tokenizer(path: Path) -> None:
    """A file that libraries take for tokenizer.json, as tokenizer_config.json says so."""
    content = json.loads((path / "tokenizer.json").read_text()) | nested_steps("normalizer", "normalizers")
    (path / "tokenizer.4.0.json").write_text(as_json(content))
    tokenizer_says(fast_tokenizer_files=["tokenizer.4.0.json"])(path)


def tokenizer_outside(path: Path) -> None:
    """The same, of a file that lies elsewhere."""
    (path.parent / OUTSIDE).mkdir()
    (path.parent / OUTSIDE / "tokenizer.4.0.json").write_text((path / "tokenizer.json").read_text())
    tokenizer_says(fast_tokenizer_files=["../outside/tokenizer.4.0.json"])(path)


def shard_of_pickles(path: Path) -> None:
    """The index says that a shard is a pickled file."""
    shard = "model-00002-of-00005.safetensors"
    (path / shard).unlink()
    torch_pickled("pytorch_model.bin")(path)
    (path / INDEX).write_text((path / INDEX).read_text().replace(shard, "pytorch_model.bin"))


def index_of_pickles(path: Path) -> None:
    (path / WEIGHTS).unlink()
    torch_pickled("pytorch_model-00001-of-00001.bin")(path)
    places = {NORM: "pytorch_model-00001-of-00001.bin"}
    (path / "pytorch_model.bin.index.json").write_text(as_json({"weight_map": places}))


PICKLES = [
    hostile(25, "bin", renamed(WEIGHTS, "pytorch_model.bin"), "pickled", "pytorch_model", "save_pretrained"),
    hostile(25, "pth", renamed(WEIGHTS, "consolidated.00.pth"), "pickled", "consolidated.00.pth"),
    hostile(25, "armed-bin", both(removed(WEIGHTS), torch_pickled("pytorch_model.bin")), "pickled"),
    hostile(25, "armed-pkl", both(removed(WEIGHTS), pickled("model.pkl")), "pickled", "model.pkl"),
    hostile(25, "index-of-bins", index_of_pickles, "pickled", "00001.bin"),
    hostile(25, "named-safetensors", pickled(WEIGHTS), "damaged or cut short"),
    hostile(25, "zipped-safetensors", torch_pickled(WEIGHTS), "damaged or cut short"),
    hostile(25, "shard-is-bin", shard_of_pickles, "damaged or cut short", "pytorch_model.bin", sharded=True),
    harmless(25, "armed-beside", both(torch_pickled("pytorch_model.bin"), torch_pickled("training_args.bin"))),
]  # fmt: skip

POINTERS = [
    hostile(19, "lfs-pointer", replaced(WEIGHTS, POINTER), "git lfs pull"),
    hostile(19, "lfs-shard", replaced("model-00002-of-00005.safetensors", POINTER), "git lfs", sharded=True),
    hostile(
        19, "lfs-config", replaced("config.json", POINTER), "config.json is a Git LFS pointer", "git lfs"
    ),
    hostile(19, "lfs-index", replaced(INDEX, POINTER), "index.json is a Git LFS pointer", sharded=True),
    hostile(19, "lfs-tokenizer", replaced("tokenizer.json", POINTER), "tokenizer.json is a Git LFS pointer"),
    hostile(
        19,
        "lfs-pieces",
        both(removed("tokenizer.json"), replaced("tokenizer.model", POINTER)),
        "tokenizer.model is a Git LFS pointer",
    ),
    hostile(
        19, "lfs-settings", replaced("tokenizer_config.json", POINTER), "tokenizer_config.json is a Git LFS"
    ),
]

SAFETENSORS = [
    hostile(19, "truncated", bytes_of(lambda b: b[:-7]), "damaged or cut short", "bytes where"),
    hostile(20, "empty", replaced(WEIGHTS, b""), "damaged or cut short", "a file of 0"),
    hostile(20, "cut-header", bytes_of(lambda b: b[:100]), "damaged or cut short"),
    hostile(20, "huge-header", bytes_of(lambda b: struct.pack("<Q", 2**63) + b[8:]), "9223372036854775808"),
    hostile(20, "sparse-header", sparse(WEIGHTS, struct.pack("<Q", 2**31), 2**33), "damaged", "2147483648"),
    hostile(20, "header-of-spaces", lambda p: join(p / WEIGHTS, b"{}" + b" " * 90_000_000, b""), "damaged"),
    hostile(20, "million-tensors", many_tensors(1_000_000), "damaged"),
    hostile(20, "trailing", bytes_of(lambda b: b + b"x"), "damaged or cut short"),
    hostile(20, "no-json", lambda p: join(p / WEIGHTS, b"{]", b""), "not a table of tensors"),
    hostile(20, "deep-json", lambda p: join(p / WEIGHTS, b"[" * 10**5, b""), "not a table of tensors"),
    hostile(20, "deep-table", lambda p: join(p / WEIGHTS, nested(5000).encode(), b""), "not a table"),
    hostile(20, "not-utf8", lambda p: join(p / WEIGHTS, b'{"\xff": {}}', b""), "not a table of tensors"),
    hostile(20, "overlapping", header(overlapping), "overlap or leave a gap"),
    hostile(20, "negative-shape", first_tensor(shape=[-64]), "(-64,)"),
    hostile(20, "endless-shape", first_tensor(shape=[2**62, 2**62]), "damaged or cut short"),
    hostile(20, "wrong-bytes", first_tensor(dtype="F16"), "in F16"),
    hostile(20, "unknown-dtype", first_tensor(dtype="F4"), "found F4"),
    hostile(20, "backwards", first_tensor(data_offsets=[4, 0]), "damaged or cut short"),
    hostile(20, "fraction-offsets", first_tensor(data_offsets=[0.5, 256.5]), "damaged or cut short"),
    hostile(20, "metadata", header(lambda h: h.update(__metadata__=[1])), "cannot be loaded", reach=LOADED),
    hostile(20, "metadata-number", header(lambda h: h.update(__metadata__={"format": 5})), "cannot be loaded", reach=LOADED),
    hostile(20, "no-metadata", header(lambda h: h.pop("__metadata__")), code=0, reach=LOADED),
    harmless(20, "other-framework", header(lambda h: h.update(__metadata__={"format": "tf"}))),
    hostile(20, "infinite-shape", first_tensor(shape=[float("inf")]), "not a table of tensors"),
    hostile(20, "infinite-offsets", first_tensor(data_offsets=[0, float("inf")]), "not a table of tensors"),
    hostile(20, "huge-fraction", lambda p: join(p / WEIGHTS, HUGE_FRACTION, b""), "not a table of tensors"),
    hostile(20, "three-offsets", first_tensor(data_offsets=[0, 256, 512]), "not a table of tensors"),
    hostile(20, "text-offsets", first_tensor(data_offsets=["0", "256"]), "not a table of tensors"),
    hostile(21, "twice", lambda p: join(p / WEIGHTS, b'{"a": {}, "a": {}}', b""), "'a' is given twice"),
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
    hostile(24, "parent", maps_to("../x.safetensors"), "leaves the folder", "../x", sharded=True),
    hostile(24, "absolute", maps_to("/etc/passwd"), "leaves the folder", "/etc/passwd", sharded=True),
    hostile(24, "below", maps_to("a/b.safetensors"), "leaves the folder", "a/b", sharded=True),
    hostile(24, "number", maps_to(7), "leaves the folder", sharded=True),
    hostile(24, "list", maps_to(["a"]), "leaves the folder", sharded=True),
    hostile(24, "dots", maps_to(".."), "leaves the folder", sharded=True),
    hostile(24, "empty-name", maps_to(""), "leaves the folder", sharded=True),
    hostile(24, "nul", maps_to("a\0b"), "a shard is missing", sharded=True),
    hostile(24, "long-name", maps_to("a" * 5000), "leaves the folder", sharded=True),
    hostile(24, "escapes", maps_to("\x1b[2J\nerror: all is well"), "a shard is missing", sharded=True),
    hostile(21, "no-map", replaced(INDEX, "{}"), "no weight_map", sharded=True),
    hostile(21, "map-is-list", replaced(INDEX, '{"weight_map": ["a"]}'), "no weight_map", sharded=True),
    hostile(21, "deep-index", replaced(INDEX, nested(10**5)), "not JSON", sharded=True),
]  # fmt: skip

LINKS = [
    hostile(24, "link", linked_outside(WEIGHTS), "leaves the folder", "outside"),
    hostile(24, "link-config", linked_outside("config.json"), "leaves the folder", "config.json"),
    hostile(24, "link-tokenizer", linked_outside("tokenizer.json"), "leaves the folder", "tokenizer.json"),
    hostile(
        24, "link-generation", linked_outside("generation_config.json"), "leaves the folder", "generation"
    ),
    hostile(24, "link-index", linked_outside(INDEX), "leaves the folder", "index", sharded=True),
    hostile(
        24, "link-template", both(replaced("chat_template.jinja", "x"), linked_outside("chat_template.jinja")),
        "leaves the folder", "chat_template", extra=CHAT,
    ),
    hostile(24, "link-loop", linked_to(WEIGHTS, WEIGHTS), WEIGHTS),
    hostile(24, "link-zero", linked_to(WEIGHTS, "/dev/zero"), "not a regular file"),
    hostile(24, "link-environ", linked_to("tokenizer_config.json", "/proc/self/environ"), "tokenizer_config"),
    hostile(24, "link-random", linked_to("config.json", "/dev/urandom"), "not a regular file"),
    hostile(24, "pipe", pipe(WEIGHTS), "not a regular file", WEIGHTS),
    hostile(24, "config-pipe", pipe("config.json"), "not a regular file", "config.json"),
    hostile(24, "index-pipe", pipe(INDEX), "not a regular file", INDEX),
    hostile(24, "shard-pipe", pipe("model-00002-of-00005.safetensors"), "not a regular", sharded=True),
    hostile(24, "tokenizer-pipe", pipe("tokenizer.json"), "not a regular file", "tokenizer.json"),
    hostile(24, "generation-pipe", pipe("generation_config.json"), "not a regular file", "generation_config"),
    hostile(24, "template-pipe", pipe("chat_template.jinja"), "not a regular file", extra=CHAT),
    hostile(24, "template-folder-pipe", pipe("additional_chat_templates/a.jinja"), "not a regular file"),
    hostile(24, "processor-pipe", pipe("processor_config.json"), "not a regular file"),
    hostile(24, "socket", socketed(WEIGHTS), "not a regular file", WEIGHTS),
    hostile(24, "folder", foldered(WEIGHTS), "not a regular file", WEIGHTS),
    hostile(24, "config-folder", foldered("config.json"), "not a regular file", "config.json"),
]  # fmt: skip

CODE = [
    hostile(26, "auto-map", both(code("evil.py"), config_sets(auto_map={"AutoConfig": "evil.C"})),
            "code of its own", "auto_map"),
    hostile(26, "auto-map-model", both(code("evil.py"), config_sets(auto_map={"AutoModelForCausalLM": "evil.C"})),
            "code of its own", "auto_map"),
    hostile(26, "auto-map-elsewhere", config_sets(auto_map={"AutoModelForCausalLM": "a/b--evil.C"}),
            "code of its own", "auto_map"),
    hostile(26, "trusts", config_sets(trust_remote_code=True), "code of its own", "trust_remote_code"),
    hostile(26, "generates", both(code("custom_generate/generate.py"), config_sets(custom_generate="a/b")),
            "code of its own", "custom_generate"),
    hostile(26, "tokenizer-auto-map",
            both(code("e.py"), with_tokenizer(checkpoints.tokenizer, auto_map={"AutoTokenizer": ["e.C", "e.C"]})),
            "code of its own", "tokenizer_config.json"),
    hostile(26, "processor-auto-map",
            both(code("e.py"), replaced("processor_config.json", as_json({"auto_map": {"AutoProcessor": "e.C"}}))),
            "code of its own", "processor_config.json"),
    hostile(26, "kernel", config_sets(attn_implementation="evil/kernel"), "code of its own", "evil/kernel"),
    hostile(26, "old-kernel", config_sets(_attn_implementation="evil/kernel"), "code of its own", "evil/kernel"),
    hostile(26, "adapter", replaced("adapter_config.json", as_json({"base_model_name_or_path": "../outside"})),
            "adapter"),
    hostile(16, "backtracks", pattern("(x+x+)+y"), "the tokenizer fails on a text", "retry-limit", reach=FILES,
            code=3, extra=(f'task.prompts=["{"x" * 60}"]',)),
    hostile(27, "unknown", config_sets(model_type="nonesuch"), "nonesuch", "llama", reach=FILES),
    hostile(27, "type-is-path", config_sets(model_type="../../evil"), "evil", "llama", reach=FILES),
    hostile(27, "no-type", config_sets(model_type=None), "no model_type"),
    hostile(27, "type-is-list", config_sets(model_type=["llama"]), "no model_type"),
    hostile(27, "encoder", config_sets(model_type="clip_text_model"), "clip_text_model", "llama", reach=FILES),
    hostile(26, "dtype-is-code", config_sets(dtype="load"), "config.json cannot be read", "config.json: dtype", reach=FILES),
    hostile(26, "tokenizer-class", tokenizer_says(tokenizer_class="os.system"), code=0, reach=LOADED),
    harmless(26, "modules-beside", both(code("modeling_llama.py"), code("__init__.py"), code("torch.py"))),
    harmless(26, "generate-beside", code("custom_generate/generate.py")),
    harmless(26, "other-architecture", config_sets(architectures=["os.system", "../../evil"])),
    harmless(26, "other-home", config_sets(_name_or_path="../outside")),
]  # fmt: skip


def chat_template(name: str, content: object, *says: str) -> Hostile:
    """A template that is refused when it is applied."""
    damage = templated(content)  # type: ignore[arg-type]
    return hostile(17, name, damage, "chat template", *says, reach=FILES, code=3, extra=CHAT)


TEMPLATES = [
    hostile(17, "no-chat-template", nothing, "no chat template", reach=FILES, code=3, extra=CHAT),
    chat_template("broken-chat-template", "{{ raise_exception('no') }}", "no"),
    chat_template("escape", ESCAPE),
    chat_template("escape-by-format", "{{ '{0.__class__.__mro__}'.format(messages) }}"),
    harmless(17, "escape-by-filter", templated("{{ messages|attr('__class__')|attr('__mro__') }} {{ messages[-1]['content'] }}"), CHAT),
    chat_template("escape-by-globals", "{{ cycler.__init__.__globals__.os.mkdir('executed') }}"),
    chat_template("include", "{% include '/etc/passwd' %}"),
    chat_template("changes-messages", "{{ messages.append(1) }}"),
    chat_template("unfinished", "{% for m in messages %}"),
    chat_template("endless", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "seconds"),
    chat_template("endless-power", "{{ 9 ** (9 ** (9 ** 2)) }}"),
    chat_template("huge", "{% set x = 'a' * 10 ** 11 %}{{ x }}"),
    chat_template("huge-in-steps", "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"),
    chat_template("deep", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    chat_template("template-is-number", 5),
]  # fmt: skip

VALUES = [
    hostile(23, "nan", reworked(lambda t: t[NORM].fill_(torch.nan)), "not numbers", reach=LOADED, answers=True),
    hostile(23, "infinite", reworked(lambda t: t[EMBEDDING].fill_(torch.inf)), "not numbers", reach=LOADED, answers=True),
    hostile(23, "nan-by-epsilon", config_sets(rms_norm_eps=float("nan")), "not numbers", reach=LOADED, answers=True),
]  # fmt: skip

TENSORS = [
    hostile(21, "lacks", maps_to("model-00001-of-00005.safetensors"), "model-00001-of-00005.safetensors lacks",
            NORM, sharded=True),
    hostile(21, "extra", lambda p: checkpoints.edit(p / INDEX, lambda c: c["weight_map"].pop(NORM)),
            "holds unlisted", NORM, sharded=True),
    hostile(21, "missing-tensor", reworked(lambda t: t.pop(NORM)), "missing keys", NORM, reach=LOADED),
    hostile(21, "no-tensors", lambda p: join(p / WEIGHTS, b"{}", b""), "keys", reach=LOADED),
    hostile(21, "unexpected", reworked(lambda t: t.update({"other.weight": torch.zeros(2)})), "unexpected keys",
            "other.weight", reach=LOADED),
    hostile(22, "vocabulary", config_sets(vocab_size=299), "embed_tokens", "(300, 64)", "(299, 64)"),
    hostile(22, "shape", reworked(lambda t: t.update({NORM: torch.ones(32)})), "mismatched keys", NORM,
            reach=LOADED),
    hostile(22, "transposed", reworked(transposed), "mismatched keys", "up_proj", reach=LOADED),
    hostile(22, "scalar", reworked(lambda t: t.update({NORM: torch.ones(())})), "mismatched keys", NORM,
            reach=LOADED),
    hostile(22, "extra-layer", config_sets(num_hidden_layers=3), "number of layers", "3"),
    hostile(22, "fewer-layers", config_sets(num_hidden_layers=1), "number of layers", "1"),
]  # fmt: skip


def misread(name: str, key: str, value: object, how: str = "cannot be read", reach: str = FILES) -> Hostile:
    """A value of config.json that transformers refuses: said so of the file, the key and the value."""
    says = f"config.json {how}", f"config.json: {key}; found {value!r}"[:90]
    return hostile(22, name, config_sets(**{key: value}), *says, reach=reach)


BY_BITSANDBYTES = {"quant_method": "bitsandbytes"}
NUMBERS = [
    hostile(22, "text-size", config_sets(num_key_value_heads="two"), "num_key_value_heads", "'two'"),
    hostile(22, "list-size", config_sets(intermediate_size=[96]), "intermediate_size", "[96]"),
    hostile(22, "negative-size", config_sets(num_hidden_layers=-2), "num_hidden_layers", "-2"),
    hostile(22, "true-size", config_sets(num_hidden_layers=True), "num_hidden_layers", "True"),
    hostile(22, "fraction-size", config_sets(hidden_size=64.5), "hidden_size", "64.5"),
    hostile(22, "endless-size", config_sets(hidden_size=10**400), "hidden_size"),
    hostile(22, "head-groups", config_sets(num_key_value_heads=3), "KV heads", "4 and 3"),
    hostile(22, "million-layers", config_sets(num_hidden_layers=10**6), "number of layers", "1000000"),
    hostile(22, "endless-layers", config_sets(num_hidden_layers=2**31 - 1), "number of layers", "2147483647"),
    hostile(22, "endless-width", config_sets(hidden_size=2**31 - 1), "embed_tokens"),
    hostile(22, "endless-ffn", config_sets(intermediate_size=2**31 - 1), "do not fit", code=5, reach=FILES),
    hostile(22, "endless-heads", config_sets(num_attention_heads=2**30, num_key_value_heads=2**30), "", reach=LOADED),
    hostile(22, "endless-head", config_sets(head_dim=2**31 - 1), "", reach=LOADED),
    hostile(22, "endless-context", config_sets(max_position_embeddings=2**31 - 1), code=0, reach=LOADED),
    hostile(22, "no-context", config_sets(max_position_embeddings=0), "max_position_embeddings"),
    hostile(22, "endless-vocabulary", config_sets(vocab_size=2**31 - 1), "embed_tokens"),
    *(misread(name, key, value) for name, key, value in (
        ("epsilon-text", "rms_norm_eps", "x"), ("epsilon-null", "rms_norm_eps", None),
        ("rope-list", "rope_scaling", [1]), ("rope-lacks", "rope_parameters", {"rope_type": "llama3"}),
        ("activation-number", "hidden_act", 5), ("few-types", "layer_types", ["full_attention"]),
        ("types-number", "layer_types", 5), ("padding-text", "pad_token_id", "x"),
        ("end-text", "eos_token_id", "x"), ("bias-text", "attention_bias", "x"),
        ("tied-text", "tie_word_embeddings", "x"), ("labels-list", "id2label", [1]),
        ("labels-text", "num_labels", "x"), ("odd-head", "head_dim", 15), ("small-odd-head", "head_dim", 3),
        ("dtype-list", "dtype", ["x"]), ("quantised-text", "quantization_config", "x"), ("own-name", "to_dict", 5),
    )),
    hostile(22, "heads-of-width", config_sets(num_attention_heads=3, num_key_value_heads=3),
            "config.json cannot be read", "config.json: num_attention_heads; found 3", reach=FILES),
    hostile(22, "two-faults", config_sets(hidden_act=5, pad_token_id="x"), "config.json cannot be read", reach=FILES),
    *(misread(name, key, value, "makes no model", LOADED) for name, key, value in (
        ("theta-text", "rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
        ("rope-kind", "rope_scaling", {"rope_type": "evil", "factor": 2}),
        ("activation", "hidden_act", "__import__('os')"),
    )),
    *(harmless(22, name, config_sets(**{key: value}), modules=("makes no model", key, f"found {value}"))
      for name, key, value in (("padding-id", "pad_token_id", 10**9), ("plan-number", "base_model_tp_plan", 5))),
    harmless(22, "attention-name", config_sets(_attn_implementation="evil")),
    harmless(22, "returns", config_sets(return_dict=False, output_hidden_states=True, output_attentions=True)),
    hostile(22, "plain-4bit", config_sets(quantization_config={**BY_BITSANDBYTES, "load_in_4bit": True}),
            "bitsandbytes", "config.json: quantization_config", "plain", "nf4"),
    hostile(22, "plain-8bit", config_sets(quantization_config={"load_in_8bit": True}), "bitsandbytes", "plain"),
    hostile(22, "plain-gptq", config_sets(quantization_config={"quant_method": "gptq", "bits": 4}),
            "gptq", "config.json: quantization_config", "plain", "nf4"),
    harmless(22, "end-ids", sets("generation_config.json", eos_token_id=["a"])),
    hostile(22, "generation-list", replaced("generation_config.json", "[]"), "not a JSON object"),
    harmless(22, "quantised", config_sets(quantization_config={"quant_method": "evil"})),
    hostile(22, "quantised-list", config_sets(quantization_config=[1]), "", reach=LOADED),
    hostile(22, "window", config_sets(sliding_window=-1, model_type="mistral"), "sliding_window", "-1"),
    hostile(22, "not-json", replaced("config.json", "{"), "config.json is not JSON"),
    hostile(22, "deep-config", replaced("config.json", "[" * 10**5), "config.json is not JSON"),
    hostile(22, "deep-object", replaced("config.json", nested(10**5)), "config.json is not JSON"),
    hostile(22, "not-utf8", replaced("config.json", b"\xff\xfe"), "config.json is not JSON"),
    hostile(22, "array", replaced("config.json", "[]"), "not a JSON object"),
    hostile(22, "huge-config", sparse("config.json", b"{", 2**33), "too large"),
    hostile(22, "preset", nothing, "the checkpoint is not a", "n_layers", extra=("model.n_layers=7",)),
]  # fmt: skip


IS = quantised_folders
QUANTISED = [
    *(hostile(22, name, IS.quantised(write, claim), code=0, reach=LOADED, decoder=claim in (IS.GPTQ, IS.AWQ))
      for name, write, claim in (
        ("sound-gptq", IS.gptq, IS.GPTQ), ("sound-awq", IS.awq, IS.AWQ), ("sound-fp8", IS.fp8, IS.FP8),
        ("sound-int4", IS.int4, IS.INT4),
    )),
    *(hostile(22, name, IS.quantised(IS.gptq, claim), "cannot be read", "quantization_config", found, "GGUF")
      for name, claim, found in (
        ("gptq-3-bit", {**IS.GPTQ, "bits": 3}, "3 bits"), ("gptq-marlin", {**IS.GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ("awq-gemv", {**IS.AWQ, "version": "gemv"}, "gemv"), ("quanto", {"quant_method": "quanto"}, "quanto"),
        ("nvfp4", {**IS.INT4, "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ("rotated", {**IS.INT4, "transform_config": {"config_groups": {"u": {}}}}, "transforms"),
        ("sparse-24", {**IS.INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    )),
    hostile(22, "compressed-act-order", both(
        IS.quantised(IS.int4, IS.INT4), reworked(lambda t: t.update({f"{IS.UP}.weight_g_idx": torch.zeros(64)}))),
        "cannot be read", "weight_g_idx"),
    hostile(22, "sound-idle-bias", both(
        IS.quantised(IS.gptq, IS.GPTQ), reworked(lambda t: t.update({f"{IS.UP}.bias": torch.zeros(96)}))),
        code=0, reach=LOADED, decoder=True),
    hostile(22, "bias-beyond", both(
        IS.quantised(IS.gptq, IS.GPTQ), reworked(lambda t: t.update({f"{IS.UP}.bias": torch.ones(96)}))),
        "unexpected keys", f"{IS.UP}.bias", reach=LOADED),
    *(hostile(22, name, IS.quantised(write, claim), "no usable", found, "quantization_config")
      for name, write, claim, found in (
        ("group-zero", IS.gptq, {**IS.GPTQ, "group_size": 0}, "group_size"),
        ("group-text", IS.gptq, {**IS.GPTQ, "group_size": "x"}, "group_size"),
        ("bits-list", IS.awq, {**IS.AWQ, "bits": [4]}, "bits"),
        ("block-negative", IS.fp8, {**IS.FP8, "weight_block_size": [-1, 32]}, "weight_block_size"),
    )),
    *(hostile(22, name, IS.broken(write, claim, end, tensor), "of a quantised matrix", found, reach=LOADED)
      for name, write, claim, end, tensor, found in (
        ("scales-rows", IS.gptq, IS.GPTQ, ".scales", torch.rand(3, 96).half(), "(2, 96)"),
        ("zeros-shape", IS.gptq, IS.GPTQ, ".qzeros", IS.words(2, 11), "(2, 12)"),
        ("zeros-missing", IS.awq, IS.AWQ, ".qzeros", None, "not complete"),
        ("zeros-type", IS.awq, IS.AWQ, ".qzeros", lambda t: t.long(), "I64"),
        ("group-beyond", IS.gptq, IS.GPTQ, ".g_idx", torch.full((64,), 9).int(), "0..1"),
        ("group-negative", IS.gptq, IS.GPTQ, ".g_idx", torch.full((64,), -1).int(), "0..1"),
        ("codes-short", IS.gptq, IS.GPTQ, ".qweight", IS.words(7, 96), "(8, 96)"),
        ("codes-plain", IS.fp8, IS.FP8, ".weight", torch.rand(96, 64), "F32"),
        ("blocks-shape", IS.fp8, IS.FP8, ".weight_scale_inv", torch.rand(2, 2), "(3, 2)"),
        ("scale-missing", IS.int4, IS.INT4, ".weight_scale", None, "not complete"),
        ("scale-odd", IS.int4, IS.INT4, ".weight_scale", torch.rand(96, 3).half(), "divide 64"),
        ("shape-lies", IS.int4, IS.INT4, ".weight_shape", torch.tensor([2**40, 2**40]), "4 or 8 bits"),
        ("shape-negative", IS.int4, IS.INT4, ".weight_shape", torch.tensor([-96, -64]), "4 or 8 bits"),
        ("blocks-short", IS.nf4, IS.NF4, ".weight.absmax", torch.rand(5), "192"),
        ("table", IS.nf4, IS.NF4, ".weight.quant_map", torch.rand(16), "nf4"),
        ("state", IS.nf4, IS.NF4, ".weight.quant_state.bitsandbytes__nf4", IS.text([1]), "JSON"),
        ("state-shape", IS.nf4, IS.NF4, ".weight.quant_state.bitsandbytes__nf4",
         IS.text({"shape": [2**40, 2**40], "blocksize": 32}), "U8"),
        ("state-block", IS.nf4, IS.NF4, ".weight.quant_state.bitsandbytes__nf4",
         IS.text({"shape": [96, 64], "blocksize": 0}), "block size"),
    )),
    *(hostile(22, name, IS.quantised(IS.int4, claim), found, "quantization_config")
      for name, claim, found in (
        ("bits-text", IS.weights_say(num_bits="4"), "num_bits"), ("bits-three", IS.weights_say(num_bits=3), "3 bits"),
        ("group-word", IS.weights_say(group_size="x"), "group_size"),
        ("four-bit-float", IS.weights_say(type="float"), "4 bits, float"),
        ("groups-list", {**IS.INT4, "config_groups": [1]}, "config_groups"),
        ("weights-list", {**IS.INT4, "config_groups": {"0": {"weights": [4]}}}, "config_groups"),
    )),
    hostile(22, "block-zero", IS.quantised(IS.fp8, {**IS.FP8, "weight_block_size": [0, 32]}), "weight_block_size"),
    hostile(22, "endless-bits", IS.quantised(IS.gptq, {**IS.GPTQ, "bits": 2**70}), "cannot be read", f"{2**70} bits"),
    *(hostile(22, name, IS.quantised(write, claim), "of a quantised matrix is wrong", found, reach=LOADED)
      for name, write, claim, found in (
        ("bits-eight", IS.int4, IS.weights_say(num_bits=8), "4 bits in groups of 32"),
        ("group-other", IS.int4, IS.weights_say(group_size=48), "4 bits in groups of 32"),
        ("group-endless", IS.gptq, {**IS.GPTQ, "group_size": 2**62}, "(1, 64)"),
        ("block-endless", IS.fp8, {**IS.FP8, "weight_block_size": [10**18, 10**18]}, "(1, 1)"),
    )),
    *(hostile(22, name, IS.broken(write, claim, end, tensor), "of a quantised matrix", *found, reach=LOADED, extra=extra)
      for extra in ((), ("model.dtype=packed",)) for name, write, claim, end, tensor, *found in (
        (f"scales-whole{'-packed' * bool(extra)}", IS.gptq, IS.GPTQ, ".scales", torch.ones(2, 96).int(), "I32"),
        (f"scales-lost{'-packed' * bool(extra)}", IS.fp8, IS.FP8, ".weight_scale_inv", None, "not complete"),
        (f"scales-none{'-packed' * bool(extra)}", IS.int4, IS.INT4, ".weight_scale", torch.rand(96, 0).half(), "divide 64"),
    )),
    *(hostile(22, name, IS.broken(write, claim, end, tensor), "of a quantised matrix", *found, reach=LOADED)
      for name, write, claim, end, tensor, *found in (
        ("group-fraction", IS.gptq, IS.GPTQ, ".g_idx", torch.rand(64), "F32"),
        ("groups-short", IS.gptq, IS.GPTQ, ".g_idx", torch.zeros(32).int(), "(4, 96)"),
        ("codes-vector", IS.awq, IS.AWQ, ".qweight", IS.words(64), "not complete"),
        ("shape-not-a-number", IS.int4, IS.INT4, ".weight_shape", torch.tensor([torch.nan, 64.0]), "F32"),
        ("bytes-short", IS.int8, IS.INT8, ".SCB", torch.rand(5), "(96, 1)"),
        ("bytes-order", IS.int8, IS.INT8, ".weight_format", torch.tensor(2, dtype=torch.uint8), "row after row"),
        ("state-table", IS.nf4, IS.NF4, IS.STATE, IS.state(quant_type="fp4"), "fp4"),
        ("state-odd", IS.nf4, IS.NF4, IS.STATE, IS.state(blocksize=48), "divides the inputs, 64"),
        ("state-lost", IS.nf4, IS.NF4, IS.STATE, None, "not complete"),
        ("nested-lost", IS.nf4, IS.NF4, ".weight.absmax", torch.zeros(192, dtype=torch.uint8), "U8"),
    )),
    *(hostile(22, name, IS.nested(**wrong), "of a quantised matrix", found, reach=LOADED) for name, wrong, found in (
        ("nested-block", {"nested_blocksize": 0}, "nested_blocksize 0"),
        ("nested-offset", {"nested_offset": "x"}, "nested_offset 'x'"),
        ("nested-short", {"nested_blocksize": 64}, "(3,)"), ("nested-table", {"table": 3}, "(256,)"),
    )),
    hostile(22, "sound-nested", IS.nested(), code=0, reach=LOADED, extra=("model.dtype=packed",)),
    *(hostile(22, name, IS.broken(write, claim, end, tensor), "not numbers", reach=LOADED, answers=True, extra=extra)
      for name, write, claim, end, tensor, extra in (
        ("nan-scales", IS.int4, IS.INT4, ".weight_scale", torch.full((96, 2), torch.nan).half(), ()),
        ("nan-scales-packed", IS.int4, IS.INT4, ".weight_scale", torch.full((96, 2), torch.nan).half(), ("model.dtype=packed",)),
        ("nan-codes", IS.fp8, IS.FP8, ".weight", torch.full((96, 64), torch.nan).to(torch.float8_e4m3fn), ()),
        ("infinite-exponent", IS.fp8, IS.FP8, ".weight_scale_inv", torch.full((3, 2), 255, dtype=torch.uint8), ()),
    )),
    hostile(22, "codes-and-numbers", both(
        IS.quantised(IS.gptq, IS.GPTQ), reworked(lambda t: t.update({f"{IS.UP}.weight": torch.rand(96, 64)}))),
        "of a quantised matrix", ".weight and .qweight", reach=LOADED),
    *(hostile(22, f"{name}-without-a-claim", both(IS.quantised(write, {}), config_sets(quantization_config=None)),
              "quantised, but config.json does not say how", end, "quantization_config")
      for name, write, end in (
        ("awq", IS.awq, ".qweight"), ("gptq", IS.gptq, ".qweight"), ("fp8", IS.fp8, ".weight_scale_inv"),
        ("exl2", IS.exl2, ".q_weight"), ("nvfp4", IS.nvfp4, ".weight_scale"),
    )),
    *(hostile(22, claim["quant_method"], IS.quantised(write, claim), "cannot be read", found, "config.json: quantization_config",
              "gptq (4 and 8 bit)", "plain weights and dtype=int8 or nf4")
      for write, claim, found in (
        (IS.nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, NVFP4"),
        (IS.hqq, {"quant_method": "hqq"}, "found hqq"), (IS.eetq, {"quant_method": "eetq"}, "found eetq"),
        (IS.torchao, {"quant_method": "torchao", "quant_type": {}}, "found torchao"),
        (IS.exl2, {"quant_method": "exl2", "bits": 4.0}, "found exl2"),
        (IS.fp8, {"quant_method": "fbgemm_fp8"}, "found fbgemm_fp8"),
    )),
]  # fmt: skip
NOT_BY_DEEPSPEED = [row for row in QUANTISED if row.reach == LOADED]  # it refuses their weights


def architecture(kind: str, says: str, **sizes: object) -> Hostile:
    """The config.json of an architecture that is not supported, by the keys that it has."""
    content = as_json({"model_type": kind, "vocab_size": 300, **sizes})
    return hostile(27, kind, replaced("config.json", content), "the architecture is not supported", says,
                   f"found {kind}", "llama")  # fmt: skip


def projected(path: Path) -> None:
    """As opt-350m: embeddings narrower than the layers."""
    config_sets(model_type="opt", word_embed_proj_dim=32)(path)
    reworked(lambda t: t.update({EMBEDDING: t[EMBEDDING][:, :32].contiguous()}))(path)


ARCHITECTURES = [
    architecture("bloom", "max_position_embeddings", hidden_size=64, n_layer=2, n_head=4),
    architecture("mamba2", "max_position_embeddings", hidden_size=64, num_hidden_layers=2, num_heads=8),
    architecture("mpt", "num_attention_heads", d_model=64, n_layers=2, n_heads=4, max_seq_len=128),
    architecture("rwkv", "num_attention_heads", hidden_size=64, num_hidden_layers=2, context_length=128),
    architecture("xglm", "num_attention_heads", d_model=64, num_layers=2, attention_heads=4, ffn_dim=96),
    architecture("gemma3n", "num_attention_heads", text_config={"hidden_size": 64, "num_attention_heads": 4}),
    architecture("gemma3n_text", "intermediate_size", hidden_size=64, num_hidden_layers=2,
                 num_attention_heads=4, intermediate_size=[96, 96]),
    hostile(27, "projected", projected, "the architecture is not supported", "word_embed_proj_dim", "found opt"),
    hostile(22, "no-layers", config_sets(num_hidden_layers=None), "has no usable num_hidden_layers", "None"),
]  # fmt: skip

SIZES = [
    hostile(22, "many-twins", twins, "config.json is not JSON", "'k399999' is given twice"),
    hostile(22, "endless-labels", config_sets(num_labels=10**9), "num_labels 1000000000", "at most 100000"),
    hostile(22, "endless-labels-within", config_sets(text_config={"num_labels": 10**9}), "num_labels 1000000000"),
    hostile(22, "endless-attention", config_sets(model_type="gpt_neo", attention_types=[[["global"], 10**9]]),
            "attention_types 1000000000"),
    hostile(15, "long-normalizer", sets("tokenizer.json", **nested_steps("normalizer", "normalizers")),
            "makes texts longer", "normalizer", "allowed 32 times"),
    hostile(15, "long-by-expression", sets("tokenizer.json", **nested_steps("normalizer", "normalizers", "Regex")),
            "makes texts longer", "normalizer"),
    hostile(15, "long-normalizer-elsewhere", other_tokenizer, "makes texts longer", "tokenizer.4.0.json"),
    hostile(24, "tokenizer-outside", tokenizer_outside, "names a file outside", "../outside/tokenizer.4.0.json"),
    hostile(15, "long-decoder", sets("tokenizer.json", **nested_steps("decoder", "decoders")),
            "makes texts longer", "decoder"),
    hostile(15, "long-template", lambda p: checkpoints.edit(p / "tokenizer.json", texts_many_times),
            "makes texts longer", "post_processor"),
]  # fmt: skip

LLAMA = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 64,
    "llama.block_count": 1, "llama.feed_forward_length": 96, "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "c", "d"],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": struct.pack("<IB", 7, 1),
}  # fmt: skip
TABLE = ("token_embd.weight", (64, 4), 0, 0)


def lying_gguf(
    name: str,
    *says: str,
    row: int = 20,
    size: int = 0,
    without: str = "",
    reach: str = CONFIG,
    code: int = 4,
    **wrong: object,
) -> Hostile:
    """A GGUF file of one table: other keys, or other arguments of `gguf_bytes`."""
    how = {key: wrong.pop(key) for key in ("tensors", "start", "counts", "data") if key in wrong}
    keys = {key: value for key, value in (LLAMA | wrong).items() if key != without}
    content = gguf_bytes(keys, **{"tensors": [TABLE], "data": 1024, **how})  # type: ignore[arg-type]
    damage = gguf(content, size=size)
    return hostile(row, f"gguf-{name}", damage, *says, reach=reach, code=code, decoder=reach == LOADED)


def listed(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + content


MANY = 2**40
GGUF = [
    lying_gguf("empty-table", "damaged or cut short", "byte", data=0),
    lying_gguf("magic", "not a GGUF file", "GGML", start=b"GGML\x03\0\0\0"),
    lying_gguf("version", "GGUF version", "found 1", start=b"GGUF\x01\0\0\0"),
    lying_gguf("big-endian", "GGUF version", "little-endian", start=b"GGUF\0\0\0\x03"),
    lying_gguf("many-tensors", f"{2**62} tensors", counts=(2**62, len(LLAMA))),
    lying_gguf("many-keys", f"{2**62} keys", counts=(1, 2**62)),
    lying_gguf("keys-beyond", "damaged or cut short", counts=(1, len(LLAMA) + 1)),
    lying_gguf("long-text", f"{2**60} characters", x=struct.pack("<IQ", 8, 2**60)),
    lying_gguf("many-texts", f"{2**61} texts", x=listed(8, 2**61)),
    lying_gguf("many-numbers", f"{MANY} numbers", x=listed(0, MANY)),
    lying_gguf("sparse-numbers", f"{2**26} numbers", x=listed(0, 2**26), size=2**36),
    lying_gguf("sparse-texts", f"{2**22} texts", x=listed(8, 2**22), size=2**36),
    lying_gguf("nested-lists", "metadata of kind 9", x=listed(9, 1)),
    lying_gguf("kind", "metadata of kind 77", x=struct.pack("<I", 77)),
    lying_gguf("not-utf8", "not UTF-8", x=struct.pack("<IQ", 8, 1) + b"\xff"),
    lying_gguf("alignment", "general.alignment 0", **{"general.alignment": 0}),
    lying_gguf("endless-shape", "damaged or cut short", tensors=[("token_embd.weight", (2**62, 2**62), 0, 0)]),
    lying_gguf("no-shape", "a tensor of 0 dimensions", tensors=[("token_embd.weight", (), 0, 0)]),
    lying_gguf("zero-shape", "(4, 0)", tensors=[("token_embd.weight", (0, 4), 0, 0)]),
    lying_gguf("half-block", "blocks of 256", tensors=[("token_embd.weight", (64, 4), 12, 0)]),
    lying_gguf("place", "(4, 64) at byte", tensors=[("token_embd.weight", (64, 4), 0, 2**50 - 480)]),
    lying_gguf("overlapping", "tensors that overlap", tensors=[TABLE, ("output.weight", (64, 4), 0, 0)]),
    lying_gguf("twice", "twice a tensor", "token_embd", tensors=[TABLE, TABLE]),
    lying_gguf("format", "found IQ4_XS", "Q4_K", tensors=[("token_embd.weight", (256, 4), 23, 0)]),
    lying_gguf("unknown-format", "found 77", "Q4_K", tensors=[("token_embd.weight", (64, 4), 77, 0)]),
    lying_gguf("iq4-nl", "found IQ4_NL", "use a copy", tensors=[("token_embd.weight", (32, 4), 20, 0)]),
    lying_gguf("alignment-three", "general.alignment 3", **{"general.alignment": 3}),
    lying_gguf("alignment-text", "general.alignment 'x'", **{"general.alignment": "x"}),
    lying_gguf("unaligned", "damaged or cut short", "at byte", tensors=[("token_embd.weight", (64, 4), 0, 8)], data=2048),
    lying_gguf("five-dimensions", "a tensor of 5 dimensions", tensors=[("token_embd.weight", (64, 4, 1, 1, 1), 0, 0)]),
    lying_gguf("many-truths", f"{2**50} numbers", x=listed(7, 2**50)),
    lying_gguf("no-architecture", "architecture of the GGUF file", "found None", row=27, without="general.architecture"),
    lying_gguf("no-heads", "llama.attention.head_count", "found 0", row=22, **{"llama.attention.head_count": 0}),
    lying_gguf("odd-heads", "KV heads", "4 and 3", row=22, **{"llama.attention.head_count_kv": 3}),
    lying_gguf("endless-head", "do not fit", row=22, code=5, reach=FILES, **{"llama.attention.key_length": 2**30}),
    lying_gguf("scaling", "rope.scaling.type", "found evil", row=22, **{"llama.rope.scaling.type": "evil"}),
    lying_gguf("theta", "rope.freq_base", "found 0.0", row=22, **{"llama.rope.freq_base": 0.0}),
    lying_gguf("factors", "a factor is not a positive number", row=22, tensors=[TABLE, ("rope_freqs.weight", (8,), 0, 1024)], data=2048),
    lying_gguf("one-token", "tokenizer cannot be read", row=15, reach=FILES, **{"tokenizer.ggml.tokens": ["a"] * 4, "tokenizer.ggml.merges": []}),
    lying_gguf("few-scores", "no score for each token", row=15, reach=FILES, **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": listed(6, 2, bytes(8))}),
    lying_gguf("other-tokenizer", "tokenizer is not known", "'rwkv'", row=15, reach=FILES, **{"tokenizer.ggml.model": "rwkv"}),
    lying_gguf("name", "a tensor by the name of", tensors=[("\x1b[2J", (64, 4), 0, 0)]),
    lying_gguf("architecture", "architecture of the GGUF file", "found clip", "qwen3", row=27, **{"general.architecture": "clip"}),
    lying_gguf("experts", "llama with experts", row=27, **{"llama.expert_count": 8}),
    lying_gguf("no-embedding", "no token_embd.weight", row=21, tensors=[("output.weight", (64, 4), 0, 0)]),
    lying_gguf("no-size", "llama.block_count", "found nothing", row=22, without="llama.block_count"),
    lying_gguf("endless-layers", "llama.block_count", f"found {2**31 - 1}", row=22, **{"llama.block_count": 2**31 - 1}),
    lying_gguf("list-of-heads", "attention.head_count", "a list of 2", row=22, **{"llama.attention.head_count": listed(4, 2, bytes(8))}),
    lying_gguf("epsilon", "layer_norm_rms_epsilon", "nan", row=22, **{"llama.attention.layer_norm_rms_epsilon": float("nan")}),
    lying_gguf("width", "(4, 64)", "(4, 128)", row=22, **{"llama.embedding_length": 128}),
    lying_gguf("more-tokens", "tokens are not those", "5 tokens", row=15, reach=FILES, **{"tokenizer.ggml.tokens": list("abcde")}),
    lying_gguf("no-tokens", "has no tokenizer", "next to the GGUF", row=15, reach=FILES, without="tokenizer.ggml.tokens"),
    lying_gguf("splitting", "tokenizer is not known", "'evil'", "next to the GGUF", row=15, reach=FILES, **{"tokenizer.ggml.pre": "evil"}),
    lying_gguf("merge", "a merge is not two pieces", row=15, reach=FILES, **{"tokenizer.ggml.merges": ["a b c"]}),
    lying_gguf("only-table", "missing keys", "input_layernorm", row=21, reach=LOADED, **{"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.tokens": ["a", "b", "ab"]}),
    hostile(19, "gguf-truncated", gguf(gguf_bytes(LLAMA, [TABLE], 1024)[:-7]), "damaged or cut short", "(4, 64)"),
    hostile(19, "gguf-lfs-pointer", gguf(POINTER.encode()), "Git LFS pointer"),
    hostile(19, "gguf-empty", gguf(b""), "damaged or cut short", "0 bytes"),
    hostile(18, "gguf-of-several", gguf(gguf_bytes(LLAMA | {"split.count": 3}, [TABLE], 1024)), "one of several", "3 by its header"),
    hostile(18, "gguf-missing-shard", gguf(gguf_bytes(LLAMA, [TABLE], 1024), "m-00001-of-00003.gguf"), "a file of the model is missing", "m-00002-of-00003"),
    hostile(18, "gguf-shards", gguf(gguf_bytes(LLAMA, [TABLE], 1024), "m-00001-of-00001.gguf"), "missing keys", reach=LOADED, extra=(), decoder=True),
    hostile(18, "two-ggufs", both(gguf(b"", "b.gguf"), replaced("a.gguf", b"")), "several GGUF models", "a.gguf, b.gguf", "path="),
    hostile(24, "gguf-pipe", both(gguf(b""), removed("model.gguf"), lambda p: os.mkfifo(p / "model.gguf")), "not a regular file", "model.gguf"),
    hostile(24, "gguf-link", both(gguf(gguf_bytes(LLAMA, [TABLE], 1024)), linked_outside("model.gguf")), "leaves the folder"),
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
