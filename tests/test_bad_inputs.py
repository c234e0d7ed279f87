"""Bad settings, machines and prompts, walked as a table: one line and an exit code, before anything heavy."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.bad_inputs import (
    ILLEGAL,
    LARGE,
    PROMPT,
    Case,
    Making,
    prompt_file,
    require_one_line,
    target,
    usage,
)
from tests.checkpoints import edit
from tests.conftest import Command, Saved
from tests.hostile.corpus import FILES, LOADED
from tests.hostile.damage import pipe, sparse


def occupied(making: Making) -> list[str]:
    return [PROMPT, f"out={making.write('taken', 'a file')}"]


LONG = "a" * (16 * 2**20 + 1)
DEEP = '{"prompt": ' + "[" * 100_000

SETTINGS = [
    usage(1, "unknown", "speculation.kk=5", holds=("unknown key speculation.kk", "speculation.k?")),
    usage(1, "unknown-leaf", "mem=1", holds=("unknown key mem", "cluster.slurm.mem")),
    usage(1, "unknown-root", "+zz=1", holds=("unknown key zz",)),
    usage(1, "unknown-option", "model=llama7", holds=("there is no model=llama7", "did you mean model=")),
    usage(1, "unknown-task", "task=talk", holds=("there is no task=talk", "generate")),
    usage(1, "no-value", "hello", holds=("the first word is not a task", "hello", "generate")),
    usage(1, "group-null", "draft=null", holds=("draft=null", "a preset")),
    usage(1, "group-empty", "sampling=", holds=("sampling=", "greedy")),
    usage(1, "deleted", "~speculation.k", holds=("speculation.k", "does not support deletion")),
    usage(1, "deleted-unknown", "~nope", holds=("'nope' does not exist",)),
    usage(1, "appended", "+speculation.k=3", holds=("speculation.k",)),
    usage(1, "draft-none-path", "draft=none", "draft.path=/x", holds=("draft.path", "draft=none")),
    usage(1, "flag-value", "--cfg", "jobs", holds=("--cfg", "invalid choice: 'jobs'", "'job'")),
    usage(2, "text-as-int", "speculation.k=abc", holds=("speculation.k", "'abc'", "Integer")),
    usage(2, "text-as-float", "sampling.top_p=high", holds=("sampling.top_p", "'high'", "Float")),
    usage(2, "text-as-bool", "task.chat=maybe", holds=("task.chat", "'maybe'", "bool")),
    usage(2, "bad-enum", "model.dtype=fp17", holds=("model.dtype", "'fp17'", "bf16")),
    usage(2, "word-in-list", "sampling.bad_tokens=[a]", holds=("bad_tokens", "'a'", "Integer")),
    usage(2, "nested-list", "sampling.bad_tokens=[[1]]", holds=("sampling.bad_tokens", "list[int]")),
    usage(2, "deep", "sampling.bad_tokens=" + "[" * 1000, holds=("an override cannot be read",)),
    usage(2, "null", "sampling.temperature=null", holds=("'sampling.temperature' is not Optional",)),
    usage(2, "interpolated", "sampling.bad_tokens=${model.name}", holds=("sampling.bad_tokens", "'tiny'")),
    usage(2, "no-variable", "out=${oc.env:NOPE}", holds=("variable 'NOPE' not found", "out")),
    usage(2, "half-interpolation", "out=${", holds=("out", "${")),
    usage(1, "group-outside", "sampling=../../../../x", holds=("there is no sampling",)),
    usage(2, "no-such-interpolation", "out=${nope}", holds=("nope",)),
    usage(2, "sweep", "seed=1,2", holds=("seed", "--multirun")),
    usage(2, "empty-path", "model=7B", "model.path=", holds=("model.path cannot be used", "found ''")),
    usage(2, "empty-out", "out=", holds=("out cannot be used", "found ''")),
    usage(4, "negative", "speculation.k=-1", holds=("speculation.k", "-1", "[0, 64]")),
    usage(4, "huge", "speculation.k=1000000000", holds=("speculation.k", "[0, 64]")),
    usage(4, "fraction", "speculation.k=2.5", holds=("speculation.k", "'2.5'", "Integer")),
    usage(4, "k-max", "speculation.k_max=0", holds=("speculation.k_max", "[1, 64]")),
    usage(4, "ngram", "speculation.ngram_min=5", holds=("speculation.ngram_max", "[5, 32]")),
    usage(6, "negative", "sampling.temperature=-1", holds=("sampling.temperature", "0 means argmax")),
    usage(6, "vanishing", "sampling.temperature=1e-40", holds=("sampling.temperature", "0 means argmax")),
    usage(8, "zero", "sampling.top_p=0", holds=("sampling.top_p", "(0.0, 1.0]")),
    usage(8, "above-one", "sampling.top_p=1.1", holds=("sampling.top_p", "1.1")),
    usage(8, "min-p", "sampling.min_p=-0.1", holds=("sampling.min_p",)),
    usage(9, "negative", "sampling.top_k=-1", holds=("sampling.top_k", "0 keeps all")),
    usage(9, "penalty", "sampling.repetition_penalty=0", holds=("sampling.repetition_penalty",)),
    usage(9, "bias-nan", "+sampling.logit_bias={5:nan}", holds=("sampling.logit_bias.5", "found nan")),
    usage(9, "bias-token", "+sampling.logit_bias={512:1}", holds=("logit_bias token", "512", "[0, 511]")),
    usage(9, "bias-key", "+sampling.logit_bias={abc:1}", holds=("sampling.logit_bias",)),
    usage(9, "bias-dotted", "+sampling.logit_bias.5=1", holds=("sampling.logit_bias.5",)),
    usage(9, "banned-token", "sampling.bad_tokens=[512]", holds=("bad_tokens token", "[0, 511]")),
    usage(10, "zero", "task.max_new_tokens=0", holds=("task.max_new_tokens", "found 0")),
    usage(10, "past-context", "task.max_new_tokens=1024", holds=("1024", "1023", "context of 1024")),
    usage(10, "context-of-one", "model.context=1", holds=("a context of 1 tokens", "out of range")),
    usage(10, "min-above-max", "sampling.min_new_tokens=200", holds=("min_new_tokens", "found 200")),
    usage(11, "negative", "seed=-1", holds=("seed", "found -1")),
    usage(11, "huge", f"seed={2**63}", holds=("seed", str(2**63))),
    usage(12, "lenience", "+speculation.lenience=0.9", holds=("not lossless", "lenience")),
    usage(12, "typical", "+speculation.typical_acceptance=true", holds=("not lossless", "typical")),
    usage(28, "heads", "model.n_heads=6", holds=("model.n_heads", "6 and 4")),
    usage(31, "no-such-device", "placement.target_device=tpu", holds=("target_device", "'tpu'", "cuda:N")),
    usage(32, "no-gib", "cluster.gib=nan", holds=("cluster.gib", "found nan")),
    usage(36, "no-patience", "placement.timeout_s=0.5", holds=("placement.timeout_s", "[1.0, 86400.0]")),
    usage(46, "task-name", "task.name=../../x", holds=("task.name is not a task", "generate")),
    usage(1, "unknown-experiment", "experiment=chen", holds=("experiment=chen", "mean experiment=chen2023")),
    usage(
        10, "overlap-beside", "speculation.overlap=ahead", holds=("on ranks of its own only", "placement=own")
    ),
    usage(10, "overlap-word", "speculation.overlap=always", holds=("speculation.overlap", "ahead")),
    usage(10, "draft-patience", "placement.draft_timeout_s=0", holds=("placement.draft_timeout_s",)),
    usage(46, "hydra-launcher", "hydra/launcher=nope", holds=("there is no hydra/launcher=nope",)),
    usage(46, "no-config-dir", "--config-dir=/no/such", holds=("directory '/no/such' not found",)),
    usage(46, "flag-begun", "--config-d=/tmp", holds=("unknown flag --config-d",)),
]

MACHINES = [
    Case(30, "not-a-number", (PROMPT,), 5, ("WORLD_SIZE", "'many'", "torchrun"), env={"WORLD_SIZE": "many"}),
    *(
        Case(30, name, (PROMPT,), 5, holds, env=dict(pair.split("=") for pair in variables.split()))
        for name, variables, holds in [
            ("endless-ranks", f"WORLD_SIZE={'9' * 5000}", ("WORLD_SIZE", "1..1048576")),
            ("no-ranks", "WORLD_SIZE=0", ("WORLD_SIZE", "'0'", "1..1048576")),
            ("rank-beyond", "WORLD_SIZE=2 RANK=5", ("RANK", "'5'", "0..1", "torchrun")),
            ("rank-of-one", "WORLD_SIZE=1 RANK=1", ("RANK", "'1'", "allowed 0;")),
            ("no-rank", "WORLD_SIZE=2 RANK=one", ("RANK", "'one'", "0..1")),
            ("odd-digits", "WORLD_SIZE=2 RANK=\u0661", ("RANK", "0..1")),
            (
                "local-rank-beyond",
                "WORLD_SIZE=4 RANK=1 LOCAL_RANK=4",
                ("LOCAL_RANK", "'4'", "0..3"),
            ),
        ]
    ),
    Case(
        30,
        "ranks",
        (PROMPT,),
        5,
        ("not by torchrun", "no store that a launcher keeps", "--nproc-per-node"),
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
    Case(40, "no-input", (), 2, ("there is no prompt", "prompt=")),
    Case(40, "blank-input", (), 2, ("there is no prompt",), stdin=b"\n \n\r\n"),
    Case(40, "two-sources", (PROMPT, "task.prompt_file=x"), 2, ("both task.prompts and task.prompt_file",)),
    Case(40, "empty-stop", (PROMPT, 'task.stop=[""]'), 2, ("task.stop entry cannot be used", "not empty")),
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
    prompt_file(
        43, "twice", "a.jsonl", '{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', "twice", "'1'",
    ),
    prompt_file(43, "twin-key", "a.jsonl", '{"prompt": "a", "prompt": "b"}', "a key is given twice"),
    prompt_file(43, "nan", "a.jsonl", '{"prompt": "a", "x": NaN}', "NaN is not JSON"),
    prompt_file(43, "long-line", "a.jsonl", LONG, "too long", "16777217 bytes"),
    prompt_file(43, "deep", "a.jsonl", DEEP, "nested too deeply", "line 1"),
    prompt_file(43, "huge-number", "a.jsonl", f'{{"prompt": "a", "id": {"9" * 5000}}}', "5000 digits"),
    prompt_file(43, "many-keys", "a.jsonl", json.dumps({"k" * 90_000: 1}), "no prompt", "characters)"),
    prompt_file(43, "truth-id", "a.jsonl", '{"prompt": "a", "id": true}', "whole number", "bool"),
    prompt_file(43, "ndjson", "a.ndjson", '{"prompt": 5}', "no prompt", "line 1"),
    prompt_file(43, "capitals", "a.JSONL", '{"prompt": 5}', "no prompt", "line 1"),
    Case(43, "input-bom", (), 3, ("not JSON", "line 2"), stdin=b'\xef\xbb\xbf{"prompt": "a"}\n{'),
    prompt_file(44, "newline", "a.jsonl", '{"prompt": "a", "id": "x\\ny"}', "an id is unusable", "x\\ny"),
    prompt_file(44, "long-id", "a.jsonl", json.dumps({"prompt": "a", "id": "x" * 10**4}), "unusable", "256"),
    prompt_file(44, "empty-id", "a.jsonl", '{"prompt": "a", "id": ""}', "an id is unusable"),
    Case(
        43, "huge",
        lambda m: [sparse("p", b"a", 2**30 + 1)(m.folder) or f"task.prompt_file={m.folder / 'p'}"], 3,
        ("task.prompt_file is too large", "1073741825 bytes", "allowed 1073741824 bytes"),
    ),
    Case(43, "folder", ("task.prompt_file=/tmp",), 3, ("not a regular file", "/tmp")),
    Case(43, "absent", ("task.prompt_file=/no/such",), 3, ("does not exist", "/no/such")),
    Case(
        43, "pipe-without-writer", lambda m: [pipe("p")(m.folder) or f"task.prompt_file={m.folder / 'p'}"], 2,
        ("there is no prompt",),
    ),
    Case(
        43, "all-bad", lambda m: [f"task.prompt_file={m.write('a.jsonl', '{')}", "task.on_bad_row=skip"], 3,
        ("no usable prompt", "1 bad"),
    ),
    Case(47, "out-is-a-file", occupied, 6, ("cannot write the run folder", "out=FOLDER"), FILES),
]  # fmt: skip


TABLE = [*SETTINGS, *MACHINES, *PROMPTS]


@pytest.mark.few(25)
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_one_line_and_its_code(
    case: Case, command: Command, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_one_line(case, command, saved, tmp_path, monkeypatch)


def test_standard_input_is_bounded(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe without end is refused where its bound is, not when memory is full."""
    monkeypatch.setattr("llama_ssp.text.prompts.MAX_INPUT_BYTES", 8, raising=False)
    answer = command(stdin=b"hello\nyou")
    assert (answer.code, len(answer.errors)) == (3, 1)
    assert "standard input is too large" in answer.errors[0] and "more than 8 bytes" in answer.errors[0]
    assert command("task.max_new_tokens=1", "seed=1", stdin=b"hello\nyo").code == 0


class OutOfMemoryError(RuntimeError):
    """As torch's own of a GPU."""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "reached",
    [
        "llama_ssp.config.compose.register",
        "llama_ssp.planner.resolve.pair_specs",
        "llama_ssp.tasks.runner.execute",
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
    ids=["python", "gpu", "cpu"],
)  # fmt: skip
def test_short_memory_is_one_line(
    error: Exception, reached: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(reached, fails)
    answer = command(PROMPT)
    assert (answer.code, len(answer.errors)) == (5, 1)
    on_gpu = isinstance(error, OutOfMemoryError)
    said = "the GPU's memory is full" if on_gpu else "memory is short"
    assert said in answer.errors[0] and type(error).__name__ in answer.errors[0]
    assert ("ulimit" in answer.errors[0]) != on_gpu


def test_a_gpu_that_fails_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of torch's text: the others are the same for every error."""

    def fails(*_: object) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr("llama_ssp.tasks.runner.execute", fails)
    answer = command(PROMPT)
    assert (answer.code, len(answer.errors)) == (5, 1)
    assert "found AcceleratorError: CUDA error: an illegal memory access was encountered;" in answer.errors[0]
    assert "For debugging" not in answer.errors[0]


@pytest.mark.slow
def test_endless_input_in_little_memory(tmp_path: Path) -> None:
    """`run.py < /dev/zero`: refused at the bound; where memory ends before, that is said."""
    words = [sys.executable, "-m", "llama_ssp", "task.max_new_tokens=1", "out=null"]
    for limit, code, said in ((2 * 2**30, 3, "standard input is too large"), (2**28, 5, "memory is short")):
        with open("/dev/zero", "rb") as zeros:
            ended = subprocess.run(
                words, stdin=zeros, capture_output=True, text=True, cwd=tmp_path, timeout=300,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),  # noqa: B023
            )  # fmt: skip
        lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
        assert (ended.returncode, len(lines)) == (code, 1), ended.stderr
        assert said in lines[0] and "Traceback" not in ended.stderr


def test_what_looks_odd_but_is_allowed(command: Command) -> None:
    """K = 0, temperature 0, top_k past the vocabulary (rows 3, 5, 7, 9): no error, and it ends."""
    answer = command(
        PROMPT, "speculation.k=0", "sampling.temperature=0", "sampling.top_k=600", "task.max_new_tokens=3",
        "output=json", "seed=1", "+sampling.logit_bias={5:-2}",
    )  # fmt: skip
    assert (answer.code, answer.errors) == (0, [])
    assert [o["output_tokens"] for o in answer.document["outputs"]] == [3]


SECRET = "hush-hush"


def test_what_the_user_interpolates_is_resolved(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In paths and names; a prompt, and what ends a text, is text."""
    monkeypatch.setenv("SECRET", SECRET)
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/a.yaml").write_text("defaults: [tiny]\nname: ${oc.env:SECRET}\nseed: 7")
    text = "${oc.env:SECRET} ${seed} ${"
    words = [f"prompt={text}", f"stop={text}", "-n", "1", "seed=1", "out=${oc.env:SECRET}/o"]
    answer = command("--config-dir=mine", "model=a", *words)
    assert (answer.code, answer.errors) == (0, [])
    [record] = Path(SECRET, "o").rglob("config.yaml")
    config = yaml.safe_load(record.read_text())
    assert (config["model"]["name"], config["out"]) == (SECRET, f"{SECRET}/o")
    assert (config["task"]["prompts"], config["task"]["stop"]) == ([text], [text])


def test_private_presets_are_taken(command: Command) -> None:
    """What they are for: models, settings, and experiments that choose among both."""
    for name, content in {
        "model/mine.yaml": "name: mine\ndefaults: [tiny, _self_]\ncontext: 512",
        "sampling/warm.yaml": "temperature: 0.7\ntop_p: ${oc.select:sampling.min_p,1.0}",
        "experiment/both.yaml": "# @package _global_\ndefaults:\n"
        "- override /sampling: warm\n- override /draft: tiny_draft\nseed: 5\n"
        "speculation: {k: 3}\nsampling: {top_p: &p 0.9, min_p: *p}",
    }.items():
        Path("mine", name).parent.mkdir(parents=True, exist_ok=True)
        Path("mine", name).write_text(content)
    run_folder = "out=done/${now:%Y}/${model.name}"
    asked = ["model=mine", "experiment=both", "output=json", "task.max_new_tokens=1", run_folder]
    answer = command("--config-dir", "mine", PROMPT, *asked)
    assert (answer.code, answer.errors) == (0, [])
    assert answer.document["seed"] == 5
    [record] = Path("done").rglob("*/mine/**/config.yaml")
    config = yaml.safe_load(record.read_text())
    assert (config["model"]["context"], config["speculation"]["k"]) == (512, 3)
    assert (config["sampling"]["temperature"], config["sampling"]["min_p"]) == (0.7, 0.9)


def test_a_sweep_leaves_nothing_behind(command: Command) -> None:
    answer = command("-m", PROMPT, "seed=1,2", "out=null", "output=json", "task.max_new_tokens=1")
    assert (answer.code, answer.errors) == (0, [])
    assert [json.loads(line)["seed"] for line in answer.out.splitlines()] == [1, 2]
    assert list(Path.cwd().iterdir()) == []


def test_k_shrinks_where_the_context_ends(command: Command) -> None:
    answer = command('task.prompts=["' + "x" * 1020 + '"]', "speculation.k=64", "output=json", "seed=1")
    assert (answer.code, answer.document["outputs"][0]["finish_reason"]) == (0, "context")


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
    assert answer.document["rows_skipped"] == 3
    assert [o["id"] for o in answer.document["outputs"]] == ["a"]
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
    seed = answer.document["seed"]
    assert f"seed={seed} (drawn" in caplog.text
    folder = Path(answer.document["run_folder"])
    assert f"seed: {seed}" in (folder / "config.yaml").read_text()
