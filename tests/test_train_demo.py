"""Training of a head (docs/heads.md): its data, resuming after kills, and that what was written drafts."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import train_demo
from demo import data, head, head_data, vocab
from demo.recipes import RECIPES, build, smaller
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from llama_ssp import SamplingConfig, load_pair
from llama_ssp.errors import DataError
from llama_ssp.models.passes import Pass, all_rows
from tests.heads import loaded


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A process with threads of torch cannot be forked, as later tests do: the child waits for them."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return vocab.train_bpe(data.library_documents(seed=0, limit=30).train, 512)


@pytest.fixture(scope="module")
def target(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    model = build(replace(smaller(RECIPES["demo"]), layers=3), bpe, seed=0)
    model.lm_head.weight.data *= 20  # so that there is something to learn
    model.to(torch.bfloat16).save_pretrained(folder)
    vocab.save(bpe, folder)
    return folder


def head_words(target: Path, folder: Path) -> list[str]:
    """A run of a second; three prompts and two texts."""
    texts = ["def f(x):\n    return x  \n\n", "  12 + 3.14 =\t7"]
    lines = [{"prompt": f"def f{n}("} for n in range(3)] + [{"text": text} for text in texts]
    (file := folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sizes = "steps=20 row=24 batch_tokens=96 vocab=300 depth=3 new_tokens=12 threads=1"
    return ["head", f"out={folder / 'head'}", f"target={target}", f"data={file}", *sizes.split()]


def test_what_a_head_cannot_be_trained_on(tmp_path: Path) -> None:
    """One line, and no folder is made. Python's own lines end at more characters than those of JSON Lines."""
    for key in ("target", "start", "data"):
        with pytest.raises(SystemExit, match=f"^error: {key} cannot be read; found {tmp_path / 'absent'}, "):
            train_demo.main(["head", f"out={tmp_path / 'head'}", f"{key}={tmp_path / 'absent'}"])
        assert not (tmp_path / "head").exists(), key
    (file := tmp_path / "data.jsonl").write_text('{"text": "a\u2028b"}\r\n \n{"prompt": "c"}\n', newline="")
    assert head_data.file_lines(file) == [{"text": "a\u2028b"}, {"prompt": "c"}]
    file.write_text('{"text": "a"}\n{"txet": "a"}')
    with pytest.raises(DataError, match=r"data.jsonl:2; found"):
        head_data.file_lines(file)


@pytest.fixture
def kept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are written two at a time, and each step is kept."""
    monkeypatch.setattr(head_data, "ROWS", 2)
    monkeypatch.setattr("demo.train.SAVE_EVERY", 0.0)


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a head, and the data that it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(head_data, "ROWS", 2)
        patched.setattr("demo.train.SAVE_EVERY", 0.0)
        train_demo.main(head_words(target, folder))
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / "head" / "model.safetensors")
    return tensors


def test_a_head_learns(trained: Path) -> None:
    curve = json.loads((trained / "head" / "training.json").read_text())["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"]


@pytest.mark.usefixtures("kept_often")
def test_a_head_whose_training_was_killed_is_the_same(
    target: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the target writes texts and while the head learns: the same data, the same weights."""
    first, rest = (trained / "head.jsonl").read_bytes().split(b"\n", 1)
    (tmp_path / "head.jsonl").write_bytes(first + b"\n" + rest[: len(rest) // 2])
    step, steps = train_demo.train.__globals__["one_step"], list[int]()

    def killed(*given: Any) -> dict[str, float]:
        steps.append(1)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return step(*given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("demo.train.one_step", killed)
        train_demo.main(head_words(target, tmp_path))
    train_demo.main(head_words(target, tmp_path))

    assert (tmp_path / "head.jsonl").read_bytes() == (trained / "head.jsonl").read_bytes()
    whole, again = weights(trained), weights(tmp_path)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_trained_head_drafts(target: Path, trained: Path) -> None:
    """And changes no text."""
    texts = []
    for draft in (trained / "head", None):
        with load_pair(target, draft, max_tokens=64, overrides=["model.dtype=fp32"]) as pair:
            (made,) = pair.generate(["def f"], max_new_tokens=20, sampling=SamplingConfig(temperature=0))
            texts.append(made.token_ids)
            assert bool(made.drafted) == (draft is not None), draft
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("kept_often")
def test_training_may_start_from_a_head(target: Path, trained: Path, tmp_path: Path) -> None:
    """At no rate it keeps its weights."""
    words = [word for word in head_words(target, tmp_path) if not word.startswith(("steps", "vocab"))]
    start = f"start={trained / 'head'}"
    train_demo.main([*words, "steps=1", "matrix_rate=0", "other_rate=0", start])
    before, kept = weights(trained), weights(tmp_path)
    assert kept.keys() == before.keys() and all(torch.equal(kept[name], before[name]) for name in kept)


@torch.inference_mode()
def test_a_head_in_training_is_the_head_that_drafts(target: Path, tmp_path: Path) -> None:
    """Logits of each step, of the last text that it covers, by the head that is loaded from the folder."""
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    table, ids = teacher.get_input_embeddings().weight, torch.arange(3, 303)
    taps, recipe = head.taps_of(3), head.HeadRecipe(out="", target=str(target), depth=3)
    made = head.build(teacher, taps, ids, seed=1).eval()
    for parameter in made.parameters():
        parameter += 0.1 * torch.randn(parameter.shape)
    head.save(tmp_path, made, ids, taps, teacher.config, recipe, torch.float32)
    drafts = loaded(tmp_path, 3, table)
    assert drafts.ids_E is not None and drafts.taps == tuple(taps) and torch.equal(drafts.ids_E, ids)
    text = torch.randint(0, len(table), (9,))
    states = torch.randn(8, len(taps) * teacher.config.hidden_size)
    for step, logits in enumerate(made(states[None], table[text[1:]][None], recipe.depth)):
        read = 8 - step  # positions with the target's states
        cache, z = drafts.new_cache(1, 16), drafts.fused(states[:read])
        pass_ = Pass(spans=all_rows([0], [read]), device=drafts.device)
        z = drafts.states(text[1 : read + 1], z, pass_, cache)
        for own in range(step):
            pass_ = Pass(spans=all_rows([read + own], [1]), device=drafts.device)
            z = drafts.states(text[[read + own + 1]], z[-1:], pass_, cache)
        found: Tensor = drafts.head.logits(z[-1:])
        torch.testing.assert_close(found, logits[:, read - 1], rtol=1e-4, atol=1e-4)
