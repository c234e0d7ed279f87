"""The making of the shipped models: vocabularies, data, resuming, learning."""

import json
import random
from pathlib import Path

import pytest
import torch
import train_demo
from demo import checkpoint, data, vocab
from demo.batches import ANSWER_WEIGHT, Batches, token_weights
from demo.recipes import RECIPES, build, smaller
from demo.train import train
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [
    "",
    "def f(x):\n    return x  \n\n",
    "  12 + 3.14 =\t7",
    "naïve — 漢字 🙂 ½ ²",
    "\r\n\x00é",
]


@pytest.fixture(scope="module")
def documents() -> data.Documents:
    return data.library_documents(seed=0, limit=30)


@pytest.fixture(scope="module")
def bpe(documents: data.Documents) -> Tokenizer:
    return vocab.train_bpe(documents.train, 512)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_tokenizers_round_trip(kind: str, bpe: Tokenizer, tmp_path: Path) -> None:
    vocab.save(bpe if kind == "bpe" else vocab.bytes_only(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_digit_is_a_token(bpe: Tokenizer) -> None:
    assert bpe.encode("a * 12 = 345").tokens[-4:] == ["Ġ", "3", "4", "5"]


def test_bytes_vocabulary_is_bytes() -> None:
    tokenizer = vocab.bytes_only()
    assert tokenizer.get_vocab_size() == 258
    assert len(tokenizer.encode("é漢").ids) == 1 + 5


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
            progress = train(model, recipe, batches, folder, torch.device("cpu"), stop_at=stop)
            assert progress.step == stop
        ends.append(model)
    for one, two in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_kill_while_saving_keeps_the_old_checkpoint(bpe: Tokenizer, tmp_path: Path) -> None:
    model = build(smaller(RECIPES["demo"]), bpe, seed=0)
    checkpoint.save(tmp_path, model, [], {"step": 3})
    (tmp_path / (checkpoint.NAME + ".part")).write_bytes(b"half a file")
    assert checkpoint.load(tmp_path, model, []) == {"step": 3}


@pytest.mark.slow
def test_small_budget_lowers_the_loss(tmp_path: Path) -> None:
    train_demo.main(["--out", str(tmp_path), "--small", "--device", "cpu"])
    for name in RECIPES:
        record = json.loads((tmp_path / name / "training.json").read_text())
        first, last = record["curve"][0], record["curve"][-1]
        assert last["text"] < first["text"] - 0.3
        assert (tmp_path / name / "training.png").stat().st_size > 0
        assert not (tmp_path / name / checkpoint.NAME).exists()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        ids = AutoTokenizer.from_pretrained(tmp_path / name)("def f", return_tensors="pt")
        assert model(**ids).logits.isfinite().all()
    train_demo.main(["--out", str(tmp_path), "--small"])  # finds all of it made already
