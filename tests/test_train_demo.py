"""The making of the shipped models: vocabularies, data, resuming, learning."""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import train_demo
from demo import checkpoint, data, head, head_data, ranks, vocab
from demo.batches import ANSWER_WEIGHT, Batch, Batches, token_weights
from demo.recipes import RECIPES, build, smaller
from demo.train import language_losses, train
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ssp import SamplingConfig, load_pair
from llama_ssp.errors import DataError
from tests.distributed.processes import on_ranks
from tests.heads import loaded

TEXTS = [
    "",
    "def f(x):\n    return x  \n\n",
    "  12 + 3.14 =\t7",
    "naïve — 漢字 🙂 ½ ²",
    "\r\n\x00é",
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A process with threads of torch cannot be forked, as later tests do: the child waits for them."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def documents() -> data.Documents:
    return data.library_documents(seed=0, limit=30)


@pytest.fixture(scope="module")
def bpe(documents: data.Documents) -> Tokenizer:
    return vocab.train_bpe(documents.train, 512)


def test_tokenizers_round_trip(bpe: Tokenizer, tmp_path: Path) -> None:
    vocab.save(bpe, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_digit_is_a_token(bpe: Tokenizer) -> None:
    assert bpe.encode("a * 12 = 345").tokens[-4:] == ["Ġ", "3", "4", "5"]


@pytest.mark.slow
def test_documents_are_the_same_for_a_seed(documents: data.Documents) -> None:
    again = data.library_documents(seed=0, limit=30)
    assert again.digest() == documents.digest()
    assert not set(documents.train) & set(documents.held_out)
    assert data.library_documents(seed=1, limit=30).digest() != documents.digest()


def test_held_out_multiplications_stay_out() -> None:
    share = sum(data.is_held_out_pair(a, b) for a in range(1, 99) for b in range(1, 99)) / 98**2
    assert 0.03 < share < 0.07
    rng = random.Random(0)
    for _ in range(50):
        for line in data.training_multiplications(rng).splitlines():
            a, b, c = (int(n) for n in line.replace("*", "=").split("="))
            assert a * b == c and not data.is_held_out_pair(a, b)
    prompt, answer = data.multiplication_prompt(rng, held_out=True)
    a, b = (int(n) for n in prompt.splitlines()[-1].rstrip("= ").split("*"))
    assert data.is_held_out_pair(a, b) and a * b == int(answer) and prompt.endswith(" = ")


def test_answers_weigh_most(bpe: Tokenizer) -> None:
    text = "7 * 8 = 56\n9 * 9 = 81"
    encoding = bpe.encode(text)
    weights = token_weights(text, encoding.offsets)
    heavy = [t for t, w in zip(encoding.tokens, weights, strict=True) if w == ANSWER_WEIGHT]
    assert heavy == ["5", "6", "Ċ", "8", "1"]


def test_batches_depend_on_seed_and_step_alone(documents: data.Documents, bpe: Tokenizer) -> None:
    recipe = smaller(RECIPES["demo"])
    one, two = (Batches(recipe, bpe, documents.train, seed=0) for _ in range(2))
    one.batch(0)
    assert torch.equal(one.batch(5).ids, two.batch(5).ids)
    assert not torch.equal(one.batch(5).ids, one.batch(6).ids)


def test_resumed_training_equals_an_unbroken_one(
    documents: data.Documents, bpe: Tokenizer, tmp_path: Path
) -> None:
    recipe = smaller(RECIPES["demo"])
    batches = Batches(recipe, bpe, documents.train, seed=0)
    ends = []
    for name, stops in (("whole", [6]), ("broken", [3, 6])):
        folder = tmp_path / name
        folder.mkdir()
        for stop in stops:  # a new model and new optimizers each time, as in a new process
            model = build(recipe, bpe, seed=0)
            losses = language_losses(model, recipe)
            progress = train(model, recipe, batches, folder, torch.device("cpu"), losses, stop_at=stop)
            assert progress.step == stop
        ends.append(model)
    for one, two in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_kill_while_saving_keeps_the_old_checkpoint(bpe: Tokenizer, tmp_path: Path) -> None:
    model = build(smaller(RECIPES["demo"]), bpe, seed=0)
    checkpoint.save(tmp_path, model, [], {"step": 3})
    (tmp_path / (checkpoint.NAME + ".part")).write_bytes(b"half a file")
    assert checkpoint.load(tmp_path, model, []) == {"step": 3}


@torch.inference_mode()
def loss_here(model: torch.nn.Module, tokenizer: Tokenizer) -> float:
    """Of this file's beginning: no version of Python has it in its library, from which models learn."""
    ids = torch.tensor(tokenizer.encode(Path(__file__).read_text()).ids[:2048]).view(16, 128)
    return float(model(input_ids=ids, labels=ids).loss)


@pytest.mark.long
def test_small_budget_lowers_the_loss(tmp_path: Path) -> None:
    train_demo.main(["--out", str(tmp_path), "--small", "--device", "cpu"])
    for name in RECIPES:
        assert (tmp_path / name / "training.png").stat().st_size > 0
        assert not (tmp_path / name / checkpoint.NAME).exists()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        tokenizer = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        untrained = build(smaller(RECIPES[name]), tokenizer, seed=0)
        assert loss_here(model, tokenizer) < loss_here(untrained, tokenizer) - 0.8
    train_demo.main(["--out", str(tmp_path), "--small"])  # finds all of it made already


@pytest.fixture(scope="module")
def target(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of random weights."""
    folder = tmp_path_factory.mktemp("target")
    model = build(replace(smaller(RECIPES["demo"]), layers=3), bpe, seed=0)
    model.lm_head.weight.data *= 20  # so that there is something to learn
    model.to(torch.bfloat16).save_pretrained(folder)
    vocab.save(bpe, folder)
    return folder


def head_words(target: Path, folder: Path) -> list[str]:
    """A run of a second; three prompts and two texts."""
    lines = [{"prompt": f"def f{n}("} for n in range(3)] + [{"text": text} for text in TEXTS[1:3]]
    (file := folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sizes = "steps=20 row=24 batch_tokens=96 vocab=300 depth=3 new_tokens=12 threads=1"
    return ["head", f"out={folder / 'head'}", f"target={target}", f"data={file}", *sizes.split()]


def test_the_lines_of_a_head_s_data(tmp_path: Path) -> None:
    """Python's own lines end at more characters than those of JSON Lines."""
    (file := tmp_path / "data.jsonl").write_text('{"text": "a\u2028b"}\r\n \n{"prompt": "c"}\n', newline="")
    assert head_data.file_lines(file) == [{"text": "a\u2028b"}, {"prompt": "c"}]
    for wrong in ('{"text": "a"', '{"txet": "a"}', "7"):
        file.write_text('{"text": "a"}\n' + wrong)
        with pytest.raises(DataError, match=r"data.jsonl:2; found"):
            head_data.file_lines(file)


@pytest.mark.parametrize("key", ["target", "start", "data"])
def test_a_head_of_what_is_not_there(key: str, tmp_path: Path) -> None:
    """One line, and no folder is made."""
    with pytest.raises(SystemExit, match=f"^error: {key} cannot be read; found {tmp_path / 'absent'}, "):
        train_demo.main(["head", f"out={tmp_path / 'head'}", f"{key}={tmp_path / 'absent'}"])
    assert not (tmp_path / "head").exists()


def test_a_head_is_trained_goes_on_after_kills_and_drafts(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the target writes texts and while the head learns: the same data, the same weights."""
    monkeypatch.setattr(head_data, "ROWS", 2)
    monkeypatch.setattr("demo.train.SAVE_EVERY", 0.0)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    train_demo.main(head_words(target, whole))
    first, rest = (whole / "head.jsonl").read_bytes().split(b"\n", 1)
    (broken / "head.jsonl").write_bytes(first + b"\n" + rest[: len(rest) // 2])
    step, count = train_demo.train.__globals__["one_step"], 0

    def killed(*given: Any) -> dict[str, float]:
        nonlocal count
        if (count := count + 1) == 8:
            raise KeyboardInterrupt
        return step(*given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("demo.train.one_step", killed)
        train_demo.main(head_words(target, broken))
    train_demo.main(head_words(target, broken))
    assert (broken / "head.jsonl").read_bytes() == (whole / "head.jsonl").read_bytes()
    tensors, again = (load_file(folder / "head" / "model.safetensors") for folder in (whole, broken))
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    curve = json.loads((whole / "head" / "training.json").read_text())["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"]
    texts = []
    for draft in (whole / "head", None):
        with load_pair(target, draft, max_tokens=64, overrides=["model.dtype=fp32"]) as pair:
            (made,) = pair.generate(["def f"], max_new_tokens=20, sampling=SamplingConfig(temperature=0))
            texts.append(made.token_ids)
            assert bool(made.drafted) == (draft is not None)
    assert texts[0] == texts[1]
    (later := tmp_path / "later").mkdir()
    words = [word for word in head_words(target, later) if not word.startswith(("steps", "vocab"))]
    train_demo.main([*words, "steps=1", "matrix_rate=0", "other_rate=0", f"start={whole / 'head'}"])
    kept = load_file(later / "head" / "model.safetensors")
    assert kept.keys() == tensors.keys() and all(torch.equal(kept[name], tensors[name]) for name in kept)


class Toy(torch.nn.Module):
    """A matrix and a table; a table's row moves by how often it is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix, self.embed = torch.nn.Linear(6, 5, bias=False), torch.nn.Embedding(40, 3)
        self.slope = torch.randn(5, 6)

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        steep = (self.matrix.weight * self.slope).sum() * batch.ids.float().mean()
        return (self.embed(batch.ids) - 1).square().mean() + 0.01 * steep, {}


@dataclass
class Rows:
    """Batches; with a share of two each is what two processes read in a step."""

    share: int = 1

    def batch(self, step: int) -> Batch:
        steps = range(self.share * step, self.share * (step + 1))
        ids = [torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(step)) for step in steps]
        rows = torch.cat(ids)
        return Batch(rows, torch.ones(rows.shape), torch.zeros(len(rows), dtype=torch.bool))


def toy_trained(folder: Path, share: int = 1) -> tuple[list[float], int]:
    """The weights and the tokens after six steps; the training was stopped after three."""
    recipe, cpu = head.HeadRecipe(out="", steps=6), torch.device("cpu")
    for stop in (3, 6):
        toy = Toy()
        progress = train(toy, recipe, Rows(share), folder, cpu, toy.losses, stop)
        if ranks.world() > 1:
            torch.distributed.barrier()
    return torch.cat([weight.detach().flatten() for weight in toy.parameters()]).tolist(), progress.tokens


def toy_on_a_rank(_: Any, folder: Path) -> Any:
    with ranks.first_alone():
        seen = (folder / "first").exists(), "WORLD_SIZE" in os.environ
        (folder / "first").touch()
    return seen, "WORLD_SIZE" in os.environ, toy_trained(folder)


@pytest.mark.long  # processes start
def test_two_processes_train_as_one_that_has_both_batches(tmp_path: Path) -> None:
    """Stopped once and gone on; the first process alone sees no file, as it writes it for the other."""
    for name in ("two", "both", "one"):
        (tmp_path / name).mkdir()
    found = on_ranks(2, toy_on_a_rank, tmp_path / "two")
    assert [found[rank][:2] for rank in range(2)] == [((False, False), True), ((True, False), True)]
    (weights, tokens), (others, _) = (found[rank][2] for rank in range(2))
    expected, both = toy_trained(tmp_path / "both", share=2)
    own, _ = toy_trained(tmp_path / "one")
    assert tokens == both and weights == others
    assert weights == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert own != pytest.approx(expected, rel=1e-2, abs=1e-3)


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
        z = drafts.states(text[1 : read + 1], z, [(0, 0, read)], cache)
        for own in range(step):
            z = drafts.states(text[[read + own + 1]], z[-1:], [(0, read + own, 1)], cache)
        found: Tensor = drafts.logits(z[-1:])
        torch.testing.assert_close(found, logits[:, read - 1], rtol=1e-4, atol=1e-4)
