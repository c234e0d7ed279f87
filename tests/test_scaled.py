"""Models that scale their positions in longer texts: beyond the limit they go on as in transformers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.config import Dtype
from llama_ssp.distributed.comm import ALONE
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.interface import Model
from llama_ssp.models.self_check import require_faithful
from llama_ssp.models.sizes import Checkpoint, sizes_of
from llama_ssp.models.steps import SteppedModel, has_kernels
from llama_ssp.speculative.logprobs import LogprobReader
from llama_ssp.speculative.state import Prompt
from tests import checkpoints
from tests.conftest import Command
from tests.families import VOCAB, decoder_of, greedy_text, tiny
from tests.rig import GREEDY, contrary, drive_refilled, engine_of, perturbed, speculate

LIMIT = 32  # up to which positions have their first scale
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 9.0, 20.0, 40.0], "original_max_position_embeddings": LIMIT}  # fmt: skip
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"original_max_position_embeddings": LIMIT, "sliding_window": None}),  # reads texts anew
    "llama": ("llama", {"max_position_embeddings": 96}),  # keeps the keys it has
    "dynamic": ("llama", {"max_position_embeddings": 96}),
}


def scaled(name: str, **more: Any) -> Any:
    architecture, changes = SCALED[name]
    dynamic = {**LONGROPE, "rope_type": "dynamic", "factor": 3.0}
    return tiny(
        architecture, rope_parameters=dict(dynamic if name == "dynamic" else LONGROPE), **changes, **more
    )


@cache
def scaled_texts(name: str) -> dict[Prompt, list[int]]:
    """Prompts on both sides of the limit, and what transformers writes after each, alone in a new module."""
    if name.startswith("phi3"):
        pytest.importorskip("transformers", minversion="5.20")  # others keep keys of the first scale
    generator = torch.Generator().manual_seed(4)
    found = {}
    for number, length in enumerate((29, 50, 12, LIMIT, LIMIT + 1, 24)):
        ids = tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())
        found[Prompt(str(number), ids)] = greedy_text(scaled(name), ids, 24)
    return found


def model_of(name: str, noise: float = 0.0) -> Model:
    """The decoder of our own, or transformers' module."""
    module = perturbed(scaled(name), noise) if noise else scaled(name)
    if name == "dynamic":
        return CausalModel(module, name)
    return DecoderModel(decoder_of(module), module.config, name)


def draft_of(kind: str, name: str) -> Model | None:
    if kind == "none":
        return None
    if kind == "never":
        return contrary(model_of(name))
    return model_of(name, 0.02 if kind == "sometimes" else 0.0)


@pytest.mark.few(2)
@pytest.mark.parametrize("draft", ["sometimes", "always", "never", "none"])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_positions_go_on_as_in_transformers(name: str, draft: str) -> None:
    """Beyond the length at which the scale changes, each row by its own text, in one batch."""
    expected, other = scaled_texts(name), draft_of(draft, name)
    run = speculate(model_of(name), list(expected), other, k=4 if other else 0, chunk=7)
    assert run.texts == list(expected.values())
    assert (run.accepted > 0) is (draft in ("sometimes", "always"))
    assert run.accepted < run.drafted or draft in ("always", "none")


@pytest.mark.long
@pytest.mark.compiler
def test_scaled_positions_in_compiled_steps() -> None:
    assert has_kernels("phi3", Dtype.fp32, torch.device("cpu"), (4, 4, 16))
    module = scaled("phi3")
    target = SteppedModel(decoder_of(module), module.config, "phi3", ALONE)
    prompt, text = next(iter(scaled_texts("phi3").items()))
    run = speculate(target, [prompt], draft_of("sometimes", "phi3"), k=4)
    assert run.texts == [text] and target._step is not None


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_the_scale_matters(name: str) -> None:
    """With one scale for all lengths other texts are written: the test above would notice."""
    architecture, changes = SCALED[name]
    short = {**LONGROPE, "long_factor": LONGROPE["short_factor"]}
    module = tiny(architecture, rope_parameters=short, **changes)
    target = DecoderModel(decoder_of(module), module.config, name)
    run = speculate(target, list(scaled_texts(name)), None, k=0)
    pairs = zip(run.texts, scaled_texts(name).values(), strict=True)
    assert all(text != other for text, other in pairs)


def test_scores_have_the_scale_of_the_text_so_far() -> None:
    prompt, _ = list(scaled_texts("phi3").items())[1]
    text, module = prompt.token_ids, scaled("phi3")
    (scores,) = engine_of(model_of("phi3"), None, chunk=7).score([prompt], LogprobReader(1))
    for at in (9, LIMIT, LIMIT + 1, LIMIT + 8, len(text) - 1):
        with torch.inference_mode():
            logprob_V = module(input_ids=torch.tensor([text[:at]])).logits[0, -1].log_softmax(-1)
        assert scores[at].logprob == pytest.approx(float(logprob_V[text[at]]), abs=1e-4)


def test_scores_of_continuations_have_the_scale_of_the_text_so_far() -> None:
    """A continuation that goes beyond the limit is read with its context anew; the next one is not."""
    prompt, _ = list(scaled_texts("phi3").items())[1]
    text, module = prompt.token_ids, scaled("phi3")
    context, long, short = text[: LIMIT - 2], text[LIMIT - 2 : LIMIT + 6], text[LIMIT - 2 : LIMIT - 1]
    engine = engine_of(model_of("phi3"), None, chunk=7)
    (found,) = engine.score_continuations(
        [Prompt("0", context)], [[long, short, (*short, 5)]], LogprobReader(1)
    )
    for ids in (long, short, (*short, 5)):
        for count, one in enumerate(found[ids]):
            with torch.inference_mode():
                so_far = torch.tensor([[*context, *ids[:count]]])
                logprob_V = module(input_ids=so_far).logits[0, -1].log_softmax(-1)
            assert one.logprob == pytest.approx(float(logprob_V[ids[count]]), abs=1e-4)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_rows_are_refilled(name: str) -> None:
    """A prompt that is read in chunks, between the rounds of others, has its whole length's scale at once."""
    expected, engine = scaled_texts(name), engine_of(model_of(name), model_of(name, 0.02), sampling=GREEDY)
    found = drive_refilled(engine, list(expected), 2, k=4, longest=80)
    assert found == {prompt.id: text for prompt, text in expected.items()}


@pytest.mark.parametrize(("name", "beyond"), [("phi3", 0), ("llama", 29)])
def test_what_a_conversation_keeps_is_counted(name: str, beyond: int) -> None:
    """Nothing where it outgrows the first scale and is read anew."""
    engine = engine_of(model_of(name), sampling=GREEDY)
    state = engine.prefill([Prompt("0", tuple(range(3, 23)))], 60)
    assert engine.admit(state, {0: Prompt("1", tuple(range(3, 33)))}, reuse=True) == 19
    assert engine.admit(state, {0: Prompt("2", tuple(range(3, 43)))}, reuse=True) == beyond


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "llama", "dynamic"])
def test_a_prompt_beyond_the_limit_is_continued_up_to_the_context(
    name: str, command: Command, tmp_path: Path
) -> None:
    """The check of prompts, the plan and the run have one context: the config's."""
    module = scaled(name, vocab_size=300, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    module.save_pretrained(tmp_path)
    checkpoints.write_tokenizer(tmp_path, checkpoints.tokenizer())
    context, text = module.config.max_position_embeddings, "z" * (LIMIT + 20)
    ids = checkpoints.tokenizer().encode(text).ids
    asked = [f"model={tmp_path}", "draft=none", "seed=1", "sampling=greedy", "model.dtype=fp32"]
    new = context - len(ids)
    answer = command(*asked, f"prompt={text}", f"task.max_new_tokens={new + 5}", "output=json")
    assert (answer.code, answer.errors) == (0, [])
    (output,) = answer.document["outputs"]
    assert output["token_ids"] == greedy_text(module, ids, new, end=1)
    assert output["finish_reason"] in ("context", "eos")
    long = command(*asked, f"prompt={'z' * context}", "task.max_new_tokens=4")
    assert long.code == 3 and f"at most {context - 1} of {context}" in long.errors[0]


def test_one_scale_for_a_whole_pass_ends_the_context() -> None:
    """Where transformers runs the model, in the plan, in the run and in the trial of an architecture."""
    require_faithful(CausalModel(tiny("granite", rope_parameters=dict(LONGROPE)), "granite"))
    scale = {"long_mscale": 1.2, "short_mscale": 1.1, **LONGROPE}
    module = tiny("phimoe", rope_parameters=scale, original_max_position_embeddings=LIMIT)
    shape = sizes_of(Checkpoint(Path("x"), module.config.to_dict(), {}))
    assert CausalModel(module, "phimoe").context == shape["context"] == LIMIT
    assert CausalModel(scaled("phi3"), "phi3").context == LIMIT  # its layers spread over devices
