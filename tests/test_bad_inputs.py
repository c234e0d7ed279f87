"""Mistakes of users end in one line and an exit code, before anything heavy; what looks odd is done.

The table is tests/refusals.py, walked here in this process by the engine of one rank. `python -m
tests.hostile` tries its model folders by every engine, and watches what is opened and run.
"""

import errno
import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llama_ssp import load_pair
from llama_ssp.errors import ModelError
from llama_ssp.pair import assembly
from tests import checkpoints, refusals
from tests.checkpoints import copied, edit, edit_tensors
from tests.conftest import Command, Saved
from tests.refusals import ALONE, BUT_THE_END, ILLEGAL, PROMPT, Case


def too_far(*_: object) -> None:
    pytest.fail("the run went on past what is wrong")


CASES = [
    pytest.param(case, marks=pytest.mark.slow if case.reach == refusals.LOADED else [])
    for case in (*refusals.TABLE, *refusals.CORPUS)
    if case.code
]


@pytest.mark.few(40)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_refusal_is_one_line_with_its_code(
    case: Case, command: Command, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command may come as far as the case says."""
    for variable in case.env.items():
        monkeypatch.setenv(*variable)
    if case.reach == refusals.CONFIG:  # it may not be imported yet
        monkeypatch.setattr("llama_ssp.tasks.runner", too_far, raising=False)
    if case.reach in (refusals.CONFIG, refusals.FILES):
        monkeypatch.setattr(assembly, "load", too_far)
    case.makes(Path.cwd())
    if case.damage is not None:
        case.damage(copied(saved.sharded if case.sharded else saved.whole, Path("model").absolute()))
    answer = command(*(word.replace(refusals.SOUND, str(saved.whole)) for word in case.words))
    assert case.problems([answer.code], answer.out, answer.err) == []


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


class OutOfMemoryError(RuntimeError):
    """As torch's own of a GPU."""


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "step", ["config.compose.register", "placing.start.prepared", "tasks.runner.execute"]
)
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "memory is short"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), "memory is short"),
        (OutOfMemoryError("CUDA out of memory"), "the GPU's memory is full"),
        (torch.AcceleratorError(ILLEGAL), "CUDA error: an illegal memory access was encountered;"),
    ],
    ids=["python", "cpu", "gpu", "gpu-fails"],
)  # fmt: skip
def test_a_fault_of_the_machine_is_one_line(
    error: Exception, says: str, step: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch's text on a GPU the first line: the others are the same for every error."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"llama_ssp.{step}", fails)
    answer = command(PROMPT)
    assert (answer.code, len(answer.errors)) == (5, 1)
    assert says in answer.errors[0] and type(error).__name__ in answer.errors[0]
    assert ("ulimit" in answer.errors[0]) == ("memory is short" in says)
    assert "For debugging" not in answer.errors[0]


def test_a_full_disk_costs_no_work(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for all files but the summary: the document is given out all the same."""
    write = Path.write_text

    def writing(path: Path, *args: Any, **more: Any) -> int:
        if path.name.startswith("summary.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **more)

    monkeypatch.setattr(Path, "write_text", writing)
    answer = command(PROMPT, "task.max_new_tokens=2", "seed=1", "output=json")
    assert answer.code == 6 and len(answer.errors) == 1 and "No space left" in answer.errors[0]
    assert answer.document["status"] == "done"


def test_what_looks_odd_but_is_allowed(command: Command, saved: Saved) -> None:
    """K = 0, temperature 0, top_k past the vocabulary, K past the context's end, an end alone."""
    answer = command(
        PROMPT, "speculation.k=0", "sampling.temperature=0", "sampling.top_k=600", "task.max_new_tokens=3",
        "output=json", "seed=1", "+sampling.logit_bias={5:-2}",
    )  # fmt: skip
    assert (answer.code, answer.errors) == (0, [])
    assert [o["output_tokens"] for o in answer.document["outputs"]] == [3]
    answer = command('task.prompts=["' + "x" * 1020 + '"]', "speculation.k=64", "output=json", "seed=1")
    assert (answer.code, answer.document["outputs"][0]["finish_reason"]) == (0, "context")
    assert command(PROMPT, f"model={saved.whole}", *ALONE[2:], BUT_THE_END).code == 0


def test_private_presets_are_taken(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are for: models, settings, and experiments that choose among both."""
    monkeypatch.setenv("NAME", "hush")
    for name, content in {
        "model/mine.yaml": "name: ${oc.env:NAME}\ndefaults: [tiny, _self_]\ncontext: 512",
        "sampling/warm.yaml": "temperature: 0.7\ntop_p: ${oc.select:sampling.min_p,1.0}",
        "experiment/both.yaml": "# @package _global_\ndefaults:\n- override /sampling: warm\n"
        "- override /draft: tiny_draft\nseed: 5\nsampling: {min_p: 0.9}",
    }.items():
        refusals.replaced(name, content)(Path("mine"))
    asked = "model=mine", "experiment=both", "out=done/${model.name}", "-n", "1", PROMPT
    answer = command("--config-dir=mine", *asked)
    assert (answer.code, answer.errors) == (0, [])
    [record] = Path("done/hush").rglob("config.yaml")
    config = yaml.safe_load(record.read_text())
    assert (config["model"]["context"], config["draft"]["name"], config["seed"]) == (512, "tiny_draft", 5)
    assert (config["sampling"]["temperature"], config["sampling"]["top_p"]) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["draft=tiny"], "no smaller than target"),
        (["model.dtype=fp16"], "model.dtype=fp16 is several times slower"),
        (["model=./model", "draft=./alias"], "the draft is the target itself"),
        (["model=./model", "draft=./ends"], "texts end with ['</s>'] and ['&', '</s>'], the target's hold"),
    ],
    ids=["a larger draft", "a slow format", "the target itself", "other ends"],
)
def test_a_warning_does_not_end_the_run(
    overrides: list[str], warning: str, command: Command, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("model", "alias"):
        Path(name).symlink_to(saved.whole)
    ends = copied(saved.whole, Path("ends")) / "generation_config.json"
    edit(ends, lambda content: content.update(eos_token_id=[1, 7]))
    answer = command(PROMPT, "task.max_new_tokens=2", "seed=1", "placement=cpu", *overrides)
    assert (answer.code, answer.errors) == (0, [])
    assert warning in caplog.text


def test_the_bounds_of_prompts_are_not_those_of_a_batch(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose input may have any size: it is not read whole."""
    monkeypatch.setattr("llama_ssp.text.prompts.MAX_FILE_BYTES", 8)
    monkeypatch.setattr("llama_ssp.text.prompts.MAX_INPUT_BYTES", 8)
    Path("in.txt").write_text("one prompt\nand another\n")
    assert "too large" in command("task.prompt_file=in.txt").err
    assert "too large" in command(stdin=b"one prompt\nand another\n").err
    words = ("task=batch", "task.max_new_tokens=2", "seed=1", "output=json", "task.output=out.jsonl")
    job = command(*words, "task.input=in.txt")
    assert (job.code, job.document["records_finished"]) == (0, 2)
    piped = command(*words, "task.output=piped.jsonl", "task.input=-", stdin=b"one prompt\nand another\n")
    assert (piped.code, piped.document["records_finished"]) == (0, 2)


def twins(path: Path) -> None:
    """The last two words of the vocabulary get one id."""
    pytest.importorskip("transformers", minversion="5.21")  # older ones copy it, and lose one of the words

    def change(content: dict[str, Any]) -> None:
        words: dict[str, int] = content["model"]["vocab"]
        *_, first, second = words
        words[first] = words[second]

    edit(path / "tokenizer.json", change)


ODD = {
    "end-beyond": (
        refusals.sets("generation_config.json", eos_token_id=[1, 999_999]),
        "no text ends by eos_token_id 999999",
    ),
    "end-below": (
        refusals.sets("generation_config.json", eos_token_id=-4),
        "no text ends by eos_token_id -4",
    ),
    "unknown-codes": (
        refusals.config_sets(quantization_config={"quant_method": "nonesuch", "bits": 4}),
        "quantization_config (nonesuch) of its config.json is left out",
    ),
    "codes-of-no-method": (
        refusals.config_sets(quantization_config={"bits": 4}),
        "quantization_config (no quant_method) of its config.json is left out",
    ),
    "twins": (twins, "have one id, 29"),
}


@pytest.mark.parametrize("splitting", ["cpu", "layers"])
@pytest.mark.parametrize("odd", ODD)
def test_what_models_have_in_error_is_said_in_a_line(
    odd: str, splitting: str, command: Command, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers runs such models, too: the run goes on."""
    damage, warning = ODD[odd]
    damage(copied(saved.whole, Path("model")))
    answer = command(*ALONE, f"placement={splitting}", "output=json")
    assert (answer.code, answer.errors) == (0, [])
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in said if warning in line]) == 1, said


def test_transformers_own_lines_about_a_config_are_not_shown(
    command: Command, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It warns of a factor below 1, in four lines; errors of ours say what cannot be."""
    library, said = logging.getLogger("transformers"), list[str]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    library.addHandler(handler)
    try:
        scaling = {"rope_type": "linear", "factor": 0.5}
        refusals.config_sets(rope_scaling=scaling)(copied(saved.whole, Path("model")))
        assert command(*ALONE).code == 0
    finally:
        library.removeHandler(handler)
    assert said == []


BAD_ROWS = '{"id": "../../evil", "prompt": "x"}', "{", '{"id": "b", "prompt": ""}', '{"id": "b", "prompt": 1}'
SKIPPING = ("task.on_bad_row=skip", "task.max_new_tokens=2", "task.trace=true", "output=json", "seed=1")


def test_bad_rows_that_are_skipped_are_counted(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    """Both what cannot be read and what the model cannot take."""
    Path("prompts.jsonl").write_text("\n".join(BAD_ROWS))
    answer = command("task.prompt_file=prompts.jsonl", *SKIPPING)
    assert (answer.code, answer.errors) == (0, [])
    assert answer.document["rows_skipped"] == 3
    assert [o["id"] for o in answer.document["outputs"]] == ["../../evil"]
    assert caplog.text.count("skipped: ") == 3


def test_no_id_becomes_the_name_of_a_file(command: Command) -> None:
    Path("prompts.jsonl").write_text(BAD_ROWS[0])
    answer = command("task.prompt_file=prompts.jsonl", *SKIPPING)
    assert [o["id"] for o in answer.document["outputs"]] == ["../../evil"]
    assert not [path for path in Path.cwd().parent.rglob("*") if "evil" in path.name]


def test_a_seed_that_was_drawn_is_kept(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    answer = command("-v", PROMPT, "task.max_new_tokens=1", "output=json")
    seed = answer.document["seed"]
    assert f"seed={seed} (drawn" in caplog.text
    folder = Path(answer.document["run_folder"])
    assert f"seed: {seed}" in (folder / "config.yaml").read_text()


@pytest.mark.parametrize(("target_size", "draft_size"), [(300, 320), (320, 300)])
def test_vocabularies_may_differ_by_padding(target_size: int, draft_size: int, command: Command) -> None:
    """The wider of the two favours its padding beyond all; it is never drawn, by either."""

    def favour_padding(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][:300] *= 0.01
        tensors["lm_head.weight"][300:] *= 50

    for name, size in (("model", target_size), ("draft", draft_size)):
        checkpoints.save(Path(name), vocab_size=size)
    edit_tensors(Path("model" if target_size > draft_size else "draft"), favour_padding)
    words = "model=./model", "draft=./draft", "task.max_new_tokens=24", "seed=1", "output=json"
    answer = command(PROMPT, *words)
    assert (answer.code, answer.errors) == (0, [])
    (output,) = answer.document["outputs"]
    assert output["output_tokens"] == 24 or output["finish_reason"] == "eos"
    assert max(output["token_ids"]) < 300


@pytest.fixture
def half_broken(saved: Saved, command: Command) -> int:
    """Makes a ./model whose row of the embedding is not numbers for one token, which is returned."""
    bad: int = checkpoints.tokenizer().token_to_id("~")
    folder = copied(saved.whole, Path("model"))
    edit_tensors(folder, lambda t: t["model.embed_tokens.weight"][bad].fill_(torch.nan))
    return bad


def test_a_row_of_nan_stops_alone(command: Command, half_broken: int) -> None:
    """Only the prompt that uses the token stops, and the exit code says so."""
    banned = f"sampling.bad_tokens=[1,{half_broken}]"
    answer = command(*ALONE[1:], 'task.prompts=["a", "b~", "c"]', banned, "output=json")
    assert (answer.code, len(answer.errors)) == (4, 1) and "Traceback" not in answer.err
    for part in ("not numbers", "prompt '1'", "position 2", "1 of 3", "fetch the model again"):
        assert part in answer.errors[0]
    outputs = answer.document["outputs"]
    assert [o["finish_reason"] for o in outputs] == ["length", "error", "length"]
    assert [o["output_tokens"] for o in outputs] == [4, 0, 4]
    assert answer.document["status"] == "error"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_logits_without_numbers_are_said_with_the_model_s_name(
    role: str, command: Command, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(saved.whole, Path("broken"))
    edit_tensors(folder, lambda t: t["model.norm.weight"].fill_(torch.nan))
    names = {"target": str(saved.whole), "draft": str(saved.whole), role: "./broken"}
    pair = [f"model={names['target']}", f"draft={names['draft']}", "seed=1"]

    answer = command(PROMPT, *pair, "speculation.k=2", "task.max_new_tokens=4")

    assert (answer.code, len(answer.errors)) == (4, 1) and "not numbers" in answer.errors[0]
    said = [record.message for record in caplog.records if "not numbers" in record.message]
    assert said == [f"the {role} broken gave logits that are not numbers (NaN or infinite)"]


def test_a_job_whose_draft_gives_no_numbers_goes_on_without_it(
    command: Command, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """The target is sound, so the texts are."""
    folder = copied(saved.whole, Path("broken"))
    edit_tensors(folder, lambda t: t["model.norm.weight"].fill_(torch.nan))
    Path("in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "b", "c")))
    words = ("task.input=in.jsonl", "task.output=out.jsonl", "task.max_new_tokens=4", "seed=1")

    job = command("task=batch", f"model={saved.whole}", "draft=./broken", *words)

    assert job.code == 0, job.err
    answers = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert ["error" in answer for answer in answers] == [False] * 3
    assert "the draft broken gave logits that are not numbers (NaN or infinite)" in caplog.text
    assert "K = 0" in caplog.text


def test_scores_that_are_not_numbers(command: Command, half_broken: int) -> None:
    """Of a text that is only scored; in a batch only its own record has the error."""
    scoring = ("task.logprobs=1", "task.echo=true", "task.max_new_tokens=0", "output=json")
    model = ("model=./model", "draft=none", "seed=1")
    answer = command(*model, 'task.prompts=["ab", "~b"]', *scoring)
    assert answer.code == 4 and "not numbers" in answer.errors[0] and "prompt '1'" in answer.errors[0]
    assert [output["finish_reason"] for output in answer.document["outputs"]] == ["length", "error"]
    assert "NaN" not in answer.out
    lines = [{"prompt": text, "logprobs": 1, "echo": True, "max_new_tokens": 0} for text in ("ab", "~b")]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = command("task=batch", "task.input=in.jsonl", "task.output=out.jsonl", *ALONE[1:], "output=json")
    assert job.code == 0, job.err
    assert job.document["records_refused_here"] == 1
    good, refused = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert len(good["prompt_logprobs"]) == 2 and "not numbers" in refused["error"]["message"]
    with load_pair("./model", max_tokens=64) as pair, pytest.raises(ModelError, match=r"not num.*prompt '1'"):
        pair.score(["ab", "~b"])
