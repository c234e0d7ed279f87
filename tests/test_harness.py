"""The pair in lm-evaluation-harness, offline, on small tasks: regular and speculative score alike."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from llama_ssp.config import Dtype
from llama_ssp.tasks.arithmetic import questions
from tests import checkpoints
from tests.test_chat import BEGIN, END, NO_SYSTEM, PLAIN
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
    assert regular["tokenizer_eos_token"] == paired["tokenizer_eos_token"]
    assert regular["max_length"] == 1024 and regular["eot_token_id"] == int(regular["tokenizer_eos_token"][1])


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


ASKED = "the quick brown fox jumps over the lazy dog"
CHOICES = [(ASKED, " brown"), (ASKED, " fox"), (ASKED, "x"), (ASKED, " fox jumps")]


def test_choices_of_one_context_share_what_is_read(chatting: Chatting, recorded: list[Any]) -> None:
    """Those of an empty context are longer than it: each has a row, but for those that differ at the end."""
    lm = chatting.lm
    shared = lm.loglikelihood(requests("loglikelihood", *CHOICES))
    assert [len(continuations) for continuations in recorded] == [4]
    alone = [lm.loglikelihood(requests("loglikelihood", choice))[0] for choice in CHOICES]
    for (total, is_greedy), (expected, was_greedy) in zip(shared, alone, strict=True):
        assert total == pytest.approx(expected, abs=1e-4) and is_greedy is was_greedy

    recorded.clear()
    lm.loglikelihood(requests("loglikelihood", *(("", text) for text in ("ab", "ac", "dbc"))))
    assert sorted(map(len, recorded)) == [1, 2]


@pytest.fixture
def recorded(chatting: Chatting, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The continuations of each context that was read."""
    score = chatting.lm._pair.score_continuations
    seen: list[Any] = []

    def recording(contexts: Any, continuations: Any, top: int) -> Any:
        seen.extend(continuations)
        return score(contexts, continuations, top=top)

    monkeypatch.setattr(chatting.lm._pair, "score_continuations", recording)
    return seen


def test_equal_requests_are_computed_once(chatting: Chatting, recorded: list[Any]) -> None:
    first, second = chatting.lm.loglikelihood(requests("loglikelihood", CHOICES[0], CHOICES[0]))
    assert first == second and recorded == [[tuple(chatting.lm.tok_encode(" brown"))]]


TYPES = [
    ({}, Dtype.fp32),
    ({"dtype": "auto"}, Dtype.fp32),
    ({"dtype": torch.bfloat16}, Dtype.bf16),
    ({"dtype": "half"}, Dtype.fp16),
    ({"model.dtype": "bf16"}, Dtype.bf16),
]


@pytest.mark.parametrize(("given", "held"), TYPES, ids=str)
def test_a_model_keeps_the_type_of_its_checkpoint(
    given: dict[str, Any], held: Dtype, chatting: Chatting
) -> None:
    """As the class hf does; `pretrained` names it as `model` does."""
    from llama_ssp.tasks.harness import HarnessModel

    lm = HarnessModel(pretrained=str(chatting.folder), **given)
    assert lm._session.placements.target.dtype is held
    assert lm.get_model_info()["model_dtype"] == held.value
    assert lm.max_length == checkpoints.CONTEXT, "the model's own context"


def test_what_the_results_say_of_the_tokenizer(chatting: Chatting) -> None:
    lm = chatting.lm
    assert (lm.tokenizer.bos_token, lm.tokenizer.eos_token) == ("<s>", "</s>")
    assert lm.eot_token_id == lm.tokenizer.eos_token_id and lm.prefix_token_id == lm.tokenizer.bos_token_id


ARGUMENTS = [
    ({}, "pretrained is missing; --model_args; write --model_args pretrained="),
    ({"model": "demo", "pretrained": "demo"}, "pretrained and model are both given"),
    ({"pretrained": "demo", "dtype": "float8"}, "dtype is unknown; found float8, allowed float64, "),
    ({"pretrained": "demo", "dtype": "float32", "model.dtype": "fp32"}, "are both given"),
    ({"pretrained": "demo", "trust_remote_code": True}, "trust_remote_code is an argument of the class hf"),
    ({"pretrained": "demo", "parallelize": True}, "leave it out: torchrun --nproc-per-node N"),
    ({"pretrained": "demo", "load_in_4bit": True}, "write dtype=nf4"),
    ({"pretrained": "demo", "tokenizer": "gpt2"}, "the tokenizer is no folder; tokenizer; found gpt2"),
    ({"pretrained": "demo", "batch_size": "many"}, "batch_size is not a number; found 'many'"),
    ({"pretrained": "demo", "max_length": "long"}, "max_length is not a whole number; found 'long'"),
    ({"pretrained": "demo", "enable_thinking": True}, "needs to know where an answer begins"),
    ({"pretrained": "demo", "chat_template_args": "x"}, "chat_template_args is not a map; found 'x'"),
    ({"pretrained": "demo", "guess": 1}, "guess"),
]


@pytest.mark.parametrize(("given", "says"), ARGUMENTS, ids=[says for _, says in ARGUMENTS])
def test_model_args_that_are_refused_are_one_line(given: dict[str, Any], says: str) -> None:
    from llama_ssp import RunError
    from llama_ssp.tasks.harness import HarnessModel

    with pytest.raises(RunError) as raised:
        HarnessModel(**given, device="cuda:0", max_batch_size=None)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_what_changes_nothing_is_taken(chatting: Chatting) -> None:
    """Arguments of the class hf with the values that they have there, and its usual revision."""
    from llama_ssp.tasks.harness import HarnessModel

    given = {"trust_remote_code": False, "parallelize": False, "revision": "main", "tokenizer": None}
    assert HarnessModel(pretrained=str(chatting.folder), **given, use_fast_tokenizer=True).max_length


def test_rows_by_the_plan(chatting: Chatting) -> None:
    from llama_ssp.tasks.harness import HarnessModel

    lm = HarnessModel(pretrained=str(chatting.folder), batch_size="auto:4", max_batch_size=3)
    assert 1 <= lm.batch_size <= 3 == HarnessModel(pretrained=str(chatting.folder), batch_size="3").batch_size
    (score,) = lm.loglikelihood(requests("loglikelihood", CHOICES[0]))
    assert score[0] == pytest.approx(chatting.lm.loglikelihood(requests("loglikelihood", CHOICES[0]))[0][0])


def test_the_harness_s_seed_is_that_of_the_draws(chatting: Chatting) -> None:
    """Its command sets torch's; `seed=` of the model replaces it."""
    from llama_ssp.tasks.harness import HarnessModel

    def drawn(seed: int, lm: Any = None) -> list[str]:
        torch.manual_seed(seed)
        return chatting.generate(lm, max_gen_toks=8, do_sample=True, temperature=1.5)

    own = HarnessModel(str(chatting.folder), draft=str(chatting.folder), max_length=128, seed=1)
    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, own) == drawn(2, own) == drawn(1)


def system_refused(folder: Path, template: str) -> Any:
    from llama_ssp.tasks.harness import HarnessModel

    checkpoints.edit(folder / "tokenizer_config.json", lambda content: content.update(chat_template=template))
    return HarnessModel(str(folder))


RAISES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


@pytest.mark.parametrize("template", [RAISES + PLAIN, NO_SYSTEM], ids=["raises", "leaves it out"])
def test_a_template_without_a_system_role_gets_no_system_message(
    template: str, chatting: Chatting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the class hf, with a warning. What it refuses in any case is an error that names the flag."""
    from llama_ssp import RunError

    lm = system_refused(checkpoints.copied(chatting.folder, tmp_path / "model"), template)
    history = [{"role": "system", "content": "Be brief."}, *HISTORY[:1]]
    for _ in range(2):
        assert lm.apply_chat_template(history) == chatting.asked
    lines = [record.getMessage() for record in caplog.records]
    assert sum("takes no system message" in line for line in lines) == 1

    refuses = system_refused(checkpoints.copied(chatting.folder, tmp_path / "other"), NEVER)
    with pytest.raises(RunError, match="leave out --apply_chat_template") as raised:
        refuses.apply_chat_template(history)
    assert "task." not in str(raised.value).replace("task.chat=true", "")


NEVER = "{{ raise_exception('never') }}"
THINKS = PLAIN.replace("assistant\n' }}", "assistant\n' }}{{ '' if enable_thinking else '<think></think>' }}")


def test_arguments_reach_the_template(chatting: Chatting, tmp_path: Path) -> None:
    from llama_ssp import RunError
    from llama_ssp.tasks.harness import HarnessModel

    folder = checkpoints.copied(chatting.folder, tmp_path / "model")
    checkpoints.edit(folder / "tokenizer_config.json", lambda content: content.update(chat_template=THINKS))
    thinking = HarnessModel(str(folder), enable_thinking=True, think_end_token="</think>")
    plain = HarnessModel(str(folder), chat_template_args={"enable_thinking": False})
    assert thinking.apply_chat_template(HISTORY[:1]) == chatting.asked
    assert plain.apply_chat_template(HISTORY[:1]) == f"{chatting.asked}<think></think>"
    with pytest.raises(RunError, match="a score of given texts has no thought in it"):
        thinking.loglikelihood(requests("loglikelihood", CHOICES[0]))


def test_a_tokenizer_of_another_folder(chatting: Chatting, tmp_path: Path) -> None:
    """Its words for the same ids are another's."""
    from llama_ssp.tasks.harness import HarnessModel

    other = json.loads(chatting.made.to_str())
    ids = other["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    checkpoints.write_tokenizer(tmp_path / "other", Tokenizer.from_str(json.dumps(other)))
    lm = HarnessModel(str(chatting.folder), max_length=128, tokenizer=str(tmp_path / "other"))
    assert lm.tok_encode("a") == chatting.lm.tok_encode("b") != lm.tok_encode("b")


def test_a_character_that_the_limit_cuts_is_shown(chatting: Chatting) -> None:
    """As U+FFFD, and only where the text ends in it."""
    (first, *_) = chatting.lm.tok_encode("\N{EURO SIGN}", add_special_tokens=False)  # one byte of three
    assert chatting.lm._answer("ab", [*chatting.lm.tok_encode("ab", False), first], []) == "ab\ufffd"
    assert chatting.lm._answer("ab", chatting.lm.tok_encode("ab", False), []) == "ab"


def test_a_thought_is_taken_from_an_answer(chatting: Chatting) -> None:
    """By the token that ends it, or its text: what follows the last one stays."""
    from llama_ssp import SamplingConfig
    from llama_ssp.tasks.harness import HarnessModel

    lm = chatting.lm
    whole = lm.generate_until(requests("generate_until", ("def", {"max_gen_toks": 8})))[0]
    greedy = SamplingConfig(temperature=0.0)
    (written,) = lm._pair.generate([lm.tok_encode("def")], max_new_tokens=8, sampling=greedy)
    ids = written.token_ids
    by_id = HarnessModel(str(chatting.folder), max_length=128, think_end_token=str(ids[2]))
    last = len(ids) - 1 - ids[::-1].index(ids[2])
    (answer,) = by_id.generate_until(requests("generate_until", ("def", {"max_gen_toks": 8})))
    assert answer == lm._tokens.decode(ids[last + 1 :]).lstrip() != whole

    end = whole[2:4]
    by_text = HarnessModel(str(chatting.folder), max_length=128, think_end_token=end)
    (answer,) = by_text.generate_until(requests("generate_until", ("def", {"max_gen_toks": 8})))
    assert answer == whole.split(end)[-1].lstrip() != whole


def test_a_text_that_loses_its_beginning_is_counted(
    chatting: Chatting, caplog: pytest.LogCaptureFixture
) -> None:
    long = "the quick brown fox " * 40
    with caplog.at_level(logging.WARNING):
        chatting.lm.generate_until(
            requests("generate_until", (long, {"max_gen_toks": 8}), ("def", {"max_gen_toks": 8}))
        )
        chatting.lm.loglikelihood(requests("loglikelihood", (long, " fox"), ("a", "b")))
    lines = [record.getMessage() for record in caplog.records]
    said = [line for line in lines if "lose their beginnings" in line]
    assert len(said) == 2 and said[0].startswith("1 of 2 prompts are longer than 120 tokens")
    assert said[1].startswith("1 of 2 texts are longer than 128 tokens")


def test_an_interrupted_run_keeps_what_it_has(
    chatting: Chatting, recorded: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the harness's own cache: the second run computes what the first one did not reach."""
    from lm_eval.api.model import CachingLM

    from llama_ssp.tasks import harness_model

    monkeypatch.setattr(harness_model, "SCORED_AT_ONCE", 1)
    asked = requests("loglikelihood", *((f"text {number}", " fox") for number in range(4)))
    cached = CachingLM(chatting.lm, str(tmp_path / "cache.db"))
    counted = chatting.lm.cache_hook.add_partial
    try:

        def interrupts(kind: str, request: Any, score: Any) -> None:
            counted(kind, request, score)
            if len(recorded) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(chatting.lm.cache_hook, "add_partial", interrupts)
        with pytest.raises(KeyboardInterrupt):
            cached.loglikelihood(asked)
        monkeypatch.setattr(chatting.lm.cache_hook, "add_partial", counted)
        recorded.clear()
        scores = cached.loglikelihood(asked)
        assert len(recorded) == 2 and scores == chatting.lm.loglikelihood(asked)

        text = cached.generate_until(requests("generate_until", ("def", {"max_gen_toks": 4})))
        total = cached.loglikelihood_rolling(requests("loglikelihood_rolling", ("the quick brown",)))
        monkeypatch.setattr(chatting.lm, "generate_until", None)
        assert cached.generate_until(requests("generate_until", ("def", {"max_gen_toks": 4}))) == text
        recorded.clear()
        again = cached.loglikelihood_rolling(requests("loglikelihood_rolling", ("the quick brown",)))
        assert again == total and not recorded
    finally:
        cached.dbdict.close()
        chatting.lm.set_cache_hook(type(chatting.lm.cache_hook)(None))


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
