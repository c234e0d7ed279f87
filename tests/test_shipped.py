"""The pair that ships: whole, what its records say, and good at what the README claims."""

import hashlib
import json
from collections.abc import Callable
from math import prod

import pytest

from llama_ssp.config import ModelConf
from llama_ssp.models.checkpoint import SHIPPED_FOLDER, complete, inspect, with_shape
from llama_ssp.models.folder import tensors_of
from llama_ssp.models.heads.settings import MAPS
from llama_ssp.planner.weights import parameters
from tests.conftest import Command
from tests.warm import Answer

NAMES = ("demo", "demo_draft")
PAIR = ("model=demo", "draft=demo_draft", "out=null", "output=json", "seed=1")


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_that_were_recorded(name: str) -> None:
    folder = SHIPPED_FOLDER / name
    record = json.loads((folder / "training.json").read_text())
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == record["weights_sha256"]
    assert record["steps"] > 0 and record["curve"]
    model = with_shape(ModelConf(name=name), inspect(folder), "model")
    assert parameters(model) == record["parameters"]


HEAD_FOLDER = SHIPPED_FOLDER / "demo_head"


def test_the_head_is_that_of_its_record() -> None:
    record, file = json.loads((HEAD_FOLDER / "training.json").read_text()), HEAD_FOLDER / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == record["weights_sha256"]
    tensors = tensors_of(file.parent)
    parts = [prod(shape) for name, (_, shape) in tensors.items() if name not in MAPS]
    assert sum(parts) == record["parameters"]


def test_the_head_fits_into_6_mib() -> None:
    assert sum(file.stat().st_size for file in HEAD_FOLDER.iterdir()) <= 6 * 2**20


def test_the_pair_fits_into_24_mib() -> None:
    pair = [file for name in NAMES for file in (SHIPPED_FOLDER / name).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in pair) <= 24 * 2**20


def test_the_head_is_found_by_its_name() -> None:
    head, path = complete(ModelConf(name="demo_head", path="shipped:demo_head"), "draft")
    assert head.is_head and path == HEAD_FOLDER


@pytest.mark.long
def test_certify_proves_the_head(command: Command) -> None:
    sizes = "task.samples=64", "task.law_rounds=16"
    answer = command("task=certify", *PAIR, "draft=demo_head", *sizes)
    assert answer.code == 0 and answer.document["verdict"] == "same"


@pytest.mark.slow
def test_the_seeds_prompts_stop_properly(command: Command) -> None:
    """Greedy and sampled, alone and together: each text ends by EOS or by the limit, and only there."""
    factorial = json.dumps('def factorial(n):\\n    \\"\\"\\"Return n!\\"\\"\\"')
    texts = '"def hello"', '"In which country is Hamburg?"', factorial
    lines = [f'{{"prompt": {text}}}' for text in texts]
    for sampling in ("sampling=greedy", "sampling.temperature=0.5"):
        answer = command(*PAIR, sampling, "task.max_new_tokens=40", stdin="\n".join(lines).encode())
        assert answer.code == 0, sampling
        for output in json.loads(answer.out)["outputs"]:
            assert output["finish_reason"] in ("eos", "length")
            assert (output["output_tokens"] == 40) or output["token_ids"][-1] == 1
            assert output["text"].strip()
            assert "</s>" not in output["text"]


GREEDY = (*PAIR, "sampling=greedy", "model.dtype=fp32", "draft.dtype=fp32", "task.max_new_tokens=60")
FOUR_PROMPTS = b"def hello\nclass Stack:\n12 * 7 = 84\nimport os\n"


@pytest.mark.slow
def test_the_draft_changes_no_greedy_text(once: Callable[..., Answer]) -> None:
    speculative = json.loads(once(*GREEDY, stdin=FOUR_PROMPTS).out)
    regular = json.loads(once(*GREEDY, "speculation=none", stdin=FOUR_PROMPTS).out)
    texts = [[output["token_ids"] for output in run["outputs"]] for run in (speculative, regular)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_third_of_the_drafts_is_accepted(once: Callable[..., Answer]) -> None:
    speculative = json.loads(once(*GREEDY, stdin=FOUR_PROMPTS).out)
    assert speculative["tokens_accepted"] > speculative["tokens_drafted"] / 3


@pytest.mark.slow
def test_only_the_target_multiplies_well(command: Command) -> None:
    """200 questions, greedy: the target at least 75 %, the draft at least 25 points below."""
    answer = command(
        "task=eval", "task.pairs=[demo,demo_draft]", "task.seeds=[5]", "task.sizes=[200]", "sampling=greedy",
        "out=null", "output=json", "seed=1",
    )  # fmt: skip
    target, draft = (row["score"] for row in json.loads(answer.out)["rows"])
    assert target >= 0.75
    assert draft <= target - 0.25
