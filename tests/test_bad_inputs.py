"""Bad input, walked as a table: each case gives one line and its exit code before anything heavy.

The row numbers are those of the table of bad inputs in the reliability research; 0 stands for cases
that it lacks.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from llama_ssp.tasks import pair
from tests import checkpoints
from tests.checkpoints import INDEX, copied, edit, join, split
from tests.conftest import Command, Saved

CONFIG, FILES, LOADED = "config", "files", "loaded"
"""How far a case may come: no torch is needed, no weights are read, weights are read."""

PROMPT = 'task.prompts=["hello"]'
LARGE = ("model=7B", "model.weights=synthetic", "draft=none")
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Making:
    """Where a case builds its files."""

    folder: Path
    saved: Saved

    def model(self, change: Callable[[Path], object] = lambda _: None, sharded: bool = False) -> Path:
        """A copy of a model folder, changed."""
        source = self.saved.sharded if sharded else self.saved.whole
        path = copied(source, self.folder / f"model{len(list(self.folder.iterdir()))}")
        change(path)
        return path

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


Build = Callable[[Making], list[str]]


@dataclass(frozen=True)
class Case:
    row: int
    name: str
    build: Build | tuple[str, ...]
    code: int
    holds: tuple[str, ...]
    reach: str = CONFIG
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)

    def arguments(self, making: Making) -> list[str]:
        return list(self.build) if isinstance(self.build, tuple) else self.build(making)

    def __str__(self) -> str:
        return f"{self.row}-{self.name}"


def usage(row: int, name: str, *overrides: str, holds: tuple[str, ...], **more: Any) -> Case:
    """A case of the command line alone."""
    return Case(row, name, (PROMPT, *overrides), 2, holds, **more)


def target(
    row: int, name: str, change: Callable[[Path], object], *holds: str, reach: str = CONFIG,
    sharded: bool = False, code: int = 4, extra: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    """A case of one model folder."""

    def build(making: Making) -> list[str]:
        return [PROMPT, *alone(making.model(change, sharded)), *extra]

    return Case(row, name, build, code, holds, reach)


def duo(
    row: int, name: str, change: Callable[[Path], object], *holds: str, whose: str = "draft", code: int = 4
) -> Case:
    """A case of a sound model and a changed one."""

    def build(making: Making) -> list[str]:
        paths = {"model": making.saved.whole, "draft": making.saved.whole, whose: making.model(change)}
        return [PROMPT, *both(paths["model"], paths["draft"])]

    return Case(row, name, build, code, holds, FILES)


def prompt_file(row: int, name: str, file: str, content: bytes | str, *holds: str, code: int = 3) -> Case:
    return Case(row, name, lambda m: [f"task.prompt_file={m.write(file, content)}"], code, holds)


def alone(path: Path) -> list[str]:
    return ["model=local", f"model.path={path}", "draft=none", "task.max_new_tokens=4", "seed=1"]


def both(model: Path, draft: Path) -> list[str]:
    return [
        "model=local", f"model.path={model}", "draft=local", f"draft.path={draft}",
        "task.max_new_tokens=4", "seed=1",
    ]  # fmt: skip


def with_tokenizer(made: Callable[[], Tokenizer], **settings: Any) -> Callable[[Path], None]:
    return lambda path: checkpoints.write_tokenizer(path, made(), **settings)


def config_sets(**values: Any) -> Callable[[Path], None]:
    return lambda path: edit(path / "config.json", lambda c: c.update(values))


def reworked(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """A weights file written again with other tensors."""

    def apply(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS, {"format": "pt"})

    return apply


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A weights file whose header claims something else."""

    def apply(path: Path) -> None:
        content, data = split(path / WEIGHTS)
        change(content)
        join(path / WEIGHTS, content, data)

    return apply


def bytes_of(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: (path / WEIGHTS).write_bytes(change((path / WEIGHTS).read_bytes())) and None


def maps_to(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        edit(path / INDEX, lambda c: c["weight_map"].update({"model.norm.weight": name}))

    return apply


def linked_outside(path: Path) -> None:
    outside = path.parent / "outside.safetensors"
    (path / WEIGHTS).rename(outside)
    (path / WEIGHTS).symlink_to(outside)


def pipe(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return apply


def renamed(old: str, new: str) -> Callable[[Path], object]:
    return lambda path: (path / old).rename(path / new)


def removed(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def replaced(name: str, content: bytes | str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


def reordered() -> Tokenizer:
    """The same tokens; two of them have changed their ids."""
    content = json.loads(checkpoints.tokenizer().to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return Tokenizer.from_str(json.dumps(content))


def unmerged() -> Tokenizer:
    """The same tokens; none is ever made of two others."""
    content = json.loads(checkpoints.tokenizer().to_str())
    content["model"]["merges"] = []
    return Tokenizer.from_str(json.dumps(content))


def private(name: str, content: str) -> Build:
    return lambda m: ["--config-dir", str(m.write(f"conf/{name}", content).parents[name.count("/")]), PROMPT]


def linked_config(making: Making) -> list[str]:
    making.write("elsewhere/evil.yaml", "hydra: {}")
    (making.folder / "conf").mkdir()
    (making.folder / "conf" / "model").symlink_to(making.folder / "elsewhere")
    return ["--config-dir", str(making.folder / "conf"), PROMPT]


def occupied(making: Making) -> list[str]:
    return [PROMPT, f"out={making.write('taken', 'a file')}"]


def narrow_draft(making: Making) -> list[str]:
    """A draft that has the tokenizer's tokens, but not logits for all of them."""
    draft = checkpoints.save(making.folder / "draft", made=checkpoints.tokenizer(), vocab_size=290)
    return [PROMPT, *both(making.saved.whole, draft)]


LONG = "a" * (16 * 2**20 + 1)
DEEP = '{"prompt": ' + "[" * 100_000

SETTINGS = [
    usage(1, "unknown", "speculation.kk=5", holds=("unknown key speculation.kk", "speculation.k?")),
    usage(1, "unknown-leaf", "temperature=1", holds=("unknown key temperature", "sampling.temperature")),
    usage(1, "unknown-added", "++speculation.zz=1", holds=("unknown key speculation.zz",)),
    usage(1, "unknown-option", "model=llama7", holds=("there is no model=llama7", "allowed", "7B")),
    usage(1, "unknown-task", "task=chat", holds=("there is no task=chat", "generate")),
    usage(1, "unknown-flag", "--verbose", holds=("unknown flag --verbose",)),
    usage(1, "no-value", "hello", holds=("an override cannot be read", "hello", "quote")),
    usage(1, "group-null", "draft=null", holds=("draft=null", "draft=none")),
    usage(1, "group-empty", "sampling=", holds=("sampling=", "greedy")),
    usage(1, "deleted", "~speculation.k", holds=("~speculation.k is refused",)),
    usage(1, "deleted-group", "~draft", holds=("~draft is refused", "draft=none")),
    usage(1, "appended", "+speculation.k=3", holds=("speculation.k",)),
    usage(1, "draft-none-path", "draft=none", "draft.path=/x", holds=("draft.path", "draft=none")),
    usage(1, "flag-value", "--cfg", "jobs", holds=("--cfg needs a value", "'jobs'", "job")),
    usage(2, "text-as-int", "speculation.k=abc", holds=("speculation.k", "'abc'", "a whole number")),
    usage(2, "text-as-float", "sampling.top_p=high", holds=("sampling.top_p", "'high'", "a number")),
    usage(2, "text-as-bool", "task.chat=maybe", holds=("task.chat", "'maybe'", "true or false")),
    usage(2, "bad-enum", "model.dtype=fp17", holds=("model.dtype", "'fp17'", "bf16")),
    usage(2, "text-as-list", "task.stop=x", holds=("task.stop is not a list", "a list")),
    usage(2, "word-in-list", "sampling.bad_tokens=[a]", holds=("bad_tokens", "'a'", "a whole number")),
    usage(2, "nested-list", "task.stop=[[[[a]]]]", holds=("task.stop", "a list of text")),
    usage(2, "map-in-list", "task.stop=[{a:1}]", holds=("task.stop", "a list of text")),
    usage(2, "deep", "task.stop=" + "[" * 1000, holds=("an override cannot be read",)),
    usage(2, "null", "sampling.temperature=null", holds=("sampling.temperature may not be null",)),
    usage(2, "interpolated", "task.stop=${oc.env:HOME}", holds=("task.stop", "a list")),
    usage(2, "no-such-interpolation", "out=${nope}", holds=("nope",)),
    usage(2, "sweep", "seed=1,2", holds=("seed", "--multirun")),
    usage(2, "empty-path", "model=local", "model.path=", holds=("model.path is empty",)),
    usage(2, "empty-out", "out=", holds=("out is empty",)),
    usage(4, "negative", "speculation.k=-1", holds=("speculation.k", "-1", "[0, 64]")),
    usage(4, "huge", "speculation.k=1000000000", holds=("speculation.k", "[0, 64]")),
    usage(4, "fraction", "speculation.k=2.5", holds=("speculation.k", "'2.5'", "a whole number")),
    usage(4, "truth", "speculation.k=true", holds=("speculation.k", "'True'", "a whole number")),
    usage(4, "k-max", "speculation.k_max=0", holds=("speculation.k_max", "[1, 64]")),
    usage(4, "ngram", "speculation.ngram_min=5", holds=("speculation.ngram_max", "[5, 32]")),
    usage(6, "negative", "sampling.temperature=-1", holds=("sampling.temperature", "0 means argmax")),
    usage(6, "nan", "sampling.temperature=nan", holds=("sampling.temperature", "found nan")),
    usage(6, "infinite", "sampling.temperature=inf", holds=("sampling.temperature", "found inf")),
    usage(6, "vanishing", "sampling.temperature=1e-40", holds=("sampling.temperature", "0 means argmax")),
    usage(8, "zero", "sampling.top_p=0", holds=("sampling.top_p", "(0.0, 1.0]")),
    usage(8, "above-one", "sampling.top_p=1.1", holds=("sampling.top_p", "1.1")),
    usage(8, "nan", "sampling.top_p=nan", holds=("sampling.top_p", "found nan")),
    usage(8, "min-p", "sampling.min_p=-0.1", holds=("sampling.min_p",)),
    usage(9, "negative", "sampling.top_k=-1", holds=("sampling.top_k", "0 turns it off")),
    usage(9, "penalty", "sampling.repetition_penalty=0", holds=("sampling.repetition_penalty",)),
    usage(9, "bias-nan", "+sampling.logit_bias={5:nan}", holds=("sampling.logit_bias.5", "bad_tokens")),
    usage(9, "bias-huge", "+sampling.logit_bias={5:1e39}", holds=("sampling.logit_bias.5",)),
    usage(9, "bias-token", "+sampling.logit_bias={512:1}", holds=("logit_bias token", "512", "[0, 511]")),
    usage(9, "bias-key", "+sampling.logit_bias={abc:1}", holds=("sampling.logit_bias",)),
    usage(9, "bias-set", "sampling.logit_bias={5:1}", holds=("+sampling.logit_bias={",)),
    usage(9, "bias-dotted", "+sampling.logit_bias.5=1", holds=("+sampling.logit_bias={",)),
    usage(9, "banned-token", "sampling.bad_tokens=[512]", holds=("bad_tokens token", "[0, 511]")),
    usage(
        9,
        "banned-all",
        f"sampling.bad_tokens={list(range(512))}".replace(" ", ""),
        holds=("forbids every token",),
    ),
    usage(10, "zero", "task.max_new_tokens=0", holds=("task.max_new_tokens", "found 0")),
    usage(10, "past-context", "task.max_new_tokens=1024", holds=("1024", "1023", "context of 1024")),
    usage(10, "min-above-max", "sampling.min_new_tokens=200", holds=("min_new_tokens", "found 200")),
    usage(11, "negative", "seed=-1", holds=("seed", "found -1")),
    usage(11, "huge", f"seed={2**63}", holds=("seed", str(2**63))),
    usage(12, "lenience", "+speculation.lenience=0.9", holds=("not lossless", "lenience")),
    usage(12, "typical", "+speculation.typical_acceptance=true", holds=("not lossless", "typical")),
    usage(12, "ensemble", "+speculation.ensemble_weight=0.5", holds=("not lossless", "ensemble")),
    usage(28, "heads", "model.n_heads=6", holds=("model.n_heads", "6 and 4")),
    usage(31, "no-such-device", "placement.target_device=tpu", holds=("target_device", "'tpu'", "cuda:N")),
    usage(32, "no-gib", "cluster.gib=nan", holds=("cluster.gib", "found nan")),
    usage(36, "no-patience", "placement.timeout_s=0.5", holds=("placement.timeout_s", "[1.0, 86400.0]")),
    usage(46, "hydra-run-dir", "hydra.run.dir=../../x", holds=("Hydra's own settings", "out=FOLDER")),
    usage(46, "task-name", "task.name=../../x", holds=("task.name is no task", "generate")),
    usage(1, "unknown-experiment", "experiment=chen", holds=("experiment=chen", "mean experiment=chen2023")),
    usage(
        10, "overlap-beside", "speculation.overlap=ahead", holds=("on ranks of its own only", "placement=own")
    ),
    usage(10, "overlap-word", "speculation.overlap=always", holds=("speculation.overlap", "ahead")),
    usage(10, "draft-patience", "placement.draft_timeout_s=0", holds=("placement.draft_timeout_s",)),
    usage(46, "hydra-added", "+hydra.job.chdir=true", holds=("Hydra's own settings",)),
    usage(46, "hydra-group", "hydra/launcher=basic", holds=("Hydra's own settings",)),
    usage(46, "hydra-package", "+model@hydra.run=tiny", holds=("Hydra's own settings",)),
    usage(46, "config-path", "--config-path=/tmp", holds=("--config-path is refused",)),
    usage(46, "config-path-begun", "--config-pa=/tmp", holds=("unknown flag --config-pa",)),
    usage(46, "config-dir-begun", "--config-d=/tmp", holds=("unknown flag --config-d",)),
    usage(46, "rerun", "--experimental-rerun=x.pickle", holds=("--experimental-rerun is refused",)),
    Case(46, "private-root", private("run.yaml", "a: 1"), 2, ("private run.yaml",)),
    usage(46, "no-config-dir", "--config-dir=/no/such", holds=("--config-dir is not a folder", "/no/such")),
]

PRIVATE = [
    Case(46, f"private-{name}", build, 2, ("private config", *holds))
    for name, build, holds in [
        ("target", private("model/a.yaml", "name: a\n_target_: os.system"), ("_target_", "a.yaml")),
        ("factory", private("model/a.yaml", "x: {(): builtins.print}"), ("()",)),
        ("class", private("model/a.yaml", "x: [{class: logging.Handler}]"), ("class",)),
        ("hydra", private("model/a.yaml", "# @package _global_\nhydra: {run: {dir: /x}}"), ("hydra",)),
        ("dotted", private("model/a.yaml", "hydra.run.dir: /x"), ("hydra.run.dir",)),
        ("header", private("model/a.yaml", "# @package hydra.run\ndir: /x"), ("hydra.run",)),
        ("defaults", private("experiment/a.yaml", "defaults: [override hydra/launcher: b]"), ("hydra",)),
        ("package", private("experiment/a.yaml", "defaults: [/model@hydra.job: tiny]"), ("hydra.job",)),
        ("group", private("hydra/launcher/a.yaml", "x: 1"), ("a hydra/ group",)),
        ("link", linked_config, ("a link to a folder",)),
    ]
] + [Case(46, "private-not-yaml", private("model/a.yaml", "{"), 2, ("not yaml", "a.yaml"))]

TOKENIZERS = [
    duo(16, "fewer-tokens", with_tokenizer(lambda: checkpoints.tokenizer(280)), "different tok", "300"),
    duo(16, "other-ids", with_tokenizer(reordered), "different tokenizers", "2 differ", "'a'"),
    duo(16, "other-merges", with_tokenizer(unmerged), "cut text differently", "the same merges"),
    Case(15, "narrow-draft", narrow_draft, 4, ("300 and 290 logits", "10 tokens only"), FILES),
    duo(15, "no-tokenizer", removed("tokenizer.json"), "the tokenizer cannot be read", "tokenizer.json"),
    duo(15, "damaged", replaced("tokenizer.json", '{"a": 1}'), "the tokenizer cannot be read"),
    duo(15, "damaged-target", replaced("tokenizer.json", "{"), "the tokenizer cannot be read", whose="model"),
    Case(
        15, "one-synthetic",
        lambda m: [PROMPT, *alone(m.saved.whole)[:2], "draft=tiny_draft", "task.max_new_tokens=4"], 4,
        ("one model has a tokenizer", "synthetic"), FILES,
    ),
    target(
        17, "no-chat-template", lambda _: None, "no chat template", reach=FILES, code=3,
        extra=("task.chat=true",),
    ),
    target(
        17, "broken-chat-template",
        with_tokenizer(checkpoints.tokenizer, chat_template="{{ raise_exception('no') }}"),
        "chat template", "no", reach=FILES, code=3, extra=("task.chat=true",),
    ),
]  # fmt: skip

CHECKPOINTS = [
    target(
        18, "missing-shard", removed("model-00002-of-00005.safetensors"),
        "a shard is missing", "model-00002-of-00005", INDEX, sharded=True,
    ),
    target(18, "no-weights", removed(WEIGHTS), "holds no weights", "model.safetensors"),
    target(18, "no-config", removed("config.json"), "there is no config.json"),
    Case(
        18, "no-folder", (PROMPT, "model=local", "model.path=/no/such", "draft=none"), 4,
        ("model.path is not a folder", "/no/such"),
    ),
    Case(
        18, "no-user", (PROMPT, "model=local", "model.path='~nobody-here/x'", "draft=none"), 4,
        ("not a folder", "nobody-here"),
    ),
    Case(
        18, "not-downloaded", (PROMPT, "model=30B", "draft=none"), 4,
        ("30B is not at hand", "huggyllama/llama-30b", "synthetic"),
    ),
    target(19, "truncated", bytes_of(lambda b: b[:-7]), "damaged or cut short", "bytes where"),
    target(19, "lfs-pointer", replaced(WEIGHTS, "version https://git-lfs"), "git lfs pull"),
    target(20, "empty", replaced(WEIGHTS, b""), "damaged or cut short", "a file of 0"),
    target(20, "cut-header", bytes_of(lambda b: b[:100]), "damaged or cut short"),
    target(20, "huge-header", bytes_of(lambda b: struct.pack("<Q", 2**63) + b[8:]), "9223372036854775808"),
    target(20, "trailing", bytes_of(lambda b: b + b"x"), "damaged or cut short"),
    target(20, "no-json", lambda p: join(p / WEIGHTS, b"{]", b""), "not a table of tensors"),
    target(20, "deep-json", lambda p: join(p / WEIGHTS, b"[" * 10**5, b""), "not a table of tensors"),
    target(20, "negative-shape", header(lambda h: h["model.norm.weight"].update(shape=[-64])), "(-64,)"),
    target(20, "wrong-bytes", header(lambda h: h["model.norm.weight"].update(dtype="F16")), "in F16"),
    target(20, "unknown-dtype", header(lambda h: h["model.norm.weight"].update(dtype="F4")), "found F4"),
    target(
        21, "lacks", maps_to("model-00001-of-00005.safetensors"), "model-00001-of-00005.safetensors lacks",
        "model.norm.weight", sharded=True,
    ),
    target(
        21, "extra", lambda p: edit(p / INDEX, lambda c: c["weight_map"].pop("model.norm.weight")),
        "holds unlisted", "model.norm.weight", sharded=True,
    ),
    target(
        21, "twice", lambda p: join(p / WEIGHTS, b'{"a": {}, "a": {}}', b""), "'a' stands twice",
    ),
    target(21, "no-map", replaced(INDEX, "{}"), "no weight_map", sharded=True),
    target(
        21, "missing-tensor", reworked(lambda t: t.pop("model.norm.weight")), "missing keys",
        "model.norm.weight", reach=LOADED,
    ),
    target(
        21, "unexpected", reworked(lambda t: t.update({"other.weight": torch.zeros(2)})), "unexpected keys",
        "other.weight", reach=LOADED,
    ),
    target(22, "vocabulary", config_sets(vocab_size=299), "embed_tokens", "(300, 64)", "(299, 64)"),
    target(
        22, "shape", reworked(lambda t: t.update({"model.norm.weight": torch.ones(32)})), "mismatched keys",
        "model.norm.weight", reach=LOADED,
    ),
    target(22, "text-size", config_sets(num_key_value_heads="two"), "num_key_value_heads", "'two'"),
    target(22, "list-size", config_sets(intermediate_size=[96]), "intermediate_size", "[96]"),
    target(22, "negative-size", config_sets(num_hidden_layers=-2), "num_hidden_layers", "-2"),
    target(22, "head-groups", config_sets(num_key_value_heads=3), "KV heads", "4 and 3"),
    target(22, "not-json", replaced("config.json", "{"), "config.json is not JSON"),
    target(22, "deep-config", replaced("config.json", "[" * 10**5), "config.json is not JSON"),
    target(22, "not-utf8", replaced("config.json", b"\xff\xfe"), "config.json is not JSON"),
    target(22, "array", replaced("config.json", "[]"), "not a JSON object"),
    target(
        22, "preset", lambda _: None, "not a tiny", "n_layers",
        extra=("model=tiny", "model.weights=checkpoint"),
    ),
    target(
        23, "nan", reworked(lambda t: t["model.norm.weight"].fill_(torch.nan)), "not a finite number",
        "model.norm.weight", reach=LOADED, extra=("model.scan=true",),
    ),
    target(24, "parent", maps_to("../x.safetensors"), "leaves the folder", "../x", sharded=True),
    target(24, "absolute", maps_to("/etc/passwd"), "leaves the folder", "/etc/passwd", sharded=True),
    target(24, "number", maps_to(7), "leaves the folder", sharded=True),  # type: ignore[arg-type]
    target(24, "nul", maps_to("a\0b"), "a shard is missing", sharded=True),
    target(24, "link", linked_outside, "not a plain file of the folder", "outside.safetensors"),
    target(24, "pipe", pipe(WEIGHTS), "not a regular file", WEIGHTS),
    target(24, "config-pipe", pipe("config.json"), "not a regular file", "config.json"),
    target(24, "tokenizer-pipe", pipe("tokenizer.json"), "not a regular file", "tokenizer.json"),
    target(24, "generation-pipe", pipe("generation_config.json"), "not a regular file", "generation_config"),
    target(25, "bin", renamed(WEIGHTS, "pytorch_model.bin"), "pickled", "pytorch_model", "save_pretrained"),
    target(25, "pth", renamed(WEIGHTS, "consolidated.00.pth"), "pickled", "consolidated.00.pth"),
    target(26, "auto-map", config_sets(auto_map={"AutoConfig": "evil.C"}), "code of its own", "auto_map"),
    target(
        26, "tokenizer-auto-map", with_tokenizer(checkpoints.tokenizer, auto_map={"AutoTokenizer": ["e.T"]}),
        "code of its own", "tokenizer_config.json",
    ),
    target(27, "unknown", config_sets(model_type="nonesuch"), "nonesuch", "llama", reach=FILES),
    target(27, "no-type", config_sets(model_type=None), "no model_type"),
    target(27, "encoder", config_sets(model_type="clip_text_model"), "clip_text_model", "llama", reach=FILES),
]  # fmt: skip

MACHINES = [
    Case(30, "not-a-number", (PROMPT,), 5, ("WORLD_SIZE", "'many'", "torchrun"), env={"WORLD_SIZE": "many"}),
    Case(
        30,
        "ranks",
        (PROMPT,),
        5,
        ("not by torchrun", "no RANK", "--nproc-per-node"),
        FILES,
        env={"WORLD_SIZE": "2"},
    ),
    Case(
        30,
        "heads",
        (PROMPT, "model.n_heads=7", "model.n_kv_heads=7", "placement=leader"),
        5,
        ("7 heads", "8 ranks", "1..7 ranks"),
        env={"WORLD_SIZE": "8"},
    ),
    Case(31, "no-gpu", (PROMPT, "placement.target_device=cuda:99"), 5, ("cuda:99", "placement=cpu"), FILES),
    Case(32, "no-room", (PROMPT, *LARGE, "cluster.gib=1"), 5, ("do not fit", "GiB needed", "enforce"), FILES),
    Case(
        38,
        "narrow-nf4",
        (PROMPT, "model.dtype=nf4", "model.head_dim=20"),
        5,
        ("nf4", "found 160", "multiples of 64"),
        LOADED,
    ),
    Case(22, "impossible", (PROMPT, "model.head_dim=31"), 4, ("model tiny", "31"), LOADED),
    Case(22, "narrow", (PROMPT, "model.dim=32", "model.n_heads=4"), 4, ("too narrow", "dim 32"), LOADED),
    Case(22, "family", (PROMPT, "model.family=nonesuch"), 4, ("nonesuch", "model.family"), LOADED),
]

PROMPTS = [
    Case(40, "empty", ('task.prompts=[""]',), 3, ("the prompt is empty", "task.prompts[0]"), FILES),
    Case(40, "no-prompts", ("task.prompts=[]",), 2, ("an empty list",)),
    Case(40, "no-input", (), 2, ("there is no prompt", "task.prompts")),
    Case(40, "blank-input", (), 2, ("there is no prompt",), stdin=b"\n \n\r\n"),
    Case(40, "two-sources", (PROMPT, "task.prompt_file=x"), 2, ("both task.prompts and task.prompt_file",)),
    Case(40, "empty-stop", (PROMPT, 'task.stop=[""]'), 2, ("task.stop holds an empty string",)),
    Case(41, "long", (f'task.prompts=["{"x" * 1024}"]',), 3, ("fills", "1024 tokens", "1023"), FILES),
    target(
        41, "unknown-token",
        lambda p: edit(
            p / "tokenizer.json",
            lambda c: c["added_tokens"].append({**c["added_tokens"][1], "id": 300, "content": "<new>"}),
        ),
        "does not know", "id 300", "below 300", reach=FILES, code=3,
        extra=('task.prompts=["a <new>"]', "task.special_tokens=true"),
    ),
    Case(
        42, "input-not-utf8", (), 3, ("not UTF-8", "standard input line 2", "byte 4", "0xe9"),
        stdin=b"ab\nc\xe9",
    ),
    prompt_file(42, "utf16", "a.txt", "a".encode("utf-16"), "UTF-16", "iconv"),
    prompt_file(42, "nul", "a.txt", "a\0b", "a NUL character", "line 1", "character 1"),
    prompt_file(42, "surrogate", "a.jsonl", '{"prompt": "a\\ud800"}', "surrogate", "line 1", "character 1"),
    prompt_file(42, "bom", "a.txt", b"\xef\xbb\xbfa\n\xff", "line 2", "byte 5"),
    prompt_file(43, "line", "a.jsonl", '{"prompt": "a"}\n{"prompt"', "not JSON", "line 2"),
    prompt_file(43, "no-prompt", "a.jsonl", '{"text": "a"}', "no prompt", "found text", '"prompt"'),
    prompt_file(43, "array", "a.jsonl", "[1]", "no prompt", "found list"),
    prompt_file(43, "number", "a.jsonl", '{"prompt": 5}', "no prompt", "line 1"),
    prompt_file(
        43, "twice", "a.jsonl", '{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', "twice", "'1'",
    ),
    prompt_file(43, "twin-key", "a.jsonl", '{"prompt": "a", "prompt": "b"}', "a key stands twice"),
    prompt_file(43, "nan", "a.jsonl", '{"prompt": "a", "x": NaN}', "NaN is not JSON"),
    prompt_file(43, "long-line", "a.jsonl", LONG, "too long", "16777217 bytes"),
    prompt_file(43, "deep", "a.jsonl", DEEP, "nested too deeply", "line 1"),
    prompt_file(43, "huge-number", "a.jsonl", '{"prompt": "a", "id": ' + "9" * 5000 + "}", "not JSON"),
    prompt_file(43, "many-keys", "a.jsonl", json.dumps({"k" * 90_000: 1}), "no prompt", "characters)"),
    prompt_file(43, "fraction-id", "a.jsonl", '{"prompt": "a", "id": 1.5}', "whole number", "float"),
    prompt_file(43, "truth-id", "a.jsonl", '{"prompt": "a", "id": true}', "whole number", "bool"),
    Case(43, "input-bom", (), 3, ("not JSON", "line 2"), stdin=b'\xef\xbb\xbf{"prompt": "a"}\n{'),
    prompt_file(44, "newline", "a.jsonl", '{"prompt": "a", "id": "x\\ny"}', "an id is unusable", "x\\ny"),
    prompt_file(44, "long-id", "a.jsonl", json.dumps({"prompt": "a", "id": "x" * 10**4}), "unusable", "256"),
    prompt_file(44, "empty-id", "a.jsonl", '{"prompt": "a", "id": ""}', "an id is unusable"),
    Case(43, "folder", ("task.prompt_file=/tmp",), 3, ("not a regular file", "/tmp")),
    Case(43, "absent", ("task.prompt_file=/no/such",), 3, ("does not exist", "/no/such")),
    Case(
        43, "pipe", lambda m: [pipe("p")(m.folder) or f"task.prompt_file={m.folder / 'p'}"], 3,
        ("not a regular file",),
    ),
    Case(
        43, "all-bad", lambda m: [f"task.prompt_file={m.write('a.jsonl', '{')}", "task.on_bad_row=skip"], 3,
        ("no usable prompt", "1 bad"),
    ),
    Case(47, "out-is-a-file", occupied, 6, ("cannot write the run folder", "out=FOLDER"), FILES),
]  # fmt: skip


def scored(name: str, *overrides: str, holds: tuple[str, ...], **more: Any) -> Case:
    """A case of task=eval, whose settings have no row of their own in the table."""
    return Case(0, f"eval-{name}", ("task=eval", *overrides), more.pop("code", 2), holds, **more)


def broken_preset(making: Making) -> list[str]:
    making.write("conf/model/mine.yaml", "defaults: [tiny]\nname: mine\nn_heads: 6\n")
    return ["--config-dir", str(making.folder / "conf"), "task=eval", "task.pairs=[mine]"]


EVALUATIONS = [
    scored("no-target", "task.pairs=[llama2-7B]", holds=("no model=llama2-7B", "mean model=llama2-7b?")),
    scored("no-draft", "task.pairs=[tiny,tiny/tiny_drafts]", holds=("no draft=tiny_drafts", "=tiny_draft?")),
    scored("no-model", "task.pairs=[tiny,none]", holds=("there is no model=none",)),
    scored("three", "task.pairs=[a/b/c]", holds=("task.pairs", "'a/b/c'", "TARGET/DRAFT")),
    scored("half", "task.pairs=[tiny/]", holds=("task.pairs", "'tiny/'", "TARGET/DRAFT")),
    scored("outside", "task.pairs=['../x']", holds=("task.pairs", "'../x'")),
    scored("injected", "task.pairs=['tiny,7B']", holds=("task.pairs", "'tiny,7B'")),
    scored("empty-pair", 'task.pairs=[""]', holds=("task.pairs", "''")),
    scored("number-pair", "task.pairs=[tiny,[7]]", holds=("task.pairs",)),
    scored("twice", "task.pairs=[tiny,tiny]", holds=("task.pairs holds a pair twice",)),
    scored("word-as-pairs", "task.pairs=tiny", holds=("task.pairs is not a list",)),
    scored(
        "idle-draft", "task.pairs=[tiny/tiny_draft]", "speculation=none", holds=("none drafts", "alone")
    ),
    scored(
        "ngram-draft", "task.pairs=[tiny/tiny_draft]", "speculation=ngram", holds=("none drafts", "ngram")
    ),
    scored("no-files", "task.pairs=[tiny,30B/7B]", holds=("30B is not at hand", "huggyllama"), code=4),
    scored("no-path", "task.pairs=[local]", holds=("local has no files of its own", "model.path=FOLDER")),
    Case(0, "eval-private-preset", broken_preset, 2, ("model.n_heads", "6 and 4")),
    scored("no-seeds", "task.seeds=[]", holds=("task.seeds is an empty list",)),
    scored("negative-seed", "task.seeds=[0,-1]", holds=("task.seeds entry", "found -1")),
    scored("seed-twice", "task.seeds=[1,1]", holds=("task.seeds holds a number twice",)),
    scored("word-as-seed", "task.seeds=[a]", holds=("task.seeds", "'a'", "a whole number")),
    scored("no-sizes", "task.sizes=[]", holds=("task.sizes is an empty list",)),
    scored("size-zero", "task.sizes=[0]", holds=("task.sizes entry", "found 0")),
    scored("size-huge", "task.sizes=[10000000]", holds=("task.sizes entry", "1000000")),
    scored("size-number", "task.sizes=100", holds=("task.sizes is not a list",)),
    scored("shots", "task.shots=-1", holds=("task.shots", "[0, 100]")),
    scored("batch", "task.batch_size=0", holds=("task.batch_size", "found 0")),
    scored("tokens", "task.max_new_tokens=0", holds=("task.max_new_tokens", "found 0")),
    scored("past-context", "task.max_new_tokens=1024", holds=("1024", "1023", "context of 1024")),
    scored("quick", "task.quick=soon", holds=("task.quick", "'soon'", "true or false")),
    scored("min-above-max", "sampling.min_new_tokens=7", holds=("min_new_tokens", "found 7")),
    scored("generate-key", "task.trace=true", holds=("task.trace",)),
    scored("no-key", "task.prompt=5", holds=("unknown key task.prompt",)),
    scored("banned", "task.pairs=[tiny]", "sampling.bad_tokens=[512]", holds=("bad_tokens", "[0, 511]")),
    scored("plot-kind", "task.plot=scores.doc", holds=("task.plot", "'scores.doc'", ".png")),
    scored("plot-empty", "task.plot=", holds=("task.plot is empty",)),
    Case(
        0, "eval-short-context",
        lambda m: [
            "task=eval", "task.quick=true", "task.shots=30", "model=local", f"model.path={m.saved.whole}",
            "draft=none",
        ], 3, ("fills the model's context", "task.shots"), FILES,
    ),
    scored("no-room", *LARGE, "cluster.gib=1", holds=("do not fit", "GiB needed"), code=5, reach=FILES),
]  # fmt: skip

COMPARED, MEASURED = ("task=compare", PROMPT), ("task=measure", PROMPT)
SIDE_BY_SIDE = [
    Case(0, "compare-no-draft", (*COMPARED, "draft=none"), 2, ("nobody drafts", "speculation=ngram")),
    Case(0, "compare-none", (*COMPARED, "speculation=none"), 2, ("nobody drafts", "drafter none")),
    Case(0, "compare-k-0", (*COMPARED, "speculation.k=0"), 2, ("nobody drafts", "k 0")),
    Case(0, "record-kind", (*COMPARED, "task.record=a.gif"), 2, ("task.record", "'a.gif'", ".cast")),
    Case(0, "record-empty", (*COMPARED, "task.record="), 2, ("task.record is empty",)),
    Case(0, "record-nowhere", (*COMPARED, "task.record=no/a.svg"), 2, ("task.record is in no folder",)),
    Case(0, "compare-stop", (*COMPARED, 'task.stop=[""]'), 2, ("task.stop holds an empty string",)),
    Case(0, "compare-past-context", (*COMPARED, "task.max_new_tokens=1024"), 2, ("1023", "context of 1024")),
    Case(0, "compare-nothing", ("task=compare",), 2, ("there is no prompt", "standard input"), stdin=b"\n"),
    Case(0, "compare-bytes", ("task=compare",), 3, ("standard input line 1", "0xff"), stdin=b"\xff\n"),
    Case(0, "measure-k", (*MEASURED, "task.ks=[1,0]"), 2, ("task.ks entry", "found 0", "[1, 64]")),
    Case(0, "measure-k-twice", (*MEASURED, "task.ks=[2,2]"), 2, ("task.ks holds a number twice",)),
    Case(0, "measure-length", ("task=measure", "task.lengths=[0]"), 2, ("task.lengths entry", "found 0")),
    Case(0, "measure-both", (*MEASURED, "task.lengths=[8]"), 2, ("both task.lengths and prompts",)),
    Case(0, "measure-repeats", (*MEASURED, "task.repeats=0"), 2, ("task.repeats", "found 0")),
    Case(0, "measure-plot", (*MEASURED, "task.plot=a.doc"), 2, ("task.plot", "'a.doc'", ".png")),
    Case(0, "measure-batch", (*MEASURED, "task.batch_size=0"), 2, ("task.batch_size", "found 0")),
    Case(
        0, "measure-long", ("task=measure", "task.lengths=[1024]"), 3,
        ("fills the model's context", "task.lengths, 1024"), FILES,
    ),
]  # fmt: skip

TABLE = [*SETTINGS, *PRIVATE, *TOKENIZERS, *CHECKPOINTS, *MACHINES, *PROMPTS, *EVALUATIONS, *SIDE_BY_SIDE]


@pytest.mark.few(60)
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_one_line_and_its_code(
    case: Case, command: Command, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    if case.reach == CONFIG:
        monkeypatch.setattr("llama_ssp.tasks.execute", _too_far)
    if case.reach in (CONFIG, FILES):
        monkeypatch.setattr(pair, "load", _too_far)
    (tmp_path / "made").mkdir()
    answer = command(*case.arguments(Making(tmp_path / "made", saved)), stdin=case.stdin)
    assert len(answer.errors) == 1, answer.err
    assert answer.code == case.code, answer.err
    assert "Traceback" not in answer.err
    assert answer.out == ""
    assert [text for text in case.holds if text not in answer.errors[0]] == [], answer.errors[0]
    assert len(answer.errors[0]) < 1500


def _too_far(*_: object) -> None:
    pytest.fail("the run went on past what is wrong")


def test_every_row_has_a_case() -> None:
    assert {case.row for case in TABLE} >= {*range(1, 3), 4, 6, *range(8, 13), *range(15, 28), 30, 31, 32}
    assert {case.row for case in TABLE} >= {*range(40, 45), 46, 47}
    assert len({str(case) for case in TABLE}) == len(TABLE)


def fingers(answer: Any) -> dict[str, Any]:
    """The JSON document of a run: the last line of standard output."""
    document: dict[str, Any] = json.loads(answer.out.splitlines()[-1])
    return document


def test_what_looks_odd_but_is_allowed(command: Command) -> None:
    """K = 0, temperature 0, top_k past the vocabulary (rows 3, 5, 7, 9): no error, and it ends."""
    answer = command(
        PROMPT, "speculation.k=0", "sampling.temperature=0", "sampling.top_k=600", "task.max_new_tokens=3",
        "output=json", "seed=1", "+sampling.logit_bias={5:-2}",
    )  # fmt: skip
    assert (answer.code, answer.errors) == (0, [])
    assert [o["output_tokens"] for o in fingers(answer)["outputs"]] == [3]


def test_a_sweep_leaves_nothing_behind(command: Command) -> None:
    answer = command("-m", PROMPT, "seed=1,2", "out=null", "output=json", "task.max_new_tokens=1")
    assert (answer.code, answer.errors) == (0, [])
    assert [json.loads(line)["seed"] for line in answer.out.splitlines()] == [1, 2]
    assert list(Path.cwd().iterdir()) == []


def test_k_shrinks_where_the_context_ends(command: Command) -> None:
    answer = command('task.prompts=["' + "x" * 1020 + '"]', "speculation.k=64", "output=json", "seed=1")
    assert (answer.code, fingers(answer)["outputs"][0]["finish_reason"]) == (0, "context")


@pytest.mark.parametrize(
    ("target_size", "draft_size"),
    [
        (300, 320),
        (320, 300),
        pytest.param(32000, 32064, marks=pytest.mark.slow),
        pytest.param(152064, 151936, marks=pytest.mark.slow),
    ],
)
def test_vocabularies_may_differ_by_padding(
    target_size: int, draft_size: int, command: Command, saved: Saved, tmp_path: Path
) -> None:
    """The wider of the two favours its padding beyond all; it is never drawn, by either (row 15)."""
    wide, narrow = max(target_size, draft_size), min(target_size, draft_size)
    padded = checkpoints.save(tmp_path / "padded", vocab_size=wide)
    other = saved.whole if narrow == 300 else checkpoints.save(tmp_path / "other", vocab_size=narrow)

    def favour_padding(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][:300] *= 0.01
        tensors["lm_head.weight"][300:] *= 50

    reworked(favour_padding)(padded)
    target, draft = (padded, other) if target_size > draft_size else (other, padded)
    answer = command(PROMPT, *both(target, draft), "task.max_new_tokens=24", "output=json")
    assert (answer.code, answer.errors) == (0, [])
    (output,) = fingers(answer)["outputs"]
    assert output["output_tokens"] == 24 or output["finish_reason"] == "eos"
    assert max(output["token_ids"]) < 300


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["draft=tiny"], "no smaller than target"),
        (["model.dtype=fp16"], "model.dtype=fp16 is several times slower"),
    ],
    ids=["14-large-draft", "38-fp16-on-cpu"],
)
def test_warned_and_done(
    overrides: list[str], warning: str, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    answer = command(PROMPT, "task.max_new_tokens=2", "seed=1", "placement=cpu", *overrides)
    assert (answer.code, answer.errors) == (0, [])
    assert warning in caplog.text


def test_the_target_as_its_own_draft_is_warned_of(
    command: Command, saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 13, the second time under another name."""
    (tmp_path / "alias").symlink_to(saved.whole)
    answer = command(PROMPT, *both(saved.whole, tmp_path / "alias"))
    assert (answer.code, answer.errors) == (0, [])
    assert "the draft is the target itself" in caplog.text


def test_other_end_tokens_follow_the_target(
    command: Command, saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 17."""
    draft = copied(saved.whole, tmp_path / "draft")
    edit(draft / "generation_config.json", lambda c: c.update(eos_token_id=[1, 7]))
    answer = command(PROMPT, *both(saved.whole, draft))
    assert (answer.code, answer.errors) == (0, [])
    assert "texts end with ['</s>'] and ['&', '</s>'], the target's hold" in caplog.text


def test_a_row_of_nan_stops_alone(command: Command, saved: Saved, tmp_path: Path) -> None:
    """Row 39: a damaged embedding; only the prompt that uses it stops, and the exit code says so."""
    path = copied(saved.whole, tmp_path / "model")
    bad = checkpoints.tokenizer().token_to_id("~")
    reworked(lambda t: t["model.embed_tokens.weight"][bad].fill_(torch.nan))(path)
    answer = command(
        'task.prompts=["a", "b~", "c"]', *alone(path), f"sampling.bad_tokens=[1,{bad}]", "output=json"
    )
    assert answer.code == 4
    assert len(answer.errors) == 1
    assert "Traceback" not in answer.err
    for part in ("not numbers", "prompt '1'", "position 2", "1 of 3", "model.scan=true"):
        assert part in answer.errors[0]
    outputs = fingers(answer)["outputs"]
    assert [o["finish_reason"] for o in outputs] == ["length", "error", "length"]
    assert [o["output_tokens"] for o in outputs] == [4, 0, 4]
    assert fingers(answer)["status"] == "error"


def test_bad_rows_are_skipped_and_counted(
    command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 43: the policy; both what cannot be read and what the model cannot take."""
    lines = ['{"id": "a", "prompt": "x"}', "{", '{"id": "b", "prompt": ""}', '{"id": "a", "prompt": "y"}']
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    answer = command(
        f"task.prompt_file={file}", "task.on_bad_row=skip", "task.max_new_tokens=2", "output=json", "seed=1"
    )
    assert (answer.code, answer.errors) == (0, [])
    assert fingers(answer)["rows_skipped"] == 3
    assert [o["id"] for o in fingers(answer)["outputs"]] == ["a"]
    assert caplog.text.count("skipped: ") == 3


def test_ids_never_become_file_names(command: Command, tmp_path: Path) -> None:
    """Row 44."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "../../evil", "prompt": "x"}')
    answer = command(f"task.prompt_file={file}", "task.max_new_tokens=1", "task.trace=true", "seed=1")
    assert answer.code == 0
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


def test_a_missing_seed_is_drawn_and_kept(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    """Row 11."""
    caplog.set_level("INFO")
    answer = command(PROMPT, "task.max_new_tokens=1", "output=json")
    seed = fingers(answer)["seed"]
    assert f"seed={seed} (drawn" in caplog.text
    folder = Path(fingers(answer)["run_folder"])
    assert f"seed: {seed}" in (folder / "config.yaml").read_text()
