"""Families that are not on the tested list: accepted if they obey, refused in one clear line if not."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPTJForCausalLM

from llama_ssp.errors import ModelError
from llama_ssp.models import causal_lm
from llama_ssp.models import self_check as probe
from llama_ssp.models.causal_lm import CausalModel, attention_of
from llama_ssp.models.families import TESTED_FAMILIES
from llama_ssp.models.self_check import require_faithful
from llama_ssp.speculative.state import Prompt
from tests.families import CONTEXT, FAMILIES, HYBRIDS, VOCAB, greedy_text, tiny
from tests.families import build as build_tested
from tests.rig import contrary, speculate

COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
WIDE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
OBEY: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "stablelm": {**WIDE, "intermediate_size": 48, "num_key_value_heads": 2},
    "olmo": {**WIDE, "intermediate_size": 48, "num_key_value_heads": 2},
    "glm": {**WIDE, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "starcoder2": {**WIDE, "intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 6},
    "phi": {**WIDE, "intermediate_size": 48},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({**WIDE, "alibi": True}, "cannot be run with explicit positions"),
    "bloom": ({"hidden_size": 32, "n_layer": 3, "n_head": 4}, "names no context"),
    "mpt": ({"d_model": 32, "n_layers": 3, "n_heads": 4}, "names no context"),
    "bart": ({"d_model": 32, "is_decoder": True}, "does not obey"),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2}, "names no context"),
}


def build(family: str, sizes: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(family, **{**COMMON, **sizes})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return module.eval()


@pytest.mark.few(4)
@pytest.mark.parametrize("family", OBEY)
def test_a_family_that_obeys_is_accepted(family: str) -> None:
    """And rightly: in a ragged batch with rejected drafts its text is transformers' own."""
    assert family not in TESTED_FAMILIES
    module = build(family, OBEY[family])
    causal = CausalModel(module, family)
    require_faithful(causal)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(str(n), tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist())) for n in (2, 9, 5)
    ]
    run = speculate(causal, prompts, contrary(CausalModel(module, family)), k=4, max_new=12)
    assert run.accepted == 0 < run.drafted
    plain = build(family, OBEY[family])
    assert run.texts == [greedy_text(plain, prompt.token_ids, 12) for prompt in prompts]


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_does_not_obey_is_refused(family: str) -> None:
    sizes, why = REFUSED[family]
    module = build(family, sizes)
    with pytest.raises(ModelError, match=why) as caught:
        require_faithful(CausalModel(module, "a name"))
    line = str(caught.value)
    assert family in line and "another architecture" in line and "\n" not in line


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt_neo", *HYBRIDS)])
def test_the_tested_families_pass_the_trial(family: str) -> None:
    require_faithful(CausalModel(build_tested(family, mild=True), family))


def test_attention_with_masks_of_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match=r"makes its own masks.*gpt_neo.*splitting=tensor"):
        CausalModel(build_tested("gpt_neo"), "neo")


class Wrapped(nn.Module):
    """A llama with a flaw in passes with a cache of more than `length` tokens."""

    def __init__(self, flaw: str, length: int = 0) -> None:
        super().__init__()
        self.inner = build_tested("llama-gqa", mild=True)
        self.config, self.flaw, self.length = self.inner.config, flaw, length

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return None if self.flaw == "headless" else self.inner.get_output_embeddings()

    def forward(self, **inputs: Any) -> Any:
        token_BW, cache = inputs["input_ids"], inputs.get("past_key_values")
        if cache is None or cache.get_mask_sizes(token_BW.shape[1])[0] <= self.length:
            return self.inner(**inputs)
        if self.flaw == "positions":
            inputs["position_ids"] = torch.arange(token_BW.shape[1]).expand_as(token_BW)
        elif self.flaw == "mask":
            causal_lm.RUNNING.set(None)  # as where an architecture makes its masks itself
        elif self.flaw == "batch":
            inputs["position_ids"] = inputs["position_ids"][:1].expand_as(token_BW)
        elif self.flaw == "keywords":
            raise TypeError("forward() got an unexpected keyword argument 'position_ids'")
        elif self.flaw == "memory":
            raise torch.OutOfMemoryError("full")
        output = self.inner(**inputs)
        if self.flaw == "nan":
            output.logits[-1, -1, 0] = torch.nan
        elif self.flaw == "other logits":
            output.logits = output.logits.roll(1, -1)
        return output


@pytest.mark.parametrize(
    ("flaw", "length", "why"),
    [
        ("positions", 0, "does not obey"), ("mask", 0, "does not obey"), ("batch", 0, "does not obey"),
        ("nan", 0, "does not obey"), ("keywords", 0, "TypeError.*position_ids"),
        ("headless", 0, "no output layer"), ("other logits", 20, "does not obey"),
        ("other logits", 50, "does not obey"), ("other logits", probe.LENGTH - 1, "does not obey"),
    ],
)  # fmt: skip
def test_a_flaw_is_found(flaw: str, length: int, why: str) -> None:
    """Also one beyond a length only."""
    with pytest.raises(ModelError, match=why):
        require_faithful(CausalModel(Wrapped(flaw, length), "flawed"))


def test_what_is_no_flaw() -> None:
    """Running out of memory, and what is otherwise beyond the tokens that are tried: a context's, at most."""
    require_faithful(CausalModel(Wrapped("none"), "sound"))
    require_faithful(CausalModel(Wrapped("other logits", probe.LENGTH), "sound"))
    for context in (1, 9, 40):
        causal = CausalModel(Wrapped("other logits", context), "short")
        causal.context = context
        require_faithful(causal)
    with pytest.raises(torch.OutOfMemoryError):
        require_faithful(CausalModel(Wrapped("memory"), "sound"))


def test_the_fused_attention_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {family: build_tested(family).config._attn_implementation for family in FAMILIES}
    assert {family for family, kind in used.items() if kind == "eager"} == {"gemma2", "gpt_neo", "gpt_oss"}
    monkeypatch.setattr(GPTJForCausalLM, "_supports_sdpa", False)  # from transformers 5.24 on it has one
    assert build("gptj", OBEY["gptj"]).config._attn_implementation == "eager"


def test_an_architecture_that_chooses_among_tokens_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its key beyond the reach of the trial, too; up to the context there is nothing to choose."""
    pytest.importorskip("transformers", minversion="5.18")
    require_faithful(CausalModel(tiny("doge", keep_window_size=CONTEXT), "whole"))
    for key in (24, CONTEXT - 1):
        with pytest.raises(ModelError, match="read together beyond keep_window_size; flawed \\(doge\\)"):
            require_faithful(CausalModel(tiny("doge", keep_window_size=key), "flawed"))
    monkeypatch.setattr(probe, "READ_TOGETHER_BEYOND", {})
    with pytest.raises(ModelError, match="does not obey explicit positions"):
        require_faithful(CausalModel(tiny("doge", keep_window_size=24), "flawed"))
