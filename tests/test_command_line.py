"""The command line: what its forms mean to Hydra, help, completion; and what is Hydra's own."""

import io
import json
import logging
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llama_ssp import __version__, cli
from llama_ssp.config import TASKS, GenerateConf, PromptedConf, RunConf
from llama_ssp.config.arguments import COMMANDS, completable, hydra_arguments, listed_texts
from llama_ssp.config.compose import composed
from llama_ssp.config.help import help_for, keys_of_task, markdown, overview
from llama_ssp.distributed import gpus
from llama_ssp.distributed.gpus import Gpu
from llama_ssp.errors import RunError, UsageError
from llama_ssp.tasks import runner
from llama_ssp.text.prompts import read_prompts
from tests.conftest import Command
from tests.warm import ROOT


def run_of(*arguments: str) -> RunConf:
    return composed(hydra_arguments(arguments))


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
        ("prompt=hi prompt=ho", "task.prompts=['hi','ho']"),
        ("generate 65B 7B k=4 top_p=0.5", "model=65B draft=7B speculation.k=4 sampling.top_p=0.5"),
        ("--task plan --model 7B --max-new-tokens=9", "task=plan model=7B task.max_new_tokens=9"),
        ("-p hi -n 20 --sampling greedy", "task.prompts=['hi'] task.max_new_tokens=20 sampling=greedy"),
        ("prompt=hi prompts=null", "task.prompts=null"),
        ("prompt=hi prompts=null prompt=ho", "task.prompts=['ho']"),
        ("sampling.logit_bias={5:-2}", "+sampling.logit_bias={5:-2}"),
        ("model=7B ~draft", "model=7B draft=none"),
        ("model=a/b draft=c/d.e", "model=local model.name=a/b model.repo=a/b draft=local draft.name=c/d.e "
         "draft.repo=c/d.e"),
        ("model=demo draft=demo_head", "model=demo draft=demo_head"),
    ],
)  # fmt: skip
def test_a_short_form_means_the_long_one(short: str, long: str) -> None:
    assert run_of(*short.split()) == run_of(*long.split())


def test_other_files_of_a_preset_s_shape_have_no_licence_of_its_own() -> None:
    """And not the commit of the preset's repository."""
    preset = run_of("model=llama2-7b").model
    other = run_of("model=llama2-7b", "model.repo=a/tuned").model
    named = run_of("model=llama2-7b", "model.repo=a/tuned", "model.licence=MIT").model
    assert preset.licence and preset.commit
    assert (other.licence, other.commit) == ("", None)
    assert (named.licence, named.commit) == ("MIT", None)


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
    (tmp_path / "70b'x" / "plain").mkdir()  # a name alone is a preset's, unless it is a model's folder
    with pytest.raises(UsageError, match="there is no model=plain; allowed a preset, a folder"):
        run_of("model=plain")
    (tmp_path / "70b'x" / "plain" / "config.json").touch()
    assert run_of("model=plain").model.path == "plain"


SIGNS = "\\'\"${}[],:=#~ \n\tab\u00e9\u65e5&|<>()!*?"
TEXTS = [
    "", "${seed}", "\\${seed}", "$$", "'", "\\", "\\'", "null", "[a, b]", "true", " a ", "{}", "1e3", "???",
    "${", '["a","b"]', "~/x", "a=b", "say 'arr!', please (always).",
    "a\\\n", "\\\n",
]  # fmt: skip


def test_any_text_is_a_prompt_or_ends_a_text_as_it_is() -> None:
    draw = random.Random(5)
    texts = [*TEXTS, *("".join(draw.choices(SIGNS, k=draw.randint(1, 12))) for _ in range(300))]
    task = run_of(*(f"prompt={text}" for text in texts), "-p", "--last").task
    assert isinstance(task, GenerateConf) and task.prompts == [*texts, "--last"]
    texts = [text for text in texts if text and listed_texts(text) is None]
    task = run_of(*(f"stop={text}" for text in texts)).task
    assert isinstance(task, GenerateConf) and task.stop == texts and len(texts) > 300


ONE_WORD = [text for text in TEXTS if text not in ("", "null", "???", "${")]


@pytest.mark.parametrize("text", ONE_WORD, ids=repr)
def test_a_text_is_taken_as_it_is(text: str) -> None:
    run = run_of("chat=true", f"system={text}", "seed=3")
    assert isinstance(run.task, GenerateConf) and run.task.system == text


@pytest.mark.parametrize("text", ONE_WORD, ids=repr)
def test_a_path_is_taken_as_it_is(text: str) -> None:
    run = run_of("--out", text, "seed=3")
    assert run.out == {"${seed}": "3", "\\${seed}": "${seed}"}.get(text, text), "a path is resolved"


def test_a_list_of_quoted_texts_is_a_list() -> None:
    for words, texts in (
        (["""stop=["a", 'b, "c"']""", "stop=d", r'stop=["\"e\\"]'], ["a", 'b, "c"', "d", '"e\\']),
        (["stop=[]"], []),
        (["stop=[a,b]"], ["[a,b]"]),
        (['stop=["a\\\n","\\\n"]'], ["a\\\n", "\\\n"]),  # a backslash before a line break at the end
    ):
        task = run_of(*words).task
        assert isinstance(task, GenerateConf) and task.stop == texts
    words = ["cluster.slurm.options=--exclusive", 'cluster.slurm.setup=["module load a,b","c"]']
    slurm = run_of(*words).cluster.slurm
    assert (slurm.options, slurm.setup) == (["--exclusive"], ["module load a,b", "c"])
    assert run_of("out=null").out is None


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home folder, in which there is a model file, and which a variable names."""
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a=b,c.gguf").touch()
    return tmp_path


@pytest.mark.parametrize("folder", ["~", "${oc.env:HERE}", "{place}"])
def test_a_path_of_a_model_file_may_begin_with(folder: str, place: Path) -> None:
    model = run_of("plan", f"{folder.replace('{place}', str(place))}/a=b,c.gguf").model
    assert model.path in ("~/a=b,c.gguf", f"{place}/a=b,c.gguf") and model.name == "a=b,c.gguf"


def test_a_model_file_of_this_folder_needs_no_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert run_of("plan", "a=b,c.gguf").model.path == "a=b,c.gguf"


def test_interpolations_are_resolved(place: Path) -> None:
    assert run_of("out=${oc.env:HERE}/${model.name}").out == f"{place}/demo"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("30B", "the first word is not a task; found '30B'"),
        ("compar 30B", "write llama-ssp compare"),
        ("run 30B", "write llama-ssp generate"),
        ("serve", "write llama-ssp batch"),
        ("generate hello,world", "a text is prompt='...'"),
        *((f"{name}x", f"write llama-ssp {name}") for name in COMMANDS),
        ("plan /no/such", "there is no such folder or file; /no/such"),
        ("plan nothing-like-it", "there is no model=nothing-like-it; allowed a preset, a folder"),
        ("model.repo=a/b", "model.repo is given, and no model is named"),
        ("draft.path=/x", "draft.path is given, and no draft is named"),
        ("model=7B draft.dtype=int8", "draft.dtype is given, and no draft is named"),
        ("generate a/b c/d e", "words without a key; found e"),
        ("--loud", "unknown flag --loud"),
        ("--temperatur 1", "did you mean sampling.temperature?"),
        ("plan --cfg", "argument --cfg/-c: expected one argument"),
        ("plan -n", "-n needs a value"),
        ("generate --dry-run=true", "--dry-run takes no value; found --dry-run=true"),
        ("plan --", "unknown flag --; llama-ssp TASK --help lists the keys"),
        ("measure ks=", "str is not a ListConfig, list or tuple.; task.ks; see --help"),
        ("seed=" + "9" * 5000, "4300 digits"),
        ("hydra.nope=1", "--cfg hydra shows"),
    ],
    ids=lambda text: text[:40],
)
def test_refused_with_a_hint(words: str, says: str) -> None:
    with pytest.raises(RunError) as raised:
        run_of(*words.split())
    assert says in str(raised.value)


def test_the_page_of_keys_is_made_of_the_descriptions() -> None:
    """If not: python -m llama_ssp.config.help > docs/keys.md"""
    assert (ROOT / "docs" / "keys.md").read_text(encoding="utf-8") == markdown()


def test_help_fits_a_screen() -> None:
    lines = overview().splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80


def test_help_names_every_task() -> None:
    assert all(f"  {task} " in overview() for task in TASKS)


@pytest.mark.parametrize("words", [["measure"], ["task=measure", "model=7B"]], ids=" ".join)
def test_a_task_s_help_is_about_the_task(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = help_for(words)
    assert all(f"  {key.name}=" in said for key in keys_of_task("measure"))
    assert "cluster.gpus" not in said and "require_fit" not in said
    assert max(map(len, said.splitlines())) <= 80


def test_a_group_s_help_is_about_the_group() -> None:
    assert "7B_8bit" in help_for(["model"]) and "_schema" not in help_for(["task"])
    assert "sampling.top_k" not in help_for(["plan"])


def test_help_for_no_word_is_the_overview() -> None:
    assert help_for(["--help", "x"]) == help_for(["a=b", "x"]) == overview()


def test_help_for_a_slip_of_the_pen_names_what_was_meant() -> None:
    with pytest.raises(RunError, match="did you mean measure"):
        help_for(["mesure", "--help"])


def test_the_version_is_printed(command: Command) -> None:
    said = command("--version").out
    assert said.startswith(f"llama-ssp {__version__} (python 3.")
    assert "torch 2." in said and "transformers" in said


def test_help_is_printed(command: Command) -> None:
    assert command("--help").out == overview() == command("--help", "--config-dir=x").out


def test_help_may_be_asked_for_by_a_word() -> None:
    assert cli._answer(["help"]) == overview() and cli._answer(["generate", "-p", "help"]) is None
    assert cli._answer(["help", "plan"]) == cli._answer(["plan", "help"]) == help_for(["plan"])


def test_help_tells_which_numbers_are_allowed(command: Command) -> None:
    assert "[above 0, up to 1]" in " ".join(command("sampling", "--help").out.split()), "top_p=0 is refused"


@pytest.mark.parametrize(
    ("line", "full"),
    [
        ("llama-ssp plan 65B samp", "llama-ssp task=plan model=65B draft=none samp"),
        ("llama-ssp plan 65B -p 'a b' k=2 ", "llama-ssp task=plan model=65B speculation.k=2 draft=none "),
        ("llama-ssp plan 'a sampling=", "llama-ssp sampling="),
        ("llama-ssp ", "llama-ssp "),
    ],
)
def test_a_line_is_written_out_for_hydra_s_completion(line: str, full: str) -> None:
    assert completable(line) == full


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_a_line(tmp_path: Path) -> None:
    """Hydra's own function, with what bash gives it upon a tab."""
    command = tmp_path / "llama-ssp"
    start = "import sys; sys.argv[0] = 'llama-ssp'; from llama_ssp.__main__ import main; main()"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{start}" "$@"\n')
    command.chmod(0o755)
    script = """
eval "$(llama-ssp -sc install=bash)"
complete -p llama-ssp
tried() {
    COMP_LINE="$1"; COMP_POINT=${#1}; words=($1); COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
    hydra_bash_completion; echo "${COMPREPLY[*]}"
}
tried "llama-ssp plan 65B sampling=gre"
tried "llama-ssp measure task.repe"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "complete -o default -o nospace -F hydra_bash_completion llama-ssp", "sampling=greedy",
        "task.repeats=",
    ]  # fmt: skip


def test_hydra_prints_the_configuration(command: Command) -> None:
    assert "temperature: 0.0" in command("--cfg", "job", "--package", "sampling", "sampling=greedy").out
    assert command("-c", "hydra", "--package", "hydra.job.name", "hydra.job.name=x").out == "x\n"


@pytest.mark.parametrize(
    "words",
    [["hydra.searchpath=[file://{mine}]"], ["--config-dir=mine"], ["-cd", "mine"]],
    ids=lambda words: words[0].partition("=")[0],
)
def test_hydra_finds_a_user_s_presets(words: list[str], command: Command) -> None:
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/my.yaml").write_text("defaults: [tiny]\nname: my")
    words = [word.replace("{mine}", str(Path("mine").absolute())) for word in words]
    assert command("--cfg", "job", "--package", "model.name", "model=my", *words).out == "my\n"


def test_hydra_s_own_settings_work(command: Command) -> None:
    own = ("hydra.run.dir=there", "hydra.job.chdir=true", "hydra.output_subdir=.hydra")
    answer = command("-p", "a", "-n", "1", "seed=1", "out=o", *own)
    assert (answer.code, answer.errors) == (0, [])
    assert list(Path("there").glob("o/*/*/summary.json"))
    assert Path("there", ".hydra", "overrides.yaml").is_file()


SWEPT = ("-n", "1", "output=json", "draft=tiny_draft", "seed=1")


def test_a_sweep_is_over_groups_with_numbers_or_lists(command: Command) -> None:
    """Commas in a text divide nothing."""
    answer = command("-m", *SWEPT, 'prompt=["a,b","c"]', "k=1,2", "out=o,p", "sampling=greedy")
    assert (answer.code, answer.errors) == (0, [])
    said = [json.loads(line) for line in answer.out.splitlines()]
    prompts = [document["outputs"][0]["prompt"] for document in said]
    assert prompts == ["a,b", "a,b", "c", "c"]
    assert len({document["run_folder"] for document in said}) == 4
    assert all(document["run_folder"].startswith("o,p/") for document in said)


def test_a_sweep_may_be_over_folders(command: Command) -> None:
    answer = command("-m", *SWEPT, 'out=["x","y,z"]', "prompt=a")
    folders = [json.loads(line)["run_folder"].partition("/")[0] for line in answer.out.splitlines()]
    assert folders == ["x", "y,z"]


def test_an_error_ends_a_sweep(command: Command) -> None:
    before = sorted(Path.cwd().iterdir())
    answer = command("-m", *SWEPT, "prompt=a", "seed=-1,2", "out=null")
    assert (answer.code, len(answer.errors), answer.out) == (2, 1, ""), "an error ends the sweep"
    assert sorted(Path.cwd().iterdir()) == before, "a sweep leaves nothing behind"


@pytest.mark.parametrize(
    "said", [b"one\n\ntwo\n", b'{"prompt": "one"}\n{"prompt": "two"}\n'], ids=["lines", "records"]
)
@pytest.mark.parametrize("source", ["pipe", "-"])
def test_a_prompt_file_may_be_a_pipe_or_standard_input(
    said: bytes, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bash has it for prompt_file=<(command); for tasks with prompts of their own, too."""
    read, write = os.pipe()
    os.write(write, said)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
        task = run_of("certify", f"prompt_file={f'/dev/fd/{read}' if source == 'pipe' else '-'}").task
        assert isinstance(task, PromptedConf)
        assert [prompt.text for prompt in read_prompts(task).prompts] == ["one", "two"]


def test_without_docstrings_it_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-OO", str(ROOT / "launch" / "run.py"), "--help"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (5, 1) and "-OO or PYTHONOPTIMIZE" in done.stderr


def test_outside_of_its_environment_it_says_what_to_do() -> None:
    alone = [sys.executable, "-S", "-E", str(ROOT / "launch" / "run.py"), "--help"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: omegaconf is not installed") and "machine-install.sh" in done.stderr


def test_on_windows_it_says_what_to_use() -> None:
    start = "import sys; sys.modules['fcntl'] = None; from llama_ssp.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)
    assert "needs Linux" in done.stderr and "WSL2" in done.stderr and "machine-install" not in done.stderr


def test_every_rank_has_cuda_number_gpus_as_nvidia_smi_does(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before CUDA starts, also where the configuration names the GPU, so that no plan looks for one."""
    orders: list[str | None] = []
    kinds = [Gpu(name="NVIDIA T400"), Gpu(name="NVIDIA L40")]
    monkeypatch.setattr(gpus, "_every_gpu", lambda: kinds)
    monkeypatch.setattr(runner, "execute", lambda _: orders.append(os.environ.get(gpus.ORDER)) or 0)
    gpus.gpus_here.cache_clear()
    for rank in ("0", "1"):
        os.environ.pop(gpus.ORDER, None)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        assert command("cluster=l40", "prompt=a").code == 0
        gpus.gpus_here.cache_clear()
    assert orders == [gpus.AS_LISTED] * 2


@pytest.mark.parametrize(
    ("flag", "leader", "other"),
    [("--quiet", "WARNING", "ERROR"), ("--verbose", "DEBUG", "DEBUG"), ("--version", "INFO", "ERROR")],
)
def test_flags_set_the_log(
    flag: str, leader: str, other: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "as-it-was")  # restored at the end
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, level in enumerate((leader, other)):
        monkeypatch.setenv("RANK", str(rank))
        command("--version", flag)
        assert logging.getLevelName(logging.getLogger("llama_ssp").level) == level
    assert (os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1") == (flag == "--quiet")


@pytest.mark.slow
@pytest.mark.parametrize("waited", [0.0, 1e3])
def test_a_run_that_waits_for_cores_says_so(
    waited: float, command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from llama_ssp.tasks import runner

    seconds = iter([0.0, waited])
    monkeypatch.setattr(runner, "BUSY_S", 0.0)
    monkeypatch.setattr(runner, "_waited_s", lambda: next(seconds))
    answer = command("generate", "prompt=Once", "max_new_tokens=2", "out=null")
    assert answer.code == 0
    assert ("others use the cores" in caplog.text) == (waited > 0)
