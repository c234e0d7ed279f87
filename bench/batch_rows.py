"""Tokens/s of a batch job at several numbers of rows, beside a plain loop over transformers' generate.

    python bench/batch_rows.py [rows=1,4,8,32] [prompts=64] [words=2,4,...,120] [new=4,8,...,128] [repeats=2]
                               [theirs=bf16] [write=FILE.md] [any override]

One process, one pair, the same prompts of mixed length, longest first. Contenders take turns, so other load
on the machine affects all of them; ratios are computed within a turn. With 8 rows (or the most below) ours
also runs without refilling: each batch waits for its last text. K is chosen once, as when a job begins; the
same runs without drafts, too. The plain loop pads each batch on the left, and generates as many tokens as its
longest text wants; what others do not want is not counted. The exit code is 1 if these rows bring less than
2.5x of one, or refilling less than 1.3x of waiting in the input's order.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from surroundings import report  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from bench.words import divided  # noqa: E402
from llama_ssp.config import Dtype, RunConf  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.models.devices import TORCH_DTYPES  # noqa: E402
from llama_ssp.models.loader import load_module  # noqa: E402
from llama_ssp.pair.assembly import engine_for  # noqa: E402
from llama_ssp.pair.requests import TokenRequest  # noqa: E402
from llama_ssp.pair.run import Run, RunSettings  # noqa: E402
from llama_ssp.pair.session import PairSession  # noqa: E402
from llama_ssp.placing.pairs import pair_specs  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402
from llama_ssp.speculative.draft_length import DraftLength, FixedDraftLength  # noqa: E402
from llama_ssp.speculative.state import Prompt  # noqa: E402
from llama_ssp.text.tokenizer import Tokens  # noqa: E402

WORDS = [
    "def", "class", "import", "return", "for", "while", "if", "else", "try", "with", "lambda", "print",
    "range", "len", "self", "None", "True", "False", "x", "y", "z", "data", "items", "value", "index",
]  # fmt: skip
OWN = {
    "prompts": "64", "rows": "1,4,8,32", "repeats": "2", "words": "2,4,8,16,32,64,120",
    "new": "4,8,16,24,32,64,128", "theirs": "", "write": "",
}  # fmt: skip
MAIN = 8  # rows that the bars are about
ROWS_BAR, REFILL_BAR = 2.5, 1.3


def main() -> None:
    own, overrides = divided(OWN, sys.argv[1:])
    entry = pair_specs(composed(["task=batch", *overrides]), [], 1)[0]
    sizes = sorted({1, *map(int, own["rows"].split(","))})
    pair, run, main_rows = PairSession(entry), entry.run, max(n for n in sizes if n <= MAIN)
    words, new = (list(map(int, own[key].split(","))) for key in ("words", "new"))
    works = mixed(int(own["prompts"]), words, new, pair.tokens, run)
    pair.load(sizes[-1], max(work.longest for work in works))
    placed = pair.placements.target
    dtype = Dtype.bf16 if placed.dtype is Dtype.packed else placed.dtype
    dtype = Dtype(own["theirs"]) if own["theirs"] else dtype
    if placed.path is not None and placed.path.suffix == ".gguf":
        how: Any = {"gguf_file": placed.path.name, "dtype": TORCH_DTYPES[dtype]}
        module = AutoModelForCausalLM.from_pretrained(placed.path.parent, **how)
    else:
        module = load_module(placed.model, placed.path, dtype, placed.device, placed.role)
    ordered = sorted(works, key=lambda work: -work.longest)
    waiting = f"{main_rows} rows, waiting, in input order"
    contenders: dict[str, Callable[[], float]] = {}
    costs = {}
    for n in sizes:
        pair.rows = n
        pair.measure_costs([work.prompt for work in works[:n]])
        costs[n] = pair.costs.k_for_all if pair.costs else run.speculation.longest
        contenders[named(n)] = partial(pace, pair, [ordered], n, partial(FixedDraftLength, costs[n]))
        if run.drafter_name:
            contenders[f"{named(n)}, no drafts"] = partial(
                pace, pair, [ordered], n, partial(FixedDraftLength, 0)
            )
        theirs = partial(by_transformers, module, pair, dealt(ordered, n))
        contenders[f"{named(n, '')}, transformers"] = theirs
    pair.settle()
    usual = partial(FixedDraftLength, costs[main_rows])
    contenders[waiting] = partial(pace, pair, dealt(works, main_rows), main_rows, usual)
    sooner = partial(pace, pair, dealt(ordered, main_rows), main_rows, usual)
    contenders[f"{main_rows} rows, waiting, longest first"] = sooner
    for rows in (1, 2):  # what is compiled or allocated once
        pace(pair, [ordered[-rows:]], rows, usual)
        by_transformers(module, pair, [ordered[-rows:]])
    turns = [
        {name: contender() for name, contender in contenders.items()} for _ in range(int(own["repeats"]))
    ]
    by_rows = median(turn[named(main_rows)] / turn[named(1)] for turn in turns)
    by_refill = median(turn[named(main_rows)] / turn[waiting] for turn in turns)
    met = by_rows >= ROWS_BAR and by_refill >= REFILL_BAR
    report(
        own["write"], f"Rows of a batch job: {len(works)} prompts of mixed length", pair.models.devices,
        f"{run.model.name} with {run.drafter_name or 'no draft'}, K by rows {costs}; "
        f"transformers in {dtype.value}; prompts of {words[0]} to {words[-1]} words, {new[0]} to {new[-1]} "
        "new tokens; texts end by themselves, too.",
        f"Medians of {len(turns)} turns. {main_rows} rows over one: {by_rows:.2f}x (asked: "
        f"{ROWS_BAR}x); refilled over waiting, in input order: {by_refill:.2f}x (asked: {REFILL_BAR}x).",
        "Faster: than transformers' generate over padded batches of as many rows, without a draft.", "",
        "```", *table(turns), "```",
    )  # fmt: skip
    sys.exit(0 if met else 1)


def named(rows: int, how: str = ", refilled") -> str:
    return f"{rows} row{'s' * (rows > 1)}{how if rows > 1 else ''}"


def mixed(count: int, words: list[int], new: list[int], tokens: Tokens, run: RunConf) -> list[TokenRequest]:
    """Prompts and lengths drawn with a fixed seed."""
    drawn = random.Random(0)
    works = []
    for index in range(count):
        text = " ".join(drawn.choice(WORDS) for _ in range(drawn.choice(words)))
        prompt = Prompt(str(index), tuple(tokens.encode(text)))
        works.append(
            TokenRequest(
                index=index,
                prompt=prompt,
                sampling=run.sampling,
                max_new_tokens=drawn.choice(new),
                stop=(),
            )
        )
    return works


def dealt(works: list[TokenRequest], rows: int) -> list[list[TokenRequest]]:
    return [works[first : first + rows] for first in range(0, len(works), rows)]


def pace(
    pair: PairSession, batches: list[list[TokenRequest]], rows: int, lookahead: Callable[[int], DraftLength]
) -> float:
    """Tokens a second, prefill included."""
    run, tokens = pair.run, pair.tokens
    engine = engine_for(pair.models, run, tokens, tokens.end_ids, 1)
    settings = RunSettings(
        rows=rows, lookahead=lookahead, ends=tokens.end_ids, decode=tokens.decode, is_clocked=False
    )
    began, written = time.perf_counter(), 0
    for batch in batches:
        written += sum(len(text.token_ids) for text in Run(engine, batch, settings).ended())
    return written / (time.perf_counter() - began)


def by_transformers(module: Any, pair: PairSession, batches: list[list[TokenRequest]]) -> float:
    """Tokens a second of `generate` on padded batches, prefill included; each request's own tokens count."""
    ends, heat = sorted(pair.tokens.end_ids), pair.run.sampling.controls.temperature
    how = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {"do_sample": False}
    began, written = time.perf_counter(), 0
    for batch in batches:
        longest = max(len(work.prompt.token_ids) for work in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, work in zip(ids, batch, strict=True):
            row[longest - len(work.prompt.token_ids) :] = torch.tensor(work.prompt.token_ids)
        lengths = torch.tensor([[len(work.prompt.token_ids)] for work in batch])
        mask = (torch.arange(longest) >= longest - lengths).long()
        made = module.generate(
            ids.to(module.device), attention_mask=mask.to(module.device), eos_token_id=ends or None,
            max_new_tokens=max(work.max_new_tokens for work in batch), pad_token_id=0, **how,
        )  # fmt: skip
        for row, work in zip(made[:, longest:].tolist(), batch, strict=True):
            own = row[: work.max_new_tokens]
            written += next((n + 1 for n, token in enumerate(own) if token in ends), len(own))
    return written / (time.perf_counter() - began)


def table(turns: list[dict[str, float]]) -> list[str]:
    """Medians, and our ratios to transformers at as many rows."""
    lines = [["contender", "tokens/s", "faster", "least..most"]]
    for name in turns[0]:
        line = [name, f"{median(turn[name] for turn in turns):.0f}", "", ""]
        other = f"{name.partition(',')[0]}, transformers"
        if name != other:
            ratios = [turn[name] / turn[other] for turn in turns]
            line[2:] = [f"{median(ratios):.2f}x", f"{min(ratios):.2f}..{max(ratios):.2f}"]
        lines.append(line)
    return aligned(lines, 1)


if __name__ == "__main__":
    main()
