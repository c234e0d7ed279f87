"""A GGUF file gives the texts of a folder with its decoded weights, in one process and over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tests.conftest import Command
from tests.distributed.test_command import FP32, PROMPTS
from tests.test_gguf import made
from tests.test_gguf_tokenizer import add_that_of_folders
from tests.warm import Answer, Started

pytestmark = pytest.mark.slow


def both(folder: Path) -> tuple[Path, Path]:
    """A folder with a GGUF file, with its tokenizer, and one with safetensors and a tokenizer.json."""
    (folder / "gguf").mkdir()
    path, module = made("llama", folder / "gguf", metadata=add_that_of_folders)
    module.save_pretrained(folder / "plain")
    checkpoints.write_tokenizer(folder / "plain", checkpoints.tokenizer())
    return path, folder / "plain"


def outputs(answer: Answer) -> Any:
    texts = [(each["output_tokens"], each["text"], each["token_ids"]) for each in answer.document["outputs"]]
    assert len(texts) == 3
    return texts


def run(path: Path, *more: str) -> tuple[str, ...]:
    pair = f"model={path}", f"draft={path}"
    return *pair, *FP32, "task.max_new_tokens=12", "seed=5", "speculation.k=3", *more


def test_texts_are_those_of_the_decoded_weights(command: Command, tmp_path: Path) -> None:
    path, plain = both(tmp_path)
    stdin = "\n".join(PROMPTS)
    expected = outputs(command(*run(plain), stdin=stdin.encode()))
    for given in (path, path.parent):
        assert outputs(command(*run(given), stdin=stdin.encode())) == expected
    answers = Started(tmp_path / "ranks", 3, *run(path), stdin=stdin).finish()
    assert {answer.code for answer in answers} == {0}, answers[0].err
    assert outputs(answers[0]) == expected
    planned = command(*run(path.parent, "task=plan", "task.prompt_tokens=20", "task.max_new_tokens=8"))
    assert planned.code == 0, planned.err
    assert planned.document["vocabulary"]["refused"] is None


def test_other_splittings_are_refused(command: Command, tmp_path: Path) -> None:
    path, _ = both(tmp_path)
    found = command(*run(path, "placement.splitting=layers"), stdin=b"hello")
    assert found.code == 4 and len(found.errors) == 1, found.err
    assert "a GGUF file runs by the decoder alone" in found.errors[0]
