"""Samplers that are wrong, for task=certify to say so. `python -m tests.certify_faults` prints the table
(`python -m tests.certify_faults stale` the rows so named).

Each fault is planted in the code that ships, or, the last one, is another library's sampler behind the
same interface; the pair is the one that ships, the size that of the default run.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from llama_ssp import cli, verify
from llama_ssp.cache import RaggedCache
from llama_ssp.checkpoint import SHIPPED_FOLDER
from llama_ssp.draws import prompt_key
from llama_ssp.engine import Prompt, drafters
from llama_ssp.sampling import Laws
from llama_ssp.tasks import certify
from tests import mutants


@dataclass(frozen=True)
class Fault:
    """Where a fault is planted, what else the run needs to show it, and the check that must fail."""

    name: str
    place: Any
    attribute: str
    fault: Any
    check: str
    overrides: tuple[str, ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(self.place, self.attribute, self.fault):
            yield


def _unfiltered_target(self: Laws, logits: Any, prefix: Any) -> Any:
    """Filters the draft, not the blocks that the target verifies; a greedy law has nothing to filter."""
    if self.controls.temperature == 0:
        return mutants.laws_law(self, logits, prefix)
    return mutants._unfiltered_target(self, logits, prefix)


NUCLEUS = ("sampling=nucleus",)  # temperature 0.8, top-p 0.95
FAULTS = [
    Fault("ratio swapped", verify, "_ratios", mutants._swapped, "law"),
    Fault("correction from the target's whole law", verify, "_remaining_law", mutants._target_again, "law"),
    Fault("filters on the draft alone", Laws, "_law", _unfiltered_target, "law", NUCLEUS),
    Fault(
        "draft law declared 5 % uniform",
        drafters.ModelDrafter,
        "propose",
        mutants._declares_mixture,
        "drafts",
    ),
    Fault("stale target cache", RaggedCache, "update", mutants._keeps_stale, "law"),
]


@dataclass
class TransformersSampler:
    """transformers' `generate` with an assistant of another tokenizer, one text at a time.

    The assistant gets a token that the target lacks, as the draft of a real pair has: without one,
    transformers 5.23 ends in an AttributeError. `generate` changes the assistant, hence the copies.
    """

    name: str = "transformers"
    _models: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        for role, name in (("target", "demo"), ("assistant", "demo_bytes")):
            folder = SHIPPED_FOLDER / name
            self._models[role] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self._models[role + "_tokens"] = AutoTokenizer.from_pretrained(folder)
        self._models["assistant_tokens"].add_tokens(["<the draft's alone>"])
        settings = self._models["assistant"].generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 3, "constant"

    def texts(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        return [self._text(prompt, max_new_tokens) for prompt in prompts]

    def _text(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        torch.manual_seed(prompt_key(prompt.id) >> 1)
        ids = torch.tensor([prompt.token_ids])
        text = self._models["target"].generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=max_new_tokens, pad_token_id=0,
            assistant_model=copy.deepcopy(self._models["assistant"]), tokenizer=self._models["target_tokens"],
            assistant_tokenizer=copy.copy(self._models["assistant_tokens"]),
        )  # fmt: skip
        new: list[int] = text[0, ids.shape[1] :].tolist()
        return new


def certified(*overrides: str) -> dict[str, Any]:
    """The summary of a run of the command in this process, with its exit code."""
    said = io.StringIO()
    with patch.object(sys, "argv", ["llama-ssp", "task=certify", "out=null", "output=json", *overrides]):
        code = 0
        try:
            with redirect_stdout(said):
                cli.main()
        except SystemExit as left:
            code = int(left.code or 0)
    return {**json.loads(said.getvalue().splitlines()[-1]), "exit_code": code}


@contextmanager
def black_box(sampler: Any) -> Iterator[None]:
    """The command judges this sampler instead, by its texts alone."""
    real = certify.check_samples

    def replaced(_: Any, *others: Any) -> Any:
        return real(sampler, *others)

    with patch.object(certify, "check_samples", replaced):
        yield


def main() -> None:
    runs: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
        (fault.name, fault.planted, fault.overrides) for fault in FAULTS
    ]
    runs.append(("transformers, another tokenizer", lambda: black_box(TransformersSampler()), ()))
    wanted = sys.argv[1:]
    print("| fault | verdict | exit | failed checks | CPU s |\n|---|---|---|---|---|")
    for name, planted, overrides in runs:
        if wanted and not any(word in name for word in wanted):
            continue
        began = time.process_time()
        with planted():
            found = certified("seed=1", *overrides)
        failed = [f"{c['name']}: {c['says']}" for c in found["checks"] if c["outcome"] == "failed"]
        seconds = time.process_time() - began
        print(f"| {name} | {found['verdict']} | {found['exit_code']} | {'; '.join(failed)} | {seconds:.0f} |",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
