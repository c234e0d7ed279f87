"""The Python API: the command's own texts, its errors, and nothing that an import should not do."""

import gc
import json
import logging
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import llama_ssp
from llama_ssp import Pair, RunError, SamplingConfig, SpeculationConfig, load_pair, plan
from llama_ssp.config import Verification
from llama_ssp.config.compose import composed
from llama_ssp.errors import UsageError
from llama_ssp.pair.token_prompts import usable
from llama_ssp.text.prompts import TextPrompt
from tests import checkpoints
from tests.conftest import Command
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
    ({"prompts": "ab"}, "prompts is of the wrong type; found 'ab'"),
    ({"stop": "ab"}, "stop is of the wrong type; found 'ab'"),
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
    (lambda _: plan("7B", overrides="seed=1"), "overrides is of the wrong type"),
    (lambda _: plan("65B", cluster="p9"), "p9"),
    (lambda pair: pair.score([[3, -1, 4]]), "prompt 0; found id -1"),
    (lambda pair: pair.score("ab"), "texts is of the wrong type; found 'ab'"),
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


SCRIPT = f"""
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
    print(said(lambda: load_pair("tiny", overrides=where)))
for _ in range(2):
    with load_pair("tiny", draft="tiny_draft", batch_size=2) as pair:
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
    """Those of one process; the first pair, which an error ended, was closed before."""
    with load_pair("tiny", draft="tiny_draft", batch_size=2) as pair:
        alone = [one.token_ids for one in pair.generate(PROMPTS, max_new_tokens=8, seed=3)]
    for rank, (code, out, errors, _) in enumerate(over_ranks):
        assert (code, out.splitlines()[3:]) == (0, ["[]" if rank else str(alone)] * 2), errors


@pytest.mark.slow
def test_over_ranks_an_error_ends_its_pair_alone(over_ranks: list[Answer]) -> None:
    """Later calls say so."""
    for _, out, errors, _ in over_ranks:
        first, later = out.splitlines()[:2]
        assert first.startswith("JointError: rank") and "the prompt is empty" in first, errors
        assert later.startswith("UsageError: the pair has ended with an earlier error; found rank"), errors
        assert "the prompt is empty" in later, errors


@pytest.mark.slow
def test_over_ranks_a_second_pair_is_refused_until_the_first_is_closed(over_ranks: list[Answer]) -> None:
    for _, out, errors, _ in over_ranks:
        assert "torch.distributed is in use" in out.splitlines()[2], errors
