"""The sampling that a model recommends: where it is read, what it yields to, and that jobs keep theirs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama_ssp import SamplingConfig, load_pair
from llama_ssp.config import Controls, ModelConf
from llama_ssp.config.compose import composed, pair_words
from llama_ssp.errors import ModelError
from llama_ssp.models.own_sampling import GENERATION, left_open, own_sampling
from llama_ssp.placing.pairs import pair_files
from tests.checkpoints import copied
from tests.conftest import Command, Saved
from tests.families import build
from tests.gguf_files import write

MODEL = ModelConf(name="small")
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


@pytest.fixture(scope="module")
def small(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a word on sampling."""
    folder = copied(saved.whole, tmp_path_factory.mktemp("own") / "small")
    (folder / GENERATION).unlink(missing_ok=True)
    return folder


@pytest.fixture
def recommends(small: Path):
    """Writes a generation_config.json for one test."""

    def write_it(**values: object) -> Path:
        (small / GENERATION).write_text(json.dumps(values), encoding="utf-8")
        return small

    yield write_it
    (small / GENERATION).unlink(missing_ok=True)


def test_a_folder_s_generation_config_is_read(recommends) -> None:
    own = own_sampling(MODEL, recommends(eos_token_id=2, max_new_tokens=2048, **QWEN))
    expected = SamplingConfig(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert own.usual == expected
    assert own.source == GENERATION


def test_a_folder_that_says_nothing_has_the_preset_s(recommends) -> None:
    model = replace(MODEL, sampling={"temperature": 0.2})
    assert own_sampling(model, recommends(eos_token_id=2)).usual == SamplingConfig(temperature=0.2)
    assert own_sampling(model, recommends(top_p=0.5)).usual == SamplingConfig(top_p=0.5)


def test_a_folder_that_does_not_sample_is_greedy(recommends) -> None:
    own = own_sampling(MODEL, recommends(do_sample=False, temperature=0.6, top_p=0.9))
    assert own.usual == SamplingConfig(temperature=0.0)
    assert "greedy" in own.in_words


def test_without_a_word_on_sampling_the_whole_distribution_is_sampled(recommends) -> None:
    own = own_sampling(MODEL, recommends(eos_token_id=2, temperature=None))
    assert own.usual.controls == Controls()
    assert own.in_words == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", 1e-9),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", 1e300),
        ("repetition_penalty", 0),
        ("repetition_penalty", [1.1]),
    ],
)
def test_an_impossible_value_is_refused(recommends, name: str, value: object) -> None:
    folder = recommends(**{name: value})
    with pytest.raises(
        ModelError, match=rf"recommends a {name} .*{GENERATION}; found .*, allowed .*sampling=plain"
    ):
        own_sampling(MODEL, folder)
    named = composed(["sampling=plain"]).sampling
    assert left_open(named, MODEL, folder).usual == SamplingConfig(), "it is not even read"


def test_all_tokens_may_be_written_as_minus_one(recommends) -> None:
    assert own_sampling(MODEL, recommends(top_k=-1)).usual == SamplingConfig(top_k=0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Controls(temperature=0.6, top_p=0.95)),
        (["sampling=model"], Controls(temperature=0.6, top_p=0.95)),
        (["sampling.temperature=0.9"], Controls(temperature=0.9, top_p=0.95)),
        (["sampling=plain"], Controls()),
        (["sampling=plain", "sampling.top_k=3"], Controls(top_k=3)),
        (["sampling=greedy"], Controls(temperature=0.0)),
        (["sampling=nucleus"], Controls(temperature=0.8, top_p=0.95)),
    ],
    ids=lambda value: "-".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_what_the_user_names_comes_first(recommends, words: list[str], expected: Controls) -> None:
    folder = recommends(temperature=0.6, top_p=0.95)
    run = composed(pair_words(folder, None, [*words, "task.max_new_tokens=8"]))
    assert pair_files(run, [])[0].run.sampling.controls == expected


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("smollm2-135m-instruct", Controls(temperature=0.2, top_p=0.9)),
        ("smollm2-135m-instruct-q4", Controls(temperature=0.0)),
        ("smollm2-135m", Controls()),
    ],
    ids=["recommended", "greedy", "nothing"],
)
def test_a_preset_s_sampling_acts(preset: str, expected: Controls) -> None:
    run = composed([f"model={preset}", "draft=none"])
    assert pair_files(run, [], dry=True)[0].run.sampling.controls == expected


@torch.no_grad()
def test_a_gguf_file_s_header_is_read(tmp_path: Path) -> None:
    """In 32 bits 0.95 is 0.949999988079071."""

    def recommended(writer) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_float32("general.sampling.top_p", 0.95)
        writer.add_int32("general.sampling.top_k", 20)

    module = build("llama-gqa").float()
    file = write(tmp_path / "small.gguf", module, {"": "F32"}, recommended)
    own = own_sampling(MODEL, file)
    assert own.usual == SamplingConfig(temperature=0.7, top_p=0.95, top_k=20)
    assert own.in_words.startswith("sampling: temperature 0.7, top_k 20, top_p 0.95, as its GGUF header says")


def test_a_call_in_python_has_it_unless_it_names_another(recommends) -> None:
    """Top-k 1 is greedy, so one seed in place of another changes nothing."""
    how = {"max_new_tokens": 8}
    with load_pair(recommends(top_k=1), max_tokens=32) as pair:
        first, second = (pair.generate([[1, 2, 3]], seed=seed, **how)[0].token_ids for seed in (1, 2))
        assert first == second
        sampling = SamplingConfig(top_k=0)
        other = [pair.generate([[1, 2, 3]], seed=seed, sampling=sampling, **how) for seed in (1, 2)]
        assert other[0][0].token_ids != other[1][0].token_ids


def test_a_run_says_so_once(recommends, command: Command, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "llama_ssp")
    folder = recommends(temperature=0.6)
    assert command(f"model={folder}", "draft=none", "prompt=a", "out=null", "task.max_new_tokens=2").code == 0
    assert caplog.text.count("sampling: temperature 0.6, as generation_config.json says") == 1


def test_a_job_keeps_the_sampling_that_it_began_with(recommends, command: Command, tmp_path: Path) -> None:
    """Whatever the model's file says later; other values on the command line are refused as before."""
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("".join(f'{{"prompt": "word {n}"}}\n' for n in range(4)), encoding="utf-8")
    output = tmp_path / "out.jsonl"
    files = [f"task.input={prompts}", f"task.output={output}"]
    job = ["task=batch", "model=demo", "draft=none", *files, "task.max_new_tokens=4", "seed=1"]
    assert command(*job, "sampling=plain").code == 0
    manifest = json.loads((tmp_path / "out.jsonl.work" / "run.json").read_text(encoding="utf-8"))
    assert manifest["settings"]["sampling.temperature"] == 1.0
    output.unlink()
    assert command(*job, "model.sampling={temperature: 0.5}").code == 0
    refused = command(*job, "sampling.temperature=0.5")
    assert refused.code == 3
    assert "sampling.temperature" in refused.err
