"""The pair in lm-evaluation-harness, offline, on small tasks: regular and speculative score alike."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.tasks.arithmetic import questions
from tests import checkpoints
from tests.test_chat import BEGIN, END, PLAIN
from tests.warm import Started

pytest.importorskip("lm_eval", reason="lm-eval is an extra")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

COUNT = 10
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
task: {name}
metadata: {{version: 1}}
"""
TASKS = {
    "sums": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{[wrong, answer]}}"
doc_to_target: 1
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{answer}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Multiplications that the shipped pair was trained for."""
    folder = tmp_path_factory.mktemp("tasks")
    asked = questions(1, COUNT, 4)
    lines = [{"question": q.text, "answer": q.answer, "wrong": str(int(q.answer) + 7)} for q in asked]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, own in TASKS.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(data=folder / "data.jsonl", name=name) + own)
    return folder


def evaluated(tasks: Path, **model: Any) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from llama_ssp.tasks import harness

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    lm = harness.HarnessModel(batch_size=4, **{"model.dtype": "fp32"}, **model)
    return simple_evaluate(lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


def answers(found: Any, task: str) -> list[Any]:
    samples = sorted(found["samples"][task], key=lambda one: one["doc_id"])
    return [one["resps"] for one in samples]


@pytest.mark.slow
def test_a_draft_changes_no_score(tasks: Path) -> None:
    """Greedy answers are equal; scores do not depend on the draft at all."""
    regular = evaluated(tasks, model="demo", draft=None)
    paired = evaluated(tasks, model="demo", draft="demo_draft", **{"draft.dtype": "fp32"})
    assert answers(regular, "sums") == answers(paired, "sums")
    one, other = ({name: r["results"][name] for name in TASKS} for r in (regular, paired))
    assert one["sums"]["exact_match,none"] == other["sums"]["exact_match,none"] > 0.8
    assert one["choices"]["acc,none"] == other["choices"]["acc,none"] > 0.8
    perplexities = [results["texts"]["word_perplexity,none"] for results in (one, other)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_scores_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    """Of continuations, and of texts longer than the context; as the harness's own model computes them."""
    from transformers import LlamaForCausalLM

    from llama_ssp.tasks.harness import HarnessModel

    folder = checkpoints.save(tmp_path / "model", max_position_embeddings=24)
    lm = HarnessModel(str(folder), batch_size=2, max_length=24, **{"model.dtype": "fp32"})
    plain = LlamaForCausalLM.from_pretrained(folder).eval()

    def score(before: list[int], after: list[int]) -> tuple[Any, bool]:
        """The log-probability of `after`, and whether it is the greedy text."""
        with torch.inference_mode():
            logits = plain(input_ids=torch.tensor([[*before, *after][:-1]])).logits[0, len(before) - 1 :]
        table = logits.double().log_softmax(-1)
        total = sum(float(row[token]) for row, token in zip(table, after, strict=True))
        return pytest.approx(total, abs=1e-3), table.argmax(-1).tolist() == after

    pairs = [("the quick", " brown fox"), ("", "def hello"), ("the lazy dog jumps", " over")]
    found = lm.loglikelihood(requests("loglikelihood", *pairs))
    for (context, after), own in zip(pairs, found, strict=True):
        before = lm.tok_encode(context) if context else [lm.prefix_token_id]
        assert own == score(before, lm.tok_encode(context + after)[len(before) * bool(context) :])
    text = "the quick brown fox jumps over the lazy dog " * 3
    ids = [lm.prefix_token_id, *lm.tok_encode(text)]
    whole = len(ids) // 24  # windows of the whole context; the last one is full, too
    starts = [24 * n for n in range(whole)]
    windows = [score(ids[n : n + 1], ids[n + 1 : n + 25])[0].expected for n in starts]
    tail = len(ids) - 1 - 24 * whole
    windows.append(score(ids[-25:-tail], ids[-tail:])[0].expected)
    (found,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert len(ids) > 48 and found == pytest.approx(sum(windows), abs=1e-3)
    long, nothing = lm._loglikelihood_tokens([(("", text), ids[1:2], ids[2:]), (("a", ""), ids[1:10], [])])
    assert long[0] == score(ids[-25:-24], ids[-24:])[0], "as much as fits, of a continuation"
    assert nothing == (0.0, True), "there is nothing to score"


@dataclass(frozen=True)
class Chatting:
    """A model with a template for chats, as the harness has it, and a conversation in its words."""

    lm: Any
    folder: Path
    made: Any
    asked: str

    def generate(self, lm: Any = None, **kwargs: Any) -> list[str]:
        asked = requests("generate_until", (self.asked, kwargs), ("def", kwargs))
        texts: list[str] = (lm or self.lm).generate_until(asked)
        return texts


HISTORY = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The"}]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Chatting:
    from llama_ssp.tasks.harness import HarnessModel

    made = checkpoints.tokenizer()
    made.add_special_tokens([BEGIN, END])
    folder = checkpoints.save(tmp_path_factory.mktemp("chatting") / "model", made=made)
    checkpoints.write_tokenizer(folder, made, chat_template=PLAIN)
    lm = HarnessModel(str(folder), draft=str(folder), max_length=128)
    return Chatting(lm=lm, folder=folder, made=made, asked=lm.apply_chat_template(HISTORY[:1]))


def test_a_chat_is_in_the_words_of_its_template(chatting: Chatting) -> None:
    assert chatting.asked == f"{BEGIN}user\nhello{END}\n{BEGIN}assistant\n"
    assert chatting.lm.chat_template(True) == PLAIN
    text = chatting.lm.apply_chat_template(HISTORY, add_generation_prompt=False)
    assert text.endswith("assistant\nThe")


def test_a_chat_has_the_tokens_of_its_template(chatting: Chatting) -> None:
    ids = chatting.lm.tok_encode(chatting.asked)
    assert ids[0] == chatting.made.token_to_id(BEGIN) and ids == chatting.lm._tokens.chat(HISTORY[:1])


def test_a_request_is_greedy_unless_it_says_how_to_sample(chatting: Chatting) -> None:
    greedy = chatting.generate(until=["q"], max_gen_toks=6)
    assert greedy == chatting.generate(until=["q"], max_gen_toks=6, temperature=1.0, do_sample=False)


def test_a_temperature_has_a_request_sampled(chatting: Chatting) -> None:
    """As the harness reads it."""
    greedy = chatting.generate(until=["q"], max_gen_toks=6)
    sampled = chatting.generate(max_gen_toks=6, do_sample=True, temperature=1.5)
    assert sampled == chatting.generate(max_gen_toks=6, temperature=1.5) != greedy


def test_settings_of_the_model_hold_for_its_requests(chatting: Chatting) -> None:
    from llama_ssp.tasks.harness import HarnessModel

    greedy = chatting.generate(until=["q"], max_gen_toks=6)
    first = chatting.lm.tok_encode(greedy[0], add_special_tokens=False)[:1]
    lm = HarnessModel(str(chatting.folder), max_length=128, **{"sampling.bad_tokens": first})
    text = chatting.generate(lm, until=["q"], max_gen_toks=6)[0]
    assert not text.startswith(lm._tokens.decode(first))


@pytest.mark.parametrize("wrong", [{"num_beams": 4}, {"max_gen_toks": 128}, {"guess": 1}], ids=str)
def test_a_setting_that_a_request_may_not_have(wrong: dict[str, int], chatting: Chatting) -> None:
    from llama_ssp import RunError

    with pytest.raises(RunError):
        chatting.generate(**{"max_gen_toks": 6, **wrong})


def test_a_batch_size_that_the_harness_would_measure_is_refused(chatting: Chatting) -> None:
    from llama_ssp import RunError
    from llama_ssp.tasks.harness import HarnessModel

    with pytest.raises(RunError, match="batch_size"):
        HarnessModel(str(chatting.folder), batch_size="auto")


@pytest.mark.slow
def test_the_documented_command_over_ranks(tasks: Path, tmp_path: Path) -> None:
    """One table, one file, and a score."""
    model = "model=demo,draft=demo_draft,model.dtype=fp32,draft.dtype=fp32"
    words = ["--model", "llama_ssp", "--model_args", model, "--tasks", "sums", "--include_path", str(tasks)]
    words += ["--batch_size", "8", "--output_path", str(tmp_path / "out")]
    leader, other = Started(tmp_path, 2, "llama_ssp.tasks.harness", "run", *words, program="-m").finish()
    assert (leader.code, other.code) == (0, 0), leader.err + other.err
    (file,) = (tmp_path / "out").rglob("results_*.json")
    score = json.loads(file.read_text())["results"]["sums"]["exact_match,none"]
    assert score > 0.8 and (leader.out + other.out).count("exact_match") == 1
