"""Compares a tiny model of every causal architecture of transformers with transformers' own greedy text.

`python -m tests.architectures` writes a file in bench/results, or `write=FILE`; with names it only prints the
results of those.
"""

from __future__ import annotations

import copy
import re
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from bench.surroundings import surroundings
from llama_ssp.errors import ModelError
from llama_ssp.models.causal_lm import CausalModel
from llama_ssp.models.families import TESTED_FAMILIES
from llama_ssp.models.loader import tried
from llama_ssp.speculative.state import Prompt
from tests.families import VOCAB, runnable, tiny
from tests.rig import perturbed, speculate

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
DOC = RESULTS / "architectures_epyc-2-cores_202611.md"
LENGTHS, NEW, K = (2, 26, 9), 32, 4  # tokens of prompts, new tokens (beyond every tiny window), drafts
EQUAL, OTHER, REFUSED, UNBUILT = "equal", "other", "refused", "not built"


@dataclass(frozen=True)
class Finding:
    """The result for one architecture: `note` is the reason, or the drafted and accepted tokens."""

    architecture: str
    outcome: str
    note: str


def examine(architecture: str, **changes: Any) -> Finding:
    """Builds a tiny model, runs the program's checks, and compares its texts with transformers' own."""
    try:
        module = tiny(architecture, **changes)
    except Exception as error:  # constructors fail in any way
        return Finding(architecture, UNBUILT, _line(error))
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
    same = [written == own(reference, text) for written, text in zip(run.texts, texts, strict=True)]
    figures = f"{run.drafted} | {run.accepted}"
    return Finding(architecture, EQUAL if all(same) else OTHER, figures)


def own(module: Any, ids: tuple[int, ...]) -> list[int]:
    """The greedy tokens of transformers' generate after one prompt alone."""
    prompt = torch.tensor([ids])
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    text = module.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    return text[0, len(ids) :].tolist()


def _line(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error)) or type(error).__name__
    return text if len(text) < 160 else text[:157] + "..."


def document(findings: list[Finding], head: list[str]) -> str:
    """Returns the file: equal texts, refused architectures with reasons, and what was not tried."""
    found = {kind: [f for f in findings if f.outcome == kind] for kind in (EQUAL, OTHER, REFUSED, UNBUILT)}
    lines = [
        "# Which architectures run",
        "",
        "    python -m tests.architectures            # writes this file",
        "    python -m tests.architectures llama      # prints the result of one architecture",
        "",
        "The command builds a tiny random model of each causal architecture of the installed",
        "transformers, in fp32. One batch has three prompts, of "
        f"{', '.join(map(str, LENGTHS))} tokens; each gets {NEW} new tokens.",
        f"The draft is a copy of the model with noise on its weights; it drafts {K} tokens a round.",
        "The greedy texts must equal those of transformers' own `generate`, one prompt at a time.",
        "",
        *(f"{line}  " for line in head),
        "",
        f"* **{len(found[EQUAL])}** architectures give the same text.",
        f"* **{len(found[OTHER])}** give another text.",
        f"* **{len(found[REFUSED])}** are refused before any output.",
        f"* **{len(found[UNBUILT])}** were not tried.",
        "",
        "## The same text",
        "",
        "`tested`: the tests also compare other batches, drafts and settings, and certify the architecture.",
        "",
        "| architecture | drafted | accepted | |",
        "|---|---|---|---|",
        *(f"| {row_of(f)} |" for f in found[EQUAL]),
    ]
    if found[OTHER]:
        lines += ["", "## Another text", "", "| architecture | drafted | accepted | |", "|---|---|---|---|"]
        lines += [f"| {row_of(f)} |" for f in found[OTHER]]
    for title, kind in (("Refused", REFUSED), ("Not tried: no tiny model could be built", UNBUILT)):
        lines += ["", f"## {title}", "", "| architecture | why |", "|---|---|"]
        lines += [f"| {f.architecture} | {f.note.replace('|', '/')} |" for f in found[kind]]
    return "\n".join(lines) + "\n"


def row_of(finding: Finding) -> str:
    """The table row of an architecture that generates text."""
    tested = "tested" if finding.architecture in TESTED_FAMILIES else ""
    return f"{finding.architecture} | {finding.note} | {tested}"


def main(words: list[str]) -> int:
    names = [word for word in words if not word.startswith("write=")]
    place = next((Path(word.removeprefix("write=")) for word in words if word not in names), DOC)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    began, findings = time.perf_counter(), []
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            found = examine(name)
        except Exception as error:
            found = Finding(name, OTHER, f"{type(error).__name__}: {_line(error)} | ")
        findings.append(found)
        print(f"{found.architecture}: {found.outcome}: {found.note}", file=sys.stderr, flush=True)
    if not names:
        _, *head = surroundings({"model": "cpu"})
        took = f"Command: `python -m tests.architectures`, {time.perf_counter() - began:.0f} s"
        place.write_text(document(findings, [took, *head]), encoding="utf-8")
    return int(any(found.outcome == OTHER for found in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
