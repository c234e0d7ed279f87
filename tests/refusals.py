"""What is refused, as one table: a command, what it meets, its exit code, and what its line of error says.

First come the changes that damage a sound model folder. TABLE has mistakes of users, CORPUS hostile and damaged
model folders. A row of the corpus that may run (code 0) brings something that is never touched: it must be as if
it were not there.
"""

import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import INDEX, WEIGHTS, Tensors, edit, edit_tensors
from tests.quantised_folders import Format, awq, compressed, eight_bit, fine_grained, four_bit, gptq, rewrite

CONFIG, FILES, LOADED = "config", "files", "loaded"
"""How far a case may come: no torch is needed, no weights are read, weights are read."""

PROMPT = 'task.prompts=["hello"]'
ALONE = (PROMPT, "model=./model", "draft=none", "task.max_new_tokens=4", "seed=1")
SOUND = "SOUND"  # in a command: the path of a sound model folder
ILLEGAL = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com for more information.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
LONGEST_LINE = 1500
OUTSIDE, EXECUTED = "outside", "executed"  # beside the model's folder: not to be read, not to come to be
Damage = Callable[[Path], object]


def damage(change: Callable[..., object]) -> Callable[..., Damage]:
    """Makes change(path, *arguments) a function of the arguments, which gives the change of a path."""

    def given(*arguments: Any, **settings: Any) -> Damage:
        return lambda path: change(path, *arguments, **settings)

    return given


def nothing(path: Path) -> None:
    """A sound folder."""


@damage
def both(path: Path, *changes: Damage) -> None:
    for change in changes:
        change(path)


edited = damage(lambda path, name, change: edit(path / name, change))  # a JSON file with other content


def sets(name: str, **values: Any) -> Damage:
    """A JSON file with other values."""
    return edited(name, lambda content: content.update(values))


def config_sets(**values: Any) -> Damage:
    return sets("config.json", **values)


def maps_to(name: object) -> Damage:
    """An index that says so of the place of one tensor."""
    return edited(INDEX, lambda content: content["weight_map"].update({"model.norm.weight": name}))


reworked = damage(edit_tensors)  # a weights file with other tensors


@damage
def rewritten(path: Path, name: str, old: bytes, new: bytes) -> None:
    """A file with other bytes in the place of some."""
    (path / name).write_bytes((path / name).read_bytes().replace(old, new))


@damage
def cut_short(path: Path, count: int) -> None:
    """A weights file without its last bytes."""
    os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size - count)


@damage
def linked_outside(path: Path, name: str) -> None:
    """A file of the model that lies elsewhere."""
    outside = path.parent / OUTSIDE
    outside.mkdir()
    (path / name).rename(outside / name)
    (path / name).symlink_to(outside / name)


@damage
def linked_to(path: Path, name: str, place: str) -> None:
    """A link in a file's stead."""
    (path / name).unlink(missing_ok=True)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).symlink_to(place)


@damage
def pipe(path: Path, name: str) -> None:
    """A named pipe, at which a reader waits for ever."""
    (path / name).unlink(missing_ok=True)
    (path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(path / name)


@damage
def removed(path: Path, *names: str) -> None:
    for name in names:
        (path / name).unlink()


@damage
def replaced(path: Path, name: str, content: bytes | str) -> None:
    """A file with this content, which may be new."""
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


@damage
def sparse(path: Path, name: str, start: bytes, size: int) -> None:
    """A huge file that takes no room."""
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(start)
    os.truncate(path / name, size)


@damage
def pickled(path: Path, name: str) -> None:
    """A file that runs code when it is unpickled, which says so by a folder."""
    replaced(name, f"cos\nmkdir\n(S{str(path.parent / EXECUTED)!r}\ntR.")(path)


@damage
def code(path: Path, name: str) -> None:
    text = f"import os\nos.mkdir({str(path.parent / EXECUTED)!r})\nclass C:\n    pass\n"
    replaced(name, text)(path)


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
    env: dict[str, str] = field(default_factory=dict)
    answers: bool = False  # what was written before it showed is given out
    modules: tuple[str, ...] = ()  # what transformers' modules refuse it with; the decoder does not read it

    def __str__(self) -> str:
        return self.name

    def problems(self, codes: Collection[int | None], out: str, err: str) -> list[str]:
        """What is not as it must be in the answer of all ranks."""
        errors = [line for line in err.splitlines() if line.startswith("error:")]
        checks = {
            f"exit codes {codes}, not {self.code}": set(codes) != {self.code},
            f"{len(errors)} lines of error: {err}": len(errors) != (self.code != 0),
            "a traceback": "Traceback" in err,
            "something on standard output": bool(self.code and out and not self.answers),
            "a line too long": any(len(line) > LONGEST_LINE for line in errors),
            **{f"nothing of {text!r}: {err}": text not in "".join(errors) for text in self.says},
        }
        return [problem for problem, is_so in checks.items() if is_so]


def refused(command: str, *says: str, code: int = 2, **more: Any) -> Case:
    """A command; one that does not begin with its task has a prompt."""
    has_task = command.startswith(("plan ", "batch ", "eval ", "measure "))
    return Case(command[:50], (*[PROMPT] * (not has_task), *command.split()), says, code, **more)


def ranks(variables: str, *says: str, command: str = "", **more: Any) -> Case:
    """A command with variables that a launcher should have set."""
    env = dict(pair.split("=") for pair in variables.split())
    return Case(variables[:50], (PROMPT, *command.split()), says, 5, env=env, **more)


def hostile(name: str, damage: Damage, *says: str, extra: tuple[str, ...] = (), **more: Any) -> Case:
    return Case(name, (*ALONE, *extra), says, damage=damage, **more)


def harmless(name: str, damage: Damage, **more: Any) -> Case:
    """What is never touched, but perhaps by transformers' modules."""
    return hostile(name, damage, code=0, reach=LOADED, **more)


# Each of nine lists holds the one before nine times: 9 ** 9 values in 300 letters.
LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)
SETTINGS = [
    refused("speculation.kk=5", "unknown key speculation.kk", "speculation.k?"),
    refused("task.name=../../x", "task.name is not a task", "generate"),
    refused("draft=null", "draft=null", "a preset"),
    refused("sampling=../../../../x", "there is no sampling"),
    refused("draft=none draft.path=/x", "draft.path", "draft=none"),
    refused("--config-dir=/no/such", "directory '/no/such' not found"),
    refused("--config-dir=mine model=laughs", "means too many values", "mine/model/laughs.yaml", "at most 100000",
            makes=replaced("mine/model/laughs.yaml", LAUGHS)),
    refused("--config-dir=mine experiment=laughs", "means too many values", "mine/experiment/laughs.yaml",
            makes=replaced("mine/experiment/laughs.yaml", LAUGHS)),
    refused("hydra.searchpath=[file://mine] model=laughs", "means too many values",
            makes=replaced("mine/model/laughs.yaml", LAUGHS)),
    refused("--config-dir=mine model=itself", "nested too deeply",
            makes=replaced("mine/model/itself.yaml", "name: &a [*a]")),
    refused("--config-dir=mine model=deep", "nested too deeply",
            makes=replaced("mine/model/deep.yaml", "name: " + "[" * 20_000)),
    refused("--config-dir=mine model=huge", "the file is too large", "mine/model/huge.yaml",
            makes=sparse("mine/model/huge.yaml", b"name: x\n", 2**33)),
    refused("--config-d=/tmp", "unknown flag --config-d"),
    refused("speculation.k=abc", "speculation.k", "'abc'", "Integer"),
    refused("speculation.k=-1", "speculation.k", "-1", "[0, 64]"),
    refused("sampling.bad_tokens=" + "[" * 1000, "an override cannot be read"),
    refused("sampling.bad_tokens=[512]", "bad_tokens token", "[0, 511]"),
    refused("sampling.temperature=-1", "sampling.temperature", "0 means argmax"),
    refused("sampling.top_p=0", "sampling.top_p", "(0.0, 1.0]"),
    refused("+sampling.logit_bias={5:nan}", "sampling.logit_bias.5", "found nan"),
    refused("out=${oc.env:NOPE}", "variable 'NOPE' not found", "out"),
    refused("out=${", "out", "${"),
    refused("seed=1,2", "seed", "--multirun"),
    refused("speculation.ngram_min=5", "speculation.ngram_max", "[5, 32]"),
    refused("+speculation.lenience=0.9", "not lossless", "lenience"),
    refused("task.max_new_tokens=1024", "1024", "1023", "context of 1024"),
    refused("model.context=1", "a context of 1 tokens", "out of range"),
    refused("model.n_heads=6", "model.n_heads", "6 and 4"),
    refused("model=a/b model.weights=synthetic", "synthetic weights read no files: name a preset"),
    refused("placement.max_memory={a:b}", "placement.max_memory.a cannot be used; found 'b', allowed a size"),
    refused("plan repeats=2", "plan has no key repeats; found task.repeats; it is for measure"),
    refused("plan prompt=hi", "task=plan has no key prompt;"),
    refused("plan cluster.gpu=A100_40", "did you mean A100-40?"),
    refused("batch output=a.jsonl", "task.output=FILE"),
    refused("batch input=a task.output=/", "task.output does not name a file; found /"),
    refused("batch task.output=a", "task.input is missing", reach=FILES),
    refused("batch task.input=a", "task.output is missing", reach=FILES),
    refused("batch cluster.slurm.time=20", "write cluster=slurm, or leave it out"),
    # A job of 0.2, whose command had Hydra's quotes around a path.
    refused("batch task.input=in.txt task.output='o.jsonl'", "task.output has quotes", "write task.output=",
            makes=replaced("o.jsonl.work/x", "")),
]  # fmt: skip

LARGE = "model=7B model.weights=synthetic draft=none cluster.gib=1"
MACHINES = [
    ranks("WORLD_SIZE=many", "WORLD_SIZE", "torchrun"),
    ranks(f"WORLD_SIZE={'9' * 5000}", "WORLD_SIZE", "1..1048576"),
    ranks("WORLD_SIZE=2", "not by torchrun", "no store that a launcher keeps", "--nproc-per-node",
          reach=FILES),
    ranks("WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True MASTER_PORT=many", "MASTER_PORT", "1..65535",
          reach=FILES),
    ranks("WORLD_SIZE=8", "7 heads", "8 ranks", "1..7 ranks",
          command="model.n_heads=7 model.n_kv_heads=7 placement=leader"),
    refused("placement.target_device=cuda:99", "cuda:99", "placement=cpu", code=5, reach=FILES),
    refused(LARGE, "do not fit", "GiB needed", "enforce", code=5, reach=FILES),
    refused("model.dtype=nf4 model.head_dim=20", "nf4", "found 160", "multiples of 64", code=5, reach=LOADED),
    refused("model.head_dim=31", "model tiny", "31", code=4, reach=LOADED),
    refused("model.dim=32 model.n_heads=4", "too narrow", "dim 32", code=4, reach=LOADED),
    refused("model.family=nonesuch", "nonesuch", "model.family", code=4, reach=LOADED),
    refused("out=taken", "cannot write the run folder", "out=FOLDER", code=6, reach=FILES,
            makes=replaced("taken", "a file")),
]  # fmt: skip

# Lines of a JSONL file that make no prompt, and what is said of each.
BAD_LINES: dict[str, tuple[str | bytes, ...]] = {
    "half": ('{"prompt"', "not JSON"),
    "array": ("[1]", "no prompt", "found list"),
    "no-prompt": ('{"text": "a"}', "no prompt", "found text", '"prompt"'),
    "long-key": (json.dumps({"k" * 90_000: 1}), "no prompt", "characters)"),
    "twin-key": ('{"prompt": "a", "prompt": "b"}', "a key is given twice"),
    "nan": ('{"prompt": "a", "x": NaN}', "NaN is not JSON"),
    "deep": ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
    "huge-number": (f'{{"prompt": "a", "x": {"9" * 5000}}}', "5000 digits"),
    "truth-id": ('{"prompt": "a", "id": true}', "whole number", "bool"),
    "newline-id": ('{"prompt": "a", "id": "x\\ny"}', "an id is unusable", "x\\ny"),
    "long-id": (json.dumps({"prompt": "a", "id": "x" * 10**4}), "an id is unusable", "256"),
    "nul": ('{"prompt": "a\\u0000"}', "a NUL character", "character 1"),
    "surrogate": ('{"prompt": "a\\ud800"}', "surrogate", "character 1"),
    "not-utf8": (b'{"prompt": "\xff"}', "not UTF-8", "byte 28", "0xff"),
}


def bad_line(name: str, content: str | bytes, *says: str, start: bytes = b'{"prompt": "b"}\n') -> Case:
    """The second line of a file."""
    line = content.encode() if isinstance(content, str) else content
    words, says = ("task.prompt_file=a.JSONL",), ("line 2", *says)
    return Case(name, words, says, 3, makes=replaced("a.JSONL", start + line))


PROMPTS = [
    Case("no-input", (), ("there is no prompt", "prompt="), 2),
    Case("no-prompts", ("task.prompts=[]",), ("an empty list",), 2),
    Case("empty", ('task.prompts=[""]',), ("the prompt is empty", "task.prompts[0]"), 3, FILES),
    Case("two-sources", (PROMPT, "task.prompt_file=x"), ("both task.prompts and task.prompt_file",), 2),
    Case("empty-stop", (PROMPT, 'task.stop=[""]'), ("task.stop entry cannot be used", "not empty"), 2),
    Case("long", (f'task.prompts=["{"x" * 1024}"]',), ("fills", "1024 tokens", "1023"), 3, FILES),
    Case("a-folder", ("task.prompt_file=/tmp",), ("not a regular file", "/tmp"), 3),
    Case("absent", ("task.prompt_file=/no/such",), ("does not exist", "/no/such"), 3),
    Case("pipe-without-writer", ("task.prompt_file=p",), ("there is no prompt",), 2, makes=pipe("p")),
    Case("huge", ("task.prompt_file=p",), ("too large", "1073741825 bytes, allowed 1073741824 bytes"), 3,
         makes=sparse("p", b"a", 2**30 + 1)),
    Case("all-bad", ("task.prompt_file=a.ndjson", "task.on_bad_row=skip"), ("no usable prompt",), 3,
         makes=replaced("a.ndjson", "{")),
    *(bad_line(name, *line) for name, line in BAD_LINES.items()),
    bad_line("long-line", "a" * (16 * 2**20 + 1), "too long", "16777217 bytes"),
    bad_line("byte-after-a-mark", b"\xff", "byte 19", start=b'\xef\xbb\xbf{"prompt": "b"}\n'),
    hostile("unknown-token", edited("tokenizer.json", lambda c: c["added_tokens"].append(
                {**c["added_tokens"][1], "id": 300, "content": "<new>"})),
            "does not know", "id 300", "below 300", reach=FILES, code=3,
            extra=('task.prompts=["a <new>"]', "task.special_tokens=true")),
]  # fmt: skip

TASKS = [
    refused("eval task.pairs=[llama2-7B]", "no model=llama2-7B", "mean model=llama2-7b?"),
    refused("eval task.pairs=[tiny/]", "task.pairs", "'tiny/'", "TARGET/DRAFT"),
    refused("eval task.pairs=[tiny,tiny]", "task.pairs holds an entry twice"),
    refused("eval task.pairs=[tiny/tiny_draft] speculation=ngram", "none drafts", "ngram"),
    refused("eval task.pairs=[tiny,30B/7B]", "30B is not at hand", "huggyllama", code=4),
    refused("eval task.seeds=[]", "task.seeds is an empty list"),
    refused(f"eval task.quick=true task.shots=30 draft=none model={SOUND}", "fills the model's context",
            "task.shots", code=3, reach=FILES),
    refused("task=compare draft=none", "nothing drafts", "speculation=ngram"),
    refused("task=certify speculation=none", "nothing drafts", reach=FILES),
    refused("task=certify task.samples=3", "task.samples"),
    refused("task=certify task.false_alarm=1e-9", "task.false_alarm"),
    refused("task=certify speculation.k=32", "up to 32 drafts a round"),
    refused("task=compare task.plot=a.gif", "task.plot", "'a.gif'", ".svg"),
    refused("task=compare task.plot=no/a.svg", "task.plot is in no folder"),
    refused("task=measure task.lengths=[8]", "both task.prompts and task.lengths"),
    refused("measure task.lengths=[1024]", "fills the model's context", "task.lengths, 1024", code=3,
            reach=FILES),
]  # fmt: skip


def drafted(name: str, change: Damage, *says: str, draft: str = "draft=./model") -> Case:
    """A pair of a sound target and this draft."""
    words = (PROMPT, f"model={SOUND}", draft, *ALONE[3:])
    return Case(name, words, says, damage=change, reach=FILES)


def logits(count: int) -> Damage:
    """Another number of logits than the tokenizer has tokens, 300."""

    def change(tensors: Tensors) -> None:
        for name in (EMBEDDING, "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], tensors[name]])[:count]

    return both(config_sets(vocab_size=count), reworked(change))


def only(*tokens: int) -> str:
    """Bans all other tokens of a model folder."""
    return f"sampling.bad_tokens={[token for token in range(300) if token not in tokens]}".replace(" ", "")


NO_TOKEN = "no token is allowed; sampling.bad_tokens"
BUT_THE_END = only(1)
PAIRS = [
    drafted("other-merges", edited("tokenizer.json", lambda c: c["model"]["merges"].clear()),
            "cut text differently", "the same merges"),
    drafted("narrow-draft", logits(290), "300 and 290 logits", "10 tokens only"),
    drafted("damaged-tokenizer", replaced("tokenizer.json", '{"a": 1}'), "the tokenizer cannot be read"),
    drafted("one-synthetic", nothing, "one model has a tokenizer", "synthetic", draft="draft=tiny_draft"),
    hostile("padding-alone", logits(320), NO_TOKEN, code=2, reach=LOADED, extra=(only(),)),
    hostile("ends-alone", nothing, NO_TOKEN, code=2, reach=LOADED,
            extra=(BUT_THE_END, "sampling.min_new_tokens=2")),
]  # fmt: skip

TABLE = [*SETTINGS, *MACHINES, *PROMPTS, *TASKS, *PAIRS]

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
WEIGHT_FILES = [
    hostile("bin", both(removed(WEIGHTS), pickled("pytorch_model.bin")), "pickled", "pytorch_model", "save_pretrained"),
    hostile("named-safetensors", pickled(WEIGHTS), "damaged or cut short"),
    hostile("shard-is-bin", both(pickled("pytorch_model.bin"), maps_to("pytorch_model.bin")), "of another kind", sharded=True),
    harmless("armed-beside", both(pickled("pytorch_model.bin"), pickled("training_args.bin"))),
    hostile("lfs-pointer", replaced(WEIGHTS, POINTER), "git lfs pull"),
    hostile("lfs-config", replaced("config.json", POINTER), "config.json is a Git LFS pointer", "git lfs"),
    hostile("truncated", cut_short(7), "damaged or cut short", "not fully covered"),
    hostile("sparse-header", sparse(WEIGHTS, (2**31).to_bytes(8, "little"), 2**33), "damaged", "2147483648"),
    harmless("no-metadata", rewritten(WEIGHTS, b'"__metadata__":{"format":"pt"},', b" " * 31)),
    hostile("name-with-escapes", reworked(lambda t: t.update({"\x1b[2J\nerror: all is well" + "x" * 10**5: torch.ones(1)})),
            "a tensor by the name of"),
    # tests/test_gguf_damage.py has the numbers of a GGUF header that lie.
    hostile("gguf-pipe", both(removed(WEIGHTS), pipe("a.gguf")), "not a regular file", "a.gguf"),
]  # fmt: skip

NO_TOKENIZER = "the tokenizer cannot be read"
PIPES = (
    WEIGHTS,
    "chat_template.jinja",
    "additional_chat_templates/a.jinja",
    "vocab.txt",
    "tokenizer.model",
    "added.json",
)
LOOPED = (
    WEIGHTS, INDEX, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "adapter_config.json",
)  # fmt: skip
NAMES = [
    hostile("missing-shard", removed("model-00002-of-00005.safetensors"), "a shard is missing", "model-00002-of-00005", INDEX,
            sharded=True),
    hostile("no-weights", removed(WEIGHTS), "holds no weights", "model.safetensors"),
    hostile("an-adapter", both(removed("config.json"), replaced("adapter_config.json", "{}")), "there is no config.json, but an adapter (LoRA)"),
    hostile("no-tokenizer", removed("tokenizer.json", "tokenizer_config.json"), NO_TOKENIZER, "tokenizer.json", reach=FILES),
    hostile("class-alone", both(removed("tokenizer.json"), replaced("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}')),
            NO_TOKENIZER, "tokenizer.json", reach=FILES),
    hostile("escapes", maps_to("\x1b[2J\nerror: all is well"), "a shard's name", sharded=True),
    *(hostile(f"shard-{name!r}", maps_to(name), "leaves the folder", sharded=True)
      for name in ("../a", "/a", "a/../b", "..", ".", "", "a/b", None, 3, ["a"])),
    hostile("no-map", replaced(INDEX, "{}"), "no weight_map", sharded=True),
    hostile("link", linked_outside(WEIGHTS), "leaves the folder", "outside"),
    hostile("link-tokenizer", linked_outside("tokenizer.json"), "leaves the folder", "tokenizer.json"),
    *(hostile(f"link-loop-{name}", linked_to(name, name), "a link leads back to itself", f"{name}; found -> {name}")
      for name in LOOPED),
    hostile("link-loop-in-folder", linked_to("additional_chat_templates/a.jinja", "a.jinja"), "a link leads back to itself", "a.jinja"),
    hostile("link-loop-of-two", both(linked_to("config.json", "b.json"), linked_to("b.json", "config.json")),
            "a link leads back to itself", "config.json; found -> b.json"),
    hostile("link-loop-gguf", both(removed(WEIGHTS), linked_to("a.gguf", "a.gguf")), "a link leads back to itself", "a.gguf"),
    hostile("link-random", linked_to("config.json", "/dev/urandom"), "leaves the folder"),
    *(hostile(f"pipe-{name}", pipe(name), "not a regular file", name) for name in PIPES),
    hostile("tokenizer-outside", sets("tokenizer_config.json", fast_tokenizer_files=[f"../{OUTSIDE}/tokenizer.4.0.json"]),
            "names a file outside", "../outside/tokenizer.4.0.json"),
]  # fmt: skip


def pattern(regex: str) -> Damage:
    """A tokenizer that cuts text by this pattern first."""
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return sets("tokenizer.json", pre_tokenizer=cut)


CODE = [
    hostile("auto-map", both(code("evil.py"), config_sets(auto_map={"AutoConfig": "evil.C"})), "code of its own", "auto_map"),
    hostile("generates", both(code("custom_generate/generate.py"), config_sets(custom_generate="a/b")),
            "code of its own", "custom_generate"),
    hostile("tokenizer-auto-map", both(code("e.py"), sets("tokenizer_config.json", auto_map={"AutoTokenizer": ["e.C", "e.C"]})),
            "code of its own", "tokenizer_config.json"),
    hostile("kernel", config_sets(attn_implementation="evil/kernel"), "code of its own", "evil/kernel"),
    hostile("adapter", replaced("adapter_config.json", '{"base_model_name_or_path": "../outside"}'), "adapter"),
    hostile("backtracks", pattern("(x+x+)+y"), "the tokenizer fails on a text", "retry-limit", reach=FILES, code=3,
            extra=(f'task.prompts=["{"x" * 60}"]',)),
    hostile("unknown", config_sets(model_type="nonesuch"), "nonesuch", "llama", reach=FILES),
    hostile("dtype-is-code", config_sets(dtype="load"), "config.json cannot be read", reach=FILES),
    harmless("tokenizer-class", sets("tokenizer_config.json", tokenizer_class="os.system")),
    harmless("modules-beside", both(code("modeling_llama.py"), code("__init__.py"), code("torch.py"))),
    harmless("other-home", config_sets(_name_or_path="../outside")),
]  # fmt: skip

CHAT = ("task.chat=true",)


def chat_template(name: str, text: str, *says: str, code: int = 3) -> Case:
    """A template that is refused when it is applied."""
    damage = sets("tokenizer_config.json", chat_template=text)
    return hostile(name, damage, "chat template", *says, reach=FILES, code=code, extra=CHAT)


ESCAPES = [
    chat_template("escape-by-format", "{{ '{0.__class__.__mro__}'.format(messages) }}"),
    chat_template("escape-by-globals", "{{ cycler.__init__.__globals__.os.mkdir('executed') }}"),
    chat_template("include", "{% include '/etc/passwd' %}"),
]
TEMPLATES = [
    hostile("no-chat-template", nothing, "no chat template", reach=FILES, code=3, extra=CHAT),
    chat_template("broken-chat-template", "{{ raise_exception('no') }}", "no"),
    chat_template("one-huge-text", "{{ 'x' * 2000000000 }}", "1 GiB of memory", code=4),
    chat_template(
        "many-large-texts",
        "{% for i in range(2000) %}{{ 'x' * 1000000 }}{% endfor %}",
        "makes too much",
        code=4,
    ),
    chat_template("a-long-text", "{{ 'x' * 20000000 }}", "16777216 characters", code=4),
    *ESCAPES,
]

MISREAD = "config.json cannot be read"  # by transformers, in whose words it is told
BLOOM = {"model_type": "bloom", "vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4}
NUMBERS = [
    hostile("text-size", config_sets(num_key_value_heads="two"), "num_key_value_heads", "'two'"),
    hostile("no-layers", config_sets(num_hidden_layers=None), "has no usable num_hidden_layers", "None"),
    hostile("head-groups", config_sets(num_key_value_heads=3), "KV heads", "4 and 3"),
    hostile("endless-width", config_sets(hidden_size=2**31), "hidden_size", "2147483648"),
    hostile("endless-ffn", config_sets(intermediate_size=2**31 - 1), "do not fit", code=5, reach=FILES),
    hostile("endless-attention", config_sets(model_type="gpt_neo", attention_types=[[["global"], 10**9]]), "attention_types 1000000000"),
    hostile("epsilon-text", config_sets(rms_norm_eps="x"), MISREAD, "'rms_norm_eps' expected float, got str (value: 'x')", reach=FILES),
    hostile("rope-kind", config_sets(rope_scaling={"rope_type": "evil", "factor": 2}), "cannot be loaded", "KeyError: 'evil'", reach=LOADED),
    hostile("rope-factor-text", config_sets(rope_scaling={"rope_type": "linear", "factor": "abc"}), "no usable factor", "'abc'"),
    hostile("rope-factor-zero", config_sets(rope_parameters={"rope_type": "linear", "factor": 0, "rope_theta": 1e4}), "no usable factor", "found 0"),
    hostile("rope-base-zero", config_sets(rope_theta=0), "no usable rope_theta", "found 0", "a number above 0"),
    hostile("rope-base-of-a-kind", config_sets(rope_parameters={"full_attention": {"rope_theta": -1.0}}), "no usable rope_theta", "found -1.0"),
    hostile("rope-base-endless", config_sets(rope_theta=1e999), "no usable rope_theta", "found inf"),
    hostile("rope-share", config_sets(partial_rotary_factor=3.5), "no usable partial_rotary_factor", "[0, 1]"),
    hostile("nan-temperature", sets("generation_config.json", temperature=float("nan")), "generation_config.json is not JSON", "NaN"),
    *(hostile(f"end-{value!r}", sets("generation_config.json", eos_token_id=value),
              "does not say which tokens end a text", f"eos_token_id {value!r}", reach=FILES)
      for value in ("abc", True, 1.5, [1, "abc"], {"a": 1})),
    *(hostile(f"longest-text-{value!r}", sets("tokenizer_config.json", model_max_length=value),
              NO_TOKENIZER, f"model_max_length {value!r}", reach=FILES)
      for value in ("lots", [], {})),
    harmless("plan-number", config_sets(base_model_tp_plan=5), modules=("cannot be loaded", "correct config.json")),
    harmless("returns", config_sets(return_dict=False, output_hidden_states=True, output_attentions=True)),
    hostile("plain-4bit", config_sets(quantization_config={"load_in_4bit": True}), "bitsandbytes", "config.json: quantization_config", "plain", "nf4"),
    hostile("not-json", replaced("config.json", "{"), "config.json is not JSON"),
    hostile("deep-config", replaced("config.json", "[" * 10**5), "config.json is not JSON"),
    hostile("huge-config", sparse("config.json", b"{", 2**33), "too large"),
    hostile("preset", nothing, "the checkpoint is not a", "n_layers", extra=("model.n_layers=7",)),
    hostile("bloom", replaced("config.json", json.dumps(BLOOM)),
            "the architecture is not supported", "max_position_embeddings", "found bloom", "llama"),
    # opt-350m's embeddings are narrower than its layers.
    hostile("projected", config_sets(model_type="opt", word_embed_proj_dim=32), "the architecture is not supported", "word_embed_proj_dim", "found opt"),
]  # fmt: skip
TENSORS = [
    hostile("nan", reworked(lambda t: t[NORM].fill_(torch.nan)), "not numbers", answers=True, reach=LOADED),
    hostile("missing-tensor", reworked(lambda t: t.pop(NORM)), "missing keys", NORM, reach=LOADED),
    hostile("unexpected", reworked(lambda t: t.update({"other.weight": torch.zeros(2)})), "unexpected keys", "other.weight", reach=LOADED),
    hostile("shape", reworked(lambda t: t.update({NORM: torch.ones(32)})), "mismatched keys", NORM, reach=LOADED),
    hostile("vocabulary", config_sets(vocab_size=299), "embed_tokens", "mismatched keys", reach=LOADED),
    hostile("fewer-layers", config_sets(num_hidden_layers=1), "unexpected keys", "layers.1.", reach=LOADED),
]  # fmt: skip

quantised = damage(rewrite)  # attention and MLP are in a format; quantization_config may say other things
UP = "model.layers.0.mlp.up_proj"  # 96 outputs, 64 inputs
INT4 = compressed(4, "int", "group", group_size=32, dtype=torch.float16)
GPTQ, AWQ, FP8, INT8 = gptq(group=32), awq(group=32), fine_grained(32), eight_bit()
NF4, NESTED = four_bit("nf4", block=32), four_bit("nf4", nested=True, block=32)


def matrix(name: str, form: Format, end: str, tensor: Tensor | None, *says: str, **more: Any) -> Case:
    """One tensor of a quantised matrix is another, or is not there (None)."""

    def change(tensors: Tensors) -> None:
        tensors.pop(UP + end, None)
        tensors |= {} if tensor is None else {UP + end: tensor}

    return hostile(name, both(quantised(form), reworked(change)), *says, reach=LOADED, **more)


QUANTISED = [
    harmless("sound-int4", quantised(INT4)),
    matrix("scales-rows", GPTQ, ".scales", torch.rand(3, 96).half(), "(2, 96)"),
    matrix("zeros-missing", AWQ, ".qzeros", None, "not complete"),
    matrix("group-beyond", GPTQ, ".g_idx", torch.full((64,), 9).int(), "0..1"),
    matrix("codes-plain", FP8, ".weight", torch.rand(96, 64), "F32"),
    matrix("blocks-shape", FP8, ".weight_scale_inv", torch.rand(2, 2), "(3, 2)"),
    matrix("scale-odd", INT4, ".weight_scale", torch.rand(96, 3).half(), "divide 64"),
    matrix("shape-lies", INT4, ".weight_shape", torch.tensor([2**40, 2**40]), "4 or 8 bits"),
    matrix("codes-of-three", GPTQ, ".qweight", torch.zeros(2, 4, 96).int(), "do not fit together", "too many values"),
    matrix("table", NF4, ".weight.quant_map", torch.rand(16), "nf4"),
    hostile("state-shape", both(quantised(NF4), rewritten(WEIGHTS, b'"shape": [96, 64]', b'"shape": [96, 96]')), "the number of bytes", "found 3072", reach=LOADED),
    hostile("nested-block", both(quantised(NESTED), rewritten(WEIGHTS, b'"nested_blocksize": 256', b'"nested_blocksize":   0')), "nested_absmax; found (1,)", reach=LOADED),
    matrix("bytes-order", INT8, ".weight_format", torch.tensor(2, dtype=torch.uint8), "row after row"),
    matrix("codes-and-numbers", GPTQ, ".weight", torch.rand(96, 64), ".weight and .qweight"),
    matrix("bias-beyond", GPTQ, ".bias", torch.ones(96), f"{UP}.bias", "unexpected keys"),
    matrix("nan-scales", INT4, ".weight_scale", torch.full((96, 2), torch.nan).half(), "not numbers", answers=True),
    hostile("gptq-3-bit", quantised(GPTQ, bits=3), "cannot be read", "quantization_config", "3 bits", "GGUF"),
    hostile("rotated", quantised(INT4, transform_config={"config_groups": {"u": {}}}), "quantization_config", "transforms", "GGUF"),
    hostile("group-zero", quantised(GPTQ, group_size=0), "cannot be read", "group_size 0", "quantization_config"),
    hostile("bits-text", quantised(INT4, config_groups={"0": {"weights": {"num_bits": "4"}}}), "num_bits", "quantization_config"),
    hostile("without-a-claim", both(quantised(AWQ), config_sets(quantization_config=None)),
            "quantised, but config.json does not say how", ".qweight", "quantization_config"),
    hostile("other-format", quantised(AWQ, quant_method="hqq"), "cannot be read", "found hqq",
            "config.json: quantization_config", "gptq (4 and 8 bit)", "plain weights and dtype=int8 or nf4"),
]  # fmt: skip
NOT_BY_DEEPSPEED = [row for row in QUANTISED if row.reach == LOADED]  # it refuses their weights

CORPUS = [*WEIGHT_FILES, *NAMES, *CODE, *TEMPLATES, *TENSORS, *NUMBERS, *QUANTISED]
