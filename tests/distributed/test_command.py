"""The command on real ranks: the figures of one process, of a GGUF file, too; one voice, and one cause."""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.errors import FAILED_CHECK
from tests import checkpoints
from tests.conftest import Command
from tests.gguf_files import reads_tokenizers
from tests.test_gguf import made
from tests.test_gguf_tokenizer import add_that_of_folders
from tests.warm import Answer, Started

pytestmark = pytest.mark.slow

FP32 = ("model.dtype=fp32", "draft.dtype=fp32", "output=json", "out=null")
PROMPTS = ("hello", "def f", "a quick brown fox")


def pair(saved: Any) -> tuple[str, ...]:
    return f"model={saved.sharded}", f"draft={saved.whole}", *FP32


def on_two(folder: Path, *run: str, stdin: str = "", fault: Any = None, code: int = 0) -> Answer:
    """The leader's answer; the other rank says nothing, and leaves with the same code."""
    leader, other = Started(folder, 2, *run, stdin=stdin, fault=fault).finish()
    assert (leader.code, other.code, other.out, other.err) == (code, code, "", ""), leader.err + other.err
    return leader


GIVEN = 'task.prompts=["hello","def f"]'
CERTIFY = (
    "task=certify", "speculation.k=3", GIVEN, "task.samples=24", "task.max_new_tokens=4",
    "task.law_tokens=8", "task.law_rounds=6", "task.greedy_tokens=8",
)  # fmt: skip
COUNTS = ("outputs", "target_forwards", "draft_forwards", "tokens_committed", "config_sha256")


def sides(found: Any) -> list[Any]:
    return [found["target_alone"], found["draft_alone"], found["pair"][0]]


# What is asked, and the figures that two ranks share with one process.
TASKS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "generate": (
        ("task.max_new_tokens=16", "speculation.k=3"),
        lambda found: [found[name] for name in COUNTS],
    ),
    "compare": (
        ("task=compare", "task.max_new_tokens=16"),
        lambda found: [
            [each[side]["token_ids"] for side in ("regular", "speculative")] for each in found["comparisons"]
        ],
    ),
    "measure": (
        ("task=measure", GIVEN, "task.max_new_tokens=8", "task.repeats=2", "task.ks=[2]"),
        lambda found: (
            found["alpha"],
            found["pair"][0]["blocks_by_accepted"],
            [(side["repeats"], side["tokens_committed"]) for side in sides(found)],
        ),
    ),
    "certify": (
        CERTIFY,
        lambda found: (found["verdict"], [(check["name"], check["outcome"]) for check in found["checks"]]),
    ),
    "agree": (
        ("task=agree", GIVEN, "task.max_new_tokens=16"),
        lambda found: (
            found["target_forwards"],
            [(each["token_ids"], each["finish_reason"], each["fork"]) for each in found["prompts"]],
        ),
    ),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_give_one_processes_figures(task: str, command: Command, saved: Any, tmp_path: Path):
    """The leader shares the prompts; one rank prints. What ranks say to each other has its time."""
    words, figures = TASKS[task]
    run, stdin = (*pair(saved), "seed=5", *words), "" if GIVEN in words else "\n".join(PROMPTS)
    expected = command(*run, stdin=stdin.encode()).document
    found = on_two(tmp_path / "two", *run, stdin=stdin).document
    assert figures(found) == figures(expected)
    if task == "generate":
        assert len(found["outputs"]) == len(PROMPTS) and "over 2 ranks" in found["devices"]["model"]
    if task == "measure":
        speaks = [side["time_split_ms_per_token"]["communicate"] > 0 for side in sides(found)]
        assert speaks == [True, False, True] and [rank["rank"] for rank in found["plan"]["memory"]] == [0, 1]
    if task == "certify":
        assert [check["outcome"] for check in found["checks"] if check["name"] == "law"] == ["passed"]


def accept_all(rank: int) -> None:
    """The rule is wrong, on the leader, which alone decides."""
    from llama_ssp.speculative.verification import RULES, BlockRule

    class AcceptsAll(BlockRule):
        def accept_chances(self, block: Any) -> Any:
            return (super().accept_chances(block) > 0).double()

    if rank == 0:
        RULES["block"] = AcceptsAll()


def test_every_rank_leaves_with_the_verdict(saved: Any, tmp_path: Path):
    run = (*pair(saved), "seed=5", *CERTIFY)
    leader = on_two(tmp_path / "two", *run, fault=accept_all, code=FAILED_CHECK)
    assert leader.document["verdict"] == "different"


def vanish_in_the_target(rank: int) -> None:
    """The second rank is gone in its fourth forward pass."""
    from llama_ssp.models.decoder_model import DecoderModel

    whole, calls = DecoderModel.logits, []

    def struck(self: DecoderModel, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            os._exit(9)
        return whole(self, *args)

    if rank == 1:
        DecoderModel.logits = struck  # type: ignore[method-assign]


def batch(saved: Any, folder: Path, output: str) -> tuple[str, ...]:
    """Records of several lengths, some of them with a seed and settings of their own."""
    own: list[dict[str, Any]] = [{}, {"temperature": 0.4, "top_k": 9, "seed": 8}, {"max_new_tokens": 3}]
    records = [{"id": f"{i}", "prompt": PROMPTS[i % 3], **own[i % 3]} for i in range(8)]
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    where = f"task.input={folder / 'in.jsonl'}", f"task.output={folder / output}"
    how = "seed=5", "speculation.k=4", "task.max_new_tokens=9", "task.batch_size=2"
    return "task=batch", *pair(saved), *where, *how


def test_a_batch_is_the_same_on_two_ranks_also_after_one_vanished(
    command: Command, saved: Any, tmp_path: Path
):
    assert command(*batch(saved, tmp_path, "one.jsonl")).code == 0
    run = (*batch(saved, tmp_path, "two.jsonl"), "task.shard_size=3")
    leader, _ = Started(tmp_path / "first", 2, *run, fault=vanish_in_the_target).finish()
    assert leader.code == 5 and not (tmp_path / "two.jsonl").exists()
    on_two(tmp_path / "second", *run)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def lapses_in_a_second(rank: int) -> None:
    """From the first look on, the claims are as old as that."""
    from llama_ssp.batch.attempts import STALE_S
    from llama_ssp.batch.journal import CLAIMS, Journal

    whole, ages = Journal.silent, [STALE_S - 1]

    def silent(self: Journal) -> set[tuple[str, float]]:
        while ages:
            then = time.time() - ages.pop()
            for claim in (self.folder / CLAIMS).iterdir():
                os.utime(claim, (then, then))
        return whole(self)

    Journal.silent = silent  # type: ignore[method-assign]


def test_ranks_wait_together_for_a_claim_to_lapse(command: Command, saved: Any, tmp_path: Path):
    """Its process was lost on another machine after its last record, so that nothing is to be generated."""
    run = batch(saved, tmp_path, "out.jsonl")
    assert command(*run).code == 0
    (shard,) = (work := tmp_path / "out.jsonl.work").glob("done/*")
    shard.unlink()
    answers = (tmp_path / "out.jsonl").rename(tmp_path / "before.jsonl").read_bytes()
    claim = work / "claims" / shard.stem
    claim.write_text('{"host": "a", "machine": "b", "pid": 1, "started": "1"}')
    leader = on_two(tmp_path / "two", *run, fault=lapses_in_a_second)
    assert "lapse after 60 s" in leader.err
    assert (tmp_path / "out.jsonl").read_bytes() == answers


def stall(rank: int, thread: bool = True, sign: bool = True) -> None:
    """The leader's disk stalls twice, longer than ranks wait: for a line, and for a claim."""
    from llama_ssp.batch import attempts
    from llama_ssp.tasks import interactive

    append, claim, calls = attempts.Attempt._append, attempts.claim, list[str]()

    def stalled(name: str, call: Any, *args: Any) -> Any:
        calls.append(name)
        if calls.count(name) == 2:
            time.sleep(STALL_S)
        return call(*args)

    if rank == 0:
        attempts.Attempt._append = lambda *args: stalled("line", append, *args)  # type: ignore[method-assign]
        attempts.claim = lambda *args: stalled("claim", claim, *args)  # type: ignore[assignment]
    if not thread:  # the leader writes by itself, as it did before it had a thread for it
        attempts.JournalThread.do = lambda _, call: call()  # type: ignore[method-assign, assignment]
    if not sign:
        interactive.between_signs_s = lambda _: 1000.0


TIMEOUT_S, STALL_S = 12, 25


@pytest.mark.long
@pytest.mark.parametrize(
    "how", [{}, {"thread": False}, {"sign": False}], ids=["sound", "no thread", "no sign"]
)
def test_a_disk_that_stalls_ends_no_rank(how: dict[str, bool], command: Command, saved: Any, tmp_path: Path):
    """Unless the leader writes without its thread, or looks for work without a sign of life."""
    assert command(*batch(saved, tmp_path, "one.jsonl")).code == 0
    run = (*batch(saved, tmp_path, "two.jsonl"), "task.shard_size=3", f"placement.timeout_s={TIMEOUT_S}")
    leader, other = Started(tmp_path / "two", 2, *run, fault=partial(stall, **how)).finish()
    assert (leader.code == 0) is (other.code == 0) is (not how), leader.err + other.err
    if not how:
        assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def compile_late(rank: int) -> None:
    """The leader compiles, for longer than ranks wait for each other in a round."""
    from llama_ssp.pair import session

    whole = session.prepare

    def late(*args: Any) -> None:
        time.sleep(20)
        whole(*args)

    if rank == 0:
        session.prepare = late


@pytest.mark.long
def test_a_rank_that_compiles_is_waited_for(saved: Any, tmp_path: Path):
    run = (*pair(saved), 'task.prompts=["hello"]', "task.max_new_tokens=4", "placement.timeout_s=15")
    on_two(tmp_path / "run", *run, fault=compile_late)


def test_what_cannot_be_split_is_refused_by_one_voice(saved: Any, tmp_path: Path):
    """Every rank finds it by itself, before it looks for the others."""
    run = (*pair(saved), 'task.prompts=["hello"]', "task.max_new_tokens=16")
    started = Started(tmp_path / "run", 3, *run)
    leader, *others = started.finish()
    assert (leader.code, leader.out, len(leader.err.splitlines())) == (5, "", 1)
    assert [(other.code, other.out, other.err) for other in others] == [(5, "", "")] * 2
    assert not any(started.has_come(rank) for rank in range(3))
    assert "4 heads, 2 KV heads, 3 ranks" in leader.err and "allowed 1, 2, 4 ranks" in leader.err


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


@reads_tokenizers
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
