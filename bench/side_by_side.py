"""Regular and speculative sampling beside transformers' own generate, in one interleaved run.

    python bench/side_by_side.py [the overrides of launch/run.py] [repeats=5] [ks=2,4,8] [write=FILE.md]

What task=measure cannot say: how our regular sampling stands beside another program's. Every repeat runs
each contender once, in turn, on the same prompts; ratios are taken within a repeat and their median is
reported, so that a machine whose speed drifts does not favour anyone. Times are decoding only: prompts are
read before the clock starts, except in `generate`, which reads them itself (its time for one token is taken
off).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from surroundings import surroundings, write  # noqa: E402

from llama_ssp.checks import to_run  # noqa: E402
from llama_ssp.config import Drafting, RunConf, register  # noqa: E402
from llama_ssp.engine import Prompt  # noqa: E402
from llama_ssp.entries import entries  # noqa: E402
from llama_ssp.load.tokens import Tokens  # noqa: E402
from llama_ssp.lookahead import FixedLookahead  # noqa: E402
from llama_ssp.loop import Limits  # noqa: E402
from llama_ssp.metrics import Counts  # noqa: E402
from llama_ssp.overrides import CONF  # noqa: E402
from llama_ssp.report import versions  # noqa: E402
from llama_ssp.tasks.pair import Pair, engine_for, open_pair  # noqa: E402
from llama_ssp.tasks.seats import seats, tokens_of  # noqa: E402
from llama_ssp.tasks.timed import TimedRun  # noqa: E402

PROMPTS = [
    "def hello(name):",
    "The capital of France is",
    "class Stack:\n    def push(self, item):",
    "for i in",
]


def main() -> None:
    own = {"repeats": "5", "ks": "2,4,8", "write": "", "new": "96"}
    overrides = []
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key in own:
            own[key] = value
        else:
            overrides.append(argument)
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = to_run(compose("run", overrides))
    entry = entries(run, [], 1)[0]
    run, found = entry.run, seats(entry)
    tokens = tokens_of(found)
    new = int(own["new"])
    pair = open_pair(found, run, 1, 256 + new)
    contenders: dict[str, Callable[[int], tuple[float, Counts]]] = {
        "transformers generate": lambda i: by_transformers(pair, run, tokens, new, i),
        "regular (K = 0)": lambda i: by_us(pair, run, tokens, new, i, 0),
    }
    for k in map(int, own["ks"].split(",")):
        contenders[f"speculative, K = {k}"] = lambda i, k=k: by_us(pair, run, tokens, new, i, k)
    rows = measured(contenders, int(own["repeats"]))
    text = table(rows, run, pair)
    print(text)
    print(json.dumps({"rows": rows, "versions": versions()}))
    if own["write"]:
        write(own["write"], text)


def measured(contenders: dict[str, Callable[[int], tuple[float, Counts]]], repeats: int) -> list[dict]:
    """Milliseconds a token and ratios to regular sampling, after one repeat that does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    counts: dict[str, Counts] = {name: Counts() for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            ms, seen = contender(repeat)
            if repeat:
                times[name].append(ms)
                counts[name] = seen
    regular = times["regular (K = 0)"]
    return [
        {
            "name": name,
            "ms_per_token": median(taken),
            "faster_than_regular": median(r / t for r, t in zip(regular, taken, strict=True)),
            "least": min(r / t for r, t in zip(regular, taken, strict=True)),
            "most": max(r / t for r, t in zip(regular, taken, strict=True)),
            "acceptance_rate": counts[name].summary()["acceptance_rate"],
            "tokens_per_target_forward": counts[name].summary()["tokens_per_target_forward"],
        }
        for name, taken in times.items()
    ]


def by_us(pair: Pair, run: RunConf, tokens: Tokens, new: int, seed: int, k: int) -> tuple[float, Counts]:
    """Milliseconds a token of our loop, one prompt after the other, no early end."""
    spec = replace(run.speculation, k=k, drafter=run.speculation.drafter if k else Drafting.none)
    plain = replace(pair, draft=pair.draft if k else None)
    counts, spent = Counts(), 0.0
    for number, text in enumerate(PROMPTS):
        engine = engine_for(plain, replace(run, speculation=spec), tokens, frozenset(), seed, 512)
        timed = TimedRun(engine, [Prompt(str(number), tuple(tokens.encode(text)))], new)
        for _ in timed.rounds(Limits(new), FixedLookahead(k, 1)):
            pass
        counts.merge(timed.counts)
        spent += timed.decode_s
    return 1000 * spent / (new * len(PROMPTS)), counts


def by_transformers(pair: Pair, run: RunConf, tokens: Tokens, new: int, seed: int) -> tuple[float, Counts]:
    """Milliseconds a token of `generate` on the same module with the same temperature."""
    heat = run.sampling.temperature
    how = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {"do_sample": False}
    spent = 0.0
    for text in PROMPTS:
        ids = torch.tensor([tokens.encode(text)], device=pair.target.device)
        for length, sign in ((1, -1), (new + 1, 1)):
            began = time.perf_counter()
            pair.target.module.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=length, max_new_tokens=length,
                eos_token_id=None, pad_token_id=0, **how,
            )  # fmt: skip
            spent += sign * (time.perf_counter() - began)
    return 1000 * spent / (new * len(PROMPTS)), Counts()


def table(rows: list[dict], run: RunConf, pair: Pair) -> str:
    """A results file that needs nothing beside it."""
    draft = run.draft.name if run.draft else "none"
    lines = [
        f"# {run.model.name} with {draft}: regular, speculative, transformers",
        "",
        *surroundings(pair.devices),
        f"Batch 1, {len(PROMPTS)} prompts.",
        "Ratios are medians over interleaved repeats, with the least and the most.",
        "",
        "| contender | ms/token | faster than regular | least..most | accepted | tokens/forward |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate, per = row["acceptance_rate"], row["tokens_per_target_forward"]
        lines.append(
            f"| {row['name']} | {row['ms_per_token']:.2f} | {row['faster_than_regular']:.2f}x "
            f"| {row['least']:.2f}..{row['most']:.2f} | {'' if rate is None else f'{rate:.2f}'} "
            f"| {'' if per is None else f'{per:.2f}'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
