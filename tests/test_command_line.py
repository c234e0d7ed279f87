"""Short forms, help and completion: they say the same as the overrides that they stand for."""

from __future__ import annotations

import io
import logging
import os
import random
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from llama_ssp import __version__, cli
from llama_ssp.config import TASKS, GenerateConf, PromptedConf, RunConf
from llama_ssp.config.completion import candidates, completion
from llama_ssp.config.compose import composed
from llama_ssp.config.describe import descriptions, keys_of_group, keys_of_task
from llama_ssp.config.environment import RankEnvironment
from llama_ssp.config.help import help_for, markdown, overview
from llama_ssp.config.overrides import check_arguments
from llama_ssp.config.presets import GROUPS
from llama_ssp.config.run import known_keys
from llama_ssp.config.schema import (
    ClusterConf,
    ModelConf,
    PlacementConf,
    PlanningConf,
    SamplingConfig,
    SlurmConf,
    SpeculationConfig,
    TimesConf,
)
from llama_ssp.config.short_forms import COMMANDS, COMPLETION
from llama_ssp.errors import RunError, UsageError
from llama_ssp.text.prompts import read_prompts
from tests.conftest import Command

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = (
    RunConf, ModelConf, PlacementConf, TimesConf, SlurmConf, ClusterConf, PlanningConf, SamplingConfig,
    SpeculationConfig, *TASKS.values(),
)  # fmt: skip


def run_of(*arguments: str) -> RunConf:
    return composed(check_arguments(list(arguments)))


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("compare 30B 7B", "task=compare model=30B draft=7B"),
        ("compare model=30B draft=7B", "task=compare model=30B draft=7B"),
        ("compare 30B draft=7B", "task=compare model=30B draft=7B"),
        ("seed=1 plan 65B 7B cluster=p4d", "seed=1 task=plan model=65B draft=7B cluster=p4d"),
        ("plan 65B", "task=plan model=65B draft=none"),
        ("model=65B", "model=65B draft=none"),
        ("measure repeats=1 ks=[2] plot=a.svg", "task=measure task.repeats=1 task.ks=[2] task.plot=a.svg"),
        ("measure ks=1,2,4", "task=measure task.ks=[1,2,4]"),
        ("eval pairs=13B/7B,7B sizes=10", "task=eval task.pairs=[13B/7B,7B] task.sizes=[10]"),
        ("prompt=hi prompt=ho", "task.prompts=[hi,ho]"),
        ("model=a/b draft=c/d.e", "model=local model.name=a/b model.repo=a/b draft=local draft.name=c/d.e "
         "draft.repo=c/d.e"),
        ("model=demo draft=demo_head", "model=demo draft=demo_head"),
    ],
)  # fmt: skip
def test_a_short_form_means_the_long_one(short: str, long: str) -> None:
    assert run_of(*short.split()) == run_of(*long.split())
    again = check_arguments(short.split())
    assert check_arguments(again) == again  # a job's own processes get the long form


def test_a_model_goes_by_its_folder_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "70b'x").mkdir()
    file = tmp_path / "small.gguf"
    file.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "70b'x")
    run = run_of("model=.", "draft=~/small.gguf")
    assert run.draft is not None
    assert (run.model.name, run.model.path) == ("70b'x", ".")
    assert (run.draft.name, run.draft.path) == ("small.gguf", "~/small.gguf")
    (tmp_path / "70b'x" / "org" / "model").mkdir(parents=True)
    assert run_of("model=org/model").model.path == "org/model"  # what is there comes before the hub


def test_any_text_is_a_prompt_as_it_is() -> None:
    draw, signs = random.Random(5), "\\'\"${}[],:=#~ \n\tab\u00e9\u65e5&|<>()!*?"
    texts = ["", "${seed}", "\\${seed}", "$$", "'", "\\", "\\'", "null", "[a, b]", "true", " a ", "{}", "1e3"]
    texts += ["".join(draw.choices(signs, k=draw.randint(1, 12))) for _ in range(300)]
    task = run_of(*(f"prompt={text}" for text in texts)).task
    assert isinstance(task, GenerateConf) and task.prompts == texts


def test_without_quoting_some_texts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr("llama_ssp.config.short_forms.quoted", lambda text: f"'{text}'")
    with pytest.raises((AssertionError, RunError)):
        test_any_text_is_a_prompt_as_it_is()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("30B", "the first word is not a task; found '30B'"),
        ("-q report", "report is not the first word; write llama-ssp report"),
        ("compar 30B", "did you mean compare"),
        *((f"{name}x", f"did you mean {name}") for name in COMMANDS),
        ("plan 7b", "did you mean model=7B"),
        ("plan 7B_4GPUs", "--nproc-per-node 4 launch/run.py ... model=7B"),
        ("plan 7B_8bit_4GPUs", "--nproc-per-node 4 launch/run.py ... model=7B_8bit"),
        ("plan /no/such", "there is no such folder or file; /no/such"),
        ("plan nothing-like-it", "llama-ssp model --help lists the presets"),
        ("plan model=local", "model=local names no model"),
        ("plan 7B model=13B", "model is given twice"),
        ("plan a/b model.path=/x", "model.path is given, and model=a/b names a model already"),
        ("model.repo=a/b", "model.repo is given, and no model is named"),
        ("draft.path=/x", "draft.path is given, and no draft is named"),
        ("model=7B draft.dtype=int8", "draft.dtype is given, and no draft is named"),
        ("sampling.temp=1", "did you mean sampling.temperature"),
        ("sampling", "sampling has no value"),
        ("generate a/b c/d e", "words without a key; found e"),
        ("prompt=a task.prompts=[b]", "both prompt and task.prompts are given"),
    ],
)
def test_refused_with_a_hint(words: str, says: str) -> None:
    with pytest.raises(RunError) as raised:
        check_arguments(words.split())
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("plan repeats=2", "task=plan has no key repeats; found task.repeats, allowed prompt_tokens"),
        ("plan records=5", "task.records is of a job over nodes"),
        ("plan prompt=hi", "task=plan has no key prompt;"),
        ("task=agree_schema", "there is no task=agree_schema; allowed agree"),
        ("task.prompts=hello", "write prompt='your text'"),
        ("batch output=a.jsonl", "task.output=FILE"),
        ("--shell-completion", "llama-ssp completion bash"),
        ("model=demo model.repo=a/b", "model.repo is given, and the files are in a folder"),
        ("model=tiny model.path=/x", "model.weights=synthetic reads no files"),
        (
            "model=a/b model.weights=synthetic",
            "reads no files; found a/b; name a preset",
        ),
        ("batch cluster.slurm.time=20", "write cluster=slurm, or leave it out"),
        ("batch cluster.kubernetes.image=a", "unknown key cluster.kubernetes.image"),
        ("generate placement.max_memory={a:b}", "write '+placement.max_memory={0"),
        ("plan cluster.gpu=A100_40", "did you mean A100-40?"),
    ],
)
def test_the_command_s_own_words(words: str, says: str, command: Command) -> None:
    answer = command(*words.split())
    assert answer.code == 2 and len(answer.errors) == 1 and says in answer.errors[0]


def test_an_error_shows_a_long_path_in_part_and_others_whole(command: Command) -> None:
    answer = command("generate", "-cd", "x" * 5000)
    assert answer.code == 6 and len(answer.errors) == 1 and len(answer.errors[0]) < 1500
    assert "(5000 characters)" in answer.errors[0]
    usual = "/" + "x" * 200 + "/" + "y" * 200
    assert usual in str(UsageError("wrong", usual)) and len(str(UsageError("wrong", usual * 10))) < 1500


def test_each_key_is_described_once() -> None:
    for schema in SCHEMAS:
        known = {entry.name for entry in fields(schema)}
        texts = descriptions(schema)
        assert known == {*texts} | ({"name"} & known), schema
        assert all(text.endswith((".", ")", "'")) for text in texts.values()), schema
    described = {key.name for group in GROUPS[:6] for key in keys_of_group(group)}
    assert {key for key in known_keys() if key.startswith("sampling.")} <= described


def test_the_page_of_keys_is_made_of_the_descriptions() -> None:
    """If not: python -m llama_ssp.config.help > docs/keys.md"""
    assert (ROOT / "docs" / "keys.md").read_text(encoding="utf-8") == markdown()


def test_help_fits_a_screen_and_a_task_s_help_is_about_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = overview().splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert all(f"  {task} " in overview() for task in TASKS)
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["measure"], ["task=measure", "model=7B"]):
        said = help_for(words)
        assert all(f"  {key.name}=" in said for key in keys_of_task("measure"))
        assert "cluster.gpus" not in said and "require_fit" not in said
        assert max(map(len, said.splitlines())) <= 80
    assert "7B_8bit" in help_for(["model"]) and "_schema" not in help_for(["task"])
    assert "sampling.top_k" not in help_for(["plan"])
    assert help_for([COMPLETION]) == help_for(["--help", "x"]) == help_for(["a=b", "x"]) == overview()
    with pytest.raises(RunError, match="did you mean measure"):
        help_for(["mesure", "--help"])


def test_version_and_help_are_printed(command: Command) -> None:
    said = command("--version").out
    assert said.startswith(f"llama-ssp {__version__} (python 3.")
    assert "torch 2." in said and "transformers" in said
    assert command("--help").out == overview() == command("--help", "--config-dir=x").out
    assert cli._answer(["completion", "words", "generate", "--help"]) == "--help\n", "a line to complete"
    assert "[above 0, up to 1]" in " ".join(command("sampling", "--help").out.split()), "top_p=0 is refused"


@pytest.mark.parametrize(
    ("line", "holds", "lacks"),
    [
        ("comp", {"compare"}, {"completion words"}),
        ("compare 7", {"7B", "7B_8bit"}, {"13B", "local"}),
        ("compare 7B pro", {"prompt=", "prompts=", "prompt_file="}, {"prompt_tokens="}),
        ("plan sampling=", {"sampling=greedy", "sampling=nucleus"}, {"sampling=none"}),
        ("plan sampling.te", {"sampling.temperature="}, set()),
        ("generate engine=", {"engine=auto", "engine=compiled"}, set()),
        ("batch task.out", {"task.output="}, {"task.task.output="}),
        ("batch out", {"output=", "out="}, set()),
        ("generate --c", {"--cfg", "--config-dir"}, {"--config-path"}),
    ],
)
def test_words_that_complete_a_line(line: str, holds: set[str], lacks: set[str]) -> None:
    found = set(candidates(line.split(" ")))
    assert holds <= found and not lacks & found


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_a_line(tmp_path: Path) -> None:
    """The function that bash calls upon a tab, with what bash gives it; an = divides a word."""
    command = tmp_path / "llama-ssp"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m llama_ssp "$@"\n')
    command.chmod(0o755)
    script = (
        completion(["bash"])
        + """
complete -p llama-ssp
tried() { COMP_LINE="$1"; COMP_POINT=${#1}; COMPREPLY=(); _llama_ssp; echo "${COMPREPLY[*]}"; }
tried "llama-ssp calib"
tried "llama-ssp plan sampling=gre"
tried "llama-ssp plan /etc/hostn"
"""
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "complete -F _llama_ssp llama-ssp", "calibrate", "greedy", "/etc/hostname",
    ]  # fmt: skip


def test_outside_of_its_environment_it_says_what_to_do() -> None:
    alone = [sys.executable, "-S", "-E", str(ROOT / "launch" / "run.py"), "--help"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: omegaconf is not installed") and "machine-install.sh" in done.stderr


def test_a_prompt_file_may_be_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tasks with prompts of their own, too."""
    for said in (b"one\n\ntwo\n", b'{"prompt": "one"}\n{"prompt": "two"}\n'):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said)))
        task = run_of("certify", "prompt_file=-").task
        assert isinstance(task, PromptedConf)
        assert [prompt.text for prompt in read_prompts(task).prompts] == ["one", "two"]


@pytest.mark.parametrize(
    ("flag", "rank", "own", "libraries"),
    [
        ("", 0, logging.INFO, logging.WARNING), ("", 1, logging.ERROR, logging.ERROR),
        ("-q", 0, logging.WARNING, logging.WARNING), ("-q", 1, logging.ERROR, logging.ERROR),
        ("-v", 0, logging.DEBUG, logging.INFO), ("-v", 1, logging.DEBUG, logging.INFO),
    ],
)  # fmt: skip
def test_quiet_and_verbose_set_the_log(
    flag: str, rank: int, own: int, libraries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    monkeypatch.setattr(sys, "argv", ["llama-ssp", flag])
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "as-it-was")  # restored at the end
    monkeypatch.setattr(cli, "rank_environment", lambda: RankEnvironment(rank, 2))
    monkeypatch.setattr(logging, "basicConfig", lambda level, **_: levels.append(level))
    monkeypatch.setattr(logging.Logger, "setLevel", lambda _, level: levels.append(level))
    cli._begin_log()
    assert levels == [libraries, own]
    assert (os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1") == (flag == "-q")
