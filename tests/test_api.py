"""The Python API: the command's own texts, its errors, and nothing that an import should not do."""

import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from rich.progress import Progress as Bars
from torch import Tensor

import llama_ssp
from llama_ssp import (
    Completion,
    Pair,
    RunError,
    SamplingConfig,
    Settings,
    SpeculationConfig,
    load_pair,
    plan,
)
from llama_ssp.config import ChatConf, GenerateConf, Verification
from llama_ssp.config.compose import composed
from llama_ssp.config.settings import NAMES
from llama_ssp.errors import MemoryFull, UsageError
from llama_ssp.models.host_memory import process_bytes
from llama_ssp.pair import placements
from llama_ssp.pair.token_prompts import usable
from llama_ssp.report import console
from llama_ssp.text.prompts import TextPrompt
from tests import checkpoints
from tests.conftest import Command
from tests.test_chat import tokens as chat_tokens
from tests.warm import ROOT, Answer, Started, python

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.S)
PROMPTS = ["hello", "a longer prompt", "x"]
TINY = ("model=tiny", "draft=tiny_draft", "task.max_new_tokens=12", "seed=5", "output=json")


@pytest.fixture(scope="module")
def tiny() -> Iterator[Pair]:
    with load_pair("tiny", draft="tiny_draft") as pair:
        yield pair


def test_texts_are_those_of_the_command(command: Command) -> None:
    words = "task.batch_size=2", f"task.prompts={json.dumps(PROMPTS)}", "sampling.top_k=40", "speculation.k=3"
    expected = command(*TINY, *words).document["outputs"]
    sampling, speculation = SamplingConfig(top_k=40), SpeculationConfig(k=3)
    with load_pair("tiny", draft="tiny_draft", batch_size=2) as pair:
        how = {"max_new_tokens": 12, "sampling": sampling, "speculation": speculation, "seed": 5}
        found = pair.generate(PROMPTS, **how)
        again = pair.generate(PROMPTS, **how)
        rows: dict[int, list[int]] = {n: [] for n in range(len(PROMPTS))}
        steps = list(pair.stream(PROMPTS, **how))
        together = {tuple(row.index for row in step) for step in steps}
        assert {(0, 1)} < together & {(0, 1), (0, 2), (2, 1)}, (
            "a row that ends takes the third prompt at once"
        )
        for step in steps:
            for row in step:
                rows[row.index] += row.token_ids
    assert [(one.prompt, one.token_ids, one.text) for one in found] == [
        (one["prompt"], one["token_ids"], one["text"]) for one in expected
    ]
    assert found == again and [rows[n] for n in rows] == [one.token_ids for one in found]
    assert all(one.finish_reason == "length" and one.drafted >= one.accepted > 0 for one in found)


def test_the_target_s_own_weights_are_a_draft() -> None:
    """In 4 bit most drafts are accepted, of a smaller model fewer."""
    shares = []
    for draft in ("int4", "demo_draft"):
        with load_pair("demo", draft=draft) as pair:
            how = SamplingConfig(top_k=40)
            found = pair.generate(["hello", "a", "b"], max_new_tokens=40, seed=1, sampling=how)
        shares.append(sum(one.accepted for one in found) / sum(one.drafted for one in found))
    assert shares[0] > 0.65 > shares[1]


def test_a_pair_without_a_draft_drafts_nothing() -> None:
    with load_pair("tiny") as pair:
        (regular,) = pair.generate(["hello"], max_new_tokens=4, seed=1)
        assert (regular.drafted, len(regular.token_ids)) == (0, 4)


def test_without_prompts_there_are_no_texts() -> None:
    with load_pair("tiny") as pair:
        assert pair.generate([], seed=1) == []


def test_a_pair_for_no_drafts_is_loaded_without_its_draft() -> None:
    with load_pair("tiny", draft="tiny_draft", overrides=["speculation.k=0"]) as pair:
        assert pair.generate(["hello"], max_new_tokens=2, seed=1)[0].drafted == 0
        with pytest.raises(UsageError, match="was loaded without its draft model"):
            pair.generate(["hello"], max_new_tokens=2, seed=1, speculation=SpeculationConfig(k=4))


def test_a_closed_pair_is_freed() -> None:
    """NCCL would wait for graphs with its sums before it closes a group."""
    pair = load_pair("tiny", draft="tiny_draft")
    held = [weakref.ref(model) for model in (pair.session.models.target, pair.session.models.draft)]
    pair.generate(["hello"], max_new_tokens=2)
    pair.close()
    gc.collect()
    assert [model() for model in held] == [None, None]
    with pytest.raises(RuntimeError, match="the pair is not loaded, or it was closed"):
        pair.generate(["hello"])


def drafting(**settings: Any) -> dict[str, Any]:
    return {"prompts": ["x"], "speculation": SpeculationConfig(**settings)}


REFUSED = [
    ({"sampling": SamplingConfig(top_p=2.0)}, "sampling.top_p"),
    ({"max_new_tokens": 0}, "task.max_new_tokens"),
    ({"prompts": ["x" * 99999], "max_new_tokens": 2}, "fills the model"),
    ({"prompts": [[3, -1]]}, "prompt 0; found id -1"),
    ({"prompts": b"ab"}, "prompts is of the wrong type; found b'ab'"),
    ({"prompts": {"a", "b"}}, "prompts is of the wrong type; found a set, whose entries have no order"),
    ({"prompts": {"a": 1}}, "prompts is of the wrong type; found a dict"),
    ({"prompts": "x", "messages": [{"role": "user", "content": "x"}]}, "both prompts and messages"),
    ({"prompts": (), "messages": []}, "messages are empty"),
    ({"prompts": [[{"role": "boss", "content": "x"}]]}, "a message cannot be used; prompt 0, message 0"),
    ({"prompts": [[{"content": "x"}]]}, "a message cannot be used"),
    ({"seed": [1, 2]}, "a seed for each prompt, or one for all; found 2 seeds, 1 prompts"),
    ({"seed": [-1]}, "seed is out of range; found -1"),
    ({"temperature": 2, "sampling": {"temperature": 1}}, "sampling.temperature is given twice"),
    ({"sampling": 3}, "sampling is of the wrong type; found int"),
    ({"stop": 3}, "task.stop is of the wrong type; found 3"),
    ({"prompts": [None]}, "neither a text nor token ids; prompt 0; found None"),
    ({"prompts": [[1.5]]}, "neither a text nor token ids; prompt 0"),
    ({"prompts": [b"ab"]}, "neither a text nor token ids; prompt 0"),
    ({"prompts": [[5, 6]], "chat": True}, "not put into a chat template; prompt 0"),
    ({"prompts": ["x", "a\ud83d"]}, "surrogate pair; prompt 1; found at character 1"),
    ({"chat": True, "system": "\ud83d"}, "surrogate pair; task.system"),
    ({"seed": -1}, "seed is out of range; found -1"),
    ({"seed": 1.5}, "seed is of the wrong type; found 1.5"),
    (drafting(bridge="on"), "speculation.bridge .* found 'on', allowed auto, intersection, off"),
    (drafting(bridge="off"), "a bridge is built when a pair is loaded"),
    (drafting(overlap="ahead"), "ranks of its own"),
    (lambda _: load_pair("7b"), "there is no model=7b.*did you mean model=7B?"),
    (lambda _: load_pair("no/such/folder"), "model: there is no such folder or file"),
    (lambda _: load_pair("tiny", overrides=["hydra.run.dir=x"]), "hydra"),
    (lambda _: load_pair("tiny", overrides=["ranks=2"]), "a script does not start ranks"),
    (lambda _: load_pair("tiny", overrides="seed=1"), "overrides is of the wrong type"),
    (lambda _: load_pair("tiny", overrides=["measure"]), "task is among the overrides of a pair"),
    (lambda _: load_pair("tiny", overrides=["chat=true"]), "task.chat is among .* as an argument"),
    (lambda _: load_pair("tiny", overrides=["trace=true"]), "task.trace is among .* nothing reads it; leave"),
    (lambda _: load_pair("tiny", overrides={"output": "json"}), "output is among .* nothing reads it; leave"),
    (lambda _: load_pair("tiny", overrides=["cluster.slurm.time=1:00:00"]), "cluster.slurm.time is among"),
    (lambda _: load_pair(None), "model is no model; found NoneType"),
    (lambda _: load_pair("tiny", draft=3), "draft is no model; found int"),
    (lambda _: plan("7B", overrides="seed=1"), "overrides is of the wrong type"),
    (lambda _: plan("65B", cluster="p9"), "p9"),
    (lambda pair: pair.score([[3, -1, 4]]), "prompt 0; found id -1"),
    (lambda pair: pair.score({"ab"}), "texts is of the wrong type; found a set"),
    (lambda pair: pair.score(["a\ud83d"]), "surrogate pair; prompt 0; found at character 1"),
    (lambda pair: pair.score([[5] * 9999]), "found 9999 tokens, allowed at most 1025;"),
    (lambda pair: pair.score_continuations([[5]], [[[6], []]]), "found 1 contexts, .* nothing empty"),
    (lambda pair: pair.score_continuations([[5]], []), "found 1 contexts, 0 lists"),
    (lambda pair: pair.score_continuations([[5]], [[[-1]]]), "prompt 0; found id -1"),
]


@pytest.mark.parametrize(("call", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_is_refused_is_one_line(call: Any, says: str, tiny: Pair) -> None:
    """A call, or what `generate` is asked for."""
    with pytest.raises(RunError, match=says) as raised:
        call(tiny) if callable(call) else tiny.generate(**{"prompts": ["x"], **call})
    assert "\n" not in str(raised.value)


BY_NAME = SpeculationConfig(drafter=cast(Any, "model"), verification=cast(Any, "token"))


def test_what_a_list_of_prompts_may_be() -> None:
    """Any iterable of prompts; ids of NumPy and torch. Choices are given by name, a seed by the overrides."""
    named = SpeculationConfig(verification=Verification.token)
    with load_pair("tiny", draft="tiny_draft", overrides=["seed=5"]) as pair:
        texts = [
            [one.token_ids for one in pair.generate(prompts, max_new_tokens=6, speculation=how, seed=seed)]
            for prompts, how, seed in (
                (["a", [7, 8]], named, 5),
                ((one for one in ["a", torch.tensor([7, 8])]), BY_NAME, None),
                (np.array(["a", [7, 8]], dtype=object), BY_NAME, None),
            )
        ]
    assert texts[0] == texts[1] == texts[2]


def test_a_choice_that_was_given_by_name_stays_a_name() -> None:
    assert BY_NAME.verification == "token" and type(BY_NAME.verification) is str


def test_seed_0_of_a_call_replaces_the_pair_s_own(tiny: Pair) -> None:
    """0 is a seed like any other."""
    expected = tiny.generate(["hello"], max_new_tokens=8, seed=0)
    with load_pair("tiny", draft="tiny_draft", overrides=["seed=5"]) as pair:
        assert pair.generate(["hello"], max_new_tokens=8) != expected
        assert pair.generate(["hello"], max_new_tokens=8, seed=0) == expected


def test_only_the_tokenizer_s_tokens_are_scored() -> None:
    """A model's vocabulary may be larger: it can read such a token, which has no log-probability."""
    run, tokens = composed(["model=tiny", "draft=none"]), cast(Any, SimpleNamespace(size=200, bos_id=None))
    text, ids = TextPrompt("0", "", "prompt 0"), [3, 201]
    assert usable(text, ids, tokens, run).token_ids == (3, 201)
    with pytest.raises(RunError, match="id 201, allowed ids from 0, below 200"):
        usable(text, ids, tokens, run, beyond=2)


def test_scored_texts_have_the_special_tokens_of_prompts(tmp_path: Path) -> None:
    folder, text = checkpoints.save(tmp_path, vocab_size=320), "a</s>b"
    for special in (False, True):
        with load_pair(folder, max_tokens=64, overrides=[f"task.special_tokens={special}"]) as pair:
            (scored,), (done,) = pair.score([text]), pair.generate([text], max_new_tokens=1)
        assert (1 in scored.token_ids) is special and len(scored.token_ids) == done.prompt_tokens


def test_a_least_length_may_be_all_of_a_short_pair_s_tokens() -> None:
    """It was compared with a guess of the tokens of a call. A text that is scored generates nothing."""
    least = ["sampling.min_new_tokens=40"]
    with load_pair("tiny", max_tokens=64, overrides=least) as pair:
        (done,) = pair.generate(["abc"], max_new_tokens=48, seed=1)
        assert len(done.token_ids) >= 40 and pair.score(["abc"])
    with pytest.raises(UsageError, match="min_new_tokens exceeds"):
        load_pair("tiny", max_tokens=32, overrides=least)


def test_nothing_of_the_process_is_changed() -> None:
    """No handler of a signal, no logging; and importing loads no torch."""

    def state() -> Any:
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
        return handlers, list(logging.getLogger().handlers)

    before = state()
    with load_pair("tiny") as pair:
        pair.generate(["hello"], max_new_tokens=4, seed=1)
    assert state() == before
    code = "import sys, llama_ssp; llama_ssp.plan('7B', cluster='p4d'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_application_with_its_own_hydra() -> None:
    """Its Hydra stays what it was; a pair is loaded, and planned, beside it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        instance = GlobalHydra.instance()
        before = instance.hydra
        with load_pair("tiny"), pytest.raises(UsageError, match="did you mean"):
            load_pair("tinny")
        assert plan("7B", cluster="p4d").chosen
        assert GlobalHydra.instance() is instance and instance.hydra is before


def test_threads_compose_one_after_the_other() -> None:
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda seed: composed(["model=tiny", "draft=none", f"seed={seed}"]), range(8)))
    assert [run.seed for run in runs] == [*range(8)]


def test_names_are_there() -> None:
    assert all(getattr(llama_ssp, name) for name in llama_ssp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = llama_ssp.nothing


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_guide(example: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(example, encoding="utf-8")
    run = python([tmp_path / "script.py"], tmp_path)
    assert run.code == 0 and run.out, run.err


def test_settings_are_the_keys_of_the_command() -> None:
    """Of every key that says how texts are written; those that are left out are of the command alone."""
    of_commands = {
        "prompts",
        "prompt_file",
        "on_bad_row",
        "prefill_chunk",
        "batch_size",
        "trace",
        "show_thinking",
    }
    kinds = (GenerateConf, SamplingConfig, SpeculationConfig)
    keys = {entry.name for kind in kinds for entry in fields(kind)} - of_commands - {"name", "echo"}
    assert {*NAMES} == keys | {"seed", "sampling", "speculation"}


PLAIN = [
    ({"temperature": 0}, ["sampling.temperature=0"]),
    (
        {"temperature": np.float32(0.5), "top_k": np.int64(9)},
        ["sampling.temperature=0.5", "sampling.top_k=9"],
    ),
    ({"sampling": {"top_p": 0.5, "top_k": None}}, ["sampling.top_p=0.5"]),
    ({"sampling": SamplingConfig(min_p=0.1), "seed": torch.tensor(5)}, ["sampling.min_p=0.1"]),
    ({"k": np.int32(2), "verification": "token"}, ["speculation.k=2", "speculation.verification=token"]),
    ({"speculation": {"k": 3}, "stop": "e"}, ["speculation.k=3", 'task.stop=["e"]']),
    ({"stop": ("a", "e"), "ignore_eos": True}, ['task.stop=["a","e"]', "task.ignore_eos=true"]),
    (
        {"logit_bias": {np.int64(70): 4}, "bad_tokens": {3, 4}},
        ["sampling.logit_bias={70:4}", "sampling.bad_tokens=[3,4]"],
    ),
    ({"drafter": "none", "min_new_tokens": None}, ["speculation.drafter=none"]),
]


@pytest.mark.parametrize(("names", "words"), PLAIN, ids=[" ".join(words) for _, words in PLAIN])
def test_plain_values_are_what_the_command_line_says(
    names: dict[str, Any], words: list[str], tiny: Pair, command: Command
) -> None:
    """Alone, in an object, and changed in one: the texts are the command's."""
    if not {"k", "speculation"} & names.keys():
        names, words = {**names, "k": 3}, [*words, "speculation.k=3"]
    expected = command(*TINY, f"task.prompts={json.dumps(PROMPTS)}", "task.batch_size=1", *words).document
    how = {"max_new_tokens": 12, "seed": 5, **names}
    for found in (
        tiny.generate(PROMPTS, **how),
        tiny.generate(PROMPTS, Settings(**how)),
        tiny.generate(PROMPTS, Settings(temperature=9, seed=1).but(**how)) if "temperature" in names else [],
    ):
        assert not found or [one.token_ids for one in found] == [
            one["token_ids"] for one in expected["outputs"]
        ]


def test_an_unknown_name_is_a_type_error_with_the_nearest(tiny: Pair) -> None:
    for call, says in (
        (
            lambda: tiny.generate("x", max_new_token=3),
            "no setting max_new_token; did you mean max_new_tokens?",
        ),
        (lambda: tiny.stream("x", detail=True), "no setting detail; did you mean details?"),
        (lambda: tiny.generate("x", trace=True), "no setting trace: task.trace is of the command line alone"),
        (lambda: tiny.generate("x", sampling={"top_kk": 3}), "sampling has no top_kk; did you mean top_k?"),
        (lambda: Settings(temprature=1), "no setting temprature; did you mean temperature?"),
    ):
        with pytest.raises(TypeError, match=re.escape(says)):
            call()


def test_prompts_of_any_kind_and_a_seed_for_each(tiny: Pair) -> None:
    """A text, a generator, generators of ids; a seed is the completion's, and gives the text again."""
    how: dict[str, Any] = {"max_new_tokens": 6}
    (alone,) = tiny.generate("hello", seed=7, **how)
    both = tiny.generate((text for text in ("hello", "x")), seed=np.array([7, 8]), **how)
    assert both[0] == alone and [one.seed for one in both] == [7, 8]
    assert tiny.generate(["hello", "x"], seed=7, **how)[1].token_ids != both[1].token_ids
    drawn = tiny.generate(["hello", "x"], **how)
    assert (
        drawn[0].seed == drawn[1].seed and tiny.generate(["hello", "x"], seed=drawn[0].seed, **how) == drawn
    )
    ids = tiny.tokenizer.encode("hello")
    assert tiny.generate([iter(ids)], seed=7, **how)[0].token_ids == alone.token_ids


def test_figures_of_a_completion_are_those_of_its_rounds(tiny: Pair) -> None:
    how: dict[str, Any] = {"max_new_tokens": 24, "seed": 5, "k": 3}
    (done,) = tiny.generate("hello", **how)
    rows = [row for step in tiny.stream("hello", **how) for row in step]
    assert done.rounds == len(rows) and done.seconds > 0
    assert sum(done.drafted_by_position) == done.drafted == sum(row.drafted for row in rows)
    assert sum(done.accepted_by_position) == done.accepted == sum(row.accepted for row in rows)
    assert (
        done.acceptance_by_position[0] == sum(row.accepted > 0 for row in rows) / done.drafted_by_position[0]
    )
    assert done.tokens_per_round == len(done.token_ids) / len(rows) > 1


def test_details_are_what_each_round_did() -> None:
    """The logits are those of one pass over the whole text; a row that ended has no details."""
    how: dict[str, Any] = {"max_new_tokens": 12, "seed": 5, "k": 3, "logprobs": 0, "top_k": 40}
    with load_pair("demo", draft="demo_draft", overrides=["model.dtype=fp32", "draft.dtype=fp32"]) as pair:
        require_details(pair, how)


def require_details(pair: Pair, how: dict[str, Any]) -> None:
    text, token_ids = pair.tokenizer.encode("hello"), list[int]()
    (scored,) = pair.score([[*text, *pair.generate("hello", **how)[0].token_ids]], top=5)
    for step in pair.stream("hello", details="logits", **how):
        (row,) = step
        seen = row.details
        assert seen is not None and seen.logit_WV is not None
        assert [*seen.drafts[: seen.accepted], seen.token][: len(row.token_ids)] == row.token_ids
        assert len(seen.draft_probs) == len(seen.target_probs) == len(seen.overlap) == len(seen.drafts)
        assert all(
            0 < q <= 1 and 0 <= p <= 1 for q, p in zip(seen.draft_probs, seen.target_probs, strict=True)
        )
        assert len(seen.logit_WV) == len(seen.drafts) + 1
        place = len(text) + len(token_ids)
        likeliest = torch.log_softmax(seen.logit_WV[0].double(), -1).topk(5)
        expected = scored.logprobs[place].top
        assert likeliest.indices.tolist() == [one.token_id for one in expected]
        assert likeliest.values.tolist() == pytest.approx([one.logprob for one in expected], abs=1e-4)
        token_ids += row.token_ids
    assert all(row.details is None for step in pair.stream("hello", **how) for row in step)


def test_a_stream_may_be_left_and_the_pair_goes_on(tiny: Pair) -> None:
    """By a break, by an error in its reader, by an interrupt; its cache is freed."""
    how: dict[str, Any] = {"max_new_tokens": 12, "seed": 5}
    expected = tiny.generate(PROMPTS, **how)
    for number, problem in enumerate((None, ValueError, KeyboardInterrupt)):
        stream = tiny.stream(PROMPTS, **how)
        try:
            for _ in stream:
                if problem is not None:
                    raise problem
                break
        except (ValueError, KeyboardInterrupt):
            pass
        assert tiny.generate(PROMPTS, **how) == expected, number
        stream.close()
        held = tiny.session.models.target
        assert held is not None
        gc.collect()
        assert held.caches.now == 0, number


def test_what_was_finished_is_kept(tiny: Pair) -> None:
    """By `on_done`, and on the error; also on an interrupt in the midst of a round."""
    how: dict[str, Any] = {"max_new_tokens": 6, "seed": 5}
    expected = tiny.generate(PROMPTS, **how)
    seen = list[Completion]()
    assert tiny.generate(PROMPTS, on_done=seen.append, **how) == expected == seen

    def stop_at_second(_: Completion) -> None:
        seen.append(_)
        if len(seen) == 2:
            raise KeyboardInterrupt

    seen.clear()
    with pytest.raises(KeyboardInterrupt) as raised:
        tiny.generate(PROMPTS, on_done=stop_at_second, **how)
    assert raised.value.completions == expected[:2]  # type: ignore[attr-defined]

    target = tiny.session.models.target
    assert target is not None
    passes = 0
    plain = target.logits

    def interrupted(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 14:
            raise KeyboardInterrupt
        return plain(*given)

    with patch.object(target, "logits", interrupted), pytest.raises(KeyboardInterrupt) as raised:
        tiny.generate(PROMPTS, k=0, **how)
    finished = raised.value.completions  # type: ignore[attr-defined]
    assert 0 < len(finished) < 3 and target.caches.now == 0, "the traceback is still there"
    assert tiny.generate(PROMPTS, **how) == expected


def test_another_thread_is_told_that_a_pair_is_in_use(tiny: Pair) -> None:
    """While it computes; between the rounds of a stream the pair is free."""
    inside, go_on = threading.Event(), threading.Event()
    target = tiny.session.models.target
    assert target is not None
    plain = target.logits

    def waits(*given: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return plain(*given)

    with ThreadPoolExecutor(1) as pool, patch.object(target, "logits", waits):
        other = pool.submit(tiny.generate, "x", max_new_tokens=2, seed=1)
        assert inside.wait(60)
        with pytest.raises(UsageError, match="another thread uses the pair"):
            tiny.generate("x", max_new_tokens=2, seed=1)
        go_on.set()
        assert other.result()
    stream = tiny.stream("hello", max_new_tokens=6, seed=1)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(tiny.generate, "x", max_new_tokens=2, seed=1).result()
    assert len([*stream]) > 0


def test_two_pairs_in_one_process() -> None:
    """Their rounds take turns, and each text is that of its pair alone."""
    how: dict[str, Any] = {"max_new_tokens": 10, "seed": 3}
    with load_pair("tiny", draft="tiny_draft") as one, load_pair("demo") as other:
        expected = [pair.generate("hello", **how)[0].token_ids for pair in (one, other)]
        streams = [pair.stream("hello", **how) for pair in (one, other)]
        found: list[list[int]] = [[], []]
        for steps in zip_longest(*streams, fillvalue=[]):
            for text, step in zip(found, steps, strict=True):
                text += [token for row in step for token in row.token_ids]
    assert found == expected


def test_a_pair_says_what_is_loaded_where() -> None:
    pair = load_pair("tiny", draft="tiny_draft", batch_size=2, max_tokens=64)
    said = repr(pair)
    assert re.fullmatch(
        r"<Pair tiny/tiny_draft: model cpu, .*, eager; draft cpu, .*, eager; 2 texts of 64 tokens at a time>",
        said,
    ), said
    pair.close()
    assert repr(pair) == "<Pair tiny/tiny_draft: closed>"


def test_a_block_that_an_error_leaves_closes_its_pair() -> None:
    with pytest.raises(KeyError), load_pair("tiny") as pair:
        held = weakref.ref(pair.session.models.target)
        raise KeyError
    gc.collect()
    assert held() is None


def test_what_a_script_has_set_changes_no_text_and_stays(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast around a call, and switches of torch, also while a stream is under way."""
    how: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with load_pair("demo", overrides={"model.dtype": "fp32"}) as pair:
        expected = [
            token for step in pair.stream("hello", details="logits", **how) for token in logits_of(step)
        ]
        for number in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(number)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = list[Tensor]()
                for step in pair.stream("hello", details="logits", **how):
                    found += logits_of(step)
                    assert (
                        torch.is_autocast_enabled("cpu") and torch.backends.cuda.cudnn_sdp_enabled() is number
                    )
                    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def logits_of(step: Any) -> list[Tensor]:
    return [row.details.logit_WV for row in step]


def test_a_pair_counts_as_a_chat_for_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as one call of a few tokens; a number that is given counts."""
    asked = list[int]()
    real = placements.why_eager

    def noted(engine: Any, tokens: int, *others: Any) -> Any:
        asked.append(tokens)
        return real(engine, tokens, *others)

    monkeypatch.setattr(placements, "why_eager", noted)
    load_pair("tiny").close()
    load_pair("tiny", overrides={"plan.tokens": 77}).close()
    assert asked == [ChatConf.usual_tokens, 77]


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": [{"type": "text", "text": "and?"}]},
]


def test_messages_are_a_prompt(tmp_path: Path) -> None:
    """By the keyword, or among the prompts; the answer is the next message."""
    folder = checkpoints.save(tmp_path, vocab_size=320)
    chat_tokens(folder)
    with load_pair(folder, max_tokens=120, overrides=["sampling=plain"]) as pair:
        how: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}
        (one,) = pair.generate(messages=CONVERSATION, **how)
        assert pair.generate([CONVERSATION, "x"], **how)[0] == one
        plain = [*CONVERSATION[:3], {"role": "user", "content": "and?"}]
        assert one.prompt_tokens == len(pair.tokenizer.chat(plain)) and one.prompt == "and?"
        assert one.message == {"role": "assistant", "content": one.text.strip()}
        assert (
            pair.generate(messages=[*CONVERSATION, one.message, plain[1]], **how)[0].prompt_tokens
            > one.prompt_tokens
        )
        (turn,) = pair.generate(messages=[plain[1]], system="be brief", **how)
        assert turn.prompt_tokens == len(pair.tokenizer.chat(plain[:2]))
        with pytest.raises(RunError, match="a part of a chat"):
            pair.generate("x", system="be brief", **how)


def test_progress_is_shown_where_it_is_asked_for(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, and in a notebook, whatever the log has."""
    shown = list[tuple[str, int]]()
    monkeypatch.setattr(Bars, "update", lambda _, task, completed, **__: shown.append((str(task), completed)))
    monkeypatch.setenv("TERM", "xterm")
    for is_terminal, is_notebook, asked, count in (
        (True, False, True, 3),
        (False, True, True, 3),
        (True, False, False, 0),
        (False, False, True, 0),
    ):
        shown.clear()
        monkeypatch.setattr(console, "_is_terminal", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(console.rich_console(is_error=True), "is_jupyter", is_notebook)
        tiny.generate(PROMPTS, max_new_tokens=2, seed=1, progress=asked)
        assert [done for _, done in shown][-1:] == ([count] if count else []), (is_terminal, is_notebook)


def test_loading_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[str]()
    begun = Bars.add_task
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "_is_terminal", lambda: True)
    monkeypatch.setattr(
        Bars, "add_task", lambda bars, what, **how: (shown.append(what), begun(bars, what, **how))[1]
    )
    load_pair("demo", draft="demo_draft").close()
    assert not shown

    load_pair("demo", draft="demo_draft", progress=True).close()
    assert [any(role in name for name in shown) for role in ("model", "draft")] == [True, True], shown


def test_an_error_of_full_memory_names_the_pairs_that_are_open() -> None:
    full = {"max_tokens": 64, "overrides": ["cluster.gib=0.001"]}
    held = load_pair("tiny", draft="tiny_draft", batch_size=7)
    words = repr(held)  # no other pair has 7 rows
    with pytest.raises(MemoryFull, match="do not fit") as error:
        load_pair("tiny", draft="tiny_draft", **full)
    assert "close what this script still holds" in str(error.value) and words in str(error.value)

    held.close()
    with pytest.raises(MemoryFull, match="do not fit") as error:
        load_pair("tiny", draft="tiny_draft", **full)
    assert words not in str(error.value)


def test_overrides_may_be_a_mapping() -> None:
    found = plan("7B", cluster="p4d", overrides={"plan.acceptance": 0.5, "batch_size": np.int64(4)})
    same = plan("7B", cluster="p4d", overrides=["plan.acceptance=0.5", "batch_size=4"])
    assert found.document() == same.document() != plan("7B", cluster="p4d").document()


@pytest.mark.long
def test_a_hundred_pairs_leave_nothing() -> None:
    """Each is closed; what a process holds stays what it was after the first ten."""

    def held() -> int:
        gc.collect()
        return process_bytes()

    for number in range(100):
        with load_pair("tiny", draft="tiny_draft") as pair:
            pair.generate("hello", max_new_tokens=2, seed=1)
        if number == 10:
            before = held()
    assert held() < before + 16 * 2**20


SCRIPT = f"""
import os
from llama_ssp import RunError, SamplingConfig, load_pair

def said(call):
    try:
        return call()
    except RunError as error:
        return f"{{type(error).__name__}}: {{error}}"

where = ["placement.timeout_s=30"]
with load_pair("tiny", overrides=where) as pair:
    for prompt, top_p in (("", 0.9), ("hello", 7.0)):
        print(said(lambda: pair.generate([prompt], sampling=SamplingConfig(top_p=top_p))))
    print(len(pair.generate("hello", max_new_tokens=2)))
    print(said(lambda: load_pair("tiny", overrides=where)))
with load_pair("tiny", overrides=where) as pair:
    prompt = "" if os.environ["RANK"] == "1" else "hello"
    for _ in range(2):
        print(said(lambda: pair.generate(prompt)))
with load_pair("tiny", draft="tiny_draft", batch_size=2) as pair:
    for _ in range(2):
        print([one.token_ids for one in pair.generate({PROMPTS!r}, max_new_tokens=8, seed=3)])
    for is_last in (lambda rows: rows, lambda rows: any(row.finish_reason for row in rows)):
        for rows in pair.stream({PROMPTS!r}, max_new_tokens=8, seed=3):
            if is_last(rows):  # on the leader: the others get empty lists
                break
        print([one.token_ids for one in pair.generate({PROMPTS!r}, max_new_tokens=8, seed=3)])
"""


@pytest.fixture(scope="module")
def over_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What two ranks say that run the script."""
    folder = tmp_path_factory.mktemp("over_ranks")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    return Started(folder, 2, program="script.py").finish()


@pytest.mark.slow
def test_over_ranks_the_leader_has_the_texts(over_ranks: list[Answer]) -> None:
    """Those of one process, also after a stream that the leader has left: all ranks leave it."""
    with load_pair("tiny", draft="tiny_draft", batch_size=2) as pair:
        alone = [one.token_ids for one in pair.generate(PROMPTS, max_new_tokens=8, seed=3)]
    for rank, (code, out, errors, _) in enumerate(over_ranks):
        assert (code, out.splitlines()[6:]) == (0, ["[]" if rank else str(alone)] * 4), errors


@pytest.mark.slow
def test_over_ranks_a_bad_argument_is_an_error_of_its_call(over_ranks: list[Answer]) -> None:
    """Each rank raises it, and the pair goes on."""
    for rank, (_, out, errors, _) in enumerate(over_ranks):
        prompt, setting, texts = out.splitlines()[:3]
        assert prompt.startswith("DataError: the prompt is empty"), errors
        assert setting.startswith("UsageError: sampling.top_p is out of range"), errors
        assert texts == ("0" if rank else "1"), errors


@pytest.mark.slow
def test_over_ranks_what_one_rank_is_given_alone_ends_the_pair(over_ranks: list[Answer]) -> None:
    """Later calls say so."""
    for _, out, errors, _ in over_ranks:
        first, later = out.splitlines()[4:6]
        assert first.startswith("JointError: rank"), errors
        assert later.startswith("UsageError: the pair has ended with an earlier error; found rank"), errors


@pytest.mark.slow
def test_over_ranks_a_second_pair_is_refused_until_the_first_is_closed(over_ranks: list[Answer]) -> None:
    for _, out, errors, _ in over_ranks:
        assert "torch.distributed is in use" in out.splitlines()[3], errors
