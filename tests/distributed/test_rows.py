"""Models whose rows have flags of their own, over ranks with unequal parts: greedy, ragged, with drafts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tests.distributed.test_tensor import uneven
from tests.families import build, greedy_text, varied
from tests.test_families import ENDS, SIZE, save
from tests.warm import Answer, Started

pytestmark = pytest.mark.slow

ROWS = (
    "apertus", "cohere", "cohere-normed", "cohere2", "exaone4", "gemma", "glm4", "glm4_moe", "hunyuan",
    "ministral3", "olmo3", "seed_oss",
)  # fmt: skip
PROMPTS = ["the quick brown", "def hello", "a"]
NEW = 12
GREEDY = (
    f"task.prompts={json.dumps(PROMPTS)}", f"task.max_new_tokens={NEW}", "sampling=greedy",
    "model.dtype=fp32", "speculation=ngram", "speculation.k=4", "seed=1", "output=json", "out=null",
)  # fmt: skip


def module_of(name: str) -> Any:
    """Its norms, biases, corrections and constants are not those of a new model."""
    sizes = uneven("cohere" if name == "cohere-normed" else name)
    return varied(build(name, **ENDS, **sizes))


def compare(name: str, world: int, folder: Path, *words: str) -> dict[str, Any]:
    """Compares the texts with those that transformers writes for each prompt alone; returns the record."""
    model = save(folder / "model", module_of(name))
    run = Started(folder, world, *GREEDY, f"model={model}", *words)
    leader: Answer = run.finish()[0]
    assert leader.code == 0, leader.err
    tokenizer = checkpoints.tokenizer(SIZE)
    expected = [greedy_text(module_of(name), tokenizer.encode(text).ids, NEW) for text in PROMPTS]
    assert [output["token_ids"] for output in leader.document["outputs"]] == expected
    assert leader.document["tokens_drafted"] > 0
    return leader.document


@pytest.mark.few(4)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ROWS)
def test_texts_are_those_of_transformers(name: str, world: int, tmp_path: Path) -> None:
    compare(name, world, tmp_path, "engine=eager")


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize(("name", "world"), [(name, 1 + number % 3) for number, name in enumerate(ROWS)])
def test_compiled_texts_are_those_of_transformers(name: str, world: int, tmp_path: Path) -> None:
    assert compare(name, world, tmp_path, "engine=compiled")["engines"] == {"model": "compiled"}
