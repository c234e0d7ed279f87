"""Texts of two commits are compared: made-up outputs, without a run; and what its models are made for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.first_difference import Key, Text, first_difference
from bench.same_texts import CASES, MODELS, PROMPTS, TEXTS, TOKENIZER, Case, Side, compared, made_models
from llama_ssp.models.sharding import head_ranges, length, mlp_share, vocab_share
from llama_ssp.text.vocabulary import read_vocabulary

BASE, OTHER = [5, 6, 7], [5, 8, 7]
KEY = (1, "0")


def scores(tokens: Sequence[int], values: dict[int, float]) -> list[dict[str, Any]]:
    """Returns log-probabilities for each token; `values` are those of the likeliest at each position."""
    top = [{"token_id": token, "token": f"t{token}", "logprob": value} for token, value in values.items()]
    return [
        {"token_id": token, "token": f"t{token}", "logprob": values.get(token, -9.0), "top_logprobs": top}
        for token in tokens
    ]


def scored(tokens: Sequence[int], values: dict[int, float], is_greedy: bool = True) -> Text:
    return Text(tokens, is_greedy, scores(tokens, values))


class Rewritten:
    """Gives texts that are written again, and keeps what was asked for."""

    def __init__(self, again: tuple[Text, Text], later: tuple[Text, Text] | None = None) -> None:
        self.again, self.later, self.calls = again, later, list[tuple[Key, list[int], bool]]()

    def __call__(self, key: Key, steps: Sequence[int], with_scores: bool) -> list[tuple[Text, Text]]:
        self.calls.append((key, list(steps), with_scores))
        return [self.again if step == 0 else self.later or self.again for step in steps]


def difference(
    base: Text, today: Text, rewrite: Rewritten | None = None, ties: list[str] | None = None
) -> str:
    never = Rewritten((base, today))
    return first_difference("case", {KEY: base}, {KEY: today}, rewrite or never, [] if ties is None else ties)


def test_equal_texts_are_not_written_again():
    rewrite = Rewritten((Text(BASE), Text(BASE)))
    assert difference(Text(BASE), Text(list(BASE)), rewrite) == "" and not rewrite.calls


def test_a_greedy_difference_is_named_with_both_tokens():
    rewrite = Rewritten((scored(BASE, {6: -0.7, 8: -0.71}), scored(OTHER, {6: -0.72, 8: -0.69})))
    assert difference(Text(BASE, True), Text(OTHER, True), rewrite) == (
        "case, seed 1, text '0', position 1: 6 't6' by base, 8 't8' by today, "
        "log-probabilities -0.700000 and -0.710000 by base, "
        "log-probabilities -0.720000 and -0.690000 by today; no tie"
    )
    assert rewrite.calls == [(KEY, [0], True)]


@pytest.mark.parametrize(("gaps", "is_tie"), [((1e-5, -1e-5), True), ((1e-5, 2e-5), False)])
def test_a_greedy_tie_is_within_1e_5_on_both_sides(gaps: tuple[float, float], is_tie: bool):
    one, other = scored(BASE, {6: -0.7, 8: -0.7 + gaps[0]}), scored(OTHER, {6: -0.7, 8: -0.7 + gaps[1]})
    ties: list[str] = []
    said = difference(Text(BASE, True), Text(OTHER, True), Rewritten((one, other)), ties)
    assert bool(said) is not is_tie and len(ties) == is_tie


AGAIN = scored(BASE, {6: -2.0, 8: -1.0}, False), scored(OTHER, {6: -2.0, 8: -1.0}, False)


def test_a_sampled_tie_is_equal_with_each_of_the_next_three_seeds():
    ties: list[str] = []
    rewrite = Rewritten(AGAIN, later=(Text(OTHER), Text(OTHER)))
    assert difference(Text(BASE), Text(OTHER), rewrite, ties) == "" and len(ties) == 1
    assert rewrite.calls == [(KEY, [0], True), (KEY, [1, 2, 3], False)]


def test_a_run_may_have_one_tie():
    ties: list[str] = []
    rewrite = Rewritten(AGAIN, later=(Text(OTHER), Text(OTHER)))
    assert difference(Text(BASE), Text(OTHER), rewrite, ties) == ""
    assert difference(Text(BASE), Text(OTHER), rewrite, ties).endswith("a run may have one tie")


def test_what_differs_with_a_later_seed_is_no_tie():
    said = difference(Text(BASE), Text(OTHER), Rewritten(AGAIN, later=(Text(BASE), Text(OTHER))))
    assert said.endswith("no tie: not equal with each of the next three seeds")


def test_texts_that_end_earlier_or_that_one_side_lacks_differ():
    again = scored(BASE, {7: -0.7}), scored(BASE[:2], {6: -0.7})
    said = difference(Text(BASE, True), Text(BASE[:2], True), Rewritten(again))
    assert "position 2: 7 't7' by base, no token by today" in said and said.endswith("no tie")
    both, more = {KEY: Text(BASE)}, {KEY: Text(BASE), (2, "1"): Text(BASE)}
    for sides, name in (((more, both), "base"), ((both, more), "today")):
        said = first_difference("case", *sides, Rewritten((Text(BASE), Text(BASE))), [])
        assert said == f"case, seed 2, text '1': only {name} has it"


def test_log_probabilities_are_compared_to_1e_5():
    base = scored(BASE, {6: -0.7, 8: -0.9})
    assert difference(base, scored(BASE, {6: -0.70001, 8: -0.9})) == ""
    said = difference(base, scored(BASE, {6: -0.70002, 8: -0.9}))
    assert said.endswith("position 0, token 6: log-probability -0.700000 by base, -0.700020 by today")
    assert difference(base, scored(BASE, {6: -0.7, 9: -0.9})) == ""  # two may share the last place
    assert difference(base, scored(BASE, {6: -0.7, 9: -0.8})) != ""


class MadeUp(Side):
    """Writes texts of the seed's digits, without a process."""

    def texts(self, case: object, engine: str, seeds: Mapping[int, int], *more: str) -> dict[Key, Text]:
        tokens = {seed: [seed // 10, seed % 10] for seed in seeds.values()}
        values = {token: -1.0 for token in range(10)}
        return {(seed, "0"): scored(tokens[run], values, False) for seed, run in seeds.items()}


def sides() -> list[MadeUp]:
    where = {"tree": Path(), "programs": Path(), "models": Path()}
    return [MadeUp(name=name, without=(), sweeps=True, **where) for name in ("base", "today")]


def test_without_the_control_texts_are_equal():
    said, row = compared(sides(), CASES[0], "eager", [], is_control=False)
    assert said == "" and row[:4] == ["block", "eager", "20", "40"]


def test_the_control_is_different():
    """One seed is changed: the next seeds are changed, too, so that it is no tie."""
    said, _ = compared(sides(), CASES[0], "eager", [], is_control=True)
    assert said.startswith("block eager, seed 20, text '0', position 1: 0 't0' by base, 1 't1' by today")
    assert said.endswith("no tie: not equal with each of the next three seeds")


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    with made_models(CASES) as home:
        yield home


def config_in(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


NAMING = [case for case in CASES if MODELS in case.settings]


@pytest.mark.parametrize("case", NAMING, ids=lambda case: case.name)
def test_every_model_of_a_case_that_is_not_shipped_is_made(case: Case, made: Path):
    folders = [word.partition("=")[2] for word in case.words("eager") if MODELS in word]
    assert folders
    for folder in folders:
        files = {file.name for file in Path(folder.replace(MODELS, str(made))).iterdir()}
        assert {"config.json", "model.safetensors", *TOKENIZER} <= files, folder


def test_models_that_no_case_needs_are_not_made():
    with made_models(CASES[:1]) as home:
        assert [*home.iterdir()] == []


def test_the_gemma_divides_scores_by_another_number_than_its_heads_say(made: Path):
    config = config_in(made / "gemma")
    assert config["query_pre_attn_scalar"] != config["head_dim"]


def test_the_gpt_oss_reaches_its_clamps(made: Path):
    """Without them its logits are wholly others."""
    pytest.importorskip("transformers", minversion="5.19")  # older ones have the limit in their code
    ids = torch.tensor([range(5, 25)])
    limit = config_in(made / "gpt_oss")["swiglu_limit"]
    with torch.inference_mode():
        clamped, free = (
            AutoModelForCausalLM.from_pretrained(made / "gpt_oss", swiglu_limit=at)(ids).logits
            for at in (limit, 1e9)
        )
    assert float((clamped - free).abs().max()) > float(free.abs().max())


def test_two_ranks_cannot_halve_the_uneven_model(made: Path):
    sizes = config_in(made / "uneven")
    heads = [
        head_ranges(sizes["num_attention_heads"], sizes["num_key_value_heads"], 2, rank) for rank in (0, 1)
    ]
    assert [(held.queries, held.kvs) for held in heads] == [(4, 2), (2, 1)]
    columns = [length(mlp_share(sizes["intermediate_size"], 2, rank)) for rank in (0, 1)]
    rows = [length(vocab_share(sizes["vocab_size"], 2, rank)) for rank in (0, 1)]
    assert (columns, rows) == ([192, 128], [2049, 2048])


def test_one_prompt_alone_does_not_fit_into_the_short_draft(made: Path):
    vocabulary = read_vocabulary(made / "short_draft")
    assert vocabulary is not None
    lengths = sorted(len(vocabulary.encode(text)) for text in PROMPTS[: TEXTS["generate"]])
    assert lengths[-2] < config_in(made / "short_draft")["max_position_embeddings"] < lengths[-1]
