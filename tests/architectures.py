"""Compares a tiny model of every causal architecture of transformers with transformers' own greedy text.

`python -m tests.architectures` prints a line for each, with names a line for each of those. A draft, which is
a copy of the model with noise on its weights, drafts for three prompts of different lengths.
"""

import copy
import sys
import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from llama_ssp.errors import ModelError
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.loader import tried
from llama_ssp.speculative.state import Prompt
from tests.families import VOCAB, greedy_text, runnable, tiny
from tests.rig import perturbed, speculate

LENGTHS, NEW, K = (2, 26, 9), 32, 4  # tokens of prompts, new tokens (beyond every tiny window), drafts
EQUAL, OTHER, REFUSED, UNBUILT = OUTCOMES = "same text", "another text", "refused", "not built"


@dataclass(frozen=True)
class Finding:
    """The result for one architecture: `note` is the reason, or the drafted and accepted tokens."""

    architecture: str
    outcome: str
    note: str

    def __str__(self) -> str:
        return f"{self.architecture:30}  {self.outcome:12}  {' '.join(self.note.split())[:200]}"


def examine(architecture: str) -> Finding:
    """Builds a tiny model, runs the program's checks, and compares its texts with transformers' own."""
    try:
        module = tiny(architecture)
    except Exception as error:  # constructors fail in any way
        return Finding(architecture, UNBUILT, f"{type(error).__name__}: {error}")
    reference = copy.deepcopy(module)
    try:
        model = runnable(module, architecture)
        if isinstance(model, CausalModel):
            tried(model)
        draft = runnable(perturbed(copy.deepcopy(reference), 0.02), architecture)
    except ModelError as error:
        return Finding(architecture, REFUSED, str(error).partition("; choose another architecture")[0])
    generator = torch.Generator().manual_seed(1)
    texts = [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in LENGTHS]
    prompts = [Prompt(str(number), text) for number, text in enumerate(texts)]
    run = speculate(model, prompts, draft, k=K, max_new=NEW, chunk=11)
    same = run.texts == [greedy_text(reference, text, NEW) for text in texts]
    note = f"{run.accepted} of {run.drafted} drafts accepted"
    return Finding(architecture, EQUAL if same else OTHER, note)


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    outcomes = Counter[str]()
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            finding = examine(name)
        except Exception as error:
            finding = Finding(name, OTHER, f"{type(error).__name__}: {error}")
        outcomes[finding.outcome] += 1
        print(finding, flush=True)
    print("\n" + ", ".join(f"{outcome}: {outcomes[outcome]}" for outcome in OUTCOMES))
    return int(outcomes[OTHER] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
