"""Bad models: every folder of the hostile corpus, and pairs whose tokenizers do not go together.

Here the corpus is walked in this process, by the engine of a single rank; `python -m tests.hostile` walks it
by every engine and watches what is opened and run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from llama_ssp import load_pair
from llama_ssp.errors import ModelError
from tests import checkpoints
from tests.bad_inputs import (
    PROMPT,
    Case,
    Making,
    alone,
    both,
    duo,
    require_one_line,
)
from tests.checkpoints import copied, edit
from tests.conftest import Command, Saved
from tests.hostile.corpus import CORPUS, FILES, LOADED, TEMPLATES, Hostile
from tests.hostile.damage import (
    removed,
    replaced,
    reworked,
    with_tokenizer,
)


def reordered() -> Tokenizer:
    """The same tokens; two of them have changed their ids."""
    content = json.loads(checkpoints.tokenizer().to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return Tokenizer.from_str(json.dumps(content))


def unmerged() -> Tokenizer:
    """The same tokens; none is ever made of two others."""
    content = json.loads(checkpoints.tokenizer().to_str())
    content["model"]["merges"] = []
    return Tokenizer.from_str(json.dumps(content))


def narrow_draft(making: Making) -> list[str]:
    """A draft that has the tokenizer's tokens, but not logits for all of them."""
    draft = checkpoints.save(making.folder / "draft", made=checkpoints.tokenizer(), vocab_size=290)
    return [PROMPT, *both(making.saved.whole, draft)]


TOKENIZERS = [
    duo(16, "fewer-tokens", with_tokenizer(lambda: checkpoints.tokenizer(280)), "different tok", "300"),
    duo(16, "other-ids", with_tokenizer(reordered), "different tokenizers", "2 differ", "'a'"),
    duo(16, "other-merges", with_tokenizer(unmerged), "cut text differently", "the same merges"),
    Case(15, "narrow-draft", narrow_draft, 4, ("300 and 290 logits", "10 tokens only"), FILES),
    duo(15, "no-tokenizer", removed("tokenizer.json"), "the tokenizer cannot be read", "tokenizer.json"),
    duo(15, "damaged", replaced("tokenizer.json", '{"a": 1}'), "the tokenizer cannot be read"),
    duo(15, "damaged-target", replaced("tokenizer.json", "{"), "the tokenizer cannot be read", whose="model"),
    Case(
        15, "one-synthetic",
        lambda m: [PROMPT, *alone(m.saved.whole)[:1], "draft=tiny_draft", "task.max_new_tokens=4"], 4,
        ("one model has a tokenizer", "synthetic"), FILES,
    ),
]  # fmt: skip


def case_of(row: Hostile) -> Case:
    """One model folder, changed."""

    def build(making: Making) -> list[str]:
        return [PROMPT, *alone(making.model(row.damage, row.sharded)), *row.extra]

    return Case(row.row, row.name, build, row.code, row.says, row.reach, answers=row.answers)


# What runs after all, and templates that want all time or memory, have a process of their own.
APART = [row for row in CORPUS if not row.code or row in TEMPLATES[2:]]
TABLE = [
    *TOKENIZERS,
    *(
        pytest.param(case_of(row), marks=pytest.mark.slow if row.reach == LOADED else [])
        for row in CORPUS
        if row not in APART
    ),
]


@pytest.mark.few(16)
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_one_line_and_its_code(
    case: Case, command: Command, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_one_line(case, command, saved, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("target_size", "draft_size"),
    [
        (300, 320),
        (320, 300),
        pytest.param(32000, 32064, marks=pytest.mark.slow),
        pytest.param(152064, 151936, marks=pytest.mark.slow),
    ],
)
def test_vocabularies_may_differ_by_padding(
    target_size: int, draft_size: int, command: Command, saved: Saved, tmp_path: Path
) -> None:
    """The wider of the two favours its padding beyond all; it is never drawn, by either (row 15)."""
    wide, narrow = max(target_size, draft_size), min(target_size, draft_size)
    padded = checkpoints.save(tmp_path / "padded", vocab_size=wide)
    other = saved.whole if narrow == 300 else checkpoints.save(tmp_path / "other", vocab_size=narrow)

    def favour_padding(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][:300] *= 0.01
        tensors["lm_head.weight"][300:] *= 50

    reworked(favour_padding)(padded)
    target, draft = (padded, other) if target_size > draft_size else (other, padded)
    answer = command(PROMPT, *both(target, draft), "task.max_new_tokens=24", "output=json")
    assert (answer.code, answer.errors) == (0, [])
    (output,) = answer.document["outputs"]
    assert output["output_tokens"] == 24 or output["finish_reason"] == "eos"
    assert max(output["token_ids"]) < 300


def test_the_target_as_its_own_draft_is_warned_of(
    command: Command, saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 13, the second time under another name."""
    (tmp_path / "alias").symlink_to(saved.whole)
    answer = command(PROMPT, *both(saved.whole, tmp_path / "alias"))
    assert (answer.code, answer.errors) == (0, [])
    assert "the draft is the target itself" in caplog.text


def test_other_end_tokens_follow_the_target(
    command: Command, saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 17."""
    draft = copied(saved.whole, tmp_path / "draft")
    edit(draft / "generation_config.json", lambda c: c.update(eos_token_id=[1, 7]))
    answer = command(PROMPT, *both(saved.whole, draft))
    assert (answer.code, answer.errors) == (0, [])
    assert "texts end with ['</s>'] and ['&', '</s>'], the target's hold" in caplog.text


def test_a_row_of_nan_stops_alone(command: Command, saved: Saved, tmp_path: Path) -> None:
    """Row 39: a damaged embedding; only the prompt that uses it stops, and the exit code says so."""
    path = copied(saved.whole, tmp_path / "model")
    bad = checkpoints.tokenizer().token_to_id("~")
    reworked(lambda t: t["model.embed_tokens.weight"][bad].fill_(torch.nan))(path)
    answer = command(
        'task.prompts=["a", "b~", "c"]', *alone(path), f"sampling.bad_tokens=[1,{bad}]", "output=json"
    )
    assert answer.code == 4
    assert len(answer.errors) == 1
    assert "Traceback" not in answer.err
    for part in ("not numbers", "prompt '1'", "position 2", "1 of 3", "fetch the model again"):
        assert part in answer.errors[0]
    outputs = answer.document["outputs"]
    assert [o["finish_reason"] for o in outputs] == ["length", "error", "length"]
    assert [o["output_tokens"] for o in outputs] == [4, 0, 4]
    assert answer.document["status"] == "error"


def test_scores_that_are_not_numbers(command: Command, saved: Saved, tmp_path: Path) -> None:
    """Of a text that is only scored; in a batch only its own record has the error."""
    path = copied(saved.whole, tmp_path / "model")
    bad = checkpoints.tokenizer().token_to_id("~")
    reworked(lambda t: t["model.embed_tokens.weight"][bad].fill_(torch.nan))(path)
    scoring = ("task.logprobs=1", "task.echo=true", "task.max_new_tokens=0")
    answer = command('task.prompts=["ab", "~b"]', *alone(path), *scoring, "output=json")
    assert answer.code == 4 and "not numbers" in answer.errors[0] and "prompt '1'" in answer.errors[0]
    assert [one["finish_reason"] for one in answer.document["outputs"]] == ["length", "error"]
    assert "NaN" not in answer.out
    lines = [{"prompt": text, "logprobs": 1, "echo": True, "max_new_tokens": 0} for text in ("ab", "~b")]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = command("task=batch", "task.input=in.jsonl", "task.output=out.jsonl", *alone(path), "output=json")
    assert job.code == 0, job.err
    assert job.document["records_refused_here"] == 1
    good, refused = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert len(good["prompt_logprobs"]) == 2 and "not numbers" in refused["error"]["message"]
    with load_pair(path, max_tokens=64) as pair, pytest.raises(ModelError, match=r"not numbers.*prompt '1'"):
        pair.score(["ab", "~b"])


def test_a_run_that_allows_no_token_is_refused(command: Command, saved: Saved, tmp_path: Path) -> None:
    """Tokens that only fill up the vocabulary are none, nor are ends of a text that must go on."""
    padded = checkpoints.save(tmp_path / "padded", vocab_size=320)
    ids = checkpoints.tokenizer().get_vocab().values()
    others = [i for i in ids if i != checkpoints.tokenizer().token_to_id("</s>")]
    for path, banned, least in ((padded, [*ids], 0), (saved.whole, others, 2)):
        words = f"sampling.bad_tokens={banned}".replace(" ", ""), f"sampling.min_new_tokens={least}"
        answer = command(PROMPT, *alone(path), *words)
        assert answer.code == 2 and "no token is allowed; sampling.bad_tokens" in answer.errors[0]
    assert command(PROMPT, *alone(saved.whole), words[0]).code == 0


def test_an_adapter_alone_is_called_by_its_name(command: Command, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    answer = command(PROMPT, *alone(tmp_path))
    assert answer.code == 4 and answer.errors[0].startswith(
        "error: there is no config.json, but an adapter (LoRA)"
    )
