"""Mistakes of users as one table: a command, what it meets, its exit code, and what its line of error says.

Damaged model folders are in tests/hostile/corpus.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from tests import checkpoints
from tests.hostile.corpus import ALONE, EMBEDDING, FILES, LOADED, PROMPT, Case, hostile
from tests.hostile.damage import (
    Damage,
    Tensors,
    both,
    config_sets,
    edited,
    nothing,
    pipe,
    replaced,
    reworked,
    sparse,
    with_tokenizer,
)

ILLEGAL = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com for more information.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
SOUND = "SOUND"  # in a command: the path of a sound model folder
LARGE = "model=7B model.weights=synthetic draft=none cluster.gib=1"


def refused(command: str, *says: str, code: int = 2, prompt: bool = True, **more: Any) -> Case:
    """A command, with a prompt if its task takes any."""
    return Case(command[:50], (*[PROMPT] * prompt, *command.split()), says, code, **more)


def ranks(variables: str, *says: str, command: str = "", **more: Any) -> Case:
    """A command with variables that a launcher should have set."""
    env = dict(pair.split("=") for pair in variables.split())
    return Case(variables[:50], (PROMPT, *command.split()), says, 5, env=env, **more)


SETTINGS = [
    refused("speculation.kk=5", "unknown key speculation.kk", "speculation.k?"),
    refused("mem=1", "unknown key mem", "cluster.slurm.mem"),
    refused("model=llama7", "there is no model=llama7", "did you mean model="),
    refused("task=talk", "there is no task=talk", "generate"),
    refused("task.name=../../x", "task.name is not a task", "generate"),
    refused("draft=null", "draft=null", "a preset"),
    refused("sampling=", "sampling=", "greedy"),
    refused("sampling=../../../../x", "there is no sampling"),
    refused("~speculation.k", "speculation.k", "does not support deletion"),
    refused("~nope", "'nope' does not exist"),
    refused("+speculation.k=3", "speculation.k"),
    refused("draft=none draft.path=/x", "draft.path", "draft=none"),
    refused("--cfg jobs", "--cfg", "invalid choice: 'jobs'", "'job'"),
    refused("--config-dir=/no/such", "directory '/no/such' not found"),
    refused("--config-d=/tmp", "unknown flag --config-d"),
    refused("hydra/launcher=nope", "there is no hydra/launcher=nope"),
    refused("speculation.k=abc", "speculation.k", "'abc'", "Integer"),
    refused("speculation.k=-1", "speculation.k", "-1", "[0, 64]"),
    refused("task.chat=maybe", "task.chat", "'maybe'", "bool"),
    refused("model.dtype=fp17", "model.dtype", "'fp17'", "bf16"),
    refused("sampling.bad_tokens=[a]", "bad_tokens", "'a'", "Integer"),
    refused("sampling.bad_tokens=[[1]]", "sampling.bad_tokens", "list[int]"),
    refused("sampling.bad_tokens=" + "[" * 1000, "an override cannot be read"),
    refused("sampling.bad_tokens=${model.name}", "sampling.bad_tokens", "'tiny'"),
    refused("sampling.bad_tokens=[512]", "bad_tokens token", "[0, 511]"),
    refused("sampling.temperature=null", "'sampling.temperature' is not Optional"),
    refused("sampling.temperature=-1", "sampling.temperature", "0 means argmax"),
    refused("sampling.top_p=0", "sampling.top_p", "(0.0, 1.0]"),
    refused("sampling.top_k=-1", "sampling.top_k", "0 keeps all"),
    refused("+sampling.logit_bias={5:nan}", "sampling.logit_bias.5", "found nan"),
    refused("+sampling.logit_bias={512:1}", "logit_bias token", "512", "[0, 511]"),
    refused("+sampling.logit_bias={abc:1}", "sampling.logit_bias"),
    refused("+sampling.logit_bias.5=1", "sampling.logit_bias.5"),
    refused("sampling.min_new_tokens=200", "min_new_tokens", "found 200"),
    refused("out=${oc.env:NOPE}", "variable 'NOPE' not found", "out"),
    refused("out=${", "out", "${"),
    refused("out=", "out cannot be used", "found ''"),
    refused("model=7B model.path=", "model.path cannot be used", "found ''"),
    refused("seed=1,2", "seed", "--multirun"),
    refused("seed=-1", "seed", "found -1"),
    refused("speculation.ngram_min=5", "speculation.ngram_max", "[5, 32]"),
    refused("speculation.overlap=ahead", "on ranks of its own only", "placement=own"),
    refused("+speculation.lenience=0.9", "not lossless", "lenience"),
    refused("+speculation.typical_acceptance=true", "not lossless", "typical"),
    refused("task.max_new_tokens=0", "task.max_new_tokens", "found 0"),
    refused("task.max_new_tokens=1024", "1024", "1023", "context of 1024"),
    refused("model.context=1", "a context of 1 tokens", "out of range"),
    refused("model.n_heads=6", "model.n_heads", "6 and 4"),
    refused("model=a/b model.weights=synthetic", "synthetic weights read no files: name a preset"),
    refused("placement.target_device=tpu", "target_device", "'tpu'", "cuda:N"),
    refused("placement.max_memory={a:b}", "placement.max_memory.a cannot be used; found 'b', allowed a size"),
    refused("cluster.gib=nan", "cluster.gib", "found nan"),
    refused("plan repeats=2", "plan has no key repeats; found task.repeats; it is for measure", prompt=False),
    refused("plan prompt=hi", "task=plan has no key prompt;", prompt=False),
    refused("plan cluster.gpu=A100_40", "did you mean A100-40?", prompt=False),
    refused("batch output=a.jsonl", "task.output=FILE", prompt=False),
    refused("batch input=a task.output=/", "task.output does not name a file; found /", prompt=False),
    refused("batch cluster.slurm.time=20", "write cluster=slurm, or leave it out", prompt=False),
    # A job of 0.2, whose command had Hydra's quotes around a path.
    refused("task=batch task.input=in.txt task.output='o.jsonl'", "task.output has quotes",
            "write task.output=", prompt=False, makes=replaced("o.jsonl.work/x", "")),
]  # fmt: skip

MACHINES = [
    ranks("WORLD_SIZE=many", "WORLD_SIZE", "torchrun"),
    ranks(f"WORLD_SIZE={'9' * 5000}", "WORLD_SIZE", "1..1048576"),
    ranks("WORLD_SIZE=2 RANK=5", "RANK", "'5'", "0..1", "torchrun"),
    ranks("WORLD_SIZE=2 RANK=\u0661", "RANK", "0..1"),
    ranks("WORLD_SIZE=4 RANK=1 LOCAL_RANK=4", "LOCAL_RANK", "'4'", "0..3"),
    ranks("WORLD_SIZE=2", "not by torchrun", "no store that a launcher keeps", "--nproc-per-node",
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


def prompts(name: str, words: tuple[str, ...], *says: str, code: int = 2, **more: Any) -> Case:
    return Case(name, words, says, code, **more)


def prompt_file(name: str, file: str, content: bytes | str, *says: str, words: tuple[str, ...] = ()) -> Case:
    made = replaced(file, content)
    return Case(name, (f"task.prompt_file={file}", *words), says, 3, makes=made)


PROMPTS = [
    prompts("no-input", (), "there is no prompt", "prompt="),
    prompts("blank-input", (), "there is no prompt", stdin=b"\n \n\r\n"),
    prompts("no-prompts", ("task.prompts=[]",), "an empty list"),
    prompts("empty", ('task.prompts=[""]',), "the prompt is empty", "task.prompts[0]", code=3, reach=FILES),
    prompts("two-sources", (PROMPT, "task.prompt_file=x"), "both task.prompts and task.prompt_file"),
    prompts("empty-stop", (PROMPT, 'task.stop=[""]'), "task.stop entry cannot be used", "not empty"),
    prompts("long", (f'task.prompts=["{"x" * 1024}"]',), "fills", "1024 tokens", "1023", code=3, reach=FILES),
    prompts("not-utf8", (), "not UTF-8", "standard input line 2", "byte 4", "0xe9", code=3,
            stdin=b"ab\nc\xe9"),
    prompts("bom", (), "not JSON", "line 2", code=3, stdin=b'\xef\xbb\xbf{"prompt": "a"}\n{'),
    prompts("a-folder", ("task.prompt_file=/tmp",), "not a regular file", "/tmp", code=3),
    prompts("absent", ("task.prompt_file=/no/such",), "does not exist", "/no/such", code=3),
    prompts("pipe-without-writer", ("task.prompt_file=p",), "there is no prompt", makes=pipe("p")),
    prompts("huge", ("task.prompt_file=p",), "task.prompt_file is too large", "1073741825 bytes",
            "allowed 1073741824 bytes", code=3, makes=sparse("p", b"a", 2**30 + 1)),
    prompt_file("utf16", "a.txt", "a".encode("utf-16"), "UTF-16", "iconv"),
    prompt_file("nul", "a.txt", "a\0b", "a NUL character", "line 1", "character 1"),
    prompt_file("surrogate", "a.jsonl", '{"prompt": "a\\ud800"}', "surrogate", "line 1", "character 1"),
    prompt_file("bom-and-byte", "a.txt", b"\xef\xbb\xbfa\n\xff", "line 2", "byte 5"),
    prompt_file("half-a-line", "a.jsonl", '{"prompt": "a"}\n{"prompt"', "not JSON", "line 2"),
    prompt_file("no-prompt", "a.jsonl", '{"text": "a"}', "no prompt", "found text", '"prompt"'),
    prompt_file("array", "a.jsonl", "[1]", "no prompt", "found list"),
    prompt_file("twice", "a.jsonl", '{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', "twice", "'1'"),
    prompt_file("twin-key", "a.jsonl", '{"prompt": "a", "prompt": "b"}', "a key is given twice"),
    prompt_file("nan", "a.jsonl", '{"prompt": "a", "x": NaN}', "NaN is not JSON"),
    prompt_file("long-line", "a.jsonl", "a" * (16 * 2**20 + 1), "too long", "16777217 bytes"),
    prompt_file("deep", "a.jsonl", '{"prompt": ' + "[" * 100_000, "nested too deeply", "line 1"),
    prompt_file("huge-number", "a.jsonl", f'{{"prompt": "a", "id": {"9" * 5000}}}', "5000 digits"),
    prompt_file("long-key", "a.jsonl", json.dumps({"k" * 90_000: 1}), "no prompt", "characters)"),
    prompt_file("truth-id", "a.jsonl", '{"prompt": "a", "id": true}', "whole number", "bool"),
    prompt_file("ndjson", "a.ndjson", '{"prompt": 5}', "no prompt", "line 1"),
    prompt_file("capitals", "a.JSONL", '{"prompt": 5}', "no prompt", "line 1"),
    prompt_file("newline-id", "a.jsonl", '{"prompt": "a", "id": "x\\ny"}', "an id is unusable", "x\\ny"),
    prompt_file("long-id", "a.jsonl", json.dumps({"prompt": "a", "id": "x" * 10**4}), "unusable", "256"),
    prompt_file("empty-id", "a.jsonl", '{"prompt": "a", "id": ""}', "an id is unusable"),
    prompt_file("all-bad", "a.jsonl", "{", "no usable prompt", "1 bad", words=("task.on_bad_row=skip",)),
    hostile("unknown-token", edited("tokenizer.json", lambda c: c["added_tokens"].append(
                {**c["added_tokens"][1], "id": 300, "content": "<new>"})),
            "does not know", "id 300", "below 300", reach=FILES, code=3,
            extra=('task.prompts=["a <new>"]', "task.special_tokens=true")),
]  # fmt: skip


def scored(command: str, *says: str, **more: Any) -> Case:
    return refused(f"task=eval {command}", *says, prompt=False, **more)


TASKS = [
    scored("task.pairs=[llama2-7B]", "no model=llama2-7B", "mean model=llama2-7b?"),
    scored("task.pairs=[tiny,none]", "there is no model=none"),
    scored("task.pairs=[tiny/]", "task.pairs", "'tiny/'", "TARGET/DRAFT"),
    scored("task.pairs=['../x']", "task.pairs", "'../x'"),
    scored("task.pairs=[tiny,tiny]", "task.pairs holds an entry twice"),
    scored("task.pairs=[tiny/tiny_draft] speculation=ngram", "none drafts", "ngram"),
    scored("task.pairs=[tiny,30B/7B]", "30B is not at hand", "huggyllama", code=4),
    scored("task.pairs=[mine] --config-dir=conf", "model.n_heads", "6 and 4",
           makes=replaced("conf/model/mine.yaml", "defaults: [tiny]\nname: mine\nn_heads: 6\n")),
    scored("task.seeds=[]", "task.seeds is an empty list"),
    scored("task.sizes=", "task.sizes", "not a ListConfig"),
    scored(f"task.quick=true task.shots=30 draft=none model={SOUND}", "fills the model's context",
           "task.shots", code=3, reach=FILES),
    refused("task=compare draft=none", "nothing drafts", "speculation=ngram"),
    refused("task=compare task.plot=a.gif", "task.plot", "'a.gif'", ".svg"),
    refused("task=compare task.plot=no/a.svg", "task.plot is in no folder"),
    refused("task=compare task.chat=true task.system=a\udcff", "not UTF-8, or half a surrogate pair",
            "task.system", "at character 1", code=3),
    refused("task=measure task.ks=[1,0]", "task.ks entry", "found 0", "[1, 64]"),
    refused("task=measure speculation.siblings=8 task.ks=[8]", "drafts and siblings are 64 at most",
            "task.ks", "72 with 8 siblings"),
    refused("task=measure task.lengths=[8]", "both task.prompts and task.lengths"),
    refused("task=measure task.lengths=[1024]", "fills the model's context", "task.lengths, 1024", code=3,
            prompt=False, reach=FILES),
]  # fmt: skip


def drafted(name: str, change: Damage, *says: str, draft: str = "draft=./model") -> Case:
    """A pair of a sound target and this draft."""
    words = (PROMPT, f"model={SOUND}", draft, *ALONE[3:])
    return Case(name, words, says, damage=change, reach=FILES)


def swapped(tokenizer: dict[str, Any]) -> None:
    """Two tokens have each other's ids."""
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]


def logits(count: int) -> Damage:
    """Another number of logits than the tokenizer has tokens, 300."""

    def change(tensors: Tensors) -> None:
        for name in (EMBEDDING, "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], tensors[name]])[:count]

    return both(config_sets(vocab_size=count), reworked(change))


def banned(ids: Iterable[int]) -> str:
    return f"sampling.bad_tokens=[{','.join(map(str, ids))}]"


NO_TOKEN = "no token is allowed; sampling.bad_tokens"
BUT_THE_END = banned(token for token in range(300) if token != 1)
PAIRS = [
    drafted("fewer-tokens", with_tokenizer(lambda: checkpoints.tokenizer(280)), "different tok", "300"),
    drafted("other-ids", edited("tokenizer.json", swapped), "different tokenizers", "2 differ", "'a'"),
    drafted("other-merges", edited("tokenizer.json", lambda c: c["model"]["merges"].clear()),
            "cut text differently", "the same merges"),
    drafted("narrow-draft", logits(290), "300 and 290 logits", "10 tokens only"),
    drafted("damaged-tokenizer", replaced("tokenizer.json", '{"a": 1}'), "the tokenizer cannot be read"),
    drafted("one-synthetic", nothing, "one model has a tokenizer", "synthetic", draft="draft=tiny_draft"),
    hostile("padding-alone", logits(320), NO_TOKEN, code=2, reach=LOADED, extra=(banned(range(300)),)),
    hostile("ends-alone", nothing, NO_TOKEN, code=2, reach=LOADED,
            extra=(BUT_THE_END, "sampling.min_new_tokens=2")),
]  # fmt: skip

TABLE = [*SETTINGS, *MACHINES, *PROMPTS, *TASKS, *PAIRS]
