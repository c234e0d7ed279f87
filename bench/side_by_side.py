"""Regular and speculative sampling against transformers' own generate, in one interleaved run.

    python bench/side_by_side.py [the overrides of launch/run.py] [repeats=5] [ks=2,4,8] [write=FILE.md]
    python bench/side_by_side.py temperatures=0,0.5,1 ks=2,4,6,8,12     # the best K of each, and its speed-up

task=measure cannot compare our regular sampling with another program's; this benchmark does. Every repeat
runs each contender once, in turn, on the same prompts. Ratios are computed within a repeat and the table has
their median, so that a machine with drifting speed favours none. Times are decoding only: our loop prefills
before the clock starts. `generate` prefills itself, so its time for one token is subtracted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from bars import Bar, bars_table  # noqa: E402
from contenders import texts_run  # noqa: E402
from surroundings import report  # noqa: E402

from bench.words import divided  # noqa: E402
from llama_ssp.config import Drafting, RunConf  # noqa: E402
from llama_ssp.config.arguments import in_full  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.models.loader import load_module  # noqa: E402
from llama_ssp.pair.assembly import RankModels  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.placing.pairs import pair_specs  # noqa: E402
from llama_ssp.report.run_folder import versions  # noqa: E402
from llama_ssp.speculative.draft_length import FixedDraftLength  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.speculative.stats import Counts  # noqa: E402

REGULAR, THEIRS = "regular (K = 0)", "transformers generate"
BEST_OVER_REGULAR, REGULAR_OVER_THEIRS = 1.5, 1.0  # the least that is asked of the pair that ships
Turn = Callable[[int], tuple[float, Counts]]
PROMPTS = [
    "def hello(name):",
    "The capital of France is",
    "class Stack:\n    def push(self, item):",
    "for i in",
]


def main() -> None:
    own = {"repeats": "5", "ks": "2,4,8", "write": "", "new": "96", "temperatures": ""}
    own, overrides = divided(own, sys.argv[1:])
    run = composed(in_full(overrides))
    entry = pair_specs(run, [], 1)[0]
    run, new = entry.run, int(own["new"])
    pair = PairSession(entry).load(1, 256 + new)
    usual = run.sampling.controls.temperature
    asked = [float(heat) for heat in own["temperatures"].split(",") if heat] or [usual]
    runs = {heat: replace(run, sampling=replace(run.sampling, temperature=heat)) for heat in asked}
    ks = [int(k) for k in own["ks"].split(",")]
    placed = pair.placements.target
    module = load_module(placed.model, placed.path, placed.dtype, placed.device, placed.role)
    works = {heat: contenders(pair, module, own_run, new, ks) for heat, own_run in runs.items()}
    found = measured(works, int(own["repeats"]))
    write_table(own["write"], found, run, pair.models, new)
    rows = [{"temperature": heat, **row} for heat, own_rows in found.items() for row in own_rows]
    print(json.dumps({"rows": rows, "versions": versions()}))


def contenders(pair: PairSession, module: Any, run: RunConf, new: int, ks: list[int]) -> dict[str, Turn]:
    """All contenders at a temperature; `module` is transformers' own of the target."""
    found: dict[str, Turn] = {
        THEIRS: lambda i: by_transformers(pair, module, run, new, i),
        REGULAR: lambda i: by_us(pair, run, new, i, 0),
    }
    for k in ks:
        found[f"speculative, K = {k}"] = lambda i, k=k: by_us(pair, run, new, i, k)
    return found


def measured(works: dict[float, dict[str, Turn]], repeats: int) -> dict[float, list[dict]]:
    """Milliseconds a token and ratios to regular sampling, after one repeat that does not count."""
    names = [(heat, name) for heat, own in works.items() for name in own]
    times: dict[tuple[float, str], list[float]] = {name: [] for name in names}
    counts = {name: Counts() for name in names}
    for repeat in range(repeats + 1):
        for heat, name in names:
            ms, seen = works[heat][name](repeat)
            if repeat:
                times[heat, name].append(ms)
                counts[heat, name].merge(seen)
    return {
        heat: [summed_up(name, times[heat, name], times[heat, REGULAR], counts[heat, name]) for name in own]
        for heat, own in works.items()
    }


def summed_up(name: str, taken: list[float], regular: list[float], counts: Counts) -> dict:
    """A contender's figures."""
    ratios, counted = [r / t for r, t in zip(regular, taken, strict=True)], counts.summary()
    return {
        "name": name,
        "ms_per_token": median(taken),
        "faster_than_regular": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "acceptance_rate": counted["acceptance_rate"],
        "tokens_per_target_forward": counted["tokens_per_target_forward"],
    }


def by_us(
    pair: PairSession, run: RunConf, new: int, seed: int, k: int, texts: Sequence[str] = PROMPTS
) -> tuple[float, Counts]:
    """Milliseconds a token of our loop, one prompt after the other, no early end."""
    drafter = run.speculation.drafter if k else Drafting.none
    spec = replace(run.speculation, k=k, drafter=drafter)
    counts, spent = Counts(), 0.0
    for number, text in enumerate(texts):
        prompt = Prompt(str(number), tuple(pair.tokens.encode(text)))
        fixed_k = partial(FixedDraftLength, k)
        text_run = texts_run(pair, replace(run, speculation=spec), [prompt], new, seed, fixed_k)
        for _ in text_run.rounds():
            pass
        counts.merge(text_run.counts)
        spent += text_run.counts.decode_s
    return 1000 * spent / (new * len(texts)), counts


def by_transformers(
    pair: PairSession, module: Any, run: RunConf, new: int, seed: int
) -> tuple[float, Counts]:
    """Milliseconds a token of `generate` with the same weights and temperature."""
    heat = run.sampling.controls.temperature
    how = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {"do_sample": False}
    spent = 0.0
    for text in PROMPTS:
        ids = torch.tensor([pair.tokens.encode(text)], device=module.device)
        for length, sign in ((1, -1), (new + 1, 1)):
            began = time.perf_counter()
            module.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=length, max_new_tokens=length,
                eos_token_id=None, pad_token_id=0, **how,
            )  # fmt: skip
            spent += sign * (time.perf_counter() - began)
    return 1000 * spent / (new * len(PROMPTS)), Counts()


def write_table(place: str, found: dict[float, list[dict]], run: RunConf, pair: RankModels, new: int) -> None:
    """Prints and writes the results file."""
    draft = run.draft.name if run.draft else "none"
    lines = [
        f"Batch 1, {len(PROMPTS)} prompts, {new} new tokens.",
        "Ratios are medians over interleaved repeats, with the least and the most.",
        "",
    ]
    if len(found) > 1:
        lines += ["At the best K of each temperature, by the median of the same repeats:", "", *HEAD]
        lines += [
            line(heat, min(speculative(rows), key=lambda row: row["ms_per_token"]))
            for heat, rows in found.items()
        ]
        lines += ["", "All of them:", ""]
    lines += [*HEAD, *(line(heat, row) for heat, rows in found.items() for row in rows)]
    asked = [bar for heat, rows in found.items() for bar in required(heat, rows)]
    title = f"{run.model.name} with {draft}: regular, speculative, transformers"
    report(place, title, pair.devices, *lines, "", "```", *bars_table(asked), "```")


def required(heat: float, rows: list[dict]) -> list[Bar]:
    """What is asked at a temperature."""
    theirs = next(row for row in rows if row["name"] == THEIRS)
    best = min(speculative(rows), key=lambda row: row["ms_per_token"])
    slower, faster = 1 / theirs["faster_than_regular"], best["faster_than_regular"]
    return [
        Bar(f"T = {heat:g}: regular over transformers'", slower, REGULAR_OVER_THEIRS),
        Bar(f"T = {heat:g}: {best['name']}, over regular", faster, BEST_OVER_REGULAR),
    ]


HEAD = (
    "| T | contender | ms/token | faster than regular | least..most | accepted | tokens/forward |",
    "|---|---|---|---|---|---|---|",
)


def speculative(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["name"].startswith("speculative")]


def line(heat: float, row: dict) -> str:
    rate, per = row["acceptance_rate"], row["tokens_per_target_forward"]
    return (
        f"| {heat:g} | {row['name']} | {row['ms_per_token']:.2f} | {row['faster_than_regular']:.2f}x "
        f"| {row['least']:.2f}..{row['most']:.2f} | {'' if rate is None else f'{rate:.2f}'} "
        f"| {'' if per is None else f'{per:.2f}'} |"
    )


if __name__ == "__main__":
    main()
